"""CUDA C++: scales four floats at a time where the address allows it, one at a time where it does not."""

import functools

import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

NEEDS = "cuda"


class Model(nn.Module):
    def forward(self, x):
        return x * 1.5


def get_inputs():
    return [torch.randn(70_003)]


def get_workloads():
    return {"unaligned": lambda: [torch.randn(50_001)[1:]]}


CUDA = r"""
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/types.h>

__global__ void scale_four(const float* x, float* y, int64_t count) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, fours = count / 4;
  if (i < fours) {
    float4 value = reinterpret_cast<const float4*>(x)[i];
    value.x *= 1.5f; value.y *= 1.5f; value.z *= 1.5f; value.w *= 1.5f;
    reinterpret_cast<float4*>(y)[i] = value;
  } else if (fours * 4 + (i - fours) < count) {  // up to three that are left
    const int64_t rest = fours * 4 + (i - fours);
    y[rest] = x[rest] * 1.5f;
  }
}

__global__ void scale_one(const float* x, float* y, int64_t count) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) y[i] = x[i] * 1.5f;
}

torch::Tensor scaled(torch::Tensor x) {
  const c10::cuda::CUDAGuard guard(x.device());
  auto y = torch::empty({x.numel()}, x.options());
  const int64_t count = x.numel(), threads = 256;
  if (count == 0) return y;
  const float* from = x.data_ptr<float>();
  float* to = y.data_ptr<float>();
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const auto aligned = [](const void* place) { return reinterpret_cast<uintptr_t>(place) % sizeof(float4) == 0; };
  if (aligned(from) && aligned(to)) {
    const int64_t items = count / 4 + count % 4;
    scale_four<<<unsigned((items + threads - 1) / threads), threads, 0, stream>>>(from, to, count);
  } else {
    scale_one<<<unsigned((count + threads - 1) / threads), threads, 0, stream>>>(from, to, count);
  }
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return y;
}
"""


@functools.cache
def extension():
    return load_inline("honest_float4_scale", "torch::Tensor scaled(torch::Tensor x);", CUDA, functions=["scaled"])


def kernel_function(x):
    if x.ndim != 1 or x.dtype != torch.float32:
        raise ValueError("x must be an fp32 vector")
    return extension().scaled(x.contiguous())
