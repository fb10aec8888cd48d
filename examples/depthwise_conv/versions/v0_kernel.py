"""Depthwise convolution, first version: one program owns a tile of one output plane and loads every tap with a mask."""
import torch
import torch.nn as nn
import triton
import triton.language as tl

ROWS, COLS = 8, 128


@triton.jit
def depthwise_kernel(x, w, bias, y, C, H, W, OH, OW, col_tiles, row_tiles, HAS_BIAS: tl.constexpr, K: tl.constexpr,
                     STRIDE: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    tile = tl.program_id(0)
    plane = (tile // (row_tiles * col_tiles)).to(tl.int64)
    row = (tile // col_tiles % row_tiles * ROWS + tl.arange(0, ROWS))[:, None]
    col = (tile % col_tiles * COLS + tl.arange(0, COLS))[None, :]
    channel = plane % C
    x += plane * H * W
    y += plane * OH * OW
    acc = tl.zeros((ROWS, COLS), tl.float32)
    if HAS_BIAS:
        acc += tl.load(bias + channel).to(tl.float32)
    for i in tl.static_range(K):
        for j in tl.static_range(K):
            h = row * STRIDE - PAD + i
            v = col * STRIDE - PAD + j
            inside = (h >= 0) & (h < H) & (v >= 0) & (v < W)
            tap = tl.load(w + (channel * K + i) * K + j).to(tl.float32)
            acc += tap * tl.load(x + h * W + v, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * OW + col, acc.to(y.dtype.element_ty), mask=(row < OH) & (col < OW))


class ModelNew(nn.Module):
    def __init__(self, in_channels, kernel_size, stride=1, padding=0, bias=False):
        super().__init__()
        self.conv2d = nn.Conv2d(in_channels, in_channels, kernel_size, stride=stride, padding=padding, groups=in_channels, bias=bias)
        self.k, self.s, self.p = kernel_size, stride, padding

    def forward(self, x):
        w, b = self.conv2d.weight, self.conv2d.bias
        if x.dim() != 4 or x.shape[1] != w.shape[0] or x.dtype != torch.bfloat16 or w.dtype != x.dtype:
            raise ValueError("a bfloat16 tensor (N, C, H, W) with the model's channels is needed")
        if not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last):
            raise ValueError("channels-last tensors are not served")
        x, w = x.contiguous(), w.contiguous()
        N, C, H, W = x.shape
        OH, OW = (H + 2 * self.p - self.k) // self.s + 1, (W + 2 * self.p - self.k) // self.s + 1
        if OH < 1 or OW < 1:
            raise ValueError("the input is smaller than the filter")
        y = torch.empty(N, C, OH, OW, device=x.device, dtype=x.dtype)
        row_tiles, col_tiles = triton.cdiv(OH, ROWS), triton.cdiv(OW, COLS)
        if y.numel():
            depthwise_kernel[(N * C * row_tiles * col_tiles,)](x, w, b, y, C, H, W, OH, OW, col_tiles, row_tiles, b is not None,
                                                               self.k, self.s, self.p, ROWS, COLS)
        return y
