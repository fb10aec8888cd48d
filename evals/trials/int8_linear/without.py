"""W8A8 linear on H100: persistent warp-specialised wgmma (s8) kernel, TMA multicast over a cluster of 2, fused epilogue."""

import os

import torch
import torch.nn as nn


def _wgmma(n):
    r = n // 2
    regs = ", ".join(f"%{i}" for i in range(r))
    outs = ", ".join(f'"+r"(d[{i}])' for i in range(r))
    return f"""
__device__ __forceinline__ void wgmma{n}(int (&d)[{r}], uint64_t a, uint64_t b, int sd) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{r + 2}, 0;\\n"
    "wgmma.mma_async.sync.aligned.m64n{n}k32.s32.s8.s8 {{{regs}}}, %{r}, %{r + 1}, p;\\n}}\\n"
    : {outs} : "l"(a), "l"(b), "r"(sd));
}}
"""


CUDA = r"""
#include <cuda.h>
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

constexpr int STAGES = 4, BM = 128, BN = 256, BK = 128;
constexpr int A_BYTES = BM * BK, B_BYTES = BN * BK, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int EPI_BYTES = 2 * 2 * BN * 8;  // [warpgroup][parity][column] {scale, bias}
constexpr int SMEM_BYTES = 1024 + STAGES * STAGE_BYTES + EPI_BYTES + 256;

__device__ __forceinline__ uint32_t smem_u32(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void mbar_init(uint32_t b, int n) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(n) : "memory");
}
__device__ __forceinline__ void mbar_expect(uint32_t b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbar_wait(uint32_t b, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nW_%=:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra D_%=;\nbra W_%=;\nD_%=:\n}\n" ::"r"(b),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void mbar_arrive_cluster(uint32_t b, uint32_t cta) {
  asm volatile(
      "{\n.reg .b32 ra;\nmapa.shared::cluster.u32 ra, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [ra];\n}\n" ::"r"(b),
      "r"(cta)
      : "memory");
}
__device__ __forceinline__ void tma_load(uint32_t dst, const CUtensorMap* m, uint32_t bar, int c0, int c1, uint64_t hint) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(dst),
      "l"(m), "r"(bar), "r"(c0), "r"(c1), "l"(hint)
      : "memory");
}
__device__ __forceinline__ void tma_load_mc(uint32_t dst, const CUtensorMap* m, uint32_t bar, int c0, int c1, uint64_t hint) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4}], "
      "[%2], %5, %6;" ::"r"(dst),
      "l"(m), "r"(bar), "r"(c0), "r"(c1), "h"((uint16_t)3), "l"(hint)
      : "memory");
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}
__device__ __forceinline__ uint64_t make_desc(uint32_t addr) {  // K-major, 128-byte swizzle
  return (uint64_t)((addr & 0x3FFFF) >> 4) | ((uint64_t)1 << 16) | ((uint64_t)64 << 32) | ((uint64_t)1 << 62);
}

@WGMMA@

template <int N> struct MMA;
template <> struct MMA<256> { static __device__ __forceinline__ void go(int (&d)[128], uint64_t a, uint64_t b, int s) { wgmma256(d, a, b, s); } };
template <> struct MMA<128> { static __device__ __forceinline__ void go(int (&d)[64], uint64_t a, uint64_t b, int s) { wgmma128(d, a, b, s); } };

struct Args {
  const float *sx, *sw;
  const __nv_bfloat16* bias;
  __nv_bfloat16* out;
  int M, N, KB;
  int mt, nt, gm;       // cluster tiles along M (256) and N (256); raster group
  int full, rem, items; // whole tiles, tiles cut in halves, all work items
  int lead;             // how many k-blocks warpgroup 0 leads
  int cs;
  uint64_t hx, hw;
};

__device__ __forceinline__ bool locate(const Args& p, int w, int& m0, int& n0) {
  bool half = w >= p.full;
  int t = w, h = 0;
  if (half) { int r = w - p.full; h = r / p.rem; t = p.full + r % p.rem; }
  int per = p.gm * p.nt, g = t / per, r = t % per;
  int gsz = min(p.gm, p.mt - g * p.gm);
  m0 = (g * p.gm + r % gsz) * (2 * BM);
  n0 = (r / gsz) * BN + h * (BN / 2);
  return half;
}

struct Pipe { uint32_t full0, empty0, base; int s; uint32_t ph; };

template <int N>
__device__ __forceinline__ void consume(const Args& p, Pipe& q, int m0, int n0, int wg, int tid, float2* epi) {
  const int lane = tid & 31, warp = tid >> 5;
  int d[N / 2];
  // what the epilogue will need
  float swv[N / 128], bv[N / 128];
#pragma unroll
  for (int i = 0; i < N / 128; i++) {
    int c = n0 + tid + i * 128;
    swv[i] = c < p.N ? __ldg(p.sw + c) : 0.f;
    bv[i] = c < p.N ? __bfloat162float(p.bias[c]) : 0.f;
  }
  const int row = m0 + wg * 64 + warp * 16 + (lane >> 2);
  float s0 = row < p.M ? __ldg(p.sx + row) : 0.f, s1 = row + 8 < p.M ? __ldg(p.sx + row + 8) : 0.f;

  if (p.lead && wg == 1) asm volatile("bar.sync 3, 256;" ::: "memory");
  int prev = 0;
  for (int kb = 0; kb < p.KB; kb++) {
    mbar_wait(q.full0 + q.s * 8, q.ph);
    uint32_t st = q.base + q.s * STAGE_BYTES;
    uint64_t da = make_desc(st + wg * 64 * BK), db = make_desc(st + A_BYTES);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < 4; k++) MMA<N>::go(d, da + 2 * k, db + 2 * k, (kb | k) != 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    if (wg == 0 && kb + 1 == p.lead) asm volatile("bar.arrive 3, 256;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    if (kb && lane < 2) mbar_arrive_cluster(q.empty0 + prev * 8, lane);
    prev = q.s;
    if (++q.s == STAGES) { q.s = 0; q.ph ^= 1; }
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < N / 2; i++) asm volatile("" : "+r"(d[i])::"memory");
  if (lane < 2) mbar_arrive_cluster(q.empty0 + prev * 8, lane);

#pragma unroll
  for (int i = 0; i < N / 128; i++) epi[tid + i * 128] = make_float2(swv[i], bv[i]);
  asm volatile("bar.sync %0, 128;" ::"r"(1 + wg) : "memory");
  const int t = lane & 3;
  const bool odd = t & 1, hi = t & 2;
#pragma unroll
  for (int j = 0; j < N / 8; j += 4) {
    uint32_t w0[4], w1[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float4 e = *reinterpret_cast<const float4*>(epi + (j + i) * 8 + t * 2);
      const int* a = d + (j + i) * 4;
      __nv_bfloat162 u = __floats2bfloat162_rn(fmaf((float)a[0], s0 * e.x, e.y), fmaf((float)a[1], s0 * e.z, e.w));
      __nv_bfloat162 v = __floats2bfloat162_rn(fmaf((float)a[2], s1 * e.x, e.y), fmaf((float)a[3], s1 * e.z, e.w));
      w0[i] = *reinterpret_cast<uint32_t*>(&u);
      w1[i] = *reinterpret_cast<uint32_t*>(&v);
    }
    // 4x4 transposition within each quad of lanes, so that a lane holds 8 neighbouring columns
#pragma unroll
    for (int h = 0; h < 2; h++) {
      uint32_t(&w)[4] = h ? w1 : w0;
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        uint32_t r = __shfl_xor_sync(~0u, odd ? w[i] : w[i + 1], 1);
        if (odd) w[i] = r; else w[i + 1] = r;
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        uint32_t r = __shfl_xor_sync(~0u, hi ? w[i] : w[i + 2], 2);
        if (hi) w[i] = r; else w[i + 2] = r;
      }
    }
    int c = n0 + (j + t) * 8;
    if (c < p.N) {
      uint4* o = reinterpret_cast<uint4*>(p.out + (size_t)row * p.N + c);
      if (row < p.M) { if (p.cs) __stcs(o, make_uint4(w0[0], w0[1], w0[2], w0[3])); else *o = make_uint4(w0[0], w0[1], w0[2], w0[3]); }
      o = reinterpret_cast<uint4*>(p.out + (size_t)(row + 8) * p.N + c);
      if (row + 8 < p.M) { if (p.cs) __stcs(o, make_uint4(w1[0], w1[1], w1[2], w1[3])); else *o = make_uint4(w1[0], w1[1], w1[2], w1[3]); }
    }
  }
}

__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
w8a8(const __grid_constant__ CUtensorMap mx, const __grid_constant__ CUtensorMap mw, const __grid_constant__ Args p) {
  extern __shared__ uint8_t raw[];
  const uint32_t raw_u = smem_u32(raw), base = (raw_u + 1023) & ~1023u;
  uint8_t* gbase = raw + (base - raw_u);
  float2* epi = reinterpret_cast<float2*>(gbase + STAGES * STAGE_BYTES);
  const uint32_t full0 = base + STAGES * STAGE_BYTES + EPI_BYTES, empty0 = full0 + STAGES * 8;
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) { mbar_init(full0 + i * 8, 1); mbar_init(empty0 + i * 8, 16); }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&mx) : "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&mw) : "memory");
  }
  __syncthreads();
  cluster_sync();
  const int cluster = blockIdx.x >> 1, clusters = gridDim.x >> 1;
  const int group = threadIdx.x >> 7;
  if (group == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 256) {
      int s = 0;
      uint32_t ph = 1;
      for (int w = cluster; w < p.items; w += clusters) {
        int m0, n0;
        bool half = locate(p, w, m0, n0);
        m0 += rank * BM;
        const int r0 = half ? rank * 64 : rank * 128;
        for (int kb = 0; kb < p.KB; kb++) {
          const uint32_t st = base + s * STAGE_BYTES, fb = full0 + s * 8;
          mbar_wait(empty0 + s * 8, ph);
          mbar_expect(fb, half ? A_BYTES + B_BYTES / 2 : A_BYTES + B_BYTES);
          tma_load(st, &mx, fb, kb * BK, m0, p.hx);
          tma_load_mc(st + A_BYTES + r0 * BK, &mw, fb, kb * BK, n0 + r0, p.hw);
          if (!half) tma_load_mc(st + A_BYTES + (r0 + 64) * BK, &mw, fb, kb * BK, n0 + r0 + 64, p.hw);
          if (++s == STAGES) { s = 0; ph ^= 1; }
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    Pipe q{full0, empty0, base, 0, 0};
    const int tid = threadIdx.x & 127;
    int par = 0;
    for (int w = cluster; w < p.items; w += clusters) {
      int m0, n0;
      bool half = locate(p, w, m0, n0);
      m0 += rank * BM;
      float2* e = epi + (group * 2 + par) * BN;
      par ^= 1;
      if (!half) consume<256>(p, q, m0, n0, group, tid, e);
      else consume<128>(p, q, m0, n0, group, tid, e);
    }
  }
  __syncthreads();
  cluster_sync();
}

typedef CUresult (*encode_t)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                             const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static int encode(CUtensorMap* m, const void* ptr, int rows, int k, int box) {
  static encode_t f = nullptr;
  if (!f) {
    void* h = dlopen("libcuda.so.1", RTLD_NOW);
    if (!h) return 1001;
    f = (encode_t)dlsym(h, "cuTensorMapEncodeTiled");
    if (!f) return 1002;
  }
  cuuint64_t dims[2] = {(cuuint64_t)k, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)k};
  cuuint32_t b[2] = {(cuuint32_t)BK, (cuuint32_t)box}, es[2] = {1, 1};
  return (int)f(m, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, (void*)ptr, dims, strides, b, es, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

int w8a8_launch(const void* x, const void* w, const float* sx, const float* sw, const void* bias, void* out, int M, int N, int K, int sms,
                int lead, int hint, int gm, int split, int cs, void* stream) {
  static thread_local CUtensorMap mx, mw;
  static thread_local const void *cx = nullptr, *cw = nullptr;
  static thread_local int cM, cN, cK;
  int e;
  if (cx != x || cw != w || cM != M || cN != N || cK != K) {
    cx = nullptr;
    if ((e = encode(&mx, x, M, K, BM))) return e;
    if ((e = encode(&mw, w, N, K, 64))) return e;
    cx = x; cw = w; cM = M; cN = N; cK = K;
  }
  Args p;
  p.sx = sx; p.sw = sw; p.bias = (const __nv_bfloat16*)bias; p.out = (__nv_bfloat16*)out;
  p.M = M; p.N = N; p.KB = (K + BK - 1) / BK;
  p.mt = (M + 2 * BM - 1) / (2 * BM); p.nt = (N + BN - 1) / BN; p.gm = gm;
  int clusters = sms / 2, tiles = p.mt * p.nt, rem = tiles % clusters;
  if (split && rem && 2 * rem <= clusters) { p.full = tiles - rem; p.rem = rem; p.items = tiles + rem; }
  else { p.full = tiles; p.rem = 1; p.items = tiles; }
  if (clusters > p.items) clusters = p.items;
  p.lead = p.KB >= 8 ? lead : 0; p.cs = cs;
  const uint64_t NORMAL = 0x1000000000000000ull, FIRST = 0x12F0000000000000ull, LAST = 0x14F0000000000000ull;
  p.hx = hint & 1 ? LAST : NORMAL; p.hw = hint & 2 ? FIRST : NORMAL;
  static bool set = false;
  if (!set) {
    if ((e = (int)cudaFuncSetAttribute(w8a8, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM_BYTES))) return e;
    set = true;
  }
  w8a8<<<clusters * 2, 384, SMEM_BYTES, (cudaStream_t)stream>>>(mx, mw, p);
  return (int)cudaGetLastError();
}
""".replace("@WGMMA@", _wgmma(256) + _wgmma(128))

