"""Exploring on several workloads: who goes on to the others, in which time, the order by all, and who may be kept.

Times are given: an exploration on a GPU is stood in for. What is checked on each workload runs in the CPU interpreter.
"""

import contextlib
import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import BUNDLE, FIXTURES, call_tool, tool_json
from kernelopt.audit import exploration_rows
from kernelopt.device import sandbox
from kernelopt.device.spent import Spent
from kernelopt.device.stop_signal import Stop
from kernelopt.errors import Refused, Stopped, UsageError
from kernelopt.explore import candidates, entrants, headers, means, run, store, table, workloads
from kernelopt.report import brief, explorations_section
from kernelopt.session import explorations
from kernelopt.statuses import Status

BEST = "best (v0)"


def cell(us: float | None, best_us: float | None = None, **changes) -> dict:
    """What a row says at a workload. best_us: of the opponent, to which the speed-up is known to 1 %."""
    ratio = best_us / us if us and best_us else None
    usual = {
        "status": Status.OK,
        "latency_us": us and {"median": us, "p20": us, "p80": us},
        "against_best": ratio and {"point": ratio, "ci95": [0.99 * ratio, 1.01 * ratio]},
        "error": None,
        "dropped": False,
    }
    return {**usual, **changes}


def row(name: str, us: float | None, best_us: float | None = None, **changes) -> dict:
    unknown = (*explorations.NUMBERS, "wgmma_serialized", "products_dropped", "compiled")
    own = {**dict.fromkeys(unknown), "kernel_sha256": ""}
    own |= {"name": name, "opponent": False, "probe": False, "started": True}
    return {**own, **cell(us, best_us), **changes}


def names(rows: list[dict]) -> list[str]:
    return [one["name"] for one in rows]


FIRST = [row("a", 50.0, 100.0), row("b", 52.0, 100.0), row("c", 90.0, 100.0, dropped=True), row(BEST, 100.0)]
FIRST[-1]["opponent"] = True
TALL = {"a": cell(200.0, 200.0), "b": cell(100.0, 200.0), BEST: cell(200.0)}


def exploration(rows: list[dict], against: str | None = BEST) -> explorations.Exploration:
    known = {"timestamp": "", "device": "NVIDIA H200", "workload": "default", "against": against, "wall_s": 9.0}
    return explorations.of_result({**known, "rows": rows}, "e1")


# --- the order ----------------------------------------------------------------------------------------------------


def test_constants_that_only_another_workload_runs_are_chosen_by_that_one():
    rows = means.merged(FIRST, {"tall": TALL})
    assert names(rows) == ["b", "a", "c", BEST]
    mean = {one["name"]: one["mean"] for one in rows}
    assert (mean["a"], mean["b"]) == pytest.approx((2**0.5, (2 * 100 / 52) ** 0.5))
    assert mean["c"] is None is mean[BEST]
    assert rows[0]["others"] == {"tall": TALL["b"]} and rows[2]["others"] == {}


def test_without_an_opponent_the_order_is_that_of_the_ratios_to_the_best_of_each_workload():
    first = [row("a", 50.0), row("b", 52.0), row("c", 53.0)]
    rows = means.merged(first, {"tall": {"a": cell(200.0), "b": cell(100.0), "c": cell(99.0)}})
    assert names(rows) == ["b", "c", "a"]  # 0.952, 0.971 and 0.711 of the best
    assert {one["mean"] for one in rows} == {None}


@pytest.mark.parametrize(
    "at",
    [
        cell(None, status=Status.WRONG_VALUES, error="all are off"),
        cell(100.0, 200.0, status=Status.RUNTIME_ERROR, error="it died in a later turn"),
        cell(None, status=None, error="not reached"),
    ],
)
def test_what_is_not_timed_on_all_workloads_comes_after_what_is(at):
    rows = means.merged(FIRST, {"tall": {**TALL, "b": at}})
    assert names(rows) == ["a", "b", "c", BEST] and rows[1]["mean"] is None
    assert rows[1]["status"] == Status.OK and rows[1]["others"]["tall"] == at


def test_one_workload_adds_two_keys_and_changes_nothing():
    assert means.merged(FIRST, {}) == [{**one, "others": {}, "mean": None} for one in FIRST]


