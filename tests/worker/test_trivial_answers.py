"""Answers that compute nothing, on tasks that would take them and on others (worker.trivial_answers)."""

import torch
from kernelopt.worker import trivial_answers
from kernelopt.worker.expected_outputs import ChangedInput, ExpectedOutput


def bland(result, *inputs, other, bound=1e-4):
    oracle = result.double() if result.dtype == torch.float32 else result
    return trivial_answers.bland([ExpectedOutput(result, oracle, bound, list(inputs))], list(inputs), [other])


def test_answers_without_work_are_seen_on_trivial_tasks_alone():
    x, y = torch.randn(2, 50)
    assert bland(x.exp(), x, other=y.exp()) == []
    assert bland(torch.zeros(4), x, other=torch.zeros(4)) == ["an output of zeros", "the result of another call"]
    assert bland(x * 1, y, x, other=y) == []  # only the first input of that shape is tried
    assert bland(x * 1, x, other=y) == ["an input"]
    assert bland(torch.zeros(0), x, other=torch.zeros(0)) == []


def test_trivial_answers_of_eight_bit_floats():
    result = torch.tensor([1.0, 2.0, 4.0]).to(torch.float8_e4m3fn)
    assert bland(result, other=result, bound=0.125) == ["the result of another call"]


def test_a_declared_input_may_not_stay_unless_the_reference_changes_another_tensor_of_the_argument():
    before, after = torch.zeros(4), torch.ones(4)

    def changed(result: torch.Tensor, number: int) -> ExpectedOutput:
        return ExpectedOutput(result, result.double(), 1e-4, [], changed=ChangedInput(number, "caches", before))

    untouched, moved = changed(before, 0), changed(after, 1)
    assert not trivial_answers.may_stay(moved, [moved])
    assert trivial_answers.may_stay(untouched, [untouched])
    assert not trivial_answers.may_stay(untouched, [untouched, moved])
