"""The verdict on a kernel: the results of its cases, and the line that a reader sees first. Pure functions."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

from ..case_types import OutputCheck
from ..device.outcomes import Fault
from ..statuses import Status
from . import correctness
from .correctness import CaseResult

INTERPRETER = "cpu-interpreter"  # the device of a run without a GPU
MOST_NAMED = 5  # workloads and variants in one line
HARMLESS = (Status.OK, Status.DECLINED, Status.DOUBTFUL)  # of a case: a kernel with these is still right

# Seen on an H200: under ncu CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED, and the list of kernels is empty.
NO_KERNEL_NAMED = (
    "torch's profiler (CUPTI) named no kernel of a call; end what else profiles this GPU or runs round this program "
    "(nsys, ncu, DCGM), use a torch whose libcupti fits the driver, and run it again"
)
VALUE_FAULTS = (Status.WRONG_VALUES, Status.NONFINITE)
# Triton's interpreter holds bf16 as integers: its arithmetic and tl.dot on bf16 tiles are wrong, conversions are right.
INTERPRETED_BF16 = (
    "Triton's interpreter computes wrongly with bf16 tiles (tl.dot, arithmetic before .to(tl.float32)), so a right "
    "kernel may look wrong here: use a GPU, or check the logic with --kernel K --reference R --dtype fp16"
)

HINTS = {
    Status.COMPILE_ERROR: "read the compiler's message",
    Status.IMPORT_ERROR: "the file must load by itself, from packages that are installed beside torch and without "
    "modules of its own, and define ModelNew or kernel_function",
    Status.LAUNCH_ERROR: "the launch asks for more than the GPU has: smaller blocks, fewer stages or warps",
    Status.ILLEGAL_ACCESS: "a load or store is out of bounds: check masks and strides",
    Status.OOM: "memory is exhausted",
    Status.TIMEOUT: "the kernel hangs or is far too slow; --timeout raises the limit",
    Status.WRONG_VALUES: "compare masks, reduction order and accumulation dtype; in Triton an fp32 tl.dot uses tf32 "
    "unless input_precision='ieee'",
    Status.NONFINITE: "look for unwritten output, overflow, or -inf minus -inf",
    Status.INPUT_MUTATED: "write to a new tensor, not into inputs or parameters",
    Status.ALIASED_OUTPUT: "allocate the output in each call",
    Status.OUT_OF_BOUNDS: "a load or store is out of bounds: check masks and strides",
    Status.WRONG_STRIDE: "return the memory layout that the reference returns (where it does not matter, the reference "
    "can return x.contiguous())",
    Status.NOT_INTERPRETABLE: "this is a limit of the interpreter and no fault of the kernel: judge it on a GPU; "
    "--compile-only compiles it without one",
    Status.INVALID_REFERENCE: "the reference itself fails; mend reference.py, which must load without modules beside "
    "it",
    Status.INVALID_TASK: "no kernel can be judged on this task; change the reference, its inputs or the tolerance",
}


@dataclass(frozen=True)
class ProcessEnd:
    """How the candidate's process ended. signal: its name, None where the process ended by itself."""

    exit: int | None
    signal: str | None
    wall_s: float
    log_tail: str


@dataclass(frozen=True)
class SanitizerRun:
    """The report of compute-sanitizer's memcheck on one run. why_not: the reason why it did not run; then errors is
    None."""

    errors: int | str | None = None
    why_not: str | None = None

    def to_json(self) -> dict:
        if self.why_not is not None:
            return {"ran": False, "why": self.why_not}
        return {"ran": True, "tool": "memcheck", "errors": self.errors}

    @classmethod
    def from_json(cls, run: dict) -> "SanitizerRun":
        return cls(run.get("errors"), run.get("why"))


