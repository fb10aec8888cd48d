"""The workloads of a definition: where each input comes from, and the text of the functions that make them."""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import UsageError
from . import safetensors
from .definitions import Definition, Spec, axis_values, bytes_in, derived, names_in, normal, shape_in
from .tasks import FLOATS, Options, Workload, chosen

FILES = ("workload.jsonl", "workloads.jsonl")
KINDS = ("random", "scalar", "safetensors", "custom")
HELPFUL = {"len", "min", "max", "sum", "int", "abs", "all", "any", "torch"}  # names that a constraint may use besides
WORD = re.compile(r"[A-Za-z_]\w*")


class NoWorkloads(UsageError):
    """A definition without a file of workloads."""


@dataclass(frozen=True)
class Given:
    """Where an input comes from. value: of a scalar. place: of a stored tensor, path and key before it is found."""

    kind: str
    value: int | float | bool | None = None
    place: safetensors.Place | tuple[str, str] | None = None

    def text(self) -> str:
        """A scalar or a stored tensor as Python writes it."""
        if self.kind == "scalar":
            return repr(self.value) if abs(self.value) < float("inf") else f'float("{self.value}")'
        one = self.place
        return f'({json.dumps(str(one.path))}, {one.start}, {one.end}, "{one.sha256}", torch.{one.dtype}, {one.shape})'


@dataclass(frozen=True)
class Stated:
    """A workload as the source states it. tolerance: what it says of that, read by the format."""

    name: str
    axes: dict[str, int]
    inputs: dict[str, Given]
    tolerance: dict

    def kinds(self) -> tuple[str, ...]:
        return tuple(one.kind for one in self.inputs.values())

    def stored(self) -> bool:
        """Does it have tensors in files?"""
        return "safetensors" in self.kinds()

    def data(self) -> dict[str, Given]:
        return {name: one for name, one in self.inputs.items() if one.kind in ("scalar", "safetensors")}


RandomValue = Callable[[str, Spec], str]


def workloads_file(definition: Path, options: Options) -> Path:
    """The file of a definition's workloads: in the tree of a data set, beside it, or as the user says."""
    if options.workloads:
        return options.workloads
    places = [definition.with_suffix(".jsonl"), *(definition.with_name(name) for name in FILES)]
    parts = definition.resolve().parts
    if "definitions" in parts:
        at = len(parts) - 1 - parts[::-1].index("definitions")
        places.insert(0, Path(*parts[:at], "workloads", *parts[at + 1 :]).with_suffix(".jsonl"))
    for place in places:
        if place.is_file():
            return place
    raise NoWorkloads(f"{definition} has no workloads, such as {places[0]}; name their file with --workloads")


def stated(value: dict, definition: Definition, where: str) -> Stated:
    """A workload object. UsageError names what is wrong with it."""
    axes, inputs = value.get("axes"), value.get("inputs")
    if not isinstance(axes, dict) or not isinstance(inputs, dict):
        raise UsageError(f"{where} is no workload: it needs axes and inputs")
    for name in definition.variable:
        if type(axes.get(name)) is not int or axes[name] < 0:
            raise UsageError(f"{where}: axis {name} is {axes.get(name)!r}; it must be a whole number from 0 on")
    for name in inputs:
        if name not in definition.inputs:
            raise UsageError(f"{where} gives {name!r}, which is no input of the definition")
    tolerance = value.get("tolerance") or {}
    return Stated(
        name=str(value.get("uuid") or where.rpartition(" ")[2]),
        axes={name: axes[name] for name in definition.variable},
        inputs={
            name: given(inputs.get(name, {"type": "random"}), definition, name, where) for name in definition.inputs
        },
        tolerance=tolerance if isinstance(tolerance, dict) else {},
    )


def given(one: dict, definition: Definition, name: str, where: str) -> Given:
    where = f"{where}: input {name}"
    kind = one.get("type") if isinstance(one, dict) else None
    if kind not in KINDS:
        raise UsageError(f"{where}: type is {kind!r}; it must be one of {', '.join(KINDS)}")
    if kind == "scalar" and type(one.get("value")) not in (int, float, bool):
        raise UsageError(f"{where}: value must be a number or a truth value")
    if kind == "safetensors" and not all(isinstance(one.get(key), str) for key in ("path", "tensor_key")):
        raise UsageError(f"{where}: it needs path and tensor_key")
    if kind == "custom" and not definition.custom:
        raise UsageError(f"{where} is custom, but the definition has no custom_inputs_entrypoint")
    place = (one["path"], one["tensor_key"]) if kind == "safetensors" else None
    return Given(kind, one.get("value") if kind == "scalar" else None, place)


