"""A kernel and its baseline in one process: whose the processes are that they start."""

from types import SimpleNamespace

import pytest
from kernelopt.worker import timing


class Baseline:
    """A stand-in for a candidate that starts a process when it first sees a shape, as a compiler's pool may."""

    def __init__(self, starts: bool):
        self.started, self.starts = set(), starts
        self.run("default")

    def run(self, workload: str) -> None:
        self.started |= {workload} if self.starts else set()

    def processes(self) -> set:
        return set(self.started)


@pytest.mark.parametrize(("starts", "known"), [(True, {"default", "tall", "wide"}), (False, set())])
def test_what_a_baseline_starts_for_later_workloads_is_known_before_the_kernel_loads(starts, known):
    baseline, made = Baseline(starts), []
    others = (
        made.append(name) or SimpleNamespace(warmed_up=lambda one, name=name: one.run(name))
        for name in ("tall", "wide")
    )
    assert timing.processes_of(baseline, others) == known
    assert made == (["tall", "wide"] if starts else []), "other inputs take no memory where nothing is started"
