"""One Newton-Schulz step in CUDA C++: X' = a X + (b A + c A A) X, A = X X^T, bf16. One persistent launch, three phases.

 * A and the polynomial are symmetric: only 128 x 128 blocks on and below the diagonal are computed; each tile is stored twice,
   once transposed (stmatrix.trans). For 4096 rows they are exactly two waves of 66 clusters.
 * Clusters of two blocks work on 256 x 256: a producer warp a block (TMA, the columns' operand by multicast), two consumer
   warpgroups of 64 x 256 (wgmma), a ring of four steps of 64 of k.
 * b A and a X are never loaded for the epilogue: they pass through the ring as the columns' operand, in the step whose k are
   the rows of the warpgroup; there they are added to the sums.
 * The last 1024 columns of the last product are tiles of 208 columns, so that the last wave is even.
"""

import functools

import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

FUSED = 1  # one launch with barriers of the grid between the phases; 0: three launches
NARROW = 0  # the last columns in tiles of SLIM
ORDER = 0  # slim tiles in a loop of their own
PIN = 0  # sums are operands of the fences
LATE = 1  # the addend is loaded in the epilogue
SLIM = 208
SKEW = 0  # steps that the first warpgroup is ahead
HINTS = 1  # the result is evicted first from the L2
A, B, C = 3.4445, -4.7750, 2.0315


def wgmma(n, trans):
    half = n // 2
    sums, operands = ", ".join(f"%{i}" for i in range(half)), ", ".join(f'"+f"(d[{i}])' for i in range(half))
    return f"""template <> struct Mma<{n}, {trans}> {{ static __device__ __forceinline__ void run(float (&d)[{half}], uint64_t a, uint64_t b, int keep) {{
    asm volatile("{{.reg .pred p; setp.ne.b32 p, %{half + 2}, 0; "
                 "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{sums}}}, %{half}, %{half + 1}, p, 1, 1, 0, {trans};}}"
                 : {operands} : "l"(a), "l"(b), "r"(keep));
}} }};
"""


CUDA = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>

typedef uint32_t u32;
constexpr int STAGES = 4, CLUSTER = 2, THREADS = 384, SLIM = SLIM_COLUMNS;
constexpr u32 PART = 16384, STAGE_BYTES = 3 * PART, SLOT_BYTES = 8192, SHARED_BYTES = STAGES * STAGE_BYTES + 4 * SLOT_BYTES + 16 * STAGES + 8;

struct Maps { CUtensorMap x_rows, x_panel, g_rows, g_tile, p_rows, p_tile, y_tile, y_slim; };
struct Shape { int rows, columns, full_columns, clusters, first, last; unsigned long long* counter; float a, b, c; const uint16_t *x, *g; };

__device__ __forceinline__ void bar_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory"); }
__device__ __forceinline__ void bar_expect(u32 bar, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory"); }
__device__ __forceinline__ void bar_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
__device__ __forceinline__ void bar_arrive_at(u32 bar, u32 block) {
    asm volatile("{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [r];\n}" ::"r"(bar), "r"(block) : "memory");
}
__device__ __forceinline__ void bar_wait(u32 bar, u32 parity) {
    asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra again;\ndone:\n}" ::"r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ void load(u32 to, const CUtensorMap* map, u32 bar, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                 ::"r"(to), "l"(map), "r"(bar), "r"(column), "r"(row) : "memory");
}
__device__ __forceinline__ void load_for_both(u32 to, const CUtensorMap* map, u32 bar, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;"
                 ::"r"(to), "l"(map), "r"(bar), "r"(column), "r"(row), "h"((uint16_t)3) : "memory");
}
template <bool FIRST_OUT> __device__ __forceinline__ void store(const CUtensorMap* map, u32 from, int column, int row) {
    if (FIRST_OUT) asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%2, %3}], [%1], %4;" ::"l"(map), "r"(from), "r"(column), "r"(row), "l"(0x12F0000000000000ull) : "memory");
    else asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from), "r"(column), "r"(row) : "memory");
}
__device__ __forceinline__ uint64_t descriptor(u32 address, u32 leading) {
    return (uint64_t)((address & 0x3FFFF) >> 4) | (uint64_t)(leading >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}
template <int N, int TRANS> struct Mma;
@WGMMA@
__device__ __forceinline__ u32 packed(float a, float b) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
    return r;
}

