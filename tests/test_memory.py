import json
import subprocess
import sys

import pytest
from conftest import BUNDLE, run_tool, tool_json
from kernelopt import bundle
from kernelopt.errors import Refused, UsageError
from kernelopt.memory import Memory, empty


@pytest.fixture
def memory(session) -> Memory:
    return Memory(session)


def accepted(memory: Memory, version: str, commit: str = "a" * 40, **changes) -> None:
    record = {**empty(version), "git_commit_hash": commit, **changes}
    record["quality_gate"] = {"result": "PASS", "failure_reason": None}
    memory.save(record)


def test_an_empty_record_fits_the_schema():
    bundle.validate(empty("v0"), "v_iteration.schema.json", "record")


@pytest.mark.parametrize(
    "change",
    [
        "performance.latency_us=-1",
        "correctness.status=GOOD",
        "performnce.tflops=5",
        "masked=true",
        "performance.latency_us=NaN",
        "version=v9",
    ],
)
def test_what_the_schema_forbids_is_refused_and_nothing_changes(memory, session, change):
    memory.create("v0")
    before = memory.path("v0").read_text()
    done = run_tool("memory_manager.py", "update", "--workspace", session.root, "--version", "v0", "--set", change)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert memory.path("v0").read_text() == before


def test_values_take_the_type_of_their_field(memory):
    memory.create("v0")
    changes = {"optimization.action_category": "1234567", "performance.latency_us": "7e1"}
    record = memory.update("v0", changes)
    assert record["optimization"]["action_category"] == "1234567"  # digits in a text field stay text
    assert record["performance"]["latency_us"] == 70
    assert memory.update("v0", {"performance.latency_us": "null"})["performance"]["latency_us"] is None
    with pytest.raises(UsageError):
        memory.update("v0", {"performance.latency_us": "fast"})


def test_a_scalar_is_not_replaced_by_an_object(memory):
    memory.create("v0")
    with pytest.raises(UsageError):
        memory.update("v0", {"device.name": "x"})
    with pytest.raises(UsageError):
        memory.update("v0", {"performance": "3"})


def test_the_baseline_and_the_best_cannot_be_masked(memory, session):
    accepted(memory, "v0")
    memory.create("v1")
    accepted(memory, "v2", "b" * 40)
    for kept in ("v0", "v2"):
        done = run_tool("memory_manager.py", "mask", "--workspace", session.root, "--version", "v1", kept)
        assert done.returncode == 2 and f"{kept} stays unmasked" in done.stderr
    assert not any(record["masked"] for record in memory.records())


def test_a_field_is_printed_as_json_or_as_its_own_text(memory, session):
    memory.create("v0")
    lesson = '[{"error_type": "x", "error_message": "it\'s", "root_cause": "-", "fix_applied": "-", "lesson": "l"}]'
    memory.update("v0", {"pitfalls_and_fixes": lesson})

    def read(field):
        arguments = ["--workspace", session.root, "--version", "v0", "--field", field]
        return run_tool("memory_manager.py", "read", *arguments).stdout.rstrip()

    assert json.loads(read("pitfalls_and_fixes")) == json.loads(lesson)
    assert (read("masked"), read("device"), read("version")) == ("false", "null", "v0")


def test_when_all_records_are_broken_they_are_named(memory, session):
    memory.create("v0")
    memory.path("v0").write_text("{")
    done = run_tool("memory_manager.py", "latest", "--workspace", session.root)
    assert done.returncode == 1 and "v0.json is not valid JSON" in done.stderr


def test_verbs_by_hand(session):
    def run(verb, *arguments, code=0):
        return tool_json("memory_manager.py", verb, "--workspace", session.root, *arguments, code=code)

    run("init")
    for version in ("v0", "v1", "v2"):
        run("create", "--version", version)
    assert run_tool("memory_manager.py", "create", "--workspace", session.root, "--version", "v1").returncode == 1
    run("mask", "--version", "v1", "v2")
    assert run("latest")["version"] == "v0"
    assert [r["version"] for r in run("read")["records"]] == ["v0"]
    assert run_tool("memory_manager.py", "read", "--workspace", session.root, "--version", "v1").returncode == 1
    assert [v["masked"] for v in run("list")["versions"]] == [False, True, True]
    run("unmask", "--version", "v2")
    assert run("latest")["version"] == "v2"
    assert run_tool("memory_manager.py", "best", "--workspace", session.root).returncode == 1
    assert run("summary")["versions"][1]["action"] is None


