"""The verdicts: is A faster than B, and is a candidate accepted? Pure functions of recorded evidence."""

from ..measure import correctness, pairing

# Another workload may lose so much before it counts as a regression.
MAX_LOSS = 0.02
IMPOSSIBLE = "IMPOSSIBLE_TIME"  # the status of a time that no hardware allows


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
        return _no(f"{main['verdict']} against the best version: {pairing.describe(main)}")
    for workload, other in comparisons.items():
        if workload != "default" and other["speedup"]["ci95"][1] < 1 - MAX_LOSS:
            return _no(f"faster on the default workload, but slower on {workload}: {pairing.describe(other)}")
    return {"accepted": True, "reason": f"correct and FASTER: {pairing.describe(main)}"}


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
