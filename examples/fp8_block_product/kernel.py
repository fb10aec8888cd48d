"""fp8 product with block scales in CUDA C++: warps with roles, clusters of two blocks, tiles of 256 x 256 of a cluster.

`wide_kernel`, for a depth of whole 512 and columns of whole 32:

* A block's tile is 128 rows x 256 columns. Each of two consumer warpgroups owns 64 rows, as two sums of 128 columns. A
  step is 128 of k: a product with the first 128 rows of w, then one with the other 128. Each goes into fresh sums, which
  are then added, scaled, in fp32. The two blocks of a cluster work on neighbouring rows; each fetches 128 rows of w for
  both.
* Four steps are unrolled, one a stage, so addresses are constants. The next step's barrier is tested while a product
  runs. Scales are read while a product runs; TMA brings those of four steps with the operands of the first of them.
* The result leaves from the registers, under the first product of the next tile. TMA fetches the rows of w in such an
  order that a thread has 8 neighbouring columns: a store has 16 bytes a thread, 64 a row, and needs no shared memory.
* No instruction takes several of the fp32 sums as one operand, so ptxas can give a sum and its product registers of
  different banks.

`product_kernel`, for other depths and columns: tiles of 256 x 128. A consumer warpgroup owns 128 rows, as two halves of
64. The blocks of a cluster share x. The result leaves through the last two stages.

`few_rows_kernel`, for up to 64 rows of x: the transposed product, w x^T.

Rows or scales that TMA cannot address are copied to whole 16 bytes first.
"""

import functools

import torch
from torch.utils.cpp_extension import load_inline

WIDE_GROUP = 8  # row tiles of 256 that wide_kernel walks together
HALVES = 2  # of 64 rows that a consumer warpgroup of product_kernel owns
BN = 128  # columns of product_kernel's tile: as many as have one scale of w
STAGES = 4  # of product_kernel's ring of operands
GROUP = 8  # row tiles that product_kernel walks together
# Of wide_kernel. "uniform scales": all are 1, of one uniform register; "no loads": none after a block's first two turns,
# so operands and scales stay random; "an eighth of the scaling": 8 of 64 sums are added.
PROBE = ""
PROBES = ("", "uniform scales", "no loads", "an eighth of the scaling")


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

typedef uint32_t u32;
enum Probe { WHOLE, UNIFORM_SCALES, NO_LOADS, FEW_SUMS };
constexpr int BM = 128 * HALVES, BK = 128, CLUSTER = 2, THREADS = 384;
constexpr int SLICES = BN / 64;  // 64 columns of the result leave together; they lie in a stage's 64 rows of x
constexpr int HELD = SLICES;     // stages that the result of a tile takes
constexpr int SLOTS = STAGES;    // of scales: a step that is not over holds one slot at most, so this many are enough for tiles of any depth
constexpr u32 X_BYTES = BM * BK, W_BYTES = BN * BK, STAGE_BYTES = X_BYTES + W_BYTES, SLICE_BYTES = 64 * 64 * 2, SLOT_BYTES = 16 * BM + 128;
constexpr u32 SHARED_BYTES = STAGES * STAGE_BYTES + SLOTS * SLOT_BYTES + 16 * STAGES + 1024;
static_assert(BN == 128, "a tile has one scale of w a step");

