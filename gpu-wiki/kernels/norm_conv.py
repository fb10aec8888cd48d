"""out = conv3x3(silu(group_norm(x))) + residual for channels-last bf16, on sm_90a.

Three kernels, chained with programmatic dependent launch:
 1. stats_kernel: shifted sums of image 0 per group; a few more blocks transform the weight to U (fp16).
 2. transform_kernel: d = bf16(silu(norm(x))) of image 0's first rows; writes V = the 1-D Winograd F(2,3) transform of d along
    the width, in fp16.
 3. conv_kernel: persistent, one block of four warpgroups per SM, clusters of two that share the weights by TMA multicast.
    One warp feeds the ring buffers; two warpgroups multiply (wgmma, fp16 -> fp32); the fourth does sums and V of the images
    to come, with flags in global memory. Residual and results pass through shared memory by TMA.
    out(2t) = m0 + (m1 + m2), out(2t+1) = (m1 - m2) + m3. The products m1, m2 are summed over all of K first, the accumulators
    (e, f) are replaced by (e + f, e - f), and m0, m3 are then accumulated onto them: two accumulators instead of four.
fp16 (11 bits) holds the sums of two or three bf16 values with an error an eighth of bf16's. Values of V above 65504 would
overflow. evals/trials/norm_conv states it.
"""

import torch
from torch import nn
from torch.utils.cpp_extension import load_inline

SOURCE = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda.h>
#include <cuda_runtime.h>
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <stdint.h>

constexpr float WSCALE = 64.f;                 // the transformed weight is kept times 64 (far from fp16's subnormals)
constexpr int MAX_BLOCKS = 160;
constexpr int ABYTES = 18 * 8 * 128;           // one component: 18 rows, 8 tiles, 64 channels in
constexpr int BBYTES = 128 * 128;              // one component, one kernel row: 128 channels out, 64 channels in
constexpr int RBYTES = 2 * 128 * 128;          // a consumer's residual, then its results: 128 pixels, 128 channels
constexpr int ASTAGES = 3, BSTAGES = 6;
constexpr int SMEM = ASTAGES * ABYTES + BSTAGES * BBYTES + 2 * RBYTES + 1024 + 256;

__device__ __forceinline__ float lo(uint32_t v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float hi(uint32_t v) { return __uint_as_float(v & 0xffff0000u); }
__device__ __forceinline__ uint32_t pack_bf16(float a, float b) {
    uint32_t r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a)); return r;
}
__device__ __forceinline__ uint32_t pack_half(float a, float b) {
    uint32_t r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a)); return r;
}
__device__ __forceinline__ uint32_t hadd(uint32_t a, uint32_t b) {
    uint32_t r; asm("add.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r;
}
__device__ __forceinline__ uint32_t hsub(uint32_t a, uint32_t b) {
    uint32_t r; asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r;
}
__device__ __forceinline__ uint4 ldg(const uint4* p) {
    uint4 r;
    asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p));
    return r;
}
__device__ __forceinline__ void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void pdl_go() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ------------------------------------------------------------------------------------------------ 1: sums, weight
constexpr int SPLIT = 81;                      // rows of image 0 that transform_kernel does: what the first tiles read
constexpr int STAT_BLOCKS = 256;               // partial sums of image 0; image i > 0 has one per block of conv_kernel

// a thread's sums over pixels first, first + PX, ... < end of its eight channels, less shift
template <int PX, int N>
__device__ __forceinline__ float2 pixel_sums(const uint4* base, int first, int end, int c8, uint32_t first_word) {
    float shift = lo(first_word), s = 0.f, q = 0.f;
    uint32_t word = __byte_perm(first_word, 0, 0x1010);
    const uint4 none = make_uint4(word, word, word, word);
    #pragma unroll 1
    for (int p = first; p < end; p += N * PX) {
        uint4 v[N];
        #pragma unroll
        for (int k = 0; k < N; k++) { v[k] = none; if (p + k * PX < end) v[k] = ldg(base + (size_t)(p + k * PX) * 64 + c8); }
        #pragma unroll
        for (int k = 0; k < N; k++) {
            uint32_t u[4] = {v[k].x, v[k].y, v[k].z, v[k].w};
            #pragma unroll
            for (int m = 0; m < 4; m++) {
                float a = lo(u[m]) - shift, c = hi(u[m]) - shift;
                s += a; q = fmaf(a, a, q); s += c; q = fmaf(c, c, q);
            }
        }
    }
    s += __shfl_xor_sync(~0u, s, 1); q += __shfl_xor_sync(~0u, q, 1);
    return make_float2(s, q);
}

