"""What the tests on a GPU may expect of the one at hand: by its compute capability, its memories and its page of the
wiki, never by its name."""

from dataclasses import dataclass

from conftest import BUNDLE
from kernelopt.device import gpu
from kernelopt.errors import Refused
from kernelopt.hardware import wiki

WIKI = BUNDLE / "gpu-wiki"
DTYPES = ("tf32", "fp16", "bf16", "fp8", "int8")  # of bench_matmul.py; fp32 runs everywhere
LEAST_L2_BUFFER_MB = 2  # what is smaller takes less time than a launch


@dataclass(frozen=True)
class Card:
    """page and limits: of the wiki, None where it has none of this product and capability. Sizes: None where not
    told."""

    name: str
    capability: tuple[int, int]
    memory_gib: float | None
    l2_mib: float | None
    page: wiki.Page | None
    limits: wiki.Page | None

    @property
    def is_hopper(self) -> bool:
        return self.capability[0] == 9

    def holds(self, gib: float) -> bool:
        return self.memory_gib is not None and self.memory_gib >= gib

    def matmul_dtypes(self) -> set[str]:
        """What its tensor cores take, and fp32."""
        types = self.limits.known("tensor_core_types") if self.limits else None
        known = set(types.text.lower().split("/")) if types else set()
        return {"fp32", *(dtype for dtype in DTYPES if dtype in known)}

    def half_dtype(self) -> str:
        return "bf16" if self.capability >= (8, 0) else "fp16"

    def l2_buffer_mb(self) -> int | None:
        """The largest power of two of which two buffers take at most half of the L2; None where that is too small to
        tell a warm cache from a cold one."""
        size = LEAST_L2_BUFFER_MB
        if self.l2_mib is None or 4 * size > self.l2_mib:
            return None
        while 8 * size <= self.l2_mib:
            size *= 2
        return size

    def documented(self, metric: str) -> float | None:
        row = self.page.known(metric) if self.page else None
        return row.value if row else None


def of(name: str, values: dict) -> Card:
    """The card of that name. values: the result of gpu.query()."""
    try:
        page = wiki.product(name, WIKI)
    except Refused:
        page = None
    capability = values["compute_capability"]
    limits = wiki.limit_pages(WIKI).get(f"sm_{capability.replace('.', '')}")
    major, minor = map(int, capability.split("."))
    return Card(name, (major, minor), values.get("memory_capacity"), values.get("l2_capacity"), page, limits)


def here() -> Card:
    return of(gpu.identify().name, gpu.query())
