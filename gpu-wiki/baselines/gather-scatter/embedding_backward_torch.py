"""Dense gradient of an embedding's table, by torch.

Arguments: dy (tokens, width), index (tokens), table (rows, width)
"""

import torch


def kernel_function(dy, index, table):
    return torch.ops.aten.embedding_dense_backward(dy, index, table.shape[0], -1, False)
