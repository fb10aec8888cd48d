"""CUDA C++: bf16 rows plus a bias, a parameter; added in fp32, rounded once."""

import functools

import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

NEEDS = "cuda"


class Model(nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(columns, dtype=torch.bfloat16))

    def forward(self, x):
        return (x + self.bias).contiguous()


def get_inputs():
    return [torch.randn(41, 515, dtype=torch.bfloat16)]


def get_init_inputs():
    return [515]


CUDA = r"""
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/types.h>
#include <cuda_bf16.h>

__global__ void add_bias(const __nv_bfloat16* x, const __nv_bfloat16* bias, __nv_bfloat16* y, int64_t count,
                         int64_t columns) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) y[i] = __float2bfloat16(__bfloat162float(x[i]) + __bfloat162float(bias[i % columns]));
}

torch::Tensor with_bias(torch::Tensor x, torch::Tensor bias) {
  const c10::cuda::CUDAGuard guard(x.device());
  auto y = torch::empty({x.size(0), x.size(1)}, x.options());
  const int64_t count = x.numel(), threads = 128;
  if (count == 0) return y;
  add_bias<<<unsigned((count + threads - 1) / threads), threads, 0, c10::cuda::getCurrentCUDAStream()>>>(
      reinterpret_cast<const __nv_bfloat16*>(x.data_ptr()), reinterpret_cast<const __nv_bfloat16*>(bias.data_ptr()),
      reinterpret_cast<__nv_bfloat16*>(y.data_ptr()), count, x.size(1));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return y;
}
"""


@functools.cache
def extension():
    declaration = "torch::Tensor with_bias(torch::Tensor x, torch::Tensor bias);"
    return load_inline("honest_bf16_bias", declaration, CUDA, functions=["with_bias"])


class ModelNew(nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.bias = nn.Parameter(torch.empty(columns, dtype=torch.bfloat16))

    def forward(self, x):
        if x.ndim != 2 or x.dtype != torch.bfloat16 or self.bias.dtype != torch.bfloat16:
            raise ValueError("x must be a bf16 matrix")
        if x.shape[1] != self.bias.numel():
            raise ValueError(f"x has {x.shape[1]} columns, the bias has {self.bias.numel()}")
        return extension().with_bias(x.contiguous(), self.bias.detach().contiguous())
