"""The kernels of recorded versions."""

import contextlib
import itertools
from collections.abc import Iterator

from ..errors import ToolError, UsageError
from .digests import content_digest
from .record import Record
from .workspace import Workspace

FOLDERS = ("versions", "rejected")  # folders with kernels of other versions


def kernel_digest(workspace: Workspace, revision: str) -> str:
    """Return the SHA-256 of kernel.py in a revision."""
    return content_digest(workspace.file_at(revision, "kernel.py"))


def kernel_of(workspace: Workspace, record: Record) -> bytes:
    """Return the judged kernel.py of a version, verified by its SHA-256. The places are the history, versions/ (for
    archives), rejected/, and the workspace itself. Raise UsageError if no place has it."""
    for content in _candidates(workspace, record):
        if content_digest(content) == record.kernel_sha256:
            return content
    raise UsageError(f"the kernel of {record.version} is lost: neither the git history nor rejected/ has it")


def _candidates(workspace: Workspace, record: Record) -> Iterator[bytes]:
    if commit := record.git_commit_hash:
        with contextlib.suppress(ToolError):  # the workspace may be a copy without its history
            yield workspace.file_at(commit, "kernel.py")
    copies = [sorted((workspace.root / name).glob(f"{record.version}_kernel*.py")) for name in FOLDERS]
    for path in (*itertools.chain(*copies), workspace.kernel):
        if path.is_file():
            yield path.read_bytes()
