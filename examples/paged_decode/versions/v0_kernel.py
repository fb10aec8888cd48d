"""Paged GQA decode: a program a request, kv head and part of the keys, and a second kernel that merges the parts."""

import torch
import triton
import triton.language as tl

TILE = 64
SPLITS = 8
WARPS = 4
STAGES = 2


@triton.jit
def attend(
    query,
    cache,
    table,
    lengths,
    parts,
    tops,
    sums,
    kv_heads,
    group,
    page,
    columns,
    scale,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    request, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2)
    length = tl.load(lengths + request)
    share = tl.cdiv(tl.cdiv(length, splits), TILE) * TILE
    row, at, slot = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, TILE)
    first = (request * kv_heads + head).to(tl.int64) * group
    own = tl.load(query + (first + row[:, None]) * WIDTH + at[None, :], mask=row[:, None] < group, other=0.0)
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    value = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(split * share, tl.minimum(length, split * share + share), TILE):
        token = start + slot
        number = tl.load(table + request * columns + token // page, mask=token < length, other=0).to(tl.int64)
        place = ((number * page + token % page) * kv_heads + head) * 2 * WIDTH
        there = (token < length)[:, None]
        keys = tl.load(cache + place[:, None] + at[None, :], mask=there, other=0.0)
        score = tl.dot(own, tl.trans(keys)) * scale
        score = tl.where((token < length)[None, :], score, -float("inf"))
        larger = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - larger[:, None])
        factor = tl.exp2(top - larger)
        total = total * factor + tl.sum(weight, 1)
        values = tl.load(cache + place[:, None] + WIDTH + at[None, :], mask=there, other=0.0)
        value = value * factor[:, None] + tl.dot(weight.to(values.dtype), values)
        top = larger
    line = (first + row) * splits + split
    tl.store(tops + line, top, mask=row < group)
    tl.store(sums + line, total, mask=row < group)
    tl.store(parts + line[:, None] * WIDTH + at[None, :], value, mask=row[:, None] < group)


@triton.jit
def merge(parts, tops, sums, out, splits, WIDTH: tl.constexpr, SPLITS: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    split, at = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    tops = tl.load(tops + line * splits + split, mask=split < splits, other=-float("inf"))
    top = tl.max(tops, 0)
    factor = tl.where(tops == -float("inf"), 0.0, tl.exp2(tops - top))  # a part without tokens counts nothing
    total = tl.sum(factor * tl.load(sums + line * splits + split, mask=split < splits, other=0.0), 0)
    place = (line * splits + split[:, None]) * WIDTH + at[None, :]
    value = tl.sum(factor[:, None] * tl.load(parts + place, mask=split[:, None] < splits, other=0.0), 0)
    value = value / tl.where(total == 0, 1.0, total)
    tl.store(out + line * WIDTH + at, value.to(out.dtype.element_ty))


def kernel_function(query, cache, table, lengths):
    query, cache, table, lengths = (x.contiguous() for x in (query, cache, table, lengths))
    requests, heads, width = query.shape
    _, page, kv_heads, _ = cache.shape
    if width not in (64, 128):
        raise ValueError("heads of 64 or 128 values are served")
    group = heads // kv_heads
    out = torch.empty_like(query)
    parts = torch.empty((requests, heads, SPLITS, width), dtype=torch.float32, device=query.device)
    tops, sums = torch.empty((2, requests, heads, SPLITS), dtype=torch.float32, device=query.device)
    scale = 1.4426950408889634 * width**-0.5
    rows = max(16, triton.next_power_of_2(group))
    attend[(requests, kv_heads, SPLITS)](
        query,
        cache,
        table,
        lengths,
        parts,
        tops,
        sums,
        kv_heads,
        group,
        page,
        table.shape[1],
        scale,
        WIDTH=width,
        ROWS=rows,
        TILE=TILE,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    merge[(requests * heads,)](parts, tops, sums, out, SPLITS, WIDTH=width, SPLITS=triton.next_power_of_2(SPLITS))
    return out
