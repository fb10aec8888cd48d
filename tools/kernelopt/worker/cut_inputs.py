"""The text of get_inputs and get_workloads in reference.py: tensors like those that the chain got, at sizes at which
the model takes the same way."""

import contextlib
import functools
import random
import re
import types

import torch
from torch import fx

from . import recorded_values
from .contract import NotCut
from .cut_part import Cut
from .graph_source import Size, named_sizes, size_text
from .model_graph import arguments, root

SIZE_OF_GUARD = re.compile(r"L\['tensors'\]\[(\d+)\]\.size\(\)\[(\d+)\]")
RECORDED = '''

def recorded(name):
    """The inputs of a workload of the model, each number times one from 0.75 to 1.25, so that calls differ."""
    inputs = {reading}[name]
    return [
        (one * (0.75 + 0.5 * torch.rand_like(one.float()))).to(one.dtype) if one.is_floating_point() else one
        for one in inputs
    ]
'''
OTHER_WAY = "at these sizes the model takes another way"
NO_CASES = (OTHER_WAY, recorded_values.FEWER)  # what get_inputs says of sizes that it does not take
TRIED_SIZES = (4, 5, 6, 7, 8, 9, 12, 16, 17, 31, 64, 100, 127, 128, 1000, 4096, 5000)
TRIES = 200
NEAR = 64  # how far from a size others are tried
WRITING_BY_INDEX = ("index_put", "index_copy", "index_fill", "scatter")


def inputs_text(cut: Cut, edge: list[torch.Tensor], edges: list[list[torch.Tensor]], also: list[dict[str, int]]) -> str:
    """get_inputs, for the tensors that the chain got. edges: the same in each workload. also: other sizes that it must
    take."""
    keywords = [f"{size.name}={size.recorded}" for size in named_sizes(cut.sizes)]
    parameters = f"*, {', '.join(keywords)}" if keywords else ""
    lines = [f"\n\ndef get_inputs({parameters}):"]
    if conditions := size_conditions(cut, also):
        lines += [f"    if not ({' and '.join(conditions)}):", f'        raise ValueError("{OTHER_WAY}")']
    lines.append("    return [")
    targets = written_places(cut.chain.inside)
    for node, tensor, everywhere in zip(cut.chain.inputs, edge, zip(*edges, strict=True), strict=True):
        sizes = [size_text(size, cut.sizes) for size in node.meta["val"].shape]
        larger = max(everywhere, key=torch.Tensor.numel)
        write = recorded_values.places_to_write if node in targets else recorded_values.expression
        try:
            lines.append(f"        {write(tensor, sizes, larger)},  # {cut.inputs[node]}")
        except NotCut as error:
            raise NotCut(f"the input '{cut.inputs[node]}': {error}") from None
    return "\n".join([*lines, "    ]", ""])


def written_places(nodes: list[fx.Node]) -> set[fx.Node]:
    """The tensors of whole numbers that say where an operator writes. A place that sums up may get several."""
    indices: list[fx.Node] = []
    for node in nodes:
        given = {argument.name: value for argument, value in arguments(node)} if is_write_by_index(node) else {}
        if not given.get("accumulate"):
            own = given.get("index", given.get("indices", ()))
            indices += [one for one in (own if isinstance(own, list | tuple) else [own]) if isinstance(one, fx.Node)]
    return {root(one) for one in indices}


def is_write_by_index(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._opname.rstrip("_") in WRITING_BY_INDEX


def size_conditions(cut: Cut, also: list[dict[str, int]]) -> list[str]:
    """The conditions on sizes under which the operators are those of the model, in the names of get_inputs. Conditions
    that fail for very small sizes alone, or for sizes in `also`, are left out: torch.export makes them of what it takes
    for granted."""
    shapes = [node.meta["val"].shape for node in cut.graph.inputs]
    recorded = {size.name: size.recorded for size in named_sizes(cut.sizes)}
    conditions: dict[str, None] = {}
    for guard in cut.graph.guards:
        with contextlib.suppress(NotCut):  # of a size that the chain does not see
            text = SIZE_OF_GUARD.sub(lambda m: size_text(shapes[int(m[1])][int(m[2])], cut.sizes), guard)
            if all(holds(text, sizes) for sizes in (recorded, *also)) and not always_holds(text, tuple(recorded)):
                conditions[bracketed(text)] = None
    return list(conditions)


def bracketed(condition: str) -> str:
    """A condition that others may follow after `and`."""
    return f"({condition})" if " or " in condition else condition


def is_single(conditions: list[str], size: Size) -> bool:
    """Do the conditions leave a size, if no other one changes, its recorded value alone? Those are meant that name no
    other size. Values near it, its multiples and small ones are tried."""
    own = [one for one in conditions if holds(one, {size.name: size.recorded})]
    near = range(max(1, size.recorded - NEAR), size.recorded + NEAR + 1)
    others = {*range(1, NEAR), *near, *(size.recorded * times for times in (2, 3, 4)), size.recorded // 2}
    return not any(all(holds(one, {size.name: other}) for one in own) for other in others - {0, size.recorded})


def holds(condition: str, sizes: dict[str, int]) -> bool:
    try:
        return eval(compiled(condition), {"max": max, "min": min}, sizes) is True
    except (SyntaxError, NameError, TypeError, ZeroDivisionError):
        return False


@functools.cache
def compiled(condition: str) -> types.CodeType:
    return compile(condition, "a condition", "eval")


@functools.cache
def always_holds(condition: str, names: tuple[str, ...]) -> bool:
    """Does a condition hold for all sizes that are not very small? Some are tried."""
    generator = random.Random(0)
    return all(holds(condition, {name: generator.choice(TRIED_SIZES) for name in names}) for _ in range(TRIES))


def workloads_text(sizes: dict[str, dict[str, int]], recorded: tuple[str, list[str]] | None) -> str:
    """get_workloads. sizes: of the model's other workloads. recorded: what reads the inputs of workloads that are kept,
    and their names."""
    entries = [f"{free_name(name)!r}: {own!r}" for name, own in sizes.items()]
    text = ""
    if recorded:
        text = RECORDED.replace("{reading}", recorded[0])
        entries += [f"{f'recorded_{name}'!r}: lambda: recorded({name!r})" for name in recorded[1]]
    if not entries:
        return ""
    lines = "".join(f"        {entry},\n" for entry in entries)
    return f"{text}\n\ndef get_workloads():\n    return {{\n{lines}    }}\n"


def free_name(workload: str) -> str:
    """The name of a workload beside `default`, which is the one of get_inputs."""
    return "model_default" if workload == "default" else workload
