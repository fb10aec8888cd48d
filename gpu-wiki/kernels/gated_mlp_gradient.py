"""Gradient of a gated MLP's input, dx = dg gate + du up, in one persistent launch of CUDA C++ for sm_90a.

 * First product: dh = dy down, K = width. Its epilogue turns dh, g and u into dg and du (bf16, in scratch).
   Second product: dx = [dg | du] [gate; up], K = 2 hidden, summed in fp32.
 * Clusters of two blocks own tiles of 256 x 256 and share the weight's tile (k is its slow dimension) by TMA multicast; a
   block has 128 x 256. Warp 8 feeds a ring of four stages of 64 of k. Two consumer warpgroups own 64 x 256 sums each.
 * At a tile's end a consumer only rounds its sums to bf16 pairs, as the reference does with dh. The rest of the epilogue
   runs in 16 pieces beside the next tile's products. Warps 9 and 10 bring g and u into slots of 64 x 32, and store the slots.
 * Each cluster has a list of tiles, made on the host: tiles of the first product, then of the second, so that the sums of
   steps are nearly equal (at 4096 x 4096 x 5632 on 66 clusters: at most 1040 steps of 1024 on average).
   A tile of the second product takes the first half of dg's and du's columns first, and waits for the counter of its rows and
   half. A tile whose epilogue must not wait for the next tile is marked; so no wait can be circular.
Blocks wait for each other, so all clusters must run at once, or the kernel hangs: the grid is what the occupancy query allows
on an idle GPU, and nothing else may hold SMs meanwhile, not a second call either. The first call of a size makes its lists; capture a graph after it.
evals/trials/gated_mlp_gradient states it.
"""

import functools

import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

SPREAD = 2  # steps of k a piece of the epilogue
BALANCE = 1  # 1: lists of equal sums; 0: each tile to the cluster that is free first
GROUPS = "8,4"  # rows of 256 that are walked together; the last number repeats
HINTS = 0  # 1: g, u and the result leave the L2 first
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
constexpr int ST = 4, SLOT = 49152, PART = 4096, THREADS = 384;  // a buffer: g and u, or the result, 64 x 32 each
constexpr int SLICES = ST * SLOT, BARS = SLICES + 8 * PART, SMEM = BARS + 128 + 1024;
static_assert(SMEM <= 232448, "shared memory");

