"""softmax(q k^T scale + bias) v with a bias (heads, tokens, tokens) shared by the batch, head width 64, bf16, for Hopper.

A block takes 128 queries of one head in two batch entries, so that its bias is read once for both. Each of two consumer
warpgroups holds two tiles of 64 rows, the same queries in both entries: while it takes exponentials of one, the tensor
cores work on the other. The bias starts the accumulators of the scores. Blocks of a cluster take neighbouring queries and
share keys and values by multicast.
Weights are taken relative to the maximum of the first 64 keys, without rescaling: fp32 and bf16 have room for 2^83 more.
A row whose sum leaves the safe range is computed again, slowly.
"""
import torch
from torch import nn
from torch.utils.cpp_extension import load_inline

CL = 2  # blocks of a cluster
POLY = 0  # of 32 exponentials, how many take a polynomial in place of MUFU
EARLY = 1  # the next bias is read from shared memory before the exponentials
HOLD = 1
FENCE2 = 0
SPLIT = 0
SHARE = 1  # both tiles of a warpgroup read the bias once
PROBE = ""

SRC = r'''
#include <Python.h>
#include <cuda.h>
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <stdint.h>

constexpr int CL = @CL@, POLY = @POLY@, EARLY = @EARLY@, SHARE = @SHARE@, HOLD = @HOLD@, FENCE2 = @FENCE2@, SPLIT = @SPLIT@, NOEXP = @NOEXP@, NOREAD = @NOREAD@, NOLOAD = @NOLOAD@;
constexpr int BN = 64, ST = 4, BOX = 64 * 128;                  // a box: 64 rows of 64
constexpr int OFF_V = 2 * BOX, OFF_B = 4 * BOX, STAGE = 6 * BOX;   // K of both entries, V of both (of the block before), bias
constexpr int OFF_Q = ST * STAGE, OFF_BAR = OFF_Q + 4 * BOX;
constexpr int SMEM = OFF_BAR + 256 + 1024;
constexpr float LOG2E = 1.4426950408889634f;
static_assert(SMEM <= 232448, "shared memory");


__device__ __forceinline__ void mbar_init(uint32_t b, int n) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(n) : "memory");
}
__device__ __forceinline__ void mbar_expect(uint32_t b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbar_arrive(uint32_t b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory");
}
__device__ __forceinline__ void mbar_arrive_at(uint32_t b, int block) {
  asm volatile("{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [r];\n}" ::"r"(b), "r"(block) : "memory");
}
__device__ __forceinline__ void mbar_wait(uint32_t b, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred P1;\nLAB_WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 P1, [%0], %1;\n"
      "@P1 bra DONE;\nbra LAB_WAIT;\nDONE:\n}\n" ::"r"(b), "r"(parity) : "memory");
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
__device__ __forceinline__ void tma2(uint32_t dst, const CUtensorMap* m, int x, int y, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
      ::"r"(dst), "l"(m), "r"(x), "r"(y), "r"(bar) : "memory");
}
__device__ __forceinline__ void tma2_all(uint32_t dst, const CUtensorMap* m, int x, int y, uint32_t bar) {
  if (CL == 1) { tma2(dst, m, x, y, bar); return; }
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
      ::"r"(dst), "l"(m), "r"(x), "r"(y), "r"(bar), "h"((uint16_t)((1 << CL) - 1)) : "memory");
}
__device__ __forceinline__ float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ float ex2_poly(float x) {   // to 1e-4; x <= 127
  x = fmaxf(x, -126.f);
  const float t = __fadd_rn(x, 12582912.f), f = __fadd_rn(x, -__fadd_rn(t, -12582912.f));
  const float p = __fmaf_rn(f, __fmaf_rn(f, __fmaf_rn(f, 0.055171669f, 0.242611132f), 0.693260989f), 0.999928074f);
  return __int_as_float(__float_as_int(p) + (__float_as_int(t) << 23));
}
__device__ __forceinline__ uint32_t pack(float lo, float hi) {
  uint32_t r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r;
}
__device__ __forceinline__ uint32_t desc(uint32_t addr) { return ((addr & 0x3FFFF) >> 4) | 1u << 16; }  // the low word; the high one is constant
__device__ __forceinline__ void wg_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void ldsm4(uint32_t* x, uint32_t a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(a) : "memory");
}
@WGMMA@

struct Params {
  const __nv_bfloat16 *q, *k, *v, *bias;
  __nv_bfloat16* out;
  int tokens, heads, batch, tiles, groups, pairs;   // tiles of clusters: (head, group of queries, pair of batch entries)
};

// 16 rows again, by a warp, with a running maximum, in fp32
__device__ __forceinline__ void again(const Params& p, int entry, int head, int row0, int lane) {
#pragma unroll 1
  for (int r = row0; r < row0 + 16; r++) {
    const size_t base = (size_t)(entry * p.heads + head) * p.tokens;
    const uint4* q = reinterpret_cast<const uint4*>(p.q + (base + r) * 64);
    const __nv_bfloat16* bias = p.bias + ((size_t)head * p.tokens + r) * p.tokens;
    float m = -INFINITY, l = 0.f, a = 0.f, b = 0.f;
#pragma unroll 1
    for (int c = 0; c < p.tokens; c += 32) {
      const uint4* k = reinterpret_cast<const uint4*>(p.k + (base + c + lane) * 64);
      float s = 0.f;
#pragma unroll 1
      for (int i = 0; i < 8; i++) {
        const uint4 x = q[i], y = k[i];
        const uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int u = 0; u < 4; u++) {
          s = fmaf(__uint_as_float(xs[u] << 16), __uint_as_float(ys[u] << 16), s);
          s = fmaf(__uint_as_float(xs[u] & 0xffff0000u), __uint_as_float(ys[u] & 0xffff0000u), s);
        }
      }
      s = (s * 0.125f + __bfloat162float(bias[c + lane])) * LOG2E;
      float top = s;
#pragma unroll
      for (int d = 16; d; d >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, d));
      top = fmaxf(top, m);
      const float ref = top == -INFINITY ? 0.f : top;
      const float f = exp2f(m - ref), e = exp2f(s - ref);
      float sum = e;
#pragma unroll
      for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, d);
      l = l * f + sum; a *= f; b *= f; m = top;
#pragma unroll 1
      for (int i = 0; i < 32; i++) {
        const float w = __shfl_sync(0xffffffffu, e, i);
        const uint32_t x = *reinterpret_cast<const uint32_t*>(p.v + (base + c + i) * 64 + 2 * lane);
        a = fmaf(w, __uint_as_float(x << 16), a); b = fmaf(w, __uint_as_float(x & 0xffff0000u), b);
      }
    }
    *reinterpret_cast<uint32_t*>(p.out + (base + r) * 64 + 2 * lane) = pack(a / l, b / l);
  }
}

template <int N> struct I { static constexpr int value = N; };
static_assert(ST == 4, "stages");

__global__ void __launch_bounds__(384, 1)
bias_attention(const __grid_constant__ CUtensorMap mq, const __grid_constant__ CUtensorMap mk,
               const __grid_constant__ CUtensorMap mv, const __grid_constant__ CUtensorMap mb, const __grid_constant__ Params p) {
  extern __shared__ uint8_t smem_raw[];
  const uint32_t base = ((uint32_t)__cvta_generic_to_shared(smem_raw) + 1023) & ~1023u;
  const uint32_t sQ = base + OFF_Q, bar = base + OFF_BAR;
  const uint32_t full = bar, empty = bar + 8 * ST, qfull = bar + 16 * ST, qempty = qfull + 8;
  const int wg = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int rank = CL == 1 ? 0 : (int)(blockIdx.x % CL), first = blockIdx.x / CL, stride = gridDim.x / CL;
  const int blocks = p.tokens / BN;
  if (threadIdx.x == 0) {
    for (int i = 0; i < ST; i++) { mbar_init(full + 8 * i, 1); mbar_init(empty + 8 * i, 8 * CL); }
    *reinterpret_cast<float*>(smem_raw + (bar + 240 - (uint32_t)__cvta_generic_to_shared(smem_raw))) = LOG2E;
    mbar_init(qfull, 1); mbar_init(qempty, 8);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  cluster_sync();

  if (wg == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 0) {
      uint32_t n = 0, qp = 1;
      int va = 0, vb = 0;                     // rows of V of the block before
      auto element = [&](bool keys, bool values, int ka, int kb, int bx, int by) {
        const uint32_t s = n % ST, at = base + s * STAGE, f = full + 8 * s;
        mbar_wait(empty + 8 * s, (n / ST & 1) ^ 1);
        mbar_expect(f, (keys ? (NOLOAD ? 2 : 4) * BOX : 0) + (values ? 2 * BOX : 0));
        if (keys) {
          if (!NOLOAD) tma2(at + OFF_B, &mb, bx, by, f);
          if (0 % CL == rank) tma2_all(at, &mk, 0, ka, f);
          if (1 % CL == rank) tma2_all(at + BOX, &mk, 0, kb, f);
        }
        if (values) {
          if (2 % CL == rank) tma2_all(at + OFF_V, &mv, 0, va, f);
          if (3 % CL == rank) tma2_all(at + OFF_V + BOX, &mv, 0, vb, f);
        }
        ++n;
      };
#pragma unroll 1
      for (int tile = first; tile < p.tiles; tile += stride) {
        const int pair = tile % p.pairs, rest = tile / p.pairs, group = rest % p.groups, head = rest / p.groups;
        const int q0 = (group * CL + rank) * 128;
        const int rowa = (2 * pair * p.heads + head) * p.tokens, rowb = (min(2 * pair + 1, p.batch - 1) * p.heads + head) * p.tokens;
        mbar_wait(qempty, qp); qp ^= 1;
        mbar_expect(qfull, 4 * BOX);
        for (int i = 0; i < 4; i++) tma2(sQ + i * BOX, &mq, 0, (i & 1 ? rowb : rowa) + q0 + (i >> 1) * 64, qfull);
#pragma unroll 1
        for (int j = 0; j < blocks; j++) {
          element(true, n > 0, rowa + j * BN, rowb + j * BN, j * BN, head * p.tokens + q0);
          va = rowa + j * BN; vb = rowb + j * BN;
        }
      }
      element(false, true, 0, 0, 0, 0);
    }
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const int w = wg - 1, lane = threadIdx.x & 31, warp = (threadIdx.x / 32) & 3, g = lane / 4, t = lane & 3;
    const uint32_t d0 = desc(base);
    const int lrow = warp * 16 + (lane & 15);
    const uint32_t lm = lrow * 128 + (((lane >> 4) ^ (lrow & 7)) << 4);   // of ldmatrix: pairs of chunks 2 i by ^ 32 i
    const uint32_t bias0 = base + OFF_B + w * BOX + lm;
    float sa[32], sb[32], oa[32], ob[32];
    uint32_t pa[16], pb[16], qa[16], qb[16], br[16];
#pragma unroll
    for (int i = 0; i < 32; i++) sa[i] = sb[i] = oa[i] = ob[i] = 0.f;
#pragma unroll
    for (int i = 0; i < 16; i++) pa[i] = pb[i] = br[i] = 0u;
    float ma0, ma1, mb0, mb1, la0, la1, lb0, lb1;
    uint32_t ph = 0, qp = 0;   // ph: parity of the stages' present turn

    auto release = [&](uint32_t m) __attribute__((always_inline)) {
      const uint32_t b = empty + 8 * m;
      if (CL == 1) asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, %1, 0;\n@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(b), "r"(lane) : "memory");
      else if (lane < CL) mbar_arrive_at(b, lane);
    };
    auto wait_full = [&](uint32_t m) __attribute__((always_inline)) { mbar_wait(full + 8 * m, ph); };
    auto read_bias = [&](uint32_t m) __attribute__((always_inline)) {
      const uint32_t at = bias0 + m * STAGE;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (NOREAD) { br[4 * i] = br[4 * i + 1] = br[4 * i + 2] = br[4 * i + 3] = 0; }
        else ldsm4(br + 4 * i, at ^ (32 * i));
      }
    };
    auto start = [&](float (&s)[32]) __attribute__((always_inline)) {     // accumulators begin with the bias
#pragma unroll
      for (int i = 0; i < 16; i++) {
        s[2 * i] = __uint_as_float(br[i] << 16); s[2 * i + 1] = __uint_as_float(br[i] & 0xffff0000u);
      }
    };
    // the same by other instructions, or ptxas takes both from one unpacking, which serializes the products
    auto start2 = [&](float (&s)[32]) __attribute__((always_inline)) {
#pragma unroll
      for (int i = 0; i < 16; i++) {
        s[2 * i] = __uint_as_float(__byte_perm(br[i], 0, 0x1044)); s[2 * i + 1] = __uint_as_float(__byte_perm(br[i], 0, 0x3244));
      }
    };
    // never true: keeps ptxas from moving the exponentials behind the wait that follows
    auto hold = [&](float x, float y) __attribute__((always_inline)) {
      asm volatile("{\n.reg .pred p;\nsetp.eq.f32 p, %1, 0f800000C5;\n@p st.shared.f32 [%0], %1;\nsetp.eq.f32 p, %2, 0f800000C5;\n@p st.shared.f32 [%0], %2;\n}"
                   ::"r"(bar + 248), "f"(x), "f"(y) : "memory");
    };
    float log2e = LOG2E;
    auto weights = [&](float (&s)[32], uint32_t (&pr)[16], float m0, float m1, float& l0, float& l1) __attribute__((always_inline)) {
      float r0 = 0.f, r1 = 0.f, r2 = 0.f, r3 = 0.f;
#pragma unroll
      for (int j = 0; j < 8; j++) {
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float y = fmaf(s[4 * j + i], SPLIT == 2 ? log2e : LOG2E, i < 2 ? -m0 : -m1);
          if (NOEXP) x[i] = fmaf(y, 1e-9f, 1.f);
          else if ((4 * j + i) * POLY % 32 < POLY) x[i] = ex2_poly(y);
          else x[i] = ex2(y);
        }
        r0 += x[0]; r1 += x[1]; r2 += x[2]; r3 += x[3];
        pr[2 * j] = pack(x[0], x[1]); pr[2 * j + 1] = pack(x[2], x[3]);
      }
      l0 += r0 + r1; l1 += r2 + r3;
    };
    // keeps ptxas from moving the exponentials that follow between the products before
    auto split = [&](uint32_t m) __attribute__((always_inline)) {
      if (SPLIT == 1) wait_full(m);
      if (SPLIT == 2) asm volatile("ld.volatile.shared.f32 %0, [%1];" : "=f"(log2e) : "r"(bar + 240) : "memory");
      if (SPLIT == 3) asm volatile("bar.warp.sync 0xffffffff;" ::: "memory");
      if (SPLIT == 4) asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, %0, %1;\n@p trap;\n}" :: "r"(bar), "r"(m) : "memory");
    };
    auto maxima = [&](float (&s)[32], float& m0, float& m1) __attribute__((always_inline)) {
      float x0 = fmaxf(s[0], s[1]), x1 = fmaxf(s[2], s[3]);
#pragma unroll
      for (int j = 1; j < 8; j++) { x0 = fmaxf(x0, fmaxf(s[4 * j], s[4 * j + 1])); x1 = fmaxf(x1, fmaxf(s[4 * j + 2], s[4 * j + 3])); }
      x0 = fmaxf(x0, __shfl_xor_sync(0xffffffffu, x0, 1)); x1 = fmaxf(x1, __shfl_xor_sync(0xffffffffu, x1, 1));
      x0 = fmaxf(x0, __shfl_xor_sync(0xffffffffu, x0, 2)); x1 = fmaxf(x1, __shfl_xor_sync(0xffffffffu, x1, 2));
      m0 = x0 == -INFINITY ? 0.f : x0 * LOG2E; m1 = x1 == -INFINITY ? 0.f : x1 * LOG2E;
    };
    // false: the rows of this warp are to be computed again
    auto epilogue = [&](float (&o)[32], float l0, float l1, int entry, int head, int row0) __attribute__((always_inline)) {
      l0 += __shfl_xor_sync(0xffffffffu, l0, 1); l1 += __shfl_xor_sync(0xffffffffu, l1, 1);
      l0 += __shfl_xor_sync(0xffffffffu, l0, 2); l1 += __shfl_xor_sync(0xffffffffu, l1, 2);
      const bool good = l0 > 1e-20f && l0 < 1e25f && l1 > 1e-20f && l1 < 1e25f;
      if (!(NOEXP || NOREAD || NOLOAD) && !__all_sync(0xffffffffu, good)) return false;
      __nv_bfloat16* dst = p.out + ((size_t)(entry * p.heads + head) * p.tokens + row0 + g) * 64 + t * 8;
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float inv = 1.f / (r ? l1 : l0);
#pragma unroll
        for (int b = 0; b < 2; b++) {
          uint32_t x[4];
#pragma unroll
          for (int i = 0; i < 4; i++) { const int c = 4 * (4 * b + i) + 2 * r; x[i] = pack(o[c] * inv, o[c + 1] * inv); }
          uint32_t y0 = __shfl_xor_sync(0xffffffffu, (t & 1) ? x[0] : x[1], 1);
          uint32_t y1 = __shfl_xor_sync(0xffffffffu, (t & 1) ? x[2] : x[3], 1);
          if (t & 1) { x[0] = y0; x[2] = y1; } else { x[1] = y0; x[3] = y1; }
          y0 = __shfl_xor_sync(0xffffffffu, (t & 2) ? x[0] : x[2], 2);
          y1 = __shfl_xor_sync(0xffffffffu, (t & 2) ? x[1] : x[3], 2);
          if (t & 2) { x[0] = y0; x[1] = y1; } else { x[2] = y0; x[3] = y1; }
          *reinterpret_cast<uint4*>(dst + r * 8 * 64 + b * 32) = make_uint4(x[0], x[1], x[2], x[3]);
        }
      }
      return true;
    };

    wait_full(0);
#pragma unroll 1
    for (int tile = first; tile < p.tiles; tile += stride) {
      const int pair = tile % p.pairs, rest = tile / p.pairs, group = rest % p.groups, head = rest / p.groups;
      // Q, times 1/8
      mbar_wait(qfull, qp); qp ^= 1;
#pragma unroll
      for (int i = 0; i < 4; i++) { ldsm4(qa + 4 * i, (sQ + 2 * w * BOX + lm) ^ (32 * i)); ldsm4(qb + 4 * i, (sQ + (2 * w + 1) * BOX + lm) ^ (32 * i)); }
#pragma unroll
      for (int i = 0; i < 16; i++) {
        asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(qa[i]) : "r"(0x3E003E00u));
        asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(qb[i]) : "r"(0x3E003E00u));
      }
      __syncwarp();
      if (lane == 0) mbar_arrive(qempty);
      {
        const uint32_t dk = d0;
        read_bias(0);
        start(sa); start2(sb);
        touch(sa); fence(qa);
        gemm_qk(sa, qa, dk);
        wg_commit();
        touch(sb); fence(qb);
        gemm_qk(sb, qb, dk + BOX / 16);
        wg_commit();
      }
      la0 = la1 = lb0 = lb1 = 0.f;
#pragma unroll
      for (int i = 0; i < 32; i++) oa[i] = ob[i] = 0.f;
      wait<0>(sa, oa, pa); wait<0>(sb, ob, pb);
      maxima(sa, ma0, ma1);
      maxima(sb, mb0, mb1);
      auto step = [&](auto stage) __attribute__((always_inline)) {     // block j lies in stage j % 4
        constexpr uint32_t S = decltype(stage)::value;
        const uint32_t ds = d0 + S * (STAGE / 16);
        // the first tile, while the products of the second run
        if (EARLY) { wait_full(S); read_bias(S); }
        weights(sa, pa, ma0, ma1, la0, la1);
        if (HOLD) hold(la0, la1);
        if (!EARLY) { wait_full(S); read_bias(S); }
        start(sa);
        wait<0>(sb, ob, pb);
        release((S + 3) % ST);
        touch(oa); touch(sa); fence(pa);
        gemm_pv(oa, pa, ds + OFF_V / 16);
        if (FENCE2) { touch(sa); fence(qa); }
        gemm_qk(sa, qa, ds);
        wg_commit();
        split(S);
        // the second, while those of the first run
        weights(sb, pb, mb0, mb1, lb0, lb1);
        if (HOLD) hold(lb0, lb1);
        if (!SHARE) read_bias(S);
        start2(sb);
        wait<0>(sa, oa, pa);
        touch(ob); touch(sb); fence(pb);
        gemm_pv(ob, pb, ds + (OFF_V + BOX) / 16);
        if (FENCE2) { touch(sb); fence(qb); }
        gemm_qk(sb, qb, ds + BOX / 16);
        wg_commit();
        if (SPLIT == 2) split(S);
      };
#pragma unroll 1
      for (int j = 0;;) {
        step(I<1>{}); step(I<2>{}); step(I<3>{});
        ph ^= 1;
        if ((j += 4) == blocks) break;
        step(I<0>{});
      }
      const uint32_t dv = d0 + OFF_V / 16;
      weights(sa, pa, ma0, ma1, la0, la1);
      wait_full(0);
      wait<0>(sb, ob, pb);
      release(ST - 1);
      touch(oa); fence(pa);
      gemm_pv(oa, pa, dv);
      wg_commit();
      weights(sb, pb, mb0, mb1, lb0, lb1);
      wait<0>(sa, oa, pa);
      touch(ob); fence(pb);
      gemm_pv(ob, pb, dv + BOX / 16);
      wg_commit();
      const int row0 = (group * CL + rank) * 128 + w * 64 + warp * 16, entries = min(2, p.batch - 2 * pair);
      const bool gooda = epilogue(oa, la0, la1, 2 * pair, head, row0);
      wait<0>(sb, ob, pb);
      const bool goodb = entries < 2 || epilogue(ob, lb0, lb1, 2 * pair + 1, head, row0);
#pragma unroll 1
      for (int i = 0; i < 2; i++) if (!(i ? goodb : gooda)) again(p, 2 * pair + i, head, row0, lane);
    }
  }
  cluster_sync();
}

typedef CUresult (*EncodeFn)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                             const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                             CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
static EncodeFn encode = nullptr;
static int clusters = 0;

static int make_map(CUtensorMap* m, void* ptr, long long width, long long rows, int box_rows) {
  cuuint64_t dims[2] = {(cuuint64_t)width, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)width * 2};
  cuuint32_t box[2] = {64, (cuuint32_t)box_rows}, es[2] = {1, 1};
  return (int)encode(m, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, ptr, dims, strides, box, es, CU_TENSOR_MAP_INTERLEAVE_NONE,
                     CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

static PyObject* run(PyObject*, PyObject* const* given, Py_ssize_t) {  // q k v bias out batch heads tokens sms stream
  long long a[10];
  for (int i = 0; i < 10; ++i) a[i] = PyLong_AsLongLong(given[i]);
  const int batch = (int)a[5], heads = (int)a[6], tokens = (int)a[7];
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attribute[1];
  attribute[0].id = cudaLaunchAttributeClusterDimension;
  attribute[0].val.clusterDim.x = CL; attribute[0].val.clusterDim.y = 1; attribute[0].val.clusterDim.z = 1;
  config.blockDim = dim3(384);
  config.dynamicSmemBytes = SMEM;
  config.stream = (cudaStream_t)a[9];
  config.attrs = attribute;
  config.numAttrs = 1;
  if (!encode) {
    void* f = nullptr; cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found) || !f) return PyLong_FromLong(-1);
    if (cudaFuncSetAttribute(bias_attention, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM)) return PyLong_FromLong(-3);
    clusters = (int)a[8] / CL;
    if (CL > 1) {
      config.gridDim = dim3(clusters * CL);
      int most = 0;
      if (cudaOccupancyMaxActiveClusters(&most, bias_attention, &config) || most < 1) return PyLong_FromLong(-4);
      if (most < clusters) clusters = most;
    }
    encode = (EncodeFn)f;
  }
  CUtensorMap mq, mk, mv, mb;
  int r;
  const long long rows = (long long)batch * heads * tokens;
  if ((r = make_map(&mq, (void*)a[0], 64, rows, 64))) return PyLong_FromLong(1000 + r);
  if ((r = make_map(&mk, (void*)a[1], 64, rows, 64))) return PyLong_FromLong(2000 + r);
  if ((r = make_map(&mv, (void*)a[2], 64, rows, 64))) return PyLong_FromLong(3000 + r);
  if ((r = make_map(&mb, (void*)a[3], tokens, (long long)heads * tokens, 128))) return PyLong_FromLong(4000 + r);
  Params p{(const __nv_bfloat16*)a[0], (const __nv_bfloat16*)a[1], (const __nv_bfloat16*)a[2], (const __nv_bfloat16*)a[3], (__nv_bfloat16*)a[4],
           tokens, heads, batch, 0, tokens / (128 * CL), (batch + 1) / 2};
  p.tiles = heads * p.groups * p.pairs;
  config.gridDim = dim3((clusters < p.tiles ? clusters : p.tiles) * CL);
  const cudaError_t e = cudaLaunchKernelEx(&config, bias_attention, mq, mk, mv, mb, p);
  return PyLong_FromLong(e ? e : cudaGetLastError());
}
static PyMethodDef methods[] = {{"run", (PyCFunction)(void*)run, METH_FASTCALL, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "bias_attention", "", -1, methods};
#define INIT(name) PyInit_##name
#define INIT_OF(name) INIT(name)
PyMODINIT_FUNC INIT_OF(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
'''


