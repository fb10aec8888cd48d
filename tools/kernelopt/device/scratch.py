"""Scratch folders: made with a mark that their owner lives, removed at its end or, where it was killed, by another."""

import contextlib
import fcntl
import functools
import os
import shutil
import stat
import tempfile
from concurrent import futures
from pathlib import Path
from typing import IO

from ..errors import UsageError
from .landlock import SHARED_MEMORY

REMOVERS, LARGE_BYTES = 8, 64 << 20  # files of that size at a time


def refuse_shared_memory(home: Path) -> None:
    """UsageError where the judge's files would lie in /dev/shm: kernels may write there."""
    if home.resolve().is_relative_to(SHARED_MEMORY):
        raise UsageError(
            f"{home} is in {SHARED_MEMORY}, where kernels may write: they could change what judges them. Set TMPDIR to "
            "another folder, or make the workspace elsewhere"
        )


def new_scratch(home: Path) -> tuple[Path, IO]:
    """A new folder in `home`, and a locked file in it, which shows other processes that this one lives. The file is
    locked before the folder gets the name that `remove_abandoned` of another process looks for."""
    unnamed = Path(tempfile.mkdtemp(prefix=".new-", dir=home))
    alive = open(unnamed / "alive", "w")  # noqa: SIM115 (held as long as the sandbox lives)
    fcntl.flock(alive, fcntl.LOCK_EX)
    scratch = home / f"kernelopt-{unnamed.name.removeprefix('.new-')}"
    return unnamed.rename(scratch), alive


def remove_abandoned(home: Path) -> None:
    """Remove scratch folders of processes that were killed before they could do it."""
    for mark in home.glob("kernelopt-*/alive"):
        with contextlib.suppress(OSError), open(mark) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a living owner holds it
            remove_tree(mark.parent)


def remove_tree(folder: Path | str) -> None:
    """Remove a folder as far as that is possible. Its large files go several at a time: one after the other, the memory
    that held 45 GB of tensors was free after 10 s."""
    with contextlib.suppress(OSError, RuntimeError), futures.ThreadPoolExecutor(REMOVERS) as pool:  # or no more threads
        for _, _, names, place in os.fwalk(folder):  # by descriptors: no other folder can stand in for one
            large = [name for name in names if is_large(place, name)]
            list(pool.map(functools.partial(os.unlink, dir_fd=place), large))
    shutil.rmtree(folder, ignore_errors=True)


def is_large(place: int, name: str) -> bool:
    """Is it a large file? place: the descriptor of its folder."""
    found = os.stat(name, dir_fd=place, follow_symlinks=False)
    return stat.S_ISREG(found.st_mode) and found.st_size >= LARGE_BYTES
