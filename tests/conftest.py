"""What the tests share: running tools as a user does, and small problems to run them on."""

import contextlib
import fcntl
import gc
import importlib.metadata
import importlib.util
import io
import json
import os
import re
import resource
import runpy
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from kernelopt.compiling import compiler
from kernelopt.device import fork_server, gpu, programs, sandbox
from kernelopt.device.sandbox import Sandbox
from kernelopt.disassembly import listing_files, scoreboards
from kernelopt.errors import EnvironmentLacks
from kernelopt.gate import readiness, rounds
from kernelopt.gate.measurement import Measurement
from kernelopt.measure import least_work
from kernelopt.measure.correctness import KernelShare
from kernelopt.measure.timing import Latency, Timing
from kernelopt.session import creation, workspace
from kernelopt.session.digests import digest
from kernelopt.session.task import Task

os.environ.pop("KERNELOPT_ON", None)  # a developer's GPU node
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the problems are small, and as many tests run as there are cores

BUNDLE = Path(__file__).resolve().parents[1]
FIXTURES = Path(__file__).resolve().parent / "fixtures"
STAND_INS = Path(__file__).resolve().parent / "stand_ins"
# Metrics that are requested since 2026-11-26. The captures of an H200 are older; ncu_names/cp_async.ncu-rep.xz has them.
NEWER_THAN_THE_CAPTURES = ("async_copy_bytes_per_sector", "async_copy_sectors")
IS_TORCH_2_6 = importlib.metadata.version("torch").startswith("2.6.")

REFERENCE = """
import torch, torch.nn as nn
class Model(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.randn(16))
    def forward(self, x):
        return torch.relu(x * self.weight) * self.scale
def get_inputs(): return [torch.randn(8, 16)]
def get_init_inputs(): return [2.0]
def get_workloads(): return {"tall": lambda: [torch.randn(33, 16)]}
"""

KERNEL = """
import torch, torch.nn as nn
class ModelNew(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(16))
    def forward(self, x):
        {body}
"""

PLAN = """# Plan for v1
## Category
memory_traffic
## Action
One pass
in place of three.
## Expected effect
Half the time.
## Risk
Spills.
"""


def kernel_text(body: str = "return torch.clamp(x * self.weight, min=0) * self.scale") -> str:
    """A candidate for REFERENCE with the given forward; torch on the CPU stands in for a GPU kernel."""
    return KERNEL.format(body=body.replace("\n", "\n        "))


GPU_TEST_S = 600  # compilers and profilers take their time; the default for all tests is in pyproject.toml


def pytest_addoption(parser):
    parser.addoption(
        "--on-gpu", choices=("at-once", "alone"), help="only tests that may share a GPU with others, or only the others"
    )


@pytest.hookimpl(tryfirst=True)  # before pytest-timeout reads the marks
def pytest_collection_modifyitems(config, items):
    if part := config.getoption("--on-gpu"):
        chosen = [item for item in items if ("at_once" in item.keywords) == (part == "at-once")]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
    for item in items:
        if "gpu" in item.keywords and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(GPU_TEST_S))
    try:
        gpu.identify()
    except EnvironmentLacks as error:
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason=str(error)))


def pytest_collection_finish():
    """What all tests share is left out when Python looks for garbage: torch, the tools, and the tests themselves."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # or what torch and Triton made counts as leaked at the process's end


@pytest.fixture
def interruptible():
    """SIGINT and SIGHUP end this process and those that it starts, also in a suite that `nohup ... &` started: nohup
    has its command ignore SIGHUP, a shell without job control what it puts into the background SIGINT; children inherit
    that."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


# torch imports sympy at the first gradient of a process: half a second, which each job of a backward pass would take.
WITH_SYMPY = (
    "import runpy, torch.fx.experimental.symbolic_shapes; runpy.run_module('kernelopt.worker', None, '__main__', True)"
)


@pytest.fixture(scope="session")
def interpreter():
    """A sandbox on the CPU, whose server is started once for all tests."""
    with Sandbox("cpu-interpreter") as shared:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fork_server, "WORKER", [sys.executable, "-c", WITH_SYMPY])
            shared.server()
        yield shared