__global__ __launch_bounds__(512, 3) void stats_kernel(const uint4* __restrict__ x, const uint4* __restrict__ w,
        float2* __restrict__ part, uint4* __restrict__ U, int* __restrict__ flags, int H, int W, int images, int weight_blocks) {
    pdl_go();
    constexpr int stat_blocks = STAT_BLOCKS;
    int tid = threadIdx.x, b = blockIdx.x;
    if (b == 0) for (int i = tid; i < 3 * images; i += 512) flags[i] = 0;
    if (b < stat_blocks) {
        __shared__ float2 red[8][32];
        int c8 = tid & 63, px = tid >> 6, n = H * W;
        float2 sq = pixel_sums<8, 4>(x, (int)((long long)n * b / stat_blocks) + px, (int)((long long)n * (b + 1) / stat_blocks), c8,
                                  x[c8 & ~1].x);
        if (!(tid & 1)) red[px][c8 >> 1] = sq;
        __syncthreads();
        if (tid < 32) {
            float2 t = red[0][tid];
            #pragma unroll
            for (int k = 1; k < 8; k++) { t.x += red[k][tid].x; t.y += red[k][tid].y; }
            part[(size_t)b * 32 + tid] = t;
        }
    } else {
        for (int i = (b - stat_blocks) * 512 + tid; i < 512 * 3 * 64; i += weight_blocks * 512) {
            int c8 = i & 63, n = (i >> 6) & 511, kh = i >> 15;
            // row n of U holds the channel that makes a thread's accumulators eight neighbouring channels
            int o = (n & ~31) + 8 * ((n >> 1) & 3) + 2 * ((n >> 3) & 3) + (n & 1);
            const uint4* src = w + (size_t)(o * 3 + kh) * 3 * 64 + c8;
            uint4 g[3] = {ldg(src), ldg(src + 64), ldg(src + 128)};
            uint32_t r[4][4];
            #pragma unroll
            for (int m = 0; m < 4; m++) {
                float v[4][2];
                #pragma unroll
                for (int e = 0; e < 2; e++) {
                    uint32_t u0 = (&g[0].x)[m], u1 = (&g[1].x)[m], u2 = (&g[2].x)[m];
                    float g0 = e ? hi(u0) : lo(u0), g1 = e ? hi(u1) : lo(u1), g2 = e ? hi(u2) : lo(u2);
                    v[0][e] = g0 * WSCALE; v[3][e] = g2 * WSCALE;
                    v[1][e] = (g0 + g2 + g1) * (WSCALE / 2); v[2][e] = (g0 + g2 - g1) * (WSCALE / 2);
                }
                #pragma unroll
                for (int c = 0; c < 4; c++) r[c][m] = pack_half(v[c][0], v[c][1]);
            }
            #pragma unroll
            for (int c = 0; c < 4; c++)
                U[(size_t)((c * 3 + kh) * 512 + n) * 64 + c8] = make_uint4(r[c][0], r[c][1], r[c][2], r[c][3]);
        }
    }
}

// ------------------------------------------------------------------------------------------------ 2: norm, silu, V
__device__ __forceinline__ float silu(float y) { return __fdividef(y, 1.f + __expf(-y)); }

__device__ __forceinline__ uint4 act(uint4 v, const float* a, const float* b) {
    uint32_t u[4] = {v.x, v.y, v.z, v.w}, r[4];
    #pragma unroll
    for (int m = 0; m < 4; m++) {
        uint32_t t = pack_bf16(silu(fmaf(lo(u[m]), a[2 * m], b[2 * m])), silu(fmaf(hi(u[m]), a[2 * m + 1], b[2 * m + 1])));
        r[m] = pack_half(lo(t), hi(t));
    }
    return make_uint4(r[0], r[1], r[2], r[3]);
}

// scale and shift of a thread's eight channels
__device__ __forceinline__ void scale_shift(float2 st, uint4 a, uint4 c, float* sa, float* sb) {
    uint32_t ua[4] = {a.x, a.y, a.z, a.w}, uc[4] = {c.x, c.y, c.z, c.w};
    #pragma unroll
    for (int m = 0; m < 4; m++) {
        sa[2 * m] = lo(ua[m]) * st.y; sa[2 * m + 1] = hi(ua[m]) * st.y;
        sb[2 * m] = lo(uc[m]) - st.x * sa[2 * m]; sb[2 * m + 1] = hi(uc[m]) - st.x * sa[2 * m + 1];
    }
}

