"""Products of experts in fp8 with block scales, CUDA C++: y[r] = x[r] @ w[expert of r]^T, one persistent kernel.

* Roles, the ring of stages, scales by TMA, results that leave from the stages: as in the bundle's fp8_block_product
  (tiles of 256 x 128, two consumer warpgroups with two halves of 64 rows each, clusters of two blocks that share x).
* Rows of an expert are cut into chunks of 64; a tile has four of them, the last one of an expert may have three. One or
  two that are left over form a wide tile: twice as many columns, so that a step has as many products as others, or half.
  The last chunk of an expert is stored row by row.
* Four steps of k are a turn of the ring, so addresses are constants; a product's depth is padded to that by zeros of TMA.
* Tiles are dealt out in turn; the last ones are cut along k (stream-K), so that all clusters end at the same time. Each
  block computes that plan from the offsets. A cluster that begins inside of a tile leaves its sums in a workspace; the
  one that began the tile, which comes to it last, adds them in a fixed order: results do not change from run to run.
evals/trials/experts_fp8 states the problem.
"""

import functools

import torch
from torch.utils.cpp_extension import load_inline

HALVES = 2  # of 64 rows that a consumer warpgroup owns
BN = 128  # columns of a tile: as many as have one scale of w
UNROLL = 4  # steps of 128 of k in the source of the loop
SPLIT = 0  # whole waves of tiles that are cut along k, beside the last one; -1: none
COSTS = (0, 9, 16, 15, 16)  # of a step of a tile of 1 to 4 chunks; with 1 or 2 it is wide
PREFETCH = 0  # into the L2: 1: of all operands; 2: of w by the first tile of rows, of x by that of columns
DISTANCE = 8  # steps ahead
HINTS = 1  # 1: the result is evicted first from the L2
PROBE = 0  # 1: loads from a few lines that stay in the L2; 2: no loads; 3: no scaling


def wgmma(n):
    """m64 n k32 of e4m3: n / 2 sums a thread, both operands in shared memory; `keep` 0 overwrites the sums."""
    half = n // 2
    sums, operands = ", ".join(f"%{i}" for i in range(half)), ", ".join(f'"+f"(d[{i}])' for i in range(half))
    return f"""__device__ __forceinline__ void multiply(float (&d)[{half}], uint64_t a, uint64_t b, int keep) {{
    asm volatile("{{.reg .pred p; setp.ne.b32 p, %{half + 2}, 0; "
                 "wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3 {{{sums}}}, %{half}, %{half + 1}, p, 1, 1;}}"
                 : {operands} : "l"(a), "l"(b), "r"(keep));
}}
"""


CUDA = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>
#include <type_traits>

typedef uint32_t u32;
typedef long long i64;
constexpr int BM = 128 * HALVES, BK = 128, CLUSTER = 2, THREADS = 384;
constexpr int SLICES = BN / 64;  // 64 columns of the result leave together; they lie in a stage's 64 rows of x
constexpr int HELD = SLICES;     // stages that the result of a tile takes
constexpr int STAGES = 4;        // of the ring: four steps, which have their scales in one slot
constexpr int SLOTS = 2, IN_SOURCE = UNROLL;
constexpr u32 X_BYTES = BM * BK, W_BYTES = BN * BK, STAGE_BYTES = X_BYTES + W_BYTES, SLICE_BYTES = 64 * 64 * 2, CHUNK_BYTES = 64 * BK, SLOT_BYTES = 16 * BM + 256;
constexpr u32 PLAN_BYTES = 10240;
constexpr u32 SHARED_BYTES = STAGES * STAGE_BYTES + SLOTS * SLOT_BYTES + 16 * STAGES + 16 + 1024 + PLAN_BYTES;
constexpr int MOST_EXPERTS = 256, MOST_CLUSTERS = 128;
static_assert(BN == 128 && HALVES == 2, "a tile has one scale of w a step, and its result fits two stages");

struct Shape { int rows, columns, experts, steps, doubles, of_w; };  // doubles: pairs of a cluster's tiles, along the columns; of_w: rows of scale_w an expert
struct Plan {
    int row[MOST_EXPERTS + 1], tile[MOST_EXPERTS + 1];  // the first of each expert
    i64 cost[MOST_EXPERTS + 1];                         // of all tiles before
    int whole;                                          // tiles before this one are dealt out whole
    int bound_tile[MOST_CLUSTERS + 1], bound_k[MOST_CLUSTERS + 1];
    int raw_tiles[MOST_EXPERTS];
    i64 raw_cost[MOST_EXPERTS], load[MOST_CLUSTERS];
};
static_assert(sizeof(Plan) <= PLAN_BYTES, "");


