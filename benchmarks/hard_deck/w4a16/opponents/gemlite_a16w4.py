"""gemlite's product with 4-bit weights: Triton, groups of 128 with zero points, bf16. On an H100 3 % of the elements
were off by up to 0.04 of |reference| + rms, at one row: its sums; the cause is not established. It was
timed all the same.

Written for gemlite 0.6.0.post2: pip install gemlite==0.6.0.post2, or ../../opponents.py.
Kept between calls: its packing, for the memory of packed, scales and zeros as long as it lives, as an engine packs at
load. Other weights written into that memory need `forget()`; the timing harness writes them there before each call, and
a packing in each would be timed. gemlite tunes itself at the first call for a number of rows that its file for the card
lacks, and stores bf16 -zero * scale."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef

try:
    from gemlite.helper import A16W4_HQQ_INT
except ImportError as error:
    raise ImportError("gemlite is not installed in this environment; run: pip install gemlite==0.6.0.post2") from error

_kept: dict[tuple, tuple] = {}


def forget():
    _kept.clear()


def kept(make, *tensors):
    """make(), or what it made for this memory before, if the memory was not freed since."""
    key = tuple((one.data_ptr(), one.shape) for one in tensors)
    held = _kept.get(key)
    if held is None or any(memory.expired() for memory in held[0]):
        for other in [other for other, (memories, _) in _kept.items() if any(one.expired() for one in memories)]:
            del _kept[other]
        held = _kept[key] = [StorageWeakRef(one.untyped_storage()) for one in tensors], make()
    return held[1]


def layer(packed, scales, zeros):
    """gemlite's layer: it takes a byte a weight, a row for each column of ours, and packs them itself."""
    values = torch.stack([packed & 15, packed >> 4], 1).flatten(0, 1).t().contiguous()
    device, dtype = str(packed.device), scales.dtype
    return A16W4_HQQ_INT(device=device, dtype=dtype).from_weights(
        W_q=values, scales=scales.t().contiguous(), zeros=zeros.t().contiguous()
    )


def kernel_function(x, packed, scales, zeros):
    return kept(lambda: layer(packed, scales, zeros), packed, scales, zeros)(x)
