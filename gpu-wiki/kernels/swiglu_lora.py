"""SwiGLU of two projections with LoRA terms, in one persistent CUDA C++ kernel (TMA, wgmma, clusters of two).

 * A block's tile is 128 rows x (128 gate + 128 up) columns; the two blocks of a cluster work on neighbouring rows and share
   the weights: one loads the gate's rows for both, the other one the up projection's. A producer warp keeps a ring of four
   steps of 64 of k full, across tiles; two consumer warpgroups own 64 x 256 sums each, the second LAG steps behind.
 * LoRA: t = scale * (x [A1; A2]^T) is computed by the three free warps of the producer's warpgroup (mma.sync) under the first
   tiles, 32 rows a block. A tile's last step multiplies t by [B1 0; 0 B2]; the zeros are what TMA gives outside of a tensor.
   The producer waits for the counter of its rows before it loads t; the last block to finish sets the counters back.
 * silu(gate) * up in registers; the result leaves by stmatrix and TMA while the other warpgroup multiplies.
"""

import functools

import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

PRE = 1  # 1: t by a kernel before, whose end overlaps the start of this one
ROTATE = 1
DEPTH = 3  # steps of 32 of k that a warp of t has in registers
SILU = 2  # 1: one reciprocal for two columns; 2: by tanh
LAG = 0
GROUP = 8  # row tiles of 256 that are walked together
HINTS = 1  # the result is evicted first from the L2, x last
PROBE = ""
SCALE = 2.0
RANK = 16


def wgmma(n):
    half = n // 2
    sums, operands = ", ".join(f"%{i}" for i in range(half)), ", ".join(f'"+f"(d[{i}])' for i in range(half))
    return f"""__device__ __forceinline__ void multiply(float (&d)[{half}], uint64_t a, uint64_t b, int keep) {{
    asm volatile("{{.reg .pred p; setp.ne.b32 p, %{half + 2}, 0; "
                 "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{sums}}}, %{half}, %{half + 1}, p, 1, 1, 0, 0;}}"
                 : {operands} : "l"(a), "l"(b), "r"(keep));
}}
"""


CUDA = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>

typedef uint32_t u32;
constexpr int BM = 128, BN = 128, BK = 64, CLUSTER = 2, THREADS = 384, STAGES = 4, UNIT = 32;
constexpr u32 A_BYTES = BM * BK * 2, B_BYTES = 2 * BN * BK * 2, STAGE_BYTES = A_BYTES + B_BYTES, SLOT_BYTES = 64 * 64 * 2;
constexpr u32 SHARED_BYTES = STAGES * STAGE_BYTES + 4 * SLOT_BYTES + 24 * STAGES + 16;
static_assert(SHARED_BYTES <= 232448, "shared memory");
static_assert(3 * UNIT * 32 * 4 <= 4 * SLOT_BYTES, "parts of t lie in the slots");

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void bar_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory"); }
__device__ __forceinline__ void bar_expect(u32 bar, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory"); }
__device__ __forceinline__ void bar_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
__device__ __forceinline__ void bar_arrive_at(u32 bar, u32 block) {
    asm volatile("{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [r];\n}" ::"r"(bar), "r"(block) : "memory");
}
__device__ __forceinline__ void bar_wait(u32 bar, u32 parity) {
    asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra again;\ndone:\n}" ::"r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ void load(u32 to, const CUtensorMap* map, u32 bar, int k, int row) {
    if (HINTS) asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;"
                 ::"r"(to), "l"(map), "r"(bar), "r"(k), "r"(row), "l"(0x14F0000000000000ull) : "memory");
    else asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                 ::"r"(to), "l"(map), "r"(bar), "r"(k), "r"(row) : "memory");
}
__device__ __forceinline__ void load_for_both(u32 to, const CUtensorMap* map, u32 bar, int k, int row) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;"
                 ::"r"(to), "l"(map), "r"(bar), "r"(k), "r"(row), "h"((uint16_t)3) : "memory");
}
__device__ __forceinline__ void store(const CUtensorMap* map, u32 from, int column, int row) {
    if (HINTS) asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%2, %3}], [%1], %4;" ::"l"(map), "r"(from), "r"(column), "r"(row), "l"(0x12F0000000000000ull) : "memory");
    else asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from), "r"(column), "r"(row) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ uint64_t descriptor(u32 address) {  // K-major rows of 128 bytes, 128-byte swizzle
    return (uint64_t)((address & 0x3FFFF) >> 4) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}
