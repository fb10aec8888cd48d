"""Causal attention over packed documents, bf16, head width 128, grouped queries, for Hopper.

Persistent blocks: a producer thread (TMA) and two consumer warpgroups in turns (wgmma). A tile is 128 rows: the query heads of
a key head x 128 / group tokens of one document, so all rows share keys, and the diagonal is fine-grained. Tiles of all
documents are dealt out by a counter, longest first; each block derives that order from the offsets by itself. Keys are walked
from the diagonal back; the first block alone is masked. The last product of a tile runs with the first of the next. Tiles of
few keys take their weights as the sum of two bf16, since a rounding of the weights shows there.

Weights are taken relative to a maximum over some scores of the first block, and never rescaled: bf16 and fp32 have room for
2^126. A row whose sum leaves the safe range is computed again, slowly.
evals/trials/packed_attention states it.
"""
import math

import torch
from torch import nn
from torch.utils.cpp_extension import load_inline

BN = 128  # keys of a block
NN = 0  # columns of a narrow first block; 0: none
EXACT = 0  # the first block's second product takes only the keys it needs
QREG = 4  # how many of the 8 steps of k take Q from registers
DEFER = 0  # the output of a tile is written under the second scores of the next
TURNS = 1
PREC = 256  # tiles of so few keys, or an eighth of the mean document, take their weights as the sum of two bf16
PROBE = ""

