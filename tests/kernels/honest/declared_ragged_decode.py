"""Decode attention over tokens that indices name, from offsets on; a request may be empty. As in SGLang."""

import itertools

import torch
import triton
import triton.language as tl


class Model(torch.nn.Module):
    def forward(self, query, keys, values, offsets, indices, scale):
        out, ends = torch.zeros_like(query), offsets.tolist()
        for request, (first, last) in enumerate(itertools.pairwise(ends)):
            own = indices[first:last].long()
            weights = torch.softmax(query[request] @ keys[own].t() * scale, -1)
            out[request] = weights @ values[own]
        return out


def get_inputs(*, requests=3, width=12):
    lengths = torch.randint(0, 9, (requests,))
    lengths[-1], lengths[1:2] = 11, 0
    offsets, count = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int(), int(lengths.sum())
    keys, values = torch.randn(2 * count, width), torch.randn(2 * count, width)
    indices = torch.randperm(2 * count)[:count].int()
    return [torch.randn(requests, width), keys, values, offsets, indices, width**-0.5]


LAYOUTS = "contiguous"


@triton.jit
def decode(query, keys, values, offsets, indices, out, scale, width, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    request, at = tl.program_id(0), tl.arange(0, WIDTH)
    wide = at < width
    own = tl.load(query + request * width + at, mask=wide, other=0.0)
    first, last = tl.load(offsets + request), tl.load(offsets + request + 1)
    largest, total = tl.full((), -1e30, tl.float32), tl.zeros((), tl.float32)
    sums = tl.zeros((WIDTH,), tl.float32)
    for start in range(first, last, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < last
        place = tl.load(indices + token, mask=inside, other=0).to(tl.int64)[:, None] * width + at[None, :]
        both = inside[:, None] & wide[None, :]
        scores = tl.sum(tl.load(keys + place, mask=both, other=0.0) * own[None, :], 1) * scale
        scores = tl.where(inside, scores, -1e30)
        new = tl.maximum(largest, tl.max(scores, 0))
        weights = tl.where(inside, tl.exp(scores - new), 0.0)
        shrink = tl.exp(largest - new)
        total = total * shrink + tl.sum(weights, 0)
        sums = sums * shrink + tl.sum(weights[:, None] * tl.load(values + place, mask=both, other=0.0), 0)
        largest = new
    tl.store(out + request * width + at, sums / tl.where(total > 0, total, 1.0), mask=wide)


def kernel_function(query, keys, values, offsets, indices, scale):
    out, (requests, width) = torch.empty_like(query), query.shape
    sizes = {"BLOCK": 8, "WIDTH": triton.next_power_of_2(width)}
    decode[(requests,)](query, keys, values, offsets, indices, out, scale, width, **sizes)
    return out