@WGMMA@
__device__ __forceinline__ u32 packed(float a, float b) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
    return r;
}
__device__ __forceinline__ float ex2(float x) {
    float e;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x));
    return e;
}
__device__ __forceinline__ float reciprocal(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
// silu(g) u of two columns, in bf16
__device__ __forceinline__ u32 swiglu(float g0, float g1, float u0, float u1) {
    if (SILU == 2) {
        const float h0 = 0.5f * g0, h1 = 0.5f * g1;
        float t0, t1;
        asm("tanh.approx.f32 %0, %1;" : "=f"(t0) : "f"(h0));
        asm("tanh.approx.f32 %0, %1;" : "=f"(t1) : "f"(h1));
        return packed(fmaf(h0, t0, h0) * u0, fmaf(h1, t1, h1) * u1);
    }
    if (SILU == 1) {  // one reciprocal for both; below -41 silu is as good as zero
        asm("max.NaN.f32 %0, %0, 0fC2240000;" : "+f"(g0));
        asm("max.NaN.f32 %0, %0, 0fC2240000;" : "+f"(g1));
    }
    const float e0 = ex2(g0 * -1.4426950408889634f), e1 = ex2(g1 * -1.4426950408889634f);
    if (SILU == 1) {
        const float d0 = 1.0f + e0, d1 = 1.0f + e1, r = reciprocal(d0 * d1);
        return packed(g0 * (r * d1) * u0, g1 * (r * d0) * u1);
    }
    return packed(g0 * reciprocal(1.0f + e0) * u0, g1 * reciprocal(1.0f + e1) * u1);
}
__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ uint4 fetch(const uint16_t* p, bool inside) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (inside) asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

struct Problem { int rows, columns, width, pairs, pieces; };

// t of 32 rows a unit by three warps, each a third of k
template <int PARTS>
__device__ __forceinline__ void down(const Problem& s, const uint16_t* __restrict__ x, const uint16_t* __restrict__ a1, const uint16_t* __restrict__ a2, u32* t, u32* counters,
                                     u32 space, int part, int lane) {
    const int g = lane / 4, q = lane % 4;
    const int units = (s.rows + UNIT - 1) / UNIT;
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
        const uint16_t* from_x = x + (int64_t)(unit * UNIT + g) * s.width + 8 * q;
        const uint16_t* from_a1 = a1 + (int64_t)g * s.width + 8 * q;
        const uint16_t* from_a2 = a2 + (int64_t)g * s.width + 8 * q;
        const int eight = 8 * s.width, rows = s.rows - unit * UNIT - g;
        auto bring = [&](uint4 (&v)[8], int k, bool inside) {
            #pragma unroll
            for (int i = 0; i < 4; ++i) v[i] = fetch(from_x + k + i * (int64_t)eight, inside && 8 * i < rows);
            v[4] = fetch(from_a1 + k, inside), v[5] = fetch(from_a1 + k + eight, inside);
            v[6] = fetch(from_a2 + k, inside), v[7] = fetch(from_a2 + k + eight, inside);
        };
        float sums[2][4][4];
        #pragma unroll
        for (int i = 0; i < 32; ++i) sums[i / 16][i / 4 % 4][i % 4] = 0.0f;
        const int edge = s.width - 8 * q, count = (s.width + 31) / 32, turn = ROTATE ? (int)((int64_t)count * unit / units) : 0;  // units begin at different k
        auto next = [&](uint4 (&v)[8], int step) {
            int at = step + turn;
            if (at >= count) at -= count;
            bring(v, 32 * at, step < count && 32 * at < edge);
        };
        uint4 v[DEPTH][8];
        #pragma unroll
        for (int j = 0; j < DEPTH - 1; ++j) next(v[j], part + PARTS * j);
        for (int step = part; step < count; step += PARTS * DEPTH) {
            #pragma unroll
            for (int j = 0; j < DEPTH; ++j) {
                next(v[(j + DEPTH - 1) % DEPTH], step + PARTS * (j + DEPTH - 1));
                const uint4* w = v[j];
                #pragma unroll
                for (int m = 0; m < 2; ++m)
                    #pragma unroll
                    for (int n = 0; n < 4; ++n) {
                        mma(sums[m][n], w[2 * m].x, w[2 * m + 1].x, w[2 * m].y, w[2 * m + 1].y, w[4 + n].x, w[4 + n].y);
                        mma(sums[m][n], w[2 * m].z, w[2 * m + 1].z, w[2 * m].w, w[2 * m + 1].w, w[4 + n].z, w[4 + n].w);
                    }
            }
        }
        asm volatile("bar.sync 3, %0;" ::"n"(32 * PARTS) : "memory");
        #pragma unroll
        for (int i = 0; i < 16; ++i)
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(space + ((part * 16 + i) * 32 + lane) * 8), "f"(sums[i / 8][i / 2 % 4][i % 2 * 2]), "f"(sums[i / 8][i / 2 % 4][i % 2 * 2 + 1]) : "memory");
        asm volatile("bar.sync 3, %0;" ::"n"(32 * PARTS) : "memory");
        for (int i = part; i < 16; i += PARTS) {
            float low = 0.0f, high = 0.0f;
            #pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                float a, b;
                asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(a), "=f"(b) : "r"(space + ((p * 16 + i) * 32 + lane) * 8) : "memory");
                low += a, high += b;
            }
            const int row = unit * UNIT + i / 8 * 16 + i % 2 * 8 + g, column = i / 2 % 4 * 8 + 2 * q;
            if (row < s.rows) t[(row * 32 + column) / 2] = packed(low * SCALE, high * SCALE);
        }
        __threadfence();
        asm volatile("fence.proxy.async;" ::: "memory");
        asm volatile("bar.sync 3, %0;" ::"n"(32 * PARTS) : "memory");
        if (PARTS == 3 && part == 0 && lane == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counters + unit / (BM / UNIT)) : "memory");
    }
}

