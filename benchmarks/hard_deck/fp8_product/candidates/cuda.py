"""fp8 product in CUDA C++ for Hopper: 256 x 192 tiles in clusters, one consumer behind the other.

With BK=128, STAGES=3, LAG=1 it is the kernel of examples/fp8_product, from an H200, 2026-11-27: right on all workloads.
An earlier form ran on an H100 SXM that day: three workloads were right, k = 4127 ended in an illegal instruction in
every configuration. No configuration of SPACE spills, none has serialized wgmma. Its tiles and its launcher are tested on a
stand-in for CUDA's runtime too.

 * More than 64 rows: after examples/int8_linear. A producer warp, two consumers, a ring across tiles, the result by
   stmatrix and TMA. A cluster is CM x CN blocks, which share w and x by multicast.
 * LAG: in its first tile the second consumer starts some steps late. It stays late, so one multiplies while the other
   stores. Without it both end a tile at once, and the tensor cores wait for both epilogues.
 * Narrow tiles at the right even the last wave. The host chooses how many columns of tiles are narrow.
 * Rows that are no whole 16 bytes (k = 4127) are copied to such rows first, as in cluster.py. The earlier form had 16
   tensor maps an operand instead, and boxes that began at any byte. compute-sanitizer puts the illegal instruction at
   the first of those loads, on that H100, with the maps among the kernel's parameters; in the GPU's memory it failed
   too. The address that TMA reads from must be a multiple of 16 bytes, coordinates included
   (https://github.com/triton-lang/triton/issues/7385). The form with the copy has run on an H200.
 * Up to 64 rows: the transposed product, each block walks all of k, as in cluster.py; 256 of k a step (PANELS).
 * Sums stay in the tensor cores: the task allows an rms error of 0.01, they have 0.0021 to 0.0026 (README.md).

Waves, computed for 66 clusters of two. A column here is 256 rows of it, for one block:

| tile | 4096^3: columns of the busiest block, of the mean | n = 14336 |
|---|---|---|
| 256 x 192, none narrow | 576, 497 (86 %) | 1920, 1738 (91 %) |
| 256 x 192, of a cluster 128 tiles and 64 narrow ones; 576 and 32 | 512 (97 %) | 1792 (97 %) |
| 128 x 256, 256 x 128 | 512 (97 %) | 1792 (97 %) |

Predictions, us, cold, on an H100 SXM, and what came of them there, explored in turn, in the earlier form; best: BK=128,
STAGES=3, LAG=1, a row of 128 bytes a step:

| workload | Triton's kernel before | predicted | measured: default, best, Triton's | best over Triton's | 137 or 481 GFLOP at 1700 TFLOPS, over the waves |
|---|---|---|---|---|---|
| 4096^3 | 99 to 101 | 96 | 101.3, 99.8, 100.6 | 1.039x (1.015 to 1.067) | 80.8 / 0.97 = 83 |
| n = 14336 | 328 to 330 | 319 | 323.3, 321.7, 329.5 | 1.027x (1.023 to 1.029) | 283 / 0.97 = 292 |
| k = 4127 | 146 | 108; with the copy 145 | fails, fails, 145.4 | - | 81.4 / 0.97 = 84 |
| 32 rows | 22.4 | 22.4 | 28.5, 28.6, 29.0 | 1.023x (0.981 to 1.076) | 67 MB at 3026 GB/s: 22.2 |

On an H200, this form, in turn; "best" as above:

| workload | default, best, Triton's, library | best over Triton's | no epilogue, no loads |
|---|---|---|---|
| 4096^3 | 98.3, 97.9, 98.9, 98.9 | 1.010x of medians, within the noise | 69.4, 91.6 |
| n = 14336 | 320.4, 318.8, 327.8, 321.7 | 1.029x (1.021 to 1.203) | 225.6, 301.2 |
| k = 4127 | 126.5, 128.5, 144.4, 190.5; LAG=0 125.6 | 1.122x (1.022 to 1.162) | 107.9, 117.4 |
| 32 rows | 22.9, 22.7, 21.7, 22.5 | 1.050x (0.981 to 1.099) | - |

k = 4127 was predicted too slow: the copy costs 28 to 31 us, Triton's 45. The rest is of the H100.

So half of the gain came at n = 14336 and less at 4096^3. LAG=0 is as fast as LAG=1 (100.7 and 323.3), which was the
sign that the power cap alone limits: 1605 MHz in the lead. Probes: no epilogue 85 and 274, no loads 93 and 302.

How: a multiprocessor does 4096 multiplications a cycle, so 512 columns take 131,072 cycles and 1792 take 458,752. Add 3
to 4 % for the ring, 3000 cycles until the first operand, 2500 for the last epilogue: 141,800 and 478,000. At 1.54 GHz,
the clock of the H100's profile of Triton's kernel, these are 92 and 310 us. The power cap is taken to eat half of the
gain. k = 4127 was taken for 33 steps in place of 32 and 8 % more sectors. With the copy it is Triton's 145, whose copy takes as long.
Probes: "no epilogue" 94, "no loads" 90 at 4096^3; LAG=0 2 us more, 128 x 256 1 us more. If LAG=0 is as fast, the power
cap alone limits, and no schedule reaches 88 % of the bare tensor operations.
"""

