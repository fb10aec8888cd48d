"""Nearest code of each row (vector quantisation) for one H200: one persistent Hopper kernel.

A cluster of CL CTAs walks (row block, tile of 256 codes); the CTAs share each tile of codes by TMA multicast. Each CTA
has two consumer warpgroups in turn (ping-pong): each keeps 64 rows of x as wgmma A fragments in registers and sums
64x256 products in fp32 there, starting from -|code|^2/2, and takes maximum and index while the other one multiplies.
The work is cut evenly over the clusters; a row block cut in two is merged by a 64-bit exchange in a slot that the second
comer empties. |code|^2 is computed by the same kernel at its start (a grid-wide counter tells when it is complete).
"""
import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile

import torch
from torch import nn

_D = ", ".join(f"%{i}" for i in range(128))
_OUT = ", ".join(f'"+f"(d[{i}])' for i in range(128))
_MMA = (
    "__device__ __forceinline__ void mma(float (&d)[128], const uint32_t* a, uint64_t b) {\n"
    '  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {' + _D + '}, '
    '{%128, %129, %130, %131}, %132, 1, 1, 1, 0;\\n" : ' + _OUT + ' : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));\n}\n'
)

_SOURCE = r"""
#include <cuda.h>
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <stdint.h>


constexpr int CL = 2, GS = 16, STAGES = 5, PREG = 24, CREG = 240;  // CTAs of a cluster, columns of a search, stages, registers
constexpr int K = 256, BN = 256, STAGE = BN * 128, XBYTES = 64 * K * 2, THREADS = 384;
constexpr int X_AT = STAGES * STAGE, BIAS_AT = X_AT + XBYTES, BIAS_BYTES = BN * 4, BAR_AT = BIAS_AT + 2 * BIAS_BYTES;
constexpr int NBAR = 2 * STAGES + 4 + 4, SMEM = BAR_AT + NBAR * 8;
constexpr int SCRATCH_SLOTS = 1024;  // words of 8 bytes before the biases: the counter, and from 16 on the times of each CTA

__device__ __forceinline__ uint32_t smem_of(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void bar_init(uint32_t b, int n) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(b), "r"(n));
}
__device__ __forceinline__ void bar_expect(uint32_t b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(b), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bar_arrive(uint32_t b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(b) : "memory");
}
__device__ __forceinline__ void bar_arrive_at(uint32_t b, int rank) {
  asm volatile("{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\n"
               "mbarrier.arrive.shared::cluster.b64 _, [r];\n}" :: "r"(b), "r"(rank) : "memory");
}
__device__ __forceinline__ bool bar_try(uint32_t b, int parity) {
  uint32_t ok;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(ok) : "r"(b), "r"(parity) : "memory");
  return ok;
}
__device__ __forceinline__ void bar_wait(uint32_t b, int parity) {
  while (!bar_try(b, parity)) {}
}
__device__ __forceinline__ void sync_named(int id, int n) { asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(n) : "memory"); }
__device__ __forceinline__ void arrive_named(int id, int n) { asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(n) : "memory"); }
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
__device__ __forceinline__ void tma(uint32_t to, const CUtensorMap* m, int c0, int c1, uint32_t bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               :: "r"(to), "l"(m), "r"(c0), "r"(c1), "r"(bar) : "memory");
}
__device__ __forceinline__ void tma_all(uint32_t to, const CUtensorMap* m, int c0, int c1, uint32_t bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
               :: "r"(to), "l"(m), "r"(c0), "r"(c1), "r"(bar), "h"((uint16_t)((1 << CL) - 1)) : "memory");
}
__device__ __forceinline__ void tma_prefetch(const CUtensorMap* m, int c0, int c1) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" :: "l"(m), "r"(c0), "r"(c1) : "memory");
}
__device__ __forceinline__ void wg_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wg_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wg_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory"); }
// the start of a quarter of the sums: minus half the square of their codes
__device__ __forceinline__ void start_sums(float (&acc)[128], int j, uint32_t bs) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(acc[4 * j]), "=f"(acc[4 * j + 1]) : "r"(bs + j * 32));
  acc[4 * j + 2] = acc[4 * j]; acc[4 * j + 3] = acc[4 * j + 1];
}
MMA_HERE
__device__ __forceinline__ float square2(uint32_t u, float s) {
  float lo = __uint_as_float(u << 16), hi = __uint_as_float(u & 0xffff0000u);
  return fmaf(hi, hi, fmaf(lo, lo, s));
}

// of negative floats the greatest has the least bits; a result without the sign bit says that not all are negative
template <int N> __device__ __forceinline__ uint32_t least_bits(const uint32_t (&v)[N]) {
  if constexpr (N == 1) return v[0];
  else {
    constexpr int M = (N + 2) / 3;
    uint32_t w[M];
    #pragma unroll
    for (int i = 0; i < M; i++)
      w[i] = 3 * i + 2 < N ? __vimin3_u32(v[3 * i], v[3 * i + 1 < N ? 3 * i + 1 : 0], v[3 * i + 2 < N ? 3 * i + 2 : 0])
             : 3 * i + 1 < N ? min(v[3 * i], v[3 * i + 1 < N ? 3 * i + 1 : 0]) : v[3 * i];
    return least_bits<M>(w);
  }
}
template <int N> __device__ __forceinline__ float greatest(const float (&v)[N]) {
  if constexpr (N == 1) return v[0];
  else {
    float w[(N + 1) / 2];
    #pragma unroll
    for (int i = 0; i < (N + 1) / 2; i++) w[i] = 2 * i + 1 < N ? fmaxf(v[2 * i], v[2 * i + 1 < N ? 2 * i + 1 : 0]) : v[2 * i];
    return greatest<(N + 1) / 2>(w);
  }
}

__cluster_dims__(CL, 1, 1)
__global__ __launch_bounds__(THREADS, 1) void
vq(const __grid_constant__ CUtensorMap mx, const __grid_constant__ CUtensorMap mc, const uint4* __restrict__ codes,
   unsigned long long* scratch, float* bias, unsigned long long* slots, long long* index, float* least,
   int blocks, int tiles) {
  extern __shared__ __align__(1024) unsigned char raw[];
  const uint32_t base = smem_of(raw);
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const int cluster = blockIdx.x / CL, clusters = gridDim.x / CL;
  const long long total = (long long)blocks * tiles;
  const int u0 = (int)(total * cluster / clusters), u1 = (int)(total * (cluster + 1) / clusters);
  auto full = [&](int s) { return base + BAR_AT + 8 * s; };
  auto empty = [&](int s) { return base + BAR_AT + 8 * (STAGES + s); };
  const uint32_t xfull = base + BAR_AT + 8 * 2 * STAGES, xempty = xfull + 16, bfull = xfull + 32, bempty = bfull + 16;
  long long c0 = clock64(), g0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(g0));
  if (threadIdx.x == 0) {
    if (base & 1023) __trap();
    for (int s = 0; s < STAGES; s++) { bar_init(full(s), 1); bar_init(empty(s), 8 * CL); }
    bar_init(xfull, 1); bar_init(xfull + 8, 1); bar_init(xempty, 4); bar_init(xempty + 8, 4);
    for (int s = 0; s < 2; s++) { bar_init(bfull + 8 * s, 1); bar_init(bempty + 8 * s, 8); }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
  }
  cluster_sync();

  if (warp >= 8) {  // the producers
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(PREG));
    if (warp == 8) {
      if (lane == 0) {
        int s = 0, phase = 1, t = u0 % tiles;
        for (int u = u0; u < u1; u++) {
          #pragma unroll 1
          for (int k = 0; k < 4; k++) {
            bar_wait(empty(s), phase);
            bar_expect(full(s), STAGE);
            tma_all(base + s * STAGE + rank * (STAGE / CL), &mc, k * 64, t * BN + rank * (BN / CL), full(s));
            if (++s == STAGES) { s = 0; phase ^= 1; }
          }
          if (++t == tiles) t = 0;
        }
      }
    } else if (warp == 9) {
      if (lane == 0) {
        int phase = 1;
        for (int b = u0 / tiles; b <= (u1 - 1) / tiles; b++) {
          const int row = (b * CL + rank) * 128;
          #pragma unroll 1
          for (int w = 0; w < 2; w++) {
            bar_wait(xempty, phase);
            phase ^= 1;
            bar_expect(xfull + 8 * w, XBYTES);
            for (int k = 0; k < 4; k++) tma(base + X_AT + k * 8192, &mx, k * 64, row + w * 64, xfull + 8 * w);
            if (w == 0) for (int k = 0; k < 4; k++) tma_prefetch(&mx, k * 64, row + 64);
          }
        }
      }
    } else if (warp == 10) {
      sync_named(5, 160);
      if (lane == 0) {
        unsigned long long old, target, now;
        asm volatile("atom.add.acq_rel.gpu.global.u64 %0, [%1], 1;" : "=l"(old) : "l"(scratch) : "memory");
        target = (old / gridDim.x + 1) * gridDim.x;
        do {
          asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(now) : "l"(scratch) : "memory");
        } while (now < target);
        asm volatile("fence.proxy.async.global;" ::: "memory");
        int n = 0, t = u0 % tiles;
        for (int u = u0; u <= u1; u++, n++) {  // one more than there are tiles: the sums are started once too often
          const int s = n & 1;
          bar_wait(bempty + 8 * s, ((n >> 1) & 1) ^ 1);
          bar_expect(bfull + 8 * s, BIAS_BYTES);
          asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                       :: "r"(base + BIAS_AT + s * BIAS_BYTES), "l"(bias + t * BN), "r"(BIAS_BYTES), "r"(bfull + 8 * s) : "memory");
          if (++t == tiles) t = 0;
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(CREG));
    const int w = warp >> 2, wq = warp & 3;
    const int g = lane >> 2, q = lane & 3;
    if (w == 1) {  // the second group waits for the first one anyway: the squares of this CTA's share of the codes
      for (int first = blockIdx.x * 64; first < tiles * BN; first += gridDim.x * 64) {
        uint4 v[16];
        #pragma unroll
        for (int i = 0; i < 16; i++) v[i] = codes[(size_t)(first + wq * 16 + i) * 32 + lane];
        float mine = 0;
        #pragma unroll
        for (int i = 0; i < 16; i++) {
          float s = square2(v[i].w, square2(v[i].z, square2(v[i].y, square2(v[i].x, 0.f))));
          #pragma unroll
          for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
          if (lane == i) mine = s;
        }
        mine *= -0.5f;
        if (lane < 16) bias[first + wq * 16 + lane] = mine;
      }
      asm volatile("fence.proxy.async.global;" ::: "memory");
      __threadfence();
      arrive_named(5, 160);
      arrive_named(1, 256);
    }
    float acc[128];
    #pragma unroll
    for (int j = 0; j < 128; j++) acc[j] = 0.f;
    uint32_t a[64];
    int s = 0, phase = 0, n = 0;
    const uint64_t desc0 = ((uint64_t)1 << 62) | ((uint64_t)64 << 32) | ((uint64_t)1 << 16) | (base >> 4);
    int seg = 0;
    #pragma unroll 1
    for (int u = u0; u < u1; seg ^= 1) {
      const int b = u / tiles, t0 = u - b * tiles, t1 = min(tiles, t0 + u1 - u);
      u += t1 - t0;
      {
        bar_wait(xfull + 8 * w, seg);
        const int r = wq * 16 + (lane & 15), hi = lane >> 4;
        const uint32_t at = base + X_AT + r * 128;
        #pragma unroll
        for (int k = 0; k < 16; k++)
          asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                       : "=r"(a[4 * k]), "=r"(a[4 * k + 1]), "=r"(a[4 * k + 2]), "=r"(a[4 * k + 3])
                       : "r"(at + (k >> 2) * 8192 + ((((k & 3) * 2 + hi) ^ (r & 7)) << 4)) : "memory");
      }
      float xs[2] = {0.f, 0.f};
      #pragma unroll
      for (int k = 0; k < 64; k++) xs[k & 1] = square2(a[k], xs[k & 1]);
      // the fragments must have arrived before the buffer is given back: a use that the arrival cannot overtake
      asm volatile("{\n.reg .pred p;\nsetp.eq.f32 p, %0, %1;\n@p nanosleep.u32 1;\n}" :: "f"(xs[0] + xs[1]), "f"(-1.f) : "memory");
      __syncwarp();
      if (lane == 0) bar_arrive(xempty);
      float best[2] = {-INFINITY, -INFINITY}, thr[2] = {-INFINITY, -INFINITY};
      uint32_t key[2] = {~0u, ~0u};
      int besti[2] = {0, 0};
      #pragma unroll 1
      for (int t = t0; t < t1; t++, n++) {
        sync_named(1 + w, 256);
        int last = 0;
        #pragma unroll
        for (int k = 0; k < 4; k++) {
          bar_wait(full(s), phase);
          wg_fence();
          const uint64_t d = desc0 + s * (STAGE >> 4);
          #pragma unroll
          for (int kk = 0; kk < 4; kk++) {
            mma(acc, a + (k * 4 + kk) * 4, d + kk * 2);
            if (k == 3 && kk == 2) wg_commit();  // the last product alone: the other group gets its turn as it starts
          }
          wg_commit();
          if (k) {
            wg_wait<1>();
            if (lane < CL) bar_arrive_at(empty(last), lane);
          }
          last = s;
          if (++s == STAGES) { s = 0; phase ^= 1; }
        }
        arrive_named(2 - w, 256);
        wg_wait<0>();
        if (lane < CL) bar_arrive_at(empty(last), lane);
        #pragma unroll
        for (int j = 0; j < 128; j++) asm volatile("" : "+f"(acc[j]) :: "memory");
        if (n == 0) {  // the first time the squares are not known at the start
          bar_wait(bfull, 0);
          #pragma unroll
          for (int j = 0; j < 32; j++) {
            float2 v;
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(base + BIAS_AT + (q + j * 4) * 8));
            acc[4 * j] += v.x; acc[4 * j + 1] += v.y; acc[4 * j + 2] += v.x; acc[4 * j + 3] += v.y;
          }
        }
        __syncwarp();
        if (n && lane == 0) bar_arrive(bempty + 8 * (n & 1));  // the sums of this tile have been started
        const int next = (n + 1) & 1;
        const uint32_t bs = base + BIAS_AT + next * BIAS_BYTES + q * 8;
        const int col = t * BN + 2 * q;
        constexpr int G = 64 / GS;
        bar_wait(bfull + 8 * next, ((n + 1) >> 1) & 1);
        #pragma unroll
        for (int i = 0; i < G; i++) {
          #pragma unroll
          for (int h = 0; h < 2; h++) {
            float v[GS];
            #pragma unroll
            for (int j = 0; j < GS; j++) v[j] = acc[i * GS * 2 + 2 * h + (j >> 1) * 4 + (j & 1)];
            uint32_t bits[GS];
            #pragma unroll
            for (int j = 0; j < GS; j++) bits[j] = __float_as_uint(v[j]);
            const uint32_t m = least_bits<GS>(bits);
            const bool better = m < key[h];
            if (better) {
              float top = __uint_as_float(m);
              if (__builtin_expect((int)m >= 0, 0)) top = greatest<GS>(v);
              int e = 0;
              #pragma unroll
              for (int j = GS - 1; j >= 0; j--)
                if (v[j] == top) e = i * GS * 4 + (j >> 1) * 8 + (j & 1);
              if (top > thr[h]) {
                best[h] = thr[h] = top;
                besti[h] = col + e;
              }
              key[h] = max(__float_as_uint(thr[h]), 0x80000000u);
            }
          }
          #pragma unroll
          for (int j = 0; j < GS / 2; j++) start_sums(acc, i * (GS / 2) + j, bs);  // of the next tile, in the registers just searched
        }
        #pragma unroll
        for (int h = 0; h < 2; h++) {
          thr[h] = fmaxf(thr[h], __shfl_xor_sync(~0u, thr[h], 1));
          thr[h] = fmaxf(thr[h], __shfl_xor_sync(~0u, thr[h], 2));
          key[h] = max(__float_as_uint(thr[h]), 0x80000000u);
        }
        __syncwarp();
        if (n == 0 && lane == 0) bar_arrive(bempty);
      }
      const bool whole = t0 == 0 && t1 == tiles;
      #pragma unroll
      for (int h = 0; h < 2; h++) {
        float v; int i; float sq = xs[h];
        v = best[h]; i = besti[h];
        #pragma unroll
        for (int o = 1; o < 4; o <<= 1) {
          const float v2 = __shfl_xor_sync(~0u, v, o);
          const int i2 = __shfl_xor_sync(~0u, i, o);
          sq += __shfl_xor_sync(~0u, sq, o);
          if (v2 > v || (v2 == v && i2 < i)) { v = v2; i = i2; }
        }
        const int row = (b * CL + rank) * 128 + w * 64 + wq * 16 + g + 8 * h;
        if (q == 0) {
          bool write = true;
          if (!whole) {
            const unsigned long long mine = ((unsigned long long)__float_as_uint(v) << 32) | (unsigned)(i + 1);
            const unsigned long long other = atomicExch(slots + row, mine);
            write = other != 0;
            if (write) {
              const float v2 = __uint_as_float((unsigned)(other >> 32));
              const int i2 = (int)(unsigned)other - 1;
              if (v2 > v || (v2 == v && i2 < i)) { v = v2; i = i2; }
              slots[row] = 0;
            }
          }
          if (write) { index[row] = i; least[row] = fmaf(-2.f, v, sq); }
        }
      }
    }
  }
  __syncwarp();
  cluster_sync();
  if (threadIdx.x == 0) {
    long long g1;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(g1));
    scratch[16 + 4 * blockIdx.x] = clock64() - c0;
    scratch[17 + 4 * blockIdx.x] = g0;
    scratch[18 + 4 * blockIdx.x] = g1;
  }
}

typedef CUresult (*Encode)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                           const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                           CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
static Encode encode = nullptr;
static int map_of(CUtensorMap* m, const void* p, long long rows, int box) {
  cuuint64_t dims[2] = {K, (cuuint64_t)rows}, strides[1] = {K * 2};
  cuuint32_t boxes[2] = {64, (cuuint32_t)box}, ones[2] = {1, 1};
  return (int)encode(m, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void*)p, dims, strides, boxes, ones,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                     CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}
extern "C" int cluster_rows() { return CL * 128; }
extern "C" long long scratch_bytes(long long rows, long long count) { return SCRATCH_SLOTS * 8 + count * 8 + rows * 8; }
// the number of clusters that fit at once; negative: an error
extern "C" int prepare() {
  cudaDriverEntryPointQueryResult found;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void**)&encode, 12000, cudaEnableDefault, &found) != cudaSuccess || !encode) return -1;
  if (cudaFuncSetAttribute(vq, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM) != cudaSuccess) return -2;
  int device, sms, n = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  cudaLaunchConfig_t c = {};
  c.gridDim = dim3(sms / CL * CL); c.blockDim = dim3(THREADS); c.dynamicSmemBytes = SMEM;
  cudaLaunchAttribute at[1];
  at[0].id = cudaLaunchAttributeClusterDimension;
  at[0].val.clusterDim.x = CL; at[0].val.clusterDim.y = at[0].val.clusterDim.z = 1;
  c.attrs = at; c.numAttrs = 1;
  if (cudaOccupancyMaxActiveClusters(&n, vq, &c) != cudaSuccess) return -3;
  return n < sms / CL ? n : sms / CL;
}
extern "C" int launch(const void* x, const void* codes, void* scratch, void* index, void* least, int rows, int count, int clusters, void* stream) {
  CUtensorMap mx, mc;
  if (map_of(&mx, x, rows, 64) || map_of(&mc, codes, count, BN / CL)) return -4;
  unsigned long long* s = (unsigned long long*)scratch;
  float* bias = (float*)(s + SCRATCH_SLOTS);
  unsigned long long* slots = s + SCRATCH_SLOTS + count;
  vq<<<clusters * CL, THREADS, SMEM, (cudaStream_t)stream>>>(mx, mc, (const uint4*)codes, s, bias, slots, (long long*)index,
                                                            (float*)least, rows / (128 * CL), count / BN);
  return (int)cudaGetLastError();
}
""".replace("MMA_HERE", _MMA)


