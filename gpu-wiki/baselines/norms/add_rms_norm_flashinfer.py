"""residual += x, then x = RMS norm of the residual, both in place, by FlashInfer.

Arguments: x (rows, columns), residual (rows, columns), weight (columns)
Package: flashinfer-python
GPU: needed
Interface: https://docs.flashinfer.ai/generated/flashinfer.norm.fused_add_rmsnorm.html
"""

try:
    import flashinfer
except ImportError as error:
    raise ImportError(
        "flashinfer-python is not installed in this environment; run: pip install flashinfer-python"
    ) from error


EPS = 1e-6


def kernel_function(x, residual, weight):
    flashinfer.norm.fused_add_rmsnorm(x, residual, weight, EPS)
    return x
