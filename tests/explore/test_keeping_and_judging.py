"""What follows an exploration in the same call: the leader becomes kernel.py, and the gate judges it.

The exploration and the measurement need a GPU. Here both are stood in for: times are given, and the measurement is that
of a recorded gate.
"""

import contextlib
import json
import runpy
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import BUNDLE, PLAN, call_tool, recorded, with_changes
from kernelopt import cli
from kernelopt.device import sandbox
from kernelopt.device.stop_signal import Stop
from kernelopt.errors import Refused
from kernelopt.explore import entrants, run
from kernelopt.gate import rounds
from kernelopt.session import explorations
from kernelopt.session.digests import digest
from kernelopt.session.record_store import RecordStore
from kernelopt.statuses import Speed, Status


@pytest.fixture
def explored(monkeypatch):
    """Stand-ins for a GPU, and for the exploration on it: its entrants, and when it was stopped."""
    gpu_sandbox = SimpleNamespace(device_name="NVIDIA H200", stop=Stop())
    monkeypatch.setattr(sandbox, "Sandbox", lambda *_: contextlib.nullcontext(gpu_sandbox))

    def ends_with(timed: list[entrants.Entrant], stopped_after_s: float | None = None) -> None:
        outcome = run.Explored(timed, ["default"], stopped_after_s, {})
        monkeypatch.setattr(run, "explore", lambda *_: outcome)

    return ends_with


def timed(file: Path, us: list[float], name: str | None = None) -> entrants.Entrant:
    """A right entrant with these times. name: of an opponent."""
    return entrants.Entrant(
        name or file.stem, file, is_opponent=name is not None, status=Status.OK, rounds_us=us, calls_us=us
    )


@pytest.fixture
def explored_on_a_gpu(ready, tmp_path, explored):
    """The same of k.py beside the best version, by k.py's times."""
    (tmp_path / "k.py").write_text(ready.kernel.read_text() + "# faster\n")
    best = timed(ready.kernel, [9.0] * 9, "best (v0)")
    return lambda us, stopped_after_s=None: explored([timed(tmp_path / "k.py", us), best], stopped_after_s)


def test_the_leader_goes_to_kernel_py_at_once_and_nothing_after_a_stop(ready, tmp_path, explored_on_a_gpu):
    before = ready.kernel.read_text()
    call = ("explore_kernels.py", tmp_path / "k.py", "--workspace", ready.root, "--keep-leader")
    for times_us, stopped_after_s, code in (([9.0] * 9, None, 1), ([5.0] * 9, 3.0, 4), ([5.0] * 9, None, 0)):
        explored_on_a_gpu(times_us, stopped_after_s)
        done = call_tool(*call)
        assert done.returncode == code, done.stderr
        assert (ready.kernel.read_text() == before) == (code != 0)
        assert ("kernel.py was not written: the exploration was stopped" in done.stderr) == (code == 4)
    assert "cite it in the plan as explore/e3.json#k" in done.stderr
    done = call_tool(*call, "--against", "eager")
    assert done.returncode == 2 and "--against best first" in done.stderr


@pytest.fixture
def measured(ready, monkeypatch):
    """The measurement of a recorded gate, in place of one on a GPU: what it was asked to measure."""
    kernels = []

    def measure_in(opened, start, *_):
        kernels.append((opened.device_name, start.workspace.kernel.read_text()))
        return recorded("v1", digest(start.workspace.kernel))

    monkeypatch.setattr(rounds, "measure_in", measure_in)
    return kernels


def test_the_table_is_out_before_the_gate_begins(ready, tmp_path, explored_on_a_gpu, monkeypatch):
    explored_on_a_gpu([5.0] * 9)
    ready.plan("v1").write_text(PLAN)
    seen = []
    monkeypatch.setattr(cli, "flush", lambda: seen.append("flushed"))
    monkeypatch.setattr(rounds, "judge", lambda *_, **__: sys.exit(137 if seen else 0))
    done = call_tool("explore_kernels.py", tmp_path / "k.py", "--workspace", ready.root, "--gate", "v1")
    assert done.returncode == 137 and "candidate  status" in done.stdout


