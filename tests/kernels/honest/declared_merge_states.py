"""Two partial results of attention merged by their log-sum-exps; one may be empty. As FlashInfer's merge_state."""

import torch
import triton
import triton.language as tl


class Model(torch.nn.Module):
    def forward(self, v_a, s_a, v_b, s_b):
        largest = torch.maximum(s_a, s_b)
        a, b = torch.exp(s_a - largest), torch.exp(s_b - largest)
        merged = (v_a * a[..., None] + v_b * b[..., None]) / (a + b)[..., None]
        return merged, torch.log(a + b) + largest


def get_inputs(*, tokens=4, width=12):
    s_a, s_b = torch.randn(2, tokens, 2)
    s_b[0] = -torch.inf
    return [torch.randn(tokens, 2, width), s_a, torch.randn(tokens, 2, width), s_b]


LAYOUTS = "contiguous"


@triton.jit
def merge(v_a, s_a, v_b, s_b, v, s, width, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < width
    of_a, of_b = tl.load(s_a + row), tl.load(s_b + row)
    largest = tl.maximum(of_a, of_b)
    a, b = tl.exp(of_a - largest), tl.exp(of_b - largest)
    sums = tl.load(v_a + row * width + at, mask=inside) * a + tl.load(v_b + row * width + at, mask=inside) * b
    tl.store(v + row * width + at, sums / (a + b), mask=inside)
    tl.store(s + row, tl.log(a + b) + largest)


def kernel_function(v_a, s_a, v_b, s_b):
    v, s, width = torch.empty_like(v_a), torch.empty_like(s_a), v_a.shape[-1]
    merge[(s_a.numel(),)](v_a, s_a, v_b, s_b, v, s, width, BLOCK=triton.next_power_of_2(width))
    return v, s
