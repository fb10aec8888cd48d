"""May this round be judged? UsageError says why not."""

from ..audit import workspace_audit
from ..errors import UsageError
from ..session import plans, platforms, record_store
from ..session.workspace import KEPT_FILE, Workspace, digest


def check_ready(workspace: Workspace, version: str) -> dict:
    """The plan of this round; UsageError when the round cannot be judged at all."""
    if (workspace.root / KEPT_FILE).exists():
        raise UsageError("an unattended run was killed among its agents; first end it: optimize_kernel.py --resume")
    records = record_store.Memory(workspace)
    best = records.best()
    check_version(records, version, best)
    check_oracle(workspace)
    check_task(workspace, records)
    check_citations(workspace)
    platforms.roof_of_task(workspace)
    if best and best["kernel_sha256"] == digest(workspace.kernel):
        raise UsageError(f"kernel.py is the accepted {best['version']} itself; there is nothing to judge")
    return plans.read_plan(workspace, version, required=best is not None)


def check_oracle(workspace: Workspace) -> None:
    if workspace.first_reference() != workspace.reference.read_bytes():
        raise UsageError("reference.py was changed since the session began; the oracle must stay: git checkout it back")


def check_task(workspace: Workspace, records: record_store.Memory) -> None:
    """UsageError when what counts as right was changed after v0 was accepted."""
    first = records.read("v0") if "v0" in records.versions() else None
    if not first or not first["git_commit_hash"]:
        return
    now, then = workspace.task(), workspace.task_at(first["git_commit_hash"])
    for name in ("dtype", "tolerance", "libraries", "only_these_shapes"):
        if now.get(name) != then.get(name):
            raise UsageError(
                f"the Task block's {name} is {now.get(name)}, v0 was judged with {then.get(name)}; put it back, or start a "
                "new session"
            )


def check_citations(workspace: Workspace) -> None:
    """UsageError when a hardware value in the workspace is not cited as it must be."""
    if problems := workspace_audit.of_workspace(workspace, hints=False).problems:
        path, first = problems[0]
        raise UsageError(
            f"{len(problems)} hardware values are not cited rightly, the first: {path}:{first.line}: {first.message}; "
            f"all of them: check_citations.py {workspace.root}"
        )


def check_version(records: record_store.Memory, version: str, best: dict | None) -> None:
    """A version is judged once, in order; v0 as often as it takes until a baseline is accepted, and nothing before
    that."""
    if best is None and version != "v0":
        raise UsageError("no baseline is accepted yet; judge v0 first")
    if version not in records.versions():
        if version != records.next_version():
            raise UsageError(f"{version} is out of order; the next version is {records.next_version()}")
        return
    result = records.read(version)["quality_gate"]["result"]
    if result is not None and not (version == "v0" and best is None):
        raise UsageError(f"{version} was judged already ({result}); the next version is {records.next_version()}")
