"""silu(gate) * up, by Liger-Kernel.

Arguments: gate (rows, width), up (rows, width)
Package: liger-kernel
GPU: needed
Interface: https://linkedin.github.io/Liger-Kernel/Low-Level-APIs
"""

try:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction
except ImportError as error:
    raise ImportError("liger-kernel is not installed in this environment; run: pip install liger-kernel") from error


def kernel_function(gate, up):
    return LigerSiLUMulFunction.apply(gate, up)
