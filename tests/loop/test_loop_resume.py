"""A run that is killed or stopped loses nothing, repeats nothing and leaves no process."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from conftest import BUNDLE, copy_of
from kernelopt.errors import EnvironmentLacks, UsageError
from kernelopt.loop import executors, gpu_steps, snapshot, trials
from kernelopt.session import record_store
from scripted_agents import (
    GOOD,
    LIMITS,
    STOPPABLE,
    UNCITED,
    W,
    agent,
    kernel,
    killer,
    nap,
    outcomes,
    program,
    run,
    run_until_killed,
    running,
    scripted_loop,
    stand_in,
)


def test_killed_while_it_takes_back_a_killed_run_it_goes_on_all_the_same(ready, monkeypatch):
    run_until_killed(ready, GOOD, "while the agent works")
    discard = snapshot.discard

    def killed(root):
        discard(root)
        raise KeyboardInterrupt

    monkeypatch.setattr(snapshot, "discard", killed)
    with pytest.raises(KeyboardInterrupt):
        run(ready, GOOD, resume=True)
    monkeypatch.setattr(snapshot, "discard", discard)
    assert run(ready, GOOD, resume=True)[0].best == "v3"


def test_told_to_stop_it_ends_its_agents_at_once_and_a_resumed_run_ends_those_of_a_killed_one(ready, tmp_path):
    code = STOPPABLE + program(ready, f"echo > {tmp_path}/began; sleep {nap(303)}")
    for number in (signal.SIGTERM, signal.SIGKILL):
        process = subprocess.Popen([sys.executable, "-c", code.replace(".run()", f".run({number == 9})")])
        while not (tmp_path / "began").exists():
            time.sleep(0.05)
        start = time.monotonic()
        process.send_signal(number)
        process.wait()
        assert time.monotonic() - start < LIMITS.agent_timeout_s - 5
        (tmp_path / "began").unlink()
    _, lines = run(ready, "true", limits=replace(LIMITS, rounds=3), resume=True)
    assert "stop" in outcomes(lines)
    assert not running(nap(303))


def test_started_by_nohup_in_the_background_it_is_stopped_by_sigterm_alone(ready, tmp_path):
    """A shell without job control has what it puts into the background ignore SIGINT, nohup has it ignore SIGHUP."""
    loop = program(ready, f"echo > {tmp_path}/began; sleep {nap(306)}")
    code = f"from kernelopt import cli\ncli.run(lambda: exec({loop!r}))"
    background = ["nohup", "bash", "-c", "trap '' INT; exec \"$@\"", "bash", sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(BUNDLE / "tools")}
    process = subprocess.Popen(background, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while not (tmp_path / "began").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    for number in (signal.SIGINT, signal.SIGHUP):
        process.send_signal(number)
    time.sleep(0.3)
    assert process.poll() is None and running(nap(306))
    process.terminate()
    assert process.wait(10) == 128 + signal.SIGTERM and not running(nap(306))


def test_a_run_is_not_begun_twice_and_needs_a_baseline(started, ready, tmp_path):
    with pytest.raises(UsageError, match="no accepted version to start from"):
        run(copy_of(started, tmp_path / "without v0"), "true")
    (ready.root / ".loop").mkdir()
    (ready.root / ".loop" / "state.json").write_text(json.dumps({"rounds": 1}))
    with pytest.raises(UsageError, match="--resume"):
        run(ready, "true")
    assert run(ready, "true", resume=True)[0].rounds == 3  # two more


@pytest.mark.parametrize(
    "place",
    ["while the agent works", "before the verdict", "before the record", "after the record", "between line and state"],
)
def test_a_killed_run_goes_on_without_losing_or_repeating_an_accepted_round(ready, place):
    run_until_killed(ready, GOOD, place)
    result, lines = run(ready, GOOD, resume=True)
    records = record_store.RecordStore(ready)
    accepted = [record.version for record in records.records() if record.git_commit_hash]
    assert accepted[0] == "v0" and len(accepted) == len(set(accepted)) and result.best == accepted[-1]
    assert outcomes(lines).count("accepted") == len(accepted) - 1 >= 2
    subjects = ready.git("log", "--format=%s").splitlines()
    assert len(subjects) == len(set(subjects)) == len(accepted) + 1  # and the session's start
    times = [
        ready.file_at(record.git_commit_hash, "kernel.py").decode().partition("us = ")[2].split()[:1]
        for record in records.records()[1:]
    ]
    assert times == sorted(times, reverse=True) and len({str(t) for t in times}) == len(times)


@pytest.mark.parametrize(
    ("evil", "resumed"),
    [
        ("", ["interrupted", "accepted"]),
        (f"echo x > {W}/notes.txt; ", ["interrupted"] * 2),
        (f"echo x >> {W}/.loop/candidates/round1-0.py; ", ["interrupted"] * 2),
    ],
    ids=["a right one", "the workspace is changed", "its kernel is changed"],
)
def test_a_right_answer_outlives_a_kill_while_another_agent_works(ready, evil, resumed):
    """A round that comes to nothing by it is not counted."""
    run_until_killed(ready, killer(evil), candidates=2)
    gained = "accepted" in resumed
    result, lines = run(ready, "true", limits=replace(LIMITS, rounds=2 + gained, patience=9), resume=True)
    assert outcomes(lines) == [*resumed, "unchanged", "unchanged", "stop"], lines
    assert result.best == ("v1" if gained else "v0") and result.rounds == 2 + gained


def test_stopped_in_the_comparison_at_the_end_it_says_so_and_comes_to_the_same_end(ready):
    def dies():
        raise KeyboardInterrupt

    limits = replace(LIMITS, rounds=1)
    with pytest.raises(KeyboardInterrupt):
        run(ready, GOOD, replace(stand_in(ready), final=dies), limits)
    assert "ended by KeyboardInterrupt" in json.loads((ready.root / ".loop" / "status.json").read_text())["now"]
    result, lines = run(ready, GOOD, limits=limits, resume=True)
    assert outcomes(lines) == ["accepted", "stop"] and result.best == "v1"


def test_an_accepted_version_is_noted_though_a_refused_plan_came_before_it(ready):
    bad = UNCITED
    command = f"if [ $(basename $PWD) = round1-0 ]; then {agent(kernel(60), plan=bad)} else {agent(kernel(50))} fi"
    limits = replace(LIMITS, rounds=1, candidates=2, refinements=0)
    made = scripted_loop(ready, command, limits=limits)
    log = made.progress.log

    def dies(outcome, of, message):
        if outcome == "accepted":
            raise KeyboardInterrupt
        log(outcome, of, message)

    made.progress.log = dies
    with pytest.raises(KeyboardInterrupt):
        made.run()
    assert "ended by KeyboardInterrupt" in json.loads((ready.root / ".loop" / "status.json").read_text())["now"]
    _, lines = run(ready, command, limits=limits, resume=True)
    assert [(line["of"], line["outcome"]) for line in lines] == [
        ("round1-0", "refused plan"),
        ("v1", "accepted"),
        (None, "stop"),
    ]


def test_killed_in_a_partial_restart_it_still_tries_the_rounds_after_it(ready):
    machine = stand_in(ready)

    def dies():
        raise KeyboardInterrupt

    limits = replace(LIMITS, rounds=9, restarts=1, patience=1)
    with pytest.raises(KeyboardInterrupt):
        run(ready, "true", replace(machine, restart=dies), limits)
    _, lines = run(ready, "true", limits=limits, resume=True)
    assert outcomes(lines) == ["unchanged", "unchanged", "stop"]


class Examining(executors.Executor):
    """A process of its own, without a GPU."""

    slots = 1

    def examine(self, job, packed):
        return trials.examine(job, packed, self.timeout_s)

    def profile(self, version, say):
        raise EnvironmentLacks("no GPU here")

    def stop(self):
        trials.end_all()


def test_told_to_stop_it_waits_for_no_verification(ready, tmp_path, monkeypatch, interruptible):
    """The process that verifies is stood in for by one that sleeps."""
    sleeper = tmp_path / "python"
    sleeper.write_text(f"#!/bin/sh\nexec sleep {nap(304)}\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr(trials.sys, "executable", str(sleeper))
    executor = Examining(ready, 600)
    own = gpu_steps.GpuSteps(ready, executor, print)
    limits = replace(LIMITS, rounds=1)
    plain = replace(stand_in(ready), check=own.check, measure=executor.measure, stop=executor.stop)

    def end():
        while not running(nap(304)):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    start = time.monotonic()
    threading.Thread(target=end).start()
    with pytest.raises(KeyboardInterrupt):
        run(ready, agent(kernel(50)), plain, limits)
    assert time.monotonic() - start < 10 and not running(nap(304))


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"waiting": ""}',
        '{"rounds": "many"}',
        '{"waiting": [1]}',
        '{"waiting": null}',
        '{"more": 1}',
    ],
)
def test_a_state_that_is_none_is_refused_and_kept(ready, text):
    path = ready.root / ".loop" / "state.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(UsageError, match="is no state of a run"):
        run(ready, "true", resume=True)
    assert path.read_text() == text
