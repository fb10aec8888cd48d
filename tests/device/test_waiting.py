"""Children that are forked ahead and wait for their request. Without a GPU none is: `waiting` has them forked all the
same, and nothing stands in for the start of CUDA but what a test says."""

import errno
import json
import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import kernel_text
from kernelopt.device import forked_ahead, gpu, landlock, processes, standing
from kernelopt.device.beside import Beside
from kernelopt.device.fork_server import Child, Server
from kernelopt.device.forked_ahead import ForkedAhead
from kernelopt.device.outcomes import Outcome
from kernelopt.device.sandbox import Sandbox
from kernelopt.errors import EnvironmentLacks
from kernelopt.measure import runs, timing, verify
from kernelopt.session.subject import KernelUnderTest
from kernelopt.worker import server

needs_landlock = pytest.mark.skipif(landlock.version() == 0, reason="this kernel has no Landlock")


@pytest.fixture
def waiting(interpreter, monkeypatch):
    """The shared sandbox, in which children may wait."""
    monkeypatch.setattr(ForkedAhead, "_may_wait", lambda _: 9)
    yield interpreter
    interpreter.forked_ahead.end()


@pytest.fixture
def forked(monkeypatch) -> list[str]:
    """The requests that fresh children of the sandbox's server get."""
    requests, fork = [], Server.fork

    def noted(server, request, *arguments):
        requests.append(request)
        return fork(server, request, *arguments)

    monkeypatch.setattr(Server, "fork", noted)
    return requests


def estimate(sandboxed: Sandbox, problem, timeout_s: float = 60) -> Outcome:
    arguments = {"reference": str(problem["reference"]), "dtype": None, "workloads": None}
    return sandboxed.run("estimate", arguments, timeout_s)


def descendants(sandboxed: Sandbox) -> list[int]:
    """Living processes below the sandbox's server, parents before their children."""
    parents = {child: parent for child, parent in processes.parents().items() if lives(child)}
    found = [sandboxed.server()._process.pid]
    for above in found:
        found += [child for child, parent in parents.items() if parent == above]
    return found[1:]


def lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(holds, within_s: float = 20) -> bool:
    end = time.monotonic() + within_s
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


def test_a_verdict_from_children_that_waited_is_the_same(problem, waiting, forked, monkeypatch):
    subject = KernelUnderTest(**problem)
    monkeypatch.setattr(runs, "processes_at_once", lambda *_: 2)
    ahead = verify.verify(waiting, subject, seeds=2)
    jobs = [request.partition('"job": "')[2].partition('"')[0] for request in forked]
    waiting.forked_ahead.end()
    monkeypatch.setattr(ForkedAhead, "_may_wait", lambda _: 0)
    fresh = verify.verify(waiting, subject, seeds=2)
    assert jobs == [] and ahead.status == "OK"
    assert [(case.variant, case.status) for case in ahead.cases] == [
        (case.variant, case.status) for case in fresh.cases
    ]


def test_a_timing_takes_the_children_that_waited_and_needs_no_more_of_them(problem, waiting, forked, monkeypatch):
    monkeypatch.setattr(timing, "suspicious", lambda *_: None)  # on a busy machine times are taken again
    timing.get_ready(waiting, False, "estimate")
    cases = timing.inputs(waiting, problem["reference"], None, ["default"], count=2)
    timed = timing.measure(waiting, problem["kernel"], None, cases, warmup_ms=1, rep_ms=1)
    assert timed["default"].timing.latency.runs and not forked
    assert waiting.forked_ahead.until_ready("measure") == 3 and waiting.forked_ahead.until_ready("check") == 2
    assert estimate(waiting, problem).result["workloads"] and not forked


