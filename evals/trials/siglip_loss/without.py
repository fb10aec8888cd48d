"""SigLIP's loss, fused: bf16 wgmma GEMM (TMA, 2-CTA clusters with multicast, warp-specialised, persistent) whose
epilogue turns each logit into its softplus and sums, so the logits never leave the registers."""

import ctypes
import os

import torch
from torch import nn

_D = ", ".join(f"%{i}" for i in range(128))
_OUT = ", ".join(f'"+f"(d[{i}])' for i in range(128))

_SRC = r"""
#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>

#ifndef STAGES
#define STAGES 4
#endif
#ifndef CL
#define CL 2            // CTAs of a cluster: CL * 128 images by 256 texts
#endif
#ifndef OFF
#define OFF 0          // k-blocks by which consumer 0 starts ahead of consumer 1
#endif
#ifndef GROUP
#define GROUP 16       // cluster tiles of rows per raster group
#endif
constexpr int BM = 128, BN = 256, BK = 64;
constexpr int A_BYTES = BM * BK * 2, B_BYTES = BN * BK * 2, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int SMEM = STAGES * STAGE_BYTES + 1024 + 256;

__device__ __forceinline__ uint32_t s32(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void mbar_init(uint32_t b, int n) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(n));
}
__device__ __forceinline__ void mbar_expect(uint32_t b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbar_wait(uint32_t b, int parity) {
  asm volatile(
      "{\n.reg .pred p;\nL%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra D%=;\nbra L%=;\nD%=:\n}\n" ::"r"(b), "r"(parity) : "memory");
}
__device__ __forceinline__ void mbar_wait_cluster(uint32_t b, int parity) {
  asm volatile(
      "{\n.reg .pred p;\nL%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra D%=;\nbra L%=;\nD%=:\n}\n" ::"r"(b), "r"(parity) : "memory");
}
__device__ __forceinline__ void mbar_arrive_remote(uint32_t b, int cta) {
  asm volatile(
      "{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [r];\n}\n" ::"r"(b), "r"(cta) : "memory");
}
__device__ __forceinline__ void tma(uint32_t dst, const CUtensorMap* m, int x, int y, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(dst), "l"(m), "r"(x), "r"(y), "r"(bar) : "memory");
}
__device__ __forceinline__ void tma_mc(uint32_t dst, const CUtensorMap* m, int x, int y, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(dst), "l"(m), "r"(x), "r"(y), "r"(bar), "h"((uint16_t)((1 << CL) - 1)) : "memory");
}
__device__ __forceinline__ uint64_t desc(uint32_t addr) {  // K-major, 128-byte swizzle
  return ((uint64_t)((addr & 0x3FFFF) >> 4)) | ((uint64_t)1 << 16) | ((uint64_t)64 << 32) | ((uint64_t)1 << 62);
}
__device__ __forceinline__ void wgmma(float (&d)[128], uint64_t a, uint64_t b, int acc) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {@D@}, %128, %129, p, 1, 1, 0, 0;\n}\n"
      : @OUT@
      : "l"(a), "l"(b), "r"(acc));
}
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Sum of softplus over this thread's 128 logits. With P = prod(1 + e^x) - 1, P' = P + a + a P keeps the relative
// precision of small terms, and one log1p serves 32 logits. Any overflow shows as P = inf/nan -> the stable form.
__device__ __forceinline__ float epi_fast(const float (&d)[128], float s2, float b2, bool& ok) {
  float P[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int j = 0; j < 128; j++) {
    float a = ex2(fmaf(d[j], s2, b2));
    P[j & 3] = fmaf(a, P[j & 3], a + P[j & 3]);
  }
  ok = (P[0] < 1e38f) & (P[1] < 1e38f) & (P[2] < 1e38f) & (P[3] < 1e38f);
  return (log1pf(P[0]) + log1pf(P[1])) + (log1pf(P[2]) + log1pf(P[3]));
}
// The stable form with the diagonal's sign and the edges' mask: softplus(x) = max(x, 0) + log1p(exp(-|x|)).
__device__ __forceinline__ float log1p4(float a, float b, float c, float d) {
  return (log1pf(a) + log1pf(b)) + (log1pf(c) + log1pf(d));
}
__device__ __forceinline__ float epi_full(const float (&d)[128], float s2, float b2, int row, int col, int n) {
  float P[4] = {0.f, 0.f, 0.f, 0.f}, M[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int j = 0; j < 128; j++) {
    int r = row + ((j & 2) ? 8 : 0), c = col + (j >> 2) * 8 + (j & 1);
    float x = fmaf(d[j], s2, b2);
    x = r == c ? -x : x;
    x = (r < n && c < n) ? x : __int_as_float(0xff800000);
    M[j & 3] += fmaxf(x, 0.f);
    float a = ex2(-fabsf(x));
    P[j & 3] = fmaf(a, P[j & 3], a + P[j & 3]);
  }
  return ((M[0] + M[1]) + (M[2] + M[3])) * 0.69314718056f + log1p4(P[0], P[1], P[2], P[3]);
}

__device__ __forceinline__ void tile_of(int t, int tiles_m, int tiles_n, int& m, int& n) {
  int per = GROUP * tiles_n, g = t / per, r = t - g * per;
  int rows = min(GROUP, tiles_m - g * GROUP);
  n = r / rows;
  m = g * GROUP + (r - n * rows);
}

extern "C" __global__ void __cluster_dims__(CL, 1, 1) __launch_bounds__(384, 1)
siglip(const __grid_constant__ CUtensorMap ta, const __grid_constant__ CUtensorMap tb, const float* __restrict__ log_scale,
       const float* __restrict__ bias, double* partial, unsigned* counter, float* out, int n, int kbs, int tiles_m,
       int tiles_n) {
  extern __shared__ uint8_t raw[];
  __shared__ double red[8];
  uint32_t base = (s32(raw) + 1023) & ~1023u;
  uint32_t full = base + STAGES * STAGE_BYTES, empty = full + STAGES * 8;
  int tid = threadIdx.x, wg = tid >> 7, lane = tid & 31;
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (tid == 0) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&ta));
    asm volatile("prefetch.tensormap [%0];" ::"l"(&tb));
    for (int i = 0; i < STAGES; i++) {
      mbar_init(full + i * 8, 1);
      mbar_init(empty + i * 8, 8 * CL);  // 8 consumer warps in each CTA of the cluster
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  int cluster = blockIdx.x / CL, clusters = gridDim.x / CL, tiles = tiles_m * tiles_n;

  if (wg == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (tid == 0) {
      int s = 0, ph = 1;
      for (int t = cluster; t < tiles; t += clusters) {
        int tm, tn;
        tile_of(t, tiles_m, tiles_n, tm, tn);
        int ya = (tm * CL + rank) * BM, yb = tn * BN + rank * (BN / CL);
        for (int k = 0; k < kbs; k++) {
          mbar_wait_cluster(empty + s * 8, ph);
          uint32_t sa = base + s * STAGE_BYTES, f = full + s * 8;
          mbar_expect(f, STAGE_BYTES);
          tma_mc(sa + A_BYTES + rank * (B_BYTES / CL), &tb, k * BK, yb, f);
          tma(sa, &ta, k * BK, ya, f);
          if (++s == STAGES) s = 0, ph ^= 1;
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    int w = wg - 1;
    float s2 = expf(*log_scale) * 1.44269504089f, b2 = *bias * 1.44269504089f;
    double total = 0;
    float d[128];
    int s = 0, ph = 0;
    int row_in = rank * 128 + w * 64 + ((tid >> 5) & 3) * 16 + (lane >> 2), col_in = (lane & 3) * 2;
    bool first = OFF > 0;
    if (first && w == 1) asm volatile("bar.sync 1, 256;" ::: "memory");
    for (int t = cluster; t < tiles; t += clusters) {
      int tm, tn;
      tile_of(t, tiles_m, tiles_n, tm, tn);
      int prev = 0;
#pragma unroll 1
      for (int k = 0; k < kbs; k++) {
        mbar_wait(full + s * 8, ph);
        uint32_t sa = base + s * STAGE_BYTES;
        uint64_t da = desc(sa + w * (A_BYTES / 2)), db = desc(sa + A_BYTES);
#pragma unroll
        for (int i = 0; i < 128; i++) asm volatile("" : "+f"(d[i])::"memory");
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int i = 0; i < 4; i++) wgmma(d, da + i * 2, db + i * 2, (k | i) != 0);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        if (first && w == 0 && (k == OFF - 1 || k == kbs - 1)) {
          asm volatile("bar.arrive 1, 256;" ::: "memory");
          first = false;
        }
        if (k > 0) {
          asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
          if (lane < CL) mbar_arrive_remote(empty + prev * 8, lane);
        }
        prev = s;
        if (++s == STAGES) s = 0, ph ^= 1;
      }
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
      for (int i = 0; i < 128; i++) asm volatile("" : "+f"(d[i])::"memory");
      if (lane < CL) mbar_arrive_remote(empty + prev * 8, lane);
      int rb = tm * CL + rank, row = tm * (CL * BM) + row_in, col = tn * BN + col_in;
      float v;
      bool ok = false;
      bool special = (rb >> 1) == tn || (rb + 1) * BM > n || (tn + 1) * BN > n;
      if (!special) v = epi_fast(d, s2, b2, ok);
      if (!ok) v = epi_full(d, s2, b2, row, col, n);
      total += (double)v;
    }
#pragma unroll
    for (int o = 16; o; o >>= 1) total += __shfl_xor_sync(~0u, total, o);
    if (lane == 0) red[(tid >> 5) - 4] = total;
    asm volatile("bar.sync 2, 256;" ::: "memory");
    if (tid < 160) {
      unsigned ticket = 0;
      if (lane == 0) {
        double v = 0;
        for (int i = 0; i < 8; i++) v += red[i];
        partial[blockIdx.x] = v;
        __threadfence();
        ticket = atomicAdd(counter, 1);
        __threadfence();
      }
      ticket = __shfl_sync(~0u, ticket, 0);
      if (ticket == gridDim.x - 1) {
        double v = 0;
        for (int i = lane; i < gridDim.x; i += 32) v += __ldcg(partial + i);
#pragma unroll
        for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
        if (lane == 0) {
          *out = (float)(v / n);
          *counter = 0;
        }
      }
    }
  }
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

typedef CUresult (*encode_t)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                             const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                             CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

extern "C" int siglip_run(void* a, void* b, void* ls, void* bias, void* partial, void* counter, void* out, int n, int k,
                          int sms, void* stream) {
  static encode_t encode = nullptr;
  static int most[64] = {};  // clusters that fit at once
  if (!encode) {
    cudaDriverEntryPointQueryResult q;
    void* p = nullptr;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &p, 12000, cudaEnableDefault, &q) != cudaSuccess || !p)
      return 1001;
    encode = (encode_t)p;
  }
  int dev = 0;
  cudaGetDevice(&dev);
  if (dev >= 64) return 1003;
  if (!most[dev]) {
    cudaError_t e = cudaFuncSetAttribute(siglip, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM);
    if (e != cudaSuccess) return (int)e;
    cudaLaunchConfig_t c = {};
    cudaLaunchAttribute at;
    at.id = cudaLaunchAttributeClusterDimension;
    at.val.clusterDim.x = CL, at.val.clusterDim.y = at.val.clusterDim.z = 1;
    c.gridDim = dim3(sms / CL * CL), c.blockDim = dim3(384), c.dynamicSmemBytes = SMEM, c.attrs = &at, c.numAttrs = 1;
    int fit = 0;
    e = cudaOccupancyMaxActiveClusters(&fit, siglip, &c);
    if (e != cudaSuccess) return (int)e;
    if (fit < 1) return 1004;
    most[dev] = fit < sms / CL ? fit : sms / CL;
  }
  CUtensorMap maps[2];
  cuuint64_t dims[2] = {(cuuint64_t)k, (cuuint64_t)n}, strides[1] = {(cuuint64_t)k * 2};
  cuuint32_t boxes[2][2] = {{BK, BM}, {BK, BN / CL}}, es[2] = {1, 1};
  for (int i = 0; i < 2; i++)
    if (encode(&maps[i], CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, i ? b : a, dims, strides, boxes[i], es,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
      return 1002;
  int tiles_m = (n + CL * BM - 1) / (CL * BM), tiles_n = (n + BN - 1) / BN, clusters = most[dev];
  if ((long long)tiles_m * tiles_n < clusters) clusters = tiles_m * tiles_n;
  siglip<<<clusters * CL, 384, SMEM, (cudaStream_t)stream>>>(maps[0], maps[1], (const float*)ls, (const float*)bias,
                                                          (double*)partial, (unsigned*)counter, (float*)out, n,
                                                          (k + BK - 1) / BK, tiles_m, tiles_n);
  return (int)cudaGetLastError();
}
""".replace("@D@", _D).replace("@OUT@", _OUT)


