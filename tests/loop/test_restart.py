"""Partial restarts: what is masked, what a fresh agent is told, and the way back."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import BUNDLE, call_tool, run_tool, task, tool_json, with_changes
from kernelopt.errors import Refused
from kernelopt.loop import restart
from kernelopt.session.digests import digest
from kernelopt.session.record import Optimization, PreviousComparison, QualityGate
from kernelopt.session.record_store import RecordStore, empty

TEXTS = ("action_category", "action_description", "expected_impact", "risks_and_rollback")
TARGETS = [
    {"workload": "default", "metric": "latency_us", "target": 250, "unit": "us", "basis": "given"},
    {"workload": "default", "metric": "tflops", "target": 90, "unit": "TFLOPS", "basis": "given"},
]


def put(session, version: str, latency: float, accepted: bool, against: str | None = None) -> None:
    """A judged record, made by hand; its texts hold a word that only this version has."""
    record = empty(version)
    performance = replace(
        record.performance,
        workload="default",
        latency_us=latency,
        floor_share_pct=80.0,
        comparison_with_previous=PreviousComparison(against, "SLOWER", 0.9, (0.8, 0.95)) if against else None,
    )
    judged = replace(
        record,
        git_commit_hash="a" * 40 if accepted else None,
        kernel_sha256=digest(session.kernel),
        optimization=Optimization(*(f"{name} idea-{version}" for name in TEXTS)),
        quality_gate=QualityGate("PASS" if accepted else "FAIL", None),
        performance=performance,
    )
    RecordStore(session).save(judged)


@pytest.fixture
def stuck(session):
    """v0 and v3 accepted, v1 accepted and beaten, the rest rejected: of nine records six may be masked."""
    session.update_readme(task(framework="triton", dtype="fp32", targets=TARGETS, additional_notes="keep it short"), {})
    for number in range(9):
        put(session, f"v{number}", 300 - number, number in (0, 1, 3), "v1" if number > 1 else None)
    return session


def masked(session) -> list[str]:
    return [record.version for record in RecordStore(session).records(masked=True) if record.masked]


@pytest.fixture
def begin(run_here):
    return lambda session, *arguments: tool_json("partial_restart.py", session.root, *arguments, run=run_here)


def journal(session) -> list[dict]:
    return json.loads((session.memory / "restarts.json").read_text())


def test_half_is_drawn_and_never_the_baseline_or_the_best():
    versions = [f"v{number}" for number in range(11)]
    for seed in range(200):
        drawn = restart.draw(versions, "v10", seed)
        assert len(drawn) == len(set(drawn)) == 5 and not {"v0", "v10"} & set(drawn)
        assert drawn == restart.draw(versions, "v10", seed) == sorted(drawn, key=versions.index)
    assert {version for seed in range(200) for version in restart.draw(versions, "v10", seed)} == set(versions[1:10])
    assert restart.draw(versions, "v3", 7) == "v1 v4 v5 v7 v10".split()  # with every Python


@pytest.mark.parametrize("versions", [[], ["v0"], ["v0", "v1", "v2"], ["v0", "v1"]])
def test_of_fewer_than_two_none_is_drawn(versions):
    with pytest.raises(Refused, match="it takes two"):
        restart.draw(versions, "v2", 0)
    assert restart.draw(["v0", "v1", "v3"], None, 0) in (["v1"], ["v3"])  # half of three, rounded down


def test_a_restart_masks_and_is_written_down(stuck, begin):
    found = begin(stuck, "--seed", 7)
    assert masked(stuck) == found["masked"] and len(found["masked"]) == 4 and not {"v0", "v3"} & set(found["masked"])
    (entry,) = journal(stuck)
    assert (entry["seed"], entry["masked"], entry["undone"]) == (7, found["masked"], None) and entry["when"][-1] == "Z"
    assert found["next_version"] == "v9"  # counted over masked ones too
    assert RecordStore(stuck).best().version == "v3"


def test_the_same_seed_masks_the_same_and_none_is_told(stuck, begin):
    first = begin(stuck, "--seed", 11)["masked"]
    begin(stuck, "--undo")
    assert begin(stuck, "--seed", 11)["masked"] == first
    begin(stuck, "--undo")
    chosen = begin(stuck)
    begin(stuck, "--undo")
    assert begin(stuck, "--seed", chosen["seed"])["masked"] == chosen["masked"]


def test_restarts_are_undone_one_by_one_and_the_list_keeps_them(stuck, run_here, begin):
    first, second = begin(stuck, "--seed", 1)["masked"], begin(stuck, "--seed", 2)["masked"]
    assert len(second) == 2 and not set(first) & set(second)
    assert begin(stuck, "--undo")["unmasked"] == second and masked(stuck) == first
    third = begin(stuck, "--seed", 3)["masked"]
    assert begin(stuck, "--undo")["unmasked"] == third and begin(stuck, "--undo")["unmasked"] == first
    assert masked(stuck) == [] and [bool(entry["undone"]) for entry in journal(stuck)] == [True] * 3
    done = run_here("partial_restart.py", stuck.root, "--undo")
    assert done.returncode == 1 and "no restart to undo" in done.stderr and done.stderr.count("\n") == 1


def test_the_brief_tells_a_librarys_rate_from_a_floor(stuck, begin):
    work = {"flops": 2 * 4096**3, "bytes_in": 2 << 25, "bytes_out": 1 << 25, "bytes_min": 3 << 25, "dtype": "bf16"}
    changed = with_changes(stuck.task(), work={"default": {**work, "source": "given"}})
    stuck.update_readme(changed, {})
    lines = begin(stuck, "--seed", 7)["brief"].splitlines()
    assert "- v3: 297 us, 80 % of a library's rate, which is no floor" in lines


def test_what_was_masked_by_hand_stays_so(stuck, begin):
    RecordStore(stuck).set_masked(["v8"], True)
    found = begin(stuck)
    assert "v8" not in found["masked"] and len(found["masked"]) == 4
    begin(stuck, "--undo")
    assert masked(stuck) == ["v8"]


def test_a_record_that_was_removed_does_not_stop_the_way_back(stuck, begin):
    gone, *rest = begin(stuck)["masked"]
    RecordStore(stuck).path(gone).unlink()
    assert begin(stuck, "--undo")["unmasked"] == rest and masked(stuck) == []


def test_the_brief_holds_what_a_round_needs(stuck, begin):
    found = begin(stuck, "--seed", 7)
    text = found["brief"]
    for line in (
        "- framework: triton",
        "- notes: keep it short",
        "- v3: 297 us, 80 % of the floor's speed (100 is the floor itself)",
        f"- kernel: {stuck.root / 'kernel.py'}",
        "- default latency_us <= 250 us; best so far: 297 us",
        "- default tflops >= 90 TFLOPS; best so far: not measured",
        f"- {stuck.root / 'README.md'}: the constraints, hardware values and Stop Conditions",
        f"- Your version is v9: plan in {stuck.root / 'plans/v9_plan.md'}, then one change, then the gate.",
    ):
        assert line in text.splitlines()
    assert f"memory_manager.py read --workspace {stuck.root}" in text and "skills/gpu-kernel-profile-optimizer" in text
    rounds = [line for line in text.split("## History")[1].split("##")[0].splitlines() if line]
    assert [line.split(":")[0] for line in rounds] == [
        f"- {record.version}, {'accepted' if record.is_accepted else 'rejected'}"
        for record in RecordStore(stuck).records()
    ]
    (skill,) = [line.split(": ")[0] for line in text.splitlines() if line.startswith(f"- {BUNDLE}")]
    assert Path(skill[2:]).exists()


@pytest.mark.parametrize("seed", range(6))
def test_the_brief_tells_nothing_of_what_is_masked(stuck, seed, run_here):
    RecordStore(stuck).set_masked(["v1"], True)  # which the others were held against
    done = run_here("partial_restart.py", stuck.root, "--seed", seed)
    hidden = masked(stuck)
    assert len(hidden) == 5 and "left out: 5 masked records" in done.stderr
    told = done.stdout.replace(str(stuck.root), "").replace(str(BUNDLE), "")
    assert "as fast as a masked version" in told
    for version in hidden:
        assert f"idea-{version}" not in told and version not in told, told
        assert version in done.stderr.replace(";", "").split() or version == "v1"  # for the one who restarts
    assert done.stdout.startswith(f"4 of 8 unmasked records are masked now, seed {seed}; next version: v9\n")


def test_too_few_records_are_one_sentence_and_nothing_changes(session, run_here):
    for number in range(3):
        put(session, f"v{number}", 9, accepted=number == 1)
    done = run_here("partial_restart.py", session.root)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "1 of the records may be masked" in done.stderr
    assert not done.stdout and masked(session) == [] and not (session.memory / "restarts.json").exists()


def test_without_an_accepted_version_the_brief_says_so(session, begin):
    for number in range(4):
        put(session, f"v{number}", 9, accepted=False)
    found = begin(session)
    assert len(found["masked"]) == 2 and "nothing is accepted yet" in found["brief"]
    assert "skills/gpu-kernel-baseline" in found["brief"]


NO_RESTARTS = {
    "cut": "{",
    "an object": "{}",
    "a field": '[{"masked": []}]',
    "no versions": '[{"when": "x", "seed": 1, "masked": [["v1"]], "undone": null}]',
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("text", NO_RESTARTS.values(), ids=NO_RESTARTS)
def test_a_list_of_restarts_that_is_none_is_kept_and_nothing_is_masked(stuck, text, run_here):
    (stuck.memory / "restarts.json").write_text(text)
    for arguments in ([], ["--undo"]):
        done = run_here("partial_restart.py", stuck.root, *arguments)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and "mend or remove it" in done.stderr
    assert (stuck.memory / "restarts.json").read_text() == text and masked(stuck) == []


def test_a_pipe_in_place_of_the_list_is_not_waited_for(stuck):
    os.mkfifo(stuck.memory / "restarts.json")
    done = run_tool("partial_restart.py", stuck.root, "--undo", timeout=20)
    assert done.returncode == 2 and "restarts.json is no file; remove it" in done.stderr


def test_a_restart_that_dies_half_way_is_undone(stuck, monkeypatch, begin):
    write, written = RecordStore._write, []

    def dies(self, record):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(record["version"])
        write(self, record)

    monkeypatch.setattr(RecordStore, "_write", dies)
    with pytest.raises(KeyboardInterrupt):
        restart.begin(stuck, 5)
    assert masked(stuck) == written
    monkeypatch.undo()
    begin(stuck, "--undo")
    assert masked(stuck) == []


def test_a_kernel_that_is_not_the_best_is_told(stuck, run_here):
    stuck.kernel.write_text(stuck.kernel.read_text() + "\n# an attempt\n")
    done = run_here("partial_restart.py", stuck.root)
    assert done.returncode == 2 and f"checkout {'a' * 40} -- kernel.py" in done.stderr


def test_the_list_of_restarts_is_no_foreign_record(stuck, run_here, begin):
    begin(stuck)
    done = run_here("memory_manager.py", "summary", "--workspace", stuck.root)
    assert done.stderr == "memory_manager.py: left out: 4 masked records\n"


def test_a_met_goal_leaves_nothing_to_restart_for(stuck, run_here):
    target = {"workload": "default", "metric": "latency_us", "target": 1e9, "unit": "us", "basis": "the user"}
    stuck.update_readme(with_changes(stuck.task(), targets=[target]), {})
    done = run_here("partial_restart.py", stuck.root)
    met = RecordStore(stuck).best().latency_us is not None
    assert met and done.returncode == 1 and "nothing to restart for" in done.stderr
    assert not any(record.masked for record in RecordStore(stuck).records(masked=True))


def test_the_workspace_as_an_option_is_told_where_it_stands(session):
    done = call_tool("partial_restart.py", "--workspace", session.root)
    assert done.returncode == 2 and "the workspace's path alone is enough" in done.stderr
