"""Guard bands: tensors that lie between bytes which no kernel may change.

A tensor's own bytes start as `fill`, at first 0xFF: NaN in every floating format, -1 in the integers. So an unwritten
output shows as NaN. Around it, and in the gaps of an input that is a view, lie other bytes, so that a write there shows
even if it writes what it read out of bounds beside another tensor:

| | first | where `fill` is 0 |
|---|---|---|
| inputs of 16, 32 and 64 bits | signalling NaNs, of each input other ones; arithmetic makes them quiet | 0 |
| other inputs | 0xFF | 0 |
| what a kernel allocates | 0x7B: 1.3e36 in fp32 and bf16, 61280 in fp16 | 0xFB: the same, negative |
"""

import sys
from dataclasses import dataclass

import torch

from . import tensor_trees
from .watching import Watching

BAND = 1 << 16  # bytes on either side
ALIGNMENT = 512  # of CUDA's allocator; the bands are a multiple of it
FILL = 0xFF
WORD = 8  # bytes that are compared at once
PADDING = 8  # elements: rows of 16 bits stay aligned, so that the fast paths are used
ALLOCATED = {FILL: 0x7B, 0: 0xFB}
INFINITY = {  # bits; larger ones are signalling NaNs
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float32: 0x7F80_0000,
    torch.float64: 0x7FF0_0000_0000_0000,
}
NAN_KINDS = 60  # of the signalling NaNs that bf16 has


