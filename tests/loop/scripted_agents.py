"""Agents that follow a script, and a stand-in for what needs a GPU.

A kernel's time is what it says of itself. The measurement of its round is a recorded one of an H200, with that time put
in.
"""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from conftest import BUNDLE, kernel_text, recorded, with_floor_share
from kernelopt.errors import Refused
from kernelopt.gate.measurement import Measurement
from kernelopt.loop import loop, strategies
from kernelopt.loop.stopping import Limits, LoopResult
from kernelopt.session import record_store
from kernelopt.session.workspace import Workspace
from kernelopt.statuses import Speed, Status

PLAN = (
    "## Category\\nmemory_traffic\\n## Action\\nOne pass.\\n## Expected effect\\nHalf the time.\\n## Risk\\nSpills.\\n"
)
UNCITED = "## Evidence\\nOne pass at 3.9 TB/s.\\n" + PLAN
GREEDY = strategies.Greedy()
LIMITS = Limits(rounds=3, minutes=60, agent_calls=20, patience=2, restarts=0, refinements=1, agent_timeout_s=20)


def no_profile(version: str, say: Callable) -> None:
    raise Refused("a stand-in for a GPU profiles nothing")


@dataclass(frozen=True)
class StandIn:
    """asking.Steps and executors.Executor in one; each method is given as a function."""

    brief: Callable
    check: Callable
    measure: Callable
    restart: Callable
    slots: int = 1
    stop: Callable = lambda: None
    final: Callable = dict
    profile: Callable = no_profile


def stand_in(workspace: Workspace, wrong: str = "WRONG", share: float = 10.0, slots: int = 1) -> StandIn:
    """A machine without a GPU. A kernel with the word WRONG in it is wrong; `us = N` is its time."""

    def microseconds(text: str) -> float:
        return float(text.partition("us = ")[2].split()[0]) if "us = " in text else 100.0

    def check(kernel, plan):
        return (Status.WRONG_VALUES, "WRONG_VALUES: off") if wrong in kernel.read_text() else (Status.OK, "OK")

    def measured(kernel: bytes) -> Measurement:
        best, text = record_store.RecordStore(workspace).best(), kernel.decode()
        ratio = microseconds(workspace.file_at(best.git_commit_hash, "kernel.py").decode()) / microseconds(text)
        measurement = recorded("v1", hashlib.sha256(kernel).hexdigest(), against=best.version)
        speed = Speed.FASTER if ratio > 1 else Speed.SLOWER
        main = replace(measurement.comparisons["default"], verdict=speed, speedup=ratio, ci95=(ratio, ratio))
        measurement = replace(measurement, comparisons={**measurement.comparisons, "default": main})
        if wrong in text:
            failed = replace(measurement.verdict, status=Status.WRONG_VALUES, summary="WRONG_VALUES: off")
            measurement = replace(measurement, verdict=failed)
        return with_floor_share(measurement, share)

    def brief(version: str, number: int) -> str:
        return f"brief for {record_store.RecordStore(workspace).next_version()}, from {version}, candidate {number}"

    return StandIn(brief, check, lambda kernels: [measured(kernel) for kernel in kernels], lambda: None, slots)


def agent(body: str, plan: str = PLAN) -> str:
    """A command that writes the plan of the version in the brief, and runs `body`, a line of bash that knows $v."""
    return f"v=$(grep -o 'v[0-9]*' | head -1); printf '{plan}' > plan.md; {body}"


def kernel(us: int, more: str = "") -> str:
    text = kernel_text(f"us = {us}\\n{more}return torch.relu(x * self.weight) * self.scale".replace("\\n", "\n"))
    return f"cat > kernel.py <<'END'\n{text}\nEND\n"


GOOD = agent("n=${v#v}; " + kernel(0).replace("us = 0", "us = $((90 - 10 * n))").replace("'END'", "END"))


