"""The times of a candidate that stands in a process of its own."""

import time

import forks_with_torch
import pytest
import torch
from kernelopt.worker import exploring, jobs, rates


class Standing(exploring.Contestant):
    """A contestant without a kernel, whose calls change inputs."""

    def __init__(self, calls: list[str]):
        self.calls, self.pristine = calls, [[None]]

    def _call(self, number):
        return lambda: self.calls.append("call")

    def _restore(self, number):
        self.calls.append("restore")


def test_a_sustained_time_is_that_of_a_warm_card_without_the_restoring(monkeypatch):
    began, calls, rounds = time.time(), [], []

    def back_to_back(call, seconds, at_once=1):
        calls.clear()
        call()
        rounds.append((list(calls), seconds, time.time()))
        us = 2.0 if calls == ["restore"] else (40.0, 30.0)[len(rounds) - 1]
        return 1e6 / us

    monkeypatch.setattr(rates, "back_to_back", back_to_back)
    taken = Standing(calls).sustain(0.5)
    assert [(names, seconds) for names, seconds, _ in rounds[:2]] == 2 * [(["restore", "call"], 0.25)]
    assert round(taken.us, 6) == 28.0
    assert began < rounds[0][2] <= taken.window[0] <= rounds[1][2] <= taken.window[1]


class Launches:
    """A stand-in for a GatedTimer: what the launches take, in turn, and what a call then takes on the GPU."""

    def __init__(self, launch_us: list[float], gpu_s: float):
        self.launch_us, self.gpu_s, self.enqueue_us, self.prepared = launch_us, gpu_s, 0.0, 0

    def prepare(self, call) -> float:
        call()
        taken = self.launch_us[self.prepared]
        self.prepared += 1
        time.sleep(taken / 1e6 + self.gpu_s)
        self.enqueue_us = max(self.enqueue_us, taken)
        return taken

    def __call__(self, call) -> tuple[float, object]:
        return 5.0, call()


@pytest.mark.parametrize(
    ("launch_us", "gpu_s", "prepared", "covered_us"),
    [
        ([60_000.0, 40.0, 30.0], 0.0, 3, 30.0),  # the first one captures a graph, say: each call was held 120 ms for it
        ([40.0], 0.05, 1, 40.0),  # a slow kernel
    ],
)
def test_a_timed_call_is_held_as_long_as_a_usual_launch_takes(monkeypatch, launch_us, gpu_s, prepared, covered_us):
    timer, calls = Launches(launch_us, gpu_s), []
    monkeypatch.setattr(exploring, "GatedTimer", lambda: timer)
    standing = Standing(calls)
    standing.timer = None
    assert standing.time(2).us == standing.time(2).us == [5.0, 5.0]
    assert (timer.prepared, timer.enqueue_us) == (prepared, covered_us)
    assert calls == ["restore", "call"] * (prepared + 4)


def test_a_contest_of_what_torch_compiles_is_a_contest_whose_process_has_loaded_the_compiler(monkeypatch):
    compiled, job = [], exploring.contest_compiled.__name__
    monkeypatch.setattr(torch, "compile", lambda function: lambda x: compiled.append((x.device.type, function(x))))
    jobs.WARM_UPS[job]("cpu")
    assert job in jobs.IMPORTS
    assert [device for device, _ in compiled] == ["cpu"]
    monkeypatch.setattr(exploring, "contest", lambda context, **given: compiled.append(given))
    jobs.JOBS[job](None, kernel="k")
    assert compiled[-1] == {"kernel": "k"}


def test_what_is_imported_before_cuda_starts_is_most_of_a_first_compilation():
    code = """if True:
        import sys, torch
        from kernelopt.worker import exploring
        before = "torch._inductor.compile_fx" in sys.modules
        exploring.import_compiler()
        print(before, "torch._inductor.compile_fx" in sys.modules, "torch._dynamo" in sys.modules)
    """
    assert forks_with_torch.run(code).stdout == "False True True\n"
