"""One round: measure the candidate of a workspace, then accept it or put the best version back."""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ..device import spent
from ..device.outcomes import Fault
from ..device.sandbox import Sandbox
from ..device.stop_signal import Stop
from ..diagnosis import profile_folder
from ..errors import Stopped, TimedOut, UsageError
from ..hardware import roofline
from ..measure import correctness, pairing, timing, verify
from ..measure.cases import Case
from ..measure.latency import Timing
from ..measure.oracle import Oracle
from ..measure.timing import TimedWorkload
from ..session import explorations, platforms, record_store
from ..session.digests import digest
from ..session.record import (
    Correctness,
    Optimization,
    Performance,
    PreviousComparison,
    ProfileEvidence,
    QualityGate,
    Record,
    Reference,
)
from ..session.subject import KernelUnderTest, of_workspace
from ..session.workspace import Workspace
from ..statuses import Speed, Status
from . import acceptance, history, readiness
from .acceptance import Decision
from .measurement import Measurement
from .readiness import RoundStart

SEEDS = 10
TIMEOUT_S = 300  # of each process, where the user names none
GATE_RESULT = {Status.OK: "PASS", Status.TIMEOUT: "TIMEOUT_FAIL"}  # of any other status: FAIL


@dataclass(frozen=True)
class RoundResult:
    """The result of one round. commit: of the accepted kernel, None where it was rejected."""

    version: str
    decision: Decision
    measurement: Measurement
    commit: str | None

    def to_json(self) -> dict:
        """The output of run_gate.py --json."""
        measured, verdict = self.measurement, self.measurement.verdict
        whole = measured.to_json()
        return {
            "accepted": self.decision.accepted,
            "reason": self.decision.reason,
            "version": self.version,
            "verify": {
                "status": verdict.status,
                "device": verdict.device,
                "summary": verdict.summary,
                "worst_rel_err": verdict.worst_rel_err,
                "own_work": verdict.own_work,
            },
            "timing": {name: whole[name] for name in ("latencies", "against", "comparisons")},
            "utilization": whole["utilization"],
            "commit": self.commit,
            "seconds": measured.seconds,
        }

    @property
    def sustained_pct(self) -> float | None:
        """The share of the bare operations' sustained rate that the cold GPU time reaches; see `sustained_share`."""
        used, timings = self.measurement.utilization, self.measurement.timings
        return sustained_share(used, timings["default"].gpu_us) if used else None

    def lines(self) -> list[str]:
        """The output of run_gate.py."""
        decision, measured = self.decision, self.measurement
        text = [f"{self.version} {'ACCEPTED' if decision.accepted else 'REJECTED'}: {decision.reason}"]
        for name, one in measured.timings.items():
            comparison = (measured.comparisons or {}).get(name)
            paired = f", {comparison.verdict} {comparison.describe()} against {measured.against}" if comparison else ""
            cold = f", GPU time {one.gpu_us:.2f} us cold" if one.gpu_us else ""
            text.append(f"{name}: {one.latency.median_us:.2f} us{cold}{paired}")
        text += doubts(measured.timings)
        used = measured.utilization
        if used and used.floor_us:
            beyond = roofline.beyond_floor(used)
            cold = cold_shares(used, measured.timings["default"].gpu_us)
            text.append(roofline.share_words(used) + cold + (f"; {beyond}" if beyond else ""))
        if measured.seconds:
            steps = {step: seconds for step, seconds in measured.seconds.items() if step != "all"}
            text.append(spent.took(measured.seconds["all"], steps))
        if self.commit:
            text.append(f"commit {self.commit}")
        return text


def doubts(timings: dict[str, Timing]) -> list[str]:
    """ "warning: default, small: the GPU was throttled: sw_power_cap": each warning once, with its workloads."""
    told: dict[str, list[str]] = {}
    for name, one in timings.items():
        for warning in one.warnings():
            told.setdefault(warning, []).append(name)
    return [f"warning: {', '.join(names)}: {warning}" for warning, names in told.items()]


