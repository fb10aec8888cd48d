"""Top-k of rows in one launch, CUDA C++ for clusters of blocks (compute capability 9.0 and newer).

A cluster of blocks shares a row, if there are too few rows; values stay in registers, so they are read once.
 * Threshold: of 32 to 512 groups of threads in a block, each has a largest key. The k-th largest of these is a lower
   bound of the block's k-th value, and few values reach it: some 1.4 k of random ones.
 * Those values are gathered in shared memory, and each counts how many are larger: its rank. Nothing is sorted.
 * A block that takes several pieces loads the next one ahead, and skips a piece in which nothing is larger than the
   k-th so far.
 * The blocks of a cluster read each other's best k from shared memory, and a binary search in each list gives the
   rank in the row. A block writes its own values where the rank says.
 * k = 1 has a kernel of its own with one barrier.
Where more values reach the threshold than the list holds (ties, sorted rows), a bisection over the 32 bits of the key
finds the block's k-th value. Equal values: the smaller index comes first, but a list that overflowed takes any."""

import functools

import torch
from torch.utils.cpp_extension import load_inline

try:
    from torch._C import _cuda_getCurrentRawStream as stream_of  # makes no torch.cuda.Stream
except ImportError:

    def stream_of(device):
        return torch.cuda.current_stream(device).cuda_stream


SPACE = {"BLOCKS": [0.125, 0.25, 0.5, 1.0], "VECTORS": [2, 4], "THREADS": [512, 1024]}
BLOCKS = 0.5  # a multiprocessor, where there are fewer rows
CLUSTER = 8
VECTORS = 4
THREADS = 1024

CUDA_SRC = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda_runtime.h>
#include <stdint.h>

typedef uint32_t u32;
typedef unsigned long long u64;
constexpr int LIST = 1024;    // values that reach the threshold
constexpr int MOST_K = 256;
constexpr int MOST_CLUSTER = 16;

// Keys are ordered as torch orders floats: NaN is the largest. 0 is no value's key.
__device__ __forceinline__ u32 key_of(float x) {
    u32 u = __float_as_uint(x);
    return x != x ? 0xffffffffu : (u & 0x80000000u ? ~u : u | 0x80000000u);
}
__device__ __forceinline__ float value_of(u32 key) { return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key); }
// A key and its index in one number: larger values first, then smaller indices.
__device__ __forceinline__ u64 entry_of(u32 key, u32 index) { return ((u64)key << 32) | (u32)~index; }

__device__ __forceinline__ u32 cluster_rank() { u32 r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
__device__ __forceinline__ u64 remote(const u64* own, u32 rank) {   // the same place of another block's shared memory
    u32 address = (u32)__cvta_generic_to_shared(own), there; u64 value;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(value) : "r"(there) : "memory");
    return value;
}

struct Shared {
    u64 list[LIST + MOST_K];
    u64 best[MOST_K];
    u32 groups[2 * MOST_K];
    u32 partial[32];
    u32 threshold, count, equal;
};

// How many keys of the block are at least `bound`; every thread gets the sum.
template <int N> __device__ u32 block_count(const u32 (&key)[N], u32 bound, Shared& s) {
    u32 own = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) own += key[i] >= bound;
    own = __reduce_add_sync(0xffffffffu, own);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) s.partial[threadIdx.x >> 5] = own;
    __syncthreads();
    u32 lane = threadIdx.x & 31;
    return __reduce_add_sync(0xffffffffu, lane < blockDim.x >> 5 ? s.partial[lane] : 0);
}

// A lower bound of the block's k-th key: the k-th largest of the groups' largest keys. Ends with a barrier.
template <int N> __device__ u32 lower_bound_of_kth(const u32 (&key)[N], int k, int groups, Shared& s) {
    u32 top = key[0];
#pragma unroll
    for (int i = 1; i < N; ++i) top = max(top, key[i]);
    int size = blockDim.x / groups, group = threadIdx.x / size, part = threadIdx.x & (size - 1);
    for (int step = 1; step < size; step <<= 1) top = max(top, __shfl_xor_sync(0xffffffffu, top, step));
    if (part == 0) s.groups[group] = top;
    __syncthreads();
    int rank = 0;
    for (int other = part; other < groups; other += size) {
        u32 theirs = s.groups[other];
        rank += theirs > top || (theirs == top && other < group);
    }
    for (int step = 1; step < size; step <<= 1) rank += __shfl_xor_sync(0xffffffffu, rank, step);
    if (part == 0 && rank == k - 1) s.threshold = top;
    __syncthreads();
    return s.threshold;
}

