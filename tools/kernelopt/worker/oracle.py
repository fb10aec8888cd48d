"""Jobs that run the reference and never load a candidate: the work it takes, its inputs, and the judgement of
outputs."""

import pickle
import re
from pathlib import Path

import torch

from . import accuracy, problem, state, tensor_trees, variant_inputs, variants, work
from .context import Context, load_reference
from .faults import OracleError, blaming, describe


def estimate(context: Context, reference: str, dtype: str | None, workloads: list[str] | None) -> dict:
    """The least work per workload (see work.estimate)."""
    loaded = load_reference(reference)
    with blaming(OracleError):
        names = chosen(loaded, workloads)
        return {"workloads": {name: work.estimate(loaded, name, dtype, context.device) for name in names}}


def chosen(reference: problem.Reference, workloads: list[str] | None) -> list[str]:
    """The named workloads, or all of them when no name is given."""
    for name in workloads or []:
        if name not in reference.workloads:
            known = ", ".join(reference.workloads)
            raise problem.UnknownWorkload(f"the reference has no workload '{name}'; it has: {known}")
    return workloads or list(reference.workloads)


def prepare(
    context: Context,
    reference: str,
    dtype: str | None,
    workloads: list[str] | None,
    seeds: list[int],
    at_least: int,
    limit_bytes: int,
    with_variants: bool,
    folder: str,
) -> dict:
    """Write the inputs of each workload and seed to a file, so that the candidate never needs the reference.

    A workload gets no more seeds once its files hold limit_bytes, but it always gets the last `at_least` seeds.
    with_variants: also write cases on other shapes, layouts and values that the reference takes, mostly for the first
    workload."""
    loaded, cases = load_reference(reference), []
    maker = Maker(loaded, dtype, context.device)
    with blaming(OracleError):
        names = chosen(loaded, workloads)
        for workload in names:
            own, total = [], 0
            for number, seed in enumerate(reversed(seeds)):  # from the end: the secret ones are last
                if number >= at_least and total > limit_bytes:
                    break
                own.insert(0, store(maker, workload, seed, None, folder))
                total += Path(own[0]["path"]).stat().st_size
            cases += own
        for workload in names if with_variants else []:
            case = maker.case(workload, seeds[-1])
            full, own_sizes = workload == names[0], context.device == "cuda"  # the interpreter would take minutes
            possible = variants.of_workload(loaded, workload, case, full, own_sizes)
            for variant in taken(possible, loaded, maker, workload, seeds[-1]):
                cases.append(store(maker, workload, seeds[-1], variant, folder))
    return {"cases": cases}


TRIED_BYTES = 1 << 20  # of inputs and parameters: the reference may take long over more on a CPU
# Bound on variant_inputs.VALUES, which the task does not have: a right kernel may be far less exact than PyTorch there.
ROUGHLY = 0.25


def taken(possible: list[dict], loaded: problem.Reference, maker: "Maker", workload: str, seed: int) -> list[dict]:
    """The variants whose contents the reference takes: probabilities within 0 and 1, indices within a buffer.

    The trial runs on the CPU, because a process cannot use the GPU again after a failed access. Large inputs count as
    taken. So does every input when the reference cannot run on a CPU, except whole numbers of our own, which may be
    indices out of range."""
    answers = {}
    for number, variant in enumerate(possible):
        case = maker.case(workload, seed, variant)
        if (
            sum(tensor.nbytes for tensor in [*tensor_trees.input_tensors(case.inputs), *case.state.values()])
            <= TRIED_BYTES
        ):
            try:
                outputs(loaded, case, "cpu")
                answers[number] = True
            except Exception:
                answers[number] = False
    if not any(
        answer and possible[number]["values"] is None for number, answer in answers.items()
    ):  # it cannot run on a CPU
        answers = {}
    return [one for number, one in enumerate(possible) if answers.get(number, one["values"] != variant_inputs.FLAGS)]


class Maker:
    """Makes cases of a reference; the last one is kept, since variants are cut out of it."""

    def __init__(self, loaded: problem.Reference, dtype: str | None, device: str):
        self._loaded, self._dtype, self._device = loaded, dtype, device
        self._last: tuple = (None, None)

    def case(self, workload: str, seed: int, variant: dict | None = None, from_the_end: bool = False) -> problem.Case:
        """The inputs and parameters of a seed, cut down to the sizes of a variant. from_the_end: other elements of
        them."""
        if self._last[0] != (workload, seed):
            self._last = (workload, seed), self._loaded.case(workload, seed, self._dtype, self._device)
        return variant_inputs.of_case(self._last[1], variant, from_the_end) if variant else self._last[1]


