"""x W with int4 weights. One row: each warp has a ring of its own. 2 to 8 rows: the bytes that a lane loads are its
operands. 9 to 32: a ring by TMA, many small blocks an SM. More: unpacked weights are the operand of wgmma in registers.
README.md of this problem says what was tried.

One row, and 9 to 32: the blocks of a cluster share the groups of k, and send their sums into each other's shared memory
by st.async, whose bytes a barrier there counts: no fence. One row: the nibbles 0 and 4 of a word are weights of two
columns of the same k. They stay the pair of a register of mma: x is in column 0 of the other operand for the one, in
column 1 for the other. 2 to 8 rows: the two weights of a byte are the pair of k in a register, and k is permuted in
weights and x alike. In both, zero points and scales are applied to the sums of a group. 9 to 32 rows: a block has 128
columns, each warp 8 V of them. It unpacks a weight once for all rows, as the reference rounds it: (q - z) s, where
128 + z is a bf16 in one subtraction less. mma.sync takes k and the rows of x in an order in which neither meets a bank
twice.
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
# 9 to 16 rows, and 17 to 32: columns of a lane, blocks of a cluster, stages, blocks of an SM.
SIXTEEN = (8, 4, 3, 4)
THIRTY = (4, 4, 3, 4)
STAGES = 4  # for more rows
BY_WGMMA = 1
CHOSEN = "WIDE_FROM WIDE NARROW FEW SIXTEEN THIRTY STAGES".split()

SPACE = [{}, {"WIDE": (16, 4, 8, 2, 6)}, {"WIDE": (16, 4, 8, 2, 8)}, {"WIDE": (16, 8, 4, 2, 3)}]


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

// m16n8k16: A are weights (16 columns of W), B are 8 rows of x, D is their product.
__device__ __forceinline__ void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void bar_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory"); }
__device__ __forceinline__ void fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void bar_expect(u32 bar, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory"); }
__device__ __forceinline__ void bar_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
__device__ __forceinline__ void bar_wait(u32 bar, u32 parity) {
    asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra again;\ndone:\n}" ::"r"(bar), "r"(parity) : "memory");
}
// A box of TMA.
__device__ __forceinline__ void load(u32 to, const CUtensorMap* map, u32 bar, int inner, int outer) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                 ::"r"(to), "l"(map), "r"(bar), "r"(inner), "r"(outer) : "memory");
}

__device__ __forceinline__ float4 plus(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// Relaxed: with .release nvcc writes MEMBAR.ALL.GPU, behind all that the warp asked for. What a warp read from a stage is
// in registers by then: its products have used it.
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
// Writes v into another block, whose barrier counts the bytes.
__device__ __forceinline__ void send(u32 there, u32 bar_there, float4 v) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                 ::"r"(there), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(bar_there) : "memory");
}

namespace one {  // one row of x: a warp has groups and a ring of its own, and waits for nobody

// INDEX one
// Bytes from the start of a stage to the 16 bytes `chunk` of row `row` of 16: the four rows 4 t + m of one m use all banks.
HD int place(int v, int row, int chunk) {
    return v == 16 ? row * 128 + (chunk ^ row / 4 * 2) * 16 : (row % 4 + row / 8 * 4) * 128 + (row / 4 % 2 * 4 + (chunk ^ row / 8 * 2)) * 16;
}
// The row of which lane `lane` copies 16 bytes with its copy `i`, and which 16 bytes.
HD int copied_row(int v, int lane, int i) { return v == 16 ? 4 * i + lane / 8 : 8 * i + lane / 4 % 2 * 4 + lane / 8; }
HD int copied_chunk(int v, int lane) { return lane % (v / 2); }
// Which bytes of x become a register of B: k even, or odd; g is the column. Bytes 4 to 7 are zeros.
HD int chosen_bytes(int odd, int g) { return g > 1 ? 0x4444 : g ? (odd ? 0x3244 : 0x1044) : (odd ? 0x4432 : 0x4410); }
// The column, of the four of a word, of sum d of mma.
HD int column_of(int d) { return d % 2 * 2 + d / 2; }
// INDEX END

// V columns a lane; a tile's groups are shared by WARPS warps of each of SPLIT blocks; DEEP stages a warp; BLOCKS an SM.
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
    static constexpr int BYTES = (233472 / BLOCKS - 1024) / 128 * 128;  // no more blocks fit, so they spread
    static_assert(V == 8 || V == 16, "place and copied_row know these");
    static_assert(DEEP <= 4 && OWN % 4 == 0 && OWN <= THREADS && sizeof(Shared) <= BYTES, "these constants do not fit together");
};

struct Problem { const uint8_t* packed; const __nv_bfloat16 *x, *scales, *zeros; __nv_bfloat16* y; int columns, groups; };

__device__ __forceinline__ void copy_async(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wait_for_all_but() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
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
        from = p.packed + (int64_t)(group * 64 + copied_row(S::V, lane, 0)) * p.columns + min(first + chunk * 16, p.columns - 16);
        #pragma unroll
        for (int i = 0; i < S::V / 4; ++i) to[i] = place(S::V, copied_row(S::V, lane, i), chunk);
        x = p.x + group * 128 + lane * 8;
        column = (lane < S::V ? p.scales : p.zeros) + (int64_t)group * p.columns + min(first + lane % S::V * 8, p.columns - 8);
    }
};

// Stage `number` of a warp: 16 rows of packed, their 32 values of x, and with a group's last stage the group's scales and
// zero points.
template <class S> __device__ __forceinline__ void fetch(const Problem& p, typename S::Warp& s, const Copies<S>& lanes, int number) {
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

template <int V> __device__ __forceinline__ void add_stage(Sums<V>& sums, const uint8_t* packed, const uint4* xs, u32 even, u32 odd) {
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
        for (int i = 0; i < V / 4; ++i) multiply(sums.of[i], pair(word[i]), pair(word[i] >> 8), pair(word[i] >> 4), pair(word[i] >> 12), b0, b1);
    }
}

// s (sum - (128 + z) total) of four columns.
__device__ __forceinline__ float4 scaled(const float (&sum)[4], float total, const __nv_bfloat16* scales, const __nv_bfloat16* zeros) {
    const uint2 s = *reinterpret_cast<const uint2*>(scales), z = *reinterpret_cast<const uint2*>(zeros);
    const u32 two_s[2] = {s.x, s.y}, two_z[2] = {z.x, z.y};
    float y[4];
    #pragma unroll
    for (int d = 0; d < 4; ++d) {
        const int column = column_of(d), shift = column % 2 ? 0 : 16;
        const float scale = __uint_as_float(two_s[column / 2] << shift & 0xffff0000u), zero = __uint_as_float(two_z[column / 2] << shift & 0xffff0000u);
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

int one_row(int64_t x, int64_t packed, int64_t scales, int64_t zeros, int64_t y, int, int columns, int depth, cudaStream_t s) {
    using namespace one;
    using Bf16 = __nv_bfloat16;
    const one::Problem p = {(const uint8_t*)packed, (const Bf16*)x, (const Bf16*)scales, (const Bf16*)zeros, (Bf16*)y, columns, depth / 128};
    return columns >= WIDE_FROM ? launch<Shape<WIDE>>(p, s) : launch<Shape<NARROW>>(p, s);
}
namespace few {  // 2 to 8 rows of x: mma of one warp

// The two weights of byte j as bf16: 128 + low, 128 + high. `above` is the word shifted by four bits.
template <int j> __device__ __forceinline__ u32 pair(u32 word, u32 above) {
    u32 both;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(both) : "r"(word), "r"(above), "n"(j | j << 4 | (4 + j) << 8 | (4 + j) << 12));
    asm("lop3.b32 %0, %1, 0x000F000F, 0x43004300, 0xEA;" : "=r"(both) : "r"(both));
    return both;
}

#define STREAM "ld.global.nc.L1::no_allocate"
template <int WORDS> __device__ __forceinline__ void stream_in(u32 (&to)[WORDS], const uint8_t* from) {
    if constexpr (WORDS == 8) {
        u32 (&rest)[4] = *reinterpret_cast<u32 (*)[4]>(to + 4);
        stream_in(*reinterpret_cast<u32 (*)[4]>(to), from);
        stream_in(rest, from + 16);
    } else if constexpr (WORDS == 4)
        asm volatile(STREAM ".v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from));
    else if constexpr (WORDS == 2)
        asm volatile(STREAM ".v2.u32 {%0,%1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
    else
        asm volatile(STREAM ".u32 %0, [%1];" : "=r"(to[0]) : "l"(from));
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
template <int V> __device__ __forceinline__ void add_group(float (&acc)[V / 2][4], const Weights<V>& w, const Problem& p, int group, int t, int g) {
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
        if (first + at % WIDTH < p.columns) p.y[(int64_t)(at / WIDTH) * p.columns + first + at % WIDTH] = __float2bfloat16(sum);
    }
}

template <int V, int WARPS> int launch(const Problem& p, cudaStream_t stream) {
    return start<product<V, WARPS>>(dim3((p.columns + 8 * V - 1) / (8 * V)), 1, WARPS * 32, WARPS * 8 * 8 * V * 4, stream, p);
}

}  // namespace few

int few_rows(int64_t x, int64_t packed, int64_t scales, int64_t zeros, int64_t y, int rows, int columns, int depth, cudaStream_t s) {
    using namespace few;
    const few::Problem p = {(const uint8_t*)packed, (const u32*)x, (const u32*)scales, (const u32*)zeros, (__nv_bfloat16*)y, rows, columns, depth};
    return launch<FEW>(p, s);
}

namespace many {  // more rows: wgmma with unpacked weights as its operand in registers

constexpr int GROUPS_OF_COLUMNS = 3, BN = 64 * GROUPS_OF_COLUMNS, BM = 128, THREADS = 128 * (GROUPS_OF_COLUMNS + 1), PITCH = BN + 16;
constexpr u32 PANEL = BM * 128, X_BYTES = 2 * PANEL, W_BYTES = 64 * PITCH, STAGE_BYTES = (X_BYTES + W_BYTES + 1023) / 1024 * 1024;
constexpr u32 SHARED_BYTES = STAGES * STAGE_BYTES + 16 * STAGES + 1024;

struct Problem { const u32 *scales, *zeros; __nv_bfloat16* y; int rows, columns, groups; };

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

// INDEX ring
// A box in shared memory has rows of 128 bytes; TMA's 128-byte swizzle: 16 bytes go where their number XOR the row says.
HD int swizzled(int row, int byte) { return row * 128 + (((byte >> 4) ^ (row & 7)) << 4) + (byte & 15); }
// The byte rows of 16 of k (8 rows of packed) that lane t holds: k is permuted, and x comes alike.
HD int packed_row(int t, int second) { return 2 * t + second; }
// The row of x, of 8, that is column n of B and of the sums.
HD int x_row(int n) { return (n & 3) << 1 | n >> 2; }
// Where in a tile of columns the V columns of a lane begin.
HD int column_of(int v, int warp, int g) { return (warp * 8 + g) * v; }
// A byte of the sums of four columns that a block of the cluster sent: of `own` columns a line, from the start of its part.
HD int sent_byte(int own, int line, int column) { return swizzled((line * own + column) / 32, (line * own + column) % 32 * 4); }
// INDEX END

struct Problem { const u32 *scales, *zeros; __nv_bfloat16* y; int rows, columns, groups, per_block; };

template <bool EXACT, int j> __device__ __forceinline__ u32 weights(u32 word, u32 above, u32 zero, u32 scale) {
    u32 both = few::pair<j>(word, above);
    __nv_bfloat162 q = *reinterpret_cast<__nv_bfloat162*>(&both);
    if constexpr (!EXACT) q = __hsub2(q, __float2bfloat162_rn(128.0f));
    const __nv_bfloat162 w = __hmul2(__hsub2(q, *reinterpret_cast<const __nv_bfloat162*>(&zero)), *reinterpret_cast<const __nv_bfloat162*>(&scale));
    return *reinterpret_cast<const u32*>(&w);
}

// How a block works: NT eights of rows, V columns a lane, SPLIT blocks of a cluster share the groups, BLOCKS an SM.
constexpr int TILE = 128;  // columns of a block
template <int NT_, int V_, int SPLIT_, int STAGES_, int BLOCKS_> struct Shape {
    static constexpr int NT = NT_, V = V_, SPLIT = SPLIT_, DEEP = STAGES_, BLOCKS = BLOCKS_;
    static constexpr int MB = V / 2, CONSUMERS = TILE / (8 * V), THREADS = (CONSUMERS + 1) * 32, ROWS = 8 * NT;
    static constexpr u32 PANEL = ROWS * 128, X_BYTES = 2 * PANEL, W_BYTES = 8192, STAGE = X_BYTES + W_BYTES;
    static constexpr u32 SHARED_BYTES = DEEP * STAGE + 16 * DEEP + 8 + 1024;
    static constexpr int OWN = TILE / SPLIT;  // columns that a block sums up
    static_assert(ROWS * TILE * 4 <= STAGE && TILE % SPLIT == 0 && OWN % V == 0, "sent sums take the place of a stage");
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
            for (int n = 0; n < S::NT; ++n) multiply(acc[m][n], a[m][0], a[m][1], a[m][2], a[m][3], b[n].x, b[n].y);
    }
}

template <class S> __device__ __forceinline__ void produce(const CUtensorMap* w_map, const CUtensorMap* x_map, u32 ring, u32 full, u32 empty, int column, int from, int count) {
    for (int n = 0; n < count; ++n) {
        const int stage = n % S::DEEP;
        const u32 bar = full + 8 * stage, at = ring + stage * S::STAGE;
        bar_wait(empty + 8 * stage, (n / S::DEEP & 1) ^ 1);
        bar_expect(bar, S::STAGE);
        load(at + S::X_BYTES, w_map, bar, column, (from + n) * 64);
        for (int i = 0; i < 2; ++i) load(at + i * S::PANEL, x_map, bar, (from + n) * 128 + 64 * i, 0);
    }
}

// Each block of the cluster sums up its own columns. They are sent into `place`, a stage that all blocks have left.
template <class S> __device__ __forceinline__ void send_sums(const float (&acc)[S::MB][S::NT][4], u32 place, u32 met, int column, int t) {
    const u32 there = in_block(place + blockIdx.y * S::ROWS * S::OWN * 4, column / S::OWN), met_there = in_block(met, column / S::OWN);
    #pragma unroll
    for (int m = 0; m < S::MB; m += 2)
        #pragma unroll
        for (int n = 0; n < S::NT; ++n)
            #pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float (&left)[4] = acc[m][n], (&right)[4] = acc[m + 1][n];
                const u32 byte = sent_byte(S::OWN, 8 * n + 2 * t + j, column % S::OWN + 2 * m);
                send(there + byte, met_there, make_float4(left[j], left[2 + j], right[j], right[2 + j]));
            }
}

template <class S> __device__ __forceinline__ void add_up(const Problem& p, const uint8_t* place, int first) {
    for (int at = threadIdx.x; at < S::ROWS * S::OWN / 4; at += S::THREADS) {
        const int line = at / (S::OWN / 4), own = at % (S::OWN / 4) * 4;
        float4 sum = make_float4(0, 0, 0, 0);
        #pragma unroll
        for (int other = 0; other < S::SPLIT; ++other)
            sum = plus(sum, *reinterpret_cast<const float4*>(place + other * S::ROWS * S::OWN * 4 + sent_byte(S::OWN, line, own)));
        const int row = line / 8 * 8 + x_row(line % 8), column = first + blockIdx.y * S::OWN + own;
        if (row >= p.rows || column >= p.columns) continue;
        __nv_bfloat162* y = reinterpret_cast<__nv_bfloat162*>(p.y + (int64_t)row * p.columns + column);
        y[0] = __floats2bfloat162_rn(sum.x, sum.y), y[1] = __floats2bfloat162_rn(sum.z, sum.w);
    }
}

template <class S> __global__ void __launch_bounds__(S::THREADS, S::BLOCKS)
    product(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map, Problem p) {
    extern __shared__ uint8_t memory[];
    const u32 ring = (shared_address(memory) + 1023) & ~1023u, full = ring + S::DEEP * S::STAGE, empty = full + 8 * S::DEEP, met = empty + 8 * S::DEEP;
    uint8_t* stages = memory + (ring - shared_address(memory));
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, t = lane % 4, g = lane / 4;
    const int first = blockIdx.x * TILE, column = min(first + column_of(S::V, warp, g), p.columns - S::V);
    const int from = blockIdx.y * p.per_block, count = max(0, min(p.per_block, p.groups - from));
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::DEEP; ++i) bar_init(full + 8 * i, 1), bar_init(empty + 8 * i, S::CONSUMERS);
        bar_init(met, 1), bar_expect(met, S::ROWS * TILE * 4);
        fence_init();
    }
    __syncthreads();
    // The stage that a block of full length leaves first, and the group with which this block does. -1: it never enters it.
    const int left = p.per_block % S::DEEP, last = count > left ? count - 1 - (count - 1 - left) % S::DEEP : -1;
    float acc[S::MB][S::NT][4] = {};
    if (last < 0 || warp == S::CONSUMERS) cluster_arrive();  // others may write into that stage
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
            bar_wait(full + 8 * stage, n / S::DEEP & 1);
            if (exact) add_group<true, S>(acc, stages + stage * S::STAGE, at, c);
            else add_group<false, S>(acc, stages + stage * S::STAGE, at, c);
            __syncwarp();
            if (lane == 0) bar_arrive(empty + 8 * stage);
            if (n == last) cluster_arrive();
        }
    }
    cluster_wait();
    if (warp < S::CONSUMERS) send_sums<S>(acc, ring + left * S::STAGE, met, column_of(S::V, warp, g), t);
    bar_wait(met, 0);
    add_up<S>(p, stages + left * S::STAGE, first);
}

template <class S> int launch(int64_t x, int64_t packed, Problem p, int depth, cudaStream_t stream) {
    CUtensorMap x_map, w_map;
    MUST(many::map_of(w_map, packed, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, depth / 2, p.columns, 64, 128, CU_TENSOR_MAP_SWIZZLE_128B));
    MUST(many::map_of(x_map, x, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, p.rows, depth, S::ROWS, 64, CU_TENSOR_MAP_SWIZZLE_128B));
    p.per_block = (p.groups + S::SPLIT - 1) / S::SPLIT;
    const dim3 grid((p.columns + TILE - 1) / TILE, S::SPLIT);
    return start<product<S>>(grid, S::SPLIT, S::THREADS, S::SHARED_BYTES, stream, w_map, x_map, p);
}

}  // namespace ring

int some_rows(int64_t x, int64_t packed, int64_t scales, int64_t zeros, int64_t y, int rows, int columns, int depth, cudaStream_t s) {
    using namespace ring;
    const ring::Problem p = {(const u32*)scales, (const u32*)zeros, (__nv_bfloat16*)y, rows, columns, depth / 128, 0};
    return rows <= 16 ? launch<Shape<2, SIXTEEN>>(x, packed, p, depth, s) : launch<Shape<4, THIRTY>>(x, packed, p, depth, s);
}

int many_rows(int64_t x, int64_t packed, int64_t scales, int64_t zeros, int64_t y, int rows, int columns, int depth, cudaStream_t s) {
    using namespace many;
    CUtensorMap x_map, w_map;
    MUST(map_of(x_map, x, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, rows, depth, BM, 64, CU_TENSOR_MAP_SWIZZLE_128B));
    MUST(map_of(w_map, packed, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, depth / 2, columns, 64, PITCH, CU_TENSOR_MAP_SWIZZLE_NONE));
    const many::Problem p = {(const u32*)scales, (const u32*)zeros, (__nv_bfloat16*)y, rows, columns, depth / 128};
    return start<product_kernel>(dim3((columns + BN - 1) / BN, (rows + BM - 1) / BM), 1, THREADS, SHARED_BYTES, s, x_map, w_map, p);
}

static PyObject* run(PyObject*, PyObject* const* given, Py_ssize_t) {  // x, packed, scales, zeros, y, rows, columns, depth, stream
    long long a[9];
    for (int i = 0; i < 9; ++i) a[i] = PyLong_AsLongLong(given[i]);
    auto* chosen = a[5] > 32 ? many_rows : a[5] > 8 ? some_rows : a[5] > 1 ? few_rows : one_row;
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
