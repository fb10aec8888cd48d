"""The findings of a profile: evidence -> inference -> action, each with an upper bound of its gain where there is one. Pure functions.

A rule is a function of a Case that yields what the counters prove; its thresholds are in reference/thresholds.json. A counter
that was not collected is None and proves nothing.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

PIPES = {  # what can be the limiter when the SM itself is the busiest unit
    "fma_cycles": "fma pipe",
    "alu_cycles": "alu pipe",
    "fp64_cycles": "fp64 pipe",
    "xu_instructions": "xu pipe",
    "lsu_instructions": "lsu pipe",
    "tensor_cycles": "tensor pipe",
}
ISSUE = "instruction issue"
SECTOR = 32  # bytes
OCCUPANCY_LIMITS = ("limit_registers", "limit_shared_memory", "limit_warps", "limit_blocks")
SHARED_MEMORY_STALLS = ("stall_short_scoreboard", "stall_mio_throttle")
STALL_ADVICE = {
    "stall_long_scoreboard": (
        "loads from global memory are waited for",
        "more bytes in flight: wider loads, more independent loads per thread, num_stages, bulk copies",
    ),
    "stall_short_scoreboard": (
        "shared memory or special functions are waited for",
        "remove bank conflicts; fewer exp/log per element",
    ),
    "stall_barrier": ("warps wait for each other", "fewer barriers, smaller blocks, evenly divided work"),
    "stall_mio_throttle": (
        "the queue of shared memory and special functions is full",
        "fewer and wider shared-memory accesses, values kept in registers; fewer special functions",
    ),
    "stall_lg_throttle": ("many narrow global accesses are queued", "16 bytes per thread and access"),
    "stall_math_pipe_throttle": (
        "the arithmetic pipe is busy",
        "fewer or cheaper instructions, tensor cores where they apply",
    ),
    "stall_wait": (
        "dependent instructions follow each other",
        "independent work in between: unroll, more elements per thread",
    ),
    "stall_no_instruction": ("instructions are not there in time", "a smaller loop body, longer-running blocks"),
    "stall_drain": ("stores are waited for at the end", "fewer, wider, coalesced stores"),
    "stall_branch_resolving": ("branches are waited for", "masks in place of branches"),
    "stall_membar": ("memory fences are waited for", "fewer fences and atomics"),
    "stall_gmma": (
        "wgmma instructions are waited for",
        "more wgmma in flight: a deeper pipeline, two consumer warp groups",
    ),
}
# The same stalls in a kernel whose tiles the tensor pipe works off by itself (Case.tile_instruction). Ones of wgmma
# with a single __syncthreads at their start show 32 to 56 % of barrier stalls (attention v2, gemm_fused v3 and v4):
# that a warpgroup's own synchronisation counts there is an inference. Of tcgen05 no profile was at hand.
TILE_ADVICE = {
    "stall_barrier": (
        "warps wait at a barrier; in a kernel of {} that may be the warpgroup that waits for its product or its copies",
        "keep the tensor pipe fed: more stages, two consumer warpgroups or accumulators in turn, products in flight "
        "under other work; fewer __syncthreads only if the loop holds any",
    ),
    "stall_wait": (
        "dependent instructions between the products follow each other",
        "put that work under the product of another step or of a second warpgroup; fewer instructions in the epilogue",
    ),
}
# Where a newer tensor instruction than mma.sync exists: compute capability, major -> (the finding that it is not used,
# the counter of the newer one, its name, what SASS calls it). 12 has none: its tensor cores are fed by mma.sync.
BLACKWELL = ("mma_sync_on_blackwell", "tcgen05_instructions", "tcgen05", "UTCHMMA")
NEWER_THAN_MMA_SYNC = {
    9: ("mma_sync_on_hopper", "gmma_instructions", "wgmma", "HGMMA"),
    10: BLACKWELL,
    11: BLACKWELL,
}
# What a unit at its limit makes warps wait for: such a stall says nothing more than the limiter does.
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
CHEAPER = "fewer or cheaper instructions of that pipe; index arithmetic and masks out of the loop"
PIPE_ADVICE = {  # limiter -> (finding, what it is, action)
    ISSUE: (
        "busy_issue_slots",
        "the schedulers issue",
        "fewer instructions an element: wider accesses, index arithmetic and masks out of the loop, 16-bit pairs, fused operations",
    ),
    "xu pipe": (
        "busy_special_functions",
        "special functions and conversions run",
        "fewer or cheaper ones an element: exp2 with a folded scale, tanh.approx and ex2.approx, one reciprocal for many "
        "quotients, a part of them as polynomials on the multiply-add units",
    ),
    "tensor pipe": (
        "busy_tensor_pipe",
        "the tensor pipe works",
        "what is left is between the products: prologue, epilogue and softmax under the product of another tile (persistent "
        "loop, two consumer warpgroups), panels shared by a cluster; low occupancy is no fault here",
    ),
    "fma pipe": ("busy_arithmetic_pipe", "multiply-adds run", CHEAPER),
    "alu pipe": ("busy_arithmetic_pipe", "integer and logic instructions run", CHEAPER),
    "fp64 pipe": ("busy_arithmetic_pipe", "double-precision instructions run", CHEAPER),
    "lsu pipe": ("busy_arithmetic_pipe", "load and store instructions run", "16 bytes per thread and access"),
}


@dataclass(frozen=True)
class Case:
    """What a rule looks at.

    kernels: with share_pct of the call. main: the longest of them. work: {flops, bytes_min, dtype} or None. judged: {class,
    limiter} of the main kernel. floor: {share_pct, bound} of the call, None unknown. limits: the thresholds.
    """

    kernels: list[dict]
    main: dict
    work: dict | None
    judged: dict
    floor: dict | None
    limits: dict[str, float]

    @property
    def m(self) -> dict:
        """The counters of the main kernel."""
        return self.main["metrics"]

    @property
    def tile_instruction(self) -> str | None:
        """ "wgmma" or "tcgen05" where the kernel uses it: a few warps ask for large tiles, which the tensor pipe works
        off beside them."""
        return next((name for _, key, name, _ in NEWER_THAN_MMA_SYNC.values() if self.m.get(key)), None)


def of(case: Case) -> list[dict]:
    """All findings of a profile, the largest possible gain first, those whose gain is unknown last.

    No gain is above what the floor leaves of the call's time, where the floor is known.
    """
    found = [capped(finding, case.floor) for rule in RULES for finding in rule(case)]
    return sorted(found, key=lambda finding: rank(finding["estimated_gain_pct"]))


def rank(gain: float | None) -> tuple[bool, float]:
    return (True, 0.0) if gain is None else (False, -gain)


def capped(finding: dict, floor: dict | None) -> dict:
    gain = finding["estimated_gain_pct"]
    if gain is not None and floor:
        gain = min(gain, max(0.0, 100 - floor["share_pct"]))
    severity = "info" if gain is None else "high" if gain >= 20 else "medium" if gain >= 5 else "low"
    return {**finding, "severity": severity, "estimated_gain_pct": None if gain is None else round(gain, 1)}


def finding(
    id_: str, gain: float | None, evidence: list, inference: str, actions: list[str], wiki: str, falsified_by: str
) -> dict:
    """One finding; `gain` is the share of the call's time in percent that it could save at most, None unknown."""
    return {
        "id": id_,
        "severity": None,
        "estimated_gain_pct": gain,
        "evidence": [{"metric": metric, "value": value, "unit": unit} for metric, value, unit in evidence],
        "inference": inference,
        "actions": actions,
        "wiki": f"gpu-wiki/docs/optimization/{wiki}",
        "falsified_by": falsified_by,
    }


