"""Kimi delta attention: a program for a part of V of a head, which walks the tokens with its state in registers."""

import torch
import triton
import triton.language as tl

WIDTH = 128
PART = 32


@triton.jit
def walk(q, k, v, g, beta, out, tokens, heads, scale, WIDTH: tl.constexpr, PART: tl.constexpr):
    head = tl.program_id(1) % heads
    first = (tl.program_id(1) // heads).to(tl.int64) * tokens
    channel = tl.arange(0, WIDTH)
    column = tl.program_id(0) * PART + tl.arange(0, PART)
    state = tl.zeros((WIDTH, PART), tl.float32)
    for token in range(tokens):
        row = (first + token) * heads + head
        state *= tl.exp(tl.load(g + row * WIDTH + channel))[:, None]
        key = tl.load(k + row * WIDTH + channel).to(tl.float32)
        value = tl.load(v + row * WIDTH + column).to(tl.float32)
        change = (value - tl.sum(state * key[:, None], 0)) * tl.load(beta + row).to(tl.float32)
        state += key[:, None] * change[None, :]
        query = tl.load(q + row * WIDTH + channel).to(tl.float32) * scale
        tl.store(out + row * WIDTH + column, tl.sum(state * query[:, None], 0).to(out.dtype.element_ty))


def kernel_function(q, k, v, g, beta):
    batch, tokens, heads, width = q.shape
    if (width, v.shape[-1]) != (WIDTH, WIDTH):
        raise ValueError("the kernel is written for K = V = 128")
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    out = torch.empty_like(v)
    walk[(WIDTH // PART, batch * heads)](q, k, v, g, beta, out, tokens, heads, width**-0.5, WIDTH, PART)
    return out
