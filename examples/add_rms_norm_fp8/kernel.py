"""Residual add in place, RMSNorm, a scale a token and e4m3: a program keeps its row in registers, read once."""

import torch
import triton
import triton.language as tl

WARPS = 16
STREAM = 0
ROUNDS = 1


@triton.jit
def add_norm_quantize(
    x, residual, weight, quantized, scales, tokens, hidden, BLOCK: tl.constexpr, STREAM: tl.constexpr, ROUNDS: tl.constexpr
):
    at = tl.arange(0, BLOCK)
    gain = tl.load(weight + at, at < hidden, 0.0).to(tl.float32)
    for turn in range(ROUNDS):
        row = tl.program_id(0).to(tl.int64) + turn * tl.num_programs(0)
        inside = at < tl.where(row < tokens, hidden, 0)
        left = tl.load(x + row * hidden + at, inside, 0.0, eviction_policy="evict_first" if STREAM else "")
        right = tl.load(residual + row * hidden + at, inside, 0.0, eviction_policy="evict_first" if STREAM else "")
        summed = (left.to(tl.float32) + right.to(tl.float32)).to(tl.bfloat16)
        tl.store(residual + row * hidden + at, summed, inside, cache_modifier=".cs" if STREAM else "")
        value = summed.to(tl.float32)
        value = value * tl.rsqrt(tl.sum(value * value, 0) / hidden + 1e-6) * gain
        scale = tl.maximum(tl.max(tl.abs(value), 0), 1e-10) / 448.0
        tl.store(scales + row, scale, row < tokens)
        value = (value / scale).to(tl.float8e4nv)
        tl.store(quantized + row * hidden + at, value, inside, cache_modifier=".cs" if STREAM else "")


def kernel_function(x, residual, weight):
    if not residual.is_contiguous():
        raise ValueError("residual must be contiguous: it is changed in place")
    x, weight = x.contiguous(), weight.contiguous()
    tokens, hidden = x.shape
    quantized = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((tokens, 1), dtype=torch.float32, device=x.device)
    add_norm_quantize[(triton.cdiv(tokens, ROUNDS),)](
        x,
        residual,
        weight,
        quantized,
        scales,
        tokens,
        hidden,
        BLOCK=triton.next_power_of_2(hidden),
        STREAM=STREAM,
        ROUNDS=ROUNDS,
        num_warps=WARPS,
    )
    return quantized, scales
