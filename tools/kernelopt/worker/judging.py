"""The job that judges outputs: the reference runs here, and a candidate is never loaded."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..case_types import CallCheck, OracleCheck, OutputCheck, OutputErrors, StoredCall, StoredCase
from ..statuses import Status
from . import accuracy, sampling, tensor_files, tensor_trees, transfers, trivial_answers
from .case_maker import CaseMaker
from .case_reference import CaseReference, Expected, Key
from .context import Context, load_reference
from .faults import OracleError, blaming, describe


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
    loaded = load_reference(reference, context.device)
    maker, stored = CaseMaker(loaded, dtype, context.device), list(map(StoredCase.from_json, cases))
    usual: dict[str, list[Usual]] = {}
    known: dict[Key, Expected] = {}
    with loaded.on(context.device):  # COMPARE's functions too
        answers = []
        for number, case in enumerate(stored):
            context.mark(f"case {number}", 1)  # so that the parent knows how far this is
            answers.append(checked(context, maker, case, tolerances, usual, known))
        for at, case in enumerate(stored):
            if found := answers[at].trivial_answers:
                own = (one for one in stored if one.workload == case.workload and not one.variant)
                others = (CaseReference(maker, one, tolerances) for one in own if one is not case)
                answers[at] = replace(answers[at], trivial_answers=trivial_answers.everywhere(found, others))
    return CheckAnswer(answers)


def warm_up(device: str) -> None:
    """Compare a little in each usual dtype: torch loads its GPU kernels when they are first used, which takes half a
    second."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        ones = torch.ones(2, 2, dtype=dtype, device=device)
        accuracy.compare(ones, ones.double(), ones, 0.1)


def checked(
    context: Context,
    maker: CaseMaker,
    stored: StoredCase,
    tolerances: dict[str, float],
    usual: "dict[str, list[Usual]]",
    known: dict[Key, Expected],
) -> OracleCheck:
    """`Check.result`; `broken` for a variant on which the reference fails, or needs too much memory, and leaves the
    device as it was. known: the results of the former case's last call, which are this case's own where the task has
    no parameters."""
    if stored.variant or (stored.workload, stored.seed) not in [key[:2] for key in known]:
        known.clear()  # before more is made
    try:
        return Check(maker, stored, tolerances, usual).result(known)
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
        stored = tensor_files.load(path)
        outputs = [transfers.to_device(tensor, device) for tensor in stored["outputs"]]
        changed = (stored["inputs"] or {}).items()
        inputs = {int(number): transfers.to_device(tensor, device) for number, tensor in changed}
        return cls(outputs, stored["structure"], inputs, stored["state"])

    def beside(self, expected: Expected) -> list[torch.Tensor]:
        """The outputs, and behind them the contents of the inputs that are declared to change; without these where the
        call returned another number of outputs."""
        if len(self.outputs) != expected.returned:
            return self.outputs
        declared = [one.changed for one in expected.outputs[expected.returned :]]
        return [*self.outputs, *(self.inputs.get(one.number, one.before) for one in declared)]


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


@dataclass(frozen=True)
class DrawsCheck:
    """What a case's draws over secret seeds show. wrong: why those of an output do not follow the reference's
    probabilities. too_few: by output on the task's own inputs, what its draws are too few to tell."""

    wrong: list[str]
    too_few: dict[int, str | None]


