"""A step of AdamW in place, by torch's fused kernel.

Arguments: p, g, m, v of one shape
Interface: torch._fused_adamw_, which takes the number of the step
"""

import torch

STEP, OPTIONS = 10.0, {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 1e-2, "eps": 1e-8}


def kernel_function(p, g, m, v):
    steps = [torch.tensor(STEP, device=p.device)]
    torch._fused_adamw_([p], [g], [m], [v], [], steps, amsgrad=False, maximize=False, **OPTIONS)
    return p, m, v
