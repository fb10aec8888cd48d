"""The job that judges outputs: the reference runs here, and a candidate is never loaded."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from ..case_types import CallCheck, OracleCheck, OutputCheck, OutputErrors, StoredCall, StoredCase
from ..statuses import Status
from . import accuracy, comparisons, problem, reference_runs, sampling, state, tensor_trees, variant_inputs
from .case_maker import CaseMaker
from .context import Context, load_reference
from .contract import InvalidDeclaration
from .faults import OracleError, blaming, describe

# Bound on variant_inputs.VALUES, which the task does not have: a right kernel may be far less exact than PyTorch there.
ROUGHLY = 0.25
# Of the rms of an output at the task's own sizes: the least scale at other sizes. There a loss over one class, or the
# gradient of a norm over two columns, is 0 but for rounding.
LEAST_SCALE = 0.01
PLAIN_TYPES = (bool, int, float, str, type(None))  # whose text is their value


@dataclass(frozen=True)
class CheckAnswer:
    """One for each case, in their order."""

    cases: list[OracleCheck]


def check(
    context: Context, reference: str, dtype: str | None, cases: list[dict], tolerances: dict[str, float]
) -> CheckAnswer:
    """Compare stored outputs with the reference, which runs only here and only now.

    cases: of each a StoredCase's JSON. Inputs are made again from the seeds, because the files that the candidate read
    are not trusted.
    """
    loaded = load_reference(reference)
    maker = CaseMaker(loaded, dtype, context.device)
    usual: dict[str, list[Usual]] = {}
    known: dict[Key, Expected] = {}
    stored = list(map(StoredCase.from_json, cases))
    answers = [checked(context, loaded, maker, case, tolerances, usual, known) for case in stored]
    for at, case in enumerate(stored):
        if answers[at].trivial_answers:
            own = (one for one in stored if one.workload == case.workload and not one.variant)
            others = (Check(context, loaded, maker, one, tolerances, {}) for one in own if one is not case)
            answers[at] = replace(answers[at], trivial_answers=everywhere(answers[at].trivial_answers, others))
    return CheckAnswer(answers)


def everywhere(answers: Sequence[str], others: Iterable["Check"]) -> list[str]:
    """The trivial answers that would pass on the workload's other cases too. Where one passes by chance alone, on a few
    draws that were all rejected, say, the other seeds tell it from a kernel."""
    left = list(answers)
    for other in others:
        if left:
            left = [answer for answer in left if answer in other.trivial_answers()]
    return left


def checked(
    context: Context,
    loaded: problem.Reference,
    maker: CaseMaker,
    stored: StoredCase,
    tolerances: dict,
    usual: dict,
    known: "dict[Key, Expected]",
) -> OracleCheck:
    """`Check.result`; `broken` for a variant on which the reference fails, or needs too much memory, and leaves the
    device as it was. known: the results of the former case's last call, which are this case's own where the task has
    no parameters."""
    if stored.variant or (stored.workload, stored.seed) not in [key[:2] for key in known]:
        known.clear()  # before more is made
    try:
        return Check(context, loaded, maker, stored, tolerances, usual).result(known)
    except Exception as error:
        found = describe(error)
        if not stored.variant or found["status"] not in (Status.INVALID_REFERENCE, Status.OOM):
            raise
        context.synchronize()  # it fails where the device is lost, and then the process ends
        return OracleCheck(broken=found["message"])


@dataclass(frozen=True)
class StoredOutputs:
    """What a call left: its outputs, their tensor_trees.structure, the inputs that it changed, by number, and the
    parameters and buffers that it changed, None where these were not recorded."""

    outputs: list[torch.Tensor]
    structure: str | None
    inputs: dict[int, torch.Tensor]
    state: dict[str, torch.Tensor] | None

    @classmethod
    def load(cls, path: str, device: str) -> "StoredOutputs":
        stored = tensor_trees.load(path)
        outputs = [tensor.to(device) for tensor in stored["outputs"]]
        inputs = {int(number): tensor.to(device) for number, tensor in (stored["inputs"] or {}).items()}
        return cls(outputs, stored["structure"], inputs, stored["state"])


@dataclass(frozen=True)
class Usual:
    """An output on the task's own inputs: did it hold no NaN and no infinity, and its rms."""

    finite: bool = True
    rms: float = 0.0

    def and_also(self, errors: OutputErrors | None) -> "Usual":
        """The same output on other inputs of the task as well."""
        if errors is None:
            return self
        return Usual(self.finite and errors.finite == errors.elements, max(self.rms, errors.rms))


