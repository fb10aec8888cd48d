"""Paged GQA decode in one launch, CUDA C++: equal shares of the tokens for all blocks, merged by the last block.

 * Every block works out for itself how many parts each request has, so that all blocks get about the same number of
   tokens, whatever the lengths are; the host reads no length.
 * Each warp walks tiles of 16 tokens of one kv head on its own: asynchronous copies of 16 bytes into a ring of its own,
   no barrier of the block. The page of each tile was read ahead, 32 tiles at a time, a tile a lane.
 * The query heads of the group are the rows of the products, padded to 16; softmax and its running maximum stay in
   registers; the weights go into the second product as they lie.
 * At the end the warps' sums are merged by their maxima. Where a request has several parts, the block that ends last
   merges them: a counter says which, and wraps to zero for the next call.
Rows behind a request's length are filled with zeros, never read."""

import functools

import torch
from torch.utils.cpp_extension import load_inline

try:
    from torch._C import _cuda_getCurrentRawStream as stream_of  # makes no torch.cuda.Stream
except ImportError:

    def stream_of(device):
        return torch.cuda.current_stream(device).cuda_stream


WARPS = 8
STAGES = 2
BLOCKS = 1  # of a multiprocessor that share the tokens
MERGED = 4  # parts that a thread of the last block asks for at once

CUDA_SRC = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <limits.h>
#include <stdint.h>

