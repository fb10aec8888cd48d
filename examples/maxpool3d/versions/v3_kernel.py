"""3-d max pooling with kernel 3, stride 2, padding 1, dilation 3 on bfloat16, CUDA C++: every input line comes from memory once.

Output o takes the inputs 2 o - 1, 2 o + 2 and 2 o + 5 in each dimension, so a plane, row or column with an even number is used once and one
with an odd number twice (by o and by o + 3); numbers 0 and 126 of 128 are not used at all. The maximum is separable and needs no rounding:
 * a block owns rows of one volume and walks along the depth; the last three odd planes, already pooled over the height, stay in registers;
 * a thread owns 8 columns (one 16-byte load per row) of one output row; planes and rows are pooled two columns at a time;
 * the width comes last, once per output, from the neighbours' registers by warp shuffles;
 * the next depth's six loads are issued before this depth is computed.
Any other parameter, shape or alignment takes the plain kernel."""
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

CUDA_SRC = r"""
#include <cuda_bf16.h>
#include <stdint.h>

typedef unsigned int u32;
__device__ __forceinline__ u32 max2(u32 a, u32 b) {   // two bf16 at once; a NaN wins, as in PyTorch
    __nv_bfloat162 r = __hmax2_nan(*reinterpret_cast<__nv_bfloat162*>(&a), *reinterpret_cast<__nv_bfloat162*>(&b));
    return *reinterpret_cast<u32*>(&r);
}
__device__ __forceinline__ uint4 max8(uint4 a, uint4 b) {
    return make_uint4(max2(a.x, b.x), max2(a.y, b.y), max2(a.z, b.z), max2(a.w, b.w));
}
__device__ __forceinline__ u32 odds(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }   // odd columns of two pairs
__device__ __forceinline__ u32 evens(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
#define NEG 0xff80ff80u   // minus infinity twice
constexpr int THREADS = 512;

// A row is 2^logc chunks of 8 columns. Grid: volumes x tiles of th output rows x pieces of dlen output planes.
__global__ void __launch_bounds__(THREADS, 2) roll(const __nv_bfloat16* __restrict__ x, __nv_bfloat16* __restrict__ y,
        int D, int H, int W, int OD, int OH, int OW, int logc, int th, int htiles, int dsplit, int dlen) {
    int chunks = 1 << logc;
    int t = threadIdx.x & (chunks - 1);
    int row = threadIdx.x >> logc;
    int b = blockIdx.x;
    int ds = b % dsplit; b /= dsplit;
    int ht = b % htiles;
    int64_t vol = b / htiles;
    int oh = ht * th + row;
    bool live = row < th && oh < OH;
    oh = live ? oh : 0;            // idle threads do row 0 again: their warp's shuffles stay whole
    int od0 = ds * dlen, od1 = min(OD, od0 + dlen);
    // A row outside the volume is replaced by the middle row, which is always inside: the maximum does not change.
    int hm = 2 * oh + 2;
    int ha = oh > 0 ? 2 * oh - 1 : hm, hc = 2 * oh + 5 < H ? 2 * oh + 5 : hm;
    int plane = H * W >> 3, wv = W >> 3;
    const uint4* xv = reinterpret_cast<const uint4*>(x) + vol * D * plane + t;
    const uint4* pa = xv + ha * wv; const uint4* pm = xv + hm * wv; const uint4* pc = xv + hc * wv;
    const uint4 none = make_uint4(NEG, NEG, NEG, NEG);
    auto pooled = [&](int d) {
        if ((unsigned)d >= (unsigned)D) return none;
        int o = d * plane;
        return max8(max8(__ldg(pa + o), __ldg(pm + o)), __ldg(pc + o));
    };
    // odd planes 2 od - 1, 2 od + 1 and 2 od + 3, pooled over the height; output plane od takes the first, plane 2 od + 2 and plane 2 od + 5
    uint4 o0 = pooled(2 * od0 - 1), o1 = pooled(2 * od0 + 1), o2 = pooled(2 * od0 + 3);
    u32* yv = reinterpret_cast<u32*>(y + ((vol * OD + od0) * OH + oh) * OW) + 2 * t;
    int ystep = OH * OW / 2;   // OW is even, since W is a multiple of 8
    bool s0 = live && 2 * t < OW / 2, s1 = live && 2 * t + 1 < OW / 2;
    uint4 ne0, ne1, ne2, no0, no1, no2;
    auto fetch = [&](int od) {
        int e = (2 * od + 2) * plane, o = (2 * od + 5 < D ? 2 * od + 5 : 2 * od + 2) * plane;   // beyond the volume: the even plane again
        ne0 = __ldg(pa + e); ne1 = __ldg(pm + e); ne2 = __ldg(pc + e);
        no0 = __ldg(pa + o); no1 = __ldg(pm + o); no2 = __ldg(pc + o);
    };
    fetch(od0);
#pragma unroll 3
    for (int od = od0; od < od1; ++od) {
        uint4 e = max8(max8(ne0, ne1), ne2), o3 = max8(max8(no0, no1), no2);
        if (od + 1 < od1) fetch(od + 1);
        uint4 v = max8(max8(e, o0), o3);
        if (2 * od + 5 >= D) o3 = none;
        o0 = o1; o1 = o2; o2 = o3;
        // Width: v.x .. v.w are the pairs of columns 4 t .. 4 t + 3. Output ow takes the odd column of pair ow - 1, the even one of pair ow + 1 and
        // the odd one of pair ow + 2; the right edge needs no mask, since the last outputs are not stored.
        u32 left = __shfl_up_sync(0xffffffffu, v.w, 1, 32), r0 = __shfl_down_sync(0xffffffffu, v.x, 1, 32), r1 = __shfl_down_sync(0xffffffffu, v.y, 1, 32);
        if (t == 0) left = NEG;
        u32 a = max2(max2(odds(left, v.x), evens(v.y, v.z)), odds(v.z, v.w));
        u32 c = max2(max2(odds(v.y, v.z), evens(v.w, r0)), odds(r0, r1));
        if (s0) yv[0] = a;
        if (s1) yv[1] = c;
        yv += ystep;
    }
}

__device__ __forceinline__ float maxnan(float a, float b) { return (b > a || b != b) ? b : a; }
__global__ void plain(const __nv_bfloat16* __restrict__ x, __nv_bfloat16* __restrict__ y, int64_t total, int D, int H, int W, int OD, int OH, int OW,
        int kd, int kh, int kw, int sd, int sh, int sw, int pd, int ph, int pw, int ld, int lh, int lw) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= total) return;
    int ow = i % OW; int64_t r = i / OW;
    int oh = r % OH; r /= OH;
    int od = r % OD; r /= OD;
    const __nv_bfloat16* v = x + r * D * H * W;
    float best = __int_as_float(0xff800000);
    for (int a = 0; a < kd; ++a) {
        int d = od * sd - pd + a * ld;
        if (d < 0 || d >= D) continue;
        for (int b = 0; b < kh; ++b) {
            int h = oh * sh - ph + b * lh;
            if (h < 0 || h >= H) continue;
            for (int c = 0; c < kw; ++c) {
                int w = ow * sw - pw + c * lw;
                if (w >= 0 && w < W) best = maxnan(best, __bfloat162float(v[((int64_t)d * H + h) * W + w]));
            }
        }
    }
    y[i] = __float2bfloat16(best);
}

int run_roll(int64_t x, int64_t y, int64_t stream, int64_t vols, int D, int H, int W, int OD, int OH, int OW, int logc, int th, int dsplit) {
    int ht = (OH + th - 1) / th, dl = (OD + dsplit - 1) / dsplit;
    dsplit = (OD + dl - 1) / dl;   // no empty piece
    roll<<<(unsigned)(vols * ht * dsplit), THREADS, 0, (cudaStream_t)stream>>>((const __nv_bfloat16*)x, (__nv_bfloat16*)y, D, H, W, OD, OH, OW, logc, th, ht, dsplit, dl);
    return (int)cudaGetLastError();
}
int run_plain(int64_t x, int64_t y, int64_t stream, int64_t total, int D, int H, int W, int OD, int OH, int OW,
              int kd, int kh, int kw, int sd, int sh, int sw, int pd, int ph, int pw, int ld, int lh, int lw) {
    plain<<<(unsigned)((total + 255) / 256), 256, 0, (cudaStream_t)stream>>>((const __nv_bfloat16*)x, (__nv_bfloat16*)y, total, D, H, W, OD, OH, OW,
        kd, kh, kw, sd, sh, sw, pd, ph, pw, ld, lh, lw);
    return (int)cudaGetLastError();
}

#include <pybind11/pybind11.h>
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("run_roll", &run_roll); m.def("run_plain", &run_plain); }
"""

