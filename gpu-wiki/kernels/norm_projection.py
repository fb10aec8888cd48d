"""RMSNorm, joint projection with bias and RMSNorm of the heads in one persistent launch of CUDA C++ for Hopper.

 * Rows of x are normed to bf16 into a scratch matrix: the first ones by the consumers' warps before their first tile, the others
   by the three free warps of the producer's warpgroup, under the product. A counter for each 128 rows tells the producers.
 * product: clusters of two blocks, each 128 rows x 256 columns (two heads) a tile; a producer warp brings the operands by TMA,
   half of the weight's tile each and for both blocks; two consumer warpgroups of 64 rows.
 * LAG (the second warpgroup stays behind) and STREAM (the last tiles cut along k) are off: they did not pay.
 * epilogue: bias and the norm of both heads in registers, results by stmatrix and TMA.
evals/trials/norm_projection states it.
"""

import functools

import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

PROBE = ""
LAG = 0
EPI = 1  # 0: bias and gains by the read-only cache, 1: from shared memory, 2: no epilogue (probe)
STAGES = 4
GROUP = 4
FIRST = 4  # pairs of the first group
SNAKE = 1  # every other group takes its columns backwards
HINT = 0  # results, and x after its last use, leave the L2 first
STREAM = 0
NORM = 0  # 0: in the launch, 1: a kernel before, 2: not at all (probe)
PACE = 0  # ns that a free warp sleeps after a row

EPSILON = 1e-6


