"""Children that nobody has vetted: what they may do, what is left of them, and who may use the GPU meanwhile."""

import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

import pytest
from conftest import BUNDLE, STAND_INS, kernel_text, run_tool, tool_json
from kernelopt.device import fork_server, gpu, gpu_lock, isolation, landlock
from kernelopt.device.sandbox import Sandbox
from kernelopt.device.scratch import remove_abandoned
from kernelopt.errors import EnvironmentLacks, UsageError
from kernelopt.measure import verify
from kernelopt.session.subject import KernelUnderTest

needs_bubblewrap = pytest.mark.skipif(
    isolation.why_no_bubblewrap() is not None, reason=f"bubblewrap: {isolation.why_no_bubblewrap()}"
)


FILTERED = [sys.executable, STAND_INS / "socket_filter.py"]  # a command's start
needs_filter = pytest.mark.skipif(
    subprocess.run([*FILTERED, "true"], capture_output=True).returncode != 0, reason="seccomp cannot filter here"
)
needs_landlock = pytest.mark.skipif(landlock.version() == 0, reason="this kernel has no Landlock")


@pytest.fixture(scope="module")
def landlocked(interpreter):
    """Where "auto" takes Landlock, the sandbox that all tests share."""
    if interpreter.isolation == "landlock":
        yield interpreter
    else:
        with Sandbox("cpu-interpreter", kind="landlock") as own:
            yield own


def said_inside(problem, sandboxed: Sandbox, body: str) -> str:
    """The message of what a kernel raises in there."""
    problem["kernel"].write_text(kernel_text(body))
    return verify.verify(sandboxed, KernelUnderTest(**problem), seeds=2).summary


def test_a_killed_parent_leaves_no_child_and_its_scratch_goes_with_the_next_run(problem, tmp_path):
    problem["kernel"].write_text(kernel_text("import os, time\nos.mkdir('x')\ntime.sleep(600)"))
    arguments = ["--kernel", problem["kernel"], "--reference", problem["reference"], "--device", "cpu-interpreter"]
    arguments += ["--sandbox", "none"]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    tool = subprocess.Popen(
        [sys.executable, BUNDLE / "tools" / "verify_kernel.py", *arguments], env={**os.environ, "TMPDIR": str(scratch)}
    )
    deadline = time.monotonic() + 60
    while not list(scratch.glob("kernelopt-*/open/run-*/x")) and time.monotonic() < deadline:
        time.sleep(0.05)
    inside = processes_in(scratch)
    tool.send_signal(signal.SIGKILL)
    tool.wait()
    while processes_in(scratch) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(inside) >= 2 and not processes_in(scratch)
    remove_abandoned(scratch)
    assert not list(scratch.iterdir())


def processes_in(folder: Path) -> list[int]:
    """Living processes that work in that folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            inside = (entry / "cwd").readlink().is_relative_to(folder)
            zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            continue
        found += [int(entry.name)] if inside and not zombie else []
    return found


def test_a_kernel_that_kills_the_server_does_not_stop_the_next_run(problem, interpreter, monkeypatch):
    monkeypatch.setattr(interpreter, "isolation", "none")
    said = said_inside(problem, interpreter, "import ctypes, os\nctypes.CDLL(None).kill(os.getppid(), 9)\nreturn x")
    assert said.startswith("RUNTIME_ERROR")
    problem["kernel"].write_text(kernel_text())
    assert verify.verify(interpreter, KernelUnderTest(**problem), seeds=2).status == "OK"


def test_no_garbage_is_looked_for_while_torch_is_imported():
    """That took a fifth of the import. Afterwards it is looked for."""
    code = """import gc, runpy, sys
    sys.argv[1:] = ["once"]
    try: runpy.run_module("kernelopt.worker", run_name="__main__")
    except ValueError: pass  # it needs a request
    print("torch" in sys.modules, gc.isenabled(), gc.get_stats()[1]["collections"])""".replace("\n    ", "\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=BUNDLE / "tools", capture_output=True, text=True)
    loaded, enabled, looks = done.stdout.split()
    assert loaded == enabled == "True" and int(looks) < 10, done.stderr  # 34 where it is not disabled


def test_a_worker_that_does_not_start_is_a_lack_and_says_why(monkeypatch):
    monkeypatch.setattr(fork_server, "WORKER", [sys.executable, "-c", "raise SystemExit('no such library')"])
    with Sandbox("cpu-interpreter") as own, pytest.raises(EnvironmentLacks, match="does not start: no such library"):
        own.run("probe", {}, 10)


@needs_filter
def test_the_worker_needs_no_call_that_the_sandbox_of_an_agent_refuses(problem):
    arguments = ["--kernel", problem["kernel"], "--reference", problem["reference"], "--device", "cpu-interpreter"]
    tool = [sys.executable, BUNDLE / "tools" / "verify_kernel.py"]
    done = subprocess.run([*FILTERED, *tool, *arguments], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("OK on cpu-interpreter"), done.stderr


@needs_filter
def test_a_worker_whose_calls_are_refused_is_a_lack_that_names_the_sandbox(monkeypatch):
    refused = [*FILTERED, sys.executable, "-c", "import socket; socket.socket(socket.AF_INET)"]
    monkeypatch.setattr(fork_server, "WORKER", refused)
    says = r"does not start: PermissionError.* not permitted; a sandbox around this command refused a system call"
    with Sandbox("cpu-interpreter") as own, pytest.raises(EnvironmentLacks, match=says):
        own.run("probe", {}, 10)


def test_a_message_that_may_not_be_sent_is_no_dead_worker(monkeypatch):
    """Some filters refuse sendmsg too; waiting for an answer would take the job's whole time limit."""
    refused = PermissionError(errno.EPERM, "Operation not permitted")
    monkeypatch.setattr(fork_server.socket, "send_fds", lambda *_: (_ for _ in ()).throw(refused))
    with pytest.raises(PermissionError):
        fork_server.send_job(None, os.memfd_create("request"), "seal", {})


