"""Definitions in JSON, as FlashInfer-Bench and SOL-ExecBench have them: axes, inputs, outputs, reference code."""

import ast
import keyword
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError
from .files import json_object

# Bytes of an element.
SIZES = {
    **{"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1},
    **{"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1},
}
OPERATIONS: dict[type, Callable] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod},
    **{ast.FloorDiv: operator.floordiv, ast.Div: operator.truediv, ast.USub: operator.neg, ast.UAdd: operator.pos},
    ast.Pow: operator.pow,
}
MOST_POWER, LARGEST = 64, 1 << 62
MOST_RANK = 16


@dataclass(frozen=True)
class Axis:
    """kind: const, var or expr. value: of a const. expression: of an expr."""

    kind: str
    value: int = 0
    expression: str = ""


@dataclass(frozen=True)
class Spec:
    """An input or output. shape: names of axes, or numbers as text; None for a Python number."""

    shape: tuple[str, ...] | None
    dtype: str
    description: str


@dataclass(frozen=True)
class Definition:
    """keys: all that the object has."""

    name: str
    op_type: str
    description: str
    axes: dict[str, Axis]
    inputs: dict[str, Spec]
    outputs: dict[str, Spec]
    reference: str
    constraints: tuple[str, ...]
    custom: str | None
    where: str

    @property
    def variable(self) -> list[str]:
        """The axes whose values a workload gives."""
        return [name for name, axis in self.axes.items() if axis.kind == "var"]


def is_definition(value: dict) -> bool:
    return {"name", "axes", "inputs", "outputs", "reference"} <= set(value)


def read_definition(path: Path) -> Definition:
    """The definition in a file. UsageError names the first field that is wrong."""
    value, where = json_object(path), str(path)
    if not is_definition(value):
        raise UsageError(f"{where} is no definition: it needs name, axes, inputs, outputs and reference")
    if not isinstance(value["reference"], str) or not value["reference"].strip():
        raise UsageError(f"{where}: reference must be the text of Python code")
    axes = {plain(name, where): axis_of(one, f"{where}: axis {name}") for name, one in table(value, "axes", where)}
    made = Definition(
        name=text(value, "name", where),
        op_type=text(value, "op_type", where),
        description=text(value, "description", where),
        axes=axes,
        inputs={
            plain(name, where): spec_of(one, axes, f"{where}: input {name}")
            for name, one in table(value, "inputs", where)
        },
        outputs={name: spec_of(one, axes, f"{where}: output {name}") for name, one in table(value, "outputs", where)},
        reference=value["reference"],
        constraints=tuple(texts(value, "constraints", where)),
        custom=text(value, "custom_inputs_entrypoint", where) or None,
        where=where,
    )
    if both := set(made.inputs) & set(made.axes):
        raise UsageError(f"{where}: {min(both)} is an axis and an input; rename one")
    return made


def text(value: dict, key: str, where: str) -> str:
    one = value.get(key) or ""
    if not isinstance(one, str):
        raise UsageError(f"{where}: {key} must be text")
    return one


def texts(value: dict, key: str, where: str) -> list[str]:
    items = value.get(key) or []
    if not isinstance(items, list) or not all(isinstance(one, str) for one in items):
        raise UsageError(f"{where}: {key} must be a list of text")
    return items


def table(value: dict, key: str, where: str):
    """The items of an object of objects."""
    items = value[key]
    if not isinstance(items, dict) or not all(isinstance(one, dict) for one in items.values()):
        raise UsageError(f"{where}: {key} must be an object whose values are objects")
    return items.items()


