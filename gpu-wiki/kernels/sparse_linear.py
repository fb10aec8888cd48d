"""silu(x W^T + bias) with W sparse 2:4, bf16, CUDA C++: the transposed product W x^T by wgmma.sp, whose sparse operand is
the left one.

* `places` has four bits for each four weights, as the instruction's metadata. A first small kernel puts them into the
  order of its registers, 5 us, under the product's start.
* Clusters of two blocks own 512 columns and share a tile of BN tokens by multicast; a block has 256 of the columns.
* Warps 8 and 9 feed two rings: W with its metadata, and x. Each of two consumer warpgroups owns two sums of 64 x BN.
* Near a tile's end the second consumer waits until the first has issued its products, so that each epilogue runs beside
  the other's products. That brought 0.2 %.
* W's rows are permuted by the tensor map, so that a lane holds 16 contiguous bytes of y after movmatrix.
evals/trials/sparse_linear states the problem.
"""

import functools

import torch
from torch import nn
from torch.utils.cpp_extension import load_inline

BN = 208  # tokens a tile
KA = 64  # k of a stage of W
SA = 5  # stages of W
SB = 5  # stages of x, 64 of k
CL = 2  # blocks a cluster
GN = 10  # tiles of tokens that are walked together
HOLD = 4  # the second consumer leaves this many steps of a tile until the first has issued all of its own
SNAKE = 1  # 1: every other group of tiles walks W backwards
SILU = "tanh"  # "tanh": one special function an element; "exact": two; "pair": one reciprocal for two elements
PDL = 1  # the product starts under the first launch
EPI = 0  # 0: movmatrix, 1: stmatrix into DEPTH buffers of a warp
DEPTH = 1  # of them
HINT = 0  # 1: cache hints for the loads
TRACE = 0  # 1: clocks of each tile
PROBE = ""  # "no loads", "no epilogue", "hot", "no stores": wrong results, the time of the rest


def wgmma(n):
    half = n // 2
    sums, operands = ", ".join(f"%{i}" for i in range(half)), ", ".join(f'"+f"(d[{i}])' for i in range(half))
    return f"""template <int SEL> __device__ __forceinline__ void multiply(float (&d)[{half}], u64 a, u64 b, u32 e, int keep) {{
  asm volatile("{{.reg .pred p; setp.ne.b32 p, %{half + 4}, 0; wgmma.mma_async.sp.sync.aligned.m64n{n}k32.f32.bf16.bf16 {{{sums}}}, %{half}, %{half + 1}, %{half + 2}, %{half + 3}, p, 1, 1, 0, 0;}}"
               : {operands} : "l"(a), "l"(b), "r"(e), "n"(SEL), "r"(keep));
}}
"""


CUDA = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>

typedef uint32_t u32;
typedef uint64_t u64;
typedef long long i64;
constexpr int BM = 256, THREADS = 384;
constexpr u32 PIECE = 64 * KA, A_BYTES = 4 * PIECE, E_BYTES = KA * 32, B_BYTES = BN * 128, B_PART = B_BYTES / CL;  // PIECE: 64 rows of KA / 2 values
constexpr u32 A_AT = 0, B_AT = SA * A_BYTES, E_AT = B_AT + SB * B_BYTES, PUTS = E_AT + SA * E_BYTES, BARS = PUTS + EPI * 8 * DEPTH * 512, SMEM = BARS + 16 * (SA + SB) + 8;
static_assert(!HOLD || (KA == 64 && HOLD <= SA && HOLD <= SB), "ring");
// column of y of a row g + 8 h of piece t: 32 warp + STEP_Q * (g / 2) + STEP_T * t + STEP_H * h + g % 2
constexpr int STEP_Q = EPI ? 2 : 8, STEP_T = EPI ? 16 : 4, STEP_H = EPI ? 8 : 2;
static_assert(SMEM <= 232448, "shared memory");

