"""The verdict on a case: pure functions of what ran and what was compared."""

import json
from dataclasses import replace

import pytest
from kernelopt.case_types import CallCheck, OracleCheck, OutputCheck, Variant
from kernelopt.device.outcomes import Fault
from kernelopt.measure import correctness
from kernelopt.measure.cases import Case
from kernelopt.measure.correctness import CaseReport, CaseResult
from kernelopt.statuses import Status

REPORT = CaseReport(
    mutated=[],
    changed=[],
    aliased=False,
    changed_after_return=False,
    out_of_bounds=False,
    deterministic=True,
    device=None,
    guarded=True,
    fails_guarded=False,
    kernels=None,
)
OUTPUT = {
    "usually_finite": True,
    "nonfinite": 0,
    "spurious": 0,
    "infinite": 0,
    "mismatches": 0,
    "elements": 4,
    "finite": 4,
    "max_rel": 1e-7,
    "baseline_max_rel": 1e-7,
    "rms": 1.0,
    "bound": 1e-4,
}
OUTPUT |= {name: value for part in ("", "expected_") for name, value in ((f"{part}shape", [4]), (f"{part}dtype", "f"))}
OUTPUT |= {"stride": [1], "expected_stride": [1], "first_bad_index": 0, "lost_pct": 0.0, "baseline_lost_pct": 0.0}
CALL = CallCheck(1, "tensor", [OutputCheck.from_json(OUTPUT)])
CHECK = OracleCheck(calls=[CALL], expected_count=1, expected_structure="tensor", changes=[], oracle="fp64")
CASE = Case("default", 0, None, "input.pt", "fp32", [[4]])


def on(layout: str = "contiguous", values: str | None = None) -> Case:
    return replace(CASE, variant=Variant("a variant", [], layout, values, None))


TRANSPOSED, MISALIGNED, SIGNS = on("transposed inputs"), on("misaligned inputs"), on(values="mixed signs")


def status_of(case: Case = CASE, report=REPORT, check: OracleCheck | None = CHECK) -> Status:
    return correctness.judge(case, report, check, libraries=False).status


def judged(case: Case = CASE, done=None, output=None, libraries=False) -> Status:
    check = replace(CHECK, calls=[replace(CALL, outputs=[OutputCheck.from_json({**OUTPUT, **(output or {})})])])
    return correctness.judge(case, replace(REPORT, **(done or {})), check, libraries).status


@pytest.mark.parametrize(
    ("done", "status"),
    [
        ({}, "OK"),
        ({"device": "cpu"}, "WRONG_DEVICE"),
        ({"mutated": [0]}, "INPUT_MUTATED"),
        ({"changed_after_return": True}, "CHEAT_SUSPECT"),
        ({"aliased": True}, "ALIASED_OUTPUT"),
        ({"out_of_bounds": True}, "OUT_OF_BOUNDS"),
        ({"deterministic": False}, "OK"),  # reported, and allowed: atomics add in any order
    ],
)
def test_what_a_kernel_does_besides_its_result_counts(done, status):
    assert judged(done=done) == status


def test_a_variant_may_be_declined_aloud_and_not_answered_wrongly():
    raised = Fault(Status.RUNTIME_ERROR, "ValueError: contiguous inputs only")
    crashed = Fault(Status.ILLEGAL_ACCESS, "CUDA error: misaligned address")
    assert status_of(TRANSPOSED, raised, None) == "DECLINED"
    assert status_of(CASE, raised, None) == "RUNTIME_ERROR"
    assert status_of(MISALIGNED, crashed, None) == "DECLINED"
    assert status_of(TRANSPOSED, crashed, None) == "ILLEGAL_ACCESS"
    assert judged(TRANSPOSED, output={"mismatches": 1}) == "WRONG_VALUES"
    assert judged(TRANSPOSED, output={"stride": [2]}) == "OK" and judged(output={"stride": [2]}) == "WRONG_STRIDE"


