"""A change of a task's inputs beyond the task's own: the type that the worker makes and the verifier reads."""

from dataclasses import dataclass, field

PLAIN = "contiguous"  # the layout of inputs that lie as the task makes them


@dataclass(frozen=True)
class Variant:
    """Sizes, a layout or values that the task does not list and that its reference takes.

    sizes: [[input, dimension, new size], …]. keywords: other values of the task's keyword sizes. values: the name of a
    change, None for the task's own. instead_of: the name of the variant whose refusal activates this one."""

    name: str
    sizes: list[list[int]]
    layout: str = PLAIN
    values: str | None = None
    instead_of: str | None = None
    keywords: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_json(cls, value: dict | None) -> "Variant | None":
        return value and cls(**value)

    @property
    def resized(self) -> bool:
        return bool(self.sizes or self.keywords)

    @property
    def of_task(self) -> bool:
        """Does get_inputs make its inputs as they are?"""
        return bool(self.keywords) and self.values is None
