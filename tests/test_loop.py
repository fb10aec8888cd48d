"""The loop with scripted agents of several characters. What needs a GPU is stood in for: a kernel's time is what it says of itself,
and the evidence of its round is a recorded one of an H200 with that time put in."""

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import BUNDLE, FIXTURES, kernel_text
from kernelopt.errors import EnvironmentLacks, Refused, UsageError
from kernelopt.gate import history, readiness, rounds
from kernelopt.loop import agents, executors, gpu_steps, loop, remote, snapshot, strategies
from kernelopt.session import record_store
from kernelopt.session.workspace import Workspace

PLAN = (
    "## Category\\nmemory_traffic\\n## Action\\nOne pass.\\n## Expected effect\\nHalf the time.\\n## Risk\\nSpills.\\n"
)
UNCITED = "## Evidence\\nOne pass at 3.9 TB/s.\\n" + PLAN
GREEDY = strategies.Greedy()
LIMITS = loop.Limits(rounds=3, minutes=60, agent_calls=20, patience=2, restarts=0, refinements=1, agent_timeout_s=20)


@dataclass(frozen=True)
class StandInMachine:
    """loop.Machine, each of its methods given as a function."""

    brief: Callable
    check: Callable
    measure: Callable
    restart: Callable
    slots: int = 1
    stop: Callable = lambda: None
    final: Callable = dict


def stand_in(workspace: Workspace, wrong: str = "WRONG", share: float = 10.0, slots: int = 1) -> StandInMachine:
    """A machine without a GPU. A kernel with the word WRONG in it is wrong; `us = N` is its time."""

    def microseconds(text: str) -> float:
        return float(text.partition("us = ")[2].split()[0]) if "us = " in text else 100.0

    def check(kernel, plan):
        return ("WRONG_VALUES", "WRONG_VALUES: off") if wrong in kernel.read_text() else ("OK", "OK")

    def measured(kernel: bytes) -> rounds.Evidence:
        found = json.loads((FIXTURES / "h200_row_softmax" / "gate_v1.json").read_text())
        best, text = record_store.Memory(workspace).best(), kernel.decode()
        ratio = microseconds(workspace.file_at(best["git_commit_hash"], "kernel.py").decode()) / microseconds(text)
        comparison = found["timing"]["comparisons"]["default"]
        comparison["verdict"] = "FASTER" if ratio > 1 else "SLOWER"
        comparison["speedup"] = {"point": ratio, "ci95": [ratio, ratio]}
        if wrong in text:
            found["verify"] |= {"status": "WRONG_VALUES", "summary": "WRONG_VALUES: off"}
        found["utilization"]["floor_share_pct"] = share
        return rounds.Evidence(
            hashlib.sha256(kernel).hexdigest(),
            found["verify"],
            found["timing"]["latencies"],
            found["utilization"],
            found["timing"]["comparisons"],
            best["version"],
        )

    def brief(version: str, number: int) -> str:
        return f"brief for {record_store.Memory(workspace).next_version()}, from {version}, candidate {number}"

    return StandInMachine(brief, check, lambda kernels: [measured(kernel) for kernel in kernels], lambda: None, slots)


def agent(body: str, plan: str = PLAN) -> str:
    """A command that writes the plan of the version in the brief, and runs `body`, a line of bash that knows $v."""
    return f"v=$(grep -o 'v[0-9]*' | head -1); printf '{plan}' > plan.md; {body}"


def kernel(us: int, more: str = "") -> str:
    text = kernel_text(f"us = {us}\\n{more}return torch.relu(x * self.weight) * self.scale".replace("\\n", "\n"))
    return f"cat > kernel.py <<'END'\n{text}\nEND\n"


GOOD = agent("n=${v#v}; " + kernel(0).replace("us = 0", "us = $((90 - 10 * n))").replace("'END'", "END"))


def run(
    workspace, command: str, machine=None, limits=LIMITS, resume=False, strategy=GREEDY, final=None
) -> tuple[dict, list[dict]]:
    """(the loop's result, the lines of rounds.jsonl)"""
    result = loop.Loop(workspace, command, limits, machine or stand_in(workspace), lambda _: None, strategy).run(resume)
    return result, [json.loads(line) for line in (workspace.root / ".loop" / "rounds.jsonl").read_text().splitlines()]


def outcomes(lines: list[dict]) -> list[str]:
    return [line["outcome"] for line in lines]


def test_a_good_agent_gains_every_round_until_the_rounds_are_over(ready):
    compared = json.loads((FIXTURES / "h200_row_softmax" / "gate_v1.json").read_text())["timing"]["comparisons"][
        "default"
    ]
    machine = replace(stand_in(ready), final=lambda: {"torch.compile": compared})
    result, lines = run(ready, GOOD, machine)
    assert lines[-1]["of"] == "v3 against torch.compile" and compared["verdict"] in lines[-1]["message"]
    assert outcomes(lines) == ["accepted"] * 3 + ["stop", "final"] and result["reason"] == "3 rounds are over"
    assert (
        result["best"] == "v3" == record_store.Memory(ready).best()["version"] and "us = 60" in ready.kernel.read_text()
    )
    assert ready.git("worktree", "list").count("\n") == 0 and not (ready.root / ".loop" / "state.json").exists()
    status = json.loads((ready.root / ".loop" / "status.json").read_text())
    assert status["rounds_left"] == 0 and status["best"] == "v3" and status["now"] == "stopped: 3 rounds are over"
    assert 60 > status["minutes_left"] == pytest.approx(60 - result["minutes"], abs=0.02)


