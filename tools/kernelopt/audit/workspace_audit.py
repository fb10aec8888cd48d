"""Audit of a workspace: every hardware value in what its authors wrote. See `citations` for what counts as right.

Values are used, and hold a gate up, in the Task block, in the README's sections that Step 0 writes, in the baseline
report, in the Evidence of a plan and in the fields of a record that carry evidence. Everything else that people write
(other Markdown and text, what a record tells the next round, kernel.py, versions/) gets hints. What profile_kernel.sh
and calibrate_gpu.py write is measured, not cited, and stays out; so do the fields of a record that the gate writes.
"""

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from .. import bundle
from ..errors import Refused, UsageError
from ..hardware import roofline, wiki
from ..hardware.roofline import TARGET_SHARE_PCT
from ..session import platforms, stop_conditions
from ..session.record import Record
from ..session.record_store import RecordStore
from ..session.task import Task
from ..session.workspace import TASK_BLOCK, Workspace, parse_task
from . import exploration_rows, pieces, sources
from .citations import CALIBRATION, Context, Found, Piece, Problem, Recorded
from .claims import audit

NOT_AUDITED = {"profiles", "rejected", "explore", ".cache", ".git", ".loop", "memory", CALIBRATION}
TEXTS = (".md", ".txt")
CODE = (".py", ".cu", ".cuh", ".cpp", ".cc", ".h", ".hpp")
USED_OF_README = ("hardware spec", "roofline", "stop conditions")
# Of a record: what carries evidence, and what tells the next round; the rest is written by the gate.
EVIDENCE = ("profile_evidence", "search_log", "isa_metric_progress")
TOLD = ("optimization", "pitfalls_and_fixes", "references")
STATE = (("sm_clock_mhz", "MHz", "SM clock"), ("memory_clock_mhz", "MHz", "memory clock"), ("power_w", "W", "power"))
UNTIL_JUDGED = ("correctness", "quality_gate")


@dataclass
class Audit:
    """What was found: how many values were looked at, each that is wrong, and each hint, as (file, problem)."""

    checked: int = 0
    problems: list[tuple[Path, Problem]] = field(default_factory=list)
    hints: list[tuple[Path, Problem]] = field(default_factory=list)
    with_hints: bool = True

    def look(self, path: Path, cut: Iterable[Piece], context: Context) -> None:
        """Audit the pieces of a file."""
        self.add(path, audit(cut, context, self.with_hints))

    def add(self, path: Path, found: Found) -> None:
        self.checked += found.checked
        self.problems += [(path, problem) for problem in found.problems]
        self.hints += [(path, hint) for hint in found.hints if self.with_hints]

    def problem(self, path: Path, kind: str, message: str) -> None:
        self.add(path, Found(1, [Problem(1, kind, message)]))


def of_workspace(workspace: Workspace, task: Task, store: RecordStore, hints: bool = True) -> Audit:
    """Audit everything that was written in a workspace, for its platform and against its wiki. Without hints, which
    takes half the time: what holds a gate up."""
    found = Audit(with_hints=hints)
    written = list(store.scan_json(masked=True))
    records = [Record.from_json(record) for record in written]
    context, wrong = context_of(workspace, task, records)
    if wrong:
        found.problem(workspace.readme, "platform", wrong)
    if context.product and task.arch != context.product.architecture:
        message = f"arch is {task.arch}, {task.platform} is {context.product.architecture}"
        found.problem(workspace.readme, "platform", message)
    for path in texts(workspace.root):
        of_file(path, context, found)
    for path in sorted(workspace.root.glob("plans/*.md")):
        text = path.read_text(encoding="utf-8", errors="replace")
        cited = list(exploration_rows.problems(text, workspace.root))
        found.add(path, Found(len(cited), cited))
    for record in written:
        of_record(record, store.path(record["version"]), context, found)
    sound = {record.version for record in records}
    for path in sorted(workspace.memory.glob("v*.json")):
        if path.stem not in sound:
            of_file(path, context, found)
    check_targets(workspace, task, found)
    return found