SRC = r'''
#include <Python.h>
#include <cuda.h>
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <stdint.h>

constexpr int BN = @BN@, NN = @NN@, EXACT = @EXACT@, QREG = @QREG@, DEFER = @DEFER@, TURNS = @TURNS@, NOEXP = @NOEXP@;
constexpr int D = 128, NS = BN / 2, NP = BN / 4, STEPS = BN / 16, MAXD = 512;
constexpr int Q_BYTES = 64 * D * 2, KV_BYTES = BN * D * 2, PANEL = BN * 128;
constexpr int OFF_K = 2 * Q_BYTES, OFF_V = OFF_K + 2 * KV_BYTES, OFF_BAR = OFF_V + 2 * KV_BYTES, OFF_DOC = OFF_BAR + 512;
constexpr int SMEM = OFF_DOC + 5 * 4 * (MAXD + 1) + 1024;
static_assert(SMEM <= 232448 && BN % 32 == 0, "shared memory");

__device__ __forceinline__ void mbar_init(uint32_t b, int n) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(n) : "memory");
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
__device__ __forceinline__ float ex2(float x) {
  if (NOEXP) return fmaf(x, 1e-9f, 1.f);
  float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y;
}
__device__ __forceinline__ uint32_t pack(float lo, float hi) {
  uint32_t r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r;
}
__device__ __forceinline__ uint64_t desc(uint32_t addr, uint32_t lbo) {
  return (uint64_t)((addr & 0x3FFFF) >> 4) | ((uint64_t)(lbo >> 4) << 16) | ((uint64_t)(1024 >> 4) << 32) | (1ull << 62);
}
__device__ __forceinline__ void wg_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void wg_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
@WGMMA@

// S[64, 2 N] = Q[64, 128] K[2 N, 128]^T
template <int N> __device__ __forceinline__ void gemm_qk(float (&s)[N], uint64_t dq, uint64_t dk, const uint32_t* qr) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const uint64_t b = dk + (uint64_t)((i / 4) * PANEL + (i % 4) * 32) / 16;
    if (i >= 8 - QREG) {
      const uint32_t* a = qr + 4 * (i - 8 + QREG);
      if (i == 0) mma_qk<0>(s, a[0], a[1], a[2], a[3], b); else mma_qk<1>(s, a[0], a[1], a[2], a[3], b);
    } else {
      const uint64_t a = dq + (uint64_t)((i / 4) * 8192 + (i % 4) * 32) / 16;
      if (i == 0) mma_qk<0>(s, a, b); else mma_qk<1>(s, a, b);
    }
  }
}

struct T { static constexpr bool value = true; };
struct F { static constexpr bool value = false; };
struct Params {
  const int* offsets;
  const __nv_bfloat16 *q, *k, *v;
  __nv_bfloat16* out;
  unsigned* counter;      // 0 between launches
  int documents, heads, key_heads, lg, prec;   // 1 << lg query heads share a key head
  float c;                // scale log2(e)
};
struct Old { int t0, keys, end, head; float l0, l1; };   // a tile whose output is not yet written
struct Rows { float m0, m1, l0, l1; };

// over every fourth group of 8 columns; the first column is visible
template <int N> __device__ __forceinline__ void maxima(float (&s)[N], float& x0, float& x1) {
  x0 = fmaxf(s[0], s[1]); x1 = fmaxf(s[2], s[3]);
#pragma unroll
  for (int i = 4; i < N / 4; i += 4) {
    x0 = fmaxf(x0, fmaxf(s[4 * i], s[4 * i + 1])); x1 = fmaxf(x1, fmaxf(s[4 * i + 2], s[4 * i + 3]));
  }
  x0 = fmaxf(x0, __shfl_xor_sync(0xffffffffu, x0, 1)); x1 = fmaxf(x1, __shfl_xor_sync(0xffffffffu, x1, 1));
  x0 = fmaxf(x0, __shfl_xor_sync(0xffffffffu, x0, 2)); x1 = fmaxf(x1, __shfl_xor_sync(0xffffffffu, x1, 2));
}
template <int N> __device__ __forceinline__ void weights(float (&s)[N], Rows& r, float c) {
  float r0 = 0.f, r1 = 0.f, r2 = 0.f, r3 = 0.f;
#pragma unroll
  for (int i = 0; i < N / 4; i++) {
    s[4 * i] = ex2(fmaf(s[4 * i], c, -r.m0)); r0 += s[4 * i];
    s[4 * i + 1] = ex2(fmaf(s[4 * i + 1], c, -r.m0)); r1 += s[4 * i + 1];
    s[4 * i + 2] = ex2(fmaf(s[4 * i + 2], c, -r.m1)); r2 += s[4 * i + 2];
    s[4 * i + 3] = ex2(fmaf(s[4 * i + 3], c, -r.m1)); r3 += s[4 * i + 3];
  }
  r.l0 += r0 + r1; r.l1 += r2 + r3;
}

// one row by a warp, with a running maximum
__device__ __forceinline__ void again(const Params& p, int token, int head, int from, int lane) {
  const int kh = head >> p.lg;
  auto four = [&](const __nv_bfloat16* x, int t, int heads, int h, float (&y)[4]) {
    const uint2 a = *reinterpret_cast<const uint2*>(x + ((size_t)t * heads + h) * D + 4 * lane);
    y[0] = __uint_as_float(a.x << 16); y[1] = __uint_as_float(a.x & 0xffff0000u);
    y[2] = __uint_as_float(a.y << 16); y[3] = __uint_as_float(a.y & 0xffff0000u);
  };
  float q[4], k[4], v[4], o[4] = {0.f, 0.f, 0.f, 0.f}, m = -INFINITY, l = 0.f;
  four(p.q, token, p.heads, head, q);
#pragma unroll 1
  for (int t = from; t <= token; t++) {
    four(p.k, t, p.key_heads, kh, k);
    four(p.v, t, p.key_heads, kh, v);
    float x = q[0] * k[0] + q[1] * k[1] + q[2] * k[2] + q[3] * k[3];
#pragma unroll
    for (int i = 1; i < 32; i *= 2) x += __shfl_xor_sync(0xffffffffu, x, i);
    x *= p.c;
    const float n = fmaxf(m, x), a = m == n ? 1.f : exp2f(m - n), w = exp2f(x - n);
    m = n; l = l * a + w;
#pragma unroll
    for (int i = 0; i < 4; i++) o[i] = o[i] * a + w * v[i];
  }
  *reinterpret_cast<uint2*>(p.out + ((size_t)token * p.heads + head) * D + 4 * lane) = make_uint2(pack(o[0] / l, o[1] / l), pack(o[2] / l, o[3] / l));
}

__global__ void __launch_bounds__(384, 1)
packed(const __grid_constant__ CUtensorMap mq, const __grid_constant__ CUtensorMap mk,
       const __grid_constant__ CUtensorMap mv, const Params p) {
  extern __shared__ uint8_t smem_raw[];
  uint8_t* const aligned = smem_raw + ((1024 - ((uint32_t)__cvta_generic_to_shared(smem_raw) & 1023)) & 1023);
  const uint32_t base = (uint32_t)__cvta_generic_to_shared(aligned);
  const uint32_t sQ = base, sK = base + OFF_K, sV = base + OFF_V, bar = base + OFF_BAR;
  const uint32_t kfull = bar, kempty = bar + 16, vfull = bar + 32, vempty = bar + 48, qfull = bar + 64, qempty = bar + 80,
                 tfull = bar + 96, tempty = bar + 112, slot = bar + 128;
  int* const level = (int*)(aligned + OFF_DOC);  // per document, most tiles first: tiles,
  int* const first = level + MAXD + 1;           // tiles of the segments before it (a segment: levels that the same documents reach),
  int* const start = first + MAXD + 1;           // tokens
  int* const stop = start + MAXD + 1;
  int* const offsets = stop + MAXD + 1;
  const int wg = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int lg = p.lg, TM = 128 >> lg;
  for (int d = threadIdx.x; d <= p.documents; d += 384) offsets[d] = p.offsets[d];
  if (threadIdx.x == 0) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&mq) : "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&mk) : "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&mv) : "memory");
    for (int i = 0; i < 2; i++) {
      mbar_init(kfull + 8 * i, 1); mbar_init(vfull + 8 * i, 1); mbar_init(qfull + 8 * i, 1); mbar_init(tfull + 8 * i, 1);
      mbar_init(kempty + 8 * i, 8); mbar_init(vempty + 8 * i, 8); mbar_init(qempty + 8 * i, 4); mbar_init(tempty + 8 * i, 8);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  // documents by falling number of tiles
  __syncthreads();
  for (int d = threadIdx.x; d < p.documents; d += 384) {
    auto tiles_of = [&](int e) { return max(offsets[e + 1] - offsets[e] + TM - 1, 0) >> (7 - lg); };
    const int n = tiles_of(d);
    int rank = 0;
    for (int e = 0; e < p.documents; e++) { const int x = tiles_of(e); rank += x > n || (x == n && e < d); }
    level[rank] = n; start[rank] = offsets[d]; stop[rank] = offsets[d + 1];
  }
  if (threadIdx.x == 0) level[p.documents] = 0;
  __syncthreads();
  for (int d = threadIdx.x; d <= p.documents; d += 384) {
    int sum = 0;
    for (int e = 0; e < d; e++) sum += level[e];
    first[d] = sum - d * level[d];
  }
  __syncthreads();

  if (wg == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      const unsigned tiles = first[p.documents] * p.key_heads;
      int ks = 0, kp = 1, vs = 0, vp = 1, qp = 1, ts = 0, tp = 1, seg = 1;
      int t0, head, from, blocks, keys;   // of a tile
      auto load = [&](const CUtensorMap* m, uint32_t to, uint32_t full, uint32_t empty, int& s, int& ph, int h, int token) {
        mbar_wait(empty + 8 * s, ph);
        mbar_expect(full + 8 * s, KV_BYTES);
        for (int i = 0; i < 2; i++) tma3(to + s * KV_BYTES + i * PANEL, m, i * 64, h, token, full + 8 * s);
        s ^= 1; if (!s) ph ^= 1;
      };
      auto load_k = [&](int h, int token) { load(&mk, sK, kfull, kempty, ks, kp, h, token); };
      auto load_v = [&](int h, int token) { load(&mv, sV, vfull, vempty, vs, vp, h, token); };
      auto load_q = [&]() {
        for (int w = 0; w < 2; w++) {
          mbar_wait(qempty + 8 * w, qp);
          mbar_expect(qfull + 8 * w, Q_BYTES);
          for (int i = 0; i < 2; i++) tma3(sQ + w * Q_BYTES + i * 8192, &mq, i * 64, head << lg, t0 + (w * 64 >> lg), qfull + 8 * w);
        }
        qp ^= 1;
      };
      auto publish = [&](unsigned index) {   // decodes it, too
        int end = 0;
        keys = 0;
        if (index < tiles) {
          const int r = index / p.key_heads;
          head = index - r * p.key_heads;
          while (first[seg] <= r) ++seg;
          const int at = r - first[seg - 1], down = at / seg, doc = at - down * seg;
          keys = (level[seg - 1] - down) * TM;
          from = start[doc]; end = stop[doc];
          t0 = from + keys - TM;
          blocks = (keys + BN - 1) / BN;
        }
        mbar_wait(tempty + 8 * ts, tp);
        asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(slot + 16 * ts), "r"(t0), "r"(keys), "r"(end), "r"(head) : "memory");
        mbar_arrive(tfull + 8 * ts);
        ts ^= 1; if (!ts) tp ^= 1;
      };
      publish(blockIdx.x);
      if (keys) {
        load_q();
        load_k(head, from + (blocks - 1) * BN);
        while (true) {
          unsigned ticket;
          asm volatile("atom.global.inc.u32 %0, [%1], %2;" : "=r"(ticket) : "l"(p.counter), "r"(tiles - 1) : "memory");
          const int h = head, f = from;
#pragma unroll 1
          for (int j = blocks - 1; j > 0; j--) { load_k(h, f + (j - 1) * BN); load_v(h, f + j * BN); }
          publish(ticket + gridDim.x);
          if (keys) load_k(head, from + (blocks - 1) * BN);
          load_v(h, f);
          if (!keys) break;
          load_q();
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int w = wg - 1;
    const int lane = threadIdx.x & 31, warp = (threadIdx.x / 32) & 3, g = lane / 4, t = lane & 3;
    const float c = p.c;
    const uint64_t dq = desc(sQ + w * Q_BYTES, 16), dk0 = desc(sK, 16), dv0 = desc(sV, PANEL);
    int ks = 0, kp = 0, vs = 0, vp = 0, qp = 0, ts = 0, tp = 0;
    float s[NS], o[64];
    uint32_t pr[NP], qr[QREG * 4 + 1];
#pragma unroll
    for (int i = 0; i < NS; i++) s[i] = 0.f;
#pragma unroll
    for (int i = 0; i < 64; i++) o[i] = 0.f;
#pragma unroll
    for (int i = 0; i < NP; i++) pr[i] = 0;
    Rows rows = {0.f, 0.f, 0.f, 0.f};
    int t0, keys, end, head;                // of the tile
    int kst = 0;                            // steps of 16 keys of the pending second product
    const int row = w * 64 + warp * 16 + g;

    auto release = [&](uint32_t b) { if (lane == 0) mbar_arrive(b); };
    auto turn_begin = [&]() { if (TURNS) asm volatile("bar.sync %0, 256;" ::"r"(1 + w) : "memory"); };
    auto turn_end = [&]() { if (TURNS) asm volatile("bar.arrive %0, 256;" ::"r"(2 - w) : "memory"); };
    auto free_k = [&]() { release(kempty + 8 * ks); ks ^= 1; kp ^= (ks == 0); };
    auto free_v = [&]() { release(vempty + 8 * vs); vs ^= 1; vp ^= (vs == 0); };
    auto next_tile = [&]() __attribute__((always_inline)) {
      mbar_wait(tfull + 8 * ts, tp);
      asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];" : "=r"(t0), "=r"(keys), "=r"(end), "=r"(head) : "r"(slot + 16 * ts) : "memory");
      __syncwarp();
      if (lane == 0 && keys >= 0) mbar_arrive(tempty + 8 * ts);  // keys: always, it waits for the load
      ts ^= 1; tp ^= (ts == 0);
    };
    auto load_qr = [&]() __attribute__((always_inline)) {
      const int r = warp * 16 + (lane & 15);
#pragma unroll
      for (int i = 8 - QREG; i < 8; i++) {
        const uint32_t a = sQ + w * Q_BYTES + (i / 4) * 8192 + r * 128 + (((2 * (i % 4) + (lane >> 4)) ^ (r & 7)) << 4);
        uint32_t* x = qr + 4 * (i - 8 + QREG);
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(a) : "memory");
      }
    };
    auto gemm_pv = [&](auto exact) __attribute__((always_inline)) {        // O[64, 128] += P[64, keys] V[keys, 128]
      const uint64_t dv = dv0 + vs * (KV_BYTES / 16);
#pragma unroll
      for (int i = 0; i < STEPS; i++) {
        if (decltype(exact)::value && EXACT && i >= 2 && i % 2 == 0) {
          if (i >= kst) break;
          touch(o); touch(pr); wg_fence();
        }
        mma_pv(o, pr[4 * i], pr[4 * i + 1], pr[4 * i + 2], pr[4 * i + 3], dv + i * (2048 / 16));
      }
      if (decltype(exact)::value && EXACT) { touch(o); wg_fence(); }
    };
    bool bad = false;                       // a tile that is to be computed again
    const uint32_t mine = bar + 256 + 16 * (threadIdx.x / 32 - 4);
    auto mend = [&]() __attribute__((always_inline)) {
      if (bad) {
        int at, n, e, kh;
        __syncwarp();
        asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];" : "=r"(at), "=r"(n), "=r"(e), "=r"(kh) : "r"(mine) : "memory");
        __syncwarp();
#pragma unroll 1
        for (int i = 0; i < 16; i++) {
          const int rr = w * 64 + warp * 16 + i, token = at + (rr >> lg);
          if (token < e) again(p, token, (kh << lg) + (rr & ((1 << lg) - 1)), at + TM - n, lane);
        }
        bad = false;
      }
    };
    auto epilogue = [&](const Old& z) __attribute__((always_inline)) {
      const int at = z.t0, e = z.end, kh = z.head;
      float l0 = z.l0, l1 = z.l1;
      l0 += __shfl_xor_sync(0xffffffffu, l0, 1); l1 += __shfl_xor_sync(0xffffffffu, l1, 1);
      l0 += __shfl_xor_sync(0xffffffffu, l0, 2); l1 += __shfl_xor_sync(0xffffffffu, l1, 2);
      if (__any_sync(0xffffffffu, !(l0 < 1e25f && l1 < 1e25f))) {
        bad = true;
        if (lane == 0) asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(mine), "r"(at), "r"(z.keys), "r"(e), "r"(kh) : "memory");
        return;
      }
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float inv = 1.f / (r ? l1 : l0);
        const int rr = row + 8 * r, token = at + (rr >> lg), h = (kh << lg) + (rr & ((1 << lg) - 1));
        __nv_bfloat16* dst = p.out + ((size_t)token * p.heads + h) * D + t * 8;
#pragma unroll
        for (int b = 0; b < 4; b++) {
          uint32_t x[4];
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
          if (token < e) *reinterpret_cast<uint4*>(dst + b * 32) = make_uint4(x[0], x[1], x[2], x[3]);
        }
      }
    };
    // what bf16 leaves of the weights, times the values
    auto add_low = [&](auto& a, auto exact) __attribute__((always_inline)) {
      constexpr int N = sizeof(a) / sizeof(float);
#pragma unroll
      for (int i = 0; i < NP; i++) {
        if (i < N / 2) {
          const uint32_t h = pack(a[2 * i], a[2 * i + 1]);
          pr[i] = pack(a[2 * i] - __uint_as_float(h << 16), a[2 * i + 1] - __uint_as_float(h & 0xffff0000u));
        } else {
          pr[i] = 0;
        }
      }
      mbar_wait(vfull + 8 * vs, vp);
      touch(o); touch(pr); wg_fence();
      gemm_pv(exact);
      wg_commit();
      wait0(o, pr);
    };
    // the first scores of a tile (N columns x 2 a thread pair), with the last product of the tile before, if there is one
    Old old;
    const int prec = p.prec;                // at least BN; tiles of more keys may defer the output of the tile before
    auto begin = [&](auto& a, auto prev) __attribute__((always_inline)) {
      constexpr int N = sizeof(a) / sizeof(float);
      mbar_wait(qfull + 8 * w, qp); qp ^= 1; load_qr();
      mbar_wait(kfull + 8 * ks, kp);
      turn_begin();
      touch(a); touch(o); touch(pr); wg_fence();
      gemm_qk(a, dq, dk0 + ks * (KV_BYTES / 16), qr);
      wg_commit();
      if (decltype(prev)::value) {
        mbar_wait(vfull + 8 * vs, vp);
        touch(o); touch(pr); wg_fence();
        gemm_pv(T{});
        wg_commit();
      }
      turn_end();
      if (decltype(prev)::value) wait1(a); else wait0(a);
      free_k();
      if (QREG == 8 || keys <= BN) release(qempty + 8 * w);  // behind the products, which take the registers
      const int rem = keys - (keys - 1) / BN * BN;          // columns of this block that the tile needs
      const int off = rem - TM - 2 * t, lim0 = off + (row >> lg), lim1 = off + ((row + 8) >> lg);
      auto mask = [&](int i) __attribute__((always_inline)) {
        if (8 * i > lim0) a[4 * i] = -INFINITY;
        if (8 * i + 1 > lim0) a[4 * i + 1] = -INFINITY;
        if (8 * i > lim1) a[4 * i + 2] = -INFINITY;
        if (8 * i + 1 > lim1) a[4 * i + 3] = -INFINITY;
      };
      constexpr int SPLIT = NN ? NN : 64, LOW = 2 * N > SPLIT ? SPLIT / 8 : 0;   // groups that are visible if TM is small and rem large
      if (LOW && rem - TM < SPLIT) {
#pragma unroll
        for (int i = 0; i < LOW; i++) mask(i);
      }
#pragma unroll
      for (int i = LOW; i < N / 4; i++) mask(i);
      float x0, x1;
      maxima(a, x0, x1);
      old.l0 = rows.l0; old.l1 = rows.l1;
      rows.m0 = x0 * c; rows.m1 = x1 * c; rows.l0 = rows.l1 = 0.f;
      weights(a, rows, c);
      if (decltype(prev)::value) {
        wait0(o, pr);
        free_v();
      }
      kst = EXACT ? (rem + 15) / 16 : STEPS;
      if (!DEFER || keys <= prec) {
        if (decltype(prev)::value) epilogue(old);
#pragma unroll
        for (int i = 0; i < 64; i++) o[i] = 0.f;
        if (keys <= prec) add_low(a, T{});
      }
#pragma unroll
      for (int i = 0; i < NP; i++) pr[i] = i < N / 2 ? pack(a[2 * i], a[2 * i + 1]) : 0u;
    };
    auto begin_any = [&](auto prev) __attribute__((always_inline)) {
#if @NN@
      if (keys - (keys - 1) / BN * BN <= NN) {
        float a[NN / 2];
#pragma unroll
        for (int i = 0; i < NN / 2; i++) a[i] = 0.f;
        begin(a, prev);
        return;
      }
#endif
      begin(s, prev);
    };
    // scores of the next block, values of this one; before the values, with `deferred`, the output of the tile before
    auto step = [&](auto exact, auto precise, auto deferred, bool last) __attribute__((always_inline)) {
      mbar_wait(kfull + 8 * ks, kp);
      turn_begin();
      touch(s); touch(o); touch(pr); wg_fence();
      gemm_qk(s, dq, dk0 + ks * (KV_BYTES / 16), qr);
      wg_commit();
      if (decltype(deferred)::value) {
        turn_end();
        if (old.keys) epilogue(old);
#pragma unroll
        for (int i = 0; i < 64; i++) o[i] = 0.f;
        mbar_wait(vfull + 8 * vs, vp);
        turn_begin();
      } else {
        mbar_wait(vfull + 8 * vs, vp);
      }
      touch(o); touch(pr); wg_fence();
      gemm_pv(exact);
      wg_commit();
      turn_end();
      wait1(s);
      free_k();
      if (QREG < 8 && last) release(qempty + 8 * w);
      weights(s, rows, c);
      wait0(o, pr);
      free_v();
      if (decltype(precise)::value) add_low(s, F{});
#pragma unroll
      for (int i = 0; i < NP; i++) pr[i] = pack(s[2 * i], s[2 * i + 1]);
    };

    next_tile();
    if (keys) {
      if (TURNS && w == 1) turn_end();
      old.keys = 0;
      begin_any(F{});
      while (true) {
        int j = (keys - 1) / BN;
        if (keys <= prec) {
#pragma unroll 1
          while (j > 0) { step(T{}, T{}, F{}, --j == 0); kst = STEPS; }
        } else if (j > 0) {
          if (DEFER) step(T{}, F{}, T{}, --j == 0);
          else if (EXACT) step(T{}, F{}, F{}, --j == 0);
#pragma unroll 1
          while (j > 0) step(F{}, F{}, F{}, --j == 0);
          kst = STEPS;
        }
        mend();
        old.t0 = t0; old.keys = keys; old.end = end; old.head = head;
        next_tile();
        if (keys) {
          begin_any(T{});
        } else {
          mbar_wait(vfull + 8 * vs, vp);
          turn_begin();
          touch(o); touch(pr); wg_fence();
          gemm_pv(T{});
          wg_commit();
          if (w == 0) turn_end();
          wait0(o, pr);
          old.l0 = rows.l0; old.l1 = rows.l1;
          epilogue(old);
          mend();
          break;
        }
      }
    }
  }
}

typedef CUresult (*EncodeFn)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                             const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                             CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
static EncodeFn encode = nullptr;

static int make_map(CUtensorMap* m, void* ptr, int heads, int tokens, int box_heads, int box_tokens) {
  cuuint64_t dims[3] = {D, (cuuint64_t)heads, (cuuint64_t)tokens};
  cuuint64_t strides[2] = {D * 2, (cuuint64_t)D * 2 * heads};
  cuuint32_t box[3] = {64, (cuuint32_t)box_heads, (cuuint32_t)box_tokens}, es[3] = {1, 1, 1};
  return (int)encode(m, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, ptr, dims, strides, box, es, CU_TENSOR_MAP_INTERLEAVE_NONE,
                     CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

static PyObject* run(PyObject*, PyObject* const* given, Py_ssize_t) {
  // q k v out offsets counter tokens documents heads key_heads lg prec grid stream c
  long long a[14];
  for (int i = 0; i < 14; ++i) a[i] = PyLong_AsLongLong(given[i]);
  const double c = PyFloat_AsDouble(given[14]);
  if (!encode) {
    void* f = nullptr; cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found)) return PyLong_FromLong(-1);
    encode = (EncodeFn)f;
    if (!encode) return PyLong_FromLong(-2);
  }
  if (cudaFuncSetAttribute(packed, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM)) return PyLong_FromLong(-3);
  const int tokens = (int)a[6], heads = (int)a[8], key_heads = (int)a[9], lg = (int)a[10];
  CUtensorMap mq, mk, mv;
  int r;
  if ((r = make_map(&mq, (void*)a[0], heads, tokens, 1 << lg, 64 >> lg))) return PyLong_FromLong(1000 + r);
  if ((r = make_map(&mk, (void*)a[1], key_heads, tokens, 1, BN))) return PyLong_FromLong(2000 + r);
  if ((r = make_map(&mv, (void*)a[2], key_heads, tokens, 1, BN))) return PyLong_FromLong(3000 + r);
  Params p{(const int*)a[4], (const __nv_bfloat16*)a[0], (const __nv_bfloat16*)a[1], (const __nv_bfloat16*)a[2], (__nv_bfloat16*)a[3], (unsigned*)a[5], (int)a[7], heads, key_heads, lg, (int)a[11], (float)c};
  packed<<<(unsigned)a[12], 384, SMEM, (cudaStream_t)a[13]>>>(mq, mk, mv, p);
  return PyLong_FromLong(cudaGetLastError());
}
static PyMethodDef methods[] = {{"run", (PyCFunction)(void*)run, METH_FASTCALL, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "packed", "", -1, methods};
#define INIT(name) PyInit_##name
#define INIT_OF(name) INIT(name)
PyMODINIT_FUNC INIT_OF(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
'''


