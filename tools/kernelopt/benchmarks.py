"""Benchmarks of the GPU itself, which measured maxima in the wiki come from."""

from collections.abc import Callable

from . import cli, gpu, timing
from .errors import TimedOut
from .sandbox import Sandbox


def add_options(parser) -> None:
    parser.add_argument("--rep-ms", type=cli.positive_int, default=500, help="do_bench's repetition, in milliseconds")
    parser.add_argument("--timeout", type=cli.positive_float, default=300, help="seconds (default 300)")
    cli.add_json(parser)


def run(job: str, arguments: dict, timeout_s: float) -> dict:
    """{device, unit, rates, gpu_state} of a benchmark job of the worker."""
    with Sandbox("cuda") as sandbox, gpu.Watch() as watch:
        outcome = sandbox.run(job, arguments, timeout_s)
        if outcome.timed_out:
            raise TimedOut(f"no result after {timeout_s:.0f} s; --timeout raises the limit")
        return {"device": sandbox.device_name, **timing.answer(outcome), "gpu_state": watch.state()}


def lines(result: dict, label: Callable[[dict], str]) -> list[str]:
    found = [
        f"{label(rate)}  {rate['median']:.1f} {result['unit']} (p20 {rate['p20']:.1f}, p80 {rate['p80']:.1f}, {rate['n']} runs)"
        for rate in result["rates"]
    ]
    if state := result["gpu_state"]:
        found.append(gpu.describe(state))
    return found
