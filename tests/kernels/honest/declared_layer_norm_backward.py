"""The gradients of a layer norm from saved statistics; parts of the rows are summed by torch. As Liger does it."""

import torch
import triton
import triton.language as tl


class Model(torch.nn.Module):
    def forward(self, dy, x, weight, bias, mean, scale):
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in (x, weight, bias)]
            y = torch.nn.functional.layer_norm(leaves[0], x.shape[-1:], leaves[1], leaves[2])
            return torch.autograd.grad(y, leaves, dy)


def get_inputs(*, rows=24, columns=12):
    if columns < 3:
        raise ValueError("the gradient of x is a difference of equal numbers, 0 but for rounding")
    x = torch.randn(rows, columns)
    scale = torch.rsqrt(x.var(-1, unbiased=False) + 1e-5)
    return [torch.randn(rows, columns), x, torch.randn(columns), torch.randn(columns), x.mean(-1), scale]


LAYOUTS = "contiguous"


@triton.jit
def backward(dy, x, weight, mean, scale, dx, parts, rows, columns, each, BLOCK: tl.constexpr):
    part, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < columns
    own = tl.load(weight + at, mask=inside, other=0.0)
    of_weight, of_bias = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for row in range(part * each, tl.minimum((part + 1) * each, rows)):
        slope = tl.load(dy + row * columns + at, mask=inside, other=0.0)
        factor = tl.load(scale + row)
        normal = (tl.load(x + row * columns + at, mask=inside, other=0.0) - tl.load(mean + row)) * factor
        of_x = own * slope
        both = (tl.sum(of_x, 0) + normal * tl.sum(of_x * normal, 0)) / columns
        tl.store(dx + row * columns + at, (of_x - both) * factor, mask=inside)
        of_weight += slope * normal
        of_bias += slope
    tl.store(parts + part * 2 * columns + at, of_weight, mask=inside)
    tl.store(parts + (part * 2 + 1) * columns + at, of_bias, mask=inside)


def kernel_function(dy, x, weight, bias, mean, scale):
    dx, (rows, columns), count = torch.empty_like(x), x.shape, 2
    parts = torch.empty(count, 2, columns, dtype=x.dtype, device=x.device)
    sizes = {"each": triton.cdiv(rows, count), "BLOCK": triton.next_power_of_2(columns)}
    backward[(count,)](dy, x, weight, mean, scale, dx, parts, rows, columns, **sizes)
    return dx, *parts.sum(0)
