"""The audit of a workspace: it checks every hardware value that the authors wrote. `citations` defines a valid value.

Values in some texts are used and can block a gate: the Task block, the README sections of Step 0, the baseline report,
the Evidence of a plan, and the evidence fields of a record. Other texts only get hints: Markdown and text files, the
advice in a record, kernel.py and versions/. The output of profile_kernel.sh and calibrate_gpu.py is measured, so it is
not audited. The record fields that the gate writes are not audited either.
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
from ..hardware.work import Work
from ..session import plans, platforms, stop_conditions
from ..session.readme import TASK_BLOCK, parse_task
from ..session.record import Record
from ..session.record_store import RecordStore
from ..session.task import Task
from ..session.workspace import Workspace
from . import exploration_rows, pieces, sources
from .citations import CALIBRATION, Context, Found, Piece, Problem, Recorded
from .claims import audit

UNFILLED = "plan"  # the kind of a problem: a plan that is still the template
NOT_AUDITED = {"profiles", "rejected", "explore", ".cache", ".git", ".loop", "memory", CALIBRATION}
TEXTS = (".md", ".txt")
CODE = (".py", ".cu", ".cuh", ".cpp", ".cc", ".h", ".hpp")
USED_OF_README = ("hardware spec", "roofline", "stop conditions")
# The fields of a record with evidence, and with advice for the next round. The gate writes the rest.
EVIDENCE = ("profile_evidence", "search_log", "isa_metric_progress")
ADVICE = ("optimization", "pitfalls_and_fixes", "references")
STATE = (("sm_clock_mhz", "MHz", "SM clock"), ("memory_clock_mhz", "MHz", "memory clock"), ("power_w", "W", "power"))
UNTIL_JUDGED = ("correctness", "quality_gate")


@dataclass
class Audit:
    """The result of an audit: the number of checked values, and the problems and hints as (file, problem)."""

    checked: int = 0
    problems: list[tuple[Path, Problem]] = field(default_factory=list)
    hints: list[tuple[Path, Problem]] = field(default_factory=list)
    with_hints: bool = True

    def look(self, path: Path, cut: Iterable[Piece], context: Context) -> None:
        """Audit the pieces of a file."""
        self.add(path, audit(cut, context, self.with_hints))

    def add(self, path: Path, findings: Found) -> None:
        self.checked += findings.checked
        self.problems += [(path, problem) for problem in findings.problems]
        self.hints += [(path, hint) for hint in findings.hints if self.with_hints]

    def problem(self, path: Path, kind: str, message: str) -> None:
        self.add(path, Found(1, [Problem(1, kind, message)]))


def of_workspace(workspace: Workspace, task: Task, store: RecordStore, hints: bool = True) -> Audit:
    """Audit every text of a workspace against its platform and its wiki. Without hints, the audit takes half the
    time and only finds what can block a gate."""
    result = Audit(with_hints=hints)
    written = list(store.scan_json(masked=True))
    records = [Record.from_json(record) for record in written]
    context, wrong = context_of(workspace, task, records)
    if wrong:
        result.problem(workspace.readme, "platform", wrong)
    if context.product and task.arch != context.product.architecture:
        message = f"arch is {task.arch}, {task.platform} is {context.product.architecture}"
        result.problem(workspace.readme, "platform", message)
    for path in texts(workspace.root):
        of_file(path, context, result)
    for path in sorted(workspace.root.glob("plans/*.md")):
        of_plan(path, workspace.root, result)
    for record in written:
        of_record(record, store.path(record["version"]), context, result)
    sound = {record.version for record in records}
    for path in sorted(workspace.memory.glob("v*.json")):
        if path.stem not in sound:
            of_file(path, context, result)
    check_targets(workspace, task, result)
    return result


def of_plan(path: Path, root: Path, result: Audit) -> None:
    """Audit what a plan cites of explorations, and whether it is filled in."""
    text = path.read_text(encoding="utf-8", errors="replace")
    problems = list(exploration_rows.problems(text, root))
    if left := plans.unfilled(text):
        problems.append(Problem(left.line, UNFILLED, left.sentence))
    result.add(path, Found(len(problems), problems))


def context_of(workspace: Workspace, task: Task, records: list[Record]) -> tuple[Context, str | None]:
    """Return the context for the texts of a workspace, and an error message if its platform or calibration is
    invalid."""
    root, numbers = wiki.root(task.gpu_wiki_path), measured(task, records)
    wrong = None
    try:
        context = make_context(root, task.platform, numbers, platforms.calibration_of(workspace, task))
    except UsageError as error:
        wrong = str(error)
        context = make_context(root, None, numbers)
    devices = frozenset(record.device for record in records if record.device)
    return replace(context, devices=devices, ridges=ridge_points(context, (task.work or {}).values())), wrong


def of_files(paths: list[Path], root: Path, platform: str | None) -> Audit:
    """Audit single files. The platform is that of the workspace around each file, unless the caller gives one."""
    result = Audit()
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
        of_file(path, context, result)
    return result


def is_workspace(folder: Path) -> bool:
    try:
        parse_task((folder / "README.md").read_bytes(), "README.md")
    except (OSError, UsageError):
        return False
    return (folder / "reference.py").is_file()


def texts(root: Path) -> list[Path]:
    """Return the files that are audited in addition to the records, in a fixed order."""
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_AUDITED]  # skips their subfolders too
        paths += [Path(folder, name) for name in names if name.endswith(TEXTS) and name not in NOT_AUDITED]
    versions = (path for path in (root / "versions").glob("*") if path.suffix in CODE)
    return [*sorted(paths), *sorted([root / "kernel.py", *versions, *root.glob("*.json")])]


def make_context(
    root: Path, platform: str | None, numbers: frozenset[Recorded], calibration: wiki.Page | None = None
) -> Context:
    """Make the context from the wiki in `root` and the product that `platform` names. Raise UsageError if the name
    is unknown. calibration: a workspace's calibration; it is used only if it belongs to that product."""
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


