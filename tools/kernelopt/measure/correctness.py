"""Is a case right? Pure functions from the report of a candidate's process and the oracle's comparison to a status."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields

from ..case_types import CallCheck, OracleCheck, OutputCheck, OutputErrors, Variant
from ..device.outcomes import Fault
from ..statuses import Status
from .cases import Case, shown_seed

# A kernel may raise these errors on a shape or layout that the task does not list. They are loud, so they cannot pass
# as a result.
DECLINING = (
    *(Status.RUNTIME_ERROR, Status.COMPILE_ERROR, Status.LAUNCH_ERROR, Status.IMPORT_ERROR, Status.OOM),
    Status.NOT_INTERPRETABLE,
)
# The share of computing GPU time that kernels of torch and of NVIDIA's libraries may take, and the share of the inputs'
# elements that a final reduction of partial sums by torch may read without counting. Measured on an H200: honest
# kernels 0, a softmax or product left to torch 85 to 100 %.
LIBRARY_SHARE = 0.25
LAUNCH_US = 10.0  # a kernel this short may be nothing but its launch
# Do kernels of the candidate's own do the work? NOT_ASKED: the task lets libraries do it.
CHECKED, NOT_CHECKED, NOT_ASKED = "checked", "not checked", "not asked"
# The share of elements that may be wrong on values outside the task, where the result depends on a rounding, as in a
# saturated softmax.
MISMATCHES_PCT = 1.0
# Far from the task's own values a right kernel may overflow where PyTorch does not. This is reported, but does not
# refuse the kernel.
ONLY_REPORTED = ("64 times the inputs",)
# Where a few large elements set the scale, the others may be lost unnoticed. Kernels within the tolerance of a normally
# distributed result lose up to 2 % (those near 0), PyTorch in bf16 no more than that.
LOST_PCT = 5.0
LOST_FACTOR = 10

OF_CONTENTS = (Status.WRONG_VALUES, Status.NONFINITE, Status.WRONG_SHAPE)
OTHER_CONTENTS = (
    "'{}' has other contents in each process, though the seed is the same, so no result can be compared: draw with the "
    "global generators of torch, numpy or random, which the verifier seeds, and fill what torch.empty allocates"
)
MEMORY_LAYOUT = {"shape": Status.WRONG_SHAPE, "dtype": Status.WRONG_DTYPE, "stride": Status.WRONG_STRIDE}


@dataclass(frozen=True)
class CaseReport:
    """What the candidate's process reports of a case that ran. Nothing in it is a verdict.

    mutated: numbers of inputs. rearranged: other things lie in a list, dict or object among the inputs than before.
    changed: names of parameters and buffers. aliased: an output shares memory with one of
    another call. shares: numbers of inputs that an output shares memory with. changed_after_return: an output was
    written after its call. deterministic: all calls on the same contents agree, None where there was one. repeats:
    calls on the same contents for this alone; differing: those of them that left other results. device:
    where an output lies, if elsewhere. guarded: with guard bands.
    kernels: [{name, us, origin, …}] of a traced call.
    """

    mutated: list[int]
    changed: list[str]
    aliased: bool
    changed_after_return: bool
    out_of_bounds: bool
    deterministic: bool | None
    device: str | None
    guarded: bool
    fails_guarded: bool
    kernels: list[dict] | None
    shares: Sequence[int] = ()
    rearranged: bool = False
    repeats: int = 0
    differing: int = 0


REPORT_KEYS = {field.name for field in fields(CaseReport)}


@dataclass(frozen=True)
class KernelShare:
    """One GPU kernel of a traced call: its time, its share of the call's time, and its origin as worker/tracing.py
    names it."""

    name: str
    us: float
    share_pct: float
    origin: str

    def to_json(self) -> dict:
        return dict(vars(self))


@dataclass(frozen=True)
class Observed:
    """The observations on a case that ran. max_rel: largest error over (|reference| + scale); baseline_max_rel:
    PyTorch's own.

    oracle: its precision. kernels: of a traced call. outputs: as the oracle compared them, of all calls.
    """

    max_rel: float
    baseline_max_rel: float
    deterministic: bool | None
    guarded: bool
    fails_guarded: bool
    oracle: str | None
    kernels: list[KernelShare] | None
    outputs: list[OutputCheck]
    repeats: int = 0
    differing: int = 0

    def to_json(self) -> dict:
        kernels = self.kernels and [kernel.to_json() for kernel in self.kernels]
        return {**vars(self), "kernels": kernels, "outputs": [output.to_json() for output in self.outputs]}

    @classmethod
    def from_json(cls, values: dict) -> "Observed":
        kernels = values["kernels"] and [KernelShare(**kernel) for kernel in values["kernels"]]
        outputs = list(map(OutputCheck.from_json, values["outputs"]))
        return cls(**{**values, "kernels": kernels, "outputs": outputs})


@dataclass(frozen=True)
class CaseResult:
    """The verdict on one case. seed: "secret" for one that stays unknown. variant: its name. resized: of other sizes.
    shapes: of its inputs. layout: of them, in a variant.

    observed: None when the kernel raised.
    """

    workload: str
    seed: int | str
    dtype: str
    variant: str | None
    resized: bool
    status: Status
    message: str
    observed: Observed | None = None
    shapes: list[list[int]] = field(default_factory=list)
    layout: str = "contiguous"

    def to_json(self) -> dict:
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "observed"}
        return values | (self.observed.to_json() if self.observed else {})

    @classmethod
    def from_json(cls, result: dict) -> "CaseResult":
        names = [field.name for field in fields(Observed)]
        known = {name: result[name] for name in names if name in result}
        observed = Observed.from_json(known) if "outputs" in result else None
        values = {name: value for name, value in result.items() if name not in names}
        return cls(**{**values, "status": Status(values["status"])}, observed=observed)


def judge(case: Case, report: CaseReport | Fault, check: OracleCheck | None, libraries: bool) -> CaseResult:
    """The result of one case. report: a fault where the kernel raised; then `check` is None.

    libraries: the task lets torch and vendor libraries do the work.
    """
    if isinstance(report, Fault):
        return result_of(case, of_raised(report, case.variant))
    fault = next(faults(case, report, check, libraries), None)
    if fault and check.strange and fault.status in OF_CONTENTS:
        fault = Fault(Status.INVALID_TASK, OTHER_CONTENTS.format(check.strange[0]))
    elif fault and report.differing and fault.status in OF_CONTENTS:
        some = f"{report.differing} of {report.repeats} calls on the same contents left another result"
        fault = Fault(fault.status, f"{fault.message}; {some}: a race?")
    if fault and case.variant and case.variant.values in ONLY_REPORTED:
        fault = Fault(Status.DOUBTFUL, f"{fault.status}: {fault.message}")
    return result_of(case, fault, observed(report, check))


def result_of(case: Case, fault: Fault | None, observed: Observed | None = None) -> CaseResult:
    status, message = (fault.status, fault.message) if fault else (Status.OK, "")
    name, resized = (case.variant.name, case.variant.resized) if case.variant else (None, False)
    layout = case.variant.layout if case.variant else "contiguous"
    seed = shown_seed(case.seed)
    return CaseResult(case.workload, seed, case.dtype, name, resized, status, message, observed, case.shapes, layout)


def of_raised(fault: Fault, variant: Variant | None) -> Fault:
    """The fault of a kernel that raised: DECLINED where it declines the variant."""
    return Fault(Status.DECLINED, fault.message[:200]) if is_declined(fault, variant) else fault


def is_declined(fault: Fault, variant: Variant | None) -> bool:
    """A kernel that raises on a variant declines it, if the error is loud.

    On misaligned inputs a misaligned access counts as that: the GPU itself reports it."""
    if variant is None:
        return False
    misaligned = variant.layout == "misaligned inputs" and "misaligned" in fault.message
    return fault.status in DECLINING or (misaligned and fault.status == Status.ILLEGAL_ACCESS)


def observed(report: CaseReport, check: OracleCheck) -> Observed:
    errors = [output.errors for output in check.outputs if output.errors]
    return Observed(
        max_rel=max((one.max_rel for one in errors), default=0.0),
        baseline_max_rel=max((one.baseline_max_rel for one in errors), default=0.0),
        deterministic=report.deterministic,
        guarded=report.guarded,
        fails_guarded=report.fails_guarded,
        oracle=check.oracle,
        kernels=report.kernels and shares(report.kernels),
        outputs=check.outputs,
        repeats=report.repeats,
        differing=report.differing,
    )


def faults(case: Case, report: CaseReport, check: OracleCheck, libraries: bool) -> Iterator[Fault]:
    """The faults of a case that ran. The first fault is its verdict."""
    yield from faults_of_process(case, report, check)
    yield from faults_of_outputs(check, case.variant)
    if report.aliased or set(report.shares) - set(case.mutates):
        yield Fault(Status.ALIASED_OUTPUT, "an output shares memory with an input or with the output of another call")
    if report.kernels and not libraries:
        yield from faults_of_kernels(report.kernels, sum(math.prod(shape) for shape in case.shapes))


def faults_of_process(case: Case, report: CaseReport, check: OracleCheck) -> Iterator[Fault]:
    """Faults in the kernel's side effects, but for those on inputs that the task declares as outputs."""
    if report.device:
        yield Fault(Status.WRONG_DEVICE, f"an output is on {report.device}")
    undeclared = [number for number in report.mutated if number not in case.mutates]
    if undeclared:  # before the values, because it makes a second call wrong
        name = case.names[undeclared[0]] if case.names else ""
        shown = undeclared[0] if not name or name.isdigit() else f"'{name}'"
        yield Fault(Status.INPUT_MUTATED, f"input {shown} was changed")
    if report.rearranged:
        message = "a list, dict or object among the inputs holds other things after the call; write into its tensors"
        yield Fault(Status.INPUT_MUTATED, message)
    if check.changes is not None:
        for name in report.changed:
            if name not in check.changes:
                message = f"a call changed '{name}' of the model's state, which the reference leaves as it is"
                yield Fault(Status.INPUT_MUTATED, message)
    if report.changed_after_return and not report.aliased:
        message = "an output changed after the call had returned: a thread or a stream was not waited for"
        yield Fault(Status.CHEAT_SUSPECT, message)
    if case.repeatable and report.deterministic is False:
        yield Fault(Status.WRONG_VALUES, "the same seed and inputs gave another result")
    if report.out_of_bounds:
        yield Fault(Status.OUT_OF_BOUNDS, "memory beside an input or an output was written")


