"""Git in a folder: its commands run apart from the user's repositories, names and hooks."""

import os
import subprocess
from pathlib import Path

from ..errors import EnvironmentLacks, TimedOut, UsageError

GIT_S = 120  # seconds for a git command
GIT_SETTINGS = """[user]
	name = gpu-kernel-optimizer
	email = gpu-kernel-optimizer@localhost
[commit]
	gpgsign = false
[core]
	hooksPath = /dev/null
	autocrlf = false
"""


def start_git(folder: Path, *options: str) -> None:
    """Make a folder a repository whose commits are ours: under no name of the user's, and with no hook or signature.
    options: of git init."""
    done = run_git(folder, "init", "--quiet", *options)
    if done.returncode:
        raise UsageError(f"git init failed in {folder}: {done.stderr.decode().strip()}")
    with open(folder / ".git" / "config", "a", encoding="utf-8") as file:
        file.write(GIT_SETTINGS)


def run_git(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run git in `folder`. Ignore replaced objects, and variables such as GIT_DIR that point to another repository."""
    try:
        return subprocess.run(
            ["git", "--no-replace-objects", "-C", str(folder), *arguments],
            capture_output=True,
            env=environment_without_git(),
            timeout=GIT_S,
        )
    except subprocess.TimeoutExpired:
        raise TimedOut(f"git {arguments[0]} in {folder} took over {GIT_S} s; look at what lies in its .git") from None
    except FileNotFoundError:
        raise EnvironmentLacks("git is not installed; install it, for example: apt-get install git") from None


def environment_without_git() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
