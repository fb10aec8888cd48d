"""Causal prefill attention (keys of 192, values of 128) for Hopper: persistent, TMA + wgmma, two consumer
warpgroups in ping-pong, a static balanced schedule of (head, 128 queries) tiles over the SMs."""

import ctypes
import hashlib
import heapq
import math
import os

import torch
from torch import nn
from torch.utils import cpp_extension

SRC = r'''#include <cuda.h>
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <stdint.h>
#include <dlfcn.h>

#ifndef LAZY
#define LAZY 1
#endif
#ifndef QREG
#define QREG 8   // k-steps (of 12) of Q in registers, the last ones
#endif
#ifndef PINGPONG
#define PINGPONG 1
#endif

constexpr int BM = 128, BN = 128, DK = 192, DV = 128;
constexpr int Q_BYTES = 64 * DK * 2;      // one warpgroup's rows
constexpr int K_BYTES = BN * DK * 2;
constexpr int V_BYTES = BN * DV * 2;
constexpr int OFF_Q = 0;
constexpr int OFF_K = OFF_Q + 2 * Q_BYTES;
constexpr int OFF_V = OFF_K + 2 * K_BYTES;
constexpr int OFF_BAR = OFF_V + 2 * V_BYTES;
constexpr int SMEM = OFF_BAR + 128 + 1024;

__device__ __forceinline__ void mbar_init(uint32_t b, int n) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(n));
}
__device__ __forceinline__ void mbar_expect(uint32_t b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbar_arrive(uint32_t b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory");
}
__device__ __forceinline__ void mbar_wait(uint32_t b, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred P1;\nLAB_WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 P1, [%0], %1;\n"
      "@P1 bra DONE;\nbra LAB_WAIT;\nDONE:\n}\n" ::"r"(b), "r"(parity) : "memory");
}
__device__ __forceinline__ void tma3(uint32_t dst, const CUtensorMap* m, int x, int y, int z, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
      ::"r"(dst), "l"(m), "r"(x), "r"(y), "r"(z), "r"(bar) : "memory");
}
__device__ __forceinline__ void tma3_prefetch(const CUtensorMap* m, int x, int y, int z) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];"
      ::"l"(m), "r"(x), "r"(y), "r"(z) : "memory");
}
__device__ __forceinline__ void bar_sync(int id) { asm volatile("bar.sync %0, 256;" ::"r"(id) : "memory"); }
__device__ __forceinline__ void bar_arrive(int id) { asm volatile("bar.arrive %0, 256;" ::"r"(id) : "memory"); }
__device__ __forceinline__ float ex2(float x) {
  float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y;
}
__device__ __forceinline__ uint32_t pack(float lo, float hi) {
  uint32_t r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r;
}
__device__ __forceinline__ uint64_t desc(uint32_t addr, uint32_t lbo, uint32_t sbo) {
  return (uint64_t)((addr & 0x3FFFF) >> 4) | ((uint64_t)(lbo >> 4) << 16) | ((uint64_t)(sbo >> 4) << 32) | (1ull << 62);
}
__device__ __forceinline__ void wg_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void wg_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }

template <int SCALE_D>
__device__ __forceinline__ void wgmma_ss(float (&d)[64], uint64_t da, uint64_t db) {
  asm volatile("{\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, %66, 1, 1, 0, 0;\n}\n"
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]) : "l"(da), "l"(db), "n"(SCALE_D));
}
__device__ __forceinline__ void wgmma_rs(float (&d)[64], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t db) {
  asm volatile("{\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n}\n"
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(db));
}
__device__ __forceinline__ void wgmma_rk(float (&d)[64], const uint32_t* a, uint64_t db) {
  asm volatile("{\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, 1, 1, 1, 0;\n}\n"
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(db));
}
template <int N>
__device__ __forceinline__ void wgmma_wait(float (&d)[64]) {
  asm volatile("wgmma.wait_group.sync.aligned %64;\n" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]) : "n"(N) : "memory");
}
__device__ __forceinline__ void touch(float (&d)[64]) { asm volatile("" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]) :: "memory"); }
__device__ __forceinline__ void touchp(uint32_t (&d)[32]) { asm volatile("" : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]), "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]), "+r"(d[16]), "+r"(d[17]), "+r"(d[18]), "+r"(d[19]), "+r"(d[20]), "+r"(d[21]), "+r"(d[22]), "+r"(d[23]), "+r"(d[24]), "+r"(d[25]), "+r"(d[26]), "+r"(d[27]), "+r"(d[28]), "+r"(d[29]), "+r"(d[30]), "+r"(d[31]) :: "memory"); }


// S[64,128] = Q[64,192] K[128,192]^T
__device__ __forceinline__ void gemm_qk(float (&s)[64], uint64_t dq, uint64_t dk, const uint32_t* qr) {
#pragma unroll
  for (int i = 0; i < 12; i++) {
    const uint64_t a = dq + (uint64_t)((i / 4) * 8192 + (i % 4) * 32) / 16;
    const uint64_t b = dk + (uint64_t)((i / 4) * 16384 + (i % 4) * 32) / 16;
    if (i >= 12 - QREG && i > 0) wgmma_rk(s, qr + 4 * (i - 12 + QREG), b);
    else if (i == 0) wgmma_ss<0>(s, a, b); else wgmma_ss<1>(s, a, b);
  }
  wg_commit();
}
// O[64,128] += P[64,128] V[128,128]
__device__ __forceinline__ void gemm_pv(float (&o)[64], uint32_t (&p)[32], uint64_t dv) {
#pragma unroll
  for (int i = 0; i < 8; i++) wgmma_rs(o, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3], dv + i * (2048 / 16));
  wg_commit();
}

struct T { static constexpr bool value = true; };
struct F { static constexpr bool value = false; };
struct Params {
  const int* table;   // [grid][max_tiles], head << 16 | q block, -1 ends
  __nv_bfloat16* out;
  int max_tiles, heads, queries, keys;
  float scale_log2;
};

__device__ __forceinline__ int num_blocks(int q0, int off, int keys) {
  int last = q0 + BM + off;
  return (min(last, keys) + BN - 1) / BN;
}

__global__ void __launch_bounds__(384, 1)
attn(const __grid_constant__ CUtensorMap mq, const __grid_constant__ CUtensorMap mk,
     const __grid_constant__ CUtensorMap mv, const Params p) {
  extern __shared__ uint8_t smem_raw[];
  const uint32_t base = ((uint32_t)__cvta_generic_to_shared(smem_raw) + 1023) & ~1023u;
  const uint32_t sQ = base + OFF_Q, sK = base + OFF_K, sV = base + OFF_V, bar = base + OFF_BAR;
  const uint32_t kfull = bar, kempty = bar + 16, vfull = bar + 32, vempty = bar + 48, qfull = bar + 64, qempty = bar + 80;
  const int wg = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++) {
      mbar_init(kfull + 8 * i, 1); mbar_init(vfull + 8 * i, 1); mbar_init(qfull + 8 * i, 1);
      mbar_init(kempty + 8 * i, 8); mbar_init(vempty + 8 * i, 8); mbar_init(qempty + 8 * i, 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const int off = p.keys - p.queries;
  const int* tab = p.table + blockIdx.x * p.max_tiles;

  if (wg == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 0) {
      int ks = 0, kp = 1, vs = 0, vp = 1, qp = 1;
      auto load_k = [&](int head, int j) {
        mbar_wait(kempty + 8 * ks, kp);
        const uint32_t b = kfull + 8 * ks, d = sK + ks * K_BYTES;
        mbar_expect(b, K_BYTES);
        for (int i = 0; i < 3; i++) tma3(d + i * 16384, &mk, i * 64, head, j * BN, b);
        ks ^= 1; if (!ks) kp ^= 1;
      };
      auto load_v = [&](int head, int j) {
        mbar_wait(vempty + 8 * vs, vp);
        const uint32_t b = vfull + 8 * vs, d = sV + vs * V_BYTES;
        mbar_expect(b, V_BYTES);
        for (int i = 0; i < 2; i++) tma3(d + i * 16384, &mv, i * 64, head, j * BN, b);
        vs ^= 1; if (!vs) vp ^= 1;
      };
      auto q_of = [&](int e) { return (e & 0xffff) * BM; };
      auto load_q = [&](int head, int q0) {
        for (int w = 0; w < 2; w++) {
          mbar_wait(qempty + 8 * w, qp);
          mbar_expect(qfull + 8 * w, Q_BYTES);
          for (int i = 0; i < 3; i++) tma3(sQ + w * Q_BYTES + i * 8192, &mq, i * 64, head, q0 + 64 * w, qfull + 8 * w);
        }
        qp ^= 1;
      };
      int ti = 0;
      int e = tab[0];
      if (e >= 0) {
        load_q(e >> 16, q_of(e));
        load_k(e >> 16, 0);
        while (true) {
          const int head = e >> 16, q0 = q_of(e), nb = num_blocks(q0, off, p.keys);
          ti++;
          const int e2 = ti < p.max_tiles ? tab[ti] : -1;
          if (e2 >= 0)
            for (int w = 0; w < 2; w++)
              for (int i = 0; i < 3; i++) tma3_prefetch(&mq, i * 64, e2 >> 16, q_of(e2) + 64 * w);
#pragma unroll 1
          for (int j = 1; j < nb; j++) { load_k(head, j); load_v(head, j - 1); }
          if (e2 >= 0) load_k(e2 >> 16, 0);
          load_v(head, nb - 1);
          if (e2 < 0) break;
          load_q(e2 >> 16, q_of(e2));
          e = e2;
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const int w = wg - 1;
    auto q_of = [&](int e) { return (e & 0xffff) * BM; };
    const int lane = threadIdx.x & 31, warp = (threadIdx.x / 32) & 3, g = lane / 4, t = lane & 3;
    const float c = p.scale_log2;
    const uint64_t dq = desc(sQ + w * Q_BYTES, 16, 1024);
    const uint64_t dk0 = desc(sK, 16, 1024), dv0 = desc(sV, 16384, 1024);
    int ks = 0, kp = 0, vs = 0, vp = 0, qp = 0;
    float s[64], o[64];
#pragma unroll
    for (int i = 0; i < 64; i++) s[i] = 0.f;
    uint32_t pr[32], qr[QREG * 4 + 1];
    float m0 = -1e30f, m1 = -1e30f, l0 = 0.f, l1 = 0.f;
    int e = tab[0];
    // the schedule gives every CTA at least one tile
#if PINGPONG
    if (w == 1) bar_arrive(1);
#endif
#pragma unroll
    for (int i = 0; i < 64; i++) o[i] = 0.f;

    // softmax of s in place: s becomes the weights; returns the factors of the running state
    auto softmax = [&](float& a0, float& a1, bool& scaled) {
      float x0 = s[0], x1 = s[2];
      float y0 = s[1], y1 = s[3];
#pragma unroll
      for (int i = 1; i < 16; i++) {
        x0 = fmaxf(x0, s[4 * i]); y0 = fmaxf(y0, s[4 * i + 1]);
        x1 = fmaxf(x1, s[4 * i + 2]); y1 = fmaxf(y1, s[4 * i + 3]);
      }
      x0 = fmaxf(x0, y0); x1 = fmaxf(x1, y1);
      x0 = fmaxf(x0, __shfl_xor_sync(0xffffffffu, x0, 1)); x1 = fmaxf(x1, __shfl_xor_sync(0xffffffffu, x1, 1));
      x0 = fmaxf(x0, __shfl_xor_sync(0xffffffffu, x0, 2)); x1 = fmaxf(x1, __shfl_xor_sync(0xffffffffu, x1, 2));
      x0 *= c; x1 *= c;
#if LAZY
      scaled = __any_sync(0xffffffffu, x0 > m0 + 8.f || x1 > m1 + 8.f);
      a0 = a1 = 1.f;
      if (scaled) {
#else
      scaled = true;
      {
#endif
        const float n0 = fmaxf(m0, x0), n1 = fmaxf(m1, x1);
        a0 = ex2(m0 - n0); a1 = ex2(m1 - n1);
        m0 = n0; m1 = n1;
        l0 *= a0; l1 *= a1;
      }
      float r0 = 0.f, r1 = 0.f, r2 = 0.f, r3 = 0.f;
#pragma unroll
      for (int i = 0; i < 16; i++) {
        s[4 * i] = ex2(fmaf(s[4 * i], c, -m0)); r0 += s[4 * i];
        s[4 * i + 1] = ex2(fmaf(s[4 * i + 1], c, -m0)); r1 += s[4 * i + 1];
        s[4 * i + 2] = ex2(fmaf(s[4 * i + 2], c, -m1)); r2 += s[4 * i + 2];
        s[4 * i + 3] = ex2(fmaf(s[4 * i + 3], c, -m1)); r3 += s[4 * i + 3];
      }
      l0 += r0 + r1; l1 += r2 + r3;
    };
    auto to_p = [&]() {
#pragma unroll
      for (int i = 0; i < 32; i++) pr[i] = pack(s[2 * i], s[2 * i + 1]);
    };
    auto mask = [&](int q0, int j) {
      const int lim0 = q0 + w * 64 + warp * 16 + g + off - j * BN - 2 * t, lim1 = lim0 + 8;
#pragma unroll
      for (int i = 0; i < 16; i++) {
        if (8 * i > lim0) s[4 * i] = -INFINITY;
        if (8 * i + 1 > lim0) s[4 * i + 1] = -INFINITY;
        if (8 * i > lim1) s[4 * i + 2] = -INFINITY;
        if (8 * i + 1 > lim1) s[4 * i + 3] = -INFINITY;
      }
    };
    auto load_qr = [&]() {
      const int row = warp * 16 + (lane & 15);
#pragma unroll
      for (int i = 12 - QREG; i < 12; i++) {
        const uint32_t a = sQ + w * Q_BYTES + (i / 4) * 8192 + row * 128 + (((2 * (i % 4) + (lane >> 4)) ^ (row & 7)) << 4);
        uint32_t* r = qr + 4 * (i - 12 + QREG);
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory");
      }
    };
    auto release = [&](uint32_t b) { if (lane == 0) mbar_arrive(b); };

    int head = e >> 16, q0 = q_of(e);
    int nb = num_blocks(q0, off, p.keys);
    // first scores
    mbar_wait(qfull + 8 * w, qp); qp ^= 1; load_qr();
    mbar_wait(kfull, kp);
#if PINGPONG
    bar_sync(1 + w);
#endif
    touch(s); wg_fence();
    gemm_qk(s, dq, dk0, qr);
#if PINGPONG
    bar_arrive(2 - w);
#endif
    wgmma_wait<0>(s);
    release(kempty); ks = 1;
    if (nb == 1) release(qempty + 8 * w);
    {
      if (q0 + w * 64 + off + 1 < BN) mask(q0, 0);
      float a0, a1; bool sc;
      softmax(a0, a1, sc);
      to_p();
    }
    int ti = 0;
    while (true) {
      ti++;
      const int e2 = ti < p.max_tiles ? tab[ti] : -1;
      const int full = min(max((q0 + w * 64 + off + 1) / BN, 1), nb);  // blocks before it need no mask
      auto step = [&](int j, auto masked) {
        mbar_wait(kfull + 8 * ks, kp);
#if PINGPONG
        bar_sync(1 + w);
#endif
        touch(s); touch(o); touchp(pr); wg_fence();
        gemm_qk(s, dq, dk0 + ks * (K_BYTES / 16), qr);
        mbar_wait(vfull + 8 * vs, vp);
        gemm_pv(o, pr, dv0 + vs * (V_BYTES / 16));
#if PINGPONG
        bar_arrive(2 - w);
#endif
        wgmma_wait<1>(s);
        release(kempty + 8 * ks);
        if (j == nb - 1) release(qempty + 8 * w);
        ks ^= 1; kp ^= (ks == 0);
        if (decltype(masked)::value) mask(q0, j);
        float a0, a1; bool sc;
        softmax(a0, a1, sc);
        wgmma_wait<0>(o);
        release(vempty + 8 * vs);
        vs ^= 1; vp ^= (vs == 0);
        if (sc) {
#pragma unroll
          for (int i = 0; i < 16; i++) { o[4 * i] *= a0; o[4 * i + 1] *= a0; o[4 * i + 2] *= a1; o[4 * i + 3] *= a1; }
        }
        to_p();
      };
      int j = 1;
#pragma unroll 1
      for (; j < full; j++) step(j, F{});
#pragma unroll 1
      for (; j < nb; j++) step(j, T{});

      // last block of this tile, together with the first scores of the next one
      const int row0 = q0 + w * 64 + warp * 16 + g, h0 = head;
      if (e2 >= 0) {
        head = e2 >> 16; q0 = q_of(e2); nb = num_blocks(q0, off, p.keys);
        mbar_wait(qfull + 8 * w, qp); qp ^= 1; load_qr();
        mbar_wait(kfull + 8 * ks, kp);
      }
#if PINGPONG
      bar_sync(1 + w);
#endif
      if (e2 >= 0) {
        touch(s); touch(o); touchp(pr); wg_fence();
        gemm_qk(s, dq, dk0 + ks * (K_BYTES / 16), qr);
        mbar_wait(vfull + 8 * vs, vp);
        gemm_pv(o, pr, dv0 + vs * (V_BYTES / 16));
#if PINGPONG
        bar_arrive(2 - w);
#endif
        wgmma_wait<1>(s);
        release(kempty + 8 * ks);
        if (nb == 1) release(qempty + 8 * w);
        ks ^= 1; kp ^= (ks == 0);
        wgmma_wait<0>(o);
        release(vempty + 8 * vs);
        vs ^= 1; vp ^= (vs == 0);
      } else {
        touch(o); touchp(pr); wg_fence();
        mbar_wait(vfull + 8 * vs, vp);
        gemm_pv(o, pr, dv0 + vs * (V_BYTES / 16));
#if PINGPONG
        if (w == 0) bar_arrive(2);
#endif
        wgmma_wait<0>(o);
        release(vempty + 8 * vs);
      }
      l0 += __shfl_xor_sync(0xffffffffu, l0, 1); l1 += __shfl_xor_sync(0xffffffffu, l1, 1);
      l0 += __shfl_xor_sync(0xffffffffu, l0, 2); l1 += __shfl_xor_sync(0xffffffffu, l1, 2);
      const float i0 = 1.f / l0, i1 = 1.f / l1;
      __nv_bfloat16* dst = p.out + ((size_t)row0 * p.heads + h0) * DV + t * 8;
#pragma unroll
      for (int r = 0; r < 2; r++) {
#pragma unroll
        for (int b = 0; b < 4; b++) {
          uint32_t x[4];
          const float inv = r ? i1 : i0;
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const int n = 4 * (4 * b + i) + 2 * r;
            x[i] = pack(o[n] * inv, o[n + 1] * inv);
          }
          // 4x4 transpose over the quad
          uint32_t y0 = __shfl_xor_sync(0xffffffffu, (t & 1) ? x[0] : x[1], 1);
          uint32_t y1 = __shfl_xor_sync(0xffffffffu, (t & 1) ? x[2] : x[3], 1);
          if (t & 1) { x[0] = y0; x[2] = y1; } else { x[1] = y0; x[3] = y1; }
          y0 = __shfl_xor_sync(0xffffffffu, (t & 2) ? x[0] : x[2], 2);
          y1 = __shfl_xor_sync(0xffffffffu, (t & 2) ? x[1] : x[3], 2);
          if (t & 2) { x[0] = y0; x[1] = y1; } else { x[2] = y0; x[3] = y1; }
          if (row0 + 8 * r < p.queries)
            *reinterpret_cast<uint4*>(dst + (size_t)(8 * r) * p.heads * DV + b * 32) = make_uint4(x[0], x[1], x[2], x[3]);
        }
      }
      if (e2 < 0) break;
#pragma unroll
      for (int i = 0; i < 64; i++) o[i] = 0.f;
      m0 = m1 = -1e30f; l0 = l1 = 0.f;
      if (q0 + w * 64 + off + 1 < BN) mask(q0, 0);
      float a0, a1; bool sc;
      softmax(a0, a1, sc);
      to_p();
    }
  }
}

typedef CUresult (*EncodeFn)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                             const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                             CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
static EncodeFn encode = nullptr;

static int make_map(CUtensorMap* m, void* ptr, int dim, int heads, int rows, int box_rows) {
  cuuint64_t dims[3] = {(cuuint64_t)dim, (cuuint64_t)heads, (cuuint64_t)rows};
  cuuint64_t strides[2] = {(cuuint64_t)dim * 2, (cuuint64_t)dim * heads * 2};
  cuuint32_t box[3] = {64, 1, (cuuint32_t)box_rows}, es[3] = {1, 1, 1};
  return (int)encode(m, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, ptr, dims, strides, box, es, CU_TENSOR_MAP_INTERLEAVE_NONE,
                     CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

extern "C" int mla_attn(void* q, void* k, void* v, void* out, void* table, int grid, int max_tiles, int heads,
                        int queries, int keys, float scale_log2, void* stream) {
  if (!encode) {
    void* h = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_GLOBAL);
    if (!h) return -1;
    encode = (EncodeFn)dlsym(h, "cuTensorMapEncodeTiled");
    if (!encode) return -2;
  }
  CUtensorMap mq, mk, mv;
  int r;
  if ((r = make_map(&mq, q, DK, heads, queries, 64))) return 1000 + r;
  if ((r = make_map(&mk, k, DK, heads, keys, BN))) return 2000 + r;
  if ((r = make_map(&mv, v, DV, heads, keys, BN))) return 3000 + r;
  cudaError_t e = cudaFuncSetAttribute(attn, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM);
  if (e) return (int)e;
  Params p{(const int*)table, (__nv_bfloat16*)out, max_tiles, heads, queries, keys, scale_log2};
  attn<<<grid, 384, SMEM, (cudaStream_t)stream>>>(mq, mk, mv, p);
  return (int)cudaGetLastError();
}
'''