@pytest.mark.parametrize(
    ("command", "outcome", "says"),
    [
        ("exit 3", "failed", "exit code 3"),
        ("echo sorry; exit 1", "failed", "sorry"),
        ("sleep 60", "timed out", "no answer within"),
        ("true", "unchanged", "what it was"),
        ("echo '# a comment' >> kernel.py", "unchanged", "comments and layout"),
        ("rm kernel.py", "no answer", "no kernel.py"),
        (agent("echo x = 1 >> kernel.py; rm plan.md"), "no plan", "plan.md"),
        (agent(kernel(50) + "echo x > notes.txt; echo y > reference.py"), "forbidden files", "notes.txt, reference.py"),
        (agent(kernel(50) + "git add -A; git commit -qm x; echo z > z.txt"), "forbidden files", "z.txt"),
        (agent(kernel(50) + "echo hi >> ../../../memory/v0.json"), "forbidden files", "memory/v0.json"),
        (agent(kernel(50) + "cd ../../..; git commit -q --allow-empty -m sly"), "forbidden files", "HEAD"),
        (agent(kernel(500)), "diverged", "SLOWER"),
        (agent(kernel(110)), "rejected", "SLOWER"),
        (agent(kernel(50), plan="no plan"), "refused plan", "Category"),
    ],
)
def test_whatever_an_agent_does_has_a_name_and_leaves_the_best(ready, command, outcome, says):
    before = ready.kernel.read_bytes()
    record, commits = (ready.memory / "v0.json").read_bytes(), ready.git("rev-list", "--count", "HEAD")
    limits = replace(LIMITS, rounds=1, agent_timeout_s=2 if "sleep" in command else 20)
    result, lines = run(ready, command, limits=limits)
    assert outcomes(lines) == [outcome, "stop"], lines
    assert says in lines[0]["message"] and result["best"] == "v0" and ready.kernel.read_bytes() == before
    assert (ready.memory / "v0.json").read_bytes() == record and ready.git("rev-list", "--count", "HEAD") == commits


DEEP = "python3 -c \"import os; [(os.mkdir('a' * %d), os.chdir('a' * %d)) for _ in range(%d)]\""
W = "../../.."  # the workspace, from a desk


def files_but_git(workspace: Workspace) -> dict[str, str]:
    return {name: token for name, token in snapshot.everything(workspace.root).items() if not name.startswith(".git/")}


@pytest.mark.parametrize(
    "evil",
    [
        f"mkdir {W}/plans/v1_plan.md",
        f"mkfifo {W}/memory/v7.json",
        f"rm -r {W}/memory; touch {W}/memory",
        f"rm {W}/kernel.py; mkdir {W}/kernel.py",
        f"rm -r {W}/plans; ln -s /tmp {W}/plans",
        f"echo x > {W}/notes.txt",
        f"git -C {W} config core.fsmonitor /bin/false; git -C {W} config core.bare true",
        f"echo 'kernel.py filter=x' > {W}/.git/info/attributes",
        f"git -C {W} symbolic-ref HEAD refs/heads/other",
        f"rm -r {W}/*.md {W}/*.py",
        f"git -C {W} replace -f HEAD:kernel.py $(echo 'us = 500' | git -C {W} hash-object -w --stdin)",
        f"rm -rf {W}/.git/objects/*",
        f"rm -rf {W}/.git",
        f"git init -q --bare other; echo $PWD/other > {W}/.git/commondir",
        f"echo 0000000000000000000000000000000000000000 > {W}/.git/info/grafts",
        f"touch {W}/.git/refs/heads/main.lock; echo x > {W}/x",
        f"rm -rf {W}/.loop/taken; touch {W}/.loop/taken; echo x > {W}/x",
        f"echo x > {W}/$(printf 'x%.0s' $(seq 255))",
        f"chmod 000 {W}/memory; echo x > {W}/x",
        f"rm {W}/link",
        f"chmod +x {W}/reference.py",
        f"rm -rf {W}/memory",
        f"rm -rf {W}/.loop; touch {W}/.loop",
        f"echo '{{{{' > {W}/memory/v0.json",
        f"sed -i 's/H200/H999/' {W}/README.md",
        f"mkdir -p {W}/.loop/taken/1_v1.json; cp {W}/memory/v0.json {W}/memory/v1.json",
        f"rm {W}/.git/config; mkfifo {W}/.git/config",
        f"rm {W}/.git/HEAD; mkfifo {W}/.git/HEAD",
        f"cd {W}/.git; {DEEP % (1, 1, 1100)}",
        f"cd {W}/.git; {DEEP % (200, 200, 40)}",
    ],
)
def test_what_an_agent_does_to_the_workspace_is_put_back_and_the_next_round_goes_on(ready, evil):
    (ready.root / "link").symlink_to("kernel.py")
    before = files_but_git(ready)
    command = agent(f"if [ ! -e {W}/../done ]; then touch {W}/../done; {evil}; fi; " + kernel(50))
    limits = replace(LIMITS, rounds=2)
    result, lines = run(ready, command, limits=limits)
    assert outcomes(lines) == ["forbidden files", "accepted", "stop"], lines
    assert "in the workspace itself" in lines[0]["message"] or ".loop" in evil  # where its own desk went, too
    assert result["best"] == "v1"
    after = files_but_git(ready)
    assert all(after[name] == before[name] for name in before if name != "kernel.py")
    assert ready.file_at("HEAD", "kernel.py") == ready.kernel.read_bytes()
    snapshot.remove(ready.root / ".loop" / "taken")  # too deep for pytest to clear away