__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void bar_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory"); }
__device__ __forceinline__ void bar_expect(u32 bar, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory"); }
__device__ __forceinline__ void bar_arrive_at(u32 bar, u32 block) {  // the same barrier in a block of the cluster
    asm volatile("{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [r];\n}" ::"r"(bar), "r"(block) : "memory");
}
__device__ __forceinline__ void bar_wait(u32 bar, u32 parity) {
    asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra again;\ndone:\n}" ::"r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ void load(u32 to, const CUtensorMap* map, u32 bar, int k, int row) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                 ::"r"(to), "l"(map), "r"(bar), "r"(k), "r"(row) : "memory");
}
__device__ __forceinline__ void prefetch(const CUtensorMap* map, int k, int row) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(k), "r"(row) : "memory");
}
__device__ __forceinline__ void load_for_both(u32 to, const CUtensorMap* map, u32 bar, int k, int row) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;"
                 ::"r"(to), "l"(map), "r"(bar), "r"(k), "r"(row), "h"((uint16_t)3) : "memory");
}
__device__ __forceinline__ void store(const CUtensorMap* map, u32 from, int column, int row) {
    if (HINTS & 1) asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%2, %3}], [%1], %4;" ::"l"(map), "r"(from), "r"(column), "r"(row), "l"(0x12F0000000000000ull) : "memory");
    else asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from), "r"(column), "r"(row) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ uint64_t descriptor(u32 address) {  // K-major rows of 128 bytes, 128-byte swizzle
    return (uint64_t)((address & 0x3FFFF) >> 4) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}
@WGMMA@__device__ __forceinline__ u32 packed(float a, float b) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
    return r;
}
__device__ __forceinline__ float word(u32 at) {
    float r;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(r) : "r"(at) : "memory");
    return r;
}
__device__ __forceinline__ int uniform(int v) { return __shfl_sync(~0u, v, 0); }
// Rows of an expert are `chunks` of 64, in `tall` tiles of four, the last one perhaps of three, and a wide one where one or two are left.
struct Tiles {
    int chunks, tall, wide;
    __device__ __forceinline__ explicit Tiles(int chunks) : chunks(chunks), tall((chunks + 1) / 4), wide(chunks % 4 == 1 || chunks % 4 == 2) {}
    __device__ __forceinline__ int number() const { return 2 * tall + wide; }  // for the columns of a wide tile
    __device__ __forceinline__ int chunks_of(int t) const { return t == 2 * tall ? chunks % 4 : min(4, chunks - t % tall * 4); }
    __device__ __forceinline__ int cost_of(int t) const {
        const int n = chunks_of(t);
        return n == 4 ? COST4 : n == 3 ? COST3 : n == 2 ? COST2 : COST1;
    }
};
__device__ __forceinline__ int chunks_of_expert(const Plan& p, int e) { return (p.row[e + 1] - p.row[e] + 63) / 64; }

struct Work { int tile, expert, row, end, chunks, wide, pair, first, from, to; };  // pair: of blocks of BN columns, for the blocks of the cluster; first: of the expert's rows

template <bool UNIFORM, class F> __device__ __forceinline__ void work(const Plan& p, const Shape& s, int cluster, int clusters, u32 planned, F&& f) {
    auto same = [](int v) { return UNIFORM ? uniform(v) : v; };
    int expert = 0, tile = cluster, from = 0, last_tile = 0, last_k = 0;
    const int whole = same(p.whole);
    bool split = false;
    while (true) {
        if (!split && tile >= whole) {
            bar_wait(planned, 0);
            tile = same(p.bound_tile[cluster]), from = same(p.bound_k[cluster]);
            last_tile = same(p.bound_tile[cluster + 1]), last_k = same(p.bound_k[cluster + 1]), split = true;
        }
        const int to = split && tile == last_tile ? last_k : s.steps;
        if (split && (tile > last_tile || from >= to)) break;
        while (tile >= same(p.tile[expert + 1])) ++expert;
        const int start = same(p.tile[expert]), within = tile - start;
        const Tiles tiles(same(chunks_of_expert(p, expert)));
        const int number = tiles.number(), t = within % number, wide = t == 2 * tiles.tall, right = !wide && t >= tiles.tall, down = wide ? tiles.tall : t - right * tiles.tall;
        f(Work{tile, expert, same(p.row[expert]) + 256 * down, same(p.row[expert + 1]), tiles.chunks_of(t), wide, within / number * 2 + right, down == 0, from, to});
        if (split) ++tile, from = 0;
        else tile += clusters;
    }
}

