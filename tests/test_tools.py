"""What holds for every command: help at once, no heavy import, any folder, any link, one sentence for an error."""

import errno
import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import BUNDLE, REFERENCE, processor_time, run_tool, tool_json
from kernelopt import cli
from kernelopt.errors import of_the_system

TOOLS = sorted(path.name for path in (BUNDLE / "tools").glob("*.py"))
HEAVY = {"torch", "numpy", "triton", "jsonschema_rs", "ray", "grpc"}


def help_of(tool: Path) -> tuple[list[str], set[str]]:
    """The lines of `tool --help`, and the heavy packages that it imports."""
    code = (
        "import runpy, sys\n"
        f"sys.argv = [{str(tool)!r}, '--help']\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as ended: assert not ended.code\n"
        f"print('HEAVY', *({HEAVY!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    *lines, heavy = done.stdout.splitlines()
    return lines, set(heavy.split()[1:])


@pytest.mark.parametrize("name", TOOLS)
def test_help_is_short_quick_imports_nothing_heavy_and_lists_the_exit_codes(name):
    before = processor_time()
    lines, heavy = help_of(BUNDLE / "tools" / name)
    assert processor_time() - before < 1.0  # of the processor, not of the clock: what HEAVY does not name
    assert heavy == set()
    assert any("exit codes: 0" in line for line in lines) and len(lines) <= 48
    takes = {option for option in ("--on", "--device") if any(line.strip().startswith(f"{option} ") for line in lines)}
    on_a_node = {name, name.replace(".py", ".sh")} & cli.ON_A_NODE
    assert ("--on" in takes) == bool(on_a_node)
    assert takes != {"--device"} or name == "import_task.py"  # which needs no GPU


def test_that_check_sees_a_heavy_import(tmp_path):
    (tmp_path / "bad.py").write_text("import numpy\n")
    assert help_of(tmp_path / "bad.py") == ([], {"numpy"})


@pytest.mark.parametrize("name", TOOLS)
def test_an_abbreviated_or_unknown_option_is_refused(name, run_here):
    assert run_here(name, "--jso").returncode == 2


def test_a_missing_package_is_not_blamed_on_the_kernel(problem):
    code = (
        "import importlib.util, runpy, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'triton' else find(name, *rest)\n"
        "import pathlib; pathlib.Path.exists = lambda *_: False\n"  # no .venv to go on in
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    tool = BUNDLE / "tools" / "estimate_work.py"
    start = f"import sys; sys.argv = [{str(tool)!r}, '--reference', {str(problem['reference'])!r}]\n"
    done = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True)
    assert done.returncode == 3 and "not installed: triton; run: bash scripts/setup.sh" in done.stderr


def test_tools_run_from_any_folder_and_through_a_link(tmp_path):
    link = tmp_path / "specs"
    link.symlink_to(BUNDLE / "tools" / "gpu_specs.py")
    for flags in ([], ["-P"] if sys.version_info >= (3, 11) else []):
        done = subprocess.run([sys.executable, *flags, link, "list"], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0 and "H200" in done.stdout, done.stderr


def test_shell_commands_run_through_a_link_too(tmp_path):
    link = tmp_path / "init"
    link.symlink_to(BUNDLE / "reference" / "workspace_init.sh")
    done = subprocess.run(["bash", link, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "KERNEL" in done.stdout


def test_json_is_one_object_and_refuses_nan():
    from kernelopt import bundle

    with pytest.raises(ValueError):
        bundle.dumps({"x": float("nan")})


def test_an_atomic_write_leaves_the_old_file_when_it_fails(tmp_path, monkeypatch):
    from kernelopt import bundle

    target = tmp_path / "file"
    bundle.write_text(target, "old")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError):
        bundle.write_text(target, "new")
    assert target.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_a_read_only_folder_gets_one_sentence(session):
    (session.root / "memory").rmdir()
    (session.root / "memory").write_text("a file in the way")
    done = run_tool("memory_manager.py", "create", "--workspace", session.root, "--version", "v0")
    assert done.returncode in (1, 2, 3) and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "a.json"), "No space left on device: a.json; check disk"),
        (OSError(errno.EROFS, "Read-only file system", "a.json"), "a.json; check disk space and permissions; in an ag"),
        (
            OSError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"),
            "; in an agent's sandbox, docs/inst",
        ),
        (OSError(errno.EPERM, "Operation not permitted"), "not permitted: a sandbox around this command refused a sys"),
    ],
)
def test_an_error_of_the_system_says_what_to_look_at(error, says):
    said = of_the_system(error)
    assert says in said and ("docs/install.md" in said) == (error.errno != errno.ENOSPC)


