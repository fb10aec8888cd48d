"""Block-sparse linear layer with bias and SiLU for H100, one persistent kernel (TMA, wgmma, clusters of two).

y^T tiles: 128 hidden (one row of blocks) x 256 tokens, wgmma with A = the blocks of W, B = the columns of x that they meet.
 * Clusters of two blocks have the same row and 512 neighbouring tokens: each loads half of W's block for both (multicast).
 * A counter deals out the tiles: GROUP x 512 tokens meet all rows, the fullest first, while their x stays in the L2; then
   the next tokens do. So the last tiles are the shortest. PARTS = 2 halves the rows, and was slower.
 * Two consumer warpgroups of 64 x 256 sums each round a finished tile to bf16 pairs in registers (the reference rounds
   there, too); bias, SiLU, the transpose through shared memory and TMA stores run under the next tile's products.
evals/trials/block_sparse_linear states it.
"""

import functools

import torch
from torch import nn
from torch.utils.cpp_extension import load_inline

CLUSTER = 2  # blocks that share W's tile
GROUP = 2  # neighbouring tiles of tokens that meet all rows before the next ones do
KU = 16  # steps under which the tile before is finished
ASK = 3  # blocks before its end at which a tile's successor is asked for
HINTS = 1  # 1: the result is evicted first, 2: also W last
PARTS = 1  # parts of the rows of blocks, by fullness: one after the other meets all tokens, so that its W stays in the L2
ARRIVE = 0  # 1: one thread of a consumer releases a stage, not one of each warp
PROMOTION = 128  # bytes of the L2 that a load promotes to
PROBE = ""