__device__ __forceinline__ u32 s32(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void bar_init(u32 b, int n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(n) : "memory"); }
__device__ __forceinline__ void bar_expect(u32 b, int n) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(n) : "memory"); }
__device__ __forceinline__ void bar_arrive(u32 b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory"); }
__device__ __forceinline__ void bar_wait(u32 b, u32 ph) {
  asm volatile("{\n .reg .pred p;\nW_%=:\n mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n @p bra D_%=;\n bra W_%=;\nD_%=:\n}" ::"r"(b), "r"(ph) : "memory");
}
__device__ __forceinline__ void bar_arrive_cta(u32 b, u32 cta) {
  asm volatile("{\n .reg .b32 r;\n mapa.shared::cluster.u32 r, %0, %1;\n mbarrier.arrive.shared::cluster.b64 _, [r];\n}" ::"r"(b), "r"(cta) : "memory");
}
__device__ __forceinline__ void tma(u32 dst, const CUtensorMap* m, u32 b, int c0, int c1) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(dst), "l"(m), "r"(b), "r"(c0), "r"(c1) : "memory");
}
__device__ __forceinline__ void tma_hint(u32 dst, const CUtensorMap* m, u32 b, int c0, int c1, u64 pol) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(dst), "l"(m), "r"(b), "r"(c0), "r"(c1), "l"(pol) : "memory");
}
__device__ __forceinline__ void tma_both(u32 dst, const CUtensorMap* m, u32 b, int c0, int c1) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(dst), "l"(m), "r"(b), "r"(c0), "r"(c1), "h"((uint16_t)3) : "memory");
}
__device__ __forceinline__ void tma_store(const CUtensorMap* m, u32 src, int c0, int c1, u64 pol) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%2, %3}], [%1], %4;" ::"l"(m), "r"(src), "r"(c0), "r"(c1), "l"(pol) : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Both panels of a weight's half: 64 columns of n in a row, 64 of k
__device__ __forceinline__ void tma_both3(u32 dst, const CUtensorMap* m, u32 b, int k, int panel) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%6, %3, %4}], [%2], %5;" ::"r"(dst), "l"(m), "r"(b), "r"(k), "r"(panel), "h"((uint16_t)3), "r"(0) : "memory");
}
// 128-byte swizzle, stride 1024; leading: the next panel of 64 columns where k is the slow dimension
__device__ __forceinline__ u64 desc(u32 a, u32 leading) { return (u64)((a & 0x3FFFF) >> 4) | (u64)(leading >> 4) << 16 | (64ull << 32) | (1ull << 62); }
__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void mma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
__device__ __forceinline__ void mma256(float (&d)[128], u64 a, u64 b, int acc) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {@REGS128@}, %128, %129, p, 1, 1, 0, 1;\n}"
               : @OUTS128@ : "l"(a), "l"(b), "r"(acc));
}
__device__ __forceinline__ u32 pack(float a, float b) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
  return r;
}
__device__ __forceinline__ float lo(u32 b) { return __uint_as_float(b << 16); }
__device__ __forceinline__ float hi(u32 b) { return __uint_as_float(b & 0xFFFF0000u); }
__device__ __forceinline__ float sigmoid(float v) {
  float e, r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(v * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + e));
  return r;
}
__device__ __forceinline__ void through(float dh, float g, float u, float& dg, float& du) {
  const float s = sigmoid(g), t = dh * s;
  du = t * g;
  dg = t * u * fmaf(g, 1.0f - s, 1.0f);
}

struct Maps { CUtensorMap dy, down, dg, du, gate, up, gs, us, dgs, dus, out; };
// steps of the first and second product; of dg, of its first half; arrivals for each half of a row's columns
struct Shape { int KB1, KB2, KH, H1, goal0, goal1, rows, pitch; };

__device__ __forceinline__ int second_of(int t) { return t >> 28 & 1; }
__device__ __forceinline__ int flush_of(int t) { return t >> 29 & 1; }
__device__ __forceinline__ int row_of(int t) { return t & 0x3FFF; }
__device__ __forceinline__ int column_of(int t) { return t >> 14 & 0x3FFF; }

__device__ __forceinline__ void await(const int* flag, int goal) {
  int v;
  do asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(v) : "l"(flag) : "memory"); while (v < goal);
  asm volatile("fence.proxy.async;" ::: "memory");
}