def test_measuring_on_the_cpu_is_named_and_paired(problem, tmp_path, run_here):
    slow = tmp_path / "slow.py"
    slow.write_text(problem["kernel"].read_text().replace("return ", "import time; time.sleep(0.01); return "))
    arguments = ["--kernel", problem["kernel"], "--reference", problem["reference"], "--device", "cpu-interpreter"]
    found = tool_json("measure_kernel_time.py", *arguments, "--against", slow, run=run_here)
    assert found["device"] == "cpu-interpreter" and found["verdict"] == "FASTER" and found["speedup"]["point"] > 10
    assert set(found["latency_us"]) == {"median", "p20", "p80", "n"} and found["gpu_state"] is None
    back = ["--kernel", slow, *arguments[2:], "--against", problem["kernel"]]
    assert tool_json("measure_kernel_time.py", *back, code=1, run=run_here)["verdict"] == "SLOWER"


def test_measuring_against_a_revision_and_against_pytorch(session, run_here):
    arguments = ["--workspace", session.root, "--device", "cpu-interpreter"]
    for opponent in ("HEAD", session.reference):
        found = run_here("measure_kernel_time.py", *arguments, "--against", opponent, "--json")
        assert '"verdict"' in found.stdout, found.stderr
    assert run_here("measure_kernel_time.py", *arguments, "--against", "nosuchrev").returncode == 2
    refused = run_here("measure_kernel_time.py", *arguments, "--flops", 7)
    assert refused.returncode == 2 and f"estimate_work.py --workspace {session.root} takes --flops" in refused.stderr


def test_a_kernel_that_fails_is_not_timed(problem, run_here):
    problem["kernel"].write_text("raise SystemError('no')")
    arguments = ["--kernel", problem["kernel"], "--reference", problem["reference"], "--device", "cpu-interpreter"]
    done = run_here("measure_kernel_time.py", *arguments)
    assert done.returncode == 1 and "does not count" in done.stderr and not done.stdout


@pytest.mark.parametrize(
    "patch", ["time.perf_counter = lambda: 0.0", "torch.Tensor.cpu = lambda self: self", "torch.save = print"]
)
def test_a_kernel_that_patches_what_times_it_is_not_timed(problem, patch, run_here):
    problem["kernel"].write_text(f"import time, torch\n{patch}\n" + problem["kernel"].read_text())
    arguments = ["--kernel", problem["kernel"], "--reference", problem["reference"], "--device", "cpu-interpreter"]
    done = run_here("measure_kernel_time.py", *arguments)
    assert done.returncode == 1 and "CHEAT_SUSPECT" in done.stderr and "was replaced" in done.stderr, done.stderr


def test_estimate_of_a_file(tmp_path, run_here):
    (tmp_path / "r.py").write_text(REFERENCE)
    found = tool_json("estimate_work.py", "--reference", tmp_path / "r.py", "--dtype", "bf16", run=run_here)
    assert set(found["workloads"]) == {"default", "tall"} and found["workloads"]["default"]["dtype"] == "bf16"
    assert run_here("estimate_work.py", "--reference", tmp_path / "none.py").returncode == 2
    assert run_here("estimate_work.py").returncode == 2


def test_two_kernels_that_register_one_operator_are_not_timed_as_one(tmp_path, run_here):
    text = (
        "import torch\n"
        "@torch.library.custom_op('mine::op', mutates_args=())\n"
        "def op(x: torch.Tensor) -> torch.Tensor: return x * FACTOR\n"
        "def kernel_function(x): return op(x)\n"
    )
    for name, factor in (("a.py", "2"), ("b.py", "3")):
        (tmp_path / name).write_text(text.replace("FACTOR", factor))
    (tmp_path / "r.py").write_text(
        "import torch, torch.nn as nn\nclass Model(nn.Module):\n    def forward(self, x): return x * 2\n"
        "def get_inputs(): return [torch.randn(8)]\n"
    )
    arguments = ["--kernel", tmp_path / "a.py", "--reference", tmp_path / "r.py", "--device", "cpu-interpreter"]
    done = run_here("measure_kernel_time.py", *arguments, "--against", tmp_path / "b.py")
    assert done.returncode == 1 and "mine::op" in done.stderr and not done.stdout


def test_a_failing_opponent_is_named_and_a_hang_is_a_time_out(problem, tmp_path, run_here):
    arguments = ["--kernel", problem["kernel"], "--reference", problem["reference"], "--device", "cpu-interpreter"]
    (tmp_path / "bad.py").write_text("raise SystemError('no')")
    done = run_here("measure_kernel_time.py", *arguments, "--against", tmp_path / "bad.py")
    assert done.returncode == 2 and "compared with" in done.stderr
    problem["kernel"].write_text("import time\ntime.sleep(600)\n")
    done = run_here("measure_kernel_time.py", *arguments, "--timeout", 3)
    assert done.returncode == 4