// kind 0: 256 x 256 of a cluster; 1: rows 128 to 255 of a diagonal square, a block each; 2: two diagonal blocks of 128, a block each; 3: slim
struct Job { int kind, row, column; };
__device__ __forceinline__ bool job_of(const Shape& s, int phase, int number, int rank, Job& j) {
    const int squares = s.rows / 256;
    if (phase == 2) {
        const int full = squares * s.full_columns, slim = (s.columns - 256 * s.full_columns + SLIM - 1) / SLIM * squares;
        if (number >= full + slim) return false;
        j.kind = number < full ? 0 : 3;
        const int n = number < full ? number : number - full;
        j.row = n % squares * 256 + 128 * rank;
        j.column = number < full ? n / squares * 256 : 256 * s.full_columns + n / squares * SLIM;
        return true;
    }
    const int full = squares * (squares - 1) / 2;
    if (number < full) {
        int r = int((1.0f + sqrtf(1.0f + 8.0f * number)) * 0.5f);
        while (r * (r - 1) / 2 > number) --r;
        while (r * (r + 1) / 2 <= number) ++r;
        j.kind = 0, j.row = 256 * r + 128 * rank, j.column = 256 * (number - r * (r - 1) / 2);
        return true;
    }
    number -= full;
    if (number < squares / 2) {
        const int r = 2 * number + rank;
        j.kind = 1, j.row = 256 * r + 128, j.column = 256 * r;
        return true;
    }
    number -= squares / 2;
    if (number >= squares / 4) return false;
    j.kind = 2, j.row = j.column = 256 * (4 * number + 2 * rank);  // and 256 further
    return true;
}

struct Consumer {
    u32 ring, full, empty, slots;
    int group, warp, lane, stage;
    u32 parity;
    __device__ __forceinline__ void release(int at) const {
        if (threadIdx.x % 128 < CLUSTER) bar_arrive_at(empty + 8 * at, threadIdx.x % 128);
    }
    __device__ __forceinline__ void sync() const { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }
};

template <int H> __device__ __forceinline__ void pin(float (&sums)[H]) {
    #pragma unroll
    for (int i = 0; i < H; ++i) asm volatile("" : "+f"(sums[i]) :: "memory");
}

