"""The recorded explorations of a workspace, explore/eN.json, which explore/store.py writes."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .. import bundle
from ..errors import ToolError
from ..statuses import Status
from .record import Record
from .record_store import RecordStore
from .workspace import Workspace

NUMBERED = re.compile(r"e([1-9][0-9]{0,6})\.json\Z")
# explore/e3.json, or explore/e3.json# before the name of a row: a file's stem, and for a configuration its constants.
CITED = re.compile(r"\bexplore/(?P<exploration>e[1-9]\d{0,6})\.json(?P<row>#)?")
LIKE_A_NAME = re.compile(r"[\w.+-]*(?:\[[^\]\n]*\])?")
BEST = "best"  # an opponent's name: the best version, as "best (v3)"
LITTLE = 1.02  # over the best version: an exploration below it brought little
WORTH_A_RUN = 1.05  # over the best version: where an exploration brought more, another one may be worth its GPU time
# Of the bare operations' sustained rate. At NEAR_PCT or above, little followed v0; below FAR_PCT, 1.9 to 18 %.
NEAR_PCT, FAR_PCT = 90.0, 70.0
# The figures here, in …AFTER_V0 and SUSTAINED_IN_TRIALS are those of the trials in evals/README.md.
FINISH = "finish; in six trials what followed this line brought 0 to 1.4 % for 26 to 99 s of the GPU"
COUNTS = "where GPU time counts"
SUSTAINED_IN_TRIALS = "the bare operations' sustained rate; in 19 of 24 trials the faster kernel ended at 84 to 106 %"
AFTER_V0 = (
    f"in thirteen trials that stood at {FAR_PCT:.0f} to {NEAR_PCT:.0f} % of the bare operations' rate, or had no such "
    "share, what followed brought under 1 % in six, 2.1 to 8.4 % in seven, for 40 s to three minutes of the GPU"
)
NEAR_AFTER_V0 = (
    f"in five trials that stood at {NEAR_PCT:.0f} % or more, what followed brought 0 to 1.2 % for 32 to 93 s of the GPU"
)
FAILED_AFTER_V0 = "mend what they share; another run may pay: in one trial it brought 10.6 % for 84 s of the GPU"
FAR_AFTER_V0 = (
    f"in three trials that stood below {FAR_PCT:.0f} %, what followed brought 1.9, 6.9 and 18 % for 40 to 131 s of the "
    "GPU"
)


@dataclass(frozen=True, kw_only=True)
class AtWorkload:
    """A kernel at another workload than the first. status: None where there was no time. The rest: as of a row."""

    status: str | None
    median_us: float | None
    speedup: float | None
    ci95: tuple[float, float] | None
    dropped: bool
    error: str | None

    @classmethod
    def from_json(cls, cell: dict) -> "AtWorkload":
        time, ratio = cell["latency_us"] or {}, cell["against_best"] or {}
        return cls(
            status=None if cell["status"] is None else str(cell["status"]),
            median_us=number(time.get("median")),
            speedup=number(ratio.get("point")),
            ci95=interval_of(ratio),
            dropped=bool(cell["dropped"]),
            error=None if cell["error"] is None else str(cell["error"]),
        )

    @property
    def failed(self) -> bool:
        return self.status not in (None, Status.OK)


def interval_of(ratio: dict) -> tuple[float, float] | None:
    """ci95 of a speed-up, {} for none."""
    return (float(ratio["ci95"][0]), float(ratio["ci95"][1])) if ratio else None


@dataclass(frozen=True, kw_only=True)
class ExploredKernel:
    """One row. is_opponent: it was not checked. is_probe: an opponent that leaves out a part of the work. status: of
    the verifier, OK for an opponent that ran; "WRONG_VALUES at tall" where it failed at another workload. median_us,
    p20_us, p80_us: of cold calls, None where none was timed. speedup, ci95: over the first opponent. registers: of a
    thread. spill_bytes: of a thread. shared_bytes: of a block. sustained_us: of calls in a row. sm_clock_mhz:
    meanwhile. kernel_sha256: of its file. others: the same kernel at the workloads after the first, where it was tried.
    mean: the geometric mean of the speed-ups, where it has all."""

    name: str
    is_opponent: bool
    is_probe: bool
    status: str
    median_us: float | None
    p20_us: float | None
    p80_us: float | None
    speedup: float | None
    ci95: tuple[float, float] | None
    registers: int | None
    spill_bytes: int | None
    shared_bytes: int | None
    occupancy_pct: float | None
    sm_clock_mhz: float | None
    sustained_us: float | None
    dropped: bool
    error: str | None
    kernel_sha256: str
    others: dict[str, AtWorkload] = field(default_factory=dict)
    mean: float | None = None

    @classmethod
    def from_json(cls, row: dict) -> "ExploredKernel":
        """KeyError, TypeError or ValueError when the row is no row of an exploration."""
        time, ratio = row["latency_us"] or {}, row["against_best"] or {}
        if not isinstance(row["name"], str) or not isinstance(row["status"], str):
            raise TypeError("name and status are texts")
        others = {name: AtWorkload.from_json(cell) for name, cell in (row.get("others") or {}).items()}
        status, error = status_of(row, others)
        return cls(
            name=row["name"],
            is_opponent=bool(row["opponent"]),
            is_probe=bool(row.get("probe")),  # absent in archived explorations
            status=status,
            median_us=number(time.get("median")),
            p20_us=number(time.get("p20")),
            p80_us=number(time.get("p80")),
            speedup=number(ratio.get("point")),
            ci95=interval_of(ratio),
            **{name: number(row[name]) for name in NUMBERS},
            dropped=bool(row["dropped"]),
            error=error,
            kernel_sha256=str(row["kernel_sha256"]),
            others=others,
            mean=number(row.get("mean")),  # both absent in older explorations
        )

    @property
    def is_right(self) -> bool:
        return self.status == Status.OK

    @property
    def gain(self) -> float | None:
        """The speed-up; with several workloads their mean, where it has all."""
        return self.speedup if self.mean is None else self.mean

    def cells(self, first: str) -> dict[str, "ExploredKernel | AtWorkload"]:
        """What was found, by workload. first: the exploration's."""
        return {first: self, **self.others}

    def found(self, first: str) -> str:
        """ "1.004x", and of several workloads "1.004x at default, 0.950x at tall" """
        speeds = {at: one.speedup for at, one in self.cells(first).items()}
        said = {at: "not known to be faster" if speed is None else f"{speed:.3f}x" for at, speed in speeds.items()}
        return ", ".join(f"{text} at {at}" for at, text in said.items()) if self.others else said[first]


