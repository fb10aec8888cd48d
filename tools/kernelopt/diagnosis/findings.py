"""The findings of a profile: evidence, inference, action, and an upper bound of the gain. Pure functions.

A rule is a function of a Case that yields what the metrics prove. Thresholds are in reference/thresholds.json, texts in
reference/findings.json. A metric that was not collected is None and proves nothing.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from .case import (
    ISSUE,
    LOCAL_SECTORS,
    NEWER_THAN_MMA_SYNC,
    PIPES,
    SECTOR,
    Accesses,
    Case,
    accesses,
    all_sectors,
    beside_dram,
    byte_share,
    dram_has_the_least,
    gain_of,
    holds_for_all_loads,
    idle_share,
    room,
    runs_special_functions,
    sees_all,
    stall_shares,
    texts,
    traffic_ratio,
)
from .diagnosis import Finding, Observation

OCCUPANCY_LIMITS = ("limit_registers", "limit_shared_memory", "limit_warps", "limit_blocks")
SHARED_MEMORY_STALLS = ("stall_short_scoreboard", "stall_mio_throttle")
TENSOR_DTYPES = ("bf16", "fp16", "fp8")
# Stalls that follow from a unit at its limit: they say no more than the limiter.
EXPLAINED = {
    "dram": {"stall_long_scoreboard", "stall_lg_throttle", "stall_drain"},
    "l2": {"stall_long_scoreboard", "stall_lg_throttle", "stall_drain"},
    "l1": {"stall_long_scoreboard", "stall_lg_throttle"},
    "xu pipe": {"stall_mio_throttle", "stall_short_scoreboard"},
    "fma pipe": {"stall_math_pipe_throttle"},
    "alu pipe": {"stall_math_pipe_throttle"},
    "fp64 pipe": {"stall_math_pipe_throttle"},
    "lsu pipe": {"stall_lg_throttle", "stall_mio_throttle"},
    "tensor pipe": {"stall_gmma", "stall_math_pipe_throttle", "stall_barrier"},
}


def of(case: Case) -> tuple[Finding, ...]:
    """All findings of a profile: the largest possible gain first, unknown gains last.

    Where the floor is known, no gain exceeds the time that the floor leaves.
    """
    capped = [with_severity(finding, case.most_gain_pct) for rule in RULES for finding in rule(case)]
    return tuple(sorted(capped, key=lambda finding: rank(finding.estimated_gain_pct)))


def rank(gain: float | None) -> tuple[bool, float]:
    return (True, 0.0) if gain is None else (False, -gain)


def with_severity(finding: Finding, most_pct: float | None) -> Finding:
    gain = finding.estimated_gain_pct
    if gain is None:
        return finding
    if most_pct is not None:
        gain = min(gain, most_pct)
    severity = "high" if gain >= 20 else "medium" if gain >= 5 else "low"
    return replace(finding, severity=severity, estimated_gain_pct=round(gain, 1))


Evidence = tuple[str, float | None, str]  # (metric, value, unit)


def finding(
    id_: str, gain: float | None, *evidence: Evidence, text: str | None = None, variant: str | None = None, **values
) -> Finding:
    """One finding. gain: the share of the call's time in percent that it could save at most; None unknown.

    text: its name in reference/findings.json where that is not the id; variant: of that text. values: for the text.
    """
    words = texts()["findings"][text or id_]
    words = {**words, **(words["variants"][variant] if variant else {})}
    return Finding(
        id=id_,
        severity="info",
        estimated_gain_pct=gain,
        evidence=tuple(Observation(*row) for row in evidence),
        inference=words["inference"].format(**values),
        actions=tuple(action.format(**values) for action in words["actions"]),
        wiki=f"gpu-wiki/docs/optimization/{words['wiki'].format(**values)}",
        falsified_by=words["falsified_by"].format(**values),
    )


def sector_share(case: Case, name: str, share: float | None) -> Evidence:
    return (name if sees_all(case.m) else f"{name}, at most", share, "%")


def least_bytes(case: Case) -> Evidence:
    return ("least bytes of the problem", case.work["bytes_min"], "byte")


def dram_bytes(moved: float) -> Evidence:
    return ("dram bytes, all kernels of the call", moved, "byte")


def observed(case: Case, metric: str, unit: str) -> Evidence:
    return (metric, case.m.get(metric), unit)


# --- memory -----------------------------------------------------------------------------------------------------------


def excess_traffic(case: Case) -> Iterator[Finding]:
    """More bytes through DRAM than the problem needs: where DRAM limits, or where the L2 misses nearly all reuse."""
    if (traffic := traffic_ratio(case)) is None:
        return
    (moved, ratio), limits, limited = traffic, case.limits, case.classification.limiter == "dram"
    dram = case.m.get("dram_throughput") or 0.0
    missed = ratio >= limits["missed_reuse_ratio"] and dram >= limits["relevant_dram_pct"]
    if missed or (limited and ratio >= limits["excess_traffic_ratio"]):
        # where DRAM does not limit, the floor alone bounds the gain
        gain = 100 * (1 - 1 / ratio) if limited or case.most_gain_pct is not None else None
        variant = "several_kernels" if len(case.kernels) > 1 else None
        evidence = (dram_bytes(moved), least_bytes(case))
        yield finding("excess_dram_traffic", gain, *evidence, variant=variant, ratio=ratio)
    elif limited:
        evidence = (dram_bytes(moved), least_bytes(case), ("dram_throughput", dram, "%"))
        yield finding("near_least_traffic", gain_of(case, 100 - dram), *evidence, ratio=ratio)


def scattered_access(case: Case) -> Iterator[Finding]:
    """Sectors that are fetched for few useful bytes, where they are a relevant part of the kernel's traffic and of its
    bytes. Where the tensor pipe leads, memory is less busy, and they cost nothing."""
    if case.classification.limiter == "tensor pipe" or not (total := all_sectors(case.m)):
        return
    for id_, kinds in (("uncoalesced_loads", ("load", "async_copy")), ("uncoalesced_stores", ("store",))):
        scattered = scattered_kinds(case, kinds)
        sectors = sum(each.sectors for each in scattered.values())
        share = 100 * sectors / total
        if not scattered or share < case.limits["relevant_sectors_pct"]:
            continue
        if byte_share(case.m, scattered) < case.limits["relevant_bytes_pct"]:
            continue
        used, merged, what = average_used(scattered), dram_has_the_least(case), named(case, scattered)
        costs = case.is_limited_by_memory_or_latency and not merged
        yield finding(
            id_,
            gain_of(case, share * (1 - used / SECTOR)) if costs else None,
            *((f"{kind}_bytes_per_sector", each.bytes_per_sector, "byte") for kind, each in scattered.items()),
            sector_share(case, f"share of {what} in all sectors", share),
            text="uncoalesced_accesses",
            variant="merged" if merged else None,
            what=what,
            used=used,
            sector=SECTOR,
        )


def scattered_kinds(case: Case, kinds: Sequence[str]) -> dict[str, Accesses]:
    """Of these kinds of accesses those that use few bytes of a sector, if that is known."""
    known = {kind: each for kind, each in accesses(case.m).items() if kind in kinds}
    few = {k: each for k, each in known.items() if each.bytes_per_sector < case.limits["low_bytes_per_sector"]}
    return {k: each for k, each in few.items() if k != "load" or holds_for_all_loads(case)}


def average_used(scattered: Mapping[str, Accesses]) -> float:
    return sum(each.bytes_used for each in scattered.values()) / sum(each.sectors for each in scattered.values())


def named(case: Case, kinds: Iterable[str]) -> str:
    """ "loads and copies by cp.async"; "loads beside cp.async" where they are scattered and the copies are not."""
    words = {"load": "loads", "async_copy": "copies by cp.async", "store": "stores"}
    beside = " beside cp.async" if list(kinds) == ["load"] and case.m.get("async_copy_sectors") else ""
    return " and ".join(words[kind] for kind in kinds) + beside


def repeated_loads(case: Case) -> Iterator[Finding]:
    """The same bytes loaded repeatedly out of the caches, as by a kernel that gathers a window tap by tap; copies by
    cp.async are among the loads. Matrix products share their operands like that, so the rule is for problems that
    memory bounds."""
    sectors, traffic = case.m.get("load_sectors"), traffic_ratio(case)
    if not case.floor or case.floor.bound != "memory" or sectors is None or traffic is None:
        return
    ratio, limits = sectors * SECTOR / case.work["bytes_min"], case.limits
    if ratio >= limits["repeated_loads_ratio"] and traffic[1] < limits["excess_traffic_ratio"]:
        evidence = (("load_sectors", sectors, "sector"), least_bytes(case), dram_bytes(traffic[0]))
        yield finding("repeated_loads", gain_of(case, beside_dram(case.m)), *evidence, ratio=ratio)


def local_memory(case: Case) -> Iterator[Finding]:
    """Spills, or arrays indexed at run time, where they are a relevant part of the kernel's traffic."""
    local = [case.m.get(key) for key in LOCAL_SECTORS]
    if None in local or not sum(local):
        return
    total, spills = all_sectors(case.m), case.m.get("spill_instructions")
    share = 100 * sum(local) / total if total else None
    if share is not None and share < case.limits["relevant_local_pct"]:
        return
    costs = case.is_limited_by_memory_or_latency and not dram_has_the_least(case)
    yield finding(
        "register_spills" if spills else "local_memory_traffic",
        gain_of(case, share) if costs else None,
        ("local sectors", sum(local), "sector"),
        sector_share(case, "share of all sectors", share),
        observed(case, "spill_instructions", "instruction"),
        observed(case, "registers_per_thread", "register"),
        variant="no_spills" if spills == 0 else None,
    )


