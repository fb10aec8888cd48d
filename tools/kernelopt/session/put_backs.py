"""What came of a kernel in a model: W/put_back/result.json, which put_back.py writes beside the files it checked."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path

from .. import bundle
from ..errors import ToolError, UsageError
from ..model_types import ModelCheck, most_saved_pct
from ..statuses import Speed
from .workspace import Workspace

FOLDER = "put_back"
BROKEN = "the model with the kernel fails"  # how worker.model_steps begins to say so
OUTPUTS = "outputs, workload"  # how worker.model_put_back begins the names of these checks
EAGER, ALONE = "eager", "the module alone"


@dataclass(frozen=True)
class Way:
    """A way of running the step. before_us, after_us: medians. speedup, ci95: of the step; verdict: statuses.Speed.
    failed: why it was not timed; the figures are then None."""

    name: str
    before_us: float | None
    after_us: float | None
    speedup: float | None
    ci95: tuple[float, float] | None
    verdict: str | None
    failed: str | None
    before_bytes: int | None
    after_bytes: int | None

    @property
    def gain_pct(self) -> float:
        """How much less time a step takes, in percent."""
        return 100 * (1 - 1 / self.speedup)


@dataclass(frozen=True)
class Promise:
    """What find_kernels.py said of the part, of an eager step. share_pct: of the step that it takes. at_most_pct,
    saved_us: of the step that could be saved, if the part ran at its floor; None without a floor. floor_us: that
    floor; None in older references."""

    share_pct: float
    at_most_pct: float | None
    saved_us: float | None = None
    floor_us: float | None = None

    def most_pct(self, step_us: float) -> float | None:
        """The share of the step that could be saved in another way of running, which takes `step_us`."""
        if self.saved_us is None:
            return None
        if not self.at_most_pct:
            return 0.0
        floor_us = self.floor_us
        if floor_us is None:  # saved_us is then the part's time above its floor
            floor_us = max(0.0, self.share_pct * self.saved_us / self.at_most_pct - self.saved_us)
        return most_saved_pct(self.saved_us, floor_us, step_us)


@dataclass(frozen=True)
class PutBack:
    """version: of the kernel; None for a candidate that is not accepted. where: the calls that it takes; None for all.
    workload: of the step. calls: of the kernel in it. left_out: workloads in which the original takes all calls. ways:
    empty without a GPU. alone: one call of a module, by itself."""

    timestamp: str
    model: str
    at: str
    where: str | None
    paths: tuple[str, ...]
    workload: str
    calls: int
    left_out: tuple[str, ...]
    version: str | None
    kernel_sha256: str
    device: str
    training: bool
    checks: tuple[ModelCheck, ...]
    ways: tuple[Way, ...]
    alone: Way | None
    promise: Promise | None

    @property
    def is_right(self) -> bool:
        return all(check.passed is not False for check in self.checks)

    def way(self, name: str) -> Way | None:
        return next((way for way in self.ways if way.name == name), None)

    @property
    def timed(self) -> tuple[Way, ...]:
        return tuple(way for way in self.ways if way.verdict)

    @property
    def best_before(self) -> Way:
        """The way of running that is the fastest without the kernel."""
        return min(self.timed, key=lambda way: way.before_us)

    @property
    def best_after(self) -> Way:
        """The way of running that is the fastest with it."""
        return min(self.timed, key=lambda way: way.after_us)

    @property
    def pays(self) -> bool:
        """Is the fastest step with the kernel faster than the fastest without it, and are all ways of running left?"""
        best = self.best_after
        return best.verdict == Speed.FASTER and best.after_us < self.best_before.before_us and not self.broken

    @property
    def broken(self) -> tuple[Way, ...]:
        """The ways of running that only work without the kernel."""
        return tuple(way for way in self.ways if way.failed and way.failed.startswith(BROKEN))

    def expected(self) -> float | None:
        """The speed-up of the eager step that follows from the part's share and the kernel's own speed-up; None where
        one of them is unknown."""
        if not self.promise or not self.alone or not self.alone.speedup:
            return None
        share = self.promise.share_pct / 100
        return 1 / (1 - share + share / self.alone.speedup)

    def to_json(self) -> dict:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict) -> "PutBack":
        """KeyError, TypeError or ValueError when the value is none."""
        made = {field.name: value[field.name] for field in fields(cls)}
        made |= {name: tuple(map(str, value[name])) for name in ("paths", "left_out")}
        made["checks"] = tuple(ModelCheck(**check) for check in value["checks"])
        made["ways"] = tuple(way_from(way) for way in value["ways"])
        made["alone"] = value["alone"] and way_from(value["alone"])
        made["promise"] = value["promise"] and Promise(**value["promise"])
        return cls(**made)


def way_from(value: dict) -> Way:
    return Way(**{**value, "ci95": value["ci95"] and (float(value["ci95"][0]), float(value["ci95"][1]))})


def folder_of(workspace: Workspace) -> Path:
    return workspace.root / FOLDER


def write(workspace: Workspace, result: PutBack) -> None:
    bundle.write_json(folder_of(workspace) / "result.json", result.to_json())


def recorded(workspace: Workspace) -> PutBack | None:
    """The latest result; None where there is none. UsageError when it cannot be read."""
    path = folder_of(workspace) / "result.json"
    if not path.exists():
        return None
    try:
        return PutBack.from_json(bundle.read_json(path))
    except (ToolError, AttributeError, KeyError, IndexError, TypeError, ValueError):
        raise UsageError(f"{path} is no result of put_back.py; run it again") from None
