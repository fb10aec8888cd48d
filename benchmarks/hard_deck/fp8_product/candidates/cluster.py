"""fp8 product in CUDA C++, with a cluster of two.

A producer warp asks TMA for the operands, four stages ahead and across tiles; two consumer warpgroups multiply, 64 x 256
each, on a persistent grid. The two blocks of a cluster work on neighbouring rows and the same columns: each fetches half
of the tile of w for both, so a step brings 32 KB into a multiprocessor in place of 48. Sums stay in the tensor cores.
Tried on an H200: blocks that share nothing take 1.1 % longer at 4096^3 and 6.0 % at n = 14336, so no choice by shape.
Up to 64 rows of x: the transposed product, whose 64 rows are those of w; a block walks all of k with up to 200 KB in
flight. Where k is no multiple of 16, TMA cannot address the rows: one kernel copies both operands to rows of whole 16
bytes first, a funnel shift a word. All launches of a call cost the host one call into the extension. Since it ran on a
GPU, its launcher lost pybind11, the stream's Python object, and what a device needs to be told or asked once.
"""

import torch
from torch.utils.cpp_extension import load_inline

try:
    from torch._C import _cuda_getCurrentRawStream as stream_of  # makes no torch.cuda.Stream
except ImportError:

    def stream_of(device):
        return torch.cuda.current_stream(device).cuda_stream


SPACE = {"GROUP": [2, 4, 8]}
STAGES = 4  # of the ring of operands
GROUP = 4  # pairs of row tiles that are walked together


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
constexpr int BM = 128, BN = 256, BK = 128, CLUSTER = 2, THREADS = 384;
constexpr u32 X_BYTES = BM * BK, W_BYTES = BN * BK, STAGE_BYTES = X_BYTES + W_BYTES, SLICE_BYTES = 64 * 64 * 2;
constexpr u32 SHARED_BYTES = STAGES * STAGE_BYTES + 4 * SLICE_BYTES + 16 * STAGES + 1024;

struct Shape { int rows, columns, steps, row_pairs, tiles; };

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
// Tiles of a cluster: BM rows for each block, the same BN columns; GROUP pairs of rows are walked together.
__device__ __forceinline__ void place(int tile, const Shape& s, int& row, int& column) {
    const int columns = (s.columns + BN - 1) / BN, per_group = GROUP * columns, first = tile / per_group * GROUP;
    const int rows = min(s.row_pairs - first, GROUP), within = tile % per_group;
    row = (first + within % rows) * CLUSTER * BM, column = within / rows * BN;
}

