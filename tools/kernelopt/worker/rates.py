"""Jobs that measure the GPU's own rates: memory bandwidth, the ceiling of a mix of bytes, matrix products."""

import time
from dataclasses import dataclass
from typing import TypedDict

import torch
import triton

from ..session.benchmark_reports import BufferRate, ProductRate, Rate, ShapeRate
from . import tensor_trees
from .context import Context

MOST_OF_FREE = 4  # a buffer takes a quarter of the free memory at most: a copy needs two, and others use the GPU too
PRODUCT_S = 0.04  # the longest time of a product; slow dtypes get smaller matrices
SIDE_STEP = 1024


class DeviceJson(TypedDict):
    """A device as CUDA shows it, in the wiki's metrics and units."""

    compute_capability: str
    sm_count: int
    l2_capacity: float  # MiB
    memory_capacity: float  # GiB


@dataclass(frozen=True)
class BandwidthAnswer:
    """left_out: sizes in bytes for which too little memory is free. window: when the last size was measured, seconds
    since the epoch. torch, triton: their versions."""

    unit: str
    rates: list[BufferRate]
    left_out: list[int]
    window: list[float]
    device: DeviceJson
    torch: str
    triton: str


@dataclass(frozen=True)
class CeilingAnswer:
    """rates: of each shape of the kernel. window: as in BandwidthAnswer."""

    unit: str
    bytes_in: int
    bytes_out: int
    rates: list[ShapeRate]
    best: ShapeRate
    window: list[float]


@dataclass(frozen=True)
class ProductAnswer:
    """The rate of a matrix product."""

    unit: str
    rates: list[ProductRate]


@dataclass(frozen=True)
class RestedRate:
    """rate: in TFLOPS, for int8 in TOPS. window: when it was measured, seconds since the epoch."""

    rate: Rate
    window: list[float]

    def to_json(self) -> dict:
        return {**self.rate.to_json(), "window": self.window}


@dataclass(frozen=True)
class SustainedRate:
    """median: in TFLOPS, for int8 in TOPS, of calls back to back. window: as in RestedRate."""

    median: float
    window: list[float]


@dataclass(frozen=True)
class ProductRatesAnswer:
    """size: rows of the product. rested: after a pause, as kernels are timed here. sustained: back to back."""

    dtype: str
    size: int
    rested: RestedRate
    sustained: SustainedRate


