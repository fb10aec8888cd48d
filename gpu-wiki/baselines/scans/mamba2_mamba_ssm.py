"""Mamba-2's scan in chunks, by mamba_ssm.

Arguments: x (batch, time, heads, width), dt (batch, time, heads), a (heads), b, c (batch, time, groups, state)
Package: mamba-ssm
GPU: needed
Interface: https://github.com/state-spaces/mamba
"""

try:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
except ImportError as error:
    raise ImportError("mamba-ssm is not installed in this environment; run: pip install mamba-ssm") from error


CHUNK = 256


def kernel_function(x, dt, a, b, c):
    return mamba_chunk_scan_combined(x, dt, a, b, c, CHUNK)
