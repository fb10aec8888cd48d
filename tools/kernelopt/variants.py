"""Shapes, layouts and values beyond the task's own on which a kernel must be right or say that it does not serve them.

A variant: {name, sizes, layout, values}; sizes is [[input, dimension, new size], …]. The reference decides which
dimensions may change, and which only together: its shapes are tried without data. Imported by worker processes only.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator

import torch

from . import problem

SMALL_PRIMES = (127, 61, 31, 13, 7, 5, 3, 2)
STRUCTURE = 3  # a dimension of so many and below is a structure (a pair, a colour, a window), not a size
NARROW = 3
SORTED = 4  # so many elements are not in order by chance, unless they start at 0 as offsets do
MOST_DIMENSIONS = 16  # that are tried
MOST_ALONE = 4  # groups that change alone, the largest first
TINY_BYTES = 1 << 20  # of inputs: a case more costs next to nothing
LARGE_BYTES = 256 << 20  # of inputs; beyond that "just below" is far below
RUN_BYTES = 64 << 20  # so large may changed inputs be for the reference to be run on the CPU
SCALED = "64 times the inputs"
VALUES = ("mixed signs", SCALED, "nothing positive", "nothing negative")
FIRST = 2  # of values, and one more of layouts, where each is a file of nearly the task's own, large size
CONSTANTS = "varied constants"  # a mask that is all true, a bias of zeros, one scale: a kernel may ignore them
FLAGS = "varied zeros and ones"  # of whole numbers: a mask of ones, token types or zero points of zeros
PLAIN = "contiguous"
LAYOUTS = ("transposed inputs", "outer dimensions swapped", "misaligned inputs", "padded inputs")
ONE_TRANSPOSED = re.compile(r"input (\d+) transposed")

Group = list[tuple[int, int, int]]  # (input, dimension, size): dimensions that change together


def of_workload(
    reference: problem.Reference, workload: str, case: problem.Case, full: bool, own_sizes: bool = False
) -> list[dict]:
    """Variants of a workload of which that is one case. full: 1, a small prime and more than the next power of two in one place at a time, small
    primes, block - 1 and block + 1, a narrow last dimension, other layouts and values; in any case primes just below the workload's own
    sizes. own_sizes: a layout and values at the workload's own sizes too, which a kernel may treat otherwise than small ones."""
    shapes = Shapes(reference, workload, case)
    groups = shapes.groups()
    wanted = {"primes just below": resized(groups, just_below(case.inputs))} if groups else {}
    small = shapes.possible(resized(groups, small_prime))
    if full:
        last = [group for group in groups if group[0][1] == len(shapes.inputs[group[0][0]].shape) - 1]
        wanted["prime sizes"] = small
        wanted["narrow"] = resized(last, lambda _: NARROW) + [s for s in small if not changes(last, s)]
        wanted["block - 1"] = resized(groups, lambda size: block(size) - 1)
        wanted["block + 1"] = resized(groups, lambda size: block(size) + 1 if block(size) + 1 < size else size)
        for group in sorted(groups, key=lambda group: -group[0][2])[:MOST_ALONE]:
            for size_of in (lambda _: 1, small_prime):  # a kernel may be bound to one size, a head's width
                wanted[alone(group, size_of)] = resized([group], size_of)
        wanted |= {name: sizes for name, sizes in further(shapes, groups, small).items() if shapes.small(sizes)}
    found, seen = [], []
    for name, sizes in wanted.items():
        sizes = shapes.possible(sizes)
        if sizes and sizes not in seen:
            seen.append(sizes)
            found.append(variant(name, sizes))
    if full:
        values, other = list(VALUES) * shapes.floating(), layouts(shapes.inputs)
        if not shapes.small(small):
            values, other = values[:FIRST], other[: FIRST + 1]
        found += [variant(name, small, values=name) for name in values]
        held = [*shapes.inputs, *(tensor for tensor in case.state.values() if not tensor.is_floating_point())]
        found += [variant(CONSTANTS, small, values=CONSTANTS)] * any(map(constant, held))
        found += [variant(FLAGS, small, values=FLAGS)] * any(map(constant_flags, held))
        found += [variant(layout, small, layout) for layout in other]
        if own_sizes and small and shapes.small([]):
            found.append(variant("transposed inputs, own sizes", [], "transposed inputs"))
            found += [variant("nothing positive, own sizes", [], values="nothing positive")] * shapes.floating()
        if small and shapes.tiny():
            found += in_reserve(found, small)
    return found


