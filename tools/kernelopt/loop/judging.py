"""A round's second half: waiting candidates are measured against the best version, and their verdicts are recorded."""

from .. import bundle
from ..diagnosis import profile_folder
from ..errors import Refused, UsageError
from ..gate import acceptance, history, readiness, rounds
from ..gate.measurement import Measurement
from ..gate.readiness import RoundStart
from ..statuses import AgentOutcome
from .executors import Executor
from .fingerprints import fingerprint
from .progress import Progress
from .run_state import State

DIVERGED = 1.5  # a candidate that takes this many times the best's time is logged as diverged; the best is put back


class Judge:
    """Judges the candidates that wait, on the GPUs of an executor."""

    def __init__(self, executor: Executor, progress: Progress):
        self.executor, self.progress = executor, progress
        self.workspace, self.records, self.files = progress.workspace, progress.records, progress.files

    def judge_waiting(self) -> None:
        """Measure as many candidates side by side as there are GPUs; record the fastest first.

        Once one is accepted, those that were faster than the former best are measured again, against the new best.
        """
        while self.progress.state.waiting:
            if self.close_recorded() or self.close_lost():
                continue
            measurements = self.measure(self.progress.state.waiting[: self.executor.slots])
            accepted = False
            for name in sorted(measurements, key=lambda name: speed(measurements[name]), reverse=True):
                if not (accepted and speed(measurements[name])):
                    accepted |= self.record_verdict(name, measurements[name])
        self.progress.apply(State.all_judged)

    def measure(self, names: tuple[str, ...]) -> dict[str, Measurement | Refused]:
        """The measurement of each candidate against the best version, or the reason why there is none."""
        self.progress.say(f"measuring {', '.join(names)} against {self.records.best().version}")
        kernels = [self.files.candidate(name)[0].read_bytes() for name in names]
        with self.progress.guarded() as changed:  # a process of an agent may have outlived it
            measurements = self.executor.measure(kernels)
        if changed:
            self.progress.log("put back", None, f"changed while candidates were measured: {', '.join(changed[:5])}")
        return dict(zip(names, measurements, strict=True))

    def close_recorded(self) -> bool:
        """Close the first candidate if its verdict was recorded just before a stop. Return whether it was."""
        version = self.progress.state.version
        record = self.records.read(version) if version in self.records.versions() else None
        if record is None or not record.is_judged:
            return False
        logged = self.files.last_logged() == version  # the run was killed between that line and the state
        self.close_candidate(version, record.passed, "recorded before the stop", logged=logged)
        return True

    def close_lost(self) -> bool:
        """Close a candidate whose files are gone from the disk. Return whether there was one."""
        for name in self.progress.state.waiting:
            if not self.files.has_candidate(name):
                self.progress.apply(State.judged_next, name)
                self.close_candidate(name, False, "its files are gone from .loop/candidates", "not judged")
                return True
        return False

    def record_verdict(self, name: str, measurement: Measurement | Refused) -> bool:
        """Make a candidate the next version. Return whether it was accepted."""
        # A stop may have left a record without a verdict, whose version is then used.
        version = self.progress.state.version or self.records.next_version()
        self.progress.apply(State.judging, name, version)
        if isinstance(measurement, Refused):
            history.put_best_back(self.workspace, self.records.best())
            return self.close_candidate(name, False, str(measurement), "not judged")
        kernel, plan = (path.read_bytes() for path in self.files.candidate(name))
        bundle.write_bytes(self.workspace.kernel, kernel)
        bundle.write_bytes(self.workspace.plan(version), plan)
        try:
            start = RoundStart.of(self.workspace)
            plan_of_round = readiness.check_ready(start, version)
        except (UsageError, Refused) as error:
            return self.refuse_plan(name, version, kernel, str(error))
        diagnosis = profile_folder.evidence_for_round(self.workspace, start.task, version, start.best)
        result = rounds.settle(start, version, plan_of_round, measurement, diagnosis)
        ratio = time_ratio(result)
        outcome = "diverged" if ratio and ratio > DIVERGED else None
        return self.close_candidate(version, result.decision.accepted, result.decision.reason, outcome)

    def refuse_plan(self, name: str, version: str, kernel: bytes, reason: str) -> bool:
        """Close a candidate that the gate does not judge: a poor plan, an uncited figure, the best kernel itself."""
        history.put_best_back(self.workspace, self.records.best())
        self.workspace.plan(version).unlink()  # it stays in .loop/candidates
        self.progress.apply(State.plan_refused, fingerprint(kernel.decode()))
        return self.close_candidate(name, False, reason, AgentOutcome.REFUSED_PLAN)

    def close_candidate(
        self, of: str, accepted: bool, reason: str, outcome: str | None = None, logged: bool = False
    ) -> bool:
        """Log the first candidate's outcome and end its wait. Return `accepted`. of: its version, or its name when it
        became none."""
        if not logged:
            self.progress.log(outcome or ("accepted" if accepted else "rejected"), of, reason)
        self.progress.apply(State.candidate_closed, accepted)
        return accepted


def speed(measurement: Measurement | Refused) -> float:
    """The speed-up over the version that it was measured against; 0 when it cannot be accepted. Pure."""
    if isinstance(measurement, Refused):
        return 0.0
    decision = acceptance.decide(measurement.verdict, measurement.utilization, measurement.comparisons)
    return measurement.comparisons["default"].speedup if decision.accepted else 0.0


def time_ratio(result: rounds.RoundResult) -> float | None:
    """The candidate's time over the best's on the default workload; None unless both were timed. Pure."""
    comparison = (result.measurement.comparisons or {}).get("default")
    return 1 / comparison.speedup if comparison else None
