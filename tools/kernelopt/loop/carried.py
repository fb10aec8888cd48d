"""A workspace's trip to a machine with a GPU and back, as files: pack here, judge there, unpack here.

Candidates wait in W/waiting, NAME.py with its plan NAME.md. At the start of `judge`, kernel.py and what a stopped loop
left are put there too.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .. import bundle, environment
from ..diagnosis import profile_folder, profile_run
from ..errors import EnvironmentLacks, ToolError, UsageError
from ..gate import history, rounds
from ..remote import parcels
from ..remote.mirrors import Mirror
from ..remote.parcels import Parcel
from ..session import delivery, plans, trees
from ..session.digests import content_digest, digest
from ..session.record_store import RecordStore
from ..session.trees import Changes, Tree
from ..session.workspace import KEPT_FILE, Workspace
from .run_files import RunFiles

KERNEL, OF_LOOP = "kernel", "loop-"  # names of candidates that were not in W/waiting; they are judged first
UNPACKED, VERDICTS = "unpacked", "verdicts.json"  # files of the folder in which a parcel is judged
Say = Callable[[str], None]


@dataclass(frozen=True)
class Judged:
    """The end of a candidate's wait. version: what it was recorded as; None: it was not judged, and waits on."""

    name: str
    version: str | None
    accepted: bool
    reason: str

    def line(self) -> str:
        if self.version is None:
            return f"{self.name}: not judged: {self.reason}"
        return f"{self.name}: {self.version} {'ACCEPTED' if self.accepted else 'REJECTED'}: {self.reason}"


# --- here -------------------------------------------------------------------------------------------------------


def pack(workspace: Workspace, out: Path) -> list[str]:
    """Write the workspace to the file `out`. Return the names of the candidates that wait; UsageError without one."""
    if Path(os.path.realpath(out)).is_relative_to(workspace.root):
        raise UsageError(f"{out} is in the workspace that it carries; name a file elsewhere")
    if (workspace.root / KEPT_FILE).exists():
        raise UsageError("an unattended run was killed among its agents; first end it: optimize_kernel.py --resume")
    with workspace.locked():
        names = [*([KERNEL] if kernel_waits(workspace) else []), *(OF_LOOP + name for name in of_loop(workspace))]
        if not (names := [*names, *waiting(workspace)]):
            raise UsageError(
                f"no candidate waits in {workspace.root}: change kernel.py and write its plan, or put NAME.py and "
                "NAME.md into waiting/"
            )
        require_plans(workspace)
        wiki = workspace.task().gpu_wiki_path
        tree = trees.scan([str(workspace.root), *filter(None, [wiki])], str(workspace.root))
        parcel = Parcel("workspace", environment.version(), str(workspace.root), tree, {})
        parcels.write(out, parcel, contents(tree))
    return names


def require_plans(workspace: Workspace) -> None:
    """UsageError when a waiting candidate's plan would be refused where it is judged; a first version needs none."""
    records = RecordStore(workspace)
    if records.best() is None:
        return
    for name in waiting(workspace):
        plan = workspace.root / "waiting" / f"{name}.md"
        if not plan.is_file():
            raise UsageError(f"{plan} is missing: write {name}'s plan there, as {bundle.REFERENCE / 'plan.md'} has it")
        plans.plan_fields(plan)
    if kernel_waits(workspace):
        plans.plan_fields(workspace.plan(open_version(records)))


def kernel_waits(workspace: Workspace) -> bool:
    """Whether kernel.py is a candidate. UsageError when it is one without a plan."""
    records = RecordStore(workspace)
    best = records.best()
    if not workspace.kernel.is_file() or (best and best.kernel_sha256 == digest(workspace.kernel)):
        return False
    plan = workspace.plan(open_version(records))
    if best and not plan.is_file():
        raise UsageError(
            f"kernel.py is not {best.version}, and {plan} is missing: write it, or put kernel.py back: "
            f"git -C {workspace.root} checkout -- kernel.py"
        )
    return True


