"""A workspace's trip to another machine as files. The measurement there is stood in for by what a kernel says of itself."""

import json
import re
import shutil
import tarfile
from dataclasses import replace

import pytest
from conftest import PLAN, kernel_text
from kernelopt.errors import EnvironmentLacks
from kernelopt.gate import rounds
from kernelopt.loop import carried, run_state
from kernelopt.remote import parcels
from kernelopt.session import trees
from kernelopt.session.digests import content_digest
from kernelopt.session.record_store import RecordStore
from kernelopt.session.workspace import KEPT_FILE, Workspace
from scripted_agents import stand_in


def kernel(us: int) -> str:
    return kernel_text(f"us = {us}\nreturn torch.relu(x * self.weight) * self.scale")


def candidate(workspace, name: str, us: int) -> None:
    folder = workspace.root / "waiting"
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(kernel(us))
    (folder / f"{name}.md").write_text(PLAN)


@pytest.fixture
def measured(monkeypatch) -> list[bytes]:
    """The kernels that the stand-in for the GPU has measured."""
    kernels = []

    def measure(start, *_):
        kernels.append(start.workspace.kernel.read_bytes())
        return stand_in(start.workspace).measure(kernels[-1:])[0]

    monkeypatch.setattr(rounds, "measure", measure)
    return kernels


@pytest.fixture
def trip(ready, tmp_path):
    """A workspace with three candidates, and the file that it is packed into."""
    ready.kernel.write_text(kernel(80))
    ready.plan("v1").write_text(PLAN)
    candidate(ready, "fast", 40)
    candidate(ready, "slow", 90)
    (ready.cache).mkdir(exist_ok=True)
    (ready.cache / "large").write_text("stays here")
    return ready, tmp_path / "trip.tar.gz"


def test_there_and_back(trip, run_here, measured):
    workspace, file = trip
    assert run_here("carry.py", "pack", workspace.root, "--out", file).stdout == f"{file}: kernel, fast, slow\n"
    before = trees.scan([str(workspace.root)], str(workspace.root))
    done = run_here("carry.py", "judge", file)
    result = file.with_name("trip.judged.tar.gz")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and [line.split(":")[0] for line in lines[:3]] == ["kernel", "fast", "slow"]
    assert "v1 ACCEPTED" in lines[0] and "v2 ACCEPTED" in lines[1] and "v3 REJECTED" in lines[2]
    assert before == trees.scan([str(workspace.root)], str(workspace.root))  # nothing is done at home yet
    assert not file.with_name("trip.judging").exists() and "could not be profiled" in done.stderr
    done = run_here("carry.py", "unpack", result, workspace.root)
    assert done.returncode == 0 and done.stdout.splitlines()[:3] == lines[:3]
    refused = next(workspace.root.glob("rejected/v3*"))
    assert "us = 40" in workspace.kernel.read_text() and "us = 90" in refused.read_text()
    records = RecordStore(workspace)
    assert records.versions() == ["v0", "v1", "v2", "v3"] and records.best().version == "v2"
    assert workspace.git("rev-parse", "HEAD") == records.best().git_commit_hash and not workspace.git("fsck")
    assert carried.waiting(workspace) == [] and workspace.git("status", "--short") == "?? plans/v3_plan.md"
    assert (workspace.cache / "large").exists()
    assert str(file.parent / "trip.judging") not in json.dumps([r.to_json() for r in records.records()])
    assert "brought home before" in run_here("carry.py", "unpack", result, workspace.root).stdout
    assert run_here("carry.py", "judge", file).returncode == 2 and len(measured) == 3


def test_a_workspace_that_was_changed_meanwhile_is_left_alone(trip, run_here, measured):
    workspace, file = trip
    carried.pack(workspace, file)
    assert run_here("carry.py", "judge", file).returncode == 0
    result = file.with_name("trip.judged.tar.gz")
    text = workspace.readme.read_text()
    workspace.readme.write_text(f"{text}\nAnother goal.\n")
    (workspace.root / "notes.md").write_text("new")
    before = trees.scan([str(workspace.root)], str(workspace.root))
    done = run_here("carry.py", "unpack", result, workspace.root)
    assert done.returncode == 2 and "README.md, notes.md; nothing was brought home" in done.stderr
    assert before == trees.scan([str(workspace.root)], str(workspace.root))
    workspace.readme.write_text(text)
    (workspace.root / "notes.md").unlink()
    workspace.git("commit", "--allow-empty", "--quiet", "--message", "A thought")
    done = run_here("carry.py", "unpack", result, workspace.root)
    assert done.returncode == 2 and re.search(r"packed: \.git/refs/heads/\w+; nothing", done.stderr), done.stderr
    workspace.git("reset", "--quiet", "--soft", "HEAD~1")  # objects, ORIG_HEAD and COMMIT_EDITMSG stay
    workspace.git("status")  # git may write its index anew
    (workspace.root / "report.html").write_text("rendered meanwhile")
    moved = Workspace(workspace.root.rename(file.parent / "elsewhere"))  # and the workspace may have moved
    assert carried.unpack(result, moved)[0].startswith("kernel: v1 ACCEPTED")
    assert RecordStore(moved).best().version == "v2"