def _wgmma():
    def regs(n, first=0):
        return ", ".join(f"%{first + i}" for i in range(n))

    def ops(name, n, kind="f"):
        return ", ".join(f'"+{kind}"({name}[{i}])' for i in range(n))

    code = ""
    for name, flag in (("mma_qk", 0), ("mma_pv", 1)):
        code += f"""
__device__ __forceinline__ void {name}(float (&d)[32], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b) {{
  asm volatile("{{\\n.reg .b64 y;\\nmov.b64 y, {{%36, 0x40000040}};\\n"
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{{regs(32)}}}, {{{regs(4, 32)}}}, y, 1, 1, 1, {flag};\\n}}\\n"
    : {ops("d", 32)} : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b));
}}"""
    return code + f"""
__device__ __forceinline__ void touch(float (&d)[32]) {{ asm volatile("" : {ops("d", 32)} :: "memory"); }}
__device__ __forceinline__ void fence(uint32_t (&p)[16]) {{ asm volatile("wgmma.fence.sync.aligned;\\n" : {ops("p", 16, "r")} :: "memory"); }}
template <int N> __device__ __forceinline__ void wait(float (&s)[32], float (&o)[32], uint32_t (&p)[16]) {{
  asm volatile("wgmma.wait_group.sync.aligned %80;\\n" : {ops("s", 32)}, {ops("o", 32)}, {ops("p", 16, "r")} : "n"(N) : "memory");
}}
__device__ __forceinline__ void gemm_qk(float (&s)[32], uint32_t (&q)[16], uint32_t dk) {{
#pragma unroll
  for (int i = 0; i < 4; i++) mma_qk(s, q[4 * i], q[4 * i + 1], q[4 * i + 2], q[4 * i + 3], dk + 2 * i);
}}
__device__ __forceinline__ void gemm_pv(float (&o)[32], uint32_t (&p)[16], uint32_t dv) {{
#pragma unroll
  for (int i = 0; i < 4; i++) mma_pv(o, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3], dv + i * (2048 / 16));
}}
"""