def bank_conflicts(case: Case) -> Iterator[Finding]:
    """Extra passes over shared memory that warps wait for."""
    if case.classification.limiter in ("dram", "tensor pipe"):
        return
    conflicts, wavefronts = (case.m.get(key) for key in ("shared_bank_conflicts", "shared_wavefronts"))
    waiting = sum(stall_shares(case.m).get(stall, 0.0) for stall in SHARED_MEMORY_STALLS)
    if not conflicts or not wavefronts or waiting < case.limits["shared_stalls_pct"]:
        return
    share = 100 * conflicts / wavefronts
    if share > case.limits["bank_conflict_pct"]:
        yield finding(
            "shared_bank_conflicts",
            gain_of(case, min(share, waiting)),
            ("shared_bank_conflicts", conflicts, "wavefront"),
            ("shared_wavefronts", wavefronts, "wavefront"),
            ("short scoreboard and MIO throttle", waiting, "% of warp latency"),
            share=share,
        )


# --- the grid and the blocks ------------------------------------------------------------------------------------------


def several_kernels(case: Case) -> Iterator[Finding]:
    """A call that is a chain of launches."""
    count = len(case.kernels)
    if count > 1 and case.share_pct is not None:
        evidence = (("kernels in the call", count, "kernel"), ("share of the longest", case.share_pct, "%"))
        yield finding("several_kernels", 100 - case.share_pct, *evidence, count=count)


