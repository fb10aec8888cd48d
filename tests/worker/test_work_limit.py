"""Trials of the reference on the CPU that are too much work. Each runs in a process of its own: in that of the tests
torch's compiler may be loaded, and nothing is limited then."""

import forks_with_torch

START = """
import sys, torch
from pathlib import Path
from kernelopt.case_types import Variant
from kernelopt.worker import case_maker, preparing, problem, work_limit
"""


def ran(code: str, *arguments: object) -> None:
    done = forks_with_torch.run(START + code, *arguments)
    assert done.returncode == 0, done.stdout


def test_a_trial_of_much_work_is_given_up_and_counts_as_taken(tmp_path):
    """Inputs of 16 KB, whose scores are 16 M."""
    text = (
        "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x): return (x @ x.T).exp().exp().sum(1)\n"
    )
    text += "def get_inputs(*, tokens=4096, width=64): return [torch.randn(tokens, width)]\n"
    (tmp_path / "wide.py").write_text(text)
    code = """
loaded = problem.Reference(Path(sys.argv[1]))
maker = case_maker.CaseMaker(loaded, None, "cpu")
few, much = (maker.case("default", 0, Variant("sizes", [], keywords=one)) for one in ({"tokens": 127}, {"width": 1}))
assert preparing.runs(loaded, few) is True and preparing.runs(loaded, much) is None
sound = preparing.sound_variants(maker, "default", 0, {"full": True}).sound
assert "width 64 -> 1" in {one.variant.name for one in sound}
assert "torch._dynamo" not in sys.modules
"""
    ran(code, tmp_path / "wide.py")


def test_what_dislikes_to_be_watched_runs_without_a_limit():
    code = """
def call() -> str:
    if torch.utils._python_dispatch._get_current_dispatch_mode():
        raise RuntimeError("compiled code under a mode")
    return "ran"

def caught(call, kind):
    try:
        work_limit.limited(call)
    except kind:
        return True

assert work_limit.limited(call) == "ran"
assert caught(lambda: torch.ones(work_limit.TRIAL_ELEMENTS + 1), work_limit.TooMuchWork)
assert caught(lambda: 1 / 0, ZeroDivisionError)
"""
    ran(code)


def test_what_torch_traces_runs_after_a_trial_too():
    """Of torch.cond a trace under the limit fails, and torch keeps what failed."""
    code = """
def call():
    return torch.cond(torch.tensor(True), lambda x: x + 1, lambda x: x - 1, (torch.ones(3),))

for _ in range(2):
    assert work_limit.limited(call).tolist() == [2, 2, 2]
assert call().tolist() == [2, 2, 2]
"""
    ran(code)
