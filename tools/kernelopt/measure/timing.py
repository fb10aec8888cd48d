"""Time: the latency that is recorded, and the paired comparison that decides.

A latency is the median of `triton.testing.do_bench`. Two latencies taken at different times are never compared:
one and the same kernel drifts by up to 15 % within a minute. What decides are paired rounds, in which both kernels
are timed in turn in one process, in several processes (see gate.paired_verdict).
"""

import statistics
from pathlib import Path

from ..device import gpu, outcomes
from ..device.sandbox import Outcome, Sandbox
from ..errors import Refused, TimedOut, UsageError
from . import correctness, verify

PROTOCOL = (
    "A B B A, then B A A B, in several processes; before each call the inputs are copied into one of two memories, the L2 "
    "cache is filled with other data (read, not written) and a sleeping kernel holds the stream; one pair of CUDA events a call; both kernels of a round get "
    "the same inputs, the rounds rotate through the sets"
)
WARMUP_MS = 25  # do_bench's own defaults: both are milliseconds, not counts
REP_MS = 100
# Looks are taken at fixed counts, so that nobody stops at a lucky moment: 240 rounds in each of 3 processes and, where
# that stays ambiguous, 960. With 60, an H200 told a kernel of 32 us that does 1 % more work in 84 of 100 comparisons,
# with 240 in 50 of 50; no kernel was taken for faster or slower than itself in 260.
ROUNDS = (240, 960)
PROCESSES = 3
CPU_ROUNDS = (12, 12)
BUDGET_S = (1.5, 6.0)  # of rounds in one process and workload: slow kernels get fewer, and need fewer
INPUT_SETS = 8


def inputs(
    sandbox: Sandbox,
    reference: Path,
    dtype: str | None,
    workloads: list[str],
    timeout_s: float = 300,
    count: int = INPUT_SETS,
) -> dict[str, list[dict]]:
    """Per workload, files with `count` sets of fresh random inputs; fewer when they are large."""
    seeds = [verify.secret_seed() for _ in range(count)]
    folder = sandbox.new_folder("inputs")
    found = verify.prepare(sandbox, reference, dtype, workloads, seeds, timeout_s, with_variants=False, folder=folder)
    if "error" in found:
        raise Refused(f"the reference fails: {found['error']['message'].strip()}")
    return {name: [case for case in found["cases"] if case["workload"] == name] for name in workloads}


def measure(
    sandbox: Sandbox,
    kernel: Path,
    opponent: Path | None,
    cases: dict[str, list[dict]],
    look: int = 0,
    warmup_ms: int = WARMUP_MS,
    rep_ms: int = REP_MS,
    timeout_s: float = 300,
) -> dict[str, dict]:
    """What was measured of each workload, times in microseconds: {device, clock, workload, latency_us{median, p20, p80, n},
    event_us{the same}, gpu_us, cupti_us, warm_us, call_us, graph_us, launch_bound, kernels, gpu_state, warnings, rounds[{a_us, b_us}], timed}.

    opponent: timed in turn with the kernel, in PROCESSES processes; without one, one process times the kernel alone.
    look: the how manieth, each with more rounds. Refused when the kernel cannot be run, or tampers with its timing.
    """
    rounds = (ROUNDS if sandbox.gpu else CPU_ROUNDS)[look]
    processes = PROCESSES if opponent and sandbox.gpu else 1
    hidden = [case["path"] for sets in cases.values() for case in sets]
    found: dict[str, list[dict]] = {name: [] for name in cases}
    for number in range(processes):
        arguments = {
            "kernel": str(kernel.resolve()),
            "opponent": opponent and str(opponent.resolve()),
            "workloads": {name: [case["path"] for case in sets] for name, sets in cases.items()},
            "rounds": rounds,
            "budget_s": BUDGET_S[look],
            "warmup_ms": warmup_ms,
            "rep_ms": rep_ms,
            "trace": number == 0 and look == 0,
            "folder": sandbox.new_folder("timed"),
        }
        for name, raw in one_process(sandbox, arguments, timeout_s, hidden).items():
            found[name].append(raw)
    return {name: summed_up(sandbox, name, cases[name], runs, (warmup_ms, rep_ms)) for name, runs in found.items()}


REPEATS = {True: 2, False: 1}  # on a GPU, on the CPU: of a process whose times cannot be believed


def one_process(sandbox: Sandbox, arguments: dict, timeout_s: float, hidden: list[str]) -> dict[str, dict]:
    """The raw times of one process. One whose times cannot be believed counts for nothing and is repeated: a host that stalls for
    some milliseconds looks like tampering once, a kernel that tampers does so each time."""
    on_gpu = sandbox.gpu is not None
    for repeat in range(1 + REPEATS[on_gpu]):
        with gpu.Watch() as watch:
            outcome = sandbox.run("measure", arguments, timeout_s, hidden)
        try:
            return raw_times(outcome, watch, on_gpu)
        except Unbelievable:
            if repeat == REPEATS[on_gpu]:
                raise


