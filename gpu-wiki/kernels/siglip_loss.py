"""SigLIP's loss in CUDA C++ for Hopper: one persistent launch, the logits stay in registers.

 * Clusters of two blocks, each 128 images x 256 texts a tile. A producer warp brings the operands by TMA, half of the
   texts' tile each and for both blocks; two consumer warpgroups of 64 x 256 multiply. The second one stays LAG steps
   behind the first, so that one multiplies while the other takes exponentials.
 * With t = 2^y, y = logit log2 e: prod(1 + t) - 1 is kept by two operations an element, across tiles until it exceeds 1;
   log1p of it is the sum of the softplus. Where a tile's is large, a thread takes max(y, 0) + log1p(2^-|y|). Tiles with elements of the
   diagonal, or beyond the end, first make y of the sums (diagonal: sign turned, outside: -inf).
 * The tiles of a last round that is nearly empty are cut into pieces of 16 texts, one a cluster.
 * The last block adds the blocks' sums (float64, in a fixed order).
evals/trials/siglip_loss states it.
"""

import functools

import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

BK = 32
STAGES = 9
LAG = 4
GROUP = 8
TAIL = 1
PROBE = ""


def wgmma(n):
    """m64 nN k16 of bf16, both operands in shared memory with k innermost; `keep` 0 overwrites the sums."""
    half = n // 2
    sums, operands = ", ".join(f"%{i}" for i in range(half)), ", ".join(f'"+f"(d[{i}])' for i in range(half))
    return f"""__device__ __forceinline__ void multiply(float (&d)[{half}], uint64_t a, uint64_t b, int keep) {{
    asm volatile("{{.reg .pred p; setp.ne.b32 p, %{half + 2}, 0; "
                 "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{sums}}}, %{half}, %{half + 1}, p, 1, 1, 0, 0;}}"
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
constexpr int BM = 128, BN = 256, CLUSTER = 2, THREADS = 384, NARROW = 16, CUTS = BN / NARROW;
constexpr u32 A_BYTES = BM * BK * 2, B_BYTES = BN * BK * 2, NARROW_BYTES = NARROW * BK * 2, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr u32 SHARED_BYTES = STAGES * STAGE_BYTES + 24 * STAGES + 1024;
static_assert(SHARED_BYTES <= 232448 - 256, "shared memory");
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void bar_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory"); }
__device__ __forceinline__ void bar_expect(u32 bar, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory"); }
__device__ __forceinline__ void bar_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
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
__device__ __forceinline__ uint64_t descriptor(u32 address) {  // K-major rows of BK, swizzled over the whole row
    return (uint64_t)((address & 0x3FFFF) >> 4) | (uint64_t)1 << 16 | (uint64_t)(BK * 16 >> 4) << 32 | (uint64_t)(BK == 64 ? 1 : 2) << 62;
}
@WGMMA@
__device__ __forceinline__ float ex2(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
struct Ring {
    u32 at, full, empty, lag;
    int stage;
    u32 parity;
    __device__ void next() { if (++stage == STAGES) stage = 0, parity ^= 1; }
};

template <int HALF>
__device__ __forceinline__ void products(float (&acc)[HALF], Ring& ring, int steps, int group, int lane) {
    int before = 0;
    for (int k = 0; k < steps; ++k) {
        const int stage = ring.stage;
        const uint64_t a = descriptor(ring.at + stage * STAGE_BYTES + group * (A_BYTES / 2)), b = descriptor(ring.at + stage * STAGE_BYTES + A_BYTES);
        if (LAG && group == 1 && k + LAG < steps) {  // stay LAG steps behind
            const int ahead = stage + LAG;
            bar_wait(ring.lag + 8 * (ahead >= STAGES ? ahead - STAGES : ahead), ahead >= STAGES ? ring.parity ^ 1 : ring.parity);
        }
        bar_wait(ring.full + 8 * stage, ring.parity);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        multiply(acc, a, b, k);
        #pragma unroll
        for (int i = 1; i < BK / 16; ++i) multiply(acc, a + 2 * i, b + 2 * i, 1);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        if (LAG && threadIdx.x == 0) bar_arrive(ring.lag + 8 * stage);
        if (k) {
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            if (lane < CLUSTER) bar_arrive_at(ring.empty + 8 * before, lane);
        }
        before = stage;
        ring.next();
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    if (lane < CLUSTER) bar_arrive_at(ring.empty + 8 * before, lane);
    #pragma unroll
    for (int i = 0; i < HALF; ++i) asm volatile("" : "+f"(acc[i]) :: "memory");
}

// acc[4 j + i]: row lane / 4 + 8 (i / 2), column 8 j + 2 (lane % 4) + i % 2. `row`, `column`: of acc[0].
template <int HALF>
__device__ __forceinline__ void finish(float (&acc)[HALF], float scale, float bias, int row, int column, int pairs, bool special, float& product, double& total) {
    if (PROBE == 2) { product += acc[0]; return; }
    #pragma unroll
    for (int i = 0; i < HALF; ++i) acc[i] = fmaf(acc[i], scale, bias);  // y, in place: the sums are not needed any more
    if (special) {
        const int off = row - column, below = pairs - row, right = pairs - column;
        #pragma unroll
        for (int i = 0; i < HALF; ++i) {
            const int r = i & 2 ? 8 : 0, c = i / 4 * 8 + i % 2;
            if (off == c - r) acc[i] = -acc[i];
            if (r >= below || c >= right) acc[i] = -INFINITY;
        }
    }
    constexpr int CHAINS = 8;
    float q[CHAINS];
    #pragma unroll
    for (int i = 0; i < HALF; ++i) {
        const float t = PROBE == 1 ? acc[i] * 1e-9f : ex2(acc[i]);
        q[i % CHAINS] = i < CHAINS ? t : fmaf(q[i % CHAINS], t, q[i % CHAINS] + t);
    }
    #pragma unroll
    for (int n = CHAINS / 2; n; n /= 2)
        #pragma unroll
        for (int i = 0; i < n; ++i) q[i] = fmaf(q[i], q[i + n], q[i] + q[i + n]);
    if (q[0] < 1e6f) {
        product = fmaf(product, q[0], product + q[0]);
        if (product > 1.0f) total += log1pf(product), product = 0.0f;
        return;
    }
    float most = 0.0f, sum = 0.0f;
    #pragma unroll
    for (int j = 0; j < HALF; j += 8) {
        float p = 0.0f;
        #pragma unroll
        for (int i = j; i < j + 8; ++i) {
            const float y = acc[i], t = ex2(-fabsf(y));
            most += fmaxf(y, 0.0f);
            p = fmaf(p, t, p + t);
        }
        sum += log1pf(p);
    }
    total += fmaf(most, LN2, sum);
}

struct Place { int pair, piece; };
// of a square of pieces x pieces, in bands of GROUP pairs. magic: 2^32 / (GROUP pieces), rounded up; exact up to 2^16 tiles
__device__ __forceinline__ Place place(int tile, int pieces, u32 magic) {
    const int band = __umulhi(tile, magic), rest = tile - band * GROUP * pieces, wide = pieces - band * GROUP;
    const int piece = wide >= GROUP ? rest / GROUP : rest / wide;
    return {band * GROUP + rest - piece * min(GROUP, wide), piece};
}

__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    loss_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map, const __grid_constant__ CUtensorMap narrow_map,
                const float* log_scale, const float* bias_at, double* parts, u32* counter, float* out, int pairs, int steps, u32 magic) {
    extern __shared__ uint8_t raw[];
    __shared__ double sums[8];
    __shared__ u32 ticket;
    Ring ring;
    ring.at = (shared_address(raw) + 1023) & ~1023u, ring.full = ring.at + STAGES * STAGE_BYTES, ring.empty = ring.full + 8 * STAGES, ring.lag = ring.empty + 8 * STAGES;
    ring.stage = 0;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, group = warp / 4;
    u32 block;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) bar_init(ring.full + 8 * i, 1), bar_init(ring.empty + 8 * i, 8 * CLUSTER), bar_init(ring.lag + 8 * i, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    const int clusters = gridDim.x / CLUSTER, first = blockIdx.x / CLUSTER, pieces = (pairs + BN - 1) / BN, tiles = pieces * pieces;
    const int rest = tiles % clusters, whole = TAIL && rest * CUTS <= clusters ? tiles - rest : tiles;  // the others are cut
    const bool cut = first < (tiles - whole) * CUTS;
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp == 8 && lane == 0) {
            ring.parity = 1;
            for (int tile = first; tile < whole; tile += clusters) {
                const Place p = place(tile, pieces, magic);
                const int row = p.pair * BM * CLUSTER + block * BM, column = p.piece * BN + block * (BN / 2);
                for (int k = 0; k < steps; ++k) {
                    const u32 bar = ring.full + 8 * ring.stage, at = ring.at + ring.stage * STAGE_BYTES;
                    bar_wait(ring.empty + 8 * ring.stage, ring.parity);
                    bar_expect(bar, STAGE_BYTES);
                    load(at, &a_map, bar, k * BK, row);
                    load_for_both(at + A_BYTES + block * (B_BYTES / 2), &b_map, bar, k * BK, column);
                    ring.next();
                }
            }
            if (cut) {
                const Place p = place(whole + first / CUTS, pieces, magic);
                const int row = p.pair * BM * CLUSTER + block * BM, column = p.piece * BN + first % CUTS * NARROW + block * (NARROW / 2);
                for (int k = 0; k < steps; ++k) {
                    const u32 bar = ring.full + 8 * ring.stage, at = ring.at + ring.stage * STAGE_BYTES;
                    bar_wait(ring.empty + 8 * ring.stage, ring.parity);
                    bar_expect(bar, A_BYTES + NARROW_BYTES);
                    load(at, &a_map, bar, k * BK, row);
                    load_for_both(at + A_BYTES + block * (NARROW_BYTES / 2), &narrow_map, bar, k * BK, column);
                    ring.next();
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        ring.parity = 0;
        const float scale = expf(__ldg(log_scale)) * LOG2E, bias = __ldg(bias_at) * LOG2E;
        double total = 0.0;
        float product = 0.0f;  // of 1 + t, less 1
        float acc[BN / 2];
        #pragma unroll
        for (int i = 0; i < BN / 2; ++i) acc[i] = 0.0f;
        for (int tile = first; tile < whole; tile += clusters) {
            const Place p = place(tile, pieces, magic);
            const int row = (p.pair * CLUSTER + block) * BM + warp * 16 + lane / 4, column = p.piece * BN + 2 * (lane & 3);
            const bool special = p.pair == p.piece || (p.pair + 1) * BN > pairs || (p.piece + 1) * BN > pairs;
            products(acc, ring, steps, group, lane);
            finish(acc, scale, bias, row, column, pairs, special, product, total);
        }
        if (TAIL && cut) {
            const Place p = place(whole + first / CUTS, pieces, magic);
            const int row = (p.pair * CLUSTER + block) * BM + warp * 16 + lane / 4, column = p.piece * BN + first % CUTS * NARROW + 2 * (lane & 3);
            float few[NARROW / 2];
            #pragma unroll
            for (int i = 0; i < NARROW / 2; ++i) few[i] = 0.0f;
            products(few, ring, steps, group, lane);
            finish(few, scale, bias, row, column, pairs, true, product, total);
        }
        total += log1pf(product);
        #pragma unroll
        for (int i = 16; i; i /= 2) total += __shfl_xor_sync(~0u, total, i);
        if (lane == 0) sums[warp] = total;
        asm volatile("bar.sync 1, 256;" ::: "memory");
        if (threadIdx.x == 0) {
            total = 0.0;
            for (int i = 0; i < 8; ++i) total += sums[i];
            __stcg(parts + blockIdx.x, total);
            __threadfence();
            ticket = atomicInc(counter, gridDim.x - 1);  // the last one sets it back
        }
        asm volatile("bar.sync 1, 256;" ::: "memory");
        if (warp == 0 && ticket == gridDim.x - 1) {
            __threadfence();
            total = 0.0;
            for (int i = lane; i < gridDim.x; i += 32) total += __ldcg(parts + i);
            #pragma unroll
            for (int i = 16; i; i /= 2) total += __shfl_xor_sync(~0u, total, i);
            if (lane == 0) *out = (float)(total / pairs);
        }
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");  // no block ends while another still arrives at its barriers
}

static int describe(CUtensorMap* map, const void* data, long long rows, long long width, u32 box_rows) {
    static decltype(&cuTensorMapEncodeTiled) encode = nullptr;
    if (!encode) {
        void* f = nullptr;
        cudaDriverEntryPointQueryResult found;
        cudaError_t e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found);
        if (e || !f) return 10001;
        encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(f);
    }
    cuuint64_t sizes[2] = {(cuuint64_t)width, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)width * 2};
    cuuint32_t box[2] = {BK, box_rows}, step[2] = {1, 1};
    CUresult r = encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void*)data, sizes, strides, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                        BK == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return r == CUDA_SUCCESS ? 0 : 20000 + (int)r;
}

// images, texts, log_scale, bias, space (counter of 256 bytes, then a float64 a block), out, pairs, width, multiprocessors, stream
static PyObject* run(PyObject*, PyObject* const* given, Py_ssize_t count) {
    if (count != 10) { PyErr_SetString(PyExc_TypeError, "10 arguments"); return nullptr; }
    long long a[10];
    for (int i = 0; i < 10; ++i) a[i] = PyLong_AsLongLong(given[i]);
    static bool set = false;
    if (!set) {
        cudaError_t e = cudaFuncSetAttribute(loss_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);
        if (e) return PyLong_FromLong(e);
        set = true;
    }
    CUtensorMap a_map, b_map, narrow_map;
    if (int e = describe(&a_map, (void*)a[0], a[6], a[7], BM)) return PyLong_FromLong(e);
    if (int e = describe(&b_map, (void*)a[1], a[6], a[7], BN / 2)) return PyLong_FromLong(e);
    if (int e = describe(&narrow_map, (void*)a[1], a[6], a[7], NARROW / 2)) return PyLong_FromLong(e);
    const int wide = GROUP * (int)((a[6] + BN - 1) / BN);
    loss_kernel<<<(u32)(a[8] / CLUSTER * CLUSTER), THREADS, SHARED_BYTES, (cudaStream_t)a[9]>>>(a_map, b_map, narrow_map, (const float*)a[2], (const float*)a[3],
        (double*)((char*)a[4] + 256), (u32*)a[4], (float*)a[5], (int)a[6], (int)((a[7] + BK - 1) / BK), (u32)(((1ull << 32) + wide - 1) / wide));
    return PyLong_FromLong(cudaGetLastError());
}
static PyMethodDef methods[] = {{"run", (PyCFunction)(void*)run, METH_FASTCALL, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "siglip_loss", "", -1, methods};
#define INIT(name) PyInit_##name
#define INIT_OF(name) INIT(name)
PyMODINIT_FUNC INIT_OF(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
"""


