"""Mean cross-entropy and its gradient over the logits: persistent programs, EACH a multiprocessor, walk twice over a row.

With one program a multiprocessor, 132 rows are under way, 34 MB: the second walk should find its row in the L2. Nothing
hides what such a program waits for. With two, 66 MB are under way, more than the L2 holds.
"""

import torch
import triton
import triton.language as tl

SPACE = [{"EACH": 1, "WARPS": 32}, {"EACH": 2, "WARPS": 16}]
IGNORED = -100
BLOCK = 16384
WARPS = 32
EACH = 1
LOG2_E, LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


@triton.jit
def count_targets(target, totals, rows, IGNORED: tl.constexpr, BLOCK: tl.constexpr):
    """totals: (1 / the number of rows that count, 0 for the sum of their losses)"""
    at = tl.arange(0, BLOCK)
    counted = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, rows, BLOCK):
        counted += (tl.load(target + start + at, start + at < rows, IGNORED) != IGNORED).to(tl.int32)
    share = 1.0 / tl.sum(counted, 0).to(tl.float32)
    tl.store(totals, share)
    tl.store(totals + 1, tl.where(share < float("inf"), 0.0, float("nan")))


@triton.jit
def two_walks(row_of_logits, own, totals, classes, at, BLOCK: tl.constexpr):
    """The gradient of a row over its logits, and its loss, divided by the number of rows that count."""
    chosen = tl.load(row_of_logits + own).to(tl.float32)
    top, total = tl.full((BLOCK // 8,), -1e30, tl.float32), tl.zeros((BLOCK // 8,), tl.float32)
    for start in range(0, classes, BLOCK):
        value = tl.load(row_of_logits + start + at, start + at < classes, -float("inf")).to(tl.float32) * LOG2_E
        higher = tl.maximum(top, tl.max(value, 1))
        total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(value - higher[:, None]), 1)
        top = higher
    highest = tl.max(top, 0)
    shift = highest + tl.log2(tl.sum(total * tl.exp2(top - highest), 0))
    share = tl.load(totals)
    for start in range(0, classes, BLOCK):
        value = tl.load(row_of_logits + start + at, start + at < classes, 0.0, eviction_policy="evict_first")
        softmax = tl.exp2(value.to(tl.float32) * LOG2_E - shift)
        gradient = (softmax - tl.where(start + at == own, 1.0, 0.0)) * share
        tl.store(row_of_logits + start + at, gradient.to(row_of_logits.dtype.element_ty), start + at < classes)
    tl.atomic_add(totals + 1, (shift * LN_2 - chosen) * share)


@triton.jit
def loss_and_gradient(logits, target, totals, rows, classes, IGNORED: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]  # a thread has 8 neighbours, 16 bytes
    zeros = tl.zeros((BLOCK // 8, 8), logits.dtype.element_ty)
    for turn in range(tl.cdiv(rows, tl.num_programs(0))):
        row = tl.program_id(0).to(tl.int64) + turn * tl.num_programs(0)
        own = tl.load(target + tl.minimum(row, rows - 1))
        row_of_logits = logits + row * classes
        if (row < rows) & (own == IGNORED):
            for start in range(0, classes, BLOCK):
                tl.store(row_of_logits + start + at, zeros, start + at < classes)
        elif row < rows:
            two_walks(row_of_logits, own, totals, classes, at, BLOCK)


def programs(tensor):
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count if tensor.is_cuda else 2


def kernel_function(logits, target):
    if not logits.is_contiguous():
        raise ValueError("logits must be contiguous: they are changed in place")
    (rows, classes), target = logits.shape, target.contiguous()
    totals = torch.empty(2, dtype=torch.float32, device=logits.device)
    count_targets[(1,)](target, totals, rows, IGNORED=IGNORED, BLOCK=4096)
    sizes = {"IGNORED": IGNORED, "BLOCK": BLOCK, "num_warps": WARPS}
    loss_and_gradient[(EACH * programs(logits),)](logits, target, totals, rows, classes, **sizes)
    return totals[1]
