"""Which GPU kernels a call launches, how long each runs, and whose they are: through torch's profiler (CUPTI)."""

import functools
import re

import torch

# Kernels of PyTorch and of NVIDIA's libraries, and those that torch.compile generates, by the names that CUPTI gives.
LIBRARY = re.compile(
    r"at::native|at::cuda|^(void )?(cublas|cudnn|nvjet_|cutlass_\d\d_|cutlass::Kernel2?<cutlass_\d\d_|sm\d\d_xmma_|"
    r"(ampere|volta|turing|maxwell|hopper)_\w*gemm|gemmSN|gemv2|gemvNSP|splitKreduce_kernel|pytorch_flash|fmha_cutlass)|"
    r"^triton_(poi|red|per|tem|for|mm|spl)_fused"
)
# Launched by torch itself, whatever their names are.
TORCH_OPERATORS = "aten::"
# What allocates, fills, copies or converts computes nothing.
MOVING = re.compile(r"^Mem(cpy|set)|FillFunctor|copy_kernel|CatArrayBatchedCopy|_to_copy|LoadWithCast|bfloat16_copy")
MOVING_OPERATORS = ("fill_", "zero_", "copy_", "clone", "contiguous", "to", "_to_copy", "cat", "zeros", "full", "empty")


def kernels_of(call, before=lambda: None) -> list[dict]:
    """[{name, start_us, us, origin}] of one call, in the order of their start (see `origin`).

    `before` is run first and not traced.
    """
    start_up()
    before()
    events = traced(call)
    launched, moved = launched_by_torch(events)
    return [
        {
            "name": event.name,
            "start_us": event.time_range.start,
            "us": event.time_range.elapsed_us(),
            "origin": origin(event.name, launched, moved),
        }
        for event in sorted(device_events(events), key=lambda event: event.time_range.start)
    ]


@functools.cache
def start_up() -> None:
    """CUPTI takes seconds to start, and what runs meanwhile is slow."""
    traced(lambda: torch.zeros(1, device="cuda"))


def traced(call) -> list:
    """The profiler's events of one call, waited for."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return profiler.events()


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


def origin(name: str, computing: set[str], moving: set[str]) -> str:
    """Whose kernel it is: "own", "library", or "moving" for what fills and copies."""
    if MOVING.search(name) or name in moving:
        return "moving"
    return "library" if name in computing or LIBRARY.search(name) else "own"