FLAGS = os.environ.get("MLA_FLAGS", "").split()
_fn = None

ORDER = """
    62533537 53376235 35623753 37355362 51494642 49424651 46435149 43514946 606364 636460 646260 606462 646062
    626064 606463 646063 37504754 50475437 37475450 47375054 61434340 43404362 61404343 43406243 63424736 47423663
    42366347 63364742 42476336 47423663 63364247 36634247 51504543 55363661 45435150 36556136 48495141 49484151 48543849
    38544948 626264 626462 646261 626164 596463 646359 635964 596364 48544938 38494854 48385449 54384948
    50524442 50444252 61373752 52613737 51614134 41513461 34416151 61345141 61464734 46473461 34466147 47346146 55534437
    37445355 43375553 53553743 56484639 46483956 46395648 56394846 33524460 52446033 44526033 60335244 58524633 52463358
    33465852 33585246 54455039 45503954 39455450 39545045 50594138 41503859 38415950 38595041 53415935 35534159 35415953
    59355341 59494535 49354559 59453549 49355945 41515838 51413858 58383855 58385538 60484040 40484060 40406048 40604840
    54584334 54433458 34455851 58513445 52584534 45345258 34455852 58345245 57563936 56393657 36395756 36575639 57394053
    53403957 40535739 39575340 55573344 55443357 33445755 57335544 55574433 44553357 44335755 57335544 56564235 42563556
    35425656 56355642
"""  # for each SM the sizes (in blocks of 128 keys) of its tiles at the default sizes


