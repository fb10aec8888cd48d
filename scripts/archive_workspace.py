#!/usr/bin/env python3
"""Copies a finished workspace into a folder for readers: everything that was decided and measured, none of the caches and reports.

python scripts/archive_workspace.py W examples/NAME"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

BUNDLE = Path(__file__).resolve().parents[1]
FILES = ("README.md", "baseline_report.md", "kernel.py", "reference.py", "test_kernel.py")
FOLDERS = ("memory", "plans", "rejected")
PROFILE = ("report.md", "metrics.json", "params.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workspace", type=Path, help="a workspace made by reference/workspace_init.sh")
    parser.add_argument("folder", type=Path, help="where to; its own files of these names are replaced")
    args = parser.parse_args()
    if not (args.workspace / "memory").is_dir():
        sys.exit(f"archive_workspace: {args.workspace} is no workspace with records")
    archive(args.workspace, args.folder)
    report = [
        sys.executable,
        BUNDLE / "tools" / "render_report.py",
        args.workspace,
        "--out",
        args.folder / "report.html",
    ]
    sys.exit(subprocess.run(report, stdout=subprocess.DEVNULL).returncode)


def archive(workspace: Path, folder: Path) -> None:
    """Nothing else in `folder` is touched."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(workspace / name, folder / name)
    for name in FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)
        if (workspace / name).is_dir():
            shutil.copytree(workspace / name, folder / name, ignore=shutil.ignore_patterns(".*"))
    shutil.rmtree(folder / "profiles", ignore_errors=True)
    for report in sorted(workspace.glob("profiles/*/*/report.md")):
        target = folder / report.parent.relative_to(workspace)
        target.mkdir(parents=True)
        for name in PROFILE:
            if (report.parent / name).exists():
                shutil.copyfile(report.parent / name, target / name)
    versions(workspace, folder / "versions")
    for name in ("README.md", "test_kernel.py"):
        relocate(folder / name)
    log = subprocess.run(["git", "-C", workspace, "log", "--stat"], check=True, capture_output=True)
    (folder / "git-log.txt").write_bytes(log.stdout)


def versions(workspace: Path, folder: Path) -> None:
    """Every accepted kernel but the last, which is kernel.py, as vN_kernel.py; the history itself stays behind."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for path in sorted((workspace / "memory").glob("v*.json")):
        commit = json.loads(path.read_text())["git_commit_hash"]
        if not commit:
            continue
        show = ["git", "-C", workspace, "show", f"{commit}:kernel.py"]
        kernel = subprocess.run(show, check=True, capture_output=True).stdout
        if kernel != (workspace / "kernel.py").read_bytes():
            (folder / f"{path.stem}_kernel.py").write_bytes(kernel)


def relocate(path: Path) -> None:
    """The bundle, which a workspace names by this machine's path, lies two levels up from an example."""
    path.write_text(path.read_text(encoding="utf-8").replace(str(BUNDLE), "../.."), encoding="utf-8")


if __name__ == "__main__":
    main()
