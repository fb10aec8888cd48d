"""3-d max pooling on bfloat16 in Triton. For kernel 3, stride 2, padding 1, dilation 3 a program walks along the depth of one volume:
the last three odd planes, already pooled over the height, stay in registers, so every input line comes from memory once. Rows are loaded
whole (16 bytes a lane); the width is pooled last, by a gather. Other parameters and shapes take the plain kernel, 27 masked loads an output."""
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


@triton.jit
def plane_rows(x, plane, d, above, middle, below, w, live):
    """One plane, pooled over the height; the width is still whole."""
    p = x + d * plane + w
    rows = max3(tl.load(p + above, mask=live, other=0), tl.load(p + middle, mask=live, other=0))
    return max3(rows, tl.load(p + below, mask=live, other=0)).to(tl.bfloat16)


@triton.jit
def roll_kernel(x, y, D, H, W: tl.constexpr, OD, OH, OW, tiles, segments, length, ROWS: tl.constexpr, COLS: tl.constexpr):
    program = tl.program_id(0)
    first = program % segments * length
    oh = (program // segments % tiles * ROWS + tl.arange(0, ROWS))[:, None]
    volume = (program // segments // tiles).to(tl.int64)
    plane = H * W
    x += volume * D * plane
    y += volume * OD * OH * OW
    w = tl.arange(0, 2 * COLS)[None, :]
    ow = tl.arange(0, COLS)[None, :]
    rows = (oh < OH) & (w < W)
    live = (oh < OH) & (ow < OW)
    # a row outside the volume is replaced by the middle one, which is always inside: the maximum does not change
    middle = 2 * oh + 2
    above = tl.where(oh > 0, 2 * oh - 1, middle) * W
    below = tl.where(2 * oh + 5 < H, 2 * oh + 5, middle) * W
    middle = middle * W
    c0 = tl.broadcast_to(tl.where(ow > 0, 2 * ow - 1, 2), (ROWS, COLS))
    c1 = tl.broadcast_to(tl.minimum(2 * ow + 2, 2 * COLS - 1), (ROWS, COLS))
    c2 = tl.broadcast_to(tl.minimum(2 * ow + 5, 2 * COLS - 1), (ROWS, COLS))
    none = tl.full((ROWS, 2 * COLS), float("-inf"), tl.float32).to(tl.bfloat16)
    w0 = none  # odd planes 2 od - 1, 2 od + 1, 2 od + 3
    if first > 0:
        w0 = plane_rows(x, plane, 2 * first - 1, above, middle, below, w, rows)
    w1 = plane_rows(x, plane, 2 * first + 1, above, middle, below, w, rows)
    w2 = none
    if 2 * first + 3 < D:
        w2 = plane_rows(x, plane, 2 * first + 3, above, middle, below, w, rows)
    for od in range(first, tl.minimum(OD, first + length)):
        even = plane_rows(x, plane, 2 * od + 2, above, middle, below, w, rows)
        inside = 2 * od + 5 < D
        w3 = plane_rows(x, plane, tl.where(inside, 2 * od + 5, 2 * od + 2), above, middle, below, w, rows)
        v = max3(max3(even, w0), w3).to(tl.bfloat16)
        out = max3(max3(tl.gather(v, c0, 1), tl.gather(v, c1, 1)), tl.gather(v, c2, 1))
        tl.store(y + (od * OH + oh) * OW + ow, out.to(tl.bfloat16), mask=live)
        w0 = w1
        w1 = w2
        w2 = tl.where(inside, w3, none)


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
        self.k3s2p1d3 = (self.k, self.s, self.p, self.l) == ((3,) * 3, (2,) * 3, (1,) * 3, (3,) * 3) and not ceil_mode

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
        if y.numel() and self.k3s2p1d3 and W % 8 == 0 and W <= 1024 and D * H * W < 2**31 and x.data_ptr() % 16 == 0:
            ROWS, SEGMENTS = 8, 2
            tiles, length = triton.cdiv(out[1], ROWS), triton.cdiv(out[0], SEGMENTS)
            volumes = y.numel() // (out[0] * out[1] * out[2])
            roll_kernel[(volumes * tiles * SEGMENTS,)](x, y, D, H, W, *out, tiles, SEGMENTS, length, ROWS, triton.next_power_of_2(W // 2), num_warps=4)
        elif y.numel():
            pool_kernel[(triton.cdiv(y.numel(), BLOCK),)](x, y, D, H, W, *out, y.numel(), *self.k, *self.s, *self.p, *self.l, BLOCK)
        return y