def wgmma():
    sums, operands = ", ".join(f"%{i}" for i in range(128)), ", ".join(f'"+f"(d[{i}])' for i in range(128))
    return f"""__device__ __forceinline__ void multiply(float (&d)[128], uint64_t a, uint64_t b, int keep) {{
    asm volatile("{{.reg .pred p; setp.ne.b32 p, %130, 0; "
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {{{sums}}}, %128, %129, p, 1, 1, 0, 0;}}"
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
constexpr int BM = 128, BN = 256, BK = 64, CLUSTER = 2, THREADS = 384, WIDTH = 128;
constexpr u32 A_BYTES = BM * BK * 2, B_BYTES = BN * BK * 2, STAGE_BYTES = A_BYTES + B_BYTES, SLOT_BYTES = 64 * 64 * 2;
constexpr u32 SHARED_BYTES = STAGES * STAGE_BYTES + 4 * SLOT_BYTES + 24 * STAGES + 1024 + 1536;
static_assert(SHARED_BYTES <= 232448, "shared memory");
constexpr float EPS = 1e-6f;

struct Maps { CUtensorMap a, b, out[3]; };

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void bar_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory"); }
__device__ __forceinline__ void bar_expect(u32 bar, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory"); }
__device__ __forceinline__ void bar_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
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
__device__ __forceinline__ void load_for_both(u32 to, const CUtensorMap* map, u32 bar, int k, int row) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;"
                 ::"r"(to), "l"(map), "r"(bar), "r"(k), "r"(row), "h"((uint16_t)3) : "memory");
}
__device__ __forceinline__ uint64_t descriptor(u32 address) {  // K-major rows of 128 bytes, 128-byte swizzle
    return (uint64_t)((address & 0x3FFFF) >> 4) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}
@WGMMA@
__device__ __forceinline__ int acquire(const int* p) {
    int v;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void store_shared(u32 at, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory"); }
__device__ __forceinline__ u32 load_shared(u32 at) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ float low(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high(u32 v) { return __uint_as_float(v & 0xffff0000u); }
__device__ __forceinline__ u32 pack(float l, float h) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(h), "f"(l));
    return r;
}
__device__ __forceinline__ float squares(uint4 v) {
    float s = low(v.x) * low(v.x), t = high(v.x) * high(v.x);
    s = fmaf(low(v.y), low(v.y), s), t = fmaf(high(v.y), high(v.y), t);
    s = fmaf(low(v.z), low(v.z), s), t = fmaf(high(v.z), high(v.z), t);
    return fmaf(low(v.w), low(v.w), s) + fmaf(high(v.w), high(v.w), t);
}
__device__ __forceinline__ u32 scaled(u32 v, u32 w, float s) { return pack(low(v) * s * low(w), high(v) * s * high(w)); }
__device__ __forceinline__ uint4 scaled(uint4 v, uint4 w, float s) { return make_uint4(scaled(v.x, w.x, s), scaled(v.y, w.y, s), scaled(v.z, w.z, s), scaled(v.w, w.w, s)); }
__device__ __forceinline__ float over_warp(float s) {
    #pragma unroll
    for (int i = 16; i; i /= 2) s += __shfl_xor_sync(~0u, s, i);
    return s;
}

// One row by one warp. HELD: 16-byte pieces a lane holds at a time; if that is the whole row, it is read once.
template <int HELD>
__device__ __forceinline__ void norm_row(const uint4* x, const uint4* gain, uint4* to, int pieces, int lane) {
    uint4 v[HELD];
    float s = 0.0f;
    const bool once = pieces == 32 * HELD;
    for (int first = 0; first < pieces; first += 32 * HELD) {
        #pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const int at = first + 32 * i + lane;
            v[i] = at < pieces ? (HINT && once ? __ldcs(x + at) : x[at]) : make_uint4(0, 0, 0, 0);
        }
        #pragma unroll
        for (int i = 0; i < HELD; ++i) s += squares(v[i]);
    }
    s = rsqrtf(over_warp(s) / (float)(8 * pieces) + EPS);
    for (int first = 0; first < pieces; first += 32 * HELD) {
        if (!once) {
            #pragma unroll
            for (int i = 0; i < HELD; ++i) {
                const int at = first + 32 * i + lane;
                v[i] = at < pieces ? (HINT ? __ldcs(x + at) : x[at]) : make_uint4(0, 0, 0, 0);
            }
        }
        #pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const int at = first + 32 * i + lane;
            if (at < pieces) to[at] = scaled(v[i], __ldg(gain + at), s);
        }
    }
}
__device__ __forceinline__ void tell(int* ready, int row, int lane) {  // the row is written: TMA of other blocks may read it
    asm volatile("fence.proxy.async;" ::: "memory");
    __threadfence();
    __syncwarp();
    if (lane == 0) asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(ready + row / BM) : "memory");
}

// Which work a cluster does: whole tiles in waves, then its equal share of the k steps of the last `shared` tiles.
struct Item { int tile, from, to, kind; };  // kind 0: whole, 1: the first part of a tile, its sums go to memory, 2: the last part, adds them; -1: none
struct Plan {
    int pairs, columns, steps, waves, tiles, shared, clusters;
    __device__ __forceinline__ Item item(int i, int c) const {
        Item r = {i * clusters + c, 0, steps, 0};
        if (!shared || i < waves) {
            if (r.tile >= tiles) r.kind = -1;
            return r;
        }
        const int total = shared * steps, base = waves * clusters;
        const int begin = (int)((int64_t)c * total / clusters), end = (int)((int64_t)(c + 1) * total / clusters);
        const int tail = end % steps, head = begin % steps;
        int j = i - waves;
        if (tail) {
            if (j == 0) { r.tile = base + end / steps, r.to = tail, r.kind = 1; return r; }
            --j;
        }
        const int whole = (begin + steps - 1) / steps, count = end / steps - whole;
        if (j < count) { r.tile = base + whole + j; return r; }
        r.kind = -1;
        if (head && j == count) r.tile = base + begin / steps, r.from = head, r.kind = 2;
        return r;
    }
    __device__ __forceinline__ void place(int tile, int& pair, int& piece) const {
        const int pieces = (columns + BN - 1) / BN, per = GROUP * pieces, t = tile + (GROUP - FIRST) * pieces, g = t / per, first = max(g * GROUP - (GROUP - FIRST), 0);
        const int rows = min(pairs, (g + 1) * GROUP - (GROUP - FIRST)) - first, r = tile - first * pieces;
        piece = r / rows, pair = first + r - piece * rows;
        if (SNAKE && (g & 1)) piece = pieces - 1 - piece;
    }
};

__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    product_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Plan plan, const uint4* x, const uint4* gain, uint4* normed, const uint16_t* bias,
                   const uint16_t* query_gain, const uint16_t* key_gain, float4* partial, int* control, int tokens, int pieces16, int query_heads, int key_heads) {
    extern __shared__ uint8_t raw[];
    const u32 ring = (shared_address(raw) + 1023) & ~1023u, slots = ring + STAGES * STAGE_BYTES, full = slots + 4 * SLOT_BYTES, empty = full + 8 * STAGES, lag_bar = empty + 8 * STAGES;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, group = warp / 4;
    const int c = blockIdx.x / CLUSTER;
    int* flags = control + 1;                        // 8 for each block
    int* ready = flags + 8 * gridDim.x;              // one for each 128 rows
    u32 block;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
    const u32 gains = lag_bar + 8 * STAGES, shifts = gains + 512 + (group & 1) * 512;  // both gains of heads; the tile's bias, for each warpgroup
    if (EPI == 1 && threadIdx.x < 128) store_shared(gains + 4 * threadIdx.x, ((const u32*)(threadIdx.x < 64 ? query_gain : key_gain))[threadIdx.x & 63]);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) bar_init(full + 8 * i, 1), bar_init(empty + 8 * i, 8 * CLUSTER), bar_init(lag_bar + 8 * i, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    const int early = min(tokens, FIRST * CLUSTER * BM);
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        if (warp == 8) {
            if (lane == 0) {
                int stage = 0, held = NORM == 0 ? STAGES : 0;  // of the first tile, the weight's first stages come before x is normed
                u32 parity = 1;
                for (int i = 0;; ++i) {
                    const Item it = plan.item(i, c);
                    if (it.kind < 0) break;
                    int pair, piece;
                    plan.place(it.tile, pair, piece);
                    const int row = (pair * CLUSTER + block) * BM, column = piece * BN + block * (BN / 2);
                    int ahead = 0;
                    if (held) {
                        ahead = min(STAGES, it.to - it.from), held = 0;
                        for (int k = 0; k < ahead; ++k) {
                            bar_expect(full + 8 * k, STAGE_BYTES);
                            load_for_both(ring + k * STAGE_BYTES + A_BYTES + block * (B_BYTES / 2), &maps.b, full + 8 * k, (it.from + k) * BK, column);
                        }
                    }
                    if (NORM == 0) {
                        const int goal = min(BM, tokens - row);
                        if (goal > 0) while (acquire(ready + row / BM) < goal) __nanosleep(64);
                        asm volatile("fence.proxy.async;" ::: "memory");
                    }
                    for (int k = it.from; k < it.to; ++k) {
                        const u32 bar = full + 8 * stage, at = ring + stage * STAGE_BYTES;
                        if (k - it.from >= ahead) {
                            bar_wait(empty + 8 * stage, parity);
                            bar_expect(bar, STAGE_BYTES);
                            load(at, &maps.a, bar, k * BK, row);
                            load_for_both(at + A_BYTES + block * (B_BYTES / 2), &maps.b, bar, k * BK, column);
                        } else
                            load(at, &maps.a, bar, k * BK, row);
                        if (++stage == STAGES) stage = 0, parity ^= 1;
                    }
                }
            }
        } else if (NORM == 0) {
            const int stride = 3 * gridDim.x;
            for (int row = early + (warp - 9) * gridDim.x + blockIdx.x; row < tokens; row += stride) {
                norm_row<4>(x + (int64_t)row * pieces16, gain, normed + (int64_t)row * pieces16, pieces16, lane);
                tell(ready, row, lane);
                if (PACE) __nanosleep(PACE);
            }
        }
    } else {
        if (NORM == 0) {
            for (int row = warp * gridDim.x + blockIdx.x; row < early; row += 8 * gridDim.x) {
                norm_row<16>(x + (int64_t)row * pieces16, gain, normed + (int64_t)row * pieces16, pieces16, lane);
                tell(ready, row, lane);
            }
        }
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        int stage = 0;
        u32 parity = 0;
        uint64_t evict_first;
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(evict_first));
        float acc[128];
        #pragma unroll
        for (int i = 0; i < 128; ++i) acc[i] = 0.0f;
        for (int i = 0;; ++i) {
            const Item it = plan.item(i, c);
            if (it.kind < 0) break;
            int pair, piece;
            plan.place(it.tile, pair, piece);
            int before = 0;
            u32 own_shift = 0;
            if (EPI == 1 && piece * BN + 2 * (threadIdx.x & 127) < plan.columns) own_shift = __ldg((const u32*)(bias + piece * BN) + (threadIdx.x & 127));
            for (int k = it.from; k < it.to; ++k) {
                const uint64_t a = descriptor(ring + stage * STAGE_BYTES + group * (A_BYTES / 2)), b = descriptor(ring + stage * STAGE_BYTES + A_BYTES);
                if (LAG && group == 1 && k + LAG < it.to) {  // stay LAG steps behind
                    const int ahead = stage + LAG;
                    bar_wait(lag_bar + 8 * (ahead >= STAGES ? ahead - STAGES : ahead), ahead >= STAGES ? parity ^ 1 : parity);
                }
                bar_wait(full + 8 * stage, parity);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
                multiply(acc, a, b, k - it.from);
                #pragma unroll
                for (int n = 1; n < 4; ++n) multiply(acc, a + 2 * n, b + 2 * n, 1);
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                if (LAG && threadIdx.x == 0) bar_arrive(lag_bar + 8 * stage);
                if (EPI == 1 && k == it.from) store_shared(shifts + 4 * (threadIdx.x & 127), own_shift);
                if (k > it.from) {
                    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                    if (lane < CLUSTER) bar_arrive_at(empty + 8 * before, lane);
                }
                before = stage;
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            if (lane < CLUSTER) bar_arrive_at(empty + 8 * before, lane);
            #pragma unroll
            for (int n = 0; n < 128; ++n) asm volatile("" : "+f"(acc[n]) :: "memory");

            if (it.kind == 1) {
                float4* to = partial + (int64_t)blockIdx.x * (BM * BN / 4) + threadIdx.x;
                #pragma unroll
                for (int j = 0; j < 32; ++j) __stcg(to + 256 * j, make_float4(acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]));
                __threadfence();
                __syncwarp();
                if (lane == 0) asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(flags + 8 * blockIdx.x + warp) : "memory");
                continue;
            }
            if (it.kind == 2) {
                const int other = blockIdx.x - CLUSTER;
                while (acquire(flags + 8 * other + warp) == 0) __nanosleep(64);
                const float4* from = partial + (int64_t)other * (BM * BN / 4) + threadIdx.x;
                #pragma unroll
                for (int j = 0; j < 32; ++j) {
                    const float4 v = __ldcg(from + 256 * j);
                    acc[4 * j] += v.x, acc[4 * j + 1] += v.y, acc[4 * j + 2] += v.z, acc[4 * j + 3] += v.w;
                }
            }
            if ((threadIdx.x & 127) == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
            asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");  // the slots are free, the bias is there
            if (EPI == 2) {
                float sum = 0.0f;
                #pragma unroll
                for (int j = 0; j < 128; ++j) sum += acc[j];
                if (sum == 1.2345e30f) partial[threadIdx.x].x = sum;
                continue;
            }
            // acc[4 j + i]: row lane / 4 + 8 (i / 2), column 8 j + 2 (lane % 4) + i % 2; 16 j a head
            const int row = (pair * CLUSTER + block) * BM + group * 64;
            const int r16 = (lane & 7) + (lane & 8), at_row = (warp & 3) * 16 + r16;
            #pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int head = piece * 2 + h;
                if (head * WIDTH >= plan.columns) break;
                const int type = head < query_heads ? 0 : head < query_heads + key_heads ? 1 : 2;
                const u32* shift = (const u32*)(bias + head * WIDTH) + (lane & 3);
                float s0 = 0.0f, s1 = 0.0f;
                #pragma unroll
                for (int j = 0; j < 16; ++j) {
                    const u32 v = EPI == 1 ? load_shared(shifts + 256 * h + 16 * j + 4 * (lane & 3)) : __ldg(shift + 4 * j);
                    float* d = acc + 64 * h + 4 * j;
                    d[0] += low(v), d[1] += high(v), d[2] += low(v), d[3] += high(v);
                    s0 = fmaf(d[0], d[0], fmaf(d[1], d[1], s0)), s1 = fmaf(d[2], d[2], fmaf(d[3], d[3], s1));
                }
                if (type != 2) {
                    s0 += __shfl_xor_sync(~0u, s0, 1), s1 += __shfl_xor_sync(~0u, s1, 1);
                    s0 += __shfl_xor_sync(~0u, s0, 2), s1 += __shfl_xor_sync(~0u, s1, 2);
                    s0 = rsqrtf(s0 * (1.0f / WIDTH) + EPS), s1 = rsqrtf(s1 * (1.0f / WIDTH) + EPS);
                    const u32* w = (const u32*)(type == 0 ? query_gain : key_gain) + (lane & 3);
                    #pragma unroll
                    for (int j = 0; j < 16; ++j) {
                        const u32 v = EPI == 1 ? load_shared(gains + 256 * type + 16 * j + 4 * (lane & 3)) : __ldg(w + 4 * j);
                        float* d = acc + 64 * h + 4 * j;
                        d[0] *= s0 * low(v), d[1] *= s0 * high(v), d[2] *= s1 * low(v), d[3] *= s1 * high(v);
                    }
                }
                const CUtensorMap* map = &maps.out[type];
                const int column = (type == 0 ? head : type == 1 ? head - query_heads : head - query_heads - key_heads) * WIDTH;
                if (h) {
                    if ((threadIdx.x & 127) == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
                    asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
                }
                #pragma unroll
                for (int p = 0; p < 8; ++p) {
                    float* d = acc + 64 * h + 8 * p;
                    const u32 to = slots + (group * 2 + p / 4) * SLOT_BYTES + at_row * 128 + (((2 * (p & 3) + (lane >> 4)) ^ (lane & 7)) << 4);
                    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(pack(d[0], d[1])), "r"(pack(d[2], d[3])),
                                 "r"(pack(d[4], d[5])), "r"(pack(d[6], d[7])) : "memory");
                }
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
                if ((threadIdx.x & 127) == 0) {
                    #pragma unroll
                    for (int q = 0; q < 2; ++q) {
                        const u32 slot = slots + (group * 2 + q) * SLOT_BYTES;
#if HINT
                        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%2, %3}], [%1], %4;" ::"l"(map), "r"(slot), "r"(column + 64 * q), "r"(row), "l"(evict_first) : "memory");
#else
                        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(slot), "r"(column + 64 * q), "r"(row) : "memory");
#endif
                    }
                    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
                }
            }
        }
        if ((threadIdx.x & 127) == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");  // no block ends while another still arrives at its barriers
    // the last block leaves the counters as it found them
    if (warp == 0) {
        int last = 0;
        if (lane == 0) {
            __threadfence();
            last = atomicAdd(control, 1) == (int)gridDim.x - 1;
        }
        if (__shfl_sync(~0u, last, 0)) {
            const int count = 1 + 8 * gridDim.x + (tokens + BM - 1) / BM;
            for (int i = lane; i < count; i += 32) control[i] = 0;
        }
    }
}

__global__ void __launch_bounds__(256) norm_kernel(const uint4* x, const uint4* gain, uint4* normed, int tokens, int pieces16) {
    const int row = blockIdx.x * 8 + threadIdx.x / 32;
    if (row < tokens) norm_row<16>(x + (int64_t)row * pieces16, gain, normed + (int64_t)row * pieces16, pieces16, threadIdx.x % 32);
}

static int describe(CUtensorMap* map, const void* data, long long rows, long long width, int box_rows) {
    static decltype(&cuTensorMapEncodeTiled) encode = nullptr;
    if (!encode) {
        void* f = nullptr;
        cudaDriverEntryPointQueryResult found;
        cudaError_t e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found);
        if (e || !f) return 10001;
        encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(f);
    }
    cuuint64_t sizes[2] = {(cuuint64_t)width, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)width * 2};
    cuuint32_t box[2] = {64, (cuuint32_t)box_rows}, step[2] = {1, 1};
    CUresult r = encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void*)data, sizes, strides, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return r == CUDA_SUCCESS ? 0 : 20000 + (int)r;
}

static int clusters_of() {
    static int clusters = 0;
    if (clusters) return clusters;
    if (cudaFuncSetAttribute(product_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES)) return -1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(CLUSTER), config.blockDim = dim3(THREADS), config.dynamicSmemBytes = SHARED_BYTES;
    cudaLaunchAttribute shape[1];
    shape[0].id = cudaLaunchAttributeClusterDimension;
    shape[0].val.clusterDim.x = CLUSTER, shape[0].val.clusterDim.y = 1, shape[0].val.clusterDim.z = 1;
    config.attrs = shape, config.numAttrs = 1;
    int n = 0;
    if (cudaOccupancyMaxActiveClusters(&n, product_kernel, &config) || n < 1) return -1;
    return clusters = n;
}

// without arguments: the clusters that run at once. Else: 0 x, 1 gain, 2 normed, 3 weight, 4 bias, 5 query gain, 6 key gain, 7 queries, 8 keys, 9 values,
// 10 partial sums, 11 control, 12 tokens, 13 hidden, 14 query heads, 15 key heads, 16 stream
static PyObject* run(PyObject*, PyObject* const* given, Py_ssize_t count) {
    const int clusters = clusters_of();
    if (count == 0) return PyLong_FromLong(clusters);
    if (count != 17) { PyErr_SetString(PyExc_TypeError, "17 arguments"); return nullptr; }
    long long a[17];
    for (int i = 0; i < 17; ++i) a[i] = PyLong_AsLongLong(given[i]);
    const long long tokens = a[12], hidden = a[13], qh = a[14], kh = a[15], columns = (qh + 2 * kh) * WIDTH;
    const cudaStream_t stream = (cudaStream_t)a[16];
    Maps maps;
    if (int e = describe(&maps.a, (void*)a[NORM == 2 ? 0 : 2], tokens, hidden, BM)) return PyLong_FromLong(e);
    if (int e = describe(&maps.b, (void*)a[3], columns, hidden, BN / 2)) return PyLong_FromLong(e);
    for (int i = 0; i < 3; ++i)
        if (int e = describe(&maps.out[i], (void*)a[7 + i], tokens, (i ? kh : qh) * WIDTH, 64)) return PyLong_FromLong(e);
    Plan plan = {};
    plan.pairs = (int)((tokens + 2 * BM - 1) / (2 * BM)), plan.columns = (int)columns, plan.steps = (int)((hidden + BK - 1) / BK);
    plan.clusters = clusters, plan.tiles = plan.pairs * (int)((columns + BN - 1) / BN);
    plan.waves = plan.tiles / clusters;
    if (STREAM && plan.waves >= 1 && plan.tiles % clusters) --plan.waves, plan.shared = plan.tiles - plan.waves * clusters;
    if (NORM == 1) norm_kernel<<<(u32)((tokens + 7) / 8), 256, 0, stream>>>((const uint4*)a[0], (const uint4*)a[1], (uint4*)a[2], (int)tokens, (int)(hidden / 8));
    product_kernel<<<clusters * CLUSTER, THREADS, SHARED_BYTES, stream>>>(maps, plan, (const uint4*)a[0], (const uint4*)a[1], (uint4*)a[2], (const uint16_t*)a[4],
        (const uint16_t*)a[5], (const uint16_t*)a[6], (float4*)a[10], (int*)a[11], (int)tokens, (int)(hidden / 8), (int)qh, (int)kh);
    return PyLong_FromLong(cudaGetLastError());
}
static PyMethodDef methods[] = {{"run", (PyCFunction)(void*)run, METH_FASTCALL, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "norm_projection", "", -1, methods};
#define INIT(name) PyInit_##name
#define INIT_OF(name) INIT(name)
PyMODINIT_FUNC INIT_OF(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
"""