import torch
from torch.utils.cpp_extension import load_inline

try:
    from torch._C import _cuda_getCurrentRawStream as stream_of  # makes no torch.cuda.Stream
except ImportError:

    def stream_of(device):
        return torch.cuda.current_stream(device).cuda_stream


SPACE = [
    {},
    {"LAG": 0},
    {"LAG": 2},
    {"GROUP": 8},
    {"HINTS": 0, "PANELS": 1},
    {"STAGES": 7, "SLOTS": 1},
    {"BK": 128, "STAGES": 3, "LAG": 1},
    {"CM": 2},
    {"BM": 128, "BN": 256, "CM": 2, "CN": 1, "STAGES": 8, "SLOTS": 2},
    {"BM": 128, "BN": 256, "CM": 2, "CN": 1, "STAGES": 8, "SLOTS": 2, "LAG": 0},
    {"BM": 128, "BN": 256, "CM": 2, "CN": 1, "STAGES": 4, "SLOTS": 2, "BK": 128, "LAG": 2},
    {"BN": 128, "NARROW": 64, "STAGES": 8, "SLOTS": 2},
    {"PROBE": "no loads"},
    {"PROBE": "no epilogue"},
]
BM = 256  # rows of a block's tile; a consumer warpgroup has half of them
BN = 192  # its columns
CM = 1  # blocks of a cluster along rows, which share rows of w
CN = 2  # blocks along columns, which share rows of x
BK = 64  # of k in a step: a row of the swizzle
STAGES = 6  # of the ring of operands
SLOTS = 3  # of 64 x 64 of the result that a warpgroup stages
NARROW = 128  # columns of a block's narrow tile
HINTS = 2  # 1: the result leaves the L2 first; 2: also, x leaves it last
GROUP = 16  # rows of tiles that are walked together
LAG = 4  # steps that the second consumer starts behind the first
PANELS = 2  # of 128 of k in a step with few rows
PROBE = ""  # "no loads": no operand arrives after the first STAGES steps; "no epilogue": no result leaves
PROBES = ("", "no loads", "no epilogue")


def wgmma(n):
    """m64 n k32 of e4m3: n / 2 sums a thread, both operands in shared memory; `keep` 0 overwrites the sums."""
    half = n // 2
    sums, operands = ", ".join(f"%{i}" for i in range(half)), ", ".join(f'"+f"(d[{i}])' for i in range(half))
    return f"""__device__ __forceinline__ void multiply(float (&d)[{half}], uint64_t a, uint64_t b, int keep) {{
    asm volatile("{{.reg .pred p; setp.ne.b32 p, %{half + 2}, 0; "
                 "wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3 {{{sums}}}, %{half}, %{half + 1}, p, 1, 1;}}"
                 : {operands} : "l"(a), "l"(b), "r"(keep));
}}
"""


CUDA = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>
#include <string.h>

typedef uint32_t u32;
enum Probe { WHOLE, NO_LOADS, NO_EPILOGUE };
constexpr u32 MOST_SHARED = 232448, SLOT_BYTES = 64 * 64 * 2;
constexpr u32 divisor(u32 a, u32 b) { return b ? divisor(b, a % b) : a; }

// What a kernel is made of: a block's tile and ring, the blocks of its cluster, the columns of its narrow tiles.
template <int M, int N, int K, int COUNT, int DOWN, int ACROSS, int FEWER>
struct Plan {
    static constexpr int BM = M, BN = N, BK = K, STAGES = COUNT, CM = DOWN, CN = ACROSS, NARROW = FEWER, HALVES = M / 128, CLUSTER = CM * CN;
    static constexpr u32 X_BYTES = M * K, W_BYTES = N * K, STAGE_BYTES = X_BYTES + W_BYTES, RING_BYTES = COUNT * STAGE_BYTES;
    static constexpr int W_BOX = divisor(N / DOWN, FEWER / DOWN);  // rows of w that a load brings
    static_assert(M % 128 == 0 && N % 64 == 0 && FEWER % 64 == 0 && FEWER <= N && (K == 64 || K == 128) && STAGE_BYTES % 1024 == 0, "tiles");
};
typedef Plan<BM_, BN_, BK_, STAGES_, CM_, CN_, NARROW_> Tight;  // rows of whole 16 bytes
constexpr int THREADS = 384;
constexpr u32 TIGHT_BYTES = Tight::RING_BYTES + 2 * SLOTS_ * SLOT_BYTES + 8 * BN_ + 16 * STAGES_;
static_assert(TIGHT_BYTES <= MOST_SHARED, "shared memory of a block");

// Tiles of the clusters: `wide` of CM * BM rows and CN * BN columns, from the left, then `narrow` of CN * NARROW columns. Wide ones are
// dealt in turn, `group` rows of tiles together; `late` clusters get one more of them, and `few` narrow ones each, the others `more`.
struct Shape { int rows, columns, steps, group, lag, clusters, row_tiles, wide, narrow, late, few, more; };

