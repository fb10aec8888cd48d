"""Own work that nobody could check: where the profiler names no kernel it is said aloud, and the gate refuses.

The machines on which that happens are stand-ins here: a sandbox that answers for the children, cases as
correctness.judge gives them. On an H200 it was seen under ncu: torch's profiler then names no kernel at all.
"""

import json
from dataclasses import replace

import pytest
from conftest import TIMING, recorded
from kernelopt.case_types import OutputCheck, OutputErrors, OutputLayout
from kernelopt.device.outcomes import Outcome
from kernelopt.errors import EnvironmentLacks
from kernelopt.gate import acceptance, readiness, rounds
from kernelopt.gate.measurement import Measurement
from kernelopt.hardware.card import Card
from kernelopt.measure import correctness, verify
from kernelopt.measure.correctness import CaseResult, KernelShare, Observed
from kernelopt.measure.pairing import Comparison
from kernelopt.measure.verdict import Verdict
from kernelopt.session import platforms, record_store, subject
from kernelopt.session.digests import digest
from kernelopt.statuses import Speed, Status
from kernelopt.worker import tracing
from kernelopt.worker.context import Context

OWN = [KernelShare("softmax_kernel", us=3.0, share_pct=100.0, origin="own")]


def case(kernels, elements: int = 4, workload: str = "default") -> CaseResult:
    """A right case; `kernels` as the profiler named them, None where the call was not traced."""
    layout = OutputLayout([elements], "torch.float32", [1])
    errors = OutputErrors(elements, elements, 1.0, 1e-4, 0.0, 0, 0, 0, 0, None, 0.0, 0.0, 0.0)
    observed = Observed(0.0, 0.0, True, True, False, "fp64", kernels, [OutputCheck(layout, layout, errors)])
    return CaseResult(workload, 0, "fp32", None, False, Status.OK, "", observed)


RAISED = CaseResult("default", 0, "fp32", None, False, Status.RUNTIME_ERROR, "boom")


@pytest.mark.parametrize(
    ("cases", "libraries", "expected"),
    [
        ([case(OWN), case(None)], False, "checked"),
        ([case([]), case(None)], False, "not checked"),
        ([case(OWN), case([], workload="tall")], False, "not checked"),  # each workload is a call of its own
        ([case(OWN), case([], elements=0, workload="empty")], False, "checked"),  # nothing to do, no kernel
        ([case(None)], False, "not checked"),  # the CPU interpreter traces nothing
        ([], False, "not checked"),
        ([RAISED], False, "not checked"),
        ([case([])], True, "not asked"),
        ([case(OWN)], True, "not asked"),
    ],
)
def test_own_work_is_checked_where_each_call_that_did_something_names_its_kernels(cases, libraries, expected):
    assert correctness.own_work(cases, libraries) == expected


def test_the_shares_of_kernels_come_back_from_json():
    kernels = correctness.shares([{"name": "a", "us": 1.004, "origin": "own", "more": 1}, vars(OWN[0])])
    assert kernels[0].to_json() == {"name": "a", "us": 1.0, "share_pct": 25.1, "origin": "own"}
    for of_case in (case(kernels), case([]), case(None)):
        sent = of_case.to_json()
        assert CaseResult.from_json(json.loads(json.dumps(sent))) == of_case
    assert case(OWN).to_json()["kernels"] == [vars(OWN[0])] and case([]).to_json()["kernels"] == []


def test_an_output_of_another_shape_was_returned_all_the_same():
    """worker.accuracy.compare counts no elements of it."""
    right = case(OWN)
    layouts = (OutputLayout([3], "torch.float32", [1]), OutputLayout([4], "torch.float32", [1]))
    other = replace(right.observed, outputs=[OutputCheck(*layouts, None)])
    wrong = replace(right, status=Status.WRONG_SHAPE, observed=other)
    assert correctness.own_work([wrong], False) == "checked"


class StandInGpu:
    """Answers `run` with a prepared outcome, and says what it was asked."""

    device = "cuda"
    isolation = "none"
    device_name = "NVIDIA L4"

    def __init__(self, result: dict | None = None):
        self.result, self.asked, self.gpu = result, [], Card(self.device_name, "GPU-0", "580.1")

    def __enter__(self) -> "StandInGpu":
        return self

    def __exit__(self, *_) -> None:
        pass

    def run(self, job: str, arguments: dict, timeout_s: float, hidden=()) -> Outcome:
        self.asked.append(job)
        return Outcome(self.result, 0, None, False, 1.0, "")

    def seconds(self) -> dict[str, float]:
        return dict.fromkeys(self.asked, 1.0)


@pytest.fixture
def kernel_under_test(problem):
    return subject.KernelUnderTest(kernel=problem["kernel"], reference=problem["reference"])


