"""Compiles a kernel for GPUs that need not be here.

Nothing runs on a GPU. The kernel's file is loaded in a process of its own (worker/compiling.py) for each target and for
each configuration of its autotuners, as many at a time as the machine has cores, and more where some take long.
"""

import contextlib
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from ..device import outcomes, programs, standing
from ..device.fork_server import Server
from ..device.outcomes import Fault
from ..device.sandbox import Sandbox
from ..errors import Refused, UsageError
from ..hardware.targets import Target
from ..session.subject import KernelUnderTest
from ..statuses import Status
from . import reading
from .compiled import Compiled, CompiledKernel, ranked

NOTHING = "it launched no Triton kernel and built no CUDA C++, so nothing was compiled"
MOST_CONFIGURATIONS = 64  # of an autotuner, for each target
PATIENCE_S = 20.0  # a compilation that takes longer lets the next begin beside it: some take ptxas many minutes
LONGEST_S = 3600.0
LEAST_S = 1.0  # in less no process gets anywhere


@dataclass(frozen=True)
class Limits:
    """until: on the monotonic clock; what has not ended by then counts as not compiled. configurations: the most that
    are compiled of an autotuner. more: the option that allows more time, in words."""

    until: float
    configurations: int = MOST_CONFIGURATIONS
    more: str = "a larger --timeout gives it more time"

    @classmethod
    def of(cls, seconds: float, configurations: int = MOST_CONFIGURATIONS) -> "Limits":
        return cls(time.monotonic() + seconds, configurations)

    @property
    def left_s(self) -> float:
        return max(0.0, self.until - time.monotonic())


def compile_target(
    sandbox: Sandbox, kernel: KernelUnderTest, workload: str, targets: Sequence[Target], limits: Limits
) -> list[Compiled]:
    """The kernel, compiled for each target with inputs of a workload's shapes. UsageError when there is no such
    workload, or no such cast of its inputs; Refused when the reference itself fails."""
    case = case_without_values(kernel, workload)
    with Compiler(sandbox) as compiler, ThreadPoolExecutor(len(targets)) as pool:
        results = list(pool.map(lambda target: compiler.compile(kernel.kernel, case, target, limits), targets))
    raise_faults_of_task(results)
    return results


def case_without_values(subject: KernelUnderTest, workload: str) -> dict:
    """The case of the worker's `compile_only` whose inputs have the shapes of a workload, and no values."""
    return {"reference": str(subject.reference.resolve()), "workload": workload, "dtype": subject.dtype}


def raise_faults_of_task(results: Sequence[Compiled]) -> None:
    """UsageError where there is no such workload, or no such cast of its inputs; Refused where the reference fails."""
    for one in results:
        if one.status == Status.USAGE:
            raise UsageError(one.error)
        if one.status in (Status.INVALID_REFERENCE, Status.INVALID_TASK):
            raise Refused(f"{one.status}: {one.error}")


class Compiler:
    """The processes that compile. Open it as a context; several threads may call `compile`."""

    def __init__(self, sandbox: Sandbox):
        self._sandbox = sandbox
        self._turns = Turns(os.cpu_count() or 1)

    def __enter__(self) -> "Compiler":
        self._server = start_server(self._sandbox)
        return self

    def __exit__(self, *exc) -> None:
        self._server.end()

    def compile(self, kernel: Path, case: dict, target: Target, limits: Limits) -> Compiled:
        """The kernel's file, compiled for a target. case: of the worker's `compile_only`."""
        began = time.monotonic()
        folder = Path(self._sandbox.new_folder("compiled"))
        job = Job(self._sandbox, self._server, kernel, case, target, folder)
        answers = {0: self._answer(job, 0, limits)}
        while numbers := [n for n in range(most(answers, limits)) if n not in answers]:
            with ThreadPoolExecutor(len(numbers)) as pool:
                answers |= dict(zip(numbers, pool.map(lambda n: self._answer(job, n, limits), numbers), strict=True))
        result = of_answers(target, [answers[number] for number in sorted(answers)])
        left_out = sum(max(0, number - limits.configurations) for number in configurations(answers).values())
        return replace(result, left_out=result.left_out + left_out, wall_s=round(time.monotonic() - began, 2))

    def _answer(self, job: "Job", configuration: int, limits: Limits) -> "Answer":
        with self._turns.one():
            return job.answer(configuration, limits)


