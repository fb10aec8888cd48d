"""2-d max pooling, by torch.

Arguments: x (N, C, H, W)
"""

from torch.nn import functional

SIZE, STRIDE, PADDING, DILATION = 3, 2, 1, 1


def kernel_function(x):
    return functional.max_pool2d(x, SIZE, STRIDE, PADDING, DILATION)
