"""Transposed 3-d convolution on bfloat16 in CUDA C++ with wgmma. With kernel 3, stride 2, padding 1 and dilation 2 only odd outputs get anything
(an eighth): out[2 m + 1] = sum of x[m + 1 - k] w[k], a dense 3x3x3 convolution. What limits is how the zeros and the data reach the memory.
 * Volumes with planes of 32 x 32: a block owns one depth of one volume and half of the channels. It computes all 1024 odd positions (kept in shared memory
   as bfloat16, without the zeros), and eight warps write, channel after channel, the plane of zeros and the plane of data: 16.9 KB in one piece, in whole
   lines of 128 bytes. Three warpgroups take the products in turn.
 * The input arrives by bulk tensor copies as it lies in memory, with positions contiguous (wgmma's transposed operand), zeros outside the volume.
 * Columns of the product are kw x channel; the three kw are added afterwards, shifted by one position (an operand cannot be shifted by 2 bytes).
 * One buffer of results, 4 x 4 blocks (steps x channels): the next depth takes, transposed, what the stores have freed.
 * Other volumes with rows of up to 32: tiles of four rows, walked along the depth. Everything else takes the plain kernel."""
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline


def wgmma(shape, n, transposed_a, tail):
    """Inline assembler for one warpgroup product with n / 2 accumulators."""
    acc, ops = ", ".join(f"%{i}" for i in range(n // 2)), ", ".join(f'"+f"(acc[{i}])' for i in range(n // 2))
    return ('asm volatile("{.reg .pred p; setp.ne.b32 p, %%%d, 0; wgmma.mma_async.sync.aligned.%s.f32.bf16.bf16 {%s}, %%%d, %%%d, p, 1, 1, %d, 0;}"\n'
            '        : %s : "l"(a), "l"(b), "r"(%s));' % (n // 2 + 2, shape, acc, n // 2, n // 2 + 1, transposed_a, ops, tail))


CUDA_SRC = r"""
#include <cuda.h>
#include <cuda_bf16.h>
#include <stdint.h>

typedef unsigned int u32;
typedef unsigned short u16;
__device__ __forceinline__ u32 smem_addr(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void bar_init(u32 bar, int count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(bar), "r"(count) : "memory"); }
__device__ __forceinline__ void bar_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(bar) : "memory"); }
__device__ __forceinline__ void bar_wait(u32 bar, u32 parity) {
    asm volatile("{.reg .pred p;\nAGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}" :: "r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void store16(u32* p, uint4 v) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" :: "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// Zero in a register that the compiler does not know to be zero: else it splits 16-byte stores of zeros into halves.
__device__ __forceinline__ u32 opaque_zero() { u32 v; asm volatile("mov.u32 %0, 0;" : "=r"(v)); return v; }
__device__ __forceinline__ void sync_threads(int id, int count) { asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(count) : "memory"); }
__device__ __forceinline__ void fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// ---- planes of 32 x 32 positions ---------------------------------------------------------------------------------------------------------------
// A block owns one output depth of one volume and half of the channels: the zero plane 2 d and the data plane 2 d + 1 of a channel are 16.9 KB in one piece.
namespace planes {
constexpr int IC = 32, OC = 64, HALF = 32, TAPS = 27, SIDE = 32, PAIR = 2 * SIDE + 1, PLANE = PAIR * PAIR;
constexpr int STEPS = 16, CHUNKS = 18;                                      // step t: rows t and t + 16 of the output; chunk e: rows e - 1 and e + 15 of three input planes
constexpr int ROW = IC * SIDE * 2, CHUNK_HALF = 3 * ROW, CHUNK = 2 * CHUNK_HALF, SLOTS = 8;
constexpr int NPROD = 3 * HALF;                                             // columns of the product: three kw x 32 channels
constexpr int W_GROUP = NPROD * 16, W_STEP = 4 * W_GROUP;                   // weights: [kd, kh][ic / 8][kw, oc][ic % 8]
constexpr int W_RAW = HALF * TAPS * 2;                                      // bytes of a half's weights for one input channel
constexpr int PITCH = 512 + 16, BLOCK = 8 * PITCH;                          // results of 4 steps: a channel's 8 rows; of 8 channels
constexpr int RING_AT = 0, W_AT = SLOTS * CHUNK, RES_AT = W_AT + 9 * W_STEP, TABLE_AT = RES_AT + 16 * BLOCK, TABLE = 52;
constexpr int BAR_AT = TABLE_AT + 2 * TABLE * 4;
constexpr int SMEM = BAR_AT + (2 * SLOTS + 7) * 8 + 512;                    // 512 more: the ring must begin at a multiple of 512
static_assert(SMEM <= 232448 && RES_AT % 128 == 0 && IC * W_RAW <= TABLE_AT - RES_AT && BAR_AT % 16 == 0, "shared memory");
constexpr int HEAD = 8, AHEAD = 1;                                           // groups of 8 channels whose zero planes may be written before their data: first item, others
constexpr int GROUPS = 3, MMA_WARPS = 4 * GROUPS, COPIER = MMA_WARPS, STORERS = MMA_WARPS + 1, SW = 8, THREADS = (STORERS + SW) * 32;   // first warp of each role; warps that store

// Operand in shared memory, from its address in units of 16 bytes; lead and stride as the PTX manual defines them for the layout; mode 0: no swizzle, 2: 64-byte swizzle.
__device__ __forceinline__ uint64_t operand(u32 address16, u32 lead, u32 stride, u32 mode) {
    return (uint64_t)(address16 + (lead >> 4 << 16)) | (uint64_t)(stride >> 4 | mode << 30) << 32;
}
// acc[64 positions][96] += A (positions contiguous: transposed) x B
__device__ __forceinline__ void mma96(float (&acc)[48], uint64_t a, uint64_t b) {
    @WGMMA96@
}
__device__ __forceinline__ void mma_wait96(float (&acc)[48]) {
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < 48; ++i) asm volatile("" : "+f"(acc[i]) :: "memory");
}
__device__ __forceinline__ void bar_expect(u32 bar, int bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(bar), "r"(bytes) : "memory"); }
__device__ __forceinline__ bool bar_test(u32 bar, u32 parity) {
    u32 ok;
    asm volatile("{.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(ok) : "r"(bar), "r"(parity) : "memory");
    return ok;
}
__device__ __forceinline__ void bulk_copy(u32 dst, const void* src, int bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" :: "r"(dst), "l"(src), "r"(bytes), "r"(bar) : "memory");
}
// Box of one row of three planes, all channels: [3 planes][32 channels][32 columns], 64-byte swizzle, zeros outside the tensor.
__device__ __forceinline__ void load_rows(u32 dst, const CUtensorMap* map, int h, int d, int n, u32 bar) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %3, %4, %5, %6}], [%2];"
                 :: "r"(dst), "l"(map), "r"(bar), "r"(0), "r"(h), "r"(d), "r"(n) : "memory");
}
__device__ __forceinline__ void store_matrices(u32 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" :: "r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void put2(u32 at, float a, float b) { asm volatile("st.shared.v2.f32 [%0], {%1, %2};" :: "r"(at), "f"(a), "f"(b) : "memory"); }
__device__ __forceinline__ void get2(u32 at, float& a, float& b) { asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(a), "=f"(b) : "r"(at) : "memory"); }
__device__ __forceinline__ u32 pack(float a, float b) { __nv_bfloat162 v = __floats2bfloat162_rn(a, b); return *reinterpret_cast<u32*>(&v); }

// The output is a run of 32-bit words. Every plane has an odd number of elements, so it starts in the low or the high half of a word; a word that two planes
// share is zero in both. Words of an odd plane, counted from the word of its first element: a pair of rows is 33 words of zeros and 32 words with one element each.
// What is written together begins and ends at lines of 128 bytes, rounded UP: beyond the last data of a plane there are only zeros.
__global__ void __launch_bounds__(THREADS, 1) pairs_of_planes(const __grid_constant__ CUtensorMap map, const u16* __restrict__ w, u32* __restrict__ y,
        int D, int items, int64_t units) {
    extern __shared__ __align__(1024) unsigned char raw_smem[];
    u32 base = (smem_addr(raw_smem) + 511) & ~511;
    unsigned char* smem = raw_smem + (base - smem_addr(raw_smem));
    int tid = threadIdx.x, warp = __shfl_sync(0xffffffffu, tid / 32, 0), lane = tid % 32;
    u32 full = base + BAR_AT, empty = full + SLOTS * 8, complete = empty + SLOTS * 8, group_free = complete + 8, weights = group_free + 4 * 8, started = weights + 8;
    int half = blockIdx.x & 1, first = blockIdx.x >> 1, next = gridDim.x >> 1;
    if (tid == 0) {
        for (int s = 0; s < SLOTS; ++s) { bar_init(full + 8 * s, 1); bar_init(empty + 8 * s, MMA_WARPS); }
        for (int g = 0; g < 4; ++g) bar_init(group_free + 8 * g, SW);
        bar_init(complete, MMA_WARPS);
        bar_init(weights, 1);
        bar_init(started, 1);
        fence_init();
    }
    // Where a row's results lie in its channel's part, for even and odd items (see below); marked beyond the plane.
    u32* table = reinterpret_cast<u32*>(smem + TABLE_AT);
    if (tid < 2 * TABLE) {
        int r = tid % TABLE, by_step = tid < TABLE ? 4 * BLOCK : BLOCK;
        table[tid] = r < SIDE ? (r >> 2 & 3) * by_step + (r >> 4) * 256 + (r & 3) * 64 : 0x80000000u;
    }
    __syncthreads();

    if (warp == COPIER) {
        // ---- input: chunk after chunk, as far ahead as the ring allows
        if (lane == 0) {
            for (int p = first, i = 0; p < items; p += next, ++i) {
                int n = p / D, d = p % D;
                for (int e = 0; e < CHUNKS; ++e) {
                    int slot = (i * CHUNKS + e) % SLOTS, use = (i * CHUNKS + e) / SLOTS;
                    if (use > 0) bar_wait(empty + 8 * slot, (use - 1) & 1);
                    bar_expect(full + 8 * slot, CHUNK);
                    load_rows(base + RING_AT + slot * CHUNK, &map, e - 1, d - 1, n, full + 8 * slot);
                    load_rows(base + RING_AT + slot * CHUNK + CHUNK_HALF, &map, e + 15, d - 1, n, full + 8 * slot);
                    if (i == 0 && e == SLOTS - 1) { bar_wait(full + 8 * slot, 0); bar_arrive(started); }
                }
            }
        }
        __syncwarp();
    } else if (warp < MMA_WARPS) {
        // ---- weights: as they lie in memory into the room of the results, then rearranged
        if (warp == 0) {
            if (lane == 0) bar_expect(weights, IC * W_RAW);
            __syncwarp();
            bulk_copy(base + RES_AT + lane * W_RAW, w + (lane * 2 + half) * (W_RAW / 2), W_RAW, weights);
        }
        bar_wait(weights, 0);
        const u16* raw = reinterpret_cast<const u16*>(smem + RES_AT);
#pragma unroll 2
        for (int i = warp; i < TAPS * 4; i += MMA_WARPS) {
            int tap = i / 4, c = i % 4;
            u32 v[8];
#pragma unroll
            for (int k = 0; k < 8; ++k) v[k] = raw[(c * 8 + k) * (W_RAW / 2) + lane * TAPS + tap];
            *reinterpret_cast<uint4*>(smem + W_AT + tap / 3 * W_STEP + c * W_GROUP + (tap % 3 * HALF + lane) * 16) =
                make_uint4(v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, v[6] | v[7] << 16);
        }
        fence_async();
        sync_threads(1, MMA_WARPS * 32);

        // ---- products: the warpgroups take the steps in turn. Rows of the product are 64 positions (two rows of the plane), columns kw x channel;
        //      no operand can be shifted by one column, so the three kw are added afterwards, shifted by one position.
        int group = warp / 4, wq = warp % 4, side = wq & 1, g8 = lane / 4, c2 = lane % 4 * 2;   // a warp holds 16 positions: columns 16 side ...
        u32 seen = 0;
        for (u32 step = group, i = 0; first + (int)(i = step / STEPS) * next < items; step += GROUPS) {
            u32 t = step % STEPS;
            // Results: 4 x 4 blocks, (4 steps) x (8 channels). The next item takes blocks as soon as their channels are stored: transposed.
            u32 by_step = i & 1 ? BLOCK : 4 * BLOCK, by_channel = i & 1 ? 4 * BLOCK : BLOCK;
            // Every warpgroup waits for every chunk once and gives it back once, so that none misses a use of a slot.
            auto ready = [&](u32 upto) { for (; seen <= upto; ++seen) bar_wait(full + 8 * (seen % SLOTS), seen / SLOTS & 1); };
            float acc[48];
#pragma unroll
            for (int k = 0; k < 48; ++k) acc[k] = 0.f;
#pragma unroll
            for (int c = 0; c < 3; ++c) {                   // chunk t + c carries the rows of kh = 2 - c
                ready(i * CHUNKS + t + c);
                u32 slot = (i * CHUNKS + t + c) % SLOTS;
                mma_fence();
                u32 a0 = (base + RING_AT + slot * CHUNK) / 16, b0 = (base + W_AT) / 16 + (2 - c) * (W_STEP / 16);
#pragma unroll
                for (int pl = 0; pl < 3; ++pl)
#pragma unroll
                    for (int s = 0; s < 2; ++s)
                        mma96(acc, operand(a0 + (pl * ROW + s * (ROW / 2)) / 16, CHUNK_HALF, 512, 2), operand(b0 + ((2 - pl) * 3 * W_STEP + s * 2 * W_GROUP) / 16, W_GROUP, 128, 0));
            }
            mma_wait96(acc);
            // Chunk e serves the steps e - 2, e - 1 and e; this warpgroup's next step is t + GROUPS.
            u32 from = i * CHUNKS + (t < GROUPS ? 0 : t), to = i * CHUNKS + (t + GROUPS < STEPS ? t + GROUPS : CHUNKS);
            ready(to - 1);
            __syncwarp();
            if (lane == 0) for (u32 e = from; e < to; ++e) bar_arrive(empty + 8 * (e % SLOTS));
            u32 j = t / 4;
            if (i > 0 && t % 4 < GROUPS) bar_wait(group_free + 8 * j, (i - 1) & 1);
            // The neighbour's edge (column 15 or 16) by way of the place in the results that only its reader will write.
            u32 block = base + RES_AT + j * by_step;
            int row = (wq >> 1) * 256 + t % 4 * 64;          // place in a channel's 512 bytes
            u32 mine = block + c2 * PITCH + row + side * 32, theirs = block + c2 * PITCH + row + (side ^ 1) * 32;
            bool at_edge = g8 == (side ? 0 : 7);
            float edge[8];
#pragma unroll
            for (int jn = 0; jn < 4; ++jn)
                if (at_edge) put2(theirs + jn * by_channel, side ? acc[4 * jn] : acc[32 + 4 * jn + 2], side ? acc[4 * jn + 1] : acc[32 + 4 * jn + 3]);
            __syncwarp();
            sync_threads(2 + warp / 2, 64);
#pragma unroll
            for (int jn = 0; jn < 4; ++jn) {
                edge[2 * jn] = edge[2 * jn + 1] = 0.f;
                if (at_edge) get2(mine + jn * by_channel, edge[2 * jn], edge[2 * jn + 1]);
            }
            __syncwarp();
            u32 out[4][2];
#pragma unroll
            for (int jn = 0; jn < 4; ++jn) {
                float lo[2], hi[2];                         // out[m] = P0[m + 1] + P1[m] + P2[m - 1]
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float a = __shfl_sync(0xffffffffu, acc[4 * jn + c], (lane + 4) & 31), b = __shfl_sync(0xffffffffu, acc[4 * jn + 2 + c], (lane + 4) & 31);
                    float f = __shfl_sync(0xffffffffu, acc[32 + 4 * jn + c], (lane + 28) & 31), g = __shfl_sync(0xffffffffu, acc[32 + 4 * jn + 2 + c], (lane + 28) & 31);
                    lo[c] = acc[16 + 4 * jn + c] + (g8 == 7 ? b : a) + (g8 == 0 ? edge[2 * jn + c] : f);
                    hi[c] = acc[16 + 4 * jn + 2 + c] + (g8 == 7 ? edge[2 * jn + c] : b) + (g8 == 0 ? f : g);
                }
                out[jn][0] = pack(lo[0], lo[1]); out[jn][1] = pack(hi[0], hi[1]);
            }
            u32 at = block + (lane >> 4) * by_channel + lane % 8 * PITCH + row + side * 32 + (lane >> 3 & 1) * 16;   // transposed: a stored row is a channel
            store_matrices(at, out[0][0], out[0][1], out[1][0], out[1][1]);
            store_matrices(at + 2 * by_channel, out[2][0], out[2][1], out[3][0], out[3][1]);
            if (t >= STEPS - GROUPS) {
                __syncwarp();
                if (lane == 0) bar_arrive(complete);
            }
        }
    } else {
        // ---- stores. A warp has one channel of each group of 8. The zero plane before a data plane is written while the results are not complete,
        //      else right before the data.
        int sw = warp - STORERS;
        u32 nought = opaque_zero();                             // a register: else the compiler splits stores of zeros in halves
        auto zero_lines = [&](int64_t l0, int64_t l1) {         // lines of 128 bytes
            int count = (int)(min(l1 * 8, units) - l0 * 8) - lane;
            u32* q = y + l0 * 32 + lane * 4;
#pragma unroll 1
            for (int u = 0; u < count; u += 6 * 32, q += 6 * 128)
#pragma unroll
                for (int b = 0; b < 6; ++b)
                    if (u + b * 32 < count) store16(q + b * 128, make_uint4(nought, nought, nought, nought));
        };
        auto zeros = [&](int p, int k) {
            int n = p / D, d = p % D;
            int64_t e0 = ((int64_t)(n * OC + half * HALF + 8 * k + sw) * (2 * D + 1) + 2 * d) * PLANE;    // first element of the zero plane
            int64_t before = d == 0 ? (e0 + 63) >> 6 : (((e0 - PLANE) >> 1) + SIDE * PAIR + 31) >> 5;
            zero_lines(before, (((e0 + PLANE) >> 1) + SIDE + 1) >> 5);
        };
        // A load that is issued when stores of zeros have filled the queues comes back up to 15 us later: first what the products need.
        bar_wait(weights, 0);
        bar_wait(started, 0);
        int zp = first, zk = 0, done = 0, unit = 0;             // next zero plane; zero planes and data planes written
        auto next_zeros = [&]() {
            zeros(zp, zk); ++done;
            if (++zk == 4) { zk = 0; zp += next; }
        };
        for (int p = first, i = 0; p < items; p += next, ++i) {
            int n = p / D, d = p % D, limit = unit + (i == 0 ? HEAD : AHEAD);
            u32 by_channel = i & 1 ? 4 * BLOCK : BLOCK;
            while (done < limit && zp < items && !__all_sync(0xffffffffu, bar_test(complete, i & 1))) next_zeros();
            for (int k = 0; k < 4; ++k, ++unit) {
                if (done <= unit) next_zeros();
                if (k == 0) bar_wait(complete, i & 1);
                int oc = 8 * k + sw;
                int64_t e1 = ((int64_t)(n * OC + half * HALF + oc) * (2 * D + 1) + 2 * d + 1) * PLANE, b1 = e1 >> 1;
                int64_t l1 = (b1 + SIDE + 1) >> 5, l2 = (b1 + SIDE * PAIR + 31) >> 5;
                int count = (int)(min(l2 * 8, units) - l1 * 8) - lane;
                bool high = e1 & 1;
                u32 sel0 = high ? 0x1044 : 0x4410, sel1 = high ? 0x3244 : 0x4432;
                u32 image = RES_AT + (oc >> 3) * by_channel + (oc & 7) * PITCH;
                u32* q = y + l1 * 32 + lane * 4;
                int word = (int)(l1 * 32 - b1) + 4 * lane, r = word / PAIR, c = word - r * PAIR - (SIDE + 1);   // four words with the elements c .. c + 3 of row r
                const u32* where = table + (i & 1) * TABLE + r;
                constexpr int BATCH = 3;
#pragma unroll 1
                for (int u = 0; u < count + lane; u += BATCH * 32, q += BATCH * 128) {
                    u32 v[BATCH][3]; int shift[BATCH];
#pragma unroll
                    for (int b = 0; b < BATCH; ++b) {           // words of two elements from an even column; what lies outside the row is zero
                        u32 row = *where;
                        int even = (int)row < 0 ? SIDE : c & ~1;
                        const unsigned char* from = smem + (image + row + even * 2);
#pragma unroll
                        for (int z = 0; z < 3; ++z) v[b][z] = (unsigned)(even + 2 * z) < (unsigned)SIDE ? *reinterpret_cast<const u32*>(from + 4 * z) : 0;
                        shift[b] = c * 16;
                        c -= 2; where += 2;                     // 128 words are two pairs of rows less two words
                        if (c < -(SIDE + 1)) { c += PAIR; --where; }
                    }
#pragma unroll
                    for (int b = 0; b < BATCH; ++b) {
                        u32 lo = __funnelshift_r(v[b][0], v[b][1], shift[b]), hi = __funnelshift_r(v[b][1], v[b][2], shift[b]);
                        if (u + b * 32 < count)
                            store16(q + b * 128, make_uint4(__byte_perm(lo, 0, sel0), __byte_perm(lo, 0, sel1), __byte_perm(hi, 0, sel0), __byte_perm(hi, 0, sel1)));
                    }
                }
                if (d == D - 1) zero_lines(l2, (e1 + 2 * PLANE + 63) >> 6);    // the last plane
                __syncwarp();
                if (lane == 0) bar_arrive(group_free + 8 * k);
            }
        }
    }
}

// Map of x as (column, input channel, row, depth, volume): a box then lies as the product wants it.
int launch(int64_t x, int64_t w, int64_t y, int64_t stream, int N, int D, int sms) {
    void* f = nullptr; cudaDriverEntryPointQueryResult found; CUtensorMap map;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found) != cudaSuccess || !f) return 900;
    cuuint64_t plane = SIDE * SIDE * 2, dims[5] = {SIDE, IC, SIDE, (cuuint64_t)D, (cuuint64_t)N}, strides[4] = {D * plane, SIDE * 2, plane, IC * D * plane};
    cuuint32_t box[5] = {SIDE, IC, 1, 3, 1}, ones[5] = {1, 1, 1, 1, 1};
    CUresult r = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(f)(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5, (void*)x, dims, strides, box, ones,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (r != CUDA_SUCCESS) return 1000 + (int)r;
    int items = N * D, most = sms / 2, rounds = (items + most - 1) / most, blocks = (items + rounds - 1) / rounds;   // as many items for every block
    cudaFuncSetAttribute(pairs_of_planes, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM);
    pairs_of_planes<<<2 * blocks, THREADS, SMEM, (cudaStream_t)stream>>>(map, (const u16*)w, (u32*)y, D, items, (int64_t)N * OC * (2 * D + 1) * PLANE / 8);
    return (int)cudaGetLastError();
}
}  // namespace planes

// ---- any other volume (rows of up to 32): tiles of four rows, walked along the depth ------------------------------------------------------------------
namespace general {
constexpr int IC = 32, OC = 64, TAPS = 27, ROWS = 4, PITCH = 34, NPOS = 136;
constexpr int TROWS = ROWS + 2, CHUNK = TROWS * PITCH * 16;                 // one group of 8 channels of one input plane with its halo
constexpr int SLOTS = 4, SLOT = 4 * CHUNK;                                  // ring of input planes
constexpr int IMG = 264;                                                    // words per channel of the output image
constexpr int W_BYTES = TAPS * IC * OC * 2, RING_AT = W_BYTES, IMG_AT = RING_AT + SLOTS * SLOT, BAR_AT = IMG_AT + OC * IMG * 4;
constexpr int SMEM = BAR_AT + 128;
static_assert(SMEM <= 232448, "shared memory");
constexpr int LOADERS = 8, ZEROS = 12, ZW = 1, THREADS = (ZEROS + ZW) * 32;  // first warp of each role (0..3 and 4..7 multiply in turn); warps that write zeros

// Matrix descriptor without swizzle: 8 rows of 16 bytes lie together; lead: bytes to the next 16 bytes of k, stride: to the next 8 rows.
__device__ __forceinline__ uint64_t desc(u32 addr, u32 lead, u32 stride) {
    return (uint64_t)((addr & 0x3ffff) >> 4) | ((uint64_t)(lead >> 4) << 16) | ((uint64_t)(stride >> 4) << 32);
}
__device__ __forceinline__ void mma(float (&acc)[NPOS / 2], uint64_t a, uint64_t b, int keep) {
    @WGMMA@
}
__device__ __forceinline__ void mma_wait(float (&acc)[NPOS / 2]) {
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < NPOS / 2; ++i) asm volatile("" : "+f"(acc[i]) :: "memory");
}

// The output is a run of 32-bit words. Every plane has an odd number of elements, so it starts in the low or the high half of a word; a word
// that two planes share is zero in both. Words of an odd plane, counted from the word of its first element: a pair of rows is W + 1 words of
// zeros and W words with one element each. The words are cut into runs (rows of a tile; the zeros between two odd planes), and a run is
// written from its first to its last 16-byte boundary rounded UP: what it adds at its end are zeros that begin the next run.
// VECTOR: rows begin at multiples of four bytes, so that two elements can be loaded together.
template <int VECTOR>
__global__ void __launch_bounds__(THREADS, 1) deconv(const u16* __restrict__ x, const u16* __restrict__ w, u32* __restrict__ y,
        int D, int H, int W, int htiles, int dsplit, int dlen, int items) {
    extern __shared__ __align__(128) unsigned char smem[];
    int tid = threadIdx.x, warp = __shfl_sync(0xffffffffu, tid / 32, 0), lane = tid % 32;
    u32 base = smem_addr(smem), full = base + BAR_AT, empty = full + SLOTS * 8, image_free = empty + SLOTS * 8;
    int pair = 2 * W + 1, HW = H * W;
    int plane = (2 * H + 1) * pair;
    int64_t volume = (int64_t)plane * (2 * D + 1);
    if (tid == 0) {
        for (int s = 0; s < SLOTS; ++s) { bar_init(full + 8 * s, 128); bar_init(empty + 8 * s, 8); bar_init(image_free + 8 * s, 1); }
        fence_init();
    }
    __syncthreads();

    if (warp < ZEROS) {
        // Weights [IC][OC][TAPS] into [tap][ic / 8][oc][ic % 8]; then the image is cleared.
#pragma unroll 2
        for (int i = tid; i < IC / 8 * OC * TAPS; i += ZEROS * 32) {
            int c = i / (OC * TAPS), r = i - c * (OC * TAPS), oc = r / TAPS, tap = r - oc * TAPS;
            u32 v[8];
#pragma unroll
            for (int k = 0; k < 8; ++k) v[k] = __ldg(w + (c * 8 + k) * (OC * TAPS) + r);
            *reinterpret_cast<uint4*>(smem + tap * (IC * OC * 2) + c * (OC * 16) + oc * 16) =
                make_uint4(v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, v[6] | v[7] << 16);
        }
        for (int i = tid; i < OC * IMG / 4; i += ZEROS * 32) reinterpret_cast<uint4*>(smem + IMG_AT)[i] = make_uint4(0, 0, 0, 0);
        fence_async();
        sync_threads(1, ZEROS * 32);
    }
    if (warp >= ZEROS) {
        // ---- zeros between two odd planes, in lines of 128 bytes: run z of a channel begins after the data of odd plane 2 z - 1
        u32 nought = opaque_zero();
        for (int it = blockIdx.x; it < items; it += gridDim.x) {
            int ds = it % dsplit, ht = it / dsplit % htiles, n = it / dsplit / htiles, d1 = min(D, ds * dlen + dlen);
            for (int z = ds * dlen; z < (d1 == D ? D + 1 : d1); ++z) {
                for (int o = ht + (warp - ZEROS) * htiles; o < OC; o += ZW * htiles) {
                    int64_t first = (int64_t)(n * OC + o) * volume + (int64_t)(2 * z) * plane;     // element where the even plane begins
                    int64_t b = z == 0 ? first >> 1 : ((first - plane) >> 1) + H * pair, e = (first + plane) >> 1;
                    b = (b + 3) >> 2; e = (e + 3) >> 2;                                             // in units of 16 bytes
                    int skip = (int)b & 7, count = (int)(e - b) + skip;
                    u32* p = y + (b - skip) * 4 + lane * 4;
                    if (lane >= skip && lane < count) store16(p, make_uint4(nought, nought, nought, nought));
#pragma unroll 4
                    for (int i = 32; i < count - lane; i += 32) store16(p + i * 4, make_uint4(nought, nought, nought, nought));
                }
            }
        }
    } else if (warp >= LOADERS) {
        // ---- input planes into the ring: [slot][ic / 8][row 6][column 34][8 channels], zero outside the volume
        int t = tid - LOADERS * 32, q = 0;
        for (int it = blockIdx.x; it < items; it += gridDim.x) {
            int ds = it % dsplit, ht = it / dsplit % htiles, n = it / dsplit / htiles, h0 = ht * ROWS, d0 = ds * dlen, d1 = min(D, d0 + dlen);
            const u16* xn = x + (int64_t)n * IC * D * HW;
            for (int dd = max(0, d0 - 1); dd < min(D, d1 + 1); ++dd, ++q) {
                int slot = q % SLOTS;
                uint4* tile = reinterpret_cast<uint4*>(smem + RING_AT + slot * SLOT);
                u32 v[3][8];
#pragma unroll
                for (int z = 0; z < 3; ++z) {                   // 4 groups of channels x 6 rows x 16 pairs of columns = 3 x 128
                    int i = t + z * 128, j = i % 16, r = i / 16 % TROWS, c = i / (16 * TROWS), hh = h0 + r - 1, ww = 2 * j;
                    bool in = (unsigned)hh < (unsigned)H && ww < W;
                    const u16* p = xn + ((int64_t)(c * 8) * D + dd) * HW + hh * W + ww;
#pragma unroll
                    for (int k = 0; k < 8; ++k) {
                        if (VECTOR) { v[z][k] = in ? __ldg(reinterpret_cast<const u32*>(p)) : 0; p += (int64_t)D * HW; }
                        else v[z][k] = (in ? (u32)__ldg(p + (int64_t)k * D * HW) : 0) | (in && ww + 1 < W ? (u32)__ldg(p + (int64_t)k * D * HW + 1) : 0) << 16;
                    }
                }
                if (q >= SLOTS) bar_wait(empty + 8 * slot, (q / SLOTS - 1) & 1);
#pragma unroll
                for (int z = 0; z < 3; ++z) {
                    int i = t + z * 128, j = i % 16, r = i / 16;
                    uint4* s = tile + r * PITCH + 1 + 2 * j;
                    s[0] = make_uint4(__byte_perm(v[z][0], v[z][1], 0x5410), __byte_perm(v[z][2], v[z][3], 0x5410), __byte_perm(v[z][4], v[z][5], 0x5410), __byte_perm(v[z][6], v[z][7], 0x5410));
                    s[1] = make_uint4(__byte_perm(v[z][0], v[z][1], 0x7632), __byte_perm(v[z][2], v[z][3], 0x7632), __byte_perm(v[z][4], v[z][5], 0x7632), __byte_perm(v[z][6], v[z][7], 0x7632));
                }
                if (t < 4 * TROWS * 2) tile[t / 2 * PITCH + t % 2 * (PITCH - 1)] = make_uint4(0, 0, 0, 0);
                fence_async();
                bar_arrive(full + 8 * slot);
            }
        }
    } else {
        // ---- products and the output's data; the two warpgroups take the depths in turn, so that one multiplies while the other writes
        int group = warp / 4, wq = warp % 4;
        int q = 0, unit = 0;                                    // running numbers: first plane and first depth of the item
        for (int it = blockIdx.x; it < items; it += gridDim.x) {
            int ds = it % dsplit, ht = it / dsplit % htiles, n = it / dsplit / htiles, h0 = ht * ROWS, d0 = ds * dlen, d1 = min(D, d0 + dlen);
            int rows = min(ROWS, H - h0);
            int first = max(0, d0 - 1), shift0 = q - first;     // plane p has the running number p + shift0
            for (int d = d0; d < d1; ++d, ++unit) {
                if (unit % 2 != group) continue;
                int lo = max(d - 1, 0), hi = min(d + 1, D - 1);
                for (int p = lo; p <= hi; ++p) bar_wait(full + 8 * ((p + shift0) % SLOTS), ((p + shift0) / SLOTS) & 1);
                float acc[NPOS / 2];
#pragma unroll
                for (int i = 0; i < NPOS / 2; ++i) acc[i] = 0.f;
                mma_fence();
#pragma unroll 1
                for (int p = lo; p <= hi; ++p) {
                    u32 a0 = base + (d + 1 - p) * 9 * (IC * OC * 2), b0 = base + RING_AT + (p + shift0) % SLOTS * SLOT;
#pragma unroll
                    for (int k9 = 0; k9 < 9; ++k9) {
                        int shift = (2 - k9 / 3) * PITCH + 2 - k9 % 3;
#pragma unroll
                        for (int s = 0; s < 2; ++s)
                            mma(acc, desc(a0 + k9 * (IC * OC * 2) + s * 2 * OC * 16, OC * 16, 128), desc(b0 + s * 2 * CHUNK + shift * 16, CHUNK, 128), 1);
                    }
                }
                mma_wait(acc);
                // A plane is free after one arrival for the depth of its own number and one for the next; planes at an end of the item have only one user.
                if (lane == 0) {
                    u32 b = empty + 8 * ((d - 1 + shift0) % SLOTS), c = empty + 8 * ((d + shift0) % SLOTS), e = empty + 8 * ((d + 1 + shift0) % SLOTS);
                    if (d > first) { bar_arrive(b); if (d == d0) bar_arrive(b); }
                    bar_arrive(c);
                    if (d == d1 - 1) {
                        bar_arrive(c);
                        if (d + 1 < D) { bar_arrive(e); bar_arrive(e); }
                    }
                }
                // This warp's 16 channels. From channel to channel the first word of plane 2 d + 1 moves by volume / 2, from depth to depth by `plane`.
                int64_t e0 = (int64_t)(n * OC + wq * 16) * volume + (int64_t)(2 * d + 1) * plane;
                u32* img = reinterpret_cast<u32*>(smem + IMG_AT) + wq * 16 * IMG;
                int v4 = (int)(volume & 7), p4 = (int)(e0 & 7);
                int o = lane / 4, ph0 = ((p4 + o * v4) & 7) >> 1, ph8 = ((p4 + (o + 8) * v4) & 7) >> 1;
                bool odd = (p4 + o * v4) & 1;
                u32 sel0 = odd ? 0x1044 : 0x4410, sel1 = odd ? 0x3244 : 0x4432;
                if (unit > 0) bar_wait(image_free + 8 * wq, (unit - 1) & 1);     // the other warpgroup has read its image
                u32* i0 = img + o * IMG + ph0 + W + 1; u32* i8 = img + (o + 8) * IMG + ph8 + W + 1;
#pragma unroll
                for (int j = 0; j < NPOS / 8; ++j) {
                    int c = 8 * j % PITCH + 2 * (lane % 4), r = 8 * j / PITCH;
                    if (c >= PITCH) { c -= PITCH; ++r; }
                    int k = r * pair + c;
                    __nv_bfloat162 t0 = __floats2bfloat162_rn(acc[4 * j], acc[4 * j + 1]), t8 = __floats2bfloat162_rn(acc[4 * j + 2], acc[4 * j + 3]);
                    u32 a = *reinterpret_cast<u32*>(&t0), b = *reinterpret_cast<u32*>(&t8);
                    if (c < W) { i0[k] = __byte_perm(a, 0, sel0); i8[k] = __byte_perm(b, 0, sel0); }
                    if (c + 1 < W) { i0[k + 1] = __byte_perm(a, 0, sel1); i8[k + 1] = __byte_perm(b, 0, sel1); }
                }
                // The place within 16 bytes changes from depth to depth: clear three words on either side of every row's data.
                {
                    int oc = lane / 2, k0 = (((p4 + oc * v4) & 7) >> 1) + W + 1 + (lane & 1 ? W : -3);
#pragma unroll
                    for (int r = 0; r < ROWS; ++r)
#pragma unroll
                        for (int z = 0; z < 3; ++z) if (k0 + r * pair + z < IMG) img[oc * IMG + k0 + r * pair + z] = 0;
                }
                __syncwarp();
                int len = rows * pair;
                auto write = [&](int oc, int c) {               // 16 bytes of a channel's run
                    int64_t b = ((e0 + oc * volume) >> 1) + h0 * pair;
                    int ph = (int)b & 3;
                    if (c >= (ph ? 1 : 0) && 4 * c < ph + len)
                        *reinterpret_cast<uint4*>(y + (b - ph) + 4 * c) = *reinterpret_cast<const uint4*>(img + oc * IMG + 4 * c);
                };
#pragma unroll 4
                for (int oc = 0; oc < 16; ++oc) { write(oc, lane); write(oc, lane + 32); }
                write(lane / 2, 64 + lane % 2);
                __syncwarp();
                if (lane == 0) bar_arrive(image_free + 8 * wq);
            }
            q += min(D, d1 + 1) - first;
        }
    }
}

__global__ void plain(const __nv_bfloat16* __restrict__ x, const __nv_bfloat16* __restrict__ w, const __nv_bfloat16* __restrict__ bias,
        __nv_bfloat16* __restrict__ y, int64_t total, int ic, int oc, int D, int H, int W, int OD, int OH, int OW, int K, int s, int pad, int dil) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= total) return;
    int ow = i % OW; int64_t r = i / OW;
    int oh = r % OH; r /= OH;
    int od = r % OD; r /= OD;
    int o = r % oc; int64_t n = r / oc;
    float acc = bias ? __bfloat162float(bias[o]) : 0.f;
    for (int a = 0; a < K; ++a) {
        int d = od + pad - a * dil;
        if (d < 0 || d % s || (d /= s) >= D) continue;
        for (int b = 0; b < K; ++b) {
            int h = oh + pad - b * dil;
            if (h < 0 || h % s || (h /= s) >= H) continue;
            for (int c = 0; c < K; ++c) {
                int v = ow + pad - c * dil;
                if (v < 0 || v % s || (v /= s) >= W) continue;
                for (int q = 0; q < ic; ++q)
                    acc = fmaf(__bfloat162float(x[(((n * ic + q) * D + d) * H + h) * W + v]),
                               __bfloat162float(w[((((int64_t)q * oc + o) * K + a) * K + b) * K + c]), acc);
            }
        }
    }
    y[i] = __float2bfloat16(acc);
}

int run_deconv(int64_t x, int64_t w, int64_t y, int64_t stream, int N, int D, int H, int W, int sms) {
    int htiles = (H + ROWS - 1) / ROWS, columns = N * htiles;
    int dsplit = (sms * 7 / 8 + columns - 1) / columns;         // few columns: cut the depth, too
    if (dsplit > D) dsplit = D;
    if (dsplit < 1) dsplit = 1;
    int dlen = (D + dsplit - 1) / dsplit;
    dsplit = (D + dlen - 1) / dlen;
    int items = columns * dsplit, grid = items < sms ? items : sms;
    auto go = [&](auto kernel) {
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM);
        kernel<<<grid, THREADS, SMEM, (cudaStream_t)stream>>>((const u16*)x, (const u16*)w, (u32*)y, D, H, W, htiles, dsplit, dlen, items);
    };
    if (W % 2 == 0 && x % 4 == 0) go(deconv<1>); else go(deconv<0>);
    return (int)cudaGetLastError();
}
}  // namespace general

int run_plain(int64_t x, int64_t w, int64_t b, int64_t y, int64_t stream, int64_t total, int ic, int oc, int D, int H, int W, int OD, int OH, int OW,
              int K, int s, int pad, int dil) {
    general::plain<<<(unsigned)((total + 255) / 256), 256, 0, (cudaStream_t)stream>>>((const __nv_bfloat16*)x, (const __nv_bfloat16*)w, (const __nv_bfloat16*)b,
        (__nv_bfloat16*)y, total, ic, oc, D, H, W, OD, OH, OW, K, s, pad, dil);
    return (int)cudaGetLastError();
}

#include <pybind11/pybind11.h>
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("run_planes", &planes::launch); m.def("run_deconv", &general::run_deconv); m.def("run_plain", &run_plain); }
""".replace("@WGMMA96@", wgmma("m64n96k16", 96, 1, "1")).replace("@WGMMA@", wgmma("m64n136k16", 136, 0, "keep"))

_extension = None


def extension():
    """Build the extension once per process."""
    global _extension
    if _extension is None:
        _extension = load_inline(name="deconv3d_even", cpp_sources="", cuda_sources=CUDA_SRC, no_implicit_headers=True,
                           extra_cuda_cflags=["-O3", "-gencode=arch=compute_90a,code=sm_90a"])
    return _extension


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, stride=1, padding=0, dilation=1, bias=False):
        super().__init__()
        self.conv_transpose3d = nn.ConvTranspose3d(in_channels, out_channels, kernel_size=(kernel_size,) * 3, stride=stride, padding=padding,
                                                   dilation=dilation, bias=bias)
        self.k, self.s, self.p, self.dil = kernel_size, stride, padding, dilation
        self.special = (in_channels, out_channels, kernel_size, stride, padding, dilation, bool(bias)) == (32, 64, 3, 2, 1, 2, False)

    def forward(self, x):
        w, b = self.conv_transpose3d.weight, self.conv_transpose3d.bias
        if x.dim() != 5 or x.shape[1] != w.shape[0] or x.dtype != torch.bfloat16 or w.dtype != x.dtype or not x.is_cuda:
            raise ValueError("a bfloat16 CUDA tensor (N, C, D, H, W) with the model's channels is needed")
        if not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last_3d):
            raise ValueError("channels-last tensors are not served")
        x, w = x.contiguous(), w.contiguous()
        N, IC, D, H, W = x.shape
        OC = w.shape[1]
        out = [(n - 1) * self.s - 2 * self.p + self.dil * (self.k - 1) + 1 for n in (D, H, W)]
        if min(out) < 1 or x.numel() == 0:
            raise ValueError("the output would be empty")
        y = torch.empty(N, OC, *out, device=x.device, dtype=x.dtype)
        with torch.cuda.device(x.device):
            stream = torch.cuda.current_stream().cuda_stream
            sms = torch.cuda.get_device_properties(x.device).multi_processor_count
            if self.special and H == W == 32 and D >= 3 and N * D < 2**25 and x.data_ptr() % 16 == 0 and w.data_ptr() % 16 == 0:
                e = extension().run_planes(x.data_ptr(), w.data_ptr(), y.data_ptr(), stream, N, D, sms)
            elif self.special and 2 <= W <= 32 and N * D * H < 2**30:
                e = extension().run_deconv(x.data_ptr(), w.data_ptr(), y.data_ptr(), stream, N, D, H, W, sms)
            else:
                e = extension().run_plain(x.data_ptr(), w.data_ptr(), b.data_ptr() if b is not None else 0, y.data_ptr(), stream, y.numel(),
                                    IC, OC, D, H, W, *out, self.k, self.s, self.p, self.dil)
        if e:
            raise RuntimeError(f"CUDA error {e}")
        return y
