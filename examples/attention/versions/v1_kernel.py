"""Causal attention, forward: FlashAttention-2 in Triton with tensor descriptors, unmasked blocks and diagonal apart, longest first."""
import torch
import torch.nn as nn
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def one_block(q_tile, k, v, head, start, rows, top, total, acc, tokens_k, scale_log2,
              BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    k_tile = k.load([head, start, 0]).reshape(BLOCK_N, WIDTH)
    s = tl.dot(q_tile, k_tile.T)
    if MASKED:
        here = start + tl.arange(0, BLOCK_N)
        s = tl.where((here[None, :] <= rows[:, None]) & (here[None, :] < tokens_k), s, float("-inf"))
    new_top = tl.maximum(top, tl.max(s, 1) * scale_log2)
    p = tl.math.exp2(s * scale_log2 - new_top[:, None])
    shrink = tl.math.exp2(top - new_top)
    total = total * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None]
    v_tile = v.load([head, start, 0]).reshape(BLOCK_N, WIDTH)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc)
    return new_top, total, acc


@triton.jit
def attention_kernel(q, k, v, out, heads, tokens_q, tokens_k, scale_log2, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                     WIDTH: tl.constexpr, GROUP: tl.constexpr):
    index = tl.program_id(0)
    blocks = tl.cdiv(tokens_q, BLOCK_M)
    first = index // (GROUP * blocks) * GROUP
    rest = index % (GROUP * blocks)
    in_group = tl.minimum(GROUP, heads - first)
    block = blocks - 1 - rest // in_group
    head = first + rest % in_group
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    q_tile = q.load([head, block * BLOCK_M, 0]).reshape(BLOCK_M, WIDTH)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    full_to = tl.minimum(block * BLOCK_M, tokens_k // BLOCK_N * BLOCK_N)
    for start in tl.range(0, full_to, BLOCK_N):
        top, total, acc = one_block(q_tile, k, v, head, start, rows, top, total, acc, tokens_k, scale_log2, BLOCK_N, WIDTH, False)
    for start in tl.range(full_to, tl.minimum((block + 1) * BLOCK_M, tokens_k), BLOCK_N):
        top, total, acc = one_block(q_tile, k, v, head, start, rows, top, total, acc, tokens_k, scale_log2, BLOCK_N, WIDTH, True)
    acc = acc / total[:, None]
    out.store([head, block * BLOCK_M, 0], acc.to(out.dtype).reshape(1, BLOCK_M, WIDTH))


CONFIG = {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 3}     # for every shape: the head width is fixed


def heads_per_group(tokens_k, heads):
    """As many heads as keep their K and V (512 bytes a token) in 32 MB of the L2."""
    return max(1, min(heads, (32 << 20) // (tokens_k * 512)))


def kernel_function(q, k, v):
    if q.dim() != 4 or q.shape[3] != 128 or q.dtype != torch.bfloat16 or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError("expected bf16 tensors (batch, heads, tokens, 128)")
    if k.shape != v.shape or k.dim() != 4 or k.shape[:2] != q.shape[:2] or k.shape[3] != 128 or 0 in q.shape or 0 in k.shape:
        raise ValueError("q, k, v must agree in batch and heads, k and v in tokens, and none may be empty")
    q, k, v = (x if x.is_contiguous() and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format) for x in (q, k, v))
    out = torch.empty_like(q)
    batch, heads, tokens, width = q.shape
    tile = lambda x, rows: TensorDescriptor.from_tensor(x.view(batch * heads, x.shape[2], width), [1, rows, width])
    m, n = CONFIG["BLOCK_M"], CONFIG["BLOCK_N"]
    grid = (triton.cdiv(tokens, m) * batch * heads,)
    attention_kernel[grid](tile(q, m), tile(k, n), tile(v, n), tile(out, m), batch * heads, tokens, k.shape[2],
                           width ** -0.5 * 1.4426950408889634, WIDTH=width, GROUP=heads_per_group(k.shape[2], batch * heads), **CONFIG)
    return out


class ModelNew(nn.Module):
    def forward(self, q, k, v):
        return kernel_function(q, k, v)
