"""Answers that compute nothing and would pass. A task that takes one cannot judge a kernel."""

from collections.abc import Iterable, Sequence

import torch

from . import accuracy, state, tensor_trees, variant_inputs
from .case_reference import CaseReference, Expected
from .expected_outputs import ExpectedOutput

UNSEEN = "anything as output {}, of which COMPARE's `valid` selects nothing,"
UNCHANGED = "MUTATES declares '{}', and leaving it as it was"


def found(reference: CaseReference, expected: Expected) -> list[str]:
    """The answers that would pass on a case: bland ones; inputs that may stay as they are although they are declared as
    outputs; outputs that nobody looks at; results with another seed. expected: on the case's inputs."""
    twins = reference.outputs(reference.another(reference.seed + 1))
    outputs = expected.outputs
    answers = [UNSEEN.format(at) for at, one in enumerate(outputs) if one.is_unseen()]
    answers += [UNCHANGED.format(one.changed.name) for one in outputs if may_stay(one, outputs)]
    if len(twins) == len(outputs):
        answers += bland(outputs, tensor_trees.input_tensors(expected.inputs), twins)
    return [*answers, *other_seeds(reference, expected)]


def everywhere(answers: Sequence[str], others: Iterable[CaseReference]) -> list[str]:
    """The trivial answers that would pass on the workload's other cases too. Where one passes by chance alone, on a few
    draws that were all rejected, say, the other seeds tell it from a kernel."""
    left = list(answers)
    for other in others:
        if left:
            also = found(other, other.expected(other.seed))
            left = [answer for answer in left if answer in also]
    return left


def may_stay(output: ExpectedOutput, outputs: list[ExpectedOutput]) -> bool:
    """Would an input pass as it was before the call, although it is declared to change? One of several tensors of an
    argument does not count where the reference leaves it alone and changes another."""
    if output.changed is None or not output.changed.before.numel() or not output.accepts(output.changed.before):
        return False
    beside = [one for one in outputs if one.changed and one.changed.name == output.changed.name]
    return not output.stays() or all(one.stays() for one in beside)


def bland(outputs: list[ExpectedOutput], inputs: list[torch.Tensor], twins: list[torch.Tensor]) -> list[str]:
    """Zeros, ones, an input, another call's result: those that would pass as each output. twins: the reference's
    results on other inputs."""
    if not any(torch.isfinite(accuracy.comparable(one.oracle)).any() for one in outputs):
        return []
    answers = {
        "an output of zeros": lambda tensor, _: torch.zeros_like(tensor),
        "an output of ones": lambda tensor, _: torch.ones_like(tensor),
        "an input": lambda tensor, _: like_of(tensor, inputs),
        "the result of another call": lambda tensor, twin: like_of(tensor, [twin]),
    }
    pairs = list(zip(outputs, twins, strict=True))
    return [name for name, of in answers.items() if all(one.accepts(of(one.baseline, twin)) for one, twin in pairs)]


def like_of(tensor: torch.Tensor, candidates: list[torch.Tensor]) -> torch.Tensor | None:
    """The first of the candidates with the tensor's shape and dtype."""
    return next((t for t in candidates if t.shape == tensor.shape and t.dtype == tensor.dtype), None)


def other_seeds(reference: CaseReference, expected: Expected) -> list[str]:
    """Results with another number in a parameter that holds a seed, on which they depend, but by less than the
    tolerance."""
    inputs, declared = expected.inputs, reference.loaded.declarations
    answers = []
    for at in declared.seeds() if not declared.samples else []:
        if at < len(inputs) and variant_inputs.may_be_seed(inputs[at]):
            other = [*inputs[:at], variant_inputs.reseeded(inputs[at]), *inputs[at + 1 :]]
            results = reference.outputs(reference.case.with_inputs(other))
            same = all(state.identical(one, own.baseline) for one, own in zip(results, expected.outputs, strict=False))
            if not same and all(expected.outputs[number].accepts(one) for number, one in enumerate(results)):
                answers.append(f"the result with another '{declared.name(at)}'")
    return answers
