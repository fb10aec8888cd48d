"""A program for a request and key head: the query heads of its group are the rows of one tile."""

import torch
import triton
import triton.language as tl


@triton.jit
def paged_decode(
    q,
    keys,
    values,
    table,
    lengths,
    out,
    heads,
    key_heads,
    pages,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, column, key = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, BLOCK)
    place = (request * heads + head * GROUP + row[:, None]) * WIDTH + column[None, :]
    query = tl.load(q + place, mask=row[:, None] < GROUP, other=0.0)
    length = tl.load(lengths + request)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(0, length, BLOCK):
        inside = start + key < length
        page = tl.load(table + request * pages + (start + key) // PAGE, mask=inside, other=0).to(tl.int64)
        slot = ((page * PAGE + (start + key) % PAGE) * key_heads + head) * WIDTH
        k = tl.load(keys + slot[:, None] + column[None, :], mask=inside[:, None], other=0.0)
        v = tl.load(values + slot[:, None] + column[None, :], mask=inside[:, None], other=0.0)
        scores = tl.where(inside[None, :], tl.dot(query, tl.trans(k)) * (WIDTH**-0.5), float("-inf"))
        new = tl.maximum(top, tl.max(scores, 1))
        weight = tl.exp(scores - new[:, None])
        shrink = tl.exp(top - new)
        total = total * shrink + tl.sum(weight, 1)
        sums = sums * shrink[:, None] + tl.dot(weight.to(v.dtype), v)
        top = new
    sums = sums / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=row[:, None] < GROUP)


def kernel_function(q, keys, values, table, lengths):
    requests, heads, width = q.shape
    key_heads, out = keys.shape[2], torch.empty_like(q)
    group = heads // key_heads
    paged_decode[(requests, key_heads)](
        q,
        keys,
        values,
        table,
        lengths,
        out,
        heads,
        key_heads,
        table.shape[1],
        group,
        width,
        keys.shape[1],
        64,
        max(16, triton.next_power_of_2(group)),
    )
    return out
