import hashlib
import os
import tempfile

import torch
from torch import nn
from torch.utils.cpp_extension import load

SRC = r'''

#include <Python.h>
#include <cuda_runtime.h>
#include <cuda.h>
#include <cuda_bf16.h>
#include <dlfcn.h>
#include <stdint.h>
constexpr int N = 1024, C = 128, BM = 128, BN = 256, BK = 64, ST = 4, KT = N / BK;
constexpr int ABYTES = BM * BK * 2, BBYTES = BN * BK * 2, SBYTES = ABYTES + BBYTES;
constexpr int SMEM = 1024 + ST * SBYTES + 256;

__device__ __forceinline__ uint32_t su32(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void mb_init(uint32_t b, int n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(n)); }
__device__ __forceinline__ void mb_wait(uint32_t b, uint32_t ph) {
  uint32_t ok;
  do {
    asm volatile("{\n.reg .pred P;\nmbarrier.try_wait.parity.shared::cta.b64 P, [%1], %2;\nselp.u32 %0,1,0,P;\n}" : "=r"(ok) : "r"(b), "r"(ph) : "memory");
  } while (!ok);
}
__device__ __forceinline__ void mb_arrive(uint32_t b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory"); }
__device__ __forceinline__ void tma(uint32_t dst, const CUtensorMap* m, uint32_t bar, int x, int y, uint64_t pol) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;"
    ::"r"(dst), "l"(m), "r"(bar), "r"(x), "r"(y), "l"(pol) : "memory");
}
__device__ __forceinline__ uint64_t desc(uint32_t a) {
  return (uint64_t)((a & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}
__device__ __forceinline__ void wgmma(float (&d)[128], uint64_t da, uint64_t db, int sc) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}, %128, %129, p, 1, 1, 0, 0;\n}\n"
 : "+f"(d[0]),"+f"(d[1]),"+f"(d[2]),"+f"(d[3]),"+f"(d[4]),"+f"(d[5]),"+f"(d[6]),"+f"(d[7]),"+f"(d[8]),"+f"(d[9]),"+f"(d[10]),"+f"(d[11]),"+f"(d[12]),"+f"(d[13]),"+f"(d[14]),"+f"(d[15]),"+f"(d[16]),"+f"(d[17]),"+f"(d[18]),"+f"(d[19]),"+f"(d[20]),"+f"(d[21]),"+f"(d[22]),"+f"(d[23]),"+f"(d[24]),"+f"(d[25]),"+f"(d[26]),"+f"(d[27]),"+f"(d[28]),"+f"(d[29]),"+f"(d[30]),"+f"(d[31]),"+f"(d[32]),"+f"(d[33]),"+f"(d[34]),"+f"(d[35]),"+f"(d[36]),"+f"(d[37]),"+f"(d[38]),"+f"(d[39]),"+f"(d[40]),"+f"(d[41]),"+f"(d[42]),"+f"(d[43]),"+f"(d[44]),"+f"(d[45]),"+f"(d[46]),"+f"(d[47]),"+f"(d[48]),"+f"(d[49]),"+f"(d[50]),"+f"(d[51]),"+f"(d[52]),"+f"(d[53]),"+f"(d[54]),"+f"(d[55]),"+f"(d[56]),"+f"(d[57]),"+f"(d[58]),"+f"(d[59]),"+f"(d[60]),"+f"(d[61]),"+f"(d[62]),"+f"(d[63]),"+f"(d[64]),"+f"(d[65]),"+f"(d[66]),"+f"(d[67]),"+f"(d[68]),"+f"(d[69]),"+f"(d[70]),"+f"(d[71]),"+f"(d[72]),"+f"(d[73]),"+f"(d[74]),"+f"(d[75]),"+f"(d[76]),"+f"(d[77]),"+f"(d[78]),"+f"(d[79]),"+f"(d[80]),"+f"(d[81]),"+f"(d[82]),"+f"(d[83]),"+f"(d[84]),"+f"(d[85]),"+f"(d[86]),"+f"(d[87]),"+f"(d[88]),"+f"(d[89]),"+f"(d[90]),"+f"(d[91]),"+f"(d[92]),"+f"(d[93]),"+f"(d[94]),"+f"(d[95]),"+f"(d[96]),"+f"(d[97]),"+f"(d[98]),"+f"(d[99]),"+f"(d[100]),"+f"(d[101]),"+f"(d[102]),"+f"(d[103]),"+f"(d[104]),"+f"(d[105]),"+f"(d[106]),"+f"(d[107]),"+f"(d[108]),"+f"(d[109]),"+f"(d[110]),"+f"(d[111]),"+f"(d[112]),"+f"(d[113]),"+f"(d[114]),"+f"(d[115]),"+f"(d[116]),"+f"(d[117]),"+f"(d[118]),"+f"(d[119]),"+f"(d[120]),"+f"(d[121]),"+f"(d[122]),"+f"(d[123]),"+f"(d[124]),"+f"(d[125]),"+f"(d[126]),"+f"(d[127]) : "l"(da), "l"(db), "r"(sc));
}
__device__ __forceinline__ uint32_t pk(float lo, float hi) {
  uint32_t r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r;
}
__device__ __forceinline__ float lo(uint32_t x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float hi(uint32_t x) { return __uint_as_float(x & 0xffff0000u); }

__device__ __forceinline__ void dep_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void dep_launch() { asm volatile("griddepcontrol.launch_dependents;"); }

__global__ void __launch_bounds__(384, 1) gemm(const __grid_constant__ CUtensorMap ma, const __grid_constant__ CUtensorMap mb,
    uint4* __restrict__ P, int items, uint64_t pol) {
  extern __shared__ uint8_t raw[];
  uint32_t base = (su32(raw) + 1023) & ~1023u;
  uint32_t bars = base + ST * SBYTES;
  auto FULL = [&](int s) { return bars + s * 8; };
  auto EMPTY = [&](int s) { return bars + 64 + s * 8; };
  int wg = threadIdx.x >> 7;
  if (threadIdx.x == 0) {
    for (int s = 0; s < ST; s++) { mb_init(FULL(s), 1); mb_init(EMPTY(s), 8); }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
  }
  __syncthreads();
  dep_wait();
  dep_launch();
  if (wg == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 0) {
      int s = 0; uint32_t ph = 0;
      for (int it = blockIdx.x; it < items; it += gridDim.x) {
        int row = (it >> 5) * N, ti = (it & 31) >> 2, tj = it & 3;
        for (int k = 0; k < KT; k++) {
          mb_wait(EMPTY(s), ph ^ 1);
          asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(FULL(s)), "r"(SBYTES) : "memory");
          uint32_t a = base + s * SBYTES;
          tma(a, &ma, FULL(s), k * BK, row + ti * BM, pol);
          tma(a + ABYTES, &mb, FULL(s), k * BK, row + tj * BN, pol);
          if (++s == ST) { s = 0; ph ^= 1; }
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    int W = (threadIdx.x >> 5) - 4, lane = threadIdx.x & 31;
    int s = 0, ps = 0; uint32_t ph = 0;
    for (int it = blockIdx.x; it < items; it += gridDim.x) {
      float d[128];
#pragma unroll 1
      for (int k = 0; k < KT; k++) {
        mb_wait(FULL(s), ph);
        uint32_t a = base + s * SBYTES;
        uint64_t da = desc(a + (wg - 1) * 8192), db = desc(a + ABYTES);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int kk = 0; kk < 4; kk++) wgmma(d, da + kk * 2, db + kk * 2, (k | kk) != 0);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        if (k) {
          asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
          if (lane == 0) mb_arrive(EMPTY(ps));
        }
        ps = s;
        if (++s == ST) { s = 0; ph ^= 1; }
      }
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      if (lane == 0) mb_arrive(EMPTY(ps));
#pragma unroll
      for (int i = 0; i < 128; i++) asm volatile("" : "+f"(d[i])::"memory");
      uint4* p = P + ((size_t)it * 8 + W) * 512 + lane;  // in the registers' own order
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int b = 0; b < 8; b++) {
          uint32_t v[4];
#pragma unroll
          for (int e = 0; e < 4; e++) v[e] = pk(d[(4 * b + e) * 4 + 2 * h], d[(4 * b + e) * 4 + 2 * h + 1]);
          p[(h * 8 + b) * 32] = make_uint4(v[0], v[1], v[2], v[3]);
        }
    }
  }
}

// y = sigmoid(gate) * P, P in the order that gemmp stores
template <int LO, int SV>
__global__ void __launch_bounds__(256) gating(const uint4* __restrict__ P, const uint4* __restrict__ gate, uint4* __restrict__ y) {
  int lane = threadIdx.x & 31, wp = threadIdx.x >> 5;
  int o = (lane & ((1 << LO) - 1)) + ((wp & ((16 >> LO) - 1)) << LO);
  int u = (lane >> LO) + ((wp >> (4 - LO)) << (5 - LO)) + blockIdx.x * 16;
  int t = u & 3, g = (u >> 2) & 7, b4 = (u >> 5) & 7, h = (u >> 8) & 1, W = (u >> 9) & 7, tj = (u >> 12) & 3, ti = u >> 14;
  int i = ti * 128 + W * 16 + h * 8 + g, j = tj * 256 + b4 * 32 + 2 * t;
  size_t off = ((size_t)i * N + j) * 16 + o;
  uint4 G[8];
#pragma unroll
  for (int e = 0; e < 8; e++) G[e] = __ldcs(gate + off + ((e >> 1) * 8 + (e & 1)) * 16);
  dep_wait();
  uint32_t v[8][4];
#pragma unroll
  for (int c = 0; c < 8; c++) { uint4 x = __ldcs(P + (size_t)(o * 8 + c) * 131072 + u); v[c][0] = x.x; v[c][1] = x.y; v[c][2] = x.z; v[c][3] = x.w; }
#pragma unroll
  for (int e = 0; e < 8; e++) {
    uint32_t gg[4] = {G[e].x, G[e].y, G[e].z, G[e].w}, r[4];
#pragma unroll
    for (int q = 0; q < 4; q++) {
      uint32_t u0 = v[2 * q][e >> 1], u1 = v[2 * q + 1][e >> 1];
      float p0 = (e & 1) ? hi(u0) : lo(u0), p1 = (e & 1) ? hi(u1) : lo(u1);
      r[q] = pk(p0 * __fdividef(1.f, 1.f + __expf(-lo(gg[q]))), p1 * __fdividef(1.f, 1.f + __expf(-hi(gg[q]))));
    }
    uint4 w = make_uint4(r[0], r[1], r[2], r[3]);
    if (SV) __stcs(y + off + ((e >> 1) * 8 + (e & 1)) * 16, w); else y[off + ((e >> 1) * 8 + (e & 1)) * 16] = w;
  }
}

// [rows][128] -> [nch][rows] of the channels c0 .. c0 + nch; a warp: 8 << LO channels, 8 * (32 >> LO) rows
template <int LO, int SV>
__global__ void __launch_bounds__(256) transpose(const uint4* __restrict__ a, const uint4* __restrict__ b,
    uint4* __restrict__ at, uint4* __restrict__ bt, int c0, int lnch) {
  const uint4* in = blockIdx.y ? b : a; uint4* out = blockIdx.y ? bt : at;
  int w = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31, lg = lnch - 3 - LO;
  int o = (lane & ((1 << LO) - 1)) + ((w & ((1 << lg) - 1)) << LO);
  int R8 = (lane >> LO) + ((w >> lg) << (5 - LO));
  const uint4* p = in + (size_t)R8 * 128 + c0 / 8 + o;
  uint32_t v[8][4];
#pragma unroll
  for (int i = 0; i < 8; i++) { uint4 x = __ldcs(p + i * 16); v[i][0] = x.x; v[i][1] = x.y; v[i][2] = x.z; v[i][3] = x.w; }
  dep_launch();
  uint4* q = out + (size_t)(o * 8) * (N * N / 8) + R8;
#pragma unroll
  for (int c = 0; c < 8; c++) {
    uint32_t s = (c & 1) ? 0x7632 : 0x5410;
    uint4 x = make_uint4(__byte_perm(v[0][c / 2], v[1][c / 2], s), __byte_perm(v[2][c / 2], v[3][c / 2], s),
                         __byte_perm(v[4][c / 2], v[5][c / 2], s), __byte_perm(v[6][c / 2], v[7][c / 2], s));
    if (SV) __stcs(q + (size_t)c * (N * N / 8), x); else q[(size_t)c * (N * N / 8)] = x;
  }
}

static bool mk(CUtensorMap* m, void* p, int nch, int rows) {
  typedef CUresult (*F)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
    const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static F f = (F)dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuTensorMapEncodeTiled");
  cuuint64_t dims[2] = {(cuuint64_t)N, (cuuint64_t)N * nch}, str[1] = {N * 2};
  cuuint32_t box[2] = {BK, (cuuint32_t)rows}, es[2] = {1, 1};
  return f && f(m, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, p, dims, str, box, es, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}
template <class... K, class... A>
static void go(void (*f)(K...), dim3 grid, int threads, int smem, cudaStream_t st, bool pdl, A... args) {
  cudaLaunchConfig_t cfg = {}; cfg.gridDim = grid; cfg.blockDim = dim3(threads); cfg.dynamicSmemBytes = smem; cfg.stream = st;
  cudaLaunchAttribute at[1]; at[0].id = cudaLaunchAttributeProgrammaticStreamSerialization; at[0].val.programmaticStreamSerializationAllowed = 1;
  cfg.attrs = at; cfg.numAttrs = pdl ? 1 : 0;
  cudaLaunchKernelEx(&cfg, f, K(args)...);
}
static PyObject* tri(PyObject*, PyObject* args) {
  unsigned long long a, b, gate, y, at, bt, p, stream, pol; int nch, which, tv, gv, pdl, sms;
  if (!PyArg_ParseTuple(args, "KKKKKKKKiiiiiiK", &a, &b, &gate, &y, &at, &bt, &p, &stream, &nch, &which, &tv, &gv, &pdl, &sms, &pol)) return nullptr;
  auto st = (cudaStream_t)stream;
  cudaFuncSetAttribute(gemm, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM);
  CUtensorMap ma, mb;
  if (!mk(&ma, (void*)at, nch, BM) || !mk(&mb, (void*)bt, nch, BN)) { PyErr_SetString(PyExc_RuntimeError, "tensor map"); return nullptr; }
  int lnch = nch == 128 ? 7 : nch == 64 ? 6 : 5;
  for (int c0 = 0; c0 < C; c0 += nch) {
    dim3 tg(N * N / 8 * nch / 8 / 256, 2);
#define T(X) go(X, tg, 256, 0, st, false, (const uint4*)a, (const uint4*)b, (uint4*)at, (uint4*)bt, c0, lnch)
    if (which & 1) {
      if (tv == 0) T((transpose<2, 0>));
      if (tv == 1) T((transpose<2, 1>));
      if (tv == 2) T((transpose<3, 0>));
      if (tv == 3) T((transpose<3, 1>));
      if (tv == 4) T((transpose<4, 0>));
      if (tv == 5) T((transpose<1, 0>));
    }
    if (which & 4) go(gemm, dim3(sms), 384, SMEM, st, pdl, ma, mb, (uint4*)p + (size_t)c0 * (N * N / 8), nch * 32, pol);
  }
  if (which & 8) {
    if (gv == 0) go(gating<3, 0>, dim3(8192), 256, 0, st, pdl, (const uint4*)p, (const uint4*)gate, (uint4*)y);
    if (gv == 1) go(gating<3, 1>, dim3(8192), 256, 0, st, pdl, (const uint4*)p, (const uint4*)gate, (uint4*)y);
  }
  cudaError_t e = cudaGetLastError();
  if (e != cudaSuccess) { PyErr_SetString(PyExc_RuntimeError, cudaGetErrorString(e)); return nullptr; }
  Py_RETURN_NONE;
}
static PyMethodDef methods[] = {{"tri", tri, METH_VARARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef def = {PyModuleDef_HEAD_INIT, "MODNAME", "", -1, methods};
PyMODINIT_FUNC PyInit_MODNAME() { return PyModule_Create(&def); }
'''

