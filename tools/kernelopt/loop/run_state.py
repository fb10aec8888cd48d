"""The state of the loop, and the steps from one state to the next. Pure; progress.py writes each state to disk."""

from dataclasses import asdict, dataclass, field, fields, replace

LISTS = ("waiting", "tried")  # JSON has no tuples


@dataclass(frozen=True)
class State:
    """The state of the loop. Each method returns the next state.

    candidates: of the round in which agents work, {name: digest of its files, "" until they are valid}.
    waiting: names of the candidates to be judged; while a verdict is recorded, the first of them is `version`.
    gained: whether this round accepted a candidate.
    without_gain: rounds since the last gain.
    spent_s: seconds that the run has taken, over all its processes.
    tried: fingerprints of all kernels that were judged, in earlier runs too.
    kept: while agents or measurements run, the digest of the workspace's snapshot.
    """

    candidates: dict[str, str] = field(default_factory=dict)
    waiting: tuple[str, ...] = ()
    version: str | None = None
    gained: bool = False
    rounds: int = 0
    agent_calls: int = 0
    without_gain: int = 0
    restarts: int = 0
    spent_s: float = 0.0
    tried: tuple[str, ...] = ()
    kept: str | None = None

    # --- the run and its workspace ----------------------------------------------------------------------------

    def with_time(self, spent_s: float) -> "State":
        return replace(self, spent_s=spent_s)

    def with_tried(self, fingerprints: set[str]) -> "State":
        """These kernels were judged before."""
        return replace(self, tried=(*self.tried, *sorted(fingerprints - {*self.tried})))

    def with_snapshot(self, digest: str | None) -> "State":
        return replace(self, kept=digest)

    def distrusted(self) -> "State":
        """The workspace was changed while agents worked: no answer of the round counts."""
        return replace(self, candidates=dict.fromkeys(self.candidates, ""))

    def restarted(self) -> "State":
        """A partial restart was made; patience starts again."""
        return replace(self, restarts=self.restarts + 1, without_gain=0)

    # --- a round: agents are asked ----------------------------------------------------------------------------

    def round_begun(self, names: list[str]) -> "State":
        return replace(self, rounds=self.rounds + 1, gained=False, candidates=dict.fromkeys(names, ""))

    def call_counted(self) -> "State":
        return replace(self, agent_calls=self.agent_calls + 1)

    def call_uncounted(self) -> "State":
        """The agent's command does not exist, so the call does not count."""
        return replace(self, agent_calls=self.agent_calls - 1)

    def candidate_valid(self, name: str, digest: str) -> "State":
        return replace(self, candidates={**self.candidates, name: digest})

    def enqueued(self, fingerprints: dict[str, str], counted: bool = True) -> "State":
        """The agents' part of the round is over.

        fingerprints: {name: fingerprint} of the candidates that now wait for the gate. counted: False when the run was
        killed in this round before any answer was valid.
        """
        waiting, tried = (*self.waiting, *fingerprints), (*self.tried, *fingerprints.values())
        return replace(self, candidates={}, waiting=waiting, tried=tried, rounds=self.rounds - (not counted))

    # --- a round: candidates are judged -----------------------------------------------------------------------

    def judged_next(self, name: str) -> "State":
        """`name` is the first candidate that waits."""
        return replace(self, waiting=(name, *(other for other in self.waiting if other != name)))

    def judging(self, name: str, version: str) -> "State":
        """The verdict on `name`, which becomes `version`, is about to be recorded."""
        return replace(self.judged_next(name), version=version)

    def candidate_closed(self, accepted: bool) -> "State":
        """The first candidate that waits has its verdict."""
        without_gain = 0 if accepted else self.without_gain
        gained = self.gained or accepted
        return replace(self, waiting=self.waiting[1:], version=None, gained=gained, without_gain=without_gain)

    def plan_refused(self, fingerprint: str) -> "State":
        """The kernel was not judged, because of its plan. It may be proposed again."""
        return replace(self, tried=tuple(other for other in self.tried if other != fingerprint))

    def all_judged(self) -> "State":
        return replace(self, without_gain=0 if self.gained else self.without_gain + 1)


def to_json(state: State) -> dict:
    return asdict(state)


def from_json(value) -> State | None:
    """The state in a JSON value; None when it holds something else."""
    names = {entry.name for entry in fields(State)}
    if not isinstance(value, dict) or not value.keys() <= names:
        return None
    if not all(isinstance(value.get(name, []), list) for name in LISTS):
        return None
    state = State(**{**value, **{name: tuple(value[name]) for name in LISTS if name in value}})
    return state if is_state(state) else None


def is_state(state: State) -> bool:
    """Whether each field has a value of its type."""
    if not isinstance(state.candidates, dict):
        return False
    texts = (*state.waiting, *state.tried, *state.candidates.values())
    numbers = (state.rounds, state.agent_calls, state.without_gain, state.restarts, state.spent_s)
    return (
        all(isinstance(text, str) for text in texts)
        and all(isinstance(number, int | float) for number in numbers)
        and isinstance(state.version, str | None)
        and isinstance(state.kept, str | None)
    )