struct Shape { int rows, columns, steps, row_tiles, tiles; };

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void bar_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory"); }
__device__ __forceinline__ void bar_expect(u32 bar, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory"); }
__device__ __forceinline__ void bar_arrive_at(u32 bar, u32 block) {  // the same barrier in a block of the cluster
    asm volatile("{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [r];\n}" ::"r"(bar), "r"(block) : "memory");
}
__device__ __forceinline__ void bar_arrive_there(u32 bar) { asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory"); }  // an address of the cluster
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
__device__ __forceinline__ void store(const CUtensorMap* map, u32 from, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from), "r"(column), "r"(row) : "memory");
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
// Tiles of a cluster: `tall` rows and `broad` columns; `group` tiles of rows are walked together.
__device__ __forceinline__ void place_of(int tile, const Shape& s, int tall, int broad, int group, int& row, int& column) {
    const int columns = (s.columns + broad - 1) / broad, per_group = group * columns, first = tile / per_group * group;
    const int rows = min(s.row_tiles - first, group), within = tile % per_group;
    row = (first + within % rows) * tall, column = within / rows * broad;
}
__device__ __forceinline__ void place(int tile, const Shape& s, int& row, int& column) { place_of(tile, s, BM, CLUSTER * BN, GROUP, row, column); }

__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    product_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap y_map,
                   const __grid_constant__ CUtensorMap scale_x_map, const __grid_constant__ CUtensorMap scale_w_map, __nv_bfloat16* y, int by_tma, Shape s) {
    extern __shared__ uint8_t raw[];
    const u32 ring = (shared_address(raw) + 1023) & ~1023u, slots = ring + STAGES * STAGE_BYTES, full = slots + SLOTS * SLOT_BYTES, empty = full + 8 * STAGES;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, group = warp / 4;
    u32 block;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) bar_init(full + 8 * i, 1), bar_init(empty + 8 * i, 2 * CLUSTER);  // a consumer warpgroup each
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    const int first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp == 8 && lane == 0) {
            int stage = 0, slot = 0;
            u32 parity = 1;
            for (int tile = first; tile < s.tiles; tile += step) {
                int row, column;
                place(tile, s, row, column);
                column += block * BN;
                for (int k = 0; k < s.steps; ++k) {
                    const u32 bar = full + 8 * stage, at = ring + stage * STAGE_BYTES, scales = slots + slot * SLOT_BYTES;
                    bar_wait(empty + 8 * stage, parity);
                    if (k % 4 == 0) {
                        bar_expect(bar, STAGE_BYTES + 16 * BM + 16);
                        load(scales, &scale_x_map, bar, k, row);
                        load(scales + 16 * BM, &scale_w_map, bar, k, column / 128);
                        if (++slot == SLOTS) slot = 0;
                    } else bar_expect(bar, STAGE_BYTES);
                    load_for_both(at + block * (X_BYTES / 2), &x_map, bar, k * BK, row + block * (BM / 2));
                    load(at + X_BYTES, &w_map, bar, k * BK, column);
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        int stage = 0, slot = 0;
        u32 parity = 0;
        bool held = false;  // the last stages hold the result of the tile before
        const int own = warp % 4 * 16 + lane % 8 + lane / 8 % 2 * 8;  // the row of 64 whose address this lane gives to stmatrix
        auto release = [&](int at) {
            if (threadIdx.x % 128 < CLUSTER) bar_arrive_at(empty + 8 * at, threadIdx.x % 128);
        };
        auto earlier = [&](int by) { return stage >= by ? stage - by : stage + STAGES - by; };
        for (int tile = first; tile < s.tiles; tile += step) {
            int row, column;
            place(tile, s, row, column);
            row += group * 64 * HALVES, column += block * BN;
            float sums[HALVES][BN / 2], d[BN / 2];
            #pragma unroll
            for (int h = 0; h < HALVES; ++h)
                #pragma unroll
                for (int i = 0; i < BN / 2; ++i) sums[h][i] = 0.0f;
            for (int k = 0; k < s.steps; ++k) {
                const u32 scales = slots + slot * SLOT_BYTES + k % 4 * 4, of_x = scales + (group * 64 * HALVES + warp % 4 * 16 + lane / 4) * 16;
                float f[2 * HALVES];
                bar_wait(full + 8 * stage, parity);
                const float of_w = word(scales + 16 * BM);
                #pragma unroll
                for (int i = 0; i < 2 * HALVES; ++i) f[i] = word(of_x + (i / 2 * 64 + i % 2 * 8) * 16);
                #pragma unroll
                for (int h = 0; h < HALVES; ++h) {
                    const uint64_t a = descriptor(ring + stage * STAGE_BYTES + group * (X_BYTES / 2) + h * 64 * BK), b = descriptor(ring + stage * STAGE_BYTES + X_BYTES);
                    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
                    #pragma unroll
                    for (int i = 0; i < 4; ++i) multiply(d, a + 2 * i, b + 2 * i, i);
                    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                    if (h == 0 && held) {
                        held = false;
                        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
                        #pragma unroll
                        for (int i = HELD; i; --i) release(earlier(i));
                    }
                    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
                    #pragma unroll
                    for (int i = 0; i < BN / 2; ++i) asm volatile("" : "+f"(d[i]) :: "memory");
                    if (h == HALVES - 1 && (!by_tma || k < s.steps - HELD)) release(stage);
                    const float f0 = f[2 * h] * of_w, f1 = f[2 * h + 1] * of_w;
                    #pragma unroll
                    for (int i = 0; i < BN / 2; i += 4) {
                        sums[h][i] += d[i] * f0, sums[h][i + 1] += d[i + 1] * f0;
                        sums[h][i + 2] += d[i + 2] * f1, sums[h][i + 3] += d[i + 3] * f1;
                    }
                }
                if (++stage == STAGES) stage = 0, parity ^= 1;
                if (k % 4 == 3 || k == s.steps - 1) slot = slot + 1 == SLOTS ? 0 : slot + 1;
            }
            if (by_tma) {
                // A warp writes over rows of x that only its own products read, so it need not wait for the other warps.
                auto buffer = [&](int slice) { return ring + earlier(HELD - slice / HALVES) * STAGE_BYTES + group * (X_BYTES / 2) + slice % HALVES * SLICE_BYTES; };
                #pragma unroll
                for (int slice = 0; slice < SLICES * HALVES; ++slice) {
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
                if (threadIdx.x % 128 == 0) {
                    #pragma unroll
                    for (int slice = 0; slice < SLICES * HALVES; ++slice) store(&y_map, buffer(slice), column + slice % SLICES * 64, row + slice / SLICES * 64);
                }
                held = true;
            } else {
                #pragma unroll
                for (int h = 0; h < HALVES; ++h)
                    #pragma unroll
                    for (int i = 0; i < BN / 2; i += 2) {
                        const int r = row + h * 64 + warp % 4 * 16 + lane / 4 + i / 2 % 2 * 8, c = column + i / 4 * 8 + 2 * (lane % 4);
                        __nv_bfloat16* to = y + (int64_t)r * s.columns + c;
                        if (r >= s.rows || c >= s.columns) continue;
                        if (s.columns % 2 == 0) *(u32*)to = packed(sums[h][i], sums[h][i + 1]);
                        else {
                            to[0] = __float2bfloat16(sums[h][i]);
                            if (c + 1 < s.columns) to[1] = __float2bfloat16(sums[h][i + 1]);
                        }
                    }
            }
        }
        if (threadIdx.x % 128 == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");  // no block ends while another still arrives at its barriers
}

// Tiles of 128 rows x 256 columns of a block, see the top of the file.
namespace wide {
constexpr int ROWS = 128, COLUMNS = 256, TURN = 4;  // steps of a turn: as many as stages
constexpr u32 X_BYTES = ROWS * BK, W_BYTES = 128 * BK, STAGE_BYTES = X_BYTES + 2 * W_BYTES, SLOT_BYTES = 16 * ROWS + 128;
constexpr u32 SHARED_BYTES = TURN * STAGE_BYTES + 2 * SLOT_BYTES + 16 * TURN + 1024;

__device__ __forceinline__ void place(int tile, const Shape& s, int& row, int& column) { place_of(tile, s, CLUSTER * ROWS, COLUMNS, WIDE_GROUP, row, column); }

// 128 rows of w for both blocks. Line 32 a + 8 b + 2 c + d has the row 32 a + 8 c + 2 b + d of w, see `finish`.
__device__ __forceinline__ void load_lines(u32 to, const CUtensorMap* map, u32 bar, int k, int row) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %4, %4, %5}], [%2], %6;"
                 ::"r"(to), "l"(map), "r"(bar), "r"(k), "r"(0), "r"(row / 32), "h"((uint16_t)3) : "memory");
}
__device__ __forceinline__ u32 bar_test(u32 bar, u32 parity) {
    u32 over;
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(over) : "r"(bar), "r"(parity) : "memory");
    return over;
}
__device__ __forceinline__ void store16(__nv_bfloat16* to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void prefetch(const CUtensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
// Where the compiler sees a constant here, ptxas spills.
__device__ __forceinline__ void make_zero(float& x) { asm volatile("mov.f32 %0, 0f00000000;" : "=f"(x)); }

__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    wide_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                const __grid_constant__ CUtensorMap scale_x_map, const __grid_constant__ CUtensorMap scale_w_map, __nv_bfloat16* y, Shape s, float one) {
    extern __shared__ uint8_t raw[];
    const u32 ring = (shared_address(raw) + 1023) & ~1023u, slots = ring + TURN * STAGE_BYTES, full = slots + 2 * SLOT_BYTES, empty = full + 8 * TURN;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, group = warp / 4;
    u32 block;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
    if (threadIdx.x == 0) {
        for (int i = 0; i < TURN; ++i) bar_init(full + 8 * i, 1), bar_init(empty + 8 * i, 8 * CLUSTER);  // a consumer warp each
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (warp == 8 && lane == 0) prefetch(&x_map), prefetch(&w_map), prefetch(&scale_x_map), prefetch(&scale_w_map);
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    const int first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER, turns = s.steps / TURN;
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp == 8 && lane == 0) {
            u32 parity = 1;
            for (int tile = first; tile < s.tiles; tile += step) {
                int row, column;
                wide::place(tile, s, row, column);
                row += block * ROWS;
                #pragma unroll 1
                for (int turn = 0; turn < turns; ++turn) {
                    const u32 scales = slots + (parity ^ 1) * SLOT_BYTES;
                    #pragma unroll
                    for (int u = 0; u < TURN; ++u) {
                        const u32 bar = full + 8 * u, at = ring + u * STAGE_BYTES;
                        const int k = turn * TURN + u;
                        bar_wait(empty + 8 * u, parity);
                        if (PROBE_ == NO_LOADS && (turn > 1 || tile != first)) {
                            bar_expect(bar, 0);
                            continue;
                        }
                        if (u == 0) {
                            bar_expect(bar, STAGE_BYTES + 16 * ROWS + 32);
                            load(scales, &scale_x_map, bar, k, row);
                            load(scales + 16 * ROWS, &scale_w_map, bar, k, column / 128);
                        } else bar_expect(bar, STAGE_BYTES);
                        load(at, &x_map, bar, k * BK, row);
                        load_lines(at + X_BYTES + block * W_BYTES, &w_map, bar, k * BK, column + block * 128);
                    }
                    parity ^= 1;
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        u32 parity = 0, ready = 0;
        int before = -1;  // a tile whose result has not left
        float left[64], right[64], d[64];  // sums of 128 columns each, and a product
        u32 release_at;  // the barrier of the first stage in the block that this lane tells
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(release_at) : "r"(empty), "r"(lane % CLUSTER));
        const uint64_t a_first = descriptor(ring + group * (X_BYTES / 2)), b_first = descriptor(ring + X_BYTES);
        const u32 of_x = (group * 64 + warp % 4 * 16 + lane / 4) * 16;  // scales of rows lane / 4 and + 8
        #pragma unroll
        for (int i = 0; i < 64; ++i) left[i] = right[i] = 0.0f;

        auto issue = [&](int u, int half) {  // half: which 128 columns
            const uint64_t a = a_first + u * (STAGE_BYTES / 16), b = b_first + (u * STAGE_BYTES + half * W_BYTES) / 16;
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            #pragma unroll
            for (int i = 0; i < 4; ++i) multiply(d, a + 2 * i, b + 2 * i, i);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        };
        auto await = [&]() {
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            #pragma unroll
            for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(d[i]) :: "memory");
        };
        auto add = [&](float (&sums)[64], float f0, float f1) {
            #pragma unroll
            for (int i = 0; i < (PROBE_ == FEW_SUMS ? 8 : 64); i += 4) {
                sums[i] += d[i] * f0, sums[i + 2] += d[i + 2] * f1;
                sums[i + 1] += d[i + 1] * f0, sums[i + 3] += d[i + 3] * f1;
            }
        };
        auto wait_for = [&](int u, u32 phase) {
            if (!ready) bar_wait(full + 8 * u, phase);
        };
        // A thread has, of the columns 8 j to 8 j + 7 of wgmma, 2 (lane % 4) and the next: lines 32 a + 8 b + 2 c + d, with
        // j = 4 a + b and c = lane % 4. load_lines puts 8 neighbouring rows of w where a and c are the same.
        auto finish = [&](int tile) {
            int row, column;
            wide::place(tile, s, row, column);
            row += block * ROWS + group * 64 + warp % 4 * 16 + lane / 4, column += lane % 4 * 8;
            __nv_bfloat16* to = y + (int64_t)row * s.columns + column;
            auto leave = [&](const float (&v)[64], int half) {
                #pragma unroll
                for (int a = 0; a < 4; ++a) {
                    const int c = half * 128 + 32 * a;
                    #pragma unroll
                    for (int r = 0; r < 2; ++r) {  // row lane / 4, then + 8
                        const int at = 16 * a + 2 * r;
                        if (row + 8 * r < s.rows && column + c < s.columns)
                            store16(to + (int64_t)8 * r * s.columns + c, packed(v[at], v[at + 1]), packed(v[at + 4], v[at + 5]), packed(v[at + 8], v[at + 9]), packed(v[at + 12], v[at + 13]));
                    }
                }
            };
            leave(left, 0), leave(right, 1);
        };

        int tile = first, turn = 0;
        while (true) {
            if (turn == 0 && tile >= s.tiles) break;
            const u32 scales = slots + parity * SLOT_BYTES;
            wait_for(0, parity);
            issue(0, 0);
            if (turn == 0) {
                if (before >= 0) finish(before);
                #pragma unroll
                for (int i = 0; i < 64; ++i) make_zero(left[i]), make_zero(right[i]);
            }
            #pragma unroll
            for (int u = 0; u < TURN; ++u) {
                const float x0 = word(scales + of_x + 4 * u), x1 = word(scales + of_x + 128 + 4 * u);
                const float w0 = word(scales + 16 * ROWS + 4 * u), w1 = word(scales + 16 * ROWS + 16 + 4 * u);
                float l0 = x0 * w0, l1 = x1 * w0, r0 = x0 * w1, r1 = x1 * w1;
                if (PROBE_ == UNIFORM_SCALES) l0 = l1 = r0 = r1 = one;
                await();
                add(left, l0, l1);
                issue(u, 1);
                ready = bar_test(full + 8 * ((u + 1) % TURN), u + 1 < TURN ? parity : parity ^ 1);
                await();
                if (lane < CLUSTER) bar_arrive_there(release_at + 8 * u);
                add(right, r0, r1);
                if (u + 1 < TURN) {
                    wait_for(u + 1, parity);
                    issue(u + 1, 0);
                }
            }
            parity ^= 1;
            if (++turn == turns) before = tile, turn = 0, tile += step;
        }
        if (before >= 0) finish(before);
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");  // no block ends while another still arrives at its barriers
}
}  // namespace wide

// Few rows of x: y^T = w x^T, so that 64 rows of w are the rows of wgmma and FEW rows of x its columns. A block walks all of k.
template <int FEW> struct Ring {
    static constexpr u32 W = 64 * BK, X = FEW * BK, STAGE = W + X, COUNT = (200 * 1024) / STAGE, BYTES = COUNT * (STAGE + 16) + 1024;
};
template <int FEW> __global__ void __launch_bounds__(160, 1)
    few_rows_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map, const float* scale_x, const float* scale_w,
                    __nv_bfloat16* y, Shape s) {
    using R = Ring<FEW>;
    extern __shared__ uint8_t raw[];
    const u32 ring = (shared_address(raw) + 1023) & ~1023u, full = ring + R::COUNT * R::STAGE, empty = full + 8 * R::COUNT;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, left = blockIdx.x * 64;
    if (threadIdx.x == 0) {
        for (int i = 0; i < (int)R::COUNT; ++i) bar_init(full + 8 * i, 1), bar_init(empty + 8 * i, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    int stage = 0;
    if (warp == 4) {
        if (lane == 0) {
            u32 parity = 1;
            for (int k = 0; k < s.steps; ++k) {
                const u32 bar = full + 8 * stage, at = ring + stage * R::STAGE;
                bar_wait(empty + 8 * stage, parity);
                bar_expect(bar, R::STAGE);
                load(at, &w_map, bar, k * BK, left);
                load(at + R::W, &x_map, bar, k * BK, 0);
                if (++stage == R::COUNT) stage = 0, parity ^= 1;
            }
        }
        return;
    }
    u32 parity = 0;
    float sums[FEW / 2], d[FEW / 2], next[FEW / 4], next_w;
    const float* of_w = scale_w + (int64_t)(left / 128) * s.steps;
    const float* of_x[FEW / 4];
    #pragma unroll
    for (int i = 0; i < FEW / 2; ++i) sums[i] = 0.0f;
    #pragma unroll
    for (int i = 0; i < FEW / 4; ++i) {
        of_x[i] = scale_x + (int64_t)min(8 * (i / 2) + 2 * (lane % 4) + i % 2, s.rows - 1) * s.steps;
        next[i] = __ldg(of_x[i]);
    }
    next_w = __ldg(of_w);
    for (int k = 0; k < s.steps; ++k) {
        const int ahead = min(k + 1, s.steps - 1);
        float f[FEW / 4];
        #pragma unroll
        for (int i = 0; i < FEW / 4; ++i) f[i] = next[i] * next_w;
        bar_wait(full + 8 * stage, parity);
        const uint64_t a = descriptor(ring + stage * R::STAGE), b = descriptor(ring + stage * R::STAGE + R::W);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        #pragma unroll
        for (int i = 0; i < 4; ++i) multiply(d, a + 2 * i, b + 2 * i, i);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        #pragma unroll
        for (int i = 0; i < FEW / 4; ++i) next[i] = __ldg(of_x[i] + ahead);
        next_w = __ldg(of_w + ahead);
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        #pragma unroll
        for (int i = 0; i < FEW / 2; ++i) asm volatile("" : "+f"(d[i]) :: "memory");
        if (threadIdx.x == 0) bar_arrive_at(empty + 8 * stage, 0);
        #pragma unroll
        for (int i = 0; i < FEW / 2; ++i) sums[i] += d[i] * f[i / 4 * 2 + i % 2];
        if (++stage == R::COUNT) stage = 0, parity ^= 1;
    }
    #pragma unroll
    for (int i = 0; i < FEW / 2; ++i) {
        const int n = left + 16 * warp + lane / 4 + 8 * (i / 2 % 2), m = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
        if (n < s.columns && m < s.rows) y[(int64_t)m * s.columns + n] = __float2bfloat16(sums[i]);
    }
}

// What TMA cannot address, a block a row of x, then of w. Operands: rows of `depth` bytes to rows of `pitch`, a multiple of 16,
// by 16 bytes a thread; what is new is 0. Scales: rows of `steps` to rows of `scale_pitch`, a multiple of 4. A null pointer: not wanted.
__device__ __forceinline__ u32 word_at(const uint8_t* from, int64_t word, int64_t total) {
    if (4 * word + 4 <= total) return __ldg((const u32*)from + word);
    u32 value = 0;
    for (int64_t byte = 4 * word; byte < total; ++byte) value |= (u32)from[byte] << 8 * (byte % 4);
    return value;
}
__global__ void realign_kernel(const uint8_t* x, const uint8_t* w, uint4* to, const float* scale_x, const float* scale_w, float* scales_to,
                               int rows, int columns, int depth, int pitch, int steps, int scale_pitch) {
    const bool of_x = blockIdx.x < rows;
    const int64_t row = of_x ? blockIdx.x : blockIdx.x - rows, total = (int64_t)(of_x ? rows : columns) * depth;
    if (scales_to && (of_x || row % 128 == 0)) {
        const float* from = of_x ? scale_x + row * steps : scale_w + row / 128 * steps;
        float* target = scales_to + (of_x ? row : rows + row / 128) * scale_pitch;
        for (int k = threadIdx.x; k < steps; k += blockDim.x) target[k] = from[k];
    }
    if (!to) return;
    const uint8_t* from = of_x ? x : w;
    for (int at = threadIdx.x; at < pitch / 16; at += blockDim.x) {
        const int64_t byte = row * depth + 16 * at, word = byte / 4;
        u32 in[5], out[4];
        #pragma unroll
        for (int i = 0; i < 5; ++i) in[i] = word_at(from, word + i, total);
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int left = depth - 16 * at - 4 * i;  // bytes of the row from here on
            out[i] = __funnelshift_r(in[i], in[i + 1], byte % 4 * 8) & (left >= 4 ? ~0u : left > 0 ? (1u << 8 * left) - 1 : 0);
        }
        to[(int64_t)blockIdx.x * (pitch / 16) + at] = make_uint4(out[0], out[1], out[2], out[3]);
    }
}

// All return 0 or an error: CUDA's, or 10000 and the driver's.
#define MUST(call) do { int error = int(call); if (error) return error; } while (0)

int encoded(CUtensorMap& map, const void* data, CUtensorMapDataType type, int dimensions, const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box, bool swizzle) {
    static void* encode = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (!encode) MUST(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &result));
    const cuuint32_t one[5] = {1, 1, 1, 1, 1};
    CUresult error = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(&map, type, dimensions, (void*)data, sizes, strides, box, one, CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return error == CUDA_SUCCESS ? 0 : 10000 + int(error);
}
int map_of(CUtensorMap& map, const void* data, CUtensorMapDataType type, int bytes, int rows, int columns, int64_t pitch, int box_rows, int box_columns) {
    const cuuint64_t sizes[2] = {(cuuint64_t)columns, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)pitch * bytes};
    const cuuint32_t box[2] = {(cuuint32_t)box_columns, (cuuint32_t)box_rows};
    return encoded(map, data, type, 2, sizes, strides, box, box_columns * bytes == 128);
}

