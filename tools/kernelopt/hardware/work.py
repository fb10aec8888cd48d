"""The least work of one workload, or of a call of a module in a model: the FLOPs and bytes that any kernel needs."""

from dataclasses import MISSING, asdict, dataclass, fields, replace

COUNTED = "counted"  # the source of work that was not given by hand
NEAR = 1e-3  # of the bytes
ABSENT = ""  # default of an optional key for which null has another meaning


def rate_unit(dtype: str) -> str:
    """The unit of a rate of arithmetic: integers make no floating-point operations."""
    return "TOPS" if dtype == "int8" else "TFLOPS"


@dataclass(frozen=True, kw_only=True)
class OtherArithmetic:
    """What a problem must do outside the tensor cores, per element of its result and `k_block` values of k: so many
    fp32 multiply-adds and powers of two. Scales for each 128 of k: k_block 128, fp32_fma 1."""

    k_block: int
    fp32_fma: int = 0
    exp2: int = 0

    def to_json(self) -> dict:
        """The JSON object."""
        return asdict(self)

    def words(self) -> str:
        """ "1 fp32 multiply-add per element and 128 of k" """
        counts = ((self.fp32_fma, "fp32 multiply-add"), (self.exp2, "power of two"))
        parts = [f"{count} {noun}{'s' * (count > 1)}" for count, noun in counts if count]
        return f"{' and '.join(parts)} per element and {self.k_block} of k".replace("power of twos", "powers of two")


@dataclass(frozen=True, kw_only=True)
class Work:
    """FLOPs and bytes of a workload (reference/task.schema.json).

    dtype: the dtype of the arithmetic. also: other dtypes that do a part of the FLOPs. cast_to: the task's dtype at the
    time of counting, or ABSENT if it is not recorded. windowed_pct: of the FLOPs, those of convolutions that Winograd's
    form does with fewer; the work holds them all. source: "counted" or "given". bytes_in, bytes_out: None if only
    the sum was given. other_arithmetic: given to measure_ceiling.py.
    """

    flops: int
    bytes_in: int | None
    bytes_out: int | None
    bytes_min: int
    dtype: str
    also: tuple[str, ...] | None = None
    cast_to: str | None = ABSENT
    source: str
    windowed_pct: float = 0.0
    other_arithmetic: OtherArithmetic | None = None

    @classmethod
    def from_json(cls, value: dict) -> "Work":
        """Make Work from a JSON object that its schema has accepted."""
        also, other = value.get("also"), value.get("other_arithmetic")
        parts = {"also": None if also is None else tuple(also), "other_arithmetic": other and OtherArithmetic(**other)}
        return cls(**{**value, **parts})

    def given(self, dtype: str | None = None, flops: int | None = None, bytes_min: int | None = None) -> "Work":
        """This work with figures that a user gave by hand in place; None leaves the counted one."""
        work = self
        if dtype:
            work = replace(work, dtype=dtype, source="given")
        if flops is not None:
            work = replace(work, flops=flops, windowed_pct=0.0, source="given")
        if bytes_min is not None:
            work = replace(work, bytes_min=bytes_min, bytes_in=None, bytes_out=None, source="given")
        return work

    def is_near(self, other: "Work") -> bool:
        """Do they differ in bytes alone, by NEAR at most? A CPU and a GPU round differently, so other elements of a
        changed input may keep their value."""
        bytes_of_other = {name: getattr(other, name) for name in ("bytes_in", "bytes_out", "bytes_min")}
        is_close = abs(self.bytes_min - other.bytes_min) <= NEAR * other.bytes_min
        return is_close and replace(self, **bytes_of_other) == other

    def to_json(self) -> dict:
        """The JSON object."""
        written = present(self)
        if self.also is not None:
            written["also"] = list(self.also)
        if self.other_arithmetic is not None:
            written["other_arithmetic"] = self.other_arithmetic.to_json()
        return written


@dataclass(frozen=True)
class CountedWorkload:
    """The least work of a workload, and the shapes {inputs, outputs} that it was counted from, each a list of sizes.
    uncounted: what a call moves beside it and was not counted. spared_pct: of its products' FLOPs, what masks and
    symmetric results spare; the work leaves it out. quantised: the positions of outputs in int8 and uint8 that must be
    equal, as no COMPARE names them. drawn_flops: the fewest and most of several draws, where drawn numbers such as
    lengths decide them; the work then has their mean."""

    work: Work
    shapes: dict[str, list[list[int]]]
    uncounted: str | None = None
    spared_pct: float = 0.0
    quantised: tuple[int, ...] = ()
    drawn_flops: tuple[int, ...] = ()

    @classmethod
    def from_json(cls, counted: dict) -> "CountedWorkload":
        beside = {name: counted[name] for name in ("shapes", "uncounted", "spared_pct") if name in counted}
        beside |= {name: tuple(counted.get(name, ())) for name in ("quantised", "drawn_flops")}
        work = {name: value for name, value in counted.items() if name not in beside}
        return cls(Work.from_json({**work, "source": COUNTED}), **beside)

    def to_json(self) -> dict:
        """The worker's answer: the keys of the work but its source, which is COUNTED, and the shapes."""
        work = {name: value for name, value in self.work.to_json().items() if name != "source"}
        beside = {name: value for name, value in present(self).items() if name != "work"}
        return {**work, **beside}


def present(instance) -> dict[str, object]:
    """The fields of a dataclass instance, without those that have their default: a key that may be absent."""
    values = {field.name: getattr(instance, field.name) for field in fields(instance)}
    return {
        field.name: values[field.name]
        for field in fields(instance)
        if field.default is MISSING or values[field.name] != field.default
    }


@dataclass(frozen=True)
class ModuleWork:
    """One call of a module. path: "" for the model. whole: with its submodules, else its own operators alone.
    bytes_state: of parameters and buffers. bytes_in, bytes_out: of other tensors. dtype: of most of the FLOPs, or else
    of most bytes."""

    path: str
    whole: bool
    flops: int
    bytes_state: int
    bytes_in: int
    bytes_out: int
    dtype: str