def store(maker: Maker, workload: str, seed: int, variant: dict | None, folder: str) -> dict:
    """Write one case: {workload, seed, variant, path, dtype, shapes}."""
    case = maker.case(workload, seed, variant)
    path = Path(folder) / f"input-{len(list(Path(folder).iterdir()))}.pt"
    case.save(path)
    try:
        problem.Case.load(path)
    except pickle.UnpicklingError as error:
        kind = re.search(r"GLOBAL (\S+)", str(error))
        raise problem.ContractError(
            f"get_inputs or get_init_inputs gives a {kind[1] if kind else 'value'}, which cannot be stored; give "
            "tensors, "
            "numbers, strings, None, and lists and dicts of them"
        ) from None
    arguments = tensor_trees.input_tensors(case.inputs)
    dtype = tensor_trees.dominant_dtype(arguments + list(case.state.values()))
    shapes = [list(tensor.shape) for tensor in arguments]
    return {
        "workload": workload,
        "seed": seed,
        "variant": variant,
        "path": str(path),
        "dtype": dtype,
        "shapes": shapes,
    }


def check(context: Context, reference: str, dtype: str | None, cases: list[dict], tolerances: dict[str, float]) -> dict:
    """Compare stored outputs with the reference, which runs only here and only now.

    cases: [{workload, seed, variant, first, calls}], calls being [{inputs_seed, output}]: the seed whose inputs a call
    got, and the file of its outputs. Inputs are made again from the seeds, because the files that the candidate read
    are not trusted.
    """
    loaded = load_reference(reference)
    maker = Maker(loaded, dtype, context.device)
    finite: dict[str, list[bool]] = {}
    return {"cases": [Check(context, loaded, maker, entry, tolerances, finite).result() for entry in cases]}


