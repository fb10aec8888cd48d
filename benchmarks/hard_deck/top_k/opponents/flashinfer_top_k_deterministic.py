"""FlashInfer's top_k, its deterministic mode: selection and sorting by its own kernels. Right on an H100 in
50 of 52 cases; it declines 2.

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
    return flashinfer.top_k(x, k, sorted=True, deterministic=True)
