"""A command that runs in a mirror of the client's files: its result, its messages, what it changes. No Ray, no GPU."""

import contextlib
import os
import signal
import tempfile
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import BUNDLE
from kernelopt import bundle, cli
from kernelopt.device import gpu
from kernelopt.device.stop_signal import Stop
from kernelopt.errors import EnvironmentLacks, Refused, UsageError
from kernelopt.hardware import wiki
from kernelopt.loop import executors
from kernelopt.remote import hand_over, mirrors, there
from kernelopt.session import trees
from stand_in_node import Here, work


@pytest.fixture
def here(tmp_path, monkeypatch) -> Here:
    """The node's files are in a folder of the test."""
    (tmp_path / "node").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "node"))
    return Here()


def run(node, call) -> tuple[hand_over.Done, list[str]]:
    messages: list[str] = []
    return hand_over.run(node, call, messages.append), messages


def tree_of(workspace) -> trees.Tree:
    return trees.scan([str(workspace.root)], str(workspace.root))


# --- a run ------------------------------------------------------------------------------------------------------


def test_result_messages_and_exit_code_come_with_the_clients_own_paths(session, here):
    steps = ["say:reading {root}/kernel.py", "print:{root} is done", "print:köln", "exit:1"]
    done, messages = run(here, work(session, *steps))
    assert done == hand_over.Done(1, f"{session.root} is done\nköln\n", f"reading {session.root}/kernel.py")
    assert messages == [f"reading {session.root}/kernel.py"]


def test_what_changes_there_comes_home(session, here):
    (session.root / "old.txt").write_text("old")
    steps = ["write:memory/v0.json={root}/kernel.py", "write:.cache/triton/k/a.cubin=x", "write:.cache/cuda/y=y"]
    run(here, work(session, *steps, "remove:old.txt"))
    assert (session.memory / "v0.json").read_text() == f"{session.root}/kernel.py"  # not the mirror's path
    assert (session.cache / "triton" / "k" / "a.cubin").read_text() == "x" and not (session.cache / "cuda").exists()
    assert not (session.root / "old.txt").exists() and not session.git("fsck")


def test_only_what_the_node_lacks_is_sent_and_its_cache_stays_there(session, here):
    run(here, work(session, "write:.cache/cuda/x=compiled"))
    (session.root / "new.py").write_text("new")
    run(here, work(session))
    (session.root / "new.py").unlink()
    run(here, work(session))
    assert here.sent[0] > 3 and here.sent[1:] == [1, 0]
    (mirror,) = mirrors.node_folder().glob("*/files")
    names = {path.name for path in Path(f"{mirror}{session.root}").rglob("*")}
    assert "new.py" not in names and "x" in names


def test_a_file_that_was_changed_on_both_sides_is_not_overwritten(session, here, run_here):
    text = session.kernel.read_text()
    call = work(session, "write:kernel.py=theirs", "write:memory/v0.json=record", "say:now")

    def changes_it(_):
        session.kernel.write_text("mine")
        (session.root / "notes.md").write_text("another file")

    with pytest.raises(EnvironmentLacks, match=r"on the node: kernel\.py; nothing was overwritten") as error:
        hand_over.run(here, call, changes_it)
    assert session.kernel.read_text() == "mine" and not (session.memory / "v0.json").exists()
    command = str(error.value).rpartition("carry.py ")[2].split()
    assert run_here("carry.py", *command).returncode == 2
    session.kernel.write_text(text)  # as the message says
    assert run_here("carry.py", *command).returncode == 0
    assert session.kernel.read_text() == "theirs" and (session.memory / "v0.json").read_text() == "record"


def test_a_file_that_is_named_for_output_is_written_here(session, here, tmp_path):
    call = work(session, "write:../out/page.md=measured at {root}", "write:../other/x=not named")
    run(here, hand_over.Call(call.program, (*call.named, f"{tmp_path}/out/page.md"), *vars_of(call)))
    assert (tmp_path / "out" / "page.md").read_text() == f"measured at {session.root}"
    assert not (tmp_path / "other").exists()


def vars_of(call: hand_over.Call) -> tuple:
    return call.workspace, call.cwd, call.environment


