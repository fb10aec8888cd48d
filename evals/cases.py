"""The cases: one folder each, with case.json, prompt.md, files/, check.py and samples.json. Prepares an agent's
folder and judges it."""

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from judging import BUNDLE, load_check

sys.path.insert(0, str(BUNDLE / "scripts"))
import install
from kernelopt.errors import UsageError
from kernelopt.session.git_commands import run_git, start_git

CASES = Path(__file__).resolve().parent / "cases"


@dataclass(frozen=True)
class Case:
    """One thing that is asked of an agent. kind: discipline, knowledge (of both none is judged on a GPU, and none is
    shown) or task (on a GPU).

    take: files and folders of the bundle that are laid into the agent's folder, path -> path; those of files/ go on
    top.
    """

    name: str
    kind: str
    title: str
    timeout_s: float
    take: dict[str, str]

    @property
    def folder(self) -> Path:
        return CASES / self.name

    @property
    def prompt(self) -> str:
        return (self.folder / "prompt.md").read_text(encoding="utf-8")


def names() -> list[str]:
    """All cases, by kind, each kind in alphabetical order."""
    return sorted((path.parent.name for path in CASES.glob("*/case.json")), key=lambda name: (load(name).kind, name))


def load(name: str) -> Case:
    """The case of that name; UsageError when there is none."""
    path = CASES / name / "case.json"
    if not path.is_file():
        raise UsageError(f"there is no case {name}; run.py list names them")
    said = json.loads(path.read_text(encoding="utf-8"))
    return Case(name, said["kind"], said["title"], said["timeout_s"], said.get("take", {}))


def prepare(case: Case, folder: Path) -> None:
    """Fill an agent's folder with the case's files."""
    make_fresh(folder)
    for source, target in case.take.items():
        copy(BUNDLE / source, folder / target)
    copy(case.folder / "files", folder)


def commit(folder: Path) -> None:
    """Make an agent's folder a git repository with one commit: some clients work in no other, and agents look there
    for what they changed."""
    start_git(folder, "--template=")
    run_git(folder, "add", "--all")
    run_git(folder, "commit", "--quiet", "--allow-empty", "--message", "The task")


def copy(source: Path, target: Path) -> None:
    """Copy a file, or what a folder holds; what is there already is written over."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    elif source.is_file():
        shutil.copyfile(source, target)


def make_fresh(folder: Path) -> None:
    """Make the folder, which must be new or empty, and outside the bundle: there an agent would find checkers and
    samples."""
    if BUNDLE in (folder.resolve(), *folder.resolve().parents):
        raise UsageError(f"{folder} lies in the bundle; choose a folder outside it")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not empty; choose a fresh folder")
    folder.mkdir(parents=True, exist_ok=True)


def judge(case: Case, folder: Path, answer: str) -> list[str]:
    """What does not hold of an agent's folder and answer; [] is a pass."""
    return load_check(case.folder / "check.py")(folder.resolve(), answer)


def install_bundle(folder: Path, client: str) -> Path:
    """Install the bundle for one client into an agent's folder, as install.sh --copy does, but without evals/, which
    has the checkers, and without benchmarks/, which solves problems like those of the cases. Nothing in it leads back
    to this bundle. The folder of the router skill."""
    skills = install.skills_folder(client, folder)
    install.install(skills, copy=True)
    for name in ("evals", "benchmarks"):
        shutil.rmtree(skills / install.ROUTER / name)
    return skills / install.ROUTER


def remove_wiki(skill: Path) -> None:
    """Take the wiki out of an installed bundle, all but the hardware values, without which its tools do not run."""
    for path in [*(skill / "gpu-wiki").iterdir(), *(skill / "gpu-wiki" / "docs").iterdir()]:
        if path.name not in ("docs", "hardware"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def remove_bundle(folder: Path, client: str) -> None:
    """Take it away again, whatever an agent made of it: with the results it would be one copy a run."""
    shutil.rmtree(install.skills_folder(client, folder), ignore_errors=True)


def installed_for_all() -> list[Path]:
    """Where the bundle is installed for all projects of this user."""
    places = {install.skills_folder(client, None) / install.ROUTER for client in install.CLIENTS}
    return sorted(place for place in places if place.exists())


def pointer(skill: Path, folder: Path) -> str:
    """What tells an agent whose client finds no skills by itself where one lies."""
    where = skill.relative_to(folder.resolve())
    return f"\nThis project has a skill in {where}/. Read {where}/SKILL.md first and follow it where it fits.\n"