def further(shapes: "Shapes", groups: list[Group], small: list) -> dict[str, list]:
    """Sizes by name, for where they leave the inputs small: more than a tile of the task's own, equal sizes apart, a batch of one more."""
    found = {}
    for group in sorted(groups, key=lambda group: -group[0][2])[:MOST_ALONE]:
        found[alone(group, beyond)] = [s for s in small if not changes([group], s)] + resized([group], beyond)
    for part in shapes.parts(groups):
        found[f"{alone(part, small_prime)}, others of its size stay"] = resized([part], small_prime)
    for group in shapes.batches():
        found[f"batch of {one_more(group[0][2])} (input {group[0][0]})"] = small + resized([group], one_more)
    return found


def alone(group: Group, size_of) -> str:
    """ "300 -> 127 (input 0, dimension 0)" """
    number, dimension, size = group[0]
    return f"{size} -> {size_of(size)} (input {number}, dimension {dimension})"


def variant(name: str, sizes: list, layout: str = PLAIN, values: str | None = None) -> dict:
    return {"name": name, "sizes": sizes, "layout": layout, "values": values, "instead_of": None}


def in_reserve(found: list[dict], small: list) -> list[dict]:
    """The layouts and values of those sizes at the workload's own, each for a kernel that declines the other (`instead_of`)."""
    names = {one["name"] for one in found}
    other = [one for one in found if one["sizes"] == small and (one["layout"] != PLAIN or one["values"])]
    made = [{**one, "name": f"{one['name']}, own sizes", "sizes": [], "instead_of": one["name"]} for one in other]
    return [one for one in made if one["name"] not in names and one["values"] != SCALED]


def resized(groups: list[Group], size_of) -> list[list[int]]:
    """The new sizes of all dimensions of the groups; those that stay are left out."""
    return [[i, d, size_of(size)] for group in groups for i, d, size in group if size_of(size) != size]


def changes(groups: list[Group], size: list[int]) -> bool:
    return any((i, d) == tuple(size[:2]) for group in groups for i, d, _ in group)


def small_prime(size: int) -> int:
    """The largest of SMALL_PRIMES below `size`."""
    return next(number for number in SMALL_PRIMES if number < size)


def one_more(size: int) -> int:
    return size + 1


def beyond(size: int) -> int:
    """One more than the next power of two: more than a tile that was made for `size` holds."""
    return (1 << (size - 1).bit_length()) + 1


def just_below(inputs: list):
    """A function from a size to the largest prime below it, or below a share of it where the inputs are large."""
    total = sum(tensor.nbytes for tensor in problem.input_tensors(inputs))
    share = min(1.0, LARGE_BYTES / max(total, 1))
    largest = max((max(t.shape, default=0) for t in problem.input_tensors(inputs)), default=0)
    return lambda size: prime_below(max(3, int(size * share)) if size == largest else size)


def prime_below(size: int) -> int:
    return next(n for n in range(size - 1, 1, -1) if all(n % factor for factor in range(2, int(n**0.5) + 1)))


def block(size: int) -> int:
    """The power of two, up to 128, that a smaller tile of `size` would have."""
    power = 1
    while power * 2 < size and power < 128:
        power *= 2
    return power


def layouts(inputs: list[torch.Tensor]) -> list[str]:
    """The layouts that change any of the inputs, each in another way: all of them, and where there are several, one alone."""
    ranks = [tensor.dim() for tensor in inputs]
    least = {"outer dimensions swapped": 3, "padded inputs": 2}
    found = [layout for layout in LAYOUTS if max(ranks, default=0) >= least.get(layout, 0)]
    one_alone = [number for number, rank in enumerate(ranks) if rank > 1][:MOST_ALONE] if len(ranks) > 1 else []
    return found + [f"input {number} transposed" for number in one_alone]


def layout_of(layout: str, number: int) -> str:
    """guards.Guards.memory's word for how that input lies in memory."""
    if alone := ONE_TRANSPOSED.fullmatch(layout):
        return "transposed" if number == int(alone[1]) else PLAIN
    return layout.removesuffix(" inputs")