def test_a_command_that_is_killed_there_changes_nothing_here(session, here):
    before = tree_of(session)
    done, _ = run(here, work(session, "write:kernel.py=half", "die:"))
    assert done.code == 137 and tree_of(session) == before


def test_a_connection_that_breaks_changes_nothing_here(session, here, monkeypatch):
    before = tree_of(session)

    def breaks(*_):
        raise EnvironmentLacks("the connection broke")

    monkeypatch.setattr(there.Run, "contents", breaks)
    with pytest.raises(EnvironmentLacks):
        run(here, work(session, "write:kernel.py=new"))
    assert tree_of(session) == before


def test_an_interrupt_ends_the_work_there(session, here):
    def interrupts(message):
        pids.append(int(message))
        raise KeyboardInterrupt

    pids: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        hand_over.run(here, work(session, "pid", "sleep:300"), interrupts)
    assert not Path(f"/proc/{pids[0]}").exists()


def test_a_command_that_prints_what_it_has_when_a_signal_ends_it_does_so_there(session, here, monkeypatch, run_here):
    """Its table was lost. Other tools are ended as ever."""
    stop = Stop()

    def signalled(message: str) -> None:
        assert message == "waiting"
        stop.signalled(signal.SIGTERM, None)

    call = work(session, "wait", "print:what it has", "write:explore/e1.json=rows", "exit:4")
    assert hand_over.run(here, call, signalled, stop) == hand_over.Done(4, "what it has\n", "waiting")
    assert (session.root / "explore/e1.json").read_text() == "rows"
    handled = []
    monkeypatch.setattr(cli, "handle", lambda handler, *signals: handled.append(set(signals)))
    for tool, arguments in {"gpu_specs.py": ["detect"], "explore_kernels.py": ["--keep", "k"]}.items():
        assert run_here(tool, *arguments, "--on", "127.0.0.1:1").returncode == 3
    assert handled.count({signal.SIGTERM, signal.SIGINT}) == 1


def test_a_file_that_changes_while_it_is_sent_is_not_judged(session, here, monkeypatch):
    scan = trees.scan

    def then_changed(*arguments, **options):
        tree = scan(*arguments, **options)
        session.kernel.write_text("changed")
        return tree

    monkeypatch.setattr(trees, "scan", then_changed)
    with pytest.raises(EnvironmentLacks, match=r"kernel\.py was changed while it was sent"):
        run(here, work(session))


def test_two_commands_at_once_have_two_mirrors_and_old_ones_go(session, here):
    first, lock = mirrors.take("abc", None)
    second, other = mirrors.take("abc", None)
    assert first.root != second.root
    other.close()
    assert mirrors.take("abc", None)[0].root == second.root
    os.utime(second.root.parent / "lock", (0, 0))
    os.utime(first.root.parent / "lock", (0, 0))
    mirrors.remove_unused(mirrors.node_folder())
    assert first.root.exists() and not second.root.exists()
    lock.close()


def test_the_nodes_folder_is_its_users_alone(here):
    mirrors.node_folder().chmod(0o755)
    with pytest.raises(EnvironmentLacks, match="is not a folder of yours alone"):
        mirrors.node_folder()


@pytest.mark.parametrize("name", ["/x/../etc", "relative", "/x//y"])
def test_a_path_that_leads_out_of_the_mirror_is_refused(here, name):
    mirror, _ = mirrors.take("abc", None)
    with pytest.raises(UsageError, match="is no path of a file that travels"):
        mirror.adopt({name: "folder"})


# --- a command line ---------------------------------------------------------------------------------------------