def plain(name: str, where: str) -> str:
    """A name that Python code can use."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise UsageError(f"{where}: {name!r} is no name in Python; rename it in the definition and its workloads")
    return name


def axis_of(one: dict, where: str) -> Axis:
    kind, value = one.get("type", "const" if "value" in one else "var"), one.get("value", 0)
    if kind == "const" and (type(value) is not int or value < 0):
        raise UsageError(f"{where}: value must be a whole number from 0 on")
    if kind == "expr" and not isinstance(one.get("expression"), str):
        raise UsageError(f"{where}: expression must be text")
    if kind not in ("const", "var", "expr"):
        raise UsageError(f"{where}: type is {kind!r}; it must be const, var or expr")
    return Axis(kind, value, one.get("expression", ""))


def spec_of(one: dict, axes: dict[str, Axis], where: str) -> Spec:
    shape, dtype = one.get("shape"), one.get("dtype")
    if dtype not in SIZES:
        raise UsageError(f"{where}: dtype is {dtype!r}; these tools have tensors of {', '.join(SIZES)}")
    if shape is None:
        return Spec(None, dtype, text(one, "description", where))
    if not isinstance(shape, list) or len(shape) > MOST_RANK:
        raise UsageError(f"{where}: shape must be a list of axes")
    for name in shape:
        if not (isinstance(name, str) and (name in axes or name.isdecimal())):
            raise UsageError(f"{where}: shape names {name!r}, which is no axis")
    return Spec(tuple(shape), dtype, text(one, "description", where))


def evaluated(expression: str, values: dict[str, int], where: str) -> int:
    """The whole number that an expression over axes has. UsageError for any other expression."""

    def of(node: ast.AST) -> float:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name) and node.id in values:
            return values[node.id]
        if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATIONS:
            return OPERATIONS[type(node.op)](of(node.operand))
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            left, right = of(node.left), of(node.right)
            if isinstance(node.op, ast.Pow) and abs(right) > MOST_POWER:
                raise ValueError("too large a power")
            return OPERATIONS[type(node.op)](left, right)
        raise ValueError("it may hold whole numbers, axes and + - * / // % ** alone")

    try:
        result = of(ast.parse(expression.strip(), mode="eval").body)
        if result != int(result) or abs(result) > LARGEST:
            raise ValueError(f"it is {result}, no whole number that a size can be")
        return int(result)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
        raise UsageError(f"{where}: expression {expression!r}: {error}") from None


def axis_values(definition: Definition, own: dict[str, int]) -> dict[str, int]:
    """The value of every axis in a workload that gives these to the variable ones."""
    values = {name: axis.value for name, axis in definition.axes.items() if axis.kind == "const"} | own
    for name, axis in definition.axes.items():
        if axis.kind == "expr":
            values[name] = evaluated(axis.expression, values, f"{definition.where}: axis {name}")
    return values


def shape_in(spec: Spec, values: dict[str, int]) -> tuple[int, ...]:
    return tuple(int(name) if name.isdecimal() else values[name] for name in spec.shape or ())


def bytes_in(definition: Definition, own: dict[str, int]) -> int:
    """Of inputs and outputs of a workload."""
    values = axis_values(definition, own)
    specs = [*definition.inputs.values(), *definition.outputs.values()]
    return sum(math.prod(shape_in(spec, values)) * SIZES[spec.dtype] for spec in specs)


def derived(definition: Definition, workloads: list[dict[str, int]]) -> dict[str, str]:
    """Variable axes that a constraint states by others, such as `len_indptr == batch_size + 1`, with that expression.
    One that a workload does not fulfil is left alone, and so is what depends on a derived axis."""
    made: dict[str, str] = {}
    needed: set[str] = set()
    for constraint in definition.constraints:
        name, _, expression = (part.strip() for part in constraint.partition("=="))
        if name not in definition.variable or name in needed or name in made:
            continue
        try:
            others = names_in(expression)
            holds = all(evaluated(expression, axis_values(definition, own), "") == own[name] for own in workloads)
        except UsageError:
            continue
        if holds and not others & {name, *made}:
            made[name] = normal(expression)
            needed |= others
    return made


def normal(expression: str) -> str:
    """The expression as Python writes it, in one line and without a comment."""
    return ast.unparse(ast.parse(expression.strip(), mode="eval"))


def names_in(expression: str) -> set[str]:
    """The names in a Python expression. UsageError where it is none."""
    try:
        return {one.id for one in ast.walk(ast.parse(expression.strip(), mode="eval")) if isinstance(one, ast.Name)}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UsageError(f"{expression!r} is no expression") from None
