"""Gate and up projection in fp8 with block scales, SwiGLU, and the result quantised again: one persistent launch, CUDA C++.

 * A block's tile is 128 rows x (128 gate + 128 up) columns, so each consumer warpgroup has gate and up of its 64 rows in
   its own registers, and whole groups of 128 columns of h. The two blocks of a cluster work on neighbouring rows and share
   the weights: one loads the gate's rows for both, the other one the up projection's.
 * A producer warp keeps a ring of four steps of 128 of k full, across tiles; scales of four steps come with the first.
 * A step of a consumer: gate's product into fresh sums, added scaled to fp32 sums; then up's. Both read x from shared
   memory. RS = 1 loads x into registers once for both, and takes 2 % more time.
 * Epilogue hidden: silu of the gate's sums under the last product of up; the rest (product, amax, quantisation, store)
   under the first product of the next tile.
 * The last tiles, fewer than a round, are cut along k into PARTS; each warp's sums are added by the part that owns the
   warp. Parts wait for each other, so all 66 clusters must run at once, or the kernel hangs: nothing else may hold SMs
   meanwhile, not a second call either.
One size: 8192 rows, 4096 to 7168 columns (ROWS, DEPTH, COLUMNS). evals/trials/gated_fp8 states the problem.
"""

import functools

import torch
from torch.utils.cpp_extension import load_inline

RS = 0  # 1: rows of x through registers
GROUP = 16  # row tiles of 256 that are walked together
PARTS = 4  # of k for each of the last tiles
EARLY = 1  # 1: silu under the last product
HIDE = 1  # 1: the rest of the epilogue under the next tile's first product
HINTS = 1
WIDE = 0  # 1: four scales a load
ROWS, COLUMNS, DEPTH = 8192, 7168, 4096  # the only sizes
PROBE = 0  # 1: no loads; 2: no scaling; 3: no epilogue; 4: no products


def wgmma(rs):
    sums, operands = ", ".join(f"%{i}" for i in range(64)), ", ".join(f'"+f"(d[{i}])' for i in range(64))
    if rs:
        return f"""__device__ __forceinline__ void multiply(float (&d)[64], const u32* a, uint64_t b, int keep) {{
    asm volatile("{{.reg .pred p; setp.ne.b32 p, %69, 0; "
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {{{sums}}}, {{%64, %65, %66, %67}}, %68, p, 1, 1;}}"
                 : {operands} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}}
"""
    return f"""__device__ __forceinline__ void multiply(float (&d)[64], uint64_t a, uint64_t b, int keep) {{
    asm volatile("{{.reg .pred p; setp.ne.b32 p, %66, 0; "
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {{{sums}}}, %64, %65, p, 1, 1;}}"
                 : {operands} : "l"(a), "l"(b), "r"(keep));
}}
"""


CUDA = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>

typedef uint32_t u32;
constexpr int BM = 128, BN = 128, BK = 128, CLUSTER = 2, THREADS = 384, STAGES = 4;
constexpr u32 X_BYTES = BM * BK, W_BYTES = BN * BK, STAGE_BYTES = X_BYTES + 2 * W_BYTES, OUT_BYTES = 16 * 128, SLOT_BYTES = 16 * BM + 256;
constexpr u32 SHARED_BYTES = STAGES * STAGE_BYTES + 8 * OUT_BYTES + 2 * SLOT_BYTES + 16 * STAGES + 1024;
static_assert(SHARED_BYTES <= 232448, "shared memory");