def raw_times(outcome: Outcome, watch: gpu.Watch, on_gpu: bool) -> dict[str, dict]:
    """The worker's raw times per workload, with the state of the GPU and this process's own clock; KernelFailed when
    they cannot be believed."""
    found = answer(outcome)
    try:
        for name, raw in found["workloads"].items():
            raw["gpu_state"] = watch.state(raw["window"]) if on_gpu else None
            raw["wall_us"] = stretches(outcome, name)
            refuse(raw, on_gpu)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise KernelFailed("CHEAT_SUSPECT", f"the report of the timing is not sound ({error!r})") from None
    return found["workloads"]


def refuse(raw: dict, on_gpu: bool) -> None:
    """KernelFailed when these raw times cannot be believed, or come from calls that went wrong."""
    if suspicion := suspicious(raw, on_gpu):
        raise Unbelievable("CHEAT_SUSPECT", suspicion)
    if raw["overwritten"]:
        raise KernelFailed("ALIASED_OUTPUT", "a later call writes into the memory of a former one's output")
    if raw["differing"]:
        other = f"{raw['differing']} timed calls returned another result than the first on the same contents"
        raise KernelFailed("WRONG_VALUES", other)


def stretches(outcome: Outcome, workload: str) -> dict[str, float]:
    """{gpu, fresh, call}: microseconds a call by this process's clock, from the marks of worker.timing.Race. gpu: of calls
    launched behind a sleep, whose own length is taken off; fresh: the same, each call on other memory; call: as a caller
    sees it. Of several attempts the shortest: in the others the GPU waited for the host."""

    def stretch(name: str) -> tuple[float, int]:
        (begin, _), (end, calls) = (outcome.marks[f"{workload}: {name} {edge}"] for edge in ("begins", "ends"))
        return (end - begin) * 1e6, calls

    def held(name: str, attempt: int) -> float:
        took, calls = stretch(f"{name} {attempt}")
        return max(0.0, took - stretch(f"sleep {attempt}")[0]) / calls

    attempts = [at for at in range(len(outcome.marks)) if f"{workload}: sleep {at} begins" in outcome.marks]
    took, calls = stretch("call")
    return {name: min(held(name, at) for at in attempts) for name in ("gpu", "fresh")} | {"call": took / calls}


# How much longer than its call a kernel may keep the GPU busy, over what a library's kernel shows on the same machine. That took 4.4 to
# 7.2 us on an H200 after honest calls of 13 us to 2 ms, about 20 us on a virtual machine with busy cores; a kernel hidden on another
# stream showed 21 us (25 us of work) to 493 us (520 us of work).
STRAY_US = 10.0
STRAY_SHARE = 0.05
# {on a GPU, on the CPU}: by how much two figures of the same thing may differ before somebody is taken to tamper. On an
# H200 kernels of 2 to 306 us took 0.5 to 0.998 of their event time by this process's clock (warm, and without the 1.3 us
# of a pair of events); a product limited by power drifts by 15 %. The CPU's clock is a busy machine's.
DISAGREEMENT = {True: 1.3, False: 4.0}
SLACK_US = {True: 10.0, False: 200.0}


def worked_on(call_us: float, stray_us: float, idle_us: float) -> str | None:
    """What to say of a call that its stream does not hold whole; None of any other. Pure."""
    if stray_us - idle_us <= max(STRAY_US, STRAY_SHARE * call_us):
        return None
    return (
        f"the GPU worked on for {stray_us:.0f} us after the end of a call of {call_us:.0f} us "
        f"({idle_us:.0f} us after a kernel of torch's): the kernel runs on another stream than the current one"
    )


def suspicious(raw: dict, on_gpu: bool) -> str | None:
    """Why these raw times cannot be believed; None when nothing speaks against them. Pure."""
    factor, slack = DISAGREEMENT[on_gpu], SLACK_US[on_gpu]
    own = statistics.median(flat(raw["a_us"]))
    if on_gpu and (said := worked_on(**raw["after"])):
        return said
    for name, where in (("gpu", "on the same memory"), ("fresh", "on memory that is new to it")):
        if (outside := raw["wall_us"][name]) > factor * own + slack:
            return f"a call {where} takes {outside:.0f} us by the clock of another process and {own:.0f} us by that of its own"
    bench, quick = statistics.median(raw["bench_us"]), summary(flat(raw["a_us"]))["p20"]
    if quick > factor * bench + slack:
        return (
            f"a call takes {bench:.0f} us in do_bench, on one and the same inputs, and {quick:.0f} us on inputs in turn"
        )
    fresh = raw["a_us"][: raw["sets"] - 1]
    if len(fresh) > 1:
        first, again = (statistics.median(pair[at] for pair in fresh) for at in (0, 1))
        if first > factor * again + slack:
            return (
                f"a call takes {first:.0f} us on contents that it sees for the first time and {again:.0f} us on the same "
                "contents again: it keeps results"
            )
    if raw["solo_us"] and summary(flat(raw["b_us"]))["p20"] > factor * statistics.median(raw["solo_us"]) + slack:
        return "what the kernel is compared with became slower when the kernel was loaded"
    return None


