"""Where a task comes from: its file, the commit that it lies at, its licence."""

import datetime
import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import ToolError
from ..session.git_commands import run_git

SPDX = re.compile(r"SPDX-License-Identifier:[ \t]*([^\s*#][^\n*#]*)")
LICENCE_NAMES = ("LICENSE", "LICENCE", "LICENSE.txt", "LICENSE.md", "LICENCE.txt", "LICENCE.md", "COPYING")
LEVELS_UP = 6  # in which a licence may lie, where there is no git checkout
CREDENTIALS = re.compile(r"(?<=://)[^/@]+@")


@dataclass(frozen=True)
class Origin:
    """source: the path as the user gave it. commit, repository, licence: None where nothing says so."""

    source: str
    date: str
    commit: str | None
    repository: str | None
    licence: str | None

    def to_json(self) -> dict[str, str | None]:
        return dict(vars(self))


def origin_of(source: Path, texts: list[str]) -> Origin:
    """The origin of a source, whose files have these texts."""
    folder = (source if source.is_dir() else source.parent).resolve()
    return Origin(
        source=str(source),
        date=datetime.date.today().isoformat(),
        commit=git_answer(folder, "rev-parse", "HEAD"),
        repository=without_credentials(git_answer(folder, "config", "--get", "remote.origin.url")),
        licence=licence_in(texts) or licence_beside(folder),
    )


def git_answer(folder: Path, *question: str) -> str | None:
    try:
        done = run_git(folder, *question)
    except ToolError:
        return None
    answer = done.stdout.decode("utf-8", "replace").strip()
    return answer.splitlines()[0] if done.returncode == 0 and answer else None


def without_credentials(address: str | None) -> str | None:
    return CREDENTIALS.sub("", address) if address else None


def licence_in(texts: list[str]) -> str | None:
    """What a file itself says."""
    return next((match[1].strip() for text in texts if (match := SPDX.search(text))), None)


def licence_beside(folder: Path) -> str | None:
    """The first line of the nearest licence file, in the folder or above it, up to the root of its checkout."""
    for place in [folder, *folder.parents][:LEVELS_UP]:
        for name in LICENCE_NAMES:
            if (place / name).is_file():
                lines = (place / name).read_text(encoding="utf-8", errors="replace").splitlines()
                title = next((line.strip(" #*\t") for line in lines if line.strip(" #*\t")), "")
                return f"{title[:100]} ({name})"
        if (place / ".git").exists():
            break
    return None
