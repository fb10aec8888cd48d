"""Per-token cross-entropy of hidden @ weight.T for H100: compaction of the tokens that count, a warp-specialised
WGMMA GEMM (TMA, clusters of two with multicast, persistent) whose epilogue keeps only (max, sum) of each row's tile,
and a small reduction.  The logits never reach memory."""

import ctypes
import hashlib
import os

import torch
import torch.nn as nn
from torch.utils import cpp_extension

IGNORED = -100
VARIANTS = [(192, 5, 40, 232, 0)]  # (BN, stages, registers of a producer's and of a consumer's thread, mode)

_HEAD = r"""
#include <cuda.h>
#include <cuda_runtime.h>
#include <cstdint>

#define IGNORED (-100)
static constexpr int BM = 128, BK = 64;
static constexpr float L2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

__device__ __forceinline__ uint32_t smem_u32(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void mbar_init(uint32_t bar, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void mbar_expect(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbar_wait(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred P1;\n"
      "LAB_WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 P1, [%0], %1;\n"
      "@P1 bra DONE;\n"
      "bra LAB_WAIT;\n"
      "DONE:\n"
      "}\n" ::"r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ void mbar_arrive_cluster(uint32_t bar, uint32_t cta) {
  asm volatile(
      "{\n"
      ".reg .b32 ra;\n"
      "mapa.shared::cluster.u32 ra, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [ra];\n"
      "}\n" ::"r"(bar), "r"(cta) : "memory");
}
__device__ __forceinline__ void tma_load(uint32_t dst, const CUtensorMap* map, uint32_t bar, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4}], [%2];" ::"r"(dst), "l"(map), "r"(bar), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void tma_load_mc(uint32_t dst, const CUtensorMap* map, uint32_t bar, int x, int y, uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(dst), "l"(map), "r"(bar), "r"(x), "r"(y), "h"(mask) : "memory");
}
__device__ __forceinline__ uint64_t make_desc(uint32_t addr) {  // K-major, 128-byte swizzle, 1024 bytes per 8 rows
  return (uint64_t)((addr & 0x3FFFF) >> 4) | ((uint64_t)1 << 16) | ((uint64_t)64 << 32) | ((uint64_t)1 << 62);
}
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;\n" ::: "memory");
}
__device__ __forceinline__ void dep_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void dep_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

template <int BN> struct Mma;
"""

