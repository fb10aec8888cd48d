"""What an exported kernel's file holds as Python text, and when two results are the same."""

import pytest
import torch
from kernelopt.worker import exported


@pytest.mark.parametrize(
    "value",
    [None, True, 3, -0.5, float("inf"), "a'b", torch.bfloat16, [1, (2,), ()], {"a": (torch.int8, None)}],
)
def test_a_constructors_argument_is_read_back_from_its_text(value):
    assert eval(exported.literal(value), {"torch": torch}) == value


@pytest.mark.parametrize("value", [torch.ones(2), [torch.ones(2)], {"a": len}, {1}])
def test_what_has_no_text_has_none(value):
    assert exported.literal(value) is None


def test_results_are_the_same_with_the_same_bits_and_the_same_changed_inputs():
    one = {"outputs": [torch.tensor([1.0, float("nan")])], "inputs": {0: torch.ones(2)}}
    assert exported.same_results(one, {**one, "outputs": [one["outputs"][0].clone()]})
    for other in ({"outputs": []}, {"inputs": {}}, {"inputs": {0: torch.zeros(2)}}, {"outputs": [torch.ones(2)]}):
        assert not exported.same_results(one, {**one, **other})


def test_new_contents_of_inputs_go_into_the_inputs():
    state = torch.zeros(2)
    output = torch.ones(3)
    assert exported.settled((output, torch.full((2,), 5.0)), [output, state], [1]) is output
    assert exported.settled(torch.full((2,), 7.0), [state], [0]) is None and state.tolist() == [7.0, 7.0]
    with pytest.raises(TypeError, match="a tensor or a tuple of tensors"):
        exported.settled({"y": output}, [], [])
