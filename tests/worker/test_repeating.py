"""The same call again and again: how many differ, and which of them is judged."""

import itertools
import math

import pytest
import torch
from kernelopt.worker import repeating

NAN, INF = math.nan, math.inf


@pytest.fixture
def clock(monkeypatch):
    """Each look at the clock takes a second."""
    seconds = itertools.count()
    monkeypatch.setattr(repeating, "monotonic", lambda: next(seconds))


def test_of_the_calls_that_differ_the_farthest_is_kept(clock):
    first = torch.tensor([1.0, -8.0])
    off = iter([0.0, 0.5, 2.0, 1.0, 0.0])
    found = repeating.repeated(lambda: [first + torch.tensor([next(off), 0.0])], [first], 9, set())
    assert (found.calls, found.differing, found.distance) == (5, 3, 0.25)
    assert found.worst[0].tolist() == [3.0, -8.0]


def test_a_call_finds_no_former_result_in_its_memory_but_what_is_kept_stays(clock):
    output, weight, seen = torch.ones(2), torch.ones(2), []

    def call():
        seen.append((output.clone(), weight.clone()))
        return [output.fill_(2.0), weight]

    found = repeating.repeated(call, [torch.full((2,), 2.0), torch.ones(2)], 3, {weight.untyped_storage().data_ptr()})
    assert (found.calls, found.differing) == (2, 0) and not found.worst
    assert seen[1][0].isnan().all() and (seen[1][1] == 1).all()


def test_where_all_calls_differ_the_distances_of_some_are_measured(monkeypatch):
    clock, measured = [0.0], []
    monkeypatch.setattr(repeating, "monotonic", lambda: clock[0])

    def call():
        clock[0] += 1
        return [torch.full((2,), clock[0])]

    def distance(*_):
        clock[0] += 100
        measured.append(clock[0])
        return 1.0

    monkeypatch.setattr(repeating, "distance_of", distance)
    found = repeating.repeated(call, [torch.zeros(2)], 3, set())
    assert (found.calls, found.differing, len(measured)) == (3, 3, 1)


def test_a_clock_that_stands_still_ends_it_all_the_same(monkeypatch):
    monkeypatch.setattr(repeating, "monotonic", lambda: 0.0)
    assert repeating.repeated(lambda: [torch.ones(1)], [torch.ones(1)], 1.0, set()).calls == repeating.MOST


@pytest.mark.parametrize(
    ("left", "first", "distance"),
    [
        ([1.0, NAN], [1.0, NAN], 0.0),
        ([1.0, INF], [1.0, INF], 0.0),
        ([2.0, 4.0], [1.0, 4.0], 0.25),
        ([NAN, 4.0], [1.0, 4.0], INF),
        ([INF, 4.0], [1.0, 4.0], INF),
        ([0.5, 0.0], [0.0, 0.0], 0.5),
        ([], [], 0.0),
        ([1.0], [1.0, 1.0], INF),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_the_distance_is_that_of_the_element_that_is_farthest_off(left, first, distance, dtype):
    left, first = (torch.tensor(values).to(dtype) for values in (left, first))
    assert repeating.distance_of([left], [first]) == distance


def test_integers_booleans_and_complex_numbers_have_a_distance_too():
    pairs = [
        (torch.tensor([3, 4]), torch.tensor([2, 4]), 0.25),
        (torch.tensor([True, False]), torch.tensor([True, True]), 1.0),
        (torch.tensor([3 + 4j]), torch.tensor([3 + 2j]), 2 / 3),
    ]
    for left, first, distance in pairs:
        assert repeating.distance_of([left], [first]) == pytest.approx(distance)
