"""The jobs before a candidate runs: the inputs of a task written to files, and its least work."""

import itertools
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..case_types import PLAIN, Variant
from . import problem, reference_runs, sampling, size_trials, tensor_trees, variant_inputs, variants, work, work_limit
from .case_files import CaseFiles
from .case_maker import CaseMaker
from .context import Context, load_reference
from .contract import TooLargeToInterpret
from .declarations import Declarations
from .faults import OracleError, blaming

KEPT_BYTES = 256 << 20  # of variants' inputs and parameters that stay in memory from their trial until they are stored


def estimate(context: Context, reference: str, dtype: str | None, workloads: list[str] | None) -> dict:
    """The least work per workload (see work.estimate)."""
    loaded = load_reference(reference, context.device)
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
    most_elements: int | None = None,
) -> dict:
    """Write the inputs of each workload and seed to a file, so that the candidate never needs the reference.

    A workload gets no more seeds once its files hold limit_bytes, but it always gets the last `at_least` seeds.
    with_variants: also write cases on other shapes, layouts and values that the reference takes, mostly for the first
    workload. most_elements: of a workload's inputs; TooLargeToInterpret for more."""
    loaded, own, others, left_out = load_reference(reference, context.device), [], [], []
    maker = CaseMaker(loaded, dtype, context.device)
    with blaming(OracleError), CaseFiles(Path(folder)) as files:
        names = loaded.chosen(workloads)
        for workload in names:
            check_elements(maker.case(workload, seeds[-1]), workload, most_elements)
            last = store(maker, files, workload, seeds[-1])
            files.settle()  # no other thread may import anything while shapes are tried (blank.without_compilers)
            if with_variants:  # while the inputs of that seed, which they are cut out of, are at hand
                # At its own sizes the interpreter would take minutes.
                kinds = {"full": workload == names[0], "own_sizes": context.device == "cuda"}
                found = sound_variants(maker, workload, seeds[-1], kinds)
                left_out += found.failing
                others += [store(maker, files, workload, one.seed, one.variant, one.case) for one in found.sound]
            own += [*more_seeds(maker, files, workload, seeds[:-1], at_least - 1, limit_bytes - last.bytes), last]
    stored = [*own, *others]
    return {
        "cases": [one.fields for one in stored],
        "declared": loaded.declared(),
        "left_out": left_out,
        "workloads": list(loaded.workloads),
        "fixed": fixed(stored) if with_variants else {},
    }


def check_elements(case: problem.Case, workload: str, most: int | None) -> None:
    elements = sum(tensor.numel() for tensor in tensor_trees.input_tensors(case.inputs))
    if most is not None and elements > most:
        raise TooLargeToInterpret(
            f"the inputs of the workload {workload} hold {elements} elements, too many for the CPU interpreter: name a "
            "small workload with --workload, or give it a copy of the reference with few rows, each as long as before"
        )


@dataclass(frozen=True)
class StoredInputs:
    """The fields of a measure.cases.Case, and the bytes that its file holds. whole: for each whole number, and tensor
    of such, the name of its parameter and the one number that it holds, None where there are several."""

    fields: dict
    bytes: int
    whole: list[tuple[str, int | None]]


def fixed(stored: list[StoredInputs]) -> dict[str, int]:
    """The parameters of forward that hold one whole number in all cases, and that number. No variant changes such a
    number, since it may be an index. Memory that get_inputs leaves unset holds the largest one."""
    held: dict[str, set[int | None]] = {}
    for name, number in itertools.chain.from_iterable(one.whole for one in stored):
        held.setdefault(name, set()).add(number)
    return {name: next(iter(found)) for name, found in held.items() if len(found) == 1 and None not in found}


def more_seeds(
    maker: CaseMaker, files: CaseFiles, workload: str, seeds: list[int], at_least: int, limit_bytes: int
) -> list[StoredInputs]:
    """The stored cases of a workload, in the order of their seeds, which are taken from the end: the secret ones are
    last."""
    cases: list[StoredInputs] = []
    for number, seed in enumerate(reversed(seeds)):
        if number >= at_least and sum(case.bytes for case in cases) > limit_bytes:
            break
        cases.insert(0, store(maker, files, workload, seed))
    return cases