class Turns:
    """So many may work at a time. Who takes longer than `patience_s` goes on and no longer counts."""

    def __init__(self, number: int, patience_s: float = PATIENCE_S):
        self._free, self._patience_s = threading.Semaphore(number), patience_s

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        self._free.acquire()
        ours = threading.Lock()  # taken by whoever hands the turn on, the timer or the end

        def hand_on() -> None:
            if ours.acquire(blocking=False):
                self._free.release()

        timer = threading.Timer(self._patience_s, hand_on)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            hand_on()


@dataclass(frozen=True)
class Answer:
    """What one process answered, and the folder of its files; or why it did not. late: time was up before."""

    value: dict | None
    folder: Path
    fault: Fault | None = None
    late: bool = False


def configurations(answers: dict[int, Answer]) -> dict[str, int]:
    """The number of configurations of each autotuned kernel that was reached."""
    known: dict[str, int] = {}
    for answer in answers.values():
        for name, number in (answer.value["configurations"] if answer.value else {}).items():
            known[name] = max(number, known.get(name, 0))
    return known


def most(answers: dict[int, Answer], limits: Limits) -> int:
    """How many processes are needed, so that each configuration is compiled in one."""
    return min(limits.configurations, max(configurations(answers).values(), default=1))


@dataclass(frozen=True)
class Job:
    """The compilation of a kernel's file for a target. folder: for its files and caches."""

    sandbox: Sandbox
    server: Server
    kernel: Path
    case: dict
    target: Target
    folder: Path

    def answer(self, configuration: int, limits: Limits) -> Answer:
        """With the configuration of that number in each autotuner."""
        folder = self.folder / str(configuration)
        folder.mkdir()
        seconds = limits.left_s
        if seconds < LEAST_S:
            return Answer(
                None, folder, Fault(Status.TIMEOUT, f"time was over before it began; {limits.more}"), late=True
            )
        arguments = arguments_of(self.kernel, self.case, self.target, folder, configuration)
        process = standing.Standing(
            self.sandbox, self.server, "compile_only", arguments, LONGEST_S, [], self.environment(folder)
        )
        began = time.monotonic()
        try:
            return Answer(process.answer(seconds), folder)
        except standing.Ended as ended:
            fault = fault_of(ended, time.monotonic() - began, limits.more)
            return Answer(None, folder, fault, late=ended.outcome.timed_out)
        finally:
            process.end()

    def environment(self, folder: Path) -> dict[str, str]:
        """Compiler caches that no other target uses, the GPU that torch builds for, and ptxas's log."""
        major, minor = self.target.capability
        own = self.target.arch.removeprefix("sm_").removeprefix(f"{major}{minor}")  # a, of instructions of its own
        return {
            "TRITON_CACHE_DIR": str(self.folder / "triton"),
            "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
            "TORCH_CUDA_ARCH_LIST": f"{major}.{minor}{own}" if self.target.is_nvidia else "",
            "TRITON_DUMP_PTXAS_LOG": "1",
        }


def arguments_of(kernel: Path, case: dict, target: Target, folder: Path, configuration: int = 0) -> dict:
    """The arguments of the worker's `compile_only`."""
    return {
        "kernel": str(kernel.resolve()),
        "case": case,
        "target": target.for_worker().to_json(),
        "compiler": programs.find("nvcc" if target.is_nvidia else "hipcc"),
        "folder": str(folder),
        "configuration": configuration,
    }


def fault_of(ended: standing.Ended, seconds: float, more: str) -> Fault:
    """Why a process did not answer. A compiler that crashes takes the process with it. more: as in Limits."""
    if ended.outcome.timed_out:
        return Fault(Status.TIMEOUT, f"it was not compiled in {seconds:.0f} s; {more}")
    if ended.outcome.signal:
        last = ended.outcome.log_tail.strip().splitlines()[-3:]
        silent = "" if last else ", and said nothing; does it know this architecture?"
        return Fault(Status.COMPILE_ERROR, "\n".join([f"the compiler died of {ended.outcome.signal}{silent}", *last]))
    return outcomes.failure(ended.outcome) or Fault(Status.RUNTIME_ERROR, "the process ended early")


