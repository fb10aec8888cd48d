"""CUDA C++: fp32 matrix product out of tiles in shared memory, zeros beyond the edges."""

import functools

import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

NEEDS = "cuda"


class Model(nn.Module):
    def forward(self, a, b):
        return a @ b


def get_inputs():
    return [torch.randn(75, 130), torch.randn(130, 50)]


CUDA = r"""
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/types.h>

constexpr int kTile = 16;

__global__ void product(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k) {
  __shared__ float left[kTile][kTile];
  __shared__ float right[kTile][kTile + 1];
  const int64_t row = int64_t(blockIdx.y) * kTile + threadIdx.y;
  const int64_t column = int64_t(blockIdx.x) * kTile + threadIdx.x;
  float total = 0.0f;
  for (int64_t start = 0; start < k; start += kTile) {
    const int64_t across = start + threadIdx.x, down = start + threadIdx.y;
    left[threadIdx.y][threadIdx.x] = row < m && across < k ? a[row * k + across] : 0.0f;
    right[threadIdx.y][threadIdx.x] = down < k && column < n ? b[down * n + column] : 0.0f;
    __syncthreads();
    for (int i = 0; i < kTile; ++i) total += left[threadIdx.y][i] * right[i][threadIdx.x];
    __syncthreads();
  }
  if (row < m && column < n) c[row * n + column] = total;
}

torch::Tensor product_of(torch::Tensor a, torch::Tensor b) {
  const c10::cuda::CUDAGuard guard(a.device());
  const int64_t m = a.size(0), k = a.size(1), n = b.size(1);
  auto c = torch::empty({m, n}, a.options());
  if (m == 0 || n == 0) return c;
  const dim3 grid(unsigned((n + kTile - 1) / kTile), unsigned((m + kTile - 1) / kTile));
  product<<<grid, dim3(kTile, kTile), 0, c10::cuda::getCurrentCUDAStream()>>>(
      a.data_ptr<float>(), b.data_ptr<float>(), c.data_ptr<float>(), m, n, k);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return c;
}
"""


@functools.cache
def extension():
    declaration = "torch::Tensor product_of(torch::Tensor a, torch::Tensor b);"
    return load_inline("honest_tiled_matmul", declaration, CUDA, functions=["product_of"])


def kernel_function(a, b):
    if a.ndim != 2 or b.ndim != 2 or a.dtype != torch.float32 or b.dtype != torch.float32:
        raise ValueError("a and b must be fp32 matrices")
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"a has {a.shape[1]} columns, b has {b.shape[0]} rows")
    if a.shape[0] > 16 * 65535:
        raise ValueError("a has more rows than the grid is high")
    return extension().product_of(a.contiguous(), b.contiguous())
