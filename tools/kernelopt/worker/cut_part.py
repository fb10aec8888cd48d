"""What is cut out of a model: a chain of operators of a module, its inputs and the sizes that may differ."""

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import fx

from . import tensor_trees
from .graph_source import named_sizes, recorded_sizes, sizes_of
from .model_calls import TakenApart
from .model_chain import Chain
from .model_graph import Graph


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