typedef uint32_t u32;
constexpr int TILE = 16;   // tokens of a warp's step
constexpr int ROWS = 16;   // query heads of a product
constexpr int AT_ONCE = MERGED_;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void copy_async(u32 to, const void* from, bool there) {   // zeros where nothing is there
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wait_for_all_but() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}
__device__ __forceinline__ void load_transposed(u32 (&r)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {   // 16 x 8 += 16 x 16 by 16 x 8
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ float power2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ u32 pair_of(float low, float high) {
    __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<u32*>(&both);
}
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" :: "l"(p)); }
// atomicInc; what the block wrote is there before it, and what others wrote before they counted is seen after it.
__device__ __forceinline__ unsigned count_in_order(unsigned* counter, unsigned last) {
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(last) : "memory");
    return before;
}

struct Task {
    const __nv_bfloat16 *query, *cache;
    const int *table, *lengths;
    __nv_bfloat16* out;
    float* parts;         // of each block: rows x D values, then rows x (maximum, sum), padded
    unsigned* counters;   // of each request, kv head and tile of query heads: parts that are there; zero between calls
    int requests, kv_heads, group, page, columns, blocks, page_shift;   // page_shift: a page holds TILE << page_shift tokens, if WHOLE
    float scale;          // of the scores, in base 2
};

__device__ __forceinline__ int tiles_of(int length) { return (length + TILE - 1) / TILE; }

// What a block does: part `part` of the `parts` of a request.
struct Share { int request, length, part, parts; };

// Tiles of each block, if `total` tiles of each kv head are shared equally.
__device__ __forceinline__ int equal_share(const Task& t, unsigned total) {
    return max((total * gridDim.x * gridDim.z + t.blocks - 1u) / t.blocks, 1u);
}
// A request's parts: as many as its tiles are of an equal share, rounded, but at least one, and a tile a warp.
template <int WARPS> __device__ __forceinline__ int parts_of(int tiles, int equal) {
    return max(1u, min((2u * tiles + equal) / (2u * equal), (unsigned)tiles / WARPS));
}

// The share of chunk `chunk`; every lane of a warp gets it.
template <int WARPS> __device__ __forceinline__ Share share_of(const Task& t, int chunk) {
    int lane = threadIdx.x & 31, total = 0;
#pragma unroll 1
    for (int r = lane; r < t.requests; r += 32) total += tiles_of(__ldg(t.lengths + r));
    total = __reduce_add_sync(0xffffffffu, (unsigned)total);
    int equal = equal_share(t, total), before = 0;
#pragma unroll 1
    for (int first = 0; first < t.requests; first += 32) {
        int length = first + lane < t.requests ? __ldg(t.lengths + first + lane) : 0, tiles = tiles_of(length);
        int parts = first + lane < t.requests ? parts_of<WARPS>(tiles, equal) : 0, upto = parts;
#pragma unroll
        for (int step = 1; step < 32; step <<= 1) {
            int left = __shfl_up_sync(0xffffffffu, upto, step);
            if (lane >= step) upto += left;
        }
        unsigned there = __ballot_sync(0xffffffffu, before + upto > chunk);
        if (there) {
            int from = __ffs(there) - 1;
            parts = __shfl_sync(0xffffffffu, parts, from);
            int end = before + __shfl_sync(0xffffffffu, upto, from);
            return {first + from, __shfl_sync(0xffffffffu, length, from), chunk - (end - parts), parts};
        }
        before += __shfl_sync(0xffffffffu, upto, 31);
    }
    return {-1, 0, 0, 0};
}

// A running softmax: the maximum and sum of row lane / 4 and, with R of 2, of row lane / 4 + 8; and this lane's part of
// the weighted values. With R of 1 the rows from 8 on are zeros, and stay so.
template <int D, int R> struct Softmax {
    float top[R], sum[R], value[D / 8][4];
    __device__ __forceinline__ Softmax() : sum{}, value{} {
        for (int r = 0; r < R; ++r) top[r] = -INFINITY;
    }
};

// Where a lane's chunks of a tile lie: a row holds 2 D numbers, K and V, in chunks of 16 bytes that are permuted by row.
template <int D> __device__ __forceinline__ u32 place(int row, int chunk) { return row * 4 * D + ((chunk ^ (row & 7)) << 4); }

// One tile: scores, weights, values. `tokens`: how many of the 16 exist.
template <int D, int R> __device__ __forceinline__ void step(Softmax<D, R>& state, const u32 (&query)[D / 16][4], u32 tile, int tokens, float scale) {
    int lane = threadIdx.x & 31;
    float score[2][4] = {};
    int row = (lane >> 4) * 8 + (lane & 7), half = (lane >> 3) & 1;
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
        u32 keys[4];
        load_matrices(keys, tile + place<D>(row, 2 * k + half));
        multiply(score[0], query[k], keys[0], keys[1]);
        multiply(score[1], query[k], keys[2], keys[3]);
    }
    float scaled[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
        float top = -INFINITY;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float& one = score[i >> 1][2 * r + (i & 1)];
            one = (i >> 1) * 8 + (lane & 3) * 2 + (i & 1) < tokens ? one * scale : -INFINITY;
            top = fmaxf(top, one);
        }
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(state.top[r], fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2)));
        scaled[r] = power2(state.top[r] - top);
        state.top[r] = top;
        state.sum[r] *= scaled[r];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float& one = score[i >> 1][2 * r + (i & 1)];
            one = power2(one - top);
            state.sum[r] += one;
        }
    }
    u32 weights[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (i % 2 < R) weights[i] = pair_of(score[i / 2][2 * (i % 2)], score[i / 2][2 * (i % 2) + 1]);
    row = half * 8 + (lane & 7);
#pragma unroll
    for (int n = 0; n < D / 8; n += 2) {
        u32 values[4];
        load_transposed(values, tile + place<D>(row, D / 8 + n + (lane >> 4)));
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            float(&sum)[4] = state.value[n + m];
#pragma unroll
            for (int i = 0; i < 2 * R; ++i) sum[i] *= scaled[i / 2];
            multiply(sum, weights, values[2 * m], values[2 * m + 1]);
        }
    }
}

// Copy the tile that begins at token `first` into shared memory; `page_number` is that of its page where a page holds
// whole tiles, else the table is read row by row.
template <int D, bool WHOLE> __device__ __forceinline__ void fetch(const Task& t, const int* table, int first, int length, int page_number, int head, u32 tile) {
    int lane = threadIdx.x & 31;
    constexpr int CHUNKS = D / 4, AT_ONCE = 32 / CHUNKS;   // chunks of a row, rows of one instruction
    int chunk = lane % CHUNKS;
    int64_t stride = (int64_t)t.kv_heads * 2 * D;   // from a token to the next
    const __nv_bfloat16* base = t.cache + head * 2 * D + chunk * 8;
    const __nv_bfloat16* line = WHOLE ? base + ((int64_t)page_number * t.page + (first & (t.page - 1)) + lane / CHUNKS) * stride : base;
#pragma unroll
    for (int i = 0; i < TILE; i += AT_ONCE) {
        int row = i + lane / CHUNKS, token = first + row;
        bool there = token < length;
        if (!WHOLE) line = there ? base + ((int64_t)table[token / t.page] * t.page + token % t.page) * stride : base;
        copy_async(tile + place<D>(row, chunk), line, there);
        if (WHOLE) line += AT_ONCE * stride;   // behind the length still in the page
    }
}

