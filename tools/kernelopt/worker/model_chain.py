"""A chain of operators within a module's: the tensors that come in and go out, and which of them it changes.

A kernel is a function: it must not return memory of its inputs, and no input may lie in the memory of another that it
changes. So views at the edges of the chain are made again on the other side, from the tensors that they are views of.
"""

import operator
from dataclasses import dataclass

from torch import fx

from .contract import NotCut
from .model_graph import Graph, base, is_size, live, places, root, written


@dataclass(frozen=True)
class Chain:
    """before, inside, after: operators, in order. first: views of the inputs that are made again before those inside;
    again: views of inputs and outputs that are made again before those after. inputs: tensors that come in. state:
    parameters, buffers and constants that are used inside. changed: the inputs and the state that are written to, and
    read afterwards. scratch: inputs that are written to, and never read afterwards. outputs: tensors that go out, in
    memory of their own."""

    before: list[fx.Node]
    first: list[fx.Node]
    inside: list[fx.Node]
    again: list[fx.Node]
    after: list[fx.Node]
    inputs: list[fx.Node]
    state: list[fx.Node]
    changed: list[fx.Node]
    scratch: list[fx.Node]
    outputs: list[fx.Node]


def chain(graph: Graph, ends: tuple[str, str] | None) -> Chain:
    """The operators from one name to another, in the order in which they ran; all of them for None."""
    first, last = bounds(graph, ends)
    before, inside, after = together(graph.nodes, first, last)
    writes = {place for node in inside for tensor in written(node) for place in places(tensor)}
    came_in = incoming(inside)
    order = {node: at for at, node in enumerate([*graph.inputs, *graph.nodes])}
    tensors = sorted((node for node in came_in if not held(graph, node)), key=order.get)
    inputs, remade = unshared_inputs(tensors, writes)
    state = [node for node in came_in if held(graph, node)]
    outputs, again = unshared_outputs(graph, inside, after, [*inputs, *state])
    written_to = [node for node in [*inputs, *state] if places(node) & writes]
    seen = seen_afterwards(graph, after)
    changed = [node for node in written_to if places(node) & seen]
    scratch = [node for node in written_to if node not in changed]
    if not came_in:
        raise NotCut("these operators take no tensor, so there is nothing to compute from")
    if not outputs and not changed and again:
        raise NotCut("these operators only make views of what comes in; add an operator that computes")
    if not outputs and not changed:
        raise NotCut("nothing that these operators compute is used afterwards")
    if not outputs and all(held(graph, node) for node in changed):
        names = ", ".join(repr(graph.state.get(node, node.name)) for node in changed)
        raise NotCut(
            f"these operators only write to what the module holds ({names}), and a problem needs a result: end the "
            "chain at an operator that reads it, or cut a module around this one"
        )
    return Chain(before, remade, live(inside, outputs), again, after, inputs, state, changed, scratch, outputs)


def seen_afterwards(graph: Graph, after: list[fx.Node]) -> set[int]:
    """The memory that is read after the chain, in the module or by those that hold it."""
    kept = [*graph.inputs, *graph.state, *graph.constants, *graph.outputs]
    return {
        place for node in (*kept, *(one for node in after for one in node.all_input_nodes)) for place in places(node)
    }


def held(graph: Graph, node: fx.Node) -> bool:
    """Does the module hold this tensor?"""
    return node in graph.state or node in graph.constants


def bounds(graph: Graph, ends: tuple[str, str] | None) -> tuple[int, int]:
    """The places of the first and the last operator. NotCut where there is none of that name, or they stand the wrong
    way round."""
    if not graph.nodes:
        raise NotCut("the module runs no operator")
    if ends is None:
        return 0, len(graph.nodes) - 1
    first, last = (graph.nodes.index(graph.node(name)) for name in ends)
    if first > last:
        raise NotCut(f"'{ends[0]}' runs after '{ends[1]}'; --between takes the earlier operator first")
    return first, last


def together(nodes: list[fx.Node], first: int, last: int) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]]:
    """The operators before, inside and after. Each of several results stays with its operator."""
    parts: tuple[list[fx.Node], list[fx.Node], list[fx.Node]] = ([], [], [])
    part_of: dict[fx.Node, int] = {}
    for at, node in enumerate(nodes):
        own = 0 if at < first else 1 if at <= last else 2
        part_of[node] = part_of.get(node.args[0], own) if node.target is operator.getitem else own
        parts[part_of[node]].append(node)
    return parts


def incoming(inside: list[fx.Node]) -> list[fx.Node]:
    """The tensors that the operators use and do not make."""
    used, own = (one for node in inside for one in node.all_input_nodes if not is_size(one)), set(inside)
    return [node for node in dict.fromkeys(used) if node not in own]


def unshared_inputs(inputs: list[fx.Node], writes: set[int]) -> tuple[list[fx.Node], list[fx.Node]]:
    """(inputs of which none lies in memory of another that is written to, the views that must be made inside then)"""
    crowded = {
        place
        for place in writes
        if len([node for node in inputs if place in places(node)]) > 1  # one is changed through another
    }
    made: dict[fx.Node, None] = {}
    own: dict[fx.Node, None] = {}
    for node in inputs:
        if places(node) & crowded:
            made |= dict.fromkeys(views(node, root(node)))
            own[root(node)] = None
        else:
            own[node] = None
    return list(own), [node for node in made if node not in own]


def views(node: fx.Node, below: fx.Node) -> list[fx.Node]:
    """The operators that lead from a tensor to a view of it, the first one first."""
    path: list[fx.Node] = []
    while node is not below:
        path.insert(0, node)
        node = base(node)
    return path


def unshared_outputs(
    graph: Graph, inside: list[fx.Node], after: list[fx.Node], given: list[fx.Node]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """(the tensors that go out in memory of their own, the views of them and of the inputs that must be made again
    after the chain)"""
    used = {one for node in after for one in node.all_input_nodes} | set(graph.outputs)
    leaving = [node for node in inside if node in used and not is_size(node)]
    taken = frozenset().union(*map(places, given))
    order = {node: at for at, node in enumerate(inside)}
    fresh: set[fx.Node] = set()
    again: set[fx.Node] = set()
    for node in leaving:
        mine = places(node)
        alone = not any(places(other) & mine for other in leaving if other is not node)
        if not mine & taken and alone:
            fresh.add(node)
            continue
        below = owner(node, given)
        again |= set(views(node, below)) & order.keys()
        fresh |= {below} & order.keys()
    as_returned = {node: at - len(graph.outputs) for at, node in enumerate(graph.outputs)} if not after else {}
    return sorted(fresh, key={**order, **as_returned}.get), sorted(again - fresh, key=order.get)


def owner(node: fx.Node, given: list[fx.Node]) -> fx.Node:
    """The tensor that a node is a view of: an input of the chain, or else the one with memory of its own."""
    while node not in given and (below := base(node)) is not None:
        node = below
    return node
