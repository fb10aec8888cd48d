"""A reference on blank tensors: what they tell, and what it costs to ask them."""

import os
import subprocess
import sys

from conftest import BUNDLE
from kernelopt.worker import problem, variants, work

PRODUCT = """
import torch
class Model(torch.nn.Module):
    def forward(self, a, b):
        return a @ b
def get_inputs():
    return [torch.randn(64, 96), torch.randn(96, 32)]
"""
BESIDE_A_REAL_TENSOR = """
import torch
TABLE = torch.arange(64.0)
class Model(torch.nn.Module):
    def forward(self, x):
        return x + TABLE.sum() + TABLE
def get_inputs():
    return [torch.randn(300, 64)]
"""


def reference(path, text: str) -> problem.Reference:
    path.write_text(text)
    return problem.Reference(path)


def test_sizes_and_work_are_told_without_importing_torch_dynamo(tmp_path):
    (tmp_path / "product.py").write_text(PRODUCT)
    code = f"""
import pathlib, sys
from kernelopt.worker import problem, variants, work
reference = problem.Reference(pathlib.Path({str(tmp_path / "product.py")!r}))
shapes = variants.Shapes(reference, "default", reference.case("default", 0, None, "cpu"))
assert [sorted(group) for group in shapes.groups()] == [[(0, 0, 64)], [(0, 1, 96), (1, 0, 96)], [(1, 1, 32)]]
assert work.estimate(reference, "default", None, "cpu")["flops"] == 2 * 64 * 96 * 32
assert "torch._dynamo" not in sys.modules
"""
    environment = {**os.environ, "PYTHONPATH": str(BUNDLE / "tools")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_reference_that_adds_a_real_tensor_is_tried_on_fake_ones(tmp_path):
    mixed = reference(tmp_path / "mixed.py", BESIDE_A_REAL_TENSOR)
    shapes = variants.Shapes(mixed, "default", mixed.case("default", 0, None, "cpu"))
    assert shapes.groups() == [[(0, 0, 300)]]
    assert work.estimate(mixed, "default", None, "cpu")["bytes_min"] == 2 * 4 * 300 * 64