__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
    gradient_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Shape q, int* flags, const int* __restrict__ lists) {
  extern __shared__ __align__(1024) uint8_t raw[];
  const u32 base = (s32(raw) + 1023) & ~1023u;
  const u32 full = base + BARS, empty = full + 8 * ST, loaded = empty + 8 * ST, written = loaded + 32;
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const int lane = threadIdx.x & 31;
  const int wid = __shfl_sync(~0u, threadIdx.x >> 5, 0), wg = wid >> 2;
  const int* list = lists + (i64)(blockIdx.x / 2) * q.pitch;  // ends with -1
  if (threadIdx.x == 0) {
    for (int i = 0; i < ST; i++) bar_init(full + 8 * i, 1), bar_init(empty + 8 * i, 16);
    for (int i = 0; i < 4; i++) bar_init(loaded + 8 * i, 1), bar_init(written + 8 * i, 4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");

  if (wg == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (wid == 8 && lane == 0) {
      int s = 0;
      u32 ph = 1;
      for (int t = __ldg(list); t >= 0;) {
        const int next = __ldg(++list);
        const int second = second_of(t), mc = row_of(t), nc = column_of(t), KB = second ? q.KB2 : q.KB1;
        const int row = mc * 256 + rank * 128, panel = nc * 4 + rank * 2;
        for (int i = 0; i < KB; i++) {
          const u32 sl = base + s * SLOT, f = full + 8 * s;
          const CUtensorMap *a = &maps.dy, *w = &maps.down;
          int k = i;
          if (second) {  // first halves of dg and du, second halves
            const bool later = i >= 2 * q.H1;
            const bool is_u = later ? i >= q.H1 + q.KH : i >= q.H1;
            k = later ? (is_u ? i - q.KH : i - q.H1) : (is_u ? i - q.H1 : i);
            a = is_u ? &maps.du : &maps.dg, w = is_u ? &maps.up : &maps.gate;
          }
          k = (ONE_K ? k & 3 : k) * 64;
          bar_wait(empty + 8 * s, ph);
          bar_expect(f, SLOT);
          tma_both3(sl + 16384 + rank * 16384, w, f, k, panel);
          if (second && !NO_EPILOGUE) {
            if (i == 0) await(flags + 2 * mc, q.goal0);
            if (i == 2 * q.H1) await(flags + 2 * mc + 1, q.goal1);
          }
          tma(sl, a, f, k, row);
          if (++s == ST) s = 0, ph ^= 1;
        }
        t = next;
      }
      __threadfence();
      if (atomicAdd(flags + 2 * q.rows, 1) == (int)gridDim.x - 1) {  // all have read the counters: clear them for the next call
        for (int i = 0; i <= 2 * q.rows; i++) flags[i] = 0;
      }
    } else if ((wid == 9 || wid == 10) && lane == 0 && !NO_EPILOGUE) {
      const int c = wid - 9, part = rank * 128 + c * 64;
      const u32 buffers = base + SLICES + c * 4 * PART, load_bar = loaded + 16 * c, write_bar = written + 16 * c;
      u64 first, normal;
      asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
      asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
      if (!HINTS) first = normal;
      auto prepare = [&](int t, int j) {  // slice j of tile t: its buffer is free
        const u32 at = buffers + (j & 1) * 2 * PART, bar = load_bar + 8 * (j & 1);
        if (t >= 0 && !second_of(t)) {
          const int column = column_of(t) * 256 + j * 32, row = row_of(t) * 256 + part;
          bar_expect(bar, 2 * PART);
          tma_hint(at, &maps.gs, bar, column, row, first);
          tma_hint(at + PART, &maps.us, bar, column, row, first);
        } else {
          bar_arrive(bar);
        }
      };
      int t = __ldg(list);
      if (t >= 0) prepare(t, 0), prepare(t, 1);
      while (t >= 0) {
        const int next = __ldg(++list), second = second_of(t), mc = row_of(t), nc = column_of(t), row = mc * 256 + part;
        for (int j = 0; j < 8; j++) {
          const u32 at = buffers + (j & 1) * 2 * PART;
          const int column = nc * 256 + j * 32;
          bar_wait(write_bar + 8 * (j & 1), j >> 1 & 1);
          if (second) {
            tma_store(&maps.out, at, column, row, first);
          } else {
            tma_store(&maps.dgs, at, column, row, normal);
            tma_store(&maps.dus, at + PART, column, row, normal);
          }
          asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
          prepare(j < 6 ? t : next, (j + 2) & 7);
        }
        if (!second) {
          asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
          asm volatile("fence.proxy.async;" ::: "memory");
          __threadfence();
          atomicAdd(flags + 2 * mc + (nc * 4 >= q.H1), 1);
        }
        t = next;
      }
      asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int w4 = wid & 3, r16 = lane & 15;
    const u32 load_bar = loaded + 16 * wg, write_bar = written + 16 * wg;
    const u32 mine = base + SLICES + wg * 4 * PART + (w4 * 16 + r16) * 64, turn = r16 >> 1 & 3;
    const u64 da = desc(base + wg * 8192, 16), db = desc(base + 16384, 8192);
    float d[128];
    u32 pk[64];
    int was_second = 0;
    bool have = false;
    u32 ph = 0;
#pragma unroll
    for (int i = 0; i < 64; i++) pk[i] = 0;
#pragma unroll
    for (int i = 0; i < 128; i++) d[i] = 0.f;

    auto piece = [&](int p) {  // 16 of the last tile's 256 columns
      const int j = p / 2, jj = p % 2;
      if (jj == 0) bar_wait(load_bar + 8 * (j & 1), j >> 1 & 1);
      const u32 at = mine + (j & 1) * 2 * PART + (((jj * 2 + (lane >> 4)) ^ turn) << 4);
      if (was_second) {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(pk[4 * p]), "r"(pk[4 * p + 1]), "r"(pk[4 * p + 2]), "r"(pk[4 * p + 3]) : "memory");
      } else {
        u32 g[4], u[4];
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(g[0]), "=r"(g[1]), "=r"(g[2]), "=r"(g[3]) : "r"(at) : "memory");
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(u[0]), "=r"(u[1]), "=r"(u[2]), "=r"(u[3]) : "r"(at + PART) : "memory");
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float g0, g1, u0, u1;
          through(lo(pk[4 * p + i]), lo(g[i]), lo(u[i]), g0, u0);
          through(hi(pk[4 * p + i]), hi(g[i]), hi(u[i]), g1, u1);
          g[i] = pack(g0, g1), u[i] = pack(u0, u1);
        }
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(g[0]), "r"(g[1]), "r"(g[2]), "r"(g[3]) : "memory");
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at + PART), "r"(u[0]), "r"(u[1]), "r"(u[2]), "r"(u[3]) : "memory");
      }
      if (jj == 1) {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (lane == 0) bar_arrive(write_bar + 8 * (j & 1));
      }
    };
    auto step = [&](int i, int scale) {  // i: the stage
      bar_wait(full + 8 * i, ph);
      mma_fence();
#pragma unroll
      for (int k = 0; k < 4; k++) mma256(d, da + (i * (SLOT >> 4) + 2 * k), db + (i * (SLOT >> 4) + 128 * k), scale + k);
      mma_commit();
      mma_wait<1>();
      if (scale && lane < 2) bar_arrive_cta(empty + 8 * ((i + ST - 1) % ST), lane);
    };

    for (int t = __ldg(list); t >= 0;) {
      const int next = __ldg(++list), KB = second_of(t) ? q.KB2 : q.KB1;
#pragma unroll
      for (int kb = 0; kb < 16 * SPREAD; kb++) {
        step(kb % ST, kb);
        if (!NO_EPILOGUE && kb % SPREAD == 0 && have) piece(kb / SPREAD);
        if (kb % ST == ST - 1) ph ^= 1;
      }
#pragma unroll 1
      for (int kb = 16 * SPREAD; kb < KB; kb += ST) {
#pragma unroll
        for (int i = 0; i < ST; i++) step(i, 1);
        ph ^= 1;
      }
      mma_wait<0>();
      if (lane < 2) bar_arrive_cta(empty + 8 * (ST - 1), lane);
#pragma unroll
      for (int i = 0; i < 128; i++) asm volatile("" : "+f"(d[i])::"memory");
#pragma unroll
      for (int i = 0; i < 64; i++) pk[i] = pack(d[2 * i], d[2 * i + 1]);
      was_second = second_of(t), have = true;
      if (!NO_EPILOGUE && flush_of(t)) {
        have = false;
#pragma unroll
        for (int p = 0; p < 16; p++) piece(p);
      }
      t = next;
    }
    if (NO_EPILOGUE && have) {  // the probe's sums must not vanish
      u32 x = 0;
#pragma unroll
      for (int i = 0; i < 64; i++) x ^= pk[i];
      if (x == 0x12345678u) flags[0] = 0;
    }
  }
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

