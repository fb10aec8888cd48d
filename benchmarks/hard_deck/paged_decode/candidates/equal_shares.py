"""Paged GQA decode in one launch, CUDA C++: shares that cross from one request, and from one kv head, into the next.

 * The tiles of 16 tokens of all kv heads and requests stand in one row. Each block, as many as the GPU holds at a time,
   takes an equal piece of it, whole steps of its warps; the host reads no length. Where parts of that size that end with
   their request fit too, they are taken: those of one request are then fewer.
 * Each warp walks its tiles of the piece on its own: asynchronous copies of 16 bytes into a ring of its own, which go on
   over the end of a request. The page of each tile was read ahead, 32 tiles at a time, a tile a lane.
 * The query heads of the group are the rows of the products, padded to 16; softmax and its running maximum stay in
   registers; the weights go into the second product as they lie.
 * At the end of a request in a piece, the warps' sums are merged by their maxima, through the slots of their rings that
   each has just read. A request that lies in several pieces has a part of each in global memory. The block that counts
   last merges them: a counter says which, and wraps to zero for the next call. No block waits for another.
 * While the first tiles are on their way, the code of a step and of a merge runs once for nothing: its instructions are
   then in the SM's cache when they are needed.
Rows behind a request's length are filled with zeros, never read."""

import functools

import torch
from torch.utils.cpp_extension import load_inline

try:
    from torch._C import _cuda_getCurrentRawStream as stream_of  # makes no torch.cuda.Stream
except ImportError:

    def stream_of(device):
        return torch.cuda.current_stream(device).cuda_stream


SPACE = [
    {},
    {"WARPS": 4, "BLOCKS": 2},
    {"WARM": 0},
    {"WARM": 1},
    {"WARM": 3},
    {"WARPS": 12, "STAGES": 2},
    {"WARPS": 4, "STAGES": 2, "BLOCKS": 3},
    {"TOUCH": 0},
    {"CHAINS": 2},
    {"MERGED": 8},
    {"PROBE": "no cache"},
    {"PROBE": "no last merge"},
]
WARPS = 8
STAGES = 3  # tiles of a warp in flight at width 128, twice as many at 64
BLOCKS = 1  # of a multiprocessor; all are there at a time
MERGED = 4  # parts that a thread of the last block asks for at once
TOUCH = 1  # 1: a thread also loads a sector of the table, which puts it into the L1; it prefetches a line into the L2
CHAINS = 1  # sums of a tile's scores that do not wait for each other
WARM = 2  # run for nothing while the first tiles come, 1: a step, 2: also a merge of the warps, 3: also one of parts
PROBE = ""  # one of PROBES: what such a kernel leaves out shows what the rest takes
PROBES = ("", "no cache", "no last merge")

CUDA_SRC = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <limits.h>
#include <stdint.h>

