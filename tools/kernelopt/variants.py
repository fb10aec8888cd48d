"""Shapes, layouts and values beyond the task's own on which a kernel must be right or say that it does not serve them.

A variant: {name, sizes, layout, values}; sizes is [[input, dimension, new size], …]. The reference decides which
dimensions may change, and which only together: its shapes are tried without data. Imported by worker processes only.
"""

from collections.abc import Iterator

import torch

from . import problem

SMALL_PRIMES = (127, 61, 31, 13, 7, 5, 3, 2)
STRUCTURE = 3  # a dimension of so many and below is a structure (a pair, a colour, a window), not a size
NARROW = 3
MOST_DIMENSIONS = 16  # that are tried
MOST_ALONE = 4  # groups that change alone, the largest first
LARGE_BYTES = 256 << 20  # of inputs; beyond that "just below" is far below
RUN_BYTES = 64 << 20  # so large may changed inputs be for the reference to be run on the CPU
VALUES = ("mixed signs", "nothing positive", "nothing negative", "64 times the inputs")
LAYOUTS = ("transposed inputs", "first input transposed", "outer dimensions swapped", "misaligned inputs")

Group = list[tuple[int, int, int]]  # (input, dimension, size): dimensions that change together


def of_workload(reference: problem.Reference, workload: str, dtype: str | None, inputs: list, full: bool) -> list[dict]:
    """Variants of a workload with such inputs. full: 1 and a small prime in one place at a time, small primes, block - 1 and block + 1, a narrow
    last dimension, other layouts and values; in any case primes just below the workload's own sizes."""
    shapes = Shapes(reference, workload, dtype, inputs)
    groups = shapes.groups()
    wanted = {"primes just below": resized(groups, just_below(inputs))} if groups else {}
    small = shapes.possible(resized(groups, small_prime))
    if full:
        last = [group for group in groups if group[0][1] == len(shapes.inputs[group[0][0]].shape) - 1]
        wanted["prime sizes"] = small
        wanted["narrow"] = resized(last, lambda _: NARROW) + [s for s in small if not changes(last, s)]
        wanted["block - 1"] = resized(groups, lambda size: block(size) - 1)
        wanted["block + 1"] = resized(groups, lambda size: block(size) + 1 if block(size) + 1 < size else size)
        for group in sorted(groups, key=lambda group: -group[0][2])[:MOST_ALONE]:
            for size_of in (
                lambda _: 1,
                small_prime,
            ):  # a kernel may be bound to one size, a head's width, and free in others
                wanted[alone(group, size_of)] = resized([group], size_of)
    found, seen = [], []
    for name, sizes in wanted.items():
        sizes = shapes.possible(sizes)
        if sizes and sizes not in seen:
            seen.append(sizes)
            found.append(variant(name, sizes))
    if full:
        found += [variant(values, small, values=values) for values in VALUES if shapes.floating()]
        found += [variant(layout, small, layout) for layout in LAYOUTS if applies(layout, shapes.inputs)]
    return found


def alone(group: Group, size_of) -> str:
    """ "300 -> 127 (input 0, dimension 0)" """
    number, dimension, size = group[0]
    return f"{size} -> {size_of(size)} (input {number}, dimension {dimension})"


def variant(name: str, sizes: list, layout: str = "contiguous", values: str | None = None) -> dict:
    return {"name": name, "sizes": sizes, "layout": layout, "values": values}


def resized(groups: list[Group], size_of) -> list[list[int]]:
    """The new sizes of all dimensions of the groups; those that stay are left out."""
    return [[i, d, size_of(size)] for group in groups for i, d, size in group if size_of(size) != size]


def changes(groups: list[Group], size: list[int]) -> bool:
    return any((i, d) == tuple(size[:2]) for group in groups for i, d, _ in group)


def small_prime(size: int) -> int:
    """The largest of SMALL_PRIMES below `size`."""
    return next(number for number in SMALL_PRIMES if number < size)


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


