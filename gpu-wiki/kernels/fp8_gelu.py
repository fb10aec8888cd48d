"""gelu_tanh(x @ weight^T * scale_x * scale_w + bias), e4m3 -> bf16, for sm_90a.

One persistent kernel. Clusters of two CTAs (256 x 256 outputs) share the weight tile by TMA multicast. In each CTA one
producer warp and two consumer warpgroups, 64 x 256 outputs each (wgmma m64n256k32, sums in fp32 registers). At a tile's
end a consumer only scales its sums and keeps half of the arguments as f16 pairs (beyond f16's range: GELU at once from
the sums); their GELU and the stores run beside the next tile's wgmmas. What is left after the full rounds of tiles is
cut into 64 x 16 pieces, so that all SMs share it. evals/trials/fp8_gelu states it.

The host code is Python on the driver's library, so the tools compile it only where there is a GPU. Host code that compiles
anywhere: gated_output.py beside it.
"""

import ctypes
import os
import shutil
import subprocess
import tempfile

import torch

SOURCE = r"""
#include <cuda.h>
#include <cuda_bf16.h>
#include <stdint.h>


constexpr int CL = 2, ST = 4, SLOT = (128 + 256) * 128;
constexpr int STAGING = ST * SLOT, PARAMS = STAGING + 8 * 2 * 2048, BARS = PARAMS + 1536;

__device__ __forceinline__ uint32_t s32(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void bar_init(uint32_t b, int n) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(n));
}
__device__ __forceinline__ void bar_expect(uint32_t b, int n) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(n) : "memory");
}
__device__ __forceinline__ void bar_wait(uint32_t b, uint32_t ph) {
  asm volatile(
      "{\n .reg .pred p;\nW_%=:\n mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n @p bra D_%=;\n bra W_%=;\n"
      "D_%=:\n}" ::"r"(b), "r"(ph) : "memory");
}
__device__ __forceinline__ void bar_arrive_cta(uint32_t b, uint32_t cta) {
  asm volatile(
      "{\n .reg .b32 r;\n mapa.shared::cluster.u32 r, %0, %1;\n mbarrier.arrive.shared::cluster.b64 _, [r];\n}" ::"r"(b),
      "r"(cta) : "memory");
}
__device__ __forceinline__ void tma(uint32_t dst, const CUtensorMap* m, uint32_t b, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(dst),
      "l"(m), "r"(b), "r"(c0), "r"(c1) : "memory");
}
__device__ __forceinline__ void tma_both(uint32_t dst, const CUtensorMap* m, uint32_t b, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, "
      "%4}], [%2], %5;" ::"r"(dst), "l"(m), "r"(b), "r"(c0), "r"(c1), "h"((uint16_t)((1 << CL) - 1)) : "memory");
}
__device__ __forceinline__ void bulk(uint32_t dst, const void* src, int n, uint32_t b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
               "l"(src), "r"(n), "r"(b) : "memory");
}
__device__ __forceinline__ void tma_store(const CUtensorMap* m, uint32_t src, int c0, int c1, uint64_t pol) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3}], [%1], %4;" ::"l"(m),
               "r"(src), "r"(c0), "r"(c1), "l"(pol) : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ uint64_t desc(uint32_t a) {  // K-major, 128-byte swizzle
  return (uint64_t)((a & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}
__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void mma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ void mma256(float (&d)[128], uint64_t a, uint64_t b, int acc) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\nwgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 {@REGS@}, "
               "%128, %129, p, 1, 1;\n}"
               : @OUTS@
               : "l"(a), "l"(b), "r"(acc));
}
__device__ __forceinline__ void mma16(float (&d)[8], uint64_t a, uint64_t b, int acc) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\nwgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 "
               "{%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, p, 1, 1;\n}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
               : "l"(a), "l"(b), "r"(acc));
}
// h: half of the argument
__device__ __forceinline__ float gelu2(float h) {
  float q = h * h;
  float p = fmaf(q, 8.f * 0.7978845608f * 0.044715f, 2.f * 0.7978845608f), t;
  asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(h * p));
  return fmaf(h, t, h);
}
__device__ __forceinline__ uint32_t pack(float a, float b) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
  return r;
}
__device__ __forceinline__ uint32_t pack16(float a, float b) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
  return r;
}
// bf16 pair of the GELU of a pair of halves of arguments
__device__ __forceinline__ uint32_t gelu16(uint32_t h) {
  float a, b;
  asm("{\n.reg .f16 x, y;\nmov.b32 {x, y}, %2;\ncvt.f32.f16 %0, x;\ncvt.f32.f16 %1, y;\n}" : "=f"(a), "=f"(b) : "r"(h));
  return pack(gelu2(a), gelu2(b));
}
__device__ __forceinline__ float lo(uint32_t b) { return __uint_as_float(b << 16); }
__device__ __forceinline__ float hi(uint32_t b) { return __uint_as_float(b & 0xFFFF0000u); }

// Tile t of the 256 x 256 tiles: GM tiles of rows at a time, all columns.
__device__ __forceinline__ void place(int t, int Mc, int Nc, int GM, int& mc, int& nc) {
  int per = GM * Nc, g = t / per, r = t - g * per, rows = min(GM, Mc - g * GM);
  nc = r / rows;
  mc = g * GM + r - nc * rows;
}

extern "C" __global__ void __cluster_dims__(CL, 1, 1) __launch_bounds__(384, 1)
    fp8_linear_gelu(const __grid_constant__ CUtensorMap ta, const __grid_constant__ CUtensorMap tb,
                    const __grid_constant__ CUtensorMap ty, const __grid_constant__ CUtensorMap ta2,
                    const __grid_constant__ CUtensorMap tb2, const float* __restrict__ sx, const float* __restrict__ sw,
                    const __nv_bfloat16* __restrict__ bias, __nv_bfloat16* __restrict__ out, int Mc, int Nc, int KB,
                    int full_tiles, int pieces, int GM) {
  extern __shared__ __align__(1024) uint8_t smem_raw[];
  const uint32_t base = (s32(smem_raw) + 1023) & ~1023u;
  const uint32_t full = base + BARS, empty = full + 8 * ST;
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const int cid = blockIdx.x / CL, ncl = gridDim.x / CL;
  const int wg = threadIdx.x >> 7, lane = threadIdx.x & 31;
  const int wid = __shfl_sync(0xFFFFFFFFu, threadIdx.x >> 5, 0);

  if (threadIdx.x == 0) {
    for (int i = 0; i < ST; i++) bar_init(full + 8 * i, 1), bar_init(empty + 8 * i, 8 * CL);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");

  int s = 0;
  uint32_t ph = 0;
#define NEXT() if (++s == ST) s = 0, ph ^= 1

  if (wg == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (wid == 8) {
      if (lane == 0) {
        for (int t = cid; t < full_tiles; t += ncl) {
          int mc, nc;
          place(t, Mc, Nc, GM, mc, nc);
          for (int kb = 0; kb < KB; kb++) {
            const uint32_t sl = base + s * SLOT, f = full + 8 * s;
            bar_wait(empty + 8 * s, ph ^ 1);
            bar_expect(f, SLOT + (kb == KB - 1 ? 1536 : 0));
            tma_both(sl + 16384 + rank * (32768 / CL), &tb, f, kb * 128, nc * 256 + rank * (256 / CL));
            tma(sl, &ta, f, kb * 128, mc * (128 * CL) + rank * 128);
            if (kb == KB - 1) {
              bulk(base + PARAMS, sw + nc * 256, 1024, f);
              bulk(base + PARAMS + 1024, bias + nc * 256, 512, f);
            }
            NEXT();
          }
        }
        for (int u = cid; u < pieces; u += ncl) {
          int mc, nc;
          place(full_tiles + u / 32, Mc, Nc, GM, mc, nc);
          const int r0 = mc * (128 * CL) + u % (2 * CL) * 64, c0 = nc * 256 + u % 32 / (2 * CL) * (16 * CL) + rank * 16;
          for (int kb = 0; kb < KB; kb += 4) {
            const uint32_t sl = base + s * SLOT, f = full + 8 * s;
            bar_wait(empty + 8 * s, ph ^ 1);
            bar_expect(f, 4 * (8192 + 2048));
            for (int i = 0; i < 4; i++) {
              tma_both(sl + i * 8192 + rank * (8192 / CL), &ta2, f, (kb + i) * 128, r0 + rank * (64 / CL));
              tma(sl + 32768 + i * 2048, &tb2, f, (kb + i) * 128, c0);
            }
            NEXT();
          }
        }
      }
      __syncwarp();
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    uint64_t pol;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(pol));
    const uint32_t stage = base + STAGING + wid * 4096;
    const int q = wid & 3, r = lane & 15;
    float d[128];
    uint32_t pk[64];  // half of the last tile's arguments as f16 pairs: their GELU is taken beside the next tile's wgmmas
    int prow = 0, pcol = 0;
    bool store = false;
#pragma unroll
    for (int i = 0; i < 64; i++) pk[i] = 0;

    // 16 of the 256 columns
    auto piece = [&](int p) {
      const int c = p / 4, jj = p % 4;
      const uint32_t buf = stage + (c & 1) * 2048;
      if (jj == 0) {
        if (lane == 0) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
        __syncwarp();
      }
      const uint32_t at = buf + r * 128 + (((jj * 2 + (lane >> 4)) ^ (r & 7)) << 4);
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(gelu16(pk[4 * p])),
                   "r"(gelu16(pk[4 * p + 1])), "r"(gelu16(pk[4 * p + 2])), "r"(gelu16(pk[4 * p + 3])) : "memory");
      if (jj == 3) {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (store && lane == 0) tma_store(&ty, buf, pcol + c * 64, prow, pol);
      }
    };

    for (int t = cid; t < full_tiles; t += ncl) {
      int mc, nc;
      place(t, Mc, Nc, GM, mc, nc);
      const int row = mc * (128 * CL) + rank * 128 + wid * 16;
      float h0, h1;
      asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(h0) : "l"(sx + row + (lane >> 2)));
      asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(h1) : "l"(sx + row + 8 + (lane >> 2)));
      int prev = 0;
      auto step = [&](int kb) {
        bar_wait(full + 8 * s, ph);
        const uint64_t a = desc(base + s * SLOT + wg * 8192), b = desc(base + s * SLOT + 16384);
        mma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) mma256(d, a + 2 * k, b + 2 * k, kb + k);
        mma_commit();
        mma_wait<1>();
        if (kb && lane < CL) bar_arrive_cta(empty + 8 * prev, lane);
        prev = s;
        NEXT();
      };
#pragma unroll
      for (int kb = 0; kb < 8; kb++) {
        step(kb);
        if (store) {
          piece(2 * kb);
          piece(2 * kb + 1);
        }
      }
#pragma unroll 2
      for (int kb = 8; kb < KB; kb++) step(kb);
      mma_wait<0>();
      if (lane < CL) bar_arrive_cta(empty + 8 * prev, lane);

      h0 *= 0.5f, h1 *= 0.5f;
      const uint32_t par = base + PARAMS + (lane & 3) * 8, parb = base + PARAMS + 1024 + (lane & 3) * 4;
      uint32_t top = 0;
#pragma unroll
      for (int j = 0; j < 32; j++) {
        float w0, w1;
        uint32_t bb;
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(w0), "=f"(w1) : "r"(par + j * 32) : "memory");
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(bb) : "r"(parb + j * 16) : "memory");
        const float b0 = 0.5f * lo(bb), b1 = 0.5f * hi(bb);
        pk[2 * j] = pack16(fmaf(d[4 * j] * h0, w0, b0), fmaf(d[4 * j + 1] * h0, w1, b1));
        pk[2 * j + 1] = pack16(fmaf(d[4 * j + 2] * h1, w0, b0), fmaf(d[4 * j + 3] * h1, w1, b1));
#pragma unroll
        for (int i = 0; i < 2; i++)
          asm("{\n.reg .b32 a;\nabs.f16x2 a, %1;\nmax.f16x2 %0, %0, a;\n}" : "+r"(top) : "r"(pk[2 * j + i]));
      }
      prow = row, pcol = nc * 256;
      store = !__any_sync(0xFFFFFFFFu, (top & 0x7FFF) == 0x7C00 || (top >> 16) == 0x7C00);
      if (!store) {  // an argument beyond 2 * 65504: this warp's 16 rows straight from the sums
        for (int j = 0; j < 32; j++) {
          float e[4];
#pragma unroll
          for (int i = 0; i < 32; i++)
            if (i == j) e[0] = d[4 * i], e[1] = d[4 * i + 1], e[2] = d[4 * i + 2], e[3] = d[4 * i + 3];
          const int n = pcol + j * 8 + (lane & 3) * 2;
          const float w0 = __ldg(sw + n), w1 = __ldg(sw + n + 1);
          const uint32_t bb = __ldg((const uint32_t*)(bias + n));
          const float b0 = 0.5f * lo(bb), b1 = 0.5f * hi(bb);
          uint32_t* o = (uint32_t*)(out + (size_t)(row + (lane >> 2)) * (Nc * 256) + n);
          o[0] = pack(gelu2(fmaf(e[0] * h0, w0, b0)), gelu2(fmaf(e[1] * h0, w1, b1)));
          o[(size_t)4 * Nc * 256] = pack(gelu2(fmaf(e[2] * h1, w0, b0)), gelu2(fmaf(e[3] * h1, w1, b1)));
        }
      }
    }
#pragma unroll
    for (int p = 0; p < 16; p++) piece(p);

    for (int u = cid; u < pieces; u += ncl) {
      int mc, nc;
      place(full_tiles + u / 32, Mc, Nc, GM, mc, nc);
      const int row = mc * (128 * CL) + u % (2 * CL) * 64 + q * 16 + (lane >> 2);
      const int col = nc * 256 + u % 32 / (2 * CL) * (16 * CL) + rank * 16 + (lane & 3) * 2;
      float e[8];
#pragma unroll
      for (int i = 0; i < 8; i++) e[i] = 0.f;
      for (int kb = 0; kb < KB; kb += 4) {
        bar_wait(full + 8 * s, ph);
        mma_fence();
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const uint64_t a = desc(base + s * SLOT + (wg * 2 + i) * 8192);
          const uint64_t b = desc(base + s * SLOT + 32768 + (wg * 2 + i) * 2048);
#pragma unroll
          for (int k = 0; k < 4; k++) mma16(e, a + 2 * k, b + 2 * k, 1);
        }
        mma_commit();
        mma_wait<0>();
        if (lane < CL) bar_arrive_cta(empty + 8 * s, lane);
        NEXT();
      }
      if (wg == 1) {
        if (lane == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 8; i++)
          asm volatile("st.shared.f32 [%0], %1;" ::"r"(stage + i * 128 + lane * 4), "f"(e[i]) : "memory");
      }
      asm volatile("bar.sync 2, 256;" ::: "memory");
      if (wg == 0) {
        const float h0 = 0.5f * __ldg(sx + row), h1 = 0.5f * __ldg(sx + row + 8);
#pragma unroll
        for (int i = 0; i < 8; i++) {
          float o;
          asm volatile("ld.shared.f32 %0, [%1];" : "=f"(o) : "r"(stage + 16384 + i * 128 + lane * 4) : "memory");
          e[i] += o;
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const int n = col + j * 8;
          const float w0 = __ldg(sw + n), w1 = __ldg(sw + n + 1);
          const uint32_t bb = __ldg((const uint32_t*)(bias + n));
          const float b0 = 0.5f * lo(bb), b1 = 0.5f * hi(bb);
          uint32_t* o = (uint32_t*)(out + (size_t)row * (Nc * 256) + n);
          o[0] = pack(gelu2(fmaf(e[4 * j] * h0, w0, b0)), gelu2(fmaf(e[4 * j + 1] * h0, w1, b1)));
          o[(size_t)4 * Nc * 256] =
              pack(gelu2(fmaf(e[4 * j + 2] * h1, w0, b0)), gelu2(fmaf(e[4 * j + 3] * h1, w1, b1)));
        }
      }
      asm volatile("bar.sync 2, 256;" ::: "memory");
    }
    if (lane == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    __syncwarp();
  }
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
"""
SOURCE = SOURCE.replace("@REGS@", ",".join(f"%{i}" for i in range(128))).replace(
    "@OUTS@", ", ".join(f'"+f"(d[{i}])' for i in range(128)))