@dataclass(frozen=True)
class Verdict:
    """The result of a verification: its status, and a summary in one line.

    worst_rel_err: largest error over (|reference| + rms), None where nothing was compared. tolerance: the bound on it,
    or "by dtype". own_work: of correctness.own_work. sandbox: how the candidate was confined. process: None where no
    process of the candidate's ran. sanitizer: None when it was not requested. declared: what the reference declares
    (worker.declarations). left_out: variants on which the reference itself fails."""

    status: Status
    device: str
    summary: str
    worst_rel_err: float | None = None
    tolerance: float | str = "by dtype"
    own_work: str | None = None
    sandbox: str | None = None
    cases: tuple[CaseResult, ...] = ()
    process: ProcessEnd | None = None
    sanitizer: SanitizerRun | None = None
    declared: dict = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    def to_json(self) -> dict:
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        values = {name: value for name, value in values.items() if value or name not in ("declared", "left_out")}
        values["cases"] = [case.to_json() for case in self.cases]
        values["process"] = self.process and vars(self.process)
        sanitizer = values.pop("sanitizer")
        return values | ({"sanitizer": sanitizer.to_json()} if sanitizer else {})

    @classmethod
    def from_json(cls, verdict: dict) -> "Verdict":
        values = {**verdict, "status": Status(verdict["status"])}
        values["cases"] = tuple(map(CaseResult.from_json, verdict.get("cases", ())))
        values["left_out"] = tuple(verdict.get("left_out", ()))
        values["process"] = verdict.get("process") and ProcessEnd(**verdict["process"])
        values["sanitizer"] = verdict.get("sanitizer") and SanitizerRun.from_json(verdict["sanitizer"])
        return cls(**values)


def with_task(verdict: Verdict, declared: dict, left_out: list[str], fixed: dict[str, int]) -> Verdict:
    """The verdict, which names the task's declarations, the variants that the reference itself fails on, and of a right
    kernel the inputs that hold one whole number in all cases."""
    remarks = [verdict.summary]
    if fixed and verdict.status == Status.OK:
        held = some_of([f"'{name}' is always {number}" for name, number in fixed.items()])
        remarks.append(f"{held}: draw other whole numbers in get_inputs where they are possible")
    if left_out:
        count = f"{len(left_out)} variant{'s' * (len(left_out) > 1)}"
        remarks.append(f"left out {count} on which the reference itself fails: {some_of(left_out)}")
    if declared:
        named = (f"{key.upper()} {sizes(value) if key == 'sizes' else shown(value)}" for key, value in declared.items())
        remarks.append(f"the task declares {'; '.join(named)}")
    return replace(verdict, declared=declared, left_out=tuple(left_out), summary="; ".join(remarks))


def some_of(names: Sequence[str]) -> str:
    """ "a, b, c": an imported task may have a hundred workloads, and JSON has all of their names."""
    more = len(names) - MOST_NAMED
    return ", ".join(names) if more < 2 else f"{', '.join(names[:MOST_NAMED])} and {more} more"


def sizes(of_workloads: dict[str, dict[str, int]]) -> str:
    """The sizes of the first workload, for a summary."""
    name, own = next(iter(of_workloads.items()))
    others = len(of_workloads) - 1
    return f"{name}: {shown(own)}" + f", and those of {others} other workload{'s' * (others > 1)}" * bool(others)