def small_grid(case: Case) -> Iterator[Finding]:
    """Too few blocks for the GPU."""
    if case.classification.limiter == "small grid":
        yield finding(
            "small_grid",
            gain_of(case, 100 * idle_share(case.m, case.limits)),
            observed(case, "waves_per_sm", "wave"),
            observed(case, "grid_size", "block"),
            observed(case, "cycles_active", "cycle"),
            observed(case, "cycles_active_most", "cycle"),
        )


def low_occupancy(case: Case) -> Iterator[Finding]:
    """Too few warps to hide latency. Kernels of wgmma and tcgen05 are exempt: their tiles fill an SM with one or two
    blocks and reach the pipe's peak."""
    occupancy = case.m.get("achieved_occupancy")
    if case.classification.bottleneck != "latency" or case.tile_instruction:
        return
    if occupancy is not None and occupancy < case.limits["low_occupancy_pct"]:
        known = {key: case.m[key] for key in OCCUPANCY_LIMITS if case.m.get(key) is not None}
        limiters = [key.removeprefix("limit_") for key, value in known.items() if value == min(known.values())]
        evidence = (("achieved_occupancy", occupancy, "%"), *((key, value, "block") for key, value in known.items()))
        yield finding("low_occupancy", None, *evidence, limiters=", ".join(limiters) or "an unknown resource")