SMEM = 4 * 49152 + 32768 + 1536 + 64 + 1024


def build():
    """The path of the cubin, in a folder of its own."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    folder = tempfile.mkdtemp()
    with open(os.path.join(folder, "k.cu"), "w") as f:
        f.write(SOURCE)
    subprocess.run([nvcc, "-cubin", "-O3", "-std=c++17", "-arch=sm_90a", "-o", "k.cubin", "k.cu"], cwd=folder, check=True)
    return os.path.join(folder, "k.cubin")


def check(code):
    if code:
        raise RuntimeError(f"CUDA driver error {code}")


class Kernel:
    def __init__(self, group=12):
        self.cu = ctypes.CDLL("libcuda.so.1")
        torch.cuda.current_stream().synchronize()  # makes the context
        with open(build(), "rb") as f:
            image = f.read()
        module, self.fn = ctypes.c_void_p(), ctypes.c_void_p()
        self.module = module
        check(self.cu.cuModuleLoadData(ctypes.byref(module), image))
        check(self.cu.cuModuleGetFunction(ctypes.byref(self.fn), module, b"fp8_linear_gelu"))
        check(self.cu.cuFuncSetAttribute(self.fn, 8, SMEM))
        self.clusters = torch.cuda.get_device_properties().multi_processor_count // 2
        self.group, self.known = group, {}

    def plan(self, x, weight, out):
        (tokens, width), channels = x.shape, weight.shape[0]
        raw = ctypes.create_string_buffer(128 * 5 + 64)
        at = (ctypes.addressof(raw) + 63) & ~63

        def map_(i, tensor, kind, rows, cols, size, promote):
            dims = (ctypes.c_uint64 * 2)(tensor.shape[1], tensor.shape[0])
            strides = (ctypes.c_uint64 * 1)(tensor.shape[1] * size)
            box, ones = (ctypes.c_uint32 * 2)(cols, rows), (ctypes.c_uint32 * 2)(1, 1)
            check(self.cu.cuTensorMapEncodeTiled(ctypes.c_void_p(at + 128 * i), kind, 2, ctypes.c_void_p(tensor.data_ptr()),
                                                 dims, strides, box, ones, 0, 3, promote, 0))

        map_(0, x, 0, 128, 128, 1, 2)
        map_(1, weight, 0, 128, 128, 1, 2)
        map_(2, out, 9, 16, 64, 2, 0)
        map_(3, x, 0, 32, 128, 1, 2)
        map_(4, weight, 0, 16, 128, 1, 2)
        tiles = (tokens // 256) * (channels // 256)
        rest = tiles % self.clusters
        if rest * 32 > 3 * self.clusters:  # a round of pieces takes about a quarter of a tile's time
            rest = 0
        ints = [ctypes.c_int(v) for v in
                (tokens // 256, channels // 256, width // 128, tiles - rest, rest * 32, self.group)]
        return raw, at, ints

    def __call__(self, x, weight, scale_x, scale_w, bias):
        out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16, device=x.device)
        key = (x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.shape, weight.shape)
        if key not in self.known:
            if len(self.known) > 64:
                self.known.clear()
            self.known[key] = self.plan(x, weight, out)
        _, at, ints = self.known[key]
        pointers = [ctypes.c_void_p(v.data_ptr()) for v in (scale_x, scale_w, bias, out)]
        args = (ctypes.c_void_p * 15)(*[at + 128 * i for i in range(5)], *[ctypes.addressof(v) for v in pointers + ints])
        check(self.cu.cuLaunchKernel(self.fn, 2 * self.clusters, 1, 1, 384, 1, 1, SMEM,
                                     ctypes.c_void_p(torch.cuda.current_stream().cuda_stream), args, None))
        return out


class ModelNew(torch.nn.Module):
    kernels = {}

    def forward(self, x, weight, scale_x, scale_w, bias):
        (tokens, width), channels = x.shape, weight.shape[0]
        if tokens % 256 or channels % 256 or width % 512 or width < 1024 or weight.shape[1] != width:
            raise ValueError("tokens and channels must be multiples of 256, width one of 512 and at least 1024")
        if x.dtype != torch.float8_e4m3fn or weight.dtype != torch.float8_e4m3fn or bias.dtype != torch.bfloat16:
            raise ValueError("x and weight must be e4m3, bias bf16")
        if scale_x.numel() != tokens or scale_w.numel() != channels or bias.numel() != channels:
            raise ValueError("a scale for each token and each channel, a bias for each channel")
        x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
        scale_x, scale_w = scale_x.float().contiguous(), scale_w.float().contiguous()
        if any(v.data_ptr() % 16 for v in (x, weight, scale_w, bias)):
            raise ValueError("the inputs must be aligned to 16 bytes")
        with torch.cuda.device(x.device):
            if x.device not in self.kernels:
                self.kernels[x.device] = Kernel()
            return self.kernels[x.device](x, weight, scale_x, scale_w, bias)