// The sums of `steps` steps; all are finished, and the last stage is not yet released: it is returned.
template <int N, int TRANS, bool OWN>
__device__ __forceinline__ int multiply(Consumer& c, float (&sums)[N / 2], int steps, int keep, int signal) {
    int before = 0;
    if (PIN) pin(sums);
    #pragma unroll 1
    for (int k = 0; k < steps; ++k) {
        bar_wait(c.full + 8 * c.stage, c.parity);
        if (SKEW && k == signal && c.group == 0) asm volatile("bar.arrive 3, 256;" ::: "memory");
        const u32 at = c.ring + c.stage * STAGE_BYTES;
        const uint64_t a = descriptor(at + c.group * (PART / 2), 16), b = descriptor(OWN ? at : at + PART, TRANS ? 8192 : 16);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        if (PIN) pin(sums);
        #pragma unroll
        for (int i = 0; i < 4; ++i) Mma<N, TRANS>::run(sums, a + 2 * i, b + (TRANS ? 128 : 2) * i, keep | k | i);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        if (k) {
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            c.release(before);
        }
        before = c.stage;
        if (++c.stage == STAGES) c.stage = 0, c.parity ^= 1;
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    pin(sums);
    return before;
}

__device__ __forceinline__ float low(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high(u32 v) { return __uint_as_float(v & 0xFFFF0000u); }

// 64 rows and N columns by this warpgroup. PHASE 0: sums; 1: factor * (sums + addend * G); 2: sums + addend * X.
template <int PHASE, int N, bool OWN>
__device__ __forceinline__ void tile_of(Consumer& c, int steps, int row, int column, bool mirrored, float addend, float factor,
                                        const CUtensorMap* out, const CUtensorMap* out_slim, const uint16_t* more, int width) {
    constexpr int TRANS = PHASE == 2;
    float sums[N / 2];
    const int w = c.warp % 4, l8 = c.lane % 8, l16 = c.lane / 16, odd = c.lane / 8 % 2;
    const int own_row = row + 64 * c.group;
    if (SKEW && c.group == 1) asm volatile("bar.sync 3, 256;" ::: "memory");
    if (PHASE == 0 || LATE) {
        c.release(multiply<N, TRANS, OWN>(c, sums, steps, 0, SKEW));
    } else {
        const int until = own_row / 64 + 1;
        const int at = multiply<N, TRANS, OWN>(c, sums, until, 0, min(SKEW, until - 1));
        const u32 b = c.ring + at * STAGE_BYTES + (OWN ? 0 : PART);
        #pragma unroll
        for (int j = 0; j < N / 16; ++j) {
            u32 v[4];
            if (TRANS) {
                const u32 from = b + j / 4 * 8192 + (16 * w + 8 * odd + l8) * 128 + ((j % 4 * 2 + l16) ^ l8) * 16;
                asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(from) : "memory");
            } else {
                const u32 from = b + (16 * j + 8 * l16 + l8) * 128 + ((2 * w + odd) ^ l8) * 16;
                asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(from) : "memory");
            }
            #pragma unroll
            for (int q = 0; q < 4; ++q) {
                sums[8 * j + 2 * q] += addend * low(v[q]);
                sums[8 * j + 2 * q + 1] += addend * high(v[q]);
            }
        }
        c.sync();
        c.release(at);
        if (until < steps) c.release(multiply<N, TRANS, OWN>(c, sums, steps - until, 1, -1));
    }
    if (PHASE && LATE) {
        const uint16_t* from = more + int64_t(own_row + 16 * w + c.lane / 4) * width + column + 2 * (c.lane % 4);
        #pragma unroll
        for (int slice = 0; slice < (N + 31) / 32; ++slice) {
            u32 v[8];
            #pragma unroll
            for (int i = 0; i < 8; ++i) {
                v[i] = 0;
                if (8 * slice + i < N / 4 && (N % 64 == 0 || column + 32 * slice + 8 * (i / 2) < width)) asm volatile("ld.global.cg.b32 %0, [%1];" : "=r"(v[i]) : "l"(from + int64_t(i % 2 * 8) * width + 32 * slice + 8 * (i / 2)) : "memory");
            }
            #pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (8 * slice + i >= N / 4) continue;
                sums[16 * slice + 2 * i] += addend * low(v[i]);
                sums[16 * slice + 2 * i + 1] += addend * high(v[i]);
            }
        }
    }
    if (PHASE == 1)
        #pragma unroll
        for (int i = 0; i < N / 2; ++i) sums[i] *= factor;
    #pragma unroll
    for (int slice = 0; slice < (N + 63) / 64; ++slice) {
        const u32 slot = c.slots + (PHASE == 2 ? slice % 2 * SLOT_BYTES : 0);
        const bool slim = 64 * slice + 64 > N;
        if (threadIdx.x % 128 == 0) {
            if (PHASE == 2) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
            else asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
        }
        c.sync();
        const bool mirror = PHASE != 2 && !OWN && (mirrored || slice < 2);
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (64 * slice + 16 * j >= N) continue;
            u32 v[4];
            #pragma unroll
            for (int q = 0; q < 4; ++q) v[q] = packed(sums[32 * slice + 8 * j + 2 * q], sums[32 * slice + 8 * j + 2 * q + 1]);
            const int r = 16 * w + 8 * odd + l8;
            const u32 to = slim ? slot + r * (N % 64 * 2) + j * 32 + l16 * 16 : slot + r * 128 + ((2 * j + l16) ^ l8) * 16;
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
            if (mirror) {
                const u32 turned = slot + SLOT_BYTES + (16 * j + 8 * l16 + l8) * 128 + ((2 * w + odd) ^ l8) * 16;
                asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(turned), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
            }
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        c.sync();
        if (threadIdx.x % 128 == 0) {
            store<PHASE == 2 && HINTS>(slim ? out_slim : out, slot, column + 64 * slice, own_row);
            if (mirror) store<false>(out, slot + SLOT_BYTES, own_row, column + 64 * slice);
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }
    }
}

