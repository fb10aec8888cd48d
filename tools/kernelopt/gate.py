"""The verdicts: is A faster than B, and is a candidate accepted? Pure functions of recorded evidence."""

import math
import re

from . import correctness

# A difference below 0.3 % is not told from where buffers lie: on an H200 the medians of 60 rounds of a kernel against
# itself lay within 0.14 % at 180 us and above, and within 0.45 % at 42 us; three processes agree on no more.
LEAST = 0.003
# Nor is one below two ticks of the GPU's event clock, which counts in 32 ns.
LEAST_US = 0.064
# Two kernels are EQUAL when they differ by less than this for certain.
SAME = 0.01
# Another workload may lose so much before it counts as a regression.
MAX_LOSS = 0.02
RESAMPLES = 2000
DOCUMENTED_ROWS = ("memory_bandwidth:", "peak_")  # of the citation that a target rests on
IMPOSSIBLE = "IMPOSSIBLE_TIME"  # the status of a time that no hardware allows
BASIS_VALUE = re.compile(r": ([\d.]+) (\S+) <-")  # of a citation (wiki.Row.citation)


def paired_verdict(runs: list[dict]) -> dict:
    """{verdict, speedup{point, ci95}, per_process, aa_noise, least, rounds} from paired times.

    runs: per process {a_us, b_us}, each a list of rounds of the two times of that kernel, microseconds. The speedup is
    b / a, so above 1 means that a is faster: the median over all rounds of the ratio of geometric means, with a 95 %
    bootstrap interval over rounds. aa_noise: the same of a against itself, its two calls in a round taken for two
    kernels in turn: the interval's edge that is farther from 1.
    FASTER or SLOWER: the interval is clear of 1 by more than `least` (the A/A noise, LEAST, or LEAST_US of the
    kernel's time), and every process agrees on the direction. EQUAL: the interval lies within SAME (or LEAST_US) of 1.
    AMBIGUOUS: anything else; measure again, accept nothing.
    """
    import numpy

    ratios, control, times = [], [], []
    for run in runs:
        a, b = (numpy.log(numpy.asarray(run[name], dtype=float)) for name in ("a_us", "b_us"))
        ratios.append(b.mean(axis=1) - a.mean(axis=1))
        turns = numpy.where(numpy.arange(len(a)) % 4 < 2, 1, -1)  # each of the two is the earlier one equally often
        control.append((a[:, 0] - a[:, 1]) * turns)
        times.append(numpy.exp(a).reshape(-1))
    low, high = _interval(numpy.concatenate(ratios), numpy)
    noise = max(abs(edge) for edge in _interval(numpy.concatenate(control), numpy))
    ticks = LEAST_US / float(numpy.median(numpy.concatenate(times)))
    least = max(math.log1p(LEAST), noise, ticks)
    medians = [float(numpy.median(own)) for own in ratios]
    same = max(math.log1p(SAME), ticks)
    if low > least and min(medians) > 0:
        verdict = "FASTER"
    elif high < -least and max(medians) < 0:
        verdict = "SLOWER"
    elif -same < low and high < same:
        verdict = "EQUAL"
    else:
        verdict = "AMBIGUOUS"
    point = float(numpy.median(numpy.concatenate(ratios)))
    return {
        "verdict": verdict,
        "speedup": {"point": math.exp(point), "ci95": [math.exp(low), math.exp(high)]},
        "per_process": [math.exp(median) for median in medians],
        "aa_noise": math.expm1(noise),
        "least": math.expm1(least),
        "rounds": sum(len(own) for own in ratios),
    }


def _interval(values, numpy) -> tuple[float, float]:
    """95 % bootstrap interval of the median; the generator is seeded, so the same times give the same verdict."""
    generator = numpy.random.default_rng(0)
    picks = generator.choice(values, size=(RESAMPLES, len(values)))
    low, high = numpy.percentile(numpy.median(picks, axis=1), [2.5, 97.5])
    return float(low), float(high)


def decide(verify: dict, utilization: dict | None, comparisons: dict[str, dict] | None) -> dict:
    """{accepted, reason}: may a candidate enter the history?

    verify: result of verify.verify. utilization: of the default workload (None when the wiki lacks the roof).
    comparisons: workload -> paired verdict against the best version; None for a first version.
    """
    if verify["status"] != "OK":
        return _no(verify["summary"])
    if verify["device"] == "cpu-interpreter":
        return _no("ran in the CPU interpreter; only a GPU result can be accepted")
    if verify.get("own_work") == correctness.NOT_CHECKED:
        return _no(
            "OWN_WORK_NOT_CHECKED: torch's profiler (CUPTI) named no kernel of the candidate, so nobody knows whose "
            "work this is; launch its kernels in the call itself, start no profiler in it or round the gate, and judge "
            "it again"
        )
    if utilization and utilization["below_physical_limit"]:
        return _no(f"{IMPOSSIBLE}: {impossible(utilization['time_us'], utilization['limit_us'])}")
    if comparisons is None:
        return {"accepted": True, "reason": "first version: correct, its latency is the baseline"}
    main = comparisons["default"]
    if main["verdict"] != "FASTER":
        return _no(f"{main['verdict']} against the best version: {describe(main)}")
    for workload, other in comparisons.items():
        if workload != "default" and other["speedup"]["ci95"][1] < 1 - MAX_LOSS:
            return _no(f"faster on the default workload, but slower on {workload}: {describe(other)}")
    return {"accepted": True, "reason": f"correct and FASTER: {describe(main)}"}


def impossible(time_us: float, limit_us: float) -> str:
    """What to say of a time that no hardware allows."""
    return (
        f"{time_us:.2f} us, where the documented peaks of this card allow no less than {limit_us:.2f} us for the work that was "
        "counted; the kernel leaves work out, or the count is wrong (by hand: estimate_work.py --flops N --bytes N "
        "--work-dtype DTYPE)"
    )


def is_impossible(reason: str | None) -> bool:
    """Was a kernel refused because no hardware allows its time? Records of before say it in another word."""
    return (reason or "").startswith((IMPOSSIBLE, "BELOW_FLOOR"))


def _no(reason: str) -> dict:
    return {"accepted": False, "reason": reason}


def describe(comparison: dict) -> str:
    """A paired verdict in half a line."""
    low, high = comparison["speedup"]["ci95"]
    return f"{comparison['speedup']['point']:.3f}x (95 % interval {low:.3f} to {high:.3f}, A/A noise {comparison['aa_noise']:.2%})"


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