_BODY = r"""
struct Work {
  uint16_t* hc;    // [T, K] rows of the tokens that count
  float2* part;    // [NT, Tp] (max, sum) of each row's tile
  int* tc;         // [Tp] their targets
  int* src;        // [Tp] their places
  float* tl;       // [Tp] their targets' logits
  int* count;
};

// 8 tokens per block of 256 threads
__global__ void __launch_bounds__(256) compact_kernel(const uint4* __restrict__ h, const long long* __restrict__ target,
                                                      float* __restrict__ out, Work w, int T, int K8, int V) {
  dep_launch();
  __shared__ int sums[8];
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int row0 = blockIdx.x * 8, row = row0 + warp;
  uint4 v[8];
  const bool fast = K8 == 256;
  if (fast && row < T) {
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = __ldg(h + (size_t)row * K8 + i * 32 + lane);
  }
  long long mine = IGNORED;
  if (lane < 8 && row0 + lane < T) mine = target[row0 + lane];
  int n = 0;
  const longlong2* pairs = (const longlong2*)target;
#pragma unroll 8
  for (int i = tid; i < row0 / 2; i += 256) {
    const longlong2 p = pairs[i];
    n += (p.x != IGNORED) + (p.y != IGNORED);
  }
  n = __reduce_add_sync(0xffffffffu, n);
  if (lane == 0) sums[warp] = n;
  __syncthreads();
  int base = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) base += sums[i];
  const unsigned mask = __ballot_sync(0xffffffffu, mine != IGNORED);
  if (tid == 0 && blockIdx.x == gridDim.x - 1) *w.count = base + __popc(mask);
  if (row >= T) return;
  const int p = base + __popc(mask & ((1u << warp) - 1));
  if (!((mask >> warp) & 1)) {
    if (lane == 0) out[row] = 0.f;
    return;
  }
  if (lane == warp) {
    w.tc[p] = (mine >= 0 && mine < V) ? (int)mine : -1;
    w.src[p] = row;
    w.tl[p] = __int_as_float(0x7fffffff);
  }
  uint4* hc = (uint4*)w.hc + (size_t)p * K8;
  if (fast) {
#pragma unroll
    for (int i = 0; i < 8; i++) hc[i * 32 + lane] = v[i];
  } else {
    for (int i = lane; i < K8; i += 32) hc[i] = h[(size_t)row * K8 + i];
  }
}

// Each block: one producer group (one thread issues TMA) and two consumer groups of 64 x BN.  The epilogue of a tile is
// deferred: the accumulators move to a second set of registers, which are worked off in slices while the tensor cores
// already run the first STEPS slices of K of the next tile.
template <int BN, int ST, int PREG, int CREG, int MODE>
__global__ void __launch_bounds__(384, 1)
gemm_kernel(const __grid_constant__ CUtensorMap ta, const __grid_constant__ CUtensorMap tb, Work w, int K, int V, int NT,
            int Tp) {
  constexpr int ABYTES = BM * BK * 2, BBYTES = BN * BK * 2, SBYTES = ABYTES + BBYTES;
  constexpr int N = BN / 2, SLICES = 8, STEPS = SLICES + 2;
  static_assert(N % SLICES == 0 && (BBYTES / 2) % 1024 == 0, "BN");
  extern __shared__ __align__(1024) uint8_t raw[];
  const uint32_t base = (smem_u32(raw) + 1023) & ~1023u;
  const uint32_t full = base + ST * SBYTES, empty = full + ST * 8;
  const int tid = threadIdx.x, wg = tid >> 7;
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (tid == 0) {
    for (int i = 0; i < ST; i++) {
      mbar_init(full + i * 8, 1);
      mbar_init(empty + i * 8, 16);  // 4 warps x 2 groups x 2 blocks
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&ta) : "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&tb) : "memory");
  }
  cluster_sync();
  dep_wait();
  dep_launch();
  const int count = __shfl_sync(0xffffffffu, *(volatile int*)w.count, 0);
  const int MP = (count + 2 * BM - 1) / (2 * BM);
  const int total = MP * NT;
  const int KB = max((K + BK - 1) / BK, STEPS);  // past K TMA fills with zeros
  const int step = gridDim.x >> 1;

  if (wg == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PREG));
    if (tid == 0) {
      int s = 0;
      uint32_t ph = 1;
      for (int t = blockIdx.x >> 1; t < total; t += step) {
        const int nt = t / MP, mp = t - nt * MP;
        const int m0 = (mp * 2 + rank) * BM;
        const int n0 = nt * BN + rank * (BN / 2);
        for (int k = 0; k < KB * BK; k += BK) {
          const uint32_t sa = base + s * SBYTES;
          mbar_wait(empty + s * 8, ph);
          mbar_expect(full + s * 8, SBYTES);
          tma_load(sa, &ta, full + s * 8, k, m0);
          tma_load_mc(sa + ABYTES + rank * (BBYTES / 2), &tb, full + s * 8, k, n0, (uint16_t)3);
          if (++s == ST) { s = 0; ph ^= 1; }
        }
      }
    }
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CREG));
    const int lane = tid & 31, g = wg - 1, warp = (tid >> 5) & 3, t4 = lane & 3;
    const int rloc = g * 64 + warp * 16 + (lane >> 2);
    float acc[N], old[N];
#pragma unroll
    for (int i = 0; i < N; i++) acc[i] = old[i] = 0.f;
    int s = 0, prev = 0;
    uint32_t ph = 0;
    int t0 = -0x40000000, t1 = t0;       // targets of the pending tile's two rows
    int prow = 0x40000000, pnt = 0;      // its first row, its column of tiles; at first there is none
    float na = 0.f, nc = 0.f, sa = 0.f, sc = 0.f;

    auto mma = [&](int kb) {
      mbar_wait(full + s * 8, ph);
      const uint32_t st = base + s * SBYTES;
      const uint64_t da = make_desc(st + g * 64 * BK * 2), db = make_desc(st + ABYTES);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      Mma<BN>::go(acc, da, db, kb > 0);
      Mma<BN>::go(acc, da + 2, db + 2, 1);
      Mma<BN>::go(acc, da + 4, db + 4, 1);
      Mma<BN>::go(acc, da + 6, db + 6, 1);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      if (kb > 0 && lane < 2) mbar_arrive_cluster(empty + prev * 8, lane);
      prev = s;
      if (++s == ST) { s = 0; ph ^= 1; }
    };

    auto slice = [&](int c) {
      if (c == 0) {
        const int n0 = pnt * BN;
        if (n0 + BN > V) {
#pragma unroll
          for (int i = 0; i < N; i++)
            if (n0 + (i >> 2) * 8 + t4 * 2 + (i & 1) >= V) old[i] = -INFINITY;
        }
        if ((unsigned)(t0 - n0) < (unsigned)BN && (((t0 - n0) & 7) >> 1) == t4) {
          float z = 0.f;
#pragma unroll
          for (int i = 0; i < N; i++)
            if (!(i & 2)) z = ((i >> 2) * 8 + t4 * 2 + (i & 1) == t0 - n0) ? old[i] : z;
          w.tl[prow] = z;
        }
        if ((unsigned)(t1 - n0) < (unsigned)BN && (((t1 - n0) & 7) >> 1) == t4) {
          float z = 0.f;
#pragma unroll
          for (int i = 0; i < N; i++)
            if (i & 2) z = ((i >> 2) * 8 + t4 * 2 + (i & 1) == t1 - n0) ? old[i] : z;
          w.tl[prow + 8] = z;
        }
        // The reference point need not be the maximum: that of 32 columns does, unless the sum grows too large.
        float ma = fmaxf(old[0], old[1]), mc = fmaxf(old[2], old[3]);
#pragma unroll
        for (int i = 4; i < 16; i += 4) {
          ma = fmaxf(ma, fmaxf(old[i], old[i + 1]));
          mc = fmaxf(mc, fmaxf(old[i + 2], old[i + 3]));
        }
        ma = fmaxf(ma, __shfl_xor_sync(0xffffffffu, ma, 1));
        mc = fmaxf(mc, __shfl_xor_sync(0xffffffffu, mc, 1));
        ma = fmaxf(ma, __shfl_xor_sync(0xffffffffu, ma, 2));
        mc = fmaxf(mc, __shfl_xor_sync(0xffffffffu, mc, 2));
        na = -fmaxf(ma, -1.0e38f) * L2E;
        nc = -fmaxf(mc, -1.0e38f) * L2E;
        sa = sc = 0.f;
      } else if (c <= SLICES) {
#pragma unroll
        for (int i = (c - 1) * (N / SLICES); i < c * (N / SLICES); i++) {
          if (i & 2) sc += ex2(fmaf(old[i], L2E, nc));
          else sa += ex2(fmaf(old[i], L2E, na));
        }
      } else {
        sa += __shfl_xor_sync(0xffffffffu, sa, 1);
        sc += __shfl_xor_sync(0xffffffffu, sc, 1);
        sa += __shfl_xor_sync(0xffffffffu, sa, 2);
        sc += __shfl_xor_sync(0xffffffffu, sc, 2);
        if (__any_sync(0xffffffffu, !(sa < 1.0e20f && sc < 1.0e20f))) {  // rare: with the maximum itself
          float ma = -1.0e38f, mc = -1.0e38f;
#pragma unroll
          for (int i = 0; i < N; i++) {
            if (i & 2) mc = fmaxf(mc, old[i]);
            else ma = fmaxf(ma, old[i]);
          }
          ma = fmaxf(ma, __shfl_xor_sync(0xffffffffu, ma, 1));
          mc = fmaxf(mc, __shfl_xor_sync(0xffffffffu, mc, 1));
          ma = fmaxf(ma, __shfl_xor_sync(0xffffffffu, ma, 2));
          mc = fmaxf(mc, __shfl_xor_sync(0xffffffffu, mc, 2));
          na = -ma * L2E;
          nc = -mc * L2E;
          sa = sc = 0.f;
#pragma unroll
          for (int i = 0; i < N; i++) {
            if (i & 2) sc += ex2(fmaf(old[i], L2E, nc));
            else sa += ex2(fmaf(old[i], L2E, na));
          }
          sa += __shfl_xor_sync(0xffffffffu, sa, 1);
          sc += __shfl_xor_sync(0xffffffffu, sc, 1);
          sa += __shfl_xor_sync(0xffffffffu, sa, 2);
          sc += __shfl_xor_sync(0xffffffffu, sc, 2);
        }
        if (t4 == 0) {  // in the logarithm to base 2
          float2* p = w.part + (size_t)pnt * Tp;
          if (prow < count) p[prow] = make_float2(-na, sa);
          if (prow + 8 < count) p[prow + 8] = make_float2(-nc, sc);
        }
      }
    };

    for (int t = blockIdx.x >> 1; t < total; t += step) {
      const int nt = t / MP, mp = t - nt * MP;
      const int r0 = (mp * 2 + rank) * BM + rloc;
      if (MODE) slice(0);
#pragma unroll
      for (int c = 0; c < STEPS; c++) {
        mma(c);
        if (!MODE || (c > 0 && c < STEPS - 1)) slice(c);
      }
      t0 = r0 < count ? w.tc[r0] : -1;
      t1 = r0 + 8 < count ? w.tc[r0 + 8] : -1;
#pragma unroll 1
      for (int kb = STEPS; kb < KB; kb++) mma(kb);
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      if (lane < 2) mbar_arrive_cluster(empty + prev * 8, lane);
#pragma unroll
      for (int i = 0; i < N; i++) asm volatile("" : "+f"(acc[i])::"memory");
      if (MODE) slice(STEPS - 1);
#pragma unroll
      for (int i = 0; i < N; i++) asm volatile("mov.b32 %0, %1;" : "=f"(old[i]) : "f"(acc[i]) : "memory");
      prow = r0;
      pnt = nt;
    }
#pragma unroll
    for (int c = 0; c < STEPS; c++) slice(c);
  }
  cluster_sync();
}

// 32 rows per block of 1024 threads
__global__ void __launch_bounds__(1024) reduce_kernel(Work w, float* __restrict__ out, int NT, int Tp) {
  __shared__ float2 sh[32][33];
  const int lane = threadIdx.x & 31, g = threadIdx.x >> 5;
  const int row = blockIdx.x * 32 + lane;
  dep_wait();
  const int count = *w.count;
  float m = -3.0e38f, s = 0.f;
  if (row < count) {
    for (int i0 = g; i0 < NT; i0 += 32 * 5) {
      float2 p[5];
#pragma unroll
      for (int j = 0; j < 5; j++) {
        const int i = i0 + j * 32;
        p[j] = i < NT ? w.part[(size_t)i * Tp + row] : make_float2(-3.0e38f, 0.f);
      }
      float k = m;
#pragma unroll
      for (int j = 0; j < 5; j++) k = fmaxf(k, p[j].x);
      s *= ex2(m - k);
#pragma unroll
      for (int j = 0; j < 5; j++) s += p[j].y * ex2(p[j].x - k);
      m = k;
    }
  }
  sh[g][lane] = make_float2(m, s);
  __syncthreads();
  const float2 q = sh[lane][g];  // warp g: row g of the block
  float k = q.x;
#pragma unroll
  for (int o = 16; o; o >>= 1) k = fmaxf(k, __shfl_xor_sync(0xffffffffu, k, o));
  float sum = q.y * ex2(q.x - k);
#pragma unroll
  for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
  const int r = blockIdx.x * 32 + g;
  if (lane == 0 && r < count) out[w.src[r]] = (fmaf(-w.tl[r], L2E, k) + log2f(sum)) * LN2;
}

typedef CUresult (*Encode)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                           const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                           CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static int encode(CUtensorMap* map, const void* p, int rows, int K, int box) {
  static Encode fn = nullptr;
  if (!fn) {
    cudaDriverEntryPointQueryResult q;
    void* f = nullptr;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &q) != cudaSuccess || !f)
      return 1001;
    fn = (Encode)f;
  }
  cuuint64_t dims[2] = {(cuuint64_t)K, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)K * 2};
  cuuint32_t boxes[2] = {(cuuint32_t)BK, (cuuint32_t)box}, ones[2] = {1, 1};
  return fn(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void*)p, dims, strides, boxes, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
            CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS ? 0 : 1002;
}

template <int BN, int ST, int PREG, int CREG, int MODE>
static int launch(const void* weight, Work w, int T, int K, int V, int Tp, int sms, cudaStream_t stream) {
  constexpr int SMEM = ST * (BM + BN) * BK * 2 + 1024 + ST * 16;
  CUtensorMap ta, tb;
  int e = encode(&ta, w.hc, T, K, BM);
  if (e) return e;
  e = encode(&tb, weight, V, K, BN / 2);
  if (e) return e;
  static int ready[64];
  int dev = 0;
  cudaGetDevice(&dev);
  if (dev >= 64 || !ready[dev]) {
    cudaError_t r = cudaFuncSetAttribute(gemm_kernel<BN, ST, PREG, CREG, MODE>, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM);
    if (r != cudaSuccess) return (int)r;
    if (dev < 64) ready[dev] = 1;
  }
  cudaLaunchConfig_t c = {};
  c.gridDim = dim3(sms & ~1);
  c.blockDim = dim3(384);
  c.dynamicSmemBytes = SMEM;
  c.stream = stream;
  cudaLaunchAttribute a[2];
  a[0].id = cudaLaunchAttributeClusterDimension;
  a[0].val.clusterDim.x = 2;
  a[0].val.clusterDim.y = 1;
  a[0].val.clusterDim.z = 1;
  a[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  a[1].val.programmaticStreamSerializationAllowed = 1;
  c.attrs = a;
  c.numAttrs = 2;
  return (int)cudaLaunchKernelEx(&c, gemm_kernel<BN, ST, PREG, CREG, MODE>, ta, tb, w, K, V, (V + BN - 1) / BN, Tp);
}

extern "C" int lce_forward(const void* h, const void* weight, const void* target, void* out, void* hc, void* part, void* ints,
                           int T, int K, int V, int Tp, int sms, int variant, void* st) {
  cudaStream_t stream = (cudaStream_t)st;
  Work w;
  w.hc = (uint16_t*)hc;
  w.part = (float2*)part;
  w.tc = (int*)ints;
  w.src = w.tc + Tp;
  w.tl = (float*)(w.src + Tp);
  w.count = w.src + 2 * Tp;
  compact_kernel<<<(T + 7) / 8, 256, 0, stream>>>((const uint4*)h, (const long long*)target, (float*)out, w, T, K / 8, V);
  int e = (int)cudaGetLastError(), bn = 0;
  if (e) return e;
  switch (variant) {
//CASES
    default: return 1003;
  }
  if (e) return e;
  cudaLaunchConfig_t c = {};
  c.gridDim = dim3((T + 31) / 32);
  c.blockDim = dim3(1024);
  c.stream = stream;
  cudaLaunchAttribute a[1];
  a[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  a[0].val.programmaticStreamSerializationAllowed = 1;
  c.attrs = a;
  c.numAttrs = 1;
  return (int)cudaLaunchKernelEx(&c, reduce_kernel, w, (float*)out, (V + bn - 1) / bn, Tp);
}
"""


