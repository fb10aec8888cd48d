"""A Stop hook for Claude Code. It keeps an agent from ending its turn while an armed goal is unmet, at most six times.

The hook uses only recorded evidence: the last accepted record, whose kernel must be the present kernel.py. An error in
the hook blocks no turn. The module imports little, because it runs at each end of a turn (0.05 s).
"""

import json
from pathlib import Path

from .. import bundle
from ..errors import UsageError, say
from . import stop_conditions
from .digests import digest
from .readme import TASK_BLOCK
from .record import Record
from .task import Task
from .version_names import VERSION, version_number

MOST_BLOCKS = 6
ARMED = Path(".loop") / "goal.json"


def main(words: list[str]) -> int:
    """Print Claude Code's blocking answer, or nothing. Always return 0. words: the workspace."""
    if len(words) != 1:
        say("check_goal.py --hook: name one workspace: check_goal.py W --hook; nothing is blocked")
        return 0
    try:
        reason = why_not(Path(words[0]))
    except Exception as error:
        say(f"check_goal.py --hook: {type(error).__name__}: {error}; nothing is blocked")
        return 0
    if reason:
        print(json.dumps({"decision": "block", "reason": reason}))
    return 0


def why_not(root: Path) -> str | None:
    """Return the reason why the turn may not end yet, or None. Count the refusals, and disarm the goal when it is
    met."""
    armed = root / ARMED
    if not armed.is_file():
        return None
    refusals = bundle.read_json(armed)["blocks"]
    unmet = goals_unmet(root)
    if not unmet:
        armed.unlink()
        return None
    if refusals not in range(MOST_BLOCKS):
        return None
    bundle.write_json(armed, {"blocks": refusals + 1})
    return (
        f"The goal of {root} is not met ({'; '.join(unmet)}). Go on with the next round, or disarm it: check_goal.py "
        f"{root} --disarm (refusal {refusals + 1} of {MOST_BLOCKS})"
    )


def goals_unmet(root: Path) -> list[str]:
    """Return one line for each target that the last accepted version misses. The list is empty if all are met."""
    task = Task.from_json(bundle.loads(TASK_BLOCK.search(bundle.read_bytes(root / "README.md").decode())[1]))
    best = last_accepted(root)
    if best is None:
        return ["no version is accepted yet"]
    if digest(root / "kernel.py") != best.kernel_sha256:
        return [f"kernel.py is not the accepted {best.version}"]
    return [
        f"{unmet.target.workload} {unmet.target.metric} {unmet.achieved}, target {unmet.target.target} "
        f"{unmet.target.unit}"
        for unmet in stop_conditions.standings(task.targets, best)
        if not unmet.met
    ]


def last_accepted(root: Path) -> Record | None:
    """Return the accepted record with the highest version, masked or not. Broken files are skipped."""
    names = [path for path in (root / "memory").glob("v*.json") if VERSION.match(path.stem)]
    for path in sorted(names, key=lambda path: -version_number(path.stem)):
        try:
            record = Record.from_json(bundle.read_json(path))
            if record.is_accepted:
                return record
        except (UsageError, KeyError, TypeError):
            continue
    return None
