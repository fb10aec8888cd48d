"""The jobs before a candidate runs: the inputs of a task written to files, and its least work."""

import pickle
import re
from pathlib import Path

from ..case_types import Variant
from . import contract, problem, reference_runs, sampling, tensor_trees, variant_inputs, variants, work
from .case_maker import CaseMaker
from .context import Context, load_reference
from .faults import OracleError, blaming

TRIED_BYTES = 1 << 20  # of inputs and parameters: the reference may take long over more on a CPU


def estimate(context: Context, reference: str, dtype: str | None, workloads: list[str] | None) -> dict:
    """The least work per workload (see work.estimate)."""
    loaded = load_reference(reference)
    with blaming(OracleError):
        names = loaded.chosen(workloads)
        return {"workloads": {name: work.estimate(loaded, name, dtype, context.device) for name in names}}


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
    maker = CaseMaker(loaded, dtype, context.device)
    with blaming(OracleError):
        names = loaded.chosen(workloads)
        for workload in names:
            cases += own_cases(maker, workload, seeds, at_least, limit_bytes, folder)
        for workload in names if with_variants else []:
            case = maker.case(workload, seeds[-1])
            full, own_sizes = workload == names[0], context.device == "cuda"  # the interpreter would take minutes
            possible = variants.of_workload(loaded, workload, case, full, own_sizes)
            sound, failing = taken(seeded(possible, seeds[-1]), loaded, maker, workload)
            left_out += failing
            cases += [store(maker, workload, seed, variant, folder) for variant, seed in sound]
    every = list(loaded.workloads)
    return {"cases": cases, "declared": loaded.declared(), "left_out": left_out, "workloads": every}


def own_cases(
    maker: CaseMaker, workload: str, seeds: list[int], at_least: int, limit_bytes: int, folder: str
) -> list[dict]:
    """The stored cases of a workload, in the order of their seeds, which are taken from the end: the secret ones are
    last."""
    cases: list[dict] = []
    total = 0
    for number, seed in enumerate(reversed(seeds)):
        if number >= at_least and total > limit_bytes:
            break
        cases.insert(0, store(maker, workload, seed, None, folder))
        total += Path(cases[0]["path"]).stat().st_size
    return cases


def seeded(possible: list[Variant], seed: int) -> list[tuple[Variant, int]]:
    """Each variant with the seed of its inputs: those that are cut out of the task's own inputs with their seed, each
    that get_inputs makes with another one, so that they hold other lengths and indices too."""
    return [(one, seed + number if one.keywords else seed) for number, one in enumerate(possible, start=1)]


def taken(
    possible: list[tuple[Variant, int]], loaded: problem.Reference, maker: CaseMaker, workload: str
) -> tuple[list[tuple[Variant, int]], list[str]]:
    """(the variants whose contents the reference takes, each with its seed; the names of variants of the task's own
    making that it fails on). Contents that it takes: probabilities within 0 and 1, indices within a buffer.

    The trial runs on the CPU, because a process cannot use the GPU again after a failed access. Large inputs count as
    taken. So does every input when the reference cannot run on a CPU, except whole numbers of our own, which may be
    indices out of range."""
    answers: dict[int, bool] = {}
    tried: dict[int, bool] = {}
    failing: list[str] = []
    for number, (variant, seed) in enumerate(possible):
        try:
            case = maker.case(workload, seed, variant)
        except Exception as error:
            answers[number] = False
            failing += [variant.name] if variant.of_task and not isinstance(error, ValueError) else []
            continue
        size = sum(tensor.nbytes for tensor in [*tensor_trees.input_tensors(case.inputs), *case.state.values()])
        if variant.keywords and size > variants.LARGE_BYTES:
            answers[number] = False
        elif size <= TRIED_BYTES:
            tried[number] = runs(loaded, case)
    if any(tried[number] and possible[number][0].values is None for number in tried):  # it can run on a CPU
        answers |= tried
        broken = (possible[number][0] for number in tried if not tried[number])
        failing += [variant.name for variant in broken if variant.of_task]
    flags = variant_inputs.FLAGS
    return [pair for number, pair in enumerate(possible) if answers.get(number, pair[0].values != flags)], failing


def runs(loaded: problem.Reference, case: problem.Case) -> bool:
    try:
        results = reference_runs.outputs(loaded, case, "cpu")
        return all(sampling.are_distributions(results[at]) for at in loaded.declarations.samples)
    except Exception:
        return False


def store(maker: CaseMaker, workload: str, seed: int, variant: Variant | None, folder: str) -> dict:
    """Write one case; returns the fields of measure.cases.Case."""
    case = maker.case(workload, seed, variant)
    path = Path(folder) / f"input-{len(list(Path(folder).iterdir()))}.pt"
    case.save(path)
    try:
        problem.Case.load(path)
    except pickle.UnpicklingError as error:
        kind = re.search(r"GLOBAL (\S+)", str(error))
        raise contract.unstorable(kind[1] if kind else "value") from None
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
        "compares": bool(declared.compare),
        "names": declared.names_of_tensors(case.inputs),
        "mutates": declared.mutated_tensors(case.inputs),
    }
