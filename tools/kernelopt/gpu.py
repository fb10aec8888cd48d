"""The GPU of this machine as NVML tells it: which one, in what state, and the one lock that guards it.

No CUDA context is made here, so the parent process of a measurement stays out of the GPU.
"""

import contextlib
import ctypes
import fcntl
import getpass
import os
import sys
import threading
import time
from pathlib import Path

from . import bundle
from .errors import EnvironmentLacks

NO_GPU = (
    "no NVIDIA GPU here ({}); run this on a machine with one (a Triton kernel's logic alone: "
    "verify_kernel.py --device cpu-interpreter)"
)
LOCKS = Path("/tmp")  # not $TMPDIR: whoever uses the GPU must meet the same lock
FIGURES = ("sm_clock_mhz", "memory_clock_mhz", "power_w", "temperature_c")
THROTTLE_REASONS = {  # NVML's clocks-event reasons that slow the GPU down; idle and application clocks are none
    "nvmlClocksEventReasonSwPowerCap": "sw_power_cap",
    "nvmlClocksThrottleReasonHwSlowdown": "hw_slowdown",
    "nvmlClocksEventReasonSyncBoost": "sync_boost",
    "nvmlClocksEventReasonSwThermalSlowdown": "sw_thermal_slowdown",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "hw_thermal_slowdown",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "hw_power_brake",
}


@contextlib.contextmanager
def open_nvml():
    """(pynvml, handle of the first visible GPU); EnvironmentLacks when there is none."""
    bundle.require("pynvml")
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise EnvironmentLacks(NO_GPU.format(error)) from None
    try:
        yield pynvml, _first_visible(pynvml)
    except pynvml.NVMLError as error:
        raise EnvironmentLacks(NO_GPU.format(error)) from None
    finally:
        pynvml.nvmlShutdown()


def _first_visible(pynvml):
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return _handle(pynvml, chosen.split(",")[0].strip() if chosen is not None else "0")


def _handle(pynvml, name: str):
    """The GPU that an entry of CUDA_VISIBLE_DEVICES names, by UUID or by index in nvidia-smi's order."""
    if name.startswith(("GPU-", "MIG-")):
        return pynvml.nvmlDeviceGetHandleByUUID(name)
    if not name.isdigit():
        raise EnvironmentLacks(NO_GPU.format(f"CUDA_VISIBLE_DEVICES names '{name}'"))
    return pynvml.nvmlDeviceGetHandleByIndex(int(name))


def visible() -> list[str]:
    """UUIDs of the GPUs that this process may use, in CUDA's order (see Sandbox)."""
    with open_nvml() as (nvml, _):
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
        if chosen is not None:
            handles = [_handle(nvml, name.strip()) for name in chosen.split(",")]
        else:
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return [nvml.nvmlDeviceGetUUID(handle) for handle in handles]


def identify() -> dict:
    """{name, uuid, driver} of the GPU that CUDA calls device 0."""
    with open_nvml() as (nvml, handle):
        return {
            "name": nvml.nvmlDeviceGetName(handle),
            "uuid": nvml.nvmlDeviceGetUUID(handle),
            "driver": nvml.nvmlSystemGetDriverVersion(),
        }


def query() -> dict:
    """What the device says of itself, in the wiki's metrics and units; what it does not tell is left out.

    From NVML, and the SM count and L2 from the driver's attributes of CUDA device 0, which need no CUDA context.
    memory_capacity is in GiB: vendors print that figure as GB.
    """
    with open_nvml() as (nvml, handle):
        questions = {
            "compute_capability": lambda: "{}.{}".format(*nvml.nvmlDeviceGetCudaComputeCapability(handle)),
            "memory_capacity": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30,
            "boost_clock": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
            "memory_clock": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM),
            "memory_bus_width": lambda: nvml.nvmlDeviceGetMemoryBusWidth(handle),
            "tdp": lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle) / 1000,
        }
        said = {}
        for metric, ask in questions.items():
            with contextlib.suppress(nvml.NVMLError):  # a virtual or consumer GPU does not answer everything
                said[metric] = ask()
    return said | driver_attributes()


def driver_attributes() -> dict:
    """{sm_count, l2_capacity in MiB} by cuDeviceGetAttribute; {} where the driver library cannot be asked."""
    attributes = {"sm_count": (16, 1), "l2_capacity": (38, 2**20)}  # CU_DEVICE_ATTRIBUTE_…, unit
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return {}
    device, value, said = ctypes.c_int(), ctypes.c_int(), {}
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return {}
    for metric, (number, unit) in attributes.items():
        if driver.cuDeviceGetAttribute(ctypes.byref(value), number, device) == 0:
            said[metric] = value.value / unit if unit > 1 else value.value
    return said


