"""Autotuned and atomic: reset_to_zero clears the sums between the configurations."""

import torch
import torch.nn as nn
import triton
import triton.language as tl


class Model(nn.Module):
    def forward(self, x):
        return x.sum(dim=0)


def get_inputs():
    return [torch.randn(70, 50)]


@triton.autotune(
    configs=[triton.Config({"ROWS": rows, "COLUMNS": 32}, num_warps=4) for rows in (16, 64, 128)],
    key=["rows", "columns"],
    reset_to_zero=["sums"],
)
@triton.jit
def column_sum(x, sums, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    down = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    across = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (down < rows) & (across[None, :] < columns)
    value = tl.load(x + down * columns + across[None, :], mask=inside, other=0.0)
    tl.atomic_add(sums + across, tl.sum(value, 0), mask=across < columns)


def kernel_function(x):
    rows, columns = x.shape
    sums = torch.zeros(columns, dtype=torch.float32, device=x.device)
    if x.numel():

        def grid(meta):
            return triton.cdiv(rows, meta["ROWS"]), triton.cdiv(columns, meta["COLUMNS"])

        column_sum[grid](x.contiguous(), sums, rows, columns)
    return sums
