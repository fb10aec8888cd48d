"""Shapes, layouts and values beyond the task's own on which a kernel must be right or decline the call.

The reference decides which dimensions may change, and which only together: its shapes are tried without data.
Imported by worker processes only.
"""

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch

from ..case_types import PLAIN, Variant
from . import blank, drawn_values, keyword_sizes, problem, size_trials, tensor_trees, variant_inputs, work_limit
from .keyword_sizes import Keywords, beyond, prime_below, small_prime

JUST_BELOW = "primes just below"
LARGER = "larger sizes"
SMALL = "prime sizes"
NARROW = 3
MOST_DIMENSIONS = 16  # that are tried
MOST_ALONE = 4  # groups that change alone, the largest first
TINY_BYTES = 1 << 20  # of inputs: one more case costs almost nothing
LARGE_BYTES = 256 << 20  # of inputs; beyond that "just below" is far below
RESERVE_BYTES = 128 << 20  # of inputs and parameters of all cases in reserve, which few kernels are called on
OWN_BYTES = 16 << 20  # of a workload's inputs: so many are kept in reserve where no smaller ones are possible
NOT_HALVED = (variant_inputs.SCALED, variant_inputs.OTHER_NUMBERS)
RUN_BYTES = 64 << 20  # the largest changed inputs on which the reference runs on the CPU
FIRST = 2  # variants of values, and one more of layouts, where each file is nearly as large as the task's own
LAYOUTS = ("transposed inputs", "outer dimensions swapped", "misaligned inputs", "padded inputs")
ONE_TRANSPOSED = re.compile(r"input (\d+) transposed")

Group = list[tuple[int, int, int]]  # (input, dimension, size): dimensions that change together
Sizes = list[list[int]]  # [input, dimension, new size]
Named = tuple[str, Sizes]


def of_workload(
    reference: problem.Reference,
    workload: str,
    case: problem.Case,
    full: bool,
    own_sizes: bool = False,
    trust_shapes: bool = True,
) -> list[Variant]:
    """Variants of the workload of this case.

    There are always primes just below the workload's own sizes, and where keyword sizes are small, larger ones. full:
    adds other sizes, layouts and values. own_sizes: adds a layout and values at the workload's own sizes, which a
    kernel may treat differently from small ones. trust_shapes: see `size_trials.trial`."""
    if reference.sizes[workload]:
        return of_keywords(reference, workload, case, full, own_sizes, trust_shapes)
    shapes = Shapes(reference, workload, case)
    groups = shapes.groups()
    just_below_own = [(JUST_BELOW, resized(groups, just_below(case.inputs)))] if groups else []
    if not full:
        return of_sizes(shapes, just_below_own)
    small = shapes.possible(resized(groups, small_prime))
    made = of_sizes(shapes, [*just_below_own, *other_sizes(shapes, groups, small)])
    layouts_too = reference.declarations.layouts is None
    made += at_small_sizes(shapes, case, small, layouts_too)
    if shapes.holds_number() and drawn_values.free_numbers(reference, workload, case.dtype, {}):
        made.append(Variant(variant_inputs.OTHER_NUMBERS, small, values=variant_inputs.OTHER_NUMBERS))
    if own_sizes and small and shapes.small([]):
        made += at_own_sizes(shapes, layouts_too)
    return made + (in_reserve(made, small) if small and shapes.tiny() else [])


