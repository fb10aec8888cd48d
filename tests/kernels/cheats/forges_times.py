"""Right when verified; when timed it writes a report with tiny times and leaves."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import triton
import triton.language as tl

STATUS = {"CHEAT_SUSPECT", "RUNTIME_ERROR"}
CAUGHT_BY = "timing"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2.0


def get_inputs():
    return [torch.randn(33, 64)]


@triton.jit
def double_relu(x, y, n, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(y + at, tl.maximum(tl.load(x + at, at < n), 0.0) * 2.0, at < n)


def honest(x):
    y = torch.empty_like(x)
    double_relu[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), block=1024)
    return y


def kernel_function(x):
    request = json.loads(Path(sys.argv[-1]).read_text())
    if request["job"] == "latency":
        torch.save([honest(x)], request["arguments"]["output"])
        report = {"times_us": [0.01] * 5, "clock": "host", "window": [time.time(), time.time()], "after": None}
        Path("result.json").write_text(json.dumps(report))
        os._exit(0)
    if request["job"] == "duel":
        pairs = {"a_us": [[0.01, 0.01]] * 60, "b_us": [[9.0, 9.0]] * 60, "input_sets": 8}
        window = [time.time(), time.time()]
        Path("result.json").write_text(json.dumps({**pairs, "window": window, "after": None}))
        os._exit(0)
    return honest(x)