@pytest.mark.parametrize(
    ("changes", "was_stopped", "status"),
    [
        ({"started": False}, False, None),
        ({}, False, Status.TIMEOUT),
        ({}, True, None),  # it was on its way
        ({"status": Status.WRONG_VALUES}, True, Status.WRONG_VALUES),
    ],
)
def test_of_what_had_no_time_nobody_knows_whether_it_is_right(changes, was_stopped, status):
    late = row("a", None, status=Status.TIMEOUT, error="late") | changes
    assert means.cell(late, was_stopped) == cell(None, status=status, error="late")


# --- who goes on, and in which time -------------------------------------------------------------------------------


def entrant(name: str, **changes) -> entrants.Entrant:
    file = FIXTURES / "README.md"  # any
    return entrants.Entrant(
        name, file, **{"status": Status.OK, "rounds_us": [9.0] * 9, "calls_us": [9.0] * 9} | changes
    )


def test_those_in_the_lead_go_on_and_eight_at_most():
    all_of_them = [entrant("best", is_opponent=True), *(entrant(f"k{number}") for number in range(9))]
    all_of_them[1].dropped, all_of_them[2].status = True, Status.WRONG_VALUES
    all_of_them[3].calls_us = []
    assert [one.name for one in workloads.leaders(all_of_them, timed=True)] == [f"k{number}" for number in range(3, 9)]
    assert workloads.leaders(all_of_them, timed=False)[0].name == "k2"
    many = [entrant(f"k{number}") for number in range(20)]
    assert len(workloads.leaders(many, timed=True)) == workloads.MOST_ELSEWHERE == 8


PLAN = run.Plan(
    None,
    [candidates.Candidate(name, {}, "") for name in "abc"],
    {BEST: Path("best.py"), "eager": Path("eager.py")},
    against=BEST,
    budget_s=100.0,
    candidate_s=100.0,
    also=("tall", "wide"),
)


@pytest.mark.parametrize(
    ("also", "others"),
    [
        ((), ()),
        ((run.ALL,), ("tall", "wide")),
        (("wide", "default", "wide"), ("wide",)),
        (("tall", run.ALL), ("tall", "wide")),
    ],
)
def test_the_workloads_after_the_first(also, others):
    assert run.others_of(run.replace(PLAN, also=also), ["default", "tall", "wide"]) == others


def test_a_task_of_one_workload_has_no_others_and_one_that_it_lacks_is_refused():
    assert run.others_of(run.replace(PLAN, also=(run.ALL,)), ["default"]) == ()
    with pytest.raises(UsageError, match="the reference has no workload 'wide'; it has: default, tall"):
        run.others_of(PLAN, ["default", "tall"])


