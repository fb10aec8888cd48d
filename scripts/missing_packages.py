"""Print the requirements of a group of pyproject.toml that are not installed, one a line.

Runs before anything is installed, on any Python from 3.10, so it reads its two arrays without a TOML library.
"""

import ast
import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

ANY_VERSION = ("torch", "triton")  # a GPU host's own build is used as it is, under whatever name it was installed


def requirements(project: str, group: str) -> list[str]:
    """The array `group = [...]` of the file's text."""
    array = re.search(rf"^{group} = (\[.*?\])\s*(?:#.*)?$", project, re.DOTALL | re.MULTILINE)
    return ast.literal_eval(array[1])


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def applies(requirement: str) -> bool:
    """Does the requirement's marker (only python_version is used) hold here?"""
    marker = re.search(r";\s*python_version\s*>=\s*'3\.(\d+)'", requirement)
    return marker is None or sys.version_info >= (3, int(marker[1]))


def installed(requirement: str) -> bool:
    """Is it there, and new enough where the requirement says `>=`?"""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)[0]
    if name in ANY_VERSION:
        return importlib.util.find_spec(name) is not None
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    least = re.search(r">=([\d.]+)", requirement.partition(";")[0])
    return least is None or numbers(found) >= numbers(least[1])


def main() -> None:
    project = (Path(__file__).resolve().parents[1] / "pyproject.toml").read_text()
    for requirement in requirements(project, sys.argv[1]):
        if applies(requirement) and not installed(requirement):
            print(requirement)


if __name__ == "__main__":
    main()
