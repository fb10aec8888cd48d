"""Late interaction (MaxSim) for Hopper: queries stay in registers (A of wgmma), documents stream through a TMA ring as B.

 * A warp owns one query: its 32 rows are the 16 rows of the warp in two m64 tiles, so the sum needs no other warp.
 * A document's valid tokens, in granules of 8, are cut into equal chunks of at most 128; wgmma's n is the chunk's size.
 * Blocks (clusters) take equal shares of the granules of (tile of queries, document): each computes the prefix sums itself.
evals/trials/maxsim states it.
"""

import functools

import torch
from torch import nn
from torch.utils.cpp_extension import load_inline

CLUSTER = 2
TURNS = 0
STAGES = 6
HALF = 0  # the turn passes on after the first of the two products
PROBE = ""


def wgmma(n):
    half = n // 2
    sums, operands = ", ".join(f"%{i}" for i in range(half)), ", ".join(f'"+f"(d[{i}])' for i in range(half))
    a = ", ".join(f"%{half + i}" for i in range(4))
    return f"""template <int KEEP> __device__ __forceinline__ void multiply(float (&d)[{half}], u32 a0, u32 a1, u32 a2, u32 a3, uint64_t b) {{
    asm volatile("{{.reg .pred p; setp.ne.b32 p, %{half + 5}, 0; "
                 "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{sums}}}, {{{a}}}, %{half + 4}, p, 1, 1, 0;}}"
                 : {operands} : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(KEEP));
}}
"""


CUDA = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>

typedef uint32_t u32;
constexpr int THREADS = 384, CHUNK = 16;  // granules of 8 tokens
constexpr u32 PANEL = CHUNK * 8 * 128, STAGE = 2 * PANEL;
constexpr u32 INFO = STAGES * STAGE, BARS = INFO + 16 * STAGES, SHARED_BYTES = BARS + 16 * STAGES;
static_assert(SHARED_BYTES <= 232448, "shared memory");

struct Maps { CUtensorMap of[CHUNK]; };  // boxes of 8, 16, ... tokens

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
__device__ __forceinline__ void load(u32 to, const CUtensorMap* map, u32 bar, int k, int token) {
    if (CLUSTER == 2) asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;"
                 ::"r"(to), "l"(map), "r"(bar), "r"(k), "r"(token), "h"((uint16_t)3) : "memory");
    else asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                 ::"r"(to), "l"(map), "r"(bar), "r"(k), "r"(token) : "memory");
}
__device__ __forceinline__ uint64_t descriptor(u32 address) {
    return (uint64_t)((address & 0x3FFFF) >> 4) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}
@WGMMA@

template <int N> __device__ __forceinline__ void product(float (&d)[N / 2], const u32 (&a)[32], uint64_t b) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    multiply<0>(d, a[0], a[1], a[2], a[3], b);
    #pragma unroll
    for (int i = 1; i < 8; ++i) multiply<1>(d, a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3], b + i % 4 * 2 + i / 4 * (PANEL >> 4));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N> __device__ __forceinline__ void largest(float (&d)[N / 2], float& low, float& high, int limit) {
    const float none = __int_as_float(0xff800000);
    constexpr int last = N / 2 - 4;
    const bool one = limit > 0, two = limit > 1;  // tokens from this lane's first column of the last granule on
    float l0 = fmaxf(low, one ? d[last] : none), l1 = two ? d[last + 1] : none, h0 = fmaxf(high, one ? d[last + 2] : none), h1 = two ? d[last + 3] : none;
    #pragma unroll
    for (int j = 0; j < (NO_MAX ? 0 : last); j += 4) l0 = fmaxf(l0, d[j]), l1 = fmaxf(l1, d[j + 1]), h0 = fmaxf(h0, d[j + 2]), h1 = fmaxf(h1, d[j + 3]);
    low = fmaxf(l0, l1), high = fmaxf(h0, h1);
}
__device__ __forceinline__ void turn_wait(int group) { if (TURNS) asm volatile("bar.sync %0, 256;" ::"r"(group + 1) : "memory"); }
__device__ __forceinline__ void turn_pass(int group) { if (TURNS) asm volatile("bar.arrive %0, 256;" ::"r"(2 - group) : "memory"); }