def status_of(row: dict, others: dict[str, AtWorkload]) -> tuple[str, str | None]:
    """(status, error) of a row: of the first workload, or of the first other one at which a right kernel failed."""
    at = next((name for name, one in others.items() if one.failed), None)
    if at is None or row["status"] != Status.OK:
        return row["status"], None if row["error"] is None else str(row["error"])
    return f"{others[at].status} at {at}", f"at {at}: {others[at].error}"


NUMBERS = ("registers", "spill_bytes", "shared_bytes", "occupancy_pct", "sm_clock_mhz", "sustained_us")


def number(value) -> float | None:
    """A finite number above 0 or 0; None is kept. ValueError for anything else."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise ValueError(f"{value!r} is no number of an exploration")
    return value


@dataclass(frozen=True, kw_only=True)
class Exploration:
    """name: "e1". against: the opponent that speed-ups refer to, or None. was_stopped: a signal ended it. rows: best
    first, failures last."""

    name: str
    timestamp: str
    device: str
    workload: str
    against: str | None
    wall_s: float
    was_stopped: bool
    rows: tuple[ExploredKernel, ...]

    @classmethod
    def from_json(cls, value: dict) -> "Exploration":
        """KeyError, TypeError or ValueError when the value is no exploration."""
        against = value["against"]
        return cls(
            **{name: str(value[name]) for name in ("timestamp", "device", "workload")},
            name=str(value["exploration"]),
            against=None if against is None else str(against),
            wall_s=float(value["wall_s"]),
            was_stopped=value.get("stopped_after_s") is not None,
            rows=tuple(ExploredKernel.from_json(row) for row in value["rows"]),
        )

    def row(self, name: str) -> ExploredKernel | None:
        return next((row for row in self.rows if row.name == name), None)

    @property
    def workloads(self) -> list[str]:
        """Those that candidates were tried on, the first one first."""
        return [self.workload, *dict.fromkeys(name for row in self.rows for name in row.others)]

    @property
    def tried_on(self) -> str:
        """ "workload default", "workloads default, tall" """
        return f"workload{'s' * (len(self.workloads) > 1)} {', '.join(self.workloads)}"

    @property
    def speedup_over_best(self) -> float | None:
        """`gain` of the fastest right candidate; None where none was timed against the workspace's best version."""
        if not is_best(self.against):
            return None
        return next((row.gain for row in self.candidates if row.is_right and row.gain is not None), None)

    @property
    def candidates(self) -> list[ExploredKernel]:
        """The rows that are no opponents."""
        return [row for row in self.rows if not row.is_opponent]

    @property
    def failed(self) -> list[ExploredKernel]:
        """The candidates that are not right. Those without an answer are left out: the time may have been over."""
        return [row for row in self.candidates if row.status not in (Status.OK, Status.TIMEOUT)]


