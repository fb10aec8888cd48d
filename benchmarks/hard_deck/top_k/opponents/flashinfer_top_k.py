"""FlashInfer's top_k: radix selection, then torch.sort of the k values. Right on an H100; torch's sort does 49 % of
the work, so verify_kernel.py calls it a suspect.

Written for flashinfer-python 0.7.2.post1: pip install flashinfer-python==0.7.2.post1, or ../../opponents.py.
Nothing is kept between calls but FlashInfer's own scratch."""

try:
    import flashinfer
except ImportError as error:
    raise ImportError(
        "flashinfer-python is not installed in this environment; run: pip install flashinfer-python==0.7.2.post1"
    ) from error


def kernel_function(x, k):
    if not x.is_contiguous():
        raise ValueError("x must be contiguous")
    return flashinfer.top_k(x, k, sorted=True)
