"""The job that puts a kernel into a model, checks the whole model against the original, and times a step of both."""

import copy
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..model_types import ModelCheck
from . import accuracy, model_steps, model_swap, tensor_trees
from .context import Context
from .contract import NotCut, WrongModelFile
from .model_comparing import difference, first_line, reason
from .model_each_call import EachCall, wide_dtype
from .model_file import Arguments, ModelFile, Tensors
from .model_steps import StepTimes, TookTooLong, within

DYNAMIC = "torch.compile, dynamic sizes"


@dataclass(frozen=True)
class PutBackReport:
    """paths: the modules that the kernel stands in for. workload: the one of the step. calls: of the kernel in it.
    left_out: workloads in which the original takes all calls. steps: times by way of running, {} where there is no GPU.
    alone: of one call of the first module that has one, by itself."""

    paths: list[str]
    workload: str
    calls: int
    left_out: list[str]
    checks: list[ModelCheck]
    steps: dict[str, StepTimes]
    alone: StepTimes | None


def put_back(
    context: Context,
    model: str,
    folder: str,
    at: str,
    where: str | None,
    workload: str | None,
    training: bool,
    generate: int,
    tolerances: dict[str, float],
    own_tolerance: float | None,
    budget_s: float,
    ready_s: float,
) -> PutBackReport:
    """Check, and on a GPU time, a model with the kernel of `folder` (kernel.py, reference.py) in place of the modules
    at `at`. where: the calls that it takes, a condition on the module's arguments. workload: of the step; None for that
    of the cut, or else the first. training: also compare gradients. generate: how many greedy tokens are compared.
    tolerances: by dtype, on |error| / (|original| + scale). own_tolerance: the session's, for the kernel by itself;
    None for that of the dtype. budget_s: for the times of each way of running a step; ready_s: to compile it."""
    file = ModelFile(Path(model), context.device, training, context.phase)
    try:
        operator = model_swap.Operator(Path(folder, "kernel.py"), Path(folder, "reference.py"))
        made = model_swap.replacements(file.module, at, operator, where)
    except model_swap.WrongCall as error:
        raise WrongModelFile(str(error)) from None
    except model_swap.NotReplaced as error:
        raise NotCut(str(error)) from None
    if training and operator.mutated:
        raise NotCut(
            f"the kernel writes to '{operator.mutated[0]}' in place, which gradients cannot follow: leave --training "
            "out, or cut with --between, beside the operators that write"
        )
    own = operator.workload if operator.workload in file.workloads else None
    judge = Judge(file, with_modules(file.module, made), made, tolerances, workload or own, own_tolerance)
    checks = judge.outputs()
    if all(check.passed for check in checks) and not judge.calls[judge.workload]:
        raise WrongModelFile(
            f"workload '{judge.workload}' makes no call that fits '{where}'; name one that does: --workload NAME"
        )
    checks += [judge.each_call()] if any(judge.calls.values()) else []
    if all(check.passed for check in checks):
        checks.append(judge.operator(operator))
        checks += [judge.gradients()] if training else []
        checks += [judge.tokens(generate)] if generate else []
        checks.append(judge.compiled(ready_s))
    facts = [*made], judge.workload, judge.calls[judge.workload], judge.left_out
    if context.device != "cuda" or any(check.passed is False for check in checks):
        return PutBackReport(*facts, checks, {}, None)
    times = model_steps.compared(file, judge.after, judge.workload, budget_s, ready_s)
    file.phase("timing the module alone")
    return PutBackReport(*facts, checks, times, model_steps.alone(file, made, judge.workload, budget_s / 4))


def with_modules(model: torch.nn.Module, made: dict[str, torch.nn.Module], prefix: str = "") -> torch.nn.Module:
    """The model with other modules at some paths. It shares all else with the original, which stays as it is."""
    if prefix.removesuffix(".") in made:
        return made[prefix.removesuffix(".")]
    if not any(path.startswith(prefix) for path in made):
        return model
    one = copy.copy(model)
    one._modules = {
        name: child and with_modules(child, made, f"{prefix}{name}.") for name, child in model._modules.items()
    }
    return one


