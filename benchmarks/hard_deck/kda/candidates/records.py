"""Kimi delta attention in two kernels of CUDA C++ for sm_90a. For the state S before a chunk of 64 tokens of a head:

    c = new - pushed S ;  o = asked S + weighted c ;  S = diag(decay) S + ended^T c

fold computes these matrices, all chunks side by side, and writes a record of 74,240 bytes a chunk and head, laid out as
walk wants it in shared memory. walk goes over the chunks of a head, and is launched while fold ends.

fold: a block of eight warps takes a chunk of a head. A warp gates eight tokens, a lane four of their channels.
* m is the sum of the gates at the middle of each block of 16 tokens; keys and queries are scaled from and to m of their
  own block. A product of two blocks has 2^(m - m) on its right operand. All are in range while gates are at least -5.4;
  where 16 gates in a row sum to less than -87, that factor is 0, and a block's first tokens lose what came before.
* (I + lower)^-1 is never made: only the blocks of 16 x 16 on its diagonal are inverted, in fp32. Then each warp solves
  for 32 columns of keys or values, block after block, without a barrier: transposed, a solved block is, in registers,
  the operand of the next products.
* Keys, queries and values are scaled, solved and staged in the place where they arrived, so 72 KB of shared memory do,
  and three blocks fit on an SM. They lie there as in the record.

walk: a cluster takes a pair of batch and head, a block PART columns of V.
* One warpgroup takes c and S from chunk to chunk, S in fp32 registers. Another computes the outputs, from S and c in
  bf16, which lie in shared memory anyway as the B of the chain's own products. In blocks of their own, fed by bulk
  copies from block to block, the outputs made calls with 16 pairs some 4 % slower, with 4 and 8 pairs 12 % faster.
* Each block fetches a slice of a record for all blocks of its cluster (multicast).
* S is written to shared memory in two halves of 64 channels: one while the other is multiplied. The products of pushed
  read both operands from there; ended, which is transposed, comes through registers meanwhile.
* A block ends when all that is sent to it has come, so no barrier of the cluster, with its fence, stands at the end.
"""

import torch
from torch.utils.cpp_extension import load_inline

try:
    from torch._C import _cuda_getCurrentRawStream as stream_of  # makes no torch.cuda.Stream
except ImportError:

    def stream_of(device):
        return torch.cuda.current_stream(device).cuda_stream


CHUNK = 64
WIDTH = 128
GRID = 65535  # blocks in y or in z
RECORD = 37120  # bf16 that fill the record of a chunk and head, 74,240 bytes
FOLD_BLOCKS = 3  # of an SM: the compiler leaves registers for so many
# Columns of a block, blocks of a cluster, stages of each ring, slots for S and c on their way to the outputs.
MANY = (32, 4, 2, 4)
FEW = (16, 8, 3, 3)  # with at most FEW_PAIRS pairs
FEW_PAIRS = 8
# walk may be launched, and set up its blocks where SMs are free, when fold has ended (0), when all blocks of fold have
# stored (1), or when all have started (2). It reads nothing before fold has ended.
DEPENDENT = 1
CHOSEN = "FOLD_BLOCKS MANY FEW FEW_PAIRS DEPENDENT".split()

SPACE = [
    {},
    {"DEPENDENT": 2},
    {"FOLD_BLOCKS": 2},
    {"MANY": (32, 2, 3, 3), "FEW": (32, 4, 3, 3)},
    {"MANY": (16, 4, 3, 4), "FEW": (16, 4, 3, 4)},
    {"MANY": (16, 8, 3, 4), "FEW": (16, 8, 2, 4)},
    {"MANY": (32, 4, 3, 3), "FEW": (16, 8, 3, 4)},
]


def wgmma(n):
    """m64 n k16 of bf16, n / 2 sums a thread: d += SIGN A B. A is in registers, or like B in shared memory."""
    half = n // 2
    sums, outputs = ", ".join(f"%{i}" for i in range(half)), ", ".join(f'"+f"(d[{i}])' for i in range(half))
    registers = ", ".join(f"%{half + i}" for i in range(4))
    inputs = ", ".join(f'"r"(a[{i}])' for i in range(4))

    def function(a, operand, signs, inputs, b):
        return f"""template <int SIGN> __device__ __forceinline__ void multiply(float (&d)[{half}], {a}, uint64_t b) {{
    asm volatile("{{.reg .pred p; setp.eq.b32 p, 0, 0; "
                 "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 "
                 "{{{sums}}}, {operand}, %{b}, p, %{b + 1}, {signs};}}"
                 : {outputs} : {inputs}, "l"(b), "n"(SIGN));
}}
"""

    return function("const u32 (&a)[4]", f"{{{registers}}}", "1, 0", inputs, half + 4) + function(
        "uint64_t a", f"%{half}", "1, 0, 0", '"l"(a)', half + 1
    )


PTX = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

typedef uint32_t u32;

template <class T> __device__ __forceinline__ T lds(const uint8_t* at) { return *reinterpret_cast<const T*>(at); }
template <class T> __device__ __forceinline__ void sts(uint8_t* at, T value) { *reinterpret_cast<T*>(at) = value; }
__device__ __forceinline__ u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