def wgmma(n):
    half = n // 2
    sums, operands = ", ".join(f"%{i}" for i in range(half)), ", ".join(f'"+f"(d[{i}])' for i in range(half))
    return f"""__device__ __forceinline__ void multiply(float (&d)[{half}], u64 a, u64 b, int keep) {{
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
typedef uint64_t u64;
typedef long long i64;
constexpr int STAGES = 4, BLOCK = 128, BN = 256, SORTED = 256;
constexpr u32 A_BYTES = BLOCK * 64 * 2, B_BYTES = BN * 64 * 2, STAGE_BYTES = A_BYTES + B_BYTES, SLOT = 64 * 64 * 2;
constexpr u32 SLOTS = STAGES * STAGE_BYTES, BARS = SLOTS + 4 * SLOT, INFO = BARS + 128, ORDER = INFO + 64, STARTS = ORDER + 2 * SORTED, SHARED_BYTES = STARTS + 4 * (SORTED + 1);
constexpr u64 W_HINT = HINTS == 2 ? 0x14F0000000000000ull : 0x1000000000000000ull;
static_assert(SHARED_BYTES <= 232448, "shared memory");

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void bar_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory"); }
__device__ __forceinline__ void bar_expect(u32 bar, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory"); }
__device__ __forceinline__ u32 at_block(u32 a, u32 block) {
    u32 r;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(block));
    return r;
}
__device__ __forceinline__ void arrive_at(u32 bar) { asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory"); }
__device__ __forceinline__ void publish_at(u32 bar) { asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory"); }
__device__ __forceinline__ void bar_wait(u32 bar, u32 parity) {
    asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra again;\ndone:\n}" ::"r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ void bar_wait_cluster(u32 bar, u32 parity) {
    asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra again;\ndone:\n}" ::"r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ void load(u32 to, const CUtensorMap* map, u32 bar, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                 ::"r"(to), "l"(map), "r"(bar), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void load_for_both(u32 to, const CUtensorMap* map, u32 bar, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5, %6;"
                 ::"r"(to), "l"(map), "r"(bar), "r"(x), "r"(y), "h"((uint16_t)3), "l"(W_HINT) : "memory");
}
__device__ __forceinline__ void store(const CUtensorMap* map, u32 from, int x, int y) {
    if (HINTS) asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%2, %3}], [%1], %4;" ::"l"(map), "r"(from), "r"(x), "r"(y), "l"(0x12F0000000000000ull) : "memory");
    else asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from), "r"(x), "r"(y) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ int4 read4(u32 at) {
    int4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ u64 descriptor(u32 address) {  // K-major rows of 128 bytes, 128-byte swizzle
    return (u64)((address & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}
@WGMMA@
__device__ __forceinline__ u32 packed(float a, float b) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
    return r;
}
__device__ __forceinline__ float silu(float x) {
    float e, r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * -1.4426950408889634f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + e));
    return x * r;
}
__device__ __forceinline__ u32 finished(u32 v, u32 bias) {
    asm("add.rn.bf16x2 %0, %0, %1;" : "+r"(v) : "r"(bias));
    return packed(silu(__uint_as_float(v << 16)), silu(__uint_as_float(v & 0xffff0000u)));
}

struct Problem { const int *columns, *offsets; const uint16_t* bias; int* counter; int blocks, rows, spans, tiles; };

__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(384, 1)
    sparse_kernel(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap y_map, const Problem s) {
    extern __shared__ __align__(1024) uint8_t raw[];
    const u32 base = shared_address(raw), full = base + BARS, empty = full + 8 * STAGES, told = empty + 8 * STAGES, heard = told + 8;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, group = warp / 4;
    const u32 block = CLUSTER == 1 ? 0 : blockIdx.x % CLUSTER;
    if (threadIdx.x == 0) {
        if (base % 1024) __trap();
        for (int i = 0; i < STAGES; ++i) bar_init(full + 8 * i, 1), bar_init(empty + 8 * i, (ARRIVE ? 2 : 8) * CLUSTER);
        bar_init(told, 1), bar_init(heard, 9 * CLUSTER);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    uint16_t* order = (uint16_t*)(raw + ORDER);
    int* starts = (int*)(raw + STARTS);
    const bool sorted = s.rows <= SORTED;
    if (warp == 9 && block == 0) {
        for (int i = lane; i < min(s.blocks / 32, 1024); i += 32) asm volatile("prefetch.global.L2 [%0];" ::"l"(s.columns + i * 32));
        if (sorted) {  // the fullest row first
            for (int r = lane; r <= s.rows; r += 32) starts[r] = __ldg(s.offsets + r);
            __syncwarp();
            for (int r = lane; r < s.rows; r += 32) {
                const int own = starts[r + 1] - starts[r];
                int rank = 0, last = starts[0];
                #pragma unroll 8
                for (int q = 0; q < s.rows; ++q) {
                    const int next = starts[q + 1], other = next - last;
                    rank += other > own || (other == own && q < r);
                    last = next;
                }
                order[rank] = r;
            }
            __syncwarp();
        }
    }
    if (threadIdx.x == 256) {
        asm volatile("prefetch.tensormap [%0];" ::"l"(&w_map) : "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"(&x_map) : "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"(&y_map) : "memory");
    }
    __syncthreads();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    const u32 heard_first = at_block(heard, 0);
    u32 turn = 0;
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp == 8 && lane == 0) {  // loads
            int stage = 0;
            u32 parity = 1;
            while (true) {
                bar_wait_cluster(told, turn);
                turn ^= 1;
                const int4 tile = read4(base + INFO);  // first block, blocks and row, span of tokens, first column
                if (tile.y < 0) break;
                const int count = tile.y & 0xffff, ask = count > ASK ? count - ASK : 0, token = (tile.z * CLUSTER + block) * BN;
                int column = tile.w;
                if (!count) arrive_at(heard_first);
                for (int b = 0; b < count; ++b) {
                    const int next = b + 1 < count ? __ldg(s.columns + tile.x + b + 1) : 0;
                    #pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const u32 bar = full + 8 * stage, at = base + stage * STAGE_BYTES;
                        bar_wait(empty + 8 * stage, parity);
                        bar_expect(bar, STAGE_BYTES);
                        if (CLUSTER == 2) load_for_both(at + block * (A_BYTES / 2), &w_map, bar, h * 64, (tile.x + b) * BLOCK + block * 64);
                        else load(at, &w_map, bar, h * 64, (tile.x + b) * BLOCK);
                        load(at + A_BYTES, &x_map, bar, column * BLOCK + h * 64, token);
                        if (++stage == STAGES) stage = 0, parity ^= 1;
                    }
                    if (b == ask) arrive_at(heard_first);
                    column = next;
                }
            }
        } else if (warp == 9 && block == 0) {  // deals out tiles
            if (lane == 0) {
                int number = blockIdx.x / CLUSTER;
                while (true) {
                    int first = 0, y = -1, span = 0, column = 0;
                    if (number < s.tiles) {
                        const int half = PARTS == 2 ? s.rows / 2 : 0;
                        const bool second = number >= half * s.spans;
                        const int rows = second ? s.rows - half : half, at = second ? number - half * s.spans : number;
                        const int whole = at / (rows * GROUP) * GROUP, width = min(GROUP, s.spans - whole), within = at - whole * rows, rank = within / width + (second ? half : 0);
                        const int row = sorted ? order[rank] : rank;
                        span = whole + within % width;
                        if (PARTS == 2 && second) span = s.spans - 1 - span;  // backwards: its first x are in the L2
                        first = sorted ? starts[row] : __ldg(s.offsets + row);
                        const int count = (sorted ? starts[row + 1] : __ldg(s.offsets + row + 1)) - first;
                        y = count | row << 16;
                        if (count) column = __ldg(s.columns + first);
                    }
                    #pragma unroll
                    for (u32 i = 0; i < CLUSTER; ++i) {
                        asm volatile("st.shared::cluster.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at_block(base + INFO, i)), "r"(first), "r"(y), "r"(span), "r"(column) : "memory");
                        publish_at(at_block(told, i));
                    }
                    if (y < 0) break;
                    bar_wait_cluster(heard, turn);
                    turn ^= 1;
                    number = gridDim.x / CLUSTER + atomicAdd(s.counter, 1);
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int w4 = warp % 4, thread = threadIdx.x % 128;
        const u32 slots = base + SLOTS + group * 2 * SLOT, empty_at = at_block(empty, CLUSTER == 1 ? 0 : lane % CLUSTER);
        const bool releases = (ARRIVE ? thread : lane) < CLUSTER;
        // the 16 bytes whose address this lane gives to stmatrix: a token, eight hidden
        const u32 mine = slots + ((lane >> 4) * 8 + (lane & 7)) * 128 + (((w4 * 2 + (lane >> 3 & 1)) ^ (lane & 7)) << 4);
        const u64 a0 = descriptor(base + group * (A_BYTES / 2)), b0 = descriptor(base + A_BYTES);
        float d[128];
        u32 pairs[64], bias[2] = {0, 0};
        int stage = 0, before = 0, x = 0, y = 0;
        u32 parity = 0;
        bool have = false;
        #pragma unroll
        for (int i = 0; i < 64; ++i) pairs[i] = 0;
        #pragma unroll
        for (int i = 0; i < 128; ++i) d[i] = 0.0f;

        auto piece = [&](int p) {  // 16 tokens of the tile before
            const int part = p / 4;
            u32 v[4];
            #pragma unroll
            for (int i = 0; i < 4; ++i) v[i] = finished(pairs[4 * p + i], bias[i % 2]);
            asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                         ::"r"(mine + part % 2 * SLOT + p % 4 * 2048), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
            if (p % 4 == 3) {
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                if (thread == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // so the other slot is free
                asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
                if (thread == 0) store(&y_map, slots + part % 2 * SLOT, x, y + part * 64);
            }
        };
        auto step = [&](int k) {
            const u64 a = a0 + stage * (STAGE_BYTES >> 4), b = b0 + stage * (STAGE_BYTES >> 4);
            bar_wait(full + 8 * stage, parity);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            multiply(d, a, b, k);
            #pragma unroll
            for (int i = 1; i < 4; ++i) multiply(d, a + 2 * i, b + 2 * i, 1);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            if (k) {
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                if (releases) arrive_at(empty_at + 8 * before);
            }
            before = stage;
            if (++stage == STAGES) stage = 0, parity ^= 1;
        };

        while (true) {
            bar_wait_cluster(told, turn);
            turn ^= 1;
            const int4 tile = read4(base + INFO);
            if (tile.y < 0) break;
            __syncwarp();
            if (lane == 0) arrive_at(heard_first);
            const int steps = 2 * (tile.y & 0xffff), row = tile.y >> 16, hidden = row * BLOCK + group * 64;
            const uint16_t* at = s.bias + hidden + w4 * 16 + lane / 4;
            const u32 low = __ldg(at), high = __ldg(at + 8);
            int k = 0;
            if (steps >= KU) {
                #pragma unroll
                for (int u = 0; u < KU; ++u) {
                    step(u);
                    if (!NO_EPILOGUE && have) {
                        #pragma unroll
                        for (int p = 0; p < 16 / KU; ++p) piece(u * (16 / KU) + p);
                    }
                }
                k = KU;
            } else if (have) {
                #pragma unroll
                for (int p = 0; p < 16; ++p) piece(p);
            }
            #pragma unroll 1
            for (; k < steps; ++k) step(k);
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            if (steps && releases) arrive_at(empty_at + 8 * before);
            #pragma unroll
            for (int i = 0; i < 128; ++i) asm volatile("" : "+f"(d[i]) :: "memory");
            #pragma unroll
            for (int i = 0; i < 64; ++i) pairs[i] = steps ? packed(d[2 * i], d[2 * i + 1]) : 0;
            bias[0] = low | low << 16, bias[1] = high | high << 16;
            x = hidden, y = (tile.z * CLUSTER + block) * BN, have = true;
        }
        if (have) {
            #pragma unroll
            for (int p = 0; p < 16; ++p) piece(p);
        }
        if (thread == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    if (threadIdx.x == 0 && atomicAdd(s.counter + 32, 1) == (int)gridDim.x - 1) s.counter[0] = 0, s.counter[32] = 0;  // for the next call
}

#define MUST(call) do { int error = int(call); if (error) return error; } while (0)

static int map_of(CUtensorMap& map, const void* data, i64 rows, i64 columns, int box_rows) {
    static void* encode = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (!encode) MUST(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &result));
    cuuint64_t sizes[2] = {(cuuint64_t)columns, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)columns * 2};
    cuuint32_t box[2] = {64, (cuuint32_t)box_rows}, one[2] = {1, 1};
    CUresult error = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void*)data, sizes, strides, box, one,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, PROMOTION == 256 ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return error == CUDA_SUCCESS ? 0 : 10000 + int(error);
}

// blocks, x, bias, columns, offsets, y, counter, number of blocks, tokens, width, rows of blocks, CUDA stream
static int product(const i64* a) {
    const i64 blocks = a[7], tokens = a[8], width = a[9], rows = a[10];
    CUtensorMap w_map, x_map, y_map;
    MUST(map_of(w_map, (void*)(blocks ? a[0] : a[1]), blocks ? blocks * BLOCK : 1, BLOCK, BLOCK / CLUSTER));
    MUST(map_of(x_map, (void*)a[1], tokens, width, BN));
    MUST(map_of(y_map, (void*)a[5], tokens, rows * BLOCK, 64));
    static int multiprocessors[64];
    int device;
    MUST(cudaGetDevice(&device));
    if (device > 63) return 10001;
    if (!multiprocessors[device]) {
        MUST(cudaFuncSetAttribute(sparse_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
        MUST(cudaDeviceGetAttribute(&multiprocessors[device], cudaDevAttrMultiProcessorCount, device));
    }
    const int spans = int((tokens + BN * CLUSTER - 1) / (BN * CLUSTER));
    const Problem s = {(const int*)a[3], (const int*)a[4], (const uint16_t*)a[2], (int*)a[6], int(blocks), int(rows), spans, int(spans * rows)};
    sparse_kernel<<<multiprocessors[device] / CLUSTER * CLUSTER, 384, SHARED_BYTES, (cudaStream_t)a[11]>>>(w_map, x_map, y_map, s);
    return cudaGetLastError();
}

static PyObject* run(PyObject*, PyObject* const* given, Py_ssize_t count) {
    if (count != 12) { PyErr_SetString(PyExc_TypeError, "12 arguments"); return nullptr; }
    i64 a[12];
    for (int i = 0; i < 12; ++i) a[i] = PyLong_AsLongLong(given[i]);
    return PyLong_FromLong(product(a));
}
static PyMethodDef methods[] = {{"run", (PyCFunction)(void*)run, METH_FASTCALL, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "block_sparse", "", -1, methods};
#define INIT(name) PyInit_##name
#define INIT_OF(name) INIT(name)
PyMODINIT_FUNC INIT_OF(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
""".replace("@WGMMA@", wgmma(256))


