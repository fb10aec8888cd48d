"""Print the requirements of a group of pyproject.toml that are not installed, one a line."""

import importlib.metadata
import re
import sys
from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib


def applies(requirement: str) -> bool:
    """Does the requirement's marker (only python_version is used) hold here?"""
    marker = re.search(r";\s*python_version\s*>=\s*'3\.(\d+)'", requirement)
    return marker is None or sys.version_info >= (3, int(marker[1]))


def installed(requirement: str) -> bool:
    name = re.match(r"[A-Za-z0-9._-]+", requirement)[0]
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def main() -> None:
    project = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text())["project"]
    group = sys.argv[1]
    wanted = project["dependencies"] if group == "dependencies" else project["optional-dependencies"][group]
    for requirement in wanted:
        if applies(requirement) and not installed(requirement):
            print(requirement)


if __name__ == "__main__":
    main()
