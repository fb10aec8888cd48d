"""Rounds of the loop with scripted agents: refinement, competition, restarts, limits."""

import json
import shutil
from dataclasses import replace

import pytest
from conftest import recorded
from kernelopt.errors import Refused, UsageError
from kernelopt.gate import history
from kernelopt.loop import strategies
from kernelopt.loop.stopping import STUCK
from kernelopt.session import record_store
from scripted_agents import (
    GOOD,
    LIMITS,
    SEVERAL,
    UNCITED,
    W,
    agent,
    kernel,
    log_lines,
    outcomes,
    run,
    scripted_loop,
    stand_in,
)


def test_a_good_agent_gains_every_round_until_the_rounds_are_over(ready):
    compared = recorded("v1", "").comparisons["default"]
    machine = replace(stand_in(ready), final=lambda: {"torch.compile": compared})
    result, lines = run(ready, GOOD, machine)
    assert lines[-1]["of"] == "v3 against torch.compile" and compared.verdict in lines[-1]["message"]
    assert outcomes(lines) == ["accepted"] * 3 + ["stop", "final"] and result.reason == "3 rounds are over"
    assert (
        result.best == "v3" == record_store.RecordStore(ready).best().version and "us = 60" in ready.kernel.read_text()
    )
    assert ready.git("worktree", "list").count("\n") == 0 and not (ready.root / ".loop" / "state.json").exists()
    status = json.loads((ready.root / ".loop" / "status.json").read_text())
    assert status["rounds_left"] == 0 and status["best"] == "v3" and status["now"] == "stopped: 3 rounds are over"
    assert 60 > status["minutes_left"] == pytest.approx(60 - result.minutes, abs=0.02)
    keys = ["reason", "met", "best", "latency_us", "rounds", "agent_calls", "restarts", "minutes", "final"]
    assert list(result.to_json()) == keys and result.to_json()["final"] == {"torch.compile": compared.to_json()}


def test_a_plan_is_mended_without_a_new_kernel_and_blocks_nobody_later(ready):
    """The plan is handed back. A figure that stays uncited costs that candidate alone; its kernel may come again."""
    machine = stand_in(ready)
    status = iter([("PLAN", "no Category"), *[("OK", "OK")] * 9])
    machine = replace(machine, check=lambda *_: next(status))
    limits = replace(LIMITS, rounds=1)
    result, lines = run(ready, agent(kernel(50)), machine, limits)
    assert outcomes(lines) == ["refined", "accepted", "stop"] and result.agent_calls == 2
    bad = agent(kernel(40), plan=UNCITED)
    (ready.root / ".loop" / "rounds.jsonl").unlink()
    limits = replace(LIMITS, rounds=2)
    command = f"if [ -e {W}/.loop/second ]; then {agent(kernel(40))}else touch {W}/.loop/second; {bad}fi"
    _, lines = run(ready, command, limits=limits)
    assert outcomes(lines) == ["refused plan", "accepted", "stop"], lines


def test_the_budget_of_calls_is_kept_with_several_candidates(ready):
    limits = replace(LIMITS, candidates=4, agent_calls=2, rounds=9)
    result, _ = run(ready, agent(kernel(500)), limits=limits)
    assert result.agent_calls == 2 and "calls of the agent" in result.reason


def test_a_kernel_of_a_former_run_is_not_judged_again(ready):
    one = replace(LIMITS, rounds=1)
    run(ready, agent(kernel(500)), limits=one)
    _, lines = run(ready, agent(kernel(500)), limits=one)
    assert outcomes(lines)[2:] == ["tried before", "stop"]


def test_an_error_is_handed_back_a_bounded_number_of_times(ready):
    mends = agent('if grep -q WRONG_VALUES <<< "$b"; then ' + kernel(50) + "else " + kernel(50, "WRONG = 1\\n") + "fi")
    mends = mends.replace("v=$(grep -o 'v[0-9]*' | head -1)", "b=$(cat); v=$(grep -o 'v[0-9]*' <<< \"$b\" | head -1)")
    one = replace(LIMITS, rounds=1)
    result, lines = run(ready, mends, limits=one)
    assert outcomes(lines) == ["refined", "accepted", "stop"] and result.agent_calls == 2
    never = agent("n=$RANDOM; " + kernel(40, "WRONG = $n\\n").replace("'END'", "END"))
    result, lines = run(ready, never, limits=one)
    assert outcomes(lines)[3:] == ["refined", "rejected", "stop"] and result.agent_calls == 2
    record = record_store.RecordStore(ready).read("v2")
    assert record.correctness.verify_status == "WRONG_VALUES"  # a failure is part of the history too


def test_the_same_kernel_is_not_judged_twice(ready):
    once = agent(kernel(500) + 'echo "# $v" >> kernel.py')
    result, lines = run(ready, once)
    assert outcomes(lines) == ["diverged", "tried before", "stop"] and result.reason.startswith(
        "no accepted gain in the last 2 rounds"
    )


