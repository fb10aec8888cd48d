import ctypes
import errno
import functools
import json
import operator
import os
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import memory_manager
import pytest
from conftest import BUNDLE, run_tool, tool_json, with_changes
from kernelopt import bundle
from kernelopt.errors import Refused, ToolError, UsageError
from kernelopt.session import record_cache
from kernelopt.session.record import QualityGate, Record
from kernelopt.session.record_fields import differences
from kernelopt.session.record_store import RecordStore, empty

RECORD = BUNDLE / "examples" / "row_softmax" / "h200" / "memory" / "v1.json"  # of an accepted round
NOTE = {"error_type": "x", "error_message": "", "root_cause": "", "fix_applied": "", "lesson": "l"}


@pytest.fixture
def memory(session) -> RecordStore:
    return RecordStore(session)


def accepted(memory: RecordStore, version: str, commit: str = "a" * 40, **changes) -> None:
    accepted = QualityGate("PASS", None)
    memory.save(replace(empty(version), git_commit_hash=commit, quality_gate=accepted, **changes))


def child(session, code: str, *arguments) -> subprocess.Popen:
    """A process that runs `code` with `memory`, the records of the session."""
    start = (
        f"import sys; sys.path.insert(0, {str(BUNDLE / 'tools')!r})\n"
        "from kernelopt.session.record_store import RecordStore; from kernelopt.session.workspace import Workspace\n"
        f"memory = RecordStore(Workspace({str(session.root)!r}))\n"
    )
    command = [sys.executable, "-c", start + code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_an_empty_record_fits_the_schema():
    bundle.validate(empty("v0").to_json(), "v_iteration.schema.json", "record")


@pytest.mark.parametrize(
    "change",
    [
        "performance.latency_us=-1",
        "correctness.status=GOOD",
        "performnce.tflops=5",
        "masked=true",
        "performance.latency_us=NaN",
        "version=v9",
        "performance.p20_us=0",
        "performance.floor_us=-1",
        f"performance.floor_share_pct={'1' * 4000}",
        'performance.latency_us_by_workload={"default": 0}',
        'performance.comparison_with_previous={"against": "v0", "verdict": "EQUAL", "speedup": 0, "ci95": [1, 1]}',
        'performance.comparison_with_previous={"against": "v0", "verdict": "EQUAL", "speedup": 1, "ci95": [-1, 1]}',
        'performance.gpu_state={"name": "\\ud800"}',
    ],
)
def test_what_the_schema_forbids_is_refused_and_nothing_changes(memory, session, change, run_here):
    memory.create("v0")
    before = memory.path("v0").read_text()
    done = run_here("memory_manager.py", "update", "--workspace", session.root, "--version", "v0", "--set", change)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert memory.path("v0").read_text() == before


def test_values_take_the_type_of_their_field(memory):
    memory.create("v0")
    changes = {"optimization.action_category": "0012345", "device": "7e12345", "performance.latency_us": "7e1"}
    record = memory.update("v0", changes)
    assert record.optimization.action_category == "0012345"  # digits in a text field stay text
    assert record.device == "7e12345" and memory.read_json("v0") == record.to_json()
    assert record.latency_us == 70
    assert memory.update("v0", {"performance.latency_us": "null"}).latency_us is None
    for text in ("fast", "1e999", "[" * 100_000):
        with pytest.raises(UsageError, match=r"'performance\.latency_us' takes number or null"):
            memory.update("v0", {"performance.latency_us": text})


def test_a_commit_hash_of_digits_stays_a_text(memory, session, run_here):
    accepted(memory, "v0", commit="7" * 40)
    read = tool_json("memory_manager.py", "read", "--workspace", session.root, "--version", "v0", run=run_here)
    assert read["git_commit_hash"] == "7" * 40


def test_a_scalar_is_not_replaced_by_an_object(memory):
    memory.create("v0")
    with pytest.raises(UsageError):
        memory.update("v0", {"device.name": "x"})
    with pytest.raises(UsageError):
        memory.update("v0", {"performance": "3"})


def test_the_baseline_and_the_best_cannot_be_masked(memory, session, run_here):
    accepted(memory, "v0")
    memory.create("v1")
    accepted(memory, "v2", "b" * 40)
    for kept in ("v0", "v2"):
        done = run_here("memory_manager.py", "mask", "--workspace", session.root, "--version", "v1", kept)
        assert done.returncode == 2 and f"{kept} stays unmasked" in done.stderr
    assert not any(record.masked for record in memory.records())


def test_a_field_is_printed_as_json_or_as_its_own_text(memory, session, run_here):
    memory.create("v0")
    lesson = '[{"error_type": "x", "error_message": "it\'s", "root_cause": "-", "fix_applied": "-", "lesson": "l"}]'
    memory.update("v0", {"pitfalls_and_fixes": lesson})

    def read(field):
        arguments = ["--workspace", session.root, "--version", "v0", "--field", field]
        return run_here("memory_manager.py", "read", *arguments).stdout.rstrip()

    assert json.loads(read("pitfalls_and_fixes")) == json.loads(lesson)
    assert (read("masked"), read("device"), read("version")) == ("false", "null", "v0")


def test_when_all_records_are_broken_they_are_named(memory, session, run_here):
    memory.create("v0")
    memory.path("v0").write_text("{")
    done = run_here("memory_manager.py", "latest", "--workspace", session.root)
    assert done.returncode == 1 and "v0.json is not valid JSON" in done.stderr


def test_verbs_by_hand(session, run_here):
    def run(verb, *arguments, code=0):
        return tool_json("memory_manager.py", verb, "--workspace", session.root, *arguments, code=code, run=run_here)

    run("init")
    for version in ("v0", "v1", "v2"):
        run("create", "--version", version)
    assert run_here("memory_manager.py", "create", "--workspace", session.root, "--version", "v1").returncode == 1
    run("mask", "--version", "v1", "v2")
    assert run("latest")["version"] == "v0"
    assert [r["version"] for r in run("read")["records"]] == ["v0"]
    assert run_here("memory_manager.py", "read", "--workspace", session.root, "--version", "v1").returncode == 1
    assert [v["masked"] for v in run("list")["versions"]] == [False, True, True]
    run("unmask", "--version", "v2")
    assert run("latest")["version"] == "v2"
    assert run_here("memory_manager.py", "best", "--workspace", session.root).returncode == 1
    assert [row["version"] for row in run("summary")["versions"]] == ["v0", "v2"]


def test_the_summary_tells_a_librarys_rate_from_a_floor(memory, session, run_here):
    memory.create("v0")

    def titles() -> str:
        done = run_here("memory_manager.py", "summary", "--workspace", session.root)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[0]

    assert "  floor_pct  " in titles()  # nothing is counted yet
    work = {"flops": 2 * 4096**3, "bytes_in": 2 << 25, "bytes_out": 1 << 25, "bytes_min": 3 << 25, "dtype": "bf16"}
    session.update_readme(with_changes(session.task(), work={"default": {**work, "source": "given"}}), {})
    assert "  library_rate_pct  " in titles() and "floor" not in titles()
    (row,) = tool_json("memory_manager.py", "summary", "--workspace", session.root, run=run_here)["versions"]
    assert "floor_pct" in row  # the key stays


def test_masking_an_absent_version_changes_nothing(memory):
    memory.create("v0")
    with pytest.raises(Refused):
        memory.set_masked(["v0", "v7"], True)
    assert not memory.read("v0").masked


def test_an_empty_store_is_said(session, run_here):
    for verb in ("read", "summary", "latest", "list", "best"):
        done = run_here("memory_manager.py", verb, "--workspace", session.root)
        assert done.returncode == 1 and done.stderr.count("\n") == 1


def test_the_best_is_the_last_accepted_and_masking_does_not_lower_the_bar(memory):
    accepted(memory, "v0")
    accepted(memory, "v2", masked=True)
    memory.create("v3")
    assert memory.best().version == "v2" and memory.next_version() == "v4"


def test_the_best_is_found_whatever_its_texts_say_and_a_pipe_in_its_place_is_named(memory):
    accepted(memory, "v1")
    record = memory.read("v1")
    plan = replace(record.optimization, action_description='"git_commit_hash": null')
    memory.save(replace(record, optimization=plan))
    memory.create("v2")
    assert memory.best().version == "v1"
    os.mkfifo(memory.path("v3"))
    with pytest.raises(UsageError, match=r"v3\.json is no file"):
        memory.best()


READERS = (["read"], ["summary"], ["list"], ["latest"], ["history", "--field", "device"])
STRANGE = {  # file: what stands in it, and what is said of it
    "v1.json": ("{", "is not valid JSON"),
    "v2.json": ("[]", "top level"),
    "v3.json": ("{}", "is a required property"),
    "v4.json": ("[" * 100_000, "is not valid JSON"),
    "v5.json": (json.dumps(empty("v7").to_json()), "says that it is v7"),
    "v6.json": (json.dumps({**empty("v6").to_json(), "device": "\ud800"}), "cannot be written as JSON"),
    "v1x.json": ("{}", "is no record"),
    "notes.json": ("{}", "is no record"),
}


@pytest.mark.parametrize("verb", READERS, ids=lambda verb: verb[0])
def test_what_is_no_sound_record_is_named_and_kept_and_the_others_served(memory, session, verb, run_here):
    memory.create("v0")
    for name, (text, _) in STRANGE.items():
        (memory.folder / name).write_text(text)
    (memory.folder / "v8.json").mkdir()
    done = run_here("memory_manager.py", *verb, "--workspace", session.root)
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
def test_no_version_leads_out_of_the_workspace(session, version, run_here):
    done = run_here("memory_manager.py", "create", "--workspace", session.root, "--version", version)
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
    lessons = [item["lesson"] for item in memory.read_json("v0")["pitfalls_and_fixes"]]
    assert sorted(lessons) == sorted(f"{number} {turn}" for number in range(8) for turn in range(20))


def test_a_writer_that_is_killed_leaves_a_whole_record_and_nothing_else(memory, session):
    """100 kills or more; with a plain write in place of bundle.write_bytes the record is broken after the first. On a
    busy machine few kills fall into writes, so they go on until five did."""
    memory.create("v0")
    memory.append("v0", "pitfalls_and_fixes", [json.dumps({**NOTE, "lesson": "l" * 50_000})])
    code = """if True:
        import os, random, signal, time
        half_written = 0
        for number in range(5000):
            if number >= 100 and half_written > 4:
                break
            writer = os.fork()
            while writer == 0:
                memory.update("v0", {"device": str(time.monotonic_ns())})
            time.sleep(random.uniform(0.001, 0.012))
            os.kill(writer, signal.SIGKILL)
            os.waitpid(writer, 0)
            half_written += len(list(memory.folder.glob(".v0.json.*")))
            assert len(memory.read_json("v0")["pitfalls_and_fixes"][0]["lesson"]) == 50_000
        print(half_written)
    """
    killer = child(session, code)
    assert int(killer.communicate()[0]) > 4, "the kills did not fall into writes"
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
    """Processor time, so that other processes do not matter; the docstring of record_store.py has the figures."""
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


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (
            "quality_gate.result",
            "GOOD",
            'quality_gate.result: "GOOD" is not one of "PASS", "FAIL", "TIMEOUT_FAIL", null',
        ),
        ("performance.latency_us", "fast", 'performance.latency_us: "fast" is not of types "null", "number"'),
        ("performance.latency_us", True, 'performance.latency_us: true is not of types "null", "number"'),
        ("performance.runs", 1.5, 'performance.runs: 1.5 is not of types "null", "integer"'),
        ("performance.floor_us", -1, "performance.floor_us: -1 is less than the minimum of 0"),
        ("performance.comparison_with_previous.ci95", [1, 0], "comparison_with_previous.ci95.1: 0 is less than"),
        ("performance.comparison_with_previous", 3, "performance.comparison_with_previous: 3 is not of type"),
        ("git_commit_hash", "A" * 40, "git_commit_hash: "),
        ("more", 1, "top level: Additional properties are not allowed ('more' was unexpected)"),
    ],
)
def test_the_message_names_the_field_and_the_cause(place, value, message):
    record = json.loads(RECORD.read_text())
    *parents, last = place.split(".")
    functools.reduce(operator.getitem, parents, record)[last] = value
    with pytest.raises(UsageError) as refused:
        bundle.validate(record, "v_iteration.schema.json", "record v1")
    said = str(refused.value).replace('"integer", "null"', '"null", "integer"')  # as jsonschema-rs 0.41 has them
    assert said.startswith("record v1: ") and message in said and "\n" not in said


