"""The reports of the benchmarks of a card. worker/rates.py makes their JSON; each class here is one object of it.

`measure.card_rates` reads a report and adds the states of the GPU. `to_json` returns the keys that the tools print.
"""

from dataclasses import dataclass

from ..hardware.card import GpuState
from .ceiling_report import TensorCeiling

State = GpuState | None  # None where NVML reported nothing


@dataclass(frozen=True)
class Rate:
    """The rates of `n` runs, in the unit of the benchmark: median, 20th and 80th percentile."""

    median: float
    p20: float
    p80: float
    n: int

    @classmethod
    def from_json(cls, values: dict) -> "Rate":
        """Read the rate; other keys are ignored."""
        return cls(values["median"], values["p20"], values["p80"], values["n"])

    def to_json(self) -> dict:
        return dict(vars(self))

    def describe(self, unit: str) -> str:
        """ "3.1 GB/s (p20 3.0, p80 3.2, 50 runs)" """
        return f"{self.median:.1f} {unit} (p20 {self.p20:.1f}, p80 {self.p80:.1f}, {self.n} runs)"


@dataclass(frozen=True)
class BufferRate:
    """The bandwidth of one operation. pattern: copy, read or write. cache: cold or warm."""

    pattern: str
    buffer_bytes: int
    cache: str
    rate: Rate

    @classmethod
    def from_json(cls, values: dict) -> "BufferRate":
        return cls(values["pattern"], values["buffer_bytes"], values["cache"], Rate.from_json(values))

    def to_json(self) -> dict:
        labels = {"pattern": self.pattern, "buffer_bytes": self.buffer_bytes, "cache": self.cache}
        return {**labels, **self.rate.to_json()}


@dataclass(frozen=True)
class Bandwidth:
    """The report of `bandwidth`. left_out: sizes in bytes for which too little memory is free. window: start and end of
    the last size, in seconds since the epoch. card: its properties from CUDA, in the wiki's metrics and units.
    gpu_state: within the window."""

    unit: str
    rates: tuple[BufferRate, ...]
    left_out: list[int]
    window: list[float]
    card: dict
    torch: str
    triton: str
    gpu_state: State = None

    @classmethod
    def from_json(cls, report: dict, states: dict[str, State]) -> "Bandwidth":
        return cls(
            unit=report["unit"],
            rates=tuple(map(BufferRate.from_json, report["rates"])),
            left_out=report["left_out"],
            window=report["window"],
            card=report["device"],
            torch=report["torch"],
            triton=report["triton"],
            gpu_state=states[WHOLE],
        )

    def to_json(self) -> dict:
        return {
            "device": self.card,
            "unit": self.unit,
            "rates": [rate.to_json() for rate in self.rates],
            "left_out": self.left_out,
            "window": self.window,
            "torch": self.torch,
            "triton": self.triton,
            "gpu_state": self.gpu_state and self.gpu_state.to_json(),
        }


@dataclass(frozen=True)
class ShapeRate:
    """The bandwidth of a kernel that only moves bytes. programs: None is one for each block of elements."""

    block: int
    warps: int
    programs: int | None
    rate: Rate

    @classmethod
    def from_json(cls, values: dict) -> "ShapeRate":
        return cls(values["block"], values["warps"], values["programs"], Rate.from_json(values))

    def to_json(self) -> dict:
        return {"block": self.block, "warps": self.warps, "programs": self.programs, **self.rate.to_json()}


@dataclass(frozen=True)
class Ceiling:
    """The report of `ceiling`: the bandwidth of several shapes of a kernel that reads `bytes_in` and writes
    `bytes_out`, and the best of them. window, gpu_state: as in Bandwidth."""

    unit: str
    bytes_in: int
    bytes_out: int
    rates: tuple[ShapeRate, ...]
    best: ShapeRate
    window: list[float]
    gpu_state: State = None

    @classmethod
    def from_json(cls, report: dict, states: dict[str, State]) -> "Ceiling":
        return cls(
            unit=report["unit"],
            bytes_in=report["bytes_in"],
            bytes_out=report["bytes_out"],
            rates=tuple(map(ShapeRate.from_json, report["rates"])),
            best=ShapeRate.from_json(report["best"]),
            window=report["window"],
            gpu_state=states[WHOLE],
        )

    def to_json(self) -> dict:
        rates, best = [rate.to_json() for rate in self.rates], self.best.to_json()
        return {
            **vars(self),
            "rates": rates,
            "best": best,
            "gpu_state": self.gpu_state and self.gpu_state.to_json(),
        }


@dataclass(frozen=True)
class ProductRate:
    """The rate of a square matrix product. size: rows and columns."""

    dtype: str
    size: int
    rate: Rate

    @classmethod
    def from_json(cls, values: dict) -> "ProductRate":
        return cls(values["dtype"], values["size"], Rate.from_json(values))

    def to_json(self) -> dict:
        return {"dtype": self.dtype, "size": self.size, **self.rate.to_json()}


@dataclass(frozen=True)
class Products:
    """The report of `matmul`. gpu_state: of the whole job."""

    unit: str
    rates: tuple[ProductRate, ...]
    gpu_state: State = None

    @classmethod
    def from_json(cls, report: dict, states: dict[str, State]) -> "Products":
        return cls(report["unit"], tuple(map(ProductRate.from_json, report["rates"])), states[WHOLE])


@dataclass(frozen=True)
class RestedAndSustained:
    """The report of `product_rates`, in TFLOPS, for int8 in TOPS. rested: after a pause. sustained_median: of calls
    back to back. …_state: of the GPU meanwhile. gpu_state: of the whole job."""

    dtype: str
    size: int
    rested: Rate
    sustained_median: float
    rested_state: State = None
    sustained_state: State = None
    gpu_state: State = None

    @classmethod
    def from_json(cls, report: dict, states: dict[str, State]) -> "RestedAndSustained":
        return cls(
            dtype=report["dtype"],
            size=report["size"],
            rested=Rate.from_json(report["rested"]),
            sustained_median=report["sustained"]["median"],
            rested_state=states["rested"],
            sustained_state=states["sustained"],
            gpu_state=states[WHOLE],
        )

    def to_json(self) -> dict:
        """The JSON object; its keys name the unit TFLOPS, also for int8."""
        rates = {"rested_tflops": self.rested.median, "sustained_tflops": self.sustained_median}
        states = {"rested": self.rested_state, "sustained": self.sustained_state}
        written = {name: state and state.to_json() for name, state in states.items()}
        return {"size": self.size, **rates, "gpu_states": written}


WHOLE = "whole"  # in `states`: of the job's own window, or of the whole job
Report = Bandwidth | Ceiling | Products | RestedAndSustained | TensorCeiling
REPORTS: dict[str, type[Report]] = {  # by job of the worker
    "bandwidth": Bandwidth,
    "ceiling": Ceiling,
    "matmul": Products,
    "product_rates": RestedAndSustained,
    "tensor_ceiling": TensorCeiling,
}
