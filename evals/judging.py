"""What the checkers of the cases share. They read files and the answer's text; nothing of an agent's folder is ever
run or imported."""

import importlib.util
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path

BUNDLE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(BUNDLE / "tools"))
from kernelopt.hardware import wiki
from kernelopt.session.record_store import load

MOST_BYTES = 1_000_000  # of a file that an agent wrote; longer ones are cut
EXAMPLE = BUNDLE / "examples" / "row_softmax" / "h200"
NOT_MEASURED = re.compile(
    r"(?i)\b(?:not|never|no|nobody|without|un(?:measured|timed|tested|verified)|yet to)\b[^.\n]{0,60}"
    r"\b(?:measure\w*|time[ds]?|timing|benchmark\w*|number|figure|speed-?up|run|verified|known|gpu)\b"
    r"|\bun(?:measured|timed|benchmarked|verified|known)\b"
)
SPEED_CLAIM = re.compile(r"(?i)\d+(?:[.,]\d+)?\s*(?:x\b|×|%|-?fold|times\b|percent)|\b(?:twice|half the time|double)\b")


def load_check(path: Path) -> Callable[[Path, str], list[str]]:
    """The function `check(folder, answer)` of a case's check.py: what does not hold, one sentence each; [] is a
    pass."""
    spec = importlib.util.spec_from_file_location(f"check_{path.parent.name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.check


def failures(*conditions: tuple[str, bool]) -> list[str]:
    """The sentences whose condition does not hold."""
    return [sentence for sentence, holds in conditions if not holds]


def text(path: Path) -> str:
    """A file's text; "" where there is none. A link is none: it could lead to anything, a pipe would be waited for."""
    if path.is_symlink() or not path.is_file():
        return ""
    with path.open("rb") as file:
        return file.read(MOST_BYTES).decode("utf-8", "replace")


def json_object(path: Path) -> dict:
    """The JSON object in a file; {} where there is none."""
    try:
        value = json.loads(text(path))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def number(value) -> float | None:
    """A finite number, also one that was written as text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def within(value, low: float, high: float) -> bool:
    """Is it a number from low to high?"""
    found = number(value)
    return found is not None and low <= found <= high


def near(value, expected: float, share: float = 0.005) -> bool:
    """Is it the number, up to rounding?"""
    return within(value, expected * (1 - share), expected * (1 + share))


def absent(record: dict, key: str) -> bool:
    """Does the record say that there is no value? The key must be there, with null or a word for it."""
    if key not in record:
        return False
    value = record[key]
    words = r"(?i)\s*(?:null|none|n/?a|unknown\b.*|not (?:measured|known|available)\b.*)?\s*"
    return value is None or (isinstance(value, str) and re.fullmatch(words, value, re.DOTALL) is not None)


def says(value, pattern: str) -> bool:
    """Does a text hold the pattern? Case does not count."""
    return isinstance(value, str) and re.search(pattern, value, re.IGNORECASE) is not None


def hardware(platform: str, metric: str) -> float | None:
    """The wiki's value; None where the wiki has none."""
    row = wiki.find(platform, wiki.pages(BUNDLE / "gpu-wiki")).known(metric)
    return row.value if row else None


def recorded(version: str) -> dict:
    """A record of the example, which was measured on an H200 (examples/row_softmax/h200)."""
    return load(EXAMPLE / "memory" / f"{version}.json")
