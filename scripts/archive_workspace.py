#!/usr/bin/env python3
"""Copies a finished workspace into a folder for readers: everything that was decided and measured, none of the caches
and reports.

python scripts/archive_workspace.py W examples/NAME: what W has takes the place of files and folders of these names;
others, lessons.md say, stay."""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

BUNDLE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(BUNDLE / "tools"))
from kernelopt import cli
from kernelopt.errors import UsageError
from kernelopt.session import version_kernels
from kernelopt.session.record_store import RecordStore
from kernelopt.session.workspace import Workspace

MAYBE = ("calibration.md", "baseline_report.md")
FILES = ("README.md", "kernel.py", "reference.py", "test_kernel.py")
FOLDERS = ("memory", "plans", "rejected")
PROFILE = ("report.md", "metrics.json", "params.json")
HOME = re.compile(r"^The bundle is in `(.+)`\.$", re.MULTILINE)  # in a workspace's README.md


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workspace", type=Path, help="a workspace made by reference/workspace_init.sh")
    parser.add_argument("folder", type=Path, help="where to; its own files of these names are replaced")
    args = parser.parse_args()
    workspace = Workspace(args.workspace)
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".archive-", dir=args.folder) as staged:
        collect(workspace, Path(staged))
        for path in sorted(Path(staged).iterdir()):
            replace(args.folder / path.name, path)
    report = [
        sys.executable,
        BUNDLE / "tools" / "render_report.py",
        args.workspace,
        "--out",
        args.folder / "report.html",
    ]
    return subprocess.run(report, stdout=subprocess.DEVNULL).returncode


def collect(workspace: Workspace, folder: Path) -> None:
    """The whole archive into an empty folder; UsageError when the workspace lacks a part of it."""
    if gone := [name for name in FILES if not (workspace.root / name).is_file()]:
        raise UsageError(f"{workspace.root} has no {', '.join(gone)}; an archive needs them")
    for name in (*FILES, *(name for name in MAYBE if is_written(workspace.root / name))):
        shutil.copyfile(workspace.root / name, folder / name)
    for name in FOLDERS:
        if (workspace.root / name).is_dir():
            shutil.copytree(workspace.root / name, folder / name, ignore=shutil.ignore_patterns(".*"))
    for exploration in sorted(workspace.root.glob("explore/*.json")):
        (folder / "explore").mkdir(exist_ok=True)
        shutil.copyfile(exploration, folder / "explore" / exploration.name)
    for report in sorted(workspace.root.glob("profiles/*/*/report.md")):
        target = folder / report.parent.relative_to(workspace.root)
        target.mkdir(parents=True)
        for name in PROFILE:
            if (report.parent / name).exists():
                shutil.copyfile(report.parent / name, target / name)
    versions(workspace, folder / "versions")
    relocate(folder)
    (folder / "git-log.txt").write_text(workspace.git("log", "--stat") + "\n", encoding="utf-8")


def is_written(path: Path) -> bool:
    """Is there such a file, and has somebody filled in its slots?"""
    return path.is_file() and "TBD" not in path.read_text(encoding="utf-8")


def versions(workspace: Workspace, folder: Path) -> None:
    """Every accepted kernel but the last, which is kernel.py, as vN_kernel.py; the history itself stays behind."""
    store = RecordStore(workspace)
    records = store.records(masked=True)
    if store.broken or not records:
        raise UsageError(store.broken[0] if store.broken else f"{workspace.root} has no record yet")
    folder.mkdir()
    for record in records:
        if record.git_commit_hash:
            kernel = version_kernels.kernel_of(workspace, record)
            if kernel != workspace.kernel.read_bytes():
                (folder / f"{record.version}_kernel.py").write_bytes(kernel)


def relocate(folder: Path) -> None:
    """The bundle lies two levels up from an example. README.md names the one that started the session."""
    named = HOME.search((folder / "README.md").read_text(encoding="utf-8"))
    for path in (folder / "README.md", folder / "test_kernel.py"):
        text = path.read_text(encoding="utf-8").replace(named[1] if named else str(BUNDLE), "../..")
        path.write_text(text, encoding="utf-8")


def replace(old: Path, new: Path) -> None:
    if old.is_dir():
        shutil.rmtree(old)
    new.replace(old)


if __name__ == "__main__":
    cli.run(main)
