"""Paged decode by FlashInfer, with its plan: a real engine plans once for all layers, so look at the profile too.

Arguments: q (requests, heads, width), keys_and_values (pages, 2, page, kv heads, width), indptr (requests + 1), indices, last_page_len (requests), all int32
Package: flashinfer-python
GPU: needed
Interface: https://docs.flashinfer.ai/api/decode.html
"""

import torch

try:
    import flashinfer
except ImportError as error:
    raise ImportError(
        "flashinfer-python is not installed in this environment; run: pip install flashinfer-python"
    ) from error


def kernel_function(q, keys_and_values, indptr, indices, last_page_len):
    workspace = torch.empty(128 * 2**20, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    *_, page, kv_heads, width = keys_and_values.shape
    wrapper.plan(indptr, indices, last_page_len, q.shape[1], kv_heads, width, page, q_data_type=q.dtype)
    return wrapper.run(q, keys_and_values)