#define MUST(call) do { int error = int(call); if (error) return error; } while (0)

static int encode(CUtensorMap& map, i64 data, int dimensions, const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box, bool narrow) {
  static void* f = nullptr;
  cudaDriverEntryPointQueryResult result;
  if (!f) MUST(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &result));
  const cuuint32_t one[3] = {1, 1, 1};
  CUresult error = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(f)(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, dimensions, (void*)data, sizes, strides, box, one,
      CU_TENSOR_MAP_INTERLEAVE_NONE, narrow ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return error == CUDA_SUCCESS ? 0 : 10000 + int(error);
}
static int rows_of(CUtensorMap& map, i64 data, i64 rows, i64 columns) {  // an operand, k contiguous
  const cuuint64_t sizes[2] = {(cuuint64_t)columns, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)columns * 2};
  const cuuint32_t box[2] = {64, 128};
  return encode(map, data, 2, sizes, strides, box, false);
}
static int slots_of(CUtensorMap& map, i64 data, i64 rows, i64 columns) {
  const cuuint64_t sizes[2] = {(cuuint64_t)columns, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)columns * 2};
  const cuuint32_t box[2] = {32, 64};
  return encode(map, data, 2, sizes, strides, box, true);
}
static int panels_of(CUtensorMap& map, i64 data, i64 rows, i64 columns) {  // a weight, n contiguous
  const cuuint64_t sizes[3] = {64, (cuuint64_t)rows, (cuuint64_t)columns / 64}, strides[2] = {(cuuint64_t)columns * 2, 128};
  const cuuint32_t box[3] = {64, 64, 2};
  return encode(map, data, 3, sizes, strides, box, false);
}

