"""Gated triangle product. 1: a and b become [c, i, k] (8 x 8 transposes in registers). 2: a persistent batched product (TMA, wgmma,
clusters of two with multicast) into p [c, i, j], in blocks of i and j. 3: p is gated into channels-last y, on whole lines. With FUSE three free
warps of the producer's warpgroup gate groups of 32 channels as soon as they are complete, under the following products: slower.
evals/trials/triangle_product states it.
"""

import functools

import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

WIDE = 1  # 1: the first kernel loads whole lines, too
LINES = 1  # 1: the last kernel loads gates and stores whole lines
FULL = 1  # 1: the first kernel stores whole lines of 128 bytes
PDL = 0  # 1: a kernel starts while the one before ends
FUSE = 0
CO = 0  # 1: the gating kernel runs beside the product
PARTS = 1  # parts of rows of a group of 32 channels
LA = 1  # layout of the transposed operands: 0 [c, i, k], 1 [i, c, k], 2 [i, k / 64, c, k % 64]
LP = 2  # of the product
LAG = 0
KU = 4  # 32 x 32 transposes of a warp of the first kernel
SLEEP = 200
HINTS = 2  # 1: no streaming hint on loads, 2: on stores of the first kernel, 3: none on stores either
PROBE = ""


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
typedef long long i64;
constexpr int C = 128, GROUP = 32, BM = 128, BN = 256, BK = 64, CLUSTER = 2, THREADS = CO ? 288 : 384, STAGES = 4;
constexpr u32 A_BYTES = BM * BK * 2, B_BYTES = BN * BK * 2, STAGE_BYTES = A_BYTES + B_BYTES, SLOT_BYTES = 64 * 64 * 2;
constexpr u32 SHARED_BYTES = STAGES * STAGE_BYTES + 4 * SLOT_BYTES + 24 * STAGES + 16;
static_assert(SHARED_BYTES <= 232448, "shared memory");

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
__device__ __forceinline__ void load(u32 to, const CUtensorMap* map, u32 bar, int k, int row, int c) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%6, %4, %3, %5}], [%2];"
                 ::"r"(to), "l"(map), "r"(bar), "r"(k), "r"(row), "r"(c), "r"(0) : "memory");
}
__device__ __forceinline__ void load_for_both(u32 to, const CUtensorMap* map, u32 bar, int k, int row, int c) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%7, %4, %3, %5}], [%2], %6;"
                 ::"r"(to), "l"(map), "r"(bar), "r"(k), "r"(row), "r"(c), "h"((uint16_t)3), "r"(0) : "memory");
}
__device__ __forceinline__ void store(const CUtensorMap* map, u32 from, int column, int row, int c) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%5, %3, %2, %4}], [%1];" ::"l"(map), "r"(from), "r"(column), "r"(row), "r"(c), "r"(0) : "memory");
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
__device__ __forceinline__ float sigmoid(float x) {
    float e, r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * -1.4426950408889634f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + e));
    return r;
}
__device__ __forceinline__ u32 gated(u32 p, u32 g) {
    return packed(__uint_as_float(p << 16) * sigmoid(__uint_as_float(g << 16)), __uint_as_float(p & 0xffff0000u) * sigmoid(__uint_as_float(g & 0xffff0000u)));
}
__device__ __forceinline__ u32 turned(u32 v) {
    u32 r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
    return r;
}
// 32 x 32, from 16 bytes along one side to 16 bytes along the other one.
// In: v[s] of lane t is row 8 (r / 2) + 2 s + r % 2, r = t / 4, columns 8 (t % 4) to + 7.
// Out: w[q] of lane t is column 8 (t / 8) + 2 q + t / 4 % 2, rows 8 (t % 4) to + 7.
__device__ __forceinline__ int row_of(int lane, int s) { return 8 * (lane / 8) + 2 * s + lane / 4 % 2; }
__device__ __forceinline__ uint4 column(const uint4 (&v)[4], int q) {
    auto part = [&](const uint4& x) { return q == 0 ? x.x : q == 1 ? x.y : q == 2 ? x.z : x.w; };
    return make_uint4(turned(part(v[0])), turned(part(v[1])), turned(part(v[2])), turned(part(v[3])));
}
template <int L> __device__ __forceinline__ i64 place_of(int c, int i, int k, int n) {
    return L == 2 ? (((i64)i * (n / 64) + k / 64) * C + c) * 64 + k % 64 : (L == 1 ? ((i64)i * C + c) * n : ((i64)c * n + i) * n) + k;
}
__device__ __forceinline__ uint4 get(const uint4* p) { return HINTS == 1 || HINTS == 3 ? *p : __ldcs(p); }