// Four 8 x 8 tiles of 16 bits; lane l gives the address of row l % 8 of tile l / 8.
__device__ __forceinline__ void ldmatrix(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void ldmatrix_trans(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void stmatrix(u32 at, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(at), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
__device__ __forceinline__ void stmatrix_trans(u32 at, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(at), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
__device__ __forceinline__ u32 packed(float low, float high) {  // to a pair of bf16
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
template <int THREADS> __device__ __forceinline__ void barrier_of(u32 number) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(THREADS) : "memory");
}
__device__ __forceinline__ void let_walk_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_fold() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Of fold

// Hidden from the compiler, which would else share expressions of the thread between distant phases, and spill some.
__device__ __forceinline__ int warp_of_block() {
    u32 thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    return thread / 32;
}
// threadIdx.x % 32 out of another register, for the last phases, for the same reason.
__device__ __forceinline__ int lane_again() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}
// 16 bytes to shared memory, zeros where `inside` is false. With a hint to the L2, ptxas 13.0 made an illegal
// instruction of this (LDGSTS [R19+UR0], desc[UR1]).
__device__ __forceinline__ void copy16(uint8_t* to, const void* from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(shared_address(to)), "l"(from), "r"(inside ? 16 : 0) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
__device__ __forceinline__ float4 load_gates(const float* from) {
    float4 r;
    asm volatile("ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w) : "l"(from));
    return r;
}
// d += a b. With g = lane / 4 and t = lane % 4, d is (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1) of 16 x 8.
__device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ float power_of_2(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
__device__ __forceinline__ float power_of_half(float x) {  // 2^-x: the sign is part of the instruction
    float r;
    asm("{.reg .f32 minus; neg.f32 minus, %1; ex2.approx.ftz.f32 %0, minus;}" : "=f"(r) : "f"(x));
    return r;
}
__device__ __forceinline__ u32 times(u32 a, u32 b) {  // pairs of bf16
    u32 r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// Of walk

__device__ __forceinline__ u32 rank_in_cluster() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ void bar_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void bar_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bar_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void bar_wait(u32 bar, u32 parity) {
    asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\n"
                 "bra again;\ndone:\n}" ::"r"(bar), "r"(parity) : "memory");
}
// The same place in another block of the cluster.
__device__ __forceinline__ u32 in_block(u32 place, u32 block) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(place), "r"(block));
    return there;
}
// Without .release.cluster, which is a fence of the whole GPU: this tells that something was read.
__device__ __forceinline__ void bar_arrive_there(u32 bar_there) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(bar_there) : "memory");
}
__device__ __forceinline__ void fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void cluster_barrier() {  // for the mbarriers' first values alone: fence_init releases them
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void copy(u32 to, const uint8_t* from, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}
__device__ __forceinline__ void copy_to_all(u32 to, const uint8_t* from, u32 bytes, u32 bar, u32 blocks) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1], %2, [%3], %4;"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(bar), "h"((uint16_t)blocks) : "memory");
}
__device__ __forceinline__ void load_words(u32 (&a)[4], u32 at) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ float load_float(u32 at) {
    float r;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(r) : "r"(at) : "memory");
    return r;
}
// What this thread wrote to shared memory is there for wgmma and bulk copies; after a barrier, what all wrote.
__device__ __forceinline__ void async_sees() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int GROUPS> __device__ __forceinline__ void products_but() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}
// The compiler neither reads nor changes these sums across this line.
template <int COUNT> __device__ __forceinline__ void hold(float (&d)[COUNT]) {
    #pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i]) :: "memory");
}
@WGMMA@"""

LAYOUT = r"""
constexpr int CHUNK = 64, WIDTH = 128;

// A panel has 64 rows, which are tokens, of 64 columns in bf16. Its 16-byte parts stand in the 128-byte swizzle of
// wgmma, where eight rows of one part meet all banks, too.
constexpr u32 PANEL = 8192;
__device__ __forceinline__ int panel_at(int row, int part) { return row * 128 + ((part ^ (row & 7)) << 4); }

