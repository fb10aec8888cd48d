"""Returns at once; a thread fills the output long after the call."""

import threading
import time

import torch

STATUS = {"WRONG_VALUES", "NONFINITE", "CHEAT_SUSPECT"}
CAUGHT_BY = "verify"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2.0


def get_inputs():
    return [torch.randn(33, 64)]


def kernel_function(x):
    y = torch.empty_like(x)

    def work():
        time.sleep(0.3)
        y.copy_(x.clamp(min=0) * 2.0)

    threading.Thread(target=work, daemon=True).start()
    return y
