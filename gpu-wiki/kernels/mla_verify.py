"""Attention of draft tokens over a cache of latent vectors (MLA, weights absorbed), 128 heads, 512 + 64 numbers a key.

 * A cluster of two blocks takes the 128 heads' rows of one draft token, 64 rows a block, and shares keys by multicast. G
   such clusters walk the same keys at the same time (a team), so that keys come from DRAM once. Teams get equal shares of
   all blocks of 64 keys; a request that is cut between teams is merged in the launch, by the team that has its first key.
 * Roles: one warpgroup for the scores and their softmax, with 31 of the 36 steps of Q in registers; two warpgroups that
   own 256 columns of the sums each, and load what they need. Three stages of 64 keys; P in two buffers.
 * The weights of a block are given away when the scores of the next are nearly done (GATE), so that the tensor cores
   always have work. Keys behind a request's end may be NaN: they are zeroed in shared memory.
The sums' warpgroups spill 40 bytes. evals/trials/mla_verify states it.
"""

import functools

import torch
from torch import nn
from torch.utils.cpp_extension import load_inline

G = 4  # clusters that walk the same keys together
PF = 0  # blocks of keys that are fetched ahead into the L2
GATE = 1  # the weights of a block are given away when the scores of the next are nearly done
LATE = 8  # the last steps of those (of 36)
SREG = 184
OREG = 160
PROBE = ""


def names(n, start=0):
    return ", ".join(f"%{i}" for i in range(start, start + n))


def inout(n, d="d"):
    return ", ".join(f'"+f"({d}[{i}])' for i in range(n))


def wrappers():
    text = ""
    for half, n in ((32, 64), (128, 256)):
        text += f"""
__device__ __forceinline__ void touch(float (&d)[{half}]) {{ asm volatile("" : {inout(half)} :: "memory"); }}
template <int N> __device__ __forceinline__ void wgmma_wait(float (&d)[{half}]) {{
    asm volatile("wgmma.wait_group.sync.aligned %{half};" : {inout(half)} : "n"(N) : "memory");
}}
"""
    text += f"""
template <int KEEP> __device__ __forceinline__ void qk_rs(float (&d)[32], const u32* a, u64 b) {{
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{{names(32)}}}, {{%32, %33, %34, %35}}, %36, %37, 1, 1, 0;"
                 : {inout(32)} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(KEEP));
}}
template <int KEEP> __device__ __forceinline__ void qk_ss(float (&d)[32], u64 a, u64 b) {{
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{{names(32)}}}, %32, %33, %34, 1, 1, 0, 0;"
                 : {inout(32)} : "l"(a), "l"(b), "n"(KEEP));
}}
__device__ __forceinline__ void pv_ss(float (&d)[128], u64 a, u64 b) {{
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {{{names(128)}}}, %128, %129, 1, 1, 1, 0, 1;"
                 : {inout(128)} : "l"(a), "l"(b));
}}
"""
    return text


CUDA = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

typedef uint32_t u32;
typedef uint64_t u64;
constexpr u32 PANEL = 8192, HALF = 4 * PANEL, STAGES = 3;
constexpr u32 OFF_R = 2 * STAGES * HALF, OFF_P = OFF_R + PANEL, OFF_Q = OFF_P + 2 * PANEL, OFF_META = OFF_Q + PANEL;
constexpr u32 META = 3072, SHARED = OFF_META + META;
// meta: barriers, then what goes with each buffer of P, then the start of the team
constexpr u32 B_HFULL = 0, B_HEMPTY = 48, B_RFULL = 96, B_REMPTY = 104, B_QFULL = 112, B_PFULL = 120, B_PEMPTY = 136;
constexpr u32 M_STEP = 0x400, M_SCALE = 160, M_FLAG = M_SCALE + 512, M_START = M_FLAG + 32, M_LOADS = M_START + 20, M_TILES = M_LOADS + 56;  // floats 2x64, ints 2x4, ints
static_assert(M_TILES + 3 * 72 <= M_STEP && M_STEP + 2048 <= META && SHARED <= 232448, "");

