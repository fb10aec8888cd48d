"""Expressions of Python that draw tensors like recorded ones: their sizes and strides, and numbers of their kind."""

import itertools
import math
from collections.abc import Callable

import torch

from . import accuracy, variant_inputs
from .contract import NotCut

FEWER = "there are fewer places to write to"
HELPERS = {
    "drawn": '''
def drawn(shape, dtype, mean, std, low, high):
    """Normal numbers with the mean, the deviation and the range of the recorded ones."""
    return (mean + std * torch.randn(shape)).clamp(low, high).to(dtype)
''',
    "ordered": '''
def ordered(shape, low, high):
    """Whole numbers in ascending order, from the lowest recorded one to the highest."""
    numbers = torch.randint(low, high + 1, shape).sort(-1).values
    numbers[..., 0], numbers[..., -1] = low, high
    return numbers
''',
    "different": f'''
def different(count, low, high):
    """Different whole numbers from the lowest recorded one to the highest, in any order: places to write to."""
    if count > high - low + 1:
        raise ValueError("{FEWER}")
    return low + torch.randperm(high - low + 1)[:count]
''',
    "triangle": '''
def triangle(shape, diagonal, below, above, dtype):
    """A mask: one value up to a diagonal, another one above it."""
    lower = torch.ones(shape, dtype=torch.bool).tril(diagonal)
    return torch.where(lower, torch.tensor(below, dtype=dtype), torch.tensor(above, dtype=dtype))
''',
    "either": '''
def either(shape, share, first, second, dtype):
    """One value in that share of the places, drawn at random, and another one elsewhere."""
    return torch.where(torch.rand(shape) < share, torch.tensor(first, dtype=dtype), torch.tensor(second, dtype=dtype))
''',
}


def places_to_write(tensor: torch.Tensor, sizes: list[str], larger: torch.Tensor) -> str:
    """The same as `expression`, where each number is a place that is written to: none twice, if none was."""
    if tensor.ndim == 1 and larger.unique().numel() == larger.numel() > 1 and not counted(larger, sizes):
        both = torch.cat([tensor, larger])
        return f"different({sizes[0]}, {int(both.min())}, {int(both.max())}).to({tensor.dtype})"
    return expression(tensor, sizes, larger)


def expression(tensor: torch.Tensor, sizes: list[str], larger: torch.Tensor | None = None) -> str:
    """What makes a tensor of these sizes (expressions), with numbers like those of `tensor` and strides like its. A
    single number says little of its kind: then `larger`, of another workload, tells it. The functions in HELPERS stand
    for themselves."""
    if tensor.ndim and tensor.numel() == 1 and larger is not None and larger.numel() > 1:
        return beginning(tensor, larger, sizes)
    one = tensor.detach()[tuple(slice(1) if repeated(tensor, at) else slice(None) for at in range(tensor.ndim))]
    texts = ["1" if repeated(tensor, at) else size for at, size in enumerate(sizes)]
    made = structured(one, texts) or laid_out(one, texts, drawer(one))
    return f"{made}.expand({tupled(sizes)})" if one.shape != tensor.shape else made


def beginning(tensor: torch.Tensor, larger: torch.Tensor, sizes: list[str]) -> str:
    """The expression of `larger`; where that counts up, from the single number of `tensor` on."""
    if not larger.is_floating_point() and not larger.is_complex() and larger.dtype != torch.bool:
        up = torch.arange(larger.shape[-1], device=larger.device)
        if bool((larger == larger.min() + up).all()):
            return counting(int(tensor), larger, sizes)
    return expression(larger, sizes)


def repeated(tensor: torch.Tensor, at: int) -> bool:
    """Does a dimension show one element again and again?"""
    return tensor.shape[at] > 1 and tensor.stride(at) == 0


def tupled(sizes: list[str]) -> str:
    return f"({', '.join(sizes)}{',' * (len(sizes) == 1)})"


def drawer(tensor: torch.Tensor) -> Callable[[str], str]:
    """A function from the expression of a shape to one that draws numbers like these."""
    if tensor.is_complex():
        parts = [drawer(part) for part in (tensor.real, tensor.imag)]
        return lambda shape: f"torch.complex({', '.join(part(shape) for part in parts)})"
    values = accuracy.comparable(tensor).double()
    low, high = float(values.min()), float(values.max())
    if not math.isfinite(low + high):
        raise NotCut("it holds infinities or NaN in no pattern that could be drawn; --keep-inputs FILE keeps it")
    if not tensor.is_floating_point():
        return lambda shape: f"torch.randint({int(low)}, {int(high)} + 1, {shape}, dtype={tensor.dtype})"
    mean, std = float(values.mean()), float(values.std())
    figures = ", ".join(f"{figure:.6g}" for figure in (mean, std, low, high))
    return lambda shape: f"drawn({shape}, {tensor.dtype}, {figures})"


def is_constant(tensor: torch.Tensor) -> bool:
    """Does it hold one value alone?"""
    return bool(tensor.numel()) and variant_inputs.all_equal(accuracy.comparable(tensor))