// Bytes of a record: two panels each of pushed, ended and asked, one of weighted; decay, fp32; new as the sums of wgmma
// lie: 512 bytes for 16 x 16 values, four such down 64 tokens, then the next 16 columns. The chain of walk takes
// CHAIN_BYTES from the start and a part of new, the outputs OUTPUT_BYTES from ASKED.
constexpr u32 PUSHED = 0, ENDED = 2 * PANEL, DECAY = 4 * PANEL, CHAIN_BYTES = DECAY + WIDTH * 4;
constexpr u32 ASKED = CHAIN_BYTES, WEIGHTED = ASKED + 2 * PANEL, NEW = WEIGHTED + PANEL, RECORD = NEW + 2 * PANEL;
constexpr u32 OUTPUT_BYTES = NEW - ASKED;
"""

FOLD = r"""
namespace fold {

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int OWN = CHUNK / WARPS;  // tokens that a warp gates
constexpr int BLOCK_BYTES = 16 * 128, TILE_BYTES = 2 * PANEL;  // 16 tokens of a panel; 64 x 128 bf16 in two panels
constexpr float PER_E = 1.4426950408889634f, SCALE = 0.08838834764831845f;  // log2(e), 1 / sqrt(128)

// Shared memory. Tiles: keys and queries of 2^(sums - m), keys of 2^(m - sums), values.
constexpr int KEYS = 0, QUERIES = TILE_BYTES, RIGHT = 2 * TILE_BYTES, VALUES = 3 * TILE_BYTES;
constexpr int TOTALS = 4 * TILE_BYTES;               // fp32 [warp][channel]: sums of the gates of eight tokens
constexpr int STARTS = TOTALS + WARPS * WIDTH * 4;   // fp32 [block][channel]: 2^m
constexpr int BRIDGES = STARTS + 4 * WIDTH * 4;      // bf16 [pair of blocks][channel]: 2^(m[later] - m[earlier])
constexpr int RATES = BRIDGES + 6 * WIDTH * 2;       // fp32 [token]: beta
constexpr int SHARED_BYTES = RATES + CHUNK * 4;
// In the place of RIGHT, once the products of pairs are done. LOWER: a panel, -beta keys keys^T below the blocks on the
// diagonal; in those, the inverse of 16 x 16 without its ones. DIAGONALS: what is inverted, fp32
// [block][column][row].
constexpr int LOWER = RIGHT, DIAGONALS = RIGHT + PANEL;

__device__ __forceinline__ int lane_of_warp() { return threadIdx.x % 32; }
__device__ __forceinline__ int tile_at(int row, int part) { return part / 8 * PANEL + panel_at(row, part % 8); }
__device__ __forceinline__ int bridge_at(int later, int earlier) { return (later * (later - 1) / 2 + earlier) * 256; }
__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// Tensors of bf16 are addressed as 16-bit words.
struct Problem {
    const uint16_t *q, *k, *v;
    const float* g;
    const void* beta;
    uint8_t* records;
    int tokens, heads, chunks, beta_is_float;
};

// Neighbouring blocks take neighbouring heads, whose rows are neighbours in memory.
struct Place {
    int64_t first;  // the row of 128 channels of the chunk's first token in q, k, v and g
    int number;     // of the record
    int head;
    int inside;     // its tokens that exist; 0 or less: none
    __device__ __forceinline__ explicit Place(const Problem& p) {
        const int line = blockIdx.y, chunk = blockIdx.z;
        head = blockIdx.x;
        first = ((int64_t)line * p.tokens + chunk * CHUNK) * p.heads + head;
        number = (line * p.heads + head) * p.chunks + chunk;
        inside = min(CHUNK, p.tokens - chunk * CHUNK);
    }
    __device__ __forceinline__ uint8_t* record(const Problem& p) const { return p.records + (int64_t)number * RECORD; }
};

// A warp copies the rows that it gates.
__device__ __forceinline__ void copy_rows(uint8_t* tile, const uint16_t* from, const Place& place, int heads,
                                          int warp) {
    const int lane = lane_of_warp(), part = lane % 16;
    from += place.first * WIDTH + part * 8;
    #pragma unroll
    for (int i = 0; i < OWN / 2; ++i) {
        const int row = OWN * warp + 2 * i + lane / 16;
        copy16(tile + tile_at(row, part), from + row * heads * WIDTH, row < place.inside);
    }
}

// All loads of the block at once; gates go to registers, four channels of each token of the warp a lane.
__device__ __forceinline__ void start_loads(float4 (&gates)[OWN], uint8_t* memory, const Problem& p, const Place& place,
                                            int warp) {
    const float* from = p.g + place.first * WIDTH + 4 * lane_of_warp();
    #pragma unroll
    for (int t = 0; t < OWN; ++t) {
        const int row = OWN * warp + t;
        gates[t] = make_float4(0, 0, 0, 0);
        if (row < place.inside) gates[t] = load_gates(from + row * p.heads * WIDTH);
    }
    copy_rows(memory + KEYS, p.k, place, p.heads, warp);
    copy_rows(memory + QUERIES, p.q, place, p.heads, warp);
    commit_copies();
    copy_rows(memory + VALUES, p.v, place, p.heads, warp);
    commit_copies();
}

__device__ __forceinline__ void put_rate(uint8_t* memory, const Problem& p, const Place& place, int token) {
    float rate = 0;
    const int64_t at = place.first + token * p.heads;
    if (token < place.inside)
        rate = p.beta_is_float ? ((const float*)p.beta)[at] : low(((const uint16_t*)p.beta)[at]);
    sts(memory + RATES + token * 4, rate);
}

__device__ __forceinline__ void add(float (&sum)[4], float4 x) {
    sum[0] += x.x, sum[1] += x.y, sum[2] += x.z, sum[3] += x.w;
}
__device__ __forceinline__ float4 four(const float (&x)[4]) { return make_float4(x[0], x[1], x[2], x[3]); }
__device__ __forceinline__ uint2 four_packed(const float (&x)[4]) {
    return make_uint2(packed(x[0], x[1]), packed(x[2], x[3]));
}

__device__ __forceinline__ void put_totals(uint8_t* memory, const float4 (&gates)[OWN], int warp) {
    float sum[4] = {};
    #pragma unroll
    for (int t = 0; t < OWN; ++t) add(sum, gates[t]);
    #pragma unroll
    for (int j = 0; j < 4; ++j) sum[j] *= PER_E;
    sts(memory + TOTALS + warp * 512 + lane_of_warp() * 16, four(sum));
}

__device__ __forceinline__ float of_block(const float (&m)[4][4], int block, int j) {
    return block < 2 ? (block == 0 ? m[0][j] : m[1][j]) : (block == 2 ? m[2][j] : m[3][j]);
}

// What a lane scales its four channels by: 2^m of the warp's block, and 2^(sum of the chunk - m). m lies between the
// two warps of a block. Stores the starts, the bridges, of which a warp takes a pair of blocks, and the chunk's decay.
__device__ __forceinline__ void ends_of(float (&start)[4], float (&end)[4], uint8_t* memory, float* decay, int warp) {
    const int lane = lane_of_warp(), block = warp / 2;
    const int later = warp < 1 ? 1 : warp < 3 ? 2 : 3, earlier = warp - later * (later - 1) / 2;
    float m[4][4], sum[4] = {}, bridge[4], all[4];
    #pragma unroll
    for (int i = 0; i < WARPS; ++i) {
        add(sum, lds<float4>(memory + TOTALS + i * 512 + lane * 16));
        #pragma unroll
        for (int j = 0; j < 4; ++j)
            if (i % 2 == 0) m[i / 2][j] = sum[j];
    }
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
        const float middle = of_block(m, block, j);
        start[j] = power_of_2(middle), end[j] = power_of_2(sum[j] - middle), all[j] = power_of_2(sum[j]);
        bridge[j] = power_of_2(of_block(m, later, j) - of_block(m, earlier, j));
    }
    if (warp % 2 == 0) sts(memory + STARTS + block * 512 + lane * 16, four(start));
    if (warp < 6) sts(memory + BRIDGES + bridge_at(later, earlier) + lane * 8, four_packed(bridge));
    if (warp == 7) reinterpret_cast<float4*>(decay)[lane] = four(all);
}

// Keys and queries of the warp's tokens are scaled in place; those from the start and to the end go to the record. A
// lane's 8 bytes have the same place in a tile here and there, and those of a warp are two whole lines of 128.
__device__ __forceinline__ void gate(uint8_t* memory, const Problem& p, const Place& place, const float4 (&gates)[OWN],
                                     int warp) {
    const int lane = lane_of_warp();
    float start[4], end[4], sum[4] = {};  // sum: that of the gates, less m
    ends_of(start, end, memory, (float*)(place.record(p) + DECAY), warp);
    if (warp % 2 == 0) {
        const float4 total = lds<float4>(memory + TOTALS + warp * 512 + lane * 16);
        sum[0] = -total.x, sum[1] = -total.y, sum[2] = -total.z, sum[3] = -total.w;
    }
    const int first = tile_at(OWN * warp, lane / 2) + lane % 2 * 8;
    uint8_t* record = place.record(p);
    #pragma unroll
    for (int t = 0; t < OWN; ++t) {
        const int at = (first ^ t * 16) + t * 128;
        const uint2 k = lds<uint2>(memory + KEYS + at), q = lds<uint2>(memory + QUERIES + at);
        const float g[4] = {gates[t].x, gates[t].y, gates[t].z, gates[t].w};
        float key[4] = {low(k.x), high(k.x), low(k.y), high(k.y)}, right[4];
        float query[4] = {low(q.x), high(q.x), low(q.y), high(q.y)};
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
            sum[j] = fmaf(g[j], PER_E, sum[j]);
            const float rise = power_of_2(sum[j]);
            right[j] = key[j] * power_of_half(sum[j]);
            key[j] *= rise, query[j] *= rise * SCALE;
        }
        sts(memory + KEYS + at, four_packed(key)), sts(memory + QUERIES + at, four_packed(query));
        sts(memory + RIGHT + at, four_packed(right));
        #pragma unroll
        for (int j = 0; j < 4; ++j) query[j] *= start[j], right[j] *= end[j];
        *reinterpret_cast<uint2*>(record + ASKED + at) = four_packed(query);
        *reinterpret_cast<uint2*>(record + ENDED + at) = four_packed(right);
    }
}

