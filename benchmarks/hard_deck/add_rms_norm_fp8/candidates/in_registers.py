"""Residual add in place, RMSNorm, a scale a token and e4m3: a program keeps its row in registers, read once. Which hints
to the L2?"""

import torch
import triton
import triton.language as tl

SPACE = {"X": ["", "evict_first", "evict_last"], "RESIDUAL": ["", "evict_last"], "STORE": ["", "evict_last"]}
WARPS = 16
X = ""
RESIDUAL = ""
STORE = ""


@triton.jit
def add_norm_quantize(
    x,
    residual,
    weight,
    quantized,
    scales,
    hidden,
    BLOCK: tl.constexpr,
    X: tl.constexpr,
    RESIDUAL: tl.constexpr,
    STORE: tl.constexpr,
):
    at = tl.arange(0, BLOCK)
    gain = tl.load(weight + at, at < hidden, 0.0).to(tl.float32)
    row = tl.program_id(0).to(tl.int64)
    inside = at < hidden
    left = tl.load(x + row * hidden + at, inside, 0.0, eviction_policy=X)
    right = tl.load(residual + row * hidden + at, inside, 0.0, eviction_policy=RESIDUAL)
    summed = (left.to(tl.float32) + right.to(tl.float32)).to(tl.bfloat16)
    tl.store(residual + row * hidden + at, summed, inside, eviction_policy=STORE)
    value = summed.to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / hidden + 1e-6) * gain
    scale = tl.maximum(tl.max(tl.abs(value), 0), 1e-10) / 448.0
    tl.store(scales + row, scale)
    value = (value / scale).to(tl.float8e4nv)
    tl.store(quantized + row * hidden + at, value, inside)


def kernel_function(x, residual, weight):
    if not residual.is_contiguous():
        raise ValueError("residual must be contiguous: it is changed in place")
    if not x.dtype == residual.dtype == torch.bfloat16:
        raise ValueError("x and residual must be bf16: the sum is rounded to it")
    x, weight = x.contiguous(), weight.contiguous()
    tokens, hidden = x.shape
    quantized = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((tokens, 1), dtype=torch.float32, device=x.device)
    add_norm_quantize[(tokens,)](
        x,
        residual,
        weight,
        quantized,
        scales,
        hidden,
        BLOCK=triton.next_power_of_2(hidden),
        X=X,
        RESIDUAL=RESIDUAL,
        STORE=STORE,
        num_warps=WARPS,
    )
    return quantized, scales
