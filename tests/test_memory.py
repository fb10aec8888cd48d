import copy
import ctypes
import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from conftest import BUNDLE, run_tool, tool_json
from kernelopt import bundle
from kernelopt.errors import Refused, UsageError
from kernelopt.memory import SCHEMA, Memory, differences, empty, record_test

RECORD = BUNDLE / "examples" / "row_softmax" / "h200" / "memory" / "v1.json"  # of an accepted round
NOTE = {"error_type": "x", "error_message": "", "root_cause": "", "fix_applied": "", "lesson": "l"}


@pytest.fixture
def memory(session) -> Memory:
    return Memory(session)


def accepted(memory: Memory, version: str, commit: str = "a" * 40, **changes) -> None:
    record = {**empty(version), "git_commit_hash": commit, **changes}
    record["quality_gate"] = {"result": "PASS", "failure_reason": None}
    memory.save(record)


def child(session, code: str, *arguments) -> subprocess.Popen:
    """A process that runs `code` with `memory`, the records of the session."""
    start = (
        f"import sys; sys.path.insert(0, {str(BUNDLE / 'tools')!r})\n"
        "from kernelopt.memory import Memory; from kernelopt.workspace import Workspace\n"
        f"memory = Memory(Workspace({str(session.root)!r}))\n"
    )
    command = [sys.executable, "-c", start + code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


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
    changes = {"optimization.action_category": "0012345", "device": "7e12345", "performance.latency_us": "7e1"}
    record = memory.update("v0", changes)
    assert record["optimization"]["action_category"] == "0012345"  # digits in a text field stay text
    assert record["device"] == "7e12345" and memory.read("v0") == record
    assert record["performance"]["latency_us"] == 70
    assert memory.update("v0", {"performance.latency_us": "null"})["performance"]["latency_us"] is None
    for text in ("fast", "1e999", "[" * 100_000):
        with pytest.raises(UsageError, match=r"'performance\.latency_us' takes number or null"):
            memory.update("v0", {"performance.latency_us": text})


def test_a_commit_hash_of_digits_stays_a_text(memory, session):
    accepted(memory, "v0", commit="7" * 40)
    read = tool_json("memory_manager.py", "read", "--workspace", session.root, "--version", "v0")
    assert read["git_commit_hash"] == "7" * 40


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
    assert [row["version"] for row in run("summary")["versions"]] == ["v0", "v2"]


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


READERS = (["read"], ["summary"], ["list"], ["latest"], ["history", "--field", "device"])
STRANGE = {  # file: what stands in it, and what is said of it
    "v1.json": ("{", "is not valid JSON"),
    "v2.json": ("[]", "top level"),
    "v3.json": ("{}", "is a required property"),
    "v4.json": ("[" * 100_000, "is not valid JSON"),
    "v5.json": (json.dumps(empty("v7")), "says that it is v7"),
    "v6.json": (json.dumps({**empty("v6"), "device": "\ud800"}), "cannot be written as JSON"),
    "v1x.json": ("{}", "is no record"),
    "notes.json": ("{}", "is no record"),
}


@pytest.mark.parametrize("verb", READERS, ids=lambda verb: verb[0])
def test_what_is_no_sound_record_is_named_and_kept_and_the_others_served(memory, session, verb):
    memory.create("v0")
    for name, (text, _) in STRANGE.items():
        (memory.folder / name).write_text(text)
    (memory.folder / "v8.json").mkdir()
    done = run_tool("memory_manager.py", *verb, "--workspace", session.root)
    assert done.returncode == 0 and "v0" in done.stdout
    for name, (text, said) in STRANGE.items():
        (line,) = [line for line in done.stderr.splitlines() if f"/{name}" in line]
        assert "left out: " in line and said in line and (memory.folder / name).read_text() == text
    assert "v8.json is no file" in done.stderr and memory.next_version() == "v9"


def test_a_broken_record_is_not_written_over(memory):
    memory.create("v0")
    memory.path("v1").write_text("{")
    for change in (
        lambda: memory.create("v1"),
        lambda: memory.update("v1", {"device": "x"}),
        lambda: memory.set_masked(["v1"], True),
    ):
        with pytest.raises((Refused, UsageError)):
            change()
    assert memory.path("v1").read_text() == "{"


@pytest.mark.parametrize("version", ["v1x", "v1/../../x", "foo"])
def test_no_version_leads_out_of_the_workspace(session, version):
    done = run_tool("memory_manager.py", "create", "--workspace", session.root, "--version", version)
    assert done.returncode == 2 and not (session.root.parent / "x.json").exists()


def test_of_eight_writers_at_the_same_time_nothing_is_lost(memory, session):
    memory.create("v0")
    code = (
        "import json\n"
        f"note = {NOTE!r}\n"
        "for turn in range(20):\n"
        "    memory.append('v0', 'pitfalls_and_fixes', [json.dumps({**note, 'lesson': f'{sys.argv[1]} {turn}'})])\n"
    )
    writers = [child(session, code, number) for number in range(8)]
    assert [writer.wait() for writer in writers] == [0] * 8
    lessons = [item["lesson"] for item in memory.read("v0")["pitfalls_and_fixes"]]
    assert sorted(lessons) == sorted(f"{number} {turn}" for number in range(8) for turn in range(20))


def test_a_writer_that_is_killed_leaves_a_whole_record_and_nothing_else(memory, session):
    """500 kills; with a plain write in place of bundle.write_bytes the record is broken after the first."""
    memory.create("v0")
    memory.append("v0", "pitfalls_and_fixes", [json.dumps({**NOTE, "lesson": "l" * 50_000})])
    code = """if True:
        import os, random, signal, time
        half_written = 0
        for _ in range(500):
            writer = os.fork()
            while writer == 0:
                memory.update("v0", {"device": str(time.monotonic_ns())})
            time.sleep(random.uniform(0.001, 0.012))
            os.kill(writer, signal.SIGKILL)
            os.waitpid(writer, 0)
            half_written += len(list(memory.folder.glob(".v0.json.*")))
            assert len(memory.read("v0")["pitfalls_and_fixes"][0]["lesson"]) == 50_000
        print(half_written)
    """
    killer = child(session, code)
    assert int(killer.communicate()[0]) > 20, "the kills did not fall into writes"
    memory.update("v0", {"device": "x"})
    assert sorted(path.name for path in memory.folder.iterdir()) == [".lock", "v0.json"]


@pytest.mark.parametrize("where", ["write", "replace"])
def test_a_full_disk_leaves_the_old_record(memory, monkeypatch, where):
    """A stand-in for a full disk: the system calls that would find it full raise its error."""
    memory.create("v0")
    before = memory.path("v0").read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(*((os, "fsync") if where == "write" else (Path, "replace")), full)
    with pytest.raises(OSError, match="No space left"):
        memory.update("v0", {"device": "x"})
    assert memory.path("v0").read_bytes() == before
    assert sorted(path.name for path in memory.folder.iterdir()) == [".lock", "v0.json"]


def manager(session, *arguments, before=None) -> subprocess.CompletedProcess:
    """memory_manager.py with `before` called in its process first."""
    command = [sys.executable, BUNDLE / "tools" / "memory_manager.py", *arguments, "--workspace", session.root]
    return subprocess.run(command, capture_output=True, text=True, preexec_fn=before)


def test_a_write_that_is_cut_short_is_one_sentence(memory, session):
    """A limit on the size of files, which cuts a write in the middle, as a full disk does."""
    memory.create("v0")
    before = memory.path("v0").read_bytes()

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))

    done = manager(session, "update", "--version", "v0", "--set", "device=x", before=limit)
    assert done.returncode == 3 and done.stderr.count("\n") == 1 and "check disk space" in done.stderr
    assert memory.path("v0").read_bytes() == before and len(list(memory.folder.iterdir())) == 2


