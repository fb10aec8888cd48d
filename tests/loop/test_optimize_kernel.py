"""optimize_kernel.py and the steps that it gives to the loop, as far as they run without a GPU."""

import os
import re
import shutil
from pathlib import Path
from shlex import quote

import pytest
from conftest import BUNDLE
from kernelopt.errors import UsageError
from kernelopt.loop import agent_sandbox, executors, gpu_steps, trials
from kernelopt.loop.agent_sandbox import AgentSandbox
from kernelopt.loop.clients import CLIENTS
from kernelopt.session import record_store
from scripted_agents import UNCITED, W, run_until_killed


class WithoutGpu(executors.Executor):
    """What executors.Local does on a machine without a GPU, where it cannot be made."""

    slots = 1

    def examine(self, job, packed):
        return trials.examine(job, packed, self.timeout_s)

    profile = executors.Local.profile

    def stop(self):
        trials.end_all()


def test_a_plan_that_says_nothing_is_handed_back_before_anything_runs(ready, tmp_path):
    own = gpu_steps.GpuSteps(ready, WithoutGpu(ready, 60), print)
    (tmp_path / "plan.md").write_text("no plan")
    status, message = own.check(ready.kernel, tmp_path / "plan.md")
    assert status == "PLAN" and "Category" in message
    uncited = ready.root / ".loop" / "candidates" / "round1-0.md"
    uncited.parent.mkdir(parents=True)
    uncited.write_text(UNCITED.replace("\\n", "\n"))
    status, message = own.check(ready.kernel, uncited)
    assert status == "PLAN" and "plan.md, line 2: '3.9 TB/s' is no citation" in message


def test_at_the_end_the_best_is_profiled_whatever_could_be_compared(ready, monkeypatch):
    profiled = []
    monkeypatch.setattr(gpu_steps.GpuSteps, "profiled", lambda own, version: profiled.append(version))
    assert gpu_steps.GpuSteps(ready, WithoutGpu(ready, 60), print).final() == {} and profiled == [
        "v0"
    ]  # there is no GPU


def test_the_tools_own_brief_and_restart_work_on_a_real_workspace(ready, run_here, monkeypatch):
    """What optimize_kernel.py hands to the loop, but for what needs a GPU."""
    own = gpu_steps.GpuSteps(ready, WithoutGpu(ready, 60), print)
    recorded = BUNDLE / "examples" / "row_softmax" / "h200" / "profiles" / "v0" / "annotation"
    shutil.copytree(recorded, ready.profile("v0", "annotation"))
    text = own.brief("v0", 0)
    assert "Direction of this candidate: excess_dram_traffic" in text and "## Metrics" in text and "plan.md" in text
    assert "- sm_count: 132 SM <- " in text and "- boost_clock: " in text and ", torch 2." in text
    assert "one of your own" in own.brief("v0", 9)
    verify, template = re.search(r"`(\S+ \S+ --workspace \.)`", text)[1], re.search(r"copy (\S+) and fill", text)[1]
    python, tool, *arguments = verify.split()
    assert shutil.which(python) and Path(tool) == BUNDLE / "tools" / "verify_kernel.py"
    with AgentSandbox(ready, "round1-0", ready.kernel.read_bytes()) as clone, monkeypatch.context() as patch:
        patch.chdir(clone.path)
        patch.setenv("TRITON_INTERPRET", "1")
        done = run_here("verify_kernel.py", *arguments)
        assert done.stdout.startswith("OK on cpu-interpreter") and clone.touched() == [], done.stderr
    assert "## Action" in Path(template).read_text() and f"folder {BUNDLE}/gpu-wiki:" in text
    shutil.rmtree(ready.profile("v0", "annotation"))
    assert own.final() == {} and "could not be profiled here" in own.brief("v0", 0)  # there is no GPU
    assert own.restart() is None  # v0 alone: nothing may be masked
    (ready.memory / "restarts.json").write_text("{}")
    with pytest.raises(UsageError, match=r"restarts\.json is no list of restarts"):
        own.restart()
    (ready.memory / "restarts.json").unlink()
    records = record_store.RecordStore(ready)
    for number in range(1, 5):
        records.save(record_store.empty(f"v{number}"))
    assert "2 of 5" in own.restart()