__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) newton_schulz(const __grid_constant__ Maps maps, const Shape s) {
    extern __shared__ __align__(1024) uint8_t raw[];
    const u32 ring = (u32)__cvta_generic_to_shared(raw), slots = ring + STAGES * STAGE_BYTES, full = slots + 4 * SLOT_BYTES, empty = full + 8 * STAGES, done = empty + 8 * STAGES;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, group = warp / 4;
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    if (threadIdx.x == 0) {
        if (ring % 1024) __trap();
        for (int i = 0; i < STAGES; ++i) bar_init(full + 8 * i, 1), bar_init(empty + 8 * i, 2 * CLUSTER);
        bar_init(done, 2);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    const int cluster = blockIdx.x / CLUSTER;
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp == 8 && lane == 0) {
            int stage = 0;
            u32 parity = 1;
            for (int phase = s.first; phase < s.last; ++phase) {
                if (phase > s.first) {  // all blocks have stored
                    bar_wait(done, (phase - s.first - 1) & 1);
                    __threadfence();
                    const unsigned long long ticket = atomicAdd(s.counter, 1ull), goal = (ticket / gridDim.x + 1) * gridDim.x;
                    unsigned long long now;
                    do asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(now) : "l"(s.counter) : "memory"); while (now < goal);
                    asm volatile("fence.proxy.async;" ::: "memory");
                }
                const int steps = (phase == 0 ? s.columns : s.rows) / 64;
                const CUtensorMap* rows_map = phase == 0 ? &maps.x_rows : phase == 1 ? &maps.g_rows : &maps.p_rows;
                Job j;
                for (int number = cluster; job_of(s, phase, number, rank, j); number += s.clusters) {
                    const int turns = j.kind == 2 ? 2 : 1;
                    for (int turn = 0; turn < turns; ++turn, j.row += 256) {
                        for (int k = 0; k < steps; ++k) {
                            const u32 bar = full + 8 * stage, at = ring + stage * STAGE_BYTES;
                            bar_wait(empty + 8 * stage, parity);
                            bar_expect(bar, j.kind == 2 ? PART : STAGE_BYTES);
                            load(at, rows_map, bar, 64 * k, j.row);
                            if (phase == 2) {
                                const u32 to = at + PART + rank * PART;
                                load_for_both(to, &maps.x_panel, bar, j.column + 128 * rank, 64 * k);
                                load_for_both(to + PART / 2, &maps.x_panel, bar, j.column + 128 * rank + 64, 64 * k);
                            } else if (j.kind == 0) {
                                load_for_both(at + PART + rank * PART, rows_map, bar, 64 * k, j.column + 128 * rank);
                            } else if (j.kind == 1) {
                                load(at + PART, rows_map, bar, 64 * k, j.column);
                                load(at + 2 * PART, rows_map, bar, 64 * k, j.column + 128);
                            }
                            if (++stage == STAGES) stage = 0, parity ^= 1;
                        }
                    }
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        Consumer c = {ring, full, empty, slots + group * 2 * SLOT_BYTES, group, warp, lane, 0, 0};
        for (int phase = s.first; phase < s.last; ++phase) {
            Job j;
            for (int number = cluster; job_of(s, phase, number, rank, j); number += s.clusters) {
                if (phase == 2) {
                    #define LAST(n) tile_of<2, n, false>(c, s.rows / 64, j.row, j.column, false, s.a, 1.0f, &maps.y_tile, &maps.y_slim, s.x, s.columns)
                    if (!NARROW) LAST(256);
                    else if (!ORDER) { if (j.kind == 0) LAST(256); else LAST(NARROW ? SLIM : 256); }
                    else {
                        bool more = true;
                        for (; more && j.kind == 0; more = job_of(s, phase, number += s.clusters, rank, j)) LAST(256);
                        for (; more; more = job_of(s, phase, number += s.clusters, rank, j)) LAST(NARROW ? SLIM : 256);
                    }
                } else if (phase == 1) {
                    if (j.kind < 2) tile_of<1, 256, false>(c, s.rows / 64, j.row, j.column, j.kind == 0, s.b / s.c, s.c, &maps.p_tile, &maps.p_tile, s.g, s.rows);
                    else for (int t = 0; t < 512; t += 256) tile_of<1, 128, true>(c, s.rows / 64, j.row + t, j.row + t, false, s.b / s.c, s.c, &maps.p_tile, &maps.p_tile, s.g, s.rows);
                } else {
                    if (j.kind < 2) tile_of<0, 256, false>(c, s.columns / 64, j.row, j.column, j.kind == 0, 0.0f, 1.0f, &maps.g_tile, &maps.g_tile, s.g, s.rows);
                    else for (int t = 0; t < 512; t += 256) tile_of<0, 128, true>(c, s.columns / 64, j.row + t, j.row + t, false, 0.0f, 1.0f, &maps.g_tile, &maps.g_tile, s.g, s.rows);
                }
            }
            if (threadIdx.x % 128 == 0) {
                asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
                asm volatile("fence.proxy.async;" ::: "memory");
                __threadfence();
                bar_arrive(done);
            }
        }
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

#define MUST(call) do { int error = int(call); if (error) return error; } while (0)

int map_of(CUtensorMap& map, const void* data, int rows, int columns, int box_rows, int box_columns) {
    static void* encode = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (!encode) MUST(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &result));
    cuuint64_t sizes[2] = {(cuuint64_t)columns, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)columns * 2};
    cuuint32_t box[2] = {(cuuint32_t)box_columns, (cuuint32_t)box_rows}, one[2] = {1, 1};
    CUresult error = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void*)data, sizes, strides, box, one,
        CU_TENSOR_MAP_INTERLEAVE_NONE, box_columns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return error == CUDA_SUCCESS ? 0 : 10000 + int(error);
}

