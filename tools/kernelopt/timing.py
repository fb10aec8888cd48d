"""Time: the latency that is recorded, and the paired comparison that decides.

A latency is the median of `triton.testing.do_bench`. Two latencies taken at different times are never compared:
one and the same kernel drifts by up to 15 % within a minute. What decides is `compare`, which times both kernels
in turn in one process.
"""

from pathlib import Path

from . import gpu, verify
from .errors import Refused, TimedOut, UsageError
from .sandbox import Outcome, Sandbox

PROTOCOL = (
    "A B B A, then B A A B; before each call the L2 cache is flushed and a sleeping kernel holds the stream; "
    "one pair of CUDA events a call; both kernels of a round get the same inputs, the rounds rotate through the sets"
)
WARMUP_MS = 25  # do_bench's own defaults: both are milliseconds, not counts
REP_MS = 100
ROUNDS = 60
CPU_ROUNDS = 4
INPUT_SETS = 8


def inputs(
    sandbox: Sandbox,
    reference: Path,
    dtype: str | None,
    workloads: list[str],
    count: int = INPUT_SETS,
    timeout_s: float = 300,
) -> dict[str, list[dict]]:
    """Per workload, files with `count` sets of fresh random inputs; fewer when they are large."""
    seeds = [verify.secret_seed() for _ in range(count)]
    found = verify.prepare(sandbox, reference, dtype, workloads, seeds, timeout_s, at_least=1)
    if "error" in found:
        raise Refused(f"the reference fails: {found['error']['message'].strip()}")
    return {name: [case for case in found["cases"] if case["workload"] == name] for name in workloads}


def latency(
    sandbox: Sandbox,
    kernel: Path,
    case: dict,
    warmup_ms: int = WARMUP_MS,
    rep_ms: int = REP_MS,
    timeout_s: float = 300,
) -> tuple[dict, str]:
    """({device, clock, workload, latency_us{median, p20, p80, n}, gpu_state}, file of the last timed call's output)
    of one kernel on one set of inputs.

    Refused when the kernel cannot be run; times are in microseconds.
    """
    output = str(Path(sandbox.new_folder("timed")) / "output.pt")
    arguments = {"kernel": str(kernel.resolve()), "inputs": case["path"], "output": output}
    arguments |= {"warmup_ms": warmup_ms, "rep_ms": rep_ms}
    with gpu.Watch() as watch:
        result = answer(sandbox.run("latency", arguments, timeout_s))
    check_stray(result["after"])
    found = {
        "device": sandbox.device_name,
        "clock": result["clock"],
        "workload": case["workload"],
        "latency_us": summary(result["times_us"]),
        "warmup_ms": warmup_ms,
        "rep_ms": rep_ms,
        "shapes": case["shapes"],
        "dtype": case["dtype"],
        "gpu_state": watch.state(result["window"]) if sandbox.gpu else None,
    }
    return found, output


def compare(
    sandbox: Sandbox, kernel: Path, opponent: Path, cases: list[dict], rounds: int | None = None, timeout_s: float = 300
) -> dict:
    """Raw paired times in microseconds: {device, a_us, b_us, …}, a the kernel and b its opponent.

    Each holds a list per round of the two times in the order they were taken.
    """
    rounds = rounds or (ROUNDS if sandbox.gpu else CPU_ROUNDS)
    inputs = [case["path"] for case in cases]
    arguments = {"a": str(kernel.resolve()), "b": str(opponent.resolve()), "inputs": inputs, "rounds": rounds}
    with gpu.Watch() as watch:
        result = answer(sandbox.run("duel", arguments, timeout_s))
    check_stray(result["after"])
    return {
        "device": sandbox.device_name,
        "protocol": PROTOCOL if sandbox.gpu else "host clock on the CPU",
        "a_us": result["a_us"],
        "b_us": result["b_us"],
        "input_sets": result["input_sets"],
        "gpu_state": watch.state(result["window"]) if sandbox.gpu else None,
    }


class KernelFailed(Refused):
    """The kernel failed while it was timed; `status` is one of verify's."""

    def __init__(self, status: str, message: str):
        super().__init__(f"{status}: {message.strip()}; its time does not count, run verify_kernel.py first")
        self.status = status


def answer(outcome: Outcome) -> dict:
    """The worker's result; KernelFailed or TimedOut says how the kernel failed instead."""
    found = verify.failure(outcome) or outcome.result
    if "error" not in found:
        return found
    fault = found["error"]
    if fault["status"] == "TIMEOUT":
        raise TimedOut(f"the kernel did not finish: {fault['message']}; --timeout raises the limit")
    if fault["status"] == "OPPONENT":
        raise UsageError(f"what the kernel is compared with fails itself: {fault['message'].strip()}")
    raise KernelFailed(fault["status"], fault["message"])


# How much longer than its call a kernel may keep the GPU busy. Waiting for an idle H200 took 4.4 to 7.2 us after honest
# calls of 13 us to 2 ms; a kernel hidden on another stream showed 21 us (25 us of work) to 493 us (520 us of work).
STRAY_US = 15.0
STRAY_SHARE = 0.05


def check_stray(after: dict | None) -> None:
    """KernelFailed when the GPU went on working well after the call's end: work on a stream that was not timed.

    after: {call_us, stray_us}, medians; None without a GPU.
    """
    if after and after["stray_us"] > max(STRAY_US, STRAY_SHARE * after["call_us"]):
        raise KernelFailed(
            "CHEAT_SUSPECT",
            f"the GPU worked on for {after['stray_us']:.0f} us after the end of a call of {after['call_us']:.0f} us: "
            "the kernel runs on another stream than the current one",
        )


def summary(times_us: list[float]) -> dict:
    """{median, p20, p80, n} of single times."""
    ordered = sorted(times_us)
    at = lambda share: ordered[min(len(ordered) - 1, int(share * len(ordered)))]  # noqa: E731
    return {"median": at(0.5), "p20": at(0.2), "p80": at(0.8), "n": len(ordered)}
