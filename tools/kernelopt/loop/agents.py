"""An agent's command, run on a brief in a git clone of its own: what it answered, and what it did besides.

Whatever the command does has a name (OUTCOMES); nothing of it is taken but kernel.py and the plan. It runs with the user's
rights, as every coding agent does; kept.py looks after the workspace itself.
"""

import contextlib
import hashlib
import io
import os
import re
import signal
import stat
import subprocess
import time
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .. import bundle
from ..device.sandbox import Pump, Tail, kill_group
from ..errors import EnvironmentLacks, UsageError
from ..session import record_store
from ..session.workspace import IGNORED, Workspace, environment_without_git, run_git
from .snapshot import real_folder, remove, seen, unlock_git

PLAN = "plan.md"
MOST_BYTES = {"kernel.py": 1 << 20, PLAN: 1 << 16}
OUTCOMES = (
    "answered",
    "timed out",
    "failed",
    "no answer",
    "no plan",
    "too large",
    "unchanged",
    "refused plan",
    "tried before",
    "forbidden files",
    "no call left",
    "interrupted",
)
ENDING_S = 5  # seconds in which what an agent started must be gone
MARK = "KERNELOPT_DESK"  # in the environment of all that an agent starts
NO_COMMAND = re.compile(r"bash: line 1: [^\n]*: (command not found|Permission denied|No such file or directory)")
HALF_WRITTEN = [  # by bundle.write_bytes when it was killed; editors have temporary files of other names
    f"{place}.????????"
    for place in (
        ".kernel.py",
        "plans/.v*_plan.md",
        "rejected/.v*_kernel*.py",
        ".loop/.*.json*",
        ".loop/.kept.tar",
        ".loop/..gitignore",
        ".loop/candidates/.*",
    )
]


@dataclass(frozen=True)
class Answer:
    """outcome: one of OUTCOMES. message: why, in a sentence. kernel, plan: the texts, of an answer."""

    outcome: str
    message: str
    kernel: str | None = None
    plan: str | None = None
    wall_s: float = 0.0