__device__ __forceinline__ void place(const Problem& s, int tile, int& pair, int& piece) {
    const int per_group = GROUP * s.pieces, first = tile / per_group * GROUP, rows = min(s.pairs - first, GROUP), within = tile % per_group;
    pair = first + within % rows, piece = within / rows;
}

__global__ void __launch_bounds__(THREADS, 1)
    glu_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap gate_map, const __grid_constant__ CUtensorMap up_map,
               const __grid_constant__ CUtensorMap t_map, const __grid_constant__ CUtensorMap gate_b_map, const __grid_constant__ CUtensorMap up_b_map,
               const __grid_constant__ CUtensorMap y_map, const uint16_t* __restrict__ x, const uint16_t* __restrict__ a1, const uint16_t* __restrict__ a2, u32* t, u32* counters, Problem s) {
    extern __shared__ __align__(1024) uint8_t raw[];
    const u32 ring = shared_address(raw), slots = ring + STAGES * STAGE_BYTES, full = slots + 4 * SLOT_BYTES, empty = full + 8 * STAGES, lag_bar = empty + 8 * STAGES, free_bar = lag_bar + 8 * STAGES;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, group = warp / 4;
    u32 block;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
    if (threadIdx.x == 0 && ring % 1024) __trap();
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) bar_init(full + 8 * i, 1), bar_init(empty + 8 * i, 2 * CLUSTER), bar_init(lag_bar + 8 * i, 1);
        bar_init(free_bar, 3);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    const int clusters = gridDim.x / CLUSTER, own = blockIdx.x / CLUSTER, tiles = s.pairs * s.pieces, steps = (s.width + BK - 1) / BK;
    if (group == 2) {
        if (DEPTH < 3) asm volatile("setmaxnreg.dec.sync.aligned.u32 120;");
        if (warp == 8) {
            if (lane == 0) {
                const CUtensorMap* w_map = block ? &up_map : &gate_map;
                int stage = 0;
                u32 parity = 1;
                for (int tile = own; tile < tiles; tile += clusters) {
                    int pair, piece;
                    place(s, tile, pair, piece);
                    const int row = (pair * CLUSTER + block) * BM, column = piece * BN;
                    for (int k = 0; k < steps; ++k) {
                        const u32 bar = full + 8 * stage, at = ring + stage * STAGE_BYTES;
                        bar_wait(empty + 8 * stage, parity);
                        bar_expect(bar, STAGE_BYTES);
                        load(at, &x_map, bar, k * BK, row);
                        load_for_both(at + A_BYTES + block * (B_BYTES / 2), w_map, bar, k * BK, column);
                        if (++stage == STAGES) stage = 0, parity ^= 1;
                    }
                    if (PRE) {
                        asm volatile("griddepcontrol.wait;" ::: "memory");
                        asm volatile("fence.proxy.async;" ::: "memory");
                    } else if (row < s.rows && !NO_DOWN && !NO_WAIT) {
                        const u32 wanted = (min(BM, s.rows - row) + UNIT - 1) / UNIT;
                        u32 now;
                        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counters + row / BM) : "memory"); while (now < wanted);
                        asm volatile("fence.proxy.async;" ::: "memory");
                    }
                    const u32 bar = full + 8 * stage, at = ring + stage * STAGE_BYTES;
                    bar_wait(empty + 8 * stage, parity);
                    bar_expect(bar, STAGE_BYTES);
                    load(at, &t_map, bar, 0, row);
                    load_for_both(at + A_BYTES + block * (B_BYTES / 2), block ? &up_b_map : &gate_b_map, bar, block ? -16 : 0, column);
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
                if (PRE) asm volatile("griddepcontrol.wait;" ::: "memory");
                u32* done = counters + s.pairs * CLUSTER;
                __threadfence();
                if (!PRE && atomicAdd(done, 1u) == gridDim.x - 1) {  // every block has seen what it waited for
                    for (int i = 0; i < s.pairs * CLUSTER; ++i) *(volatile u32*)(counters + i) = 0;
                    __threadfence();
                    *(volatile u32*)done = 0;
                }
            }
        } else {
            if (!NO_DOWN && !PRE) down<3>(s, x, a1, a2, t, counters, slots, warp - 9, lane);
            __syncwarp();
            if (lane == 0) bar_arrive(free_bar);
        }
    } else {
        if (DEPTH < 3) asm volatile("setmaxnreg.inc.sync.aligned.u32 192;");
        int stage = 0;
        u32 parity = 0;
        float acc[128];  // one array of one shape, which a tile's first product overwrites, compiles without a value
        const u32 slot = slots + group * 2 * SLOT_BYTES;
        const int thread = threadIdx.x % 128;
        const int at_row = warp % 4 * 16 + lane % 8 + lane / 8 % 2 * 8;  // the row whose address this lane gives to stmatrix
        for (int tile = own; tile < tiles; tile += clusters) {
            int before = 0;
            for (int k = 0; k < steps; ++k) {
                const uint64_t a = descriptor(ring + stage * STAGE_BYTES + group * (A_BYTES / 2)), b = descriptor(ring + stage * STAGE_BYTES + A_BYTES);
                if (LAG && group == 1) {  // stay LAG steps behind; a step of t follows
                    const int ahead = stage + LAG;
                    bar_wait(lag_bar + 8 * (ahead >= STAGES ? ahead - STAGES : ahead), ahead >= STAGES ? parity ^ 1 : parity);
                }
                bar_wait(full + 8 * stage, parity);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
                multiply(acc, a, b, k);
                #pragma unroll
                for (int i = 1; i < 4; ++i) multiply(acc, a + 2 * i, b + 2 * i, 1);
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                if (LAG && threadIdx.x == 0) bar_arrive(lag_bar + 8 * stage);
                if (k) {
                    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                    if (thread < CLUSTER) bar_arrive_at(empty + 8 * before, thread);
                }
                before = stage;
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
            {
                const uint64_t a = descriptor(ring + stage * STAGE_BYTES + group * (A_BYTES / 2)), b = descriptor(ring + stage * STAGE_BYTES + A_BYTES);
                bar_wait(full + 8 * stage, parity);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
                multiply(acc, a, b, 1);
                multiply(acc, a + 2, b + 2, 1);
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                if (LAG && threadIdx.x == 0) bar_arrive(lag_bar + 8 * stage);
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                if (thread < CLUSTER) bar_arrive_at(empty + 8 * before, thread);
                asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
                if (thread < CLUSTER) bar_arrive_at(empty + 8 * stage, thread);
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
            #pragma unroll
            for (int i = 0; i < 128; ++i) asm volatile("" : "+f"(acc[i]) :: "memory");
            int pair, piece;
            place(s, tile, pair, piece);
            const int row = (pair * CLUSTER + block) * BM + group * 64, column = piece * BN;
            if (NO_EPILOGUE) {
                float all = 0;
                #pragma unroll
                for (int i = 0; i < 128; ++i) all += acc[i];
                if (all == 12345.678f) store(&y_map, slot, column, row);
                continue;
            }
            bar_wait(free_bar, 0);  // the parts of t are read
            if (thread == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
            asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
                #pragma unroll
                for (int j = 0; j < 4; ++j) {
                    u32 out[4];
                    #pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int at = half * 32 + 8 * j + 2 * i;
                        out[i] = swiglu(acc[at], acc[at + 1], acc[64 + at], acc[64 + at + 1]);
                    }
                    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                                 ::"r"(slot + half * SLOT_BYTES + at_row * 128 + ((j * 2 + lane / 16) ^ (at_row % 8)) * 16), "r"(out[0]), "r"(out[1]), "r"(out[2]), "r"(out[3]) : "memory");
                }
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
                if (thread == 0) store(&y_map, slot + half * SLOT_BYTES, column + half * 64, row);
            }
        }
        if (thread == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");  // no block ends while another still arrives at its barriers
}

constexpr int DOWN_PARTS = 12;
__global__ void __launch_bounds__(32 * DOWN_PARTS, 1) down_kernel(const uint16_t* __restrict__ x, const uint16_t* __restrict__ a1, const uint16_t* __restrict__ a2, u32* t, Problem s) {
    __shared__ float2 parts[DOWN_PARTS * 16 * 32];
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    down<DOWN_PARTS>(s, x, a1, a2, t, nullptr, shared_address(parts), threadIdx.x / 32, threadIdx.x % 32);
}

#define MUST(call) do { int error = int(call); if (error) return error; } while (0)

static int map_of(CUtensorMap& map, const void* data, long long rows, long long columns, int box_rows) {
    static void* encode = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (!encode) MUST(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &result));
    cuuint64_t sizes[2] = {(cuuint64_t)columns, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)columns * 2};
    cuuint32_t box[2] = {64, (cuuint32_t)box_rows}, one[2] = {1, 1};
    CUresult error = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void*)data, sizes, strides, box, one,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, columns > 64 ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return error == CUDA_SUCCESS ? 0 : 10000 + int(error);
}