@pytest.fixture(scope="session")
def run_here(interpreter) -> Callable[..., subprocess.CompletedProcess]:
    """`call_tool` on the shared sandbox: torch takes two seconds to start in one of its own."""

    def shared(device: str, *_):
        assert device == "cpu-interpreter"
        return contextlib.nullcontext(interpreter)

    def run(name: str, *arguments) -> subprocess.CompletedProcess:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sandbox, "Sandbox", shared)
            patch.setattr(least_work, "Sandbox", shared)
            patch.setattr(gpu, "device_here", lambda: "cpu-interpreter")
            return call_tool(name, *arguments)

    return run


@pytest.fixture(scope="session")
def compiling_server(interpreter):
    """The server of processes that compile, started once for all tests."""
    server = compiler.start_server(interpreter)
    yield SimpleNamespace(split=server.split, end=lambda: None)
    server.end()


@pytest.fixture(scope="session")
def compile_here(run_here, compiling_server) -> Callable[..., subprocess.CompletedProcess]:
    """`run_here`, where compilations share a server."""

    def run(name: str, *arguments) -> subprocess.CompletedProcess:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiler, "start_server", lambda _: compiling_server)
            return run_here(name, *arguments)

    return run


def call_tool(name: str, *arguments, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """`run_tool` in this process, for tests that are not about processes: Python takes a tenth of a second to start."""
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in (env or {}).items():
            patch.setenv(variable, value)
        return run_script(BUNDLE / "tools" / name, *arguments)


def run_script(path: Path, *arguments) -> subprocess.CompletedProcess:
    """A program of Python in this process."""
    command = [str(path), *map(str, arguments)]
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", command)
        patch.setattr(sys, "path", list(sys.path))
        patch.setattr(signal, "signal", lambda *_: None)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
            runpy.run_path(command[0], run_name="__main__")
    return subprocess.CompletedProcess(command, ended.value.code, out.getvalue(), err.getvalue())


@pytest.fixture
def problem(tmp_path) -> dict[str, Path]:
    """A right kernel and its reference, as files."""
    files = {"kernel": tmp_path / "candidate.py", "reference": tmp_path / "oracle.py"}
    files["kernel"].write_text(kernel_text())
    files["reference"].write_text(REFERENCE)
    return files


@pytest.fixture(scope="session")
def started(tmp_path_factory) -> Path:
    """The folder of a fresh workspace of that problem on the platform H200, for `session` to copy."""
    folder = tmp_path_factory.mktemp("started")
    files = {"kernel.py": kernel_text(), "reference.py": REFERENCE}
    for name, text in files.items():
        (folder / name).write_text(text)
    return creation.create(folder, "test", *(folder / name for name in files), task()).root


@pytest.fixture(scope="session")
def with_v0(started, tmp_path_factory) -> Path:
    """That folder with an accepted v0, whose measurement is a recorded one of an H200, for `ready` to copy."""
    made = copy_of(started, tmp_path_factory.mktemp("with_v0"))
    start = readiness.RoundStart.of(made)
    plan = readiness.check_ready(start, "v0")
    first = recorded("v0", digest(made.kernel), comparisons=None, against=None)
    rounds.settle(start, "v0", plan, with_floor_share(first, 10.0), None)
    return made.root


def copy_of(made: Path, folder: Path) -> workspace.Workspace:
    """A workspace in `folder` like the one at `made`: to copy one takes a tenth of the time that git takes."""
    return workspace.Workspace(shutil.copytree(made, folder / made.name, symlinks=True))


@pytest.fixture
def session(tmp_path, started) -> workspace.Workspace:
    """A fresh workspace of that problem on the platform H200."""
    return copy_of(started, tmp_path)


@pytest.fixture
def ready(tmp_path, with_v0) -> workspace.Workspace:
    """That workspace with an accepted v0, whose measurement is a recorded one of an H200."""
    return copy_of(with_v0, tmp_path)


def explored(session: workspace.Workspace, name: str) -> Path:
    """The recorded exploration (tests/fixtures/exploration) as eN.json of a workspace, with times, made by hand: 10, 11,
    12 and 13 us for the candidates that are right, of which the last was dropped, and 40 us for the opponent."""
    content = json.loads((FIXTURES / "exploration" / "e1.json").read_text())
    right = [row for row in content["rows"] if row["status"] == "OK"]
    for row, us in zip(right, (40.0, 10.0, 11.0, 12.0, 13.0), strict=True):
        row["latency_us"] = {"median": us, "p20": us - 0.1, "p80": us + 0.2, "n": 30}
        ratio = 40.0 / us
        row["against_best"] = None if row["opponent"] else {"point": ratio, "ci95": [ratio - 0.01, ratio + 0.01]}
        row["registers"], row["spill_bytes"] = 32, 0
    right[-1]["dropped"] = True
    file = session.root / "explore" / f"{name}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({**content, "exploration": name, "device": "NVIDIA H200"}))
    return file


LATENCY = Latency(100.0, 99.0, 101.0, 60)
# The times of a kernel of 100 us, on a GPU that nothing disturbed.
TIMING = Timing(
    device="stand-in",
    clock="triton.testing.do_bench",
    workload="default",
    latency=LATENCY,
    event=LATENCY,
    gpu_us=100.0,
    cupti_us=98.0,
    warm_us=95.0,
    call_us=100.0,
    graph_us=None,
    kernels=[KernelShare("kernel", us=100.0, share_pct=100.0, origin="own")],
    warmup_ms=25,
    rep_ms=100,
    shapes=[[4, 4]],
    dtype="fp32",
    input_sets=8,
    gpu_state=None,
)
# What a `run_gate.py --json` says today, and did not say yet when the fixtures were recorded.
SINCE = {"gpu_us": None, "cupti_us": None, "graph_us": None, "kernels": None, "input_sets": 8}


def recorded(version: str, kernel_sha256: str, **changes) -> Measurement:
    """The measurement of a `run_gate.py --json` of the demo on an H200, as if it were of this kernel."""
    gate = json.loads((FIXTURES / "h200_row_softmax" / f"gate_{version}.json").read_text())
    timings, comparisons = gate["timing"]["latencies"], gate["timing"]["comparisons"]
    medians = {name: timing["latency_us"]["median"] for name, timing in timings.items()}
    measurement = Measurement.from_json(
        {
            "kernel_sha256": kernel_sha256,
            "verify": gate["verify"],
            "latencies": {
                name: {**SINCE, "event_us": old["latency_us"], "warm_us": median, "call_us": median, **old}
                | {"gpu_state": {**old["gpu_state"], "foreign_processes": []}}
                for (name, old), median in zip(timings.items(), medians.values(), strict=True)
            },
            "utilization": {"time_us": medians["default"], "limit_us": 0.0, **gate["utilization"]},
            "comparisons": comparisons
            and {name: {"per_process": [], "least": 0.003, **one} for name, one in comparisons.items()},
            "against": gate["timing"]["against"],
            "seconds": {},
        }
    )
    return replace(measurement, **changes)


def with_floor_share(measurement: Measurement, share_pct: float) -> Measurement:
    return replace(measurement, utilization=replace(measurement.utilization, floor_share_pct=share_pct))


def stand_in_pynvml():
    """stand_ins/pynvml.py as a module, to set in sys.modules."""
    spec = importlib.util.spec_from_file_location("pynvml", STAND_INS / "pynvml.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def task(**changes) -> Task:
    """A Task block of an H200 with nothing counted; changes: keys of its JSON object."""
    empty = {"platform": "H200", "arch": "Hopper", "framework": "triton", "dtype": None, "tolerance": None}
    rest = {
        "shapes": None,
        "additional_notes": "",
        "gpu_wiki_path": None,
        "work": None,
        "targets": [],
    }
    return Task.from_json({**empty, **rest, **changes})


def with_changes(before: Task, **changes) -> Task:
    """The Task block with other values for some keys of its JSON object."""
    return Task.from_json({**before.to_json(), **changes})


def run_tool(name: str, *arguments, cwd=None, env=None, timeout=120) -> subprocess.CompletedProcess:
    """A tool as a child process, the way a user starts it; never a traceback."""
    folder = BUNDLE / ("reference" if name == "workspace_init.sh" else "tools")
    start = ["bash"] if name.endswith(".sh") else [sys.executable]
    command = [*start, str(folder / name), *(str(argument) for argument in arguments)]
    environment = {**os.environ, **(env or {})}
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=timeout)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def free_port(first: int) -> int:
    """The first port from that one on at which nobody listens. Ray gives 10002 to 19999 to its workers by default."""
    for port in range(first, first + 500):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"no port is free from {first} on")


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory) -> Path:
    """A folder of this run that all workers of pytest-xdist have in common."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


def made_once(file: Path, make: Callable[[Path], object]) -> Path:
    """The file, which `make` writes to the path that it is given. The others wait for who is at it."""
    with open(file.with_name(f"{file.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            unfinished = file.with_name(f"unfinished_{file.name}")
            make(unfinished)
            unfinished.rename(file)
    return file


@contextlib.contextmanager
def gpu_node(gpus: int, **environment: str) -> Iterator[tuple[subprocess.Popen, str, list[str]]]:
    """A GPU node of this machine, which believes us how many GPUs there are: (process, address, what it printed)."""
    if not all(importlib.util.find_spec(name) for name in ("ray", "grpc")):  # Ray reads its settings at its import
        pytest.skip("ray[client] is not installed")
    port = free_port(10002 + os.getpid() % 9000)
    command = [sys.executable, BUNDLE / "tools" / "gpu_node.py", "--port", str(port), "--gpus", str(gpus)]
    options = {"stdout": subprocess.PIPE, "text": True, "env": {**os.environ, **environment}}
    with subprocess.Popen(command, **options) as process:
        try:
            yield process, f"ray://127.0.0.1:{port}", [process.stdout.readline() for _ in range(3)]
        finally:
            process.terminate()


def processor_time() -> float:
    """Seconds of the children so far: other processes of the machine do not matter."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def tool_json(name: str, *arguments, code: int = 0, run=call_tool, **options) -> dict:
    """The JSON object that a tool prints, after checking its exit code."""
    done = run(name, *arguments, "--json", **options)
    assert done.returncode == code, done.stderr + done.stdout
    return json.loads(done.stdout)