@functools.cache
def built():
    constants = "".join(f"#define {name} {value}\n" for name, value in (("FIRST", FIRST), ("SNAKE", SNAKE), ("HINT", HINT), ("LAG", LAG), ("EPI", EPI), ("STAGES", STAGES), ("GROUP", GROUP), ("STREAM", STREAM), ("NORM", NORM), ("PACE", PACE)))
    source = constants + CUDA.replace("@WGMMA@", wgmma())
    flags = ["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a"]
    return load_inline("norm_projection", "", source, no_implicit_headers=True, extra_cuda_cflags=flags).run


@functools.cache
def clusters(device):
    if torch.cuda.get_device_properties(device).major != 9:
        raise ValueError("needs compute capability 9.0")
    count = built()()
    if count < 1:
        raise RuntimeError("the kernel does not fit on this GPU")
    return count


scratch = {}  # by device, stream and size: counters that every launch leaves at zero, and room for partial sums


def space(device, stream, tokens, count):
    key = (device, stream, (tokens + 127) // 128)
    if key not in scratch:
        scratch[key] = (
            torch.zeros(1 + 16 * count + key[2], dtype=torch.int32, device=device),
            torch.empty(count * 2 * 128 * 256, dtype=torch.float32, device=device),
        )
    return scratch[key]


def aligned(t):
    t = t.contiguous()
    return t.clone() if t.data_ptr() % 16 else t


class ModelNew(nn.Module):
    def __init__(self, hidden=4096, query_heads=32, key_heads=8, width=128):
        super().__init__()
        self.query_heads, self.key_heads, self.width = query_heads, key_heads, width
        self.norm = nn.Parameter((1 + 0.1 * torch.randn(hidden)).bfloat16())
        self.projection = nn.Parameter((torch.randn((query_heads + 2 * key_heads) * width, hidden) / hidden**0.5).bfloat16())
        self.bias = nn.Parameter((0.1 * torch.randn((query_heads + 2 * key_heads) * width)).bfloat16())
        self.query_norm = nn.Parameter((1 + 0.1 * torch.randn(width)).bfloat16())
        self.key_norm = nn.Parameter((1 + 0.1 * torch.randn(width)).bfloat16())

    def forward(self, x):
        if x.dim() != 2 or x.shape[1] != self.norm.shape[0] or x.shape[1] % 8 or not x.numel() or self.width != 128 or x.shape[0] >= 2**24 or x.shape[1] >= 2**20:
            raise ValueError("x is tokens x hidden, hidden a multiple of 8, heads of 128")
        if min(self.query_heads, self.key_heads) < 1 or self.query_heads + 2 * self.key_heads >= 2**16:
            raise ValueError("too few or too many heads")
        if any(t.dtype != torch.bfloat16 or t.device != x.device for t in (x, self.norm, self.projection, self.bias, self.query_norm, self.key_norm)):
            raise ValueError("bf16 on one device only")
        x, gain, weight, bias, query_gain, key_gain = (aligned(t.detach()) for t in (x, self.norm, self.projection, self.bias, self.query_norm, self.key_norm))
        tokens, hidden = x.shape
        queries = torch.empty(tokens, self.query_heads, 128, dtype=x.dtype, device=x.device)
        keys = torch.empty(tokens, self.key_heads, 128, dtype=x.dtype, device=x.device)
        values = torch.empty_like(keys)
        normed = torch.empty_like(x)
        count, stream = clusters(x.device), torch.cuda.current_stream(x.device).cuda_stream
        control, partial = space(x.device, stream, tokens, count)
        tensors = (x, gain, normed, weight, bias, query_gain, key_gain, queries, keys, values, partial, control)
        error = built()(*(t.data_ptr() for t in tensors), tokens, hidden, self.query_heads, self.key_heads, stream)
        if error:
            raise RuntimeError(f"norm_projection: CUDA error {error}")
        return queries, keys, values