typedef uint32_t u32;
constexpr int TILE = 16;   // tokens of a warp's step
constexpr int ROWS = 16;   // query heads of a product
constexpr int AT_ONCE = MERGED_;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ float reciprocal(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ void copy_async(u32 to, const void* from, bool there) {   // zeros where nothing is there
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wait_for_all_but() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}
__device__ __forceinline__ void load_transposed(u32 (&r)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {   // 16 x 8 += 16 x 16 by 16 x 8
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ float power2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ u32 pair_of(float low, float high) {
    __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<u32*>(&both);
}
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" :: "l"(p)); }
// atomicInc; what the block wrote is there before it, and what others wrote before they counted is seen after it.
__device__ __forceinline__ unsigned count_in_order(unsigned* counter, unsigned last) {
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(last) : "memory");
    return before;
}
enum { NO_CACHE = 1, NO_LAST_MERGE };   // probes

struct Task {
    const __nv_bfloat16 *query, *cache;
    const int *table, *lengths;
    __nv_bfloat16* out;
    float* parts;         // two of each block: rows x D values, then rows x (maximum, sum), padded
    unsigned* counters;   // of each request, kv head and tile of query heads: parts that are there; zero between calls
    int requests, kv_heads, group, page, columns, row_tiles, page_shift;   // page_shift: a page holds TILE << page_shift tokens, if WHOLE
    float scale;          // of the scores, in base 2
};

__device__ __forceinline__ int tiles_of(int length) { return max((length + TILE - 1) >> 4, 1); }   // no token: an empty tile

// A request at one kv head and tile of query heads. Its tiles `start` to `upto` count from the first of the block's share.
struct Segment { int request, head, row_tile, start, upto, length; };

// What a block does: `own` tiles, at most the `equal` ones of each block, that begin behind the segment `before`.
struct Share { int equal, own; Segment before; };

__device__ __forceinline__ void go_on(const Task& t, Segment& s) {
    if (++s.request == t.requests) {
        s.request = 0;
        if (++s.head == t.kv_heads) { s.head = 0; ++s.row_tile; }
    }
    s.length = __ldg(t.lengths + s.request);
    s.start = s.upto;
    s.upto += tiles_of(s.length);
}

// The share of this block; every lane of a warp gets it.
template <int WARPS> __device__ __forceinline__ Share share_of(const Task& t) {
    int lane = threadIdx.x & 31;
    auto tiles_at = [&](int r) { return r < t.requests ? tiles_of(__ldg(t.lengths + r)) : 0; };
    unsigned total = 0, parts = 0, streams = t.kv_heads * t.row_tiles;
#pragma unroll 2
    for (int r = lane; r < t.requests; r += 32) total += tiles_at(r);
    total = __reduce_add_sync(0xffffffffu, total);
    unsigned equal = (total * streams + gridDim.x - 1) / gridDim.x;
    equal = (equal + WARPS - 1) / WARPS * WARPS;
#pragma unroll 1
    for (int r = lane; r < t.requests; r += 32) parts += (tiles_at(r) + equal - 1) / equal;
    parts = __reduce_add_sync(0xffffffffu, parts);
    bool aligned = parts * streams <= gridDim.x;   // each request has blocks of its own
    unsigned stream = aligned ? parts * equal : total, first = blockIdx.x * equal, end = stream * streams;
    if (first >= end) return {};
    int passed = first / stream, offset = first - passed * stream, before = 0;
    int head = passed, row_tile = 0;
#pragma unroll 1
    for (; head >= t.kv_heads; head -= t.kv_heads) ++row_tile;
#pragma unroll 1
    for (int at = 0; at < t.requests; at += 32) {
        int tiles = tiles_at(at + lane), span = aligned ? (tiles + equal - 1) / equal * equal : tiles, upto = span;
#pragma unroll
        for (int step = 1; step < 32; step <<= 1) {
            int left = __shfl_up_sync(0xffffffffu, upto, step);
            if (lane >= step) upto += left;
        }
        unsigned there = __ballot_sync(0xffffffffu, before + upto > offset);
        if (there) {
            int from = __ffs(there) - 1, start = before + __shfl_sync(0xffffffffu, upto - span, from) - offset;
            int rest = aligned ? start + __shfl_sync(0xffffffffu, tiles, from) : end - first;
            return {(int)equal, min((int)equal, rest), {at + from - 1, head, row_tile, start, start, 0}};
        }
        before += __shfl_sync(0xffffffffu, upto, 31);
    }
    return {};
}

// A running softmax: the maximum and sum of row lane / 4 and, with R of 2, of row lane / 4 + 8; and this lane's part of
// the weighted values. With R of 1 the rows from 8 on are zeros, and stay so.
template <int D, int R> struct Softmax {
    float top[R], sum[R], value[D / 8][4];
    __device__ __forceinline__ Softmax() : sum{}, value{} {
        for (int r = 0; r < R; ++r) top[r] = -INFINITY;
    }
};

// Where a lane's chunks of a tile lie: a row holds 2 D numbers, K and V, in chunks of 16 bytes that are permuted by row.
template <int D> __device__ __forceinline__ u32 place(int row, int chunk) { return row * 4 * D + ((chunk ^ (row & 7)) << 4); }

// One tile: scores, weights, values. `tokens`: how many of the 16 exist.
template <int D, int R> __device__ __forceinline__ void step(Softmax<D, R>& state, const u32 (&query)[D / 16][4], u32 tile, int tokens, float scale) {
    int lane = threadIdx.x & 31;
    float score[2][4], chain[CHAINS_][2][4] = {};
    int row = (lane >> 4) * 8 + (lane & 7), half = (lane >> 3) & 1;
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
        u32 keys[4];
        load_matrices(keys, tile + place<D>(row, 2 * k + half));
        multiply(chain[k % CHAINS_][0], query[k], keys[0], keys[1]);
        multiply(chain[k % CHAINS_][1], query[k], keys[2], keys[3]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        score[i / 4][i % 4] = chain[0][i / 4][i % 4];
#pragma unroll
        for (int other = 1; other < CHAINS_; ++other) score[i / 4][i % 4] += chain[other][i / 4][i % 4];
    }
    float scaled[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
        float top = -INFINITY;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float& one = score[i >> 1][2 * r + (i & 1)];
            one = (i >> 1) * 8 + (lane & 3) * 2 + (i & 1) < tokens ? one * scale : -INFINITY;
            top = fmaxf(top, one);
        }
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(state.top[r], fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2)));
        scaled[r] = power2(state.top[r] - top);
        state.top[r] = top;
        state.sum[r] *= scaled[r];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float& one = score[i >> 1][2 * r + (i & 1)];
            one = power2(one - top);
            state.sum[r] += one;
        }
    }
    u32 weights[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (i % 2 < R) weights[i] = pair_of(score[i / 2][2 * (i % 2)], score[i / 2][2 * (i % 2) + 1]);
    row = half * 8 + (lane & 7);
#pragma unroll
    for (int n = 0; n < D / 8; n += 2) {
        u32 values[4];
        load_transposed(values, tile + place<D>(row, D / 8 + n + (lane >> 4)));
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            float(&sum)[4] = state.value[n + m];
#pragma unroll
            for (int i = 0; i < 2 * R; ++i) sum[i] *= scaled[i / 2];
            multiply(sum, weights, values[2 * m], values[2 * m + 1]);
        }
    }
}

