"""Backward pass of causal attention for Hopper, bf16, width to 128: CUDA C++, built at first use.

Three launches. `row_values`: -sum(dout * out) of each row, its log-sum-exp to the base 2, and zeros for the sums of dq.
`backward`: a block owns 128 keys of one head; a producer thread streams tiles of queries by TMA, and two consumer
warpgroups of 64 keys each take five products a tile. S^T and dP^T have keys as rows, so that P^T and dS^T are, from
registers, the first operands of dv and dk. dS^T also goes through shared memory, as both warpgroups need all of it for
dq, which is summed in fp32 in global memory in the order of the accumulators' registers, so that its last bits differ
from run to run. `round_dq`: scales it, rounds it, and puts it in order. Widths other than 64 and 128 are padded.
"""

import math
import struct

import torch
from torch.utils.cpp_extension import load_inline

HEADS = 4  # at a time, at least: what they read and sum should stay in the L2
GROUP_BLOCKS = 480  # of the heads at a time, at least: short blocks at the end even out the work of the multiprocessors
Q_STAGES = 2  # tiles of Q on their way or in use; a power of two
DO_STAGES = 2  # of dout, likewise

SOURCE = r"""
#include <cuda.h>
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <stdint.h>
#include <string.h>
#define INLINE __device__ __forceinline__

constexpr int KEYS = 128, KEY_PANEL = KEYS * 128;  // bytes of 64 columns of K or V
constexpr int QUERY_BYTES = 16384;                 // of a tile of Q or dO, for both widths

template <int WIDTH> struct Shape {
  static constexpr int QUERIES = WIDTH == 128 ? 64 : 128;   // of a step
  static constexpr int PANELS = WIDTH / 64;
  static constexpr int QUERY_PANEL = QUERIES * 128;         // bytes of 64 columns of Q or dO
  static constexpr int DS_BYTES = QUERIES / 64 * KEY_PANEL; // dS^T: panels of 64 queries, a row for each key
  static constexpr int K = 0, V = K + PANELS * KEY_PANEL, Q = V + PANELS * KEY_PANEL, DO = Q + Q_STAGES * QUERY_BYTES;
  static constexpr int DS = DO + DO_STAGES * QUERY_BYTES, LSE = DS + 2 * DS_BYTES;
  static constexpr int DELTA = LSE + Q_STAGES * QUERIES * 4, BARS = DELTA + DO_STAGES * QUERIES * 4;
  static constexpr int SMEM = BARS + 128 + 1024;
  static_assert(SMEM <= 232448 && (Q_STAGES & (Q_STAGES - 1)) == 0 && (DO_STAGES & (DO_STAGES - 1)) == 0, "sizes");
};

// ---- PTX ----
INLINE void mbar_init(uint32_t bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
INLINE void mbar_expect(uint32_t bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
INLINE void mbar_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
INLINE void mbar_wait(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE;\nbra WAIT;\nDONE:\n}\n"
      ::"r"(bar), "r"(parity) : "memory");
}
INLINE void load_tile(uint32_t to, const CUtensorMap* map, int column, int row, int head, uint32_t bar) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3, %4}], [%5];"
               ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(head), "r"(bar) : "memory");
}
INLINE void load_bytes(uint32_t to, const void* from, int bytes, uint32_t bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}
INLINE void add_four(float* to, const float* x) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
               ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}
INLINE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
INLINE float4 load_four(uint32_t from) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(from));
  return x;
}
INLINE void store_matrices(uint32_t to, const uint32_t* x) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
INLINE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
INLINE uint32_t pack(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
INLINE uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
// Dependent launch: the next kernel's blocks may start, and wait for all that the kernel before it wrote.
INLINE void start_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
INLINE void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// 128-byte swizzle, groups of 8 rows 1024 bytes apart. `leading`: from one panel to the next, where k is the slow side.
// `at`: address / 16. Only that is kept in a register.
INLINE uint64_t descriptor(uint32_t at, uint32_t leading = 16) {
  return (uint64_t)(1u << 30 | 1024 >> 4) << 32 | (at | leading / 16 << 16);
}
INLINE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INLINE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> INLINE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// names registers, so that the compiler moves no use of them across this point
template <int N> INLINE void touch(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}
template <int N> INLINE void touch(uint32_t (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+r"(x[i])::"memory");
}
@WGMMA@

// ---- products of a warpgroup; descriptors count units of 16 bytes ----
// KEEP: added to d. scores^T[64 keys, QUERIES] = keys[64, WIDTH] queries[QUERIES, WIDTH]^T
template <int WIDTH, int KEEP, int N> INLINE void multiply_rows(float (&d)[N], uint64_t keys, uint64_t queries) {
#pragma unroll
  for (int k = 0; k < WIDTH / 16; k++) {
    const uint64_t a = keys + k / 4 * (KEY_PANEL / 16) + k % 4 * 2;
    const uint64_t b = queries + k / 4 * (Shape<WIDTH>::QUERY_PANEL / 16) + k % 4 * 2;
    if (k == 0) mma<KEEP, 0, 0>(d, a, b); else mma<1, 0, 0>(d, a, b);
  }
}
// d[64 keys, WIDTH] += weights^T[64 keys, queries] rows[queries, WIDTH]
template <int N, int M> INLINE void add_weighted(float (&d)[N], const uint32_t (&weights)[M], uint64_t rows) {
#pragma unroll
  for (int k = 0; k < M / 4; k++) mma(d, weights + 4 * k, rows + k * 128);
}
// dq[64 queries, 64 columns] = dS[64 queries, 128 keys] K[128 keys, 64 columns]
INLINE void multiply_keys(float (&d)[32], uint64_t ds, uint64_t keys) {
#pragma unroll
  for (int k = 0; k < KEYS / 16; k++)
    if (k == 0) mma<0, 1, 1>(d, ds, keys); else mma<1, 1, 1>(d, ds + k * 128, keys + k * 128);
}

struct Args {
  const float* lse;             // (heads, padded), permuted within 16 rows; to the base 2; infinite behind the last row
  const float* delta;           // likewise; negative; zero there
  float* dq;                    // (heads, padded, width), in order of registers
  __nv_bfloat16 *dk, *dv;
  int heads, at_once, length, padded;  // at_once: heads
  float scale;                  // width ** -0.5
};

struct Place { int head, first; };

// A few heads at a time; of these the blocks with the most queries first
INLINE Place place_of(int block, int heads, int at_once, int blocks) {
  const int group = block / (at_once * blocks) * at_once, width = min(at_once, heads - group);
  const int within = block - group * blocks;
  return {group + within % width, within / width * KEYS};
}

// 16 bytes for each thread of four that share a row: 4 x 4 words are transposed
INLINE uint4 transpose_quad(uint32_t (&x)[4], int t) {
  uint32_t y0 = __shfl_xor_sync(~0u, t & 1 ? x[0] : x[1], 1), y1 = __shfl_xor_sync(~0u, t & 1 ? x[2] : x[3], 1);
  if (t & 1) x[0] = y0, x[2] = y1; else x[1] = y0, x[3] = y1;
  y0 = __shfl_xor_sync(~0u, t & 2 ? x[0] : x[2], 2), y1 = __shfl_xor_sync(~0u, t & 2 ? x[1] : x[3], 2);
  if (t & 2) x[0] = y0, x[1] = y1; else x[2] = y0, x[3] = y1;
  return make_uint4(x[0], x[1], x[2], x[3]);
}
// accumulators of 2 N columns to row `row` and `row` + 8 of `to`
template <int N> INLINE void store_rows(
    __nv_bfloat16* to, float (&x)[N], float scale, int row, int length, int width, int t) {
#pragma unroll
  for (int h = 0; h < 2; h++)
#pragma unroll
    for (int b = 0; b < N / 16; b++) {
      uint32_t w[4];
#pragma unroll
      for (int i = 0; i < 4; i++) w[i] = pack(x[16 * b + 4 * i + 2 * h] * scale, x[16 * b + 4 * i + 2 * h + 1] * scale);
      const uint4 line = transpose_quad(w, t);
      if (row + 8 * h < length) *reinterpret_cast<uint4*>(to + (size_t)(row + 8 * h) * width + 32 * b + 8 * t) = line;
    }
}

// ---- the producer ----
template <int WIDTH> INLINE void load_panels(
    uint32_t to, const CUtensorMap* map, int bytes, int row, int head, uint32_t bar) {
#pragma unroll
  for (int i = 0; i < Shape<WIDTH>::PANELS; i++) load_tile(to + i * bytes, map, 64 * i, row, head, bar);
}
// stage and parity of step j: powers of two, so that consumers keep j alone
template <int STAGES> INLINE int stage_of(int j) { return j & (STAGES - 1); }
template <int STAGES> INLINE uint32_t parity_of(int j) { return j / STAGES & 1; }
struct Bars { uint32_t k, v, q_full, q_empty, do_full, do_empty, ds; };

template <int WIDTH> INLINE void produce(
    const CUtensorMap* mq, const CUtensorMap* mk, const CUtensorMap* mv, const CUtensorMap* mdo, const Args& args,
    uint32_t base, const Bars& bars, Place at, int steps) {
  using S = Shape<WIDTH>;
  const size_t from = (size_t)at.head * args.padded + at.first;
  const float *lse = args.lse + from, *delta = args.delta + from;
  mbar_expect(bars.k, S::PANELS * KEY_PANEL);
  load_panels<WIDTH>(base + S::K, mk, KEY_PANEL, at.first, at.head, bars.k);
  mbar_expect(bars.v, S::PANELS * KEY_PANEL);
  load_panels<WIDTH>(base + S::V, mv, KEY_PANEL, at.first, at.head, bars.v);
  wait_for_kernel_before();  // of lse and delta; and consumers add to dq after these alone
#pragma unroll 1
  for (int j = 0; j < steps; j++) {
    const int row = at.first + j * S::QUERIES, q = stage_of<Q_STAGES>(j), o = stage_of<DO_STAGES>(j);
    uint32_t full = bars.q_full + 8 * q;
    mbar_wait(bars.q_empty + 8 * q, parity_of<Q_STAGES>(j) ^ 1);
    mbar_expect(full, QUERY_BYTES + S::QUERIES * 4);
    load_panels<WIDTH>(base + S::Q + q * QUERY_BYTES, mq, S::QUERY_PANEL, row, at.head, full);
    load_bytes(base + S::LSE + q * S::QUERIES * 4, lse + j * S::QUERIES, S::QUERIES * 4, full);
    full = bars.do_full + 8 * o;
    mbar_wait(bars.do_empty + 8 * o, parity_of<DO_STAGES>(j) ^ 1);
    mbar_expect(full, QUERY_BYTES + S::QUERIES * 4);
    load_panels<WIDTH>(base + S::DO + o * QUERY_BYTES, mdo, S::QUERY_PANEL, row, at.head, full);
    load_bytes(base + S::DELTA + o * S::QUERIES * 4, delta + j * S::QUERIES, S::QUERIES * 4, full);
  }
}

// ---- the consumers ----
template <int WIDTH> struct Sums {
  static constexpr int N = Shape<WIDTH>::QUERIES / 2;
  float s[N], dp[N], dq[32], dk[WIDTH / 2], dv[WIDTH / 2];
  uint32_t p[N / 2], t[N / 2];  // pairs of bf16: P^T, which becomes dS^T in place; dP^T - delta
};
struct Consumer {  // what a thread knows, in few registers
  int lane;
  uint32_t base, tiles, half;    // shared memory; base / 16; and 512 for the second warpgroup: 8 KiB / 16
  uint32_t ds_at, rows_at;       // from the start of a stage: where it stores dS^T; its columns of lse and delta
  float* dq;                     // where it adds dq of the first tile
  float factor;                  // scale log2(e)
  int diagonal;                  // its first key less its first query
};

// P^T = exp2(S^T factor - lse), in place; a key later than the query weighs nothing
template <int WIDTH> INLINE void weigh(Sums<WIDTH>& x, const Consumer& me, uint32_t lse, int query) {
  if (query < KEYS) {
#pragma unroll
    for (int i = 0; i < Sums<WIDTH>::N; i++)
      if (i / 4 * 8 + i % 2 - i / 2 % 2 * 8 < me.diagonal - query) x.s[i] = -INFINITY;
  }
#pragma unroll
  for (int c = 0; c < Sums<WIDTH>::N / 8; c++) {
    const float4 l = load_four(lse + me.rows_at + c * 64);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float of_row = i < 4 ? (i % 2 ? l.y : l.x) : (i % 2 ? l.w : l.z);
      x.s[8 * c + i] = exp2_approx(fmaf(x.s[8 * c + i], me.factor, -of_row));
    }
  }
}
// The sums of dP^T start as -delta. Read early: later these loads would wait behind the additions to dq.
template <int WIDTH> INLINE void start_dp(Sums<WIDTH>& x, const Consumer& me, uint32_t delta) {
#pragma unroll
  for (int c = 0; c < Sums<WIDTH>::N / 8; c++) {
    const float4 d = load_four(delta + me.rows_at + c * 64);
#pragma unroll
    for (int i = 0; i < 8; i++) x.dp[8 * c + i] = i < 4 ? (i % 2 ? d.y : d.x) : (i % 2 ? d.w : d.z);
  }
}
// dS^T = P^T (dP^T - delta), in the registers of P^T, which the product of dv must have read; and for both warpgroups
template <int WIDTH> INLINE void share_ds(Sums<WIDTH>& x, const Consumer& me, uint32_t to) {
#pragma unroll
  for (int i = 0; i < Sums<WIDTH>::N / 2; i++) x.p[i] = multiply_pairs(x.p[i], x.t[i]);
#pragma unroll
  for (int c = 0; c < Sums<WIDTH>::N / 4; c += 2)
    store_matrices(((to + me.ds_at) ^ c % 8 << 4) + c / 8 * KEY_PANEL, x.p + 2 * c);
  fence_async();
}
// A warp's instruction adds 512 bytes in a row. Bulk copies from shared memory were slower: that is the busiest unit.
INLINE void add_dq(float (&dq)[32], const Consumer& me, int step) {
  float* to = me.dq + (size_t)step * 8192;
#pragma unroll
  for (int i = 0; i < 8; i++) add_four(to + i * 128, dq + 4 * i);
}
INLINE void release(uint32_t bar, int lane) {
  __syncwarp();
  if (lane == 0) mbar_arrive(bar);
}

// A value before each product that overwrites: what the array held must not stay in registers.
template <int N> INLINE void clear(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) x[i] = 0.f;
}

template <int WIDTH> INLINE void issue_scores(Sums<WIDTH>& x, const Consumer& me, const Bars& bars, int j) {
  using S = Shape<WIDTH>;
  const int stage = stage_of<Q_STAGES>(j);
  mbar_wait(bars.q_full + 8 * stage, parity_of<Q_STAGES>(j));
  clear(x.s);
  touch(x.s);
  wgmma_fence();
  multiply_rows<WIDTH, 0>(x.s, descriptor(me.tiles + S::K / 16 + me.half),
                       descriptor(me.tiles + (S::Q + stage * QUERY_BYTES) / 16));
  wgmma_commit();
}
template <int WIDTH> INLINE void issue_dk(Sums<WIDTH>& x, const Consumer& me, int j) {
  using S = Shape<WIDTH>;
  const uint32_t at = me.tiles + (S::Q + stage_of<Q_STAGES>(j) * QUERY_BYTES) / 16;
  touch(x.p);
  touch(x.dk);
  wgmma_fence();
  add_weighted(x.dk, x.p, descriptor(at, S::QUERY_PANEL));
  wgmma_commit();
}
template <int WIDTH> INLINE void issue_dq(Sums<WIDTH>& x, const Consumer& me, const Bars& bars, int j) {
  using S = Shape<WIDTH>;
  mbar_wait(bars.ds, j & 1);  // both warpgroups' part of dS
  clear(x.dq);
  touch(x.dq);
  wgmma_fence();
  // this warpgroup's half of the columns, or of the queries
  const uint32_t ds = me.tiles + (S::DS + (j & 1) * S::DS_BYTES) / 16 + (WIDTH == 128 ? 0 : 2 * me.half);
  multiply_keys(x.dq, descriptor(ds), descriptor(me.tiles + S::K / 16 + (WIDTH == 128 ? 2 * me.half : 0)));
  wgmma_commit();
}
template <int WIDTH> INLINE void issue_dp_dv(Sums<WIDTH>& x, const Consumer& me, const Bars& bars, int j) {
  using S = Shape<WIDTH>;
  const int stage = stage_of<DO_STAGES>(j);
  const uint32_t at = me.tiles + (S::DO + stage * QUERY_BYTES) / 16;
  touch(x.dp);
  wgmma_fence();
  multiply_rows<WIDTH, 1>(x.dp, descriptor(me.tiles + S::V / 16 + me.half), descriptor(at));
  wgmma_commit();
  touch(x.p);
  touch(x.dv);
  wgmma_fence();
  add_weighted(x.dv, x.p, descriptor(at, S::QUERY_PANEL));
  wgmma_commit();
}
// From S of tile j to dP - delta. In flight before it: S, and but for the first tile dk of the tile before. The dq of
// that tile is issued only behind the exponentials: it needs dS of both warpgroups, so that one may run half a tile
// ahead, and multiply while the other takes exponentials.
// After it nothing is: ptxas serialises wgmma that a loop's end finds in flight, with registers for its first operand.
template <int WIDTH, bool FIRST> INLINE void softmax(Sums<WIDTH>& x, const Consumer& me, const Bars& bars, int j) {
  using S = Shape<WIDTH>;
  wgmma_wait<FIRST ? 0 : 1>();
  touch(x.s);
  weigh<WIDTH>(x, me, me.base + S::LSE + stage_of<Q_STAGES>(j) * S::QUERIES * 4, j * S::QUERIES);
  mbar_wait(bars.do_full + 8 * stage_of<DO_STAGES>(j), parity_of<DO_STAGES>(j));
  start_dp<WIDTH>(x, me, me.base + S::DELTA + stage_of<DO_STAGES>(j) * S::QUERIES * 4);
  if (!FIRST) {
    wgmma_wait<0>();
    touch(x.dk);
    touch(x.p);
    release(bars.q_empty + 8 * stage_of<Q_STAGES>(j - 1), me.lane);
  }
#pragma unroll
  for (int i = 0; i < Sums<WIDTH>::N / 2; i++) x.p[i] = pack(x.s[2 * i], x.s[2 * i + 1]);
  if (!FIRST) issue_dq<WIDTH>(x, me, bars, j - 1);
  issue_dp_dv<WIDTH>(x, me, bars, j);
  if (!FIRST) {
    wgmma_wait<2>();
    touch(x.dq);
    add_dq(x.dq, me, j - 1);
  }
  wgmma_wait<1>();
  touch(x.dp);
#pragma unroll
  for (int i = 0; i < Sums<WIDTH>::N / 2; i++) x.t[i] = pack(x.dp[2 * i], x.dp[2 * i + 1]);
  wgmma_wait<0>();
  touch(x.dv);
  touch(x.p);
}
// dS of tile j for both warpgroups, and dk of it
template <int WIDTH> INLINE void ds_and_dk(Sums<WIDTH>& x, const Consumer& me, const Bars& bars, int j) {
  release(bars.do_empty + 8 * stage_of<DO_STAGES>(j), me.lane);
  share_ds<WIDTH>(x, me, me.base + Shape<WIDTH>::DS + (j & 1) * Shape<WIDTH>::DS_BYTES);
  release(bars.ds, me.lane);
  issue_dk<WIDTH>(x, me, j);
}

template <int WIDTH> INLINE void consume(
    const Args& args, uint32_t base, const Bars& bars, Place at, int steps, int wg) {
  using S = Shape<WIDTH>;
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 & 3, row = wg * 64 + warp * 16;
  Consumer me;
  me.lane = lane, me.base = base, me.tiles = base / 16, me.half = wg * 512;
  me.ds_at = (row + (lane & 15)) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
  me.rows_at = (lane & 3) * 16;
  me.diagonal = row + lane / 4 - 2 * (lane & 3);
  me.dq = args.dq + ((size_t)at.head * args.padded + at.first) * WIDTH + (wg * 4 + warp) * 1024 + lane * 4;
  me.factor = args.scale * 1.4426950408889634f;
  Sums<WIDTH> x;
  clear(x.dk), clear(x.dv);
  mbar_wait(bars.k, 0);
  issue_scores<WIDTH>(x, me, bars, 0);
  mbar_wait(bars.v, 0);
  softmax<WIDTH, true>(x, me, bars, 0);
  int j = 0;
#pragma unroll 1
  while (j < steps - 1) {  // products of this warpgroup are nearly always waiting
    asm volatile("" : "+r"(me.half));  // or descriptors that never change would take registers
    issue_scores<WIDTH>(x, me, bars, j + 1);
    ds_and_dk<WIDTH>(x, me, bars, j);
    softmax<WIDTH, false>(x, me, bars, ++j);
  }
  ds_and_dk<WIDTH>(x, me, bars, j);
  issue_dq<WIDTH>(x, me, bars, j);
  wgmma_wait<0>();
  touch(x.dk);
  touch(x.dq);
  add_dq(x.dq, me, steps - 1);
  const size_t rows = (size_t)at.head * args.length * WIDTH;
  store_rows(args.dk + rows, x.dk, args.scale, at.first + row + lane / 4, args.length, WIDTH, lane & 3);
  store_rows(args.dv + rows, x.dv, 1.f, at.first + row + lane / 4, args.length, WIDTH, lane & 3);
}

template <int WIDTH> __global__ void __launch_bounds__(384, 1)
backward(const __grid_constant__ CUtensorMap mq, const __grid_constant__ CUtensorMap mk,
         const __grid_constant__ CUtensorMap mv, const __grid_constant__ CUtensorMap mdo, const Args args) {
  using S = Shape<WIDTH>;
  extern __shared__ uint8_t raw[];
  const uint32_t base = ((uint32_t)__cvta_generic_to_shared(raw) + 1023) & ~1023u, b = base + S::BARS;
  constexpr int Q_BARS = 8 * Q_STAGES, DO_BARS = 8 * DO_STAGES;
  const Bars bars{b, b + 8, b + 16, b + 16 + Q_BARS, b + 16 + 2 * Q_BARS, b + 16 + 2 * Q_BARS + DO_BARS,
                  b + 16 + 2 * (Q_BARS + DO_BARS)};
  if (threadIdx.x == 0) {
    mbar_init(bars.k, 1), mbar_init(bars.v, 1), mbar_init(bars.ds, 8);
    for (int i = 0; i < Q_STAGES; i++) mbar_init(bars.q_full + 8 * i, 1), mbar_init(bars.q_empty + 8 * i, 8);
    for (int i = 0; i < DO_STAGES; i++) mbar_init(bars.do_full + 8 * i, 1), mbar_init(bars.do_empty + 8 * i, 8);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  start_next_kernel();
  const Place at = place_of(blockIdx.x, args.heads, args.at_once, (args.length + KEYS - 1) / KEYS);
  const int steps = (args.length - at.first + S::QUERIES - 1) / S::QUERIES;
  const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (role == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 256) produce<WIDTH>(&mq, &mk, &mv, &mdo, args, base, bars, at, steps);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    consume<WIDTH>(args, base, bars, at, steps, role);
  }
}

// ---- before and after ----
INLINE float dot_pairs(uint32_t a, uint32_t b) {
  const float high = __uint_as_float(a & 0xffff0000u) * __uint_as_float(b & 0xffff0000u);
  return __uint_as_float(a << 16) * __uint_as_float(b << 16) + high;
}
// WIDTH / 8 threads for each row of (heads, padded)
template <int WIDTH> __global__ void __launch_bounds__(256)
row_values(const uint4* out, const uint4* dout, const float* lse, float* lse2, float* delta, float4* dq, int rows,
           int length, int padded) {
  constexpr int T = WIDTH / 8;
  start_next_kernel();
  const int row = (blockIdx.x * 256 + threadIdx.x) / T, t = threadIdx.x % T;
  if (row >= rows) return;
  const int head = row / padded, at = row - head * padded;
  const bool inside = at < length;
  const size_t from = (size_t)head * length + at;
  float sum = 0.f;
  if (inside) {
    const uint4 a = out[from * T + t], b = dout[from * T + t];
    sum = dot_pairs(a.x, b.x) + dot_pairs(a.y, b.y) + dot_pairs(a.z, b.z) + dot_pairs(a.w, b.w);
  }
  dq[(size_t)row * 2 * T + t] = dq[(size_t)row * 2 * T + T + t] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
  for (int i = 1; i < T; i *= 2) sum += __shfl_xor_sync(~0u, sum, i);
  // of 16 rows, the four of a consumer's thread side by side: 2 t, 2 t + 1, and 8 further
  const int to = (row & ~15) | (row & 6) << 1 | (row & 8) >> 2 | (row & 1);
  if (t == 0) delta[to] = -sum, lse2[to] = inside ? lse[from] * 1.4426950408889634f : INFINITY;
}
// a warp for each 16 rows of 64 columns
template <int WIDTH> __global__ void __launch_bounds__(256)
round_dq(const float4* sums, __nv_bfloat16* dq, int units, int length, int padded, float scale) {
  const int unit = (blockIdx.x * 256 + threadIdx.x) / 32, lane = threadIdx.x & 31;
  if (unit >= units) return;
  wait_for_kernel_before();
  const int tiles = padded / Shape<WIDTH>::QUERIES, tile = unit / 8 % tiles, head = unit / 8 / tiles;
  const int warp = unit & 3, wg = unit >> 2 & 1;
  const int row = tile * Shape<WIDTH>::QUERIES + (WIDTH == 128 ? 0 : wg * 64) + warp * 16 + lane / 4;
  float x[32];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float4 y = __ldcs(sums + (size_t)unit * 256 + i * 32 + lane);
    x[4 * i] = y.x, x[4 * i + 1] = y.y, x[4 * i + 2] = y.z, x[4 * i + 3] = y.w;
  }
  store_rows(dq + (size_t)head * length * WIDTH + (WIDTH == 128 ? wg * 64 : 0), x, scale, row, length, WIDTH, lane & 3);
}

// ---- host ----
static int make_map(CUtensorMap* map, void* data, int width, int length, int heads, int rows) {
  static decltype(&cuTensorMapEncodeTiled) encode = nullptr;
  if (!encode) {
    cudaDriverEntryPointQueryResult found;
    const char* name = "cuTensorMapEncodeTiled";
    if (cudaGetDriverEntryPointByVersion(name, (void**)&encode, 12000, cudaEnableDefault, &found) || !encode) return -1;
  }
  cuuint64_t sizes[3] = {(cuuint64_t)width, (cuuint64_t)length, (cuuint64_t)heads};
  cuuint64_t strides[2] = {(cuuint64_t)width * 2, (cuuint64_t)width * 2 * length};
  cuuint32_t box[3] = {64, (cuuint32_t)rows, 1}, one[3] = {1, 1, 1};
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, data, sizes, strides, box, one, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}
struct Tensors {
  void *q, *k, *v, *out, *dout;
  float *lse, *sums, *lse2, *delta;
  __nv_bfloat16 *dq, *dk, *dv;
};

// `dependent`: its blocks may start before the kernel before it has ended
template <typename... T, typename... U> static void start(
    void (*kernel)(T...), int blocks, int threads, int bytes, bool dependent, cudaStream_t stream, U... given) {
  cudaLaunchAttribute early;
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t how = {};
  how.gridDim = dim3(blocks), how.blockDim = dim3(threads), how.dynamicSmemBytes = bytes, how.stream = stream;
  how.attrs = &early, how.numAttrs = dependent;
  cudaLaunchKernelEx(&how, kernel, given...);
}
template <int WIDTH> static int launch(
    const Tensors& x, int heads, int length, int padded, float scale, cudaStream_t stream) {
  using S = Shape<WIDTH>;
  CUtensorMap mq, mk, mv, mdo;
  int error;
  if ((error = make_map(&mq, x.q, WIDTH, length, heads, S::QUERIES)) ||
      (error = make_map(&mdo, x.dout, WIDTH, length, heads, S::QUERIES)) ||
      (error = make_map(&mk, x.k, WIDTH, length, heads, KEYS)) ||
      (error = make_map(&mv, x.v, WIDTH, length, heads, KEYS)))
    return 1000 + error;
  if (cudaFuncSetAttribute(backward<WIDTH>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::SMEM)) return -2;
  const int rows = heads * padded, units = rows * (WIDTH / 64) / 16;
  const int blocks = (length + KEYS - 1) / KEYS, wanted = (GROUP_BLOCKS + blocks - 1) / blocks;
  const int at_once = wanted > HEADS ? wanted : HEADS;
  const Args args{x.lse2, x.delta, x.sums, x.dk, x.dv, heads, at_once, length, padded, scale};
  start(row_values<WIDTH>, (rows + 2048 / WIDTH - 1) / (2048 / WIDTH), 256, 0, false, stream, (const uint4*)x.out,
        (const uint4*)x.dout, x.lse, x.lse2, x.delta, (float4*)x.sums, rows, length, padded);
  start(backward<WIDTH>, heads * blocks, 384, S::SMEM, true, stream, mq, mk, mv, mdo, args);
  start(round_dq<WIDTH>, (units + 7) / 8, 256, 0, true, stream, (const float4*)x.sums, x.dq, units, length, padded,
        scale);
  return (int)cudaGetLastError();
}
// q k v out lse dout dq dk dv sums lse2 delta; heads length padded width stream, and the bits of the scale
extern "C" int attention_backward(const long long* a) {
  const Tensors x{(void*)a[0], (void*)a[1], (void*)a[2], (void*)a[3], (void*)a[5], (float*)a[4], (float*)a[9],
                  (float*)a[10], (float*)a[11], (__nv_bfloat16*)a[6], (__nv_bfloat16*)a[7], (__nv_bfloat16*)a[8]};
  const auto run = a[15] == 128 ? launch<128> : launch<64>;
  const int bits = (int)a[17];
  float scale;
  memcpy(&scale, &bits, 4);
  return run(x, (int)a[12], (int)a[13], (int)a[14], scale, (cudaStream_t)a[16]);
}
#ifdef TORCH_EXTENSION_NAME
#define PY_SSIZE_T_CLEAN
#include <Python.h>
static PyObject* py_run(PyObject*, PyObject* const* given, Py_ssize_t) {
  long long a[18];
  for (int i = 0; i < 18; i++) a[i] = PyLong_AsLongLong(given[i]);
  return PyLong_FromLong(attention_backward(a));
}
static PyMethodDef methods[] = {{"run", (PyCFunction)(void*)py_run, METH_FASTCALL, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "attention_backward", "", -1, methods};
#define INIT(name) PyInit_##name
#define INIT_OF(name) INIT(name)
PyMODINIT_FUNC INIT_OF(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
#endif
"""


