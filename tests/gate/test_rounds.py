"""A round's end: what is committed, recorded, reverted.

The measurement is recorded (fixtures/h200_row_softmax), so that the accepting side runs without a GPU; test_gpu.py
measures it.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import conftest
import pytest
from conftest import BUNDLE, PLAN, call_tool, kernel_text, run_tool, tool_json, with_changes
from kernelopt.device.stop_signal import Stop
from kernelopt.errors import Stopped, UsageError
from kernelopt.gate import history, readiness, rounds
from kernelopt.gate.measurement import Measurement
from kernelopt.gate.readiness import RoundStart
from kernelopt.gate.rounds import RoundResult
from kernelopt.measure import timing
from kernelopt.session import git_commands, platforms, readme, record_store, workspace
from kernelopt.session.digests import digest
from kernelopt.session.explorations import SUSTAINED_IN_TRIALS as SUSTAINED
from kernelopt.session.record import Optimization, PreviousComparison
from kernelopt.statuses import Speed, Status


def recorded(version: str, session, **changes) -> Measurement:
    """A recorded measurement, as if it were of this session's kernel."""
    return conftest.recorded(version, digest(session.kernel), **changes)


FASTER = "return torch.relu(x * self.weight) * self.scale"


def check(session, version: str) -> Optimization:
    return readiness.check_ready(RoundStart.of(session), version)


def settled(session, version: str, plan: Optimization, measurement: Measurement) -> RoundResult:
    return rounds.settle(RoundStart.of(session), version, plan, measurement, None)


def propose(session, version: str, body: str = FASTER) -> Optimization:
    propose_without_check(session, version, body)
    return check(session, version)


def propose_without_check(session, version: str, body: str = FASTER) -> None:
    session.kernel.write_text(kernel_text(body))
    session.plan(version).write_text(PLAN)


def judged(session, version: str) -> RoundResult:
    """Propose a change and settle it with the measurement of that version."""
    plan = propose(session, version)
    return settled(session, version, plan, recorded(version, session))


def test_an_accepted_round_is_a_commit_that_the_record_names(ready):
    result = judged(ready, "v1")
    assert result.decision.accepted and result.commit == ready.git("rev-parse", "HEAD")
    record = record_store.RecordStore(ready).read("v1")
    assert record.git_commit_hash == result.commit and record.is_accepted
    assert ready.file_at(result.commit, "kernel.py") == ready.kernel.read_bytes()
    assert record.kernel_sha256 == digest(ready.kernel)
    assert "plans/v1_plan.md" in ready.git("show", "--name-only", "--format=", "HEAD")
    subject = ready.git("log", "-1", "--format=%s")
    assert subject == "V1: 263.81 us, 1.963x as fast as v0 | One pass in place of three."
    assert record.action == "One pass in place of three."
    assert record.comparison.against == "v0"
    assert record.performance.comparison_by_workload["default"] == record.comparison
    assert ready.git("status", "--porcelain") == ""


def with_row_of_kernel(session, exploration: str, name: str) -> None:
    """An exploration one of whose candidates, of that name, is the session's kernel.py."""
    file = conftest.explored(session, exploration)
    content = json.loads(file.read_text())
    for row in content["rows"]:
        if row["name"] == name or row["opponent"]:
            row["kernel_sha256"] = digest(session.kernel)
    file.write_text(json.dumps(content))


def test_the_record_names_the_row_that_the_kernel_is_of(ready):
    """A plan that is written before an exploration cannot name the winner, and its record named none. Judged again, the
    record names it once."""
    row = "row[BLOCK=128,WARPS=4]"
    plan = propose(ready, "v1")
    for exploration in ("e1", "e2"):
        with_row_of_kernel(ready, exploration, row)
    conftest.explored(ready, "e3")  # of other kernels
    settled(ready, "v1", plan, recorded("v1", ready))
    record = record_store.RecordStore(ready).read("v1")
    (origin,) = record.references
    assert (origin.source_type, origin.path_or_url) == ("exploration", f"explore/e2.json#{row}")
    again = rounds.with_origin(record, ready)
    assert again.references == record.references
    assert rounds.with_origin(replace(record, kernel_sha256="0" * 64), ready).references == record.references