#if HINT
#define HINT_TEXT ".L2::cache_hint"
#define HINT_ARG(i) ", " #i
#else
#define HINT_TEXT ""
#define HINT_ARG(i) ""
#endif

__device__ __forceinline__ u32 s32(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void bar_init(u32 b, int n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(n) : "memory"); }
__device__ __forceinline__ void bar_expect(u32 b, int n) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(n) : "memory"); }
__device__ __forceinline__ void bar_arrive(u32 b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory"); }
__device__ __forceinline__ void bar_wait(u32 b, u32 ph) {
  asm volatile("{\n .reg .pred p;\nW_%=:\n mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n @p bra D_%=;\n bra W_%=;\nD_%=:\n}" ::"r"(b), "r"(ph) : "memory");
}
__device__ __forceinline__ void bar_arrive_at(u32 b, u32 block) {
  asm volatile("{\n .reg .b32 r;\n mapa.shared::cluster.u32 r, %0, %1;\n mbarrier.arrive.shared::cluster.b64 _, [r];\n}" ::"r"(b), "r"(block) : "memory");
}
__device__ __forceinline__ void tma_x(u32 dst, const CUtensorMap* m, u32 b, int c0, int c1, u64 policy) {
  if (CL == 2)
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster" HINT_TEXT " [%0], [%1, {%3, %4}], [%2], %5" HINT_ARG(%6) ";" ::"r"(dst), "l"(m), "r"(b), "r"(c0), "r"(c1), "h"((uint16_t)3), "l"(policy) : "memory");
  else
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes" HINT_TEXT " [%0], [%1, {%3, %4}], [%2]" HINT_ARG(%5) ";" ::"r"(dst), "l"(m), "r"(b), "r"(c0), "r"(c1), "l"(policy) : "memory");
}
__device__ __forceinline__ void tma_w(u32 dst, const CUtensorMap* m, u32 b, int k, int h, int w, u64 policy) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes" HINT_TEXT " [%0], [%1, {%3, %4, %4, %5, %6}], [%2]" HINT_ARG(%7) ";" ::"r"(dst), "l"(m), "r"(b), "r"(k), "r"(0), "r"(h), "r"(w), "l"(policy) : "memory");
}
__device__ __forceinline__ void bulk(u32 dst, const void* src, u32 bytes, u32 b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst), "l"(src), "r"(bytes), "r"(b) : "memory");
}
__device__ __forceinline__ u64 desc_x(u32 a) { return (u64)((a & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62); }
__device__ __forceinline__ u64 desc_w(u32 a) { return KA == 128 ? desc_x(a) : (u64)((a & 0x3FFFF) >> 4) | (1ull << 16) | (32ull << 32) | (2ull << 62); }
__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void mma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
@WGMMA@
__device__ __forceinline__ u32 lds(u32 a) {
  u32 v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(a) : "memory");
  return v;
}
__device__ __forceinline__ u32 pack(float a, float b) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
  return r;
}
__device__ __forceinline__ float ex2(float v) { asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(v)); return v; }
__device__ __forceinline__ float rcp(float v) { asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(v)); return v; }
__device__ __forceinline__ float tanh_of(float v) { asm("tanh.approx.f32 %0, %0;" : "+f"(v)); return v; }
// SiLU of two sums with their bias
__device__ __forceinline__ u32 two(float a, float b, float bias) {
  constexpr float L = -1.4426950408889634f;
  if (SILU == 1) {
    const float half = 0.5f * bias, g = fmaf(0.5f, a, half), h = fmaf(0.5f, b, half);
    return pack(fmaf(g, tanh_of(g), g), fmaf(h, tanh_of(h), h));
  }
  a += bias, b += bias;
  if (SILU == 0) return pack(a * rcp(1.f + ex2(L * a)), b * rcp(1.f + ex2(L * b)));
  const float e = 1.f + ex2(fminf(L * a, 60.f)), f = 1.f + ex2(fminf(L * b, 60.f)), r = rcp(e * f);  // one reciprocal for both
  return pack(a * f * r, b * e * r);
}
__device__ __forceinline__ u32 turned(u32 a) {
  u32 r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(a));
  return r;
}
__device__ __forceinline__ u32 bias_of(const uint16_t* bias, int c, int columns) { return c < columns ? (u32)__ldg(bias + c) : 0u; }