def test_a_time_limit_counts_from_the_request(problem, waiting):
    problem["reference"].write_text("import time\ntime.sleep(600)")
    waiting.forked_ahead.get_ready("estimate")
    assert waiting.forked_ahead.until_ready("estimate") == 1
    time.sleep(0.6)
    outcome = estimate(waiting, problem, timeout_s=0.5)
    assert outcome.timed_out and outcome.result is None and 0.5 <= outcome.wall_s < 10
    assert until(lambda: not descendants(waiting))


@pytest.mark.parametrize("which", [0, 1], ids=["its server", "the child"])
def test_where_a_child_died_before_its_request_the_job_runs_in_a_fresh_one(problem, waiting, forked, which):
    waiting.forked_ahead.get_ready("estimate")
    waiting.forked_ahead.until_ready("estimate")
    child = descendants(waiting)[1]
    os.kill(descendants(waiting)[which], signal.SIGKILL)
    assert until(lambda: not lives(child))
    assert estimate(waiting, problem).result["workloads"] and len(forked) == 1


def test_where_a_gpu_does_not_start_the_fresh_child_says_why(problem, waiting, forked, monkeypatch):
    """torch of this suite has no GPU."""
    monkeypatch.setattr(waiting, "gpu", SimpleNamespace(name="stand-in", driver="1"))
    waiting.forked_ahead.get_ready("estimate")
    with pytest.raises(EnvironmentLacks, match="cannot use it"):
        estimate(waiting, problem)
    assert len(forked) == 1 and not waiting.forked_ahead._waiting


def test_side_by_side_each_takes_one_that_waited_or_a_fresh_one(problem, waiting):
    waiting.forked_ahead.get_ready("estimate")
    waiting.forked_ahead.until_ready("estimate")
    arguments = {"reference": str(problem["reference"]), "dtype": None, "workloads": None}
    ended = standing.side_by_side(waiting, [standing.Job("estimate", arguments, 60)] * 2)
    assert all(outcome.result["workloads"] for outcome in ended) and not waiting.forked_ahead._waiting


def test_jobs_of_several_threads_get_their_own_results(tmp_path, problem, interpreter):
    """Without children that wait for them."""
    nothing = {"reference": tmp_path / "nothing.py"}
    nothing["reference"].write_text("")
    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(lambda one: estimate(interpreter, one), [problem, nothing] * 2))
    assert [sorted(outcome.result) for outcome in outcomes] == [["workloads"], ["error"]] * 2


def test_what_was_not_used_is_ended_before_another_may_use_the_gpu(waiting, tmp_path):
    waiting.forked_ahead.get_ready("run", "check")
    waiting.forked_ahead.until_ready("run")
    assert len(descendants(waiting)) == 4
    waiting.forked_ahead.get_ready("run", "check")
    assert waiting.forked_ahead.count() == 2  # those of a kernel that was not checked do not add up
    assert waiting.forked_ahead.end() == 2
    assert until(lambda: not descendants(waiting)) and waiting.forked_ahead.end() == 0
    calls = []
    with Sandbox("cpu-interpreter", tmp_path) as own:
        own.forked_ahead._waiting.append(("run", SimpleNamespace(end=lambda: calls.append("ended"))))
        own._lock = SimpleNamespace(__exit__=lambda *_: calls.append("unlocked"))
    assert calls == ["ended", "unlocked"]


def test_the_first_is_ready_before_the_others_are_forked(waiting, monkeypatch):
    """All that start CUDA at once are ready when the last one is; the inputs are made meanwhile."""
    order, until_ready, real = [], Child.until_ready, Child

    def noted(server, **options):
        order.append(options["ahead"]["job"])
        return real(server, **options)

    def ready(child, *within_s):
        is_ready = until_ready(child, *within_s)
        order.append(is_ready)
        return is_ready

    monkeypatch.setattr(forked_ahead, "Child", noted)
    monkeypatch.setattr(real, "until_ready", ready)
    waiting.forked_ahead.get_ready("estimate", "run", "check")
    assert waiting.forked_ahead.count() == 3
    assert order[0] == "estimate" and order[-3:] == [True, "run", "check"]


