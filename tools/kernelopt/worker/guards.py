"""Guard bands: tensors that lie between bytes which no kernel may change.

All bytes of a block, tensor and bands alike, start as `fill`, at first 0xFF: NaN in every floating format, -1 in the
integers. So an unwritten output and a read out of bounds show as NaN, and a write out of bounds shows as a changed
band.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

BAND = 1 << 16  # bytes on either side
ALIGNMENT = 512  # of CUDA's allocator; the bands are a multiple of it
FILL = 0xFF
PADDING = 8  # elements: rows of 16 bits stay aligned, so that the fast paths are used


class Guards:
    """The guarded blocks of one case."""

    def __init__(self):
        self.fill = FILL
        self._blocks: list[tuple[torch.Tensor, int, int, int]] = []

    def like(self, tensor: torch.Tensor, device: str | torch.device, shift: int = 0) -> torch.Tensor:
        """Memory on `device` for a tensor of that shape, strides and dtype, `shift` elements off alignment."""
        extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        size = (extent + shift) * tensor.element_size()
        end = BAND + -(-size // ALIGNMENT) * ALIGNMENT
        block = torch.full((end + BAND,), self.fill, dtype=torch.uint8, device=device)
        self._blocks.append((block, BAND + shift * tensor.element_size(), BAND + size, self.fill))
        start = BAND // tensor.element_size() + shift
        return block.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), start)

    def memory(self, tensor: torch.Tensor, device: str, layout: str = "contiguous") -> torch.Tensor:
        """Memory for a tensor's contents, in the named layout: as the tensor is, "transposed" (its last two dimensions
        swapped in memory; of a vector, every second element), "outer dimensions swapped" (the two before the last),
        "padded" (rows farther apart than they are long), or "misaligned" by one element."""
        if tensor.numel() == 0:
            return torch.empty_like(tensor, device=device)
        if layout == "transposed" and tensor.dim() > 1:
            tensor = torch.empty_like(tensor.mT, memory_format=torch.contiguous_format).mT
        elif layout == "outer dimensions swapped" and tensor.dim() > 2:
            tensor = torch.empty_like(tensor.transpose(-3, -2), memory_format=torch.contiguous_format).transpose(-3, -2)
        elif layout == "padded" and tensor.dim() > 1:
            tensor = tensor.new_empty(*tensor.shape[:-1], tensor.shape[-1] + PADDING)[..., : tensor.shape[-1]]
        elif layout == "transposed" and tensor.dim() == 1:
            tensor = tensor.new_empty(2 * len(tensor))[::2]
        return self.like(tensor, device, shift=1 if layout == "misaligned" else 0)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Does it lie in a guarded block?"""
        return any(tensor.untyped_storage()._cdata == block.untyped_storage()._cdata for block, *_ in self._blocks)

    def broken(self) -> bool:
        """Was a byte beside a tensor changed?"""
        return any(
            bool((block[:start] != fill).any() or (block[end:] != fill).any())
            for block, start, end, fill in self._blocks
        )


class GuardedAllocation(TorchDispatchMode):
    """Inside the block, every tensor that torch allocates on `device` is guarded. Tensors that torch fills are still
    filled."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would import all of torch._dynamo at the first call, to keep torch.compile out of the code below."""
        return False

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