def test_no_field_of_a_record_may_be_absent():
    record = json.loads(RECORD.read_text())
    bundle.validate(record, "v_iteration.schema.json", "record")
    for name in record:
        rest = {key: value for key, value in record.items() if key != name}
        with pytest.raises(UsageError, match=f'top level: "{name}" is a required property'):
            bundle.validate(rest, "v_iteration.schema.json", "record")


@pytest.mark.parametrize(
    "change",
    [
        "quality_gate.result=PASS",
        f"kernel_sha256={'a' * 64}",
        f"git_commit_hash={'a' * 40}",
        "performance.latency_us=1",
    ],
)
def test_a_verdict_or_a_measurement_of_the_gate_is_never_typed(memory, session, change, run_here):
    accepted(memory, "v0")
    done = run_here("memory_manager.py", "update", "--workspace", session.root, "--version", "v0", "--set", change)
    assert done.returncode == 2 and "run_gate.py" in done.stderr


def test_options_may_be_repeated(session, run_here):
    def run(verb, *arguments):
        return tool_json("memory_manager.py", verb, "--workspace", session.root, *arguments, run=run_here)

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


def test_items_are_added_to_a_list(memory, session, run_here):
    def append(field, *items):
        rest = ["--version", "v0", "--field", field, "--item", *map(json.dumps, items)]
        return run_here("memory_manager.py", "append", "--workspace", session.root, *rest, "--json")

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
        ("pitfalls_and_fixes", {**NOTE, "lesson": "\ud800"}, "not UTF-8 text"),
    ):
        done = append(field, item)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and said in done.stderr, done.stderr
    assert memory.path("v0").read_bytes() == before


