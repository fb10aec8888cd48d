"""The files of cases, which threads write while the next cases are made. Imported by worker processes only."""

import collections
import contextlib
import pickle
import re
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path

import torch

from . import contract, problem, tensor_files, tensor_trees
from .state import identical

WRITERS = 3  # writing does not hold Python's lock
AHEAD_BYTES = 2 << 30  # of tensors that wait in memory to be written, unless one case has more
# Of parameters that are stored once for several cases. They stay in memory meanwhile.
SHARED_BYTES, MOST_SHARED_BYTES = 1 << 20, 2 << 30


@dataclass(frozen=True)
class CaseFile:
    """path: of a case. state_path: of the file that holds its parameters, where that is another one. bytes: of the
    tensors that were written for it."""

    path: Path
    state_path: Path | None
    bytes: int


class StoredState:
    """Parameters that lie in a file of their own."""

    def __init__(self, state: dict[str, torch.Tensor], path: Path):
        self.path = path
        self._state, self._versions = dict(state), [tensor._version for tensor in state.values()]

    def equals(self, state: dict) -> bool:
        """Are these the same? Not where the tensors were changed since they were stored."""
        if self._state.keys() != state.keys() or self._versions != [one._version for one in self._state.values()]:
            return False
        return all(one is state[name] or identical(one, state[name]) for name, one in self._state.items())


class CaseFiles:
    """Numbered files in a folder. At the end of the block all are written. Large parameters lie in a file of their own,
    which all cases with the same ones name: most variants do. It holds no inputs: the size of both is that of the
    case, and a kernel that has its parameters in memory has no inputs of another case there."""

    def __init__(self, folder: Path):
        self._folder, self._count = folder, len(list(folder.iterdir()))
        self._pool = futures.ThreadPoolExecutor(WRITERS)
        self._writing: collections.deque[tuple[futures.Future, int]] = collections.deque()
        self._quick = contextlib.ExitStack()
        self._state: StoredState | None = None

    def __enter__(self) -> "CaseFiles":
        self._quick.enter_context(tensor_files.without_checksums())
        return self

    def __exit__(self, *_) -> None:
        with self._quick, self._pool:
            self.settle()

    def add(self, case: problem.Case) -> CaseFile:
        """Where a case is being written. Waits while too many others are being written, and raises what `settle`
        does."""
        self.settle(WRITERS - 1, AHEAD_BYTES - tensor_trees.stored_bytes(list(vars(case).values())))
        number, before = self._count, self._state
        self._count += 1
        self._state = self._stored(case.state, self._folder / f"state-{number}.pt")
        size = 0
        if self._state and self._state is not before:
            size = self._write(case.state, self._state.path)
        state_path = self._state and self._state.path
        path = self._folder / f"input-{number}.pt"
        size += self._write(case.to_file(state_path and state_path.name), path)
        return CaseFile(path, state_path, size)

    def _stored(self, state: dict, path: Path) -> StoredState | None:
        """The parameters of the last case, where these are the same, or new ones at `path`; None where they are to lie
        beside the inputs."""
        if self._state and self._state.equals(state):
            return self._state
        return StoredState(state, path) if is_shared(state) else None

    def _write(self, content: dict, path: Path) -> int:
        """Have it written; the bytes of its tensors. What comes from the GPU as it is written is written at once: later
        the reference may have changed its parameters, and the memory is needed for the next case."""
        if tensor_files.holds_large(content):
            write(content, path)
            return tensor_trees.stored_bytes(content)
        content = tensor_trees.on_cpu(content)
        size = tensor_trees.stored_bytes(content)
        self._writing.append((self._pool.submit(write, content, path), size))
        return size

    def settle(self, most: int = 0, most_bytes: int = 0) -> None:
        """Wait until at most so many files, of so many bytes, are being written. Raises OSError, or a ContractError for
        a value that no file holds."""
        while self._writing and (len(self._writing) > most or sum(size for _, size in self._writing) > most_bytes):
            self._writing.popleft()[0].result()


def is_shared(state: dict) -> bool:
    """Is it worth while to store it once?"""
    tensors = list(state.values())
    plain = all(isinstance(one, torch.Tensor) for one in tensors)
    return plain and SHARED_BYTES <= tensor_trees.stored_bytes(tensors) <= MOST_SHARED_BYTES


def write(content: dict, path: Path) -> None:
    """Write what problem.Case.to_file gives, or parameters. Raises a ContractError for a value that cannot be read
    again."""
    tensor_files.save(content, path)
    try:
        tensor_trees.unpacked(tensor_files.load(path))
    except pickle.UnpicklingError as error:
        kind = re.search(r"GLOBAL (\S+)", str(error))
        raise contract.unstorable(kind[1] if kind else "value") from None
