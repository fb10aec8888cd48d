"""x W with int4 weights. Up to 8 rows: the bytes that a lane loads are its operands. 9 to 32: through a ring by TMA, many
small blocks an SM. More: unpacked weights are the operand of wgmma in registers. README.md of this problem says what was
tried.

Up to 8 rows the two weights of a byte are the pair of k in a register of mma, and k is permuted in weights and x alike;
zero points and scales are applied to the sums of a group. 9 to 32 rows: a block has 128 columns, a cluster of SPLIT blocks
shares the groups of k, and each warp has 8 V columns. It unpacks a weight once for all rows, as the reference rounds it:
(q - z) s, where 128 + z is a bf16 in one subtraction less. mma.sync takes k and the rows of x in an order in which neither
meets a bank twice. Sums meet in shared memory, across the cluster.
"""

import torch
import triton
import triton.language as tl
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
    {"AHEAD": 128},
    {"AHEAD": 256},
    {"LOADS": 2, "AHEAD": 128},
    {"ONE_V": 8},
    {"ONE_V": 8, "LOADS": 2},
    {"ONE_V": 8, "AHEAD": 128},
]
# Columns of a lane, warps of a block, blocks that share the groups of a tile: for one row (from WIDE_FROM columns on, or
# fewer), and up to 8 rows.
WIDE_FROM = 8192
ONE_V = 4
ONE_WARPS = 8
ONE_SPLIT = 1
NARROW_V = 4
NARROW_WARPS = 16
NARROW_SPLIT = 1
FEW_V = 8
FEW_WARPS = 4
FEW_SPLIT = 1
# Columns of a lane, blocks of a cluster, stages, blocks of an SM: 9 to 16 rows, and 17 to 32.
SIXTEEN = (8, 4, 3, 4)
THIRTY = (4, 4, 3, 4)
STAGES = 4  # for more rows
LOADS = 0  # up to 32 rows: the L2 shall drop, 1: weights before other lines, 2: other lines before weights
AHEAD = 0  # up to 8 rows: bytes that the L2 reads where it misses: 64, 128 or 256; 0: as it likes
BY_WGMMA = 1
PREFIXES = ("WIDE", "ONE", "NARROW", "FEW", "STAGES", "SIXTEEN", "THIRTY", "LOADS", "AHEAD")
CHOSEN = [name for name in tuple(globals()) if name.split("_")[0] in PREFIXES]