// Products of the keys or queries of a block with the keys of the blocks up to it: sums[earlier][eight tokens].
template <int BLOCK>
__device__ __forceinline__ void multiply_pairs(float (&sums)[4][2][4], const uint8_t* left, const uint8_t* memory) {
    const int lane = lane_of_warp();
    left += BLOCK * BLOCK_BYTES + lane % 16 * 128;
    const uint8_t* right = memory + RIGHT + (lane / 16 * 8 + lane % 8) * 128;
    const uint8_t* bridge = memory + BRIDGES + bridge_at(BLOCK, 0) + lane % 4 * 4;
    const int left_part = (lane / 16 ^ lane % 8) << 4, right_part = (lane / 8 % 2 ^ lane % 8) << 4;
    #pragma unroll
    for (int step = 0; step < WIDTH / 16; ++step) {
        u32 a[4], b[4];
        const int panel = step / 4 * PANEL, part = step % 4 * 32;
        ldmatrix(a, shared_address(left + panel + (left_part ^ part)));
        #pragma unroll
        for (int earlier = 0; earlier <= BLOCK; ++earlier) {
            ldmatrix(b, shared_address(right + panel + earlier * BLOCK_BYTES + (right_part ^ part)));
            if (earlier < BLOCK) {
                const uint8_t* at = bridge + earlier * 256 + step * 32;
                const u32 first = lds<u32>(at), second = lds<u32>(at + 16);
                b[0] = times(b[0], first), b[1] = times(b[1], second);
                b[2] = times(b[2], first), b[3] = times(b[3], second);
            }
            multiply(sums[earlier][0], a, b[0], b[1]);
            multiply(sums[earlier][1], a, b[2], b[3]);
        }
    }
}

// One piece of code for each block has no branches in it, so loads run ahead of products.
__device__ __forceinline__ void multiply_pairs_of(int block, float (&sums)[4][2][4], const uint8_t* left,
                                                  const uint8_t* memory) {
    switch (block) {
    case 0: return multiply_pairs<0>(sums, left, memory);
    case 1: return multiply_pairs<1>(sums, left, memory);
    case 2: return multiply_pairs<2>(sums, left, memory);
    default: return multiply_pairs<3>(sums, left, memory);
    }
}

// 512 bytes at a time, to the same places of a record as in shared memory.
template <int TIMES> __device__ __forceinline__ void copy_out(uint8_t* to, const uint8_t* from) {
    const int lane = lane_again();
    #pragma unroll
    for (int i = 0; i < TIMES; ++i)
        *reinterpret_cast<uint4*>(to + i * 512 + lane * 16) = lds<uint4>(from + i * 512 + lane * 16);
}

// The warp's 16 rows of weighted, staged in the place of its queries, which no other warp reads.
__device__ __forceinline__ void put_weights(uint8_t* record, uint8_t* memory, const float (&sums)[4][2][4], int block) {
    uint8_t* stage = memory + QUERIES + block * BLOCK_BYTES;
    const int lane = lane_of_warp(), row = lane / 4, column = lane % 4 * 2;
    #pragma unroll
    for (int earlier = 0; earlier < 4; ++earlier) {
        u32 r[4];
        #pragma unroll
        for (int i = 0; i < 4; ++i) {  // rows 8 (i % 2), columns 8 (i / 2) and after
            const float* pair = sums[earlier][i / 2] + i % 2 * 2;
            const int ahead = earlier < block ? 16 : row + 8 * (i % 2) - column - 8 * (i / 2);
            r[i] = packed(ahead >= 0 ? pair[0] : 0, ahead >= 1 ? pair[1] : 0);
        }
        stmatrix(shared_address(stage + panel_at(lane % 16, 2 * earlier + lane / 16)), r);
    }
    __syncwarp();
    copy_out<BLOCK_BYTES / 512>(record + WEIGHTED + block * BLOCK_BYTES, stage);
}

__device__ __forceinline__ void put_lower(uint8_t* memory, const float (&sums)[4][2][4], int block) {
    const int lane = lane_of_warp(), row = lane / 4, column = lane % 4 * 2;
    const uint8_t* rate = memory + RATES + (16 * block + row) * 4;
    const float rates[2] = {lds<float>(rate), lds<float>(rate + 32)};
    #pragma unroll
    for (int earlier = 0; earlier < 4; ++earlier) {
        if (earlier > block) break;
        u32 r[4];
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* pair = sums[earlier][i / 2] + i % 2 * 2;
            const float one = pair[0] * rates[i % 2], two = pair[1] * rates[i % 2];
            r[i] = packed(-one, -two);
            if (earlier < block) continue;
            const int i_row = row + 8 * (i % 2), i_column = column + 8 * (i / 2);
            uint8_t* at = memory + DIAGONALS + block * 1024 + i_column * 64 + i_row * 4;
            sts(at, i_row > i_column ? one : 0.0f), sts(at + 64, i_row > i_column + 1 ? two : 0.0f);
        }
        const int at = LOWER + panel_at(16 * block + lane % 16, 2 * earlier + lane / 16);
        if (earlier < block) stmatrix(shared_address(memory + at), r);
    }
}

// A lane solves for a column of the inverse of 16 x 16; lanes 16 and up do so too, and store the lower rows.
__device__ __forceinline__ void invert(uint8_t* memory, int block) {
    const uint8_t* lower = memory + DIAGONALS + block * 1024;
    const int lane = lane_of_warp(), column = lane % 16, half = lane / 16;
    float x[16];
    #pragma unroll
    for (int row = 0; row < 16; ++row) x[row] = row == column;
    #pragma unroll
    for (int k = 0; k < 15; ++k) {
        #pragma unroll
        for (int row = (k + 1) / 4 * 4; row < 16; row += 4) {
            const float4 a = lds<float4>(lower + k * 64 + row * 4);  // zeros on and above the diagonal
            x[row] -= a.x * x[k], x[row + 1] -= a.y * x[k], x[row + 2] -= a.z * x[k], x[row + 3] -= a.w * x[k];
        }
    }
    #pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int row = i + 8 * half;
        const float value = row == column ? 0 : half ? x[i + 8] : x[i];
        uint8_t* line = memory + LOWER + panel_at(16 * block + row, 2 * block + column / 8);
        sts(line + column % 8 * 2, (uint16_t)packed(value, 0));
    }
}

