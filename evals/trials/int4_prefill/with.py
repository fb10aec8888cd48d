"""x W^T + bias, W of 4 bits in groups of 128: bf16, one persistent launch of CUDA C++ for Hopper.

 * W goes to a scratch matrix in bf16, rounded as the reference rounds it, in units of two channels x 1024 of k: the first
   rounds' channels by the consumers' warps before their first tile, the others by the three free warps of the producer's
   warpgroup, under the product. A counter for each 128 channels x 1024 of k tells the producers.
 * product: clusters of two blocks own tiles of 256 tokens x 256 channels; a block has 128 channels (SWAP) or 128 tokens, and
   brings half of the other operand for both. Two consumer warpgroups, m64n256k16, four stages of 64 of k.
 * At a tile's end a consumer adds the bias and rounds to bf16 pairs; they are stored beside the next tile's products.
 * The tiles that no whole round is left for are cut along k; fp32 sums meet in memory, always added in the same order.
All blocks run at once, one an SM.
"""

import functools

import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

GM = 16  # rows of 256 tokens that are walked together
SWAP = 1  # 1: channels are the rows of wgmma
LEAD = 2  # rounds that unpacking may be ahead; 0: any
SPLIT = 1  # cut the last tiles along k
SEP = 0  # 1: unpack in a kernel before
PROBE = ""


def regs(n):
    return ",".join(f"%{i}" for i in range(n)), ", ".join(f'"+f"(d[{i}])' for i in range(n))


CUDA = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>

typedef uint32_t u32;
typedef uint64_t u64;
typedef long long i64;
constexpr int ST = 4, SLOT = 49152, SLICE = 8192, THREADS = 384, CHUNK = 1024;
constexpr int SLICES = ST * SLOT, BARS = SLICES + 4 * SLICE, BIAS = BARS + 128, SMEM = BIAS + 1024 + 1024;
constexpr int COUNTERS = 257;  // control: 0 blocks that ended, then 2 for each tile that is cut, from here 128 channels x CHUNK
static_assert(SMEM <= 232448, "shared memory");