static cudaLaunchConfig_t configured(cudaLaunchAttribute& attribute, int blocks) {
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = 2, attribute.val.clusterDim.y = 1, attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks), config.blockDim = dim3(THREADS), config.dynamicSmemBytes = SMEM;
  config.attrs = &attribute, config.numAttrs = 1;
  return config;
}

static int clusters_of() {  // that run at once on this device
  int sms, most, device;
  cudaLaunchAttribute attribute;
  if (cudaGetDevice(&device) || cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device)) return -1;
  if (cudaFuncSetAttribute(gradient_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM)) return -2;
  cudaLaunchConfig_t config = configured(attribute, sms / 2 * 2);
  if (cudaOccupancyMaxActiveClusters(&most, gradient_kernel, &config)) return -3;
  return most < sms / 2 ? most : sms / 2;
}

// dy, g, u, gate, up, down, dg, du, dx, flags, lists, tokens, width, hidden, pitch, clusters, KB1, KB2, H1, stream
static int launch(const i64* a) {
  const i64 T = a[11], W = a[12], H = a[13];
  Maps m;
  MUST(rows_of(m.dy, a[0], T, W));
  MUST(panels_of(m.down, a[5], W, H));
  MUST(rows_of(m.dg, a[6], T, H));
  MUST(rows_of(m.du, a[7], T, H));
  MUST(panels_of(m.gate, a[3], H, W));
  MUST(panels_of(m.up, a[4], H, W));
  MUST(slots_of(m.gs, a[1], T, H));
  MUST(slots_of(m.us, a[2], T, H));
  MUST(slots_of(m.dgs, a[6], T, H));
  MUST(slots_of(m.dus, a[7], T, H));
  MUST(slots_of(m.out, a[8], T, W));
  Shape q = {};
  q.pitch = int(a[14]), q.KB1 = int(a[16]), q.KB2 = int(a[17]), q.H1 = int(a[18]), q.KH = int(H / 64), q.rows = int((T + 255) / 256);
  const int columns = int((H + 255) / 256), early = (q.H1 + 3) / 4;
  q.goal0 = 4 * early, q.goal1 = 4 * (columns - early);
  cudaLaunchAttribute attribute;
  cudaLaunchConfig_t config = configured(attribute, int(2 * a[15]));
  config.stream = (cudaStream_t)a[19];
  MUST(cudaLaunchKernelEx(&config, gradient_kernel, m, q, (int*)a[9], (const int*)a[10]));
  return cudaGetLastError();
}