def start_server(sandbox: Sandbox) -> Server:
    """The server of processes that compile: Triton's compiler works there in place of its interpreter."""
    return sandbox.fork_server(TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES="", PYTHONWARNINGS="ignore")


def of_answers(target: Target, answers: Sequence[Answer]) -> Compiled:
    """What the processes answered, as a Compiled. The first one took the first configuration of each autotuner."""
    first = answers[0]
    if first.value is None:
        return Compiled(target, first.fault.status, first.fault.message)
    kernels = kernels_of(target, answers)
    left_out = sum(answer.late for answer in answers)
    status, error = state_of(answers, kernels)
    value = first.value
    cuda, lacking = value["has_cuda"], value["lacking"]
    if lacking and status == Status.OK:
        status, error = Status.INTERNAL, lacking
    elif cuda and status not in (Status.COMPILE_ERROR, Status.LAUNCH_ERROR):
        status, error = Status.OK, value["passed_over"]  # without a GPU the call cannot go on after the CUDA C++
    elif status == Status.OK and not kernels:
        status, error = Status.INTERNAL, NOTHING
    asked = any(answer.value and answer.value["asked"] for answer in answers)
    return Compiled(target, status, error, kernels, cuda, lacking, left_out, assumption(target) if asked else None)


def kernels_of(target: Target, answers: Sequence[Answer]) -> tuple[CompiledKernel, ...]:
    """The kernels of all processes, each once, and the configurations that were refused."""
    seen: set[str] = set()
    kernels: list[CompiledKernel] = []
    for answer in answers:
        value = answer.value or {"kernels": [], "cuda": [], "log": "", "failed": None}
        for entry in value["kernels"]:
            if entry["hash"] not in seen:
                seen.add(entry["hash"])
                kernels.append(reading.triton_kernel(target, entry, answer.folder))
        if answer is answers[0]:
            files = [answer.folder / file for file in value["cuda"]]
            kernels += [kernel for file in files for kernel in reading.cuda_kernels(target, file, value["log"])]
        if failed := value["failed"]:
            refused = CompiledKernel(**failed, status=Status(value["status"]), error=value["message"])
            if all((one.name, one.configuration) != (refused.name, refused.configuration) for one in kernels):
                kernels.append(refused)
    return ranked(kernels)


def state_of(answers: Sequence[Answer], kernels: Sequence[CompiledKernel]) -> tuple[Status, str | None]:
    """The status and error of the whole: of the first process that failed for another reason than a configuration; of a
    configuration where none of a kernel's can run."""
    for answer in answers:
        if answer.value and answer.value["status"] != Status.OK and not answer.value["failed"]:
            return Status(answer.value["status"]), answer.value["message"]
    for name in dict.fromkeys(kernel.name for kernel in kernels):
        own = [kernel for kernel in kernels if kernel.name == name]
        if all(kernel.status != Status.OK for kernel in own):
            few = "" if len(own) == 1 else f"none of {len(own)} configurations fits; the first: "
            return own[0].status, f"{few}{own[0].error}"
    return Status.OK, None


def assumption(target: Target) -> str:
    """What was answered to a kernel that asks how many SMs there are, where no card is named."""
    unit = "SMs" if target.is_nvidia else "compute units"
    told = target.for_worker()
    why = f"as {told.units_of} has" if told.units else "because the wiki knows no such card"
    return f"the kernel asks for the number of {unit}; it was told {told.told_units}, {why}"


def emit(results: Sequence[Compiled], folder: Path) -> list[Path]:
    """Copy the compiled files to FOLDER/ARCH/KERNEL.STAGE; return their paths. Configurations of an autotuned kernel
    are numbered, as are kernels of one name."""
    written = []
    for one in results:
        names: dict[str, int] = {}
        for kernel in one.kernels:
            number = names[kernel.name] = names.get(kernel.name, -1) + 1
            name = re.sub(r"\W+", "_", kernel.name)
            stem = name if number == 0 else f"{name}-{number}"
            for file in map(Path, kernel.files):
                path = folder / one.target.arch / f"{stem}{file.suffix}"
                path.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileNotFoundError):
                    shutil.copyfile(file, path)
                    written.append(path)
    return written
