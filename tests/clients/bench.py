"""A bench for a real client: a HOME and a project of its own, and the scripted model that it talks to."""

import functools
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import BUNDLE, run_script
from kernelopt.device.child_process import kill_group
from kernelopt.session.workspace import Workspace

from .real_clients import FOREIGN, REAL_CLIENTS, RealClient
from .scripted_model import Request, ScriptedModel, Step, step

INSTALLED = BUNDLE / ".clients"
PROGRAMS = INSTALLED / "node_modules" / ".bin"
ROUTER = "gpu-kernel-optimizer"
SUB_SKILL_FILES = {path.parent.name: path for path in BUNDLE.glob("skills/*/SKILL.md")}
SKILL_FILES = {ROUTER: BUNDLE / "SKILL.md", **SUB_SKILL_FILES}
ALL_SKILLS = sorted(SKILL_FILES)
BANDWIDTH = "memory_bandwidth: 4800 GB/s <- <gpu-wiki>/docs/hardware/h200.md:L"  # of gpu_specs.py lookup H200
PYTHON = sys.executable
LONGEST_S = 240  # of a client, on a busy machine
WAITED = "it has ended:"
WAITS = 8  # of 25 s


@dataclass
class Bench:
    """A client, the model that it talks to, at a URL, its HOME and an empty project."""

    name: str
    client: RealClient
    model: ScriptedModel
    url: str
    home: Path
    project: Path

    @property
    def environment(self) -> dict[str, str]:
        return self.client.environment(self.home, self.url, PROGRAMS)

    def run(self, command: str, folder: Path | None = None, prompt: str = "Follow the script.") -> str:
        """What a command prints, with the prompt on stdin; it must end well."""
        done = self.try_to(command, folder, prompt)
        assert done.returncode == 0, done.stdout[-3000:]
        return done.stdout

    def try_to(self, command: str, folder: Path | None = None, prompt: str = "") -> subprocess.CompletedProcess:
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=folder or self.project,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            out, _ = process.communicate(prompt, timeout=LONGEST_S)
        finally:
            kill_group(process)
        return subprocess.CompletedProcess(command, process.returncode, out)

    def install(self, *options: str) -> str:
        return self.run(f"bash {BUNDLE}/scripts/install.sh --client {self.name} {' '.join(options)}")

    def adopt(self, patch: pytest.MonkeyPatch) -> None:
        """Make this process's environment that of the client, for tools that run in this process and start it."""
        environment = self.environment
        for name in [name for name in os.environ if FOREIGN.search(name)]:
            patch.delenv(name)
        for name, value in environment.items():
            patch.setenv(name, value)


def listed(said: str) -> list[str]:
    """The skills of this bundle whose descriptions a text holds, each as often as it does."""
    starts = {name: re.search(r'description: "(.{60})', path.read_text())[1] for name, path in SKILL_FILES.items()}
    return sorted(name for name, start in starts.items() for _ in range(said.count(start)))


def title(skill: str) -> str:
    """The first heading of a skill's text."""
    return re.search(r"^# .*$", SKILL_FILES[skill].read_text(), re.MULTILINE)[0]


def repository(folder: Path) -> Path:
    """This repository as its users get it, in a folder: the files that git tracks."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=BUNDLE, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(BUNDLE / name, folder / name, follow_symlinks=False)
    return folder


def bundle_root(request: Request) -> str:
    """The bundle's folder, as the client has named it so far; for a scripted step."""
    paths = [Path(path) for path in re.findall(r"/[^\s\"'`<>|:]+", request.text)]
    folders = (folder for path in paths for folder in (path, *path.parents))
    return str(next(folder for folder in folders if (folder / "tools" / "gpu_specs.py").is_file()))


def patient(command: Callable[[Request], str], folder: str = ".") -> list[Step]:
    """Steps for Codex, which waits for a command 30 s at the most: run one, then say what it printed, and its exit code.

    folder: where that is kept meanwhile.
    """
    said, code = f"{folder}/said.txt", f"{folder}/code.txt"
    run = step("shell", lambda request: f"({command(request)}) > {said} 2>&1; echo code $? > {code}")
    waits = step("shell", f"timeout 25 bash -c 'until [ -f {code} ]; do sleep 0.2; done'")
    return [run, *[waits] * WAITS, step("shell", f"echo {WAITED}; cat {said} {code}")]


def shell(bench: Bench, command: str) -> list[Step]:
    """Steps that run a command and say, from WAITED on, what it printed, and its exit code."""
    if bench.name == "codex":
        return patient(lambda _: command)
    return [step("shell", f"echo {WAITED}; {command} 2>&1; echo code $?")]


def ended(request: Request) -> str:
    """What the last command of such a request printed, and its exit code."""
    return re.split(r"(?<=\ncode \d)\n", request.text.rpartition(f"{WAITED}\n")[2])[0]


def wait_until(condition, seconds: float = 20.0) -> bool:
    """Whether a condition comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(condition())


@functools.cache
def why_no_codex_sandbox() -> str:
    """What it prints where it may not make its namespaces, in a container for example; "" where it works."""
    environment = REAL_CLIENTS["codex"].environment(INSTALLED / "home", "", PROGRAMS)
    done = subprocess.run(["codex", "sandbox", "--", "true"], capture_output=True, text=True, env=environment)
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def bench_of(name: str, home: Path, project: Path) -> Iterator[Bench]:
    client = REAL_CLIENTS[name]
    if not (PROGRAMS / name).exists():
        pytest.skip(f"{name} is not installed: bash scripts/test.sh --clients")
    if name == "codex" and (why := why_no_codex_sandbox()):
        pytest.skip(f"Codex's sandbox does not work here: {why}")
    project.mkdir()
    subprocess.run(["git", "init", "--quiet", project], check=True)
    with ScriptedModel() as model:
        yield Bench(name, client, model, model.url, home, project)


def optimize(bench: Bench, workspace: Workspace, *options: str) -> subprocess.CompletedProcess:
    """optimize_kernel.py in this process, whose environment is that of the client for so long."""
    command = ["--workspace", str(workspace.root), "--client", bench.name, "--restarts", "0", *options]
    with pytest.MonkeyPatch.context() as patch:
        bench.adopt(patch)
        return run_script(BUNDLE / "tools" / "optimize_kernel.py", *command)