def located(workloads: Iterable[Stated], definition: Definition, folders: list[Path]) -> tuple[list[Stated], list[str]]:
    """(the workloads with their stored tensors' places, remarks). Absent floating tensors are drawn at random instead;
    a workload that lacks others is left out, for its numbers may be indices."""
    made, remarks = [], []
    for one in workloads:
        if empty := [name for name, value in one.axes.items() if value == 0]:
            remarks.append(f"workload {one.name}: its axis {empty[0]} is 0, and a size is at least 1: left out")
            continue
        inputs, lost = {}, None
        for name, source in one.inputs.items():
            if source.kind != "safetensors":
                inputs[name] = source
                continue
            try:
                inputs[name] = replace(source, place=located_tensor(source.place, definition, name, one, folders))
            except UsageError as error:
                if definition.inputs[name].dtype not in FLOATS:
                    lost = f"workload {one.name}: {error}: left out"
                    break
                inputs[name] = Given("random")
                remarks.append(f"workload {one.name}: {error}: {name} is drawn at random instead")
        if lost:
            remarks.append(lost)
        else:
            made.append(replace(one, inputs=inputs))
    return made, remarks


def located_tensor(
    wanted: tuple[str, str], definition: Definition, name: str, workload: Stated, folders: list[Path]
) -> safetensors.Place:
    """The place of a stored tensor, of the shape and dtype that the definition wants."""
    path, key = wanted
    file = next((folder / path for folder in folders if (folder / path).is_file()), None)
    if file is None:
        raise UsageError(f"{path} is absent (--blobs names the folder that it is in)")
    place, spec = safetensors.find(file, key), definition.inputs[name]
    shape = shape_in(spec, axis_values(definition, workload.axes))
    if (place.dtype, place.shape) != (spec.dtype, shape):
        raise UsageError(f"{key} in {path} is {place.dtype} {list(place.shape)}, not {spec.dtype} {list(shape)}")
    return place


def written(
    definition: Definition,
    all_stated: list[Stated],
    random_value: RandomValue,
    options: Options,
    more: tuple[str, ...] = (),
) -> tuple[str, tuple[Workload, ...], list[str]]:
    """(text of get_inputs and what it needs, workloads, remarks). more: expressions of further arguments."""
    by_axes = derived(definition, [one.axes for one in all_stated])
    sizes = [name for name in definition.variable if name not in by_axes]
    places = [
        Workload(one.name, {name: one.axes[name] for name in sizes}, bytes_in(definition, one.axes), str(at))
        for at, one in enumerate(all_stated)
    ]
    workloads, remarks = chosen(places, options)
    taken = [all_stated[int(one.maker)] for one in workloads]
    body = Body(definition, by_axes, sizes, random_value, more)
    remarks += body.remarks
    if any(one.stored() for one in taken):
        remarks.append(
            "stored tensors: read from their files in each run, so keep these where they are; their sizes cannot vary"
        )
    if not any(one.stored() for one in taken) and all(one.inputs == taken[0].inputs for one in taken):
        text = body.function(f"get_inputs({keywords(workloads[0].sizes)})", taken[0], inline=True)
        return text, tuple(replace(one, maker=None) for one in workloads), remarks
    names = ["default", *(one.name for one in workloads[1:])]
    text, makers = body.of_table(dict(zip(names, taken, strict=True)), workloads[0].sizes)
    lambdas = [f"{anonymous(one.sizes)}: {maker}" for one, maker in zip(workloads, makers, strict=True)]
    return text, tuple(replace(one, maker=maker) for one, maker in zip(workloads, lambdas, strict=True)), remarks


def data_table(taken: dict[str, Stated], sizes: list[str]) -> str:
    """What of the inputs differs from workload to workload: scalars and the places of stored tensors."""
    lines = ["DATA = {\n"]
    for name, one in taken.items():
        lines.append(f"    {json.dumps(name)}: {{\n")
        lines += [f"        {json.dumps(key)}: {given.text()},\n" for key, given in one.data().items()]
        if one.stored():
            lines.append(f"        SIZES: {json.dumps([one.axes[size] for size in sizes])},\n")
        lines.append("    },\n")
    needed = any(one.stored() for one in taken.values())
    head = 'SIZES = "the sizes that the stored tensors belong to"\n' if needed else ""
    return "".join([head, *lines, "}\n"])


def keywords(sizes: dict[str, int]) -> str:
    """ "*, rows=4, columns=8" """
    return ", ".join(["*", *(f"{name}={value}" for name, value in sizes.items())]) if sizes else ""


def anonymous(sizes: dict[str, int]) -> str:
    """ "lambda *, rows=4, columns=8" """
    return f"lambda {keywords(sizes)}".rstrip()


