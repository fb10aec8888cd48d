"""Jobs that run a candidate under a profiler: a marked range of calls (ncu, nsys, rocprofv3), and a trace by torch."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import artefacts, problem, tensor_trees, tracing
from .context import Candidate, Context
from .state import identical

WARM_UP_CALLS = 3


@dataclass(frozen=True)
class ProfiledCalls:
    """torch: its version. window: begin and end of the calls, seconds since the epoch. triton: its compiled kernels and
    the autotuners' choices (see Candidate.triton)."""

    torch: str
    window: list[float]
    triton: list[artefacts.TritonKernelJson]


def profile(context: Context, kernel: str, inputs: str, calls: int = 1, compiled: str | None = None) -> ProfiledCalls:
    """Calls of the kernel inside a profiler range, after warm-up calls (autotuning included) outside it. compiled: a
    folder for Triton's compiled stages."""
    candidate = Candidate(context, kernel)
    call, _ = warmed_up(context, candidate, inputs)
    since = time.time()
    torch.cuda.profiler.start()
    for _ in range(calls):
        call()
    context.synchronize()
    torch.cuda.profiler.stop()
    window = [since, time.time()]
    return ProfiledCalls(torch.__version__, window, candidate.triton(compiled))


def trace(context: Context, kernel: str, inputs: str, calls: int, mark: str, path: str) -> ProfiledCalls:
    """Calls of the kernel under torch's profiler; each is inside a range of the name `mark` and is waited for; the
    Chrome trace goes to `path`."""
    candidate = Candidate(context, kernel)
    call, restore = warmed_up(context, candidate, inputs)
    tracing.start_up()
    since = time.time()
    with tracing.profiling() as profiler:
        for _ in range(calls):
            restore()
            with torch.profiler.record_function(mark):
                call()
            context.synchronize()
    window = [since, time.time()]
    profiler.export_chrome_trace(path)
    return ProfiledCalls(torch.__version__, window, candidate.triton(None))


def warmed_up(context: Context, candidate: Candidate, inputs: str) -> tuple[Callable[[], object], Callable[[], None]]:
    """(a call of the kernel on a case, after it was compiled and autotuned; a function that gives the inputs their
    contents again where a call changes them)"""
    case = candidate.load_case(inputs)
    kernel, placed = candidate.load(case), case.placed_inputs(context.device)
    arguments = tensor_trees.aliases(placed)
    memory, contents = tensor_trees.input_tensors(placed), tensor_trees.input_tensors(case.inputs)
    for _ in range(WARM_UP_CALLS):
        tensor_trees.fill(memory, contents)
        problem.call(kernel, arguments)
    context.synchronize()
    changed = [
        pair for pair in zip(memory, contents, strict=True) if not identical(pair[0], pair[1].to(pair[0].device))
    ]

    def restore() -> None:
        for tensor, content in changed:
            tensor.copy_(content)
        context.synchronize()

    restore()
    return (lambda: problem.call(kernel, arguments)), restore