def test_a_field_across_versions(memory, session, run_here):
    first = json.loads(RECORD.read_text())
    for version, state in (("v0", None), ("v1", first["performance"]["gpu_state"])):
        changed = {**first, "version": version, "performance": {**first["performance"], "gpu_state": state}}
        memory.save(Record.from_json(changed))

    def history(field, code=0):
        return tool_json(
            "memory_manager.py", "history", "--workspace", session.root, "--field", field, code=code, run=run_here
        )

    latencies = [row["value"] for row in history("performance.latency_us")["versions"]]
    assert latencies == [first["performance"]["latency_us"]] * 2
    rows = history("performance.gpu_state.power_w.max")["versions"]
    assert rows == [{"version": "v0", "value": None}, {"version": "v1", "value": 100.638}]
    for arguments in (["history", "--field", "performance.late"], ["read", "--field", "device"]):
        done = run_here("memory_manager.py", *arguments, "--workspace", session.root)
        assert done.returncode == 2 and done.stderr.count("\n") == 1


def test_what_differs_between_two_versions(memory, session, run_here):
    memory.create("v0")
    memory.create("v1")
    memory.update("v0", {"device": "a", "performance.latency_us_by_workload": '{"tall": 1}'})
    memory.update("v1", {"device": "b", "performance.latency_us_by_workload": '{"tall": 1, "wide": 2}'})
    for version in ("v0", "v1", "v1"):
        memory.append(version, "pitfalls_and_fixes", [json.dumps(NOTE)])
    diff = tool_json("memory_manager.py", "diff", "v0", "v1", "--workspace", session.root, run=run_here)
    assert (diff["from"], diff["to"]) == ("v0", "v1")
    assert diff["changes"] == [
        {"field": "device", "from": "a", "to": "b"},
        {"field": "performance.latency_us_by_workload.wide", "from": None, "to": 2},
        {"field": "pitfalls_and_fixes", "removed": [], "added": [NOTE]},
    ]
    text = run_here("memory_manager.py", "diff", "v0", "v1", "--workspace", session.root).stdout.splitlines()
    assert text[:2] == ["device: - a", "device: + b"] and text[-1] == f"pitfalls_and_fixes: + {json.dumps(NOTE)}"
    assert differences(memory.read("v0"), memory.read("v0")) == []