def test_a_sandbox_that_ends_does_not_wait_for_the_first_to_be_ready(waiting, monkeypatch):
    monkeypatch.setattr(Child, "until_ready", lambda *_: time.sleep(0.01))
    waiting.forked_ahead.get_ready("estimate", "run")
    began = time.monotonic()
    assert waiting.forked_ahead.end() == 1 and time.monotonic() - began < 5
    assert not waiting.forked_ahead._ending.is_set()


def test_where_the_server_dies_before_the_others_are_forked_the_jobs_run_in_fresh_ones(problem, waiting, monkeypatch):
    def dies(child, *_):
        os.kill(waiting._server._process.pid, signal.SIGKILL)
        waiting._server._process.wait()
        return True

    monkeypatch.setattr(Child, "until_ready", dies)
    waiting.forked_ahead.get_ready("run", "estimate")
    assert waiting.forked_ahead.count() == 1
    assert estimate(waiting, problem).result["workloads"]


def test_a_first_child_that_never_gets_ready_holds_up_no_job(problem, waiting, monkeypatch):
    def never(child, within_s: float = 0.5) -> bool:
        time.sleep(min(within_s, 0.5))
        return False

    monkeypatch.setattr(Child, "until_ready", never)
    monkeypatch.setattr(forked_ahead, "FIRST_READY_S", 0.2)
    waiting.forked_ahead.get_ready("estimate", "run")
    assert waiting.forked_ahead.count() == 1
    assert estimate(waiting, problem).result["workloads"]


def test_where_no_more_can_be_forked_the_job_runs_in_a_fresh_child_and_the_sandbox_ends(problem, tmp_path, monkeypatch):
    monkeypatch.setattr(ForkedAhead, "_may_wait", lambda _: 4)
    real, made = Child, []

    def fails(*arguments, **options):
        if made:
            raise OSError(errno.EMFILE, "Too many open files")
        made.append(real(*arguments, **options))
        return made[0]

    monkeypatch.setattr(forked_ahead, "Child", fails)
    with Sandbox("cpu-interpreter", tmp_path) as own:
        own.forked_ahead.get_ready("check", "estimate")
        assert own.forked_ahead.count() == 1
        assert estimate(own, problem).result["workloads"]
    assert not own.scratch.exists() and not own._server.alive()


def test_as_many_wait_as_take_little_of_the_memory_that_is_free(monkeypatch):
    free = {80 << 30: 8, 24 << 30: 2, 8 << 30: 0, 0: 0}
    for size, children in free.items():
        monkeypatch.setattr(gpu, "shared_bytes", lambda size=size: size)
        assert ForkedAhead._may_wait(SimpleNamespace(_on_gpu=True)) == children
        assert ForkedAhead._may_wait(SimpleNamespace(_on_gpu=False)) == 0


@needs_landlock
def test_a_child_that_waited_is_confined_and_works_in_a_folder_made_for_its_job(
    problem, waiting, tmp_path, monkeypatch
):
    monkeypatch.setattr(waiting, "isolation", "landlock")
    mark = str(tmp_path / "mark")
    body = (
        "import ctypes, os\n"
        f"elsewhere = ctypes.CDLL(None).open({mark!r}.encode(), os.O_CREAT | os.O_WRONLY, 0o600)\n"
        "here = ctypes.CDLL(None).open(b'mark', os.O_CREAT | os.O_WRONLY, 0o600)\n"
        "raise ValueError(elsewhere, here > 0, os.listdir(), os.getcwd())"
    )
    problem["kernel"].write_text(kernel_text(body))
    said = verify.verify(waiting, KernelUnderTest(**problem, only_these_shapes=True), seeds=2).summary
    assert f"(-1, True, ['mark'], '{waiting.open}/run-" in said and not Path(mark).exists()


