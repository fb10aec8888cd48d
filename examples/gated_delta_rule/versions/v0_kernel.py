"""Gated delta rule: a program for a part of V of a head of a sequence walks the tokens, its state in registers."""

import torch
import triton
import triton.language as tl

WIDTH = 128
PART = 32


@triton.jit
def walk(
    q, k, v, g, beta, states, offsets, out, after, heads, scale, WIDTH: tl.constexpr, PART: tl.constexpr
):  # fmt: skip
    head = tl.program_id(1) % heads
    sequence = tl.program_id(1) // heads
    first = tl.load(offsets + sequence)
    last = tl.load(offsets + sequence + 1)
    channel = tl.arange(0, WIDTH)
    column = tl.program_id(0) * PART + tl.arange(0, PART)
    square = tl.program_id(1).to(tl.int64) * WIDTH * WIDTH + channel[:, None] * WIDTH + column[None, :]
    state = tl.load(states + square)
    for token in range(first, last):
        row = token * heads + head
        state *= tl.exp(tl.load(g + row))
        key = tl.load(k + row * WIDTH + channel).to(tl.float32)
        value = tl.load(v + row * WIDTH + column).to(tl.float32)
        change = (value - tl.sum(state * key[:, None], 0)) * tl.load(beta + row).to(tl.float32)
        state += key[:, None] * change[None, :]
        query = tl.load(q + row * WIDTH + channel).to(tl.float32) * scale
        tl.store(out + row * WIDTH + column, tl.sum(state * query[:, None], 0).to(out.dtype.element_ty))
    tl.store(after + square, state)


def kernel_function(q, k, v, g, beta, states, cu_seqlens):
    heads, width = q.shape[1:]
    if (width, v.shape[-1]) != (WIDTH, WIDTH):
        raise ValueError("the kernel is written for K = V = 128")
    q, k, v, g, beta, states, cu_seqlens = (x.contiguous() for x in (q, k, v, g, beta, states, cu_seqlens))
    out, after = torch.empty_like(v), torch.empty_like(states)
    grid = (WIDTH // PART, len(states) * heads)
    walk[grid](q, k, v, g, beta, states, cu_seqlens, out, after, heads, width**-0.5, WIDTH, PART)
    return out, after