__device__ __forceinline__ void add_part(float4& v, float& sum, float4 other, float2 stat, float top) {
    float weight = stat.x == -INFINITY ? 0.f : power2(stat.x - top);   // no token counts nothing
    sum += stat.y * weight;
    v.x += other.x * weight; v.y += other.y * weight; v.z += other.z * weight; v.w += other.w * weight;
}

// Blocks: kv heads x chunks x tiles of query heads.
template <int D, int R, int WARPS, int STAGES, bool WHOLE> __global__ void __launch_bounds__(WARPS * 32) decode(const Task t) {
    constexpr int TILE_BYTES = TILE * 4 * D;
    extern __shared__ __align__(128) char memory[];
    __shared__ float2 stats[WARPS][ROWS];   // maximum and sum of each row
    __shared__ bool is_last;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = lane >> 2, column = (lane & 3) * 2;
    if (threadIdx.x * 32 < t.requests * t.columns) prefetch(t.table + threadIdx.x * 32);   // while the lengths come
    int touched = threadIdx.x * 8 < t.requests * t.columns ? __ldg(t.table + threadIdx.x * 8) : 0;
    Share share = share_of<WARPS>(t, blockIdx.y);
    if (share.request < 0 || (touched & share.length) == INT_MIN) return;   // the latter never: it keeps the load
    int request = share.request, length = share.length, head = blockIdx.x;
    int first_row = blockIdx.z * ROWS, rows = min(ROWS, t.group - first_row), heads = t.kv_heads * t.group;
    const int* table = t.table + (int64_t)request * t.columns;
    int one = warp + WARPS * share.part, all = WARPS * share.parts;   // this warp takes tiles one, one + all, …
    int tiles = tiles_of(length), own = tiles > one ? (tiles - one + all - 1) / all : 0;
    auto page_of = [&](int number) {   // of the warp's tile `number`
        return WHOLE && number < own ? __ldg(table + ((one + number * all) >> t.page_shift)) : 0;
    };
    int page_number = page_of(lane);
    u32 ring = shared_address(memory) + warp * STAGES * TILE_BYTES;
    int64_t query_row = (int64_t)request * heads + head * t.group + first_row;
    u32 query[D / 16][4] = {};
    const __nv_bfloat16* from = t.query + (query_row + row) * D + column;
    bool low = row < rows && own > 0, high = R == 2 && row + 8 < rows && own > 0;
    auto two = [&](bool there, int offset) { return there ? __ldg(reinterpret_cast<const u32*>(from + offset)) : 0; };
    Softmax<D, R> state;
    // The first turns only fetch. One copy of the code serves them too: a cold call reads its instructions from DRAM.
#pragma unroll 1
    for (int number = -STAGES; number < own; ++number) {
        if (number >= 0) {
            wait_for_all_but<STAGES - 1>();
            __syncwarp();
            step<D, R>(state, query, ring + number % STAGES * TILE_BYTES, length - (one + number * all) * TILE, t.scale);
            __syncwarp();
        }
        int next = number + STAGES;
        if (next > 0 && (next & 31) == 0) page_number = page_of(next + lane);
        if (next < own) {
            int page = __shfl_sync(0xffffffffu, page_number, next & 31);
            fetch<D, WHOLE>(t, table, (one + next * all) * TILE, length, page, head, ring + next % STAGES * TILE_BYTES);
        }
        commit();
        if (number != -1) continue;   // the queries, once the first tiles are on their way
#pragma unroll
        for (int k = 0; k < D / 16; ++k) {
            query[k][0] = two(low, 16 * k); query[k][1] = two(high, 16 * k + 8 * D);
            query[k][2] = two(low, 16 * k + 8); query[k][3] = two(high, 16 * k + 8 * D + 8);
        }
    }
    wait_for_all_but<0>();
    __syncwarp();
    // The warp's result goes into its own ring: 16 rows of D floats.
    float* mine = reinterpret_cast<float*>(memory + warp * STAGES * TILE_BYTES);
#pragma unroll
    for (int r = 0; r < R; ++r) {
        float sum = state.sum[r];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (column == 0) stats[warp][row + 8 * r] = make_float2(state.top[r], sum);
        if (row + 8 * r < rows)
#pragma unroll
            for (int n = 0; n < D / 8; ++n)
                *reinterpret_cast<float2*>(mine + (row + 8 * r) * D + n * 8 + column) = make_float2(state.value[n][2 * r], state.value[n][2 * r + 1]);
    }
    __syncthreads();
    auto write = [&](int r, int c, float4 v, float sum) {
        float factor = sum > 0.f || sum != sum ? 1.f / sum : 0.f;   // no token: zeros
        *reinterpret_cast<uint2*>(t.out + (query_row + r) * D + c) = make_uint2(pair_of(v.x * factor, v.y * factor), pair_of(v.z * factor, v.w * factor));
    };
    int units = rows * (D / 4), most_rows = min(ROWS, t.group);   // a unit: four results
    int64_t size = (int64_t)most_rows * (D + 4);   // a multiple of 16 bytes
    int64_t step_of_parts = gridDim.x * gridDim.z * size;   // from a chunk to the next
    float* part = t.parts + (blockIdx.z * gridDim.x + blockIdx.x) * size + blockIdx.y * step_of_parts;
#pragma unroll 1
    for (int unit = threadIdx.x; unit < units; unit += WARPS * 32) {   // merge the warps
        int r = unit / (D / 4), c = unit % (D / 4) * 4;
        float top = -INFINITY, sum = 0.f;
        float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) top = fmaxf(top, stats[w][r].x);
#pragma unroll
        for (int w = 0; w < WARPS; ++w)
            add_part(v, sum, *reinterpret_cast<const float4*>(memory + w * STAGES * TILE_BYTES + (r * D + c) * 4), stats[w][r], top);
        if (share.parts == 1) { write(r, c, v, sum); continue; }
        *reinterpret_cast<float4*>(part + r * D + c) = v;
        if (c == 0) *reinterpret_cast<float2*>(part + most_rows * D + 2 * r) = make_float2(top, sum);
    }
    if (share.parts == 1) return;
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = count_in_order(t.counters + (request * gridDim.z + blockIdx.z) * gridDim.x + blockIdx.x, share.parts - 1) == share.parts - 1;
    }
    __syncthreads();
    if (!is_last) return;
    const float* first = part - share.part * step_of_parts;   // part 0 of this request
