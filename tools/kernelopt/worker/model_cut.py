"""Jobs that cut a part out of a model as a reference.py, and prove that it computes the same in its place."""

import contextlib
import operator
from dataclasses import dataclass
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
from .recorded_values import is_constant


def operators(context: Context, model: str, module: str, workload: str | None, call: int = 1) -> dict:
    """The operators that a call of a module runs, in order: {operators: [{name, operator, origin, dtype, shape}]}."""
    file = ModelFile(Path(model), context.device, phase=context.phase)
    part = Part(file, module, call)
    recorded, _ = part.recorded(file.chosen(workload))
    file.phase(FOLLOWING)
    try:
        graph, _ = traced(part.target, recorded, any_size=True)  # as `cut` does, so that the names are the same
    except NotCut:
        graph, _ = traced(part.target, recorded, any_size=False)
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
        "operator": "getitem" if node.target is operator.getitem else str(node.target),
        "origin": origin_of(node),
        "dtype": tensor_trees.plain(tensor.dtype) if is_tensor else None,
        "shape": list(recorded_sizes(tensor)) if is_tensor else None,
    }


def cut(
    context: Context,
    model: str,
    module: str,
    between: list[str] | None,
    workload: str | None,
    call: int,
    folder: str,
    weights: str | None,
    inputs: str | None,
    about: dict,
) -> CutReport:
    """Write reference.py, for a module of a model or a chain of its operators, to `folder`, and prove it. call: which
    of the module's in a step, from 1. weights, inputs: the paths that the reference names for kept ones, whose files
    are written to `folder`. about: more facts for CUT."""
    file = ModelFile(Path(model), context.device, phase=context.phase)
    part, chosen = Part(file, module, call), file.chosen(workload)
    recorded, calls = part.recorded(chosen)
    facts = {"model": file.name, "module": module, "between": between, "workload": chosen, **about}
    drafts = Drafts(file, part.target, Path(folder), facts, RealFiles(weights, inputs))
    try:
        draft, proofs, fixed = drafts.first_proved(tried(part, chosen, recorded, tuple(between) if between else None))
    except NotFollowed as error:
        raise NotCut(f"{error}; {model_inside.advice(file, module, chosen)}") from error
    path, made = draft.write()
    draft.prove(path)
    return CutReport(
        path=str(draft.finished(path)),
        module=module,
        kind=type(part.target).__name__,
        operators=len(made.chain.inside),
        inputs=[
            [name, tensor_trees.plain(tensor.dtype), list(tensor.shape), list(tensor.stride())]
            for name, tensor in zip(made.inputs.values(), draft.seen[chosen].inputs, strict=True)
        ],
        constant=[
            name
            for name, one in zip(made.inputs.values(), draft.seen[chosen].inputs, strict=True)
            if one.is_floating_point() and one.numel() > 1 and is_constant(one)
        ],
        results=len(made.chain.outputs),
        tensors=len(made.inputs) + len(made.state()),
        parameters=sum(tensor.numel() for tensor in made.state().values()),
        mutates=made.mutated(),
        sizes={size.name: size.recorded for size in named_sizes(made.sizes)},
        fixed=None if named_sizes(made.sizes) else fixed,
        calls=calls,
        workloads=list(problem.Reference(path).workloads),
        proofs=proofs,
    )


@dataclass(frozen=True)
class Part:
    """A module of a model, and which of its calls in a step is cut out, from 1."""

    file: ModelFile
    path: str
    number: int

    @property
    def target(self) -> torch.nn.Module:
        return self.file.submodule(self.path)

    def recorded(self, workload: str) -> tuple[RecordedCall, int]:
        """(the call, how many there are). NotCut when there is none, or a kernel could not take its arguments as they
        are."""
        name = self.path or "the model"
        self.file.phase(f"running the model, workload {workload}")
        with recording(self.target, self.number) as recorder, self.file.buffers_restored():
            self.file.run(self.file.module, self.file.arguments(workload))
        call = recorder.call
        if call is None and recorder.calls:
            times = "once" if recorder.calls == 1 else f"{recorder.calls} times"
            raise NotCut(
                f"the model calls '{name}' {times} in workload '{workload}', so there is no --call {self.number}"
            )
        if call is None:
            raise NotCut(
                f"the model does not call '{name}' by its forward in workload '{workload}'; cut a module around it, or "
                "name another --workload"
            )
        if crowded := [numbers for numbers in call.shared if numbers & call.changed]:
            raise NotCut(
                f"{len(crowded[0])} of its arguments lie in the same memory, and it changes one of them; cut a module "
                "around it, where they are one tensor"
            )
        return call, recorder.calls


def tried(
    part: Part, chosen: str, call: RecordedCall, ends: tuple[str, str] | None
) -> list[tuple[RecordedCall, tuple[str, str] | None]]:
    """The calls to cut out in turn, with the names of the first and the last operator there: the one in the workload
    that has most sizes above 1, because torch.export takes a size of 1 for fixed, and the wanted one."""
    calls = {chosen: call}
    for workload in part.file.workloads:
        if workload != chosen:
            with contextlib.suppress(NotCut):
                calls[workload], _ = part.recorded(workload)
    widest = max(calls.values(), key=open_sizes)
    if open_sizes(widest) <= open_sizes(call):
        return [(call, ends)]
    if ends is None:
        return [(widest, None), (call, None)]
    part.file.phase(FOLLOWING)
    others = ends_in(part.target, widest, call, ends)
    return [(widest, others), (call, ends)] if others else [(call, ends)]


def open_sizes(call: RecordedCall) -> int:
    """How many sizes of the arguments are above 1."""
    return sum(size > 1 for tensor in call.arguments.tensors() for size in tensor.shape)
