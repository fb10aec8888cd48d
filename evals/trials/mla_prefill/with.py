"""Causal attention of the last queries of a sequence (keys of 192, values of 128), bf16, Hopper.

Persistent pairs of thread blocks take tiles of 2 x 128 queries of a head from lists of equal work; each block loads half of K and V for both. One producer thread copies by TMA, two consumer warpgroups
hold 64 queries each; S of the next block of keys and O of the last one are in flight together, and the consumers take turns.
"""
import heapq

import torch
from torch import nn
from torch.utils.cpp_extension import load_inline

BLOCK_N = 128
STAGES = 2
SKIP = 0
TURNS = 1
GROUP = 16
QREG = 0

CUDA = r"""
#include <Python.h>
#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace {

constexpr int BLOCK_M = 128, BLOCK_N = @BLOCK_N@, STAGES = @STAGES@;
constexpr int KEY_DIM = 192, VALUE_DIM = 128;
constexpr int ROW = 128;                            // bytes: a tile lies as panels of 64 columns, one swizzle atom wide
constexpr int Q_PANEL = BLOCK_M * ROW, Q_TILE = 3 * Q_PANEL, PANEL = BLOCK_N * ROW, K_TILE = 3 * PANEL, V_TILE = 2 * PANEL;
constexpr int SHARED_BYTES = Q_TILE + STAGES * (K_TILE + V_TILE) + 1024 + 256;
constexpr int THREADS = 3 * 128, CONSUMER_WARPS = 8;
constexpr int NS = BLOCK_N / 2, NP = BLOCK_N / 4;   // registers of S and of P
enum { COUNTER = 0, LISTS = 1, ORDER = 2 };
constexpr float SLACK = 8.f;                        // the maximum may grow by 2^SLACK before O is rescaled

struct Shape {
    int queries, keys, heads, offset;               // offset = keys - queries
    int blocks_m, tiles, group, mode;
    float scale_log2;
    uint16_t* out;
    const int* list;                                // LISTS = 1: width tiles for each block; 2: tiles in order of their start; else none
    int width;
    int* next;                                      // [0] tiles given out beyond each block's first, [1] blocks that are done
    long long out_head, out_token;
};

__device__ __forceinline__ uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void mbar_init(uint32_t bar, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void mbar_expect(uint32_t bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbar_arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ bool mbar_try(uint32_t bar, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n.reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(bar), "r"(parity) : "memory");
    return done;
}
__device__ __forceinline__ void mbar_wait(uint32_t bar, uint32_t parity) {
    while (!mbar_try(bar, parity)) {}
}
__device__ __forceinline__ void named_sync(int id) { asm volatile("bar.sync %0, 256;" ::"r"(id) : "memory"); }
__device__ __forceinline__ void named_arrive(int id) { asm volatile("bar.arrive %0, 256;" ::"r"(id) : "memory"); }

__device__ __forceinline__ uint32_t of_peer(uint32_t address, uint32_t peer) {
    uint32_t r; asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(peer)); return r;
}
__device__ __forceinline__ void mbar_arrive_peer(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// half of a tile's rows, for both blocks of the pair; the other block brings the other half
template <int PANELS, int ROWS> __device__ __forceinline__ void load_half(const CUtensorMap* map, uint32_t to, uint32_t bar, int token, int head, int rank) {
    mbar_expect(bar, PANELS * ROWS * ROW);
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel)
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;"
                     ::"r"(to + panel * ROWS * ROW + rank * (ROWS / 2) * ROW), "l"(map), "r"(bar), "r"(panel * 64), "r"(token + rank * (ROWS / 2)), "r"(head),
                       "h"((uint16_t)3) : "memory");
}
template <int PANELS, int ROWS> __device__ __forceinline__ void load_tile(const CUtensorMap* map, uint32_t to, uint32_t bar, int token, int head) {
    mbar_expect(bar, PANELS * ROWS * ROW);
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel)
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
                     ::"r"(to + panel * ROWS * ROW), "l"(map), "r"(bar), "r"(panel * 64), "r"(token), "r"(head) : "memory");
}

// ---- wgmma -------------------------------------------------------------------------------------------------------
__device__ __forceinline__ uint64_t descriptor(uint32_t address, uint32_t leading_bytes) {
    return (uint64_t)((address & 0x3FFFF) >> 4) | (uint64_t)(leading_bytes >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
@WGMMA@
__device__ __forceinline__ void scores(float (&s)[NS], uint64_t q, uint64_t k) {    // S = Q K^T, 12 steps of 16
#pragma unroll
    for (int step = 0; step < 12; ++step) {
        uint64_t dq = ((step / 4) * Q_PANEL + (step % 4) * 32) >> 4, dk = ((step / 4) * PANEL + (step % 4) * 32) >> 4;
        if (step == 0) wgmma_first(s, q, k); else wgmma_next(s, q + dq, k + dk);
    }
}
__device__ __forceinline__ void scores(float (&s)[NS], const uint32_t (&q)[48], uint64_t k) {
#pragma unroll
    for (int step = 0; step < 12; ++step) {
        uint64_t dk = ((step / 4) * PANEL + (step % 4) * 32) >> 4;
        if (step == 0) wgmma_q_first(s, q[0], q[1], q[2], q[3], k);
        else wgmma_q_next(s, q[4 * step], q[4 * step + 1], q[4 * step + 2], q[4 * step + 3], k + dk);
    }
}
__device__ __forceinline__ void values(float (&o)[64], uint32_t (&p)[NP], uint64_t v) {  // O += P V, steps of 16 keys
#pragma unroll
    for (int step = 0; step < BLOCK_N / 16; ++step)
        wgmma_registers(o, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3], v + ((step * 16 * ROW) >> 4));
}

// ---- softmax -----------------------------------------------------------------------------------------------------
__device__ __forceinline__ float exp2_approx(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r;
}
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1)); return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1); return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
// A thread holds two rows: s[4 j], s[4 j + 1] of the first and s[4 j + 2], s[4 j + 3] of the second, columns 8 j + 2 (lane % 4) + {0, 1}.
struct Rows { float top[2], sum[2], alpha[2]; bool grown; };

template <bool FIRST, bool MASKED> __device__ __forceinline__ void softmax(float (&s)[NS], Rows& rows, float scale_log2) {
    bool grown = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float a = s[2 * r], b = s[2 * r + 1];
#pragma unroll
        for (int j = 1; j < BLOCK_N / 8; ++j) { a = fmaxf(a, s[4 * j + 2 * r]); b = fmaxf(b, s[4 * j + 2 * r + 1]); }
        float top = quad_max(fmaxf(a, b));
        if (!FIRST) {
            top = fmaxf(top, rows.top[r]);
            float less = (rows.top[r] - top) * scale_log2;
            if (MASKED && top == -INFINITY) less = 0.f;
#if @SKIP@
            if (less < -SLACK) { grown = true; rows.alpha[r] = exp2_approx(less); } else { top = rows.top[r]; rows.alpha[r] = 1.f; }
#else
            rows.alpha[r] = exp2_approx(less);
#endif
        }
        rows.top[r] = top;
    }
#if @SKIP@
    rows.grown = __any_sync(0xffffffffu, grown);
#else
    rows.grown = true;
#endif
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float shift = -rows.top[r] * scale_log2, a = 0.f, b = 0.f;
        if (MASKED && rows.top[r] == -INFINITY) shift = 0.f;
#pragma unroll
        for (int j = 0; j < BLOCK_N / 8; ++j) {
            float x = exp2_approx(fmaf(s[4 * j + 2 * r], scale_log2, shift)), y = exp2_approx(fmaf(s[4 * j + 2 * r + 1], scale_log2, shift));
            s[4 * j + 2 * r] = x; s[4 * j + 2 * r + 1] = y;
            a += x; b += y;
        }
        rows.sum[r] = FIRST ? a + b : fmaf(rows.sum[r], rows.alpha[r], a + b);
    }
}
__device__ __forceinline__ void to_bf16(uint32_t (&p)[NP], const float (&s)[NS]) {
#pragma unroll
    for (int i = 0; i < NP; ++i) p[i] = pack(s[2 * i], s[2 * i + 1]);
}
__device__ __forceinline__ void rescale(float (&o)[64], const Rows& rows) {
    if (rows.grown) {
#pragma unroll
        for (int i = 0; i < 64; ++i) o[i] *= rows.alpha[(i >> 1) & 1];
    }
}
__device__ __forceinline__ void mask(float (&s)[NS], int limit, int column) {       // limit: the last key that the first row sees
#pragma unroll
    for (int i = 0; i < NS; ++i) {
        int c = column + (i >> 2) * 8 + (i & 1);
        if (c > limit + ((i >> 1) & 1) * 8) s[i] = -INFINITY;
    }
}

// ---- which tile --------------------------------------------------------------------------------------------------
struct Tile { int block_m, head, keys; };            // keys: those that the last row sees
__device__ __forceinline__ Tile tile_of(int index, const Shape& shape, int rank) {
    int per_group = shape.group * shape.blocks_m, first = index / per_group * shape.group, rest = index % per_group;
    int heads = min(shape.group, shape.heads - first);
    int pair = shape.blocks_m - 1 - rest / heads;       // blocks_m counts pairs
    return {2 * pair + rank, first + rest % heads, min((pair + 1) * 2 * BLOCK_M + shape.offset, shape.keys)};
}

__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
mla_prefill(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
            const __grid_constant__ CUtensorMap map_v, const Shape shape) {
    extern __shared__ uint8_t raw[];
    const uint32_t q_tile = (shared_address(raw) + 1023) & ~1023u;      // the swizzle counts from multiples of 1024
    const uint32_t k_tiles = q_tile + Q_TILE, v_tiles = k_tiles + STAGES * K_TILE;
    const uint32_t bars = v_tiles + STAGES * V_TILE;
    const uint32_t q_full = bars, q_empty = bars + 8, k_full = bars + 16, k_empty = k_full + 8 * STAGES,
                   v_full = k_empty + 8 * STAGES, v_empty = v_full + 8 * STAGES;
    const uint32_t tile_full = v_empty + 8 * STAGES, tile_empty = tile_full + 16, tile_slot = tile_empty + 16;
    const int rank = blockIdx.x % 2, pair = blockIdx.x / 2;
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);

    if (threadIdx.x == 0) {
        for (int s = 0; s < 2; ++s) { mbar_init(tile_full + 8 * s, 1); mbar_init(tile_empty + 8 * s, CONSUMER_WARPS); }
        mbar_init(q_full, 1);
        mbar_init(q_empty, CONSUMER_WARPS);
        for (int s = 0; s < STAGES; ++s) {
            mbar_init(k_full + 8 * s, 1); mbar_init(k_empty + 8 * s, 2 * CONSUMER_WARPS);
            mbar_init(v_full + 8 * s, 1); mbar_init(v_empty + 8 * s, 2 * CONSUMER_WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    cluster_sync();

    if (warpgroup == 0) {                                               // ---- producer: one thread
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 0) {
            int next = shape.list[pair * shape.width];
            uint32_t k_count = 0, v_count = 0;                          // blocks loaded so far: stage and parity follow
            for (int wave = 0; ; ++wave) {                              // the wave-th tile of this thread block
                const int index = next;
                mbar_wait(tile_empty + 8 * (wave & 1), (wave >> 1 & 1) ^ 1);
                asm volatile("st.shared.s32 [%0], %1;" ::"r"(tile_slot + 4 * (wave & 1)), "r"(index) : "memory");
                mbar_arrive(tile_full + 8 * (wave & 1));
                if (index >= shape.tiles) break;
                next = shape.list[pair * shape.width + wave + 1];
                const Tile t = tile_of(index, shape, rank);
                auto load_k = [&](int block) {
                    uint32_t s = k_count % STAGES;
                    mbar_wait(k_empty + 8 * s, (k_count / STAGES & 1) ^ 1);         // a fresh barrier's "previous" phase counts as done
                    load_half<3, BLOCK_N>(&map_k, k_tiles + s * K_TILE, k_full + 8 * s, block * BLOCK_N, t.head, rank);
                    ++k_count;
                };
                auto load_v = [&](int block) {
                    uint32_t s = v_count % STAGES;
                    mbar_wait(v_empty + 8 * s, (v_count / STAGES & 1) ^ 1);
                    load_half<2, BLOCK_N>(&map_v, v_tiles + s * V_TILE, v_full + 8 * s, block * BLOCK_N, t.head, rank);
                    ++v_count;
                };
                mbar_wait(q_empty, (wave & 1) ^ 1);
                load_tile<3, BLOCK_M>(&map_q, q_tile, q_full, t.block_m * BLOCK_M, t.head);
                const int last = (t.keys - 1) / BLOCK_N;
                load_k(last);
                for (int block = last - 1; block >= 0; --block) { load_k(block); load_v(block + 1); }    // in the order of their use
                load_v(0);
            }
        }
    } else {                                                            // ---- consumers
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        const int consumer = warpgroup - 1, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        const int own_turn = 1 + consumer, other_turn = 2 - consumer;   // named barriers
        const uint64_t q_desc = descriptor(q_tile + consumer * 64 * ROW, 16);
        const uint64_t k_desc = descriptor(k_tiles, 16), v_desc = descriptor(v_tiles, PANEL);
        uint32_t k_count = 0, v_count = 0;
        const uint32_t k_free = of_peer(k_empty, lane & 1), v_free = of_peer(v_empty, lane & 1);    // lanes 0 and 1: both blocks' barriers
        auto wait_k = [&]() { mbar_wait(k_full + 8 * (k_count % STAGES), k_count / STAGES & 1); };
        auto wait_v = [&]() { mbar_wait(v_full + 8 * (v_count % STAGES), v_count / STAGES & 1); };
        auto free_k = [&]() { if (lane < 2) mbar_arrive_peer(k_free + 8 * (k_count % STAGES)); ++k_count; };
        auto free_v = [&]() { if (lane < 2) mbar_arrive_peer(v_free + 8 * (v_count % STAGES)); ++v_count; };
        auto k_now = [&]() { return k_desc + (k_count % STAGES) * (K_TILE >> 4); };
        auto v_now = [&]() { return v_desc + (v_count % STAGES) * (V_TILE >> 4); };

        if (@TURNS@ && consumer == 1) named_arrive(other_turn);         // the first consumer has the first turn
        for (int wave = 0; ; ++wave) {
            int index;
            mbar_wait(tile_full + 8 * (wave & 1), wave >> 1 & 1);
            asm volatile("ld.shared.s32 %0, [%1];" : "=r"(index) : "r"(tile_slot + 4 * (wave & 1)) : "memory");
            __syncwarp();
            if (lane == 0) mbar_arrive(tile_empty + 8 * (wave & 1));
            if (index >= shape.tiles) break;
            const Tile t = tile_of(index, shape, rank);
            const int row = t.block_m * BLOCK_M + consumer * 64 + warp * 16 + lane / 4;
            const int limit = row + shape.offset - lane % 4 * 2;        // the last visible column, less this thread's first
            const int clear = t.block_m * BLOCK_M + shape.offset;       // blocks whose last key is at most this need no mask
            float o[64];
            uint32_t p[NP];
            Rows rows;
            int block = (t.keys - 1) / BLOCK_N;
            while (block > 0 && block * BLOCK_N > clear + BLOCK_M - 1) { wait_k(); free_k(); wait_v(); free_v(); --block; }  // none of this block's rows sees these
#pragma unroll
            for (int i = 0; i < 64; ++i) o[i] = 0.f;

            mbar_wait(q_full, wave & 1);
#if @QREG@
            uint32_t q[48];
            {
                uint32_t at = q_tile + (consumer * 64 + warp * 16 + lane % 16) * ROW;
#pragma unroll
                for (int step = 0; step < 12; ++step)
                    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                                 : "=r"(q[4 * step]), "=r"(q[4 * step + 1]), "=r"(q[4 * step + 2]), "=r"(q[4 * step + 3])
                                 : "r"(at + step / 4 * Q_PANEL + ((step % 4 * 2 + lane / 16) ^ (lane % 8)) * 16) : "memory");
                __syncwarp();
                if (lane == 0) mbar_arrive(q_empty);                    // the producer may bring the next Q
            }
#else
            const uint64_t q = q_desc;
#endif
            {   // the last block of keys: the diagonal crosses it
                float s[NS];
                wait_k();
                wgmma_fence(); scores(s, q, k_now()); wgmma_commit();
                wgmma_wait<0>(s);
                free_k();
                mask(s, limit, block * BLOCK_N);
                softmax<true, true>(s, rows, shape.scale_log2);
                to_bf16(p, s);
            }
#define STEP(MASKED) { \
                float s[NS]; \
                wait_k(); \
                if (@TURNS@) named_sync(own_turn); \
                wgmma_fence(); \
                scores(s, q, k_now()); wgmma_commit(); \
                wait_v(); \
                wgmma_fence(o, p); \
                values(o, p, v_now()); wgmma_commit(); \
                if (@TURNS@) named_arrive(other_turn); \
                wgmma_wait<1>(s); \
                free_k(); \
                if (MASKED) mask(s, limit, block * BLOCK_N); \
                softmax<false, MASKED>(s, rows, shape.scale_log2); \
                wgmma_wait_all(o, p); \
                free_v(); \
                to_bf16(p, s); \
                rescale(o, rows); \
            }
            --block;
            while (block >= 0 && (block + 1) * BLOCK_N - 1 > clear) { STEP(true); --block; }
            for (; block >= 0; --block) STEP(false);
            if (!@QREG@ && lane == 0) mbar_arrive(q_empty);             // the producer may bring the next Q
            wait_v();
            wgmma_fence(o, p); values(o, p, v_now()); wgmma_commit();
            wgmma_wait_all(o, p);
            free_v();

            uint16_t* out = shape.out + t.head * shape.out_head + lane % 4 * 2;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float inverse = __frcp_rn(quad_sum(rows.sum[r]));
                if (row + 8 * r < shape.queries) {
                    uint16_t* to = out + (row + 8 * r) * shape.out_token;
#pragma unroll
                    for (int j = 0; j < 16; ++j)
                        *reinterpret_cast<uint32_t*>(to + 8 * j) = pack(o[4 * j + 2 * r] * inverse, o[4 * j + 2 * r + 1] * inverse);
                }
            }
        }
        if (@TURNS@ && consumer == 0) named_sync(own_turn);             // takes up the last, unused turn
    }
    __syncwarp();
    cluster_sync();                                     // neither leaves while the other still writes to it
}

// ---- host --------------------------------------------------------------------------------------------------------
int tensor_map(CUtensorMap* map, long long data, long long width, long long tokens, long long heads, long long token_stride, long long head_stride, int box_rows) {
    static decltype(&cuTensorMapEncodeTiled) encode = nullptr;
    if (!encode) {
        cudaDriverEntryPointQueryResult found; void* f = nullptr;
        if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found) != cudaSuccess || !f) return 1000;
        encode = (decltype(encode))f;
    }
    cuuint64_t sizes[3] = {(cuuint64_t)width, (cuuint64_t)tokens, (cuuint64_t)heads};
    cuuint64_t strides[2] = {(cuuint64_t)token_stride * 2, (cuuint64_t)head_stride * 2};
    cuuint32_t box[3] = {64, (cuuint32_t)box_rows, 1}, step[3] = {1, 1, 1};
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, (void*)data, sizes, strides, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

// q, k, v, out, counter, queries, keys, heads, strides of token and head of q, k, v, out, group, stream, list, its width, mode
PyObject* run(PyObject*, PyObject* const* given, Py_ssize_t) {
    long long a[21];
    for (int i = 0; i < 21; ++i) a[i] = PyLong_AsLongLong(given[i]);
    Shape shape;
    shape.queries = a[5]; shape.keys = a[6]; shape.heads = a[7]; shape.offset = a[6] - a[5];
    shape.blocks_m = (shape.queries + 2 * BLOCK_M - 1) / (2 * BLOCK_M); shape.tiles = shape.blocks_m * shape.heads;
    shape.group = a[16]; shape.scale_log2 = (float)(1.4426950408889634 / 13.856406460551018);
    shape.out = (uint16_t*)a[3]; shape.next = (int*)a[4]; shape.out_token = a[14]; shape.out_head = a[15];
    shape.list = (const int*)a[18]; shape.width = a[19]; shape.mode = a[20];
    CUtensorMap q, k, v;
    int error = tensor_map(&q, a[0], KEY_DIM, shape.queries, shape.heads, a[8], a[9], BLOCK_M);
    if (!error) error = tensor_map(&k, a[1], KEY_DIM, shape.keys, shape.heads, a[10], a[11], BLOCK_N / 2);
    if (!error) error = tensor_map(&v, a[2], VALUE_DIM, shape.keys, shape.heads, a[12], a[13], BLOCK_N / 2);
    if (error) return PyLong_FromLong(10000 + error);
    static int processors = 0;
    if (!processors) {
        int device;
        cudaGetDevice(&device);
        cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    }
    error = cudaFuncSetAttribute(mla_prefill, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);
    if (error) return PyLong_FromLong(error);
    int grid = 2 * (processors / 2 < shape.tiles ? processors / 2 : shape.tiles);
    mla_prefill<<<grid, THREADS, SHARED_BYTES, (cudaStream_t)a[17]>>>(q, k, v, shape);
    return PyLong_FromLong(cudaGetLastError());
}
PyMethodDef methods[] = {{"run", (PyCFunction)(void*)run, METH_FASTCALL, ""}, {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "mla_prefill", "", -1, methods};

}  // namespace
#define INIT(name) PyInit_##name
#define INIT_OF(name) INIT(name)
PyMODINIT_FUNC INIT_OF(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
"""