// a block: a row i, 32 KU of k, all channels; warp w has channels 32 w to + 31
__global__ void __launch_bounds__(128) turn_kernel(const uint16_t* __restrict__ a, const uint16_t* __restrict__ b, uint16_t* at, uint16_t* bt, u32* counters, int n) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, i = blockIdx.y, k0 = blockIdx.x * 32 * KU;
    const uint16_t* from = blockIdx.z ? b : a;
    uint16_t* to = blockIdx.z ? bt : at;
    if (PDL) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    if ((CO || FUSE) && blockIdx.x + blockIdx.y + blockIdx.z == 0) counters[threadIdx.x] = 0;
    from += ((i64)i * n + k0) * C + warp * 32 + 8 * (lane % 4);
    uint4 v[KU][4];
    #pragma unroll
    for (int u = 0; u < KU; ++u)
        #pragma unroll
        for (int s = 0; s < 4; ++s) v[u][s] = get((const uint4*)(from + (u * 32 + row_of(lane, s)) * C));
    #pragma unroll
    for (int q = 0; q < 4; ++q) {
        #pragma unroll
        for (int u = 0; u < KU; ++u) {
            auto put = [&](int row, int k, uint4 w) {
                uint4* at = (uint4*)(to + place_of<LA>(warp * 32 + row, i, k0 + k, n));
                if (HINTS == 2) __stcs(at, w); else *at = w;
            };
            if (!FULL) put(row_of(lane, q), u * 32 + 8 * (lane % 4), column(v[u], q));
            else if (u % 2 == 0) {  // lanes t and t ^ 4 have rows r and r + 1: swap halves
                const uint4 low = column(v[u], q), high = column(v[u + 1], q);
                const bool odd = lane & 4;
                uint4 mine = odd ? high : low, other = odd ? low : high;
                other.x = __shfl_xor_sync(~0u, other.x, 4), other.y = __shfl_xor_sync(~0u, other.y, 4);
                other.z = __shfl_xor_sync(~0u, other.z, 4), other.w = __shfl_xor_sync(~0u, other.w, 4);
                const int row = row_of(lane, q) & ~1, k = u * 32 + 8 * (lane % 8);
                put(row, k, odd ? other : mine);
                put(row + 1, k, odd ? mine : other);
            }
        }
    }
}

