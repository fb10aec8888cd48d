"""CuTe DSL: adds two vectors, one element a thread; compiled once per length."""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import torch
import torch.nn as nn
from cutlass.cute.runtime import from_dlpack

NEEDS = "cuda"
THREADS = 128


class Model(nn.Module):
    def forward(self, x, y):
        return x + y


def get_inputs():
    return [torch.randn(20_011), torch.randn(20_011)]


@cute.kernel
def add(x: cute.Tensor, y: cute.Tensor, result: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    index = block * THREADS + thread
    if index < cute.size(result):
        result[index] = x[index] + y[index]


@cute.jit
def launch(x: cute.Tensor, y: cute.Tensor, result: cute.Tensor, stream: cuda.CUstream):
    blocks = cute.ceil_div(cute.size(result), THREADS)
    add(x, y, result).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream)


compiled = {}


def kernel_function(x, y):
    if x.ndim != 1 or x.shape != y.shape or x.dtype != y.dtype:
        raise ValueError("x and y must be vectors of the same length and dtype")
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return result
    tensors = [x.detach().contiguous(), y.detach().contiguous(), result]
    arguments = [from_dlpack(value, assumed_align=value.element_size()) for value in tensors]
    stream = cuda.CUstream(torch.cuda.current_stream(x.device).cuda_stream)
    key = (x.numel(), x.dtype)
    if key not in compiled:
        compiled[key] = cute.compile(launch, *arguments, stream)
    compiled[key](*arguments, stream)
    return result
