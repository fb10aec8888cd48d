"""Matrix-vector product (M x K times K x 1): one program per row walks along the whole row."""

import torch
import triton
import triton.language as tl

BLOCK = 4096
WARPS = 8
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check(A, B):
    if A.ndim != 2 or B.ndim != 2 or B.shape[1] != 1 or A.shape[1] != B.shape[0]:
        raise ValueError(f"expected (M, K) times (K, 1), not {tuple(A.shape)} times {tuple(B.shape)}")
    if A.dtype not in DTYPES or A.dtype != B.dtype or A.device != B.device:
        raise ValueError(f"expected one type of {DTYPES} on one device, not {A.dtype}, {B.dtype}")


@triton.jit
def row_times_vector(a, b, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        left = tl.load(a + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        right = tl.load(b + column, mask=inside, other=0.0).to(tl.float32)
        total += left * right
    tl.store(out + row, tl.sum(total, 0).to(out.dtype.element_ty))


def kernel_function(A, B):
    check(A, B)
    A, B = A.contiguous(), B.contiguous()
    rows, columns = A.shape
    out = torch.empty((rows, 1), dtype=A.dtype, device=A.device)
    if rows:
        row_times_vector[(rows,)](A, B, out, columns, BLOCK=BLOCK, num_warps=WARPS)
    return out