def bandwidth(context: Context, sizes: list[int], rep_ms: int, warm: bool = True) -> BandwidthAnswer:
    """Memory bandwidth in GB/s per buffer size in bytes: copy counts the bytes read and written, read and write theirs.

    cache "cold": the L2 is flushed before each call, so that DRAM answers; "warm": the calls follow each other, and
    data that fits in the L2 comes from there.
    """
    measured, fitting = [], [size for size in sizes if size <= free_bytes() // MOST_OF_FREE]
    cached = 4 * torch.cuda.get_device_properties(0).L2_cache_size  # above this, warm and cold are the same
    start = time.time()
    for size in fitting:
        start = time.time()
        source = torch.randn(size // 4, device=context.device)
        target = torch.empty_like(source)
        for pattern, call, moved in (
            ("copy", lambda s=source, t=target: t.copy_(s), 2 * source.nbytes),
            ("read", lambda s=source: s.sum(), source.nbytes),
            ("write", lambda t=target: t.fill_(1.0), target.nbytes),
        ):
            for cache in ("cold", "warm") if warm and size <= cached else ("cold",):
                measured.append(BufferRate(pattern, size, cache, rates(call, moved / 1e9, rep_ms, cache)))
        del source, target, call
    left_out = [size for size in sizes if size not in fitting]
    window = [start, time.time()]
    return BandwidthAnswer("GB/s", measured, left_out, window, shown(), torch.__version__, triton.__version__)


def free_bytes() -> int:
    return torch.cuda.mem_get_info()[0]


def shown() -> DeviceJson:
    """The device as CUDA shows it. For a MIG slice CUDA shows the slice. Under WSL2 and in virtual machines NVML
    reports less."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "compute_capability": f"{properties.major}.{properties.minor}",
        "sm_count": properties.multi_processor_count,
        "l2_capacity": properties.L2_cache_size / 2**20,
        "memory_capacity": properties.total_memory / 2**30,
    }


def ceiling(context: Context, bytes_in: int, bytes_out: int, dtype: str, rep_ms: int) -> CeilingAnswer:
    """The rate of a kernel that only reads `bytes_in` and writes `bytes_out`, in GB/s of both, with a cold cache.

    The best of several shapes of such a kernel (copy_kernel.SHAPES); each element in `dtype`.
    """
    from . import copy_kernel  # Triton kernels: loaded where they are used

    kind = tensor_trees.TORCH_DTYPES.get(dtype, torch.int32)
    width = torch.empty((), dtype=kind).element_size()
    source = torch.ones(copy_kernel.elements(bytes_in, width), dtype=kind, device=context.device)
    target = torch.empty(copy_kernel.elements(bytes_out, width), dtype=kind, device=context.device)
    measured, start = [], time.time()
    for shape in copy_kernel.SHAPES:
        rate = rates(lambda s=shape: copy_kernel.stream(source, target, **s), (bytes_in + bytes_out) / 1e9, rep_ms)
        measured.append(ShapeRate(**shape, rate=rate))
    best = max(measured, key=lambda one: one.rate.median)
    return CeilingAnswer("GB/s", bytes_in, bytes_out, measured, best, [start, time.time()])


def matmul(context: Context, size: int, dtype: str, rep_ms: int) -> ProductAnswer:
    """TFLOPS (TOPS for int8) of a square matrix product on random data, through torch."""
    call = product(context.device, size, dtype)
    return ProductAnswer("TFLOPS", [ProductRate(dtype, size, rates(call, 2 * size**3 / 1e12, rep_ms))])


def product_rates(
    context: Context, dtype: str, largest: int, rep_ms: int, pause_s: float, sustained_s: float
) -> ProductRatesAnswer:
    """The rates of a square product of at most `largest` rows: rested, after a pause of `pause_s`; sustained, back to
    back for `sustained_s`, in its second half."""
    size = fitting_size(context, dtype, largest)
    call, work = product(context.device, size, dtype), 2 * size**3 / 1e12
    call()
    torch.cuda.synchronize()
    time.sleep(pause_s)
    start = time.time()
    rested = RestedRate(rates(call, work, rep_ms), [start, time.time()])
    back_to_back(call, sustained_s / 2)
    start = time.time()
    per_s = back_to_back(call, sustained_s / 2)
    sustained = SustainedRate(work * per_s, [start, time.time()])
    return ProductRatesAnswer(dtype, size, rested, sustained)


def fitting_size(context: Context, dtype: str, largest: int) -> int:
    """Rows of the largest product that takes about PRODUCT_S at most and fits into the free memory, in steps of
    SIDE_STEP."""
    small = product(context.device, SIDE_STEP, dtype)
    small()
    seconds = 1 / back_to_back(small, 0.02)
    by_time = SIDE_STEP * (PRODUCT_S / seconds) ** (1 / 3)
    by_memory = (free_bytes() / MOST_OF_FREE / 4) ** 0.5  # drawn in fp32
    fitting = int(min(largest, by_time, by_memory) // SIDE_STEP * SIDE_STEP)
    return max(SIDE_STEP, fitting)


def back_to_back(call, seconds: float, at_once: int = 8) -> float:
    """Calls per second, one after the other, for about the given number of seconds. at_once: launched before the host
    waits for them."""
    edges = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    deadline, calls = time.monotonic() + seconds, 0
    edges[0].record()
    while calls == 0 or time.monotonic() < deadline:
        for _ in range(at_once):
            call()
        calls += at_once
        torch.cuda.synchronize()
    edges[1].record()
    torch.cuda.synchronize()
    return calls / edges[0].elapsed_time(edges[1]) * 1e3


def product(device: str, size: int, name: str):
    """A call that multiplies two matrices of that dtype: normally distributed, for int8 evenly from -128 to 127."""
    if name == "int8":
        a, b = (torch.randint(-128, 128, (size, size), device=device, dtype=torch.int8) for _ in range(2))
        return lambda: torch._int_mm(a, b.t())
    torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    if name == "fp8":
        a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    dtype = tensor_trees.TORCH_DTYPES["fp32" if name == "tf32" else name]
    a, b = a.to(dtype), b.to(dtype)
    return lambda: a @ b


def rates(call, amount: float, rep_ms: int, cache: str = "cold") -> Rate:
    """Rates of `amount` per second, by triton.testing: do_bench, which flushes the L2 before each call,
    or do_bench_cudagraph, which does not."""
    from triton.testing import do_bench, do_bench_cudagraph

    if cache == "cold":
        times = do_bench(call, warmup=max(1, rep_ms // 4), rep=rep_ms, return_mode="all")
    else:
        times = do_bench_cudagraph(call, rep=rep_ms, return_mode="all")
    times = sorted(times, reverse=True)
    at = {p: amount / times[min(len(times) - 1, len(times) * p // 100)] * 1e3 for p in (20, 50, 80)}
    return Rate(at[50], at[20], at[80], len(times))
