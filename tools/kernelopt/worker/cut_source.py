"""The text of reference.py for a chain of operators: Model, its inputs, and the call of the module around it."""

import contextlib
import dataclasses
import hashlib
import inspect
import math
import random
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import fx

from . import recorded_values, tensor_trees
from .contract import NotCut
from .graph_source import Writer, assigned, named_sizes, recorded_sizes, size_text, sizes_of
from .model_calls import Made, Place, TakenApart
from .model_chain import Chain
from .model_graph import Graph, arguments, root
from .recorded_values import tupled

SIZE_OF_GUARD = re.compile(r"L\['tensors'\]\[(\d+)\]\.size\(\)\[(\d+)\]")
KEPT = '''
def kept(path, digest):
    """The tensors of a file of cut_problem.py."""
    import hashlib
    import pathlib

    if hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest() != digest:
        raise ValueError(f"{path} is not the file that this problem was made with")
    return torch.load(path, map_location=torch.empty(0).device, weights_only=True)
'''
RECORDED = '''

def recorded(name):
    """The inputs of a workload of the model, each number times one from 0.75 to 1.25, so that calls differ."""
    inputs = {reading}[name]
    return [
        (one * (0.75 + 0.5 * torch.rand_like(one.float()))).to(one.dtype) if one.is_floating_point() else one
        for one in inputs
    ]
'''
REQUIRED = '''
class OtherCall(ValueError):
    """A call of another form, or of sizes that the cut is not made for. condition: what it lacks."""

    def __init__(self, condition):
        part = CUT["module"] or "the model"
        leave = f"put_back.py --where {condition!r} leaves others to the original"
        super().__init__(f"{part} was cut out of a call with {condition}; {leave}")
        self.condition = condition


def required(holds, condition):
    if not holds:
        raise OtherCall(condition)
'''
OTHER_WAY = "at these sizes the model takes another way"
NO_CASES = (OTHER_WAY, recorded_values.FEWER)  # what get_inputs says of sizes that it does not take
TRIED_SIZES = (4, 5, 6, 7, 8, 9, 12, 16, 17, 31, 64, 100, 127, 128, 1000, 4096, 5000)
TRIES = 200
Form = list[tuple[int, ...]]  # the sizes of the tensors among the arguments of a call of a module
WRITING_BY_INDEX = ("index_put", "index_copy", "index_fill", "scatter")
FEW = 64  # elements of a constant that are written out
HEAD = '''"""{title}

The operators are those that ran, by torch.export, with the tensors that they got: sizes, strides and kinds of numbers.
cut_problem.py wrote this file. `call` is for put_back.py: the module's call in the model, with a kernel in it.
"""

import math

import torch
import torch.nn as nn

CUT = {{
{cut}}}
'''


@dataclass(frozen=True)
class Cut:
    """What is cut out. inputs: names of the chain's inputs. sizes: of these, that may differ, by symbol. own: the dtype
    of most of its floating numbers; None without any. afterwards: what buffers hold once the model has run, by name."""

    graph: Graph
    taken: TakenApart
    chain: Chain
    module: torch.nn.Module
    inputs: dict[fx.Node, str]
    sizes: dict
    own: torch.dtype | None
    afterwards: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph, taken: TakenApart, chain: Chain, module: torch.nn.Module) -> "Cut":
        inputs = {node: graph.inputs.get(node, node.name) for node in chain.inputs}
        sizes = sizes_of({name: node.meta["val"] for node, name in inputs.items()})
        tensors = [node.meta["val"] for node in (*chain.inputs, *chain.state)]
        return cls(graph, taken, chain, module, inputs, sizes, own_dtype(tensors))

    def state(self) -> dict[str, torch.Tensor]:
        """The parameters, buffers and constants of the chain, by their names in Model."""
        return {name: self.tensor(node) for node, name in self.state_names().items()}

    def state_names(self) -> dict[fx.Node, str]:
        graph, numbers = self.graph, {node: at for at, node in enumerate(self.graph.constants)}
        return {node: graph.state.get(node) or f"constant_{numbers[node]}" for node in self.chain.state}

    def sizes_in(self, tensors: list[torch.Tensor]) -> dict[str, int]:
        """The sizes that may differ, as these inputs of the chain have them."""
        named = dict(zip(self.inputs.values(), tensors, strict=True))
        return {size.name: eval(size.expression, {}, named) for size in named_sizes(self.sizes)}

    def at_sizes_of(self, tensors: list[torch.Tensor]) -> "Cut":
        """The same with the sizes of these inputs as the recorded ones."""
        recorded = self.sizes_in(tensors)
        return self.with_sizes(
            {symbol: dataclasses.replace(size, recorded=recorded[size.name]) for symbol, size in self.sizes.items()}
        )

    def with_sizes(self, sizes: dict) -> "Cut":
        """The same with other names for its sizes, or fixed ones."""
        return dataclasses.replace(self, sizes=sizes)

    def mutated(self) -> list[str]:
        """The names of the inputs that the chain changes."""
        return [self.inputs[node] for node in self.chain.changed if node in self.inputs]

    def tensor(self, node: fx.Node) -> torch.Tensor:
        """The parameter, buffer or constant that a node stands for."""
        if node in self.graph.constants:
            return self.graph.constants[node]
        return find_state(self.module, self.graph.state[node])


