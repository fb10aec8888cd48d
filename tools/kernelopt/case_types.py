"""What the worker makes and the tools read: a change of a case's inputs, the oracle's findings, a reference's call."""

from collections.abc import Sequence
from dataclasses import dataclass, field

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
class CallCheck:
    """The oracle's findings on one call: the number of outputs, their structure, and each compared with the expected
    one.

    outputs: of worker.accuracy.compare, {shape, dtype, stride, expected_…, mismatches, max_rel, …}.
    """

    count: int
    structure: str | None
    outputs: list[dict]


@dataclass(frozen=True)
class OracleCheck:
    """The oracle's findings on one case. unreadable: the reason why it could not read the outputs, or broken: the error
    of the reference on a variant; then the rest is empty.

    changes: parameters and buffers that the reference changes. wrong_state: those that the kernel left otherwise.
    wrong_draws: why what the kernel draws does not follow the reference's probabilities.
    trivial_answers: answers that compute nothing and would pass. oracle: its precision. random: the reference gives
    different results on the same inputs.
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

    @classmethod
    def from_json(cls, check: dict) -> "OracleCheck":
        return cls(**{**check, "calls": tuple(CallCheck(**call) for call in check.get("calls", ()))})

    @property
    def outputs(self) -> list[dict]:
        """Of all calls."""
        return [output for call in self.calls for output in call.outputs]


@dataclass(frozen=True)
class Observation:
    """A call of a reference.

    ran: on VALUES, or on SHAPES alone. outputs: the dtype of each tensor that it returns. keys: those of a returned
    dict; None for anything else. arguments: how many inputs there are. changed: by position of an input that the call
    changes, the dtypes of the changed tensors. bytes: of inputs and parameters. declared: what the reference declares.
    """

    ran: str
    outputs: list[str]
    keys: list[str] | None
    arguments: int
    changed: dict[int, list[str]]
    bytes: int
    declared: dict = field(default_factory=dict)

    @classmethod
    def from_json(cls, call: dict) -> "Observation":
        return cls(**{**call, "changed": {int(at): dtypes for at, dtypes in call["changed"].items()}})
