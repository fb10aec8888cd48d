"""QuACK's cross-entropy in CuTe DSL, its backward pass in the memory of the logits: the forward kernel reads them, the
backward kernel reads them again and writes. Right on an H200, on 2026-11-28.

Written for quack-kernels 0.4.1 with nvidia-cutlass-dsl 4.4.2: pip install quack-kernels==0.4.1
nvidia-cutlass-dsl-libs-base==4.4.2 apache-tvm-ffi, or ../../opponents.py. The mean is taken here: QuACK's own gives
its backward kernel gradients with a stride of 0, which that kernel refuses. Both kernels are compiled at the first
call. Nothing else is kept between calls."""

import os

import torch

os.environ.setdefault("QUACK_CACHE_ENABLED", "0")  # else QuACK writes what it compiles into the folder for temporaries

try:
    from quack import cross_entropy
except ImportError as error:
    raise ImportError(
        "quack-kernels is not installed in this environment; run: pip install quack-kernels==0.4.1 "
        "nvidia-cutlass-dsl-libs-base==4.4.2 apache-tvm-ffi"
    ) from error


def kernel_function(logits, target):
    share = (1 / (target != -100).sum()).expand(len(target)).contiguous()
    with torch.enable_grad():
        logits.requires_grad_()
        losses = cross_entropy(logits, target, ignore_index=-100, reduction="none", inplace_backward=True)
        torch.autograd.grad(losses, logits, share)  # which is the logits' memory
    return losses.detach() @ share
