"""The declarations of a task, read once from reference.py. A candidate's process never reads them.

    MUTATES = ("residual", 0)       parameters of forward, by name or position: their contents afterwards are outputs
    COMPARE = {0: {"atol": 1e-2}}   how an output is compared (comparisons.py)
    SAMPLES = {0: {"tvd": 0.02, "draws": 200_000}}   an output that is drawn at random (sampling.py)
    LAYOUTS = "contiguous"          inputs are always contiguous, so no other layout is tried

A task without declarations is judged most strictly. A declaration that cannot be read refuses the task, because a
setting that is ignored would be taken for one that holds.
"""

import ast
import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypedDict

from . import comparisons, sampling, tensor_trees
from .comparisons import Comparison
from .contract import InvalidDeclaration
from .sampling import Sampling

CONTIGUOUS = "contiguous"
NAMES = ("MUTATES", "COMPARE", "SAMPLES", "LAYOUTS")
ALIKE = 0.85  # of difflib's ratio: MUTATE (0.92) and MUTATED (0.86) for MUTATES; EXAMPLES is no SAMPLES (0.80)


class DeclaredJson(TypedDict, total=False):
    """The declarations as a verdict names them. A key is absent where nothing is declared. sizes: by workload."""

    mutates: list[str]
    compare: dict[str, dict]
    samples: dict[str, dict]
    layouts: str
    sizes: dict[str, dict[str, int]]


@dataclass(frozen=True)
class Declarations:
    """What a reference declares. parameters: names of forward's parameters, in order. mutates: positions among them,
    in order. compare: by position of the output, where mutated inputs come after what forward returns, or by the
    name of a mutated parameter. layouts: "contiguous", or None for any layout. samples: by position of the output."""

    parameters: tuple[str, ...] = ()
    mutates: tuple[int, ...] = ()
    compare: dict[int | str, Comparison] = field(default_factory=dict)
    layouts: str | None = None
    samples: dict[int, Sampling] = field(default_factory=dict)

    @classmethod
    def of_module(cls, module, forward: Callable) -> "Declarations":
        """The declarations of a reference's module. Raises InvalidDeclaration when one cannot be read."""
        refuse_misspelt(module)
        parameters = parameters_of(forward)
        mutates = mutated_positions(getattr(module, "MUTATES", ()), parameters)
        compare = comparisons_of(getattr(module, "COMPARE", {}), parameters, mutates)
        samples = sampling.read(getattr(module, "SAMPLES", {}), parameters)
        if both := sorted(set(compare) & set(samples)):
            raise InvalidDeclaration(f"output {both[0]} is in COMPARE and in SAMPLES; it can be in one of them")
        return cls(parameters, mutates, compare, layouts_of(module), samples)

    def to_json(self) -> DeclaredJson:
        declared: DeclaredJson = {}
        if self.mutates:
            declared["mutates"] = [self.name(position) for position in self.mutates]
        if self.compare:
            declared["compare"] = {str(key): one.to_json() for key, one in self.compare.items()}
        if self.samples:
            declared["samples"] = {str(output): one.to_json() for output, one in self.samples.items()}
        if self.layouts:
            declared["layouts"] = self.layouts
        return declared

    def name(self, position: int) -> str:
        """The name of forward's parameter at that position; the position where it has none (*args)."""
        return self.parameters[position] if position < len(self.parameters) else str(position)

    def shown(self, position: int) -> str:
        """The parameter at that position as a message names it: 'residual', or position 7."""
        return f"'{self.name(position)}'" if position < len(self.parameters) else f"position {position}"

    def mutated_tensors(self, inputs: list) -> list[int]:
        """The numbers, among the tensors of the inputs, of those that forward may change; none for an argument that is
        None. InvalidDeclaration where there is no tensor otherwise."""
        for position in self.mutates:
            if not tensors_at(inputs, position) and inputs[position : position + 1] != [None]:
                raise InvalidDeclaration(
                    f"MUTATES names {self.shown(position)}, but get_inputs gives {len(inputs)} inputs and "
                    "no tensor there"
                )
        return [number for position in self.mutates for number in tensors_at(inputs, position)]

    def seeds(self) -> list[int]:
        """The positions of forward's parameters that hold a seed, by their names."""
        return [at for at, name in enumerate(self.parameters) if "seed" in name.lower().split("_")]

    def names_of_tensors(self, inputs: list) -> list[str]:
        """For each tensor of the inputs the name of the parameter that holds it."""
        return [self.name(at) for at, value in enumerate(inputs) for _ in tensor_trees.input_tensors([value])]

    def name_of_tensor(self, inputs: list, number: int) -> str:
        """The name of the parameter that holds this tensor of the inputs."""
        return self.names_of_tensors(inputs)[number]

    def comparison(self, inputs: list, returned: int, at: int) -> Comparison | None:
        """How output `at` is compared. returned: how many tensors forward returns; the mutated ones follow."""
        if at in self.compare or at < returned:
            return self.compare.get(at)
        return self.compare.get(self.name_of_tensor(inputs, self.mutated_tensors(inputs)[at - returned]))