# --- what several rules ask -------------------------------------------------------------------------------------------


def gain_of(case: Case, gain_pct: float | None) -> float | None:
    """A gain within the main kernel as a share of the whole call."""
    share = case.main["share_pct"]
    return None if share is None or gain_pct is None else gain_pct * share / 100


def room(m: dict) -> float:
    """Percent of the kernel's time that no waiting less can save more than: the busiest unit and the instructions that are
    issued take the rest all the same. NVIDIA's rules bound their estimates of stalls by the first of the two."""
    busy = [m.get("sm_throughput"), m.get("memory_throughput"), 100 * (m.get("issue_active") or 0)]
    return max(0.0, 100 - max(value for value in busy if value is not None))


def beside_dram(m: dict) -> float | None:
    """Percent of the kernel's time that fewer instructions can save at most: what DRAM does not take all the same."""
    return None if m.get("dram_throughput") is None else 100 - m["dram_throughput"]


def stall_shares(m: dict) -> dict[str, float]:
    """{stall: percent of the warp latency}; {} when that was not collected."""
    total = m.get("warp_latency")
    return {key: 100 * m[key] / total for key in STALL_ADVICE if m.get(key) is not None} if total else {}


def idle_share(m: dict, limits: dict) -> float | None:
    """The share of the SMs' time that less than a wave of blocks leaves idle; None when the grid fills the GPU.

    Less than a wave may still put a block on each SM: then the SMs work equally long, and only occupancy is low.
    """
    waves, average, most = (m.get(key) for key in ("waves_per_sm", "cycles_active", "cycles_active_most"))
    if waves is None or waves >= 1:
        return None
    if not average or not most:
        return 1 - waves
    return 1 - average / most if most / average > limits["small_grid_ratio"] else None