def drop_the_right_to_write_anywhere():
    """Of root: PR_CAPBSET_DROP of CAP_DAC_OVERRIDE, so that permissions hold for it too. No matter for others."""
    ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)


def test_a_read_only_folder_is_read_and_not_written(memory, session):
    memory.create("v0")
    before = memory.path("v0").read_bytes()
    (memory.folder / ".lock").chmod(0o444)
    memory.folder.chmod(0o555)
    try:
        for verb in READERS:
            done = manager(session, *verb, before=drop_the_right_to_write_anywhere)
            assert done.returncode == 0 and not done.stderr, done.stderr
        for verb in (["update", "--version", "v0", "--set", "device=x"], ["create", "--version", "v1"]):
            done = manager(session, *verb, before=drop_the_right_to_write_anywhere)
            assert done.returncode == 3 and done.stderr.count("\n") == 1 and "Permission denied" in done.stderr
    finally:
        memory.folder.chmod(0o755)
    assert memory.path("v0").read_bytes() == before and not memory.path("v1").exists()


def test_ten_thousand_records_are_quick(memory, session):
    """Processor time, so that other processes do not matter. With jsonschema for each record the table takes 5 s; the figures
    are in the docstring of memory.py."""
    text = RECORD.read_text()
    for number in range(10_000):
        (memory.folder / f"v{number}.json").write_text(text.replace('"version": "v1"', f'"version": "v{number}"'))

    def seconds(*verb: str) -> float:
        start = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = manager(session, *verb)
        end = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0 and not done.stderr
        return end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime

    assert seconds("summary") < 3
    for verb in ("latest", "best"):
        assert seconds(verb) < 1
    assert seconds("update", "--version", "v9999", "--set", "optimization.action_category=x") < 1