@triton.jit
def unpacked_product(
    x,
    packed,
    scales,
    zeros,
    y,
    parts,
    arrived,
    M,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Weights as 128 + q in bf16 (no conversion, only bits); zero points and scales are applied to the sums of a group."""
    tile, part, m = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BM + tl.arange(0, BM)
    n, row = tile * BN + tl.arange(0, BN), tl.arange(0, 64)
    columns, rows = n[None, :] < N, m[:, None] < M
    groups = tl.cdiv(K // 128, SPLIT)
    pairs = x.to(tl.pointer_type(tl.int32), bitcast=True) + m[:, None].to(tl.int64) * (K // 2)
    acc = tl.zeros((BM, BN), tl.float32)
    for group in tl.range(part * groups, tl.minimum(part * groups + groups, K // 128), num_stages=STAGES):
        at = group * 64 + row
        two = tl.load(packed + at[:, None].to(tl.int64) * N + n[None, :], mask=columns, other=0).to(tl.int16)
        pair = tl.load(pairs + at[None, :], mask=rows, other=0)
        even, odd = (
            pair.to(tl.int16).to(tl.bfloat16, bitcast=True),
            (pair >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True),
        )
        low = ((two & 15) | 0x4300).to(tl.bfloat16, bitcast=True)
        high = (((two >> 4) & 15) | 0x4300).to(tl.bfloat16, bitcast=True)
        raw = tl.dot(odd, high, tl.dot(even, low))
        total = tl.sum(even.to(tl.float32) + odd.to(tl.float32), 1)
        scale = tl.load(scales + group * N + n, mask=n < N, other=0.0).to(tl.float32)
        zero = tl.load(zeros + group * N + n, mask=n < N, other=0.0).to(tl.float32) + 128.0
        acc += (raw - total[:, None] * zero[None, :]) * scale[None, :]
    here = m[:, None].to(tl.int64) * N + n[None, :]
    mine = SPLIT == 1
    if SPLIT > 1:
        size = tl.cast(M, tl.int64) * N  # M = 1 is a constant, which has no .to
        tl.store(parts + part * size + here, acc, mask=rows & columns)
        tl.debug_barrier()
        mine = tl.atomic_add(arrived + tile + tl.program_id(2) * tl.num_programs(0), 1, sem="acq_rel") == SPLIT - 1
        if mine:
            acc = tl.zeros((BM, BN), tl.float32)
            for other in tl.static_range(SPLIT):
                acc += tl.load(parts + other * size + here, mask=rows & columns, other=0.0, cache_modifier=".cg")
    if mine:
        tl.store(y + here, acc.to(y.dtype.element_ty), mask=rows & columns)


def by_dot(x, packed, scales, zeros, y, BM, BN, split, warps, stages):
    (M, N), K = y.shape, x.shape[1]
    tiles_m, tiles_n, split = triton.cdiv(M, BM), triton.cdiv(N, BN), max(1, min(split, K // 128))
    parts = arrived = y
    if split > 1:
        parts = torch.empty(split, M, N, dtype=torch.float32, device=y.device)
        arrived = torch.zeros(tiles_m * tiles_n, dtype=torch.int32, device=y.device)
    unpacked_product[(tiles_n, split, tiles_m)](
        x, packed, scales, zeros, y, parts, arrived, M, N, K, BM=BM, BN=BN, SPLIT=split, STAGES=stages, num_warps=warps
    )


def wgmma():
    """m64n128k16 of bf16: A, which are weights, in registers, B in shared memory; `keep` 0 overwrites the 64 sums."""
    sums, operands = ", ".join(f"%{i}" for i in range(64)), ", ".join(f'"+f"(d[{i}])' for i in range(64))
    return f"""asm volatile("{{.reg .pred p; setp.ne.b32 p, %69, 0; "
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {{{sums}}}, {{%64, %65, %66, %67}}, %68, p, 1, 1, 0;}}"
                 : {operands} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));"""


CUDA = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cooperative_groups.h>
#include <cuda.h>
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

// All return 0 or an error: CUDA's, or 10000 and the driver's.
#define MUST(call) do { int error = int(call); if (error) return error; } while (0)

// Leave for a kernel to use so much shared memory; `told`: the devices that know.
constexpr int DEVICES = 64;
template <typename Kernel> int may_use(Kernel kernel, int bytes, bool (&told)[DEVICES]) {
    int device;
    MUST(cudaGetDevice(&device));
    if (device < DEVICES && told[device]) return 0;
    MUST(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    if (device < DEVICES) told[device] = true;
    return 0;
}

namespace few {  // up to 8 rows of x: mma of one warp

// m16n8k16: A are weights (16 columns of W), B are 8 rows of x, D is their product.
__device__ __forceinline__ void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The two weights of byte j as bf16: 128 + low, 128 + high. `above` is the word shifted by four bits.
template <int j> __device__ __forceinline__ u32 pair(u32 word, u32 above) {
    u32 both;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(both) : "r"(word), "r"(above), "n"(j | j << 4 | (4 + j) << 8 | (4 + j) << 12));
    asm("lop3.b32 %0, %1, 0x000F000F, 0x43004300, 0xEA;" : "=r"(both) : "r"(both));
    return both;
}

#define STREAM "ld.global.nc.L1::no_allocate" HINT BYTES_AHEAD
template <int WORDS> __device__ __forceinline__ void stream_in(u32 (&to)[WORDS], const uint8_t* from) {
    if constexpr (WORDS == 8) {
        u32 (&rest)[4] = *reinterpret_cast<u32 (*)[4]>(to + 4);
        stream_in(*reinterpret_cast<u32 (*)[4]>(to), from);
        stream_in(rest, from + 16);
    } else if constexpr (WORDS == 4)
        asm volatile(STREAM ".v4.u32 {%0,%1,%2,%3}, [%4]" BY(5) ";" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from) POLICY(policy()));
    else if constexpr (WORDS == 2)
        asm volatile(STREAM ".v2.u32 {%0,%1}, [%2]" BY(3) ";" : "=r"(to[0]), "=r"(to[1]) : "l"(from) POLICY(policy()));
    else
        asm volatile(STREAM ".u32 %0, [%1]" BY(2) ";" : "=r"(to[0]) : "l"(from) POLICY(policy()));
}

__device__ __forceinline__ float low(u32 two) { return __uint_as_float(two << 16); }
__device__ __forceinline__ float high(u32 two) { return __uint_as_float(two & 0xffff0000u); }

struct Problem {
    const uint8_t* packed; const u32 *x, *scales, *zeros; __nv_bfloat16* y; int rows, columns, depth;
};

// The rows of one group of 128 of k that a lane holds: 4 t to 4 t + 3 of each 16, for its V columns.
template <int V> struct Weights {
    u32 row[16][V / 4], s[V / 2], z[V / 2];
    __device__ __forceinline__ void load(const Problem& p, int group, int t, int column) {
        const uint8_t* from = p.packed + (int64_t)(group * 64 + 4 * t) * p.columns + column;
        #pragma unroll
        for (int i = 0; i < 16; ++i) stream_in(row[i], from + (int64_t)(i / 4 * 16 + i % 4) * p.columns);
        const int64_t at = (int64_t)group * p.columns + column;
        stream_in(s, (const uint8_t*)(p.scales + at / 2));
        stream_in(z, (const uint8_t*)(p.zeros + at / 2));
    }
};

// acc[pair of columns] += a group
template <int V, bool ONE> __device__ __forceinline__ void add_group(float (&acc)[V / 2][4], const Weights<V>& w, const Problem& p, int group, int t, int g) {
    float sum[V / 2][4] = {}, total[4] = {};
    const u32 ones = 0x3F803F80u;
    #pragma unroll
    for (int chunk = 0; chunk < 4; ++chunk) {
        uint4 x = make_uint4(0, 0, 0, 0);
        if (g < p.rows) x = __ldg((const uint4*)(p.x + (int64_t)g * (p.depth / 2) + group * 64 + chunk * 16 + 4 * t));
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 (&first)[V / 4] = w.row[chunk * 4 + half * 2], (&second)[V / 4] = w.row[chunk * 4 + half * 2 + 1];
            const u32 b0 = half ? x.z : x.x, b1 = half ? x.w : x.y;
            multiply(total, ones, ones, ones, ones, b0, b1);
            #pragma unroll
            for (int i = 0; i < V / 4; ++i) {
                const u32 a = first[i], b = second[i], above_a = a >> 4, above_b = b >> 4;
                multiply(sum[2 * i], pair<0>(a, above_a), pair<1>(a, above_a), pair<0>(b, above_b), pair<1>(b, above_b), b0, b1);
                multiply(sum[2 * i + 1], pair<2>(a, above_a), pair<3>(a, above_a), pair<2>(b, above_b), pair<3>(b, above_b), b0, b1);
            }
        }
    }
    #pragma unroll
    for (int i = 0; i < V / 2; ++i) {
        const float s0 = low(w.s[i]), s1 = high(w.s[i]), z0 = 128.0f + low(w.z[i]), z1 = 128.0f + high(w.z[i]);
        acc[i][0] += s0 * (sum[i][0] - z0 * total[0]);
        acc[i][2] += s1 * (sum[i][2] - z1 * total[0]);
        if (ONE) continue;  // one row of x: the other columns of D are not needed
        acc[i][1] += s0 * (sum[i][1] - z0 * total[1]);
        acc[i][3] += s1 * (sum[i][3] - z1 * total[1]);
    }
}

// A block has 8 V columns; its warps, and the SPLIT blocks of a cluster, share the groups of k.
template <int V, bool ONE, int WARPS, int SPLIT> __global__ void __launch_bounds__(WARPS * 32) product(Problem p) {
    constexpr int ROWS = ONE ? 1 : 8, WIDTH = 8 * V;
    extern __shared__ float parts[];  // WARPS x ROWS x WIDTH
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4, g = lane / 4;
    const int first = blockIdx.x * WIDTH, column = min(first + g * V, p.columns - V), groups = p.depth / 128, step = WARPS * SPLIT;
    float acc[V / 2][4] = {};
    int group = blockIdx.y * WARPS + warp;
    Weights<V> now, next;
    if (group < groups) now.load(p, group, t, column);
    while (group < groups) {
        if (group + step < groups) next.load(p, group + step, t, column);
        add_group<V, ONE>(acc, now, p, group, t, g);
        now = next;
        group += step;
    }
    float* mine = parts + warp * ROWS * WIDTH + g * V;
    #pragma unroll
    for (int i = 0; i < V / 2; ++i)
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int row = 2 * t + j % 2;
            if (row < ROWS) mine[row * WIDTH + 2 * i + j / 2] = acc[i][j];
        }
    __syncthreads();
    const int count = min(ROWS, p.rows) * WIDTH;
    for (int at = threadIdx.x; at < count; at += WARPS * 32) {
        float sum = 0;
        #pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += parts[w * ROWS * WIDTH + at];
        if (SPLIT > 1) parts[at] = sum;
        else if (first + at % WIDTH < p.columns) p.y[(int64_t)(at / WIDTH) * p.columns + first + at % WIDTH] = __float2bfloat16(sum);
    }
    if constexpr (SPLIT > 1) {
        namespace cg = cooperative_groups;
        cg::cluster_group cluster = cg::this_cluster();
        cluster.sync();
        for (int at = blockIdx.y * WARPS * 32 + threadIdx.x; at < count; at += SPLIT * WARPS * 32) {
            float sum = 0;
            #pragma unroll
            for (int other = 0; other < SPLIT; ++other) sum += *cluster.map_shared_rank(parts + at, other);
            if (first + at % WIDTH < p.columns) p.y[(int64_t)(at / WIDTH) * p.columns + first + at % WIDTH] = __float2bfloat16(sum);
        }
        cluster.sync();
    }
}

template <int V, bool ONE, int WARPS, int SPLIT> int launch(const Problem& p, cudaStream_t stream) {
    constexpr int BYTES = WARPS * (ONE ? 1 : 8) * 8 * V * 4;
    auto kernel = product<V, ONE, WARPS, SPLIT>;
    static bool told[DEVICES] = {};
    MUST(may_use(kernel, BYTES, told));
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((p.columns + 8 * V - 1) / (8 * V), SPLIT);
    config.blockDim = dim3(WARPS * 32);
    config.dynamicSmemBytes = BYTES;
    config.stream = stream;
    cudaLaunchAttribute cluster[1];
    cluster[0].id = cudaLaunchAttributeClusterDimension;
    cluster[0].val.clusterDim.x = 1, cluster[0].val.clusterDim.y = SPLIT, cluster[0].val.clusterDim.z = 1;
    config.attrs = cluster, config.numAttrs = SPLIT > 1;
    return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace few

int few_rows(int64_t x, int64_t packed, int64_t scales, int64_t zeros, int64_t y, int rows, int columns, int depth, cudaStream_t s) {
    using namespace few;
    const few::Problem p = {(const uint8_t*)packed, (const u32*)x, (const u32*)scales, (const u32*)zeros, (__nv_bfloat16*)y, rows, columns, depth};
    if (rows > 1) return launch<FEW_V, false, FEW_WARPS, FEW_SPLIT>(p, s);
    if (columns >= WIDE_FROM) return launch<ONE_V, true, ONE_WARPS, ONE_SPLIT>(p, s);
    return launch<NARROW_V, true, NARROW_WARPS, NARROW_SPLIT>(p, s);
}

namespace many {  // more rows: wgmma with unpacked weights as its operand in registers

constexpr int GROUPS_OF_COLUMNS = 3, BN = 64 * GROUPS_OF_COLUMNS, BM = 128, THREADS = 128 * (GROUPS_OF_COLUMNS + 1), PITCH = BN + 16;
constexpr u32 PANEL = BM * 128, X_BYTES = 2 * PANEL, W_BYTES = 64 * PITCH, STAGE_BYTES = (X_BYTES + W_BYTES + 1023) / 1024 * 1024;
constexpr u32 SHARED_BYTES = STAGES * STAGE_BYTES + 16 * STAGES + 1024;

struct Problem { const u32 *scales, *zeros; __nv_bfloat16* y; int rows, columns, groups; };

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void bar_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory"); }
__device__ __forceinline__ void bar_expect(u32 bar, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory"); }
__device__ __forceinline__ void bar_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
__device__ __forceinline__ void bar_wait(u32 bar, u32 parity) {
    asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra again;\ndone:\n}" ::"r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ void load(u32 to, const CUtensorMap* map, u32 bar, int inner, int outer) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                 ::"r"(to), "l"(map), "r"(bar), "r"(inner), "r"(outer) : "memory");
}
__device__ __forceinline__ void load_weights(u32 to, const CUtensorMap* map, u32 bar, int inner, int outer) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes" HINT " [%0], [%1, {%3, %4}], [%2]" BY(5) ";"
                 ::"r"(to), "l"(map), "r"(bar), "r"(inner), "r"(outer) POLICY(policy()) : "memory");
}
__device__ __forceinline__ uint64_t descriptor(u32 address) {  // K-major rows of 128 bytes, 128-byte swizzle
    return (uint64_t)((address & 0x3FFFF) >> 4) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}
__device__ __forceinline__ void multiply(float (&d)[64], const u32* a, uint64_t b, int keep) {
    @WGMMA@
}
// (q - z) s for the two weights of byte j of `two`, in the order of k
template <int j> __device__ __forceinline__ u32 weights(u32 two, u32 above, __nv_bfloat162 z, __nv_bfloat162 s) {
    u32 both;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(both) : "r"(two), "r"(above), "n"(j | j << 4 | (4 + j) << 8 | (4 + j) << 12));
    asm("lop3.b32 %0, %1, 0x000F000F, 0x43004300, 0xEA;" : "=r"(both) : "r"(both));  // 128 + q
    const __nv_bfloat162 q = __hsub2(*reinterpret_cast<__nv_bfloat162*>(&both), __float2bfloat162_rn(128.0f));
    const __nv_bfloat162 w = __hmul2(__hsub2(q, z), s);
    return *reinterpret_cast<const u32*>(&w);
}
__device__ __forceinline__ __nv_bfloat162 twice(u32 two, int upper) {
    const u32 r = __byte_perm(two, 0, upper ? 0x3232 : 0x1010);
    return *reinterpret_cast<const __nv_bfloat162*>(&r);
}

// The transposed product: BN columns of W, 64 a warpgroup, are the rows of wgmma; BM rows of x are its columns.
__global__ void __launch_bounds__(THREADS, 1)
    product_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map, Problem p) {
    extern __shared__ uint8_t raw[];
    const u32 ring = (shared_address(raw) + 1023) & ~1023u, full = ring + STAGES * STAGE_BYTES, empty = full + 8 * STAGES;
    uint8_t* ring_pointer = raw + (ring - shared_address(raw));
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, group = warp / 4, t = lane % 4, g = lane / 4;
    const int column = blockIdx.x * BN, row = blockIdx.y * BM;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) bar_init(full + 8 * i, 1), bar_init(empty + 8 * i, GROUPS_OF_COLUMNS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (group == GROUPS_OF_COLUMNS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp % 4 == 0 && lane == 0) {
            int stage = 0;
            u32 parity = 1;
            for (int k = 0; k < p.groups; ++k) {
                const u32 bar = full + 8 * stage, at = ring + stage * STAGE_BYTES;
                bar_wait(empty + 8 * stage, parity);
                bar_expect(bar, X_BYTES + W_BYTES);
                load(at + X_BYTES, &w_map, bar, column, k * 64);
                load(at, &x_map, bar, k * 128, row);
                load(at + PANEL, &x_map, bar, k * 128 + 64, row);
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 152;");
    const int own = group * 64 + warp % 4 * 16 + 2 * g;  // of this lane: two neighbouring columns
    const bool inside = column + own < p.columns;
    const u32 *scale = p.scales + (column + own) / 2, *zero = p.zeros + (column + own) / 2;
    float d[64];
    u32 a[2][16], s = inside ? __ldg(scale) : 0, z = inside ? __ldg(zero) : 0;
    int stage = 0, before = 0;
    u32 parity = 0;
    for (int k = 0; k < p.groups; ++k) {
        const __nv_bfloat162 s0 = twice(s, 0), s1 = twice(s, 1), z0 = twice(z, 0), z1 = twice(z, 1);
        if (k + 1 < p.groups && inside) {
            s = __ldg(scale + (int64_t)(k + 1) * (p.columns / 2));
            z = __ldg(zero + (int64_t)(k + 1) * (p.columns / 2));
        }
        bar_wait(full + 8 * stage, parity);
        const u32 at = ring + stage * STAGE_BYTES;
        const uint8_t* bytes = ring_pointer + stage * STAGE_BYTES + X_BYTES + own;
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            #pragma unroll
            for (int i = 0; i < 4; ++i) {  // 16 of k: 8 rows of packed
                const u32 first = *reinterpret_cast<const uint16_t*>(bytes + (half * 32 + i * 8 + t) * PITCH);
                const u32 second = *reinterpret_cast<const uint16_t*>(bytes + (half * 32 + i * 8 + 4 + t) * PITCH);
                a[half][4 * i] = weights<0>(first, first >> 4, z0, s0), a[half][4 * i + 1] = weights<1>(first, first >> 4, z1, s1);
                a[half][4 * i + 2] = weights<0>(second, second >> 4, z0, s0), a[half][4 * i + 3] = weights<1>(second, second >> 4, z1, s1);
            }
            const uint64_t b = descriptor(at + half * PANEL);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            #pragma unroll
            for (int i = 0; i < 4; ++i) multiply(d, a[half] + 4 * i, b + 2 * i, k + half + i);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            if (half == 0 && k > 0 && threadIdx.x % 128 == 0) bar_arrive(empty + 8 * before);
        }
        before = stage;
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    #pragma unroll
    for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(d[i]) :: "memory");
    if (!inside) return;
    #pragma unroll
    for (int i = 0; i < 64; i += 4)
        #pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int m = row + 2 * i + 2 * t + j;
            if (m < p.rows) *reinterpret_cast<__nv_bfloat162*>(p.y + (int64_t)m * p.columns + column + own) = __floats2bfloat162_rn(d[i + j], d[i + 2 + j]);
        }
}

int map_of(CUtensorMap& map, int64_t data, CUtensorMapDataType type, int bytes, int rows, int columns, int box_rows, int box_columns, CUtensorMapSwizzle swizzle) {
    static void* encode = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (!encode) MUST(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &result));
    cuuint64_t sizes[2] = {(cuuint64_t)columns, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)columns * bytes};
    cuuint32_t box[2] = {(cuuint32_t)box_columns, (cuuint32_t)box_rows}, one[2] = {1, 1};
    CUresult error = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(&map, type, 2, (void*)data, sizes, strides, box, one,
        CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return error == CUDA_SUCCESS ? 0 : 10000 + int(error);
}

}  // namespace many

namespace ring {  // 9 to 32 rows: weights and x by TMA through a ring, blocks of equal work

// HD INDEX BEGIN: which byte lies where; tests/test_hard_deck_w4a16.py compiles these lines for the CPU
// A box in shared memory has rows of 128 bytes; TMA's 128-byte swizzle: 16 bytes go where their number XOR the row says.
HD int swizzled(int row, int byte) { return row * 128 + (((byte >> 4) ^ (row & 7)) << 4) + (byte & 15); }
// The byte rows of 16 of k (8 rows of packed) that lane t holds: k is permuted, and x comes alike.
HD int packed_row(int t, int second) { return 2 * t + second; }
// The row of x, of 8, that is column n of B and of the sums.
HD int x_row(int n) { return (n & 3) << 1 | n >> 2; }
// Where in a tile of columns the V columns of a lane begin.
HD int column_of(int v, int warp, int g) { return (warp * 8 + g) * v; }
// The place among the sums in shared memory of column n of the sums; and back.
HD int slot_of(int n) { return (n & 1) << 2 | n >> 1; }
HD int column_in(int slot) { return (slot & 3) << 1 | slot >> 2; }
// HD INDEX END

struct Problem { const u32 *scales, *zeros; __nv_bfloat16* y; int rows, columns, groups, per_block; };

template <bool EXACT, int j> __device__ __forceinline__ u32 weights(u32 word, u32 above, u32 zero, u32 scale) {
    u32 both = few::pair<j>(word, above);
    __nv_bfloat162 q = *reinterpret_cast<__nv_bfloat162*>(&both);
    if constexpr (!EXACT) q = __hsub2(q, __float2bfloat162_rn(128.0f));
    const __nv_bfloat162 w = __hmul2(__hsub2(q, *reinterpret_cast<const __nv_bfloat162*>(&zero)), *reinterpret_cast<const __nv_bfloat162*>(&scale));
    return *reinterpret_cast<const u32*>(&w);
}

// How a block works: NT eights of rows, V columns a lane, SPLIT blocks of a cluster share the groups, BLOCKS an SM.
constexpr int TILE = 128, PITCH = TILE + 2;  // columns of a block; floats of a row of sums
template <int NT_, int V_, int SPLIT_, int STAGES_, int BLOCKS_> struct Shape {
    static constexpr int NT = NT_, V = V_, SPLIT = SPLIT_, DEEP = STAGES_, BLOCKS = BLOCKS_;
    static constexpr int MB = V / 2, CONSUMERS = TILE / (8 * V), THREADS = (CONSUMERS + 1) * 32, ROWS = 8 * NT;
    static constexpr u32 PANEL = ROWS * 128, X_BYTES = 2 * PANEL, W_BYTES = 8192, STAGE = X_BYTES + W_BYTES;
    static constexpr u32 SHARED_BYTES = DEEP * STAGE + 16 * DEEP + 1024;
    static_assert(ROWS * PITCH * 4 <= DEEP * STAGE, "the sums take the place of the ring");
    static_assert(SHARED_BYTES * BLOCKS + 1024 * (BLOCKS - 1) <= 232448 && SPLIT <= 8 && THREADS <= 1024, "a block must fit");
    static_assert(X_BYTES % 1024 == 0, "boxes begin at multiples of 1024 bytes");
};

// The scales and zero points of a lane's columns, twice each, as the pairs of weights take them.
template <int V> struct Columns {
    u32 s[V / 2], z[V / 2], scale[V], zero[V];
    __device__ __forceinline__ void load(const Problem& p, int group, int column) {
        const int64_t at = (int64_t)group * p.columns + column;
        few::stream_in(s, (const uint8_t*)(p.scales + at / 2));
        few::stream_in(z, (const uint8_t*)(p.zeros + at / 2));
    }
    // Is 128 + z a bf16 for all columns of the warp? Then `zero` holds it.
    __device__ __forceinline__ bool spread() {
        u32 off = 0, use[V / 2];
        const __nv_bfloat162 base = __float2bfloat162_rn(128.0f);
        #pragma unroll
        for (int i = 0; i < V / 2; ++i) {
            const __nv_bfloat162 moved = __hadd2(*reinterpret_cast<const __nv_bfloat162*>(z + i), base), back = __hsub2(moved, base);
            use[i] = *reinterpret_cast<const u32*>(&moved);
            off |= *reinterpret_cast<const u32*>(&back) ^ z[i];
        }
        const bool exact = __all_sync(~0u, off == 0);
        #pragma unroll
        for (int i = 0; i < V / 2; ++i) {
            const u32 from = exact ? use[i] : z[i];
            scale[2 * i] = __byte_perm(s[i], 0, 0x1010), scale[2 * i + 1] = __byte_perm(s[i], 0, 0x3232);
            zero[2 * i] = __byte_perm(from, 0, 0x1010), zero[2 * i + 1] = __byte_perm(from, 0, 0x3232);
        }
        return exact;
    }
};

// The weights of 16 of k: A of MB products. `at`: this lane's bytes of its first and its second row.
template <bool EXACT, class S> __device__ __forceinline__ void unpack(u32 (&a)[S::MB][4], const uint8_t* first_at, const uint8_t* second_at, const Columns<S::V>& c) {
    u32 first[S::V / 4], second[S::V / 4];
    if constexpr (S::V == 8) {
        const uint2 one = *reinterpret_cast<const uint2*>(first_at), two = *reinterpret_cast<const uint2*>(second_at);
        first[0] = one.x, first[1] = one.y, second[0] = two.x, second[1] = two.y;
    } else {
        first[0] = *reinterpret_cast<const u32*>(first_at), second[0] = *reinterpret_cast<const u32*>(second_at);
    }
    #pragma unroll
    for (int i = 0; i < S::V / 4; ++i) {
        u32 (&low)[4] = a[2 * i], (&high)[4] = a[2 * i + 1];
        const u32 one = first[i], two = second[i], above = one >> 4, over = two >> 4;
        const u32 *s = c.scale + 4 * i, *z = c.zero + 4 * i;
        low[0] = weights<EXACT, 0>(one, above, z[0], s[0]), low[1] = weights<EXACT, 1>(one, above, z[1], s[1]);
        low[2] = weights<EXACT, 0>(two, over, z[0], s[0]), low[3] = weights<EXACT, 1>(two, over, z[1], s[1]);
        high[0] = weights<EXACT, 2>(one, above, z[2], s[2]), high[1] = weights<EXACT, 3>(one, above, z[3], s[3]);
        high[2] = weights<EXACT, 2>(two, over, z[2], s[2]), high[3] = weights<EXACT, 3>(two, over, z[3], s[3]);
    }
}

// Where a lane reads: bytes from the start of a stage.
template <class S> struct Lane {
    int first, second, x[4];
    __device__ __forceinline__ Lane(int warp, int t, int g) {
        const int column = column_of(S::V, warp, g);
        first = S::X_BYTES + swizzled(packed_row(t, 0), column), second = S::X_BYTES + swizzled(packed_row(t, 1), column);
        #pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = swizzled(x_row(g), 32 * i + 8 * t);
    }
};

template <bool EXACT, class S> __device__ __forceinline__ void add_group(float (&acc)[S::MB][S::NT][4], const uint8_t* stage, const Lane<S>& lane, const Columns<S::V>& c) {
    #pragma unroll
    for (int i = 0; i < 8; ++i) {
        u32 a[S::MB][4];
        uint2 b[S::NT];
        #pragma unroll
        for (int n = 0; n < S::NT; ++n) b[n] = *reinterpret_cast<const uint2*>(stage + lane.x[i % 4] + i / 4 * S::PANEL + n * 1024);
        unpack<EXACT, S>(a, stage + lane.first + i * 1024, stage + lane.second + i * 1024, c);
        #pragma unroll
        for (int m = 0; m < S::MB; ++m)
            #pragma unroll
            for (int n = 0; n < S::NT; ++n) few::multiply(acc[m][n], a[m][0], a[m][1], a[m][2], a[m][3], b[n].x, b[n].y);
    }
}

template <class S> __device__ __forceinline__ void produce(const CUtensorMap* w_map, const CUtensorMap* x_map, u32 ring, u32 full, u32 empty, int column, int from, int count) {
    for (int n = 0; n < count; ++n) {
        const int stage = n % S::DEEP;
        const u32 bar = full + 8 * stage, at = ring + stage * S::STAGE;
        many::bar_wait(empty + 8 * stage, (n / S::DEEP & 1) ^ 1);
        many::bar_expect(bar, S::STAGE);
        many::load_weights(at + S::X_BYTES, w_map, bar, column, (from + n) * 64);
        for (int i = 0; i < 2; ++i) many::load(at + i * S::PANEL, x_map, bar, (from + n) * 128 + 64 * i, 0);
    }
}

__device__ __forceinline__ void store_pair(const Problem& p, int first, int at, float2 sum) {
    const int line = at / (TILE / 2), column = first + at % (TILE / 2) * 2;
    const int row = line / 8 * 8 + x_row(column_in(line % 8));
    if (row < p.rows && column < p.columns) *reinterpret_cast<__nv_bfloat162*>(p.y + (int64_t)row * p.columns + column) = __floats2bfloat162_rn(sum.x, sum.y);
}

// The sums of the blocks of a cluster, added and stored.
template <class S> __device__ __forceinline__ void add_up(const Problem& p, float* parts, int first) {
    constexpr int PAIRS = S::ROWS * TILE / 2;
    auto place = [&](int at) { return parts + at / (TILE / 2) * PITCH + at % (TILE / 2) * 2; };
    cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
    cluster.sync();
    for (int at = blockIdx.y * S::THREADS + threadIdx.x; at < PAIRS; at += S::SPLIT * S::THREADS) {
        float2 sum = make_float2(0, 0);
        #pragma unroll
        for (int other = 0; other < S::SPLIT; ++other) {
            const float2 more = *reinterpret_cast<float2*>(cluster.map_shared_rank(place(at), other));
            sum.x += more.x, sum.y += more.y;
        }
        store_pair(p, first, at, sum);
    }
    cluster.sync();
}

template <class S> __global__ void __launch_bounds__(S::THREADS, S::BLOCKS)
    product(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map, Problem p) {
    extern __shared__ uint8_t memory[];
    const u32 ring = (many::shared_address(memory) + 1023) & ~1023u, full = ring + S::DEEP * S::STAGE, empty = full + 8 * S::DEEP;
    uint8_t* stages = memory + (ring - many::shared_address(memory));
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, t = lane % 4, g = lane / 4;
    const int first = blockIdx.x * TILE, column = min(first + column_of(S::V, warp, g), p.columns - S::V);
    const int from = blockIdx.y * p.per_block, count = max(0, min(p.per_block, p.groups - from));
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::DEEP; ++i) many::bar_init(full + 8 * i, 1), many::bar_init(empty + 8 * i, S::CONSUMERS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    float acc[S::MB][S::NT][4] = {};
    if (warp == S::CONSUMERS) {
        if (lane == 0) produce<S>(&w_map, &x_map, ring, full, empty, first, from, count);
        __syncwarp();
    } else {
        const Lane<S> at(warp, t, g);
        Columns<S::V> c;
        if (count) c.load(p, from, column);
        for (int n = 0; n < count; ++n) {
            const int stage = n % S::DEEP;
            const bool exact = c.spread();
            if (n + 1 < count) c.load(p, from + n + 1, column);
            many::bar_wait(full + 8 * stage, n / S::DEEP & 1);
            if (exact) add_group<true, S>(acc, stages + stage * S::STAGE, at, c);
            else add_group<false, S>(acc, stages + stage * S::STAGE, at, c);
            __syncwarp();
            if (lane == 0) many::bar_arrive(empty + 8 * stage);
        }
    }
    __syncthreads();  // the ring is empty: sums take its place
    float* parts = reinterpret_cast<float*>(stages);
    if (warp < S::CONSUMERS)
        #pragma unroll
        for (int m = 0; m < S::MB; ++m)
            #pragma unroll
            for (int n = 0; n < S::NT; ++n)
                #pragma unroll
                for (int j = 0; j < 2; ++j) {
                    float* to = parts + (n * 8 + slot_of(2 * t + j)) * PITCH + column_of(S::V, warp, g) + 2 * m;
                    *reinterpret_cast<float2*>(to) = make_float2(acc[m][n][j], acc[m][n][2 + j]);
                }
    add_up<S>(p, parts, first);
}

template <class S> int launch(int64_t x, int64_t packed, Problem p, int depth, cudaStream_t stream) {
    static bool told[DEVICES] = {};
    CUtensorMap x_map, w_map;
    MUST(many::map_of(w_map, packed, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, depth / 2, p.columns, 64, 128, CU_TENSOR_MAP_SWIZZLE_128B));
    MUST(many::map_of(x_map, x, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, p.rows, depth, S::ROWS, 64, CU_TENSOR_MAP_SWIZZLE_128B));
    MUST(may_use(product<S>, S::SHARED_BYTES, told));
    p.per_block = (p.groups + S::SPLIT - 1) / S::SPLIT;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((p.columns + TILE - 1) / TILE, S::SPLIT);
    config.blockDim = dim3(S::THREADS);
    config.dynamicSmemBytes = S::SHARED_BYTES;
    config.stream = stream;
    cudaLaunchAttribute cluster[1];
    cluster[0].id = cudaLaunchAttributeClusterDimension;
    cluster[0].val.clusterDim.x = 1, cluster[0].val.clusterDim.y = S::SPLIT, cluster[0].val.clusterDim.z = 1;
    config.attrs = cluster, config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, product<S>, w_map, x_map, p);
}

}  // namespace ring

int some_rows(int64_t x, int64_t packed, int64_t scales, int64_t zeros, int64_t y, int rows, int columns, int depth, cudaStream_t s) {
    using namespace ring;
    const ring::Problem p = {(const u32*)scales, (const u32*)zeros, (__nv_bfloat16*)y, rows, columns, depth / 128, 0};
    return rows <= 16 ? launch<Shape<2, SIXTEEN>>(x, packed, p, depth, s) : launch<Shape<4, THIRTY>>(x, packed, p, depth, s);
}

int many_rows(int64_t x, int64_t packed, int64_t scales, int64_t zeros, int64_t y, int rows, int columns, int depth, cudaStream_t s) {
    using namespace many;
    static bool told[DEVICES] = {};
    CUtensorMap x_map, w_map;
    MUST(map_of(x_map, x, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, rows, depth, BM, 64, CU_TENSOR_MAP_SWIZZLE_128B));
    MUST(map_of(w_map, packed, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, depth / 2, columns, 64, PITCH, CU_TENSOR_MAP_SWIZZLE_NONE));
    const many::Problem p = {(const u32*)scales, (const u32*)zeros, (__nv_bfloat16*)y, rows, columns, depth / 128};
    MUST(may_use(product_kernel, SHARED_BYTES, told));
    product_kernel<<<dim3((columns + BN - 1) / BN, (rows + BM - 1) / BM), THREADS, SHARED_BYTES, s>>>(x_map, w_map, p);
    return cudaGetLastError();
}

static PyObject* run(PyObject*, PyObject* const* given, Py_ssize_t) {  // x, packed, scales, zeros, y, rows, columns, depth, stream
    long long a[9];
    for (int i = 0; i < 9; ++i) a[i] = PyLong_AsLongLong(given[i]);
    auto* chosen = a[5] > 32 ? many_rows : a[5] > 8 ? some_rows : few_rows;
    return PyLong_FromLong(chosen(a[0], a[1], a[2], a[3], a[4], int(a[5]), int(a[6]), int(a[7]), (cudaStream_t)a[8]));
}
static PyMethodDef methods[] = {{"run", (PyCFunction)(void*)run, METH_FASTCALL, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "w4a16", "", -1, methods};
#define INIT(name) PyInit_##name
#define INIT_OF(name) INIT(name)
PyMODINIT_FUNC INIT_OF(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
""".replace("@WGMMA@", wgmma())


