"""Kimi delta attention in CUDA C++ for sm_90a: two kernels, fold and walk, or three where few pairs of batch and head
have many chunks, with transfer between them. For the state S before a chunk of 64 tokens of a head:

    c = new - pushed S ;  o = asked S + weighted c ;  S = diag(decay) S + ended^T c

fold computes these matrices, all chunks side by side, and writes a record of 74,240 bytes a chunk and head, laid out as
walk wants it in shared memory. walk goes over the chunks of a head. Each kernel is launched while the one before it
ends.

fold: a block of four warps takes a chunk of a head. A warp gates 16 tokens, a lane four of their channels.
* m is the sum of the gates at the middle of each block of 16 tokens; keys and queries are scaled from and to m of their
  own block. A product of two blocks has 2^(m - m) on its right operand. All are in range while gates are at least -5.4;
  where 16 gates in a row sum to less than -87, that factor is 0, and a block's first tokens lose what came before.
* Each warp multiplies two or three of the ten pairs of blocks, keys and queries with one right operand.
* (I + lower)^-1 is never made: only the blocks of 16 x 16 on its diagonal are inverted, in fp32. Then each warp solves
  for 64 columns of keys or values, block after block, without a barrier: transposed, a solved block is, in registers,
  the operand of the next products; and that of values is, there, what goes to the record.
* Keys and queries are scaled in the place where they arrived, and values come to that of the queries, so 56 KB of
  shared memory do, and four blocks fit on an SM: those of 528 chunks and heads on 132 SMs at once.

walk: a cluster takes a pair of batch and head, a block 64 columns of V.
* The chain is transposed, and stays in the registers of a warpgroup: what one product leaves there in fp32 is, as bf16,
  the A of the next one. c^T = new^T - S^T pushed^T; S^T = S^T decay + c^T ended. pushed and ended are the B of these as
  they lie in shared memory. No fence or barrier stands between these products.
* S^T has two halves of 64 channels: one is rounded, and multiplied by pushed, while the other's products with ended
  run.
* Another warpgroup computes the outputs from S and c, which it gets through shared memory in bf16: the chain writes
  them there while its products run.
* Where SMs are free, TURNS blocks take the same columns. All go over the whole chain; each computes the outputs of
  every TURNS-th chunk, and gets asked and weighted of those alone: so fewer bytes come to an SM.
* Each block fetches a slice of a record for all blocks of its cluster that need it (multicast).
* new and decay of the next chunk are loaded into registers while products run, so no load stands in the chain.
* A block ends when all that is sent to it has come, so no barrier of the cluster, with its fence, stands at the end.

transfer: with at most SPLIT_PAIRS pairs, where a head has at least SPLIT_CHUNKS chunks, these are cut into segments,
and clusters of walk take the segments side by side. What a segment does to the state is an affine map: S behind it =
transfer S before it + end.
* The kernel finds both matrices of all segments but the last one at once, by the chain of walk without outputs. One
  warpgroup starts from S = 0 and finds end; another one starts from the identity, has no `new`, and finds transfer, 64
  columns of it a block. Both take the same stages.
* walk's chain makes the state that its segment starts with from transfer and end of the segments before, a product a
  segment, and then goes over its own chunks. Where a transfer is 0 in bf16, what came before it is left out.
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
EFFECT = 49216  # likewise the effect of a segment, its transfer and end, 98,432 bytes
FOLD_BLOCKS = 4  # of an SM: the compiler leaves registers for so many
# Blocks that take the same columns (turns), stages of the chain's ring and of the outputs', slots for S and c on their
# way to the outputs. With more turns a slot and a stage of the outputs have more time: one of each does, and the
# chain's ring may be longer.
MANY = (1, 3, 2, 2)
SOME = (2, 4, 1, 1)  # with at most SOME_PAIRS pairs
FEW = (4, 4, 1, 1)  # with at most FEW_PAIRS pairs
SOME_PAIRS = 24
FEW_PAIRS = 8
# With at most SPLIT_PAIRS pairs and at least SPLIT_CHUNKS chunks a head is cut into segments. Events around cold calls,
# H200, 2026-11-29: with 2 to 16 pairs, heads of 24 chunks were 2 to 10 % faster so, of 64 chunks 10 to 40 %; of 20
# chunks they were level, of 16 chunks 4 to 8 % slower. With 24 pairs, two segments each, heads of 24 chunks or more
# were 9 to 14 % slower, with 32 pairs 4 to 7 %.
SPLIT_PAIRS = 16
SPLIT_CHUNKS = 24
SPLIT_SEGMENTS = 8  # of a head at most; 4 took 60.4 us with 8 pairs of 64 chunks, 8 took 49.5
SPLIT_LEAST = 4  # chunks of a segment at least; 3 was level, 8 up to 18 % slower with 24 chunks
SPLIT_PLACES = 64  # segments of all heads at most: so many clusters of two blocks are on a card at once
SPLIT = (1, 3, 2, 2)  # the shape of walk with segments
TRANSFER_STAGES = 4  # of transfer's ring
# The kernel behind fold may be launched, and set up its blocks where SMs are free, when fold has ended (0), when all
# blocks of fold have stored (1), or when all have started (2). It reads nothing before fold has ended. Where it is 0,
# walk waits for the end of transfer, too. With DEPENDENT and EARLY 0 calls took 1.3 to 3.3 us more (H200, 2026-11-29).
DEPENDENT = 1
# Likewise walk behind transfer: when all of its blocks have stored (0), or started (1).
EARLY = 1
CHOSEN = "FOLD_BLOCKS MANY SOME FEW SPLIT TRANSFER_STAGES SOME_PAIRS FEW_PAIRS DEPENDENT EARLY".split()



def wgmma(n):
    """m64 n k16 of bf16, n / 2 sums a thread: d = A B, and d += SIGN A B. A is in registers, B in shared memory; there
    the values of a column lie together, or where BY_ROWS those of a row."""
    half = n // 2
    sums, outputs = ", ".join(f"%{i}" for i in range(half)), ", ".join(f'"+f"(d[{i}])' for i in range(half))
    registers = ", ".join(f"%{half + i}" for i in range(4))
    inputs = ", ".join(f'"r"(a[{i}])' for i in range(4))

    def function(name, kind, first):
        return f"""template <bool BY_ROWS = false, int SIGN = 1>
__device__ __forceinline__ void {name}(float (&d)[{half}], const u32 (&a)[4], uint64_t b) {{
    asm volatile("{{.reg .pred p; setp.ne.b32 p, 0, {0 if first else 1}; "
                 "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 "
                 "{{{sums}}}, {{{registers}}}, %{half + 4}, p, %{half + 6}, 1, %{half + 5};}}"
                 : {outputs.replace("+", kind)} : {inputs}, "l"(b), "n"(BY_ROWS), "n"(SIGN));
}}
"""

    return function("multiply_first", "=", True) + function("multiply", "+", False)


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
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_last() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

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
struct Block { u32 x, y, z; };
__device__ __forceinline__ Block block_again() {  // blockIdx, read anew
    Block r;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(r.x));
    asm volatile("mov.u32 %0, %%ctaid.y;" : "=r"(r.y));
    asm volatile("mov.u32 %0, %%ctaid.z;" : "=r"(r.z));
    return r;
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

// What this thread wrote to shared memory is there for wgmma and bulk copies; after a barrier, what all wrote.
__device__ __forceinline__ void async_sees() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// To global memory; returns when all of it has been read.
__device__ __forceinline__ void store_bulk(uint8_t* to, u32 from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;\n"
                 "cp.async.bulk.wait_group.read 0;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}

// Of walk

// A warpgroup asks for registers, or gives some away.
template <int COUNT> __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void leave_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

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
// 16 bytes of what the kernel before has written, past the L1.
__device__ __forceinline__ void load_four(float* d, const uint8_t* from) {
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]) : "l"(from) : "memory");
}
// 16 bytes to global memory, if they are inside.
__device__ __forceinline__ void store_words(void* to, const u32 (&r)[4], bool inside) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %5, 0; @p st.global.v4.b32 [%0], {%1, %2, %3, %4};}"
                 ::"l"(to), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"((int)inside) : "memory");
}
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int GROUPS> __device__ __forceinline__ void products_but() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}
__device__ __forceinline__ void hide(u32& x) { asm volatile("" : "+r"(x)); }  // how x was made
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

// Bytes of a record: two panels each of pushed, ended and asked, one of weighted; decay, fp32, in the order in which a
// lane of walk's chain loads four (decay_at); new as the transposed sums of wgmma lie: 512 bytes for 16 x 16 values,
// four such down 64 tokens, then the next 16 columns. The chain of walk takes CHAIN_BYTES from the start and a part of
// new, the outputs OUTPUT_BYTES from ASKED.
constexpr u32 PUSHED = 0, ENDED = 2 * PANEL, DECAY = 4 * PANEL, CHAIN_BYTES = DECAY + WIDTH * 4;
constexpr u32 ASKED = CHAIN_BYTES, WEIGHTED = ASKED + 2 * PANEL, NEW = WEIGHTED + PANEL, RECORD = NEW + 2 * PANEL;
constexpr u32 OUTPUT_BYTES = NEW - ASKED;
// Byte of a channel's decay. Of 16 channels, lane t of four takes 2t, 2t + 1, 2t + 8, 2t + 9, as its sums' columns are.
__device__ __forceinline__ int decay_at(int channel) {
    return channel / 16 * 64 + channel % 8 / 2 * 16 + channel / 8 % 2 * 8 + channel % 2 * 4;
}
"""