def wgmma_source():
    ns, np = BLOCK_N // 2, BLOCK_N // 4

    def listed(n):
        return "{" + ", ".join(f"%{i}" for i in range(n)) + "}"

    def ops(name, n, kind):
        return ", ".join(f'"{kind}"({name}[{i}])' for i in range(n))

    head = "__device__ __forceinline__ void "
    shape = f"wgmma.mma_async.sync.aligned.m64n{BLOCK_N}k16.f32.bf16.bf16 {listed(ns)}, %{ns}, %{ns + 1}, p, 1, 1, 0, 0;"
    return "\n".join(
        [
            head + f"wgmma_first(float (&d)[NS], uint64_t a, uint64_t b) {{ asm volatile(\"{{.reg .pred p; setp.ne.b32 p, 0, 0; {shape}}}\" : "
            + ops("d", ns, "=f") + ' : "l"(a), "l"(b)); }',
            head + f"wgmma_next(float (&d)[NS], uint64_t a, uint64_t b) {{ asm volatile(\"{{.reg .pred p; setp.ne.b32 p, 1, 0; {shape}}}\" : "
            + ops("d", ns, "+f") + ' : "l"(a), "l"(b)); }',
            *(
                head + f"wgmma_q_{name}(float (&d)[NS], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b) {{ asm volatile("
                f'"{{.reg .pred p; setp.ne.b32 p, {p}, 0; wgmma.mma_async.sync.aligned.m64n{BLOCK_N}k16.f32.bf16.bf16 {listed(ns)}, '
                f'{{%{ns}, %{ns + 1}, %{ns + 2}, %{ns + 3}}}, %{ns + 4}, p, 1, 1, 0;}}" : ' + ops("d", ns, kind)
                + ' : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b)); }'
                for name, p, kind in (("first", 0, "=f"), ("next", 1, "+f"))
            ),
            head + "wgmma_registers(float (&d)[64], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b) { asm volatile("
            f'"{{.reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {listed(64)}, '
            '{%64, %65, %66, %67}, %68, p, 1, 1, 1;}" : ' + ops("d", 64, "+f") + ' : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b)); }',
            head + 'wgmma_fence(float (&o)[64], uint32_t (&p)[NP]) { asm volatile("wgmma.fence.sync.aligned;" : '
            + ops("o", 64, "+f") + ", " + ops("p", np, "+r") + ' :: "memory"); }',
            "template <int PENDING> " + head + f'wgmma_wait(float (&d)[NS]) {{ asm volatile("wgmma.wait_group.sync.aligned %{ns};" : '
            + ops("d", ns, "+f") + ' : "n"(PENDING) : "memory"); }',
            head + 'wgmma_wait_all(float (&o)[64], uint32_t (&p)[NP]) { asm volatile("wgmma.wait_group.sync.aligned 0;" : '
            + ops("o", 64, "+f") + ", " + ops("p", np, "+r") + ' :: "memory"); }',
        ]
    )