def of_keywords(
    reference: problem.Reference,
    workload: str,
    case: problem.Case,
    full: bool,
    own_sizes: bool = False,
    trust_shapes: bool = True,
) -> list[Variant]:
    """Variants of a workload whose sizes are keyword arguments. Whole numbers keep their values, for they may be
    indices. Some of the sizes may be no case of the task (preparing.taken)."""
    sizes = reference.sizes[workload]
    below = keyword_sizes.just_below(sizes)
    made = [Variant(JUST_BELOW, [], keywords=below)] if below else []
    possible = size_trials.trial(reference, workload, case.dtype, LARGE_BYTES, trust_shapes)
    shapes = Shapes(reference, workload, case)
    larger = keyword_sizes.larger(sizes, possible, structures=full) if shapes.tiny() else {}
    if not full:
        return made + ([Variant(LARGER, [], keywords=larger)] if larger else [])
    small = keyword_sizes.smallest(sizes, possible)
    named = keyword_sizes.other_sizes(sizes, small, larger, narrow=not shapes.small([]), possible=possible)
    for name, keywords in [(LARGER, larger), *named]:  # of two names for the same sizes the first stays
        if keywords and {**sizes, **keywords} not in [sizes, *({**sizes, **one.keywords} for one in made)]:
            made.append(Variant(name, [], keywords=keywords))
    layouts_too = reference.declarations.layouts is None
    others = [one for one in at_small_sizes(shapes, case, [], layouts_too) if one.values != variant_inputs.FLAGS]
    made += [replace(one, keywords=small) for one in others]
    if drawn_values.free_numbers(reference, workload, case.dtype, small):
        numbers = Variant(variant_inputs.OTHER_NUMBERS, [], values=variant_inputs.OTHER_NUMBERS)
        others.append(numbers)
        made += other_numbers(numbers, small, {} if reference.declarations.samples else larger)
    if not small:  # the others are at the task's own sizes already
        return made
    if own_sizes and shapes.small([]):
        made += at_own_sizes(shapes, layouts_too=False)
    halved = {} if shapes.tiny() else keyword_sizes.halved(sizes, possible)
    if halved:
        return made + [at_halved(one, halved) for one in others if one.values not in NOT_HALVED]
    return made + (besides(made, map(at_own, others)) if shapes.few_bytes() else [])


def other_numbers(numbers: Variant, small: Keywords, larger: Keywords) -> list[Variant]:
    """Twice where inputs may be larger: a threshold decides little among few elements, and a single loss may be the
    same by chance. larger: none where outputs are drawn, since many rows take long to draw."""
    made = [replace(numbers, keywords=larger or small)]
    return made + [replace(numbers, name=f"{numbers.name}, {SMALL}", keywords=small)] * bool(larger)


def of_sizes(shapes: "Shapes", wanted: Iterable[Named]) -> list[Variant]:
    """A variant for each of these sizes that the reference takes. Equal sizes give one variant, whatever its name."""
    made, seen = [], []
    for name, sizes in dict(wanted).items():
        sizes = shapes.possible(sizes)
        if sizes and sizes not in seen:
            seen.append(sizes)
            made.append(Variant(name, sizes))
    return made


def other_sizes(shapes: "Shapes", groups: list[Group], small: Sizes) -> Iterator[Named]:
    """All sizes except the primes just below. small: small primes in all places."""
    yield SMALL, small
    yield from edge_sizes(shapes, groups, small)
    yield from sizes_alone(groups)
    for sizes_of in (beyond_sizes, part_sizes, batch_sizes):
        yield from ((name, sizes) for name, sizes in sizes_of(shapes, groups, small) if shapes.small(sizes))


def edge_sizes(shapes: "Shapes", groups: list[Group], small: Sizes) -> Iterator[Named]:
    """A narrow last dimension, and one element less and more than a tile."""
    last = [group for group in groups if group[0][1] == len(shapes.inputs[group[0][0]].shape) - 1]
    yield "narrow", resized(last, lambda _: NARROW) + [size for size in small if not changes(last, size)]
    yield "block - 1", resized(groups, lambda size: block(size) - 1)
    yield "block + 1", resized(groups, lambda size: min(size, block(size) + 1))


def sizes_alone(groups: list[Group]) -> Iterator[Named]:
    """1 and a small prime in one place at a time: a kernel may be limited to one size, such as the width of a head."""
    for group in largest(groups):
        for size_of in (lambda _: 1, small_prime):
            yield alone(group, size_of), resized([group], size_of)


def beyond_sizes(shapes: "Shapes", groups: list[Group], small: Sizes) -> Iterator[Named]:
    """More than a tile of the task's own in one place, small primes in the others."""
    for group in largest(groups):
        yield alone(group, beyond), [size for size in small if not changes([group], size)] + resized([group], beyond)


