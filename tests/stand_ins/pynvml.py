"""A stand-in for the driver below NVIDIA's pynvml: $STAND_IN_CARDS is a JSON list of cards. Constants and errors are the real ones.

A card is {name, uuid, and any of: capability, mib, max_sm, max_memory, bus, tdp, limit, mode, sm_clock, memory_clock, power,
temperature, reasons, processes, slot, mig: [slices like cards]}. What a card lacks, NVML answers with "not supported".
"""

import importlib.machinery
import importlib.util
import json
import os
import sys
import types
from pathlib import Path

_here = str(Path(__file__).resolve().parent)
_spec = importlib.machinery.PathFinder.find_spec("pynvml", [path for path in sys.path if path != _here])
_real = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_real)
globals().update({name: value for name, value in vars(_real).items() if not name.startswith("__")})
for _name in os.environ.get("STAND_IN_LACKS", "").split():  # functions of newer bindings
    globals().pop(_name, None)


def _cards() -> list[dict]:
    return json.loads(os.environ["STAND_IN_CARDS"])


def _ask(card: dict, name: str):
    if name not in card:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return card[name]


def nvmlInit():
    if not _cards():
        raise NVMLError(NVML_ERROR_LIBRARY_NOT_FOUND)


def nvmlShutdown():
    pass


def nvmlSystemGetDriverVersion():
    return os.environ.get("STAND_IN_DRIVER", "580.95.05")


def nvmlDeviceGetCount():
    return len(_cards())


def nvmlDeviceGetHandleByIndex(index):
    card = _cards()[index]
    if card.get("lost"):
        raise NVMLError(NVML_ERROR_GPU_IS_LOST)
    return card


def nvmlDeviceGetMigMode(card):
    on = int("mig" in card)
    return [on, on]


def nvmlDeviceGetMaxMigDeviceCount(card):
    return 7


def nvmlDeviceGetMigDeviceHandleByIndex(card, index):
    if index >= len(card["mig"]):
        raise NVMLError(NVML_ERROR_NOT_FOUND)
    return card["mig"][index]


def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part):
    return next(card for card in _cards() if part in card.get("mig", []))


def nvmlDeviceGetAttributes(part):
    return types.SimpleNamespace(multiprocessorCount=_ask(part, "sms"))


def nvmlDeviceGetMemoryInfo(card):
    total = _ask(card, "mib") * 2**20
    return types.SimpleNamespace(total=total, free=total, used=0)


def nvmlDeviceGetComputeMode(card):
    return _ask(card, "mode")


def nvmlDeviceGetMaxClockInfo(card, which):
    return _ask(card, "max_sm" if which == NVML_CLOCK_SM else "max_memory")


def nvmlDeviceGetClockInfo(card, which):
    return _ask(card, "sm_clock" if which == NVML_CLOCK_SM else "memory_clock")


def nvmlDeviceGetTemperature(card, _):
    return _ask(card, "temperature")


def nvmlDeviceGetPciInfo(card):
    return types.SimpleNamespace(busId=_ask(card, "slot"))


def _watts(name):
    return lambda card: _ask(card, name) * 1000


def _plain(name):
    return lambda card: _ask(card, name)


nvmlDeviceGetName, nvmlDeviceGetUUID = _plain("name"), _plain("uuid")
nvmlDeviceGetCudaComputeCapability, nvmlDeviceGetMemoryBusWidth = _plain("capability"), _plain("bus")
nvmlDeviceGetPowerUsage, nvmlDeviceGetEnforcedPowerLimit = _watts("power"), _watts("limit")
nvmlDeviceGetPowerManagementDefaultLimit = _watts("tdp")


def nvmlDeviceGetComputeRunningProcesses(card):
    return [types.SimpleNamespace(pid=pid) for pid in _ask(card, "processes")]


if "nvmlDeviceGetCurrentClocksEventReasons" in globals():
    nvmlDeviceGetCurrentClocksEventReasons = _plain("reasons")
nvmlDeviceGetCurrentClocksThrottleReasons = _plain("reasons")