def leaves(value, path=()):
    """Every path to a value inside `value`, objects and lists included."""
    for key, member in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        if isinstance(member, dict | list):
            yield from leaves(member, (*path, key))


def test_what_the_quick_test_takes_for_sound_jsonschema_does_too():
    judge = jsonschema.Draft202012Validator(bundle.read_json(bundle.REFERENCE / SCHEMA))
    record = {**json.loads(RECORD.read_text()), "pitfalls_and_fixes": [NOTE]}
    record["search_log"] = [{"source": "profile", "query": "q", "finding": "f", "actionability": "a"}]
    assert record_test()(record) and record_test()(empty("v0")) and not record_test()([])
    refused = 0
    for path in list(leaves(record)):
        for value in (None, True, -1, 1.5, "x", [], [1, 2, 3], {}, {"x": 1}):
            changed = copy.deepcopy(record)
            holder = changed
            for key in path[:-1]:
                holder = holder[key]
            holder[path[-1]] = value
            sound = judge.is_valid(changed)
            assert sound or not record_test()(changed), (path, value)
            refused += not sound
    assert refused > 300
    for name in record:
        assert not record_test()({key: value for key, value in record.items() if key != name}), name
    assert not record_test()({**record, "more": 1})


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


def test_items_are_added_to_a_list(memory, session):
    def append(field, *items):
        rest = ["--version", "v0", "--field", field, "--item", *map(json.dumps, items)]
        return run_tool("memory_manager.py", "append", "--workspace", session.root, *rest, "--json")

    memory.create("v0")
    assert append("pitfalls_and_fixes", NOTE).returncode == 0
    done = append("pitfalls_and_fixes", {**NOTE, "lesson": "m"}, {**NOTE, "lesson": "n"})
    assert [item["lesson"] for item in json.loads(done.stdout)["pitfalls_and_fixes"]] == ["l", "m", "n"]
    before = memory.path("v0").read_bytes()
    for field, item, said in (
        ("device", NOTE, "'device' is no list; lists are: isa_metric_progress, search_log"),
        ("search_log", NOTE, "search_log.0"),
        ("performance.runs.x", NOTE, "no field of a record"),
        ("quality_gate", NOTE, "run_gate.py"),
    ):
        done = append(field, item)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and said in done.stderr, done.stderr
    assert memory.path("v0").read_bytes() == before


