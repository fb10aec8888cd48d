"""The numbers of masks, of which few differ: each number stands once, and each element has a code of 8 bits for it.

So what is done to single elements is done once for each number, and masks that are made of one another share their
codes. Codes are found in pieces that fit a processor's cache: fresh memory costs more than the arithmetic.
"""

import contextlib
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator
from functools import cached_property

import torch

from . import tensor_trees

LARGEST = 1 << 28  # elements of a tensor that is computed here
LOW = -1e4  # exp gives 0 for scores so low, beside others of the usual size; models mask with this, -1e9 or -inf
PIECE = 1 << 18  # elements that are looked at together
EXACT = 8  # different numbers of a tensor that are told apart
MOST = 256  # codes that 8 bits hold


class TooMany(Exception):
    """Elements, or different numbers."""


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """For small pieces: threads that wait for one another take several times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def once(tensor: torch.Tensor) -> torch.Tensor:
    """Without the repetitions of expanded dimensions, which get the size 1."""
    for dim, stride in enumerate(tensor.stride()):
        tensor = tensor.narrow(dim, 0, 1) if stride == 0 and tensor.shape[dim] > 1 else tensor
    return tensor


def pieces(shape: list[int], most: int | None = None) -> Iterator[tuple[slice, ...]]:
    """Where pieces of so many elements, or PIECE, lie in a tensor."""
    slices, most = [], PIECE if most is None else most
    for dim, size in enumerate(shape):
        step = max(1, most // max(1, math.prod(shape[dim + 1 :])))
        slices.append([slice(at, min(at + step, size)) for at in range(0, size, step)])
    return itertools.product(*slices)


class Codes:
    """A code for each element; the size is 1 in dimensions whose elements are alike. first: those that these are a view
    of; it keeps what was counted."""

    def __init__(self, tensor: torch.Tensor, first: "Codes | None" = None):
        self.tensor = once(tensor)
        self._first = first
        self._counted: dict[tuple, list[int]] = {}

    @property
    def first(self) -> "Codes":
        return self._first or self

    def viewed(self, tensor: torch.Tensor) -> "Codes":
        return Codes(tensor, self.first)

    @cached_property
    def view(self) -> tuple:
        """Equal for views of the same codes."""
        pairs = zip(self.tensor.shape, self.tensor.stride(), strict=True)
        sizes = itertools.dropwhile(lambda pair: pair[0] == 1, pairs)
        return self.tensor.storage_offset(), *((size, stride if size > 1 else 0) for size, stride in sizes)

    def same(self, other: "Codes") -> bool:
        return self.first is other.first and self.view == other.view

    def counts(self, most: int) -> list[int]:
        """How many elements have each of the codes below `most`."""
        counted = self.first._counted
        if (self.view, most) not in counted:
            parts = (self.tensor[at].flatten() for at in pieces(self.tensor.shape))
            zero = torch.zeros(most, dtype=torch.int64, device="cpu")
            counted[self.view, most] = sum((torch.bincount(part, minlength=most) for part in parts), zero).tolist()
        return counted[self.view, most]


class Numbers:
    """values: the number of each code; NaN where the inputs decide it. One value if elements are all alike."""

    def __init__(self, codes: Codes, values: torch.Tensor):
        self.codes, self.values = codes, values

    @classmethod
    def alike(cls, value: torch.Tensor) -> "Numbers":
        """value: a tensor of one element."""
        return cls(Codes(torch.zeros(value.shape, dtype=torch.uint8, device="cpu")), value.reshape(1))

    def mapped(self, operation: Callable) -> "Numbers":
        return Numbers(self.codes, operation(self.values))

    def viewed(self, codes: torch.Tensor) -> "Numbers":
        codes = self.codes.viewed(codes)
        one = codes.tensor.numel() == 1
        return Numbers(codes, self.values) if not one else Numbers.alike(self.values[codes.tensor.int()])

    def expanded(self, shape: torch.Size) -> torch.Tensor:
        """The codes of a tensor of this shape."""
        return self.codes.tensor.expand(shape)

    def any(self) -> bool:
        """Of flags: is one true?"""
        return bool(self.values.any()) and self.true() > 0

    def true(self) -> int:
        """Of flags: how many are true."""
        counts = self.codes.counts(len(self.values))
        return sum(itertools.compress(counts, self.values.tolist()))

    def elements(self) -> int:
        return self.codes.tensor.numel()

    def all_along(self, dim: int) -> "Numbers":
        """Of flags: are all true along a dimension? It gets the size 1."""
        codes, (wanted,) = self.codes.tensor, self.values.nonzero(as_tuple=True)
        shape = list(codes.shape)
        length, shape[dim] = shape[dim], 1
        rows = torch.empty(shape, dtype=torch.bool, device="cpu")
        for at in pieces(shape, max(1, PIECE // max(1, length))):
            row = list(at)
            row[dim] = slice(None)
            rows[at] = flags_of(codes[tuple(row)], wanted.tolist()).all(dim, keepdim=True)
        return numbers_of(rows)


def flags_of(codes: torch.Tensor, wanted: list[int]) -> torch.Tensor:
    """Which codes are among those."""
    none = torch.zeros(codes.shape, dtype=torch.bool, device="cpu")
    return functools.reduce(operator.or_, (codes == code for code in wanted), none)


def numbers_of(tensor: torch.Tensor) -> Numbers:
    """The numbers of a real tensor; see `coded`."""
    tensor = once(tensor)
    return coded(tensor.shape, tensor.dtype, tensor.__getitem__)


def coded(shape: torch.Size, dtype: torch.dtype, part: Callable[[tuple[slice, ...]], torch.Tensor]) -> Numbers:
    """The numbers of a tensor that `part` gives piece by piece. Of more than EXACT numbers only those are told apart
    that matter for masks; the others count as those that the inputs decide. Raises TooMany where NaN cannot say so."""
    codes = torch.empty(shape, dtype=torch.uint8, device="cpu")
    if dtype == torch.bool:
        for at in pieces(shape):
            codes[at] = part(at)
        return numbers_with(codes, torch.tensor([False, True], device="cpu"))
    try:
        seen = []
        for at in pieces(shape):
            codes[at] = told_apart(part(at), seen)
        return numbers_with(codes, torch.stack(seen or [torch.zeros((), dtype=dtype, device="cpu")]))
    except TooMany:
        if not dtype.is_floating_point:
            raise
    highest = -math.inf
    for at in pieces(shape):
        codes[at], low = sorted_out(part(at))
        highest = max(highest, low)
    return numbers_with(codes, torch.tensor([math.nan, 0.0, -math.inf, highest], dtype=dtype, device="cpu"))


def numbers_with(codes: torch.Tensor, values: torch.Tensor) -> Numbers:
    numbers = Numbers(Codes(codes), values)
    used = [at for at, count in enumerate(numbers.codes.counts(len(values))) if count]
    return numbers if len(used) > 1 else Numbers.alike(values[used or [0]].reshape([1] * codes.dim()))


def told_apart(part: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
    """The codes of its numbers: their places in `seen`, which grows. Raises TooMany."""
    codes = torch.zeros(part.shape, dtype=torch.uint8, device="cpu")
    left = torch.ones(part.shape, dtype=torch.bool, device="cpu")
    for code in range(EXACT):
        if code == len(seen):
            if not left.any():
                return codes
            seen.append(part[left][0] + 0)  # -0.0 becomes 0.0
        same = part.isnan() if seen[code].isnan() else part == seen[code]
        codes.masked_fill_(same, code)
        left &= ~same
    if left.any():
        raise TooMany
    return codes


def sorted_out(part: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Codes of numbers: 1 for 0, 2 for -inf, 3 for others up to LOW, 0 for the rest. The greatest with code 3 stands
    for all of these, since it masks least."""
    low = (part <= LOW) & part.isfinite()
    codes = torch.zeros(part.shape, dtype=torch.uint8, device="cpu")
    codes.masked_fill_(part == 0, 1).masked_fill_(part == -math.inf, 2).masked_fill_(low, 3)
    return codes, float(part[low].max()) if low.any() else -math.inf


