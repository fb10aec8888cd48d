"""Draws against probabilities, and the generator that references share with Triton's kernels."""

import pytest
import torch
from kernelopt.worker import philox, sampling
from kernelopt.worker.contract import InvalidDeclaration

PARAMETERS = ("probs", "seed")
SAMPLING = sampling.read({0: {"tvd": 0.02, "draws": 200_000}}, PARAMETERS)[0]


def drawn(rows: torch.Tensor, calls: int) -> torch.Tensor:
    return torch.multinomial(rows, calls, replacement=True).T.contiguous()


def test_draws_that_follow_the_probabilities_pass_and_others_do_not():
    torch.manual_seed(0)
    rows = torch.softmax(torch.randn(3, 40), -1)
    assert sampling.distance(drawn(rows, 200_000), rows, SAMPLING) is None
    warmer = torch.softmax(rows.log() / 1.1, -1)
    assert "total variation distance of 0.0" in sampling.distance(drawn(warmer, 200_000), rows, SAMPLING)
    swapped = drawn(rows[[1, 0, 2]], 200_000)
    assert sampling.distance(swapped, rows, SAMPLING)
    assert "has shape" not in sampling.distance(swapped, rows, SAMPLING)
    assert "expected [3]" in sampling.distance(swapped[:, :2], rows, SAMPLING)


def test_a_draw_of_what_is_impossible_is_wrong_however_rare():
    rows = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.0, 0.8]])
    draws = drawn(rows, 1000)
    assert sampling.distance(draws, rows, SAMPLING) is None
    draws[700, 1] = 1
    assert "of probability 0" in sampling.distance(draws, rows, SAMPLING)


def test_equal_rows_count_as_one():
    rows = torch.softmax(torch.randn(1, 40), -1).expand(1000, 40)
    assert sampling.calls_needed(SAMPLING, rows, "cuda") == 200
    assert sampling.calls_needed(SAMPLING, torch.softmax(torch.randn(3, 40), -1), "cpu") == 400
    assert sampling.distance(drawn(rows, 200), rows, SAMPLING) is None
    few = sampling.read({0: {"tvd": 0.1, "draws": 2_000}}, PARAMETERS)[0]
    assert sampling.calls_needed(few, rows, "cuda") == 100 and sampling.calls_needed(few, rows, "cuda", False) == 1


@pytest.mark.parametrize(("values", "draws"), [(2, 8_000), (12, 8_000), (1000, 100_000)])
@pytest.mark.parametrize("likeliest", [0.5, 0.9])
def test_calls_suffice_to_see_one_of_many_equal_rows_that_always_draws_the_likeliest(likeliest, values, draws):
    torch.manual_seed(0)
    rows = torch.full((64, values), (1 - likeliest) / (values - 1))
    rows[:, 3 % values] = likeliest
    declared = sampling.read({0: {"tvd": 0.04, "draws": draws}}, PARAMETERS)[0]
    indices = drawn(rows, sampling.calls_needed(declared, rows, "cuda"))
    assert sampling.distance(indices, rows, declared) is None
    indices[:, -1] = rows[-1].argmax()
    assert "draws of row 63 alone" in sampling.distance(indices, rows, declared)


def test_each_request_gets_a_seed_of_its_own():
    assert sampling.reseeded([None, 5], 1, 9) == [None, 9]
    assert sampling.reseeded([torch.tensor([5])], 0, 9)[0].tolist() == [9]
    seeds = sampling.reseeded([torch.zeros(3, 100, dtype=torch.int32)], 0, 2**31 - 2)[0]
    assert seeds.min() >= 0 and len(seeds.unique()) == 300


def test_the_interpreter_draws_for_a_minute():
    def seconds():
        return iter(range(0, 1000, 25)).__next__

    assert list(sampling.in_time(range(9), "cpu", seconds())) == [0, 1]
    assert list(sampling.in_time(range(9), "cuda", seconds())) == list(range(9))


EQUAL = torch.softmax(torch.arange(10.0) / 4, 0).expand(64, 10)


