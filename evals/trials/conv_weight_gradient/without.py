"""Gradient of a 3x3 convolution's weight for x and dy of 64 x 56 x 56 x 256 in bf16, on one H200 (132 SMs).

A product of (256 outputs) by (9 taps x 256 inputs) over the 200704 pixels, by wgmma without any copy of x:
- A block keeps a tile of 64 outputs x 9 taps x 64 inputs in the registers of three warpgroups, one per row of taps.  Rows of x
  with their border (zeros by TMA) and rows of dy pass through shared memory once; both are read transposed.  The three taps of a
  row are one wgmma of 192 columns: its descriptor's stride from one 64 columns to the next is one pixel (128 bytes).  A step of
  16 pixels that lies on two rows of 56 has the stride between its two groups of 8 set accordingly.
- The 16 tiles are spread over 132 blocks (33 for 4 tiles); three blocks of 33 have shares in two tiles.  All go through the
  pixels in step, so that x and dy come from memory about once.
- The parts' fp32 sums go through L2 and are added in a fixed order: results do not change from call to call.  The warpgroups
  finish in turn, so that the first ones' sums are added up while the last one multiplies.
All blocks must be resident at once: the launch is cooperative.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile

import torch
from torch import nn

SHAPE = (64, 56, 56, 256)


def shares(straddling=214):
    """For each of a group's 33 blocks: two ranges of pairs of rows, each of (tile, first pair, pairs)."""
    pairs, lengths = 64 * 28, []
    rest = 4 * pairs - 3 * straddling
    for block in range(33):
        done = sum(1 for b in range(block) if b not in (8, 16, 24))
        lengths.append(straddling if block in (8, 16, 24) else rest * (done + 1) // 30 - rest * done // 30)
    period, ranges, first = pairs / 8.25, [], 0
    for length in lengths:
        last, (tile, start) = first + length, divmod(first, pairs)
        if (last - 1) // pairs != tile:
            ranges.append(((tile, start, pairs - start), (tile + 1, 0, last - (tile + 1) * pairs)))
        else:
            # begin where the other blocks begin within their period, then go back for the rest
            end = start + length
            turn = min(max(round(next(i * period for i in range(20) if i * period >= start - 3)), start), end)
            if turn == end or turn - start < 6:
                turn = start
            ranges.append(((tile, turn, end - turn), (tile, start, turn - start)))
        first = last
    return ranges


SOURCE = r'''
#include <cuda.h>
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <stdint.h>


constexpr int GRP = 33;       // blocks of a group: four groups of 64 outputs, in each the four tiles of 64 inputs
constexpr int NPART = 9;      // blocks that have a share in a tile
constexpr int NX = 8, ND = 7; // slots for pairs of rows of x and of dy
constexpr int STAGED = 6;     // pairs at the end that the warpgroups do in turn
constexpr int IMGS = 64, H = 56, W = 56, C = 256, O = 256;
constexpr int PAIRS = H / 2;
constexpr int ROWB = (W + 2) * 128;                        // bytes of a row of x: 58 pixels, 64 channels
constexpr int XB = 15360, XTX = 2 * ROWB;                  // a slot of x: rows 2p-1 and 2p
constexpr int OVER = 1536, OVERTX = 10 * 128;              // the first 10 pixels of slot 0 again, behind the last slot
constexpr int DB = 2 * W * 128;                            // a slot of dy: rows 2p and 2p+1
constexpr int OFF_D = (NX * XB + OVER + 1023) / 1024 * 1024;
constexpr int OFF_BAR = OFF_D + ND * DB;
constexpr int SMEM = OFF_BAR + 16 * (NX + ND) + 1024;
constexpr int PART = 3 * 24 * 128;                         // float4s of a part of a tile
static_assert(SMEM <= 232448, "");

struct Work { short tile[2], start[2], count[2]; };
struct Works { Work w[GRP]; };
static const Works works = {{
//@TABLE@
}};

__device__ __forceinline__ uint32_t s2u(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void mbar_init(uint32_t b, uint32_t n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(b), "r"(n)); }
__device__ __forceinline__ void mbar_expect(uint32_t b, uint32_t n) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(b), "r"(n) : "memory"); }
__device__ __forceinline__ void mbar_arrive(uint32_t b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(b) : "memory"); }
__device__ __forceinline__ void mbar_wait(uint32_t b, uint32_t parity) {
  uint32_t ok = 0;
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n" : "=r"(ok) : "r"(b), "r"(parity) : "memory");
  } while (!ok);
}
__device__ __forceinline__ void tma4(uint32_t dst, const CUtensorMap* m, uint32_t bar, int a, int b, int c, int d) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
    :: "r"(dst), "l"(m), "r"(bar), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void tma2(uint32_t dst, const CUtensorMap* m, uint32_t bar, int a, int b) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
    :: "r"(dst), "l"(m), "r"(bar), "r"(a), "r"(b) : "memory");
}
//@WGMMA@

__device__ __forceinline__ uint64_t pair(uint32_t lo, uint32_t hi) { return (uint64_t)hi << 32 | lo; }

__global__ void __launch_bounds__(416, 1) wgrad(const __grid_constant__ CUtensorMap mx, const __grid_constant__ CUtensorMap mo,
                                               const __grid_constant__ CUtensorMap md, __nv_bfloat16* __restrict__ out,
                                               const __grid_constant__ Works table, float4* __restrict__ parts, unsigned* __restrict__ counters) {
  extern __shared__ uint8_t raw[];
  const uint32_t base = (s2u(raw) + 1023) & ~1023u;
  const uint32_t barx = base + OFF_BAR, bard = barx + 16 * NX;   // full, empty of each slot
  const int tid = threadIdx.x, warp = __shfl_sync(~0u, tid >> 5, 0);
  const int grp = blockIdx.x & 3, k = blockIdx.x >> 2;
  if (warp == 12) {
    if ((tid & 31) == 0) {
      asm volatile("prefetch.tensormap [%0];" :: "l"(&mx) : "memory");
      asm volatile("prefetch.tensormap [%0];" :: "l"(&md) : "memory");
      asm volatile("prefetch.tensormap [%0];" :: "l"(&mo) : "memory");
      for (int s = 0; s < NX + ND; ++s) { mbar_init(barx + 16 * s, 1); mbar_init(barx + 16 * s + 8, 12); }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncwarp();
    asm volatile("bar.arrive 1, 416;" ::: "memory");
  }
  if (warp != 12) asm volatile("bar.sync 1, 416;" ::: "memory");
  if (warp == 12) {
    if ((tid & 31) == 0) {
      int xs = 0, xp = 1, ds = 0, dp = 1;
      for (int r = 0; r < 2; ++r) {
        int n = table.w[k].count[r], u = table.w[k].start[r];
        const int o0 = grp * 64, c0 = table.w[k].tile[r] * 64;
        while (n > 0) {
          const int img = u / PAIRS, p = u % PAIRS, m = min(n, PAIRS - p);
          for (int t = 0; t <= m; ++t) {
            {
              const uint32_t full = barx + 16 * xs;
              mbar_wait(full + 8, xp);
              mbar_expect(full, xs == 0 ? XTX + OVERTX : XTX);
              tma4(base + xs * XB, &mx, full, c0, -1, 2 * (p + t) - 1, img);
              if (xs == 0) tma4(base + NX * XB, &mo, full, c0, -1, 2 * (p + t) - 1, img);
              if (++xs == NX) { xs = 0; xp ^= 1; }
            }
            if (t > 0) {
              const uint32_t full = bard + 16 * ds;
              mbar_wait(full + 8, dp);
              mbar_expect(full, DB);
              tma2(base + OFF_D + ds * DB, &md, full, o0, (img * H + 2 * (p + t - 1)) * W);
              if (++ds == ND) { ds = 0; dp ^= 1; }
            }
          }
          u += m; n -= m;
        }
      }
    }
    return;
  }
  const int wg = warp >> 2, lane = tid & 31;
  float acc[96];
#pragma unroll
  for (int i = 0; i < 96; ++i) acc[i] = 0.f;
  int todo = table.w[k].count[0] + table.w[k].count[1];
  int xs = 0, xp = 0, ds = 0, dp = 0;
  uint32_t rel_x = 0, rel_x2 = 0, rel_d = 0;
#define RELEASE() if (lane == 0 && rel_d) { mbar_arrive(rel_d); mbar_arrive(rel_x); if (rel_x2) mbar_arrive(rel_x2); }
  const uint32_t low = (base & 0x3ffff) >> 4 | 8u << 16, sbo3 = (wg == 1 ? XB - ROWB - 48 * 128 : ROWB - 48 * 128) / 16 | 1u << 30;
  for (int r = 0; r < 2; ++r) {
    int n = table.w[k].count[r], u = table.w[k].start[r];
    const int tile = table.w[k].tile[r];
    while (n > 0) {
      int p = u % PAIRS;
      const int m = min(n, PAIRS - p), pe = p + m;
      mbar_wait(barx + 16 * xs, xp);
#pragma unroll 1
      for (; p < pe; ++p) {
        // the last pairs are done in turn, so that the sums of the first warpgroups are added up while the others multiply
        if (todo == STAGED && wg) {
          asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
          RELEASE();
          rel_d = 0;
          asm volatile("bar.sync %0, 256;" :: "r"(wg + 1) : "memory");
        }
        const int xa = xs;
        if (++xs == NX) { xs = 0; xp ^= 1; }
        mbar_wait(barx + 16 * xs, xp);
        mbar_wait(bard + 16 * ds, dp);
        // low words of the descriptors: address / 16 and, for x, 128 / 16 from one column of taps to the next
        const uint32_t A = low + xa * (XB >> 4), B = low + xs * (XB >> 4);
        const uint32_t b0 = wg == 0 ? A : wg == 1 ? A + (ROWB >> 4) : B, b1 = wg == 0 ? A + (ROWB >> 4) : wg == 1 ? B : B + (ROWB >> 4);
        const uint32_t d0 = (((base + OFF_D) & 0x3ffff) >> 4) + ds * (DB >> 4);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#define STEP(s) wgmma192(acc, pair(d0 + (s) * 128, 1024 >> 4 | 1u << 30), (s) == 3 ? pair(b0 + 48 * 8, sbo3) : \
        pair((s) < 3 ? b0 + (s) * 128 : b1 + (16 * (s) - W) * 8, 1024 >> 4 | 1u << 30))
        STEP(3);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        RELEASE();
        // rows above and below of the image are zero: their products are left out
        if (p == 0 && wg == 0) {
          STEP(4); STEP(5); STEP(6);
          asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        } else if (p == PAIRS - 1 && wg == 2) {
          STEP(0); STEP(1); STEP(2);
          asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        } else {
          STEP(0); STEP(1); STEP(2); STEP(4); STEP(5); STEP(6);
          asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        }
        rel_d = bard + 16 * ds + 8; rel_x = barx + 16 * xa + 8; rel_x2 = 0;
        if (++ds == ND) { ds = 0; dp ^= 1; }
        --todo;
        if (todo == 0 && wg < 2) asm volatile("bar.arrive %0, 256;" :: "r"(wg + 2) : "memory");
      }
      rel_x2 = barx + 16 * xs + 8;
      if (++xs == NX) { xs = 0; xp ^= 1; }
      u += m; n -= m;
    }
    if (r == 0 && tile == table.w[k].tile[1]) continue;
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    RELEASE();
    rel_d = 0;
    const int idx = k - 8 * tile, t = tid & 127;
    unsigned* counter = counters + ((grp * 4 + tile) * 3 + wg) * 32;
    float4* mine = parts + (size_t)((grp * 4 + tile) * NPART) * PART + wg * 24 * 128 + t;
#pragma unroll
    for (int q = 0; q < 24; ++q) {
      __stcg(mine + (size_t)idx * PART + q * 128, make_float4(acc[4 * q], acc[4 * q + 1], acc[4 * q + 2], acc[4 * q + 3]));
    }
    asm volatile("bar.sync %0, 128;" :: "r"(wg + 4) : "memory");
    unsigned goal = 0;
    if (t == 0) {
      __threadfence();
      goal = (atomicAdd(counter, 1) / NPART + 1) * NPART;
    }
    if (idx < 8) {
      if (t == 0) {
        unsigned now;
        do { asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory"); } while ((int)(now - goal) < 0);
      }
      asm volatile("bar.sync %0, 128;" :: "r"(wg + 4) : "memory");
      float4 v[NPART][3];
#pragma unroll
      for (int s = 0; s < NPART; ++s) {
#pragma unroll
        for (int q = 0; q < 3; ++q) v[s][q] = __ldcg(mine + (size_t)s * PART + (idx * 3 + q) * 128);
      }
      const int row = grp * 64 + (warp & 3) * 16 + (lane >> 2);
#pragma unroll
      for (int q = 0; q < 3; ++q) {
        float4 s = v[0][q];
#pragma unroll
        for (int i = 1; i < NPART; ++i) { s.x += v[i][q].x; s.y += v[i][q].y; s.z += v[i][q].z; s.w += v[i][q].w; }
        const int n8 = idx * 3 + q;
        __nv_bfloat16* dst = out + (row * 9 + wg * 3 + (n8 >> 3)) * C + tile * 64 + (n8 & 7) * 8 + (lane & 3) * 2;
        *reinterpret_cast<__nv_bfloat162*>(dst) = __floats2bfloat162_rn(s.x, s.y);
        *reinterpret_cast<__nv_bfloat162*>(dst + 8 * 9 * C) = __floats2bfloat162_rn(s.z, s.w);
      }
    }
#pragma unroll
    for (int i = 0; i < 96; ++i) acc[i] = 0.f;
  }
}

typedef CUresult (*Encode)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                           const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
static Encode encode() {
  static Encode f = nullptr;
  if (!f) {
    cudaDriverEntryPointQueryResult r;
    void* p = nullptr;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &p, 12000, cudaEnableDefault, &r) == cudaSuccess) f = (Encode)p;
  }
  return f;
}
static int map4(CUtensorMap* m, void* p, int channels, int wide, int high) {
  cuuint64_t dims[4] = {(cuuint64_t)channels, W, H, IMGS}, str[3] = {(cuuint64_t)channels * 2, (cuuint64_t)W * channels * 2, (cuuint64_t)H * W * channels * 2};
  cuuint32_t box[4] = {64, (cuuint32_t)wide, (cuuint32_t)high, 1}, es[4] = {1, 1, 1, 1};
  return encode()(m, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, p, dims, str, box, es, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}
extern "C" long long wgrad_bytes() { return 65536 + (long long)16 * NPART * PART * 16; }
// work: wgrad_bytes() bytes, of which the first 65536 (the counters) are zero before the first call
extern "C" int wgrad_run(void* x, void* dy, void* out, void* work, void* stream) {
  if (!encode()) return 10001;
  CUtensorMap mx, mo, md;
  if (int r = map4(&mx, x, C, 58, 2)) return 20000 + r;
  if (int r = map4(&mo, x, C, 10, 1)) return 30000 + r;
  cuuint64_t dims[2] = {O, (cuuint64_t)IMGS * H * W}, str[1] = {O * 2};
  cuuint32_t box[2] = {64, 2 * W}, es[2] = {1, 1};
  if (int r = encode()(&md, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, dy, dims, str, box, es, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                       CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)) return 40000 + r;
  cudaError_t e = cudaFuncSetAttribute(wgrad, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM);
  if (e != cudaSuccess) return e;
  cudaLaunchConfig_t cfg = {};
  cudaLaunchAttribute at[1];
  cfg.gridDim = dim3(4 * GRP);
  cfg.blockDim = dim3(416);
  cfg.dynamicSmemBytes = SMEM;
  cfg.stream = (cudaStream_t)stream;
  at[0].id = cudaLaunchAttributeCooperative;
  at[0].val.cooperative = 1;
  cfg.attrs = at; cfg.numAttrs = 1;
  return cudaLaunchKernelEx(&cfg, wgrad, mx, mo, md, (__nv_bfloat16*)out, works, (float4*)((char*)work + 65536), (unsigned*)work);
}
'''


def source():
    names = ", ".join(f"%{i}" for i in range(96))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(96))
    multiply = (
        "__device__ __forceinline__ void wgmma192(float (&d)[96], uint64_t a, uint64_t b) {\n"
        f'  asm volatile("wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {{{names}}}, %96, %97, 1, 1, 1, 1, 1;\\n"\n'
        f'    : {operands} : "l"(a), "l"(b));\n}}'
    )
    table = ",\n".join("  {{%d, %d}, {%d, %d}, {%d, %d}}" % tuple(v for both in zip(*r) for v in both) for r in shares())
    return SOURCE.replace("//@WGMMA@", multiply).replace("//@TABLE@", table)


