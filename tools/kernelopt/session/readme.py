"""The text of a workspace's README: its Task block and its sections.

The README is the only source of the task. Its `## Task` section holds a fenced json block for the tools
(`reference/task.schema.json`). The sections below it are for people.
"""

import re

from .. import bundle
from ..errors import UsageError
from .task import Task

TASK_BLOCK = re.compile(r"(?<=\n)## Task\n.*?\n```json\n(.*?\n)```", re.DOTALL)


def parse_task(readme: bytes, name: str) -> Task:
    """Return the Task block of a workspace's README. The UsageError names the file and its error."""
    try:
        match = TASK_BLOCK.search(readme.decode("utf-8"))
    except UnicodeDecodeError:
        raise UsageError(f"{name} is not UTF-8 text") from None
    if match is None:
        raise UsageError(
            f"{name} has no json block under '## Task'; take it back from an earlier commit: git log -p -- README.md"
        )
    try:
        block = bundle.loads(match[1])
    except ValueError as error:
        raise UsageError(f"{name}: the Task block is not valid JSON ({error})") from None
    bundle.validate(block, "task.schema.json", f"{name}: Task block")
    return Task.from_json(block)


def replace_section(text: str, title: str, body: str) -> str:
    """Replace the body of `## title` in `text`. An absent section is appended."""
    section = f"## {title}\n\n{body.strip()}\n\n"
    pattern = re.compile(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)
    if pattern.search(text):
        return pattern.sub(lambda _: section, text, count=1).rstrip() + "\n"
    return f"{text.rstrip()}\n\n{section}".rstrip() + "\n"
