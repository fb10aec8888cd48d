"""The unattended loop with the clients as its agents: optimize_kernel.py --client.

The GPU has a stand-in (tests/loop/scripted_agents.py): a kernel's time is what it says of itself, and the measurement of
its round is a recorded one of an H200. Briefs, agents, clones, gate and history are real.
"""

import re
import shutil
import signal
import subprocess
import sys

import pytest
from conftest import BUNDLE, kernel_text
from kernelopt.loop import agent_sandbox
from kernelopt.loop.clients import CLIENTS
from kernelopt.session.workspace import Workspace
from scripted_agents import PLAN, STOPPABLE, log_lines, nap, outcomes, program, running

from .bench import optimize, wait_until
from .scripted_model import Request, step

PROFILE = BUNDLE / "examples" / "row_softmax" / "h200" / "profiles" / "v0" / "annotation"
RIGHT = "us = {}\nreturn torch.relu(x * self.weight) * self.scale"


def desk(request: Request) -> str:
    """The agent's folder, as the client has named it to its model."""
    return re.search(r"/\S*/kernelopt-agents-\d+/\w+/round\d+-\d+", request.text)[0]


def in_desk(name: str):
    return lambda request: f"{desk(request)}/{name}"


def faster_kernel(request: Request) -> str:
    """A kernel that claims 10 us less than the one that the agent has read."""
    before = [int(us) for us in re.findall(r"us = (\d+)", request.text)]
    return kernel_text(RIGHT.format(min(before, default=100) - 10))


def verification(request: Request) -> str:
    """The command that the brief gives for seeing for oneself."""
    return re.search(r"`(\S+ \S+/verify_kernel\.py --workspace \.[^`]*)`", request.text)[1]


WRITE = (
    step("read", in_desk("kernel.py")),
    step("read", f"{BUNDLE}/reference/plan.md"),
    step("write", in_desk("kernel.py"), faster_kernel),
    step("shell", f"printf '{PLAN}' > plan.md"),
)
ANSWER = (*WRITE, step("shell", verification), step("say", "kernel.py and plan.md are there"))


def test_two_rounds_are_accepted_with_the_command_line_that_the_loop_knows(bench, ready, measured_here):
    shutil.copytree(PROFILE, ready.profile("v0", "annotation"))
    bench.model.follow(*ANSWER)
    done = optimize(bench, ready, "--rounds", "2")
    assert outcomes(log_lines(ready)) == ["accepted", "accepted", "stop"], done.stderr
    said = bench.model.requests[len(ANSWER) - 1].text
    assert "## Metrics" in said and "# Plan for vN" in said and "OK on cpu-interpreter" in said
    assert nothing_is_left(ready, CLIENTS[bench.name].command_line())


def test_a_time_out_is_told_as_one_and_leaves_nothing_behind(bench, ready, measured_here):
    bench.model.follow(step("shell", f"echo x > notes.txt; sleep {nap(401)}"), step("say", "done"))
    optimize(bench, ready, "--rounds", "1", "--agent-timeout", str(bench.client.starts_s))
    line = log_lines(ready)[0]
    assert line["outcome"] == "timed out", line
    assert len(bench.model.requests) == 1  # its command ran
    assert nothing_is_left(ready, nap(401))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_loop_leaves_nothing_behind(bench, ready, number):
    """Of what SIGKILL left, --resume clears up first."""
    bench.model.follow(step("shell", f"echo x > notes.txt; sleep {nap(402)}"), step("say", "done"))
    loop = STOPPABLE + program(ready, CLIENTS[bench.name].command_line(), agent_timeout_s=100)
    process = subprocess.Popen([sys.executable, "-c", loop], env=bench.environment)
    assert wait_until(lambda: running(nap(402)), 90)
    process.send_signal(number)
    process.wait()
    if number == signal.SIGKILL:
        agent_sandbox.clear_killed_run(ready)
    assert nothing_is_left(ready, nap(402))


def nothing_is_left(workspace: Workspace, word: str) -> bool:
    """Whether neither agents' folders nor processes with that word are there."""
    folder = agent_sandbox.run_folder(workspace)
    return wait_until(lambda: not running(word) and not (folder.exists() and list(folder.iterdir())), 5)