@functools.cache
def extension():
    constants = (("CLUSTER", CLUSTER), ("GROUP", GROUP), ("KU", KU), ("ASK", ASK), ("HINTS", HINTS), ("PARTS", PARTS), ("ARRIVE", ARRIVE), ("PROMOTION", PROMOTION), ("NO_EPILOGUE", int(PROBE == "no epilogue")))
    source = "".join(f"#define {name} {value}\n" for name, value in constants) + CUDA
    flags = ["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a"]
    return load_inline("block_sparse", "", source, no_implicit_headers=True, with_pytorch_error_handling=False, extra_cuda_cflags=flags).run


_counters = {}


def counter_of(x, stream):
    """Zeros between calls: one buffer for each stream, since calls on one follow each other."""
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(64, dtype=torch.int32, device=x.device)
    key = (x.device.index, stream)
    if key not in _counters:
        _counters[key] = torch.zeros(64, dtype=torch.int32, device=x.device)
    return _counters[key]


def dense(x):
    """x, contiguous and at a multiple of 16 bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


TOKENS, WIDTH, HIDDEN, BLOCK = 8192, 8192, 8192, 128


class ModelNew(nn.Module):
    def __init__(self, width=WIDTH, hidden=HIDDEN):
        super().__init__()
        count = (width // BLOCK) * (hidden // BLOCK) // 4
        self.blocks = nn.Parameter((torch.randn(count, BLOCK, BLOCK) * 2 / width**0.5).bfloat16())
        self.bias = nn.Parameter(torch.randn(hidden).bfloat16())

    def forward(self, x, columns, offsets):
        if x.dim() != 2 or columns.dim() != 1 or offsets.dim() != 1:
            raise ValueError("x must be a matrix, columns and offsets vectors")
        tokens, width = x.shape
        blocks, bias, rows = self.blocks, self.bias, len(offsets) - 1
        if any(t.dtype != torch.bfloat16 or t.device != x.device or not t.is_cuda for t in (x, blocks, bias)):
            raise ValueError("x, blocks and bias must be bf16 on one GPU")
        if any(t.dtype != torch.int32 or t.device != x.device for t in (columns, offsets)):
            raise ValueError("columns and offsets must be int32 on x's GPU")
        if rows < 1 or rows > 32767 or bias.numel() != rows * BLOCK or width % BLOCK or not 0 < width < 1 << 22 or tokens > 1 << 22 or len(columns) != len(blocks) or len(blocks) >= 1 << 24:
            raise ValueError("sizes must fit each other, width and hidden be multiples of 128")
        y = torch.empty(tokens, rows * BLOCK, dtype=torch.bfloat16, device=x.device)
        if tokens == 0:
            return y
        x, blocks, bias, columns, offsets = dense(x), dense(blocks), bias.contiguous(), columns.contiguous(), offsets.contiguous()
        with torch.cuda.device(x.device):
            stream = torch.cuda.current_stream().cuda_stream
            counter = counter_of(x, stream)
            error = extension()(blocks.data_ptr(), x.data_ptr(), bias.data_ptr(), columns.data_ptr(), offsets.data_ptr(), y.data_ptr(),
                                counter.data_ptr(), len(blocks), tokens, width, rows, stream)
        if error:
            raise RuntimeError(f"block_sparse: CUDA error {error}")
        return y