// Copy a tile of which `tokens` exist into shared memory. It begins at row `first` of the cache where a page holds whole
// tiles, else at token `first`, and the table is read row by row.
template <int D, bool WHOLE> __device__ __forceinline__ void fetch(const Task& t, const int* table, int first, int tokens, int head, u32 tile) {
    int lane = threadIdx.x & 31;
    constexpr int CHUNKS = D / 4, AT_ONCE = 32 / CHUNKS;   // chunks of a row, rows of one instruction
    int chunk = lane % CHUNKS;
    int64_t stride = (int64_t)t.kv_heads * 2 * D;   // from a token to the next
    const __nv_bfloat16* base = t.cache + head * 2 * D + chunk * 8;
    const __nv_bfloat16* line = WHOLE ? base + (int64_t)(unsigned)(first + lane / CHUNKS) * stride : base;
#pragma unroll
    for (int i = 0; i < TILE; i += AT_ONCE) {
        int row = i + lane / CHUNKS, token = first + row;
        bool there = row < tokens;
        if (!WHOLE) line = there ? base + ((int64_t)table[token / t.page] * t.page + token % t.page) * stride : base;
        copy_async(tile + place<D>(row, chunk), line, there);
        if (WHOLE) line += AT_ONCE * stride;   // behind the length still in the page
    }
}

__device__ __forceinline__ void add_part(float4& v, float& sum, float4 other, float2 stat, float top) {
    float weight = stat.x == -INFINITY ? 0.f : power2(stat.x - top);   // no token counts nothing
    sum += stat.y * weight;
    v.x += other.x * weight; v.y += other.y * weight; v.z += other.z * weight; v.w += other.w * weight;
}

// Where a warp's result lies in a slot of its ring: rows of D floats, permuted by row. `column`: an even one.
template <int D> __device__ __forceinline__ int sum_place(int row, int column) { return row * D + (column ^ ((row & 7) << 3)); }