def test_nothing_outside_the_workspace_is_moved(ready, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("years")
    links = f"rm -rf {W}/memory; for name in rejected memory; do ln -s {tmp_path}/precious {W}/$name; done"
    _, lines = run(ready, agent(links + "; " + kernel(50)), limits=replace(LIMITS, rounds=1))
    assert outcomes(lines) == ["forbidden files", "stop"] and not ready.memory.is_symlink()
    assert [path.name for path in (tmp_path / "precious").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    "evil",
    [
        f"git -C {W} update-index --skip-worktree kernel.py",
        f"git -C {W} update-index --assume-unchanged kernel.py",
        f"touch {W}/.git/index.lock",
        "rm -rf .git",
        f"rm -rf {W}/.loop/state.json; mkdir {W}/.loop/state.json",
        f"rm {W}/.loop/kept.tar; mkdir {W}/.loop/kept.tar",
        f"rm -f {W}/.git/index; mkdir {W}/.git/index",
        f"rm -rf {W}/.git/logs; touch {W}/.git/logs",
        f"rm {W}/.git/logs/HEAD; mkfifo {W}/.git/logs/HEAD",
        f"rm {W}/.git/kernelopt-lock; mkdir {W}/.git/kernelopt-lock",
        f"rm -rf {W}/.loop/candidates; touch {W}/.loop/candidates",
        f"mkdir -p {W}/.loop/candidates/round1-0.py/x",
    ],
)
def test_no_trick_with_git_or_the_loops_own_files_changes_what_is_committed(ready, evil):
    _, lines = run(ready, agent(evil + "; " + kernel(90)), limits=replace(LIMITS, rounds=1))
    assert outcomes(lines) == ["accepted", "stop"], lines
    record = record_store.Memory(ready).read("v1")
    assert record["performance"]["comparison_with_previous"]["speedup"] == pytest.approx(100 / 90)
    assert hashlib.sha256(ready.file_at("HEAD", "kernel.py")).hexdigest() == record["kernel_sha256"]


def test_where_one_of_a_round_meddles_none_counts_and_no_forgery_stays(ready):
    forge = f"""sed -i 's/"floor_share_pct": [0-9.]*/"floor_share_pct": 99.0/' {W}/memory/v0.json"""
    command = SEVERAL.replace("cat > kernel.py", "[ $n = 0 ] && " + forge + "; sleep 0.3; cat > kernel.py", 1)
    limits = replace(LIMITS, rounds=1, candidates=2)
    record = (ready.memory / "v0.json").read_bytes()
    _, lines = run(ready, command, limits=limits)
    assert outcomes(lines) == ["forbidden files"] * 2 + ["stop"] and (ready.memory / "v0.json").read_bytes() == record


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        ("printf '(%.0s' $(seq 3000) >> kernel.py", "diverged"),
        ("printf 'x = %s\\n' \"$(printf '0x%06000d' 1)\" >> kernel.py", "diverged"),
        ("head -c 2000000 /dev/zero | tr '\\0' '#' >> kernel.py", "too large"),
        ("head -c 100000 /dev/zero | tr '\\0' x >> plan.md", "too large"),
        ("rm kernel.py; mkfifo kernel.py", "no answer"),
        ("rm kernel.py; mkdir kernel.py", "no answer"),
        ("rm kernel.py plan.md; mkdir plan.md", "no answer"),
        (
            "for i in $(seq 200); do d=$d/ddddddddddddddddddddddddd; done; mkdir -p .$d; cd .$d; mkdir -p .$d",
            "forbidden files",
        ),
        ("rm kernel.py; ln -s reference.py kernel.py", "no answer"),
        ("printf '\\033[2J\\a'; exit 3", "failed"),
    ],
)
def test_odd_texts_have_a_name_too(ready, body, outcome):
    _, lines = run(ready, agent(kernel(500) + body), limits=replace(LIMITS, rounds=1))
    assert outcomes(lines) == [outcome, "stop"], lines
    assert lines[0]["message"].isprintable()


def test_a_plan_is_mended_without_a_new_kernel_and_blocks_nobody_later(ready):
    """The plan is handed back; a figure that stays uncited costs that candidate alone, and its kernel may come again."""
    machine = stand_in(ready)
    status = iter([("PLAN", "no Category"), *[("OK", "OK")] * 9])
    machine = StandInMachine(machine.brief, lambda *_: next(status), machine.measure, machine.restart)
    limits = replace(LIMITS, rounds=1)
    result, lines = run(ready, agent(kernel(50)), machine, limits)
    assert outcomes(lines) == ["refined", "accepted", "stop"] and result["agent_calls"] == 2
    bad = agent(kernel(40), plan=UNCITED)
    (ready.root / ".loop" / "rounds.jsonl").unlink()
    limits = replace(LIMITS, rounds=2)
    command = f"if [ -e {W}/.loop/second ]; then {agent(kernel(40))}else touch {W}/.loop/second; {bad}fi"
    _, lines = run(ready, command, limits=limits)
    assert outcomes(lines) == ["refused plan", "accepted", "stop"], lines


def test_what_an_agent_leaves_running_is_ended_with_it(ready, tmp_path):
    leaves = f"set -m; sleep {nap(301)} & echo $! > {tmp_path}/a; setsid sleep {nap(302)} & sleep 0.2; echo $! > {tmp_path}/b"
    _, lines = run(ready, agent(kernel(50) + leaves), limits=replace(LIMITS, rounds=1))
    assert outcomes(lines) == ["accepted", "stop"]
    assert not running(nap(301)) and not running(nap(302))


def nap(seconds: int) -> str:
    """An argument of sleep that no other run of the tests on this machine has."""
    return f"{seconds}.{os.getpid()}"


