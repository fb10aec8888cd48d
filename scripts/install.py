#!/usr/bin/env python3
"""Put the router skill and its sub-skills where a client looks for them, each as <skills>/<name>/SKILL.md.

They are links to this bundle; --copy makes copies that no longer need it. The script never touches what it did not put
there. --uninstall removes what it put there, and the folders that it made."""

import contextlib
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

BUNDLE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(BUNDLE / "tools"))
from kernelopt import bundle, cli
from kernelopt.errors import Refused, UsageError

ROUTER = "gpu-kernel-optimizer"
# client: where it looks in a project; and for a user: the variable that moves that folder, its default, the rest
CLIENTS = {
    "claude": (".claude/skills", "CLAUDE_CONFIG_DIR", ".claude", "skills"),
    "codex": (".agents/skills", None, "", ".agents/skills"),
    "cursor": (".cursor/skills", None, "", ".cursor/skills"),
    "gemini": (".gemini/skills", "GEMINI_CLI_HOME", "", ".gemini/skills"),
    "opencode": (".opencode/skills", "XDG_CONFIG_HOME", ".config", "opencode/skills"),
    "agents": (".agents/skills", None, "", ".agents/skills"),
}
# They list every SKILL.md below that folder, so a second copy of a sub-skill would be listed twice. The others look one
# level deep, and Gemini reads no file outside a skill's folder, also none that a link in it leads to.
LOOK_DEEP = ("codex", "cursor", "opencode", "agents")
# What a copy of the router holds beside the links to its sub-skills: what agents read and run, and what that links to.
NEEDED = (
    *(".gitignore", "SKILL.md", "README.md", "pyproject.toml"),
    *("benchmarks", "docs", "evals", "examples", "gpu-wiki", "reference", "scripts", "tools"),
)
MADE_BY_USE = {".venv", "__pycache__", ".pytest_cache", ".ruff_cache"}  # not copied, and no change of a copy
RECORD = f".{ROUTER}.json"  # in the skills folder: what this script put there
SNIPPET = BUNDLE / "docs" / "agents-snippet.md"
EXAMPLES = """examples:
  install.sh --client claude                          # for this user
  install.sh --client agents --project . --copy       # for one project, to be committed with it
  install.sh --client claude --uninstall"""


def main() -> int:
    args = arguments()
    skills = skills_folder(args.client, args.project)
    try:
        lines = uninstall(skills) if args.uninstall else install(skills, args.copy, args.client in LOOK_DEEP)
    except (FileExistsError, NotADirectoryError) as error:
        raise Refused(f"{error.filename} is in the way: it is no folder") from None
    print("\n".join(lines))
    return 0


def skills_folder(client: str, project: Path | None) -> Path:
    """Where `client` looks for skills: in a project, or else for this user."""
    in_project, variable, default, rest = CLIENTS[client]
    if project is None:
        moved = os.environ.get(variable) if variable else None
        return (Path(moved) if moved else Path.home() / default) / rest
    if not project.is_dir():
        raise UsageError(f"--project: {project} is no folder")
    return project.resolve() / in_project


def install(skills: Path, copy: bool, deep: bool = False) -> list[str]:
    """Put all skills into the folder `skills`; what was done, in lines. deep: see LOOK_DEEP. Refused, before anything
    changes, when something else is in the way."""
    made = make_folder(skills)
    try:
        with staged(skills, copy, deep) as sources:
            wanted = {name: fingerprint(source) if copy else f"link:{source}" for name, source in sources.items()}
            standing = put(skills, sources, wanted, copy, made)
    except BaseException:
        remove_empty(skills, made)
        raise
    done = "copied" if copy else "linked"
    lines = [f"{skills / name}: {'there already' if standing[name] == 'right' else done}" for name in wanted]
    return [*lines, f"to make agents of a project use it, paste into its AGENTS.md: {SNIPPET}"]


def put(skills: Path, sources: dict[str, Path], wanted: dict[str, str], copy: bool, made: int) -> dict[str, str]:
    """Put `sources` into `skills` and write down what was put; how each name stood before.

    wanted: fingerprints. made: how many levels of `skills` are new. The record is written before anything is put, so
    that a run that was killed can be repeated or undone.
    """
    record = read_record(skills)
    names = dict.fromkeys([*wanted, *record["put"]])  # also what an earlier version of the bundle had
    standing = {name: state(skills / name, record["put"].get(name), wanted.get(name)) for name in names}
    refuse_foreign(skills, standing)
    for name, status in standing.items():
        if status == "ours":
            remove(skills / name)
    owned = {name: mark for name, mark in wanted.items() if standing[name] != "right" or name in record["put"]}
    if owned:
        bundle.write_json(skills / RECORD, {"folders_made": record["folders_made"] + made, "put": owned})
    for name in wanted:
        if standing[name] == "right":
            continue
        if copy:
            sources[name].rename(skills / name)
        else:
            (skills / name).symlink_to(sources[name])
    return standing