// 16 columns of a block of a tile, transposed, as sums of a product: times beta and, for keys, 2^m.
__device__ __forceinline__ void load_sums(float (&sums)[2][4], const uint8_t* from, const uint8_t* rates,
                                          const uint8_t* starts, bool of_keys) {
    u32 r[4];
    ldmatrix_trans(r, shared_address(from));
    const float start[2] = {of_keys ? lds<float>(starts) : 1.0f, of_keys ? lds<float>(starts + 32) : 1.0f};
    const float2 rate[2] = {lds<float2>(rates), lds<float2>(rates + 32)};
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        sums[i / 2][i % 2 * 2] = low(r[i]) * start[i % 2] * rate[i / 2].x;
        sums[i / 2][i % 2 * 2 + 1] = high(r[i]) * start[i % 2] * rate[i / 2].y;
    }
}

__device__ __forceinline__ void as_operand(u32 (&a)[4], const float (&sums)[2][4]) {
    #pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = packed(sums[i / 2][i % 2 * 2], sums[i / 2][i % 2 * 2 + 1]);
}

// (I + lower)^-1 times 32 columns of a tile, in its place. Transposed: the columns are rows of the products.
__device__ __forceinline__ void solve(uint8_t* tile, const uint8_t* memory, bool of_keys, int first_column) {
    u32 x[4][2][4], a[4], b[4];  // x: solved, [block][16 columns]
    const int lane = lane_again(), token = lane / 16 * 8 + lane % 8, odd = lane / 8 % 2;
    #pragma unroll
    for (int block = 0; block < 4; ++block) {
        float sums[2][2][4];  // [16 columns][eight tokens]
        const uint8_t* rates = memory + RATES + block * 64 + lane % 4 * 8;
        const uint8_t* starts = memory + STARTS + block * 512 + (first_column + lane / 4) * 4;
        uint8_t* at[2];
        #pragma unroll
        for (int m = 0; m < 2; ++m) {
            at[m] = tile + tile_at(16 * block + token, first_column / 8 + 2 * m + odd);
            load_sums(sums[m], at[m], rates, starts + m * 64, of_keys);
        }
        #pragma unroll
        for (int earlier = 0; earlier < block; ++earlier) {
            ldmatrix(b, shared_address(memory + LOWER + panel_at(16 * block + token, 2 * earlier + odd)));
            #pragma unroll
            for (int m = 0; m < 2; ++m) {
                multiply(sums[m][0], x[earlier][m], b[0], b[1]);
                multiply(sums[m][1], x[earlier][m], b[2], b[3]);
            }
        }
        ldmatrix(b, shared_address(memory + LOWER + panel_at(16 * block + token, 2 * block + odd)));
        #pragma unroll
        for (int m = 0; m < 2; ++m) {
            as_operand(a, sums[m]);  // without the inverse's ones: what they multiply is in the sums, in fp32
            multiply(sums[m][0], a, b[0], b[1]), multiply(sums[m][1], a, b[2], b[3]);
            as_operand(x[block][m], sums[m]);
            stmatrix_trans(shared_address(at[m]), x[block][m]);
        }
    }
}

// 32 columns of new, 512 bytes at a time: what ldmatrix gives to a lane is what walk's lane loads.
__device__ __forceinline__ void store_new(uint8_t* out, const uint8_t* values, int first_column) {
    const int lane = lane_again();
    out += first_column / 16 * 2048 + lane * 16;
    #pragma unroll
    for (int i = 0; i < 8; ++i) {
        u32 r[4];
        const int row = i % 4 * 16 + lane % 16, part = first_column / 8 + i / 4 * 2 + lane / 16;
        ldmatrix(r, shared_address(values + tile_at(row, part)));
        *reinterpret_cast<uint4*>(out + i * 512) = make_uint4(r[0], r[1], r[2], r[3]);
    }
}

