"""Top-k of rows: a program a row; k times it walks the row for the largest value below the last one."""

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def largest_in_turn(x, values, indices, columns, k, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    last = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
    for number in range(k):
        best = tl.full((BLOCK,), -0x7FFFFFFFFFFFFFFF, tl.int64)
        for start in range(0, columns, BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(x + row * columns + at, mask=at < columns, other=0.0)
            bits = value.to(tl.int32, bitcast=True)
            key = tl.where(
                value != value, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF)
            )  # ordered; NaN is the largest
            key = key.to(tl.int64) * 4294967296 + (2147483647 - at)  # of equal values the first
            best = tl.maximum(best, tl.where((at < columns) & (key < last), key, -0x7FFFFFFFFFFFFFFF))
        last = tl.max(best, 0)
        index = 2147483647 - (last & 0xFFFFFFFF)
        tl.store(indices + row * k + number, index)
        tl.store(values + row * k + number, tl.load(x + row * columns + index))


def kernel_function(x, k):
    x = x.contiguous()
    rows, columns = x.shape
    values = torch.empty((rows, k), dtype=x.dtype, device=x.device)
    indices = torch.empty((rows, k), dtype=torch.int64, device=x.device)
    largest_in_turn[(rows,)](
        x, values, indices, columns, k, BLOCK=min(BLOCK, triton.next_power_of_2(columns)), num_warps=8
    )
    return values, indices