struct Operands { const void *x, *w; __nv_bfloat16* y; const float *scale_x, *scale_w; int depth, scale_pitch; };

template <int FEW> int few_rows(const Operands& o, Shape s, cudaStream_t stream) {
    CUtensorMap x_map, w_map;
    MUST(map_of(x_map, o.x, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, s.rows, o.depth, o.depth, FEW, BK));
    MUST(map_of(w_map, o.w, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, s.columns, o.depth, o.depth, 64, BK));
    MUST(cudaFuncSetAttribute(few_rows_kernel<FEW>, cudaFuncAttributeMaxDynamicSharedMemorySize, Ring<FEW>::BYTES));
    few_rows_kernel<FEW><<<(s.columns + 63) / 64, 160, Ring<FEW>::BYTES, stream>>>(x_map, w_map, o.scale_x, o.scale_w, o.y, s);
    return 0;
}

int many_rows(const Operands& o, Shape s, cudaStream_t stream) {
    const bool by_tma = s.columns % 8 == 0 && s.steps >= HELD;
    CUtensorMap x_map, w_map, y_map, scale_x_map, scale_w_map;
    MUST(map_of(x_map, o.x, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, s.rows, o.depth, o.depth, BM / 2, BK));
    MUST(map_of(w_map, o.w, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, s.columns, o.depth, o.depth, BN, BK));
    MUST(map_of(scale_x_map, o.scale_x, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, s.rows, s.steps, o.scale_pitch, BM, 4));
    MUST(map_of(scale_w_map, o.scale_w, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, (s.columns + 127) / 128, s.steps, o.scale_pitch, 1, 4));
    y_map = x_map;
    if (by_tma) MUST(map_of(y_map, o.y, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, s.rows, s.columns, s.columns, 64, 64));
    int device, multiprocessors;
    MUST(cudaGetDevice(&device));
    MUST(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
    MUST(cudaFuncSetAttribute(product_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
    s.row_tiles = (s.rows + BM - 1) / BM, s.tiles = s.row_tiles * ((s.columns + CLUSTER * BN - 1) / (CLUSTER * BN));
    product_kernel<<<min(multiprocessors / CLUSTER, s.tiles) * CLUSTER, THREADS, SHARED_BYTES, stream>>>(x_map, w_map, y_map, scale_x_map, scale_w_map, o.y, by_tma, s);
    return 0;
}

// Rows of w, a multiple of 32, in the order of load_lines.
int map_of_lines(CUtensorMap& map, const void* w, int rows, int64_t pitch) {
    const cuuint64_t sizes[5] = {(cuuint64_t)pitch, 2, 4, 4, (cuuint64_t)rows / 32}, strides[4] = {(cuuint64_t)pitch, (cuuint64_t)8 * pitch, (cuuint64_t)2 * pitch, (cuuint64_t)32 * pitch};
    const cuuint32_t box[5] = {BK, 2, 4, 4, 4};
    return encoded(map, w, CU_TENSOR_MAP_DATA_TYPE_UINT8, 5, sizes, strides, box, true);
}

bool fits_wide(const Shape& s, int depth) { return depth % (BK * wide::TURN) == 0 && s.columns % 32 == 0; }

int wide_tiles(const Operands& o, Shape s, cudaStream_t stream) {
    CUtensorMap x_map, w_map, scale_x_map, scale_w_map;
    MUST(map_of(x_map, o.x, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, s.rows, o.depth, o.depth, wide::ROWS, BK));
    MUST(map_of_lines(w_map, o.w, s.columns, o.depth));
    MUST(map_of(scale_x_map, o.scale_x, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, s.rows, s.steps, o.scale_pitch, wide::ROWS, 4));
    MUST(map_of(scale_w_map, o.scale_w, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, (s.columns + 127) / 128, s.steps, o.scale_pitch, 2, 4));
    int device, multiprocessors;
    MUST(cudaGetDevice(&device));
    MUST(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
    MUST(cudaFuncSetAttribute(wide::wide_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, wide::SHARED_BYTES));
    s.row_tiles = (s.rows + CLUSTER * wide::ROWS - 1) / (CLUSTER * wide::ROWS), s.tiles = s.row_tiles * ((s.columns + wide::COLUMNS - 1) / wide::COLUMNS);
    wide::wide_kernel<<<min(multiprocessors / CLUSTER, s.tiles) * CLUSTER, THREADS, wide::SHARED_BYTES, stream>>>(x_map, w_map, scale_x_map, scale_w_map, o.y, s, 1.0f);
    return 0;
}

int product(const void* x, const void* w, void* y, const float* scale_x, const float* scale_w, void* copies, float* scale_copies, int rows, int columns, int depth, cudaStream_t stream) {
    const int steps = (depth + BK - 1) / BK, pitch = (depth + 15) / 16 * 16, scale_pitch = (steps + 3) / 4 * 4;
    Operands o = {x, w, (__nv_bfloat16*)y, scale_x, scale_w, depth, steps};
    if (copies || scale_copies)
        realign_kernel<<<rows + columns, 128, 0, stream>>>((const uint8_t*)x, (const uint8_t*)w, (uint4*)copies, scale_x, scale_w, scale_copies, rows, columns, depth, pitch, steps, scale_pitch);
    if (copies) o.x = copies, o.w = (const uint8_t*)copies + (int64_t)rows * pitch, o.depth = pitch;
    const Shape s = {rows, columns, steps, 0, 0};
    if (scale_copies) o.scale_x = scale_copies, o.scale_w = scale_copies + (int64_t)rows * scale_pitch, o.scale_pitch = scale_pitch;
    auto launch = rows <= 8 ? few_rows<8> : rows <= 16 ? few_rows<16> : rows <= 32 ? few_rows<32> : rows <= 64 ? few_rows<64> : fits_wide(s, depth) ? wide_tiles : many_rows;
    MUST(launch(o, s, stream));
    return cudaGetLastError();
}

static PyObject* run(PyObject*, PyObject* const* given, Py_ssize_t) {  // x, w, y, scale_x, scale_w, copies, scale_copies, rows, columns, depth, stream
    long long a[11];
    for (int i = 0; i < 11; ++i) a[i] = PyLong_AsLongLong(given[i]);
    return PyLong_FromLong(product((void*)a[0], (void*)a[1], (void*)a[2], (float*)a[3], (float*)a[4], (void*)a[5], (float*)a[6], int(a[7]), int(a[8]), int(a[9]), (cudaStream_t)a[10]));
}
static PyMethodDef methods[] = {{"run", (PyCFunction)(void*)run, METH_FASTCALL, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "fp8_block_product", "", -1, methods};
#define INIT(name) PyInit_##name
#define INIT_OF(name) INIT(name)
PyMODINIT_FUNC INIT_OF(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
""".replace("@WGMMA@", "".join(map(wgmma, sorted({8, 16, 32, 64, 128, BN}))))


@functools.cache
def extension():
    constants = {"WIDE_GROUP": WIDE_GROUP, "HALVES": HALVES, "BN": BN, "STAGES": STAGES, "GROUP": GROUP}
    constants["PROBE_"] = PROBES.index(PROBE)
    return load_inline(
        "fp8_block_product_" + "_".join(map(str, constants.values())),
        "",
        CUDA,
        no_implicit_headers=True,
        with_pytorch_error_handling=False,
        extra_cuda_cflags=["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a"]
        + [f"-D{name}={value}" for name, value in constants.items()],
    ).run


def dense(x):
    """x, contiguous and at a multiple of 16 bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def kernel_function(x, weight, scale_x, scale_w):
    (M, K), N = x.shape, weight.shape[0]
    blocks = -(-K // 128)
    if weight.shape[1] != K or scale_x.shape != (M, blocks) or scale_w.shape != (-(-N // 128), blocks):
        raise ValueError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and the scales do not fit together")
    if max(M, N, K) >= 2**30:
        raise ValueError("a side of the product is too long")
    if not x.dtype == weight.dtype == torch.float8_e4m3fn or not scale_x.dtype == scale_w.dtype == torch.float32:
        raise ValueError("x and weight must be float8_e4m3fn, the scales float32")
    x, weight, scale_x, scale_w = dense(x), dense(weight), dense(scale_x), dense(scale_w)
    y = torch.empty((M, N), dtype=torch.bfloat16, device=x.device)
    copies = scale_copies = None
    if K % 16:
        copies = torch.empty((M + N, -(-K // 16) * 16), dtype=torch.uint8, device=x.device)
    if blocks % 4 and M > 64:
        scale_copies = torch.empty((M + len(scale_w), -(-blocks // 4) * 4), dtype=torch.float32, device=x.device)
    error = extension()(
        x.data_ptr(),
        weight.data_ptr(),
        y.data_ptr(),
        scale_x.data_ptr(),
        scale_w.data_ptr(),
        0 if copies is None else copies.data_ptr(),
        0 if scale_copies is None else scale_copies.data_ptr(),
        M,
        N,
        K,
        torch.cuda.current_stream(x.device).cuda_stream,
    )
    if error:
        raise RuntimeError(f"fp8_block_product: CUDA error {error}")
    return y