_library = None


def library():
    global _library
    if _library is None:
        text = source()
        folder = os.path.join(tempfile.gettempdir(), f"conv_wgrad_{os.getuid()}_{hashlib.sha256(text.encode()).hexdigest()[:16]}")
        built = os.path.join(folder, "wgrad.so")
        if not os.path.exists(built):
            from torch.utils.cpp_extension import CUDA_HOME

            nvcc = os.path.join(CUDA_HOME, "bin", "nvcc") if CUDA_HOME else None
            if not nvcc or not os.path.exists(nvcc):
                nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
            os.makedirs(folder, mode=0o700, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as work:
                with open(os.path.join(work, "wgrad.cu"), "w") as file:
                    file.write(text)
                command = [nvcc, "-O3", "-std=c++17", "-gencode", "arch=compute_90a,code=sm_90a", "-shared", "-Xcompiler", "-fPIC", "-o", "wgrad.so", "wgrad.cu"]
                result = subprocess.run(command, cwd=work, capture_output=True, text=True)
                if result.returncode:
                    raise RuntimeError(f"nvcc failed: {result.stdout}{result.stderr}")
                os.replace(os.path.join(work, "wgrad.so"), built)
        loaded = ctypes.CDLL(built)
        loaded.wgrad_run.argtypes = [ctypes.c_void_p] * 5
        loaded.wgrad_bytes.restype = ctypes.c_longlong
        _library = loaded
    return _library


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.work = {}  # per device and stream: counters and the tiles' parts

    def forward(self, x, dy):
        for name, tensor in (("x", x), ("dy", dy)):
            if tuple(tensor.shape) != SHAPE:
                raise ValueError(f"{name} must have the shape {SHAPE}, not {tuple(tensor.shape)}")
            if tensor.dtype != torch.bfloat16 or not tensor.is_cuda or tensor.device != x.device:
                raise ValueError(f"{name} must be bf16 and on one CUDA device with the other")
            if not tensor.is_contiguous() or tensor.data_ptr() % 16:
                raise ValueError(f"{name} must be contiguous and aligned to 16 bytes")
        device = x.device
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream().cuda_stream
            work = self.work.get((device.index, stream))
            if work is None:
                about = torch.cuda.get_device_properties(device)
                if (about.major, about.minor) != (9, 0) or about.multi_processor_count < 132:
                    raise ValueError("this kernel is for a GPU of compute capability 9.0 with 132 multiprocessors")
                work = torch.zeros(library().wgrad_bytes(), dtype=torch.uint8, device=device)
                self.work[device.index, stream] = work
            out = torch.empty(256, 3, 3, 256, dtype=torch.bfloat16, device=device)
            error = library().wgrad_run(x.data_ptr(), dy.data_ptr(), out.data_ptr(), work.data_ptr(), stream)
        if error:
            raise RuntimeError(f"the launch failed: {error}")
        return out