def running(word: str) -> list[Path]:
    """Processes with that word among their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += [path] * (word.encode() in path.read_bytes().split(b"\0"))
    return found


def test_the_budget_of_calls_is_kept_with_several_candidates(ready):
    limits = replace(LIMITS, candidates=4, agent_calls=2, rounds=9)
    result, _ = run(ready, agent(kernel(500)), limits=limits)
    assert result["agent_calls"] == 2 and "calls of the agent" in result["reason"]


def test_a_kernel_of_a_former_run_is_not_judged_again(ready):
    one = replace(LIMITS, rounds=1)
    run(ready, agent(kernel(500)), limits=one)
    _, lines = run(ready, agent(kernel(500)), limits=one)
    assert outcomes(lines)[2:] == ["tried before", "stop"]


def test_masked_rounds_are_not_on_the_desk(ready, tmp_path):
    run(ready, agent(kernel(500)), limits=replace(LIMITS, rounds=1))
    run(ready, agent(kernel(90)), limits=replace(LIMITS, rounds=1))  # commits the plan of v1 too
    record_store.Memory(ready).set_masked(["v1"], True)
    looks = f"ls plans > {tmp_path}/plans; git log --oneline > {tmp_path}/log"
    run(ready, looks, limits=replace(LIMITS, rounds=1))
    assert (tmp_path / "plans").read_text().split() == ["v2_plan.md"]
    assert (tmp_path / "log").read_text().count("\n") == 1


def test_masked_plans_are_in_no_history_on_the_desk(ready, tmp_path):
    run(ready, agent("n=${v#v}; " + kernel(90)), limits=replace(LIMITS, rounds=1))
    records = record_store.Memory(ready)
    records.save({**records.read("v1"), "masked": True})
    assert "plans/v1_plan.md" in ready.git("ls-files")
    look = f"git log --patch --all > {tmp_path}/log; git diff HEAD >> {tmp_path}/log; git status --short > {tmp_path}/status"
    run(ready, look, limits=replace(LIMITS, rounds=1))
    assert "One pass" not in (tmp_path / "log").read_text() and not (tmp_path / "status").read_text()


def test_a_users_file_is_not_written_through_a_link_and_what_was_taken_is_kept(ready, tmp_path):
    (tmp_path / "thesis").write_text("years")
    link = f"ln -sf {tmp_path}/thesis {W}/.git/index; ln -sf {tmp_path}/thesis {W}/.git/kernelopt-lock"
    edits = f"echo new > {W}/a.txt; echo new > {W}/b.txt"
    limits = replace(LIMITS, rounds=2)
    result, _ = run(ready, agent(f"{link}; {edits}; " + kernel(50)), limits=limits)
    with ready.locked():
        assert (tmp_path / "thesis").read_text() == "years" and result["best"] == "v0"
    taken = sorted(path.name.partition("_")[2] for path in (ready.root / ".loop" / "taken").iterdir())
    assert taken == ["a.txt", "a.txt", "b.txt", "b.txt"]


def test_a_commit_of_the_users_own_stays_whatever_it_is_called(ready):
    record_store.Memory(ready).create("v1")
    (ready.root / "notes.txt").write_text("mine")
    own = ready.commit("V1: my notes")
    run(ready, "true", limits=replace(LIMITS, rounds=1))
    assert ready.git("rev-parse", "HEAD") == own


def test_what_an_agents_process_forges_while_candidates_are_measured_is_put_back(ready):
    machine = stand_in(ready)

    def measured(kernels):
        found = machine.measure(kernels)
        shutil.copy(ready.memory / "v0.json", ready.memory / "v9.json")
        return found

    outlived = replace(machine, measure=measured)
    _, lines = run(ready, agent(kernel(50)), outlived, replace(LIMITS, rounds=1))
    assert outcomes(lines) == ["put back", "accepted", "stop"] and not (ready.memory / "v9.json").exists()


def test_without_what_it_had_kept_a_killed_run_trusts_nothing(ready):
    forge = f"cp {W}/memory/v0.json {W}/memory/v1.json; rm {W}/.loop/kept.tar; kill -9 $PPID; sleep 5"
    run_until_killed(ready, forge)
    with pytest.raises(UsageError, match=r"kept\.tar is not what the run kept"):
        run(ready, "true", resume=True)


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
    assert run(ready, GOOD, resume=True)[0]["best"] == "v3"


def test_a_commit_between_a_kill_and_the_next_run_is_kept_and_named(ready):
    ready.git("branch", "idea", ready.git("commit-tree", "HEAD^{tree}", "-m", "an idea"))
    snapshot.Kept.of(ready)
    (ready.root / "notes.txt").write_text("mine")
    own, said = ready.commit("my work"), []
    assert snapshot.Kept.left(ready.root).put_back(
        lambda: None
    )  # as optimize_kernel.py does where more than that is gone
    made = loop.Loop(ready, "true", LIMITS, stand_in(ready), said.append, GREEDY)
    made.begin(resume=True)
    assert ready.git("log", "-1", "--format=%s") != "my work"
    assert "put back" not in " ".join(said)  # it was told, and is told once
    assert ready.git("rev-parse", f"refs/kernelopt/taken-{own[:10]}") == own
    assert outcomes(run(ready, agent(kernel(50)))[1])[0] == "accepted"  # whatever other branches there are


def test_a_long_line_of_quotes_is_looked_at_in_no_time():
    start = time.monotonic()
    agents.fingerprint('"' + '\\"' * 100_000)
    assert time.monotonic() - start < 5


def test_a_message_with_half_a_character_is_handed_back(ready):
    plain = stand_in(ready)
    odd = replace(plain, check=lambda *_: ("WRONG_VALUES", "off \ud800"))
    _, lines = run(ready, agent(kernel(50)), odd, replace(LIMITS, rounds=1))
    assert outcomes(lines)[0] == "refined" and outcomes(lines)[-1] == "stop"


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
    code = f"from kernelopt import cli\ncli.run(lambda: exec({program(ready, f'echo > {tmp_path}/began; sleep {nap(306)}')!r}))"
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


@pytest.mark.parametrize(
    "command", ["no-such-agent --fast", "./kernel.py", "exec /no/such/agent", "true && no-such-agent"]
)
def test_an_agents_command_that_is_none_ends_the_run_and_another_goes_on(ready, command):
    with pytest.raises(EnvironmentLacks, match=r"cannot be run: bash: line 1: .*--resume"):
        run(ready, command)
    result, lines = run(ready, GOOD, resume=True)
    assert result["best"] == "v3" and outcomes(lines) == ["interrupted", *["accepted"] * 3, "stop"]
    assert result["agent_calls"] == 3  # the one that was none is not counted


def test_an_error_is_handed_back_a_bounded_number_of_times(ready):
    mends = agent('if grep -q WRONG_VALUES <<< "$b"; then ' + kernel(50) + "else " + kernel(50, "WRONG = 1\\n") + "fi")
    mends = mends.replace("v=$(grep -o 'v[0-9]*' | head -1)", "b=$(cat); v=$(grep -o 'v[0-9]*' <<< \"$b\" | head -1)")
    one = replace(LIMITS, rounds=1)
    result, lines = run(ready, mends, limits=one)
    assert outcomes(lines) == ["refined", "accepted", "stop"] and result["agent_calls"] == 2
    never = agent("n=$RANDOM; " + kernel(40, "WRONG = $n\\n").replace("'END'", "END"))
    result, lines = run(ready, never, limits=one)
    assert outcomes(lines)[3:] == ["refined", "rejected", "stop"] and result["agent_calls"] == 2
    record = record_store.Memory(ready).read("v2")
    assert record["correctness"]["verify_status"] == "WRONG_VALUES"  # a failure is part of the history too


def test_the_same_kernel_is_not_judged_twice(ready):
    once = agent(kernel(500) + 'echo "# $v" >> kernel.py')
    result, lines = run(ready, once)
    assert outcomes(lines) == ["diverged", "tried before", "stop"] and result["reason"].startswith(
        "no accepted gain in the last 2 rounds"
    )


def test_stuck_means_a_partial_restart_and_then_the_end(ready):
    masked = []
    machine = stand_in(ready)
    machine = StandInMachine(machine.brief, machine.check, machine.measure, lambda: masked.append(1) or "masked v1")
    limits = replace(LIMITS, rounds=9, restarts=1)
    result, lines = run(ready, "true", machine, limits)
    assert outcomes(lines) == ["unchanged", "unchanged", "restart", "unchanged", "unchanged", "stop"]
    assert result["reason"].startswith(loop.STUCK) and masked == [1] and result["restarts"] == 1


def test_each_rule_stops(ready):
    best = record_store.Memory(ready).best()
    target = {"workload": "default", "metric": "latency_us", "target": 1e9, "unit": "us"}
    reason = lambda state, targets=(), record=best: loop.stop_reason(loop.State(**state), LIMITS, list(targets), record)  # noqa: E731
    assert reason({}) is None
    assert reason({}, [target]) == "the targets are met by v0"
    near = {**best, "performance": {**best["performance"], "floor_share_pct": 96.0}}
    assert "of the floor" in reason({}, record=near)
    assert reason({"rounds": 3}) == "3 rounds are over" and reason({"spent_s": 3600.0}) == "60 minutes are over"
    assert "calls of the agent" in reason({"agent_calls": 20}) and reason({"without_gain": 2}) == loop.STUCK


def test_a_run_is_not_begun_twice_and_needs_a_baseline(session, ready):
    (ready.root / ".loop").mkdir()
    (ready.root / ".loop" / "state.json").write_text(json.dumps({"rounds": 1}))
    with pytest.raises(UsageError, match="--resume"):
        run(ready, "true")
    assert run(ready, "true", resume=True)[0]["rounds"] == 3  # two more


def test_without_an_accepted_version_there_is_nothing_to_start_from(session):
    with pytest.raises(UsageError, match="make v0 first"):
        run(session, "true")


KILLED = """
import os, sys
sys.path[:0] = [{tools!r}, {tests!r}]
from pathlib import Path
import test_loop
from kernelopt.gate import rounds
from kernelopt.loop import loop
from kernelopt.session import record_store
from kernelopt.session.workspace import Workspace
workspace = Workspace(Path({root!r}))
machine = test_loop.stand_in(workspace)
place = {place!r}
die = lambda *_, **__: os.kill(os.getpid(), 9)
if place == "before the record":
    commit = Workspace.commit
    Workspace.commit = lambda *arguments: (commit(*arguments), die())