def test_a_verification_says_aloud_that_own_work_was_not_checked(kernel_under_test):
    unseen = verify.verdict(StandInGpu(), kernel_under_test, [case([])], None)
    assert unseen.status == "OK" and unseen.own_work == "not checked"
    assert "OWN WORK NOT CHECKED: torch's profiler (CUPTI) named no kernel" in unseen.summary
    checked = verify.verdict(StandInGpu(), kernel_under_test, [case(OWN)], None)
    assert checked.own_work == "checked" and "OWN WORK" not in checked.summary
    free = verify.verdict(StandInGpu(), replace(kernel_under_test, libraries=True), [case([])], None)
    assert free.own_work == "not asked" and "OWN WORK" not in free.summary


def test_the_interpreter_says_what_it_always_said(kernel_under_test, interpreter):
    untraced = verify.verdict(interpreter, kernel_under_test, [case(None)], None)
    assert untraced.summary.endswith("; only a GPU shows whether its own kernels do the work")
    assert untraced.own_work == "not checked" and "OWN WORK" not in untraced.summary
    free = verify.verdict(interpreter, replace(kernel_under_test, libraries=True), [case(None)], None)
    assert free.own_work == "not asked" and "kernels of its own" not in free.summary


OK = Verdict(Status.OK, "NVIDIA L4", "OK")
FASTER = Comparison(Speed.FASTER, 1.2, (1.19, 1.21), (), 0.001, 0.003, 720)


@pytest.mark.parametrize("comparisons", [None, {"default": FASTER}])
def test_the_gate_accepts_nothing_whose_work_nobody_checked(comparisons):
    refused = acceptance.decide(replace(OK, own_work="not checked"), None, comparisons)
    assert not refused.accepted
    assert refused.reason.startswith("OWN_WORK_NOT_CHECKED") and "judge it again" in refused.reason
    for own_work in ("checked", "not asked", None):  # the last is a result of an older version
        assert acceptance.decide(replace(OK, own_work=own_work), None, comparisons).accepted
    interpreted = replace(OK, device="cpu-interpreter", own_work="not checked")
    assert "interpreter" in acceptance.decide(interpreted, None, comparisons).reason


def test_a_round_whose_work_was_not_checked_is_refused_and_recorded(session):
    verdict = replace(recorded("v0", "").verdict, own_work="not checked")
    measurement = Measurement(digest(session.kernel), verdict)
    start = readiness.RoundStart.of(session)
    result = rounds.settle(start, "v0", readiness.check_ready(start, "v0"), measurement, None).to_json()
    assert not result["accepted"] and result["verify"]["own_work"] == "not checked" and result["commit"] is None
    record = record_store.RecordStore(session).read("v0")
    assert record.quality_gate.failure_reason == result["reason"] and record_store.RecordStore(session).best() is None


# --- is it the machine, or the candidate? -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "result", [{"kernels": 0}, {"error": {"status": "RUNTIME_ERROR", "message": "CUPTI_ERROR_NOT_INITIALIZED"}}, None]
)
def test_a_machine_whose_profiler_sees_nothing_is_not_blamed_on_the_candidate(result):
    sandbox = StandInGpu(result)
    with pytest.raises(EnvironmentLacks, match=r"cannot be checked here: .*\(nsys, ncu, DCGM\)") as caught:
        verify.check_profiler(sandbox, 5)
    assert caught.value.exit_code == 3 and sandbox.asked == ["probe"] and str(caught.value).count("\n") == 0


def test_where_the_profiler_works_it_is_the_candidate():
    assert verify.check_profiler(StandInGpu({"kernels": 2}), 5) is None


@pytest.mark.parametrize(("named", "raises"), [(0, True), (2, False)])
def test_the_round_ends_there_before_anything_is_timed(session, monkeypatch, named, raises):
    """measure on a stand-in for a GPU: nothing is recorded where the machine is at fault, else the gate refuses."""
    stand_in = StandInGpu({"kernels": named})
    stand_in.scratch = session.root
    verdict = replace(OK, own_work="not checked")
    monkeypatch.setattr(rounds, "Sandbox", lambda *_: stand_in)
    monkeypatch.setattr(platforms, "check_platform", lambda *_: None)
    monkeypatch.setattr(rounds.verify, "verify", lambda *_, **__: verdict)
    if raises:
        with pytest.raises(EnvironmentLacks):
            rounds.measure(readiness.RoundStart.of(session), 5, lambda _: None)
    else:
        measurement = rounds.measure(readiness.RoundStart.of(session), 5, lambda _: None)
        assert measurement.timings == {} and not acceptance.decide(measurement.verdict, None, None).accepted


def test_the_probe_counts_the_kernels_of_torchs_own(monkeypatch):
    """On a stand-in for the profiler; on the CPU there is nothing for it to name."""
    monkeypatch.setattr(tracing, "kernels_of", lambda call: [call()])
    assert tracing.probe(Context("cpu", {}, None)) == {"kernels": 1}


def test_a_time_that_no_second_clock_confirms_is_said_to_be_alone():
    timed = replace(TIMING, cupti_us=None, kernels=[])
    (warning,) = timed.warnings()
    assert warning.startswith("one clock alone")
    assert replace(timed, kernels=None).warnings() == []  # no call was traced
