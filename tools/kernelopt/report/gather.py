"""A workspace, read for its report: records, sources, plans, profiles, and the files that cannot be read."""

import re
from dataclasses import dataclass, field, fields

from .. import bundle
from ..diagnosis import analysis, profile_folder
from ..diagnosis.diagnosis import Diagnosis
from ..errors import Refused, ToolError, UsageError
from ..hardware.roofline import Roof, roof_for
from ..profilers.profile import Profile
from ..session import explorations, plans, platforms, put_backs, version_kernels
from ..session.digests import digest
from ..session.explorations import Exploration
from ..session.put_backs import PutBack
from ..session.record import Record
from ..session.record_store import RecordStore
from ..session.task import Task
from ..session.workspace import Workspace

MODES = (profile_folder.MODE, "ncu")  # profile folders with metrics, the first one counts
CELL_END = re.compile(r"(?<!\\)\|")  # of a table in Markdown
LESSONS = "lessons.md"  # what a person or an agent wrote about the session, beside the report


@dataclass(frozen=True)
class RunLine:
    """A line of .loop/rounds.jsonl. at: UTC. of: a version, or a candidate that became none."""

    at: str
    round: str
    of: str
    outcome: str
    message: str


@dataclass(frozen=True)
class Session:
    """Everything that a report shows.

    records: masked ones too, lowest version first. best: None also when a broken record might be it. sources: kernel.py
    by version, where a file has the recorded SHA-256. plans: the Evidence table of each version's plan, where there is
    one. explorations: in order, without those that masked rounds cite. put_back: the kernel in its model. unattended:
    the lines that optimize_kernel.py logged. profiles: by version, of unmasked ones. diagnosis: of the best version's
    profile. no_roof: why roof is None. gaps: a sentence for each file that cannot be read.
    """

    name: str
    task: Task
    reference: str
    records: list[Record]
    best: Record | None
    best_is_known: bool
    kernel_is_best: bool
    sources: dict[str, str]
    plans: dict[str, list[list[str]]]
    explorations: list[Exploration]
    put_back: PutBack | None
    unattended: list[RunLine]
    profiles: dict[str, Profile]
    diagnosis: Diagnosis | None
    roof: Roof | None
    no_roof: str
    gaps: list[str] = field(default_factory=list)

    @property
    def visible(self) -> list[Record]:
        return [record for record in self.records if not record.masked]

    @property
    def masked(self) -> int:
        return len(self.records) - len(self.visible)


def gather(workspace: Workspace) -> Session:
    """Read a workspace; UsageError when its Task block is broken. Other files that cannot be read are named in
    `gaps`."""
    store, task = RecordStore(workspace), workspace.task()
    records = store.records(masked=True)
    gaps = list(store.broken)
    best = None if gaps else store.best()
    visible = [record for record in records if not record.masked]
    profiles = {r.version: p for r in visible if (p := profile_of(workspace, task, r.version, gaps))}
    roof, no_roof = roof_of(workspace, task)
    explored, unreadable = explorations.recorded(workspace, [record.version for record in records if record.masked])
    gaps += unreadable
    sources = ((record.version, source_of(workspace, record)) for record in visible)
    return Session(
        name=heading(workspace),
        task=task,
        reference=workspace.reference.read_text(encoding="utf-8", errors="replace"),
        records=records,
        best=best,
        best_is_known=not store.broken,
        kernel_is_best=bool(best) and workspace.kernel.is_file() and digest(workspace.kernel) == best.kernel_sha256,
        sources={version: source for version, source in sources if source is not None},
        plans={r.version: rows for r in visible if (rows := plan_evidence(workspace, r.version))},
        explorations=explored,
        put_back=in_model(workspace, gaps),
        unattended=unattended(workspace, gaps),
        profiles={version: profile for version, (profile, _) in profiles.items()},
        diagnosis=profiles[best.version][1] if best and best.version in profiles else None,
        roof=roof,
        no_roof=no_roof,
        gaps=[gap.replace(f"{workspace.root}/", "") for gap in gaps],
    )