// 128 threads: shares of the tiles behind p.whole, by cost, such that each cluster's work is equal.
__device__ __forceinline__ void plan_split(Plan& p, const Shape& s, int clusters) {
    const int j = threadIdx.x, all_tiles = p.tile[s.experts];
    i64 own = 0, base = 0;
    int e = 0;
    if (j < clusters)
        for (int tile = j; tile < p.whole; tile += clusters) {
            while (tile >= p.tile[e + 1]) ++e;
            const Tiles tiles(chunks_of_expert(p, e));
            own += tiles.cost_of((tile - p.tile[e]) % tiles.number());
        }
    p.load[j] = own * s.steps;
    asm volatile("bar.sync 1, 128;" ::: "memory");
    const i64 all = p.cost[s.experts], mean = all / clusters + 1;
    i64 shares = 0, before = 0;
    for (int i = 0; i < clusters; ++i) {
        const i64 load = p.load[i], share = mean > load ? mean - load : 0;
        base += load, shares += share;
        if (i < j) before += share;
    }
    const i64 rest = all - base, target = base + (i64)((double)rest * ((double)before / (double)shares));
    if (j <= clusters) {
        int tile = all_tiles, k = 0;
        if (j == 0) tile = p.whole;
        else if (rest > 0 && j < clusters && target < all) {
            e = 0;
            while (p.cost[e + 1] <= target) ++e;
            const Tiles tiles(chunks_of_expert(p, e));
            const i64 of_double = (p.cost[e + 1] - p.cost[e]) / s.doubles;
            i64 left = target - p.cost[e], cost;
            const int number = (int)(left / of_double);
            left -= number * of_double;
            int t = 0;
            while (cost = (i64)tiles.cost_of(t) * s.steps, left >= cost) left -= cost, ++t;
            tile = p.tile[e] + number * tiles.number() + t, k = (int)left / tiles.cost_of(t) + 2 & ~3;
        }
        if (k >= s.steps) ++tile, k = 0;
        p.bound_tile[j] = tile, p.bound_k[j] = k;
    }
    if (j == 0) p.bound_tile[clusters] = all_tiles, p.bound_k[clusters] = 0;
}

