"""Gradient through GELU (tanh form) and the linear layer before it, one persistent launch of CUDA C++ for Hopper.

 * dh = dy * gelu'(h) goes to a scratch matrix in bf16, in units of some rows x 256 columns, in the order in which the product needs
   them: by the three free warps of each producer's warpgroup, under the product, and by clusters that no tile is left for.
   A counter for each 128 rows x 256 columns tells the producers. Columns' sums go to fp32 sums by red, the last unit of 256
   columns hands them over.
 * product: clusters of two blocks, each 128 rows x 256 columns a tile; a producer warp brings the operands by TMA, half of the
   weight's tile (k is its slow dimension) each and for both blocks; two consumer warpgroups of 64 rows.
evals/trials/gelu_gradient states it.
"""

import functools

import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

PROBE = ""
STAGES = 4
GROUP = 4  # pairs of 128 rows that are in work at a time
KSNAKE = 0  # every other group of pairs takes k backwards
HINT = 1  # results leave the L2 first
SEP = 0  # 1: the slope in a kernel before
PACE = 0  # ns that a free warp sleeps after a unit
FIRST_ROWS = 32  # rows of a unit in the first group
ROWS = 32  # and later
HELP = 1  # clusters without tiles take units


def wgmma():
    sums, operands = ", ".join(f"%{i}" for i in range(128)), ", ".join(f'"+f"(d[{i}])' for i in range(128))
    return f"""__device__ __forceinline__ void multiply(float (&d)[128], uint64_t a, uint64_t b, int keep) {{
    asm volatile("{{.reg .pred p; setp.ne.b32 p, %130, 0; "
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {{{sums}}}, %128, %129, p, 1, 1, 0, 1;}}"
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
constexpr int BM = 128, BN = 256, BK = 64, CLUSTER = 2, THREADS = 384, CHUNK = 256;
constexpr u32 A_BYTES = BM * BK * 2, B_BYTES = BN * BK * 2, STAGE_BYTES = A_BYTES + B_BYTES, SLOT_BYTES = 64 * 64 * 2;
constexpr u32 SHARED_BYTES = STAGES * STAGE_BYTES + 4 * SLOT_BYTES + 16 * STAGES + 1024 + 16;
static_assert(SHARED_BYTES <= 232448, "shared memory");

struct Maps { CUtensorMap a, b, out; };
struct Plan { int pairs, pieces, steps, tiles, workers, tokens, hidden, chunks, units; };

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
__device__ __forceinline__ void load_for_both(u32 to, const CUtensorMap* map, u32 bar, int k, int panel) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%6, %3, %4}], [%2], %5;"
                 ::"r"(to), "l"(map), "r"(bar), "r"(k), "r"(panel), "h"((uint16_t)3), "r"(0) : "memory");
}
// 128-byte swizzle, stride 1024; leading: the next panel of 64 columns where k is the slow dimension
__device__ __forceinline__ uint64_t descriptor(u32 address, u32 leading) {
    return (uint64_t)((address & 0x3FFFF) >> 4) | (uint64_t)(leading >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}
@WGMMA@
__device__ __forceinline__ int acquire(const int* p) {
    int v;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ float low(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high(u32 v) { return __uint_as_float(v & 0xffff0000u); }
__device__ __forceinline__ u32 pack(float l, float h) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(h), "f"(l));
    return r;
}
// gelu'(x) = s (1 + (1 - s) 2 x u'), s = 1 / (1 + e), e = exp(-2 u), u = c (x + a x^3); |x| <= 8: beyond it is 0 or 1
__device__ __forceinline__ float slope(float x) {
    constexpr double c = 0.7978845608028654, a = 0.044715, l = 1.4426950408889634;
    const float x2 = x * x;
    float e, s;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * fmaf(x2, (float)(-2 * l * c * a), (float)(-2 * l * c))));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.0f + e));
    return s * fmaf(e * s, x * fmaf(x2, (float)(6 * c * a), (float)(2 * c)), 1.0f);
}
__device__ __forceinline__ u32 through(u32 dy, u32 h, float& sum0, float& sum1) {
    asm("min.NaN.bf16x2 %0, %0, %1;" : "+r"(h) : "r"(0x41004100u));
    asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(h) : "r"(0xC100C100u));
    const u32 r = pack(low(dy) * slope(low(h)), high(dy) * slope(high(h)));
    sum0 += low(r), sum1 += high(r);
    return r;
}
__device__ __forceinline__ uint4 stream_in(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
struct Held { uint4 dy[4], h[4]; };
__device__ __forceinline__ void bring(Held& v, const uint4* dy, const uint4* h, int64_t at, int pitch, int rows) {
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        v.dy[i] = i < rows ? stream_in(dy + at + (int64_t)i * pitch) : make_uint4(0, 0, 0, 0);
        v.h[i] = i < rows ? stream_in(h + at + (int64_t)i * pitch) : make_uint4(0, 0, 0, 0);
    }
}
__device__ __forceinline__ void finish(const Held& v, uint4* dh, int64_t at, int pitch, int rows, float (&sum)[8]) {
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint4 r = make_uint4(through(v.dy[i].x, v.h[i].x, sum[0], sum[1]), through(v.dy[i].y, v.h[i].y, sum[2], sum[3]),
                                   through(v.dy[i].z, v.h[i].z, sum[4], sum[5]), through(v.dy[i].w, v.h[i].w, sum[6], sum[7]));
        if (i < rows) dh[at + (int64_t)i * pitch] = r;
    }
}
__device__ __forceinline__ void add4(float* to, float a, float b, float c, float d) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
// control: 0 blocks that ended, 1 tickets, then rows that are summed of each 256 columns, then ready rows of 128 rows x 256 columns
__device__ __forceinline__ void take_units(const Plan& plan, int first, int workers, const uint4* dy, const uint4* h, uint4* dh, float* sums, float* total, int* control, int lane) {
    const int early_rows = min(plan.tokens, GROUP * CLUSTER * BM), early_blocks = (early_rows + FIRST_ROWS - 1) / FIRST_ROWS, early = early_blocks * plan.chunks;
    constexpr int later_blocks = GROUP * CLUSTER * BM / ROWS;
    const int pitch = plan.hidden / 8;
    int* summed = control + 2;
    int* ready = summed + plan.chunks;
    for (int u = first; u < plan.units;) {
        int next = 0;
        if (lane == 0) next = atomicAdd(control + 1, 1);
        int chunk, row, rows;
        if (u < early) chunk = u / early_blocks, row = (u - chunk * early_blocks) * FIRST_ROWS, rows = FIRST_ROWS;
        else {
            const int v = u - early, per = later_blocks * plan.chunks, g = v / per, r = v - g * per;
            chunk = r / later_blocks, row = (g + 1) * GROUP * CLUSTER * BM + (r - chunk * later_blocks) * ROWS, rows = ROWS;
        }
        rows = min(rows, plan.tokens - row);
        if (rows > 0) {
            const int piece = chunk * (CHUNK / 8) + lane;
            const bool inside = piece < pitch;
            float sum[8];
            #pragma unroll
            for (int i = 0; i < 8; ++i) sum[i] = 0.0f;
            if (inside) {
                int64_t at = (int64_t)row * pitch + piece;
                Held one, two;
                bring(one, dy, h, at, pitch, rows);
                #pragma unroll 1
                for (int r = 0; r < rows; r += 8, at += 8 * (int64_t)pitch) {
                    bring(two, dy, h, at + 4 * (int64_t)pitch, pitch, rows - r - 4);
                    finish(one, dh, at, pitch, rows - r, sum);
                    bring(one, dy, h, at + 8 * (int64_t)pitch, pitch, rows - r - 8);
                    finish(two, dh, at + 4 * (int64_t)pitch, pitch, rows - r - 4, sum);
                }
                add4(sums + 8 * piece, sum[0], sum[1], sum[2], sum[3]);
                add4(sums + 8 * piece + 4, sum[4], sum[5], sum[6], sum[7]);
            }
            asm volatile("fence.proxy.async;" ::: "memory");  // the rows are written: TMA of other blocks may read them
            __threadfence();
            __syncwarp();
            int before = 0;
            if (lane == 0) {
                asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(ready + row / BM * plan.chunks + chunk), "r"(rows) : "memory");
                before = atomicAdd(summed + chunk, rows);
            }
            if (__shfl_sync(~0u, before, 0) + rows == plan.tokens) {  // the last rows of these columns
                __threadfence();
                if (inside) {
                    #pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        float4* s = (float4*)(sums + 8 * piece) + i;
                        ((float4*)(total + 8 * piece))[i] = __ldcg(s);
                        *s = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    }
                }
            }
            if (PACE && u >= early) __nanosleep(PACE);
        }
        u = workers + __shfl_sync(~0u, next, 0);
    }
}

__global__ void __launch_bounds__(512, 1) slope_kernel(const __grid_constant__ Plan plan, const uint4* dy, const uint4* h, uint4* dh, float* sums, float* total, int* control) {
    take_units(plan, blockIdx.x + gridDim.x * (threadIdx.x / 32), gridDim.x * 16, dy, h, dh, sums, total, control, threadIdx.x % 32);
}

__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    product_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Plan plan, const uint4* dy, const uint4* h, uint4* dh, float* sums, float* total, int* control) {
    extern __shared__ uint8_t raw[];
    const u32 ring = (shared_address(raw) + 1023) & ~1023u, slots = ring + STAGES * STAGE_BYTES, full = slots + 4 * SLOT_BYTES, empty = full + 8 * STAGES;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, group = warp / 4;
    const int c = blockIdx.x / CLUSTER;
    u32 block;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) bar_init(full + 8 * i, 1), bar_init(empty + 8 * i, 8 * CLUSTER);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    const int per = GROUP * plan.pieces;
    if (c >= plan.workers || (group == 2 && warp != 8)) {
        if (!SEP && !BARE && (HELP || c < plan.workers)) {
            const int blocks = plan.workers * CLUSTER, free_warps = 3 * blocks, others = HELP ? ((int)gridDim.x - blocks) * 12 : 0;
            const int first = c < plan.workers ? (warp - 9) * blocks + blockIdx.x : free_warps + (blockIdx.x - blocks) * 12 + warp;
            take_units(plan, first, free_warps + others, dy, h, dh, sums, total, control, lane);
        }
    } else if (group == 2) {
        if (lane == 0) {
            int stage = 0;
            u32 parity = 1;
            const int* ready = control + 2 + plan.chunks;
            for (int tile = c; tile < plan.tiles; tile += plan.workers) {
                const int g = tile / per, rows = min(GROUP, plan.pairs - g * GROUP), r = tile - g * per, piece = r / rows, pair = g * GROUP + r - piece * rows;
                const int row = (pair * CLUSTER + block) * BM, panel = piece * (BN / 64) + block * (BN / 128), goal = BARE ? 0 : min(BM, plan.tokens - row);
                const int* flag = ready + row / BM * plan.chunks;
                int have = -1;
                for (int i = 0; i < plan.steps; ++i) {
                    const int k = KSNAKE && (g & 1) ? plan.steps - 1 - i : i;
                    const u32 bar = full + 8 * stage, at = ring + stage * STAGE_BYTES;
                    bar_wait(empty + 8 * stage, parity);
                    bar_expect(bar, STAGE_BYTES);
                    load_for_both(at + A_BYTES + block * (B_BYTES / 2), &maps.b, bar, k * BK, panel);
                    if (goal > 0 && k / (CHUNK / BK) != have) {
                        have = k / (CHUNK / BK);
                        while (acquire(flag + have) < goal) __nanosleep(32);
                        asm volatile("fence.proxy.async;" ::: "memory");
                    }
                    load(at, &maps.a, bar, k * BK, row);
                    const int next = (KSNAKE && (g & 1) ? k - 1 : k + 1) / (CHUNK / BK);
                    if (goal > 0 && i + 1 < plan.steps && next != have && acquire(flag + next) >= goal) {  // look ahead, while the ring is full
                        have = next;
                        asm volatile("fence.proxy.async;" ::: "memory");
                    }
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
            }
        }
    } else {
        int stage = 0;
        u32 parity = 0;
        uint64_t evict_first;
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(evict_first));
        float acc[128];
        #pragma unroll
        for (int i = 0; i < 128; ++i) acc[i] = 0.0f;
        for (int tile = c; tile < plan.tiles; tile += plan.workers) {
            const int g = tile / per, rows = min(GROUP, plan.pairs - g * GROUP), r = tile - g * per, piece = r / rows, pair = g * GROUP + r - piece * rows;
            int before = 0;
            for (int k = 0; k < plan.steps; ++k) {
                const uint64_t a = descriptor(ring + stage * STAGE_BYTES + group * (A_BYTES / 2), 16), b = descriptor(ring + stage * STAGE_BYTES + A_BYTES, 64 * BK * 2);
                bar_wait(full + 8 * stage, parity);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
                multiply(acc, a, b, k);
                #pragma unroll
                for (int n = 1; n < 4; ++n) multiply(acc, a + 2 * n, b + 128 * n, 1);
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                if (k > 0) {
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

            // acc[4 j + i]: row lane / 4 + 8 (i / 2), column 8 j + 2 (lane % 4) + i % 2
            const int row = (pair * CLUSTER + block) * BM + group * 64;
            const int at_row = (warp & 3) * 16 + (lane & 15);
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
                if ((threadIdx.x & 127) == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
                asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");  // the slots are free
                #pragma unroll
                for (int p = 0; p < 8; ++p) {
                    float* d = acc + 64 * half + 8 * p;
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
                        const int column = piece * BN + half * 128 + 64 * q;
#if HINT
                        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%2, %3}], [%1], %4;" ::"l"(&maps.out), "r"(slot), "r"(column), "r"(row), "l"(evict_first) : "memory");
#else
                        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&maps.out), "r"(slot), "r"(column), "r"(row) : "memory");
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
    u32* last = (u32*)raw;
    if (threadIdx.x == 0) {
        __threadfence();
        *last = atomicAdd(control, 1) == (int)gridDim.x - 1;
    }
    __syncthreads();
    if (*last) {
        const int count = 2 + plan.chunks * (1 + (plan.tokens + BM - 1) / BM);
        for (int i = threadIdx.x; i < count; i += THREADS) control[i] = 0;
    }
}

static int describe(CUtensorMap* map, const void* data, int dimensions, const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box) {
    static decltype(&cuTensorMapEncodeTiled) encode = nullptr;
    if (!encode) {
        void* f = nullptr;
        cudaDriverEntryPointQueryResult found;
        cudaError_t e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found);
        if (e || !f) return 10001;
        encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(f);
    }
    const cuuint32_t step[3] = {1, 1, 1};
    CUresult r = encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, dimensions, (void*)data, sizes, strides, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return r == CUDA_SUCCESS ? 0 : 20000 + (int)r;
}

static int clusters_of() {
    if (cudaFuncSetAttribute(product_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES)) return -1;
    cudaLaunchAttribute shape = {};
    shape.id = cudaLaunchAttributeClusterDimension, shape.val.clusterDim.x = CLUSTER, shape.val.clusterDim.y = 1, shape.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(CLUSTER * 66), config.blockDim = dim3(THREADS), config.dynamicSmemBytes = SHARED_BYTES, config.attrs = &shape, config.numAttrs = 1;
    int clusters = 0;
    return cudaOccupancyMaxActiveClusters(&clusters, product_kernel, &config) ? -2 : clusters;
}

// dy, h, weight, dh, dx, total, sums, control, tokens, hidden, inputs, clusters, stream; without arguments: clusters that run at once
static PyObject* run(PyObject*, PyObject* const* given, Py_ssize_t count) {
    if (!count) return PyLong_FromLong(clusters_of());
    if (count != 13) { PyErr_SetString(PyExc_TypeError, "13 arguments"); return nullptr; }
    long long a[13];
    for (int i = 0; i < 13; ++i) a[i] = PyLong_AsLongLong(given[i]);
    const cuuint64_t tokens = a[8], hidden = a[9], inputs = a[10];
    const int clusters = (int)a[11];
    cudaStream_t stream = (cudaStream_t)a[12];
    Maps maps;
    {
        cuuint64_t sizes[2] = {hidden, tokens}, strides[1] = {hidden * 2};
        cuuint32_t box[2] = {64, BM};
        if (int e = describe(&maps.a, (void*)a[3], 2, sizes, strides, box)) return PyLong_FromLong(e);
    }
    {
        cuuint64_t sizes[3] = {64, hidden, inputs / 64}, strides[2] = {inputs * 2, 128};
        cuuint32_t box[3] = {64, BK, 2};
        if (int e = describe(&maps.b, (void*)a[2], 3, sizes, strides, box)) return PyLong_FromLong(e);
    }
    {
        cuuint64_t sizes[2] = {inputs, tokens}, strides[1] = {inputs * 2};
        cuuint32_t box[2] = {64, 64};
        if (int e = describe(&maps.out, (void*)a[4], 2, sizes, strides, box)) return PyLong_FromLong(e);
    }
    Plan plan = {};
    plan.tokens = (int)tokens, plan.hidden = (int)hidden;
    plan.pairs = (plan.tokens + 2 * BM - 1) / (2 * BM), plan.pieces = ((int)inputs + BN - 1) / BN, plan.steps = (plan.hidden + BK - 1) / BK;
    plan.chunks = (plan.hidden + CHUNK - 1) / CHUNK, plan.tiles = plan.pairs * plan.pieces;
    const int waves = (plan.tiles + clusters - 1) / clusters;
    plan.workers = (plan.tiles + waves - 1) / waves;
    const int group_rows = GROUP * CLUSTER * BM, early_rows = plan.tokens < group_rows ? plan.tokens : group_rows;
    plan.units = plan.chunks * ((early_rows + FIRST_ROWS - 1) / FIRST_ROWS + (plan.tokens - early_rows + group_rows - 1) / group_rows * (group_rows / ROWS));
    if (SEP && !BARE) slope_kernel<<<clusters * CLUSTER, 512, 0, stream>>>(plan, (const uint4*)a[0], (const uint4*)a[1], (uint4*)a[3], (float*)a[6], (float*)a[5], (int*)a[7]);
    product_kernel<<<clusters * CLUSTER, THREADS, SHARED_BYTES, stream>>>(maps, plan, (const uint4*)a[0], (const uint4*)a[1], (uint4*)a[3], (float*)a[6], (float*)a[5], (int*)a[7]);
    return PyLong_FromLong(cudaGetLastError());
}
static PyMethodDef methods[] = {{"run", (PyCFunction)(void*)run, METH_FASTCALL, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "gelu_linear_backward", "", -1, methods};
#define INIT(name) PyInit_##name
#define INIT_OF(name) INIT(name)
PyMODINIT_FUNC INIT_OF(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
"""


