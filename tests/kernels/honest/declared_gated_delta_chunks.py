"""The gated delta rule in chunks of tokens, held to the rms of the error as FLA's own tests are."""

import torch
import triton
import triton.language as tl


class Model(torch.nn.Module):
    def forward(self, query, key, value, gate, beta):
        out, state = torch.zeros_like(value), value.new_zeros(key.shape[1], value.shape[1])
        for token in range(len(query)):
            state = state * torch.exp(gate[token])
            new = (value[token] - key[token] @ state) * beta[token]
            state = state + torch.outer(key[token], new)
            out[token] = query[token] @ state
        return out, state


def get_inputs(*, tokens=6, width=6):
    query, key = (torch.nn.functional.normalize(torch.randn(tokens, 8), dim=-1) for _ in range(2))
    gate, beta = torch.nn.functional.logsigmoid(torch.randn(tokens)), torch.rand(tokens)
    return [query, key, torch.randn(tokens, width), gate, beta]


COMPARE = {0: {"rms": 0.005}, 1: {"rms": 0.005}}
LAYOUTS = "contiguous"


@triton.jit
def chunks(
    query,
    key,
    value,
    gate,
    beta,
    out,
    last,
    tokens,
    width,
    CHUNK: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row, of, at = tl.arange(0, CHUNK), tl.arange(0, DEPTH), tl.arange(0, WIDTH)
    state, wide = tl.zeros((DEPTH, WIDTH), tl.float32), at < width
    for start in range(0, tokens, CHUNK):
        token = start + row
        real = token < tokens
        narrow, both = real[:, None] & (of >= 0)[None, :], real[:, None] & wide[None, :]
        q = tl.load(query + token[:, None] * DEPTH + of[None, :], mask=narrow, other=0.0)
        k = tl.load(key + token[:, None] * DEPTH + of[None, :], mask=narrow, other=0.0)
        v = tl.load(value + token[:, None] * width + at[None, :], mask=both, other=0.0)
        b = tl.load(beta + token, mask=real, other=0.0)
        g = tl.cumsum(tl.load(gate + token, mask=real, other=0.0), 0)
        before = row[:, None] >= row[None, :]
        decay = tl.where(before, tl.exp(tl.where(before, g[:, None] - g[None, :], 0.0)), 0.0)
        pairs = tl.sum(k[:, None, :] * k[None, :, :], 2) * decay * b[:, None]
        rest = (v - tl.exp(g)[:, None] * tl.sum(k[:, :, None] * state[None, :, :], 1)) * b[:, None]
        new = tl.zeros((CHUNK, WIDTH), tl.float32)
        for number in range(CHUNK):
            own = (row == number)[:, None]
            seen = tl.sum(tl.where(own & (row < number)[None, :], pairs, 0.0), 0)
            made = tl.sum(tl.where(own, rest, 0.0), 0) - tl.sum(seen[:, None] * new, 0)
            new = tl.where(own, made[None, :], new)
        weights = tl.sum(q[:, None, :] * k[None, :, :], 2) * decay
        result = tl.exp(g)[:, None] * tl.sum(q[:, :, None] * state[None, :, :], 1)
        result += tl.sum(weights[:, :, None] * new[None, :, :], 1)
        tl.store(out + token[:, None] * width + at[None, :], result, mask=both)
        whole = tl.sum(tl.where(row == CHUNK - 1, g, 0.0), 0)
        left = k * tl.exp(whole - g)[:, None]
        state = state * tl.exp(whole) + tl.sum(left[:, :, None] * new[:, None, :], 0)
    tl.store(last + of[:, None] * width + at[None, :], state, mask=(of >= 0)[:, None] & wide[None, :])


def kernel_function(query, key, value, gate, beta):
    (tokens, width), depth = value.shape, key.shape[1]
    out, last = torch.empty_like(value), torch.empty(depth, width, dtype=value.dtype, device=value.device)
    sizes = {"CHUNK": 4, "DEPTH": depth, "WIDTH": triton.next_power_of_2(width)}
    chunks[(1,)](query, key, value, gate, beta, out, last, tokens, width, **sizes)
    return out, last
