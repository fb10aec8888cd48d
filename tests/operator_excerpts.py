"""Run or compile the Triton excerpts of the wiki's pages on operators. Print {name: fault or ""} as JSON.

python operator_excerpts.py FOLDER [gpu]. FOLDER has NAME.py for each excerpt, or NAME__ANYTHING.py for a variant of it.
With TRITON_INTERPRET=1 each kernel runs in the CPU interpreter and is compared with torch; with `gpu` it runs on the
GPU, where fp32 products are in tf32. With neither it is compiled for compute capability 9.0.
"""

import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path

import torch
import triton
from torch.nn import functional
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ON_GPU = "gpu" in sys.argv[2:]
DRAWS = 48  # in the interpreter each takes 15 ms; a standard deviation of the likeliest number is 0.07
FP32, TF32 = {"rtol": 1e-4, "atol": 1e-5}, {"rtol": 2e-2, "atol": 2e-2}
CONSTANTS = {  # of the compiled kernel; the other arguments are pointers and numbers, by TYPES
    "swiglu_rows": {"BLOCK": 1024},
    "rms_norm_backward": {"BLOCK": 4096},
    "softmax_narrow": {"ROWS": 16, "BLOCK": 64},
    "int4_matmul": {"BM": 16, "BN": 64},
    "merge_splits": {"SPLITS": 8, "BLOCK": 128},
    "grouped_matmul": {"E": 8, "BM": 64, "BN": 128, "BK": 64},
    "block_sparse_matmul": {"BM": 64, "BLOCK": 64},
    "linear_recurrence": {"BLOCK": 1024},
    "sample_rows": {"BLOCK": 1024},
    "cache_write": {"BLOCK": 1024},
    "adamw_step": {"BLOCK": 1024},
}
TYPES = {  # by the argument's name; what is not here is an i32
    **dict.fromkeys("both out x y dy weight dx a c scales parts w keys cache logits g p h b".split(), "*bf16"),
    **dict.fromkeys("rstd partial lse m v".split(), "*fp32"),
    **dict.fromkeys("lr b1 b2 eps decay c1 c2".split(), "fp32"),
    **dict.fromkeys(["ends", "slots", "starts", "column_of"], "*i32"),
    "packed": "*u8",
    "index": "*i64",
}


def swiglu_rows(kernel):
    both, out = torch.randn(3, 40), torch.empty(3, 20)
    kernel[(3, 2)](both, out, 20, BLOCK=16)
    gate, up = both.chunk(2, 1)
    return [(out, functional.silu(gate) * up)]


def rms_norm_backward(kernel):
    x, dy, weight = torch.randn(5, 12), torch.randn(5, 12), torch.randn(12)
    rstd, dx, partial = torch.rsqrt(x.square().mean(1) + 1e-6), torch.empty_like(x), torch.empty(2, 12)
    kernel[(2,)](x, dy, weight, rstd, dx, partial, 5, 12, BLOCK=16)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    expected = torch.autograd.grad(functional.rms_norm(x, (12,), weight, 1e-6), (x, weight), dy)
    return [(dx, expected[0]), (partial.sum(0), expected[1])]


def softmax_narrow(kernel):
    x, y = torch.randn(7, 13), torch.empty(7, 13)
    kernel[(2,)](x, y, 7, 13, ROWS=4, BLOCK=16)
    return [(y, x.softmax(1))]


def int4_matmul(kernel):
    a, values, scales = torch.randn(3, 256), torch.randint(0, 16, (256, 20)), torch.rand(2, 20)
    low, high = values.view(2, 2, 64, 20).unbind(1)
    packed, c = (low | high << 4).to(torch.uint8).reshape(128, 20).contiguous(), torch.empty(3, 20)
    kernel[(1, 2)](a, packed, scales, c, 3, 20, 256, BM=16, BN=16)
    return [(c, a @ ((values - 8) * scales.repeat_interleave(128, 0)))]


def merge_splits(kernel):
    scores, values = torch.randn(2, 3, 4), torch.randn(2, 3, 4, 5)
    parts, lse = (scores.softmax(2)[..., None] * values).sum(2), scores.logsumexp(2)
    whole = (scores.view(2, 12).softmax(1)[..., None] * values.view(2, 12, 5)).sum(1)
    parts, lse = torch.cat([parts, torch.full((2, 1, 5), torch.nan)], 1), functional.pad(lse, (0, 1), value=-torch.inf)
    out = torch.empty(2, 5)
    kernel[(2,)](parts, lse, out, 4, 5, SPLITS=4, BLOCK=8)
    return [(out, whole)]