def _mma(bn):
    n = bn // 2
    regs = ", ".join(f"%{i}" for i in range(n))
    outs = ", ".join(f'"+f"(d[{i}])' for i in range(n))
    return (
        f"template <> struct Mma<{bn}> {{\n"
        f"  static __device__ __forceinline__ void go(float (&d)[{n}], uint64_t a, uint64_t b, int scale) {{\n"
        f'    asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{n + 2}, 0;\\n"\n'
        f'      "wgmma.mma_async.sync.aligned.m64n{bn}k16.f32.bf16.bf16 {{{regs}}}, %{n}, %{n + 1}, p, 1, 1, 0, 0;\\n}}\\n"\n'
        f'      : {outs} : "l"(a), "l"(b), "r"(scale));\n'
        f"  }}\n}};\n"
    )


def _source(variants):
    cases = "".join(
        f"    case {i}: bn = {bn}; e = launch<{bn}, {st}, {pr}, {cr}, {mode}>(weight, w, T, K, V, Tp, sms, stream); break;\n"
        for i, (bn, st, pr, cr, mode) in enumerate(variants)
    )
    return _HEAD + "".join(_mma(bn) for bn in sorted({v[0] for v in variants})) + _BODY.replace("//CASES\n", cases)


_lib = None


def _load():
    global _lib
    if _lib is None:
        source = _source(VARIANTS)
        name = "lce_" + hashlib.sha256(source.encode()).hexdigest()[:16]
        folder = os.path.join(cpp_extension.get_default_build_root(), name)
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, "lce.cu")
        if not os.path.exists(path):
            with open(path + f".{os.getpid()}", "w") as f:
                f.write(source)
            os.replace(path + f".{os.getpid()}", path)
        so = cpp_extension.load(
            name=name,
            sources=[path],
            extra_cuda_cflags=["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a"],
            build_directory=folder,
            is_python_module=False,
            verbose=bool(os.environ.get("LCE_VERBOSE")),
        )
        lib = ctypes.CDLL(so if isinstance(so, str) else os.path.join(folder, name + ".so"))
        lib.lce_forward.argtypes = [ctypes.c_void_p] * 7 + [ctypes.c_int] * 6 + [ctypes.c_void_p]
        lib.lce_forward.restype = ctypes.c_int
        _lib = lib
    return _lib


