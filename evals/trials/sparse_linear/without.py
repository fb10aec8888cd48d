"""y = silu(x W^T + bias), W sparse 2:4, on Hopper's sparse tensor cores (wgmma.mma_async.sp, bf16 -> fp32).

The product is computed as y^T = W x^T, for the sparse operand has to be the left one. `places` is already what the
instruction wants as its metadata (four bits for each four weights, in order), so nothing is packed anew: values, places
and x go by TMA to shared memory, the 16-bit pieces of places from there to the registers of the threads.
Persistent, clusters of two CTAs which share the tile of x by multicast, one producer warp, NWG consumer warpgroups.
"""
import ctypes, hashlib, os, shutil, subprocess, tempfile
import torch
from torch import nn

CFG = dict(NWG=2, MB=2, BN=176, S=5, NBUF=3, G=7, REGS=240, PREGS=24)

SRC = r'''
#include <cuda.h>
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <stdint.h>
constexpr int BM = 64 * MB * NWG, BK = 64;          // BK in elements of x; BK / 2 kept weights
constexpr int PM = (S + 2) / 2;                     // slots for metadata, each two k steps
constexpr int A_B = BM * 64, B_B = BN * 128, STAGE = A_B + B_B, M_B = BM * 16;
constexpr int OUT_B = MB * 2048;                    // 16 tokens x 64 MB columns
constexpr int OFF_M = S * STAGE, OFF_O = (OFF_M + PM * M_B + 1023) / 1024 * 1024;
constexpr int OFF_BAR = OFF_O + NWG * NBUF * OUT_B, SMEM = OFF_BAR + 256;
static_assert(SMEM <= 232448, "smem");
static_assert(STAGE % 1024 == 0 && BN % 16 == 0 && 2 * S * 8 <= 256, "shape");

__device__ __forceinline__ uint32_t s32(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void bar_init(uint32_t b, int n) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(b), "r"(n)); }
__device__ __forceinline__ void bar_wait(uint32_t b, uint32_t ph) {
  asm volatile("{\n.reg .pred p;\nL: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@p bra D;\nbra L;\nD:\n}" ::"r"(b), "r"(ph) : "memory");
}
__device__ __forceinline__ void expect(uint32_t b, uint32_t n) { asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(b), "r"(n) : "memory"); }
__device__ __forceinline__ void arrive_at(uint32_t b, uint32_t cta) {
  asm volatile("{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [r];\n}" ::"r"(b), "r"(cta) : "memory");
}
__device__ __forceinline__ void tma_load(uint32_t dst, const CUtensorMap* m, int c0, int c1, uint32_t bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               ::"r"(dst), "l"(m), "r"(c0), "r"(c1), "r"(bar) : "memory");
}
__device__ __forceinline__ void tma_load_mc(uint32_t dst, const CUtensorMap* m, int c0, int c1, uint32_t bar, uint16_t mask) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
               ::"r"(dst), "l"(m), "r"(c0), "r"(c1), "r"(bar), "h"(mask) : "memory");
}
__device__ __forceinline__ void tma_store(const CUtensorMap* m, int c0, int c1, uint32_t src) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(m), "r"(c0), "r"(c1), "r"(src) : "memory");
}
__device__ __forceinline__ uint32_t lds16(uint32_t a) { uint16_t v; asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(a)); return v; }
template <int SEL> __device__ __forceinline__ void mma(float (&d)[BN / 2], uint64_t a, uint64_t b, uint32_t e, int scale) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %@SC@, 0;\n"
    "wgmma.mma_async.sp.sync.aligned.m64n@BN@k32.f32.bf16.bf16 {@REGLIST@}, %@A@, %@B@, %@E@, @SEL@, p, 1, 1, 0, 0;\n}"
    : @OUTS@ : "l"(a), "l"(b), "r"(e), "r"(scale), "n"(SEL));
}
__device__ __forceinline__ void wg_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wg_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wg_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
__device__ __forceinline__ float ex2(float v) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v)); return r; }
__device__ __forceinline__ float rcp(float v) { float r; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v)); return r; }
// silu of both, packed to bf16; one reciprocal for the two
__device__ __forceinline__ uint32_t silu2(float a, float b) {
  float p = 1.f + ex2(fminf(a * -1.4426950408889634f, 62.f)), q = 1.f + ex2(fminf(b * -1.4426950408889634f, 62.f));
  float r = rcp(p * q); a *= r * q; b *= r * p;
  uint32_t o; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(o) : "f"(b), "f"(a)); return o;
}
struct Tile { int m, n; };
__device__ __forceinline__ Tile tile_of(int t, int mt, int nt) {
  int g = t / (G * nt), gm = min(G, mt - g * G), w = t - g * G * nt;
  return {g * G + w % gm, w / gm};
}
constexpr uint64_t DA = (uint64_t(2) << 62) | (uint64_t(32) << 32) | (uint64_t(1) << 16);
constexpr uint64_t DB = (uint64_t(1) << 62) | (uint64_t(64) << 32) | (uint64_t(1) << 16);

__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(128 * NWG + 128, 1)
sparse_linear(const __grid_constant__ CUtensorMap tv, const __grid_constant__ CUtensorMap tp, const __grid_constant__ CUtensorMap tx,
              const __grid_constant__ CUtensorMap ty, const __nv_bfloat16* __restrict__ bias, int columns, int ki, int mt, int nt) {
  extern __shared__ __align__(1024) uint8_t smem[];
  const uint32_t sb = s32(smem), full = sb + OFF_BAR, empty = full + 8 * S;
  uint32_t rank; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const int wg = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    if (sb & 1023) __trap();
    for (int s = 0; s < S; s++) bar_init(full + 8 * s, 1), bar_init(empty + 8 * s, 2 * NWG * 4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  const int tiles = mt * nt, step = gridDim.x / 2;
  int slot = 0; uint32_t ph = 0;
  if (wg == NWG) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PREGS));
    if (threadIdx.x == 128 * NWG) {
      int mslot = 0;
      for (int t = blockIdx.x / 2; t < tiles; t += step) {
        Tile q = tile_of(t, mt, nt);
        const int m0 = (q.m * 2 + rank) * BM, n0 = q.n * BN + rank * (BN / 2);
#pragma unroll 1
        for (int i = 0; i < ki; i++) {
          bar_wait(empty + 8 * slot, ph ^ 1);
          const uint32_t b = full + 8 * slot, d = sb + slot * STAGE;
          expect(b, (i & 1) ? STAGE : STAGE + M_B);
          if (!(i & 1)) {
            tma_load(sb + OFF_M + mslot * M_B, &tp, i * 8, m0, b);
            if (++mslot == PM) mslot = 0;
          }
          tma_load_mc(d + A_B + rank * (B_B / 2), &tx, i * BK, n0, b, 3);
          tma_load(d, &tv, i * (BK / 2), m0, b);
          if (++slot == S) slot = 0, ph ^= 1;
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGS));
    const int lane = threadIdx.x & 31, w = (threadIdx.x / 32) & 3, g = lane / 4, tq = lane & 3;
    const uint32_t ob = sb + OFF_O + wg * NBUF * OUT_B;
    float acc[MB][BN / 2];
    int mslot = 0, obuf = 0;
    const uint32_t moff = sb + OFF_M + (wg * MB * 64 + w * 16 + g) * 16 + tq * 2;
    const uint32_t so = ((lane >> 4) * 8 + (lane & 7)) * 128 + (((w * 2 + ((lane >> 3) & 1)) ^ (lane & 7)) << 4);
    for (int t = blockIdx.x / 2; t < tiles; t += step) {
      Tile q = tile_of(t, mt, nt);
      const int m0 = (q.m * 2 + rank) * BM + wg * MB * 64, n0 = q.n * BN;
      float bs[MB][2];
#pragma unroll
      for (int mb = 0; mb < MB; mb++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int c = m0 + mb * 64 + w * 16 + h * 8 + g;
          bs[mb][h] = c < columns ? __bfloat162float(bias[c]) : 0.f;
        }
      uint32_t prev = 0;
      for (int i = 0; i < ki; i += 2) {
#pragma unroll
        for (int u = 0; u < 2; u++) {
          bar_wait(full + 8 * slot, ph);
          uint32_t e[MB];
#pragma unroll
          for (int mb = 0; mb < MB; mb++) {
            const uint32_t a = moff + mslot * M_B + mb * 1024 + u * 8;
            e[mb] = lds16(a) | lds16(a + 128) << 16;
          }
          const uint32_t base = (sb + slot * STAGE) >> 4;
          const uint64_t da = DA | (base + wg * MB * 256), db = DB | (base + A_B / 16);
          wg_fence();
#pragma unroll
          for (int mb = 0; mb < MB; mb++) mma<0>(acc[mb], da + mb * 256, db, e[mb], u | i);
#pragma unroll
          for (int mb = 0; mb < MB; mb++) mma<1>(acc[mb], da + mb * 256 + 2, db + 4, e[mb], 1);
          wg_commit();
          wg_wait<1>();
          if ((u | i) && lane < 2) arrive_at(empty + 8 * prev, lane);
          prev = slot;
          if (++slot == S) slot = 0, ph ^= 1;
        }
        if (++mslot == PM) mslot = 0;
      }
      wg_wait<0>();
#pragma unroll
      for (int mb = 0; mb < MB; mb++)
#pragma unroll
        for (int j = 0; j < BN / 2; j++) asm volatile("" : "+f"(acc[mb][j])::"memory");
      if (lane < 2) arrive_at(empty + 8 * prev, lane);
#pragma unroll
      for (int c = 0; c < BN / 16; c++) {
        const uint32_t o = ob + obuf * OUT_B;
#pragma unroll
        for (int mb = 0; mb < MB; mb++) {
          const float* d = acc[mb] + c * 8; const float b0 = bs[mb][0], b1 = bs[mb][1];
          uint32_t r0 = silu2(d[0] + b0, d[1] + b0), r1 = silu2(d[2] + b1, d[3] + b1);
          uint32_t r2 = silu2(d[4] + b0, d[5] + b0), r3 = silu2(d[6] + b1, d[7] + b1);
          asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                       ::"r"(o + mb * 2048 + so), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        const bool first = (threadIdx.x & 127) == 0;
        if (first) asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(NBUF - 2) : "memory");
        asm volatile("bar.sync %0, 128;" ::"r"(wg + 1) : "memory");
        if (first) {
#pragma unroll
          for (int mb = 0; mb < MB; mb++) tma_store(&ty, m0 + mb * 64, n0 + c * 16, o + mb * 2048);
          asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }
        if (++obuf == NBUF) obuf = 0;
      }
    }
    if ((threadIdx.x & 127) == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
  __syncwarp();
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

typedef CUresult (*Encode)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                           const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
static Encode enc;
static int map2(CUtensorMap* m, CUtensorMapDataType ty, int es, const void* p, uint64_t w, uint64_t h, int bw, int bh, CUtensorMapSwizzle sw) {
  cuuint64_t d[2] = {w, h}, st[1] = {w * es}; cuuint32_t b[2] = {(cuuint32_t)bw, (cuuint32_t)bh}, e[2] = {1, 1};
  return enc(m, ty, 2, (void*)p, d, st, b, e, CU_TENSOR_MAP_INTERLEAVE_NONE, sw, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}
extern "C" int run(const void* x, const void* v, const void* pl, const void* bias, void* y, int tokens, int width, int columns, void* stream) {
  static int sms = 0;
  if (!enc) {
    cudaDriverEntryPointQueryResult r; void* f = 0;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &r) != cudaSuccess || !f) return 1000;
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0);
    if (cudaFuncSetAttribute(sparse_linear, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM)) return 1001;
    enc = (Encode)f;
  }
  CUtensorMap tv, tp, tx, ty; int e = 0;
  e |= map2(&tv, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, v, width / 2, columns, BK / 2, BM, CU_TENSOR_MAP_SWIZZLE_64B);
  e |= map2(&tp, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, pl, width / 8, columns, 16, BM, CU_TENSOR_MAP_SWIZZLE_NONE);
  e |= map2(&tx, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, x, width, tokens, BK, BN / 2, CU_TENSOR_MAP_SWIZZLE_128B);
  e |= map2(&ty, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, y, columns, tokens, 64, 16, CU_TENSOR_MAP_SWIZZLE_128B);
  if (e) return 2000 + e;
  const int mt = (columns + 2 * BM - 1) / (2 * BM), nt = (tokens + BN - 1) / BN;
  int cl = sms / 2; if (cl > mt * nt) cl = mt * nt;
  sparse_linear<<<cl * 2, 128 * NWG + 128, SMEM, (cudaStream_t)stream>>>(tv, tp, tx, ty, (const __nv_bfloat16*)bias, columns, width / BK, mt, nt);
  return (int)cudaGetLastError();
}
'''


