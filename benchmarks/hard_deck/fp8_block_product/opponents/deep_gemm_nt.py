"""DeepGEMM's fp8 product with block scales, which it compiles for each shape at the first call (nvcc must be there). It
transposes the scales of x in each call. NOT RUN on a GPU yet.

Written for SGLang's build of it, sgl-deep-gemm 0.2.0, which loads with torch 2.11 (0.2.3 does not): pip install
sgl-deep-gemm==0.2.0, or ../../opponents.py. Rows of k that are not whole units of 16 bytes are padded first, and the
result's rows lie 16 bytes apart. Nothing is kept between calls but its compiled kernels."""

import torch

try:
    import deep_gemm
except ImportError as error:
    raise ImportError(
        "deep_gemm is not installed in this environment; run: pip install sgl-deep-gemm==0.2.0"
    ) from error


def padded(x):
    columns = -x.shape[1] % 16
    return torch.nn.functional.pad(x.view(torch.uint8), (0, columns)).view(x.dtype) if columns else x


def kernel_function(x, weight, scale_x, scale_w):
    columns = len(weight)
    y = torch.empty((len(x), columns + -columns % 8), dtype=torch.bfloat16, device=x.device)[:, :columns]
    deep_gemm.fp8_gemm_nt((padded(x), scale_x), (padded(weight), scale_w), y)
    return y
