"""Runs an agent's command on cases, with the bundle and without it, in fresh folders, and counts what passes.

An agent is any shell command: the prompt on stdin, its folder as working directory, the answer on stdout and in files.
It runs with the user's rights; what keeps it from the checkers is that it is not told where they lie, and that a
changed bundle ends the experiment.
"""

import contextlib
import hashlib
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import cases
from judging import BUNDLE, text
from kernelopt import bundle
from kernelopt.device.child_process import kill_group
from kernelopt.errors import EnvironmentLacks, Refused
from kernelopt.loop import agent_process

ARMS = ("with", "no-wiki", "without")  # no-wiki: the bundle, of its wiki the hardware values alone
BOTH = ("with", "without")
OUTCOMES = ("passed", "failed", "timed out", "crashed", "not judged")
JUDGED = OUTCOMES[:4]
# How each client answers a prompt on stdin without a person, in words.
COMMANDS = {
    "claude": "claude -p --permission-mode acceptEdits --allowedTools Bash Read",
    "codex": "codex exec --sandbox workspace-write",
    "gemini": "gemini --approval-mode=yolo --skip-trust",
    "opencode": "opencode run --auto",
}
GUARDED = ("evals", "examples", "gpu-wiki", "reference", "scripts", "skills", "tools")
Z95 = 1.959964  # the normal distribution's 97.5 % quantile


@dataclass(frozen=True)
class Agent:
    """command: a shell command. client: whose skills folder it looks into. point: the prompt names that folder."""

    command: str
    client: str
    point: bool
    timeout_s: float | None  # None: each case's own


@dataclass(frozen=True)
class Run:
    """One question to the agent."""

    case: str
    arm: str
    repeat: int


def schedule(names: list[str], arms: list[str], repeats: int, seed: int) -> list[Run]:
    """All runs; each repeat holds every case in every arm once, in an order of its own, so that a drift meets all
    alike."""
    shuffle = random.Random(seed).shuffle
    runs = []
    for repeat in range(repeats):
        block = [Run(name, arm, repeat) for name in names for arm in arms]
        shuffle(block)
        runs += block
    return runs


def wilson(passed: int, judged: int) -> tuple[float, float] | None:
    """The 95 % interval of a rate (Wilson's score interval); None where nothing was judged."""
    if not judged:
        return None
    rate, z2 = passed / judged, Z95**2
    centre = (rate + z2 / (2 * judged)) / (1 + z2 / judged)
    half = Z95 / (1 + z2 / judged) * math.sqrt(rate * (1 - rate) / judged + z2 / (4 * judged**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def rate(outcomes: list[str]) -> dict:
    """{passed, judged, rate, ci95} of the outcomes of some runs; what was not judged is left out of the count."""
    judged = sum(outcome in JUDGED for outcome in outcomes)
    passed = outcomes.count("passed")
    return {
        "passed": passed,
        "judged": judged,
        "rate": passed / judged if judged else None,
        "ci95": wilson(passed, judged),
    }


def rates(runs: list[dict]) -> dict[str, dict[str, dict]]:
    """case -> arm -> rate, and the same of all cases together under "total"."""
    found: dict[str, dict[str, dict]] = {}
    for name in [*dict.fromkeys(run["case"] for run in runs), "total"]:
        own = [run for run in runs if name in (run["case"], "total")]
        arms = [arm for arm in ARMS if any(run["arm"] == arm for run in own)]
        found[name] = {arm: rate([run["outcome"] for run in own if run["arm"] == arm]) for arm in arms}
    return found


def perform(agent: Agent, runs: list[Run], out: Path) -> Iterator[dict]:
    """Do the runs, one after the other; each yields its result. Files, answer and stderr stay in out/runs/NNN.

    Refused, when the bundle changed meanwhile: its checkers can no longer be believed.
    """
    before = fingerprint(BUNDLE)
    for number, run in enumerate(runs):
        folder = out / "runs" / f"{number:03d}"
        folder.mkdir(parents=True)
        result = {**asdict(run), "folder": str(folder.relative_to(out)), **one(agent, run, folder)}
        if fingerprint(BUNDLE) != before:
            raise Refused(f"the bundle was changed during {result['folder']}; keep it still, and begin again")
        yield result


def one(agent: Agent, run: Run, kept: Path) -> dict:
    """{outcome, failures, wall_s} of one run. The agent works in a folder whose path says nothing of case and arm."""
    case = cases.load(run.case)
    home = Path(tempfile.mkdtemp(prefix="project_"))
    try:
        cases.prepare(case, home)
        cases.commit(home)
        prompt = case.prompt
        if run.arm != "without":
            skill = cases.install_bundle(home, agent.client)
            if run.arm == "no-wiki":
                cases.remove_wiki(skill)
            prompt += cases.pointer(skill, home) if agent.point else ""
        (kept / "prompt.md").write_text(prompt, encoding="utf-8")
        code, wall_s = ask(agent.command, home, kept, agent.timeout_s or case.timeout_s, environment(case.kind))
        outcome, found = judged(case, home, kept, code)
    finally:
        cases.remove_bundle(home, agent.client)
        shutil.move(home, kept / "project")
    return {"outcome": outcome, "failures": found, "wall_s": round(wall_s, 3)}


def ask(command: str, home: Path, kept: Path, timeout_s: float, env: dict[str, str]) -> tuple[int | None, float]:
    """(exit code, or None after a time-out; seconds) of the agent. What it says goes to files; what it starts ends
    with it."""
    start = time.monotonic()
    with (
        (kept / "prompt.md").open("rb") as prompt,
        (kept / "answer.txt").open("wb") as answer,
        (kept / "stderr.txt").open("wb") as errors,
    ):
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=home,
            env={**env, agent_process.MARK: str(home)},
            stdin=prompt,
            stdout=answer,
            stderr=errors,
            start_new_session=True,
        )
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout_s)
        finally:
            kill_group(process)
            agent_process.end_marked(str(home))
    return code, time.monotonic() - start


def environment(kind: str) -> dict[str, str]:
    """What an agent gets: both arms the Python that runs this, a task case the GPU, nobody a wiki from outside."""
    own = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    if kind != "task":
        own |= {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}
    return {name: value for name, value in os.environ.items() if name != "GPU_WIKI"} | own


def judged(case: cases.Case, home: Path, kept: Path, code: int | None) -> tuple[str, list[str]]:
    """(outcome, what does not hold)."""
    if code is None:
        return "timed out", ["no answer in time"]
    if code:
        return "crashed", [f"exit code {code}"]
    try:
        found = cases.judge(case, home, text(kept / "answer.txt"))
    except EnvironmentLacks as error:
        return "not judged", [str(error)]
    return ("failed", found) if found else ("passed", [])


def fingerprint(root: Path) -> str:
    """A hash of what judges and of what is judged by."""
    digest = hashlib.sha256()
    for name in GUARDED:
        for path in sorted((root / name).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def version(client: str) -> str | None:
    """What a client of COMMANDS says of its version; None where it is not installed."""
    if client not in COMMANDS or not shutil.which(client):
        return None
    done = subprocess.run([client, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return done.stdout.strip() or None


def commit() -> str | None:
    """The bundle's commit, with "-dirty" when files differ from it; None outside git."""
    done = subprocess.run(
        ["git", "-C", str(BUNDLE), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() or None


def write(out: Path, head: dict, runs: list[dict]) -> dict:
    """results.json: what was asked, each run, the rates."""
    result = {**head, "runs": runs, "rates": rates(runs)}
    bundle.write_json(out / "results.json", result)
    return result