def test_a_commit_message_has_whole_words_and_names_whose_bottleneck_it_tells():
    record = record_store.empty("v4")
    compared = PreviousComparison("v3", "FASTER", 1.011, (1.01, 1.012))
    performance = replace(record.performance, latency_us=1753.31, comparison_with_previous=compared)
    evidence = replace(record.profile_evidence, bottleneck_type="compute")
    action = (
        "Persistent thread blocks that take tiles from a counter, with the producer running ahead into the next tile."
    )
    plan = replace(record.optimization, action_description=action)
    record = replace(record, performance=performance, profile_evidence=evidence, optimization=plan)
    subject, whole, bottleneck, kernel = history.commit_message(record).split("\n\n")
    assert subject.startswith("V4: 1753.31 us, 1.011x as fast as v3 | Persistent") and subject.endswith("into the …")
    assert " ".join(whole.split()) == action
    assert bottleneck == "Bottleneck in the profile of v3, which it started from: compute."
    first = record_store.empty("v0")
    first = replace(first, performance=replace(first.performance, latency_us=9.5), kernel_sha256="ab12")
    assert kernel == "Kernel-SHA256: None" and history.commit_message(first).split("\n\n") == [
        "V0: 9.50 us | baseline kernel",
        "Kernel-SHA256: ab12",
    ]


def test_a_rejected_round_leaves_the_kernel_as_it_was_and_loses_nothing(ready):
    before, head = ready.kernel.read_text(), ready.git("rev-parse", "HEAD")
    plan = propose(ready, "v1")
    candidate = ready.kernel.read_text()
    result = settled(ready, "v1", plan, recorded("v2", ready))
    assert not result.decision.accepted and "EQUAL" in result.decision.reason and result.commit is None
    assert ready.kernel.read_text() == before and ready.git("rev-parse", "HEAD") == head
    assert (ready.root / "rejected/v1_kernel.py").read_text() == candidate
    record = record_store.RecordStore(ready).read("v1")
    assert record.quality_gate.result == "FAIL" and "EQUAL" in record.quality_gate.failure_reason
    assert record_store.RecordStore(ready).best().version == "v0"
    ready.kernel.write_text(candidate)
    history.set_aside(ready, "v1", record_store.RecordStore(ready).best())  # once more, after a kill
    assert [path.name for path in (ready.root / "rejected").iterdir()] == ["v1_kernel.py"]


def test_the_result_says_what_took_the_time(session):
    seconds = {"all": 51.2, "timing": 18.4, "kernel": 15.0}
    measurement = recorded("v0", session, seconds=seconds)
    assert Measurement.from_json(measurement.to_json()).seconds == seconds
    result = settled(session, "v0", check(session, "v0"), measurement)
    assert result.to_json()["seconds"] == seconds
    assert "took 51 s: timing 18, kernel 15" in result.lines()


def test_the_result_says_which_of_its_times_an_exploration_measures(ready):
    """An agent had 349 us of an exploration and 380 us of the gate, and did not know why."""
    plan, measurement = propose(ready, "v1"), recorded("v1", ready)
    timings = {name: replace(one, gpu_us=None) for name, one in measurement.timings.items()}
    timings["default"] = replace(timings["default"], gpu_us=251.5)
    lines = settled(ready, "v1", plan, replace(measurement, timings=timings)).lines()
    assert any(line.startswith("default: 263.81 us, GPU time 251.50 us cold, FASTER 1.963x") for line in lines)
    assert any(line.startswith("small: 4.74 us, FASTER") for line in lines)


def test_the_result_doubts_its_times_once_for_all_workloads(ready):
    plan, measurement = propose(ready, "v1"), recorded("v1", ready)
    throttled = replace(measurement.timings["default"].gpu_state, throttle_reasons=("sw_power_cap",))
    timings = {name: replace(one, gpu_state=throttled) for name, one in measurement.timings.items()}
    timings["small"] = replace(timings["small"], gpu_us=5.0, warm_us=4.0, call_us=90.0, graph_us=None)
    lines = settled(ready, "v1", plan, replace(measurement, timings=timings)).lines()
    assert f"warning: {', '.join(timings)}: the GPU was throttled: sw_power_cap" in lines
    assert "warning: small: launch-bound: a call takes 90.0 us, of which the GPU works 4.0" in lines


