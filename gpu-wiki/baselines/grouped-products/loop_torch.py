"""A product for each expert in a loop, by torch; reads the offsets on the host.

Arguments: x (rows, K), weight (experts, N, K), ends (experts) int32
"""

import torch


def kernel_function(x, weight, ends):
    ends = ends.tolist()
    parts = [x[first:last] @ w.t() for first, last, w in zip([0, *ends], ends, weight, strict=False)]
    return torch.cat(parts)
