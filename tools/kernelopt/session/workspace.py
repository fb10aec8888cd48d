"""One optimisation session on disk: its files, its Task block and its git history.

The README is the only source of the task. Its `## Task` section holds a fenced json block for the tools
(`reference/task.schema.json`). The sections below it are for people.
"""

import ast
import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from .. import bundle
from ..errors import EnvironmentLacks, TimedOut, UsageError
from . import delivery
from .task import Task

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*\Z")
VERSION = re.compile(r"v(0|[1-9][0-9]{0,11})\Z")
TASK_BLOCK = re.compile(r"(?<=\n)## Task\n.*?\n```json\n(.*?\n)```", re.DOTALL)
DTYPES = {
    "fp64": ("fp64", "float64", "double"),
    "fp32": ("fp32", "float32", "float"),
    "fp16": ("fp16", "float16", "half"),
    "bf16": ("bf16", "bfloat16"),
}
GIT_S = 120  # seconds for a git command
KEPT_FILE = ".loop/kept.tar"  # exists while agents work (loop/snapshot.py)
GIT_SETTINGS = """[user]
	name = gpu-kernel-optimizer
	email = gpu-kernel-optimizer@localhost
[commit]
	gpgsign = false
[core]
	hooksPath = /dev/null
	autocrlf = false
"""
# Records name their commit, so they are not part of the history.
IGNORED = (
    *("memory/", "profiles/", "rejected/", "waiting/", "put_back/", ".cache/", ".loop/", "__pycache__/"),
    "report.html",
)


def version_number(version: str) -> int:
    """Return 3 for "v3". Raise UsageError for other names than v0, v1, v2 …"""
    if not VERSION.match(version):
        raise UsageError(f"{version!r} is no version; versions are v0, v1, v2, …")
    return int(version[1:])


def dtype_name(name: str) -> str:
    """Return the bundle's name of a dtype: bf16 for "bfloat16", "torch.bfloat16" or "BF16"."""
    plain = name.lower().removeprefix("torch.")
    for short, spellings in DTYPES.items():
        if plain in spellings:
            return short
    raise UsageError(f"dtype '{name}' is not supported; choose one of: {', '.join(DTYPES)}")


def defined_names(path: Path) -> set[str]:
    """Return the names that a Python file defines or imports at top level. Raise UsageError if it is not a Python
    file."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except OSError:
        raise UsageError(f"{path} is not a readable file") from None
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{path} is not valid Python ({error})") from None
    return names_in(tree)


def names_in(tree: ast.Module) -> set[str]:
    """Return the names that a module defines or imports at top level."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return names


def assigned(tree: ast.Module) -> Iterator[tuple[str, ast.Assign | ast.AnnAssign]]:
    """Each name that a module assigns a value to at top level, with the statement, in their order."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            yield from ((target.id, node) for target in targets if isinstance(target, ast.Name))


def is_kernel(names: set[str]) -> bool:
    return bool(names & {"ModelNew", "kernel_function"})


def is_reference(names: set[str]) -> bool:
    return {"Model", "get_inputs"} <= names


def digest(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal. Raise UsageError if the file cannot be read."""
    return hashlib.sha256(bundle.read_bytes(path)).hexdigest()