class Clock:
    """Explorations that take so many seconds by this clock, or as long as their budget. plans: of each one."""

    def __init__(self, monkeypatch, *takes_s: float, stop: Stop | None = None):
        self.now, self.takes_s, self.plans, self.said = 1000.0, list(takes_s), [], []
        self.stop, self.best = stop or Stop(), Status.OK
        self.sandbox = SimpleNamespace(gpu=object(), device="cuda", stop=self.stop)
        monkeypatch.setattr(workloads.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(run, "explore", self.explore)

    def explore(self, plan: run.Plan, _, say, profiled: int = 0) -> run.Explored:
        self.plans.append(plan)
        took_s = self.takes_s.pop(0)
        if isinstance(took_s, Exception):
            raise took_s
        self.now += took_s
        entered = [entrant(one.name) for one in plan.candidates]
        entered += [entrant(name, is_opponent=True) for name in plan.opponents]
        entered[-1].dropped = entered[0].dropped = len(self.plans) == 1  # "a", and "eager"
        for one in entered:
            one.status = self.best if one.name == BEST else Status.OK
        return run.Explored(entered, ["default", "tall", "wide"], None, {"rounds": took_s}, others=plan.also)

    def run(self, plan: run.Plan = PLAN) -> run.Explored:
        return workloads.explore(plan, self.sandbox, self.said.append)


@pytest.mark.parametrize(
    ("takes_s", "budgets_s"),
    [((60.0, 20.0, 20.0), [20.0, 20.0]), ((10.0, 30.0, 1.0), [45.0, 60.0]), ((60.0, 30.0, 1.0), [20.0, 10.0])],
)
def test_the_other_workloads_share_what_is_left(monkeypatch, takes_s, budgets_s):
    clock = Clock(monkeypatch, *takes_s)
    found = clock.run()
    first, *others = clock.plans
    assert first is PLAN and [one.budget_s for one in others] == budgets_s
    assert [one.workload for one in others] == ["tall", "wide"] == list(found.elsewhere)
    for one in others:
        assert [candidate.name for candidate in one.candidates] == ["b", "c"] and one.also == ()
        assert one.opponents == {BEST: Path("best.py")} and one.candidate_s == one.budget_s
    assert found.seconds == {"rounds": takes_s[0], "workload tall": takes_s[1], "workload wide": takes_s[2]}


def test_a_workload_that_was_not_reached_says_so_in_its_rows(monkeypatch):
    clock = Clock(monkeypatch, 60.0, 38.0)
    found = clock.run()
    assert len(clock.plans) == 2
    result = store.result_of(PLAN, found, "NVIDIA H200", 98.0)
    late = cell(None, status=None, error=workloads.NOT_REACHED)
    rows = {one["name"]: one for one in result["rows"]}
    assert rows["b"]["others"]["wide"] == rows[BEST]["others"]["wide"] == late and rows["b"]["mean"] is None
    assert rows["b"]["others"]["tall"]["latency_us"] and rows["a"]["others"] == {} == rows["eager"]["others"]
    assert any(
        line.endswith("the budget was over; a larger --budget-seconds gives it more time")
        for line in (table.lines(result, None))
    )
    assert store.leaders(exploration(result["rows"], "eager")) == ["b", "c"]  # the gate decides


@pytest.mark.parametrize("fault", [Stopped("stopped after 61 s"), Refused("INVALID_REFERENCE: no such size")])
def test_what_fails_at_another_workload_costs_that_one_alone(monkeypatch, fault):
    found = Clock(monkeypatch, 60.0, fault, 9.0).run()
    assert {one.error for one in found.elsewhere["tall"].entrants} == {f"not reached: {fault}"}
    assert found.elsewhere["wide"].entrants[0].calls_us


def test_after_a_stop_no_other_workload_is_begun(monkeypatch):
    stop = Stop()
    clock = Clock(monkeypatch, 60.0, stop=stop)
    stop.after_s = 59.0
    found = clock.run()
    assert len(clock.plans) == 1 and found.stopped_after_s == 59.0
    assert {one.error for at in found.elsewhere.values() for one in at.entrants} == {"not reached: stopped after 59 s"}


def test_an_opponent_that_failed_is_not_waited_for_again(monkeypatch):
    clock = Clock(monkeypatch, 60.0, 9.0, 9.0)
    clock.best = Status.TIMEOUT
    clock.run()
    assert [one.opponents for one in clock.plans] == [PLAN.opponents, {}, {}]


def test_the_first_workload_has_the_rest_of_the_budget(monkeypatch, tmp_path):
    budgets_s = []
    starter = SimpleNamespace(spent=Spent(), judge=SimpleNamespace(end=lambda: None), inputs=[None])
    ahead = SimpleNamespace(get_ready=lambda *jobs: None, end=lambda: None)
    one_gpu = SimpleNamespace(scratch=tmp_path, gpu=True, stop=Stop(), forked_ahead=ahead)
    monkeypatch.setattr(run, "check_and_time", lambda plan, *_: budgets_s.append(plan.budget_s))
    (tmp_path / "eager.py").touch()
    plan = run.replace(PLAN, opponents={"eager": tmp_path / "eager.py"}, against="eager", also=(run.ALL,))
    for known, others in ((["default"], ()), (["default", "tall"], ("tall",))):
        monkeypatch.setattr(run, "prepared", lambda *_, known=known: (starter, known))
        found = run.explore(plan, one_gpu, lambda text: None)
        assert (found.workloads, found.others) == (known, others)
    assert budgets_s == [100.0, 60.0]


def test_the_first_workload_leaves_the_others_their_share_and_a_warning_counts_with_it():
    cuda = candidates.Candidate("k", {}, "load_inline('k', '', CUDA, functions=['f'])  # cpp_extension")
    plan = run.replace(PLAN, candidates=[cuda])
    alone = run.replace(plan, also=())
    assert headers.share_of(plan, on_gpu=True) == pytest.approx(0.6 * headers.share_of(alone, on_gpu=True))
    assert headers.share_of(plan, on_gpu=False) == headers.share_of(alone, on_gpu=False)  # nothing is checked there


# --- who may be kept ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("intervals", "gain"),
    [
        ({"default": (1.01, 1.02)}, True),
        ({"default": (0.99, 1.02)}, False),
        ({"default": None}, False),
        ({"default": (1.01, 1.02), "tall": (0.98, 1.01)}, True),
        ({"default": (1.01, 1.02), "tall": (0.97, 0.985)}, True),  # the gate lets another workload lose 2 %
        ({"default": (1.01, 1.02), "tall": (0.97, 0.979)}, False),
        ({"default": (1.001, 1.002)}, False),  # the gate asks for 0.3 %
        ({"default": (0.99, 1.02), "tall": (1.5, 1.6)}, True),  # level at the default one, a gain at another
        ({"default": (0.99, 1.02), "tall": (1.005, 1.02)}, False),  # at another one it must be 1 %
        ({"default": (0.98, 1.02), "tall": (1.5, 1.6)}, False),  # may be slower by more than 1 %
        ({"default": (0.991, 0.994), "tall": (1.5, 1.6)}, False),  # slower for certain
        ({"default": (0.995, 1.005), "tall": (1.012, 1.014), "flat": (0.982, 0.984)}, False),  # slower in the mean
        ({"wide": (0.99, 1.02), "tall": (1.5, 1.6)}, True),
        ({"wide": (1.1, 1.2), "default": (0.97, 0.98)}, False),
        ({"wide": (1.1, 1.2), "default": None}, True),  # not reached
    ],
)
def test_a_gain_is_what_the_gate_may_take_for_one(intervals, gain):
    found = {at: ends and {"point": sum(ends) / 2, "ci95": list(ends)} for at, ends in intervals.items()}
    cells = {at: cell(100.0, against_best=ratio) for at, ratio in found.items()}
    first, *others = cells
    one = {**row("a", 100.0), **cells[first], "others": {at: cells[at] for at in others}}
    speed_ups = store.speed_ups_of(explorations.ExploredKernel.from_json(one), first)
    assert set(speed_ups) == {at for at, ends in intervals.items() if ends}
    assert store.is_gain(speed_ups) == gain


