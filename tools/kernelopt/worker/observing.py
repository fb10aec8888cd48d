"""The job that looks at a task before there is a kernel: what its reference returns, and which inputs it changes."""

from collections.abc import Callable
from dataclasses import replace

import torch

from ..case_types import SHAPES, VALUES, Observation
from . import accuracy, blank, problem, state, tensor_trees
from .context import Context, load_reference
from .contract import ContractError, unstorable
from .faults import OracleError, blaming

# On a CPU larger workloads run on shapes alone.
REAL_BYTES, REAL_FLOPS = 1 << 28, 20 * 10**9


def observe(context: Context, reference: str, workload: str, shapes_alone: bool) -> Observation:
    """A call of the reference on the inputs of a workload, on values where they are small enough for this device and
    not shapes_alone."""
    loaded = load_reference(reference, context.device)
    with blaming(OracleError):
        loaded.chosen([workload])
        observed = None
        if shapes_alone:
            observed, _ = blank.on_shapes_alone(loaded, workload, None, counted)
        elif context.device == "cpu":
            observed = large(loaded, workload)
        if observed is None:
            model, inputs, _ = loaded.build(workload, 0, None, context.device)
            placed = [tensor_trees.place(value, context.device) for value in inputs]
            with loaded.on(context.device):
                observed = of_call(model.to(context.device), placed, VALUES)
        return replace(observed, declared=loaded.declared())


def large(loaded: problem.Reference, workload: str) -> Observation | None:
    """The call on shapes alone; None where the workload is small, or the reference looks at values."""
    try:
        observed, flops = blank.on_meta(loaded, workload, None, counted)
    except Exception:  # it needs contents, or fails anyway, as the call on values then tells
        return None
    return observed if observed.bytes > REAL_BYTES or flops > REAL_FLOPS else None


def counted(model: torch.nn.Module, inputs: list) -> tuple[Observation, int]:
    """(the call on shapes alone, its FLOPs)"""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        return of_call(model, inputs, SHAPES), counter.get_total_flops()


def of_call(model: Callable, inputs: list, ran: str) -> Observation:
    """What one call on these inputs returns and changes."""
    for leaf in tensor_trees.leaves(inputs):
        if isinstance(leaf, torch.nn.Module):  # it may be too large to find out by storing it
            raise unstorable(type(leaf).__name__)
    held = [tensor_trees.input_tensors([value]) for value in inputs]
    before = [[(tensor._version, tensor.clone() if ran == VALUES else None) for tensor in tensors] for tensors in held]
    result = problem.call(model, inputs)
    changed = {
        at: [
            tensor_trees.plain(tensor.dtype) for tensor, old in zip(now, then, strict=True) if has_changed(tensor, *old)
        ]
        for at, (now, then) in enumerate(zip(held, before, strict=True))
    }
    changed = {at: dtypes for at, dtypes in changed.items() if dtypes}
    outputs = tensor_trees.tensors(result)
    if not outputs and not changed:
        raise ContractError("the reference returns no tensor and changes no input")
    return Observation(
        ran,
        [tensor_trees.plain(tensor.dtype) for tensor in outputs],
        [rms_of(tensor) if ran == VALUES else None for tensor in outputs],
        list(result) if isinstance(result, dict) else None,
        len(inputs),
        changed,
        tensor_trees.held_bytes([*tensor_trees.input_tensors(inputs), *state.saved(model).values()]),
    )


def rms_of(tensor: torch.Tensor) -> float | None:
    """The root mean square of a floating tensor's finite elements."""
    if not tensor.is_floating_point():
        return None
    values = accuracy.comparable(tensor.detach())
    return accuracy.root_mean_square(values)


def has_changed(tensor: torch.Tensor, version: int, before: torch.Tensor | None) -> bool:
    """By torch's counter of changes, or by its contents where they are known."""
    return tensor._version != version or (before is not None and not state.identical(before, tensor))
