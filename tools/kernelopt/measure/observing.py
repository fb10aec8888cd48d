"""A task without a kernel: what one call of its reference returns, and which inputs it changes."""

from pathlib import Path

from ..case_types import Observation
from ..device.sandbox import Sandbox
from .cases import result_of_reference


def observe(
    sandbox: Sandbox, reference: Path, workload: str, timeout_s: float, shapes_alone: bool = False
) -> Observation:
    """What a call on the workload's inputs shows. Raises as `result_of_reference` does."""
    arguments = {"reference": str(reference.resolve()), "workload": workload, "shapes_alone": shapes_alone}
    return Observation.from_json(result_of_reference(sandbox.run("observe", arguments, timeout_s)))