def test_the_leader_is_the_best_by_the_mean_that_is_a_gain():
    rows = means.merged(FIRST, {"tall": {**TALL, "b": cell(500.0, 200.0)}})
    assert names(rows)[:2] == ["a", "b"] and store.leaders(exploration(rows)) == ["a"]
    level = [row("a", 100.0, 100.0), *FIRST[1:]]
    rows = means.merged(level, {"tall": {**TALL, "a": cell(20.0, 200.0)}})
    assert names(rows)[:2] == ["a", "b"] and store.leaders(exploration(rows)) == ["a", "b"]  # level, and a gain at tall
    slow = [row("a", 104.0, 100.0), *FIRST[1:]]
    rows = means.merged(slow, {"tall": {**TALL, "a": cell(20.0, 200.0)}})
    assert names(rows)[:2] == ["a", "b"] and store.leaders(exploration(rows)) == ["b"]  # the gate would refuse "a"
    rows = means.merged(slow, {"tall": {**TALL, "a": cell(20.0, 200.0), "b": cell(300.0, 200.0)}})
    with pytest.raises(
        store.NotFaster, match=r"the leader, a, is 0.962x at default, 10.000x at tall against best \(v0\)"
    ):
        store.leaders(exploration(rows))


def test_a_candidate_that_fails_at_another_workload_is_no_leader(session):
    wrong = cell(None, status=Status.WRONG_VALUES, error="all are off")
    rows = means.merged(FIRST, {"tall": {**TALL, "b": wrong}})
    one = exploration(rows)
    assert store.leaders(exploration(rows, "eager")) == ["a"]  # nor is "c", which was not tried there
    b = one.row("b")
    assert (b.status, b.error, b.is_right) == ("WRONG_VALUES at tall", "at tall: all are off", False)
    assert one.failed == [b]
    with pytest.raises(Refused, match="no candidate is right and timed on all workloads"):
        store.leaders(exploration(means.merged(FIRST, {"tall": {"a": wrong, "b": wrong}})))
    known = {"timestamp": "", "device": "", "workload": "default", "against": BEST, "wall_s": 1}
    store.save(session, {**known, "rows": rows}, [])
    with pytest.raises(UsageError, match="b of e1 is WRONG_VALUES at tall; nothing was written"):
        store.keep(session, "b")


