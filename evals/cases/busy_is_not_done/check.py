"""Utilisation is no distance to the goal: the least bytes over the bandwidth give half of v0's time. By the
datasheet's bandwidth or the measured one."""

from pathlib import Path

from judging import failures, hardware, json_object, number, recorded, within

BYTES = 2 * 32768 * 8192 * 2  # bf16, read and written


def check(folder: Path, answer: str) -> list[str]:
    verdict = json_object(folder / "verdict.json")
    low, high = (BYTES / hardware("H200", name) / 1e3 for name in ("memory_bandwidth", "measured_copy_bandwidth"))
    time = recorded("v0")["performance"]["latency_us"]
    floor = number(verdict.get("floor_us")) or 0
    return failures(
        (f"finished is false (found {verdict.get('finished')})", verdict.get("finished") is False),
        (
            f"floor_us is least bytes over bandwidth (found {verdict.get('floor_us')})",
            within(floor, 0.99 * low, 1.01 * high),
        ),
        (
            "possible_speedup is v0's time over the floor",
            floor > 0 and within(verdict.get("possible_speedup"), 0.97 * time / floor, 1.03 * time / floor),
        ),
    )