def context_of(workspace: Workspace, task: Task, records: list[Record]) -> tuple[Context, str | None]:
    """What the texts of a workspace are held against, and what is wrong with its platform or its calibration."""
    root, numbers = wiki.root(task.gpu_wiki_path), measured(task, records)
    wrong = None
    try:
        context = make_context(root, task.platform, numbers, platforms.calibration_of(workspace, task))
    except UsageError as error:
        wrong = str(error)
        context = make_context(root, None, numbers)
    devices = frozenset(record.device for record in records if record.device)
    dtypes = {work.dtype for work in (task.work or {}).values()}
    return replace(context, devices=devices, ridges=ridge_points(context, dtypes)), wrong


def of_files(paths: list[Path], root: Path, platform: str | None) -> Audit:
    """Audit single files. Their platform is that of the workspace they lie in, unless one is given."""
    found = Audit()
    for path in paths:
        home = next((folder for folder in path.resolve().parents if is_workspace(folder)), None)
        if home:
            workspace = Workspace(home)
            task = workspace.task()
            records = RecordStore(workspace).records(masked=True)
            context, wrong = context_of(workspace, replace(task, platform=platform or task.platform), records)
            if wrong:
                raise UsageError(wrong)
        else:
            context = make_context(root, platform, frozenset())
        of_file(path, context, found)
    return found


def is_workspace(folder: Path) -> bool:
    try:
        parse_task((folder / "README.md").read_bytes(), "README.md")
    except (OSError, UsageError):
        return False
    return (folder / "reference.py").is_file()


def texts(root: Path) -> list[Path]:
    """The files that are audited beside the records, in a fixed order."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_AUDITED]  # whatever lies in those, however deep
        found += [Path(folder, name) for name in names if name.endswith(TEXTS) and name not in NOT_AUDITED]
    kept = (path for path in (root / "versions").glob("*") if path.suffix in CODE)
    return [*sorted(found), *sorted([root / "kernel.py", *kept, *root.glob("*.json")])]


def make_context(
    root: Path, platform: str | None, numbers: frozenset[Recorded], calibration: wiki.Page | None = None
) -> Context:
    """The wiki in `root`, and the product that `platform` names; UsageError when it names none. calibration: of a
    workspace, which counts where it is of that product."""
    products, limits = wiki.pages(root), wiki.limit_pages(root).values()
    try:
        product = platforms.known(platform, root, calibration) if platform else None
    except Refused as error:
        raise UsageError(f"the platform of the task: {error}") from None
    pages = {page.file: page for page in (*products, *limits)}
    if calibration and product and wiki.spellings(calibration) <= wiki.spellings(product):
        pages[CALIBRATION] = calibration
    documents = {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in root.rglob("*.md")}
    return Context(pages, documents, product, numbers, (*Context.roots, str(root)))


def ridge_points(context: Context, dtypes: set[str]) -> tuple[float, ...]:
    """FLOP/byte at which compute begins to bound, of each dtype of the task's work, as Step 0 prints it."""
    roofs = [roofline.roof(context.product, dtype) for dtype in sorted(dtypes)] if context.product else []
    return tuple(roofline.bound(1, 1, roof).ridge_point for roof in roofs if roof.bandwidth and roof.compute)


def measured(task: Task, records: list[Record]) -> frozenset[Recorded]:
    """What programs measured here: rates, clocks and power of the records, the targets and the ceiling that one
    rests on."""
    found = {Recorded(target.target, target.unit, "target") for target in task.targets}
    for target in task.targets:
        base = stop_conditions.BASIS_VALUE.search(target.basis)
        if base and "gpu-wiki" not in target.basis:
            found.add(Recorded(float(base[1]), base[2], "bandwidth"))
    for record in records:
        performance = record.performance
        rates = [(performance.bandwidth_gbps, "GB/s", "bandwidth"), (performance.tflops, "TFLOPS", "compute")]
        state = performance.gpu_state or {}
        for name, unit, of in STATE:
            rates += [(value, unit, of) for value in (state.get(name) or {}).values()]
        found |= {Recorded(*rate) for rate in rates if rate[0] is not None}
    return frozenset(found)


def of_file(path: Path, context: Context, found: Audit) -> None:
    """Audit one file; one that cannot be read is a problem of its own, but for code."""
    if path.suffix in CODE and not found.with_hints:
        return
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""  # a pipe would be waited for
    except (OSError, UnicodeDecodeError) as error:
        if path.suffix not in CODE:
            found.problem(path, "unreadable", f"it cannot be read: {error}")
        return
    if path.suffix in CODE:
        found.look(path, sources.of_code(text, path.suffix == ".py"), context)
    elif path.suffix == ".json":
        of_json(text, path, context, found)
    else:
        found.look(path, of_markdown(text, path), context)


