"""x W with int4 weights in CUDA C++: weights become fragments of the tensor cores where they were loaded.

k may be permuted as long as x and W are permuted alike. So a lane takes bytes of its own columns, and the two values of
a byte, neighbours in k, are the pair that a register of mma holds: PRMT and LOP3 make 128 + q of both, without
conversion, shuffle or shared memory. Zero points and scales are applied to the fp32 sums of a group of 128.
Up to 32 rows: W is the A of mma.m16n8k16, x its B; warps and the blocks of a cluster share the groups of k, and add
their sums in shared memory. More rows: unpacked weights are the A of wgmma, which may come from registers; x comes by
TMA, a tile is 192 columns and 128 rows. What neither takes (columns that do not divide by 16) goes to Triton.
Its launcher goes without pybind11 and the stream's Python object, and tells a device once what it needs. With ONE_V of 4
it is the kernel of examples/w4a16, from an H100.
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
    {"ONE_V": 8, "ONE_WARPS": 8, "ONE_SPLIT": 1},
    {"ONE_V": 4, "ONE_WARPS": 8, "ONE_SPLIT": 1},
    {"ONE_V": 8, "ONE_WARPS": 4, "ONE_SPLIT": 2},
    {"ONE_V": 8, "ONE_WARPS": 8, "ONE_SPLIT": 2},
    {"ONE_V": 4, "ONE_WARPS": 16, "ONE_SPLIT": 1},
]
# Columns of a lane, warps of a block, blocks that share the groups of a tile: for one row (from WIDE_FROM columns on, or
# fewer), up to 16 rows, up to 32; stages of the ring for more.
WIDE_FROM = 8192
ONE_V = 8
ONE_WARPS = 8
ONE_SPLIT = 1
NARROW_V = 4
NARROW_WARPS = 16
NARROW_SPLIT = 1
FEW_V = 8
FEW_WARPS = 4
FEW_SPLIT = 1
MORE_V = 8
MORE_WARPS = 4
MORE_SPLIT = 1
STAGES = 4
BY_WGMMA = 1
CHOSEN = [name for name in tuple(globals()) if name.split("_")[0] in ("WIDE", "ONE", "NARROW", "FEW", "MORE", "STAGES")]


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

namespace few {  // up to 32 rows of x: mma of one warp

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

template <int WORDS> __device__ __forceinline__ void stream_in(u32 (&to)[WORDS], const uint8_t* from) {
    if constexpr (WORDS == 8) {
        u32 (&rest)[4] = *reinterpret_cast<u32 (*)[4]>(to + 4);
        stream_in(*reinterpret_cast<u32 (*)[4]>(to), from);
        stream_in(rest, from + 16);
    } else if constexpr (WORDS == 4)
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from));
    else if constexpr (WORDS == 2)
        asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
    else
        asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(to[0]) : "l"(from));
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

// acc[pair of columns][rows of x in eights][...] += a group
template <int V, int MT, bool ONE> __device__ __forceinline__ void add_group(float (&acc)[V / 2][MT][4], const Weights<V>& w, const Problem& p, int group, int t, int g) {
    float sum[V / 2][MT][4] = {}, total[MT][4] = {};
    const u32 ones = 0x3F803F80u;
    #pragma unroll
    for (int chunk = 0; chunk < 4; ++chunk) {
        uint4 x[MT];
        #pragma unroll
        for (int m = 0; m < MT; ++m) {
            x[m] = make_uint4(0, 0, 0, 0);
            if (m * 8 + g < p.rows) x[m] = __ldg((const uint4*)(p.x + (int64_t)(m * 8 + g) * (p.depth / 2) + group * 64 + chunk * 16 + 4 * t));
        }
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 (&first)[V / 4] = w.row[chunk * 4 + half * 2], (&second)[V / 4] = w.row[chunk * 4 + half * 2 + 1];
            #pragma unroll
            for (int m = 0; m < MT; ++m) multiply(total[m], ones, ones, ones, ones, half ? x[m].z : x[m].x, half ? x[m].w : x[m].y);
            #pragma unroll
            for (int i = 0; i < V / 4; ++i) {
                const u32 a = first[i], b = second[i], above_a = a >> 4, above_b = b >> 4;
                const u32 a0 = pair<0>(a, above_a), a1 = pair<1>(a, above_a), a2 = pair<0>(b, above_b), a3 = pair<1>(b, above_b);
                const u32 c0 = pair<2>(a, above_a), c1 = pair<3>(a, above_a), c2 = pair<2>(b, above_b), c3 = pair<3>(b, above_b);
                #pragma unroll
                for (int m = 0; m < MT; ++m) {
                    multiply(sum[2 * i][m], a0, a1, a2, a3, half ? x[m].z : x[m].x, half ? x[m].w : x[m].y);
                    multiply(sum[2 * i + 1][m], c0, c1, c2, c3, half ? x[m].z : x[m].x, half ? x[m].w : x[m].y);
                }
            }
        }
    }
    #pragma unroll
    for (int i = 0; i < V / 2; ++i) {
        const float s0 = low(w.s[i]), s1 = high(w.s[i]), z0 = 128.0f + low(w.z[i]), z1 = 128.0f + high(w.z[i]);
        #pragma unroll
        for (int m = 0; m < MT; ++m) {
            acc[i][m][0] += s0 * (sum[i][m][0] - z0 * total[m][0]);
            acc[i][m][2] += s1 * (sum[i][m][2] - z1 * total[m][0]);
            if (ONE) continue;  // one row of x: the other columns of D are not needed
            acc[i][m][1] += s0 * (sum[i][m][1] - z0 * total[m][1]);
            acc[i][m][3] += s1 * (sum[i][m][3] - z1 * total[m][1]);
        }
    }
}

// A block has 8 V columns; its warps, and the SPLIT blocks of a cluster, share the groups of k.
template <int V, int MT, bool ONE, int WARPS, int SPLIT> __global__ void __launch_bounds__(WARPS * 32) product(Problem p) {
    constexpr int ROWS = ONE ? 1 : MT * 8, WIDTH = 8 * V;
    extern __shared__ float parts[];  // WARPS x ROWS x WIDTH
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4, g = lane / 4;
    const int first = blockIdx.x * WIDTH, column = min(first + g * V, p.columns - V), groups = p.depth / 128, step = WARPS * SPLIT;
    float acc[V / 2][MT][4] = {};
    int group = blockIdx.y * WARPS + warp;
    Weights<V> now, next;
    if (group < groups) now.load(p, group, t, column);
    while (group < groups) {
        if (group + step < groups) next.load(p, group + step, t, column);
        add_group<V, MT, ONE>(acc, now, p, group, t, g);
        now = next;
        group += step;
    }
    float* mine = parts + warp * ROWS * WIDTH + g * V;
    #pragma unroll
    for (int i = 0; i < V / 2; ++i)
        #pragma unroll
        for (int m = 0; m < MT; ++m)
            #pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int row = m * 8 + 2 * t + j % 2;
                if (row < ROWS) mine[row * WIDTH + 2 * i + j / 2] = acc[i][m][j];
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

template <int V, int MT, bool ONE, int WARPS, int SPLIT> int launch(const Problem& p, cudaStream_t stream) {
    constexpr int BYTES = WARPS * (ONE ? 1 : MT * 8) * 8 * V * 4;
    auto kernel = product<V, MT, ONE, WARPS, SPLIT>;
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
    if (rows == 1 && columns >= WIDE_FROM) return launch<ONE_V, 1, true, ONE_WARPS, ONE_SPLIT>(p, s);
    if (rows == 1) return launch<NARROW_V, 1, true, NARROW_WARPS, NARROW_SPLIT>(p, s);
    if (rows <= 8) return launch<FEW_V, 1, false, FEW_WARPS, FEW_SPLIT>(p, s);
    if (rows <= 16) return launch<FEW_V, 2, false, FEW_WARPS, FEW_SPLIT>(p, s);
    return launch<MORE_V, 4, false, MORE_WARPS, MORE_SPLIT>(p, s);
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
    auto* chosen = a[5] <= 32 ? few_rows : many_rows;
    return PyLong_FromLong(chosen(a[0], a[1], a[2], a[3], a[4], int(a[5]), int(a[6]), int(a[7]), (cudaStream_t)a[8]));
}
static PyMethodDef methods[] = {{"run", (PyCFunction)(void*)run, METH_FASTCALL, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "w4a16", "", -1, methods};
#define INIT(name) PyInit_##name
#define INIT_OF(name) INIT(name)
PyMODINIT_FUNC INIT_OF(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
""".replace("@WGMMA@", wgmma())


_run = None


def built():
    """The extension's launcher, built once per process."""
    global _run
    if _run is None:
        chosen = {name: globals()[name] for name in CHOSEN}
        flags = [f"-D{name}={value}" for name, value in chosen.items()]
        _run = load_inline(
            "w4a16_" + "_".join(map(str, chosen.values())),
            "",
            CUDA,
            no_implicit_headers=True,
            with_pytorch_error_handling=False,
            extra_cuda_cflags=["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", *flags],
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