template <class P> struct Tiles {
    int number, end, row, column;
    bool part;
    __host__ __device__ __forceinline__ explicit Tiles(int cluster) : number(cluster), end(0), row(0), column(0), part(false) {}
    __host__ __device__ __forceinline__ bool next(const Shape& s, int cluster) {
        if (!part) {
            if (number < s.wide) {
                const int columns = s.wide / s.row_tiles, per_group = s.group * columns, first = number / per_group * s.group;
                const int left = s.row_tiles - first, rows = left < s.group ? left : s.group, within = number % per_group;
                row = (first + within % rows) * (P::CM * P::BM), column = within / rows * (P::CN * P::BN);
                number += s.clusters;
                return true;
            }
            part = true;
            const int others = (s.clusters - s.late) * s.more;
            number = cluster < s.late ? others + cluster * s.few : (cluster - s.late) * s.more;
            end = number + (cluster < s.late ? s.few : s.more);
            if (end > s.narrow) end = s.narrow;
        }
        if (number >= end) return false;
        row = number % s.row_tiles * (P::CM * P::BM);
        column = s.wide / s.row_tiles * (P::CN * P::BN) + number / s.row_tiles * (P::CN * P::NARROW);
        ++number;
        return true;
    }
};

// How many columns of tiles are narrow: as many as let the clusters end soonest. A tile costs its columns and 16 more.
template <class P> Shape dealt(int rows, int columns, int depth, int clusters, int group, int lag) {
    const int row_tiles = (rows + P::CM * P::BM - 1) / (P::CM * P::BM), of_wide = P::BN + 16, of_narrow = P::NARROW + 16;
    Shape best = {};
    int64_t least = INT64_MAX;
    for (int parts = 0; parts <= (P::NARROW < P::BN ? 12 : 0); ++parts) {
        const int left = columns - parts * P::CN * P::NARROW;
        if (parts && left <= -P::CN * P::NARROW) break;
        const int wide = left > 0 ? (left + P::CN * P::BN - 1) / (P::CN * P::BN) * row_tiles : 0, narrow = parts * row_tiles;
        const int64_t each = wide / clusters, late = wide % clusters, most = (each + (late > 0)) * of_wide;
        const int64_t mean = ((int64_t)wide * of_wide + (int64_t)narrow * of_narrow) / clusters;
        for (int64_t time = most > mean ? most : mean; time < least; ++time) {
            const int64_t few = late ? (time - (each + 1) * of_wide) / of_narrow : 0, more = (time - each * of_wide) / of_narrow;
            if (few * late + more * (clusters - late) < narrow) continue;
            least = time;
            best = {rows, columns, (depth + P::BK - 1) / P::BK, group, lag < P::STAGES - 1 ? lag : P::STAGES - 2, clusters, row_tiles, wide, narrow, (int)late, (int)few, (int)more};
        }
    }
    return best;
}
template <class P> const Shape& dealt_once(int rows, int columns, int depth, int clusters, int group, int lag) {
    static Shape last = {};
    static int of[6] = {};
    const int now[6] = {rows, columns, depth, clusters, group, lag};
    if (memcmp(of, now, sizeof now)) memcpy(of, now, sizeof now), last = dealt<P>(rows, columns, depth, clusters, group, lag);
    return last;
}

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void bar_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory"); }
__device__ __forceinline__ void bar_expect(u32 bar, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory"); }
__device__ __forceinline__ void bar_arrive_at(u32 bar, u32 block) {  // the same barrier in a block of the cluster
    asm volatile("{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [r];\n}" ::"r"(bar), "r"(block) : "memory");
}
__device__ __forceinline__ void bar_wait(u32 bar, u32 parity) {
    asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra again;\ndone:\n}" ::"r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ void cluster_barrier() { asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory"); }
constexpr uint64_t FIRST_OUT = 0x12F0000000000000ull, NORMAL = 0x1000000000000000ull, LAST_OUT = 0x14F0000000000000ull;  // of the L2
template <int BLOCKS, uint64_t POLICY> __device__ __forceinline__ void load(u32 to, const CUtensorMap* map, u32 bar, int k, int row, uint16_t mask) {
    if (BLOCKS > 1 && POLICY != NORMAL) asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5, %6;"
                 ::"r"(to), "l"(map), "r"(bar), "r"(k), "r"(row), "h"(mask), "l"(POLICY) : "memory");
    else if (BLOCKS > 1) asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;"
                 ::"r"(to), "l"(map), "r"(bar), "r"(k), "r"(row), "h"(mask) : "memory");
    else if (POLICY != NORMAL) asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;"
                 ::"r"(to), "l"(map), "r"(bar), "r"(k), "r"(row), "l"(POLICY) : "memory");
    else asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                 ::"r"(to), "l"(map), "r"(bar), "r"(k), "r"(row) : "memory");
}
__device__ __forceinline__ void store(const CUtensorMap* map, u32 from, int column, int row) {
    if (HINTS_) asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%2, %3}], [%1], %4;" ::"l"(map), "r"(from), "r"(column), "r"(row), "l"(FIRST_OUT) : "memory");
    else asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from), "r"(column), "r"(row) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int BK> __device__ __forceinline__ uint64_t descriptor(u32 address) {  // K-major rows of BK bytes, as wide as the swizzle
    return (uint64_t)((address & 0x3FFFF) >> 4) | (uint64_t)1 << 16 | (uint64_t)(8 * BK >> 4) << 32 | (uint64_t)(BK == 128 ? 1 : 2) << 62;
}
@WGMMA@__device__ __forceinline__ u32 packed(float a, float b) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
    return r;
}