// T tiles, that is 2 T pixels and one more at each side; the pixels of A tiles are in flight
template <int T, int A>
__device__ __forceinline__ void transform_run(const uint4* xs, uint4* vs, size_t plane, bool left, bool right,
                                              const float* sa, const float* sb) {
    const uint4 zero = make_uint4(0, 0, 0, 0);
    uint4 d0 = zero, d1 = ldg(xs), v[2 * A];
    if (left) d0 = ldg(xs - 64);
    #pragma unroll
    for (int k = 0; k < 2 * A; k++) { v[k] = zero; if (k + 1 < 2 * T || right) v[k] = ldg(xs + (1 + k) * 64); }
    d0 = left ? act(d0, sa, sb) : zero;
    d1 = act(d1, sa, sb);
    #pragma unroll 1
    for (int t = 0; t < T; t += A) {
        #pragma unroll
        for (int k = 0; k < A; k++) {
            uint4 d2 = act(v[2 * k], sa, sb), d3 = act(v[2 * k + 1], sa, sb);
            if (k == A - 1 && t == T - A && !right) d3 = zero;
            xs += 2 * 64;
            if (t < T - A) {                                    // the pixels A tiles on
                v[2 * k] = ldg(xs + (2 * A - 1) * 64);
                if (k < A - 1 || t < T - 2 * A || right) v[2 * k + 1] = ldg(xs + 2 * A * 64);
            }
            vs[0] = make_uint4(hsub(d0.x, d2.x), hsub(d0.y, d2.y), hsub(d0.z, d2.z), hsub(d0.w, d2.w));
            vs[plane] = make_uint4(hadd(d1.x, d2.x), hadd(d1.y, d2.y), hadd(d1.z, d2.z), hadd(d1.w, d2.w));
            vs[2 * plane] = make_uint4(hsub(d2.x, d1.x), hsub(d2.y, d1.y), hsub(d2.z, d1.z), hsub(d2.w, d1.w));
            vs[3 * plane] = make_uint4(hsub(d3.x, d1.x), hsub(d3.y, d1.y), hsub(d3.z, d1.z), hsub(d3.w, d1.w));
            vs += 64;
            d0 = d2; d1 = d3;
        }
    }
}

__device__ __forceinline__ float2 finish(float s, float q, float n, float shift) {      // mean, 1 / deviation
    float m = s / n, var = fmaxf(q / n - m * m, 0.f);
    return make_float2(m + shift, rsqrtf(var + 1e-6f));
}

__global__ __launch_bounds__(512, 2) void transform_kernel(const uint4* __restrict__ x, const uint4* __restrict__ nw,
        const uint4* __restrict__ nb, float2* part, uint4* __restrict__ V, int H, int W, int images) {
    __shared__ float2 red[16][32];
    __shared__ float2 stat[32];
    int tid = threadIdx.x, row = blockIdx.x >> 1, g = tid & 31, c8 = tid & 63;
    pdl_wait();
    pdl_go();
    float s = 0.f, q = 0.f;
    #pragma unroll 8
    for (int p = tid >> 5; p < STAT_BLOCKS; p += 16) {
        float2 t = part[(size_t)p * 32 + g];
        s += t.x; q += t.y;
    }
    red[tid >> 5][g] = make_float2(s, q);
    __syncthreads();
    if (tid < 32) {
        s = 0.f; q = 0.f;
        #pragma unroll
        for (int k = 0; k < 16; k++) { s += red[k][tid].x; q += red[k][tid].y; }
        stat[tid] = finish(s, q, (float)H * W * 16, lo(x[tid * 2].x));
    }
    __syncthreads();
    if (blockIdx.x == 0 && tid < 32) part[STAT_BLOCKS * 32 + tid] = stat[tid];     // for conv_kernel
    float sa[8], sb[8];
    scale_shift(stat[c8 >> 1], nw[c8], nb[c8], sa, sb);
    size_t plane = (size_t)images * H * (W / 2) * 64;
    int runs = W / 8;
    for (int r = (blockIdx.x & 1) * 8 + (tid >> 6); r < runs; r += 16)
        transform_run<4, 2>(x + ((size_t)row * W + r * 8) * 64 + c8, V + ((size_t)row * (W / 2) + r * 4) * 64 + c8, plane,
                         r > 0, r + 1 < runs, sa, sb);
}

