"""2-d convolution in channels last, the conversion of both inputs included, by torch.

Arguments: x (N, C, H, W), weight (outputs, C, taps, taps)
"""

import torch
from torch.nn import functional

STRIDE, PADDING = 1, 0
torch.backends.cudnn.benchmark = True


def kernel_function(x, weight):
    x, weight = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, weight))
    return functional.conv2d(x, weight, stride=STRIDE, padding=PADDING).contiguous()