def uninstall(skills: Path) -> list[str]:
    """Take away what `install` put into the folder `skills`. Refused, before anything changes, when some of it was
    changed."""
    record = read_record(skills)
    if not record["put"]:
        return [f"{skills}: nothing of this script is there"]
    standing = {name: state(skills / name, mark, None) for name, mark in record["put"].items()}
    refuse_foreign(skills, standing)
    removed = [name for name, status in standing.items() if status == "ours"]
    for name in removed:
        remove(skills / name)
    (skills / RECORD).unlink()
    remove_empty(skills, record["folders_made"])
    return [f"{skills / name}: removed" for name in removed]


def read_record(skills: Path) -> dict:
    """{folders_made: how many levels from `skills` upwards, put: {name: fingerprint}}; empty where nothing was put."""
    path = skills / RECORD
    if not path.is_file():
        return {"folders_made": 0, "put": {}}
    record = bundle.read_json(path)
    if not is_record(record):
        raise UsageError(f"{path} is no record of what this script put there; mend or remove it")
    return record


def is_record(value) -> bool:
    """Nothing that leads out of the folder: the file may come with a project from anywhere."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("folders_made"), int)
        and isinstance(value.get("put"), dict)
        and all(name == Path(name).name and name not in ("", ".", "..") for name in value["put"])
    )


def make_folder(folder: Path) -> int:
    """Make `folder`; how many levels of it were not there."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return len(missing)


def remove_empty(folder: Path, levels: int) -> None:
    """Remove `folder` and its parents, `levels` in all, as far as nothing is in them."""
    for path in [folder, *folder.parents][:levels]:
        with contextlib.suppress(OSError):
            path.rmdir()


@contextlib.contextmanager
def staged(skills: Path, copy: bool, deep: bool) -> Iterator[dict[str, Path]]:
    """{name: what is to stand there}: the folders of this bundle, or copies of them in a scratch folder of `skills`."""
    sub_skills = {path.parent.name: path.parent.resolve() for path in sorted((BUNDLE / "skills").glob("*/SKILL.md"))}
    if not copy:
        yield {ROUTER: BUNDLE, **sub_skills}
        return
    with tempfile.TemporaryDirectory(dir=skills, prefix=f".{ROUTER}.") as scratch:
        copies = {name: Path(scratch) / name for name in (ROUTER, *sub_skills)}
        copy_router(copies[ROUTER], sub_skills, deep)
        for name, source in sub_skills.items():
            copy_tree(source, copies[name])
        yield copies


def copy_router(target: Path, sub_skills: dict[str, Path], deep: bool) -> None:
    """A copy of the bundle. The sub-skills are copied beside it; its skills/ holds links to them where clients look
    deep, and copies elsewhere."""
    (target / "skills").mkdir(parents=True)
    for name, source in sub_skills.items():
        if deep:
            (target / "skills" / name).symlink_to(Path("..", "..", name))
        else:
            copy_tree(source, target / "skills" / name)
    for name in NEEDED:
        if (BUNDLE / name).is_dir():
            copy_tree(BUNDLE / name, target / name)
        else:
            shutil.copy2(BUNDLE / name, target / name)


def copy_tree(source: Path, target: Path) -> None:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(*MADE_BY_USE))


def fingerprint(path: Path) -> str | None:
    """What stands at `path`: link:TARGET, or files:HASH of names and contents, None for nothing."""
    if path.is_symlink():
        return f"link:{path.readlink()}"
    if not path.exists():
        return None
    digest = hashlib.sha256()
    for folder, folders, files in os.walk(path):
        folders[:] = sorted(set(folders) - MADE_BY_USE)
        for name in sorted([*files, *folders]):
            file = Path(folder, name)
            digest.update(f"{file.relative_to(path)}\0".encode())
            if file.is_symlink():
                digest.update(f"{file.readlink()}".encode())
            elif file.is_file():
                digest.update(hashlib.sha256(file.read_bytes()).digest())
    return f"files:{digest.hexdigest()}"


def state(path: Path, recorded: str | None, wanted: str | None) -> str:
    """absent, right (as wanted), ours (put here and not changed since) or foreign."""
    if not os.path.lexists(path):
        return "absent"
    if not path.is_symlink() and path.resolve() == BUNDLE:
        return "right"  # the bundle itself lies in the skills folder
    if not path.is_symlink() and recorded is None:
        return "foreign"
    mark = fingerprint(path)
    if mark == wanted:
        return "right"
    return "ours" if mark == recorded else "foreign"


def refuse_foreign(skills: Path, standing: dict[str, str]) -> None:
    for name, status in standing.items():
        if status == "foreign":
            raise Refused(
                f"{skills / name} was not put there by this script, or was changed since; move it away and run again"
            )


def remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def arguments():
    parser = cli.parser(f"{__doc__}\n\n{EXAMPLES}", prog="install.sh")
    parser.add_argument(
        "--client",
        choices=CLIENTS,
        required=True,
        help="agents: .agents/skills, which Codex, Cursor, Gemini and OpenCode read",
    )
    parser.add_argument("--project", type=cli.path, metavar="DIR", help="for this project (default: for this user)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--copy", action="store_true", help="copies: for committing, and for clients that follow no links")
    how.add_argument("--uninstall", action="store_true", help="remove it again")
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
