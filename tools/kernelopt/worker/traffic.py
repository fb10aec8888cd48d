"""The least bytes that a call must move: what the operations of a reference read, and what the call leaves.

A number here may be too low, never too high: a time below it is called impossible. So

- an input or parameter counts as read where an operation takes its elements; where an operation only picks some
  (`cache[pages]`), those count;
- what the call itself wrote before does not count as read, since a kernel may still hold it, nor does anything between
  the first and the last element of what it wrote, but for other columns of the same rows;
- an input that the task declares with MUTATES counts as written where its elements differ after the call;
- a byte that several views of one storage share counts once.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Sequence

import numpy
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import accuracy, problem, tensor_trees

ATEN = torch.ops.aten
# Operations that take some elements of their first argument, as many as their result has.
PICKING = {ATEN.index, ATEN.index_select, ATEN.gather, ATEN.embedding, ATEN.take, ATEN.masked_select}
# Operations that read rows of their first argument and return their sums: rows named by the second argument.
SUMMING_ROWS = {ATEN._embedding_bag, ATEN._embedding_bag_forward_only}
# In-place operations that do not read what they write over, or no more of it than elements that they pick.
WRITING = {
    *(ATEN.copy_, ATEN.fill_, ATEN.zero_, ATEN.masked_fill_, ATEN.masked_scatter_),
    *(ATEN.index_put_, ATEN._index_put_impl_, ATEN.index_copy_, ATEN.index_fill_, ATEN.index_add_),
    *(ATEN.scatter_, ATEN.scatter_add_, ATEN.scatter_reduce_, ATEN.index_reduce_, ATEN.put_),
    *(ATEN.uniform_, ATEN.normal_, ATEN.random_, ATEN.bernoulli_, ATEN.exponential_),
}
# Operations that ask a tensor for nothing but its shape, dtype and device.
ASKING = {
    *(ATEN.empty_like, ATEN.zeros_like, ATEN.ones_like, ATEN.full_like, ATEN.rand_like, ATEN.randn_like),
    *(ATEN.new_empty, ATEN.new_zeros, ATEN.new_ones, ATEN.new_full, ATEN.new_empty_strided, ATEN.randint_like),
}


PIECE = 1 << 18  # elements
Extent = tuple  # (first byte, (step in bytes, count) from the inside out): bytes of a storage that a view covers
MOST_CELLS = 1 << 26  # of a map of what views cover: 64 MiB, some 50 ms


class Reads(TorchDispatchMode):
    """Sees each operation of a reference and notes which parts of the given tensors it reads."""

    def __init__(self, tensors: list[torch.Tensor]):
        super().__init__()
        self._given = extents(tensors)  # by storage
        self._read_parts: dict[int, set[Extent]] = defaultdict(set)
        self._picked_of: dict[int, dict[Extent, int]] = defaultdict(dict)  # bytes, by the view that was picked from
        self._written: dict[int, list[torch.Tensor]] = {at: [] for at in self._given}  # views of each storage

    def bytes_read(self) -> int:
        """Bytes that at least one operation read. Picked elements may be the same ones: they count up to the whole
        view that they were picked from."""
        return sum(self._bytes_of(at, given) for at, given in self._given.items())

    def _bytes_of(self, at: int, given: set[Extent]) -> int:
        parts, picked = self._read_parts[at], self._picked_of[at]
        separately = covered_bytes(parts) + sum(min(size, covered_bytes({view})) for view, size in picked.items())
        return min(separately, covered_bytes(parts | set(picked)), covered_bytes(given))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        operation = function._overloadpacket
        given = list(zip(function._schema.arguments, args, strict=False))
        given += [(one, kwargs[one.name]) for one in function._schema.arguments if one.name in kwargs]
        if not (function.is_view or function.namespace == "prim" or operation in ASKING):
            for at, (argument, value) in enumerate(given):
                writes = argument.alias_info is not None and argument.alias_info.is_write
                picks = at == 0 and (operation in PICKING or operation in SUMMING_ROWS)
                if not picks and not (writes and (argument.is_out or operation in WRITING)):
                    self._read(value)
                if writes:
                    self._write(value)
        result = function(*args, **kwargs)
        if operation in PICKING:
            self._picked(args[0], result.numel())
        elif operation in SUMMING_ROWS:
            self._picked(args[0], args[1].numel() * args[0].shape[-1])
        return result

    def _read(self, value) -> None:
        for tensor in tensor_trees.input_tensors([value]):
            if self._must_be_read(tensor):
                self._read_parts[place(tensor)].add(extent(tensor))

    def _write(self, value) -> None:
        for tensor in tensor_trees.input_tensors([value]):
            if place(tensor) in self._written:
                self._written[place(tensor)].append(tensor)

    def _picked(self, tensor: torch.Tensor, elements: int) -> None:
        if self._must_be_read(tensor):
            of_views, view = self._picked_of[place(tensor)], extent(tensor)
            of_views[view] = of_views.get(view, 0) + elements * tensor.itemsize

    def _must_be_read(self, tensor: torch.Tensor) -> bool:
        """Has it elements, and do they lie in a given tensor, where the call has not written?"""
        at = place(tensor)
        return (
            tensor.numel() > 0
            and at in self._given
            and not any(may_overlap(tensor, written) for written in self._written[at])
        )


def place(tensor: torch.Tensor) -> int:
    """The storage of a tensor."""
    return tensor.untyped_storage()._cdata


def extent(tensor: torch.Tensor) -> Extent:
    """Equal for views of the same bytes of a storage, whatever the order of their dimensions. What an expanded view
    repeats counts once."""
    merged = [[1, tensor.itemsize]]
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1 and s):
        if merged[-1][0] * merged[-1][1] == stride * tensor.itemsize:
            merged[-1][1] *= size
        else:
            merged.append([stride * tensor.itemsize, size])
    return tensor.storage_offset() * tensor.itemsize, *map(tuple, merged)


def extents(tensors: Sequence[torch.Tensor]) -> dict[int, set[Extent]]:
    """What tensors cover of each storage. One without elements covers nothing."""
    of_storages = defaultdict(set)
    for tensor in tensors:
        if tensor.numel():
            of_storages[place(tensor)].add(extent(tensor))
    return of_storages


def covered_bytes(parts: Collection[Extent]) -> int:
    """Bytes of a storage that at least one of the parts covers: counted on a map of the stretch that they span. A cell
    of the map is the largest piece that each part covers as a whole or not at all. Where the map would have more than
    MOST_CELLS: the bytes of the largest part, which may be too few."""
    if len(parts) < 2:
        sizes = [own_bytes(part) for part in parts]
        if not sizes or sizes[0][1]:
            return sum(size for size, _ in sizes)
    first = min(offset for offset, *_ in parts)
    last = max(offset + spread(*zip(*[(n, s) for s, n in runs], strict=True)) for offset, *runs in parts)
    cell = math.gcd(*(number for at, (_, run), *outer in parts for number in (at - first, run, *(s for s, _ in outer))))
    if (last - first) // cell > MOST_CELLS:
        return max(own_bytes(part)[0] for part in parts)
    covered = numpy.zeros((last - first) // cell, dtype=bool)
    for at, (_, run), *outer in parts:
        shape, stride = (run // cell, *(n for _, n in outer)), (1, *(s // cell for s, _ in outer))
        numpy.lib.stride_tricks.as_strided(covered[(at - first) // cell :], shape, stride)[...] = True
    return int(numpy.count_nonzero(covered)) * cell


def own_bytes(part: Extent) -> tuple[int, bool]:
    """(bytes that a part covers at least, are they all). A dimension whose steps are shorter than what lies within them
    covers some bytes again, and is left out."""
    size, reach, whole = 1, 1, True
    for stride, count in part[1:]:
        whole &= stride >= reach
        size *= count if stride >= reach else 1
        reach += stride * (count - 1)
    return size, whole


def may_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Could two views of a storage share an element? Not where one begins behind the other's end, nor where they are
    different columns of rows of one length."""
    if apart(stretch(a), stretch(b)):
        return False
    lengths = set(a.stride()) & set(b.stride()) - {0} if a.itemsize == b.itemsize else set()
    pairs = ((columns(a, length), columns(b, length)) for length in lengths)
    return not any(ours and theirs and apart(ours, theirs) for ours, theirs in pairs)