def test_a_field_across_versions(memory, session):
    first = json.loads(RECORD.read_text())
    for version, state in (("v0", None), ("v1", first["performance"]["gpu_state"])):
        memory.save({**first, "version": version, "performance": {**first["performance"], "gpu_state": state}})

    def history(field, code=0):
        return tool_json("memory_manager.py", "history", "--workspace", session.root, "--field", field, code=code)

    latencies = [row["value"] for row in history("performance.latency_us")["versions"]]
    assert latencies == [first["performance"]["latency_us"]] * 2
    rows = history("performance.gpu_state.power_w.max")["versions"]
    assert rows == [{"version": "v0", "value": None}, {"version": "v1", "value": 100.638}]
    for arguments in (["history", "--field", "performance.late"], ["read", "--field", "device"]):
        done = run_tool("memory_manager.py", *arguments, "--workspace", session.root)
        assert done.returncode == 2 and done.stderr.count("\n") == 1


def test_what_differs_between_two_versions(memory, session):
    memory.create("v0")
    memory.create("v1")
    memory.update("v0", {"device": "a", "performance.latency_us_by_workload": '{"tall": 1}'})
    memory.update("v1", {"device": "b", "performance.latency_us_by_workload": '{"tall": 1, "wide": 2}'})
    for version in ("v0", "v1", "v1"):
        memory.append(version, "pitfalls_and_fixes", [json.dumps(NOTE)])
    found = tool_json("memory_manager.py", "diff", "v0", "v1", "--workspace", session.root)
    assert (found["from"], found["to"]) == ("v0", "v1")
    assert found["changes"] == [
        {"field": "device", "from": "a", "to": "b"},
        {"field": "performance.latency_us_by_workload.wide", "from": None, "to": 2},
        {"field": "pitfalls_and_fixes", "removed": [], "added": [NOTE]},
    ]
    text = run_tool("memory_manager.py", "diff", "v0", "v1", "--workspace", session.root).stdout.splitlines()
    assert text[:2] == ["device: - a", "device: + b"] and text[-1] == f"pitfalls_and_fixes: + {json.dumps(NOTE)}"
    assert differences(memory.read("v0"), memory.read("v0")) == []


def test_a_masked_record_stays_out_of_planning_and_is_counted(memory, session):
    for version in ("v0", "v1", "v2"):
        memory.create(version)
    memory.update("v1", {"device": "SECRET"})
    memory.update("v2", {"device": "SECRET"})
    memory.set_masked(["v1", "v2"], True)
    for verb in (["read"], ["summary"], ["latest"], ["history", "--field", "device"]):
        for form in ([], ["--json"]):
            done = run_tool("memory_manager.py", *verb, "--workspace", session.root, *form)
            assert done.returncode == 0 and "left out: 2 masked records" in done.stderr
            assert not {"SECRET", "v1", "v2"} & set(done.stdout.replace('"', " ").split())
    for verb in (
        ["diff", "v0", "v1"],
        ["read", "--version", "v1"],
        ["update", "--version", "v1", "--set", "device=x"],
        ["append", "--version", "v1", "--field", "search_log", "--item", "{}"],
    ):
        done = run_tool("memory_manager.py", *verb, "--workspace", session.root)
        assert done.returncode == 1 and "v1 is masked" in done.stderr and "SECRET" not in done.stdout + done.stderr
    done = run_tool("compute_utilization.py", "--workspace", session.root, "--version", "v1")
    assert done.returncode == 1 and "v1 is masked" in done.stderr


def test_a_record_that_is_gone_is_named(memory, session):
    for version in ("v0", "v1", "v2"):
        memory.create(version)
    memory.path("v1").unlink()
    assert (
        "no record of v1: the file is gone" in run_tool("memory_manager.py", "list", "--workspace", session.root).stderr
    )
