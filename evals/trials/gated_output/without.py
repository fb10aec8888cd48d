"""out = (sigmoid(x w_gate^T) * h) w_out^T + residual, bf16, on one H100: both products in one persistent kernel.

128x256 tiles, two consumer warpgroups, TMA + wgmma, clusters of two CTAs that share the weight tile by multicast.
The weight tile's rows are permuted by a 5-D tensor map so that a thread owns 8 neighbouring columns: 16-byte epilogue
accesses straight from registers, no staging.  The second product's tiles wait on per-row-block counters.  The tiles left
over after the last full wave are split along K over all clusters.
"""
import ctypes
import hashlib
import os
import subprocess
import tempfile

import torch
from torch import nn

SRC = r'''
#include <cuda.h>
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <stdint.h>

constexpr int BM = 128, BN = 256, BK = 64, STAGES = 4;
constexpr int A_BYTES = BM * BK * 2, B_BYTES = BN * BK * 2, ST_BYTES = A_BYTES + B_BYTES;
constexpr int SMEM = STAGES * ST_BYTES + 1024 + 128;
#ifndef PF
#define PF 3
#endif

struct P {
  const __nv_bfloat16 *h, *res; __nv_bfloat16 *gated, *out;
  float* ws; int* cnt; int* wcnt; int* done;
  int M, N, K, MT, NT, T1, full, R, S, GM, drift, flags, NG;
  uint64_t polS, polW, polA, polG;
};

__device__ __forceinline__ uint32_t s2u(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void mbar_init(uint32_t b, int n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(n)); }
__device__ __forceinline__ void mbar_expect(uint32_t b, int n) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(n) : "memory");
}
__device__ __forceinline__ void mbar_wait(uint32_t b, uint32_t ph) {
  asm volatile("{\n.reg .pred p;\nW: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra D;\nbra W;\nD:\n}"
               ::"r"(b), "r"(ph) : "memory");
}
__device__ __forceinline__ void mbar_wait_cl(uint32_t b, uint32_t ph) {
  asm volatile("{\n.reg .pred p;\nW: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra D;\nbra W;\nD:\n}"
               ::"r"(b), "r"(ph) : "memory");
}
__device__ __forceinline__ void mbar_arrive_remote(uint32_t b, uint32_t cta) {
  asm volatile("{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [r];\n}"
               ::"r"(b), "r"(cta) : "memory");
}
__device__ __forceinline__ void tma2(uint32_t dst, const CUtensorMap* m, uint32_t bar, int c0, int c1, uint64_t pol) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;"
               ::"r"(dst), "l"(m), "r"(bar), "r"(c0), "r"(c1), "l"(pol) : "memory");
}
__device__ __forceinline__ void tmaB(uint32_t dst, const CUtensorMap* m, uint32_t bar, int k, int n, int mask, uint64_t pol) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
               " [%0], [%1, {%3, %5, %5, %5, %4}], [%2], %6, %7;"
               ::"r"(dst), "l"(m), "r"(bar), "r"(k), "r"(n / 32), "r"(0), "h"((uint16_t)mask), "l"(pol) : "memory");
}
__device__ __forceinline__ uint64_t desc(uint32_t a) {
  return (uint64_t)((a & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}
__device__ __forceinline__ void wgmma(float (&d)[128], uint64_t a, uint64_t b, int sd) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
    @LIST@
    "}, %128, %129, p, 1, 1, 0, 0;\n}\n"
    : @OUTS@
    : "l"(a), "l"(b), "r"(sd));
}
__device__ __forceinline__ uint32_t pack(float a, float b) {
  uint32_t r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a)); return r;
}
__device__ __forceinline__ float lo(uint32_t v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float hi(uint32_t v) { return __uint_as_float(v & 0xffff0000u); }
__device__ __forceinline__ float e1(float x) {  // 1 + exp(-x), bounded so that four of them multiply
  float t = x * -1.4426950408889634f, r;
  asm("min.NaN.f32 %0, %0, 0f41F00000;" : "+f"(t));
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(t));
  return r + 1.f;
}
__device__ __forceinline__ void sig4(float& x, float& y, float& z, float& w) {
  float a = e1(x), b = e1(y), c = e1(z), d = e1(w), ab = a * b, cd = c * d, r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(ab * cd));
  float p = r * cd, q = r * ab;
  x = p * b; y = p * a; z = q * d; w = q * c;
}
__device__ __forceinline__ uint4 ld8(const __nv_bfloat16* p, uint64_t pol) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p), "l"(pol));
  return v;
}
__device__ __forceinline__ void st8(__nv_bfloat16* p, uint4 v, uint64_t pol) {
  asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1,%2,%3,%4}, %5;" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "l"(pol) : "memory");
}

struct Unit { int m, n, k0, nk, ph, sp, valid; };  // m in CL * 128 rows, n in 256 columns
__device__ __forceinline__ Unit unit(const P& p, int it, int cid, int G) {
  Unit u; int KB = p.K / BK, t = cid + it * G;
  u.k0 = 0; u.nk = KB; u.sp = -1; u.valid = 1;
  if (t >= p.full) {
    if (p.R == 0 || it != p.full / G || cid >= p.R * p.S) { u.valid = 0; return u; }
    u.sp = cid / p.S; t = p.full + u.sp;
    u.nk = KB / p.S; u.k0 = (cid % p.S) * u.nk;
  }
  u.ph = t >= p.T1;
  int l = u.ph ? t - p.T1 : t, g = l / (p.GM * p.NT), r = l - g * p.GM * p.NT;
  bool snake = (p.flags & 1) && ((g + u.ph) & 1);
  // the second product walks the row groups backwards, from the last one that is surely done
  if (u.ph && (p.flags & 32)) g = g > 1 ? p.NG - 1 - g : p.NG - 2 + g;
  int gm = min(p.GM, p.MT - g * p.GM);
  u.n = r / gm; u.m = g * p.GM + r - u.n * gm;
  if (snake) u.n = p.NT - 1 - u.n;
  return u;
}

template <int CL>
__global__ void __cluster_dims__(CL, 1, 1) __launch_bounds__(384, 1)
gated(const __grid_constant__ CUtensorMap mx, const __grid_constant__ CUtensorMap mg,
      const __grid_constant__ CUtensorMap mw1, const __grid_constant__ CUtensorMap mw2, const __grid_constant__ P p) {
  extern __shared__ char smem_raw[];
  uint32_t base = (s2u(smem_raw) + 1023) & ~1023u;
  uint32_t fullb = base + STAGES * ST_BYTES, emptyb = fullb + STAGES * 8;
  uint32_t rank; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  int cid = blockIdx.x / CL, G = gridDim.x / CL, wg = threadIdx.x >> 7;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) { mbar_init(fullb + i * 8, 1); mbar_init(emptyb + i * 8, 8 * CL); }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");

  if (threadIdx.x == 32 && blockIdx.x == 0 && (p.flags & 16)) {
    long long t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)); ((long long*)p.done)[4] = clock64(); ((long long*)p.done)[5] = t;
  }
  if (wg == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      int s = 0; uint32_t ph = 1;
      for (int it = 0;; it++) {
        Unit u = unit(p, it, cid, G);
        if (!u.valid) break;
        int mrow = (u.m * CL + rank) * BM, nrow = u.n * BN + rank * (BN / CL);
        uint64_t polA = u.ph ? p.polG : p.polA;
        if (u.ph) {
          const int* c = p.cnt + u.m * CL + rank; int v;
          while (1) {
            asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(c) : "memory");
            if (v >= p.NT * 2) break;
            __nanosleep(64);
          }
          asm volatile("fence.proxy.async;" ::: "memory");
        }
        const CUtensorMap *ma = u.ph ? &mg : &mx, *mb = u.ph ? &mw2 : &mw1;
        for (int kb = u.k0; kb < u.k0 + u.nk; kb++) {
          mbar_wait_cl(emptyb + s * 8, ph);
          uint32_t st = base + s * ST_BYTES, fb = fullb + s * 8;
          mbar_expect(fb, ST_BYTES);
          tma2(st, ma, fb, kb * BK, mrow, polA);
          tmaB(st + A_BYTES + rank * (B_BYTES / CL), mb, fb, kb * BK, nrow, (1 << CL) - 1, p.polW);
          if (++s == STAGES) { s = 0; ph ^= 1; }
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    int w = wg - 1, warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31, q = lane & 3;
    int s = 0, prev = 0; uint32_t ph = 0;
    float d[128];
    int pend = -1;  // row-block counter of a finished first-product tile, not yet raised
    auto signal = [&]() {
      asm volatile("bar.sync %0, 128;" ::"r"(w + 1) : "memory");
      if ((threadIdx.x & 127) == 0) asm volatile("fence.acq_rel.gpu;\nred.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(p.cnt + pend) : "memory");
      pend = -1;
    };
    for (int it = 0;; it++) {
      Unit u = unit(p, it, cid, G);
      if (!u.valid) break;
      if (it == 0 && w == 1 && p.drift) asm volatile("bar.sync 3, 256;" ::: "memory");
      auto step = [&](int kb) {
        mbar_wait(fullb + s * 8, ph);
        uint64_t da = desc(base + s * ST_BYTES + w * 8192), db = desc(base + s * ST_BYTES + A_BYTES);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        wgmma(d, da, db, kb > 0);
        wgmma(d, da + 2, db + 2, 1);
        wgmma(d, da + 4, db + 4, 1);
        wgmma(d, da + 6, db + 6, 1);
        asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (kb > 0 && lane < CL) mbar_arrive_remote(emptyb + prev * 8, lane);
        if (it == 0 && w == 0 && kb + 1 == p.drift) asm volatile("bar.arrive 3, 256;" ::: "memory");
        if (kb == 3 && pend >= 0) signal();
        prev = s;
        if (++s == STAGES) { s = 0; ph ^= 1; }
      };
      int row = (u.m * CL + rank) * BM + w * 64 + warp * 16 + (lane >> 2);
      bool ok0 = row < p.M, ok1 = row + 8 < p.M;
      size_t o0 = (size_t)row * p.N + u.n * BN + q * 8, o1 = o0 + (size_t)8 * p.N;
      const __nv_bfloat16* add = u.ph ? p.res : p.h;
      uint4 v[16];
      int kb = 0;
      for (; kb < u.nk - PF; kb++) step(kb);
      if (u.sp < 0) {
#pragma unroll
        for (int J = 0; J < 8; J++) {
          v[2 * J] = ok0 ? ld8(add + o0 + J * 32, p.polS) : make_uint4(0, 0, 0, 0);
          v[2 * J + 1] = ok1 ? ld8(add + o1 + J * 32, p.polS) : make_uint4(0, 0, 0, 0);
        }
      }
      for (; kb < u.nk; kb++) step(kb);
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
      for (int i = 0; i < 128; i++) asm volatile("" : "+f"(d[i])::"memory");
      if (lane < CL) mbar_arrive_remote(emptyb + prev * 8, lane);

      if (u.sp >= 0) {  // partial sums of a left-over tile; each warp's 16 rows are finished by the last of its S warps
        float4* ws = (float4*)(p.ws + (size_t)(u.sp * CL + rank) * BM * BN) + (w * 4 + warp) * 32 + lane;
#pragma unroll
        for (int i = 0; i < 32; i++)
          asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(ws + i * 256), "f"(d[4 * i]), "f"(d[4 * i + 1]), "f"(d[4 * i + 2]), "f"(d[4 * i + 3]) : "memory");
        asm volatile("fence.acq_rel.gpu;" ::: "memory");
        __syncwarp();
        int old = 0, *wc = p.wcnt + (u.sp * CL + rank) * 8 + w * 4 + warp;
        if (lane == 0) old = atomicAdd(wc, 1);
        old = __shfl_sync(~0u, old, 0);
        if (old != p.S - 1) continue;
        asm volatile("fence.acq_rel.gpu;" ::: "memory");
#pragma unroll
        for (int i = 0; i < 32; i++) {
          float4 f = __ldcg(ws + i * 256);
          d[4 * i] = f.x; d[4 * i + 1] = f.y; d[4 * i + 2] = f.z; d[4 * i + 3] = f.w;
        }
#pragma unroll
        for (int i = 0; i < 32; i++) __stcg(ws + i * 256, make_float4(0.f, 0.f, 0.f, 0.f));
        if (lane == 0) *wc = 0;
#pragma unroll
        for (int J = 0; J < 8; J++) {
          v[2 * J] = ok0 ? ld8(add + o0 + J * 32, p.polS) : make_uint4(0, 0, 0, 0);
          v[2 * J + 1] = ok1 ? ld8(add + o1 + J * 32, p.polS) : make_uint4(0, 0, 0, 0);
        }
      }
      if (u.ph == 0) {
#pragma unroll
        for (int J = 0; J < 8; J++)
#pragma unroll
          for (int r = 0; r < 2; r++) {
            float* e = d + 16 * J + 2 * r;  // elements: e[0],e[1],e[4],e[5],e[8],e[9],e[12],e[13]
            sig4(e[0], e[1], e[4], e[5]);
            sig4(e[8], e[9], e[12], e[13]);
            uint4 a = v[2 * J + r], o;
            o.x = pack(e[0] * lo(a.x), e[1] * hi(a.x)); o.y = pack(e[4] * lo(a.y), e[5] * hi(a.y));
            o.z = pack(e[8] * lo(a.z), e[9] * hi(a.z)); o.w = pack(e[12] * lo(a.w), e[13] * hi(a.w));
            if (r ? ok1 : ok0) st8(p.gated + (r ? o1 : o0) + J * 32, o, 0x1000000000000000ull);
          }
        pend = u.m * CL + rank;
        // tell the others later, inside the next tile's loop, unless that tile itself may wait for such news
        if (cid + (it + 1) * G >= p.T1) signal();
      } else {
#pragma unroll
        for (int J = 0; J < 8; J++)
#pragma unroll
          for (int r = 0; r < 2; r++) {
            float* e = d + 16 * J + 2 * r;
            uint4 a = v[2 * J + r], o;
            o.x = pack(e[0] + lo(a.x), e[1] + hi(a.x)); o.y = pack(e[4] + lo(a.y), e[5] + hi(a.y));
            o.z = pack(e[8] + lo(a.z), e[9] + hi(a.z)); o.w = pack(e[12] + lo(a.w), e[13] + hi(a.w));
            if (r ? ok1 : ok0) st8(p.out + (r ? o1 : o0) + J * 32, o, p.polS);
          }
      }
    }
  }
  asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
  if (threadIdx.x == 32 && blockIdx.x == 0 && (p.flags & 16)) {
    long long t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)); ((long long*)p.done)[6] = clock64(); ((long long*)p.done)[7] = t;
  }
  if (threadIdx.x == 0) {  // the last CTA clears the counters for the next call
    if (atomicAdd(p.done, 1) == gridDim.x - 1) {
      for (int i = 0; i < p.MT * CL; i++) p.cnt[i] = 0;
      *p.done = 0;
    }
  }
}

typedef CUresult (*Enc)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                        const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
static Enc enc;

static int map2(CUtensorMap* m, const void* p, uint64_t rows, uint64_t K, CUtensorMapL2promotion pr) {
  cuuint64_t dim[2] = {K, rows}, st[1] = {K * 2}; cuuint32_t box[2] = {64, 128}, es[2] = {1, 1};
  return enc(m, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void*)p, dim, st, box, es, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             pr, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}
static int map5(CUtensorMap* m, const void* p, uint64_t N, uint64_t K, unsigned rows, CUtensorMapL2promotion pr) {
  // shared-memory row 32 J + 8 i + 2 q + e holds weight row 32 J + 8 q + 2 i + e
  cuuint64_t dim[5] = {K, 2, 4, 4, N / 32}, st[4] = {K * 2, K * 16, K * 4, K * 64};
  cuuint32_t box[5] = {64, 2, 4, 4, rows / 32}, es[5] = {1, 1, 1, 1, 1};
  return enc(m, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5, (void*)p, dim, st, box, es, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             pr, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}
static int cdiv(int a, int b) { return (a + b - 1) / b; }

template <int CL>
static int go(const void* x, const void* h, const void* res, const void* wgate, const void* wout, void* gat, void* out,
              void* work, int M, int N, int gm, int drift, int split, int flags, cudaStream_t stream) {
  static int maxcl = 0;
  int K = N;
  if (!enc) {
    cudaDriverEntryPointQueryResult qr; void* f = 0;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &qr) || !f) return -1;
    enc = (Enc)f;
  }
  if (!maxcl) {
    cudaFuncSetAttribute(gated<CL>, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM);
    cudaLaunchConfig_t c = {}; c.gridDim = dim3(CL * 64); c.blockDim = dim3(384); c.dynamicSmemBytes = SMEM;
    cudaLaunchAttribute a; a.id = cudaLaunchAttributeClusterDimension; a.val.clusterDim = {CL, 1, 1};
    c.attrs = &a; c.numAttrs = 1;
    if (cudaOccupancyMaxActiveClusters(&maxcl, gated<CL>, &c) || maxcl < 1) { maxcl = 0; return -2; }
  }
  CUtensorMap mx, mg, m1, m2;
  CUtensorMapL2promotion pr = flags & 8 ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
  int e = map2(&mx, x, M, K, pr) | map2(&mg, gat, M, K, pr) | map5(&m1, wgate, N, K, BN / CL, pr) | map5(&m2, wout, N, K, BN / CL, pr);
  if (e) return 1000 + e;
  P p; p.h = (const __nv_bfloat16*)h; p.res = (const __nv_bfloat16*)res; p.gated = (__nv_bfloat16*)gat; p.out = (__nv_bfloat16*)out;
  p.M = M; p.N = N; p.K = K; p.MT = cdiv(M, BM * CL); p.NT = N / BN; p.T1 = p.MT * p.NT; p.GM = gm < p.MT ? gm : p.MT;
  p.drift = drift < K / BK ? drift : 0; p.NG = cdiv(p.MT, p.GM);
  // walking backwards wants whole groups and at least two of them
  if (p.NG < 2 || p.MT % p.GM) flags &= ~32;
  p.flags = flags;
  const uint64_t normal = 0x1000000000000000ull, first = 0x12F0000000000000ull, last = 0x14F0000000000000ull;
  p.polS = flags & 2 ? first : normal; p.polW = flags & 4 ? last : normal; p.polA = normal; p.polG = flags & 64 ? first : normal;
  int T = 2 * p.T1, G = maxcl, R = T % G;
  p.full = T; p.R = 0; p.S = 1;
  if (split && R > 0 && T > G) {
    int S = 1;
    while (S * 2 <= split && S * 2 * R <= G && (K / BK) % (S * 2) == 0) S *= 2;
    if (S > 1) { p.full = T - R; p.R = R; p.S = S; }
  }
  // work: ints [0]=done, [64..2048) per-warp counters, [2048..16384) row-block counters; floats from 64 KiB on
  int* wi = (int*)work; p.done = wi; p.wcnt = wi + 64; p.cnt = wi + 2048; p.ws = (float*)((char*)work + 65536);
  if (p.MT * CL > 14336 || p.R * 8 * CL > 1984 || p.R * CL > 66) return -3;
  gated<CL><<<CL * G, 384, SMEM, stream>>>(mx, mg, m1, m2, p);
  return flags & 16 ? -1000 - G : (int)cudaGetLastError();
}
extern "C" int run(const void* x, const void* h, const void* res, const void* wgate, const void* wout, void* gat, void* out,
                   void* work, int M, int N, int cl, int gm, int drift, int split, int flags, cudaStream_t stream) {
  return cl == 4 ? go<4>(x, h, res, wgate, wout, gat, out, work, M, N, gm, drift, split, flags, stream)
                 : go<2>(x, h, res, wgate, wout, gat, out, work, M, N, gm, drift, split, flags, stream);
}
'''
SRC = SRC.replace("@LIST@", "\n    ".join(
    '"' + ", ".join(f"%{i + j}" for j in range(16)) + (', "' if i < 112 else '"') for i in range(0, 128, 16))
).replace("@OUTS@", ", ".join(f'"+f"(d[{i}])' for i in range(128)))

