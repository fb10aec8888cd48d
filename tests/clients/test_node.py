"""A GPU node, which is Ray on this machine, used from inside the clients; and files carried, where nothing is reached.

The node believes that it has two GPUs. tests/stand_ins/node stands in for them.
"""

import re
import shutil
import tempfile

import pytest
from conftest import BUNDLE, PLAN, STAND_INS, gpu_node, kernel_text, run_script
from kernelopt.gate import rounds
from kernelopt.session.record_store import RecordStore
from scripted_agents import log_lines, outcomes, stand_in

from .bench import PYTHON, Bench, ended, optimize, patient, shell
from .scripted_model import step
from .test_loop import PROFILE, RIGHT, WRITE, verification

NETWORK = {"codex": " --config sandbox_workspace_write.network_access=true"}  # the others have one


@pytest.fixture(scope="module")
def address():
    """Of a node whose folder is /tmp, where tools of the same user look for its token."""
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as home,  # Ray's sockets need short paths
        gpu_node(2, HOME=home, TMPDIR="/tmp", PYTHONPATH=str(STAND_INS / "node")) as (_, at, _),
    ):
        yield at


def verified(bench: Bench, problem, address: str, options: str) -> str:
    """What the client is told when it verifies a kernel of the project on the node."""
    for name, path in problem.items():
        shutil.copyfile(path, bench.project / f"{name}.py")
    tool = f"{PYTHON} {BUNDLE}/tools/verify_kernel.py --kernel kernel.py --reference reference.py"
    command = f"{tool} --device cpu-interpreter --only-these-shapes --on {address}"
    bench.model.follow(*shell(bench, command), step("say", "done"))
    bench.run(bench.client.command + options)
    return ended(bench.model.requests[-1])


def test_a_tool_runs_on_the_node(bench, problem, address):
    said = verified(bench, problem, address, NETWORK.get(bench.name, ""))
    verdict = "OK, at its own sizes alone, on cpu-interpreter: "
    assert re.search(rf"^on {address} \(.*^{verdict}.*^code 0$", said, re.DOTALL | re.MULTILINE), said


@pytest.mark.parametrize("home", ["codex"], indirect=True)
def test_without_a_network_the_tool_says_what_to_allow(bench, problem, address):
    said = verified(bench, problem, address, "")
    assert "may not open a connection" in said and "code 3" in said, said
    assert NETWORK["codex"].removeprefix(" --config ") in said


@pytest.mark.parametrize("home", ["codex"], indirect=True)
def test_the_loop_judges_on_the_node_and_so_do_its_agents(bench, ready, address, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # for the verification that the brief names
    shutil.copytree(PROFILE, ready.profile("v0", "annotation"))
    bench.model.follow(*WRITE, *patient(verification, "$TMPDIR"), step("say", "kernel.py and plan.md are there"))
    done = optimize(bench, ready, "--rounds", "2", "--on", address, "--network")
    assert outcomes(log_lines(ready)) == ["accepted", "accepted", "stop"], done.stderr
    said = ended(bench.model.requests[len(bench.model.script) - 1])
    assert f"on {address} (" in said and "OK on cpu-interpreter" in said, said


def test_candidates_are_packed_and_brought_home_by_the_client(bench, ready, monkeypatch):
    """Between the two they are judged here, where a stand-in measures."""
    root = shutil.move(ready.root, bench.project / "w")
    workspace = type(ready)(root)
    (root / "waiting").mkdir()
    kernel = kernel_text(RIGHT.format(40))
    (root / "waiting" / "fast.py").write_text(kernel)
    (root / "waiting" / "fast.md").write_text(PLAN)
    carry, trip = f"{PYTHON} {BUNDLE}/tools/carry.py", bench.project / "trip.tar.gz"
    bench.model.follow(step("shell", f"{carry} pack w --out {trip}; {carry} judge {trip}"), step("say", "packed"))
    bench.run(bench.client.command)
    assert "trip.tar.gz: fast" in bench.model.said and "no NVIDIA GPU here" in bench.model.said
    monkeypatch.setattr(rounds, "measure", lambda start, *_: stand_in(start.workspace).measure([kernel.encode()])[0])
    done = run_script(BUNDLE / "tools" / "carry.py", "judge", trip)
    assert done.stdout.startswith("fast: v1 ACCEPTED"), done.stderr
    bench.model.follow(step("shell", f"{carry} unpack trip.judged.tar.gz w"), step("say", "home"))
    bench.run(bench.client.command)
    assert "fast: v1 ACCEPTED" in bench.model.said
    assert RecordStore(workspace).best().version == "v1" and workspace.kernel.read_text() == kernel