// ------------------------------------------------------------------------------------------------ 3: products
__device__ __forceinline__ uint32_t saddr(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void bar_init(uint32_t b, int n) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(b), "r"(n) : "memory");
}
__device__ __forceinline__ void bar_wait(uint32_t b, uint32_t phase) {
    asm volatile("{\n.reg .pred p;\nL_%=:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra L_%=;\n}"
        :: "r"(b), "r"(phase) : "memory");
}
__device__ __forceinline__ void bar_expect(uint32_t b, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(b), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bar_arrive(uint32_t b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(b) : "memory");
}
__device__ __forceinline__ void bar_arrive_at(uint32_t b, uint32_t cta) {
    asm volatile("{\n.reg .b32 a;\nmapa.shared::cluster.u32 a, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [a];\n}"
        :: "r"(b), "r"(cta) : "memory");
}
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void tma_a(uint32_t dst, const CUtensorMap* m, uint32_t bar, int c, int t, int h, int i, int k) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5,%6,%7}], [%2];"
        :: "r"(dst), "l"(m), "r"(bar), "r"(c), "r"(t), "r"(h), "r"(i), "r"(k) : "memory");
}
__device__ __forceinline__ void tma_b(uint32_t dst, const CUtensorMap* m, uint32_t bar, int c, int n, int k) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3,%4,%5}], [%2], %6;"
        :: "r"(dst), "l"(m), "r"(bar), "r"(c), "r"(n), "r"(k), "h"((uint16_t)3) : "memory");
}
__device__ __forceinline__ void tma_r(uint32_t dst, const CUtensorMap* m, uint32_t bar, int c, int t, int row) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5,%5,%6}], [%2];"
        :: "r"(dst), "l"(m), "r"(bar), "r"(c), "r"(t), "r"(0), "r"(row) : "memory");
}
__device__ __forceinline__ void tma_store(const CUtensorMap* m, uint32_t src, int c, int t, int row) {
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2,%3,%4,%4,%5}], [%1];"
        :: "l"(m), "r"(src), "r"(c), "r"(t), "r"(0), "r"(row) : "memory");
}
__device__ __forceinline__ uint64_t desc(uint32_t addr) {       // K-major, 128-byte swizzle, 1024 bytes per eight rows
    return (uint64_t)((addr & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}
__device__ __forceinline__ void wgmma(float (&d)[64], uint64_t a, uint64_t b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {@REGS@}, %64, %65, p, 1, 1, 0, 0;\n}"
        : @OUTS@ : "l"(a), "l"(b), "r"(add));
}
__device__ __forceinline__ void wg_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wg_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wg_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory"); }
__device__ __forceinline__ void keep(float (&d)[64]) {
    #pragma unroll
    for (int i = 0; i < 64; i++) asm volatile("" : "+f"(d[i]) :: "memory");
}

// rows of an image whose V has a flag of its own: image 0's by transform_kernel, the others' are one round of conv_kernel's blocks
__device__ __forceinline__ int first_rows(int img, int runs) { return img ? 2 * gridDim.x / runs : SPLIT; }

struct Tile { int n0, img, h0, t0; };
__device__ __forceinline__ Tile tile_of(int t, int rank, int H, int W) {
    Tile r;
    int wp = W / 32, hb = H / 16, m = t >> 2;
    r.n0 = (t & 3) * 128;
    r.t0 = ((m % wp) * 2 + rank) * 8; m /= wp;
    r.h0 = (m % hb) * 16; r.img = m / hb;
    return r;
}

__device__ __forceinline__ int peek(const int* p) {
    int v; asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v;
}
__device__ __forceinline__ void await(const int* p, int n) { while (peek(p) < n) __nanosleep(100); }
__device__ __forceinline__ void group_sync() { asm volatile("bar.sync 1, 128;" ::: "memory"); }
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async;" ::: "memory"); }

