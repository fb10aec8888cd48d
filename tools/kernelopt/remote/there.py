"""The node's part: one command in a mirror of the client's files. connection.py makes an object of it on the node."""

import contextlib
import os
import platform
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path

from .. import bundle
from ..device.pipes import Pump
from ..session import trees
from ..session.trees import Changes, Tree
from . import child, mirrors

ENDING_S = 10  # seconds in which a command that is stopped must have ended
PIPE_S = 2.0  # seconds in which the last output must have come once the command has ended
OF_RAY = ("RAY_", "PYTHONBREAKPOINT", "OMP_NUM_THREADS", "KERNELOPT_ON")  # what Ray sets, and the way to a node


class Run:
    """Each method takes and returns plain values, because they travel.

    key: names the mirror. workspace: the client's path of it. client_bundle: the client's path of this bundle.
    """

    def __init__(self, key: str, workspace: str | None, client_bundle: str):
        self._mirror, self._lock = mirrors.take(key, workspace)
        spellings = {self._mirror.root: "", bundle.ROOT: client_bundle}
        self._spellings = [(os.fsencode(own), os.fsencode(theirs)) for own, theirs in spellings.items()]
        self._lines: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self._process: subprocess.Popen | None = None

    def about(self) -> str:
        """This machine, in words."""
        return f"{platform.node()}, Python {platform.python_version()}"

    def adopt(self, tree: Tree) -> list[str]:
        """Mirror.adopt."""
        return sorted(self._mirror.adopt(tree))

    def receive(self, contents: dict[str, bytes]) -> None:
        """Write contents, by their digests, to the mirror."""
        for digest, content in contents.items():
            self._mirror.receive(digest, content)

    def start(
        self, program: list[str], named: list[str], cwd: str | None, environment: dict[str, str], stdin: bytes | None
    ) -> None:
        """Start a Python program of the bundle: its path in it, or -m and a module, and its arguments.

        named: arguments that are paths of the client's. cwd: the client's path of it; None: anywhere.
        """
        first, *rest = program
        arguments = [in_mirror(argument, named, str(self._mirror.root)) for argument in rest]
        command = child.command([sys.executable, first if first == "-m" else str(bundle.ROOT / first), *arguments])
        folder = self._mirror.path(cwd) if cwd else self._mirror.root
        folder.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env=cleaned(dict(os.environ)) | environment | {bundle.MIRROR: str(self._mirror.root)},
            stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[self._lock.fileno()],  # the mirror is in use until the command has ended
        )
        streams = {"out": self._process.stdout, "err": self._process.stderr}
        self._readers = [threading.Thread(target=self._read, args=item, daemon=True) for item in streams.items()]
        for thread in self._readers:
            thread.start()
        if stdin is not None:
            Pump.feeding(self._process.stdin, stdin)

    def output(self, wait_s: float) -> tuple[list[tuple[str, bytes]], int | None]:
        """(the lines since the last call, each with "out" or "err"; the exit code once the command has ended).

        Waits up to `wait_s` for a line.
        """
        lines = []
        with contextlib.suppress(queue.Empty):
            lines.append(self._lines.get(timeout=wait_s))
        code = self._process.poll()
        if code is not None:
            for thread in self._readers:
                thread.join(PIPE_S)
        with contextlib.suppress(queue.Empty):
            while True:
                lines.append(self._lines.get_nowait())
        return lines, code

    def changes(self, names: list[str]) -> Changes:
        """Mirror.changes."""
        self._changed = self._mirror.changes(names)
        return self._changed

    def contents(self, digests: list[str], about_bytes: int) -> dict[str, bytes]:
        """The contents of changed files, by their digests: the first ones, about so many bytes."""
        wanted = {name: kind for name, kind in self._changed.items() if trees.digest_of(kind) in set(digests)}
        contents: dict[str, bytes] = {}
        for digest, content in self._mirror.contents(wanted):
            contents[digest] = content
            if sum(map(len, contents.values())) > about_bytes:
                break
        return contents

    def tell_to_end(self) -> None:
        """Send the command SIGTERM; it may print what it has before it ends."""
        self._process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """End the command, which removes its scratch files first, and leave the mirror to others."""
        if self._process and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(ENDING_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._lock.close()

    def _read(self, name: str, stream) -> None:
        with stream:
            for line in stream:
                for own, theirs in self._spellings:
                    line = line.replace(own, theirs)
                self._lines.put((name, line))


def in_mirror(argument: str, named: list[str], root: str) -> str:
    """An argument, with the path in it as it is in the mirror; `--option=PATH` too. Pure."""
    option, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    return f"{option}{equals}{root}{value}" if value in named else argument


def cleaned(environment: dict[str, str]) -> dict[str, str]:
    """The node's environment without what Ray put there, and with this bundle's tools for `-m`. Pure."""
    own = {name: value for name, value in environment.items() if not name.startswith(OF_RAY)}
    paths = [path for path in own.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path) != bundle.ROOT]
    return {**own, "PYTHONPATH": os.pathsep.join([str(bundle.ROOT / "tools"), *paths]), "PYTHONIOENCODING": "utf-8"}