template <int N> __device__ __forceinline__ void chunk(const u32 (&a0)[32], const u32 (&a1)[32], u32 at, u32 empty, float (&most)[4], int limit, int group, int lane) {
    float d0[N / 2], d1[N / 2];
    #pragma unroll
    for (int i = 0; i < N / 2; ++i) d0[i] = 0, d1[i] = 0;
    const uint64_t b = descriptor(at);
    turn_wait(group);
    product<N>(d0, a0, b);
    if (HALF) turn_pass(group);
    product<N>(d1, a1, b);
    if (!HALF) turn_pass(group);
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    #pragma unroll
    for (int i = 0; i < N / 2; ++i) asm volatile("" : "+f"(d0[i]) :: "memory");
    largest<N>(d0, most[0], most[1], limit);
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    #pragma unroll
    for (int i = 0; i < N / 2; ++i) asm volatile("" : "+f"(d1[i]) :: "memory");
    if (CLUSTER == 2) { if (lane < 2) bar_arrive_at(empty, lane); }
    else if (lane == 0) bar_arrive(empty);
    largest<N>(d1, most[2], most[3], limit);
}

struct Problem { int queries, rows, documents, tokens, tiles; };

__device__ __forceinline__ int granules(int length, int tokens) { return max(1, (min(length, tokens) + 7) / 8); }

enum { LAST = 1 << 16, SEGMENT = 1 << 17, END = 1 << 18 };