def part_sizes(shapes: "Shapes", groups: list[Group], small: Sizes) -> Iterator[Named]:
    """Dimensions of one size that change apart."""
    for part in shapes.parts(groups):
        yield f"{alone(part, small_prime)}, others of its size stay", resized([part], small_prime)


def batch_sizes(shapes: "Shapes", groups: list[Group], small: Sizes) -> Iterator[Named]:
    """A small batch with one more element."""
    for group in shapes.batches():
        yield f"batch of {one_more(group[0][2])} (input {group[0][0]})", small + resized([group], one_more)


def at_small_sizes(shapes: "Shapes", case: problem.Case, small: Sizes, layouts_too: bool = True) -> Iterator[Variant]:
    """Other values and layouts. There are only a few whose files are nearly as large as the task's own."""
    few = not shapes.small(small)
    values = list(variant_inputs.VALUES) if shapes.floating() else []
    for name in values[: FIRST if few else None]:
        yield Variant(name, small, values=name)
    held = [*shapes.inputs, *(tensor for tensor in case.state.values() if not tensor.is_floating_point())]
    if any(map(variant_inputs.constant, held)):
        yield Variant(variant_inputs.CONSTANTS, small, values=variant_inputs.CONSTANTS)
    if any(map(variant_inputs.constant_flags, held)):
        yield Variant(variant_inputs.FLAGS, small, values=variant_inputs.FLAGS)
    if any(variant_inputs.may_be_seed(case.inputs[at]) for at in shapes.seeds() if at < len(case.inputs)):
        yield Variant(variant_inputs.OTHER_SEED, small, values=variant_inputs.OTHER_SEED)
    if shapes.samples() and any(variant_inputs.has_equal_rows(tensor) for tensor in shapes.inputs if tensor.dim() > 1):
        yield Variant(variant_inputs.UNEQUAL_ROWS, [], values=variant_inputs.UNEQUAL_ROWS)
    for layout in layouts(shapes.inputs)[: FIRST + 1 if few else None] if layouts_too else []:
        yield Variant(layout, small, layout)


def at_own_sizes(shapes: "Shapes", layouts_too: bool = True) -> Iterator[Variant]:
    """One layout and, for floating inputs, one change of values."""
    if layouts_too and may_be_strided(shapes.inputs):
        yield Variant("transposed inputs, own sizes", [], "transposed inputs")
    if shapes.floating():
        yield Variant("nothing positive, own sizes", [], values="nothing positive")


def largest(groups: list[Group]) -> list[Group]:
    """The groups that are changed alone."""
    return sorted(groups, key=lambda group: -group[0][2])[:MOST_ALONE]


def alone(group: Group, size_of) -> str:
    """ "300 -> 127 (input 0, dimension 0)" """
    number, dimension, size = group[0]
    return f"{size} -> {size_of(size)} (input {number}, dimension {dimension})"


def in_reserve(made: list[Variant], small: Sizes) -> list[Variant]:
    """The layouts and values of those sizes at the workload's own, each for a kernel that declines the other
    (`instead_of`)."""
    other = [one for one in made if one.sizes == small and (one.layout != PLAIN or one.values)]
    return [one for one in besides(made, map(at_own, other)) if one.values != variant_inputs.SCALED]


def besides(made: list[Variant], more: Iterable[Variant]) -> list[Variant]:
    """Those that are not made yet, by their names."""
    names = {one.name for one in made}
    return [one for one in more if one.name not in names]


def at_halved(one: Variant, halved: Keywords) -> Variant:
    """The variant at halved sizes, for a kernel that declines it at small primes: one that wants whole tiles takes them
    still."""
    return replace(one, name=f"{one.name}, halved sizes", keywords=halved, instead_of=one.name)


def at_own(one: Variant) -> Variant:
    """The variant at the workload's own sizes, for a kernel that declines it at others."""
    return replace(one, name=f"{one.name}, own sizes", sizes=[], keywords={}, instead_of=one.name)


def resized(groups: list[Group], size_of) -> Sizes:
    """The new sizes of all dimensions of the groups; unchanged ones are left out."""
    return [[i, d, size_of(size)] for group in groups for i, d, size in group if size_of(size) != size]


def changes(groups: list[Group], size: list[int]) -> bool:
    return any((i, d) == tuple(size[:2]) for group in groups for i, d, _ in group)


