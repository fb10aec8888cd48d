"""A reference on blank tensors: what they tell, and what it costs to ask them."""

import forks_with_torch
from kernelopt.worker import problem, variants, work

DECLARED = """
import torch
class Model(torch.nn.Module):
    def forward(self, x, out): torch.add(x, 1, out=out)
def get_inputs(): return [torch.randn(12, 16), torch.empty(12, 16)]
MUTATES = ("out",)
"""
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


# By name: an operation of a library that a reference may call, as an expression.
OPERATIONS = {
    "layer norm": "F.layer_norm(randn(4, 8), (8,))",
    "RMS norm": "F.rms_norm(randn(4, 8), (8,))",
    "group norm": "F.group_norm(randn(2, 8, 4, 4), 4)",
    "batch norm": "torch.nn.BatchNorm2d(8)(randn(2, 8, 4, 4))",
    "convolution": "torch.nn.Conv2d(8, 16, 3)(randn(2, 8, 9, 9))",
    "transposed convolution": "torch.nn.ConvTranspose3d(8, 16, 3)(randn(2, 8, 5, 5, 5))",
    "attention": "F.scaled_dot_product_attention(*3 * [randn(2, 4, 16, 8)], is_causal=True)",
    "embedding": "F.embedding(torch.randint(0, 10, (4, 5)), randn(10, 8))",
    "LSTM": "torch.nn.LSTM(8, 16)(randn(5, 3, 8))",
    "pooling": "F.max_pool3d(randn(2, 3, 8, 8, 8), 2)",
    "scan": "randn(4, 8).cumsum(1)",
    "sort": "randn(4, 8).sort(1)",
    "einsum": "torch.einsum('bij,bjk->bik', randn(2, 3, 4), randn(2, 4, 5))",
    "cross entropy": "F.cross_entropy(randn(4, 10), torch.randint(0, 10, (4,)))",
    "interpolation": "F.interpolate(randn(1, 3, 8, 8), scale_factor=2, mode='bilinear')",
    "gather": "randn(4, 8).gather(1, torch.randint(0, 8, (4, 3)))",
    "scatter": "torch.zeros(4, 8).scatter_add(1, torch.randint(0, 8, (4, 3)), randn(4, 3))",
    "mask": "randn(4, 8).masked_fill(torch.arange(8)[None] < torch.randint(1, 8, (4, 1)), -1e9)",
    "norm": "torch.linalg.norm(randn(4, 8))",
    "8-bit product": "randn(16, 16).to(torch.float8_e4m3fn).to(torch.bfloat16) @ randn(16, 16).bfloat16()",
    "activation": "F.gelu(randn(4, 8))",
    "random values": "torch.empty(4, 8).uniform_(-1, 1) + torch.empty(4, 8).normal_()",
}


def reference(path, text: str) -> problem.Reference:
    path.write_text(text)
    return problem.Reference(path)


def test_memory_of_an_output_is_filled_without_importing_torch_dynamo(tmp_path):
    """torch.use_deterministic_algorithms, which fills it too, imports it: two seconds in each process of a verification."""
    (tmp_path / "declared.py").write_text(DECLARED)
    code = f"""
import pathlib, sys, torch
from kernelopt.worker import problem
reference = problem.Reference(pathlib.Path({str(tmp_path / "declared.py")!r}))
_, out = reference.case("default", 0, None, "cpu").inputs
assert out.isnan().all() and not torch.are_deterministic_algorithms_enabled()
assert "torch._dynamo" not in sys.modules
"""
    done = forks_with_torch.run(code)
    assert done.returncode == 0, done.stdout


