"""A kernel as it was compiled for a card, which need not be here: registers, spills, shared memory, errors.

Pure functions and types; compiling.py compiles.
"""

from dataclasses import dataclass

from ..errors import Refused
from ..hardware import wiki
from ..hardware.card import CompileTarget
from ..statuses import Status
from .resources import Resources

LEAST_CAPABILITY = 7  # of Triton; CUDA 13 and its ptxas begin with 7.5, and say so


@dataclass(frozen=True)
class Card:
    """A card that code is compiled for. capability: (major, minor)."""

    page: wiki.Page
    capability: tuple[int, int]

    @classmethod
    def of(cls, page: wiki.Page) -> "Card":
        """Refused for a card whose compiler is not NVIDIA's, or that Triton does not know."""
        row = page.known("compute_capability")
        capability = tuple(int(part) for part in row.text.split(".")) if row else (0, 0)
        if capability[0] < LEAST_CAPABILITY:
            raise Refused(
                f"nothing can be compiled for {page.platform} here: it takes an NVIDIA card of compute capability "
                f"{LEAST_CAPABILITY}.0 or newer; gpu_specs.py list prints the names"
            )
        return cls(page, capability)

    @property
    def target(self) -> str:
        """sm_90a: with the instructions that the card alone has, as Triton compiles."""
        major, minor = self.capability
        return f"sm_{major}{minor}{'a' if major >= 9 else ''}"

    @property
    def label(self) -> str:
        return f"compiled for {self.target}, not run"

    def static_shared(self, reported_bytes: int) -> int:
        """The shared memory of a block that code takes itself. From compute capability 9.0 on, cuobjdump adds what the
        driver reserves to it, where there is any."""
        row = self.page.known("shared_memory_reserved_per_block")
        reserved = 1024 * row.value if row and self.capability >= (9, 0) else 0
        return reported_bytes - reserved if reported_bytes >= reserved else reported_bytes

    @property
    def shared_bytes(self) -> int | None:
        """The most shared memory that a block can have."""
        row = self.page.known("shared_memory_per_block")
        return row and 1024 * row.value

    def for_worker(self) -> CompileTarget:
        """What the worker's compilers are told of it."""
        sms = self.page.known("sm_count")
        return CompileTarget(self.page.platform, self.capability, self.target, sms and sms.value, self.shared_bytes)

    def to_json(self) -> dict:
        return {"card": self.page.platform, "target": self.target, "label": self.label}


@dataclass(frozen=True)
class CompiledKernel:
    """The resources of one kernel. registers, spill_bytes: of a thread, the latter spilled registers and arrays on the
    stack. shared_bytes: of a block; of CUDA C++ without what a launch adds. None: unknown."""

    name: str
    registers: int | None
    spill_bytes: int | None
    shared_bytes: int | None
    occupancy_pct: float | None

    def to_json(self) -> dict:
        return dict(vars(self))


@dataclass(frozen=True)
class Compiled:
    """A kernel's file as it was compiled for a card. error: the compiler's, or why something was not compiled.
    cuda: it has CUDA C++, which runs on a GPU alone. lacking: what this machine lacks to compile it whole, or None."""

    card: Card
    status: Status
    error: str | None
    kernels: tuple[CompiledKernel, ...] = ()
    cuda: bool = False
    lacking: str | None = None

    @property
    def refused(self) -> bool:
        """Does the compiler, or a limit of the card, refuse it?"""
        return self.status in (Status.COMPILE_ERROR, Status.LAUNCH_ERROR)

    def resources(self) -> Resources:
        """What a row of an exploration shows: of the kernel with the most registers; the spills are the most of
        any."""
        if not self.kernels:
            return Resources()
        main = max(self.kernels, key=lambda kernel: kernel.registers or 0)
        spills = [kernel.spill_bytes for kernel in self.kernels if kernel.spill_bytes is not None]
        return Resources(main.name, main.registers, max(spills, default=None), main.shared_bytes, main.occupancy_pct)

    def to_json(self) -> dict:
        kernels = [kernel.to_json() for kernel in self.kernels]
        return {**self.card.to_json(), "status": self.status, "error": self.error, "kernels": kernels}


def status_after(status: Status, error: str | None, compiled: Compiled) -> tuple[Status, str | None]:
    """The status and the error of a candidate that was checked in the CPU interpreter and then compiled."""
    if compiled.refused:
        checked = "" if status == Status.OK else f"\nchecked in the CPU interpreter: {status}: {error}"
        return compiled.status, f"{compiled.error}{checked}"
    if compiled.cuda:
        done = compiled.lacking or compiled.card.label
        return Status.NO_GPU, f"CUDA C++ runs on a GPU alone: it was not checked; {done}"
    return status, error