struct Scales {  // of the result: one number, or one a column; a warpgroup's columns lie in shared memory
    float both;
    const float* of_w;
    u32 shared;
    __device__ __forceinline__ Scales(const float* x, const float* w, int per_row, u32 shared) : both(*x * (per_row ? 1.0f : *w)), of_w(per_row ? w : nullptr), shared(shared) {}
    template <int N> __device__ __forceinline__ void fetch(int column, int columns) const {
        #pragma unroll
        for (int t = threadIdx.x % 128; t < N; t += 128)
            asm volatile("st.shared.f32 [%0], %1;" ::"r"(shared + 4 * t), "f"(of_w ? both * __ldg(of_w + min(column + t, columns - 1)) : both) : "memory");
    }
    __device__ __forceinline__ float2 two(int at) const {
        float2 v;
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(shared + 4 * at));
        return v;
    }
};

template <class P> struct Consumer {
    u32 ring, full, empty;
    int group, warp, lane, stage, wait, block;
    u32 parity;
    bool releases;
    __device__ __forceinline__ Consumer(u32 ring, u32 full, u32 empty, int warp, int block, int lag)
        : ring(ring), full(full), empty(empty), group(warp / 4), warp(warp % 4), lane(threadIdx.x % 32), stage(0), wait(lag), block(threadIdx.x % 128), parity(0),
          releases(threadIdx.x % 128 < P::CLUSTER && (int(threadIdx.x % 128) / P::CN == block / P::CN || int(threadIdx.x % 128) % P::CN == block % P::CN)) {}
    __device__ __forceinline__ void release(int at) const {  // to the blocks that load into this one
        if (releases) bar_arrive_at(empty + 8 * at, block);
    }
    // All of k into the sums, one step in flight. In its first tile the second consumer starts `wait` steps behind the first. It stays
    // behind, so that it multiplies while the first one stores.
    template <int N> __device__ __forceinline__ void multiply_all(float (&sums)[P::HALVES][N / 2], const Shape& s, const Scales& scales, int column) {
        if (wait && group) {
            asm volatile("bar.sync 3, 256;" ::: "memory");
            wait = 0;
        }
        int before = 0;
        for (int k = 0; k < s.steps; ++k) {
            bar_wait(full + 8 * stage, parity);
            const u32 at = ring + stage * P::STAGE_BYTES;
            const uint64_t a = descriptor<P::BK>(at + group * (P::X_BYTES / 2)), b = descriptor<P::BK>(at + P::X_BYTES);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            #pragma unroll
            for (int i = 0; i < P::BK / 32; ++i)
                #pragma unroll
                for (int h = 0; h < P::HALVES; ++h) multiply(sums[h], a + h * (64 * P::BK / 16) + 2 * i, b + 2 * i, k | i);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            if (k) {
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                release(before);
            } else scales.fetch<N>(column, s.columns);
            if (wait && (k + 1 == wait || k + 1 == s.steps)) {
                asm volatile("bar.arrive 3, 256;" ::: "memory");
                wait = 0;
            }
            before = stage;
            if (++stage == P::STAGES) stage = 0, parity ^= 1;
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        #pragma unroll
        for (int h = 0; h < P::HALVES; ++h)
            #pragma unroll
            for (int i = 0; i < N / 2; ++i) asm volatile("" : "+f"(sums[h][i]) :: "memory");
        release(before);
    }
};

// The rows of this warpgroup and N columns of the result: slots of 64 x 64 by TMA.
template <int N>
__device__ __forceinline__ void tile_of(Consumer<Tight>& c, const Shape& s, const Scales& scales, u32 slots, int row, int column, const CUtensorMap* y_map) {
    float sums[Tight::HALVES][N / 2];
    c.multiply_all<N>(sums, s, scales, column);
    if (PROBE_ == NO_EPILOGUE && s.steps) return;  // always, but ptxas does not know: it drops a product that nobody reads
    const int own = c.warp * 16 + c.lane % 8 + c.lane / 8 % 2 * 8;  // the row of 64 whose address this lane gives to stmatrix
    constexpr int SLICES = Tight::HALVES * N / 64, COUNT = SLOTS_ < SLICES ? SLOTS_ : SLICES;
    #pragma unroll
    for (int slice = 0; slice < SLICES; ++slice) {
        const int h = slice / (N / 64), first = slice % (N / 64) * 64;
        const u32 slot = slots + slice % COUNT * SLOT_BYTES;
        if (threadIdx.x % 128 == 0) {
            if (slice == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
            else asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(COUNT - 1) : "memory");
        }
        asm volatile("bar.sync %0, 128;" ::"r"(c.group + 1) : "memory");
        #pragma unroll
        for (int j = 0; j < 4; ++j) {  // 16 columns
            u32 out[4];
            #pragma unroll
            for (int e = 0; e < 2; ++e) {  // 8 columns; this lane has two of them
                const float2 f = scales.two(first + 16 * j + 8 * e + 2 * (c.lane % 4));
                const float* v = sums[h] + first / 2 + 4 * (2 * j + e);
                out[2 * e] = packed(v[0] * f.x, v[1] * f.y), out[2 * e + 1] = packed(v[2] * f.x, v[3] * f.y);
            }
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                         ::"r"(slot + own * 128 + ((j * 2 + c.lane / 16) ^ (own % 8)) * 16), "r"(out[0]), "r"(out[1]), "r"(out[2]), "r"(out[3]) : "memory");
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        asm volatile("bar.sync %0, 128;" ::"r"(c.group + 1) : "memory");
        if (threadIdx.x % 128 == 0) store(y_map, slot, column + first, row + h * 64);
    }
}

// Barriers of a ring; every block of the cluster has them when this returns.
template <class P> __device__ __forceinline__ void start_ring(u32 full, u32 empty) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < P::STAGES; ++i) bar_init(full + 8 * i, 1), bar_init(empty + 8 * i, 2 * (P::CM + P::CN - 1));  // a consumer warpgroup each
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    cluster_barrier();
}

