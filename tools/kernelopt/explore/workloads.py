"""The workloads of an exploration after its first: who is explored there, and in which time."""

import time
from collections.abc import Callable
from dataclasses import replace

from ..device.sandbox import Sandbox
from ..errors import ToolError
from ..statuses import Status
from . import run
from .entrants import MORE_BUDGET, Entrant
from .run import Explored, Plan

MOST_ELSEWHERE = 8  # candidates, the best: each workload has a few seconds
LEAST_S = 5.0  # for a workload: its inputs alone may take two
NOT_REACHED = f"not reached: the budget was over; {MORE_BUDGET}"


def explore(plan: Plan, sandbox: Sandbox, say: Callable[[str], None], profiled: int = 0) -> Explored:
    """Explore the plan's first workload; then, on each other one, the candidates that lead, beside the opponent that
    ratios refer to. Raises what `run.explore` raises of the first; what fails at another stands in its rows."""
    began = time.monotonic()
    first = run.explore(plan, sandbox, say, profiled)
    leading = leaders(first.entrants, timed=sandbox.gpu is not None) if first.others else []
    if not leading:
        return first
    against = [one for one in first.entrants if one.name == plan.against and one.status == Status.OK]
    tried = [*leading, *against]
    ends = began + plan.budget_s + first.seconds.get("profile", 0)  # which no budget counts
    seconds, elsewhere = dict(first.seconds), {}
    for number, workload in enumerate(first.others):
        started = time.monotonic()
        budget_s = (ends - started) / (len(first.others) - number)
        elsewhere[workload] = explored_at(plan_at(plan, tried, workload, budget_s, sandbox.device), tried, sandbox, say)
        seconds[f"workload {workload}"] = time.monotonic() - started
    return replace(first, seconds=seconds, stopped_after_s=sandbox.stop.after_s, elsewhere=elsewhere)


def leaders(entrants: list[Entrant], timed: bool) -> list[Entrant]:
    """The best candidates that are right and were not dropped, MOST_ELSEWHERE at most. entrants: best first. timed:
    without times there is no leader. Pure."""
    right = [one for one in entrants if one.status == Status.OK and not (one.is_opponent or one.dropped)]
    return [one for one in right if one.calls_us or not timed][:MOST_ELSEWHERE]


def plan_at(plan: Plan, tried: list[Entrant], workload: str, budget_s: float, device: str) -> Plan:
    """The plan of another workload: these alone, which were compiled for another card on the first one. Pure."""
    names = {one.name for one in tried}
    return replace(
        plan,
        candidates=[one for one in plan.candidates if one.name in names],
        opponents={name: file for name, file in plan.opponents.items() if name in names},
        workload=workload,
        budget_s=budget_s,
        candidate_s=min(plan.candidate_s, run.seconds_each(budget_s, device)),
        compile_for=None,
        also=(),
    )


def explored_at(plan: Plan, tried: list[Entrant], sandbox: Sandbox, say: Callable[[str], None]) -> Explored:
    """`run.explore` of another workload. Where there is no time, the exploration was stopped, or the task fails there,
    none of `tried` was started, and each says why."""
    if plan.budget_s < LEAST_S:
        return unreached(tried, NOT_REACHED)
    say(f"workload {plan.workload}: {len(plan.candidates)} in the lead, at most {plan.budget_s:.0f} s")
    try:
        with sandbox.stop.interrupting():
            return run.explore(plan, sandbox, say)
    except ToolError as error:
        return unreached(tried, f"not reached: {error}")


def unreached(tried: list[Entrant], why: str) -> Explored:
    """The outcome of a workload that nobody was started on. Pure."""
    result = {"status": Status.TIMEOUT, "error": why, "started": False}
    rows = [Entrant(one.name, one.file, one.config, one.is_opponent, one.is_probe, **result) for one in tried]
    return Explored(rows, [], None, {})
