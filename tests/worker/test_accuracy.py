"""Errors against the oracle, of outputs that would not fit in memory a second time in float64."""

import math

import pytest
import torch
from kernelopt.worker import accuracy, comparisons
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
    whole = accuracy.Bounds(exact, actual, 1e-2).errors_of(actual)
    monkeypatch.setattr(accuracy, "CHUNK", 64)
    with Largest() as largest:
        in_pieces = accuracy.Bounds(exact, actual, 1e-2).errors_of(actual)
    assert largest.elements <= 64
    assert in_pieces.rms == pytest.approx(whole.rms, rel=1e-12)
    assert (in_pieces.elements, in_pieces.finite, in_pieces.any) == (5000, 4998, False)
    assert in_pieces.max_rel == pytest.approx(whole.max_rel, rel=1e-9)


def test_the_scale_of_what_overflows_when_squared_and_of_nothing():
    assert accuracy.root_mean_square(torch.full((9,), 1e300, dtype=torch.float64)) == pytest.approx(1e300)
    assert accuracy.root_mean_square(torch.tensor([3.0, math.nan, math.inf, 4.0])) == pytest.approx(2.5)
    assert accuracy.root_mean_square(torch.tensor([])) == accuracy.root_mean_square(torch.tensor([math.nan])) == 0.0


def attention_of_few_and_many(tokens: int = 8192):
    """Causal attention of the first queries and of each fourth: (exact, with weights in bf16 as FlashAttention has
    them)."""
    torch.manual_seed(3)
    asked = torch.cat([torch.arange(16), torch.arange(16, tokens, 4)])
    q, k, v = (torch.randn(tokens, width).bfloat16().double() for width in (64, 64, 256))
    scores = (q[asked] @ k.T / 8).masked_fill(torch.arange(tokens) > asked[:, None], -math.inf)
    weights = (scores - scores.amax(1, keepdim=True)).exp()
    rounded = weights.bfloat16().double() @ v / weights.sum(1, keepdim=True)
    return weights @ v / weights.sum(1, keepdim=True), rounded.bfloat16()


def test_rows_of_a_larger_scale_may_be_off_by_more():
    """The first rows of causal attention are averages of few values: larger than the others, as are their roundings."""
    exact, flash = attention_of_few_and_many()
    found = accuracy.compare(flash, exact, exact.bfloat16(), 1.6e-2).errors
    assert not found.any
    flat = accuracy.compare(flash.reshape(-1), exact.reshape(-1), exact.bfloat16().reshape(-1), 1.6e-2).errors
    assert flat.mismatches and found.max_rel < flat.max_rel  # without rows


def test_rows_of_a_small_scale_are_held_against_the_whole():
    exact = torch.randn(64, 64, dtype=torch.float64)
    exact[7] *= 1e-3
    off = exact.clone()
    off[7, 3] += 1.1e-2 * accuracy.root_mean_square(exact)
    assert [accuracy.compare(off, exact, exact, bound).errors.mismatches for bound in (1e-2, 1.2e-2)] == [1, 0]


def test_a_wrong_key_in_a_long_row_is_seen_beside_a_large_one():
    """A row's own scale does not hide a key too many, and a large row hides nothing in the others."""
    exact, flash = attention_of_few_and_many()
    for row in (20, len(flash) - 2):
        one_more = flash.clone()
        one_more[row] = flash[row + 1]
        assert accuracy.compare(one_more, exact, exact.bfloat16(), 1.6e-2).errors.mismatches > 8


@pytest.mark.parametrize("shape", [(4096,), (1, 4096), (512, 8)])
def test_without_rows_or_with_short_ones_the_scale_is_that_of_the_whole(shape):
    exact = torch.randn(shape, dtype=torch.float64)
    assert accuracy.scale_of(exact).of(0, 4096) == pytest.approx(accuracy.root_mean_square(exact))


def test_scales_of_pieces_that_begin_within_a_row():
    exact = torch.randn(10, 24, dtype=torch.float64) * torch.arange(1, 11)[:, None]
    scale = accuracy.scale_of(exact)
    each = scale.of(0, 240)
    assert torch.equal(torch.cat([scale.of(start, min(start + 7, 240)) for start in range(0, 240, 7)]), each)


def test_an_outlier_hides_nothing_in_its_row():
    """A residual stream with one massive activation."""
    exact = torch.randn(512, 256, dtype=torch.float64)
    exact[100, 7] = 1e4
    off = exact.clone()
    off[100, 8:] = 0
    assert accuracy.compare(off, exact, exact, 1.6e-2).errors.mismatches > 100


def test_rows_as_large_as_the_others_have_the_scale_of_the_whole():
    """Of equal numbers the mean |element| times AS_NORMAL is more than their rms."""
    for exact in (torch.full((8, 4096), 0.9, dtype=torch.float64), torch.rand(8, 4096, dtype=torch.float64)):
        assert float(accuracy.scale_of(exact).rows.max()) < 1.1 * accuracy.root_mean_square(exact)
    off = torch.full((64, 64), 0.9, dtype=torch.float64) * 1.0325
    assert accuracy.compare(off, off / 1.0325, off / 1.0325, 1.6e-2).errors.mismatches == 64 * 64


def test_the_size_of_a_row_does_not_overflow():
    exact = 1e307 * torch.randn(64, 64, dtype=torch.float64)
    exact[3] = 8e307
    off = exact.clone()
    off[3] = 0
    assert accuracy.compare(off, exact, exact, 1e-7).errors.mismatches == 64


def test_the_scale_of_a_masked_row_is_that_of_what_counts():
    exact = torch.ones(4, 64, dtype=torch.float64)
    exact[0, 3] = 24.0
    mask = torch.ones(4, 64, dtype=torch.bool)
    mask[0] = False
    mask[0, 3] = True
    scale = accuracy.scale_at(exact, mask)
    assert scale.of(0, 1)[0] == pytest.approx(24)
    assert scale.of(1, 193).max() == pytest.approx(scale.rms)


def test_a_mask_chooses_among_complex_numbers():
    exact = torch.randn(6, 20, dtype=torch.complex128)
    mask = torch.arange(20)[None, :] < 7
    declared = comparisons.Comparison(("x",), valid=lambda x: mask)
    for column, wrong in ((3, 1), (9, 0)):
        off = exact.clone()
        off[2, column] += 1
        found = comparisons.compare(off, accuracy.Bounds(exact, exact, 1e-2), declared, [exact])
        assert found.errors.mismatches == wrong


def test_what_a_declaration_leaves_out_is_no_scale():
    exact = torch.randn(32, 64, dtype=torch.float64)
    mask = torch.arange(64)[None, :] < 40
    exact[:, 40:] = 1e6
    off = exact.clone()
    off[5, 3] += 0.05
    declared = comparisons.Comparison(("x",), valid=lambda x: mask)
    bounds = accuracy.Bounds(exact, exact, 1e-2)
    assert comparisons.compare(off, bounds, declared, [exact]).errors.mismatches == 1
