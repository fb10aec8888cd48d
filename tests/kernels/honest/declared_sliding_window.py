"""Causal attention within a window of tokens, whose length is an argument."""

import torch
import triton
import triton.language as tl


class Model(torch.nn.Module):
    def forward(self, query, keys, values, window):
        at = torch.arange(query.shape[-2], device=query.device)
        apart = at[:, None] - at[None, :]
        seen = (apart >= 0) & (apart < window)
        return torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=seen)


def get_inputs(*, tokens=7, window=3):
    return [*(torch.randn(2, 1, tokens, 12) for _ in range(3)), window]


LAYOUTS = "contiguous"


@triton.jit
def attend(query, keys, values, out, tokens, window, width, scale, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    at, row = tl.arange(0, WIDTH), tl.program_id(1)
    wide, head = at < width, tl.program_id(0) * tokens * width
    q = tl.load(query + head + row * width + at, mask=wide, other=0.0)
    largest, total = tl.full((), -1e30, tl.float32), tl.zeros((), tl.float32)
    sums = tl.zeros((WIDTH,), tl.float32)
    for start in range(tl.maximum(row - window + 1, 0) // BLOCK * BLOCK, row + 1, BLOCK):
        token = start + tl.arange(0, BLOCK)
        seen = (token <= row) & (row - token < window)
        place, both = head + token[:, None] * width + at[None, :], seen[:, None] & wide[None, :]
        scores = tl.sum(tl.load(keys + place, mask=both, other=0.0) * q[None, :], 1) * scale
        new = tl.maximum(largest, tl.max(tl.where(seen, scores, -1e30), 0))
        weights = tl.where(seen, tl.exp(scores - new), 0.0)
        shrink = tl.exp(largest - new)
        total = total * shrink + tl.sum(weights, 0)
        sums = sums * shrink + tl.sum(weights[:, None] * tl.load(values + place, mask=both, other=0.0), 0)
        largest = new
    tl.store(out + head + row * width + at, sums / total, mask=wide)


def kernel_function(query, keys, values, window):
    out, (batch, heads, tokens, width) = torch.empty_like(query), query.shape
    sizes = {"BLOCK": 4, "WIDTH": triton.next_power_of_2(width)}
    attend[(batch * heads, tokens)](query, keys, values, out, tokens, window, width, width**-0.5, **sizes)
    return out