def traffic_ratio(case: Case) -> tuple[float, float] | None:
    """(bytes that all kernels of the call move through DRAM, their ratio to the least bytes); None unknown."""
    moved = [k["metrics"].get(key) for k in case.kernels for key in ("dram_bytes_read", "dram_bytes_written")]
    return (sum(moved), sum(moved) / case.work["bytes_min"]) if case.work and None not in moved else None


def dram_has_the_least(case: Case) -> bool:
    """DRAM limits and moves no more than it must: what L1 and L2 do with the accesses costs nothing then."""
    found = traffic_ratio(case)
    return case.judged["limiter"] == "dram" and bool(found) and found[1] < case.limits["excess_traffic_ratio"]


def sees_all(m: dict) -> bool:
    """Do the counters of loads and stores see all that the kernel moves? They are blind to bulk copies, which came with
    compute capability 9."""
    return m.get("tma_cycles") == 0 or (m.get("compute_capability") or 9) < 9


def all_sectors(m: dict) -> float | None:
    """Sectors of 32 bytes that the kernel moves; None unknown. Where bulk copies carry some of them, at least what went through
    DRAM: a share of that is the most that the true share can be."""
    names = ("load_sectors", "store_sectors", "local_load_sectors", "local_store_sectors")
    counted = sum(m.get(key) or 0 for key in names)
    if m.get("load_sectors") is None or m.get("store_sectors") is None:
        return None
    if sees_all(m):
        return counted
    dram = [m.get(key) for key in ("dram_bytes_read", "dram_bytes_written")]
    return None if None in dram else max(counted, sum(dram) / SECTOR)


# --- memory -----------------------------------------------------------------------------------------------------------


def excess_traffic(case: Case) -> Iterator[dict]:
    """More bytes through DRAM than the problem needs: where DRAM limits, or where so many that the L2 keeps nothing."""
    if (found := traffic_ratio(case)) is None:
        return
    (moved, ratio), limits, limited = found, case.limits, case.judged["limiter"] == "dram"
    evidence = [
        ("dram bytes, all kernels of the call", moved, "byte"),
        ("least bytes of the problem", case.work["bytes_min"], "byte"),
    ]
    dram = case.m.get("dram_throughput") or 0.0
    missed = ratio >= limits["missed_reuse_ratio"] and dram >= limits["relevant_dram_pct"]
    if missed or (limited and ratio >= limits["excess_traffic_ratio"]):
        flushed = "; caches are flushed before each kernel, so traffic that the L2 would have served counts too"
        yield finding(
            "excess_dram_traffic",
            100 * (1 - 1 / ratio)
            if limited or case.floor
            else None,  # where DRAM does not limit, the floor alone bounds it
            evidence,
            f"the call moves {ratio:.2f} times the least bytes" + flushed * (len(case.kernels) > 1),
            [
                "read each input once: fuse the passes and keep the row or tile in registers or shared memory",
                "where tiles share inputs: larger tiles, and neighbours in launch order that find them in the L2",
            ],
            "memory-traffic.md",
            "DRAM bytes fall after the change and the time does not",
        )
    elif limited:
        yield finding(
            "near_least_traffic",
            gain_of(case, 100 - dram),
            [*evidence, ("dram_throughput", dram, "%")],
            f"DRAM limits the kernel and it moves {ratio:.2f} times the least bytes; what is left is how well DRAM is kept busy",
            [
                "compare with the Stop Conditions; then more bytes in flight (loads ahead of their use, bulk copies), the order of "
                "stores, or fewer bytes (dtype, algorithm)"
            ],
            "memory-traffic.md",
            "dram_throughput rises and the time does not fall; or a copy of the same size takes as long",
        )