def own_dtype(tensors: list[torch.Tensor]) -> torch.dtype | None:
    """The dtype that holds most elements among floating tensors of 16 bits and more."""
    counts: dict[torch.dtype, int] = {}
    for tensor in tensors:
        if tensor.dtype in tensor_trees.NAMES:
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + math.prod(recorded_sizes(tensor))
    return max(counts, key=counts.get) if counts else None


def find_state(module: torch.nn.Module, name: str) -> torch.Tensor:
    """A parameter or buffer by its dotted name."""
    owner, _, leaf = name.rpartition(".")
    return getattr(module.get_submodule(owner), leaf)


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
        if not isinstance(tensor, torch.nn.Parameter):
            yield f'{place}.register_buffer("{leaf}", {value})'
            continue
        value = f"nn.Parameter({value}{'' if tensor.requires_grad else ', requires_grad=False'})"
        yield f"{place}.{leaf} = {value}" if leaf.isidentifier() else f'{place}.register_parameter("{leaf}", {value})'


def numbers_text(cut: Cut, node: fx.Node) -> str:
    """What makes the numbers of a parameter or buffer: in their pattern, as they are where they are few, or at random.
    A constant, which no module could give back to the kernel, is exact; NotCut where it is too large for that."""
    tensor = cut.tensor(node).detach()
    sizes = [str(size) for size in tensor.shape]
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


def container_lines(path: str, made: set[str]) -> Iterator[str]:
    """The lines that make the modules on a path, those in `made` excepted."""
    parts = path.split(".") if path else []
    for count in range(1, len(parts) + 1):
        own, above, leaf = ".".join(parts[:count]), ".".join(parts[: count - 1]), parts[count - 1]
        if own not in made:
            made.add(own)
            yield f'{submodule("self", above)}.add_module("{leaf}", nn.Module())'


def literal(tensor: torch.Tensor) -> str | None:
    """The numbers of a small tensor that is no parameter, written out."""
    if isinstance(tensor, torch.nn.Parameter) or tensor.numel() > FEW or tensor.dtype not in WRITTEN_OUT:
        return None
    text = re.sub(r"\b(-?inf|nan)\b", r'float("\1")', repr(tensor.tolist()))
    return f"torch.tensor({text}, dtype={tensor.dtype})"


WRITTEN_OUT = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool}


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
            if all(holds(text, sizes) for sizes in (recorded, *also)) and not always_holds(text, recorded):
                conditions[text] = None
    return list(conditions)


def holds(condition: str, sizes: dict[str, int]) -> bool:
    try:
        return eval(condition, {"max": max, "min": min}, sizes) is True
    except (SyntaxError, NameError, TypeError, ZeroDivisionError):
        return False


def always_holds(condition: str, names: Iterable[str]) -> bool:
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


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def call_text(cut: Cut, name: str, forms: list[Form]) -> str:
    """The function `call`: the module's call, with a kernel in place of the chain. name: of the module in the model.
    forms: of the calls for which the cut is proved."""
    paths = {node: leaf.path for node, leaf in zip(cut.graph.inputs, cut.taken.leaves, strict=True)}
    names = {**paths, **{node: member("_module", own) for node, own in cut.graph.state.items()}}
    names |= {node: f"{literal(tensor)}" for node, tensor in cut.graph.constants.items() if literal(tensor)}
    first = next(iter(names.values()))
    sizes = sizes_of({path: node.meta["val"] for node, path in paths.items()})
    writer = Writer(names, sizes, None, f"{first}.device", "_module.training")
    try:
        before = list(writer.lines(cut.chain.before))
        given = [writer.names[node] for node in cut.chain.inputs]
        results = [name_of_result(node, writer) for node in cut.chain.outputs]
        after = [*writer.views(cut.chain.again), *writer.lines(cut.chain.after)]
        returned = returned_text(cut.graph.returned, [writer.names[node] for node in cut.graph.outputs])
    except KeyError as error:
        raise NotCut(f"a constant of the module outside of the cut, {error}, is too large to be written out") from None
    lines = [*form_lines(cut, forms), *size_lines(sizes, writer.used_sizes), *before]
    lines += [assigned(results, f"_kernel({', '.join(given)})"), *after, f"return {returned}"]
    doc = f'"""A call of {name} in the model, with `_kernel` for Model."""'
    return f"\n\ndef call(_kernel, _module, /{signature_text(cut.taken.signature)}):\n" + "".join(
        indented(line, 1) for line in [doc, *lines]
    )