__global__ __cluster_dims__(2, 1, 1) __launch_bounds__(512, 1) void conv_kernel(const __grid_constant__ CUtensorMap mv,
        const __grid_constant__ CUtensorMap mu, const __grid_constant__ CUtensorMap mr, const __grid_constant__ CUtensorMap mo,
        const uint4* __restrict__ bias, const uint4* __restrict__ x, const uint4* __restrict__ nw, const uint4* __restrict__ nb,
        float2* part, uint4* V, int* flags, int H, int W, int images, int tiles) {
    extern __shared__ uint8_t raw[];
    uint32_t sa = (saddr(raw) + 1023) & ~1023u, sb = sa + ASTAGES * ABYTES, sr = sb + BSTAGES * BBYTES, bars = sr + 2 * RBYTES;
    uint32_t fullA = bars, emptyA = fullA + 8 * ASTAGES, fullB = emptyA + 8 * ASTAGES, emptyB = fullB + 8 * BSTAGES,
             fullR = emptyB + 8 * BSTAGES;
    int tid = threadIdx.x, wg = tid >> 7, rank = blockIdx.x & 1, step = gridDim.x >> 1;
    if (tid == 0) {
        for (int i = 0; i < ASTAGES; i++) { bar_init(fullA + 8 * i, 1); bar_init(emptyA + 8 * i, 8); }
        for (int i = 0; i < BSTAGES; i++) { bar_init(fullB + 8 * i, 1); bar_init(emptyB + 8 * i, 16); }
        for (int i = 0; i < 2; i++) bar_init(fullR + 8 * i, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    cluster_sync();
    if (wg == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (tid == 256) {
            pdl_wait();
            int as = 0, bs = 0, ready = 0;                      // ready: V is there up to this: twice the image, one more for all
            uint32_t ap = 1, bp = 1;
            for (int t = blockIdx.x >> 1; t < tiles; t += step) {
                Tile c = tile_of(t, rank, H, W);
                int runs = W / 32;
                int need = 2 * c.img + (c.h0 + 16 >= first_rows(c.img, runs) ? 1 : 0);
                if (need > ready) {
                    await(flags + images + need, gridDim.x);
                    proxy_fence();
                    ready = need;
                }
                #pragma unroll 1
                for (int u = 0; u < 32; u++) {                  // phase, slice of 64 channels in, component
                    int kc = (u & 14) * 32, comp = u < 16 ? 1 + (u & 1) : 3 * (u & 1);
                    bar_wait(emptyA + 8 * as, ap);
                    bar_expect(fullA + 8 * as, ABYTES);
                    tma_a(sa + as * ABYTES, &mv, fullA + 8 * as, kc, c.t0, c.h0 - 1, c.img, comp);
                    if (++as == ASTAGES) { as = 0; ap ^= 1; }
                    #pragma unroll 1
                    for (int kh = 0; kh < 3; kh++) {
                        bar_wait(emptyB + 8 * bs, bp);
                        bar_expect(fullB + 8 * bs, BBYTES);
                        tma_b(sb + bs * BBYTES + rank * (BBYTES / 2), &mu, fullB + 8 * bs, kc, c.n0 + 64 * rank, comp * 3 + kh);
                        if (++bs == BSTAGES) { bs = 0; bp ^= 1; }
                    }
                }
            }
        }
    } else if (wg == 3) {
        // norm, silu and V of the images after the first, while the products of the ones before them run
        asm volatile("setmaxnreg.dec.sync.aligned.u32 104;");
        __shared__ float2 red[4][32];
        __shared__ float2 stat[32];
        int id = tid & 127, c8 = id & 63, px = id >> 6, g = id & 31, blocks = gridDim.x, n = H * W, runs = W / 32;
        size_t plane = (size_t)images * H * (W / 2) * 64;
        pdl_wait();
        for (int img = 0; img < images; img++) {
            const uint4* base = x + (size_t)img * n * 64;
            int b = blockIdx.x;
            if (img) {
                float2* own = part + (size_t)(STAT_BLOCKS + 1 + (img - 1) * blocks) * 32;
                float2 sq = pixel_sums<2, 8>(base, (int)((long long)n * b / blocks) + px, (int)((long long)n * (b + 1) / blocks), c8,
                                             base[c8 & ~1].x);
                if (!(id & 1)) red[px][c8 >> 1] = sq;
                group_sync();
                if (id < 32) {
                    __stcg(own + b * 32 + id, make_float2(red[0][id].x + red[1][id].x, red[0][id].y + red[1][id].y));
                    __threadfence();
                    __syncwarp();
                    if (id == 0) {
                        atomicAdd(flags + img, 1);
                        await(flags + img, blocks);
                    }
                }
                group_sync();
                float s = 0.f, q = 0.f;
                #pragma unroll 8
                for (int p = id >> 5; p < blocks; p += 4) {
                    float2 t = __ldcg(own + p * 32 + g);
                    s += t.x; q += t.y;
                }
                red[id >> 5][g] = make_float2(s, q);
                group_sync();
                if (id < 32) {
                    s = 0.f; q = 0.f;
                    #pragma unroll
                    for (int k = 0; k < 4; k++) { s += red[k][id].x; q += red[k][id].y; }
                    stat[id] = finish(s, q, (float)n * 16, lo(base[id * 2].x));
                }
            } else if (id < 32) {
                stat[id] = __ldcg(part + STAT_BLOCKS * 32 + id);
            }
            group_sync();
            float a[8], b8[8];
            scale_shift(stat[c8 >> 1], nw[c8], nb[c8], a, b8);
            #pragma unroll 1
            for (int h = img ? 0 : 1; h < 2; h++) {             // the first rows, then the others
                int from = h ? first_rows(img, runs) : 0, to = h ? H : min(H, first_rows(img, runs));
                #pragma unroll 1
                for (int i = b * 2 + px + from * runs; i < to * runs; i += 2 * blocks) {
                    int row = img * H + i / runs, r = i % runs;
                    transform_run<16, 4>(x + ((size_t)row * W + r * 32) * 64 + c8, V + ((size_t)row * (W / 2) + r * 16) * 64 + c8,
                                         plane, r > 0, r + 1 < runs, a, b8);
                }
                proxy_fence();
                __threadfence();
                group_sync();
                if (id == 0) { __threadfence(); atomicAdd(flags + images + 2 * img + h, 1); }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 184;");
        int lane = tid & 31, warp = (tid >> 5) & 3, q = lane & 3, as = 0, ap_last = 0;
        bool leader = (tid & 127) == 0;
        uint32_t ap = 0, bp = 0, rp = 0;
        uint32_t stage = sr + wg * RBYTES, full = fullR + 8 * wg;
        // this thread's place in the staged tile: row of 128 bytes (tile's upper bits + 4 its lowest), chunk of 16 swizzled
        uint32_t srow = (lane >> 3) + ((lane >> 2) & 1) * 4, mine = stage + (warp * 32 + srow) * 128;
        float e[64], f[64];
        // one slice of 64 channels in: two components, three kernel rows
        auto slice = [&](bool first, int add0) {
            #pragma unroll
            for (int u = 0; u < 2; u++) {
                bar_wait(fullA + 8 * as, ap);
                uint64_t a = desc(sa + as * ABYTES + wg * 8192);
                #pragma unroll
                for (int kh = 0; kh < 3; kh++) {
                    const int bs = u * 3 + kh, before = (bs + BSTAGES - 1) % BSTAGES;
                    bar_wait(fullB + 8 * bs, bp);
                    uint64_t b = desc(sb + bs * BBYTES);
                    wg_fence();
                    #pragma unroll
                    for (int k = 0; k < 4; k++) wgmma(u ? f : e, a + kh * 64 + 2 * k, b + 2 * k, kh + k > 0 ? 1 : add0);
                    wg_commit();
                    wg_wait<1>();
                    if (bs > 0 || !first) {                     // what the step before this one read is free
                        if (lane < 2) bar_arrive_at(emptyB + 8 * before, lane);
                        if (kh == 0 && lane == 0) bar_arrive(emptyA + 8 * ap_last);
                    }
                }
                ap_last = as;
                if (++as == ASTAGES) { as = 0; ap ^= 1; }
            }
            bp ^= 1;
        };
        for (int t = blockIdx.x >> 1; t < tiles; t += step) {
            Tile c = tile_of(t, rank, H, W);
            #pragma unroll 1
            for (int ph = 0; ph < 2; ph++) {
                #pragma unroll 1
                for (int kc = 0; kc < 8; kc++) {
                    if (ph * 8 + kc == 4) {                   // the residual, once the last results have left the staging
                        if (leader) {
                            asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
                            bar_expect(full, RBYTES);
                            #pragma unroll
                            for (int i = 0; i < 2; i++)
                                tma_r(stage + i * (RBYTES / 2), &mr, full, c.n0 + 64 * i, c.t0 / 2, c.img * H + c.h0 + wg * 8);
                        }
                        __syncwarp();
                    }
                    slice(kc == 0, ph | kc);
                }
                wg_wait<0>();
                keep(e); keep(f);
                if (lane < 2) bar_arrive_at(emptyB + 8 * (BSTAGES - 1), lane);
                if (lane == 0) bar_arrive(emptyA + 8 * ap_last);
                if (ph == 0) {
                    #pragma unroll
                    for (int i = 0; i < 64; i++) { float s = e[i] + f[i], d = e[i] - f[i]; e[i] = s; f[i] = d; }
                }
            }
            bar_wait(full, rp);
            rp ^= 1;
            #pragma unroll
            for (int j = 0; j < 4; j++) {
                uint4 bi = __ldg(bias + (c.n0 >> 3) + j * 4 + q);
                uint32_t ub[4] = {bi.x, bi.y, bi.z, bi.w};
                #pragma unroll
                for (int rr = 0; rr < 2; rr++)
                    #pragma unroll
                    for (int p = 0; p < 2; p++) {
                        uint32_t at = mine + (j >> 1) * (RBYTES / 2) + rr * 2048 + p * 1024 + ((((j & 1) * 4 + q) ^ srow) << 4);
                        uint32_t uv[4], y[4];
                        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(uv[0]), "=r"(uv[1]), "=r"(uv[2]), "=r"(uv[3]) : "r"(at) : "memory");
                        #pragma unroll
                        for (int i = 0; i < 4; i++) {
                            int k = (4 * j + i) * 4 + rr * 2;
                            float a0 = p ? f[k] : e[k], a1 = p ? f[k + 1] : e[k + 1];
                            y[i] = pack_bf16(fmaf(a0, 1.f / WSCALE, lo(ub[i])) + lo(uv[i]), fmaf(a1, 1.f / WSCALE, hi(ub[i])) + hi(uv[i]));
                        }
                        asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" :: "r"(at), "r"(y[0]), "r"(y[1]), "r"(y[2]), "r"(y[3]) : "memory");
                    }
            }
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            asm volatile("bar.sync %0, 128;" :: "r"(2 + wg) : "memory");
            if (leader) {
                #pragma unroll
                for (int i = 0; i < 2; i++) tma_store(&mo, stage + i * (RBYTES / 2), c.n0 + 64 * i, c.t0 / 2, c.img * H + c.h0 + wg * 8);
                asm volatile("cp.async.bulk.commit_group;" ::: "memory");
            }
            __syncwarp();
        }
        if (leader) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
        __syncwarp();
    }
    __syncthreads();
    cluster_sync();
}

// ------------------------------------------------------------------------------------------------ host
typedef CUresult (*Encode)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
    const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static int run(const void* x, const void* res, void* out, const void* nw, const void* nb, const void* w, const void* bias,
                   void* V, void* U, void* part, void* flags, int images, int H, int W, void* stream_) {
    static Encode encode = nullptr;
    static int blocks = 0, told = -1;                           // told: the device that knows how much shared memory is wanted
    cudaStream_t stream = (cudaStream_t)stream_;
    int dev;
    cudaGetDevice(&dev);
    if (!encode || dev != told) {
        Encode found = nullptr;
        cudaDriverEntryPointQueryResult result;
        if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void**)&found, 12000, cudaEnableDefault, &result) || !found)
            return -2;
        cudaError_t err = cudaFuncSetAttribute(conv_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM);
        if (err) return (int)err;
        cudaLaunchConfig_t probe = {};
        probe.gridDim = dim3(2); probe.blockDim = dim3(512); probe.dynamicSmemBytes = SMEM;
        int clusters = 0;                                       // all blocks must run at once: they wait for one another
        err = cudaOccupancyMaxActiveClusters(&clusters, conv_kernel, &probe);
        if (err) return (int)err;
        if (clusters < 1) return -5;
        blocks = 2 * (clusters < MAX_BLOCKS / 2 ? clusters : MAX_BLOCKS / 2);
        encode = found, told = dev;
    }
    CUtensorMap mv, mu, mr, mo;
    cuuint32_t ones[5] = {1, 1, 1, 1, 1};
    cuuint64_t dv[5] = {512, (cuuint64_t)W / 2, (cuuint64_t)H, (cuuint64_t)images, 4};
    cuuint64_t s1 = 1024, s2 = s1 * dv[1], s3 = s2 * dv[2], s4 = s3 * dv[3], sv[4] = {s1, s2, s3, s4};
    cuuint32_t bv[5] = {64, 8, 18, 1, 1};
    if (encode(&mv, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 5, V, dv, sv, bv, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)) return -3;
    cuuint64_t du[3] = {512, 512, 12}, su[2] = {1024, 1024 * 512};
    cuuint32_t bu[3] = {64, 64, 1};
    if (encode(&mu, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 3, U, du, su, bu, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)) return -4;
    // residual and out: channel, tile / 2, tile % 2, left or right pixel, row: the order of the staged rows
    cuuint64_t dr[5] = {512, (cuuint64_t)W / 4, 2, 2, (cuuint64_t)H * images}, st[4] = {4096, 2048, 1024, (cuuint64_t)W * 1024};
    cuuint32_t br[5] = {64, 4, 2, 2, 8};
    for (int i = 0; i < 2; i++)
        if (encode(i ? &mo : &mr, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5, i ? out : (void*)res, dr, st, br, ones,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)) return -6;
    stats_kernel<<<STAT_BLOCKS + 128, 512, 0, stream>>>((const uint4*)x, (const uint4*)w, (float2*)part, (uint4*)U, (int*)flags, H, W,
                                                       images, 128);
    cudaLaunchAttribute at;
    at.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    at.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t cfg = {};
    cfg.stream = stream; cfg.attrs = &at; cfg.numAttrs = 1;
    cfg.gridDim = dim3(2 * (H < SPLIT ? H : SPLIT)); cfg.blockDim = dim3(512);
    cudaError_t err = cudaLaunchKernelEx(&cfg, transform_kernel, (const uint4*)x, (const uint4*)nw, (const uint4*)nb,
                                         (float2*)part, (uint4*)V, H, W, images);
    if (err) return (int)err;
    cfg.gridDim = dim3(blocks); cfg.blockDim = dim3(512); cfg.dynamicSmemBytes = SMEM;
    err = cudaLaunchKernelEx(&cfg, conv_kernel, mv, mu, mr, mo, (const uint4*)bias,
                             (const uint4*)x, (const uint4*)nw, (const uint4*)nb, (float2*)part, (uint4*)V, (int*)flags, H, W, images,
                             images * (H / 16) * (W / 32) * 4);
    if (err) return (int)err;
    return (int)cudaGetLastError();
}