struct Params {
    const int* lengths; __nv_bfloat16* out; float* parts; float2* stats; u32* flags; float2* own;
    int requests, drafts, heads, longest, g, sets, teams;
};

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void bar_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory"); }
__device__ __forceinline__ void bar_expect(u32 bar, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory"); }
__device__ __forceinline__ void bar_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
__device__ __forceinline__ void bar_arrive_at(u32 bar, u32 block) {
    asm volatile("{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [r];\n}" ::"r"(bar), "r"(block) : "memory");
}
__device__ __forceinline__ void bar_wait(u32 bar, u32 parity) {
    asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra again;\ndone:\n}" ::"r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ void load(u32 to, const CUtensorMap* map, u32 bar, int x, int row, int panel, int request) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
                 ::"r"(to), "l"(map), "r"(bar), "r"(x), "r"(row), "r"(panel), "r"(request) : "memory");
}
__device__ __forceinline__ void load_both(u32 to, const CUtensorMap* map, u32 bar, int row, int panel, int request) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
                 ::"r"(to), "l"(map), "r"(bar), "r"(0), "r"(row), "r"(panel), "r"(request), "h"((uint16_t)3) : "memory");
}
__device__ __forceinline__ void prefetch(const CUtensorMap* map, int row, int panel, int request) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(0), "r"(row), "r"(panel), "r"(request) : "memory");
}
__device__ __forceinline__ float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ u32 pack(float lo, float hi) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
__device__ __forceinline__ u64 desc(u32 address, u32 leading) {
    return (u64)((address & 0x3FFFF) >> 4) | ((u64)(leading >> 4) << 16) | ((u64)(1024 >> 4) << 32) | (1ull << 62);
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ __forceinline__ float lds(u32 a) { float v; asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(a) : "memory"); return v; }
__device__ __forceinline__ int ldsi(u32 a) { int v; asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a) : "memory"); return v; }
__device__ __forceinline__ void sts(u32 a, float v) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(a), "f"(v) : "memory"); }
__device__ __forceinline__ void stsi(u32 a, int v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(a), "r"(v) : "memory"); }
@WRAPPERS@

// The tiles of a team: blocks b0 to b1 of a request, for one set of G groups of 128 rows. A role's thread makes the next one, in
// one of two places, for its warpgroup to read: registers are scarce.
enum { T_B0, T_B1, T_LENGTH, T_REQUEST, T_GROUP, T_REST, T_AHEAD };  // REST: blocks behind b1; AHEAD: the request of the next tile
struct Tiles {
    u32 at;
    __device__ __forceinline__ void start(u32 meta) { for (int i = 0; i < 4; ++i) stsi(at + 4 * i, ldsi(meta + M_START + 4 * i)); }
    __device__ __forceinline__ u32 place(u32 turn) const { return at + 16 + 28 * turn; }
    __device__ __forceinline__ void next(const Params& p, int member, u32 turn) {
        const u32 to = place(turn);
        int request = ldsi(at), set = ldsi(at + 4), left = ldsi(at + 12);
        const int b0 = ldsi(at + 8);
        if (left <= 0) { stsi(to, -1); return; }
        const int length = __ldg(p.lengths + request), blocks = max(1, (length + 63) / 64), b1 = min(blocks, b0 + left);
        left -= b1 - b0;
        stsi(to + 4 * T_B0, b0), stsi(to + 4 * T_B1, b1), stsi(to + 4 * T_LENGTH, length), stsi(to + 4 * T_REQUEST, request);
        stsi(to + 4 * T_GROUP, set * p.g + member), stsi(to + 4 * T_REST, blocks - b1);
        if (++set == p.sets) set = 0, ++request;
        stsi(to + 4 * T_AHEAD, left > 0 ? request : p.requests);
        stsi(at, request), stsi(at + 4, set), stsi(at + 8, 0), stsi(at + 12, left);
    }
    __device__ __forceinline__ int get(u32 turn, int what) const { return ldsi(place(turn) + 4 * what); }
};
__device__ __forceinline__ int share(int total, int team, int teams) { return int((long long)total * team / teams); }

// What one thread loads into the ring of a half: for each tile its part of Q, then the blocks of keys. Kept in shared memory.
struct Loads {
    u32 at;
    __device__ __forceinline__ void start(u32 meta) {
        for (int i = 0; i < 4; ++i) stsi(at + 4 * i, ldsi(meta + M_START + 4 * i));
        stsi(at + 16, 0), stsi(at + 20, -1), stsi(at + 24, -1);
    }
    __device__ __forceinline__ void issue(const Params& p, const CUtensorMap* q_map, const CUtensorMap* k_map, u32 to, u32 full, u32 empty, u32 phase, u32 half, u32 rank, int member) {
        int request = ldsi(at + 16), b = ldsi(at + 20), b1 = ldsi(at + 24);
        if (b == b1) {  // a new tile
            int left = ldsi(at + 12);
            if (left <= 0) return;
            request = ldsi(at);
            int set = ldsi(at + 4);
            const int b0 = ldsi(at + 8), blocks = max(1, (__ldg(p.lengths + request) + 63) / 64), row = (set * p.g + member) * 128 + rank * 64;
            b1 = min(blocks, b0 + left), left -= b1 - b0;
            bar_wait(empty, phase);
            bar_expect(full, HALF);
            for (int i = 0; i < 4; ++i) load(to + i * PANEL, q_map, full, 0, row, 4 * half + i, request);
            stsi(at + 16, request), stsi(at + 20, b0), stsi(at + 24, b1);
            if (++set == p.sets) set = 0, ++request;
            stsi(at, request), stsi(at + 4, set), stsi(at + 8, 0), stsi(at + 12, left);
            return;
        }
        stsi(at + 20, b + 1);
        if (PF && (b & (p.g - 1)) == member) {
            int ahead = b + PF, of = request;
            if (ahead >= b1) ahead -= b1, of = ldsi(at + 12) > 0 ? ldsi(at) : p.requests;
            if (of < p.requests) prefetch(k_map, ahead * 64, 4 * half + 2 * rank, of);
        }
        bar_wait(empty, phase);
#ifdef NO_LOADS
        bar_arrive(full);
#else
        bar_expect(full, HALF);
        load_both(to + rank * 2 * PANEL, k_map, full, b * 64, 4 * half + 2 * rank, request);
#endif
    }
};