def of_result(result: dict, name: str) -> Exploration:
    """The exploration that explore_kernels.py prints as `result`, under its name, "e1"."""
    return Exploration.from_json({"exploration": name, **result})


def is_best(name: str | None) -> bool:
    """Is an opponent of this name the workspace's best version?"""
    return name is not None and name.startswith(f"{BEST} (")


def little_came_of(exploration: Exploration) -> str | None:
    """What to do after an exploration that brought next to nothing; None where it brought more, or was stopped, or no
    one knows."""
    speedup = exploration.speedup_over_best
    if speedup is None or speedup >= LITTLE or exploration.was_stopped:
        return None
    brought = f"{100 * (speedup - 1):.1f} %" if speedup > 1 else "nothing"
    less = f", less than {100 * (LITTLE - 1):.0f} %" if speedup > 1 else ""
    return f"{exploration.name} brought {brought} over {exploration.against}{less}: {FINISH}"


def next_run(
    exploration: Exploration,
    version: str,
    accepted: bool,
    gained: float | None = None,
    sustained_pct: float | None = None,
) -> str | None:
    """What to do after an exploration whose leader was to become this version; None where another one may be worth its
    GPU time, and no figures say how much. gained: the version's speed-up over the best by the gate, where it told one.
    sustained_pct: its share of the rate that the bare operations sustain; None where it is unknown, for other bounds,
    and where fewer of them may do the work."""
    if version == "v0":
        return after_v0(exploration, sustained_pct) if accepted else None
    speedup = (accepted and gained) or exploration.speedup_over_best
    if speedup is None or speedup >= WORTH_A_RUN or exploration.was_stopped:
        return None
    brought = (
        f"{version} brought {100 * (speedup - 1):.1f} %" if accepted else f"{exploration.name} brought nothing certain"
    )
    return f"{brought} over {exploration.against}: {FINISH if speedup < LITTLE else f'{COUNTS}, report now'}"