def faults_of_kernels(kernels: list[dict], elements: int) -> Iterator[Fault]:
    """The origin of the GPU kernels that a call launched. Library kernels may do little of the work.

    elements: of the inputs. A short last reduction of partial results by torch, over at most a quarter as many, does
    not count: on small inputs it takes as long as the kernel before it, since a launch takes its time.
    """
    kernels = [kernel for kernel in kernels if not is_last_reduction(kernel, elements)]
    times = {origin: sum(k["us"] for k in kernels if k["origin"] == origin) for origin in ("own", "library")}
    computing = sum(times.values())
    if computing == 0:
        yield Fault(Status.CHEAT_SUSPECT, "no kernel of its own ran, torch moved the data")
    elif times["library"] > LIBRARY_SHARE * computing:
        name = max((k for k in kernels if k["origin"] == "library"), key=lambda k: k["us"])["name"]
        share = times["library"] / computing
        message = f"torch or a vendor library does {share:.0%} of the computing ({name[:80]})"
        yield Fault(Status.CHEAT_SUSPECT, message)


def is_last_reduction(kernel: dict, elements: int) -> bool:
    reduced, short = kernel.get("reduces"), kernel["us"] <= LAUNCH_US
    return kernel["origin"] == "library" and short and isinstance(reduced, int) and reduced <= LIBRARY_SHARE * elements


