"""int4 weight-only linear (prefill) for H100: one persistent fused kernel.

y^T = W x^T by wgmma: the 4-bit W is dequantised in registers (A operand, bf16, rounded as in the reference), x comes from
shared memory (B operand, TMA multicast over a cluster of two CTAs). CTA tile: 128 channels x 256 tokens, two consumer
warpgroups and one producer warp. The last partial wave is cut into strips of 40 tokens.
Zero points must be integers in -128..128 (they are 4-bit codes). Needs width % 256 == 0, channels % 256 == 0.
evals/trials/int4_prefill states it.
"""
import torch
from torch.utils.cpp_extension import load_inline

_SRC = r'''
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda.h>
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <stdint.h>

constexpr int BN = 256, TN = 40, XST = 5, WST = 4;
constexpr int XB = BN * 128, WB = 128 * 64, OB = 64 * 128;
constexpr int OFF_W = XST * XB, OFF_O = OFF_W + WST * WB, OFF_BAR = OFF_O + 4 * OB;
constexpr int SMEM = OFF_BAR + 256 + 1024;

__device__ __forceinline__ void mb_init(uint32_t b, int n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(n)); }
__device__ __forceinline__ void mb_expect(uint32_t b, int n) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(n) : "memory"); }
__device__ __forceinline__ void mb_arrive(uint32_t b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory"); }
__device__ __forceinline__ void mb_arrive_cl(uint32_t b, int cta) {
  asm volatile("{.reg .b32 r; mapa.shared::cluster.u32 r, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [r];}" ::"r"(b), "r"(cta) : "memory");
}
__device__ __forceinline__ void mb_wait(uint32_t b, int ph) {
  asm volatile("{.reg .pred p; L: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra D; bra L; D: }" ::"r"(b), "r"(ph) : "memory");
}
__device__ __forceinline__ void mb_wait_cl(uint32_t b, int ph) {
  asm volatile("{.reg .pred p; L: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra D; bra L; D: }" ::"r"(b), "r"(ph) : "memory");
}
__device__ __forceinline__ void tma_ld(uint32_t dst, const CUtensorMap* m, uint32_t bar, int c0, int c1) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(dst), "l"(m), "r"(bar), "r"(c0), "r"(c1) : "memory");
}
__device__ __forceinline__ void tma_ld_mc(uint32_t dst, const CUtensorMap* m, uint32_t bar, int c0, int c1) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(dst), "l"(m), "r"(bar), "r"(c0), "r"(c1), "h"((uint16_t)3) : "memory");
}
__device__ __forceinline__ void tma_st(const CUtensorMap* m, uint32_t src, int c0, int c1) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3}], [%1], %4;" ::"l"(m), "r"(src), "r"(c0), "r"(c1), "l"(0x12F0000000000000ull) : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ void bar_wg(int id) { asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory"); }
__device__ __forceinline__ void wg_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wg_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wg_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
//WGMMA//
__device__ __forceinline__ uint32_t pack(float a, float b) {
  __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
  return *(uint32_t*)&v;
}
// byte c of w: low nibble -> low half, high nibble -> high half; (q - z) * s in bf16
__device__ __forceinline__ uint32_t deq(uint32_t w, uint32_t sel, uint32_t z, uint32_t s) {
  uint32_t v = __byte_perm(w, w >> 4, sel), r;
  asm("lop3.b32 %0, %1, 0x000F000F, 0x43004300, 0xEA;" : "=r"(r) : "r"(v));
  asm("sub.rn.bf16x2 %0, %0, %1;" : "+r"(r) : "r"(z));
  asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(r) : "r"(s));
  return r;
}
__device__ __forceinline__ void lds4(uint32_t (&r)[4], uint32_t a) {
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a));
}

struct P {
  const uint32_t *s, *z;
  const __nv_bfloat16* bias;
  int kb, tt, cp, full, tail0, ntail, grp;
};

struct St { int xs, xp, rs, ws, wp; };

template <int N>
__device__ __forceinline__ void tile(const P& p, St& st, uint32_t sm, int ch0, int tok0, int wg, int warp, int lane, const CUtensorMap* my) {
  float acc[N / 2];
  uint32_t f[2][4][4];
#pragma unroll
  for (int i = 0; i < N / 2; i++) acc[i] = 0.f;
  const uint32_t xfull = sm + OFF_BAR, xempty = xfull + 8 * XST, wfull = xempty + 8 * XST, wempty = wfull + 8 * WST;
  const int row = wg * 64 + warp * 16 + (lane >> 2), c = lane & 3;
  const uint32_t sel = c * 0x11 + (c + 4) * 0x1100;
  const int GP = p.kb >> 2;
  const uint32_t* sp = p.s + (size_t)(ch0 + row) * GP;
  const uint32_t* zp = p.z + (size_t)(ch0 + row) * GP;
  const uint32_t wrow = sm + OFF_W + row * 64, wx = (row >> 1) & 3;
  uint32_t cur[4] = {__ldg(sp), __ldg(sp + 8 * GP), __ldg(zp), __ldg(zp + 8 * GP)};
#pragma unroll 1
  for (int gp = 0; gp < GP; gp++) {
    uint32_t nxt[4];
    int gn = gp + 1 < GP ? gp + 1 : gp;
    nxt[0] = __ldg(sp + gn); nxt[1] = __ldg(sp + 8 * GP + gn); nxt[2] = __ldg(zp + gn); nxt[3] = __ldg(zp + 8 * GP + gn);
#pragma unroll
    for (int gi = 0; gi < 2; gi++) {
      uint32_t s[4];
#pragma unroll
      for (int i = 0; i < 4; i++) s[i] = __byte_perm(cur[i], 0, gi ? 0x3232 : 0x1010);
      asm("add.rn.bf16x2 %0, %0, %1;" : "+r"(s[2]) : "r"(0x43004300u));
      asm("add.rn.bf16x2 %0, %0, %1;" : "+r"(s[3]) : "r"(0x43004300u));
#pragma unroll
      for (int h = 0; h < 2; h++) {
        wg_wait<1>();
        if (lane < 2 && (gi || gp)) mb_arrive_cl(xempty + 8 * st.rs, lane);
        if ((gi || gp) && ++st.rs == XST) st.rs = 0;
        if (h == 0) {  // waits for both halves: with a loop in each half ptxas would serialise the wgmma
          mb_wait(wfull + 8 * st.ws, st.wp);
          mb_wait(xfull + 8 * st.xs, st.xp);
          const int x2 = st.xs + 1 == XST ? 0 : st.xs + 1;
          mb_wait(xfull + 8 * x2, x2 ? st.xp : st.xp ^ 1);
        }
        uint32_t wa = wrow + st.ws * WB;
#pragma unroll
        for (int q = 0; q < 2; q++) {
          uint32_t a[4], b[4], off = ((2 * h + q) ^ wx) << 4;
          lds4(a, wa + off);
          lds4(b, wa + 512 + off);
#pragma unroll
          for (int k = 0; k < 2; k++) {
            f[h][2 * q + k][0] = deq(a[2 * k], sel, s[2], s[0]);
            f[h][2 * q + k][1] = deq(b[2 * k], sel, s[3], s[1]);
            f[h][2 * q + k][2] = deq(a[2 * k + 1], sel, s[2], s[0]);
            f[h][2 * q + k][3] = deq(b[2 * k + 1], sel, s[3], s[1]);
          }
        }
        const uint32_t read = wempty + 8 * st.ws;
        if (h == 1 && ++st.ws == WST) st.ws = 0, st.wp ^= 1;
        uint64_t d = 0x4000004000010000ull | ((sm + st.xs * XB) >> 4);
        wg_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) wgmma(acc, f[h][k], d + 2 * k, 1);
        wg_commit();
        if (h == 1) {  // behind the products: they take what was loaded
          __syncwarp();
          if (lane == 0) mb_arrive(read);
        }
        if (++st.xs == XST) st.xs = 0, st.xp ^= 1;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) cur[i] = nxt[i];
  }
  wg_wait<0>();
#pragma unroll
  for (int i = 0; i < N / 2; i++) asm volatile("" : "+f"(acc[i]));
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if (lane < 2) mb_arrive_cl(xempty + 8 * st.rs, lane);
    if (++st.rs == XST) st.rs = 0;
  }
  // epilogue: transpose by stmatrix.trans, TMA store
  const float b0 = __bfloat162float(p.bias[ch0 + row]), b1 = __bfloat162float(p.bias[ch0 + row + 8]);
  const bool lead = warp == 0 && lane == 0;
  constexpr int PN = N < 64 ? N : 64;
#pragma unroll
  for (int q = 0; q < N / PN; q++) {
    const uint32_t ob = sm + OFF_O + (wg * 2 + (q & 1)) * OB;
    if (lead) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
    bar_wg(1 + wg);
    const int t = lane & 7, ck = warp * 2 + ((lane >> 3) & 1);
    const uint32_t ad = ob + (t + (lane >> 4) * 8) * 128 + ((ck ^ t) << 4);
#pragma unroll
    for (int j = 0; j < PN / 8; j += 2) {
      float* a = acc + (q * 8 + j) * 4;
      uint32_t r0 = pack(a[0] + b0, a[1] + b0), r1 = pack(a[2] + b1, a[3] + b1);
      if (j + 1 < PN / 8) {
        uint32_t r2 = pack(a[4] + b0, a[5] + b0), r3 = pack(a[6] + b1, a[7] + b1);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(ad + j * 1024), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
      } else {
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(ad + j * 1024), "r"(r0), "r"(r1) : "memory");
      }
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    bar_wg(1 + wg);
    if (lead) tma_st(my, ob, ch0 + wg * 64, tok0 + q * PN);
  }
}

__device__ __forceinline__ void coords(const P& p, int t, int& cp, int& tt) {
  int body = (p.cp - 1) * p.tt;
  if (t >= body) { cp = p.cp - 1; tt = t - body; return; }
  int pg = p.grp * (p.cp - 1), g = t / pg, r = t - g * pg, gs = min(p.grp, p.tt - g * p.grp);
  cp = r / gs;
  tt = g * p.grp + r - cp * gs;
}

__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
kern(const __grid_constant__ CUtensorMap mx, const __grid_constant__ CUtensorMap mxt, const __grid_constant__ CUtensorMap mw,
     const __grid_constant__ CUtensorMap my, const __grid_constant__ CUtensorMap myt, const P p) {
  extern __shared__ uint8_t smraw[];
  const uint32_t sm = ((uint32_t)__cvta_generic_to_shared(smraw) + 1023) & ~1023u;
  const int wgi = __shfl_sync(~0u, threadIdx.x >> 7, 0), warp = __shfl_sync(~0u, (threadIdx.x >> 5) & 3, 0), lane = threadIdx.x & 31;
  const int rank = blockIdx.x & 1, cl = blockIdx.x >> 1, ncl = gridDim.x >> 1;
  const uint32_t xfull = sm + OFF_BAR, xempty = xfull + 8 * XST, wfull = xempty + 8 * XST, wempty = wfull + 8 * WST;
  if (threadIdx.x == 0) {
    for (int i = 0; i < XST; i++) mb_init(xfull + 8 * i, 1), mb_init(xempty + 8 * i, 16);
    for (int i = 0; i < WST; i++) mb_init(wfull + 8 * i, 1), mb_init(wempty + 8 * i, 8);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  if (wgi == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == 0 && lane == 0) {
      int xs = 0, xp = 1, ws = 0, wp = 1;
      const int ntot = p.full + p.ntail;
      // full tiles first, then at most one strip for each cluster
      for (int t = cl; t < ntot;) {
        bool tail = t >= p.full;
        int cp, tt, tok;
        if (tail) cp = p.cp - 1, tok = p.tail0 + (t - p.full) * TN;
        else { coords(p, t, cp, tt); tok = tt * BN; }
        const int ch = cp * 256 + rank * 128;
        for (int k = 0; k < p.kb; k++) {
          if (!(k & 1)) {
            mb_wait(wempty + 8 * ws, wp);
            mb_expect(wfull + 8 * ws, WB);
            tma_ld(sm + OFF_W + ws * WB, &mw, wfull + 8 * ws, k * 32, ch);
            if (++ws == WST) ws = 0, wp ^= 1;
          }
          mb_wait_cl(xempty + 8 * xs, xp);
          if (tail) {
            mb_expect(xfull + 8 * xs, TN * 128);
            tma_ld(sm + xs * XB, &mxt, xfull + 8 * xs, k * 64, tok);
          } else {
            mb_expect(xfull + 8 * xs, XB);
            tma_ld_mc(sm + xs * XB + rank * (XB / 2), &mx, xfull + 8 * xs, k * 64, tok + rank * (BN / 2));
          }
          if (++xs == XST) xs = 0, xp ^= 1;
        }
        t += ncl;
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    St st = {0, 0, 0, 0, 0};
    int t = cl;
#pragma unroll 1
    for (; t < p.full; t += ncl) {
      int cp, tt;
      coords(p, t, cp, tt);
      tile<BN>(p, st, sm, cp * 256 + rank * 128, tt * BN, wgi, warp, lane, &my);
    }
    if (t < p.full + p.ntail)
      tile<TN>(p, st, sm, (p.cp - 1) * 256 + rank * 128, p.tail0 + (t - p.full) * TN, wgi, warp, lane, &myt);
    if (warp == 0 && lane == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

typedef CUresult (*Enc)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                        CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
static Enc enc;
static int map2(CUtensorMap* m, CUtensorMapDataType dt, int es, const void* ptr, uint64_t d0, uint64_t d1, int b0, int b1, CUtensorMapSwizzle sw) {
  cuuint64_t d[2] = {d0, d1}, st[1] = {d0 * es};
  cuuint32_t b[2] = {(cuuint32_t)b0, (cuuint32_t)b1}, e[2] = {1, 1};
  return (int)enc(m, dt, 2, (void*)ptr, d, st, b, e, CU_TENSOR_MAP_INTERLEAVE_NONE, sw, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}
static int run(const void* x, const void* w, const void* s, const void* z, const void* bias, void* y, int tokens, int width, int channels, int grp, int usetail, void* stream) {
  static int sms = 0, told = -1;  // told: the device that knows how much shared memory is wanted
  int dev;
  cudaGetDevice(&dev);
  if (!enc || dev != told) {
    cudaDriverEntryPointQueryResult q;
    void* f = nullptr;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &q) != cudaSuccess || !f) return 1001;
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, dev);
    cudaError_t e = cudaFuncSetAttribute(kern, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM);
    if (e) return (int)e;
    enc = (Enc)f, told = dev;
  }
  CUtensorMap mx, mxt, mw, my, myt;
  const CUtensorMapDataType bf = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  int e = map2(&mx, bf, 2, x, width, tokens, 64, BN / 2, CU_TENSOR_MAP_SWIZZLE_128B);
  e |= map2(&mxt, bf, 2, x, width, tokens, 64, TN, CU_TENSOR_MAP_SWIZZLE_128B);
  e |= map2(&mw, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, w, width / 2, channels, 64, 128, CU_TENSOR_MAP_SWIZZLE_64B);
  e |= map2(&my, bf, 2, y, channels, tokens, 64, 64, CU_TENSOR_MAP_SWIZZLE_128B);
  e |= map2(&myt, bf, 2, y, channels, tokens, 64, TN, CU_TENSOR_MAP_SWIZZLE_128B);
  if (e) return 2000 + e;
  P p;
  p.s = (const uint32_t*)s; p.z = (const uint32_t*)z; p.bias = (const __nv_bfloat16*)bias;
  p.kb = width / 64; p.tt = (tokens + BN - 1) / BN; p.cp = channels / 256; p.grp = grp;
  int total = p.tt * p.cp, ncl = sms / 2, rem = total % ncl;
  p.full = total; p.ntail = 0; p.tail0 = 0;
  if (usetail && rem > 0 && rem <= p.tt) {
    int t0 = (p.tt - rem) * BN, n = (tokens - t0 + TN - 1) / TN;
    if (n <= ncl) p.full = total - rem, p.tail0 = t0, p.ntail = n;
  }
  kern<<<2 * ncl, 384, SMEM, (cudaStream_t)stream>>>(mx, mxt, mw, my, myt, p);
  return (int)cudaGetLastError();
}

static PyObject* py_run(PyObject*, PyObject* const* given, Py_ssize_t) {  // 6 pointers, 5 numbers, the stream
  long long a[12];
  for (int i = 0; i < 12; i++) a[i] = PyLong_AsLongLong(given[i]);
  return PyLong_FromLong(run((void*)a[0], (void*)a[1], (void*)a[2], (void*)a[3], (void*)a[4], (void*)a[5], int(a[6]), int(a[7]), int(a[8]), int(a[9]), int(a[10]), (void*)a[11]));
}
static PyMethodDef methods[] = {{"run", (PyCFunction)(void*)py_run, METH_FASTCALL, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "int4_prefill", "", -1, methods};
#define INIT(name) PyInit_##name
#define INIT_OF(name) INIT(name)
PyMODINIT_FUNC INIT_OF(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
'''


