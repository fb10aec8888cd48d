"""A mixture of experts: each token through the gated layers of its experts, weighed. As in vLLM."""

import torch
import triton
import triton.language as tl


class Model(torch.nn.Module):
    def forward(self, x, inner, outer, weights, experts):
        y = torch.zeros_like(x)
        for expert in range(len(inner)):
            token, slot = torch.where(experts == expert)
            gate, up = (x[token] @ inner[expert].t()).chunk(2, -1)
            made = (torch.nn.functional.silu(gate) * up) @ outer[expert].t()
            y.index_add_(0, token, made * weights[token, slot, None])
        return y


def get_inputs(*, tokens=3, chosen=2):
    if chosen > 4:
        raise ValueError("more than all experts")
    weights, experts = torch.softmax(torch.randn(tokens, 4), -1).topk(chosen)
    return [torch.randn(tokens, 12), torch.randn(4, 20, 12), torch.randn(4, 12, 10), weights, experts.int()]


LAYOUTS = "contiguous"


@triton.jit
def moe(x, inner, outer, weights, experts, y, width, hidden, chosen, WIDTH: tl.constexpr, HIDDEN: tl.constexpr):
    token, at, of = tl.program_id(0), tl.arange(0, WIDTH), tl.arange(0, HIDDEN)
    wide, deep = at < width, of < hidden
    row = tl.load(x + token * width + at, mask=wide, other=0.0)
    total = tl.zeros((WIDTH,), tl.float32)
    for slot in range(chosen):
        expert = tl.load(experts + token * chosen + slot).to(tl.int64)
        first = inner + (expert * 2 * hidden + of[:, None]) * width + at[None, :]
        both = deep[:, None] & wide[None, :]
        gate = tl.sum(tl.load(first, mask=both, other=0.0) * row[None, :], 1)
        up = tl.sum(tl.load(first + hidden * width, mask=both, other=0.0) * row[None, :], 1)
        last = outer + (expert * width + at[:, None]) * hidden + of[None, :]
        product = tl.load(last, mask=wide[:, None] & deep[None, :], other=0.0) * (gate * tl.sigmoid(gate) * up)[None, :]
        total += tl.load(weights + token * chosen + slot) * tl.sum(product, 1)
    tl.store(y + token * width + at, total, mask=wide)


def kernel_function(x, inner, outer, weights, experts):
    y, (width, hidden), chosen = torch.empty_like(x), outer.shape[1:], experts.shape[1]
    sizes = {"WIDTH": triton.next_power_of_2(width), "HIDDEN": triton.next_power_of_2(hidden)}
    moe[(len(x),)](x, inner, outer, weights, experts, y, width, hidden, chosen, **sizes)
    return y