// x, gate, up, gate_a, up_a, gate_b, up_b, y, t, counters, rows, columns, width, stream
static int product(const long long* a) {
    const int rows = int(a[10]), columns = int(a[11]), width = int(a[12]);
    CUtensorMap x_map, gate_map, up_map, t_map, gate_b_map, up_b_map, y_map;
    MUST(map_of(x_map, (void*)a[0], rows, width, 128));
    MUST(map_of(gate_map, (void*)a[1], columns, width, 128));
    MUST(map_of(up_map, (void*)a[2], columns, width, 128));
    MUST(map_of(t_map, (void*)a[8], rows, 32, 128));
    MUST(map_of(gate_b_map, (void*)a[5], columns, 16, 128));
    MUST(map_of(up_b_map, (void*)a[6], columns, 16, 128));
    MUST(map_of(y_map, (void*)a[7], rows, columns, 64));
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = CLUSTER, attributes[0].val.clusterDim.y = 1, attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeCooperative;
    attributes[1].val.cooperative = 1;
    cudaLaunchConfig_t config = {};
    config.blockDim = dim3(THREADS), config.dynamicSmemBytes = SHARED_BYTES, config.stream = (cudaStream_t)a[13];
    config.attrs = attributes, config.numAttrs = 1;
    static int fits[64];
    int device, multiprocessors;
    MUST(cudaGetDevice(&device));
    if (device > 63) return 10001;
    if (!fits[device]) {
        MUST(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
        MUST(cudaFuncSetAttribute(glu_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
        config.gridDim = dim3(multiprocessors / CLUSTER * CLUSTER);
        int most = 0;
        MUST(cudaOccupancyMaxActiveClusters(&most, glu_kernel, &config));
        fits[device] = most < multiprocessors / CLUSTER ? most : multiprocessors / CLUSTER;
        if (fits[device] < 1) return 10002;
    }
    config.gridDim = dim3(fits[device] * CLUSTER), config.numAttrs = 2;
    Problem s = {rows, columns, width, (rows + 2 * BM - 1) / (2 * BM), (columns + BN - 1) / BN};
    if (PRE) {
        attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[1].val.programmaticStreamSerializationAllowed = 1;
        down_kernel<<<(rows + UNIT - 1) / UNIT, 32 * DOWN_PARTS, 0, config.stream>>>((const uint16_t*)a[0], (const uint16_t*)a[3], (const uint16_t*)a[4], (u32*)a[8], s);
        MUST(cudaGetLastError());
    }
    MUST(cudaLaunchKernelEx(&config, glu_kernel, x_map, gate_map, up_map, t_map, gate_b_map, up_b_map, y_map, (const uint16_t*)a[0], (const uint16_t*)a[3], (const uint16_t*)a[4],
                            (u32*)a[8], (u32*)a[9], s));
    return cudaGetLastError();
}

static PyObject* run(PyObject*, PyObject* const* given, Py_ssize_t count) {
    if (count != 14) { PyErr_SetString(PyExc_TypeError, "14 arguments"); return nullptr; }
    long long a[14];
    for (int i = 0; i < 14; ++i) a[i] = PyLong_AsLongLong(given[i]);
    return PyLong_FromLong(product(a));
}
static PyMethodDef methods[] = {{"run", (PyCFunction)(void*)run, METH_FASTCALL, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "lora_glu", "", -1, methods};
#define INIT(name) PyInit_##name
#define INIT_OF(name) INIT(name)
PyMODINIT_FUNC INIT_OF(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
""".replace("@WGMMA@", wgmma(256))


@functools.cache
def extension():
    constants = (("LAG", LAG), ("GROUP", GROUP), ("HINTS", HINTS), ("NO_EPILOGUE", int(PROBE == "NO_EPILOGUE")), ("NO_DOWN", int(PROBE == "NO_DOWN")), ("NO_WAIT", int(PROBE == "NO_WAIT")), ("DEPTH", DEPTH), ("PRE", PRE), ("ROTATE", ROTATE), ("SILU", SILU), ("SCALE", f"{SCALE}f"))
    source = "".join(f"#define {name} {value}\n" for name, value in constants) + CUDA
    flags = ["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a"]
    return load_inline("lora_glu", "", source, no_implicit_headers=True, with_pytorch_error_handling=False, extra_cuda_cflags=flags).run


def dense(x):
    """x, contiguous and at a multiple of 16 bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


class ModelNew(nn.Module):
    def __init__(self, width, hidden, rank):
        super().__init__()

        def weights(rows, columns):
            return nn.Parameter(torch.randn(rows, columns, dtype=torch.bfloat16) * columns**-0.5)

        self.gate, self.up = weights(hidden, width), weights(hidden, width)
        self.gate_a, self.up_a = weights(rank, width), weights(rank, width)
        self.gate_b, self.up_b = weights(hidden, rank), weights(hidden, rank)
        self._spaces = {}

    def forward(self, x):
        parameters = [self.gate, self.up, self.gate_a, self.up_a, self.gate_b, self.up_b]
        hidden, width = self.gate.shape
        if x.dim() < 1 or x.shape[-1] != width or self.gate_a.shape[0] != RANK:
            raise ValueError(f"x must have rows of {width}, the adapters rank {RANK}")
        if not x.is_cuda or any(p.dtype != torch.bfloat16 or p.device != x.device for p in [x, *parameters]):
            raise ValueError("x and the parameters must be bf16, on one GPU")
        y = torch.empty(*x.shape[:-1], hidden, dtype=x.dtype, device=x.device)
        x = dense(x.reshape(-1, width))
        rows = x.shape[0]
        if not rows or width % 8 or hidden % 8 or not width or not hidden or max(rows, width, hidden) >= 2**22:
            raise ValueError("rows, width and hidden must be positive, width and hidden multiples of 8")
        parameters = [dense(p) for p in parameters]
        with torch.cuda.device(x.device):
            stream = torch.cuda.current_stream().cuda_stream
            key = (x.device.index, stream, rows)
            if key not in self._spaces:
                self._spaces[key] = (torch.empty(rows, 32, dtype=x.dtype, device=x.device), torch.zeros((rows + 255) // 256 * 2 + 1, dtype=torch.int32, device=x.device))
            t, counters = self._spaces[key]
            error = extension()(x.data_ptr(), *(p.data_ptr() for p in parameters), y.data_ptr(), t.data_ptr(), counters.data_ptr(), rows, hidden, width, stream)
        if error:
            raise RuntimeError(f"lora_glu: CUDA error {error}")
        return y
