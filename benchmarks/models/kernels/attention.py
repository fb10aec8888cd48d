"""Attention of one new token a request over its cache: rotates query and key, writes key and value to the cache, and
reads each row of the cache once for all query heads that share it. The cache is read in splits, which a second kernel
joins."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

SHAPES = {"keys": (8, 8, 4096, 128), "values": (8, 8, 4096, 128)}
KEYS = 64  # of a step through the cache
PROGRAMS = 512  # about four for each SM
LEAST = tl.constexpr(-1e30)


@triton.jit
def rotated_halves(x, first_at, cos, sin, HALF: tl.constexpr, mask):
    """The two halves of rotated rows. first_at: offsets of the first half."""
    first = tl.load(x + first_at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + first_at + HALF, mask=mask, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def attend(
    q, k, v, cos, sin, position, mask, keys, values, partial, sums,
    q_request, q_head, k_request, k_head, v_request, v_head, length, splits, rows, scale,
    SHARED: tl.constexpr, PADDED: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    pair, split = tl.program_id(0), tl.program_id(1)
    request, kv_head = (pair // KV_HEADS).to(tl.int64), pair % KV_HEADS
    half, wide, head = tl.arange(0, HALF), tl.arange(0, 2 * HALF), tl.arange(0, PADDED)
    wave_cos, wave_sin = tl.load(cos + half).to(tl.float32), tl.load(sin + half).to(tl.float32)
    real = head[:, None] < SHARED
    heads_at = (kv_head * SHARED + head[:, None]) * q_head + half[None]
    q_first, q_second = rotated_halves(
        q + request * q_request, heads_at, wave_cos[None], wave_sin[None], HALF, real & (half[None] < HALF)
    )
    kind = keys.dtype.element_ty
    q_first, q_second = q_first.to(kind), q_second.to(kind)
    k_first, k_second = rotated_halves(
        k + request * k_request + kv_head * k_head, half, wave_cos, wave_sin, HALF, half < HALF
    )
    k_first, k_second = k_first.to(kind), k_second.to(kind)
    v_new = tl.load(v + request * v_request + kv_head * v_head + wide)
    now = tl.load(position)
    cache = pair.to(tl.int64) * length * (2 * HALF)
    most = tl.full([PADDED], LEAST, tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    out = tl.zeros([PADDED, 2 * HALF], tl.float32)
    begin = split * rows
    end = tl.minimum(begin + rows, length)
    for start in range(begin, end, KEYS):
        at = start + tl.arange(0, KEYS)
        old = (at < end) & (at != now)
        spot = cache + at[None].to(tl.int64) * (2 * HALF) + half[:, None]
        first = tl.load(keys + spot, mask=old[None], other=0.0)
        second = tl.load(keys + spot + HALF, mask=old[None], other=0.0)
        value = tl.load(
            values + cache + at[:, None].to(tl.int64) * (2 * HALF) + wide[None], mask=old[:, None], other=0.0
        )
        seen = tl.load(mask + at, mask=old, other=0) != 0
        scores = tl.dot(q_first, first) + tl.dot(q_second, second)
        scores = tl.where(seen[None], scores * scale, float("-inf"))
        larger = tl.maximum(most, tl.max(scores, 1))
        shares = tl.exp2(scores - larger[:, None])
        shrink = tl.exp2(most - larger)
        total = total * shrink + tl.sum(shares, 1)
        out = out * shrink[:, None] + tl.dot(shares.to(kind), value)
        most = larger
    if (now >= begin) & (now < end):
        spot_now = cache + now * (2 * HALF)
        tl.store(keys + spot_now + half, k_first)
        tl.store(keys + spot_now + HALF + half, k_second)
        tl.store(values + spot_now + wide, v_new)
        score = tl.sum(q_first.to(tl.float32) * k_first.to(tl.float32)[None], 1)
        score += tl.sum(q_second.to(tl.float32) * k_second.to(tl.float32)[None], 1)
        score = tl.where(tl.load(mask + now) != 0, score * scale, float("-inf"))
        larger = tl.maximum(most, score)
        share, shrink = tl.exp2(score - larger), tl.exp2(most - larger)
        total = total * shrink + share
        out = out * shrink[:, None] + share[:, None] * v_new.to(tl.float32)[None]
        most = larger
    row = (pair.to(tl.int64) * SHARED + head) * splits + split
    tl.store(partial + row[:, None] * (2 * HALF) + wide[None], out, mask=real)
    tl.store(sums + row * 2, most, mask=head < SHARED)
    tl.store(sums + row * 2 + 1, total, mask=head < SHARED)


@triton.jit
def join(partial, sums, out, splits, SPLITS: tl.constexpr, SIZE: tl.constexpr):
    row, at, wide = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS), tl.arange(0, SIZE)
    inside = at < splits
    most = tl.load(sums + (row * splits + at) * 2, mask=inside, other=LEAST)
    total = tl.load(sums + (row * splits + at) * 2 + 1, mask=inside, other=0.0)
    weight = tl.exp2(most - tl.max(most, 0))
    parts = tl.load(partial + (row * splits + at[:, None]) * SIZE + wide[None], mask=inside[:, None], other=0.0)
    joined = tl.sum(parts * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out + row * SIZE + wide, joined.to(out.dtype.element_ty))


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.empty(SHAPES["keys"]))
        self.register_buffer("values", torch.empty(SHAPES["values"]))

    def forward(self, cos, sin, positions, mask, q, k, v):
        requests, heads, _, size = q.shape
        kv_heads, length = self.keys.shape[1:3]
        q, k, v = (one if one.stride(-1) == 1 else one.contiguous() for one in (q, k, v))
        pairs, shared = requests * kv_heads, heads // kv_heads
        splits = max(1, min(triton.cdiv(length, KEYS), PROGRAMS // pairs))
        rows = triton.cdiv(triton.cdiv(length, splits), KEYS) * KEYS
        splits = triton.cdiv(length, rows)
        partial = torch.empty((requests * heads, splits, size), dtype=torch.float32, device=q.device)
        sums = torch.empty((requests * heads, splits, 2), dtype=torch.float32, device=q.device)
        out = torch.empty((requests, 1, heads * size), dtype=q.dtype, device=q.device)
        attend[(pairs, splits)](
            q, k, v, cos.contiguous(), sin.contiguous(), positions, mask.contiguous(), self.keys, self.values,
            partial, sums, q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            length, splits, rows, size**-0.5 * 1.4426950408889634,
            SHARED=shared, PADDED=max(16, triton.next_power_of_2(shared)), KV_HEADS=kv_heads, HALF=size // 2,
            KEYS=KEYS, num_warps=4, num_stages=3,
        )  # fmt: skip
        join[(requests * heads,)](
            partial, sums, out, splits, SPLITS=triton.next_power_of_2(splits), SIZE=size, num_warps=1
        )
        return out