def source(cfg):
    n = cfg["BN"] // 2
    s = SRC.replace("@REGLIST@", ", ".join(f"%{i}" for i in range(n))).replace("@OUTS@", ", ".join(f'"+f"(d[{i}])' for i in range(n)))
    s = s.replace("@BN@", str(cfg["BN"]))
    for i, k in enumerate(["A", "B", "E", "SC", "SEL"]):
        s = s.replace(f"@{k}@", ("%" if k == "SEL" else "") + str(n + i))
    return "".join(f"static constexpr int {k} = {v};\n" for k, v in cfg.items()) + s


def build(cfg):
    src = source(cfg)
    name = "sparse_linear_" + hashlib.sha1(src.encode()).hexdigest()[:12]
    here = os.path.dirname(os.path.abspath(__file__))
    for folder in (here, tempfile.gettempdir()):
        so = os.path.join(folder, "build", name + ".so")
        if os.path.exists(so):
            return so
    folder = os.path.join(here if os.access(here, os.W_OK) else tempfile.gettempdir(), "build")
    os.makedirs(folder, exist_ok=True)
    so, cu = os.path.join(folder, name + ".so"), os.path.join(folder, name + ".cu")
    with open(cu, "w") as f:
        f.write(src)
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    tmp = f"{so}.{os.getpid()}"
    subprocess.run([nvcc, "-gencode=arch=compute_90a,code=sm_90a", "-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC", "-o", tmp, cu], check=True)
    os.replace(tmp, so)
    return so