// The block's k-th key, bit by bit.
template <int N> __device__ u32 kth_key(const u32 (&key)[N], int k, Shared& s) {
    u32 bound = 0;
    for (int bit = 31; bit >= 0; --bit)
        if (block_count(key, bound | 1u << bit, s) >= k) bound |= 1u << bit;
    return bound;
}

// Append the entries of a piece that may be among the row's best k to s.list, which holds `before` entries. Returns the
// number of entries. `first`: index of the thread's first value; V groups of four, `stride` apart.
template <int V> __device__ int gather(const u32 (&key)[4 * V], u32 first, u32 stride, int before, int k, int groups, Shared& s) {
    u32 bound;
    if (before == k) {   // only what is larger than the k-th so far; later pieces have larger indices
        u32 kth = (u32)(s.best[k - 1] >> 32);
        bound = kth + 1;
        bool any = false;
#pragma unroll
        for (int i = 0; i < 4 * V; ++i) any |= key[i] > kth;
        if (!__syncthreads_or(any)) return before;
    } else {
        bound = max(lower_bound_of_kth(key, k, groups, s), 1u);
    }
    auto append = [&](int i) {
        u32 place = before + atomicAdd(&s.count, 1);
        if (place < LIST) s.list[place] = entry_of(key[i], first + (i >> 2) * stride + (i & 3));
    };
#pragma unroll
    for (int i = 0; i < 4 * V; ++i)
        if (key[i] >= bound) append(i);
    __syncthreads();
    int count = before + s.count;
    if (count <= LIST) return count;
    bound = kth_key(key, k, s);
    u32 above = bound == 0xffffffffu ? 0 : block_count(key, bound + 1, s);
    __syncthreads();
    if (threadIdx.x == 0) s.count = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4 * V; ++i)
        if (key[i] > bound || (key[i] == bound && atomicAdd(&s.equal, 1) < k - above)) append(i);
    __syncthreads();
    return before + s.count;
}

// The best k of the list's entries, in falling order, handed one by one to `take(rank, entry)`.
template <class Take> __device__ void rank_entries(int count, int k, const Shared& s, Take take) {
    int team = 1;   // threads for one entry
    while (team < 32 && count * team * 2 <= (int)blockDim.x) team *= 2;
    int part = threadIdx.x & (team - 1), teams = blockDim.x / team;
    for (int start = 0; start < count; start += teams) {
        int own = start + threadIdx.x / team;
        u64 entry = own < count ? s.list[own] : ~0ull;
        int rank = 0;
        for (int other = part; other < count; other += team) rank += s.list[other] > entry;
        for (int step = 1; step < team; step <<= 1) rank += __shfl_xor_sync(0xffffffffu, rank, step);
        if (part == 0 && own < count && rank < k) take(rank, entry);
    }
}

