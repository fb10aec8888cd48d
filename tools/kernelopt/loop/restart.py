"""Partial restart: mask half of the records, and write a brief for a fresh agent. A journal lets `undo` revert it."""

import random
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .. import bundle
from ..errors import Refused, UsageError
from ..hardware import roofline
from ..report import brief
from ..report.brief_answer import figure
from ..session import platforms, stop_conditions
from ..session.digests import digest
from ..session.record import Record
from ..session.record_store import RecordStore, now
from ..session.task import Target, Task
from ..session.version_names import version_number
from ..session.workspace import Workspace

OPENING = """# A fresh start on a kernel

Earlier rounds got stuck. Some of their records are masked, so that you plan with open eyes: from the
best kernel and its profile."""


@dataclass(frozen=True)
class Entry:
    """One restart in the journal. when, undone: times in UTC; undone is None until `undo`. masked: versions."""

    when: str
    seed: int
    masked: list[str]
    undone: str | None = None

    def to_json(self) -> dict:
        """One object of memory/restarts.json."""
        return asdict(self)


ENTRY_KEYS = set(Entry.__dataclass_fields__)


@dataclass(frozen=True)
class Restart:
    """The result of `begin`. masked: the versions that it masked, of: the number of records that were unmasked before.
    brief: for a fresh agent. left_out: a sentence for each record that the brief leaves out."""

    masked: list[str]
    of: int
    seed: int
    next_version: str
    brief: str
    left_out: list[str]

    def to_json(self) -> dict:
        """The output of partial_restart.py --json."""
        return asdict(self)

    def describe(self) -> str:
        """One line."""
        return (
            f"{len(self.masked)} of {self.of} unmasked records are masked now, seed {self.seed}; "
            f"next version: {self.next_version}"
        )


@dataclass(frozen=True)
class Undone:
    """The result of `undo`. unmasked: versions. left_out: a sentence for each record that cannot be read."""

    unmasked: list[str]
    next_version: str
    left_out: list[str]

    def to_json(self) -> dict:
        """The output of partial_restart.py --undo --json."""
        return asdict(self)

    def describe(self) -> str:
        """One line."""
        return f"unmasked: {' '.join(self.unmasked)}; next version: {self.next_version}"


def begin(workspace: Workspace, seed: int) -> Restart:
    """Mask half of the records. The journal is written first, so that `undo` also mends a restart that died half-way.

    Refused when the targets are met or too few records may be masked. UsageError when kernel.py is not the best
    version.
    """
    store, task = RecordStore(workspace), workspace.task()
    with store.locked():
        past, best = journal(store), store.best()
        if stop_conditions.are_met(task.targets, best):
            raise Refused(f"the targets are met by {best.version}; there is nothing to restart for")
        if best and best.kernel_sha256 != digest(workspace.kernel):
            raise UsageError(
                f"kernel.py is not the accepted {best.version}; put it back: "
                f"git -C {workspace.root} checkout {best.git_commit_hash} -- kernel.py"
            )
        before = [record.version for record in store.scan()]
        chosen = draw(before, best and best.version, seed)
        write_journal(store, [*past, Entry(now(), seed, chosen)])
        store.set_masked(chosen, True)
        records = store.records()
        hidden = set(store.versions()) - {record.version for record in records} - {best.version if best else ""}
        following = store.next_version()
    by_library_rate = platforms.rests_on_library_rate(workspace, task)
    text = hand_over(workspace.root, task, best, records, hidden, following, by_library_rate)
    return Restart(chosen, len(before), seed, following, text, store.left_out())


def random_seed() -> int:
    return random.SystemRandom().randrange(2**32)


def undo(workspace: Workspace) -> Undone:
    """Unmask the records of the last restart that still exist. Refused when there is no restart to undo."""
    store = RecordStore(workspace)
    with store.locked():
        past = journal(store)
        number, entry = last(past)
        recorded = set(store.versions())
        unmasked = [version for version in entry.masked if version in recorded]
        store.set_masked(unmasked, False)
        past[number] = replace(entry, undone=now())
        write_journal(store, past)
        return Undone(unmasked, store.next_version(), store.left_out())


def journal(store: RecordStore) -> list[Entry]:
    """The restarts of this workspace, oldest first. UsageError when the file holds something else; it stays as it
    is."""
    if not store.restarts.exists():
        return []
    past = bundle.read_json(store.restarts)
    if not is_journal(past):
        raise UsageError(f"{store.restarts} is no list of restarts; mend or remove it")
    return [Entry(**entry) for entry in past]


def write_journal(store: RecordStore, entries: Sequence[Entry]) -> None:
    bundle.write_json(store.restarts, [entry.to_json() for entry in entries])