// lanes t and t ^ 4 have rows r and r + 1 of two halves of a line; after it x is of row r, y of row r + 1, at chunk lane % 8; and back
__device__ __forceinline__ void swap_halves(uint4& x, uint4& y, bool send_x) {
    uint4 z = send_x ? x : y;
    z.x = __shfl_xor_sync(~0u, z.x, 4), z.y = __shfl_xor_sync(~0u, z.y, 4), z.z = __shfl_xor_sync(~0u, z.z, 4), z.w = __shfl_xor_sync(~0u, z.w, 4);
    if (send_x) x = z; else y = z;
}
// a warp: a row i, 64 of k, 64 channels; whole lines in and out
__global__ void __launch_bounds__(128) turn_wide_kernel(const uint16_t* __restrict__ a, const uint16_t* __restrict__ b, uint16_t* at, uint16_t* bt, int n) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, i = blockIdx.y, k0 = blockIdx.x * 128 + warp / 2 * 64, c0 = warp % 2 * 64;
    const bool odd = lane & 4;
    const uint16_t* from = (blockIdx.z ? b : a) + ((i64)i * n + k0) * C + c0 + 8 * (lane % 8);
    uint16_t* to = blockIdx.z ? bt : at;
    uint4 v[2][2][4];  // half of the channels, of k
    #pragma unroll
    for (int u = 0; u < 2; ++u)
        #pragma unroll
        for (int s = 0; s < 4; ++s) {
            const uint16_t* row = from + (u * 32 + (row_of(lane, s) & ~1)) * C;
            v[0][u][s] = get((const uint4*)row), v[1][u][s] = get((const uint4*)(row + C));
        }
    #pragma unroll
    for (int u = 0; u < 2; ++u)
        #pragma unroll
        for (int s = 0; s < 4; ++s) swap_halves(v[0][u][s], v[1][u][s], odd);
    #pragma unroll
    for (int h = 0; h < 2; ++h)
        #pragma unroll
        for (int q = 0; q < 4; ++q) {
            uint4 x = column(v[h][0], q), y = column(v[h][1], q);
            swap_halves(x, y, odd);
            uint16_t* row = to + place_of<LA>(c0 + h * 32 + (row_of(lane, q) & ~1), i, k0 + 8 * (lane % 8), n);
            uint4* next = (uint4*)(row + (LA == 2 ? 64 : LA == 1 ? (i64)n : (i64)n * n));
            if (HINTS == 2) __stcs((uint4*)row, x), __stcs(next, y); else *(uint4*)row = x, *next = y;
        }
}

struct Piece { uint4 p[4], g[4]; };
// unit: 32 channels from c, row i, 32 j from j
__device__ __forceinline__ void bring_p(Piece& x, const uint16_t* p, int c, int i, int j, int n, int lane) {
    #pragma unroll
    for (int s = 0; s < 4; ++s) x.p[s] = __ldcg((const uint4*)(p + place_of<LP>(c + row_of(lane, s), i, j + 8 * (lane % 4), n)));
}
__device__ __forceinline__ void bring_gate(Piece& x, const uint16_t* gate, int c, int i, int j, int n, int lane) {
    #pragma unroll
    for (int q = 0; q < 4; ++q) x.g[q] = get((const uint4*)(gate + ((i64)i * n + j + row_of(lane, q)) * C + c + 8 * (lane % 4)));
}
__device__ __forceinline__ void bring(Piece& x, const uint16_t* p, const uint16_t* gate, int c, int i, int j, int n, int lane) {
    bring_p(x, p, c, i, j, n, lane);
    bring_gate(x, gate, c, i, j, n, lane);
}
__device__ __forceinline__ void finish(const Piece& x, uint16_t* y, int c, int i, int j, int n, int lane) {
    #pragma unroll
    for (int q = 0; q < 4; ++q) {
        uint4 w = column(x.p, q);
        w.x = gated(w.x, x.g[q].x), w.y = gated(w.y, x.g[q].y), w.z = gated(w.z, x.g[q].z), w.w = gated(w.w, x.g[q].w);
        uint4* at = (uint4*)(y + ((i64)i * n + j + row_of(lane, q)) * C + c + 8 * (lane % 4));
        if (HINTS == 3) *at = w; else __stcs(at, w);
    }
}
__global__ void __launch_bounds__(128) gate_kernel(const uint16_t* p, const uint16_t* __restrict__ gate, uint16_t* y, int n) {
    const int lane = threadIdx.x % 32, c = threadIdx.x / 32 * 32, i = blockIdx.y, j = blockIdx.x * 64;
    Piece x[2];
    bring_gate(x[0], gate, c, i, j, n, lane);
    bring_gate(x[1], gate, c, i, j + 32, n, lane);
    if (PDL) asm volatile("griddepcontrol.wait;" ::: "memory");
    bring_p(x[0], p, c, i, j, n, lane);
    bring_p(x[1], p, c, i, j + 32, n, lane);
    finish(x[0], y, c, i, j, n, lane);
    finish(x[1], y, c, i, j + 32, n, lane);
}