def cold_shares(used: roofline.Utilization, cold_us: float | None) -> str:
    """What the cold time of a compute-bound problem says: its share of a floor that was measured cold, and of the rate
    that the bare operations sustain."""
    if not cold_us or used.bound != "compute":
        return ""
    has_floor = not (used.library_rate or used.documented)
    floor = f", {100 * used.floor_us / cold_us:.1f} % by the cold GPU time" if has_floor else ""
    share = sustained_share(used, cold_us)
    if share is None:
        return floor
    return f"{floor}; its cold time is at {share:.1f} % of {explorations.SUSTAINED_IN_TRIALS}"


def sustained_share(used: roofline.Utilization, cold_us: float | None) -> float | None:
    """In percent, of the rate that the bare operations sustain; None for other bounds, and where either is unknown."""
    return 100 * used.sustained_us / cold_us if used.sustained_us and cold_us else None


def judge(
    workspace: Workspace,
    version: str,
    timeout_s: float,
    say: Callable[[str], None],
    sandbox_kind: str = "auto",
    opened: Sandbox | None = None,
    stop: Stop | None = None,
) -> RoundResult:
    """Run one whole gate and return run_gate.py's result.

    opened: a sandbox on a GPU to do it in, in place of a new one, with a stop of its own. UsageError when the round
    cannot be judged at all (see readiness.check_ready). Stopped, with nothing recorded, when the stop's signal comes
    before the verdict.
    """
    stop = opened.stop if opened else stop or Stop()
    start = RoundStart.of(workspace)
    plan = readiness.check_ready(start, version)
    history.forget_unrecorded_commit(workspace, start.records)
    diagnosis = profile_folder.evidence_for_round(workspace, start.task, version, start.best)
    if diagnosis is None and version != "v0":
        say("the best version has no profile; the plan rests on no metric (profile_kernel.sh)")
    try:
        with stop.interrupting():
            if opened:
                measured = measure_in(opened, start, timeout_s, say)
            else:
                measured = measure(start, timeout_s, say, sandbox_kind, stop)
    except Stopped as stopped:
        raise Stopped(f"{stopped}: {version} is not judged, and nothing is recorded") from None
    return settle(start, version, plan, measured, diagnosis)


def measure(
    start: RoundStart,
    timeout_s: float,
    say: Callable[[str], None],
    sandbox_kind: str = "auto",
    stop: Stop | None = None,
) -> Measurement:
    """Verify the candidate, time every workload, compare each with the best version. Nothing is recorded.

    A copy of kernel.py is judged, against the reference.py that the session began with, so that editing either
    file meanwhile changes nothing unnoticed (see `settle`). A candidate that fails while it is timed has failed.
    """
    with Sandbox("cuda", start.workspace.cache, sandbox_kind, stop) as sandbox:
        return measure_in(sandbox, start, timeout_s, say)


STEPS = {"prepare": "inputs", "run": "kernel", "check": "oracle", "measure": "timing"}  # of the jobs of a worker


def measure_in(sandbox: Sandbox, start: RoundStart, timeout_s: float, say: Callable[[str], None]) -> Measurement:
    """The same in a sandbox that is open, with the seconds of each step."""
    began, sandbox.spent = time.monotonic(), spent.Spent()
    measurement = verified_and_timed(sandbox, start, timeout_s, say)
    seconds = {STEPS.get(job, job): round(took, 1) for job, took in sandbox.seconds().items()}
    return replace(measurement, seconds={"all": round(time.monotonic() - began, 1), **seconds})


