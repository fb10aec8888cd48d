"""A task without a kernel: what one call of its reference returns, and which inputs it changes."""

from dataclasses import dataclass
from pathlib import Path

from ..device.sandbox import Sandbox
from .cases import result_of_reference

VALUES = "values"  # what a call ran on, as worker.observing has it


@dataclass(frozen=True)
class Observation:
    """As worker.observing.Observation."""

    ran: str
    outputs: list[str]
    rms: list[float | None]
    keys: list[str] | None
    arguments: int
    changed: dict[int, list[str]]
    bytes: int
    declared: dict

    @classmethod
    def from_json(cls, fields: dict) -> "Observation":
        return cls(**{**fields, "changed": {int(at): dtypes for at, dtypes in fields["changed"].items()}})


def observe(
    sandbox: Sandbox, reference: Path, workload: str, timeout_s: float, shapes_alone: bool = False
) -> Observation:
    """What a call on the workload's inputs shows. Raises as `result_of_reference` does."""
    arguments = {"reference": str(reference.resolve()), "workload": workload, "shapes_alone": shapes_alone}
    return Observation.from_json(result_of_reference(sandbox.run("observe", arguments, timeout_s)))
