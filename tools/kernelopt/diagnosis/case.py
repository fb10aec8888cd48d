"""What the metrics of a profiled call say, for several rules: shares of time, bytes that moved, waves of blocks. Pure.

A metric that was not collected is None and proves nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from .. import bundle
from ..profilers.profile import KernelProfile, Metrics
from .diagnosis import Classification, Floor, Limits

PIPES = {  # metric -> the limiter that it stands for, when the SM itself is the busiest unit
    "fma_cycles": "fma pipe",
    "alu_cycles": "alu pipe",
    "fp64_cycles": "fp64 pipe",
    "xu_instructions": "xu pipe",
    "lsu_instructions": "lsu pipe",
    "tensor_cycles": "tensor pipe",
}
ISSUE = "instruction issue"
SECTOR = 32  # bytes
CP_ASYNC_SINCE = 8  # compute capability, major
LOCAL_SECTORS = ("local_load_sectors", "local_store_sectors")
# Where a newer tensor instruction than mma.sync exists: compute capability, major -> (the finding that it is not used,
# its metric, its name, its name in SASS). 12 has none: mma.sync feeds its tensor cores.
BLACKWELL = ("mma_sync_on_blackwell", "tcgen05_instructions", "tcgen05", "UTCHMMA")
NEWER_THAN_MMA_SYNC = {
    9: ("mma_sync_on_hopper", "gmma_instructions", "wgmma", "HGMMA"),
    10: BLACKWELL,
    11: BLACKWELL,
}


@cache
def texts() -> dict:
    """reference/findings.json, which explains itself."""
    return bundle.read_json(bundle.REFERENCE / "findings.json")


@dataclass(frozen=True)
class Case:
    """The input of a rule. kernels: of the call. main: the longest. share_pct: its share of the call's GPU time.
    classification: its class and limiter. work: {flops, bytes_in, bytes_min, dtype}; None unknown."""

    kernels: tuple[KernelProfile, ...]
    main: KernelProfile
    share_pct: float | None
    work: dict | None
    classification: Classification
    floor: Floor | None
    limits: Limits

    @property
    def m(self) -> Metrics:
        """The metrics of the main kernel."""
        return self.main.metrics

    @property
    def most_gain_pct(self) -> float | None:
        """See Floor; None without a floor."""
        return self.floor and self.floor.most_gain_pct

    @property
    def tile_instruction(self) -> str | None:
        """ "wgmma" or "tcgen05" where the kernel uses it: a few warps issue large tiles, which the tensor pipe works
        off beside them."""
        return next((name for _, metric, name, _ in NEWER_THAN_MMA_SYNC.values() if self.m.get(metric)), None)

    @property
    def is_limited_by_memory_or_latency(self) -> bool:
        return self.classification.bottleneck in ("memory", "latency")


def gain_of(case: Case, gain_pct: float | None) -> float | None:
    """A gain within the main kernel as a share of the whole call."""
    return None if case.share_pct is None or gain_pct is None else gain_pct * case.share_pct / 100


def room(m: Metrics) -> float:
    """Percent of the kernel's time that less waiting can save at most. The busiest unit and issued instructions take
    the rest in any case; NVIDIA's rules bound their estimates of stalls by the first of the two."""
    busy = [m.get("sm_throughput"), m.get("memory_throughput"), 100 * (m.get("issue_active") or 0)]
    return max(0.0, 100 - max(value for value in busy if value is not None))


def beside_dram(m: Metrics) -> float | None:
    """Percent of the kernel's time that fewer instructions can save at most: the part that DRAM does not need."""
    return None if m.get("dram_throughput") is None else 100 - m["dram_throughput"]


def stall_shares(m: Metrics) -> dict[str, float]:
    """{stall: percent of the warp latency}; {} when that was not collected."""
    total = m.get("warp_latency")
    return {stall: 100 * m[stall] / total for stall in texts()["stalls"] if m.get(stall) is not None} if total else {}


def idle_share(m: Metrics, limits: Limits) -> float | None:
    """The share of the SMs' time that less than a wave of blocks leaves idle; None when the grid fills the GPU.

    Less than a wave may still put a block on each SM. Then the SMs work equally long, and only occupancy is low.
    """
    waves, average, most = (m.get(key) for key in ("waves_per_sm", "cycles_active", "cycles_active_most"))
    if waves is None or waves >= 1:
        return None
    if not average or not most:
        return 1 - waves
    return 1 - average / most if most / average > limits["small_grid_ratio"] else None


