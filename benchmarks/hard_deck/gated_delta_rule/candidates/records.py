"""Gated delta rule, sequences end to end, in CUDA C++ for sm_90a: two kernels, fold and walk, or three, with carry
between them, where few pairs of sequence and head have long sequences (PIECES). For the state S before a chunk of 64
tokens of a head, with `sums` the sums of its gates up to each token:

    c = T (v - exp(sums) k S) ;  o = scale exp(sums) q S + weighted c ;  S = exp(last) S + (exp(last - sums) k)^T c

where lower is beta k k^T and weighted is scale q k^T, both times the decay between two tokens. fold computes
T = (I + lower)^-1 diag(beta), all chunks side by side, and writes a record of 8,960 bytes a chunk and head: T as walk
wants it in shared memory, sums, exp(sums), and exp(last - sums). walk goes over the chunks of a sequence and head, and
is launched while fold runs. More in the record would be more bytes: 2048 records like KDA's are 152 MB.

fold: a block of one warp takes a chunk of a head, so nothing waits at barriers.
* It finds its sequence in the offsets itself. A chunk n of sequence s, which begins at token t, has the place
  t / 64 + s + n, rounded down: no two have the same, and no sum over lengths is needed.
* What ldmatrix loads of 16 keys is the A of their rows and the B of their columns of k k^T. What those products leave
  in registers is, scaled, the B of the substitution.
* Only blocks of 16 x 16 on the diagonal of I + lower are inverted, in fp32: a lane solves for a column of two blocks.
* The first blocks of the grid sort the sequences by length, the longest first, where there are at most SORTED.

walk: a cluster takes pairs of sequence and head, a block 64 columns of V.
* The chain is transposed, and stays in the registers of a warpgroup: what one product leaves there in fp32 is, as bf16,
  the A of the next one. p^T = S^T k^T; u^T = v^T - exp(sums) p^T; c^T = u^T T^T; S^T = exp(last) S^T +
  (exp(last - sums) c^T) k. k and T are the B of these as they lie in shared memory. No fence or barrier stands between
  these products.
* Another warpgroup makes weighted of q and k, in registers, and the outputs from S and c, which it gets through shared
  memory in bf16: the chain writes them there while its products run. With few pairs, where SMs are free, that warpgroup
  is in another block of the cluster.
* q, k and v come from the inputs, by tensor copies into a ring of stages. Each block fetches a slice of q, k and T for
  all blocks of its cluster that need it (multicast), and its own columns of v.
* Clusters stay: they take the sorted pairs to and fro (0 1 2 .. 2 1 0 0 1 ..), so each gets long and short ones. A
  pair's state comes through the ring, before its chunks. The chain puts the state of the pair before in its place, in
  the same reads and writes, and a copy takes it to memory.
* Tokens behind a sequence's end are the next one's. They add nothing, whatever is there: c is zero, keys are cut off.
* A block ends when all that is sent to it has come, so no barrier of the cluster, with its fence, stands at the end.

carry: with few pairs of long sequences most SMs would have nothing to do, while a few go over all chunks, one by one.
So a sequence is cut into pieces there, which walk takes side by side. carry finds what leads to their states.
* Over any stretch of chunks a state S becomes M S + A. Both are states themselves: M is what the identity becomes
  where v is 0, and A what 0 becomes. In the first stretch A is what the given state becomes, and M is not needed.
* BESIDE: a cluster takes a piece. One warpgroup finds A, another M, and both take the same stages. Their chains are
  walk's, without outputs. Piece 0 has no M. walk takes a step for each piece before its own but the first.
* Else a cluster takes a stretch of two pieces, for M or for A: its chain is faster a chunk, but goes over two pieces.
  It stores M or A after each piece, so walk takes one map for both, where it can: half as many steps.
* carry stores M in bf16 and A in fp32. A cluster of walk first takes M S + A over what is before its piece. S is two
  operands of bf16 there, of which the second is what the first does not hold. No cluster of a launch waits for another
  one.
* SKIP: where an M is 0 in bf16, as it is when gates let nothing pass, walk leaves out what was before it: 0 S = 0. So
  it does where a product of several M, up to the last one, is 0 by a bound: the product of their largest, times 128 for
  each but one. It does not where an A is not finite. carry stores flags for it.
* Neither pays alone: `one` takes 47.6 us with both, 51.1 with BESIDE, 50.8 with SKIP 2, and 50.5 with none. Both lose
  where gates keep more than a piece: no M is 0 then, and with BESIDE walk takes up to twice as many steps. With gates
  0.01 times as strong both take 51.8 us, SKIP alone 52.6, and none 50.2 (H200, 2026-11-29, events around cold calls).
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
RECORD = 8960  # bytes of a chunk and head
MOST_CHUNKS = 2**24  # of all heads: rows of states are counted in 31 bits. As many have records of 150 GB
FOLD_BLOCKS = 13  # of an SM, of a warp each: the compiler leaves registers for so many
# Blocks of a cluster, stages of the ring, slots for S and c on their way to the outputs. Of four blocks two have the
# chain, and two the outputs.
MANY = (2, 3, 2)
FEW = (4, 4, 3)  # with at most FEW_PAIRS pairs of sequence and head
FEW_PAIRS = 24
# The same of carry, which has no slots, and of walk over pieces.
CARRIED = (2, 6, 0)
PIECEWISE = (2, 3, 2)
# Where sequences are cut into pieces: pairs from and to, and chunks of a sequence at least, on average. By events
# around cold calls (H200, 2026-11-29), with BESIDE 0 and SKIP 0, pieces take 34.7 and 36.4 us for 40.3 with 8 pairs of
# 24 chunks, 49.4 to 51.0 for 51.3 with 16 of 32, and 183.4 to 187.6 for 211.0 with 32 of 128, the only measurement
# above 16 pairs. With 16 chunks, and with 16 pairs of 24, they gain 0.9 us at most, or lose. 17 to FEW_PAIRS pairs were
# not measured: there whole sequences have FEW, whose chain is faster than that of MANY, and pieces would have one
# stretch.
PIECES = ((1, 8, 24), (9, 16, 32), (25, 33, 128))
STRETCHES = 8  # of a sequence at most, of two pieces each
CLUSTERS = 66  # of two blocks: as many as an H200 has SMs for
FOUND = 3 * 32768 + 64  # bytes that carry stores for the end of a piece: A in fp32, M in bf16, flags
# Whether a cluster of carry finds M and A of a piece (1), or one of them over two pieces (0); whether walk leaves out
# what is before an M of 0 (1), or before several whose product must be 0 (2), or nothing (0).
BESIDE = 1
SKIP = 2
# walk may be launched, and set up its blocks where SMs are free, when fold has ended (0), when all blocks of fold have
# stored (1), or when all have started (2). It reads nothing before fold has ended. Where there is carry all this holds
# for carry, and walk may be launched when carry has ended (0), or when all its blocks have started (1, 2).
DEPENDENT = 1
CHOSEN = "FOLD_BLOCKS MANY FEW FEW_PAIRS CARRIED PIECEWISE DEPENDENT BESIDE SKIP".split()  # what the CUDA C++ takes
SPACE = [{}, {"SKIP": 1}, {"BESIDE": 0, "SKIP": 0}]  # they differ where sequences are cut alone


def wgmma(n):
    """m64 n k16 of bf16, n / 2 sums a thread: d = A B, and d += A B. A is in registers, B in shared memory; there the
    values of a column lie together, or where BY_ROWS those of a row."""
    half = n // 2
    sums, outputs = ", ".join(f"%{i}" for i in range(half)), ", ".join(f'"+f"(d[{i}])' for i in range(half))
    registers = ", ".join(f"%{half + i}" for i in range(4))
    inputs = ", ".join(f'"r"(a[{i}])' for i in range(4))

    def function(name, kind, first):
        return f"""template <bool BY_ROWS = false>
__device__ __forceinline__ void {name}(float (&d)[{half}], const u32 (&a)[4], uint64_t b) {{
    asm volatile("{{.reg .pred p; setp.ne.b32 p, 0, {0 if first else 1}; "
                 "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 "
                 "{{{sums}}}, {{{registers}}}, %{half + 4}, p, 1, 1, %{half + 5};}}"
                 : {outputs.replace("+", kind)} : {inputs}, "l"(b), "n"(BY_ROWS));
}}
"""

    return function("multiply_first", "=", True) + function("multiply", "+", False)


PTX = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda.h>
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
__device__ __forceinline__ float power_of_2(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
template <int THREADS> __device__ __forceinline__ void barrier_of(u32 number) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(THREADS) : "memory");
}
__device__ __forceinline__ void let_walk_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Of fold

// threadIdx.x % 32 out of another register, for the last phases. Else the compiler shares expressions of the thread
// between distant phases, which costs registers.
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
// d += a b. With g = lane / 4 and t = lane % 4, d is (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1) of 16 x 8.
__device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
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
// A box of a tensor of two dimensions; column and row are those of its first element.
__device__ __forceinline__ void copy_box(u32 to, const CUtensorMap* map, int column, int row, u32 bar) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];"
                 ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(bar) : "memory");
}
__device__ __forceinline__ void copy_box_to_all(u32 to, const CUtensorMap* map, int column, int row, u32 bar,
                                                u32 blocks) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(bar), "h"((uint16_t)blocks) : "memory");
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
__device__ __forceinline__ float2 load_floats(u32 at) {
    float2 r;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(r.x), "=f"(r.y) : "r"(at) : "memory");
    return r;
}
// 16 bytes of what the kernel before has written, past the L1.
__device__ __forceinline__ uint4 load_four(const uint8_t* from) {
    uint4 r;
    asm volatile("ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(from) : "memory");
    return r;
}
__device__ __forceinline__ void store_float(u32 at, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(value) : "memory");
}
__device__ __forceinline__ void store_zeros(u32 at) {  // 16 bytes
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
}
// To the same place of another block's shared memory, whose barrier counts the bytes.
__device__ __forceinline__ void copy_there(u32 there, u32 from, u32 bytes, u32 bar_there) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(there), "r"(from), "r"(bytes), "r"(bar_there) : "memory");
}
__device__ __forceinline__ void store_box(const CUtensorMap* map, int column, int row, u32 from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];"
                 ::"l"(map), "r"(from), "r"(column), "r"(row) : "memory");
}
__device__ __forceinline__ void wait_until_read() {  // what this thread stores from shared memory
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void store_bytes(uint8_t* to, u32 from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait_until_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
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

// Bytes of a record: T, a panel; for each token in fp32 the sum of gates up to it, times log2(e); 2^sum;
// 2^(last - sum).
constexpr u32 SUMS = PANEL, GATE = CHUNK * 4, GATES = 3 * GATE, RECORD = PANEL + GATES;
constexpr int STATE_BYTES = WIDTH * WIDTH * 4;
"""

