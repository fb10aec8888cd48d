"""Audit of a workspace: every hardware value in what its authors wrote. See `citations` for what counts as right.

Audited: all Markdown files (README.md, plans, reports) and the records. What profile_kernel.sh writes is
measured, not cited, and stays out.
"""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from . import bundle, gate, wiki
from .citations import Context, Problem, audit
from .errors import Refused, UsageError
from .memory import Memory
from .roofline import TARGET_SHARE_PCT
from .workspace import Workspace, parse_task

NOT_AUDITED = {"profiles", "rejected", ".cache", ".git", ".loop"}
# of a plan, and of the record that takes it over
PREDICTION = re.compile(r'^## Expected effect\n.*?(?=^## |\Z)|^ *"expected_impact": [^\n]*', re.DOTALL | re.MULTILINE)


@dataclass
class Audit:
    """What was found: how many values were looked at, and each that is wrong, as (file, problem)."""

    checked: int = 0
    problems: list[tuple[Path, Problem]] = field(default_factory=list)

    def add(self, path: Path, checked: int, problems: list[Problem]) -> None:
        self.checked += checked
        self.problems += [(path, problem) for problem in problems]


def of_workspace(workspace: Workspace) -> Audit:
    """Audit everything that was written in a workspace, for its platform and against its wiki."""
    task, found = workspace.task(), Audit()
    root, platform = wiki.root(task["gpu_wiki_path"]), task["platform"]
    try:
        context = make_context(root, platform, measured(workspace, task))
    except UsageError as error:
        found.add(workspace.readme, 1, [Problem(1, "platform", str(error))])
        context = make_context(root, None, measured(workspace, task))
    if context.product and task["arch"] != context.product.architecture:
        message = f"arch is {task['arch']}, {platform} is {context.product.architecture}"
        found.add(workspace.readme, 1, [Problem(1, "platform", message)])
    for path in texts(workspace.root):
        of_file(path, context, found)
    check_targets(workspace, task, found)
    return found


def of_files(paths: list[Path], root: Path, platform: str | None) -> Audit:
    """Audit single files. Their platform is that of the workspace they lie in, unless one is given."""
    found = Audit()
    for path in paths:
        home = next((folder for folder in path.resolve().parents if is_workspace(folder)), None)
        if home:
            workspace = Workspace(home)
            task = workspace.task()
            base = wiki.root(task["gpu_wiki_path"])
            context = make_context(base, platform or task["platform"], measured(workspace, task))
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
    """The files that are audited, in a fixed order."""
    pages = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_AUDITED]  # whatever lies in those, however deep
        pages += [Path(folder, name) for name in names if name.endswith(".md") and name not in NOT_AUDITED]
    return [*sorted(pages), *sorted(root.glob("memory/v*.json"))]


def make_context(root: Path, platform: str | None, numbers: frozenset[tuple[float, str]]) -> Context:
    """The wiki in `root`, and the product that `platform` names; UsageError when it names none."""
    products, limits = wiki.pages(root), wiki.limit_pages(root).values()
    try:
        product = wiki.find(platform, products) if platform else None
    except Refused as error:
        raise UsageError(f"the platform of the task: {error}") from None
    pages = {page.file: page for page in (*products, *limits)}
    documents = {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in root.rglob("*.md")}
    return Context(pages, documents, product, numbers, (*Context.roots, str(root)))


def measured(workspace: Workspace, task: dict) -> frozenset[tuple[float, str]]:
    """(number, unit) of what was measured here: rates, clocks and power of the records, the targets and what they rest on."""
    found = {(target["target"], target["unit"]) for target in task["targets"]}
    bases = (gate.BASIS_VALUE.search(target["basis"]) for target in task["targets"])
    found |= {(float(base[1]), base[2]) for base in bases if base}
    for record in Memory(workspace).records(masked=True):
        performance = record["performance"]
        rates = [(performance["bandwidth_gbps"], "GB/s"), (performance["tflops"], "TFLOPS")]
        state = performance["gpu_state"] or {}
        for name, unit in (("sm_clock_mhz", "MHz"), ("memory_clock_mhz", "MHz"), ("power_w", "W")):
            rates += [(value, unit) for value in state.get(name, {}).values()]
        found |= {(value, unit) for value, unit in rates if value is not None}
    return frozenset(found)


def of_file(path: Path, context: Context, found: Audit) -> None:
    """Audit one file; one that cannot be read is a problem of its own."""
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""  # a pipe would be waited for
    except (OSError, UnicodeDecodeError) as error:
        found.add(path, 0, [Problem(1, "unreadable", f"it cannot be read: {error}")])
        return
    if path.suffix == ".json":
        text = unescaped(text)
    for part, start, prediction in split(text, PREDICTION.search(text)):
        checked, problems = audit(part, context, prediction)
        found.add(path, checked, [Problem(p.line + start, p.kind, p.message, p.fix) for p in problems])


def unescaped(text: str) -> str:
    """JSON text with its escapes of characters undone, line by line, so that line numbers stay."""
    return (
        re.sub(r"\\u([0-9a-fA-F]{4})", lambda match: chr(int(match[1], 16)), text)
        .replace("\\n", " ")
        .replace('\\"', '"')
    )


def split(text: str, expected: re.Match | None) -> list[tuple[str, int, bool]]:
    """(part, lines before it, is it a prediction) of a text."""
    if expected is None:
        return [(text, 0, False)]
    pieces = [(text[: expected.start()], False), (expected[0], True), (text[expected.end() :], False)]
    parts, lines = [], 0
    for piece, prediction in pieces:
        parts.append((piece, lines, prediction))
        lines += piece.count("\n")
    return parts


def check_targets(workspace: Workspace, task: dict, found: Audit) -> None:
    """A target that rests on a citation is the share of it that Step 0 takes."""
    for target in task["targets"]:
        if message := gate.off_basis({"share_pct": TARGET_SHARE_PCT, **target}):
            found.add(workspace.readme, 1, [Problem(1, "target", message)])


def fix(found: Audit) -> int:
    """Put the right line into citations whose row has moved; how many. Other problems stay."""
    fixed = [(path, problem) for path, problem in found.problems if problem.fix]
    for path in {path for path, _ in fixed}:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        for problem in (problem for other, problem in fixed if other == path):
            lines[problem.line - 1] = lines[problem.line - 1].replace(*problem.fix)
        bundle.write_text(path, "".join(lines))
    found.problems = [(path, problem) for path, problem in found.problems if not problem.fix]
    return len(fixed)