class Check:
    """The judgement of one case: each of its calls beside the reference on that call's inputs."""

    def __init__(
        self, maker: CaseMaker, stored: StoredCase, tolerances: dict[str, float], usual: dict[str, list[Usual]]
    ):
        """usual: by workload, each output on the task's own inputs, which cases leave for the variants after them."""
        self.stored, self.tolerances, self.usual, self.device = stored, tolerances, usual, maker.device
        usual_rms = [one.rms for one in usual.get(stored.workload, [])]
        self.reference = CaseReference(maker, stored, tolerances, usual_rms)

    def result(self, known: dict[Key, Expected]) -> OracleCheck:
        """Of all calls. The contents of changed inputs after a call come last among its outputs. known: results of an
        earlier case; those of the last call are left there for a later one."""
        try:
            return self.compared_with(self.stored.calls, known, keep=False)
        finally:
            if not self.reference.shares_results():
                known.clear()

    def compared_with(self, calls: Sequence[StoredCall], known: dict[Key, Expected], keep: bool = True) -> OracleCheck:
        """`result` of some calls. known: results of `expected`. `keep` is False when only one seed fits in memory."""
        of_case, compared = OracleCheck(), []
        for call in calls:
            try:
                left = StoredOutputs.load(call.output, self.device)
            except Exception as error:
                return OracleCheck(unreadable=describe(error)["message"])
            key = self.reference.key(call.inputs_seed)
            if not keep and key not in known:
                known.clear()
            if key not in known or not (keep or compared):  # the first call tells more than an earlier case's last
                known[key] = self.expected(call.inputs_seed, first=not compared, results=known.get(key))
            wanted = known[key]
            outputs = self._compared(left.beside(wanted), wanted, call.inputs_seed)
            if not compared:  # the same for all calls
                draws = self._draws(wanted)
                outputs = [replace(output, few_draws=draws.too_few.get(at)) for at, output in enumerate(outputs)]
                of_case = self._of_case(wanted, left.state, draws.wrong)
            compared.append(CallCheck(len(left.outputs), left.structure, outputs))
            del wanted
        return replace(of_case, calls=compared)

    def expected(self, seed: int, first: bool, results: Expected | None = None) -> Expected:
        """The reference's results on a seed's inputs with this case's parameters; for the first call also whether the
        reference is random and which trivial answers would pass. results: the former, where they are known."""
        own = first and self.stored.variant is None
        expected = self.reference.expected(seed, own, results)
        if not own:
            return expected
        found = trivial_answers.found(self.reference, expected) if self.stored.first else ()
        return replace(expected, trivial_answers=found)

    def _of_case(self, wanted: Expected, left: dict | None, wrong_draws: list[str]) -> OracleCheck:
        """What the first call tells of the case. left: the state that it left."""
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
        given, case = self.stored.contents, self.reference.case
        names = [*self.reference.loaded.declarations.names_of_tensors(case.inputs), *case.state]
        pairs = zip(names, given, case.fingerprints() if given else [], strict=False)
        return [name for name, theirs, own in pairs if not tensor_trees.is_same(theirs, own)]

    def _draws(self, wanted: Expected) -> DrawsCheck:
        """The kernel's draws over secret seeds beside the reference's probabilities."""
        stored = tensor_files.load(self.stored.draws) if self.stored.draws else None
        wrong: list[str] = []
        too_few: dict[int, str | None] = {}
        for at, sampled in self.reference.loaded.declarations.samples.items() if stored is not None else ():
            draws, probabilities = stored.get(at, torch.empty(0)).to(self.device), wanted.outputs[at].oracle
            if why := sampling.distance(draws, probabilities, sampled):
                wrong.append(f"output {at}: {why}")
            elif not self.stored.variant:
                too_few[at] = sampling.too_few(sampled, probabilities, len(draws))
        return DrawsCheck(wrong, too_few)

    def _compared(self, actual: list[torch.Tensor], expected: Expected, seed: int) -> list[OutputCheck]:
        pairs = list(zip(actual, expected.outputs, strict=False))
        with blaming(OracleError):
            compared = [wanted.compare(one) for one, wanted in pairs]
            wrong = [at for at, one in enumerate(compared) if one.errors and one.errors.any]
            typical = self.reference.typical_rms(seed, [wanted.oracle for wanted in expected.outputs]) if wrong else []
            for at in wrong:
                one, wanted = pairs[at]
                if typical[at] > wanted.least_rms:
                    compared[at] = replace(wanted, least_rms=typical[at]).compare(one)
        usual = self._usual(len(compared))
        if self.stored.variant:
            return [replace(output, usually_finite=own.finite) for output, own in zip(compared, usual, strict=True)]
        checks = zip(usual, compared, strict=True)
        self.usual[self.stored.workload] = [own.and_also(one.errors) for own, one in checks]
        return compared

    def _usual(self, count: int) -> list[Usual]:
        """Each of so many outputs on the task's own inputs; at other sizes there may be more of them."""
        known = self.usual.get(self.stored.workload, [])[:count]
        return known + [Usual()] * (count - len(known))

    def _wrong_state(self, left: dict | None, expected: dict[str, torch.Tensor]) -> list[str]:
        """Which floating parameters and buffers that the reference changes the kernel did not leave as the reference
        does: running statistics, say; counters are ignored. left: those that the kernel changed, None when they were
        not recorded."""
        if left is None:
            return []
        wrong = []
        for name, wanted in expected.items():
            actual = left.get(name, self.reference.case.state[name]).to(self.device)
            bound = self.tolerances[tensor_trees.dtype_class(wanted.dtype)]
            errors = accuracy.compare(actual, wanted, wanted, bound).errors
            if wanted.is_floating_point() and (errors is None or errors.any):
                wrong.append(name)
        return wrong