// Row r of a piece of 64 rows (a warp has 16): g = r % 8, h = r / 8 % 2.
// meta: [block of 256 rows][64 of k][consumer, t][thread]. A thread holds 16 of k of rows g (low half) and g + 8.
__global__ void __launch_bounds__(256) meta_kernel(const uint8_t* __restrict__ places, u32* __restrict__ meta, int columns, int KB, int total) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= total) return;
  const int g = i & 7, k0 = i >> 3 & 3, w = i >> 5 & 3, ct = i >> 7 & 3, rest = i >> 9, K4 = (KB + 3) / 4, kb = rest % K4 * 4 + k0, mb = rest / K4;
  if (kb >= KB) return;
  const int row = mb * 256 + (ct >> 1) * 128 + w * 32 + (g >> 1) * STEP_Q + (ct & 1) * STEP_T + (g & 1);
  uint4 a = {0x44444444, 0x44444444, 0x44444444, 0x44444444}, b = a;
  if (row < columns) {
    a = __ldcs((const uint4*)(places + ((i64)row * KB + kb) * 16));
    b = __ldcs((const uint4*)(places + ((i64)(row + STEP_H) * KB + kb) * 16));
  }
  uint4* out = (uint4*)(meta + ((i64)(mb * 2 * KB + 2 * kb) * 4 + ct) * 128 + w * 32 + g * 4);
  out[0] = make_uint4(__byte_perm(a.x, b.x, 0x5410), __byte_perm(a.x, b.x, 0x7632), __byte_perm(a.y, b.y, 0x5410), __byte_perm(a.y, b.y, 0x7632));
  out[128] = make_uint4(__byte_perm(a.z, b.z, 0x5410), __byte_perm(a.z, b.z, 0x7632), __byte_perm(a.w, b.w, 0x5410), __byte_perm(a.w, b.w, 0x7632));
}

#if TRACE
__device__ i64 trace[132 * 2 * 32 * 4];
#define STAMP(i) do { if ((threadIdx.x & 127) == 0) trace[((blockIdx.x * 2 + wg) * 32 + turn) * 4 + (i)] = clock64(); } while (0)
#else
#define STAMP(i)
#endif

struct Shape { int columns, tokens, KB, M, N; };  // KB: 128 of k; M, N: tiles of a cluster

__device__ __forceinline__ void place(const Shape& q, int u, int& m, int& n) {
  const int per = GN * q.M, g = u / per, r = u - g * per, wide = min(GN, q.N - g * GN);
  m = r / wide;
  n = g * GN + r - m * wide;
  if (SNAKE && (g & 1)) m = q.M - 1 - m;
}