def test_a_workspace_that_was_broken_before_a_kill_is_put_back_before_it_is_read(ready, run_here):
    breaks = f"rm -rf {W}/memory {W}/README.md {W}/.git; kill -9 $PPID; sleep 5"
    run_until_killed(ready, breaks)
    done = run_here("optimize_kernel.py", "--workspace", ready.root, "--agent", "true", "--resume")
    assert done.returncode == 3 and "put back, as they were before a kill" in done.stderr  # and there is no GPU
    assert record_store.RecordStore(ready).best().version == "v0" and ready.git("status", "--short") == ""
    agent_sandbox.clear_killed_run(ready)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--agent", "true", "--model", "m"], "--model goes with --client"),
        (["--agent", "true", "--unconfined"], "--unconfined goes with --client"),
        (["--client", "claude", "--unconfined"], "claude runs without a sandbox of its own"),
        (["--client", "gemini", "--network"], "gemini runs without a sandbox of its own"),
        (["--client", "codex", "--network"], "name it with --on"),
        (["--client", "codex", "--network", "--unconfined"], "not allowed with argument"),
        (["--client", "claude", "--agent", "true"], "not allowed with argument"),
        ([], "one of the arguments --client --agent is required"),
    ],
)
def test_options_that_do_not_go_together_are_refused(ready, run_here, options, says):
    done = run_here("optimize_kernel.py", "--workspace", ready.root, *options)
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "on"),
    [(["claude"], "ray://127.0.0.1:9"), (["codex"], "local"), (["codex", "--network"], "ray://127.0.0.1:9")],
)
def test_agents_that_reach_no_node_are_not_sent_to_one(ready, run_here, monkeypatch, tmp_path, options, on):
    """Codex's sandbox has no network by itself, so its agents check kernels here."""
    monkeypatch.setenv("KERNELOPT_ON", "")
    (tmp_path / options[0]).symlink_to(shutil.which("true"))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    done = run_here("optimize_kernel.py", "--workspace", ready.root, "--on", "ray://127.0.0.1:9", "--client", *options)
    assert done.returncode == 3 and os.environ["KERNELOPT_ON"] == on


def test_a_client_that_is_not_installed_is_named_before_anything_runs(ready, run_here, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    done = run_here("optimize_kernel.py", "--workspace", ready.root, "--client", "codex")
    assert done.returncode == 3 and "codex is not installed, or not on the PATH" in done.stderr, done.stderr


NO_NAMESPACE = (
    "bwrap: Creating new namespace failed: nesting depth or /proc/sys/user/max_*_namespaces exceeded (ENOSPC)"
)
NESTED = "error building bubblewrap command: app-server socket directory must be a user-owned directory with mode 0700"


@pytest.mark.parametrize("told", [NO_NAMESPACE, NESTED])
def test_a_sandbox_of_the_client_that_does_not_work_is_named_before_anything_runs(
    ready, run_here, monkeypatch, tmp_path, told
):
    """In a container, and inside Codex itself, each command of its agents would fail: lines of Codex 0.169.0."""
    pytest.importorskip("ray")
    codex = tmp_path / "codex"
    codex.write_text(f"#!/bin/sh\necho WARNING: proceeding >&2\necho '{told}' >&2\nexit 1\n")
    codex.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    options = ["optimize_kernel.py", "--workspace", ready.root, "--on", "ray://127.0.0.1:9", "--client", "codex"]
    done = run_here(*options)
    assert done.returncode == 3 and f"codex's own sandbox does not work here ({told})" in done.stderr, done.stderr
    assert "--unconfined" in done.stderr
    assert "nothing answers at ray://127.0.0.1:9" in run_here(*options, "--unconfined").stderr


def test_a_probe_that_fails_otherwise_stops_nothing(ready, run_here, monkeypatch, tmp_path):
    """An older Codex has another command."""
    pytest.importorskip("ray")
    codex = tmp_path / "codex"
    codex.write_text("#!/bin/sh\necho 'error: unrecognized subcommand' >&2\nexit 2\n")
    codex.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    done = run_here("optimize_kernel.py", "--workspace", ready.root, "--on", "ray://127.0.0.1:9", "--client", "codex")
    assert "nothing answers at ray://127.0.0.1:9" in done.stderr


def test_a_known_client_has_its_command_line():
    codex = CLIENTS["codex"]
    assert codex.command_line().startswith("codex exec --json --skip-git-repo-check --sandbox workspace-write ")
    assert codex.command_line("a b", True).endswith("--sandbox danger-full-access --model 'a b'")
    assert codex.command_line(network=True).endswith("tmp=true --config sandbox_workspace_write.network_access=true")
    assert CLIENTS["gemini"].command_line().endswith(f"--include-directories {quote(str(BUNDLE))}")


def test_the_brief_names_only_commands_that_work_where_the_agent_runs(ready):
    brief = gpu_steps.GpuSteps(ready, WithoutGpu(ready, 60), print, agents_see_gpu=False).brief("v0", 0)
    assert "verify_kernel.py --workspace . --device cpu-interpreter`" in brief and "extract_asm" not in brief
    assert "extract_asm.py .cache`" in gpu_steps.GpuSteps(ready, WithoutGpu(ready, 60), print).brief("v0", 0)
