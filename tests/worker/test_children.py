"""Processes that a candidate starts: none of them may use the GPU (worker.children)."""

import os
import re
import subprocess
import sys

import pytest
from kernelopt.worker import children
from kernelopt.worker.faults import CheatError


@pytest.mark.parametrize("grandchild", [False, True])
def test_a_process_that_has_the_gpu_open_is_refused(tmp_path, monkeypatch, grandchild):
    """A file of the test's own stands in for the GPU's."""
    gpu = tmp_path / "nvidia7"
    gpu.touch()
    code = f"file = open({str(gpu)!r}); print(flush=True); input()"
    if grandchild:
        code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    children.refuse_gpu_work()
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        children.refuse_gpu_work()
        monkeypatch.setattr(children, "GPU_FILE", re.compile(r"/nvidia\d+$"))
        with pytest.raises(CheatError, match="a process that the kernel started uses the GPU"):
            children.refuse_gpu_work()
        assert child.pid in children.running()
        children.refuse_gpu_work(besides=children.running())  # those that the baseline of a timing started
        child.communicate(b"\n")
    children.refuse_gpu_work()


def test_what_a_process_of_the_baseline_starts_later_is_the_baselines(tmp_path, monkeypatch):
    """As the pool of torch.compile's workers does, which starts them when they are needed."""
    gpu = tmp_path / "nvidia7"
    gpu.touch()
    monkeypatch.setattr(children, "GPU_FILE", re.compile(r"/nvidia\d+$"))
    worker = f"file = open({str(gpu)!r}); print(flush=True); input()"
    pool = f"import subprocess, sys; input(); subprocess.run([sys.executable, '-c', {worker!r}])"
    others = children.running()  # of other tests in this process
    with subprocess.Popen([sys.executable, "-c", pool], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        of_baseline = children.running()
        assert of_baseline - others == {child.pid}
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
        with pytest.raises(CheatError):
            children.refuse_gpu_work()
        children.refuse_gpu_work(besides=of_baseline)
        child.communicate(b"\n")


def test_the_files_of_a_gpu_are_known():
    assert all(children.GPU_FILE.search(path) for path in ("/dev/nvidia0", "/dev/nvidia12", "/dev/nvidia-uvm"))
    assert not any(children.GPU_FILE.search(path) for path in ("/dev/nvidiactl", "/home/nvidia0", "/dev/nvidia-caps/1"))
    assert not children.opens(os.getpid(), children.GPU_FILE) or os.path.exists("/dev/nvidia0")  # noqa: PTH110