def _wgmma(n):
    r = n // 2
    d = ",".join(f"%{i}" for i in range(r))
    outs = ",".join(f'"+f"(d[{i}])' for i in range(r))
    return (f'__device__ __forceinline__ void wgmma(float (&d)[{r}], const uint32_t (&a)[4], uint64_t b, int sd) {{\n'
            f'  asm volatile("{{.reg .pred p; setp.ne.b32 p, %{r + 5}, 0; wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 '
            f'{{{d}}}, {{%{r},%{r + 1},%{r + 2},%{r + 3}}}, %{r + 4}, p, 1, 1, 0;}}"\n'
            f'  : {outs} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(sd));\n}}\n')


def source():
    return _SRC.replace("//WGMMA//", _wgmma(256) + _wgmma(40))


_run = None


def _load():
    global _run
    if _run is None:
        flags = ["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a"]
        _run = load_inline("int4_prefill", "", source(), no_implicit_headers=True, with_pytorch_error_handling=False, extra_cuda_cflags=flags).run
    return _run


class ModelNew(torch.nn.Module):
    grp, tail = 8, 1

    def forward(self, x, packed, scales, zeros, bias):
        tokens, width = x.shape
        channels = packed.shape[0]
        if (width % 256 or channels % 256 or tokens < 1 or packed.shape[1] * 2 != width or packed.dtype != torch.uint8
                or tuple(scales.shape) != (channels, width // 128) or scales.shape != zeros.shape or bias.shape != (channels,)
                or any(t.dtype != torch.bfloat16 for t in (x, scales, zeros, bias))
                or any(t.device != x.device or not t.is_cuda or t.data_ptr() % 16 for t in (x, packed, scales, zeros, bias))):
            raise ValueError("unsupported shape, dtype, device or alignment")
        x, packed, scales, zeros, bias = (t.contiguous() for t in (x, packed, scales, zeros, bias))
        y = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
        with torch.cuda.device(x.device):
            rc = _load()(x.data_ptr(), packed.data_ptr(), scales.data_ptr(), zeros.data_ptr(), bias.data_ptr(), y.data_ptr(),
                             tokens, width, channels, self.grp, self.tail, torch.cuda.current_stream().cuda_stream)
        if rc:
            raise RuntimeError(f"int4_prefill launch failed: {rc}")
        return y
