"""How far a verification has come: for the lines that it says meanwhile, and for who stops it."""

import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
from conftest import kernel_text
from kernelopt.device.stop_signal import Stop
from kernelopt.errors import Stopped
from kernelopt.measure import progress, verify
from kernelopt.measure.progress import Progress
from kernelopt.session.subject import KernelUnderTest


def report(begun: int, has_ended: bool = False) -> SimpleNamespace:
    """Of a process that began so many cases, a second after each other."""
    marks = {f"case {number}": (100.0 + number, 1) for number in range(begun)}
    return SimpleNamespace(marks={"another mark": (200.0, 1), **marks}, result={} if has_ended else None)


@pytest.mark.parametrize(
    ("step", "reports", "said"),
    [
        ("prepare", [], "its inputs are being made"),
        ("run", [], "0 of 9 cases have run"),
        ("run", [report(0), report(3), report(4, True)], "6 of 9 cases have run, the latest one began 8 s ago"),
        ("memcheck", [], "9 of 9 cases have run, and compute-sanitizer still watches a call"),
        ("check", [report(5)], "the oracle has compared 4 of 9 cases, the latest one began 6 s ago"),
        ("check", [report(9, True)], "the oracle has compared 9 of 9 cases"),
    ],
)
def test_a_step_says_how_many_of_its_cases_are_over(step, reports, said):
    assert progress.words(step, 9, reports, now=110.0) == said


def test_a_line_comes_every_so_often_and_none_of_a_short_verification(monkeypatch):
    sandbox, said = SimpleNamespace(reports={"run": [report(9)]}), []
    with Progress(sandbox, said.append) as following:
        following.begin("run", 9)
    assert not said
    monkeypatch.setattr(progress, "EVERY_S", 0.05)
    with Progress(sandbox, said.append) as following:
        following.begin("run", 9)
        while len(said) < 2:
            time.sleep(0.01)
    assert said[0] == "verifying for 0 s: 0 of 9 cases have run"  # those of former processes do not count
    time.sleep(0.15)
    assert len(said) <= 3


def test_a_stop_says_how_far_it_came_and_other_errors_stay():
    sandbox = SimpleNamespace(reports={})
    with pytest.raises(Stopped) as stopped, Progress(sandbox, print):
        raise Stopped("stopped after 9 s")
    assert str(stopped.value) == "stopped after 9 s, while verifying (its inputs are being made)"
    with pytest.raises(ValueError, match=r"^another$"), Progress(sandbox, print):
        raise ValueError("another")


def slow_on_tall(seconds: float) -> str:
    """The body of a kernel that is slow on the task's second workload, its third case."""
    slow = f"if x.shape[0] == 33: import time; time.sleep({seconds})"
    return f"{slow}\nreturn torch.relu(x * self.weight) * self.scale"


def test_a_long_verification_says_how_many_cases_have_run(interpreter, problem, monkeypatch):
    monkeypatch.setattr(progress, "EVERY_S", 0.2)
    problem["kernel"].write_text(kernel_text(slow_on_tall(0.3)))
    said = []
    subject = KernelUnderTest(**problem, only_these_shapes=True)
    result = verify.verify(interpreter, subject, seeds=2, say=said.append)
    assert result.status == "OK", result.summary
    cases = len(result.cases)
    assert f"on {cases} cases: seeds" in said
    assert any(f"2 of {cases} cases have run, the latest one began " in line for line in said), said


def test_a_signal_interrupts_a_verification_and_finds_out_how_far_it_is(interpreter, problem):
    problem["kernel"].write_text(kernel_text(slow_on_tall(600)))
    interpreter.reports.clear()
    stop = Stop()
    before = signal.signal(signal.SIGUSR1, stop.signalled)

    def signal_once_it_hangs() -> None:
        while not any("case 2" in one.marks for one in interpreter.reports.get("run", ())):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGUSR1)

    watching = threading.Thread(target=signal_once_it_hangs, daemon=True)
    watching.start()
    try:
        with pytest.raises(Stopped) as stopped:
            verify.verify(interpreter, KernelUnderTest(**problem, only_these_shapes=True), seeds=2)
    finally:
        signal.signal(signal.SIGUSR1, before)
        interpreter.server().end()  # it waits for the kernel that hangs
        interpreter._server = None
    assert "while verifying (2 of 4 cases have run, the latest one began " in str(stopped.value)