__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
mla(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap r_map, const Params p) {
    extern __shared__ __align__(1024) uint8_t raw[];
    const u32 base = shared_address(raw), meta = base + OFF_META;
    const u32 tid = threadIdx.x, lane = tid & 31, role = __shfl_sync(~0u, tid / 128, 0), warp = __shfl_sync(~0u, tid / 32 & 3, 0);
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    const int cluster = blockIdx.x / 2, team = cluster / p.g, member = cluster % p.g;
    if (tid == 0) {
        if (base & 1023) __trap();
        for (int i = 0; i < 6; ++i) bar_init(meta + B_HFULL + 8 * i, 1), bar_init(meta + B_HEMPTY + 8 * i, 8);
        bar_init(meta + B_RFULL, 1), bar_init(meta + B_REMPTY, 8), bar_init(meta + B_QFULL, 1);
        for (int i = 0; i < 2; ++i) bar_init(meta + B_PFULL + 8 * i, 4), bar_init(meta + B_PEMPTY + 8 * i, 8);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (tid / 32 == 1) {  // where the team starts
        int total = 0;
        for (int r = lane; r < p.requests; r += 32) total += max(1, (p.lengths[r] + 63) / 64) * p.sets;
#pragma unroll
        for (int i = 16; i; i /= 2) total += __shfl_xor_sync(~0u, total, i);
        const int from = share(total, team, p.teams), to = share(total, team + 1, p.teams);
        if (lane == 0) stsi(meta + M_START, 0), stsi(meta + M_START + 12, 0), stsi(meta + M_START + 16, total);
        __syncwarp();
        int before = 0;
        for (int r0 = 0; r0 < p.requests; r0 += 32) {
            const int r = r0 + lane, blocks = r < p.requests ? max(1, (p.lengths[r] + 63) / 64) : 0;
            int sum = blocks * p.sets;
#pragma unroll
            for (int i = 1; i < 32; i *= 2) { const int x = __shfl_up_sync(~0u, sum, i); if (lane >= i) sum += x; }
            const int end = before + sum, begin = end - blocks * p.sets;
            if (from >= begin && from < end)
                stsi(meta + M_START, r), stsi(meta + M_START + 4, (from - begin) / blocks), stsi(meta + M_START + 8, (from - begin) % blocks), stsi(meta + M_START + 12, to - from);
            before = __shfl_sync(~0u, end, 31);
        }
    }
    __syncthreads();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    Tiles tiles = {meta + M_TILES + 72 * role};
    if ((tid & 127) == 0) tiles.start(meta), tiles.next(p, member, 0);
    u32 turn = 0;
    auto release = [&](u32 bar) { if (lane < 2) bar_arrive_at(bar, lane); };

    if (role == 0) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(SREG));
        const u64 ds = (desc(meta + M_STEP, 1024) & 0xFFFFFFFFull) | ((u64)(128 >> 4) << 32);  // no swizzle
        const u64 dh = desc(base, 16), dr = desc(base + OFF_R, 16), dq = desc(base + OFF_Q, 16);
        constexpr float c = 0.07216878364870323f * 1.4426950408889634f;
        auto lane_now = []() { u32 x; asm volatile("mov.u32 %0, %%laneid;" : "=r"(x)); return x; };  // a register less to keep
        u32 q[124], count = 0;  // no register for the last step before the position  // count: blocks
        u32 slot = 0, phase = 0;
        float s[32], m0, m1, l0, l1;
#pragma unroll
        for (int i = 0; i < 32; ++i) s[i] = 0.f;
        while (true) {
            asm volatile("bar.sync 1, 128;" ::: "memory");  // the tile is known; the last scores with the old Q are done
            const int b0 = tiles.get(turn, T_B0);
            if (b0 < 0) break;
            int blocks = tiles.get(turn, T_B1) - b0;
            int valid = tiles.get(turn, T_LENGTH) - p.drafts + tiles.get(turn, T_GROUP) * 128 / p.heads + 1 - b0 * 64;  // keys that are seen, from this block on
            auto rope = [&]() {  // by one thread
                const int block = tiles.get(turn, T_B0), b1 = tiles.get(turn, T_B1);
                stsi(tiles.place(turn) + 4 * T_B0, block + 1);
                if (PF && (block & (p.g - 1)) == member) {
                    int ahead = block + PF, of = tiles.get(turn, T_REQUEST);
                    if (ahead >= b1) ahead -= b1, of = tiles.get(turn, T_AHEAD);
                    if (of < p.requests) prefetch(&r_map, ahead * 64 + 32 * rank, 8, of);
                }
                bar_wait(meta + B_REMPTY, (count & 1) ^ 1);
#ifdef NO_LOADS
                bar_arrive(meta + B_RFULL);
#else
                bar_expect(meta + B_RFULL, PANEL);
                load_both(base + OFF_R + rank * (PANEL / 2), &r_map, meta + B_RFULL, block * 64 + 32 * rank, 8, tiles.get(turn, T_REQUEST));
#endif
            };
            if (warp == 0) {
                if (lane_now() == 0) {
                    bar_expect(meta + B_QFULL, PANEL);
                    load(base + OFF_Q, &q_map, meta + B_QFULL, 0, tiles.get(turn, T_GROUP) * 128 + rank * 64, 8, tiles.get(turn, T_REQUEST));
                }
                __syncwarp();
            }
            {
                const u32 lane = lane_now(), row = warp * 16 + (lane & 15);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    bar_wait(meta + B_HFULL + 24 * half + 8 * slot, phase);
                    u32 all = 0;
#pragma unroll
                    for (int i = 0; i < 16; ++i) {
                        const u32 at = base + (half * 3 + slot) * HALF + (i / 4) * PANEL + row * 128 + (((2 * (i % 4) + (lane >> 4)) ^ (row & 7)) << 4);
                        const int n = 16 * half + i;
                        u32 f[4];
                        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3]) : "r"(at) : "memory");
                        all |= f[0];
#pragma unroll
                        for (int j = 0; j < 4; ++j) if (n < 31) q[n < 31 ? 4 * n + j : 0] = f[j];
                        if (n == 31) {
                            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                                         ::"r"(meta + M_STEP + (lane >> 4) * 1024 + row * 16), "r"(f[0]), "r"(f[1]), "r"(f[2]), "r"(f[3]) : "memory");
                            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                        }
                    }
                    __syncwarp();
                    if (lane < 2 && int(all >> 1) > -p.g) bar_arrive_at(meta + B_HEMPTY + 24 * half + 8 * slot, lane);  // all: always, it waits for the loads
                }
                if (++slot == 3) slot = 0, phase ^= 1;
                asm volatile("bar.sync 1, 128;" ::: "memory");
            }
            m0 = m1 = -1e30f, l0 = l1 = 0.f;
            auto signal = [&](u32 buffer) { __syncwarp(); if (lane_now() == 0) bar_arrive(meta + B_PFULL + 8 * buffer); };
            auto scores = [&]() {  // of block number `count`; the signal for the weights of the one before
                bar_wait(meta + B_HFULL + 8 * slot, phase);
                bar_wait(meta + B_HFULL + 24 + 8 * slot, phase);
                const u64 k0 = dh + slot * (HALF / 16), k1 = k0 + 3 * (HALF / 16);
                touch(s); wgmma_fence();
#ifndef NO_SCORES
#pragma unroll
                for (int i = 0; i < 32; ++i) {
                    if (i == 36 - LATE) wgmma_commit();
                    const u64 k = (i < 16 ? k0 : k1) + (i / 4 % 4) * (PANEL / 16) + (i % 4) * 2;
                    if (i == 0) qk_rs<0>(s, q, k);
                    else if (i < 31) qk_rs<1>(s, q + (i < 31 ? 4 * i : 0), k);
                    else qk_ss<1>(s, ds, k);
                }
#endif
                if (LATE == 4) wgmma_commit();
                bar_wait(meta + B_QFULL, turn);
                bar_wait(meta + B_RFULL, count & 1);
                wgmma_fence();
#ifndef NO_SCORES
#pragma unroll
                for (int i = 0; i < 4; ++i) qk_ss<1>(s, dq + i * 2, dr + i * 2);
#endif
                wgmma_commit();
                if (++slot == 3) slot = 0, phase ^= 1;
            };
            auto softmax = [&](bool last) {  // of block number `count`
                if (valid < 64) {
                    const int edge = valid - 2 * (lane_now() & 3);
#pragma unroll
                    for (int i = 0; i < 32; ++i) if (8 * (i / 4) + (i & 1) >= edge) s[i] = -INFINITY;
                }
                float x0 = s[0], y0 = s[1], x1 = s[2], y1 = s[3];
#pragma unroll
                for (int i = 1; i < 8; ++i) {
                    x0 = fmaxf(x0, s[4 * i]), y0 = fmaxf(y0, s[4 * i + 1]);
                    x1 = fmaxf(x1, s[4 * i + 2]), y1 = fmaxf(y1, s[4 * i + 3]);
                }
                x0 = fmaxf(x0, y0), x1 = fmaxf(x1, y1);
                x0 = fmaxf(x0, __shfl_xor_sync(~0u, x0, 1)), x1 = fmaxf(x1, __shfl_xor_sync(~0u, x1, 1));
                x0 = fmaxf(x0, __shfl_xor_sync(~0u, x0, 2)), x1 = fmaxf(x1, __shfl_xor_sync(~0u, x1, 2));
                x0 *= c, x1 *= c;
                const bool scaled = __any_sync(~0u, x0 > m0 + 8.f || x1 > m1 + 8.f);
                const u32 buffer = count & 1, lane = lane_now();
                bar_wait(meta + B_PEMPTY + 8 * buffer, (count >> 1 & 1) ^ 1);
                if (scaled) {
                    const float n0 = fmaxf(m0, x0), n1 = fmaxf(m1, x1), a0 = ex2(m0 - n0), a1 = ex2(m1 - n1);
                    m0 = n0, m1 = n1, l0 *= a0, l1 *= a1;
                    const u32 at = meta + M_SCALE + buffer * 256 + 4 * (warp * 16 + lane / 4);
                    if ((lane & 3) == 0) sts(at, a0), sts(at + 32, a1);
                }
                if (lane == 0) stsi(meta + M_FLAG + buffer * 16 + 4 * warp, scaled);
                const u32 row = warp * 16 + (lane & 15), to = base + OFF_P + buffer * PANEL + row * 128 + (((lane >> 4) ^ (row & 7)) << 4);
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    u32 w[4];
#pragma unroll
                    for (int n = 0; n < 2; ++n) {
                        const int i = 8 * k + 4 * n;
                        const float e0 = ex2(fmaf(s[i], c, -m0)), e1 = ex2(fmaf(s[i + 1], c, -m0));
                        const float e2 = ex2(fmaf(s[i + 2], c, -m1)), e3 = ex2(fmaf(s[i + 3], c, -m1));
                        w[2 * n] = pack(e0, e1), w[2 * n + 1] = pack(e2, e3);
                        l0 += e0 + e1, l1 += e2 + e3;
                    }
                    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                                 ::"r"(to ^ (k << 5)), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
                }
                if (last) {
                    l0 += __shfl_xor_sync(~0u, l0, 1), l1 += __shfl_xor_sync(~0u, l1, 1);
                    l0 += __shfl_xor_sync(~0u, l0, 2), l1 += __shfl_xor_sync(~0u, l1, 2);
                    float2* at = p.own + (blockIdx.x * 2 + buffer) * 64 + warp * 16 + lane / 4;
                    if ((lane & 3) == 0) __stcg(at, make_float2(m0, l0)), __stcg(at + 8, make_float2(m1, l1));
                }
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            };
            const u32 start = count;  // from the second block on, the weights of the one before wait for their signal
