"""The last compilation of a workspace's kernel for other GPUs: explore/compiled.json, by compile_kernel.py."""

from collections.abc import Sequence
from pathlib import Path

from .. import bundle
from ..errors import ToolError
from .explorations import folder_of
from .workspace import Workspace


def file_of(workspace: Workspace) -> Path:
    return folder_of(workspace) / "compiled.json"


def save(workspace: Workspace, kernel_sha256: str, timestamp: str, result: dict, lines: Sequence[str]) -> Path:
    """Write a compilation. result: the output of compile_kernel.py. lines: the same for a brief."""
    path = file_of(workspace)
    bundle.write_json(path, {"kernel_sha256": kernel_sha256, "timestamp": timestamp, "lines": list(lines), **result})
    return path


def lines_of(workspace: Workspace, kernel_sha256: str) -> list[str]:
    """What the last compilation says of this very kernel, for a brief; [] when it is of another, or there is none."""
    try:
        value = bundle.read_json(file_of(workspace))
        return list(map(str, value["lines"])) if value["kernel_sha256"] == kernel_sha256 else []
    except (ToolError, KeyError, TypeError):
        return []
