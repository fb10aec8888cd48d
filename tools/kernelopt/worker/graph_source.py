"""The operators of a chain as source: a line each, as torch.export recorded them. Sizes that may differ have names."""

import keyword
import math
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from . import tensor_trees
from .contract import NotCut
from .model_calls import RESERVED
from .model_graph import MODES, WHOLE, base, is_size, places, written


@dataclass(frozen=True)
class Size:
    """A size that may differ. expression: of Python, where a tensor has it. Tied sizes have one name."""

    name: str
    expression: str
    recorded: int


def sizes_of(tensors: dict[str, torch.Tensor]) -> dict:
    """By symbol, the sizes of these tensors (fake ones, by the expressions that name them) that may differ."""
    sizes: dict = {}
    for name, tensor in tensors.items():
        for at, size in enumerate(tensor.shape):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size.node.expr not in sizes:
                identifier = f"{re.sub(r'[^0-9a-zA-Z]+', '_', name).strip('_')}_dim{at}"
                sizes[size.node.expr] = Size(identifier, f"{name}.shape[{at}]", size.node.hint)
    return sizes


def named_sizes(sizes: dict) -> list[Size]:
    """The sizes that may differ, tied ones once."""
    return list({size.name: size for size in sizes.values() if isinstance(size, Size)}.values())


def size_text(size, sizes: dict) -> str:
    """A size as an expression in the names of `sizes`; a number there is a size that may not differ. NotCut where it
    does not follow from them."""
    if not isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
        return repr(size)
    import sympy
    from torch.utils._sympy.printers import PythonPrinter

    expression = size.node.expr
    if unknown := [symbol for symbol in expression.free_symbols if symbol not in sizes]:
        raise NotCut(f"a size inside, {expression}, does not follow from those of the inputs ({unknown[0]})")
    known = ((symbol, sizes[symbol]) for symbol in expression.free_symbols)
    named = {
        symbol: sympy.Symbol(size.name, integer=True) if isinstance(size, Size) else sympy.Integer(size)
        for symbol, size in known
    }
    return PythonPrinter().doprint(expression.xreplace(named))


class Writer:
    """Writes operators as lines. names: the expressions of tensors from outside, by node. sizes: by symbol. dtype: the
    one that is written as that of the inputs, so that the source also runs in another; None for none. device: the
    expression of a device. training: of whether the module is in training, for operators that were recorded in
    evaluation; None leaves them as they are."""

    def __init__(
        self,
        names: dict[fx.Node, str],
        sizes: dict,
        dtype: torch.dtype | None,
        device: str,
        training: str | None = None,
    ):
        self.names = dict(names)
        self.sizes = sizes
        self.device = device
        self.used_sizes: set[str] = set()
        self._dtype, self._training = dtype, training
        self._origin = ""

    def lines(self, nodes: list[fx.Node]) -> Iterator[str]:
        """The operators, with a comment where those of another submodule begin."""
        for node in nodes:
            if is_whole_slice(node):
                self.names[node] = self.names[node.args[0]]
                continue
            if (origin := origin_of(node)) and origin != self._origin:
                self._origin = origin
                yield f"# {origin}"
            yield f"{self._named(node)} = {self._call(node)}{self._comment(node)}"

    def views(self, nodes: list[fx.Node]) -> Iterator[str]:
        """The same for tensors in older memory: what was written in place is there already."""
        for node in nodes:
            if written(node):
                self.names[node] = self.names[base(node)]
            else:
                yield from self.lines([node])

    def text(self, value) -> str:
        """An argument as an expression."""
        if isinstance(value, fx.Node):
            return self._size(value.meta["val"]) if is_size(value) else self.names[value]
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return self._size(value)
        if isinstance(value, list | tuple):
            items = ", ".join(map(self.text, value))
            return f"[{items}]"
        if isinstance(value, torch.dtype):
            return self._dtype_text(value)
        if isinstance(value, torch.device):
            return self.device
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        return str(value) if isinstance(value, torch.layout | torch.memory_format) else repr(value)

    def _call(self, node: fx.Node) -> str:
        if node.target is operator.getitem:
            return f"{self.names[node.args[0]]}[{node.args[1]}]"
        modes = [one.name in MODES for one in node.target._schema.arguments]
        given = [
            self._training if is_mode and value is False and self._training else self.text(value)
            for is_mode, value in zip(modes, node.args, strict=False)
        ]
        given += [f"{name}={self.text(value)}" for name, value in node.kwargs.items() if name != "pin_memory"]
        if node.target is torch.ops.aten.to.dtype and len(node.args) == 2 and not places(node) & places(node.args[0]):
            given.append("copy=True")  # in another dtype of the inputs too, or a write to the copy would change them
        return f"torch.ops.{node.target}({', '.join(given)})"

    def _comment(self, node: fx.Node) -> str:
        """The dtype and the recorded sizes of a result."""
        tensor = node.meta.get("val")
        if not isinstance(tensor, torch.Tensor):
            return ""
        numbers = {size.name: size.recorded for size in named_sizes(self.sizes)}
        try:
            sizes = tuple(eval(size_text(size, self.sizes), {"math": math}, numbers) for size in tensor.shape)
        except NotCut:  # of a result that nothing here depends on
            return ""
        return f"  # {tensor_trees.plain(tensor.dtype)} {sizes}"

    def _named(self, node: fx.Node) -> str:
        taken = {*RESERVED, *self.names.values(), *(size.name for size in named_sizes(self.sizes))}
        name = node.name
        while name in taken or keyword.iskeyword(name):
            name += "_"
        self.names[node] = name
        return name

    def _size(self, value) -> str:
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            used = (self.sizes.get(symbol) for symbol in value.node.expr.free_symbols)
            self.used_sizes |= {size.name for size in used if isinstance(size, Size)}
        return size_text(value, self.sizes)

    def _dtype_text(self, dtype: torch.dtype) -> str:
        """ "dtype" for that of the inputs, and "wide" for fp32 beside a narrower one."""
        if dtype == self._dtype:
            return "dtype"
        narrow = self._dtype is not None and self._dtype.itemsize < torch.float32.itemsize
        return "wide" if narrow and dtype == torch.float32 else repr(dtype)


def is_whole_slice(node: fx.Node) -> bool:
    """Does it take all of a dimension?"""
    is_slice = node.target is torch.ops.aten.slice.Tensor and not node.kwargs
    return is_slice and node.args[2:] in ((), (0,), (0, WHOLE))


def origin_of(node: fx.Node) -> str:
    """ "gate (Linear)", the submodule that ran an operator; "" for the module itself."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return ""
    path, kind = stack[-1]
    path = path.removeprefix("original").removeprefix(".")
    name = kind if isinstance(kind, str) else kind.__name__
    return f"{path} ({name.rpartition('.')[2]})" if path and not path.startswith("_") else ""


def recorded_sizes(tensor: torch.Tensor) -> tuple[int, ...]:
    """The sizes of a fake tensor in the call that was recorded."""
    return tuple(size.node.hint if isinstance(size, torch.SymInt) else size for size in tensor.shape)


def assigned(names: list[str], value: str) -> str:
    """ "a, b = value": a call whose results get names; the call alone where there is none."""
    return f"{', '.join(names)} = {value}" if names else value
