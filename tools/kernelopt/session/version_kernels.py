"""A round of the loop: judge the candidate of a workspace, then accept it or put the best version back."""

import contextlib
import hashlib
import itertools
from collections.abc import Iterator

from ..errors import ToolError, UsageError
from .record import Record
from .workspace import Workspace

KEPT = ("versions", "rejected")  # folders with kernels of other versions


def kernel_digest(workspace: Workspace, revision: str) -> str:
    """SHA-256 of kernel.py in a revision."""
    return hashlib.sha256(workspace.file_at(revision, "kernel.py")).hexdigest()


def kernel_of(workspace: Workspace, record: Record) -> bytes:
    """kernel.py of a version, byte for byte what was judged (its SHA-256 says so): from the history, from versions/
    (an archive has that in its place), from rejected/, or as it lies in the workspace. UsageError when none of them
    is it."""
    for content in _candidates(workspace, record):
        if hashlib.sha256(content).hexdigest() == record.kernel_sha256:
            return content
    raise UsageError(f"the kernel of {record.version} is nowhere to be found: not in the history, not in rejected/")


def _candidates(workspace: Workspace, record: Record) -> Iterator[bytes]:
    if commit := record.git_commit_hash:
        with contextlib.suppress(ToolError):  # a workspace that was copied without its history
            yield workspace.file_at(commit, "kernel.py")
    copies = [sorted((workspace.root / name).glob(f"{record.version}_kernel*.py")) for name in KEPT]
    for path in (*itertools.chain(*copies), workspace.kernel):
        if path.is_file():
            yield path.read_bytes()
