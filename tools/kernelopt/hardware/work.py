"""The least work of one workload: the FLOPs and bytes that any kernel needs for it."""

from dataclasses import MISSING, dataclass, fields

ABSENT = ""  # default of an optional key for which null has another meaning


@dataclass(frozen=True, kw_only=True)
class Work:
    """FLOPs and bytes of a workload (reference/task.schema.json).

    dtype: the dtype of the arithmetic. also: other dtypes that do a part of the FLOPs. cast_to: the task's dtype at the
    time of counting, or ABSENT if it is not recorded. source: "counted" or "given". bytes_in, bytes_out: None if only
    the sum was given.
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
        """Make Work from a JSON object that its schema has accepted."""
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
