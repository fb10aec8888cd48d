"""A step of AdamW in place, by torch's foreach form: a kernel for each operation, over all tensors of a list.

Arguments: p, g, m, v of one shape
"""

import torch

STEP, LR, BETA1, BETA2, DECAY, EPS = 10.0, 1e-3, 0.9, 0.999, 1e-2, 1e-8


def kernel_function(p, g, m, v):
    torch._foreach_mul_([p], 1 - LR * DECAY)
    torch._foreach_lerp_([m], [g], 1 - BETA1)
    torch._foreach_mul_([v], BETA2)
    torch._foreach_addcmul_([v], [g], [g], 1 - BETA2)
    root = torch._foreach_sqrt([v])
    torch._foreach_div_(root, (1 - BETA2**STEP) ** 0.5)
    torch._foreach_add_(root, EPS)
    torch._foreach_addcdiv_([p], [m], root, -LR / (1 - BETA1**STEP))
    return p, m, v
