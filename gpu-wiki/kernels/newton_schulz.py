"""One Newton-Schulz step, X' = a X + (b A + c A A) X with A = X X^T, in one persistent Hopper kernel (TMA + WGMMA).

Three phases with a grid barrier between them, on 66 clusters of 2 CTAs:
  1. A = X X^T      only the lower triangle; the mirror image is stored transposed
  2. P = b A + c AA likewise (A is symmetric, and so is P)
  3. X' = a X + P X
In phases 1 and 2 a CTA works on units of two 128 x 128 blocks (one for each consumer warpgroup), in phase 3 on
128 x 256 tiles (64 x 256 for each).  The triangle of 32 x 33 / 2 blocks makes 264 units: two full waves of 132 SMs.
The addends b A and a X are not read in the epilogue: the k loop starts at the chunks that hold them, and the
accumulators start from the shared memory of those chunks.
"""

import ctypes
import hashlib
import os

import torch
from torch import nn

A, B, C = 3.4445, -4.7750, 2.0315

_REGS = {n: ", ".join(f"%{i}" for i in range(n // 2)) for n in (128, 256)}
_OPS = {
    "LOW": ", ".join(f'"+f"(d[{i}])' for i in range(64)),
    "HIGH": ", ".join(f'"+f"(d[{i}])' for i in range(64, 128)),
    "ALL": ", ".join(f'"+f"(d[{i}])' for i in range(128)),
}

_SOURCE = r"""
#include <cuda.h>
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <dlfcn.h>
#include <stdint.h>

#ifndef ASM
#define ASM asm volatile
#endif

constexpr int BAND = 8;                      // height of a band of 256 x 256 squares in phase 3
constexpr int STAGES = 4;
constexpr uint32_t SLAB = 16384;            // 128 x 64 bf16
constexpr uint32_t STAGE = 3 * SLAB;
constexpr uint32_t STAGING = STAGES * STAGE;
constexpr uint32_t BARS = STAGING + 2 * 16384;
constexpr uint32_t SMEM = 1024 + BARS + 128;

__device__ unsigned long long grid_counter;

struct Params {
  CUtensorMap x_k, x_n, g_ld, p_ld, g_st, p_st, o_st;
  int rows, cols;
  float a, b_over_c, c;
};

__device__ __forceinline__ uint32_t smem_u32(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void mbar_init(uint32_t bar, uint32_t count) {
  ASM("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void mbar_expect(uint32_t bar, uint32_t bytes) {
  ASM("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbar_arrive(uint32_t bar) {
  ASM("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void mbar_arrive_cluster(uint32_t bar, uint32_t cta) {
  ASM("{\n.reg .b32 ra;\nmapa.shared::cluster.u32 ra, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [ra];\n}" ::"r"(bar), "r"(cta) : "memory");
}
__device__ __forceinline__ void mbar_wait(uint32_t bar, uint32_t parity) {
  uint32_t ok = 0;
  while (true) {
    ASM("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(ok) : "r"(bar), "r"(parity) : "memory");
    if (ok) break;
  }
}
__device__ __forceinline__ void tma_load(uint32_t dst, const CUtensorMap* map, int x, int y, uint32_t bar) {
  ASM("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
      ::"r"(dst), "l"(map), "r"(x), "r"(y), "r"(bar) : "memory");
}
__device__ __forceinline__ void tma_load_both(uint32_t dst, const CUtensorMap* map, int x, int y, uint32_t bar) {
  ASM("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3}], [%4], %5;"
      ::"r"(dst), "l"(map), "r"(x), "r"(y), "r"(bar), "h"((uint16_t)3) : "memory");
}
__device__ __forceinline__ void tma_store(const CUtensorMap* map, int x, int y, uint32_t src) {
  ASM("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];"
      ::"l"(map), "r"(x), "r"(y), "r"(src) : "memory");
  ASM("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ void cluster_sync() {
  ASM("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
__device__ __forceinline__ void group_sync(int w) { ASM("bar.sync %0, 128;" ::"r"(w + 1) : "memory"); }

// K-major operand, 128-byte swizzle: groups of 8 rows lie 1024 bytes apart
__device__ __forceinline__ uint64_t desc_k(uint32_t addr) {
  return (uint64_t)((addr & 0x3FFFF) >> 4) | (1ull << 16) | ((uint64_t)(1024 >> 4) << 32) | (1ull << 62);
}
// N-major operand, 128-byte swizzle: 64 columns a box (boxes 8192 bytes apart), groups of 8 k rows 1024 bytes apart
__device__ __forceinline__ uint64_t desc_n(uint32_t addr) {
  return (uint64_t)((addr & 0x3FFFF) >> 4) | ((uint64_t)(8192 >> 4) << 16) | ((uint64_t)(1024 >> 4) << 32) |
         (1ull << 62);
}
// rows 0-63 (d[0..63]) and rows 64-127 (d[64..127]) of a 128 x 128 block
__device__ __forceinline__ void wgmma_low(float (&d)[128], uint64_t da, uint64_t db) {
  ASM("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {@REGS128@}, %64, %65, 1, 1, 1, 0, 0;"
      : @LOW@ : "l"(da), "l"(db));
}
__device__ __forceinline__ void wgmma_high(float (&d)[128], uint64_t da, uint64_t db) {
  ASM("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {@REGS128@}, %64, %65, 1, 1, 1, 0, 0;"
      : @HIGH@ : "l"(da), "l"(db));
}
// a 64 x 256 block, right operand N-major
__device__ __forceinline__ void wgmma_wide(float (&d)[128], uint64_t da, uint64_t db) {
  ASM("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {@REGS256@}, %128, %129, 1, 1, 1, 0, 1;"
      : @ALL@ : "l"(da), "l"(db));
}
__device__ __forceinline__ void fence_acc(float (&d)[128]) {
#pragma unroll
  for (int i = 0; i < 128; i++) ASM("" : "+f"(d[i])::"memory");
}
__device__ __forceinline__ uint32_t pack(float lo, float hi) {
  uint32_t r;
  ASM("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
__device__ __forceinline__ uint32_t lds(uint32_t addr) {
  uint32_t v;
  ASM("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(addr) : "memory");
  return v;
}

// What one CTA does with unit u of its cluster.
struct Unit {
  bool square;        // the two CTAs make a 256 x 256 square: half of the loads are multicast
  int row0, row1;     // 128-row blocks of slabs 0 and 1
  int col0, col1;     // 128-column blocks of warpgroups 0 and 1
  int sel0, sel1;     // slabs of the right operand
  int t0, t1;         // which of the first two k blocks holds the addend
  int p, q;           // the first two k blocks
  int col_square;          // first column block of the square
};

template <int PH>
__device__ __forceinline__ Unit decode(int u, int cta, int nI, int nN) {
  Unit n;
  if (PH == 2) {
    int band = u / (BAND * nN), rem = u - band * BAND * nN, h = min(BAND, nI - band * BAND);
    int I = band * BAND + rem % h, N = rem / h;
    n.square = true;
    n.row0 = 2 * I, n.row1 = 2 * I + 1;
    n.col0 = n.col1 = 2 * N + cta;
    n.sel0 = n.sel1 = 2;
    n.t0 = 0, n.t1 = 1;
    n.p = 2 * I, n.q = 2 * I + 1;
    n.col_square = 2 * N;
    return n;
  }
  int normal = nI * (nI - 1) / 2;
  if (u < normal) {
    int I = (int)((1.f + sqrtf(1.f + 8.f * u)) * 0.5f);
    while (I * (I - 1) / 2 > u) I--;
    while (I * (I + 1) / 2 <= u) I++;
    int J = u - I * (I - 1) / 2;
    n.square = true;
    n.row0 = 2 * I, n.row1 = 2 * I + 1;
    n.col0 = n.col1 = 2 * J + cta;
    n.sel0 = n.sel1 = 2;
    n.t0 = n.t1 = cta;
    n.p = 2 * J, n.q = 2 * J + 1;
    n.col_square = 2 * J;
    return n;
  }
  // two 256 x 256 squares on the diagonal hold 6 blocks: 3 units
  int v = min(2 * (u - normal) + cta, 3 * nI / 2 - 1), g = v / 3, type = v - 3 * g;
  n.square = false;
  n.col_square = 0;
  if (type < 2) {
    int d = 2 * g + type;
    n.row0 = 2 * d, n.row1 = 2 * d + 1;
    n.col0 = n.col1 = 2 * d;
    n.sel0 = n.sel1 = 0;
    n.t0 = n.t1 = 0;
    n.p = 2 * d, n.q = 2 * d + 1;
  } else {
    n.row0 = n.col0 = 4 * g + 1, n.row1 = n.col1 = 4 * g + 3;
    n.sel0 = 0, n.sel1 = 1;
    n.t0 = 0, n.t1 = 1;
    n.p = n.row0, n.q = n.row1;
  }
  return n;
}

template <int PH>
__device__ __forceinline__ int units_of(int nI, int nN) {
  return PH == 2 ? nI * nN : nI * (nI - 1) / 2 + (3 * nI + 3) / 4;
}

template <int PH>
__device__ __forceinline__ void produce(const Params& P, uint32_t base, int cta, int cid, int ncl, uint32_t& it) {
  const int nI = P.rows / 256, nN = P.cols / 256;
  const int nch = (PH == 0 ? P.cols : P.rows) / 64, units = units_of<PH>(nI, nN);
  const CUtensorMap* ma = PH == 0 ? &P.x_k : PH == 1 ? &P.g_ld : &P.p_ld;
  for (int u = cid; u < units; u += ncl) {
    Unit n = decode<PH>(u, cta, nI, nN);
    int lo = min(n.p, n.q), hi = max(n.p, n.q);
    int mine = (cta ? n.row1 : n.row0) * 128;
    for (int c = 0; c < nch; c++, it++) {
      int k;
      if (PH == 0) {
        k = c * 64;
      } else {
        int t = c >> 1, kb;
        if (t == 0) kb = n.p;
        else if (t == 1) kb = n.q;
        else {
          kb = t - 2;
          if (kb >= lo) kb++;
          if (kb >= hi) kb++;
        }
        k = kb * 128 + (c & 1) * 64;
      }
      uint32_t s = it & 3, full = base + BARS + s * 8, empty = full + 32, dst = base + s * STAGE;
      mbar_wait(empty, ((it >> 2) & 1) ^ 1);
      if (PH == 2) {   // own 128 rows of P; half of the 256 columns of X for both CTAs
        mbar_expect(full, STAGE);
        tma_load(dst, ma, k, mine, full);
        tma_load_both(dst + SLAB + cta * SLAB, &P.x_n, n.col0 * 128, k, full);
        tma_load_both(dst + SLAB + cta * SLAB + 8192, &P.x_n, n.col0 * 128 + 64, k, full);
      } else if (n.square) {      // half of the 256 rows for both CTAs; own 128 columns
        mbar_expect(full, STAGE);
        tma_load_both(dst + cta * SLAB, ma, k, mine, full);
        tma_load(dst + 2 * SLAB, ma, k, n.col0 * 128, full);
      } else {
        mbar_expect(full, 2 * SLAB);
        tma_load(dst, ma, k, n.row0 * 128, full);
        tma_load(dst + SLAB, ma, k, n.row1 * 128, full);
      }
    }
  }
}

// all stores of this phase, by every CTA, before the loads of the next
__device__ __forceinline__ void grid_barrier(uint32_t base, uint32_t parity) {
  mbar_wait(base + BARS + 64, parity);
  ASM("fence.proxy.async;" ::: "memory");
  __threadfence();
  unsigned long long grid = gridDim.x, old = atomicAdd(&grid_counter, 1ull), target = (old / grid + 1) * grid, now;
  do {
    ASM("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(now) : "l"(&grid_counter) : "memory");
  } while (now < target);
  __threadfence();
  ASM("fence.proxy.async;" ::: "memory");
}


template <int PH>
__device__ __forceinline__ void consume(const Params& P, uint32_t base, int cta, int cid, int ncl, uint32_t& it,
                                        float (&acc)[128]) {
  const int nI = P.rows / 256, nN = P.cols / 256;
  const int nch = (PH == 0 ? P.cols : P.rows) / 64, units = units_of<PH>(nI, nN);
  const int w = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0), wi = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
  const bool elected = (threadIdx.x & 127) == 0;
  constexpr bool wide = PH == 2;
  const CUtensorMap* mo = PH == 0 ? &P.g_st : PH == 1 ? &P.p_st : &P.o_st;
  const uint32_t full0 = base + BARS, empty0 = full0 + 32, staging = base + STAGING + w * 16384;
  for (int u = cid; u < units; u += ncl) {
    Unit n = decode<PH>(u, cta, nI, nN);
    const int row = w ? n.row1 : n.row0, col = w ? n.col1 : n.col0, sel = w ? n.sel1 : n.sel0, t = w ? n.t1 : n.t0;
    const uint32_t round = it >> 2;   // nch is a multiple of 4, so every unit starts at stage 0
    if (PH == 0) {
#pragma unroll
      for (int i = 0; i < 128; i++) acc[i] = 0.f;
    } else {
      const float f = PH == 1 ? P.b_over_c : P.a;
      const int r = wi * 16 + (lane >> 2);
      if (wide) {
        mbar_wait(full0 + (2 * cta + w) * 8, round & 1);
      } else {
        mbar_wait(full0 + (2 * t) * 8, round & 1);
        mbar_wait(full0 + (2 * t + 1) * 8, round & 1);
      }
#pragma unroll
      for (int b = 0; b < 4; b++) {
          const int mb = b >> 1, h = b & 1;
          uint32_t src = wide ? base + (2 * cta + w) * STAGE + SLAB + b * 8192
                              : base + (2 * t + h) * STAGE + w * SLAB + mb * 8192;
          src += r * 128 + (lane & 3) * 4;
#pragma unroll
          for (int j = 0; j < 8; j++) {
            uint32_t at = src + ((j ^ (r & 7)) << 4), v0 = lds(at), v1 = lds(at + 1024);
            float* d = &acc[b * 32 + j * 4];
            d[0] = f * __uint_as_float(v0 << 16), d[1] = f * __uint_as_float(v0 & 0xffff0000u);
            d[2] = f * __uint_as_float(v1 << 16), d[3] = f * __uint_as_float(v1 & 0xffff0000u);
          }
        }
    }
    fence_acc(acc);
    for (int c = 0; c < nch; c++, it++) {
      const uint32_t s = it & 3, stage = base + s * STAGE;
      mbar_wait(full0 + s * 8, (it >> 2) & 1);
      const uint64_t da = desc_k(stage + w * (wide ? 8192 : SLAB));
      const uint64_t db = PH == 2 ? desc_n(stage + SLAB) : desc_k(stage + sel * SLAB);
      ASM("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int k = 0; k < 4; k++) {
        if constexpr (wide) {
          wgmma_wide(acc, da + k * 2, db + k * 128);
        } else {
          wgmma_low(acc, da + k * 2, db + k * 2);
          wgmma_high(acc, da + 512 + k * 2, db + k * 2);
        }
      }
      ASM("wgmma.commit_group.sync.aligned;" ::: "memory");
      ASM("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      if (c > 0 && (threadIdx.x & 127) < 2) mbar_arrive_cluster(empty0 + ((it - 1) & 3) * 8, threadIdx.x & 1);
    }
    ASM("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    fence_acc(acc);
    if ((threadIdx.x & 127) < 2) mbar_arrive_cluster(empty0 + ((it - 1) & 3) * 8, threadIdx.x & 1);

    const float f = PH == 1 ? P.c : 1.f;
    const int l7 = lane & 7, m = lane >> 3;
    int box = 0;
#pragma unroll
    for (int mirror = 0; mirror < (PH == 2 ? 1 : 2); mirror++) {
      if (mirror && row == col) break;
#pragma unroll
        for (int b = 0; b < 4; b++) {
          const uint32_t buf = staging + (box & 1) * 8192;
          box++;
          if (elected) ASM("cp.async.bulk.wait_group.read 1;" ::: "memory");
          group_sync(w);
#pragma unroll
          for (int j = 0; j < 8; j += 2) {
            const float* d = &acc[b * 32 + j * 4];
            uint32_t r0 = pack(f * d[0], f * d[1]), r1 = pack(f * d[2], f * d[3]);
            uint32_t r2 = pack(f * d[4], f * d[5]), r3 = pack(f * d[6], f * d[7]);
            if (!mirror) {
              uint32_t at = buf + (wi * 16 + (m & 1) * 8 + l7) * 128 + (((j + (m >> 1)) ^ l7) << 4);
              ASM("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                  ::"r"(at), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
            } else {
              uint32_t at = buf + ((j + (m >> 1)) * 8 + l7) * 128 + (((wi * 2 + (m & 1)) ^ l7) << 4);
              ASM("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                  ::"r"(at), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
            }
          }
          ASM("fence.proxy.async.shared::cta;" ::: "memory");
          group_sync(w);
          if (elected) {
            int x = col * 128 + (b & 1) * 64, y = row * 128 + (b >> 1) * 64;
            if (wide) x = n.col_square * 128 + b * 64, y = (cta ? n.row1 : n.row0) * 128 + w * 64;
            tma_store(mo, mirror ? y : x, mirror ? x : y, buf);
          }
        }
    }
  }
  if (elected) {
    ASM("cp.async.bulk.wait_group 0;" ::: "memory");
    if (PH < 2) {
      ASM("fence.proxy.async;" ::: "memory");
      __threadfence();
      mbar_arrive(base + BARS + 64);
    }
  }
}

__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1) ns_kernel(const __grid_constant__ Params P) {
  extern __shared__ uint8_t raw[];
  const uint32_t base = (smem_u32(raw) + 1023) & ~1023u;
  const int cta = blockIdx.x & 1, cid = blockIdx.x >> 1, ncl = gridDim.x >> 1;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      mbar_init(base + BARS + s * 8, 1);
      mbar_init(base + BARS + 32 + s * 8, 4);   // two warpgroups of both CTAs
    }
    mbar_init(base + BARS + 64, 2);
    ASM("fence.mbarrier_init.release.cluster;" ::: "memory");
    ASM("fence.proxy.async;" ::: "memory");
  }
  __syncthreads();
  cluster_sync();
  uint32_t it = 0;
  if (threadIdx.x >= 256) {
    ASM("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 256) {
      produce<0>(P, base, cta, cid, ncl, it);
      grid_barrier(base, 0);
      produce<1>(P, base, cta, cid, ncl, it);
      grid_barrier(base, 1);
      produce<2>(P, base, cta, cid, ncl, it);
    }
    __syncwarp();
  } else {
    ASM("setmaxnreg.inc.sync.aligned.u32 232;");
    float acc[128];
    consume<0>(P, base, cta, cid, ncl, it, acc);
    consume<1>(P, base, cta, cid, ncl, it, acc);
    consume<2>(P, base, cta, cid, ncl, it, acc);
    __syncwarp();
  }
  cluster_sync();   // no CTA leaves while the other still signals it
}

typedef CUresult (*Encode)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                           const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                           CUtensorMapL2promotion, CUtensorMapFloatOOBfill);


extern "C" int ns_launch(void* x, void* g, void* p, void* out, int rows, int cols, float a, float b, float c,
                         void* stream) {
  static Encode encode = nullptr;
  static int grid = 0;
  if (!grid) {
    void* lib = dlopen("libcuda.so.1", RTLD_NOW);
    if (!lib) return -1;
    encode = (Encode)dlsym(lib, "cuTensorMapEncodeTiled");
    if (!encode) return -2;
    cudaError_t e = cudaFuncSetAttribute(ns_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM);
    if (e != cudaSuccess) return (int)e;
    int dev = 0, sms = 0, clusters = 0;
    cudaGetDevice(&dev);
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, dev);
    cudaLaunchConfig_t q = {};
    cudaLaunchAttribute qa[1];
    qa[0].id = cudaLaunchAttributeClusterDimension;
    qa[0].val.clusterDim.x = 2, qa[0].val.clusterDim.y = 1, qa[0].val.clusterDim.z = 1;
    q.gridDim = dim3(sms / 2 * 2), q.blockDim = dim3(384), q.dynamicSmemBytes = SMEM;
    q.attrs = qa, q.numAttrs = 1;
    e = cudaOccupancyMaxActiveClusters(&clusters, ns_kernel, &q);
    if (e != cudaSuccess) return (int)e;
    if (clusters < 1) return -3;
    grid = 2 * (clusters < sms / 2 ? clusters : sms / 2);
  }
  Params P;
  auto map = [&](CUtensorMap* m, void* ptr, int inner, int outer, int box_rows) {
    cuuint64_t dims[2] = {(cuuint64_t)inner, (cuuint64_t)outer}, strides[1] = {(cuuint64_t)inner * 2};
    cuuint32_t box[2] = {64, (cuuint32_t)box_rows}, ones[2] = {1, 1};
    return (int)encode(m, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, ptr, dims, strides, box, ones,
                       CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                       CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  int bad = map(&P.x_k, x, cols, rows, 128) | map(&P.x_n, x, cols, rows, 64) | map(&P.g_ld, g, rows, rows, 128) |
            map(&P.p_ld, p, rows, rows, 128) | map(&P.g_st, g, rows, rows, 64) | map(&P.p_st, p, rows, rows, 64) |
            map(&P.o_st, out, cols, rows, 64);
  if (bad) return -4;
  P.rows = rows, P.cols = cols, P.a = a, P.b_over_c = (float)((double)b / (double)c), P.c = c;
  cudaLaunchConfig_t q = {};
  cudaLaunchAttribute qa[2];
  qa[0].id = cudaLaunchAttributeClusterDimension;
  qa[0].val.clusterDim.x = 2, qa[0].val.clusterDim.y = 1, qa[0].val.clusterDim.z = 1;
  qa[1].id = cudaLaunchAttributeCooperative;
  qa[1].val.cooperative = 1;
  q.gridDim = dim3(grid), q.blockDim = dim3(384), q.dynamicSmemBytes = SMEM, q.stream = (cudaStream_t)stream;
  q.attrs = qa, q.numAttrs = 2;
  return (int)cudaLaunchKernelEx(&q, ns_kernel, P);
}
"""
for _n, _r in _REGS.items():
    _SOURCE = _SOURCE.replace(f"@REGS{_n}@", _r)
for _n, _r in _OPS.items():
    _SOURCE = _SOURCE.replace(f"@{_n}@", _r)

_lib = None


def _load():
    global _lib
    if _lib is None:
        from torch.utils import cpp_extension

        flags = ["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a"]
        name = "ns_step_" + hashlib.sha256((_SOURCE + repr(flags)).encode()).hexdigest()[:16]
        directory = cpp_extension._get_build_directory(name, verbose=False)
        path = os.path.join(directory, "ns_step.cu")
        if not os.path.exists(path) or open(path).read() != _SOURCE:
            temporary = f"{path}.{os.getpid()}"
            with open(temporary, "w") as f:
                f.write(_SOURCE)
            os.replace(temporary, path)
        cpp_extension.load(
            name=name,
            sources=[path],
            extra_cuda_cflags=flags,
            extra_ldflags=["-ldl"],
            build_directory=directory,
            is_python_module=False,
            verbose=False,
        )
        lib = ctypes.CDLL(os.path.join(directory, name + ".so"))
        p, i, f = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
        lib.ns_launch.argtypes = [p, p, p, p, i, i, f, f, f, p]
        lib.ns_launch.restype = i
        _lib = lib
    return _lib


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self._work = {}

    def forward(self, x):
        if x.dim() != 2 or x.dtype != torch.bfloat16 or not x.is_cuda or x.numel() == 0:
            raise ValueError("this kernel takes one non-empty bfloat16 matrix on the GPU")
        lib = _lib or _load()
        rows, cols = x.shape
        r, c = -(-rows // 512) * 512, -(-cols // 256) * 256
        padded = (r, c) != (rows, cols)
        if padded:  # rows and columns of zeros change nothing
            full = x.new_zeros(r, c)
            full[:rows, :cols] = x
            x = full
        elif not x.is_contiguous() or x.data_ptr() % 16:
            x = x.clone(memory_format=torch.contiguous_format)
        stream = torch.cuda.current_stream(x.device).cuda_stream
        key = (r, x.device.index, stream)
        work = self._work.get(key)
        if work is None:
            work = self._work[key] = torch.empty(2, r, r, dtype=x.dtype, device=x.device)
        out = torch.empty(r, c, dtype=x.dtype, device=x.device)
        gram = work.data_ptr()
        with torch.cuda.device(x.device):
            code = lib.ns_launch(x.data_ptr(), gram, gram + 2 * r * r, out.data_ptr(), r, c, A, B, C, stream)
        if code:
            raise RuntimeError(f"the kernel could not be launched (error {code})")
        return out[:rows, :cols].contiguous() if padded else out
