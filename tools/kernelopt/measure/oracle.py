"""The oracle: the reference, in processes that never load a candidate, judges the outputs that one stored."""

from dataclasses import dataclass, replace
from pathlib import Path

from ..case_types import OracleCheck, StoredCase
from ..device.outcomes import Fault
from ..device.sandbox import Sandbox
from ..session.subject import KernelUnderTest
from ..statuses import Status
from . import correctness
from .cases import ReferenceFailed, result_of_reference

# Bound on |error| / (|reference| + scale), by the dtype of the output. bf16 and fp16: two units in
# the last place (bf16 equals torch.testing's rtol); fp32: KernelBench's 1e-4, which a tf32 product fails;
# fp64: torch.testing; fp8: one unit of e4m3; integers and bool: equal.
TOLERANCES = {"fp64": 1e-7, "fp32": 1e-4, "fp16": 2e-3, "bf16": 1.6e-2, "fp8": 0.125, "exact": 0.0}


def tolerances(tolerance: float | None) -> dict[str, float]:
    """The bound on the error of an output, by its dtype; `tolerance` replaces all that are not exact."""
    if tolerance is None:
        return TOLERANCES
    return {name: tolerance if name != "exact" else 0.0 for name in TOLERANCES}


@dataclass(frozen=True)
class Oracle:
    """A reference, with the task's dtype and tolerance (None: by the dtype of each output). timeout_s: of each of its
    processes."""

    sandbox: Sandbox
    reference: Path
    dtype: str | None = None
    tolerance: float | None = None
    timeout_s: float = 300

    @classmethod
    def of(cls, sandbox: Sandbox, target: KernelUnderTest, timeout_s: float = 300) -> "Oracle":
        return cls(sandbox, target.reference, target.dtype, target.tolerance, timeout_s)

    def check(self, stored: list[StoredCase]) -> list[OracleCheck]:
        """The findings of the worker's `check` on each case. A variant on which the reference fails is `broken`, even
        if its process dies. Raises as `cases.result_of_reference` does."""
        if not stored:
            return []
        try:
            return self._check_at_once(stored)
        except ReferenceFailed as error:
            own, variants = ([one for one in stored if bool(one.variant) == wanted] for wanted in (False, True))
            if not variants or error.fault.status == Status.INVALID_TASK:
                raise
            if len(stored) == 1:
                return [OracleCheck(broken=error.fault.message)]
        half = len(stored) // 2
        parts = [own, variants] if own else [stored[:half], stored[half:]]
        by_case = {id(one): found for part in parts for one, found in zip(part, self.check(part), strict=True)}
        return [by_case[id(one)] for one in stored]

    def _check_at_once(self, stored: list[StoredCase]) -> list[OracleCheck]:
        """The same in one process, whose end is the end of all."""
        arguments = {
            "reference": str(self.reference.resolve()),
            "dtype": self.dtype,
            "cases": [case.to_json() for case in stored],
            "tolerances": tolerances(self.tolerance),
        }
        checked = result_of_reference(self.sandbox.run("check", arguments, self.timeout_s))
        return list(map(OracleCheck.from_json, checked["cases"]))

    def fault_of_timed(self, timed: list[StoredCase]) -> Fault | None:
        """The first fault in the outputs that timed calls left. A kernel may be right only when verified."""
        by_seed = [replace(one, calls=sorted(one.calls, key=lambda call: call.inputs_seed)) for one in timed]
        try:
            checks = self.check(by_seed)
        except ReferenceFailed as error:
            return error.fault
        for stored, checked in zip(by_seed, checks, strict=True):
            if fault := next(correctness.faults_of_outputs(checked), None):
                message = f"wrong when timed (workload {stored.workload}): {fault.message}"
                return Fault(fault.status, message)
        return None