@dataclass(frozen=True)
class Block:
    """Bytes with a tensor in them. elements: the tensor's own, as bytes. start, end: the bytes that it spans. around:
    what the others hold, eight bytes again and again. gaps: must the bytes between its elements stay as well?"""

    memory: torch.Tensor
    elements: torch.Tensor
    start: int
    end: int
    around: bytes
    gaps: bool

    def broken(self) -> bool:
        """Was a byte beside the tensor changed?"""
        if not self.gaps:
            return self._differs(0, self.start) or self._differs(self.end, len(self.memory))
        one = (2 * self.around)[: self.elements.shape[-1]]  # complex128 has sixteen bytes
        rest = self.memory.clone()
        own = rest.as_strided(self.elements.shape, self.elements.stride(), self.start)
        own.copy_(torch.frombuffer(bytearray(one), dtype=torch.uint8))
        return self._differs(0, len(rest), rest)

    def _differs(self, first: int, last: int, memory: torch.Tensor | None = None) -> bool:
        """Do these bytes hold anything else? Whole words are compared at once."""
        memory = self.memory if memory is None else memory
        low, high = -(-first // WORD) * WORD, last // WORD * WORD
        words = memory[low:high].view(torch.int64)
        edges = bytes(memory[first:low].tolist()) + bytes(memory[high:last].tolist())
        expected = self.around[WORD - (low - first) :][: low - first] + self.around[: last - high]
        return edges != expected or bool((words != as_word(self.around)).any())


def as_word(around: bytes) -> int:
    return int.from_bytes(around, sys.byteorder, signed=True)


class Guards:
    """The guarded blocks of one case."""

    def __init__(self):
        self.fill = FILL
        self._blocks: list[Block] = []

    def like(self, tensor: torch.Tensor, device: str | torch.device) -> torch.Tensor:
        """Memory on `device` for a tensor of that shape, strides and dtype which a kernel allocates."""
        return self._made(tensor, device, bytes([ALLOCATED[self.fill]] * WORD))

    def memory(self, tensor: torch.Tensor, device: str, layout: str = "contiguous", number: int = 0) -> torch.Tensor:
        """Memory for the contents of input `number`, in the named layout: as the tensor is, "transposed" (its last two
        dimensions swapped in memory; of a vector, every second element), "outer dimensions swapped" (the two before
        the last), "padded" (rows farther apart than they are long, of each input by another distance), or "misaligned"
        by one element."""
        if tensor.numel() == 0:
            return torch.empty_like(tensor, device=device)
        if layout == "transposed" and tensor.dim() > 1:
            tensor = torch.empty_like(tensor.mT, memory_format=torch.contiguous_format).mT
        elif layout == "outer dimensions swapped" and tensor.dim() > 2:
            tensor = torch.empty_like(tensor.transpose(-3, -2), memory_format=torch.contiguous_format).transpose(-3, -2)
        elif layout == "padded" and tensor.dim() > 1:
            pitch = tensor.shape[-1] + PADDING * (1 + number)
            tensor = tensor.new_empty(*tensor.shape[:-1], pitch)[..., : tensor.shape[-1]]
        elif layout == "transposed" and tensor.dim() == 1:
            tensor = tensor.new_empty(2 * len(tensor))[::2]
        shift, gaps = int(layout == "misaligned"), tensor_trees.has_gaps(tensor)
        return self._made(tensor, device, self._around_input(tensor.dtype, number), shift, gaps)

    def _around_input(self, dtype: torch.dtype, number: int) -> bytes:
        """The eight bytes around an input."""
        if self.fill and (infinity := INFINITY.get(dtype)):
            return (infinity + 1 + number % NAN_KINDS).to_bytes(dtype.itemsize, sys.byteorder) * (
                WORD // dtype.itemsize
            )
        return bytes([self.fill] * WORD)

    def _made(
        self, tensor: torch.Tensor, device: str | torch.device, around: bytes, shift: int = 0, gaps: bool = False
    ) -> torch.Tensor:
        """A guarded tensor of that shape, strides and dtype, `shift` elements off alignment."""
        itemsize = tensor.element_size()
        extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        start, end = BAND + shift * itemsize, BAND + (extent + shift) * itemsize
        words = (BAND + -(-end // ALIGNMENT) * ALIGNMENT) // WORD
        memory = torch.full((words,), as_word(around), dtype=torch.int64, device=device).view(torch.uint8)
        strides = [stride * itemsize for stride in tensor.stride()]
        elements = memory.as_strided((*tensor.shape, itemsize), (*strides, 1), start)
        (elements if gaps else memory[start:end]).fill_(self.fill)
        self._blocks.append(Block(memory, elements, start, end, around, gaps))
        return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), start // itemsize)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Does it lie in a guarded block?"""
        return any(tensor.untyped_storage()._cdata == block.memory.untyped_storage()._cdata for block in self._blocks)

    def broken(self) -> bool:
        """Was a byte beside a tensor changed?"""
        return any(block.broken() for block in self._blocks)


class GuardedAllocation(Watching):
    """Inside the block, every tensor that torch allocates on `device` is guarded. Tensors that torch fills are still
    filled."""

    def __init__(self, guards: Guards, device: str):
        super().__init__()
        self.guards, self.device = guards, device
        aten = torch.ops.aten
        self.empty = {aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default}
        self.empty |= {aten.new_empty.default, aten.new_empty_strided.default}
        self.filled = {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten.ones.default}
        self.resize = aten.resize_.default
        self.filled |= {aten.full.default, aten.full_like.default, aten.new_full.default, aten.ones_like.default}

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function is self.resize and self.guards.holds(arguments[0]):
            return self._resized(*arguments)
        made = function(*arguments, **(keywords or {}))
        if function not in self.empty | self.filled or made.numel() == 0 or made.device.type != self.device:
            return made
        if made.is_pinned() or made.layout is not torch.strided:
            return made
        guarded = self.guards.like(made, made.device)
        return guarded.copy_(made) if function in self.filled else guarded

    def _resized(self, tensor: torch.Tensor, size: list[int], **_) -> torch.Tensor:
        """resize_ of a guarded tensor, which would grow into its band. It gets new guarded memory and keeps its first
        elements."""
        made = self.guards.like(torch.empty(size, dtype=tensor.dtype, device="meta"), tensor.device)
        count = min(made.numel(), tensor.numel())
        made.flatten()[:count].copy_(tensor.flatten()[:count])
        return tensor.set_(made)
