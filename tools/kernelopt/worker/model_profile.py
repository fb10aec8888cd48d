"""The job that profiles a steady step of a model, and times what torch.compile and CUDA graphs make of it."""

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ..hardware.work import ModuleWork
from . import model_steps, model_work, tracing
from .context import Context
from .model_file import ModelFile
from .model_steps import Steps, StepTimes

STEP, MODULE = "kernelopt step", "kernelopt module"  # marks in the trace; models/step_trace.py reads them
PROFILED_STEPS = 3
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
ON_HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
KEPT = ("Input Dims", "Input type", "Sequence number", "Fwd thread id", "correlation")  # of an event's arguments


@dataclass(frozen=True)
class ProfiledStep:
    """trace: the file of the recorded step. step_us: of steps without the profiler, by the host's clock. ways: rounds
    of two steps each by way of running, beside the eager one. work: None where it cannot be counted."""

    trace: str
    torch: str
    workload: str
    step_us: list[float]
    ways: dict[str, StepTimes]
    work: list[ModuleWork] | None
    parameters: int
    parameter_bytes: int


def profile_step(
    context: Context,
    model: str,
    workload: str | None,
    training: bool,
    ways: list[str],
    budget_s: float,
    ready_s: float,
    folder: str,
) -> ProfiledStep:
    """ways: names of model_steps.Steps that are held against the eager step; they need a GPU. budget_s: for each.
    ready_s: how long each may take to compile."""
    file = ModelFile(Path(model), context.device, training, context.phase)
    chosen = file.chosen(workload)
    steps = Steps(file, chosen)
    file.phase(f"running eager steps, workload {chosen}")
    eager = model_steps.warmed_up(steps.eager(file.module))
    step_us = [model_steps.host_us(eager) for _ in range(2 * model_steps.LEAST_ROUNDS)]
    compared = {}
    for way in ways:
        file.phase(f"timing {way} steps")
        compared[way] = against_eager(steps, way, eager, file.module, budget_s, ready_s)
    file.phase("profiling a step")
    path = Path(folder, "step.json.gz")
    path.write_bytes(gzip.compress(json.dumps(trace_of(file, eager, folder)).encode()))
    own = list(file.module.parameters())
    file.phase("counting the work of each module on blank tensors")
    return ProfiledStep(
        trace=str(path),
        torch=torch.__version__,
        workload=chosen,
        step_us=step_us,
        ways=compared,
        work=model_work.of_step(file, chosen),
        parameters=sum(one.numel() for one in own),
        parameter_bytes=sum(one.nbytes for one in own),
    )


def against_eager(
    steps: Steps, way: str, eager: Callable, module: torch.nn.Module, budget_s: float, ready_s: float
) -> StepTimes:
    """The eager step and another way of running it, in turn."""
    try:
        with model_steps.within(ready_s):
            other = model_steps.warmed_up(getattr(steps, way)(module))
    except (Exception, model_steps.TookTooLong) as error:
        return StepTimes([], [], (str(error) or type(error).__name__).strip().splitlines()[0])
    return StepTimes(*model_steps.in_turn(eager, other, budget_s, model_steps.host_us))


def trace_of(file: ModelFile, step: Callable, folder: str) -> dict:
    """The Chrome trace of a step, cut down to what tells which module's which operator launched which kernel."""
    ranges: list[torch.profiler.record_function] = []

    def enter(path: str, kind: str) -> None:
        ranges.append(torch.profiler.record_function(f"{MODULE} {path} ({kind})"))
        ranges[-1].__enter__()

    def leave() -> None:
        ranges.pop().__exit__(None, None, None)

    activities = [torch.profiler.ProfilerActivity.CPU]
    if file.device == "cuda":
        tracing.start_up()
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities, record_shapes=True)
    with tracing.inductor_hidden():
        profiler.start()
    with model_work.watched(file.module, enter, leave):
        for _ in range(PROFILED_STEPS):
            with torch.profiler.record_function(STEP):
                step()
                model_steps.idle()
    profiler.stop()
    path = Path(folder, "whole.json")
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    path.unlink()
    return {"traceEvents": last_step([event for event in events if event.get("ph") == "X"])}


def last_step(events: list[dict]) -> list[dict]:
    """The events of the last marked step, with what is used of them. Of operators inside operators only those that
    the backward pass refers to, and of the host's calls only those that launched something."""
    mark = max((event for event in events if event["name"] == STEP and event["cat"] == ON_HOST[1]), key=start_of)
    inside = [event for event in events if mark["ts"] <= event["ts"] < mark["ts"] + mark["dur"]]
    on_gpu = [event for event in inside if event["cat"] in ON_GPU]
    launched = {event["args"].get("correlation") for event in on_gpu}
    host = sorted(
        (event for event in inside if event["cat"] in ON_HOST), key=lambda event: (event["ts"], -event["dur"])
    )
    used, open_until = [], {}
    for event in host:
        if event["cat"] in ON_HOST[2:]:
            if event["args"].get("correlation") in launched:
                used.append(event)
            continue
        is_operator = event["name"].startswith("aten::")
        nested = is_operator and event["ts"] < open_until.get(event["tid"], -1.0)
        if is_operator and not nested:
            open_until[event["tid"]] = event["ts"] + event["dur"]
        if not nested or "Sequence number" in event.get("args", {}):
            used.append(event)
    return [trimmed(event) for event in (*used, *on_gpu)]


def start_of(event: dict) -> float:
    return event["ts"]


def trimmed(event: dict) -> dict:
    own = {name: event[name] for name in ("ph", "cat", "name", "pid", "tid", "ts", "dur")}
    args = event.get("args", {})
    if event["cat"] in ON_GPU:
        return {**own, "args": {name: args[name] for name in ("correlation", "stream") if name in args}}
    return {**own, "args": {name: args[name] for name in KEPT if name in args}}
