"""The contents of a variant's inputs and parameters, cut or repeated to its sizes, with its values. Imported by worker
processes only.

Order that has a meaning is kept: offsets rise from 0 to the total, sorted data stays sorted, a permutation stays one.
"""

import dataclasses
import itertools
from collections.abc import Collection

import torch

from ..case_types import Variant
from . import problem, tensor_trees
from .keyword_sizes import STRUCTURE

SORTED = 4  # fewer sorted elements may be chance, unless they start at 0, as offsets do
SCALED = "64 times the inputs"
VALUES = ("mixed signs", SCALED, "nothing positive", "nothing negative")
CONSTANTS = "varied constants"  # a mask that is all true, a bias of zeros, one scale: a kernel may ignore them
OTHER_SEED = "another seed"  # in the parameters of forward that are called so
OTHER_NUMBERS = "other numbers"  # floating ones, three quarters as large
UNEQUAL_ROWS = "unequal rows"  # where outputs are drawn at random; get_inputs may make all rows equal
OTHERS = 4  # other contents that a case's inputs can have
FLAGS = "varied zeros and ones"  # of whole numbers: a mask of ones, token types or zero points of zeros


def cut(inputs: list, sizes: list[list[int]], known: bool = True) -> list:
    """The inputs with the named dimensions in their new sizes: the first elements stay; where there are more, they
    come again, floats scaled so that none is tied with another. Indices, lengths and offsets of a dimension stay
    within it, and a Python number that is its size follows. known: the inputs hold values, not shapes alone."""
    if not sizes:
        return inputs
    tensors = tensor_trees.input_tensors(inputs)
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

    return tensor_trees.map_leaves(inputs, changed)


def limits_of(tensors: list[torch.Tensor], sizes: list[list[int]]) -> set[tuple[int, int]]:
    """(size, new size) of the dimensions that change."""
    return {(tensors[number].shape[dimension], size) for number, dimension, size in sizes}


def lengths_of(tensors: list[torch.Tensor]) -> set[int]:
    return {length for tensor in tensors for length in tensor.shape}


def offsets_hold(tensors: list[torch.Tensor], numbers: list[int], sizes: list[list[int]]) -> bool:
    """Do offsets stay two or more, and no stretch between them longer than a number among the inputs says
    (max_seqlen)?"""
    limits, lengths = limits_of(tensors, sizes), lengths_of(tensors)
    for number, tensor in enumerate(tensors):
        if rising(tensor) and is_offsets(tensor, lengths):
            count = next((size for i, _, size in sizes if i == number), len(tensor))
            longest = int(tensor.diff().max())
            if count < 2 or (longest in numbers and stretched(tensor, count, limits).diff().max() > longest):
                return False
    return True


def followed(value, limits: set[tuple[int, int]]):
    """A whole number that is a dimension's size in that dimension's new size."""
    if type(value) is not int or value <= STRUCTURE:
        return value
    return min((new for size, new in limits if size == value), default=value)


def arranged(
    before: torch.Tensor, tensor: torch.Tensor, limits: set[tuple[int, int]], lengths: set[int]
) -> torch.Tensor:
    """The resized tensor, with its whole numbers within the range that they index: offsets still rise from 0 to the
    total, sorted data stays sorted, and a permutation stays one. lengths: of all dimensions; offsets end at one of
    them."""
    if rising(before):
        if is_offsets(before, lengths):
            return stretched(before, len(tensor), limits)
        inside = within(tensor, limits)
        return inside if inside is before else inside.sort().values
    if tensor.shape != before.shape and is_permutation(before):
        more = torch.arange(len(before), max(len(tensor), len(before))).to(before)
        return torch.cat([before, more])[: len(tensor)].argsort().argsort().to(before)
    return within(tensor, limits)


def rising(tensor: torch.Tensor) -> bool:
    """Is it sorted on purpose: edges, offsets, segments?"""
    if tensor.dim() != 1 or len(tensor) < 2 or not (whole(tensor) or tensor.dtype in tensor_trees.NAMES):
        return False
    if len(tensor) < SORTED and (tensor.is_floating_point() or int(tensor[0]) != 0):
        return False
    return bool((tensor[1:] >= tensor[:-1]).all()) and bool(tensor[-1] > tensor[0])


