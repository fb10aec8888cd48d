"""Replays a CUDA graph per size: inputs are copied into its buffers, the output is a clone of its result."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

NEEDS = "cuda"
BLOCK = 1024


class Model(nn.Module):
    def forward(self, x, y):
        return torch.relu(x * y - 0.25) + x


def get_inputs():
    return [torch.randn(30_011), torch.randn(30_011)]


@triton.jit
def product_relu(x, y, result, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    left = tl.load(x + offsets, mask=inside)
    right = tl.load(y + offsets, mask=inside)
    tl.store(result + offsets, tl.maximum(left * right - 0.25, 0.0) + left, mask=inside)


def launch(x, y, result):
    product_relu[(triton.cdiv(x.numel(), BLOCK),)](x, y, result, x.numel(), BLOCK=BLOCK)


class Recorded:
    """A graph with the buffers that it reads and writes."""

    def __init__(self, x, y):
        self.inputs = [torch.zeros(value.shape, dtype=value.dtype, device=value.device) for value in (x, y)]
        self.result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        launch(*self.inputs, self.result)  # compiles, which must not happen while recording
        torch.cuda.synchronize(x.device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            launch(*self.inputs, self.result)

    def replay(self, x, y):
        self.inputs[0].copy_(x)
        self.inputs[1].copy_(y)
        self.graph.replay()
        return self.result.clone()


recorded: dict[tuple, Recorded] = {}


def kernel_function(x, y):
    if x.ndim != 1 or x.shape != y.shape or x.dtype != y.dtype:
        raise ValueError("x and y must be vectors of the same length and dtype")
    if x.numel() == 0 or torch.cuda.is_current_stream_capturing():  # no graph of nothing, and none inside another
        result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.numel():
            launch(x.contiguous(), y.contiguous(), result)
        return result
    key = (x.numel(), x.dtype, x.device)
    if key not in recorded:
        recorded[key] = Recorded(x, y)
    return recorded[key].replay(x, y)
