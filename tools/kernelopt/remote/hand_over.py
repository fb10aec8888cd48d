"""The client's part: hand a command over to a node, bring home what it changed, return its result."""

import contextlib
import hashlib
import os
import platform
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .. import bundle, environment
from ..device.stop_signal import Stop
from ..errors import EnvironmentLacks, UsageError
from ..session import delivery, trees
from ..session.digests import content_digest
from ..session.trees import Changes, Tree
from ..session.workspace import Workspace
from . import parcels
from .connection import AGAIN, Node, connected

BATCH_BYTES = 8 << 20  # of contents in a message
MOST_BYTES = 4 << 30  # of all files of a command
WAIT_S = 0.5  # for a line, at a time
FORWARDED = ("TRITON_INTERPRET", "KERNELOPT_DEBUG", "GPU_WIKI")  # environment variables that the tools read
Print = Callable[[str], None]


@dataclass(frozen=True)
class Call:
    """A Python program of the bundle. named: the absolute paths that its arguments name; workspace: one of them.

    program: its path below the client's bundle, or -m and a module, and its arguments, which name absolute paths as
    they are in `named`. stdin: None for none.
    """

    program: list[str]
    named: tuple[str, ...] = ()
    workspace: str | None = None
    cwd: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    stdin: bytes | None = None


@dataclass(frozen=True)
class Done:
    """How it ended there. err: the last line of its messages."""

    code: int
    out: str
    err: str


def hand_over(args: Namespace, address: str, lock: bool, show: Print, stop: Stop) -> tuple[int, str]:
    """Run this process's command line on the node at `address`: (its exit code, its output).

    args: the parsed command line. lock: whether the workspace is locked meanwhile. show: gets each message as it comes.
    stop: passed on to the command. What the command changed is brought home first.
    """
    folder = getattr(args, "workspace", None)
    workspace = Workspace(folder) if folder else None
    call = call_of(args, sys.argv, workspace)
    with workspace.locked() if workspace and lock else contextlib.nullcontext(), connected(address) as node:
        done = run(node, call, show, stop)
    return done.code, done.out


def call_of(args: Namespace, argv: list[str], workspace: Workspace | None) -> Call:
    """The call in a parsed command line."""
    named = [absolute(value) for value in flat(vars(args).values()) if is_path(value)]
    environment = {name: os.environ[name] for name in FORWARDED if os.environ.get(name)}
    if "GPU_WIKI" in environment:
        named.append(absolute(environment["GPU_WIKI"]))
    if workspace:
        named.append(str(workspace.root))
        with contextlib.suppress(UsageError):  # the tool tells about a Task block that cannot be read
            if wiki := workspace.task().gpu_wiki_path:
                named.append(absolute(wiki))
    tool = Path(argv[0]).resolve().relative_to(bundle.ROOT)
    arguments = [normalised(argument, named) for argument in without_address(argv[1:])]
    root = str(workspace.root) if workspace else None
    return Call([str(tool), *arguments], tuple(dict.fromkeys(named)), root, str(Path.cwd()), environment)


def absolute(path: Path | str) -> str:
    """The path without "..", not resolved: messages name it as the user did."""
    return os.path.normpath(Path.cwd() / path)


def flat(values: Iterable) -> Iterator:
    """The values, and those in lists among them."""
    for value in values:
        yield from value if isinstance(value, list) else [value]


def is_path(value) -> bool:
    """Whether an argument is a path, or a word that is also the name of a file."""
    if isinstance(value, str):
        with contextlib.suppress(OSError, ValueError):
            return Path(value).is_file()
    return isinstance(value, Path)


def without_address(arguments: list[str]) -> list[str]:
    """A command line without --on. Pure."""
    left, skip = [], False
    for argument in arguments:
        if not skip and argument != "--on" and not argument.startswith("--on="):
            left.append(argument)
        skip = argument == "--on"
    return left


def normalised(argument: str, named: Iterable[str]) -> str:
    """An argument, with the absolute path in it as it is in `named`: the node looks it up there. Pure."""
    option, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    path = os.path.normpath(value)
    return f"{option}{equals}{path}" if value.startswith("/") and path in named else argument