def after_v0(exploration: Exploration, sustained_pct: float | None) -> str:
    """What to do after an accepted v0. A share above 100 says that not all the work that was counted is needed. Where
    most candidates failed, v0 was chosen among few."""
    failed, tried = len(exploration.failed), len(exploration.candidates)
    near = sustained_pct is not None and NEAR_PCT <= sustained_pct <= 100
    if 2 * failed > tried and not near:
        return f"{failed} of {tried} candidates failed: {FAILED_AFTER_V0}"
    if sustained_pct is None or FAR_PCT <= sustained_pct < NEAR_PCT or sustained_pct > 100:
        return f"{COUNTS}, report now, at any share of the floor: {AFTER_V0}"
    advice = f"finish; {NEAR_AFTER_V0}" if near else f"another run may pay; {FAR_AFTER_V0}"
    return f"v0 is at {sustained_pct:.1f} % of the bare operations' sustained rate: {advice}"


def folder_of(workspace: Workspace) -> Path:
    return workspace.root / "explore"


def numbers(workspace: Workspace) -> list[int]:
    """The numbers of the workspace's explorations, in order."""
    files = folder_of(workspace).glob("e*.json")
    return sorted(int(match[1]) for file in files if (match := NUMBERED.match(file.name)))


def recorded(workspace: Workspace, masked: Iterable[str] = ()) -> tuple[list[Exploration], list[str]]:
    """(the explorations in order, a sentence for each file that cannot be read). masked: versions; explorations that
    their plans or records cite are left out, as they show what a masked round tried."""
    texts = [path for one in masked for path in (workspace.plan(one), workspace.memory / f"{one}.json")]
    hidden = {name for path in texts for name in cited_in(path)}
    explorations, gaps = [], []
    for count in numbers(workspace):
        path = folder_of(workspace) / f"e{count}.json"
        if path.stem in hidden:
            continue
        if exploration := read(workspace.root, path.stem):
            explorations.append(exploration)
        else:
            gaps.append(f"{path} is no exploration; explore_kernels.py writes these files")
    return explorations, gaps


def little_came_of_the_last(workspace: Workspace, records: RecordStore) -> str | None:
    """`little_came_since` of the newest exploration that no masked version names."""
    explorations, _ = recorded(workspace, records.masked_versions())
    return little_came_since(explorations[-1], records.best()) if explorations else None


def little_came_since(exploration: Exploration, best: Record | None) -> str | None:
    """`little_came_of` an exploration that timed the best version; None where that came later, by another way."""
    is_timed = best and any(row.kernel_sha256 == best.kernel_sha256 for row in exploration.rows)
    return little_came_of(exploration) if is_timed else None


def read(root: Path, name: str) -> Exploration | None:
    """The exploration "e3" of a workspace's folder; None where there is no such file, or it is none."""
    try:
        return Exploration.from_json(bundle.read_json(root / "explore" / f"{name}.json"))
    except (ToolError, AttributeError, KeyError, IndexError, TypeError, ValueError):
        return None


def row_of_kernel(workspace: Workspace, kernel_sha256: str) -> str | None:
    """The candidate of the newest exploration that timed that kernel, as a plan cites it: explore/e3.json#NAME."""
    for count in reversed(numbers(workspace)):
        exploration = read(workspace.root, f"e{count}")
        for row in exploration.candidates if exploration else ():
            if row.kernel_sha256 == kernel_sha256 and row.median_us is not None:
                return f"explore/e{count}.json#{row.name}"
    return None


def row_at(text: str, at: int, exploration: Exploration | None) -> str:
    """The name of a row that stands in a text from `at` on: the longest, as a name may hold spaces and brackets; else
    what looks like one."""
    names = (row.name for row in exploration.rows) if exploration else ()
    longest = max((name for name in names if text.startswith(name, at)), key=len, default="")
    alike = LIKE_A_NAME.match(text, at)[0]
    return longest if len(longest) >= len(alike) else alike


def cited_in(path: Path) -> set[str]:
    """The explorations ("e3") that a plan or a record cites; empty where there is no such file."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return {cited["exploration"] for cited in CITED.finditer(text)}