// The block's warps' sums of a segment become results, or a part that the last block of the segment merges with others.
// `slot`: where in its ring the warp's sums lie, -1: it has none; `stat`: their maxima and sums. Not `real`: for nothing.
template <int D, int R, int WARPS, int STAGES> __device__ __forceinline__ void merge(const Task& t, const Share& share, const Segment& now, int slot, const float2 (&stat)[R], bool real) {
    constexpr int TILE_BYTES = TILE * 4 * D;
    extern __shared__ __align__(128) char memory[];
    __shared__ float2 stats[WARPS][ROWS];   // maximum and sum of each row
    __shared__ int slots[WARPS];
    __shared__ bool is_last;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#pragma unroll
    for (int r = 0; r < R; ++r)
        if (lane % 4 == 0) stats[warp][lane / 4 + 8 * r] = make_float2(slot < 0 ? -INFINITY : stat[r].x, stat[r].y);
    if (lane == 0) slots[warp] = slot;
    __syncthreads();
    int first_row = now.row_tile * ROWS, units = min(ROWS, t.group - first_row) * (D / 4), most_rows = min(ROWS, t.group);   // a unit: four results
    bool whole = now.start >= 0 && now.upto <= share.equal;   // no other block has tiles of it
    int64_t size = (int64_t)most_rows * (D + 4);              // of a part: a multiple of 16 bytes
    float* part = t.parts + (2 * blockIdx.x + (now.start > 0)) * size;
    __nv_bfloat16* out = t.out + (((int64_t)now.request * t.kv_heads + now.head) * t.group + first_row) * D;
    auto write = [&](int unit, float4 v, float sum) {
        float factor = sum == 0.f ? 0.f : reciprocal(sum);   // no token: zeros
        if (real) *reinterpret_cast<uint2*>(out + unit * 4) = make_uint2(pair_of(v.x * factor, v.y * factor), pair_of(v.z * factor, v.w * factor));
    };
#pragma unroll 1
    for (int unit = threadIdx.x; unit < units; unit += WARPS * 32) {   // merge the warps
        int r = unit / (D / 4), c = unit % (D / 4) * 4;
        float top = -INFINITY, sum = 0.f;
        float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) top = fmaxf(top, stats[w][r].x);
#pragma unroll 4
        for (int w = 0; w < WARPS; ++w)
            if (slots[w] >= 0)
                add_part(v, sum, *reinterpret_cast<const float4*>(memory + (w * STAGES + slots[w]) * TILE_BYTES + sum_place<D>(r, c) * 4), stats[w][r], top);
        if (whole) { write(unit, v, sum); continue; }
        if (!real) continue;
        *reinterpret_cast<float4*>(part + unit * 4) = v;
        if (c == 0) *reinterpret_cast<float2*>(part + most_rows * D + 2 * r) = make_float2(top, sum);
    }
    __syncthreads();   // from here on the slots may be filled again, and the block's part is there
    if (PROBE_ == NO_LAST_MERGE || (real ? whole : WARM_ < 3)) return;
    int before = max(-now.start, 0), blocks_before = real ? (before + share.equal - 1) / share.equal : 0;   // tiles, blocks
    int from = blockIdx.x - blocks_before, to = blockIdx.x + (real ? (now.upto - 1) / share.equal : 0);     // all its blocks
    int odd = now.start > 0 || before < blocks_before * share.equal;   // in the first block, another request is before it
    if (threadIdx.x == 0) {
        unsigned* counter = t.counters + (now.row_tile * t.kv_heads + now.head) * t.requests + now.request;
        is_last = !real || count_in_order(counter, to - from) == to - from;
    }
    __syncthreads();
    if (!is_last) return;
#pragma unroll 1
    for (int unit = threadIdx.x; unit < units; unit += WARPS * 32) {
        int r = unit / (D / 4);
        float top = -INFINITY, sum = 0.f;
        float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
        for (int p = from; p <= to; p += AT_ONCE) {
            float2 its[AT_ONCE];
            float4 other[AT_ONCE];
            float larger = top;
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {   // behind the last part it is the last one again
                const float* of = t.parts + (2 * min(p + i, to) + (p + i == from ? odd : 0)) * size;
                its[i] = __ldcg(reinterpret_cast<const float2*>(of + most_rows * D + 2 * r));
                other[i] = __ldcg(reinterpret_cast<const float4*>(of + unit * 4));
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) larger = fmaxf(larger, its[i].x);
            float factor = top == -INFINITY ? 0.f : power2(top - larger);
            v.x *= factor; v.y *= factor; v.z *= factor; v.w *= factor; sum *= factor;
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
                if (p + i <= to) add_part(v, sum, other[i], its[i], larger);
            top = larger;
        }
        write(unit, v, sum);
    }
}

