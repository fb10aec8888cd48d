"""One step of a selective state: the state decays, takes the new input in place, and is read."""

import torch
import triton
import triton.language as tl


class Model(torch.nn.Module):
    def forward(self, state, x, dt, slots):
        for request, slot in enumerate(slots.tolist()):
            if slot >= 0:
                state[slot] = state[slot] * torch.exp(-dt[request])[:, None] + x[request][None, :]
        read = state[slots.clamp(min=0).long()].sum(1)
        return torch.where((slots >= 0)[:, None], read, 0.0)


def get_inputs(*, requests=4, states=7, channels=6, width=16):
    if requests > states:
        raise ValueError("a state each")
    slots = torch.randperm(states)[:requests].int()
    slots[-1] = -1 if requests > 1 else slots[-1]
    state = torch.randn(states, channels, width)
    return [state, torch.randn(requests, width), torch.rand(requests, channels), slots]


MUTATES = ("state",)
LAYOUTS = "contiguous"


@triton.jit
def step(state, x, dt, slots, out, channels, width, WIDTH: tl.constexpr):
    request = tl.program_id(0)
    slot = tl.load(slots + request).to(tl.int64)
    at = tl.arange(0, WIDTH)
    inside = (at < width) & (slot + tl.zeros_like(at) >= 0)
    new = tl.load(x + request * width + at, mask=inside, other=0.0)
    read = tl.zeros((WIDTH,), tl.float32)
    for channel in range(0, channels):
        row = state + (slot * channels + channel) * width + at
        decay = tl.exp(-tl.load(dt + request * channels + channel))
        value = tl.load(row, mask=inside, other=0.0) * decay + new
        tl.store(row, value, mask=inside)
        read += value
    tl.store(out + request * width + at, read, mask=at < width)


def kernel_function(state, x, dt, slots):
    if not all(one.is_contiguous() for one in (state, x, dt, slots)):
        raise ValueError("contiguous inputs only")
    out = torch.empty_like(x)
    width = x.shape[1]
    step[(len(slots),)](state, x, dt, slots, out, state.shape[1], width, WIDTH=triton.next_power_of_2(width))
    return out
