"""Processes that a candidate started. Their work on the GPU is in no trace of this process, nor in its times."""

import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from ..device import processes
from .faults import CheatError

GPU_FILE = re.compile(r"/dev/nvidia(-uvm|\d+)$")


def refuse_gpu_work(besides: Collection[int] = ()) -> None:
    """CheatError when a process that this one started has the GPU open, unless it is one of `besides` or was started by
    one of them: torch.compile's pool starts its workers when they are needed."""
    if any(opens(process, GPU_FILE) for process in running(besides)):
        raise CheatError("a process that the kernel started uses the GPU; all work must be done in its own process")


def running(besides: Collection[int] = ()) -> set[int]:
    """The processes that this one started, and those that they started; without `besides` and what these started."""
    if not processes.has_children():  # to look through all processes takes a while
        return set()
    return set(descendants(os.getpid(), besides))


def descendants(process: int, besides: Collection[int] = ()) -> Iterator[int]:
    """The processes that a process started, and those that they started. One that outlived its parent is not seen.
    besides: these are left out, with those that they started."""
    of_parent: dict[int, list[int]] = {}
    for child, parent in processes.parents().items():
        of_parent.setdefault(parent, []).append(child)
    waiting = [process]
    while waiting:
        started = [child for child in of_parent.get(waiting.pop(), []) if child not in besides]
        waiting += started
        yield from started


def opens(process: int, pattern: re.Pattern) -> bool:
    """Has the process a file open whose path matches?"""
    try:
        return any(pattern.search(str(link.readlink())) for link in Path(f"/proc/{process}/fd").iterdir())
    except OSError:  # it has ended, or is not ours
        return False
