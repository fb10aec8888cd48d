"""RMS norm over the last axis, by Liger-Kernel.

Arguments: x (rows, columns), weight (columns)
Package: liger-kernel
GPU: needed
Interface: https://linkedin.github.io/Liger-Kernel/Low-Level-APIs
"""

try:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
except ImportError as error:
    raise ImportError("liger-kernel is not installed in this environment; run: pip install liger-kernel") from error


EPS = 1e-6


def kernel_function(x, weight):
    return LigerRMSNormFunction.apply(x, weight, EPS)