_extension = None


def extension():
    """Build the extension once per process."""
    global _extension
    if _extension is None:
        _extension = load_inline(name="maxpool3d_v3", cpp_sources="", cuda_sources=CUDA_SRC, no_implicit_headers=True,
                                 extra_cuda_cflags=["-O3", "-gencode=arch=compute_90a,code=sm_90a"])
    return _extension


def triple(v):
    return (v, v, v) if isinstance(v, int) else tuple(v)


def pooled_length(size, k, s, p, l, ceil_mode):
    """Length of the output along one dimension, by PyTorch's rule."""
    span = size + 2 * p - l * (k - 1) - 1
    n = (-(-span // s) if ceil_mode else span // s) + 1
    return n - 1 if ceil_mode and (n - 1) * s >= size + p else n


def rows_per_block(out_rows, chunks, threads=512):
    """Output rows of one block: as few blocks as 512 threads allow, all about equally full (31 rows for 62 rows of 16 chunks)."""
    tiles = -(-out_rows * chunks // threads)
    return min(-(-out_rows // tiles), threads // chunks)


def depth_pieces(blocks, depth, wanted=528):
    """Pieces of the depth: one, unless there are too few blocks for 132 multiprocessors (every further piece reads three planes again)."""
    return 1 if blocks >= wanted else min(4, depth, -(-wanted // blocks))


class ModelNew(nn.Module):
    def __init__(self, kernel_size, stride=None, padding=0, dilation=1, return_indices=False, ceil_mode=False):
        super().__init__()
        if return_indices:
            raise ValueError("indices are not served")
        self.k, self.p, self.l = triple(kernel_size), triple(padding), triple(dilation)
        self.s = self.k if stride is None else triple(stride)
        self.ceil_mode = ceil_mode
        self.k3s2p1d3 = (self.k, self.s, self.p, self.l) == ((3,) * 3, (2,) * 3, (1,) * 3, (3,) * 3) and not ceil_mode

    def forward(self, x):
        if x.dtype != torch.bfloat16 or x.dim() not in (4, 5) or not x.is_cuda:
            raise ValueError("a bfloat16 CUDA tensor of 4 or 5 dimensions is needed")
        if x.dim() == 5 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last_3d):
            raise ValueError("channels-last tensors are not served")
        x = x.contiguous()
        D, H, W = x.shape[-3:]
        out = [pooled_length(n, k, s, p, l, self.ceil_mode) for n, k, s, p, l in zip((D, H, W), self.k, self.s, self.p, self.l)]
        if min(out) < 1:
            raise ValueError("the input is smaller than the window")
        y = torch.empty(*x.shape[:-3], *out, device=x.device, dtype=x.dtype)
        if y.numel() == 0:
            return y
        with torch.cuda.device(x.device):
            stream = torch.cuda.current_stream().cuda_stream
            chunks = W // 8
            if self.k3s2p1d3 and W in (8, 16, 32, 64, 128, 256) and D * H * W < 2**31 and x.data_ptr() % 16 == 0:
                volumes, rows = y.numel() // (out[0] * out[1] * out[2]), rows_per_block(out[1], chunks)
                pieces = depth_pieces(volumes * -(-out[1] // rows), out[0])
                error = extension().run_roll(x.data_ptr(), y.data_ptr(), stream, volumes, D, H, W, *out, chunks.bit_length() - 1, rows, pieces)
            else:
                error = extension().run_plain(x.data_ptr(), y.data_ptr(), stream, y.numel(), D, H, W, *out, *self.k, *self.s, *self.p, *self.l)
        if error:
            raise RuntimeError(f"CUDA error {error}")
        return y