def own_work(results: list[CaseResult], libraries: bool) -> str:
    """CHECKED, NOT_CHECKED or NOT_ASKED: was the origin of the working kernels checked?

    Each traced call that returned anything launched a kernel; when the profiler names none, its work is unknown.
    """
    if libraries:
        return NOT_ASKED
    seen = [result.observed for result in results if result.observed and result.observed.kernels is not None]
    traced = [one.kernels for one in seen if any(map(may_hold_elements, one.outputs))]
    return CHECKED if traced and all(traced) else NOT_CHECKED


def may_hold_elements(output: OutputCheck) -> bool:
    return output.errors is None or output.errors.elements > 0


def shares(kernels: list[dict]) -> list[KernelShare]:
    """The share of each kernel of a call. kernels: {name, us, origin} each, from the candidate's process."""
    total = sum(kernel["us"] for kernel in kernels)
    return [
        KernelShare(
            name=kernel["name"],
            us=round(kernel["us"], 2),
            share_pct=round(100 * kernel["us"] / total, 1) if total else 0.0,
            origin=kernel["origin"],
        )
        for kernel in kernels
    ]


def faults_of_outputs(check: OracleCheck, variant: Variant | None = None) -> Iterator[Fault]:
    """The faults in the outputs of one case, over all its calls."""
    if check.unreadable is not None:
        yield Fault(Status.RUNTIME_ERROR, f"the stored outputs cannot be read: {check.unreadable}")
    if check.random:
        yield Fault(Status.INVALID_TASK, "the reference gives different results for the same inputs")
    if check.trivial_answers:
        yield Fault(Status.INVALID_TASK, f"{check.trivial_answers[0]} is within the tolerance")
    for call in check.calls:
        yield from faults_of_call(call, check, variant)
    for message in check.wrong_draws:
        yield Fault(Status.WRONG_VALUES, message)
    if check.wrong_state:
        message = (
            f"the reference's forward changes '{check.wrong_state[0]}', and the kernel leaves other values in it "
            "(where they do not matter, the reference's Model can call self.eval())"
        )
        yield Fault(Status.WRONG_VALUES, message)


