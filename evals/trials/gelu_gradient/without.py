"""dh = dy * gelu'(h) (bf16), out = dh @ W, bias gradient = dh.sum(0), in one persistent Hopper kernel.

Per SM one CTA: a TMA producer warp, two WGMMA consumer warpgroups (128x256 tile, clusters of two CTAs share the
weight tile by multicast), and three warps that compute dh for the rows that the tensor cores will need next. The
producer waits for dh by flags in global memory, so that the element-wise work hides behind the products."""

import ctypes
import os

import torch
from torch import nn
from torch.utils import cpp_extension

CUDA_SRC = r"""
#include <cuda.h>
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <stdint.h>

constexpr int BM = 128, BN = 256, BK = 64, ST = 4;
constexpr int A_BYTES = BM * BK * 2, B_BYTES = BN * BK * 2, STAGE = A_BYTES + B_BYTES;
constexpr int O_STG = ST * STAGE;            // 2 warpgroups x 2 x 8 KB for the epilogue
constexpr int O_BAR = O_STG + 32768;
constexpr int SMEM = O_BAR + 256;
constexpr int UR = 32, UC = 128;             // unit of element-wise work of a warp
constexpr int GR = 1024 / UR, UB = BM / UR;                       // row units in a group (1024 rows)

__device__ __forceinline__ uint32_t sptr(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void mbar_init(uint32_t b, int n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(n)); }
__device__ __forceinline__ void mbar_expect(uint32_t b, uint32_t n) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(n) : "memory");
}
__device__ __forceinline__ void mbar_wait(uint32_t b, uint32_t ph) {
  asm volatile("{\n.reg .pred p;\nL1:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra L2;\nbra L1;\nL2:\n}"
               ::"r"(b), "r"(ph) : "memory");
}
__device__ __forceinline__ void mbar_arrive_cta(uint32_t b, uint32_t cta) {
  asm volatile("{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [r];\n}"
               ::"r"(b), "r"(cta) : "memory");
}
__device__ __forceinline__ void tma_load(uint32_t dst, const CUtensorMap* m, uint32_t bar, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
               ::"r"(dst), "l"(m), "r"(bar), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void tma_load_mc(uint32_t dst, const CUtensorMap* m, uint32_t bar, int x, int y, uint16_t mask) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;"
               ::"r"(dst), "l"(m), "r"(bar), "r"(x), "r"(y), "h"(mask) : "memory");
}
__device__ __forceinline__ void tma_store(const CUtensorMap* m, uint32_t src, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];"
               ::"l"(m), "r"(src), "r"(x), "r"(y) : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int N> __device__ __forceinline__ void named_bar(int id) { asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(N) : "memory"); }
template <int R> __device__ __forceinline__ void reg_dec() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(R)); }
template <int R> __device__ __forceinline__ void reg_inc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(R)); }

__device__ __forceinline__ uint64_t mk_desc(uint32_t addr, uint32_t lbo, uint32_t sbo) {
  return (uint64_t)((addr & 0x3FFFF) >> 4) | ((uint64_t)(lbo >> 4) << 16) | ((uint64_t)(sbo >> 4) << 32) | (1ull << 62);
}
__device__ __forceinline__ void wgmma(float (&d)[128], uint64_t da, uint64_t db, int acc) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
    @LIST@
    "}, %128, %129, p, 1, 1, 0, 1;\n}\n"
    : @OUTS@
    : "l"(da), "l"(db), "r"(acc));
}

__device__ __forceinline__ float dgelu(float x0, float dy) {
  float x;
  asm("{\n.reg .f32 t;\nmin.NaN.f32 t, %1, 0f41180000;\nmax.NaN.f32 %0, t, 0fC1180000;\n}" : "=f"(x) : "f"(x0));  // +-9.5
  float q = x * x;
  const float L = -2.f * 0.7978845608028654f * 1.4426950408889634f;
  float u = x * fmaf(q, L * 0.044715f, L);
  float e, s;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(u));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.f + e));
  const float C = 2.f * 0.7978845608028654f;
  float p = x * fmaf(q, C * 3.f * 0.044715f, C);
  float slope = fmaf(s * p, e * s, s);
  return dy * slope;
}

__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
fused(const __grid_constant__ CUtensorMap mA, const __grid_constant__ CUtensorMap mW, const __grid_constant__ CUtensorMap mO,
      const __nv_bfloat16* __restrict__ dy, const __nv_bfloat16* __restrict__ h, __nv_bfloat16* dh, float* bias, int* flags,
      int M, int K, int N) {
  extern __shared__ __align__(1024) uint8_t smem[];
  const uint32_t sb = sptr(smem);
  const uint32_t full = sb + O_BAR, empty = full + 8 * ST;
  const int tid = threadIdx.x, wg = tid >> 7, lane = tid & 31;
  const int rank = blockIdx.x & 1, ncl = gridDim.x >> 1, cl = blockIdx.x >> 1;
  const int ntn = (N + BN - 1) / BN, nmp = (M + 2 * BM - 1) / (2 * BM), ntiles = ntn * nmp;
  const int nk = (K + BK - 1) / BK, nkc = (K + UC - 1) / UC;

  if (tid == 0) {
    for (int i = 0; i < ST; i++) { mbar_init(full + 8 * i, 1); mbar_init(empty + 8 * i, 4); }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");

  if (wg == 0) {
    reg_dec<104>();
    if (tid < 32) {
      int s = 0; uint32_t ph = 1;
      for (int t = cl; t < ntiles; t += ncl) {
        const int n0 = (t % ntn) * BN + rank * 128, mb = (t / ntn) * 2 + rank;
        const int* fl = flags + (size_t)mb * nkc;
        int ready = 0;
        for (int k = 0; k < nk; k++) {
          mbar_wait(empty + 8 * s, ph);
          const uint32_t a = sb + s * STAGE, b = a + A_BYTES + rank * (B_BYTES / 2);
          if (lane == 0) {
            mbar_expect(full + 8 * s, STAGE);
            tma_load_mc(b, &mW, full + 8 * s, n0, k * BK, 3);
            tma_load_mc(b + 8192, &mW, full + 8 * s, n0 + 64, k * BK, 3);
          }
          const int kc = k / (UC / BK);
          while (kc >= ready) {
            int i = kc + lane, v = UB;
            if (i < nkc) asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(fl + i) : "memory");
            unsigned ok = __ballot_sync(~0u, v >= UB);
            ready = kc + (ok == ~0u ? 32 : __ffs(~ok) - 1);
            asm volatile("fence.proxy.async;" ::: "memory");
          }
          if (lane == 0) tma_load(a, &mA, full + 8 * s, k * BK, mb * BM);
          __syncwarp();
          if (++s == ST) { s = 0; ph ^= 1; }
        }
      }
    } else {
    const int tx = lane & 15, ty = lane >> 4;
    const int per = GR * nkc, units = ((M + 1023) / 1024) * per;
    for (int u = ((tid >> 5) - 1) * gridDim.x + blockIdx.x; u < units; u += gridDim.x * 3) {
      const int g = u / per, rem = u - g * per, kc = rem / GR, ru = g * GR + rem % GR;
      const int col = kc * UC + tx * 8, row = ru * UR + ty;
      const bool cok = col < K;
      float sum[8];
#pragma unroll
      for (int j = 0; j < 8; j++) sum[j] = 0.f;
      const size_t base = (size_t)row * K + col;
#pragma unroll 1
      for (int hf = 0; hf < UR / 8; hf++) {
        uint4 a[4], b[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int r = hf * 8 + i * 2;
          a[i] = make_uint4(0, 0, 0, 0); b[i] = a[i];
          if (cok && row + r < M) {
            a[i] = __ldcs((const uint4*)(h + base + (size_t)r * K));
            b[i] = __ldcs((const uint4*)(dy + base + (size_t)r * K));
          }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int r = hf * 8 + i * 2;
          uint32_t xs[4] = {a[i].x, a[i].y, a[i].z, a[i].w}, ys[4] = {b[i].x, b[i].y, b[i].z, b[i].w}, o[4];
#pragma unroll
          for (int j = 0; j < 4; j++) {
            float lo = dgelu(__uint_as_float(xs[j] << 16), __uint_as_float(ys[j] << 16));
            float hi = dgelu(__uint_as_float(xs[j] & 0xffff0000u), __uint_as_float(ys[j] & 0xffff0000u));
            asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(o[j]) : "f"(hi), "f"(lo));
            sum[2 * j] += __uint_as_float(o[j] << 16);
            sum[2 * j + 1] += __uint_as_float(o[j] & 0xffff0000u);
          }
          if (cok && row + r < M) *(uint4*)(dh + base + (size_t)r * K) = make_uint4(o[0], o[1], o[2], o[3]);
        }
      }
      asm volatile("fence.proxy.async;" ::: "memory");
      __threadfence();
#pragma unroll
      for (int j = 0; j < 8; j++) sum[j] += __shfl_xor_sync(~0u, sum[j], 16);
      __syncwarp();
      if (lane == 0) asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(flags + (size_t)(ru / UB) * nkc + kc) : "memory");
      if (lane < 16 && cok) {
        asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(bias + col), "f"(sum[0]), "f"(sum[1]), "f"(sum[2]), "f"(sum[3]) : "memory");
        asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(bias + col + 4), "f"(sum[4]), "f"(sum[5]), "f"(sum[6]), "f"(sum[7]) : "memory");
      }
    }
    }
  } else {
    reg_inc<200>();
    const int cw = wg - 1, ct = tid & 127, w = ct >> 5;
    float d[128];
    int s = 0; uint32_t ph = 0;
    const uint32_t stg = sb + O_STG + cw * 16384;
    // stmatrix: row of this lane and which of the two 8-column blocks
    const int srow = w * 16 + ((lane >> 3) & 1) * 8 + (lane & 7), sc = lane >> 4;
    for (int t = cl; t < ntiles; t += ncl) {
      int prev = 0;
      for (int k = 0; k < nk; k++) {
        mbar_wait(full + 8 * s, ph);
        const uint32_t a = sb + s * STAGE;
        const uint64_t da = mk_desc(a + cw * 8192, 16, 1024), db = mk_desc(a + A_BYTES, 8192, 1024);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int q = 0; q < 4; q++) wgmma(d, da + q * 2, db + q * 128, (k | q) != 0);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (k > 0 && ct < 2) mbar_arrive_cta(empty + 8 * prev, ct);
        prev = s;
        if (++s == ST) { s = 0; ph ^= 1; }
      }
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
      for (int i = 0; i < 128; i++) asm volatile("" : "+f"(d[i])::"memory");
      if (ct < 2) mbar_arrive_cta(empty + 8 * prev, ct);
      const int n0 = (t % ntn) * BN, m0 = ((t / ntn) * 2 + rank) * BM + cw * 64;
#pragma unroll
      for (int c = 0; c < 4; c++) {
        const uint32_t buf = stg + (c & 1) * 8192;
        if (ct == 0) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
        named_bar<128>(2 + cw);
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
          uint32_t r[4];
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const int x = (c * 8 + j) * 4 + 2 * i;
            asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r[i]) : "f"(d[x + 1]), "f"(d[x]));
          }
          const uint32_t ad = buf + srow * 128 + (((j + sc) ^ (srow & 7)) << 4);
          asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(ad), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        named_bar<128>(2 + cw);
        if (ct == 0) tma_store(&mO, buf, n0 + c * 64, m0);
      }
    }
    if (ct == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
  __syncwarp();
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

typedef CUresult (*EncFn)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                          const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static int enc(EncFn f, CUtensorMap* m, void* p, uint64_t inner, uint64_t outer, uint32_t b0, uint32_t b1) {
  cuuint64_t dims[2] = {inner, outer}, str[1] = {inner * 2};
  cuuint32_t box[2] = {b0, b1}, es[2] = {1, 1};
  return (int)f(m, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, p, dims, str, box, es, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

// ws: [K floats of bias][flags], all of ws_bytes cleared here
extern "C" int launch(void* dy, void* h, void* w, void* dh, void* out, void* ws, long long ws_bytes, int M, int K, int N, void* stream) {
  static EncFn f = nullptr;
  static int nclusters[64] = {0};
  cudaStream_t st = (cudaStream_t)stream;
  int dev = 0;
  cudaGetDevice(&dev);
  if (!f) {
    void* p = nullptr;
    cudaDriverEntryPointQueryResult q;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &p, 12000, cudaEnableDefault, &q) != cudaSuccess || !p) return 9001;
    f = (EncFn)p;
  }
  if (!nclusters[dev]) {
    cudaError_t e = cudaFuncSetAttribute(fused, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM);
    if (e) return (int)e;
    cudaLaunchConfig_t c = {};
    c.gridDim = dim3(2); c.blockDim = dim3(384); c.dynamicSmemBytes = SMEM;
    cudaLaunchAttribute at[1];
    at[0].id = cudaLaunchAttributeClusterDimension; at[0].val.clusterDim.x = 2; at[0].val.clusterDim.y = 1; at[0].val.clusterDim.z = 1;
    c.attrs = at; c.numAttrs = 1;
    int n = 0;
    e = cudaOccupancyMaxActiveClusters(&n, fused, &c);
    if (e) return (int)e;
    if (n < 1) return 9002;
    nclusters[dev] = n;
  }
  const int ncl = nclusters[dev];
  CUtensorMap mA, mW, mO;
  if (enc(f, &mA, dh, K, M, 64, 128) || enc(f, &mW, w, N, K, 64, 64) || enc(f, &mO, out, N, M, 64, 64)) return 9003;
  cudaError_t e = cudaMemsetAsync(ws, 0, ws_bytes, st);
  if (e) return (int)e;
  fused<<<2 * ncl, 384, SMEM, st>>>(mA, mW, mO, (const __nv_bfloat16*)dy, (const __nv_bfloat16*)h, (__nv_bfloat16*)dh, (float*)ws,
                                   (int*)ws + K, M, K, N);
  return (int)cudaGetLastError();
}
"""
_regs = ["%%%d" % i for i in range(128)]
CUDA_SRC = CUDA_SRC.replace("@LIST@", '"' + ", ".join(_regs) + '"').replace(
    "@OUTS@", ", ".join('"+f"(d[%d])' % i for i in range(128))
)