__global__ void __launch_bounds__(THREADS, FOLD_BLOCKS) fold_kernel(const Problem p) {
    extern __shared__ __align__(128) uint8_t memory[];
    if (DEPENDENT == 2) let_walk_start();
    const int warp = warp_of_block();
    const Place place(p);
    float4 gates[OWN];
    start_loads(gates, memory, p, place, warp);
    if (threadIdx.x < CHUNK) put_rate(memory, p, place, threadIdx.x);
    put_totals(memory, gates, warp);
    wait_copies<1>();
    __syncthreads();
    gate(memory, p, place, gates, warp);
    __syncthreads();

    const bool of_keys = warp < 4;
    // Warps w and w + 4 share a scheduler: a long row and a short one.
    const int block = of_keys ? 3 - warp : warp - 4;
    float sums[4][2][4] = {};
    multiply_pairs_of(block, sums, memory + (of_keys ? KEYS : QUERIES), memory);
    wait_copies<0>();
    __syncthreads();  // RIGHT is free, and all values are there
    if (of_keys) {
        put_lower(memory, sums, block);
        __syncwarp();
        invert(memory, block);
    } else {
        put_weights(place.record(p), memory, sums, block);
    }
    __syncthreads();

    const int first_column = warp % 4 * 32;
    solve(memory + (of_keys ? KEYS : VALUES), memory, of_keys, first_column);
    if (of_keys) {
        barrier_of<THREADS / 2>(1);  // of the warps of keys: two of them have solved a panel
        copy_out<8>(place.record(p) + PUSHED + warp * PANEL / 2, memory + KEYS + warp * PANEL / 2);
    } else {
        __syncwarp();
        store_new(place.record(p) + NEW, memory + VALUES, first_column);
    }
    if (DEPENDENT == 1) let_walk_start();
}

}  // namespace fold
"""

WALK = r"""
namespace walk {

// A warpgroup for the chain, one for the outputs, and a warp for each that fetches what it multiplies.
constexpr int GROUP = 128, THREADS = 2 * GROUP + 64;

template <int PART_, int CLUSTER_, int STAGES_, int SLOTS_> struct Shape {
    static constexpr int PART = PART_, CLUSTER = CLUSTER_, STAGES = STAGES_, SLOTS = SLOTS_;
    static constexpr u32 STATE = WIDTH * PART * 2, CHANGE = CHUNK * PART * 2, SLOT = STATE + CHANGE;  // bytes
    static constexpr u32 CHAIN_STAGE = (CHAIN_BYTES + CHANGE + 1023) / 1024 * 1024;                   // CHANGE: of new
    static constexpr u32 OUTPUTS_AT = STAGES * CHAIN_STAGE, SLOTS_AT = OUTPUTS_AT + STAGES * OUTPUT_BYTES;
    static constexpr u32 BARRIERS = SLOTS_AT + SLOTS * SLOT, SHARED_BYTES = BARRIERS + 8 * (4 * STAGES + 2 * SLOTS);
    static_assert(WIDTH % (PART * CLUSTER) == 0 && CLUSTER <= 8, "blocks of a cluster");
    static_assert(CHAIN_BYTES % (16 * CLUSTER) == 0 && OUTPUT_BYTES % (16 * CLUSTER) == 0, "slices of a record");
    static_assert(SHARED_BYTES <= 232448 && SLOTS > 2, "a block must fit, and a chain be two slots ahead");
};

struct Problem { const uint8_t* records; __nv_bfloat16* out; int tokens, heads, chunks; };

template <int N> struct Number { __device__ constexpr operator int() const { return N; } };

// Barriers of a ring, at the same places in all blocks: a stage is full; all blocks have used it.
struct Ring { u32 full, empty; };
// Where things are. ready: S and c are in a slot; passed: the outputs have used them.
struct Places { u32 base; Ring chain, outputs; u32 ready, passed, rank; };

// Descriptors of wgmma. Only their lower words change from product to product, by additions without a carry: what is
// computed between two products delays the second.
__device__ __forceinline__ uint64_t descriptor(u32 low, u32 high) { return (uint64_t)high << 32 | low; }
// B of K rows: 8 x 8 values are 128 bytes together, the next 8 of k follow, 16 K bytes further are the next 8 columns.
template <int K> __device__ __forceinline__ uint64_t of_b(u32 at, int step) {
    return descriptor(((at & 0x3FFFF) >> 4 | (128 >> 4) << 16) + step * (2 * 128 >> 4), K);
}
// A of 64 rows in panels, at a multiple of 1024 bytes.
__device__ __forceinline__ uint64_t of_a(u32 at, int step) {
    return descriptor(((at & 0x3FFFF) >> 4 | 1 << 16) + (step / 4 * PANEL + step % 4 * 32 >> 4), 1024 >> 4 | 1 << 30);
}

// Sums of 16 rows of this warp, as bf16, into a B of K rows; the sums' rows are its k, from 8 `eight` on.
template <int K, int COUNT> __device__ __forceinline__ void put(u32 to, const float (&d)[COUNT], int eight) {
    const int lane = threadIdx.x % 32;
    to += lane / 16 * 16 * K + (eight + lane / 8 % 2) * 128 + lane % 8 * 16;
    #pragma unroll
    for (int i = 0; i < COUNT; i += 8)
        stmatrix_trans(to + i / 4 * 16 * K, {packed(d[i], d[i + 1]), packed(d[i + 2], d[i + 3]),
                                             packed(d[i + 4], d[i + 5]), packed(d[i + 6], d[i + 7])});
}

// A in registers: its 64 rows are the columns of a panel.
__device__ __forceinline__ void load_columns(u32 (&a)[4][4], u32 panel) {
    const int lane = threadIdx.x % 32, row = lane / 16 * 8 + lane % 8;
    const u32 at = panel_at(row, threadIdx.x / 32 * 2 + lane / 8 % 2);
    #pragma unroll
    for (int step = 0; step < 4; ++step) ldmatrix_trans(a[step], panel + step * 16 * 128 + at);
}
// `new` as fold's sums lay, 16 bytes a lane for 16 columns.
template <int COUNT> __device__ __forceinline__ void load_new(float (&d)[COUNT], u32 from) {
    #pragma unroll
    for (int i = 0; i < COUNT; i += 8) {
        u32 four[4];
        load_words(four, from + i / 8 * 2048 + threadIdx.x * 16);
        #pragma unroll
        for (int j = 0; j < 8; ++j) d[i + j] = __uint_as_float(j % 2 ? four[j / 2] & 0xffff0000u : four[j / 2] << 16);
    }
}
// Channel 64 half + 16 warp + lane / 4 + 8 second of the chunk's decay.
__device__ __forceinline__ void load_decay(float (&decay)[2][2], u32 from) {
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    #pragma unroll
    for (int i = 0; i < 4; ++i) decay[i / 2][i % 2] = load_float(from + (i / 2 * 64 + i % 2 * 8 + row) * 4);
}
template <int COUNT> __device__ __forceinline__ void scale(float (&state)[COUNT], const float (&decay)[2]) {
    #pragma unroll
    for (int i = 0; i < COUNT; ++i) state[i] *= decay[i / 2 % 2];
}
// d += SIGN A B for the k from 16 FROM to 16 TO; B has K rows.
template <int SIGN, int K, int FROM, int TO, int COUNT>
__device__ __forceinline__ void product(float (&d)[COUNT], u32 a, u32 b) {
    #pragma unroll
    for (int step = FROM; step < TO; ++step) multiply<SIGN>(d, of_a(a, step), of_b<K>(b, step));
}
template <int COUNT> __device__ __forceinline__ void product(float (&d)[COUNT], const u32 (&a)[4][4], u32 b) {
    #pragma unroll
    for (int step = 0; step < 4; ++step) multiply<1>(d, a[step], of_b<CHUNK>(b, step));
}

// One thread asks for this block's slice of each record for all blocks of the cluster; for the chain for its own part
// of new, too. The last turns only wait until all blocks have used what this one sent.
template <class S, bool CHAIN>
__device__ __forceinline__ void produce(const Problem& p, const Places& at, const uint8_t* record, int part) {
    constexpr u32 STAGE = CHAIN ? S::CHAIN_STAGE : OUTPUT_BYTES, FROM = CHAIN ? 0 : ASKED;
    constexpr u32 BYTES = CHAIN ? CHAIN_BYTES : OUTPUT_BYTES, NEWS = CHAIN ? S::CHANGE : 0, SLICE = BYTES / S::CLUSTER;
    const Ring ring = CHAIN ? at.chain : at.outputs;
    const u32 first = at.base + (CHAIN ? 0 : S::OUTPUTS_AT), slice = at.rank * SLICE;
    if (DEPENDENT) wait_for_fold();
    for (int n = 0; n < p.chunks + S::STAGES; ++n, record += RECORD) {
        const u32 stage = n % S::STAGES, bar = ring.full + 8 * stage, to = first + stage * STAGE;
        bar_wait(ring.empty + 8 * stage, (n / S::STAGES & 1) ^ 1);
        if (n >= p.chunks) continue;
        bar_expect(bar, BYTES + NEWS);
        copy_to_all(to + slice, record + FROM + slice, SLICE, bar, (1 << S::CLUSTER) - 1);
        if (CHAIN) copy(to + CHAIN_BYTES, record + NEW + part * NEWS, NEWS, bar);
    }
}
// A thread for each block of the cluster tells it that this block has used a stage.
template <class S> __device__ __forceinline__ void release(const Ring& ring, int n) {
    const u32 thread = threadIdx.x % GROUP;
    if (thread < S::CLUSTER) bar_arrive_there(in_block(ring.empty + 8 * (n % S::STAGES), thread));
}

// The last chunk stands behind the loop: where the loop is left no product may be under way, or ptxas serializes all.
template <class S> __device__ __forceinline__ void chain(const Problem& p, const Places& at) {
    const int warp = threadIdx.x / 32, last = p.chunks - 1;
    float state[2][S::PART / 2] = {}, change[S::PART / 2];  // change: new, then c
    float decay[2][2];
    u32 ended[2][4][4];
    auto slot_of = [&](int n) { return at.base + S::SLOTS_AT + n % S::SLOTS * S::SLOT; };
    auto record_of = [&](int n) { return at.base + n % S::STAGES * S::CHAIN_STAGE; };
    auto begin = [&](int n) {
        bar_wait(at.chain.full + 8 * (n % S::STAGES), n / S::STAGES & 1);
        load_decay(decay, record_of(n) + DECAY);
        load_new(change, record_of(n) + CHAIN_BYTES), hold(change);
    };
    auto load_ended = [&](int n) {
        #pragma unroll
        for (int half = 0; half < 2; ++half) load_columns(ended[half], record_of(n) + ENDED + half * PANEL);
    };
    auto keep_change = [&](int n) {  // all warps have then used the stage, and S and c are in the slot
        put<CHUNK>(slot_of(n) + S::STATE, change, 2 * warp);
        async_sees(), barrier_of<GROUP>(1);
        if (threadIdx.x == 0) bar_arrive(at.ready + 8 * (n % S::SLOTS));
    };
    begin(0), load_ended(0);
    #pragma unroll
    for (int half = 0; half < 2; ++half) put<WIDTH>(slot_of(0), state[half], 8 * half + 2 * warp);
    for (int n = 0; n < last; ++n) {
        keep_change(n);
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            products_begin(), hold(state[half]);
            product(state[half], ended[half], slot_of(n) + S::STATE);
            products_end();
        }
        begin(n + 1);
        const u32 next = slot_of(n + 1);
        auto half_of_change = [&](auto half) {
            products_but<1>();  // this half of S is there; the other half, or the first products of c, are under way
            hold(state[half]);
            put<WIDTH>(next, state[half], 8 * half + 2 * warp);
            async_sees(), barrier_of<GROUP>(1);
            products_begin(), hold(change);
            product<-1, WIDTH, 4 * half, 4 * half + 4>(change, record_of(n + 1) + PUSHED, next);
            products_end();
            scale(state[half], decay[half]);
        };
        half_of_change(Number<0>()), half_of_change(Number<1>());
        // The next but one slot is free. A wait also keeps ptxas from loading ended between the products.
        bar_wait(at.passed + 8 * ((n + 2) % S::SLOTS), ((n + 2) / S::SLOTS & 1) ^ 1);
        load_ended(n + 1);
        products_but<0>(), hold(change);
    }
    keep_change(last);
}