@functools.cache
def built():
    numbers = {"BK": BK, "STAGES": STAGES, "LAG": LAG, "GROUP": GROUP, "TAIL": TAIL, "PROBE": ["", "no exponential", "no epilogue"].index(PROBE)}
    constants = "".join(f"#define {name} {value}\n" for name, value in numbers.items())
    source = constants + CUDA.replace("@WGMMA@", wgmma(16) + wgmma(256))
    flags = ["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a"]
    return load_inline("siglip_loss", "", source, no_implicit_headers=True, extra_cuda_cflags=flags).run


@functools.cache
def multiprocessors(device):
    properties = torch.cuda.get_device_properties(device)
    if properties.major != 9:
        raise ValueError("needs compute capability 9.0")
    return properties.multi_processor_count


@functools.cache
def space(device, stream):  # the counter is zeroed once; each launch leaves it at zero
    return torch.zeros(256 + 8 * multiprocessors(device), dtype=torch.uint8, device=device)


class ModelNew(nn.Module):
    def forward(self, images: torch.Tensor, texts: torch.Tensor, log_scale: torch.Tensor, bias: torch.Tensor):
        if images.dtype != torch.bfloat16 or texts.dtype != torch.bfloat16 or images.dim() != 2 or images.shape != texts.shape:
            raise ValueError("images and texts are bf16, pairs x width")
        if log_scale.dtype != torch.float32 or bias.dtype != torch.float32 or log_scale.numel() != 1 or bias.numel() != 1:
            raise ValueError("log_scale and bias are one float32 each")
        pairs, width = images.shape
        if width % 8 or not width or not pairs or pairs > 2**16 or width >= 2**24:
            raise ValueError("at most 65536 pairs, and a width that is a multiple of 8")
        images, texts = images.contiguous(), texts.contiguous()
        images, texts = (x.clone() if x.data_ptr() % 16 else x for x in (images, texts))
        out = torch.empty((), dtype=torch.float32, device=images.device)
        run, stream = built(), torch.cuda.current_stream(images.device).cuda_stream
        error = run(images.data_ptr(), texts.data_ptr(), log_scale.data_ptr(), bias.data_ptr(), space(images.device, stream).data_ptr(), out.data_ptr(),
                    pairs, width, multiprocessors(images.device), stream)
        if error:
            raise RuntimeError(f"siglip_loss: CUDA error {error}")
        return out
