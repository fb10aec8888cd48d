"""Fused  stream = residual + hidden @ weight.T ;  norm = RMSNorm(stream) * gain   for Hopper (sm_90a).

One persistent warp-specialised kernel: TMA (weight tile multicast in a cluster) -> 4-stage smem ring -> WGMMA
m64n256k16 (two consumer warpgroups, 128x256 a CTA). The row sums of squares are exchanged between the CTAs of a row
block through global memory (value and epoch tag in one 8-byte word), while the fp32 stream stays in registers.
The rows of the weight tile are permuted by a 5-D tensor map so that each thread's accumulators are 8 adjacent columns:
the epilogue reads and writes 16 bytes a thread directly, without staging in shared memory.
"""

import os

import torch
from torch import nn

_CUDA = r"""
#include <cuda_runtime.h>
#include <cuda.h>
#include <cuda_bf16.h>
#include <stdint.h>
#include <stdexcept>
#include <string>

namespace {
constexpr int BM = 128, BN = 256, BK = 64, STAGES = 4;
constexpr int A_BYTES = BM * BK * 2, B_BYTES = BN * BK * 2, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int SMEM = STAGES * STAGE_BYTES + 1024 + 1024;
constexpr uint64_t EVICT_FIRST = 0x12F0000000000000ull, EVICT_NORMAL = 0x1000000000000000ull,
                   EVICT_LAST = 0x14F0000000000000ull;

__device__ __forceinline__ uint32_t s2u(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void mbar_init(uint32_t b, int n) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(n) : "memory");
}
__device__ __forceinline__ void mbar_wait(uint32_t b, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred P;\nL:\nmbarrier.try_wait.parity.shared::cta.b64 P, [%0], %1;\n@P bra D;\nbra L;\nD:\n}\n" ::"r"(b),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void mbar_expect(uint32_t b, uint32_t n) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(n) : "memory");
}
__device__ __forceinline__ void mbar_arrive_remote(uint32_t b, uint32_t cta) {
  asm volatile(
      "{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [r];\n}\n" ::"r"(b),
      "r"(cta)
      : "memory");
}
__device__ __forceinline__ void tma_a(uint32_t dst, const CUtensorMap* m, uint32_t bar, int c0, int c1, uint64_t pol) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], "
      "[%2], %5;" ::"r"(dst),
      "l"(m), "r"(bar), "r"(c0), "r"(c1), "l"(pol)
      : "memory");
}
template <int CL>
__device__ __forceinline__ void tma_b(uint32_t dst, const CUtensorMap* m, uint32_t bar, int c0, int c4, uint64_t pol) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1, {%3, %4, %4, %4, %5}], [%2], %6, %7;" ::"r"(dst),
      "l"(m), "r"(bar), "r"(c0), "r"(0), "r"(c4), "h"((uint16_t)((1 << CL) - 1)), "l"(pol)
      : "memory");
}
__device__ __forceinline__ uint64_t desc(uint32_t a) {
  return (uint64_t)((a & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}
__device__ __forceinline__ void wgmma(float (&d)[128], uint64_t a, uint64_t b, int scale_d) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {@REGS@}, %128, %129, p, 1, 1, 0, 0;\n}\n"
      : @OPS@
      : "l"(a), "l"(b), "r"(scale_d));
}
__device__ __forceinline__ void wg_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wg_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wg_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ uint4 ldg16(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
__device__ __forceinline__ void stg16(void* p, uint4 v) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ void st_word(uint64_t* p, uint64_t v) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ uint64_t ld_word(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ float lo(uint32_t v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float hi(uint32_t v) { return __uint_as_float(v & 0xFFFF0000u); }
__device__ __forceinline__ uint32_t pack(float a, float b) {
  __nv_bfloat162 t = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<uint32_t*>(&t);
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

struct Args {
  const __nv_bfloat16 *gain, *res;
  __nv_bfloat16 *norm, *stream;
  uint64_t* part;
  unsigned* ctrl;
  int M, K, N, NB, G, SR, hints;
};

template <int CL, bool FULL>  // FULL: no ragged edge, and N / 256 == 8
__global__ void __launch_bounds__(384, 1)
    ffn_norm(const __grid_constant__ CUtensorMap mapA, const __grid_constant__ CUtensorMap mapB, const Args p) {
  extern __shared__ uint8_t raw[];
  const uint32_t base = (s2u(raw) + 1023) & ~1023u;
  __shared__ uint64_t bars[2 * STAGES];
  __shared__ __align__(16) __nv_bfloat16 sgain[BN];
  const uint32_t full = s2u(bars), empty = full + 8 * STAGES;
  const int rank = blockIdx.x % CL, cid = blockIdx.x / CL;
  const int NB = FULL ? 8 : p.NB;
  const int nb = OPT_MAJ ? cid / p.G : cid % NB, grp = OPT_MAJ ? cid % p.G : cid / NB;
  const int n0 = nb * BN;
  const int KT = (p.K + BK - 1) / BK;
  const int wg = threadIdx.x / 128, lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;

  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      mbar_init(full + 8 * s, 1);
      mbar_init(empty + 8 * s, (OPT_W1 ? 2 : 8) * CL);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&mapA) : "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&mapB) : "memory");
  }
  if (threadIdx.x >= 128) {
    int c = threadIdx.x - 128;
    sgain[c] = (n0 + c < p.N) ? p.gain[n0 + c] : __float2bfloat16(0.f);
  }
  const unsigned epoch = *(volatile unsigned*)p.ctrl + 1;
  __syncthreads();
  cluster_sync();

  if (wg == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 0) {
      const uint64_t polA = (p.hints & 1) ? EVICT_FIRST : EVICT_NORMAL, polB = (p.hints & 2) ? EVICT_LAST : EVICT_NORMAL;
      int s = 0;
      uint32_t ph = 1, odd = 0;
      for (int sr = grp; sr < p.SR; sr += p.G, odd ^= 1) {
        const int row0 = (sr * CL + rank) * BM;
#pragma unroll 1
        for (int kt = 0; kt < KT; kt++) {
          const uint32_t a = base + s * STAGE_BYTES, b = a + A_BYTES + rank * (B_BYTES / CL);
          mbar_wait(empty + 8 * s, ph);
          mbar_expect(full + 8 * s, STAGE_BYTES);
          const int k = (OPT_SERP && odd ? KT - 1 - kt : kt) * BK;  // there and back: the weight's end is still in L2
          if (!OPT_ORDER) tma_a(a, &mapA, full + 8 * s, k, row0, polA);
          tma_b<CL>(b, &mapB, full + 8 * s, k, nb * 8 + rank * (8 / CL), polB);
          if (OPT_ORDER) tma_a(a, &mapA, full + 8 * s, k, row0, polA);
          const int pf = kt - (KT - 24);  // the residual tile into L2, 8 rows a step
          if (FULL && pf >= 0 && pf < 16) {
            const __nv_bfloat16* r = p.res + (size_t)(row0 + pf * 8) * p.N + n0;
#pragma unroll 1
            for (int i = 0; i < 8; i++, r += p.N)
              asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(r), "r"(BN * 2) : "memory");
          }
          if (++s == STAGES) s = 0, ph ^= 1;
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    float d[128];
    int s = 0, prev = -1;
    uint32_t ph = 0;
    const int t = lane & 3;
    const int al = OPT_W1 ? threadIdx.x % 128 : lane;  // who releases a stage
    const int rl = (warp - 4) * 16 + (lane >> 2);
    const uint32_t aoff = (wg - 1) * 64 * 128;

    for (int sr = grp; sr < p.SR; sr += p.G) {
      const int r0 = (sr * CL + rank) * BM + rl;
      int on = 0;
      auto step = [&]() {
        const uint32_t st = base + s * STAGE_BYTES;
        const uint64_t da = desc(st + aoff), db = desc(st + A_BYTES);
        mbar_wait(full + 8 * s, ph);
        wg_fence();
        wgmma(d, da, db, on);
        wgmma(d, da + 2, db + 2, 1);
        wgmma(d, da + 4, db + 4, 1);
        wgmma(d, da + 6, db + 6, 1);
        wg_commit();
        on = 1;
        wg_wait<1>();
        if (prev >= 0 && al < CL) mbar_arrive_remote(empty + 8 * prev, lane);
        prev = s;
        if (++s == STAGES) s = 0, ph ^= 1;
      };
      int kt = 0;
#pragma unroll 1
      for (; kt < KT - 2; kt++) step();
      uint4 rs[2][8];
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int J = 0; J < 8; J++) {
          const int row = r0 + 8 * h, col = n0 + 32 * J;
          rs[h][J] = make_uint4(0, 0, 0, 0);
          if (FULL || (row < p.M && col < p.N)) rs[h][J] = ldg16(p.res + (size_t)row * p.N + col + 8 * t);
        }
#pragma unroll 1
      for (; kt < KT; kt++) step();
      wg_wait<0>();
      if (al < CL) mbar_arrive_remote(empty + 8 * prev, lane);
      prev = -1;
#pragma unroll
      for (int i = 0; i < 128; i++) asm volatile("" : "+f"(d[i])::"memory");

      float ss[2] = {0.f, 0.f};
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float q0 = 0.f, q1 = 0.f;
#pragma unroll
        for (int J = 0; J < 8; J++) {
          const uint32_t v[4] = {rs[h][J].x, rs[h][J].y, rs[h][J].z, rs[h][J].w};
#pragma unroll
          for (int i = 0; i < 4; i++) {
            float &x = d[(4 * J + i) * 4 + 2 * h], &y = d[(4 * J + i) * 4 + 2 * h + 1];
            x += lo(v[i]);
            y += hi(v[i]);
            q0 = fmaf(x, x, q0);
            q1 = fmaf(y, y, q1);
          }
        }
        float q = q0 + q1;
        q += __shfl_xor_sync(~0u, q, 1);
        q += __shfl_xor_sync(~0u, q, 2);
        ss[h] = q;
      }
      if (t < 2) {
        const float q = t ? ss[1] : ss[0];
        const int row = r0 + 8 * t;
        if (FULL || row < p.M) st_word(p.part + (size_t)row * NB + nb, ((uint64_t)epoch << 32) | __float_as_uint(q));
      }
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int J = 0; J < 8; J++) {
          const int row = r0 + 8 * h, col = n0 + 32 * J;
          float* x = d + 16 * J + 2 * h;
          if (FULL || (row < p.M && col < p.N))
            stg16(p.stream + (size_t)row * p.N + col + 8 * t,
                  make_uint4(pack(x[0], x[1]), pack(x[4], x[5]), pack(x[8], x[9]), pack(x[12], x[13])));
        }
      // the row sums of the other CTAs
      float tot[2] = {0.f, 0.f};
      if (FULL) {
        const uint64_t* w = p.part + (size_t)r0 * 8 + t;
        uint64_t v0, v1, v2, v3;
        do {
          v0 = ld_word(w);
          v1 = ld_word(w + 4);
          v2 = ld_word(w + 64);
          v3 = ld_word(w + 68);
        } while ((unsigned)(v0 >> 32) != epoch || (unsigned)(v1 >> 32) != epoch || (unsigned)(v2 >> 32) != epoch ||
                 (unsigned)(v3 >> 32) != epoch);
        tot[0] = __uint_as_float((unsigned)v0) + __uint_as_float((unsigned)v1);
        tot[1] = __uint_as_float((unsigned)v2) + __uint_as_float((unsigned)v3);
      } else {
#pragma unroll
        for (int h = 0; h < 2; h++)
          if (r0 + 8 * h < p.M)
            for (int j = t; j < NB; j += 4) {
              uint64_t v;
              do v = ld_word(p.part + (size_t)(r0 + 8 * h) * NB + j);
              while ((unsigned)(v >> 32) != epoch);
              tot[h] += __uint_as_float((unsigned)v);
            }
      }
      __syncwarp();
      const float invn = 1.f / (float)p.N;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        tot[h] += __shfl_xor_sync(~0u, tot[h], 1);
        tot[h] += __shfl_xor_sync(~0u, tot[h], 2);
        tot[h] = rsqrtf(tot[h] * invn + 1e-6f);
      }
#pragma unroll
      for (int J = 0; J < 8; J++) {
        const uint4 gv = *reinterpret_cast<const uint4*>(sgain + 32 * J + 8 * t);
        const uint32_t g[4] = {gv.x, gv.y, gv.z, gv.w};
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int row = r0 + 8 * h, col = n0 + 32 * J;
          uint32_t o[4];
#pragma unroll
          for (int i = 0; i < 4; i++)
            o[i] = pack(d[(4 * J + i) * 4 + 2 * h] * tot[h] * lo(g[i]), d[(4 * J + i) * 4 + 2 * h + 1] * tot[h] * hi(g[i]));
          if (FULL || (row < p.M && col < p.N))
            stg16(p.norm + (size_t)row * p.N + col + 8 * t, make_uint4(o[0], o[1], o[2], o[3]));
        }
      }
    }
  }
  __syncthreads();
  cluster_sync();
  if (threadIdx.x == 0) {  // the last CTA opens the next epoch
    __threadfence();
    if (atomicAdd(p.ctrl + 1, 1u) == gridDim.x - 1) {
      p.ctrl[1] = 0;
      __threadfence();
      *(volatile unsigned*)p.ctrl = epoch;
    }
  }
}

void check(cudaError_t e, const char* what) {
  if (e != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(e));
}
typedef CUresult (*Encode)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                           const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                           CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
Encode encoder() {
  static Encode f = nullptr;
  if (!f) {
    void* q = nullptr;
    cudaDriverEntryPointQueryResult r;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &q, 12000, cudaEnableDefault, &r), "entry point");
    f = (Encode)q;
  }
  return f;
}

template <int CL, bool FULL>
void launch(const CUtensorMap& a, const CUtensorMap& b, Args p, cudaStream_t st) {
  static int maxcl = -1;
  auto k = ffn_norm<CL, FULL>;
  cudaLaunchConfig_t c = {};
  cudaLaunchAttribute at[1];
  at[0].id = cudaLaunchAttributeClusterDimension;
  at[0].val.clusterDim.x = CL;
  at[0].val.clusterDim.y = at[0].val.clusterDim.z = 1;
  c.blockDim = dim3(384);
  c.dynamicSmemBytes = SMEM;
  c.stream = st;
  c.attrs = at;
  c.numAttrs = 1;
  if (maxcl < 0) {
    check(cudaFuncSetAttribute(k, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM), "smem");
    c.gridDim = dim3(CL);
    check(cudaOccupancyMaxActiveClusters(&maxcl, k, &c), "occupancy");
  }
  p.SR = (p.M + BM * CL - 1) / (BM * CL);
  p.G = maxcl / p.NB;
  if (p.G < 1) throw std::runtime_error("width too large for one wave of CTAs");
  if (p.G > p.SR) p.G = p.SR;
  c.gridDim = dim3(CL * p.NB * p.G);
  check(cudaLaunchKernelEx(&c, k, a, b, p), "launch");
}
}  // namespace

void ffn_run(long long hidden, long long res, long long weight, long long gain, long long norm, long long stream,
             long long part, long long ctrl, int M, int K, int N, int hints, long long st) {
  constexpr int cl = 2;
  CUtensorMap ma, mb;
  const cuuint64_t row = (cuuint64_t)K * 2;
  const cuuint32_t one[5] = {1, 1, 1, 1, 1};
  {
    const cuuint64_t dims[2] = {(cuuint64_t)K, (cuuint64_t)M}, str[1] = {row};
    const cuuint32_t box[2] = {BK, BM};
    CUresult r = encoder()(&ma, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void*)hidden, dims, str, box, one,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, OPT_PROMO ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                           CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (r) throw std::runtime_error("tensor map of hidden: " + std::to_string((int)r));
  }
  {
    const cuuint64_t dims[5] = {(cuuint64_t)K, 2, 4, 4, (cuuint64_t)(N / 32)};
    const cuuint64_t str[4] = {row, 8 * row, 2 * row, 32 * row};
    const cuuint32_t box[5] = {BK, 2, 4, 4, (cuuint32_t)(8 / cl)};
    CUresult r = encoder()(&mb, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5, (void*)weight, dims, str, box, one,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, OPT_PROMO ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                           CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (r) throw std::runtime_error("tensor map of weight: " + std::to_string((int)r));
  }
  Args p;
  p.gain = (const __nv_bfloat16*)gain;
  p.res = (const __nv_bfloat16*)res;
  p.norm = (__nv_bfloat16*)norm;
  p.stream = (__nv_bfloat16*)stream;
  p.part = (uint64_t*)part;
  p.ctrl = (unsigned*)ctrl;
  p.M = M, p.K = K, p.N = N, p.NB = (N + BN - 1) / BN, p.hints = hints;
  const bool fullsize = N == 8 * BN && M % (BM * cl) == 0 && K >= 32 * BK;
  cudaStream_t s = (cudaStream_t)st;
  fullsize ? launch<2, true>(ma, mb, p, s) : launch<2, false>(ma, mb, p, s);
}
"""
_CUDA = _CUDA.replace("@REGS@", ", ".join(f"%{i}" for i in range(128)))
_CUDA = _CUDA.replace("@OPS@", ", ".join(f'"+f"(d[{i}])' for i in range(128)))