@pytest.mark.parametrize(
    ("bound", "library_rate", "sustained_us", "said"),
    [
        ("compute", False, None, "71.7 % of the floor, 80.1 % by the cold GPU time"),
        (
            "compute",
            False,
            510.0,
            f"71.7 % of the floor, 80.1 % by the cold GPU time; its cold time is at 89.6 % of {SUSTAINED}",
        ),
        (
            "compute",
            True,
            510.0,
            f"71.7 % of a library's rate, which is no floor; its cold time is at 89.6 % of {SUSTAINED}",
        ),
        ("compute", True, None, "71.7 % of a library's rate, which is no floor"),
        ("memory", False, None, "71.7 % of the floor"),
    ],
)
def test_the_share_of_a_cold_floor_is_told_by_the_cold_time_too(ready, bound, library_rate, sustained_us, said):
    """The latency of the record is of a warm card under its power cap. Agents took 72 % of a cold floor for much left."""
    plan, measurement = propose(ready, "v1"), recorded("v1", ready)
    used = replace(measurement.utilization, floor_us=456.1, floor_share_pct=71.7, sustained_us=sustained_us)
    used = replace(used, bound=bound, library_rate=library_rate)
    timings = {**measurement.timings, "default": replace(measurement.timings["default"], gpu_us=569.4)}
    result = settled(ready, "v1", plan, replace(measurement, timings=timings, utilization=used))
    assert said in result.lines()


@pytest.mark.parametrize(("status", "expected"), [("WRONG_VALUES", "FAIL"), ("TIMEOUT", "TIMEOUT_FAIL")])
def test_a_wrong_kernel_is_recorded_with_its_status(ready, status, expected):
    plan = propose(ready, "v1")
    failed = replace(recorded("v1", ready).verdict, status=Status(status), summary=status)
    measurement = Measurement(digest(ready.kernel), failed, against="v0")
    assert not settled(ready, "v1", plan, measurement).decision.accepted
    record = record_store.RecordStore(ready).read("v1")
    assert record.correctness.status == record.quality_gate.result == expected
    assert record.latency_us is None


def test_an_interpreter_result_is_never_accepted(session):
    interpreted = replace(recorded("v0", session).verdict, device="cpu-interpreter")
    measurement = recorded("v0", session, verdict=interpreted)
    decision = settled(session, "v0", check(session, "v0"), measurement).decision
    assert not decision.accepted and "interpreter" in decision.reason
    assert record_store.RecordStore(session).best() is None


def test_an_open_record_is_taken_over(ready):
    records = record_store.RecordStore(ready)
    records.create("v1")
    records.update("v1", {"search_log": '[{"source": "gpu-wiki", "query": "q", "finding": "f", "actionability": "a"}]'})
    judged(ready, "v1")
    assert records.read("v1").search_log[0].query == "q"


def test_what_cannot_be_judged_is_refused_before_anything_is_measured(ready):
    propose(ready, "v1")
    with pytest.raises(UsageError, match="out of order"):
        check(ready, "v3")
    with pytest.raises(UsageError, match="judged already"):
        check(ready, "v0")
    ready.plan("v1").write_text(PLAN.replace("Spills.", "TBD: what"))
    with pytest.raises(UsageError, match="'## Risk' still holds a TBD"):
        check(ready, "v1")
    ready.plan("v1").unlink()
    with pytest.raises(UsageError, match="is missing"):
        check(ready, "v1")


def test_an_edit_during_the_measurement_is_seen_and_not_lost(ready):
    plan = propose(ready, "v1")
    measurement = recorded("v1", ready)
    ready.kernel.write_text(kernel_text("return x"))
    with pytest.raises(UsageError, match="edited while"):
        settled(ready, "v1", plan, measurement)
    assert (
        ready.kernel.read_text() == kernel_text("return x") and not record_store.RecordStore(ready).path("v1").exists()
    )