static PyObject* py_run(PyObject*, PyObject* const* given, Py_ssize_t) {  // 11 pointers, 3 numbers, the stream
  long long a[15];
  for (int i = 0; i < 15; i++) a[i] = PyLong_AsLongLong(given[i]);
  return PyLong_FromLong(run((void*)a[0], (void*)a[1], (void*)a[2], (void*)a[3], (void*)a[4], (void*)a[5], (void*)a[6], (void*)a[7], (void*)a[8], (void*)a[9], (void*)a[10], int(a[11]), int(a[12]), int(a[13]), (void*)a[14]));
}
static PyMethodDef methods[] = {{"run", (PyCFunction)(void*)py_run, METH_FASTCALL, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "norm_conv", "", -1, methods};
#define INIT(name) PyInit_##name
#define INIT_OF(name) INIT(name)
PyMODINIT_FUNC INIT_OF(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
""".replace("@REGS@", ",".join(f"%{i}" for i in range(64))).replace("@OUTS@", ",".join(f'"+f"(d[{i}])' for i in range(64)))


_run = None


def launcher():
    global _run
    if _run is None:
        flags = ["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a"]
        _run = load_inline("norm_conv", "", SOURCE, no_implicit_headers=True, with_pytorch_error_handling=False, extra_cuda_cflags=flags).run
    return _run


class ModelNew(nn.Module):
    def __init__(self, channels=512):
        super().__init__()
        self.norm_weight = nn.Parameter((1 + torch.randn(channels) / 8).bfloat16())
        self.norm_bias = nn.Parameter((torch.randn(channels) / 8).bfloat16())
        weight = (torch.randn(channels, channels, 3, 3) / (9 * channels) ** 0.5).bfloat16()
        self.weight = nn.Parameter(weight.contiguous(memory_format=torch.channels_last))
        self.bias = nn.Parameter(torch.randn(channels).bfloat16())

    @torch.no_grad()
    def forward(self, x, residual):
        images, height, width, channels = x.shape
        if channels != 512 or height % 16 or width % 32 or not images or not height or not width:
            raise ValueError("sizes: 512 channels, height a multiple of 16, width of 32")
        if x.dtype != torch.bfloat16 or residual.dtype != torch.bfloat16 or residual.shape != x.shape or not x.is_cuda:
            raise ValueError("x and residual must be bf16 on the GPU and of one shape")
        if x.data_ptr() % 16 or residual.data_ptr() % 16:
            raise ValueError("x and residual must be aligned to 16 bytes")
        x, residual = x.contiguous(), residual.contiguous()
        weight = self.weight.contiguous(memory_format=torch.channels_last)
        out = torch.empty_like(x)
        v = torch.empty(4 * x.numel() // 2, dtype=torch.float16, device=x.device)
        u = torch.empty(12 * 512 * 512, dtype=torch.float16, device=x.device)
        part = torch.empty((257 + 160 * (images - 1)) * 64, dtype=torch.float32, device=x.device)
        flags = torch.empty(3 * images, dtype=torch.int32, device=x.device)
        with torch.cuda.device(x.device):
            code = launcher()(x.data_ptr(), residual.data_ptr(), out.data_ptr(), self.norm_weight.data_ptr(),
                              self.norm_bias.data_ptr(), weight.data_ptr(), self.bias.data_ptr(), v.data_ptr(), u.data_ptr(),
                              part.data_ptr(), flags.data_ptr(), images, height, width, torch.cuda.current_stream(x.device).cuda_stream)
        if code:
            raise RuntimeError(f"norm_conv launch failed: {code}")
        return out