@dataclass(frozen=True)
class SoundVariant:
    """A variant that the reference takes, and the seed of its inputs. case: its inputs, where they were kept."""

    variant: Variant
    seed: int
    case: problem.Case | None = None


@dataclass(frozen=True)
class Taken:
    """The variants that the reference takes; the names of those of the task's own making that it fails on; and whether
    inputs could not be made of sizes whose shapes pass."""

    sound: list[SoundVariant]
    failing: list[str]
    misled: bool = False


def sound_variants(maker: CaseMaker, workload: str, seed: int, kinds: dict[str, bool]) -> Taken:
    """The variants of a workload that the reference takes. kinds: options of variants.of_workload. Sizes are chosen by
    shapes alone; where the contents of any then fail, they are chosen once more by contents."""
    found = Taken([], [])
    for trust_shapes in (True, False):
        case = maker.case(workload, seed)
        possible = variants.of_workload(maker.loaded, workload, case, **kinds, trust_shapes=trust_shapes)
        found = taken(seeded(possible, seed), maker, workload)
        if not found.misled:
            break
    return found


def seeded(possible: list[Variant], seed: int) -> list[tuple[Variant, int]]:
    """Each variant with the seed of its inputs: those that are cut out of the task's own inputs with their seed, each
    that get_inputs makes with another one, so that they hold other lengths and indices too."""
    return [(one, seed + number if one.keywords else seed) for number, one in enumerate(possible, start=1)]


def taken(possible: list[tuple[Variant, int]], maker: CaseMaker, workload: str) -> Taken:
    """Which of the variants, each with its seed, the reference takes the contents of: probabilities within 0 and 1,
    indices within a buffer.

    The trial runs on the CPU, because a process cannot use the GPU again after a failed access. Large inputs, much
    work, and what is in reserve count as taken where their layout or values were, or were not tried. So does every
    input when the reference cannot run on a CPU, except whole numbers of our own, which may be indices out of range."""
    made = tried(possible, maker, workload)
    ran = made.ran if any(made.ran[at] and possible[at][0].values is None for at in made.ran) else {}  # on a CPU at all
    of_change = {change: ran[at] for at in ran if (change := change_of(possible[at][0]))}
    sound = [
        SoundVariant(variant, seed, made.kept.get(number))
        for number, (variant, seed) in enumerate(possible)
        if number not in made.refused
        and ran.get(number, of_change.get(change_of(variant), variant.values != variant_inputs.FLAGS))
    ]
    broken = (possible[at][0] for at in ran if not ran[at])
    return Taken(sound, made.failing + [variant.name for variant in broken if variant.of_task], made.misled)


@dataclass
class Tried:
    """What came of the variants, by number. refused: inputs that are too large, or could not be made. ran: does the
    reference run on them, where that was tried? kept: some of the inputs. failing, misled: see Taken."""

    refused: set[int] = field(default_factory=set)
    ran: dict[int, bool] = field(default_factory=dict)
    kept: dict[int, problem.Case] = field(default_factory=dict)
    failing: list[str] = field(default_factory=list)
    misled: bool = False


def tried(possible: list[tuple[Variant, int]], maker: CaseMaker, workload: str) -> Tried:
    """Make the inputs of each variant, and try the reference on small ones. Those of keyword sizes that are too large
    to be judged are not made where shapes show it."""
    found, shapes = Tried(), ShownBytes(maker, workload)
    kept_bytes, reserve_bytes = 0, 0
    for number, (variant, seed) in enumerate(possible):
        shown = shapes.of(variant, seed)
        most = variants.RESERVE_BYTES - reserve_bytes if variant.instead_of else variants.LARGE_BYTES
        if shown is not None and shown > most:
            found.refused.add(number)
            continue
        try:
            case = maker.case(workload, seed, variant)
        except Exception as error:
            found.refused.add(number)
            found.failing += [variant.name] if variant.of_task and not isinstance(error, ValueError) else []
            found.misled |= shown is not None
            continue
        size = sum(tensor.nbytes for tensor in [*tensor_trees.input_tensors(case.inputs), *case.state.values()])
        if variant.keywords and size > most:
            found.refused.add(number)
            continue
        reserve_bytes += size if variant.instead_of else 0
        small = size <= size_trials.TRIED_BYTES and not variant.instead_of
        if small and (answer := runs(maker.loaded, case)) is not None:
            found.ran[number] = answer
        if kept_bytes + size <= KEPT_BYTES:
            found.kept[number], kept_bytes = case, kept_bytes + size
    return found