// Blocks: as many as the GPU holds at a time.
template <int D, int R, int WARPS, int STAGES, bool WHOLE> __global__ void __launch_bounds__(WARPS * 32, BLOCKS_) decode(const Task t) {
    constexpr int TILE_BYTES = TILE * 4 * D;
    extern __shared__ __align__(128) char memory[];
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = lane >> 2, column = (lane & 3) * 2;
    int entries = t.requests * t.columns, touched = 0;
    if (threadIdx.x * 32 < entries) prefetch(t.table + threadIdx.x * 32);   // while the lengths come
    if (TOUCH_) {   // the block's part of the table, if the lengths are alike, and what lies around it
        float at = (float)(blockIdx.x * t.kv_heads * t.row_tiles) / gridDim.x;
        int from = max(min((int)((at - floorf(at)) * entries) - WARPS * 128, entries - WARPS * 256), 0) & ~7;
        if (from + threadIdx.x * 8 < entries) touched = __ldg(t.table + from + threadIdx.x * 8);
    }
    Share share = share_of<WARPS>(t);
    if (share.own <= 0 || (TOUCH_ && (touched & share.equal) == INT_MIN)) return;   // the latter never: it keeps the load
    Segment now = share.before, ahead = now;   // of the sums, and of the pages that were read
    int first = 0, what = 0, whose = 0;        // a lane's tile: see fetch; tokens + 32 x kv head; request
    auto plan = [&](int number) {              // the warp's 32 tiles from `number` on, a tile a lane
        int tile = warp + (number + lane) * WARPS, last = min(share.own - 1, warp + (number + 31) * WARPS);
        what = 0;
        while (true) {
            int token = (tile - ahead.start) * TILE, tokens = min(TILE, ahead.length - token);
            if (tile >= ahead.start && tile < min(ahead.upto, share.own) && tokens > 0) {
                what = ahead.head * 32 + tokens;
                whose = ahead.request;
                first = token;
                int line = (tile & 31) * 64;   // one of its queries
                if (line < t.group * D) prefetch(t.query + ((int64_t)whose * t.kv_heads + ahead.head) * t.group * D + line);
                if (WHOLE) first = __ldg(t.table + (int64_t)whose * t.columns + (tile - ahead.start >> t.page_shift)) * t.page + (token & (t.page - 1));
            }
            if (ahead.upto > last) break;
            go_on(t, ahead);
        }
    };
    plan(0);
    u32 ring = shared_address(memory) + warp * STAGES * TILE_BYTES;
    u32 query[D / 16][4] = {};
    Softmax<D, R> state;
    bool has = false;   // the warp has tokens of this segment
    // The first turns only fetch, and then there may be one for the cache of instructions. One copy of the code serves all.
#pragma unroll 1
    for (int turn = -STAGES - (WARM_ > 0); ; ++turn) {
        int tile = warp + turn * WARPS, slot = max(turn, 0) % STAGES;
        if (turn >= 0) {
            wait_for_all_but<STAGES - 1>();
            __syncwarp();
        }
        int tokens = turn < 0 ? 0 : now.length - (tile - now.start) * TILE;
        if (PROBE_ != NO_CACHE && (tokens > 0 || (WARM_ && turn == -1))) step<D, R>(state, query, ring + slot * TILE_BYTES, tokens, t.scale);
        has |= tokens > 0;
        __syncwarp();
        if (turn >= -1 && min(now.upto, share.own) <= tile + WARPS) {   // the warp's next tile is not of this segment
            float* mine = reinterpret_cast<float*>(memory + (warp * STAGES + slot) * TILE_BYTES);
            float2 stat[R];
#pragma unroll
            for (int r = 0; r < R; ++r) {
                float sum = state.sum[r];
                sum += __shfl_xor_sync(0xffffffffu, sum, 1);
                sum += __shfl_xor_sync(0xffffffffu, sum, 2);
                stat[r] = make_float2(state.top[r], sum);
                if (has)
#pragma unroll
                    for (int n = 0; n < D / 8; ++n)
                        *reinterpret_cast<float2*>(mine + sum_place<D>(row + 8 * r, n * 8 + column)) = make_float2(state.value[n][2 * r], state.value[n][2 * r + 1]);
            }
#pragma unroll 1
            while (true) {
                bool real = now.upto > 0;   // the segment before the share is not
                if (real || WARM_ >= 2) merge<D, R, WARPS, STAGES>(t, share, now, has ? slot : -1, stat, real);
                if (now.upto >= share.own) return;
                go_on(t, now);
                has = false;
                if (min(now.upto, share.own) > tile + WARPS) break;
            }
            state = Softmax<D, R>();
            int rows = min(ROWS, t.group - now.row_tile * ROWS);
            const __nv_bfloat16* queries = t.query + (((int64_t)now.request * t.kv_heads + now.head) * t.group + now.row_tile * ROWS) * D + column;
            auto two = [&](int r, int offset) {   // rows behind the last are the last again: no one reads their results
                return r < R ? __ldg(reinterpret_cast<const u32*>(queries + min(row + 8 * r, rows - 1) * D + offset)) : 0;
            };
#pragma unroll
            for (int k = 0; k < D / 16; ++k) {
                query[k][0] = two(0, 16 * k); query[k][1] = two(1, 16 * k);
                query[k][2] = two(0, 16 * k + 8); query[k][3] = two(1, 16 * k + 8);
            }
        }
        if (WARM_ && turn == -1) continue;
        int next = turn + STAGES + (WARM_ && turn < 0);
        if (next > 0 && (next & 31) == 0) plan(next);
        int there = __shfl_sync(0xffffffffu, what, next & 31), from = __shfl_sync(0xffffffffu, first, next & 31);
        int request = WHOLE ? 0 : __shfl_sync(0xffffffffu, whose, next & 31);
        if (PROBE_ != NO_CACHE && there)
            fetch<D, WHOLE>(t, t.table + (int64_t)request * t.columns, from, there & 31, there >> 5, ring + next % STAGES * TILE_BYTES);
        commit();
    }
}

