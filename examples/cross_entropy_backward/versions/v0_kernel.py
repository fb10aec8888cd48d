"""Mean cross-entropy and its gradient over the logits: a program a row, which walks over it twice."""

import torch
import triton
import triton.language as tl

IGNORED = -100
BLOCK, WARPS = 4096, 8
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def loss_and_gradient(logits, target, losses, count, classes, IGNORED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    own = tl.load(target + row)
    logits += row.to(tl.int64) * classes
    at = tl.arange(0, BLOCK)
    if own == IGNORED:
        for start in range(0, classes, BLOCK):
            tl.store(logits + start + at, tl.zeros((BLOCK,), logits.dtype.element_ty), start + at < classes)
        tl.store(losses + row, 0.0)
    else:
        chosen = tl.load(logits + own).to(tl.float32)
        top, total = -float("inf"), 0.0
        for start in range(0, classes, BLOCK):
            value = tl.load(logits + start + at, start + at < classes, -float("inf")).to(tl.float32)
            higher = tl.maximum(top, tl.max(value, 0))
            total = total * tl.exp2((top - higher) * LOG2_E) + tl.sum(tl.exp2((value - higher) * LOG2_E), 0)
            top = higher
        share = 1.0 / tl.load(count)
        for start in range(0, classes, BLOCK):
            value = tl.load(logits + start + at, start + at < classes, 0.0).to(tl.float32)
            gradient = tl.exp2((value - top) * LOG2_E) / total - tl.where(start + at == own, 1.0, 0.0)
            tl.store(logits + start + at, (gradient * share).to(logits.dtype.element_ty), start + at < classes)
        tl.store(losses + row, top + tl.log(total) - chosen)


def kernel_function(logits, target):
    if not logits.is_contiguous():
        raise ValueError("logits must be contiguous: they are changed in place")
    rows, classes = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    count = (target != IGNORED).sum().float()
    loss_and_gradient[(rows,)](
        logits, target.contiguous(), losses, count, classes, IGNORED=IGNORED, BLOCK=BLOCK, num_warps=WARPS
    )
    return losses.sum() / count
