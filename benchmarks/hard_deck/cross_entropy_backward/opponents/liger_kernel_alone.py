"""Yardstick: Liger's Triton kernel as its own launcher calls it, without what surrounds it: no synchronisation, no
checks of the targets, no autograd. It takes the number of rows that count from the task's text."""

import torch
import triton
from liger_kernel.ops import cross_entropy as liger


def kernel_function(logits, target):
    rows, classes = logits.shape
    losses = torch.zeros(rows, dtype=logits.dtype, device=logits.device)
    liger.liger_cross_entropy_kernel[(rows,)](
        X_ptr=logits,
        X_stride=logits.stride(0),
        Y_ptr=target,
        Y_stride=1,
        weight_ptr=None,
        loss_ptr=losses,
        z_loss_ptr=None,
        loss_stride=1,
        token_accuracy_ptr=None,
        token_accuracy_stride=0,
        predicted_tokens_ptr=None,
        predicted_tokens_stride=0,
        n_cols=classes,
        n_non_ignore=rows - len(range(1, rows, 64)),
        sum_non_ignore_weight=rows,
        weight_sum=0.0,
        ignore_index=-100,
        lse_square_scale=0.0,
        label_smoothing=0.0,
        reduction="mean",
        softcap=None,
        RETURN_Z_LOSS=False,
        RETURN_TOKEN_ACCURACY=False,
        RETURN_PREDICTED_TOKENS=False,
        BLOCK_SIZE=min(liger.MAX_FUSED_SIZE, triton.next_power_of_2(classes)),
        HAS_WEIGHT=False,
        HAS_SOFTCAPPING=False,
        HAS_GRADIENTS=True,
        num_warps=32,
    )
    return losses.sum()
