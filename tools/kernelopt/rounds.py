"""A round of the loop: judge the candidate of a workspace, then accept it or put the best version back."""

import contextlib
import hashlib
import itertools
import re
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from . import (
    audit,
    bundle,
    correctness,
    gate,
    memory,
    platforms,
    profile_report,
    roofline,
    subject,
    timing,
    verify,
    wiki,
)
from .errors import Refused, TimedOut, ToolError, UsageError
from .sandbox import Sandbox
from .workspace import KEPT_FILE, Workspace, digest

PLAN_FIELDS = {
    "action_category": "Category",
    "action_description": "Action",
    "expected_impact": "Expected effect",
    "risks_and_rollback": "Risk",
}
KEPT = ("versions", "rejected")  # folders with kernels of other versions
SEEDS = 10
KERNEL_TRAILER = "Kernel-SHA256: "  # in the message of each commit of the gate
SUBJECT = 100  # characters of the action in the first line of a commit message


@dataclass
class Evidence:
    """All that was measured of a candidate: what `gate.decide` judges and the record keeps."""

    kernel_sha256: str
    verify: dict
    latencies: dict[str, dict]
    utilization: dict | None
    comparisons: dict[str, dict] | None
    against: str | None


def judge(workspace: Workspace, version: str, timeout_s: float, say, sandbox_kind: str = "auto") -> dict:
    """One gate, whole: run_gate.py's result. UsageError when the round cannot be judged at all; see the four steps."""
    plan = check_ready(workspace, version)
    forget_unrecorded_commit(workspace)
    diagnosis = profile_report.evidence_for_round(workspace, version)
    if diagnosis is None and version != "v0":
        say("the best version has no profile; the plan rests on no counter (profile_kernel.sh)")
    evidence = measure(workspace, timeout_s, say, sandbox_kind)
    return settle(workspace, version, plan, evidence, diagnosis)


def check_ready(workspace: Workspace, version: str) -> dict:
    """The plan of this round; UsageError when the round cannot be judged at all."""
    if (workspace.root / KEPT_FILE).exists():
        raise UsageError("an unattended run was killed among its agents; first end it: optimize_kernel.py --resume")
    records = memory.Memory(workspace)
    best = records.best()
    check_version(records, version, best)
    check_oracle(workspace)
    check_task(workspace, records)
    check_citations(workspace)
    roof_of_task(workspace)
    if best and best["kernel_sha256"] == digest(workspace.kernel):
        raise UsageError(f"kernel.py is the accepted {best['version']} itself; there is nothing to judge")
    return read_plan(workspace, version, required=best is not None)


def check_oracle(workspace: Workspace) -> None:
    if workspace.first_reference() != workspace.reference.read_bytes():
        raise UsageError("reference.py was changed since the session began; the oracle must stay: git checkout it back")


def check_task(workspace: Workspace, records: memory.Memory) -> None:
    """UsageError when what counts as right was changed after v0 was accepted."""
    first = records.read("v0") if "v0" in records.versions() else None
    if not first or not first["git_commit_hash"]:
        return
    now, then = workspace.task(), workspace.task_at(first["git_commit_hash"])
    for name in ("dtype", "tolerance", "libraries", "only_these_shapes"):
        if now.get(name) != then.get(name):
            raise UsageError(
                f"the Task block's {name} is {now.get(name)}, v0 was judged with {then.get(name)}; put it back, or start a "
                "new session"
            )


def check_citations(workspace: Workspace) -> None:
    """UsageError when a hardware value in the workspace is not cited as it must be."""
    if problems := audit.of_workspace(workspace, hints=False).problems:
        path, first = problems[0]
        raise UsageError(
            f"{len(problems)} hardware values are not cited rightly, the first: {path}:{first.line}: {first.message}; "
            f"all of them: check_citations.py {workspace.root}"
        )


