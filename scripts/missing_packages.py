"""Print the requirements of a group of pyproject.toml that are not installed, one a line; exit code 3 and a sentence
when what is installed is too old and not ours to replace.

Runs before anything is installed, on any Python from 3.10, so it reads its arrays without a TOML library.
"""

import ast
import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

BUNDLE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(BUNDLE / "tools"))
import torch_build
from kernelopt import packages

HOSTS = ("torch", "triton")  # a GPU host's own build is used as it is, under whatever name it was installed


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


def installed(requirement: str, hosts: tuple[str, ...] = HOSTS) -> bool:
    """Is it there, and of a version that fits where the requirement says `>=` or `==`? Of `hosts` any version."""
    name, sign, wanted = re.match(r"([A-Za-z0-9._-]+)(>=|==)?([\d.]*)", requirement).groups()
    if name in hosts:
        return importlib.util.find_spec(name) is not None
    try:
        found = numbers(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False
    return sign is None or (found == numbers(wanted) if sign == "==" else found >= numbers(wanted))


def main(group: str) -> int:
    for reason in filter(None, map(packages.unfit, HOSTS)):
        print(f"setup: {reason}", file=sys.stderr)
        return 3
    hosts = () if group == "oldest" else HOSTS  # an environment of its own, with the versions that it names
    wanted = [one for one in requirements((BUNDLE / "pyproject.toml").read_text(), group) if applies(one)]
    lacking = [one for one in wanted if not installed(one, hosts)]
    try:
        if group == "dependencies":
            lacking = [torch_build.requirement(one) if one.startswith("torch==") else one for one in lacking]
    except torch_build.NoneFits as error:
        print(f"setup: {error}", file=sys.stderr)
        return 3
    if lacking:
        print("\n".join(lacking))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
