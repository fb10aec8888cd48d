"""The GPU's SM clock: locked for measurements, and given back to the driver.

NVML does not report whether a clock is locked, or by which user. So a lock leaves a note, one file per GPU, in a folder
that only its owner can open. Only a lock with a note is released. A release also ends an earlier lock of another user.
"""

import contextlib
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from .. import bundle
from ..errors import EnvironmentLacks, Refused, UsageError
from ..session.record_store import now
from . import gpu, gpu_lock

SHARE = 0.8  # of the highest clock; our choice: it leaves room below the power limit
READS, INTERVAL_S = 20, 0.1  # how long a GPU may take to come down to its new clock
SLACK_MHZ = 10  # a reading may be a few MHz off (NVML's manual); clocks are 15 MHz apart
UNLOCK = "bash scripts/reset-gpu-clock.sh"


@dataclass(frozen=True)
class Note:
    """The note of a lock. clock_mhz: the locked clock. locked_at: UTC."""

    uuid: str
    device: str
    clock_mhz: int
    sm_clock_before_mhz: int
    locked_at: str

    @classmethod
    def read(cls, path: Path) -> "Note":
        return cls(**bundle.read_json(path))

    def to_json(self) -> dict:
        return asdict(self)


def lock(asked_mhz: int | None = None) -> tuple[Note, int]:
    """Lock the SM clock of the first visible GPU (see gpu.identify), at `asked_mhz` or at `sustainable`.

    Returns the note, and the current reading of the clock in MHz, which may be lower on an idle GPU. Refused: we hold a
    lock already, or the GPU does not keep the new one, which is then undone. UsageError: the GPU does not have this
    clock. EnvironmentLacks: no permission, not supported, or the GPU is measuring.
    """
    device = gpu.identify()
    with gpu_lock.locked(device.uuid, timeout_s=0), _control(device.name) as (nvml, handle):
        path = note_of(device.uuid)
        if path.exists():
            held = Note.read(path)
            raise Refused(f"locked at {held.clock_mhz} MHz since {held.locked_at}; first run: {UNLOCK}")
        clock = choose(supported(nvml, handle), default_clock(nvml, handle), asked_mhz)
        note = Note(device.uuid, device.name, clock, sm_clock(nvml, handle), now())
        # Before the lock: a process that is killed in between leaves a note, not a forgotten lock.
        bundle.write_json(path, note.to_json())
        try:
            nvml.nvmlDeviceSetGpuLockedClocks(handle, clock, clock)
            return note, settled(lambda: sm_clock(nvml, handle), clock)
        except BaseException:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlDeviceResetGpuLockedClocks(handle)
            path.unlink()
            raise


def release() -> Note | None:
    """Undo `lock` on the first visible GPU; the note, or None when we hold no lock. It does not wait for a running
    measurement, because a GPU that stays locked is worse."""
    device = gpu.identify()
    path = note_of(device.uuid)
    if not path.exists():
        return None
    note = Note.read(path)
    with _control(device.name) as (nvml, handle):
        nvml.nvmlDeviceResetGpuLockedClocks(handle)
    path.unlink()
    return note


@contextlib.contextmanager
def _control(name: str):
    """(pynvml, handle) for changing a setting; an error of NVML becomes one sentence with its remedy."""
    with gpu.open_nvml() as (nvml, handle):
        remedies = {
            nvml.NVML_ERROR_NO_PERMISSION: f"no permission to change the clock of {name}: run it as root (sudo); in a "
            "container, the host must allow it",
            nvml.NVML_ERROR_NOT_SUPPORTED: f"{name} or its driver cannot lock the clock (a virtual GPU, a MIG slice, "
            "a GPU before Volta): measure without a lock, because the paired comparison needs no fixed clock",
        }
        try:
            yield nvml, handle
        except nvml.NVMLError as error:
            raise EnvironmentLacks(remedies.get(error.value, f"the driver of {name} failed: {error}")) from None


def choose(clocks: list[int], default_mhz: int | None, asked_mhz: int | None) -> int:
    """The clock to lock, in MHz; UsageError names the nearest clocks when the GPU does not have this one."""
    if asked_mhz is None:
        return sustainable(clocks, default_mhz)
    if asked_mhz not in clocks:
        nearest = sorted(sorted(clocks, key=lambda clock: abs(clock - asked_mhz))[:2])
        raise UsageError(
            f"this GPU has no clock of {asked_mhz} MHz; the nearest are {' and '.join(map(str, nearest))}, "
            f"all lie between {min(clocks)} and {max(clocks)}"
        )
    return asked_mhz


def sustainable(clocks: list[int], default_mhz: int | None) -> int:
    """The highest clock that is at most SHARE of the highest one and at most the vendor's default for applications.

    On several server GPUs that default is the highest clock, which they do not hold under load. Other GPUs report none.
    """
    limit = min(SHARE * max(clocks), default_mhz or max(clocks))
    return max((clock for clock in clocks if clock <= limit), default=min(clocks))


def settled(read, clock_mhz: int) -> int:
    """The first reading of `read()` (MHz) that is not above the locked clock. Refused when all readings are above."""
    for _ in range(READS):
        reading = read()
        if reading <= clock_mhz + SLACK_MHZ:
            return reading
        time.sleep(INTERVAL_S)
    raise Refused(f"the GPU does not keep to {clock_mhz} MHz: it reads {reading}; the lock was undone")


def supported(nvml, handle) -> list[int]:
    """The SM clocks that go with the highest memory clock, in MHz."""
    memory_clock = max(nvml.nvmlDeviceGetSupportedMemoryClocks(handle))
    return nvml.nvmlDeviceGetSupportedGraphicsClocks(handle, memory_clock)


def default_clock(nvml, handle) -> int | None:
    """The vendor's default SM clock for applications, in MHz; None when NVML does not report it."""
    with contextlib.suppress(nvml.NVMLError):
        return nvml.nvmlDeviceGetDefaultApplicationsClock(handle, nvml.NVML_CLOCK_GRAPHICS)
    return None


def sm_clock(nvml, handle) -> int:
    return nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)


def note_of(uuid: str) -> Path:
    """The file that records our lock of this GPU.

    It is in the folder for temporary files, because a reboot empties that folder and unlocks the clock. Logging out
    empties the user's runtime folder, but does not unlock the clock.
    """
    folder = Path(tempfile.gettempdir()) / f"gpu-clocks-{os.geteuid()}"
    return bundle.private_folder(folder) / f"{uuid}.json"
