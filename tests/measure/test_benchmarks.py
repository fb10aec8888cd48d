"""The benchmarks of the GPU itself: what can be tested without one. test_gpu.py runs them."""

import importlib.metadata
import json
import runpy

import forks_with_torch
import pytest
from conftest import BUNDLE, call_tool, tool_json, with_changes
from kernelopt.device import gpu
from kernelopt.errors import EnvironmentLacks
from kernelopt.hardware.card import Card, GpuState, Spread
from kernelopt.measure import card_rates, verify
from kernelopt.session import stop_conditions, target_setting
from kernelopt.session.benchmark_reports import REPORTS, BufferRate, Ceiling, Rate, ShapeRate
from kernelopt.session.subject import KernelUnderTest


def test_the_stream_reads_and_writes_everything_whichever_is_longer():
    code = """if True:
        import torch
        from kernelopt.worker import copy_kernel
        for read, written in ((5000, 300), (300, 5000), (4096, 4096), (9000, 1)):
            source, target = torch.ones(read), torch.full((written,), -1.0)
            copy_kernel.stream(source, target, block=1024, warps=4, programs=2)
            assert (target >= 0).all(), (read, written)
        sizes = (400306554, 2), (40, 2), (10, 4), (0, 4)
        assert [copy_kernel.elements(*size) for size in sizes] == [200153264, 16, 2, 1]  # odd counts halved the rate
    """
    done = forks_with_torch.run(code, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout


def test_the_plot_shows_each_pattern_at_each_size():
    rates = [
        BufferRate(pattern, size << 20, cache, Rate(size * (2 if cache == "warm" else 1), 0, 0, 1))
        for pattern in ("copy", "read", "write")
        for size in (1, 2, 4)
        for cache in ("cold", "warm")
    ]
    lines = card_rates.plot(rates)
    drawing = "".join(lines[:-1])
    assert all(drawing.count(mark) == 3 for mark in "CRWcrw".replace("W", "")) and len(lines) <= 20
    assert "C copy" in lines[-1]


RATE = {"median": 3.0, "p20": 2.5, "p80": 3.5, "n": 9}
WINDOW = [1.0, 2.0]
BEST = {"block": 1024, "warps": 4, "programs": None, **RATE}
JSON_REPORTS = {  # as worker/rates.py makes them
    "bandwidth": {
        "unit": "GB/s",
        "rates": [{"pattern": "copy", "buffer_bytes": 4096, "cache": "warm", **RATE}],
        "left_out": [8192],
        "window": WINDOW,
        "device": {"sm_count": 132},
        "torch": "2.11",
        "triton": "3.6",
    },
    "ceiling": {"unit": "GB/s", "bytes_in": 8, "bytes_out": 4, "rates": [BEST], "best": BEST, "window": WINDOW},
    "matmul": {"unit": "TFLOPS", "rates": [{"dtype": "bf16", "size": 512, **RATE}]},
    "product_rates": {
        "dtype": "bf16",
        "size": 512,
        "rested": {**RATE, "window": WINDOW},
        "sustained": {"median": 2.0, "window": [3.0, 4.0]},
    },
}


class StandInWatch:
    def state(self, window):
        return of_window(window)


def of_window(window: list[float] | None) -> GpuState:
    """A state that shows its window."""
    times = Spread(*window, window[0]) if window else None
    return GpuState(1, times, None, None, None, None, ())


@pytest.mark.parametrize("job", JSON_REPORTS)
def test_a_report_has_the_states_of_its_windows_and_prints_what_the_worker_reported(job):
    sent = JSON_REPORTS[job]
    report = REPORTS[job].from_json(sent, card_rates.states_of(sent, StandInWatch()))
    assert report.gpu_state == of_window(sent.get("window"))
    if job in ("bandwidth", "ceiling"):
        device = {"device": {"sm_count": 132}} if job == "bandwidth" else {}
        whole = {**device, **sent, "gpu_state": of_window(WINDOW).to_json()}
        assert json.dumps(report.to_json()) == json.dumps(whole)
    elif job == "matmul":
        assert [rate.to_json() for rate in report.rates] == sent["rates"]
    else:
        assert (report.rested, report.sustained_median) == (Rate(3.0, 2.5, 3.5, 9), 2.0)
        assert (report.rested_state, report.sustained_state) == (of_window(WINDOW), of_window([3.0, 4.0]))


def test_the_ceiling_wants_the_work_of_a_problem(session, run_here):
    done = call_tool("measure_bandwidth_ceiling.py", "--workspace", session.root)
    assert done.returncode == 2 and "estimate_work.py" in done.stderr
    assert call_tool("measure_bandwidth_ceiling.py", "--bytes-in", 1).returncode == 2
    tool_json("estimate_work.py", "--workspace", session.root, "--bytes", 100, run=run_here)
    done = call_tool("measure_bandwidth_ceiling.py", "--workspace", session.root)
    assert done.returncode == 2 and "by hand" in done.stderr
    arguments = ["--bytes-in", 8, "--bytes-out", 8, "--dtype", "fp32"]
    done = call_tool("measure_bandwidth_ceiling.py", *arguments, env={"CUDA_VISIBLE_DEVICES": "-1"})
    assert done.returncode == 3


def test_the_judges_benchmark_says_what_it_lacks_and_leaves_nothing(tmp_path):
    code = f"import runpy; runpy.run_path({str(BUNDLE / 'benchmarks' / 'judge.py')!r}, run_name='__main__')"
    done = forks_with_torch.run(code, "clock", TMPDIR=str(tmp_path), CUDA_VISIBLE_DEVICES="-1")
    assert done.returncode == 2 and "there is no part clock" in done.stdout and "Traceback" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_judges_benchmark_times_both_kernels_in_fresh_memory(tmp_path):
    code = """
import dataclasses, importlib.util, sys
from pathlib import Path

spec = importlib.util.spec_from_file_location("judge", sys.argv[1])
judge = importlib.util.module_from_spec(spec)
spec.loader.exec_module(judge)
judge.timing.ROUNDS = (4, 4)
context = dataclasses.replace(judge.CONTEXT, device="cpu")
files = [Path(sys.argv[2], name) for name in ("a.py", "b.py")]
for file in files:
    file.write_text(judge.PRODUCT)
a, b = (judge.Candidate(context, str(file)) for file in files)
inputs = [judge.torch.randn(4, 4) for _ in range(2)]
paired = judge.PairedTiming(context, "default", [judge.problem.Case(inputs, [], {}, None)], "")
paired.load_baseline(b, alone=False)
paired.load(a)
before = paired.memory(0, 0)
times = judge.in_fresh_memory(paired)
after = paired.memory(0, 0)
print(len(times.a_us), len(times.b_us), before[0].data_ptr() != after[0].data_ptr())
"""
    done = forks_with_torch.run(code, BUNDLE / "benchmarks" / "judge.py", tmp_path, CUDA_VISIBLE_DEVICES="-1")
    assert done.stdout.splitlines()[-1:] == ["4 4 True"], done.stdout


def test_a_small_problems_target_comes_from_its_ceiling(session, run_here, monkeypatch):
    """The measurement is stood in for; test_gpu.py makes one."""
    tool_json("estimate_work.py", "--workspace", session.root, run=run_here)
    best = ShapeRate(1024, 4, None, Rate(321.23, 320.0, 322.0, 99))
    ceiling = Ceiling("GB/s", 0, 0, (best,), best, [0.0, 1.0])
    monkeypatch.setattr(card_rates, "run", lambda *_: ("NVIDIA H200", ceiling))
    monkeypatch.setattr(gpu, "identify", lambda: Card("NVIDIA H200", "GPU-0", "580.1"))
    command = ("measure_bandwidth_ceiling.py", "--workspace", session.root, "--set-target")
    asked = {"workload": "default", "metric": "latency_us", "target": 250, "unit": "us", "basis": "given"}
    old = {"workload": "default", "metric": "bandwidth_gbps", "target": 9, "unit": "GB/s", "basis": "given"}
    session.update_readme(with_changes(session.task(), targets=[old, asked]), {})
    tool_json(*command, "--share", 80, run=run_here)
    target, other = session.task().targets
    assert other.to_json() == asked and "latency_us <= 250 us, given" in session.readme.read_text()
    assert (target.target, target.unit) == (257.0, "GB/s") and stop_conditions.off_basis(target) is None
    assert "80 % of ceiling of this problem: 321.2 GB/s" in session.readme.read_text()
    assert tool_json("check_citations.py", session.root, run=run_here)["problems"] == []
    monkeypatch.setattr(gpu, "identify", lambda: Card("NVIDIA A100-SXM4-80GB", "GPU-0", "580.1"))
    assert "this GPU is NVIDIA A100" in run_here(*command).stderr
    assert "goes with --workspace" in run_here(*command, "--workload", "tall").stderr
    assert session.task().targets == (target, other)


@pytest.mark.parametrize("gbps", [0.2636, 0.04, 7.86, 4091.01])
def test_the_target_of_a_tiny_problem_is_below_its_ceiling(gbps):
    target = target_setting.of_ceiling(gbps, "NVIDIA H100 80GB HBM3")
    assert 0.898 * gbps < target.target < 0.902 * gbps
    assert stop_conditions.off_basis(target) is None


LIBRARIES = BUNDLE / "benchmarks" / "libraries"


@pytest.mark.parametrize("reference", sorted(LIBRARIES.glob("*_reference.py")), ids=lambda path: path.stem)
def test_the_tasks_for_public_libraries_can_be_judged(interpreter, tmp_path, reference):
    kernel = tmp_path / "kernel.py"
    kernel.write_text(reference.read_text().replace("class Model(", "class ModelNew("))
    verdict = verify.verify(interpreter, KernelUnderTest(kernel, reference), seeds=2)
    assert verdict.status == "OK" and not verdict.left_out, verdict.summary


def test_the_benchmark_of_libraries_says_what_to_install(capsys, monkeypatch):
    benchmark = runpy.run_path(str(BUNDLE / "benchmarks" / "public_libraries.py"))
    for statement in benchmark["STATEMENTS"].values():
        assert statement.target.kernel.is_file() and statement.target.reference.is_file()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: importlib.metadata.distribution("no " + name))
    monkeypatch.setattr("sys.argv", ["public_libraries.py"])
    with pytest.raises(EnvironmentLacks, match="pip install liger-kernel"):
        benchmark["main"]()
    monkeypatch.setattr("sys.argv", ["public_libraries.py", "nonsense"])
    with pytest.raises(SystemExit):
        benchmark["main"]()
    assert "there is no task nonsense" in capsys.readouterr().err


STREAMS = BUNDLE / "benchmarks" / "exploration"


@pytest.mark.parametrize("name", ["stream", "stream_in_place"])
def test_the_kernels_that_try_hints_are_right(interpreter, tmp_path, name):
    kernel, reference = STREAMS / f"{name}_space.py", tmp_path / "reference.py"
    large = (STREAMS / f"{name}_reference.py").read_text()
    assert "8192, 65536" in large
    reference.write_text(large.replace("8192, 65536", "3, 7000"))
    verdict = verify.verify(interpreter, KernelUnderTest(kernel, reference), seeds=2)
    assert verdict.status == "OK", verdict.summary
