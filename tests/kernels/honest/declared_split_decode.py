"""Paged decode with grouped query heads: the keys of a request and kv head are split, a second kernel merges the parts."""

import torch
import triton
import triton.language as tl


class Model(torch.nn.Module):
    def forward(self, query, cache, table, lengths):
        kv_heads, width = cache.shape[2], query.shape[2]
        keys, values = cache[table].flatten(1, 2).chunk(2, -1)
        grouped = query.unflatten(1, (kv_heads, -1))
        scores = torch.einsum("rhgd,rthd->rhgt", grouped, keys) * width**-0.5
        there = (torch.arange(keys.shape[1], device=query.device) < lengths[:, None])[:, None, None]
        weights = torch.where(there, torch.softmax(scores.masked_fill(~there, -torch.inf), -1), 0.0)
        return torch.einsum("rhgt,rthd->rhgd", weights, values).flatten(1, 2)


def get_inputs(*, requests=2, longest=24):
    columns = -(-longest // 4)
    lengths = torch.randint(0, longest + 1, (requests,)).int()
    lengths[0], lengths[1:2] = longest, 0
    table = torch.randperm(requests * columns).view(requests, columns).int()
    return [4 * torch.randn(requests, 4, 16), torch.randn(requests * columns, 4, 2, 32), table, lengths]


LAYOUTS = "contiguous"
SPLITS = 2


@triton.jit
def attend(
    query, cache, table, lengths, parts, tops, sums, kv_heads, group, columns, ROWS: tl.constexpr, TILE: tl.constexpr
):
    request, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2)
    length = tl.load(lengths + request)
    share = tl.cdiv(tl.cdiv(length, splits), TILE) * TILE
    row, at, slot = tl.arange(0, ROWS), tl.arange(0, 16), tl.arange(0, TILE)
    first = (request * kv_heads + head) * group
    own = tl.load(query + (first + row[:, None]) * 16 + at[None, :], mask=row[:, None] < group, other=0.0)
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    value = tl.zeros((ROWS, 16), tl.float32)
    for start in range(split * share, tl.minimum(length, split * share + share), TILE):
        token = start + slot
        there = token < length
        page = tl.load(table + request * columns + token // 4, mask=there, other=0)
        place = ((page * 4 + token % 4) * kv_heads + head) * 32
        keys = tl.load(cache + place[:, None] + at[None, :], mask=there[:, None], other=0.0)
        score = tl.dot(own, tl.trans(keys), input_precision="ieee") * 0.25
        score = tl.where(there[None, :], score, -float("inf"))
        larger = tl.maximum(top, tl.max(score, 1))
        weight, factor = tl.exp(score - larger[:, None]), tl.exp(top - larger)
        values = tl.load(cache + place[:, None] + 16 + at[None, :], mask=there[:, None], other=0.0)
        value = value * factor[:, None] + tl.dot(weight, values, input_precision="ieee")
        total, top = total * factor + tl.sum(weight, 1), larger
    line = (first + row) * splits + split
    tl.store(tops + line, top, mask=row < group)
    tl.store(sums + line, total, mask=row < group)
    tl.store(parts + line[:, None] * 16 + at[None, :], value, mask=row[:, None] < group)


@triton.jit
def merge(parts, tops, sums, out, SPLITS: tl.constexpr):
    line, split, at = tl.program_id(0), tl.arange(0, SPLITS), tl.arange(0, 16)
    part = tl.load(tops + line * SPLITS + split)
    factor = tl.where(part == -float("inf"), 0.0, tl.exp(part - tl.max(part, 0)))
    total = tl.sum(factor * tl.load(sums + line * SPLITS + split), 0)
    value = tl.load(parts + (line * SPLITS + split[:, None]) * 16 + at[None, :])
    tl.store(out + line * 16 + at, tl.sum(factor[:, None] * value, 0) / tl.where(total == 0, 1.0, total))


def kernel_function(query, cache, table, lengths):
    requests, heads, _ = query.shape
    kv_heads, out = cache.shape[2], torch.empty_like(query)
    group = heads // kv_heads
    parts = query.new_empty(requests, heads, SPLITS, 16)
    tops, sums = query.new_empty(requests, heads, SPLITS), query.new_empty(requests, heads, SPLITS)
    rows = max(16, triton.next_power_of_2(group))
    grid = (requests, kv_heads, SPLITS)
    attend[grid](query, cache, table, lengths, parts, tops, sums, kv_heads, group, table.shape[1], ROWS=rows, TILE=16)
    merge[(requests * heads,)](parts, tops, sums, out, SPLITS=SPLITS)
    return out