def scattered_access(case: Case) -> Iterator[dict]:
    """Sectors fetched for few useful bytes, where they are a good part of all that the kernel moves."""
    if not (total := all_sectors(case.m)):
        return
    for what in ("load", "store"):
        used, share = case.m.get(f"{what}_bytes_per_sector"), 100 * case.m[f"{what}_sectors"] / total
        if not used or used >= case.limits["low_bytes_per_sector"] or share < case.limits["relevant_sectors_pct"]:
            continue
        merged = dram_has_the_least(case)
        costs = case.judged["class"] in ("memory", "latency") and not merged
        yield finding(
            f"uncoalesced_{what}s",
            gain_of(case, share * (1 - used / SECTOR)) if costs else None,
            [
                (f"{what}_bytes_per_sector", used, "byte"),
                (f"{what}s' share of all sectors" + ", at most" * (not sees_all(case.m)), share, "%"),
            ],
            f"global {what}s use {used:.1f} of the {SECTOR} bytes of each sector"
            + "; the caches merge them, DRAM limits and moves the least bytes" * merged,
            [
                "let neighbouring threads touch neighbouring addresses; transpose through shared memory; where they do, the "
                "compiler lost the vector width: a stride, offset or mask bound that does not divide by 16"
            ],
            "memory-access.md",
            "bytes per sector rise and the time does not fall",
        )


def repeated_loads(case: Case) -> Iterator[dict]:
    """The same bytes loaded again and again out of the caches, as by a kernel that gathers a window tap by tap. Products share
    their operands like that, so this is for problems that memory bounds alone."""
    sectors, traffic = case.m.get("load_sectors"), traffic_ratio(case)
    if not case.floor or case.floor["bound"] != "memory" or sectors is None or traffic is None:
        return
    ratio, limits = sectors * SECTOR / case.work["bytes_min"], case.limits
    if ratio >= limits["repeated_loads_ratio"] and traffic[1] < limits["excess_traffic_ratio"]:
        yield finding(
            "repeated_loads",
            gain_of(case, beside_dram(case.m)),
            [
                ("load_sectors", sectors, "sector"),
                ("least bytes of the problem", case.work["bytes_min"], "byte"),
                ("dram bytes, all kernels of the call", traffic[0], "byte"),
            ],
            f"threads load {ratio:.0f} times the least bytes, which DRAM moves once: caches and load instructions do the rest",
            [
                "load each input once: walk along an axis and keep in registers or shared memory what the next outputs need",
                "work out which inputs an output uses, and which outputs use any: skip the others",
            ],
            "windows.md",
            "load_sectors fall towards the input's bytes / 32 and the time does not",
        )


def local_memory(case: Case) -> Iterator[dict]:
    """Spills, or arrays indexed at run time, where they are more than next to nothing of what the kernel moves."""
    m = case.m
    local = [m.get(key) for key in ("local_load_sectors", "local_store_sectors")]
    if None in local or not sum(local):
        return
    total, spills = all_sectors(m), m.get("spill_instructions")
    share = 100 * sum(local) / total if total else None
    if share is not None and share < case.limits["relevant_local_pct"]:
        return
    evidence = [
        ("local sectors", sum(local), "sector"),
        ("share of all sectors" + ", at most" * (not sees_all(m)), share, "%"),
        ("spill_instructions", spills, "instruction"),
        ("registers_per_thread", m.get("registers_per_thread"), "register"),
    ]
    costs = case.judged["class"] in ("memory", "latency") and not dram_has_the_least(case)
    gain = gain_of(case, share) if costs else None
    if spills:
        yield finding(
            "register_spills",
            gain,
            evidence,
            "registers are spilled to local memory, which goes through L1 and L2",
            ["smaller tiles or more warps per block; fewer stages; no cap on registers (maxnreg, launch bounds)"],
            "memory-access.md",
            "extract_asm.py shows no LDL and STL in the loop, or the time stays when they are gone",
        )
        return
    cause = "an array is indexed at run time"
    yield finding(
        "local_memory_traffic",
        gain,
        evidence,
        f"the kernel uses local memory: {cause if spills == 0 else f'registers are spilled, or {cause}'}",
        ["compile-time indices (unroll the loop over the array), or shared memory"],
        "memory-access.md",
        "extract_asm.py shows neither LDL nor STL",
    )


