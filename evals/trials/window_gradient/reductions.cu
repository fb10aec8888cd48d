// How fast the L2 takes additions, stores and loads: a probe of the agent with the bundle, on a GPU of compute capability 9.0.
// nvcc -O3 -arch=sm_90a reductions.cu -o reductions && ./reductions
#include <cstdio>
#include <cstdint>
#include <cuda_runtime.h>
template <int MODE> __global__ void __launch_bounds__(256) k(char* data, const char* src, int steps, long long mask, int* sink) {
  // 132 blocks; each step adds a tile of 64 x 128 elements at 2 * block + step tiles
  const int t = threadIdx.x;
  int acc = 0;
  for (int s = 0; s < steps; s++) {
    const long long tile = 2 * blockIdx.x + s;
    if (MODE == 0 || MODE == 2) {
      char* p = data + (tile * 32768 & mask) + (t / 32) * 4096 + (t & 31) * 16;
#pragma unroll
      for (int i = 0; i < 8; i++) {
        if (MODE == 0) asm volatile("red.global.add.v4.f32 [%0], {%1,%1,%1,%1};" ::"l"(p + i * 512), "f"(1.f) : "memory");
        else asm volatile("st.global.v4.f32 [%0], {%1,%1,%1,%1};" ::"l"(p + i * 512), "f"(1.f) : "memory");
      }
    } else if (MODE == 1 || MODE == 3 || MODE == 4) {
      char* p = data + (tile * 16384 & mask) + (t / 32) * 2048 + (t & 31) * 16;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (MODE == 1) asm volatile("red.global.add.noftz.v4.f16x2 [%0], {%1,%1,%1,%1};" ::"l"(p + i * 512), "r"(0x3c003c00) : "memory");
        else if (MODE == 4) asm volatile("red.global.add.noftz.v4.bf16x2 [%0], {%1,%1,%1,%1};" ::"l"(p + i * 512), "r"(0x3f803f80) : "memory");
        else asm volatile("st.global.v4.f32 [%0], {%1,%1,%1,%1};" ::"l"(p + i * 512), "f"(1.f) : "memory");
      }
    } else if (MODE == 5) {  // reads alone
      const char* p = src + (tile * 32768 & mask) + (t / 32) * 4096 + (t & 31) * 16;
#pragma unroll
      for (int i = 0; i < 8; i++) { int4 x; asm volatile("ld.global.cg.v4.s32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p + i * 512)); acc += x.x ^ x.y ^ x.z ^ x.w; }
    }
  }
  if (acc == 12345) *sink = acc;
}
template <int MODE> void go(const char* name, int bytes, char* d, char* s, int* sink, long long mask) {
  cudaEvent_t a, b; cudaEventCreate(&a); cudaEventCreate(&b);
  float best = 1e9; const int steps = 1000;
  for (int i = 0; i < 4; i++) { cudaEventRecord(a); k<MODE><<<132, 256>>>(d, s, steps, mask, sink); cudaEventRecord(b); cudaEventSynchronize(b); float ms; cudaEventElapsedTime(&ms, a, b); if (ms < best) best = ms; }
  printf("%-12s mask %lld MB: %.3f us a step, %.2f TB/s  %s\n", name, (mask + 1) >> 20, best * 1000 / steps, 132. * bytes * steps / best / 1e9, cudaGetErrorString(cudaGetLastError()));
}
int main() {
  char *d, *s; int* sink; cudaMalloc(&d, 256 << 20); cudaMalloc(&s, 256 << 20); cudaMalloc(&sink, 4); cudaMemset(d, 0, 256 << 20); cudaMemset(s, 0, 256 << 20);
  for (long long m : {8LL << 20, 32LL << 20, 128LL << 20}) {
    go<0>("red f32x4", 32768, d, s, sink, m - 1);
    go<1>("red f16x8", 16384, d, s, sink, m - 1);
    go<4>("red bf16x8", 16384, d, s, sink, m - 1);
    go<2>("st 32K", 32768, d, s, sink, m - 1);
    go<3>("st 16K", 16384, d, s, sink, m - 1);
    go<5>("ld 32K", 32768, d, s, sink, m - 1);
  }
}