def faults_of_call(call: CallCheck, check: OracleCheck, variant: Variant | None) -> Iterator[Fault]:
    if call.count != check.expected_count:
        yield Fault(Status.WRONG_SHAPE, f"{call.count} outputs, expected {check.expected_count}")
    if call.structure not in (None, check.expected_structure):
        shown = f"the result is {call.structure[:200]}, expected {check.expected_structure[:200]}"
        yield Fault(Status.WRONG_SHAPE, shown)
    for number, output in enumerate(call.outputs):
        yield from faults_of_output(output, number, variant)
    filled = [output.errors for output in call.outputs if output.errors and output.errors.elements]
    if variant is None and filled and not any(errors.finite for errors in filled):
        message = "the reference's outputs hold no finite value, so there is nothing to compare"
        yield Fault(Status.INVALID_TASK, message)


def faults_of_output(output: OutputCheck, number: int, variant: Variant | None) -> Iterator[Fault]:
    """The faults of one output tensor, which a variant may have in other strides."""
    name = f"input '{output.input}' after the call" if output.input else f"output {number}"
    for part in ("shape", "dtype") if variant or output.input else MEMORY_LAYOUT:
        actual, expected = getattr(output.actual, part), getattr(output.expected, part)
        if actual != expected:
            yield Fault(MEMORY_LAYOUT[part], f"{name} has {part} {actual}, expected {expected}")
    if output.errors:
        yield from faults_of_values(name, output, output.errors, variant)
    if output.disturbed:
        message = f"{name}: {output.disturbed} elements differ that the reference leaves as they were"
        yield Fault(Status.WRONG_VALUES, message)


def faults_of_values(name: str, output: OutputCheck, errors: OutputErrors, variant: Variant | None) -> Iterator[Fault]:
    """The faults in the values of an output. On a variant any value will do where the reference has no finite one, and
    on other values than the task's a few elements may be off."""
    # A variance of one element, or a row with an empty mask after the cut, is not part of any task. An infinity in what
    # get_inputs makes is: the log-sum-exp of an empty request.
    lenient = variant and (output.usually_finite or not errors.finite)
    counted = errors.nonfinite if not lenient else errors.spurious + (errors.infinite if variant.of_task else 0)
    if counted:
        fault = "are NaN or Inf where they must not be" if errors.spurious else "differ from the reference's NaN or Inf"
        yield Fault(Status.NONFINITE, f"{name}: {counted} elements {fault}")
    if errors.refused:
        yield Fault(Status.WRONG_VALUES, f"{name}: {errors.refused}")
    share_pct = 100 * errors.mismatches / max(errors.elements, 1)
    if share_pct > (MISMATCHES_PCT if variant and variant.values else 0):
        message = (
            f"{name}: {errors.mismatches} elements ({share_pct:.3g} %) are off, "
            f"error up to {errors.max_rel:.3g} of (|reference| + scale), first at index {errors.first_bad_index}"
        )
        yield Fault(Status.WRONG_VALUES, message)
    if errors.lost_pct > max(LOST_PCT, LOST_FACTOR * errors.baseline_lost_pct):
        message = (
            f"{name}: {errors.lost_pct:.3g} % of the elements that are not 0 miss by more than half of "
            "themselves, small as they are beside the largest"
        )
        yield Fault(Status.WRONG_VALUES, message)
