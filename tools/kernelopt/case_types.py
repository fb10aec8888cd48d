"""What passes between the worker and the tools: a case for the candidate and for the oracle, the change of its inputs,
the oracle's findings, a reference's call."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields

PLAIN = "contiguous"  # the layout of inputs that lie as the task makes them
VALUES, SHAPES = "values", "shapes"  # what an observed call ran on


@dataclass(frozen=True)
class Variant:
    """Sizes, a layout or values that the task does not list and that its reference takes.

    sizes: [[input, dimension, new size], …]. keywords: other values of the task's keyword sizes. values: the name of a
    change, None for the task's own. instead_of: the name of the variant whose refusal activates this one."""

    name: str
    sizes: list[list[int]]
    layout: str = PLAIN
    values: str | None = None
    instead_of: str | None = None
    keywords: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_json(cls, value: dict | None) -> "Variant | None":
        return value and cls(**value)

    @property
    def resized(self) -> bool:
        return bool(self.sizes or self.keywords)

    @property
    def of_task(self) -> bool:
        """Does get_inputs make its inputs as they are?"""
        return bool(self.keywords) and self.values is None


@dataclass(frozen=True)
class Draws:
    """How an output of a case is drawn at random: its position, the position of the seed's argument, and the number of
    calls."""

    output: int
    seed: int
    calls: int


@dataclass(frozen=True)
class SeededCalls:
    """The calls that draw an output: its position, the position of the seed's argument, and the seed of each call."""

    output: int
    seed: int
    seeds: list[int]


@dataclass(frozen=True)
class CandidateCase:
    """A case as the candidate's process gets it, which knows no seed of its inputs.

    path: the file that holds them. other: that of another case of the workload, on whose contents the kernel is called
    in between. first: of its workload. samples: of the outputs that are drawn at random."""

    path: str
    other: str | None = None
    variant: Variant | None = None
    first: bool = False
    samples: Sequence[SeededCalls] = ()

    def to_json(self) -> dict:
        return asdict(self)

    @classmethod
    def from_json(cls, case: dict) -> "CandidateCase":
        samples = [SeededCalls(**one) for one in case["samples"]]
        return cls(**{**case, "variant": Variant.from_json(case["variant"]), "samples": samples})


@dataclass(frozen=True)
class StoredCall:
    """The file of outputs that one call left, and the seed of the inputs that it got."""

    inputs_seed: int
    output: str


@dataclass(frozen=True)
class StoredCase:
    """A case as the oracle's process gets it: what its inputs are made from again, and the files that the candidate's
    calls on it left.

    first: of its workload. contents: fingerprints of the inputs and parameters that the candidate got. draws: the file
    of calls with other seeds."""

    workload: str
    seed: int
    variant: Variant | None = None
    first: bool = False
    contents: Sequence[tuple[float, float]] = ()
    calls: Sequence[StoredCall] = ()
    draws: str | None = None

    def to_json(self) -> dict:
        return asdict(self)

    @classmethod
    def from_json(cls, case: dict) -> "StoredCase":
        calls = [StoredCall(**call) for call in case["calls"]]
        return cls(**{**case, "variant": Variant.from_json(case["variant"]), "calls": calls})


@dataclass(frozen=True)
class OutputLayout:
    """How an output lies in memory. stride: of the dimensions with more than one element; the others mean nothing."""

    shape: list[int]
    dtype: str
    stride: list[int]


@dataclass(frozen=True)
class OutputErrors:
    """How far an output of the expected shape and dtype is from the oracle's.

    elements: of the output; finite: of the oracle's. rms: of the oracle's. bound: on |error| / (|reference| + scale).
    max_rel: its largest value. mismatches: finite elements beyond the bound. nonfinite: elements where the two are not
    the same NaN or Inf; spurious and infinite: those of them where the oracle is finite, or Inf. lost_pct: share of
    elements that miss by more than half of themselves. baseline_…: PyTorch's own. outside: elements beyond a bound that
    the task declares. refused: why a declared comparison refuses the output."""

    elements: int
    finite: int
    rms: float
    bound: float
    max_rel: float
    mismatches: int
    nonfinite: int
    spurious: int
    infinite: int
    first_bad_index: int | None
    baseline_max_rel: float
    lost_pct: float
    baseline_lost_pct: float
    outside: int | None = None
    refused: str | None = None

    @property
    def any(self) -> bool:
        return bool(self.refused) or self.mismatches + self.nonfinite > 0