def verified_and_timed(
    sandbox: Sandbox, start: RoundStart, timeout_s: float, say: Callable[[str], None]
) -> Measurement:
    """The measurement without its seconds."""
    workspace, best = start.workspace, start.best
    platforms.check_platform(workspace, start.task, sandbox.device_name)
    candidate = Path(shutil.copyfile(workspace.kernel, sandbox.scratch / "candidate.py"))
    reference = sandbox.scratch / "reference.py"
    reference.write_bytes(start.reference)
    say(f"verifying on {sandbox.device_name} (sandbox: {sandbox.isolation})")
    judged = replace(of_workspace(workspace, start.task), kernel=candidate, reference=reference)
    verdict = verify.verify(sandbox, judged, seeds=SEEDS, sanitize=True, timeout_s=timeout_s, say=say)
    measurement = Measurement(digest(candidate), verdict, against=best.version if best else None)
    if verdict.status != Status.OK:
        return measurement
    if sandbox.gpu and verdict.own_work == correctness.NOT_CHECKED:
        verify.check_profiler(sandbox, timeout_s)  # tells a fault of this machine from one of the candidate
        return measurement
    baseline = workspace.extract(best.git_commit_hash, sandbox.scratch) if best else None
    measurement, fault = timed(sandbox, measurement, judged, baseline, timeout_s, say)
    if fault:
        failed = replace(verdict, status=fault.status, summary=f"{fault.status}: {fault.message}")
        return replace(measurement, verdict=failed)
    time_us = measurement.timings["default"].latency.median_us
    max_clocks = sandbox.gpu and sandbox.gpu.max_clocks
    utilization = platforms.utilization(workspace, start.task, time_us, max_clocks=max_clocks)
    return replace(measurement, utilization=utilization)


def timed(
    sandbox: Sandbox,
    measurement: Measurement,
    judged: KernelUnderTest,
    baseline: Path | None,
    timeout_s: float,
    say: Callable[[str], None],
) -> tuple[Measurement, Fault | None]:
    """The measurement of a right candidate with its timings and comparisons, and the faults of timed calls.

    A comparison that stays ambiguous is made once more, with more rounds.
    """
    workloads = list(dict.fromkeys(case.workload for case in measurement.verdict.cases))
    try:
        timing.get_ready(sandbox, baseline is not None)
        cases = timing.inputs(sandbox, judged.reference, judged.dtype, workloads, timeout_s)
        say(f"timing {', '.join(cases)}")
        first = timing.measure(sandbox, judged.kernel, baseline, cases, timeout_s=timeout_s)
        measurement = replace(measurement, timings={name: one.timing for name, one in first.items()})
        outputs = [one.outputs for one in first.values()]
        if baseline:
            measurement = with_comparisons(measurement, first)
            second = second_attempt(sandbox, judged.kernel, baseline, cases, measurement.comparisons, timeout_s, say)
            measurement = with_comparisons(measurement, second)
            outputs += [one.outputs for one in second.values()]
            for name, comparison in measurement.comparisons.items():
                say(f"{name}: {comparison.verdict}, {comparison.describe()}")
        fault = Oracle.of(sandbox, judged, timeout_s).fault_of_timed(outputs)
        return measurement, fault
    except Stopped as stopped:  # a TimedOut that is no fault of the kernel
        raise Stopped(f"{stopped}, while timing") from None
    except (timing.KernelFailed, TimedOut) as error:
        status = getattr(error, "status", Status.TIMEOUT)
        return measurement, Fault(status, f"right when verified, failed when timed: {error}")


def with_comparisons(measurement: Measurement, timed: dict[str, TimedWorkload]) -> Measurement:
    """The measurement with the comparisons that these paired times give, in place of earlier ones."""
    later = {name: pairing.compare(one.runs) for name, one in timed.items()}
    return replace(measurement, comparisons={**(measurement.comparisons or {}), **later})


def second_attempt(
    sandbox: Sandbox,
    kernel: Path,
    baseline: Path,
    cases: dict[str, list[Case]],
    comparisons: dict[str, pairing.Comparison],
    timeout_s: float,
    say: Callable[[str], None],
) -> dict[str, TimedWorkload]:
    """The workloads whose comparison is ambiguous, timed once more, with more rounds."""
    ambiguous = {name: cases[name] for name, one in comparisons.items() if one.verdict == Speed.AMBIGUOUS}
    if not ambiguous:
        return {}
    say(f"ambiguous, measured again with more rounds: {', '.join(ambiguous)}")
    return timing.measure(sandbox, kernel, baseline, ambiguous, attempt=1, timeout_s=timeout_s)


