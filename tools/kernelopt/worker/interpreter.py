"""Triton without a GPU: the driver that its interpreter needs, and a check that it ran a kernel."""

import functools
import inspect
import time
from collections.abc import Callable
from dataclasses import replace

import numpy
import torch
from triton import language
from triton.backends.driver import DriverBase
from triton.language import semantic
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
        return torch.device("cpu")

    def get_benchmarker(self):
        return lambda kernel_call, *, quantiles, **_: [_seconds(kernel_call)] * len(quantiles)


def _seconds(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


NARROW = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2, "bf16": torch.bfloat16}
WIDE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
_convert = interpreter._convert_float


def rounded(values: numpy.ndarray, source, target, mode) -> numpy.ndarray:
    """The bits of floating numbers in `target`, a narrower format, rounded to nearest as a GPU does; 8-bit numbers end
    at the largest one.

    Triton's own conversion loses the carry of a mantissa (127.6 becomes 64 in e4m3), cuts off subnormal 8-bit numbers
    and truncates to bf16."""
    narrow = NARROW.get(target.name)
    wide = WIDE.get(source.name)
    if not narrow or not wide or wide.itemsize <= narrow.itemsize or mode == interpreter._ir.ROUNDING_MODE.RTZ:
        return _convert(values, source, target, mode)
    bits = numpy.ascontiguousarray(values).view(f"int{8 * wide.itemsize}")
    numbers = torch.from_numpy(bits).view(wide)
    if narrow.itemsize == 1:
        numbers = numbers.clamp(torch.finfo(narrow).min, torch.finfo(narrow).max)
    bits = numbers.to(narrow).view(torch.uint8 if narrow.itemsize == 1 else torch.int16)
    return bits.numpy().view(f"uint{8 * narrow.itemsize}").reshape(values.shape)


def with_its_mask(function: Callable) -> Callable:
    """A function of Triton 3.2's `semantic` that asks `if not mask` whether there is a mask: of one element that is
    False, the interpreter says that there is none, and the kernel writes."""

    def wrapped(*arguments):
        value_of = vars(language.tensor).get("__bool__")
        if value_of is None:  # the compiler calls it
            return function(*arguments)
        language.tensor.__bool__ = lambda _: True
        try:
            return function(*arguments)
        finally:
            language.tensor.__bool__ = value_of

    return wrapped


_patch_tensor = interpreter._patch_lang_tensor


def patch_tensor(tensor, *scope) -> None:
    """Triton's `_patch_lang_tensor`, whose loops to a loaded number fail with NumPy 2.4 and Triton before 3.7."""
    _patch_tensor(tensor, *scope)
    tensor.__index__ = whole_number


def whole_number(tensor) -> int:
    """The number that a tensor of one element holds."""
    return int(tensor.handle.data.item())


_finished = []  # kernels that ran to their end in this process


def install() -> None:
    """Give the interpreter its driver, and see which kernels it runs."""
    driver.set_active(HostDriver())
    interpreter._convert_float = rounded
    # Triton 3.2 would pass a kernel the options of an autotuner's Config that its interpreter does not know.
    reserved = getattr(interpreter, "RESERVED_KWS", [])
    reserved += [name for name in Config({}).all_kwargs() if name not in reserved]
    builder = interpreter.interpreter_builder
    if not builder.options.debug:  # it would compute whether whole numbers overflow, and assert nothing
        builder.options = replace(builder.options, sanitize_overflow=False)
    for name in ("_store_legacy", "atom_red_typechecking_impl"):
        if function := getattr(semantic, name, None):
            setattr(semantic, name, with_its_mask(function))
    interpreter._patch_lang_tensor = patch_tensor
    interpreter._patch_lang = patch_language
    interpreter._patch_builtin = patch_builtins
    interpreter._get_np_dtype = numpy_dtype
    if _broadcast:  # an older Triton's shapes are lists, which cannot be shared
        language.core.block_type.__init__ = make_block_type
        language.core.tensor.__init__ = make_tensor
        semantic.TritonSemantic.broadcast_impl_value = broadcast
    launch = GridExecutor.__call__

    def noted(self, *arguments, **options) -> None:
        try:
            launch(self, *arguments, **options)
        finally:
            _patched.clear()
        _finished.append(self.fn)

    GridExecutor.__call__ = noted


# Triton's interpreter puts its own operations in place of those of triton.language, at each launch and again at each
# call of a function inside a kernel, and it looks for them each time. The functions below do the same, in a tenth of
# the time.
_patched: set = set()  # the modules for which the running launch has done it
_patch_language = getattr(interpreter, "_patch_lang", None)  # names of its own, which another version may lack
_numpy_dtype = getattr(interpreter, "_get_np_dtype", None)


