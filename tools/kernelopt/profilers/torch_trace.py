"""The trace of torch's profiler (CUPTI): collect it and read its Chrome trace. It needs no right to read counters."""

from pathlib import Path

from .. import bundle
from ..device import outcomes
from ..device.outcomes import Outcome
from ..device.sandbox import Sandbox
from ..errors import Refused, TimedOut
from .timeline import HostEvent, Launch, Trace

SOURCE = "torch.profiler (CUPTI)"
CALLS = 20
CALL = "call of the kernel"  # the name under which the worker marks each call
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
API = ("cuda_runtime", "cuda_driver")


def collect(sandbox: Sandbox, kernel: Path, inputs: str, trace: Path, timeout_s: float) -> Outcome:
    """Some calls of `kernel`, after warm-up, into a Chrome trace. Refused: the kernel failed. TimedOut."""
    arguments = {"kernel": str(kernel.resolve()), "inputs": inputs, "calls": CALLS, "mark": CALL}
    with sandbox.folder("trace") as folder:
        made = Path(folder, "trace.json")
        outcome = sandbox.run("trace", {**arguments, "path": str(made)}, timeout_s, [inputs])
        if outcome.timed_out:
            raise TimedOut(f"the calls did not finish in {timeout_s:.0f} s; --timeout raises the limit")
        if failed := outcomes.failure(outcome):
            raise Refused(f"the kernel failed: {failed.message.strip()}")
        trace.write_bytes(made.read_bytes())
    return outcome


def read(path: Path) -> Trace:
    """The trace from a Chrome trace. Refused when it holds no kernel."""
    chrome_trace = bundle.read_json(path)
    events = chrome_trace.get("traceEvents") if isinstance(chrome_trace, dict) else None
    if not isinstance(events, list):
        raise Refused(f"{path} is not a Chrome trace; profile again: profile_kernel.sh --mode event")
    complete = [event for event in events if event.get("ph") == "X"]
    launches = tuple(_launch(event) for event in complete if event.get("cat") in ON_GPU)
    if not launches:
        raise Refused(f"{path} holds no kernel: the call launches none, or CUPTI saw none (does another profiler run?)")
    marks = [event for event in complete if event["name"] == CALL and event.get("cat") == "user_annotation"]
    api = [event for event in complete if event.get("cat") in API]
    return Trace(SOURCE, launches, _host_events(api), _host_events(marks))


def _host_events(events: list[dict]) -> tuple[HostEvent, ...]:
    return tuple(HostEvent(event["name"], event["ts"], event["dur"]) for event in events)


def _launch(event: dict) -> Launch:
    about = event.get("args", {})
    return Launch(
        name=event["name"],
        start_us=event["ts"],
        us=event["dur"],
        stream=about.get("stream"),
        grid=about.get("grid"),
        block=about.get("block"),
        registers=about.get("registers per thread"),
        shared_bytes=about.get("shared memory"),
    )
