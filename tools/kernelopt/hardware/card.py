"""One GPU as its driver reports it: identity, highest clocks, and state during a measurement. Data and pure functions.

device/gpu.py asks the driver.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass

READINGS = ("sm_clock_mhz", "memory_clock_mhz", "power_w", "temperature_c")  # fields of a GpuState that are a Spread
# SMs or compute units that a kernel is told where the wiki knows no card: an assumption, no card's value. A kernel
# that asks sizes its grid by it as a rule, and the result says what it was told (compiler.assumption).
UNKNOWN_UNITS = 128


@dataclass(frozen=True)
class MaxClocks:
    """The highest clocks of a card; None where the driver does not report one."""

    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None


@dataclass(frozen=True)
class Card:
    """A GPU, or one MIG slice of a GPU. driver: the version of the driver."""

    name: str
    uuid: str
    driver: str
    max_clocks: MaxClocks = MaxClocks()

    def to_json(self) -> dict:
        """The JSON object; it has no key for a clock that is not reported."""
        clocks = {name: mhz for name, mhz in asdict(self.max_clocks).items() if mhz is not None}
        return {**asdict(self), "max_clocks": clocks}


@dataclass(frozen=True)
class Spread:
    """The lowest, the median and the highest of some readings, in the unit that the name of the field gives."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, readings: Iterable[float | None]) -> "Spread | None":
        """None when there is no reading. A reading may be None."""
        values = sorted(value for value in readings if value is not None)
        return cls(values[0], values[len(values) // 2], values[-1]) if values else None

    @classmethod
    def merged(cls, spreads: Iterable["Spread | None"]) -> "Spread | None":
        """The extremes of several spreads, and the median of their medians; None when there is no spread."""
        known = [spread for spread in spreads if spread]
        if not known:
            return None
        medians = cls.of(spread.median for spread in known)
        return cls(min(spread.min for spread in known), medians.median, max(spread.max for spread in known))


@dataclass(frozen=True)
class GpuState:
    """The state of a GPU during a measurement; None where the driver does not report a value.

    samples: the number of readings. throttle_reasons: all that were seen. foreign_processes: the numbers of processes
    on the GPU that are not part of the measurement.
    """

    samples: int
    sm_clock_mhz: Spread | None
    memory_clock_mhz: Spread | None
    power_w: Spread | None
    temperature_c: Spread | None
    throttle_reasons: tuple[str, ...] | None
    foreign_processes: tuple[int, ...]

    @classmethod
    def from_json(cls, value: dict) -> "GpuState":
        """From the JSON object that `to_json` made. KeyError or TypeError: another shape."""
        reasons = value["throttle_reasons"]
        return cls(
            samples=value["samples"],
            **{name: value[name] and Spread(**value[name]) for name in READINGS},
            throttle_reasons=None if reasons is None else tuple(reasons),
            foreign_processes=tuple(value["foreign_processes"]),
        )

    def to_json(self) -> dict:
        reasons = self.throttle_reasons
        lists = {"throttle_reasons": None if reasons is None else list(reasons)}
        return {**asdict(self), **lists, "foreign_processes": list(self.foreign_processes)}

    def describe(self) -> str:
        """The state in one line."""
        clock, power, heat, reasons = self.sm_clock_mhz, self.power_w, self.temperature_c, self.throttle_reasons
        parts = [
            f"SM clock {clock.median} MHz ({clock.min} to {clock.max})" if clock else "SM clock not reported",
            f"power {power.median:.0f} W" if power else "power not reported",
            f"{heat.median} C" if heat else "temperature not reported",
            f"throttled by: {', '.join(reasons) or 'nothing'}" if reasons is not None else "throttling not reported",
        ]
        return ", ".join(parts)


def merged(states: Iterable[GpuState | None]) -> GpuState | None:
    """One state of several measurements: the extremes, the median of the medians, every reason and process."""
    known = [state for state in states if state]
    if not known:
        return None
    return GpuState(
        samples=sum(state.samples for state in known),
        **{name: Spread.merged(getattr(state, name) for state in known) for name in READINGS},
        throttle_reasons=all_reasons(state.throttle_reasons for state in known),
        foreign_processes=all_processes(state.foreign_processes for state in known),
    )


def all_reasons(seen: Iterable[Iterable[str] | None]) -> tuple[str, ...] | None:
    """Every reason once, sorted; None when no reading reports reasons."""
    reported = [reasons for reasons in seen if reasons is not None]
    return tuple(sorted(set().union(*reported))) if reported else None


def all_processes(seen: Iterable[Iterable[int]]) -> tuple[int, ...]:
    """Every process once, sorted."""
    return tuple(sorted(set().union(*seen)))


@dataclass(frozen=True)
class CompileTarget:
    """What compilers are told of a GPU that need not be here; None: unknown.

    name: of the card, or the architecture where no card is named. arch: "sm_90a", "gfx942". capability: (major, minor).
    units: SMs or compute units, of the card `units_of`. shared_bytes: the most that a block can have.
    """

    name: str
    arch: str
    capability: tuple[int, int]
    units: int | None
    units_of: str | None
    shared_bytes: int | None
    tensor_memory_columns: int | None

    @property
    def is_nvidia(self) -> bool:
        return self.arch.startswith("sm_")

    @property
    def told_units(self) -> int:
        """The number of SMs or compute units that a kernel is told."""
        return self.units or UNKNOWN_UNITS

    @classmethod
    def from_json(cls, value: dict) -> "CompileTarget":
        return cls(**{**value, "capability": tuple(value["capability"])})

    def to_json(self) -> dict:
        return {**vars(self), "capability": list(self.capability)}
