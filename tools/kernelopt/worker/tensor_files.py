"""Files of tensors. A GPU's tensor that is too large for pinned memory goes to its file piece by piece: as a whole it
would first take as long to the host, most of that for page faults."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from . import tensor_trees, transfers

LARGE_BYTES = transfers.PINNED_BYTES.stop  # smaller tensors come to the host first
STORED = ["kernelopt tensors", "kernelopt value"]  # keys of a file of `save_in_pieces`


def save(value, path: Path) -> None:
    """Write tensors, in lists and dicts and beside numbers, to a file of torch.save's form. Those of a GPU are on the
    CPU where `load` reads them. Raises OSError or RuntimeError where the disk is full."""
    with without_checksums():
        if holds_large(value):
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
    return loaded[STORED[1]] if isinstance(loaded, dict) and list(loaded) == STORED else loaded


def holds_large(value) -> bool:
    """Does `save` take a tensor of the value piece by piece from a GPU, as it is at that time?"""
    tensors = tensor_trees.input_tensors([value])
    return any(map(goes_in_pieces, tensors)) and all(map(transfers.is_plain, tensors))


def goes_in_pieces(tensor: torch.Tensor) -> bool:
    """Is it a large tensor of a GPU, each byte of whose memory is one of its own? Not one that only says that it is on
    a GPU (compiling.AsOnGpu), where CUDA does not work."""
    if not tensor.is_cuda or not transfers.is_dense(tensor) or tensor.nbytes < LARGE_BYTES:
        return False
    return tensor.untyped_storage().nbytes() == tensor.nbytes and torch.cuda.is_initialized()


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
        # Torch numbers their memory in the order in which it meets them.
        torch.save(dict(zip(STORED, (places, value), strict=True)), path)
    by_memory = {place.untyped_storage()._cdata: source for place, source in zip(places, sources, strict=True)}
    archive = torch._C.PyTorchFileReader(str(path))
    if sum(name.startswith("data/") for name in archive.get_all_records()) != len(by_memory):
        raise RuntimeError("a tensor holds another one, which has no place in the file")
    with open(path, "r+b") as file:
        for number, source in enumerate(by_memory.values()):
            file.seek(archive.get_record_offset(f"data/{number}"))
            memory = torch.empty(0, dtype=torch.uint8, device=source.device).set_(source.untyped_storage())
            for piece in transfers.pieces(memory):
                file.write(piece)