__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    experts_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap y_map,
                   const __grid_constant__ CUtensorMap scale_x_map, const __grid_constant__ CUtensorMap scale_w_map, const int* offsets, __nv_bfloat16* y,
                   float4* partial, int* flags, int by_tma, Shape s) {
    extern __shared__ __align__(16) uint8_t raw[];
    Plan& plan = *(Plan*)raw;
    const u32 ring = (shared_address(raw) + PLAN_BYTES + 1023) & ~1023u, slots = ring + STAGES * STAGE_BYTES, full = slots + SLOTS * SLOT_BYTES, empty = full + 8 * STAGES, planned = empty + 8 * STAGES;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, group = warp / 4;
    const int cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
    u32 block;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
    if (threadIdx.x == 256) {
        for (int i = 0; i < STAGES; ++i) bar_init(full + 8 * i, 1), bar_init(empty + 8 * i, 2 * CLUSTER);  // a consumer warpgroup each
        bar_init(planned, 128);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (threadIdx.x < s.experts) {
        const int e = threadIdx.x, first = __ldg(offsets + e), end = __ldg(offsets + e + 1), chunks = max(end - first + 63, 0) / 64;
        const Tiles tiles(chunks);
        i64 cost = 0;
        for (int t = 0; t < tiles.number(); ++t) cost += tiles.cost_of(t);
        plan.row[e] = first, plan.raw_tiles[e] = tiles.number() * s.doubles, plan.raw_cost[e] = cost * s.doubles * s.steps;
        if (e == s.experts - 1) plan.row[e + 1] = end;
    }
    __syncthreads();
    if (threadIdx.x <= s.experts) {
        int tile = 0;
        i64 cost = 0;
        for (int e = 0; e < threadIdx.x; ++e) tile += plan.raw_tiles[e], cost += plan.raw_cost[e];
        plan.tile[threadIdx.x] = tile, plan.cost[threadIdx.x] = cost;
        if (threadIdx.x == s.experts) plan.whole = SPLIT < 0 ? tile : max(tile / clusters - SPLIT, 0) * clusters;
    }
    __syncthreads();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        if (warp == 8 && lane == 0) {
            u32 parity = 1;
            work<false>(plan, s, cluster, clusters, planned, [&](const Work& o) {
                const int column = (o.pair * CLUSTER + block * (1 + o.wide)) * BN, of_w = o.expert * s.of_w + column / 128, of_first = o.wide ? 2 : (o.chunks + 1) / 2, bytes = (1 + o.wide) * W_BYTES + o.chunks * CHUNK_BYTES;
                const int w_row = (PROBE == 1 ? 0 : o.expert) * s.columns + column;
                for (int k = o.from; k < o.to; k += STAGES) {
                    const u32 scales = slots + (parity ^ 1) * SLOT_BYTES;
                    #pragma unroll 1
                    for (int u = 0; u < STAGES; ++u) {
                        const u32 bar = full + 8 * u, at = ring + u * STAGE_BYTES;
                        const int depth = (PROBE == 1 ? k % 8 : k + u) * BK;
                        bar_wait(empty + 8 * u, parity);
                        if (PROBE == 2) {
                            asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
                            continue;
                        }
                        if (u == 0) {
                            bar_expect(bar, bytes + 16 * BM + 16 * (1 + o.wide));
                            load(scales, &scale_x_map, bar, k, o.row);
                            load(scales + 16 * BM, &scale_w_map, bar, k, of_w);
                            if (o.wide) load(scales + 16 * BM + 128, &scale_w_map, bar, k, of_w + 1);
                        } else bar_expect(bar, bytes);
                        for (int i = block; i < o.chunks; i += CLUSTER)
                            load_for_both(at + (i < of_first ? i : HALVES + i - of_first) * CHUNK_BYTES, &x_map, bar, depth, o.row + 64 * i);
                        load(at + X_BYTES, &w_map, bar, depth, w_row);
                        if (o.wide) load(at + 2 * CHUNK_BYTES, &w_map, bar, depth, w_row + BN);
                        if (PREFETCH && k + u + DISTANCE < o.to) {
                            if (PREFETCH == 1 || o.first) {
                                prefetch(&w_map, depth + DISTANCE * BK, w_row);
                                if (o.wide) prefetch(&w_map, depth + DISTANCE * BK, w_row + BN);
                            }
                            if (PREFETCH == 1 || o.pair == 0)
                                for (int i = block; i < o.chunks; i += CLUSTER) prefetch(&x_map, depth + DISTANCE * BK, o.row + 64 * i);
                        }
                    }
                    parity ^= 1;
                }
            });
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        if (group == 0) {
            plan_split(plan, s, clusters);
            asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(planned) : "memory");
        }
        u32 parity = 0;
        bool held = false;  // the last stages hold the result of the tile before
        const int own = warp % 4 * 16 + lane % 8 + lane / 8 % 2 * 8;  // the row of 64 whose address this lane gives to stmatrix
        auto release = [&](int at) {
            if (threadIdx.x % 128 < CLUSTER) bar_arrive_at(empty + 8 * at, threadIdx.x % 128);
        };
        auto let_go = [&]() {
            held = false;
            asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
            #pragma unroll
            for (int i = STAGES - HELD; i < STAGES; ++i) release(i);
        };
        auto consume = [&](auto number, auto is_wide, const Work& o, int row, int slot_row, int column) {
            constexpr int mine = decltype(number)::value;
            constexpr bool wide = decltype(is_wide)::value;  // halves are two blocks of columns of the same rows
            const u32 a_at = ring + (wide ? mine == 2 ? group * CHUNK_BYTES : 0 : group * (X_BYTES / 2)), b_at = ring + (wide && mine == 1 && group ? 2 * CHUNK_BYTES : X_BYTES);
            float sums[mine][BN / 2], d[BN / 2];
            #pragma unroll
            for (int h = 0; h < mine; ++h)
                #pragma unroll
                for (int i = 0; i < BN / 2; ++i) sums[h][i] = 0.0f;
            #pragma unroll
            for (int i = 0; i < BN / 2; ++i) d[i] = 0.0f;
            const u32 of_thread = slots + (slot_row + warp % 4 * 16 + lane / 4) * 16;
            const int kept = o.from ? o.to : o.to - STAGES;  // from this step on the last stages are kept for the result
            for (int k = o.from; k < o.to; k += STAGES) {
                const u32 scales = slots + parity * SLOT_BYTES + (wide && mine == 1 ? group * 128 : 0), of_x = of_thread + parity * SLOT_BYTES;
                #pragma unroll IN_SOURCE
                for (int u = 0; u < STAGES; ++u) {
                    float f[wide ? 2 : 2 * mine];
                    bar_wait(full + 8 * u, parity);
                    const float of_w = word(scales + 16 * BM + 4 * u), of_right = wide && mine == 2 ? word(scales + 16 * BM + 128 + 4 * u) : of_w;
                    #pragma unroll
                    for (int i = 0; i < (wide ? 2 : 2 * mine); ++i) f[i] = word(of_x + (i / 2 * 64 + i % 2 * 8) * 16 + 4 * u);
                    #pragma unroll
                    for (int h = 0; h < mine; ++h) {
                        const uint64_t a = descriptor(a_at + u * STAGE_BYTES + (wide ? 0 : h * 64 * BK)), b = descriptor(wide && h ? ring + 2 * CHUNK_BYTES + u * STAGE_BYTES : b_at + u * STAGE_BYTES);
                        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
                        #pragma unroll
                        for (int i = 0; i < 4; ++i) multiply(d, a + 2 * i, b + 2 * i, i);
                        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                        if (u == 0 && h == 0 && held) let_go();
                        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
                        #pragma unroll
                        for (int i = 0; i < BN / 2; ++i) asm volatile("" : "+f"(d[i]) :: "memory");
                        if (h == mine - 1 && (u < STAGES - HELD || k < kept)) release(u);
                        const float f0 = f[wide ? 0 : 2 * h] * (h ? of_right : of_w), f1 = f[wide ? 1 : 2 * h + 1] * (h ? of_right : of_w);
                        #pragma unroll
                        for (int i = 0; i < (PROBE == 3 ? 4 : BN / 2); i += 4) {
                            sums[h][i] += d[i] * f0, sums[h][i + 1] += d[i + 1] * f0;
                            sums[h][i + 2] += d[i + 2] * f1, sums[h][i + 3] += d[i + 3] * f1;
                        }
                    }
                }
                parity ^= 1;
            }
            const int thread = threadIdx.x % 128;
            if (o.from) {  // the sums of a later part of a tile
                const int at = (cluster * CLUSTER + block) * 2 + group;
                float4* out = partial + (i64)at * (HALVES * 64 * BN / 4) + thread;
                #pragma unroll
                for (int h = 0; h < mine; ++h)
                        #pragma unroll
                        for (int i = 0; i < BN / 2; i += 4)
                            __stcg(out + (h * 16 + i / 4) * 128, make_float4(sums[h][i], sums[h][i + 1], sums[h][i + 2], sums[h][i + 3]));
                __threadfence();
                asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
                if (thread == 0) asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flags + at) : "memory");
                return;
            }
            for (int at = o.to, other = cluster + 1; at < s.steps; ++other) {
                const int end = uniform(plan.bound_tile[other + 1]) == o.tile ? uniform(plan.bound_k[other + 1]) : s.steps;
                if (end <= at) continue;
                at = end;
                const int from = (other * CLUSTER + block) * 2 + group;
                if (thread == 0) {
                    int there;
                    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(flags + from) : "memory"); while (!there);
                    flags[from] = 0;
                }
                asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
                const float4* in = partial + (i64)from * (HALVES * 64 * BN / 4) + thread;
                #pragma unroll
                for (int h = 0; h < mine; ++h)
                        #pragma unroll
                        for (int i = 0; i < BN / 2; i += 4) {
                            const float4 v = __ldcg(in + (h * 16 + i / 4) * 128);
                            sums[h][i] += v.x, sums[h][i + 1] += v.y, sums[h][i + 2] += v.z, sums[h][i + 3] += v.w;
                        }
            }
            if (wide) asm volatile("bar.sync 3, 256;" ::: "memory");  // what is written over was read by both
            // A warp writes over rows of x that only its own products read, so it need not wait for the other warps.
            auto buffer = [&](int slice) { return ring + (STAGES - HELD + slice / HALVES) * STAGE_BYTES + group * (X_BYTES / 2) + slice % HALVES * SLICE_BYTES; };
            #pragma unroll
            for (int slice = 0; slice < SLICES * mine; ++slice) {
                const u32 to = buffer(slice) + own * 128;
                #pragma unroll
                for (int j = 0; j < 4; ++j) {  // 16 columns
                    const float* v = sums[slice / SLICES] + slice % SLICES * 32 + j * 8;
                    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                                 ::"r"(to + ((j * 2 + lane / 16) ^ (own % 8)) * 16), "r"(packed(v[0], v[1])), "r"(packed(v[2], v[3])),
                                   "r"(packed(v[4], v[5])), "r"(packed(v[6], v[7])) : "memory");
                }
            }
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
            auto row_of = [&](int h) { return row + (wide ? 0 : h * 64); };
            auto column_of = [&](int h) { return column + (wide ? h * BN : 0); };
            auto by_box = [&](int h) { return by_tma && row_of(h) + 64 <= o.end; };  // all rows are of this expert
            if (thread == 0)
                #pragma unroll
                for (int slice = 0; slice < SLICES * mine; ++slice)
                    if (by_box(slice / SLICES)) store(&y_map, buffer(slice), column_of(slice / SLICES) + slice % SLICES * 64, row_of(slice / SLICES));
            if (!by_box(mine - 1)) {
                for (int h = 0; h < mine; ++h) {
                    if (by_box(h)) continue;
                    for (int at = thread; at < 64 * 16; at += 128) {
                        const int r = at / 16, unit = at % 16, c = column_of(h) + 8 * unit, to_row = row_of(h) + r;
                        if (to_row >= o.end || c >= s.columns) continue;
                        u32 v[4];
                        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                                     : "r"(buffer(h * SLICES + unit / 8) + r * 128 + ((unit ^ r) & 7) * 16) : "memory");
                        __nv_bfloat16* to = y + (i64)to_row * s.columns + c;
                        if (s.columns % 8 == 0) *(uint4*)to = make_uint4(v[0], v[1], v[2], v[3]);
                        else
                            #pragma unroll
                            for (int i = 0; i < 8; ++i)
                                if (c + i < s.columns) ((unsigned short*)to)[i] = (unsigned short)(v[i / 2] >> i % 2 * 16);
                    }
                }
                asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
            }
            held = true;
        };
        work<true>(plan, s, cluster, clusters, planned, [&](const Work& o) {
            const std::integral_constant<int, 1> one;
            const std::integral_constant<int, 2> two;
            if (o.wide) {
                const int column = (o.pair * CLUSTER + block * 2) * BN;
                if (o.chunks == 2) consume(two, std::true_type(), o, o.row + group * 64, group * 64, column);
                else consume(one, std::true_type(), o, o.row, 0, column + group * BN);
                return;
            }
            const int of_first = (o.chunks + 1) / 2, mine = group ? o.chunks - of_first : of_first, skipped = group ? of_first * 64 : 0;
            const int row = o.row + skipped, column = (o.pair * CLUSTER + block) * BN;
            if (mine == 2) consume(two, std::false_type(), o, row, skipped, column);
            else consume(one, std::false_type(), o, row, skipped, column);
        });
        if (threadIdx.x % 128 == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");  // no block ends while another still arrives at its barriers
}