@functools.cache
def built():
    constants = "".join(f"#define {name} {value}\n" for name, value in (("STAGES", STAGES), ("GROUP", GROUP), ("KSNAKE", KSNAKE), ("HINT", HINT), ("SEP", SEP), ("PACE", PACE),
        ("FIRST_ROWS", FIRST_ROWS), ("ROWS", ROWS), ("HELP", HELP), ("BARE", int(PROBE == "product"))))
    source = constants + CUDA.replace("@WGMMA@", wgmma())
    flags = ["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a"]
    return load_inline("gelu_linear_backward", "", source, no_implicit_headers=True, extra_cuda_cflags=flags).run


@functools.cache
def clusters(device):
    if torch.cuda.get_device_properties(device).major != 9:
        raise ValueError("needs compute capability 9.0")
    count = built()()
    if count < 1:
        raise RuntimeError("the kernel does not fit on this GPU")
    return count


scratch = {}  # by device, stream and size: counters and sums that every launch leaves at zero


def space(device, stream, tokens, hidden):
    key = (device, stream, (tokens + 127) // 128, hidden)
    if key not in scratch:
        chunks = (hidden + 255) // 256
        scratch[key] = (torch.zeros(2 + chunks * (1 + key[2]), dtype=torch.int32, device=device), torch.zeros(chunks * 256, dtype=torch.float32, device=device))
    return scratch[key]


def aligned(t):
    t = t.contiguous()
    return t.clone() if t.data_ptr() % 16 else t


class ModelNew(nn.Module):
    def __init__(self, inputs: int, hidden: int):
        super().__init__()
        self.weight = nn.Parameter((torch.randn(hidden, inputs) / inputs**0.5).bfloat16())

    def forward(self, dy, h):
        hidden, inputs = self.weight.shape
        if dy.dim() != 2 or h.shape != dy.shape or dy.shape[1] != hidden or not dy.numel():
            raise ValueError("dy and h are tokens x hidden")
        if hidden % 8 or inputs % 64 or not inputs or dy.shape[0] >= 2**22 or hidden >= 2**20 or inputs >= 2**20:
            raise ValueError("hidden must be a multiple of 8, inputs of 64")
        if any(t.dtype != torch.bfloat16 or t.device != dy.device or not t.is_cuda for t in (dy, h, self.weight)):
            raise ValueError("bf16 on one GPU only")
        dy, h, weight = (aligned(t.detach()) for t in (dy, h, self.weight))
        tokens = dy.shape[0]
        with torch.cuda.device(dy.device):
            dx = torch.empty(tokens, inputs, dtype=dy.dtype, device=dy.device)
            total = torch.empty(hidden, dtype=torch.float32, device=dy.device)
            dh = torch.empty_like(dy)
            stream = torch.cuda.current_stream(dy.device).cuda_stream
            control, sums = space(dy.device, stream, tokens, hidden)
            tensors = (dy, h, weight, dh, dx, total, sums, control)
            error = built()(*(t.data_ptr() for t in tensors), tokens, hidden, inputs, clusters(dy.device), stream)
        if error:
            raise RuntimeError(f"gelu_linear_backward: CUDA error {error}")
        return dx, total
