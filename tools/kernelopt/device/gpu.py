"""The GPU of this machine as NVML reports it: which it is, and what it can do.

No CUDA context is made here, so the parent process of a measurement stays out of the GPU.
"""

import contextlib
import ctypes
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .. import bundle
from ..errors import EnvironmentLacks
from ..hardware.card import Card, MaxClocks
from . import amd

ON_A_CPU = (
    "compile_kernel.py compiles a kernel for any card, and --device cpu-interpreter checks one in Triton "
    "(verify_kernel.py, explore_kernels.py)"
)
NO_GPU = f"no NVIDIA GPU here ({{}}); run this on a machine with one{{}}; without one, {ON_A_CPU}"
OR_ON_A_NODE = ", or on a GPU node by --on (docs/remote-gpu.md)"
HIDDEN = (
    "a sandbox hides the GPU of this machine ({}); docs/install.md says what to allow, docs/remote-gpu.md how a GPU "
    f"node outside is used; {ON_A_CPU}"
)
DRIVER, DEVICE = Path("/proc/driver/nvidia"), Path("/dev/nvidiactl")  # of a loaded driver; sandboxes hide the second
AMD_GPU = (
    "the GPU here is {}, of AMD: this bundle measures NVIDIA GPUs alone; compile_kernel.py --for {} compiles a kernel "
    "for it, and --device cpu-interpreter checks one in Triton"
)


@contextlib.contextmanager
def open_nvml():
    """(pynvml, handle of the first visible device); EnvironmentLacks without a device."""
    bundle.require("pynvml")
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if DRIVER.exists() and not DEVICE.exists():
            raise EnvironmentLacks(HIDDEN.format(error)) from None
        raise _lacks(str(error)) from None
    try:
        yield pynvml, _visible_handles(pynvml)[0]
    except pynvml.NVMLError as error:
        raise _lacks(str(error)) from None
    finally:
        pynvml.nvmlShutdown()


def _lacks(why: str) -> EnvironmentLacks:
    """That there is no NVIDIA GPU, and which GPU of AMD there is."""
    with contextlib.suppress(EnvironmentLacks):
        if card := amd.identify():
            return EnvironmentLacks(AMD_GPU.format(card.name, card.gfx_target or "its gfx target"))
    return EnvironmentLacks(NO_GPU.format(why, "" if bundle.MIRROR in os.environ else OR_ON_A_NODE))