CPP = r"""
#include <torch/extension.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/cuda/CUDAGuard.h>
int w8a8_launch(const void* x, const void* w, const float* sx, const float* sw, const void* bias, void* out, int M, int N, int K, int sms,
                int lead, int hint, int gm, int split, int cs, void* stream);
torch::Tensor w8a8_run(torch::Tensor x, torch::Tensor w, torch::Tensor sx, torch::Tensor sw, torch::Tensor bias, int64_t sms, int64_t lead,
                       int64_t hint, int64_t gm, int64_t split, int64_t cs) {
  TORCH_CHECK(x.is_cuda() && w.is_cuda() && sx.is_cuda() && sw.is_cuda() && bias.is_cuda(), "CUDA tensors only");
  TORCH_CHECK(x.scalar_type() == at::kChar && w.scalar_type() == at::kChar, "int8 only");
  TORCH_CHECK(sx.scalar_type() == at::kFloat && sw.scalar_type() == at::kFloat && bias.scalar_type() == at::kBFloat16, "float32 scales, bfloat16 bias only");
  TORCH_CHECK(x.dim() == 2 && w.dim() == 2 && x.size(1) == w.size(1), "shapes of x and weight");
  const int64_t M = x.size(0), N = w.size(0), K = x.size(1);
  TORCH_CHECK(sx.dim() == 2 && sx.size(0) == M && sx.size(1) == 1 && sw.dim() == 1 && sw.size(0) == N && bias.dim() == 1 && bias.size(0) == N, "shapes of scales or bias");
  TORCH_CHECK(M > 0 && N > 0 && K > 0 && K % 16 == 0 && N % 8 == 0 && K <= 131056, "sizes that this kernel does not handle");
  TORCH_CHECK(M < (1 << 28) && N < (1 << 28) && ((M + 255) / 256) * ((N + 255) / 256) < (1ll << 29), "too large");
  const c10::cuda::CUDAGuard guard(x.device());
  x = x.contiguous(); w = w.contiguous(); sx = sx.contiguous(); sw = sw.contiguous(); bias = bias.contiguous();
  TORCH_CHECK((uintptr_t)x.data_ptr() % 16 == 0 && (uintptr_t)w.data_ptr() % 16 == 0, "16-byte alignment");
  auto out = torch::empty({M, N}, bias.options());
  int e = w8a8_launch(x.data_ptr(), w.data_ptr(), sx.data_ptr<float>(), sw.data_ptr<float>(), bias.data_ptr(), out.data_ptr(), (int)M, (int)N, (int)K,
                      (int)sms, (int)lead, (int)hint, (int)gm, (int)split, (int)cs, (void*)c10::cuda::getCurrentCUDAStream().stream());
  TORCH_CHECK(e == 0, "w8a8 launch failed: ", e);
  return out;
}
"""

_ext = None


def ext():
    global _ext
    if _ext is None:
        from torch.utils.cpp_extension import load_inline

        _ext = load_inline(
            name="w8a8_h100",
            cpp_sources=[CPP],
            cuda_sources=[CUDA],
            functions=["w8a8_run"],
            extra_cuda_cflags=["-gencode=arch=compute_90a,code=sm_90a", "-O3", "-std=c++17", *os.environ.get("W8A8_FLAGS", "").split()],
            extra_ldflags=["-ldl"],
            no_implicit_headers=True,
            verbose=bool(os.environ.get("W8A8_VERBOSE")),
        )
    return _ext


_sms = {}
OPTIONS = (0, 0, 16, 1, 0)  # lead, L2 hints, raster group, cut the last wave in halves, streaming stores


class ModelNew(nn.Module):
    def forward(self, x, weight, scale_x, scale_w, bias):
        sms = _sms.get(x.device)
        if sms is None:
            if torch.cuda.get_device_capability(x.device)[0] != 9:
                raise RuntimeError("needs sm_90")
            sms = _sms[x.device] = torch.cuda.get_device_properties(x.device).multi_processor_count
        return ext().w8a8_run(x, weight, scale_x, scale_w, bias, sms, *OPTIONS)