__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    product_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap y_map,
                   const float* scale_x, const float* scale_w, int per_row, __nv_bfloat16* y, int by_tma, Shape s) {
    extern __shared__ uint8_t raw[];
    const u32 ring = (shared_address(raw) + 1023) & ~1023u, slices = ring + STAGES * STAGE_BYTES, full = slices + 4 * SLICE_BYTES, empty = full + 8 * STAGES;
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
            int stage = 0;
            u32 parity = 1;
            for (int tile = first; tile < s.tiles; tile += step) {
                int row, column;
                place(tile, s, row, column);
                for (int k = 0; k < s.steps; ++k) {
                    const u32 bar = full + 8 * stage, at = ring + stage * STAGE_BYTES;
                    bar_wait(empty + 8 * stage, parity);
                    bar_expect(bar, STAGE_BYTES);
                    load(at, &x_map, bar, k * BK, row + block * BM);
                    load_for_both(at + X_BYTES + block * (W_BYTES / 2), &w_map, bar, k * BK, column + block * (BN / 2));
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        int stage = 0;
        u32 parity = 0;
        const float both = *scale_x * (per_row ? 1.0f : *scale_w);
        const u32 mine = slices + group * 2 * SLICE_BYTES;
        const int own = warp % 4 * 16 + lane % 8 + lane / 8 % 2 * 8;  // the row of a slice whose address this lane gives to stmatrix
        for (int tile = first; tile < s.tiles; tile += step) {
            int row, column;
            place(tile, s, row, column);
            row += block * BM + group * 64;
            float d[128];
            int before = -1;
            for (int k = 0; k < s.steps; ++k) {
                bar_wait(full + 8 * stage, parity);
                const uint64_t a = descriptor(ring + stage * STAGE_BYTES + group * (X_BYTES / 2)), b = descriptor(ring + stage * STAGE_BYTES + X_BYTES);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
                #pragma unroll
                for (int i = 0; i < 4; ++i) multiply(d, a + 2 * i, b + 2 * i, k + i);
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                if (before >= 0 && threadIdx.x % 128 < CLUSTER) bar_arrive_at(empty + 8 * before, threadIdx.x % 128);
                before = stage;
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            #pragma unroll
            for (int i = 0; i < 128; ++i) asm volatile("" : "+f"(d[i]) :: "memory");
            if (threadIdx.x % 128 < CLUSTER) bar_arrive_at(empty + 8 * before, threadIdx.x % 128);
            #pragma unroll
            for (int slice = 0; slice < 4; ++slice) {
                const u32 buffer = mine + slice % 2 * SLICE_BYTES;
                const int left = column + slice * 64;
                if (by_tma) {
                    if (threadIdx.x % 128 == 0) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");  // the slice before the last has left
                    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
                }
                #pragma unroll
                for (int j = 0; j < 4; ++j) {  // 16 columns
                    const float* v = d + slice * 32 + j * 8;
                    float f[4] = {both, both, both, both};
                    const int at = left + j * 16 + 2 * (lane % 4);
                    if (per_row)
                        #pragma unroll
                        for (int i = 0; i < 4; ++i) f[i] *= at + i / 2 * 8 + i % 2 < s.columns ? __ldg(scale_w + at + i / 2 * 8 + i % 2) : 0.0f;
                    const u32 p0 = packed(v[0] * f[0], v[1] * f[1]), p1 = packed(v[2] * f[0], v[3] * f[1]);
                    const u32 p2 = packed(v[4] * f[2], v[5] * f[3]), p3 = packed(v[6] * f[2], v[7] * f[3]);
                    if (by_tma) {
                        const u32 to = buffer + own * 128 + (((j * 2 + lane / 16) ^ (own % 8)) * 16);
                        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(p0), "r"(p1), "r"(p2), "r"(p3) : "memory");
                    } else {
                        const u32 p[4] = {p0, p1, p2, p3};
                        #pragma unroll
                        for (int i = 0; i < 8; ++i) {
                            const int r = row + warp % 4 * 16 + lane / 4 + i / 2 % 2 * 8, c = at + i / 4 * 8 + i % 2;
                            if (r < s.rows && c < s.columns) y[(int64_t)r * s.columns + c] = __ushort_as_bfloat16((unsigned short)(p[i / 2] >> (i % 2 * 16)));
                        }
                    }
                }
                if (by_tma) {
                    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
                    if (threadIdx.x % 128 == 0) store(&y_map, buffer, left, row);
                }
            }
        }
        if (threadIdx.x % 128 == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");  // no block ends while another still arrives at its barriers
}

// Few rows of x: y^T = w x^T, so that 64 rows of w are the rows of wgmma and FEW rows of x its columns. A block walks all of k.
template <int FEW> struct Ring {
    static constexpr u32 W = 64 * BK, X = FEW * BK, STAGE = W + X, COUNT = (200 * 1024) / STAGE, BYTES = COUNT * (STAGE + 16) + 1024;
};
template <int FEW> __global__ void __launch_bounds__(160, 1)
    few_rows_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map, const float* scale_x, const float* scale_w, int per_row,
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
    float d[FEW / 2];
    int before = -1;
    for (int k = 0; k < s.steps; ++k) {
        bar_wait(full + 8 * stage, parity);
        const uint64_t a = descriptor(ring + stage * R::STAGE), b = descriptor(ring + stage * R::STAGE + R::W);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        #pragma unroll
        for (int i = 0; i < 4; ++i) multiply(d, a + 2 * i, b + 2 * i, k + i);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (before >= 0 && threadIdx.x == 0) bar_arrive_at(empty + 8 * before, 0);
        before = stage;
        if (++stage == R::COUNT) stage = 0, parity ^= 1;
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    #pragma unroll
    for (int i = 0; i < FEW / 2; ++i) asm volatile("" : "+f"(d[i]) :: "memory");
    #pragma unroll
    for (int i = 0; i < FEW / 2; ++i) {
        const int n = left + 16 * warp + lane / 4 + 8 * (i / 2 % 2), m = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
        if (n < s.columns && m < s.rows) y[(int64_t)m * s.columns + n] = __float2bfloat16(d[i] * (*scale_x * __ldg(scale_w + (per_row ? n : 0))));
    }
}

// Rows of `depth` bytes to rows of `pitch`, a multiple of 16, by 16 bytes a thread; what is new is 0. Blocks of x first, then of w.
__device__ __forceinline__ u32 word_at(const uint8_t* from, int64_t word, int64_t total) {
    if (4 * word + 4 <= total) return __ldg((const u32*)from + word);
    u32 value = 0;
    for (int64_t byte = 4 * word; byte < total; ++byte) value |= (u32)from[byte] << 8 * (byte % 4);
    return value;
}
__global__ void realign_kernel(const uint8_t* x, const uint8_t* w, uint4* to, int rows, int columns, int depth, int pitch) {
    const bool of_x = blockIdx.x < rows;
    const int64_t row = of_x ? blockIdx.x : blockIdx.x - rows, total = (int64_t)(of_x ? rows : columns) * depth;
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

int map_of(CUtensorMap& map, const void* data, CUtensorMapDataType type, int bytes, int rows, int columns, int64_t pitch, int box_rows, int box_columns) {
    static void* encode = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (!encode) MUST(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &result));
    cuuint64_t sizes[2] = {(cuuint64_t)columns, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)pitch * bytes};
    cuuint32_t box[2] = {(cuuint32_t)box_columns, (cuuint32_t)box_rows}, one[2] = {1, 1};
    CUresult error = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(&map, type, 2, (void*)data, sizes, strides, box, one,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return error == CUDA_SUCCESS ? 0 : 10000 + int(error);
}

struct Operands { const void *x, *w; __nv_bfloat16* y; const float *scale_x, *scale_w; int per_row, depth; cudaStream_t stream; };
constexpr int DEVICES = 64;  // that are remembered

template <int FEW> int few_rows(const Operands& o, const Shape& s) {
    static bool told[DEVICES] = {};
    CUtensorMap x_map, w_map;
    MUST(map_of(x_map, o.x, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, s.rows, o.depth, o.depth, FEW, BK));
    MUST(map_of(w_map, o.w, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, s.columns, o.depth, o.depth, 64, BK));
    int device;
    MUST(cudaGetDevice(&device));
    if (device >= DEVICES || !told[device]) MUST(cudaFuncSetAttribute(few_rows_kernel<FEW>, cudaFuncAttributeMaxDynamicSharedMemorySize, Ring<FEW>::BYTES));
    if (device < DEVICES) told[device] = true;
    few_rows_kernel<FEW><<<(s.columns + 63) / 64, 160, Ring<FEW>::BYTES, o.stream>>>(x_map, w_map, o.scale_x, o.scale_w, o.per_row, o.y, s);
    return 0;
}

int many_rows(const Operands& o, const Shape& s) {
    static int of_device[DEVICES] = {};  // multiprocessors; 0 where nothing was asked yet
    const bool by_tma = s.columns % 8 == 0;
    CUtensorMap x_map, w_map, y_map;
    MUST(map_of(x_map, o.x, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, s.rows, o.depth, o.depth, BM, BK));
    MUST(map_of(w_map, o.w, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, s.columns, o.depth, o.depth, BN / 2, BK));
    y_map = x_map;
    if (by_tma) MUST(map_of(y_map, o.y, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, s.rows, s.columns, s.columns, 64, 64));
    int device, multiprocessors;
    MUST(cudaGetDevice(&device));
    multiprocessors = device < DEVICES ? of_device[device] : 0;
    if (!multiprocessors) {
        MUST(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
        MUST(cudaFuncSetAttribute(product_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
        if (device < DEVICES) of_device[device] = multiprocessors;
    }
    product_kernel<<<min(multiprocessors / CLUSTER, s.tiles) * CLUSTER, THREADS, SHARED_BYTES, o.stream>>>(x_map, w_map, y_map, o.scale_x, o.scale_w, o.per_row, o.y, by_tma, s);
    return 0;
}

int product(Operands o, void* copies, int rows, int columns) {
    if (copies) {
        const int pitch = (o.depth + 15) / 16 * 16;
        realign_kernel<<<rows + columns, 128, 0, o.stream>>>((const uint8_t*)o.x, (const uint8_t*)o.w, (uint4*)copies, rows, columns, o.depth, pitch);
        o.x = copies, o.w = (const uint8_t*)copies + (int64_t)rows * pitch, o.depth = pitch;
    }
    const int pairs = (rows + CLUSTER * BM - 1) / (CLUSTER * BM);
    const Shape s = {rows, columns, (o.depth + BK - 1) / BK, pairs, pairs * ((columns + BN - 1) / BN)};
    auto launch = rows <= 8 ? few_rows<8> : rows <= 16 ? few_rows<16> : rows <= 32 ? few_rows<32> : rows <= 64 ? few_rows<64> : many_rows;
    MUST(launch(o, s));
    return cudaGetLastError();
}

static PyObject* run(PyObject*, PyObject* const* given, Py_ssize_t) {  // x, w, y, scale_x, scale_w, per_row, copies, rows, columns, depth, stream
    long long a[11];
    for (int i = 0; i < 11; ++i) a[i] = PyLong_AsLongLong(given[i]);
    const Operands o = {(void*)a[0], (void*)a[1], (__nv_bfloat16*)a[2], (float*)a[3], (float*)a[4], int(a[5]), int(a[9]), (cudaStream_t)a[10]};
    return PyLong_FromLong(product(o, (void*)a[6], int(a[7]), int(a[8])));
}
static PyMethodDef methods[] = {{"run", (PyCFunction)(void*)run, METH_FASTCALL, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "fp8_product", "", -1, methods};
#define INIT(name) PyInit_##name
#define INIT_OF(name) INIT(name)
PyMODINIT_FUNC INIT_OF(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
""".replace("@WGMMA@", "".join(map(wgmma, (8, 16, 32, 64, 256))))


_run = None


def built():
    """The extension's launcher, built once per process."""
    global _run
    if _run is None:
        _run = load_inline(
            f"fp8_product_{STAGES}_{GROUP}",
            "",
            CUDA,
            no_implicit_headers=True,
            with_pytorch_error_handling=False,
            extra_cuda_cflags=[
                "-O3",
                "-std=c++17",
                "-gencode=arch=compute_90a,code=sm_90a",
                f"-DSTAGES={STAGES}",
                f"-DGROUP={GROUP}",
            ],
        ).run
    return _run


def dense(x):
    """x, contiguous and at a multiple of 16 bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def product_of(x, weight, scale_x, scale_w, device):
    (M, K), (N, depth), scales = x.shape, weight.shape, scale_w.numel()
    if depth != K or scale_x.numel() != 1 or scales not in (1, N) or min(M, N, K) < 1:
        raise ValueError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and the scales do not fit together")
    if max(M, N, K) >= 2**30:
        raise ValueError("a side of the product is too long")
    if not x.dtype == weight.dtype == torch.float8_e4m3fn or not scale_x.dtype == scale_w.dtype == torch.float32:
        raise ValueError("x and weight must be float8_e4m3fn, the scales float32")
    if not device == weight.get_device() == scale_x.get_device() == scale_w.get_device():
        raise ValueError("the operands and their scales must be on one device")
    x, weight, scale_w = dense(x), dense(weight), scale_w.contiguous()
    y = x.new_empty((M, N), dtype=torch.bfloat16)
    copies = x.new_empty((M + N, -(-K // 16) * 16), dtype=torch.uint8) if K % 16 else None
    error = (_run or built())(
        x.data_ptr(),
        weight.data_ptr(),
        y.data_ptr(),
        scale_x.data_ptr(),
        scale_w.data_ptr(),
        scales > 1,
        0 if copies is None else copies.data_ptr(),
        M,
        N,
        K,
        stream_of(device),
    )
    if error:
        raise RuntimeError(f"fp8_product: CUDA error {error}")
    return y


def kernel_function(x, weight, scale_x, scale_w):
    device = x.get_device()
    if x.is_cuda and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return product_of(x, weight, scale_x, scale_w, device)
    return product_of(x, weight, scale_x, scale_w, device)
