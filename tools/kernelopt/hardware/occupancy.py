"""Theoretical occupancy from a launch's resources and the limits of its architecture. All functions are pure.

The rules for NVIDIA follow cuda_occupancy.h: registers are allocated per warp within a sub-partition of the SM, and
shared memory per block. The rules for AMD follow AMD's LLVM: registers are allocated per wavefront within a SIMD, and
LDS per workgroup, which stays within a compute unit, on RDNA within a workgroup processor. The wiki has a row for each
limit and each allocation unit.
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
OF_SCALARS = ("sgpr_allocation_unit", "sgprs_reserved_per_wavefront")  # on RDNA they limit nothing
AMD_NEEDED = ("wavefront_size", "threads_per_workgroup", "lds_per_workgroup", "lds_allocation_unit")
PER_UNIT = ("simds_per_", "lds_per_", "workgroups_per_")  # of a compute unit (cu) or a workgroup processor (wgp)


@dataclass(frozen=True)
class Occupancy:
    """The occupancy of one launch on an SM. blocks_by_limit: the number of blocks that each limit allows. limiters:
    the limits that allow the fewest. On AMD the SM is a compute unit, or the workgroup processor of two; a warp is a
    wavefront, a block a workgroup, and shared memory LDS."""

    occupancy_pct: float
    warps_per_sm: int
    blocks_per_sm: int
    limiters: tuple[str, ...]
    blocks_by_limit: dict[str, int]


def plain_target(name: str) -> str:
    """Return sm_90 for sm_90a and sm_100 for sm_100f. The suffix adds instructions and changes no limit."""
    return re.sub(r"^(sm_?\d+|\d+\.\d)[af]$", r"\1", name, flags=re.IGNORECASE)


def needed(limits: Page) -> tuple[str, ...]:
    """Return the rows of a limits page that its occupancy rests on."""
    if limits.vendor != "AMD":
        return NEEDED
    return (*AMD_NEEDED, *of_a_simd(limits), *(f"{name}{unit_of(limits)}" for name in PER_UNIT))


def of_a_simd(limits: Page) -> tuple[str, ...]:
    """Return the rows that say how many wavefronts of an AMD GPU fit on a SIMD by their registers."""
    scalar = OF_SCALARS if limits.known("sgprs_per_simd") else ()
    return ("wavefronts_per_simd", "vgprs_per_simd", "vgpr_allocation_unit", "sgprs_per_simd", *scalar)


def unit_of(limits: Page) -> str:
    """Return which unit of an AMD GPU holds a workgroup: "wgp" of RDNA, "cu" else."""
    return "wgp" if limits.row("lds_per_wgp") else "cu"


def occupancy(
    limits: Page, threads: int, registers: int, shared_bytes: int, scalar_registers: int | None = None
) -> Occupancy:
    """Return the occupancy of a launch.

    threads: per block. registers: per thread; on AMD all vector registers. shared_bytes: static and dynamic shared
    memory per block, without the driver's reserve. scalar_registers: per wavefront on AMD; None counts none.
    Raise Refused if the wiki lacks a limit. Raise UsageError if a block cannot be launched.
    """
    limit = known_limits(limits, needed(limits))
    if limits.vendor == "AMD":
        return of_amd(limits, limit, threads, registers, shared_bytes, scalar_registers or 0)
    refuse_large(limits, "threads per block", threads, limit["threads_per_block"])
    refuse_large(limits, "registers per thread", registers, limit["registers_per_thread"])
    refuse_large(limits, "bytes of shared memory per block", shared_bytes, limit["shared_memory_per_block"] * 1024)
    warps = ceil_div(threads, limit["warp_size"])
    blocks = {
        "blocks": limit["blocks_per_sm"],
        "warps": limit["warps_per_sm"] // warps,
        "registers": blocks_by_registers(limit, warps, registers),
        "shared_memory": blocks_by_shared_memory(limit, shared_bytes),
    }
    return of_blocks(blocks, warps, limit["warps_per_sm"])


def known_limits(limits: Page, names: tuple[str, ...]) -> dict[str, int]:
    """Return these rows as numbers; a row that a source calls UNSUPPORTED, which limits nothing, is left out. Raise
    Refused if one is unknown."""
    rows = {name: limits.row(name) for name in names}
    if gaps := [name for name, row in rows.items() if row is None or row.text == "UNKNOWN"]:
        raise Refused(f"no occupancy for {limits.platform}: " + "; ".join(missing(name) for name in gaps))
    return {name: int(row.value) for name, row in rows.items() if row.known}


def refuse_large(limits: Page, resource: str, wanted: int, most: int) -> None:
    if wanted > most:
        raise UsageError(f"{wanted} {resource} cannot be launched on {limits.platform}: at most {most}")


def of_blocks(blocks: dict[str, int], warps: int, slots: int) -> Occupancy:
    """Return the occupancy with the fewest blocks that a limit allows. warps: of a block. slots: warps of an SM."""
    fitting = min(blocks.values())
    return Occupancy(
        occupancy_pct=100 * fitting * warps / slots,
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


def of_amd(limits: Page, limit: dict[str, int], threads: int, vgprs: int, lds_bytes: int, sgprs: int) -> Occupancy:
    """Return the occupancy of a launch on a compute unit, or on the workgroup processor of two. vgprs, sgprs: of a
    wavefront, the former of each lane."""
    unit = unit_of(limits)
    refuse_large(limits, "threads per workgroup", threads, limit["threads_per_workgroup"])
    refuse_large(limits, "bytes of LDS per workgroup", lds_bytes, limit["lds_per_workgroup"] * 1024)
    waves = ceil_div(threads, limit["wavefront_size"])
    simds, of_lds = limit[f"simds_per_{unit}"], round_up(lds_bytes, limit["lds_allocation_unit"])
    slots = simds * limit["wavefronts_per_simd"]
    workgroups = {"waves": slots // waves, "vgprs": simds * waves_by_vgprs(limit, vgprs) // waves}
    if "sgprs_per_simd" in limit:
        workgroups["sgprs"] = simds * waves_by_sgprs(limit, sgprs) // waves
    if of_lds:
        workgroups["lds"] = limit[f"lds_per_{unit}"] * 1024 // of_lds
    if waves > 1:  # a single wavefront needs no barrier
        workgroups["workgroups"] = limit[f"workgroups_per_{unit}"]
    return of_blocks(workgroups, waves, slots)


def waves_per_simd(limits: Page, vgprs: int, sgprs: int) -> int:
    """Return how many wavefronts the registers allow on a SIMD: what AMD's compiler calls the occupancy of a kernel
    without LDS. Raise Refused if the wiki lacks a limit."""
    limit = known_limits(limits, of_a_simd(limits))
    allowed = [limit["wavefronts_per_simd"], waves_by_vgprs(limit, vgprs)]
    return min([*allowed, waves_by_sgprs(limit, sgprs)] if "sgprs_per_simd" in limit else allowed)


def waves_by_vgprs(limit: dict[str, int], vgprs: int) -> int:
    given = round_up(max(vgprs, 1), limit["vgpr_allocation_unit"])
    return limit["vgprs_per_simd"] // given


def waves_by_sgprs(limit: dict[str, int], sgprs: int) -> int:
    given = round_up(max(sgprs, 1), limit["sgpr_allocation_unit"]) + limit["sgprs_reserved_per_wavefront"]
    return limit["sgprs_per_simd"] // given


def ceil_div(value: int, step: int) -> int:
    return -(-value // step)


def round_up(value: int, step: int) -> int:
    return ceil_div(value, step) * step
