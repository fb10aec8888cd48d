"""The operators that a call of a module runs, in order, by torch.export: in-place operators and views are kept, sizes
that may differ are symbols."""

import inspect
import operator
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import fx

from . import tensor_trees
from .contract import NotCut, NotFollowed
from .faults import shortened
from .model_calls import Made, Place, RecordedCall, TakenApart
from .model_swap import own_class

NO_OPERATORS = ("_assert", "sym_constrain", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset")
SCOPES = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}  # how many arguments come before the part inside
SHARES = ("p", "dropout_p", "dropout")  # names of an operator's share of dropped numbers
MODES = ("train", "training")  # names of what switches dropping on
REWRITE = "docs/models.md, 'Routing by contents', has ways to write it without"
WHOLE = 2**63 - 1  # the end of a slice that has none


@dataclass(frozen=True)
class Graph:
    """nodes: the operators, in order. inputs: the tensors of the call, by placeholder: their names. state: parameters,
    buffers and other tensors that the module holds, by placeholder: their names in it. constants: tensors that forward
    makes from numbers.
    outputs: the nodes of the tensors that the module returns; returned: how it returns them. guards: conditions on
    sizes, in terms of `L['tensors'][number].size()[dimension]`."""

    nodes: list[fx.Node]
    inputs: dict[fx.Node, str]
    state: dict[fx.Node, str]
    constants: dict[fx.Node, torch.Tensor]
    outputs: list[fx.Node]
    returned: object
    guards: list[str]

    def node(self, name: str) -> fx.Node:
        """The operator of that name. NotCut when there is none."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise NotCut(f"there is no operator '{name}'; --operators lists them")


class Flat(torch.nn.Module):
    """A module as a function of tensors. It leaves in `taken` how it returned its tensors; torch.export would undo a
    change of its own."""

    def __init__(self, original: torch.nn.Module, taken: TakenApart):
        super().__init__()
        self.original = original
        self._taken = taken

    def forward(self, *tensors):
        arguments = self._taken.rebuilt(list(tensors))
        leaves: list[torch.Tensor] = []
        self._taken.returned = self._placed(self.original(*arguments.args, **arguments.kwargs), leaves)
        return tuple(leaves)

    def _placed(self, value, leaves: list[torch.Tensor]):
        """The value with a Place for each tensor, which goes to `leaves`. NotCut for what the text of a cut could not
        put together again."""
        if isinstance(value, torch.Tensor):
            leaves.append(value)
            return Place(len(leaves) - 1)
        if isinstance(value, bool | int | float | str | None):
            return value
        if type(value) in (tuple, list):
            return type(value)(self._placed(one, leaves) for one in value)
        if type(value) is dict:
            return {key: self._placed(one, leaves) for key, one in value.items()}
        if (fields := plain_fields(value)) is not None and self._is_known(type(value)):
            made = {name: self._placed(one, leaves) for name, one in fields.items()}
            return Made(type(value).__name__, type(value).__module__, made)
        raise NotCut(
            f"the module returns an object of class {type(value).__name__}, which is not made of tensors, numbers, "
            "lists, dicts, named tuples and dataclasses; cut a module inside this one"
        )

    def _is_known(self, kind: type) -> bool:
        """Can the class be found again by its name?"""
        try:
            return own_class(self._taken.module, kind.__name__, kind.__module__) is kind
        except (ImportError, AttributeError):
            return False


def plain_fields(value) -> dict[str, object] | None:
    """The arguments that make an equal object of the same class, of a named tuple or a dataclass; None of others."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return value._asdict()
    if not tensor_trees.is_dataclass(value):
        return None
    fields = tensor_trees.fields_of(value)
    return fields if [*inspect.signature(type(value)).parameters] == [*fields] else None


def traced(module: torch.nn.Module, call: RecordedCall, any_size: bool) -> tuple[Graph, TakenApart]:
    """The operators of a recorded call, and its arguments taken apart. any_size: sizes of inputs that need not be as
    recorded become symbols. NotFollowed where torch.export cannot follow the module."""
    taken = TakenApart(module, call.arguments)
    flat = Flat(module, taken)
    tensors = tuple(leaf.tensor for leaf in taken.leaves)
    auto = torch.export.Dim.AUTO
    sizes = tuple({at: auto for at, size in enumerate(tensor.shape) if size > 1} for tensor in tensors)
    try:
        with torch.no_grad():
            program = torch.export.export(
                flat, tensors, dynamic_shapes={"tensors": sizes} if any_size else None, strict=False
            )
    except NotCut:
        raise
    except Exception as error:
        raise NotFollowed(f"torch.export cannot follow it: {first_lines(error)}") from error
    return graph_of(program, taken), taken


def first_lines(error: Exception) -> str:
    """The first sentence of an error of torch.export, and the place in the user's code."""
    text = str(error) or type(error).__name__
    first = text.strip().splitlines()[0]
    if dependent := type(error).__name__ == "GuardOnDataDependentSymNode":
        first = "a size or a branch depends on the contents of a tensor"
    place = place_in(text)
    whole = f"{first} ({place})" if place else first
    return shortened(f"{whole}; {REWRITE}" if dependent else whole)


def place_in(text: str) -> str | None:
    """The place in the user's code that a message of torch.export names, in one of its two ways."""
    if place := re.search(r'File "(.+?)", line (\d+), in \w+\n\s*(.+)', text):
        return f"{place[1]}:{place[2]}: {place[3]}"
    place = re.search(r"Caused by: \((.+?):(\d+) in \w+\)", text)  # a path with its beginning cut off
    if place is None or (Path(torch.__file__).parent / place[1]).exists():
        return None
    return f"{Path(place[1]).name}:{place[2]}"