@dataclass(frozen=True)
class OutputCheck:
    """One output compared with the expected one. errors: None where shape or dtype differ.

    usually_finite: of a variant: does the output hold no NaN and no Inf on the task's own inputs? input: the name of
    the input that it is the contents of, where the task declares one as an output; then `unchanged`: the call left it
    as it was, and `disturbed`: elements that differ although the reference leaves them. few_draws: what the draws of a
    random output are too few to tell."""

    actual: OutputLayout
    expected: OutputLayout
    errors: OutputErrors | None
    usually_finite: bool | None = None
    input: str | None = None
    unchanged: bool | None = None
    disturbed: int | None = None
    few_draws: str | None = None

    def to_json(self) -> dict:
        """One flat object; what is not known has no key."""
        expected = {f"expected_{name}": value for name, value in vars(self.expected).items()}
        errors = vars(self.errors) if self.errors else {}
        optional = {**errors, **{name: getattr(self, name) for name in OF_SOME_OUTPUTS}}
        always = ("first_bad_index",) if self.errors else ()
        known = {name: value for name, value in optional.items() if value is not None or name in always}
        return {**vars(self.actual), **expected, **known}

    @classmethod
    def from_json(cls, value: dict) -> "OutputCheck":
        names = [one.name for one in fields(OutputLayout)]
        errors = {one.name: value[one.name] for one in fields(OutputErrors) if one.name in value}
        return cls(
            OutputLayout(**{name: value[name] for name in names}),
            OutputLayout(**{name: value[f"expected_{name}"] for name in names}),
            OutputErrors(**errors) if errors else None,
            **{name: value.get(name) for name in OF_SOME_OUTPUTS},
        )


OF_SOME_OUTPUTS = ("usually_finite", "input", "unchanged", "disturbed", "few_draws")


@dataclass(frozen=True)
class CallCheck:
    """The oracle's findings on one call: the number of outputs, their structure, and each compared with the expected
    one."""

    count: int
    structure: str | None
    outputs: list[OutputCheck]

    @classmethod
    def from_json(cls, call: dict) -> "CallCheck":
        return cls(call["count"], call["structure"], list(map(OutputCheck.from_json, call["outputs"])))


@dataclass(frozen=True)
class OracleCheck:
    """The oracle's findings on one case. unreadable: the reason why it could not read the outputs, or broken: the error
    of the reference on a variant; then the rest is empty.

    changes: parameters and buffers that the reference changes. wrong_state: those that the kernel left otherwise.
    wrong_draws: why what the kernel draws does not follow the reference's probabilities.
    trivial_answers: answers that compute nothing and would pass. oracle: its precision. random: the reference gives
    different results on the same inputs. strange: inputs and parameters of other contents than the candidate got from
    the same seed.
    """

    unreadable: str | None = None
    broken: str | None = None
    calls: Sequence[CallCheck] = ()
    expected_count: int = 0
    expected_structure: str = ""
    changes: Sequence[str] | None = None
    wrong_state: Sequence[str] = ()
    wrong_draws: Sequence[str] = ()
    trivial_answers: Sequence[str] = ()
    oracle: str | None = None
    random: bool = False
    strange: Sequence[str] = ()

    @classmethod
    def from_json(cls, check: dict) -> "OracleCheck":
        return cls(**{**check, "calls": tuple(map(CallCheck.from_json, check.get("calls", ())))})

    @property
    def outputs(self) -> list[OutputCheck]:
        """Of all calls."""
        return [output for call in self.calls for output in call.outputs]


@dataclass(frozen=True)
class Observation:
    """A call of a reference.

    ran: on VALUES, or on SHAPES alone. outputs: the dtype of each tensor that it returns. rms: of each of them, None
    for whole numbers, and on shapes alone. keys: those of a returned dict; None for anything else. arguments: how many
    inputs there are. changed: by position of an input that the call changes, the dtypes of the changed tensors. bytes:
    of inputs and parameters. declared: what the reference declares.
    """

    ran: str
    outputs: list[str]
    rms: list[float | None]
    keys: list[str] | None
    arguments: int
    changed: dict[int, list[str]]
    bytes: int
    declared: dict = field(default_factory=dict)

    @classmethod
    def from_json(cls, call: dict) -> "Observation":
        return cls(**{**call, "changed": {int(at): dtypes for at, dtypes in call["changed"].items()}})