def applies(layout: str, inputs: list[torch.Tensor]) -> bool:
    """Does a layout change any of the inputs, and not the same ones as another layout?"""
    ranks = [tensor.dim() for tensor in inputs]
    needed = {
        "first input transposed": len(ranks) > 1 and ranks[0] > 1,
        "outer dimensions swapped": max(ranks, default=0) > 2,
    }
    return needed.get(layout, True)


def layout_of(layout: str, number: int) -> str:
    """guards.Guards.memory's word for how that input lies in memory."""
    if layout == "first input transposed":
        return "transposed" if number == 0 else "contiguous"
    return layout.removesuffix(" inputs")


class Shapes:
    """What the reference takes, tried on shapes alone (fake tensors), and where indices are among the inputs for real."""

    def __init__(self, reference: problem.Reference, workload: str, dtype: str | None, inputs: list):
        self._arguments = reference, workload, dtype
        self._given = inputs
        self.inputs = problem.input_tensors(inputs)
        whole = [t for t in self.inputs if not t.is_floating_point() and not t.is_complex() and t.dtype != torch.bool]
        self._has_indices = any(t.numel() for t in whole)
        self._largest_index = max((int(t.max()) for t in whole if t.numel()), default=-1)

    def floating(self) -> bool:
        return any(tensor.dtype in problem.NAMES for tensor in self.inputs)

    def groups(self) -> list[Group]:
        """The dimensions that may change, those that change only together in one group."""
        places = [(i, d, n) for i, t in enumerate(self.inputs) for d, n in enumerate(t.shape) if n > STRUCTURE]
        places, found = places[:MOST_DIMENSIONS], []
        for place in places:
            if any(place in group for group in found):
                continue
            group = next((g for g in self._candidates(place, places) if self.possible(resized([g], small_prime))), None)
            found += [group] if group else []
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
        return sizes if sizes and self._takes(sizes) and self._indices_fit(sizes) else []

    def _takes(self, sizes: list[list[int]]) -> bool:
        from torch._subclasses.fake_tensor import FakeTensorMode

        reference, workload, dtype = self._arguments
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                model, inputs, _ = reference.build(workload, 0, dtype, "cpu")
                problem.call(model, cut(inputs, sizes))
            return True
        except Exception:
            return False

    def _indices_fit(self, sizes: list[list[int]]) -> bool:
        """Integers among the inputs may be indices, whose values no shape tells."""
        if not self._has_indices:
            return True
        changed = cut(self._given, sizes)
        if sum(tensor.nbytes for tensor in problem.input_tensors(changed)) > RUN_BYTES:
            return min(new for _, _, new in sizes) > self._largest_index
        reference, workload, dtype = self._arguments
        try:
            model, _, _ = reference.build(workload, 0, dtype, "cpu")
            problem.call(model, problem.on_cpu(changed))
            return True
        except Exception:
            return False


def cut(inputs: list, sizes: list[list[int]]) -> list:
    """The inputs with the named dimensions cut down to their new sizes: the first elements stay."""
    numbers = iter(range(len(problem.input_tensors(inputs))))

    def shrunk(tensor: torch.Tensor) -> torch.Tensor:
        number = next(numbers)
        for _, dimension, size in (change for change in sizes if change[0] == number):
            tensor = tensor.narrow(dimension, 0, size)
        return tensor.clone(memory_format=torch.contiguous_format)

    return problem.map_tensors(inputs, shrunk)


def of_case(case: problem.Case, wanted: dict) -> problem.Case:
    """The case as a variant wants it."""
    inputs = cut(case.inputs, wanted["sizes"])
    return case.with_inputs(problem.map_tensors(inputs, lambda tensor: with_values(tensor, wanted["values"])))


def with_values(tensor: torch.Tensor, values: str | None) -> torch.Tensor:
    """Floating tensors with other contents of the same kind."""
    if values is None or tensor.dtype not in problem.NAMES:
        return tensor
    if values == "64 times the inputs":
        return 64 * tensor
    if values == "nothing positive":
        return -tensor.abs()
    if values == "nothing negative":
        return tensor.abs()
    torch.manual_seed(tensor.numel())
    return torch.where(torch.rand(tensor.shape, device=tensor.device) < 0.5, -tensor, tensor)