def bank_conflicts(case: Case) -> Iterator[dict]:
    """Extra passes over shared memory that warps wait for."""
    if case.judged["limiter"] in ("dram", "tensor pipe"):
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
            [
                ("shared_bank_conflicts", conflicts, "wavefront"),
                ("shared_wavefronts", wavefronts, "wavefront"),
                ("short scoreboard and MIO throttle", waiting, "% of warp latency"),
            ],
            f"{share:.0f} % of the passes over shared memory are conflicts, and warps wait for shared memory",
            ["pad or swizzle the shared-memory layout; fewer passes: what every thread reads anew, one may hand on"],
            "memory-access.md",
            "shared-memory stalls are small: short_scoreboard and mio_throttle do not lead",
        )


# --- the grid and the blocks ------------------------------------------------------------------------------------------


def several_kernels(case: Case) -> Iterator[dict]:
    """A call that is a chain of launches."""
    if len(case.kernels) > 1 and case.main["share_pct"] is not None:
        yield finding(
            "several_kernels",
            100 - case.main["share_pct"],
            [
                ("kernels in the call", len(case.kernels), "kernel"),
                ("share of the longest", case.main["share_pct"], "%"),
            ],
            f"{len(case.kernels)} kernels make up the call; intermediate results go through memory between them",
            ["fuse them into one kernel, so that intermediates stay on chip"],
            "launch-overhead.md",
            "the fused kernel takes as long as the sum of the parts",
        )


def small_grid(case: Case) -> Iterator[dict]:
    """Too few blocks for the GPU."""
    if case.judged["limiter"] != "small grid":
        return
    m = case.m
    yield finding(
        "small_grid",
        gain_of(case, 100 * idle_share(m, case.limits)),
        [
            ("waves_per_sm", m["waves_per_sm"], "wave"),
            ("grid_size", m.get("grid_size"), "block"),
            ("cycles_active", m.get("cycles_active"), "cycle"),
            ("cycles_active_most", m.get("cycles_active_most"), "cycle"),
        ],
        "the grid leaves SMs without work",
        ["smaller tiles; split the reduction over blocks; several problems in one launch"],
        "occupancy.md",
        "more blocks do not shorten the kernel",
    )


def low_occupancy(case: Case) -> Iterator[dict]:
    """Too few warps to hide latency. Not of wgmma and tcgen05: their tiles fill an SM with a block or two, and reach
    the pipe's peak so."""
    occupancy = case.m.get("achieved_occupancy")
    if case.judged["class"] != "latency" or case.tile_instruction:
        return
    if occupancy is not None and occupancy < case.limits["low_occupancy_pct"]:
        known = {key: case.m[key] for key in OCCUPANCY_LIMITS if case.m.get(key) is not None}
        limiters = [key.removeprefix("limit_") for key, value in known.items() if value == min(known.values())]
        yield finding(
            "low_occupancy",
            None,
            [("achieved_occupancy", occupancy, "%"), *((key, value, "block") for key, value in known.items())],
            f"few warps hide latency; limited by {', '.join(limiters) or 'an unknown resource'}",
            ["use less of the limiting resource: fewer registers (smaller tile), less shared memory, smaller blocks"],
            "occupancy.md",
            "occupancy rises and the time does not fall",
        )


def uneven_work(case: Case) -> Iterator[dict]:
    """SMs that work longer than others, or a last wave that fills a part of the GPU."""
    m, waves = case.m, case.m.get("waves_per_sm")
    if case.judged["class"] == "underutilized" or not waves:
        return
    average, most = m.get("cycles_active"), m.get("cycles_active_most")
    if average and most and most / average > case.limits["uneven_ratio"]:
        yield finding(
            "uneven_work",
            gain_of(case, 100 * (1 - average / most)),
            [
                ("cycles_active_most", most, "cycle"),
                ("cycles_active", average, "cycle"),
                ("waves_per_sm", waves, "wave"),
                ("grid_size", m.get("grid_size"), "block"),
            ],
            f"the busiest SM works {most / average:.2f} times as long as the average",
            ["blocks of even work; a persistent kernel that takes tiles from a queue; a grid of whole waves"],
            "occupancy.md",
            "even blocks do not shorten the kernel",
        )
    elif waves < case.limits["few_waves"] and 0 < waves % 1 < 0.5:
        yield finding(
            "partial_last_wave",
            gain_of(case, 100 * (1 - waves / math.ceil(waves))),
            [("waves_per_sm", waves, "wave"), ("grid_size", m.get("grid_size"), "block")],
            f"{waves:.2f} waves: the last one fills {waves % 1:.0%} of the GPU",
            ["a tile size or grid that gives whole waves; a persistent kernel; split the longest dimension"],
            "occupancy.md",
            "a grid of whole waves takes as long per block",
        )