def in_model(workspace: Workspace, gaps: list[str]) -> PutBack | None:
    """What put_back.py found; None where it did not run, or its result cannot be read, which goes to `gaps`."""
    try:
        return put_backs.recorded(workspace)
    except UsageError as error:
        gaps.append(str(error))
        return None


def heading(workspace: Workspace) -> str:
    """The first heading of the workspace's README, else the folder's name."""
    title = re.search(r"^# (.+)$", workspace.readme.read_text(encoding="utf-8"), re.MULTILINE)
    return title[1].strip() if title else workspace.root.name


def unattended(workspace: Workspace, gaps: list[str]) -> list[RunLine]:
    """The lines that optimize_kernel.py wrote about its rounds, of all runs. Broken lines go to `gaps`."""
    path = workspace.root / ".loop" / "rounds.jsonl"
    texts = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    lines = []
    for number, text in enumerate(texts, start=1):
        try:
            line = bundle.loads(text)
            lines.append(RunLine(**{field.name: str(line[field.name]) for field in fields(RunLine)}))
        except (ValueError, KeyError, TypeError, RecursionError):
            gaps.append(f"{path}:{number} is not a line of a round")
    return lines


def plan_evidence(workspace: Workspace, version: str) -> list[list[str]]:
    """The Evidence table of a version's plan; [] when there is no plan, or nothing in its place."""
    path = workspace.plan(version)
    return evidence_rows(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else []


def evidence_rows(plan: str) -> list[list[str]]:
    """The table under '## Evidence', its head first, every row as long as the head; other text there becomes its
    only cell."""
    body = plans.plan_sections(plan).get("Evidence", "").strip()
    lines = [line.strip() for line in body.splitlines() if line.strip().startswith("|")]
    rows = [CELL_END.split(line.removeprefix("|").removesuffix("|")) for line in lines]
    rows = [[cell.replace("\\|", "|").strip() for cell in row] for row in rows if not set("".join(row)) <= set("-: ")]
    if len(rows) < 2:
        return [["evidence"], [body]] if body else []
    head = [re.sub(r" *\(.*?\)", "", cell) for cell in rows[0]]  # the template lists the kinds of source in brackets
    return [head, *(fitted(row, len(head)) for row in rows[1:])]


def fitted(row: list[str], length: int) -> list[str]:
    """A row with that many cells: empty ones are added, surplus ones go into the last."""
    return (
        [*row[: length - 1], " | ".join(row[length - 1 :])] if len(row) >= length else row + [""] * (length - len(row))
    )


def profile_of(workspace: Workspace, task: Task, version: str, gaps: list[str]) -> tuple[Profile, Diagnosis] | None:
    """(profile, its diagnosis) of a version. None where it has no profile, or one that cannot be read, which goes to
    `gaps`."""
    folders = (workspace.profile(version, mode) for mode in MODES)
    folder = next((folder for folder in folders if (folder / "metrics.json").is_file()), None)
    if folder is None:
        return None
    try:
        profile = profile_folder.read(folder, workspace, task)
        return profile, analysis.diagnose(profile)
    except ToolError as error:
        gaps.append(str(error))
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # no schema checks these files
        gaps.append(f"{folder} holds no profile ({type(error).__name__}: {error}); profile {version} again")
    return None


def roof_of(workspace: Workspace, task: Task) -> tuple[Roof | None, str]:
    """(roof of the default workload, "") or (None, why there is none)."""
    work = task.work_of()
    if task.platform is None:
        return None, "the Task block names no platform"
    if not work or not work.bytes_min:
        return None, "the work of the default workload is not counted yet (estimate_work.py --workspace W)"
    try:
        return roof_for(platforms.of_task(workspace, task), work), ""
    except (Refused, UsageError) as error:
        return None, str(error)


def source_of(workspace: Workspace, record: Record) -> str | None:
    """The source of a version; None where no file has its SHA-256."""
    try:
        return version_kernels.kernel_of(workspace, record).decode("utf-8", "replace")
    except UsageError:
        return None
