"""Mean cross-entropy and its gradient over the logits, CUDA C++ for pairs of blocks (compute capability 9.0).

A row of 128,256 numbers does not fit into the shared memory of a multiprocessor, half a row does. So a cluster of two
blocks takes a row, and walks over its rows:
 * One warp of the first block takes rows from a counter in global memory, two rows ahead, so that a fast pair takes
   more. It sends each to both blocks, and writes zeros over a row without a target.
 * One warp of each block only copies. Shared memory is a ring of pieces; bulk copies bring them, up to three quarters
   of a row ahead.
 * The other warps add up the exponentials of a piece when it arrives. Each sends its sum to both blocks, as a store
   that an mbarrier counts.
 * Then they write the gradient over the pieces in the ring. A bulk copy takes a piece away, and the next one takes its
   place when the copy has read it. So a row is read from global memory once, and no barrier of the block is waited for.
Other rows, dtypes and addresses take a kernel of two walks.
"""

import functools

import torch
import triton
import triton.language as tl
from torch.utils.cpp_extension import load_inline

IGNORED = -100
LINES = 896  # of 16 bytes in a piece; a multiple of 8, so that copies begin at multiples of 128 bytes
WARPS = 28  # that compute; 30 at most
KEEP = 1  # 1: exponentials are kept in bf16 between the walks, and rounded twice; 0: computed twice
LEAD = 2  # rows that a pair takes from the queue ahead of the loads
MOST_SLOTS = 64  # pieces in the ring, at most
LOADS = 2  # the L2 shall drop, 1: logits before other lines, 2: other lines before logits
STORES = 1  # the same of gradients
BESIDE = 1  # 1: a piece of this row's gradient is written beside each piece of the next row's sum, not all before it
UNREAD = 32768  # bytes of stores that may still read their pieces while the next ones are waited for
MOST_BYTES = 232448  # of shared memory of a block
BESIDE_PIECES = 3072  # bytes of struct Shared, at most
SLOTS = min(MOST_SLOTS, (MOST_BYTES - BESIDE_PIECES) // (16 * LINES))
LOG2_E = tl.constexpr(1.4426950408889634)

DECLARATION = """
#include <pybind11/pybind11.h>
#include <cstdint>
void cross_entropy(int64_t logits, int64_t target, int64_t loss, uint32_t rows, uint32_t lines, uint32_t pairs, int64_t stream);
"""

PRIMITIVES = r"""
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>
#include <stdexcept>
#include <string>

typedef uint32_t u32;
typedef uint64_t u64;

__device__ __forceinline__ u32 address(const void* shared) { return (u32)__cvta_generic_to_shared(shared); }
__device__ __forceinline__ u32 cluster_rank() { u32 r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
__device__ __forceinline__ void barrier_init(u64* barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(address(barrier)), "r"(count) : "memory");
}
__device__ __forceinline__ void barriers_are_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(address(barrier)) : "memory");
}
__device__ __forceinline__ void arrive_and_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(address(barrier)), "r"(bytes) : "memory");
}
// Until the phase of this parity is over.
__device__ __forceinline__ void wait(u64* barrier, u32 parity) {
    u32 over;
    do
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(over) : "r"(address(barrier)), "r"(parity) : "memory");
    while (!over);
}
// The same, and what another block of the cluster stored before it arrived is seen.
__device__ __forceinline__ void wait_for_cluster(u64* barrier, u32 parity) {
    u32 over;
    do
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(over) : "r"(address(barrier)), "r"(parity) : "memory");
    while (!over);
}
__device__ __forceinline__ u64 policy(int order) {
    u64 p = 0;
    if (order == 1) asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p));
    if (order == 2) asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(p));
    return p;
}
__device__ __forceinline__ void bulk_load(void* to, const void* from, u32 bytes, u64* barrier, u64 policy) {
    if (LOADS)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                     :: "r"(address(to)), "l"(from), "r"(bytes), "r"(address(barrier)), "l"(policy) : "memory");
    else
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     :: "r"(address(to)), "l"(from), "r"(bytes), "r"(address(barrier)) : "memory");
}
__device__ __forceinline__ void bulk_store(void* to, const void* from, u32 bytes, u64 policy) {
    if (STORES)
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;"
                     :: "l"(to), "r"(address(from)), "r"(bytes), "l"(policy) : "memory");
    else
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" :: "l"(to), "r"(address(from)), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until at most PENDING of this thread's stores have yet to read shared memory.
template <int PENDING> __device__ __forceinline__ void stores_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(PENDING) : "memory");
}
__device__ __forceinline__ void stores_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
__device__ __forceinline__ void bulk_prefetch(const void* from, u32 bytes) {   // into the L2
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(from), "r"(bytes) : "memory");
}
// What was written to shared memory shall be seen by bulk copies.
__device__ __forceinline__ void written_for_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Store to the same place of block `rank` of the cluster; its barrier counts the 8 bytes.
__device__ __forceinline__ void send(float2* to, float2 value, u64* barrier, u32 rank) {
    u64 bits = (u64)__float_as_uint(value.y) << 32 | __float_as_uint(value.x);
    asm volatile("{\n.reg .b32 there, counter;\nmapa.shared::cluster.u32 there, %0, %3;\nmapa.shared::cluster.u32 counter, %2, %3;\n"
                 "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [there], %1, [counter];\n}"
                 :: "r"(address(to)), "l"(bits), "r"(address(barrier)), "r"(rank) : "memory");
}
// Store to the same place of block `rank` of the cluster, then arrive at its barrier.
__device__ __forceinline__ void store_and_arrive(void* to, u32 low, u32 high, u64* barrier, u32 rank) {
    asm volatile("{\n.reg .b32 there, counter;\nmapa.shared::cluster.u32 there, %0, %4;\nmapa.shared::cluster.u32 counter, %3, %4;\n"
                 "st.shared::cluster.v2.b32 [there], {%1, %2};\nmbarrier.arrive.release.cluster.shared::cluster.b64 _, [counter];\n}"
                 :: "r"(address(to)), "r"(low), "r"(high), "r"(address(barrier)), "r"(rank) : "memory");
}
__device__ __forceinline__ void threads_that_compute_meet() { asm volatile("bar.sync 1, %0;" :: "n"(32 * WARPS) : "memory"); }
__device__ __forceinline__ float exp2_of(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ u32 pair_of(float low, float high) {
    u32 pair; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low)); return pair;
}
__device__ __forceinline__ u32 larger_of_pairs(u32 a, u32 b) {
    u32 pair; asm("max.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b)); return pair;
}
// a * (high + low), rounded once
__device__ __forceinline__ u32 product_of_pairs(u32 a, u32 high, u32 low) {
    u32 pair;
    asm("{\n.reg .b32 rest;\nmul.rn.bf16x2 rest, %1, %3;\nfma.rn.bf16x2 %0, %1, %2, rest;\n}" : "=r"(pair) : "r"(a), "r"(high), "r"(low));
    return pair;
}
"""

KERNEL = r"""
constexpr int THREADS = 32 * WARPS;   // that compute
constexpr int VECTORS = (LINES + THREADS - 1) / THREADS;   // of a thread in a piece
constexpr u32 PIECE = 16 * LINES;     // bytes
// Stores, of UNREAD bytes together, that may still read their pieces while the next ones are waited for.
constexpr int LAG = UNREAD / PIECE < SLOTS ? UNREAD / PIECE : SLOTS - 1;
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
constexpr float LOWEST = -1e30f;      // below all numbers, and finite: differences are no NaN
constexpr float MOST_ABOVE = 32.f;    // an exponential is 2**32 at most, so that sums of them fit fp32
constexpr u32 NOTHING = 0xff80ff80u;  // -inf twice
constexpr float NOT_HERE = 3.4028235e38f;   // no bf16
constexpr u32 NO_ROW = 0xffffffffu;   // after the last one
// Rows that both blocks of a pair can look up. A row is taken LEAD rows ahead of the first block's loads. Those are SLOTS
// rows at most ahead of what both blocks have added up, and the copies out of either block SLOTS rows at most behind it.
constexpr u32 DEPTH = 64;

struct __align__(8) Row { u32 row, own; };
struct Shared {
    u64 full[SLOTS], written[SLOTS], sums_are_here[2], row_is_here[DEPTH], row_is_asked[LEAD];
    float2 sums[2][2 * WARPS];        // of even and odd rows: (shift, sum of 2**(x log2(e) - shift)) of each warp of the pair
    Row rows[DEPTH];
    u32 counted[WARPS];
};
static_assert(sizeof(Shared) <= BESIDE_PIECES && SLOTS * PIECE + BESIDE_PIECES <= MOST_BYTES && LAG > 0, "shared memory");
static_assert(DEPTH >= 2 * SLOTS + LEAD && LEAD > 0, "a row must be read by all before another takes its place");
static_assert(THREADS + 64 <= 1024 && LINES % 8 == 0, "a block has 1024 threads at most");

struct Cursor {   // walks over the pieces of all rows of a block, which lie in the ring in this order
    u32 turn = 0, piece = 0, slot = 0, parity = 0;
    __device__ void next(u32 pieces) {
        if (++piece == pieces) { piece = 0; ++turn; }
        if (++slot == SLOTS) { slot = 0; parity ^= 1; }
    }
};

// The block's half of each row: `lines` of 16 bytes from `start` on; rows are `stride` lines apart.
struct Half {
    uint4* start; u32 stride, lines, first;   // first: the row's number at which it begins
    __device__ u32 pieces() const { return (lines + LINES - 1) / LINES; }
    __device__ u32 lines_of(u32 piece) const { return min((u32)LINES, lines - piece * LINES); }
    __device__ uint4* at(u32 row, u32 piece) const { return start + (u64)row * stride + piece * LINES; }
};

__device__ __forceinline__ float low_of(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float largest_of_warp(float x) {
    for (int step = 16; step; step >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}
__device__ __forceinline__ float sum_of_warp(float x) {
    for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}
// The sums of the warp's lanes, as one.
__device__ __forceinline__ float2 together(float2 own) {
    float shift = largest_of_warp(own.x);
    return make_float2(shift, sum_of_warp(own.y * exp2_of(own.x - shift)));
}

// How many rows have a target. Of the threads that compute.
__device__ u32 count_rows(const int64_t* target, u32 rows, Shared& s) {
    u32 own = 0, counted = 0;
#pragma unroll 8
    for (u32 row = threadIdx.x; row < rows; row += THREADS) own += target[row] != IGNORED;
    own = __reduce_add_sync(0xffffffffu, own);
    if (threadIdx.x % 32 == 0) s.counted[threadIdx.x / 32] = own;
    threads_that_compute_meet();
    for (u32 warp = 0; warp < WARPS; ++warp) counted += s.counted[warp];
    return counted;
}

// The row of a turn of the pair, and its target; NO_ROW after the last one.
__device__ __forceinline__ Row row_of(u32 turn, Shared& s) {
    wait_for_cluster(&s.row_is_here[turn % DEPTH], turn / DEPTH & 1);
    return s.rows[turn % DEPTH];
}

// The warp of a pair that takes its rows: LEAD fixed ones, then from the queue, each when the first block asks for the
// row LEAD turns before it. `lines`: of a row.
__device__ void take_rows(uint4* logits, const int64_t* target, u32* queue, u32 rows, u32 lines, u32 pair, u32 pairs, Shared& s) {
    const u32 lane = threadIdx.x % 32;
    u32 taken = 0;
    for (u32 turn = 0;; ++turn) {
        if (turn >= LEAD) wait(&s.row_is_asked[turn % LEAD], (turn / LEAD - 1) & 1);
        u32 row, own;
        while (true) {
            row = taken < LEAD ? taken * pairs + pair : LEAD * pairs + (lane ? 0 : atomicAdd(queue, 1u));
            row = __shfl_sync(0xffffffffu, row, 0);
            ++taken;
            const int64_t its = row < rows ? target[row] : 0;
            own = (u32)its;
            if (row >= rows || its != IGNORED) break;
            for (u32 line = lane; line < lines; line += 32) logits[(u64)row * lines + line] = make_uint4(0, 0, 0, 0);
        }
        if (row >= rows) row = NO_ROW;
        if (lane < 2) store_and_arrive(&s.rows[turn % DEPTH], row, own, &s.row_is_here[turn % DEPTH], lane);
        if (row == NO_ROW) return;
    }
}

// The thread that copies: pieces into the ring, gradients out of it.
__device__ void copy(const Half& half, u32 rank, unsigned char* ring, Shared& s) {
    const u32 pieces = half.pieces();
    const u64 in_hint = policy(LOADS), out_hint = policy(STORES);
    Cursor in, out;
    u32 asked = 0, row = 0;
    auto ask = [&](u32 most) {
        for (; asked < most && row != NO_ROW; ++asked, in.next(pieces)) {
            if (in.piece == 0) {
                row = row_of(in.turn, s).row;
                if (row == NO_ROW) break;
                if (rank == 0) arrive(&s.row_is_asked[in.turn % LEAD]);
            }
            const u32 bytes = 16 * half.lines_of(in.piece);
            arrive_and_expect(&s.full[in.slot], bytes);
            bulk_load(ring + in.slot * PIECE, half.at(row, in.piece), bytes, &s.full[in.slot], in_hint);
        }
    };
    ask(SLOTS);
    for (u32 stored = 1; stored <= asked; ++stored, out.next(pieces)) {
        wait(&s.written[out.slot], out.parity);
        bulk_store(half.at(s.rows[out.turn % DEPTH].row, out.piece), ring + out.slot * PIECE, 16 * half.lines_of(out.piece), out_hint);
        // the next row, or beside each other this one's next piece, may need every slot before it gives one back
        if (BESIDE ? pieces + LAG > SLOTS : out.piece + 1 == pieces) {
            stores_read<0>();
            ask(stored + SLOTS);
        } else {
            stores_read<LAG>();
            ask(stored + SLOTS - LAG);
        }
    }
    stores_done();
}

// The larger of each of the pairs' two numbers, of all of them.
template <int N> __device__ __forceinline__ float largest(const uint4 (&x)[N]) {
    u32 top = NOTHING;
#pragma unroll
    for (int v = 0; v < N; ++v)
        top = larger_of_pairs(top, larger_of_pairs(larger_of_pairs(x[v].x, x[v].y), larger_of_pairs(x[v].z, x[v].w)));
    return fmaxf(low_of(top), high_of(top));
}
// 2**(x log2(e) - off) of both numbers, and added to `sum`.
__device__ __forceinline__ u32 powers(u32 x, float off, float2& sum) {
    const float low = exp2_of(fmaf(low_of(x), LOG2E, -off)), high = exp2_of(fmaf(high_of(x), LOG2E, -off));
    sum.x += low;
    sum.y += high;
    return pair_of(low, high);
}
__device__ __forceinline__ uint4 powers(uint4 x, float off, float2& sum) {
    return make_uint4(powers(x.x, off, sum), powers(x.y, off, sum), powers(x.z, off, sum), powers(x.w, off, sum));
}
// A factor as two numbers in bf16, each twice: what its rounding leaves over comes second.
struct Factor {
    u32 high, low;
    __device__ explicit Factor(float x) { high = pair_of(x, x); const float rest = x - low_of(high); low = pair_of(rest, rest); }
    __device__ u32 times(u32 x) const { return product_of_pairs(x, high, low); }
    __device__ uint4 times(uint4 x) const { return make_uint4(times(x.x), times(x.y), times(x.z), times(x.w)); }
};

// Multiply the exponentials that this thread wrote over the pieces from `at` on, to refer them to a new shift.
__device__ __noinline__ void rescale(Half half, Cursor at, u32 pieces, float factor, unsigned char* ring) {
    const Factor by(factor);
    for (; at.piece < pieces; at.next(half.pieces())) {
        uint4* lines = reinterpret_cast<uint4*>(ring + at.slot * PIECE);
        for (u32 line = threadIdx.x; line < half.lines_of(at.piece); line += THREADS) lines[line] = by.times(lines[line]);
    }
}

// Add a piece, when it has arrived, to the thread's sum over a row's half. KEEP: the exponentials are written over the
// logits, in bf16. own: a number of the half, whose logit is put into own_logit by the thread that meets it.
// start: where the row starts.
__device__ __forceinline__ void add_piece(float2& sum, const Half& half, const Cursor& start, const Cursor& at, u32 own,
                                          float& own_logit, unsigned char* ring, Shared& s) {
    uint4* lines = reinterpret_cast<uint4*>(ring + at.slot * PIECE);
    const u32 count = half.lines_of(at.piece), own_line = own / 8 - at.piece * LINES;
    uint4 x[VECTORS];
    wait(&s.full[at.slot], at.parity);
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const u32 line = v * THREADS + threadIdx.x;
        x[v] = line < count ? lines[line] : make_uint4(NOTHING, NOTHING, NOTHING, NOTHING);
        if (line < count && line == own_line) own_logit = low_of(reinterpret_cast<unsigned short*>(lines + line)[own % 8]);
    }
    const float highest = largest(x) * LOG2E;
    if (highest > sum.x + MOST_ABOVE) {
        const float factor = exp2_of(sum.x - highest);
        if (KEEP && sum.y > 0) rescale(half, start, at.piece, factor, ring);
        sum = make_float2(highest, sum.y * factor);
    }
    float2 both = make_float2(0, 0);
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const u32 line = v * THREADS + threadIdx.x;
        const uint4 power = powers(x[v], sum.x, both);
        if (KEEP && line < count) lines[line] = power;
    }
    sum.y += both.x + both.y;
}

// A row's gradient: 2**(x log2(e) - off), but `own_gradient` at number `own` of the half, if it has that many. KEEP: of
// what is in the ring, `factor` times as much.
struct Gradient { float off, factor; u32 own; float own_gradient; };

__device__ __forceinline__ void write_piece(const Half& half, const Cursor& at, const Gradient& g, unsigned char* ring, Shared& s) {
    const Factor by(g.factor);
    uint4* lines = reinterpret_cast<uint4*>(ring + at.slot * PIECE);
    const u32 count = half.lines_of(at.piece), own_line = g.own / 8 - at.piece * LINES;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const u32 line = v * THREADS + threadIdx.x;
        if (line < count) {
            float2 unused = make_float2(0, 0);
            lines[line] = KEEP ? by.times(lines[line]) : powers(lines[line], g.off, unused);
            if (line == own_line)
                reinterpret_cast<unsigned short*>(lines + line)[g.own % 8] = (unsigned short)pair_of(g.own_gradient, 0.f);
        }
    }
    written_for_copies();
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(&s.written[at.slot]);
}

// The sum of all warps of the pair. buffer, parity: of the row's turn.
__device__ __forceinline__ float2 sum_of_row(float2 own, u32 rank, u32 buffer, u32 parity, Shared& s) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    own = together(own);
    if (threadIdx.x == 0) arrive_and_expect(&s.sums_are_here[buffer], sizeof s.sums[0]);
    if (lane < 2) send(&s.sums[buffer][rank * WARPS + warp], own, &s.sums_are_here[buffer], lane);
    wait(&s.sums_are_here[buffer], parity);
    float2 all = lane < 2 * WARPS ? s.sums[buffer][lane] : make_float2(LOWEST, 0);
    if (lane + 32 < 2 * WARPS) {
        const float2 more = s.sums[buffer][lane + 32];
        const float higher = fmaxf(all.x, more.x);
        all = make_float2(higher, all.y * exp2_of(all.x - higher) + more.y * exp2_of(more.x - higher));
    }
    return together(all);
}

// The threads that compute. Returns the sum of the losses whose targets this thread has met.
__device__ float compute(const Half& half, float count, u32 rank, unsigned char* ring, Shared& s) {
    const u32 pieces = half.pieces();
    const float log_count = log2f(count);
    float losses = 0;
    Cursor in, out;
    Gradient g{};
    for (u32 turn = 0;; ++turn) {
        const Row row = row_of(turn, s);
        if (row.row == NO_ROW) break;
        const u32 own = row.own - half.first;   // a large number where it is in the other half
        float own_logit = NOT_HERE;
        float2 sum = make_float2(LOWEST, 0);
        const Cursor start = in;
        for (u32 piece = 0; piece < pieces; ++piece, in.next(pieces)) {
            if (BESIDE && turn) { write_piece(half, out, g, ring, s); out.next(pieces); }
            add_piece(sum, half, start, in, own, own_logit, ring, s);
        }
        const float2 all = sum_of_row(sum, rank, turn & 1, turn / 2 & 1, s);
        const float shift = all.x + log2f(all.y), off = shift + log_count;
        g = Gradient{off, exp2_of(sum.x - off), own, (exp2_of(fmaf(own_logit, LOG2E, -shift)) - 1.f) / count};
        if (own_logit != NOT_HERE) losses += shift * LN2 - own_logit;
        if (!BESIDE) for (u32 piece = 0; piece < pieces; ++piece, out.next(pieces)) write_piece(half, out, g, ring, s);
    }
    if (BESIDE && in.turn) for (u32 piece = 0; piece < pieces; ++piece, out.next(pieces)) write_piece(half, out, g, ring, s);
    return losses;
}

// `part`: lines of a row that the first block of a pair takes.
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS + 64, 1) loss_and_gradient(
        uint4* logits, const int64_t* __restrict__ target, float* loss, u32* queue, u32 rows, u32 lines, u32 part) {
    extern __shared__ __align__(128) unsigned char ring[];
    Shared& s = *reinterpret_cast<Shared*>(ring + SLOTS * PIECE);
    const u32 rank = cluster_rank(), pair = blockIdx.x / 2, pairs = gridDim.x / 2;
    const Half half{logits + rank * part, lines, rank ? lines - part : part, rank * part * 8};
    if (threadIdx.x == THREADS) {
        for (int slot = 0; slot < SLOTS; ++slot) { barrier_init(&s.full[slot], 1); barrier_init(&s.written[slot], WARPS); }
        for (int buffer = 0; buffer < 2; ++buffer) barrier_init(&s.sums_are_here[buffer], 1);
        for (u32 turn = 0; turn < DEPTH; ++turn) barrier_init(&s.row_is_here[turn], 1);
        for (u32 turn = 0; turn < LEAD; ++turn) barrier_init(&s.row_is_asked[turn], 1);
        barriers_are_made();
        if (pair < rows)   // the first rows of all pairs
            for (u32 piece = 0; piece < half.pieces(); ++piece) bulk_prefetch(half.at(pair, piece), 16 * half.lines_of(piece));
    }
    __syncwarp();
    cluster_sync();   // the barriers of both blocks are made
    if (threadIdx.x == THREADS) copy(half, rank, ring, s);
    if (threadIdx.x >= THREADS + 32 && rank == 0) take_rows(logits, target, queue, rows, lines, pair, pairs, s);
    if (threadIdx.x < THREADS) {
        const float counted = (float)count_rows(target, rows, s);
        const float losses = sum_of_warp(compute(half, counted, rank, ring, s));
        if (threadIdx.x % 32 == 0) atomicAdd(loss, losses / counted);   // NaN if none counts
    }
    __syncwarp();
    cluster_sync();   // no block ends while the other may send to it
}
"""

LAUNCH = r"""
static void must(cudaError_t error) {
    if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

void cross_entropy(int64_t logits, int64_t target, int64_t loss, u32 rows, u32 lines, u32 pairs, int64_t stream) {
    const u32 part = (lines / 2 + 7) / 8 * 8;   // both halves begin at multiples of 128 bytes of the row
    must(cudaFuncSetAttribute(loss_and_gradient, cudaFuncAttributeMaxDynamicSharedMemorySize, MOST_BYTES));
    must(cudaMemsetAsync((void*)loss, 0, 8, (cudaStream_t)stream));   // and the queue behind it
    loss_and_gradient<<<2 * pairs, THREADS + 64, MOST_BYTES, (cudaStream_t)stream>>>(
        (uint4*)logits, (const int64_t*)target, (float*)loss, (u32*)loss + 1, rows, lines, part);
    must(cudaGetLastError());
}
"""


@triton.jit
def two_walks(logits, target, losses, count, classes, IGNORED: tl.constexpr, BLOCK: tl.constexpr):
    """A program a row, which walks over it twice: for rows that the pairs do not take."""
    row = tl.program_id(0)
    own = tl.load(target + row)
    counted = own != IGNORED
    logits += row.to(tl.int64) * classes
    chosen = tl.load(logits + tl.where(counted, own, 0)).to(tl.float32)
    read = tl.where(counted, classes, 0)
    at = tl.arange(0, BLOCK)
    top, total = -1e30, 0.0
    for start in range(0, read, BLOCK):
        value = tl.load(logits + start + at, start + at < read, -float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(value, 0))
        total = total * tl.exp2((top - higher) * LOG2_E) + tl.sum(tl.exp2((value - higher) * LOG2_E), 0)
        top = higher
    for start in range(0, classes, BLOCK):
        value = tl.load(logits + start + at, start + at < read, 0.0).to(tl.float32)
        gradient = tl.exp2((value - top) * LOG2_E) / total - tl.where(start + at == own, 1.0, 0.0)
        gradient = tl.where(counted, gradient / tl.load(count), 0.0)
        tl.store(logits + start + at, gradient.to(logits.dtype.element_ty), start + at < classes)
    tl.store(losses + row, tl.where(counted, top + tl.log(total) - chosen, 0.0))


def by_two_walks(logits, target):
    rows, classes = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    count = (target != IGNORED).sum().float()
    if rows:
        two_walks[(rows,)](logits, target, losses, count, classes, IGNORED=IGNORED, BLOCK=2048)
    return losses.sum() / count


def cuda_source():
    names = ("LINES", "WARPS", "KEEP", "LEAD", "LOADS", "STORES", "BESIDE", "UNREAD", "MOST_BYTES")
    names += ("BESIDE_PIECES", "SLOTS", "IGNORED")
    return "".join(f"#define {name} {globals()[name]}\n" for name in names) + PRIMITIVES + KERNEL + LAUNCH


@functools.cache
def built():
    return load_inline(
        f"cross_entropy_queue_{LINES}_{WARPS}_{KEEP}_{LEAD}_{SLOTS}_{LOADS}_{STORES}_{BESIDE}_{UNREAD}",
        DECLARATION,
        cuda_source(),
        functions=["cross_entropy"],
        no_implicit_headers=True,
        with_pytorch_error_handling=False,
        extra_cuda_cflags=["-O3", "-std=c++17", "-gencode=arch=compute_90,code=sm_90"],
    )


@functools.cache
def pairs_of(device):
    return torch.cuda.get_device_properties(device).multi_processor_count // 2


def by_pairs(logits, target):
    loss = torch.empty(2, dtype=torch.float32, device=logits.device)  # and the queue: a number of this call alone
    rows, classes = logits.shape
    stream = torch.cuda.current_stream(logits.device).cuda_stream
    with torch.cuda.device(logits.device):
        pairs, pointers = pairs_of(logits.device), (logits.data_ptr(), target.data_ptr(), loss.data_ptr())
        built().cross_entropy(*pointers, rows, classes // 8, pairs, stream)
    return loss[0]


def kernel_function(logits, target):
    if not logits.is_contiguous():
        raise ValueError("logits must be contiguous: they are changed in place")
    (rows, classes), target = logits.shape, target.contiguous()
    by_lines = logits.dtype == torch.bfloat16 and classes % 8 == 0 and logits.data_ptr() % 16 == 0
    fits = 4096 <= classes <= 2 * SLOTS * LINES * 8 - 128 and logits.is_cuda and target.dtype == torch.int64
    if by_lines and fits and 0 < rows < 2**31:
        return by_pairs(logits, target)
    return by_two_walks(logits, target)