def uneven_work(case: Case) -> Iterator[Finding]:
    """SMs that work longer than others, or a last wave that fills a part of the GPU."""
    waves, average, most = (case.m.get(key) for key in ("waves_per_sm", "cycles_active", "cycles_active_most"))
    if case.classification.bottleneck == "underutilized" or not waves:
        return
    grid = (observed(case, "waves_per_sm", "wave"), observed(case, "grid_size", "block"))
    if average and most and most / average > case.limits["uneven_ratio"]:
        evidence = (("cycles_active_most", most, "cycle"), ("cycles_active", average, "cycle"), *grid)
        yield finding("uneven_work", gain_of(case, 100 * (1 - average / most)), *evidence, ratio=most / average)
    elif waves < case.limits["few_waves"] and 0 < waves % 1 < 0.5:
        gain = gain_of(case, 100 * (1 - waves / math.ceil(waves)))
        yield finding("partial_last_wave", gain, *grid, waves=waves, filled=waves % 1)


# --- instructions -----------------------------------------------------------------------------------------------------


def busy_pipes(case: Case) -> Iterator[Finding]:
    """A pipe, or the issue slots, that limit the kernel, or lead it below their peak. Without a gain: one that is near
    its peak while another unit limits, and one that is full before the floor is reached.

    The work of the tensor pipe is the problem itself: only the rest of the cycles can be gained.
    """
    issue = case.m.get("issue_active")
    busy = {name: (metric, case.m.get(metric), "%") for metric, name in PIPES.items()}
    busy[ISSUE] = ("issue_active", None if issue is None else 100 * issue, "inst/cycle")
    for name, (metric, busy_pct, unit) in busy.items():
        if busy_pct is None or (role := role_of(case, name, busy_pct)) is None:
            continue
        gain = 100 - busy_pct if name == "tensor pipe" else beside_dram(case.m)
        pipe = dict(texts()["pipes"][name])
        with_special_functions = pipe.pop("with_special_functions", {})
        pipe |= with_special_functions if runs_special_functions(case) else {}
        yield finding(
            pipe.pop("finding"),
            gain_of(case, gain) if role in (LIMITER, LEADS) else None,
            (metric, case.m[metric], unit),
            text="busy_pipe",
            variant=None if role == LIMITER else role,
            busy=busy_pct,
            rest=100 - busy_pct,
            idle=100 - (share_of_the_call(case, busy_pct) or 0),
            **pipe,
        )


LIMITER, LEADS, NEAR_PEAK, FULL_BEFORE_FLOOR = "limiter", "leads", "near_peak", "full_before_floor"


def role_of(case: Case, name: str, busy_pct: float) -> str | None:
    """Why a unit that is busy in this share of the cycles is worth a finding; None where it is not."""
    if name == case.classification.limiter:
        return LIMITER if busy_pct >= case.limits["saturated_pct"] else LEADS
    if busy_pct >= case.limits["saturated_pct"]:
        return NEAR_PEAK
    used, floor_pct = share_of_the_call(case, busy_pct), case.floor and case.floor.share_pct
    if not used or not floor_pct or name in irreducible_pipes(case):
        return None
    return FULL_BEFORE_FLOOR if used >= case.limits["idle_pct"] and used > floor_pct else None


def share_of_the_call(case: Case, busy_pct: float) -> float | None:
    """Percent of the call's time that these instructions take: less where SMs idle or other kernels run."""
    average, most, share = case.m.get("cycles_active"), case.m.get("cycles_active_most"), case.share_pct
    return busy_pct * average / most * share / 100 if average and most and share else None


def irreducible_pipes(case: Case) -> set[str]:
    """The pipes whose work cannot become less: where arithmetic bounds the problem, that work is the floor itself."""
    vectors = {"fma pipe", "fp64 pipe"} if case.floor and case.floor.bound == "compute" else set()
    return {"tensor pipe"} | vectors


def starved_tensor_pipe(case: Case) -> Iterator[Finding]:
    """A problem that the tensor pipe bounds, in a kernel that uses it and leaves it idle most of the time."""
    tensor, limits = case.m.get("tensor_cycles"), case.limits
    if not case.floor or case.floor.bound != "compute" or tensor is None:
        return
    if limits["tensor_idle_pct"] <= tensor < limits["tensor_busy_pct"]:
        evidence = (("tensor_cycles", tensor, "%"), ("share of the floor", case.floor.share_pct, "%"))
        variant = "with_special_functions" if runs_special_functions(case) else None
        yield finding("starved_tensor_pipe", gain_of(case, 100 - tensor), *evidence, variant=variant, tensor=tensor)