def one_more(size: int) -> int:
    return size + 1


def just_below(inputs: list):
    """A function from a size to the largest prime below it, or below a share of it where the inputs are large."""
    total = sum(tensor.nbytes for tensor in tensor_trees.input_tensors(inputs))
    share = min(1.0, LARGE_BYTES / max(total, 1))
    largest = max((max(t.shape, default=0) for t in tensor_trees.input_tensors(inputs)), default=0)
    return lambda size: prime_below(max(3, int(size * share)) if size == largest else size)


def block(size: int) -> int:
    """The power of two, up to 128, that a smaller tile of `size` would have."""
    power = 1
    while power * 2 < size and power < 128:
        power *= 2
    return power


def layouts(inputs: list[torch.Tensor]) -> list[str]:
    """The layouts that change any of the inputs, each in another way: those of all inputs and, with several inputs,
    those that transpose a single one."""
    ranks = [tensor.dim() for tensor in inputs]
    least = {"outer dimensions swapped": 3, "padded inputs": 2}
    of_all = [layout for layout in LAYOUTS if max(ranks, default=0) >= least.get(layout, 0)]
    if not may_be_strided(inputs):
        of_all.remove("transposed inputs")
    one_alone = [number for number, rank in enumerate(ranks) if rank > 1][:MOST_ALONE] if len(ranks) > 1 else []
    return of_all + [f"input {number} transposed" for number in one_alone]


def may_be_strided(inputs: list[torch.Tensor]) -> bool:
    """Does "transposed inputs" change how any of them lies in memory?"""
    return not inputs or any(strides_vary(tensor) for tensor in inputs)


def strides_vary(tensor: torch.Tensor) -> bool:
    """Vectors of whole numbers (offsets, lengths, indices) lie densely in every variant."""
    return not (tensor.dim() == 1 and variant_inputs.whole(tensor))


def layout_of(layout: str, number: int, tensor: torch.Tensor) -> str:
    """guards.Guards.memory's word for how that input lies in memory."""
    if not strides_vary(tensor) and layout == "transposed inputs":
        return PLAIN
    if alone := ONE_TRANSPOSED.fullmatch(layout):
        return "transposed" if number == int(alone[1]) else PLAIN
    return layout.removesuffix(" inputs")