_run = None


def source():
    """The CUDA C++ and the part of its name that the constants make. nvcc would split the lists of a -D at their commas."""
    chosen = {name: globals()[name] for name in CHOSEN}
    values = {name: ", ".join(map(str, one)) if isinstance(one, tuple) else str(one) for name, one in chosen.items()}
    lines = [f"#define {name} {value}\n" for name, value in values.items()]
    return "".join(lines) + CUDA, "_".join(values.values()).replace(", ", "_")


def built():
    """The extension's launcher, built once per process."""
    global _run
    if _run is None:
        text, name = source()
        _run = load_inline(
            f"w4a16_ring_{name}",
            "",
            text,
            no_implicit_headers=True,
            with_pytorch_error_handling=False,
            extra_cuda_cflags=["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a"],
        ).run
    return _run


def launch(x, packed, scales, zeros, y, device):
    M, N = y.shape
    if N % 16 == 0 and M > 0 and (M <= 32 or BY_WGMMA):
        pointers = x.data_ptr(), packed.data_ptr(), scales.data_ptr(), zeros.data_ptr(), y.data_ptr()
        error = (_run or built())(*pointers, M, N, x.shape[1], stream_of(device))
        if error:
            raise RuntimeError(f"w4a16: CUDA error {error}")
    elif M <= 64:
        by_dot(x, packed, scales, zeros, y, max(16, triton.next_power_of_2(M)), 64, 4, 4, 4)
    else:
        by_dot(x, packed, scales, zeros, y, 128, 64, 1, 4, 3)


def dense(x):
    """x, contiguous and at a multiple of 16 bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def product_of(x, packed, scales, zeros, device):
    (M, K), N = x.shape, packed.shape[1]
    if K % 128 or packed.shape[0] * 2 != K or scales.shape != (K // 128, N) or zeros.shape != scales.shape:
        raise ValueError(
            f"x {tuple(x.shape)}, packed {tuple(packed.shape)}, scales {tuple(scales.shape)} and zeros do not fit together"
        )
    if not x.dtype == scales.dtype == zeros.dtype == torch.bfloat16 or packed.dtype != torch.uint8:
        raise ValueError("x, scales and zeros must be bfloat16, packed uint8")
    if not device == packed.get_device() == scales.get_device() == zeros.get_device():
        raise ValueError("x, packed, scales and zeros must be on one device")
    x, packed, scales, zeros = dense(x), dense(packed), dense(scales), dense(zeros)
    y = x.new_empty((M, N))
    launch(x, packed, scales, zeros, y, device)
    return y


def kernel_function(x, packed, scales, zeros):
    device = x.get_device()
    if x.is_cuda and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return product_of(x, packed, scales, zeros, device)
    return product_of(x, packed, scales, zeros, device)