def build(flags=(), folder=None):
    """The path of the shared library, compiled when it is not there yet."""
    flags = tuple(flags)
    tag = hashlib.sha256((_SOURCE + repr(flags)).encode()).hexdigest()[:16]
    folder = folder or os.environ.get("VQ_BUILD") or os.path.join(tempfile.gettempdir(), f"vq_{os.getuid()}")
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, f"vq_{tag}.so")
    if not os.path.exists(path):
        nvcc = shutil.which("nvcc") or os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")
        with tempfile.TemporaryDirectory(dir=folder) as work:
            source, made = os.path.join(work, "vq.cu"), os.path.join(work, "vq.so")
            with open(source, "w") as f:
                f.write(_SOURCE)
            done = subprocess.run(
                [nvcc, "-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-shared", "-Xcompiler=-fPIC", *flags, "-o", made, source],
                capture_output=True, text=True,
            )
            if done.returncode:
                raise RuntimeError(done.stdout + done.stderr)
            if os.environ.get("VQ_VERBOSE"):
                print(done.stderr)
            os.replace(made, path)
    return path


class _Library:
    def __init__(self, flags=()):
        self.lib = ctypes.CDLL(build(flags))
        self.lib.scratch_bytes.restype = ctypes.c_longlong
        self.lib.scratch_bytes.argtypes = [ctypes.c_longlong] * 2
        self.lib.launch.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int] * 3 + [ctypes.c_void_p]
        self.rows = self.lib.cluster_rows()
        self.clusters = {}
        self.scratch = {}

    def __call__(self, x, codes):
        rows, count = x.shape[0], codes.shape[0]
        device = x.device.index
        clusters = self.clusters.get(device)
        if clusters is None:
            with torch.cuda.device(device):
                if torch.cuda.get_device_capability() != (9, 0):
                    raise ValueError("made for sm_90a")
                clusters = self.lib.prepare()
            if clusters <= 0:
                raise RuntimeError(f"prepare: {clusters}")
            self.clusters[device] = clusters
        if rows // self.rows <= clusters:
            raise ValueError("too few rows")
        stream = torch.cuda.current_stream(device).cuda_stream
        key = device, stream, rows, count
        scratch = self.scratch.get(key)
        if scratch is None:
            scratch = self.scratch[key] = torch.zeros(self.lib.scratch_bytes(rows, count) // 8, dtype=torch.int64, device=x.device)
        index = torch.empty(rows, dtype=torch.int64, device=x.device)
        least = torch.empty(rows, dtype=torch.float32, device=x.device)
        error = self.lib.launch(x.data_ptr(), codes.data_ptr(), scratch.data_ptr(), index.data_ptr(), least.data_ptr(), rows, count, clusters, stream)
        if error:
            raise RuntimeError(f"launch: {error}")
        return index, least


_libraries = {}


class ModelNew(nn.Module):
    def __init__(self, flags=()):
        super().__init__()
        self.flags = tuple(flags)

    def forward(self, x: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not (x.is_cuda and codes.is_cuda and x.device == codes.device):
            raise ValueError("x and codes must be on one GPU")
        if x.dtype != torch.bfloat16 or codes.dtype != torch.bfloat16:
            raise ValueError("bfloat16 only")
        if x.dim() != 2 or codes.dim() != 2 or x.shape[1] != 256 or codes.shape[1] != 256:
            raise ValueError("width must be 256")
        if not (x.is_contiguous() and codes.is_contiguous()) or x.data_ptr() % 16 or codes.data_ptr() % 16:
            raise ValueError("contiguous and aligned to 16 bytes only")
        if x.shape[0] % 512 or codes.shape[0] % 256 or not 256 <= codes.shape[0] <= 1 << 17 or x.shape[0] > 1 << 20:
            raise ValueError("rows must be a multiple of 512, codes of 256")
        library = _libraries.get(self.flags)
        if library is None:
            library = _libraries[self.flags] = _Library(self.flags)
        return library(x, codes)