_lib = None


def _load():
    global _lib
    if _lib is None:
        import hashlib

        name = "dgelu_linear_" + hashlib.sha256(CUDA_SRC.encode()).hexdigest()[:12]
        build = cpp_extension._get_build_directory(name, False)
        cpp_extension.load_inline(
            name, cpp_sources="", cuda_sources=CUDA_SRC, build_directory=build, is_python_module=False,
            no_implicit_headers=True,
            extra_cuda_cflags=["-O3", "-gencode=arch=compute_90a,code=sm_90a"],
        )
        lib = ctypes.CDLL(os.path.join(build, name + ".so"))
        lib.launch.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_longlong] + [ctypes.c_int] * 3 + [ctypes.c_void_p]
        lib.launch.restype = ctypes.c_int
        _lib = lib
    return _lib


class ModelNew(nn.Module):
    def __init__(self, inputs: int, hidden: int):
        super().__init__()
        self.weight = nn.Parameter((torch.randn(hidden, inputs) / inputs**0.5).bfloat16())

    @torch.no_grad()
    def forward(self, dy: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        w = self.weight
        K, N = w.shape
        if not (dy.is_cuda and h.is_cuda and w.is_cuda and dy.device == h.device == w.device):
            raise ValueError("CUDA tensors on one device only")
        if not (dy.dtype == h.dtype == w.dtype == torch.bfloat16):
            raise ValueError("bfloat16 only")
        if dy.dim() != 2 or dy.shape != h.shape or dy.shape[1] != K or dy.shape[0] < 1:
            raise ValueError("shapes do not fit")
        if K % 8 or N % 8:
            raise ValueError("hidden and inputs must be multiples of 8")
        dy, h, w = dy.contiguous(), h.contiguous(), w.contiguous()
        if (dy.data_ptr() | h.data_ptr() | w.data_ptr()) % 16:
            raise ValueError("pointers must be aligned to 16 bytes")
        M = dy.shape[0]
        if M * K >= 2**40:
            raise ValueError("too large")
        lib = _lib or _load()
        with torch.cuda.device(dy.device):
            dh = torch.empty_like(dy)
            out = torch.empty(M, N, dtype=dy.dtype, device=dy.device)
            nws = K + (M + 1023) // 1024 * 8 * ((K + 127) // 128)
            ws = torch.empty(nws, dtype=torch.float32, device=dy.device)
            rc = lib.launch(dy.data_ptr(), h.data_ptr(), w.data_ptr(), dh.data_ptr(), out.data_ptr(), ws.data_ptr(), nws * 4,
                            M, K, N, torch.cuda.current_stream().cuda_stream)
        if rc:
            raise RuntimeError(f"launch failed: {rc}")
        return out, ws[:K]