WORK_BYTES = 65536 + 66 * 128 * 256 * 4  # counters, then partial sums of at most 33 left-over tiles of two CTAs
_lib = None


def _load():
    global _lib
    if _lib is None:
        name = f"_gated_{hashlib.sha1(SRC.encode()).hexdigest()[:12]}"
        here = tempfile.mkdtemp()
        d = here if os.access(here, os.W_OK) else tempfile.gettempdir()
        so = os.path.join(d, name + ".so")
        if not os.path.exists(so):
            cu, tmp = os.path.join(d, name + ".cu"), f"{so}.{os.getpid()}"
            with open(cu, "w") as f:
                f.write(SRC)
            subprocess.run(["nvcc", "-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-lineinfo", "-shared", "-Xcompiler",
                            "-fPIC", "-o", tmp, cu], check=True)
            os.replace(tmp, so)
        _lib = ctypes.CDLL(so)
        _lib.run.argtypes = [ctypes.c_void_p] * 8 + [ctypes.c_int] * 7 + [ctypes.c_void_p]
    return _lib


_work = {}
_last = 0
CFG = dict(cl=2, gm=8, drift=2, split=16, flags=3)  # flags: 1 serpentine column order, 2 stream h, residual and out through the L2


def gated_output(x, h, residual, w_gate, w_out, *, cl=None, gm=None, drift=None, split=None, flags=None):
    n = w_gate.shape[0]
    ts = (x, h, residual, w_gate, w_out)
    if any(t.dtype != torch.bfloat16 or not t.is_cuda for t in ts):
        raise ValueError("bf16 CUDA tensors wanted")
    if n % 256 or w_gate.shape != (n, n) or w_out.shape != (n, n) or any(t.shape != x.shape or t.shape[-1] != n for t in ts[:3]):
        raise ValueError("shapes: (..., width) and (width, width), width a multiple of 256")
    x, h, residual, w_gate, w_out = (t if t.is_contiguous() and t.data_ptr() % 16 == 0 else t.contiguous().clone() for t in ts)
    m = x.numel() // n
    out = torch.empty_like(x)
    if m == 0:
        return out
    if m > 256 * 7168:
        raise ValueError("too many tokens")
    gat = torch.empty_like(x)
    stream = torch.cuda.current_stream(x.device).cuda_stream
    key = (x.device.index, stream)
    if key not in _work:
        _work[key] = torch.zeros(WORK_BYTES, dtype=torch.uint8, device=x.device)
    c = CFG
    pick = lambda v, k: c[k] if v is None else v
    e = _load().run(x.data_ptr(), h.data_ptr(), residual.data_ptr(), w_gate.data_ptr(), w_out.data_ptr(), gat.data_ptr(),
                    out.data_ptr(), _work[key].data_ptr(), m, n, pick(cl, "cl"), pick(gm, "gm"), pick(drift, "drift"),
                    pick(split, "split"), pick(flags, "flags"), stream)
    global _last
    _last = e
    if e > -1000 and e:
        raise RuntimeError(f"gated kernel: error {e}")
    return out


class ModelNew(nn.Module):
    def __init__(self, width=4096):
        super().__init__()
        self.w_gate = nn.Parameter((torch.randn(width, width) / width**0.5).bfloat16())
        self.w_out = nn.Parameter((torch.randn(width, width) / width**0.5).bfloat16())

    @torch.no_grad()
    def forward(self, x, h, residual):
        return gated_output(x, h, residual, self.w_gate, self.w_out)