def test_the_leader_is_judged_in_the_same_process(ready, tmp_path, explored_on_a_gpu, measured):
    explored_on_a_gpu([5.0] * 9)
    ready.plan("v1").write_text(PLAN)
    done = call_tool("explore_kernels.py", tmp_path / "k.py", "--workspace", ready.root, "--gate", "v1")
    assert done.returncode == 0, done.stderr
    assert "the workspace and its plan are ready for the gate of v1" in done.stderr
    assert measured == [("NVIDIA H200", (tmp_path / "k.py").read_text())]
    table, verdict = done.stdout.split("v1 ACCEPTED: ")
    assert "k" in table and "1.963x" in verdict and f"commit {ready.git('rev-parse', 'HEAD')}" in verdict
    record = json.loads((ready.memory / "v1.json").read_text())
    assert record["references"][0]["path_or_url"] == "explore/e1.json#k"


def test_a_rejected_leader_is_exit_1_and_json_has_both(ready, tmp_path, explored_on_a_gpu, measured, monkeypatch):
    explored_on_a_gpu([5.0] * 9)
    ready.plan("v1").write_text(PLAN)
    slower = recorded("v2", "")
    monkeypatch.setattr(
        rounds,
        "measure_in",
        lambda _, start, *__: replace(slower, kernel_sha256=digest(start.workspace.kernel), against="v0"),
    )
    before = ready.kernel.read_text()
    done = call_tool("explore_kernels.py", tmp_path / "k.py", "--workspace", ready.root, "--gate", "v1", "--json")
    result = json.loads(done.stdout)
    assert done.returncode == 1 and result["rows"][0]["name"] == "k" and not result["gate"]["accepted"]
    assert result["next"] is None  # it is much faster, so another may be worth a run
    assert ready.kernel.read_text() == before


@pytest.mark.parametrize("as_json", [False, True])
def test_a_signal_during_the_gate_leaves_the_table_and_no_verdict(
    ready, tmp_path, explored_on_a_gpu, monkeypatch, as_json
):
    explored_on_a_gpu([5.0] * 9)
    ready.plan("v1").write_text(PLAN)
    monkeypatch.setattr(rounds, "measure_in", lambda opened, *_: opened.stop.signalled(signal.SIGTERM, None))
    call = ("explore_kernels.py", tmp_path / "k.py", "--workspace", ready.root, "--gate", "v1")
    done = call_tool(*call, *["--json"] * as_json)
    assert done.returncode == 4 and ('"k"' if as_json else "k    ") in done.stdout
    assert "explore_kernels.py: stopped after " in done.stderr
    assert done.stderr.endswith(" s: v1 is not judged, and nothing is recorded\n")
    assert not (ready.memory / "v1.json").exists()


@pytest.mark.parametrize(
    ("times_us", "stopped_after_s", "code", "message"),
    [([9.0] * 9, None, 1, "the leader, k, is 1.000x against best"), ([5.0] * 9, 3.0, 4, "stopped")],
)
def test_nothing_is_judged_where_no_leader_is_kept(
    ready, tmp_path, explored_on_a_gpu, measured, times_us, stopped_after_s, code, message
):
    explored_on_a_gpu(times_us, stopped_after_s)
    ready.plan("v1").write_text(PLAN)
    done = call_tool("explore_kernels.py", tmp_path / "k.py", "--workspace", ready.root, "--gate", "v1", "--json")
    assert done.returncode == code and message in done.stderr and not measured
    result = json.loads(done.stdout)
    little = stopped_after_s is None
    assert result["gate"] is None and (result["next"] is not None) == little
    assert done.stderr.endswith(f"e1 brought nothing certain over best (v0): {explorations.FINISH}\n") == little