_CPP = r"""
#include <pybind11/pybind11.h>
void ffn_run(long long, long long, long long, long long, long long, long long, long long, long long, int, int, int, int,
             long long);
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("run", &ffn_run); }
"""

# B before A; neighbours share columns; one release a warpgroup; K there and back; 256 B L2 promotion: all within noise
_OPTIONS = {"ORDER": 0, "MAJ": 0, "W1": 0, "SERP": 0, "PROMO": 1}
_module = None


def _build(options):
    from torch.utils.cpp_extension import load_inline

    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0a")
    return load_inline(
        name="ffn_rmsnorm_sm90_" + "".join(str(v) for v in options.values()),
        cpp_sources=_CPP,
        cuda_sources="".join(f"#define OPT_{k} {v}\n" for k, v in options.items()) + _CUDA,
        no_implicit_headers=True,
        extra_cuda_cflags=["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a"],
        extra_cflags=["-O2"],
    )


def _load():
    global _module
    if _module is None:
        _module = _build(_OPTIONS)
    return _module


class ModelNew(nn.Module):
    HINTS = 0  # L2 hints (1: hidden evict-first, 2: weight evict-last)

    def __init__(self, inner: int, width: int):
        super().__init__()
        self.weight = nn.Parameter((torch.randn(width, inner) / inner**0.5).bfloat16())
        self.gain = nn.Parameter((1 + 0.1 * torch.randn(width)).bfloat16())
        self._scratch = {}

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight, gain = self.weight, self.gain
        tokens, inner = hidden.shape
        width = weight.shape[0]
        if not (hidden.dtype == residual.dtype == weight.dtype == gain.dtype == torch.bfloat16):
            raise ValueError("bf16 only")
        if inner != weight.shape[1] or residual.shape != (tokens, width) or gain.shape != (width,):
            raise ValueError("shapes do not fit")
        if inner % 8 or inner < 8 or width % 32 or width < 32 or tokens < 1:
            raise ValueError("inner must be a multiple of 8, width of 32")
        if not (hidden.is_cuda and residual.device == weight.device == gain.device == hidden.device):
            raise ValueError("all on one CUDA device")
        hidden, residual, weight, gain = hidden.contiguous(), residual.contiguous(), weight.contiguous(), gain.contiguous()
        if (hidden.data_ptr() | residual.data_ptr() | weight.data_ptr()) % 16:
            raise ValueError("pointers must be 16-byte aligned")
        stream = torch.cuda.current_stream(hidden.device).cuda_stream
        key = (tokens, hidden.device, stream)
        scratch = self._scratch.get(key)
        if scratch is None:  # row sums of each column block, with the epoch; before them: epoch, CTAs done
            scratch = torch.zeros(16 + tokens * ((width + 255) // 256), dtype=torch.int64, device=hidden.device)
            self._scratch[key] = scratch
        norm, out = torch.empty_like(residual), torch.empty_like(residual)
        p = scratch.data_ptr()
        _load().run(
            hidden.data_ptr(), residual.data_ptr(), weight.data_ptr(), gain.data_ptr(), norm.data_ptr(), out.data_ptr(),
            p + 128, p, tokens, inner, width, self.HINTS, stream,
        )
        return norm, out