def wgmma(n):
    """Wrappers of m64n<n>k16: A from shared memory (keep the sums or not, A or B transposed), and A from registers."""
    half = n // 2
    sums = ", ".join(f"%{i}" for i in range(half))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(half))
    name = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16"
    return f"""
template <int KEEP, int TA, int TB> INLINE void mma(float (&d)[{half}], uint64_t a, uint64_t b) {{
  asm volatile("{name} {{{sums}}}, %{half}, %{half + 1}, %{half + 2}, 1, 1, %{half + 3}, %{half + 4};"
               : {outputs} : "l"(a), "l"(b), "n"(KEEP), "n"(TA), "n"(TB));
}}
INLINE void mma(float (&d)[{half}], const uint32_t* a, uint64_t b) {{
  asm volatile("{name} {{{sums}}}, {{%{half}, %{half + 1}, %{half + 2}, %{half + 3}}}, %{half + 4}, 1, 1, 1, 1;"
               : {outputs} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}}"""


def source():
    return SOURCE.replace("@WGMMA@", wgmma(64) + wgmma(128))


_run = None


def _load():
    global _run
    if _run is None:
        constants = {"HEADS": HEADS, "GROUP_BLOCKS": GROUP_BLOCKS, "Q_STAGES": Q_STAGES, "DO_STAGES": DO_STAGES}
        flags = [f"-D{name}={value}" for name, value in constants.items()]
        flags += ["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a"]
        _run = load_inline(
            "attention_backward",
            "",
            source(),
            no_implicit_headers=True,
            with_pytorch_error_handling=False,
            extra_cuda_cflags=flags,
        ).run
    return _run