def joined(numbers: list[Numbers]) -> tuple[Codes | None, list[torch.Tensor]]:
    """One code for the elements of all of them, broadcast together, and the values of each by these codes; None where
    all are single numbers. Raises TooMany."""
    codes, size, parts = None, 1, []  # parts: the code in other codes that each of the new ones stands for
    for one in numbers:
        if len(one.values) == 1 or any(one.codes.same(other) for other, _ in parts):
            continue
        number = len(one.values)
        codes = one.codes if codes is None else beside(codes, one.codes, size, number)
        parts = [(other, places.repeat(number)) for other, places in parts]
        parts.append((one.codes, torch.arange(number, device="cpu").repeat_interleave(size)))
        size *= number
        if size > EXACT and len(parts) > 1:
            codes, used = without_unused(codes, size)
            size, parts = len(used), [(other, places[used]) for other, places in parts]
    return codes, [placed(one, parts) for one in numbers]


def beside(codes: Codes, more: Codes, size: int, number: int) -> Codes:
    """A code for each pair of codes, of which there are `size` and `number`."""
    shape = torch.broadcast_shapes(codes.tensor.shape, more.tensor.shape)
    if size * number > MOST or math.prod(shape) > LARGEST:
        raise TooMany
    made = torch.empty(shape, dtype=torch.uint8, device="cpu")
    for at in pieces(shape):
        made[at] = torch.add(cut(codes.tensor, at), cut(more.tensor, at), alpha=size)
    return Codes(made)


