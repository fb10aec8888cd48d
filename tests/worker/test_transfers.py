"""Large tensors on their way between the host and a GPU."""

from typing import ClassVar

import pytest
import torch
from kernelopt.worker import tensor_files, tensor_trees, transfers


class Later(torch.Tensor):
    """In place of a piece of a GPU's memory: what is copied to it without waiting is read when its event is over."""

    on_their_way: ClassVar[list] = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.copy_ and (kwargs or {}).get("non_blocking"):
            cls.on_their_way.append(args[:2])
            return args[0]
        return super().__torch_function__(function, types, args, kwargs or {})


class Event:
    """In place of an event of CUDA."""

    def __init__(self):
        self.copies = []

    def record(self):
        self.copies += Later.on_their_way
        Later.on_their_way.clear()

    def synchronize(self):
        for to, source in self.copies:
            to.copy_(source)
        self.copies.clear()


@pytest.mark.parametrize("length", [0, 1, 64, 65, 200, 640])
def test_all_bytes_arrive_and_no_memory_is_filled_before_it_is_free(length):
    source = torch.randint(256, (length,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    held, taken = [torch.empty(64, dtype=torch.uint8) for _ in range(2)], [Event(), Event()]
    transfers.copy_through(held, taken, source, target.as_subclass(Later))
    assert torch.equal(target, source) and not Later.on_their_way


LAYOUTS = {
    "contiguous": lambda x: x,
    "turned": lambda x: x.t(),
    "a part": lambda x: x[3:-2],
    "channels last": lambda x: x.view(4, 8, 16, -1).to(memory_format=torch.channels_last),
    "complex": lambda x: torch.view_as_complex(x.view(-1, 2)),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_content_of_a_dense_tensor_is_its_bytes(layout):
    tensor = layout(torch.randn(64, 96))
    assert transfers.is_dense(tensor)
    other = torch.empty_like(tensor)
    transfers.content(other).copy_(transfers.content(tensor))
    assert torch.equal(other, tensor) and other.stride() == tensor.stride()


NOT_DENSE = {
    "gaps": torch.randn(64, 96)[:, ::2],
    "expanded": torch.randn(64, 1).expand(64, 96),
    "overlapping": torch.randn(64).as_strided((8, 8), (7, 1)),
    "conjugated": torch.randn(64, dtype=torch.cfloat).conj(),
    "negated": torch.randn(64, dtype=torch.cfloat).conj().imag,
    "sparse": torch.randn(64, 96).to_sparse(),
    "of a class": torch.randn(64, 96).as_subclass(Later),
}


@pytest.mark.parametrize("tensor", NOT_DENSE.values(), ids=NOT_DENSE)
def test_a_tensor_that_is_not_dense_goes_as_usual(tensor, monkeypatch):
    monkeypatch.setattr(transfers, "LARGE_BYTES", 0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert not transfers.goes_in_pieces(tensor, "cuda")


def test_only_large_tensors_that_cuda_takes_go_in_pieces(monkeypatch):
    large = torch.empty(transfers.LARGE_BYTES, dtype=torch.uint8)
    assert not transfers.goes_in_pieces(large, "cuda:0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert transfers.goes_in_pieces(large, "cuda:0") and transfers.goes_in_pieces(large[: len(large)], "cuda")
    assert not transfers.goes_in_pieces(large[1:], "cuda") and not transfers.goes_in_pieces(large, "cpu")
    assert transfers.to_device(large, "cpu") is large
    assert tensor_trees.copied(large, "cpu").data_ptr() != large.data_ptr()


@pytest.mark.gpu
@pytest.mark.at_once
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_large_tensor_of_a_file_comes_to_the_gpu_as_it_was(layout, tmp_path):
    torch.cuda.init()
    tensor = layout(torch.randn(transfers.LARGE_BYTES // (4 * 4096) + 64, 4096))
    tensor_files.save([tensor], tmp_path / "file")
    (loaded,) = tensor_files.load(tmp_path / "file")
    assert transfers.goes_in_pieces(loaded, "cuda")
    for made in (transfers.to_device(loaded, "cuda"), tensor_trees.place(loaded, "cuda")):
        assert made.is_cuda and made.stride() == loaded.stride() and torch.equal(made.cpu(), tensor)


def test_without_memory_to_pin_a_tensor_goes_as_usual(monkeypatch):
    def refused(*_, **options):
        raise RuntimeError("CUDA error: out of memory")

    tensor = torch.randn(64)
    monkeypatch.setattr(torch, "empty", refused)
    made = transfers.to_gpu(tensor, "cpu")
    assert torch.equal(made, tensor) and made is not tensor
