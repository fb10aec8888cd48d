"""The reference on one case: what it gives on the inputs of a seed, in the task's own dtype and in the highest
precision."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..case_types import StoredCase
from . import accuracy, problem, reference_runs, sampling, state, tensor_trees
from .case_maker import CaseMaker
from .contract import InvalidDeclaration
from .expected_outputs import ChangedInput, ExpectedOutput, bound_of, roughly_on
from .faults import OracleError, blaming

# Of the rms of an output at the task's own sizes: the least scale at other sizes. There a loss over one class, or the
# gradient of a norm over two columns, is 0 but for rounding.
LEAST_SCALE = 0.01
PLAIN_TYPES = (bool, int, float, str, type(None))  # whose text is their value

Key = tuple[str, int, str]  # of results: workload, seed of the inputs, arguments of the constructor


@dataclass(frozen=True)
class Expected:
    """The reference's results on one seed's inputs.

    outputs: what forward returns and then the inputs that it is declared to change. returned: how many of them forward
    returns; structure: of these. precision: of the oracle. inputs: the arguments, as they were before the call. state:
    parameters and buffers that the reference changes. random, trivial_answers: found for the first call alone."""

    outputs: list[ExpectedOutput]
    returned: int
    structure: str
    precision: str
    inputs: list
    state: dict[str, torch.Tensor]
    random: bool = False
    trivial_answers: Sequence[str] = ()


class CaseReference:
    """The reference with the parameters of a case, called on the case's inputs and on those of other seeds."""

    def __init__(self, maker: CaseMaker, of: StoredCase, tolerances: dict[str, float], usual_rms: Sequence[float] = ()):
        """usual_rms: of each output on the task's own inputs, as far as it is known; a variant needs it."""
        self.maker, self.loaded, self.device = maker, maker.loaded, maker.device
        self.workload, self.seed, self.variant = of.workload, of.seed, of.variant
        self.tolerances, self.usual_rms = tolerances, usual_rms
        self.case = self.another(of.seed)

    def another(self, seed: int) -> problem.Case:
        """The case of another seed, with parameters of its own."""
        with blaming(OracleError):
            return self.maker.case(self.workload, seed, self.variant)

    def on_inputs_of(self, seed: int) -> problem.Case:
        """This case, with the inputs of a seed."""
        return self.case if seed == self.seed else self.case.with_inputs(self.another(seed).inputs)

    def outputs(self, case: problem.Case, draw: int = 0) -> list[torch.Tensor]:
        """See reference_runs.outputs."""
        with blaming(OracleError):
            return reference_runs.outputs(self.loaded, case, self.device, draw)

    def shares_results(self) -> bool:
        """Does a case of another seed have the same results on the same inputs? Not with parameters of its own."""
        plain = all(type(one) in PLAIN_TYPES for one in tensor_trees.leaves(self.case.init))
        return plain and not self.variant and not self.case.state

    def key(self, seed: int) -> Key:
        """Of the results on a seed's inputs."""
        return self.workload, seed, repr(self.case.init) if self.shares_results() else ""

    def expected(self, seed: int, own: bool = False, results: Expected | None = None) -> Expected:
        """The results on a seed's inputs. own: the first call on the task's own inputs, which tells more: the state
        that the reference changes, and whether it is random. results: the former, where they are known."""
        expected = results or self._results(seed, own)
        self._check_probabilities(expected, own)
        return replace(expected, random=self._is_random(seed, expected)) if own else expected

    def _results(self, seed: int, own: bool) -> Expected:
        case, followed = self.on_inputs_of(seed), self.workload in self.loaded.computed_in
        with blaming(OracleError):
            ran = reference_runs.run(self.loaded, case, self.device, follow=not followed)
            computed_in = self._computed_in(ran)
            left = state.changed(ran.model, state.watched(case.state)) if own else {}
            oracle, precision = problem.oracle_outputs(
                self.loaded, case, self.device, ran.outputs, unrounded=any(computed_in)
            )
        baseline, returned, structure = ran.outputs, ran.returned, ran.structure
        del ran  # and the model in it, before the reference runs again
        least_rms, changed = self._least_rms(seed, oracle), [None] * returned + self._changed_inputs(case.inputs)
        declared, roughly = self.loaded.declarations, roughly_on(self.variant)
        outputs = [
            ExpectedOutput(
                baseline=tensor,
                oracle=oracle[at],
                bound=bound_of(tensor.dtype, coarser, self.tolerances, roughly),
                inputs=case.inputs,
                least_rms=least_rms[at],
                roughly=roughly,
                declared=declared.comparison(case.inputs, returned, at),
                sampled=declared.samples.get(at) if at < returned else None,
                changed=changed_input,
            )
            for at, (tensor, coarser, changed_input) in enumerate(zip(baseline, computed_in, changed, strict=True))
        ]
        return Expected(outputs, returned, structure, precision, case.inputs, left)

    def _computed_in(self, ran: reference_runs.ReferenceRun) -> list[str | None]:
        """ReferenceRun.computed_in of the workload's first call, which alone is followed; at other sizes there may be
        more outputs."""
        known = self.loaded.computed_in.setdefault(self.workload, ran.computed_in)[: len(ran.outputs)]
        return known + [None] * (len(ran.outputs) - len(known))

    def _changed_inputs(self, inputs: list) -> list[ChangedInput]:
        """The inputs that the reference is declared to change, before the call."""
        declared, tensors = self.loaded.declarations, tensor_trees.input_tensors(inputs)
        numbers = declared.mutated_tensors(inputs)
        return [ChangedInput(number, declared.name_of_tensor(inputs, number), tensors[number]) for number in numbers]

    def _least_rms(self, seed: int, oracle: list[torch.Tensor]) -> list[float]:
        """The least scale of each output at other sizes than the task's own: a share of its rms there, and, of few
        elements, where a sum near 0 is no scale, the rms on other contents of the same sizes; else 0."""
        if not (self.variant and self.variant.resized):
            return [0.0] * len(oracle)
        usual = [*self.usual_rms, *[0.0] * len(oracle)][: len(oracle)]  # at other sizes there may be more outputs
        least = [LEAST_SCALE * rms for rms in usual]
        if not any(tensor.numel() < accuracy.FEW for tensor in oracle):
            return least
        try:
            other = self.maker.case(self.workload, seed, self.variant, from_the_end=True)
            results = list(map(accuracy.comparable, reference_runs.outputs(self.loaded, other, self.device)))
        except Exception:  # the reference may refuse contents that we made
            return least
        others = map(accuracy.root_mean_square, results)
        few = (tensor.numel() < accuracy.FEW for tensor in oracle)
        return [max(own, rms) if alone else own for own, rms, alone in zip(least, others, few, strict=True)]

    def _check_probabilities(self, expected: Expected, own: bool) -> None:
        """Raises where SAMPLES names an output that is none, or that holds no probabilities. own: a fault of the task,
        else one of the reference on this case."""
        for at, sampled in self.loaded.declarations.samples.items():
            if at >= expected.returned:
                raise InvalidDeclaration(f"SAMPLES names output {at}, and forward returns {expected.returned}")
            if own:
                sampling.check_probabilities(expected.outputs[at].oracle, sampled)
            elif not sampling.are_distributions(expected.outputs[at].oracle):
                raise OracleError("the reference returns no probabilities")

    def _is_random(self, seed: int, expected: Expected) -> bool:
        """Does the reference give different results on the same inputs?"""
        again = self.outputs(self.on_inputs_of(seed), draw=1)
        return not all(expected.outputs[at].is_repeated_by(result) for at, result in enumerate(again))
