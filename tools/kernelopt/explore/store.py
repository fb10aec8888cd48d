"""The files of an exploration in a workspace: explore/eN.json, and each candidate's file in explore/eN/."""

import contextlib
import hashlib
import itertools
import re
from dataclasses import dataclass, replace
from pathlib import Path

from .. import bundle
from ..compiling import findings
from ..compiling.compiled import Compiled
from ..errors import Refused, UsageError
from ..measure import gain
from ..measure.latency import Latency
from ..session import explorations
from ..session.explorations import Exploration, ExploredKernel, folder_of, is_best, numbers
from ..session.record_store import RecordStore, now
from ..session.workspace import Workspace
from ..statuses import Status
from . import halving, means
from .candidates import short_name
from .entrants import Entrant, KeyMetrics
from .race import median_of
from .resources import Resources
from .run import Explored, Plan

BEFORE_V0 = "no version is accepted yet, so the gate will judge it as v0, the baseline that all gains are counted from"


@dataclass(frozen=True)
class Row:
    """One entrant of an exploration. Times are in microseconds, cold. opponent: it was timed and not checked. probe: an
    opponent that a candidate's file states. against_best: the speed-up over the first opponent. kernel_sha256: of the
    entrant's file. compiled: for a card that is not here, None where that was not asked. started: False where there was
    no time for it."""

    name: str
    config: dict
    opponent: bool
    probe: bool
    status: Status
    latency: Latency | None
    against_best: halving.Ratio | None
    resources: Resources
    sm_clock_mhz: float | None
    sustained_us: float | None
    metrics: KeyMetrics | None
    compiled: Compiled | None
    dropped: bool
    error: str | None
    started: bool
    kernel_sha256: str

    @classmethod
    def of(cls, entrant: Entrant, opponent: Entrant | None) -> "Row":
        ratio = None
        if opponent and opponent is not entrant and entrant.calls_us and opponent.calls_us:
            ratio = speed_up(entrant, opponent)
        return cls(
            name=entrant.name,
            config=entrant.config,
            opponent=entrant.is_opponent,
            probe=entrant.is_probe,
            status=entrant.status,
            latency=replace(Latency.of(entrant.calls_us), median_us=median_of(entrant)) if entrant.calls_us else None,
            against_best=ratio,
            resources=entrant.resources,
            sm_clock_mhz=entrant.sm_clock_mhz,
            sustained_us=entrant.sustained_us,
            metrics=entrant.metrics,
            compiled=entrant.compiled,
            dropped=entrant.dropped,
            error=entrant.error,
            started=entrant.started,
            kernel_sha256=hashlib.sha256(entrant.file.read_bytes()).hexdigest(),
        )

    def to_json(self) -> dict:
        own = {name: value for name, value in vars(self).items() if name not in ("latency", "resources")}
        own |= {name: own[name] and own[name].to_json() for name in ("against_best", "metrics")}
        own["compiled"] = self.compiled and findings.to_json(self.compiled)
        return {**own, "latency_us": self.latency and self.latency.to_json(), **self.resources.to_json()}


def speed_up(entrant: Entrant, opponent: Entrant) -> halving.Ratio:
    """Over an opponent, both timed."""
    if halving.shared(entrant.rounds_us, opponent.rounds_us) < halving.FIRST_ROUNDS:
        return halving.widest(entrant.calls_us, opponent.calls_us)
    return halving.ratio(entrant.rounds_us, opponent.rounds_us)


def result_of(plan: Plan, explored: Explored, device: str, wall_s: float) -> dict:
    """The output of explore_kernels.py --json, without the file that keeps it."""
    return {
        "timestamp": now(),
        "device": device,
        "workload": plan.workload,
        "workloads": explored.workloads,
        "seeds": explored.seeds,
        "against": plan.against,
        "budget_s": plan.budget_s,
        "compiled": plan.compile_for and plan.compile_for.to_json(),
        "wall_s": round(wall_s, 2),
        "seconds": {phase: round(seconds, 1) for phase, seconds in explored.seconds.items()},
        "stopped_after_s": explored.stopped_after_s and round(explored.stopped_after_s, 2),
        "rows": means.merged(
            [row.to_json() for row in rows(explored.entrants, plan.against)],
            {workload: cells(at, plan.against) for workload, at in explored.elsewhere.items()},
        ),
    }


def cells(at: Explored, against: str | None) -> dict[str, dict]:
    """name -> what the row of the first workload says of this one."""
    was_stopped = at.stopped_after_s is not None
    return {row.name: means.cell(row.to_json(), was_stopped) for row in rows(at.entrants, against)}


def rows(entrants: list[Entrant], against: str | None) -> list[Row]:
    """A row for each entrant, in their order. against: the name of the opponent that ratios refer to."""
    opponent = next((entrant for entrant in entrants if entrant.name == against), None)
    return [Row.of(entrant, opponent) for entrant in entrants]


