"""What code is compiled for: a card of the wiki, or an architecture alone. Pure functions of the wiki's pages."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import Refused
from . import occupancy
from .card import CompileTarget
from .wiki import Page

LEAST_CAPABILITY = 7  # of Triton; CUDA 13 and its ptxas begin with 7.5, and say so
WITH_OWN_INSTRUCTIONS = 9  # from this capability on, Triton compiles for sm_90a, not sm_90
NVIDIA_ARCH = re.compile(r"sm_?(\d{1,2})(\d)[af]?", re.IGNORECASE)
AMD_ARCH = re.compile(r"gfx(\d{1,2})([0-9a-f])([0-9a-f])", re.IGNORECASE)
UNITS = {"NVIDIA": "sm_count", "AMD": "cu_count"}
BLOCK_MEMORY = {"NVIDIA": "shared_memory_per_block", "AMD": "lds_per_workgroup"}  # KB


@dataclass(frozen=True)
class Target:
    """A GPU that code is compiled for, which need not be here.

    name: as a reader knows it. arch: as compilers name it, "sm_90a" or "gfx942". page: of the card, None where an
    architecture is named. limits: of the architecture, None where the wiki has none. like: a card of that architecture,
    which answers how many SMs there are where no card is named.
    """

    name: str
    arch: str
    page: Page | None
    limits: Page | None
    like: Page | None = None

    @property
    def is_nvidia(self) -> bool:
        return self.arch.startswith("sm_")

    @property
    def vendor(self) -> str:
        return "NVIDIA" if self.is_nvidia else "AMD"

    @property
    def label(self) -> str:
        """What every result of a compilation is called."""
        return f"compiled for {self.arch} here, not run"

    @property
    def title(self) -> str:
        return self.arch if self.name == self.arch else f"{self.name} ({self.arch})"

    @property
    def capability(self) -> tuple[int, int]:
        """(major, minor), as torch tells it: (9, 0) of sm_90a and of gfx90a, (12, 0) of gfx1201."""
        if match := NVIDIA_ARCH.fullmatch(self.arch):
            return int(match[1]), int(match[2])
        match = AMD_ARCH.fullmatch(self.arch)
        return int(match[1]), int(match[2], 16)

    @property
    def shared_bytes(self) -> int | None:
        """The most shared memory that a block can have."""
        row = self.limits and self.limits.known(BLOCK_MEMORY[self.vendor])
        return int(1024 * row.value) if row else None

    def static_shared(self, reported_bytes: int) -> int:
        """The shared memory of a block that code takes itself. From compute capability 9.0 on, cuobjdump adds what the
        driver reserves to it, where there is any."""
        row = self.limits and self.limits.known("shared_memory_reserved_per_block")
        reserved = 1024 * row.value if row and self.is_nvidia and self.capability >= (9, 0) else 0
        return reported_bytes - reserved if reported_bytes >= reserved else reported_bytes

    def for_worker(self) -> CompileTarget:
        """What the worker's compilers are told of it."""
        card = self.page or self.like
        units = card and card.known(UNITS[self.vendor])
        columns = self.limits and self.limits.known("tensor_memory_columns")
        return CompileTarget(
            self.name,
            self.arch,
            self.capability,
            units and int(units.value),
            (self.name if self.page else card.platform) if units else None,
            self.shared_bytes,
            columns and int(columns.value),
        )

    def to_json(self) -> dict:
        return {"card": self.page and self.page.platform, "target": self.arch, "label": self.label}


def of_page(page: Page) -> Target:
    """The target of a card. Refused where its page names no architecture that Triton's compilers know."""
    arch = page.limits_key()
    if arch is None or architecture(arch) is None:
        raise Refused(
            f"nothing can be compiled for {page.platform} here: its page names neither a compute capability of "
            f"{LEAST_CAPABILITY}.0 or newer nor a gfx target; gpu_specs.py list prints the names"
        )
    return Target(page.platform, architecture(arch), page, page.limits)


def of_architecture(name: str, products: Sequence[Page], limits: dict[str, Page]) -> Target | None:
    """The target that sm_90, sm_90a, 9.0 or gfx942 names; None for another name. Refused for one that is too
    old."""
    plain = re.sub(r"(\d{1,2})\.(\d)[af]?", r"sm_\1\2", name.strip())
    if (arch := architecture(plain)) is None:
        if NVIDIA_ARCH.fullmatch(plain):
            raise Refused(f"Triton compiles for compute capability {LEAST_CAPABILITY}.0 and newer, not for {plain}")
        return None
    key = occupancy.plain_target(arch)
    of_it = [page for page in products if page.limits_key() == key]
    like = next((page for page in of_it if page.known(UNITS[page.vendor])), None)
    return Target(arch, arch, None, limits.get(key), like)


def architecture(name: str) -> str | None:
    """As compilers name it: sm_90a for sm_90, gfx942; None for anything else, and for what Triton no longer knows."""
    if match := NVIDIA_ARCH.fullmatch(name):
        major, minor = int(match[1]), int(match[2])
        suffix = "a" if major >= WITH_OWN_INSTRUCTIONS else ""
        return f"sm_{major}{minor}{suffix}" if major >= LEAST_CAPABILITY else None
    return name.lower() if AMD_ARCH.fullmatch(name) else None