__global__ void __launch_bounds__(THREADS, 1)
    sparse_kernel(const __grid_constant__ CUtensorMap map_w, const __grid_constant__ CUtensorMap map_x, const __grid_constant__ Shape q,
                  const u32* __restrict__ meta, const uint16_t* __restrict__ bias, uint16_t* __restrict__ y) {
  extern __shared__ __align__(1024) uint8_t raw[];
  const u32 base = s32(raw);
  if (base & 1023) asm volatile("trap;");
  const u32 full_a = base + BARS, empty_a = full_a + 8 * SA, full_b = empty_a + 8 * SA, empty_b = full_b + 8 * SB, lead = empty_b + 8 * SB;
  u32 rank = 0;
  if (CL == 2) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const int cid = blockIdx.x / CL, ncl = gridDim.x / CL, lane = threadIdx.x & 31, tiles = q.M * q.N;
  const int wid = __shfl_sync(~0u, threadIdx.x >> 5, 0), wg = wid >> 2;
  if (threadIdx.x == 0) {
    for (int i = 0; i < SA; i++) bar_init(full_a + 8 * i, 1), bar_init(empty_a + 8 * i, 2);
    for (int i = 0; i < SB; i++) bar_init(full_b + 8 * i, 1), bar_init(empty_b + 8 * i, 2 * CL);
    bar_init(lead, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (CL == 2) asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");

  if (wg == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    u64 keep = 0, stream = 0;
    if (HINT) {
      asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(keep));
      asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(stream));
    }
    if (wid == 8 && lane == 0) {  // x
      int s = 0;
      u32 ph = 1;
      for (int u = cid; u < tiles; u += ncl) {
        int m, n;
        place(q, u, m, n);
        const int row = n * BN + rank * (BN / CL);
#pragma unroll 1
        for (int kb = 0; kb < 2 * q.KB; kb++) {
          if (NO_LOADS && (u != cid || kb >= SB)) break;
          bar_wait(empty_b + 8 * s, ph);
          bar_expect(full_b + 8 * s, B_BYTES);
          tma_x(base + B_AT + s * B_BYTES + rank * B_PART, &map_x, full_b + 8 * s, (HOT ? kb & 3 : kb) * 64, row, keep);
          if (++s == SB) s = 0, ph ^= 1;
        }
      }
    } else if (wid == 9 && lane == 0) {  // W: values and metadata
      int s = 0;
      u32 ph = 1;
      if (PDL) asm volatile("griddepcontrol.wait;\nfence.proxy.async;" ::: "memory");
      for (int u = cid; u < tiles; u += ncl) {
        int m, n;
        place(q, u, m, n);
        const int mb = m * CL + rank, steps = q.KB * 128 / KA;
        const uint8_t* from = (const uint8_t*)(meta + (i64)mb * 2 * q.KB * 512);
#pragma unroll 1
        for (int ks = 0; ks < steps; ks++) {
          if (NO_LOADS && (u != cid || ks >= SA)) break;
          const u32 bar = full_a + 8 * s, to = base + A_AT + s * A_BYTES;
          const int k = HOT ? ks & 3 : ks;
          bar_wait(empty_a + 8 * s, ph);
          bar_expect(bar, A_BYTES + E_BYTES);
#pragma unroll
          for (int p = 0; p < 4; p++) tma_w(to + p * PIECE, &map_w, bar, k * (KA / 2), 2 * (p & 1), mb * 8 + (p >> 1) * 4, stream);
          bulk(base + E_AT + s * E_BYTES, from + (i64)k * E_BYTES, E_BYTES, bar);
          if (++s == SA) s = 0, ph ^= 1;
        }
      }
    }
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const int w4 = wid & 3, g = lane >> 2, column0 = wg * 128 + w4 * 32 + (g >> 1) * STEP_Q + (g & 1);
    const bool boss = (threadIdx.x & 127) < CL;
    const u64 first_a = desc_w(base + A_AT + wg * 2 * PIECE), first_b = desc_x(base + B_AT);
    const u32 e_at = base + E_AT + wg * 1024 + (threadIdx.x & 127) * 4;
    // a warp's buffer: 8 tokens of 64 bytes, pieces of 16 bytes permuted
    const u32 mine = base + PUTS + (wg * 4 + w4) * DEPTH * 512;
    const u32 put = mine + (lane & 7) * 64 + ((lane >> 3 ^ (lane & 7) >> 1) << 4), get = mine + g * 64 + (((lane & 3) ^ (g >> 1)) << 4);
    const int hold_at = 2 * q.KB > HOLD ? 2 * q.KB - HOLD : -1;
    int sa = 0, sb = 0, turn = 0;
    u32 pa = 0, pb = 0, off_a = 0, off_b = 0;
    float d0[BN / 2], d1[BN / 2];
#pragma unroll
    for (int i = 0; i < BN / 2; i++) d0[i] = d1[i] = 0.f;
    auto free_a = [&](int s) { if ((threadIdx.x & 127) == 0) bar_arrive(empty_a + 8 * s); };
    auto free_b = [&](int s) {
      if (CL == 2) { if (boss) bar_arrive_at(empty_b + 8 * s, threadIdx.x & 127); }
      else if (boss) bar_arrive(empty_b + 8 * s);
    };
    bool filled = false;
    for (int u = cid; u < tiles; u += ncl) {
      int m, n;
      place(q, u, m, n);
      u32 bias0, bias1, bias2, bias3;  // rows g and g + 8 of the first and the second piece
      {
        const int c = (m * CL + rank) * BM + column0;
        bias0 = bias_of(bias, c, q.columns), bias1 = bias_of(bias, c + STEP_H, q.columns);
        bias2 = bias_of(bias, c + STEP_T, q.columns), bias3 = bias_of(bias, c + STEP_T + STEP_H, q.columns);
      }
      STAMP(0);
#pragma unroll 1
      for (int kb = 0; kb < q.KB; kb++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const bool new_a = KA == 64 || h == 0;
          const bool held = HOLD && wg == 1 && 2 * kb + h == hold_at;
          if (held) {
            mma_wait<0>();
            free_b(sb == 0 ? SB - 1 : sb - 1);
            free_a(sa == 0 ? SA - 1 : sa - 1);
            bar_wait(lead, turn & 1);
          }
          if (new_a && (!NO_LOADS || !filled)) bar_wait(full_a + 8 * sa, pa);
          const u32 e = e_at + sa * E_BYTES + (KA == 128 ? h * 2048 : 0);
          const u32 e0 = lds(e), e1 = lds(e + 512);
          if (!NO_LOADS || !filled) bar_wait(full_b + 8 * sb, pb);
          const u64 a = first_a + off_a + (KA == 128 ? h * 4 : 0), b = first_b + off_b;
          mma_fence();
          multiply<0>(d0, a, b, e0, kb + h);
          multiply<0>(d1, a + (PIECE >> 4), b, e1, kb + h);
          multiply<1>(d0, a + 2, b + 4, e0, 1);
          multiply<1>(d1, a + (PIECE >> 4) + 2, b + 4, e1, 1);
          mma_commit();
          mma_wait<1>();
          if (kb + h > 0 && !held) {
            free_b(sb == 0 ? SB - 1 : sb - 1);
            if (new_a) free_a(sa == 0 ? SA - 1 : sa - 1);
          }
          off_b += B_BYTES >> 4;
          if (++sb == SB) { sb = 0, pb ^= 1, off_b = 0; if (NO_LOADS) filled = true; }
          if (KA == 64 || h == 1) {
            off_a += A_BYTES >> 4;
            if (++sa == SA) sa = 0, pa ^= 1, off_a = 0;
          }
        }
      }
      if (HOLD && threadIdx.x == 0) bar_arrive(lead);
      mma_wait<0>();
      free_b(sb == 0 ? SB - 1 : sb - 1);
      free_a(sa == 0 ? SA - 1 : sa - 1);
#pragma unroll
      for (int i = 0; i < BN / 2; i++) asm volatile("" : "+f"(d0[i]), "+f"(d1[i])::"memory");
      const int c = (m * CL + rank) * BM + wg * 128 + w4 * 32 + (lane & 3) * 8;
      int token = n * BN + g;
      uint16_t* to = y + (i64)token * q.columns + c;
      const int end = c < q.columns ? q.tokens : 0;
      const float b00 = __uint_as_float(bias0 << 16), b01 = __uint_as_float(bias1 << 16), b10 = __uint_as_float(bias2 << 16), b11 = __uint_as_float(bias3 << 16);
      STAMP(1);
#pragma unroll
      for (int j = 0; j < BN / 8; j++) {
        if (NO_EPILOGUE) {
          const float sum = d0[4 * j] + d0[4 * j + 1] + d0[4 * j + 2] + d0[4 * j + 3] + d1[4 * j] + d1[4 * j + 1] + d1[4 * j + 2] + d1[4 * j + 3];
          if (sum == 1.2345e-30f) y[j] = 1;
          continue;
        }
        const u32 r0 = two(d0[4 * j], d0[4 * j + 1], b00), r1 = two(d0[4 * j + 2], d0[4 * j + 3], b01);
        const u32 r2 = two(d1[4 * j], d1[4 * j + 1], b10), r3 = two(d1[4 * j + 2], d1[4 * j + 3], b11);
        uint4 v;
        if (EPI == 0) {
          v = make_uint4(turned(r0), turned(r1), turned(r2), turned(r3));
        } else {
          asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(put + j % DEPTH * 512), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
          __syncwarp();
          asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(get + j % DEPTH * 512) : "memory");
          if (DEPTH == 1) __syncwarp();
        }
        if (token < end && !NO_STORES) __stcs((uint4*)to, v);
        if (NO_STORES && v.x == 0x12345678 && v.y == 0x87654321) __stcs((uint4*)to, v);
        token += 8;
        to += (i64)8 * q.columns;
      }
      STAMP(2);
      turn++;
    }
  }
  if (CL == 2) asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