# --- instructions -----------------------------------------------------------------------------------------------------


def busy_pipes(case: Case) -> Iterator[dict]:
    """A pipe, or the issue slots, that limit the kernel; without a gain, one that is near its peak while another unit limits, or that
    is full before the floor is reached.

    What the tensor pipe does is the problem itself: there the rest of the cycles is all that can be gained.
    """
    issue = case.m.get("issue_active")
    busy = {name: (key, case.m.get(key)) for key, name in PIPES.items()}
    busy[ISSUE] = ("issue_active", None if issue is None else 100 * issue)
    for name, (key, value) in busy.items():
        means = None if value is None else meaning(case, name, value)
        if means is None:
            continue
        id_, what, action = PIPE_ADVICE[name]
        gain = 100 - value if name == "tensor pipe" else beside_dram(case.m)
        yield finding(
            id_,
            gain_of(case, gain) if name == case.judged["limiter"] else None,
            [(key, case.m[key], "inst/cycle" if name == ISSUE else "%")],
            f"{what} in {value:.0f} % of the cycles{means}",
            [action],
            "tensor-cores.md" if id_ == "busy_tensor_pipe" else "instructions.md",
            "that figure changes and the time does not",
        )


def meaning(case: Case, name: str, busy_pct: float) -> str | None:
    """What it means that this unit is busy in so many of the cycles in which SMs work; None where that is no finding."""
    if name == case.judged["limiter"]:
        return ": that limits the kernel"
    if busy_pct >= case.limits["saturated_pct"]:
        return ", near the peak, too"
    used = share_of_the_call(case, busy_pct)
    floor = case.floor and case.floor["share_pct"]
    if used and floor and name not in the_problems_own(case) and used >= case.limits["idle_pct"] and used > floor:
        return (
            f": without fewer of them at most {100 - used:.0f} % of the call's time can go, less than the floor allows"
        )
    return None


def share_of_the_call(case: Case, busy_pct: float) -> float | None:
    """Percent of the call's time that these instructions take by themselves: less where SMs idle or other kernels run."""
    average, most, share = case.m.get("cycles_active"), case.m.get("cycles_active_most"), case.main["share_pct"]
    return busy_pct * average / most * share / 100 if average and most and share else None


def the_problems_own(case: Case) -> set[str]:
    """The pipes whose work cannot become less: that of a problem which arithmetic bounds is the floor itself."""
    vectors = {"fma pipe", "fp64 pipe"} if case.floor and case.floor["bound"] == "compute" else set()
    return {"tensor pipe"} | vectors


def starved_tensor_pipe(case: Case) -> Iterator[dict]:
    """A problem that the tensor pipe bounds, in a kernel that uses it and leaves it idle most of the time."""
    tensor = case.m.get("tensor_cycles")
    if not case.floor or case.floor["bound"] != "compute" or tensor is None:
        return
    if case.limits["tensor_idle_pct"] <= tensor < case.limits["tensor_busy_pct"]:
        yield finding(
            "starved_tensor_pipe",
            gain_of(case, 100 - tensor),
            [("tensor_cycles", tensor, "%"), ("share of the floor", case.floor["share_pct"], "%")],
            f"arithmetic bounds the problem, and the tensor pipe works in {tensor:.0f} % of the cycles",
            [
                "feed it: larger tiles, more stages, bulk copies (TMA) by one warp in place of pointers, no masks in the loop, "
                "softmax or epilogue under the product of another tile"
            ],
            "tensor-cores.md",
            "tensor_cycles rise and the time does not fall",
        )


