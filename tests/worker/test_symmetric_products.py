"""FLOPs of products whose result is symmetric by the way it is made."""

import pytest
from kernelopt.worker import problem, work

ROWS, DEPTH = 16, 24
REFERENCE = """
import torch
from torch import nn
class Model(nn.Module):
    def forward(self, x, y, s):
        {body}
def get_inputs(): return [torch.randn({x}), torch.randn({x}), torch.randn(16, 16)]
"""
FULL = 2 * ROWS * ROWS * DEPTH
HALF = ROWS * (ROWS + 1) * DEPTH
SQUARE, HALF_SQUARE = 2 * ROWS**3, ROWS**2 * (ROWS + 1)
FLOPS = {
    "return x @ x.T": HALF,
    "return torch.nn.functional.linear(x, x)": HALF,
    "return torch.einsum('ik,jk->ij', x, x)": HALF,
    "h = x.half(); return h @ h.T": HALF,
    "return torch.addmm(s, x, x.T)": HALF,
    "a = x @ x.T; return a @ a": HALF + HALF_SQUARE,
    "a = x @ x.T; return a.T @ a": HALF + HALF_SQUARE,
    "a = -2 * (x @ x.T).half().sigmoid(); return a @ a": HALF + HALF_SQUARE,
    "a = x @ x.T; b = torch.addmm(a, a, a, beta=2); return b @ b": HALF + 2 * HALF_SQUARE,
    "a = x @ x.T; b = torch.addmm(s, a, a); return b @ b": HALF + HALF_SQUARE + SQUARE,
    "a = x @ x.T; return a @ s": HALF + SQUARE,
    "a = x @ x.T; a[0] = 1; return a @ a": HALF + SQUARE,
    "a = x @ x.T + s; return a @ a": HALF + SQUARE,
    "a = (x @ x.T) * s[0]; return a @ a": HALF + SQUARE,
    "a = torch.nn.functional.dropout(x @ x.T); return a @ a": HALF + SQUARE,
    "a = torch.rand_like(x @ x.T); return a @ a": HALF + SQUARE,
    "a = x @ x.T; b = a.softmax(-1); return b @ b": HALF + SQUARE,
    "a = x @ x.T; b = a[:, :8]; return b.T @ a[8:].T": HALF + 2 * 8 * 16 * 8,
    "a = x @ x.T; a.data = s; return a @ a": HALF + SQUARE,
    "z = x + 1j * y; h = z @ z.mH + 1j; return (h @ h).abs()": HALF + SQUARE,
    "z = x + 1j * y; h = (z @ z.mH).angle(); return h @ h": HALF + SQUARE,
    "return x @ y.T": FULL,
    "return x @ x.flip(0).T": FULL,
    "return x[:8] @ x[8:].T": FULL // 4,
    "return s @ s": SQUARE,
    "return (x @ x.T).tril()": HALF,
}


@pytest.mark.parametrize("body", FLOPS)
def test_a_product_counts_half_where_its_result_is_symmetric(tmp_path, body):
    (tmp_path / "reference.py").write_text(REFERENCE.format(body=body, x=f"{ROWS}, {DEPTH}"))
    counted = work.estimate(problem.Reference(tmp_path / "reference.py"), "default", None, "cpu")
    assert counted.work.flops == FLOPS[body]


def test_a_batch_of_them_and_no_rows(tmp_path):
    for shape, flops in {f"3, {ROWS}, {DEPTH}": 3 * HALF, f"3, 0, {DEPTH}": 0}.items():
        (tmp_path / "reference.py").write_text(REFERENCE.format(body="return x @ x.mT", x=shape))
        assert work.estimate(problem.Reference(tmp_path / "reference.py"), "default", None, "cpu").work.flops == flops