#pragma unroll 1
            while (true) {
                if (warp == 0) {
                    if (lane_now() == 0) rope();
                    __syncwarp();
                }
                scores();
#if GATE
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                if (count != start) signal((count & 1) ^ 1);
#endif
                wgmma_wait<0>(s);
                { const u32 lane = lane_now(); if (lane < 2) bar_arrive_at(meta + B_REMPTY, lane); }
                const bool last = blocks == 1;
                if (last) {
                    const int inside = valid + p.drafts - tiles.get(turn, T_GROUP) * 128 / p.heads - 1;  // keys of the request
                    if (inside < 64) {  // what lies behind the request may be NaN
                        const u32 old = slot ? slot - 1 : 2;
#pragma unroll 1
                        for (int n = max(inside, 0) * 8 + (warp * 32 + lane_now()); n < 512; n += 128)
#pragma unroll 1
                            for (int panel = 0; panel < 8; ++panel)
                                asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(base + (panel / 4 * 3 + old) * HALF + panel % 4 * PANEL + n * 16), "r"(0) : "memory");
                    }
                }
                softmax(last);
                ++count, --blocks, valid -= 64;
#if GATE
                if (last) break;
            }
            signal((count & 1) ^ 1);
#else
                signal((count & 1) ^ 1);
                if (last) break;
            }
