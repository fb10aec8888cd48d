"""Make a workspace of a kernel and its reference, up to the first commit."""

import re
import shutil
from pathlib import Path

from .. import bundle
from ..errors import UsageError
from .git_commands import start_git
from .source_names import defined_names, is_kernel, is_reference
from .task import Task
from .workspace import Workspace

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*\Z")
# Records name their commit, so they are not part of the history.
IGNORED = (
    *("memory/", "profiles/", "rejected/", "waiting/", "put_back/", ".cache/", ".loop/", "__pycache__/"),
    "report.html",
)


def create(
    root: Path, name: str, kernel: Path, reference: Path | None, task: Task, beside: dict[str, Path] | None = None
) -> Workspace:
    """Make the workspace `root`/kernel_opt_<name> and its first commit.

    beside: more files, by their names in the workspace.

    kernel: ModelNew or kernel_function, or only a reference (then Stage 1 writes the kernel). reference: Model and
    get_inputs; optional if `kernel` defines them too. A failure leaves no files behind. An existing folder is never
    changed.
    """
    if not NAME.match(name):
        raise UsageError(f"{name!r} is no name: letters, digits, '_' and '-', beginning with a letter or digit")
    reference = check_sources(kernel, reference)
    bundle.validate(task.to_json(), "task.schema.json", "Task block")
    if not root.is_dir():
        raise UsageError(f"{root} is no folder")
    target = root / f"kernel_opt_{name}"
    try:
        target.mkdir()
    except FileExistsError:
        raise UsageError(f"{target} exists; choose another NAME or remove it") from None
    try:
        for file, source in (beside or {}).items():
            shutil.copyfile(source, target / file)
        return _fill(target, name, kernel, reference, task)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise


def check_sources(kernel: Path, reference: Path | None) -> Path:
    """Return the file that becomes reference.py. Raise UsageError if the two files do not define a problem."""
    names = defined_names(kernel)
    if reference is not None:
        if not is_reference(defined_names(reference)):
            raise UsageError(f"{reference} is no reference: it must define Model and get_inputs")
        if not is_kernel(names):
            raise UsageError(f"{kernel} is no kernel: it must define ModelNew or kernel_function")
        return reference
    if is_reference(names):
        return kernel
    if is_kernel(names):
        raise UsageError(f"{kernel} has no reference in it; pass --reference FILE with Model and get_inputs")
    raise UsageError(
        f"{kernel} is neither a kernel (ModelNew or kernel_function) nor a reference (Model and get_inputs)"
    )


def _fill(target: Path, name: str, kernel: Path, reference: Path, task: Task) -> Workspace:
    for folder in ("memory", "plans", "profiles"):
        (target / folder).mkdir()
    shutil.copyfile(kernel, target / "kernel.py")
    shutil.copyfile(reference, target / "reference.py")
    shutil.copyfile(bundle.REFERENCE / "baseline_report.md", target / "baseline_report.md")
    for template in ("README.md", "test_kernel.py"):
        text = (bundle.REFERENCE / template).read_text(encoding="utf-8")
        for key, value in {
            "NAME": name,
            "TASK": bundle.dumps(task.to_json()).rstrip(),
            "BUNDLE": str(bundle.ROOT),
        }.items():
            text = text.replace(f"@{key}@", value)
        (target / template).write_text(text, encoding="utf-8")
    (target / ".gitignore").write_text("\n".join(IGNORED) + "\n", encoding="utf-8")
    workspace = Workspace(target)
    start_git(target)
    workspace.commit(f"Session {name} starts")
    return workspace