def unused_tensor_cores(case: Case) -> Iterator[dict]:
    """A matrix problem that does its arithmetic elsewhere, and more of it than the vector units do beside the least bytes."""
    work, limits = case.work, case.limits
    tensor = [kernel["metrics"].get("tensor_cycles") for kernel in case.kernels]
    if not work or work["dtype"] not in ("bf16", "fp16", "fp8") or None in tensor:
        return
    intensity = work["flops"] / work["bytes_min"]
    used = max(tensor) >= limits["tensor_idle_pct"] or case.tile_instruction
    if intensity >= limits["vector_intensity"] and not used:
        yield finding(
            "tensor_cores_unused",
            gain_of(case, beside_dram(case.m)),
            [
                ("tensor_cycles, busiest kernel", max(tensor), "%"),
                ("FLOPs of matrix products", work["flops"], "FLOP"),
                ("arithmetic intensity", intensity, "FLOP/byte"),
            ],
            "the problem is a matrix product in a tensor-core dtype, too much for the vector units, and the tensor pipe is idle",
            ["tl.dot on 16-bit operands with fp32 accumulation, K at least 16; for wgmma or tcgen05 64 rows, 4 warps"],
            "tensor-cores.md",
            "the SASS shows HMMA, HGMMA or UTCHMMA in the hot loop",
        )


def mma_sync_alone(case: Case) -> Iterator[dict]:
    """A matrix product by the tensor instructions of Ampere on a GPU that has wgmma (9) or tcgen05 (10, 11)."""
    m = case.m
    if (major := m.get("compute_capability")) not in NEWER_THAN_MMA_SYNC:
        return
    id_, newer, name, sass = NEWER_THAN_MMA_SYNC[major]
    tensor = m.get("tensor_cycles")
    if m.get(newer) != 0 or tensor is None or not m.get("hmma_instructions"):
        return
    if tensor >= case.limits["tensor_idle_pct"]:
        yield finding(
            id_,
            None,
            [(newer, 0.0, "%"), ("hmma_instructions", m["hmma_instructions"], "%"), ("tensor_cycles", tensor, "%")],
            f"the product runs on mma.sync and not on {name}, which alone reaches the peak of such a GPU",
            [f"tiles of at least 64 rows and 4 warps, so that Triton takes {name}; both operands from shared memory"],
            "tensor-cores.md",
            f"the SASS shows {sass} in the hot loop (extract_asm.py)",
        )


def divergence(case: Case) -> Iterator[dict]:
    """Warps that run instructions for few of their threads, where instructions matter."""
    threads = case.m.get("threads_per_instruction")
    if case.judged["class"] not in ("compute", "latency") or threads is None:
        return
    if threads < case.limits["threads_per_instruction"]:
        yield finding(
            "divergent_warps",
            gain_of(case, 100 * (1 - threads / 32)),
            [("threads_per_instruction", threads, "thread")],
            f"an instruction works for {threads:.1f} of 32 threads",
            ["branches that whole warps take; masks in place of branches; sorted or regrouped work"],
            "latency-hiding.md",
            "threads per instruction rise and the time does not fall",
        )


def stalls(case: Case) -> Iterator[dict]:
    """What warps wait for most, unless the limiter explains it: the cause where latency limits, else a second opinion."""
    if case.judged["class"] in ("underutilized", "unknown"):
        return
    explained = EXPLAINED.get(case.judged["limiter"], set())
    if case.judged["limiter"] == "tensor pipe" and case.m["tensor_cycles"] < case.limits["saturated_pct"]:
        explained = set()
    shares = {stall: share for stall, share in stall_shares(case.m).items() if stall not in explained}
    stall = max(shares, key=shares.get, default=None)
    if stall is None or shares[stall] <= case.limits["dominant_stall_pct"]:
        return
    inference, action = (TILE_ADVICE if case.tile_instruction else {}).get(stall, STALL_ADVICE[stall])
    doubtful = case.tile_instruction and stall == "stall_barrier"
    yield finding(
        stall,
        None if doubtful else gain_of(case, min(shares[stall], room(case.m))),
        [(stall, case.m[stall], "warp/issue"), ("warp_latency", case.m["warp_latency"], "cycle")],
        f"{shares[stall]:.0f} % of warp latency: {inference.format(case.tile_instruction)}",
        [action],
        "latency-hiding.md",
        "the stall shrinks and the time does not",
    )


RULES: tuple[Callable[[Case], Iterator[dict]], ...] = (  # of equal gains the first one leads: a cause before a symptom
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
