"""Whatever an agent does to the workspace or to the files of the loop is noticed and undone, after a kill too."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from kernelopt.errors import UsageError
from kernelopt.gate import readiness
from kernelopt.loop import file_trees, snapshot
from kernelopt.session import record_store, trees
from kernelopt.session.workspace import Workspace
from scripted_agents import (
    LIMITS,
    SEVERAL,
    STOPPABLE,
    W,
    agent,
    kernel,
    killer,
    outcomes,
    program,
    run,
    run_until_killed,
    scripted_loop,
    stand_in,
)

DEEP = "python3 -c \"import os; [(os.mkdir('a' * %d), os.chdir('a' * %d)) for _ in range(%d)]\""


def files_but_git(workspace: Workspace) -> dict[str, str]:
    return {name: kind for name, kind in snapshot.everything(workspace.root).items() if not name.startswith(".git/")}


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
        f"echo '{{{{' > {W}/memory/v0.json",
        f"sed -i 's/H200/H999/' {W}/README.md",
        f"mkdir -p {W}/.loop/taken/1_v1.json; cp {W}/memory/v0.json {W}/memory/v1.json",
        f"rm {W}/.git/config; mkfifo {W}/.git/config",
        f"rm {W}/.git/HEAD; mkfifo {W}/.git/HEAD",
        f"cd {W}/.git; {DEEP % (1, 1, 1100)}",
        f"cd {W}/.git; {DEEP % (200, 200, 40)}",
    ],
)
def test_whatever_is_done_to_the_workspace_is_undone(ready, tmp_path, evil):
    (ready.root / "link").symlink_to("kernel.py")
    before = files_but_git(ready)
    kept = snapshot.Snapshot.take(ready)
    subprocess.run(["bash", "-c", evil.replace(W, str(ready.root))], cwd=tmp_path)
    assert kept.restore(lambda: None)
    assert files_but_git(ready) == before
    assert ready.file_at(ready.commit("Git works"), "kernel.py") == ready.kernel.read_bytes()
    file_trees.remove(ready.root / ".loop" / "taken")  # too deep for pytest to clear away


@pytest.mark.parametrize(
    "evil",
    [
        f"echo '{{{{' > {W}/memory/v0.json",
        f"rm -rf {W}/.git",
        f"rm -r {W}/plans; ln -s /tmp {W}/plans",
        f"cd {W}/.git; {DEEP % (1, 1, 1100)}",
    ],
)
def test_a_round_in_which_the_workspace_was_changed_counts_for_nothing_and_the_next_goes_on(ready, evil):
    command = agent(f"if [ ! -e {W}/../done ]; then touch {W}/../done; {evil}; fi; " + kernel(50))
    result, lines = run(ready, command, limits=replace(LIMITS, rounds=2))
    assert outcomes(lines) == ["forbidden files", "accepted", "stop"], lines
    assert "in the workspace itself" in lines[0]["message"] and result.best == "v1"
    assert ready.file_at("HEAD", "kernel.py") == ready.kernel.read_bytes()
    file_trees.remove(ready.root / ".loop" / "taken")


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
        f"rm -rf {W}/.loop; touch {W}/.loop",
        f"mkdir -p {W}/.loop/candidates/round1-0.py/x",
    ],
)
def test_no_trick_with_git_or_the_loops_own_files_changes_what_is_committed(ready, evil):
    _, lines = run(ready, agent(evil + "; " + kernel(90)), limits=replace(LIMITS, rounds=1))
    assert outcomes(lines) == ["accepted", "stop"], lines
    record = record_store.RecordStore(ready).read("v1")
    assert record.comparison.speedup == pytest.approx(100 / 90)
    assert hashlib.sha256(ready.file_at("HEAD", "kernel.py")).hexdigest() == record.kernel_sha256


def test_when_one_agent_forges_a_record_no_answer_of_the_round_counts(ready):
    forge = f"""sed -i 's/"floor_share_pct": [0-9.]*/"floor_share_pct": 99.0/' {W}/memory/v0.json"""
    command = SEVERAL.replace("cat > kernel.py", "[ $n = 0 ] && " + forge + "; sleep 0.3; cat > kernel.py", 1)
    limits = replace(LIMITS, rounds=1, candidates=2)
    record = (ready.memory / "v0.json").read_bytes()
    _, lines = run(ready, command, limits=limits)
    assert outcomes(lines) == ["forbidden files"] * 2 + ["stop"] and (ready.memory / "v0.json").read_bytes() == record


def test_a_users_file_is_not_written_through_a_link_and_what_was_taken_is_kept(ready, tmp_path):
    (tmp_path / "thesis").write_text("years")
    link = f"ln -sf {tmp_path}/thesis {W}/.git/index; ln -sf {tmp_path}/thesis {W}/.git/kernelopt-lock"
    edits = f"echo new > {W}/a.txt; echo new > {W}/b.txt"
    limits = replace(LIMITS, rounds=2)
    result, _ = run(ready, agent(f"{link}; {edits}; " + kernel(50)), limits=limits)
    with ready.locked():
        assert (tmp_path / "thesis").read_text() == "years" and result.best == "v0"
    taken = sorted(path.name.partition("_")[2] for path in (ready.root / ".loop" / "taken").iterdir())
    assert taken == ["a.txt", "a.txt", "b.txt", "b.txt"]


def test_a_commit_of_the_users_own_stays_whatever_it_is_called(ready):
    record_store.RecordStore(ready).create("v1")
    (ready.root / "notes.txt").write_text("mine")
    own = ready.commit("V1: my notes")
    run(ready, "true", limits=replace(LIMITS, rounds=1))
    assert ready.git("rev-parse", "HEAD") == own


def test_what_an_agents_process_forges_while_candidates_are_measured_is_put_back(ready):
    machine = stand_in(ready)

    def measured(kernels):
        measurements = machine.measure(kernels)
        shutil.copy(ready.memory / "v0.json", ready.memory / "v9.json")
        return measurements

    outlived = replace(machine, measure=measured)
    _, lines = run(ready, agent(kernel(50)), outlived, replace(LIMITS, rounds=1))
    assert outcomes(lines) == ["put back", "accepted", "stop"] and not (ready.memory / "v9.json").exists()


def test_without_what_it_had_kept_a_killed_run_trusts_nothing(ready):
    forge = f"cp {W}/memory/v0.json {W}/memory/v1.json; rm {W}/.loop/kept.tar; kill -9 $PPID; sleep 5"
    run_until_killed(ready, forge)
    with pytest.raises(UsageError, match=r"kept\.tar is not what the run kept"):
        run(ready, "true", resume=True)


def test_a_commit_between_a_kill_and_the_next_run_is_kept_and_named(ready):
    ready.git("branch", "idea", ready.git("commit-tree", "HEAD^{tree}", "-m", "an idea"))
    snapshot.Snapshot.take(ready)
    (ready.root / "notes.txt").write_text("mine")
    own, said = ready.commit("my work"), []
    assert snapshot.Snapshot.load(ready.root).restore(lambda: None)  # as optimize_kernel.py does when files are gone
    made = scripted_loop(ready, "true", stand_in(ready), say=said.append)
    made.begin(resume=True)
    assert ready.git("log", "-1", "--format=%s") != "my work"
    assert "put back" not in " ".join(said)  # it was said by `restore`, and is said once
    assert ready.git("rev-parse", f"refs/kernelopt/taken-{own[:10]}") == own
    assert outcomes(run(ready, agent(kernel(50)))[1])[0] == "accepted"  # whatever other branches there are


def test_killed_while_it_puts_back_no_answer_of_the_round_counts_later(ready, monkeypatch):
    run_until_killed(ready, killer(f"echo x > {W}/notes.txt; "), candidates=2)
    aside = snapshot.Snapshot._move_away

    def killed(own, name):
        aside(own, name)
        raise KeyboardInterrupt

    monkeypatch.setattr(snapshot.Snapshot, "_move_away", killed)
    with pytest.raises(KeyboardInterrupt):
        run(ready, "true", resume=True)
    monkeypatch.setattr(snapshot.Snapshot, "_move_away", aside)
    _, lines = run(ready, "true", limits=replace(LIMITS, rounds=1), resume=True)
    assert outcomes(lines) == ["interrupted", "interrupted", "unchanged", "stop"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_was_forged_before_a_stop_is_put_back_before_anything_reads_it(ready, number):
    forge = f"""sed -i 's/"floor_share_pct": [0-9.]*/"floor_share_pct": 99.9/' {W}/memory/v0.json"""
    forge += f"; kill -{number:d} $PPID; sleep 5"
    code = STOPPABLE + program(ready, forge)
    record = (ready.memory / "v0.json").read_bytes()
    assert subprocess.run([sys.executable, "-c", code]).returncode in (143, -9)
    assert json.loads((ready.root / ".loop" / "status.json").read_text())["pid"]
    result, _ = run(ready, "true", limits=replace(LIMITS, rounds=1), resume=True)
    assert result.reason == "1 rounds are over" and (ready.memory / "v0.json").read_bytes() == record


def test_what_stands_in_rounds_and_in_a_candidates_files_is_the_loops_own(ready):
    """One candidate overwrites the checked other, and adds a line to the rounds."""
    rival = f"sleep 1; echo 'us = 1' > {W}/.loop/candidates/round1-0.py; echo '{{}}' >> {W}/.loop/rounds.jsonl; exit 1"
    command = f"if [ $(basename $PWD) = round1-1 ]; then {rival}; fi; {agent(kernel(80))}"
    _, lines = run(ready, command, limits=replace(LIMITS, rounds=1, candidates=2))
    assert outcomes(lines) == ["failed", "accepted", "stop"]
    assert "us = 80" in ready.kernel.read_text()


def test_while_a_killed_run_has_kept_the_workspace_no_gate_changes_it(ready):
    snapshot.Snapshot.take(ready)
    with pytest.raises(UsageError, match=r"optimize_kernel\.py --resume"):
        readiness.check_ready(readiness.RoundStart.of(ready), "v1")
    shutil.rmtree(ready.root / ".git")
    with pytest.raises(UsageError, match="has no history"), ready.locked():
        pass


def test_an_entry_is_that_of_a_tree_and_of_large_and_special_files_one_that_reads_no_content(tmp_path):
    (tmp_path / "file").write_text("content")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "folder").mkdir()
    for name in ("file", "link", "folder"):
        assert file_trees.entry(tmp_path / name) == trees.entry(tmp_path / name)
    os.mkfifo(tmp_path / "pipe")
    os.truncate(tmp_path / "file", file_trees.LARGE + 1)
    assert file_trees.entry(tmp_path / "pipe") == file_trees.SPECIAL
    assert file_trees.entry(tmp_path / "file").startswith(f"large: {file_trees.LARGE + 1} bytes of ")