NODES, CHANNELS = 1024, 128
_mod = None


def _build():
    global _mod
    if _mod is None:
        name = "tri_" + hashlib.sha256(SRC.encode()).hexdigest()[:12]
        folder = os.path.join(tempfile.gettempdir(), f"{name}_{os.getuid()}")
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, "tri.cu")
        text = SRC.replace("MODNAME", name)
        if not os.path.exists(path) or open(path).read() != text:
            with open(path, "w") as f:
                f.write(text)
        _mod = load(name, [path], build_directory=folder,
                    extra_cuda_cflags=["-O3", "-gencode=arch=compute_90a,code=sm_90a"])
    return _mod


class ModelNew(nn.Module):
    def __init__(self, chunk=128, pol=0x1000000000000000, tv=0, gv=1, pdl=1):
        super().__init__()
        self.chunk, self.pol, self.tv, self.gv, self.pdl = chunk, pol, tv, gv, pdl
        self._ws = None
        _build()

    def forward(self, a, b, gate, which=13):
        for x in (a, b, gate):
            if tuple(x.shape) != (NODES, NODES, CHANNELS) or x.dtype != torch.bfloat16 or not x.is_cuda:
                raise ValueError("only bf16 CUDA tensors of 1024 x 1024 x 128")
        a, b, gate = a.contiguous(), b.contiguous(), gate.contiguous()
        with torch.cuda.device(a.device):
            if self._ws is None or self._ws.device != a.device:
                self._ws = torch.empty(2 * self.chunk + CHANNELS, NODES, NODES, dtype=torch.bfloat16, device=a.device)
            y = torch.empty_like(gate)
            ws = self._ws.data_ptr()
            _mod.tri(a.data_ptr(), b.data_ptr(), gate.data_ptr(), y.data_ptr(), ws, ws + self.chunk * NODES * NODES * 2, ws + self.chunk * NODES * NODES * 4,
                     torch.cuda.current_stream().cuda_stream, self.chunk, which, self.tv, self.gv, self.pdl,
                     torch.cuda.get_device_properties(a.device).multi_processor_count, self.pol)
        return y