def is_offsets(tensor: torch.Tensor, lengths: set[int]) -> bool:
    """Does a rising tensor go from 0 to the length of a dimension, as cu_seqlens and a row pointer do?"""
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
    if tensor.dtype not in tensor_trees.NAMES:
        return grown
    scales = 0.75 ** (places // length).to(torch.float32)
    return (grown * scales.view(-1, *[1] * (tensor.dim() - 1 - dimension % tensor.dim()))).to(tensor.dtype)


def within(tensor: torch.Tensor, limits: set[tuple[int, int]]) -> torch.Tensor:
    """Whole numbers that may be indices into a dimension of that (size, new size), or lengths of it, kept below the
    new one, and no lower than the lowest: a length that is never 0 stays so. Negative ones mean something else."""
    if not whole(tensor) or not tensor.numel():
        return tensor
    largest = int(tensor.max())
    new = min((new for size, new in limits if new <= largest <= size), default=None)
    if new is None:
        return tensor
    lowest = min(int(tensor[tensor >= 0].min()), new - 1)
    return torch.where(tensor >= 0, lowest + (tensor - lowest) % (new - lowest), tensor)


def of_case(case: problem.Case, wanted: Variant, other: int = 0) -> problem.Case:
    """The case as a variant wants it; other: with later elements of floating tensors in place of the first, others for
    each number from 1 to OTHERS."""
    given, values = case.inputs, wanted.values
    if other:
        given = tensor_trees.map_tensors(given, lambda tensor: turned(tensor, other))
    inputs = cut(given, wanted.sizes)
    numbers = itertools.count()
    inputs = tensor_trees.map_tensors(inputs, lambda tensor: with_values(tensor, values, next(numbers)))
    state = case.state
    if values in (CONSTANTS, FLAGS):  # floating parameters and buffers already have noise
        state = {
            name: tensor if tensor.is_floating_point() else with_values(tensor, values, next(numbers))
            for name, tensor in state.items()
        }
    return dataclasses.replace(case, inputs=inputs, state=state)


def may_be_seed(value) -> bool:
    return type(value) is int or (isinstance(value, torch.Tensor) and whole(value))


def reseeded(value):
    """Another seed of the same kind; anything that can be no seed as it is."""
    return (7 * value + 12_345) % (1 << 31) if may_be_seed(value) else value


def other_numbers(inputs: list, free: Collection[int]) -> list:
    """The inputs with other numbers at these places among their leaves."""
    places = itertools.count()
    return tensor_trees.map_leaves(inputs, lambda leaf: 0.75 * leaf if next(places) in free else leaf)


def has_equal_rows(tensor: torch.Tensor) -> bool:
    """Does a floating tensor hold the same row several times?"""
    if tensor.dtype not in tensor_trees.NAMES or tensor.dim() == 0 or len(tensor) < 2 or not tensor.numel():
        return False
    return bool((tensor == tensor[:1]).all())


def unequal(inputs: list, others: list) -> list:
    """The inputs, with every second one of equal rows from other inputs of the same sizes."""
    rest = iter(tensor_trees.input_tensors(others))

    def mixed(tensor: torch.Tensor) -> torch.Tensor:
        other = next(rest)
        if other.shape != tensor.shape or not (has_equal_rows(tensor) and has_equal_rows(other)):
            return tensor
        made = tensor.clone()
        made[1::2] = other[1::2]
        return made

    return tensor_trees.map_tensors(inputs, mixed)


def turned(tensor: torch.Tensor, other: int) -> torch.Tensor:
    """A floating tensor from a later element on; whole numbers and edges mean something in their order."""
    movable = tensor.is_floating_point() and not rising(tensor)
    return tensor.roll(-other * max(1, tensor.numel() // (OTHERS + 1))) if movable else tensor


def with_values(tensor: torch.Tensor, values: str | None, number: int) -> torch.Tensor:
    """Floating tensors but edges with other contents of the same kind, other ones for each `number`; of constants
    bool and floating ones (CONSTANTS) or whole numbers (FLAGS) varied."""
    if values == CONSTANTS:
        return varied(tensor, number) if constant(tensor) else tensor
    if values == FLAGS:
        return varied(tensor, number) if constant_flags(tensor) else tensor
    if values not in VALUES or tensor.dtype not in tensor_trees.NAMES or rising(tensor):
        return tensor
    if values == SCALED:
        return 64 * tensor
    if values == "nothing positive":
        return -tensor.abs()
    if values == "nothing negative":
        return tensor.abs()
    return torch.where(coins(tensor, number) < 0.5, -tensor, tensor)


def constant(tensor: torch.Tensor) -> bool:
    """Does a floating tensor hold a single value, or a bool tensor the same value several times?"""
    if tensor.numel() < (2 if tensor.dtype == torch.bool else 1):
        return False
    return (tensor.dtype == torch.bool or tensor.dtype in tensor_trees.NAMES) and all_equal(tensor)


def constant_flags(tensor: torch.Tensor) -> bool:
    """Does a tensor of whole numbers hold nothing but zeros, or ones, several times?"""
    if tensor.numel() < 2 or not whole(tensor):
        return False
    return all_equal(tensor) and int(tensor.flatten()[0]) in (0, 1)


def all_equal(tensor: torch.Tensor) -> bool:
    return bool((tensor == tensor.flatten()[0]).all())


def varied(tensor: torch.Tensor, number: int) -> torch.Tensor:
    """Bools, zeros and ones by coin; floats with noise that is positive, because a variance must stay positive."""
    noise = coins(tensor, number)
    return (
        tensor + (0.1 + 0.1 * noise).to(tensor.dtype) if tensor.is_floating_point() else (noise < 0.5).to(tensor.dtype)
    )


def coins(tensor: torch.Tensor, number: int) -> torch.Tensor:
    """Numbers from 0 to 1 in the tensor's shape, the same in each process, that leave torch's own generator alone."""
    generator = torch.Generator(tensor.device).manual_seed(tensor.numel() + number)
    return torch.rand(tensor.shape, device=tensor.device, generator=generator)