def stretch(tensor: torch.Tensor) -> range:
    """Bytes of its storage from a tensor's first element to its last, with those of others between them."""
    start = tensor.storage_offset() * tensor.itemsize
    return range(start, start + spread(tensor.shape, tensor.stride()) * tensor.itemsize)


def columns(tensor: torch.Tensor, length: int) -> range | None:
    """The columns that hold its elements, where its storage is rows of so many; None where some run over into the next
    row."""
    within = [(n, s) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if s % length]
    start = tensor.storage_offset() % length
    stop = start + spread(*zip(*within, strict=True)) if within else start + 1
    return range(start, stop) if stop <= length else None


def spread(shape: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements of a storage lie from the first to the last of a view, both included."""
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if math.prod(shape) else 0


def apart(a: range, b: range) -> bool:
    return max(a.start, b.start) >= min(a.stop, b.stop)


def spanned_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements, those that an expanded view repeats once."""
    elements = math.prod(n for s, n in zip(tensor.stride(), tensor.shape, strict=True) if s)
    return min(elements * tensor.itemsize, tensor.untyped_storage().nbytes())


def changed_bytes(reference: problem.Reference, workload: str, dtype: str | None, device: str) -> int:
    """Bytes of the elements that a call of the reference, run for real, changes in inputs that the task declares with
    MUTATES."""
    model, inputs, _ = reference.build(workload, 0, dtype, device)
    before = [tensor.clone() for tensor in reference.mutated(inputs)]
    reference.call(model, inputs, device)
    pairs = zip(before, reference.mutated(inputs), strict=True)
    return sum(changed_elements(old, now) * now.itemsize for old, now in pairs)


def changed_elements(old: torch.Tensor, now: torch.Tensor) -> int:
    """How many elements differ. A processor's caches hold a PIECE, which halves the time of a gigabyte."""
    pieces = zip(old.flatten().split(PIECE), now.flatten().split(PIECE), strict=True)
    return sum(int(differs(*pair).sum()) for pair in pieces)


def differs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where two tensors of one dtype are neither equal nor both NaN."""
    if a.dtype.is_floating_point and a.itemsize == 1:
        a, b = a.float(), b.float()
    return ~accuracy.same(a, b)
