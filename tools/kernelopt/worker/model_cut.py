"""Jobs that cut a part out of a model as a reference.py, and prove that it computes the same in its place."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from ..model_types import CutReport
from . import model_inside, problem, tensor_trees
from .context import Context
from .contract import NotCut, NotFollowed
from .cut_draft import FOLLOWING, Drafts, RealFiles
from .graph_source import is_whole_slice, named_sizes, origin_of, recorded_sizes
from .model_calls import RecordedCall, recording
from .model_file import ModelFile
from .model_graph import traced


def operators(context: Context, model: str, module: str, workload: str | None) -> dict:
    """The operators that a module runs, in order: {operators: [{name, operator, origin, dtype, shape}]}."""
    file = ModelFile(Path(model), context.device, phase=context.phase)
    target = file.submodule(module)
    call, _ = recorded(file, target, module or "the model", file.chosen(workload))
    file.phase(FOLLOWING)
    try:
        graph, _ = traced(target, call, any_size=True)  # as `cut` does, so that the names are the same
    except NotCut:
        graph, _ = traced(target, call, any_size=False)
    return {"operators": [described(node) for node in graph.nodes]}


def ends_in(
    target: torch.nn.Module, other: RecordedCall, call: RecordedCall, ends: tuple[str, str]
) -> tuple[str, str] | None:
    """The names that the first and the last operator of a chain of `call` have in another call; None where other
    operators lead to the last one there, or sizes cannot be left open. Slices that take all are counted in neither, as
    torch.export leaves them out at size 1."""
    try:
        own, theirs = (
            [node for node in traced(target, one, any_size=True)[0].nodes if not is_whole_slice(node)]
            for one in (call, other)
        )
    except NotCut:
        return None
    names = [node.name for node in own]
    if not set(ends) <= {*names}:
        return None
    first, last = map(names.index, ends)
    if [node.target for node in own[: last + 1]] != [node.target for node in theirs[: last + 1]]:
        return None
    return theirs[first].name, theirs[last].name


def described(node) -> dict:
    tensor = node.meta.get("val")
    is_tensor = isinstance(tensor, torch.Tensor)
    return {
        "name": node.name,
        "operator": str(node.target),
        "origin": origin_of(node),
        "dtype": tensor_trees.plain(tensor.dtype) if is_tensor else None,
        "shape": list(recorded_sizes(tensor)) if is_tensor else None,
    }


def recorded(file: ModelFile, target: torch.nn.Module, name: str, workload: str) -> tuple[RecordedCall, int]:
    """(the first call of a module in a run of the model, how many calls there were). NotCut when there is none, or a
    kernel could not take its arguments as they are."""
    file.phase(f"running the model, workload {workload}")
    with recording(target) as recorder, file.buffers_restored():
        file.run(file.module, file.arguments(workload))
    call = recorder.call
    if call is None:
        raise NotCut(f"the model does not call '{name}' in workload '{workload}'")
    if crowded := [numbers for numbers in call.shared if numbers & call.changed]:
        raise NotCut(
            f"{len(crowded[0])} of its arguments lie in the same memory, and it changes one of them; cut a module "
            "around it, where they are one tensor"
        )
    return call, recorder.calls


def cut(
    context: Context,
    model: str,
    module: str,
    between: list[str] | None,
    workload: str | None,
    folder: str,
    weights: str | None,
    inputs: str | None,
    about: dict,
) -> CutReport:
    """Write reference.py, for a module of a model or a chain of its operators, to `folder`, and prove it. weights,
    inputs: the paths that the reference names for kept ones, whose files are written to `folder`. about: more facts for
    CUT."""
    file = ModelFile(Path(model), context.device, phase=context.phase)
    target, chosen = file.submodule(module), file.chosen(workload)
    call, calls = recorded(file, target, module or "the model", chosen)
    facts = {"model": file.name, "module": module, "between": between, "workload": chosen, **about}
    drafts = Drafts(file, target, Path(folder), facts, RealFiles(weights, inputs))
    ends = tuple(between) if between else None
    others = [(one, ends and ends_in(target, one, call, ends)) for one in wider(file, target, module, chosen, call)]
    try:
        draft, proofs, fixed = drafts.first_proved([one for one in others if one[1] or not ends] + [(call, ends)])
    except NotFollowed as error:
        raise NotCut(f"{error}; {model_inside.advice(file, module, chosen)}") from error
    path, made = draft.write()
    draft.prove(path)
    edge = draft.edges[chosen]
    return CutReport(
        path=str(draft.finished(path)),
        module=module,
        kind=type(target).__name__,
        operators=len(made.chain.inside),
        inputs=[
            [name, tensor_trees.plain(tensor.dtype), list(tensor.shape), list(tensor.stride())]
            for name, tensor in zip(made.inputs.values(), edge, strict=True)
        ],
        results=len(made.chain.outputs),
        parameters=sum(tensor.numel() for tensor in made.state().values()),
        mutates=made.mutated(),
        sizes={size.name: size.recorded for size in named_sizes(made.sizes)},
        fixed=None if named_sizes(made.sizes) else fixed,
        calls=calls,
        workloads=list(problem.Reference(path).workloads),
        proofs=proofs,
    )


def wider(
    file: ModelFile, target: torch.nn.Module, name: str, chosen: str, call: RecordedCall
) -> Iterator[RecordedCall]:
    """The call in another workload that has most sizes above 1, if it has more than the chosen one: torch.export takes
    a size of 1 for fixed."""
    calls = {chosen: call}
    for workload in file.workloads:
        if workload != chosen:
            with contextlib.suppress(NotCut):
                calls[workload] = recorded(file, target, name, workload)[0]
    most = max(calls, key=lambda one: open_sizes(calls[one]))
    if open_sizes(calls[most]) > open_sizes(call):
        yield calls[most]


def open_sizes(call: RecordedCall) -> int:
    """How many sizes of the arguments are above 1."""
    return sum(size > 1 for tensor in call.arguments.tensors() for size in tensor.shape)
