"""Print what pip is to install of groups of pyproject.toml, one requirement a line. pip leaves what is installed
already.

Exit code 3 and a sentence when the torch or triton of the host is too old: it is not ours to replace. Runs before
anything is installed, on any Python from 3.10, so it reads its arrays without a TOML library.
"""

import ast
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


def name(requirement: str) -> str:
    return re.match(r"[A-Za-z0-9._-]+", requirement)[0]


def for_pip(group: str) -> list[str]:
    """The group without a torch and triton that can be imported; the torch that fits this machine's GPUs, or
    NoneFits."""
    wanted = requirements((BUNDLE / "pyproject.toml").read_text(), group)
    if group == "oldest":  # an environment of its own, with the versions that it names
        return wanted
    wanted = [one for one in wanted if name(one) not in HOSTS or importlib.util.find_spec(name(one)) is None]
    return [torch_build.requirement(one) if name(one) == "torch" else one for one in wanted]


def main(groups: list[str]) -> int:
    try:
        if reason := next(filter(None, map(packages.unfit, HOSTS)), None):
            raise torch_build.NoneFits(reason)
        print("\n".join(one for group in groups for one in for_pip(group)))
    except torch_build.NoneFits as error:
        print(f"setup: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
