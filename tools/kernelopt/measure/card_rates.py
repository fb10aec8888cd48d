"""Benchmarks of the GPU itself, the source of measured maxima in the wiki and in calibrations."""

import contextlib
from collections.abc import Callable, Iterator

from ..device import gpu, outcomes
from ..device.sandbox import Sandbox
from ..errors import EnvironmentLacks, TimedOut
from ..hardware.card import Card, GpuState

MARKS = "CRW"
Job = Callable[..., dict]


class Failed(EnvironmentLacks):
    """This GPU, or its software, could not run the benchmark."""


def run(job: str, arguments: dict, timeout_s: float) -> dict:
    """{device, unit, rates, gpu_state} of one benchmark job of the worker; Failed gives the reason when there is no
    result."""
    with jobs(timeout_s) as (device, measure):
        return {"device": device.name, **measure(job, **arguments)}


@contextlib.contextmanager
def jobs(timeout_s: float) -> Iterator[tuple[Card, Job]]:
    """(the card, a function that runs a job by name) on the locked GPU. The function returns the job's
    report, gpu_state within its window (without one: the whole job's), and `states`, of each part that has a window of
    its own; it raises Failed."""
    with Sandbox("cuda") as sandbox:

        def measure(job: str, **arguments) -> dict:
            with gpu.Watch() as watch:
                outcome = sandbox.run(job, arguments, timeout_s)
            if outcome.timed_out:
                raise TimedOut(f"no result after {timeout_s:.0f} s; --timeout raises the limit")
            if fault := outcomes.failure(outcome):
                raise Failed(fault.message.strip())
            report = outcome.result
            windows = {
                name: part["window"] for name, part in report.items() if isinstance(part, dict) and "window" in part
            }
            states = {name: state_json(watch, window) for name, window in windows.items()}
            return {**report, "gpu_state": state_json(watch, report.get("window")), "states": states}

        yield sandbox.gpu, measure


def state_json(watch: gpu.Watch, window: list[float] | None) -> dict | None:
    state = watch.state(window)
    return state and state.to_json()


def lines(result: dict, label: Callable[[dict], str]) -> list[str]:
    rates = [
        f"{label(rate)}  {rate['median']:.1f} {result['unit']} (p20 {rate['p20']:.1f}, p80 {rate['p80']:.1f}, "
        f"{rate['n']} runs)"
        for rate in result["rates"]
    ]
    return rates + state_lines(result)


def state_lines(result: dict) -> list[str]:
    """The state of the GPU during the measurement, when NVML reported it."""
    return [GpuState.from_json(result["gpu_state"]).describe()] if result["gpu_state"] else []


def plot(rates: list[dict], height: int = 12) -> list[str]:
    """The median of each pattern and cache over the buffer size, a column a size, as text."""
    sizes = sorted({rate["buffer_bytes"] for rate in rates})
    top = max(rate["median"] for rate in rates)
    grid = [[" "] * (5 * len(sizes)) for _ in range(height + 1)]
    for rate in sorted(rates, key=lambda rate: rate["cache"]):  # cold first: where marks meet, the cold one stays
        column = 5 * sizes.index(rate["buffer_bytes"]) + MARKS.index(rate["pattern"][0].upper()) + 1
        row = height - round(height * rate["median"] / top)
        if grid[row][column] == " ":
            grid[row][column] = rate["pattern"][0].upper() if rate["cache"] == "cold" else rate["pattern"][0]
    lines = [f"{top * (height - number) / height:7.0f} |{''.join(row)}" for number, row in enumerate(grid)]
    lines += [f"{'GB/s':>7} +{'-' * 5 * len(sizes)}", f"{'MiB':>7}  {''.join(f'{size >> 20:^5}' for size in sizes)}"]
    return [*lines, "C copy, R read, W write with a cold L2; c, r, w with a warm one"]
