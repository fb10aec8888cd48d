"""Gradient of a 3x3 convolution's weight, stride 1, padding 1, channels last: for x (images, height, width, inputs) and
the gradient of the output dy (images, height, width, outputs), both bf16, the gradient (outputs, 3, 3, inputs) in bf16:
dw[o, i, j, c] = sum over images and pixels of dy[n, h, w, o] * x[n, h + i - 1, w + j - 1, c], 0 outside of the image.

Sums are kept in fp32 and rounded to bf16 once.
"""

import torch
from torch import nn
from torch.nn import functional

IMAGES, HEIGHT, WIDTH, INPUTS, OUTPUTS = 64, 56, 56, 256, 256


class Model(nn.Module):
    def forward(self, x, dy):
        wide = torch.promote_types(x.dtype, torch.float32)
        height, width = x.shape[1:3]
        padded = functional.pad(x.to(wide), (0, 0, 1, 1, 1, 1))
        rows = dy.to(wide).flatten(0, 2).t()
        shifted = [padded[:, i : i + height, j : j + width].flatten(0, 2) for i in range(3) for j in range(3)]
        return torch.stack([rows @ part for part in shifted], 1).unflatten(1, (3, 3)).to(x.dtype)


def get_inputs(*, images=IMAGES, height=HEIGHT, width=WIDTH, inputs=INPUTS, outputs=OUTPUTS):
    x = torch.randn(images, height, width, inputs, dtype=torch.bfloat16)
    return [x, torch.randn(images, height, width, outputs, dtype=torch.bfloat16) / 64]


def get_init_inputs():
    return []


# The rounding to bf16 is 0.17 %.
COMPARE = {0: {"rms": 0.004}}
