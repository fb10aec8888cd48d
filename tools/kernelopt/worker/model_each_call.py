"""The kernel beside the original on what the modules get in a run of the model. In the outputs of the whole model a
small error may go under."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ..model_types import ModelCheck
from .accuracy import BASELINE_CAP
from .contract import WrongModelFile
from .model_comparing import Difference, difference, reason
from .model_file import Arguments, ModelFile, Tensors, left_of, random_state, set_random_state
from .model_swap import Replacement, random_numbers_kept

NAME = "each call by itself"
IN_EVALUATION = (
    "it is right for the module in evaluation, of which the cut is; in training the module computes something else, "
    "such as dropout: cut the operators beside that, with --between"
)


class EachCall:
    """Compares replacements with their originals, call by call. exact: the model in a wider dtype, or None."""

    def __init__(self, file: ModelFile, made: dict[str, Replacement], exact: torch.nn.Module | None, tolerance: float):
        self._file, self._exact, self._tolerance = file, exact, tolerance
        self._paths = {replacement: path for path, replacement in reversed(made.items())}  # the first of several
        self._workloads: list[str] = []
        self._differences: list[Difference] = []

    def in_workload(self, workload: str) -> list[bool]:
        """Run the model as it is, and compare. Of each call of a module that is replaced, in one run: does the kernel
        take it?"""
        exact = None if self._file.habits(workload).random else self._exact
        taken: list[bool] = []
        arguments, runs = self._file.arguments(workload), self._file.runs(workload)
        with contextlib.ExitStack() as stack, self._file.buffers_restored():
            for replacement, path in self._paths.items():
                wide = exact and (exact.get_submodule(path), wide_dtype(exact))
                watch = Watch(path or "the model", workload, replacement, wide, self._tolerance)
                stack.enter_context(watch.watching(self._file.submodule(path), taken, self._differences))
            for _ in range(runs):
                self._file.run(self._file.module, arguments)
        self._workloads.append(workload)
        return taken[: len(taken) // runs]

    def check(self) -> ModelCheck:
        if wrong := next((one for one in self._differences if one.wrong), None):
            return wrong.check(NAME)
        calls, workloads = (
            f"{count} {word}{'s' * (count != 1)}"
            for count, word in ((len(self._differences), "call"), (len(self._workloads), "workload"))
        )
        worst = max(self._differences, key=lambda one: one.worst)
        return ModelCheck(NAME, True, f"{calls} in {workloads}, {worst.fine}")


@dataclass(frozen=True)
class Call:
    """What a module gets in a call. arguments, buffers: copies. random: what random numbers follow from."""

    arguments: Arguments
    buffers: list[torch.Tensor]
    random: list[torch.Tensor]


class Watch:
    """Compares the calls of one module in a run. exact: the module in a wider dtype, and that dtype; None for none."""

    def __init__(
        self,
        path: str,
        workload: str,
        replacement: Replacement,
        exact: tuple[torch.nn.Module, torch.dtype] | None,
        tolerance: float,
    ):
        self._path, self._workload = path, workload
        self._replacement, self._exact, self._tolerance = replacement, exact, tolerance
        self._calls: list[Call | None] = []  # that have begun
        self._count = 0
        self._compares = False  # the calls that this makes itself are not compared in turn

    @contextlib.contextmanager
    def watching(self, module: torch.nn.Module, taken: list[bool], differences: list[Difference]) -> Iterator[None]:
        """Inside, note of each call of the module whether the kernel takes it, and how far it is off."""

        def before(_, args, kwargs):
            if not self._compares:
                taken.append(self._takes(args, kwargs))
                call = Call(Arguments(args, kwargs).copied(), contents(module), random_state()) if taken[-1] else None
                self._calls.append(call)

        def after(_, args, kwargs, outputs):
            if self._compares or not (call := self._calls.pop()):
                return
            self._count += 1
            plain, now = left_of(outputs, Arguments(args, kwargs), module), contents(module)
            self._compares = True
            with random_numbers_kept(), torch.no_grad():
                differences.append(self._difference(module, call, plain))
                fill(module, now)
            self._compares = False

        hooks = [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _takes(self, args, kwargs) -> bool:
        try:
            return self._replacement.fits(*args, **kwargs)
        except Exception as error:
            raise WrongModelFile(f"--where fails in workload {self._workload}: {reason(error)}") from error

    def _difference(self, module: torch.nn.Module, call: Call, plain: Tensors) -> Difference:
        where = f"call {self._count} of {self._path} in workload {self._workload}"
        try:
            actual = left_by_call(self._replacement, call, module)
        except Exception as error:
            return Difference(0, 0.0, 0.0, f"{where}: {reason(error)}")
        found = difference(actual, plain, self._exact_of(call), self._tolerance, BASELINE_CAP)
        if found.wrong is None:
            return found
        if module.training and difference(actual, in_evaluation(module, call), None, self._tolerance).wrong is None:
            return replace(found, wrong=f"{where}: {IN_EVALUATION}")
        return replace(found, wrong=f"{where}: {found.wrong}")

    def _exact_of(self, call: Call) -> Tensors | None:
        """What the module in a wider dtype leaves; None where it does not run in one."""
        if self._exact is None:
            return None
        module, dtype = self._exact
        before = contents(module)
        try:
            return left_by_call(module, replace(call, arguments=call.arguments.floating(dtype)), module)
        except Exception:  # there is too little memory, or a dtype is written in the module
            return None
        finally:
            fill(module, before)


def wide_dtype(model: torch.nn.Module) -> torch.dtype:
    """The dtype of a model in a wider one."""
    return next(one.dtype for one in model.parameters() if one.is_floating_point())


def in_evaluation(module: torch.nn.Module, call: Call) -> Tensors:
    """What a module in training leaves when it is in evaluation."""
    modes = [(one, one.training) for one in module.modules()]
    try:
        return left_by_call(module.eval(), call, module)
    finally:
        for one, training in modes:
            one.training = training


def left_by_call(one: torch.nn.Module, call: Call, holder: torch.nn.Module) -> Tensors:
    """What a call leaves. holder: of the buffers."""
    fill(holder, call.buffers)
    set_random_state(call.random)
    arguments = call.arguments.copied()
    return left_of(one(*arguments.args, **arguments.kwargs), arguments, holder)


def contents(module: torch.nn.Module) -> list[torch.Tensor]:
    return [one.clone() for one in module.buffers()]


def fill(module: torch.nn.Module, buffers: list[torch.Tensor]) -> None:
    for own, before in zip(module.buffers(), buffers, strict=True):
        own.copy_(before)