def test_the_paths_of_a_command_line_are_found_and_named_as_in_the_mirror(session, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.py").write_text("")
    tool = str(BUNDLE / "tools" / "measure_kernel_time.py")
    given = ["--kernel", "a.py", f"--reference={tmp_path}/./r.py", "--against", "base.py", "--on", "h:1", "--on=h:1"]
    parsed = {"kernel": Path("a.py"), "reference": tmp_path / "r.py", "against": "base.py", "workload": "default"}
    call = hand_over.call_of(Namespace(**parsed, on="h:1", many=[Path("x/../b")]), [tool, *given], None)
    expected = ["--kernel", "a.py", f"--reference={tmp_path}/r.py", "--against", "base.py"]
    assert call.program == ["tools/measure_kernel_time.py", *expected] and call.cwd == str(tmp_path)
    assert call.named == tuple(f"{tmp_path}/{name}" for name in ("a.py", "r.py", "base.py", "b"))
    in_mirror = [there.in_mirror(argument, list(call.named), "/m") for argument in call.program]
    assert in_mirror[3] == f"--reference=/m{tmp_path}/r.py" and in_mirror[2] == "a.py"


def test_a_wiki_that_the_task_names_travels(session, here, tmp_path, monkeypatch):
    from dataclasses import replace

    (tmp_path / "wiki" / "docs" / "hardware").mkdir(parents=True)
    session.update_readme(replace(session.task(), gpu_wiki_path=str(tmp_path / "wiki")), {})
    call = hand_over.call_of(Namespace(workspace=session.root), [str(BUNDLE / "tools" / "run_gate.py")], session)
    assert str(tmp_path / "wiki") in call.named
    run(here, hand_over.Call(work(session).program, call.named, *vars_of(work(session))))
    (mirror,) = mirrors.node_folder().glob("*/files")
    (tmp_path / "wiki").rename(tmp_path / "not here")
    with bundle.mirrored(mirror):
        assert wiki.root(str(tmp_path / "wiki")) == Path(f"{mirror}{tmp_path}/wiki")
    with pytest.raises(UsageError):
        wiki.root(str(tmp_path / "wiki"))


def test_the_gate_locks_the_workspace_here_too(session, monkeypatch, run_here):
    """Before it connects to anything."""
    with session.locked():
        done = run_here("run_gate.py", "--workspace", session.root, "--version", "v0", "--on", "127.0.0.1:1")
    assert done.returncode == 3 and "in use by another gate" in done.stderr
    done = run_here("run_gate.py", "--workspace", session.root / "none", "--version", "v0", "--on", "127.0.0.1:1")
    assert done.returncode == 2 and "is no workspace" in done.stderr


def test_a_command_for_a_node_leaves_with_its_result(session, here, monkeypatch, run_here):
    """Through cli.py, as any tool; gpu_specs.py is quick."""
    monkeypatch.setattr(hand_over, "connected", lambda address: contextlib.nullcontext(here))
    monkeypatch.setenv("KERNELOPT_ON", "somewhere:1")
    told = run_here("gpu_specs.py", "detect", "--on", "local")
    assert told.returncode == 3 and "no NVIDIA GPU here" in told.stderr
    done = run_here("gpu_specs.py", "detect")
    assert (done.returncode, done.stdout, here.sent) == (3, "", [0])
    assert done.stderr == told.stderr.replace(gpu.OR_ON_A_NODE, "")
    assert run_here("gpu_specs.py", "lookup", "H200", "sm_count").returncode == 0 and len(here.sent) == 1


# --- the loop ---------------------------------------------------------------------------------------------------


def test_the_loop_judges_on_a_node(ready, here):
    executor = executors.OnNode(ready, 60, here)
    assert executor.slots == 2
    with ThreadPoolExecutor(1) as pool:
        verifying = pool.submit(executor.verify, b"x = 1\n")
        with pytest.raises(EnvironmentLacks, match="no NVIDIA GPU here"):
            executor.measure([b"x = 1\n", b"x = 2\n"])
        with pytest.raises(EnvironmentLacks, match="no NVIDIA GPU here"):
            verifying.result()
    with pytest.raises(Refused, match="died, exit 1"):
        executor.examine("verify", b"no archive")


def test_the_loop_brings_profiles_home(ready, here, monkeypatch):
    said = []
    executors.OnNode(ready, 60, here).profile("v0", said.append)  # exit code 3: without a GPU, or without counters
    assert "no NVIDIA GPU here" in said[-1]
    with pytest.raises(Refused, match="'x7' is no version"):
        executors.OnNode(ready, 60, here).profile("x7", said.append)
    here.gpus = 0
    with pytest.raises(EnvironmentLacks, match="the test's node has no GPU"):
        executors.OnNode(ready, 60, here)
