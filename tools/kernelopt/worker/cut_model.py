"""The text of class Model in reference.py: the operators of a chain, and parameters and buffers like the real ones."""

import re
import textwrap
from collections.abc import Iterator

import torch
from torch import fx, nn

from . import recorded_values
from .contract import NotCut
from .cut_part import Cut
from .graph_source import Writer, named_sizes

FEW = 64  # elements of a constant that are written out
WRITTEN_OUT = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool}


def model_text(cut: Cut, weights: str | None) -> str:
    """class Model. weights: a line that loads kept ones, or None."""
    names = dict(cut.inputs)
    names |= {node: member("self", name) for node, name in cut.state_names().items()}
    first = next(iter(names.values()))
    writer = Writer(names, cut.sizes, cut.own, f"{first}.device")
    body = [f"{names[node]} = {names[node]}.clone()  # nobody reads it afterwards" for node in cut.chain.scratch]
    body += [*writer.views(cut.chain.first), *writer.lines(cut.chain.inside)]
    results = [writer.names[node] for node in cut.chain.outputs]
    body += [f"return {', '.join(results)}"] if results else []
    anchor = next((name for node, name in names.items() if node.meta["val"].dtype == cut.own), None)
    head = [*dtype_lines(body, anchor), *size_lines(cut.sizes, writer.used_sizes)]
    parameters = ", ".join(["self", *cut.inputs.values()])
    made = "".join(indented(text, 2) for text in init_lines(cut)) + (indented(weights, 2) if weights else "")
    text = f"\n\nclass Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n{made}"
    return f"{text}\n    def forward({parameters}):\n" + "".join(indented(line, 2) for line in [*head, *body])


def indented(text: str, levels: int) -> str:
    return textwrap.indent(text, "    " * levels) + "\n"


def dtype_lines(body: list[str], anchor: str | None) -> Iterator[str]:
    """The definitions of `dtype` and `wide`, where the body uses them."""
    text = "\n".join(body)
    uses_wide = re.search(r"\bwide\b", text)
    if uses_wide or re.search(r"\bdtype\b(?!=)(?=[,)])", text):
        yield f"dtype = {anchor}.dtype"
    if uses_wide:
        yield "wide = torch.promote_types(dtype, torch.float32)"


def size_lines(sizes: dict, used: set[str]) -> list[str]:
    return [f"{size.name} = {size.expression}" for size in named_sizes(sizes) if size.name in used]


def init_lines(cut: Cut) -> Iterator[str]:
    """The lines that make the parameters and buffers, with random numbers like theirs."""
    made: set[str] = set()
    for node, name in cut.state_names().items():
        tensor = cut.tensor(node)
        owner, _, leaf = name.rpartition(".")
        yield from container_lines(owner, made)
        value, place = numbers_text(cut, node), submodule("self", owner)
        if not isinstance(tensor, nn.Parameter):
            yield f'{place}.register_buffer("{leaf}", {value})'
            continue
        value = f"nn.Parameter({value}{'' if tensor.requires_grad else ', requires_grad=False'})"
        yield f"{place}.{leaf} = {value}" if leaf.isidentifier() else f'{place}.register_parameter("{leaf}", {value})'


def container_lines(path: str, made: set[str]) -> Iterator[str]:
    """The lines that make the modules on a path, those in `made` excepted."""
    parts = path.split(".") if path else []
    for count in range(1, len(parts) + 1):
        own, above, leaf = ".".join(parts[:count]), ".".join(parts[: count - 1]), parts[count - 1]
        if own not in made:
            made.add(own)
            yield f'{submodule("self", above)}.add_module("{leaf}", nn.Module())'


def member(root: str, name: str) -> str:
    """The expression of a member: self.up.weight, or self.get_submodule("layers.0").weight."""
    owner, _, leaf = name.rpartition(".")
    place = submodule(root, owner)
    return f"{place}.{leaf}" if leaf.isidentifier() else f'getattr({place}, "{leaf}")'


def submodule(root: str, path: str) -> str:
    """The expression of a submodule, the root itself for ""."""
    parts = path.split(".") if path else []
    if all(part.isidentifier() for part in parts):
        return ".".join([root, *parts])
    return f'{root}.get_submodule("{path}")'


def numbers_text(cut: Cut, node: fx.Node) -> str:
    """What makes the numbers of a parameter or buffer: in their pattern, as they are where they are few, or at random.
    A constant, which no module could give back to the kernel, is exact; NotCut where it is too large for that."""
    tensor = cut.tensor(node).detach()
    sizes = [str(size) for size in tensor.shape]
    if isinstance(cut.tensor(node), nn.Parameter) and (around := recorded_values.around_its_value(tensor, sizes)):
        return around
    if node in cut.chain.changed and (filled := filled_text(cut, node)):
        return filled
    pattern, written = recorded_values.structured(tensor, sizes), literal(cut.tensor(node))
    if node not in cut.graph.constants:
        return pattern or written or recorded_values.expression(tensor, sizes)
    if pattern and recorded_values.is_random(pattern):
        pattern = None
    if not (written or pattern):
        raise NotCut(
            f"it makes a constant of {tensor.numel()} numbers, too many to be written out; let the module hold it as a "
            "buffer"
        )
    return written or pattern


def filled_text(cut: Cut, node: fx.Node) -> str | None:
    """What fills a cache that is still empty; None for another buffer."""
    tensor, later = cut.tensor(node).detach(), cut.afterwards.get(cut.graph.state.get(node))
    return None if later is None else recorded_values.like_what_is_new(tensor, later, [*map(str, tensor.shape)])


def literal(tensor: torch.Tensor) -> str | None:
    """The numbers of a small tensor that is no parameter, written out."""
    if isinstance(tensor, nn.Parameter) or tensor.numel() > FEW or tensor.dtype not in WRITTEN_OUT:
        return None
    text = re.sub(r"\b(-?inf|nan)\b", r'float("\1")', repr(tensor.tolist()))
    return f"torch.tensor({text}, dtype={tensor.dtype})"
