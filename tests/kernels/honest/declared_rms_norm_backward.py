"""RMSNorm with its gradients, in a torch.autograd.Function whose backward runs kernels and reads saved tensors."""

import torch
import triton
import triton.language as tl


class Model(torch.nn.Module):
    def forward(self, x, weight, dy):
        with torch.enable_grad():
            x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
            y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight
            dx, dw = torch.autograd.grad(y, (x, weight), dy)
        return y, dx, dw


def get_inputs(*, rows=7, columns=40):
    if columns < 2:
        raise ValueError("the gradient of x is a difference of equal numbers, 0 but for rounding")
    return [torch.randn(rows, columns), torch.randn(columns), torch.randn(rows, columns)]


@triton.jit
def forward(x, weight, y, scale, columns, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < columns
    value = tl.load(x + row * columns + at, mask=inside, other=0.0)
    factor = 1 / tl.sqrt(tl.sum(value * value, 0) / columns + 1e-6)
    tl.store(scale + row, factor)
    tl.store(y + row * columns + at, value * factor * tl.load(weight + at, mask=inside, other=0.0), mask=inside)


@triton.jit
def backward_x(x, weight, dy, scale, dx, columns, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < columns
    normal = tl.load(x + row * columns + at, mask=inside, other=0.0) * tl.load(scale + row)
    slope = tl.load(dy + row * columns + at, mask=inside, other=0.0) * tl.load(weight + at, mask=inside, other=0.0)
    mean = tl.sum(slope * normal, 0) / columns
    tl.store(dx + row * columns + at, (slope - normal * mean) * tl.load(scale + row), mask=inside)


@triton.jit
def backward_weight(x, dy, scale, dw, rows, columns, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    total = tl.zeros([BLOCK], tl.float32)
    for row in range(rows):
        value = tl.load(x + row * columns + at, mask=inside, other=0.0) * tl.load(scale + row)
        total += value * tl.load(dy + row * columns + at, mask=inside, other=0.0)
    tl.store(dw + at, total, mask=inside)


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        y, scale = torch.empty_like(x), x.new_empty(len(x))
        forward[(len(x),)](x, weight, y, scale, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, scale = ctx.saved_tensors
        dx, dw, (rows, columns) = torch.empty_like(x), torch.empty_like(weight), x.shape
        BLOCK = triton.next_power_of_2(columns)
        backward_x[(rows,)](x, weight, dy.contiguous(), scale, dx, columns, BLOCK=BLOCK)
        backward_weight[(triton.cdiv(columns, 32),)](x, dy.contiguous(), scale, dw, rows, columns, BLOCK=32)
        return dx, dw


def kernel_function(x, weight, dy):
    with torch.enable_grad():
        x, weight = x.contiguous().requires_grad_(), weight.contiguous().requires_grad_()
        y = RMSNorm.apply(x, weight)
        dx, dw = torch.autograd.grad(y, (x, weight), dy)
    return y, dx, dw