def name_of_result(node: fx.Node, writer: Writer) -> str:
    writer.names[node] = node.name
    return node.name


def form_lines(cut: Cut, forms: list[Form]) -> list[str]:
    """The refusal of a call of another form, or of sizes that the cut is not made for."""
    conditions = [*cut.taken.conditions, *given_lines(cut), *fixed_sizes(cut, forms), *guards_of_call(cut, forms)]
    return [f"required({one}, {one!r})" for one in conditions]


def given_lines(cut: Cut) -> list[str]:
    """Tensors that a call could leave out; one alone is always there."""
    leaves = cut.taken.leaves
    return [f"{leaf.path} is not None" for leaf in leaves] if len(leaves) > 1 else []


def fixed_sizes(cut: Cut, forms: list[Form]) -> Iterator[str]:
    """The sizes of the module's arguments that are fixed, but for those that differ among the proved calls."""
    for number, (node, leaf) in enumerate(zip(cut.graph.inputs, cut.taken.leaves, strict=True)):
        for at, size in enumerate(node.meta["val"].shape):
            symbol = size.node.expr if isinstance(size, torch.SymInt) else None
            fixed = size if symbol is None else cut.sizes.get(symbol)
            if isinstance(fixed, int) and forms and all(form[number][at] == fixed for form in forms):
                yield f"{leaf.path}.shape[{at}] == {fixed}"


def guards_of_call(cut: Cut, forms: list[Form]) -> Iterator[str]:
    """torch.export's conditions on single sizes of the module's arguments, without those that it takes for granted.
    Where sizes must fit each other, the operators themselves refuse others."""
    paths = [leaf.path for leaf in cut.taken.leaves]
    for guard in cut.graph.guards if forms else ():
        if len(places := {*SIZE_OF_GUARD.findall(guard)}) == 1:
            number, at = map(int, places.pop())
            text = SIZE_OF_GUARD.sub("size", guard)
            if all(holds(text, {"size": form[number][at]}) for form in forms) and not always_holds(text, ["size"]):
                yield text.replace("size", f"{paths[number]}.shape[{at}]")


def signature_text(signature: inspect.Signature) -> str:
    """The parameters of the module's forward."""
    parts, keyword_only = [], False
    for parameter in signature.parameters.values():
        if parameter.kind == parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            parts.append("*")
        if parameter.kind == parameter.VAR_POSITIONAL:
            keyword_only = True
            parts.append(f"*{parameter.name}")
        elif parameter.kind == parameter.VAR_KEYWORD:
            parts.append(f"**{parameter.name}")
        elif parameter.default is parameter.empty:
            parts.append(parameter.name)
        else:
            plain = isinstance(parameter.default, bool | int | float | str | None)
            parts.append(f"{parameter.name}={parameter.default!r}" if plain else f"{parameter.name}=None")
    return "".join(f", {part}" for part in parts)


def returned_text(returned: object, names: list[str]) -> str:
    """How the module returns its tensors."""
    if isinstance(returned, Place):
        return names[returned.number]
    if isinstance(returned, Made):
        fields = (f"{name}={returned_text(one, names)}" for name, one in returned.fields.items())
        return f"_module._result_classes[{returned.name!r}]({', '.join(fields)})"
    if isinstance(returned, tuple | list):
        items = [returned_text(one, names) for one in returned]
        return tupled(items) if isinstance(returned, tuple) else f"[{', '.join(items)}]"
    if isinstance(returned, dict):
        return "{" + ", ".join(f"{key!r}: {returned_text(one, names)}" for key, one in returned.items()) + "}"
    return repr(returned)


def classes_in(returned: object) -> dict[str, str]:
    """The classes of the model's own in what a module returns: where they are defined, by name."""
    own = {returned.name: returned.home} if isinstance(returned, Made) else {}
    inner = returned.fields if isinstance(returned, Made) else returned
    if isinstance(inner, dict | list | tuple):
        for one in inner.values() if isinstance(inner, dict) else inner:
            own |= classes_in(one)
    return own


def reference_text(title: str, about: dict, mutated: list[str], parts: list[str]) -> str:
    """The whole file."""
    text = HEAD.format(title=title, cut="".join(f"    {key!r}: {value!r},\n" for key, value in about.items()))
    if mutated:
        text += f"MUTATES = {tuple(mutated)!r}\n"
    body = "".join(parts)
    helpers = {**recorded_values.HELPERS, "kept": KEPT, "required": REQUIRED}
    body = "".join(f"\n{code}" for name, code in helpers.items() if f"{name}(" in body) + body
    text += body
    return text if "math." in body else text.replace("import math\n\n", "")