// A cluster of `blocks` blocks a row; a block has `part` values of it, which it takes in pieces of 4 V values a thread.
template <int V> __global__ void __launch_bounds__(1024) top_k(const float* __restrict__ x, float* __restrict__ values,
        int64_t* __restrict__ indices, u32 n, int k, int blocks, u32 part, int groups, bool aligned) {
    __shared__ Shared s;
    extern __shared__ u64 lists[];   // of the cluster: blocks x k entries
    u32 row = blockIdx.x / blocks, rank = blocks > 1 ? cluster_rank() : 0;
    const float* line = x + (int64_t)row * n;
    u32 begin = min(rank * part, n), end = min(begin + part, n);
    u32 stride = 4 * blockDim.x, piece = V * stride;
    int before = 0;
    auto write = [&](int place, u64 entry) {
        values[(int64_t)row * k + place] = value_of((u32)(entry >> 32));
        indices[(int64_t)row * k + place] = (u32)~(u32)entry;
    };
    if (threadIdx.x == 0) s.count = s.equal = 0;
    for (int i = threadIdx.x; i < k; i += blockDim.x) s.best[i] = 0;
    float4 next[V];
    auto load = [&](u32 from) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
            u32 at = from + v * stride;
            if (aligned && at + 4 <= end) {
                next[v] = __ldg(reinterpret_cast<const float4*>(line + at));
            } else {
                next[v].x = at < end ? __ldg(line + at) : 0.f; next[v].y = at + 1 < end ? __ldg(line + at + 1) : 0.f;
                next[v].z = at + 2 < end ? __ldg(line + at + 2) : 0.f; next[v].w = at + 3 < end ? __ldg(line + at + 3) : 0.f;
            }
        }
    };
    load(begin + 4 * threadIdx.x);
    for (u32 start = begin; ; start += piece) {
        u32 key[4 * V], first = start + 4 * threadIdx.x;
#pragma unroll
        for (int v = 0; v < V; ++v) {
            u32 at = first + v * stride;
            key[4 * v] = at < end ? key_of(next[v].x) : 0; key[4 * v + 1] = at + 1 < end ? key_of(next[v].y) : 0;
            key[4 * v + 2] = at + 2 < end ? key_of(next[v].z) : 0; key[4 * v + 3] = at + 3 < end ? key_of(next[v].w) : 0;
        }
        bool last = start + piece >= end;
        if (!last) load(first + piece);
        int count = gather<V>(key, first, stride, before, k, groups, s);
        if (last && blocks == 1) { rank_entries(count, k, s, write); return; }
        if (count > before) {
            rank_entries(count, k, s, [&](int place, u64 entry) { s.best[place] = entry; });
            __syncthreads();
            before = min(count, k);
            for (int i = threadIdx.x; i < before; i += blockDim.x) s.list[i] = s.best[i];
            if (threadIdx.x == 0) s.count = s.equal = 0;
            __syncthreads();
        }
        if (last) break;
    }
    cluster_arrive();
    cluster_wait();
    for (int i = threadIdx.x; i < blocks * k; i += blockDim.x) lists[i] = remote(s.best + i % k, i / k);
    cluster_arrive();   // done with the other blocks' memory
    __syncthreads();
    for (int i = threadIdx.x; i < k * MOST_CLUSTER; i += blockDim.x) {
        int own = i / MOST_CLUSTER, other = i % MOST_CLUSTER;
        u64 entry = s.best[own];
        int low = 0, high = other < blocks ? k : 0;   // entries of the other list that are larger
        const u64* theirs = lists + other * k;
        while (low < high) {
            int middle = (low + high) / 2;
            if (theirs[middle] > entry) low = middle + 1; else high = middle;
        }
        u32 team = 0xffffu << (threadIdx.x & 16);
        for (int step = 1; step < MOST_CLUSTER; step <<= 1) low += __shfl_xor_sync(team, low, step);
        if (other == 0 && entry && low < k) write(low, entry);
    }
    cluster_wait();
}

// k = 1: a block a row; each thread keeps its largest key and that key's first index.
__global__ void __launch_bounds__(1024) largest(const float* __restrict__ x, float* __restrict__ values, int64_t* __restrict__ indices, u32 n, bool aligned) {
    __shared__ u32 keys[32], places[32];
    const float* line = x + (int64_t)blockIdx.x * n;
    u32 best = 0, place = 0, lane = threadIdx.x & 31, step = (aligned ? 4 : 1) * blockDim.x;
    auto take = [&](float value, u32 at) {
        u32 key = key_of(value);
        if (key > best) { best = key; place = at; }
    };
#pragma unroll 4
    for (u32 at = (aligned ? 4 : 1) * threadIdx.x; at < n; at += step) {
        if (aligned) {
            float4 four = __ldg(reinterpret_cast<const float4*>(line + at));
            take(four.x, at); take(four.y, at + 1); take(four.z, at + 2); take(four.w, at + 3);
        } else {
            take(__ldg(line + at), at);
        }
    }
    auto reduce = [&]() {   // over the warp; of equal keys the first
        u32 top = __reduce_max_sync(0xffffffffu, best);
        place = __reduce_min_sync(0xffffffffu, best == top ? place : 0xffffffffu);
        best = top;
    };
    reduce();
    if (lane == 0) { keys[threadIdx.x >> 5] = best; places[threadIdx.x >> 5] = place; }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    bool there = lane < blockDim.x >> 5;
    best = there ? keys[lane] : 0; place = there ? places[lane] : 0xffffffffu;
    reduce();
    if (lane == 0) { values[blockIdx.x] = value_of(best); indices[blockIdx.x] = place; }
}

