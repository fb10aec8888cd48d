"""scripts/demo.py: without a GPU it runs in this process; on cards and machines that are not here a stand-in answers its
commands, and the demo's own decisions are real."""

import importlib.util
import json
import re
import subprocess
from pathlib import Path

import pytest
from conftest import BUNDLE

PAPER = (
    "- default: bandwidth_gbps >= 3015 GB/s, 90 % of memory_bandwidth: 3350 GB/s <- x (documented, may be out of reach)"
)
MEASURED = "- default: bandwidth_gbps >= 2700 GB/s, 90 % of measured_copy_bandwidth: 3000 GB/s <- x"
COUNTERS = "memory (dram): memory throughput 84 %, of kernel `softmax_row`"


class Machine:
    """Answers the demo's commands: (exit code, stdout) by tool; what was called is in `calls`."""

    def __init__(self, folder, **answers):
        self.folder, self.answers, self.calls = folder, answers, []
        self.on_paper = answers["target"] == PAPER

    def run(self, command, **_):
        words = [str(word) for word in command]
        tool = next(word.rpartition("/")[2] for word in words if word.endswith((".py", ".sh")))
        verb = f"{tool.partition('.')[0]}_{words[2]}" if tool == "gpu_specs.py" else tool.partition(".")[0]
        self.calls.append(" ".join([verb, *(word for word in words if word.startswith(("--platform", "v")))]))
        if verb == "workspace_init":
            (self.folder / "plans").mkdir(parents=True)
            (self.folder / "README.md").write_text(self.answers["target"])
            return subprocess.CompletedProcess(words, 0, f"{self.folder}\n", "")
        if "--json" in words and verb == "check_goal":
            return subprocess.CompletedProcess(words, 1, json.dumps({"targets": [{"documented": self.on_paper}]}), "")
        code, text = self.answers.get(verb, (0, f"{verb} said this\n{verb} ended"))
        if verb == "run_gate" and words[-1] == "v2":
            code = 1
        return subprocess.CompletedProcess(words, code, text, "no page")


@pytest.fixture
def demo():
    spec = importlib.util.spec_from_file_location("demo_under_test", BUNDLE / "scripts" / "demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(demo, monkeypatch, machine) -> int | str | None:
    """The demo's exit code."""
    monkeypatch.setattr(demo.subprocess, "run", machine.run)
    monkeypatch.setattr(demo.sys, "argv", ["demo.py"])
    try:
        demo.main()
    except SystemExit as ended:
        return ended.code
    return 0


def test_the_demo_without_a_gpu_says_so_and_accepts_nothing(demo, monkeypatch, run_here, tmp_path, capsys):
    in_processes = subprocess.run

    def here(command, **options):
        tool = Path(command[1])
        return run_here(tool.name, *command[2:]) if tool.parent.name == "tools" else in_processes(command, **options)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    monkeypatch.setattr(demo.subprocess, "run", here)
    monkeypatch.setattr(demo.sys, "argv", ["demo.py", "--root", str(tmp_path)])
    demo.main()
    printed = capsys.readouterr().out
    table = printed.split("=== Summary")[1]
    assert {"cpu-interpreter", "recorded", "not run", "cited"} <= set(re.split(r"\s\s+", table.replace("\n", "  ")))
    assert " measured " not in table and "nothing accepted" in table
    (made,) = tmp_path.glob("kernel_opt_row_softmax_demo_*")
    assert not list((made / "memory").glob("*.json")) and f"rm -r {made}" in printed


def found(platform: str) -> tuple[int, str]:
    return 0, json.dumps({"platform": platform})


def test_a_card_without_measured_rows_is_measured_first(demo, monkeypatch, tmp_path):
    answers = {"gpu_specs_detect": found("H100 SXM"), "gpu_specs_lookup": (1, ""), "analyze_profile": (0, COUNTERS)}
    machine = Machine(tmp_path / "w", target=MEASURED, **answers)
    assert run(demo, monkeypatch, machine) == 0
    order = [call.split()[0] for call in machine.calls]
    assert order.index("estimate_work") < order.index("calibrate_gpu") < order.index("compute_utilization")


def test_a_card_without_a_page_is_no_end(demo, monkeypatch, tmp_path, capsys):
    machine = Machine(tmp_path / "w", target=MEASURED, gpu_specs_detect=(1, ""), analyze_profile=(0, COUNTERS))
    assert run(demo, monkeypatch, machine) == 0
    assert "workspace_init" in machine.calls and "calibrate_gpu" in machine.calls  # started without --platform
    assert "measures this card and goes on" in capsys.readouterr().out


def test_without_counters_the_demo_goes_on_with_durations(demo, monkeypatch, tmp_path, capsys):
    """No ncu, or no right to read counters: profile_kernel.sh ends with 3, and leaves durations."""
    answers = {
        "gpu_specs_detect": found("H200"),
        "profile_kernel": (3, ""),
        "analyze_profile": (0, "unknown: not collected"),
    }
    machine = Machine(tmp_path / "w", target=MEASURED, **answers)
    assert run(demo, monkeypatch, machine) == 0
    assert "profile v0" in capsys.readouterr().out and "calibrate_gpu" not in machine.calls


@pytest.mark.parametrize(("target", "code"), [(PAPER, 0), (MEASURED, 1)])
def test_a_target_that_rests_on_paper_may_be_missed_and_a_measured_one_may_not(
    demo, monkeypatch, tmp_path, target, code
):
    answers = {"gpu_specs_detect": found("H200"), "check_goal": (1, "NOT met"), "analyze_profile": (0, COUNTERS)}
    assert run(demo, monkeypatch, Machine(tmp_path / "w", target=target, **answers)) == code
