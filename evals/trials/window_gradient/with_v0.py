"""Backward pass of causal attention over a sliding window with grouped heads, for Hopper, bf16: CUDA C++, built at first
use.

`backward` has one block a multiprocessor. A block takes pieces from a list made on the host: 128 keys with one or more of
the query heads that share them. A producer thread streams tiles of 64 queries by TMA, and two consumer warpgroups of 64
keys each take five products a tile. S^T and dP^T have keys as rows, so that P^T and dS^T are, from registers, the first
operands of dv and dk. dS^T also goes through shared memory, as both warpgroups need all of it for dq, which is summed in
fp32 in global memory in the order of the accumulators' registers, so that its last bits differ from run to run. Where a
block of keys is split, the last of its pieces adds the sums of dk and dv of the others.
-sum(dout * out) of each row, zeros for the sums of dq, and their rounding are made by `front` for the first query heads,
by `back` for the last ones, and by free warps of `backward`, under the products, for all others.
"""

import functools
import heapq
import math
import struct

import torch
from torch.utils.cpp_extension import load_inline

WINDOW = 2048
HELP = 0  # what the free warps do: nothing, row values, these and the rounding of dq
KV_STAGES = 2  # blocks of keys on their way or in use
Q_STAGES = 2  # tiles of Q, likewise; a power of two
DO_STAGES = 2  # of dout
HELPER_REGS = 24
SWITCH, SPLIT = 2.0, 3.0  # what a block of keys costs beside its tiles, and its split, in tiles
ROWS_AHEAD = 34  # tiles of time between the row values of a head and their first use
BACK = 20  # tiles of time before the end: what is ready later is rounded by `back`
PROBE = ""

