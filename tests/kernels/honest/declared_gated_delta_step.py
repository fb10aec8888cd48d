"""One step of the gated delta rule on states that slots name, in place; -1 is padding. As in SGLang."""

import torch
import triton
import triton.language as tl


class Model(torch.nn.Module):
    def forward(self, query, key, value, gate, beta, states, slots):
        out = torch.zeros_like(value)
        for request, slot in enumerate(slots.tolist()):
            if slot >= 0:
                state = states[slot] * torch.exp(gate[request])
                new = (value[request] - key[request] @ state) * beta[request]
                states[slot] = state + torch.outer(key[request], new)
                out[request] = query[request] @ states[slot]
        return out


def get_inputs(*, requests=3, width=12):
    slots = torch.randperm(2 * requests)[:requests].int()
    slots[1:2] = -1
    query, key = (torch.nn.functional.normalize(torch.randn(requests, 8), dim=-1) for _ in range(2))
    gate, beta = torch.nn.functional.logsigmoid(torch.randn(requests)), torch.rand(requests)
    return [query, key, torch.randn(requests, width), gate, beta, torch.randn(2 * requests, 8, width), slots]


MUTATES = ("states",)
LAYOUTS = "contiguous"


@triton.jit
def step(query, key, value, gate, beta, states, slots, out, width, DEPTH: tl.constexpr, WIDTH: tl.constexpr):
    request, of, at = tl.program_id(0), tl.arange(0, DEPTH), tl.arange(0, WIDTH)
    slot = tl.load(slots + request).to(tl.int64)
    wide = (at < width) & (slot + tl.zeros_like(at) >= 0)
    place, both = states + (slot * DEPTH + of[:, None]) * width + at[None, :], (of >= 0)[:, None] & wide[None, :]
    state = tl.load(place, mask=both, other=0.0) * tl.exp(tl.load(gate + request))
    k, q = tl.load(key + request * DEPTH + of), tl.load(query + request * DEPTH + of)
    new = tl.load(value + request * width + at, mask=wide, other=0.0) - tl.sum(state * k[:, None], 0)
    state += k[:, None] * (new * tl.load(beta + request))[None, :]
    tl.store(place, state, mask=both)
    tl.store(out + request * width + at, tl.sum(state * q[:, None], 0), mask=at < width)


def kernel_function(query, key, value, gate, beta, states, slots):
    out, (requests, width) = torch.empty_like(value), value.shape
    sizes = {"DEPTH": key.shape[1], "WIDTH": triton.next_power_of_2(width)}
    step[(requests,)](query, key, value, gate, beta, states, slots, out, width, **sizes)
    return out
