"""Agents: whatever one does has a name, and what it starts ends with it."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
from kernelopt import bundle
from kernelopt.device.isolation import why_no_bubblewrap
from kernelopt.errors import EnvironmentLacks, UsageError
from kernelopt.loop import agent_process, agent_sandbox
from kernelopt.session import record_store
from scripted_agents import GOOD, LIMITS, W, agent, kernel, nap, outcomes, run, running, stand_in


@pytest.mark.parametrize(
    ("command", "outcome", "says"),
    [
        ("exit 3", "failed", "exit code 3"),
        ("echo sorry; exit 1", "failed", "sorry"),
        ("true", "unchanged", "what it was"),
        ("echo '# a comment' >> kernel.py", "unchanged", "comments and layout"),
        ("rm kernel.py", "no answer", "no kernel.py"),
        (agent("echo x = 1 >> kernel.py; rm plan.md"), "no plan", "plan.md"),
        (agent(kernel(50) + "echo x > notes.txt; echo y > reference.py"), "forbidden files", "notes.txt, reference.py"),
        (agent(kernel(50) + "git add -A; git commit -qm x; echo z > z.txt"), "forbidden files", "z.txt"),
        (agent(kernel(50) + f"echo hi >> {W}/memory/v0.json"), "forbidden files", "memory/v0.json"),
        (agent(kernel(50) + f"cd {W}; git commit -q --allow-empty -m sly"), "forbidden files", "HEAD"),
        ("echo x > notes.txt; sleep 60", "timed out", "no answer within"),
        ("echo x > notes.txt; echo no quota; exit 1", "failed", "no quota"),
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
    assert says in lines[0]["message"] and result.best == "v0" and ready.kernel.read_bytes() == before
    assert (ready.memory / "v0.json").read_bytes() == record and ready.git("rev-list", "--count", "HEAD") == commits


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


def test_what_an_agent_leaves_running_is_ended_with_it(ready):
    leaves = f"set -m; sleep {nap(301)} & setsid sleep {nap(302)} & sleep 0.2"
    _, lines = run(ready, agent(kernel(50) + leaves), limits=replace(LIMITS, rounds=1))
    assert outcomes(lines) == ["accepted", "stop"]
    assert not running(nap(301)) and not running(nap(302))


def test_empty_folders_are_no_answer_and_no_offence(ready):
    """Codex's sandbox leaves its mount points in the folder while a command of it still runs."""
    leaves = "mkdir -p .agents .aws .codex/deep; chmod 555 .agents; " + kernel(50)
    _, lines = run(ready, agent(leaves), limits=replace(LIMITS, rounds=1))
    assert outcomes(lines) == ["accepted", "stop"], lines
    assert ready.git("status", "--short") == ""


def test_an_agents_temporary_files_go_with_it(ready, tmp_path):
    """Codex's sandbox leaves mount points in the folder for temporary files, too, when it is killed."""
    writes = (
        f"mkdir $TMPDIR/.git; echo x > $(mktemp); echo $TMPDIR > {tmp_path}/where; ls -A $TMPDIR > {tmp_path}/names"
    )
    _, lines = run(ready, agent(f"{writes}; {kernel(50)}"), limits=replace(LIMITS, rounds=1))
    temporary = Path((tmp_path / "where").read_text().strip())
    assert outcomes(lines) == ["accepted", "stop"] and len((tmp_path / "names").read_text().split()) == 2
    assert temporary.parent == agent_sandbox.run_folder(ready) and not temporary.parent.exists()


def test_masked_rounds_are_not_in_the_clone(ready, tmp_path):
    run(ready, agent(kernel(500)), limits=replace(LIMITS, rounds=1))
    run(ready, agent(kernel(90)), limits=replace(LIMITS, rounds=1))  # commits the plan of v1 too
    record_store.RecordStore(ready).set_masked(["v1"], True)
    looks = f"ls plans > {tmp_path}/plans; git log --oneline > {tmp_path}/log"
    run(ready, looks, limits=replace(LIMITS, rounds=1))
    assert (tmp_path / "plans").read_text().split() == ["v2_plan.md"]
    assert (tmp_path / "log").read_text().count("\n") == 1


