"""Transposed 3-d convolution on bfloat16 in Triton. With kernel 3, stride 2, padding 1 and dilation 2 only odd outputs get anything (an eighth):
out[2 m + 1] = sum of x[m + 1 - k] w[k], a dense 3x3x3 convolution. A program computes some rows of it for all 64 channels on the tensor cores
and writes all words of its part of the output, zeros included: no element is written by a memset. Everything else takes the plain kernel."""
import torch
import torch.nn as nn
import triton
import triton.language as tl

POSITIONS = 128  # of the plain kernel
ROWS, WARPS = 4, 4  # rows of one program


@triton.jit
def deconv_kernel(x, w, bias, y, D, H, W, OD, OH, OW, tiles, S, PAD, DIL, IC: tl.constexpr, OC: tl.constexpr, K: tl.constexpr,
                  HAS_BIAS: tl.constexpr, BP: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr, PREC: tl.constexpr):
    n = (tl.program_id(0) // tiles).to(tl.int64)
    p = tl.program_id(0) % tiles * BP + tl.arange(0, BP)
    live = p < OD * OH * OW
    ow = p % OW
    oh = p // OW % OH
    od = p // OW // OH
    oc = tl.program_id(1) * BO + tl.arange(0, BO)
    acc = tl.zeros((BP, BO), tl.float32)
    if HAS_BIAS:
        acc += tl.load(bias + oc, mask=oc < OC, other=0.0).to(tl.float32)[None, :]
    for tap in range(K * K * K):
        # input index i with o = i * S - PAD + k * DIL
        td = od + PAD - tap // (K * K) * DIL
        th = oh + PAD - tap // K % K * DIL
        tw = ow + PAD - tap % K * DIL
        d = td // S
        h = th // S
        v = tw // S
        inside = live & (td >= 0) & (th >= 0) & (tw >= 0) & (d < D) & (h < H) & (v < W) & (d * S == td) & (h * S == th) & (v * S == tw)
        for i0 in tl.static_range(0, IC, BI):
            ic = i0 + tl.arange(0, BI)
            a = tl.load(x + ((n * IC + ic[None, :]) * D + d[:, None]) * H * W + (h * W + v)[:, None], mask=inside[:, None] & (ic < IC)[None, :], other=0.0)
            b = tl.load(w + (ic[:, None] * OC + oc[None, :]) * (K * K * K) + tap, mask=(ic < IC)[:, None] & (oc < OC)[None, :], other=0.0)
            acc = tl.dot(a, b, acc, input_precision=PREC)
    tl.store(y + (n * OC + oc[None, :]) * (OD * OH * OW) + p[:, None], acc.to(y.dtype.element_ty), mask=live[:, None] & (oc < OC)[None, :])


@triton.jit
def repack_kernel(w, out, IC: tl.constexpr, OC: tl.constexpr, T: tl.constexpr, B: tl.constexpr):
    """[IC, OC, taps] -> [taps, OC, IC]"""
    i = tl.program_id(0) * B + tl.arange(0, B)
    live = i < T * IC * OC
    ic = i % IC
    oc = i // IC % OC
    tl.store(out + i, tl.load(w + (ic * OC + oc) * T + i // IC // OC, mask=live), mask=live)


@triton.jit
def odd_kernel(x, wt, y, D, H, W, tiles, K1, IC: tl.constexpr, OC: tl.constexpr, TH: tl.constexpr, BW: tl.constexpr, BO: tl.constexpr,
                  ZB: tl.constexpr):
    """y: the output as 32-bit words. K1: words that a plane of the output touches; a word shared by two planes is zero."""
    t = tl.program_id(0) % tiles
    md = tl.program_id(0) // tiles % (D + 1)
    n = (tl.program_id(0) // tiles // (D + 1)).to(tl.int64)
    h0 = t * TH
    plane = (2 * H + 1) * (2 * W + 1)
    pair = 2 * W + 1  # words in two output rows
    oc = tl.arange(0, BO)
    k_first = h0 * pair
    k_last = tl.where(t == tiles - 1, K1, k_first + TH * pair)
    first = (n * OC + oc) * (2 * D + 1) + 2 * md  # index of the even plane, which is all zero
    if md < D:
        p = tl.arange(0, TH * BW)
        h = h0 + p // BW
        v = p % BW
        acc = tl.zeros((BO, TH * BW), tl.float32)
        ic = tl.arange(0, IC)
        xn = x + (n * IC + ic)[:, None] * D * H * W
        for tap in range(27):
            d = md + 1 - tap // 9
            hh = h + 1 - tap // 3 % 3
            vv = v + 1 - tap % 3
            inside = (hh >= 0) & (hh < H) & (vv >= 0) & (vv < W) & (d >= 0) & (d < D)
            b = tl.load(xn + (d * H * W + hh * W + vv)[None, :], mask=inside[None, :], other=0.0)
            a = tl.load(wt + (tap * OC + oc)[:, None] * IC + ic[None, :])
            acc = tl.dot(a, b, acc)
        base = (first + 1) * plane  # odd planes carry data; an odd base puts it into the high halves
        word = acc.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        word = word << ((base % 2) * 16).to(tl.int32)[:, None]
        tl.store(y + (base // 2)[:, None] + (h * pair + W + 1 + v)[None, :], word, mask=((h < H) & (v < W))[None, :])
        z = tl.arange(0, ZB)
        for c in range(0, BO):
            b1 = (((n * OC + c) * (2 * D + 1) + 2 * md + 1) * plane) // 2
            for k0 in range(k_first, k_last, ZB):
                k = k0 + z
                tl.store(y + b1 + k, tl.zeros((ZB,), tl.int32), mask=(k < k_last) & ((k % pair <= W) | (k >= H * pair)))
    z = tl.arange(0, ZB)
    for c in range(0, BO):
        b0 = (((n * OC + c) * (2 * D + 1) + 2 * md) * plane) // 2
        for k0 in range(k_first, k_last, ZB):
            tl.store(y + b0 + k0 + z, tl.zeros((ZB,), tl.int32), mask=k0 + z < k_last)


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, stride=1, padding=0, dilation=1, bias=False):
        super().__init__()
        self.conv_transpose3d = nn.ConvTranspose3d(in_channels, out_channels, kernel_size=(kernel_size,) * 3, stride=stride, padding=padding,
                                                   dilation=dilation, bias=bias)
        self.k, self.s, self.p, self.dil = kernel_size, stride, padding, dilation
        self.odd_only = (in_channels, out_channels, kernel_size, stride, padding, dilation, bool(bias)) == (32, 64, 3, 2, 1, 2, False)

    def forward(self, x):
        w, b = self.conv_transpose3d.weight, self.conv_transpose3d.bias
        if x.dim() != 5 or x.shape[1] != w.shape[0] or x.dtype != torch.bfloat16 or w.dtype != x.dtype:
            raise ValueError("a bfloat16 tensor (N, C, D, H, W) with the model's channels is needed")
        if not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last_3d):
            raise ValueError("channels-last tensors are not served")
        x, w = x.contiguous(), w.contiguous()
        N, IC, D, H, W = x.shape
        OC = w.shape[1]
        out = [(n - 1) * self.s - 2 * self.p + self.dil * (self.k - 1) + 1 for n in (D, H, W)]
        if min(out) < 1 or x.numel() == 0:
            raise ValueError("the output would be empty")
        y = torch.empty(N, OC, *out, device=x.device, dtype=x.dtype)
        if self.odd_only and W <= 32:
            packed = torch.empty(27, OC, IC, device=x.device, dtype=x.dtype)
            repack_kernel[(triton.cdiv(w.numel(), 1024),)](w, packed, IC, OC, 27, 1024)
            tiles = triton.cdiv(H, ROWS)
            odd_kernel[(N * (D + 1) * tiles,)](x, packed, y.view(-1).view(torch.int32), D, H, W, tiles, (out[1] * out[2] + 1) // 2, IC, OC, ROWS,
                                               max(16, triton.next_power_of_2(W)), OC, 512, num_warps=WARPS, num_stages=3)
            return y
        tiles = triton.cdiv(out[0] * out[1] * out[2], POSITIONS)
        BI, BO = min(64, max(16, triton.next_power_of_2(IC))), min(64, max(16, triton.next_power_of_2(OC)))
        deconv_kernel[(N * tiles, triton.cdiv(OC, BO))](x, w, b, y, D, H, W, *out, tiles, self.s, self.p, self.dil, IC, OC, self.k,
                                                        b is not None, POSITIONS, BI, BO, "ieee")
        return y
