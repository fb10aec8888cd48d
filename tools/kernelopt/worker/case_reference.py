"""The reference on one case: what it gives on the inputs of a seed, in the task's own dtype and in the highest
precision."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..case_types import StoredCase
from . import accuracy, problem, reference_runs, sampling, state, tensor_trees, variant_inputs
from .case_maker import CaseMaker
from .contract import InvalidDeclaration
from .expected_outputs import ChangedInput, ExpectedOutput, bound_of, roughly_on
from .faults import OracleError, blaming

# Of the rms of an output at the task's own sizes: the least scale at other sizes. There a loss over one class, or the
# gradient of a norm over two columns, is 0 but for rounding.
LEAST_SCALE = 0.01
FEW_SUMS = 4096  # elements: so small an output may consist of one sum and its multiples
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
        least_rms, changed = self._least_rms(len(oracle)), [None] * returned + self._changed_inputs(case.inputs)
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

    def _least_rms(self, count: int) -> list[float]:
        """The least scale of so many outputs at other sizes than the task's own, a share of their rms there; else 0."""
        if not self._is_resized():
            return [0.0] * count
        usual = [*self.usual_rms, *[0.0] * count][:count]  # at other sizes there may be more outputs
        return [LEAST_SCALE * rms for rms in usual]

    def _is_resized(self) -> bool:
        return bool(self.variant and self.variant.resized)

    def typical_rms(self, seed: int, outputs: Sequence[torch.Tensor]) -> list[float]:
        """The rms of each output over other contents of its sizes, where these are not the task's own and the output is
        small; else 0. One sum of a few may lie near 0, which is no scale for its error."""
        none = [0.0] * len(outputs)
        if not self._is_resized() or all(tensor.numel() > FEW_SUMS for tensor in outputs):
            return none
        squares: list[list[float]] = []
        for other in range(1, variant_inputs.OTHERS + 1):
            try:
                case = self.maker.case(self.workload, seed, self.variant, other)
                results = reference_runs.outputs(self.loaded, case, self.device)
            except Exception:  # the reference may refuse contents that we made
                continue
            squares.append([accuracy.root_mean_square(accuracy.comparable(one)) ** 2 for one in results])
        if any(len(each) != len(outputs) for each in squares):
            return none
        means = [math.sqrt(sum(each) / len(each)) for each in zip(*squares, strict=True)] or none
        return [rms if tensor.numel() <= FEW_SUMS else 0.0 for rms, tensor in zip(means, outputs, strict=True)]

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
