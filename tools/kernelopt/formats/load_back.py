"""Is an artefact the kernel that it was made from? It is loaded as its format loads it, in a process of its own.

It and the session's kernel are called on the same inputs, the task's own. Where their outputs are the same bits, it is
right; else the task's oracle decides, since a kernel with atomic additions never gives the same bits twice.
"""

from dataclasses import dataclass
from pathlib import Path

from .. import bundle
from ..case_types import StoredCall, StoredCase
from ..device import outcomes
from ..device.outcomes import Fault
from ..device.sandbox import Sandbox
from ..errors import EnvironmentLacks, Refused, TimedOut, say
from ..measure import cases, correctness, runs
from ..measure.oracle import Oracle
from ..session.interface import Interface
from ..session.subject import KernelUnderTest
from ..statuses import Status
from .artefact import Artefact

LOADER = """from kernelopt.worker import exported

ModelNew = exported.{loader}(*{arguments!r})  # its code may name "cuda", for which worker.named_devices looks here
"""
PACKED = (
    "a ModelNew that makes something else of its weights when they are loaded cannot take them as arguments; convert "
    "them in forward"
)
ERRORS = {Status.TIMEOUT: TimedOut, Status.NOT_INTERPRETABLE: EnvironmentLacks}  # Refused for all others


@dataclass(frozen=True)
class LoadedBack:
    """An artefact that was loaded and is right. cases: inputs that it was called on. same_bits: cases on which its
    outputs are those of the session's kernel, bit for bit."""

    device: str
    workloads: tuple[str, ...]
    cases: int
    same_bits: int

    def to_json(self) -> dict:
        return {**vars(self), "workloads": list(self.workloads)}

    @property
    def sentence(self) -> str:
        equal = (
            "the same bits as the session's kernel" if self.same_bits == self.cases else "right by the task's oracle"
        )
        return f"loaded back on {self.device}: {equal} on {self.cases} cases, workloads {', '.join(self.workloads)}"


def interface_of(sandbox: Sandbox, target: KernelUnderTest, timeout_s: float) -> Interface:
    """How the kernel of a task is called. Raises as `measure.cases.result_of_reference` does."""
    arguments = {"reference": str(target.reference.resolve()), "dtype": target.dtype}
    return Interface(**cases.result_of_reference(sandbox.run("interface", arguments, timeout_s)))


def check(
    sandbox: Sandbox,
    target: KernelUnderTest,
    kernel: str,
    artefact: Artefact,
    workloads: list[str] | None,
    timeout_s: float,
) -> LoadedBack:
    """Load an artefact back. kernel: the text of the kernel that it was made from.

    Refused when it does not load, or does not compute what the kernel does; TimedOut; EnvironmentLacks when the
    interpreter cannot run the kernel."""
    with sandbox.folder("export") as folder:
        place = Path(folder)
        loader = written(artefact, place / "artefact")
        bundle.write_text(place / "kernel.py", kernel)
        for name in ("inputs", "kernel", "exported"):
            (place / name).mkdir(exist_ok=True)
        seeds = cases.draw_seeds(2)
        made = cases.prepare(
            sandbox, target.reference, target.dtype, workloads, seeds, timeout_s, False, str(place / "inputs")
        )
        if sandbox.gpu is None and (warning := cases.slow_in_interpreter(made)):
            say(warning)
        expected = outputs(sandbox, target, place / "kernel.py", made, place / "kernel", timeout_s, "the kernel itself")
        actual = outputs(sandbox, target, loader, made, place / "exported", timeout_s, "the artefact")
        same = compared(sandbox, list(zip(actual, expected, strict=True)), timeout_s)
        differing = [
            case.for_oracle([StoredCall(case.seed, file)])
            for case, file, equal in zip(made, actual, same, strict=True)
            if not equal
        ]
        if fault := judged(sandbox, target, differing, timeout_s):
            raise Refused(f"the artefact does not compute what the kernel does: {fault.message}; {PACKED}")
        names = tuple(dict.fromkeys(case.workload for case in made))
        return LoadedBack(sandbox.device_name, names, len(made), sum(same))


def written(artefact: Artefact, folder: Path) -> Path:
    """Write an artefact's files to a folder, and beside it the file that loads them; return the latter's path."""
    for path, text in artefact.files.items():
        bundle.write_text(folder / path, text)
    loader = folder.parent / "loader.py"
    arguments = (str(folder / artefact.entry), *artefact.arguments)
    bundle.write_text(loader, LOADER.format(loader=artefact.loader, arguments=arguments))
    return loader


def outputs(
    sandbox: Sandbox,
    target: KernelUnderTest,
    kernel: Path,
    made: list[cases.Case],
    folder: Path,
    timeout_s: float,
    title: str,
) -> list[str]:
    """The files of what a kernel computed on the cases, which go to `folder`."""
    _, ran = runs.run(sandbox, kernel, target.reference, made, str(folder), timeout_s)
    reports = [ran] if isinstance(ran, Fault) else [one.report for one in ran]
    if fault := next((report for report in reports if isinstance(report, Fault)), None):
        error = ERRORS.get(fault.status, Refused)
        raise error(f"{title} does not run on {sandbox.device_name}: {fault.status}: {fault.message.strip()}")
    return [f"{one.files}-0.pt" for one in ran]


def compared(sandbox: Sandbox, pairs: list[tuple[str, str]], timeout_s: float) -> list[bool]:
    """Whether both files of each pair hold the same outputs."""
    outcome = sandbox.run("same_bits", {"pairs": pairs}, timeout_s)
    if fault := outcomes.failure(outcome):
        raise Refused(f"the outputs cannot be compared: {fault.status}: {fault.message.strip()}")
    return outcome.result["same"]


def judged(sandbox: Sandbox, target: KernelUnderTest, stored: list[StoredCase], timeout_s: float) -> Fault | None:
    """The first fault that the task's oracle sees in stored outputs."""
    checks = Oracle.of(sandbox, target, timeout_s).check(stored)
    return next((fault for check in checks for fault in correctness.faults_of_outputs(check)), None)
