"""The Task block of a workspace: the kernel's requirements, the platform and the Stop Conditions."""

from dataclasses import dataclass

from ..errors import UsageError
from ..hardware.work import ABSENT, Work, present

DTYPES = {
    "fp64": ("fp64", "float64", "double"),
    "fp32": ("fp32", "float32", "float"),
    "fp16": ("fp16", "float16", "half"),
    "bf16": ("bf16", "bfloat16"),
}


@dataclass(frozen=True, kw_only=True)
class Target:
    """One Stop Condition. metric: bandwidth_gbps, tflops or latency_us. target: in `unit` (GB/s, TFLOPS, us).

    share_pct: the target as a percentage of `basis`, or None if it is not recorded. basis: the citation of the value
    that the target comes from.
    """

    workload: str
    metric: str
    target: float
    unit: str
    share_pct: float | None = None
    basis: str

    def to_json(self) -> dict:
        """The JSON object."""
        return present(self)


@dataclass(frozen=True, kw_only=True)
class Task:
    """The Task block (reference/task.schema.json). A field with a default is a key that may be absent.

    shapes, work: by workload; None before they are counted. dtype: None uses the dtype of the reference's inputs.
    tolerance: None uses the default of the dtype. calibration: a file of the workspace, or None or ABSENT.
    """

    platform: str | None
    arch: str | None
    framework: str | None
    dtype: str | None
    tolerance: float | None
    shapes: dict[str, str] | None
    libraries: bool | None = None
    only_these_shapes: bool | None = None
    additional_notes: str
    gpu_wiki_path: str | None
    calibration: str | None = ABSENT
    work: dict[str, Work] | None
    targets: tuple[Target, ...]

    @classmethod
    def from_json(cls, value: dict) -> "Task":
        """Make a Task from a JSON object that its schema has accepted."""
        work = value["work"]
        counted = None if work is None else {name: Work.from_json(part) for name, part in work.items()}
        return cls(**{**value, "work": counted, "targets": tuple(Target(**target) for target in value["targets"])})

    def to_json(self) -> dict:
        """The JSON object."""
        work = None if self.work is None else {name: part.to_json() for name, part in self.work.items()}
        return {**present(self), "work": work, "targets": [target.to_json() for target in self.targets]}

    def work_of(self, workload: str = "default") -> Work | None:
        """Return the least work of a workload, or None before it is counted."""
        return (self.work or {}).get(workload)


def dtype_name(name: str) -> str:
    """Return the bundle's name of a dtype: bf16 for "bfloat16", "torch.bfloat16" or "BF16"."""
    plain = name.lower().removeprefix("torch.")
    for short, spellings in DTYPES.items():
        if plain in spellings:
            return short
    raise UsageError(f"dtype '{name}' is not supported; choose one of: {', '.join(DTYPES)}")
