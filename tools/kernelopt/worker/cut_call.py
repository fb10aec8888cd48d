"""The text of `call` in reference.py: the call of the module in the model, with a kernel in place of the chain."""

import inspect
from collections.abc import Iterator

import torch
from torch import fx

from .contract import NotCut
from .cut_inputs import SIZE_OF_GUARD, always_holds, bracketed, holds
from .cut_model import indented, literal, member, size_lines
from .cut_part import Cut
from .graph_source import Writer, assigned, sizes_of
from .model_calls import Made, Place
from .recorded_values import tupled

Form = list[tuple[int, ...]]  # the sizes of the tensors among the arguments of a call of a module
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
    return [f"required({one}, {one!r})" for one in dict.fromkeys(conditions)]


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
    Where sizes must fit each other, the operators themselves refuse others. `fixed_sizes` says more of a fixed one."""
    paths, fixed = [leaf.path for leaf in cut.taken.leaves], {*fixed_sizes(cut, forms)}
    for guard in cut.graph.guards if forms else ():
        if len(places := {*SIZE_OF_GUARD.findall(guard)}) == 1:
            number, at = map(int, places.pop())
            if f"{paths[number]}.shape[{at}] == {forms[0][number][at]}" in fixed:
                continue
            text = SIZE_OF_GUARD.sub("size", guard)
            if all(holds(text, {"size": form[number][at]}) for form in forms) and not always_holds(text, ("size",)):
                yield bracketed(text.replace("size", f"{paths[number]}.shape[{at}]"))


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