__global__ void __launch_bounds__(THREADS, 1)
    maxsim_kernel(const __grid_constant__ Maps maps, const uint16_t* __restrict__ q, const int* __restrict__ lengths, float* __restrict__ scores, Problem s) {
    extern __shared__ __align__(1024) uint8_t raw[];
    __shared__ int sums[THREADS / 32], bounds[2];
    const u32 ring = shared_address(raw), full = ring + BARS, empty = full + 8 * STAGES, infos = ring + INFO;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, group = warp / 4;
    u32 block = 0;
    if (CLUSTER == 2) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
    if (threadIdx.x == 0) {
        if (ring % 1024) __trap();
        bounds[0] = bounds[1] = 0;
        for (int i = 0; i < STAGES; ++i) bar_init(full + 8 * i, 1), bar_init(empty + 8 * i, 8 * CLUSTER);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    // this cluster's share: items (tile of queries, document) that start within its part of all granules
    const int each = (s.documents + THREADS - 1) / THREADS, first = threadIdx.x * each, stop = min(first + each, s.documents);
    int own = 0;
    #pragma unroll 6
    for (int i = first; i < stop; ++i) own += granules(__ldg(lengths + i), s.tokens);
    int before = own;
    #pragma unroll
    for (int i = 1; i < 32; i *= 2) {
        const int other = __shfl_up_sync(~0u, before, i);
        if (lane >= i) before += other;
    }
    if (lane == 31) sums[warp] = before;
    before -= own;
    __syncthreads();
    int total = 0;
    #pragma unroll
    for (int i = 0; i < THREADS / 32; ++i) {
        if (i < warp) before += sums[i];
        total += sums[i];
    }
    const long long all = (long long)total * s.tiles, clusters = gridDim.x / CLUSTER, me = blockIdx.x / CLUSTER;
    const long long from = all * me / clusters, to = all * (me + 1) / clusters;
    const int tile_from = int(from / total), tile_to = int(to / total), rest_from = int(from % total), rest_to = int(to % total);
    {
        int count_from = 0, count_to = 0;
        #pragma unroll 6
        for (int i = first; i < stop; ++i) {
            count_from += before < rest_from, count_to += before < rest_to;
            before += granules(__ldg(lengths + i), s.tokens);
        }
        count_from = __reduce_add_sync(~0u, count_from), count_to = __reduce_add_sync(~0u, count_to);
        if (lane == 0) {
            if (count_from) atomicAdd(&bounds[0], count_from);
            if (count_to) atomicAdd(&bounds[1], count_to);
        }
    }
    if (CLUSTER == 2) asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    else __syncthreads();
    const long long item_from = (long long)tile_from * s.documents + bounds[0], item_to = (long long)tile_to * s.documents + bounds[1];
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp == 8 && lane == 0 && item_from < item_to) {
            int stage = 0, tile = int(item_from / s.documents), document = int(item_from % s.documents), filled = 0;
            u32 parity = 1;
            int length = __ldg(lengths + document);
            for (long long left = item_to - item_from; left > 0; --left) {
                const int next = document + 1 < s.documents ? document + 1 : 0;
                const int next_length = __ldg(lengths + next);
                const int parts = granules(length, s.tokens), chunks = (parts + CHUNK - 1) / CHUNK, base = parts / chunks, more = parts % chunks;
                int token = 0;
                for (int c = 0; c < chunks; ++c) {
                    const int size = base + (c < more);
                    bar_wait(empty + 8 * stage, parity);
                    int flags = size;
                    if (c == chunks - 1) flags |= LAST | (next == 0 ? SEGMENT : 0) | (left == 1 ? SEGMENT | END : 0);
                    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(infos + 16 * stage), "r"(flags), "r"(c == chunks - 1 ? min(length, s.tokens) - token - 8 * (size - 1) : 8), "r"(document), "r"(0) : "memory");
                    const CUtensorMap* map = &maps.of[size - 1];
                    const int row = document * s.tokens + token;
                    const u32 at = ring + stage * STAGE;
                    if (NO_LOADS && filled >= STAGES) bar_arrive(full + 8 * stage);
                    else {
                        ++filled;
                        bar_expect(full + 8 * stage, size * 2048);
                        if (CLUSTER == 2) load(at + block * PANEL, map, full + 8 * stage, block * 64, row);
                        else load(at, map, full + 8 * stage, 0, row), load(at + PANEL, map, full + 8 * stage, 64, row);
                    }
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                    token += 8 * size;
                }
                length = next_length, document = next;
                if (next == 0) ++tile;
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        if (item_from < item_to) {
            int stage = 0, tile = int(item_from / s.documents);
            u32 parity = 0;
            const float none = __int_as_float(0xff800000);
            if (TURNS && group == 1) turn_pass(group);
            for (bool going = true; going; ++tile) {
                const int query = (tile * CLUSTER + block) * 8 + warp;
                u32 a0[32], a1[32];
                #pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int r0 = h * 8 + lane / 4, r1 = r0 + 16;
                    const bool in0 = query < s.queries && r0 < s.rows, in1 = query < s.queries && r1 < s.rows;
                    const u32 *p0 = (const u32*)(q + ((long long)query * s.rows + r0) * 128) + lane % 4, *p1 = p0 + 16 * 64;
                    #pragma unroll
                    for (int k = 0; k < 16; ++k) {
                        a0[k * 2 + h] = in0 ? __ldg(p0 + k * 4) : 0u;
                        a1[k * 2 + h] = in1 ? __ldg(p1 + k * 4) : 0u;
                    }
                }
                float most[4] = {none, none, none, none};
                int flags;
                do {
                    bar_wait(full + 8 * stage, parity);
                    int left, document, unused;
                    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(flags), "=r"(left), "=r"(document), "=r"(unused) : "r"(infos + 16 * stage) : "memory");
                    flags = __shfl_sync(~0u, flags, 0);
                    const int limit = left - lane % 4 * 2;
                    const u32 at = ring + stage * STAGE, release = empty + 8 * stage;
                    switch (flags & 0xff) {
@CASES@
                    }
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                    if (flags & LAST) {
                        #pragma unroll
                        for (int i = 0; i < 4; ++i) most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], 1));
                        #pragma unroll
                        for (int i = 0; i < 4; ++i) most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], 2));
                        float sum = 0;
                        #pragma unroll
                        for (int i = 0; i < 4; ++i) sum += i * 8 + lane / 4 < s.rows ? most[i] : 0.f, most[i] = none;
                        sum += __shfl_xor_sync(~0u, sum, 4);
                        sum += __shfl_xor_sync(~0u, sum, 8);
                        sum += __shfl_xor_sync(~0u, sum, 16);
                        if (lane == 0 && query < s.queries) scores[(long long)query * s.documents + document] = sum;
                    }
                } while (!(flags & SEGMENT));
                going = !(flags & END);
            }
        }
    }
    __syncwarp();
    if (CLUSTER == 2) asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

#define MUST(call) do { int error = int(call); if (error) return error; } while (0)

static int map_of(CUtensorMap& map, const void* data, cuuint64_t rows, cuuint32_t box_rows) {
    static void* encode = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (!encode) MUST(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &result));
    const cuuint64_t sizes[2] = {128, rows}, strides[1] = {256};
    const cuuint32_t box[2] = {64, box_rows}, one[2] = {1, 1};
    CUresult error = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void*)data, sizes, strides, box, one,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return error == CUDA_SUCCESS ? 0 : 10000 + int(error);
}