template <int D, int R, bool WHOLE> cudaError_t launch(const Task& t, int blocks, cudaStream_t stream) {
    auto* kernel = decode<D, R, WARPS_, STAGES_ * (128 / D), WHOLE>;
    int bytes = WARPS_ * STAGES_ * TILE * 4 * 128, device = 0;
    static bool prepared[64] = {};   // by device
    cudaGetDevice(&device);
    if (!prepared[device & 63]) {
        cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        if (error) return error;
        prepared[device & 63] = true;
    }
    kernel<<<blocks, WARPS_ * 32, bytes, stream>>>(t);
    return cudaGetLastError();
}

static PyObject* run(PyObject*, PyObject* const* given, Py_ssize_t count) {
    long long a[15];
    for (int i = 0; i < 15; ++i) a[i] = PyLong_AsLongLong(given[i]);
    Task t = {(const __nv_bfloat16*)a[0], (const __nv_bfloat16*)a[1], (const int*)a[2], (const int*)a[3], (__nv_bfloat16*)a[4], (float*)a[5],
              (unsigned*)a[6], (int)a[7], (int)a[8], (int)a[9], (int)a[11], (int)a[12], (int)(a[9] + ROWS - 1) / ROWS, 0, 1.44269504f / sqrtf((float)a[10])};
    bool whole = a[11] >= TILE && (a[11] & (a[11] - 1)) == 0;
    while (TILE << t.page_shift < t.page) ++t.page_shift;
    auto of_width = [&](auto* few, auto* many, auto* by_rows) { return !whole ? by_rows : a[9] <= 8 ? few : many; };
    auto* chosen = a[10] == 128 ? of_width(launch<128, 1, true>, launch<128, 2, true>, launch<128, 2, false>)
                                : of_width(launch<64, 1, true>, launch<64, 2, true>, launch<64, 2, false>);
    return PyLong_FromLong(chosen(t, (int)a[13], (cudaStream_t)a[14]));
}
static PyMethodDef methods[] = {{"run", (PyCFunction)(void*)run, METH_FASTCALL, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "paged_decode", "", -1, methods};
#define INIT(name) PyInit_##name
#define INIT_OF(name) INIT(name)
PyMODINIT_FUNC INIT_OF(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
"""

_run = None
_counters = {}  # by device and stream; every call leaves them at zero


def built():
    """The extension's launcher, built once per process."""
    global _run
    if _run is None:
        flags = ["-O3", "-gencode=arch=compute_90,code=sm_90", "-gencode=arch=compute_90,code=compute_90"]
        numbers = {"WARPS": WARPS, "STAGES": STAGES, "BLOCKS": BLOCKS, "MERGED": MERGED, "TOUCH": TOUCH}
        numbers |= {"CHAINS": CHAINS, "WARM": WARM, "PROBE": PROBES.index(PROBE)}
        _run = load_inline(
            name="paged_decode_shares_" + "_".join(map(str, numbers.values())),
            cpp_sources="",
            cuda_sources=CUDA_SRC,
            no_implicit_headers=True,
            extra_cuda_cflags=[*flags, *(f"-D{name}_={number}" for name, number in numbers.items())],
        ).run
    return _run


@functools.cache
def slots(device):
    """Blocks that share the tokens."""
    return BLOCKS * torch.cuda.get_device_properties(device).multi_processor_count


def counters(device, stream, number):
    """A graph gets its own: it writes their zeros when it runs, and may run beside calls, or after ours have been replaced."""
    graph = torch.cuda.is_current_stream_capturing()
    own = None if graph else _counters.get((device, stream))
    if own is None or own.numel() < number:
        own = torch.zeros(number, dtype=torch.int32, device=f"cuda:{device}")
        if not graph:
            _counters[device, stream] = own
    return own


def kernel_function(query, cache, table, lengths):
    requests, heads, width = query.shape
    kv_heads, both = cache.shape[2:]
    if query.dtype != torch.bfloat16 or cache.dtype != torch.bfloat16 or width not in (64, 128) or both != 2 * width:
        raise ValueError("bfloat16 heads of 64 or 128 values are served")
    if table.dtype != torch.int32 or lengths.dtype != torch.int32 or not cache.is_cuda or heads % kv_heads:
        raise ValueError("tables and lengths must be int32, the cache on a GPU, and the heads whole groups")
    if not cache.is_contiguous() or cache.data_ptr() % 16:
        raise ValueError("the cache must be contiguous, and aligned to 16 bytes")
    if not (query.is_contiguous() and table.is_contiguous() and lengths.is_contiguous()) or query.data_ptr() % 4:
        query, table, lengths = query.contiguous().clone(), table.contiguous(), lengths.contiguous()
    out = query.new_empty((requests, heads, width))
    if not out.numel():
        return out
    if requests > 30_000:
        raise ValueError("at most 30000 requests are served")
    device = query.get_device()
    if device == torch.cuda.current_device():
        launch(query, cache, table, lengths, out, device)
    else:
        with torch.cuda.device(device):
            launch(query, cache, table, lengths, out, device)
    return out


def launch(query, cache, table, lengths, out, device):
    requests, heads, width = query.shape
    _, page, kv_heads, _ = cache.shape
    stream, blocks, group = stream_of(device), slots(device), heads // kv_heads
    parts = torch.empty(2 * blocks * min(group, 16) * (width + 4), dtype=torch.float32, device=query.device)
    error = (_run or built())(
        query.data_ptr(),
        cache.data_ptr(),
        table.data_ptr(),
        lengths.data_ptr(),
        out.data_ptr(),
        parts.data_ptr(),
        counters(device, stream, requests * kv_heads * -(-group // 16)).data_ptr(),
        requests,
        kv_heads,
        group,
        width,
        page,
        table.shape[1],
        blocks,
        stream,
    )
    if error:
        raise RuntimeError(f"CUDA error {error}")