class Workspace:
    """The folder of one session. `Workspace(path)` refuses a folder that is not a workspace."""

    def __init__(self, root: Path):
        self.root = Path(os.path.realpath(root))  # Path.resolve fails where a link leads to itself
        self.readme = self.root / "README.md"
        self.kernel = self.root / "kernel.py"
        self.reference = self.root / "reference.py"
        self.cache = self.root / ".cache"
        self.memory = self.root / "memory"
        lost = [path.name for path in (self.readme, self.reference) if not path.is_file()]
        if lost and self.memory.is_dir():
            raise UsageError(f"{self.root} lacks {lost[0]}; take it back: git -C {self.root} checkout -- {lost[0]}")
        if lost:
            raise UsageError(f"{self.root} is no workspace; make one: bash reference/workspace_init.sh NAME KERNEL")

    def plan(self, version: str) -> Path:
        return self.root / "plans" / f"{version}_plan.md"

    def profile(self, version: str, mode: str) -> Path:
        return self.root / "profiles" / version / mode

    @contextlib.contextmanager
    def locked(self):
        """Let only one gate at a time work on a workspace. The second one gets EnvironmentLacks."""
        if not (self.root / ".git").is_dir():
            raise UsageError(f"{self.root} has no history (.git), so nothing can be judged there; make a new workspace")
        with bundle.lock_file(self.root / ".git" / "kernelopt-lock") as handle:  # not in a folder that people clear
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise EnvironmentLacks(f"{self.root} is in use by another gate; wait for it to end") from None
            delivery.finish(self.root)
            yield

    # --- the README -----------------------------------------------------------------------------------------

    def task(self) -> Task:
        """Return the Task block, checked against its schema."""
        return parse_task(self.readme.read_bytes(), str(self.readme))

    def task_at(self, revision: str) -> Task:
        """Return the Task block at a revision."""
        return parse_task(self.file_at(revision, "README.md"), f"README.md of {revision[:12]}")

    def update_readme(self, task: Task, sections: dict[str, str]) -> None:
        """Replace the Task block and the text of the named sections. Other text does not change."""
        block = task.to_json()
        bundle.validate(block, "task.schema.json", "Task block")
        text = self.readme.read_text(encoding="utf-8")
        match = TASK_BLOCK.search(text)
        text = text[: match.start(1)] + bundle.dumps(block) + text[match.end(1) :]
        for title, body in sections.items():
            text = replace_section(text, title, body)
        bundle.write_text(self.readme, text)

    # --- git ------------------------------------------------------------------------------------------------

    def git(self, *arguments: str) -> str:
        """Return the output of a git command in the workspace. Raise UsageError if git fails."""
        done = run_git(self.root, *arguments)
        if done.returncode:
            raise UsageError(f"git {arguments[0]} failed in {self.root}: {done.stderr.decode().strip()}")
        return done.stdout.decode().strip()

    def commit(self, message: str) -> str:
        """Commit all files that git does not ignore. Return the full hash of the new commit."""
        self.git("read-tree", "--empty")  # a new index, because flags in the old one could hide a change
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", message)
        return self.git("rev-parse", "HEAD")

    def file_at(self, revision: str, name: str) -> bytes:
        """Return the bytes of a tracked file at a revision."""
        done = run_git(self.root, "show", f"{revision}:{name}")
        if done.returncode:
            raise UsageError(
                f"{revision}:{name} is not in the history of {self.root}; this lists what is: git -C {self.root} log "
                f"--oneline -- {name}"
            )
        return done.stdout

    def extract(self, revision: str, folder: Path) -> Path:
        """Write kernel.py of a revision into `folder`."""
        path = folder / f"kernel_{revision[:12].replace('/', '_')}.py"
        bundle.write_bytes(path, self.file_at(revision, "kernel.py"))
        return path

    def first_reference(self) -> bytes:
        """Return reference.py of the first commit. This oracle may not change."""
        first = self.git("rev-list", "--max-parents=0", "HEAD").splitlines()[-1]
        return self.file_at(first, "reference.py")


def parse_task(readme: bytes, name: str) -> Task:
    """Return the Task block of a workspace's README. The UsageError names the file and its error."""
    try:
        match = TASK_BLOCK.search(readme.decode("utf-8"))
    except UnicodeDecodeError:
        raise UsageError(f"{name} is not UTF-8 text") from None
    if match is None:
        raise UsageError(
            f"{name} has no json block under '## Task'; take it back from an earlier commit: git log -p -- README.md"
        )
    try:
        block = bundle.loads(match[1])
    except ValueError as error:
        raise UsageError(f"{name}: the Task block is not valid JSON ({error})") from None
    bundle.validate(block, "task.schema.json", f"{name}: Task block")
    return Task.from_json(block)


def start_git(folder: Path, *options: str) -> None:
    """Make a folder a repository whose commits are ours: under no name of the user's, and with no hook or signature.
    options: of git init."""
    done = run_git(folder, "init", "--quiet", *options)
    if done.returncode:
        raise UsageError(f"git init failed in {folder}: {done.stderr.decode().strip()}")
    with open(folder / ".git" / "config", "a", encoding="utf-8") as file:
        file.write(GIT_SETTINGS)


def run_git(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run git in `folder`. Ignore replaced objects, and variables such as GIT_DIR that point to another repository."""
    try:
        return subprocess.run(
            ["git", "--no-replace-objects", "-C", str(folder), *arguments],
            capture_output=True,
            env=environment_without_git(),
            timeout=GIT_S,
        )
    except subprocess.TimeoutExpired:
        raise TimedOut(f"git {arguments[0]} in {folder} took over {GIT_S} s; look at what lies in its .git") from None
    except FileNotFoundError:
        raise EnvironmentLacks("git is not installed; install it, for example: apt-get install git") from None


def environment_without_git() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}


def replace_section(text: str, title: str, body: str) -> str:
    """Replace the body of `## title` in `text`. An absent section is appended."""
    section = f"## {title}\n\n{body.strip()}\n\n"
    pattern = re.compile(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)
    if pattern.search(text):
        return pattern.sub(lambda _: section, text, count=1).rstrip() + "\n"
    return f"{text.rstrip()}\n\n{section}".rstrip() + "\n"


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