def test_a_round_that_is_killed_before_its_verdict_can_be_judged_again(ready, monkeypatch):
    plan = propose(ready, "v1")
    monkeypatch.setattr(history, "commit_message", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        settled(ready, "v1", plan, recorded("v1", ready))
    monkeypatch.undo()
    assert record_store.RecordStore(ready).best().version == "v0"
    plan = check(ready, "v1")
    assert settled(ready, "v1", plan, recorded("v1", ready)).decision.accepted


def test_a_refused_baseline_may_be_tried_again_as_v0(session):
    text = session.kernel.read_text()
    for number in range(2):
        session.kernel.write_text(f"{text}# {number}\n")
        verdict = replace(recorded("v0", session).verdict, status=Status.WRONG_VALUES)
        wrong = Measurement(digest(session.kernel), verdict)
        result = settled(session, "v0", check(session, "v0"), wrong)
        assert not result.decision.accepted
    assert len(list((session.root / "rejected").iterdir())) == 2
    assert settled(session, "v0", check(session, "v0"), recorded("v0", session)).decision.accepted
    with pytest.raises(UsageError, match="judged already"):
        check(session, "v0")


def test_without_an_accepted_baseline_nothing_else_is_judged(session):
    session.kernel.write_text("x = 1\n")
    right = recorded("v0", session).verdict
    wrong = replace(right, status=Status.WRONG_VALUES, summary="WRONG_VALUES: off")
    plan = check(session, "v0")
    settled(session, "v0", plan, recorded("v0", session, verdict=wrong))
    with pytest.raises(UsageError, match="judge v0 first"):
        propose(session, "v1")


def test_a_second_gate_on_the_same_workspace_is_kept_out(session):
    with session.locked():
        done = run_tool("run_gate.py", "--workspace", session.root, "--version", "v0")
    assert done.returncode == 3 and "another gate" in done.stderr


def test_the_accepted_kernel_itself_is_nothing_to_judge(ready):
    ready.plan("v1").write_text(PLAN)
    with pytest.raises(UsageError, match="nothing to judge"):
        check(ready, "v1")


def test_a_changed_oracle_is_refused(ready):
    propose(ready, "v1")
    ready.reference.write_text(ready.reference.read_text() + "\n# easier\n")
    ready.commit("sneak it in")
    with pytest.raises(UsageError, match="oracle must stay"):
        check(ready, "v1")


def test_the_goal_needs_evidence_of_this_very_kernel(ready):
    done = call_tool("check_goal.py", ready.root)
    assert done.returncode == 1 and "no targets" in done.stderr
    target = {"workload": "default", "metric": "latency_us", "target": 1e6, "unit": "us", "basis": "given"}
    ready.update_readme(with_changes(ready.task(), targets=[target]), {})
    goal = tool_json("check_goal.py", ready.root)
    assert goal["met"] and goal["targets"][0]["achieved"] > 0
    ready.kernel.write_text(kernel_text("return x"))
    assert not tool_json("check_goal.py", ready.root, code=1)["met"]


def test_step_0_writes_work_and_targets_for_people_and_tools(session, run_here):
    assert run_here("compute_utilization.py", "--workspace", session.root, "--set-targets").returncode == 2
    work = tool_json("estimate_work.py", "--workspace", session.root, run=run_here)["workloads"]
    assert work["default"]["bytes_min"] == 4 * (8 * 16 + 16 + 8 * 16) and work["default"]["shapes"]
    roofline = tool_json("compute_utilization.py", "--workspace", session.root, "--set-targets", run=run_here)
    text = session.readme.read_text()
    assert [target.to_json() for target in session.task().targets] == roofline[
        "targets"
    ] and "bandwidth_gbps >=" in text
    for citation in roofline["citations"]:
        assert f"- {citation}\n" in text.split("## Roofline")[0]
    assert session.task().shapes["tall"] == "33x16 -> 33x16"
    given = tool_json("estimate_work.py", "--workspace", session.root, "--flops", 7, "--bytes", 9, run=run_here)[
        "workloads"
    ]["default"]
    assert (given["flops"], given["bytes_min"], given["source"]) == (7, 9, "given")


def test_a_stricter_target_is_a_share_that_the_audit_follows(session, run_here):
    tool_json("estimate_work.py", "--workspace", session.root, run=run_here)
    (ninety,) = tool_json("compute_utilization.py", "--workspace", session.root, "--set-targets", run=run_here)[
        "targets"
    ]
    (strict,) = tool_json(
        "compute_utilization.py", "--workspace", session.root, "--set-targets", "--share", 97, run=run_here
    )["targets"]
    assert strict["target"] == pytest.approx(ninety["target"] * 97 / 90, rel=1e-4)
    assert "97 % of measured_copy_bandwidth" in session.readme.read_text()
    assert run_here("check_citations.py", session.root).returncode == 0
    session.update_readme(with_changes(session.task(), targets=[{**strict, "share_pct": 90.0}]), {})
    assert "is not 90 % of its basis" in run_here("check_citations.py", session.root).stdout


def test_targets_that_no_longer_fit_the_work_are_gone(session, run_here):
    tool_json("estimate_work.py", "--workspace", session.root, run=run_here)
    tool_json("compute_utilization.py", "--workspace", session.root, "--set-targets", run=run_here)
    tool_json("estimate_work.py", "--workspace", session.root, run=run_here)  # nothing has changed
    assert session.task().targets
    work = {name: one.to_json() for name, one in session.task().work.items()}
    near = {**work["default"], **{name: work["default"][name] + 1 for name in ("bytes_out", "bytes_min")}}
    session.update_readme(with_changes(session.task(), work={**work, "default": near}), {})
    tool_json("estimate_work.py", "--workspace", session.root, run=run_here)  # as another device rounds
    assert session.task().targets and session.task().work["default"].to_json() == near
    session.update_readme(with_changes(session.task(), dtype="bf16"), {})
    done = run_here("compute_utilization.py", "--workspace", session.root, "--set-targets")
    assert (
        done.returncode == 2
        and "was as the reference makes it when the work was counted and is bf16 now" in done.stderr
    )
    done = run_here("estimate_work.py", "--workspace", session.root)
    assert done.returncode == 0 and "the targets are gone" in done.stderr and session.task().targets == ()
    assert "set the targets again" in session.readme.read_text().split("## Stop Conditions")[1]


def test_a_small_problem_is_told_that_its_target_may_be_out_of_reach(session, run_here):
    tool_json("estimate_work.py", "--workspace", session.root, run=run_here)
    done = run_here("compute_utilization.py", "--workspace", session.root, "--set-targets")
    assert f"python tools/measure_ceiling.py --workspace {session.root} --set-targets" in done.stderr
    assert "fit in the L2" in session.readme.read_text().split("## Roofline")[1]


def test_a_workload_without_a_target_is_told(session, run_here):
    tool_json("estimate_work.py", "--workspace", session.root, run=run_here)
    text = run_here("compute_utilization.py", "--workspace", session.root, "--set-targets").stdout
    assert text.endswith("\ntall: no target; the Stop Conditions are of the default workload\n")


def test_inputs_without_an_element_have_no_target(session, run_here):
    session.reference.write_text(session.reference.read_text().replace("torch.randn(8, 16)", "torch.randn(0, 16)"))
    session.reference.write_text(session.reference.read_text().replace("nn.Parameter(torch.randn(16))", "2"))
    tool_json("estimate_work.py", "--workspace", session.root, run=run_here)
    done = run_here("compute_utilization.py", "--workspace", session.root, "--set-targets")
    assert done.returncode == 2 and "moves no byte" in done.stderr


@pytest.mark.parametrize("change", [{"tolerance": 0.5}, {"dtype": "fp16"}])
def test_what_counts_as_right_stays_once_a_baseline_stands(ready, change):
    ready.update_readme(with_changes(ready.task(), **change), {})
    propose_without_check(ready, "v1")
    with pytest.raises(UsageError, match=f"{next(iter(change))} is .*, v0 was judged with None"):
        check(ready, "v1")


def test_the_gate_wants_a_gpu_and_touches_nothing_without_one(session):
    before = session.kernel.read_text()
    done = run_tool("run_gate.py", "--workspace", session.root, "--version", "v0", env={"CUDA_VISIBLE_DEVICES": "-1"})
    assert done.returncode == 3 and done.stderr.count("\n") == 1
    assert session.kernel.read_text() == before and not list(session.memory.glob("*.json"))


@pytest.fixture
def cpu_in_place_of_the_gpu(monkeypatch, interpreter):
    """`rounds.measure` on the CPU: a stand-in, which the verdict still says."""
    monkeypatch.setattr(rounds, "Sandbox", lambda *_: contextlib.nullcontext(interpreter))
    monkeypatch.setattr(platforms, "check_platform", lambda *_: None)
    monkeypatch.setattr(timing, "CPU_ROUNDS", (4, 4))


def test_measuring_gathers_what_the_gate_needs(ready, cpu_in_place_of_the_gpu, interpreter):
    propose(ready, "v1", "import time; time.sleep(0.01); return torch.relu(x * self.weight) * self.scale")
    interpreter.spent.note("measure", time.monotonic() - 1000)  # by what ran in the same sandbox before
    measurement = rounds.measure(RoundStart.of(ready), 60, lambda _: None)
    assert {"inputs", "kernel", "oracle", "timing"} <= measurement.seconds.keys()
    assert max(measurement.seconds.values()) == measurement.seconds["all"] < 100
    assert measurement.verdict.status == Status.OK and measurement.against == "v0"
    assert set(measurement.timings) == set(measurement.comparisons) == {"default", "tall"}
    assert {comparison.verdict for comparison in measurement.comparisons.values()} == {Speed.SLOWER}
    assert Measurement.from_json(json.loads(json.dumps(measurement.to_json()))) == measurement
    assert measurement.kernel_sha256 == digest(ready.kernel)


# The third call of an instance is the last one of a verification, which repeats no slow one, and a warm-up when timed.
ONLY_WHEN_TIMED = "import time\ntime.sleep(0.02)\nself.calls = getattr(self, 'calls', 0) + 1\ntimed = self.calls > 3\n"


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ("if timed: raise ValueError('shy')\nreturn torch.relu(x * self.weight) * self.scale", "RUNTIME_ERROR", "shy"),
        ("return torch.relu(x * self.weight) * self.scale + (1 if timed else 0)", "WRONG_VALUES", "wrong when timed"),
    ],
)
def test_a_candidate_that_fails_or_is_wrong_only_when_timed_is_rejected(
    ready, cpu_in_place_of_the_gpu, body, status, message
):
    plan = propose(ready, "v1", ONLY_WHEN_TIMED + body)
    measurement = rounds.measure(RoundStart.of(ready), 60, lambda _: None)
    assert measurement.verdict.status == status and message in measurement.verdict.summary
    assert not settled(ready, "v1", plan, measurement).decision.accepted