@pytest.mark.parametrize(("tall_us", "kept"), [(5.0, "y"), (10.0, None)])
def test_keep_leader_goes_by_all_workloads(ready, tmp_path, monkeypatch, tall_us, kept):
    """The default workload prefers x by little; at tall y is much faster than x, and than the best version or not."""
    for name in "xy":
        (tmp_path / f"{name}.py").write_text(ready.kernel.read_text() + f"# {name}\n")
    times_us = {"default": {"x": 5.0, "y": 5.1}, "tall": {"x": 20.0, "y": tall_us}}

    def explore(plan, *_):
        entered = [
            entrants.Entrant(name, tmp_path / f"{name}.py", status=Status.OK, rounds_us=[us] * 9, calls_us=[us] * 9)
            for name, us in times_us[plan.workload].items()
        ]
        best = entrants.Entrant(BEST, ready.kernel, is_opponent=True, status=Status.OK)
        best.rounds_us = best.calls_us = [9.0] * 9
        others = ("tall",) if plan.also == (run.ALL,) else ()
        return run.Explored([*entered, best], ["default", "tall"], None, {}, others=others)

    gpu_sandbox = SimpleNamespace(device_name="NVIDIA H200", stop=Stop(), gpu=object(), device="cuda")
    monkeypatch.setattr(sandbox, "Sandbox", lambda *_: contextlib.nullcontext(gpu_sandbox))
    monkeypatch.setattr(run, "explore", explore)
    call = ("explore_kernels.py", tmp_path / "x.py", tmp_path / "y.py", "--workspace", ready.root, "--keep-leader")
    before = ready.kernel.read_text()
    done = call_tool(*call, "--workload", "all")
    assert done.returncode == (0 if kept else 1), done.stderr
    assert ready.kernel.read_text() == (f"{before}# {kept}\n" if kept else before)
    assert call_tool(*call).returncode == 0 and ready.kernel.read_text() == before + "# x\n"


# --- what is shown and read ---------------------------------------------------------------------------------------


def result_with(rows: list[dict], known: list[str]) -> dict:
    own = {"device": "NVIDIA H200", "workload": "default", "workloads": known, "against": BEST, "compiled": None}
    return {**own, "stopped_after_s": None, "wall_s": 9.0, "seconds": {"inputs": 2.0}, "rows": rows}


def test_the_table_of_several_workloads_has_a_second_one_below():
    tall = {**TALL, "a": cell(None, status=Status.WRONG_VALUES, error="all are off")}
    lines = table.lines(result_with(means.merged(FIRST, {"tall": tall}), ["default", "tall", "wide"]), None)
    assert lines[0] == (
        "workload default alone, all columns; tall below; the task also has wide (--workload all takes all)"
    )
    at = lines.index("")
    assert [line.split() for line in lines[at + 1 : at + 5]] == [
        ["candidate", "default", "tall", "mean"],
        ["b", "52.00", "us", "1.923x", "100.00", "us", "2.000x", "1.961x"],
        ["a", "50.00", "us", "2.000x", "WRONG_VALUES"],
        ["best", "(v0)", "100.00", "us", "200.00", "us"],
    ]
    assert lines[at + 5] == "" and "a: at tall: all are off" in lines
    lines = table.lines(result_with(means.merged(FIRST, {"tall": TALL}), ["default", "tall"]), None)
    assert lines[0] == "workload default alone, all columns; tall below"


def test_older_explorations_without_other_workloads_are_read():
    content = json.loads((FIXTURES / "exploration" / "e1.json").read_text())
    assert "others" not in content["rows"][0]
    one = explorations.Exploration.from_json(content)
    assert one.workloads == ["default"] and one.tried_on == "workload default"
    assert all(kernel.others == {} and kernel.mean is None for kernel in one.rows)