def draw(versions: list[str], best: str | None, seed: int) -> list[str]:
    """The versions to mask: half as many as there are, rounded down, at random among those that may be masked; lowest
    first.

    versions: the unmasked ones. v0 and the best, which is the latest accepted, stay. Refused when fewer than two may be
    masked.
    """
    free = [version for version in versions if version not in ("v0", best)]
    if len(free) < 2:
        raise Refused(f"no restart: {len(free)} of the records may be masked, it takes two (v0 and the best stay)")
    return sorted(random.Random(seed).sample(free, len(versions) // 2), key=version_number)


def is_journal(value) -> bool:
    """Is a JSON value a list of restarts? {when: UTC, seed, masked: [version], undone: UTC or None} each."""
    return isinstance(value, list) and all(
        isinstance(entry, dict)
        and entry.keys() == ENTRY_KEYS
        and isinstance(entry["masked"], list)
        and all(isinstance(version, str) for version in entry["masked"])
        for entry in value
    )


def last(entries: Sequence[Entry]) -> tuple[int, Entry]:
    """The index of the latest restart that was not undone, and its entry. Refused when there is none."""
    for number, entry in reversed(list(enumerate(entries))):
        if entry.undone is None:
            return number, entry
    raise Refused("there is no restart to undo")


def hand_over(
    root: Path,
    task: Task,
    best: Record | None,
    records: list[Record],
    masked: set[str],
    next_version: str,
    by_library_rate: bool = False,
) -> str:
    """The brief for a fresh agent, in Markdown. It leaves out masked versions and their names.

    root: the workspace. task: its Task block. best: the record to beat. records: the unmasked ones. masked: versions.
    by_library_rate: a library's rate stands in for the floor.
    """
    parts = brief.Parts(task=replace(task, targets=()), records=records, masked=masked)
    sections = [
        OPENING,
        brief.task_section(parts),
        brief.titled("Best so far", best_lines(root, best, by_library_rate)),
        brief.titled("Goals", goal_lines(task.targets, best)),
        brief.history_section(parts),
        brief.titled("Read", reading(root, best)),
        brief.titled("Your round", round_lines(root, next_version)),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def best_lines(root: Path, best: Record | None, by_library_rate: bool) -> list[str]:
    if best is None:
        return [f"- nothing is accepted yet; kernel: {root / 'kernel.py'}"]
    latency, share = best.latency_us, best.performance.floor_share_pct
    of = roofline.floor_name(by_library_rate, "the floor's speed (100 is the floor itself)")
    of_floor = "" if share is None else f", {figure(share)} % of {of}"
    return [
        f"- {best.version}: {'not measured' if latency is None else f'{figure(latency)} us'}{of_floor}",
        f"- kernel: {root / 'kernel.py'}",
    ]


def goal_lines(targets: Sequence[Target], best: Record | None) -> list[str]:
    lines = []
    for standing in stop_conditions.standings(targets, best):
        goal, reached = standing.target, standing.achieved
        achieved = "not measured" if reached is None else f"{figure(reached)} {goal.unit}"
        sign = stop_conditions.sign(goal.metric)
        wanted = f"{goal.workload} {goal.metric} {sign} {figure(goal.target)} {goal.unit}"
        lines.append(f"- {wanted}; best so far: {achieved}")
    return lines


def reading(root: Path, best: Record | None) -> list[str]:
    skill = "gpu-kernel-profile-optimizer" if best else "gpu-kernel-baseline"
    profile = f"- {root / 'profiles' / best.version}: the profile of the best, once it is taken" if best else None
    records = f"python {bundle.ROOT / 'tools' / 'memory_manager.py'} read --workspace {shlex.quote(str(root))}"
    lines = [
        f"- {bundle.ROOT / 'skills' / skill / 'SKILL.md'}: how a round goes; follow it from step 1",
        f"- {root / 'README.md'}: the constraints, hardware values and Stop Conditions",
        f"- {root / 'kernel.py'} and {root / 'reference.py'}: the kernel, and the oracle with its inputs",
        profile,
        f"- `{records}`: the unmasked records in full",
    ]
    return [line for line in lines if line]


def round_lines(root: Path, next_version: str) -> list[str]:
    return [
        f"- Your version is {next_version}: plan in {root / 'plans' / f'{next_version}_plan.md'}, then one change, "
        "then the gate.",
        "- Do not read plans, profiles and rejected kernels of versions that the history does not name, nor the git "
        "log: they are masked.",
        "- Records are hints, not proof: plan again from the profile, also what a record rules out.",
    ]