# --- ended from outside ----------------------------------------------------------------------------------------


def test_a_stop_while_it_times_is_no_fault_of_the_kernel(ready, cpu_in_place_of_the_gpu, monkeypatch):
    propose(ready, "v1")
    stop = Stop()

    def stopped(*_, **__):
        stop.signalled(signal.SIGTERM, None)

    monkeypatch.setattr(timing, "measure", stopped)
    with pytest.raises(Stopped) as error:
        rounds.judge(ready, "v1", 60, lambda _: None, stop=stop)
    assert str(error.value).endswith(" s, while timing: v1 is not judged, and nothing is recorded")
    assert ready.kernel.read_text() == kernel_text(FASTER) and not record_store.RecordStore(ready).path("v1").exists()


def test_a_verdict_that_is_reached_is_recorded_although_a_signal_comes(ready, monkeypatch):
    propose(ready, "v1")
    stop, settle = Stop(), rounds.settle

    def settled_at_a_signal(*given):
        stop.signalled(signal.SIGTERM, None)
        return settle(*given)

    monkeypatch.setattr(rounds, "measure", lambda *_: recorded("v1", ready))
    monkeypatch.setattr(rounds, "settle", settled_at_a_signal)
    assert rounds.judge(ready, "v1", 60, lambda _: None, stop=stop).decision.accepted
    assert record_store.RecordStore(ready).best().version == "v1"


