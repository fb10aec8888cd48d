"""The git side of a round: the commit of an accepted kernel, the refused kernel, the best version put back."""

import re
import textwrap

from .. import bundle
from ..errors import UsageError
from ..session import version_kernels
from ..session.record import Record
from ..session.record_store import RecordStore
from ..session.workspace import Workspace

KERNEL_TRAILER = "Kernel-SHA256: "  # in the message of each commit of the gate
SUBJECT = 100  # characters of the action in the first line of a commit message


def committed(workspace: Workspace, message: str, kernel_sha256: str) -> str:
    """The commit of the kernel that was judged; UsageError when git stored another text (a filter, a line-end
    setting)."""
    commit = workspace.commit(message)
    if version_kernels.kernel_digest(workspace, commit) != kernel_sha256:
        workspace.git("update-ref", "HEAD", "HEAD^")
        raise UsageError(
            "git stored a kernel.py that differs from the judged one; look for a filter: "
            f"git -C {workspace.root} check-attr -a kernel.py"
        )
    return commit


def forget_unrecorded_commit(workspace: Workspace, records: RecordStore) -> None:
    """Undo the commit of a verdict that was not recorded: the gate was killed in between, and will judge again. The
    gate's commits name a version and a kernel; other commits stay."""
    own_message = re.match(
        rf"V(\d+): .*^{KERNEL_TRAILER}(\w+)$", workspace.git("log", "-1", "--format=%B"), re.DOTALL | re.MULTILINE
    )
    version = own_message and f"v{own_message[1]}"
    if version not in records.versions() or records.read(version).is_judged:
        return
    if version_kernels.kernel_digest(workspace, "HEAD") == own_message[2]:
        workspace.git("update-ref", "HEAD", "HEAD^")


def commit_message(record: Record) -> str:
    """ "V1: 143.20 us, 1.986x as fast as v0 | one pass instead of three"; below it the whole action where that is
    longer, and the bottleneck in the profile of the version that this one was compared with."""
    compared, action = record.comparison, record.action or "baseline kernel"
    short = textwrap.shorten(action, SUBJECT, placeholder=" …")
    bottleneck = record.profile_evidence.bottleneck_type
    gain = f", {record.gained}" if compared else ""
    paragraphs = [f"{record.version.upper()}: {record.latency_us:.2f} us{gain} | {short}"]
    if short != action:
        paragraphs.append(textwrap.fill(action, 100, break_long_words=False, break_on_hyphens=False))
    if compared and bottleneck:
        paragraphs.append(f"Bottleneck in the profile of {compared.against}, which it started from: {bottleneck}.")
    paragraphs.append(f"{KERNEL_TRAILER}{record.kernel_sha256}")
    return "\n\n".join(paragraphs)


def set_aside(workspace: Workspace, version: str, best: Record | None) -> None:
    """Keep the refused kernel under rejected/ and put the last accepted kernel.py back."""
    folder = workspace.root / "rejected"
    folder.mkdir(exist_ok=True)
    kernel = workspace.kernel.read_bytes()
    refused = [path.read_bytes() for path in folder.glob(f"{version}_kernel*.py")]  # v0 may be refused more than once
    if kernel not in refused:  # it is there already when a gate was killed before its record
        name = f"{version}_kernel_{len(refused) + 1}.py" if refused else f"{version}_kernel.py"
        bundle.write_bytes(folder / name, kernel)
    put_best_back(workspace, best)


def put_best_back(workspace: Workspace, best: Record | None) -> None:
    """Write the best version to kernel.py, if there is one."""
    if best:
        bundle.write_bytes(workspace.kernel, workspace.file_at(best.git_commit_hash, "kernel.py"))
