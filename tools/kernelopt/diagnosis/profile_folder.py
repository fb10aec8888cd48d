"""Profiles on disk: the folder `profiles/vN/MODE/`, reports that were made elsewhere, the profiles of earlier versions.

A folder holds report.ncu-rep (the profiler's own file), params.json (the run), metrics.json (the metrics of each kernel
of the marked call) and report.md (the diagnosis, by profile_pages.py).
"""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from .. import bundle
from ..errors import Refused, ToolError, UsageError
from ..profilers import ncu, ncu_csv, rocprof
from ..profilers.profile import Params, Profile
from ..session import platforms
from ..session.digests import digest
from ..session.record import ProfileEvidence, Record
from ..session.record_store import RecordStore
from ..session.task import Task
from ..session.version_names import version_number
from ..session.workspace import Workspace
from . import analysis, text

MODE = "annotation"


def read(path: Path, workspace: Workspace | None = None, task: Task | None = None) -> Profile:
    """The profile in a folder of ours or its metrics.json, in a .ncu-rep or CSV of Nsight Compute, or in the output of
    rocprofv3.

    workspace: None is the one that the folder W/profiles/vN/MODE lies in. task: its Task block; None reads it.
    UsageError: no such file, or several reports. Refused: the file holds no kernel.
    """
    if rocprof.is_output(path):
        return rocprof.read(path)
    if path.suffix == ".csv" and path.is_file():
        return Profile(ncu_csv.read(path))
    file = file_in(path) if path.is_dir() else path
    if not file.is_file():
        raise UsageError(f"{file} does not exist")
    return Profile(ncu.read(file)) if file.suffix == ".ncu-rep" else read_metrics(file, workspace, task)


def file_in(folder: Path) -> Path:
    """metrics.json of a folder, else its only report. UsageError when it holds neither, or several reports."""
    reports = sorted(folder.glob("*.ncu-rep"))
    if (folder / "metrics.json").is_file():
        return folder / "metrics.json"
    if not reports:
        raise UsageError(f"{folder} holds neither metrics.json nor a .ncu-rep; make one: profile_kernel.sh")
    if len(reports) > 1:
        raise UsageError(f"{folder} holds {len(reports)} reports; name one of them, for example {reports[0]}")
    return reports[0]


def read_metrics(file: Path, workspace: Workspace | None, task: Task | None) -> Profile:
    """The profile in metrics.json and in params.json beside it. Refused when they hold no profile."""
    beside = file.with_name("params.json")
    values, params = bundle.read_json(file), bundle.read_json(beside) if beside.is_file() else None
    if not isinstance(values, dict) or not values.get("kernels"):
        raise Refused(f"{file} holds no kernel; profile again: profile_kernel.sh")
    try:
        profile = Profile.from_json(values, params)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Refused(
            f"{file.parent} holds no profile ({type(error).__name__}: {error}); profile again: profile_kernel.sh"
        ) from None
    return with_session(profile, workspace, task, file.resolve().parent)


def with_session(profile: Profile, workspace: Workspace | None, task: Task | None, folder: Path) -> Profile:
    """The profile with the recorded latency and the page of its GPU, from its workspace; from the bundle's wiki where
    the folder lies in no workspace."""
    workspace = workspace or workspace_of(folder)
    recorded_us = analysis.recorded_us(workspace.memory, profile.params) if workspace else None
    product = None
    with contextlib.suppress(ToolError):
        product = platforms.page_of(profile.params.device, workspace, task) if profile.params else None
    return replace(profile, recorded_us=recorded_us, product=product)


def workspace_of(path: Path) -> Workspace | None:
    """The workspace that the folder W/profiles/vN/MODE lies in; None where it lies in none."""
    try:
        return Workspace(path.resolve().joinpath("..", "..", ".."))
    except ToolError:
        return None


def is_of(workspace: Workspace, params: Params) -> bool:
    """Is the profiled kernel the workspace's kernel of that version: the recorded one, else kernel.py?"""
    records = RecordStore(workspace)
    if params.version in records.versions():
        return records.read(params.version).kernel_sha256 == params.kernel_sha256
    return workspace.kernel.is_file() and digest(workspace.kernel) == params.kernel_sha256


def earlier(workspace: Workspace, params: Params) -> list[Profile]:
    """The profiles of earlier versions of the same workload with the same cache setting, oldest first. Masked versions
    are left out."""
    masked = RecordStore(workspace).masked_versions()
    profiles = []
    for number in range(version_number(params.version)):
        folder = workspace.profile(f"v{number}", MODE)
        if f"v{number}" not in masked and (folder / "metrics.json").is_file():
            profile = read(folder, workspace)
            if profile.params and (profile.params.workload, profile.params.cache) == (params.workload, params.cache):
                profiles.append(profile)
    return profiles


def parent(workspace: Workspace, profiles: Sequence[Profile]) -> Profile | None:
    """Of earlier profiles, that of the version which this one was made from: the last accepted one.

    A rejected version was put back. A comparison with it would credit this change with undoing that one.
    """
    accepted = {record.version for record in RecordStore(workspace).records(masked=True) if record.git_commit_hash}
    made_from = [profile for profile in profiles if profile.params.version in accepted]
    return (made_from or profiles or [None])[-1]


def evidence_for_round(workspace: Workspace, task: Task, version: str, best: Record | None) -> ProfileEvidence | None:
    """profile_evidence for the record of `version`: the diagnosis of the best version, from which the round starts,
    whether or not its plan uses it (the plan's own evidence stays in the plan).

    None when that version has no profile of the default workload, or the profile is of another kernel.
    """
    if best is None or best.version == version:
        return None
    folder = workspace.profile(best.version, MODE)
    if not (folder / "metrics.json").is_file():
        return None
    profile = read(folder, workspace, task)
    params = profile.params
    if not params or params.kernel_sha256 != best.kernel_sha256 or params.workload != "default":
        return None
    diagnosis = analysis.diagnose(profile)
    top = next(iter(diagnosis.findings), None)
    return ProfileEvidence(
        tool_used="ncu",
        evidence_summary="; ".join(diagnosis.classification.reasons),
        evidence_chain=f"{text.evidence(top)} -> {top.inference} -> {top.actions[0]}" if top else None,
        bottleneck_type=diagnosis.classification.bottleneck,
    )