_sms = {}


def forward(hidden, weight, target, variant=0):
    if not (hidden.is_cuda and weight.device == hidden.device and target.device == hidden.device):
        raise ValueError("needs CUDA tensors on one device")
    if hidden.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16 or target.dtype != torch.int64:
        raise ValueError("only bfloat16 hidden and weight and int64 target")
    if hidden.dim() != 2 or weight.dim() != 2 or target.dim() != 1:
        raise ValueError("only hidden [T, K], weight [V, K], target [T]")
    T, K = hidden.shape
    V = weight.shape[0]
    if weight.shape[1] != K or target.shape[0] != T:
        raise ValueError("the shapes do not match")
    if K % 8 or K < 8 or T < 1 or V < 1 or max(T, K, V) > 1 << 24:
        raise ValueError("only widths that are multiples of 8, and no empty or huge tensors")
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        raise ValueError("forward only")
    hidden, weight, target = hidden.contiguous(), weight.contiguous(), target.contiguous()
    if (hidden.data_ptr() | weight.data_ptr()) & 15:
        raise ValueError("hidden and weight must be aligned to 16 bytes")
    if target.data_ptr() & 15:
        target = target.clone()
    lib = _load()
    dev = hidden.device
    sms = _sms.get(dev)
    if sms is None:
        p = torch.cuda.get_device_properties(dev)
        if p.major != 9:
            raise ValueError("needs an H100")
        sms = _sms[dev] = p.multi_processor_count
    with torch.cuda.device(dev):
        bn = VARIANTS[variant][0]
        Tp = (T + 31) // 32 * 32
        hc = torch.empty_like(hidden)
        part = torch.empty((V + bn - 1) // bn * Tp * 2, dtype=torch.float32, device=dev)
        ints = torch.empty(3 * Tp + 4, dtype=torch.int32, device=dev)
        out = torch.empty(T, dtype=torch.float32, device=dev)
        e = lib.lce_forward(hidden.data_ptr(), weight.data_ptr(), target.data_ptr(), out.data_ptr(), hc.data_ptr(),
                            part.data_ptr(), ints.data_ptr(), T, K, V, Tp, sms, variant,
                            torch.cuda.current_stream(dev).cuda_stream)
    if e:
        raise RuntimeError(f"lce_forward failed: {e}")
    return out


class ModelNew(nn.Module):
    def forward(self, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return forward(hidden, weight, target)