__device__ __forceinline__ u32 s32(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void bar_init(u32 b, int n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(n) : "memory"); }
__device__ __forceinline__ void bar_expect(u32 b, int n) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(n) : "memory"); }
__device__ __forceinline__ void bar_wait(u32 b, u32 ph) {
  asm volatile("{\n .reg .pred p;\nW_%=:\n mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n @p bra D_%=;\n bra W_%=;\nD_%=:\n}" ::"r"(b), "r"(ph) : "memory");
}
__device__ __forceinline__ void bar_arrive_cta(u32 b, u32 cta) {
  asm volatile("{\n .reg .b32 r;\n mapa.shared::cluster.u32 r, %0, %1;\n mbarrier.arrive.shared::cluster.b64 _, [r];\n}" ::"r"(b), "r"(cta) : "memory");
}
__device__ __forceinline__ void tma(u32 dst, const CUtensorMap* m, u32 b, int c0, int c1) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(dst), "l"(m), "r"(b), "r"(c0), "r"(c1) : "memory");
}
__device__ __forceinline__ void tma_both(u32 dst, const CUtensorMap* m, u32 b, int c0, int c1) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(dst), "l"(m), "r"(b), "r"(c0), "r"(c1), "h"((uint16_t)3) : "memory");
}
__device__ __forceinline__ void tma_store(const CUtensorMap* m, u32 src, int c0, int c1, u64 pol) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%2, %3}], [%1], %4;" ::"l"(m), "r"(src), "r"(c0), "r"(c1), "l"(pol) : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ u64 desc(u32 a) { return (u64)((a & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62); }
__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void mma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
__device__ __forceinline__ void mma256(float (&d)[128], u64 a, u64 b, int acc) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {@REGS128@}, %128, %129, p, 1, 1, 0, 0;\n}"
               : @OUTS128@ : "l"(a), "l"(b), "r"(acc));
}
__device__ __forceinline__ u32 pack(float a, float b) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
  return r;
}
__device__ __forceinline__ float lo(u32 b) { return __uint_as_float(b << 16); }
__device__ __forceinline__ float hi(u32 b) { return __uint_as_float(b & 0xFFFF0000u); }
__device__ __forceinline__ u32 less(u32 a, u32 b) {
  u32 r;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ u32 times(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ int acquire(const int* p) {
  int v;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

struct Maps { CUtensorMap a, b, out; };
struct Weights { const u32* packed; const uint16_t *scales, *zeros; uint16_t* wide; };
struct Shape { int Mc, Nc, KB, end, rest, split, gm, tokens, channels, width, chunks, early; };

// Tile u: its place among the tiles of 256 x 256; every other group takes its channels backwards
__device__ __forceinline__ void place(const Shape& q, int u, int& mc, int& nc) {
  const int per = q.gm * q.Nc, g = u / per, r = u - g * per, rows = min(q.gm, q.Mc - g * q.gm);
  nc = r / rows;
  mc = g * q.gm + r - nc * rows;
  if (g & 1) nc = q.Nc - 1 - nc;
}

// Eight weights of one group; each pair's first is in the low bits of its byte. 0x4300 is 128, whose last bit counts 1.
__device__ __forceinline__ uint4 widened(u32 p, u32 scale, u32 zero) {
  const u32 s = scale * 0x10001u, z = zero * 0x10001u;
  u32 v[4];
#pragma unroll
  for (int i = 0; i < 4; i++) v[i] = times(less(less((p >> (4 * i)) & 0x000F000Fu | 0x43004300u, 0x43004300u), z), s);
  return make_uint4(__byte_perm(v[0], v[1], 0x5410), __byte_perm(v[2], v[3], 0x5410), __byte_perm(v[0], v[1], 0x7632), __byte_perm(v[2], v[3], 0x7632));
}

// Channels row and row + 1, CHUNK of k, by one warp
__device__ __forceinline__ void unpack(const Shape& q, const Weights& w, int* ready, int row, int chunk, int lane) {
  const int first = chunk * CHUNK + lane * 8, left = (q.width - first + 255) / 256, pitch = q.width / 8;  // pieces of this lane
  const u32 at = (u32)row * pitch + first / 8;  // in eights of weights, so in words of packed and in 16 bytes of wide
  const bool both = row + 1 < q.channels;
  const u32* from = w.packed + at;
  u32 p[2][4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    p[0][i] = i < left ? __ldcs(from + 32 * i) : 0;
    p[1][i] = i < left && both ? __ldcs(from + pitch + 32 * i) : 0;
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    if (r == 0 || both) {
      uint4* to = (uint4*)w.wide + at + r * pitch;
      const u32 group = (at + r * pitch) / 16;
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (i < left) to[32 * i] = widened(p[r][i], __ldg(w.scales + group + 2 * i), __ldg(w.zeros + group + 2 * i));
    }
  }
  if (!SEP) {
    asm volatile("fence.proxy.async;" ::: "memory");  // TMA of other blocks will read it
    __threadfence();
    __syncwarp();
    if (lane == 0) asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(ready + row / 128 * q.chunks + chunk), "r"(min(2, q.channels - row)) : "memory");
  }
}

__global__ void __launch_bounds__(256) unpack_kernel(const __grid_constant__ Shape q, const __grid_constant__ Weights w) {
  const int u = blockIdx.x * 8 + threadIdx.x / 32, row = u / q.chunks * 2;
  if (row < q.channels) unpack(q, w, nullptr, row, u % q.chunks, threadIdx.x % 32);
}

__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
    product_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Shape q, const __grid_constant__ Weights w, int* control, float4* partial, const uint16_t* __restrict__ bias, uint16_t* __restrict__ out) {
  extern __shared__ __align__(1024) uint8_t raw[];
  const u32 base = (s32(raw) + 1023) & ~1023u;
  const u32 full = base + BARS, empty = full + 8 * ST, progress = empty + 8 * ST;
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const int cid = blockIdx.x / 2, ncl = gridDim.x / 2, lane = threadIdx.x & 31;
  const int wid = __shfl_sync(~0u, threadIdx.x >> 5, 0), wg = wid >> 2;
  int* ready = control + COUNTERS;
  if (threadIdx.x == 0) {
    for (int i = 0; i < ST; i++) bar_init(full + 8 * i, 1), bar_init(empty + 8 * i, 16);
    asm volatile("st.volatile.shared.u32 [%0], 0;" ::"r"(progress) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  const bool cut = cid < q.rest * q.split;  // this cluster has a share of a tile that is cut
  const int early = q.early / 2;            // units of a chunk in the first rounds

  if (wg == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (wid == 8) {
      if (lane == 0) {
        int s = 0;
        u32 ph = 1;
        auto feed = [&](int u, int from, int to) {
          int mc, nc;
          place(q, u, mc, nc);
          const int mine = nc * 256 + rank * 128, row = mc * 256 + rank * 128, goal = SEP || NO_UNPACKING ? 0 : min(128, q.channels - mine);
          const int* flag = ready + mine / 128 * q.chunks;
          int have = goal > 0 ? -1 : q.chunks;
          for (int kb = from; kb < to; kb++) {
            const u32 at = base + s * SLOT, f = full + 8 * s;
            const int chunk = min(kb / (CHUNK / 64), q.chunks - 1);
            const bool fresh = goal > 0 && chunk != have;
            bool there = !fresh || acquire(flag + chunk) >= goal;
            bar_wait(empty + 8 * s, ph);
            bar_expect(f, SLOT);
            if (SWAP) tma_both(at + 16384 + rank * 16384, &maps.b, f, kb * 64, row);
            else tma(at, &maps.a, f, kb * 64, row);
            if (fresh) {
              while (!there) there = acquire(flag + chunk) >= goal;
              asm volatile("fence.proxy.async;" ::: "memory");
              have = chunk;
            }
            if (SWAP) tma(at, &maps.a, f, kb * 64, mine);
            else tma_both(at + 16384 + rank * 16384, &maps.b, f, kb * 64, mine);
            if (++s == ST) s = 0, ph ^= 1;
          }
        };
        int round = 0;
        for (int u = cid; u < q.end; u += ncl, round++) {
          asm volatile("st.volatile.shared.u32 [%0], %1;" ::"r"(progress), "r"(round) : "memory");
          feed(u, 0, q.KB);
        }
        asm volatile("st.volatile.shared.u32 [%0], %1;" ::"r"(progress), "r"(1 << 20) : "memory");
        if (cut) feed(q.end + cid / q.split, cid % q.split * q.KB / q.split, (cid % q.split + 1) * q.KB / q.split);
      }
    } else if (!SEP && !NO_UNPACKING) {
      const int blocks = gridDim.x, me = (wid - 9) * blocks + blockIdx.x;
      for (int u = (wid - 1) * blocks + blockIdx.x; u < early; u += 11 * blocks) unpack(q, w, ready, 2 * u, 0, lane);
      for (int u = me; u < early * (q.chunks - 1); u += 3 * blocks) unpack(q, w, ready, u % early * 2, 1 + u / early, lane);
      const int per = 64 * q.chunks, rows = min(q.gm, q.Mc);
      for (int u = me;; u += 3 * blocks) {
        const int begin = q.early + u / per * 128, r = u % per, row = begin + r % 64 * 2;
        if (begin >= q.channels) break;
        if (row >= q.channels) continue;
        if (LEAD) {
          const int needed = begin / 256 * rows / ncl - LEAD;
          while (true) {
            int now;
            asm volatile("ld.volatile.shared.s32 %0, [%1];" : "=r"(now) : "r"(progress) : "memory");
            if (now >= needed) break;
            __nanosleep(500);
          }
        }
        unpack(q, w, ready, row, r / 64, lane);
      }
    }
    __syncwarp();
  } else {
    if (!SEP && !NO_UNPACKING)
      for (int u = wid * gridDim.x + blockIdx.x; u < early; u += 11 * gridDim.x) unpack(q, w, ready, 2 * u, 0, lane);
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int w4 = wid & 3, tid = threadIdx.x & 127;
    const u32 slices = base + SLICES + wg * 2 * SLICE, shifts = base + BIAS + wg * 512;
    const u64 da = desc(base + wg * 8192), db = desc(base + 16384);
    u64 first;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
    float d[128];
    u32 pk[64];
    int column = 0, row = 0;  // of the pairs that wait
    bool have = false;
    u32 ph = 0;
#pragma unroll
    for (int i = 0; i < 64; i++) pk[i] = 0;
#pragma unroll
    for (int i = 0; i < 128; i++) d[i] = 0.f;

    auto piece = [&](int p) {  // 16 of the last tile's 256 tokens (SWAP) or channels
      const int c = p / 4, jj = p % 4;
      const u32 slot = slices + (c & 1) * SLICE;
      if (jj == 0) {
        if (tid == 0) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
        asm volatile("bar.sync %0, 128;" ::"r"(1 + wg) : "memory");
      }
      if (SWAP) {
        const u32 at = slot + (jj * 16 + (lane >> 4) * 8 + (lane & 7)) * 128 + (((2 * w4 + (lane >> 3 & 1)) ^ (lane & 7)) << 4);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(pk[4 * p]), "r"(pk[4 * p + 1]), "r"(pk[4 * p + 2]), "r"(pk[4 * p + 3]) : "memory");
      } else {
        const u32 at = slot + (w4 * 16 + (lane & 15)) * 128 + (((jj * 2 + (lane >> 4)) ^ (lane & 7)) << 4);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(pk[4 * p]), "r"(pk[4 * p + 1]), "r"(pk[4 * p + 2]), "r"(pk[4 * p + 3]) : "memory");
      }
      if (jj == 3) {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        asm volatile("bar.sync %0, 128;" ::"r"(1 + wg) : "memory");
        if (tid == 0) tma_store(&maps.out, slot, SWAP ? column : column + 64 * c, SWAP ? row + 64 * c : row, first);
      }
    };
    auto step = [&](int i, int scale) {  // i: the stage
      bar_wait(full + 8 * i, ph);
      mma_fence();
#pragma unroll
      for (int k = 0; k < 4; k++) mma256(d, da + (i * (SLOT >> 4) + 2 * k), db + (i * (SLOT >> 4) + 2 * k), scale + k);
      mma_commit();
      mma_wait<1>();
      if (scale && lane < 2) bar_arrive_cta(empty + 8 * ((i + ST - 1) % ST), lane);
    };

    for (int u = cid; u < q.end; u += ncl) {
      int mc, nc;
      place(q, u, mc, nc);
      u32 shift0 = 0, shift1 = 0;
      if (SWAP) {
        const int at = nc * 256 + rank * 128 + wg * 64 + w4 * 16 + (lane >> 2);
        if (at < q.channels) shift0 = __ldg(bias + at);
        if (at + 8 < q.channels) shift1 = __ldg(bias + at + 8);
      } else {
        const int at = nc * 256 + 2 * tid;
        if (at < q.channels) shift0 = __ldg((const u32*)(bias + at));
      }
#pragma unroll
      for (int kb = 0; kb < 16; kb++) {
        step(kb % ST, kb);
        if (have) piece(kb);
        if (!SWAP && kb == 1) asm volatile("st.shared.u32 [%0], %1;" ::"r"(shifts + 4 * tid), "r"(shift0) : "memory");
        if (kb % ST == ST - 1) ph ^= 1;
      }
#pragma unroll 1
      for (int kb = 16; kb < q.KB; kb += ST) {
#pragma unroll
        for (int i = 0; i < ST; i++) step(i, 1);
        ph ^= 1;
      }
      mma_wait<0>();
      if (lane < 2) bar_arrive_cta(empty + 8 * (ST - 1), lane);
#pragma unroll
      for (int i = 0; i < 128; i++) asm volatile("" : "+f"(d[i])::"memory");
      if (SWAP) {
        const float b0 = lo(shift0), b1 = lo(shift1);
#pragma unroll
        for (int i = 0; i < 64; i += 2) pk[i] = pack(d[2 * i] + b0, d[2 * i + 1] + b0), pk[i + 1] = pack(d[2 * i + 2] + b1, d[2 * i + 3] + b1);
        column = nc * 256 + rank * 128 + wg * 64, row = mc * 256;
      } else {
        asm volatile("bar.sync %0, 128;" ::"r"(1 + wg) : "memory");  // the bias is there
#pragma unroll
        for (int i = 0; i < 64; i += 2) {
          u32 v;
          asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(shifts + 8 * i + 4 * (lane & 3)) : "memory");
          pk[i] = pack(d[2 * i] + lo(v), d[2 * i + 1] + hi(v)), pk[i + 1] = pack(d[2 * i + 2] + lo(v), d[2 * i + 3] + hi(v));
        }
        column = nc * 256, row = mc * 256 + rank * 128 + wg * 64;
      }
      have = true;
    }

    if (cut) {
      const int t = cid / q.split, part = cid - t * q.split, from = part * q.KB / q.split, to = (part + 1) * q.KB / q.split;
      int s = 0;
      for (int kb = from; kb < to; kb++) {
        bar_wait(full + 8 * s, ph);
        mma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) mma256(d, da + (s * (SLOT >> 4) + 2 * k), db + (s * (SLOT >> 4) + 2 * k), kb - from + k);
        mma_commit();
        mma_wait<1>();
        if (kb > from && lane < 2) bar_arrive_cta(empty + 8 * ((s + ST - 1) % ST), lane);
        if (++s == ST) s = 0, ph ^= 1;
      }
      mma_wait<0>();
#pragma unroll
      for (int i = 0; i < 128; i++) asm volatile("" : "+f"(d[i])::"memory");
      float4* to4 = partial + (cid * 2 + rank) * 8192 + threadIdx.x;
#pragma unroll
      for (int j = 0; j < 32; j++) __stcg(to4 + 256 * j, make_float4(d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]));
      __threadfence();
      asm volatile("bar.sync 3, 256;" ::: "memory");
      if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(control + 1 + 2 * t + rank) : "memory");
    }
    if (have) {
#pragma unroll
      for (int p = 0; p < 16; p++) piece(p);
    }
    if (cut) {  // each of a tile's clusters finishes some of its columns
      const int t = cid / q.split, part = cid - t * q.split;
      int mc, nc;
      place(q, q.end + t, mc, nc);
      while (acquire(control + 1 + 2 * t + rank) < q.split) __nanosleep(64);
      const float4* from4 = partial + (t * q.split * 2 + rank) * 8192 + threadIdx.x;
      const int r = rank * 128 + wg * 64 + w4 * 16 + (lane >> 2);
      auto put = [&](int of_a, int of_b, float v) {
        const int token = mc * 256 + (SWAP ? of_b : of_a), channel = nc * 256 + (SWAP ? of_a : of_b);
        if (token < q.tokens && channel < q.channels) out[(i64)token * q.channels + channel] = (uint16_t)pack(v + lo(__ldg(bias + channel)), 0.f);
      };
      for (int j = 32 * part / q.split; j < 32 * (part + 1) / q.split; j++) {
        float4 v = __ldcg(from4 + 256 * j);
#pragma unroll 4
        for (int p = 1; p < q.split; p++) {
          const float4 e = __ldcg(from4 + p * 16384 + 256 * j);
          v.x += e.x, v.y += e.y, v.z += e.z, v.w += e.w;
        }
        const int c = 8 * j + 2 * (lane & 3);
        put(r, c, v.x), put(r, c + 1, v.y), put(r + 8, c, v.z), put(r + 8, c + 1, v.w);
      }
    }
    if (tid == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    __syncwarp();
  }
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  if (wid == 0) {  // the last block leaves the counters as it found them
    int last = 0;
    if (lane == 0) {
      __threadfence();
      last = atomicAdd(control, 1) == (int)gridDim.x - 1;
    }
    if (__shfl_sync(~0u, last, 0)) {
      const int count = COUNTERS + (q.channels + 127) / 128 * q.chunks;
      for (int i = lane; i < count; i += 32) control[i] = 0;
    }
  }
}

