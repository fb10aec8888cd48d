"""RMS norm over the last axis, by QuACK.

Arguments: x (rows, columns), weight (columns)
Package: quack-kernels
GPU: needed
Interface: https://github.com/Dao-AILab/quack
"""

try:
    from quack import rmsnorm
except ImportError as error:
    raise ImportError("quack-kernels is not installed in this environment; run: pip install quack-kernels") from error


EPS = 1e-6


def kernel_function(x, weight):
    return rmsnorm(x, weight, eps=EPS)