ON_THE_CPU = """
import runpy, sys
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
from kernelopt.gate import rounds
from kernelopt.session import platforms
rounds.Sandbox, opened = (lambda _, cache, *more: opened("cpu-interpreter", cache, *more)), rounds.Sandbox
platforms.check_platform = lambda *_: None
runpy.run_path(sys.argv[0], run_name="__main__")
"""
HANGS = "import pathlib, time; pathlib.Path('reached').touch(); time.sleep(600)"  # in the folder of its process


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_gate_that_a_signal_ends_says_how_far_it_came_and_leaves_all_as_it_was(ready, number, interruptible):
    """It said nothing. `timeout` sends its signal to the process and to its group."""
    propose_without_check(ready, "v1", f"{HANGS}; return x")
    kernel, head = ready.kernel.read_text(), ready.git("rev-parse", "HEAD")
    command = [sys.executable, "-c", ON_THE_CPU, BUNDLE / "tools/run_gate.py", "--workspace", ready.root]
    command += ["--version", "v1", "--sandbox", "none", "--json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(list(map(str, command)), env={**os.environ, "TMPDIR": str(ready.cache)}, **pipes) as gate:
        while not list(ready.cache.glob("kernelopt-*/open/*/reached")) and gate.poll() is None:
            time.sleep(0.02)
        began = time.monotonic()
        gate.send_signal(number)
        gate.send_signal(number)
        out, err = gate.communicate()
    assert (gate.returncode, out) == (4, "") and time.monotonic() - began < 10, err
    said = err.splitlines()[-1]
    assert said.startswith("run_gate.py: stopped after ") and "while verifying (0 of " in said, err
    assert said.endswith("): v1 is not judged, and nothing is recorded")
    assert (ready.kernel.read_text(), ready.git("rev-parse", "HEAD")) == (kernel, head)
    assert not record_store.RecordStore(ready).path("v1").exists() and not list(ready.cache.glob("kernelopt-*"))


def test_another_gpu_than_the_platform_is_refused(session):
    with pytest.raises(UsageError, match="the task is for H200"):
        platforms.check_platform(session, session.task(), "NVIDIA H100 80GB HBM3")
    platforms.check_platform(session, session.task(), "NVIDIA H200")


def test_a_kernel_with_other_line_ends_comes_back_byte_for_byte(session):
    session.kernel.write_bytes(kernel_text().replace("\n", "\r\n").encode())
    before = session.kernel.read_bytes()
    settled(session, "v0", check(session, "v0"), recorded("v0", session))
    plan = propose(session, "v1")
    settled(session, "v1", plan, recorded("v2", session))
    assert session.kernel.read_bytes() == before


def test_one_gate_parses_the_task_block_twice_and_runs_git_no_more_than_it_must(
    ready, cpu_in_place_of_the_gpu, monkeypatch
):
    """The Task block: as it is, and as it was when v0 was judged. After that no step reads either again."""
    propose_without_check(ready, "v1", "import time; time.sleep(0.01); return torch.relu(x * self.weight) * self.scale")
    parsed, commands = [], []
    parse, run = readme.parse_task, git_commands.run_git
    monkeypatch.setattr(workspace, "parse_task", lambda readme, name: parsed.append(name) or parse(readme, name))
    monkeypatch.setattr(workspace, "run_git", lambda root, *words: commands.append(words[0]) or run(root, *words))
    result = rounds.judge(ready, "v1", 60, lambda _: None)
    assert not result.decision.accepted and len(parsed) == 2
    # the session's first commit and its reference.py, v0's README, the last commit's message, the best kernel to
    # compare with, and the best kernel to put back
    assert commands == ["rev-list", "show", "show", "log", "show", "show"]