class Shapes:
    """What the reference takes, tried on shapes alone (fake tensors); where indices are among the inputs, or the reference looks at
    values and they are few, for real."""

    def __init__(self, reference: problem.Reference, workload: str, case: problem.Case):
        self._arguments = reference, workload, case.dtype
        self._given = case.inputs
        self.inputs = problem.input_tensors(case.inputs)
        self._has_indices = any(whole(tensor) and tensor.numel() for tensor in self.inputs)
        self._numbers = problem.input_numbers(case.inputs)

    def floating(self) -> bool:
        return any(tensor.dtype in problem.NAMES for tensor in self.inputs)

    def groups(self) -> list[Group]:
        """The dimensions that may change, those that change only together in one group."""
        places = [(i, d, n) for i, t in enumerate(self.inputs) for d, n in enumerate(t.shape) if n > STRUCTURE]
        return self._together(places, small_prime)

    def batches(self) -> list[Group]:
        """Leading dimensions of 1, 2 or 3 that may be one larger, in groups likewise: a small batch."""
        leading = [(i, 0, t.shape[0]) for i, t in enumerate(self.inputs) if t.dim() > 1]
        return self._together([place for place in leading if 0 < place[2] <= STRUCTURE], one_more)

    def _together(self, places: Group, size_of) -> list[Group]:
        places, found = places[:MOST_DIMENSIONS], []
        for place in places:
            if any(place in group for group in found):
                continue
            group = next((g for g in self._candidates(place, places) if self.possible(resized([g], size_of))), None)
            found += [group] if group else []
        return found

    def parts(self, groups: list[Group]) -> list[Group]:
        """Parts of the groups that change alone as well: dimensions may only happen to be of one size, as in a square product."""
        found: list[Group] = []
        for group in groups:
            for place in group[:MOST_ALONE]:
                if len(found) == MOST_ALONE:
                    return found
                smaller = [[place], *(sorted([place, other]) for other in group if other != place)]
                part = next(
                    (p for p in smaller if len(p) < len(group) and self.possible(resized([p], small_prime))), None
                )
                found += [part] if part and part not in found else []
        return found

    @staticmethod
    def _candidates(place: tuple, places: list[tuple]) -> Iterator[Group]:
        """What could change with a dimension: all of its size (who is given squares may build on squares); where the
        reference refuses that, all at its place, one other, nothing."""
        same = [other for other in places if other[2] == place[2] and other != place]
        yield [place, *same]
        yield [place] + [other for other in same if other[1] == place[1]]
        yield from ([place, other] for other in same)
        yield [place]

    def possible(self, sizes: list[list[int]]) -> list[list[int]]:
        """The sizes, or [] where the reference does not take them all together."""
        return sizes if sizes and self._takes(sizes) else []

    def tiny(self) -> bool:
        return sum(tensor.nbytes for tensor in self.inputs) <= TINY_BYTES

    def small(self, sizes: list[list[int]]) -> bool:
        """Are the inputs of these sizes no more than LARGE_BYTES?"""
        shapes = [list(tensor.shape) for tensor in self.inputs]
        for number, dimension, size in sizes:
            shapes[number][dimension] = size
        after = sum(math.prod(shape) * t.element_size() for shape, t in zip(shapes, self.inputs, strict=True))
        return after <= LARGE_BYTES

    def _takes(self, sizes: list[list[int]]) -> bool:
        if not self._offsets_hold(sizes):
            return False
        if self._takes_shapes(sizes):
            return not self._has_indices or self._runs(sizes)
        return self._looks_at_values and self.tiny() and self._runs(sizes)

    def _offsets_hold(self, sizes: list[list[int]]) -> bool:
        """Do offsets stay two or more, and no stretch between them longer than a number among the inputs says (max_seqlen)?"""
        limits, lengths = limits_of(self.inputs, sizes), lengths_of(self.inputs)
        for number, tensor in enumerate(self.inputs):
            if rising(tensor) and is_offsets(tensor, lengths):
                count = next((size for i, _, size in sizes if i == number), len(tensor))
                longest = int(tensor.diff().max())
                if count < 2 or (longest in self._numbers and stretched(tensor, count, limits).diff().max() > longest):
                    return False
        return True

    @functools.cached_property
    def _looks_at_values(self) -> bool:
        """Does it run on no shapes alone, not even on the workload's own?"""
        return not self._takes_shapes([])

    def _takes_shapes(self, sizes: list[list[int]]) -> bool:
        from torch._subclasses.fake_tensor import FakeTensorMode

        reference, workload, dtype = self._arguments
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                model, inputs, _ = reference.build(workload, 0, dtype, "cpu")
                problem.call(model, cut(inputs, sizes, known=False))
            return True
        except Exception:
            return False

    @functools.cached_property
    def _model(self) -> torch.nn.Module:
        reference, workload, dtype = self._arguments
        return reference.build(workload, 0, dtype, "cpu")[0]

    def _runs(self, sizes: list[list[int]]) -> bool:
        """Does it run for real? Integers may be indices, whose values no shape tells; `cut` keeps them within what was cut."""
        changed = cut(self._given, sizes)
        if sum(tensor.nbytes for tensor in problem.input_tensors(changed)) > RUN_BYTES:
            return True
        try:
            problem.call(self._model, problem.on_cpu(changed))
            return True
        except Exception:
            return False


