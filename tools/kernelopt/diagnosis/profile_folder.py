"""A profile folder, `profiles/vN/MODE/`: how it is read back, analysed, and told in a line.

report.ncu-rep: the profiler's own file. params.json: what was profiled, on what, how. metrics.json: the counters of every
kernel of the marked call. report.md: the diagnosis and the table against the version before (profile_pages.py).
"""

import contextlib
from pathlib import Path

from .. import bundle
from ..errors import Refused, ToolError, UsageError
from ..hardware import wiki
from ..profilers import ncu
from ..session import platforms
from ..session.record import ProfileEvidence, Record
from ..session.record_store import RecordStore
from ..session.task import Task
from ..session.workspace import Workspace, digest, version_number
from . import analysis, classify

MODE = "annotation"


def load(path: Path, workspace: Workspace | None = None, task: Task | None = None) -> dict:
    """A profile {kernels, work, params, recorded_us, product} from a profile folder, its metrics.json or a bare .ncu-rep
    (params None).

    recorded_us: the latency that the workspace recorded of that kernel; None where it has none. product: the page of its GPU.
    workspace: None for the one that the folder W/profiles/vN/MODE lies in, if it does. task: its Task block; None reads it."""
    if path.is_dir():
        reports = sorted(path.glob("*.ncu-rep"))
        if (path / "metrics.json").is_file():
            path = path / "metrics.json"
        elif len(reports) == 1:
            path = reports[0]
        elif reports:
            raise UsageError(f"{path} holds {len(reports)} reports; name one of them, for example {reports[0]}")
        else:
            raise UsageError(f"{path} holds neither metrics.json nor a .ncu-rep; make one: profile_kernel.sh")
    if not path.is_file():
        raise UsageError(f"{path} does not exist")
    if path.suffix == ".ncu-rep":
        return {"kernels": ncu.read(path), "work": None, "params": None, "recorded_us": None, "product": None}
    found = bundle.read_json(path)
    if not isinstance(found, dict) or not found.get("kernels"):
        raise Refused(f"{path} holds no kernel")
    beside = path.with_name("params.json")
    params = bundle.read_json(beside) if beside.is_file() else None
    return {**found, "params": params, **known_of(workspace, task, path.resolve().parent, params)}


def known_of(workspace: Workspace | None, task: Task | None, folder: Path, params: dict | None) -> dict:
    """{recorded_us, product} of a profile in `folder`, by its workspace, or the bundle's wiki for one that was copied out of it."""
    recorded_us = None
    try:
        workspace = workspace or Workspace(folder.joinpath("..", "..", ".."))
        recorded_us = analysis.recorded_us(workspace.memory, params)
    except ToolError:
        workspace = None
    product = None
    with contextlib.suppress(ToolError):
        product = page_of(params["device"], workspace, task) if params else None
    return {"recorded_us": recorded_us, "product": product}


def page_of(device: str, workspace: Workspace | None, task: Task | None) -> wiki.Page:
    """The page of a device as the workspace knows it, or the bundle's wiki where there is no workspace; Refused when there is
    none."""
    return platforms.of_device(device, workspace, task or workspace.task()) if workspace else wiki.product(device)


def is_of(workspace: Workspace, params: dict) -> bool:
    """Is the profiled kernel what the workspace has for that version: as recorded, or else as it lies there?"""
    records = RecordStore(workspace)
    if params["version"] in records.versions():
        return records.read(params["version"]).kernel_sha256 == params["kernel_sha256"]
    return workspace.kernel.is_file() and digest(workspace.kernel) == params["kernel_sha256"]


def origin(params: dict | None) -> str:
    """Where and when a profile was recorded, for every output that shows it."""
    if params is None:
        return "recorded elsewhere, no params.json beside it"
    return f"recorded on {params['device']}, {params['timestamp']}, kernel {params['version']} ({params['kernel_sha256'][:10]})"


