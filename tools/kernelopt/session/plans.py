"""The plan of a round: parsing of plans/vN_plan.md."""

import re
from dataclasses import dataclass
from pathlib import Path

from .. import bundle
from ..errors import UsageError
from .record import Optimization
from .workspace import Workspace

PLAN_FIELDS = {
    "action_category": "Category",
    "action_description": "Action",
    "expected_impact": "Expected effect",
    "risks_and_rollback": "Risk",
}


def read_plan(workspace: Workspace, version: str, required: bool) -> Optimization:
    """Return the fields of plans/vN_plan.md for the record. Raise UsageError if one is missing or TBD."""
    path = workspace.plan(version)
    if path.exists():
        return plan_fields(path)
    if required:
        raise UsageError(f"{path} is missing; copy {bundle.REFERENCE / 'plan.md'} there and fill it in")
    return Optimization(**{**dict.fromkeys(PLAN_FIELDS), "action_category": "baseline"})


def plan_fields(path: Path) -> Optimization:
    """Return the fields of a plan file. Raise UsageError if one is missing or TBD."""
    try:
        text = path.read_text(encoding="utf-8").replace("\0", "")
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text") from None
    sections = plan_sections(text)
    plan = {field: in_a_line(sections.get(title, "")) for field, title in PLAN_FIELDS.items()}
    for field, title in PLAN_FIELDS.items():
        if not plan[field]:
            raise UsageError(f"{path}: '## {title}' is missing or empty")
    if left := unfilled(text):
        raise UsageError(f"{path}: {left.sentence}")
    return Optimization(**plan)


@dataclass(frozen=True)
class Unfilled:
    """A section of a plan as the template has it. line: of its first TBD."""

    line: int
    sentence: str


def unfilled(text: str) -> Unfilled | None:
    """Return the first section of a plan that still holds a TBD, or None."""
    for title, body in plan_sections(text).items():
        if "TBD" in body:
            line = text.count("\n", 0, text.index("TBD", text.index(f"## {title}\n"))) + 1
            return Unfilled(line, f"'## {title}' still holds a TBD")
    return None


def in_a_line(text: str) -> str:
    """Put text on one line and remove characters that a terminal could interpret as a command."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def plan_sections(text: str) -> dict[str, str]:
    """Return the text below each `## Title` of a plan."""
    return dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE))
