"""Other values of a task that names its sizes, changed where get_inputs draws them. What it computes from them follows:
saved statistics, probabilities, a table of cosines with two equal halves.

Imported by worker processes only.
"""

import functools
import itertools
import math

import torch
from torch.overrides import TorchFunctionMode

from . import blank, problem, tensor_trees, variant_inputs

RANDOM = {torch.rand, torch.randn, torch.rand_like, torch.randn_like, torch.normal}
RANDOM |= {torch.Tensor.normal_, torch.Tensor.uniform_}
# Whole numbers are indices until they become floating: torch.randint(…).float() draws values that may tie.
CONVERSIONS = {torch.Tensor.to, torch.Tensor.type, torch.Tensor.float, torch.Tensor.half, torch.Tensor.double}
CONVERSIONS |= {torch.Tensor.bfloat16}


class OtherDraws(TorchFunctionMode):
    """Inside, floating tensors that torch draws at random, or converts from whole numbers, get the values of a
    variant (variant_inputs.VALUES)."""

    def __init__(self, values: str):
        super().__init__()
        self._values, self._numbers = values, itertools.count()

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        made = function(*arguments, **(keywords or {}))
        if is_drawn(function, arguments, made):
            made.copy_(variant_inputs.with_values(made, self._values, next(self._numbers)))
        return made


class NumbersUsed(TorchFunctionMode):
    """Inside, `numbers` gets the floating numbers that torch's functions are called with. What get_inputs computes from
    a number that is an argument too, a scale say, would not follow another one."""

    def __init__(self):
        super().__init__()
        self.numbers: set[float] = set()

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        tensor_trees.map_leaves([*arguments, keywords], self._note)
        return function(*arguments, **(keywords or {}))

    def _note(self, leaf) -> None:
        if type(leaf) is float:
            self.numbers.add(leaf)


def free_numbers(reference: problem.Reference, workload: str, dtype: str | None, sizes: dict[str, int]) -> list[int]:
    """`free_places`, of each set of sizes once: inputs may be large."""
    return free_places(reference, workload, dtype, tuple(sizes.items()))


@functools.cache
def free_places(
    reference: problem.Reference, workload: str, dtype: str | None, sizes: tuple[tuple[str, int], ...]
) -> list[int]:
    """The places, among the leaves of inputs of these sizes, of floating numbers other than 0 that no tensor is
    computed with. Where outputs are drawn at random, also of tensors that hold a single number, such as a temperature
    for each request: noise would make the rows differ, and each would need draws of its own."""
    used, samples = NumbersUsed(), bool(reference.declarations.samples)
    inputs = made(reference, workload, dtype, dict(sizes), used, with_contents=samples)
    leaves = list(enumerate(tensor_trees.leaves(inputs)))
    floats = ((place, leaf) for place, leaf in leaves if type(leaf) is float and math.isfinite(leaf) and leaf)
    free = [place for place, leaf in floats if leaf not in used.numbers]
    if samples:
        free += [place for place, leaf in leaves if isinstance(leaf, torch.Tensor) and variant_inputs.constant(leaf)]
    return free


def made(
    reference: problem.Reference,
    workload: str,
    dtype: str | None,
    sizes: dict[str, int],
    within: NumbersUsed,
    with_contents: bool,
) -> list:
    """Inputs of these sizes; without contents where that suffices."""
    try:
        if not with_contents:
            return blank.on_meta(reference, workload, dtype, lambda _, inputs: inputs, sizes, within=within)
    except Exception:  # they follow from contents
        pass
    return reference.apart("cpu").build(workload, 0, dtype, "cpu", sizes, within)[1]


def is_drawn(function, arguments: tuple, made) -> bool:
    if not isinstance(made, torch.Tensor) or made.dtype not in tensor_trees.NAMES:
        return False
    return function in RANDOM or (function in CONVERSIONS and variant_inputs.whole(arguments[0]))