__global__ void __cluster_dims__(Tight::CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    product_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap y_map,
                   const float* scale_x, const float* scale_w, int per_row, const __grid_constant__ Shape s) {
    typedef Tight P;
    extern __shared__ __align__(1024) uint8_t raw[];
    const u32 ring = shared_address(raw), slots = ring + P::RING_BYTES, of_columns = slots + 2 * SLOTS_ * SLOT_BYTES, full = of_columns + 8 * P::BN, empty = full + 8 * P::STAGES;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, group = warp / 4;
    u32 block;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
    if (threadIdx.x == 0 && ring % 1024) __trap();
    if (threadIdx.x == 256) {
        asm volatile("prefetch.tensormap [%0];" ::"l"(&x_map) : "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"(&w_map) : "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"(&y_map) : "memory");
    }
    start_ring<P>(full, empty);
    const int cluster = blockIdx.x / P::CLUSTER, down = block / P::CN, across = block % P::CN;
    Tiles<P> tiles(cluster);
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp == 8 && lane == 0) {
            constexpr int X_ROWS = P::BM / P::CN;  // of x that this block loads for its CN blocks
            const uint16_t x_mask = ((1 << P::CN) - 1) << down * P::CN, w_mask = (P::CM == 2 ? 1 | 1 << P::CN : 1) << across;
            int stage = 0, loaded = 0;
            u32 parity = 1;
            while (tiles.next(s, cluster)) {
                const int width = tiles.part ? P::NARROW : P::BN, w_rows = width / P::CM;
                const int x_row = tiles.row + down * P::BM + across * X_ROWS, w_row = tiles.column + across * width + down * w_rows;
                const u32 bytes = P::X_BYTES + width * P::BK;
                for (int k = 0; k < s.steps; ++k) {
                    const u32 bar = full + 8 * stage, at = ring + stage * P::STAGE_BYTES;
                    bar_wait(empty + 8 * stage, parity);
                    if (PROBE_ == NO_LOADS && loaded == P::STAGES) bar_expect(bar, 0);
                    else {
                        if (PROBE_ == NO_LOADS) ++loaded;
                        bar_expect(bar, bytes);
                        load<P::CN, HINTS_ == 2 ? LAST_OUT : NORMAL>(at + across * (X_ROWS * P::BK), &x_map, bar, k * P::BK, x_row, x_mask);
                        #pragma unroll
                        for (int i = 0; i < P::BN / P::CM / P::W_BOX; ++i)
                            if (i * P::W_BOX < w_rows) load<P::CM, NORMAL>(at + P::X_BYTES + (down * w_rows + i * P::W_BOX) * P::BK, &w_map, bar, k * P::BK, w_row + i * P::W_BOX, w_mask);
                    }
                    if (++stage == P::STAGES) stage = 0, parity ^= 1;
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        Consumer<P> c(ring, full, empty, warp, block, s.lag);
        const Scales scales(scale_x, scale_w, per_row, of_columns + group * 4 * P::BN);
        const u32 mine = slots + group * SLOTS_ * SLOT_BYTES;
        const int row = down * P::BM + group * (P::BM / 2);
        bool more = tiles.next(s, cluster);
        for (; more && !tiles.part; more = tiles.next(s, cluster)) tile_of<P::BN>(c, s, scales, mine, tiles.row + row, tiles.column + across * P::BN, &y_map);
        if (P::NARROW < P::BN)
            for (; more; more = tiles.next(s, cluster)) tile_of<P::NARROW>(c, s, scales, mine, tiles.row + row, tiles.column + across * P::NARROW, &y_map);
        if (threadIdx.x % 128 == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
    __syncwarp();
    cluster_barrier();  // no block ends while another still arrives at its barriers
}

// Few rows of x: y^T = w x^T, so that 64 rows of w are the rows of wgmma and FEW rows of x its columns. A block walks all of k.
constexpr int FEW_BK = 128;
template <int FEW> struct Ring {
    static constexpr u32 W = 64 * FEW_BK, X = FEW * FEW_BK, STAGE = PANELS_ * (W + X), COUNT = (200 * 1024) / STAGE, BYTES = COUNT * (STAGE + 16);
};
template <int FEW> __global__ void __launch_bounds__(160, 1)
    few_rows_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map, const float* scale_x, const float* scale_w, int per_row,
                    __nv_bfloat16* y, int rows, int columns, int steps) {
    using R = Ring<FEW>;
    extern __shared__ __align__(1024) uint8_t raw[];
    const u32 ring = shared_address(raw), full = ring + R::COUNT * R::STAGE, empty = full + 8 * R::COUNT;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, left = blockIdx.x * 64;
    if (threadIdx.x == 0 && ring % 1024) __trap();
    if (threadIdx.x == 0) {
        for (int i = 0; i < (int)R::COUNT; ++i) bar_init(full + 8 * i, 1), bar_init(empty + 8 * i, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    int stage = 0;
    if (warp == 4) {
        if (lane == 0) {
            u32 parity = 1;
            for (int k = 0; k < steps; ++k) {
                const u32 bar = full + 8 * stage, at = ring + stage * R::STAGE;
                bar_wait(empty + 8 * stage, parity);
                bar_expect(bar, R::STAGE);
                #pragma unroll
                for (int p = 0; p < PANELS_; ++p) {
                    load<1, HINTS_ ? FIRST_OUT : NORMAL>(at + p * R::W, &w_map, bar, (k * PANELS_ + p) * FEW_BK, left, 0);
                    load<1, HINTS_ ? LAST_OUT : NORMAL>(at + PANELS_ * R::W + p * R::X, &x_map, bar, (k * PANELS_ + p) * FEW_BK, 0, 0);
                }
                if (++stage == R::COUNT) stage = 0, parity ^= 1;
            }
        }
        return;
    }
    u32 parity = 0;
    float d[FEW / 2];
    int before = -1;
    for (int k = 0; k < steps; ++k) {
        bar_wait(full + 8 * stage, parity);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        #pragma unroll
        for (int p = 0; p < PANELS_; ++p) {
            const uint64_t a = descriptor<FEW_BK>(ring + stage * R::STAGE + p * R::W), b = descriptor<FEW_BK>(ring + stage * R::STAGE + PANELS_ * R::W + p * R::X);
            #pragma unroll
            for (int i = 0; i < 4; ++i) multiply(d, a + 2 * i, b + 2 * i, k | p | i);
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (before >= 0 && threadIdx.x == 0) bar_arrive_at(empty + 8 * before, 0);
        before = stage;
        if (++stage == R::COUNT) stage = 0, parity ^= 1;
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    #pragma unroll
    for (int i = 0; i < FEW / 2; ++i) asm volatile("" : "+f"(d[i]) :: "memory");
    #pragma unroll
    for (int i = 0; i < FEW / 2; ++i) {
        const int n = left + 16 * warp + lane / 4 + 8 * (i / 2 % 2), m = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
        if (n < columns && m < rows) y[(int64_t)m * columns + n] = __float2bfloat16(d[i] * (*scale_x * __ldg(scale_w + (per_row ? n : 0))));
    }
}

// Rows of `depth` bytes to rows of `pitch`, a multiple of 16, by 16 bytes a thread; what is new is 0. Blocks of x first, then of w.
__device__ __forceinline__ u32 word_at(const uint8_t* from, int64_t word, int64_t total) {
    if (4 * word + 4 <= total) return __ldg((const u32*)from + word);
    u32 value = 0;
    for (int64_t byte = 4 * word; byte < total; ++byte) value |= (u32)from[byte] << 8 * (byte % 4);
    return value;
}
__global__ void realign_kernel(const uint8_t* x, const uint8_t* w, uint4* to, int rows, int columns, int depth, int pitch) {
    const bool of_x = blockIdx.x < rows;
    const int64_t row = of_x ? blockIdx.x : blockIdx.x - rows, total = (int64_t)(of_x ? rows : columns) * depth;
    const uint8_t* from = of_x ? x : w;
    for (int at = threadIdx.x; at < pitch / 16; at += blockDim.x) {
        const int64_t byte = row * depth + 16 * at, word = byte / 4;
        u32 in[5], out[4];
        #pragma unroll
        for (int i = 0; i < 5; ++i) in[i] = word_at(from, word + i, total);
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int left = depth - 16 * at - 4 * i;  // bytes of the row from here on
            out[i] = __funnelshift_r(in[i], in[i + 1], byte % 4 * 8) & (left >= 4 ? ~0u : left > 0 ? (1u << 8 * left) - 1 : 0);
        }
        to[(int64_t)blockIdx.x * (pitch / 16) + at] = make_uint4(out[0], out[1], out[2], out[3]);
    }
}

// All return 0 or an error: CUDA's, or 10000 and the driver's.
#define MUST(call) do { int error = int(call); if (error) return error; } while (0)

int map_of(CUtensorMap& map, const void* data, CUtensorMapDataType type, int64_t columns, int64_t rows, int64_t pitch, int box_columns, int box_rows, bool wide) {
    static void* encode = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (!encode) MUST(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &result));
    cuuint64_t sizes[2] = {(cuuint64_t)columns, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)pitch};
    cuuint32_t box[2] = {(cuuint32_t)box_columns, (cuuint32_t)box_rows}, one[2] = {1, 1};
    CUresult error = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(&map, type, 2, (void*)data, sizes, strides, box, one,
        CU_TENSOR_MAP_INTERLEAVE_NONE, wide ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return error == CUDA_SUCCESS ? 0 : 10000 + int(error);
}
int map_of_bytes(CUtensorMap& map, const void* data, int rows, int depth, int box_columns, int box_rows) {
    return map_of(map, data, CU_TENSOR_MAP_DATA_TYPE_UINT8, depth, rows, depth, box_columns, box_rows, box_columns == 128);
}

struct Operands { const void *x, *w; __nv_bfloat16* y; const float *scale_x, *scale_w; int per_row, rows, columns, depth, group, lag; cudaStream_t stream; };
constexpr int DEVICES = 64;  // that are remembered

// How many clusters of a kernel run at once. A kernel is told once what it needs on a device.
template <class P, class Kernel> int clusters_of(int& clusters, Kernel kernel, u32 bytes) {
    static int of_device[DEVICES] = {};
    int device, multiprocessors;
    MUST(cudaGetDevice(&device));
    if (device < DEVICES && of_device[device]) return clusters = of_device[device], 0;
    MUST(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
    MUST(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    clusters = multiprocessors / P::CLUSTER;
    if (P::CLUSTER > 2) {  // some parts of the GPU hold fewer
        cudaLaunchConfig_t config = {};
        config.gridDim = clusters * P::CLUSTER, config.blockDim = THREADS, config.dynamicSmemBytes = bytes;
        MUST(cudaOccupancyMaxActiveClusters(&clusters, (const void*)kernel, &config));
    }
    if (device < DEVICES) of_device[device] = clusters;
    return 0;
}

template <int FEW> int few_rows(const Operands& o) {
    static bool told[DEVICES] = {};
    CUtensorMap x_map, w_map;
    MUST(map_of_bytes(x_map, o.x, o.rows, o.depth, FEW_BK, FEW));
    MUST(map_of_bytes(w_map, o.w, o.columns, o.depth, FEW_BK, 64));
    int device;
    MUST(cudaGetDevice(&device));
    if (device >= DEVICES || !told[device]) MUST(cudaFuncSetAttribute(few_rows_kernel<FEW>, cudaFuncAttributeMaxDynamicSharedMemorySize, Ring<FEW>::BYTES));
    if (device < DEVICES) told[device] = true;
    const int step = PANELS_ * FEW_BK;
    few_rows_kernel<FEW><<<(o.columns + 63) / 64, 160, Ring<FEW>::BYTES, o.stream>>>(x_map, w_map, o.scale_x, o.scale_w, o.per_row, o.y, o.rows, o.columns, (o.depth + step - 1) / step);
    return 0;
}

int tight(const Operands& o) {
    typedef Tight P;
    CUtensorMap x_map, w_map, y_map;
    MUST(map_of_bytes(x_map, o.x, o.rows, o.depth, P::BK, P::BM / P::CN));
    MUST(map_of_bytes(w_map, o.w, o.columns, o.depth, P::BK, P::W_BOX));
    MUST(map_of(y_map, o.y, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, o.columns, o.rows, 2 * (int64_t)o.columns, 64, 64, true));
    int clusters;
    MUST(clusters_of<P>(clusters, product_kernel, TIGHT_BYTES));
    const Shape s = dealt_once<P>(o.rows, o.columns, o.depth, clusters, o.group, o.lag);
    product_kernel<<<min(clusters, s.wide + s.narrow) * P::CLUSTER, THREADS, TIGHT_BYTES, o.stream>>>(x_map, w_map, y_map, o.scale_x, o.scale_w, o.per_row, s);
    return 0;
}

int product(Operands o, void* copies) {
    if (copies) {
        const int pitch = (o.depth + 15) / 16 * 16;
        realign_kernel<<<o.rows + o.columns, 128, 0, o.stream>>>((const uint8_t*)o.x, (const uint8_t*)o.w, (uint4*)copies, o.rows, o.columns, o.depth, pitch);
        o.x = copies, o.w = (const uint8_t*)copies + (int64_t)o.rows * pitch, o.depth = pitch;
    }
    MUST((o.rows <= 8 ? few_rows<8> : o.rows <= 16 ? few_rows<16> : o.rows <= 32 ? few_rows<32> : o.rows <= 64 ? few_rows<64> : tight)(o));
    return cudaGetLastError();
}

static PyObject* run(PyObject*, PyObject* const* given, Py_ssize_t) {  // x, w, y, scale_x, scale_w, per_row, copies, rows, columns, depth, group, lag, stream
    long long a[13];
    for (int i = 0; i < 13; ++i) a[i] = PyLong_AsLongLong(given[i]);
    return PyLong_FromLong(product({(void*)a[0], (void*)a[1], (__nv_bfloat16*)a[2], (float*)a[3], (float*)a[4], int(a[5]), int(a[7]), int(a[8]), int(a[9]), int(a[10]), int(a[11]), (cudaStream_t)a[12]}, (void*)a[6]));
}

// For tests: (cluster, row, column, rows, columns) of all tiles in turn. Given: rows, columns, depth, clusters, group.
static PyObject* tiles(PyObject*, PyObject* const* given, Py_ssize_t) {
    typedef Tight P;
    int a[5];
    for (int i = 0; i < 5; ++i) a[i] = int(PyLong_AsLongLong(given[i]));
    PyObject* all = PyList_New(0);
    const Shape s = dealt<P>(a[0], a[1], a[2], a[3], a[4], 0);
    for (int cluster = 0; cluster < s.clusters; ++cluster)
        for (Tiles<P> tiles(cluster); tiles.next(s, cluster);) {
            PyObject* one = Py_BuildValue("iiiii", cluster, tiles.row, tiles.column, P::CM * P::BM, P::CN * (tiles.part ? P::NARROW : P::BN));
            PyList_Append(all, one);
            Py_DECREF(one);
        }
    return all;
}
static PyMethodDef methods[] = {{"run", (PyCFunction)(void*)run, METH_FASTCALL, ""}, {"tiles", (PyCFunction)(void*)tiles, METH_FASTCALL, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "fp8_product_cuda", "", -1, methods};
#define INIT(name) PyInit_##name
#define INIT_OF(name) INIT(name)
PyMODINIT_FUNC INIT_OF(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
""".replace("@WGMMA@", "".join(map(wgmma, sorted({8, 16, 32, 64, 256, BN, NARROW}))))

COMPILED = {  # constants that the compiler needs
    "BM_": BM,
    "BN_": BN,
    "BK_": BK,
    "CM_": CM,
    "CN_": CN,
    "STAGES_": STAGES,
    "SLOTS_": SLOTS,
    "NARROW_": NARROW,
    "HINTS_": HINTS,
    "PANELS_": PANELS,
    "PROBE_": PROBES.index(PROBE),
}
_run = None


def built():
    """The extension's launcher, built once per process."""
    global _run
    if _run is None:
        _run = load_inline(
            "fp8_product_cuda_" + "_".join(map(str, COMPILED.values())),
            "",
            CUDA,
            no_implicit_headers=True,
            with_pytorch_error_handling=False,
            extra_cuda_cflags=[
                "-O3",
                "-std=c++17",
                "-gencode=arch=compute_90a,code=sm_90a",
                *(f"-D{name}={value}" for name, value in COMPILED.items()),
            ],
        ).run
    return _run


def dense(x):
    """x, contiguous and at a multiple of 16 bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def product_of(x, weight, scale_x, scale_w, device):
    (M, K), (N, depth), scales = x.shape, weight.shape, scale_w.numel()
    if depth != K or scale_x.numel() != 1 or scales not in (1, N) or min(M, N, K) < 1:
        raise ValueError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and the scales do not fit together")
    if max(M, N, K) >= 2**30:
        raise ValueError("a side of the product is too long")
    if not x.dtype == weight.dtype == torch.float8_e4m3fn or not scale_x.dtype == scale_w.dtype == torch.float32:
        raise ValueError("x and weight must be float8_e4m3fn, the scales float32")
    if not device == weight.get_device() == scale_x.get_device() == scale_w.get_device():
        raise ValueError("the operands and their scales must be on one device")
    if N % 8:
        raise ValueError("a row of the result must be whole 16 bytes, for TMA")
    x, weight, scale_w = dense(x), dense(weight), scale_w.contiguous()
    y = x.new_empty((M, N), dtype=torch.bfloat16)
    copies = x.new_empty((M + N, -(-K // 16) * 16), dtype=torch.uint8) if K % 16 else None
    error = (_run or built())(
        x.data_ptr(),
        weight.data_ptr(),
        y.data_ptr(),
        scale_x.data_ptr(),
        scale_w.data_ptr(),
        scales > 1,
        0 if copies is None else copies.data_ptr(),
        M,
        N,
        K,
        GROUP,
        LAG,
        stream_of(device),
    )
    if error:
        raise RuntimeError(f"fp8_product: CUDA error {error}")
    return y


def kernel_function(x, weight, scale_x, scale_w):
    device = x.get_device()
    if x.is_cuda and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return product_of(x, weight, scale_x, scale_w, device)
    return product_of(x, weight, scale_x, scale_w, device)
