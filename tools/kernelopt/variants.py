"""Shapes and layouts beyond the task's own on which a kernel must be right or say that it does not serve them.

A variant: {name, sizes, layout}; sizes maps a size that occurs among the inputs' dimensions to a smaller one, as text
(JSON has no integer keys). The reference decides which sizes may change: its shapes are tried without data.
Imported by worker processes only.
"""

import torch

from . import problem

PRIMES = (127, 61, 31, 13, 7, 5, 3, 2)
SMALLEST = 4  # a dimension below that is a structure (a pair, a kernel's window), not a size
MOST_SIZES = 3  # so many different sizes are changed, the largest first
LAYOUTS = ("transposed", "misaligned")  # beyond contiguous; the last one may end the process


def of_workload(reference: problem.Reference, workload: str, dtype: str | None, inputs: list) -> list[dict]:
    """Variants of a workload with such inputs: one size 1 at a time; all sizes prime, block - 1 and block + 1; and other
    layouts of the inputs."""
    free = [size for size in sizes_of(inputs) if accepts(reference, workload, dtype, {size: prime(size)})][:MOST_SIZES]
    wanted = [(f"{size} -> 1", {size: 1}) for size in free]
    wanted += [("prime sizes", {size: prime(size) for size in free})]
    wanted += [("block - 1", {size: block(size) - 1 for size in free})]
    wanted += [("block + 1", {size: block(size) + 1 for size in free if block(size) + 1 < size})]
    found = [
        {"name": name, "sizes": as_text(sizes), "layout": "contiguous"}
        for name, sizes in wanted
        if sizes and allowed(inputs, sizes) and accepts(reference, workload, dtype, sizes)
    ]
    small = next((v["sizes"] for v in found if v["name"] == "prime sizes"), {})
    return found + [{"name": f"{layout} inputs", "sizes": small, "layout": layout} for layout in LAYOUTS]


def as_text(sizes: dict[int, int]) -> dict[str, int]:
    return {str(old): new for old, new in sizes.items()}


def sizes_of(inputs: list) -> list[int]:
    """The different sizes of the inputs' dimensions, largest first, structural ones left out."""
    found = {size for tensor in problem.input_tensors(inputs) for size in tensor.shape}
    return sorted((size for size in found if size > SMALLEST), reverse=True)


def prime(size: int) -> int:
    """The largest of PRIMES below `size`."""
    return next(number for number in PRIMES if number < size)


def block(size: int) -> int:
    """The power of two, up to 128, that a smaller tile of `size` would have."""
    power = 1
    while power * 2 < size and power < 128:
        power *= 2
    return power


def allowed(inputs: list, sizes: dict[int, int]) -> bool:
    """May the sizes shrink? Not when integer inputs could be indices into them."""
    whole = [t for t in problem.input_tensors(inputs) if not t.is_floating_point() and not t.is_complex()]
    largest = max((int(t.max()) for t in whole if t.numel() and t.dtype != torch.bool), default=-1)
    return min(sizes.values()) > largest


def cut(case: problem.Case, sizes: dict[str, int]) -> problem.Case:
    """The case with each dimension of a named size cut down to the new one: the first elements stay."""

    def shrunk(tensor: torch.Tensor) -> torch.Tensor:
        for dimension, size in enumerate(tensor.shape):
            if str(size) in sizes:
                tensor = tensor.narrow(dimension, 0, sizes[str(size)])
        return tensor.clone(memory_format=torch.contiguous_format)

    return case.with_inputs(problem.map_tensors(case.inputs, shrunk))


def accepts(reference: problem.Reference, workload: str, dtype: str | None, sizes: dict[int, int]) -> bool:
    """Does the reference take inputs of these sizes? Tried on shapes alone (fake tensors)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model, inputs, init = reference.build(workload, 0, dtype, "cpu")
            case = cut(problem.Case(inputs, init, {}, dtype), as_text(sizes))
            problem.call(model, case.inputs)
            return True
    except Exception:
        return False