def patch_language(function):
    """Triton's `_patch_lang`, once a launch."""
    modules = _language_of(function)
    if modules and modules <= _patched:
        return None
    scope = _patch_language(function)
    _patched.update(modules)
    return scope


@functools.cache
def _language_of(function) -> frozenset:
    """The modules of Triton's language that a function of a kernel can name."""
    return frozenset(one for one in function.__globals__.values() if one is language or one is language.core)


def patch_builtins(package, *rest) -> None:
    """Triton's `_patch_builtin` for a module or class of its language. rest: as that one gives them on."""
    for name, member in _operations(package):
        if getattr(package, name) is member:  # else it is the interpreter's already
            interpreter._patch_attr(package, name, member, *rest)


@functools.cache
def _operations(package) -> list[tuple[str, object]]:
    return [(name, member) for name, member in inspect.getmembers(package) if language.core.is_builtin(member)]


def numpy_dtype(dtype):
    """Triton's `_get_np_dtype`, numpy's type for one of its language, which makes its table of types at each call."""
    element = dtype.element_ty if isinstance(dtype, language.block_type) else dtype
    return _numpy_dtype(element) if isinstance(element, language.pointer_type) else _numpy_dtype_of_scalar(element)


@functools.cache
def _numpy_dtype_of_scalar(dtype):
    return _numpy_dtype(dtype)


# Each operation makes a tensor, and for a block also its type. A third of the interpreter's time went into what follows
# from the sizes alone: whether a block may have them, its number of elements, and the language's constants for both.
# All blocks of the same sizes share these.
_make_block_type = language.core.block_type.__init__
_make_tensor = language.core.tensor.__init__
_broadcast = getattr(getattr(semantic, "TritonSemantic", None), "broadcast_impl_value", None)
_SHAPES = (list, getattr(language.core, "tuple", list))
_of_sizes: dict[tuple[int, ...], tuple[dict[str, object], str]] = {}  # members of a type, and the start of its name
_of_shape: dict[int, dict[str, object]] = {}  # members of a tensor, by the identity of its type's shape


def make_block_type(self, element_ty, shape) -> None:
    """Triton's `block_type.__init__`."""
    sizes = _plain_sizes(shape)
    if known := _of_sizes.get(sizes):
        members, start = known
        self.__dict__.update(members)
        self.element_ty, self.name = element_ty, f"{start}{element_ty}>"
        return
    _make_block_type(self, element_ty, shape)
    if sizes is None:
        return
    members = {name: value for name, value in vars(self).items() if name not in ("element_ty", "name")}
    _of_sizes[sizes] = members, self.name.removesuffix(f"{element_ty}>")
    _of_shape[id(self.shape)] = _members_of_tensors(self)  # _of_sizes holds the shape, so no other gets its identity


def _plain_sizes(shape) -> tuple[int, ...] | None:
    """The whole numbers of a shape; None for a shape with something else, which Triton may refuse though it equals
    one."""
    if type(shape) not in _SHAPES:
        return None
    sizes = tuple([one.value if type(one) is language.constexpr else one for one in shape])
    return sizes if set(map(type, sizes)) == {int} else None


def _members_of_tensors(type) -> dict[str, object]:
    """The members that all tensors of a type have in common."""
    _make_tensor(tensor := object.__new__(language.core.tensor), None, type)
    return {name: value for name, value in vars(tensor).items() if name not in ("handle", "type", "dtype")}


_of_scalar = _members_of_tensors(language.int32)


def make_tensor(self, handle, type) -> None:
    """Triton's `tensor.__init__`."""
    known = _of_shape.get(id(type.shape)) if type.is_block() else _of_scalar
    if known is None:
        _make_tensor(self, handle, type)
        return
    self.__dict__.update(known)
    self.handle, self.type, self.dtype = handle, type, type.scalar


def broadcast(self, lhs, rhs):
    """Triton's `broadcast_impl_value`, which compares shapes size by size, also where they are one object."""
    of_lhs, of_rhs = lhs.type, rhs.type
    if of_lhs.is_block() and of_rhs.is_block() and of_lhs.shape is of_rhs.shape:
        return lhs, rhs
    return _broadcast(self, lhs, rhs)


def none_ran(module) -> bool:
    """Does a kernel's module define Triton kernels of which none ran? (On a GPU the profiler's kernel names answer
    this.)"""
    return not _finished and any(isinstance(_innermost(value), InterpretedFunction) for value in vars(module).values())


def _innermost(value):
    """The kernel inside autotuners and heuristics."""
    while not isinstance(value, InterpretedFunction) and hasattr(value, "fn") and value.fn is not value:
        value = value.fn
    return value