def test_a_masked_record_stays_out_of_planning_and_is_counted(memory, session, run_here):
    for version in ("v0", "v1", "v2"):
        memory.create(version)
    memory.update("v1", {"device": "SECRET"})
    memory.update("v2", {"device": "SECRET"})
    memory.set_masked(["v1", "v2"], True)
    for verb in (["read"], ["summary"], ["latest"], ["history", "--field", "device"]):
        for form in ([], ["--json"]):
            done = run_here("memory_manager.py", *verb, "--workspace", session.root, *form)
            assert done.returncode == 0 and "left out: 2 masked records" in done.stderr
            assert not {"SECRET", "v1", "v2"} & set(done.stdout.replace('"', " ").split())
    for verb in (
        ["diff", "v0", "v1"],
        ["read", "--version", "v1"],
        ["update", "--version", "v1", "--set", "device=x"],
        ["append", "--version", "v1", "--field", "search_log", "--item", "{}"],
    ):
        done = run_here("memory_manager.py", *verb, "--workspace", session.root)
        assert done.returncode == 1 and "v1 is masked" in done.stderr and "SECRET" not in done.stdout + done.stderr
    done = run_here("compute_utilization.py", "--workspace", session.root, "--version", "v1")
    assert done.returncode == 1 and "v1 is masked" in done.stderr
    done = run_here("compute_utilization.py", "--workspace", session.root, "--version", "v0")
    assert done.returncode == 1 and f"memory_manager.py summary --workspace {session.root}" in done.stderr