// The longest share of a cluster in the last product, in columns.
long longest(int squares, int full, int slim, int clusters) {
    long most = 0;
    for (int c = 0; c < clusters; ++c) {
        long sum = 0;
        for (int n = c; n < squares * (full + slim); n += clusters) sum += n < squares * full ? 256 : SLIM;
        if (sum > most) most = sum;
    }
    return most;
}

int step(void* x, void* g, void* p, void* y, void* counter, int rows, int columns, int fused, int narrow, float a, float b, float c, cudaStream_t stream) {
    static int clusters = 0;
    if (!clusters) {
        int device, multiprocessors;
        MUST(cudaGetDevice(&device));
        MUST(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
        MUST(cudaFuncSetAttribute(newton_schulz, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
        cudaLaunchConfig_t config = {};
        cudaLaunchAttribute attribute[1];
        attribute[0].id = cudaLaunchAttributeClusterDimension;
        attribute[0].val.clusterDim.x = CLUSTER, attribute[0].val.clusterDim.y = attribute[0].val.clusterDim.z = 1;
        config.gridDim = multiprocessors / CLUSTER * CLUSTER, config.blockDim = THREADS, config.dynamicSmemBytes = SHARED_BYTES, config.attrs = attribute, config.numAttrs = 1;
        int most = 0;
        MUST(cudaOccupancyMaxActiveClusters(&most, newton_schulz, &config));
        if (most < 1) return 20000;
        clusters = most < multiprocessors / CLUSTER ? most : multiprocessors / CLUSTER;
    }
    Maps m;
    MUST(map_of(m.x_rows, x, rows, columns, 128, 64));
    MUST(map_of(m.x_panel, x, rows, columns, 64, 64));
    MUST(map_of(m.g_rows, g, rows, rows, 128, 64));
    MUST(map_of(m.g_tile, g, rows, rows, 64, 64));
    MUST(map_of(m.p_rows, p, rows, rows, 128, 64));
    MUST(map_of(m.p_tile, p, rows, rows, 64, 64));
    MUST(map_of(m.y_tile, y, rows, columns, 64, 64));
    MUST(map_of(m.y_slim, y, rows, columns, 64, SLIM % 64));
    Shape s = {rows, columns, columns / 256, clusters, 0, 3, (unsigned long long*)counter, a, b, c, (const uint16_t*)x, (const uint16_t*)g};
    if (NARROW && columns >= 1024 && longest(rows / 256, columns / 256 - 4, 5, clusters) < longest(rows / 256, columns / 256, 0, clusters)) s.full_columns -= 4;
    for (int phase = 0; phase < (fused ? 1 : 3); ++phase) {
        if (!fused) s.first = phase, s.last = phase + 1;
        newton_schulz<<<clusters * CLUSTER, THREADS, SHARED_BYTES, stream>>>(m, s);
        MUST(cudaGetLastError());
    }
    return 0;
}

static PyObject* run(PyObject*, PyObject* const* given, Py_ssize_t) {  // x, g, p, y, counter, rows, columns, fused, narrow, stream, a, b, c
    long long v[10];
    for (int i = 0; i < 10; ++i) v[i] = PyLong_AsLongLong(given[i]);
    float f[3];
    for (int i = 0; i < 3; ++i) f[i] = float(PyFloat_AsDouble(given[10 + i]));
    return PyLong_FromLong(step((void*)v[0], (void*)v[1], (void*)v[2], (void*)v[3], (void*)v[4], int(v[5]), int(v[6]), int(v[7]), int(v[8]), f[0], f[1], f[2], (cudaStream_t)v[9]));
}
static PyMethodDef methods[] = {{"run", (PyCFunction)(void*)run, METH_FASTCALL, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "newton_schulz", "", -1, methods};
#define INIT(name) PyInit_##name
#define INIT_OF(name) INIT(name)
PyMODINIT_FUNC INIT_OF(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
""".replace("@WGMMA@", wgmma(256, 0) + wgmma(128, 0) + wgmma(256, 1) + wgmma(SLIM, 1))


@functools.cache
def extension():
    return load_inline(
        f"newton_schulz_{HINTS}_{SKEW}_{SLIM}_{NARROW}_{ORDER}_{PIN}_{LATE}",
        "",
        CUDA,
        no_implicit_headers=True,
        with_pytorch_error_handling=False,
        extra_cuda_cflags=["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", f"-DHINTS={HINTS}", f"-DSKEW={SKEW}", f"-DSLIM_COLUMNS={SLIM}", f"-DNARROW={NARROW}", f"-DORDER={ORDER}", f"-DPIN={PIN}", f"-DLATE={LATE}"],
    ).run


@functools.cache
def counter(device, stream):
    """Of the barriers of the grid: each adds the number of blocks."""
    return torch.zeros(1, dtype=torch.int64, device=device)


class ModelNew(nn.Module):
    def forward(self, x):
        if x.dim() != 2 or x.dtype != torch.bfloat16 or not x.is_cuda:
            raise ValueError("x must be a bf16 matrix on a GPU")
        rows, columns = x.shape
        if not rows or not columns or rows % 1024 or columns % 256 or max(rows, columns) > 32768:
            raise ValueError("rows must be a multiple of 1024, columns of 256")
        x = x.contiguous()
        if x.data_ptr() % 16:
            x = x.clone()
        with torch.cuda.device(x.device):
            y = torch.empty_like(x)
            between = torch.empty((2, rows, rows), dtype=x.dtype, device=x.device)
            stream = torch.cuda.current_stream().cuda_stream
            error = extension()(
                x.data_ptr(),
                between.data_ptr(),
                between.data_ptr() + 2 * rows * rows,
                y.data_ptr(),
                counter(x.device, stream).data_ptr(),
                rows,
                columns,
                FUSED,
                NARROW,
                stream,
                A,
                B,
                C,
            )
        if error:
            raise RuntimeError(f"newton_schulz: CUDA error {error}")
        return y
