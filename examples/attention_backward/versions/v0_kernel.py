"""Causal attention backward in three kernels: row sums of dout * out, dk and dv by blocks of keys, dq by blocks of queries.
Masked pointers, tiles of 64 x 64, every block masked."""

import torch
import triton
import triton.language as tl


@triton.jit
def row_sums(out, dout, delta, ROWS, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = row[:, None].to(tl.int64) * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = row[:, None] < ROWS
    a, b = tl.load(out + at, mask=inside, other=0.0), tl.load(dout + at, mask=inside, other=0.0)
    tl.store(delta + row, tl.sum(a.to(tl.float32) * b.to(tl.float32), 1), mask=row < ROWS)


@triton.jit
def rows_of(base, row, LENGTH, WIDTH: tl.constexpr):
    at = row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    return tl.load(base + at, mask=row[:, None] < LENGTH, other=0.0)


@triton.jit
def weights(queries, keys, sums, m, n, LENGTH, factor):
    """P: exp(scores - lse), 0 for later keys and for rows beyond the end."""
    exponent = tl.dot(queries, keys.T) * factor - sums[:, None]
    return tl.where((m[:, None] >= n[None, :]) & (m[:, None] < LENGTH), tl.exp2(exponent), 0.0)


@triton.jit
def dk_and_dv(q, k, v, dout, lse, delta, dk, dv, LENGTH, scale, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    head = tl.program_id(1).to(tl.int64) * LENGTH
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keys, values = rows_of(k + head * WIDTH, n, LENGTH, WIDTH), rows_of(v + head * WIDTH, n, LENGTH, WIDTH)
    of_keys, of_values = tl.zeros((BLOCK, WIDTH), tl.float32), tl.zeros((BLOCK, WIDTH), tl.float32)
    for start in range(tl.program_id(0) * BLOCK, LENGTH, BLOCK):
        m = start + tl.arange(0, BLOCK)
        queries, of_out = rows_of(q + head * WIDTH, m, LENGTH, WIDTH), rows_of(dout + head * WIDTH, m, LENGTH, WIDTH)
        sums = tl.load(lse + head + m, mask=m < LENGTH, other=0.0).to(tl.float32) * 1.4426950408889634
        p = weights(queries, keys, sums, m, n, LENGTH, scale * 1.4426950408889634)
        of_values = tl.dot(p.to(q.dtype.element_ty).T, of_out, of_values)
        ds = p * (tl.dot(of_out, values.T) - tl.load(delta + head + m, mask=m < LENGTH, other=0.0)[:, None])
        of_keys = tl.dot(ds.to(q.dtype.element_ty).T, queries, of_keys)
    at = (head + n)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(dk + at, (of_keys * scale).to(dk.dtype.element_ty), mask=n[:, None] < LENGTH)
    tl.store(dv + at, of_values.to(dv.dtype.element_ty), mask=n[:, None] < LENGTH)


@triton.jit
def dq_alone(q, k, v, dout, lse, delta, dq, LENGTH, scale, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    head = tl.program_id(1).to(tl.int64) * LENGTH
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    queries, of_out = rows_of(q + head * WIDTH, m, LENGTH, WIDTH), rows_of(dout + head * WIDTH, m, LENGTH, WIDTH)
    sums = tl.load(lse + head + m, mask=m < LENGTH, other=0.0).to(tl.float32) * 1.4426950408889634
    means = tl.load(delta + head + m, mask=m < LENGTH, other=0.0)
    of_queries = tl.zeros((BLOCK, WIDTH), tl.float32)
    for start in range(0, tl.program_id(0) * BLOCK + BLOCK, BLOCK):
        n = start + tl.arange(0, BLOCK)
        keys, values = rows_of(k + head * WIDTH, n, LENGTH, WIDTH), rows_of(v + head * WIDTH, n, LENGTH, WIDTH)
        p = weights(queries, keys, sums, m, n, LENGTH, scale * 1.4426950408889634)
        ds = p * (tl.dot(of_out, values.T) - means[:, None])
        of_queries = tl.dot(ds.to(q.dtype.element_ty), keys, of_queries)
    at = (head + m)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(dq + at, (of_queries * scale).to(dq.dtype.element_ty), mask=m[:, None] < LENGTH)


def kernel_function(q, k, v, out, lse, dout):
    batch, heads, length, width = q.shape
    if width not in (16, 32, 64, 128):
        raise ValueError("the kernel is written for a width of 16, 32, 64 or 128")
    q, k, v, out, lse, dout = (one.contiguous() for one in (q, k, v, out, lse, dout))
    delta = torch.empty_like(lse, dtype=torch.float32)
    row_sums[(triton.cdiv(lse.numel(), 64),)](out, dout, delta, lse.numel(), width, 64)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    grid = triton.cdiv(length, 64), batch * heads
    dk_and_dv[grid](q, k, v, dout, lse, delta, dk, dv, length, width**-0.5, width, 64, num_warps=4, num_stages=2)
    dq_alone[grid](q, k, v, dout, lse, delta, dq, length, width**-0.5, width, 64, num_warps=4, num_stages=2)
    return dq, dk, dv
