"""Errors against the oracle, of outputs that would not fit in memory a second time in float64."""

import math

import pytest
import torch
from kernelopt.worker import accuracy
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """Notes the most elements of any tensor that an operator makes, but for views and copies of its arguments' dtype."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not operator.is_view:
            self.elements = max(self.elements, result.numel())
        return result


def test_a_large_output_is_compared_piece_by_piece(monkeypatch):
    """The oracle of a 3.5 GiB output in bf16 takes 14 GiB in float64; two more of them did not fit on an H100."""
    exact = torch.randn(5000, dtype=torch.float64)
    exact[::7] *= 1e3
    exact[3], exact[4999] = math.inf, math.nan
    actual = exact.bfloat16()
    whole = accuracy.errors_of(actual, exact, actual, 1e-2)
    monkeypatch.setattr(accuracy, "CHUNK", 64)
    with Largest() as largest:
        in_pieces = accuracy.errors_of(actual, exact, actual, 1e-2)
    assert largest.elements <= 64
    assert in_pieces.rms == pytest.approx(whole.rms, rel=1e-12)
    assert (in_pieces.elements, in_pieces.finite, in_pieces.any) == (5000, 4998, False)
    assert in_pieces.max_rel == pytest.approx(whole.max_rel, rel=1e-9)


def test_the_scale_of_what_overflows_when_squared_and_of_nothing():
    assert accuracy.root_mean_square(torch.full((9,), 1e300, dtype=torch.float64)) == pytest.approx(1e300)
    assert accuracy.root_mean_square(torch.tensor([3.0, math.nan, math.inf, 4.0])) == pytest.approx(2.5)
    assert accuracy.root_mean_square(torch.tensor([])) == accuracy.root_mean_square(torch.tensor([math.nan])) == 0.0
