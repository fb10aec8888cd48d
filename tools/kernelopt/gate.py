"""The verdicts: is A faster than B, and is a candidate accepted? Pure functions of recorded evidence."""

import math

# A gain below 1 % is not told from noise and placement of buffers: an A/A comparison on separate buffers was off
# by up to 0.3 % at 64 MB on an H200, and single repetitions by 1 to 2 % of a clock step.
MIN_GAIN = 0.01
# Another workload may lose so much before it counts as a regression.
MAX_LOSS = 0.02
RESAMPLES = 2000


def paired_verdict(a_us: list[list[float]], b_us: list[list[float]]) -> dict:
    """{verdict, speedup{point, ci95}, aa_noise, rounds} from paired times.

    a_us, b_us: per round the two times of each kernel, microseconds. The speedup is b / a, so above 1 means that
    a is faster: the median over rounds of the ratio of geometric means, with a 95 % bootstrap interval over
    rounds. aa_noise: how far the ratio of a to itself within a round strays from 1, by the same bootstrap.
    FASTER or SLOWER: the interval is clear of 1 by more than MIN_GAIN and the noise. EQUAL: the interval lies
    within MIN_GAIN of 1. AMBIGUOUS: anything else; measure again, accept nothing.
    """
    import numpy

    a, b = (numpy.log(numpy.asarray(times, dtype=float)) for times in (a_us, b_us))
    logs = b.mean(axis=1) - a.mean(axis=1)
    low, high = _interval(logs, numpy)
    noise = max(abs(edge) for edge in _interval(a[:, 0] - a[:, 1], numpy))
    margin = max(math.log1p(MIN_GAIN), noise)
    if low > margin:
        verdict = "FASTER"
    elif high < -margin:
        verdict = "SLOWER"
    elif -margin < low and high < margin and noise < math.log1p(MIN_GAIN):
        verdict = "EQUAL"
    else:
        verdict = "AMBIGUOUS"
    return {
        "verdict": verdict,
        "speedup": {"point": math.exp(float(numpy.median(logs))), "ci95": [math.exp(low), math.exp(high)]},
        "aa_noise": math.expm1(noise),
        "rounds": len(logs),
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
    if utilization and utilization["below_physical_limit"]:
        return _no(
            "BELOW_FLOOR: faster than the hardware allows; the kernel leaves work out, or the count is wrong "
            "(estimate_work.py --flops --bytes gives it by hand)"
        )
    if comparisons is None:
        return {"accepted": True, "reason": "first version: correct, its latency is the baseline"}
    main = comparisons["default"]
    if main["verdict"] != "FASTER":
        return _no(f"{main['verdict']} against the best version: {describe(main)}")
    for workload, other in comparisons.items():
        if workload != "default" and other["speedup"]["ci95"][1] < 1 - MAX_LOSS:
            return _no(f"faster on the default workload, but slower on {workload}: {describe(other)}")
    return {"accepted": True, "reason": f"correct and FASTER: {describe(main)}"}


def _no(reason: str) -> dict:
    return {"accepted": False, "reason": reason}


def describe(comparison: dict) -> str:
    """A paired verdict in half a line."""
    low, high = comparison["speedup"]["ci95"]
    return f"{comparison['speedup']['point']:.3f}x (95 % interval {low:.3f} to {high:.3f}, noise {comparison['aa_noise']:.2%})"


def goal(targets: list[dict], record: dict | None) -> dict:
    """{met, targets[{metric, target, achieved, unit, …}]}: the Stop Conditions against the best record."""
    checked = []
    for target in targets:
        achieved = achieved_value(target, record)
        lower_is_better = target["metric"] == "latency_us"
        met = achieved is not None and (
            achieved <= target["target"] if lower_is_better else achieved >= target["target"]
        )
        checked.append({**target, "achieved": achieved, "met": met})
    return {"met": bool(checked) and all(target["met"] for target in checked), "targets": checked}


def achieved_value(target: dict, record: dict | None) -> float | None:
    if record is None or record["performance"]["workload"] != target["workload"]:
        return None
    return record["performance"][target["metric"]]
