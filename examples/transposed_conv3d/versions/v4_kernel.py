"""Transposed 3-d convolution on bfloat16 in CUDA C++ with wgmma. With kernel 3, stride 2, padding 1 and dilation 2 only odd outputs get anything
(an eighth): out[2 m + 1] = sum of x[m + 1 - k] w[k], a dense 3x3x3 convolution.
 * One block per multiprocessor, all weights resident in shared memory. A block walks along the depth of four rows: four warps load input planes
   into a ring, two warpgroups take the depths in turn (one multiplies while the other writes), one warp writes the planes of zeros.
 * The tile is stored with 8 channels (16 bytes) of a position together and positions in order, without swizzle: shifting the matrix descriptor's
   start by 16 bytes shifts the tile by one position, so all 27 taps read the same tile. Rows are 34 positions apart; 2 of 34 results are thrown away.
 * The output leaves by 16-byte stores, from an image in shared memory whose zeros stay in place; planes of zeros straight from registers.
Everything else (other parameters, wider volumes) takes the plain kernel."""
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

N_POS = 136  # positions of one product: four rows of 34, of which 32 count
ACC = ", ".join("%%%d" % i for i in range(N_POS // 2))
OPS = ", ".join('"+f"(acc[%d])' % i for i in range(N_POS // 2))
WGMMA = ('asm volatile("{.reg .pred p; setp.ne.b32 p, %%%d, 0; wgmma.mma_async.sync.aligned.m64n%dk16.f32.bf16.bf16 {%s}, %%%d, %%%d, p, 1, 1, 0, 0;}"\n'
         '        : %s : "l"(a), "l"(b), "r"(keep));' % (N_POS // 2 + 2, N_POS, ACC, N_POS // 2, N_POS // 2 + 1, OPS))

CUDA_SRC = r"""
#include <cuda_bf16.h>
#include <stdint.h>

typedef unsigned int u32;
typedef unsigned short u16;
constexpr int IC = 32, OC = 64, TAPS = 27, ROWS = 4, PITCH = 34, NPOS = 136;
constexpr int TROWS = ROWS + 2, CHUNK = TROWS * PITCH * 16;                 // one group of 8 channels of one input plane with its halo
constexpr int SLOTS = 4, SLOT = 4 * CHUNK;                                  // ring of input planes
constexpr int IMG = 264;                                                    // words per channel of the output image
constexpr int W_BYTES = TAPS * IC * OC * 2, RING_AT = W_BYTES, IMG_AT = RING_AT + SLOTS * SLOT, BAR_AT = IMG_AT + OC * IMG * 4;
constexpr int SPARE_AT = BAR_AT + 128, SPARE = 1792, SMEM = SPARE_AT + SPARE; // unused; here (and cleared) so that the machine code is the measured one
static_assert(SMEM <= 232448, "shared memory");
constexpr int LOADERS = 8, ZEROS = 12, ZW = 1, THREADS = (ZEROS + ZW) * 32;  // first warp of each role (0..3 and 4..7 multiply in turn); warps that write zeros

__device__ __forceinline__ u32 smem_addr(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// Matrix descriptor without swizzle: 8 rows of 16 bytes lie together; lead: bytes to the next 16 bytes of k, stride: to the next 8 rows.
__device__ __forceinline__ uint64_t desc(u32 addr, u32 lead, u32 stride) {
    return (uint64_t)((addr & 0x3ffff) >> 4) | ((uint64_t)(lead >> 4) << 16) | ((uint64_t)(stride >> 4) << 32);
}
__device__ __forceinline__ void mma(float (&acc)[NPOS / 2], uint64_t a, uint64_t b, int keep) {
    @WGMMA@
}
__device__ __forceinline__ void bar_init(u32 bar, int count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(bar), "r"(count) : "memory"); }
__device__ __forceinline__ void bar_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(bar) : "memory"); }
__device__ __forceinline__ void bar_wait(u32 bar, u32 parity) {
    asm volatile("{.reg .pred p;\nAGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}" :: "r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The output is a run of 32-bit words. Every plane has an odd number of elements, so it starts in the low or the high half of a word; a word
// that two planes share is zero in both. Words of an odd plane, counted from the word of its first element: a pair of rows is W + 1 words of
// zeros and W words with one element each. The words are cut into runs (rows of a tile; the zeros between two odd planes), and a run is
// written from its first to its last 16-byte boundary rounded UP: what it adds at its end are zeros that begin the next run.
__global__ void __launch_bounds__(THREADS, 1) deconv(const u16* __restrict__ x, const u16* __restrict__ w, u32* __restrict__ y,
        int D, int H, int W, int htiles, int dsplit, int dlen, int items, int vec) {
    extern __shared__ __align__(128) unsigned char smem[];
    int tid = threadIdx.x, warp = __shfl_sync(0xffffffffu, tid / 32, 0), lane = tid % 32;
    u32 base = smem_addr(smem), full = base + BAR_AT, empty = full + SLOTS * 8, image_free = empty + SLOTS * 8;
    int pair = 2 * W + 1, HW = H * W;
    int plane = (2 * H + 1) * pair;
    int64_t volume = (int64_t)plane * (2 * D + 1);
    for (int i = tid; i < OC * IMG / 4; i += THREADS) reinterpret_cast<uint4*>(smem + IMG_AT)[i] = make_uint4(0, 0, 0, 0);
    for (int i = tid; i < SPARE / 16; i += THREADS) reinterpret_cast<uint4*>(smem + SPARE_AT)[i] = make_uint4(0, 0, 0, 0);
    if (tid == 0) {
        for (int s = 0; s < SLOTS; ++s) { bar_init(full + 8 * s, 128); bar_init(empty + 8 * s, 8); bar_init(image_free + 8 * s, 1); }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    fence_async();
    __syncthreads();

    if (warp < ZEROS) {
        // Weights [IC][OC][TAPS] into [tap][ic / 8][oc][ic % 8].
#pragma unroll 2
        for (int i = tid; i < IC / 8 * OC * TAPS; i += ZEROS * 32) {
            int c = i / (OC * TAPS), r = i - c * (OC * TAPS), oc = r / TAPS, tap = r - oc * TAPS;
            u32 v[8];
#pragma unroll
            for (int k = 0; k < 8; ++k) v[k] = __ldg(w + (c * 8 + k) * (OC * TAPS) + r);
            *reinterpret_cast<uint4*>(smem + tap * (IC * OC * 2) + c * (OC * 16) + oc * 16) =
                make_uint4(v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, v[6] | v[7] << 16);
        }
        fence_async();
        asm volatile("bar.sync 1, 384;" ::: "memory");
    }
    if (warp >= ZEROS) {
        // ---- zeros between two odd planes: run z of a channel begins after the data of odd plane 2 z - 1
        for (int it = blockIdx.x; it < items; it += gridDim.x) {
            int ds = it % dsplit, ht = it / dsplit % htiles, n = it / dsplit / htiles, d1 = min(D, ds * dlen + dlen);
            for (int z = ds * dlen; z < (d1 == D ? D + 1 : d1); ++z) {
                for (int o = ht + (warp - ZEROS) * htiles; o < OC; o += ZW * htiles) {
                    int64_t first = (int64_t)(n * OC + o) * volume + (int64_t)(2 * z) * plane;     // element where the even plane begins
                    int64_t b = z == 0 ? first >> 1 : ((first - plane) >> 1) + H * pair, e = (first + plane) >> 1;
                    b = (b + 3) >> 2; e = (e + 3) >> 2;                                             // in units of 16 bytes
                    uint4* p = reinterpret_cast<uint4*>(y) + b;
                    int count = (int)(e - b);
#pragma unroll 4
                    for (int i = lane; i < count; i += 32) p[i] = make_uint4(0, 0, 0, 0);
                }
            }
        }
    } else if (warp >= LOADERS) {
        // ---- input planes into the ring: [slot][ic / 8][row 6][column 34][8 channels], zero outside the volume
        int t = tid - LOADERS * 32, q = 0;
        for (int it = blockIdx.x; it < items; it += gridDim.x) {
            int ds = it % dsplit, ht = it / dsplit % htiles, n = it / dsplit / htiles, h0 = ht * ROWS, d0 = ds * dlen, d1 = min(D, d0 + dlen);
            const u16* xn = x + (int64_t)n * IC * D * HW;
            for (int dd = max(0, d0 - 1); dd < min(D, d1 + 1); ++dd, ++q) {
                int slot = q % SLOTS;
                uint4* tile = reinterpret_cast<uint4*>(smem + RING_AT + slot * SLOT);
                u32 v[3][8];
#pragma unroll
                for (int z = 0; z < 3; ++z) {                   // 4 groups of channels x 6 rows x 16 pairs of columns = 3 x 128
                    int i = t + z * 128, j = i % 16, r = i / 16 % TROWS, c = i / (16 * TROWS), hh = h0 + r - 1, ww = 2 * j;
                    bool in = (unsigned)hh < (unsigned)H && ww < W;
                    const u16* p = xn + ((int64_t)(c * 8) * D + dd) * HW + hh * W + ww;
#pragma unroll
                    for (int k = 0; k < 8; ++k) {
                        if (vec) v[z][k] = in ? __ldg(reinterpret_cast<const u32*>(p + (int64_t)k * D * HW)) : 0;
                        else v[z][k] = (in ? (u32)__ldg(p + (int64_t)k * D * HW) : 0) | (in && ww + 1 < W ? (u32)__ldg(p + (int64_t)k * D * HW + 1) : 0) << 16;
                    }
                }
                if (q >= SLOTS) bar_wait(empty + 8 * slot, (q / SLOTS - 1) & 1);
#pragma unroll
                for (int z = 0; z < 3; ++z) {
                    int i = t + z * 128, j = i % 16, r = i / 16;
                    uint4* s = tile + r * PITCH + 1 + 2 * j;
                    s[0] = make_uint4(__byte_perm(v[z][0], v[z][1], 0x5410), __byte_perm(v[z][2], v[z][3], 0x5410), __byte_perm(v[z][4], v[z][5], 0x5410), __byte_perm(v[z][6], v[z][7], 0x5410));
                    s[1] = make_uint4(__byte_perm(v[z][0], v[z][1], 0x7632), __byte_perm(v[z][2], v[z][3], 0x7632), __byte_perm(v[z][4], v[z][5], 0x7632), __byte_perm(v[z][6], v[z][7], 0x7632));
                }
                if (t < 4 * TROWS * 2) tile[t / 2 * PITCH + t % 2 * (PITCH - 1)] = make_uint4(0, 0, 0, 0);
                fence_async();
                bar_arrive(full + 8 * slot);
            }
        }
    } else {
        // ---- products and the output's data; the two warpgroups take the depths in turn, so that one multiplies while the other writes
        int group = warp / 4, wq = warp % 4;
        int q = 0, unit = 0;                                    // running numbers: first plane and first depth of the item
        for (int it = blockIdx.x; it < items; it += gridDim.x) {
            int ds = it % dsplit, ht = it / dsplit % htiles, n = it / dsplit / htiles, h0 = ht * ROWS, d0 = ds * dlen, d1 = min(D, d0 + dlen);
            int rows = min(ROWS, H - h0);
            int first = max(0, d0 - 1), shift0 = q - first;     // plane p has the running number p + shift0
            for (int d = d0; d < d1; ++d, ++unit) {
                if (unit % 2 != group) continue;
                int lo = max(d - 1, 0), hi = min(d + 1, D - 1);
                for (int p = lo; p <= hi; ++p) bar_wait(full + 8 * ((p + shift0) % SLOTS), ((p + shift0) / SLOTS) & 1);
                float acc[NPOS / 2];
#pragma unroll
                for (int i = 0; i < NPOS / 2; ++i) acc[i] = 0.f;
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll 1
                for (int p = lo; p <= hi; ++p) {
                    u32 a0 = base + (d + 1 - p) * 9 * (IC * OC * 2), b0 = base + RING_AT + (p + shift0) % SLOTS * SLOT;
#pragma unroll
                    for (int k9 = 0; k9 < 9; ++k9) {
                        int shift = (2 - k9 / 3) * PITCH + 2 - k9 % 3;
#pragma unroll
                        for (int s = 0; s < 2; ++s)
                            mma(acc, desc(a0 + k9 * (IC * OC * 2) + s * 2 * OC * 16, OC * 16, 128), desc(b0 + s * 2 * CHUNK + shift * 16, CHUNK, 128), 1);
                    }
                }
                asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
                for (int i = 0; i < NPOS / 2; ++i) asm volatile("" : "+f"(acc[i]) :: "memory");
                // A plane is free after one arrival for the depth of its own number and one for the next; planes at an end of the item have only one user.
                if (lane == 0) {
                    u32 b = empty + 8 * ((d - 1 + shift0) % SLOTS), c = empty + 8 * ((d + shift0) % SLOTS), e = empty + 8 * ((d + 1 + shift0) % SLOTS);
                    if (d > first) { bar_arrive(b); if (d == d0) bar_arrive(b); }
                    bar_arrive(c);
                    if (d == d1 - 1) {
                        bar_arrive(c);
                        if (d + 1 < D) { bar_arrive(e); bar_arrive(e); }
                    }
                }
                // This warp's 16 channels. From channel to channel the first word of plane 2 d + 1 moves by volume / 2, from depth to depth by `plane`.
                int64_t e0 = (int64_t)(n * OC + wq * 16) * volume + (int64_t)(2 * d + 1) * plane;
                u32* img = reinterpret_cast<u32*>(smem + IMG_AT) + wq * 16 * IMG;
                int v4 = (int)(volume & 7), p4 = (int)(e0 & 7);
                int o = lane / 4, ph0 = ((p4 + o * v4) & 7) >> 1, ph8 = ((p4 + (o + 8) * v4) & 7) >> 1;
                bool odd = (p4 + o * v4) & 1;
                u32 sel0 = odd ? 0x1044 : 0x4410, sel1 = odd ? 0x3244 : 0x4432;
                if (unit > 0) bar_wait(image_free + 8 * wq, (unit - 1) & 1);     // the other warpgroup has read its image
                u32* i0 = img + o * IMG + ph0 + W + 1; u32* i8 = img + (o + 8) * IMG + ph8 + W + 1;
#pragma unroll
                for (int j = 0; j < NPOS / 8; ++j) {
                    int c = 8 * j % PITCH + 2 * (lane % 4), r = 8 * j / PITCH;
                    if (c >= PITCH) { c -= PITCH; ++r; }
                    int k = r * pair + c;
                    __nv_bfloat162 t0 = __floats2bfloat162_rn(acc[4 * j], acc[4 * j + 1]), t8 = __floats2bfloat162_rn(acc[4 * j + 2], acc[4 * j + 3]);
                    u32 a = *reinterpret_cast<u32*>(&t0), b = *reinterpret_cast<u32*>(&t8);
                    if (c < W) { i0[k] = __byte_perm(a, 0, sel0); i8[k] = __byte_perm(b, 0, sel0); }
                    if (c + 1 < W) { i0[k + 1] = __byte_perm(a, 0, sel1); i8[k + 1] = __byte_perm(b, 0, sel1); }
                }
                // The place within 16 bytes changes from depth to depth: clear three words on either side of every row's data.
                {
                    int oc = lane / 2, k0 = (((p4 + oc * v4) & 7) >> 1) + W + 1 + (lane & 1 ? W : -3);
#pragma unroll
                    for (int r = 0; r < ROWS; ++r)
#pragma unroll
                        for (int z = 0; z < 3; ++z) if (k0 + r * pair + z < IMG) img[oc * IMG + k0 + r * pair + z] = 0;
                }
                __syncwarp();
                int len = rows * pair;
                auto write = [&](int oc, int c) {               // 16 bytes of a channel's run
                    int64_t b = ((e0 + oc * volume) >> 1) + h0 * pair;
                    int ph = (int)b & 3;
                    bool mine = c >= (ph ? 1 : 0) && 4 * c < ph + len;
                    if (mine)
                        *reinterpret_cast<uint4*>(y + (b - ph) + 4 * c) = *reinterpret_cast<const uint4*>(img + oc * IMG + 4 * c);
                };
#pragma unroll 4
                for (int oc = 0; oc < 16; ++oc) { write(oc, lane); write(oc, lane + 32); }
                write(lane / 2, 64 + lane % 2);
                __syncwarp();
                if (lane == 0) bar_arrive(image_free + 8 * wq);
            }
            q += min(D, d1 + 1) - first;
        }
    }
}

__global__ void plain(const __nv_bfloat16* __restrict__ x, const __nv_bfloat16* __restrict__ w, const __nv_bfloat16* __restrict__ bias,
        __nv_bfloat16* __restrict__ y, int64_t total, int ic, int oc, int D, int H, int W, int OD, int OH, int OW, int K, int s, int pad, int dil) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= total) return;
    int ow = i % OW; int64_t r = i / OW;
    int oh = r % OH; r /= OH;
    int od = r % OD; r /= OD;
    int o = r % oc; int64_t n = r / oc;
    float acc = bias ? __bfloat162float(bias[o]) : 0.f;
    for (int a = 0; a < K; ++a) {
        int d = od + pad - a * dil;
        if (d < 0 || d % s || (d /= s) >= D) continue;
        for (int b = 0; b < K; ++b) {
            int h = oh + pad - b * dil;
            if (h < 0 || h % s || (h /= s) >= H) continue;
            for (int c = 0; c < K; ++c) {
                int v = ow + pad - c * dil;
                if (v < 0 || v % s || (v /= s) >= W) continue;
                for (int q = 0; q < ic; ++q)
                    acc = fmaf(__bfloat162float(x[(((n * ic + q) * D + d) * H + h) * W + v]),
                               __bfloat162float(w[((((int64_t)q * oc + o) * K + a) * K + b) * K + c]), acc);
            }
        }
    }
    y[i] = __float2bfloat16(acc);
}

int run_deconv(int64_t x, int64_t w, int64_t y, int64_t stream, int N, int D, int H, int W, int sms) {
    int htiles = (H + ROWS - 1) / ROWS, columns = N * htiles;
    int dsplit = (sms * 7 / 8 + columns - 1) / columns;         // few columns: cut the depth, too
    if (dsplit > D) dsplit = D;
    if (dsplit < 1) dsplit = 1;
    int dlen = (D + dsplit - 1) / dsplit;
    dsplit = (D + dlen - 1) / dlen;
    int items = columns * dsplit, grid = items < sms ? items : sms;
    int vec = W % 2 == 0 && x % 4 == 0;
    cudaFuncSetAttribute(deconv, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM);
    deconv<<<grid, THREADS, SMEM, (cudaStream_t)stream>>>((const u16*)x, (const u16*)w, (u32*)y, D, H, W, htiles, dsplit, dlen, items, vec);
    return (int)cudaGetLastError();
}
int run_plain(int64_t x, int64_t w, int64_t b, int64_t y, int64_t stream, int64_t total, int ic, int oc, int D, int H, int W, int OD, int OH, int OW,
              int K, int s, int pad, int dil) {
    plain<<<(unsigned)((total + 255) / 256), 256, 0, (cudaStream_t)stream>>>((const __nv_bfloat16*)x, (const __nv_bfloat16*)w, (const __nv_bfloat16*)b,
        (__nv_bfloat16*)y, total, ic, oc, D, H, W, OD, OH, OW, K, s, pad, dil);
    return (int)cudaGetLastError();
}

#include <pybind11/pybind11.h>
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("run_deconv", &run_deconv); m.def("run_plain", &run_plain); }
""".replace("@WGMMA@", WGMMA)

_extension = None


def extension():
    """Build the extension once per process."""
    global _extension
    if _extension is None:
        _extension = load_inline(name="deconv3d_v4", cpp_sources="", cuda_sources=CUDA_SRC, no_implicit_headers=True,
                           extra_cuda_cflags=["-O3", "-gencode=arch=compute_90a,code=sm_90a"])
    return _extension


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, stride=1, padding=0, dilation=1, bias=False):
        super().__init__()
        self.conv_transpose3d = nn.ConvTranspose3d(in_channels, out_channels, kernel_size=(kernel_size,) * 3, stride=stride, padding=padding,
                                                   dilation=dilation, bias=bias)
        self.k, self.s, self.p, self.dil = kernel_size, stride, padding, dilation
        self.special = (in_channels, out_channels, kernel_size, stride, padding, dilation, bool(bias)) == (32, 64, 3, 2, 1, 2, False)

    def forward(self, x):
        w, b = self.conv_transpose3d.weight, self.conv_transpose3d.bias
        if x.dim() != 5 or x.shape[1] != w.shape[0] or x.dtype != torch.bfloat16 or w.dtype != x.dtype or not x.is_cuda:
            raise ValueError("a bfloat16 CUDA tensor (N, C, D, H, W) with the model's channels is needed")
        if not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last_3d):
            raise ValueError("channels-last tensors are not served")
        x, w = x.contiguous(), w.contiguous()
        N, IC, D, H, W = x.shape
        OC = w.shape[1]
        out = [(n - 1) * self.s - 2 * self.p + self.dil * (self.k - 1) + 1 for n in (D, H, W)]
        if min(out) < 1 or x.numel() == 0:
            raise ValueError("the output would be empty")
        y = torch.empty(N, OC, *out, device=x.device, dtype=x.dtype)
        with torch.cuda.device(x.device):
            stream = torch.cuda.current_stream().cuda_stream
            if self.special and 2 <= W <= 32 and N * D * H < 2**30:
                sms = torch.cuda.get_device_properties(x.device).multi_processor_count
                e = extension().run_deconv(x.data_ptr(), w.data_ptr(), y.data_ptr(), stream, N, D, H, W, sms)
            else:
                e = extension().run_plain(x.data_ptr(), w.data_ptr(), b.data_ptr() if b is not None else 0, y.data_ptr(), stream, y.numel(),
                                    IC, OC, D, H, W, *out, self.k, self.s, self.p, self.dil)
        if e:
            raise RuntimeError(f"CUDA error {e}")
        return y