def _visible_handles(nvml) -> list:
    """The devices that CUDA would show, in PCI order (see Sandbox): whole GPUs, or the slices of a GPU in MIG mode."""
    devices = [_as_cuda_sees(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    handles = [slices[0] for slices in devices if slices] if chosen is None else _chosen(nvml, devices, chosen)
    if not handles:
        raise _lacks(_why_none(chosen))
    return handles


def _why_none(chosen: str | None) -> str:
    if chosen is None:
        return "NVML lists none, or MIG mode is on and no slice is made"
    return f"the first entry of CUDA_VISIBLE_DEVICES, '{chosen}', names no device"


def _as_cuda_sees(nvml, index: int) -> list:
    """The GPU at an index, or its MIG slices when MIG mode is on; [] when it does not answer."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError:  # it fell off the bus, or is another user's
        return []
    with contextlib.suppress(nvml.NVMLError, AttributeError):  # a GPU or a binding without MIG
        if nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE:
            return _slices(nvml, handle)
    return [handle]


def _slices(nvml, handle) -> list:
    slices = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with contextlib.suppress(nvml.NVMLError):  # no slice in this place
            slices.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
    return slices


def _chosen(nvml, devices: list[list], text: str) -> list:
    """The devices that CUDA_VISIBLE_DEVICES names. Like CUDA, it uses the entries before the first that names no
    device.

    An entry is an index, or the beginning of one device's UUID.
    """
    by_uuid = {nvml.nvmlDeviceGetUUID(handle): handle for slices in devices for handle in slices}
    handles = []
    for entry in (part.strip() for part in text.split(",")):
        if entry.isascii() and entry.isdigit() and int(entry) < len(devices) and devices[int(entry)]:
            handles.append(devices[int(entry)][0])
            continue
        matching = [uuid for uuid in by_uuid if entry.startswith(("GPU-", "MIG-")) and uuid.startswith(entry)]
        if len(matching) != 1:
            break
        handles.append(by_uuid[matching[0]])
    return handles


def visible() -> list[str]:
    """UUIDs of the devices that this process may use, in CUDA's order (see Sandbox)."""
    with open_nvml() as (nvml, _):
        return [nvml.nvmlDeviceGetUUID(handle) for handle in _visible_handles(nvml)]


def identify() -> Card:
    """The device that children see as CUDA's device 0."""
    with open_nvml() as (nvml, handle):
        return Card(
            name=nvml.nvmlDeviceGetName(handle),
            uuid=nvml.nvmlDeviceGetUUID(handle),
            driver=nvml.nvmlSystemGetDriverVersion(),
            max_clocks=_max_clocks(nvml, whole_gpu(nvml, handle)),
        )


def device_here() -> str:
    """ "cuda" where there is a GPU."""
    with contextlib.suppress(EnvironmentLacks):
        identify()
        return "cuda"
    return "cpu-interpreter"


def _max_clocks(nvml, handle) -> MaxClocks:
    queries = {
        "sm_clock_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM),
    }
    return MaxClocks(**answers(nvml, queries))


def answers(nvml, queries: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """The results, by name, of the queries that this device, driver and binding support."""
    answers = {}
    for name, ask in queries.items():
        with contextlib.suppress(nvml.NVMLError, AttributeError):
            answers[name] = ask()
    return answers


def _is_slice(nvml, handle) -> bool:
    return nvml.nvmlDeviceGetUUID(handle).startswith("MIG-")


def whole_gpu(nvml, handle):
    """The GPU that a slice belongs to, or the GPU itself."""
    if not _is_slice(nvml, handle):
        return handle
    return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)


def query() -> dict[str, float | str]:
    """The values that the device reports: the wiki's metric -> value in the wiki's unit. Other metrics are left out.

    NVML reports most values. The SM count and the L2 come from the driver's attributes, which need no CUDA context.
    memory_capacity is in GiB: vendors print that value as GB. A MIG slice has its own SMs and memory. Its bus, power
    and L2 are left out, because they belong to the whole GPU.
    """
    with open_nvml() as (nvml, handle):
        whole, a_slice = whole_gpu(nvml, handle), _is_slice(nvml, handle)
        queries = {
            "compute_capability": lambda: "{}.{}".format(*nvml.nvmlDeviceGetCudaComputeCapability(whole)),
            "memory_capacity": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30,
            "boost_clock": lambda: nvml.nvmlDeviceGetMaxClockInfo(whole, nvml.NVML_CLOCK_SM),
            "memory_clock": lambda: nvml.nvmlDeviceGetMaxClockInfo(whole, nvml.NVML_CLOCK_MEM),
        }
        if a_slice:
            queries["sm_count"] = lambda: nvml.nvmlDeviceGetAttributes(handle).multiprocessorCount
            return answers(nvml, queries)
        queries["memory_bus_width"] = lambda: nvml.nvmlDeviceGetMemoryBusWidth(handle)
        queries["tdp"] = lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle) / 1000
        bus_id = answers(nvml, {"bus_id": lambda: nvml.nvmlDeviceGetPciInfo(handle).busId}).get("bus_id")
        return answers(nvml, queries) | driver_attributes(bus_id)


def driver_attributes(bus_id: str | bytes | None) -> dict[str, float]:
    """sm_count and l2_capacity (MiB) of the GPU in that PCI slot, by cuDeviceGetAttribute; {} without a usable driver
    library. The slot identifies the GPU, because CUDA counts the fastest GPU first and NVML counts by slot."""
    attributes = {"sm_count": (16, 1), "l2_capacity": (38, 2**20)}  # CU_DEVICE_ATTRIBUTE_…, unit
    if bus_id is None:
        return {}
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return {}
    device, value, reported = ctypes.c_int(), ctypes.c_int(), {}
    slot = bus_id if isinstance(bus_id, bytes) else bus_id.encode()
    if driver.cuInit(0) or driver.cuDeviceGetByPCIBusId(ctypes.byref(device), slot):
        return {}
    for metric, (number, unit) in attributes.items():
        if driver.cuDeviceGetAttribute(ctypes.byref(value), number, device) == 0:
            reported[metric] = value.value / unit if unit > 1 else value.value
    return reported


def power_limit_w() -> float | None:
    """The power limit in force, in W; None when the device does not report it."""
    with open_nvml() as (nvml, handle):
        limit = answers(nvml, {"w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(whole_gpu(nvml, handle)) / 1000})
        return limit.get("w")


def shared_bytes() -> int:
    """Memory that is free on the first visible device for processes beside each other; 0 where it lets only one use
    it, or does not report that."""
    with open_nvml() as (nvml, handle):
        modes = answers(nvml, {"mode": lambda: nvml.nvmlDeviceGetComputeMode(whole_gpu(nvml, handle))})
        shared = modes.get("mode", nvml.NVML_COMPUTEMODE_DEFAULT) == nvml.NVML_COMPUTEMODE_DEFAULT
    return (free_bytes() or 0) if shared else 0


def free_bytes() -> int | None:
    """Memory that is free on the first visible device; None when it does not report that."""
    with open_nvml() as (nvml, handle):
        try:
            return nvml.nvmlDeviceGetMemoryInfo(handle).free
        except nvml.NVMLError:
            return None