template <int V> cudaError_t launch(const float* x, float* values, int64_t* indices, u32 rows, u32 n, int k, int blocks,
                                    u32 part, int threads, int groups, bool aligned, cudaStream_t stream) {
    if (k == 1 && blocks == 1) {
        largest<<<rows, threads, 0, stream>>>(x, values, indices, n, aligned);
        return cudaGetLastError();
    }
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = blocks; cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    config.gridDim = dim3(rows * blocks); config.blockDim = dim3(threads); config.stream = stream;
    config.dynamicSmemBytes = blocks > 1 ? blocks * k * sizeof(u64) : 0;
    config.attrs = &cluster; config.numAttrs = blocks > 1;
    if (blocks > 8) {
        static bool allowed[64] = {};   // by device
        int device = 0;
        cudaGetDevice(&device);
        if (!allowed[device & 63]) {
            cudaError_t error = cudaFuncSetAttribute(top_k<V>, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
            if (error) return error;
            allowed[device & 63] = true;
        }
    }
    return cudaLaunchKernelEx(&config, top_k<V>, x, values, indices, n, k, blocks, part, groups, aligned);
}

static PyObject* run(PyObject*, PyObject* const* given, Py_ssize_t count) {
    long long a[12];
    for (int i = 0; i < 12; ++i) a[i] = PyLong_AsLongLong(given[i]);
    auto* chosen = a[9] == 1 ? launch<1> : a[9] == 2 ? launch<2> : launch<4>;
    cudaError_t error = chosen((const float*)a[0], (float*)a[1], (int64_t*)a[2], (u32)a[3], (u32)a[4], (int)a[5], (int)a[6], (u32)a[7],
                               (int)a[8], (int)a[10], a[0] % 16 == 0 && a[4] % 4 == 0, (cudaStream_t)a[11]);
    return PyLong_FromLong(error);
}
static PyMethodDef methods[] = {{"run", (PyCFunction)(void*)run, METH_FASTCALL, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "top_k", "", -1, methods};
#define INIT(name) PyInit_##name
#define INIT_OF(name) INIT(name)
PyMODINIT_FUNC INIT_OF(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
"""

_run = None


def built():
    """The extension's launcher, built once per process."""
    global _run
    if _run is None:
        flags = ["-O3", "-gencode=arch=compute_90,code=sm_90", "-gencode=arch=compute_90,code=compute_90"]
        _run = load_inline(
            name="top_k_cluster",
            cpp_sources="",
            cuda_sources=CUDA_SRC,
            no_implicit_headers=True,
            extra_cuda_cflags=flags,
        ).run
    return _run


def power_above(number):
    return 1 << max(number - 1, 0).bit_length()


def power_below(number):
    return 1 << number.bit_length() - 1


@functools.cache
def shape(rows, n, k, device):
    """(blocks a row, values a block, threads, vectors of four values a thread, groups)"""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    blocks = power_below(max(1, min(CLUSTER, round(BLOCKS * processors / rows), n // 1024)))
    part = -(-n // blocks // 4) * 4
    most = THREADS if rows <= 2 * processors else 256  # several blocks a multiprocessor hide each other's waits
    threads = max(power_above(2 * k), 64, min(most, power_above(-(-part // (4 * VECTORS)))))
    return blocks, part, threads, VECTORS, max(32, power_above(2 * k))


def kernel_function(x, k):
    if x.dim() != 2 or x.dtype != torch.float32 or not x.is_cuda:
        raise ValueError("x must be a matrix of float32 on a GPU")
    rows, n = x.shape
    if not 1 <= k <= min(n, 256) or n >= 1 << 31 or rows >= 1 << 26:
        raise ValueError("k must be from 1 to 256 and at most the row's length")
    if not x.is_contiguous():
        x = x.contiguous()
    values, indices = x.new_empty((rows, k)), x.new_empty((rows, k), dtype=torch.int64)
    device = x.get_device()
    blocks, part, threads, vectors, groups = shape(rows, n, k, device)
    stream = stream_of(device)
    run = _run or built()
    if device == torch.cuda.current_device():
        error = run(
            x.data_ptr(),
            values.data_ptr(),
            indices.data_ptr(),
            rows,
            n,
            k,
            blocks,
            part,
            threads,
            vectors,
            groups,
            stream,
        )
    else:
        with torch.cuda.device(device):
            error = run(
                x.data_ptr(),
                values.data_ptr(),
                indices.data_ptr(),
                rows,
                n,
                k,
                blocks,
                part,
                threads,
                vectors,
                groups,
                stream,
            )
    if error:
        raise RuntimeError(f"CUDA error {error}")
    return values, indices