elif place == "after the record":
    settle = rounds.settle
    rounds.settle = lambda *arguments: (settle(*arguments), die())
elif place == "between line and state":
    note = loop.Loop.note
    loop.Loop.note = lambda *arguments: (note(*arguments), die())
elif place == "before the verdict":
    machine = test_loop.StandInMachine(machine.brief, machine.check, die, machine.restart)
elif place == "while the agent works":
    machine = test_loop.StandInMachine(machine.brief, die, machine.measure, machine.restart)
limits = test_loop.replace(test_loop.LIMITS, candidates={candidates})
loop.Loop(workspace, {agent!r}, limits, machine, print, test_loop.GREEDY).run()
"""


STOPPABLE = "import signal, sys\nsignal.signal(15, lambda *_: sys.exit(143))\n"


def program(workspace: Workspace, command: str, place: str = "", candidates: int = 1) -> str:
    """A run in a process of its own, which is killed at that place."""
    folders = {"tools": str(BUNDLE / "tools"), "tests": str(BUNDLE / "tests"), "root": str(workspace.root)}
    return KILLED.format(agent=command, place=place, candidates=candidates, **folders)


def run_until_killed(*arguments, **options) -> None:
    """`program`, killed at its place or by its agent."""
    done = subprocess.run([sys.executable, "-c", program(*arguments, **options)], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize(
    "place",
    ["while the agent works", "before the verdict", "before the record", "after the record", "between line and state"],
)
def test_a_killed_run_goes_on_without_losing_or_repeating_an_accepted_round(ready, place):
    run_until_killed(ready, GOOD, place)
    result, lines = run(ready, GOOD, resume=True)
    records = record_store.Memory(ready)
    accepted = [record["version"] for record in records.records() if record["git_commit_hash"]]
    assert accepted[0] == "v0" and len(accepted) == len(set(accepted)) and result["best"] == accepted[-1]
    assert outcomes(lines).count("accepted") == len(accepted) - 1 >= 2
    subjects = ready.git("log", "--format=%s").splitlines()
    assert len(subjects) == len(set(subjects)) == len(accepted) + 1  # and the session's start
    times = [
        ready.file_at(r["git_commit_hash"], "kernel.py").decode().partition("us = ")[2].split()[:1]
        for r in records.records()[1:]
    ]
    assert times == sorted(times, reverse=True) and len({str(t) for t in times}) == len(times)


@pytest.mark.parametrize(
    ("evil", "found"),
    [
        ("", ["interrupted", "accepted"]),
        (f"echo x > {W}/notes.txt; ", ["interrupted"] * 2),
        (f"echo x >> {W}/.loop/candidates/round1-0.py; ", ["interrupted"] * 2),
    ],
    ids=["a right one", "the workspace is changed", "its kernel is changed"],
)
def test_a_right_answer_outlives_a_kill_while_another_agent_works(ready, evil, found):
    """A round that comes to nothing by it is not counted."""
    run_until_killed(ready, killer(evil), candidates=2)
    gained = "accepted" in found
    result, lines = run(ready, "true", limits=replace(LIMITS, rounds=2 + gained, patience=9), resume=True)
    assert outcomes(lines) == [*found, "unchanged", "unchanged", "stop"], lines
    assert result["best"] == ("v1" if gained else "v0") and result["rounds"] == 2 + gained


def killer(evil: str) -> str:
    """Agents of which the second does something evil and kills the loop, once the first has answered."""
    right = f"""until grep -q '"round1-0": "[0-9a-f]' {W}/.loop/state.json; do sleep 0.05; done"""
    kills = f"if [ $n = 1 ]; then {right}; {evil}kill -9 $PPID; sleep 9; fi; cat > kernel.py"
    return SEVERAL.replace("cat > kernel.py", kills, 1)


def test_killed_while_it_puts_back_no_answer_of_the_round_counts_later(ready, monkeypatch):
    run_until_killed(ready, killer(f"echo x > {W}/notes.txt; "), candidates=2)
    aside = snapshot.Kept._put_aside

    def killed(own, name):
        aside(own, name)
        raise KeyboardInterrupt

    monkeypatch.setattr(snapshot.Kept, "_put_aside", killed)
    with pytest.raises(KeyboardInterrupt):
        run(ready, "true", resume=True)
    monkeypatch.setattr(snapshot.Kept, "_put_aside", aside)
    _, lines = run(ready, "true", limits=replace(LIMITS, rounds=1), resume=True)
    assert outcomes(lines) == ["interrupted", "interrupted", "unchanged", "stop"]


def test_stopped_in_the_comparison_at_the_end_it_says_so_and_comes_to_the_same_end(ready):
    def dies():
        raise KeyboardInterrupt

    limits = replace(LIMITS, rounds=1)
    with pytest.raises(KeyboardInterrupt):
        run(ready, GOOD, replace(stand_in(ready), final=dies), limits)
    assert "ended by KeyboardInterrupt" in json.loads((ready.root / ".loop" / "status.json").read_text())["now"]
    result, lines = run(ready, GOOD, limits=limits, resume=True)
    assert outcomes(lines) == ["accepted", "stop"] and result["best"] == "v1"


def test_a_hanging_agent_leaves_no_process(ready, tmp_path):
    mark = tmp_path / "pid"
    code, _, took = agents.run(f"(sleep 300 & echo $! > {mark}; wait)", "brief", tmp_path, 1.0)
    assert code is None and took < 10
    time.sleep(0.1)
    stat = Path(f"/proc/{mark.read_text().strip()}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"  # nobody may have reaped it yet


def test_an_agent_that_does_not_read_its_brief_is_no_crash(tmp_path):
    code, log, _ = agents.run("echo done", "x" * 10_000_000, tmp_path, 20)
    assert code == 0 and log == "done\n"


def test_fingerprints_see_code_and_nothing_else():
    same = agents.fingerprint("def f(x):\n    '''Doc.'''\n    return x  # c\n")
    assert same == agents.fingerprint("def f( x ):\n    return x") != agents.fingerprint("def f(x): return x + 1")
    assert agents.fingerprint("def f(:") == agents.fingerprint(" def f(:\n") != agents.fingerprint("def g(:")


def test_candidates_of_a_round_compete_and_twins_are_dropped(ready):
    limits = replace(LIMITS, rounds=1, candidates=3)
    twins = SEVERAL.replace("10 * n", "10 * (n > 1 ? 1 : n)")
    result, lines = run(ready, twins, limits=limits)
    assert sorted(outcomes(lines)) == ["accepted", "accepted", "stop", "tried before"] and result["agent_calls"] == 3
    assert "us = 60" in ready.kernel.read_text() and result["best"] == "v2"


SEVERAL = agent("n=${b: -1}; " + kernel(0).replace("us = 0", "us = $((70 - 10 * n))").replace("'END'", "END")).replace(
    "v=$(grep -o 'v[0-9]*' | head -1)", "b=$(cat)"
)


def test_on_several_gpus_the_fastest_of_a_round_is_accepted_and_the_others_meet_it(ready):
    limits = replace(LIMITS, rounds=1, candidates=3)
    machine = stand_in(ready, slots=3)
    measured = []
    machine = StandInMachine(
        machine.brief,
        machine.check,
        lambda kernels: measured.append(len(kernels)) or machine_measure(kernels),
        machine.restart,
        3,
    )
    machine_measure = stand_in(ready, slots=3).measure
    result, lines = run(ready, SEVERAL, machine, limits)
    assert outcomes(lines) == ["accepted", "rejected", "rejected", "stop"] and measured == [3, 2]
    assert "us = 50" in ready.kernel.read_text() and result["best"] == "v1"
    against = [
        record_store.Memory(ready).read(v)["performance"]["comparison_with_previous"]["against"] for v in ("v2", "v3")
    ]
    assert against == ["v1", "v1"]  # each lost to the kernel that won, not to the one before it


def test_a_candidate_whose_judge_dies_is_dropped_and_named(ready):
    machine = stand_in(ready)
    machine = StandInMachine(machine.brief, machine.check, lambda kernels: [Refused("it died")], machine.restart)
    result, lines = run(ready, GOOD, machine, replace(LIMITS, rounds=1))
    assert outcomes(lines) == ["not judged", "stop"] and "it died" in lines[0]["message"] and result["best"] == "v0"


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
    records = record_store.Memory(ready)
    assert strategies.Greedy().starts(records, 3) == ["v3"] * 3
    assert strategies.Beam(2).starts(records, 3) == ["v3", "v4", "v3"]
    assert strategies.Beam(9).starts(records, 4) == ["v3", "v4", "v2", "v3"]


def test_order_of_versions_by_the_chain_of_comparisons():
    def record(version, against, speedup, status="PASS"):
        compared = against and {"against": against, "speedup": speedup}
        return {
            "version": version,
            "correctness": {"status": status},
            "performance": {"comparison_with_previous": compared},
        }

    chain = [
        record("v0", None, None),
        record("v1", "v0", 2.0),
        record("v2", "v1", 0.5),
        record("v3", "v1", 4.0, "FAIL"),
    ]
    assert strategies.relative_times(chain) == {"v0": 1.0, "v1": 0.5, "v2": 1.0}
    assert strategies.relative_times([record("v5", "v4", 2.0)]) == {}  # what it was held against is masked


def test_what_is_packed_is_enough_to_judge_elsewhere_and_says_what_this_machine_lacks(ready):
    packed = remote.pack("verify", ready, b"x = 1\n")
    for what in ("verify", "measure"):
        with pytest.raises(EnvironmentLacks, match="no NVIDIA GPU here"):
            remote.examine(what, packed, 60)
    with pytest.raises(Refused, match="died, exit 1"):
        remote.examine("verify", b"no archive", 60)


@pytest.mark.skipif(not hasattr(tarfile, "data_filter"), reason="this Python cannot filter what it unpacks")
def test_what_a_trial_unpacks_stays_in_its_folder(ready, tmp_path, monkeypatch):
    packed = io.BytesIO(remote.pack("verify", ready, b"x = 1\n"))
    with tarfile.open(fileobj=packed, mode="a") as archive:
        archive.addfile(tarfile.TarInfo("../escaped"))
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    with pytest.raises(Refused, match="died"):
        remote.examine("verify", packed.getvalue(), 60)
    assert not list((tmp_path / "scratch").iterdir())


def test_a_trial_finds_packages_where_the_caller_does(ready, tmp_path, monkeypatch):
    (tmp_path / "jsonschema.py").write_text("raise SystemExit('the one on PYTHONPATH')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(Refused, match="the one on PYTHONPATH"):
        remote.examine("verify", remote.pack("verify", ready, b"x = 1\n"), 60)


@pytest.mark.parametrize("early", [True, False], ids=["while it starts", "while it reads"])
def test_a_trial_ends_with_the_loop_that_is_killed(early):
    """It would hold the GPU, for which the next run waits. Its input does not end with the loop here."""
    trial = "[sys.executable, '-m', 'kernelopt.loop.remote', str(os.getpid()), 'verify', '60', '']"
    code = f"import os, subprocess, sys; p = subprocess.Popen({trial}); print(p.pid, flush=True); p.wait()"
    options = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "env": {**os.environ, "PYTHONPATH": str(BUNDLE / "tools")},
    }
    with subprocess.Popen([sys.executable, "-c", code], text=True, **options) as loops:
        status = Path("/proc") / loops.stdout.readline().strip() / "status"
        while not early and not int(re.search(r"SigCgt:\s*(\w+)", status.read_text())[1], 16) >> signal.SIGTERM - 1 & 1:
            time.sleep(0.05)  # until it listens to the signal
        time.sleep(0 if early else 0.2)
        loops.kill()
        deadline = time.monotonic() + 10
        with contextlib.suppress(OSError):  # gone
            while "zombie" not in status.read_text() and time.monotonic() < deadline:
                time.sleep(0.05)
        assert time.monotonic() < deadline


def test_ray_carries_bundle_and_workspace_to_a_node_and_the_answer_back(ready, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    import ray

    def carried():
        return sorted(path.name for path in Path.cwd().iterdir()), Path("gpu-wiki/docs/hardware/h200.md").exists()

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    executor = executors.Ray(num_cpus=2, num_gpus=2, include_dashboard=False)  # it believes us that there are two GPUs
    try:
        assert executor.slots == 2
        with pytest.raises(EnvironmentLacks, match="no NVIDIA GPU here"):
            executors.measured(executor, ready, [b"x = 1", b"x = 2"], 60)
        assert ray.get(ray.remote(carried).remote()) == (sorted(executors.SHIPPED), True)
        assert not (tmp_path / ".ray").exists()  # nobody's home is written to
        monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
        with pytest.raises(EnvironmentLacks, match="the Ray cluster has no GPU"):
            executors.Ray()
    finally:
        ray.shutdown()


def test_a_plan_that_says_nothing_is_handed_back_before_anything_runs(ready, tmp_path):
    own = gpu_steps.Machine(ready, None, 60, print)
    (tmp_path / "plan.md").write_text("no plan")
    status, message = own.check(ready.kernel, tmp_path / "plan.md")
    assert status == "PLAN" and "Category" in message
    uncited = ready.root / ".loop" / "candidates" / "round1-0.md"
    uncited.parent.mkdir(parents=True)
    uncited.write_text(UNCITED.replace("\\n", "\n"))
    status, message = own.check(ready.kernel, uncited)
    assert status == "PLAN" and "plan.md, line 2: '3.9 TB/s' is no citation" in message


def test_at_the_end_the_best_is_profiled_whatever_could_be_compared(ready, monkeypatch):
    profiled = []
    monkeypatch.setattr(gpu_steps.Machine, "profiled", lambda own, version: profiled.append(version))
    assert gpu_steps.Machine(ready, None, 60, print).final() == {} and profiled == ["v0"]  # there is no GPU


def test_the_tools_own_brief_and_restart_work_on_a_real_workspace(ready):
    """What optimize_kernel.py hands to the loop, but for what needs a GPU."""
    own = gpu_steps.Machine(ready, None, 60, print)
    recorded = BUNDLE / "examples" / "row_softmax" / "h200" / "profiles" / "v0" / "annotation"
    shutil.copytree(recorded, ready.profile("v0", "annotation"))
    text = own.brief("v0", 0)
    assert "Direction of this candidate: excess_dram_traffic" in text and "## Metrics" in text and "plan.md" in text
    assert "- sm_count: 132 SM <- " in text and "- boost_clock: " in text and ", torch 2." in text
    assert "one of your own" in own.brief("v0", 9)
    verify, template = re.search(r"`(\S+ \S+ --workspace \.)`", text)[1], re.search(r"copy (\S+) and fill", text)[1]
    with agents.Desk(ready, "round1-0", ready.kernel.read_bytes()) as desk:
        env = {**os.environ, "TRITON_INTERPRET": "1"}
        done = subprocess.run(verify.split(), cwd=desk.path, env=env, capture_output=True, text=True)
        assert done.stdout.startswith("OK on cpu-interpreter") and desk.touched() == [], done.stderr
    assert "## Action" in Path(template).read_text() and f"folder {BUNDLE}/gpu-wiki:" in text
    shutil.rmtree(ready.profile("v0", "annotation"))
    assert own.final() == {} and "could not be profiled here" in own.brief("v0", 0)  # there is no GPU
    assert own.restart() is None  # v0 alone: nothing may be masked
    (ready.memory / "restarts.json").write_text("{}")
    with pytest.raises(UsageError, match=r"restarts\.json is no list of restarts"):
        own.restart()
    (ready.memory / "restarts.json").unlink()
    records = record_store.Memory(ready)
    for number in range(1, 5):
        records.save(record_store.empty(f"v{number}"))
    assert "2 of 5" in own.restart()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_was_forged_before_a_stop_is_put_back_before_anything_reads_it(ready, number):
    forge = f"""sed -i 's/"floor_share_pct": [0-9.]*/"floor_share_pct": 99.9/' {W}/memory/v0.json; kill -{number:d} $PPID; sleep 5"""
    code = STOPPABLE + program(ready, forge)
    record = (ready.memory / "v0.json").read_bytes()
    assert subprocess.run([sys.executable, "-c", code]).returncode in (143, -9)
    assert json.loads((ready.root / ".loop" / "status.json").read_text())["pid"]
    result, _ = run(ready, "true", limits=replace(LIMITS, rounds=1), resume=True)
    assert result["reason"] == "1 rounds are over" and (ready.memory / "v0.json").read_bytes() == record


def test_somebodys_own_work_is_not_written_over(ready):
    ready.kernel.write_text(ready.kernel.read_text() + "# mine\n")
    with pytest.raises(UsageError, match="is not the accepted v0"):
        run(ready, GOOD)
    assert ready.kernel.read_text().endswith("# mine\n")
    history.put_best_back(ready)
    ready.plan("v1").write_text("a draft")
    with pytest.raises(UsageError, match="the plan of a version that was not judged"):
        run(ready, GOOD)
    assert ready.plan("v1").read_text() == "a draft"


def test_what_stands_in_rounds_and_in_a_candidates_files_is_the_loops_own(ready):
    """One candidate overwrites the checked other, and adds a line to the rounds."""
    rival = f"sleep 1; echo 'us = 1' > {W}/.loop/candidates/round1-0.py; echo '{{}}' >> {W}/.loop/rounds.jsonl; exit 1"
    command = f"if [ $(basename $PWD) = round1-1 ]; then {rival}; fi; {agent(kernel(80))}"
    _, lines = run(ready, command, limits=replace(LIMITS, rounds=1, candidates=2))
    assert outcomes(lines) == ["failed", "accepted", "stop"]
    assert "us = 80" in ready.kernel.read_text()


def test_a_candidate_whose_files_are_gone_costs_that_candidate_alone(ready):
    machine = stand_in(ready)
    clear = lambda: shutil.rmtree(ready.root / ".loop" / "candidates", ignore_errors=True)  # noqa: E731
    made = loop.Loop(ready, agent(kernel(80)), LIMITS, machine, lambda _: None, GREEDY)
    judge, made.judge_what_waits = made.judge_what_waits, lambda: (clear(), judge())
    result = made.run()
    lines = [json.loads(line) for line in (ready.root / ".loop" / "rounds.jsonl").read_text().splitlines()]
    assert outcomes(lines)[0] == "not judged" and "gone" in lines[0]["message"] and result["best"] == "v0"


def test_an_accepted_version_is_noted_though_a_refused_plan_came_before_it(ready):
    bad = UNCITED
    command = f"if [ $(basename $PWD) = round1-0 ]; then {agent(kernel(60), plan=bad)} else {agent(kernel(50))} fi"
    limits = replace(LIMITS, rounds=1, candidates=2, refinements=0)
    made = loop.Loop(ready, command, limits, stand_in(ready), lambda _: None, GREEDY)
    note = made.note

    def dies(outcome, of, message):
        if outcome == "accepted":
            raise KeyboardInterrupt
        note(outcome, of, message)

    made.note = dies
    with pytest.raises(KeyboardInterrupt):
        made.run()
    assert "ended by KeyboardInterrupt" in json.loads((ready.root / ".loop" / "status.json").read_text())["now"]
    _, lines = run(ready, command, limits=limits, resume=True)
    assert [(line["of"], line["outcome"]) for line in lines] == [
        ("round1-0", "refused plan"),
        ("v1", "accepted"),
        (None, "stop"),
    ]


def test_a_plan_that_stays_refused_takes_no_measurement(ready):
    measured = []
    machine = stand_in(ready)
    machine = StandInMachine(machine.brief, lambda *_: ("PLAN", "no Risk"), measured.append, machine.restart)
    _, lines = run(ready, agent(kernel(50)), machine, replace(LIMITS, rounds=1))
    assert outcomes(lines) == ["refined", "refused plan", "stop"] and measured == []


def test_killed_in_a_partial_restart_it_still_tries_the_rounds_after_it(ready):
    machine = stand_in(ready)

    def dies():
        raise KeyboardInterrupt

    limits = replace(LIMITS, rounds=9, restarts=1, patience=1)
    with pytest.raises(KeyboardInterrupt):
        run(ready, "true", StandInMachine(machine.brief, machine.check, machine.measure, dies), limits)
    _, lines = run(ready, "true", limits=limits, resume=True)
    assert outcomes(lines) == ["unchanged", "unchanged", "stop"]


def test_told_to_stop_it_waits_for_no_verification(ready, tmp_path, monkeypatch, interruptible):
    """The process that verifies is stood in for by one that sleeps."""
    sleeper = tmp_path / "python"
    sleeper.write_text(f"#!/bin/sh\nexec sleep {nap(304)}\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr(remote.sys, "executable", str(sleeper))
    executor = SimpleNamespace(slots=1, examine=remote.examine, stop=remote.end_all)
    own = gpu_steps.Machine(ready, executor, 600, print)
    limits = replace(LIMITS, rounds=1)
    plain = StandInMachine(stand_in(ready).brief, own.check, own.measure, own.restart, stop=own.stop)

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


def test_a_workspace_that_was_broken_before_a_kill_is_put_back_before_it_is_read(ready, run_here):
    breaks = f"rm -rf {W}/memory {W}/README.md {W}/.git; kill -9 $PPID; sleep 5"
    run_until_killed(ready, breaks)
    done = run_here("optimize_kernel.py", "--workspace", ready.root, "--agent", "true", "--resume")
    assert done.returncode == 3 and "put back, as they were before a kill" in done.stderr  # and there is no GPU
    assert record_store.Memory(ready).best()["version"] == "v0" and ready.git("status", "--short") == ""


def test_while_a_killed_run_has_kept_the_workspace_no_gate_changes_it(ready):
    snapshot.Kept.of(ready)
    with pytest.raises(UsageError, match=r"optimize_kernel\.py --resume"):
        readiness.check_ready(ready, "v1")
    shutil.rmtree(ready.root / ".git")
    with pytest.raises(UsageError, match="has no history"), ready.locked():
        pass
