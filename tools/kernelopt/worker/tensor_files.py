"""Files of tensors. A large tensor of a GPU goes to its file piece by piece: a copy of the whole on the host takes as
long again, most of it page faults."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from . import tensor_trees

LARGE_BYTES = 16 << 20  # smaller tensors come to the host first
PIECE_BYTES = 32 << 20
STORED = ["tensors", "value"]  # keys of a file of `save_in_pieces`, in the order in which torch numbers their memory


def save(value, path: Path) -> None:
    """Write tensors, in lists and dicts and beside numbers, to a file of torch.save's form. Those of a GPU are on the
    CPU where `load` reads them. Raises OSError or RuntimeError where the disk is full."""
    with without_checksums():
        tensors = tensor_trees.input_tensors([value])
        if any(map(goes_in_pieces, tensors)) and all(one.layout is torch.strided for one in tensors):
            save_in_pieces(value, path)
        else:
            torch.save(tensor_trees.on_cpu(value), path)


@contextlib.contextmanager
def without_checksums() -> Iterator[None]:
    """Inside, torch.save omits checksums, which take a third of the time for large tensors. Threads that save need it
    around them all, because the option is the process's."""
    usual = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(usual)


def load(path: Path):
    """Read a file of `save`. Tensors are read at their first use."""
    loaded = torch.load(path, weights_only=True, mmap=True)
    return loaded["value"] if isinstance(loaded, dict) and list(loaded) == STORED else loaded


def before_file(value):
    """The value with its tensors on the CPU, but for those that `save` takes from the GPU piece by piece."""
    return tensor_trees.map_tensors(value, lambda one: one if goes_in_pieces(one) else tensor_trees.on_cpu(one))


def goes_in_pieces(tensor: torch.Tensor) -> bool:
    """Is it a large tensor of a GPU, each byte of whose memory is one of its own? Not one that only says that it is on
    a GPU (compiling.AsOnGpu), where CUDA does not work."""
    if not tensor.is_cuda or tensor.layout is not torch.strided or tensor.nbytes < LARGE_BYTES:
        return False
    fills = tensor.untyped_storage().nbytes() == tensor.nbytes
    return fills and torch.empty_like(tensor, device="meta").stride() == tensor.stride() and torch.cuda.is_initialized()


def save_in_pieces(value, path: Path) -> None:
    """`save` of a value that holds large tensors of a GPU: first a file whose tensors have their places and no
    contents, then the contents."""
    sources: list[torch.Tensor] = []
    places: list[torch.Tensor] = []

    def place_of(tensor: torch.Tensor) -> torch.Tensor:
        large = goes_in_pieces(tensor)
        place = torch.empty_like(tensor, device="cpu") if large else tensor_trees.on_cpu(tensor)
        places.append(place)
        sources.append(tensor if large else place)
        return place

    value = tensor_trees.map_tensors(value, place_of)
    with torch.serialization.skip_data():
        torch.save(dict(zip(STORED, (places, value), strict=True)), path)
    by_memory = {place.untyped_storage()._cdata: source for place, source in zip(places, sources, strict=True)}
    archive = torch._C.PyTorchFileReader(str(path))
    with open(path, "r+b") as file:
        for number, source in enumerate(by_memory.values()):
            file.seek(archive.get_record_offset(f"data/{number}"))
            for piece in pieces(source):
                file.write(piece)


def pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor's memory, in pieces; each holds until the next one is asked for."""
    content = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    if not content.is_cuda:
        yield memoryview(content.numpy())
        return
    held = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
    for part in content.split(PIECE_BYTES):
        yield memoryview(held[: len(part)].copy_(part).numpy())