def of_loop(workspace: Workspace) -> list[str]:
    """The candidates that a loop left when it was stopped."""
    files = RunFiles(workspace.root / ".loop")
    state = files.state()
    return [name for name in state.waiting if files.has_candidate(name)] if state else []


def waiting(workspace: Workspace) -> list[str]:
    """The names of the candidates in W/waiting, in the order in which they are judged."""
    names = [path.stem for path in (workspace.root / "waiting").glob("*.py")]
    return sorted(names, key=lambda name: (name != KERNEL, not name.startswith(OF_LOOP), name))


def open_version(records: RecordStore) -> str:
    """The version that the next candidate becomes."""
    if records.best() is None:
        return "v0"
    unjudged = (version for version in records.versions() if not records.read(version).is_judged)
    return next(unjudged, None) or records.next_version()


def contents(tree: Tree) -> Iterator[tuple[str, bytes]]:
    """(digest, content) of each file of a tree of this machine, once. UsageError when one has changed since."""
    names = {trees.digest_of(kind): name for name, kind in tree.items() if trees.digest_of(kind)}
    for known, name in names.items():
        content = Path(name).read_bytes()
        if content_digest(content) != known:
            raise UsageError(f"{name} was changed while it was packed; pack again")
        yield known, content


def unpack(result: Path, workspace: Workspace) -> tuple[str, ...]:
    """Bring a result home; the verdicts, a line each. UsageError names what was changed here meanwhile."""
    parcel = parcels.read(result, "result")
    before, changes = (moved(part, parcel.workspace, workspace) for part in (parcel.tree, parcel.changes))
    root = str(workspace.root)
    with workspace.locked():
        now = trees.scan([root], root)
        if all(now.get(name) == kind for name, kind in changes.items() if delivery.counts(name, root)):
            return (*parcel.verdicts, "it was brought home before")
        if clashing := delivery.conflicts(root, before, now, changes if parcel.alone else None):
            raise UsageError(
                f"changed in {root} since it was packed: {in_words(clashing, root)}; nothing was brought home. Put "
                "that back as it was, or pack again"
            )
        delivery.deliver(workspace.root, changes, parcels.contents(result))
    return parcel.verdicts


def in_words(names: list[str], root: str) -> str:
    """The first of these paths, as the workspace has them."""
    own = [name.removeprefix(f"{root}/") for name in names]
    return f"{', '.join(own[:5])}{f' and {len(own) - 5} more' if len(own) > 5 else ''}"


def moved(part: Tree | Changes, home: str, workspace: Workspace) -> Changes:
    """The part of a tree below the path that the workspace had, with the path that it has."""
    return {
        f"{workspace.root}{name.removeprefix(home)}": kind for name, kind in part.items() if trees.is_below(name, home)
    }


# --- on the machine with the GPU --------------------------------------------------------------------------------


def judge(file: Path, out: Path, timeout_s: float, sandbox: str, say: Say) -> list[Judged]:
    """Judge the waiting candidates of a parcel in order, profile the best version, write the result to `out`.

    A run that was stopped goes on from the folder beside the parcel. sandbox: its kind. EnvironmentLacks without a GPU.
    """
    parcel = parcels.read(file, "workspace")
    if out.exists():
        raise UsageError(f"{out} exists: bring it home, or remove it to judge once more")
    folder = file.with_name(f"{file.name.removesuffix('.tar.gz')}.judging")
    mirror = unpacked(file, parcel, folder)
    workspace = Workspace(mirror.path(parcel.workspace))
    judged = [Judged(**one) for one in bundle.read_json(folder / VERDICTS)]
    with bundle.mirrored(mirror.root), workspace.locked():
        for one in judge_waiting(workspace, timeout_s, sandbox, say):
            say(one.line())
            judged.append(one)
            bundle.write_json(folder / VERDICTS, [asdict(each) for each in judged])
        profile_best(workspace, say)
    changed = mirror.changes([parcel.workspace])
    verdicts = tuple(one.line() for one in judged)
    result = replace(parcel, kind="result", changes=changed, verdicts=verdicts)
    parcels.write(out, result, mirror.contents(changed))
    shutil.rmtree(folder)
    return judged


