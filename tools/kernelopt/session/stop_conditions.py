"""The verdicts: is A faster than B, and is a candidate accepted? Pure functions of recorded evidence."""

import re

DOCUMENTED_ROWS = ("memory_bandwidth:", "peak_")  # of the citation that a target rests on
BASIS_VALUE = re.compile(r": ([\d.]+) (\S+) <-")  # of a citation (wiki.Row.citation)


def sign(metric: str) -> str:
    """On which side of its target a metric should be."""
    return "<=" if metric == "latency_us" else ">="


def stop_line(target: dict) -> str:
    """A Stop Condition as the README says it."""
    share = f"{target['share_pct']:g} % of " if "share_pct" in target else ""
    wanted = f"{target['metric']} {sign(target['metric'])} {target['target']} {target['unit']}"
    return f"- {target['workload']}: {wanted}, {share}{target['basis']}{reach(target)}"


def is_documented(target: dict) -> bool:
    """Does a target rest on a documented peak, which nobody measured on such a card?"""
    return (target.get("basis") or "").startswith(DOCUMENTED_ROWS)


def reach(target: dict) -> str:
    """What to add to a target that rests on paper alone."""
    return " (documented, may be out of reach)" if is_documented(target) else ""


def goal(targets: list[dict], record: dict | None) -> dict:
    """{met, targets[{metric, target, achieved, unit, met, problem, documented, …}]}: the Stop Conditions against the best record. problem: see
    `off_basis`; such a target is not met."""
    checked = []
    for target in targets:
        achieved = achieved_value(target, record)
        lower_is_better = sign(target["metric"]) == "<="
        met = achieved is not None and (
            achieved <= target["target"] if lower_is_better else achieved >= target["target"]
        )
        problem = off_basis(target)
        found = {"achieved": achieved, "met": met and problem is None, "problem": problem}
        checked.append({**target, **found, "documented": is_documented(target)})
    return {"met": bool(checked) and all(target["met"] for target in checked), "targets": checked}


def off_basis(target: dict) -> str | None:
    """How a target differs from the share (share_pct) of its cited basis that Step 0 made it; None where it does not, or cites
    nothing."""
    cited, share = BASIS_VALUE.search(target.get("basis") or ""), target.get("share_pct")
    if cited is None or share is None:
        return None
    base = float(cited[1])
    if abs(target["target"] - share / 100 * base) <= 0.001 * base:
        return None
    message = f"{target['metric']} {target['target']} is not {share:g} % of its basis {cited[1]} {cited[2]}"
    tool = (
        "compute_utilization.py --set-targets"
        if "gpu-wiki" in target["basis"]
        else "measure_bandwidth_ceiling.py --set-target"
    )
    return f"{message}; run: {tool}"


def achieved_value(target: dict, record: dict | None) -> float | None:
    if record is None or record["performance"]["workload"] != target["workload"]:
        return None
    return record["performance"][target["metric"]]