@pytest.mark.parametrize(
    ("times", "libraries", "status"),
    [
        ({"own": 90.0, "library": 10.0, "moving": 500.0}, False, "OK"),
        ({"own": 70.0, "library": 30.0}, False, "CHEAT_SUSPECT"),
        ({"own": 70.0, "library": 30.0}, True, "OK"),
        ({"moving": 10.0}, False, "CHEAT_SUSPECT"),
        ({}, False, "OK"),  # a call that needs no kernel, on empty tensors
    ],
)
def test_the_core_work_is_done_by_kernels_of_its_own(times, libraries, status):
    kernels = [{"name": origin, "us": us, "origin": origin, "start_us": 0.0} for origin, us in times.items()]
    assert judged(done={"kernels": kernels}, libraries=libraries) == status


@pytest.mark.parametrize(
    ("reduction", "status"),
    [
        ({"us": 6.0, "reduces": 1}, "OK"),  # the inputs hold 4 elements
        ({"us": 6.0, "reduces": 2}, "CHEAT_SUSPECT"),
        ({"us": 6.0, "reduces": None}, "CHEAT_SUSPECT"),
        ({"us": 11.0, "reduces": 1}, "CHEAT_SUSPECT"),
    ],
)
def test_a_short_last_reduction_of_partial_results_is_no_work_of_the_library(reduction, status):
    own = {"name": "own", "us": 5.0, "origin": "own", "start_us": 0.0, "reduces": None}
    last = {"name": "sum", "origin": "library", "start_us": 5.0, **reduction}
    assert judged(done={"kernels": [own, last]}) == status
    assert judged(done={"kernels": [last]}) == "CHEAT_SUSPECT"


def test_small_elements_may_not_be_lost_beside_large_ones():
    assert judged(output={"lost_pct": 40.0}) == "WRONG_VALUES"
    assert judged(output={"lost_pct": 4.0}) == judged(output={"lost_pct": 40.0, "baseline_lost_pct": 30.0}) == "OK"


def test_a_few_elements_may_turn_on_a_rounding_on_values_that_the_task_does_not_have():
    assert judged(SIGNS, output={"elements": 1000, "mismatches": 9}) == "OK"
    assert judged(SIGNS, output={"elements": 1000, "mismatches": 11}) == "WRONG_VALUES"
    assert judged(SIGNS, output={"spurious": 1}) == "NONFINITE"
    large = on(values="64 times the inputs")
    assert judged(large, output={"spurious": 1}) == "DOUBTFUL" and judged(large) == "OK"


def test_where_a_variant_has_no_finite_value_nothing_is_asked():
    assert judged(TRANSPOSED, output={"finite": 0, "nonfinite": 3}) == "OK"
    assert judged(TRANSPOSED, output={"finite": 3, "nonfinite": 1}) == "OK"
    infinite = {"finite": 3, "nonfinite": 1, "usually_finite": False}  # the task's own outputs have infinities as well
    assert judged(TRANSPOSED, output=infinite) == "NONFINITE"
    assert judged(output={"finite": 0}) == "INVALID_TASK"


def test_the_structure_of_the_result_and_what_a_call_leaves_of_the_state_count():
    listed = replace(CHECK, calls=[replace(CALL, structure="[tensor]")])
    assert status_of(check=listed) == "WRONG_SHAPE"
    unknown = replace(CHECK, calls=[replace(CALL, structure=None)])  # outputs of timed calls
    assert status_of(check=unknown) == "OK"
    changed = replace(REPORT, changed=["weight", "mean"])
    assert status_of(report=changed) == "INPUT_MUTATED"
    both = replace(CHECK, changes=["mean", "weight"])
    assert status_of(report=changed, check=both) == "OK"
    assert status_of(report=changed, check=replace(both, wrong_state=["mean"])) == "WRONG_VALUES"


def test_a_result_comes_back_from_its_json():
    for result in (
        correctness.judge(TRANSPOSED, REPORT, CHECK, False),
        correctness.judge(CASE, Fault(Status.OOM, "no"), None, False),
    ):
        assert CaseResult.from_json(json.loads(json.dumps(result.to_json()))) == result


def test_an_output_that_cannot_be_read_is_wrong():
    result = correctness.judge(CASE, REPORT, OracleCheck(unreadable="truncated"), False)
    assert result.status == "RUNTIME_ERROR" and result.message == "the stored outputs cannot be read: truncated"