def tile_width(x, width):
    """Zeros behind each row up to `width`; contiguous, and aligned for TMA."""
    x = torch.nn.functional.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def check(q, k, v, out, lse, dout):
    if q.dim() != 4 or q.shape[3] > 128 or min(q.shape) < 1:
        raise ValueError("(batch, heads, length, width) with a width of at most 128 is expected")
    if any(x.shape != q.shape or x.dtype != torch.bfloat16 or not x.is_cuda for x in (q, k, v, out, dout)):
        raise ValueError("bfloat16 CUDA tensors of one shape are expected")
    if lse.shape != q.shape[:3] or not lse.is_cuda:
        raise ValueError("the log-sum-exp of each row is expected")


def kernel_function(q, k, v, out, lse, dout):
    check(q, k, v, out, lse, dout)
    batch, heads, length, own_width = q.shape
    width = 64 if own_width <= 64 else 128
    q, k, v, out, dout = (tile_width(x, width) for x in (q, k, v, out, dout))
    lse = lse.float().contiguous()
    padded = math.ceil(length / 128) * 128
    if batch * heads * padded * (width // 64) >= 2**31:
        raise ValueError("too many rows")
    dq, dk, dv = (torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(3))
    sums = torch.empty(batch * heads * padded * (width + 2), dtype=torch.float32, device=q.device)
    lse2 = sums.data_ptr() + 4 * batch * heads * padded * width
    delta = lse2 + 4 * batch * heads * padded
    with torch.cuda.device(q.device):
        tensors = (x.data_ptr() for x in (q, k, v, out, lse, dout, dq, dk, dv, sums))
        stream = torch.cuda.current_stream().cuda_stream
        scale = struct.unpack("i", struct.pack("f", own_width**-0.5))[0]
        error = _load()(*tensors, lse2, delta, batch * heads, length, padded, width, stream, scale)
    if error:
        raise RuntimeError(f"launch failed: {error}")
    return (dq, dk, dv) if own_width == width else tuple(x[..., :own_width].contiguous() for x in (dq, dk, dv))