def run(node: Node, call: Call, show: Print, stop: Stop | None = None) -> Done:
    """Run the call on a node and bring home what it changed. stop: once it was signalled, the command is told to end.

    EnvironmentLacks when the node or the connection fails, or when a file was changed on both sides; then nothing is
    changed here. Any exception ends the work on the node.
    """
    tree = trees.scan(call.named, call.workspace, most_bytes=MOST_BYTES)
    with node.run(key_of(call), call.workspace, str(bundle.ROOT)) as there:
        send(there, tree)
        there("start", call.program, list(call.named), call.cwd, call.environment, call.stdin)
        done = followed(there, show, stop or Stop())
        if done.code < 0:  # of a process that was killed, nothing is whole
            return Done(128 - done.code, done.out, done.err)
        bring_home(there, call, tree, there("changes", [os.path.realpath(name) for name in call.named]))
    return done


def key_of(call: Call) -> str:
    """The name of the mirror on the node: commands on one workspace share one, and its compiled kernels."""
    place = f"{platform.node()}\0{os.getuid()}\0{call.workspace or ''}"
    return hashlib.sha256(os.fsencode(place)).hexdigest()[:16]


def send(there: Callable, tree: Tree) -> None:
    """Make the mirror like the tree; only contents that it lacks are sent."""
    names = {trees.digest_of(kind): name for name, kind in tree.items()}
    batch: dict[str, bytes] = {}
    for digest in there("adopt", tree):
        content = Path(names[digest]).read_bytes()
        if content_digest(content) != digest:
            raise EnvironmentLacks(f"{names[digest]} was changed while it was sent; {AGAIN}")
        batch[digest] = content
        if sum(map(len, batch.values())) > BATCH_BYTES:
            there("receive", batch)
            batch = {}
    there("receive", batch)


def followed(there: Callable, show: Print, stop: Stop) -> Done:
    """Show the messages of the command until it has ended."""
    stop.interrupts = False
    out, err, code, is_told = [], "", None, False
    while code is None:
        if stop.after_s is not None and not is_told:
            there("tell_to_end")
            is_told = True
        lines, code = there("output", WAIT_S)
        for stream, line in lines:
            text = line.decode("utf-8", "surrogateescape")
            if stream == "out":
                out.append(text)
            else:
                err = text.strip() or err  # the last one says why a command failed
                show(text.rstrip("\n"))
    return Done(code, "".join(out), err)


def fetched(there: Callable, changed: Changes) -> Iterator[tuple[str, bytes]]:
    """(digest, content) of the changed files."""
    left = trees.digests(changed.values())
    while left:
        contents = there("contents", sorted(left), BATCH_BYTES)
        if not contents:
            raise EnvironmentLacks(f"{len(left)} changed files are gone on the node; {AGAIN}")
        yield from contents.items()
        left -= contents.keys()


def bring_home(there: Callable, call: Call, tree: Tree, changed: Changes) -> None:
    """Apply the changes here: those of the workspace in one step, then files that the command line names."""
    own = {name: kind for name, kind in changed.items() if call.workspace and trees.is_below(name, call.workspace)}
    if own:
        now = trees.scan([call.workspace], call.workspace)
        if clashing := delivery.conflicts(call.workspace, tree, now, own):
            raise EnvironmentLacks(kept(there, call, tree, own, clashing))
        delivery.deliver(Path(call.workspace), own, fetched(there, own))
    others = {name: kind for name, kind in changed.items() if name not in own}
    contents = dict(fetched(there, others))
    for name, kind in others.items():
        if digest := trees.digest_of(kind):
            bundle.write_bytes(Path(name), contents[digest])
        elif kind == trees.FOLDER:
            Path(name).mkdir(exist_ok=True)
        elif kind is None:
            delivery.remove_entry(Path(name))


def kept(there: Callable, call: Call, tree: Tree, changed: Changes, clashing: list[str]) -> str:
    """Keep a result that cannot be brought home in a parcel; a sentence on it."""
    path = Path(call.workspace) / ".git" / f"{trees.OWN_IN_GIT}kept-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz"
    before = {name: tree[name] for name in changed if name in tree}
    parcel = parcels.Parcel("result", environment.version(), call.workspace, before, changed, alone=True)
    parcels.write(path, parcel, fetched(there, changed))
    names = ", ".join(name.removeprefix(f"{call.workspace}/") for name in clashing[:5])
    return (
        f"changed here and on the node: {names}; nothing was overwritten. Put these files back as they were, then: "
        f"carry.py unpack {path} {call.workspace}"
    )
