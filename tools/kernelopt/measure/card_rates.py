"""Benchmarks of the GPU itself, the source of measured maxima in the wiki and in calibrations."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

from ..device import gpu_watch, outcomes
from ..device.sandbox import Sandbox
from ..errors import EnvironmentLacks, TimedOut
from ..hardware.card import Card
from ..session.benchmark_reports import REPORTS, WHOLE, BufferRate, Report, State

MARKS = "CRW"
Job = Callable[..., Report]


class Failed(EnvironmentLacks):
    """This GPU, or its software, could not run the benchmark."""


def run(job: str, arguments: dict, timeout_s: float) -> tuple[str, Report]:
    """(the name of the GPU, the report of one benchmark job on it). Failed gives the reason when there is no report."""
    with jobs(timeout_s) as (device, measure):
        return device.name, measure(job, **arguments)


@contextlib.contextmanager
def jobs(timeout_s: float) -> Iterator[tuple[Card, Job]]:
    """(the card, a function that runs a job by name) on the locked GPU. The function returns the job's
    report, or raises Failed."""
    with Sandbox("cuda") as sandbox:

        def measure(job: str, **arguments) -> Report:
            with gpu_watch.Watch() as watch:
                outcome = sandbox.run(job, arguments, timeout_s)
            if outcome.timed_out:
                raise TimedOut(f"no result after {timeout_s:.0f} s; --timeout raises the limit")
            if fault := outcomes.failure(outcome):
                raise Failed(fault.message.strip())
            return REPORTS[job].from_json(outcome.result, states_of(outcome.result, watch))

        yield sandbox.gpu, measure


def states_of(report: dict, watch: gpu_watch.Watch) -> dict[str, State]:
    """The state of the GPU within the report's window, or during the whole job; and by name within the window of each
    part that has one."""
    windows = {name: part["window"] for name, part in report.items() if isinstance(part, dict) and "window" in part}
    return {name: watch.state(window) for name, window in {WHOLE: report.get("window"), **windows}.items()}


def state_lines(state: State) -> list[str]:
    """The state of the GPU during the measurement, when NVML reported it."""
    return [state.describe()] if state else []


def plot(rates: Sequence[BufferRate], height: int = 12) -> list[str]:
    """The median of each pattern and cache over the buffer size, a column a size, as text."""
    sizes = sorted({one.buffer_bytes for one in rates})
    top = max(one.rate.median for one in rates)
    grid = [[" "] * (5 * len(sizes)) for _ in range(height + 1)]
    for one in sorted(rates, key=lambda one: one.cache):  # cold first: where marks meet, the cold one stays
        column = 5 * sizes.index(one.buffer_bytes) + MARKS.index(one.pattern[0].upper()) + 1
        row = height - round(height * one.rate.median / top)
        if grid[row][column] == " ":
            grid[row][column] = one.pattern[0].upper() if one.cache == "cold" else one.pattern[0]
    lines = [f"{top * (height - number) / height:7.0f} |{''.join(row)}" for number, row in enumerate(grid)]
    lines += [f"{'GB/s':>7} +{'-' * 5 * len(sizes)}", f"{'MiB':>7}  {''.join(f'{size >> 20:^5}' for size in sizes)}"]
    return [*lines, "C copy, R read, W write with a cold L2; c, r, w with a warm one"]