def _build(defines=()):
    from torch.utils.cpp_extension import load_inline

    name = "siglip_loss_h100" + "".join("_" + d.replace("=", "") for d in defines)
    path = load_inline(
        name, cpp_sources="", cuda_sources=_SRC, with_cuda=True, is_python_module=False, no_implicit_headers=True,
        extra_cuda_cflags=["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a"] + ["-D" + d for d in defines],
    )
    if not isinstance(path, str) or not os.path.exists(path):
        from torch.utils.cpp_extension import _get_build_directory

        path = os.path.join(_get_build_directory(name, False), name + ".so")
    run = ctypes.CDLL(path).siglip_run
    run.argtypes = [ctypes.c_void_p] * 7 + [ctypes.c_int] * 3 + [ctypes.c_void_p]
    run.restype = ctypes.c_int
    return run


_run = None


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        global _run
        if _run is None:
            _run = _build()
        self._run = _run
        self._scratch = {}

    def forward(self, images: torch.Tensor, texts: torch.Tensor, log_scale: torch.Tensor, bias: torch.Tensor):
        if images.dim() != 2 or images.shape != texts.shape or not (images.is_cuda and texts.device == images.device):
            raise RuntimeError("images and texts must be CUDA matrices of one shape")
        if images.dtype != torch.bfloat16 or texts.dtype != torch.bfloat16:
            raise RuntimeError("images and texts must be bfloat16")
        n, k = images.shape
        if n < 1 or k < 8 or k % 8 or n > 1 << 22:
            raise RuntimeError("unsupported size")
        if torch.is_grad_enabled() and (
            images.requires_grad or texts.requires_grad or log_scale.requires_grad or bias.requires_grad
        ):
            raise RuntimeError("forward only")
        device = images.device
        images, texts = images.contiguous(), texts.contiguous()
        if images.data_ptr() % 16:
            images = images.clone()
        if texts.data_ptr() % 16:
            texts = texts.clone()
        log_scale = log_scale.to(device=device, dtype=torch.float32)
        bias = bias.to(device=device, dtype=torch.float32)
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream().cuda_stream
            key = (device.index, stream)
            scratch = self._scratch.get(key)
            if scratch is None:
                sms = torch.cuda.get_device_properties(device).multi_processor_count
                buf = torch.zeros(sms + 1, dtype=torch.float64, device=device)  # a counter, then the partial sums
                scratch = self._scratch[key] = (buf, buf.data_ptr(), sms)
            out = torch.empty((), dtype=torch.float32, device=device)
            rc = self._run(images.data_ptr(), texts.data_ptr(), log_scale.data_ptr(), bias.data_ptr(), scratch[1] + 8,
                           scratch[1], out.data_ptr(), n, k, scratch[2], stream)
        if rc:
            raise RuntimeError(f"siglip kernel failed: {rc}")
        return out
