"""Which 16-bit dtype a reference computes its results in, whatever their own dtype is: `(x.half() @ w.half()).float()`
has the rounding errors of fp16. And what it computes without them. Imported by worker processes only.
"""

from collections.abc import Iterator

import torch
from torch.overrides import TorchFunctionMode

from . import tensor_trees

COARSE = {torch.float16: 1, torch.bfloat16: 2}  # the larger, the coarser
NARROW = {torch.float32, *COARSE}
CONVERSIONS = {"half", "bfloat16", "float"}
NAMES = {rank: tensor_trees.NAMES[dtype] for dtype, rank in COARSE.items()}
# Functions whose results hold numbers that they were given, as they were or converted: these round nothing that a
# kernel could round differently. Views are told by their memory.
MOVES = set(
    """abs amax amin argsort bfloat16 cat chunk clamp clone concat contiguous copy cpu cuda diag double embedding empty
    empty_like expand fill flip float full full_like gather getitem half index_copy index_fill index_put index_select
    masked_fill masked_scatter masked_select max maximum min minimum neg new_empty new_full new_zeros ones ones_like pad
    permute relu repeat repeat_interleave reshape roll scatter setitem sort split stack t take_along_dim tensor tile to
    topk transpose tril triu type type_as unbind unfold view where zero zeros zeros_like""".split()
)


class Roundings(TorchFunctionMode):
    """Inside, torch's functions are followed: `of(tensor)` is the coarsest 16-bit dtype that the tensor was computed
    in, None where it is no coarser than its own. What torch does behind a function, compiled code, and kernels of
    Triton or CUDA are not seen."""

    def __init__(self):
        super().__init__()
        self._ranks: dict[int, int] = {}  # by the address of a storage; one that is used anew gets its own

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        made = function(*arguments, **(keywords or {}))
        if torch.compiler.is_compiling():
            return made
        results = list(tensors_in(arguments[:1] if made is None else made))  # x[0] = y returns nothing
        if results:
            given = max([0, *(self._rank(one) for one in tensors_in((arguments, keywords)))])
            computes = plain_name(function) not in MOVES
            for result in results:
                own = COARSE.get(result.dtype, 0) if computes and not is_view(result, arguments) else 0
                self._ranks[address(result)] = max(given, own)
        return made

    def of(self, tensor: torch.Tensor) -> str | None:
        rank = self._rank(tensor)
        return NAMES[rank] if rank > COARSE.get(tensor.dtype, 0) else None

    def _rank(self, tensor: torch.Tensor) -> int:
        place = address(tensor)
        return self._ranks.get(place, 0) if place else 0


class Widened(TorchFunctionMode):
    """Inside, conversions to a floating dtype of 32 or 16 bits give `wide`."""

    def __init__(self, wide: torch.dtype):
        super().__init__()
        self._wide = wide

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        if plain_name(function) in CONVERSIONS:
            return arguments[0].to(self._wide, copy=True)  # what is done to it in place stays out of the argument
        if plain_name(function) == "view":  # of the same bits as another dtype
            return function(*arguments, **(keywords or {}))
        arguments = [self._widened(one) for one in arguments]
        return function(*arguments, **{name: self._widened(one) for name, one in (keywords or {}).items()})

    def _widened(self, value):
        return self._wide if isinstance(value, torch.dtype) and value in NARROW else value


def tensors_in(value) -> Iterator[torch.Tensor]:
    """The tensors with memory of their own or another's in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def address(tensor: torch.Tensor) -> int:
    """0 of a tensor without memory, such as those inside vmap."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def plain_name(function) -> str:
    """Its name without the marks of an operator or of a function in place: getitem, fill."""
    return getattr(function, "__name__", "").strip("_")


def is_view(result: torch.Tensor, arguments: tuple) -> bool:
    """Does it lie in the memory of the first argument, and is another tensor? A function in place returns its first."""
    first = next(tensors_in(arguments[:1]), None)
    return first is not None and result is not first and address(result) == address(first)