def check_version(records: memory.Memory, version: str, best: dict | None) -> None:
    """A version is judged once, in order; v0 as often as it takes until a baseline is accepted, and nothing before that."""
    if best is None and version != "v0":
        raise UsageError("no baseline is accepted yet; judge v0 first")
    if version not in records.versions():
        if version != records.next_version():
            raise UsageError(f"{version} is out of order; the next version is {records.next_version()}")
        return
    result = records.read(version)["quality_gate"]["result"]
    if result is not None and not (version == "v0" and best is None):
        raise UsageError(f"{version} was judged already ({result}); the next version is {records.next_version()}")


def read_plan(workspace: Workspace, version: str, required: bool) -> dict:
    """The fields of plans/vN_plan.md that belong into the record; UsageError when one is missing or TBD."""
    path = workspace.plan(version)
    if path.exists():
        return plan_fields(path)
    if required:
        raise UsageError(f"{path} is missing; copy {bundle.REFERENCE / 'plan.md'} there and fill it in")
    return dict.fromkeys(PLAN_FIELDS) | {"action_category": "baseline"}


def plan_fields(path: Path) -> dict:
    """The fields of a plan's file; UsageError when one is missing or TBD."""
    try:
        text = path.read_text(encoding="utf-8").replace("\0", "")
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text") from None
    sections = plan_sections(text)
    plan = {field: in_a_line(sections.get(title, "")) for field, title in PLAN_FIELDS.items()}
    for field, title in PLAN_FIELDS.items():
        if not plan[field]:
            raise UsageError(f"{path}: '## {title}' is missing or empty")
    for title, body in sections.items():
        if "TBD" in body:
            raise UsageError(f"{path}: '## {title}' still holds a TBD")
    return plan