// What TMA cannot address: rows of `depth` bytes to rows of `pitch`, a multiple of 16; what is new is 0. A block a row.
__device__ __forceinline__ u32 word_at(const uint8_t* from, i64 word, i64 total) {
    if (4 * word + 4 <= total) return __ldg((const u32*)from + word);
    u32 value = 0;
    for (i64 byte = 4 * word; byte < total; ++byte) value |= (u32)from[byte] << 8 * (byte % 4);
    return value;
}
__global__ void realign_kernel(const uint8_t* from, uint4* to, int rows, int depth, int pitch) {
    const i64 row = blockIdx.x, total = (i64)rows * depth;
    for (int at = threadIdx.x; at < pitch / 16; at += blockDim.x) {
        const i64 byte = row * depth + 16 * at, word = byte / 4;
        u32 in[5], out[4];
        #pragma unroll
        for (int i = 0; i < 5; ++i) in[i] = word_at(from, word + i, total);
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int left = depth - 16 * at - 4 * i;  // bytes of the row from here on
            out[i] = __funnelshift_r(in[i], in[i + 1], byte % 4 * 8) & (left >= 4 ? ~0u : left > 0 ? (1u << 8 * left) - 1 : 0);
        }
        to[row * (pitch / 16) + at] = make_uint4(out[0], out[1], out[2], out[3]);
    }
}