def test_masking_an_absent_version_changes_nothing(memory):
    memory.create("v0")
    with pytest.raises(Refused):
        memory.set_masked(["v0", "v7"], True)
    assert memory.read("v0")["masked"] is False


def test_an_empty_store_is_said(session):
    for verb in ("read", "summary", "latest", "list", "best"):
        done = run_tool("memory_manager.py", verb, "--workspace", session.root)
        assert done.returncode == 1 and done.stderr.count("\n") == 1


def test_the_best_is_the_last_accepted_and_masking_does_not_lower_the_bar(memory):
    accepted(memory, "v0")
    accepted(memory, "v2", masked=True)
    memory.create("v3")
    assert memory.best()["version"] == "v2" and memory.next_version() == "v4"


def test_a_broken_record_is_named_and_the_others_served(memory, session):
    memory.create("v0")
    memory.path("v1").write_text("{")
    (session.memory / "v1x.json").write_text("foreign")
    assert [record["version"] for record in memory.records()] == ["v0"] and "v1.json" in memory.broken[0]
    done = run_tool("memory_manager.py", "summary", "--workspace", session.root)
    assert done.returncode == 0 and "left out" in done.stderr


@pytest.mark.parametrize("version", ["v1x", "v1/../../x", "foo"])
def test_no_version_leads_out_of_the_workspace(session, version):
    done = run_tool("memory_manager.py", "create", "--workspace", session.root, "--version", version)
    assert done.returncode == 2 and not (session.root.parent / "x.json").exists()


def test_writers_at_the_same_time_lose_nothing(memory, session):
    memory.create("v0")
    code = (
        f"import sys; sys.path.insert(0, {str(BUNDLE / 'tools')!r})\n"
        "from kernelopt.memory import Memory; from kernelopt.workspace import Workspace\n"
        f"memory = Memory(Workspace({str(session.root)!r}))\n"
        "for _ in range(10): memory.update('v0', {'performance.runs': str((memory.read('v0')['performance']['runs'] or 0))})\n"
        "memory.update('v0', {sys.argv[1]: '1'})\n"
    )
    fields = ["performance.latency_us", "performance.p20_us", "performance.p80_us", "performance.tflops"]
    children = [subprocess.Popen([sys.executable, "-c", code, field]) for field in fields]
    assert [child.wait() for child in children] == [0] * 4
    performance = json.loads(memory.path("v0").read_text())["performance"]
    assert [performance[field.split(".")[1]] for field in fields] == [1] * 4


@pytest.mark.parametrize(
    "change",
    [
        "quality_gate.result=PASS",
        f"kernel_sha256={'a' * 64}",
        f"git_commit_hash={'a' * 40}",
        "performance.latency_us=1",
    ],
)
def test_a_verdict_or_a_measurement_of_the_gate_is_never_typed(memory, session, change):
    accepted(memory, "v0")
    done = run_tool("memory_manager.py", "update", "--workspace", session.root, "--version", "v0", "--set", change)
    assert done.returncode == 2 and "run_gate.py" in done.stderr


def test_options_may_be_repeated(session):
    def run(verb, *arguments):
        return tool_json("memory_manager.py", verb, "--workspace", session.root, *arguments)

    for version in ("v0", "v1", "v2"):
        run("create", "--version", version)
    fields = ("profile_evidence.tool_used", "profile_evidence.evidence_summary")
    record = run("update", "--version", "v0", "--set", f"{fields[0]}=ncu", "--set", f"{fields[1]}=x")
    assert record["profile_evidence"]["tool_used"] == "ncu" and record["profile_evidence"]["evidence_summary"] == "x"
    assert run("mask", "--version", "v1", "--version", "v2")["versions"] == ["v1", "v2"]


def test_a_broken_record_might_be_the_best(memory):
    accepted(memory, "v0")
    memory.path("v1").write_text("{")
    with pytest.raises(UsageError, match=r"v1\.json"):
        memory.best()
