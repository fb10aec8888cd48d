"""The GPU kernels that a call launches, their times and their origins, from torch's profiler (CUPTI)."""

import contextlib
import functools
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypedDict

import torch

from .context import Context

# Kernels of PyTorch, of cuBLAS, cuDNN and hipBLASLt, and those that torch.compile generates, by the names that CUPTI
# gives. A name must be one that only these make: `hopper_sgemm_kernel` or `ada_softmax` may be a user's kernel, and so
# may a CUTLASS kernel, whose name holds cutlass::gemm or cutlass::conv. The patterns were compared with the names in
# cuBLAS 13.10 and cuDNN 9.28 (tests/worker/test_tracing.py).
LIBRARY = re.compile(
    r"""
    at::native | at::cuda | __5x_cu(blas|dnn) | \bcublas\w+(Params|Tensor)
    | ^(void\ )? (cutlass::(Kernel2?|device_kernel)<)?
      ( cublas(?!_) | cudnn | nvjet_ | sm\d{2,3}_xmma_ | xmma:: | cutlass_\d{2,3}_\w*(tensorop|simt)_
      | cutlass3x_sm\d{2,3}[a-z]?_\w*(tensorop|simt)_ | cutlass_sm\d{2,3}_simt_implicit_gemm
      | gemmSN_ | gemv2[NT]_kernel | gemvNSP_kernel | gemmk1_kernel | splitKreduce_kernel
      | (implicit|explicit|precomputed)_convolve\w*gemm | RNN_(blockP|p)ersist | (Custom_)?Cijk_
      | pytorch_flash | fmha_cutlass )
    # type, "gemm" or "cudnn", tile, transposition: ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn
    | ^(_5x_cudnn_)? (maxwell|volta|turing|ampere|ada|hopper|blackwell)_ (\w+_)? [a-z]{1,2}\d*(gemm|cudnn)_
      (\w+_)? \d+x\d+_ (\w+_)? [nct]{2} (_v\d+)?$
    | ^triton_(poi|red|per|tem|for|mm|spl)_fused
    """,
    re.VERBOSE,
)
# Torch itself launches these, whatever their names are.
TORCH_OPERATORS = "aten::"
# Operations that allocate, fill, copy or convert compute nothing.
MOVING = re.compile(
    r"^Mem(cpy|set)|at::native.*(FillFunctor|copy_kernel|CatArrayBatchedCopy|LoadWithCast)|^triton_\w*_to_copy"
)
MOVING_OPERATORS = ("fill_", "zero_", "copy_", "clone", "contiguous", "to", "_to_copy", "cat", "zeros", "full", "empty")
REDUCING_OPERATORS = ("sum", "nansum", "mean", "prod", "amax", "amin", "max", "min")


@dataclass(frozen=True)
class KernelRun:
    """One run of a GPU kernel. start_us: on the profiler's clock. us: how long it took. origin: see `origin`.
    reduces: how many elements torch reduced by kernels of that name, where one of its reductions launched it."""

    name: str
    start_us: float
    us: float
    origin: str
    reduces: int | None = None


class ProbeJson(TypedDict):
    """kernels: how many of them the profiler named."""

    kernels: int


def kernels_of(call, before=lambda: None) -> list[KernelRun]:
    """The kernels of one call, in the order of their start. `before` is run first and not traced."""
    start_up()
    before()
    events = traced(call)
    launched, moved = launched_by_torch(events)
    reduced = reduced_by_torch(events)
    return [
        KernelRun(
            event.name,
            event.time_range.start,
            event.time_range.elapsed_us(),
            origin(event.name, launched, moved),
            reduced.get(event.name),
        )
        for event in sorted(device_events(events), key=lambda event: event.time_range.start)
    ]


def probe(context: Context) -> ProbeJson:
    """How many kernels the profiler names of a call of torch's that launches some. A job without a candidate."""
    numbers = torch.ones(1 << 10, device=context.device)
    return {"kernels": len(kernels_of(lambda: numbers.exp().sum()))}


@functools.cache
def start_up() -> None:
    """Start CUPTI. That takes seconds, and calls during the start are slow."""
    traced(lambda: torch.zeros(1, device="cuda"))


def traced(call) -> list:
    """The profiler's events of one call, after waiting for it."""
    torch.cuda.synchronize()
    with profiling(of_threads=True) as profiler:
        call()
        torch.cuda.synchronize()
    return profiler.events()


@contextlib.contextmanager
def profiling(of_threads: bool = False) -> Iterator[torch.profiler.profile]:
    """torch's profiler of the CPU and the GPU, running inside. of_threads: it sees the operators of all threads, and
    their shapes."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    more = {"record_shapes": True, "experimental_config": all_threads()} if of_threads else {}
    profiler = torch.profiler.profile(activities=activities, **more)
    with inductor_hidden():
        profiler.start()
    try:
        yield profiler
    finally:
        profiler.stop()


def all_threads():
    """A setting of torch's profiler: without it the operators of threads that run already, or start meanwhile, are not
    seen. None in an older torch, which lacks it."""
    try:
        return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        return None


@contextlib.contextmanager
def inductor_hidden() -> Iterator[None]:
    """Keep torch from importing `_inductor` while its profiler starts.

    The start asks whether torch has `_inductor`. The question imports it and torch._dynamo, which takes as long as
    importing torch. Inside, the answer is no, unless `_inductor` is loaded already.
    """
    lazy = getattr(torch, "_lazy_modules", set())
    hidden = lazy & {"_inductor"} if "torch._inductor" not in sys.modules else set()
    lazy -= hidden
    try:
        yield
    finally:
        lazy |= hidden


def device_events(events: list) -> list:
    return [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]


def launched_by_torch(events: list) -> tuple[set[str], set[str]]:
    """Names of the kernels that torch's own operators launched: those that compute, and those that only move data."""
    computing, moving = set(), set()
    for event in events:
        if event.name.startswith(TORCH_OPERATORS):
            operator = event.name.removeprefix(TORCH_OPERATORS)
            names = {kernel.name for kernel in event.kernels}
            (moving if operator in MOVING_OPERATORS else computing).update(names)
    return computing, moving


def reduced_by_torch(events: list) -> dict[str, int]:
    """By name, the kernels that torch's reductions launched: the elements of the largest tensor that one reduced."""
    reduced: dict[str, int] = {}
    for event in events:
        if event.name.removeprefix(TORCH_OPERATORS) in REDUCING_OPERATORS and event.input_shapes:
            for kernel in event.kernels:
                reduced[kernel.name] = max(reduced.get(kernel.name, 0), math.prod(event.input_shapes[0]))
    return reduced


def origin(name: str, computing: set[str], moving: set[str]) -> str:
    """The origin of a kernel: "own", "library", or "moving" for fills and copies."""
    if MOVING.search(name) or name in moving:
        return "moving"
    return "library" if name in computing or LIBRARY.search(name) else "own"
