"""Large random tensors, drawn quickly: a verdict builds a model many times, and its parameters are then loaded from the
case.

Imported by worker processes only.
"""

import math
import weakref
from collections.abc import Iterable

import torch

from .watching import Watching

DRAWN = 1_000_003  # numbers; a prime, so that no two rows of a matrix are equal
LARGE = 4 * DRAWN
IN_PLACE = {torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default}  # what torch.nn.init calls
COPYING = {torch.ops.aten._to_copy.default}  # tolist() of a GPU's tensor
READING = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape  # item(), equal(); nonzero()
FACTORIES = {torch.ops.aten.randn.default, torch.ops.aten.rand.default}


class RepeatedDraws(Watching):
    """Inside, a contiguous tensor of more than LARGE random numbers on the CPU gets DRAWN of them, again and again.

    The CPU draws one number after the other: two bf16 matrices of 45 million took 3 s on the host of an H100, and a
    verdict on two cases builds the reference 17 times.
    """

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        if function in IN_PLACE and is_large(arguments[0]):
            return draw(arguments[0], lambda numbers: function(numbers, *arguments[1:], **keywords))
        if function in FACTORIES and math.prod(arguments[0]) > LARGE:
            made = torch.empty(arguments[0], **keywords)
            if is_large(made):
                return draw(made, lambda numbers: numbers.copy_(function([DRAWN], **keywords)))
        return function(*arguments, **keywords)


class WatchedBuild(RepeatedDraws):
    """Sees also whether what is built inside depends on the device.

    has_read: whether numbers of tensors became numbers of Python's, or sizes. drawn_on: the types of the devices that
    drew numbers.
    """

    def __init__(self):
        super().__init__()
        self.has_read, self.drawn_on = False, set[str]()
        self._made: list[weakref.ref[torch.Tensor]] = []

    def left_besides(self, known: Iterable[torch.Tensor]) -> bool:
        """Does anything still hold a tensor that was made inside, and lies in the memory of none of these?"""
        storages = {tensor.untyped_storage()._cdata for tensor in known}
        left = filter(lambda tensor: tensor is not None, (made() for made in self._made))
        return any(tensor.untyped_storage()._cdata not in storages for tensor in left)

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.has_read |= any(tag in function.tags for tag in READING)
        self.has_read |= function in COPYING and (keywords or {}).get("device") == torch.device("cpu")
        result = super().__torch_dispatch__(function, types, arguments, keywords)
        if isinstance(result, torch.Tensor) and result.layout is torch.strided:
            self._made.append(weakref.ref(result))
            if torch.Tag.nondeterministic_seeded in function.tags:
                self.drawn_on.add(result.device.type)
        return result


def is_large(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.numel() > LARGE and tensor.is_contiguous()


def draw(tensor: torch.Tensor, fill) -> torch.Tensor:
    """The tensor, with DRAWN numbers that `fill` writes, and then with copies of them."""
    numbers, done = tensor.view(-1), DRAWN
    fill(numbers[:done])
    while done < len(numbers):
        copied = min(done, len(numbers) - done)
        numbers[done : done + copied] = numbers[:copied]
        done += copied
    return tensor
