"""Jobs that run the reference and never load a candidate: the work it takes, and its inputs."""

import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import TypedDict

from ..case_types import Variant
from . import judging, problem, sampling, tensor_trees, variant_inputs, variants, work
from .context import Context, load_reference
from .declarations import DeclaredJson
from .drawn_values import OtherDraws, free_numbers
from .faults import OracleError, blaming


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
    loaded, cases, left_out = load_reference(reference), [], []
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
            for variant, seed in taken(seeded(possible, seeds[-1]), loaded, maker, workload, left_out):
                cases.append(store(maker, workload, seed, variant, folder))
    every = list(loaded.workloads)
    return {"cases": cases, "declared": declared_by(loaded), "left_out": left_out, "workloads": every}


def declared_by(loaded: problem.Reference) -> DeclaredJson:
    """What the reference declares, sizes among it."""
    declared, sizes = loaded.declarations.to_json(), {name: own for name, own in loaded.sizes.items() if own}
    return {**declared, "sizes": sizes} if sizes else declared


TRIED_BYTES = 1 << 20  # of inputs and parameters: the reference may take long over more on a CPU


def seeded(possible: list[Variant], seed: int) -> list[tuple[Variant, int]]:
    """Each variant with the seed of its inputs: those that are cut out of the task's own inputs with their seed, each
    that get_inputs makes with another one, so that they hold other lengths and indices too."""
    return [(one, seed + number if one.keywords else seed) for number, one in enumerate(possible, start=1)]


def taken(
    possible: list[tuple[Variant, int]], loaded: problem.Reference, maker: "Maker", workload: str, left_out: list[str]
) -> list[tuple[Variant, int]]:
    """The variants whose contents the reference takes: probabilities within 0 and 1, indices within a buffer. Each
    comes with its seed.

    The trial runs on the CPU, because a process cannot use the GPU again after a failed access. Large inputs count as
    taken. So does every input when the reference cannot run on a CPU, except whole numbers of our own, which may be
    indices out of range. left_out: gets the names of variants of the task's own making that the reference fails on."""
    answers, cases = {}, {}
    for number, (variant, seed) in enumerate(possible):
        try:
            case = maker.case(workload, seed, variant)
        except Exception as error:
            answers[number] = False
            left_out += [variant.name] if variant.of_task and not isinstance(error, ValueError) else []
            continue
        size = sum(tensor.nbytes for tensor in [*tensor_trees.input_tensors(case.inputs), *case.state.values()])
        if variant.keywords and size > variants.LARGE_BYTES:
            answers[number] = False
        elif size <= TRIED_BYTES:
            cases[number] = runs(loaded, case)
    if any(cases[number] and possible[number][0].values is None for number in cases):  # it can run on a CPU
        answers |= cases
        broken = (possible[number][0] for number in cases if not cases[number])
        left_out += [variant.name for variant in broken if variant.of_task]
    flags = variant_inputs.FLAGS
    return [pair for number, pair in enumerate(possible) if answers.get(number, pair[0].values != flags)]


def runs(loaded: problem.Reference, case: problem.Case) -> bool:
    try:
        results = judging.outputs(loaded, case, "cpu")
        return all(sampling.are_distributions(results[at]) for at in loaded.declarations.samples)
    except Exception:
        return False


class Draws(TypedDict):
    """How an output is to be drawn: its position, the position of the seed's argument, and the number of calls."""

    output: int
    seed: int
    calls: int


