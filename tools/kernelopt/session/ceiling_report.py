"""The report of the job tensor_ceiling: what the bare tensor operations of a problem take on this card."""

from dataclasses import dataclass

from ..hardware.card import GpuState
from ..hardware.work import OtherArithmetic

PARTS = ("cold", "burst", "sustained")  # how it was timed


@dataclass(frozen=True)
class Part:
    """One way of timing. median_us, p20_us, p80_us: of a launch without its start-up. start_up_us: what the launch took
    besides its operations. clock_mhz: of the SM inside the kernel. state: of NVML meanwhile, or None."""

    median_us: float
    start_up_us: float
    clock_mhz: float
    state: GpuState | None
    p20_us: float | None = None
    p80_us: float | None = None

    @classmethod
    def of(cls, times: dict, state: GpuState | None) -> "Part":
        start = times["start_up_us"]
        median, p20, p80 = (None if name not in times else times[name] - start for name in ("median", "p20", "p80"))
        return cls(median, start, times["kernel_clock_mhz"], state, p20, p80)


@dataclass(frozen=True)
class TensorCeiling:
    """flops: of the problem. done_flops: of a launch, rounded up to whole panels of all blocks; more for a small
    problem, which takes too short to be timed. other: the arithmetic that other warps did beside them. relative_error:
    of the probe's own sums, against the host's."""

    dtype: str
    instruction: str
    flops: int
    done_flops: int
    cold: Part
    burst: Part
    sustained: Part
    relative_error: float
    other: OtherArithmetic | None = None

    @classmethod
    def from_json(cls, report: dict, states: dict[str, GpuState | None]) -> "TensorCeiling":
        parts = {name: Part.of(report[name], states[name]) for name in PARTS}
        known = {name: report[name] for name in ("dtype", "instruction", "flops", "done_flops", "relative_error")}
        stated = report["other"] and {name: report["other"][name] for name in ("k_block", "fp32_fma", "exp2")}
        return cls(**known, **parts, other=stated and OtherArithmetic(**stated))

    def rate(self, part: str) -> float:
        """TFLOPS (TOPS for int8) of a way of timing."""
        return self.done_flops / getattr(self, part).median_us / 1e6

    def time_us(self, part: str) -> float:
        """The time of the problem's own FLOPs."""
        return self.flops / self.rate(part) / 1e6

    def to_json(self) -> dict:
        """The JSON object: times of the problem's FLOPs in us, rates, the start-up in us that both leave out, and the
        SM clock inside the kernel in MHz."""
        times = {f"{name}_us": self.time_us(name) for name in PARTS}
        rates = {f"{name}_tflops": self.rate(name) for name in PARTS}
        starts = {name: getattr(self, name).start_up_us for name in PARTS}
        clocks = {name: getattr(self, name).clock_mhz for name in PARTS}
        timed = {name: getattr(self, name).state for name in PARTS}
        states = {name: state and state.to_json() for name, state in timed.items()}
        known = {
            name: getattr(self, name) for name in ("dtype", "instruction", "flops", "done_flops", "relative_error")
        }
        other = self.other and self.other.to_json()
        told = {"start_up_us": starts, "sm_clock_mhz": clocks, "gpu_states": states, "other_arithmetic": other}
        return {**known, **times, **rates, **told}