#define MUST(call) do { int error = int(call); if (error) return error; } while (0)

static int map_of(CUtensorMap& map, i64 data, int dims, const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box, CUtensorMapSwizzle swizzle) {
  static void* encode = nullptr;
  cudaDriverEntryPointQueryResult result;
  if (!encode) MUST(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &result));
  cuuint32_t one[5] = {1, 1, 1, 1, 1};
  CUresult error = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, dims, (void*)data, sizes, strides, box, one,
      CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return error == CUDA_SUCCESS ? 0 : 10000 + int(error);
}

// x, values, places, bias, y, meta, tokens, width, columns, stream
static int launch(const i64* a) {
  const i64 T = a[6], K = a[7], C = a[8];
  cudaStream_t stream = (cudaStream_t)a[9];
  CUtensorMap w, x;
  {
    const cuuint64_t row = K, sizes[5] = {(cuuint64_t)K / 2, 2, 4, 4, (cuuint64_t)C / 32}, strides[4] = {row, STEP_Q * row, STEP_H * row, 32 * row};
    const cuuint32_t box[5] = {KA / 2, 2, 4, 2, 4};
    MUST(map_of(w, a[1], 5, sizes, strides, box, KA == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B));
  }
  {
    const cuuint64_t sizes[2] = {(cuuint64_t)K, (cuuint64_t)T}, strides[1] = {2 * (cuuint64_t)K};
    const cuuint32_t box[2] = {64, BN / CL};
    MUST(map_of(x, a[0], 2, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_128B));
  }
  Shape q = {};
  q.columns = int(C), q.tokens = int(T), q.KB = int(K / 128), q.M = int((C + BM * CL - 1) / (BM * CL)), q.N = int((T + BN - 1) / BN);
  const int total = q.M * CL * ((q.KB + 3) / 4) * 512;
  meta_kernel<<<(total + 255) / 256, 256, 0, stream>>>((const uint8_t*)a[2], (u32*)a[5], q.columns, q.KB, total);
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = CL, attributes[0].val.clusterDim.y = 1, attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.blockDim = dim3(THREADS), config.dynamicSmemBytes = SMEM, config.stream = stream;
  config.attrs = attributes, config.numAttrs = 1;
  static int fits[64];
  int device;
  MUST(cudaGetDevice(&device));
  if (device > 63) return 10001;
  if (!fits[device]) {
    int sms, most;
    MUST(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
    config.gridDim = dim3(sms / CL * CL);
    MUST(cudaFuncSetAttribute(sparse_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM));
    MUST(cudaOccupancyMaxActiveClusters(&most, sparse_kernel, &config));
    fits[device] = most < sms / CL ? most : sms / CL;
  }
  const int ncl = fits[device] < q.M * q.N ? fits[device] : q.M * q.N;
  if (ncl < 1) return 10002;
  config.gridDim = dim3(CL * ncl);
  config.numAttrs = PDL ? 2 : 1;
  MUST(cudaLaunchKernelEx(&config, sparse_kernel, w, x, q, (const u32*)a[5], (const uint16_t*)a[3], (uint16_t*)a[4]));
  return cudaGetLastError();
}

static PyObject* run(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 10) { PyErr_SetString(PyExc_TypeError, "10 arguments"); return nullptr; }
  i64 a[10];
  for (int i = 0; i < 10; ++i) a[i] = PyLong_AsLongLong(given[i]);
  return PyLong_FromLong(launch(a));
}
#if TRACE
static PyObject* read_trace(PyObject*, PyObject* const* given, Py_ssize_t) {
  return PyLong_FromLong(cudaMemcpyFromSymbol((void*)PyLong_AsLongLong(given[0]), trace, sizeof(trace)));
}
#endif
static PyMethodDef methods[] = {
#if TRACE
  {"read", (PyCFunction)(void*)read_trace, METH_FASTCALL, ""},
#endif
  {"run", (PyCFunction)(void*)run, METH_FASTCALL, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "sparse_linear", "", -1, methods};
#define INIT(name) PyInit_##name
#define INIT_OF(name) INIT(name)
PyMODINIT_FUNC INIT_OF(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
"""


@functools.cache
def extension():
    constants = {"BN": BN, "KA": KA, "SA": SA, "SB": SB, "CL": CL, "GN": GN, "HOLD": HOLD, "SNAKE": SNAKE, "PDL": PDL, "EPI": EPI, "DEPTH": DEPTH, "HINT": HINT, "TRACE": TRACE}
    constants |= {"SILU": {"exact": 0, "tanh": 1, "pair": 2}[SILU], "NO_LOADS": int(PROBE == "no loads")}
    constants |= {"NO_EPILOGUE": int(PROBE == "no epilogue"), "HOT": int(PROBE == "hot"), "NO_STORES": int(PROBE == "no stores")}
    source = "".join(f"#define {name} {value}\n" for name, value in constants.items()) + CUDA.replace("@WGMMA@", wgmma(BN))
    flags = ["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a"]
    return load_inline("sparse_linear", "", source, no_implicit_headers=True, with_pytorch_error_handling=False, extra_cuda_cflags=flags)


def dense(x):
    """x, contiguous and at a multiple of 16 bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


class ModelNew(nn.Module):
    def forward(self, x, values, places, bias):
        given = (x, values, places, bias)
        if any(not t.is_cuda or t.device != x.device for t in given) or [t.dim() for t in given] != [2, 2, 2, 1]:
            raise ValueError("x, values and places must be matrices and bias a vector, on one GPU")
        if places.dtype != torch.uint8 or any(t.dtype != torch.bfloat16 for t in (x, values, bias)):
            raise ValueError("x, values and bias must be bf16, places uint8")
        (tokens, width), columns = x.shape, values.shape[0]
        if values.shape[1] * 2 != width or tuple(places.shape) != (columns, width // 8) or bias.shape[0] != columns:
            raise ValueError("values must be (columns, width / 2), places (columns, width / 8), bias (columns,)")
        if width % 128 or columns % 32 or not 0 < width <= 1 << 16 or not 0 < columns <= 1 << 20 or not 0 < tokens <= 1 << 20:
            raise ValueError("width must be a multiple of 128, columns of 32")
        x, values, places, bias = (dense(t) for t in given)
        rows = -(-columns // (256 * CL)) * CL * 256
        y = torch.empty(tokens, columns, dtype=x.dtype, device=x.device)
        meta = torch.empty(rows * width // 8, dtype=torch.uint8, device=x.device)
        with torch.cuda.device(x.device):
            stream = torch.cuda.current_stream().cuda_stream
            error = extension().run(*(t.data_ptr() for t in (x, values, places, bias, y, meta)), tokens, width, columns, stream)
        if error:
            raise RuntimeError(f"sparse_linear: CUDA error {error}")
        return y