constexpr int CLUSTERS = 66, ROW_TILES = ROWS / (CLUSTER * BM), COLUMN_TILES = COLUMNS / BN, TURNS = DEPTH / (BK * STAGES);  // turns of the ring, for a tile
constexpr int TILES = ROW_TILES * COLUMN_TILES, WHOLE = TILES / CLUSTERS * CLUSTERS, REST = TILES - WHOLE;  // tiles of whole rounds, and the others
static_assert(ROWS % 256 == 0 && COLUMNS % 128 == 0 && DEPTH % (512 * PARTS) == 0 && REST * PARTS <= CLUSTERS, "sizes");

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void bar_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory"); }
__device__ __forceinline__ void bar_expect(u32 bar, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory"); }
__device__ __forceinline__ void bar_arrive_at(u32 bar, u32 block) {  // the same barrier in a block of the cluster
    asm volatile("{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [r];\n}" ::"r"(bar), "r"(block) : "memory");
}
__device__ __forceinline__ void bar_wait(u32 bar, u32 parity) {
    asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra again;\ndone:\n}" ::"r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ void load(u32 to, const CUtensorMap* map, u32 bar, int k, int row) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                 ::"r"(to), "l"(map), "r"(bar), "r"(k), "r"(row) : "memory");
}
__device__ __forceinline__ void load_for_both(u32 to, const CUtensorMap* map, u32 bar, int k, int row) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;"
                 ::"r"(to), "l"(map), "r"(bar), "r"(k), "r"(row), "h"((uint16_t)3) : "memory");
}
__device__ __forceinline__ void store(const CUtensorMap* map, u32 from, int column, int row) {
    if (HINTS) asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%2, %3}], [%1], %4;" ::"l"(map), "r"(from), "r"(column), "r"(row), "l"(0x12F0000000000000ull) : "memory");
    else asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from), "r"(column), "r"(row) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ uint64_t descriptor(u32 address) {  // K-major rows of 128 bytes, 128-byte swizzle
    return (uint64_t)((address & 0x3FFFF) >> 4) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}
