"""QuACK's cross-entropy in CuTe DSL, its backward pass in the memory of the logits: the forward kernel reads them, the
backward kernel reads them again and writes. It was not run on a GPU yet.

Written for quack-kernels 0.2.4 with nvidia-cutlass-dsl 4.3.5, and of the same form in 0.6.5: pip install
quack-kernels==0.2.4 nvidia-cutlass-dsl==4.3.5 apache-tvm-ffi, or ../../opponents.py. Both kernels are compiled at the
first call. Nothing else is kept between calls."""

import torch

try:
    from quack import cross_entropy
except ImportError as error:
    raise ImportError(
        "quack-kernels is not installed in this environment; run: pip install quack-kernels==0.2.4 "
        "nvidia-cutlass-dsl==4.3.5 apache-tvm-ffi"
    ) from error


def kernel_function(logits, target):
    with torch.enable_grad():
        logits.requires_grad_()
        loss = cross_entropy(logits, target, ignore_index=-100, reduction="mean", inplace_backward=True)
        torch.autograd.grad(loss, logits)  # which is the logits' memory
    return loss.detach()
