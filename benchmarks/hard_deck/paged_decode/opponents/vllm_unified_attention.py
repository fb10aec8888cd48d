"""vLLM's Triton attention over pages, launched as its Triton backend launches it for decode: 16 segments of the keys and
a kernel that merges them while requests x kv heads stay at or below 128, one kernel above. Right on an H100 in 38 of
40 cases; it declines 2.

Written for vLLM 0.33.0: pip install vllm==0.33.0, or ../../opponents.py, which takes the kernel's files alone from the
wheel. Kept between calls: scratch and the numbers 0 to requests, by their sizes. The table is read anew in each call."""

import torch

try:
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
except ImportError as error:
    raise ImportError("vllm is not installed in this environment; run: pip install vllm==0.33.0") from error

SEGMENTS = 16  # NUM_PAR_SOFTMAX_SEGMENTS of its backend
LEAST_GRID = 128  # MIN_LAUNCH_GRID_SIZE_2D
_scratch: dict[tuple, dict[str, torch.Tensor]] = {}


def scratch(query):
    key = query.shape, query.device
    if key not in _scratch:
        requests, heads, width = query.shape
        of_a_row = torch.empty((2, requests, heads, SEGMENTS), dtype=torch.float32, device=query.device)
        _scratch[key] = {
            "cu_seqlens_q": torch.arange(requests + 1, dtype=torch.int32, device=query.device),
            "softmax_segm_output": of_a_row.new_empty((requests, heads, SEGMENTS, width)),
            "softmax_segm_max": of_a_row[0],
            "softmax_segm_expsum": of_a_row[1],
        }
    return _scratch[key]


def kernel_function(query, cache, table, lengths):
    if not all(one.is_contiguous() for one in (query, cache, table, lengths)):
        raise ValueError("all tensors must be contiguous")
    _, page, kv_heads, _ = cache.shape
    keys, values = cache.chunk(2, -1)
    out = torch.zeros_like(query)  # it writes nothing for a request without tokens
    unified_attention(
        q=query,
        k=keys,
        v=values,
        out=out,
        max_seqlen_q=1,
        seqused_k=lengths,
        max_seqlen_k=table.shape[1] * page,
        softmax_scale=query.shape[2] ** -0.5,
        causal=True,
        window_size=(-1, -1),
        block_table=table,
        softcap=0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        seq_threshold_3D=LEAST_GRID // kv_heads,
        num_par_softmax_segments=SEGMENTS,
        **scratch(query),
    )
    return out
