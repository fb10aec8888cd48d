"""x W with int4 weights for one row of x, CUDA C++ for clusters of blocks (compute capability 9.0). README.md of this
problem says why. Other numbers of rows are those of ring.py.

 * At 4096 values of k the whole product fits into the rings of the multiprocessors: all loads are asked for before the
   first weight is unpacked. A warp has a ring of its own and waits for nobody; a stage is 16 rows of packed.
 * A tile has 8 V columns, so V = 16 reads lines of 128 bytes. WARPS warps of SPLIT blocks share its groups of 128 of k.
 * The nibbles 0 and 4 of a word are weights of two columns of the same k. They stay the pair of a register of mma: x is
   in column 0 of the other operand for the one, in column 1 for the other. So a word takes 4 LOP3 and 3 shifts, no PRMT.
 * Zero points and scales are applied to the sums of a group. Each warp sends its sums to the block of the cluster that
   adds up these columns; one barrier of the cluster follows."""

import torch
from torch.utils.cpp_extension import load_inline

try:
    from torch._C import _cuda_getCurrentRawStream as stream_of  # makes no torch.cuda.Stream
except ImportError:

    def stream_of(device):
        return torch.cuda.current_stream(device).cuda_stream


SPACE = [
    {},
    {"LOADS": 2},
    {"LOADS": 1},
    {"AHEAD": 256},
    {"STAGES": 2, "BLOCKS": 4},
    {"STAGES": 2, "BLOCKS": 4, "LOADS": 2},
    {"STAGES": 2, "WARPS": 4, "SPLIT": 8, "BLOCKS": 6},
    {"V": 8, "SPLIT": 2, "STAGES": 8},
    {"V": 8, "SPLIT": 2, "STAGES": 8, "LOADS": 2},
    {"V": 4, "SPLIT": 1, "STAGES": 12},
    {"V": 4, "SPLIT": 1, "STAGES": 12, "AHEAD": 128},
    {"PROBE": "nothing"},
    {"PROBE": "loads alone"},
    {"PROBE": "no sums"},
]
V = 16  # columns of a lane: 4, 8 or 16
WARPS = 8  # of a block
SPLIT = 4  # blocks of a cluster, which share the groups of k
STAGES = 4  # of a warp's ring, each 32 of k
BLOCKS = 3  # of a multiprocessor, for which the compiler leaves registers
LOADS = 0  # the L2 shall drop, 1: weights before other lines, 2: other lines before weights
AHEAD = 0  # bytes that the L2 reads where it misses: 64, 128 or 256; 0: as it likes
PROBE = ""  # one of PROBES: what such a kernel leaves out shows what the rest takes
PROBES = ("", "nothing", "loads alone", "no sums")
CHOSEN = ("V", "WARPS", "SPLIT", "STAGES", "BLOCKS", "LOADS", "AHEAD")

CUDA = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

typedef uint32_t u32;
#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
#if AHEAD
#define BYTES_AHEAD ".L2::" TEXT(AHEAD) "B"
#else
#define BYTES_AHEAD
#endif
#if LOADS  // a load takes a policy, which is its last operand
#define HINT ".L2::cache_hint"
#define BY(n) ", %" #n
#define POLICY(p) , "l"(p)
#else
#define HINT
#define BY(n)
#define POLICY(p)
#endif
__device__ __forceinline__ uint64_t policy() {
    uint64_t p = 0;
    if (LOADS == 1) asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p));
    if (LOADS == 2) asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(p));
    return p;
}
#define HD __host__ __device__ constexpr
// HD INDEX BEGIN
// Bytes from the start of a stage to the 16 bytes `chunk` of row `row` of 16: lines of 128 bytes, of which the four rows
// 4 t + m of one m use all banks, whatever a row's length is.
HD int place(int v, int row, int chunk) {
    return v == 16 ? row * 128 + (chunk ^ row / 4 * 2) * 16
         : v == 8 ? (row % 4 + row / 8 * 4) * 128 + (row / 4 % 2 * 4 + (chunk ^ row / 8 * 2)) * 16
                  : row % 4 * 128 + (row / 4 * 2 + chunk) * 16;
}
// The row of which lane `lane` copies 16 bytes with its copy `i`, and which 16 bytes.
HD int copied_row(int v, int lane, int i) {
    int one = lane / (v / 2);
    return v == 16 ? 4 * i + one : v == 8 ? 8 * i + one % 2 * 4 + one / 2 : one % 4 * 4 + one / 4;
}
HD int copied_chunk(int v, int lane) { return lane % (v / 2); }
// Which bytes of x become a register of B: k even, or odd; g is the column. Bytes 4 to 7 are zeros.
HD int chosen_bytes(int odd, int g) { return g > 1 ? 0x4444 : g ? (odd ? 0x3244 : 0x1044) : (odd ? 0x4432 : 0x4410); }
// The column, of the four of a word, of sum d of mma.
HD int column_of(int d) { return d % 2 * 2 + d / 2; }
// HD INDEX END

