"""x * 0.5 + 1 into new memory: which hints to the L2 make a stream faster?"""

import torch
import triton
import triton.language as tl

SPACE = {"LOAD": ["", "evict_last", "evict_first"], "STORE": ["", "evict_first", "evict_last"]}
LOAD = ""
STORE = ""
BLOCK = 8192


@triton.jit
def scale(x, y, n, LOAD: tl.constexpr, STORE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < n, eviction_policy=LOAD).to(tl.float32) * 0.5 + 1.0
    tl.store(y + at, value.to(x.dtype.element_ty), at < n, eviction_policy=STORE)


def kernel_function(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    n = x.numel()
    scale[(triton.cdiv(n, BLOCK),)](x, y, n, LOAD, STORE, BLOCK, num_warps=8)
    return y
