"""What a reader of a wrong verdict sees first: the fault, its case in words, and where to look. Pure functions."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..case_types import OutputCheck
from ..device.outcomes import Fault
from ..statuses import Status
from .correctness import CaseResult
from .verdict import HARMLESS, INTERPRETER, place, some_of

FEW_ROUNDINGS = 0.001  # of the elements: quantised numbers that fall on the other side of a step
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
class Failure:
    """A fault, its place, and its case; None when it belongs to no case. cases: all that ran. in_triton: does the
    kernel's file name Triton?"""

    fault: Fault
    device: str
    case: CaseResult | None = None
    cases: tuple[CaseResult, ...] = ()
    in_triton: bool = True

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
    if not wrong or not all("int" in one.actual.dtype or "bool" in one.actual.dtype for one in wrong):
        return None
    if all(is_rounded_otherwise(one) for one in wrong):
        return (
            "whole numbers must be equal, and nearly all are: if these are roundings that may fall either way, the "
            "task says so with COMPARE (docs/declarations.md)"
        )
    return "look at masks, at ties and rounding, and at the first and last index"


def is_rounded_otherwise(output: OutputCheck) -> bool:
    """Are nearly all elements equal, of a dtype that holds quantised numbers?"""
    errors = output.errors
    narrow = output.actual.dtype.removeprefix("torch.") in ("int8", "uint8")
    return narrow and errors is not None and 0 < errors.mismatches <= FEW_ROUNDINGS * errors.elements


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
    """Of wrong numbers in floating outputs. NaN alone is rather what no program wrote."""
    interpreted = failure.device == INTERPRETER and failure.in_triton
    in_bf16 = failure.case and failure.case.dtype == "bf16" and failure.fault.status == Status.WRONG_VALUES
    floating = any("float" in one.actual.dtype for one in wrong_outputs(failure))
    return f"or: {INTERPRETED_BF16}" if interpreted and in_bf16 and floating else None


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