def ridge_points(context: Context, work: Iterable[Work]) -> tuple[float, ...]:
    """Return the ridge points in FLOP/byte of the task's workloads, each once, as Step 0 prints them."""
    roofs = [roofline.roof_of(context.product, one) for one in work] if context.product else []
    sound = [roof for roof in roofs if roof.bandwidth and roof.compute]
    return tuple(sorted({roofline.bound(1, 1, roof).ridge_point for roof in sound}))


def measured(task: Task, records: list[Record]) -> frozenset[Recorded]:
    """Return the values that programs measured here: rates, clocks and power of the records, the targets, and the
    ceiling of a target."""
    recorded = {Recorded(target.target, target.unit, "target") for target in task.targets}
    for target in task.targets:
        base = stop_conditions.BASIS_VALUE.search(target.basis)
        if base and "gpu-wiki" not in target.basis:
            recorded.add(Recorded(float(base[1]), base[2], "bandwidth"))
    for record in records:
        performance = record.performance
        rates = [(performance.bandwidth_gbps, "GB/s", "bandwidth"), (performance.tflops, "TFLOPS", "compute")]
        state = performance.gpu_state or {}
        for name, unit, of in STATE:
            rates += [(value, unit, of) for value in (state.get(name) or {}).values()]
        recorded |= {Recorded(*rate) for rate in rates if rate[0] is not None}
    return frozenset(recorded)


def of_file(path: Path, context: Context, result: Audit) -> None:
    """Audit one file. A file that cannot be read is a problem, unless it is code."""
    if path.suffix in CODE and not result.with_hints:
        return
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""  # reading a pipe would block
    except (OSError, UnicodeDecodeError) as error:
        if path.suffix not in CODE:
            result.problem(path, "unreadable", f"it cannot be read: {error}")
        return
    if path.suffix in CODE:
        result.look(path, sources.of_code(text, path.suffix == ".py"), context)
    elif path.suffix == ".json":
        of_json(text, path, context, result)
    else:
        result.look(path, of_markdown(text, path), context)


