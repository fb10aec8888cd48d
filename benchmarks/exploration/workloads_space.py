"""RMSNorm with a constant that few long rows alone run: on the default workload all are level, on few one wins and one
is wrong. For `explore_kernels.py --workload all`."""

import torch
import triton
import triton.language as tl

SPACE = [{}, {"LONG_WARPS": 8}, {"LONG_WARPS": 16}, {"LONG_COLUMNS": 8192}, {"WARPS": 1}]
WARPS = 4
LONG_WARPS = 2  # of a row of more than 8192 columns
LONG_COLUMNS = 65536  # of such a row: too few are wrong


@triton.jit
def rmsnorm(x, weight, y, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = columns < COLUMNS
    values = tl.load(x + row * COLUMNS + columns, inside, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / COLUMNS + 1e-6)
    factor = tl.load(weight + columns, inside, 0.0).to(tl.float32)
    tl.store(y + row * COLUMNS + columns, (values * scale * factor).to(tl.bfloat16), inside)


def kernel_function(x, weight):
    x, weight = x.contiguous(), weight.contiguous()
    rows, columns = x.shape
    is_long = columns > 8192
    block = min(triton.next_power_of_2(columns), LONG_COLUMNS) if is_long else triton.next_power_of_2(columns)
    y = torch.zeros_like(x)
    rmsnorm[(rows,)](x, weight, y, columns, block, num_warps=LONG_WARPS if is_long else WARPS)
    return y
