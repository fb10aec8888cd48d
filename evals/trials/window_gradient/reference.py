"""Backward pass of causal attention over a sliding window, with grouped heads, from what the forward pass saved.

q, out, dout: (heads, tokens, width). k, v: (key heads, tokens, width); heads / key heads query heads in a row share a
key head. lse: (heads, tokens), float32, the log-sum-exp of each row's scores q k^T / sqrt(width). Query i sees keys
i - WINDOW + 1 to i. Returns dq, dk and dv, bf16; the gradients of a key head are sums over its query heads.
"""

import torch
from torch import nn

TOKENS, HEADS, KEY_HEADS, DIM = 8192, 16, 4, 128
WINDOW = 2048
ROWS = 1024  # of queries at a time


class Model(nn.Module):
    def forward(self, q, k, v, out, lse, dout):
        wide, dtype = torch.promote_types(q.dtype, torch.float32), q.dtype
        heads, tokens, width = q.shape
        key_heads, scale = len(k), width**-0.5
        q, out, dout = (one.to(wide).view(key_heads, -1, tokens, width) for one in (q, out, dout))
        k, v = (one.to(wide)[:, None] for one in (k, v))
        lse = lse.to(wide).view(key_heads, -1, tokens, 1)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for start in range(0, tokens, ROWS):
            rows, keys = slice(start, start + ROWS), slice(max(0, start - WINDOW + 1), start + ROWS)
            p = (scores(q[:, :, rows], k[:, :, keys], start, keys.start) - lse[:, :, rows]).exp()
            dv[:, :, keys] += (p.mT @ dout[:, :, rows]).sum(1, keepdim=True)
            delta = (dout[:, :, rows] * out[:, :, rows]).sum(-1, keepdim=True)
            ds = p * (dout[:, :, rows] @ v[:, :, keys].mT - delta) * scale
            dq[:, :, rows] = ds @ k[:, :, keys]
            dk[:, :, keys] += (ds.mT @ q[:, :, rows]).sum(1, keepdim=True)
        return dq.view(heads, tokens, width).to(dtype), dk[:, 0].to(dtype), dv[:, 0].to(dtype)


def scores(q, k, first_query, first_key):
    """Scaled scores, -inf outside the window."""
    query = torch.arange(first_query, first_query + q.shape[2], device=q.device)
    key = torch.arange(first_key, first_key + k.shape[2], device=q.device)
    distance = query[:, None] - key[None, :]
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill((distance < 0) | (distance >= WINDOW), -torch.inf)


def attention(q, k, v):
    """The forward pass: out, lse, of q (key heads, query heads of each, tokens, width) and k, v (key heads, 1, …)."""
    outputs, sums = [], []
    for start in range(0, q.shape[2], ROWS):
        keys = slice(max(0, start - WINDOW + 1), start + ROWS)
        of_rows = scores(q[:, :, start : start + ROWS], k[:, :, keys], start, keys.start)
        sums.append(of_rows.logsumexp(-1))
        outputs.append((of_rows - sums[-1][..., None]).exp() @ v[:, :, keys])
    return torch.cat(outputs, 2), torch.cat(sums, 2)


def get_inputs(*, heads=HEADS, key_heads=KEY_HEADS, tokens=TOKENS, width=DIM):
    """dout grows with the root of the keys that a query sees, so that the gradients of all rows are of one size."""
    q, dout = (torch.randn(heads, tokens, width).bfloat16() for _ in range(2))
    k, v = (torch.randn(key_heads, tokens, width).bfloat16() for _ in range(2))
    out, lse = attention(q.float().view(key_heads, -1, tokens, width), k.float()[:, None], v.float()[:, None])
    seen = torch.arange(1, tokens + 1).clamp(max=WINDOW)
    dout *= seen.sqrt().bfloat16()[:, None]
    return [q, k, v, out.reshape(heads, tokens, width).bfloat16(), lse.reshape(heads, tokens), dout]


def get_init_inputs():
    return []


COMPARE = {0: {"rms": 0.01}, 1: {"rms": 0.01}, 2: {"rms": 0.01}}