def earlier(workspace: Workspace, params: dict) -> list[dict]:
    """The profiles of earlier versions that were taken of the same workload with the same cache setting, oldest first; none of a
    masked version."""
    masked = RecordStore(workspace).masked_versions()
    found = []
    for number in range(version_number(params["version"])):
        folder = workspace.profile(f"v{number}", MODE)
        if f"v{number}" not in masked and (folder / "metrics.json").is_file():
            profile = load(folder, workspace)
            if profile["params"] and all(profile["params"][key] == params[key] for key in ("workload", "cache")):
                found.append(profile)
    return found


def parent(workspace: Workspace, profiles: list[dict]) -> dict | None:
    """Of earlier profiles, that of the version which this one was made from: the last accepted one. A refused version was
    put back, so a comparison with it would credit this change with undoing that one."""
    accepted = {record.version for record in RecordStore(workspace).records(masked=True) if record.git_commit_hash}
    made_from = [profile for profile in profiles if profile["params"]["version"] in accepted]
    return (made_from or profiles or [None])[-1]


def main_metrics(profile: dict) -> dict:
    """The counters of the longest kernel."""
    return classify.longest(profile["kernels"])["metrics"]


def evidence_for_round(workspace: Workspace, task: Task, version: str, best: Record | None) -> ProfileEvidence | None:
    """The profile evidence for the record of `version`: the diagnosis of the best version, which the round starts from, whether or
    not its plan uses it (the plan's own evidence stays in the plan).

    None when that version has no profile of the default workload, or the profile is of another kernel.
    """
    if best is None or best.version == version:
        return None
    folder = workspace.profile(best.version, MODE)
    if not (folder / "metrics.json").is_file():
        return None
    profile = load(folder, workspace, task)
    of = profile["params"]
    if not of or of["kernel_sha256"] != best.kernel_sha256 or of["workload"] != "default":
        return None
    found = analysis.analysed(profile, [])
    top = found["findings"][0] if found["findings"] else None
    return ProfileEvidence(
        tool_used="ncu",
        evidence_summary="; ".join(found["classification"]["reasons"]),
        evidence_chain=f"{evidence_text(top)} -> {top['inference']} -> {top['actions'][0]}" if top else None,
        bottleneck_type=found["classification"]["class"],
    )


def evidence_text(finding: dict) -> str:
    return ", ".join(f"{e['metric']} = {number(e['value'])} {e['unit']}" for e in finding["evidence"])


def number(value: float | None) -> str:
    """A counter for people: None is said, large figures get no decimals."""
    if value is None:
        return "not collected"
    return f"{value:,.0f}" if abs(value) >= 999.5 or value == int(value) else f"{value:.3g}"


def counter(found: dict, key: str, value: float | None, written=number) -> str:
    """A counter's value as `written` gives it; of one that no GPU of this architecture has, that is said."""
    return (
        f"not on {found['architecture']}" if value is None and key in found["not_on_architecture"] else written(value)
    )


def summary_line(found: dict) -> str:
    """ "memory (dram): memory throughput 91 %; …, of kernel `x`" """
    return f"{bottleneck_line(found)}, of kernel `{found['classification']['of']}`"


def bottleneck_line(found: dict) -> str:
    """ "memory (dram): memory throughput 91 %; …" """
    c = found["classification"]
    limiter = f" ({c['limiter']})" if c["limiter"] else ""
    return f"{c['class']}{limiter}: {'; '.join(c['reasons'])}"


def finding_lines(finding: dict) -> list[str]:
    gain = (
        "unknown" if finding["estimated_gain_pct"] is None else f"at most {finding['estimated_gain_pct']} % of the time"
    )
    return [
        f"- **{finding['id']}** ({finding['severity']}, gain {gain}): {evidence_text(finding)}",
        f"  - inference: {finding['inference']}",
        *(f"  - try: {action}" for action in finding["actions"]),
        f"  - read: {finding['wiki']}",
        f"  - falsified if: {finding['falsified_by']}",
    ]