def test_the_seconds_of_jobs_that_run_beside_each_other_count_once(monkeypatch):
    with Sandbox("cpu-interpreter", kind="none") as own:
        for job, began, ended in (("run", 10, 14), ("run", 11, 15), ("check", 20, 21), ("run", 30, 32)):
            monkeypatch.setattr(time, "monotonic", lambda ended=ended: ended)
            own.spent.note(job, began)
        assert own.seconds() == {"run": 7, "check": 1}


def test_limits_hold_inside(problem, interpreter):
    names = ("RLIMIT_CORE", "RLIMIT_FSIZE", "RLIMIT_DATA", "RLIMIT_NPROC")
    body = f"import resource\nraise ValueError([resource.getrlimit(getattr(resource, n))[0] for n in {names}])"
    limits = said_inside(problem, interpreter, body).partition("[")[2].partition("]")[0].split(", ")
    core, size, memory, tasks = map(int, limits)
    assert core == 0 and size > 0 and tasks > 0
    assert 0 < memory < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_home_temporary_files_and_caches_are_the_sandboxs_own(problem, interpreter):
    names = ("HOME", "TMPDIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "CUDA_CACHE_PATH")
    said = said_inside(problem, interpreter, f"import os\nraise ValueError([os.environ[n] for n in {names}])")
    assert said.count(str(interpreter.scratch)) == len(names)


@needs_bubblewrap
def test_behind_bubblewrap_native_code_writes_nowhere_else_and_sees_no_network(problem, tmp_path):
    with Sandbox("cpu-interpreter", kind="bwrap") as own:
        body = (
            "import ctypes, os, socket\n"
            f"elsewhere = ctypes.CDLL(None).open({str(tmp_path / 'mark')!r}.encode(), "
            "os.O_CREAT | os.O_WRONLY, 0o600)\n"
            "here = ctypes.CDLL(None).open(b'mark', os.O_CREAT | os.O_WRONLY, 0o600)\n"
            "raise ValueError(elsewhere, here > 0, [name for _, name in socket.if_nameindex()])"
        )
        assert "(-1, True, ['lo'])" in said_inside(problem, own, body)
    assert not (tmp_path / "mark").exists()


@needs_bubblewrap
def test_the_result_says_which_sandbox_it_was(problem):
    arguments = ["--kernel", problem["kernel"], "--reference", problem["reference"], "--device", "cpu-interpreter"]
    for asked, got in (("auto", "bwrap"), ("bwrap", "bwrap"), ("none", "none")):
        assert tool_json("verify_kernel.py", *arguments, "--seeds", 2, "--sandbox", asked)["sandbox"] == got


def test_bubblewrap_that_is_demanded_and_absent_is_a_lack(problem, monkeypatch):
    monkeypatch.setattr(isolation.shutil, "which", lambda _: None)
    with pytest.raises(EnvironmentLacks, match="no bwrap on the PATH"):
        isolation.isolation("bwrap")
    monkeypatch.setattr(landlock, "version", lambda: 0)
    with pytest.raises(EnvironmentLacks, match="no Landlock"):
        isolation.isolation("landlock")
    assert isolation.isolation("auto") == isolation.isolation("none") == "none"


@needs_landlock
def test_under_landlock_native_code_writes_connects_and_signals_nowhere_else(problem, tmp_path, landlocked):
    """What a kernel does through the C library raises no audit event; a library's own file functions neither."""
    (tmp_path / "mine").write_text("of the user")
    body = (
        "import ctypes, os\n"
        "c = ctypes.CDLL(None)\n"
        f"elsewhere = c.open({str(tmp_path / 'mark')!r}.encode(), os.O_CREAT | os.O_WRONLY, 0o600)\n"
        f"gone = c.unlink({str(tmp_path / 'mine')!r}.encode()), c.truncate({str(tmp_path / 'mine')!r}.encode(), 0)\n"
        "here = c.open(b'mark', os.O_CREAT | os.O_WRONLY, 0o600)\n"
        "try:\n"
        f"    saved = bool(torch.save([x], {str(tmp_path / 'saved')!r}))\n"
        "except RuntimeError:\n"
        "    saved = 'refused'\n"
        "raise ValueError(elsewhere, gone, here > 0, saved)"
    )
    assert "(-1, (-1, -1), True, 'refused')" in said_inside(problem, landlocked, body)
    assert [path.name for path in tmp_path.iterdir() if path.name in ("mark", "saved")] == []
    assert (tmp_path / "mine").read_text() == "of the user"


@pytest.mark.skipif(landlock.version() < 6, reason=f"Landlock {landlock.version()} does not bound signals")
def test_under_landlock_a_kernel_ends_no_process_outside(problem, landlocked):
    body = "import ctypes, os\nraise ValueError(ctypes.CDLL(None).kill(os.getppid(), 9))"
    assert "ValueError: -1" in said_inside(problem, landlocked, body)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_the_judges_files_never_lie_where_kernels_may_write(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, tempfile.TemporaryDirectory() as other:
        link = Path(other) / "link"
        link.symlink_to(folder)
        for home in (Path(folder), link):
            with pytest.raises(UsageError, match=r"kernels may write.*TMPDIR"):
                Sandbox("cpu-interpreter", home)
            monkeypatch.setattr(tempfile, "tempdir", str(home))
            with pytest.raises(UsageError):
                Sandbox("cpu-interpreter")
        assert not list(Path(folder).iterdir())


def test_an_unknown_sandbox_is_refused(problem):
    done = run_tool("verify_kernel.py", "--kernel", problem["kernel"], "--sandbox", "docker")
    assert done.returncode == 2 and done.stderr.count("\n") == 1


def test_a_gpu_has_one_lock_that_names_its_holder_and_goes_with_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_lock, "LOCKS", tmp_path)
    code = f"import pathlib, sys, time; sys.path.insert(0, {str(BUNDLE / 'tools')!r}); from kernelopt.device import gpu_lock\n"
    code += f"gpu_lock.LOCKS = pathlib.Path({str(tmp_path)!r})\n"
    code += "with gpu_lock.locked('GPU-1'): print('held', flush=True); time.sleep(30)"
    holder = subprocess.Popen([sys.executable, "-c", code, "sample"], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with (
        pytest.raises(EnvironmentLacks, match=f"process {holder.pid} of .*sample"),
        gpu_lock.locked("GPU-1", timeout_s=0.3),
    ):
        pass
    assert capsys.readouterr().err.count(f"waiting for the GPU, which process {holder.pid} of") == 1
    with pytest.raises(EnvironmentLacks, match="GPU busy"), gpu_lock.locked("GPU-1", timeout_s=0):
        pass
    assert not capsys.readouterr().err
    with gpu_lock.locked("GPU-2", timeout_s=0.3):
        pass
    holder.kill()
    holder.wait()
    with gpu_lock.locked("GPU-1", timeout_s=5):
        pass


def test_the_lock_of_another_user_is_opened_without_making_it(tmp_path, monkeypatch):
    """With fs.protected_regular Linux refuses O_CREAT on another's file in a sticky folder. A stand-in for that
    refusal."""
    monkeypatch.setattr(gpu_lock, "LOCKS", tmp_path)
    with gpu_lock.locked("GPU-1", timeout_s=0):
        pass
    plain = os.open

    def protected(path, flags, *mode):
        if flags & os.O_CREAT and Path(path).exists():
            raise PermissionError(path)
        return plain(path, flags, *mode)

    monkeypatch.setattr(os, "open", protected)
    with gpu_lock.locked("GPU-1", timeout_s=0):
        pass


def test_an_empty_list_of_visible_gpus_is_no_gpu(monkeypatch):
    """A stand-in for NVML, which is not asked."""
    monkeypatch.setattr(gpu.bundle, "require", lambda *_: None)
    pynvml = types.SimpleNamespace(NVMLError=RuntimeError, nvmlInit=int, nvmlShutdown=int, nvmlDeviceGetCount=int)
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for asked in (gpu.visible, gpu.identify):
        with pytest.raises(EnvironmentLacks, match="CUDA_VISIBLE_DEVICES, '', names no device"):
            asked()


def test_beside_a_gpu_large_tensors_lie_in_huge_pages_unless_the_user_says_otherwise(interpreter, monkeypatch):
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    assert "THP_MEM_ALLOC_ENABLE" not in interpreter._environment()
    monkeypatch.setattr(interpreter, "gpu", object())
    assert interpreter._environment()["THP_MEM_ALLOC_ENABLE"] == "1"
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    assert interpreter._environment()["THP_MEM_ALLOC_ENABLE"] == "0"
