"""Kimi delta attention in chunks of tokens: the gated delta rule with a gate for each channel of the keys."""

import torch
import triton
import triton.language as tl


class Model(torch.nn.Module):
    def forward(self, query, key, value, gate, beta):
        out, state = torch.zeros_like(value), value.new_zeros(key.shape[1], value.shape[1])
        for token in range(len(query)):
            state = state * torch.exp(gate[token])[:, None]
            new = (value[token] - key[token] @ state) * beta[token]
            state = state + torch.outer(key[token], new)
            out[token] = query[token] @ state
        return out


def get_inputs(*, tokens=6, width=6):
    query, key = (torch.nn.functional.normalize(torch.randn(tokens, 8), dim=-1) for _ in range(2))
    gate, beta = -2 * torch.sigmoid(torch.randn(tokens, 8)), torch.rand(tokens)
    return [query, key, torch.randn(tokens, width), gate, beta]


COMPARE = {0: {"rms": 0.005}}
LAYOUTS = "contiguous"


@triton.jit
def chunks(
    query, key, value, gate, beta, out, tokens, width, CHUNK: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr
):
    row, of, at = tl.arange(0, CHUNK), tl.arange(0, DEPTH), tl.arange(0, WIDTH)
    state = tl.zeros((DEPTH, WIDTH), tl.float32)
    earlier = (row[:, None] > row[None, :]).to(tl.float32)
    for start in range(0, tokens, CHUNK):
        token = start + row
        narrow = (token < tokens)[:, None] & (of >= 0)[None, :]
        wide = (token < tokens)[:, None] & (at < width)[None, :]
        q = tl.load(query + token[:, None] * DEPTH + of[None, :], mask=narrow, other=0.0)
        k = tl.load(key + token[:, None] * DEPTH + of[None, :], mask=narrow, other=0.0)
        g = tl.cumsum(tl.load(gate + token[:, None] * DEPTH + of[None, :], mask=narrow, other=0.0), 0)
        v = tl.load(value + token[:, None] * width + at[None, :], mask=wide, other=0.0)
        b = tl.load(beta + token, mask=token < tokens, other=0.0)[:, None]
        decay = tl.exp(tl.minimum(g[:, None, :] - g[None, :, :], 0.0))
        pairs = tl.sum(k[:, None, :] * k[None, :, :] * decay, 2) * earlier * b
        rest = (v - tl.sum((k * tl.exp(g))[:, :, None] * state[None, :, :], 1)) * b
        new = tl.zeros((CHUNK, WIDTH), tl.float32)
        for number in range(CHUNK):
            made = tl.sum(tl.where((row == number)[:, None], rest, 0.0), 0)
            seen = tl.sum(tl.where((row == number)[:, None], pairs, 0.0), 0)
            made -= tl.sum(seen[:, None] * new, 0)
            new = tl.where((row == number)[:, None], made[None, :], new)
        weights = tl.sum(q[:, None, :] * k[None, :, :] * decay, 2)
        weights = tl.where(row[:, None] >= row[None, :], weights, 0.0)
        result = tl.sum((q * tl.exp(g))[:, :, None] * state[None, :, :], 1)
        result += tl.sum(weights[:, :, None] * new[None, :, :], 1)
        tl.store(out + token[:, None] * width + at[None, :], result, mask=wide)
        whole = tl.sum(tl.where((row == CHUNK - 1)[:, None], g, 0.0), 0)
        left = k * tl.exp(whole[None, :] - g)
        state = state * tl.exp(whole)[:, None] + tl.sum(left[:, :, None] * new[:, None, :], 0)


def kernel_function(query, key, value, gate, beta):
    (tokens, width), depth = value.shape, key.shape[1]
    out = torch.empty_like(value)
    sizes = {"CHUNK": 4, "DEPTH": depth, "WIDTH": triton.next_power_of_2(width)}
    chunks[(1,)](query, key, value, gate, beta, out, tokens, width, **sizes)
    return out
