"""What makes measured times unbelievable, as pure functions of recorded times, and the tool on the CPU."""

import contextlib
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from conftest import REFERENCE, TIMING, kernel_text, with_changes
from kernelopt.device import gpu_watch
from kernelopt.hardware.card import Card, GpuState, MaxClocks, Spread
from kernelopt.measure import least_work, raw_times, timing
from kernelopt.measure.latency import Latency, Timing
from kernelopt.measure.oracle import Oracle
from kernelopt.measure.raw_times import RawTimes
from kernelopt.session import subject


def raw(**changes) -> RawTimes:
    """Times of an honest kernel of 100 us on an H200."""
    honest = {
        "clock": "triton.testing.do_bench",
        "window": [0.0, 1.0],
        "empty_us": 1.3,
        "outputs": [],
        "gpu_state": None,
        "a_us": [[100.0, 101.0]] * 60,
        "b_us": [[200.0, 201.0]] * 60,
        "alone_us": [200.0] * 8,
        "bench_us": [102.0] * 9,
        "wall_us": {"gpu": 98.0, "fresh": 99.0, "call": 99.0},
        "after": {"call_us": 100.0, "stray_us": 6.0, "idle_us": 6.0},
        "sets": 8,
        "overwritten": False,
        "differing": 0,
        "first_set_us": [100.0, 101.0],
    }
    return RawTimes(**{**honest, **changes})


def test_an_honest_kernel_is_believed():
    assert raw_times.suspicious(raw(), on_gpu=True) is None
    assert raw_times.suspicious(raw(b_us=None, alone_us=[]), on_gpu=True) is None


def test_inputs_that_hold_more_work_than_others_are_no_reason_to_disbelieve():
    """Of packed documents: a long one has more scores. Two clocks are compared on the same inputs."""
    uneven = {"a_us": [[310.0, 311.0], [497.0, 498.0]] * 30, "sets": 2, "bench_us": [499.0] * 9}
    uneven |= {"wall_us": {"gpu": 496.0, "fresh": 312.0, "call": 499.0}}
    assert raw_times.suspicious(raw(**uneven), on_gpu=True) is None
    few = {"a_us": [[295.0, 296.0]] * 4, "sets": 8, "first_set_us": [499.0, 500.0]}
    assert raw_times.suspicious(raw(**uneven | few), on_gpu=True) is None  # no round on the first set
    for changed in (
        {"bench_us": [250.0] * 9},
        {"wall_us": {"gpu": 496.0, "fresh": 497.0, "call": 499.0}},
    ):
        assert raw_times.suspicious(raw(**uneven | changed), on_gpu=True)


@pytest.mark.parametrize("honest", [{0}, {0, 3}])
def test_the_times_on_all_sets_have_a_witness(honest):
    """A call of 1000 us that tells 300 on most sets of inputs, so that its median is 300."""
    told = [[1000.0] * 2 if (at + 1) % 8 in honest else [300.0] * 2 for at in range(64)]
    forged = {"a_us": told, "first_set_us": [1000.0] * 2, "bench_us": [1000.0] * 9}
    forged["wall_us"] = {"gpu": 1000.0, "fresh": 1000.0, "call": 1000.0}
    assert "on memory that is new to it" in raw_times.suspicious(raw(**forged), on_gpu=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"wall_us": {"gpu": 500.0, "fresh": 100.0, "call": 500.0}}, "by the clock of another process"),
        ({"wall_us": {"gpu": 10.0, "fresh": 500.0, "call": 500.0}}, "by the clock of another process"),
        ({"a_us": [[900.0, 100.0]] * 7 + [[100.0, 100.0]] * 53}, "it keeps results"),
        ({"alone_us": [100.0] * 8}, "became slower"),
        ({"bench_us": [50.0] * 9}, "50 us in do_bench"),
        ({"after": {"call_us": 100.0, "stray_us": 60.0, "idle_us": 6.0}}, "another stream"),
    ],
)
def test_times_that_cannot_be_believed_are_told(changes, said):
    assert said in raw_times.suspicious(raw(**changes), on_gpu=True)


