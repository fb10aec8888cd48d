"""A step of the optimiser Lion: parameters and momentum in place."""

import torch
import triton
import triton.language as tl


class Model(torch.nn.Module):
    def forward(self, weight, gradient, momentum, rate, decay):
        weight.mul_(1 - rate * decay)
        weight.sub_(rate * torch.sign(0.9 * momentum + 0.1 * gradient))
        momentum.mul_(0.99).add_(0.01 * gradient)


def get_inputs(*, count=40):
    return [torch.randn(count), torch.randn(count), torch.randn(count), 0.05, 0.1]


MUTATES = ("weight", "momentum")
LAYOUTS = "contiguous"


@triton.jit
def step(weight, gradient, momentum, rate, decay, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    slope, old = tl.load(gradient + at, mask=inside), tl.load(momentum + at, mask=inside)
    update = 0.9 * old + 0.1 * slope
    sign = tl.where(update > 0, 1.0, tl.where(update < 0, -1.0, 0.0))
    tl.store(weight + at, tl.load(weight + at, mask=inside) * (1 - rate * decay) - rate * sign, mask=inside)
    tl.store(momentum + at, 0.99 * old + 0.01 * slope, mask=inside)


def kernel_function(weight, gradient, momentum, rate, decay):
    grid = (triton.cdiv(len(weight), 16),)
    step[grid](weight, gradient, momentum, rate, decay, len(weight), BLOCK=16)