def cut(inputs: list, sizes: list[list[int]], known: bool = True) -> list:
    """The inputs with the named dimensions in their new sizes: the first elements stay; where there are more, they come again, floats
    scaled so that none is tied with another. Indices, lengths and offsets of a dimension stay within it, and a Python number that
    is its size follows. known: the inputs hold values, and are no shapes alone."""
    if not sizes:
        return inputs
    tensors = problem.input_tensors(inputs)
    limits, lengths = limits_of(tensors, sizes), lengths_of(tensors)
    numbers = iter(range(len(tensors)))

    def changed(leaf):
        if not isinstance(leaf, torch.Tensor):
            return followed(leaf, limits)
        number = next(numbers)
        tensor = leaf
        for _, dimension, size in (change for change in sizes if change[0] == number):
            tensor = resize(tensor, dimension, size)
        if known:
            tensor = arranged(leaf, tensor, limits, lengths)
        return tensor.clone(memory_format=torch.contiguous_format)

    return problem.map_leaves(inputs, changed)


def limits_of(tensors: list[torch.Tensor], sizes: list[list[int]]) -> set[tuple[int, int]]:
    """(size, new size) of what changes."""
    return {(tensors[number].shape[dimension], size) for number, dimension, size in sizes}


def lengths_of(tensors: list[torch.Tensor]) -> set[int]:
    return {length for tensor in tensors for length in tensor.shape}


def followed(value, limits: set[tuple[int, int]]):
    """A whole number that is a dimension's size in that dimension's new size."""
    if type(value) is not int or value <= STRUCTURE:
        return value
    return min((new for size, new in limits if size == value), default=value)


def arranged(
    before: torch.Tensor, tensor: torch.Tensor, limits: set[tuple[int, int]], lengths: set[int]
) -> torch.Tensor:
    """What was resized, its whole numbers within what they point at: offsets still rise from 0 to the total, what was sorted is so,
    and a permutation stays one. lengths: of all dimensions, one of which offsets end at."""
    if rising(before):
        if is_offsets(before, lengths):
            return stretched(before, len(tensor), limits)
        found = within(tensor, limits)
        return found if found is before else found.sort().values
    if tensor.shape != before.shape and is_permutation(before):
        more = torch.arange(len(before), max(len(tensor), len(before))).to(before)
        return torch.cat([before, more])[: len(tensor)].argsort().argsort().to(before)
    return within(tensor, limits)


def rising(tensor: torch.Tensor) -> bool:
    """Is it sorted, and that by no chance: edges, offsets, segments?"""
    if tensor.dim() != 1 or len(tensor) < 2 or not (whole(tensor) or tensor.dtype in problem.NAMES):
        return False
    if len(tensor) < SORTED and (tensor.is_floating_point() or int(tensor[0]) != 0):
        return False
    return bool((tensor[1:] >= tensor[:-1]).all()) and bool(tensor[-1] > tensor[0])


def is_offsets(tensor: torch.Tensor, lengths: set[int]) -> bool:
    """Of what rises: does it go from 0 to the length of a dimension, as cu_seqlens and a row pointer do?"""
    return not tensor.is_floating_point() and int(tensor[0]) == 0 and int(tensor[-1]) in lengths