def of_markdown(text: str, path: Path) -> Iterator[Piece]:
    """The pieces of a page, by what the page is."""
    if path.name == "baseline_report.md":
        return pieces.of_markdown(text, lambda heading: True)
    if path.parent.name == "plans" or all(f"\n## {title}\n" in f"\n{text}" for title in ("Category", "Action")):
        return pieces.of_markdown(text, lambda heading: heading.startswith("evidence"))
    block = TASK_BLOCK.search(text) if path.name == "README.md" else None
    if block is None:
        return pieces.of_markdown(text, lambda heading: False)
    return of_readme(text, block)


def of_readme(text: str, block: re.Match) -> Iterator[Piece]:
    """A workspace's README; of the Task block what its author wrote."""
    start, end = block.span(1)
    lines = "\n" * text.count("\n", start, end)
    yield from pieces.of_markdown(text[:start] + lines + text[end:], lambda heading: heading.startswith(USED_OF_README))
    try:
        task_block = bundle.loads(block[1])
    except ValueError:
        return  # nothing of the session works then, and the message says why
    strings = list(pieces.of_json(task_block, used=True, numbers=False))
    yield from pieces.located(strings, block[1], text.count("\n", 0, start) + 1)


def of_json(text: str, path: Path, context: Context, found: Audit) -> None:
    """A record that lies apart or is broken, or any other JSON."""
    try:
        value = bundle.loads(text)
    except ValueError:
        used = path.parent.name == "memory"
        found.look(path, [Piece(line, at, -1, used=used) for at, line in enumerate(text.splitlines(), 1)], context)
        return
    if isinstance(value, dict) and set(EVIDENCE) <= value.keys():
        of_record(value, path, context, found)
    else:
        found.look(path, pieces.located(list(pieces.of_json(value, used=False)), text), context)


def of_record(record: dict, path: Path, context: Context, found: Audit) -> None:
    """What the author of a record wrote: evidence, and what is told to the next round."""
    judged = (record.get("quality_gate") or {}).get("result") is not None
    told = set(TOLD) & record.keys()
    parts = [name for name in record if name in EVIDENCE or name in told or (name in UNTIL_JUDGED and not judged)]
    cut = [piece for name in parts for piece in pieces.of_json(record[name], name not in told, name, name in EVIDENCE)]
    first = audit(cut, context, found.with_hints)
    if first.problems or first.hints:  # only then their lines are looked for
        found.look(path, pieces.located(cut, path.read_text(encoding="utf-8")), context)
    else:
        found.add(path, first)


def check_targets(workspace: Workspace, task: Task, found: Audit) -> None:
    """A target that rests on a citation is the share of it that Step 0 takes."""
    for target in task.targets:
        share_pct = TARGET_SHARE_PCT if target.share_pct is None else target.share_pct
        if message := stop_conditions.off_basis(replace(target, share_pct=share_pct)):
            found.problem(workspace.readme, "target", message)


def fix(found: Audit) -> list[tuple[Path, Problem]]:
    """Put the right line into citations whose row has moved, and citations behind figures of Markdown and text that
    equal one row; what was mended. Code is never written, and the other problems and hints stay."""
    mended: list[tuple[Path, Problem]] = []
    for path in sorted({path for path, problem in [*found.problems, *found.hints] if problem.fix}):
        if path.suffix in CODE:
            continue
        own = [problem for other, problem in [*found.problems, *found.hints] if other == path and problem.fix]
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        for problem in sorted(own, key=lambda problem: problem.fix[:2], reverse=True):
            if mend(lines, problem):
                mended.append((path, problem))
        bundle.write_text(path, "".join(lines))
    found.problems = [pair for pair in found.problems if pair not in mended]
    found.hints = [pair for pair in found.hints if pair not in mended]
    return mended


def mend(lines: list[str], problem: Problem) -> bool:
    """Put what belongs there into its line; False where the line does not hold what was found."""
    number, column, wrong, right = problem.fix
    line = lines[number - 1]
    at = line.find(wrong) if column < 0 else column
    if at < 0 or line[at : at + len(wrong)] != wrong:
        return False
    lines[number - 1] = line[:at] + right + line[at + len(wrong) :]
    return True