def test_a_waiting_child_holds_nothing_of_the_request_of_another(problem, waiting):
    """Its memory is searched for the name of the other's reference."""
    waiting.forked_ahead.get_ready("estimate", "check")
    waiting.forked_ahead.until_ready("check")
    waits = descendants(waiting)[-1]
    named = problem["reference"].rename(problem["reference"].with_name("of_another_job.py"))
    assert estimate(waiting, {"reference": named}).result["workloads"]
    assert waits in descendants(waiting)
    found = [name in part for part in memory_of(waits) for name in (b"of_another_job", b"_end_all_children")]
    assert found.count(True) == sum(found[1::2]) > 0


def memory_of(process: int):
    """The contents of its writable memory, piece by piece."""
    with open(f"/proc/{process}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{process}/maps").read_text().splitlines():
            span, rights, *_ = line.split()
            start, end = (int(edge, 16) for edge in span.split("-"))
            if rights.startswith("rw"):
                memory.seek(start)
                yield memory.read(end - start)


def lone_process(sandboxed: Sandbox, file: str) -> str:
    """The folder of the one process that a stand-in for a profiler has started, once it has made `file` there."""
    ends = time.monotonic() + 30
    while not (made := list(sandboxed.open.glob(f"estimate-*/{file}"))):
        assert time.monotonic() < ends, f"no {file}"
        time.sleep(0.01)
    (path,) = made
    return str(path.parent)


@pytest.mark.parametrize("begins", [True, False])
def test_a_process_under_a_profiler_starts_at_once_and_its_job_when_it_is_asked(begins, interpreter, problem):
    beside = Beside(interpreter, ["env"], "estimate", 60)  # env stands in for the profiler
    try:
        folder = Path(lone_process(interpreter, "report"))  # by then torch is imported
        assert beside.outcome(0.2) is None and beside.is_running()
        if begins:
            beside.begin({"reference": str(problem["reference"]), "dtype": None, "workloads": None}, [])
            assert beside.outcome(60).result["workloads"] and not folder.exists()
    finally:
        began = time.monotonic()
        beside.end()
    assert not beside.is_running() and not folder.exists() and time.monotonic() - began < 10


def test_a_request_that_does_not_come_ends_the_process_that_waits_for_it(monkeypatch, tmp_path):
    ended = subprocess.Popen(["true"])  # nobody waits for it: it stays in /proc
    with pytest.raises(RuntimeError, match="its writer has ended"):
        server._awaited(tmp_path / "request.json", ended.pid)
    ended.wait()
    assert not processes.runs(ended.pid) and processes.runs(os.getpid())
    monkeypatch.setattr(server, "LONGEST_WAIT_S", 0.05)
    for starter in (os.getpid(), 0):
        with pytest.raises(RuntimeError, match="no request came"):
            server._awaited(tmp_path / "request.json", starter)


def test_what_fails_before_the_request_fails_in_the_job_again_and_is_reported(monkeypatch, tmp_path):
    """Under compute-sanitizer a process that only fails shows 0 errors."""
    done = []

    def fails():
        done.append("CUDA")
        raise server.NoGpuError("no memory is left")

    monkeypatch.setattr(server, "_require_gpu", fails)
    monkeypatch.setattr(server, "_limit", lambda: None)
    request, report = tmp_path / "request.json", tmp_path / "report"
    bounds = {"device": "cuda", "confined": False}
    wanted = {"seal": "s", "folder": str(tmp_path), "job": "probe", **bounds, "rules": {}, "arguments": {}}
    request.write_text(json.dumps(wanted))
    server.once(request, report, os.getpid(), {"job": "probe", **bounds, "writable": []})
    assert done == ["CUDA", "CUDA"] and "no memory is left" in report.read_text() and not request.exists()


def test_a_sandbox_ends_what_still_waits_under_a_profiler():
    with Sandbox("cpu-interpreter") as own:
        beside = Beside(own, ["env"], "estimate", 60)
        lone_process(own, "report")
    assert not beside.is_running() and own.beside == []
