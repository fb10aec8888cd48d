"""Stretches of calls in a row, which the parent's clock times. The timer is a stand-in that sets what launches take; no
time is measured."""

from types import SimpleNamespace

import torch
from kernelopt.worker import timers, timing
from kernelopt.worker.problem import Case

LAUNCH_US = {"a": 20.0, "b": 2000.0}  # of the kernel, and of a baseline whose launches are slow


class Launches(timers.HostTimer):
    """A HostTimer that knows what a launch of each kernel takes, and keeps the longest, as GatedTimer does."""

    def __init__(self):
        self.enqueue_us = 0.0
        self.next = iter([LAUNCH_US["b"], LAUNCH_US["a"]])

    def prepare(self, call) -> float:
        taken = next(self.next)
        self.enqueue_us = max(self.enqueue_us, taken)
        return taken


def test_a_stretch_has_as_many_calls_as_the_kernels_own_launches_allow(monkeypatch):
    monkeypatch.setattr(timing, "HostTimer", Launches)
    marks = {}
    context = SimpleNamespace(device="cpu", synchronize=lambda: None, mark=marks.__setitem__)
    paired = timing.PairedTiming(context, "default", [Case([torch.ones(2)], [], {}, None)], "")
    kernel = SimpleNamespace(load=lambda *_, **__: torch.neg)
    paired.load_baseline(kernel, alone=False)
    paired.load(kernel)
    paired._stretches(paired.call("a", 0, 0), about_us=50.0)
    assert marks["default: gpu 0 ends"] == timing.HELD_US / LAUNCH_US["a"] == 150