def change_of(variant: Variant) -> tuple | None:
    """The layout and the values of a variant, which the reference takes at all sizes or at none; None where it changes
    neither."""
    changed = variant.layout, variant.values
    return None if changed == (PLAIN, None) else changed


class ShownBytes:
    """The bytes that variants of keyword sizes hold, by shapes alone. They are asked for once a set of sizes; for each
    seed where they are too many."""

    def __init__(self, maker: CaseMaker, workload: str):
        self._maker, self._workload = maker, workload
        self._known: dict[tuple, int | None] = {}

    def of(self, variant: Variant, seed: int) -> int | None:
        """None where shapes do not tell, and of a variant of other kinds."""
        if not variant.keywords:
            return None
        sizes = tuple(sorted(variant.keywords.items()))
        if sizes not in self._known or (self._known[sizes] or 0) > variants.LARGE_BYTES:
            shown = self._maker.held(self._workload, seed, variant)
            self._known[sizes] = shown and shown.inputs + shown.state
        return self._known[sizes]


def runs(loaded: problem.Reference, case: problem.Case) -> bool | None:
    """Does the reference run on the case? None where that is too much work to be seen."""
    try:
        results = work_limit.limited(lambda: reference_runs.outputs(loaded.apart("cpu"), case, "cpu"))
        return all(sampling.are_distributions(results[at]) for at in loaded.declarations.samples)
    except work_limit.TooMuchWork:
        return None
    except Exception:
        return False


def store(
    maker: CaseMaker,
    files: CaseFiles,
    workload: str,
    seed: int,
    variant: Variant | None = None,
    made: problem.Case | None = None,
) -> StoredInputs:
    """Have one case written. made: its inputs, where they are at hand."""
    case = made or maker.case(workload, seed, variant)
    file = files.add(case)
    arguments, declared = tensor_trees.input_tensors(case.inputs), maker.declarations
    dtype = tensor_trees.dominant_dtype(arguments + list(case.state.values()))
    shapes = [list(tensor.shape) for tensor in arguments]
    fields = {
        "workload": workload,
        "seed": seed,
        "variant": variant,
        "path": str(file.path),
        "state_path": file.state_path and str(file.state_path),
        "dtype": dtype,
        "shapes": shapes,
        "samples": maker.samples(case, variant),
        "repeatable": bool(declared.samples),
        "compares": bool(declared.compare),
        "names": declared.names_of_tensors(case.inputs),
        "mutates": declared.mutated_tensors(case.inputs),
        "contents": [] if variant else case.fingerprints(),
    }
    return StoredInputs(fields, file.bytes, whole_numbers(case.inputs, declared))


def whole_numbers(inputs: list, declared: Declarations) -> list[tuple[str, int | None]]:
    """StoredInputs.whole of the inputs of a case."""
    named = [(declared.name(at), leaf) for at, value in enumerate(inputs) for leaf in tensor_trees.leaves(value)]
    return [(name, one_number(leaf)) for name, leaf in named if is_whole(leaf)]


def is_whole(leaf) -> bool:
    if isinstance(leaf, torch.Tensor):
        return variant_inputs.whole(leaf) and leaf.numel() > 0
    return type(leaf) is int


def one_number(leaf: torch.Tensor | int) -> int | None:
    if isinstance(leaf, int):
        return leaf
    low, high = map(int, torch.aminmax(leaf))
    return low if low == high != torch.iinfo(leaf.dtype).max else None