@WGMMA@
__device__ __forceinline__ float word(u32 at) {
    float r;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(r) : "r"(at) : "memory");
    return r;
}
__device__ __forceinline__ void four(float (&r)[4], u32 at) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(r[0]), "=f"(r[1]), "=f"(r[2]), "=f"(r[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void silu_of_double(float& x) {  // silu(2 x)
    asm volatile("{.reg .f32 t; tanh.approx.f32 t, %0; fma.rn.f32 %0, %0, t, %0;}" : "+f"(x));
}
__device__ __forceinline__ u32 two_e4m3(float low, float high) {
    uint16_t r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
    return r;
}
// Tiles of a cluster: 256 rows and 128 columns of h; GROUP tiles of rows are walked together.
__device__ __forceinline__ void place(int tile, int& row, int& column_block) {
    constexpr int per_group = GROUP * COLUMN_TILES;
    const int first = tile / per_group * GROUP, within = tile % per_group;
    const int rows = ROW_TILES % GROUP ? min(ROW_TILES - first, GROUP) : GROUP;
    row = (first + within % rows) * CLUSTER * BM, column_block = within / rows;
}
// What a cluster does next: whole tiles, then perhaps a part of one of the last ones, then nothing (-1).
__device__ __forceinline__ int tile_after(int tile, int cluster) {
    if (tile >= WHOLE) return -1;
    if (tile + CLUSTERS < WHOLE) return tile + CLUSTERS;
    return cluster < REST * PARTS ? WHOLE + cluster / PARTS : -1;
}

__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    glu_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap gate_map, const __grid_constant__ CUtensorMap up_map,
               const __grid_constant__ CUtensorMap scale_x_map, const __grid_constant__ CUtensorMap scale_gate_map, const __grid_constant__ CUtensorMap scale_up_map,
               const __grid_constant__ CUtensorMap q_map, float* __restrict__ scales_out, float4* __restrict__ partial, u32* flags) {
    extern __shared__ uint8_t raw[];
    const u32 ring = (shared_address(raw) + 1023) & ~1023u, outs = ring + STAGES * STAGE_BYTES, slots = outs + 8 * OUT_BYTES, full = slots + 2 * SLOT_BYTES, empty = full + 8 * STAGES;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, group = warp / 4;
    const int cluster = blockIdx.x / CLUSTER;
    u32 block;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) bar_init(full + 8 * i, 1), bar_init(empty + 8 * i, 2 * CLUSTER);  // a consumer warpgroup each
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp == 8 && lane == 0) {
            u32 parity = 1;
            for (int tile = tile_after(cluster - CLUSTERS, cluster); tile >= 0; tile = tile_after(tile, cluster)) {
                int row, column_block;
                place(tile, row, column_block);
                row += block * BM;
                const int from = tile < WHOLE ? 0 : cluster % PARTS * (TURNS / PARTS), to = tile < WHOLE ? TURNS : from + TURNS / PARTS;
                #pragma unroll 1
                for (int turn = from; turn < to; ++turn) {
                    const u32 scales = slots + (parity ^ 1) * SLOT_BYTES;
                    #pragma unroll
                    for (int u = 0; u < STAGES; ++u) {
                        const u32 bar = full + 8 * u, at = ring + u * STAGE_BYTES;
                        const int k = turn * STAGES + u;
                        bar_wait(empty + 8 * u, parity);
                        if (PROBE == 1) {
                            asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
                            continue;
                        }
                        if (u == 0) {
                            bar_expect(bar, STAGE_BYTES + 16 * BM + 32);
                            load(scales, &scale_x_map, bar, k, row);
                            load(scales + 16 * BM, &scale_gate_map, bar, k, column_block);
                            load(scales + 16 * BM + 128, &scale_up_map, bar, k, column_block);
                        } else bar_expect(bar, STAGE_BYTES);
                        load(at, &x_map, bar, k * BK, row);
                        if (block) load_for_both(at + X_BYTES + W_BYTES, &up_map, bar, k * BK, column_block * BN);
                        else load_for_both(at + X_BYTES, &gate_map, bar, k * BK, column_block * BN);
                    }
                    parity ^= 1;
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        u32 parity = 0;
        float g[64], p[64], d[64];  // sums of the gate, halved, and of up; a product
        u32 a[16];
        #pragma unroll
        for (int i = 0; i < 64; ++i) g[i] = p[i] = d[i] = 0.0f;
        const u32 of_x = (group * 64 + warp % 4 * 16 + lane / 4) * 16;  // scales of rows lane / 4 and + 8
        const u32 a_row = ring + group * (X_BYTES / 2) + (warp % 4 * 16 + lane % 16) * 128 + ((lane / 16) ^ (lane % 8)) * 16;
        const u32 out = outs + warp * OUT_BYTES;
        int tile = cluster - CLUSTERS, left = TURNS;  // of this tile
        bool fresh = true;

        auto release = [&](int u) {
            if (threadIdx.x % 128 < CLUSTER) bar_arrive_at(empty + 8 * u, threadIdx.x % 128);
        };
        auto take_a = [&](int u) {
#if RS
            #pragma unroll
            for (int i = 0; i < 4; ++i)
                asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                             : "=r"(a[4 * i]), "=r"(a[4 * i + 1]), "=r"(a[4 * i + 2]), "=r"(a[4 * i + 3]) : "r"((a_row ^ (32 * i)) + u * STAGE_BYTES) : "memory");
#endif
        };
        auto issue = [&](int u, int of_up) {
            if (PROBE == 4) return;
            const uint64_t b = descriptor(ring + u * STAGE_BYTES + X_BYTES + of_up * W_BYTES);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
#if RS
                multiply(d, a + 4 * i, b + 2 * i, i);
#else
                multiply(d, descriptor(ring + u * STAGE_BYTES + group * (X_BYTES / 2)) + 2 * i, b + 2 * i, i);
#endif
            }
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        };
        auto await = [&]() {
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            #pragma unroll
            for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(d[i]) :: "memory");
        };
        auto add = [&](float (&sums)[64], float f0, float f1) {
            #pragma unroll
            for (int i = 0; i < (PROBE == 2 ? 4 : 64); i += 4) {
                sums[i] += d[i] * f0, sums[i + 1] += d[i + 1] * f0;
                sums[i + 2] += d[i + 2] * f1, sums[i + 3] += d[i + 3] * f1;
            }
        };
        auto silu = [&]() {
            #pragma unroll
            for (int i = 0; i < 64; ++i) silu_of_double(g[i]);
        };
        // A part of a tile: true where this warp has the whole sums then.
        auto gather = [&]() {
            const int owner = warp % 4 % PARTS, part = cluster % PARTS;
            const int at = ((tile - WHOLE) * CLUSTER + block) * 8 + warp;  // of a warp's sums
            if (owner != part) {
                float4* to = partial + ((int64_t)at * PARTS + part) * 1024 + lane;
                #pragma unroll
                for (int i = 0; i < 64; i += 4) {
                    __stcg(to + i * 8, make_float4(g[i], g[i + 1], g[i + 2], g[i + 3]));
                    __stcg(to + 512 + i * 8, make_float4(p[i], p[i + 1], p[i + 2], p[i + 3]));
                }
                __threadfence();
                __syncwarp();
                if (lane == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(flags + at) : "memory");
                return false;
            }
            if (lane == 0) {
                u32 now;
                do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(flags + at) : "memory"); while (now < PARTS - 1);
                flags[at] = 0;
            }
            __syncwarp();
            for (int other = 0; other < PARTS; ++other) {
                if (other == part) continue;
                const float4* from = partial + ((int64_t)at * PARTS + other) * 1024 + lane;
                #pragma unroll
                for (int i = 0; i < 64; i += 4) {
                    const float4 v = __ldcg(from + i * 8), q = __ldcg(from + 512 + i * 8);
                    g[i] += v.x, g[i + 1] += v.y, g[i + 2] += v.z, g[i + 3] += v.w;
                    p[i] += q.x, p[i + 1] += q.y, p[i + 2] += q.z, p[i + 3] += q.w;
                }
            }
            return true;
        };
        // The end of a tile, each warp for itself.
        auto finish = [&]() {
            if (PROBE == 3) return;
            int row, column_block;
            place(tile, row, column_block);
            float most[2] = {1e-10f, 1e-10f};
            #pragma unroll
            for (int i = 0; i < 64; ++i) {
                g[i] *= p[i];
                most[i / 2 % 2] = fmaxf(most[i / 2 % 2], fabsf(g[i]));
            }
            #pragma unroll
            for (int i = 0; i < 2; ++i) {
                most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], 1));
                most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], 2));
            }
            const int first_row = row + block * BM + group * 64 + warp % 4 * 16;
            if (lane % 4 < 2) scales_out[(int64_t)(first_row + lane / 4 + lane % 4 * 8) * COLUMN_TILES + column_block] = (lane % 4 ? most[1] : most[0]) * (1.0f / 448.0f);
            const float by0 = __fdividef(448.0f, most[0]), by1 = __fdividef(448.0f, most[1]);
            if (lane == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
            __syncwarp();
            const u32 select = lane % 2 ? 0x3276 : 0x5410, to = out + lane / 4 * 128 + lane / 4 * 16 + lane % 4 / 2 * 4 + lane % 2 * 8;
            #pragma unroll
            for (int j = 0; j < 8; ++j) {  // 16 columns
                #pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const float by = r ? by1 : by0, *v = g + 8 * j + 2 * r;
                    const u32 own = two_e4m3(v[0] * by, v[1] * by) | two_e4m3(v[4] * by, v[5] * by) << 16;
                    const u32 other = __shfl_xor_sync(~0u, own, 1);
                    asm volatile("st.shared.u32 [%0], %1;" ::"r"((to ^ (j * 16)) + r * 1024), "r"(__byte_perm(own, other, select)) : "memory");
                }
            }
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            __syncwarp();
            if (lane == 0) store(&q_map, out, column_block * BN, first_row);
        };

        while (true) {
            const u32 scales = slots + parity * SLOT_BYTES;
            if (fresh && !left) break;
#if !HIDE
            if (fresh && tile >= 0) {
                if (!EARLY) silu();
                finish();
            }
#endif
            bar_wait(full, parity);
            take_a(0);
            issue(0, 0);
            if (fresh) {
#if HIDE
                if (tile >= 0) {
                    if (!EARLY) silu();
                    finish();
                }
#endif
                fresh = false, tile = tile_after(tile, cluster);
                #pragma unroll
                for (int i = 0; i < 64; ++i) g[i] = p[i] = 0.0f;
            }
#if WIDE
            float scale_0[4], scale_1[4], scale_g[4], scale_u[4];
#endif
            #pragma unroll
            for (int u = 0; u < STAGES; ++u) {
                if (u) issue(u, 0);
#if WIDE
                if (u == 0) four(scale_0, scales + of_x), four(scale_1, scales + of_x + 128), four(scale_g, scales + 16 * BM), four(scale_u, scales + 16 * BM + 128);
                const float x0 = scale_0[u], x1 = scale_1[u], of_gate = scale_g[u] * 0.5f, of_up = scale_u[u];
#else
                const float x0 = word(scales + of_x + 4 * u), x1 = word(scales + of_x + 128 + 4 * u);
                const float of_gate = word(scales + 16 * BM + 4 * u) * 0.5f, of_up = word(scales + 16 * BM + 128 + 4 * u);
#endif
                await();
                add(g, x0 * of_gate, x1 * of_gate);
                issue(u, 1);
                if (EARLY && u == STAGES - 1 && left == 1 && (PARTS == 1 || tile < WHOLE)) silu();
                await();
                release(u);
                if (u < STAGES - 1) {
                    bar_wait(full + 8 * (u + 1), parity);
                    take_a(u + 1);
                }
                add(p, x0 * of_up, x1 * of_up);
            }
            parity ^= 1;
            if (--left == 0) {
                const int next = tile_after(tile, cluster);
                fresh = true, left = next < 0 ? 0 : next < WHOLE ? TURNS : TURNS / PARTS;
            }
        }
        const bool part = PARTS > 1 && tile >= WHOLE;
        if (!part || gather()) {
            if (part || !EARLY) silu();
            finish();
        }
        if (lane == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");  // no block ends while another still arrives at its barriers
}