class Body:
    """Writes functions that make the inputs of a definition."""

    def __init__(
        self,
        definition: Definition,
        by_axes: dict[str, str],
        sizes: list[str],
        random_value: RandomValue,
        more: tuple[str, ...],
    ):
        self._definition, self._by_axes, self._sizes = definition, by_axes, sizes
        self._random, self._more = random_value, more
        self._of_axes, self._of_inputs, self.remarks = self._constraints()

    def _constraints(self) -> tuple[list[str], list[str], list[str]]:
        """(those on axes, those on inputs, remarks on others)."""
        axes, inputs = set(self._definition.axes), set(self._definition.inputs)
        of_axes, of_inputs, remarks = [], [], []
        for constraint in self._definition.constraints:
            try:
                names = names_in(constraint)
            except UsageError:
                remarks.append(f"constraint {constraint!r}: it is no expression of Python")
                continue
            if constraint.partition("==")[0].strip() in self._by_axes:
                continue
            if names <= axes | HELPFUL:
                of_axes.append(normal(constraint))
            elif names <= axes | inputs | HELPFUL:
                of_inputs.append(normal(constraint))
            else:
                remarks.append(f"constraint {constraint!r}: it names what is neither axis nor input")
        return of_axes, of_inputs, remarks

    def of_table(self, taken: dict[str, Stated], default: dict[str, int]) -> tuple[str, list[str]]:
        """(text of get_inputs, and of a function for each way in which inputs are given; the call that makes the inputs
        of each workload). default: the sizes of the default workload."""
        kinds = list(dict.fromkeys(one.kinds() for one in taken.values()))
        passed = "".join(f", {size}={size}" for size in self._sizes)
        calls = [
            f"make_inputs{kinds.index(one.kinds()) or ''}(DATA[{json.dumps(name)}]{passed})"
            for name, one in taken.items()
        ]
        parts = [data_table(taken, self._sizes)]
        for number, kind in enumerate(kinds):
            head = f"make_inputs{number or ''}({', '.join(['_data', *(['*', *self._sizes] if self._sizes else [])])})"
            parts.append(self.function(head, next(one for one in taken.values() if one.kinds() == kind), inline=False))
        parts.append(f"def get_inputs({keywords(default)}):\n    return {calls[0]}\n")
        return "\n\n".join(parts), calls

    def function(self, head: str, one: Stated, inline: bool) -> str:
        """inline: scalars stand in the function itself, not in `_data`."""
        definition = self._definition
        lines = [f"{name} = {text}" for name, text in self._by_axes.items()]
        lines += [
            f"{name} = {normal(axis.expression)}" for name, axis in definition.axes.items() if axis.kind == "expr"
        ]
        lines += map(refusal, self._of_axes)
        of_kind = {kind: [name for name, given in one.inputs.items() if given.kind == kind] for kind in KINDS}
        if one.stored():
            lines.append(f"if [{', '.join(self._sizes)}] != _data[SIZES]:\n        raise ValueError(SIZES)")
        for name in of_kind["scalar"]:
            lines.append(f"{name} = {one.inputs[name].text() if inline else f'_data[{json.dumps(name)}]'}")
        lines += [f"{name} = stored.tensor(*_data[{json.dumps(name)}])" for name in of_kind["safetensors"]]
        if of_kind["custom"]:
            known = ", ".join(f"{json.dumps(name)}: {name}" for name in [*definition.axes, *of_kind["scalar"]])
            lines.append(f"_custom = {definition.custom}({{{known}}}, torch.empty(0).device)")
            lines += [f"{name} = _custom[{json.dumps(name)}]" for name in of_kind["custom"]]
        lines += [f"{name} = {self._random(name, definition.inputs[name])}" for name in of_kind["random"]]
        lines += map(refusal, self._of_inputs)
        lines.append(f"return [{', '.join([*definition.inputs, *self._more])}]")
        words = set(WORD.findall("\n".join(lines)))
        known = {name: axis.value for name, axis in definition.axes.items() if axis.kind == "const" and name in words}
        return "\n    ".join([f"def {head}:", *(f"{name} = {value}" for name, value in known.items()), *lines]) + "\n"


def refusal(constraint: str) -> str:
    """The lines that refuse sizes which break a constraint: there is no such case."""
    return f"if not ({constraint}):\n        raise ValueError({json.dumps('no such case: ' + constraint)})"


def shape_text(spec: Spec) -> str:
    """ "(rows, columns)" """
    return f"({', '.join(spec.shape)}{',' * (len(spec.shape) == 1)})"


def usual_random(name: str, spec: Spec) -> str:
    """The expression of a random input: normal numbers, clamped for 8 bits; whole numbers in the source's range."""
    if spec.shape is None:
        drawn = {"bool": "bool(torch.rand((), device='cpu') < 0.5)", "float": "float(torch.randn((), device='cpu'))"}
        kind = "bool" if spec.dtype == "bool" else "float" if spec.dtype in FLOATS else "int"
        return drawn.get(kind, "int(torch.randint(-1024, 1024, (), device='cpu'))")
    shape, dtype = shape_text(spec), f"dtype=torch.{spec.dtype}"
    if spec.dtype.startswith("float8"):
        return f"torch.randn({shape}).clamp(-2, 2).to(torch.{spec.dtype})"
    if spec.dtype in FLOATS:
        return f"torch.randn({shape}, {dtype})"
    low, high = {"bool": (0, 2), "int8": (-128, 128), "uint8": (0, 256)}.get(spec.dtype, (-1024, 1024))
    return f"torch.randint({low}, {high}, {shape}, {dtype})"