FOLD = r"""
namespace fold {

constexpr int THREADS = 32;                                    // a warp: no barrier of the block
constexpr int BLOCK_BYTES = 16 * 128, TILE_BYTES = 2 * PANEL;  // 16 tokens of a panel; 64 x 128 bf16 in two panels
constexpr int SORTED = 512;                                    // sequences at most, or they stay as they are
constexpr float PER_E = 1.4426950408889634f;                   // log2(e)
constexpr float LEAST = -150;                                  // 2^LEAST is 0; -inf would give NaN

// Shared memory: keys; sums of gates and beta, fp32 [token]. With 16,896 bytes 13 blocks fit on an SM.
constexpr int KEYS = 0, TOKEN_SUMS = TILE_BYTES, RATES = TOKEN_SUMS + CHUNK * 4, SHARED_BYTES = RATES + CHUNK * 4;
// In the place of KEYS, once they are multiplied. DIAGONALS: what is inverted, fp32 [block][row][column], a row 96
// bytes and a block 1600: then four rows, or one row of two blocks, are in different banks. INVERSES: those of 16 x 16
// without their ones, bf16 [block][column][row], a column 48 bytes. SOLVED: T, a panel, where DIAGONALS were.
constexpr int LINE = 96, DIAGONAL = 1600, COLUMN = 48, INVERSE = 16 * COLUMN;
constexpr int DIAGONALS = KEYS, SOLVED = KEYS, INVERSES = KEYS + PANEL;

__device__ __forceinline__ int lane_of_warp() { return threadIdx.x % 32; }
__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }

// Tensors of bf16 are addressed as 16-bit words. order: sequence, first token, tokens, 0 of the longest, the next, ...
struct Problem {
    const uint16_t* k;
    const float* g;
    const void *beta, *offsets;
    uint8_t* records;
    int4* order;
    int heads, sequences, beta_is_float, offsets_are_long;
    __device__ __forceinline__ int offset(int i) const {
        return offsets_are_long ? (int)((const int64_t*)offsets)[i] : ((const int*)offsets)[i];
    }
    __device__ __forceinline__ int length(int i) const { return offset(i + 1) - offset(i); }
    __host__ __device__ __forceinline__ int sorters() const { return (sequences + THREADS - 1) / THREADS; }
};

// Neighbouring blocks take neighbouring heads, whose rows are neighbours in memory.
struct Place {
    int64_t first;    // the row of 128 channels of the chunk's first token in k
    int inside;       // its tokens that exist
    uint8_t* record;
};

// The sequence whose places hold the chunk's tells where it lies; no sequence: no token is inside.
__device__ __forceinline__ Place place_of(const Problem& p, int number) {
    const int slot = number / p.heads, head = number % p.heads;
    int first = 0, inside = 0;
    #pragma unroll 1
    for (int i = threadIdx.x; i < p.sequences; i += THREADS) {
        const int start = p.offset(i), tokens = p.offset(i + 1) - start, from = (slot - start / CHUNK - i) * CHUNK;
        if (from >= 0 && from < tokens) first = start + from, inside = min(CHUNK, tokens - from);
    }
    first = __reduce_max_sync(~0u, first), inside = __reduce_max_sync(~0u, inside);
    return {(int64_t)first * p.heads + head, inside, p.records + (int64_t)number * RECORD};
}

// The first blocks of the grid; a thread counts for its sequence how many come before.
__device__ __forceinline__ void sort(uint8_t* memory, const Problem& p) {
    const bool sorted = p.sequences <= SORTED;
    if (sorted)
        #pragma unroll 1
        for (int i = threadIdx.x; i < p.sequences; i += THREADS) sts(memory + i * 4, p.length(i));
    __syncwarp();
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= p.sequences) return;
    const int own = p.length(i);
    int before = sorted ? 0 : i;
    #pragma unroll 4
    for (int j = 0; sorted && j < p.sequences; ++j) {
        const int other = lds<int>(memory + j * 4);
        before += other > own || (other == own && j < i);
    }
    p.order[before] = make_int4(i, p.offset(i), own, 0);
}

// 32 copies of two rows.
__device__ __forceinline__ void load_keys(uint8_t* memory, const Problem& p, const Place& place) {
    const int lane = lane_of_warp(), part = lane % 16, second = lane / 16;
    const int at = part / 8 * PANEL + panel_at(second, part % 8);
    const int64_t line = (int64_t)p.heads * WIDTH, two = 2 * line;
    const uint16_t* from = p.k + (place.first * WIDTH + second * line + part * 8);
    if (place.inside == CHUNK) {
        #pragma unroll
        for (int i = 0; i < 32; ++i, from += two) copy16(memory + KEYS + (at ^ i % 4 * 32) + i * 256, from, true);
    } else {
        #pragma unroll 1
        for (int i = 0; i < 32; ++i, from += two) {
            const bool inside = 2 * i + second < place.inside;
            copy16(memory + KEYS + (at ^ i % 4 * 32) + i * 256, inside ? from : p.k, inside);
        }
    }
    commit_copies();
}

// Gates and beta of the lane's two tokens.
struct Pair { float g[2], rate[2]; };
__device__ __forceinline__ Pair load_pair(const Problem& p, const Place& place) {
    Pair r;
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int token = 2 * lane_of_warp() + i;
        const int64_t at = place.first + (int64_t)token * p.heads;
        r.g[i] = r.rate[i] = 0;
        if (token >= place.inside) continue;
        r.g[i] = p.g[at];
        r.rate[i] = p.beta_is_float ? ((const float*)p.beta)[at] : low(((const uint16_t*)p.beta)[at]);
    }
    return r;
}

__device__ __forceinline__ void gate(uint8_t* memory, const Place& place, const Pair& pair) {
    const int lane = lane_of_warp();
    float g[2];
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
        g[i] = pair.g[i] * PER_E;
        g[i] = g[i] < LEAST ? LEAST : g[i];
    }
    float sum = g[0] + g[1];
    #pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const float other = __shfl_sync(~0u, sum, max(lane - step, 0));
        if (lane >= step) sum += other;
    }
    const float before = __shfl_sync(~0u, sum, max(lane - 1, 0)), last = __shfl_sync(~0u, sum, 31);
    const float2 sums = make_float2((lane ? before : 0) + g[0], sum);
    float start[2], end[2];
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
        start[i] = power_of_2(i ? sums.y : sums.x);
        end[i] = 2 * lane + i < place.inside ? power_of_2(last - (i ? sums.y : sums.x)) : 0;
    }
    sts(memory + TOKEN_SUMS + lane * 8, sums);
    sts(memory + RATES + lane * 8, make_float2(pair.rate[0], pair.rate[1]));
    float2* gates = reinterpret_cast<float2*>(place.record + SUMS);
    gates[lane] = sums;
    gates[32 + lane] = make_float2(start[0], start[1]), gates[64 + lane] = make_float2(end[0], end[1]);
}

__device__ __forceinline__ constexpr int pair_of(int later, int earlier) { return later * (later + 1) / 2 + earlier; }

// keys keys^T, blocks of 16 x 16 up to the diagonal: sums[pair of blocks][eight columns]. What ldmatrix loads of a
// block is both the A of its rows and the B of its columns. An A is four registers in a row and a B two, so a B has
// words of its own: of plain copies ptxas makes one for each product. zero is 0, which the compiler does not know.
__device__ __forceinline__ void multiply_pairs(float (&sums)[10][2][4], const uint8_t* memory, u32 zero) {
    const int lane = lane_of_warp();
    const uint8_t* keys = memory + KEYS + lane % 16 * 128;
    const int first = (lane / 16 ^ lane % 8) << 4;
    #pragma unroll
    for (int step = 0; step < WIDTH / 16; ++step) {
        u32 a[4][4], b[4][4];
        #pragma unroll
        for (int block = 0; block < 4; ++block) {
            ldmatrix(a[block], shared_address(keys + step / 4 * PANEL + block * BLOCK_BYTES + (first ^ step % 4 * 32)));
            #pragma unroll
            for (int i = 0; i < 4; ++i) b[block][i] = a[block][i % 2 * 2 + i / 2] ^ zero;
        }
        #pragma unroll
        for (int later = 0; later < 4; ++later)
            #pragma unroll
            for (int earlier = 0; earlier <= later; ++earlier) {
                multiply(sums[pair_of(later, earlier)][0], a[later], b[earlier][0], b[earlier][1]);
                multiply(sums[pair_of(later, earlier)][1], a[later], b[earlier][2], b[earlier][3]);
            }
    }
}

// What the lane's rows or columns of a block are scaled by: of token lane / 4 + 8 second of it, and of token
// lane % 4 * 2 + 8 right and the next one.
__device__ __forceinline__ float of_row(const uint8_t* memory, int what, int block, int second) {
    return lds<float>(memory + what + lane_again() / 4 * 4 + block * 64 + second * 32);
}
__device__ __forceinline__ float2 of_column(const uint8_t* memory, int block, int right) {
    return lds<float2>(memory + TOKEN_SUMS + lane_again() % 4 * 8 + block * 64 + right * 32);
}

// Blocks of beta decay keys keys^T on the diagonal, fp32. What is above it is not used, and may be infinite.
__device__ __forceinline__ void put_diagonals(uint8_t* memory, const float (&sums)[10][2][4]) {
    const int lane = lane_again();
    uint8_t* at = memory + DIAGONALS + lane / 4 * LINE + lane % 4 * 8;
    #pragma unroll
    for (int block = 0; block < 4; ++block)
        #pragma unroll
        for (int i = 0; i < 3; ++i) {  // rows 8 (i > 0), columns 8 (i > 1) and after
            const int second = i > 0, right = i > 1;
            const float* pair = sums[pair_of(block, block)][right] + second * 2;
            const float2 column = of_column(memory, block, right);
            const float row = of_row(memory, TOKEN_SUMS, block, second), rate = of_row(memory, RATES, block, second);
            sts(at + block * DIAGONAL + second * 8 * LINE + right * 32,
                make_float2(pair[0] * rate * power_of_2(row - column.x), pair[1] * rate * power_of_2(row - column.y)));
        }
}

// Those below, with a minus, as the B of products with the earlier block. The decay between two tokens has two factors:
// to the end of the earlier block, and from there.
__device__ __forceinline__ void make_lower(u32 (&lower)[6][4], const float (&sums)[10][2][4], const uint8_t* memory) {
    #pragma unroll
    for (int earlier = 0; earlier < 3; ++earlier) {
        const float middle = lds<float>(memory + TOKEN_SUMS + (16 * earlier + 15) * 4);
        float2 to[2];
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float2 column = of_column(memory, earlier, i);
            to[i] = make_float2(power_of_2(middle - column.x), power_of_2(middle - column.y));
        }
        #pragma unroll
        for (int later = earlier + 1; later < 4; ++later) {
            float from[2];
            #pragma unroll
            for (int i = 0; i < 2; ++i)
                from[i] = -of_row(memory, RATES, later, i) * power_of_2(of_row(memory, TOKEN_SUMS, later, i) - middle);
            #pragma unroll
            for (int i = 0; i < 4; ++i) {  // rows 8 (i / 2), columns 8 (i % 2) and after
                const float* pair = sums[pair_of(later, earlier)][i % 2] + i / 2 * 2;
                lower[pair_of(later - 1, earlier)][i] =
                    packed(pair[0] * from[i / 2] * to[i % 2].x, pair[1] * from[i / 2] * to[i % 2].y);
            }
        }
    }
}

// A lane solves for a column of the inverses of 16 x 16 of two blocks.
__device__ __forceinline__ void invert(uint8_t* memory) {
    const int lane = lane_again(), column = lane % 16, half = lane / 16;
    #pragma unroll 1
    for (int i = 0; i < 4; i += 2) {
        const uint8_t* diagonal = memory + DIAGONALS + (i + half) * DIAGONAL;
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
        uint8_t* to = memory + INVERSES + (i + half) * INVERSE + column * COLUMN;
        sts(to, make_uint4(r[0], r[1], r[2], r[3])), sts(to + 16, make_uint4(r[4], r[5], r[6], r[7]));
    }
}

__device__ __forceinline__ void as_operand(u32 (&a)[4], const float (&sums)[2][4]) {
    #pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = packed(sums[i / 2][i % 2 * 2], sums[i / 2][i % 2 * 2 + 1]);
}

// (I + lower)^-1 diag(beta), 16 columns `own` at a time. Transposed: the columns are rows of the products, and a solved
// block is, in registers, the A of the next ones.
__device__ __forceinline__ void solve(uint8_t* memory, const u32 (&lower)[6][4]) {
    u32 x[10][4], inverse[4][4], zeros[4] = {};
    const int lane = lane_again(), token = lane / 16 * 8 + lane % 8, odd = lane / 8 % 2;
    const uint8_t* from = memory + INVERSES + (odd * 8 + lane % 8) * COLUMN + lane / 16 * 16;
    const u32 to = shared_address(memory + SOLVED) + panel_at(token, odd);
    #pragma unroll
    for (int block = 0; block < 4; ++block)
        ldmatrix_trans(inverse[block], shared_address(from + block * INVERSE));
    #pragma unroll
    for (int block = 0; block < 4; ++block)
        #pragma unroll
        for (int own = 0; own < 4; ++own) {
            const u32 at = (to ^ own * 32) + block * BLOCK_BYTES;
            if (own > block) {
                stmatrix_trans(at, zeros);
                continue;
            }
            float sums[2][4] = {};  // [eight tokens]
            if (own == block)
                #pragma unroll
                for (int i = 0; i < 4; ++i) {  // of columns lane / 4 and lane / 4 + 8
                    const bool here = lane % 4 * 2 + i % 2 == lane / 4;
                    sums[i / 2][i / 2 * 2 + i % 2] = here ? of_row(memory, RATES, block, i / 2) : 0;
                }
            #pragma unroll
            for (int earlier = own; earlier < block; ++earlier) {
                const u32 (&b)[4] = lower[pair_of(block - 1, earlier)];
                multiply(sums[0], x[pair_of(earlier, own)], b[0], b[1]);
                multiply(sums[1], x[pair_of(earlier, own)], b[2], b[3]);
            }
            u32 a[4];
            const u32 (&b)[4] = inverse[block];
            as_operand(a, sums);  // without the inverse's ones: what they multiply is in the sums, in fp32
            multiply(sums[0], a, b[0], b[1]), multiply(sums[1], a, b[2], b[3]);
            as_operand(x[pair_of(block, own)], sums);
            stmatrix_trans(at, x[pair_of(block, own)]);
        }
}

__device__ __forceinline__ void store_solved(const Place& place, const uint8_t* memory) {
    const int at = lane_again() * 16;
    #pragma unroll
    for (int i = 0; i < PANEL; i += THREADS * 16)
        *reinterpret_cast<uint4*>(place.record + at + i) = lds<uint4>(memory + SOLVED + at + i);
}

__global__ void __launch_bounds__(THREADS, FOLD_BLOCKS) fold_kernel(const Problem p) {
    extern __shared__ __align__(128) uint8_t memory[];
    if (DEPENDENT == 2) let_walk_start();
    const int number = (int)blockIdx.x - p.sorters();
    if (number < 0) return sort(memory, p);
    const Place place = place_of(p, number);
    if (!place.inside) return;
    const Pair pair = load_pair(p, place);
    load_keys(memory, p, place);
    gate(memory, place, pair);
    wait_copies<0>();
    __syncwarp();
    u32 lower[6][4];
    {
        float sums[10][2][4] = {};
        multiply_pairs(sums, memory, p.heads >> 31);
        __syncwarp();  // the place of the keys is free
        put_diagonals(memory, sums);
        make_lower(lower, sums, memory);
    }
    __syncwarp();
    invert(memory);
    __syncwarp();
    solve(memory, lower);
    __syncwarp();
    store_solved(place, memory);
    if (DEPENDENT == 1) let_walk_start();
}

}  // namespace fold
"""