def refuse_misspelt(module) -> None:
    """Raises InvalidDeclaration for a name that is nearly a declaration's, in capitals, and that nothing in the file
    uses."""
    for name in vars(module):
        meant = difflib.get_close_matches(name, NAMES, 1, ALIKE) if name.isupper() and name not in NAMES else []
        if meant and not is_used(module, name):
            raise InvalidDeclaration(
                f"{name} is no declaration, and nothing uses it: write {meant[0]}, or leave it out"
            )


def is_used(module, name: str) -> bool:
    """Does the file's code read this name? True where the file cannot be read."""
    try:
        nodes = ast.walk(ast.parse(inspect.getsource(module)))
    except (OSError, TypeError, SyntaxError):
        return True
    return any(isinstance(one, ast.Name) and one.id == name and isinstance(one.ctx, ast.Load) for one in nodes)


def parameters_of(forward: Callable) -> tuple[str, ...]:
    """The names of the parameters of a model's forward that a list of inputs can reach, without self."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(forward).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)[1:]


def tensors_at(inputs: list, position: int) -> range:
    """The numbers, among all tensors of the inputs, of the tensors that the argument at `position` holds."""
    before = len(tensor_trees.input_tensors(inputs[:position]))
    return range(before, before + len(tensor_trees.input_tensors(inputs[position : position + 1])))


def mutated_positions(declared, parameters: tuple[str, ...]) -> tuple[int, ...]:
    """The positions that MUTATES names, in order."""
    if not isinstance(declared, tuple | list) or not all(type(one) in (str, int) for one in declared):
        raise InvalidDeclaration(
            'MUTATES must be a tuple of names or positions of forward\'s parameters, such as ("x", 1)'
        )
    return tuple(sorted({position_of(one, parameters, "MUTATES") for one in declared}))


def position_of(one: str | int, parameters: tuple[str, ...], declaration: str) -> int:
    if isinstance(one, str) and one not in parameters:
        names = ", ".join(parameters) or "none that has a name"
        raise InvalidDeclaration(f"{declaration} names '{one}', which is no parameter of forward; it has: {names}")
    position = parameters.index(one) if isinstance(one, str) else one
    if position < 0:
        raise InvalidDeclaration(f"{declaration} names position {one}; positions of forward's parameters begin at 0")
    return position


def comparisons_of(declared, parameters: tuple[str, ...], mutates: tuple[int, ...]) -> dict[int | str, Comparison]:
    """The comparisons that COMPARE declares, by output."""
    if not isinstance(declared, dict):
        raise InvalidDeclaration('COMPARE must be a dict from an output\'s position to its modes, {0: {"atol": 1e-2}}')
    mutated = [parameters[position] for position in mutates if position < len(parameters)]
    for key in declared:
        if not (type(key) is int and key >= 0) and key not in mutated:
            raise InvalidDeclaration(
                f"COMPARE has the key {key!r}; a key is the position of an output, from 0, or the name of a parameter "
                "that MUTATES declares"
            )
    return {key: comparisons.read(key, modes, parameters) for key, modes in declared.items()}


def layouts_of(module) -> str | None:
    layouts = getattr(module, "LAYOUTS", None)
    if layouts not in (None, CONTIGUOUS):
        raise InvalidDeclaration(f'LAYOUTS is {layouts!r}; it can only be "{CONTIGUOUS}"')
    return layouts