#pragma unroll 1
    for (int unit = threadIdx.x; unit < units; unit += WARPS * 32) {
        int r = unit / (D / 4), c = unit % (D / 4) * 4;
        float top = -INFINITY, sum = 0.f;
        float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll AT_ONCE
        for (int p = 0; p < share.parts; ++p) {
            const float* of = first + p * step_of_parts;
            float2 stat = __ldcg(reinterpret_cast<const float2*>(of + most_rows * D + 2 * r));
            float4 other = __ldcg(reinterpret_cast<const float4*>(of + r * D + c));
            float larger = fmaxf(top, stat.x), factor = top == -INFINITY ? 0.f : power2(top - larger);
            v.x *= factor; v.y *= factor; v.z *= factor; v.w *= factor; sum *= factor;
            add_part(v, sum, other, stat, larger);
            top = larger;
        }
        write(r, c, v, sum);
    }
}

template <int D, int R, bool WHOLE> cudaError_t launch(const Task& t, int chunks, cudaStream_t stream) {
    auto* kernel = decode<D, R, WARPS_, STAGES_ * (128 / D), WHOLE>;
    int bytes = WARPS_ * STAGES_ * TILE * 4 * 128, device = 0;
    static bool prepared[64] = {};   // by device
    cudaGetDevice(&device);
    if (!prepared[device & 63]) {
        cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        if (error) return error;
        prepared[device & 63] = true;
    }
    kernel<<<dim3(t.kv_heads, chunks, (t.group + ROWS - 1) / ROWS), WARPS_ * 32, bytes, stream>>>(t);
    return cudaGetLastError();
}