FOLD = r"""
namespace fold {

constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr int OWN = CHUNK / WARPS;  // tokens that a warp gates: a block
constexpr int BLOCK_BYTES = 16 * 128, TILE_BYTES = 2 * PANEL;  // 16 tokens of a panel; 64 x 128 bf16 in two panels
constexpr float PER_E = 1.4426950408889634f, SCALE = 0.08838834764831845f;  // log2(e), 1 / sqrt(128)

// Shared memory. Tiles: keys and queries of 2^(sums - m), keys of 2^(m - sums). Four blocks of 57,088 bytes fit an SM.
constexpr int KEYS = 0, QUERIES = TILE_BYTES, RIGHT = 2 * TILE_BYTES;
constexpr int TOTALS = 3 * TILE_BYTES;               // fp32 [eight tokens][channel]: sums of their gates
constexpr int BRIDGES = TOTALS + 8 * WIDTH * 4;      // bf16 [pair of blocks][channel]: 2^(m[later] - m[earlier])
constexpr int STARTS = BRIDGES + 6 * WIDTH * 2;      // fp32 [block][channel]: 2^m
constexpr int RATES = STARTS + 4 * WIDTH * 4;        // fp32 [token]: beta
constexpr int SHARED_BYTES = RATES + CHUNK * 4;
// Once the products of pairs are done, values come to the place of queries; weighted is staged in that of totals and
// bridges, 512 bytes for 16 x 16; and in the place of RIGHT are:
// LOWER, -beta keys keys^T below the blocks on the diagonal, [pair of blocks][lane] as B;
// DIAGONALS, what is inverted, fp32 [block][row][column], a row 96 bytes and a block 1600: then four rows, or the same
// row of two blocks, are in different banks;
// INVERSES, those of 16 x 16 without their ones, bf16 [block][column][row], a column 48 bytes.
constexpr int VALUES = QUERIES, WEIGHTS = TOTALS;
constexpr int LINE = 96, DIAGONAL = 1600, COLUMN = 48, INVERSE = 16 * COLUMN;
constexpr int LOWER = RIGHT, DIAGONALS = LOWER + 6 * 512, INVERSES = DIAGONALS + 4 * DIAGONAL;
static_assert(INVERSES + 4 * INVERSE <= RIGHT + TILE_BYTES && 10 * 512 <= STARTS - TOTALS, "they must fit");

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
        const Block block = block_again();  // so that none of this is kept, and spilled, over phases
        const int line = block.y, chunk = block.z;
        head = block.x;
        first = ((int64_t)line * p.tokens + chunk * CHUNK) * p.heads + head;
        number = (line * p.heads + head) * p.chunks + chunk;
        inside = min(CHUNK, p.tokens - chunk * CHUNK);
    }
    __device__ __forceinline__ uint8_t* record(const Problem& p) const { return p.records + (int64_t)number * RECORD; }
};

// A warp copies the rows that it gates. FULL: all 64 tokens of the chunk exist.
template <bool FULL>
__device__ __forceinline__ void copy_rows(uint8_t* tile, const uint16_t* from, const Place& place, int heads,
                                          int warp) {
    const int lane = lane_of_warp(), part = lane % 16, row = OWN * warp + lane / 16;
    const int64_t line = (int64_t)heads * WIDTH;
    const int at = tile_at(row, part);
    from += place.first * WIDTH + row * line + part * 8;
    #pragma unroll
    for (int i = 0; i < OWN / 2; ++i, from += 2 * line)
        copy16(tile + (at ^ i % 4 * 32) + i * 256, from, FULL || row + 2 * i < place.inside);
}

// All loads of the block but those of values at once; gates go to registers, four channels of each token of the warp a
// lane.
template <bool FULL>
__device__ __forceinline__ void start_loads(float4 (&gates)[OWN], uint8_t* memory, const Problem& p, const Place& place,
                                            int warp) {
    const int64_t line = (int64_t)p.heads * WIDTH;
    const float* from = p.g + (place.first * WIDTH + OWN * warp * line + 4 * lane_of_warp());
    #pragma unroll
    for (int t = 0; t < OWN; ++t, from += line) {
        if (!FULL) gates[t] = make_float4(0, 0, 0, 0);
        if (FULL || OWN * warp + t < place.inside) gates[t] = load_gates(from);
    }
    copy_rows<FULL>(memory + KEYS, p.k, place, p.heads, warp);
    copy_rows<FULL>(memory + QUERIES, p.q, place, p.heads, warp);
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
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        float sum[4] = {};
        #pragma unroll
        for (int t = 0; t < 8; ++t) add(sum, gates[8 * half + t]);
        #pragma unroll
        for (int j = 0; j < 4; ++j) sum[j] *= PER_E;
        sts(memory + TOTALS + (2 * warp + half) * 512 + lane_of_warp() * 16, four(sum));
    }
}

__device__ __forceinline__ float of_block(const float (&m)[4][4], int block, int j) {
    return block < 2 ? (block == 0 ? m[0][j] : m[1][j]) : (block == 2 ? m[2][j] : m[3][j]);
}

// The blocks of a pair, of which 0 is 1 and 0, 1 is 2 and 0, ...
__device__ __forceinline__ int later_of(int pair) { return pair < 1 ? 1 : pair < 3 ? 2 : 3; }
__device__ __forceinline__ int earlier_of(int pair) { return pair - later_of(pair) * (later_of(pair) - 1) / 2; }

// What a lane scales its four channels by: 2^m of the warp's block, and 2^(sum of the chunk - m). m lies in the
// middle of a block. Stores the starts, the bridges, of which a warp takes one or two, and the chunk's decay.
__device__ __forceinline__ void ends_of(float (&start)[4], float (&end)[4], uint8_t* memory, uint8_t* decay, int warp) {
    const int lane = lane_of_warp();
    float m[4][4], sum[4] = {}, all[4];
    #pragma unroll
    for (int i = 0; i < 8; ++i) {
        add(sum, lds<float4>(memory + TOTALS + i * 512 + lane * 16));
        #pragma unroll
        for (int j = 0; j < 4; ++j)
            if (i % 2 == 0) m[i / 2][j] = sum[j];
    }
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
        const float middle = of_block(m, warp, j);
        start[j] = power_of_2(middle), end[j] = power_of_2(sum[j] - middle), all[j] = power_of_2(sum[j]);
    }
    sts(memory + STARTS + warp * 512 + lane * 16, four(start));
    #pragma unroll 1
    for (int pair = warp; pair < 6; pair += WARPS) {
        float bridge[4];
        #pragma unroll
        for (int j = 0; j < 4; ++j)
            bridge[j] = power_of_2(of_block(m, later_of(pair), j) - of_block(m, earlier_of(pair), j));
        sts(memory + BRIDGES + pair * 256 + lane * 8, four_packed(bridge));
    }
    if (warp != 3) return;
    #pragma unroll
    for (int j = 0; j < 4; j += 2)
        *reinterpret_cast<float2*>(decay + decay_at(4 * lane + j)) = make_float2(all[j], all[j + 1]);
}

// Keys and queries of the warp's tokens are scaled in place; those from the start and to the end go to the record. A
// lane's 8 bytes have the same place in a tile here and there, and those of a warp are two whole lines of 128.
__device__ __forceinline__ void gate(uint8_t* memory, const Problem& p, const Place& place, const float4 (&gates)[OWN],
                                     int warp) {
    const int lane = lane_of_warp();
    float start[4], end[4], sum[4] = {};  // sum: that of the gates, less m
    ends_of(start, end, memory, place.record(p) + DECAY, warp);
    const float4 total = lds<float4>(memory + TOTALS + 2 * warp * 512 + lane * 16);
    sum[0] = -total.x, sum[1] = -total.y, sum[2] = -total.z, sum[3] = -total.w;
    const int first = tile_at(OWN * warp, lane / 2) + lane % 2 * 8;
    uint8_t* record = place.record(p);
    #pragma unroll
    for (int t = 0; t < OWN; ++t) {
        const int at = (first ^ t % 8 * 16) + t * 128;
        const uint2 k = lds<uint2>(memory + KEYS + at), q = lds<uint2>(memory + QUERIES + at);
        const float g[4] = {gates[t].x, gates[t].y, gates[t].z, gates[t].w};
        float key[4] = {low(k.x), high(k.x), low(k.y), high(k.y)}, right[4];
        float query[4] = {low(q.x), high(q.x), low(q.y), high(q.y)};
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
            sum[j] = fmaf(g[j], PER_E, t == 8 ? 0 : sum[j]);
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

// Products of keys and of queries of a block with keys of an earlier one, or the same.
struct Tile { float keys[2][4], queries[2][4]; };  // [eight columns]

__device__ __forceinline__ void multiply_both(Tile& tile, const u32 (&keys)[4], const u32 (&queries)[4],
                                              const u32 (&b)[4]) {
    multiply(tile.keys[0], keys, b[0], b[1]), multiply(tile.keys[1], keys, b[2], b[3]);
    multiply(tile.queries[0], queries, b[0], b[1]), multiply(tile.queries[1], queries, b[2], b[3]);
}

// The 16 tokens of a block of a tile as A, or as B; 16 channels.
__device__ __forceinline__ void load_rows(u32 (&a)[4], const uint8_t* tile, int block, int step) {
    const int lane = lane_of_warp();
    ldmatrix(a, shared_address(tile + block * BLOCK_BYTES + step / 4 * PANEL + lane % 16 * 128
                               + ((lane / 16 ^ lane % 8) << 4 ^ step % 4 * 32)));
}
__device__ __forceinline__ void load_columns(u32 (&b)[4], const uint8_t* tile, int block, int step) {
    const int lane = lane_of_warp();
    ldmatrix(b, shared_address(tile + block * BLOCK_BYTES + step / 4 * PANEL + (lane / 16 * 8 + lane % 8) * 128
                               + ((lane / 8 % 2 ^ lane % 8) << 4 ^ step % 4 * 32)));
}
__device__ __forceinline__ void cross(u32 (&b)[4], const uint8_t* bridge, int step) {
    const uint8_t* at = bridge + step * 32 + lane_of_warp() % 4 * 4;
    const u32 first = lds<u32>(at), second = lds<u32>(at + 16);
    b[0] = times(b[0], first), b[1] = times(b[1], second), b[2] = times(b[2], first), b[3] = times(b[3], second);
}

// Two blocks on the diagonal, and the one beside and below them: (block, block), (block + 1, block) and (block + 1,
// block + 1), in this order.
__device__ __forceinline__ void multiply_triangle(Tile (&tiles)[3], const uint8_t* memory, int block) {
    const uint8_t* bridge = memory + BRIDGES + bridge_at(block + 1, block);
    #pragma unroll
    for (int step = 0; step < WIDTH / 16; ++step) {
        u32 keys[2][4], queries[2][4], b[2][4];
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
            load_rows(keys[i], memory + KEYS, block + i, step);
            load_rows(queries[i], memory + QUERIES, block + i, step);
            load_columns(b[i], memory + RIGHT, block + i, step);
        }
        multiply_both(tiles[0], keys[0], queries[0], b[0]);
        multiply_both(tiles[2], keys[1], queries[1], b[1]);
        cross(b[0], bridge, step);
        multiply_both(tiles[1], keys[1], queries[1], b[0]);
    }
}
// (block, 0), (block, 1).
__device__ __forceinline__ void multiply_line(Tile (&tiles)[3], const uint8_t* memory, int block) {
    const uint8_t* bridge = memory + BRIDGES + bridge_at(block, 0);
    #pragma unroll
    for (int step = 0; step < WIDTH / 16; ++step) {
        u32 keys[4], queries[4], b[2][4];
        load_rows(keys, memory + KEYS, block, step), load_rows(queries, memory + QUERIES, block, step);
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
            load_columns(b[i], memory + RIGHT, i, step), cross(b[i], bridge + i * 256, step);
            multiply_both(tiles[i], keys, queries, b[i]);
        }
    }
}

// A lane's 16 bytes of 16 x 16 of weighted: those of a row are a sector.
__device__ __forceinline__ void store_weights(uint8_t* record, int later, int earlier, uint4 four) {
    const int lane = lane_again();
    *reinterpret_cast<uint4*>(record + WEIGHTED + panel_at(16 * later + lane / 2, 2 * earlier + lane % 2)) = four;
}
__device__ __forceinline__ int staged_at(int row, int part) { return row * 32 + ((part ^ row / 4 % 2) << 4); }

__device__ __forceinline__ void stage_weights(uint8_t* stage, const float (&sums)[2][4], bool on_diagonal) {
    const int lane = lane_again(), row = lane / 4, column = lane % 4 * 2;
    u32 r[4];
    #pragma unroll
    for (int i = 0; i < 4; ++i) {  // rows 8 (i % 2), columns 8 (i / 2) and after
        const float* pair = sums[i / 2] + i % 2 * 2;
        const int ahead = !on_diagonal ? 16 : row + 8 * (i % 2) - column - 8 * (i / 2);
        r[i] = packed(ahead >= 0 ? pair[0] : 0, ahead >= 1 ? pair[1] : 0);
    }
    stmatrix(shared_address(stage + staged_at(lane % 16, lane / 16)), r);
}

// What is above the diagonal is not used.
__device__ __forceinline__ void put_lower(uint8_t* memory, const float (&sums)[2][4], int later, int earlier,
                                          bool on_diagonal) {
    const int lane = lane_again();
    const uint8_t* rate = memory + RATES + (16 * later + lane / 4) * 4;
    const float rates[2] = {lds<float>(rate), lds<float>(rate + 32)};
    u32 r[4];
    #pragma unroll
    for (int i = 0; i < 4; ++i) {  // rows 8 (i / 2), columns 8 (i % 2) and after
        const float one = sums[i % 2][i / 2 * 2] * rates[i / 2], two = sums[i % 2][i / 2 * 2 + 1] * rates[i / 2];
        uint8_t* at = memory + DIAGONALS + later * DIAGONAL + (lane / 4 + i / 2 * 8) * LINE + lane % 4 * 8 + i % 2 * 32;
        if (on_diagonal && i != 1) sts(at, make_float2(one, two));
        r[i] = packed(-one, -two);
    }
    const uint4 below = make_uint4(r[0], r[1], r[2], r[3]);
    if (!on_diagonal) sts(memory + LOWER + bridge_at(later, earlier) * 2 + lane * 16, below);
}

// A lane solves for a column of the inverses of 16 x 16 of two blocks.
__device__ __forceinline__ void invert(uint8_t* memory, int block) {
    const int lane = lane_again(), column = lane % 16, half = lane / 16;
    const uint8_t* diagonal = memory + DIAGONALS + (block + half) * DIAGONAL;
    float x[16];
    #pragma unroll
    for (int row = 0; row < 16; ++row) {
        x[row] = row == column;
        #pragma unroll
        for (int k = 0; k < row; k += 4) {
            const float4 a = lds<float4>(diagonal + row * LINE + k * 4);
            x[row] -= a.x * x[k];
            if (k + 1 < row) x[row] -= a.y * x[k + 1];
            if (k + 2 < row) x[row] -= a.z * x[k + 2];
            if (k + 3 < row) x[row] -= a.w * x[k + 3];
        }
    }
    u32 r[8];
    #pragma unroll
    for (int row = 0; row < 16; row += 2)
        r[row / 2] = packed(row == column ? 0 : x[row], row + 1 == column ? 0 : x[row + 1]);
    uint8_t* to = memory + INVERSES + (block + half) * INVERSE + column * COLUMN;
    sts(to, make_uint4(r[0], r[1], r[2], r[3])), sts(to + 16, make_uint4(r[4], r[5], r[6], r[7]));
}

// COUNT tiles of the warp, of which the first one and the last one are on the diagonal where they are three.
template <int COUNT>
__device__ __forceinline__ void put_tiles(uint8_t* record, uint8_t* memory, const Tile (&tiles)[3], int warp,
                                          int block) {
    uint8_t* stage = memory + WEIGHTS + (warp < 2 ? 3 * warp : 2 + 2 * warp) * 512;
    #pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const bool on_diagonal = COUNT == 3 && i != 1;
        const int later = COUNT == 3 ? block + (i > 0) : block, earlier = COUNT == 3 ? block + i / 2 : i;
        put_lower(memory, tiles[i].keys, later, earlier, on_diagonal);
        stage_weights(stage + i * 512, tiles[i].queries, on_diagonal);
    }
    __syncwarp();
    if (COUNT == 3) invert(memory, block);
    #pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const int later = COUNT == 3 ? block + (i > 0) : block, earlier = COUNT == 3 ? block + i / 2 : i;
        const int lane = lane_again();
        store_weights(record, later, earlier, lds<uint4>(stage + i * 512 + staged_at(lane / 2, lane % 2)));
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

// (I + lower)^-1 times 64 columns of a tile, 32 at a time. Transposed: the columns are rows of the products, and a
// solved block is, in registers, the A of the next ones. Keys are solved in their place; new goes to the record as it
// lies in registers, 512 bytes at a time.
template <bool OF_KEYS>
__device__ __forceinline__ void solve(uint8_t* tile, const uint8_t* memory, uint8_t* out, int panel) {
    u32 lower[6][4], inverse[4][4];
    const int lane = lane_again(), token = lane / 16 * 8 + lane % 8, odd = lane / 8 % 2;
    #pragma unroll
    for (int i = 0; i < 6; ++i) {
        const uint4 r = lds<uint4>(memory + LOWER + i * 512 + lane * 16);
        lower[i][0] = r.x, lower[i][1] = r.y, lower[i][2] = r.z, lower[i][3] = r.w;
    }
    #pragma unroll
    for (int block = 0; block < 4; ++block)
        ldmatrix_trans(inverse[block], shared_address(memory + INVERSES + block * INVERSE
                                                      + (odd * 8 + lane % 8) * COLUMN + lane / 16 * 16));
    #pragma unroll 1
    for (int part = 0; part < 8; part += 4) {
        u32 x[4][2][4], a[4];  // x: solved, [block][16 columns]
        #pragma unroll
        for (int block = 0; block < 4; ++block) {
            float sums[2][2][4];  // [16 columns][eight tokens]
            const uint8_t* rates = memory + RATES + block * 64 + lane % 4 * 8;
            const uint8_t* starts = memory + STARTS + block * 512 + (panel * 64 + part * 8 + lane / 4) * 4;
            uint8_t* at[2];
            #pragma unroll
            for (int m = 0; m < 2; ++m) {
                at[m] = tile + panel * PANEL + panel_at(16 * block + token, part + 2 * m + odd);
                load_sums(sums[m], at[m], rates, starts + m * 64, OF_KEYS);
            }
            #pragma unroll
            for (int earlier = 0; earlier < block; ++earlier) {
                const u32 (&b)[4] = lower[block * (block - 1) / 2 + earlier];
                #pragma unroll
                for (int m = 0; m < 2; ++m) {
                    multiply(sums[m][0], x[earlier][m], b[0], b[1]);
                    multiply(sums[m][1], x[earlier][m], b[2], b[3]);
                }
            }
            const u32 (&b)[4] = inverse[block];
            #pragma unroll
            for (int m = 0; m < 2; ++m) {
                as_operand(a, sums[m]);  // without the inverse's ones: what they multiply is in the sums, in fp32
                multiply(sums[m][0], a, b[0], b[1]), multiply(sums[m][1], a, b[2], b[3]);
                as_operand(x[block][m], sums[m]);
                const u32 (&r)[4] = x[block][m];
                if (OF_KEYS) stmatrix_trans(shared_address(at[m]), r);
                else *reinterpret_cast<uint4*>(out + (panel * 4 + part / 2 + m) * 2048 + block * 512 + lane * 16) =
                         make_uint4(r[0], r[1], r[2], r[3]);
            }
        }
    }
}

__global__ void __launch_bounds__(THREADS, FOLD_BLOCKS) fold_kernel(const Problem p) {
    extern __shared__ __align__(128) uint8_t memory[];
    if (DEPENDENT == 2) let_next_start();
    {
        const int warp = warp_of_block();
        const Place place(p);
        float4 gates[OWN];
        if (place.inside == CHUNK) start_loads<true>(gates, memory, p, place, warp);
        else start_loads<false>(gates, memory, p, place, warp);
        if (threadIdx.x < CHUNK) put_rate(memory, p, place, threadIdx.x);
        #pragma unroll 1
        for (int pair = warp; pair < 6; pair += WARPS)  // above the diagonal
            store_weights(place.record(p), earlier_of(pair), later_of(pair), make_uint4(0, 0, 0, 0));
        put_totals(memory, gates, warp);
        wait_copies<0>();
        __syncthreads();
        gate(memory, p, Place(p), gates, warp);
    }
    __syncthreads();

    const int warp = warp_of_block();
    const bool has_triangle = warp < 2;
    const int block = has_triangle ? 2 * warp : warp;
    Tile tiles[3] = {};
    if (has_triangle) multiply_triangle(tiles, memory, block);
    else multiply_line(tiles, memory, block);
    __syncthreads();  // QUERIES and RIGHT are free
    const Place place(p);
    copy_rows<false>(memory + VALUES, p.v, place, p.heads, warp);
    commit_copies();
    if (has_triangle) put_tiles<3>(place.record(p), memory, tiles, warp, block);
    else put_tiles<2>(place.record(p), memory, tiles, warp, block);
    wait_copies<0>();
    __syncthreads();

    if (has_triangle) {
        solve<true>(memory + KEYS, memory, nullptr, warp);
        async_sees();
        __syncwarp();
        if (threadIdx.x % 32 == 0)
            store_bulk(place.record(p) + PUSHED + warp * PANEL, shared_address(memory + KEYS + warp * PANEL), PANEL);
    } else {
        solve<false>(memory + VALUES, memory, place.record(p) + NEW, warp - 2);
    }
    if (DEPENDENT == 1) let_next_start();
}

}  // namespace fold
"""