// a warp: 64 channels, row i, 32 j
__global__ void __launch_bounds__(128) gate_lines_kernel(const uint16_t* p, const uint16_t* __restrict__ gate, uint16_t* y, int n) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = warp % 2 * 64, i = blockIdx.y, j = blockIdx.x * 64 + warp / 2 * 32;
    const bool odd = lane & 4;
    const i64 start = ((i64)i * n + j) * C + c + 8 * (lane % 8);
    Piece x[2];
    uint4 g[4][2];
    bring_p(x[0], p, c, i, j, n, lane);
    bring_p(x[1], p, c + 32, i, j, n, lane);
    #pragma unroll
    for (int q = 0; q < 4; ++q)
        #pragma unroll
        for (int r = 0; r < 2; ++r) g[q][r] = get((const uint4*)(gate + start + ((row_of(lane, q) & ~1) + r) * C));
    #pragma unroll
    for (int q = 0; q < 4; ++q) {
        uint4 w[2] = {column(x[0].p, q), column(x[1].p, q)};
        swap_halves(w[0], w[1], odd);
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
            w[r].x = gated(w[r].x, g[q][r].x), w[r].y = gated(w[r].y, g[q][r].y), w[r].z = gated(w[r].z, g[q][r].z), w[r].w = gated(w[r].w, g[q][r].w);
            __stcs((uint4*)(y + start + ((row_of(lane, q) & ~1) + r) * C), w[r]);
        }
    }
}