def unused_tensor_cores(case: Case) -> Iterator[Finding]:
    """A matrix problem that does its arithmetic elsewhere, and more of it than the vector units do beside the least
    bytes."""
    work, limits = case.work, case.limits
    tensor = [kernel.metrics.get("tensor_cycles") for kernel in case.kernels]
    if not work or work["dtype"] not in TENSOR_DTYPES or None in tensor:
        return
    intensity = work["flops"] / work["bytes_min"]
    used = max(tensor) >= limits["tensor_idle_pct"] or case.tile_instruction
    if intensity >= limits["vector_intensity"] and not used:
        yield finding(
            "tensor_cores_unused",
            gain_of(case, beside_dram(case.m)),
            ("tensor_cycles, busiest kernel", max(tensor), "%"),
            ("FLOPs of matrix products", work["flops"], "FLOP"),
            ("arithmetic intensity", intensity, "FLOP/byte"),
        )


def mma_sync_alone(case: Case) -> Iterator[Finding]:
    """A matrix product by the tensor instructions of Ampere on a GPU that has wgmma (9) or tcgen05 (10, 11). Where even
    the vector units would keep up with DRAM, a faster instruction gains nothing."""
    if case.work and case.work["flops"] / case.work["bytes_min"] < case.limits["vector_intensity"]:
        return
    if (major := case.m.get("compute_capability")) not in NEWER_THAN_MMA_SYNC:
        return
    id_, metric, name, sass = NEWER_THAN_MMA_SYNC[major]
    tensor = case.m.get("tensor_cycles")
    if case.m.get(metric) != 0 or tensor is None or not case.m.get("hmma_instructions"):
        return
    if tensor >= case.limits["tensor_idle_pct"]:
        evidence = ((metric, 0.0, "%"), observed(case, "hmma_instructions", "%"), ("tensor_cycles", tensor, "%"))
        yield finding(id_, None, *evidence, text="old_tensor_instruction", newer=name, sass=sass)


def divergence(case: Case) -> Iterator[Finding]:
    """Warps that run instructions for few of their threads, where instructions matter."""
    threads = case.m.get("threads_per_instruction")
    if case.classification.bottleneck not in ("compute", "latency") or threads is None:
        return
    if threads < case.limits["threads_per_instruction"]:
        gain = gain_of(case, 100 * (1 - threads / 32))
        yield finding("divergent_warps", gain, ("threads_per_instruction", threads, "thread"), threads=threads)


def stalls(case: Case) -> Iterator[Finding]:
    """The leading stall, unless the limiter explains it: the cause where latency limits, else a second opinion."""
    if case.classification.bottleneck in ("underutilized", "unknown"):
        return
    shares = {stall: share for stall, share in stall_shares(case.m).items() if stall not in explained_stalls(case)}
    stall = max(shares, key=shares.get, default=None)
    if stall is None or shares[stall] <= case.limits["dominant_stall_pct"]:
        return
    tiles, words = case.tile_instruction, texts()["stalls"][stall]
    if tiles:
        words = words.get("tile_instruction", words)
    # Kernels of wgmma with one __syncthreads at their start show 32 to 56 % of barrier stalls (attention v2, gemm_fused
    # v3 and v4). That a warpgroup's own synchronisation counts there is an inference, so that gain is unknown.
    doubtful = tiles and stall == "stall_barrier"
    yield finding(
        stall,
        None if doubtful else gain_of(case, min(shares[stall], room(case.m))),
        observed(case, stall, "warp/issue"),
        observed(case, "warp_latency", "cycle"),
        text="stall",
        share=shares[stall],
        cause=words["cause"].format(tile_instruction=tiles),
        action=words["action"],
    )


def explained_stalls(case: Case) -> set[str]:
    """Stalls that follow from the limiter. A tensor pipe that limits below its peak explains none."""
    limiter = case.classification.limiter
    if limiter == "tensor pipe" and case.m["tensor_cycles"] < case.limits["saturated_pct"]:
        return set()
    return EXPLAINED.get(limiter, set())


RULES: tuple[Callable[[Case], Iterator[Finding]], ...] = (  # of equal gains the first leads: a cause before a symptom
    excess_traffic,
    several_kernels,
    repeated_loads,
    scattered_access,
    local_memory,
    bank_conflicts,
    unused_tensor_cores,
    mma_sync_alone,
    starved_tensor_pipe,
    busy_pipes,
    small_grid,
    uneven_work,
    divergence,
    stalls,
    low_occupancy,
)