def save(workspace: Workspace, result: dict, entrants: list[Entrant]) -> Path:
    """Write the result as the next exploration, and each candidate's file beside it."""
    files = claimed(workspace)
    name = files.name
    for entrant in entrants:
        bundle.write_bytes(files / file_name(entrant.name), entrant.file.read_bytes())
    path = folder_of(workspace) / f"{name}.json"
    bundle.write_json(path, {"exploration": name, **result})
    return path


def claimed(workspace: Workspace) -> Path:
    """The folder of the next exploration, made for this one alone: another may end at the same time."""
    for number in itertools.count(max(numbers(workspace), default=0) + 1):
        with contextlib.suppress(FileExistsError):
            files = folder_of(workspace) / f"e{number}"
            files.mkdir(parents=True)
            return files


def file_name(name: str) -> str:
    """A candidate's name as that of a file; names stay different when they differ only in characters that a file name
    cannot hold."""
    plain = re.sub(r"[^A-Za-z0-9_.=,-]", "_", name)[:120]
    return f"{plain}.{hashlib.sha256(name.encode()).hexdigest()[:8]}.py"


def file_of(workspace: Workspace, exploration: str, name: str) -> Path:
    """The file of an entrant of a stored exploration, "e3"."""
    return folder_of(workspace) / exploration / file_name(name)


def find(workspace: Workspace, name: str) -> tuple[str, ExploredKernel]:
    """(the exploration, its row): of `NAME` the newest exploration that has it, `eN#NAME`, or as a plan cites it. NAME
    may be cut as the table shows it. An opponent is found too. UsageError when there is none, or more than one."""
    for number in reversed(numbers(workspace)):
        exploration = explorations.read(workspace.root, f"e{number}")  # None where it is damaged
        names = (name, name.removeprefix(f"e{number}#"), name.removeprefix(f"explore/e{number}.json#"))
        rows = exploration.rows if exploration else ()
        exact = [row for row in rows if row.name in names][:1]
        found = exact or [row for row in rows if short_name(row.name) in names]
        if len(found) > 1:
            alike = f"the short form of {len(found)} candidates of e{number}"
            raise UsageError(f"'{name}' is {alike}; pass one of: {', '.join(row.name for row in found)}")
        if found:
            return f"e{number}", found[0]
    raise UsageError(
        f"no exploration of {workspace.root} has a candidate '{name}'; its tables: {folder_of(workspace)}/eN.json"
    )


class NotFaster(Refused):
    """No candidate is faster than the best version for certain."""


def leaders(exploration: Exploration) -> list[str]:
    """The names of the candidates of an exploration that were timed, the fastest first; with several workloads those
    that were tried on all, and may be a gain. Refused when there is none; NotFaster when there is no gain over the
    workspace's best version for certain: the gate would refuse it."""
    several = len(exploration.workloads) > 1
    timed = [row for row in exploration.candidates if row.is_right and row.median_us is not None]
    timed = [row for row in timed if row.others or not several]
    if not timed:
        everywhere = " on all workloads" if several else ""
        raise Refused(f"kernel.py was not written: no candidate is right and timed{everywhere}")
    against = exploration.against
    if not is_best(against):
        return [row.name for row in timed]
    gains = [row for row in (timed if several else timed[:1]) if is_gain(speed_ups_of(row, exploration.workload))]
    if not gains:
        found = timed[0].found(exploration.workload)
        raise NotFaster(f"kernel.py was not written: the leader, {timed[0].name}, is {found} against {against}")
    return [row.name for row in gains]


def speed_ups_of(row: ExploredKernel, first: str) -> dict[str, gain.SpeedUp]:
    """By workload, where they are known. first: the exploration's. Pure."""
    known = {at: (one.speedup, one.ci95) for at, one in row.cells(first).items() if one.speedup and one.ci95}
    return {at: gain.SpeedUp.by_interval(*found) for at, found in known.items()}


def is_gain(speed_ups: dict[str, gain.SpeedUp]) -> bool:
    """May the gate take a candidate for a gain over the best version, by its speed-ups where they are known? Pure."""
    return gain.gain_at(speed_ups) is not None and gain.loss_at(speed_ups) is None


def keep(workspace: Workspace, name: str) -> str:
    """Make a candidate the workspace's kernel.py, and return the message for the user. UsageError when it is wrong, was
    not checked, or its file was changed."""
    exploration, row = find(workspace, name)
    if row.is_opponent:
        raise UsageError(
            f"{row.name} of {exploration} was not checked: it is an opponent or a probe; pass its file as a "
            "candidate, without PROBE"
        )
    if not row.is_right:
        raise UsageError(f"{row.name} of {exploration} is {row.status}; nothing was written")
    file = file_of(workspace, exploration, row.name)
    content = bundle.read_bytes(file)
    if hashlib.sha256(content).hexdigest() != row.kernel_sha256:
        raise UsageError(f"{file} was changed since {exploration}; explore it again")
    bundle.write_bytes(workspace.kernel, content)
    cited = f"explore/{exploration}.json#{row.name}"
    first = "" if RecordStore(workspace).best() else f"; {BEFORE_V0}"
    return f"kernel.py is now {row.name} of {exploration}; cite it in the plan as {cited}{first}"
