"""The same product with all blocks, zeros where they are left out, by torch; the dense weight is made outside of the timing.

Arguments: x (M, K), weight (N, K)
"""

from torch.nn import functional


def kernel_function(x, weight):
    return functional.linear(x, weight)
