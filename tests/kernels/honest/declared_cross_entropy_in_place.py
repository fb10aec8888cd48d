"""The loss, and its gradient over the logits; rows of ignored targets become 0. As Liger does it."""

import torch
import triton
import triton.language as tl


class Model(torch.nn.Module):
    def forward(self, logits, target, ignore_index):
        with torch.enable_grad():
            x = logits.clone().requires_grad_()
            loss = torch.nn.functional.cross_entropy(x, target, ignore_index=ignore_index)
            (gradient,) = torch.autograd.grad(loss, x)
        logits.copy_(gradient)
        return loss.detach()


def get_inputs(*, rows=4, values=20):
    if values < 2:
        raise ValueError("one value has no loss")
    target = torch.randint(0, values, (rows,))
    target[1:2] = -100
    return [torch.randn(rows, values), target, -100]


MUTATES = ("logits",)


@triton.jit
def cross_entropy(logits, pitch, target, losses, rows, values, ignored, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    logits += row * pitch
    counted = tl.zeros((), tl.int32)
    for start in range(0, rows, BLOCK):
        others = tl.load(target + start + at, mask=start + at < rows, other=ignored)
        counted += tl.sum((others != ignored).to(tl.int32), 0)
    wanted = tl.load(target + row)
    real = wanted != ignored
    right = tl.load(logits + tl.where(real, wanted, 0))
    largest, total = tl.full((), -1e30, tl.float32), tl.zeros((), tl.float32)
    for start in range(0, values, BLOCK):
        x = tl.load(logits + start + at, mask=start + at < values, other=-1e30)
        new = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - new) + tl.sum(tl.exp(x - new), 0)
        largest = new
    for start in range(0, values, BLOCK):
        x = tl.load(logits + start + at, mask=start + at < values, other=-1e30)
        slope = (tl.exp(x - largest) / total - tl.where(start + at == wanted, 1.0, 0.0)) / counted
        tl.store(logits + start + at, tl.where(real, slope, 0.0), mask=start + at < values)
    tl.store(losses + row, tl.where(real, largest + tl.log(total) - right, 0.0) / counted)


def kernel_function(logits, target, ignore_index):
    if logits.stride(1) != 1:
        raise ValueError("rows must lie densely")
    losses = torch.empty(len(logits), dtype=logits.dtype, device=logits.device)
    sizes = {"rows": len(logits), "values": logits.shape[1], "BLOCK": 16}
    target = target.contiguous()
    # One warp: a second one might read logits that the first has overwritten.
    cross_entropy[(len(logits),)](logits, logits.stride(0), target, losses, ignored=ignore_index, **sizes, num_warps=1)
    return losses.sum()