def _wgmma():
    def regs(n, first=0):
        return ", ".join(f"%{first + i}" for i in range(n))

    def ops(name, n, kind="f"):
        return ", ".join(f'"+{kind}"({name}[{i}])' for i in range(n))

    np_ = BN // 4
    mma = "wgmma.mma_async.sync.aligned"
    code = ""
    for cols in sorted({BN, NN} - {0}):
        n = cols // 2
        code += f"""
template <int Z> __device__ __forceinline__ void mma_qk(float (&d)[{n}], uint64_t a, uint64_t b) {{
  asm volatile("{mma}.m64n{cols}k16.f32.bf16.bf16 {{{regs(n)}}}, %{n}, %{n + 1}, %{n + 2}, 1, 1, 0, 0;\\n"
    : {ops("d", n)} : "l"(a), "l"(b), "n"(Z));
}}
template <int Z> __device__ __forceinline__ void mma_qk(float (&d)[{n}], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b) {{
  asm volatile("{mma}.m64n{cols}k16.f32.bf16.bf16 {{{regs(n)}}}, {{{regs(4, n)}}}, %{n + 4}, %{n + 5}, 1, 1, 0;\\n"
    : {ops("d", n)} : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(Z));
}}"""
    code += f"""
__device__ __forceinline__ void mma_pv(float (&d)[64], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b) {{
  asm volatile("{mma}.m64n128k16.f32.bf16.bf16 {{{regs(64)}}}, {{{regs(4, 64)}}}, %68, 1, 1, 1, 1;\\n"
    : {ops("d", 64)} : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}}"""
    for n in sorted({BN // 2, NN // 2, 64} - {0}):
        code += f"""
__device__ __forceinline__ void touch(float (&d)[{n}]) {{ asm volatile("" : {ops("d", n)} :: "memory"); }}
__device__ __forceinline__ void wait1(float (&d)[{n}]) {{ asm volatile("wgmma.wait_group.sync.aligned 1;\\n" : {ops("d", n)} :: "memory"); }}
__device__ __forceinline__ void wait0(float (&d)[{n}]) {{ asm volatile("wgmma.wait_group.sync.aligned 0;\\n" : {ops("d", n)} :: "memory"); }}"""
    return code + f"""
__device__ __forceinline__ void touch(uint32_t (&d)[{np_}]) {{ asm volatile("" : {ops("d", np_, "r")} :: "memory"); }}
__device__ __forceinline__ void wait0(float (&o)[64], uint32_t (&p)[{np_}]) {{
  asm volatile("wgmma.wait_group.sync.aligned 0;\\n" : {ops("o", 64)}, {ops("p", np_, "r")} :: "memory");
}}
"""


_run = None
_counters = {}


def _load():
    global _run
    if _run is None:
        src = SRC.replace("@WGMMA@", _wgmma())
        for name, value in (("BN", BN), ("NN", NN), ("EXACT", EXACT), ("QREG", QREG), ("DEFER", DEFER), ("TURNS", TURNS), ("NOEXP", int(PROBE == "no exp"))):
            src = src.replace(f"@{name}@", str(value))
        _run = load_inline(
            f"packed_{BN}_{NN}_{EXACT}_{QREG}_{DEFER}_{TURNS}_{int(bool(PROBE))}", "", src, no_implicit_headers=True,
            with_pytorch_error_handling=False, extra_cuda_cflags=["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a"],
        ).run
    return _run


class ModelNew(nn.Module):
    def forward(self, q, k, v, offsets):
        if q.dim() != 3 or k.dim() != 3 or any(x.dtype != torch.bfloat16 or x.device != q.device or not x.is_cuda for x in (q, k, v)):
            raise ValueError("bfloat16 CUDA tensors (tokens, heads, 128) are expected")
        tokens, heads, width = q.shape
        key_heads, documents = k.shape[1], offsets.numel() - 1
        if width != 128 or k.shape != (tokens, key_heads, 128) or v.shape != k.shape or not 1 <= key_heads <= heads or heads % key_heads:
            raise ValueError("width 128, and query heads a multiple of the key heads, are expected")
        group = heads // key_heads
        if group & (group - 1) or group > 64 or BN % (128 // group):
            raise ValueError("this many query heads a key head are not served")
        if offsets.dim() != 1 or offsets.dtype != torch.int32 or offsets.device != q.device or not 1 <= documents <= 512:
            raise ValueError("int32 offsets of 1 to 512 documents are expected")
        if not 1 <= tokens < 1 << 24:
            raise ValueError("1 to 2^24 - 1 tokens are expected")
        shape = q
        q, k, v, offsets = (x.contiguous() for x in (q, k, v, offsets))
        q, k, v = (x.clone() if x.data_ptr() % 16 else x for x in (q, k, v))
        run = _run or _load()
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        with torch.cuda.device(q.device):
            stream = torch.cuda.current_stream().cuda_stream
            found = _counters.get((q.device.index, stream))
            if found is None:
                sms = torch.cuda.get_device_properties(q.device).multi_processor_count
                found = _counters[q.device.index, stream] = torch.zeros(1, dtype=torch.int32, device=q.device), sms
            counter, sms = found
            error = run(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), offsets.data_ptr(), counter.data_ptr(), tokens, documents,
                        heads, key_heads, group.bit_length() - 1, max(PREC, BN, tokens // documents // 8), sms, stream, width**-0.5 * math.log2(math.e))
        if error:
            raise RuntimeError(f"packed: error {error}")
        return out if shape.is_contiguous() else torch.empty_like(shape).copy_(out)