__global__ void __launch_bounds__(128, 8) beside_kernel(const uint16_t* p, const uint16_t* gate, uint16_t* y, const u32* counters, u32 wanted, int part_rows, int n) {
    const int lane = threadIdx.x % 32, chunk = blockIdx.x / part_rows, i = chunk % PARTS * part_rows + blockIdx.x % part_rows, c = chunk / PARTS * GROUP;
    if (threadIdx.x == 0) {
        u32 now;
        while (true) {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counters + chunk) : "memory");
            if (now >= wanted) break;
            __nanosleep(SLEEP);
        }
    }
    __syncthreads();
    #pragma unroll 1
    for (int j = threadIdx.x / 32 * 32; j < n; j += 128) {
        Piece x;
        bring(x, p, gate, c, i, j, n, lane);
        finish(x, y, c, i, j, n, lane);
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

struct Problem { int n, pairs, pieces, part_pairs, per_chunk, tiles; };
__device__ __forceinline__ void place(const Problem& s, int tile, int& chunk, int& c, int& pair, int& piece) {
    chunk = tile / s.per_chunk;
    const int within = tile % s.per_chunk, per_channel = s.part_pairs * s.pieces, rest = within % per_channel;
    c = chunk / PARTS * GROUP + within / per_channel;
    pair = chunk % PARTS * s.part_pairs + rest / s.pieces, piece = rest % s.pieces;
}

__global__ void __launch_bounds__(THREADS, 1)
    product_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map, const __grid_constant__ CUtensorMap p_map,
                   const uint16_t* p, const uint16_t* gate, uint16_t* y, u32* counters, Problem s) {
    extern __shared__ __align__(1024) uint8_t raw[];
    const u32 ring = shared_address(raw), slots = ring + STAGES * STAGE_BYTES, full = slots + 4 * SLOT_BYTES, empty = full + 8 * STAGES, lag_bar = empty + 8 * STAGES;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, group = warp / 4;
    u32 block;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
    if (CO || PDL) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    if (threadIdx.x == 0 && ring % 1024) __trap();
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) bar_init(full + 8 * i, 1), bar_init(empty + 8 * i, 2 * CLUSTER), bar_init(lag_bar + 8 * i, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    const int clusters = gridDim.x / CLUSTER, own = blockIdx.x / CLUSTER, tiles = s.tiles, steps = s.n / BK;
    if (group == 2) {
        if (warp == 8) {
            if (lane == 0) {
                if (PDL) {
                    asm volatile("griddepcontrol.wait;" ::: "memory");
                    asm volatile("fence.proxy.async;" ::: "memory");
                }
                int stage = 0;
                u32 parity = 1;
                for (int tile = own; tile < tiles; tile += clusters) {
                    int chunk, c, pair, piece;
                    place(s, tile, chunk, c, pair, piece);
                    const int row = (pair * CLUSTER + block) * BM, column = piece * BN + block * (BN / 2);
                    for (int k = 0; k < steps; ++k) {
                        const u32 bar = full + 8 * stage, at = ring + stage * STAGE_BYTES;
                        bar_wait(empty + 8 * stage, parity);
                        bar_expect(bar, STAGE_BYTES);
                        load(at, &a_map, bar, k, row, c);
                        load_for_both(at + A_BYTES + block * (B_BYTES / 2), &b_map, bar, k, column, c);
                        if (++stage == STAGES) stage = 0, parity ^= 1;
                    }
                }
            }
        } else if (FUSE && !NO_GATE) {
            const int chunks = tiles / s.per_chunk, per_row = s.n / 32, units = s.part_pairs * CLUSTER * BM * per_row, workers = gridDim.x * 3;
            const u32 wanted = s.per_chunk * CLUSTER * 2;
            for (int chunk = 0; chunk < chunks; ++chunk) {
                u32 now;
                while (true) {
                    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counters + chunk) : "memory");
                    if (now >= wanted) break;
                    __nanosleep(SLEEP);
                }
                __syncwarp();
                const int c = chunk / PARTS * GROUP, i0 = chunk % PARTS * s.part_pairs * CLUSTER * BM;
                int u = blockIdx.x * 3 + warp - 9;
                Piece x[3];
                #pragma unroll
                for (int d = 0; d < 2; ++d) {
                    const int v = u + d * workers;
                    if (v < units) bring(x[d], p, gate, c, i0 + v / per_row, v % per_row * 32, s.n, lane);
                }
                for (; u < units; u += 3 * workers) {
                    #pragma unroll
                    for (int d = 0; d < 3; ++d) {
                        const int ahead = u + (d + 2) * workers, v = u + d * workers;
                        if (ahead < units) bring(x[(d + 2) % 3], p, gate, c, i0 + ahead / per_row, ahead % per_row * 32, s.n, lane);
                        if (v < units) finish(x[d], y, c, i0 + v / per_row, v % per_row * 32, s.n, lane);
                    }
                }
            }
        }
    } else {
        int stage = 0;
        u32 parity = 0;
        float acc[128];
        const u32 slot = slots + group * 2 * SLOT_BYTES;
        const int thread = threadIdx.x % 128;
        const int at_row = warp % 4 * 16 + lane % 8 + lane / 8 % 2 * 8;  // the row whose address this lane gives to stmatrix
        int last = -1;
        auto release = [&]() {  // thread 0: the tile before lies in memory
            asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
            if ((FUSE || CO) && last >= 0) {
                asm volatile("fence.proxy.async;" ::: "memory");
                __threadfence();
                asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counters + last) : "memory");
            }
        };
        for (int tile = own; tile < tiles; tile += clusters) {
            int before = 0;
            for (int k = 0; k < steps; ++k) {
                const uint64_t a = descriptor(ring + stage * STAGE_BYTES + group * (A_BYTES / 2)), b = descriptor(ring + stage * STAGE_BYTES + A_BYTES);
                if (LAG && group == 1 && k + LAG < steps) {  // stay LAG steps behind
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
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            if (thread < CLUSTER) bar_arrive_at(empty + 8 * before, thread);
            #pragma unroll
            for (int i = 0; i < 128; ++i) asm volatile("" : "+f"(acc[i]) :: "memory");
            int chunk, c, pair, piece;
            place(s, tile, chunk, c, pair, piece);
            const int row = (pair * CLUSTER + block) * BM + group * 64, column = piece * BN;
            if (thread == 0) release();
            last = chunk;
            asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
            #pragma unroll
            for (int part = 0; part < 4; ++part) {
                const u32 to = slot + part % 2 * SLOT_BYTES;
                if (part >= 2) {
                    if (thread == 0) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
                    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
                }
                #pragma unroll
                for (int j = 0; j < 4; ++j) {
                    u32 out[4];
                    #pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int at = part * 32 + 8 * j + 2 * i;
                        out[i] = packed(acc[at], acc[at + 1]);
                    }
                    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                                 ::"r"(to + at_row * 128 + ((j * 2 + lane / 16) ^ (at_row % 8)) * 16), "r"(out[0]), "r"(out[1]), "r"(out[2]), "r"(out[3]) : "memory");
                }
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
                if (thread == 0) store(&p_map, to, column / 64 + part, row, c);
            }
        }
        if (thread == 0) release();
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

