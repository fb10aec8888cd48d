"""benchmarks/explore.py: who may be the gate's choice, and who is. Its runs need a GPU."""

import importlib.util

import pytest
from conftest import BUNDLE


@pytest.fixture(scope="module")
def benchmark_of_explorations():
    spec = importlib.util.spec_from_file_location("explore_benchmark", BUNDLE / "benchmarks" / "explore.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(name: str, median: float) -> dict:
    return {"name": name, "latency_us": {"median": median}}


def test_leaders_and_those_close_to_one_are_compared(benchmark_of_explorations):
    runs = [[row("a", 100.0), row("b", 100.9), row("slow", 103.0)], [row("b", 99.0), row("a", 99.5)]]
    assert benchmark_of_explorations.contenders([*runs, runs[1]]) == ["b", "a"]


@pytest.mark.parametrize("order", ["abc", "bca", "cab"])
def test_the_choice_is_the_one_that_nothing_beats(benchmark_of_explorations, order):
    times = {"a": 100.0, "b": 98.0, "c": 98.1}

    def verdict(name: str, best: str) -> str:
        ratio = times[best] / times[name]
        return "FASTER" if ratio > 1.003 else "SLOWER" if ratio < 0.997 else "EQUAL"

    best, verdicts = benchmark_of_explorations.choice(list(order), verdict)
    assert best in "bc" and verdicts == {"a": "SLOWER", ("bc".replace(best, "")): "EQUAL"}


def test_a_run_in_which_nothing_was_right_in_time_is_reported(benchmark_of_explorations):
    late = {"name": "a", "opponent": False, "status": "TIMEOUT", "latency_us": None}
    right = {**row("a", 9.0), "opponent": False, "status": "OK"}
    runs = [{"device": "a card", "rows": [one], "total_s": 80.0} for one in (late, right)]
    report = benchmark_of_explorations.summary("softmax", runs, gate=False)
    assert report["right"] == [0, 1] and report["leaders"] == {None: 1, "a": 1}
    assert report["leader_us"] == [9.0] and report["led"] == "1 of 2"
    assert benchmark_of_explorations.summary("softmax", runs[:1], gate=True)["leaders"] == {None: 1}