// Pairs of sums; the tokens past the end are left out.
template <int COUNT>
__device__ __forceinline__ void store(const Problem& p, const u32 (&pairs)[COUNT], __nv_bfloat16* out, int chunk) {
    const int token = chunk * CHUNK + threadIdx.x % GROUP / 32 * 16 + threadIdx.x % 32 / 4;
    const int64_t line = (int64_t)p.heads * WIDTH;
    out += token * line + threadIdx.x % 4 * 2;
    #pragma unroll
    for (int second = 0; second < 2; ++second)
        #pragma unroll
        for (int i = second; i < COUNT; i += 2)
            if (token + 8 * second < p.tokens) *reinterpret_cast<u32*>(out + 8 * second * line + i / 2 * 8) = pairs[i];
}

// The outputs of a chunk are stored while the next one's products run. The chain has no time to tell other blocks that
// it has used a stage, since its next fence may wait for that: it is told here.
template <class S> __device__ __forceinline__ void outputs(const Problem& p, const Places& at, __nv_bfloat16* out) {
    u32 pairs[S::PART / 4] = {};
    for (int n = 0; n < p.chunks; ++n) {
        const u32 slot = n % S::SLOTS, state = at.base + S::SLOTS_AT + slot * S::SLOT;
        const u32 record = at.base + S::OUTPUTS_AT + n % S::STAGES * OUTPUT_BYTES;
        bar_wait(at.ready + 8 * slot, n / S::SLOTS & 1);
        release<S>(at.chain, n);
        bar_wait(at.outputs.full + 8 * (n % S::STAGES), n / S::STAGES & 1);
        float sums[S::PART / 2] = {};
        products_begin(), hold(sums);
        product<1, WIDTH, 0, 8>(sums, record, state);
        product<1, CHUNK, 0, 4>(sums, record + WEIGHTED - ASKED, state + S::STATE);
        products_end();
        if (n) store(p, pairs, out, n - 1);
        products_but<0>(), hold(sums);
        barrier_of<GROUP>(2);  // all warps have used the stage and the slot
        if (threadIdx.x == GROUP) bar_arrive(at.passed + 8 * slot);
        release<S>(at.outputs, n);
        #pragma unroll
        for (int i = 0; i < S::PART / 4; ++i) pairs[i] = packed(sums[2 * i], sums[2 * i + 1]);
    }
    store(p, pairs, out, p.chunks - 1);
}