class Check:
    """The judgement of one case: its parameters, and for each of its calls the oracle on that call's inputs."""

    def __init__(
        self,
        context: Context,
        loaded: problem.Reference,
        maker: Maker,
        entry: dict,
        tolerances: dict[str, float],
        finite: dict[str, list[bool]],
    ):
        """finite: by workload, whether each output held no NaN and no infinity on the task's own inputs, which cases
        leave for the variants after them."""
        self.device, self.loaded, self.maker = context.device, loaded, maker
        self.entry, self.tolerances, self.finite = entry, tolerances, finite
        self.case = self._case(entry["seed"])

    def _case(self, seed: int) -> problem.Case:
        with blaming(OracleError):
            return self.maker.case(self.entry["workload"], seed, self.entry["variant"])

    def result(self) -> dict:
        """{calls: [{count, structure, outputs}], expected_count, expected_structure, changes, wrong_state,
        trivial_answers, oracle, random} or {unreadable}. changes: the parameters and buffers that the reference
        changes; wrong_state: those that the kernel left otherwise."""
        return self.compared_with(self.entry["calls"], {}, keep=False)

    def compared_with(self, entries: list[dict], known: dict[int, dict], keep: bool = True) -> dict:
        """`result` of the calls in `entries`. known: results of `expected` by seed. `keep` is False when only one seed
        fits in memory."""
        calls, once = [], {}
        for call in entries:
            try:
                stored = tensor_trees.load(call["output"])
                actual = [tensor.to(self.device) for tensor in stored["outputs"]]
                structure, left = stored["structure"], stored["state"]
            except Exception as error:
                return {"unreadable": describe(error)["message"]}
            if call["inputs_seed"] not in known:
                if not keep:
                    known.clear()
                known[call["inputs_seed"]] = self.expected(call["inputs_seed"], first=not calls)
            wanted = known[call["inputs_seed"]]
            if not calls:  # the same for all calls
                once = {name: wanted[name] for name in ("trivial_answers", "random")} | {"oracle": wanted["precision"]}
                once["expected_count"], once["expected_structure"] = len(wanted["baseline"]), wanted["structure"]
                once["changes"] = sorted(wanted["state"])
                once["wrong_state"] = self._wrong_state(left, wanted["state"])
            outputs = self._compared(actual, wanted)
            calls.append({"count": len(actual), "structure": structure, "outputs": outputs})
            del wanted
        return {"calls": calls, **once}

    def _compared(self, actual: list[torch.Tensor], expected: dict) -> list[dict]:
        bounds = self._bounds(expected["baseline"])
        workload, variant = self.entry["workload"], self.entry["variant"]
        five = zip(actual, expected["oracle"], expected["baseline"], bounds, expected["usual_rms"], strict=False)
        compared = [accuracy.compare(*one) for one in five]
        finite = self.finite.get(workload, [True] * len(bounds))
        if variant:
            return [{**output, "usually_finite": own} for output, own in zip(compared, finite, strict=False)]
        all_finite = (output.get("finite") == output.get("elements") for output in compared)
        self.finite[workload] = [before and now for before, now in zip(finite, all_finite, strict=False)]
        return compared

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
            compared = accuracy.compare(actual, wanted, wanted, bound)
            if wanted.is_floating_point() and compared.get("mismatches", 1) + compared.get("nonfinite", 1):
                wrong.append(name)
        return wrong

    def _bounds(self, baseline: list[torch.Tensor]) -> list[float]:
        bounds = [self.tolerances[tensor_trees.dtype_class(tensor.dtype)] for tensor in baseline]
        if self.entry["variant"] and self.entry["variant"]["values"] in variant_inputs.VALUES:
            return [max(ROUGHLY, bound) if bound else bound for bound in bounds]
        return bounds

    def expected(self, inputs_seed: int, first: bool) -> dict:
        """{baseline, oracle, precision} on a seed's inputs with this case's parameters; for the first call also whether
        the reference is random and which trivial answers would pass."""
        case = self.case
        if inputs_seed != self.entry["seed"]:
            case = case.with_inputs(self._case(inputs_seed).inputs)
        with blaming(OracleError):
            baseline, structure, model = answer(self.loaded, case, self.device)
            left = state.changed(model, state.watched(case.state)) if first and self.entry["variant"] is None else {}
            del model
            oracle, precision = problem.oracle_outputs(self.loaded, case, self.device)
        expected = {
            "baseline": baseline,
            "oracle": oracle,
            "precision": precision,
            "random": False,
            "trivial_answers": [],
        }
        expected |= {"structure": structure, "state": left}
        expected["usual_rms"] = self._usual_rms(inputs_seed, oracle)
        if first and self.entry["variant"] is None:
            with blaming(OracleError):
                again = outputs(self.loaded, case, self.device, draw=1)
            bounds = self._bounds(baseline)
            repeated = [
                accuracy.compare(*three, b) for *three, b in zip(again, baseline, baseline, bounds, strict=True)
            ]
            expected["random"] = any(one["mismatches"] + one["nonfinite"] for one in repeated)
            expected["trivial_answers"] = self._trivial_answers(case, expected) if self.entry["first"] else []
        return expected

    def _usual_rms(self, seed: int, oracle: list[torch.Tensor]) -> list[float]:
        """The rms of each output on other contents of the same sizes, where a single one, a sum near 0, is no scale;
        else 0."""
        sizes = self.entry["variant"] and self.entry["variant"]["sizes"]
        if not sizes or not any(tensor.numel() < accuracy.FEW for tensor in oracle):
            return [0.0] * len(oracle)
        try:
            other = self.maker.case(self.entry["workload"], seed, self.entry["variant"], from_the_end=True)
            usual = map(accuracy.comparable, outputs(self.loaded, other, self.device))
        except Exception:  # the reference may refuse contents that we made
            return [0.0] * len(oracle)
        return [accuracy.root_mean_square(torch.where(torch.isfinite(tensor), tensor, 0)) for tensor in usual]

    def _trivial_answers(self, case: problem.Case, expected: dict) -> list[str]:
        """Answers that compute nothing and would pass on this workload (see accuracy.trivial_answers)."""
        with blaming(OracleError):
            twins = outputs(self.loaded, self._case(self.entry["seed"] + 1), self.device)
        baseline = expected["baseline"]
        if len(twins) != len(baseline):
            return []
        given = case.placed_inputs(self.device)
        return accuracy.trivial_answers(expected["oracle"], baseline, given, twins, self._bounds(baseline))


def outputs(loaded: problem.Reference, case: problem.Case, device: str, draw: int = 0) -> list[torch.Tensor]:
    """The reference's results in the task's own dtype. Another `draw` gives it other random numbers, if it uses any."""
    return answer(loaded, case, device, draw)[0]


def answer(
    loaded: problem.Reference, case: problem.Case, device: str, draw: int = 0
) -> tuple[list[torch.Tensor], str, torch.nn.Module]:
    """(`outputs`, their problem.structure, the model after the call)."""
    model, inputs = loaded.model(case, device), case.placed_inputs(device)
    torch.manual_seed(draw)
    result = problem.call(model, inputs)
    returned = tensor_trees.tensors(result)
    if not returned:
        raise problem.ContractError("the reference returns no tensor")
    return returned, tensor_trees.structure(result), model
