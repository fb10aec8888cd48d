"""What runs in a child process: `python -m kernelopt.worker request.json`, the result beside it in result.json.

A candidate shares this process, so nothing that decides a verdict is computed here from its word alone:
`run` only stores raw outputs, and `check`, a process that never loads the candidate, judges them.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path

import torch

from . import bundle, problem

WARM_UP_CALLS = 3
TIMED_JOBS = ("latency", "duel")
# What the timing rests on: none of it may be replaced by a kernel.
TIMING = {
    "time": ("time", "perf_counter", "sleep"),
    "torch": ("empty", "zeros", "save"),
    "torch.Tensor": ("zero_", "cpu", "clone", "copy_"),
    "torch.cuda": ("synchronize", "Event", "current_stream", "_sleep"),
    "torch.cuda.Event": ("record", "elapsed_time", "synchronize", "query", "wait"),
    "triton.testing": ("do_bench",),
}
FILE_BYTES = 64 << 30  # of one file that a candidate writes: outputs of large problems are large


def main() -> int:
    request_path = Path(sys.argv[1])
    with contextlib.suppress(OSError):  # Linux: die with the parent, so that no child outlives a killed tool
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    request = json.loads(request_path.read_text(encoding="utf-8"))
    try:
        with untampered(request["device"]) if request["job"] in TIMED_JOBS else contextlib.nullcontext():
            result = JOBS[request["job"]](request["device"], **request["arguments"])
    except BaseException as error:
        traceback.print_exc()
        result = {"error": describe(error)}
    bundle.write_json(request_path.with_name("result.json"), result)
    sys.stdout.flush()
    if request["job"] != "profile":  # a profiler wants an orderly exit
        os._exit(1 if "error" in result else 0)  # after a CUDA error destructors may hang
    return 0


def describe(error: BaseException) -> dict:
    """{status, type, message} of an exception; the status is one of verify's."""
    text = f"{type(error).__name__}: {error}"
    names = {cls.__name__ for cls in type(error).__mro__}
    if names & {"CompilationError", "CompileTimeAssertionFailure"} or "Error building extension" in text:
        status = "COMPILE_ERROR"
    elif names & {"OutOfResources", "OutOfMemoryError", "MemoryError"}:
        status = "LAUNCH_ERROR" if "OutOfResources" in names else "OOM"
    elif "illegal memory access" in text or "misaligned address" in text:
        status = "ILLEGAL_ACCESS"
    elif "can't allocate memory" in text:
        status = "OOM"
    elif any(sign in text for sign in ("No space left", "PytorchStreamWriter failed", "inline_container")):
        status = "NO_SPACE"
    elif "invalid configuration argument" in text or "too many resources" in text:
        status = "LAUNCH_ERROR"
    elif isinstance(error, problem.UnknownWorkload):
        status = "USAGE"
    elif isinstance(error, LoadError):
        status = "IMPORT_ERROR"
    elif isinstance(error, OracleError):
        status = "INVALID_REFERENCE"
    elif isinstance(error, OpponentError):
        status = "OPPONENT"
    elif isinstance(error, CheatError):
        status = "CHEAT_SUSPECT"
    else:
        status = "RUNTIME_ERROR"
    own = isinstance(error, LoadError | OracleError | OpponentError | CheatError | problem.ContractError)
    message = str(error) if own else text
    if len(message) > 2000:
        message = f"{message[:1000]} … {message[-1000:]}"
    return {"status": status, "type": type(error).__name__, "message": message}


class LoadError(Exception):
    """The kernel's file cannot be loaded or bound."""


class OracleError(Exception):
    """The reference cannot be loaded or run."""


class OpponentError(Exception):
    """What a kernel is compared with cannot be loaded or run."""


class CheatError(Exception):
    """The kernel tampers with what measures it."""


@contextlib.contextmanager
def untampered(device: str):
    """CheatError when something inside replaces a function that times, waits or makes tensors."""
    owners = {"time": time, "torch": torch, "torch.Tensor": torch.Tensor, "torch.cuda": torch.cuda}
    owners["torch.cuda.Event"] = torch.cuda.Event
    if device == "cuda":
        from triton import testing

        owners["triton.testing"] = testing
    watched = [(name, attribute) for name, attributes in TIMING.items() for attribute in attributes if name in owners]
    before = [getattr(owners[name], attribute) for name, attribute in watched]
    yield
    for (name, attribute), original in zip(watched, before, strict=True):
        if getattr(owners[name], attribute) is not original:
            raise CheatError(f"{name}.{attribute} was replaced while the kernel was loaded or run")