class Shapes:
    """The shapes that the reference takes. Each is tried on shapes alone (blank.py). It is tried on real data where
    the inputs hold indices, or where the reference reads values and the inputs are small."""

    def __init__(self, reference: problem.Reference, workload: str, case: problem.Case):
        self._arguments = reference, workload, case.dtype
        self._given = case.inputs
        self.inputs = tensor_trees.input_tensors(case.inputs)
        self._has_indices = any(variant_inputs.whole(tensor) and tensor.numel() for tensor in self.inputs)
        self._numbers = tensor_trees.input_numbers(case.inputs)

    def seeds(self) -> list[int]:
        return self._arguments[0].declarations.seeds()

    def samples(self) -> bool:
        return bool(self._arguments[0].declarations.samples)

    def holds_number(self) -> bool:
        """Is a floating number among the arguments?"""
        return any(type(leaf) is float for leaf in tensor_trees.leaves(self._given))

    def floating(self) -> bool:
        return any(tensor.dtype in tensor_trees.NAMES for tensor in self.inputs)

    def groups(self) -> list[Group]:
        """The dimensions that may change. Dimensions that change only together are in one group."""
        places = [
            (i, d, n) for i, t in enumerate(self.inputs) for d, n in enumerate(t.shape) if n > variant_inputs.STRUCTURE
        ]
        return self._together(places, small_prime)

    def batches(self) -> list[Group]:
        """Leading dimensions of 1, 2 or 3 that may be one larger, also in groups: a small batch."""
        leading = [(i, 0, t.shape[0]) for i, t in enumerate(self.inputs) if t.dim() > 1]
        return self._together([place for place in leading if 0 < place[2] <= variant_inputs.STRUCTURE], one_more)

    def _together(self, places: Group, size_of) -> list[Group]:
        places, groups = places[:MOST_DIMENSIONS], []
        for place in places:
            if any(place in group for group in groups):
                continue
            group = next((g for g in self._candidates(place, places) if self.possible(resized([g], size_of))), None)
            groups += [group] if group else []
        return groups

    def parts(self, groups: list[Group]) -> list[Group]:
        """Parts of the groups that change alone as well: dimensions may only happen to be of one size, as in a square
        product."""
        apart: list[Group] = []
        for group in groups:
            for place in group[:MOST_ALONE]:
                if len(apart) == MOST_ALONE:
                    return apart
                smaller = [[place], *(sorted([place, other]) for other in group if other != place)]
                part = next(
                    (p for p in smaller if len(p) < len(group) and self.possible(resized([p], small_prime))), None
                )
                apart += [part] if part and part not in apart else []
        return apart

    @staticmethod
    def _candidates(place: tuple, places: list[tuple]) -> Iterator[Group]:
        """The dimensions that could change with a dimension. First all of its size, because a kernel for squares may
        need squares. If the reference refuses those: all at its place, one other, none."""
        same = [other for other in places if other[2] == place[2] and other != place]
        yield [place, *same]
        yield [place] + [other for other in same if other[1] == place[1]]
        yield from ([place, other] for other in same)
        yield [place]

    def possible(self, sizes: list[list[int]]) -> list[list[int]]:
        """The sizes, or [] where the reference does not take them all together."""
        return sizes if sizes and self._takes(sizes) else []

    def tiny(self) -> bool:
        return self._bytes() <= TINY_BYTES

    def few_bytes(self) -> bool:
        return self._bytes() <= OWN_BYTES

    def _bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.inputs)

    def small(self, sizes: list[list[int]]) -> bool:
        """Are the inputs of these sizes no more than LARGE_BYTES?"""
        shapes = [list(tensor.shape) for tensor in self.inputs]
        for number, dimension, size in sizes:
            shapes[number][dimension] = size
        after = sum(math.prod(shape) * t.element_size() for shape, t in zip(shapes, self.inputs, strict=True))
        return after <= LARGE_BYTES

    def _takes(self, sizes: list[list[int]]) -> bool:
        if not variant_inputs.offsets_hold(self.inputs, self._numbers, sizes):
            return False
        if self._takes_shapes(sizes):
            return not self._has_indices or self._runs(sizes)
        return self._looks_at_values and self.tiny() and self._runs(sizes)

    @functools.cached_property
    def _looks_at_values(self) -> bool:
        """Does it fail on shapes alone, even on the workload's own?"""
        return not self._takes_shapes([])

    @functools.cached_property
    def _on_blank(self) -> Callable:
        """blank.on_meta where the workload's own sizes pass there, else blank.on_fake."""
        return blank.on_meta if self._passes(blank.on_meta, []) else blank.on_fake

    def _takes_shapes(self, sizes: list[list[int]]) -> bool:
        return self._passes(self._on_blank, sizes)

    def _passes(self, on_blank: Callable, sizes: list[list[int]]) -> bool:
        def call(model: torch.nn.Module, inputs: list) -> None:
            problem.call(model, variant_inputs.cut(inputs, sizes, known=False))

        try:
            on_blank(*self._arguments, call)
            return True
        except Exception:
            return False

    @functools.cached_property
    def _on_cpu(self) -> Callable:
        """A call of the reference, given inputs on the CPU."""
        reference, workload, dtype = self._arguments
        apart = reference.apart("cpu")
        model = apart.build(workload, 0, dtype, "cpu")[0]
        return lambda inputs: apart.call(model, inputs, "cpu")

    def _runs(self, sizes: list[list[int]]) -> bool:
        """Does it run on real data? Integers may be indices, and shapes say nothing about their values. `cut` keeps
        them within the cut dimension."""
        changed = variant_inputs.cut(self._given, sizes)
        if sum(tensor.nbytes for tensor in tensor_trees.input_tensors(changed)) > RUN_BYTES:
            return True
        try:
            work_limit.limited(lambda: self._on_cpu([tensor_trees.place(one, "cpu") for one in changed]))
            return True
        except work_limit.TooMuchWork:
            return True
        except Exception:
            return False
