"""From a source to a reference that runs: read it, look at one call, declare what that showed, look again."""

import json
import re
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from ..case_types import VALUES, Observation
from ..device.sandbox import Sandbox
from ..errors import EnvironmentLacks, TimedOut, ToolError, UsageError
from ..measure import cases, observing
from . import reference_file
from .tasks import Task

# What a message says where a CPU is not enough, and where memory is not.
NEEDS_GPU = re.compile(
    r"scaling configuration|cuda|\bgpu\b|nvidia|\bhip\b|rocm|not implemented for|0 active drivers", re.IGNORECASE
)
NEEDS_MEMORY = re.compile(r"can't allocate memory|Cannot allocate memory|out of memory|MemoryError", re.IGNORECASE)
STORED_BYTES = 1 << 28  # of inputs that are stored to see whether the verifier can
UNDECLARED = "declarations: none, for the code did not run where it was imported; import it again where it runs"
NEEDS_PACKAGE = re.compile(r"No module named '([\w.]+)'")


@dataclass(frozen=True)
class Imported:
    """text: of the reference. device, ran: where its smallest workload ran, and on what. declared:
    what it declares. unchecked: why it did not run; the machine is at fault, not the source."""

    task: Task
    text: str
    device: str
    ran: str | None
    declared: dict
    unchecked: ToolError | None = None

    def to_json(self) -> dict:
        task = self.task
        default, *rest = task.workloads
        return {
            "format": task.format,
            "name": task.name,
            "source": task.origin.to_json(),
            "workloads": {"default": default.sizes, **{one.name: one.sizes for one in rest}},
            "default": default.name,
            "declared": self.declared,
            "not_carried": list(task.remarks),
            "checked": {"device": self.device, "workload": task.smallest, "ran": self.ran} if self.ran else None,
            "unchecked": self.unchecked and str(self.unchecked),
        }

    def lines(self) -> list[str]:
        """For a reader, a fact each."""
        task, count = self.task, len(self.task.workloads)
        first = f"{task.name}, a task of {task.format}, {count} workload{'s' * (count > 1)}"
        made = [first + (f", default: {task.workloads[0].name}" if count > 1 else "")]
        sizes = list(task.workloads[0].sizes)
        made += [f"keyword sizes: {', '.join(sizes)}"] if sizes else []
        stated = {key.upper(): value for key, value in self.declared.items() if key != "sizes"}
        made += [f"declares {key}: {json.dumps(value)}" for key, value in stated.items()]
        made += [f"not as in the source: {remark}" for remark in task.remarks]
        if self.ran:
            how = "" if self.ran == VALUES else " on shapes alone (on values it needs a GPU, or takes long)"
            made.append(f"runs on {self.device}{how}: workload {task.smallest}")
        return ["".join(one if one.isprintable() else "?" for one in line) for line in made]


def imported(task: Task, sandbox: Sandbox, timeout_s: float) -> Imported:
    """The reference of a task. UsageError where it does not run and that is the source's fault."""
    with tempfile.TemporaryDirectory(prefix="import-") as folder:
        run = Run(task, sandbox, Path(folder) / "reference.py", timeout_s)
        try:
            observed = run.look(reference_file.text_of(task, None))
            task = with_bounds(task, observed)
            text = reference_file.text_of(task, observed)
            observed = run.look(text)
            if observed.ran == VALUES and observed.bytes <= STORED_BYTES:
                run.store_inputs()
        except ToolError as error:
            if isinstance(error, UsageError):
                raise
            told = replace(task, remarks=(*task.remarks, UNDECLARED))
            return Imported(told, reference_file.text_of(told, None), sandbox.device_name, None, {}, unchecked=error)
        return Imported(task, text, sandbox.device_name, observed.ran, observed.declared)


def with_bounds(task: Task, observed: Observation) -> Task:
    """The task that says of which outputs the bound is not the source's."""
    changed = [(dtype, None) for dtypes in observed.changed.values() for dtype in dtypes]
    outputs = [*zip(observed.outputs, observed.rms, strict=True), *changed]
    return replace(task, remarks=(*task.remarks, *(task.bounds.remarks(outputs) if not task.more else ())))


@dataclass
class Run:
    """Runs a reference on its smallest workload. file: where it is written for that. shapes_alone: does this machine
    run it on shapes alone?"""

    task: Task
    sandbox: Sandbox
    file: Path
    timeout_s: float
    shapes_alone: bool = False

    def look(self, text: str) -> Observation:
        """One call of the reference with this text, on shapes alone where this machine cannot do it otherwise."""
        self.file.write_text(text, encoding="utf-8")
        try:
            return self._observed()
        except (EnvironmentLacks, TimedOut) as error:
            if self.sandbox.gpu or self.shapes_alone:
                raise
            self.shapes_alone = True
            try:
                return self._observed()
            except ToolError:
                raise error from None

    def _observed(self) -> Observation:
        try:
            return observing.observe(self.sandbox, self.file, self.task.smallest, self.timeout_s, self.shapes_alone)
        except cases.ReferenceFailed as error:
            raise self._fault(error) from None

    def store_inputs(self) -> None:
        """Store the inputs as the verifier does. UsageError where it cannot."""
        try:
            with self.sandbox.folder("inputs") as folder:
                asked = (self.sandbox, self.file, None, [self.task.smallest], [0, 1], self.timeout_s, False, folder)
                cases.prepare(*asked, for_kernel=False)
        except cases.ReferenceFailed as error:
            raise self._fault(error) from None

    def _fault(self, error: cases.ReferenceFailed) -> ToolError:
        """EnvironmentLacks where the message says that the machine lacks something, else UsageError."""
        message = " ".join(error.fault.message.split())
        if package := NEEDS_PACKAGE.search(message):
            return EnvironmentLacks(f"its code imports {package[1]}, which is not installed here")
        if NEEDS_MEMORY.search(message):
            return EnvironmentLacks(f"its code needs more memory than there is here ({message[:300]})")
        if self.sandbox.gpu is None and NEEDS_GPU.search(message):
            return EnvironmentLacks(f"its code needs a GPU ({message[:300]})")
        source, workload = self.task.origin.source, self.task.smallest
        return UsageError(f"{source}: its code fails on the workload {workload}: {message[:600]}")
