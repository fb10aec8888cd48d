"""FlashInfer's fused_add_rmsnorm, which overwrites x and so gets a copy, then scales and e4m3 by torch.compile: FlashInfer
has no fused kernel with a scale a token. Timed on an H100; verify_kernel.py called it a suspect there, for it
walks frames.

Written for flashinfer-python 0.7.2.post1: pip install flashinfer-python==0.7.2.post1, or
../../opponents.py. FlashInfer's CUDA kernel is asked for, for its other one needs CuTe DSL.
Nothing is kept between calls."""

import os

import torch

os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
try:
    import flashinfer
except ImportError as error:
    raise ImportError(
        "flashinfer-python is not installed in this environment; run: pip install flashinfer-python==0.7.2.post1"
    ) from error


@torch.compile
def quantised(normed):
    scale = normed.float().abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448.0
    return (normed.float() / scale).to(torch.float8_e4m3fn), scale


def kernel_function(x, residual, weight):
    if not all(one.is_contiguous() for one in (x, residual, weight)):
        raise ValueError("all tensors must be contiguous")
    normed = x.clone()
    flashinfer.fused_add_rmsnorm(normed, residual, weight, 1e-6)
    return quantised(normed)