@pytest.mark.parametrize(
    ("call", "stray", "idle", "hidden"),
    [
        (10, 8, 5, 0),
        (126, 21, 19, 0),
        (300, 12, 6, 0),
        (2000, 90, 6, 0),
        (5, 17, 6, 1),
        (126, 41, 20, 1),
        (2000, 500, 6, 1),
    ],
)
def test_work_after_the_end_of_a_call_is_told_from_an_idle_gpu(call, stray, idle, hidden):
    times = raw(
        bench_us=[call],
        after={"call_us": call, "stray_us": stray, "idle_us": idle},
        a_us=[[call, call]] * 60,
        wall_us={"gpu": call, "fresh": call},
    )
    assert ("another stream" in (raw_times.suspicious(times, on_gpu=True) or "")) == bool(hidden)


@pytest.mark.parametrize(("stalls", "believed"), [(0, True), (2, True), (3, False)])
def test_a_process_that_cannot_be_believed_is_repeated_and_counts_for_nothing(monkeypatch, stalls, believed):
    """A stand-in for the GPU: the host stalls in the first processes. No process starts while another is timed."""
    answers: list = [raw(wall_us={"gpu": 2749.0, "fresh": 99.0, "call": 99.0})] * stalls + [raw()] * 4

    class StandIn:
        gpu, ready = "stand-in", False
        forked_ahead = property(lambda self: self)

        def until_ready(self, job):
            self.ready = job == "measure"
            return 3

        def run(self, *_):
            assert self.ready
            self.ready = False
            return answers.pop(0)

    monkeypatch.setattr(timing.gpu_watch, "Watch", contextlib.nullcontext)
    monkeypatch.setattr(
        timing, "believed_times", lambda times, watch, on_gpu, _: timing.refuse(times, on_gpu) or {"default": times}
    )
    if believed:
        assert timing.one_process(StandIn(), {}, 60, []) == {"default": raw()} and len(answers) == 3
    else:
        with pytest.raises(timing.KernelFailed, match="2749 us by the clock of another process"):
            timing.one_process(StandIn(), {}, 60, [])


def test_warnings_name_what_a_reader_should_know():
    state = GpuState(1, None, None, None, None, throttle_reasons=("sw_power_cap",), foreign_processes=(77,))
    troubled = replace(TIMING, cupti_us=80.0, call_us=30.0, warm_us=8.0, graph_us=9.0, gpu_state=state)
    said = " ".join(troubled.warnings())
    assert all(word in said for word in ("clocks disagree", "launch-bound", "CUDA graph", "sw_power_cap", "77"))
    assert TIMING.warnings() == []
    apart = replace(TIMING, cupti_us=92.0)
    assert apart.warnings() and not replace(apart, kernels=[{}] * 3).warnings()


def test_a_warm_time_that_its_clock_cannot_tell_is_not_told():
    """On an H200 a call of 4.6 us, 34 us on the host, had 0.00 us warm."""
    short = replace(TIMING, call_us=34.3, warm_us=0.0, graph_us=5.6)
    assert short.warm_words is None and TIMING.warm_words.endswith(" us")
    assert short.warnings() == ["launch-bound: a call takes 34.3 us, 5.6 us from a CUDA graph"]


def test_a_timing_comes_back_from_its_json():
    state = GpuState(4, Spread(900, 1600, 1800), None, None, None, ("sw_power_cap",), (77,))
    for timed in (TIMING, replace(TIMING, gpu_state=state)):
        assert Timing.from_json(json.loads(json.dumps(timed.to_json()))) == timed


def test_processes_that_descend_from_this_one_are_not_foreign():
    import os

    assert gpu_watch.foreign([os.getpid()]) == [] and gpu_watch.foreign([os.getpid(), 1]) == [1]
    assert gpu_watch.foreign([1 << 22]) == []  # the one unknown number in a container is our own
    assert gpu_watch.foreign([1 << 22, (1 << 22) + 1]) == [(1 << 22) + 1]
    assert gpu_watch.foreign([1 << 22, (1 << 22) + 1], own=2) == []