def test_masked_plans_are_in_no_history_in_the_clone(ready, tmp_path):
    run(ready, agent("n=${v#v}; " + kernel(90)), limits=replace(LIMITS, rounds=1))
    records = record_store.RecordStore(ready)
    records.save(replace(records.read("v1"), masked=True))
    assert "plans/v1_plan.md" in ready.git("ls-files")
    look = f"(git log --patch --all; git diff HEAD) > {tmp_path}/log; git status --short > {tmp_path}/status"
    run(ready, look, limits=replace(LIMITS, rounds=1))
    assert "One pass" not in (tmp_path / "log").read_text() and not (tmp_path / "status").read_text()


def test_a_message_with_half_a_character_is_handed_back(ready):
    plain = stand_in(ready)
    odd = replace(plain, check=lambda *_: ("WRONG_VALUES", "off \ud800"))
    _, lines = run(ready, agent(kernel(50)), odd, replace(LIMITS, rounds=1))
    assert outcomes(lines)[0] == "refined" and outcomes(lines)[-1] == "stop"


@pytest.mark.parametrize(
    "command", ["no-such-agent --fast", "./kernel.py", "exec /no/such/agent", "true && no-such-agent"]
)
def test_an_agents_command_that_is_none_ends_the_run_and_another_goes_on(ready, command):
    with pytest.raises(EnvironmentLacks, match=r"cannot be run: bash: line 1: .*--resume"):
        run(ready, command)
    result, lines = run(ready, GOOD, resume=True)
    assert result.best == "v3" and outcomes(lines) == ["interrupted", *["accepted"] * 3, "stop"]
    assert result.agent_calls == 3  # the one that was none is not counted


def test_a_hanging_agent_leaves_no_process(ready, tmp_path):
    mark = tmp_path / "pid"
    code, _, took = agent_process.run(f"(sleep 300 & echo $! > {mark}; wait)", "brief", tmp_path, 1.0, str(tmp_path))
    assert code is None and took < 10
    time.sleep(0.1)
    stat = Path(f"/proc/{mark.read_text().strip()}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"  # nobody may have reaped it yet


def test_an_agent_that_does_not_read_its_brief_is_no_crash(tmp_path):
    code, log, _ = agent_process.run("echo done", "x" * 10_000_000, tmp_path, 20, str(tmp_path))
    assert code == 0 and log == "done\n"


needs_bubblewrap = pytest.mark.skipif(why_no_bubblewrap() is not None, reason="bubblewrap does not work here")


@needs_bubblewrap
def test_behind_bubblewrap_an_agent_works_and_the_workspace_is_read_only_to_it(ready):
    tries = f"echo x > {W}/notes.txt; rm -rf {W}/memory {W}/.git {W}/.loop; git -C {W} commit -q --allow-empty -m sly"
    leaves = f"(setsid sleep {nap(307)} &)"
    wrapper = agent_process.read_only(ready.root)
    assert wrapper
    command = agent(f"{tries}; {leaves}; {kernel(50)}")
    _, lines = run(ready, command, limits=replace(LIMITS, rounds=1), wrapper=wrapper)
    assert outcomes(lines) == ["accepted", "stop"] and not running(nap(307))
    assert not (ready.root / "notes.txt").exists() and not (ready.root / ".loop" / "taken").exists()


def test_without_bubblewrap_an_agent_runs_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(agent_process.shutil, "which", lambda _: None)
    assert agent_process.read_only(tmp_path) == ()
    (tmp_path / "bwrap").write_text("#!/bin/sh\nexit 1\n")  # a stand-in for one that may not make namespaces
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert agent_process.read_only(tmp_path) == ()


def test_agents_work_outside_the_workspace_in_a_folder_of_the_users_alone(ready, tmp_path, monkeypatch):
    run(ready, f"pwd > {tmp_path}/pwd", limits=replace(LIMITS, rounds=1))
    clone = Path((tmp_path / "pwd").read_text().strip())
    assert not clone.is_relative_to(ready.root) and not clone.exists()
    assert clone.parent.parent.stat().st_mode & 0o077 == 0
    (ready.root / "tmp").mkdir()
    monkeypatch.setattr(agent_sandbox.tempfile, "tempdir", str(ready.root / "tmp"))
    with pytest.raises(UsageError, match=r"TMPDIR is .*, which is in the workspace"):
        run(ready, "true")
    (tmp_path / "elsewhere").mkdir(mode=0o755)
    with pytest.raises(EnvironmentLacks, match="is not a folder of yours alone"):
        bundle.private_folder(tmp_path / "elsewhere")
