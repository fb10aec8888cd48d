"""What the candidates that compile torch's headers cost, and whether the time that is allowed holds them."""

import math
import os
from dataclasses import replace

from . import candidates, run
from .run import Plan

ONE_S = 45.0  # of processor time, to compile torch's headers
# So much longer may one take, and do many, on cores that others use too: two took 117 s on two such cores.
LONGEST_TIMES, USUAL_TIMES = 3, 2
LONGEST_BUDGET_S = 540.0  # where the user names none
WITHOUT = "gpu-wiki/docs/practice/fast-builds.md"


def seconds_each(budget_s: float) -> float:
    """For one to compile, where the user names no limit."""
    return min(budget_s, LONGEST_TIMES * ONE_S)


def with_time(plan: Plan) -> Plan:
    """Without a GPU, where the user names no budget: one that holds them all, up to LONGEST_BUDGET_S."""
    needed_s = LONGEST_TIMES * ONE_S * turns(plan) / share_of(plan, on_gpu=False)
    budget_s = max(plan.budget_s, min(LONGEST_BUDGET_S, needed_s))
    return replace(plan, budget_s=budget_s)


def number(plan: Plan) -> int:
    """How many compile torch's headers."""
    return sum(candidates.compiles_torch(entry.source) for entry in plan.candidates)


def turns(plan: Plan) -> int:
    """How many of them a core compiles, one after the other."""
    return math.ceil(number(plan) / (os.cpu_count() or 1))


def warning(plan: Plan, on_gpu: bool, usual_s: float) -> str | None:
    """How many there are, what they cost, and which option holds too little for them; None where there are none.
    usual_s: the budget of others."""
    slow = number(plan)
    if not slow:
        return None
    cost = f"about {ONE_S:.0f} s of processor time each"
    said = [f"{slow} of {len(plan.candidates)} compile torch's headers, {cost}; to leave them out: {WITHOUT}"]
    if plan.budget_s > usual_s:
        said.append(f"all have {plan.budget_s:.0f} s, --budget-seconds changes that")
    return "; ".join(filter(None, (*said, too_little(plan, on_gpu, slow))))


def too_little(plan: Plan, on_gpu: bool, slow: int) -> str | None:
    """The option that holds too little for so many, and what it would have to be; None where both hold enough."""
    share = share_of(plan, on_gpu)
    left_s, needed_s = share * plan.budget_s, USUAL_TIMES * ONE_S * turns(plan)
    larger = f"pass --budget-seconds {math.ceil(needed_s / share)}"
    if left_s < ONE_S:
        return f"the budget leaves {left_s:.0f} s for them, which is less than one takes: {larger}"
    if (each_s := max(plan.candidate_s, plan.headers_s)) < ONE_S:
        return f"--candidate-seconds {each_s:g} is less than one takes"
    if left_s < needed_s:
        all_of_them = "it is" if slow == 1 else f"all {slow} are"
        return f"the budget of {plan.budget_s:g} s may be over before {all_of_them} compiled: {larger}"
    return None


def share_of(plan: Plan, on_gpu: bool) -> float:
    """Of the budget, in which they can be compiled."""
    if not on_gpu and plan.is_cuda:
        return 1.0  # nothing is checked, so no other workload follows
    first = 1 - run.OTHERS_SHARE if plan.also else 1.0
    return first * (1 - (run.TIMES_SHARE if on_gpu else run.COMPILING_SHARE))
