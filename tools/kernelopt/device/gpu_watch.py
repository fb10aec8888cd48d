"""The state of the GPU while something is measured: clocks, power, throttling, other processes."""

import contextlib
import os
import threading
import time
from dataclasses import dataclass

from ..errors import EnvironmentLacks
from ..hardware.card import READINGS, GpuState, Spread, all_processes, all_reasons
from . import processes
from .gpu import answers, open_nvml, whole_gpu

THROTTLE_REASONS = {  # NVML's reasons that slow the GPU down, by their names now and before driver 535
    ("nvmlClocksEventReasonSwPowerCap", "nvmlClocksThrottleReasonSwPowerCap"): "sw_power_cap",
    ("nvmlClocksThrottleReasonHwSlowdown",): "hw_slowdown",
    ("nvmlClocksEventReasonSyncBoost", "nvmlClocksThrottleReasonSyncBoost"): "sync_boost",
    ("nvmlClocksEventReasonSwThermalSlowdown", "nvmlClocksThrottleReasonSwThermalSlowdown"): "sw_thermal_slowdown",
    ("nvmlClocksThrottleReasonHwThermalSlowdown",): "hw_thermal_slowdown",
    ("nvmlClocksThrottleReasonHwPowerBrakeSlowdown",): "hw_power_brake",
}


@dataclass(frozen=True)
class Sample:
    """One reading of a GPU's state. at_s: seconds since the epoch. None: this device or its driver does not report
    it."""

    at_s: float
    foreign_processes: tuple[int, ...]
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttle_reasons: tuple[str, ...] | None = None


def _sample(nvml, handle, own_processes: int = 1) -> Sample:
    whole = whole_gpu(nvml, handle)
    queries = {
        "foreign_processes": lambda: _foreign_processes(nvml, handle, own_processes),
        "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(whole, nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(whole, nvml.NVML_CLOCK_MEM),
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(whole) / 1000,
        "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(whole, nvml.NVML_TEMPERATURE_GPU),
        "throttle_reasons": lambda: _throttle_reasons(nvml, whole),
    }
    return Sample(**{"foreign_processes": (), **answers(nvml, queries)}, at_s=time.time())


def _foreign_processes(nvml, handle, own_processes: int) -> tuple[int, ...]:
    running = [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    return tuple(foreign(running, own_processes))


def _throttle_reasons(nvml, handle) -> tuple[str, ...]:
    try:
        reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except (nvml.NVMLError, AttributeError):  # a driver or a binding before 535 uses its former name
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return tuple(name for bits, name in THROTTLE_REASONS.items() if reasons & _bit(nvml, bits))


def _bit(nvml, names: tuple[str, ...]) -> int:
    """The constant under the first of its names that this binding has; 0 when it has no such name."""
    return next((getattr(nvml, name) for name in names if hasattr(nvml, name)), 0)


class Watch:
    """Samples the GPU's state every 20 ms while the `with` block runs; `state` sums up a part of it afterwards.

    own_processes: how many children of this process use the GPU.
    """

    INTERVAL_S = 0.02

    def __init__(self, own_processes: int = 1):
        self._own_processes = own_processes
        self.samples: list[Sample] = []
        self._stop = threading.Event()

    def __enter__(self) -> "Watch":
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(EnvironmentLacks), open_nvml() as (nvml, handle):
            while not self._stop.wait(self.INTERVAL_S):
                self.samples.append(_sample(nvml, handle, self._own_processes))

    def state(self, window: list[float] | None = None) -> GpuState | None:
        """The state of the GPU within `window` (seconds since the epoch, measured by the worker). None when there is
        no sample."""
        since, until = window or (0, float("inf"))
        samples = [s for s in self.samples if since - self.INTERVAL_S <= s.at_s <= until + self.INTERVAL_S]
        if not samples:
            return None
        return GpuState(
            samples=len(samples),
            **{name: Spread.of(getattr(sample, name) for sample in samples) for name in READINGS},
            throttle_reasons=all_reasons(sample.throttle_reasons for sample in samples),
            foreign_processes=all_processes(sample.foreign_processes for sample in samples),
        )


def foreign(processes: list[int], own: int = 1) -> list[int]:
    """The processes on the GPU that are neither this one nor its descendants. In a container, NVML may report numbers
    of the host. Of those that are not in /proc, so many count as `own`."""
    unknown = [pid for pid in processes if parent_of(pid) is None]
    return [pid for pid in processes if not descends(pid)] if not unknown else unknown[own:]


def descends(pid: int) -> bool:
    """Is this process the one of that number, or its ancestor?"""
    while pid and pid != os.getpid():
        pid = parent_of(pid) or 0
    return pid == os.getpid()


def parent_of(pid: int) -> int | None:
    """The parent's number; None when this process does not exist here."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(processes.stat(pid)[1])
    return None