def test_a_record_that_is_gone_is_named(memory, session, run_here):
    for version in ("v0", "v1", "v2"):
        memory.create(version)
    memory.path("v1").unlink()
    assert (
        "no record of v1: the file is gone" in run_here("memory_manager.py", "list", "--workspace", session.root).stderr
    )


# --- what is kept from one glance at the records to the next --------------------------------------------------

GLANCES = (
    ["list"],
    ["summary", "--json"],
    *(
        ["history", "--field", name]
        for name in (
            "performance.latency_us",
            "performance.gpu_state.power_w.max",
            "performance.late",
            "search_log",
            "nope",
        )
    ),
)


@pytest.fixture
def quickly(monkeypatch):
    """Young records are cached too; returns a function that waits until what was written is old enough."""
    monkeypatch.setattr(record_cache, "SETTLED_NS", 50_000_000)
    return lambda: time.sleep(0.06)


def said(session, monkeypatch, capsys, *verb) -> tuple:
    """What memory_manager.py prints, in this process: (result or error, stdout, stderr)"""
    monkeypatch.setattr(sys, "argv", ["memory_manager.py", *verb, "--workspace", str(session.root)])
    try:
        end = memory_manager.main()
    except ToolError as error:
        end = (type(error), str(error))
    return end, *capsys.readouterr()


def in_place(path: Path, before: str, after: str) -> None:
    """An edit by hand that leaves the size, the inode and the time of the last change."""
    unedited = path.stat()
    with open(path, "r+") as file:
        text = file.read().replace(before, after)
        file.seek(0)
        file.write(text)
    os.utime(path, ns=(unedited.st_atime_ns, unedited.st_mtime_ns))
    assert path.stat().st_size == unedited.st_size


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


CHANGES = {
    "at first": lambda memory: None,
    "by hand": lambda memory: in_place(memory.path("v1"), "H200", "H100"),
    "by hand, masked": lambda memory: in_place(memory.path("v1"), '"masked": false', '"masked":  true'),
    "masked": lambda memory: memory.set_masked(["v2"], True),
    "updated": lambda memory: memory.update("v4", {"optimization.action_description": "y"}),
    "removed": lambda memory: memory.path("v1").unlink(),
    "broken": lambda memory: in_place(memory.path("v4"), '"device"', '"devise"'),
    "mended": lambda memory: memory.path("v3").write_text(json.dumps(empty("v3").to_json())),
    "another's": lambda memory: memory.path("v9").rename(memory.path("v1")),
    "a pipe": lambda memory: pipe(memory.path("v2")),
}


