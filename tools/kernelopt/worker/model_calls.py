"""Calls of a module in a model: recorded as they happen, and taken apart into their tensors."""

import contextlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from . import state, tensor_trees
from .contract import NotCut
from .model_file import Arguments
from .traffic import place

CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout)
RESERVED = {"torch", "nn", "math", "self", "dtype", "wide"}  # names that a cut's source uses itself


@dataclass(frozen=True)
class RecordedCall:
    """One call. arguments: as they were before it, in memory of their own. outputs: copies. changed: the numbers, among
    the tensors of the arguments, of those whose contents it changed; changed_state: names of parameters and buffers.
    shared: sets of numbers of tensors that lie in the same memory."""

    arguments: Arguments
    outputs: object
    changed: frozenset[int]
    changed_state: frozenset[str]
    shared: tuple[frozenset[int], ...]


@dataclass
class Recorder:
    """One call of a module in a run, by its number, and how many calls there were."""

    number: int = 1
    call: RecordedCall | None = None
    calls: int = 0
    _before: list = field(default_factory=list)

    def before(self, module, args, kwargs) -> None:
        self.calls += 1
        if self.calls == self.number:
            if torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu"):
                raise NotCut(
                    "the module runs under torch.autocast, which a cut cannot show; give the model its dtype in load()"
                )
            arguments = Arguments(args, kwargs)
            held = {name: tensor.clone() for name, tensor in state.held(module).items()}
            self._before = [arguments, arguments.copied(), versions(arguments), held, dict(module.named_buffers())]

    def after(self, module, args, kwargs, outputs) -> None:
        if self.calls != self.number or self.call:
            return
        given, arguments, old_versions, held, buffers = self._before
        if bound := [name for name, one in module.named_buffers() if one is not buffers.get(name)]:
            raise NotCut(
                f"it binds '{bound[0]}' to another tensor in each call, which a kernel cannot do; let it write to the "
                f"one that it holds: self.{bound[0]}.copy_(…)"
            )
        pairs = zip(given.tensors(), arguments.tensors(), old_versions, versions(given), strict=True)
        changed = [now != old or not state.identical(tensor, copy) for tensor, copy, old, now in pairs]
        copies = tensor_trees.map_tensors(outputs, lambda tensor: tensor.detach().clone())
        self.call = RecordedCall(
            arguments,
            copies,
            frozenset(number for number, one in enumerate(changed) if one),
            frozenset(state.changed(module, held)),
            shared(given.tensors()),
        )


@contextlib.contextmanager
def recording(module: torch.nn.Module, number: int = 1) -> Iterator[Recorder]:
    """Record a call of `module` inside, the first one by default."""
    if isinstance(module, torch.jit.ScriptModule):
        raise NotCut("it is a module of torch.jit.script, whose calls cannot be seen; let load() leave it unscripted")
    recorder = Recorder(number)
    hooks = [
        module.register_forward_pre_hook(recorder.before, with_kwargs=True),
        module.register_forward_hook(recorder.after, with_kwargs=True),
    ]
    try:
        yield recorder
    finally:
        for hook in hooks:
            hook.remove()


def versions(arguments: Arguments) -> list[int]:
    """How often each tensor was written to. A kernel may write without counting."""
    return [0 if tensor.is_inference() else tensor._version for tensor in arguments.tensors()]


def shared(tensors: list[torch.Tensor]) -> tuple[frozenset[int], ...]:
    """The sets of numbers of tensors that lie in the same memory."""
    by_place: dict[int, set[int]] = {}
    for number, tensor in enumerate(tensors):
        by_place.setdefault(place(tensor), set()).add(number)
    return tuple(frozenset(numbers) for numbers in by_place.values() if len(numbers) > 1)


@dataclass(frozen=True)
class Leaf:
    """A tensor among the arguments of a call. path: the expression of Python that leads to it from the parameters."""

    path: str
    name: str
    tensor: torch.Tensor


@dataclass(frozen=True)
class Place:
    """Where a tensor stands among the outputs of a module."""

    number: int


@dataclass(frozen=True)
class Made:
    """An object of a class of the model's own among the outputs of a module. home: the module of Python that defines
    the class."""

    name: str
    home: str
    fields: dict[str, object]


class TakenApart:
    """The arguments of a call by the parameters of the module's forward: its tensors, and the conditions under which
    another call has the same form. returned: the outputs, with a Place for each tensor and Made for objects, once they
    are known."""

    def __init__(self, module: torch.nn.Module, arguments: Arguments):
        self.module = module
        self.signature = inspect.signature(module.forward)
        self._bound = self.signature.bind(*arguments.args, **arguments.kwargs)
        self._given = list(self._bound.arguments)
        self._by_position = list(self.signature.bind_partial(*arguments.args).arguments)
        self._bound.apply_defaults()
        self.leaves: list[Leaf] = []
        self.conditions: list[str] = []
        self.returned: object = None
        for name, value in self._bound.arguments.items():
            self._take(name, value)

    def rebuilt(self, tensors: list) -> Arguments:
        """The same arguments with other tensors, each by position or by keyword as it was."""
        given = iter(tensors)
        args, kwargs = [], {}
        for name, value in self._bound.arguments.items():
            made = tensor_trees.map_tensors(value, lambda _: next(given))
            kind = self.signature.parameters[name].kind
            if kind == inspect.Parameter.VAR_POSITIONAL:
                args += made
            elif kind == inspect.Parameter.VAR_KEYWORD:
                kwargs |= made
            elif name in self._by_position:
                args.append(made)
            elif name in self._given:
                kwargs[name] = made
        return Arguments(tuple(args), kwargs)

    def _take(self, path: str, value) -> None:
        """Note what is in a value, in the order of tensor_trees.map_tensors."""
        if isinstance(value, torch.Tensor):
            self.leaves.append(Leaf(path, self._name(path), value))
        elif isinstance(value, dict):
            self.conditions.append(f"sorted({path}) == {sorted(value)!r}")
            for key, item in tensor_trees.in_order(value):
                self._take(f"{path}[{key!r}]", item)
        elif isinstance(value, tuple) and hasattr(value, "_fields"):
            for name, item in value._asdict().items():
                self._take(f"{path}.{name}", item)
        elif isinstance(value, list | tuple):
            self.conditions.append(f"len({path}) == {len(value)}")
            for number, item in enumerate(value):
                self._take(f"{path}[{number}]", item)
        elif tensor_trees.is_dataclass(value):
            for name, item in tensor_trees.fields_of(value).items():
                self._take(f"{path}.{name}", item)
        elif isinstance(value, CONSTANTS):
            self._require(path, value)
        else:
            raise NotCut(
                f"the argument {path} is an object of class {type(value).__name__}, which is not made of tensors, "
                "numbers, lists, dicts and the like; cut a module inside this one, or let inputs() spare the model the "
                "object, as 'use_cache': False spares one of transformers its cache"
            )

    def _require(self, path: str, value) -> None:
        if value is None or isinstance(value, bool):
            self.conditions.append(f"{path} is {value!r}")
        elif not isinstance(value, torch.device):
            self.conditions.append(f"{path} == {value!r}")

    def _name(self, path: str) -> str:
        """A name for the tensor at a path: pair_0 for pair[0]."""
        wanted = re.sub(r"\W+", "_", path).strip("_")
        names = RESERVED | {leaf.name for leaf in self.leaves}
        return wanted if wanted not in names else f"{wanted}_{len(self.leaves)}"
