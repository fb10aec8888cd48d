"""Jobs that measure the GPU's own rates: memory bandwidth, the ceiling of a mix of bytes, matrix products."""

import time

import torch
import triton

from . import tensor_trees
from .context import Context

MOST_OF_FREE = 4  # a buffer takes a quarter of the free memory at most: a copy needs two, and others use the GPU too
PRODUCT_S = 0.04  # the longest time of a product; slow dtypes get smaller matrices
SIDE_STEP = 1024


def bandwidth(context: Context, sizes: list[int], rep_ms: int, warm: bool = True) -> dict:
    """Memory bandwidth in GB/s per buffer size in bytes: copy counts the bytes read and written, read and write theirs.

    cache "cold": the L2 is flushed before each call, so that DRAM answers; "warm": the calls follow each other, and
    data that fits in the L2 comes from there. left_out: sizes for which too little memory is free. window: when the
    last size was measured, seconds since the epoch. device: its properties from CUDA, in the wiki's metrics and units.
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
                rate = rates(call, moved / 1e9, rep_ms, cache)
                measured.append({"pattern": pattern, "buffer_bytes": size, "cache": cache, **rate})
        del source, target, call
    left_out = [size for size in sizes if size not in fitting]
    return {
        "unit": "GB/s",
        "rates": measured,
        "left_out": left_out,
        "window": [start, time.time()],
        "device": shown(),
        **versions(),
    }


def free_bytes() -> int:
    return torch.cuda.mem_get_info()[0]


def shown() -> dict:
    """The device as CUDA shows it. For a MIG slice CUDA shows the slice. Under WSL2 and in virtual machines NVML
    reports less."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "compute_capability": f"{properties.major}.{properties.minor}",
        "sm_count": properties.multi_processor_count,
        "l2_capacity": properties.L2_cache_size / 2**20,
        "memory_capacity": properties.total_memory / 2**30,
    }


def versions() -> dict:
    return {"torch": torch.__version__, "triton": triton.__version__}


def ceiling(context: Context, bytes_in: int, bytes_out: int, dtype: str, rep_ms: int) -> dict:
    """The rate of a kernel that only reads `bytes_in` and writes `bytes_out`, in GB/s of both, with a cold cache.

    The best of several shapes of such a kernel (streams.SHAPES); each element in `dtype`.
    """
    from . import copy_kernel  # Triton kernels: loaded where they are used

    kind = tensor_trees.TORCH_DTYPES.get(dtype, torch.int32)
    width = torch.empty((), dtype=kind).element_size()
    source = torch.ones(max(1, bytes_in // width), dtype=kind, device=context.device)
    target = torch.empty(max(1, bytes_out // width), dtype=kind, device=context.device)
    measured, start = [], time.time()
    for shape in copy_kernel.SHAPES:
        rate = rates(lambda s=shape: copy_kernel.stream(source, target, **s), (bytes_in + bytes_out) / 1e9, rep_ms)
        measured.append({**shape, **rate})
    best = max(measured, key=lambda rate: rate["median"])
    return {
        "unit": "GB/s",
        "bytes_in": bytes_in,
        "bytes_out": bytes_out,
        "rates": measured,
        "best": best,
        "window": [start, time.time()],
    }


def matmul(context: Context, size: int, dtype: str, rep_ms: int) -> dict:
    """TFLOPS (TOPS for int8) of a square matrix product on random data, through torch."""
    call = product(context.device, size, dtype)
    return {"unit": "TFLOPS", "rates": [{"dtype": dtype, "size": size, **rates(call, 2 * size**3 / 1e12, rep_ms)}]}


def product_rates(context: Context, dtype: str, largest: int, rep_ms: int, pause_s: float, sustained_s: float) -> dict:
    """TFLOPS (TOPS for int8) of a square product of at most `largest` rows, and when each was measured, seconds
    since the epoch: rested, after a pause and as kernels are timed here; sustained, back to back for `sustained_s`,
    in its second half."""
    size = fitting_size(context, dtype, largest)
    call, work = product(context.device, size, dtype), 2 * size**3 / 1e12
    call()
    torch.cuda.synchronize()
    time.sleep(pause_s)
    start = time.time()
    rested = {**rates(call, work, rep_ms), "window": [start, time.time()]}
    back_to_back(call, sustained_s / 2)
    start = time.time()
    per_s = back_to_back(call, sustained_s / 2)
    sustained = {"median": work * per_s, "window": [start, time.time()]}
    return {"dtype": dtype, "size": size, "rested": rested, "sustained": sustained}


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


def back_to_back(call, seconds: float) -> float:
    """Calls per second, one after the other, for about the given number of seconds."""
    edges = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    deadline, calls = time.monotonic() + seconds, 0
    edges[0].record()
    while calls == 0 or time.monotonic() < deadline:
        for _ in range(8):
            call()
        calls += 8
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


def rates(call, amount: float, rep_ms: int, cache: str = "cold") -> dict:
    """{median, p20, p80, n} of `amount` per second, by triton.testing: do_bench, which flushes the L2 before each call,
    or do_bench_cudagraph, which does not."""
    from triton.testing import do_bench, do_bench_cudagraph

    if cache == "cold":
        times = do_bench(call, warmup=max(1, rep_ms // 4), rep=rep_ms, return_mode="all")
    else:
        times = do_bench_cudagraph(call, rep=rep_ms, return_mode="all")
    times = sorted(times, reverse=True)
    at = {p: amount / times[min(len(times) - 1, len(times) * p // 100)] * 1e3 for p in (20, 50, 80)}
    return {"median": at[50], "p20": at[20], "p80": at[80], "n": len(times)}