template <class S> __global__ void __launch_bounds__(THREADS, 1) walk_kernel(const Problem p) {
    extern __shared__ __align__(1024) uint8_t memory[];
    const u32 base = shared_address(memory), bars = base + S::BARRIERS, ring = 8 * S::STAGES;
    const Places at = {base, {bars, bars + ring}, {bars + 2 * ring, bars + 3 * ring},
                       bars + 4 * ring, bars + 4 * ring + 8 * S::SLOTS, rank_in_cluster()};
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::STAGES; ++i) {
            bar_init(at.chain.full + 8 * i, 1), bar_init(at.chain.empty + 8 * i, S::CLUSTER);
            bar_init(at.outputs.full + 8 * i, 1), bar_init(at.outputs.empty + 8 * i, S::CLUSTER);
        }
        for (int i = 0; i < S::SLOTS; ++i) bar_init(at.ready + 8 * i, 1), bar_init(at.passed + 8 * i, 1);
        fence_init();
    }
    cluster_barrier();
    const int part = blockIdx.x, batch = blockIdx.y / p.heads, head = blockIdx.y % p.heads;
    const uint8_t* record = p.records + (int64_t)blockIdx.y * p.chunks * RECORD;
    if (threadIdx.x < GROUP) chain<S>(p, at);
    else if (threadIdx.x < 2 * GROUP)
        outputs<S>(p, at, p.out + ((int64_t)batch * p.tokens * p.heads + head) * WIDTH + part * S::PART);
    else if (threadIdx.x == 2 * GROUP) produce<S, true>(p, at, record, part);
    else if (threadIdx.x == 2 * GROUP + 32) produce<S, false>(p, at, record, part);
}

}  // namespace walk
"""

LAUNCHER = r"""
// All return 0 or an error of CUDA.
#define MUST(call) do { int error = int(call); if (error) return error; } while (0)

// Leave for a kernel to use its shared memory is asked for once a device.
constexpr int DEVICES = 64;
template <auto kernel> int prepare(int bytes) {
    static bool told[DEVICES] = {};
    int device;
    MUST(cudaGetDevice(&device));
    if (device < DEVICES && told[device]) return 0;
    MUST(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    MUST(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
    if (device < DEVICES) told[device] = true;
    return 0;
}

namespace fold {

int launch(const Problem& p, int batch, cudaStream_t stream) {
    MUST(prepare<fold_kernel>(SHARED_BYTES));
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(p.heads, batch, p.chunks), config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = SHARED_BYTES, config.stream = stream;
    return cudaLaunchKernelEx(&config, fold_kernel, p);
}

}  // namespace fold

namespace walk {

template <class S> int launch(const Problem& p, int pairs, cudaStream_t stream) {
    MUST(prepare<walk_kernel<S>>(S::SHARED_BYTES));
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(WIDTH / S::PART, pairs), config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = S::SHARED_BYTES, config.stream = stream;
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = S::CLUSTER, attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.attrs = attributes, config.numAttrs = DEPENDENT ? 2 : 1;
    return cudaLaunchKernelEx(&config, walk_kernel<S>, p);
}

}  // namespace walk

// Given are the addresses of q, k, v, g, beta, records and out; batch, tokens, heads, whether beta is fp32; the stream.
int both(const long long (&a)[12]) {
    auto words = [&](int i) { return (const uint16_t*)a[i]; };
    uint8_t* records = (uint8_t*)a[5];
    const int batch = a[7], tokens = a[8], heads = a[9], chunks = (tokens + CHUNK - 1) / CHUNK, pairs = batch * heads;
    const cudaStream_t stream = (cudaStream_t)a[11];
    if (!pairs || !chunks) return 0;
    MUST(fold::launch({words(0), words(1), words(2), (const float*)a[3], (const void*)a[4], records, tokens, heads,
                       chunks, int(a[10])}, batch, stream));
    auto* launch = pairs > FEW_PAIRS ? walk::launch<walk::Shape<MANY>> : walk::launch<walk::Shape<FEW>>;
    return launch({records, (__nv_bfloat16*)a[6], tokens, heads, chunks}, pairs, stream);
}

static PyObject* run(PyObject*, PyObject* const* given, Py_ssize_t) {
    long long a[12];
    for (int i = 0; i < 12; ++i) a[i] = PyLong_AsLongLong(given[i]);
    const int error = both(a);
    if (error) cudaGetLastError();  // it is reported here, and not again behind the next kernel of torch
    return PyLong_FromLong(error);
}
static PyMethodDef methods[] = {{"run", (PyCFunction)(void*)run, METH_FASTCALL, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "kda", "", -1, methods};
#define INIT(name) PyInit_##name
#define INIT_OF(name) INIT(name)
PyMODINIT_FUNC INIT_OF(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
"""


def source():
    """The CUDA C++, and what the constants add to its name. nvcc would split the lists of a -D at their commas."""
    chosen = {name: globals()[name] for name in CHOSEN}
    values = {name: ", ".join(map(str, one)) if isinstance(one, tuple) else str(one) for name, one in chosen.items()}
    lines = [f"#define {name} {value}\n" for name, value in values.items()]
    widths = {MANY[0], FEW[0]}
    ptx = PTX.replace("@WGMMA@", "".join(map(wgmma, sorted(widths))))
    return "".join([*lines, ptx, LAYOUT, FOLD, WALK, LAUNCHER]), "_".join(values.values()).replace(", ", "_")


_run = None


def built():
    """The extension's launcher, built once per process."""
    global _run
    if _run is None:
        text, name = source()
        _run = load_inline(
            f"kda_records_{name}",
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


def attention_of(q, k, v, g, beta, device):
    batch, tokens, heads, width = q.shape
    chunks = -(-tokens // CHUNK)
    if not q.shape == k.shape == v.shape == g.shape or beta.shape != q.shape[:3]:
        raise ValueError("q, k, v and g must have one shape, and beta that of their heads")
    if width != WIDTH:
        raise ValueError("the kernel is written for K = V = 128")
    if max(batch * heads, chunks) > GRID:
        raise ValueError(f"at most {GRID} pairs of batch and head, and as many chunks of {CHUNK} tokens")
    if not q.dtype == k.dtype == v.dtype == torch.bfloat16 or g.dtype != torch.float32:
        raise ValueError("the kernel is written for q, k and v in bf16, and g in fp32")
    if not device == k.get_device() == v.get_device() == g.get_device() == beta.get_device():
        raise ValueError("q, k, v, g and beta must be on one device")
    if not q.is_cuda:
        raise ValueError("q, k, v, g and beta must be on a GPU")
    q, k, v, g = dense(q), dense(k), dense(v), dense(g)
    beta = (beta if beta.dtype == torch.bfloat16 else beta.float()).contiguous()
    out = torch.empty_like(v)
    records = v.new_empty(batch * heads * chunks * RECORD)
    pointers = [x.data_ptr() for x in (q, k, v, g, beta, records, out)]
    is_float = int(beta.dtype == torch.float32)
    error = (_run or built())(*pointers, batch, tokens, heads, is_float, stream_of(device))
    if error:
        raise RuntimeError(f"kda: CUDA error {error}")
    return out


def kernel_function(q, k, v, g, beta):
    device = q.get_device()
    if q.is_cuda and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return attention_of(q, k, v, g, beta, device)
    return attention_of(q, k, v, g, beta, device)