def test_what_is_printed_is_the_same_with_and_without_what_was_kept(memory, session, monkeypatch, capsys, quickly):
    text = RECORD.read_text()
    for number in (0, 1, 2, 4, 5, 9, 10):
        memory.path(f"v{number}").write_text(text.replace('"version": "v1"', f'"version": "v{number}"'))
    memory.set_masked(["v5"], True)
    memory.path("v3").write_text("{")
    memory.path("v6").mkdir()
    memory.path("v7").symlink_to("nowhere")
    (memory.folder / "notes.json").write_text("{}")
    for name, change in CHANGES.items():
        change(memory)
        quickly()
        with monkeypatch.context() as without:
            without.setattr(RecordStore, "glance", lambda self, names, masked=False: self.scan_json(masked))
            wanted = [said(session, monkeypatch, capsys, *verb) for verb in GLANCES]
        for turn in range(2):
            answers = [said(session, monkeypatch, capsys, *verb) for verb in GLANCES]
            assert answers == wanted, (name, turn)
    assert sorted(path.name for path in memory.glances.iterdir()) == [
        "performance",
        "performance.gpu_state",
        "search_log",
        "short",
    ]


def test_a_second_glance_opens_no_record(memory, session):
    """Python's own audit of the opened files, of the tool as it is; a record counts as settled after two seconds."""
    text = RECORD.read_text()
    for number in range(150):
        (memory.folder / f"v{number}.json").write_text(text.replace('"version": "v1"', f'"version": "v{number}"'))

    def opened(*verb: str) -> int:
        code = """if True:
            import runpy, sys
            opened = []
            sys.addaudithook(lambda name, values: name == "open" and opened.append(str(values[0])))
            sys.argv = sys.argv[1:]
            try:
                runpy.run_path(sys.argv[0], run_name="__main__")
            finally:
                print(sum("/memory/v" in path for path in opened), file=sys.stderr)
        """
        tool = BUNDLE / "tools" / "memory_manager.py"
        command = [sys.executable, "-c", code, tool, *verb, "--workspace", session.root]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stderr)

    assert opened("list") == 150 and not memory.glances.exists()  # a later change might go unseen
    time.sleep(2.1)
    latency = ("history", "--field", "performance.latency_us")
    assert [opened("list"), opened("list"), opened("summary"), opened(*latency)] == [150, 0, 0, 0]
    assert [opened("history", "--field", "search_log") for _ in range(2)] == [150, 0]
    memory.update("v7", {"optimization.action_category": "x"})
    assert opened("list") == 1 and opened("latest") == 1


@pytest.mark.parametrize("spoil", ["empty", "torn", "a byte", "another's", "a pipe", "a folder", "a file as folder"])
def test_a_spoilt_glance_counts_for_nothing(memory, session, monkeypatch, capsys, quickly, spoil):
    for version in ("v0", "v1"):
        memory.create(version)
    quickly()
    wanted = said(session, monkeypatch, capsys, "list")
    path, content = memory.glances / "short", (memory.glances / "short").read_bytes()
    assert b"false" in content
    path.unlink()
    match spoil:
        case "empty":
            path.touch()
        case "torn":
            path.write_bytes(content[:-20])
        case "a byte":
            path.write_bytes(content.replace(b"[false", b"[ true"))
        case "another's":
            path.write_bytes(content)
            monkeypatch.setattr(record_cache, "JUDGES", ("bundle.py",))
        case "a pipe":
            pipe(path)
        case "a folder":
            path.mkdir()
        case "a file as folder":
            memory.glances.rmdir()
            memory.glances.touch()
    for _ in range(2):
        assert said(session, monkeypatch, capsys, "list") == wanted
    if "folder" not in spoil:  # it is written anew, with the sum of who wrote it
        assert (path.read_bytes() == content) == (spoil != "another's")


QUICKLY = (  # young records are cached too
    "import os, random, signal, time\n"
    "from kernelopt.session import record_cache\n"
    "from kernelopt.session.record_store import SHORT\n"
    "record_cache.SETTLED_NS = 20_000_000\n"
)