def flat(rounds: list[list[float]]) -> list[float]:
    return [time for pair in rounds for time in pair]


def summed_up(sandbox: Sandbox, workload: str, sets: list[dict], runs: list[dict], window_ms: tuple[int, int]) -> dict:
    """The result of one workload from the raw times of all processes."""
    first = runs[0]
    traced = first.get("traced_us")
    event = summary([time for run in runs for time in flat(run["a_us"])])
    found = {
        "device": sandbox.device_name,
        "clock": first["clock"],
        "workload": workload,
        "latency_us": summary(first["bench_us"]),
        "event_us": event,
        "gpu_us": event["median"] - statistics.median(run["empty_us"] for run in runs) if sandbox.gpu else None,
        "cupti_us": statistics.median(traced) if first.get("kernels") else None,
        "warm_us": statistics.median(run["wall_us"]["gpu"] for run in runs),
        "call_us": statistics.median(run["wall_us"]["call"] for run in runs),
        "graph_us": statistics.median(first["graph_us"]) if first.get("graph_us") else None,
        "kernels": correctness.shares(first["kernels"]) if first.get("kernels") is not None else None,
        "warmup_ms": window_ms[0],
        "rep_ms": window_ms[1],
        "shapes": sets[0]["shapes"],
        "dtype": sets[0]["dtype"],
        "input_sets": len(sets),
        "gpu_state": gpu.merged([run["gpu_state"] for run in runs]),
        "rounds": [{"a_us": run["a_us"], "b_us": run["b_us"]} for run in runs],
        "timed": {
            **sets[0],
            "calls": [
                {"inputs_seed": sets[found["set"]]["seed"], "output": found["output"]}
                for run in runs
                for found in run["outputs"]
            ],
        },
    }
    found["launch_bound"] = launch_bound(found)
    found["warnings"] = warnings(found)
    return found


LAUNCH_BOUND = 1.5  # a call that takes so many times its GPU time waits for the host


def launch_bound(found: dict) -> bool | None:
    """Does a caller wait for launches rather than for the GPU? None without a GPU."""
    return found["call_us"] > LAUNCH_BOUND * found["warm_us"] if found["gpu_us"] else None


# Two clocks of one thing. On an H200 CUPTI gave 1.1 to 1.3 us less than events without their own overhead, at 30 us
# and at four times that; Nsight Compute lay within 0.2 us of the latter. Events see the pause before each further kernel too.
CLOCKS_US = 2.0  # for each kernel
CLOCKS_SHARE = 0.05


def warnings(found: dict) -> list[str]:
    """What a reader of these times should know. Pure."""
    said, events, state = [], found["gpu_us"], found["gpu_state"]
    if found["cupti_us"] and abs(events - found["cupti_us"]) > CLOCKS_SHARE * events + CLOCKS_US * len(
        found["kernels"]
    ):
        said.append(f"two clocks disagree: {found['cupti_us']:.1f} us by CUPTI, {events:.1f} us by events")
    if found["kernels"] == []:
        said.append("one clock alone: CUPTI named no kernel, so the times by events have nothing to agree with")
    if found["launch_bound"]:
        graph = f", {found['graph_us']:.1f} us from a CUDA graph" if found["graph_us"] else ""
        said.append(
            f"launch-bound: a call takes {found['call_us']:.1f} us, of which the GPU works {found['warm_us']:.1f}{graph}"
        )
    if state and state["throttle_reasons"]:
        said.append(f"the GPU was throttled: {', '.join(state['throttle_reasons'])}")
    if state and state["foreign_processes"]:
        said.append(f"other processes use this GPU: {', '.join(map(str, state['foreign_processes']))}")
    return said


class KernelFailed(Refused):
    """The kernel failed while it was timed; `status` is one of verify's."""

    def __init__(self, status: str, message: str):
        super().__init__(f"{status}: {message.strip()}; its time does not count, run verify_kernel.py first")
        self.status = status


class Unbelievable(KernelFailed):
    """Its times contradict each other."""


def answer(outcome: Outcome) -> dict:
    """The worker's result; KernelFailed or TimedOut says how the kernel failed instead."""
    found = outcomes.failure(outcome) or outcome.result
    if "error" not in found:
        return found
    fault = found["error"]
    if fault["status"] == "TIMEOUT":
        raise TimedOut(f"the kernel did not finish: {fault['message']}; --timeout raises the limit")
    if fault["status"] == "OPPONENT":
        raise UsageError(f"what the kernel is compared with fails itself: {fault['message'].strip()}")
    raise KernelFailed(fault["status"], fault["message"])


def summary(times_us: list[float]) -> dict:
    """{median, p20, p80, n} of single times."""
    fifths = statistics.quantiles(times_us, n=5, method="inclusive") if len(times_us) > 1 else 4 * times_us
    return {"median": statistics.median(times_us), "p20": fifths[0], "p80": fifths[3], "n": len(times_us)}