def scripted_loop(
    workspace: Workspace, command: str, machine: StandIn | None = None, limits: Limits = LIMITS, strategy=GREEDY, **more
) -> loop.Loop:
    """A loop whose agents run `command`. more: say, wrapper."""
    machine, command = machine or stand_in(workspace), command.replace(W, str(workspace.root))
    more = {"say": lambda _: None, "strategy": strategy, **more}
    return loop.Loop(workspace, command, limits, machine, machine, **more)


def run(workspace: Workspace, *arguments, resume: bool = False, **options) -> tuple[LoopResult, list[dict]]:
    """(result, lines of rounds.jsonl) of `scripted_loop`"""
    return scripted_loop(workspace, *arguments, **options).run(resume), log_lines(workspace)


def log_lines(workspace: Workspace) -> list[dict]:
    return [json.loads(line) for line in (workspace.root / ".loop" / "rounds.jsonl").read_text().splitlines()]


def outcomes(lines: list[dict]) -> list[str]:
    return [line["outcome"] for line in lines]


W = "WORKSPACE"  # in a command: the path of the workspace


def nap(seconds: int) -> str:
    """An argument of sleep that no other run of the tests on this machine has."""
    return f"{seconds}.{os.getpid()}"


def running(word: str) -> list[Path]:
    """Processes with that word among their arguments."""
    processes = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            processes += [path] * (word.encode() in path.read_bytes().split(b"\0"))
    return processes


KILLED = """
import os, sys
sys.path[:0] = {folders!r}
from dataclasses import replace
from pathlib import Path
import scripted_agents
from kernelopt.gate import rounds
from kernelopt.loop.progress import Progress
from kernelopt.session.workspace import Workspace
workspace = Workspace(Path({root!r}))
machine = scripted_agents.stand_in(workspace)
place = {place!r}
die = lambda *_, **__: os.kill(os.getpid(), 9)
if place == "before the record":
    commit = Workspace.commit
    Workspace.commit = lambda *arguments: (commit(*arguments), die())
elif place == "after the record":
    settle = rounds.settle
    rounds.settle = lambda *arguments: (settle(*arguments), die())
elif place == "between line and state":
    log = Progress.log
    Progress.log = lambda *arguments: (log(*arguments), die())
elif place == "before the verdict":
    machine = replace(machine, measure=die)
elif place == "while the agent works":
    machine = replace(machine, check=die)
limits = replace(scripted_agents.LIMITS, candidates={candidates}, agent_timeout_s={agent_timeout_s})
scripted_agents.scripted_loop(workspace, {agent!r}, machine, limits, say=print).run()
"""


STOPPABLE = "import signal, sys\nsignal.signal(15, lambda *_: sys.exit(143))\n"


def program(
    workspace: Workspace, command: str, place: str = "", candidates: int = 1, agent_timeout_s: float = 20
) -> str:
    """A run in a process of its own, which is killed at that place."""
    options = {"place": place, "candidates": candidates, "agent_timeout_s": agent_timeout_s}
    folders = [str(BUNDLE / name) for name in ("tools", "tests", "tests/loop")]
    return KILLED.format(folders=folders, root=str(workspace.root), agent=command, **options)


def run_until_killed(*arguments, **options) -> None:
    """`program`, killed at its place or by its agent."""
    done = subprocess.run([sys.executable, "-c", program(*arguments, **options)], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


SEVERAL = agent("n=${b: -1}; " + kernel(0).replace("us = 0", "us = $((70 - 10 * n))").replace("'END'", "END")).replace(
    "v=$(grep -o 'v[0-9]*' | head -1)", "b=$(cat)"
)


def killer(evil: str) -> str:
    """Agents of which the second does something evil and kills the loop, once the first has answered."""
    right = f"""until grep -q '"round1-0": "[0-9a-f]' {W}/.loop/state.json; do sleep 0.05; done"""
    kills = f"if [ $n = 1 ]; then {right}; {evil}kill -9 $PPID; sleep 9; fi; cat > kernel.py"
    return SEVERAL.replace("cat > kernel.py", kills, 1)