WALK = r"""
namespace walk {

// A warpgroup for the chain, one for the outputs, and one of which some threads fetch and tell. The compiler has 168
// registers a thread for three; the third leaves most of its own to the others.
constexpr int GROUP = 128, THREADS = 3 * GROUP, OF_CHAIN = 240, OF_OUTPUTS = 200, OF_THIRD = 56;
constexpr int OF_TRANSFER = 232, OF_TRANSFER_THIRD = 40;  // of transfer: two chains
constexpr int PART = 64;  // columns of V of a block: the rows of its products

// Bytes. A stage of the chain: what it takes of a record, as it lies there; the block's part of new. A stage of the
// outputs: asked and weighted. A slot: S^T, then c^T. Barriers stand behind decay in the first stage.
constexpr u32 BARS = 40;  // bytes for the barriers of a stage or slot
template <int TURNS_, int STAGES_, int OUTPUT_STAGES_, int SLOTS_> struct Shape {
    static constexpr int TURNS = TURNS_, CLUSTER = WIDTH / PART * TURNS;
    static constexpr int STAGES = STAGES_, OUTPUT_STAGES = OUTPUT_STAGES_, SLOTS = SLOTS_;
    static constexpr u32 NEW_AT = CHAIN_BYTES + 512, NEW_BYTES = PANEL, STAGE = NEW_AT + NEW_BYTES, SLOT = 3 * PANEL;
    static constexpr u32 OUTPUTS_AT = STAGES * STAGE, SLOTS_AT = OUTPUTS_AT + OUTPUT_STAGES * OUTPUT_BYTES;
    static constexpr u32 STAGING = SLOTS_AT + SLOTS * SLOT, SHARED_BYTES = STAGING + PANEL, BARRIERS = CHAIN_BYTES;
    static constexpr bool IS_SPLIT = false, IS_TRANSFER = false;
    static constexpr int CHAINS = 1;  // warpgroups that go over chunks
    static_assert(CLUSTER <= 8 && NEW_AT % 1024 == 0 && 2 * PANEL % (16 * CLUSTER) == 0, "slices of a record");
    static_assert((STAGES + OUTPUT_STAGES + SLOTS) * BARS <= 512 && SHARED_BYTES <= 232448, "a block must fit");
    static_assert(STAGES > 2, "the chain holds a stage while it waits for a next one");
};

// The shapes of walk with segments, and of transfer, whose blocks have two chains and no outputs; transfer goes out
// through the two panels at STAGING.
struct Split : Shape<SPLIT> { static constexpr bool IS_SPLIT = true; };
struct Transfer : Shape<1, TRANSFER_STAGES, 0, 0> {
    static constexpr bool IS_SPLIT = true, IS_TRANSFER = true;
    static constexpr int CHAINS = 2;
    static constexpr u32 SHARED_BYTES = STAGING + 2 * PANEL;
    static_assert(SHARED_BYTES <= 232448, "a block must fit");
};

// The effect of a segment: the transposed transfer, bf16 in panels, its upper 64 rows first; for each 64 columns of V
// the transposed end, fp32 as the sums of wgmma lie, 16 bytes a thread. Then flags, a word for each of eight warps
// whether its part of transfer is not 0 all over, and for each of eight whether its part of end is not finite.
constexpr u32 END_AT = 4 * PANEL, END_BYTES = PART * WIDTH * 4, FLAGS_AT = END_AT + 2 * END_BYTES;
constexpr u32 EFFECT = FLAGS_AT + 128;

// A segment has `length` chunks, the last one perhaps fewer; a head that is not cut is one segment.
struct Problem {
    const uint8_t* records;
    __nv_bfloat16* out;
    int tokens, heads, chunks, length, segments;
    uint8_t* effects;
    __device__ __forceinline__ uint8_t* effect(int segment) const {
        return effects + ((int64_t)blockIdx.y * (segments - 1) + segment) * EFFECT;
    }
};
// The first chunk of the block's segment; how many it has.
template <class S> __device__ __forceinline__ int first_of(const Problem& p) {
    return S::IS_SPLIT ? (int)blockIdx.z * p.length : 0;
}
template <class S> __device__ __forceinline__ int count_of(const Problem& p) {
    return S::IS_SPLIT ? min(p.length, p.chunks - first_of<S>(p)) : p.chunks;
}
// The segment whose end is the first that this one starts from: the last one before it whose transfer is 0, as it is
// where gates let nothing pass, or else segment 0; segment 0 too where an end is not finite, since 0 times it is not 0.
template <class S> __device__ __forceinline__ int source_of(const Problem& p) {
    if (!S::IS_SPLIT || S::IS_TRANSFER) return 0;
    const int lane = threadIdx.x % 32;
    u32 flags[2] = {1, 0};
    if (lane < (int)blockIdx.z) {
        flags[0] = 0;
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            float four[4];
            load_four(four, p.effect(lane) + FLAGS_AT + i * 16);
            #pragma unroll
            for (int j = 0; j < 4; ++j) flags[i / 2] |= __float_as_uint(four[j]);
        }
    }
    const u32 zeros = __ballot_sync(~0u, flags[0] == 0), bad = __ballot_sync(~0u, flags[1] != 0);
    return zeros && !bad ? 31 - __clz(zeros) : 0;
}
// How many transfers, which come through the ring, that end is multiplied by on the way.
template <class S> __device__ __forceinline__ int transfers_of(int source) {
    return S::IS_SPLIT && !S::IS_TRANSFER && blockIdx.z ? (int)blockIdx.z - 1 - source : 0;
}

template <int N> struct Number { __device__ constexpr operator int() const { return N; } };

struct Places {
    u32 base, rank;  // everything has the same place in all blocks of a cluster
    __device__ __forceinline__ int half() const { return rank % 2; }  // of the columns of V
    __device__ __forceinline__ int turn() const { return rank / 2; }
};

// Barriers of a stage: it has come, or a part of it; all blocks have used it; this block's warps have. Of a slot: S and
// c are there; the outputs have used them.
constexpr u32 FULL = 0, EMPTY = 8, USED = 16, READY = 0, PASSED = 8;
constexpr u32 HAS_NEW = FULL, HAS_PUSHED = 24, HAS_ENDED = 32;  // new comes with decay
// Which of COUNT stages or slots is next, and the parity of its barriers. Kept from one to the next: what is computed
// from their number, or for descriptors from the place, would delay products. low: the place in those.
template <int COUNT, u32 SIZE> struct Turn {
    u32 place, bar, low, left = COUNT, parity = 0;
    __device__ __forceinline__ Turn(u32 place, u32 bar) : place(place), bar(bar), low((place & 0x3FFFF) >> 4) {}
    __device__ __forceinline__ void next() {
        place += SIZE, low += SIZE >> 4, bar += BARS;
        if (--left == 0)
            place -= COUNT * SIZE, low -= COUNT * SIZE >> 4, bar -= COUNT * BARS, left = COUNT, parity ^= 1;
    }
    __device__ __forceinline__ void wait(u32 which, u32 turned = 0) const { bar_wait(bar + which, parity ^ turned); }
};
template <class S> struct Stages : Turn<S::STAGES, S::STAGE> {
    __device__ __forceinline__ Stages(u32 base) : Turn<S::STAGES, S::STAGE>(base, base + S::BARRIERS) {}
};
template <class S> struct OutputStages : Turn<S::OUTPUT_STAGES, OUTPUT_BYTES> {
    __device__ __forceinline__ OutputStages(u32 base)
        : Turn<S::OUTPUT_STAGES, OUTPUT_BYTES>(base + S::OUTPUTS_AT, base + S::BARRIERS + S::STAGES * BARS) {}
};
template <class S> struct Slots : Turn<S::SLOTS, S::SLOT> {
    __device__ __forceinline__ Slots(u32 base)
        : Turn<S::SLOTS, S::SLOT>(base + S::SLOTS_AT, base + S::BARRIERS + (S::STAGES + S::OUTPUT_STAGES) * BARS) {}
};
__device__ __forceinline__ void arrive_of_warp(u32 bar) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) bar_arrive(bar);
}
// Lanes 0 and 1 tell the two blocks of a turn, which share what the outputs take; bar: a barrier's place in this block.
struct Both {
    u32 base, there;
    __device__ __forceinline__ Both(const Places& at)
        : base(at.base), there(in_block(at.base, 2 * at.turn() + threadIdx.x % 2)) {}
    __device__ __forceinline__ void arrive_of_warp(u32 bar) const {
        __syncwarp();
        if (threadIdx.x % 32 < 2) bar_arrive_there(there + (bar - base));
    }
};

// Descriptors of wgmma. Only their lower words change from product to product, by additions without a carry: what is
// computed between two products delays the second.
__device__ __forceinline__ uint64_t descriptor(u32 low) {
    return (uint64_t)(1024 >> 4 | 1 << 30) << 32 | low;  // groups of eight lines are 1024 bytes apart; 128-byte swizzle
}
// 64 columns of B, of which each is a line of the panels, `from` bytes behind a place: their k lie together.
__device__ __forceinline__ uint64_t of_columns(u32 low, u32 from, int step) {
    return descriptor(low + (1 << 16) + (from + step / 4 * PANEL + step % 4 * 32 >> 4));
}
// Of B each k is a line of the panel: 64 columns lie together.
__device__ __forceinline__ uint64_t of_rows(u32 low, u32 from, int step) {
    return descriptor(low + (PANEL >> 4 << 16) + (from + step * 16 * 128 >> 4));
}

// Sums as the A of a next product: their columns are its k.
template <int STEPS> __device__ __forceinline__ void as_operand(u32 (&a)[STEPS][4], const float (&d)[8 * STEPS]) {
    #pragma unroll
    for (int i = 0; i < 8 * STEPS; i += 2) a[i / 8][i % 8 / 2] = packed(d[i], d[i + 1]);
}
// Likewise, half of it.
template <int HALF> __device__ __forceinline__ void half_operand(u32 (&a)[4][4], const float (&d)[32]) {
    #pragma unroll
    for (int i = 16 * HALF; i < 16 * HALF + 16; i += 2) a[i / 8][i % 8 / 2] = packed(d[i], d[i + 1]);
}
// The thread's row of its warp's 16, for ldmatrix and stmatrix of A or sums: parts of 16 bytes, columns 16 step and up.
__device__ __forceinline__ u32 line_at(int step) {
    const int lane = threadIdx.x % 32, row = threadIdx.x % GROUP / 32 * 16 + lane % 16;
    return step / 4 * PANEL + panel_at(row, step % 4 * 2 + lane / 16);
}
template <int STEPS> __device__ __forceinline__ void store_lines(u32 to, const u32 (&a)[STEPS][4]) {
    #pragma unroll
    for (int step = 0; step < STEPS; ++step) stmatrix(to + line_at(step), a[step]);
}
template <int STEPS> __device__ __forceinline__ void load_lines(u32 (&a)[STEPS][4], u32 from) {
    #pragma unroll
    for (int step = 0; step < STEPS; ++step) ldmatrix(a[step], from + line_at(step));
}

// One thread asks for this block's slices of what the chain takes, for all blocks that take it; first for what is
// needed first. The last turns only wait until all blocks have used what this one sent. All blocks send something to
// all in each turn: so none tells another that it has used a stage while one has still to tell this of the turn before.
// Transfers come first, in the place of pushed and ended.
template <class S> __device__ __forceinline__ void produce(const Problem& p, const Places& at, int source) {
    constexpr u32 ALL = (1 << S::CLUSTER) - 1, BYTES = 2 * PANEL, SLICE = BYTES / S::CLUSTER;
    constexpr u32 NEWS = S::NEW_BYTES / S::TURNS, DECAYS = WIDTH * 4;
    const uint8_t* record = p.records + ((int64_t)blockIdx.y * p.chunks + first_of<S>(p)) * RECORD;
    const u32 slice = at.rank * SLICE, of_new = at.turn() * NEWS;
    auto count = [&] { return count_of<S>(p); };
    Stages<S> stage(at.base);
    for (int n = 0; n < transfers_of<S>(source); ++n, stage.next()) {
        const uint8_t* transfer = p.effect(source + 1 + n);
        stage.wait(EMPTY, 1);
        bar_arrive(stage.bar + HAS_NEW);
        bar_expect(stage.bar + HAS_PUSHED, BYTES);
        copy_to_all(stage.place + slice, transfer + slice, SLICE, stage.bar + HAS_PUSHED, ALL);
        bar_expect(stage.bar + HAS_ENDED, BYTES);
        copy_to_all(stage.place + BYTES + slice, transfer + BYTES + slice, SLICE, stage.bar + HAS_ENDED, ALL);
    }
    for (int n = 0; n < count() + S::STAGES; ++n, record += RECORD, stage.next()) {
        const u32 bar = stage.bar;
        stage.wait(EMPTY, 1);
        if (n >= count()) continue;
        bar_expect(bar + HAS_NEW, S::NEW_BYTES + DECAYS);
        const uint8_t* from = record + NEW + at.half() * S::NEW_BYTES + of_new;
        if (S::TURNS == 1) copy(stage.place + S::NEW_AT, from, NEWS, bar + HAS_NEW);
        else copy_to_all(stage.place + S::NEW_AT + of_new, from, NEWS, bar + HAS_NEW, ALL / 3 << at.half());
        copy(stage.place + DECAY, record + DECAY, DECAYS, bar + HAS_NEW);
        bar_expect(bar + HAS_PUSHED, BYTES);
        copy_to_all(stage.place + PUSHED + slice, record + PUSHED + slice, SLICE, bar + HAS_PUSHED, ALL);
        bar_expect(bar + HAS_ENDED, BYTES);
        copy_to_all(stage.place + ENDED + slice, record + ENDED + slice, SLICE, bar + HAS_ENDED, ALL);
    }
}
// Another does so for the outputs of this block's chunks, and those of the block with the other columns.
template <class S> __device__ __forceinline__ void produce_for_outputs(const Problem& p, const Places& at) {
    constexpr u32 SLICE = OUTPUT_BYTES / 2;
    const u32 slice = at.half() * SLICE;
    const int64_t first = (int64_t)blockIdx.y * p.chunks + first_of<S>(p) + at.turn();
    auto count = [&] { return count_of<S>(p); };
    const uint8_t* record = p.records + first * RECORD + ASKED + slice;
    OutputStages<S> stage(at.base);
    for (int n = at.turn(); n < count() + S::TURNS * S::OUTPUT_STAGES; n += S::TURNS) {
        stage.wait(EMPTY, 1);
        if (n < count()) {
            bar_expect(stage.bar + FULL, OUTPUT_BYTES);
            copy_to_all(stage.place + slice, record, SLICE, stage.bar + FULL, 3 << 2 * at.turn());
        }
        record += S::TURNS * RECORD, stage.next();
    }
}
// One thread tells the blocks that sent a stage when this block has used it. The chain has no time for this, since its
// next fence may wait for what it tells others.
template <class S> __device__ __forceinline__ void release(const Problem& p, const Places& at, int source) {
    Stages<S> stage(at.base);
    for (int n = 0; n < transfers_of<S>(source) + count_of<S>(p); ++n, stage.next()) {
        stage.wait(USED);
        #pragma unroll
        for (u32 block = 0; block < S::CLUSTER; ++block) bar_arrive_there(in_block(stage.bar + EMPTY, block));
    }
}

// `new`, 16 bytes a lane for 16 tokens.
__device__ __forceinline__ void load_new(u32 (&words)[4][4], u32 from) {
    #pragma unroll
    for (int i = 0; i < 4; ++i) load_words(words[i], from + i * 512);
}
__device__ __forceinline__ void unpack(float (&d)[32], const u32 (&words)[4][4]) {
    #pragma unroll
    for (int i = 0; i < 32; i += 2) {
        const u32 pair = words[i / 8][i % 8 / 2];
        d[i] = __uint_as_float(pair << 16), d[i + 1] = __uint_as_float(pair & 0xffff0000u);
    }
}
// `decay`, fp32, one a channel, which is a column of the sums: a lane's 32, 16 bytes at a time.
__device__ __forceinline__ void load_decay(u32 (&decay)[8][4], u32 from) {
    #pragma unroll
    for (int i = 0; i < 8; ++i) load_words(decay[i], from + i * 64);
}
template <int HALF> __device__ __forceinline__ void scale(float (&state)[32], const u32 (&decay)[8][4]) {
    #pragma unroll
    for (int i = 0; i < 32; ++i) state[i] *= __uint_as_float(decay[4 * HALF + i / 8][i % 8 / 4 * 2 + i % 2]);
}

// S that a segment starts with: end of its source, then a step for each segment between them: S^T = S^T transfer^T +
// end^T. What is asked of the L2 for the next step comes under the products of this one.
template <class S> __device__ __forceinline__ void start_of(float (&state)[2][32], Stages<S>& stage, const Problem& p,
                                                            const Places& at) {
    if (blockIdx.z == 0) return;
    if (DEPENDENT) wait_for_last();
    float next[2][32];
    const int source = source_of<S>(p), steps = transfers_of<S>(source);
    const uint8_t* end = p.effect(source) + END_AT + at.half() * END_BYTES + threadIdx.x * 16;
    auto load = [&](float (&to)[2][32]) {
        #pragma unroll
        for (int i = 0; i < 16; ++i) load_four(&to[i / 8][i % 8 * 4], end + i * GROUP * 16);
        end += EFFECT;
    };
    auto step = [&](float (&from)[2][32], float (&to)[2][32], bool is_last) {
        u32 before[2][4][4];
        as_operand(before[0], from[0]), as_operand(before[1], from[1]);
        if (!is_last) load(from);
        stage.wait(HAS_NEW), stage.wait(HAS_PUSHED), stage.wait(HAS_ENDED);
        products_begin(), hold(to[0]), hold(to[1]);
        #pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u32 panels = PUSHED + i / 4 * 2 * PANEL;
            multiply<true>(to[0], before[i / 4][i % 4], of_rows(stage.low, panels, i % 4));
            multiply<true>(to[1], before[i / 4][i % 4], of_rows(stage.low, panels + PANEL, i % 4));
        }
        products_end(), products_but<0>(), hold(to[0]), hold(to[1]);
        arrive_of_warp(stage.bar + USED), stage.next();
    };
    load(state);
    if (steps > 0) load(next);
    int n = 0;
    for (; n + 1 < steps; n += 2) step(state, next, false), step(next, state, n + 2 == steps);
    if (n == steps) return;
    step(state, next, true);
    #pragma unroll
    for (int i = 0; i < 64; ++i) state[i / 32][i % 32] = next[i / 32][i % 32];
}

// The thread's columns of 64 of the identity, as a chain's state.
__device__ __forceinline__ void put_identity(float (&state)[2][32], int half) {
    const int row = threadIdx.x % GROUP / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    #pragma unroll
    for (int i = 0; i < 64; ++i)
        state[i / 32][i % 32] = i / 32 == half && i % 32 / 4 * 8 + column + i % 2 == row + i / 2 % 2 * 8;
}
// A warp's flag.
__device__ __forceinline__ void store_flag(uint8_t* effect, int which, bool flag) {
    const bool any = __any_sync(~0u, flag);
    if (threadIdx.x % 32 == 0) *reinterpret_cast<u32*>(effect + FLAGS_AT + which * 4) = any;
}
// By the chain that finds end: its sums as they lie.
__device__ __forceinline__ void store_end(uint8_t* effect, int half, const float (&state)[2][32]) {
    uint8_t* to = effect + END_AT + half * END_BYTES;
    bool is_bad = false;
    #pragma unroll
    for (int i = 0; i < 16; ++i) {
        const float* d = &state[i / 8][i % 8 * 4];
        u32 four[4];
        #pragma unroll
        for (int j = 0; j < 4; ++j) four[j] = __float_as_uint(d[j]), is_bad |= (four[j] & 0x7f800000) == 0x7f800000;
        store_words(to + (i * GROUP + threadIdx.x % GROUP) * 16, four, true);
    }
    store_flag(effect, 8 + 4 * half + threadIdx.x % GROUP / 32, is_bad);
}
// By the chain that finds transfer: a warp has 16 rows of two panels.
__device__ __forceinline__ void store_transfer(uint8_t* effect, int half, u32 staging, const float (&state)[2][32]) {
    constexpr u32 ROWS = 16 * 128;
    uint8_t* to = effect + half * 2 * PANEL;
    u32 a[4][4], bits = 0;
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
        as_operand(a, state[i]), store_lines(staging + i * PANEL, a);
        #pragma unroll
        for (int j = 0; j < 16; ++j) bits |= a[j / 4][j % 4] & 0x7fff7fff;
    }
    store_flag(effect, 4 * half + threadIdx.x % GROUP / 32, bits != 0);
    async_sees();
    __syncwarp();
    const u32 first = threadIdx.x % GROUP / 32 * ROWS;
    if (threadIdx.x % 32 == 0) {
        store_bulk(to + first, staging + first, ROWS);
        store_bulk(to + PANEL + first, staging + PANEL + first, ROWS);
    }
}

// Begins with no product under way, and ends so: else, where the loop is left, ptxas serializes all. Where all of an
// operand would delay a product, half of it is made, then the other under products with the first. What needs no result
// of a product, loads of new and decay among it, stands where the tensor cores have work for it to run under; waits for
// barriers keep ptxas from moving it out. Without segments S is 0 before the first chunk, whose c is `new`. What the
// last chunk adds to S is needed by transfer alone. All of a stage must have come before it is released.
template <class S> __device__ __forceinline__ void chain(const Problem& p, const Places& at) {
    auto count = [&] { return count_of<S>(p); };
    const bool has_new = !S::IS_TRANSFER || threadIdx.x < GROUP;
    float state[2][32] = {}, change[32];           // S^T; new^T, then c^T
    u32 before[2][4][4] = {}, operand[4][4];       // S^T and c^T as A
    u32 words[4][4], decay[8][4];                  // new and decay of the next chunk
    Stages<S> stage(at.base), ahead(at.base);      // of this chunk, and of the next one
    Slots<S> slot(at.base);
    // What this thread adds to places. Hidden: the compiler would make them again and again, in registers that it must
    // then wait for.
    const u32 thread = S::IS_TRANSFER ? threadIdx.x % GROUP : threadIdx.x;
    u32 lines[4], of_new = thread / 32 * 2048 + threadIdx.x % 32 * 16, of_decay = threadIdx.x % 4 * 16;
    #pragma unroll
    for (int i = 0; i < 4; ++i) lines[i] = at.base + line_at(i), hide(lines[i]);
    hide(of_new), hide(of_decay);
    u32 last = 0;           // the barriers of the stage before
    int until = at.turn();  // the next chunk whose outputs this block makes
    auto take_decay = [&](const Stages<S>& from) { load_decay(decay, from.place + DECAY + of_decay); };
    auto take_new = [&](const Stages<S>& from) {
        if (has_new) load_new(words, from.place + S::NEW_AT + of_new);
    };
    auto store_half = [&](u32 to, const u32 (&a)[4][4]) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) stmatrix(to - at.base + lines[i], a[i]);
    };
    auto keep_state = [&] {
        if (S::IS_TRANSFER || (S::TURNS > 1 && until)) return;
        slot.wait(PASSED, 1);
        store_half(slot.place, before[0]), store_half(slot.place + PANEL, before[1]);
    };
    auto keep_change = [&] {
        if (!S::IS_TRANSFER && (S::TURNS == 1 || until == 0)) store_half(slot.place + 2 * PANEL, operand);
    };
    auto tell = [&] {
        if (S::IS_TRANSFER) return;
        if (S::TURNS == 1 || until == 0) {
            async_sees(), arrive_of_warp(slot.bar + READY);
            slot.next();
            until = S::TURNS;
        }
        --until;
    };
    auto first_change = [&] {
        stage.wait(HAS_NEW), take_new(stage), unpack(change, words), ahead.next();
        keep_state();
        if (count() > 1) ahead.wait(HAS_NEW), take_new(ahead);
        stage.wait(HAS_PUSHED), stage.wait(HAS_ENDED), hold(change);
    };
    auto change_of = [&](auto is_first, bool is_last) {
        auto half_of_change = [&](auto half) {
            products_but<1>();  // this half of S is there; the other half, or the first products of c, are under way
            hold(state[half]);
            as_operand(before[half], state[half]);
            products_begin();
            if (half == 0) hold(change);
            #pragma unroll
            for (int step = 0; step < 4; ++step)
                multiply<false, -1>(change, before[half][step], of_columns(stage.low, PUSHED, 4 * half + step));
            products_end();
        };
        stage.wait(HAS_PUSHED);
        unpack(change, words), hold(change);
        stage.wait(HAS_ENDED);
        half_of_change(Number<0>());
        if (!is_first) tell();
        scale<0>(state[0], decay), hold(state[0]);
        half_of_change(Number<1>());
        if (!is_first) arrive_of_warp(last + USED);
        keep_state();
        if (!is_last) {
            ahead.wait(HAS_NEW);
            scale<1>(state[1], decay), hold(state[1]);
            take_new(ahead);
        } else if (S::IS_TRANSFER) {
            scale<1>(state[1], decay), hold(state[1]);
        }
        products_but<0>(), hold(change);
    };
    auto add_change = [&](auto is_last) {
        auto add = [&](int half, int step) {
            multiply<true>(state[half], operand[step], of_rows(stage.low, ENDED + half * PANEL, step));
        };
        half_operand<0>(operand, change);
        products_begin(), hold(state[0]), add(0, 0), add(0, 1);
        half_operand<1>(operand, change);
        products_begin(), add(0, 2), add(0, 3), products_end();
        if (!is_last) take_decay(ahead);
        products_begin(), hold(state[1]), add(1, 0), add(1, 1), add(1, 2), add(1, 3), products_end();
        keep_change();
        last = stage.bar;
        if (!is_last) stage = ahead, ahead.next();
    };
    auto first_change_of_segment = [&] {
        if (S::IS_TRANSFER) {
            #pragma unroll
            for (int i = 0; i < 16; ++i) words[i / 4][i % 4] = 0;
            if (!has_new) put_identity(state, at.half());
        } else {
            start_of<S>(state, stage, p, at);
        }
        ahead = stage;
        stage.wait(HAS_NEW), take_new(stage), take_decay(stage), ahead.next();
        hold(state[0]), hold(state[1]);
        change_of(Number<1>(), count() == 1);
    };
    if constexpr (S::IS_SPLIT) first_change_of_segment();
    else first_change();
    for (int n = 1; n < count(); ++n) add_change(Number<0>()), change_of(Number<0>(), n + 1 == count());
    if constexpr (S::IS_TRANSFER) {
        add_change(Number<1>());
        products_but<0>(), hold(state[0]), hold(state[1]);
        uint8_t* effect = p.effect(blockIdx.z);
        if (has_new) store_end(effect, at.half(), state);
        else store_transfer(effect, at.half(), at.base + S::STAGING, state);
        if (!EARLY) let_next_start();
    } else {
        as_operand(operand, change);
        keep_change(), tell();
    }
    arrive_of_warp(stage.bar + USED);
}

// The warp's 16 rows go through shared memory, for whole lines; the tokens past the end are left out.
__device__ __forceinline__ void store(u32 staging, const u32 (&rows)[4][4], __nv_bfloat16* out, int64_t line,
                                      int inside) {
    const int lane = threadIdx.x % 32, first = threadIdx.x % GROUP / 32 * 16 + lane / 8, part = lane % 8;
    store_lines(staging, rows);
    __syncwarp();
    #pragma unroll
    for (int i = 0; i < 16; i += 4) {
        u32 four[4];
        const int row = first + i;
        load_words(four, staging + panel_at(row, part));
        store_words(out + row * line + part * 8, four, row < inside);
    }
    __syncwarp();
}

// asked and weighted are A in registers, loaded before S and c come. Their stage is free once the products take them:
// an arrival right behind ldmatrix does not wait for what it loads, and in one of three calls the next copy was faster.
// The outputs of a chunk are stored under the products of the next.
template <class S> __device__ __forceinline__ void outputs(const Problem& p, const Places& at) {
    const int64_t line = (int64_t)p.heads * WIDTH;
    const int batch = blockIdx.y / p.heads, head = blockIdx.y % p.heads;
    __nv_bfloat16* out = p.out + ((int64_t)batch * p.tokens * p.heads + head) * WIDTH + at.half() * PART;
    auto count = [&] { return count_of<S>(p); };
    u32 asked[8][4], weighted[4][4], rows[4][4] = {};  // rows: outputs
    OutputStages<S> stage(at.base);
    Slots<S> slot(at.base);
    const Both both(at);
    int before = p.chunks;  // the chunk whose outputs are in rows: none
    auto store_before = [&] {
        store(at.base + S::STAGING, rows, out + before * CHUNK * line, line, p.tokens - before * CHUNK);
    };
    for (int n = at.turn(); n < count(); n += S::TURNS) {
        float sums[32];
        stage.wait(FULL);
        load_lines(asked, stage.place), load_lines(weighted, stage.place + WEIGHTED - ASKED);
        slot.wait(READY);
        products_begin();
        multiply_first(sums, asked[0], of_columns(slot.low, 0, 0));
        #pragma unroll
        for (int step = 1; step < 8; ++step) multiply(sums, asked[step], of_columns(slot.low, 0, step));
        #pragma unroll
        for (int step = 0; step < 4; ++step) multiply(sums, weighted[step], of_columns(slot.low, 2 * PANEL, step));
        products_end();
        both.arrive_of_warp(stage.bar + EMPTY);
        store_before();
        products_but<0>(), hold(sums);
        arrive_of_warp(slot.bar + PASSED);
        as_operand(rows, sums);
        before = first_of<S>(p) + n, stage.next(), slot.next();
    }
    store_before();
}

template <class S> __device__ __forceinline__ Places set_up(u32 base) {
    if (threadIdx.x == 0) {
        const Stages<S> stage(base);
        const OutputStages<S> output_stage(base);
        const Slots<S> slot(base);
        for (u32 bar = stage.bar; bar < output_stage.bar; bar += BARS) {
            bar_init(bar + HAS_NEW, 1), bar_init(bar + HAS_PUSHED, 1), bar_init(bar + HAS_ENDED, 1);
            bar_init(bar + EMPTY, S::CLUSTER), bar_init(bar + USED, 4 * S::CHAINS);  // warps
        }
        for (u32 bar = output_stage.bar; bar < slot.bar; bar += BARS)
            bar_init(bar + FULL, 1), bar_init(bar + EMPTY, 2 * 4);
        for (int i = 0; i < S::SLOTS; ++i)
            bar_init(slot.bar + i * BARS + READY, 4), bar_init(slot.bar + i * BARS + PASSED, 4);
        fence_init();
    }
    cluster_barrier();
    return {base, rank_in_cluster()};
}

template <class S> __global__ void __launch_bounds__(THREADS, 1) walk_kernel(const Problem p) {
    extern __shared__ __align__(1024) uint8_t memory[];
    const Places at = set_up<S>(shared_address(memory));
    if (threadIdx.x < GROUP) {
        take_registers<OF_CHAIN>();
        chain<S>(p, at);
    } else if (threadIdx.x < 2 * GROUP) {
        take_registers<OF_OUTPUTS>();
        outputs<S>(p, at);
    } else {
        leave_registers<OF_THIRD>();
        if (DEPENDENT) wait_for_last();
        const int source = source_of<S>(p);
        if (threadIdx.x == 2 * GROUP) produce<S>(p, at, source);
        if (threadIdx.x == 2 * GROUP + 32) produce_for_outputs<S>(p, at);
        if (threadIdx.x == 2 * GROUP + 64) release<S>(p, at, source);
    }
}

__global__ void __launch_bounds__(THREADS, 1) transfer_kernel(const Problem p) {
    extern __shared__ __align__(1024) uint8_t memory[];
    if (EARLY) let_next_start();
    const Places at = set_up<Transfer>(shared_address(memory));
    if (threadIdx.x < 2 * GROUP) {
        take_registers<OF_TRANSFER>();
        chain<Transfer>(p, at);
    } else {
        leave_registers<OF_TRANSFER_THIRD>();
        if (DEPENDENT) wait_for_last();
        if (threadIdx.x == 2 * GROUP) produce<Transfer>(p, at, 0);
        if (threadIdx.x == 2 * GROUP + 32) release<Transfer>(p, at, 0);
    }
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

template <auto kernel, class S> int launch(const Problem& p, int pairs, int segments, cudaStream_t stream) {
    MUST(prepare<kernel>(S::SHARED_BYTES));
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(S::CLUSTER, pairs, segments), config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = S::SHARED_BYTES, config.stream = stream;
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = S::CLUSTER, attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.attrs = attributes, config.numAttrs = DEPENDENT ? 2 : 1;
    return cudaLaunchKernelEx(&config, kernel, p);
}
template <class S> int launch(const Problem& p, int pairs, cudaStream_t stream) {
    return launch<walk_kernel<S>, S>(p, pairs, p.segments, stream);
}

}  // namespace walk

// Given are the addresses of q, k, v, g, beta, records and out; batch, tokens, heads, whether beta is fp32; the stream;
// the chunks of a segment. The effects of segments are kept behind the records.
int all(const long long (&a)[13]) {
    auto words = [&](int i) { return (const uint16_t*)a[i]; };
    uint8_t* records = (uint8_t*)a[5];
    const int batch = a[7], tokens = a[8], heads = a[9], chunks = (tokens + CHUNK - 1) / CHUNK, pairs = batch * heads;
    const cudaStream_t stream = (cudaStream_t)a[11];
    if (!pairs || !chunks) return 0;
    MUST(fold::launch({words(0), words(1), words(2), (const float*)a[3], (const void*)a[4], records, tokens, heads,
                       chunks, int(a[10])}, batch, stream));
    const int length = a[12], segments = (chunks + length - 1) / length;
    uint8_t* effects = records + (int64_t)pairs * chunks * RECORD;
    const walk::Problem p = {records, (__nv_bfloat16*)a[6], tokens, heads, chunks, length, segments, effects};
    if (segments > 1) {
        MUST((walk::launch<walk::transfer_kernel, walk::Transfer>(p, pairs, segments - 1, stream)));
        return walk::launch<walk::Split>(p, pairs, stream);
    }
    auto* launch = pairs <= FEW_PAIRS ? walk::launch<walk::Shape<FEW>>
                 : pairs <= SOME_PAIRS ? walk::launch<walk::Shape<SOME>> : walk::launch<walk::Shape<MANY>>;
    return launch(p, pairs, stream);
}

static PyObject* run(PyObject*, PyObject* const* given, Py_ssize_t) {
    long long a[13];
    for (int i = 0; i < 13; ++i) a[i] = PyLong_AsLongLong(given[i]);
    const int error = all(a);
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
    ptx = PTX.replace("@WGMMA@", wgmma(CHUNK))
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


def length_of(chunks, pairs):
    """Chunks of a segment: all that a head has where it is not cut."""
    if pairs > SPLIT_PAIRS or chunks < SPLIT_CHUNKS:
        return chunks
    return -(-chunks // min(SPLIT_SEGMENTS, SPLIT_PLACES // pairs, chunks // SPLIT_LEAST))


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
    if out.numel() == 0:
        return out
    length = length_of(chunks, batch * heads)
    effects = -(-chunks // length) - 1
    records = v.new_empty(batch * heads * (chunks * RECORD + effects * EFFECT))
    pointers = [x.data_ptr() for x in (q, k, v, g, beta, records, out)]
    is_float = int(beta.dtype == torch.float32)
    error = (_run or built())(*pointers, batch, tokens, heads, is_float, stream_of(device), length)
    if error:
        raise RuntimeError(f"kda: CUDA error {error}")
    return out


def kernel_function(q, k, v, g, beta):
    device = q.get_device()
    if q.is_cuda and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return attention_of(q, k, v, g, beta, device)
    return attention_of(q, k, v, g, beta, device)
