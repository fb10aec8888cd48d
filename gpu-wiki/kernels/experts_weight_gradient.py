"""Weights' gradient of experts: dw[e] = dy[rows of e]^T x[rows of e], one persistent CUDA C++ kernel (TMA, wgmma, clusters of two).

 * A block's tile is 128 hidden x 256 width; both operands are MN-major (k is the token). The two blocks of a cluster work on
   neighbouring hidden rows and share x's panel: each loads half of it for both. A producer warp keeps a ring of stages full,
   across tiles; two consumer warpgroups own 64 x 256 sums each.
 * Experts are walked from the busiest to the least busy; clusters take tiles from an atomic counter, which only grows.
 * An expert's rows end anywhere: its last step multiplies only the 16-row slices it has, and consumers put zeros into the
   rows of the last slice that belong to the next expert.
 * Results leave by stmatrix and TMA while the other warpgroup multiplies.

evals/trials/experts_weight_gradient states it.
"""

import functools

import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

BK = 32
LAG = 0
HINTS = 1  # 1: the result is evicted first from the L2; 2: and the inputs last
ORDER = 0  # 0: hidden is walked first; 1: width
AHEAD = 3  # tiles that a cluster may claim ahead
PROBE = ""
MOST_EXPERTS = 160


def wgmma(n):
    half = n // 2
    sums, operands = ", ".join(f"%{i}" for i in range(half)), ", ".join(f'"+f"(d[{i}])' for i in range(half))
    return f"""__device__ __forceinline__ void multiply(float (&d)[{half}], uint64_t a, uint64_t b, int keep) {{
    asm volatile("{{.reg .pred p; setp.ne.b32 p, %{half + 2}, 0; "
                 "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{sums}}}, %{half}, %{half + 1}, p, 1, 1, 1, 1;}}"
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
constexpr int BM = 128, BN = 256, CLUSTER = 2, THREADS = 384, STAGES = 256 / BK;
constexpr u32 PANEL = 64 * BK * 2, A_BYTES = 2 * PANEL, B_BYTES = 4 * PANEL, STAGE_BYTES = A_BYTES + B_BYTES, SLOT_BYTES = 64 * 64 * 2;
constexpr u32 BARS = STAGES * STAGE_BYTES + 4 * SLOT_BYTES, TABLE = BARS + 24 * STAGES + 16 * AHEAD + 8 * ((AHEAD + 1) / 2);
constexpr u32 SHARED_BYTES = TABLE + 12 * MOST_EXPERTS;
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
__device__ __forceinline__ void send(u32 at, u32 bar, u32 block, u32 value) {  // to a block of the cluster
    asm volatile("{\n.reg .b32 a, b;\nmapa.shared::cluster.u32 a, %0, %2;\nmapa.shared::cluster.u32 b, %1, %2;\n"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [a], %3, [b];\n}" ::"r"(at), "r"(bar), "r"(block), "r"(value) : "memory");
}
__device__ __forceinline__ void load(u32 to, const CUtensorMap* map, u32 bar, int column, int row) {
    if (HINTS == 2) asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;"
                 ::"r"(to), "l"(map), "r"(bar), "r"(column), "r"(row), "l"(0x14F0000000000000ull) : "memory");
    else asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                 ::"r"(to), "l"(map), "r"(bar), "r"(column), "r"(row) : "memory");
}
__device__ __forceinline__ void load_for_both(u32 to, const CUtensorMap* map, u32 bar, int column, int row) {
    if (HINTS == 2) asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5, %6;"
                 ::"r"(to), "l"(map), "r"(bar), "r"(column), "r"(row), "h"((uint16_t)3), "l"(0x14F0000000000000ull) : "memory");
    else asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;"
                 ::"r"(to), "l"(map), "r"(bar), "r"(column), "r"(row), "h"((uint16_t)3) : "memory");
}
__device__ __forceinline__ void store(const CUtensorMap* map, u32 from, int column, int row, int expert) {
    if (HINTS) asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%2, %3, %4}], [%1], %5;" ::"l"(map), "r"(from), "r"(column), "r"(row), "r"(expert), "l"(0x12F0000000000000ull) : "memory");
    else asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map), "r"(from), "r"(column), "r"(row), "r"(expert) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ uint64_t descriptor(u32 address) {  // MN-major panels of 64 columns, a row of 128 bytes for each k, 128-byte swizzle
    return (uint64_t)((address & 0x3FFFF) >> 4) | (uint64_t)(PANEL >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}
@WGMMA@
__device__ __forceinline__ u32 packed(float a, float b) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
    return r;
}
__device__ __forceinline__ int lds(u32 at) {
    int v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ void sts(u32 at, int v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory"); }

struct Problem { int experts, pairs, pieces, tiles; unsigned long long turns; };

__device__ __forceinline__ void place(const Problem& s, int tile, int& rank, int& pair, int& piece) {
    const int each = s.pairs * s.pieces;
    rank = tile / each;
    const int within = tile - rank * each;
    if (ORDER) pair = within / s.pieces, piece = within - pair * s.pieces;
    else piece = within / s.pairs, pair = within - piece * s.pairs;
}

__global__ void __launch_bounds__(THREADS, 1)
    dw_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap dy_map, const __grid_constant__ CUtensorMap w_map,
              const int* __restrict__ offsets, unsigned long long* counter, Problem s) {
    extern __shared__ __align__(1024) uint8_t raw[];
    const u32 ring = shared_address(raw), slots = ring + STAGES * STAGE_BYTES, full = ring + BARS, empty = full + 8 * STAGES, lag_bar = empty + 8 * STAGES,
              tile_full = lag_bar + 8 * STAGES, tile_empty = tile_full + 8 * AHEAD, tile_slot = tile_empty + 8 * AHEAD, table = ring + TABLE;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, group = warp / 4;
    u32 block;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
    if (threadIdx.x == 0 && ring % 1024) __trap();
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) bar_init(full + 8 * i, 1), bar_init(empty + 8 * i, 2 * CLUSTER), bar_init(lag_bar + 8 * i, 1);
        for (int i = 0; i < AHEAD; ++i) bar_init(tile_full + 8 * i, 1), bar_init(tile_empty + 8 * i, 9 * CLUSTER);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    for (int e = threadIdx.x; e < s.experts; e += THREADS) {  // busiest first
        const int start = offsets[e], rows = max(offsets[e + 1] - start, 0);
        int rank = 0;
        for (int j = 0; j < s.experts; ++j) {
            const int other = max(offsets[j + 1] - offsets[j], 0);
            rank += other > rows || (other == rows && j < e);
        }
        sts(table + 12 * rank, start), sts(table + 12 * rank + 4, rows), sts(table + 12 * rank + 8, e);
    }
    __syncthreads();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    const int clusters = gridDim.x / CLUSTER;
    int tile = blockIdx.x / CLUSTER, turn = 0;
    u32 turn_parity = 0;
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp == 8 && lane == 0) {
            int stage = 0;
            u32 parity = 1;
            while (tile < s.tiles) {
                int rank, pair, piece;
                place(s, tile, rank, pair, piece);
                const int start = lds(table + 12 * rank), rows = lds(table + 12 * rank + 4), steps = (rows + BK - 1) / BK;
                const int m = (pair * CLUSTER + block) * BM, n = piece * BN + block * (BN / 2);
                for (int k = 0; k < steps; ++k) {
                    const u32 bar = full + 8 * stage, at = ring + stage * STAGE_BYTES, b = at + A_BYTES + block * (B_BYTES / 2);
                    bar_wait(empty + 8 * stage, parity);
                    if (NO_LOADS) bar_arrive(bar);
                    else {
                        bar_expect(bar, STAGE_BYTES);
                        load(at, &dy_map, bar, m, start + k * BK);
                        load(at + PANEL, &dy_map, bar, m + 64, start + k * BK);
                        load_for_both(b, &x_map, bar, n, start + k * BK);
                        load_for_both(b + PANEL, &x_map, bar, n + 64, start + k * BK);
                    }
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
                bar_expect(tile_full + 8 * turn, 4);
                bar_wait(tile_full + 8 * turn, turn_parity);
                tile = lds(tile_slot + 4 * turn);
                if (tile >= 0) bar_arrive_at(tile_empty + 8 * turn, 0);  // always: it waits for the load
                if (++turn == AHEAD) turn = 0, turn_parity ^= 1;
            }
        } else if (warp == 9 && lane == 0 && block == 0) {
            unsigned long long base = 0;
            turn_parity = 1;
            for (bool first = true; tile < s.tiles; first = false) {
                bar_wait(tile_empty + 8 * turn, turn_parity);
                const unsigned long long ticket = atomicAdd(counter, 1ull);
                if (first) base = ticket - ticket % s.turns;
                tile = clusters + (int)(ticket - base);
                send(tile_slot + 4 * turn, tile_full + 8 * turn, 0, tile);
                send(tile_slot + 4 * turn, tile_full + 8 * turn, 1, tile);
                if (++turn == AHEAD) turn = 0, turn_parity ^= 1;
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        int stage = 0;
        u32 parity = 0;
        float acc[128];
        #pragma unroll
        for (int i = 0; i < 128; ++i) acc[i] = 0.0f;
        const u32 slot = slots + group * 2 * SLOT_BYTES;
        const int thread = threadIdx.x % 128;
        const int at_row = warp % 4 * 16 + lane % 8 + lane / 8 % 2 * 8;  // the row whose address this lane gives to stmatrix
        while (tile < s.tiles) {
            int rank, pair, piece;
            place(s, tile, rank, pair, piece);
            const int rows = lds(table + 12 * rank + 4), expert = lds(table + 12 * rank + 8), steps = (rows + BK - 1) / BK;
            if (steps) {
                int before = 0;
                for (int k = 0; k < steps - 1; ++k) {
                    const uint64_t a = descriptor(ring + stage * STAGE_BYTES + group * PANEL), b = descriptor(ring + stage * STAGE_BYTES + A_BYTES);
                    if (LAG && group == 1 && k + LAG < steps) {  // stay LAG steps behind
                        const int ahead = stage + LAG;
                        bar_wait(lag_bar + 8 * (ahead >= STAGES ? ahead - STAGES : ahead), ahead >= STAGES ? parity ^ 1 : parity);
                    }
                    bar_wait(full + 8 * stage, parity);
                    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
                    multiply(acc, a, b, k);
                    #pragma unroll
                    for (int i = 1; i < BK / 16; ++i) multiply(acc, a + i * 128, b + i * 128, 1);
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
                    const int left = rows - (steps - 1) * BK, slices = (left + 15) / 16;
                    const u32 at = ring + stage * STAGE_BYTES;
                    const uint64_t a = descriptor(at + group * PANEL), b = descriptor(at + A_BYTES);
                    bar_wait(full + 8 * stage, parity);
                    if (left % 16) {  // rows of the next expert: zeros in our panel of dy and in all of x
                        const int chunks = (slices * 16 - left) * 8;
                        for (int i = thread; i < chunks * 5; i += 128) {
                            const int p = i / chunks, c = i - p * chunks;
                            const u32 to = at + (p ? A_BYTES + (p - 1) * PANEL : group * PANEL) + left * 128 + c * 16;
                            asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
                        }
                        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                        asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
                    }
                    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
                    #pragma unroll 1
                    for (int i = 0; i < slices; ++i) multiply(acc, a + i * 128, b + i * 128, steps - 1 + i);
                    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                    if (LAG && threadIdx.x == 0) bar_arrive(lag_bar + 8 * stage);
                    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                    if (steps > 1 && thread < CLUSTER) bar_arrive_at(empty + 8 * before, thread);
                    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
                    if (thread < CLUSTER) bar_arrive_at(empty + 8 * stage, thread);
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
            }
            #pragma unroll
            for (int i = 0; i < 128; ++i) asm volatile("" : "+f"(acc[i]) :: "memory");
            const u32 mask = steps ? ~0u : 0u;
            const int row = (pair * CLUSTER + block) * BM + group * 64, column = piece * BN;
            if (NO_EPILOGUE) {
                float all = 0;
                #pragma unroll
                for (int i = 0; i < 128; ++i) all += acc[i];
                if (all == 12345.678f) store(&w_map, slot, column, row, expert);
            } else {
                #pragma unroll
                for (int part = 0; part < 4; ++part) {
                    const u32 to = slot + part % 2 * SLOT_BYTES;
                    if (thread == 0) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
                    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
                    #pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        u32 out[4];
                        #pragma unroll
                        for (int i = 0; i < 4; ++i) out[i] = packed(acc[part * 32 + 8 * j + 2 * i], acc[part * 32 + 8 * j + 2 * i + 1]) & mask;
                        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                                     ::"r"(to + at_row * 128 + ((j * 2 + lane / 16) ^ (at_row % 8)) * 16), "r"(out[0]), "r"(out[1]), "r"(out[2]), "r"(out[3]) : "memory");
                    }
                    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
                    if (thread == 0) store(&w_map, to, column + part * 64, row, expert);
                }
            }
            bar_wait(tile_full + 8 * turn, turn_parity);
            tile = lds(tile_slot + 4 * turn);
            __syncwarp();
            if (lane == 0 && tile >= 0) bar_arrive_at(tile_empty + 8 * turn, 0);  // tile: always, it waits for the load
            if (++turn == AHEAD) turn = 0, turn_parity ^= 1;
        }
        if (thread == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");  // no block ends while another still arrives at its barriers
}

#define MUST(call) do { int error = int(call); if (error) return error; } while (0)

static int map_of(CUtensorMap& map, const void* data, int columns, int rows, int depth, int box_rows) {
    static void* encode = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (!encode) MUST(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &result));
    cuuint64_t sizes[3] = {(cuuint64_t)columns, (cuuint64_t)rows, (cuuint64_t)depth}, strides[2] = {(cuuint64_t)columns * 2, (cuuint64_t)columns * rows * 2};
    cuuint32_t box[3] = {64, (cuuint32_t)box_rows, 1}, one[3] = {1, 1, 1};
    CUresult error = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, depth ? 3 : 2, (void*)data, sizes, strides, box, one,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return error == CUDA_SUCCESS ? 0 : 10000 + int(error);
}

// x, dy, offsets, dw, counter, tokens, experts, width, hidden, stream
static int product(const long long* a) {
    const int tokens = int(a[5]), experts = int(a[6]), width = int(a[7]), hidden = int(a[8]);
    CUtensorMap x_map, dy_map, w_map;
    MUST(map_of(x_map, (void*)a[0], width, tokens, 0, BK));
    MUST(map_of(dy_map, (void*)a[1], hidden, tokens, 0, BK));
    MUST(map_of(w_map, (void*)a[3], width, hidden, experts, 64));
    cudaLaunchAttribute attributes[1];
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = CLUSTER, attributes[0].val.clusterDim.y = 1, attributes[0].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.blockDim = dim3(THREADS), config.dynamicSmemBytes = SHARED_BYTES, config.stream = (cudaStream_t)a[9];
    config.attrs = attributes, config.numAttrs = 1;
    static int fits[64];
    int device, multiprocessors;
    MUST(cudaGetDevice(&device));
    if (device > 63) return 10001;
    if (!fits[device]) {
        MUST(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
        MUST(cudaFuncSetAttribute(dw_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
        config.gridDim = dim3(multiprocessors / CLUSTER * CLUSTER);
        int most = 0;
        MUST(cudaOccupancyMaxActiveClusters(&most, dw_kernel, &config));
        fits[device] = most < multiprocessors / CLUSTER ? most : multiprocessors / CLUSTER;
        if (fits[device] < 1) return 10002;
    }
    Problem s;
    s.experts = experts, s.pairs = (hidden + 2 * BM - 1) / (2 * BM), s.pieces = (width + BN - 1) / BN, s.tiles = experts * s.pairs * s.pieces;
    const int clusters = s.tiles < fits[device] ? s.tiles : fits[device];
    s.turns = s.tiles;  // tickets that a launch draws: the tiles after the first of each cluster, and one past the end for each
    config.gridDim = dim3(clusters * CLUSTER);
    MUST(cudaLaunchKernelEx(&config, dw_kernel, x_map, dy_map, w_map, (const int*)a[2], (unsigned long long*)a[4], s));
    return cudaGetLastError();
}

static PyObject* run(PyObject*, PyObject* const* given, Py_ssize_t count) {
    if (count != 10) { PyErr_SetString(PyExc_TypeError, "10 arguments"); return nullptr; }
    long long a[10];
    for (int i = 0; i < 10; ++i) a[i] = PyLong_AsLongLong(given[i]);
    return PyLong_FromLong(product(a));
}
static PyMethodDef methods[] = {{"run", (PyCFunction)(void*)run, METH_FASTCALL, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "expert_dw", "", -1, methods};
#define INIT(name) PyInit_##name
#define INIT_OF(name) INIT(name)
PyMODINIT_FUNC INIT_OF(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
""".replace("@WGMMA@", wgmma(256))


