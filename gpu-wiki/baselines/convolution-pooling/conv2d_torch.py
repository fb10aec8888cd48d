"""2-d convolution, by torch (cuDNN, algorithms measured once).

Arguments: x (N, C, H, W), weight (outputs, C, taps, taps)
"""

import torch
from torch.nn import functional

STRIDE, PADDING = 1, 0
torch.backends.cudnn.benchmark = True


def kernel_function(x, weight):
    return functional.conv2d(x, weight, stride=STRIDE, padding=PADDING)