_run = None
_counters = {}
_lists = {}


def balanced(costs, bins):
    """The numbers of costs in `bins` lists of nearly equal sums, each list by falling cost: longest first, then exchanges."""
    lists, heap = [[] for _ in range(bins)], [(0.0, b) for b in range(bins)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        total, b = heapq.heappop(heap)
        lists[b].append(i)
        heapq.heappush(heap, (total + costs[i], b))
    sums = [sum(costs[i] for i in items) for items in lists]
    for _ in range(1500 if len(costs) <= 4096 else 0):
        most = max(range(bins), key=sums.__getitem__)
        best = (1e-6, None)
        for b in range(bins):
            room = sums[most] - sums[b]
            if room <= 1e-6:
                continue
            kinds = {costs[i]: n for n, i in enumerate(lists[b])}
            for x, i in enumerate(lists[most]):
                for cost, y in (*kinds.items(), (0, None)):
                    moved = costs[i] - cost
                    gain = min(moved, room - moved)       # how far the larger of the two sums falls
                    if gain > best[0]:
                        best = (gain, (b, x, y, moved))
        if best[1] is None:
            break
        b, x, y, moved = best[1]
        if y is None:
            lists[b].append(lists[most].pop(x))
        else:
            lists[most][x], lists[b][y] = lists[b][y], lists[most][x]
        sums[most] -= moved
        sums[b] += moved
    for items in lists:
        items.sort(key=lambda i: (-costs[i], i))
    return lists


def plan(queries, keys, heads, device):
    """(list of tiles on the device or None, its width, mode), made once for each shape"""
    blocks = -(-queries // 256)
    tiles, bins = blocks * heads, torch.cuda.get_device_properties(device).multi_processor_count // 2
    group = min(GROUP, heads)
    costs = []
    for index in range(tiles):
        first, rest = index // (group * blocks) * group, index % (group * blocks)
        m = blocks - 1 - rest // min(group, heads - first)
        costs.append(-(-min((m + 1) * 256 + keys - queries, keys) // BLOCK_N) + 0.7)
    lists = balanced(costs, min(bins, tiles))
    lists.sort(key=lambda items: items)
    width = max(map(len, lists)) + 1
    table = [items + [tiles] * (width - len(items)) for items in lists]
    return torch.tensor(table, dtype=torch.int32, device=device), width, 1


def built():
    global _run
    source = CUDA.replace("@WGMMA@", wgmma_source())
    for name, value in (("BLOCK_N", BLOCK_N), ("STAGES", STAGES), ("SKIP", SKIP), ("TURNS", TURNS), ("QREG", QREG)):
        source = source.replace(f"@{name}@", str(value))
    _run = load_inline(
        f"mla_prefill_pairs_{BLOCK_N}_{STAGES}_{SKIP}_{TURNS}_{QREG}", "", source, no_implicit_headers=True,
        extra_cuda_cflags=["-O3", "-std=c++17", "-Xptxas", "-v", "-gencode=arch=compute_90a,code=sm_90a"],
    ).run
    return _run


def for_copy_engine(x):
    """x where the copy engine can read it as it lies (rows contiguous; start and strides multiples of 16 bytes), else a contiguous copy."""
    if x.stride(2) == 1 and x.data_ptr() % 16 == 0 and all(x.size(i) == 1 or (x.stride(i) > 0 and x.stride(i) % 8 == 0) for i in (0, 1)):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def strides(x):
    return [x.stride(i) if x.size(i) > 1 else x.size(1) * x.size(2) if i == 0 else x.size(2) for i in (0, 1)]


def attention(q, k, v):
    for x, width in ((q, 192), (k, 192), (v, 128)):
        if x.dim() != 3 or x.size(2) != width or x.dtype != torch.bfloat16 or not x.is_cuda or x.device != q.device:
            raise ValueError("expected bf16 CUDA tensors (tokens, heads, 192 or 128) on one device")
    queries, heads, _ = q.shape
    keys = k.size(0)
    if k.size(1) != heads or v.size(1) != heads or v.size(0) != keys or not 0 < queries <= keys or heads == 0:
        raise ValueError("q, k and v must agree in heads, k and v in tokens, and there must be as many keys as queries at least")
    if queries == 1 or heads == 1:
        out = torch.empty(queries, heads, 128, dtype=q.dtype, device=q.device)
    else:                                             # heads outermost, as einsum returns it
        out = torch.empty(heads, queries, 128, dtype=q.dtype, device=q.device).transpose(0, 1)
    q, k, v = for_copy_engine(q), for_copy_engine(k), for_copy_engine(v)
    run = _run or built()
    with torch.cuda.device(q.device):
        stream = torch.cuda.current_stream().cuda_stream
        counter = _counters.get((q.device.index, stream))
        if counter is None:                           # each call leaves it at zero for the next one of its stream
            counter = _counters[q.device.index, stream] = torch.zeros(2, dtype=torch.int32, device=q.device)
        key = queries, keys, heads, q.device.index
        if key not in _lists:
            _lists[key] = plan(queries, keys, heads, q.device)
        tiles, width, mode = _lists[key]
        error = run(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), counter.data_ptr(), queries, keys, heads,
            *strides(q), *strides(k), *strides(v), *strides(out), min(GROUP, heads), stream,
            tiles.data_ptr() if mode else 0, width, mode,
        )
    if error:
        raise RuntimeError(f"mla_prefill: error {error}")
    return out


class ModelNew(nn.Module):
    def forward(self, q, k, v):
        return attention(q, k, v)
