"""The least work of one workload: what any kernel has to compute and move for it."""

from dataclasses import MISSING, dataclass, fields

ABSENT = ""  # of an optional key for which null means something else


@dataclass(frozen=True, kw_only=True)
class Work:
    """FLOPs and bytes of a workload (reference/task.schema.json).

    dtype: of the arithmetic. also: other dtypes that take a part of the FLOPs. cast_to: the task's dtype when this was
    counted; ABSENT where nobody wrote it down. source: "counted" or "given". bytes_in and bytes_out are None when the
    sum was given.
    """

    flops: int
    bytes_in: int | None
    bytes_out: int | None
    bytes_min: int
    dtype: str
    also: tuple[str, ...] | None = None
    cast_to: str | None = ABSENT
    source: str

    @classmethod
    def from_json(cls, value: dict) -> "Work":
        """Work from its JSON object, which its schema has passed."""
        also = value.get("also")
        return cls(**{**value, "also": None if also is None else tuple(also)})

    def to_json(self) -> dict:
        """The JSON object."""
        written = present(self)
        return {**written, "also": list(self.also)} if self.also is not None else written


def present(instance) -> dict:
    """The fields of a dataclass instance, without those that have their default: a key that may be absent."""
    values = {field.name: getattr(instance, field.name) for field in fields(instance)}
    return {
        field.name: values[field.name]
        for field in fields(instance)
        if field.default is MISSING or values[field.name] != field.default
    }
