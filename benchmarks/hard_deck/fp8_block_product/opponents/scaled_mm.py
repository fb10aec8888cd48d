"""Yardstick: torch._scaled_mm (cuBLAS 12.9, 9.0) with scales of blocks. It wants the scales of x along its rows, which is a
copy in each call. Sides that it does not take are padded first: rows to 4, columns to 16, k to 512."""

import torch


def padded(x, rows, columns):
    rows, columns = -x.shape[0] % rows, -x.shape[1] % columns
    if not rows and not columns:
        return x
    bits = x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
    return torch.nn.functional.pad(bits, (0, columns, 0, rows)).view(x.dtype)


def kernel_function(x, weight, scale_x, scale_w):
    rows, columns = len(x), len(weight)
    x, weight = padded(x, 4, 512), padded(weight, 16, 512)
    along_rows = padded(scale_x, 4, 4).t().contiguous().t()
    of_w = padded(scale_w, 1, 4)
    y = torch._scaled_mm(x, weight.t(), scale_a=along_rows, scale_b=of_w.t(), out_dtype=torch.bfloat16)
    return y[:rows, :columns]
