"""CUDA C++: elementwise with a grid-stride loop, the grid no larger than the GPU."""

import functools

import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

NEEDS = "cuda"


class Model(nn.Module):
    def forward(self, x, y):
        return x * 0.5 + torch.abs(y)


def get_inputs():
    return [torch.randn(60_013), torch.randn(60_013)]


CUDA = r"""
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/types.h>
#include <algorithm>

__global__ void half_plus_size(const float* x, const float* y, float* result, int64_t count) {
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step)
    result[i] = x[i] * 0.5f + fabsf(y[i]);
}

torch::Tensor half_plus_size_of(torch::Tensor x, torch::Tensor y) {
  const c10::cuda::CUDAGuard guard(x.device());
  auto result = torch::empty({x.numel()}, x.options());
  const int64_t count = x.numel(), threads = 256;
  if (count == 0) return result;
  int multiprocessors = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, x.get_device()));
  const int blocks = int(std::min<int64_t>((count + threads - 1) / threads, multiprocessors * 8));
  half_plus_size<<<blocks, threads, 0, c10::cuda::getCurrentCUDAStream()>>>(
      x.data_ptr<float>(), y.data_ptr<float>(), result.data_ptr<float>(), count);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return result;
}
"""


@functools.cache
def extension():
    declaration = "torch::Tensor half_plus_size_of(torch::Tensor x, torch::Tensor y);"
    return load_inline("honest_grid_stride", declaration, CUDA, functions=["half_plus_size_of"])


def kernel_function(x, y):
    if x.ndim != 1 or x.shape != y.shape or x.dtype != torch.float32 or y.dtype != torch.float32:
        raise ValueError("x and y must be fp32 vectors of the same length")
    return extension().half_plus_size_of(x.contiguous(), y.contiguous())
