"""Triton without a GPU: the driver that its interpreter needs, and a check that it ran a kernel."""

import functools
import inspect
import time
from dataclasses import replace

from triton import language
from triton.backends.driver import DriverBase
from triton.runtime import Config, driver, interpreter
from triton.runtime.interpreter import GridExecutor, InterpretedFunction


class HostDriver(DriverBase):
    """Lets triton.autotune choose among configurations in the interpreter; no GPU is there for other requests."""

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("nothing is compiled in Triton's interpreter")

    def get_current_target(self):
        raise NotImplementedError("there is no GPU in Triton's interpreter")

    def get_active_torch_device(self):
        import torch

        return torch.device("cpu")

    def get_benchmarker(self):
        return lambda kernel_call, *, quantiles, **_: [_seconds(kernel_call)] * len(quantiles)


def _seconds(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


_finished = []  # kernels that ran to their end in this process


def install() -> None:
    """Give the interpreter its driver, and see which kernels it runs."""
    driver.set_active(HostDriver())
    # Triton 3.2 would pass a kernel the options of an autotuner's Config that its interpreter does not know.
    reserved = getattr(interpreter, "RESERVED_KWS", [])
    reserved += [name for name in Config({}).all_kwargs() if name not in reserved]
    builder = interpreter.interpreter_builder
    if not builder.options.debug:  # it would compute whether whole numbers overflow, and assert nothing
        builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_builtin = patch_builtins
    interpreter._get_np_dtype = numpy_dtype
    launch = GridExecutor.__call__

    def noted(self, *arguments, **options) -> None:
        launch(self, *arguments, **options)
        _finished.append(self.fn)

    GridExecutor.__call__ = noted


def patch_builtins(package, *rest) -> None:
    """What Triton's function of this name does at each launch, and at each call of a function inside a kernel: let the
    interpreter run the operations of a module or class of triton.language. It does not look for them anew.
    rest: as that function gives them on."""
    for name, member in _operations(package):
        if getattr(package, name) is member:  # else it is the interpreter's already
            interpreter._patch_attr(package, name, member, *rest)


@functools.cache
def _operations(package) -> list[tuple[str, object]]:
    return [(name, member) for name, member in inspect.getmembers(package) if language.core.is_builtin(member)]


_numpy_dtype = interpreter._get_np_dtype
_numpy_dtype_of_scalar = functools.cache(_numpy_dtype)  # it makes its table of types at each call


def numpy_dtype(dtype):
    """What Triton's `_get_np_dtype` says: numpy's type for one of triton.language."""
    element = dtype.element_ty if isinstance(dtype, language.block_type) else dtype
    return (_numpy_dtype if isinstance(element, language.pointer_type) else _numpy_dtype_of_scalar)(element)


def none_ran(module) -> bool:
    """Does a kernel's module define Triton kernels of which none ran? (On a GPU the profiler's kernel names answer
    this.)"""
    return not _finished and any(isinstance(_innermost(value), InterpretedFunction) for value in vars(module).values())


def _innermost(value):
    """The kernel inside autotuners and heuristics."""
    while not isinstance(value, InterpretedFunction) and hasattr(value, "fn") and value.fn is not value:
        value = value.fn
    return value