def _sample(nvml, handle) -> dict:
    """One reading: processes with a context, clocks in MHz, power in W, temperature in degrees Celsius, reasons for
    throttling."""
    reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    return {
        "processes": [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)],
        "sm_clock_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
        "power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "temperature_c": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "throttle_reasons": [name for bit, name in THROTTLE_REASONS.items() if reasons & getattr(nvml, bit)],
    }


class Watch:
    """Samples the GPU's state every 20 ms while the `with` block runs; `state` sums up a part of it afterwards."""

    INTERVAL_S = 0.02

    def __init__(self):
        self.samples: list[dict] = []
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
                sample = _sample(nvml, handle)
                self.samples.append({"at": time.time(), "foreign": foreign(sample.pop("processes")), **sample})

    def state(self, window: list[float] | None = None) -> dict | None:
        """{min, median, max} of each figure and all throttle reasons seen within `window` (seconds since the
        epoch, what the worker measured); None when nothing was read."""
        since, until = window or (0, float("inf"))
        samples = [s for s in self.samples if since - self.INTERVAL_S <= s["at"] <= until + self.INTERVAL_S]
        if not samples:
            return None
        found: dict = {"samples": len(samples)}
        for name in FIGURES:
            values = sorted(sample[name] for sample in samples)
            found[name] = {"min": values[0], "median": values[len(values) // 2], "max": values[-1]}
        found["throttle_reasons"] = sorted({reason for sample in samples for reason in sample["throttle_reasons"]})
        found["foreign_processes"] = sorted({pid for sample in samples for pid in sample["foreign"]})
        return found


def merged(states: list[dict | None]) -> dict | None:
    """One state of several measurements: the extremes, the median of the medians, every reason and process."""
    states = [state for state in states if state]
    if not states:
        return None
    found: dict = {"samples": sum(state["samples"] for state in states)}
    for name in FIGURES:
        medians = sorted(state[name]["median"] for state in states)
        lowest, highest = min(state[name]["min"] for state in states), max(state[name]["max"] for state in states)
        found[name] = {"min": lowest, "median": medians[len(medians) // 2], "max": highest}
    for name in ("throttle_reasons", "foreign_processes"):
        found[name] = sorted({item for state in states for item in state[name]})
    return found


def foreign(processes: list[int]) -> list[int]:
    """Which of the processes on the GPU are not this one or descend from it. In a container NVML may give numbers of the
    host's: one that is not in /proc is taken for our own."""
    unknown = [pid for pid in processes if parent_of(pid) is None]
    return [pid for pid in processes if not descends(pid)] if not unknown else unknown[1:]


def descends(pid: int) -> bool:
    """Is this process the one of that number, or its ancestor?"""
    while pid and pid != os.getpid():
        pid = parent_of(pid) or 0
    return pid == os.getpid()


def parent_of(pid: int) -> int | None:
    """The parent's number; None when there is no such process here."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None


def describe(state: dict) -> str:
    """A watched state in a line."""
    return (
        f"SM clock {state['sm_clock_mhz']['median']} MHz ({state['sm_clock_mhz']['min']} to {state['sm_clock_mhz']['max']}), "
        f"power {state['power_w']['median']:.0f} W, {state['temperature_c']['median']} C, "
        f"throttled by: {', '.join(state['throttle_reasons']) or 'nothing'}"
    )


@contextlib.contextmanager
def locked(uuid: str, timeout_s: float = 600):
    """Hold the one lock of a GPU, so that nothing else of this bundle measures on it.

    The kernel frees it when the holder dies. EnvironmentLacks names the holder after `timeout_s`.
    """
    path = LOCKS / f"kernelopt-{uuid}.lock"
    with open(_lock_file(path), "r+") as file:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    holder = file.read().strip() or "unknown"
                    raise EnvironmentLacks(f"GPU busy: {path} is held by {holder}; wait for it to end") from None
                time.sleep(0.2)
        file.truncate(0)
        file.write(f"process {os.getpid()} of {user()} ({' '.join(sys.argv)[:200]})\n")
        file.flush()
        yield


def _lock_file(path: Path) -> int:
    """The open lock, made if it is not there. Another user's is opened without O_CREAT: with that, Linux refuses it in a folder for
    everybody (fs.protected_regular), whatever its mode."""
    try:
        return os.open(path, os.O_RDWR)
    except FileNotFoundError:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        with contextlib.suppress(PermissionError):
            path.chmod(0o666)  # for the other users of this GPU
        return handle


def user() -> str:
    """The name of who runs this, or the number where there is no name, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"
