"""Profile one version of a workspace's kernel and write its pages: what profile_kernel.sh and the unattended loop
do."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..device.sandbox import Sandbox
from ..errors import UsageError
from ..measure import timing
from ..profilers import collect
from ..profilers.profile import Profile
from ..session import platforms, version_kernels
from ..session.digests import digest
from ..session.record_store import RecordStore
from ..session.workspace import Workspace
from . import profile_folder, profile_pages

OWN_FILES = (
    "report.ncu-rep",
    "report.nsys-rep",
    "trace.json",
    "timeline.json",
    "metrics.json",
    "params.json",
    "hotspots.json",
    "report.md",
    "report-verbose.md",
)
OWN_FOLDERS = ("sass", "source", "compiled")


@dataclass(frozen=True)
class Request:
    """The version to profile, and how. timeout_s: of each process. folder: None is W/profiles/vN/MODE."""

    workspace: Workspace
    version: str
    mode: str = profile_folder.MODE
    workload: str = "default"
    cache: str = "cold"
    timeout_s: float = 600
    folder: Path | None = None

    @property
    def destination(self) -> Path:
        return self.folder or self.workspace.profile(self.version, self.mode)


def run(request: Request, say: Callable[[str], None]) -> tuple[profile_pages.Written, str | None]:
    """Take the profile and write its folder: (the result on its pages, why metrics are missing).

    EnvironmentLacks without a GPU, UsageError for a version that has no kernel.
    """
    with Sandbox("cuda", request.workspace.cache) as sandbox:
        profile, lack = take(request, sandbox, say)
    return profile_pages.write(request.destination, request.mode, profile, request.workspace), lack


def take(request: Request, sandbox: Sandbox, say: Callable[[str], None]) -> tuple[Profile, str | None]:
    """(profile, why metrics are missing); the profiler's own reports lie in the folder."""
    workspace, folder = request.workspace, request.destination
    task = workspace.task()
    kernel = kernel_of(workspace, request.version, sandbox.scratch)
    cases = timing.inputs(sandbox, workspace.reference, task.dtype, [request.workload], request.timeout_s, count=1)
    clear(folder, with_folders=request.folder is None)
    say(f"profiling {request.version} on {sandbox.device_name}, mode {request.mode}, workload {request.workload}")
    case = cases[request.workload][0]
    call = collect.Call(
        kernel,
        request.version,
        request.workload,
        case.path,
        case.shapes,
        case.dtype,
        request.cache,
        request.timeout_s,
        platforms.page_of(sandbox.device_name, workspace, task),
    )
    work = task.work_of(request.workload)
    return collect.take(request.mode, sandbox, call, folder, work and work.to_json())


def clear(folder: Path, with_folders: bool) -> None:
    """Remove an earlier profile, so that no old finding stands beside a new report.

    with_folders: also its folders. Only in a folder of the workspace; elsewhere they may belong to somebody else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in OWN_FILES:
        (folder / name).unlink(missing_ok=True)
    for name in OWN_FOLDERS if with_folders else ():
        shutil.rmtree(folder / name, ignore_errors=True)


def kernel_of(workspace: Workspace, version: str, scratch: Path) -> Path:
    """The kernel of a version: kernel.py for the one being worked on, else from the history or rejected/."""
    records = RecordStore(workspace)
    if version not in records.versions():
        if version != records.next_version():
            raise UsageError(f"{version} is not recorded; kernel.py is {records.next_version()}")
        return workspace.kernel
    record = records.read(version)
    if record.kernel_sha256 in (None, digest(workspace.kernel)):
        return workspace.kernel
    path = scratch / f"{version}_kernel.py"
    path.write_bytes(version_kernels.kernel_of(workspace, record))
    return path