def test_the_parent_times_the_stretches_by_its_own_clock():
    from kernelopt.device.outcomes import Outcome

    marks = {"w: sleep 0 begins": (0.0, 0), "w: sleep 0 ends": (0.010, 0), "w: gpu 0 begins": (1.0, 10)}
    marks |= {"w: gpu 0 ends": (1.011, 10), "w: call begins": (2.0, 10), "w: call ends": (2.003, 10)}
    marks |= {"w: fresh 0 begins": (3.0, 5), "w: fresh 0 ends": (3.011, 5)}
    outcome = Outcome({}, 0, None, False, 1.0, "", marks)
    assert raw_times.stretches(outcome, "w") == pytest.approx({"gpu": 100.0, "fresh": 200.0, "call": 300.0})
    marks |= {"w: sleep 1 begins": (4.0, 0), "w: sleep 1 ends": (4.030, 0), "w: gpu 1 begins": (5.0, 5)}
    marks |= {"w: gpu 1 ends": (5.031, 5), "w: fresh 1 begins": (6.0, 5), "w: fresh 1 ends": (6.0302, 5)}
    again = raw_times.stretches(Outcome({}, 0, None, False, 1.0, "", marks), "w")
    assert again == pytest.approx({"gpu": 100.0, "fresh": 40.0, "call": 300.0})


def on(interpreter, name: str, **max_clocks) -> SimpleNamespace:
    """The interpreter's sandbox with a stand-in for a GPU, as far as a limit needs it."""
    return SimpleNamespace(gpu=Card(name, "GPU-0", "580.1", MaxClocks(**max_clocks)), run=interpreter.run)


