"""Causal attention, forward: a plain FlashAttention-2 kernel in Triton, one loop, masked at every step."""
import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def attention_kernel(q, k, v, out, tokens_q, tokens_k, scale, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr):
    head, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    width = tl.arange(0, WIDTH)
    q_tile = tl.load(q + head * tokens_q * WIDTH + rows[:, None] * WIDTH + width[None, :], mask=rows[:, None] < tokens_q, other=0.0)
    k += head * tokens_k * WIDTH
    v += head * tokens_k * WIDTH
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    for start in range(0, tl.minimum((block + 1) * BLOCK_M, tokens_k), BLOCK_N):
        here = start + columns
        k_tile = tl.load(k + here[None, :] * WIDTH + width[:, None], mask=here[None, :] < tokens_k, other=0.0)
        s = tl.dot(q_tile, k_tile) * scale
        s = tl.where((here[None, :] <= rows[:, None]) & (here[None, :] < tokens_k), s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        p = tl.exp(s - new_top[:, None])
        shrink = tl.exp(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        v_tile = tl.load(v + here[:, None] * WIDTH + width[None, :], mask=here[:, None] < tokens_k, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(p.to(v_tile.dtype), v_tile)
        top = new_top
    acc = acc / total[:, None]
    tl.store(out + head * tokens_q * WIDTH + rows[:, None] * WIDTH + width[None, :], acc.to(out.dtype.element_ty), mask=rows[:, None] < tokens_q)


CONFIG = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3}     # for every shape: the head width is fixed


def kernel_function(q, k, v):
    if q.dim() != 4 or q.shape[3] != 128 or q.dtype != torch.bfloat16 or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError("expected bf16 tensors (batch, heads, tokens, 128)")
    if k.shape != v.shape or k.dim() != 4 or k.shape[:2] != q.shape[:2] or k.shape[3] != 128 or 0 in q.shape or 0 in k.shape:
        raise ValueError("q, k, v must agree in batch and heads, k and v in tokens, and none may be empty")
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = torch.empty_like(q)
    batch, heads, tokens, width = q.shape
    grid = (batch * heads, triton.cdiv(tokens, CONFIG["BLOCK_M"]))
    attention_kernel[grid](q, k, v, out, tokens, k.shape[2], width ** -0.5, WIDTH=width, **CONFIG)
    return out


class ModelNew(nn.Module):
    def forward(self, q, k, v):
        return kernel_function(q, k, v)