def test_a_glance_that_is_killed_in_its_write_is_made_anew(memory, session):
    """Forty kills of a process that writes the cache again and again; some fall into a write."""
    for number in range(20):
        memory.create(f"v{number}")
        memory.update(f"v{number}", {"device": "d" * 50_000})
    code = """if True:
        time.sleep(0.1)
        path, torn = memory.glances / "short", 0
        for _ in range(200):
            assert [record["device"] for record in memory.glance(("device",))] == ["d" * 50_000] * 20
            cache = record_cache.RecordCache(path, SHORT, memory.folder)
            assert cache.get("v0") is not None
            writer = os.fork()
            while writer == 0:
                cache._changed = True
                cache.save()
            time.sleep(random.uniform(0.005, 0.03))
            os.kill(writer, signal.SIGKILL)
            os.waitpid(writer, 0)
            torn += path.exists() and record_cache.RecordCache(path, SHORT, memory.folder).get("v0") is None
            if torn:  # one is enough, and about one kill in ten falls into a write
                break
        print(torn)
    """
    killer = child(session, QUICKLY + code)
    assert int(killer.communicate()[0]) > 0, "no kill fell into a write"
    assert [path.name for path in memory.glances.iterdir()] == ["short"]


def test_eight_that_glance_and_write_at_the_same_time_see_what_they_wrote(memory, session):
    for number in range(8):
        memory.create(f"v{number}")
    code = """if True:
        for turn in range(40):
            memory.update(f"v{sys.argv[1]}", {"device": f"{turn}"})
            time.sleep(random.uniform(0, 0.04))
            seen = {record["version"]: record["device"] for record in memory.glance(("device",))}
            assert len(seen) == 8 and seen[f"v{sys.argv[1]}"] == f"{turn}", (seen, turn)
    """
    writers = [child(session, QUICKLY + code, number) for number in range(8)]
    assert [writer.wait() for writer in writers] == [0] * 8


def test_where_nothing_can_be_kept_all_is_read(memory, session):
    """A workspace that is read-only, with and without an old glance, and a disk that is full."""
    for number in range(120):
        memory.create(f"v{number}")
    time.sleep(2.1)

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))

    wanted = [f"v{number}" for number in range(120)]
    for change, before in (
        (lambda: session.root.chmod(0o555), drop_the_right_to_write_anywhere),
        (lambda: session.root.chmod(0o755), limit),
        (lambda: memory.glances.chmod(0o555), drop_the_right_to_write_anywhere),
        (lambda: memory.glances.chmod(0o000), drop_the_right_to_write_anywhere),
    ):
        change()
        try:
            done = manager(session, "list", before=before)
        finally:
            kept = memory.glances.is_dir() and [path.stat().st_size for path in memory.glances.glob("short")]
            session.root.chmod(0o755)
        assert done.returncode == 0 and not done.stderr, done.stderr
        assert [line.split()[0] for line in done.stdout.splitlines()] == wanted
        assert before is limit or kept in (False, [], [500]), kept
    memory.glances.chmod(0o755)


def test_a_mistyped_version_costs_nothing(memory, session):
    memory.create("v0")
    done = manager(session, "create", "--version", "v3000000000")
    assert done.returncode == 2 and "the next version is v1" in done.stderr and memory.versions() == ["v0"]
    memory.create("v3000000000")  # by hand
    assert memory.left_out() == ["no record of v1, v2, v3, v4, v5 …: the file is gone"]


@pytest.mark.parametrize("kind", ["pipe", "folder", "link", "file"])
def test_a_lock_is_a_plain_file_and_what_stands_in_it_stays(memory, session, tmp_path, kind):
    mine = tmp_path / "mine.txt"
    mine.write_text("kept")
    locks = {
        memory.folder / ".lock": lambda: run_tool(
            "memory_manager.py", "create", "--workspace", session.root, "--version", "v0", timeout=20
        ),
        session.root / ".git" / "kernelopt-lock": lambda: run_tool(
            "run_gate.py", "--workspace", session.root, "--version", "v0", timeout=20
        ),
    }
    for path, call in locks.items():
        {
            "pipe": os.mkfifo,
            "folder": Path.mkdir,
            "link": lambda path: path.symlink_to(mine),
            "file": lambda path: path.write_text("kept"),
        }[kind](path)
        done = call()
        if kind == "file":
            assert "is no plain file" not in done.stderr and path.read_text() == "kept"
        else:
            assert done.returncode == 2 and f"{path} is no plain file; remove it" in done.stderr
            assert done.stderr.count("\n") == 1
    assert mine.read_text() == "kept"
