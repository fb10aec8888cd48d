"""Constants that masks are made of, which are computed when they are asked for: a mask of whole numbers and booleans
then needs no memory for what comes between."""

from collections.abc import Callable, Iterator

import torch

from . import tensor_trees
from .mask_numbers import cut, once, pieces
from .traffic import place

ATEN = torch.ops.aten
FILLED = {"zeros": 0, "ones": 1}  # by the name of the operation, with "new_" or "_like" or without
STEPS = 16  # operations that are put off together


class Deferred:
    """The result of an operation on single elements of tensors and others of this kind. shape: with the size 1 where
    elements are alike; whole: the tensor's own."""

    def __init__(self, operation: Callable, args: tuple, kwargs: dict, whole: torch.Size, dtype: torch.dtype):
        self._operation = operation
        self._args, self._kwargs = tensor_trees.map_leaves((args, kwargs), settled)
        self.shape = torch.broadcast_shapes(*(one.shape for one in self._given()))
        self.whole, self.dtype = whole, dtype
        self.steps = 1 + sum(one.steps for one in self._given() if isinstance(one, Deferred))

    def _given(self) -> list:
        leaves = tensor_trees.leaves([self._args, self._kwargs])
        return [one for one in leaves if isinstance(one, torch.Tensor | Deferred)]

    def dim(self) -> int:
        return len(self.shape)

    def __getitem__(self, at: tuple[slice, ...]) -> torch.Tensor:
        def part(leaf):
            return cut(leaf, at) if isinstance(leaf, torch.Tensor | Deferred) else leaf

        args, kwargs = tensor_trees.map_leaves((self._args, self._kwargs), part)
        return self._operation(*args, **kwargs)

    def real(self) -> torch.Tensor:
        made = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        for at in pieces(self.shape):
            made[at] = self[at]
        return made.expand(self.whole)

    def storages(self) -> Iterator[int]:
        """Of the tensors that it is computed from."""
        for one in self._given():
            yield from [place(one)] if isinstance(one, torch.Tensor) else one.storages()


class Filled(Deferred):
    """A new tensor whose elements are all alike."""

    def __init__(self, value, whole: torch.Size, dtype: torch.dtype):
        one = torch.full([1] * len(whole), value, dtype=dtype, device="cpu")
        super().__init__(lambda same: same, (one,), {}, whole, dtype)

    def real(self) -> torch.Tensor:
        return super().real().contiguous()  # it may be written


def settled(leaf):
    """An argument as it is kept."""
    if isinstance(leaf, Deferred) and leaf.steps >= STEPS:
        leaf = leaf.real()
    return once(leaf) if isinstance(leaf, torch.Tensor) else leaf


def deferred(name: str, args: tuple, kwargs: dict, made: torch.Tensor) -> Deferred | None:
    """The result of an operation of this name, where it comes to one on single elements. made: the result without its
    numbers."""
    kind = name.removeprefix("new_").removesuffix("_like")
    if kind in FILLED or kind == "full":
        return Filled(args[-1] if kind == "full" else FILLED[kind], made.shape, made.dtype)
    if name in ("triu", "tril"):
        return triangle(name, args[0], args[1] if len(args) > 1 else 0, made)
    return None


def triangle(name: str, numbers, diagonal: int, made: torch.Tensor) -> Deferred:
    """triu or tril, by element."""
    rows, columns = (torch.arange(size, device="cpu") for size in made.shape[-2:])
    stays = ATEN.ge if name == "triu" else ATEN.le
    flags = Deferred(stays, (columns, rows[:, None] + diagonal), {}, made.shape[-2:], torch.bool)
    zero = torch.zeros((), dtype=made.dtype, device="cpu")
    return Deferred(ATEN.where, (flags, numbers, zero), {}, made.shape, made.dtype)
