"""When the loop stops. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..measure.pairing import Comparison
from ..profilers import metrics
from ..session import stop_conditions
from ..session.record import Record
from ..session.task import Target
from .run_state import State

STUCK = "no accepted gain"


@dataclass(frozen=True)
class Limits:
    """The limits of a run.

    patience: rounds without an accepted gain until it is stuck. restarts: partial restarts then.
    refinements: times that an invalid answer is handed back. candidates: agents side by side in a round.
    """

    rounds: int
    minutes: float
    agent_calls: int
    patience: int
    restarts: int
    refinements: int
    agent_timeout_s: float
    candidates: int = 1


@dataclass(frozen=True)
class LoopResult:
    """The end of a run. met: whether the targets are met. best: the version, latency_us: its recorded median. minutes:
    over all processes of the run. final: the comparisons of the best version that are made last, by baseline."""

    reason: str
    met: bool
    best: str
    latency_us: float
    rounds: int
    agent_calls: int
    restarts: int
    minutes: float
    final: Mapping[str, Comparison] = field(default_factory=dict)

    def to_json(self) -> dict:
        """The output of optimize_kernel.py --json."""
        return {**vars(self), "final": {name: comparison.to_json() for name, comparison in self.final.items()}}


def stop_reason(
    state: State, limits: Limits, targets: Sequence[Target], best: Record, floor_share_pct: float | None
) -> str | None:
    """Why the loop stops now; None to go on. After STUCK a partial restart may be tried.
    floor_share_pct: of the best version (platforms.floor_share_pct)."""
    if stop_conditions.are_met(targets, best):
        return f"the targets are met by {best.version}"
    if floor_share_pct is not None and floor_share_pct >= metrics.thresholds()["at_floor_pct"]:
        return f"{best.version} is at {floor_share_pct:.1f} % of the floor: the problem allows little more"
    if state.rounds >= limits.rounds:
        return f"{limits.rounds} rounds are over"
    if state.spent_s >= 60 * limits.minutes:
        return f"{limits.minutes:g} minutes are over"
    if state.agent_calls >= limits.agent_calls:
        return f"{limits.agent_calls} calls of the agent are used up"
    if state.without_gain >= limits.patience:
        return STUCK
    return None
