"""A round of the loop: judge the candidate of a workspace, then accept it or put the best version back."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from ..device.sandbox import Sandbox
from ..diagnosis import profile_folder
from ..errors import TimedOut, UsageError
from ..measure import correctness, pairing, timing, verify
from ..session import platforms, record_store, target
from ..session.record import (
    Correctness,
    Optimization,
    Performance,
    PreviousComparison,
    ProfileEvidence,
    QualityGate,
    Record,
)
from ..session.workspace import Workspace, digest
from . import acceptance, history, readiness
from .readiness import RoundStart

SEEDS = 10
RATES = (  # of a utilization, those that a record keeps
    "tflops",
    "bandwidth_gbps",
    "tflops_peak_utilization_pct",
    "bandwidth_peak_utilization_pct",
    "floor_us",
    "floor_share_pct",
)


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
    start = RoundStart.of(workspace)
    plan = readiness.check_ready(start, version)
    history.forget_unrecorded_commit(workspace, start.records)
    diagnosis = profile_folder.evidence_for_round(workspace, start.task, version, start.best)
    if diagnosis is None and version != "v0":
        say("the best version has no profile; the plan rests on no counter (profile_kernel.sh)")
    evidence = measure(start, timeout_s, say, sandbox_kind)
    return settle(start, version, plan, evidence, diagnosis)


def measure(start: RoundStart, timeout_s: float, say, sandbox_kind: str = "auto") -> Evidence:
    """Verify the candidate, time every workload, compare each with the best version. Nothing is recorded.

    A copy of kernel.py is judged, against the reference.py that the session began with, so that editing either
    file meanwhile changes nothing unnoticed (see `settle`). A candidate that fails while it is timed has failed.
    """
    workspace, best = start.workspace, start.best
    with Sandbox("cuda", workspace.cache, sandbox_kind) as sandbox:
        platforms.check_platform(workspace, start.task, sandbox.device_name)
        candidate = Path(shutil.copyfile(workspace.kernel, sandbox.scratch / "candidate.py"))
        reference = sandbox.scratch / "reference.py"
        reference.write_bytes(start.reference)
        say(f"verifying on {sandbox.device_name} (sandbox: {sandbox.isolation})")
        judged = replace(target.of_workspace(workspace, start.task), kernel=candidate, reference=reference)
        verdict = verify.verify(sandbox, judged, seeds=SEEDS, sanitize=True, timeout_s=timeout_s, say=say)
        evidence = Evidence(digest(candidate), verdict, {}, None, None, best.version if best else None)
        if verdict["status"] != "OK":
            return evidence
        if sandbox.gpu and verdict["own_work"] == correctness.NOT_CHECKED:
            verify.check_profiler(sandbox, timeout_s)  # is it this machine, or the candidate?
            return evidence
        workloads = list(dict.fromkeys(case["workload"] for case in verdict["cases"]))
        opponent = workspace.extract(best.git_commit_hash, sandbox.scratch) if best else None
        try:
            cases = timing.inputs(sandbox, reference, judged.dtype, workloads, timeout_s)
            timed = time_all(sandbox, evidence, candidate, opponent, cases, timeout_s, say)
            status, message = verify.check_timed(sandbox, reference, judged.dtype, timed, judged.tolerance, timeout_s)
        except (timing.KernelFailed, TimedOut) as error:
            status, message = getattr(error, "status", "TIMEOUT"), f"right when verified, failed when timed: {error}"
        if status != "OK":
            evidence.verify = {**verdict, "status": status, "summary": f"{status}: {message}"}
            return evidence
    time_us = evidence.latencies["default"]["latency_us"]["median"]
    evidence.utilization = platforms.utilization(
        workspace, start.task, time_us, max_clocks=(sandbox.gpu or {}).get("max_clocks")
    )
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
        evidence.comparisons = {name: pairing.paired_verdict(runs) for name, runs in rounds.items()}
        unsettled = {name: sets for name, sets in cases.items() if evidence.comparisons[name]["verdict"] == "AMBIGUOUS"}
        if unsettled:
            say(f"ambiguous, measured again with more rounds: {', '.join(unsettled)}")
            for name, found in timing.measure(sandbox, candidate, opponent, unsettled, 1, timeout_s=timeout_s).items():
                evidence.comparisons[name] = pairing.paired_verdict(found["rounds"])
                timed.append(found["timed"])
        for name, found in evidence.comparisons.items():
            say(f"{name}: {found['verdict']}, {pairing.describe(found)}")
    return timed


def settle(
    start: RoundStart, version: str, plan: Optimization, evidence: Evidence, diagnosis: ProfileEvidence | None
) -> dict:
    """Accept (commit, and a record that names it) or reject (record, kernel.py as before).

    diagnosis: profile_evidence for the record. Returns run_gate.py's result. UsageError when kernel.py is no longer
    what was measured. The verdict is recorded last, so a round that is killed here can be judged again.
    """
    workspace, records, best = start.workspace, start.records, start.best
    if digest(workspace.kernel) != evidence.kernel_sha256:
        raise UsageError("kernel.py was edited while it was judged; nothing is recorded, run the gate again")
    readiness.check_oracle(start)
    decision = acceptance.decide(evidence.verify, evidence.utilization, evidence.comparisons)
    if decision["accepted"] and evidence.against != (best.version if best else None):
        raise UsageError(
            "the best version is another one than when this was measured; nothing is recorded, run it again"
        )
    with records.locked():
        before = records.read(version) if version in records.versions() else records.create(version)
        record = measured_record(before, evidence, decision)
        record = replace(record, optimization=plan, profile_evidence=diagnosis or record.profile_evidence)
        if decision["accepted"]:
            message = history.commit_message(record)
            record = replace(record, git_commit_hash=history.committed(workspace, message, evidence.kernel_sha256))
        else:
            history.set_aside(workspace, version, best)
        records.save(record)
    return {
        "accepted": decision["accepted"],
        "reason": decision["reason"],
        "version": version,
        "verify": {name: evidence.verify[name] for name in ("status", "device", "summary", "worst_rel_err")}
        | {"own_work": evidence.verify.get("own_work")},
        "timing": {"latencies": evidence.latencies, "against": evidence.against, "comparisons": evidence.comparisons},
        "utilization": evidence.utilization,
        "commit": record.git_commit_hash,
    }


def measured_record(record: Record, evidence: Evidence, decision: dict) -> Record:
    """The record with the fields that measurements fill."""
    verdict = evidence.verify
    passed = "PASS" if verdict["status"] == "OK" else "TIMEOUT_FAIL" if verdict["status"] == "TIMEOUT" else "FAIL"
    result = "PASS" if decision["accepted"] else "TIMEOUT_FAIL" if passed == "TIMEOUT_FAIL" else "FAIL"
    return replace(
        record,
        timestamp=record_store.now(),
        kernel_sha256=evidence.kernel_sha256,
        device=verdict["device"],
        performance=performance(evidence),
        correctness=Correctness(passed, verdict["status"], verdict["worst_rel_err"], verdict["summary"]),
        quality_gate=QualityGate(result, None if decision["accepted"] else decision["reason"]),
    )


def performance(evidence: Evidence) -> Performance:
    """What a record keeps of the times, rates and comparisons."""
    measured = evidence.latencies.get("default")
    time = measured["latency_us"] if measured else dict.fromkeys(("median", "p20", "p80", "n"))
    rates = evidence.utilization or {}
    main = (evidence.comparisons or {}).get("default")
    return Performance(
        workload="default",
        latency_us=time["median"],
        p20_us=time["p20"],
        p80_us=time["p80"],
        runs=time["n"],
        latency_us_by_workload={name: timed["latency_us"]["median"] for name, timed in evidence.latencies.items()},
        **{name: rates.get(name) for name in RATES},
        gpu_state=measured["gpu_state"] if measured else None,
        comparison_with_previous=main and previous_comparison(evidence.against, main),
    )


def previous_comparison(against: str, compared: dict) -> PreviousComparison:
    """What a record keeps of the paired comparison with the best version."""
    speedup = compared["speedup"]
    return PreviousComparison(against, compared["verdict"], speedup["point"], tuple(speedup["ci95"]))