def of_markdown(text: str, path: Path) -> Iterator[Piece]:
    """Return the pieces of a page, depending on the kind of page."""
    if path.name == "baseline_report.md":
        return pieces.of_markdown(text, lambda heading: True)
    if path.parent.name == "plans" or all(f"\n## {title}\n" in f"\n{text}" for title in ("Category", "Action")):
        return pieces.of_markdown(text, lambda heading: heading.startswith("evidence"))
    block = TASK_BLOCK.search(text) if path.name == "README.md" else None
    if block is None:
        return pieces.of_markdown(text, lambda heading: False)
    return of_readme(text, block)


def of_readme(text: str, block: re.Match) -> Iterator[Piece]:
    """Yield the pieces of a workspace's README. In the Task block, only the strings count."""
    start, end = block.span(1)
    lines = "\n" * text.count("\n", start, end)
    yield from pieces.of_markdown(text[:start] + lines + text[end:], lambda heading: heading.startswith(USED_OF_README))
    try:
        task_block = bundle.loads(block[1])
    except ValueError:
        return  # no command works then; each one reports the error
    strings = list(pieces.of_json(task_block, used=True, numbers=False))
    yield from pieces.located(strings, block[1], text.count("\n", 0, start) + 1)


def of_json(text: str, path: Path, context: Context, result: Audit) -> None:
    """Audit a JSON file: a record outside the store, a broken record, or any other JSON."""
    try:
        value = bundle.loads(text)
    except ValueError:
        used = path.parent.name == "memory"
        result.look(path, [Piece(line, at, -1, used=used) for at, line in enumerate(text.splitlines(), 1)], context)
        return
    if isinstance(value, dict) and set(EVIDENCE) <= value.keys():
        of_record(value, path, context, result)
    else:
        result.look(path, pieces.located(list(pieces.of_json(value, used=False)), text), context)


def of_record(record: dict, path: Path, context: Context, result: Audit) -> None:
    """Audit the fields that the author of a record wrote: evidence and advice for the next round."""
    judged = (record.get("quality_gate") or {}).get("result") is not None
    advice = set(ADVICE) & record.keys()
    parts = [name for name in record if name in EVIDENCE or name in advice or (name in UNTIL_JUDGED and not judged)]
    cut = [
        piece for name in parts for piece in pieces.of_json(record[name], name not in advice, name, name in EVIDENCE)
    ]
    first = audit(cut, context, result.with_hints)
    if first.problems or first.hints:  # lines are located only then
        result.look(path, pieces.located(cut, path.read_text(encoding="utf-8")), context)
    else:
        result.add(path, first)


def check_targets(workspace: Workspace, task: Task, result: Audit) -> None:
    """Check that a target with a citation is the share of the cited value that Step 0 takes."""
    for target in task.targets:
        share_pct = TARGET_SHARE_PCT if target.share_pct is None else target.share_pct
        if message := stop_conditions.off_basis(replace(target, share_pct=share_pct)):
            result.problem(workspace.readme, "target", message)


def fix(result: Audit) -> list[tuple[Path, Problem]]:
    """Correct the line numbers of moved rows and insert missing citations in Markdown and text files. Return the
    corrected problems. A citation is inserted only if one row matches the figure. Code is never written, and all
    other problems and hints stay."""
    mended: list[tuple[Path, Problem]] = []
    for path in sorted({path for path, problem in [*result.problems, *result.hints] if problem.fix}):
        if path.suffix in CODE:
            continue
        fixable = [problem for other, problem in [*result.problems, *result.hints] if other == path and problem.fix]
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        for problem in sorted(fixable, key=lambda problem: problem.fix[:2], reverse=True):
            if mend(lines, problem):
                mended.append((path, problem))
        bundle.write_text(path, "".join(lines))
    result.problems = [pair for pair in result.problems if pair not in mended]
    result.hints = [pair for pair in result.hints if pair not in mended]
    return mended


def mend(lines: list[str], problem: Problem) -> bool:
    """Replace the wrong text in its line. Return False if the line does not contain it."""
    number, column, wrong, right = problem.fix
    line = lines[number - 1]
    at = line.find(wrong) if column < 0 else column
    if at < 0 or line[at : at + len(wrong)] != wrong:
        return False
    lines[number - 1] = line[:at] + right + line[at + len(wrong) :]
    return True