static PyObject* run(PyObject*, PyObject* const* given, Py_ssize_t count) {
    long long a[16];
    for (int i = 0; i < 16; ++i) a[i] = PyLong_AsLongLong(given[i]);
    Task t = {(const __nv_bfloat16*)a[0], (const __nv_bfloat16*)a[1], (const int*)a[2], (const int*)a[3], (__nv_bfloat16*)a[4],
              (float*)a[5], (unsigned*)a[6], (int)a[7], (int)a[8], (int)a[9], (int)a[11], (int)a[12], (int)a[14], 0, 1.44269504f / sqrtf((float)a[10])};
    bool whole = a[11] >= TILE && (a[11] & (a[11] - 1)) == 0;
    while (TILE << t.page_shift < t.page) ++t.page_shift;
    auto of_width = [&](auto* few, auto* many, auto* by_rows) { return !whole ? by_rows : a[9] <= 8 ? few : many; };
    auto* chosen = a[10] == 128 ? of_width(launch<128, 1, true>, launch<128, 2, true>, launch<128, 2, false>)
                                : of_width(launch<64, 1, true>, launch<64, 2, true>, launch<64, 2, false>);
    return PyLong_FromLong(chosen(t, (int)a[13], (cudaStream_t)a[15]));
}
static PyMethodDef methods[] = {{"run", (PyCFunction)(void*)run, METH_FASTCALL, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "paged_decode", "", -1, methods};
#define INIT(name) PyInit_##name
#define INIT_OF(name) INIT(name)
PyMODINIT_FUNC INIT_OF(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
"""

_run = None
_counters = {}  # by device and stream; every call leaves them at zero


def built():
    """The extension's launcher, built once per process."""
    global _run
    if _run is None:
        flags = ["-O3", "-gencode=arch=compute_90,code=sm_90", "-gencode=arch=compute_90,code=compute_90"]
        numbers = {"WARPS": WARPS, "STAGES": STAGES, "MERGED": MERGED}
        _run = load_inline(
            name="paged_decode_last_" + "_".join(map(str, numbers.values())),
            cpp_sources="",
            cuda_sources=CUDA_SRC,
            no_implicit_headers=True,
            extra_cuda_cflags=[*flags, *(f"-D{name}_={number}" for name, number in numbers.items())],
        ).run
    return _run


@functools.cache
def slots(device):
    """Blocks that share the tokens."""
    return BLOCKS * torch.cuda.get_device_properties(device).multi_processor_count


def counters(device, stream, number):
    """A graph gets its own: it writes their zeros when it runs, and may run beside calls, or after ours have been replaced."""
    graph = torch.cuda.is_current_stream_capturing()
    own = None if graph else _counters.get((device, stream))
    if own is None or own.numel() < number:
        own = torch.zeros(number, dtype=torch.int32, device=f"cuda:{device}")
        if not graph:
            _counters[device, stream] = own
    return own


def kernel_function(query, cache, table, lengths):
    requests, heads, width = query.shape
    kv_heads, both = cache.shape[2:]
    if query.dtype != torch.bfloat16 or cache.dtype != torch.bfloat16 or width not in (64, 128) or both != 2 * width:
        raise ValueError("bfloat16 heads of 64 or 128 values are served")
    if table.dtype != torch.int32 or lengths.dtype != torch.int32 or not cache.is_cuda or heads % kv_heads:
        raise ValueError("tables and lengths must be int32, the cache on a GPU, and the heads whole groups")
    if not cache.is_contiguous() or cache.data_ptr() % 16:
        raise ValueError("the cache must be contiguous, and aligned to 16 bytes")
    if not (query.is_contiguous() and table.is_contiguous() and lengths.is_contiguous()) or query.data_ptr() % 4:
        query, table, lengths = query.contiguous().clone(), table.contiguous(), lengths.contiguous()
    out = query.new_empty((requests, heads, width))
    if not out.numel():
        return out
    if requests > 30_000:
        raise ValueError("at most 30000 requests are served")
    device = query.get_device()
    if device == torch.cuda.current_device():
        launch(query, cache, table, lengths, out, device)
    else:
        with torch.cuda.device(device):
            launch(query, cache, table, lengths, out, device)
    return out


def launch(query, cache, table, lengths, out, device):
    requests, heads, width = query.shape
    _, page, kv_heads, _ = cache.shape
    stream, blocks, group = stream_of(device), slots(device), heads // kv_heads
    inner = kv_heads * -(-group // 16)
    # At least as many chunks as there are parts, since each part is rounded up by less than one.
    chunks = requests + -(-blocks // inner)
    parts = query.new_empty(chunks * inner * min(group, 16) * (width + 4), dtype=torch.float32)
    error = (_run or built())(
        query.data_ptr(),
        cache.data_ptr(),
        table.data_ptr(),
        lengths.data_ptr(),
        out.data_ptr(),
        parts.data_ptr(),
        counters(device, stream, requests * inner).data_ptr(),
        requests,
        kv_heads,
        group,
        width,
        page,
        table.shape[1],
        chunks,
        blocks,
        stream,
    )
    if error:
        raise RuntimeError(f"CUDA error {error}")
