"""Kernels that are compiled before their first call. No GPU is needed: none of these processes uses one. That a call on a
GPU finds what they built was seen on one (docs/exploring.md)."""

import signal
import threading
import time

import pytest
from conftest import FIXTURES, REFERENCE
from kernelopt.compiling import ahead
from kernelopt.device import programs
from kernelopt.device.stop_signal import Stop
from kernelopt.errors import Stopped
from kernelopt.hardware import targets

KERNEL = """
import torch, triton, triton.language as tl
@triton.jit
def scaled(x, y, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, at < n) * 2, at < n)
class ModelNew(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(16))
    def forward(self, x):
        y = torch.empty_like(x)
        scaled[(1,)](x, y, x.numel(), BLOCK=128)
        return y
"""
H100 = targets.of_architecture("sm_90", [], {})


@pytest.fixture
def sandboxed(interpreter, compiling_server, monkeypatch):
    """The shared sandbox, with a server in which Triton compiles, as on a machine with a GPU."""
    monkeypatch.setattr(interpreter, "server", lambda: compiling_server)
    return interpreter


def case_of(folder) -> dict:
    (folder / "reference.py").write_text(REFERENCE)
    return {"reference": str(folder / "reference.py"), "workload": "default", "dtype": None}


def compiled(sandbox) -> set[str]:
    return {path.parent.name for path in (sandbox.caches / "triton").rglob("*.cubin")}


def test_what_a_call_would_launch_is_in_the_caches_of_the_sandbox(tmp_path, sandboxed):
    files = [tmp_path / f"{name}.py" for name in ("one", "fails", "two")]
    for file, text in zip(files, (KERNEL, "raise ValueError", KERNEL.replace("* 2", "* 3")), strict=True):
        file.write_text(text)
    before = compiled(sandboxed)
    begun = ahead.Ahead(sandboxed, files, case_of(tmp_path), H100)
    begun.wait(60)
    begun.end()
    assert len(compiled(sandboxed) - before) == 2


@pytest.mark.skipif(programs.find("cuobjdump") is None, reason="needs cuobjdump")
def test_a_hang_is_explained_by_the_code(tmp_path, sandboxed, monkeypatch):
    begun = ahead.Ahead(sandboxed, [], {}, H100)
    file = tmp_path / "k.py"
    assert begun.why_endless(file) is None
    begun._compiled[file] = {"cuda": ["setmaxnreg.cubin"], "log": ""}, FIXTURES / "disassembly"
    assert begun.why_endless(file).startswith("waits may never end: a launch gives 3 warpgroups 168 registers a thread")
    monkeypatch.setattr(ahead.reading, "kernels_in", lambda path: (_ for _ in ()).throw(OSError("it was removed")))
    assert begun.why_endless(file) is None
    begun.end()


def test_a_stop_ends_the_wait_for_what_is_compiled_ahead(tmp_path, sandboxed, monkeypatch):
    file = tmp_path / "k.py"
    file.write_text("import time; time.sleep(600)")
    begun = ahead.Ahead(sandboxed, [file], case_of(tmp_path), H100)
    monkeypatch.setattr(sandboxed, "stop", stopped := Stop())
    stopped.interrupts = False
    threading.Timer(0.5, stopped.signalled, (signal.SIGTERM, None)).start()
    started = time.monotonic()
    with pytest.raises(Stopped):
        begun.wait(60)
    begun.end()
    assert time.monotonic() - started < 10


def test_those_that_still_run_are_ended_and_the_rest_is_not_begun(tmp_path, sandboxed, monkeypatch):
    monkeypatch.setattr(ahead.os, "cpu_count", lambda: 1)
    marks = [tmp_path / name for name in ("first", "second")]
    for mark in marks:
        mark.with_suffix(".py").write_text(f"import time; time.sleep(600)  # {mark}")
    begun = ahead.Ahead(sandboxed, [mark.with_suffix(".py") for mark in marks], case_of(tmp_path), H100)
    begun.wait(0.5)
    started = time.monotonic()
    begun.end()
    assert time.monotonic() - started < 10 and [one.done() for one in begun._running] == [True, True]