def test_sizes_and_work_are_told_without_importing_torch_dynamo(tmp_path):
    (tmp_path / "product.py").write_text(PRODUCT)
    code = f"""
import pathlib, sys
from kernelopt.worker import problem, variants, work
reference = problem.Reference(pathlib.Path({str(tmp_path / "product.py")!r}))
shapes = variants.Shapes(reference, "default", reference.case("default", 0, None, "cpu"))
assert [sorted(group) for group in shapes.groups()] == [[(0, 0, 64)], [(0, 1, 96), (1, 0, 96)], [(1, 1, 32)]]
assert work.estimate(reference, "default", None, "cpu").work.flops == 2 * 64 * 96 * 32
assert "torch._dynamo" not in sys.modules
"""
    done = forks_with_torch.run(code)
    assert done.returncode == 0, done.stdout


def test_a_reference_that_adds_a_real_tensor_is_tried_on_fake_ones(tmp_path):
    mixed = reference(tmp_path / "mixed.py", BESIDE_A_REAL_TENSOR)
    shapes = variants.Shapes(mixed, "default", mixed.case("default", 0, None, "cpu"))
    assert shapes.groups() == [[(0, 0, 300)]]
    assert work.estimate(mixed, "default", None, "cpu").work.bytes_min == 2 * 4 * 300 * 64


OFFSETS = """
import torch
from torch import nn
class Model(nn.Module):
    def forward(self, x, weights, offsets):
        y = x.new_empty(len(x), weights.shape[2])
        for expert, (first, last) in enumerate(zip(offsets.tolist(), offsets[1:].tolist())):
            y[first:last] = x[first:last] @ weights[expert]
        return y
def get_inputs():
    counts = torch.randint(1, 5, (8,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return [torch.randn(int(offsets[-1]), 1 << 20), torch.randn(8, 1 << 20, 1 << 20), offsets]
"""


def test_a_reference_that_loops_over_offsets_needs_no_contents_of_other_numbers(tmp_path):
    """Its weights would take 32 TB."""
    loops = reference(tmp_path / "loops.py", OFFSETS)
    counted = work.estimate(loops, "default", None, "cpu")
    rows = counted.shapes["inputs"][0][0]
    few, many = (flops / (2 << 40) for flops in counted.drawn_flops)  # rows of some draws, of which one has the shapes
    assert few.is_integer() and many.is_integer() and 8 <= few <= rows <= many <= 32
    assert few < counted.work.flops / (2 << 40) < many


BY_SHARES = OFFSETS.replace("torch.randint(1, 5, (8,))", "torch.bincount(torch.rand(20, 8).argmax(1), minlength=8)")


def test_offsets_that_floats_decide_need_no_contents_of_large_tensors(tmp_path):
    drawn = reference(tmp_path / "drawn.py", BY_SHARES)
    assert work.estimate(drawn, "default", None, "cpu").work.flops == 2 * 20 << 40


WRITES = """
import torch
from torch import nn
class Model(nn.Module):
    def forward(self, x, slots):
        taken = slots.tolist()  # on shapes alone this cannot be
        slots[: len(x)] = x.argmax(1)
        return x[slots.tolist()[0] :]
def get_inputs():
    return [torch.eye(4).flip(1), torch.zeros(6, dtype=torch.int64)]
"""


def test_whole_numbers_that_take_unknown_ones_are_counted_for_real(tmp_path):
    written = reference(tmp_path / "written.py", WRITES)
    assert work.estimate(written, "default", None, "cpu").shapes["outputs"] == [[1, 4]]


def test_no_operation_on_meta_tensors_loads_a_compiler():
    """In a process of its own: others of this suite have loaded them."""
    code = f"""if True:
        import sys, torch, torch.nn.functional as F
        from torch import randn
        from kernelopt.worker import blank
        for name, operation in {OPERATIONS!r}.items():
            try:
                with blank.without_compilers(), torch.device("meta"), torch.no_grad():
                    eval(operation)
            except Exception as error:
                print(f"{{name}}: {{error!r}}")
        print(*(set(blank.STAND_INS) & set(sys.modules)), sep="")
    """
    assert forks_with_torch.run(code).stdout == "\n"