def _load():
    global _fn
    if _fn is None:
        tag = hashlib.sha1((SRC + " ".join(FLAGS)).encode()).hexdigest()[:12]
        name = f"mla_attn_{tag}"
        folder = os.path.join(os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.expanduser("~/.cache/torch_extensions"), name)
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, "attn.cu")
        if not os.path.exists(path):
            part = f"{path}.{os.getpid()}"
            with open(part, "w") as f:
                f.write(SRC)
            os.replace(part, path)
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0a")
        cpp_extension.load(
            name, [path], build_directory=folder, is_python_module=False,
            extra_cuda_cflags=["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", *FLAGS],
        )
        fn = ctypes.CDLL(os.path.join(folder, name + ".so")).mla_attn
        fn.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int] * 5 + [ctypes.c_float, ctypes.c_void_p]
        fn.restype = ctypes.c_int
        _fn = fn
    return _fn


def _schedule(heads, queries, keys, sms, over=0.7):
    """Balanced assignment of tiles to SMs; for L2, tiles that run at the same time share few heads."""
    off = keys - queries
    rows = 128
    size = [(min(rows * (i + 1) + off, keys) + 127) // 128 for i in range((queries + rows - 1) // rows)]
    by_size = {}
    for i, s in enumerate(size):
        by_size.setdefault(s, []).append(i)
    items = sorted((s for s in size for _ in range(heads)), reverse=True)
    sms = min(sms, len(items))
    ready = (heads, queries, keys, sms) == (16, 4096, 8192, 132)
    bins = [[] for _ in range(sms)]
    queue = [(0.0, i) for i in range(sms)]
    for s in items:  # longest first
        load, i = heapq.heappop(queue)
        bins[i].append(s)
        heapq.heappush(queue, (load + s + over, i))
    load = [sum(b) + over * len(b) for b in bins]
    if not ready and len(items) <= 4096:  # then swaps between the fullest and another
        for _ in range(2000):
            i = max(range(sms), key=load.__getitem__)
            best = None
            for j in range(sms):
                for a, x in enumerate(bins[i]):
                    for b, y in enumerate(bins[j]):
                        if x > y:
                            top = max(load[i] - x + y, load[j] + x - y)
                            if top < load[i] - 1e-9 and (best is None or top < best[0]):
                                best = top, j, a, b
            if best is None:
                break
            _, j, a, b = best
            d = bins[i][a] - bins[j][b]
            bins[i][a], bins[j][b] = bins[j][b], bins[i][a]
            load[i] -= d
            load[j] += d
    # order inside a bin: long and short ones alternate between bins, so that each size is spread over time
    if ready:  # an order found by a search off line
        bins = [[int(x[i:i + 2]) for i in range(0, len(x), 2)] for x in ORDER.split()]
    starts = []
    for n, b in enumerate(bins):
        if not ready:
            b.sort(reverse=True)
            r = n % len(b)
            b[:] = b[r:] + b[:r]
        at = 0
        for pos, s in enumerate(b):
            starts.append((at, n, pos, s))
            at += s
    starts.sort()
    given = {s: 0 for s in by_size}
    rows = [[-1] * max(map(len, bins)) for _ in bins]
    for _, n, pos, s in starts:
        k = given[s]
        given[s] += 1
        ids = by_size[s]
        rows[n][pos] = (k // len(ids)) << 16 | ids[k % len(ids)]
    return rows


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self._tables = {}

    def forward(self, q, k, v):
        if not (q.dim() == k.dim() == v.dim() == 3 and q.dtype == k.dtype == v.dtype == torch.bfloat16 and q.is_cuda
                and k.device == q.device and v.device == q.device):
            raise ValueError("bfloat16 CUDA tensors of three dimensions are expected")
        queries, heads, dk = q.shape
        keys = k.shape[0]
        if dk != 192 or k.shape != (keys, heads, 192) or v.shape != (keys, heads, 128):
            raise ValueError("key dimension 192 and value dimension 128 are expected")
        if queries < 1 or heads < 1 or keys < queries or heads >= 32768 or queries > 65536 * 128:
            raise ValueError("at least as many keys as queries are expected")
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:
            raise ValueError("16-byte aligned tensors are expected")
        fn = _fn or _load()
        key = (q.device.index, heads, queries, keys)
        found = self._tables.get(key)
        if found is None:
            sms = torch.cuda.get_device_properties(q.device).multi_processor_count
            rows = _schedule(heads, queries, keys, sms)
            found = torch.tensor(rows, dtype=torch.int32).to(q.device), len(rows), len(rows[0])
            self._tables[key] = found
        table, grid, most = found
        out = torch.empty((queries, heads, 128), dtype=torch.bfloat16, device=q.device)
        with torch.cuda.device(q.device):
            rc = fn(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), table.data_ptr(), grid, most, heads, queries,
                    keys, 192 ** -0.5 * math.log2(math.e), torch.cuda.current_stream().cuda_stream)
        if rc:
            raise RuntimeError(f"mla_attn failed: {rc}")
        return out