@dataclass
class Expected:
    """The reference's results on one seed's inputs: what forward returns and then the inputs that it is declared to
    change, in the task's own dtype and (oracle) in the highest precision.

    computed_in: see reference_runs.ReferenceRun. returned: how many of them forward returns. inputs, before: the
    arguments, and the tensors to be changed, as they were before the call. state: parameters and buffers that the
    reference changes. least_rms: see Check. random, trivial_answers: found for the first call alone."""

    baseline: list[torch.Tensor]
    computed_in: list[str | None]
    oracle: list[torch.Tensor]
    precision: str
    structure: str
    returned: int
    inputs: list
    before: list[torch.Tensor]
    state: dict[str, torch.Tensor]
    least_rms: list[float] = field(default_factory=list)
    random: bool = False
    trivial_answers: list[str] = field(default_factory=list)


Key = tuple[str, int, str]  # of results: workload, seed of the inputs, arguments of the constructor


@dataclass(frozen=True)
class Draws:
    """What a case's draws over secret seeds show. wrong: why those of an output do not follow the reference's
    probabilities. too_few: by output on the task's own inputs, what its draws are too few to tell."""

    wrong: list[str]
    too_few: dict[int, str | None]


class Check:
    """The judgement of one case: its parameters, and for each of its calls the oracle on that call's inputs."""

    def __init__(
        self,
        context: Context,
        loaded: problem.Reference,
        maker: CaseMaker,
        of: StoredCase,
        tolerances: dict[str, float],
        usual: dict[str, list[Usual]],
    ):
        """usual: by workload, each output on the task's own inputs, which cases leave for the variants after them."""
        self.device, self.loaded, self.maker = context.device, loaded, maker
        self.of, self.tolerances, self.usual = of, tolerances, usual
        self.variant = of.variant
        self.case = self._case(of.seed)

    def _case(self, seed: int) -> problem.Case:
        with blaming(OracleError):
            return self.maker.case(self.of.workload, seed, self.variant)

    def key(self, seed: int) -> Key:
        """Of the results on a seed's inputs."""
        return self.of.workload, seed, repr(self.case.init) if self._shares_results() else ""

    def _shares_results(self) -> bool:
        """Does a case of another seed have the same results on the same inputs? Not with parameters of its own."""
        plain = all(type(one) in PLAIN_TYPES for one in tensor_trees.leaves(self.case.init))
        return plain and not self.variant and not self.case.state

    def result(self, known: dict[Key, Expected] | None = None) -> OracleCheck:
        """Of all calls. The contents of changed inputs after a call come last among its outputs. known: results of an
        earlier case; those of the last call are left there for a later one."""
        known = {} if known is None else known
        try:
            return self.compared_with(self.of.calls, known, keep=False)
        finally:
            if not self._shares_results():
                known.clear()

    def compared_with(
        self, entries: Sequence[StoredCall], known: dict[Key, Expected], keep: bool = True
    ) -> OracleCheck:
        """`result` of the calls in `entries`. known: results of `expected`. `keep` is False when only one seed fits in
        memory."""
        of_case, calls = OracleCheck(), []
        for call in entries:
            try:
                stored = StoredOutputs.load(call.output, self.device)
            except Exception as error:
                return OracleCheck(unreadable=describe(error)["message"])
            key = self.key(call.inputs_seed)
            if not keep and key not in known:
                known.clear()
            if key not in known or not (keep or calls):  # the first call tells more than an earlier case's last
                known[key] = self.expected(call.inputs_seed, first=not calls, results=known.get(key))
            wanted = known[key]
            left = self._left(wanted, stored.inputs) if len(stored.outputs) == wanted.returned else []
            outputs = self._compared([*stored.outputs, *left], wanted)
            if not calls:  # the same for all calls
                draws = self._draws(wanted)
                outputs = [replace(output, few_draws=draws.too_few.get(at)) for at, output in enumerate(outputs)]
                of_case = self._of_case(wanted, stored.state, draws.wrong)
            calls.append(CallCheck(len(stored.outputs), stored.structure, outputs))
            del wanted
        return replace(of_case, calls=calls)

    def _of_case(self, wanted: Expected, left: dict | None, wrong_draws: list[str]) -> OracleCheck:
        """What the first call tells of the case."""
        return OracleCheck(
            trivial_answers=wanted.trivial_answers,
            random=wanted.random,
            oracle=wanted.precision,
            expected_count=wanted.returned,
            expected_structure=wanted.structure,
            changes=sorted(wanted.state),
            wrong_state=self._wrong_state(left, wanted.state),
            wrong_draws=wrong_draws,
            strange=self._strange(),
        )

    def _strange(self) -> list[str]:
        """The inputs and parameters whose contents differ from those that the candidate got."""
        given = self.of.contents
        names = [*self.loaded.declarations.names_of_tensors(self.case.inputs), *self.case.state]
        pairs = zip(names, given, self.case.fingerprints() if given else [], strict=False)
        return [name for name, theirs, own in pairs if not tensor_trees.is_same(theirs, own)]

    def _draws(self, wanted: Expected) -> Draws:
        """The kernel's draws over secret seeds beside the reference's probabilities."""
        stored = tensor_trees.load(self.of.draws) if self.of.draws else None
        wrong: list[str] = []
        too_few: dict[int, str | None] = {}
        for at, sampled in self.loaded.declarations.samples.items() if stored is not None else ():
            draws = stored.get(at, torch.empty(0)).to(self.device)
            if why := sampling.distance(draws, wanted.oracle[at], sampled):
                wrong.append(f"output {at}: {why}")
            elif not self.variant:
                too_few[at] = sampling.too_few(sampled, wanted.oracle[at], len(draws))
        return Draws(wrong, too_few)

    def _left(self, wanted: Expected, changed: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """The contents of the declared inputs after the kernel's call. changed: those that it changed."""
        numbers = self.loaded.declarations.mutated_tensors(wanted.inputs)
        return [changed.get(number, before) for number, before in zip(numbers, wanted.before, strict=True)]

    def _compared(self, actual: list[torch.Tensor], expected: Expected) -> list[OutputCheck]:
        bounds = self._bounds(expected)
        workload, variant = self.of.workload, self.variant
        with blaming(OracleError):
            compared = [self._compare(tensor, at, expected, bounds) for at, tensor in enumerate(actual[: len(bounds)])]
        usual = self._usual(len(compared))
        if variant:
            return [replace(output, usually_finite=own.finite) for output, own in zip(compared, usual, strict=True)]
        self.usual[workload] = [own.and_also(one.errors) for own, one in zip(usual, compared, strict=True)]
        return compared

    def _usual(self, count: int) -> list[Usual]:
        """Each of so many outputs on the task's own inputs; at other sizes there may be more of them."""
        known = self.usual.get(self.of.workload, [])[:count]
        return known + [Usual()] * (count - len(known))

    def _compare(self, actual: torch.Tensor, at: int, expected: Expected, bounds: list[float]) -> OutputCheck:
        """The comparison of output `at`, as the task declares it; of a changed input also what must have stayed."""
        if at in self.loaded.declarations.samples and at < expected.returned:
            return sampling.compare(actual, expected.oracle[at])
        declared = self.loaded.declarations.comparison(expected.inputs, expected.returned, at)
        compared = comparisons.compare(
            actual,
            expected.oracle[at],
            expected.baseline[at],
            bounds[at],
            expected.least_rms[at] if expected.least_rms else 0.0,
            declared,
            expected.inputs,
            ROUGHLY if self._has_other_values() else 0.0,
        )
        if at < expected.returned or compared.errors is None:
            return compared
        before = expected.before[at - expected.returned]
        counts = comparisons.mask_of(declared, expected.inputs, before) if declared else None
        touched = disturbed(actual, before, expected.oracle[at], expected.baseline[at], counts)
        unchanged = state.identical(actual, before)
        return replace(compared, input=self._parameter(expected, at), unchanged=unchanged, disturbed=touched)

    def _wrong_state(self, left: dict | None, expected: dict[str, torch.Tensor]) -> list[str]:
        """Which floating parameters and buffers that the reference changes the kernel did not leave as the reference
        does: running statistics, say; counters are ignored. left: those that the kernel changed, None when they were
        not recorded."""
        if left is None:
            return []
        wrong = []
        for name, wanted in expected.items():
            actual = left.get(name, self.case.state[name]).to(self.device)
            bound = self.tolerances[tensor_trees.dtype_class(wanted.dtype)]
            errors = accuracy.compare(actual, wanted, wanted, bound).errors
            if wanted.is_floating_point() and (errors is None or errors.any):
                wrong.append(name)
        return wrong

    def _has_other_values(self) -> bool:
        return bool(self.variant) and self.variant.values in variant_inputs.VALUES

    def _bounds(self, expected: Expected) -> list[float]:
        """The tolerance of each output: that of its dtype or, of a floating one, of a coarser dtype that it was
        computed in."""
        bounds = []
        for tensor, coarser in zip(expected.baseline, expected.computed_in, strict=True):
            own = self.tolerances[tensor_trees.dtype_class(tensor.dtype)]
            bounds.append(max(own, self.tolerances[coarser]) if own and coarser else own)
        if self._has_other_values():
            return [max(ROUGHLY, bound) if bound else bound for bound in bounds]
        return bounds

    def trivial_answers(self) -> list[str]:
        """The answers that compute nothing and would pass on this case."""
        expected = self.expected(self.of.seed, first=False)
        return self._trivial_answers(expected, self._bounds(expected))

    def expected(self, inputs_seed: int, first: bool, results: Expected | None = None) -> Expected:
        """The reference's results on a seed's inputs with this case's parameters; for the first call also whether the
        reference is random and which trivial answers would pass. results: the former, where they are known."""
        case = self.case
        if inputs_seed != self.of.seed:
            case = case.with_inputs(self._case(inputs_seed).inputs)
        own = first and self.variant is None
        expected = results or self._results(case, inputs_seed, own)
        for at, sampled in self.loaded.declarations.samples.items():
            if at >= expected.returned:
                raise InvalidDeclaration(f"SAMPLES names output {at}, and forward returns {expected.returned}")
            if own:
                sampling.check_probabilities(expected.oracle[at], sampled)
            elif not sampling.are_distributions(expected.oracle[at]):
                raise OracleError("the reference returns no probabilities")
        if own:
            with blaming(OracleError):
                again = reference_runs.outputs(self.loaded, case, self.device, draw=1)
            bounds = self._bounds(expected)
            repeated = (self._against_itself(tensor, at, expected, bounds) for at, tensor in enumerate(again))
            expected.random = not all(one.errors and not one.errors.any for one in repeated)
            expected.trivial_answers = self._trivial_answers(expected, bounds) if self.of.first else []
        return expected

    def _results(self, case: problem.Case, inputs_seed: int, own: bool) -> Expected:
        """The reference's results on a case. own: note the parameters and buffers that it changes."""
        with blaming(OracleError):
            known, workload = self.loaded.computed_in, self.of.workload
            ran = reference_runs.run(self.loaded, case, self.device, follow=workload not in known)
            computed_in = known.setdefault(workload, ran.computed_in)[: len(ran.outputs)]
            computed_in += [None] * (len(ran.outputs) - len(computed_in))  # at other sizes there may be more of them
            left = state.changed(ran.model, state.watched(case.state)) if own else {}
            oracle, precision = problem.oracle_outputs(
                self.loaded, case, self.device, ran.outputs, unrounded=any(computed_in)
            )
        expected = Expected(
            ran.outputs,
            computed_in,
            oracle,
            precision,
            ran.structure,
            ran.returned,
            case.inputs,
            self.loaded.mutated(case.inputs),
            left,
        )
        del ran
        expected.least_rms = self._least_rms(inputs_seed, oracle)
        return expected

    def _against_itself(self, again: torch.Tensor, at: int, expected: Expected, bounds: list[float]) -> OutputCheck:
        """A second result of the reference against its first one."""
        first = expected.baseline[at]
        declared = self.loaded.declarations.comparison(expected.inputs, expected.returned, at)
        return comparisons.compare(again, first, first, bounds[at], 0.0, declared, expected.inputs)

    def _least_rms(self, seed: int, oracle: list[torch.Tensor]) -> list[float]:
        """The least scale of each output at other sizes than the task's own: a share of its rms there, and, of few
        elements, where a sum near 0 is no scale, the rms on other contents of the same sizes; else 0."""
        if not (self.variant and self.variant.resized):
            return [0.0] * len(oracle)
        least = [LEAST_SCALE * one.rms for one in self._usual(len(oracle))]
        if not any(tensor.numel() < accuracy.FEW for tensor in oracle):
            return least
        try:
            other = self.maker.case(self.of.workload, seed, self.variant, from_the_end=True)
            results = [
                accuracy.comparable(tensor) for tensor in reference_runs.outputs(self.loaded, other, self.device)
            ]
        except Exception:  # the reference may refuse contents that we made
            return least
        others = [accuracy.root_mean_square(one) for one in results]
        few = (tensor.numel() < accuracy.FEW for tensor in oracle)
        return [max(own, rms) if alone else own for own, rms, alone in zip(least, others, few, strict=True)]

    def _trivial_answers(self, expected: Expected, bounds: list[float]) -> list[str]:
        """Answers that compute nothing and would pass on this workload (see accuracy.bland_answers), and inputs that
        may stay as they are although they are declared as outputs."""
        with blaming(OracleError):
            twins = reference_runs.outputs(self.loaded, self._case(self.of.seed + 1), self.device)

        def passes(tensor: torch.Tensor | None, at: int) -> bool:
            if tensor is None:
                return False
            compared = self._compare(tensor, at, expected, bounds)
            return compared.errors is not None and not compared.errors.any and not compared.disturbed

        nothing = "anything as output {}, of which COMPARE's `valid` selects nothing,"
        answers = list(map(nothing.format, self._unseen(expected)))
        for at, before in enumerate(expected.before, start=expected.returned):
            if before.numel() and passes(before, at) and not self._stays_beside_another(expected, at):
                answers.append(f"MUTATES declares '{self._parameter(expected, at)}', and leaving it as it was")
        if len(twins) == len(expected.baseline):
            given = tensor_trees.input_tensors(expected.inputs)
            bland = accuracy.bland_answers(expected.baseline, given, twins)
            answers += accuracy.passing(bland, expected.oracle, passes)
        return [*answers, *self._other_seeds(expected, passes)]

    def _other_seeds(self, expected: Expected, passes: Callable[[torch.Tensor | None, int], bool]) -> list[str]:
        """The parameters that hold a seed on which the result depends, but by less than the tolerance."""
        inputs, declared = expected.inputs, self.loaded.declarations
        names = []
        for at in declared.seeds() if not declared.samples else []:
            if at < len(inputs) and variant_inputs.may_be_seed(inputs[at]):
                other = [*inputs[:at], variant_inputs.reseeded(inputs[at]), *inputs[at + 1 :]]
                with blaming(OracleError):
                    results = reference_runs.outputs(self.loaded, self.case.with_inputs(other), self.device)
                same = all(map(state.identical, results, expected.baseline))
                if not same and all(passes(one, number) for number, one in enumerate(results)):
                    names.append(f"the result with another '{declared.name(at)}'")
        return names

    def _stays_beside_another(self, expected: Expected, at: int) -> bool:
        """Is this one of several tensors of an argument, which the reference leaves alone while it changes another?"""

        def stays(one: int) -> bool:
            return state.identical(expected.before[one - expected.returned], expected.baseline[one])

        own, places = self._parameter(expected, at), range(expected.returned, len(expected.baseline))
        return stays(at) and not all(stays(one) for one in places if self._parameter(expected, one) == own)

    def _unseen(self, expected: Expected) -> list[int]:
        """The outputs of which no element is compared."""
        unseen = []
        for at, tensor in enumerate(expected.baseline):
            declared = self.loaded.declarations.comparison(expected.inputs, expected.returned, at)
            mask = comparisons.mask_of(declared, expected.inputs, tensor) if declared else None
            unseen += [at] if mask is not None and mask.numel() and not mask.any() else []
        return unseen

    def _parameter(self, expected: Expected, at: int) -> str:
        """The name of the input that output `at` is the contents of."""
        declared = self.loaded.declarations
        number = declared.mutated_tensors(expected.inputs)[at - expected.returned]
        return declared.name_of_tensor(expected.inputs, number)


def disturbed(
    actual: torch.Tensor,
    before: torch.Tensor,
    oracle: torch.Tensor,
    baseline: torch.Tensor,
    counts: torch.Tensor | None = None,
) -> int:
    """How many elements of a changed input differ from before the call, although the reference leaves them as they
    were. Those are compared exactly: a kernel has no reason to touch them. counts: where the task compares it."""
    got, old, exact, theirs = (accuracy.comparable(tensor) for tensor in (actual, before, oracle, baseline))
    touched = same(exact, old.to(exact.dtype)) & same(theirs, old) & ~same(got, old)
    if counts is not None:
        touched &= counts.view(*counts.shape, *[1] * (touched.dim() - counts.dim()))  # complex numbers are pairs
    return int(touched.sum())


def same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where two tensors are equal, or both NaN."""
    return (a == b) | ((a != a) & (b != b))