// Any number of channels, one warp a result: for rows that TMA cannot store
__global__ void __launch_bounds__(256) plain_kernel(const uint16_t* x, const uint8_t* packed, const uint16_t* scales, const uint16_t* zeros, const uint16_t* bias, uint16_t* out, i64 results, int channels, int width) {
  const i64 at = (i64)blockIdx.x * 8 + threadIdx.x / 32;
  if (at >= results) return;
  const i64 token = at / channels, channel = at - token * channels;
  const int lane = threadIdx.x % 32;
  float sum = 0.f;
  for (int k = lane * 2; k < width; k += 64) {
    const u32 b = packed[(channel * width + k) / 2];
    const i64 group = channel * (width / 128) + k / 128;
    const u32 s = scales[group] * 0x10001u, z = zeros[group] * 0x10001u;
    const u32 v = times(less(less((b & 15) | (b >> 4) << 16 | 0x43004300u, 0x43004300u), z), s);
    const u32 e = *(const u32*)(x + token * width + k);
    sum = fmaf(lo(v), lo(e), fmaf(hi(v), hi(e), sum));
  }
  for (int i = 16; i; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
  if (lane == 0) out[at] = (uint16_t)pack(sum + lo(bias[channel]), 0.f);
}

#define MUST(call) do { int error = int(call); if (error) return error; } while (0)

static int map_of(CUtensorMap& map, i64 data, i64 rows, i64 columns, int box_rows) {
  static void* encode = nullptr;
  cudaDriverEntryPointQueryResult result;
  if (!encode) MUST(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &result));
  cuuint64_t sizes[2] = {(cuuint64_t)columns, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)columns * 2};
  cuuint32_t box[2] = {64, (cuuint32_t)box_rows}, one[2] = {1, 1};
  CUresult error = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void*)data, sizes, strides, box, one,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return error == CUDA_SUCCESS ? 0 : 10000 + int(error);
}