def test_a_leader_that_is_wrong_gets_no_advice_to_report(ready, tmp_path, explored_on_a_gpu, monkeypatch):
    explored_on_a_gpu([8.9] * 9)
    ready.plan("v1").write_text(PLAN)

    def measure_in(_, start, *__):
        found = recorded("v1", digest(start.workspace.kernel))
        return replace(found, verdict=replace(found.verdict, status=Status.WRONG_VALUES, summary="WRONG_VALUES"))

    monkeypatch.setattr(rounds, "measure_in", measure_in)
    done = call_tool("explore_kernels.py", tmp_path / "k.py", "--workspace", ready.root, "--gate", "v1")
    assert done.returncode == 1 and "v1 REJECTED" in done.stdout
    assert "brought" not in done.stdout + done.stderr and "report now" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("default", "small", "accepted", "said"),
    [
        (("FASTER", 1.03), ("SLOWER", 0.9), False, None),  # the other workload is to be mended
        (("EQUAL", 1.001), ("EQUAL", 1.0), False, "e1 brought nothing certain"),
        (("FASTER", 1.005), ("FASTER", 1.3), True, None),  # explored at the small one, which gained much
        (("FASTER", 1.03), ("EQUAL", 0.985), True, "v1 brought 3.0 %"),
    ],
)
def test_with_several_workloads_the_gain_that_counts_is_the_larger_one(default, small, accepted, said):
    compared = {
        name: SimpleNamespace(verdict=Speed(verdict), speedup=speedup)
        for name, (verdict, speedup) in {"default": default, "small": small}.items()
    }
    measured = SimpleNamespace(verdict=SimpleNamespace(status=Status.OK), comparisons=compared)
    verdict = SimpleNamespace(decision=SimpleNamespace(accepted=accepted), measurement=measured, sustained_pct=None)
    explored = {"name": "e1", "against": "best (v0)", "speedup_over_best": 1.03, "was_stopped": False}
    tool = runpy.run_path(str(BUNDLE / "tools/explore_kernels.py"))
    one = SimpleNamespace(**explored, workloads=["small"])
    line = tool["next_run"](one, "v1", verdict, SimpleNamespace(work=None))
    assert line is said if said is None else line.startswith(f"{said} over best (v0): ")


def test_a_gate_that_is_refused_for_another_reason_gives_no_advice(ready, tmp_path, explored_on_a_gpu, monkeypatch):
    explored_on_a_gpu([8.9] * 9)
    ready.plan("v1").write_text(PLAN)

    def measure_in(*_):
        raise Refused("the reference failed")

    monkeypatch.setattr(rounds, "measure_in", measure_in)
    done = call_tool("explore_kernels.py", tmp_path / "k.py", "--workspace", ready.root, "--gate", "v1")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "explore_kernels.py: the reference failed")


def test_what_the_gate_would_refuse_is_said_before_the_exploration(ready, tmp_path, monkeypatch):
    (tmp_path / "k.py").write_text(ready.kernel.read_text() + "# faster\n")
    monkeypatch.setattr(sandbox, "Sandbox", lambda *_: pytest.fail("explored"))
    call = ("explore_kernels.py", tmp_path / "k.py", "--workspace", ready.root, "--gate")
    for version, message in (("v1", "plans/v1_plan.md"), ("v2", "v2 is out of order"), ("v0", "v0 was judged already")):
        done = call_tool(*call, version)
        assert done.returncode == 2 and message in done.stderr, done.stderr


