import torch
import torch.nn as nn


class Model(nn.Module):
    """The k largest values of each row in falling order, and where they are."""

    def forward(self, x, k):
        best = torch.topk(x, k)
        return best.values, best.indices


def get_inputs(*, rows=32, columns=16384, k=32):
    if k > columns:
        raise ValueError("a row has fewer values")
    return [torch.randn(rows, columns), k]


def rounded():
    """Logits in steps of an eighth: many equal values."""
    return [torch.round(8 * torch.randn(8, 32000)) / 8, 50]


def get_workloads():
    return {
        "vocabulary": {"rows": 1, "columns": 131072, "k": 64},
        "batch": {"rows": 64, "columns": 8192, "k": 8},
        "odd": {"rows": 16, "columns": 12000, "k": 16},
        "argmax": {"rows": 128, "columns": 4096, "k": 1},
        "many": {"rows": 1024, "columns": 32768, "k": 16},
        "rounded": rounded,
    }


def get_init_inputs():
    return []


COMPARE = {1: {"ties": "x"}}
