"""Causal attention of sequences that lie end to end, from cu_seqlens, in groups of heads. As FlashAttention's varlen."""

import itertools

import torch
import triton
import triton.language as tl


class Model(torch.nn.Module):
    def forward(self, query, keys, values, cu_seqlens, max_seqlen, scale):
        out, ends = torch.empty_like(query), cu_seqlens.tolist()
        for first, last in itertools.pairwise(ends):
            q, k, v = (x[first:last].transpose(0, 1) for x in (query, keys, values))
            scores = q @ k.transpose(1, 2) * scale
            future = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
            out[first:last] = (torch.softmax(scores.masked_fill(future, -torch.inf), -1) @ v).transpose(0, 1)
        return out


def get_inputs(*, sequences=2, longest=5):
    lengths = torch.randint(0, longest + 1, (sequences,))
    lengths[-1] = longest
    cu_seqlens = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()
    qkv = torch.randn(int(cu_seqlens[-1]), 4, 12)
    query, keys, values = qkv.split([2, 1, 1], 1)
    return [query, keys, values, cu_seqlens, longest, 12**-0.5]


LAYOUTS = "contiguous"


@triton.jit
def attend(
    query,
    keys,
    values,
    cu_seqlens,
    out,
    of_query,
    of_keys,
    of_values,
    scale,
    width,
    heads,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence, head, at = tl.program_id(0), tl.program_id(1), tl.arange(0, WIDTH)
    wide = at < width
    first, last = tl.load(cu_seqlens + sequence), tl.load(cu_seqlens + sequence + 1)
    row = first + tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    rows = (row < last)[:, None] & wide[None, :]
    q = tl.load(query + row[:, None] * of_query + head * width + at[None, :], mask=rows, other=0.0)
    largest, total = tl.full((BLOCK,), -1e30, tl.float32), tl.zeros((BLOCK,), tl.float32)
    sums = tl.zeros((BLOCK, WIDTH), tl.float32)
    for start in range(first, last, BLOCK):
        token = start + tl.arange(0, BLOCK)
        seen = (token < last)[None, :] & (token[None, :] <= row[:, None])
        both = (token < last)[:, None] & wide[None, :]
        k = tl.load(keys + token[:, None] * of_keys + at[None, :], mask=both, other=0.0)
        v = tl.load(values + token[:, None] * of_values + at[None, :], mask=both, other=0.0)
        scores = tl.where(seen, tl.sum(q[:, None, :] * k[None, :, :], 2) * scale, -1e30)
        new = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.where(seen, tl.exp(scores - new[:, None]), 0.0)
        shrink = tl.exp(largest - new)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + tl.sum(weights[:, :, None] * v[None, :, :], 1)
        largest = new
    tl.store(out + (row[:, None] * heads + head) * width + at[None, :], sums / total[:, None], mask=rows)


def kernel_function(query, keys, values, cu_seqlens, max_seqlen, scale):
    if keys.shape[1] != 1 or any(x.stride()[1:] != (x.shape[2], 1) for x in (query, keys, values)):
        raise ValueError("one head of keys, and dense heads, only")
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    heads, width = query.shape[1:]
    pitches = query.stride(0), keys.stride(0), values.stride(0)
    grid = len(cu_seqlens) - 1, heads, triton.cdiv(max_seqlen, 4)
    sizes = {"WIDTH": triton.next_power_of_2(width), "BLOCK": 4}
    attend[grid](query, keys, values, cu_seqlens, out, *pitches, scale, width, heads, **sizes)
    return out
