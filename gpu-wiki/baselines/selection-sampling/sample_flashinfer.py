"""An index of each row by its softmax, by FlashInfer, which draws its own seed.

Arguments: logits (rows, columns), seed
Package: flashinfer-python
GPU: needed
Interface: https://docs.flashinfer.ai/api/sampling.html
"""

try:
    import flashinfer
except ImportError as error:
    raise ImportError(
        "flashinfer-python is not installed in this environment; run: pip install flashinfer-python"
    ) from error


def kernel_function(logits, seed):
    return flashinfer.sampling.sampling_from_logits(logits)