_run = None


def _load():
    global _run
    if _run is None:
        src = SRC.replace("@WGMMA@", _wgmma())
        for name, value in (("CL", CL), ("POLY", POLY), ("EARLY", EARLY), ("SHARE", SHARE), ("HOLD", HOLD), ("FENCE2", FENCE2), ("SPLIT", SPLIT), ("NOEXP", int(PROBE == "no exp")),
                            ("NOREAD", int(PROBE == "no bias read")), ("NOLOAD", int(PROBE == "no bias load"))):
            src = src.replace(f"@{name}@", str(value))
        _run = load_inline(
            f"bias_attention7_{CL}_{POLY}_{EARLY}_{SHARE}_{HOLD}_{FENCE2}_{SPLIT}_{PROBE.replace(' ', '')}", "", src, no_implicit_headers=True,
            with_pytorch_error_handling=False, extra_cuda_cflags=["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a"],
        ).run
    return _run


class ModelNew(nn.Module):
    def forward(self, q, k, v, bias):
        if any(x.dtype != torch.bfloat16 or not x.is_cuda or x.device != q.device for x in (q, k, v, bias)):
            raise ValueError("bfloat16 CUDA tensors of one device are expected")
        if q.dim() != 4 or k.shape != q.shape or v.shape != q.shape:
            raise ValueError("q, k, v (batch, heads, tokens, width) are expected")
        batch, heads, tokens, width = q.shape
        if width != 64 or tokens < 1 or tokens % (128 * max(CL, 2)) or batch < 1 or heads < 1:
            raise ValueError(f"width 64 and tokens in multiples of {128 * max(CL, 2)} are expected")
        if bias.shape != (heads, tokens, tokens) or batch * heads * tokens >= 1 << 31:
            raise ValueError("bias (heads, tokens, tokens) is expected")
        shape = q
        q, k, v, bias = (x.contiguous() for x in (q, k, v, bias))
        q, k, v, bias = (x.clone() if x.data_ptr() % 16 else x for x in (q, k, v, bias))
        run = _run or _load()
        out = torch.empty((batch, heads, tokens, width), dtype=q.dtype, device=q.device)
        with torch.cuda.device(q.device):
            sms = torch.cuda.get_device_properties(q.device).multi_processor_count
            error = run(q.data_ptr(), k.data_ptr(), v.data_ptr(), bias.data_ptr(), out.data_ptr(), batch, heads, tokens, sms,
                        torch.cuda.current_stream().cuda_stream)
        if error:
            raise RuntimeError(f"bias_attention: error {error}")
        return out if shape.is_contiguous() else torch.empty_like(shape).copy_(out)
