"""Cross-entropy, a loss a row, by torch.

Arguments: logits (rows, classes), target (rows)
"""

from torch.nn import functional


def kernel_function(logits, target):
    return functional.cross_entropy(logits, target, reduction="none")
