"""3-d max pooling, first version: one program owns a run of outputs and loads its 27 taps with masks."""
import torch
import torch.nn as nn
import triton
import triton.language as tl

BLOCK = 512


@triton.jit
def max3(a, b):
    # a NaN anywhere in the window wins, as it does in PyTorch
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def pool_kernel(x, y, D, H, W, OD, OH, OW, total, KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
                SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
                LD: tl.constexpr, LH: tl.constexpr, LW: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = o < total
    ow = (o % OW).to(tl.int32)
    oh = ((o // OW) % OH).to(tl.int32)
    od = ((o // OW // OH) % OD).to(tl.int32)
    volume = x + (o // OW // OH // OD) * D * H * W
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for kd in tl.static_range(KD):
        for kh in tl.static_range(KH):
            for kw in tl.static_range(KW):
                d = od * SD - PD + kd * LD
                h = oh * SH - PH + kh * LH
                w = ow * SW - PW + kw * LW
                inside = live & (d >= 0) & (d < D) & (h >= 0) & (h < H) & (w >= 0) & (w < W)
                best = max3(best, tl.load(volume + (d * H + h) * W + w, mask=inside, other=float("-inf")).to(tl.float32))
    tl.store(y + o, best.to(y.dtype.element_ty), mask=live)


def triple(v):
    return (v, v, v) if isinstance(v, int) else tuple(v)


def pooled(size, k, s, p, l, ceil_mode):
    """Length of the output along one dimension, by PyTorch's rule."""
    span = size + 2 * p - l * (k - 1) - 1
    n = (-(-span // s) if ceil_mode else span // s) + 1
    if ceil_mode and (n - 1) * s >= size + p:
        n -= 1
    return n


class ModelNew(nn.Module):
    def __init__(self, kernel_size, stride=None, padding=0, dilation=1, return_indices=False, ceil_mode=False):
        super().__init__()
        if return_indices:
            raise ValueError("indices are not served")
        self.k, self.p, self.l = triple(kernel_size), triple(padding), triple(dilation)
        self.s = self.k if stride is None else triple(stride)
        self.ceil_mode = ceil_mode

    def forward(self, x):
        if x.dtype != torch.bfloat16 or x.dim() not in (4, 5):
            raise ValueError("a bfloat16 tensor of 4 or 5 dimensions is needed")
        if x.dim() == 5 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last_3d):
            raise ValueError("channels-last tensors are not served")
        x = x.contiguous()
        D, H, W = x.shape[-3:]
        out = [pooled(n, k, s, p, l, self.ceil_mode) for n, k, s, p, l in zip((D, H, W), self.k, self.s, self.p, self.l)]
        if min(out) < 1:
            raise ValueError("the input is smaller than the window")
        y = torch.empty(*x.shape[:-3], *out, device=x.device, dtype=x.dtype)
        if y.numel():
            pool_kernel[(triton.cdiv(y.numel(), BLOCK),)](x, y, D, H, W, *out, y.numel(), *self.k, *self.s, *self.p, *self.l, BLOCK)
        return y