class Judge:
    """Compares a model with the original. workload: of the step. calls: of the kernel in a step of each workload.
    left_out: workloads in which the original takes all calls."""

    def __init__(
        self,
        file: ModelFile,
        after: torch.nn.Module,
        made: dict[str, model_swap.Replacement],
        tolerances: dict[str, float],
        workload: str | None = None,
        own_tolerance: float | None = None,
    ):
        self.after, self.calls = after, dict.fromkeys(file.workloads, 0)
        self.left_out: list[str] = []
        self.workload = file.chosen(workload)
        self._file = file
        parameters = [*file.module.parameters(), *file.module.buffers()]
        self._tolerance = tolerances.get(tensor_trees.dominant_dtype(parameters), tolerances["fp32"])
        self._exact = widened(file.module)
        self._calls = EachCall(file, made, self._exact, max(self._tolerance, own_tolerance or 0.0))

    def outputs(self) -> list[ModelCheck]:
        """The outputs in each workload, and the buffers and inputs as a step leaves them."""
        return [self._in_workload(workload) for workload in self._file.workloads]

    def each_call(self) -> ModelCheck:
        """The calls of the modules in these workloads, each by itself."""
        return self._calls.check()

    def _in_workload(self, workload: str) -> ModelCheck:
        name = f"outputs, workload {workload}"
        self._file.phase(f"running the model as it is, workload {workload}")
        plain = self._file.left_by(self._file.module, workload)
        self._file.phase(f"running the model with the kernel, workload {workload}")
        calls = self._calls.in_workload(workload)
        self.calls[workload] = sum(calls)
        self.left_out += [workload] if calls and not any(calls) else []
        if not calls:
            return ModelCheck(name, False, "the model did not call the module")
        try:
            replaced = self._file.left_by(self.after, workload)
        except Exception as error:
            return ModelCheck(name, False, reason(error))
        check = self._compared(name, replaced, plain, self._exact_outputs(workload))
        if all(calls):
            return check
        others = f"the original takes {len(calls) - sum(calls)} of {len(calls)} calls"
        return replace(check, detail=f"{others}; {check.detail}")

    def _exact_outputs(self, workload: str) -> Tensors | None:
        """The same of the model in a wider dtype; None where it does not run in one, or would draw other numbers."""
        if self._file.habits(workload).random:
            return None
        try:
            exact = copy.deepcopy(self._exact)
            return self._file.left(exact, workload, self._wide_arguments(workload), exact)
        except Exception:  # there is none, too little memory, or a dtype that is written in the model
            return None

    def _wide_arguments(self, workload: str) -> Arguments:
        return self._file.arguments(workload).floating(wide_dtype(self._exact))

    def _compared(self, name: str, actual: Tensors, plain: Tensors, exact: Tensors | None) -> ModelCheck:
        return difference(actual, plain, exact, self._tolerance).check(name)

    def operator(self, operator: model_swap.Operator) -> ModelCheck:
        """torch.library.opcheck, on the arguments of a real call."""
        self._file.phase("running torch.library.opcheck on the kernel")
        op, given = operator.op, []

        def noting(*arguments):
            given.append(arguments)
            return op(*arguments)

        operator.apply = noting
        self._file.left_by(self.after, self.workload)
        del operator.apply
        trained = self._file.training and not operator.mutated  # gradients that nobody asked for are not tried
        real = [leaf(one, trained) if isinstance(one, torch.Tensor) else one for one in given[0]]
        results = torch.library.opcheck(op, tuple(real), raise_exception=False)
        failed = {name: str(result) for name, result in results.items() if result != "SUCCESS"}
        detail = "; ".join(f"{name}: {first_line(text)}" for name, text in failed.items())
        return ModelCheck("torch.library.opcheck", not failed, detail or f"{', '.join(results)}: as they should be")

    def gradients(self) -> ModelCheck:
        """The gradients of all parameters."""
        self._file.phase("comparing gradients")
        arguments = self._file.arguments(self.workload)
        plain = self._gradients(self._file.module, arguments)
        try:
            replaced = self._gradients(self.after, arguments)
        except Exception as error:
            return ModelCheck("gradients", False, reason(error))
        if missing := [name for name in plain if name not in replaced]:
            return ModelCheck("gradients", False, f"'{missing[0]}' gets none")
        own = {name: replaced[name] for name in plain}
        return self._compared("gradients", own, plain, self._exact_gradients())

    def _exact_gradients(self) -> Tensors | None:
        """Those of the model in a wider dtype; None as for `_exact_outputs`."""
        if self._file.habits(self.workload).random:
            return None
        try:
            return self._gradients(copy.deepcopy(self._exact), self._wide_arguments(self.workload))
        except Exception:
            return None

    def _gradients(self, module: torch.nn.Module, arguments: Arguments) -> Tensors:
        module.zero_grad()
        with self._file.buffers_restored():
            self._file.backward(self._file.run(module, arguments))
        made = {name: one.grad for name, one in module.named_parameters() if one.grad is not None}
        module.zero_grad()
        return made

    def tokens(self, count: int) -> ModelCheck:
        """Greedy tokens: each step takes the original's, so that one near tie does not change all that follow."""
        self._file.phase("comparing greedy tokens")
        plain, tokens = self._greedy(self._file.module, count, [])
        try:
            replaced, _ = self._greedy(self.after, count, tokens)
        except Exception as error:
            return ModelCheck("greedy tokens", False, reason(error))
        equal = ties = 0
        for first, second, best in zip(plain, replaced, tokens, strict=True):
            same = best == second.argmax(-1)
            top = first.topk(2, -1).values
            near = top[:, 0] - top[:, 1] <= 2 * self._tolerance * (top[:, 0].abs() + accuracy.root_mean_square(first))
            equal += int(same.all())
            ties += int(not same.all() and bool((same | near).all()))
        detail = f"{equal} of {count} equal" + (f", {ties} of the others near ties" if ties else "")
        return ModelCheck("greedy tokens", equal + ties == count, detail)

    def _greedy(
        self, module: torch.nn.Module, count: int, given: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(the last logits, the best tokens) of `count` steps. given: tokens that go on in place of the best ones."""
        arguments = self._file.arguments(self.workload)
        logits, tokens = [], []
        with self._file.buffers_restored():
            for number in range(count):
                try:
                    outputs = self._file.run(module, arguments)
                except WrongModelFile as error:  # a cache may be full
                    fewer = f"; --generate {number} compares fewer" if number else ""
                    raise WrongModelFile(f"{error}, at token {number + 1} of {count}{fewer}") from error
                logits.append(last_logits(outputs))
                tokens.append(logits[-1].argmax(-1))
                arguments = self._file.advanced(arguments, given[number] if given else tokens[-1])
        return logits, tokens

    def compiled(self, ready_s: float) -> ModelCheck:
        """All workloads through one torch.compile with dynamic sizes."""
        self._file.phase("running the model with the kernel in torch.compile")
        backend = "inductor" if self._file.device == "cuda" else "aot_eager"
        try:
            results = self._left_compiled(self.after, backend, ready_s)
        except (Exception, TookTooLong) as error:
            return ModelCheck(DYNAMIC, *self._blame(backend, ready_s, error))
        checks = [
            self._compared(
                DYNAMIC, left, self._file.left_by(self._file.module, workload), self._exact_outputs(workload)
            )
            for workload, left in results.items()
        ]
        if wrong := next((check for check in checks if not check.passed), None):
            return wrong
        workloads = f"{len(checks)} workload{'s' * (len(checks) > 1)}"
        return ModelCheck(DYNAMIC, True, f"backend {backend}, {workloads}: {checks[0].detail}")

    def _left_compiled(self, module: torch.nn.Module, backend: str, ready_s: float) -> dict[str, Tensors]:
        made = torch.compile(module, backend=backend, dynamic=True)
        with within(ready_s):
            return {workload: self._file.left_by(made, workload) for workload in self._file.workloads}

    def _blame(self, backend: str, ready_s: float, error: BaseException) -> tuple[bool | None, str]:
        """(passed, detail) of a model that torch.compile does not get through, as it may not through the original."""
        try:
            self._left_compiled(self._file.module, backend, ready_s)
        except (Exception, TookTooLong) as other:
            return None, f"the original fails: {reason(other)}"
        return False, reason(error)


def widened(module: torch.nn.Module) -> torch.nn.Module | None:
    """A copy of a model in the next wider dtype; None where there is none, or no memory for it."""
    dtypes = {one.dtype for one in module.parameters() if one.is_floating_point()}
    if not dtypes or not all(dtype in tensor_trees.NAMES for dtype in dtypes):
        return None
    wide = torch.float64 if torch.float32 in dtypes else torch.float32
    try:
        return copy.deepcopy(module).to(wide)
    except (RuntimeError, TypeError):
        return None


def leaf(tensor: torch.Tensor, trained: bool) -> torch.Tensor:
    """The same numbers without what they were made from, so that a backward pass ends here. trained: with a gradient
    where it has one."""
    return tensor.detach().requires_grad_(trained and tensor.requires_grad)


def last_logits(outputs) -> torch.Tensor:
    """(requests, vocabulary): the last of the first floating output (requests, tokens, vocabulary)."""
    for one in tensor_trees.input_tensors([outputs]):
        if one.is_floating_point() and one.ndim == 3:
            return one[:, -1].float()
    raise WrongModelFile("--generate needs an output of (requests, tokens, vocabulary), the logits")