constexpr int TILE = 8 * V, STAGE = 128 * V, OWN = TILE / SPLIT, PITCH = OWN + 4, COPIES = V / 4, THREADS = WARPS * 32;
constexpr int TURNS = (STAGES + 3) / 4;   // groups whose last stage may be in the ring
struct Warp { uint8_t packed[STAGES][STAGE]; uint4 x[STAGES][4]; __nv_bfloat16 scales[TURNS][TILE], zeros[TURNS][TILE]; };
struct Shared { Warp warps[WARPS]; float sums[WARPS * SPLIT * PITCH]; };
static_assert(WARPS * SPLIT <= 32 && OWN % V == 0 && OWN / 4 <= WARPS && sizeof(Shared) <= 232448, "these constants do not fit together");
enum { NOTHING = 1, LOADS_ALONE, NO_SUMS };   // probes

struct Problem { const uint8_t* packed; const __nv_bfloat16 *x, *scales, *zeros; __nv_bfloat16* y; int columns, groups; };

__device__ __forceinline__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void copy_async(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void stream_async(void* to, const void* from) {   // weights, which are read once
    asm volatile("cp.async.cg.shared.global" HINT BYTES_AHEAD " [%0], [%1], 16" BY(2) ";" :: "r"(address(to)), "l"(from) POLICY(policy()) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wait_for_all_but() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }
// m16n8k16: A are weights, B is x, D are sums.
__device__ __forceinline__ void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Nibbles 0 and 4 as the bf16 128 + q.
__device__ __forceinline__ u32 pair(u32 word) {
    asm("lop3.b32 %0, %0, 0x000F000F, 0x43004300, 0xEA;" : "+r"(word));
    return word;
}
__device__ __forceinline__ u32 chosen(u32 x, u32 bytes) { u32 y; asm("prmt.b32 %0, %1, 0, %2;" : "=r"(y) : "r"(x), "r"(bytes)); return y; }

// A stage: 16 rows of packed, their 32 values of x, and with a group's last stage the group's scales and zero points.
__device__ __forceinline__ void fetch(const Problem& p, Warp& s, int number, int group, int first) {
    const int lane = threadIdx.x % 32, stage = number % STAGES, part = number % 4;
    const uint8_t* from = p.packed + min(first + copied_chunk(V, lane) * 16, p.columns - 16);
    #pragma unroll
    for (int i = 0; i < COPIES; ++i) {
        const int row = copied_row(V, lane, i);
        stream_async(s.packed[stage] + place(V, row, copied_chunk(V, lane)), from + (int64_t)(group * 64 + part * 16 + row) * p.columns);
    }
    if (lane < 4) copy_async(s.x[stage] + lane, p.x + group * 128 + part * 32 + lane * 8);
    if (part == 3 && lane < 2 * V) {
        const int at = lane % V * 8, turn = number / 4 % TURNS;
        const int64_t of = (int64_t)group * p.columns + min(first + at, p.columns - 8);
        stream_async((lane < V ? s.scales[turn] : s.zeros[turn]) + at, (lane < V ? p.scales : p.zeros) + of);
    }
}

struct Sums { float of[V / 4][4], total[4]; };   // of 4 g.. columns, and of x; in lanes with t = 0

__device__ __forceinline__ void add_stage(Sums& sums, const uint8_t* packed, const uint4* xs, u32 even, u32 odd) {
    const int lane = threadIdx.x % 32, t = lane % 4, g = lane / 4;
    const u32 ones = 0x3F803F80u;
    const uint4 four = xs[t];
    const u32 x[4] = {four.x, four.y, four.z, four.w};
    #pragma unroll
    for (int m = 0; m < 4; ++m) {
        const uint8_t* from = packed + place(V, 4 * t + m, g * V / 16) + g * V % 16;
        u32 word[4];
        if constexpr (V == 16) *reinterpret_cast<uint4*>(word) = *reinterpret_cast<const uint4*>(from);
        else if constexpr (V == 8) *reinterpret_cast<uint2*>(word) = *reinterpret_cast<const uint2*>(from);
        else word[0] = *reinterpret_cast<const u32*>(from);
        const u32 b0 = chosen(x[m], even), b1 = chosen(x[m], odd);
        multiply(sums.total, ones, ones, ones, ones, b0, b1);
        #pragma unroll
        for (int i = 0; i < V / 4; ++i) multiply(sums.of[i], pair(word[i]), pair(word[i] >> 8), pair(word[i] >> 4), pair(word[i] >> 12), b0, b1);
    }
}

// s (sum - (128 + z) total) of the lane's columns 4 i to 4 i + 3.
__device__ __forceinline__ float4 scaled(const Sums& sums, int i, const __nv_bfloat16* scales, const __nv_bfloat16* zeros) {
    float y[4];
    #pragma unroll
    for (int d = 0; d < 4; ++d) {
        const int column = 4 * i + column_of(d);
        y[column_of(d)] = __bfloat162float(scales[column]) * (sums.of[i][d] - (128.0f + __bfloat162float(zeros[column])) * sums.total[0]);
    }
    return make_float4(y[0], y[1], y[2], y[3]);
}

__device__ __forceinline__ void cluster_arrive() {
    __syncwarp();
    if (SPLIT > 1) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { if (SPLIT > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// Write v, or add it, to the same place of a block of the cluster.
__device__ __forceinline__ void send(float* to, int block, float4 v, bool add) {
    u32 there = address(to);
    if (SPLIT > 1) asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(there) : "r"(block));
    if (add) {
        float4 old;
        asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(old.x), "=f"(old.y), "=f"(old.z), "=f"(old.w) : "r"(there) : "memory");
        v = make_float4(v.x + old.x, v.y + old.y, v.z + old.z, v.w + old.w);
    }
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" :: "r"(there), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

__device__ __forceinline__ u32 pair_of(float low, float high) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const u32*>(&both);
}

// Warp w adds up columns 4 w to 4 w + 3 of the block's own; a lane has the sums of one warp of the cluster.
__device__ __forceinline__ void add_up(const Problem& p, const float* sums, int first, int warp, int lane) {
    const int column = first + 4 * warp;
    if (4 * warp >= OWN || column >= p.columns) return;
    float4 v = make_float4(0, 0, 0, 0);
    if (lane < WARPS * SPLIT) v = *reinterpret_cast<const float4*>(sums + lane * PITCH + 4 * warp);
    #pragma unroll
    for (int step = 16; step; step /= 2) {
        v.x += __shfl_xor_sync(~0u, v.x, step), v.y += __shfl_xor_sync(~0u, v.y, step);
        v.z += __shfl_xor_sync(~0u, v.z, step), v.w += __shfl_xor_sync(~0u, v.w, step);
    }
    if (lane == 0) *reinterpret_cast<uint2*>(p.y + column) = make_uint2(pair_of(v.x, v.y), pair_of(v.z, v.w));
}

__global__ void __launch_bounds__(THREADS, BLOCKS) product(const Problem p) {
    extern __shared__ __align__(128) uint8_t memory[];
    if (PROBE == NOTHING) return;
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4, g = lane / 4, rank = blockIdx.y;
    const int first = blockIdx.x * TILE, one = rank * WARPS + warp, step = WARPS * SPLIT;
    const int stages = one < p.groups ? (p.groups - one + step - 1) / step * 4 : 0;
    const u32 even = chosen_bytes(0, g), odd = chosen_bytes(1, g);
    Warp& s = shared.warps[warp];
    auto ask = [&](int number) {
        if (number < stages) fetch(p, s, number, one + number / 4 * step, first);
        commit();
    };
    #pragma unroll 1
    for (int number = 0; number < STAGES; ++number) ask(number);
    cluster_arrive();   // this block runs: others may write into its memory
    Sums sums = {};
    auto take = [&](int i, float4 v, bool add) {   // the sums of columns 4 i to 4 i + 3 of the lane
        const int at = g * V + 4 * i;
        if (PROBE == NO_SUMS) *reinterpret_cast<uint2*>(p.y + min(first + at, p.columns - 4)) = make_uint2(pair_of(v.x, v.y), pair_of(v.z, v.w));
        else send(shared.sums + one * PITCH + at % OWN, at / OWN, v, add);
    };
    #pragma unroll 1
    for (int number = 0; number < stages; ++number) {
        const int stage = number % STAGES, turn = number / 4 % TURNS;
        wait_for_all_but<STAGES - 1>();
        __syncwarp();
        if (PROBE != LOADS_ALONE) add_stage(sums, s.packed[stage], s.x[stage], even, odd);
        if (number % 4 == 3) {
            if (number == 3) cluster_wait();
            if (t == 0)
                #pragma unroll
                for (int i = 0; i < V / 4; ++i) take(i, scaled(sums, i, s.scales[turn] + g * V, s.zeros[turn] + g * V), number > 3);
            sums = {};
        }
        __syncwarp();
        ask(number + STAGES);
    }
    if (stages == 0) {   // a warp without a group
        cluster_wait();
        if (t == 0) for (int i = 0; i < V / 4; ++i) take(i, make_float4(0, 0, 0, 0), false);
    }
    if (PROBE == NO_SUMS) return;
    if (SPLIT == 1) __syncthreads();
    cluster_arrive();
    cluster_wait();
    add_up(p, shared.sums, first + rank * OWN, warp, lane);
}

static PyObject* run(PyObject*, PyObject* const* given, Py_ssize_t) {  // x, packed, scales, zeros, y, columns, depth, stream
    long long a[8];
    for (int i = 0; i < 8; ++i) a[i] = PyLong_AsLongLong(given[i]);
    const Problem p = {(const uint8_t*)a[1], (const __nv_bfloat16*)a[0], (const __nv_bfloat16*)a[2], (const __nv_bfloat16*)a[3],
                       (__nv_bfloat16*)a[4], (int)a[5], (int)(a[6] / 128)};
    static bool told[64] = {};   // by device
    int device = 0;
    cudaGetDevice(&device);
    if (!told[device & 63]) {
        // three blocks take 227 KB, which the L1 must leave
        int error = cudaFuncSetAttribute(product, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
        if (!error) error = cudaFuncSetAttribute(product, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
        if (error) return PyLong_FromLong(error);
        told[device & 63] = true;
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((p.columns + TILE - 1) / TILE, SPLIT);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = sizeof(Shared);
    config.stream = (cudaStream_t)a[7];
    cudaLaunchAttribute cluster[1];
    cluster[0].id = cudaLaunchAttributeClusterDimension;
    cluster[0].val.clusterDim.x = 1, cluster[0].val.clusterDim.y = SPLIT, cluster[0].val.clusterDim.z = 1;
    config.attrs = cluster, config.numAttrs = SPLIT > 1;
    return PyLong_FromLong(cudaLaunchKernelEx(&config, product, p));
}
static PyMethodDef methods[] = {{"run", (PyCFunction)(void*)run, METH_FASTCALL, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "w4a16", "", -1, methods};
#define INIT(name) PyInit_##name
#define INIT_OF(name) INIT(name)
PyMODINIT_FUNC INIT_OF(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
"""

_run = None


def source():
    """The CUDA C++, and the part of its name that the constants make."""
    values = {name: globals()[name] for name in CHOSEN} | {"PROBE": PROBES.index(PROBE)}
    return "".join(f"#define {name} {value}\n" for name, value in values.items()) + CUDA, "_".join(
        map(str, values.values())
    )


def built():
    """The extension's launcher, built once per process."""
    global _run
    if _run is None:
        text, name = source()
        _run = load_inline(
            f"w4a16_at_once_{name}",
            "",
            text,
            no_implicit_headers=True,
            with_pytorch_error_handling=False,
            extra_cuda_cflags=["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a"],
        ).run
    return _run


def dense(x):
    """x, contiguous and at a multiple of 16 bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def product_of(x, packed, scales, zeros, device):
    (M, K), N = x.shape, packed.shape[1]
    if M != 1 or N % 16 or K % 128:
        raise ValueError(
            "one row, whole groups of 128 of k and columns in sixteens are served; ring.py serves the others"
        )
    if packed.shape[0] * 2 != K or scales.shape != (K // 128, N) or zeros.shape != scales.shape:
        raise ValueError(f"x {tuple(x.shape)}, packed {tuple(packed.shape)}, scales and zeros do not fit together")
    if not x.dtype == scales.dtype == zeros.dtype == torch.bfloat16 or packed.dtype != torch.uint8:
        raise ValueError("x, scales and zeros must be bfloat16, packed uint8")
    if not x.is_cuda or not device == packed.get_device() == scales.get_device() == zeros.get_device():
        raise ValueError("x, packed, scales and zeros must be on one GPU")
    x, packed, scales, zeros = dense(x), dense(packed), dense(scales), dense(zeros)
    y = x.new_empty((M, N))
    if not N:
        return y
    pointers = x.data_ptr(), packed.data_ptr(), scales.data_ptr(), zeros.data_ptr(), y.data_ptr()
    error = (_run or built())(*pointers, N, K, stream_of(device))
    if error:
        raise RuntimeError(f"w4a16: CUDA error {error}")
    return y


def kernel_function(x, packed, scales, zeros):
    device = x.get_device()
    if x.is_cuda and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return product_of(x, packed, scales, zeros, device)
    return product_of(x, packed, scales, zeros, device)