@contextlib.contextmanager
def blaming(kind: type[Exception]):
    """Errors inside are the file's, not the run's; compile errors and exhausted memory keep their own kind."""
    try:
        yield
    except Exception as error:
        if describe(error)["status"] != "RUNTIME_ERROR":
            raise
        raise kind(describe(error)["message"]) from error


def load_reference(path: str) -> problem.Reference:
    with blaming(OracleError):
        return problem.Reference(Path(path))


def load_kernel(path: str, case: problem.Case, device: str, allow_reference: bool = False):
    with blaming(LoadError):
        return problem.load_kernel(Path(path), case, device, allow_reference)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# --- jobs ---------------------------------------------------------------------------------------------------


def estimate(device: str, reference: str, dtype: str | None, workloads: list[str] | None) -> dict:
    """Least work per workload (see problem.estimate)."""
    loaded = load_reference(reference)
    with blaming(OracleError):
        names = chosen(loaded, workloads)
        return {"workloads": {name: problem.estimate(loaded, name, dtype, device) for name in names}}


def chosen(reference: problem.Reference, workloads: list[str] | None) -> list[str]:
    """The named workloads, all of them when none is named."""
    for name in workloads or []:
        if name not in reference.workloads:
            known = ", ".join(reference.workloads)
            raise problem.UnknownWorkload(f"the reference has no workload '{name}'; it has: {known}")
    return workloads or list(reference.workloads)


def prepare(
    device: str,
    reference: str,
    dtype: str | None,
    workloads: list[str] | None,
    seeds: list[int],
    at_least: int,
    limit_bytes: int,
    folder: str,
) -> dict:
    """Write the inputs of each workload and seed to a file, so that the candidate never needs the reference.

    No more seeds of a workload once its files hold limit_bytes, but the last `at_least` seeds in any case.
    """
    loaded = load_reference(reference)
    cases = []
    with blaming(OracleError):
        for workload in chosen(loaded, workloads):
            cases += prepare_workload(
                loaded, workload, dtype, seeds, at_least, limit_bytes, Path(folder), len(cases), device
            )
    return {"cases": cases}


def prepare_workload(loaded, workload, dtype, seeds, at_least, limit_bytes, folder, first, device) -> list[dict]:
    """The input files of one workload, lowest seed first. Seeds are taken from the end: the secret one is last."""
    cases, total = [], 0
    for number, seed in enumerate(reversed(seeds)):
        if number >= at_least and total > limit_bytes:
            break
        path = folder / f"input-{first + number}.pt"
        case = loaded.case(workload, seed, dtype, device)
        case.save(path)
        total += path.stat().st_size
        arguments = problem.input_tensors(case.inputs)
        found = problem.dominant_dtype(arguments + list(case.state.values()))
        shapes = [list(tensor.shape) for tensor in arguments]
        cases.append({"workload": workload, "seed": seed, "path": str(path), "dtype": found, "shapes": shapes})
    return cases[::-1]


def run(device: str, kernel: str, inputs: list[str], folder: str) -> dict:
    """Call the kernel on each input file, twice, and store the raw outputs.

    Stops at the first case that raises: after a CUDA error the process is of no further use.
    """
    done = []
    for number, path in enumerate(inputs):
        case = problem.Case.load(Path(path))
        try:
            kernel_call = load_kernel(kernel, case, device)
            done.append(run_case(device, kernel_call, case, Path(folder), number))
        except Exception as error:
            traceback.print_exc()
            done.append({"error": describe(error)})
            break
        del case, kernel_call
    return {"cases": done}


def run_case(device: str, kernel_call, case: problem.Case, folder: Path, number: int) -> dict:
    """Call the kernel twice on the same inputs, note what it did to them, and store its outputs: those of the
    second call only where they differ from the first's."""
    inputs = case.placed_inputs(device)
    given, originals = problem.input_tensors(inputs), problem.input_tensors(case.placed_inputs(device))
    poison(device, case)
    calls, kept, mutated = [], [], set()
    for _ in range(2):
        calls.append(problem.tensors(problem.call(kernel_call, inputs)))
        synchronize(device)
        if stray := {tensor.device.type for tensor in calls[-1]} - {device}:
            raise problem.ContractError(f"an output is on {stray.pop()}, expected {device}")
        kept.append([tensor.detach().as_subclass(torch.Tensor).clone() for tensor in calls[-1]])
        mutated |= {i for i, (a, b) in enumerate(zip(given, originals, strict=True)) if not identical(a, b)}
    taken = {tensor.untyped_storage().data_ptr() for tensor in given + calls[0]}
    same = len(kept[0]) == len(kept[1]) and all(map(identical, *kept))
    outputs = [str(folder / f"output-{number}-{call}.pt") for call in range(1 if same else 2)]
    for path, tensors in zip(outputs, kept, strict=False):
        torch.save([tensor.cpu() for tensor in tensors], path)
    return {
        "outputs": outputs,
        "mutated": sorted(mutated),
        "aliased": any(t.numel() and t.untyped_storage().data_ptr() in taken for t in calls[1]),
        "deterministic": same,
        "plain": all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in calls[0]),
    }


