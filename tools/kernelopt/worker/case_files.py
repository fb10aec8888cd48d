"""The files of cases, which threads write while the next cases are made. Imported by worker processes only."""

import collections
import contextlib
import pickle
import re
from concurrent import futures
from pathlib import Path

from . import contract, problem, tensor_trees

WRITERS = 3  # writing does not hold Python's lock
AHEAD_BYTES = 2 << 30  # of tensors that wait in memory to be written, unless one case has more


class CaseFiles:
    """Numbered files in a folder. At the end of the block all are written."""

    def __init__(self, folder: Path):
        self._folder, self._count = folder, len(list(folder.iterdir()))
        self._pool = futures.ThreadPoolExecutor(WRITERS)
        self._writing: collections.deque[tuple[futures.Future, int]] = collections.deque()
        self._quick = contextlib.ExitStack()

    def __enter__(self) -> "CaseFiles":
        self._quick.enter_context(tensor_trees.without_checksums())
        return self

    def __exit__(self, *_) -> None:
        with self._quick, self._pool:
            self.settle()

    def add(self, case: problem.Case) -> tuple[Path, int]:
        """The path at which a case is being written, and the bytes of its tensors there. Waits while too many others
        are being written, and raises what `settle` does."""
        self.settle(WRITERS - 1, AHEAD_BYTES - tensor_trees.stored_bytes(list(vars(case).values())))
        path = self._folder / f"input-{self._count}.pt"
        self._count += 1
        content = case.to_file()
        size = tensor_trees.stored_bytes(content)
        self._writing.append((self._pool.submit(write, content, path), size))
        return path, size

    def settle(self, most: int = 0, most_bytes: int = 0) -> None:
        """Wait until at most so many files, of so many bytes, are being written. Raises OSError, or a ContractError for
        a value that no file holds."""
        while self._writing and (len(self._writing) > most or sum(size for _, size in self._writing) > most_bytes):
            self._writing.popleft()[0].result()


def write(content: dict, path: Path) -> None:
    """Write what problem.Case.to_file gives. Raises a ContractError for a value that cannot be read again."""
    tensor_trees.save(content, path)
    try:
        problem.Case.load(path)
    except pickle.UnpicklingError as error:
        kind = re.search(r"GLOBAL (\S+)", str(error))
        raise contract.unstorable(kind[1] if kind else "value") from None
