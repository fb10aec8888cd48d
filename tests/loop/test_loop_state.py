"""The pure parts of the loop: states and the steps between them, stop rules, fingerprints, the order of versions."""

import json
import time
from dataclasses import replace

from kernelopt.loop import strategies
from kernelopt.loop.agent_sandbox import Answer, classified, ended
from kernelopt.loop.fingerprints import fingerprint
from kernelopt.loop.loop import INTERRUPTED, TWIN, distinct
from kernelopt.loop.run_state import State, from_json, to_json
from kernelopt.loop.stopping import STUCK, stop_reason
from kernelopt.session import record_store
from kernelopt.session.record import PreviousComparison
from kernelopt.session.task import Target
from scripted_agents import LIMITS


def test_a_long_line_of_quotes_is_looked_at_in_no_time():
    start = time.monotonic()
    fingerprint('"' + '\\"' * 100_000)
    assert time.monotonic() - start < 5


def test_each_rule_stops():
    empty = record_store.empty("v0")
    performance = replace(empty.performance, workload="default", latency_us=100.0)
    best = replace(empty, performance=performance)
    target = Target(workload="default", metric="latency_us", target=1e9, unit="us", basis="the user")

    def reason(state, targets=(), share: float | None = 10.0):
        return stop_reason(State(**state), LIMITS, list(targets), best, share)

    assert reason({}) is None
    assert reason({}, [target]) == "the targets are met by v0"
    assert "v0 is at 97.0 % of the floor" in reason({}, share=97.0)
    assert reason({}, share=96.9) is None and reason({}, share=None) is None
    assert reason({"rounds": 3}) == "3 rounds are over" and reason({"spent_s": 3600.0}) == "60 minutes are over"
    assert "calls of the agent" in reason({"agent_calls": 20}) and reason({"without_gain": 2}) == STUCK


def test_fingerprints_see_code_and_nothing_else():
    same = fingerprint("def f(x):\n    '''Doc.'''\n    return x  # c\n")
    assert same == fingerprint("def f( x ):\n    return x") != fingerprint("def f(x): return x + 1")
    assert fingerprint("def f(:") == fingerprint(" def f(:\n") != fingerprint("def g(:")


def test_order_of_versions_by_the_chain_of_comparisons():
    def record(version, against, speedup, status="PASS"):
        compared = against and PreviousComparison(against, "FASTER", speedup, (speedup, speedup))
        empty = record_store.empty(version)
        performance = replace(empty.performance, comparison_with_previous=compared)
        return replace(empty, correctness=replace(empty.correctness, status=status), performance=performance)

    chain = [
        record("v0", None, None),
        record("v1", "v0", 2.0),
        record("v2", "v1", 0.5),
        record("v3", "v1", 4.0, "FAIL"),
    ]
    assert strategies.relative_times(chain) == {"v0": 1.0, "v1": 0.5, "v2": 1.0}
    assert strategies.relative_times([record("v5", "v4", 2.0)]) == {}  # the version that it was compared with is masked


def test_a_round_by_its_states():
    """Two candidates; one is valid, waits, and is accepted."""
    begun = State(rounds=4, gained=True, without_gain=2).round_begun(["a", "b"])
    assert (begun.rounds, begun.gained, begun.candidates) == (5, False, {"a": "", "b": ""})
    asked = begun.call_counted().call_counted().call_uncounted().candidate_valid("a", "12ab")
    assert asked.agent_calls == 1 and asked.candidates == {"a": "12ab", "b": ""}
    assert asked.distrusted().candidates == {"a": "", "b": ""}
    enqueued = asked.enqueued({"a": "f1"})
    assert (enqueued.candidates, enqueued.waiting, enqueued.tried) == ({}, ("a",), ("f1",))
    judging = enqueued.judging("a", "v3")
    accepted = judging.candidate_closed(True)
    assert (accepted.waiting, accepted.version, accepted.gained, accepted.without_gain) == ((), None, True, 0)
    assert accepted.all_judged().without_gain == 0 and judging.candidate_closed(False).all_judged().without_gain == 3
    assert begun == State(rounds=5, gained=False, without_gain=2, candidates={"a": "", "b": ""})  # nothing is changed


def test_what_a_state_forgets_and_keeps():
    waiting = State(waiting=("a", "b", "c"), tried=("f1", "f2"), rounds=2, without_gain=4)
    assert waiting.judging("c", "v9").waiting == ("c", "a", "b") and waiting.judged_next("b").version is None
    assert waiting.plan_refused("f1").tried == ("f2",)
    assert waiting.with_tried({"f2", "f0"}).tried == ("f1", "f2", "f0")
    assert waiting.enqueued({}, counted=False).rounds == 1
    assert (waiting.restarted().restarts, waiting.restarted().without_gain) == (1, 0)


def test_a_state_survives_its_file_and_nothing_else_is_a_state():
    state = State(candidates={"a": "1"}, waiting=("b",), version="v2", tried=("f",), spent_s=1.5, kept="ab")
    assert from_json(json.loads(json.dumps(to_json(state)))) == state
    for value in ([], {"waiting": ""}, {"rounds": "many"}, {"waiting": [1]}, {"candidates": []}, {"more": 1}):
        assert from_json(value) is None


def test_of_twins_in_a_round_the_first_is_judged():
    def answer(kernel: str) -> Answer:
        return Answer("answered", "", kernel, "a plan")

    answers = {"a": answer("x = 1"), "b": answer("x = 1  # again"), "c": answer("y = 1"), "d": INTERRUPTED}
    valid, failures = distinct(answers, {fingerprint("y = 1")})
    assert valid == {"a": fingerprint("x = 1")} and failures == {"b": TWIN, "c": TWIN, "d": INTERRUPTED}


def test_an_answer_is_named_by_the_first_rule_that_holds():
    def outcome(kernel: str | None, plan: str | None = "a plan") -> str:
        return classified({"kernel.py": kernel, "plan.md": plan}, "x = 0", {fingerprint("x = 9")})[0]

    assert outcome("x = 1") == "answered"
    assert outcome("x = 1", None) == "no plan"
    assert outcome("x = 9") == "tried before"
    assert outcome("x = 0 # the same") == "unchanged"
    assert outcome(None) == outcome(" ") == "no answer"
    assert outcome("x" * (1 << 20) + "y") == "too large"
    assert ended(None, "", 5) == ("timed out", "no answer within 5 s") and ended(0, "", 5) is None
    assert ended(1, "first\nlast\n", 5) == ("failed", "exit code 1: last")