def identical(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit where finite, NaN where the other is NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = problem.comparable(a), problem.comparable(b)
    return bool(((a == b) | ((a != a) & (b != b))).all())


def poison(device: str, case: problem.Case) -> None:
    """Fill and free memory, so that an output which is never written holds NaN and not a former result."""
    if device == "cuda":
        size = max([t.nbytes for t in problem.input_tensors(case.inputs)] + [1 << 20])
        blocks = [torch.full((size // 4,), float("nan"), device=device) for _ in range(2)]
        del blocks


def check(device: str, reference: str, dtype: str | None, cases: list[dict], tolerances: dict[str, float]) -> dict:
    """Compare stored outputs with the reference, which runs only here and only now.

    cases: [{workload, seed, outputs}], outputs being the files of one call each. Inputs are made anew from the
    seed: the files that the candidate read are not trusted.
    """
    loaded = load_reference(reference)
    return {"cases": [check_case(device, loaded, dtype, entry, tolerances) for entry in cases]}


def check_case(device: str, loaded: problem.Reference, dtype: str | None, entry: dict, tolerances: dict) -> dict:
    with blaming(OracleError):
        case = loaded.case(entry["workload"], entry["seed"], dtype, device)
        baseline, again = (reference_outputs(loaded, case, device, draw) for draw in range(2))
        oracle, precision = problem.oracle_outputs(loaded, case, device)
    bounds = [tolerances[problem.dtype_class(tensor.dtype)] for tensor in baseline]
    repeated = [problem.compare(*three, bound) for *three, bound in zip(again, baseline, baseline, bounds, strict=True)]
    calls = []
    for path in entry["outputs"]:
        try:
            actual = [tensor.to(device) for tensor in torch.load(path, weights_only=True)]
        except Exception as error:
            return {"unreadable": describe(error)["message"]}
        found = [problem.compare(*three, b) for *three, b in zip(actual, oracle, baseline, bounds, strict=False)]
        calls.append({"count": len(actual), "outputs": found})
    return {
        "calls": calls,
        "expected_count": len(baseline),
        "bland": bland(device, loaded, dtype, entry, case, oracle, baseline, bounds) if entry["first"] else [],
        "oracle": precision,
        "random": any(found["mismatches"] + found["nonfinite"] for found in repeated),
    }


def bland(device: str, loaded, dtype: str | None, entry: dict, case, oracle, baseline, bounds) -> list[str]:
    """Answers that compute nothing and would pass on this workload (see problem.bland_answers)."""
    with blaming(OracleError):
        other = loaded.case(entry["workload"], entry["seed"] + 1, dtype, device)
        twins = reference_outputs(loaded, other, device, 0)
    if len(twins) != len(baseline):
        return []
    return problem.bland_answers(oracle, baseline, case.placed_inputs(device), twins, bounds)


def reference_outputs(loaded: problem.Reference, case: problem.Case, device: str, draw: int) -> list[torch.Tensor]:
    """The reference in the task's own dtype; another `draw` gives it other random numbers, if it takes any."""
    model, inputs = loaded.model(case, device), case.placed_inputs(device)
    torch.manual_seed(draw)
    return problem.tensors(problem.call(model, inputs))


def latency(device: str, kernel: str, inputs: str, warmup_ms: int, rep_ms: int, output: str) -> dict:
    """Every single time in microseconds: triton.testing.do_bench on a GPU, the host's clock on the CPU.

    The output of the last timed call is stored, so that it can be checked like any other.
    """
    loaded = problem.Case.load(Path(inputs))
    kernel_call = load_kernel(kernel, loaded, device, allow_reference=True)
    arguments = loaded.placed_inputs(device)
    problem.call(kernel_call, arguments)  # compiled before the window opens
    last = []
    since = time.time()
    if device == "cuda":
        from triton.testing import do_bench

        def timed():
            last[:] = [problem.call(kernel_call, arguments)]

        times = [1000 * t for t in do_bench(timed, warmup=warmup_ms, rep=rep_ms, return_mode="all")]
        clock = "triton.testing.do_bench"
    else:
        times = [host_time_us(lambda *given: last.append(kernel_call(*given)), arguments) for _ in range(5)]
        clock = "host, cpu-interpreter"
    window = [since, time.time()]
    torch.save([t.detach().as_subclass(torch.Tensor).cpu() for t in problem.tensors(last[-1])], output)
    return {
        "times_us": times,
        "clock": clock,
        "window": window,
        "after": after_the_call(device, kernel_call, arguments),
    }


def after_the_call(device: str, kernel_call, inputs: list) -> dict | None:
    """{call_us, stray_us}: how long a call takes on its stream, and how long the GPU goes on working after that, medians
    of some calls. Work on another stream escapes a pair of events, and shows here."""
    if device != "cuda":
        return None
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(9):
        torch.cuda.synchronize()
        start.record()
        problem.call(kernel_call, inputs)
        end.record()
        end.synchronize()
        since = time.perf_counter()
        torch.cuda.synchronize()
        found.append((start.elapsed_time(end) * 1000, (time.perf_counter() - since) * 1e6))
    call, stray = (sorted(column)[len(found) // 2] for column in zip(*found, strict=True))
    return {"call_us": call, "stray_us": stray}


def host_time_us(kernel_call, inputs: list) -> float:
    start = time.perf_counter()
    problem.call(kernel_call, inputs)
    return (time.perf_counter() - start) * 1e6


def duel(device: str, a: str, b: str, inputs: list[str], rounds: int) -> dict:
    """Times in microseconds of two kernels in turn, A B B A then B A A B, each round on the next set of inputs.

    On a GPU each call comes after a cache flush and behind a sleeping kernel that holds the stream, so that
    the host's launch time stays out of the figure (see timing.PROTOCOL).
    """
    loaded = [problem.Case.load(Path(path)) for path in inputs]
    sets = [case.placed_inputs(device) for case in loaded]
    kernels = {"a": warmed_up(a, loaded[0], sets, device)}
    operators = registered_operators()
    try:
        kernels["b"] = warmed_up(b, loaded[0], sets, device)
    except Exception as error:
        raise OpponentError(describe(error)["message"]) from error
    if replaced := [name for name, operator in operators.items() if registered_operators().get(name) is not operator]:
        raise LoadError(f"both kernels register the operator {replaced[0]}, so one would be timed twice; rename it")
    timer = GatedTimer(kernels.values(), sets[0]) if device == "cuda" else host_time_us
    times: dict[str, list[list[float]]] = {"a": [], "b": []}
    since = time.time()
    for number in range(rounds):
        arguments = sets[number % len(sets)]
        pair: dict[str, list[float]] = {"a": [], "b": []}
        for name in "abba" if number % 2 == 0 else "baab":
            pair[name].append(timer(kernels[name], arguments))
        for name in pair:
            times[name].append(pair[name])
    return {
        "a_us": times["a"],
        "b_us": times["b"],
        "input_sets": len(sets),
        "window": [since, time.time()],
        "after": after_the_call(device, kernels["a"], sets[0]),
    }


def warmed_up(path: str, case: problem.Case, sets: list[list], device: str):
    """A loaded kernel that has run (compiled, autotuned) on each set of inputs."""
    kernel_call = load_kernel(path, case, device, allow_reference=True)
    for inputs in sets:
        for _ in range(WARM_UP_CALLS):
            problem.call(kernel_call, inputs)
    synchronize(device)
    return kernel_call


def registered_operators() -> dict:
    """The operators that Python code defined through torch.library.custom_op, by qualified name."""
    return dict(torch._library.custom_ops.OPDEFS)


class GatedTimer:
    """Times one call on the GPU: flush the L2, hold the stream with a sleep, start event, call, end event."""

    def __init__(self, kernels, inputs: list):
        cache_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        self.flush = torch.empty(2 * cache_bytes, dtype=torch.int8, device="cuda")
        self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        enqueue_us = max(host_time_us(kernel, inputs) for kernel in kernels)
        torch.cuda.synchronize()
        self.sleep_cycles = int(2 * enqueue_us * self._cycles_per_us()) + 20000

    def _cycles_per_us(self) -> float:
        cycles = 1_000_000
        for _ in range(2):
            self.start.record()
            torch.cuda._sleep(cycles)
            self.end.record()
            torch.cuda.synchronize()
        return cycles / (self.start.elapsed_time(self.end) * 1000)

    def __call__(self, kernel, inputs: list) -> float:
        self.flush.zero_()
        torch.cuda._sleep(self.sleep_cycles)
        self.start.record()
        problem.call(kernel, inputs)
        self.end.record()
        torch.cuda.synchronize()
        return self.start.elapsed_time(self.end) * 1000


def profile(device: str, kernel: str, inputs: str) -> dict:
    """One call of the kernel inside a profiler range, after warm-up calls (autotuning included) outside it."""
    loaded = problem.Case.load(Path(inputs))
    kernel_call = load_kernel(kernel, loaded, device)
    arguments = loaded.placed_inputs(device)
    for _ in range(WARM_UP_CALLS):
        problem.call(kernel_call, arguments)
    synchronize(device)
    since = time.time()
    torch.cuda.profiler.start()
    problem.call(kernel_call, arguments)
    synchronize(device)
    torch.cuda.profiler.stop()
    return {"torch": torch.__version__, "window": [since, time.time()]}


def bandwidth(device: str, sizes: list[int], rep_ms: int) -> dict:
    """Memory bandwidth in GB/s per buffer size in bytes: copy counts the bytes read and written, read and write theirs.

    cache "cold": the L2 is flushed before each call, so that DRAM answers; "warm": the calls follow each other, and
    what fits in the L2 comes from there.
    """
    found = []
    cached = 4 * torch.cuda.get_device_properties(0).L2_cache_size  # above this, warm and cold are the same
    for size in sizes:
        source = torch.randn(size // 4, device=device)
        target = torch.empty_like(source)
        for pattern, call, moved in (
            ("copy", lambda s=source, t=target: t.copy_(s), 2 * source.nbytes),
            ("read", lambda s=source: s.sum(), source.nbytes),
            ("write", lambda t=target: t.fill_(1.0), target.nbytes),
        ):
            for cache in ("cold", "warm") if size <= cached else ("cold",):
                rate = rates(call, moved / 1e9, rep_ms, cache)
                found.append({"pattern": pattern, "buffer_bytes": size, "cache": cache, **rate})
    return {"unit": "GB/s", "rates": found}


def ceiling(device: str, bytes_in: int, bytes_out: int, dtype: str, rep_ms: int) -> dict:
    """What a kernel that does nothing but read `bytes_in` and write `bytes_out` reaches, in GB/s of both, cache cold.

    The best of several shapes of such a kernel (streams.SHAPES); each element in `dtype`.
    """
    from . import streams

    kind = problem.TORCH_DTYPES.get(dtype, torch.int32)
    width = torch.empty((), dtype=kind).element_size()
    source = torch.ones(max(1, bytes_in // width), dtype=kind, device=device)
    target = torch.empty(max(1, bytes_out // width), dtype=kind, device=device)
    found = []
    for shape in streams.SHAPES:
        rate = rates(lambda s=shape: streams.stream(source, target, **s), (bytes_in + bytes_out) / 1e9, rep_ms)
        found.append({**shape, **rate})
    best = max(found, key=lambda rate: rate["median"])
    return {"unit": "GB/s", "bytes_in": bytes_in, "bytes_out": bytes_out, "rates": found, "best": best}


def matmul(device: str, size: int, dtypes: list[str], rep_ms: int) -> dict:
    """TFLOPS (TOPS for int8) of a square matrix product on random data, through torch, per dtype."""
    found = []
    for name in dtypes:
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        found.append({"dtype": name, "size": size, **rates(product(device, size, name), 2 * size**3 / 1e12, rep_ms)})
    return {"unit": "TFLOPS", "rates": found}


def product(device: str, size: int, name: str):
    """A call that multiplies two matrices of that dtype: normally distributed, for int8 evenly from -128 to 127."""
    if name == "int8":
        a, b = (torch.randint(-128, 128, (size, size), device=device, dtype=torch.int8) for _ in range(2))
        return lambda: torch._int_mm(a, b.t())
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    if name == "fp8":
        a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    dtype = problem.TORCH_DTYPES["fp32" if name == "tf32" else name]
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


JOBS = {
    job.__name__: job for job in (estimate, prepare, run, check, latency, duel, profile, bandwidth, ceiling, matmul)
}

if __name__ == "__main__":
    main()