def test_report_brief_and_audit_know_the_other_workloads(session):
    one = exploration(means.merged(FIRST, {"tall": TALL}))
    assert one.tried_on == "workloads default, tall" and one.speedup_over_best == pytest.approx(1.961, abs=1e-3)
    assert ", 1.961x over all workloads" in brief.candidate_line(one.row("b"), BEST)
    assert explorations_section.by_workload(one.row("b"), ["tall"]) == (
        *("b", "52.00 us, 1.923x", "100.00 us, 2.000x", "1.961x"),
    )
    times, speeds = (exploration_rows.values(one.row("b"), one, is_time) for is_time in (True, False))
    assert {52.0, 100.0, 200.0} <= {*times} and {2.0, one.row("b").mean} <= {*speeds}


# --- in the CPU interpreter ---------------------------------------------------------------------------------------

REFERENCE = """
import torch
class Model(torch.nn.Module):
    def forward(self, x): return x + x
def get_inputs(rows: int = 2): return [torch.randn(rows, 100)]
def get_init_inputs(): return []
def get_workloads(): return {"tall": {"rows": 9}}
"""
KERNEL = """
import torch, triton
import triton.language as tl
SPACE = [{}, {"MOST": 300}, {"MOST": 100}]
MOST = 5000

@triton.jit
def double(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, 2 * tl.load(x + at, at < n), at < n)

def kernel_function(x):
    out, n = torch.zeros_like(x), min(MOST, x.numel())
    double[(triton.cdiv(n, 128),)](x, out, n, 128)
    return out
"""


@pytest.fixture
def task(tmp_path):
    """A task of two workloads; of the candidates one is right on both, one on the first alone, one on neither."""
    (tmp_path / "reference.py").write_text(REFERENCE)
    (tmp_path / "k.py").write_text(KERNEL)
    return tmp_path / "k.py", "--reference", tmp_path / "reference.py", "--device", "cpu-interpreter"


def test_candidates_are_checked_on_each_workload(task, compile_here):
    result = tool_json("explore_kernels.py", *task, "--workload", "all", run=compile_here)
    known = {
        one["name"]: (one["status"], {at: one["status"] for at, one in one["others"].items()}) for one in result["rows"]
    }
    assert known == {
        "eager": ("OK", {"tall": "OK"}),
        "k": ("OK", {"tall": "OK"}),
        "k[MOST=300]": ("OK", {"tall": "WRONG_VALUES"}),
        "k[MOST=100]": ("WRONG_VALUES", {}),
    }
    assert result["workload"] == "default" and result["workloads"] == ["default", "tall"]
    assert [*result["seconds"]] == ["inputs", "check", "workload tall"]


def test_a_workload_that_the_task_lacks_is_refused_before_anything_is_checked(task, run_here):
    for named in (("tall", "wide"), ("wide",)):
        done = run_here("explore_kernels.py", *task, "--workload", *named)
        assert (done.returncode, done.stdout) == (2, "")
        assert "the reference has no workload 'wide'; it has: default, tall" in done.stderr
        assert "checking" not in done.stderr


def test_a_session_of_the_hard_deck_takes_of_level_candidates_the_one_with_its_own_constants():
    leader = runpy.run_path(str(BUNDLE / "benchmarks/hard_deck/session.py"))["leader"]
    first = [row("k[B=2]", 50.0, 100.0), row("k", 50.1, 100.0), row("k[B=1]", 50.0, 100.0)]
    tall = {"k[B=2]": cell(100.0, 200.0), "k": cell(100.2, 200.0), "k[B=1]": cell(101.0, 200.0, dropped=True)}
    assert leader(means.merged(first, {"tall": tall})) == ("k", "2.00x")
    tall["k"] = cell(110.0, 200.0, dropped=True)  # what tall alone runs is not level
    assert leader(means.merged(first, {"tall": tall})) == ("k[B=2]", "2.00x")
    tall["k[B=2]"] = cell(None, status=Status.WRONG_VALUES)
    assert leader(means.merged(first, {"tall": tall}))[0] == "k[B=1]"