def by_numbers(numbers: torch.Tensor) -> torch.Tensor:
    """What numbers between 0 and 1, (calls, rows), draw from EQUAL."""
    return torch.searchsorted(EQUAL[0].cumsum(0), numbers.contiguous()).clamp(max=9)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        (lambda calls: torch.rand(calls, 64), None),
        (lambda calls: torch.rand(calls, 1).expand(calls, 64), "neighbouring rows"),  # one number for all rows
        (
            lambda calls: torch.rand(calls, 32).repeat(1, 2),
            "2 times as much as by chance",
        ),  # the same numbers in two tiles
        (lambda calls: torch.linspace(0.01, 0.99, 64).expand(calls, 64), "draws of row 0 alone"),  # no seed
        (lambda calls: torch.rand(300, 64)[torch.arange(calls) % 300], "seeds gave the same draws"),  # its last bits
    ],
)
def test_rows_of_equal_probabilities_draw_each_for_itself(numbers, said):
    torch.manual_seed(0)
    loose = sampling.read({0: {"tvd": 0.1, "draws": 20_000}}, PARAMETERS)[0]
    why = sampling.distance(by_numbers(numbers(400)), EQUAL, loose)
    assert said in why if said else why is None, why


@pytest.mark.parametrize("values", [2, 10, 3000])
def test_rows_that_draw_for_themselves_vary_as_chance_has_it(values):
    torch.manual_seed(0)
    for rows in (2, 48, 1000):
        expected = torch.softmax(torch.randn(values, dtype=torch.float64), 0)
        drawn = torch.multinomial(expected, 400 * rows, replacement=True).view(400, rows)
        assert sampling.drawn_alike(drawn, values) is None
    pairs = drawn[:, :500].repeat(1, 2)
    assert "times as much as by chance" in sampling.drawn_alike(pairs, values)


def test_too_few_draws_for_the_declared_distance_are_said():
    assert sampling.too_few(sampling.read({0: {"tvd": 0.1, "draws": 20_000}}, PARAMETERS)[0], EQUAL, 400) is None
    alone = sampling.too_few(SAMPLING, EQUAL[:1], 400)
    assert alone.startswith("400 of 200000 declared draws, too few to see a distance below 0.1")


def test_fewer_draws_leave_more_room_and_too_few_declared_ones_are_said():
    rows = torch.softmax(torch.randn(1, 5000), -1)
    assert sampling.distance(drawn(rows, 2000), rows, SAMPLING) is None
    with pytest.raises(InvalidDeclaration, match="by chance alone"):
        sampling.distance(drawn(rows, 200_000), rows, SAMPLING)


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ([0], "must be a dict"),
        ({"probs": {}}, "has the key 'probs'"),
        ({0: {"tvd": 0.02}}, 'must hold "tvd" and "draws"'),
        ({0: {"tvd": 0.02, "draws": 10_000, "alpha": 1}}, 'must hold "tvd" and "draws"'),
        ({0: {"tvd": 0.9, "draws": 10_000}}, "tvd is 0.9"),
        ({0: {"tvd": 0.02, "draws": 3.5}}, "draws is 3.5"),
        ({0: {"tvd": 0.02, "draws": 10}}, "draws is 10"),
        ({0: {"tvd": 0.02, "draws": 10_000, "seed": "rng"}}, "no parameter 'rng'"),
    ],
)
def test_what_cannot_be_read(declared, said):
    with pytest.raises(InvalidDeclaration, match=said):
        sampling.read(declared, PARAMETERS)


def test_probabilities_that_are_none():
    for rows, said in (
        (torch.ones(3, 4), "do not sum to 1"),
        (torch.eye(4), "the likeliest index alone"),
        (torch.ones(3).long(), "must return probabilities"),
    ):
        with pytest.raises(InvalidDeclaration, match=said):
            sampling.check_probabilities(rows, SAMPLING)


def test_indices_out_of_range_or_of_no_probability_are_wrong():
    rows = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
    assert sampling.compare(torch.tensor([1, 2]), rows).errors.refused is None
    for wrong in ([2, 2], [3, 2], [-1, 2], [0, 0]):
        assert sampling.compare(torch.tensor(wrong), rows).errors.refused
    assert sampling.compare(torch.tensor([1.0, 2.0]), rows).errors is None
    assert sampling.compare(torch.tensor([[1], [2]]), rows).errors is None


def test_philox_gives_known_numbers():
    """The vectors for Philox 4x32-10 of the Random123 library's tests: counter and key of zeros."""
    numbers = [int(number) for number in philox.randint4(0, torch.zeros(1, dtype=torch.int64))]
    assert [f"{number:08x}" for number in numbers] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    uniform = philox.rand(7, torch.arange(100_000))
    assert uniform.min() >= 0 and uniform.max() < 1 and abs(float(uniform.mean()) - 0.5) < 0.01