def settle(
    start: RoundStart, version: str, plan: Optimization, measurement: Measurement, diagnosis: ProfileEvidence | None
) -> RoundResult:
    """Accept (commit, and a record that names it) or reject (record, kernel.py as before).

    diagnosis: profile_evidence for the record. Raises UsageError when kernel.py has changed since the measurement. The
    verdict is recorded last, so a round that is killed here can be judged again.
    """
    workspace, records, best = start.workspace, start.records, start.best
    if digest(workspace.kernel) != measurement.kernel_sha256:
        raise UsageError("kernel.py was edited while it was judged; nothing is recorded, run the gate again")
    readiness.check_oracle(start)
    decision = acceptance.decide(measurement.verdict, measurement.utilization, measurement.comparisons)
    if decision.accepted and measurement.against != (best.version if best else None):
        raise UsageError(
            "the best version is another one than when this was measured; nothing is recorded, run it again"
        )
    with records.locked():
        before = records.read(version) if version in records.versions() else records.create(version)
        record = with_origin(measured_record(before, measurement, decision), workspace)
        record = replace(record, optimization=plan, profile_evidence=diagnosis or record.profile_evidence)
        if decision.accepted:
            message = history.commit_message(record)
            record = replace(record, git_commit_hash=history.committed(workspace, message, measurement.kernel_sha256))
        else:
            history.set_aside(workspace, version, best)
        records.save(record)
    return RoundResult(version, decision, measurement, record.git_commit_hash)


def measured_record(record: Record, measurement: Measurement, decision: Decision) -> Record:
    """The record with the fields that measurements fill."""
    verdict = measurement.verdict
    passed = GATE_RESULT.get(verdict.status, "FAIL")
    refused = "TIMEOUT_FAIL" if passed == "TIMEOUT_FAIL" else "FAIL"
    return replace(
        record,
        timestamp=record_store.now(),
        kernel_sha256=measurement.kernel_sha256,
        device=verdict.device,
        performance=performance(measurement),
        correctness=Correctness(passed, verdict.status, verdict.worst_rel_err, verdict.summary),
        quality_gate=QualityGate("PASS", None) if decision.accepted else QualityGate(refused, decision.reason),
    )


def with_origin(record: Record, workspace: Workspace) -> Record:
    """The record with a reference to the exploration's row that its kernel came from, if there is one. A plan that is
    written before the exploration cannot name that row."""
    row = explorations.row_of_kernel(workspace, record.kernel_sha256)
    if row is None:
        return record
    origin = Reference("exploration", row, "kernel.py is this candidate")
    return record if origin in record.references else replace(record, references=(*record.references, origin))


RATES = ("tflops", "bandwidth_gbps", "tflops_peak_utilization_pct", "bandwidth_peak_utilization_pct")
RATES += ("floor_us", "floor_share_pct")


def performance(measurement: Measurement) -> Performance:
    """The times, rates and comparisons for a record."""
    main = measurement.timings.get("default")
    compared = {
        name: PreviousComparison(measurement.against, one.verdict, one.speedup, tuple(one.ci95))
        for name, one in (measurement.comparisons or {}).items()
    }
    return Performance(
        workload="default",
        latency_us=main and main.latency.median_us,
        p20_us=main and main.latency.p20_us,
        p80_us=main and main.latency.p80_us,
        runs=main and main.latency.runs,
        latency_us_by_workload={name: one.latency.median_us for name, one in measurement.timings.items()},
        **{name: getattr(measurement.utilization, name, None) for name in RATES},
        gpu_state=main and main.gpu_state and main.gpu_state.to_json(),
        comparison_with_previous=compared.get("default"),
        comparison_by_workload=compared or None,
    )