#define MUST(call) do { int error = int(call); if (error) return error; } while (0)

static int map_of(CUtensorMap& map, const void* data, i64 n, int box_rows, int layout) {
    static void* encode = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (!encode) MUST(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &result));
    cuuint64_t sizes[4] = {64, (cuuint64_t)n, (cuuint64_t)n / 64, C}, row = 2 * n, plane = 2 * n * n;
    cuuint64_t strides[3] = {layout ? row * C : row, layout == 2 ? 128 * C : 128, layout == 2 ? 128 : layout ? row : plane};
    cuuint32_t box[4] = {64, (cuuint32_t)box_rows, 1, 1}, one[4] = {1, 1, 1, 1};
    CUresult error = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, (void*)data, sizes, strides, box, one,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return error == CUDA_SUCCESS ? 0 : 10000 + int(error);
}

// a, b, gate, y, at, bt, p, counters, n, stream
static int product(const i64* a) {
    const int n = int(a[8]);
    cudaStream_t stream = (cudaStream_t)a[9];
    CUtensorMap a_map, b_map, p_map;
    MUST(map_of(a_map, (void*)a[4], n, BM, LA));
    MUST(map_of(b_map, (void*)a[5], n, BN / 2, LA));
    MUST(map_of(p_map, (void*)a[6], n, 64, LP));
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = CLUSTER, attributes[0].val.clusterDim.y = 1, attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeCooperative;
    attributes[1].val.cooperative = 1;
    cudaLaunchConfig_t config = {};
    config.blockDim = dim3(THREADS), config.dynamicSmemBytes = SHARED_BYTES, config.stream = stream;
    config.attrs = attributes, config.numAttrs = 1;
    static int fits[64];
    int device, multiprocessors;
    MUST(cudaGetDevice(&device));
    if (device > 63) return 10001;
    if (!fits[device]) {
        MUST(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
        MUST(cudaFuncSetAttribute(product_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
        config.gridDim = dim3(multiprocessors / CLUSTER * CLUSTER);
        int most = 0;
        MUST(cudaOccupancyMaxActiveClusters(&most, product_kernel, &config));
        fits[device] = most < multiprocessors / CLUSTER ? most : multiprocessors / CLUSTER;
        if (fits[device] < 1) return 10002;
    }
    config.gridDim = dim3(fits[device] * CLUSTER), config.numAttrs = FUSE || PDL ? 2 : 1;
    cudaLaunchAttribute early[1];
    early[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early[0].val.programmaticStreamSerializationAllowed = 1;
    if (PDL) attributes[1] = early[0];
    Problem s = {n, n / (BM * CLUSTER), n / BN, n / (BM * CLUSTER) / PARTS, 0, 0};
    s.per_chunk = GROUP * s.part_pairs * s.pieces, s.tiles = s.per_chunk * PARTS * (C / GROUP);
    if (!NO_TURN) {
        if (WIDE) turn_wide_kernel<<<dim3(n / 128, n, 2), 128, 0, stream>>>((const uint16_t*)a[0], (const uint16_t*)a[1], (uint16_t*)a[4], (uint16_t*)a[5], n);
        else turn_kernel<<<dim3(n / (32 * KU), n, 2), 128, 0, stream>>>((const uint16_t*)a[0], (const uint16_t*)a[1], (uint16_t*)a[4], (uint16_t*)a[5], (u32*)a[7], n);
        MUST(cudaGetLastError());
    }
    if (!NO_PRODUCT)
        MUST(cudaLaunchKernelEx(&config, product_kernel, a_map, b_map, p_map, (const uint16_t*)a[6], (const uint16_t*)a[2], (uint16_t*)a[3], (u32*)a[7], s));
    if (CO && !NO_GATE) {
        static bool set[64];
        if (!set[device]) MUST(cudaFuncSetAttribute(beside_kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100));
        set[device] = true;
        cudaLaunchConfig_t beside = {};
        const int part_rows = s.part_pairs * CLUSTER * BM;
        beside.gridDim = dim3(part_rows * PARTS * (C / GROUP)), beside.blockDim = dim3(128), beside.stream = stream, beside.attrs = early, beside.numAttrs = 1;
        MUST(cudaLaunchKernelEx(&beside, beside_kernel, (const uint16_t*)a[6], (const uint16_t*)a[2], (uint16_t*)a[3], (const u32*)a[7], (u32)(s.per_chunk * CLUSTER * 2), part_rows, n));
    } else if (!FUSE && !NO_GATE) {
        cudaLaunchConfig_t last = {};
        last.gridDim = dim3(n / 64, n), last.blockDim = dim3(128), last.stream = stream, last.attrs = early, last.numAttrs = PDL ? 1 : 0;
        MUST(cudaLaunchKernelEx(&last, LINES ? gate_lines_kernel : gate_kernel, (const uint16_t*)a[6], (const uint16_t*)a[2], (uint16_t*)a[3], n));
    }
    return cudaGetLastError();
}

static PyObject* run(PyObject*, PyObject* const* given, Py_ssize_t count) {
    if (count != 10) { PyErr_SetString(PyExc_TypeError, "10 arguments"); return nullptr; }
    i64 a[10];
    for (int i = 0; i < 10; ++i) a[i] = PyLong_AsLongLong(given[i]);
    return PyLong_FromLong(product(a));
}
static PyMethodDef methods[] = {{"run", (PyCFunction)(void*)run, METH_FASTCALL, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "triangle", "", -1, methods};
#define INIT(name) PyInit_##name
#define INIT_OF(name) INIT(name)
PyMODINIT_FUNC INIT_OF(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
""".replace("@WGMMA@", wgmma(256))


@functools.cache
def extension():
    constants = (("FUSE", FUSE), ("PARTS", PARTS), ("WIDE", WIDE), ("LINES", LINES), ("FULL", FULL), ("PDL", PDL), ("CO", CO), ("LA", LA), ("LP", LP), ("LAG", LAG), ("KU", KU), ("SLEEP", SLEEP), ("HINTS", HINTS),
                 ("NO_TURN", int(PROBE not in ("", "T"))), ("NO_PRODUCT", int(PROBE not in ("", "P"))), ("NO_GATE", int(PROBE not in ("", "G"))))
    source = "".join(f"#define {name} {value}\n" for name, value in constants) + CUDA
    flags = ["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a"]
    return load_inline("triangle", "", source, no_implicit_headers=True, with_pytorch_error_handling=False, extra_cuda_cflags=flags).run


def dense(x):
    """x, contiguous and at a multiple of 16 bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


class ModelNew(nn.Module):
    def forward(self, a, b, gate):
        n = a.shape[0]
        if any(tuple(x.shape) != (n, n, 128) or x.dtype != torch.bfloat16 or not x.is_cuda or x.device != a.device for x in (a, b, gate)):
            raise ValueError("a, b and gate must be bf16 of nodes x nodes x 128, on one GPU")
        if n < 512 or n % 512 or n > 4096:
            raise ValueError("nodes must be a multiple of 512")
        a, b, gate = dense(a), dense(b), dense(gate)
        y = torch.empty_like(gate)
        at, bt, p = torch.empty_like(y), torch.empty_like(y), torch.empty_like(y)
        counters = torch.empty(128, dtype=torch.int32, device=a.device)
        with torch.cuda.device(a.device):
            error = extension()(a.data_ptr(), b.data_ptr(), gate.data_ptr(), y.data_ptr(), at.data_ptr(), bt.data_ptr(), p.data_ptr(), counters.data_ptr(), n,
                                torch.cuda.current_stream().cuda_stream)
        if error:
            raise RuntimeError(f"triangle: CUDA error {error}")
        return y
