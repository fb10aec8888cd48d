"""v0: one fused kernel in plain Triton.

Every program owns one 128x128 tile of the output, loads its operands through masked pointers, accumulates in fp32 and applies bias, GELU and residual
before its only store: the product never goes to memory. Right for every shape, so later versions keep this kernel for what TMA cannot address.
"""
import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def gelu_tanh(x):
    # x * sigmoid(2u) is the tanh form of GELU with one exponential; u = sqrt(2/pi) * (x + 0.044715 x^3)
    u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x * tl.sigmoid(2.0 * u)


@triton.jit
def linear_gelu_masked(x_ptr, w_ptr, b_ptr, r_ptr, o_ptr, M, N, K, HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    pid_m = tl.program_id(0).to(tl.int64)
    pid_n = tl.program_id(1).to(tl.int64)
    rm = pid_m * BM + tl.arange(0, BM)
    rn = pid_n * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        x = tl.load(x_ptr + rm[:, None] * K + (k + rk)[None, :], mask=(rm[:, None] < M) & ((k + rk)[None, :] < K), other=0.0)
        w = tl.load(w_ptr + rn[None, :] * K + (k + rk)[:, None], mask=(rn[None, :] < N) & ((k + rk)[:, None] < K), other=0.0)
        acc = tl.dot(x, w, acc)
    if HAS_BIAS:
        acc += tl.load(b_ptr + rn, mask=rn < N, other=0.0).to(tl.float32)[None, :]
    mask = (rm[:, None] < M) & (rn[None, :] < N)
    at = rm[:, None] * N + rn[None, :]
    out = gelu_tanh(acc) + tl.load(r_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(o_ptr + at, out.to(o_ptr.dtype.element_ty), mask=mask)


def checked(x, weight, bias, residual):
    """The operands contiguous, x as a matrix, and a new output; ValueError for what the kernels do not compute."""
    K, N = weight.shape[1], weight.shape[0]
    if x.dim() < 1 or x.shape[-1] != K or tuple(residual.shape) != (*x.shape[:-1], N):
        raise ValueError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and residual {tuple(residual.shape)} do not fit together")
    tensors = [weight, residual] + ([] if bias is None else [bias])
    if x.dtype not in (torch.bfloat16, torch.float16) or any(t.dtype != x.dtype or t.device != x.device for t in tensors):
        raise ValueError("x, weight, bias and residual must share one device and one dtype, bfloat16 or float16")
    out = torch.empty(residual.shape, dtype=x.dtype, device=x.device)
    M = out.numel() // max(N, 1)
    if max(M, N, K) >= 2**30 or N > 65535 * 128:
        raise ValueError("a side of the product is too long")
    return x.reshape(M, K).contiguous(), weight.contiguous(), None if bias is None else bias.contiguous(), residual.contiguous(), out


def launch_masked(x, weight, bias, residual, out):
    (M, K), N = x.shape, weight.shape[0]
    linear_gelu_masked[(triton.cdiv(M, 128), triton.cdiv(N, 128))](x, weight, bias, residual, out, M, N, K, bias is not None, 128, 128, 64, num_warps=8, num_stages=3)


def linear_gelu(x, weight, bias, residual):
    x, weight, bias, residual, out = checked(x, weight, bias, residual)
    if out.numel():
        with torch.cuda.device_of(out):
            launch_masked(x, weight, bias, residual, out)
    return out


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x, residual):
        return linear_gelu(x, self.linear.weight, self.linear.bias, residual)
