"""The least bytes that a call must move: what the operations of a reference read, and what the call leaves.

A number here may be too low, never too high: a time below it is called impossible. So

- an input or parameter counts as read where an operation takes its elements; where an operation only picks some
  (`cache[pages]`), those count;
- what the call itself wrote before does not count as read, since a kernel may still hold it, nor does anything between
  the first and the last element of what it wrote, but for other columns of the same rows;
- an input that the task declares with MUTATES counts as written where its elements differ after the call.
"""

import math
from collections.abc import Sequence

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


class Reads(TorchDispatchMode):
    """Sees each operation of a reference and notes which parts of the given tensors it reads."""

    def __init__(self, tensors: list[torch.Tensor]):
        super().__init__()
        self._whole: dict[int, int] = {}  # bytes by storage
        for tensor in tensors:
            self._whole[place(tensor)] = max(spanned_bytes(tensor), self._whole.get(place(tensor), 0))
        self._parts: dict[int, dict[tuple, int]] = {at: {} for at in self._whole}  # bytes, by view or by operation
        self._written: dict[int, list[torch.Tensor]] = {at: [] for at in self._whole}  # views of each storage

    def bytes_read(self) -> int:
        """Bytes of the parts; together no more than each tensor has."""
        return sum(min(sum(self._parts[at].values()), whole) for at, whole in self._whole.items())

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
            self._note(tensor, extent(tensor), spanned_bytes(tensor))

    def _write(self, value) -> None:
        for tensor in tensor_trees.input_tensors([value]):
            if place(tensor) in self._written:
                self._written[place(tensor)].append(tensor)

    def _picked(self, tensor: torch.Tensor, elements: int) -> None:
        self._note(tensor, (len(self._parts.get(place(tensor), ())), "picked"), elements * tensor.itemsize)

    def _note(self, tensor: torch.Tensor, part: tuple, size: int) -> None:
        at = place(tensor)
        if at in self._whole and not any(may_overlap(tensor, written) for written in self._written[at]):
            self._parts[at][part] = size


def place(tensor: torch.Tensor) -> int:
    """The storage of a tensor."""
    return tensor.untyped_storage()._cdata


def extent(tensor: torch.Tensor) -> tuple:
    """Equal for views of the same elements of a storage, whatever the order of their dimensions."""
    merged: list[list[int]] = []
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1 and s):
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1][1] *= size
        else:
            merged.append([stride, size])
    return tensor.storage_offset(), *map(tuple, merged)


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