def traffic_ratio(case: Case) -> tuple[float, float] | None:
    """(bytes that all kernels of the call move through DRAM, their ratio to the least bytes); None unknown."""
    moved = [k.metrics.get(key) for k in case.kernels for key in ("dram_bytes_read", "dram_bytes_written")]
    return (sum(moved), sum(moved) / case.work["bytes_min"]) if case.work and None not in moved else None


def dram_has_the_least(case: Case) -> bool:
    """DRAM limits and moves only the least bytes. Then the accesses in L1 and L2 cost nothing."""
    traffic = traffic_ratio(case)
    limited = case.classification.limiter == "dram"
    return limited and traffic is not None and traffic[1] < case.limits["excess_traffic_ratio"]


def sees_all(m: Metrics) -> bool:
    """Do the metrics of loads and stores include all traffic of the kernel? They are blind to bulk copies, which came
    with compute capability 9."""
    return m.get("tma_cycles") == 0 or (m.get("compute_capability") or 9) < 9


def all_sectors(m: Metrics) -> float | None:
    """Sectors of 32 bytes that the kernel moves; None unknown. Where bulk copies carry some of them, it is at least the
    traffic of DRAM: a share of that is an upper bound of the true share."""
    counted = sum(m.get(key) or 0 for key in ("load_sectors", "store_sectors", *LOCAL_SECTORS))
    if m.get("load_sectors") is None or m.get("store_sectors") is None:
        return None
    if sees_all(m):
        return counted
    dram = [m.get(key) for key in ("dram_bytes_read", "dram_bytes_written")]
    return None if None in dram else max(counted, sum(dram) / SECTOR)


@dataclass(frozen=True)
class Accesses:
    """Sectors that accesses of one kind ask the L1 for, and the bytes that they use of each, on average."""

    sectors: float
    bytes_per_sector: float

    @property
    def bytes_used(self) -> float:
        return self.sectors * self.bytes_per_sector


def accesses(m: Metrics) -> dict[str, Accesses]:
    """Those of loads, of cp.async ("async_copy") and of stores, by the beginning of their keys; without a kind whose
    metrics are 0 or unknown.

    `load_sectors` includes cp.async, in all its widths (w4a16 v0 loads by nothing else); `load_bytes_per_sector` does
    not. Two passes of the profiler may count more copies than loads. Where the sectors of cp.async are unknown, all are
    taken for those of loads: see `holds_for_all_loads`.
    """
    copied, loaded = m.get("async_copy_sectors") or 0.0, m.get("load_sectors") or 0.0
    sectors = {"load": max(0.0, loaded - copied), "async_copy": copied, "store": m.get("store_sectors")}
    known = {kind: (count, m.get(f"{kind}_bytes_per_sector")) for kind, count in sectors.items()}
    return {kind: Accesses(*pair) for kind, pair in known.items() if all(pair)}


def byte_share(m: Metrics, kinds: Iterable[str]) -> float:
    """Percent of the kernel's bytes that accesses of these kinds use. Bytes of bulk copies are at least the traffic of
    DRAM."""
    known = accesses(m)
    used = sum(each.bytes_used for each in known.values())
    if not sees_all(m):
        used = max(used, sum(m.get(key) or 0 for key in ("dram_bytes_read", "dram_bytes_written")))
    return 100 * sum(known[kind].bytes_used for kind in kinds) / used


def holds_for_all_loads(case: Case) -> bool:
    """Does `load_bytes_per_sector` hold for all sectors that `accesses` has for loads? Where those of cp.async were not
    counted, some of them may be copies. It shows where all loads of the call would use less than its inputs, no bulk
    copy brings the rest, and DRAM reads as much as the inputs."""
    if case.m.get("async_copy_sectors") is not None or (case.m.get("compute_capability") or 9) < CP_ASYNC_SINCE:
        return True
    inputs, most = (case.work or {}).get("bytes_in"), case.limits["most_inputs_ratio"]
    each = [k.metrics for k in case.kernels]
    read = [m.get("dram_bytes_read") for m in each]
    if inputs is None or None in read or not all(map(sees_all, each)):
        return True
    used = sum((m.get("load_sectors") or 0) * (m.get("load_bytes_per_sector") or 0) for m in each)
    return used >= most * inputs or sum(read) < most * inputs


def runs_special_functions(case: Case) -> bool:
    """Does the kernel compute exponentials, as a softmax does? A product without them gets no advice on them."""
    return (case.m.get("xu_instructions") or 0) >= case.limits["relevant_xu_pct"]