#endif
            turn ^= 1;
            if (warp == 0) {
                if (lane_now() == 0) tiles.next(p, member, turn);
                __syncwarp();
            }
        }
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(OREG));
        const u32 half = role - 1, t = lane & 3, own = warp * 16 + lane / 4;
        const u32 hfull = meta + B_HFULL + 24 * half, hempty = meta + B_HEMPTY + 24 * half, hbase = base + half * 3 * HALF;
        u32 slot = 0, phase = 0, count = 0;
        const u64 dv = desc(hbase, PANEL), dp = desc(base + OFF_P, 16);
        Loads loads = {meta + M_LOADS + 28 * half};
        auto refill = [&](u32 parity) {  // what is in the slot is done with: load what comes three later
            if (warp == 0) {
                if (lane == 0) loads.issue(p, &q_map, &k_map, hbase + slot * HALF, hfull + 8 * slot, hempty + 8 * slot, parity, half, rank, member);
                __syncwarp();
            }
        };
        auto step = [&]() { if (++slot == 3) slot = 0, phase ^= 1; };
        if (warp == 0 && lane == 0) loads.start(meta);
        refill(1), step(), refill(1), step(), refill(1), step();
        phase = 0;
        float o[128];
#pragma unroll
        for (int i = 0; i < 128; ++i) o[i] = 0.f;
        auto meet = [&]() { if (half) asm volatile("bar.sync 3, 128;" ::: "memory"); else asm volatile("bar.sync 2, 128;" ::: "memory"); };
        meet();
        int blocks = __shfl_sync(~0u, tiles.get(0, T_B1) - tiles.get(0, T_B0), 0);
        bool more = __shfl_sync(~0u, tiles.get(0, T_B0), 0) >= 0;
        if (more) refill(phase), step();  // Q
        while (more) {
            float m0, m1, l0, l1;
#pragma unroll 1
            for (; blocks > 0; --blocks) {
                const u32 buffer = count & 1;
                bar_wait(meta + B_PFULL + 8 * buffer, count >> 1 & 1);
                bar_wait(hfull + 8 * slot, phase);
                if (ldsi(meta + M_FLAG + buffer * 16 + 4 * warp)) {
                    const float a0 = lds(meta + M_SCALE + buffer * 256 + 4 * own), a1 = lds(meta + M_SCALE + buffer * 256 + 4 * own + 32);
#pragma unroll
                    for (int i = 0; i < 32; ++i) o[4 * i] *= a0, o[4 * i + 1] *= a0, o[4 * i + 2] *= a1, o[4 * i + 3] *= a1;
                }
                touch(o); wgmma_fence();
#ifndef NO_VALUES
                const u64 a = dp + buffer * (PANEL / 16), v = dv + slot * (HALF / 16);
#pragma unroll
                for (int k = 0; k < 4; ++k) pv_ss(o, a + 2 * k, v + 128 * k);
#endif
                wgmma_commit();
                wgmma_wait<0>(o);
                if (blocks == 1) {
                    const float2 x0 = __ldcg(p.own + (blockIdx.x * 2 + buffer) * 64 + own), x1 = __ldcg(p.own + (blockIdx.x * 2 + buffer) * 64 + own + 8);
                    m0 = x0.x, l0 = x0.y, m1 = x1.x, l1 = x1.y;
                }
                __syncwarp();
                if (lane == 0) bar_arrive(meta + B_PEMPTY + 8 * buffer);
                release(hempty + 8 * slot);
                refill(phase);
                step();
                ++count;
            }
            if (warp == 0) {
                if (lane == 0) tiles.next(p, member, turn ^ 1);
                __syncwarp();
            }
            meet();
            more = __shfl_sync(~0u, tiles.get(turn ^ 1, T_B0), 0) >= 0;
            if (more) refill(phase), step();  // the next Q
            if (tiles.get(turn, T_B0) > 0) {  // a part
                const int block = blockIdx.x;
                float* to = p.parts + (size_t)block * 32768 + half * 16384 + (warp * 32 + lane) * 4;
#pragma unroll
                for (int i = 0; i < 32; ++i) *reinterpret_cast<float4*>(to + i * 512) = make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
                if (t == 0) p.stats[block * 128 + half * 64 + own] = make_float2(m0, l0), p.stats[block * 128 + half * 64 + own + 8] = make_float2(m1, l1);
                fence_async();
                __threadfence();
                meet();
                if (warp == 0 && lane == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(p.flags + block * 2 + half) : "memory");
            } else {
                int missing = tiles.get(turn, T_REST);
                const int total = ldsi(meta + M_START + 16);
#pragma unroll 1
                for (int other = team + 1; missing > 0; ++other) {  // the teams behind have the rest
                    const int size = share(total, other + 1, p.teams) - share(total, other, p.teams);
                    if (size == 0) continue;
                    missing -= size;
                    const int block = (other * p.g + member) * 2 + rank;
                    meet();
                    if (warp == 0) {
                        if (lane == 0) {
                            u32* flag = p.flags + block * 2 + half;
                            u32 now;
                            do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(flag) : "memory"); while (now == 0);
                            *flag = 0;
                            fence_async();
                            for (int n = 0; n < 2; ++n) {
                                const u32 at = slot + n < 3 ? slot + n : slot + n - 3;
                                bar_expect(hfull + 8 * at, HALF);
                                asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                                             ::"r"(hbase + at * HALF), "l"(p.parts + (size_t)block * 32768 + half * 16384 + n * 8192), "r"(HALF), "r"(hfull + 8 * at) : "memory");
                            }
                        }
                        __syncwarp();
                    }
                    float f0, f1, e0, e1;
#pragma unroll
                    for (int n = 0; n < 2; ++n) {
                        bar_wait(hfull + 8 * slot, phase);
                        if (n == 0) {
                            const float2 x0 = __ldcg(p.stats + block * 128 + half * 64 + own), x1 = __ldcg(p.stats + block * 128 + half * 64 + own + 8);
                            const float n0 = fmaxf(m0, x0.x), n1 = fmaxf(m1, x1.x);
                            f0 = ex2(m0 - n0), e0 = ex2(x0.x - n0), f1 = ex2(m1 - n1), e1 = ex2(x1.x - n1);
                            m0 = n0, m1 = n1, l0 = l0 * f0 + x0.y * e0, l1 = l1 * f1 + x1.y * e1;
                        }
#pragma unroll
                        for (int i = 0; i < 16; ++i) {
                            float4 x;
                            asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                                         : "r"(hbase + slot * HALF + i * 2048 + (warp * 32 + lane) * 16) : "memory");
                            float* d = o + 64 * n + 4 * i;
                            d[0] = d[0] * f0 + x.x * e0, d[1] = d[1] * f0 + x.y * e0, d[2] = d[2] * f1 + x.z * e1, d[3] = d[3] * f1 + x.w * e1;
                        }
                        step();
                    }
                }
                const bool any = tiles.get(turn, T_LENGTH) > 0;
                const float i0 = any ? 1.f / l0 : 0.f, i1 = any ? 1.f / l1 : 0.f;
                const size_t row0 = (size_t)tiles.get(turn, T_REQUEST) * p.drafts * p.heads + tiles.get(turn, T_GROUP) * 128 + rank * 64 + own;
                __nv_bfloat16* to = p.out + row0 * 512 + half * 256 + t * 8;
