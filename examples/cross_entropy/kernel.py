"""Loss of capped logits (cross-entropy and z-loss, one a row): nothing is waited for at the end of a row (ragged end and target come first)."""

import torch
import torch.nn as nn
import triton
import triton.language as tl

BLOCK, WARPS, UNROLL = 2048, 8, 4
POLYNOMIAL = 2  # of UNROLL
IGNORED = -100  # the target of a row without cross-entropy, as in PyTorch
CAP_LIMIT = 60.0  # e**60 times 2**40 classes still fits fp32, so no maximum has to be taken off
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
C0, C1, C2, C3 = (tl.constexpr(c) for c in (0.999928074, 0.693260989, 0.242611132, 0.055171669))  # 2**x to 7.5e-5 on [-0.5, 0.5]
SHIFT = tl.constexpr(12582912.0 + 127.0)  # 1.5 * 2**23: adding it rounds to a whole number; 127 is the bias of fp32's exponent


@triton.jit
def hardware_tanh(x):  # one instruction, relative error up to 2**-11: a quarter of bf16's own rounding
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def capped(x, cap):
    # the same instruction as in the sums: where the target outweighs all other classes its error cancels
    return cap * hardware_tanh(x * (1.0 / cap))


@triton.jit
def hardware_exp2(x):
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def add_exp2_of_product(total, x, factor):
    """total + 2**(x * factor) on the multiply-add units alone: the whole part through the exponent's bits, the rest by a cubic.

    Not a number stays not a number: the scaling is a multiplication, not an addition to the bits.
    """
    shifted = tl.fma(x, factor, SHIFT)
    rest = tl.fma(x, factor, SHIFT - shifted)
    power = tl.fma(rest, tl.fma(rest, tl.fma(rest, C3, C2), C1), C0)
    return tl.fma(power, (shifted.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True), total)


@triton.jit
def loss_of_row(logits, targets, losses, classes, cap, z_weight, IGNORED: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr, POLYNOMIAL: tl.constexpr, TAIL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start_of_row = logits + row * classes
    target = tl.load(targets + row)
    # not a number for a target outside the classes
    at_target = tl.load(start_of_row + target, mask=(target >= 0) & (target < classes), other=float("nan")).to(tl.float32)
    scale, factor = 1.0 / cap, cap * LOG2_E
    factors = tl.full((BLOCK,), factor, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    offsets = tl.arange(0, BLOCK)
    whole = classes // (BLOCK * UNROLL) * (BLOCK * UNROLL)
    # The ragged end of the row comes first, all its loads at once, and the target's logit is on its way meanwhile:
    # at the end of the row nothing is waited for any more.
    for part in tl.static_range(TAIL):
        inside = whole + part * BLOCK + offsets < classes
        value = tl.load(start_of_row + whole + part * BLOCK + offsets, mask=inside, other=0.0).to(tl.float32)
        total += tl.where(inside, hardware_exp2(hardware_tanh(value * scale) * factor), 0.0)
    for start in range(0, whole, BLOCK * UNROLL):
        for part in tl.static_range(UNROLL):
            value = tl.load(start_of_row + start + part * BLOCK + offsets, eviction_policy="evict_first").to(tl.float32)
            bounded = hardware_tanh(value * scale)
            if part < POLYNOMIAL:  # this share of the exponentials leaves the special-function unit alone
                total = add_exp2_of_product(total, bounded, factors)
            else:
                total += hardware_exp2(bounded * factor)
    log_sum = tl.log2(tl.sum(total, 0)) * LN_2
    entropy = tl.where(target == IGNORED, 0.0, log_sum - capped(at_target, cap))
    tl.store(losses + row, (entropy + z_weight * log_sum * log_sum).to(losses.dtype.element_ty))


class ModelNew(nn.Module):
    def __init__(self, cap, z_weight):
        super().__init__()
        if not 0 < cap <= CAP_LIMIT:
            raise ValueError(f"the cap must lie between 0 and {CAP_LIMIT}, not be {cap}")
        self.cap = cap
        self.z_weight = z_weight

    def forward(self, logits, targets):
        if logits.ndim != 2 or logits.numel() == 0 or logits.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"expected 16-bit logits (rows, classes), not {logits.dtype} {tuple(logits.shape)}")
        if targets.shape != logits.shape[:1] or targets.dtype != torch.int64 or targets.device != logits.device:
            raise ValueError(f"expected an int64 target for each row, not {targets.dtype} {tuple(targets.shape)}")
        logits, targets = logits.contiguous(), targets.contiguous()
        rows, classes = logits.shape
        losses = torch.empty(rows, dtype=logits.dtype, device=logits.device)
        tail = triton.cdiv(classes % (BLOCK * UNROLL), BLOCK)
        loss_of_row[(rows,)](logits, targets, losses, classes, self.cap, self.z_weight, IGNORED=IGNORED, BLOCK=BLOCK, UNROLL=UNROLL, POLYNOMIAL=POLYNOMIAL, TAIL=tail, num_warps=WARPS)
        return losses