def in_a_line(text: str) -> str:
    """An agent's words, without what a terminal would take for a command."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def plan_sections(text: str) -> dict[str, str]:
    """The text below each `## Title` of a plan."""
    return dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE))


def measure(workspace: Workspace, timeout_s: float, say, sandbox_kind: str = "auto") -> Evidence:
    """Verify the candidate, time every workload, compare each with the best version. Nothing is recorded.

    A copy of kernel.py is judged, against the reference.py that the session began with, so that editing either
    file meanwhile changes nothing unnoticed (see `settle`). A candidate that fails while it is timed has failed.
    """
    task = subject.of_workspace(workspace)
    best = memory.Memory(workspace).best()
    with Sandbox("cuda", workspace.cache, sandbox_kind) as sandbox:
        check_platform(workspace, sandbox.device_name)
        candidate = Path(shutil.copyfile(workspace.kernel, sandbox.scratch / "candidate.py"))
        reference = sandbox.scratch / "reference.py"
        reference.write_bytes(workspace.first_reference())
        say(f"verifying on {sandbox.device_name} (sandbox: {sandbox.isolation})")
        judged = replace(task, kernel=candidate, reference=reference)
        verdict = verify.verify(sandbox, judged, seeds=SEEDS, sanitize=True, timeout_s=timeout_s, say=say)
        evidence = Evidence(digest(candidate), verdict, {}, None, None, best["version"] if best else None)
        if verdict["status"] != "OK":
            return evidence
        if sandbox.gpu and verdict["own_work"] == correctness.NOT_CHECKED:
            verify.check_profiler(sandbox, timeout_s)  # is it this machine, or the candidate?
            return evidence
        workloads = list(dict.fromkeys(case["workload"] for case in verdict["cases"]))
        opponent = workspace.extract(best["git_commit_hash"], sandbox.scratch) if best else None
        try:
            cases = timing.inputs(sandbox, reference, task.dtype, workloads, timeout_s)
            timed = time_all(sandbox, evidence, candidate, opponent, cases, timeout_s, say)
            status, message = verify.check_timed(sandbox, reference, task.dtype, timed, task.tolerance, timeout_s)
        except (timing.KernelFailed, TimedOut) as error:
            status, message = getattr(error, "status", "TIMEOUT"), f"right when verified, failed when timed: {error}"
        if status != "OK":
            evidence.verify = {**verdict, "status": status, "summary": f"{status}: {message}"}
            return evidence
    time_us = evidence.latencies["default"]["latency_us"]["median"]
    evidence.utilization = utilization(workspace, time_us, max_clocks=(sandbox.gpu or {}).get("max_clocks"))
    return evidence


def time_all(
    sandbox: Sandbox, evidence: Evidence, candidate: Path, opponent: Path | None, cases: dict, timeout_s: float, say
) -> list[dict]:
    """Put the latency of each workload, and its comparison with the opponent, into the evidence; what stays ambiguous is
    looked at once more, with more rounds. Returns the outputs of timed calls for verify.check_timed."""
    say(f"timing {', '.join(cases)}")
    evidence.latencies = timing.measure(sandbox, candidate, opponent, cases, timeout_s=timeout_s)
    timed = [found.pop("timed") for found in evidence.latencies.values()]
    rounds = {name: found.pop("rounds") for name, found in evidence.latencies.items()}
    if opponent:
        evidence.comparisons = {name: gate.paired_verdict(runs) for name, runs in rounds.items()}
        unsettled = {name: sets for name, sets in cases.items() if evidence.comparisons[name]["verdict"] == "AMBIGUOUS"}
        if unsettled:
            say(f"ambiguous, measured again with more rounds: {', '.join(unsettled)}")
            for name, found in timing.measure(sandbox, candidate, opponent, unsettled, 1, timeout_s=timeout_s).items():
                evidence.comparisons[name] = gate.paired_verdict(found["rounds"])
                timed.append(found["timed"])
        for name, found in evidence.comparisons.items():
            say(f"{name}: {found['verdict']}, {gate.describe(found)}")
    return timed


def check_platform(workspace: Workspace, device: str) -> None:
    """UsageError when the GPU is not the platform of the task: its times would be held against another product."""
    platform = workspace.task()["platform"]
    if platform and wiki.normalised(device) not in wiki.spellings(platforms.of_task(workspace)):
        raise UsageError(f"this GPU is {device}, the task is for {platform}; {other_platform(workspace, device)}")


def other_platform(workspace: Workspace, device: str) -> str:
    """What to do about a task that is for another product than the GPU."""
    try:
        page = platforms.of_device(device, workspace)
    except Refused:
        return "the wiki has no page of it: start a session without --platform, then calibrate_gpu.py --workspace W"
    return f"set the platform {page.platform} in the README's Task block"


def utilization(
    workspace: Workspace, time_us: float, work: dict | None = None, max_clocks: dict | None = None
) -> dict | None:
    """Roofline figures of a workload, given by its work (None: the default one); None when the work is not known, and the rates
    alone where the platform or its values are not. max_clocks: of this card (gpu.identify)."""
    work = work or (workspace.task()["work"] or {}).get("default")
    if work is None:
        return None
    roof = roof_of_task(workspace)
    return roofline.utilization(time_us, work["flops"], work["bytes_min"], roof, max_clocks)


def roof_of_task(workspace: Workspace) -> roofline.Roof | None:
    """The roof of the default workload; None when the platform, its values or the work are unknown."""
    task = workspace.task()
    if task["platform"] is None or task["work"] is None:
        return None
    page = platforms.of_task(workspace)
    with contextlib.suppress(Refused):
        return roofline.roof_for(page, task["work"]["default"])
    return None


def settle(workspace: Workspace, version: str, plan: dict, evidence: Evidence, diagnosis: dict | None) -> dict:
    """Accept (commit, and a record that names it) or reject (record, kernel.py as before).

    diagnosis: profile_evidence for the record. Returns run_gate.py's result. UsageError when kernel.py is no longer
    what was measured. The verdict is recorded last, so a round that is killed here can be judged again.
    """
    if digest(workspace.kernel) != evidence.kernel_sha256:
        raise UsageError("kernel.py was edited while it was judged; nothing is recorded, run the gate again")
    check_oracle(workspace)
    decision = gate.decide(evidence.verify, evidence.utilization, evidence.comparisons)
    records = memory.Memory(workspace)
    best = records.best()
    if decision["accepted"] and evidence.against != (best["version"] if best else None):
        raise UsageError(
            "the best version is another one than when this was measured; nothing is recorded, run it again"
        )
    if version not in records.versions():
        records.create(version)
    with records.editing(version) as record:
        record |= measured_fields(evidence, decision)
        record["optimization"] = plan
        record["profile_evidence"] = diagnosis or record["profile_evidence"]
        if decision["accepted"]:
            record["git_commit_hash"] = committed(workspace, commit_message(record), evidence.kernel_sha256)
        else:
            set_aside(workspace, version)
    return {
        "accepted": decision["accepted"],
        "reason": decision["reason"],
        "version": version,
        "verify": {name: evidence.verify[name] for name in ("status", "device", "summary", "worst_rel_err")}
        | {"own_work": evidence.verify.get("own_work")},
        "timing": {"latencies": evidence.latencies, "against": evidence.against, "comparisons": evidence.comparisons},
        "utilization": evidence.utilization,
        "commit": record["git_commit_hash"],
    }


def committed(workspace: Workspace, message: str, kernel_sha256: str) -> str:
    """The commit of the kernel that was judged; UsageError when git stored another text (a filter, a line-end setting)."""
    commit = workspace.commit(message)
    if kernel_digest(workspace, commit) != kernel_sha256:
        workspace.git("update-ref", "HEAD", "HEAD^")
        raise UsageError(
            "git stored another kernel.py than the one that was judged; look for a filter: "
            f"git -C {workspace.root} check-attr -a kernel.py"
        )
    return commit


def kernel_digest(workspace: Workspace, revision: str) -> str:
    """SHA-256 of kernel.py in a revision."""
    return hashlib.sha256(workspace.file_at(revision, "kernel.py")).hexdigest()


def forget_unrecorded_commit(workspace: Workspace) -> None:
    """Take back the commit of a verdict that was not recorded: the gate was killed between the two, and will judge again. A commit
    of the gate's own names its version and its kernel; somebody else's stays."""
    found = re.match(
        rf"V(\d+): .*^{KERNEL_TRAILER}(\w+)$", workspace.git("log", "-1", "--format=%B"), re.DOTALL | re.MULTILINE
    )
    records = memory.Memory(workspace)
    if not found or f"v{found[1]}" not in records.versions():
        return
    own = kernel_digest(workspace, "HEAD") == found[2]
    if own and records.read(f"v{found[1]}")["quality_gate"]["result"] is None:
        workspace.git("update-ref", "HEAD", "HEAD^")


def measured_fields(evidence: Evidence, decision: dict) -> dict:
    """The part of a record that measurements fill."""
    verdict = evidence.verify
    passed = "PASS" if verdict["status"] == "OK" else "TIMEOUT_FAIL" if verdict["status"] == "TIMEOUT" else "FAIL"
    result = "PASS" if decision["accepted"] else "TIMEOUT_FAIL" if passed == "TIMEOUT_FAIL" else "FAIL"
    return {
        "timestamp": memory.now(),
        "kernel_sha256": evidence.kernel_sha256,
        "device": verdict["device"],
        "performance": performance(evidence),
        "correctness": {
            "status": passed,
            "verify_status": verdict["status"],
            "rel_err": verdict["worst_rel_err"],
            "summary": verdict["summary"],
        },
        "quality_gate": {"result": result, "failure_reason": None if decision["accepted"] else decision["reason"]},
    }


def performance(evidence: Evidence) -> dict:
    measured = evidence.latencies.get("default")
    time = measured["latency_us"] if measured else dict.fromkeys(("median", "p20", "p80", "n"))
    rates = evidence.utilization or {}
    main = (evidence.comparisons or {}).get("default")
    return {
        "workload": "default",
        "latency_us": time["median"],
        "p20_us": time["p20"],
        "p80_us": time["p80"],
        "runs": time["n"],
        "latency_us_by_workload": {name: found["latency_us"]["median"] for name, found in evidence.latencies.items()},
        **{
            name: rates.get(name)
            for name in (
                "tflops",
                "bandwidth_gbps",
                "tflops_peak_utilization_pct",
                "bandwidth_peak_utilization_pct",
                "floor_us",
                "floor_share_pct",
            )
        },
        "gpu_state": measured["gpu_state"] if measured else None,
        "comparison_with_previous": main
        and {
            "against": evidence.against,
            "verdict": main["verdict"],
            "speedup": main["speedup"]["point"],
            "ci95": main["speedup"]["ci95"],
        },
    }


def commit_message(record: dict) -> str:
    """ "V1: 143.20 us, 1.986x as fast as v0 | one pass instead of three"; below it the whole action where that is longer, and
    the bottleneck in the profile of the version that this one was held against."""
    performance, compared = record["performance"], record["performance"]["comparison_with_previous"]
    action = record["optimization"]["action_description"] or "baseline kernel"
    short = textwrap.shorten(action, SUBJECT, placeholder=" …")
    bottleneck = record["profile_evidence"]["bottleneck_type"]
    gain = f", {compared['speedup']:.3f}x as fast as {compared['against']}" if compared else ""
    paragraphs = [f"{record['version'].upper()}: {performance['latency_us']:.2f} us{gain} | {short}"]
    if short != action:
        paragraphs.append(textwrap.fill(action, 100, break_long_words=False, break_on_hyphens=False))
    if compared and bottleneck:
        paragraphs.append(f"Bottleneck in the profile of {compared['against']}, which it started from: {bottleneck}.")
    paragraphs.append(f"{KERNEL_TRAILER}{record['kernel_sha256']}")
    return "\n\n".join(paragraphs)


def kernel_of(workspace: Workspace, record: dict) -> bytes:
    """kernel.py of a version, byte for byte what was judged (its SHA-256 says so): from the history, from versions/ (an archive
    has that in its place), from rejected/, or as it lies in the workspace. UsageError when none of them is it."""
    for content in _candidates(workspace, record):
        if hashlib.sha256(content).hexdigest() == record["kernel_sha256"]:
            return content
    raise UsageError(f"the kernel of {record['version']} is nowhere to be found: not in the history, not in rejected/")


def _candidates(workspace: Workspace, record: dict) -> Iterator[bytes]:
    if commit := record["git_commit_hash"]:
        with contextlib.suppress(ToolError):  # a workspace that was copied without its history
            yield workspace.file_at(commit, "kernel.py")
    copies = [sorted((workspace.root / name).glob(f"{record['version']}_kernel*.py")) for name in KEPT]
    for path in (*itertools.chain(*copies), workspace.kernel):
        if path.is_file():
            yield path.read_bytes()


def set_aside(workspace: Workspace, version: str) -> None:
    """Keep the refused kernel under rejected/ and put the last accepted kernel.py back."""
    folder = workspace.root / "rejected"
    folder.mkdir(exist_ok=True)
    kernel = workspace.kernel.read_bytes()
    refused = [path.read_bytes() for path in folder.glob(f"{version}_kernel*.py")]  # v0 may be so more than once
    if kernel not in refused:  # it lies there where a gate was killed between this and its record
        name = f"{version}_kernel_{len(refused) + 1}.py" if refused else f"{version}_kernel.py"
        bundle.write_bytes(folder / name, kernel)
    put_best_back(workspace)


def put_best_back(workspace: Workspace) -> None:
    """kernel.py is the best version again, where there is one."""
    if best := memory.Memory(workspace).best():
        bundle.write_bytes(workspace.kernel, workspace.file_at(best["git_commit_hash"], "kernel.py"))