class Desk:
    """The clone in which an agent works on one candidate, which it may leave as kernel.py and plan.md.

    It is a clone of the last commit alone: whatever the agent does to its git, the workspace's own is another one, and masked rounds are
    not in its history. kernel: what kernel.py holds when it begins.
    """

    def __init__(self, workspace: Workspace, name: str, kernel: bytes):
        self.workspace, self.name, self.kernel = workspace, name, kernel
        self.path = workspace.root / ".loop" / "desks" / name

    def __enter__(self) -> "Desk":
        self.remove()
        real_folder(self.path.parent)
        options = ("--quiet", "--no-local", "--depth", "1", "--template=")
        self.workspace.git("clone", *options, str(self.workspace.root.resolve()), str(self.path.resolve()))
        for version in record_store.RecordStore(self.workspace).masked_versions():
            (self.path / "plans" / f"{version}_plan.md").unlink(missing_ok=True)
        self._forget_history()
        bundle.write_bytes(self.path / "kernel.py", self.kernel)
        self.before = seen(self.path, IGNORED_NAMES)
        return self

    def _forget_history(self) -> None:
        """A git of one commit, of what lies there now: the clone's still has the plans of masked rounds."""
        remove(self.path / ".git")
        run_git(self.path, "init", "--quiet", "--template=")
        for setting in ("user.name", "user.email", "commit.gpgsign", "core.hooksPath"):
            run_git(self.path, "config", setting, self.workspace.git("config", setting))
        run_git(self.path, "add", "--all")
        run_git(self.path, "commit", "--quiet", "--message", "The best version")

    def __exit__(self, *_) -> None:
        self.remove()

    def remove(self) -> None:
        end_marked(self.path)
        remove(self.path)

    def ask(self, command: str, brief: str, timeout_s: float, tried: set[str]) -> Answer:
        """The agent's answer to a brief. tried: fingerprints of kernels that were judged already. EnvironmentLacks: there is no such
        command, for the next round neither."""
        code, log, wall_s = run(command, brief, self.path, timeout_s)
        if code in (126, 127) and NO_COMMAND.fullmatch(log.strip()):
            raise EnvironmentLacks(
                f"the agent's command cannot be run: {log.strip()}; go on with --resume and another --agent"
            )
        texts = {name: self._text(name) for name in MOST_BYTES}  # once: what is judged is what is taken
        outcome, message = self._judged(code, log, timeout_s, texts, tried)
        return Answer(outcome, message, texts["kernel.py"], texts[PLAN], wall_s)

    def _judged(self, code: int | None, log: str, timeout_s: float, texts: dict, tried: set[str]) -> tuple[str, str]:
        """(outcome, message); the first that holds."""
        if changed := self.touched():
            return "forbidden files", f"it touched {', '.join(changed[:5])}; only kernel.py and {PLAN} are its own"
        if code is None:
            return "timed out", f"no answer within {timeout_s:.0f} s"
        if code:
            return "failed", f"exit code {code}: {log.strip().splitlines()[-1] if log.strip() else 'it said nothing'}"
        for name, most in MOST_BYTES.items():
            if texts[name] is not None and len(texts[name].encode()) > most:
                return "too large", f"{name} is larger than {most >> 10} KB"
        kernel = texts["kernel.py"]
        if not kernel or not kernel.strip():
            return "no answer", "it left no kernel.py"
        own = fingerprint(kernel)
        if own == fingerprint(self.kernel.decode(errors="replace")):
            return "unchanged", "kernel.py is what it was, but for comments and layout"
        if own in tried:
            return "tried before", "this kernel was tried already, but for comments and layout"
        if not texts[PLAN]:
            return "no plan", f"it left no {PLAN}"
        return "answered", "a kernel and a plan"

    def touched(self) -> list[str]:
        """What differs from how the desk was laid, new files too; kernel.py and the plan are the agent's."""
        now = seen(self.path, IGNORED_NAMES)
        changed = {name for name in {*now, *self.before} if now.get(name) != self.before.get(name)}
        return sorted(changed - {"kernel.py", PLAN})

    def _text(self, name: str) -> str | None:
        """The file's text, up to a little more than it may have; None when it is no plain file."""
        try:
            handle = os.open(self.path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            return None
        with open(handle, "rb") as file:
            return file.read(MOST_BYTES[name] + 8).decode("utf-8", errors="replace")


IGNORED_NAMES = (".git", *(name.rstrip("/") for name in IGNORED))


def clear_desks(workspace: Workspace) -> None:
    """End and remove what a killed run left: agents, desks, locks of its git commands, files half written. The workspace is ours."""
    end_marked(workspace.root / ".loop" / "desks")
    remove(workspace.root / ".loop" / "desks")
    unlock_git(workspace.root)
    for pattern in HALF_WRITTEN:
        for half_written in workspace.root.glob(pattern):
            half_written.unlink()


def run(command: str, brief: str, folder: Path, timeout_s: float) -> tuple[int | None, str, float]:
    """(exit code or None after a time-out, end of what it said, seconds) of a shell command with the brief on stdin."""
    start = time.monotonic()
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env={**environment_without_git(), MARK: str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    log = Pump(process.stdout, Tail())
    feeder = Pump.feeding(process.stdin, brief.encode(errors="replace"))
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        kill_group(process)
        end_marked(folder)
    feeder.join(Pump.GRACE_S)
    log.finish()
    return code, log.reader.text(), time.monotonic() - start


def end_marked(folder: Path) -> None:
    """Kill all that was started at a desk in `folder`, also what left its session."""
    mark = os.fsencode(f"{MARK}={folder}")
    patience = time.monotonic() + ENDING_S
    while time.monotonic() < patience:
        found = [pid for pid in (int(path.name) for path in Path("/proc").glob("[0-9]*")) if is_marked(pid, mark)]
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return
        time.sleep(0.02)
    raise UsageError(
        f"processes that an agent started make new ones faster than they can be ended ({found[0]}, say); end them, then --resume"
    )


def is_marked(pid: int, mark: bytes) -> bool:
    """Has a living process the mark, of the folder itself or of one in it?"""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")  # empty of a zombie
    except OSError:
        return False
    return any(entry == mark or entry.startswith(mark + b"/") for entry in environment)


def fingerprint(kernel: str) -> str:
    """The same for two kernels that differ in comments, docstrings and layout alone; of text that Python cannot take apart, of the
    text."""
    try:
        words = "\n".join(code_alone(kernel))
    except (SyntaxError, ValueError, tokenize.TokenError):
        words = kernel.strip()
    return hashlib.sha256(words.encode(errors="replace")).hexdigest()


def code_alone(kernel: str) -> Iterator[str]:
    """The words of a Python text, without statements that are a string alone. By tokens: a tree of an agent's text may take
    gigabytes."""
    statement: list[tokenize.TokenInfo] = []
    for word in tokenize.generate_tokens(io.StringIO(kernel).readline):
        if word.type == tokenize.ERRORTOKEN and not word.string.isspace():
            raise SyntaxError("no Python")  # Python 3.11 goes on, for ever on a long line
        if word.type in (tokenize.INDENT, tokenize.DEDENT):
            yield tokenize.tok_name[word.type]
        elif word.type in (tokenize.NEWLINE, tokenize.ENDMARKER):
            if [part.type for part in statement] != [tokenize.STRING]:
                yield " ".join(part.string for part in statement)
            statement = []
        elif word.type not in (tokenize.COMMENT, tokenize.NL):
            statement.append(word)