@functools.cache
def extension():
    constants = (("BK", BK), ("LAG", LAG), ("HINTS", HINTS), ("ORDER", ORDER), ("AHEAD", AHEAD), ("MOST_EXPERTS", MOST_EXPERTS),
                 ("NO_EPILOGUE", int(PROBE == "NO_EPILOGUE")), ("NO_LOADS", int(PROBE == "NO_LOADS")))
    source = "".join(f"#define {name} {value}\n" for name, value in constants) + CUDA
    flags = ["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a"]
    return load_inline("expert_dw", "", source, no_implicit_headers=True, with_pytorch_error_handling=False, extra_cuda_cflags=flags).run


def dense(x):
    """x, contiguous and at a multiple of 16 bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self._counters = {}

    def forward(self, x, dy, offsets):
        if x.dim() != 2 or dy.dim() != 2 or offsets.dim() != 1 or x.shape[0] != dy.shape[0]:
            raise ValueError("x and dy must be tokens x columns, offsets a list")
        (tokens, width), hidden, experts = x.shape, dy.shape[1], offsets.shape[0] - 1
        if not x.is_cuda or x.dtype != torch.bfloat16 or dy.dtype != torch.bfloat16 or dy.device != x.device or offsets.device != x.device:
            raise ValueError("x and dy must be bf16, all on one GPU")
        if offsets.dtype != torch.int32 or not 1 <= experts <= MOST_EXPERTS:
            raise ValueError(f"offsets must be int32, of 1 to {MOST_EXPERTS} experts")
        if not tokens or not width or not hidden or width % 8 or hidden % 8 or max(tokens, width, hidden) >= 2**22:
            raise ValueError("width and hidden must be positive multiples of 8, and there must be tokens")
        x, dy, offsets = dense(x), dense(dy), offsets.contiguous()
        dw = torch.empty(experts, hidden, width, dtype=x.dtype, device=x.device)
        with torch.cuda.device(x.device):
            stream = torch.cuda.current_stream().cuda_stream
            key = (x.device.index, stream, experts, width, hidden)
            if key not in self._counters:
                self._counters[key] = torch.zeros(1, dtype=torch.int64, device=x.device)
            error = extension()(x.data_ptr(), dy.data_ptr(), offsets.data_ptr(), dw.data_ptr(), self._counters[key].data_ptr(), tokens, experts, width, hidden, stream)
        if error:
            raise RuntimeError(f"expert_dw: CUDA error {error}")
        return dw
