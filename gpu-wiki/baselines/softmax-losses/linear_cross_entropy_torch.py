"""Cross-entropy of a linear layer, a loss a row, by torch: the logits are stored.

Arguments: x (rows, width), weight (classes, width), target (rows)
"""

from torch.nn import functional


def kernel_function(x, weight, target):
    return functional.cross_entropy(x @ weight.t(), target, reduction="none")
