"""Where the Python environment lies that scripts/setup.sh makes; `python -m kernelopt.environment` prints its folder.

In this order: $KERNELOPT_VENV; `.venv` of the bundle, where there is one; a folder of the user's cache, which all
copies of this version of the bundle share. The name depends on nothing that differs between the Pythons that tools are
started with.
"""

import os
import platform
import re
import sys
from pathlib import Path

from .errors import EnvironmentLacks, say

ROOT = Path(__file__).resolve().parents[2]


def folder() -> Path:
    """The environment's folder, which need not exist; EnvironmentLacks where no place for it is known."""
    if chosen := os.environ.get("KERNELOPT_VENV"):
        return Path(chosen).absolute()
    own = ROOT / ".venv"
    if (own / "bin" / "python").exists():
        return own
    return cache() / "gpu-kernel-optimizer" / f"venv-{version()}-{platform.machine()}"


def cache() -> Path:
    """The user's cache folder; a home may be shared by machines, hence the machine in the environment's name."""
    if (chosen := os.environ.get("XDG_CACHE_HOME", "")).startswith("/"):  # a relative path does not count there
        return Path(chosen)
    if home := os.environ.get("HOME"):
        return Path(home) / ".cache"
    raise EnvironmentLacks(
        "neither HOME nor XDG_CACHE_HOME is set: set KERNELOPT_VENV to a folder for the Python environment"
    )


def version() -> str:
    """The bundle's version."""
    return re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)[1]


if __name__ == "__main__":
    try:
        print(folder())
    except EnvironmentLacks as error:
        say(f"setup: {error}")
        sys.exit(error.exit_code)