def test_a_time_that_no_hardware_allows_is_told(problem, session, interpreter):
    problem["reference"].write_text(REFERENCE.replace("torch.randn(8, 16)", "torch.randn(1 << 24, 16)"))
    kernel = subject.KernelUnderTest(problem["kernel"], problem["reference"])
    limit = least_work.limit_us(on(interpreter, "NVIDIA H200"), kernel, "default", 60)
    assert 300 < limit < 450  # 2 GiB and some, less what the L2 holds, at the documented 4.8 TB/s
    assert least_work.limit_us(on(interpreter, "Some GPU"), kernel, "default", 60) is None
    faster = least_work.limit_us(on(interpreter, "NVIDIA H200", memory_clock_mhz=2 * 3201), kernel, "default", 60)
    assert faster == pytest.approx(limit / 2)
    h200 = on(interpreter, "NVIDIA H200", sm_clock_mhz=1980)
    works = [{"flops": 10**14, "dtype": "bf16"}, {"flops": 10**14 // 2, "dtype": "bf16"}]
    works.append({"flops": 10**14, "dtype": "fp8"})
    by_hand = [least_work.limit_us(h200, kernel, "default", 60, given) for given in works]
    assert by_hand[0] > limit and by_hand[1:] == pytest.approx([by_hand[0] / 2] * 2, rel=1e-3)


def test_work_that_was_given_by_hand_counts(session, interpreter):
    given = {"flops": 0, "bytes_in": None, "bytes_out": None, "bytes_min": 10**9, "dtype": "fp32", "source": "given"}
    session.update_readme(with_changes(session.task(), work={"default": given}), {})
    kernel, h200 = subject.of_workspace(session, session.task()), on(interpreter, "NVIDIA H200")
    assert 150 < least_work.limit_us(h200, kernel, "default", 60) < 10**9 / 4.8e6
    assert least_work.limit_us(h200, kernel, "tall", 60) is None


def test_a_kernel_that_is_wrong_only_when_timed_is_refused(problem, run_here):
    body = (
        "self.calls = getattr(self, 'calls', 0) + 1\n"
        "return torch.clamp(x * self.weight, min=0) * self.scale * (1.5 if self.calls > 3 else 1.0)"
    )
    problem["kernel"].write_text(kernel_text(body))
    arguments = ["--kernel", problem["kernel"], "--reference", problem["reference"], "--device", "cpu-interpreter"]
    done = run_here("measure_kernel_time.py", *arguments)
    assert done.returncode == 1 and "WRONG_VALUES: wrong when timed" in done.stderr


ANY_ORDER = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return x.nonzero().flatten()

def get_inputs():
    return [torch.randint(0, 2, (64,)).float()]

COMPARE = {0: {"set": -1}}
"""
SHUFFLED = """
import torch
calls, seen = 0, set()

def kernel_function(x):
    global calls
    calls, new = calls + 1, str(x.tolist()) not in seen
    seen.add(str(x.tolist()))
    found = torch.arange(len(x))[x > 0]
    RETURN
"""


@pytest.mark.parametrize(
    ("returned", "fault"),
    [
        ("return found[torch.randperm(len(found))]", None),  # as with atomics
        ("return found + 64 * (calls % 2)", "wrong when timed"),
        ("return found + 64 * new", "wrong when timed"),  # the later calls, which differ from the first, are right
    ],
)
def test_a_result_that_differs_from_the_first_is_compared_as_the_task_declares(returned, fault, interpreter, tmp_path):
    reference, kernel = tmp_path / "reference.py", tmp_path / "kernel.py"
    reference.write_text(ANY_ORDER)
    kernel.write_text(SHUFFLED.replace("RETURN", returned))
    sets = timing.inputs(interpreter, reference, None, ["default"])
    timed = timing.measure(interpreter, kernel, None, sets, warmup_ms=1, rep_ms=2, timeout_s=60)["default"]
    found = Oracle(interpreter, reference).fault_of_timed([timed.outputs])
    assert found is None if fault is None else fault in found.message


RAGGED = """
import torch

class Model(torch.nn.Module):
    def forward(self, x): return x * 2

def get_inputs():
    return [torch.randn(int(torch.randint(8, 64, ())), 4)]
"""


def test_an_opponent_may_start_a_process(interpreter, tmp_path):
    """torch.compile's workers are some. That a kernel's may not use the GPU is held on a GPU (test_gpu.py)."""
    reference, kernel, opponent = (tmp_path / name for name in ("reference.py", "kernel.py", "opponent.py"))
    reference.write_text(RAGGED)
    kernel.write_text("def kernel_function(x): return x * 2\n")
    started = "import subprocess\nheld = subprocess.Popen(['sleep', '60'])\n"
    opponent.write_text(started + kernel.read_text())
    sets = timing.inputs(interpreter, reference, None, ["default"])
    timed = timing.measure(interpreter, kernel, opponent, sets, warmup_ms=1, rep_ms=2, timeout_s=60)["default"]
    assert timed.runs and timed.runs[0].b_us


def test_a_summary_is_that_of_the_statistics_module_and_one_time_is_all_of_them():
    assert Latency.of([4.0, 1.0, 3.0, 2.0]).to_json() == {"median": 2.5, "p20": 1.6, "p80": 3.4, "n": 4}
    assert Latency.of([3.0]) == Latency(3.0, 3.0, 3.0, 1)


def test_inputs_whose_size_each_seed_draws_are_timed(interpreter, tmp_path):
    reference, kernel = tmp_path / "reference.py", tmp_path / "kernel.py"
    reference.write_text(RAGGED)
    kernel.write_text("def kernel_function(x): return x * 2\n")
    sets = timing.inputs(interpreter, reference, None, ["default"])
    sizes = [case.shapes[0][0] for case in sets["default"]]
    assert len(set(sizes)) > 1 and sizes[0] == sorted(sizes)[(len(sizes) - 1) // 2]
    timed = timing.measure(interpreter, kernel, reference, sets, warmup_ms=1, rep_ms=2, timeout_s=60)["default"]
    assert timed.runs and timed.outputs
