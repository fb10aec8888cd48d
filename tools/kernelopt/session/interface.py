"""How the kernel of a task is called: its arguments, its constructor's arguments and its weights."""

from dataclasses import dataclass, field

TENSOR, NUMBER = "tensor", "number"


@dataclass(frozen=True)
class Interface:
    """The call of a kernel, as its reference and get_inputs say.

    parameters: names of forward's parameters, one for each input. kinds: of each input, "tensor", "number" (a Python
    int, float or bool) or the name of its type. constructor: the constructor's arguments as Python text; None where one
    has no such text, a tensor for example. weights: names of Model's parameters and buffers. mutates: positions of the
    inputs that forward is declared to change. declared: the declarations (worker.declarations.DeclaredJson).
    """

    parameters: list[str]
    kinds: list[str]
    constructor: list[str] | None
    weights: list[str]
    mutates: list[int]
    workloads: list[str]
    declared: dict = field(default_factory=dict)

    def to_json(self) -> dict:
        return dict(vars(self))
