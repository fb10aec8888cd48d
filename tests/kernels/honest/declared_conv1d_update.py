"""One step of a causal convolution whose states are shifted in place; a slot of -1 is padding. As in Mamba."""

import torch
import triton
import triton.language as tl


class Model(torch.nn.Module):
    def forward(self, x, states, weight, slots):
        y = torch.zeros_like(x)
        for request, slot in enumerate(slots.tolist()):
            if slot >= 0:
                window = torch.cat([states[slot], x[request][:, None]], -1)
                states[slot] = window[:, 1:]
                y[request] = torch.nn.functional.silu((window * weight).sum(-1))
        return y


def get_inputs(*, requests=3, channels=12):
    slots = torch.randperm(2 * requests)[:requests].int()
    slots[1:2] = -1
    states = torch.randn(2 * requests, 3, channels).transpose(1, 2)
    return [torch.randn(requests, channels), states, torch.randn(channels, 4), slots]


MUTATES = ("states",)
LAYOUTS = "contiguous"


@triton.jit
def step(x, states, weight, slots, y, channels, of_slot, of_channel, of_time, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    request, at = tl.program_id(0), tl.arange(0, BLOCK)
    slot = tl.load(slots + request).to(tl.int64)
    inside = (at < channels) & (slot + tl.zeros_like(at) >= 0)
    state = states + slot * of_slot + at * of_channel
    new = tl.load(x + request * channels + at, mask=inside, other=0.0)
    total = new * tl.load(weight + at * WIDTH + WIDTH - 1, mask=inside, other=0.0)
    for time in tl.static_range(WIDTH - 1):
        old = tl.load(state + time * of_time, mask=inside, other=0.0)
        total += old * tl.load(weight + at * WIDTH + time, mask=inside, other=0.0)
        if time > 0:
            tl.store(state + (time - 1) * of_time, old, mask=inside)
    tl.store(state + (WIDTH - 2) * of_time, new, mask=inside)
    tl.store(y + request * channels + at, total * tl.sigmoid(total), mask=at < channels)


def kernel_function(x, states, weight, slots):
    y, (requests, channels) = torch.empty_like(x), x.shape
    sizes = {"WIDTH": weight.shape[1], "BLOCK": triton.next_power_of_2(channels)}
    step[(requests,)](x, states, weight, slots, y, channels, *states.stride(), **sizes)
    return y