def grouped_matmul(kernel):
    x, w, y = torch.randn(36, 20), torch.randn(3, 18, 20), torch.empty(36, 18)
    ends = torch.tensor([16, 16, 36], dtype=torch.int32)
    kernel[(36 // 16 + 3, 2)](x, w, y, ends, 18, 20, E=3, BM=16, BN=16, BK=16)
    return [(y, torch.cat([x[:16] @ w[0].t(), x[16:] @ w[2].t()]))]


def block_sparse_matmul(kernel):
    x, blocks, y = torch.randn(20, 64), torch.randn(5, 16, 16), torch.empty(20, 48)
    offsets, columns = (torch.tensor(one, dtype=torch.int32) for one in ([0, 2, 2, 5], [3, 0, 1, 2, 3]))
    kernel[(2, 3)](x, blocks, y, offsets, columns, 20, 48, 64, BM=16, BLOCK=16)
    weight = torch.zeros(48, 64)
    for block, (row, column) in zip(blocks, [(0, 3), (0, 0), (2, 1), (2, 2), (2, 3)], strict=True):
        weight[row * 16 :, column * 16 :][:16, :16] = block
    return [(y, x @ weight.t())]


def linear_recurrence(kernel):
    a, b, h = torch.rand(2, 11), torch.randn(2, 11), torch.empty(2, 11)
    kernel[(2,)](a, b, h, 11, BLOCK=4)
    steps = [b[:, 0]]
    for t in range(1, 11):
        steps.append(a[:, t] * steps[-1] + b[:, t])
    return [(h, torch.stack(steps, 1))]


def sample_rows(kernel):
    probabilities = torch.tensor([0.1, 0.6, 0.0, 0.3, 0.0])
    logits, index = probabilities.log().expand(DRAWS, 5).contiguous(), torch.empty(DRAWS, dtype=torch.int64)
    kernel[(DRAWS,)](logits, index, 17, 5, BLOCK=4)
    drawn = torch.bincount(index, minlength=5) / DRAWS
    assert not drawn[probabilities == 0].any()
    return [(drawn, torch.where((drawn - probabilities).abs() < 0.15, drawn, probabilities))]


def cache_write(kernel):
    keys, cache, slots = torch.randn(3, 20), torch.zeros(4, 20), torch.tensor([2, -1, 0], dtype=torch.int32)
    kernel[(3, 2)](keys, cache, slots, 20, BLOCK=16)
    return [(cache, torch.stack([keys[2], torch.zeros(20), keys[0], torch.zeros(20)]))]


def adamw_step(kernel):
    p, g, m, v = torch.randn(20), torch.randn(20), torch.randn(20), torch.rand(20)
    expected = [p.clone(), m.clone(), v.clone()]
    steps = [torch.tensor(4.0)]
    options = {
        "lr": 0.1,
        "beta1": 0.9,
        "beta2": 0.99,
        "weight_decay": 0.01,
        "eps": 1e-8,
        "amsgrad": False,
        "maximize": False,
    }
    torch._fused_adamw_([expected[0]], [g], [expected[1]], [expected[2]], [], steps, **options)
    kernel[(2,)](p, g, m, v, 20, 0.1, 0.9, 0.99, 1e-8, 0.01, 1 - 0.9**4, 1 - 0.99**4, BLOCK=16)
    return [(p, expected[0]), (m, expected[1]), (v, expected[2])]


def kernel_of(file: Path, name: str):
    """The kernel of that name in an excerpt's file."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def check(name: str, kernel) -> None:
    """Raise AssertionError unless the kernel gives torch's results."""
    torch.manual_seed(0)
    for result, expected in globals()[name](kernel):
        torch.testing.assert_close(result, expected, **(TF32 if ON_GPU else FP32))


def compile_(name: str, kernel) -> None:
    """Raise the compiler's error unless the kernel compiles for compute capability 9.0."""
    constants = CONSTANTS[name]
    types = {
        argument: "constexpr" if argument in constants else TYPES.get(argument, "i32") for argument in kernel.arg_names
    }
    triton.compile(ASTSource(kernel, types, constants), target=GPUTarget("cuda", 90, 32))


def fault_of(file: Path) -> str:
    """What is wrong with an excerpt, or nothing."""
    name = file.stem.partition("__")[0]
    try:
        runs = ON_GPU or os.environ.get("TRITON_INTERPRET") == "1"
        (check if runs else compile_)(name, kernel_of(file, name))
    except Exception:
        return traceback.format_exc(limit=-2)
    return ""


if __name__ == "__main__":
    torch.set_default_device("cuda" if ON_GPU else "cpu")
    print(json.dumps({file.stem: fault_of(file) for file in sorted(Path(sys.argv[1]).glob("*.py"))}))
