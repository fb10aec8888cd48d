"""x W with int4 weights. One row: each warp has a ring of its own. 2 to 8 rows: the bytes that a lane loads are its
operands. 9 to 32, and more: unpacked weights are the operand of wgmma in registers, and come through a ring by TMA.
README.md of this problem says what was tried.

One row, and 9 to 32: the blocks of a cluster share the groups of k, and send their sums into each other's shared memory
by st.async, whose bytes a barrier there counts: no fence. One row: the nibbles 0 and 4 of a word are weights of two
columns of the same k. They stay the pair of a register of mma: x is in column 0 of the other operand for the one, in
column 1 for the other. 2 to 8 rows: the two weights of a byte are the pair of k in a register, and k is permuted in
weights and x alike. 9 to 32 rows: the pair of k likewise, and ldmatrix gives a lane the bytes of two columns, so that x
keeps the order in which TMA left it. A shift, four byte permutations and four ANDs make 16 columns and 16 of k.

Up to 32 rows weights are 128 + q, without rounding, and scales and zero points are applied to the sums of a group:
s (sum - (128 + z) total), where total is the sum of x over the group, so an infinity in x makes a NaN. With 9 to 32
rows one warp of a block makes the totals for all. Above, weights are rounded as the reference does: (q - z) s.
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


# One row: columns of a lane, an eighth of a tile (8 or 16), warps, blocks of a cluster, stages of a warp, each 32 of k,
# and blocks of an SM (the compiler leaves registers for so many, and no more fit). From WIDE_FROM columns on, or fewer.
WIDE_FROM = 8192
WIDE = (16, 4, 8, 2, 7)
NARROW = (8, 16, 2, 4, 2)
FEW = (8, 4)  # 2 to 8 rows: columns of a lane, warps of a block
# 9 to 16 rows, and 17 to 32: tiles of a warpgroup, each 64 columns, warpgroups, blocks of a cluster (2 or more),
# stages, blocks of an SM.
SIXTEEN = (1, 4, 2, 8, 1)
THIRTY = (1, 3, 2, 6, 1)
STAGES = 4  # for more rows
BY_WGMMA = 1
CHOSEN = "WIDE_FROM WIDE NARROW FEW SIXTEEN THIRTY STAGES".split()



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
    """Weights as 128 + q in bf16 (only bits change); zero points and scales are applied to the sums of a group."""
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


def wgmma(rows):
    """The C++ of m64n`rows`k16 of bf16, in which each thread has rows / 2 sums."""
    count = rows // 2
    sums, operands = (", ".join(one.format(i) for i in range(count)) for one in ("%{}", '"+f"(d[{}])'))
    a, b, keep = ", ".join(f"%{count + i}" for i in range(4)), f"%{count + 4}", f"%{count + 5}"
    return f"""__device__ __forceinline__ void multiply_tile(float (&d)[{count}], const u32* a, uint64_t b, int keep) {{
    asm volatile("{{.reg .pred p; setp.ne.b32 p, {keep}, 0; "
                 "wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.bf16.bf16 {{{sums}}}, {{{a}}}, {b}, p, 1, 1, 0;}}"
                 : {operands} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}}"""


CUDA = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

typedef uint32_t u32;
#define HD __host__ __device__ constexpr

// All return 0 or an error: CUDA's, or 10000 and the driver's.
#define MUST(call) do { int error = int(call); if (error) return error; } while (0)

// Leave for a kernel to use its shared memory is asked for once a device. The blocks of a cluster are neighbours in y.
constexpr int DEVICES = 64;
template <auto kernel, int CARVEOUT = cudaSharedmemCarveoutDefault, typename... Arguments>
int start(dim3 grid, int cluster_blocks, int threads, int bytes, cudaStream_t stream, const Arguments&... arguments) {
    static bool told[DEVICES] = {};
    int device;
    MUST(cudaGetDevice(&device));
    if (device >= DEVICES || !told[device]) {
        MUST(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
        MUST(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, CARVEOUT));
        if (device < DEVICES) told[device] = true;
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = dim3(threads);
    config.dynamicSmemBytes = bytes, config.stream = stream;
    cudaLaunchAttribute cluster[1];
    cluster[0].id = cudaLaunchAttributeClusterDimension;
    cluster[0].val.clusterDim.x = 1, cluster[0].val.clusterDim.y = cluster_blocks, cluster[0].val.clusterDim.z = 1;
    config.attrs = cluster, config.numAttrs = cluster_blocks > 1;
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// The shared memory of a block of which `blocks` share an SM: all there is, so that no more fit, and blocks spread.
HD int block_bytes(int blocks) { return (233472 / blocks - 1024) / 128 * 128; }

int map_of(CUtensorMap& map, int64_t data, CUtensorMapDataType type, int bytes, int rows, int columns,
           int box_rows, int box_columns, CUtensorMapSwizzle swizzle) {
    static void* encode = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (!encode)
        MUST(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &result));
    if (!encode) return 10000;  // an older driver
    cuuint64_t sizes[2] = {(cuuint64_t)columns, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)columns * bytes};
    cuuint32_t box[2] = {(cuuint32_t)box_columns, (cuuint32_t)box_rows}, one[2] = {1, 1};
    CUresult error = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
        &map, type, 2, (void*)data, sizes, strides, box, one, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return error == CUDA_SUCCESS ? 0 : 10000 + int(error);
}
// x in boxes of 64 of k: rows of 128 bytes, the K-major operand B of wgmma.
int map_of_x(CUtensorMap& map, int64_t x, int rows, int depth, int box_rows) {
    return map_of(map, x, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, rows, depth, box_rows, 64, CU_TENSOR_MAP_SWIZZLE_128B);
}
// Packed weights in boxes of a group of k.
int map_of_packed(CUtensorMap& map, int64_t packed, int depth, int columns, int box_columns,
                  CUtensorMapSwizzle swizzle) {
    return map_of(map, packed, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, depth / 2, columns, 64, box_columns, swizzle);
}

// m16n8k16: A are weights (16 columns of W), B are 8 rows of x, D is their product.
__device__ __forceinline__ void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// wgmma: A are weights (64 columns of W) in registers, B are 16, 32 or 128 rows of x in shared memory. `keep` 0
// overwrites the sums.
@WGMMA@
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wait_for_all_products_but() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// Products have written d: no use of it moves up.
__device__ __forceinline__ void changed(float& d) { asm volatile("" : "+f"(d)::"memory"); }
__device__ __forceinline__ uint64_t descriptor(u32 address) {  // K-major rows of 128 bytes, 128-byte swizzle
    return (uint64_t)((address & 0x3FFFF) >> 4) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

// The two weights of byte j as bf16: 128 + low, 128 + high. `above` is the word shifted by four bits.
template <int j> __device__ __forceinline__ u32 pair(u32 word, u32 above) {
    constexpr int BYTES = j | j << 4 | (4 + j) << 8 | (4 + j) << 12;
    u32 both;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(both) : "r"(word), "r"(above), "n"(BYTES));
    asm("lop3.b32 %0, %1, 0x000F000F, 0x43004300, 0xEA;" : "=r"(both) : "r"(both));
    return both;
}
__device__ __forceinline__ float low(u32 two) { return __uint_as_float(two << 16); }
__device__ __forceinline__ float high(u32 two) { return __uint_as_float(two & 0xffff0000u); }

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void bar_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void bar_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bar_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void bar_wait(u32 bar, u32 parity) {
    asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                 "@p bra done;\nbra again;\ndone:\n}" ::"r"(bar), "r"(parity) : "memory");
}
// A box of TMA.
__device__ __forceinline__ void load(u32 to, const CUtensorMap* map, u32 bar, int inner, int outer) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4}], [%2];"
                 ::"r"(to), "l"(map), "r"(bar), "r"(inner), "r"(outer) : "memory");
}
// Contiguous bytes by TMA, multiples of 16.
__device__ __forceinline__ void load_bytes(u32 to, const void* from, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}

__device__ __forceinline__ float4 plus(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// Relaxed: with .release nvcc writes MEMBAR.ALL.GPU, behind all that the warp asked for.
__device__ __forceinline__ void cluster_arrive() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// The same place in another block of the cluster.
__device__ __forceinline__ u32 in_block(u32 place, int block) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(place), "r"(block));
    return there;
}
// Write v into another block, whose barrier counts the bytes.
#define SEND "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes"
__device__ __forceinline__ void send(u32 there, u32 bar_there, float4 v) {
    asm volatile(SEND ".v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                 ::"r"(there), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(bar_there) : "memory");
}
__device__ __forceinline__ void send(u32 there, u32 bar_there, float2 v) {
    asm volatile(SEND ".v2.f32 [%0], {%1, %2}, [%3];" ::"r"(there), "f"(v.x), "f"(v.y), "r"(bar_there) : "memory");
}

namespace one {  // one row of x: a warp has groups and a ring of its own, and waits for nobody

// INDEX one
// Bytes from the start of a stage to the 16 bytes `chunk` of row `row` of 16: the four rows 4 t + m of one m use all
// banks.
HD int place(int v, int row, int chunk) {
    return v == 16 ? row * 128 + (chunk ^ row / 4 * 2) * 16
                   : (row % 4 + row / 8 * 4) * 128 + (row / 4 % 2 * 4 + (chunk ^ row / 8 * 2)) * 16;
}
// The row of which lane `lane` copies 16 bytes with its copy `i`, and which 16 bytes.
HD int copied_row(int v, int lane, int i) { return v == 16 ? 4 * i + lane / 8 : 8 * i + lane / 4 % 2 * 4 + lane / 8; }
HD int copied_chunk(int v, int lane) { return lane % (v / 2); }
// Which bytes of x become a register of B: k even, or odd; g is the column. Bytes 4 to 7 are zeros.
HD int chosen_bytes(int odd, int g) { return g > 1 ? 0x4444 : g ? (odd ? 0x3244 : 0x1044) : (odd ? 0x4432 : 0x4410); }
// The column, of the four of a word, of sum d of mma.
HD int column_of(int d) { return d % 2 * 2 + d / 2; }
// INDEX END

// V columns a lane; WARPS warps of each of SPLIT blocks share a tile's groups; DEEP stages a warp; BLOCKS an SM.
template <int V_, int WARPS_, int SPLIT_, int DEEP_, int BLOCKS_> struct Shape {
    static constexpr int V = V_, WARPS = WARPS_, SPLIT = SPLIT_, DEEP = DEEP_, BLOCKS = BLOCKS_;
    static constexpr int THREADS = WARPS * 32, PARTS = WARPS * SPLIT, TILE = 8 * V;
    static constexpr int OWN = TILE / SPLIT, PITCH = OWN + 4;  // columns that a block sums up
    struct Warp {
        uint8_t packed[DEEP][16 * TILE];
        uint4 x[DEEP][4];
        __nv_bfloat16 scales[TILE], zeros[TILE];  // of the group in work: no later group's last stage is in the ring
        float4 before[TILE / 4];                  // sums of the groups before it
    };
    struct Shared { Warp warps[WARPS]; float sums[PARTS * PITCH]; uint64_t met; };
    static constexpr int BYTES = block_bytes(BLOCKS);
    static_assert(V == 8 || V == 16, "place and copied_row know these");
    static_assert(DEEP <= 4 && OWN % 4 == 0 && OWN <= THREADS, "these constants do not fit together");
    static_assert(sizeof(Shared) <= BYTES, "a block must fit");
};

struct Problem {
    const uint8_t* packed; const __nv_bfloat16 *x, *scales, *zeros; __nv_bfloat16* y; int columns, groups;
};

__device__ __forceinline__ void copy_async(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wait_for_all_but() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
// Nibbles 0 and 4 as the bf16 128 + q.
__device__ __forceinline__ u32 pair(u32 word) {
    asm("lop3.b32 %0, %0, 0x000F000F, 0x43004300, 0xEA;" : "+r"(word));
    return word;
}
__device__ __forceinline__ u32 chosen(u32 x, u32 bytes) { return __byte_perm(x, 0, bytes); }

// What a lane copies of each stage: the same places in all of them.
template <class S> struct Copies {
    const uint8_t* from;
    u32 to[S::V / 4];
    const __nv_bfloat16 *x, *column;  // column: of scales in the lanes below V, of zero points in the next
    __device__ __forceinline__ Copies(const Problem& p, int group, int first) {
        const int lane = threadIdx.x % 32, chunk = copied_chunk(S::V, lane);
        from = p.packed + (int64_t)(group * 64 + copied_row(S::V, lane, 0)) * p.columns +
               min(first + chunk * 16, p.columns - 16);
        #pragma unroll
        for (int i = 0; i < S::V / 4; ++i) to[i] = place(S::V, copied_row(S::V, lane, i), chunk);
        x = p.x + group * 128 + lane * 8;
        column = (lane < S::V ? p.scales : p.zeros) + (int64_t)group * p.columns +
                 min(first + lane % S::V * 8, p.columns - 8);
    }
};

// Stage `number` of a warp: 16 rows of packed, their 32 values of x, and with a group's last stage the group's scales
// and zero points.
template <class S> __device__ __forceinline__ void fetch(
    const Problem& p, typename S::Warp& s, const Copies<S>& lanes, int number) {
    const int lane = threadIdx.x % 32, stage = number % S::DEEP, part = number % 4, group = number / 4 * S::PARTS;
    const uint8_t* from = lanes.from + (int64_t)(group * 64 + part * 16) * p.columns;
    #pragma unroll
    for (int i = 0; i < S::V / 4; ++i)
        copy_async(s.packed[stage] + lanes.to[i], from + (int64_t)(i * 64 / S::V) * p.columns);
    if (lane < 4) copy_async(s.x[stage] + lane, lanes.x + group * 128 + part * 32);
    if (part == 3 && lane < 2 * S::V)
        copy_async((lane < S::V ? s.scales : s.zeros) + lane % S::V * 8, lanes.column + (int64_t)group * p.columns);
}

template <int V> struct Sums { float of[V / 4][4], total[4]; };  // of 4 columns a word, and of x; in lanes with t = 0

template <int V> __device__ __forceinline__ void add_stage(
    Sums<V>& sums, const uint8_t* packed, const uint4* xs, u32 even, u32 odd) {
    const int lane = threadIdx.x % 32, t = lane % 4, g = lane / 4;
    const u32 ones = 0x3F803F80u;
    const uint4 four = xs[t];
    const u32 x[4] = {four.x, four.y, four.z, four.w};
    #pragma unroll
    for (int m = 0; m < 4; ++m) {
        const uint8_t* from = packed + place(V, 4 * t + m, g * V / 16) + g * V % 16;
        u32 word[4];
        if constexpr (V == 16) *reinterpret_cast<uint4*>(word) = *reinterpret_cast<const uint4*>(from);
        else *reinterpret_cast<uint2*>(word) = *reinterpret_cast<const uint2*>(from);
        const u32 b0 = chosen(x[m], even), b1 = chosen(x[m], odd);
        if (m % 2) multiply(sums.total, ones, ones, ones, ones, x[m - 1], x[m]);  // of all columns alike
        #pragma unroll
        for (int i = 0; i < V / 4; ++i)
            multiply(sums.of[i], pair(word[i]), pair(word[i] >> 8), pair(word[i] >> 4), pair(word[i] >> 12), b0, b1);
    }
}

// s (sum - (128 + z) total) of four columns.
__device__ __forceinline__ float4 scaled(
    const float (&sum)[4], float total, const __nv_bfloat16* scales, const __nv_bfloat16* zeros) {
    const uint2 s = *reinterpret_cast<const uint2*>(scales), z = *reinterpret_cast<const uint2*>(zeros);
    const u32 two_s[2] = {s.x, s.y}, two_z[2] = {z.x, z.y};
    float y[4];
    #pragma unroll
    for (int d = 0; d < 4; ++d) {
        const int column = column_of(d), shift = column % 2 ? 0 : 16;
        const float scale = __uint_as_float(two_s[column / 2] << shift & 0xffff0000u);
        const float zero = __uint_as_float(two_z[column / 2] << shift & 0xffff0000u);
        y[column] = scale * (sum[d] - (128.0f + zero) * total);
    }
    return make_float4(y[0], y[1], y[2], y[3]);
}

template <class S> __global__ void __launch_bounds__(S::THREADS, S::BLOCKS) product(const Problem p) {
    constexpr int V = S::V;
    extern __shared__ __align__(128) uint8_t memory[];
    typename S::Shared& shared = *reinterpret_cast<typename S::Shared*>(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4, g = lane / 4, rank = blockIdx.y;
    const int first = blockIdx.x * S::TILE, part = rank * S::WARPS + warp;
    const int groups = (p.groups - part + S::PARTS - 1) / S::PARTS;  // of this warp; 0 where there are few
    const u32 even = chosen_bytes(0, g), odd = chosen_bytes(1, g), met = shared_address(&shared.met);
    typename S::Warp& s = shared.warps[warp];
    if (threadIdx.x == 0) {
        bar_init(met, 1), bar_expect(met, S::PARTS * S::OWN * 4);
        fence_init();
    }
    const Copies<S> lanes(p, part, first);
    auto ask = [&](int number) {
        if (number < 4 * groups) fetch<S>(p, s, lanes, number);
        commit();
    };
    #pragma unroll 1
    for (int number = 0; number < S::DEEP; ++number) ask(number);
    cluster_arrive();  // this block runs: others may write into its memory
    cluster_wait();
    auto send_four = [&](int i, float4 v) {  // columns 4 i to 4 i + 3 of the lane, to the block that sums them up
        const int at = g * V + 4 * i, block = at / S::OWN;
        send(in_block(shared_address(shared.sums + part * S::PITCH + at % S::OWN), block), in_block(met, block), v);
    };
    #pragma unroll 1
    for (int turn = 0; turn < groups; ++turn) {
        Sums<V> sums = {};
        #pragma unroll 1
        for (int quarter = 0; quarter < 4; ++quarter) {
            const int number = 4 * turn + quarter, stage = number % S::DEEP;
            wait_for_all_but<S::DEEP - 1>();
            __syncwarp();
            add_stage<V>(sums, s.packed[stage], s.x[stage], even, odd);
            __syncwarp();
            if (quarter < 3) ask(number + S::DEEP);
        }
        if (t == 0) {
            float4 v[V / 4], (&before)[S::TILE / 4] = s.before;
            #pragma unroll
            for (int i = 0; i < V / 4; ++i) {
                v[i] = scaled(sums.of[i], sums.total[0], s.scales + g * V + 4 * i, s.zeros + g * V + 4 * i);
                if (turn) v[i] = plus(v[i], before[g * V / 4 + i]);
            }
            #pragma unroll
            for (int i = 0; i < V / 4; ++i)
                if (turn + 1 < groups) before[g * V / 4 + i] = v[i];
                else send_four(i, v[i]);
        }
        __syncwarp();
        ask(4 * turn + 3 + S::DEEP);
    }
    if (groups == 0 && t == 0)
        for (int i = 0; i < V / 4; ++i) send_four(i, make_float4(0, 0, 0, 0));
    bar_wait(met, 0);
    const int own = threadIdx.x, column = first + rank * S::OWN + own;
    if (own >= S::OWN || column >= p.columns) return;
    float sum[4] = {};
    #pragma unroll
    for (int i = 0; i < S::PARTS; ++i) sum[i % 4] += shared.sums[i * S::PITCH + own];
    p.y[column] = __float2bfloat16((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

template <class S> int launch(const Problem& p, cudaStream_t stream) {
    const dim3 grid((p.columns + S::TILE - 1) / S::TILE, S::SPLIT);
    return start<product<S>, cudaSharedmemCarveoutMaxShared>(grid, S::SPLIT, S::THREADS, S::BYTES, stream, p);
}

}  // namespace one

int one_row(int64_t x, int64_t packed, int64_t scales, int64_t zeros, int64_t y,
            int, int columns, int depth, cudaStream_t s) {
    using namespace one;
    using Bf16 = __nv_bfloat16;
    const one::Problem p = {(const uint8_t*)packed, (const Bf16*)x, (const Bf16*)scales, (const Bf16*)zeros, (Bf16*)y,
                            columns, depth / 128};
    return columns >= WIDE_FROM ? launch<Shape<WIDE>>(p, s) : launch<Shape<NARROW>>(p, s);
}

namespace few {  // 2 to 8 rows of x: mma of one warp

#define STREAM "ld.global.nc.L1::no_allocate"
template <int WORDS> __device__ __forceinline__ void stream_in(u32 (&to)[WORDS], const uint8_t* from) {
    if constexpr (WORDS == 8) {
        u32 (&rest)[4] = *reinterpret_cast<u32 (*)[4]>(to + 4);
        stream_in(*reinterpret_cast<u32 (*)[4]>(to), from);
        stream_in(rest, from + 16);
    } else if constexpr (WORDS == 4)
        asm volatile(STREAM ".v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from));
    else if constexpr (WORDS == 2)
        asm volatile(STREAM ".v2.u32 {%0,%1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
    else
        asm volatile(STREAM ".u32 %0, [%1];" : "=r"(to[0]) : "l"(from));
}

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
template <int V> __device__ __forceinline__ void add_group(
    float (&acc)[V / 2][4], const Weights<V>& w, const Problem& p, int group, int t, int g) {
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
                multiply(sum[2 * i], pair<0>(a, above_a), pair<1>(a, above_a),
                         pair<0>(b, above_b), pair<1>(b, above_b), b0, b1);
                multiply(sum[2 * i + 1], pair<2>(a, above_a), pair<3>(a, above_a),
                         pair<2>(b, above_b), pair<3>(b, above_b), b0, b1);
            }
        }
    }
    #pragma unroll
    for (int i = 0; i < V / 2; ++i) {
        const float s0 = low(w.s[i]), s1 = high(w.s[i]), z0 = 128.0f + low(w.z[i]), z1 = 128.0f + high(w.z[i]);
        acc[i][0] += s0 * (sum[i][0] - z0 * total[0]);
        acc[i][2] += s1 * (sum[i][2] - z1 * total[0]);
        acc[i][1] += s0 * (sum[i][1] - z0 * total[1]);
        acc[i][3] += s1 * (sum[i][3] - z1 * total[1]);
    }
}

// A block has 8 V columns; its warps share the groups of k.
template <int V, int WARPS> __global__ void __launch_bounds__(WARPS * 32) product(Problem p) {
    constexpr int ROWS = 8, WIDTH = 8 * V;
    extern __shared__ float parts[];  // WARPS x ROWS x WIDTH
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4, g = lane / 4;
    const int first = blockIdx.x * WIDTH, column = min(first + g * V, p.columns - V), groups = p.depth / 128;
    float acc[V / 2][4] = {};
    int group = warp;
    Weights<V> now, next;
    if (group < groups) now.load(p, group, t, column);
    while (group < groups) {
        if (group + WARPS < groups) next.load(p, group + WARPS, t, column);
        add_group<V>(acc, now, p, group, t, g);
        now = next;
        group += WARPS;
    }
    float* mine = parts + warp * ROWS * WIDTH + g * V;
    #pragma unroll
    for (int i = 0; i < V / 2; ++i)
        #pragma unroll
        for (int j = 0; j < 4; ++j) mine[(2 * t + j % 2) * WIDTH + 2 * i + j / 2] = acc[i][j];
    __syncthreads();
    const int count = min(ROWS, p.rows) * WIDTH;
    for (int at = threadIdx.x; at < count; at += WARPS * 32) {
        float sum = 0;
        #pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += parts[w * ROWS * WIDTH + at];
        if (first + at % WIDTH < p.columns)
            p.y[(int64_t)(at / WIDTH) * p.columns + first + at % WIDTH] = __float2bfloat16(sum);
    }
}

template <int V, int WARPS> int launch(const Problem& p, cudaStream_t stream) {
    const dim3 grid((p.columns + 8 * V - 1) / (8 * V));
    return start<product<V, WARPS>>(grid, 1, WARPS * 32, WARPS * 8 * 8 * V * 4, stream, p);
}

}  // namespace few

int few_rows(int64_t x, int64_t packed, int64_t scales, int64_t zeros, int64_t y,
             int rows, int columns, int depth, cudaStream_t s) {
    using namespace few;
    const few::Problem p = {(const uint8_t*)packed, (const u32*)x, (const u32*)scales, (const u32*)zeros,
                            (__nv_bfloat16*)y, rows, columns, depth};
    return launch<FEW>(p, s);
}

namespace some {  // 9 to 32 rows: wgmma; weights, x, scales and zero points by TMA through a ring; clusters share k

// INDEX some
// The first of the 16 columns of tile m of a warp, from the block's first: a warpgroup has `tiles` times 64 columns.
HD int first_column(int tiles, int warp, int m) { return (warp / 4 * tiles + m) * 64 + warp % 4 * 16; }
// A byte of a box of packed in shared memory: 64 rows of `width` columns, 64 or 128. TMA swizzles 16 bytes by the row.
HD int packed_byte(int width, int row, int chunk) {
    return row * width + ((chunk ^ (width == 128 ? row & 7 : row >> 1 & 3)) << 4);
}
// The row of packed, of 8, whose address a lane gives to ldmatrix: lane t gets those that hold its k in both halves of
// the operand A, 2 t and 2 t + 1, 2 t + 8 and 2 t + 9.
HD int packed_row(int lane) { return lane % 2 * 4 + lane % 8 / 2; }
// Bytes of x: rows of 128 bytes, swizzled alike. Odd rows read the halves of a row the other way round.
HD int x_byte(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }
HD int x_chunk(int i, int row, int t) { return t + ((i ^ row) & 1) * 4; }
// A sum in a block that adds up `own` columns.
HD int sum_at(int own, int row, int column) { return row * (own + 4) + column; }
// INDEX END

struct Problem { const __nv_bfloat16 *scales, *zeros; __nv_bfloat16* y; int rows, columns, groups, per_block; };

// NT eights of rows; a warpgroup has TILES times 64 columns; SPLIT blocks of a cluster share the groups; BLOCKS an SM.
template <int NT_, int TILES_, int WARPGROUPS, int SPLIT_, int DEEP_, int BLOCKS_> struct Shape {
    static constexpr int NT = NT_, TILES = TILES_, SPLIT = SPLIT_, DEEP = DEEP_, BLOCKS = BLOCKS_;
    static constexpr int ROWS = 8 * NT, SUMS = 4 * NT, TILE = 64 * TILES * WARPGROUPS, BOX = TILE % 128 ? 64 : 128;
    static constexpr int CONSUMERS = 4 * WARPGROUPS, THREADS = (CONSUMERS + 2) * 32;
    static constexpr bool AHEAD = NT > 2;  // factors are loaded while products are under way: slower with few rows
    static constexpr u32 PANEL = ROWS * 128, X_BYTES = 2 * PANEL, STAGE = X_BYTES + TILE * 64;
    static constexpr int OWN = TILE / SPLIT;  // columns that a block sums up
    struct Shared {
        uint8_t stages[DEEP][STAGE];  // two boxes of x, then those of packed
        __nv_bfloat16 scales[DEEP][TILE], zeros[DEEP][TILE];
        float totals[DEEP][ROWS], sums[sum_at(OWN, SPLIT * ROWS, 0)];
        uint64_t full[DEEP], empty[DEEP], summed[DEEP], met;
    };
    static constexpr int BYTES = block_bytes(BLOCKS);
    static_assert(SPLIT > 1, "start() launches one block without a cluster, where st.async is an illegal instruction");
    static_assert(SPLIT <= 8 && OWN % 16 == 0 && THREADS <= 1024, "these constants do not fit together");
    static_assert(X_BYTES % 1024 == 0, "boxes begin at multiples of 1024 bytes");
    static_assert(sizeof(Shared) + 1024 <= BYTES, "a block must fit");
};

// Four 8 x 8 matrices of two bytes, transposed; each lane gives the address of a row of one.
__device__ __forceinline__ void matrices(u32 (&to)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}
// 16 columns and 16 of k: the operand A.
__device__ __forceinline__ void unpack(u32* a, u32 word) {
    const u32 above = word >> 4;
    a[0] = pair<0>(word, above), a[1] = pair<1>(word, above), a[2] = pair<2>(word, above), a[3] = pair<3>(word, above);
}

// Half a group for one tile of 64 columns. Two products of 16 of k are under way while the next two are unpacked.
template <class S> __device__ __forceinline__ void multiply_half(
    float (&sum)[S::SUMS], u32 (&a)[2][8], u32 packed, uint64_t b, int half) {
    u32 words[4];
    matrices(words, packed + half * 32 * S::BOX);
    #pragma unroll
    for (int two = 0; two < 2; ++two) {
        unpack(a[two], words[2 * two]), unpack(a[two] + 4, words[2 * two + 1]);
        products_begin();
        #pragma unroll
        for (int i = 0; i < 2; ++i)
            multiply_tile(sum, a[two] + 4 * i, b + half * (S::PANEL >> 4) + (2 * two + i) * 2, half + two + i);
        products_end();
        wait_for_all_products_but<1>();
    }
}

// acc += s (sum - (128 + z) total). d[4 n + i] belongs to row 8 n + 2 t + i % 2 of x and to column 2 g + i / 2 of 16.
template <class S> __device__ __forceinline__ void add_scaled(
    float (&acc)[S::SUMS], const float (&sum)[S::SUMS], const float2 (&totals)[S::NT], u32 scales, u32 zeros) {
    const float s[2] = {low(scales), high(scales)}, z[2] = {128.0f + low(zeros), 128.0f + high(zeros)};
    #pragma unroll
    for (int n = 0; n < S::NT; ++n)
        #pragma unroll
        for (int i = 0; i < 4; ++i)
            acc[4 * n + i] += s[i / 2] * (sum[4 * n + i] - z[i / 2] * (i % 2 ? totals[n].y : totals[n].x));
}

// Where a lane reads: bytes from the start of a stage, and its first column.
template <class S> struct Lane {
    int packed[S::TILES], column;
    __device__ __forceinline__ Lane(int warp, int lane) {
        #pragma unroll
        for (int m = 0; m < S::TILES; ++m) {
            const int first = first_column(S::TILES, warp, m), row = lane / 8 * 8 + packed_row(lane);
            packed[m] = S::X_BYTES + first / S::BOX * 64 * S::BOX + packed_byte(S::BOX, row, first % S::BOX / 16);
        }
        column = first_column(S::TILES, warp, 0) + lane / 4 * 2;
    }
};

// What a lane needs of a group's scales, zero points and totals.
template <class S> struct Factors {
    u32 scales[S::TILES], zeros[S::TILES];
    float2 totals[S::NT];
    __device__ __forceinline__ void load_scales(const typename S::Shared& shared, const Lane<S>& at, int stage) {
        #pragma unroll
        for (int m = 0; m < S::TILES; ++m) {
            const int column = at.column + first_column(S::TILES, 0, m);
            scales[m] = *reinterpret_cast<const u32*>(shared.scales[stage] + column);
            zeros[m] = *reinterpret_cast<const u32*>(shared.zeros[stage] + column);
        }
    }
    __device__ __forceinline__ void load_totals(const typename S::Shared& shared, int stage, u32 parity) {
        bar_wait(shared_address(&shared.summed[stage]), parity);
        #pragma unroll
        for (int n = 0; n < S::NT; ++n)
            totals[n] = *reinterpret_cast<const float2*>(shared.totals[stage] + 8 * n + threadIdx.x % 4 * 2);
    }
};

// A stage is a group.
template <class S> __device__ __forceinline__ void add_group(
    float (&acc)[S::TILES][S::SUMS], typename S::Shared& shared, const Lane<S>& at, int stage, u32 parity) {
    const u32 here = shared_address(shared.stages[stage]);
    const uint64_t b = descriptor(here);
    float sum[S::TILES][S::SUMS] = {};
    u32 a[2][8];
    Factors<S> factors;
    if (S::AHEAD) factors.load_scales(shared, at, stage);
    #pragma unroll
    for (int half = 0; half < 2; ++half)
        #pragma unroll
        for (int m = 0; m < S::TILES; ++m) multiply_half<S>(sum[m], a, here + at.packed[m], b, half);
    if (S::AHEAD) factors.load_totals(shared, stage, parity);
    wait_for_all_products_but<0>();
    #pragma unroll
    for (int m = 0; m < S::TILES; ++m)
        #pragma unroll
        for (int i = 0; i < S::SUMS; ++i) changed(sum[m][i]);
    if (!S::AHEAD) factors.load_totals(shared, stage, parity), factors.load_scales(shared, at, stage);
    #pragma unroll
    for (int m = 0; m < S::TILES; ++m)
        add_scaled<S>(acc[m], sum[m], factors.totals, factors.scales[m], factors.zeros[m]);
}

// One lane: stages come, each with the scales and zero points of its group.
template <class S> __device__ __forceinline__ void produce(
    const CUtensorMap* w_map, const CUtensorMap* x_map, const Problem& p, typename S::Shared& shared,
    int first, int from, int count) {
    const u32 bytes = min(S::TILE, p.columns - first) * 2;
    #pragma unroll 1
    for (int n = 0; n < count; ++n) {
        const int stage = n % S::DEEP, group = from + n;
        const u32 bar = shared_address(&shared.full[stage]), at = shared_address(shared.stages[stage]);
        bar_wait(shared_address(&shared.empty[stage]), (n / S::DEEP & 1) ^ 1);
        bar_expect(bar, S::STAGE + 2 * bytes);
        #pragma unroll
        for (int i = 0; i < S::TILE / S::BOX; ++i)
            load(at + S::X_BYTES + i * 64 * S::BOX, w_map, bar, first + i * S::BOX, group * 64);
        for (int i = 0; i < 2; ++i) load(at + i * S::PANEL, x_map, bar, group * 128 + 64 * i, 0);
        load_bytes(shared_address(shared.scales[stage]), p.scales + (int64_t)group * p.columns + first, bytes, bar);
        load_bytes(shared_address(shared.zeros[stage]), p.zeros + (int64_t)group * p.columns + first, bytes, bar);
    }
}

// One warp: the sums of x over each group, by products with ones. The order of k does not matter.
template <class S> __device__ __forceinline__ void sum_up_x(typename S::Shared& shared, int count) {
    const int lane = threadIdx.x % 32, t = lane % 4, g = lane / 4;
    const u32 ones = 0x3F803F80u;
    #pragma unroll 1
    for (int number = 0; number < count; ++number) {
        const int stage = number % S::DEEP;
        float sum[S::NT][4] = {};
        bar_wait(shared_address(&shared.full[stage]), number / S::DEEP & 1);
        #pragma unroll
        for (int i = 0; i < 4; ++i)
            #pragma unroll
            for (int n = 0; n < S::NT; ++n) {
                const uint8_t* from = shared.stages[stage] + i / 2 * S::PANEL + x_byte(8 * n + g, x_chunk(i, g, t));
                const uint4 x = *reinterpret_cast<const uint4*>(from);
                multiply(sum[n], ones, ones, ones, ones, x.x, x.y);
                multiply(sum[n], ones, ones, ones, ones, x.z, x.w);
            }
        if (g == 0)
            #pragma unroll
            for (int n = 0; n < S::NT; ++n)
                *reinterpret_cast<float2*>(shared.totals[stage] + 8 * n + 2 * t) = make_float2(sum[n][0], sum[n][1]);
        __syncwarp();
        if (lane == 0)
            bar_arrive(shared_address(&shared.summed[stage])), bar_arrive(shared_address(&shared.empty[stage]));
    }
}

// Each block of the cluster sums up its own columns: two of a lane, for each row, go there.
template <class S> __device__ __forceinline__ void send_sums(
    const float (&acc)[S::SUMS], typename S::Shared& shared, int column, int t) {
    const int block = column / S::OWN;
    float* place = shared.sums + sum_at(S::OWN, blockIdx.y * S::ROWS + 2 * t, column % S::OWN);
    const u32 there = in_block(shared_address(place), block), met = in_block(shared_address(&shared.met), block);
    #pragma unroll
    for (int n = 0; n < S::NT; ++n)
        #pragma unroll
        for (int j = 0; j < 2; ++j)
            send(there + sum_at(S::OWN, 8 * n + j, 0) * 4, met, make_float2(acc[4 * n + j], acc[4 * n + 2 + j]));
}

template <class S> __device__ __forceinline__ void add_up(
    const Problem& p, const typename S::Shared& shared, int first) {
    #pragma unroll 1
    for (int at = threadIdx.x; at < S::ROWS * S::OWN / 4; at += S::THREADS) {
        const int row = at / (S::OWN / 4), own = at % (S::OWN / 4) * 4, column = first + blockIdx.y * S::OWN + own;
        float4 sum = make_float4(0, 0, 0, 0);
        #pragma unroll
        for (int other = 0; other < S::SPLIT; ++other) {
            const float* sent = shared.sums + sum_at(S::OWN, other * S::ROWS + row, own);
            sum = plus(sum, *reinterpret_cast<const float4*>(sent));
        }
        if (row >= p.rows || column >= p.columns) continue;
        __nv_bfloat162* y = reinterpret_cast<__nv_bfloat162*>(p.y + (int64_t)row * p.columns + column);
        y[0] = __floats2bfloat162_rn(sum.x, sum.y), y[1] = __floats2bfloat162_rn(sum.z, sum.w);
    }
}

template <class S> __global__ void __launch_bounds__(S::THREADS, S::BLOCKS)
    product(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map, Problem p) {
    extern __shared__ uint8_t memory[];
    typename S::Shared& shared = *reinterpret_cast<typename S::Shared*>(memory + (-shared_address(memory) & 1023));
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, t = lane % 4, g = lane / 4;
    const int first = blockIdx.x * S::TILE, from = blockIdx.y * p.per_block;
    const int count = max(0, min(p.per_block, p.groups - from));
    const u32 met = shared_address(&shared.met);
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::DEEP; ++i) {
            bar_init(shared_address(&shared.full[i]), 1), bar_init(shared_address(&shared.summed[i]), 1);
            bar_init(shared_address(&shared.empty[i]), S::CONSUMERS + 1);  // the warp that sums up x reads too
        }
        bar_init(met, 1), bar_expect(met, S::ROWS * S::TILE * 4);
        fence_init();
    }
    __syncthreads();
    cluster_arrive();  // this block runs: others may write into its sums
    float acc[S::TILES][S::SUMS] = {};
    if (warp == S::CONSUMERS) {
        if (lane == 0) produce<S>(&w_map, &x_map, p, shared, first, from, count);
        __syncwarp();
    } else if (warp > S::CONSUMERS) {
        sum_up_x<S>(shared, count);
    } else {
        const Lane<S> at(warp, lane);
        #pragma unroll 1
        for (int n = 0; n < count; ++n) {
            const int stage = n % S::DEEP;
            const u32 parity = n / S::DEEP & 1;
            bar_wait(shared_address(&shared.full[stage]), parity);
            add_group<S>(acc, shared, at, stage, parity);
            // An arrival does not wait for loads under way, and ptxas moved it before the arithmetic that takes what
            // they loaded. It does not move it before a branch. And nothing fills the last stage again.
            if (n + 1 == count) break;
            __syncwarp();
            if (lane == 0) bar_arrive(shared_address(&shared.empty[stage]));
        }
    }
    cluster_wait();
    if (warp < S::CONSUMERS)
        #pragma unroll
        for (int m = 0; m < S::TILES; ++m) send_sums<S>(acc[m], shared, first_column(S::TILES, warp, m) + 2 * g, t);
    bar_wait(met, 0);
    add_up<S>(p, shared, first);
}

template <class S> int launch(int64_t x, int64_t packed, Problem p, int depth, cudaStream_t stream) {
    CUtensorMap x_map, w_map;
    const CUtensorMapSwizzle swizzle = S::BOX == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
    MUST(map_of_packed(w_map, packed, depth, p.columns, S::BOX, swizzle));
    MUST(map_of_x(x_map, x, p.rows, depth, S::ROWS));
    p.per_block = (p.groups + S::SPLIT - 1) / S::SPLIT;
    const dim3 grid((p.columns + S::TILE - 1) / S::TILE, S::SPLIT);
    return start<product<S>, cudaSharedmemCarveoutMaxShared>(
        grid, S::SPLIT, S::THREADS, S::BYTES, stream, w_map, x_map, p);
}

}  // namespace some

int some_rows(int64_t x, int64_t packed, int64_t scales, int64_t zeros, int64_t y,
              int rows, int columns, int depth, cudaStream_t s) {
    using namespace some;
    using Bf16 = __nv_bfloat16;
    const some::Problem p = {(const Bf16*)scales, (const Bf16*)zeros, (Bf16*)y, rows, columns, depth / 128, 0};
    return rows <= 16 ? launch<Shape<2, SIXTEEN>>(x, packed, p, depth, s)
                      : launch<Shape<4, THIRTY>>(x, packed, p, depth, s);
}

namespace many {  // more rows: wgmma with unpacked weights as its operand in registers

constexpr int GROUPS_OF_COLUMNS = 3, THREADS = 128 * (GROUPS_OF_COLUMNS + 1);
constexpr int BN = 64 * GROUPS_OF_COLUMNS, BM = 128, PITCH = BN + 16;
constexpr u32 PANEL = BM * 128, X_BYTES = 2 * PANEL, W_BYTES = 64 * PITCH;
constexpr u32 STAGE_BYTES = (X_BYTES + W_BYTES + 1023) / 1024 * 1024;
constexpr u32 SHARED_BYTES = STAGES * STAGE_BYTES + 16 * STAGES + 1024;

struct Problem { const u32 *scales, *zeros; __nv_bfloat16* y; int rows, columns, groups; };

// (q - z) s for the two weights of byte j of `two`, in the order of k
template <int j> __device__ __forceinline__ u32 weights(u32 two, u32 above, __nv_bfloat162 z, __nv_bfloat162 s) {
    u32 both = pair<j>(two, above);  // 128 + q
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
    const u32 ring = (shared_address(raw) + 1023) & ~1023u;
    const u32 full = ring + STAGES * STAGE_BYTES, empty = full + 8 * STAGES;
    uint8_t* ring_pointer = raw + (ring - shared_address(raw));
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, t = lane % 4, g = lane / 4;
    const int group = warp / 4, column = blockIdx.x * BN, row = blockIdx.y * BM;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) bar_init(full + 8 * i, 1), bar_init(empty + 8 * i, GROUPS_OF_COLUMNS);
        fence_init();
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
                u32* to = a[half] + 4 * i;
                to[0] = weights<0>(first, first >> 4, z0, s0), to[1] = weights<1>(first, first >> 4, z1, s1);
                to[2] = weights<0>(second, second >> 4, z0, s0), to[3] = weights<1>(second, second >> 4, z1, s1);
            }
            const uint64_t b = descriptor(at + half * PANEL);
            products_begin();
            #pragma unroll
            for (int i = 0; i < 4; ++i) multiply_tile(d, a[half] + 4 * i, b + 2 * i, k + half + i);
            products_end();
            wait_for_all_products_but<1>();
            if (half == 0 && k > 0 && threadIdx.x % 128 == 0) bar_arrive(empty + 8 * before);
        }
        before = stage;
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    wait_for_all_products_but<0>();
    #pragma unroll
    for (int i = 0; i < 64; ++i) changed(d[i]);
    if (!inside) return;
    #pragma unroll
    for (int i = 0; i < 64; i += 4)
        #pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int m = row + 2 * i + 2 * t + j;
            if (m >= p.rows) continue;
            __nv_bfloat162* y = reinterpret_cast<__nv_bfloat162*>(p.y + (int64_t)m * p.columns + column + own);
            *y = __floats2bfloat162_rn(d[i + j], d[i + 2 + j]);
        }
}

}  // namespace many

int many_rows(int64_t x, int64_t packed, int64_t scales, int64_t zeros, int64_t y,
              int rows, int columns, int depth, cudaStream_t s) {
    using namespace many;
    CUtensorMap x_map, w_map;
    MUST(map_of_x(x_map, x, rows, depth, BM));
    MUST(map_of_packed(w_map, packed, depth, columns, PITCH, CU_TENSOR_MAP_SWIZZLE_NONE));
    const many::Problem p = {(const u32*)scales, (const u32*)zeros, (__nv_bfloat16*)y, rows, columns, depth / 128};
    const dim3 grid((columns + BN - 1) / BN, (rows + BM - 1) / BM);
    return start<product_kernel>(grid, 1, THREADS, SHARED_BYTES, s, x_map, w_map, p);
}

// x, packed, scales, zeros, y, rows, columns, depth, stream
static PyObject* run(PyObject*, PyObject* const* given, Py_ssize_t) {
    long long a[9];
    for (int i = 0; i < 9; ++i) a[i] = PyLong_AsLongLong(given[i]);
    const int rows = int(a[5]), columns = int(a[6]), depth = int(a[7]);
    auto* chosen = rows > 32 ? many_rows : rows > 8 ? some_rows : rows > 1 ? few_rows : one_row;
    const int error = chosen(a[0], a[1], a[2], a[3], a[4], rows, columns, depth, (cudaStream_t)a[8]);
    if (error) cudaGetLastError();  // it is reported here, and not again behind the next kernel of torch
    return PyLong_FromLong(error);
}
static PyMethodDef methods[] = {{"run", (PyCFunction)(void*)run, METH_FASTCALL, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "w4a16", "", -1, methods};
#define INIT(name) PyInit_##name
#define INIT_OF(name) INIT(name)
PyMODINIT_FUNC INIT_OF(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
""".replace("@WGMMA@", "\n".join(wgmma(rows) for rows in (16, 32, 128)))


_run = None


def source():
    """The CUDA C++ and the part of its name that the constants make. nvcc would split a -D at the commas of a list."""
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
    if not y.numel() or not x.shape[1]:
        y.zero_()
    elif N % 16 == 0 and (M <= 32 or BY_WGMMA):
        if not x.is_cuda:
            raise ValueError("x, packed, scales and zeros must be on a GPU")
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
            f"x {tuple(x.shape)}, packed {tuple(packed.shape)}, scales {tuple(scales.shape)} "
            "and zeros do not fit together"
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
