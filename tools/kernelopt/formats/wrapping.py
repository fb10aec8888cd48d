"""A function of a source as the forward of Model: the text that it needs, and how it is called."""

import ast
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import UsageError
from . import edits
from .definitions import Definition, Spec
from .provenance import origin_of
from .source_code import Source, assembled, function, parameters
from .tasks import RESERVED, Bounds, Task, Workload, Wrapped
from .workloads import shape_text

RUN = "run"
SEEDS = "seeds: a fixed seed in the code is left out, so that each seed gives other inputs"


@dataclass(frozen=True)
class Runnable:
    """definition: with the names that functions have in `code`. more: expressions of arguments besides the inputs."""

    definition: Definition
    code: str
    model: Wrapped
    parameters: tuple[str, ...]
    lazy_annotations: bool = False
    more: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


def of_definition(definition: Definition) -> Runnable:
    """The function `run` of a definition. UsageError where it cannot be called with the inputs."""
    source = Source(definition.reference, f"the reference in {definition.where}")
    run = function(source.tree, RUN)
    if run is None:
        raise UsageError(f"{source.where} does not define the function run")
    custom = definition.custom
    if custom and function(source.tree, custom) is None:
        raise UsageError(f"{source.where} does not define {custom}, its custom_inputs_entrypoint")
    if custom in edits.renamed(source, RESERVED):
        definition = replace(definition, custom=edits.new_name(custom))
    fixed = edits.with_every_seed(source)
    arguments = tuple(definition.inputs)
    written_into = parameters(run) == [*definition.inputs, *definition.outputs]
    if written_into:
        arguments += tuple(definition.outputs)
    elif not run.args.vararg and len(parameters(run)) != len(arguments):
        raise UsageError(
            f"{source.where}: run takes {len(parameters(run))} arguments, the definition has {len(arguments)}"
        )
    return Runnable(
        definition=definition,
        code=assembled(source, {}, {RUN, *filter(None, [custom])}),
        model=Wrapped(
            call=f"{RUN}({', '.join(arguments)})",
            outputs=tuple(definition.outputs),
        ),
        parameters=arguments,
        lazy_annotations=has_lazy_annotations(source),
        more=tuple(map(buffer, definition.outputs.values())) if written_into else (),
        remarks=(SEEDS,) if fixed else (),
    )


def task_of(
    format_name: str,
    path: Path,
    runnable: Runnable,
    inputs: str,
    workloads: tuple[Workload, ...],
    bounds: Bounds,
    contiguous: bool,
    remarks: Iterable[str],
    more: str = "",
) -> Task:
    """The task of a definition that is read. path: its file."""
    definition = runnable.definition
    return Task(
        format=format_name,
        name=definition.name,
        description=definition.description,
        origin=origin_of(path, [definition.reference]),
        code=runnable.code,
        model=runnable.model,
        parameters=runnable.parameters,
        inputs=inputs,
        workloads=workloads,
        bounds=bounds,
        contiguous=contiguous,
        more=more,
        lazy_annotations=runnable.lazy_annotations,
        remarks=tuple(remarks),
    )


def has_lazy_annotations(source: Source) -> bool:
    return any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in source.tree.body)


def buffer(spec: Spec) -> str:
    """The expression of an output that run writes into."""
    return f"torch.empty({shape_text(spec)}, dtype=torch.{spec.dtype})"
