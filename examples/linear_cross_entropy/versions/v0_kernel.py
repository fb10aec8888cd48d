"""Cross-entropy of a linear layer in CUDA C++: the logits stay in registers.

 * prepare: ignored tokens need no logits. The rows of the others are moved together, with their targets.
 * product: persistent clusters of two blocks, each 128 rows x 256 (or 248) columns of the logits a tile. A producer warp
   brings the operands by TMA, half of the weight's tile each and for both blocks; two consumer warpgroups of 64 rows
   multiply. The second one stays LAG steps behind, so that one multiplies while the other takes exponentials.
   A tile's row leaves as (reference, sum of 2^(x - reference)). The reference is 0 unless that over- or underflows.
   Columns are cut in pieces of 248 and 256, such that the last round of tiles is a full one.
 * merge: adds the pieces of a row.
"""

import functools

import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

LAG = 0
BALANCE = 1
STAGES = 4


def wgmma(n):
    """m64 nN k16 of bf16, both operands in shared memory with k innermost; `keep` 0 overwrites the sums."""
    half = n // 2
    sums, operands = ", ".join(f"%{i}" for i in range(half)), ", ".join(f'"+f"(d[{i}])' for i in range(half))
    return f"""template <> __device__ __forceinline__ void multiply<{n}>(float (&d)[128], uint64_t a, uint64_t b, int keep) {{
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
constexpr int BM = 128, BN = 256, BK = 64, CLUSTER = 2, THREADS = 384, IGNORED = -100;
constexpr u32 A_BYTES = BM * BK * 2, B_BYTES = BN * BK * 2, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr u32 SHARED_BYTES = STAGES * STAGE_BYTES + 16 * STAGES + 16 + 1024;
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

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
template <int N> __device__ __forceinline__ void multiply(float (&d)[128], uint64_t a, uint64_t b, int keep);
@WGMMA@
__device__ __forceinline__ float ex2(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// How the logits are cut: `pairs` of 2 x 128 rows, `pieces` of columns; the first `wide` pieces have 256 columns, the others 248.
struct Cut {
    int pairs, pieces, wide;
    __device__ Cut(int rows, int columns, int clusters) {
        const int eights = (columns + 7) / 8, least = (eights + 31) / 32;
        pairs = (rows + 2 * BM - 1) / (2 * BM);
        pieces = least, wide = least;
        if (BALANCE && pairs) {
            const int rounds = (int)(((int64_t)pairs * least + clusters - 1) / clusters);
            const int more = max(least, (int)min((int64_t)rounds * clusters / pairs, (int64_t)(eights / 31)));
            if (eights >= 31 * more) pieces = more, wide = eights - 31 * more;
        }
    }
    __device__ int start(int piece) const { return 248 * piece + 8 * min(piece, wide); }
};

template <int N>
__device__ __forceinline__ void products(float (&acc)[128], u32 ring, u32 full, u32 empty, int& stage, u32& parity, int steps, int group, int lane, u32 lag_bar) {
    int before = 0;
    for (int k = 0; k < steps; ++k) {
        const uint64_t a = descriptor(ring + stage * STAGE_BYTES + group * (A_BYTES / 2)), b = descriptor(ring + stage * STAGE_BYTES + A_BYTES);
        bar_wait(full + 8 * stage, parity);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        multiply<N>(acc, a, b, k);
        #pragma unroll
        for (int i = 1; i < 4; ++i) multiply<N>(acc, a + 2 * i, b + 2 * i, 1);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        if (k) {
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            if (lane < CLUSTER) bar_arrive_at(empty + 8 * before, lane);
        }
        if (LAG && k == LAG && threadIdx.x == 0) bar_arrive(lag_bar);
        before = stage;
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    if (lane < CLUSTER) bar_arrive_at(empty + 8 * before, lane);
    #pragma unroll
    for (int i = 0; i < 128; ++i) asm volatile("" : "+f"(acc[i]) :: "memory");
}

__device__ __forceinline__ float over_quad(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

// acc[4 j + i]: row lane / 4 + 8 (i / 2), column 8 j + 2 (lane % 4) + i % 2
template <int N>
__device__ __forceinline__ void finish(float (&acc)[128], int column, int columns, int row, int rows, int target0, int target1, int lane, int64_t stride,
                                       float2* part, float* at_target) {
    const int quad = 2 * (lane & 3);
    if (column + N > columns) {
        #pragma unroll
        for (int i = 0; i < N / 2; ++i)
            if (column + i / 4 * 8 + quad + i % 2 >= columns) acc[i] = -INFINITY;
    }
    const int hit0 = target0 - column, hit1 = target1 - column;
    const bool mine0 = hit0 >= 0 && hit0 < N && (hit0 & 6) == quad, mine1 = hit1 >= 0 && hit1 < N && (hit1 & 6) == quad;
    if (__any_sync(~0u, mine0 || mine1)) {
        float x0 = 0.0f, x1 = 0.0f;
        #pragma unroll
        for (int j = 0; j < N / 8; ++j) {
            if (hit0 >> 3 == j) x0 = hit0 & 1 ? acc[4 * j + 1] : acc[4 * j];
            if (hit1 >> 3 == j) x1 = hit1 & 1 ? acc[4 * j + 3] : acc[4 * j + 2];
        }
        if (mine0) at_target[row] = x0;
        if (mine1) at_target[row + 8] = x1;
    }
    float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    #pragma unroll
    for (int i = 0; i < N / 2; ++i) s[i % 4] += ex2(acc[i] * LOG2E);
    float s0 = over_quad(s[0] + s[1]), s1 = over_quad(s[2] + s[3]), m0 = 0.0f, m1 = 0.0f;
    const bool good0 = s0 > 1e-18f && s0 < 1e37f, good1 = s1 > 1e-18f && s1 < 1e37f;
    if (__any_sync(~0u, (!good0 && row < rows) || (!good1 && row + 8 < rows))) {
        m0 = m1 = -INFINITY;
        #pragma unroll
        for (int i = 0; i < N / 2; ++i)
            if (i & 2) m1 = fmaxf(m1, acc[i]); else m0 = fmaxf(m0, acc[i]);
        m0 = quad_max(m0) * LOG2E, m1 = quad_max(m1) * LOG2E;
        const float from0 = m0 == -INFINITY ? 0.0f : m0, from1 = m1 == -INFINITY ? 0.0f : m1;
        s[0] = s[1] = s[2] = s[3] = 0.0f;
        #pragma unroll
        for (int i = 0; i < N / 2; ++i) s[i % 4] += ex2(fmaf(acc[i], LOG2E, i & 2 ? -from1 : -from0));
        s0 = over_quad(s[0] + s[1]), s1 = over_quad(s[2] + s[3]);
    }
    if ((lane & 3) == 0) {
        if (row < rows) part[row] = make_float2(m0, s0);
        if (row + 8 < rows) part[row + 8] = make_float2(m1, s1);
    }
}

__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    product_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map, const int* meta, const int* targets, float2* parts,
                   float* at_target, int tokens, int columns, int steps) {
    extern __shared__ uint8_t raw[];
    const u32 ring = (shared_address(raw) + 1023) & ~1023u, full = ring + STAGES * STAGE_BYTES, empty = full + 8 * STAGES, lag_bar = empty + 8 * STAGES;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, group = warp / 4;
    u32 block;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) bar_init(full + 8 * i, 1), bar_init(empty + 8 * i, 8 * CLUSTER);
        bar_init(lag_bar, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int rows = *(const volatile int*)meta, clusters = gridDim.x / CLUSTER, first = blockIdx.x / CLUSTER;
    const Cut cut(rows, columns, clusters);
    const int tiles = cut.pairs * cut.pieces;
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp == 8 && lane == 0) {
            asm volatile("fence.proxy.async;" ::: "memory");
            int stage = 0;
            u32 parity = 1;
            for (int tile = first; tile < tiles; tile += clusters) {
                const int piece = tile / cut.pairs, row = ((tile - piece * cut.pairs) * CLUSTER + block) * BM, column = cut.start(piece) + block * (BN / 2);
                for (int k = 0; k < steps; ++k) {
                    const u32 bar = full + 8 * stage, at = ring + stage * STAGE_BYTES;
                    bar_wait(empty + 8 * stage, parity);
                    bar_expect(bar, STAGE_BYTES);
                    load(at, &a_map, bar, k * BK, row);
                    load_for_both(at + A_BYTES + block * (B_BYTES / 2), &b_map, bar, k * BK, column);
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        int stage = 0;
        u32 parity = 0, turn = 0;
        float acc[128];
        for (int tile = first; tile < tiles; tile += clusters) {
            const int piece = tile / cut.pairs, column = cut.start(piece);
            const int row = ((tile - piece * cut.pairs) * CLUSTER + block) * BM + warp * 16 + lane / 4;
            const int target0 = row < rows ? __ldcg(targets + row) : -1, target1 = row + 8 < rows ? __ldcg(targets + row + 8) : -1;
            if (LAG && group == 1 && steps > STAGES + LAG) bar_wait(lag_bar, turn);
            turn ^= 1;
            float2* part = parts + (int64_t)piece * tokens;
            if (piece < cut.wide) {
                products<256>(acc, ring, full, empty, stage, parity, steps, group, lane, lag_bar);
                finish<256>(acc, column, columns, row, rows, target0, target1, lane, tokens, part, at_target);
            } else {
                products<248>(acc, ring, full, empty, stage, parity, steps, group, lane, lag_bar);
                finish<248>(acc, column, columns, row, rows, target0, target1, lane, tokens, part, at_target);
            }
        }
    }
    __syncwarp();
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");  // no block ends while another still arrives at its barriers
}

// 16 tokens a block, two a warp. `moved`: the rows that count, of `pitch` values each.
constexpr int ROWS = 16, HELD = 8;
__global__ void __launch_bounds__(256) prepare_kernel(const uint16_t* hidden, const long long* target, uint16_t* moved, int* origins, int* targets, int* meta,
                                                      float* out, int tokens, int width, int pitch) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    __shared__ int sums[8];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.x * ROWS, own = first + 2 * warp, sixteens = width / 8;
    const bool whole = width == pitch;
    uint4 v[2][HELD];
    if (whole) {
        #pragma unroll
        for (int r = 0; r < 2; ++r)
            #pragma unroll
            for (int i = 0; i < HELD; ++i)
                if (own + r < tokens && 32 * i + lane < sixteens) v[r][i] = __ldcs((const uint4*)(hidden + (int64_t)(own + r) * width) + 32 * i + lane);
    }
    const bool counts = lane < ROWS && first + lane < tokens && target[first + lane] != IGNORED;
    const u32 mask = __ballot_sync(~0u, counts);
    int before = 0;
    #pragma unroll 8
    for (int i = threadIdx.x; i < first; i += 256) before += target[i] != IGNORED;
    before = __reduce_add_sync(~0u, before);
    if (lane == 0) sums[warp] = before;
    __syncthreads();
    before = 0;
    #pragma unroll
    for (int i = 0; i < 8; ++i) before += sums[i];
    if (threadIdx.x == 0 && first + ROWS >= tokens) meta[0] = before + __popc(mask);
    if (warp == 0 && lane < ROWS && first + lane < tokens) {
        const int slot = before + __popc(mask & ((1u << lane) - 1));
        if (counts) origins[slot] = first + lane, targets[slot] = (int)target[first + lane];
        else out[first + lane] = 0.0f;
    }
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int at = 2 * warp + r;
        if (!(mask >> at & 1)) continue;
        const int64_t slot = before + __popc(mask & ((1u << at) - 1)), row = own + r;
        if (whole) {
            uint4* to = (uint4*)(moved + slot * pitch);
            #pragma unroll
            for (int i = 0; i < HELD; ++i)
                if (32 * i + lane < sixteens) to[32 * i + lane] = v[r][i];
            for (int i = 32 * HELD + lane; i < sixteens; i += 32) to[i] = ((const uint4*)(hidden + row * width))[i];
        } else
            for (int i = lane; i < pitch; i += 32) moved[slot * pitch + i] = i < width ? hidden[row * width + i] : (uint16_t)0;
    }
}

// Rows of a width that TMA cannot address, to rows of `pitch`.
__global__ void pad_kernel(const uint16_t* from, uint16_t* to, int width, int pitch) {
    const int64_t row = blockIdx.x;
    for (int i = threadIdx.x; i < pitch; i += blockDim.x) to[row * pitch + i] = i < width ? from[row * width + i] : (uint16_t)0;
}

__global__ void __launch_bounds__(256) merge_kernel(const float2* parts, const float* at_target, const int* origins, const int* meta, float* out, int tokens,
                                                    int columns, int clusters) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    __shared__ float2 shared[8][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, slot = blockIdx.x * 32 + lane, rows = __ldcg(meta);
    const int pieces = Cut(rows, columns, clusters).pieces;
    float m = -INFINITY, s = 0.0f;
    auto add = [&](float2 v) {
        const float top = fmaxf(m, v.x), from = top == -INFINITY ? 0.0f : top;
        s = s * ex2(m - from) + v.y * ex2(v.x - from), m = top;
    };
    if (slot < rows) {
        #pragma unroll 8
        for (int j = warp; j < pieces; j += 8) add(__ldcg(parts + (int64_t)j * tokens + slot));
    }
    shared[warp][lane] = make_float2(m, s);
    __syncthreads();
    if (warp == 0 && slot < rows) {
        m = -INFINITY, s = 0.0f;
        #pragma unroll
        for (int j = 0; j < 8; ++j) add(shared[j][lane]);
        out[__ldcg(origins + slot)] = (m + log2f(s)) * LN2 - __ldcg(at_target + slot);
    }
}

static int describe(CUtensorMap* map, const void* data, long long rows, long long width) {
    static decltype(&cuTensorMapEncodeTiled) encode = nullptr;
    if (!encode) {
        void* f = nullptr;
        cudaDriverEntryPointQueryResult found;
        cudaError_t e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found);
        if (e || !f) return 10001;
        encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(f);
    }
    cuuint64_t sizes[2] = {(cuuint64_t)width, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)width * 2};
    cuuint32_t box[2] = {BK, 128}, step[2] = {1, 1};
    CUresult r = encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void*)data, sizes, strides, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return r == CUDA_SUCCESS ? 0 : 20000 + (int)r;
}

// hidden, weight, target, out, space, padded weight or 0, tokens, columns, width, pitch, multiprocessors, stream; with space 0 its size
static PyObject* run(PyObject*, PyObject* const* given, Py_ssize_t count) {
    if (count != 12) { PyErr_SetString(PyExc_TypeError, "12 arguments"); return nullptr; }
    long long a[12];
    for (int i = 0; i < 12; ++i) a[i] = PyLong_AsLongLong(given[i]);
    const long long tokens = a[6], columns = a[7], width = a[8], pitch = a[9], clusters = a[10] / CLUSTER;
    const cudaStream_t stream = (cudaStream_t)a[11];
    long long used = 0;
    auto take = [&](long long bytes) { const long long at = used; used += (bytes + 255) / 256 * 256; return at; };
    const long long meta = take(16), origins = take(4 * tokens), targets = take(4 * tokens), at_target = take(4 * tokens), moved = take(2 * tokens * pitch),
                    parts = take(8 * tokens * ((columns + 7) / 8 / 31 + 2));
    if (!a[4]) return PyLong_FromLongLong(used);
    char* space = (char*)a[4];
    static bool set = false;
    if (!set) {
        cudaError_t e = cudaFuncSetAttribute(product_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);
        if (e) return PyLong_FromLong(e);
        set = true;
    }
    CUtensorMap a_map, b_map;
    if (int e = describe(&a_map, space + moved, tokens, pitch)) return PyLong_FromLong(e);
    if (int e = describe(&b_map, a[5] ? (void*)a[5] : (void*)a[1], columns, pitch)) return PyLong_FromLong(e);
    if (a[5]) pad_kernel<<<(u32)columns, 128, 0, stream>>>((const uint16_t*)a[1], (uint16_t*)a[5], (int)width, (int)pitch);
    prepare_kernel<<<(u32)((tokens + ROWS - 1) / ROWS), 256, 0, stream>>>((const uint16_t*)a[0], (const long long*)a[2], (uint16_t*)(space + moved),
        (int*)(space + origins), (int*)(space + targets), (int*)(space + meta), (float*)a[3], (int)tokens, (int)width, (int)pitch);
    cudaLaunchAttribute early[1];
    early[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early[0].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((u32)(clusters * CLUSTER)), config.blockDim = dim3(THREADS), config.dynamicSmemBytes = SHARED_BYTES, config.stream = stream;
    config.attrs = early, config.numAttrs = 1;
    cudaError_t e = cudaLaunchKernelEx(&config, product_kernel, a_map, b_map, (const int*)(space + meta), (const int*)(space + targets),
                                       (float2*)(space + parts), (float*)(space + at_target), (int)tokens, (int)columns, (int)((pitch + BK - 1) / BK));
    if (e) return PyLong_FromLong(e);
    config.gridDim = dim3((u32)((tokens + 31) / 32)), config.blockDim = dim3(256), config.dynamicSmemBytes = 0;
    e = cudaLaunchKernelEx(&config, merge_kernel, (const float2*)(space + parts), (const float*)(space + at_target), (const int*)(space + origins),
                           (const int*)(space + meta), (float*)a[3], (int)tokens, (int)columns, (int)clusters);
    return PyLong_FromLong(e ? e : cudaGetLastError());
}
static PyMethodDef methods[] = {{"run", (PyCFunction)(void*)run, METH_FASTCALL, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "linear_cross_entropy", "", -1, methods};
#define INIT(name) PyInit_##name
#define INIT_OF(name) INIT(name)
PyMODINIT_FUNC INIT_OF(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
"""