SOURCE = r"""
#include <cuda.h>
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <stdint.h>
#include <string.h>
#define INLINE __device__ __forceinline__

constexpr int WIDTH = 128, KEYS = 128, QUERIES = 64, KEY_PANEL = KEYS * 128, QUERY_PANEL = QUERIES * 128;
constexpr int KEY_BYTES = 2 * KEY_PANEL, QUERY_BYTES = 2 * QUERY_PANEL, DS_BYTES = KEY_PANEL;
// shared memory: K and V of a stage, Q, dO, dS^T (a row for each key), lse, delta, barriers
constexpr int AT_K = 0, AT_Q = KV_STAGES * 2 * KEY_BYTES, AT_DO = AT_Q + Q_STAGES * QUERY_BYTES;
constexpr int AT_DS = AT_DO + DO_STAGES * QUERY_BYTES, AT_LSE = AT_DS + 2 * DS_BYTES;
constexpr int AT_DELTA = AT_LSE + Q_STAGES * QUERIES * 4, AT_BARS = AT_DELTA + DO_STAGES * QUERIES * 4;
constexpr int SMEM = AT_BARS + 192;
static_assert(SMEM <= 232448 && (Q_STAGES & (Q_STAGES - 1)) == 0 && (DO_STAGES & (DO_STAGES - 1)) == 0, "sizes");
static_assert(WINDOW % 64 == 0 && WINDOW >= 192, "window");

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

INLINE int load_acquire(const int* from) {
  int x;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}
INLINE void store_release(uint32_t to, int x) {
  asm volatile("st.release.cta.shared::cta.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}
INLINE void sleep_for(int ns) { asm volatile("nanosleep.u32 %0;" ::"r"(ns)); }

// A constant, so that it takes no registers; sm_90 keeps the first 1024 bytes of shared memory for itself
extern __shared__ __align__(1024) uint8_t shared_memory[];
INLINE uint32_t shared_base() {
  return (uint32_t)__cvta_generic_to_shared(shared_memory);
}

// ---- products of a warpgroup; descriptors count units of 16 bytes ----
// KEEP: added to d. scores^T[64 keys, QUERIES] = keys[64, WIDTH] queries[QUERIES, WIDTH]^T
template <int KEEP> INLINE void multiply_rows(float (&d)[32], uint64_t keys, uint64_t queries) {
#pragma unroll
  for (int k = 0; k < WIDTH / 16; k++) {
    const uint64_t a = keys + k / 4 * (KEY_PANEL / 16) + k % 4 * 2;
    const uint64_t b = queries + k / 4 * (QUERY_PANEL / 16) + k % 4 * 2;
    if (k == 0) mma<KEEP, 0, 0>(d, a, b); else mma<1, 0, 0>(d, a, b);
  }
}
// d[64 keys, WIDTH] += weights^T[64 keys, queries] rows[queries, WIDTH]
INLINE void add_weighted(float (&d)[64], const uint32_t (&weights)[16], uint64_t rows) {
#pragma unroll
  for (int k = 0; k < 4; k++) mma(d, weights + 4 * k, rows + k * 128);
}
// dq[64 queries, 64 columns] = dS[64 queries, 128 keys] K[128 keys, 64 columns]
INLINE void multiply_keys(float (&d)[32], uint64_t ds, uint64_t keys) {
#pragma unroll
  for (int k = 0; k < KEYS / 16; k++)
    if (k == 0) mma<0, 1, 1>(d, ds, keys); else mma<1, 1, 1>(d, ds + k * 128, keys + k * 128);
}

// A part of a block's work: for one block of keys the query heads `head` to `head` + `heads` - 1.
struct Piece {
  int block, head, heads, steps;  // of keys; query heads; tiles of queries of each
  int slot, first_slot, slots;    // for unfinished sums of dk and dv, of this piece and of all of this block of keys
  int counters;                   // of those that are ready, one for each warp
};
struct Job { int kind, head, first, chunks; };  // kind 0: row values; 1: round dq

struct Args {
  const uint4 *out, *dout;
  const float* lse_in;
  float* lse;                     // (heads, padded), permuted within 16 rows; to the base 2; infinite behind the last row
  float* delta;                   // likewise; negative; zero there
  float* dq_sums;                 // (heads, padded, width), in order of registers
  float* partial;                 // unfinished dk and dv, a slot for each piece
  int* counters;                  // [ready: heads x 2][done: heads x 2][warps of split blocks of keys]
  __nv_bfloat16 *dq, *dk, *dv;
  const Piece* pieces;            // in a row for each block
  const int* bounds;              // pieces of block i: bounds[i] to bounds[i + 1]
  const Job *front, *jobs, *back;
  int n_front, n_jobs, n_back, n_counters;
  int heads, group, length, padded;
  int border, full_blocks;        // rows before the border get sums of the first full_blocks blocks of keys alone
  int units;                      // blocks of keys
  float scale, factor;            // width ** -0.5; times log2(e)
};

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

INLINE float dot_pairs(uint32_t a, uint32_t b) {
  const float high = __uint_as_float(a & 0xffff0000u) * __uint_as_float(b & 0xffff0000u);
  return __uint_as_float(a << 16) * __uint_as_float(b << 16) + high;
}

// ---- before and after the products ----
// a warp: 16 rows of -sum(dout out), of lse to the base 2, and of zeros for dq
template <int UNROLL> INLINE void row_values(const Args& args, int head, int row, int lane) {
  const int t = lane & 15;
  float4* zeros = (float4*)(args.dq_sums + ((size_t)head * args.padded + row) * WIDTH) + lane;
  constexpr int STEPS = 8 / UNROLL;
#pragma unroll 1
  for (int s = 0; s < STEPS; s++) {
    float sums[UNROLL];
    uint4 a[UNROLL], b[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const int at = row + 2 * (s * UNROLL + u) + (lane >> 4);
      a[u] = b[u] = make_uint4(0, 0, 0, 0);
      if (at < args.length) {
        const size_t from = ((size_t)head * args.length + at) * (WIDTH / 8) + t;
        a[u] = __ldg(args.out + from), b[u] = __ldg(args.dout + from);
      }
    }
#pragma unroll
    for (int u = 0; u < 2 * UNROLL; u++) zeros[(s * 2 * UNROLL + u) * 32] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      float sum = dot_pairs(a[u].x, b[u].x) + dot_pairs(a[u].y, b[u].y) + dot_pairs(a[u].z, b[u].z) +
                  dot_pairs(a[u].w, b[u].w);
#pragma unroll
      for (int i = 1; i < 16; i *= 2) sum += __shfl_xor_sync(~0u, sum, i);
      sums[u] = sum;
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const int at = row + 2 * (s * UNROLL + u) + (lane >> 4);
      // of 16 rows, the four of a consumer's thread side by side: 2 t, 2 t + 1, and 8 further
      const size_t to = (size_t)head * args.padded + ((at & ~15) | (at & 6) << 1 | (at & 8) >> 2 | (at & 1));
      if (t == 0) {
        args.delta[to] = -sums[u];
        args.lse[to] =
            at < args.length ? args.lse_in[(size_t)head * args.length + at] * 1.4426950408889634f : INFINITY;
      }
    }
  }
}
// a warp: 16 rows of 64 columns
INLINE void round_dq(const Args& args, int head, int unit, int lane) {
  const int warp = unit & 3, wg = unit >> 2 & 1;
  const int row = unit / 8 * QUERIES + warp * 16 + lane / 4;
  const float4* from = (const float4*)(args.dq_sums + (size_t)head * args.padded * WIDTH) + (size_t)unit * 256 + lane;
  __nv_bfloat16* to = args.dq + (size_t)head * args.length * WIDTH + wg * 64;
#pragma unroll
  for (int b = 0; b < 2; b++) {
    float x[16];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float4 y = __ldcg(from + (4 * b + i) * 32);
      x[4 * i] = y.x, x[4 * i + 1] = y.y, x[4 * i + 2] = y.z, x[4 * i + 3] = y.w;
    }
    store_rows(to + 32 * b, x, args.scale, row, args.length, WIDTH, lane & 3);
  }
}
// first chunk: 16 rows of either kind; for rounding a chunk is a unit of round_dq
template <int UNROLL> INLINE void do_chunk(const Args& args, const Job& job, int chunk, int lane) {
  if (job.kind == 0) row_values<UNROLL>(args, job.head, job.first + chunk * 16, lane);
  else round_dq(args, job.head, job.first / 8 + chunk, lane);
}
__global__ void __launch_bounds__(256) front(const Args args) {
  start_next_kernel();
  if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i < args.n_counters; i += 256) args.counters[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < args.n_front; i += 256) {
      const Job job = args.front[i];
      args.counters[job.head * 2 + (job.first >= args.border)] = job.chunks;
    }
  }
  int chunk = blockIdx.x * 8 + threadIdx.x / 32;
  for (int i = 0; i < args.n_front; i++) {
    const Job job = args.front[i];
    if (chunk < job.chunks) return row_values<8>(args, job.head, job.first + chunk * 16, threadIdx.x & 31);
    chunk -= job.chunks;
  }
}
__global__ void __launch_bounds__(256) back(const Args args) {
  int chunk = blockIdx.x * 8 + threadIdx.x / 32;
  wait_for_kernel_before();
  for (int i = 0; i < args.n_back; i++) {
    const Job job = args.back[i];
    if (chunk < job.chunks) return round_dq(args, job.head, job.first / 8 + chunk, threadIdx.x & 31);
    chunk -= job.chunks;
  }
}

// ---- the producer ----
INLINE void load_panels(uint32_t to, const CUtensorMap* map, int bytes, int row, int head, uint32_t bar) {
  load_tile(to, map, 0, row, head, bar);
  load_tile(to + bytes, map, 64, row, head, bar);
}
// stage and parity of step j: powers of two, so that consumers keep j alone
template <int STAGES> INLINE int stage_of(int j) { return j & (STAGES - 1); }
template <int STAGES> INLINE uint32_t parity_of(int j) { return j / STAGES & 1; }
// barriers, from the start of theirs
constexpr int K_FULL = 0, V_FULL = K_FULL + 8 * KV_STAGES, KV_EMPTY = V_FULL + 8 * KV_STAGES;
constexpr int Q_FULL = KV_EMPTY + 8 * KV_STAGES, Q_EMPTY = Q_FULL + 8 * Q_STAGES, DO_FULL = Q_EMPTY + 8 * Q_STAGES;
constexpr int DO_EMPTY = DO_FULL + 8 * DO_STAGES, DS_FULL = DO_EMPTY + 8 * DO_STAGES, STEPS_DONE = DS_FULL + 8;

INLINE void wait_rows(const Args& args, int head, int part, int rows) {  // until row values of that part are there
  const int* at = args.counters + head * 2 + part;
  while (load_acquire(at) < rows / 16) sleep_for(100);
}
INLINE void produce(const CUtensorMap* mq, const CUtensorMap* mk, const CUtensorMap* mv, const CUtensorMap* mdo,
                    const Args& args, uint32_t base) {
  const uint32_t bars = base + AT_BARS;
  const int begin = args.bounds[blockIdx.x], end = args.bounds[blockIdx.x + 1];
  int j = 0;
#pragma unroll 1
  for (int p = begin; p < end; p++) {
    const Piece piece = args.pieces[p];
    const int s = stage_of<KV_STAGES>(p - begin), first = piece.block * KEYS, key_head = piece.head / args.group;
    const uint32_t kv = base + AT_K + s * 2 * KEY_BYTES;
    mbar_wait(bars + KV_EMPTY + 8 * s, parity_of<KV_STAGES>(p - begin) ^ 1);
    mbar_expect(bars + K_FULL + 8 * s, KEY_BYTES);
    load_panels(kv, mk, KEY_PANEL, first, key_head, bars + K_FULL + 8 * s);
    mbar_expect(bars + V_FULL + 8 * s, KEY_BYTES);
    load_panels(kv + KEY_BYTES, mv, KEY_PANEL, first, key_head, bars + V_FULL + 8 * s);
    if (p == begin) wait_for_kernel_before();  // of lse and delta; and consumers add to dq after these alone
#pragma unroll 1
    for (int head = piece.head; head < piece.head + piece.heads; head++) {
      if (HELP) {
        if (first < args.border) wait_rows(args, head, 0, args.border);
        if (first + piece.steps * QUERIES > args.border) wait_rows(args, head, 1, args.padded - args.border);
        asm volatile("fence.proxy.async;" ::: "memory");
      }
      const size_t from = (size_t)head * args.padded + first;
      const float *lse = args.lse + from, *delta = args.delta + from;
#pragma unroll 1
      for (int i = 0; i < piece.steps; i++, j++) {
        const int row = first + i * QUERIES, q = stage_of<Q_STAGES>(j), o = stage_of<DO_STAGES>(j);
        uint32_t full = bars + Q_FULL + 8 * q;
        mbar_wait(bars + Q_EMPTY + 8 * q, parity_of<Q_STAGES>(j) ^ 1);
        mbar_expect(full, QUERY_BYTES + QUERIES * 4);
        load_panels(base + AT_Q + q * QUERY_BYTES, mq, QUERY_PANEL, row, head, full);
        load_bytes(base + AT_LSE + q * QUERIES * 4, lse + i * QUERIES, QUERIES * 4, full);
        full = bars + DO_FULL + 8 * o;
        mbar_wait(bars + DO_EMPTY + 8 * o, parity_of<DO_STAGES>(j) ^ 1);
        // who leaves dO of a step has added dq of the step before
        if (HELP) store_release(bars + STEPS_DONE, j - DO_STAGES);
        mbar_expect(full, QUERY_BYTES + QUERIES * 4);
        load_panels(base + AT_DO + o * QUERY_BYTES, mdo, QUERY_PANEL, row, head, full);
        load_bytes(base + AT_DELTA + o * QUERIES * 4, delta + i * QUERIES, QUERIES * 4, full);
      }
    }
  }
  if (HELP && end > begin) {
    mbar_wait(bars + KV_EMPTY + 8 * stage_of<KV_STAGES>(end - 1 - begin), parity_of<KV_STAGES>(end - 1 - begin));
    store_release(bars + STEPS_DONE, j);
  }
}
// ---- free warps ----
// says which units (a block of keys with a query head) have added all of their dq
INLINE void report_units(const Args& args, uint32_t steps) {
  const int begin = args.bounds[blockIdx.x], end = args.bounds[blockIdx.x + 1];
  int* done = args.counters + args.heads * 2;
  int wanted = 0;
  wait_for_kernel_before();
  for (int p = begin; p < end; p++) {
    const Piece piece = args.pieces[p];
    for (int head = piece.head; head < piece.head + piece.heads; head++) {
      wanted += piece.steps;
      while (true) {
        int now;
        asm volatile("ld.acquire.cta.shared::cta.b32 %0, [%1];" : "=r"(now) : "r"(steps) : "memory");
        if (now >= wanted) break;
        sleep_for(500);
      }
      __threadfence();
      if (piece.block < args.full_blocks) atomicAdd(done + head * 2, 1);
      atomicAdd(done + head * 2 + 1, 1);
    }
  }
}
INLINE void help(const Args& args, int worker, int workers, int lane) {
  wait_for_kernel_before();
  int ahead = 0;  // chunks of jobs before, so that the first workers do not get more than others
#pragma unroll 1
  for (int i = 0; i < args.n_jobs; i++) {
    const Job job = args.jobs[i];
    const int part = job.first >= args.border;
    int mine = worker - ahead % workers;
    if (mine < 0) mine += workers;
    ahead += job.chunks;
    if (job.kind == 1 && mine < job.chunks) {
      const int* done = args.counters + args.heads * 2 + job.head * 2 + part;
      while (load_acquire(done) < (part ? args.units : args.full_blocks)) sleep_for(1000);
      __syncwarp();
    }
#pragma unroll 1
    for (int chunk = mine; chunk < job.chunks; chunk += workers) {
      do_chunk<1>(args, job, chunk, lane);
      if (job.kind == 0) {
        __syncwarp();
        if (lane == 0) {
          __threadfence();
          atomicAdd(args.counters + job.head * 2 + part, 1);
        }
      }
    }
  }
}

// ---- the consumers ----
struct Sums {
  float s[32], dp[32], dq[32], dk[64], dv[64];
  uint32_t p[16], t[16];  // pairs of bf16: P^T, which becomes dS^T in place; dP^T - delta
};
struct Consumer {  // what a thread knows, in few registers
  uint32_t half;                 // 512 for the second warpgroup: 8 KiB / 16
  uint32_t kv;                   // base of K / 16
  uint32_t ds_at;                // where it stores dS^T, from the start of a stage
  INLINE uint32_t rows_at() const { return ds_at >> 3 & 48; }  // its columns of lse and delta: (lane & 3) * 16
  float* dq;                     // where it adds dq of the tile before
  int query, rows;               // the tile's first query, from the first key; of a query head
};

// P^T = exp2(S^T factor - lse), in place; a key that the query does not see weighs nothing
INLINE void weigh(Sums& x, const Consumer& me, float factor, uint32_t lse) {
  if ((uint32_t)(me.query - KEYS) > WINDOW - QUERIES - KEYS) {
    uint32_t thread;  // read anew: these steps are few
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    const int key = thread / 32 * 16 + thread % 32 / 4, distance = me.query + 2 * (thread & 3) - key;
#pragma unroll
    for (int i = 0; i < 32; i++)
      if ((uint32_t)(distance + i / 4 * 8 + i % 2 - i / 2 % 2 * 8) >= WINDOW) x.s[i] = -INFINITY;
  }
#pragma unroll
  for (int c = 0; c < 4; c++) {
    const float4 l = load_four(lse + me.rows_at() + c * 64);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float of_row = i < 4 ? (i % 2 ? l.y : l.x) : (i % 2 ? l.w : l.z);
      x.s[8 * c + i] = exp2_approx(fmaf(x.s[8 * c + i], factor, -of_row));
    }
  }
}
// The sums of dP^T start as -delta. Read early: later these loads would wait behind the additions to dq.
INLINE void start_dp(Sums& x, const Consumer& me, uint32_t delta) {
#pragma unroll
  for (int c = 0; c < 4; c++) {
    const float4 d = load_four(delta + me.rows_at() + c * 64);
#pragma unroll
    for (int i = 0; i < 8; i++) x.dp[8 * c + i] = i < 4 ? (i % 2 ? d.y : d.x) : (i % 2 ? d.w : d.z);
  }
}
// dS^T = P^T (dP^T - delta), in the registers of P^T, which the product of dv must have read; and for both warpgroups
INLINE void share_ds(Sums& x, const Consumer& me, uint32_t to) {
#pragma unroll
  for (int i = 0; i < 16; i++) x.p[i] = multiply_pairs(x.p[i], x.t[i]);
#pragma unroll
  for (int c = 0; c < 8; c += 2) store_matrices((to + me.ds_at) ^ c % 8 << 4, x.p + 2 * c);
  fence_async();
}
// one thread of a warp, without a register for the lane
INLINE bool elected() {
  uint32_t yes;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(yes));
  return yes;
}
INLINE void release(uint32_t bar) {
  __syncwarp();
  if (elected()) mbar_arrive(bar);
}
// A warp's instruction adds 512 bytes in a row. Bulk copies from shared memory were slower: that is the busiest unit.
// LAST: of this query head
INLINE void add_dq(float (&dq)[32], Consumer& me, const Args& args, bool last) {
  if (!NO_ADDS) {
#pragma unroll
    for (int i = 0; i < 8; i++) add_four(me.dq + i * 128, dq + 4 * i);
  }
  me.dq += 8192;
  if (last) me.dq += (args.padded - me.rows) * WIDTH;
}

// A value before each product that overwrites: what the array held must not stay in registers.
template <int N> INLINE void clear(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) x[i] = 0.f;
}

INLINE void issue_scores(Sums& x, const Consumer& me, int j) {
  const int stage = stage_of<Q_STAGES>(j);
  mbar_wait(shared_base() + AT_BARS + Q_FULL + 8 * stage, parity_of<Q_STAGES>(j));
  clear(x.s);
  touch(x.s);
  wgmma_fence();
  multiply_rows<0>(x.s, descriptor(me.kv + me.half), descriptor(shared_base() / 16 + (AT_Q + stage * QUERY_BYTES) / 16));
  wgmma_commit();
}
INLINE void issue_dk(Sums& x, const Consumer& me, int j) {
  const uint32_t at = shared_base() / 16 + (AT_Q + stage_of<Q_STAGES>(j) * QUERY_BYTES) / 16;
  touch(x.p);
  touch(x.dk);
  wgmma_fence();
  add_weighted(x.dk, x.p, descriptor(at, QUERY_PANEL));
  wgmma_commit();
}
INLINE void issue_dq(Sums& x, const Consumer& me, int j) {
  mbar_wait(shared_base() + AT_BARS + DS_FULL, j & 1);  // both warpgroups' part of dS
  clear(x.dq);
  touch(x.dq);
  wgmma_fence();
  multiply_keys(x.dq, descriptor(shared_base() / 16 + (AT_DS + (j & 1) * DS_BYTES) / 16), descriptor(me.kv + 2 * me.half));
  wgmma_commit();
}
INLINE void issue_dp_dv(Sums& x, const Consumer& me, int j) {
  const uint32_t at = shared_base() / 16 + (AT_DO + stage_of<DO_STAGES>(j) * QUERY_BYTES) / 16;
  touch(x.dp);
  wgmma_fence();
  multiply_rows<1>(x.dp, descriptor(me.kv + KEY_BYTES / 16 + me.half), descriptor(at));
  wgmma_commit();
  touch(x.p);
  touch(x.dv);
  wgmma_fence();
  add_weighted(x.dv, x.p, descriptor(at, QUERY_PANEL));
  wgmma_commit();
}
// From S of tile j to dP - delta. In flight before it: S, and but for the first tile dk of the tile before. The dq of
// that tile is issued only behind the exponentials: it needs dS of both warpgroups, so that one may run half a tile
// ahead, and multiply while the other takes exponentials.
// After it nothing is: ptxas serialises wgmma that a loop's end finds in flight, with registers for its first operand.
template <bool FIRST> INLINE void softmax(Sums& x, Consumer& me, const Args& args, int j) {
  wgmma_wait<FIRST ? 0 : 1>();
  touch(x.s);
  weigh(x, me, args.factor, shared_base() + AT_LSE + stage_of<Q_STAGES>(j) * QUERIES * 4);
  mbar_wait(shared_base() + AT_BARS + DO_FULL + 8 * stage_of<DO_STAGES>(j), parity_of<DO_STAGES>(j));
  start_dp(x, me, shared_base() + AT_DELTA + stage_of<DO_STAGES>(j) * QUERIES * 4);
  if (!FIRST) {
    wgmma_wait<0>();
    touch(x.dk);
    touch(x.p);
    release(shared_base() + AT_BARS + Q_EMPTY + 8 * stage_of<Q_STAGES>(j - 1));
  }
#pragma unroll
  for (int i = 0; i < 16; i++) x.p[i] = pack(x.s[2 * i], x.s[2 * i + 1]);
  if (!FIRST) issue_dq(x, me, j - 1);
  issue_dp_dv(x, me, j);
  if (!FIRST) {
    wgmma_wait<2>();
    touch(x.dq);
    add_dq(x.dq, me, args, me.query == 0);
  }
  wgmma_wait<1>();
  touch(x.dp);
#pragma unroll
  for (int i = 0; i < 16; i++) x.t[i] = pack(x.dp[2 * i], x.dp[2 * i + 1]);
  wgmma_wait<0>();
  touch(x.dv);
  touch(x.p);
}
// dS of tile j for both warpgroups, and dk of it
INLINE void ds_and_dk(Sums& x, const Consumer& me, int j) {
  release(shared_base() + AT_BARS + DO_EMPTY + 8 * stage_of<DO_STAGES>(j));
  share_ds(x, me, shared_base() + AT_DS + (j & 1) * DS_BYTES);
  release(shared_base() + AT_BARS + DS_FULL);
  issue_dk(x, me, j);
}
// Sums of a part of the query heads: the last piece that comes adds those of the others.
INLINE bool finish(Sums& x, const Args& args, const Piece& piece, int warp, int lane) {
  float4* own = (float4*)args.partial + ((size_t)piece.slot * 8 + warp) * 1024 + lane;
#pragma unroll
  for (int i = 0; i < 16; i++) {
    __stcg(own + i * 32, make_float4(x.dk[4 * i], x.dk[4 * i + 1], x.dk[4 * i + 2], x.dk[4 * i + 3]));
    __stcg(own + (16 + i) * 32, make_float4(x.dv[4 * i], x.dv[4 * i + 1], x.dv[4 * i + 2], x.dv[4 * i + 3]));
  }
  __syncwarp();
  int before = 0;
  if (lane == 0) {
    __threadfence();
    before = atomicAdd(args.counters + piece.counters + warp, 1);
    __threadfence();
  }
  before = __shfl_sync(~0u, before, 0);
  if (before + 1 < piece.slots) return false;
#pragma unroll 1
  for (int s = piece.first_slot; s < piece.first_slot + piece.slots; s++) {
    if (s == piece.slot) continue;
    const float4* from = (const float4*)args.partial + ((size_t)s * 8 + warp) * 1024 + lane;
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const float4 y = __ldcg(from + i * 32), z = __ldcg(from + (16 + i) * 32);
      x.dk[4 * i] += y.x, x.dk[4 * i + 1] += y.y, x.dk[4 * i + 2] += y.z, x.dk[4 * i + 3] += y.w;
      x.dv[4 * i] += z.x, x.dv[4 * i + 1] += z.y, x.dv[4 * i + 2] += z.z, x.dv[4 * i + 3] += z.w;
    }
  }
  return true;
}

INLINE void consume(const Args& args, uint32_t base, int wg) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 & 3, row = wg * 64 + warp * 16;
  Consumer me;
  me.half = wg * 512;
  me.ds_at = (row + (lane & 15)) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
  int j = 0;
#pragma unroll 1
  for (int p = 0; p < args.bounds[blockIdx.x + 1] - args.bounds[blockIdx.x]; p++) {
    const int s = stage_of<KV_STAGES>(p);
    Sums x;
    int left;
    {
      const Piece piece = args.pieces[args.bounds[blockIdx.x] + p];
      me.kv = (base + AT_K) / 16 + s * (2 * KEY_BYTES / 16);
      me.dq = args.dq_sums + ((size_t)piece.head * args.padded + piece.block * KEYS) * WIDTH + (wg * 4 + warp) * 1024 +
              lane * 4;
      me.query = 0, me.rows = piece.steps * QUERIES;
      left = piece.heads * piece.steps;
    }
    clear(x.dk), clear(x.dv);
    mbar_wait(base + AT_BARS + K_FULL + 8 * s, parity_of<KV_STAGES>(p));
    issue_scores(x, me, j);
    mbar_wait(base + AT_BARS + V_FULL + 8 * s, parity_of<KV_STAGES>(p));
    softmax<true>(x, me, args, j);
#pragma unroll 1
    while (--left > 0) {  // products of this warpgroup are nearly always waiting
      asm volatile("" : "+r"(me.half));  // or descriptors that never change would take registers
      issue_scores(x, me, j + 1);
      ds_and_dk(x, me, j);
      me.query = me.query + QUERIES == me.rows ? 0 : me.query + QUERIES;
      softmax<false>(x, me, args, ++j);
    }
    ds_and_dk(x, me, j);
    issue_dq(x, me, j);
    wgmma_wait<0>();
    touch(x.dk);
    touch(x.dq);
    release(base + AT_BARS + Q_EMPTY + 8 * stage_of<Q_STAGES>(j));
    j++;
    add_dq(x.dq, me, args, true);
    release(base + AT_BARS + KV_EMPTY + 8 * s);
    const Piece piece = args.pieces[args.bounds[blockIdx.x] + p];
    if (piece.slots == 1 || finish(x, args, piece, wg * 4 + warp, lane)) {
      const size_t rows = (size_t)(piece.head / args.group) * args.length * WIDTH;
      const int at = piece.block * KEYS + wg * 64 + warp * 16 + lane / 4;
      store_rows(args.dk + rows, x.dk, args.scale, at, args.length, WIDTH, lane & 3);
      store_rows(args.dv + rows, x.dv, 1.f, at, args.length, WIDTH, lane & 3);
    }
  }
}

__global__ void __launch_bounds__(384, 1)
backward(const __grid_constant__ CUtensorMap mq, const __grid_constant__ CUtensorMap mk,
         const __grid_constant__ CUtensorMap mv, const __grid_constant__ CUtensorMap mdo,
         const __grid_constant__ Args args) {
  const uint32_t base = shared_base(), b = base + AT_BARS;
  if (base & 1023) __trap();
  if (threadIdx.x == 0) {
    for (int i = 0; i < KV_STAGES; i++)
      mbar_init(b + K_FULL + 8 * i, 1), mbar_init(b + V_FULL + 8 * i, 1), mbar_init(b + KV_EMPTY + 8 * i, 8);
    for (int i = 0; i < Q_STAGES; i++) mbar_init(b + Q_FULL + 8 * i, 1), mbar_init(b + Q_EMPTY + 8 * i, 8);
    for (int i = 0; i < DO_STAGES; i++) mbar_init(b + DO_FULL + 8 * i, 1), mbar_init(b + DO_EMPTY + 8 * i, 8);
    mbar_init(b + DS_FULL, 8);
    asm volatile("st.shared.b32 [%0], 0;" ::"r"(b + STEPS_DONE) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  start_next_kernel();
  const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (role == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(HELPER_REGS));
    const int warp = __shfl_sync(~0u, threadIdx.x / 32 & 3, 0), lane = threadIdx.x & 31;
    if (warp == 0) {
      if (lane == 0) produce(&mq, &mk, &mv, &mdo, args, base);
    } else if (HELP && warp == 1) {
      if (lane == 0) report_units(args, b + STEPS_DONE);
    } else if (HELP) {
      help(args, blockIdx.x * 2 + warp - 2, gridDim.x * 2, lane);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"((504 - HELPER_REGS) / 2));
    consume(args, base, role);
  }
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

// the bytes of Args but its pointers come as numbers
extern "C" int window_backward(const long long* a) {
  void* p[18];
  for (int i = 0; i < 18; i++) p[i] = (void*)a[i];
  Args args;
  args.out = (const uint4*)p[3], args.lse_in = (const float*)p[4], args.dout = (const uint4*)p[5];
  args.dq = (__nv_bfloat16*)p[6], args.dk = (__nv_bfloat16*)p[7], args.dv = (__nv_bfloat16*)p[8];
  args.dq_sums = (float*)p[9], args.lse = (float*)p[10], args.delta = (float*)p[11], args.partial = (float*)p[12];
  args.counters = (int*)p[13];
  const int* table = (const int*)p[14];  // bounds, pieces, front, jobs, back
  const long long* n = a + 15;
  const int sms = n[0], pieces = n[1], key_heads = n[10];
  args.n_front = n[2], args.n_jobs = n[3], args.n_back = n[4], args.n_counters = n[5];
  const int front_chunks = n[6], back_chunks = n[7];
  args.heads = n[8], args.group = args.heads / key_heads, args.length = n[9], args.padded = n[11];
  args.border = n[12], args.full_blocks = n[13], args.units = n[14];
  const cudaStream_t stream = (cudaStream_t)n[15];
  const int bits = (int)n[16];
  memcpy(&args.scale, &bits, 4);
  args.factor = args.scale * 1.4426950408889634f;
  args.pieces = (const Piece*)table, table += 8 * pieces;
  args.front = (const Job*)table, table += 4 * args.n_front;
  args.jobs = (const Job*)table, table += 4 * args.n_jobs;
  args.back = (const Job*)table, table += 4 * args.n_back;
  args.bounds = table;
  CUtensorMap mq, mk, mv, mdo;
  int error;
  if ((error = make_map(&mq, p[0], WIDTH, args.length, args.heads, QUERIES)) ||
      (error = make_map(&mdo, p[5], WIDTH, args.length, args.heads, QUERIES)) ||
      (error = make_map(&mk, p[1], WIDTH, args.length, key_heads, KEYS)) ||
      (error = make_map(&mv, p[2], WIDTH, args.length, key_heads, KEYS)))
    return 1000 + error;
  if (cudaFuncSetAttribute(backward, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM)) return -2;
  start(front, (front_chunks + 7) / 8, 256, 0, false, stream, args);
  start(backward, sms, 384, SMEM, true, stream, mq, mk, mv, mdo, args);
  start(back, (back_chunks + 7) / 8, 256, 0, true, stream, args);
  return (int)cudaGetLastError();
}
#ifdef TORCH_EXTENSION_NAME
#define PY_SSIZE_T_CLEAN
#include <Python.h>
static PyObject* py_run(PyObject*, PyObject* const* given, Py_ssize_t) {
  long long a[32];
  for (int i = 0; i < 32; i++) a[i] = PyLong_AsLongLong(given[i]);
  return PyLong_FromLong(window_backward(a));
}
static PyMethodDef methods[] = {{"run", (PyCFunction)(void*)py_run, METH_FASTCALL, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "window_backward", "", -1, methods};
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


_run = None


def _load():
    global _run
    if _run is None:
        constants = {"WINDOW": WINDOW, "HELP": HELP, "KV_STAGES": KV_STAGES, "Q_STAGES": Q_STAGES}
        constants |= {"DO_STAGES": DO_STAGES, "HELPER_REGS": HELPER_REGS, "NO_ADDS": int(PROBE == "no adds")}
        flags = [f"-D{name}={value}" for name, value in constants.items()]
        flags += ["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a"]
        _run = load_inline(
            "window_backward",
            "",
            SOURCE.replace("@WGMMA@", wgmma(64) + wgmma(128)),
            no_implicit_headers=True,
            with_pytorch_error_handling=False,
            extra_cuda_cflags=flags,
        ).run
    return _run


def plan(sms, heads, key_heads, tokens):
    """Pieces (key head, block of keys, first query head, query heads) of each multiprocessor, in order, and their tiles."""
    group, blocks = heads // key_heads, math.ceil(tokens / 128)
    steps = [math.ceil(min(tokens - 128 * b, 127 + WINDOW) / 64) for b in range(blocks)]
    goal = sum(steps) * heads / sms
    loads, lists = [0.0] * sms, [[] for _ in range(sms)]
    waiting = [(-steps[b] * group, k, b, 0, group) for k in range(key_heads) for b in range(blocks)]
    heapq.heapify(waiting)
    while waiting:
        cost, k, b, first, count = heapq.heappop(waiting)
        at = min(range(sms), key=loads.__getitem__)
        if count > 1 and loads[at] - cost > goal + 3:
            half = count // 2
            for some in ((first, half), (first + half, count - half)):
                heapq.heappush(waiting, (-steps[b] * some[1], k, b, *some))
            continue
        loads[at] += -cost + SWITCH + SPLIT * (count < group)
        lists[at].append((k, b, first, count))
    full = max(steps)
    for pieces in lists:  # short blocks of keys between whole and split ones, so that heads end one after the other
        pieces.sort(key=lambda p: (1 if steps[p[1]] < full else 2 * (p[3] < group), p))
    return lists, steps


@functools.cache
def schedule(sms, heads, key_heads, tokens):
    group, padded = heads // key_heads, math.ceil(tokens / 128) * 128
    lists, steps = plan(sms, heads, key_heads, tokens)
    full_blocks = sum(128 * b + 127 + WINDOW <= tokens for b in range(len(steps)))
    border = 128 * full_blocks
    split = {}  # of the blocks of keys in more than one piece: their pieces
    for pieces in lists:
        for k, b, _, count in pieces:
            if count < group:
                split[k, b] = split.get((k, b), 0) + 1
    places, slots, n_counters = {}, 0, 4 * heads
    for block, n in split.items():
        places[block] = [slots, slots, n, n_counters]
        slots, n_counters = slots + n, n_counters + 8
    bounds, table = [0], []
    start, end = {}, {}  # of the use of (head, part), in tiles of time
    for pieces in lists:
        now = 0.0
        for k, b, first, count in pieces:
            slot, first_slot, n, counters = 0, 0, 1, 0
            if count < group:
                slot, first_slot, n, counters = places[k, b]
                places[k, b][0] += 1
            table += [b, k * group + first, count, steps[b], slot, first_slot, n, counters]
            for head in range(k * group + first, k * group + first + count):
                for part in (0, 1):
                    if 128 * b < border if part == 0 else 128 * b + 64 * steps[b] > border:
                        start[head, part] = min(start.get((head, part), now), now)
                    if part or b < full_blocks:
                        end[head, part] = max(end.get((head, part), 0), now + steps[b])
                now += steps[b]
            now += SWITCH + SPLIT * (count < group)
        bounds.append(len(table) // 8)
    last = max(end.values())

    def job(kind, head, part):
        first, rows = (border, padded - border) if part else (0, border)
        return [kind, head, first, rows // (8 if kind else 16)]

    front, jobs, back = [], [], []
    for at, use in start.items():
        (front if HELP == 0 or use < 8 else jobs).append((use - ROWS_AHEAD, 0, *at))
    for at, use in end.items():
        (back if HELP < 2 or use > last - BACK else jobs).append((use, 1, *at))
    front, jobs, back = ([job(*x[1:]) for x in sorted(some)] for some in (front, jobs, back))
    n_pieces = len(table) // 8
    for some in (front, jobs, back):
        for x in some:
            table += x
    numbers = [sms, n_pieces, len(front), len(jobs), len(back), n_counters, sum(x[3] for x in front)]
    numbers += [sum(x[3] for x in back), heads, tokens, key_heads, padded, border, full_blocks, len(steps)]
    return table + bounds, numbers, max(slots, 1), n_counters


@functools.cache
def on_device(device, *sizes):
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    table, *others = schedule(sms, *sizes)
    return torch.tensor(table, dtype=torch.int32).to(device), *others


def tile_width(x):
    """Zeros behind each row up to 128; contiguous, and aligned for TMA."""
    x = torch.nn.functional.pad(x, (0, 128 - x.shape[-1])) if x.shape[-1] < 128 else x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def check(q, k, v, out, lse, dout):
    if q.dim() != 3 or q.shape[2] > 128 or min(q.shape) < 1 or k.dim() != 3 or min(k.shape) < 1:
        raise ValueError("(heads, tokens, width) with a width of at most 128 is expected")
    if any(x.dtype != torch.bfloat16 or not x.is_cuda or x.device != q.device for x in (q, k, v, out, dout)):
        raise ValueError("bfloat16 tensors of one CUDA device are expected")
    if out.shape != q.shape or dout.shape != q.shape or k.shape != v.shape or k.shape[1:] != q.shape[1:]:
        raise ValueError("shapes that belong together are expected")
    if q.shape[0] % k.shape[0] or q.shape[0] * (q.shape[1] + 128) > 2**24:
        raise ValueError("whole groups of heads, and at most 2^24 rows, are expected")
    if lse.shape != q.shape[:2] or lse.device != q.device:
        raise ValueError("the log-sum-exp of each row is expected")


class ModelNew(torch.nn.Module):
    def forward(self, q, k, v, out, lse, dout):
        check(q, k, v, out, lse, dout)
        heads, tokens, width = q.shape
        q, k, v, out, dout = (tile_width(x) for x in (q, k, v, out, dout))
        lse = lse.float().contiguous()
        with torch.cuda.device(q.device):
            table, numbers, slots, n_counters = on_device(q.device, heads, k.shape[0], tokens)
            dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
            rows = heads * numbers[11]
            work = torch.empty(rows * 130 + slots * 32768 + n_counters, dtype=torch.float32, device=q.device)
            sums = work.data_ptr()
            lse2 = sums + 4 * rows * 128
            partial = lse2 + 8 * rows
            tensors = [x.data_ptr() for x in (q, k, v, out, lse, dout, dq, dk, dv)]
            places = [sums, lse2, lse2 + 4 * rows, partial, partial + slots * 131072, table.data_ptr()]
            scale = struct.unpack("i", struct.pack("f", width**-0.5))[0]
            stream = torch.cuda.current_stream().cuda_stream
            error = _load()(*tensors, *places, *numbers, stream, scale)
        if error:
            raise RuntimeError(f"launch failed: {error}")
        return (dq, dk, dv) if width == 128 else tuple(x[..., :width].contiguous() for x in (dq, dk, dv))