// All return 0 or an error: CUDA's, or 10000 and the driver's.
#define MUST(call) do { int error = int(call); if (error) return error; } while (0)

int map_of(CUtensorMap& map, const void* data, CUtensorMapDataType type, int bytes, int rows, int columns, int box_rows, int box_columns) {
    static void* encode = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (!encode) MUST(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &result));
    cuuint64_t sizes[2] = {(cuuint64_t)columns, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)columns * bytes};
    cuuint32_t box[2] = {(cuuint32_t)box_columns, (cuuint32_t)box_rows}, one[2] = {1, 1};
    const CUtensorMapSwizzle swizzle = box_columns * bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE;
    CUresult error = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(&map, type, 2, (void*)data, sizes, strides, box, one,
        CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return error == CUDA_SUCCESS ? 0 : 10000 + int(error);
}

int product(const void* x, const void* gate, const void* up, const void* scale_x, const void* scale_gate, const void* scale_up, void* q, float* scales, void* partial, void* flags, cudaStream_t stream) {
    constexpr int rows = ROWS, columns = COLUMNS, depth = DEPTH;
    CUtensorMap x_map, gate_map, up_map, scale_x_map, scale_gate_map, scale_up_map, q_map;
    const auto u8 = CU_TENSOR_MAP_DATA_TYPE_UINT8, f32 = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    MUST(map_of(x_map, x, u8, 1, rows, depth, BM, BK));
    MUST(map_of(gate_map, gate, u8, 1, columns, depth, BN, BK));
    MUST(map_of(up_map, up, u8, 1, columns, depth, BN, BK));
    MUST(map_of(scale_x_map, scale_x, f32, 4, rows, depth / BK, BM, 4));
    MUST(map_of(scale_gate_map, scale_gate, f32, 4, columns / BN, depth / BK, 1, 4));
    MUST(map_of(scale_up_map, scale_up, f32, 4, columns / BN, depth / BK, 1, 4));
    MUST(map_of(q_map, q, u8, 1, rows, columns, 16, BN));
    MUST(cudaFuncSetAttribute(glu_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
    glu_kernel<<<CLUSTERS * CLUSTER, THREADS, SHARED_BYTES, stream>>>(x_map, gate_map, up_map, scale_x_map, scale_gate_map, scale_up_map, q_map, scales, (float4*)partial, (u32*)flags);
    return cudaGetLastError();
}

static PyObject* run(PyObject*, PyObject* const* given, Py_ssize_t) {  // x, gate, up, three scales, q, scales, partial, flags, stream
    long long a[11];
    for (int i = 0; i < 11; ++i) a[i] = PyLong_AsLongLong(given[i]);
    return PyLong_FromLong(product((void*)a[0], (void*)a[1], (void*)a[2], (void*)a[3], (void*)a[4], (void*)a[5], (void*)a[6], (float*)a[7], (void*)a[8], (void*)a[9], (cudaStream_t)a[10]));
}
static PyMethodDef methods[] = {{"run", (PyCFunction)(void*)run, METH_FASTCALL, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "gated_fp8", "", -1, methods};
#define INIT(name) PyInit_##name
#define INIT_OF(name) INIT(name)
PyMODINIT_FUNC INIT_OF(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
""".replace("@WGMMA@", wgmma(RS))


@functools.cache
def extension():
    flags = {"RS": RS, "GROUP": GROUP, "PARTS": PARTS, "EARLY": EARLY, "HIDE": HIDE, "HINTS": HINTS, "WIDE": WIDE, "PROBE": PROBE, "ROWS": ROWS, "COLUMNS": COLUMNS, "DEPTH": DEPTH}
    return load_inline(
        "gated_fp8_" + "_".join(map(str, flags.values())),
        "",
        CUDA,
        no_implicit_headers=True,
        with_pytorch_error_handling=False,
        extra_cuda_cflags=["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a"]
        + [f"-D{name}={value}" for name, value in flags.items()],
    ).run


@functools.cache
def multiprocessors(device):
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def spaces(device, stream):
    """Sums of the last tiles' parts, and a counter a warp, which the kernel leaves 0."""
    warps = 16 * max(1, ROWS // 256 * (COLUMNS // 128) % 66)
    return torch.empty(warps * PARTS * 4096, dtype=torch.float32, device=device), torch.zeros(warps, dtype=torch.int32, device=device)


def fits(x, dtype, *shape):
    return x.dtype == dtype and x.shape == shape and x.is_contiguous() and x.data_ptr() % 16 == 0


class ModelNew(torch.nn.Module):
    def forward(self, x, gate, up, scale_x, scale_gate, scale_up):
        fp8, f32, device = torch.float8_e4m3fn, torch.float32, x.device
        if not (fits(x, fp8, ROWS, DEPTH) and fits(gate, fp8, COLUMNS, DEPTH) and fits(up, fp8, COLUMNS, DEPTH)):
            raise ValueError(f"x must be {ROWS} x {DEPTH}, gate and up {COLUMNS} x {DEPTH}, contiguous float8_e4m3fn at multiples of 16 bytes")
        if not (fits(scale_x, f32, ROWS, DEPTH // 128) and fits(scale_gate, f32, COLUMNS // 128, DEPTH // 128) and fits(scale_up, f32, COLUMNS // 128, DEPTH // 128)):
            raise ValueError("scales must be contiguous float32 at multiples of 16 bytes, one for each 128 values of x and each 128 x 128 of gate and up")
        if multiprocessors(device) < 132:
            raise ValueError("the kernel wants 132 multiprocessors")
        q = torch.empty((ROWS, COLUMNS), dtype=fp8, device=device)
        scales = torch.empty((ROWS, COLUMNS // 128), dtype=f32, device=device)
        stream = torch.cuda.current_stream(device).cuda_stream
        pointers = (x, gate, up, scale_x, scale_gate, scale_up, q, scales, *spaces(device, stream))
        error = extension()(*(t.data_ptr() for t in pointers), stream)
        if error:
            raise RuntimeError(f"gated_fp8: CUDA error {error}")
        return q, scales
