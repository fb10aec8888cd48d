"""Theoretical occupancy from a launch's resources and the limits of its compute capability. All functions are pure.

The rules follow NVIDIA's cuda_occupancy.h. Registers are allocated per warp within a sub-partition of the SM, and
shared memory per block. The wiki has a row for each allocation unit.
"""

import re
from dataclasses import dataclass

from ..errors import Refused, UsageError
from .wiki import Page, missing

NEEDED = (
    "warp_size",
    "warps_per_sm",
    "blocks_per_sm",
    "threads_per_block",
    "registers_per_sm",
    "registers_per_thread",
    "register_allocation_unit",
    "subpartitions_per_sm",
    "shared_memory_per_sm",
    "shared_memory_per_block",
    "shared_memory_reserved_per_block",
    "shared_memory_allocation_unit",
)


@dataclass(frozen=True)
class Occupancy:
    """The occupancy of one launch on an SM. blocks_by_limit: the number of blocks that each limit allows. limiters:
    the limits that allow the fewest."""

    occupancy_pct: float
    warps_per_sm: int
    blocks_per_sm: int
    limiters: tuple[str, ...]
    blocks_by_limit: dict[str, int]


def plain_target(name: str) -> str:
    """Return sm_90 for sm_90a and sm_100 for sm_100f. The suffix adds instructions and changes no limit."""
    return re.sub(r"^(sm_?\d+|\d+\.\d)[af]$", r"\1", name, flags=re.IGNORECASE)


def occupancy(
    limits: Page, threads: int, registers: int, shared_bytes: int, scalar_registers: int | None = None
) -> Occupancy:
    """Return the occupancy of a launch. threads: per block. registers: per thread. shared_bytes: static and dynamic
    shared memory per block, without the driver's reserve.

    Raise Refused for AMD, because no source of the wiki has its allocation units, and if the wiki lacks a limit. Raise
    UsageError if a block cannot be launched.
    """
    if limits.vendor == "AMD":
        raise Refused(
            f"no occupancy for {limits.platform}: in which units AMD's compute units give out registers and LDS "
            "is in no source of the wiki; the profiler measures the achieved occupancy"
        )
    if gaps := [name for name in NEEDED if limits.known(name) is None]:
        raise Refused(f"no occupancy for {limits.platform}: " + "; ".join(missing(name) for name in gaps))
    limit = {name: int(limits.known(name).value) for name in NEEDED}
    for resource, wanted, most in (
        ("threads per block", threads, limit["threads_per_block"]),
        ("registers per thread", registers, limit["registers_per_thread"]),
        ("bytes of shared memory per block", shared_bytes, limit["shared_memory_per_block"] * 1024),
    ):
        if wanted > most:
            raise UsageError(f"{wanted} {resource} cannot be launched on {limits.platform}: at most {most}")
    warps = ceil_div(threads, limit["warp_size"])
    blocks = {
        "blocks": limit["blocks_per_sm"],
        "warps": limit["warps_per_sm"] // warps,
        "registers": blocks_by_registers(limit, warps, registers),
        "shared_memory": blocks_by_shared_memory(limit, shared_bytes),
    }
    fitting = min(blocks.values())
    return Occupancy(
        occupancy_pct=100 * fitting * warps / limit["warps_per_sm"],
        warps_per_sm=fitting * warps,
        blocks_per_sm=fitting,
        limiters=tuple(name for name, most in blocks.items() if most == fitting),
        blocks_by_limit=blocks,
    )


def blocks_by_registers(limit: dict[str, int], warps: int, registers: int) -> int:
    """Return the number of blocks whose registers fit. Each sub-partition holds whole warps."""
    of_a_warp = round_up(max(registers, 1) * limit["warp_size"], limit["register_allocation_unit"])
    partitions = limit["subpartitions_per_sm"]
    return partitions * (limit["registers_per_sm"] // partitions // of_a_warp) // warps


def blocks_by_shared_memory(limit: dict[str, int], shared_bytes: int) -> int:
    """Return the number of blocks whose shared memory fits, with the driver's reserve in each. The SM is configured
    for the most shared memory."""
    reserved = limit["shared_memory_reserved_per_block"] * 1024
    of_a_block = round_up(shared_bytes + reserved, limit["shared_memory_allocation_unit"])
    available = limit["shared_memory_per_sm"] * 1024
    return available // of_a_block if of_a_block else limit["blocks_per_sm"]


def ceil_div(value: int, step: int) -> int:
    return -(-value // step)


def round_up(value: int, step: int) -> int:
    return ceil_div(value, step) * step