#pragma unroll
                for (int r = 0; r < 2; ++r) {
#pragma unroll
                    for (int n = 0; n < 8; ++n) {
                        u32 x[4];
                        const float inv = r ? i1 : i0;
#pragma unroll
                        for (int i = 0; i < 4; ++i) { const int at = 4 * (4 * n + i) + 2 * r; x[i] = pack(o[at] * inv, o[at + 1] * inv); }
                        u32 y0 = __shfl_xor_sync(~0u, (t & 1) ? x[0] : x[1], 1), y1 = __shfl_xor_sync(~0u, (t & 1) ? x[2] : x[3], 1);
                        if (t & 1) x[0] = y0, x[2] = y1; else x[1] = y0, x[3] = y1;
                        y0 = __shfl_xor_sync(~0u, (t & 2) ? x[0] : x[2], 2), y1 = __shfl_xor_sync(~0u, (t & 2) ? x[1] : x[3], 2);
                        if (t & 2) x[0] = y0, x[1] = y1; else x[2] = y0, x[3] = y1;
                        *reinterpret_cast<uint4*>(to + r * 8 * 512 + n * 32) = make_uint4(x[0], x[1], x[2], x[3]);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < 128; ++i) o[i] = 0.f;
            turn ^= 1;
            blocks = __shfl_sync(~0u, tiles.get(turn, T_B1) - tiles.get(turn, T_B0), 0);
        }
    }
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

