"""Causal mask over scores: what lies in the future becomes minus infinity, in the reference as well."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

BLOCK = 128


class Model(nn.Module):
    def forward(self, scores):
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        return scores.contiguous().masked_fill(future, float("-inf"))


def get_inputs():
    return [torch.randn(4, 11, 11)]


@triton.jit
def mask_future(scores, result, queries, keys, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    key = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(scores + row * keys + key, mask=key < keys)
    tl.store(result + row * keys + key, tl.where(key > row % queries, float("-inf"), value), mask=key < keys)


def kernel_function(scores):
    batch, queries, keys = scores.shape
    result = torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)
    if result.numel():
        grid = (batch * queries, triton.cdiv(keys, BLOCK))
        mask_future[grid](scores.contiguous(), result, queries, keys, BLOCK=BLOCK)
    return result
