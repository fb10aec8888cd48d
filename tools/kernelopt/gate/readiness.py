"""May a round be judged? The reasons to refuse it before anything is measured."""

from dataclasses import dataclass

from ..audit import workspace_audit
from ..errors import UsageError
from ..session import plans, platforms
from ..session.digests import digest
from ..session.record import Optimization, Record
from ..session.record_store import RecordStore
from ..session.task import Task
from ..session.workspace import KEPT_FILE, Workspace


@dataclass(frozen=True)
class RoundStart:
    """The parts of a workspace that one gate reads, once, before it measures.

    best: the version to beat; None before a baseline is accepted. reference: reference.py as the session began with it.
    """

    workspace: Workspace
    task: Task
    records: RecordStore
    best: Record | None
    reference: bytes

    @classmethod
    def of(cls, workspace: Workspace) -> "RoundStart":
        """Read the workspace; UsageError when a part of it cannot be read."""
        records = RecordStore(workspace)
        return cls(workspace, workspace.task(), records, records.best(), workspace.first_reference())


def check_ready(start: RoundStart, version: str, kernel_follows: bool = False) -> Optimization:
    """The plan of this round; UsageError when the round cannot be judged at all. kernel_follows: kernel.py is not yet
    what will be judged."""
    workspace = start.workspace
    if (workspace.root / KEPT_FILE).exists():
        raise UsageError("an unattended run was killed among its agents; first end it: optimize_kernel.py --resume")
    check_version(start.records, version, start.best)
    check_oracle(start)
    check_task(start)
    check_citations(start)
    platforms.roof_of_task(workspace, start.task)
    if start.best and not kernel_follows and start.best.kernel_sha256 == digest(workspace.kernel):
        raise UsageError(f"kernel.py is the accepted {start.best.version} itself; there is nothing to judge")
    return plans.read_plan(workspace, version, required=start.best is not None)


def check_oracle(start: RoundStart) -> None:
    """Raises UsageError when reference.py has changed since the session began. Reads the file each time."""
    if start.reference != start.workspace.reference.read_bytes():
        raise UsageError("reference.py was changed since the session began; the oracle must stay: git checkout it back")


def check_task(start: RoundStart) -> None:
    """Raises UsageError when the definition of a right kernel changed after v0 was accepted."""
    first = start.records.read("v0") if "v0" in start.records.versions() else None
    if not first or not first.git_commit_hash:
        return
    then = start.workspace.task_at(first.git_commit_hash)
    for name in ("dtype", "tolerance", "libraries", "only_these_shapes"):
        if getattr(start.task, name) != getattr(then, name):
            raise UsageError(
                f"the Task block's {name} is {getattr(start.task, name)}, v0 was judged with {getattr(then, name)}; "
                "put it back, or start a new session"
            )


def check_citations(start: RoundStart) -> None:
    """UsageError when a hardware value in the workspace is not cited as it must be."""
    audit = workspace_audit.of_workspace(start.workspace, start.task, start.records, hints=False)
    # Whether this round's plan is filled in is asked later (read_plan); those of later rounds need not be yet.
    if problems := [pair for pair in audit.problems if pair[1].kind != workspace_audit.UNFILLED]:
        path, first = problems[0]
        raise UsageError(
            f"{len(problems)} hardware values are not cited rightly, the first: {path}:{first.line}: {first.message}; "
            f"all of them: check_citations.py {start.workspace.root}"
        )


def check_version(records: RecordStore, version: str, best: Record | None) -> None:
    """A version is judged once, in order; v0 as often as it takes until a baseline is accepted, and nothing before
    that."""
    if best is None and version != "v0":
        raise UsageError("no baseline is accepted yet; judge v0 first")
    if version not in records.versions():
        if version != records.next_version():
            raise UsageError(f"{version} is out of order; the next version is {records.next_version()}")
        return
    record = records.read(version)
    if record.is_judged and not (version == "v0" and best is None):
        result = record.quality_gate.result
        raise UsageError(f"{version} was judged already ({result}); the next version is {records.next_version()}")