def compiled_for_hopper(compile_here, candidate: Path, *options) -> list[dict]:
    """The kernels that compile_kernel.py makes of a candidate of the hard deck in CUDA C++. Skips where nothing can."""
    if programs.find("nvcc") is None:
        pytest.skip("needs nvcc")
    torch = pytest.importorskip("torch")
    if "no_implicit_headers" not in Path(torch.__file__).with_name("utils").joinpath("cpp_extension.py").read_text():
        pytest.skip("needs load_inline(no_implicit_headers=…), which torch 2.6 lacks")
    files = "--kernel", candidate, "--reference", candidate.parents[1] / "reference.py"
    (target,) = tool_json("compile_kernel.py", *files, "--for", "h100-sxm", *options, run=compile_here)["targets"]
    return target["kernels"]


def early_arrivals(cubin: Path) -> list[tuple[str, str]]:
    """(load from shared memory, arrival at an mbarrier that does not wait for it) of all kernels of a cubin."""
    if programs.find("cuobjdump") is None:
        pytest.skip("needs cuobjdump")
    kernels = [kernel for one in listing_files.read(cubin) for kernel in one.kernels if one.kind == "sass"]
    assert kernels and all(kernel.instructions[0].control is not None for kernel in kernels)
    return [pair for kernel in kernels for pair in scoreboards.early_arrivals(kernel)]


def machine_code(cubin: Path) -> dict[str, list[str]]:
    """Each kernel of a cubin: its instructions, one a line, by nvdisasm."""
    if programs.find("nvdisasm") is None:
        pytest.skip("needs nvdisasm")
    code = [programs.find("nvdisasm"), "-c", cubin]
    listing = subprocess.run(code, check=True, capture_output=True, text=True).stdout
    parts = re.split(r"^\s*\.section\s+\.text\.(\S+?),.*$", listing, flags=re.M)[1:]
    return {name: re.findall(r"/\*[0-9a-f]+\*/ +(.*?) *;", text) for name, text in zip(*[iter(parts)] * 2, strict=True)}
