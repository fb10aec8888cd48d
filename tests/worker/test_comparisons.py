"""The modes of COMPARE, one by one, on tensors."""

import pytest
import torch
from kernelopt.case_types import OutputCheck
from kernelopt.worker import accuracy, comparisons
from kernelopt.worker.contract import InvalidDeclaration

PARAMETERS = ("scores", "lengths")


def compared(actual, expected, modes: dict, inputs=(), baseline=None) -> OutputCheck:
    declared = comparisons.read(0, modes, PARAMETERS)
    exact = expected.double() if expected.is_floating_point() else expected
    baseline = expected if baseline is None else baseline
    return comparisons.compare(actual, accuracy.Bounds(exact, baseline, 1e-4), declared, list(inputs))


def right(*arguments, **options) -> bool:
    return not compared(*arguments, **options).errors.any


EXPECTED = torch.linspace(-2, 2, 1000)


def off(count: int, by: float) -> torch.Tensor:
    actual = EXPECTED.clone()
    actual[:count] += by
    return actual


@pytest.mark.parametrize(
    ("modes", "actual", "expected"),
    [
        ({"atol": 0.01}, off(1000, 0.009), True),
        ({"atol": 0.01}, off(1, 0.011), False),
        ({"rtol": 0.01}, 1.009 * EXPECTED, True),
        ({"rtol": 0.01}, 1.011 * EXPECTED, False),
        ({"atol": 0.01, "share": 0.99}, off(10, 0.1), True),
        ({"atol": 0.01, "share": 0.99}, off(11, 0.1), False),
        ({"atol": 0.01, "share": 0.99}, off(1, 3.0), False),  # no cap is declared, and it is off by more than itself
        ({"atol": 0.01, "share": 0.99, "cap": 0.05}, off(10, 0.1), False),
        ({"atol": 0.01, "share": 0.99, "cap": 0.2}, off(10, 0.1), True),
        ({"share": 0.99}, off(10, 0.1), True),
        ({"cap": 0.1}, off(1000, 1e-3), False),  # the usual bound holds beside a cap
        ({"rms": 0.005}, off(1000, 0.005), True),
        ({"rms": 0.005}, off(1000, 0.007), False),
        ({"rms": 0.005}, off(1, 3.0), False),
        ({"rms": 0.005, "cap": 0.002}, off(1000, 0.005), False),
        ({"atol": 9.0, "share": 0.99}, off(1, float("nan")), False),
        ({"atol": 9.0, "rms": 0.1}, off(1, float("inf")), False),
    ],
)
def test_bounds(modes, actual, expected):
    assert right(actual, EXPECTED, modes) == expected


def test_whole_numbers_may_be_off_by_one():
    expected = torch.randint(-127, 128, (40, 25), dtype=torch.int8)
    actual = expected.clone()
    actual[0, :5] = expected[0, :5] ^ 1
    assert comparisons.compare(actual, accuracy.Bounds(expected, expected, 0.0), None, []).errors.any
    assert right(actual, expected, {"atol": 1, "share": 0.99}) and right(actual, expected, {"atol": 1})
    actual[0, 0] = 100 if expected[0, 0] < 0 else -100
    assert not right(actual, expected, {"atol": 1, "share": 0.99})


def test_one_of_few_elements_may_be_off_where_a_share_may():
    expected = torch.tensor([5, -7, 100], dtype=torch.int8)
    modes = {"atol": 0, "share": 0.98, "cap": 1}
    assert right(expected + torch.tensor([0, 1, 0], dtype=torch.int8), expected, modes)
    assert not right(expected + 1, expected, modes) and not right(expected * 0, expected, modes)


def test_of_few_elements_as_many_may_be_off_as_chance_explains():
    """2 of 25 are, in one case of eleven, where each is with a probability of 2 %."""
    expected = torch.arange(25, dtype=torch.int8)
    actual = expected + (expected < 2).to(torch.int8)
    modes = {"atol": 0, "share": 0.98, "cap": 1}
    assert right(actual, expected, modes) and not right(actual, expected, {"atol": 0, "cap": 1})
    assert not right(expected + (expected < 7).to(torch.int8), expected, modes)
    assert [comparisons.may_be_off(0.98, total) for total in (1, 25, 255, 256, 1000)] == [1, 5, 15, 6, 20]
    assert comparisons.may_be_off(1.0, 25) == 0


def test_an_element_near_the_reference_in_the_tasks_dtype_is_right_too():
    baseline = EXPECTED + 0.3
    assert right(baseline.clone(), EXPECTED, {"atol": 0.01}, baseline=baseline)


SCORES = torch.tensor([[3.0, 1.0, 3.0, 2.0, 2.0], [0.0, 5.0, 4.0, 4.0, 1.0]])