def cut(tensor: torch.Tensor, at: tuple[slice, ...]) -> torch.Tensor:
    """What meets a piece of a tensor that it is broadcast to."""
    at = at[len(at) - tensor.dim() :]
    return tensor[tuple(slice(None) if size == 1 else one for size, one in zip(tensor.shape, at, strict=True))]


def without_unused(codes: Codes, size: int) -> tuple[Codes, torch.Tensor]:
    """The codes counted anew without those that no element has, and which are left."""
    used = torch.tensor(codes.counts(size), device="cpu").nonzero().flatten()
    place = torch.zeros(size, dtype=torch.uint8, device="cpu")
    place[used] = torch.arange(len(used), dtype=torch.uint8, device="cpu")
    made = torch.empty_like(codes.tensor)
    for at in pieces(made.shape):
        made[at] = place[codes.tensor[at].int()]
    return Codes(made), used


def placed(one: Numbers, parts: list[tuple[Codes, torch.Tensor]]) -> torch.Tensor:
    if len(one.values) == 1:  # without a dimension where it had none, since torch promotes its dtype less then
        return one.values.reshape([1] * min(1, one.codes.tensor.dim()))
    return next(one.values[places] for codes, places in parts if codes.same(one.codes))


def by_numbers(operation: Callable, *values) -> Numbers:
    """The result of an operation on single elements, with Numbers in place of tensors. Raises TooMany."""
    given = [one for one in tensor_trees.leaves(list(values)) if isinstance(one, Numbers)]
    codes, tables = joined(given)
    left = iter(tables)
    result = operation(*tensor_trees.map_leaves(values, lambda one: next(left) if isinstance(one, Numbers) else one))
    dims = max(one.codes.tensor.dim() for one in given)
    if codes is None:
        return Numbers.alike(result.reshape([1] * dims))
    added = [1] * (dims - codes.tensor.dim())
    return Numbers(codes.viewed(codes.tensor.reshape([*added, *codes.tensor.shape])), result)


def side_by_side(numbers: list[Numbers], shapes: list[torch.Size], dim: int) -> Codes:
    """The codes of tensors of these shapes, laid side by side along a dimension; those of each tensor begin where those
    of the one before end. Raises TooMany."""
    if sum(len(one.values) for one in numbers) > MOST:
        raise TooMany
    codes = [once(one.expanded(shape)) for one, shape in zip(numbers, shapes, strict=True)]
    sizes = list(torch.broadcast_shapes(*(one.select(dim, 0).shape for one in codes)))
    dim %= len(sizes) + 1
    lengths = [shape[dim] for shape in shapes]
    sizes.insert(dim, sum(lengths))
    if math.prod(sizes) > LARGEST:
        raise TooMany
    made, before, start = torch.empty(sizes, dtype=torch.uint8, device="cpu"), 0, 0
    for one, each, length in zip(numbers, codes, lengths, strict=True):
        made.narrow(dim, start, length).copy_(each).add_(before)
        before, start = before + len(one.values), start + length
    return Codes(made)