// x, packed, scales, zeros, bias, wide, out, partial, control, tokens, channels, width, stream
static int launch(const i64* a) {
  const i64 T = a[9], N = a[10], K = a[11];
  const cudaStream_t stream = (cudaStream_t)a[12];
  if (N % 8) {
    plain_kernel<<<(u32)((T * N + 7) / 8), 256, 0, stream>>>((const uint16_t*)a[0], (const uint8_t*)a[1], (const uint16_t*)a[2], (const uint16_t*)a[3], (const uint16_t*)a[4], (uint16_t*)a[6], T * N, (int)N, (int)K);
    return cudaGetLastError();
  }
  Maps m;
  MUST(map_of(SWAP ? m.b : m.a, a[0], T, K, 128));
  MUST(map_of(SWAP ? m.a : m.b, a[5], N, K, 128));
  MUST(map_of(m.out, a[6], T, N, 64));
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = 2, attribute.val.clusterDim.y = 1, attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.blockDim = dim3(THREADS), config.dynamicSmemBytes = SMEM, config.stream = stream;
  config.attrs = &attribute, config.numAttrs = 1;
  static int fits[64];
  int device;
  MUST(cudaGetDevice(&device));
  if (device > 63) return 10001;
  if (!fits[device]) {
    int sms, most;
    MUST(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
    config.gridDim = dim3(sms / 2 * 2);
    MUST(cudaFuncSetAttribute(product_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM));
    MUST(cudaOccupancyMaxActiveClusters(&most, product_kernel, &config));
    fits[device] = most < sms / 2 ? most : sms / 2;
    if (fits[device] > 66) fits[device] = 66;  // room for partial sums and counters
  }
  const int ncl = fits[device];
  if (ncl < 1) return 10002;
  Shape q = {};
  q.Mc = int((T + 255) / 256), q.Nc = int((N + 255) / 256), q.KB = int((K + 255) / 256) * 4;
  if (q.KB < 16) q.KB = 16;
  q.gm = GM, q.tokens = int(T), q.channels = int(N), q.width = int(K), q.chunks = int((K + CHUNK - 1) / CHUNK);
  const int all = q.Mc * q.Nc, rest = all % ncl, rows = q.Mc < GM ? q.Mc : GM;
  q.end = all;
  if (SPLIT && rest && rest * 2 <= ncl) {
    q.rest = rest, q.split = ncl / rest < 8 ? ncl / rest : 8, q.end = all - rest;
  }
  const i64 early = i64(ncl + rows - 1) / rows * 256;
  q.early = int(early < N ? early : (N + 1) / 2 * 2);
  Weights w = {(const u32*)a[1], (const uint16_t*)a[2], (const uint16_t*)a[3], (uint16_t*)a[5]};
  if (SEP) unpack_kernel<<<(u32)(((N + 1) / 2 * q.chunks + 7) / 8), 256, 0, stream>>>(q, w);
  config.gridDim = dim3(2 * ncl);
  MUST(cudaLaunchKernelEx(&config, product_kernel, m, q, w, (int*)a[8], (float4*)a[7], (const uint16_t*)a[4], (uint16_t*)a[6]));
  return cudaGetLastError();
}

static PyObject* run(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 13) { PyErr_SetString(PyExc_TypeError, "13 arguments"); return nullptr; }
  i64 a[13];
  for (int i = 0; i < 13; ++i) a[i] = PyLong_AsLongLong(given[i]);
  return PyLong_FromLong(launch(a));
}
static PyMethodDef methods[] = {{"run", (PyCFunction)(void*)run, METH_FASTCALL, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "int4_prefill", "", -1, methods};
#define INIT(name) PyInit_##name
#define INIT_OF(name) INIT(name)
PyMODINIT_FUNC INIT_OF(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
"""


@functools.cache
def built():
    constants = {"GM": GM, "SWAP": SWAP, "LEAD": LEAD, "SPLIT": SPLIT, "SEP": SEP, "NO_UNPACKING": int(PROBE == "no unpacking")}
    source = "".join(f"#define {name} {value}\n" for name, value in constants.items()) + CUDA
    registers, operands = regs(128)
    source = source.replace("@REGS128@", registers).replace("@OUTS128@", operands)
    flags = ["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a"]
    return load_inline("int4_prefill", "", source, no_implicit_headers=True, extra_cuda_cflags=flags).run


@functools.cache
def check(device):
    if torch.cuda.get_device_properties(device).major != 9:
        raise ValueError("needs compute capability 9.0")


scratch = {}  # by device, stream and size: counters that every launch leaves at zero


def counters(device, stream, count):
    key = (device, stream, count)
    if key not in scratch:
        scratch[key] = torch.zeros(257 + count, dtype=torch.int32, device=device)
    return scratch[key]


def aligned(t):
    t = t.contiguous()
    return t.clone() if t.data_ptr() % 16 else t


class ModelNew(nn.Module):
    def forward(self, x, packed, scales, zeros, bias):
        if x.dim() != 2 or packed.dim() != 2 or scales.dim() != 2 or bias.dim() != 1:
            raise ValueError("x, packed, scales and zeros have two dimensions, bias has one")
        (tokens, width), channels = x.shape, packed.shape[0]
        if not x.numel() or not channels or width % 128 or packed.shape[1] * 2 != width:
            raise ValueError("x is tokens x width, packed channels x width / 2, width a multiple of 128")
        if scales.shape != (channels, width // 128) or zeros.shape != scales.shape or bias.shape != (channels,):
            raise ValueError("scales and zeros are channels x width / 128, bias channels")
        if any(t.dtype != torch.bfloat16 or t.device != x.device for t in (x, scales, zeros, bias)) or packed.dtype != torch.uint8 or packed.device != x.device:
            raise ValueError("bf16 and packed uint8 on one device only")
        if max(tokens, channels, width) >= 2**20 or tokens * channels >= 2**33 or channels * width >= 2**34:
            raise ValueError("too large")
        check(x.device)
        x, packed, scales, zeros, bias = (aligned(t.detach()) for t in (x, packed, scales, zeros, bias))
        out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
        wide = torch.empty(channels, width, dtype=x.dtype, device=x.device)
        partial = torch.empty(132 * 128 * 256, dtype=torch.float32, device=x.device)
        stream = torch.cuda.current_stream(x.device).cuda_stream
        control = counters(x.device, stream, (channels + 127) // 128 * ((width + 1023) // 1024))
        tensors = (x, packed, scales, zeros, bias, wide, out, partial, control)
        error = built()(*(t.data_ptr() for t in tensors), tokens, channels, width, stream)
        if error:
            raise RuntimeError(f"int4_prefill: CUDA error {error}")
        return out
