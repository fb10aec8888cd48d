"""The verdict on a case: pure functions of what ran and what was compared."""

import pytest
from kernelopt.measure import correctness

DONE = {
    "device": None,
    "mutated": [],
    "changed": [],
    "late": False,
    "aliased": False,
    "out_of_bounds": False,
    "deterministic": True,
    "guarded": True,
    "fails_guarded": False,
    "kernels": None,
}
OUTPUT = {
    "usually_finite": True,
    "nonfinite": 0,
    "spurious": 0,
    "mismatches": 0,
    "elements": 4,
    "finite": 4,
    "max_rel": 1e-7,
    "baseline_max_rel": 1e-7,
}
OUTPUT |= {name: value for part in ("", "expected_") for name, value in ((f"{part}shape", [4]), (f"{part}dtype", "f"))}
OUTPUT |= {"stride": [1], "expected_stride": [1], "first_bad_index": 0, "lost_pct": 0.0, "baseline_lost_pct": 0.0}
CALL = {"count": 1, "structure": "tensor", "outputs": [OUTPUT]}
EXPECTED = {"expected_count": 1, "expected_structure": "tensor", "changes": [], "wrong_state": []}
FOUND = {**EXPECTED, "calls": [CALL], "random": False, "bland": [], "oracle": "fp64"}
CASE = {"variant": None}
TRANSPOSED, MISALIGNED = (
    {"variant": {"layout": f"{layout} inputs", "values": None}} for layout in ("transposed", "misaligned")
)
SIGNS = {"variant": {"layout": "contiguous", "values": "mixed signs"}}


def judged(case=CASE, done=None, output=None, libraries=False) -> str:
    found = {**FOUND, "calls": [{**CALL, "outputs": [{**OUTPUT, **(output or {})}]}]}
    return correctness.judge(case, {**DONE, **(done or {})}, found, libraries)["status"]


@pytest.mark.parametrize(
    ("done", "status"),
    [
        ({}, "OK"),
        ({"device": "cpu"}, "WRONG_DEVICE"),
        ({"mutated": [0]}, "INPUT_MUTATED"),
        ({"late": True}, "CHEAT_SUSPECT"),
        ({"aliased": True}, "ALIASED_OUTPUT"),
        ({"out_of_bounds": True}, "OUT_OF_BOUNDS"),
        ({"deterministic": False}, "OK"),  # reported, and allowed: atomics add in any order
    ],
)
def test_what_a_kernel_does_besides_its_result_counts(done, status):
    assert judged(done=done) == status


def test_a_variant_may_be_declined_aloud_and_not_answered_wrongly():
    raised = {"error": {"status": "RUNTIME_ERROR", "message": "ValueError: contiguous inputs only"}}
    crashed = {"error": {"status": "ILLEGAL_ACCESS", "message": "CUDA error: misaligned address"}}
    assert correctness.judge(TRANSPOSED, raised, None, False)["status"] == "DECLINED"
    assert correctness.judge(CASE, raised, None, False)["status"] == "RUNTIME_ERROR"
    assert correctness.judge(MISALIGNED, crashed, None, False)["status"] == "DECLINED"
    assert correctness.judge(TRANSPOSED, crashed, None, False)["status"] == "ILLEGAL_ACCESS"
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


def test_small_elements_may_not_be_lost_beside_large_ones():
    assert judged(output={"lost_pct": 40.0}) == "WRONG_VALUES"
    assert judged(output={"lost_pct": 4.0}) == judged(output={"lost_pct": 40.0, "baseline_lost_pct": 30.0}) == "OK"


def test_a_few_elements_may_turn_on_a_rounding_on_values_that_the_task_does_not_have():
    assert judged(SIGNS, output={"elements": 1000, "mismatches": 9}) == "OK"
    assert judged(SIGNS, output={"elements": 1000, "mismatches": 11}) == "WRONG_VALUES"
    assert judged(SIGNS, output={"spurious": 1}) == "NONFINITE"
    large = {"variant": {"layout": "contiguous", "values": "64 times the inputs"}}
    assert judged(large, output={"spurious": 1}) == "DOUBTFUL" and judged(large) == "OK"


def test_where_a_variant_has_no_finite_value_nothing_is_asked():
    assert judged(TRANSPOSED, output={"finite": 0, "nonfinite": 3}) == "OK"
    assert judged(TRANSPOSED, output={"finite": 3, "nonfinite": 1}) == "OK"
    infinite = {"finite": 3, "nonfinite": 1, "usually_finite": False}  # the task's own outputs have infinities as well
    assert judged(TRANSPOSED, output=infinite) == "NONFINITE"
    assert judged(output={"finite": 0}) == "INVALID_TASK"


def test_the_structure_of_the_result_and_what_a_call_leaves_of_the_state_count():
    found = {**FOUND, "calls": [{**CALL, "structure": "[tensor]"}]}
    assert correctness.judge(CASE, DONE, found, False)["status"] == "WRONG_SHAPE"
    unknown = {**FOUND, "calls": [{**CALL, "structure": None}]}  # outputs of timed calls
    assert correctness.judge(CASE, DONE, unknown, False)["status"] == "OK"
    changed = {**DONE, "changed": ["weight", "mean"]}
    assert correctness.judge(CASE, changed, FOUND, False)["status"] == "INPUT_MUTATED"
    both = {**FOUND, "changes": ["mean", "weight"]}
    assert correctness.judge(CASE, changed, both, False)["status"] == "OK"
    assert correctness.judge(CASE, changed, {**both, "wrong_state": ["mean"]}, False)["status"] == "WRONG_VALUES"