// All return 0 or an error: CUDA's, or 10000 and the driver's.
#define MUST(call) do { int error = int(call); if (error) return error; } while (0)

int map_of(CUtensorMap& map, const void* data, CUtensorMapDataType type, int bytes, i64 rows, int columns, i64 pitch, int box_rows, int box_columns) {
    static void* encode = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (!encode) MUST(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &result));
    cuuint64_t sizes[2] = {(cuuint64_t)columns, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)pitch * bytes};
    cuuint32_t box[2] = {(cuuint32_t)box_columns, (cuuint32_t)box_rows}, one[2] = {1, 1};
    const CUtensorMapSwizzle swizzle = box_columns * bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE;
    CUresult error = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(&map, type, 2, (void*)data, sizes, strides, box, one,
        CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return error == CUDA_SUCCESS ? 0 : 10000 + int(error);
}

int product(const void* x, const int* offsets, const void* w, void* y, const float* scale_x, const float* scale_w, uint8_t* copies, uint8_t* scale_copies,
            float4* partial, int* flags, int rows, int columns, int depth, int experts, int clusters, cudaStream_t stream) {
    const int blocks = (depth + BK - 1) / BK, of_w = (columns + 127) / 128;
    int pitch = depth, scale_pitch = blocks;
    if (copies) {
        pitch = (depth + 15) / 16 * 16;
        uint8_t* of_weight = copies + (i64)rows * pitch;
        realign_kernel<<<rows, 128, 0, stream>>>((const uint8_t*)x, (uint4*)copies, rows, depth, pitch);
        realign_kernel<<<experts * columns, 128, 0, stream>>>((const uint8_t*)w, (uint4*)of_weight, experts * columns, depth, pitch);
        x = copies, w = of_weight;
    }
    if (scale_copies) {
        scale_pitch = (blocks + 3) / 4 * 4;
        uint8_t* of_weight = scale_copies + (i64)rows * scale_pitch * 4;
        realign_kernel<<<rows, 128, 0, stream>>>((const uint8_t*)scale_x, (uint4*)scale_copies, rows, 4 * blocks, 4 * scale_pitch);
        realign_kernel<<<experts * of_w, 128, 0, stream>>>((const uint8_t*)scale_w, (uint4*)of_weight, experts * of_w, 4 * blocks, 4 * scale_pitch);
        scale_x = (const float*)scale_copies, scale_w = (const float*)of_weight;
    }
    const Shape s = {rows, columns, experts, (blocks + STAGES - 1) / STAGES * STAGES, (columns + 2 * CLUSTER * BN - 1) / (2 * CLUSTER * BN), of_w};
    const bool by_tma = columns % 8 == 0;
    CUtensorMap x_map, w_map, y_map, scale_x_map, scale_w_map;
    MUST(map_of(x_map, x, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, rows, depth, pitch, 64, BK));
    MUST(map_of(w_map, w, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, (i64)experts * columns, depth, pitch, BN, BK));
    MUST(map_of(scale_x_map, scale_x, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, rows, blocks, scale_pitch, BM, 4));
    MUST(map_of(scale_w_map, scale_w, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, (i64)experts * of_w, blocks, scale_pitch, 1, 4));
    y_map = x_map;
    if (by_tma) MUST(map_of(y_map, y, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, rows, columns, columns, 64, 64));
    MUST(cudaFuncSetAttribute(experts_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
    experts_kernel<<<clusters * CLUSTER, THREADS, SHARED_BYTES, stream>>>(x_map, w_map, y_map, scale_x_map, scale_w_map, offsets, (__nv_bfloat16*)y, partial, flags, by_tma, s);
    return cudaGetLastError();
}

static PyObject* run(PyObject*, PyObject* const* given, Py_ssize_t) {  // x, offsets, w, y, scale_x, scale_w, copies, scale_copies, partial, flags, rows, columns, depth, experts, clusters, stream
    i64 a[16];
    for (int i = 0; i < 16; ++i) a[i] = PyLong_AsLongLong(given[i]);
    return PyLong_FromLong(product((void*)a[0], (int*)a[1], (void*)a[2], (void*)a[3], (float*)a[4], (float*)a[5], (uint8_t*)a[6], (uint8_t*)a[7], (float4*)a[8], (int*)a[9],
                                   int(a[10]), int(a[11]), int(a[12]), int(a[13]), int(a[14]), (cudaStream_t)a[15]));
}
static PyMethodDef methods[] = {{"run", (PyCFunction)(void*)run, METH_FASTCALL, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "experts_fp8", "", -1, methods};
#define INIT(name) PyInit_##name
#define INIT_OF(name) INIT(name)
PyMODINIT_FUNC INIT_OF(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
""".replace("@WGMMA@", wgmma(BN))


@functools.cache
def extension():
    flags = {"HALVES": HALVES, "BN": BN, "UNROLL": UNROLL, "SPLIT": SPLIT, "PREFETCH": PREFETCH, "DISTANCE": DISTANCE, "HINTS": HINTS, "PROBE": PROBE}
    flags |= {f"COST{i}": COSTS[i] for i in range(1, 5)}
    return load_inline(
        "experts_fp8_" + "_".join(str(value).replace("-", "m") for value in flags.values()),
        "",
        CUDA,
        no_implicit_headers=True,
        with_pytorch_error_handling=False,
        extra_cuda_cflags=["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a"]
        + [f"-D{name}={value}" for name, value in flags.items()],
    ).run


def dense(x):
    """x, contiguous and at a multiple of 16 bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


@functools.cache
def clusters_of(device):
    return min(torch.cuda.get_device_properties(device).multi_processor_count // 2, 128)


@functools.cache
def flags_of(device, stream):
    """Of the clusters' sums; the kernel leaves them 0."""
    return torch.zeros(4 * clusters_of(device), dtype=torch.int32, device=device)


class ModelNew(torch.nn.Module):
    def forward(self, x, offsets, weight, scale_x, scale_w):
        (rows, depth), (experts, columns, _) = x.shape, weight.shape
        blocks, device = -(-depth // 128), x.device
        if weight.shape[2] != depth or len(offsets) != experts + 1:
            raise ValueError(f"x {tuple(x.shape)}, offsets {tuple(offsets.shape)} and weight {tuple(weight.shape)} do not fit together")
        if scale_x.shape != (rows, blocks) or scale_w.shape != (experts, -(-columns // 128), blocks):
            raise ValueError(f"scales {tuple(scale_x.shape)} and {tuple(scale_w.shape)} do not fit")
        if not x.dtype == weight.dtype == torch.float8_e4m3fn or not scale_x.dtype == scale_w.dtype == torch.float32:
            raise ValueError("x and weight must be float8_e4m3fn, the scales float32")
        if experts > 256 or rows > 2**21 or depth > 2**20 or experts * columns > 2**30:
            raise ValueError("at most 256 experts, 2^21 rows, 2^20 values a row, 2^30 columns")
        y = torch.empty((rows, columns), dtype=torch.bfloat16, device=device)
        if not y.numel() or not depth:
            return y.zero_()
        x, weight, scale_x, scale_w, offsets = dense(x), dense(weight), dense(scale_x), dense(scale_w), offsets.int().contiguous()
        copies = scale_copies = None
        if depth % 16:
            copies = torch.empty((rows + experts * columns, -(-depth // 16) * 16), dtype=torch.uint8, device=device)
        if blocks % 4:
            scale_copies = torch.empty((rows + scale_w[..., 0].numel(), -(-blocks // 4) * 4), dtype=torch.float32, device=device)
        clusters, stream = clusters_of(device), torch.cuda.current_stream(device).cuda_stream
        partial = torch.empty(clusters * 4 * 16384, dtype=torch.float32, device=device)
        error = extension()(
            x.data_ptr(),
            offsets.data_ptr(),
            weight.data_ptr(),
            y.data_ptr(),
            scale_x.data_ptr(),
            scale_w.data_ptr(),
            0 if copies is None else copies.data_ptr(),
            0 if scale_copies is None else scale_copies.data_ptr(),
            partial.data_ptr(),
            flags_of(device, stream).data_ptr(),
            rows,
            columns,
            depth,
            experts,
            clusters,
            stream,
        )
        if error:
            raise RuntimeError(f"experts_fp8: CUDA error {error}")
        return y
