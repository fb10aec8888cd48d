"""The least work of a problem (worker.work)."""

import statistics

import pytest
import torch
from kernelopt.hardware.work import CountedWorkload
from kernelopt.worker import problem, traffic, work


def reference(tmp_path, text: str) -> problem.Reference:
    path = tmp_path / "reference_file.py"
    path.write_text(text)
    return problem.Reference(path)


def test_work_of_a_matrix_product_and_of_attention(tmp_path):
    text = """
import torch, torch.nn as nn
class Model(nn.Module):
    def forward(self, a, b): return a @ b
def get_inputs(): return [torch.randn(64, 32), torch.randn(32, 16)]
def get_workloads():
    return {"large": lambda: [torch.randn(1 << 20, 1 << 12), torch.randn(1 << 12, 1 << 12)]}
"""
    oracle = reference(tmp_path, text)
    small = work.estimate(oracle, "default", "bf16", "cpu").work
    assert small.flops == 2 * 64 * 32 * 16
    assert small.bytes_min == 2 * (64 * 32 + 32 * 16 + 64 * 16) and small.dtype == "bf16"
    assert (
        work.estimate(oracle, "large", None, "cpu").work.flops == 2 * 2**20 * 2**12 * 2**12
    )  # shapes alone: no memory


@pytest.mark.parametrize(
    ("call", "pairs"),
    [
        ("F.scaled_dot_product_attention(q, k, v)", 100 * 100),
        ("F.scaled_dot_product_attention(q, k, v, is_causal=True)", 100 * 101 // 2),
        ("F.scaled_dot_product_attention(q, k, v, None, 0.0, True)", 100 * 101 // 2),
        ("F.scaled_dot_product_attention(q[:, :, :60], k, v, is_causal=True)", 60 * 61 // 2),
        ("F.scaled_dot_product_attention(q, k[:, :, :60], v[:, :, :60], is_causal=True)", 60 * 61 // 2 + 40 * 60),
        ("F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], is_causal=True, enable_gqa=True)", 100 * 101 // 2),
    ],
)
def test_work_of_attention_is_what_the_causal_mask_leaves(tmp_path, call, pairs):
    text = f"""
import torch, torch.nn as nn, torch.nn.functional as F
class Model(nn.Module):
    def forward(self, q, k, v): return {call}
def get_inputs(): return [torch.randn(2, 4, 100, 16), torch.randn(2, 4, 100, 16), torch.randn(2, 4, 100, 32)]
"""
    counted = work.estimate(reference(tmp_path, text), "default", "bf16", "cpu").work
    assert counted.flops == 2 * 2 * 4 * pairs * (16 + 32)


@pytest.mark.parametrize(
    ("call", "share"),
    [
        ("F.conv2d(x, w, padding=1)", 100),
        ("F.conv1d(x[:, :, 0], w[:, :, 0])", 100),
        ("F.conv2d(x, w, stride=(1, 2))", 100),  # along the first axis
        ("F.conv2d(x, w, stride=2)", 0),
        ("F.conv2d(x, w, dilation=2)", 0),
        ("F.conv2d(x, w[:, :, :2, :2])", 0),
        ("F.conv2d(x[:, :, :3, :3], w)", 0),  # one result
        ("F.conv2d(x[:, :3], w[:, :3])", 0),  # few channels
        ("F.conv2d(x, w[:, :64], groups=2)", 0),
        ("F.conv_transpose2d(x, w)", 0),
        ("F.conv2d(x.to(torch.int8).float(), w.to(torch.int8).float())", 0),
        ("F.conv2d(x, w) @ x.new_ones(7, 9 * 128)", 50),
    ],
)
def test_convolutions_that_fewer_products_do_are_told(tmp_path, call, share):
    text = f"""
import torch, torch.nn as nn, torch.nn.functional as F
class Model(nn.Module):
    def forward(self, x, w): return {call}
def get_inputs(): return [torch.randn(3, 128, 9, 9), torch.randn(128, 128, 3, 3)]
"""
    counted = work.estimate(reference(tmp_path, text), "default", None, "cpu")
    assert counted.work.windowed_pct == share
    assert CountedWorkload.from_json(counted.to_json()) == counted


def test_work_of_products_with_a_vector(tmp_path):
    text = """
import torch, torch.nn as nn
class Model(nn.Module):
    def forward(self, a, v, b): return a @ v, v @ v, torch.addmv(b, a, v)
def get_inputs(): return [torch.randn(64, 32), torch.randn(32), torch.randn(64)]
"""
    counted = work.estimate(reference(tmp_path, text), "default", None, "cpu").work
    assert counted.flops == 2 * 64 * 32 + 2 * 32 + 2 * 64 * 32


def test_work_of_a_reference_that_looks_at_values(tmp_path):
    text = """
import torch, torch.nn as nn
class Model(nn.Module):
    def forward(self, x): return x[: int(x.abs().sum() * 0 + 3)] * 2
def get_inputs(): return [torch.randn(8)]
"""
    assert work.estimate(reference(tmp_path, text), "default", None, "cpu").work.bytes_out == 12


def test_least_bytes_counts_a_storage_once():
    base = torch.zeros(100)
    assert work.least_bytes([base, base, base[:10]]) == 400
    assert work.least_bytes([base[:10].expand(5, 10)]) == 40  # what it spans, not what the view repeats
    assert work.least_bytes([torch.zeros(1).expand(1000)]) == 4
    assert work.least_bytes([torch.zeros(6, 0), torch.zeros(0)[None]]) == 0
    halves = torch.zeros(512, 384).half().split([128, 128, 128], -1)
    assert work.least_bytes(halves) == 512 * 384 * 2 == work.least_bytes([half.clone() for half in halves])


OVERLAPS = {  # views of `base`, (12, 10) in fp32 -> elements that at least one of them covers
    "rows that overlap": (lambda base: [base[0:6], base[4:9]], 90),
    "columns that overlap": (lambda base: [base[:, 0:4], base[:, 3:6]], 72),
    "rows and columns": (lambda base: [base[2], base[:, 3]], 21),
    "the same transposed": (lambda base: [base[:, 2:5], base.t()[2:5]], 36),
    "every second and every third": (lambda base: [base.view(-1)[::2], base.view(-1)[::3]], 80),
    "windows of one view": (lambda base: [base.view(-1).unfold(0, 4, 2)], 120),
    "windows with gaps": (lambda base: [base.view(-1).unfold(0, 3, 5)], 72),
    "an expanded row beside its own": (lambda base: [base[3].expand(7, 10), base[3], base[4, :5]], 15),
    "halves of the elements": (lambda base: [base.view(torch.half)[:, :7], base[:, :3]], 12 * 3.5),
}


@pytest.mark.parametrize(("views", "elements"), OVERLAPS.values(), ids=OVERLAPS)
def test_least_bytes_counts_overlapping_views_once(views, elements):
    assert work.least_bytes(views(torch.zeros(12, 10))) == 4 * elements
    assert work.least_bytes(views(torch.zeros(12, 10, device="meta"))) == 4 * elements


def test_least_bytes_of_views_too_large_to_be_mapped_are_those_of_the_largest(monkeypatch):
    base = torch.zeros(100, 10, device="meta")
    monkeypatch.setattr(traffic, "MOST_CELLS", 200)
    assert work.least_bytes([base[:, :5], base[:, 5:]]) == 4000  # in cells of half a row
    assert work.least_bytes([base[:, :6], base[:, 3:]]) == 100 * 7 * 4
    assert work.least_bytes([base.view(-1).unfold(0, 11, 3)]) <= 4000  # of one that covers itself: never too many


def test_work_of_a_recurrent_layer(tmp_path):
    text = """
import torch, torch.nn as nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(16, 32, batch_first=True)
    def forward(self, x): return self.lstm(x)[0]
def get_inputs(): return [torch.randn(4, 8, 16)]
"""
    assert work.estimate(reference(tmp_path, text), "default", None, "cpu").work.flops == 2 * 4 * 8 * (16 + 32) * 4 * 32


PRODUCTS = {  # forward, inputs -> dtype of the work
    "fp8 with bf16 output": (
        "torch._scaled_mm(a, b.t(), scale_a=s, scale_b=s, out_dtype=torch.bfloat16)",
        "[fp8(64, 32), fp8(16, 32), torch.ones(())]",
        "fp8",
    ),
    "fp8, converted for the product": (
        "(a.float() @ b.float().t()).bfloat16()",
        "[fp8(64, 32), fp8(16, 32), 1]",
        "fp8",
    ),
    "fp8 with scales of blocks": (
        "((a.float() * s) @ b.float().t()).bfloat16()",
        "[fp8(64, 32), fp8(16, 32), torch.rand(64, 1)]",
        "fp8",
    ),
    "fp8 with scales that were spread first": (
        "((a.float() * s.repeat_interleave(32, 1)) @ (b.float() * s[:16].expand(16, 32)).t()).bfloat16()",
        "[fp8(64, 32), fp8(16, 32), torch.rand(64, 1)]",
        "fp8",
    ),
    "fp8, padded": (
        "(torch.nn.functional.pad(a.float(), (0, 4)) @ torch.nn.functional.pad(b.float(), (0, 4)).t())",
        "[fp8(64, 32), fp8(16, 32), 1]",
        "fp8",
    ),
    "int8 with a zero point": (
        "(a.float() - s) @ b.float().t()",
        "[i8(64, 32), i8(16, 32), torch.rand(64, 1)]",
        "int8",
    ),
    "a codebook": (
        "a @ s[b.long()].t()",
        "[b16(64, 32), torch.randint(0, 16, (16, 32), dtype=torch.uint8), b16(16)]",
        "bf16",
    ),
    "a mask of 8 bits": (
        "(a * b) @ s.t()",
        "[b16(64, 32), torch.ones(4, 64, 32, dtype=torch.uint8), b16(16, 32)]",
        "bf16",
    ),
    "int8, converted for the product": ("(a.int() @ b.int().t()).float() * s", "[i8(64, 32), i8(16, 32), 0.1]", "int8"),
    "8-bit weights": ("a @ (b.bfloat16() * s).t()", "[b16(64, 32), i8(16, 32), torch.rand(16, 1).bfloat16()]", "bf16"),
    "fp8 and int8": ("a.bfloat16() @ b.bfloat16().t()", "[fp8(64, 32), i8(16, 32), 1]", "bf16"),
    "bf16 with fp32 output": ("(a @ b.t()).float()", "[b16(64, 32), b16(16, 32), 1]", "bf16"),
    "bf16, multiplied in fp32": ("a.float() @ b.float().t()", "[b16(64, 32), b16(16, 32), 1]", "bf16"),
    "attention with its softmax in fp32": (
        "torch.softmax((a.float() @ b.float().t()) * 0.1, -1) @ b.float()",
        "[b16(64, 32), b16(16, 32), 1]",
        "bf16",
    ),
    "turned by a table in fp32": (
        "(a.float() * s) @ b.float().t()",
        "[b16(8, 64, 32), b16(16, 32), torch.rand(64, 32)]",
        "bf16",
    ),
    "fp32, rounded for the product": ("a.bfloat16() @ b.bfloat16().t()", "[f32(64, 32), f32(16, 32), 1]", "bf16"),
    "a sparse weight, put into zeros of fp32": (
        "a.float() @ torch.zeros(16, 32, device=a.device).scatter_(1, s.long(), b.float()).t()",
        "[b16(64, 32), b16(16, 16), torch.randint(0, 32, (16, 16), dtype=torch.uint8)]",
        "bf16",
    ),
    "blocks, put into zeros of fp32": (
        "a.float() @ b.new_zeros(4, 8, 32, dtype=torch.float32).index_put_((s,), b.float()).view(32, 32).t()",
        "[b16(64, 32), b16(2, 8, 32), torch.tensor([0, 3])]",
        "bf16",
    ),
    "bf16, some of whose weights are set to zero": (
        "a.float() @ b.float().clone().index_put_((s,), torch.tensor(0.0)).t()",
        "[b16(64, 32), b16(16, 32), torch.rand(16, 32) > 0.5]",
        "bf16",
    ),
    "fp8 under a mask that is put together": (
        "(a.float() * torch.zeros(64, 32, dtype=torch.bool, device=a.device).scatter_(1, s, True)) @ b.float().t()",
        "[fp8(64, 32), fp8(16, 32), torch.randint(0, 32, (64, 4))]",
        "fp8",
    ),
    "numbers of bf16 among those of fp32 that were copied into a new tensor": (
        "a.float() @ torch.empty(16, 32, device=a.device).copy_(b).index_put_((s,), a[:2].float()).t()",
        "[b16(64, 32), f32(16, 32), torch.tensor([0, 3])]",
        "fp32",
    ),
    "numbers of bf16 after some of fp32, put into zeros": (
        "a @ torch.zeros(16, 32, device=a.device).index_put_((s,), b).index_put_((s + 1,), b.bfloat16().float()).t()",
        "[f32(64, 32), f32(2, 32), torch.tensor([0, 4])]",
        "fp32",
    ),
    "numbers of bf16 among those of fp32": (
        "a @ b.clone().index_put_((s,), a[:4].bfloat16().float()).t()",
        "[f32(64, 32), f32(16, 32), torch.tensor([0, 3, 4, 7])]",
        "fp32",
    ),
    "fp32": ("a @ b.t()", "[f32(64, 32), f32(16, 32), 1]", "fp32"),
    "what follows an fp8 product": (
        "torch.relu(a.float() @ b.float().t()) @ s.float()",
        "[fp8(64, 32), fp8(16, 32), fp8(16, 4096)]",
        "bf16",
    ),
    "no product": ("a.exp()", "[b16(64, 32), b16(16, 32), 1]", "bf16"),
}


@pytest.mark.parametrize(("forward", "inputs", "expected"), PRODUCTS.values(), ids=PRODUCTS)
def test_the_dtype_of_the_work_is_that_of_the_operands_and_never_of_the_output(tmp_path, forward, inputs, expected):
    text = f"""
import torch, torch.nn as nn
f32 = torch.randn
def b16(*size): return torch.randn(*size).bfloat16()
def fp8(*size): return torch.randn(*size).to(torch.float8_e4m3fn)
def i8(*size): return torch.randint(-128, 128, size, dtype=torch.int8)
class Model(nn.Module):
    def forward(self, a, b, s): return {forward}
def get_inputs(): return {inputs}
"""
    assert work.estimate(reference(tmp_path, text), "default", None, "cpu").work.dtype == expected


def test_other_dtypes_with_a_part_of_the_flops_are_told(tmp_path):
    text = """
import torch, torch.nn as nn
class Model(nn.Module):
    def forward(self, a, b, c): return (a.float() @ b.float().t()).bfloat16() @ c
def get_inputs():
    a, b = (torch.randn(64, 64).to(torch.float8_e4m3fn) for _ in range(2))
    return [a, b, torch.randn(64, 72).bfloat16()]
"""
    counted = work.estimate(reference(tmp_path, text), "default", None, "cpu").work
    assert counted.dtype == "bf16" and counted.also == ("fp8",)


def test_products_that_torch_does_not_count(tmp_path):
    text = """
import torch, torch.nn as nn
class Model(nn.Module):
    def forward(self, a, b): return torch._int_mm(a, b)
def get_inputs(): return [torch.ones(32, 64, dtype=torch.int8), torch.ones(64, 16, dtype=torch.int8)]
"""
    counted = work.estimate(reference(tmp_path, text), "default", None, "cpu").work
    assert counted.flops == 2 * 32 * 64 * 16 and counted.dtype == "int8"
    assert work.grouped_flops((100, 8), (4, 8, 16)) == 2 * 100 * 8 * 16  # groups of rows, a matrix each
    assert work.grouped_flops((4, 100, 8), (4, 8, 16)) == 4 * 2 * 100 * 8 * 16


@pytest.mark.parametrize(
    "inputs",
    [
        "[torch.randn(8, 8).to(torch.float8_e4m3fn), torch.ones(())]",
        "[torch.ones(8, 8, dtype=torch.int8), torch.rand(8, 1)]",
    ],
)
def test_a_cast_of_eight_bit_data_or_their_scales_is_a_wrong_call(tmp_path, run_here, inputs):
    file = tmp_path / "quantised.py"
    file.write_text(f"""
import torch, torch.nn as nn
class Model(nn.Module):
    def forward(self, x, scale): return (x.float() * scale).bfloat16()
def get_inputs(): return {inputs}
""")
    done = run_here("estimate_work.py", "--reference", file, "--dtype", "bf16")
    assert done.returncode == 2 and "without --dtype" in done.stderr
    assert run_here("estimate_work.py", "--reference", file).returncode == 0


def test_estimate_work_says_that_fewer_products_do_a_convolution(tmp_path, run_here):
    file = tmp_path / "reference.py"
    file.write_text(
        "import torch\nclass Model(torch.nn.Module):\n"
        "    def forward(self, x, w): return torch.nn.functional.conv2d(x, w)\n"
        "def get_inputs(): return [torch.randn(1, 64, 9, 9), torch.randn(64, 64, 3, 3)]\n"
    )
    said = "100 % of the FLOPs are convolutions of stride 1, which Winograd's form does with fewer"
    assert said in run_here("estimate_work.py", "--reference", file).stdout
    given = run_here("estimate_work.py", "--reference", file, "--flops", 9)
    assert given.returncode == 0 and "Winograd" not in given.stdout


@pytest.mark.parametrize(("declared", "said"), [("", True), ("COMPARE = {1: {'share': 0.999, 'cap': 1}}", False)])
def test_quantised_outputs_that_must_be_equal_are_told(tmp_path, run_here, declared, said):
    file = tmp_path / "reference.py"
    file.write_text(
        "import torch\nclass Model(torch.nn.Module):\n"
        "    def forward(self, x): return x.abs(), (x * 20).round().to(torch.int8)\n"
        f"def get_inputs(): return [torch.randn(4, 8)]\n{declared}\n"
    )
    printed = run_here("estimate_work.py", "--reference", file).stdout
    assert ("whole numbers of output 1 must be equal" in printed) == said, printed
    assert run_here("estimate_work.py", "--reference", file, "--json").returncode == 0


@pytest.mark.parametrize(
    ("lengths", "differ"), [("torch.randint(8, 65, (16,))", True), ("torch.full((16,), 32)", False)]
)
def test_flops_that_drawn_lengths_decide_are_the_mean_of_some_draws(tmp_path, run_here, lengths, differ):
    text = f"""
import torch, torch.nn as nn
class Model(nn.Module):
    def forward(self, x, w, lengths):
        return torch.stack([(one[:length] @ w).sum(0) for one, length in zip(x, lengths.tolist())])
def get_inputs(): return [torch.randn(16, 64, 32), torch.randn(32, 8), {lengths}]
"""
    counted, one_row = work.estimate(reference(tmp_path, text), "default", None, "cpu"), 2 * 32 * 8
    few, many = counted.drawn_flops or (16 * 32 * one_row,) * 2
    assert bool(counted.drawn_flops) == differ == (few < many) and few % one_row == many % one_row == 0
    assert few + (many - few) / work.DRAWS <= counted.work.flops <= many - (many - few) / work.DRAWS
    assert CountedWorkload.from_json(counted.to_json()) == counted
    printed = run_here("estimate_work.py", "--reference", tmp_path / "reference_file.py").stdout
    assert ("drawn numbers decide the FLOPs" in printed) == differ, printed


@pytest.mark.parametrize(
    ("lengths", "draws"),
    [
        ("torch.full((16,), 32)", 1),
        ("torch.randint(8, 65, (16,))", work.DRAWS),
        ("torch.arange(48)[torch.randperm(48)[:16]]", work.DRAWS),
    ],
)
def test_whole_numbers_that_are_equal_with_each_seed_are_counted_once(tmp_path, lengths, draws):
    text = f"""
import torch, torch.nn as nn
ENDED = []
class Model(nn.Module):
    def forward(self, x, w, lengths):
        out = torch.stack([(one[:length] @ w).sum(0) for one, length in zip(x, lengths.tolist())])
        ENDED.append(lengths.tolist())
        return out
def get_inputs(): return [torch.randn(16, 64, 32), torch.randn(32, 8), {lengths}]
"""
    given = reference(tmp_path, text)
    flops = work.estimate(given, "default", None, "cpu").work.flops
    ended = given.apart("fake").model_class.forward.__globals__["ENDED"]
    assert len(ended) == draws
    assert flops == round(statistics.mean(2 * 32 * 8 * sum(one) for one in ended))