WALK = r"""
namespace walk {

// A warpgroup for the chain, one for the outputs, and one of which some threads fetch and send. The compiler has 168
// registers a thread for three; the third leaves most of its own to the others.
constexpr int GROUP = 128, THREADS = 3 * GROUP, OF_CHAIN = 240, OF_OUTPUTS = 200, OF_THIRD = 56;
constexpr int OF_BOTH = 232, OF_BOTH_THIRD = 40;  // of carry with two chains
constexpr int PART = 64;  // columns of V of a block: the rows of its products

// What a cluster goes over: whole pairs; a stretch or a piece, in carry; a piece.
enum { WHOLE, CARRY, PIECES };

template <int CLUSTER_, int STAGES_, int SLOTS_, int WORK_ = WHOLE> struct Shape {
    static constexpr int CLUSTER = CLUSTER_, STAGES = STAGES_, SLOTS = SLOTS_, WORK = WORK_;
    static constexpr bool APART = CLUSTER == 4;           // blocks 0 and 1 have the chain, 2 and 3 the outputs
    static constexpr bool OUTPUTS = WORK != CARRY;
    static constexpr bool BOTH = WORK == CARRY && BESIDE;  // the second warpgroup has a chain, too: that of M
    static constexpr int BOX_ROWS = 2 * CHUNK / CLUSTER;  // of a panel of k: what a block fetches
    // Bytes. A stage: keys; T and the block's columns of v; queries; gates. T and v are in other blocks than queries,
    // or in the same. Or it is a state, fp32, 32 columns and then the others; or M, bf16. A slot: S^T, then c^T.
    // Barriers stand behind both: full, empty: a stage has come, all blocks have used it; used: this block's warps
    // have; ready: S and c are in a slot; passed: the outputs have used them.
    static constexpr u32 SOLVED = 2 * PANEL, VALUES = SOLVED + PANEL;
    static constexpr u32 QUERIES = APART || !OUTPUTS ? SOLVED : VALUES + PANEL;
    static constexpr u32 GATES_AT = QUERIES + 2 * PANEL, FULL = GATES_AT + GATES, EMPTY = FULL + 8, USED = FULL + 16;
    static constexpr u32 STATES = 3 * PANEL, READY = STATES, PASSED = READY + 8;
    static constexpr u32 STAGE = GATES_AT + 1024, SLOT = STATES + 1024, SLOTS_AT = STAGES * STAGE;
    // At STAGING outputs go out; or there are zeros in place of v, for the chain of M.
    static constexpr u32 STAGING = SLOTS_AT + SLOTS * SLOT, SHARED_BYTES = STAGING + (OUTPUTS || BOTH) * PANEL;
    static_assert(CLUSTER == 2 || (CLUSTER == 4 && WORK == WHOLE), "blocks of a cluster");
    static_assert(SHARED_BYTES <= 232448 && STAGES > 1, "a block must fit");
    static_assert(SLOTS >= 2 * OUTPUTS, "a chain must be a slot ahead");
    static_assert(WORK != PIECES || STAGES > 2, "a step of walk over pieces holds three stages");
};

struct Problem {
    CUtensorMap q, k, v, states, after;
    const uint8_t* records;
    const int4* order;
    __nv_bfloat16* out;
    int heads, pairs, clusters;
    // Of carry and pieces: where A lies, and M. stretches: of a sequence.
    CUtensorMap added;
    uint8_t* matrices;
    int stretches;
    __host__ __device__ __forceinline__ int pieces() const { return 2 * stretches; }
    // Behind all M, of what was found for the end of a piece: for each of eight warps the largest of its part of M, a
    // bf16 without its sign in the upper half of a word; and for each of eight whether its part of A is not finite.
    __device__ __forceinline__ uint8_t* flags(int slot) const {
        return matrices + pairs * (pieces() - 1) * (int64_t)(4 * PANEL) + slot * 64;
    }
};

template <int N> struct Number { __device__ constexpr operator int() const { return N; } };

struct Places {
    u32 base, rank;       // everything has the same place in all blocks of a cluster
    bool chain, outputs;  // what this block does
    int skipped;          // steps that walk leaves out before its piece
    __device__ __forceinline__ int half() const { return rank % 2; }  // of the columns of V
};

// A pair, or a piece of one. What carry finds for the end of piece i has the number slot + i.
struct Pair {
    int sequence, head, first, tokens, slot, piece;
    bool matrix;  // in carry, M, where that has a cluster of its own: the state begins as the identity, and v is 0
    int skipped;
    __device__ __forceinline__ int row(int heads) const { return (sequence * heads + head) * WIDTH; }  // of its state
    // How walk gets the state before a piece. Before piece 0 it is given; before piece 1 carry has found it, and from
    // there a step leads over each piece. Without BESIDE carry has found it before piece 2, too; from there steps lead
    // over a stretch each, to odd pieces the last over one piece. Number 0 is the A to begin with, the steps' follow.
    __device__ __forceinline__ int all_steps() const {
        return BESIDE ? max(0, piece - 1) : piece < 3 ? 0 : (piece - 1) / 2;
    }
    __device__ __forceinline__ int slot_of_number(int i) const {
        return BESIDE ? slot + i : slot + (i ? min(1 + 2 * i, piece - 1) : min(piece, 2) - 1);
    }
    __device__ __forceinline__ int steps() const { return all_steps() - skipped; }
    __device__ __forceinline__ int first_slot() const { return slot_of_number(skipped); }
    __device__ __forceinline__ int slot_of(int step) const { return slot_of_number(skipped + 1 + step); }
};

// The cluster's pairs, to and fro over the sorted ones. Each is looked up a pair ahead.
template <class F> __device__ __forceinline__ void each_pair(const Problem& p, F&& act) {
    const int own = blockIdx.y;
    int index = own;
    int4 line = p.order[index / p.heads];
    for (int round = 1; index < p.pairs; ++round) {
        const Pair pair = {line.x, index % p.heads, line.y, line.z};
        index = round * p.clusters + (round % 2 ? p.clusters - 1 - own : own);
        if (index < p.pairs) line = p.order[index / p.heads];
        act(pair);
    }
}

// The cluster's pieces. In carry it is one; or they are a stretch's, for A or for M, in the order A, then A and M of
// each next stretch. The last stretch has one piece there, since nothing is behind the other. In walk the pieces with
// the most steps come first.
template <int WORK, class F> __device__ __forceinline__ void each_piece(const Problem& p, const Places& at, F&& act) {
    const int jobs = p.pieces() - (WORK == CARRY), index = blockIdx.y % p.pairs, job = blockIdx.y / p.pairs;
    const int4 line = p.order[index / p.heads];
    const int size = (line.z + p.pieces() * CHUNK - 1) / (p.pieces() * CHUNK) * CHUNK;  // tokens of a piece
    constexpr bool STRETCH = WORK == CARRY && !BESIDE;
    const int from = STRETCH ? (job + 1) / 2 * 2 : WORK == CARRY ? job : jobs - 1 - job;
    const int end = STRETCH ? min(from + 2, jobs) : from + 1;
    #pragma unroll 1
    for (int i = from; i < end; ++i)
        act(Pair{line.x, index % p.heads, line.y + i * size, max(0, min(size, line.z - i * size)),
                 index * (p.pieces() - 1), i, STRETCH && job > 0 && job % 2 == 0, WORK == PIECES ? at.skipped : 0});
}
// How many steps walk leaves out: those up to the last one whose M, or its product with all later ones, is 0; none
// where an A is not finite, since 0 times it is not 0.
template <class S> __device__ __forceinline__ int skipped_of(const Problem& p) {
    if (!SKIP || S::WORK != PIECES) return 0;
    const int lane = threadIdx.x % 32;
    Pair pair = {};
    pair.slot = blockIdx.y % p.pairs * (p.pieces() - 1), pair.piece = p.pieces() - 1 - blockIdx.y / p.pairs;
    u32 largest = 1, bad = 0;
    const int steps = pair.all_steps();
    if (pair.piece && lane <= steps) {
        const uint8_t* flags = p.flags(pair.slot_of_number(lane));
        const uint4 a = load_four(flags), b = load_four(flags + 16);
        const uint4 c = load_four(flags + 32), d = load_four(flags + 48);
        largest = max(max(max(a.x, a.y), max(a.z, a.w)), max(max(b.x, b.y), max(b.z, b.w)));
        bad = c.x | c.y | c.z | c.w | d.x | d.y | d.z | d.w;
    }
    // All of an M are below 2^(exponent - 126), and of a product of n below 2^(7 (n - 1)) times that of each: less than
    // 2^-134 is 0 in bf16.
    const int size = !largest ? -10000 : SKIP == 2 ? (int)(largest >> 23) - 119 : 10000;
    int sum = 0, skipped = 0;
    for (int i = pair.piece ? steps : 0; i > 0 && !skipped; --i) {
        sum = SKIP == 2 ? sum + __shfl_sync(~0u, size, i) : __shfl_sync(~0u, size, i);
        if (sum <= -127) skipped = i;
    }
    return __ballot_sync(~0u, bad != 0) ? 0 : skipped;
}

template <int WORK, class F> __device__ __forceinline__ void each_part(const Problem& p, const Places& at, F&& act) {
    if constexpr (WORK == WHOLE) each_pair(p, act);
    else each_piece<WORK>(p, at, act);
}

// Which of COUNT stages or slots is next, and the parity of its barriers. Kept from one to the next: what is computed
// from their number would delay products.
template <int COUNT, u32 SIZE> struct Turn {
    u32 place, left = COUNT, parity = 0;
    __device__ __forceinline__ Turn(u32 first) : place(first) {}
    __device__ __forceinline__ void next() {
        place += SIZE;
        if (--left == 0) place -= COUNT * SIZE, left = COUNT, parity ^= 1;
    }
};
// Stages come in this order: a pair's state, its chunks, the next pair's state, ... and after the last pair one without
// a state, into which the last one's is put. Where walk takes pieces, A and M of each step come behind the state.
template <class S> struct Stages : Turn<S::STAGES, S::STAGE> {
    __device__ __forceinline__ Stages(const Places& at) : Turn<S::STAGES, S::STAGE>(at.base) {}
    __device__ __forceinline__ void wait(u32 bar, u32 turned = 0) const {
        bar_wait(this->place + bar, this->parity ^ turned);
    }
};
template <class S> struct Slots : Turn<S::SLOTS, S::SLOT> {
    __device__ __forceinline__ Slots(const Places& at) : Turn<S::SLOTS, S::SLOT>(at.base + S::SLOTS_AT) {}
    __device__ __forceinline__ void wait(u32 bar, u32 turned = 0) const {
        bar_wait(this->place + bar, this->parity ^ turned);
    }
};
__device__ __forceinline__ void arrive_of_warp(u32 bar) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) bar_arrive(bar);
}

// Descriptors of wgmma. Only their lower words change from product to product, by additions without a carry: what is
// computed between two products delays the second.
__device__ __forceinline__ uint64_t descriptor(u32 low) {
    return (uint64_t)(1024 >> 4 | 1 << 30) << 32 | low;  // groups of eight lines are 1024 bytes apart; 128-byte swizzle
}
// 64 columns of B, of which each is a line of the panels: its k lie together.
__device__ __forceinline__ uint64_t of_columns(u32 at, int step) {
    return descriptor(((at & 0x3FFFF) >> 4 | 1 << 16) + (step / 4 * PANEL + step % 4 * 32 >> 4));
}
// Of B each k is a line of the panel: 64 columns lie together.
__device__ __forceinline__ uint64_t of_rows(u32 at, int step) {
    return descriptor(((at & 0x3FFFF) >> 4 | PANEL >> 4 << 16) + (step * 16 * 128 >> 4));
}

// Sums as the A of a next product: their columns are its k.
template <int STEPS> __device__ __forceinline__ void as_operand(u32 (&a)[STEPS][4], const float (&d)[8 * STEPS]) {
    #pragma unroll
    for (int i = 0; i < 8 * STEPS; i += 2) a[i / 8][i % 8 / 2] = packed(d[i], d[i + 1]);
}
// The thread's row of its warp's 16, for ldmatrix and stmatrix of A or sums: parts of 16 bytes, columns 16 step and up.
__device__ __forceinline__ u32 line_at(int step) {
    const int lane = threadIdx.x % 32, row = threadIdx.x % GROUP / 32 * 16 + lane % 16;
    return step / 4 * PANEL + panel_at(row, step % 4 * 2 + lane / 16);
}
template <int STEPS> __device__ __forceinline__ void store_lines(u32 to, const u32 (&a)[STEPS][4], int from = 0) {
    #pragma unroll
    for (int step = 0; step < STEPS; ++step) stmatrix(to + line_at(from + step), a[step]);
}
template <int STEPS> __device__ __forceinline__ void load_lines(u32 (&a)[STEPS][4], u32 from) {
    #pragma unroll
    for (int step = 0; step < STEPS; ++step) ldmatrix(a[step], from + line_at(step));
}
// d += A B; where FRESH, d = A B.
template <bool FRESH, int STEPS>
__device__ __forceinline__ void product(float (&d)[32], const u32 (&a)[STEPS][4], u32 b, int from = 0) {
    if (FRESH) multiply_first(d, a[0], of_columns(b, from));
    else multiply(d, a[0], of_columns(b, from));
    #pragma unroll
    for (int step = 1; step < STEPS; ++step) multiply(d, a[step], of_columns(b, from + step));
}

// One thread asks for this block's slices and columns. The last turns only wait until all blocks have used what this
// one sent.
template <class S> __device__ __forceinline__ void produce(const Problem& p, const Places& at) {
    constexpr u32 ALL = (1 << S::CLUSTER) - 1, OF_OUTPUTS = S::APART ? 12 : 3, SLICE = PANEL / 2;
    const int half = at.half(), panel = at.rank / (S::CLUSTER / 2), row = at.rank % (S::CLUSTER / 2) * S::BOX_ROWS;
    Stages<S> stage(at);
    // All blocks send something to all in each turn: so none tells another that it has used a stage while one has still
    // to tell this of the turn before.
    auto begin = [&](u32 bytes) {
        stage.wait(S::EMPTY, 1);
        bar_expect(stage.place + S::FULL, bytes);
        return stage.place;
    };
    auto greet = [&](u32 bytes) {
        const u32 to = begin(bytes + S::CLUSTER * 16);
        copy_to_all(to + S::GATES_AT + at.rank * 16, (const uint8_t*)p.order, 16, to + S::FULL, ALL);
        return to;
    };
    auto ask_state = [&](const CUtensorMap& map, int row, bool asked) {
        const u32 place = greet(asked ? 4 * PANEL : 0);
        if (asked) {
            copy_box(place, &map, half * PART, row, place + S::FULL);
            copy_box(place + 2 * PANEL, &map, half * PART + PART / 2, row, place + S::FULL);
        }
        stage.next();
    };
    auto ask_steps = [&](const Pair& pair) {
        ask_state(p.added, pair.first_slot() * WIDTH, true);
        #pragma unroll 1
        for (int i = 0; i < pair.steps(); ++i) {
            const int slot = pair.slot_of(i);
            ask_state(p.added, slot * WIDTH, true);
            const u32 to = begin(4 * PANEL), own = half * 2 * PANEL;
            copy_to_all(to + own, p.matrices + slot * (int64_t)(4 * PANEL) + own, 2 * PANEL, to + S::FULL, ALL);
            stage.next();
        }
    };
    each_part<S::WORK>(p, at, [&](const Pair& pair) {
        const bool values = at.chain && !pair.matrix;
        const u32 bytes = 2 * PANEL + GATES + PANEL * (at.chain + values + 2 * at.outputs);
        const uint8_t* record =
            p.records + ((int64_t)(pair.first / CHUNK + pair.sequence) * p.heads + pair.head) * RECORD;
        if (S::WORK == PIECES && pair.piece) ask_steps(pair);
        else ask_state(p.states, pair.row(p.heads), at.chain && !pair.piece);
        for (int done = 0; done < pair.tokens; done += CHUNK, stage.next(), record += (int64_t)p.heads * RECORD) {
            const int token = pair.first + done, column = pair.head * WIDTH;
            const u32 to = begin(bytes), bar = to + S::FULL;
            copy_box_to_all(to + panel * PANEL + row * 128, &p.k, column + panel * 64, token + row, bar, ALL);
            copy(to + S::GATES_AT, record + SUMS, GATES, bar);
            if (at.chain) copy_to_all(to + S::SOLVED + half * SLICE, record + half * SLICE, SLICE, bar, 3);
            if (values) copy_box(to + S::VALUES, &p.v, column + half * PART, token, bar);
            if (at.outputs)
                copy_box_to_all(to + S::QUERIES + half * PANEL, &p.q, column + half * 64, token, bar, OF_OUTPUTS);
        }
    });
    greet(0);
    if (S::BOTH) stage.next(), greet(0);  // for M
    for (int i = 0; i < S::STAGES; ++i) stage.next(), stage.wait(S::EMPTY, 1);
}

// One thread tells all blocks of the cluster when this one has used a stage. A state that was put there goes to memory
// before. The chain has no time for this, since its next fence may wait for what it tells others.
template <class S> __device__ __forceinline__ void release(const Problem& p, const Places& at) {
    Stages<S> stage(at);
    int row = -1, matrix = -1;
    auto tell = [&] {
        for (u32 block = 0; block < S::CLUSTER; ++block) bar_arrive_there(in_block(stage.place + S::EMPTY, block));
        stage.next();
    };
    auto swapped = [&] {
        stage.wait(S::USED);
        if (S::WORK == CARRY && matrix >= 0) {
            store_bytes(p.matrices + (2 * matrix + at.half()) * (int64_t)(2 * PANEL), stage.place, 2 * PANEL);
            wait_until_read();
        } else if (at.chain && row >= 0) {
            const CUtensorMap* map = S::WORK == CARRY ? &p.added : &p.after;
            store_box(map, at.half() * PART, row, stage.place);
            store_box(map, at.half() * PART + PART / 2, row, stage.place + 2 * PANEL);
            wait_until_read();
        }
        tell();
    };
    each_part<S::WORK>(p, at, [&](const Pair& pair) {
        swapped();
        if (S::WORK == CARRY && !S::BOTH) matrix = pair.matrix ? pair.slot + pair.piece : -1;
        if (S::WORK == CARRY) row = (pair.slot + pair.piece) * WIDTH;
        else row = S::WORK == WHOLE || pair.piece == p.pieces() - 1 ? pair.row(p.heads) : -1;
        for (int i = 0; S::WORK == PIECES && i < 2 * pair.steps(); ++i) stage.wait(S::USED), tell();
        for (int done = 0; done < pair.tokens; done += CHUNK) stage.wait(S::USED), tell();
    });
    swapped();
    if (S::BOTH) {  // M, which piece 0 has none of
        if (blockIdx.y < p.pairs) row = -1;
        else matrix = row / WIDTH;
        swapped();
    }
    if (S::WORK == CARRY) wait_until_written();
}

// One thread sends S and c to the block that makes the outputs of the same columns. The last turns only wait until it
// has used them.
template <class S> __device__ __forceinline__ void send(const Problem& p, const Places& at) {
    Slots<S> slot(at);
    each_part<S::WORK>(p, at, [&](const Pair& pair) {
        for (int done = 0; done < pair.tokens; done += CHUNK, slot.next()) {
            slot.wait(S::READY);
            copy_there(in_block(slot.place, at.rank + 2), slot.place, S::STATES,
                       in_block(slot.place + S::READY, at.rank + 2));
        }
    });
    for (int i = 0; i < S::SLOTS; ++i) slot.wait(S::PASSED, 1), slot.next();
}

// S^T of the thread from a stage (TAKE), and what it had into its place (PUT). Eight columns and four channels of a
// warp meet all banks in the swizzle.
template <bool TAKE, bool PUT> __device__ __forceinline__ void swap(float (&state)[2][32], u32 stage) {
    const int lane = threadIdx.x % 32, column = threadIdx.x / 32 * 16 + lane / 4, channel = lane % 4 * 2;
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = channel + i % 2, part = column % 32 / 4 + i / 2 * 2;
        const u32 at = stage + column / 32 * 2 * PANEL + panel_at(row, part) + column % 4 * 4;
        #pragma unroll
        for (int eight = 0; eight < 16; ++eight) {
            float& own = state[eight / 8][eight % 8 * 4 + i];
            const float next = TAKE ? load_float(at + eight * 8 * 128) : own;
            if (PUT) store_float(at + eight * 8 * 128, own);
            own = next;
        }
    }
}
// The thread's part of the identity.
__device__ __forceinline__ void set_one(float (&state)[2][32], int half, u32 thread) {
    const int lane = threadIdx.x % 32, column = half * PART + thread / 32 * 16 + lane / 4, channel = lane % 4 * 2;
    #pragma unroll
    for (int i = 0; i < 64; ++i) state[i / 32][i % 32] = i / 4 * 8 + channel + i % 2 == column + i % 4 / 2 * 8;
}
// What bf16 does not hold of the sums.
__device__ __forceinline__ void rest_of(u32 (&rest)[4][4], const u32 (&a)[4][4], const float (&d)[32]) {
    #pragma unroll
    for (int i = 0; i < 32; i += 2) {
        const u32 pair = a[i / 8][i % 8 / 2];
        const float first = __uint_as_float(pair << 16), second = __uint_as_float(pair & 0xffff0000u);
        rest[i / 8][i % 8 / 2] = packed(d[i] - first, d[i + 1] - second);
    }
}
// For the thread's 16 tokens.
__device__ __forceinline__ void load_factors(float2 (&factors)[8], u32 from) {
    #pragma unroll
    for (int i = 0; i < 8; ++i) factors[i] = load_floats(from + (8 * i + threadIdx.x % 4 * 2) * 4);
}
// Columns of v as the sums of p^T lie. thread: of the warpgroup.
__device__ __forceinline__ void load_values(float (&values)[32], u32 from, u32 thread) {
    const int lane = threadIdx.x % 32, token = lane / 16 * 8 + lane % 8, part = thread / 32 * 2 + lane / 8 % 2;
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32 v[4];
        ldmatrix_trans(v, from + panel_at(16 * i + token, part));
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
            values[8 * i + 2 * j] = __uint_as_float(v[j] << 16);
            values[8 * i + 2 * j + 1] = __uint_as_float(v[j] & 0xffff0000u);
        }
    }
}
// u^T = v^T - exp(sums) p^T for half of the tokens, as an A; zeros behind the end.
template <int HALF>
__device__ __forceinline__ void subtract_from(u32 (&a)[4][4], const float (&p)[32], const float (&v)[32],
                                              const float2 (&starts)[8], int inside) {
    #pragma unroll
    for (int i = 16 * HALF; i < 16 * HALF + 16; i += 2)
        a[i / 8][i % 8 / 2] = packed(v[i] - starts[i / 4].x * p[i], v[i + 1] - starts[i / 4].y * p[i + 1]);
    if (inside < CHUNK)
        #pragma unroll
        for (int i = 8 * HALF; i < 8 * HALF + 8; ++i) {
            const int token = i / 2 * 8 + threadIdx.x % 4 * 2;
            a[i / 4][i % 4] &= (token < inside ? 0xffff : 0) | (token + 1 < inside ? 0xffff0000u : 0);
        }
}
// c^T exp(last - sums), likewise.
template <int HALF>
__device__ __forceinline__ void scale(u32 (&a)[4][4], const float (&c)[32], const float2 (&ends)[8]) {
    #pragma unroll
    for (int i = 16 * HALF; i < 16 * HALF + 16; i += 2)
        a[i / 8][i % 8 / 2] = packed(c[i] * ends[i / 4].x, c[i + 1] * ends[i / 4].y);
}
// Keys behind the end become zeros, for the product with c: those zeros do not make a NaN one. By all chains.
template <int COUNT> __device__ __forceinline__ void cut_keys(u32 keys, int inside) {
    const int part = threadIdx.x % 16;
    for (int row = inside + threadIdx.x / 16; row < CHUNK; row += COUNT / 16)
        store_zeros(keys + part / 8 * PANEL + panel_at(row, part % 8));
    async_sees(), barrier_of<COUNT>(1);
}
// A warp's flag: the largest of its threads'.
__device__ __forceinline__ void store_flag(uint8_t* flags, int which, u32 flag) {
    const u32 largest = __reduce_max_sync(~0u, flag);
    if (threadIdx.x % 32 == 0) *reinterpret_cast<u32*>(flags + which * 4) = largest;
}

constexpr u32 NONE = ~0u;  // no stage

// The last chunk stands behind the loop: where the loop is left no product may be under way, or ptxas serializes all.
// Where all of an operand would delay a product, half of it is made, then the other under products with the first.
// `stay` waits for the stage; when that is over it keeps what is unpacked under products where it is.
template <class S> __device__ __forceinline__ void chain(const Problem& p, const Places& at) {
    float state[2][32] = {}, change[32];  // S^T; c^T
    float2 ends[8];
    u32 before[2][4][4], operand[4][4];   // S^T as an A; u^T, then c^T with its factors
    Stages<S> stage(at);
    Slots<S> slot(at);
    u32 last = NONE;  // the stage before
    const bool of_matrix = S::BOTH && threadIdx.x >= GROUP;
    const u32 thread = S::BOTH ? threadIdx.x % GROUP : threadIdx.x;
    constexpr int ALL = S::BOTH ? 2 * GROUP : GROUP;
    auto change_of = [&](auto is_first, int inside) {
        float sums[32], values[32];
        float2 starts[8];
        auto stay = [&] { stage.wait(S::FULL); };
        stay();
        auto half_of_sums = [&](auto half) {
            products_but<1>();  // this half of S is there; the other half, or the first products of p, are under way
            hold(state[half]);
            as_operand(before[half], state[half]);
            products_begin();
            product<half == 0>(sums, before[half], stage.place, 4 * half);
            products_end();
        };
        half_of_sums(Number<0>()), half_of_sums(Number<1>());
        if (!is_first || (S::WORK != WHOLE && last != NONE)) arrive_of_warp(last + S::USED);
        const u32 gates = stage.place + S::GATES_AT;
        load_values(values, of_matrix ? at.base + S::STAGING : stage.place + S::VALUES, thread);
        load_factors(starts, gates + GATE);
        const float decay = load_float(gates + 2 * GATE - 4);
        #pragma unroll
        for (int i = 0; i < 64; ++i) state[i / 32][i % 32] *= decay;
        if (inside < CHUNK) cut_keys<ALL>(stage.place, inside);
        if (S::OUTPUTS) {
            slot.wait(S::PASSED, 1);
            store_lines(slot.place, before[0]), store_lines(slot.place, before[1], 4);
        }
        hold(values), stay(), products_but<0>(), hold(sums);
        subtract_from<0>(operand, sums, values, starts, inside);
        products_begin();
        multiply_first(change, operand[0], of_columns(stage.place + S::SOLVED, 0));
        multiply(change, operand[1], of_columns(stage.place + S::SOLVED, 1));
        subtract_from<1>(operand, sums, values, starts, inside);
        products_begin();
        multiply(change, operand[2], of_columns(stage.place + S::SOLVED, 2));
        multiply(change, operand[3], of_columns(stage.place + S::SOLVED, 3));
        products_end();
        load_factors(ends, gates + 2 * GATE);
        products_but<0>(), hold(change);
    };
    auto add_change = [&] {
        auto add = [&](int half, int step) {
            multiply<true>(state[half], operand[step], of_rows(stage.place + half * PANEL, step));
        };
        scale<0>(operand, change, ends);
        products_begin(), hold(state[0]), add(0, 0), add(0, 1);
        scale<1>(operand, change, ends);
        products_begin(), add(0, 2), add(0, 3), products_end();
        products_begin(), hold(state[1]), add(1, 0), add(1, 1), add(1, 2), add(1, 3), products_end();
        if (S::OUTPUTS) {
            u32 plain[4][4];
            as_operand(plain, change);
            store_lines(slot.place + 2 * PANEL, plain);
            async_sees(), arrive_of_warp(slot.place + S::READY);
            slot.next();
        }
        last = stage.place;
        stage.next();
    };
    auto used = [&] { async_sees(), arrive_of_warp(stage.place + S::USED), stage.next(); };
    auto swap_states = [&] { stage.wait(S::FULL), swap<true, true>(state, stage.place), used(); };
    auto skip = [&] { stage.wait(S::FULL), arrive_of_warp(stage.place + S::USED), stage.next(); };
    auto put_found = [&](bool matrix, int slot) {
        u32 flag = 0;
        stage.wait(S::FULL);
        if (matrix) {
            as_operand(before[0], state[0]), as_operand(before[1], state[1]);
            store_lines(stage.place, before[0]), store_lines(stage.place, before[1], 4);
            #pragma unroll
            for (int i = 0; i < 32; ++i) {
                const u32 two = before[i / 16][i % 16 / 4][i % 4];
                flag = max(flag, max(two & 0x7fff0000, two << 16 & 0x7fff0000));
            }
        } else {
            #pragma unroll
            for (int i = 0; i < 64; ++i) flag |= (__float_as_uint(state[i / 32][i % 32]) & 0x7f800000) == 0x7f800000;
            swap<false, true>(state, stage.place);
        }
        used();
        if (SKIP && S::WORK == CARRY) store_flag(p.flags(slot), (matrix ? 0 : 8) + at.half() * 4 + thread / 32, flag);
    };
    // Of a stretch but the first, in carry. For M there is no v: its place is zeros in all stages, where nothing comes.
    auto set_state = [&](bool matrix) {
        stage.wait(S::FULL);
        if (matrix) {
            set_one(state, at.half(), thread);
            #pragma unroll 1
            for (int i = 0; i < S::STAGES; ++i)
                #pragma unroll
                for (int j = 0; j < PANEL; j += GROUP * 16)
                    store_zeros(at.base + i * S::STAGE + S::VALUES + j + threadIdx.x * 16);
            barrier_of<GROUP>(1);
        }
        used();
    };
    // Of both chains of carry; the state before piece 0 is given.
    auto begin_both = [&](bool is_first) {
        if (of_matrix) {
            set_one(state, at.half(), thread);
            #pragma unroll
            for (int i = 0; i < PANEL; i += GROUP * 16) store_zeros(at.base + S::STAGING + i + thread * 16);
            barrier_of<GROUP>(2);
        }
        stage.wait(S::FULL);
        if (of_matrix || !is_first) return used();
        swap<true, false>(state, stage.place);
        last = stage.place, stage.next();
    };
    // The state before, by carry or given. Its stage is freed behind the products that take what was loaded.
    auto take_state = [&] {
        stage.wait(S::FULL);
        swap<true, false>(state, stage.place);
        last = stage.place, stage.next();
    };
    // S = M S + A. S is two operands, of which the second is what the first does not hold.
    auto step = [&] {
        u32 rest[2][4][4];
        #pragma unroll
        for (int half = 0; half < 2; ++half)
            as_operand(before[half], state[half]), rest_of(rest[half], before[half], state[half]);
        const u32 added = stage.place;
        stage.wait(S::FULL);
        swap<true, false>(state, added);
        stage.next(), stage.wait(S::FULL);
        products_begin(), hold(state[0]), hold(state[1]);
        #pragma unroll
        for (int i = 0; i < 16; ++i) {
            const int to = i / 8, from = i / 4 % 2;
            const uint64_t matrix = of_rows(stage.place + (2 * from + to) * PANEL, i % 4);
            multiply<true>(state[to], before[from][i % 4], matrix);
            multiply<true>(state[to], rest[from][i % 4], matrix);
        }
        products_end();
        if (last != NONE) arrive_of_warp(last + S::USED);
        arrive_of_warp(added + S::USED);
        products_but<0>(), hold(state[0]), hold(state[1]);
        arrive_of_warp(stage.place + S::USED);
        last = NONE, stage.next();
    };
    bool matrix = of_matrix;
    int found = 0;  // the number of what the chain finds
    auto begin = [&](const Pair& pair) {
        if (S::WORK == WHOLE) return swap_states();
        last = NONE;
        found = pair.slot + pair.piece;
        if constexpr (S::BOTH) {
            begin_both(!pair.piece);
        } else {
            if (S::WORK == PIECES || !pair.piece) take_state();
            else if (pair.piece % 2) put_found(pair.matrix, found - 1);
            else set_state(pair.matrix);
            matrix = pair.matrix;
        }
        #pragma unroll 1
        for (int i = 0; S::WORK == PIECES && i < pair.steps(); ++i) step();
        if (pair.tokens || last == NONE) return;
        swap<false, true>(state, last);  // takes what was loaded
        async_sees(), arrive_of_warp(last + S::USED);
    };
    if (S::BOTH && of_matrix && blockIdx.y < p.pairs) {  // piece 0 has no M
        skip();
        each_part<S::WORK>(p, at, [&](const Pair& pair) {
            for (int left = pair.tokens; left > 0; left -= CHUNK) {
                stage.wait(S::FULL);
                if (left < CHUNK) cut_keys<ALL>(stage.place, left);
                arrive_of_warp(stage.place + S::USED), stage.next();
            }
        });
        return skip(), skip();
    }
    each_part<S::WORK>(p, at, [&](const Pair& pair) {
        begin(pair);
        if (pair.tokens) {
            int left = pair.tokens;
            change_of(Number<1>(), left);
            for (; left > CHUNK;) {
                add_change();
                left -= CHUNK;
                change_of(Number<0>(), left);
            }
            add_change();
            products_but<0>(), hold(state[0]), hold(state[1]);
            arrive_of_warp(last + S::USED);
        }
    });
    if (S::WORK == WHOLE) return swap_states();
    if (S::BOTH && of_matrix) skip();  // the stage for A
    put_found(matrix, found);
    if (S::BOTH && !of_matrix) skip();
}

// Sums of gates at the thread's rows, row and row + 8.
__device__ __forceinline__ void load_gates(float (&sums)[2], u32 from) {
    const int row = threadIdx.x % GROUP / 32 * 16 + threadIdx.x % 32 / 4;
    sums[0] = load_float(from + row * 4), sums[1] = load_float(from + row * 4 + 32);
}
// From q k^T: times 1 / sqrt(128) = 2^-3.5 and the decay between the two tokens, zeros above the diagonal; as an A.
__device__ __forceinline__ void weigh(u32 (&a)[4][4], const float (&d)[32], const float (&own)[2], u32 sums) {
    const int row = threadIdx.x % GROUP / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    #pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float2 other = load_floats(sums + (8 * i + column) * 4);
        #pragma unroll
        for (int second = 0; second < 2; ++second) {
            const float* pair = d + 4 * i + 2 * second;
            const int ahead = row + 8 * second - column - 8 * i;
            const float start = own[second] - 3.5f;
            a[i / 2][i % 2 * 2 + second] = packed(ahead >= 0 ? pair[0] * power_of_2(start - other.x) : 0,
                                                  ahead >= 1 ? pair[1] * power_of_2(start - other.y) : 0);
        }
    }
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
        if (row < inside)
            *reinterpret_cast<uint4*>(out + row * line + part * 8) = make_uint4(four[0], four[1], four[2], four[3]);
    }
    __syncwarp();
}

// The outputs of a chunk are stored while q k^T of the next one is under way.
template <class S> __device__ __forceinline__ void outputs(const Problem& p, const Places& at) {
    const int64_t line = (int64_t)p.heads * WIDTH;
    u32 queries[8][4], weights[4][4], rows[4][4] = {};  // rows: outputs
    float pairs[32];
    Stages<S> stage(at);
    Slots<S> slot(at);
    auto multiply_pairs = [&] {
        stage.wait(S::FULL);
        load_lines(queries, stage.place + S::QUERIES);
        products_begin();
        product<true>(pairs, queries, stage.place);
        products_end();
    };
    auto sum = [&] {
        float own[2], sums[32];
        slot.wait(S::READY);
        if (S::APART && threadIdx.x == GROUP) bar_expect(slot.place + S::READY, S::STATES);  // the next time
        products_begin();
        product<true>(sums, queries, slot.place);
        products_end(), products_but<1>(), hold(pairs);
        load_gates(own, stage.place + S::GATES_AT);
        weigh(weights, pairs, own, stage.place + S::GATES_AT);
        products_but<0>(), hold(sums);
        const float scales[2] = {power_of_2(own[0] - 3.5f), power_of_2(own[1] - 3.5f)};
        #pragma unroll
        for (int i = 0; i < 32; ++i) sums[i] *= scales[i / 2 % 2];
        products_begin(), hold(sums);
        product<false>(sums, weights, slot.place + 2 * PANEL);
        products_end();
        arrive_of_warp(stage.place + S::USED);  // behind the weights: an arrival does not wait for loads under way
        products_but<0>(), hold(sums);
        as_operand(rows, sums);
        const u32 passed = slot.place + S::PASSED;
        if (!S::APART) arrive_of_warp(passed);
        else if (threadIdx.x % 32 == 0) bar_arrive_there(in_block(passed, at.rank - 2));
        stage.next(), slot.next();
    };
    auto skip_state = [&] { stage.wait(S::FULL), arrive_of_warp(stage.place + S::USED), stage.next(); };
    __nv_bfloat16* out = p.out;
    int inside = 0;  // tokens of the chunk before, whose outputs are not stored yet
    each_part<S::WORK>(p, at, [&](const Pair& pair) {
        for (int i = S::WORK == PIECES ? 2 * pair.steps() : 0; i >= 0; --i) skip_state();
        for (int done = 0; done < pair.tokens; done += CHUNK) {
            multiply_pairs();
            store(at.base + S::STAGING, rows, out, line, inside);
            sum();
            out = p.out + (pair.first + done) * line + pair.head * WIDTH + at.half() * PART;
            inside = pair.tokens - done;
        }
    });
    store(at.base + S::STAGING, rows, out, line, inside);
    skip_state();
}

template <class S> __device__ __forceinline__ Places set_up(u32 base) {
    const u32 rank = rank_in_cluster();
    const bool chain = !S::APART || rank < 2, outputs = S::OUTPUTS && (!S::APART || rank >= 2);
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::STAGES; ++i) {
            const u32 stage = base + i * S::STAGE;
            bar_init(stage + S::FULL, 1), bar_init(stage + S::EMPTY, S::CLUSTER);
            bar_init(stage + S::USED, 4 * (S::BOTH ? 2 : chain + outputs));  // warps
        }
        for (int i = 0; i < S::SLOTS; ++i) {
            const u32 slot = base + S::SLOTS_AT + i * S::SLOT;
            bar_init(slot + S::READY, chain ? 4 : 1), bar_init(slot + S::PASSED, 4);
        }
        fence_init();
        for (int i = 0; i < S::SLOTS && !chain; ++i) bar_expect(base + S::SLOTS_AT + i * S::SLOT + S::READY, S::STATES);
    }
    cluster_barrier();
    return {base, rank, chain, outputs, 0};
}

template <class S> __global__ void __launch_bounds__(THREADS, 1) walk_kernel(const __grid_constant__ Problem p) {
    extern __shared__ __align__(1024) uint8_t memory[];
    Places at = set_up<S>(shared_address(memory));
    if (DEPENDENT) wait_for_before();
    if (DEPENDENT && S::WORK == CARRY) let_walk_start();
    at.skipped = skipped_of<S>(p);
    if (S::BOTH && threadIdx.x < 2 * GROUP) {
        take_registers<OF_BOTH>();
        chain<S>(p, at);
    } else if (S::BOTH) {
        leave_registers<OF_BOTH_THIRD>();
        if (threadIdx.x == 2 * GROUP) produce<S>(p, at);
        if (threadIdx.x == 2 * GROUP + 32) release<S>(p, at);
    } else if (threadIdx.x < GROUP) {
        take_registers<OF_CHAIN>();
        if (at.chain) chain<S>(p, at);
    } else if (threadIdx.x < 2 * GROUP) {
        take_registers<OF_OUTPUTS>();
        if constexpr (S::OUTPUTS)
            if (at.outputs) outputs<S>(p, at);
    } else {
        leave_registers<OF_THIRD>();
        if (threadIdx.x == 2 * GROUP) produce<S>(p, at);
        if (threadIdx.x == 2 * GROUP + 32) release<S>(p, at);
        if constexpr (S::APART)
            if (at.chain && threadIdx.x == 2 * GROUP + 64) send<S>(p, at);
    }
}

}  // namespace walk
"""