// q, d, lengths, scores, queries, rows, documents, tokens, stream
static int maxsim(const long long* g) {
    Problem s{int(g[4]), int(g[5]), int(g[6]), int(g[7]), int((g[4] + 8 * CLUSTER - 1) / (8 * CLUSTER))};
    static Maps maps;
    static long long known[2] = {0, 0};
    if (known[0] != g[1] || known[1] != g[6] * g[7]) {
        known[0] = 0;
        for (int i = 0; i < CHUNK; ++i) MUST(map_of(maps.of[i], (void*)g[1], g[6] * g[7], 8 * (i + 1)));
        known[0] = g[1], known[1] = g[6] * g[7];
    }
    cudaLaunchAttribute attributes[1];
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = CLUSTER, attributes[0].val.clusterDim.y = 1, attributes[0].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.blockDim = dim3(THREADS), config.dynamicSmemBytes = SHARED_BYTES, config.stream = (cudaStream_t)g[8];
    config.attrs = attributes, config.numAttrs = 1;
    static int fits[64];
    int device, multiprocessors;
    MUST(cudaGetDevice(&device));
    if (device > 63) return 10001;
    if (!fits[device]) {
        MUST(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
        MUST(cudaFuncSetAttribute(maxsim_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
        config.gridDim = dim3(multiprocessors / CLUSTER * CLUSTER);
        int most = 0;
        MUST(cudaOccupancyMaxActiveClusters(&most, maxsim_kernel, &config));
        fits[device] = most < multiprocessors / CLUSTER ? most : multiprocessors / CLUSTER;
        if (fits[device] < 1) return 10002;
    }
    config.gridDim = dim3(fits[device] * CLUSTER);
    MUST(cudaLaunchKernelEx(&config, maxsim_kernel, maps, (const uint16_t*)g[0], (const int*)g[2], (float*)g[3], s));
    return cudaGetLastError();
}

static PyObject* run(PyObject*, PyObject* const* given, Py_ssize_t count) {
    if (count != 9) { PyErr_SetString(PyExc_TypeError, "9 arguments"); return nullptr; }
    long long g[9];
    for (int i = 0; i < 9; ++i) g[i] = PyLong_AsLongLong(given[i]);
    return PyLong_FromLong(maxsim(g));
}
static PyMethodDef methods[] = {{"run", (PyCFunction)(void*)run, METH_FASTCALL, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "maxsim", "", -1, methods};
#define INIT(name) PyInit_##name
#define INIT_OF(name) INIT(name)
PyMODINIT_FUNC INIT_OF(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
"""


@functools.cache
def extension():
    constants = (("CLUSTER", CLUSTER), ("TURNS", TURNS), ("STAGES", STAGES), ("HALF", HALF), ("NO_LOADS", int(PROBE == "no loads")), ("NO_MAX", int(PROBE == "no max")))
    cases = "\n".join(f"                        case {n}: chunk<{8 * n}>(a0, a1, at, release, most, limit, group, lane); break;" for n in range(1, 17))
    source = CUDA.replace("@WGMMA@", "".join(wgmma(8 * n) for n in range(1, 17))).replace("@CASES@", cases)
    source = "".join(f"#define {name} {value}\n" for name, value in constants) + source
    flags = ["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a"]
    return load_inline("maxsim", "", source, no_implicit_headers=True, with_pytorch_error_handling=False, extra_cuda_cflags=flags).run


class ModelNew(nn.Module):
    def forward(self, q: torch.Tensor, d: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        if q.dim() != 3 or d.dim() != 3 or q.shape[2] != 128 or d.shape[2] != 128 or not 1 <= q.shape[1] <= 32 or lengths.shape != d.shape[:1]:
            raise ValueError("q must be (queries, at most 32 tokens, 128), d (documents, tokens, 128), lengths (documents,)")
        if not q.is_cuda or d.device != q.device or lengths.device != q.device:
            raise ValueError("q, d and lengths must be on one GPU")
        if q.dtype != torch.bfloat16 or d.dtype != torch.bfloat16 or lengths.dtype != torch.int32:
            raise ValueError("q and d must be bf16, lengths int32")
        (queries, rows), (documents, tokens) = q.shape[:2], d.shape[:2]
        if not q.numel() or not d.numel() or documents * tokens >= 2**31 - 256 or queries >= 2**24:
            raise ValueError("sizes must be positive, and documents x tokens below 2^31")
        q, d, lengths = q.contiguous(), d.contiguous(), lengths.contiguous()
        if d.data_ptr() % 16:
            d = d.clone()
        if q.data_ptr() % 4:
            q = q.clone()
        scores = torch.empty((queries, documents), dtype=torch.float32, device=q.device)
        with torch.cuda.device(q.device):
            error = extension()(
                q.data_ptr(), d.data_ptr(), lengths.data_ptr(), scores.data_ptr(),
                queries, rows, documents, tokens, torch.cuda.current_stream().cuda_stream,
            )
        if error:
            raise RuntimeError(f"maxsim: CUDA error {error}")
        return scores
