"""The K largest of each row, in falling order, by torch.

Arguments: scores (rows, columns)
"""

import torch

K = 8


def kernel_function(scores):
    best = torch.topk(scores, K)
    return best.values, best.indices