class Maker:
    """Makes cases of a reference; the last one is kept, since variants are cut out of it."""

    def __init__(self, loaded: problem.Reference, dtype: str | None, device: str):
        self._loaded, self._dtype, self._device = loaded, dtype, device
        self._last: tuple = (None, None)
        self.declarations = loaded.declarations

    def samples(self, case: problem.Case, variant: Variant | None) -> list[Draws]:
        """The outputs of a case that are drawn at random, over many seeds on the task's own inputs and with other
        numbers among them, over few at one other set of sizes and with unequal rows, and not at all on other
        variants."""
        many = variant is None or variant.values == variant_inputs.OTHER_NUMBERS
        few = variant and (variant.name == variants.JUST_BELOW or variant.values == variant_inputs.UNEQUAL_ROWS)
        if not self.declarations.samples or not (many or few):
            return []
        probabilities = judging.outputs(self._loaded, case, self._device)
        return [
            Draws(
                output=at,
                seed=one.seed,
                calls=sampling.calls_needed(one, probabilities[at], self._device, own=many),
            )
            for at, one in self.declarations.samples.items()
            if at < len(probabilities)
        ]

    def case(
        self, workload: str, seed: int, variant: Variant | None = None, from_the_end: bool = False
    ) -> problem.Case:
        """The inputs and parameters of a seed, made or cut to the sizes of a variant. from_the_end: other elements of
        them."""
        keywords = variant.keywords if variant else {}
        if keywords and from_the_end:
            seed, from_the_end = seed + 1, False
        by_keywords = bool(self._loaded.sizes[workload])
        drawn = variant.values if variant and by_keywords and variant.values in variant_inputs.VALUES else None
        key = workload, seed, tuple(keywords.items()), drawn
        if self._last[0] != key:
            self._last = (None, None)  # so that two do not lie in memory
            within = OtherDraws(drawn) if drawn else None
            self._last = key, self._loaded.case(workload, seed, self._dtype, self._device, keywords, within)
        if not variant:
            return self._last[1]
        rest = replace(variant, values=None) if drawn else variant
        made = variant_inputs.of_case(self._last[1], rest, from_the_end)
        if variant.values == variant_inputs.UNEQUAL_ROWS:
            another = self._loaded.case(workload, seed + 1, self._dtype, self._device, keywords)
            another = variant_inputs.of_case(another, rest, from_the_end)
            made = made.with_inputs(variant_inputs.unequal(made.inputs, another.inputs))
        return made.with_inputs(self._other_numbers(made.inputs, workload, keywords, variant.values))

    def _other_numbers(self, inputs: list, workload: str, keywords: dict[str, int], values: str | None) -> list:
        """The inputs, with the seeds or floating numbers that a variant wants."""
        if values == variant_inputs.OTHER_SEED:
            seeds = self.declarations.seeds()
            return [variant_inputs.reseeded(value) if at in seeds else value for at, value in enumerate(inputs)]
        if values == variant_inputs.OTHER_NUMBERS:
            free = free_numbers(self._loaded, workload, self._dtype, keywords)
            return variant_inputs.other_numbers(inputs, free)
        return inputs


def unstorable(kind: str) -> problem.ContractError:
    return problem.ContractError(
        f"get_inputs or get_init_inputs gives a {kind}, which cannot be stored; give "
        "tensors, numbers, strings, dtypes, None, and lists, dicts, named tuples and dataclasses of them"
    )


def store(maker: Maker, workload: str, seed: int, variant: Variant | None, folder: str) -> dict:
    """Write one case: {workload, seed, variant, path, dtype, shapes, names, mutates}. names: of the parameters that
    hold the tensors. mutates: numbers of those that forward is declared to change."""
    case = maker.case(workload, seed, variant)
    path = Path(folder) / f"input-{len(list(Path(folder).iterdir()))}.pt"
    case.save(path)
    try:
        problem.Case.load(path)
    except pickle.UnpicklingError as error:
        kind = re.search(r"GLOBAL (\S+)", str(error))
        raise unstorable(kind[1] if kind else "value") from None
    arguments, declared = tensor_trees.input_tensors(case.inputs), maker.declarations
    dtype = tensor_trees.dominant_dtype(arguments + list(case.state.values()))
    shapes = [list(tensor.shape) for tensor in arguments]
    return {
        "workload": workload,
        "seed": seed,
        "variant": variant,
        "path": str(path),
        "dtype": dtype,
        "shapes": shapes,
        "samples": maker.samples(case, variant),
        "repeatable": bool(declared.samples),
        "names": declared.names_of_tensors(case.inputs),
        "mutates": declared.mutated_tensors(case.inputs),
    }