static PyObject* run(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (!count) return PyLong_FromLong(clusters_of());
  if (count != 20) { PyErr_SetString(PyExc_TypeError, "20 arguments"); return nullptr; }
  i64 a[20];
  for (int i = 0; i < 20; ++i) a[i] = PyLong_AsLongLong(given[i]);
  return PyLong_FromLong(launch(a));
}
static PyMethodDef methods[] = {{"run", (PyCFunction)(void*)run, METH_FASTCALL, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "gated_mlp_gradient", "", -1, methods};
#define INIT(name) PyInit_##name
#define INIT_OF(name) INIT(name)
PyMODINIT_FUNC INIT_OF(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
"""
CUDA = CUDA.replace("@REGS128@", regs(128)[0]).replace("@OUTS128@", regs(128)[1])


@functools.cache
def extension():
    constants = (("HINTS", HINTS), ("SPREAD", SPREAD), ("ONE_K", int(PROBE == "one k")), ("NO_EPILOGUE", int(PROBE == "no epilogue")))
    source = "".join(f"#define {name} {value}\n" for name, value in constants) + CUDA
    flags = ["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a"]
    return load_inline("gated_mlp_gradient", "", source, no_implicit_headers=True, with_pytorch_error_handling=False, extra_cuda_cflags=flags).run


@functools.cache
def clusters(device):
    if torch.cuda.get_device_properties(device).major != 9:
        raise ValueError("needs compute capability 9.0")
    count = extension()()
    if count < 1:
        raise RuntimeError("the kernel does not fit on this GPU")
    return count


def walk(rows, columns):
    """All tiles, in groups of rows, column by column."""
    sizes, tiles, r = [int(s) for s in GROUPS.split(",")], [], 0
    while r < rows:
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        group = range(r, min(rows, r + size))
        tiles += [(m, n) for n in range(columns) for m in group]
        r += size
    return tiles


def quotas(n1, n2, s1, s2, count):
    """How many tiles of each product each of count clusters takes so that the longest list is short; None: take turns."""
    if not BALANCE or (n1 + n2) * count > 100000:
        return None
    total, step = n1 * s1 + n2 * s2, 4
    start = max(-(-total // count) // step * step, s1 + s2)
    for most in range(start, start + s2 + 2 * step, step):
        # a cluster with b tiles of the second product has room for room[b] of the first, all early enough for others' last tiles
        room = [min(most - b * s2, most - s2) // s1 for b in range(min(most // s2, -(-n2 // count)) + 1)]
        best = {0: (0, ())}
        for _ in range(count):
            following = {}
            for used, (sum1, taken) in best.items():
                for b, r in enumerate(room):
                    if used + b <= n2 and (used + b not in following or following[used + b][0] < sum1 + r):
                        following[used + b] = (sum1 + r, (taken, b))
            best = following
        if n2 in best and best[n2][0] >= n1:
            taken, bs = best[n2][1], []
            while taken:
                bs.append(taken[1])
                taken = taken[0]
            spare, out = best[n2][0] - n1, []
            for b in sorted(bs):  # those with most of the first product give up what is too much
                a = max(0, room[b] - spare)
                spare -= room[b] - a
                out.append((a, b))
            return out
    return None


def schedule(rows, columns1, columns2, s1, s2, h1, count):
    """A list of codes for each cluster, -1 at its end."""
    first, second = walk(rows, columns1), walk(rows, columns2)
    given = quotas(len(first), len(second), s1, s2, count)
    lists, free = [[] for _ in range(count)], [0] * count
    for product, (tiles, steps) in enumerate(((first, s1), (second, s2))):
        left = [q[product] for q in given] if given else [len(tiles)] * count
        for tile in tiles:
            c = min((c for c in range(count) if left[c]), key=lambda c: (free[c], c))
            lists[c].append((product, *tile))
            free[c] += steps
            left[c] -= 1
    last = [max((i for i, t in enumerate(l) if t[0] == 0), default=-1) for l in lists]
    # A last tile of the first product may end beside the next tile's steps, where the first half of those needs no such tile
    late = {l[i][1] for l, i in zip(lists, last) if i >= 0 and l[i][2] * 4 < h1}
    codes = []
    for l, i in zip(lists, last):
        waits = 0 <= i and (i + 1 == len(l) or l[i + 1][1] in late or 2 * h1 < 16 * SPREAD + 8)
        codes.append([product << 28 | n << 14 | m | ((waits and j == i or j + 1 == len(l)) << 29) for j, (product, m, n) in enumerate(l)] + [-1])
    return codes, max(free)


_plans, _flags = {}, {}


def plan_of(device, tokens, width, hidden):
    key = (device.index, tokens, width, hidden)
    if key not in _plans:
        least = 16 * SPREAD
        s1, s2 = max(least, -(-width // 256) * 4), max(least, -(-2 * hidden // 256) * 4)
        rows, columns1, columns2 = -(-tokens // 256), -(-hidden // 256), -(-width // 256)
        h1 = min((columns1 + 1) // 2 * 4, hidden // 64)
        codes, _ = schedule(rows, columns1, columns2, s1, s2, h1, clusters(device))
        pitch = max(len(c) for c in codes)
        flat = torch.tensor([c + [-1] * (pitch - len(c)) for c in codes], dtype=torch.int32).to(device)
        _plans[key] = (flat, pitch, s1, s2, h1)
    return _plans[key]


def flags_of(device, rows, stream):
    """Counters, zero between calls: one buffer for each stream, since calls on one follow each other."""
    count = 2 * rows + 1
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    key = (device.index, stream, rows)
    if key not in _flags:
        _flags[key] = torch.zeros(count, dtype=torch.int32, device=device)
    return _flags[key]


def dense(x):
    """x, contiguous and at a multiple of 16 bytes."""
    x = x.detach().contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


class ModelNew(nn.Module):
    def __init__(self, width=4096, hidden=5632):
        super().__init__()
        self.gate = nn.Parameter((torch.randn(hidden, width) / width**0.5).bfloat16())
        self.up = nn.Parameter((torch.randn(hidden, width) / width**0.5).bfloat16())
        self.down = nn.Parameter((torch.randn(width, hidden) / hidden**0.5).bfloat16())

    def forward(self, dy, g, u):
        given = (dy, g, u, self.gate, self.up, self.down)
        if any(t.dim() != 2 or t.dtype != torch.bfloat16 or not t.is_cuda or t.device != dy.device for t in given):
            raise ValueError("all tensors must be bf16 matrices on one GPU")
        tokens, width = dy.shape
        hidden = self.gate.shape[0]
        if g.shape != (tokens, hidden) or u.shape != g.shape or self.gate.shape != (hidden, width) or self.up.shape != (hidden, width) or self.down.shape != (width, hidden):
            raise ValueError("dy is (tokens, width), g and u are (tokens, hidden)")
        if width % 64 or hidden % 64 or not 0 < width <= 1 << 16 or not 0 < hidden <= 1 << 16 or not 0 < tokens <= 1 << 20:
            raise ValueError("width and hidden must be multiples of 64")
        with torch.cuda.device(dy.device):
            given = [dense(t) for t in given]
            out, dg, du = torch.empty_like(given[0]), torch.empty_like(given[1]), torch.empty_like(given[1])
            stream = torch.cuda.current_stream().cuda_stream
            lists, pitch, s1, s2, h1 = plan_of(dy.device, tokens, width, hidden)
            flags = flags_of(dy.device, -(-tokens // 256), stream)
            pointers = (t.data_ptr() for t in (*given, dg, du, out, flags, lists))
            error = extension()(*pointers, tokens, width, hidden, pitch, clusters(dy.device), s1, s2, h1, stream)
        if error:
            raise RuntimeError(f"gated_mlp_gradient: CUDA error {error}")
        return out