def structured(tensor: torch.Tensor, sizes: list[str]) -> str | None:
    """The expression for a tensor whose numbers follow a pattern; None for any other."""
    shape, dtype = tupled(sizes), tensor.dtype
    if tensor.numel() == 0:
        return f"torch.empty({shape}, dtype={dtype})"
    if dtype.is_complex:
        return None
    values = accuracy.comparable(tensor)
    first, last = values.amin(), values.amax()
    if first == last:
        return f"torch.full({shape}, {number(first)}, dtype={dtype})"
    if dtype == torch.bool or (tensor.numel() > 2 and bool(((values == first) | (values == last)).all())):
        return two_valued(values, sizes, dtype)
    return None if dtype.is_floating_point else counted(tensor, sizes)


def around_its_value(tensor: torch.Tensor, sizes: list[str]) -> str | None:
    """For a parameter that was never trained, and holds one value alone: numbers around that value. None for others."""
    if not tensor.is_floating_point() or tensor.numel() < 2 or not is_constant(tensor):
        return None
    value = float(accuracy.comparable(tensor).flatten()[0])
    spread = 0.1 * (abs(value) or 1.0)
    figures = ", ".join(f"{one:.6g}" for one in (value, spread, value - 3 * spread, value + 3 * spread))
    return f"drawn({tupled(sizes)}, {tensor.dtype}, {figures})"


def like_what_is_new(tensor: torch.Tensor, later: torch.Tensor, sizes: list[str]) -> str | None:
    """For a cache that is still empty, with one value alone: numbers like those that are written to it, everywhere.
    None where it is none, or these are one value too."""
    if not tensor.is_floating_point() or not is_constant(tensor):
        return None
    new = later[later != tensor]
    return drawer(new)(tupled(sizes)) if new.numel() and not is_constant(new) else None


def is_random(expression: str) -> bool:
    """Does it make other numbers each time?"""
    return any(
        f"{name}(" in expression for name in ("either", "ordered", "different", "randperm", "randint", "drawn", "empty")
    )


def two_valued(tensor: torch.Tensor, sizes: list[str], dtype: torch.dtype) -> str:
    """A causal mask, or two values at random."""
    first, last = tensor.amin(), tensor.amax()
    if tensor.ndim >= 2:
        rows, columns = tensor.shape[-2:]
        for diagonal, text in ((0, "0"), (columns - rows, f"{sizes[-1]} - {sizes[-2]}")):
            lower = torch.ones(rows, columns, dtype=torch.bool, device=tensor.device).tril(diagonal)
            for below, above in ((first, last), (last, first)):
                if bool((tensor == torch.where(lower, below, above)).all()):
                    return f"triangle({tupled(sizes)}, {text}, {number(below)}, {number(above)}, {dtype})"
    share = float((tensor == first).double().mean())
    return f"either({tupled(sizes)}, {share:.6g}, {number(first)}, {number(last)}, {dtype})"


def counted(tensor: torch.Tensor, sizes: list[str]) -> str | None:
    """Whole numbers that count up, are all different, or in order; None for any others."""
    if not tensor.ndim:
        return None
    length, low, high = tensor.shape[-1], int(tensor.min()), int(tensor.max())
    up = torch.arange(length, device=tensor.device)
    if bool((tensor == low + up).all()):
        return counting(low, tensor, sizes)
    if tensor.ndim == 1 and bool((tensor.sort().values == up).all()):
        return f"torch.randperm({sizes[0]}, dtype={tensor.dtype})"
    if length > 2 and bool((tensor[..., 1:] >= tensor[..., :-1]).all()):
        return f"ordered({tupled(sizes)}, {low}, {high}).to({tensor.dtype})"
    return None


def counting(low: int, tensor: torch.Tensor, sizes: list[str]) -> str:
    """Whole numbers that count up from one on, in a tensor like this."""
    made = f"torch.arange({sizes[-1]}, dtype={tensor.dtype})"
    made = f"({low} + {made})" if low else made
    return made if tensor.ndim == 1 else f"{made}.expand({tupled(sizes)}).contiguous()"


def number(value: torch.Tensor) -> str:
    """A single element as Python writes it."""
    text = repr(value.item())
    return f'float("{text}")' if text in ("inf", "-inf", "nan") else text


def laid_out(tensor: torch.Tensor, sizes: list[str], draw: Callable[[str], str]) -> str:
    """The expression of a tensor that is drawn as it lies in memory, then cut and turned into the view that it is.
    Elements that overlap count as dense."""
    real = [at for at in range(tensor.ndim) if tensor.shape[at] > 1]
    by_stride = sorted(real, key=lambda at: -tensor.stride(at))
    order = range(tensor.ndim) if by_stride == real else sorted(range(tensor.ndim), key=lambda at: -tensor.stride(at))
    rooms = {inner: tensor.stride(outer) // tensor.stride(inner) for outer, inner in itertools.pairwise(by_stride)}
    spare = {at: max(0, room - tensor.shape[at]) for at, room in rooms.items()}
    step = tensor.stride(by_stride[-1]) if by_stride else 1
    room = [f"{sizes[at]} + {spare[at]}" if spare.get(at) else sizes[at] for at in order]
    made = draw(tupled(room + [str(step)] * (step > 1)))
    if any(spare.values()) or step > 1:
        cuts = [f":{sizes[at]}" if spare.get(at) else ":" for at in order] + ["0"] * (step > 1)
        made += f"[{', '.join(cuts)}]"
    back = [list(order).index(at) for at in range(tensor.ndim)]
    return made if back == sorted(back) else f"{made}.permute({', '.join(map(str, back))})"
