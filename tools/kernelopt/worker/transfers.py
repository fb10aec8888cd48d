"""Large tensors on their way between the host and a GPU, through pinned memory: from and to other memory CUDA copies
with one thread, and waits for each page that is new."""

import itertools
from collections.abc import Iterator

import torch

# What comes to the host as a whole: torch keeps the pinned memory for the next one. Into fresh pageable memory an H200
# gave 1.2 GB/s. Beyond that size torch would round the pinned memory up to the next power of two.
PINNED_BYTES = range(16 << 20, (1 << 30) + 1)
LARGE_BYTES = 128 << 20  # what goes to a GPU in pieces; below, pinned memory takes longer to get than it saves
PIECE_BYTES = 32 << 20
OF_TORCH = (torch.Tensor, torch.nn.Parameter)  # other classes may have their values elsewhere


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor.cpu()` of a GPU's tensor."""
    # A tensor that only says that it is on a GPU (compiling.AsOnGpu) is copied where CUDA does not work.
    if tensor.is_cuda and torch.cuda.is_initialized() and tensor.nbytes in PINNED_BYTES:
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)
    return tensor.cpu()


def to_device(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """`tensor.to(device)`."""
    return to_gpu(tensor, device) if goes_in_pieces(tensor, device) else tensor.to(device)


def goes_in_pieces(tensor: torch.Tensor, device: str) -> bool:
    """Is it a large, dense tensor of the host, and the device a GPU? From pinned memory CUDA copies fast by itself."""
    to_cuda = tensor.device.type == "cpu" and torch.device(device).type == "cuda" and torch.cuda.is_initialized()
    is_sound = to_cuda and type(tensor) in OF_TORCH and is_dense(tensor)
    return is_sound and tensor.nbytes >= LARGE_BYTES and not tensor.is_pinned()


def is_dense(tensor: torch.Tensor) -> bool:
    """Does its memory hold each element once, as it is, with nothing in between?"""
    return is_plain(tensor) and torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def is_plain(tensor: torch.Tensor) -> bool:
    """Does its memory hold its values as they are?"""
    elsewhere = tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_nested
    return tensor.layout is torch.strided and not elsewhere


def to_gpu(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A copy of a dense tensor. CUDA must have started."""
    try:
        held = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    except RuntimeError:  # the machine has no more memory to pin
        return tensor.to(device, copy=True)
    made = torch.empty_like(tensor, device=device)
    with torch.cuda.device(made.device):
        copy_through(held, [torch.cuda.Event() for _ in held], content(tensor), content(made))
    return made


def copy_through(held: list[torch.Tensor], taken: list, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy bytes piece by piece: torch copies each into the held memory with many threads, while the one before goes
    on to the GPU. taken: an event for each piece of held memory, which ends when what it held has arrived."""
    pieces = zip(source.split(len(held[0])), target.split(len(held[0])), strict=True)
    places = itertools.cycle(zip(held, taken, strict=True))
    for (before, after), (memory, event) in zip(pieces, places, strict=False):
        event.synchronize()
        after.copy_(memory[: len(before)].copy_(before), non_blocking=True)
        event.record()
    for event in taken:
        event.synchronize()


def pieces(memory: torch.Tensor) -> Iterator[memoryview]:
    """Bytes, those of a GPU in pieces; each piece holds until the next one is asked for."""
    if not memory.is_cuda:
        yield memoryview(memory.numpy())
        return
    held = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
    for part in memory.split(PIECE_BYTES):
        yield memoryview(held[: len(part)].copy_(part).numpy())


def content(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor, in the order in which they lie in memory."""
    start = tensor.storage_offset() * tensor.element_size()
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), start, (tensor.nbytes,))