def stretched(offsets: torch.Tensor, count: int, limits: set[tuple[int, int]]) -> torch.Tensor:
    """`count` offsets that rise from 0 to the total's new size as the given ones do to the total."""
    total = int(offsets[-1])
    new = min((after for size, after in limits if size == total), default=total)
    places = torch.linspace(0, len(offsets) - 1, count, dtype=torch.float64, device=offsets.device)
    low = places.floor().long()
    known = offsets.double()
    between = known[low] + (places - low) * (known[(low + 1).clamp(max=len(offsets) - 1)] - known[low])
    return (between.long() * new // total).to(offsets.dtype)


def is_permutation(tensor: torch.Tensor) -> bool:
    if tensor.dim() != 1 or len(tensor) < 2 or not whole(tensor):
        return False
    return torch.equal(tensor.sort().values, torch.arange(len(tensor)).to(tensor))


def whole(tensor: torch.Tensor) -> bool:
    """Does it hold whole numbers?"""
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool


def resize(tensor: torch.Tensor, dimension: int, size: int) -> torch.Tensor:
    length = tensor.shape[dimension]
    if size <= length:
        return tensor.narrow(dimension, 0, size)
    places = torch.arange(size, device=tensor.device)
    grown = tensor.index_select(dimension, places % length)
    if tensor.dtype not in problem.NAMES:
        return grown
    scales = 0.75 ** (places // length).to(torch.float32)
    return (grown * scales.view(-1, *[1] * (tensor.dim() - 1 - dimension % tensor.dim()))).to(tensor.dtype)


def within(tensor: torch.Tensor, limits: set[tuple[int, int]]) -> torch.Tensor:
    """Whole numbers that may be indices into a dimension of that (size, new size), or lengths of it, kept below the new one, and no
    lower than the lowest: a length that is never 0 stays so. Negative ones mean something else."""
    if not whole(tensor) or not tensor.numel():
        return tensor
    largest = int(tensor.max())
    new = min((new for size, new in limits if new <= largest <= size), default=None)
    if new is None:
        return tensor
    lowest = min(int(tensor[tensor >= 0].min()), new - 1)
    return torch.where(tensor >= 0, lowest + (tensor - lowest) % (new - lowest), tensor)


def of_case(case: problem.Case, wanted: dict, from_the_end: bool = False) -> problem.Case:
    """The case as a variant wants it; from_the_end: with the last elements of floating tensors in place of the first."""
    given, values = case.inputs, wanted["values"]
    if from_the_end:
        given = problem.map_tensors(given, turned)
    inputs = cut(given, wanted["sizes"])
    numbers = itertools.count()
    inputs = problem.map_tensors(inputs, lambda tensor: with_values(tensor, values, next(numbers)))
    state = case.state
    if values in (CONSTANTS, FLAGS):  # floating parameters and buffers have got noise before
        state = {
            name: tensor if tensor.is_floating_point() else with_values(tensor, values, next(numbers))
            for name, tensor in state.items()
        }
    return dataclasses.replace(case, inputs=inputs, state=state)


def turned(tensor: torch.Tensor) -> torch.Tensor:
    """A floating tensor from its end; whole numbers and edges mean something in their order."""
    movable = tensor.is_floating_point() and not rising(tensor)
    return tensor.flip(list(range(tensor.dim()))) if movable else tensor


def with_values(tensor: torch.Tensor, values: str | None, number: int) -> torch.Tensor:
    """Floating tensors but edges with other contents of the same kind, other ones for each `number`; of constants bool and floating
    ones (CONSTANTS) or whole numbers (FLAGS) varied."""
    if values == CONSTANTS:
        return varied(tensor, number) if constant(tensor) else tensor
    if values == FLAGS:
        return varied(tensor, number) if constant_flags(tensor) else tensor
    if values is None or tensor.dtype not in problem.NAMES or rising(tensor):
        return tensor
    if values == SCALED:
        return 64 * tensor
    if values == "nothing positive":
        return -tensor.abs()
    if values == "nothing negative":
        return tensor.abs()
    torch.manual_seed(tensor.numel() + number)
    return torch.where(torch.rand(tensor.shape, device=tensor.device) < 0.5, -tensor, tensor)


def constant(tensor: torch.Tensor) -> bool:
    """Does a floating tensor hold one value alone, or a bool one several times?"""
    if tensor.numel() < (2 if tensor.dtype == torch.bool else 1):
        return False
    return (tensor.dtype == torch.bool or tensor.dtype in problem.NAMES) and all_equal(tensor)


def constant_flags(tensor: torch.Tensor) -> bool:
    """Does a tensor of whole numbers hold nothing but zeros, or ones, several times?"""
    if tensor.numel() < 2 or not whole(tensor):
        return False
    return all_equal(tensor) and int(tensor.flatten()[0]) in (0, 1)


def all_equal(tensor: torch.Tensor) -> bool:
    return bool((tensor == tensor.flatten()[0]).all())


def varied(tensor: torch.Tensor, number: int) -> torch.Tensor:
    """Bools, zeros and ones by coin; floats with noise that is positive, for a variance must stay so."""
    torch.manual_seed(tensor.numel() + number)
    noise = torch.rand(tensor.shape, device=tensor.device)
    return (
        tensor + (0.1 + 0.1 * noise).to(tensor.dtype) if tensor.is_floating_point() else (noise < 0.5).to(tensor.dtype)
    )
