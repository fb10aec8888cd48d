"""Expressions that make tensors like recorded ones: sizes, strides, dtype and kind of numbers."""

import pytest
import torch
from kernelopt.worker import recorded_values
from kernelopt.worker.contract import NotCut

NAMES: dict = {"torch": torch}
for code in recorded_values.HELPERS.values():
    exec(code, NAMES)

torch.manual_seed(0)
CUBE = torch.randn(4, 6, 8)
INFINITE = torch.full((4, 4), float("-inf"))
LIKE = {
    "contiguous": CUBE,
    "transposed": CUBE.transpose(0, 1),
    "permuted": CUBE.permute(2, 0, 1),
    "cut off": CUBE[:, :, :3],
    "every second": CUBE[..., ::2],
    "expanded": CUBE[:1].expand(3, 6, 8),
    "one of three, turned": torch.randn(2, 12, 3, 8)[:, :, 1].transpose(1, 2),
    "sizes of 1": torch.randn(1, 5, 1, 8).transpose(1, 2),
    "bf16": torch.randn(9).bfloat16(),
    "fp8": torch.randn(3, 4).to(torch.float8_e4m3fn),
    "complex": torch.randn(3, dtype=torch.complex64),
    "empty": torch.empty(0, 3),
    "number": torch.tensor(3),
}


@pytest.mark.parametrize("name", LIKE)
def test_sizes_strides_and_dtype_are_those_recorded(name):
    tensor = LIKE[name]
    made = eval(recorded_values.expression(tensor, [str(size) for size in tensor.shape]), NAMES)
    strides = [
        (own, other) for own, other, size in zip(made.stride(), tensor.stride(), tensor.shape, strict=True) if size > 1
    ]
    assert (made.shape, made.dtype) == (tensor.shape, tensor.dtype) and all(own == other for own, other in strides)


KINDS = [
    (torch.arange(5), ["n"], "torch.arange(n, dtype=torch.int64)"),
    (
        torch.arange(3, 8)[None].repeat(2, 1),
        ["2", "n"],
        "(3 + torch.arange(n, dtype=torch.int64)).expand((2, n)).contiguous()",
    ),
    (torch.tensor([2, 0, 1, 3]), ["n"], "torch.randperm(n, dtype=torch.int64)"),
    (torch.tensor([0, 3, 3, 9]), ["4"], "ordered((4,), 0, 9).to(torch.int64)"),
    (torch.tensor([5, 0, 9]), ["n"], "torch.randint(0, 9 + 1, (n,), dtype=torch.int64)"),
    (torch.ones(5, 5, dtype=torch.bool).tril(), ["n", "n"], "triangle((n, n), 0, True, False, torch.bool)"),
    (INFINITE[:2].triu(3), ["m", "n"], 'triangle((m, n), n - m, 0.0, float("-inf"), torch.float32)'),
    (torch.zeros(3, 3), ["3", "n"], "torch.full((3, n), 0.0, dtype=torch.float32)"),
    (torch.tensor([True, False, False, True]), ["4"], "either((4,), 0.5, False, True, torch.bool)"),
]


@pytest.mark.parametrize("tensor, sizes, text", KINDS)
def test_kinds_of_numbers_are_told_apart(tensor, sizes, text):
    assert recorded_values.expression(tensor, sizes) == text
    made = eval(text, {**NAMES, **dict(zip("mn", (2, 4), strict=True))})
    assert made.dtype == tensor.dtype


BEGINNINGS = [
    (torch.tensor([20]), torch.arange(5, 9), "(20 + torch.arange(n, dtype=torch.int64))"),
    (torch.tensor([0]), torch.arange(5, 9), "torch.arange(n, dtype=torch.int64)"),
    (torch.tensor([7]), torch.tensor([5, 0, 9]), "torch.randint(0, 9 + 1, (n,), dtype=torch.int64)"),
    (torch.tensor([7]), torch.tensor([3]), "torch.full((n,), 7, dtype=torch.int64)"),
    (torch.tensor([True]), torch.tensor([True, False, True]), "either((n,), 0.333333, False, True, torch.bool)"),
]


@pytest.mark.parametrize("single, larger, text", BEGINNINGS)
def test_a_single_number_is_of_the_kind_that_another_workload_shows(single, larger, text):
    """The slot of a cache that a decoder writes to: others in a row would be one and the same slot."""
    assert recorded_values.expression(single, ["n"], larger) == text


def test_numbers_have_the_range_and_the_deviation_of_the_recorded_ones():
    tensor = 5 + 3 * torch.rand(50, 50)
    made = eval(recorded_values.expression(tensor, ["2000", "50"]), NAMES)
    assert tensor.min() - 1e-4 <= made.min() and made.max() <= tensor.max() + 1e-4
    assert made.mean().item() == pytest.approx(tensor.mean().item(), rel=0.02)
    assert made.std().item() == pytest.approx(tensor.std().item(), rel=0.2)


def test_infinities_in_no_pattern_are_refused():
    with pytest.raises(NotCut, match="--keep-inputs"):
        recorded_values.expression(torch.tensor([1.0, float("inf"), 2.0]), ["3"])