@pytest.mark.parametrize("place", ["while it measures", "before the record", "after the record"])
def test_a_judge_that_is_stopped_goes_on(trip, run_here, measured, monkeypatch, place):
    workspace, file = trip
    carried.pack(workspace, file)

    def stops(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if place == "while it measures":
            measure = rounds.measure
            patch.setattr(rounds, "measure", lambda *given: stops() if len(measured) == 1 else measure(*given))
        elif place == "before the record":
            patch.setattr(RecordStore, "save", stops)
        else:
            settle = rounds.settle
            patch.setattr(rounds, "settle", lambda *given: (settle(*given), stops()))
        assert run_here("carry.py", "judge", file).returncode == 130
    assert not file.with_name("trip.judged.tar.gz").exists()
    done = run_here("carry.py", "judge", file, "--json")
    versions = {one["name"]: (one["version"], one["accepted"]) for one in json.loads(done.stdout)["judged"]}
    assert versions == {"kernel": ("v1", True), "fast": ("v2", True), "slow": ("v3", False)}, done.stderr
    carried.unpack(file.with_name("trip.judged.tar.gz"), workspace)
    assert (
        RecordStore(workspace).versions() == ["v0", "v1", "v2", "v3"]
        and workspace.git("status", "--short") == "?? plans/v3_plan.md"
    )


def test_without_a_gpu_the_candidates_wait_on(trip, run_here, tmp_path):
    workspace, file = trip
    carried.pack(workspace, file)
    done = run_here("carry.py", "judge", file)
    assert done.returncode == 3 and "no NVIDIA GPU here" in done.stderr
    assert (tmp_path / "trip.judging").is_dir() and not (tmp_path / "trip.judged.tar.gz").exists()
    shutil.copyfile(file, tmp_path / "other.tar.gz")
    workspace.readme.write_text(workspace.readme.read_text() + "\n")
    carried.pack(workspace, file)
    done = run_here("carry.py", "judge", file)
    assert done.returncode == 2 and "trip.judging is of another parcel" in done.stderr


def test_a_candidate_whose_plan_is_missing_or_poor_is_named_before_its_trip(ready, run_here, tmp_path):
    """Whoever judges it has no plan to put beside it."""
    candidate(ready, "good", 50)
    candidate(ready, "poor", 40)
    plan, file = ready.root / "waiting" / "poor.md", tmp_path / "trip.tar.gz"
    plan.write_text("# no plan")
    done = run_here("carry.py", "pack", ready.root, "--out", file)
    assert done.returncode == 2 and f"{plan}: '## Category' is missing or empty" in done.stderr
    plan.unlink()
    done = run_here("carry.py", "pack", ready.root, "--out", file)
    assert done.returncode == 2 and f"{plan} is missing: write poor's plan there" in done.stderr and not file.exists()
    plan.write_text(PLAN)
    assert run_here("carry.py", "pack", ready.root, "--out", file).returncode == 0


def test_a_first_version_needs_no_plan_for_its_trip(session, tmp_path):
    candidate(session, "first", 50)
    (session.root / "waiting" / "first.md").unlink()
    assert carried.pack(session, tmp_path / "trip.tar.gz") == ["kernel", "first"]


def test_a_candidate_with_a_poor_plan_waits_on_with_the_reason(ready, run_here, tmp_path, measured, monkeypatch):
    candidate(ready, "good", 50)
    candidate(ready, "poor", 40)
    (ready.root / "waiting" / "poor.md").write_text("# no plan")
    candidate(ready, "zero", 45)
    (ready.root / "waiting" / "zero.md").unlink()
    monkeypatch.setattr(carried, "require_plans", lambda *_: None)
    carried.pack(ready, tmp_path / "trip.tar.gz")
    done = run_here("carry.py", "judge", tmp_path / "trip.tar.gz")
    assert "poor: not judged" in done.stdout and "zero: not judged" in done.stdout and done.returncode == 0
    carried.unpack(tmp_path / "trip.judged.tar.gz", ready)
    assert carried.waiting(ready) == ["poor", "zero"] and "us = 50" in ready.kernel.read_text()
    assert RecordStore(ready).versions() == ["v0", "v1"] and not ready.plan("v2").exists()


def test_what_a_stopped_loop_left_is_judged(ready, run_here, tmp_path, measured):
    loop = carried.RunFiles(ready.root / ".loop")
    loop.open()
    loop.write_candidate("round1-0", kernel(50), PLAN)
    loop.save_state(replace(run_state.State(), waiting=("round1-0", "lost"), rounds=1))
    assert carried.pack(ready, tmp_path / "trip.tar.gz") == ["loop-round1-0"]
    assert run_here("carry.py", "judge", tmp_path / "trip.tar.gz").returncode == 0
    carried.unpack(tmp_path / "trip.judged.tar.gz", ready)
    assert RecordStore(ready).best().version == "v1" and loop.state().waiting == () and loop.state().rounds == 1


def test_a_first_version_is_carried_without_a_plan(session, run_here, tmp_path, measured, monkeypatch):
    monkeypatch.setattr(
        rounds, "measure", lambda *_: (_ for _ in ()).throw(EnvironmentLacks("here it would measure v0"))
    )
    assert carried.pack(session, tmp_path / "trip.tar.gz") == ["kernel"]
    assert "it would measure v0" in run_here("carry.py", "judge", tmp_path / "trip.tar.gz").stderr


def test_what_cannot_be_packed(ready, run_here, tmp_path):
    def refusal(*arguments) -> str:
        done = run_here("carry.py", "pack", ready.root, "--out", *arguments)
        assert done.returncode == 2
        return done.stderr

    assert "no candidate waits" in refusal(tmp_path / "x.tar.gz")
    ready.kernel.write_text(kernel(50))
    assert "v1_plan.md is missing" in refusal(tmp_path / "x.tar.gz")
    ready.plan("v1").write_text("# no plan")
    assert "v1_plan.md: '## Category' is missing" in refusal(tmp_path / "x.tar.gz")
    assert "is in the workspace" in refusal(ready.root / "x.tar.gz")
    (ready.root / ".loop").mkdir()
    (ready.root / KEPT_FILE).write_text("")
    assert "was killed among its agents" in refusal(tmp_path / "x.tar.gz")
    assert not (tmp_path / "x.tar.gz").exists()


# --- parcels ----------------------------------------------------------------------------------------------------


def test_a_parcel_that_is_damaged_or_foreign_is_refused(trip, run_here, tmp_path):
    workspace, file = trip
    carried.pack(workspace, file)
    whole = file.read_bytes()
    for content, words in ((whole[:-900], "cannot be read"), (b"no archive", "cannot be read")):
        file.write_bytes(content)
        done = run_here("carry.py", "judge", file)
        assert done.returncode == 2 and words in done.stderr, done.stderr
    done = run_here("carry.py", "judge", tmp_path / "none.tar.gz")
    assert done.returncode == 2 and "does not exist" in done.stderr
    file.write_bytes(whole)
    assert "is no result" in run_here("carry.py", "unpack", file, workspace.root).stderr
    parcel = replace(parcels.read(file, "workspace"), version="0.0.1")
    parcels.write(file, parcel, [])
    done = run_here("carry.py", "judge", file)
    assert done.returncode == 3 and "0.0.1 of the bundle" in done.stderr
    parcels.write(file, replace(parcel, version=parcels.environment.version()), [(content_digest(b"a"), b"b")])
    done = run_here("carry.py", "judge", file)
    assert done.returncode == 2 and "is damaged" in done.stderr


def test_a_result_changes_nothing_outside_the_workspace_and_no_setting_of_git(ready, run_here, tmp_path):
    root = str(ready.root)
    tree = trees.scan([root], root)
    digest = content_digest(b"evil")
    for name, kind in {
        f"{root}/../evil": f"file 644 {digest}",
        f"{root}/.git/hooks/pre-commit": f"file 755 {digest}",
        f"{root}/.git/config": f"file 644 {digest}",
        f"{root}/link": "link /etc",
        f"{root}/.git": f"file 644 {digest}",
        root: "link /etc",
        f"{root}/plans": "link ..",
        "/tmp/evil": f"file 644 {digest}",
        f"{root}/kernel.py": "file 644 nonsense",
    }.items():
        result = tmp_path / "result.tar.gz"
        parcel = parcels.Parcel("result", parcels.environment.version(), root, tree, {name: kind})
        parcels.write(result, parcel, [(digest, b"evil")])
        run_here("carry.py", "unpack", result, root)
        assert trees.scan([root], root) == tree and not (ready.root.parent / "evil").exists(), name


def test_an_archive_with_other_names_is_no_parcel(tmp_path, run_here):
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as archive:
        parcels.add(archive, "../escaped", b"x")
    assert run_here("carry.py", "judge", tmp_path / "x.tar.gz").returncode == 2
    assert not (tmp_path.parent / "escaped").exists()
