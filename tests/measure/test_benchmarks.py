"""The benchmarks of the GPU itself: what can be tested without one. test_gpu.py runs them."""

import os
import subprocess
import sys

from conftest import BUNDLE, run_tool, tool_json, with_changes
from kernelopt.device import gpu
from kernelopt.hardware.card import Card
from kernelopt.measure import card_rates
from kernelopt.session import stop_conditions


def test_the_stream_reads_and_writes_everything_whichever_is_longer():
    code = (
        "import torch\nfrom kernelopt.worker import copy_kernel\n"
        "for read, written in ((5000, 300), (300, 5000), (4096, 4096), (9000, 1)):\n"
        "    source, target = torch.ones(read), torch.full((written,), -1.0)\n"
        "    copy_kernel.stream(source, target, block=1024, warps=4, programs=2)\n"
        "    assert (target >= 0).all(), (read, written)\n"
    )
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": str(BUNDLE / "tools"), "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_the_plot_shows_each_pattern_at_each_size():
    rates = [
        {"pattern": pattern, "buffer_bytes": size << 20, "cache": cache, "median": size * (2 if cache == "warm" else 1)}
        for pattern in ("copy", "read", "write")
        for size in (1, 2, 4)
        for cache in ("cold", "warm")
    ]
    lines = card_rates.plot(rates)
    drawing = "".join(lines[:-1])
    assert all(drawing.count(mark) == 3 for mark in "CRWcrw".replace("W", "")) and len(lines) <= 20
    assert "C copy" in lines[-1]


def test_the_ceiling_wants_the_work_of_a_problem(session, run_here):
    done = run_tool("measure_bandwidth_ceiling.py", "--workspace", session.root)
    assert done.returncode == 2 and "estimate_work.py" in done.stderr
    assert run_tool("measure_bandwidth_ceiling.py", "--bytes-in", 1).returncode == 2
    tool_json("estimate_work.py", "--workspace", session.root, "--bytes", 100, run=run_here)
    done = run_tool("measure_bandwidth_ceiling.py", "--workspace", session.root)
    assert done.returncode == 2 and "by hand" in done.stderr
    arguments = ["--bytes-in", 8, "--bytes-out", 8, "--dtype", "fp32"]
    done = run_tool("measure_bandwidth_ceiling.py", *arguments, env={"CUDA_VISIBLE_DEVICES": "-1"})
    assert done.returncode == 3


def test_the_judges_benchmark_says_what_it_lacks_and_leaves_nothing(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": "-1"}
    judge = [sys.executable, BUNDLE / "benchmarks" / "judge.py"]
    done = subprocess.run([*judge, "clock"], env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "there is no part clock" in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_small_problems_target_comes_from_its_ceiling(session, run_here, monkeypatch):
    """The measurement is stood in for; test_gpu.py makes one."""
    tool_json("estimate_work.py", "--workspace", session.root, run=run_here)
    given = {"median": 321.23, "p20": 320.0, "p80": 322.0, "n": 99}
    result = {"device": "NVIDIA H200", "unit": "GB/s", "rates": [given], "best": given, "gpu_state": None}
    monkeypatch.setattr(card_rates, "run", lambda *_: result.copy())
    monkeypatch.setattr(gpu, "identify", lambda: Card("NVIDIA H200", "GPU-0", "580.1"))
    command = ("measure_bandwidth_ceiling.py", "--workspace", session.root, "--set-target")
    asked = {"workload": "default", "metric": "latency_us", "target": 250, "unit": "us", "basis": "given"}
    old = {"workload": "default", "metric": "bandwidth_gbps", "target": 9, "unit": "GB/s", "basis": "given"}
    session.update_readme(with_changes(session.task(), targets=[old, asked]), {})
    tool_json(*command, "--share", 80, run=run_here)
    target, other = session.task().targets
    assert other.to_json() == asked and "latency_us <= 250 us, given" in session.readme.read_text()
    assert (target.target, target.unit) == (256.96, "GB/s") and stop_conditions.off_basis(target) is None
    assert "80 % of ceiling of this problem: 321.2 GB/s" in session.readme.read_text()
    assert tool_json("check_citations.py", session.root, run=run_here)["problems"] == []
    monkeypatch.setattr(gpu, "identify", lambda: Card("NVIDIA A100-SXM4-80GB", "GPU-0", "580.1"))
    assert "this GPU is NVIDIA A100" in run_here(*command).stderr
    assert "goes with --workspace" in run_here(*command, "--workload", "tall").stderr
    assert session.task().targets == (target, other)
