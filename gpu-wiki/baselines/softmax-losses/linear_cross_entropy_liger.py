"""Cross-entropy of a linear layer in chunks of rows, the sum of the losses, by Liger-Kernel.

Arguments: x (rows, width), weight (classes, width), target (rows)
Package: liger-kernel
GPU: needed
Interface: https://linkedin.github.io/Liger-Kernel/Low-Level-APIs
"""

try:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
except ImportError as error:
    raise ImportError("liger-kernel is not installed in this environment; run: pip install liger-kernel") from error


def kernel_function(x, weight, target):
    return LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight, x, target)
