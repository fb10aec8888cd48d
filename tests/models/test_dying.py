"""A model whose process dies: one sentence with what it did, where, and what to do."""

from pathlib import Path

import pytest
from kernelopt.errors import TimedOut
from kernelopt.models import jobs

ON_CPU = ("--device", "cpu-interpreter")
MODEL = """
import os, signal, time, torch, torch.nn as nn
class Own(nn.Module):
    def forward(self, x):
        DIES
        return x * 2
def load(): return nn.Sequential(nn.Linear(4, 4), Own())
def inputs(): return [torch.randn(2, 4)]
"""


def dying(folder: Path, how: str) -> Path:
    (folder / "model.py").write_text(MODEL.replace("DIES", how))
    return folder / "model.py"


DEATHS = {
    "SIGSEGV": "model.py:5 (forward); code outside of Python used memory that is not its own",
    "SIGABRT": "model.py:5 (forward); run the model by itself",
    "SIGKILL": "workload default; most likely the machine had no memory left",
}


@pytest.mark.parametrize("name", DEATHS)
def test_a_signal_is_told_with_the_phase_the_place_and_a_mend(tmp_path, run_here, name):
    done = run_here("find_kernels.py", dying(tmp_path, f"os.kill(os.getpid(), signal.{name})"), *ON_CPU)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"the process died of {name} while it was running eager steps, workload default" in done.stderr
    assert DEATHS[name] in done.stderr


def test_a_cut_names_the_phase_of_a_process_that_ends(tmp_path, run_here):
    model = dying(tmp_path, "print('no licence', flush=True); os._exit(3)")
    done = run_here("cut_problem.py", model, "--module", "0", "--out", tmp_path / "r.py", *ON_CPU)
    assert done.returncode == 1 and not (tmp_path / "r.py").exists()
    assert "exit code 3 and left no result while it was running the model, workload default; it said: no licence" in (
        done.stderr
    )


def test_a_time_out_names_the_phase(tmp_path, interpreter):
    arguments = {"model": str(dying(tmp_path, "pass")), "module": "", "workload": None}
    jobs.run(interpreter, "operators", arguments, 60)  # after it the server has started
    dying(tmp_path, "time.sleep(60)")
    with pytest.raises(TimedOut, match="in 2 s: it was still running the model, workload default"):
        jobs.run(interpreter, "operators", arguments, 2)


KERNEL = """
import ctypes
def kernel_function(x):
    return ctypes.string_at(8)
"""
REFERENCE = """
import torch, torch.nn as nn
class Model(nn.Module):
    def forward(self, x): return x * 2
def get_inputs(): return [torch.randn(2, 4)]
"""


def test_a_kernel_that_reads_foreign_memory_is_named(ready, tmp_path, run_here):
    ready.kernel.write_text(KERNEL)
    ready.reference.write_text(REFERENCE)
    model = dying(tmp_path, "pass")
    done = run_here("put_back.py", ready.root, model, "--candidate", "--at", "1", *ON_CPU)
    assert done.returncode == 1
    assert "while it was running the model with the kernel, workload default, at kernel.py:4" in done.stderr


def test_without_a_stack_there_is_no_place(tmp_path):
    assert jobs.place_in(tmp_path / "stack.txt", [tmp_path]) is None
    (tmp_path / "stack.txt").write_text('  File "/usr/lib/torch/x.py", line 3 in run\n  File "/a/m.py", line 4 in f\n')
    assert jobs.place_in(tmp_path / "stack.txt", [Path("/a")]) == "m.py:4 (f)"
    assert jobs.place_in(tmp_path / "stack.txt", [Path("/b")]) == "x.py:3 (run)"
