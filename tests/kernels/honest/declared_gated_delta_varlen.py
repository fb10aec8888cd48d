"""The gated delta rule for sequences end to end: a block a sequence, from its own state to its own state."""

import torch
import triton
import triton.language as tl


class Model(torch.nn.Module):
    def forward(self, query, key, value, gate, beta, states, cu_seqlens):
        out, after, ends = torch.zeros_like(value), states.clone(), cu_seqlens.tolist()
        for sequence in range(len(states)):
            for token in range(ends[sequence], ends[sequence + 1]):
                state = after[sequence] * torch.exp(gate[token])
                new = (value[token] - key[token] @ state) * beta[token]
                after[sequence] = state + torch.outer(key[token], new)
                out[token] = query[token] @ after[sequence]
        return out, after


def get_inputs(*, sequences=3, tokens=9, width=6):
    query, key = (torch.nn.functional.normalize(torch.randn(tokens, 8), dim=-1) for _ in range(2))
    gate, beta = torch.nn.functional.logsigmoid(torch.randn(tokens)), torch.rand(tokens)
    cu_seqlens = torch.arange(sequences + 1) ** 2 * tokens // sequences**2
    return [query, key, torch.randn(tokens, width), gate, beta, torch.randn(sequences, 8, width), cu_seqlens]


COMPARE = {0: {"rms": 0.005}, 1: {"rms": 0.005}}
LAYOUTS = "contiguous"


@triton.jit
def walk(query, key, value, gate, beta, states, offsets, out, after, width, DEPTH: tl.constexpr, WIDTH: tl.constexpr):
    of, at = tl.arange(0, DEPTH), tl.arange(0, WIDTH)
    first = tl.load(offsets + tl.program_id(0))
    last = tl.load(offsets + tl.program_id(0) + 1)
    place = (tl.program_id(0) * DEPTH + of[:, None]) * width + at[None, :]
    both = (of >= 0)[:, None] & (at < width)[None, :]
    state = tl.load(states + place, mask=both, other=0.0)
    for token in range(first, last):
        state *= tl.exp(tl.load(gate + token))
        k = tl.load(key + token * DEPTH + of)
        v = tl.load(value + token * width + at, mask=at < width, other=0.0)
        new = (v - tl.sum(k[:, None] * state, 0)) * tl.load(beta + token)
        state += k[:, None] * new[None, :]
        q = tl.load(query + token * DEPTH + of)
        tl.store(out + token * width + at, tl.sum(q[:, None] * state, 0), mask=at < width)
    tl.store(after + place, state, mask=both)


def kernel_function(query, key, value, gate, beta, states, cu_seqlens):
    out, after = torch.empty_like(value), torch.empty_like(states)
    depth, width = states.shape[1:]
    sizes = {"DEPTH": depth, "WIDTH": triton.next_power_of_2(width)}
    walk[(len(states),)](query, key, value, gate, beta, states, cu_seqlens, out, after, width, **sizes)
    return out, after