def unpacked(file: Path, parcel: Parcel, folder: Path) -> Mirror:
    """The mirror of a parcel in `folder`, as a stopped run left it, or new."""
    (folder / "files").mkdir(parents=True, exist_ok=True)
    mirror = Mirror(folder / "files", parcel.workspace)
    mark = f"{digest(file)}\n"
    if (folder / UNPACKED).is_file():
        if (folder / UNPACKED).read_text() != mark:
            raise UsageError(f"{folder} is of another parcel; remove it")
        mirror.tree = parcel.tree
        return mirror
    mirror.adopt(parcel.tree)
    for known, content in parcels.contents(file):
        mirror.receive(known, content)
    enqueue(Workspace(mirror.path(parcel.workspace)))
    bundle.write_json(folder / VERDICTS, [])
    bundle.write_text(folder / UNPACKED, mark)
    return mirror


def enqueue(workspace: Workspace) -> None:
    """Put kernel.py, where it is a candidate, and the loop's waiting candidates into W/waiting."""
    folder = workspace.root / "waiting"
    folder.mkdir(exist_ok=True)
    bundle.write_text(folder / ".gitignore", "*\n")  # what waits is no part of the history
    if kernel_waits(workspace):
        put_candidate(folder / KERNEL, workspace.kernel, workspace.plan(open_version(RecordStore(workspace))))
    files = RunFiles(workspace.root / ".loop")
    for name in of_loop(workspace):
        put_candidate(folder / f"{OF_LOOP}{name}", *files.candidate(name))
    if state := files.state():
        files.save_state(replace(state, waiting=(), version=None))


def put_candidate(path: Path, kernel: Path, plan: Path) -> None:
    """Copy a candidate's files to `path` with their suffixes; a first version needs no plan."""
    shutil.copyfile(kernel, path.with_name(f"{path.name}.py"))
    if plan.is_file():
        shutil.copyfile(plan, path.with_name(f"{path.name}.md"))


def judge_waiting(workspace: Workspace, timeout_s: float, sandbox: str, say: Say) -> Iterator[Judged]:
    """Judge each candidate; the files of those that were judged are removed."""
    for name in waiting(workspace):
        files = [workspace.root / "waiting" / f"{name}{suffix}" for suffix in (".py", ".md")]
        one = recorded(workspace, name, digest(files[0])) or judge_one(workspace, name, *files, timeout_s, sandbox, say)
        if one.version:
            for path in files:
                path.unlink(missing_ok=True)
        yield one


def recorded(workspace: Workspace, name: str, sha256: str) -> Judged | None:
    """The verdict on a kernel that was judged before, possibly just before a stop."""
    for record in RecordStore(workspace).records(masked=True):
        if record.kernel_sha256 == sha256 and record.is_judged:
            return Judged(name, record.version, record.passed, "this kernel was judged before")
    return None


def judge_one(
    workspace: Workspace, name: str, kernel: Path, plan: Path, timeout_s: float, sandbox: str, say: Say
) -> Judged:
    """Put a candidate through the gate. A reason not to judge it puts the best version back."""
    records = RecordStore(workspace)
    version = open_version(records)
    say(f"judging {name} as {version}")
    bundle.write_bytes(workspace.kernel, kernel.read_bytes())
    if plan.is_file():
        bundle.write_bytes(workspace.plan(version), plan.read_bytes())
    try:
        result = rounds.judge(workspace, version, timeout_s, say, sandbox)
    except EnvironmentLacks:
        raise
    except ToolError as error:
        workspace.plan(version).unlink(missing_ok=True)
        history.put_best_back(workspace, records.best())
        return Judged(name, None, False, str(error))
    return Judged(name, version, result.decision.accepted, result.decision.reason)


def profile_best(workspace: Workspace, say: Say) -> None:
    """Profile the best version if it has no profile: the next plan rests on it."""
    best = RecordStore(workspace).best()
    if best is None or (workspace.profile(best.version, profile_folder.MODE) / "metrics.json").exists():
        return
    try:
        profile_run.run(profile_run.Request(workspace, best.version), say)
    except ToolError as error:
        say(f"{best.version} could not be profiled: {error}")