#define MUST(call) do { int error = int(call); if (error) return error; } while (0)

static int map_of(CUtensorMap& map, const void* data, int rows, int requests, int box_rows, int box_panels) {
    static void* encode = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (!encode) MUST(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &result));
    cuuint64_t sizes[4] = {64, (cuuint64_t)rows, 9, (cuuint64_t)requests}, strides[3] = {1152, 128, (cuuint64_t)rows * 1152};
    cuuint32_t box[4] = {64, (cuuint32_t)box_rows, (cuuint32_t)box_panels, 1}, one[4] = {1, 1, 1, 1};
    CUresult error = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, (void*)data, sizes, strides, box, one,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return error == CUDA_SUCCESS ? 0 : 10000 + int(error);
}

// q, cache, lengths, out, parts, stats, flags, requests, drafts, heads, longest, stream, G, own
static int attend(const long long* a) {
    static int fits[64];
    int device, multiprocessors;
    MUST(cudaGetDevice(&device));
    if (device > 63) return 10001;
    cudaLaunchConfig_t config = {};
    config.blockDim = dim3(384), config.dynamicSmemBytes = SHARED, config.stream = (cudaStream_t)a[11];
    if (!fits[device]) {
        MUST(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
        MUST(cudaFuncSetAttribute(mla, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED));
        config.gridDim = dim3(multiprocessors / 2 * 2);
        cudaLaunchAttribute shape[1];
        shape[0].id = cudaLaunchAttributeClusterDimension;
        shape[0].val.clusterDim.x = 2, shape[0].val.clusterDim.y = 1, shape[0].val.clusterDim.z = 1;
        config.attrs = shape, config.numAttrs = 1;
        int most = 0;
        MUST(cudaOccupancyMaxActiveClusters(&most, mla, &config));
        fits[device] = most < multiprocessors / 2 ? most : multiprocessors / 2;
        if (fits[device] < 4) return 10002;
        config.attrs = nullptr, config.numAttrs = 0;
    }
    CUtensorMap q_map, k_map, r_map;
    Params p;
    p.requests = int(a[7]), p.drafts = int(a[8]), p.heads = int(a[9]), p.longest = int(a[10]);
    p.lengths = (const int*)a[2], p.out = (__nv_bfloat16*)a[3], p.parts = (float*)a[4], p.stats = (float2*)a[5], p.flags = (u32*)a[6], p.own = (float2*)a[13];
    MUST(map_of(q_map, (void*)a[0], p.drafts * p.heads, p.requests, 64, 1));
    MUST(map_of(k_map, (void*)a[1], p.longest, p.requests, 64, 2));
    MUST(map_of(r_map, (void*)a[1], p.longest, p.requests, 32, 1));
    const int groups = p.drafts * p.heads / 128;
    p.g = int(a[12]);
    while (groups % p.g) p.g /= 2;
    p.sets = groups / p.g, p.teams = fits[device] / p.g;
        config.gridDim = dim3(p.teams * p.g * 2);
    MUST(cudaLaunchKernelEx(&config, mla, q_map, k_map, r_map, p));
    return cudaGetLastError();
}

static PyObject* run(PyObject*, PyObject* const* given, Py_ssize_t count) {
    if (count != 14) { PyErr_SetString(PyExc_TypeError, "14 arguments"); return nullptr; }
    long long a[14];
    for (int i = 0; i < 14; ++i) a[i] = PyLong_AsLongLong(given[i]);
    return PyLong_FromLong(attend(a));
}
static PyMethodDef methods[] = {{"run", (PyCFunction)(void*)run, METH_FASTCALL, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "mla", "", -1, methods};
#define INIT(name) PyInit_##name
#define INIT_OF(name) INIT(name)
PyMODINIT_FUNC INIT_OF(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
"""


@functools.cache
def extension():
    constants = "".join(f"#define {name} {value}\n" for name, value in (("PF", PF), ("GATE", GATE), ("LATE", LATE), ("SREG", SREG), ("OREG", OREG)))
    if PROBE:
        constants += f"#define {PROBE.upper().replace(' ', '_')}\n"
    return load_inline(
        "mla", "", constants + CUDA.replace("@WRAPPERS@", wrappers()), no_implicit_headers=True, with_pytorch_error_handling=False,
        extra_cuda_cflags=["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a"],
    ).run


def dense(x):
    """x, contiguous and at a multiple of 16 bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self._spaces = {}

    def forward(self, q, cache, lengths):
        if q.dim() != 4 or cache.dim() != 3 or lengths.dim() != 1 or q.shape[-1] != 576 or cache.shape[-1] != 576:
            raise ValueError("q: (requests, drafts, heads, 576), cache: (requests, longest, 576), lengths: (requests)")
        requests, drafts, heads, _ = q.shape
        if q.dtype != torch.bfloat16 or cache.dtype != torch.bfloat16 or not q.is_cuda or cache.device != q.device or lengths.device != q.device:
            raise ValueError("bfloat16 on one GPU is expected")
        if heads % 128 or heads == 0 or drafts < 1 or requests < 1 or cache.shape[0] != requests or lengths.shape[0] != requests or cache.shape[1] < 1:
            raise ValueError("heads in multiples of 128, at least one request, draft and key are expected")
        if requests * drafts * heads * cache.shape[1] >= 2**40:
            raise ValueError("too large")
        q, cache, lengths = dense(q), dense(cache), lengths.to(torch.int32).contiguous()
        with torch.cuda.device(q.device):
            run = extension()
            stream = torch.cuda.current_stream().cuda_stream
            space = self._spaces.get((q.device.index, stream))
            if space is None:  # for parts of requests; flags are 0 between launches
                blocks = torch.cuda.get_device_properties(q.device).multi_processor_count
                space = (torch.empty(blocks, 32768, dtype=torch.float32, device=q.device), torch.empty(blocks, 256, dtype=torch.float32, device=q.device),
                         torch.zeros(blocks, 2, dtype=torch.int32, device=q.device), torch.empty(blocks, 256, dtype=torch.float32, device=q.device))
                self._spaces[q.device.index, stream] = space
            out = torch.empty(requests, drafts, heads, 512, dtype=q.dtype, device=q.device)
            error = run(q.data_ptr(), cache.data_ptr(), lengths.data_ptr(), out.data_ptr(), *(x.data_ptr() for x in space[:3]),
                        requests, drafts, heads, cache.shape[1], stream, G, space[3].data_ptr())
        if error:
            raise RuntimeError(f"mla: CUDA error {error}")
        return out
