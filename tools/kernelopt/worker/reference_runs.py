"""Calls of the reference in the task's own dtype. A candidate is never loaded beside them."""

import contextlib
from dataclasses import dataclass

import torch

from . import problem, state, tensor_trees
from .contract import ContractError, InvalidDeclaration
from .declarations import Declarations
from .roundings import Roundings


@dataclass(frozen=True)
class ReferenceRun:
    """One call of the reference. outputs: what it returns, then the inputs that it is declared to change. computed_in:
    by output, a 16-bit dtype that it was computed in and that is coarser than its own, where that was asked for.
    returned: how many outputs it returns. structure: of what it returns (tensor_trees.structure). model: after the
    call."""

    outputs: list[torch.Tensor]
    computed_in: list[str | None]
    returned: int
    structure: str
    model: torch.nn.Module


def outputs(loaded: problem.Reference, case: problem.Case, device: str, draw: int = 0) -> list[torch.Tensor]:
    """The reference's results in the task's own dtype. Another `draw` gives it other random numbers, if it uses any."""
    return run(loaded, case, device, draw).outputs


def run(
    loaded: problem.Reference, case: problem.Case, device: str, draw: int = 0, follow: bool = False
) -> ReferenceRun:
    """Call the reference on a case. InvalidDeclaration when it changes an input that the task does not declare.
    follow: find out what it computes in, if it runs so; that takes some 10 us of the host for each of torch's
    functions."""
    if follow:
        try:
            return called(loaded, case, device, draw, Roundings())
        except ContractError:
            raise
        except Exception:  # compiled code may not like it; what the reference itself raises, it raises again
            pass
    return called(loaded, case, device, draw)


def called(
    loaded: problem.Reference, case: problem.Case, device: str, draw: int, roundings: Roundings | None = None
) -> ReferenceRun:
    """`run`. roundings: they follow the call, and tell what its results were computed in."""
    model, inputs = loaded.model(case, device), case.placed_inputs(device)
    versions = [tensor._version for tensor in tensor_trees.input_tensors(inputs)]
    problem.seed_generators(draw)
    with roundings or contextlib.nullcontext():
        result = loaded.call(model, inputs, device)
    refuse_undeclared(loaded.declarations, case.inputs, inputs, versions)
    returned = tensor_trees.tensors(result)
    mutated = loaded.mutated(inputs)
    if not returned and not mutated:
        raise ContractError("the reference returns no tensor and changes no input")
    outputs = [*returned, *mutated]
    computed_in = [roundings.of(one) if roundings else None for one in outputs]
    return ReferenceRun(outputs, computed_in, len(returned), tensor_trees.structure(result), model)


def refuse_undeclared(declarations: Declarations, given: list, inputs: list, versions: list[int]) -> None:
    """InvalidDeclaration when an input was changed that MUTATES does not name: the kernel's effect on it would not be
    judged. versions: torch's counters of changes, before the call; a change to the same value counts."""
    tensors, left = tensor_trees.input_tensors(given), tensor_trees.input_tensors(inputs)
    if len(tensors) != len(left):
        raise InvalidDeclaration(
            "the reference puts tensors into a list, dict or object among its inputs, or takes some out; have forward "
            "work on a copy of it"
        )
    allowed = declarations.mutated_tensors(given)
    pairs = zip(tensors, left, versions, strict=True)
    for number, (before, after, version) in enumerate(pairs):
        if number in allowed:
            continue
        if after._version != version or not state.identical(before.to(after.device), after):
            name = declarations.name_of_tensor(given, number)
            shown = repr(name) if not name.isdigit() else name
            raise InvalidDeclaration(
                f"the reference changes its input {shown} in place, and its contents would not be judged; declare it "
                f"in reference.py, MUTATES = {mutates_with(declarations, name)}, or have forward work on a copy"
            )


def mutates_with(declarations: Declarations, name: str) -> str:
    """MUTATES as it must be written to name one parameter more."""
    names = [*(declarations.name(position) for position in declarations.mutates), name]
    shown = ", ".join(one if one.isdigit() else f'"{one}"' for one in names)
    return f"({shown},)" if len(names) == 1 else f"({shown})"
