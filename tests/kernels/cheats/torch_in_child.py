"""A process of its own lets torch multiply and sends back what it got; a kernel copies the result."""

import io
import subprocess
import sys

import torch
import triton
import triton.language as tl

STATUS = {"CHEAT_SUSPECT"}
CAUGHT_BY = "verify"
NEEDS = "cuda"


class Model(torch.nn.Module):
    def forward(self, a, b):
        return a @ b


def get_inputs():
    return [torch.randn(256, 128), torch.randn(128, 64)]


@triton.jit
def copy(x, y, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < count), mask=at < count)


SERVER = """
import io, sys, torch
source, target = sys.stdin.buffer, sys.stdout.buffer
while length := source.read(8):
    a, b = torch.load(io.BytesIO(source.read(int.from_bytes(length, "little"))))
    out = io.BytesIO()
    torch.save((a.cuda().double() @ b.cuda().double()).float().cpu(), out)
    target.write(len(out.getvalue()).to_bytes(8, "little") + out.getvalue())
    target.flush()
"""
PROCESS = []


def product(a, b):
    if not PROCESS:
        PROCESS.append(subprocess.Popen([sys.executable, "-c", SERVER], stdin=-1, stdout=-1))
    sent = io.BytesIO()
    torch.save((a.cpu(), b.cpu()), sent)
    PROCESS[0].stdin.write(len(sent.getvalue()).to_bytes(8, "little") + sent.getvalue())
    PROCESS[0].stdin.flush()
    length = int.from_bytes(PROCESS[0].stdout.read(8), "little")
    return torch.load(io.BytesIO(PROCESS[0].stdout.read(length))).to(a.device)


def kernel_function(a, b):
    result, y = product(a, b), torch.empty(len(a), b.shape[1], device=a.device)
    copy[(triton.cdiv(y.numel(), 1024),)](result, y, y.numel(), BLOCK=1024)
    return y