_libs = {}


def lib(cfg):
    key = tuple(cfg.items())
    if key not in _libs:
        f = ctypes.CDLL(build(cfg)).run
        f.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int] * 3 + [ctypes.c_void_p]
        _libs[key] = f
    return _libs[key]


class ModelNew(nn.Module):
    cfg = CFG

    def forward(self, x, values, places, bias):
        columns, kept = values.shape
        tokens, width = x.shape
        if not (x.dtype == values.dtype == bias.dtype == torch.bfloat16 and places.dtype == torch.uint8 and x.is_cuda):
            raise ValueError("bf16 on CUDA, places uint8")
        if width != 2 * kept or width % 128 or columns % 8 or places.shape != (columns, width // 8) or bias.shape != (columns,) or not tokens:
            raise ValueError("shape")
        x, values, places, bias = x.contiguous(), values.contiguous(), places.contiguous(), bias.contiguous()
        if any(t.data_ptr() % 16 for t in (x, values, places)):
            raise ValueError("alignment")
        y = torch.empty(tokens, columns, device=x.device, dtype=x.dtype)
        e = lib(self.cfg)(x.data_ptr(), values.data_ptr(), places.data_ptr(), bias.data_ptr(), y.data_ptr(), tokens, width, columns,
                          torch.cuda.current_stream().cuda_stream)
        if e:
            raise RuntimeError(f"sparse_linear: error {e}")
        return y