@pytest.mark.parametrize(
    ("indices", "expected"),
    [
        ([[0, 2, 3], [1, 2, 3]], True),
        ([[2, 0, 4], [1, 3, 2]], True),  # ties the other way round
        ([[0, 0, 3], [1, 2, 3]], False),  # twice
        ([[0, 2, 1], [1, 2, 3]], False),  # another score
        ([[0, 2, 5], [1, 2, 3]], False),  # beyond the last
        ([[0, 2, -2], [1, 2, 3]], False),
        ([[0, 3, 2], [1, 2, 3]], False),  # not in the order of the scores
    ],
)
def test_ties_may_go_either_way(indices, expected):
    reference = torch.tensor([[0, 2, 3], [1, 2, 3]])
    assert right(torch.tensor(indices), reference, {"ties": "scores"}, [SCORES]) == expected


def test_ties_of_one_index_a_row_and_within_a_bound():
    reference = torch.tensor([0, 1])
    assert right(torch.tensor([2, 1]), reference, {"ties": "scores"}, [SCORES])
    assert not right(torch.tensor([3, 1]), reference, {"ties": "scores"}, [SCORES])
    assert right(torch.tensor([3, 1]), reference, {"ties": "scores", "atol": 1.0}, [SCORES])


def products(x, weight):
    """The scores that the kernel computes by itself."""
    return x.double() @ weight.double().t()


@pytest.mark.parametrize(
    ("indices", "modes", "expected"),
    [
        ([0, 1], {}, True),
        ([2, 1], {}, True),  # a tie of the computed scores
        ([3, 1], {"atol": 1e-3}, True),
        ([3, 1], {"rtol": 2**-12}, True),  # 3 - 2^-11 for 3
        ([3, 1], {"rtol": 2**-13}, False),
        ([3, 1], {}, False),
        ([1, 1], {"atol": 1e-3}, False),
        ([4, 1], {"atol": 1e-3}, False),
    ],
)
def test_ties_of_scores_that_a_function_computes(indices, modes, expected):
    x, weight = torch.eye(2), torch.tensor([[3.0, 0.0], [1.0, 5.0], [3.0, 4.0], [3.0 - 2**-11, 1.0]])
    assert right(torch.tensor(indices), torch.tensor([0, 1]), {"ties": products, **modes}, [x, weight]) == expected


def test_a_function_of_scores_gets_the_inputs_that_it_names():
    indices = torch.tensor([2, 1])
    assert right(indices, torch.tensor([0, 1]), {"ties": lambda scores: scores}, [SCORES, torch.ones(2)])
    assert right(indices, torch.tensor([0, 1]), {"ties": torch.add}, [SCORES, torch.ones(2, 1)])  # it tells no names


@pytest.mark.parametrize("low", [-float("inf"), float("nan")])
def test_an_infinite_score_allows_no_other_and_the_same_index_is_right(low):
    scores = torch.tensor([[low, 0.0], [1.0, 2.0]])
    modes = {"ties": "scores", "rtol": 0.5}
    assert right(torch.tensor([0, 1]), torch.tensor([0, 1]), modes, [scores])
    assert not right(torch.tensor([1, 1]), torch.tensor([0, 1]), modes, [scores])


@pytest.mark.parametrize(
    ("scores", "why"),
    [
        (lambda scores: scores[:, :1], "the reference's own indices reach beyond the last dimension of scores of"),
        (lambda x: x.tolist(), "needs an output of whole numbers and a tensor of scores"),
        (lambda x: x[:, :, None], "do not point along the last dimension"),
        (lambda x: x.no_such_thing, "`ties` in COMPARE raises AttributeError"),
    ],
)
def test_a_function_of_scores_that_returns_none_is_a_wrong_declaration(scores, why):
    with pytest.raises(InvalidDeclaration, match=why):
        compared(torch.tensor([0, 1]), torch.tensor([0, 1]), {"ties": scores}, [SCORES])


def test_ties_where_a_mask_says_so():
    reference, actual = torch.tensor([[0, -1, -1], [1, 2, -1]]), torch.tensor([[2, -1, 9], [1, 3, 0]])
    modes = {"ties": "scores", "valid": lambda lengths: torch.arange(3) < lengths[:, None]}
    assert right(actual, reference, modes, [SCORES, torch.tensor([1, 2])])
    assert not right(actual, reference, modes, [SCORES, torch.tensor([2, 2])])


@pytest.mark.parametrize(
    ("indices", "expected"),
    [
        ([[4, 0, 2], [3, 1, -1]], True),  # in another order, and none where the reference has none
        ([[3, 0, 2], [2, -1, 1]], True),  # tied ones, too
        ([[4, 0, 0], [3, 1, -1]], False),
        ([[4, 0, 1], [3, 1, -1]], False),
        ([[4, 0, 2], [3, 1, 2]], False),
        ([[4, 0, -1], [3, 1, -1]], False),
        ([[4, 0, 2], [3, 1, 5]], False),
    ],
)
def test_ties_in_any_order_of_a_row(indices, expected):
    reference = torch.tensor([[0, 2, 4], [1, 3, -1]])
    assert right(torch.tensor(indices), reference, {"ties": "scores", "set": -1}, [SCORES]) == expected