def test_another_gpu_than_the_tasks_is_refused_before_the_exploration(ready, tmp_path, explored_on_a_gpu, monkeypatch):
    explored_on_a_gpu([5.0] * 9)
    ready.plan("v1").write_text(PLAN)
    other = SimpleNamespace(device_name="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(sandbox, "Sandbox", lambda *_: contextlib.nullcontext(other))
    monkeypatch.setattr(run, "explore", lambda *_: pytest.fail("explored"))
    done = call_tool("explore_kernels.py", tmp_path / "k.py", "--workspace", ready.root, "--gate", "v1")
    assert done.returncode == 2 and "the task is for H200" in done.stderr


def test_v0_is_the_first_leader_that_the_gate_accepts_and_three_are_tried(session, tmp_path, explored, monkeypatch):
    files = [tmp_path / f"{name}.py" for name in "abcd"]
    for file in files:
        file.write_text(session.kernel.read_text() + f"# {file.stem}\n")
    explored([timed(file, [us] * 9) for file, us in zip(files, (5.0, 6.0, 7.0, 8.0), strict=True)])
    judged, right = [], []

    def measure_in(_, start, *__):
        judged.append(start.workspace.kernel.read_text()[-2])
        found = recorded("v0", digest(start.workspace.kernel))
        if judged[-1] in right:
            return found
        wrong = replace(found.verdict, status=Status.WRONG_VALUES, summary="WRONG_VALUES (prime sizes)")
        return replace(found, verdict=wrong)

    monkeypatch.setattr(rounds, "measure_in", measure_in)
    call = ("explore_kernels.py", *files, "--workspace", session.root)
    for only, expected, code in (("d", ["a", "b", "c"], 1), ("b", ["a", "b"], 0)):
        judged.clear()
        right[:] = [only]
        done = call_tool(*call, "--gate", "v0")
        assert (judged, done.returncode) == (expected, code), done.stderr
        assert "v0 REJECTED" in done.stderr and "prime sizes" in done.stderr
    assert done.stdout.splitlines()[-1].endswith(explorations.AFTER_V0)
    assert "v0 ACCEPTED" in done.stdout and session.kernel.read_text().endswith("# b\n")


@pytest.mark.parametrize(
    ("version", "us", "gained", "accepted", "said"),
    [
        ("v0", None, None, False, None),
        ("v1", 99.0, None, True, f"v1 brought 1.0 % over best (v0): {explorations.FINISH}"),
        ("v1", 96.0, None, True, "v1 brought 4.2 % over best (v0): where GPU time counts, report now"),
        ("v1", 96.0, 1.006, True, f"v1 brought 0.6 % over best (v0): {explorations.FINISH}"),
        ("v1", 96.0, None, False, "e1 brought nothing certain over best (v0): where GPU time counts, report now"),
        ("v1", 95.0, None, True, None),
    ],
)
def test_after_a_gate_the_last_line_says_whether_another_run_is_worth_it(version, us, gained, accepted, said):
    against = "best (v0)" if us else "eager"
    rows = [SimpleNamespace(is_opponent=False, is_right=True, gain=100.0 / (us or 50.0))]
    one = exploration(rows, against)
    assert explorations.next_run(one, version, accepted, gained) == said


AT = "v0 is at {} % of the bare operations' sustained rate: "
REPORT_NOW = f"where GPU time counts, report now, at any share of the floor: {explorations.AFTER_V0}"


@pytest.mark.parametrize(
    ("sustained_pct", "said"),
    [
        (None, REPORT_NOW),
        (69.9, AT.format(69.9) + f"another run may pay; {explorations.FAR_AFTER_V0}"),
        (70.0, REPORT_NOW),
        (89.9, REPORT_NOW),
        (90.0, AT.format(90.0) + f"finish; {explorations.NEAR_AFTER_V0}"),
        (100.0, AT.format(100.0) + f"finish; {explorations.NEAR_AFTER_V0}"),
        (117.0, REPORT_NOW),  # more was counted than is needed
    ],
)
def test_after_v0_little_is_left_near_the_rate_that_the_bare_operations_sustain(sustained_pct, said):
    one = exploration_of(["OK", "WRONG_VALUES"])
    assert explorations.next_run(one, "v0", True, None, sustained_pct) == said
    assert explorations.next_run(one, "v0", False, None, sustained_pct) is None


def exploration_of(statuses: list[str]) -> explorations.Exploration:
    """Candidates that ended so, and an opponent that failed."""
    rows = [SimpleNamespace(is_opponent=False, status=status) for status in statuses]
    return exploration([*rows, SimpleNamespace(is_opponent=True, status="RUNTIME_ERROR")], "eager")


def exploration(rows: list, against: str | None) -> explorations.Exploration:
    known = {"timestamp": "", "device": "", "workload": "default", "wall_s": 1.0, "was_stopped": False}
    return explorations.Exploration(name="e1", against=against, rows=rows, **known)


@pytest.mark.parametrize(
    ("statuses", "sustained_pct", "said"),
    [
        (["OK", "WRONG_VALUES", "COMPILE_ERROR"], 80.0, f"2 of 3 candidates failed: {explorations.FAILED_AFTER_V0}"),
        (["OK", "WRONG_VALUES", "NONFINITE"], None, f"2 of 3 candidates failed: {explorations.FAILED_AFTER_V0}"),
        (["OK", "WRONG_VALUES", "NONFINITE"], 60.0, f"2 of 3 candidates failed: {explorations.FAILED_AFTER_V0}"),
        (["OK", "WRONG_VALUES", "NONFINITE"], 95.0, AT.format("95.0") + f"finish; {explorations.NEAR_AFTER_V0}"),
        (["OK", "OK", "WRONG_VALUES", "WRONG_VALUES"], 80.0, REPORT_NOW),
        (["OK", "TIMEOUT", "TIMEOUT"], 80.0, REPORT_NOW),  # the budget may have been over
    ],
)
def test_after_v0_another_run_may_pay_where_most_candidates_failed(statuses, sustained_pct, said):
    assert explorations.next_run(exploration_of(statuses), "v0", True, None, sustained_pct) == said


@pytest.mark.parametrize(("windowed_pct", "said"), [(0.0, "finish"), (100.0, "report now"), (None, "report now")])
def test_near_that_rate_a_convolution_may_still_be_done_with_fewer_products(windowed_pct, said):
    """A direct convolution at 90.6 % lost to Winograd's form by 1.17x."""
    measured = SimpleNamespace(verdict=SimpleNamespace(status=Status.OK), comparisons=None)
    verdict = SimpleNamespace(decision=SimpleNamespace(accepted=True), measurement=measured, sustained_pct=95.0)
    work = None if windowed_pct is None else {"default": SimpleNamespace(windowed_pct=windowed_pct)}
    tool = runpy.run_path(str(BUNDLE / "tools/explore_kernels.py"))
    line = tool["next_run"](exploration([], None), "v0", verdict, SimpleNamespace(work=work))
    assert said in line


def test_the_figures_after_v0_are_those_of_the_trials():
    """Each stands in the table of the trials, which says where it comes from, and in the page on exploring."""
    for page in ("evals/README.md", "docs/exploring.md"):
        text = " ".join((BUNDLE / page).read_text().split())
        for figures in (
            "under 1 % in six, 2.1",
            "8.4 %",
            "in seven, for 40 to 181 s",
            "for 32 to 93 s",
            "for 40 to 131 s",
        ):
            assert figures in text, (page, figures)
    assert "under 1 % in six, 2.1 to 8.4 % in seven, for 40 s to three minutes" in explorations.AFTER_V0
    assert "1.9, 6.9 and 18 % for 40 to 131 s" in explorations.FAR_AFTER_V0
    assert "0 to 1.2 % for 32 to 93 s" in explorations.NEAR_AFTER_V0
    printed = (BUNDLE / "evals/trials/fp8_attention/printed.txt").read_text()
    assert "v1 ACCEPTED: correct and FASTER: 1.106x" in printed and "10.6 % for 84 s" in explorations.FAILED_AFTER_V0


@pytest.mark.parametrize(
    ("us", "said"),
    [
        ([8.9] * 9, "e1 brought 1.1 % over best (v0), less than 2 %: " + explorations.FINISH),
        ([9.1] * 9, "e1 brought nothing over best (v0): " + explorations.FINISH),
        ([8.0] * 9, None),
    ],
)
def test_an_exploration_that_brought_next_to_nothing_says_so(ready, tmp_path, explored_on_a_gpu, monkeypatch, us, said):
    target = {"workload": "default", "metric": "latency_us", "target": 0.1, "unit": "us", "basis": "given"}
    ready.update_readme(with_changes(ready.task(), targets=[target]), {})
    explored_on_a_gpu(us)
    done = call_tool("explore_kernels.py", tmp_path / "k.py", "--workspace", ready.root)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if "brought" in line] == [said] * bool(said)
    goal = call_tool("check_goal.py", ready.root)
    assert goal.returncode == 1 and ("brought" in goal.stderr) == bool(said)
    ready.plan("v1").write_text(f"{PLAN}\nexplore/e1.json#k\n")
    monkeypatch.setattr(RecordStore, "masked_versions", lambda _: {"v1"})
    assert "brought" not in call_tool("check_goal.py", ready.root).stderr


def test_an_exploration_that_was_stopped_or_is_of_another_best_version_brought_nothing_to_tell(
    ready, tmp_path, explored_on_a_gpu
):
    target = {"workload": "default", "metric": "latency_us", "target": 0.1, "unit": "us", "basis": "given"}
    ready.update_readme(with_changes(ready.task(), targets=[target]), {})
    for stopped_after_s in (3.0, None):
        explored_on_a_gpu([8.9] * 9, stopped_after_s)
        done = call_tool("explore_kernels.py", tmp_path / "k.py", "--workspace", ready.root)
        told = call_tool("check_goal.py", ready.root).stderr
        assert ("brought" in done.stdout) == ("brought" in told) == (stopped_after_s is None)
    newest = ready.root / "explore" / "e2.json"
    explored = json.loads(newest.read_text())
    newest.write_text(json.dumps(explored | {"rows": [row | {"kernel_sha256": "0"} for row in explored["rows"]]}))
    assert "brought" not in call_tool("check_goal.py", ready.root).stderr