def test_stuck_means_a_partial_restart_and_then_the_end(ready):
    masked = []
    machine = stand_in(ready)
    machine = replace(machine, restart=lambda: masked.append(1) or "masked v1")
    limits = replace(LIMITS, rounds=9, restarts=1)
    result, lines = run(ready, "true", machine, limits)
    assert outcomes(lines) == ["unchanged", "unchanged", "restart", "unchanged", "unchanged", "stop"]
    assert result.reason.startswith(STUCK) and masked == [1] and result.restarts == 1


def test_without_an_accepted_version_there_is_nothing_to_start_from(session):
    with pytest.raises(UsageError, match="make v0 first"):
        run(session, "true")


def test_candidates_of_a_round_compete_and_twins_are_dropped(ready):
    limits = replace(LIMITS, rounds=1, candidates=3)
    twins = SEVERAL.replace("10 * n", "10 * (n > 1 ? 1 : n)")
    result, lines = run(ready, twins, limits=limits)
    assert sorted(outcomes(lines)) == ["accepted", "accepted", "stop", "tried before"] and result.agent_calls == 3
    assert "us = 60" in ready.kernel.read_text() and result.best == "v2"


def test_on_several_gpus_the_fastest_of_a_round_is_accepted_and_the_others_meet_it(ready):
    limits = replace(LIMITS, rounds=1, candidates=3)
    machine, measured = stand_in(ready, slots=3), []
    counting = replace(machine, measure=lambda kernels: measured.append(len(kernels)) or machine.measure(kernels))
    result, lines = run(ready, SEVERAL, counting, limits)
    assert outcomes(lines) == ["accepted", "rejected", "rejected", "stop"] and measured == [3, 2]
    assert "us = 50" in ready.kernel.read_text() and result.best == "v1"
    against = [record_store.RecordStore(ready).read(v).comparison.against for v in ("v2", "v3")]
    assert against == ["v1", "v1"]  # each lost to the kernel that won, not to the one before it


def test_a_candidate_whose_judge_dies_is_dropped_and_named(ready):
    machine = stand_in(ready)
    machine = replace(machine, measure=lambda kernels: [Refused("it died")])
    result, lines = run(ready, GOOD, machine, replace(LIMITS, rounds=1))
    assert outcomes(lines) == ["not judged", "stop"] and "it died" in lines[0]["message"] and result.best == "v0"


def test_a_beam_starts_from_refused_versions_too_and_greed_from_the_best_alone(ready):
    """The second candidate begins with a slow kernel; each takes 5 us off what it finds, so the slow line goes on."""
    step = "n=$(grep -o 'us = [0-9]*' kernel.py | grep -o '[0-9]*'); n=${n:-100}; " + kernel(0).replace(
        "us = 0", "us = $((n - 5 + 90 * (${b: -1} * (n == 100))))"
    ).replace("'END'", "END")
    command = agent(step).replace("v=$(grep -o 'v[0-9]*' | head -1)", "b=$(cat)")
    limits = replace(LIMITS, rounds=2, candidates=2)
    _, lines = run(ready, command, limits=limits, strategy=strategies.Beam(2))
    assert outcomes(lines) == ["accepted", "diverged", "accepted", "diverged", "stop"]
    assert (
        "us = 90" in ready.kernel.read_text() and "us = 180" in (ready.root / "rejected" / "v4_kernel.py").read_text()
    )
    records = record_store.RecordStore(ready)
    assert strategies.Greedy().starts(records, 3) == ["v3"] * 3
    assert strategies.Beam(2).starts(records, 3) == ["v3", "v4", "v3"]
    assert strategies.Beam(9).starts(records, 4) == ["v3", "v4", "v2", "v3"]


def test_somebodys_own_work_is_not_written_over(ready):
    ready.kernel.write_text(ready.kernel.read_text() + "# mine\n")
    with pytest.raises(UsageError, match="is not the accepted v0"):
        run(ready, GOOD)
    assert ready.kernel.read_text().endswith("# mine\n")
    history.put_best_back(ready, record_store.RecordStore(ready).best())
    ready.plan("v1").write_text("a draft")
    with pytest.raises(UsageError, match="the plan of a version that was not judged"):
        run(ready, GOOD)
    assert ready.plan("v1").read_text() == "a draft"


def test_a_candidate_whose_files_are_gone_costs_that_candidate_alone(ready):
    clear = lambda: shutil.rmtree(ready.root / ".loop" / "candidates", ignore_errors=True)  # noqa: E731
    made = scripted_loop(ready, agent(kernel(80)))
    judge = made.judge.judge_waiting
    made.judge.judge_waiting = lambda: (clear(), judge())
    result = made.run()
    lines = log_lines(ready)
    assert outcomes(lines)[0] == "not judged" and "gone" in lines[0]["message"] and result.best == "v0"


def test_a_plan_that_stays_refused_takes_no_measurement(ready):
    measured = []
    machine = stand_in(ready)
    machine = replace(machine, check=lambda *_: ("PLAN", "no Risk"), measure=measured.append)
    _, lines = run(ready, agent(kernel(50)), machine, replace(LIMITS, rounds=1))
    assert outcomes(lines) == ["refined", "refused plan", "stop"] and measured == []
