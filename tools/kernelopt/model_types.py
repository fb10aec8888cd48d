"""What the worker finds in a whole model and the tools read: a part cut out, a check of a kernel put in."""

from dataclasses import dataclass

REPEATABLE = 0.02  # how far two runs may differ, by the order of additions


def most_saved_pct(saved_us: float, floor_us: float, step_us: float) -> float:
    """The share of a step that a part could save at most. saved_us: of the part's time. What the part takes in another
    step than the eager one is not known, only that its floor remains."""
    return 100 * min(saved_us, max(0.0, step_us - floor_us)) / step_us


@dataclass(frozen=True)
class Proof:
    """A run of the model with the cut in place, compared with a run as it is. difference: the largest of an output,
    over its size plus the rms; noise: the same of two runs as it is. outputs: how many tensors were compared. why: the
    error of a run that failed, because the call of the module had another form. calls: of the module, that the cut
    took; left: those of another form, which the original took; condition: what these lack; None for none."""

    workload: str
    difference: float
    noise: float
    outputs: int
    why: str | None = None
    calls: int = 0
    left: int = 0
    condition: str | None = None

    @property
    def equal(self) -> bool:
        return self.why is None and self.difference <= 2 * min(self.noise, REPEATABLE)

    def to_json(self) -> dict:
        return {**vars(self), "equal": self.equal}

    @classmethod
    def from_json(cls, value: dict) -> "Proof":
        return cls(**{name: one for name, one in value.items() if name != "equal"})


@dataclass(frozen=True)
class CutReport:
    """What was cut. inputs: [name, dtype, sizes, strides] of the kernel's. constant: those that hold one floating value
    alone. tensors: how many these are, with parameters
    and buffers. parameters: the numbers in those. sizes: the keywords of get_inputs. fixed: why no size may differ;
    None where some may. calls: of the module in a step."""

    path: str
    module: str
    kind: str
    operators: int
    inputs: list[list]
    constant: list[str]
    results: int
    tensors: int
    parameters: int
    mutates: list[str]
    sizes: dict[str, int]
    fixed: str | None
    calls: int
    workloads: list[str]
    proofs: list[Proof]

    def to_json(self) -> dict:
        return {**vars(self), "proofs": [proof.to_json() for proof in self.proofs]}

    @classmethod
    def from_json(cls, value: dict) -> "CutReport":
        return cls(**{**value, "proofs": [Proof.from_json(proof) for proof in value["proofs"]]})


@dataclass(frozen=True)
class ModelCheck:
    """passed: None where the original fails in the same way, so that nothing is said of the kernel."""

    name: str
    passed: bool | None
    detail: str
