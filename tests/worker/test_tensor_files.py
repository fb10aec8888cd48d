"""Files of tensors, whose contents may come from a GPU piece by piece."""

import time

import pytest
import torch
from kernelopt.worker import case_files, problem, tensor_files, transfers


@pytest.fixture
def in_pieces(monkeypatch):
    """Tensors of 64 bytes and more count as large ones of a GPU."""
    monkeypatch.setattr(tensor_files, "LARGE_BYTES", 64)
    monkeypatch.setattr(transfers, "PIECE_BYTES", 64)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(transfers, "pieces", lambda memory: map(memoryview, cut(memory)))


def cut(memory):
    """What transfers.pieces gives of a GPU's memory."""
    return [part.numpy() for part in memory.split(transfers.PIECE_BYTES)]


def test_large_tensors_come_back_as_they_were(in_pieces, tmp_path):
    shared = torch.arange(4)
    value = {
        "b": [torch.randn(7, 33), torch.zeros(0), shared[:2], (shared[2:], None, 3)],
        "a": {
            "turned": torch.randn(6, 40).t(),
            "narrow": torch.randn(50).bfloat16(),
            "complex": torch.randn(9, dtype=torch.cfloat),
        },
        "view": torch.randn(40, 4)[:, 1:3],
    }
    assert tensor_files.goes_in_pieces(value["b"][0]) and tensor_files.goes_in_pieces(value["a"]["turned"])
    tensor_files.save(value, tmp_path / "file")
    loaded = tensor_files.load(tmp_path / "file")
    torch.testing.assert_close(loaded, value, rtol=0, atol=0, check_stride=True)
    first, second = loaded["b"][2], loaded["b"][3][0]
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.arange(64).as_strided((8, 8), (7, 1)), id="overlapping rows"),
        pytest.param(torch.arange(64)[1:], id="a part of its memory"),
        pytest.param(torch.ones(1).expand(64), id="expanded"),
        pytest.param(torch.ones(64).to_sparse(), id="sparse"),
        pytest.param(torch.ones(15), id="small"),
        pytest.param(torch.randn(32, dtype=torch.cfloat).conj(), id="conjugated"),
        pytest.param(torch.randn(32, dtype=torch.cfloat).conj().imag, id="negated"),
    ],
)
def test_what_is_not_the_whole_of_its_memory_goes_as_usual(in_pieces, tensor, tmp_path):
    assert not tensor_files.goes_in_pieces(tensor)
    beside = torch.randn(20)
    tensor_files.save([tensor, beside], tmp_path / "file")
    loaded = tensor_files.load(tmp_path / "file")
    assert torch.equal(loaded[0].to_dense(), tensor.to_dense()) and torch.equal(loaded[1], beside)


def test_parameters_that_change_after_they_were_stored_are_those_of_then(in_pieces, tmp_path, monkeypatch):
    """A reference may give all its models one tensor; large ones of a GPU were read when a thread came to them."""
    pieces = transfers.pieces
    monkeypatch.setattr(transfers, "pieces", lambda memory: time.sleep(0.05) or pieces(memory))
    monkeypatch.setattr(case_files, "SHARED_BYTES", 1 << 30)  # beside the inputs
    state = {"weight": torch.zeros(64)}
    with case_files.CaseFiles(tmp_path) as files:
        stored = files.add(problem.Case([torch.zeros(64)], [], state, None))
        state["weight"].fill_(1)
    assert not problem.Case.load(stored.path).state["weight"].any()


def test_a_full_disk_is_an_error(in_pieces, tmp_path, monkeypatch):
    def full(_):
        raise OSError("No space left on device")

    monkeypatch.setattr(transfers, "pieces", full)
    with pytest.raises(OSError, match="No space left"):
        tensor_files.save(torch.randn(64), tmp_path / "file")


def test_a_tensor_that_only_says_it_is_on_a_gpu_is_saved_without_cuda(monkeypatch, tmp_path):
    large = torch.ones(transfers.PINNED_BYTES.start, dtype=torch.uint8)
    monkeypatch.setattr(tensor_files, "LARGE_BYTES", large.nbytes)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)
    tensor_files.save({"x": large}, tmp_path / "file")
    monkeypatch.undo()
    assert torch.equal(tensor_files.load(tmp_path / "file")["x"], large)


@pytest.mark.gpu
@pytest.mark.at_once
def test_a_gpus_tensors_come_back_as_they_were(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "LARGE_BYTES", 16 << 20)
    rows = 3 * transfers.PIECE_BYTES // 4096 + 5
    value = {
        "large": torch.randn(rows, 1024, device="cuda"),
        "small": torch.randn(3, device="cuda"),
        "host": torch.ones(4),
    }
    value["turned"] = torch.randn(2048, 4100, device="cuda", dtype=torch.bfloat16).t()
    assert tensor_files.goes_in_pieces(value["large"]) and tensor_files.goes_in_pieces(value["turned"])
    tensor_files.save(value, tmp_path / "file")
    loaded = tensor_files.load(tmp_path / "file")
    assert all(one.device.type == "cpu" and torch.equal(one, value[name].cpu()) for name, one in loaded.items())
    assert loaded["turned"].stride() == value["turned"].stride()