@pytest.mark.parametrize(
    ("indices", "modes", "why"),
    [
        ([[0, 2, 4], [1, 3, 5]], {}, "1 index is wrong: 5 in row 1 at place 2 is out of range"),
        ([[0, 2, 2], [1, 3, 3]], {}, "2 indices are wrong; the first: 2 in row 0 at place 2 comes twice in its row"),
        ([[0, 2, 4], [1, 0, 4]], {}, "2 indices are wrong; the first: 0 in row 1 at place 1 points to another score"),
        ([[4, 2, 0], [5, 3, 1]], {"set": -1}, "1 row has wrong indices: 5 in row 1 at place 0 is out of range"),
        (
            [[4, 2, 1], [2, 3, 0]],
            {"set": -1},
            "2 rows have wrong indices; the first: 1 in row 0 at place 2 points to another score",
        ),
    ],
)
def test_wrong_indices_are_told_by_row_place_and_cause(indices, modes, why):
    scores, reference = torch.tensor([[5.0, 4, 3, 2, 1]] * 2), torch.tensor([[0, 2, 4], [1, 3, 2]])
    errors = compared(torch.tensor(indices), reference, {"ties": "scores", **modes}, [scores]).errors
    assert errors.refused.startswith(why), errors.refused


def test_a_wrong_index_where_the_reference_has_none_and_one_a_row():
    reference, modes = torch.tensor([[0, 2, 4], [1, 3, -1]]), {"ties": "scores", "set": -1}
    errors = compared(torch.tensor([[4, 0, 2], [3, 1, 2]]), reference, modes, [SCORES]).errors
    assert "2 in row 1 at place 2 stands where the reference has none" in errors.refused
    errors = compared(torch.tensor([0, 0]), torch.tensor([0, 1]), {"ties": "scores"}, [SCORES]).errors
    assert errors.refused == "1 index is wrong: 0 in row 1 points to another score than the reference's"


def test_ties_of_other_shapes_are_a_wrong_declaration():
    with pytest.raises(InvalidDeclaration, match="do not point along the last dimension"):
        compared(torch.zeros(4, 3).long(), torch.zeros(4, 3).long(), {"ties": "scores"}, [SCORES])


def test_sets_along_a_dimension_in_groups_and_by_offsets():
    expected = torch.tensor([[1, 2, 3], [4, 5, 6]])
    shuffled, across = expected[:, [2, 0, 1]], expected.flatten()[[3, 1, 2, 0, 4, 5]].view(2, 3)
    for modes in ({"set": -1}, {"set": 1}, {"set": lambda scores: torch.tensor([[0] * 3, [1] * 3])}):
        assert right(shuffled, expected, modes, [SCORES]) and not right(across, expected, modes, [SCORES])
    assert not right(torch.tensor([[1, 1, 3], [4, 5, 6]]), expected, {"set": -1})
    offsets = torch.tensor([0, 3, 3, 6])
    rows = torch.tensor([1, 2, 3, 4, 5, 6])
    assert right(rows[[2, 1, 0, 5, 3, 4]], rows, {"set": "lengths"}, [SCORES, offsets])
    assert not right(rows[[3, 1, 2, 0, 4, 5]], rows, {"set": "lengths"}, [SCORES, offsets])


def test_sets_of_floats_are_equal_within_the_bound():
    expected = torch.randn(4, 50)
    assert right(expected.flip(-1) * (1 + 1e-6), expected, {"set": -1})
    assert not right(expected.flip(-1) * 1.01, expected, {"set": -1})


def test_only_what_is_valid_counts():
    expected = torch.randn(4, 6)
    actual = expected.clone()
    actual[1, 3:] = float("nan")
    rows = {"valid": lambda scores, lengths: torch.arange(4) != 1}
    cells = {"valid": lambda lengths: torch.arange(6) < lengths[:, None]}
    assert right(actual, expected, rows, [SCORES, None])
    assert right(actual, expected, cells, [SCORES, torch.tensor([6, 3, 6, 6])])
    wrong = compared(actual, expected, cells, [SCORES, torch.tensor([6, 4, 6, 6])])
    assert wrong.errors.nonfinite == 1 and wrong.errors.first_bad_index == 9
    with pytest.raises(InvalidDeclaration, match="must return a tensor of bool"):
        compared(actual, expected, {"valid": lambda lengths: lengths}, [SCORES, torch.tensor([6])])
    with pytest.raises(InvalidDeclaration, match=r"returns the shape \[5\]"):
        compared(actual, expected, {"valid": lambda: torch.ones(5).bool()}, [])


def test_what_is_declared_is_shown():
    modes = {"atol": 0.1, "share": 0.99, "valid": lambda lengths: lengths}
    assert comparisons.read(0, modes, PARAMETERS).to_json() == {"atol": 0.1, "share": 0.99, "valid": "<lambda>"}
    assert comparisons.read(0, {"set": -1}, PARAMETERS).to_json() == {"set": -1}