@functools.cache
def built():
    constants = "".join(f"#define {name} {value}\n" for name, value in (("LAG", LAG), ("BALANCE", BALANCE), ("STAGES", STAGES)))
    source = constants + CUDA.replace("@WGMMA@", wgmma(248) + wgmma(256))
    flags = ["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a"]
    return load_inline("linear_cross_entropy", "", source, no_implicit_headers=True, extra_cuda_cflags=flags).run


@functools.cache
def multiprocessors(device):
    properties = torch.cuda.get_device_properties(device)
    if properties.major != 9:
        raise ValueError("needs compute capability 9.0")
    return properties.multi_processor_count


class ModelNew(nn.Module):
    def forward(self, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if hidden.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16 or target.dtype != torch.int64:
            raise ValueError("bf16 operands and int64 targets only")
        if hidden.dim() != 2 or weight.dim() != 2 or target.dim() != 1 or hidden.shape[1] != weight.shape[1] or hidden.shape[0] != target.shape[0]:
            raise ValueError("hidden is tokens x width, weight is vocabulary x width, a target a token")
        (tokens, width), vocabulary = hidden.shape, weight.shape[0]
        if min(tokens, width, vocabulary) == 0 or max(tokens, vocabulary) >= 2**30 or width >= 2**24:
            raise ValueError("empty or too large")
        hidden, weight, target = (t.contiguous() for t in (hidden, weight, target))
        hidden, weight = (t.clone() if t.data_ptr() % 16 else t for t in (hidden, weight))
        pitch = (width + 7) // 8 * 8
        out = torch.empty(tokens, dtype=torch.float32, device=hidden.device)
        padded = torch.empty(vocabulary, pitch, dtype=weight.dtype, device=weight.device) if pitch != width else None
        sizes = (tokens, vocabulary, width, pitch, multiprocessors(hidden.device))
        run, stream = built(), torch.cuda.current_stream(hidden.device).cuda_stream
        space = torch.empty(run(0, 0, 0, 0, 0, 0, *sizes, stream), dtype=torch.uint8, device=hidden.device)
        error = run(hidden.data_ptr(), weight.data_ptr(), target.data_ptr(), out.data_ptr(), space.data_ptr(), 0 if padded is None else padded.data_ptr(), *sizes, stream)
        if error:
            raise RuntimeError(f"linear_cross_entropy: CUDA error {error}")
        return out