LAUNCHER = r"""
// All return 0 or an error of CUDA.
#define MUST(call) do { int error = int(call); if (error) return error; } while (0)

// Leave for a kernel to use its shared memory is asked for once a device. Gives the number of SMs.
constexpr int DEVICES = 64;
template <auto kernel> int prepare(int bytes, int& sms) {
    static int told[DEVICES] = {};
    int device;
    MUST(cudaGetDevice(&device));
    if (device < DEVICES && told[device]) return sms = told[device], 0;
    MUST(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
    MUST(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    MUST(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
    if (device < DEVICES) told[device] = sms;
    return 0;
}

namespace fold {

int launch(const Problem& p, int slots, cudaStream_t stream) {
    int sms;
    MUST(prepare<fold_kernel>(SHARED_BYTES, sms));
    fold_kernel<<<p.sorters() + slots * p.heads, THREADS, SHARED_BYTES, stream>>>(p);
    return cudaGetLastError();
}

}  // namespace fold

namespace walk {

// Boxes of `columns` x `rows` of a tensor in two dimensions, bf16 or fp32; rows past the end are zeros. A row of a box
// is 128 bytes.
int describe(CUtensorMap& map, long long data, bool is_float, long long height, int width, int columns, int rows) {
    static decltype(&cuTensorMapEncodeTiled) encode = nullptr;
    cudaDriverEntryPointQueryResult found;
    if (!encode)
        MUST(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void**)&encode, 12000, cudaEnableDefault,
                                              &found));
    const cuuint64_t sizes[2] = {(cuuint64_t)width, (cuuint64_t)height};
    const cuuint64_t pitch[1] = {(cuuint64_t)width * (is_float ? 4 : 2)};
    const cuuint32_t box[2] = {(cuuint32_t)columns, (cuuint32_t)rows}, step[2] = {1, 1};
    return encode(&map, is_float ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void*)data,
                  sizes, pitch, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

// Given are the addresses of q, k, v, the states before, and after, and of what carry finds, A and then M.
template <class S> int describe_all(Problem& p, const long long (&a)[6], int tokens) {
    const int channels = p.heads * WIDTH;
    const long long rows = (long long)p.pairs * WIDTH;
    MUST(describe(p.q, a[0], false, tokens, channels, 64, CHUNK));
    MUST(describe(p.k, a[1], false, tokens, channels, 64, S::BOX_ROWS));
    MUST(describe(p.v, a[2], false, tokens, channels, PART, CHUNK));
    MUST(describe(p.states, a[3], true, rows, WIDTH, PART / 2, WIDTH));
    MUST(describe(p.after, a[4], true, rows, WIDTH, PART / 2, WIDTH));
    if (S::WORK == WHOLE) return 0;
    return describe(p.added, a[5], true, rows * (p.pieces() - 1), WIDTH, PART / 2, WIDTH);
}

template <class S> int start(const Problem& p, int clusters, cudaStream_t stream) {
    int sms;
    MUST(prepare<walk_kernel<S>>(S::SHARED_BYTES, sms));
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(S::CLUSTER, clusters), config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = S::SHARED_BYTES, config.stream = stream;
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = S::CLUSTER, attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.attrs = attributes, config.numAttrs = DEPENDENT ? 2 : 1;
    return cudaLaunchKernelEx(&config, walk_kernel<S>, p);
}

template <class S> int launch(Problem p, const long long (&a)[6], int tokens, cudaStream_t stream) {
    int sms;
    MUST(prepare<walk_kernel<S>>(S::SHARED_BYTES, sms));
    MUST(describe_all<S>(p, a, tokens));
    const int places = sms / S::CLUSTER;
    p.clusters = p.pairs < places ? p.pairs : places;
    return start<S>(p, p.clusters, stream);
}

int launch_pieces(Problem p, const long long (&a)[6], int tokens, cudaStream_t stream) {
    using Carry = Shape<CARRIED, CARRY>;
    using Pieces = Shape<PIECEWISE, PIECES>;
    static_assert(Carry::CLUSTER == Pieces::CLUSTER, "both take the same boxes");
    MUST(describe_all<Pieces>(p, a, tokens));
    p.matrices = (uint8_t*)a[5] + (long long)p.pairs * (p.pieces() - 1) * STATE_BYTES;
    MUST(start<Carry>(p, p.pairs * (p.pieces() - 1), stream));
    return start<Pieces>(p, p.pairs * p.pieces(), stream);
}

}  // namespace walk

// Given are the addresses of q, k, v, g, beta, states, cu_seqlens, records, order, out and after; tokens, heads,
// sequences, whether beta is fp32, whether cu_seqlens is int64; the stream; the stretches of a sequence, or 0, and the
// address for what carry finds.
int all(const long long (&a)[19]) {
    const int tokens = a[11], heads = a[12], sequences = a[13], pairs = sequences * heads;
    const cudaStream_t stream = (cudaStream_t)a[16];
    if (!pairs) return 0;
    if (!tokens)
        return cudaMemcpyAsync((void*)a[10], (const void*)a[5], (size_t)pairs * WIDTH * WIDTH * 4,
                               cudaMemcpyDeviceToDevice, stream);
    MUST(fold::launch({(const uint16_t*)a[1], (const float*)a[3], (const void*)a[4], (const void*)a[6], (uint8_t*)a[7],
                       (int4*)a[8], heads, sequences, int(a[14]), int(a[15])}, tokens / CHUNK + sequences, stream));
    walk::Problem p = {};
    p.records = (const uint8_t*)a[7], p.order = (const int4*)a[8], p.out = (__nv_bfloat16*)a[9];
    p.heads = heads, p.pairs = pairs, p.stretches = a[17];
    auto* launch = p.stretches ? walk::launch_pieces
                   : pairs > FEW_PAIRS ? walk::launch<walk::Shape<MANY>> : walk::launch<walk::Shape<FEW>>;
    return launch(p, {a[0], a[1], a[2], a[5], a[10], a[18]}, tokens, stream);
}

static PyObject* run(PyObject*, PyObject* const* given, Py_ssize_t) {
    long long a[19];
    for (int i = 0; i < 19; ++i) a[i] = PyLong_AsLongLong(given[i]);
    return PyLong_FromLong(all(a));
}
static PyMethodDef methods[] = {{"run", (PyCFunction)(void*)run, METH_FASTCALL, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "gated_delta_rule", "", -1, methods};
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
            f"gated_delta_rule_records_{name}",
            "",
            text,
            no_implicit_headers=True,
            with_pytorch_error_handling=False,
            extra_cuda_cflags=["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a"],
        ).run
    return _run


def stretches_of(tokens, sequences, heads):
    """Into how many stretches a sequence is cut, each of two pieces; 0: walk takes whole sequences, without carry. All
    clusters of a launch are on the GPU at once."""
    pairs = sequences * heads
    in_pieces = any(low <= pairs <= high and tokens >= least * CHUNK * sequences for low, high, least in PIECES)
    return min(STRETCHES, CLUSTERS // (2 * pairs)) if in_pieces else 0


def dense(x):
    """x, contiguous and at a multiple of 16 bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def rule_of(q, k, v, g, beta, states, cu_seqlens, device):
    """(out, the states after); see reference.py for the shapes. ValueError before a launch where the kernels do not
    serve an input. The offsets' values are on the GPU, and not read here. They must go from 0 to the number of tokens
    and not descend: tokens outside leave rows of out unset, a sequence of fewer than 0 tokens makes walk wait for ever,
    and offsets below 0 or beyond the tokens make the kernels read, and walk write, outside of the tensors."""
    shape, sequences = q.shape, len(states)
    tokens, heads, width = shape
    chunks = (tokens // CHUNK + sequences) * heads  # at least as many as there are
    if not shape == k.shape == v.shape or not shape[:2] == g.shape == beta.shape:
        raise ValueError("q, k and v must have one shape, and g and beta that of their heads")
    if states.shape != (sequences, heads, WIDTH, WIDTH) or cu_seqlens.shape != (sequences + 1,):
        raise ValueError("states must be (sequences, heads, 128, 128), and cu_seqlens (sequences + 1)")
    if width != WIDTH:
        raise ValueError("the kernel is written for K = V = 128")
    if chunks >= MOST_CHUNKS:
        raise ValueError(f"the kernel is written for fewer than {MOST_CHUNKS} chunks of all heads")
    if not q.dtype == k.dtype == v.dtype == torch.bfloat16 or not g.dtype == states.dtype == torch.float32:
        raise ValueError("the kernel is written for q, k and v in bf16, g and the states in fp32")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError("cu_seqlens must be int32 or int64")
    if any(x.get_device() != device for x in (k, v, g, beta, states, cu_seqlens)):
        raise ValueError("q, k, v, g, beta, states and cu_seqlens must be on one device")
    if not q.is_cuda:
        raise ValueError("q, k, v, g, beta, states and cu_seqlens must be on a GPU")
    q, k, v, states, g = dense(q), dense(k), dense(v), dense(states), g.contiguous()
    beta = (beta if beta.dtype == torch.bfloat16 else beta.float()).contiguous()
    offsets = cu_seqlens.contiguous()
    out, after = torch.empty_like(v), torch.empty_like(states)
    stretches = stretches_of(tokens, sequences, heads)
    found = sequences * heads * (2 * stretches - 1) * FOUND if stretches else 0
    size = chunks * RECORD
    # Records, what carry finds, and the order of the sequences.
    records = torch.empty(size + found + 16 * sequences, dtype=torch.uint8, device=v.device)
    at = records.data_ptr()
    pointers = [x.data_ptr() for x in (q, k, v, g, beta, states, offsets)]
    flags = int(beta.dtype == torch.float32), int(offsets.dtype == torch.int64)
    places = (at, at + size + found, out.data_ptr(), after.data_ptr())
    rest = (stream_of(device), stretches, at + size)
    error = (_run or built())(*pointers, *places, tokens, heads, sequences, *flags, *rest)
    if error:
        raise RuntimeError(f"gated delta rule: CUDA error {error}")
    return out, after


def kernel_function(q, k, v, g, beta, states, cu_seqlens):
    device = q.get_device()
    if q.is_cuda and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return rule_of(q, k, v, g, beta, states, cu_seqlens, device)
    return rule_of(q, k, v, g, beta, states, cu_seqlens, device)
