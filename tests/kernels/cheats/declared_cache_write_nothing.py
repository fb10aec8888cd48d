"""Writes nothing: a kernel without effect."""

import torch
import triton
import triton.language as tl

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"


class Model(torch.nn.Module):
    def forward(self, cache, keys, slots):
        real = slots >= 0
        cache.view(-1, cache.shape[-1])[slots[real].long()] = keys[real]


def get_inputs(*, tokens=9, pages=5, page=4, width=24):
    if tokens > pages * page:
        raise ValueError("more tokens than slots")
    slots = torch.randperm(pages * page)[:tokens].int()
    slots[tokens // 2] = -1
    return [torch.randn(pages, page, width), torch.randn(tokens, width), slots]


MUTATES = ("cache",)
LAYOUTS = "contiguous"


@triton.jit
def write(cache, keys, slots, width, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    slot = tl.load(slots + token).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    real = slot + tl.zeros_like(at) < -9
    row = tl.load(keys + token * width + at, mask=inside, other=0.0)
    tl.store(cache + slot * width + at, row, mask=inside & real)


def kernel_function(cache, keys, slots):
    if not (cache.is_contiguous() and keys.is_contiguous() and slots.is_contiguous()):
        raise ValueError("contiguous inputs only")
    write[(len(slots),)](cache, keys, slots, cache.shape[-1], BLOCK=triton.next_power_of_2(cache.shape[-1]))