def shown(value) -> str:
    """A declaration's value for a summary."""
    if isinstance(value, dict):
        return ", ".join(f"{key}: {shown(own)}" for key, own in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def bad_case(cases: list[CaseResult]) -> CaseResult | None:
    """The first case that makes the kernel wrong."""
    return next((case for case in cases if case.status not in HARMLESS), None)


def right(device: str, cases: list[CaseResult], own_work: str, varied: bool = True) -> str:
    """The summary of a kernel that is right. varied: other sizes were asked for."""
    names = some_of(list(dict.fromkeys(case.workload for case in cases)))
    resized = any(case.resized and case.status == Status.OK for case in cases)
    alone = f"OK, at its own sizes alone, on {device}" if varied and not resized else f"OK on {device}"
    declined = sum(case.status == Status.DECLINED for case in cases)
    count = f"{len(cases)} cases" + f" ({declined} of them declined)" * bool(declined)
    summary = f"{alone}: {count}, workloads {names}; worst error {worst_error(cases):.3g}"
    return "; ".join([summary, *remarks(cases), *unchecked_work(device, own_work)])


def unchecked_work(device: str, own_work: str) -> Iterator[str]:
    if own_work == correctness.NOT_CHECKED and device == INTERPRETER:
        yield "only a GPU shows whether its own kernels do the work"
    elif own_work == correctness.NOT_CHECKED:
        yield f"OWN WORK NOT CHECKED: {NO_KERNEL_NAMED}"


def worst_error(cases: list[CaseResult]) -> float | None:
    return max((case.observed.max_rel if case.observed else 0.0 for case in cases), default=None)


@dataclass(frozen=True)
class Failure:
    """A fault, its place, and its case; None when it belongs to no case. cases: all that ran."""

    fault: Fault
    device: str
    case: CaseResult | None = None
    cases: tuple[CaseResult, ...] = ()

    @property
    def wrong(self) -> list[CaseResult]:
        return [case for case in self.cases if case.status not in HARMLESS]

    @property
    def right(self) -> list[CaseResult]:
        return [case for case in self.cases if case.status == Status.OK]

    def summary(self) -> str:
        where = f" ({place(self.case)})" if self.case else ""
        advice = filter(None, (of_failure(self) for of_failure in ADVICE))
        return "; ".join([f"{self.fault.status}{where}: {self.fault.message.strip()}", *advice])


def variant_advice(failure: Failure) -> str | None:
    if failure.case and failure.case.variant:
        advice = "the reference takes this, so the kernel must be right on it too, or raise a ValueError"
        return f"{in_words(failure.case)}; {advice}"
    return None


LAYOUTS_IN_WORDS = {
    "transposed inputs": "the last two dimensions of each input swapped in memory, every second element of a vector",
    "outer dimensions swapped": "the two dimensions before the last swapped in memory",
    "padded inputs": "rows that lie farther apart in memory than they are long",
    "misaligned inputs": "inputs that begin one element off alignment",
}
ONE_ALONE = "the last two dimensions of that input swapped in memory"
VALUES_IN_WORDS = {
    "mixed signs": "half of the floating inputs' elements with the other sign",
    "64 times the inputs": "floating inputs 64 times as large",
    "nothing positive": "floating inputs without a positive element",
    "nothing negative": "floating inputs without a negative element",
    "varied constants": "other values in inputs that hold a single one",
    "another seed": "another seed",
    "other numbers": "other floating numbers among the arguments, three quarters as large",
    "unequal rows": "every second one of equal rows from other inputs",
    "varied zeros and ones": "random zeros and ones in inputs of whole numbers that are all 0 or all 1",
}


def values_of(case: CaseResult) -> str:
    """The name of a case's change of values; another text where it has none."""
    return (case.variant or "").split(", ")[0]


def in_words(case: CaseResult) -> str:
    """What the variant of a case is, for a reader who does not know its name."""
    shapes = " and ".join(str(list(shape)) for shape in case.shapes) or "no tensor"
    change = LAYOUTS_IN_WORDS.get(case.layout) or VALUES_IN_WORDS.get(values_of(case))
    if case.layout != "contiguous" and not change:
        change = ONE_ALONE
    return f"'{case.variant}' means inputs of {shapes}" + f", {change}" * bool(change)


# What all wrong cases may have and a right one has not, and where to look then. Variants of values and layouts are
# resized too, so sizes come last.
TELLING: tuple[tuple[Callable[[CaseResult], bool], str], ...] = (
    (
        lambda case: values_of(case) in VALUES_IN_WORDS,
        "it is right on the task's own values: look for what holds for those alone",
    ),
    (
        lambda case: case.layout != "contiguous",
        "it is right on contiguous inputs: find each element by its tensor's strides, or work on x.contiguous()",
    ),
    (
        lambda case: case.resized,
        "it is right at the task's own sizes: look at masks, and for what holds at those sizes alone",
    ),
)


def hint(failure: Failure) -> str | None:
    """Where to look: by what tells the wrong cases from the right ones, else by the status alone."""
    usual = HINTS.get(failure.fault.status)
    if failure.fault.status not in VALUE_FAULTS:
        return usual
    telling = (unchanged_input(failure), *difference(failure), single_workload(failure), whole_numbers(failure))
    judged = failure.case and failure.case.observed
    return next(filter(None, telling), None if judged and not wrong_outputs(failure) else usual)


def outputs_of(failure: Failure) -> list[OutputCheck]:
    """The outputs of the wrong case, as they were compared."""
    return failure.case.observed.outputs if failure.case and failure.case.observed else []


def wrong_outputs(failure: Failure) -> list[OutputCheck]:
    """The outputs of the wrong case that are wrong by themselves, not by a seed or a parameter."""
    return [one for one in outputs_of(failure) if one.disturbed or (one.errors and one.errors.any)]


def unchanged_input(failure: Failure) -> str | None:
    for output in outputs_of(failure):
        if output.unchanged and output.errors and output.errors.mismatches:
            return f"the call left '{output.input}' as it was, and MUTATES declares it as an output: write into it"
    return None


def whole_numbers(failure: Failure) -> str | None:
    """Of outputs that hold no fractions: no dtype and no order of additions makes those wrong."""
    wrong = wrong_outputs(failure)
    if wrong and all("int" in one.actual.dtype or "bool" in one.actual.dtype for one in wrong):
        return "look at masks, at ties and rounding, and at the first and last index"
    return None


def difference(failure: Failure) -> Iterator[str]:
    for has, text in TELLING:
        if failure.wrong and all(map(has, failure.wrong)) and not all(map(has, failure.right)):
            yield text


def single_workload(failure: Failure) -> str | None:
    """Of the task's own cases alone: most variants are of the first workload."""
    wrong, right = (
        list(dict.fromkeys(case.workload for case in cases if not case.variant))
        for cases in (failure.wrong, failure.right)
    )
    others = [name for name in right if name not in wrong]
    if len(wrong) != 1 or not others:
        return None
    shapes = " and ".join(str(list(shape)) for shape in failure.case.shapes)
    return f"it is right on {some_of(others)}: look for what {wrong[0]} alone has, inputs of {shapes}"


def slow_interpreter_advice(failure: Failure) -> str | None:
    if failure.device == INTERPRETER and failure.fault.status == Status.TIMEOUT:
        return (
            "the CPU interpreter takes seconds for thousands of elements: give it small inputs, in a reference of its "
            "own; it runs programs one after the other, so a kernel whose programs wait for each other needs a GPU"
        )
    return None


def bf16_advice(failure: Failure) -> str | None:
    in_bf16 = failure.case and failure.case.dtype == "bf16"
    if failure.device == INTERPRETER and in_bf16 and failure.fault.status in VALUE_FAULTS:
        return f"or: {INTERPRETED_BF16}"
    return None


def gradient_advice(failure: Failure) -> str | None:
    if "does not require grad" in failure.fault.message:
        return "forward runs without gradients; what needs them stands inside `with torch.enable_grad():`"
    return None


# In the order in which they stand in a summary.
ADVICE: tuple[Callable[[Failure], str | None], ...] = (
    variant_advice,
    hint,
    slow_interpreter_advice,
    bf16_advice,
    gradient_advice,
)


def remarks(cases: list[CaseResult]) -> Iterator[str]:
    """Remarks for a reader about a kernel that is right."""
    judged = [case for case in cases if case.status == Status.OK]
    served = {case.variant for case in judged}
    refused = dict.fromkeys(case.variant for case in cases if case.status == Status.DECLINED)
    if refused:
        yield "declines " + some_of([f"{variant}{' in part' * (variant in served)}" for variant in refused])
    for case in cases:
        if case.status == Status.DOUBTFUL:
            yield f"NOT RIGHT on {case.variant} ({case.message[:120]})"
    if any(case.observed.deterministic is False for case in judged):
        yield "two calls on the same contents differ"
    if any(case.variant for case in cases) and not any(case.resized for case in cases):
        yield "no size could be varied, so only the task's own were tried; keyword sizes of get_inputs allow others"
    outputs = (pair for case in judged for pair in enumerate(case.observed.outputs))
    yield from dict.fromkeys(f"output {at}: {one.few_draws}" for at, one in outputs if one.few_draws)
    if bare := sum(case.observed.fails_guarded for case in judged):
        yield f"{bare} cases without guard bands around the outputs, with which the kernel fails"


def place(case: CaseResult) -> str:
    """Which case it is, for a message."""
    variant = f", {case.variant}" if case.variant else ""
    return f"workload {case.workload}, seed {case.seed}{variant}"