def test_scratch_of_the_dead_is_removed_and_of_the_living_kept(tmp_path):
    from kernelopt.device.sandbox import Sandbox

    dead = tmp_path / "kernelopt-dead"
    dead.mkdir()
    (dead / "alive").write_text("")
    with Sandbox("cpu-interpreter", tmp_path) as living:
        assert not dead.exists()
        with Sandbox("cpu-interpreter", tmp_path):
            assert living.scratch.exists()
    assert not list(tmp_path.glob("kernelopt-*"))


def test_flops_may_be_written_as_people_write_them():
    options = ["--platform", "H200", "--dtype", "bf16", "--time-us", 210, "--bytes", "1e8"]
    found = tool_json("compute_utilization.py", *options, "--flops", "1.5e9")
    assert found["arithmetic_intensity"] == 15.0
    assert run_tool("compute_utilization.py", *options, "--flops", "1.5").returncode == 2


def test_a_run_that_nobody_watches_goes_on():
    """Under nohup a hang-up is ignored; messages that nobody reads end nothing."""
    code = (
        "import os, signal, sys\nsys.path.insert(0, 'tools')\nfrom kernelopt import cli\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "def main():\n    os.kill(os.getpid(), signal.SIGHUP)\n    cli.say('x' * 100000)\n    return 0\ncli.run(main)"
    )
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code], cwd=BUNDLE, stderr=write)
    os.close(write)
    assert done.returncode == 0


def shell(line: str, session, **environment) -> subprocess.CompletedProcess:
    """A command line of bash with $W, the workspace, and $T, the folder of the tools; Python buffers what it prints."""
    own = {**os.environ, "W": str(session.root), "T": f"{sys.executable} {BUNDLE / 'tools'}", "PYTHONUNBUFFERED": ""}
    command = ["bash", "-o", "pipefail", "-c", line]
    return subprocess.run(command, capture_output=True, env={**own, **environment}, timeout=60)


PRINTING = ("$T/memory_manager.py summary --workspace $W", "$T/check_goal.py $W --arm", "$T/check_goal.py --help")


@pytest.mark.parametrize("line", PRINTING)
def test_a_result_that_does_not_arrive_is_told_once_and_a_closed_pipe_ends_quietly(ready, line):
    full = shell(f"{line} > /dev/full", ready)
    assert full.returncode == 3 and b"No space left on device: input or output" in full.stderr, full.stderr
    assert full.stderr.count(b"\n") == 1
    code = "import os, subprocess, sys; r, w = os.pipe(); os.close(r); exit(subprocess.call(sys.argv[1:], stdout=w))"
    closed = shell(f"{sys.executable} -c '{code}' {line}", ready)
    assert (closed.returncode, closed.stderr) == (1, b"")


def test_without_stderr_messages_go_nowhere(ready):
    for line in ("memory_manager.py read --workspace $W --version v9", "check_goal.py --hook", "check_goal.py --no"):
        done = shell(f"$T/{line} 2>&-", ready)
        assert done.stdout == b"", line


def test_paths_with_letters_beyond_ascii_work_in_the_c_locale(tmp_path, problem, run_here):
    """Also where Python's own way around that locale, UTF-8 as here, is switched off."""
    folder = tmp_path / "köln"
    folder.mkdir()
    files = [option for name, path in problem.items() for option in (f"--{name}", path.rename(folder / path.name))]
    switched_off = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for run in (run_here, functools.partial(run_tool, env=switched_off)):
        done = run("verify_kernel.py", *files, "--device", "cpu-interpreter", "--seeds", 2, "--only-these-shapes")
        assert done.returncode == 0 and done.stdout.startswith("OK, at its own"), done.stdout + done.stderr
        assert str(folder) in done.stderr


@pytest.mark.parametrize("encoding", ["utf-8:strict", "latin-1", "ascii"])
def test_what_an_encoding_lacks_is_escaped(ready, encoding):
    root = str(ready.root.rename(f"{ready.root}\udcff"))  # a byte that is no UTF-8
    for line in (
        "memory_manager.py --help",
        "memory_manager.py list --workspace $W",
        "render_report.py $W",
        "check_goal.py $W --arm",
    ):
        done = shell(f"$T/{line}", ready, W=root, PYTHONIOENCODING=encoding)
        assert done.returncode == 0 and done.stdout, done.stderr
