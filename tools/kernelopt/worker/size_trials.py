"""Does a task take other values of its keyword sizes, and how large are its inputs then?

The shapes answer first, on tensors without contents (blank.on_meta), for get_inputs may compute for seconds on a CPU.
Imported by worker processes only.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from . import blank, problem, tensor_trees
from .keyword_sizes import Keywords
from .state import saved
from .work_limit import TooMuchWork, limited

SEEDS = 3  # that must agree on the sizes, where some of the numbers are drawn
TRIED_BYTES = 1 << 20  # of inputs: the reference runs on so many on the CPU, and may take long over more


@dataclass(frozen=True)
class Held:
    """The bytes of a case's inputs, and of its parameters and buffers."""

    inputs: int
    state: int


def held(reference: problem.Reference, workload: str, seed: int, dtype: str | None, sizes: Keywords) -> Held | None:
    """What a case of these sizes holds, by shapes alone; None where shapes do not tell."""

    def counted(model, inputs: list) -> Held:
        both = tensor_trees.input_tensors(inputs), saved(model).values()
        return Held(*(sum(one.nbytes for one in tensors) for tensors in both))

    with contextlib.suppress(Exception):
        return blank.on_meta(reference, workload, dtype, counted, sizes, seed)
    with contextlib.suppress(Exception):
        drawn = {blank.inputs_on_meta(reference, workload, dtype, counted, sizes, seed + more) for more in range(SEEDS)}
        # Large tensors are not drawn, so later draws are not the real ones: sizes that depend on them differ.
        return drawn.pop() if len(drawn) == 1 else None
    return None


def trial(
    reference: problem.Reference, workload: str, dtype: str | None, limit_bytes: int, trust_shapes: bool = True
) -> Callable[[Keywords], bool]:
    """A function that says whether the task takes these sizes: it makes inputs of at most limit_bytes, and the
    reference, tried on small ones, runs on them. trust_shapes: larger inputs are not made where their shapes pass;
    preparing makes them later, and calls again without trust if their contents fail."""

    def possible(sizes: Keywords) -> bool:
        shown = held(reference, workload, 0, dtype, sizes)
        if shown and shown.inputs > limit_bytes:
            return False
        if shown and trust_shapes and shown.inputs > TRIED_BYTES:
            return True
        try:
            apart = reference.apart("cpu")
            model, inputs, _ = apart.build(workload, 0, dtype, "cpu", sizes)
            total = sum(tensor.nbytes for tensor in tensor_trees.input_tensors(inputs))
            if total <= TRIED_BYTES:
                limited(lambda: apart.call(model, [tensor_trees.place(one, "cpu") for one in inputs], "cpu"))
            return total <= limit_bytes
        except TooMuchWork:
            return True
        except Exception:
            return False

    return possible