def graph_of(program, taken: TakenApart) -> Graph:
    module, signature = program.graph_module, program.graph_signature
    unfold_scopes(module)
    placeholders = {node.name: node for node in module.graph.nodes if node.op == "placeholder"}
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    state = {placeholders[at]: name.removeprefix("original.") for at, name in names.items()}
    lifted = {placeholders[at]: name for at, name in signature.inputs_to_lifted_tensor_constants.items()}
    attributes = {node: name.removeprefix("original.") for node, name in lifted.items() if is_attribute(taken, name)}
    state |= attributes
    constants = {node: program.constants[name] for node, name in lifted.items() if node not in attributes}
    others = [node for node in placeholders.values() if node not in state and node not in constants]
    if len(others) != len(taken.leaves):
        raise NotCut("the module holds an object that is no tensor, which torch.export passes along")
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    outputs = list(output.args[0])
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    return Graph(
        nodes=live(nodes, outputs),
        inputs={node: leaf.name for node, leaf in zip(others, taken.leaves, strict=True)},
        state=state,
        constants=constants,
        outputs=outputs,
        returned=taken.returned,
        guards=list(getattr(program, "_guards_code", None) or []),
    )


def is_attribute(taken: TakenApart, name: str) -> bool:
    """Is a constant a tensor that the module holds, by that name, without having registered it?"""
    value: object = taken.module
    for part in name.removeprefix("original.").split("."):
        value = getattr(value, part, None)
    return isinstance(value, torch.Tensor)


def unfold_scopes(module: fx.GraphModule) -> None:
    """Put the operators of a part that runs without gradients, or without autocast, in place of that part."""
    for node in list(module.graph.nodes):
        name = getattr(node.target, "__name__", "")
        if node.op != "call_function" or name not in SCOPES:
            continue
        before = SCOPES[name]
        if name == "wrap_with_autocast" and node.args[2]:
            raise NotCut("the module uses torch.autocast, which a cut cannot show; give it its dtypes in load()")
        inner = getattr(module, node.args[before].target)
        unfold_scopes(inner)
        given = [one for one in inner.graph.nodes if one.op == "placeholder"]
        with module.graph.inserting_before(node):
            results = module.graph.graph_copy(inner.graph, dict(zip(given, node.args[before + 1 :], strict=True)))
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            module.graph.erase_node(user)
        module.graph.erase_node(node)


def live(nodes: list[fx.Node], outputs: list[fx.Node]) -> list[fx.Node]:
    """The operators that an output or a write needs, without assertions and the arithmetic of sizes. NotCut where one
    of them is none of torch's own, or draws random numbers."""
    needed, used = set(outputs), []
    for node in reversed(nodes):
        if is_size(node) or any(part in str(node.target) for part in NO_OPERATORS):
            continue
        if node in needed or written(node):
            refuse_foreign(node)
            needed |= set(node.all_input_nodes)
            used.insert(0, node)
    return used


def is_size(node: fx.Node) -> bool:
    """Is it a number, and no tensor?"""
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool)


def refuse_foreign(node: fx.Node) -> None:
    if node.target is operator.getitem:
        return
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        raise NotCut(f"it runs {node.target}, which is no operator of torch's own; cut beside it with --between")
    if torch.Tag.nondeterministic_seeded in node.target.tags and is_random(node):
        raise NotCut(
            f"it runs {node.target}, which draws random numbers that no kernel can repeat; docs/declarations.md, "
            "'Dropout with a seed', shows a way"
        )


def is_random(node: fx.Node) -> bool:
    """Does an operator that may draw random numbers draw any? One that drops numbers draws none where it drops none."""
    given = {one.name: one.default_value for one in node.target._schema.arguments}
    given |= {argument.name: value for argument, value in arguments(node)}
    if any(given.get(name) is False for name in MODES):
        return False
    share = next((given[name] for name in SHARES if name in given), None)
    return share != 0


def arguments(node: fx.Node) -> list[tuple]:
    """(argument of the schema, value) of each argument that is given."""
    schema = node.target._schema.arguments
    by_name = [(one, node.kwargs[one.name]) for one in schema if one.name in node.kwargs]
    return [*zip(schema, node.args, strict=False), *by_name]


def written(node: fx.Node) -> list[fx.Node]:
    """The tensors that an operator writes to."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    writes = [value for one, value in arguments(node) if one.alias_info is not None and one.alias_info.is_write]
    return [value for value in writes if isinstance(value, fx.Node)]


def places(node: fx.Node) -> frozenset[int]:
    """The memory that the tensors of a node lie in."""
    return frozenset(t.untyped_storage()._cdata for t in tensor_trees.input_tensors([node.meta.get("val")]))


def base(node: fx.Node) -> fx.Node | None:
    """The node whose memory a view, or the result of an in-place operator, lies in; None for a tensor of its own."""
    if node.op == "placeholder":
        return None
    mine = places(node)
    source = next((one for one in node.all_input_nodes if places(one) & mine), None)
    if node.target is operator.getitem and source is not None and base(source) is None:
        return None  # one of several results
    return source


def root(node: fx.Node) -> fx.Node:
    """The node at the end of the chain of bases."""
    while (below := base(node)) is not None:
        node = below
    return node
