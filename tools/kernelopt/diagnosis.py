"""From counters to what limits a kernel, why, and what to try. Pure functions.

Input is a profile: {kernels: [{name, duration_us, metrics}], work: {flops, bytes_min, dtype} or None}. A metric that
was not collected is None and never counts as 0; with no counters at all the classification is `unknown`.
"""

import math
import re
from collections.abc import Callable

PIPES = {  # what can be the limiter when the SM itself is the busiest unit
    "fma_cycles": "fma pipe",
    "alu_cycles": "alu pipe",
    "fp64_cycles": "fp64 pipe",
    "xu_instructions": "xu pipe",
    "lsu_instructions": "lsu pipe",
    "tensor_cycles": "tensor pipe",
}
MEMORY_UNITS = {"dram_throughput": "dram", "l2_throughput": "l2", "l1_throughput": "l1"}
OCCUPANCY_LIMITS = ("limit_registers", "limit_shared_memory", "limit_warps", "limit_blocks")
STALL_ADVICE = {
    "stall_long_scoreboard": (
        "loads from global memory are waited for",
        "more bytes in flight: wider loads, more independent loads per thread, num_stages",
    ),
    "stall_short_scoreboard": (
        "shared memory or special functions are waited for",
        "remove bank conflicts; fewer exp/log per element",
    ),
    "stall_barrier": ("warps wait for each other", "fewer barriers, smaller blocks, evenly divided work"),
    "stall_mio_throttle": ("the shared-memory queue is full", "wider shared-memory accesses, values kept in registers"),
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


def analyse(profile: dict, limits: dict[str, float]) -> dict:
    """{kernels, classification, metrics, missing_metrics, findings, second_opinion, warnings} of a profile; findings best first;
    second_opinion: what NVIDIA's own rules say of the longest kernel.

    limits: the thresholds (metrics.thresholds).
    """
    kernels = shares(profile["kernels"])
    main = max(kernels, key=lambda kernel: kernel["share_pct"] or 0)
    work = profile.get("work")
    judgements = [classify(kernel["metrics"], limits) for kernel in kernels]
    classification = judgements[kernels.index(main)]
    found = [finding for rule in RULES for finding in rule(kernels, main, work, classification, limits)]
    found.sort(key=lambda finding: -(finding["estimated_gain_pct"] or 0))
    absent = sorted({key for kernel in kernels for key, value in kernel["metrics"].items() if value is None})
    return {
        "kernels": [
            {
                "name": kernel["name"],
                "share_pct": kernel["share_pct"],
                "duration_us": kernel["duration_us"],
                **{name: value for name, value in judged.items() if name != "reasons"},
            }
            for kernel, judged in zip(kernels, judgements, strict=True)
        ],
        "classification": {"of": main["name"], **classification},
        "metrics": main["metrics"],
        "missing_metrics": absent,
        "findings": found,
        "second_opinion": main.get("rules", []),
        "warnings": warnings(kernels, main),
    }


# What a report of the wrong launch holds: torch's random numbers, fills and copies, and the trials of an autotuner.
BYSTANDERS = re.compile(r"distribution_\w*kernel|FillFunctor|copy_kernel|elementwise_kernel_with_index|[Mm]em(cpy|set)")


def warnings(kernels: list[dict], main: dict) -> list[str]:
    """Why this report may not be what it is taken for. Pure."""
    said = []
    if BYSTANDERS.search(main["name"]):
        said.append(
            f"the longest kernel, {main['name'][:60]}, makes, fills or copies data: is this the kernel that was meant?"
        )
    odd = [key for key, value in main["metrics"].items() if key.endswith("_throughput") and value and value > 105]
    if odd:
        said.append(f"above 100 % of a peak: {', '.join(odd)}; the passes of the profiler saw different runs")
    names = [kernel["name"] for kernel in kernels]
    if len(names) > len(set(names)):
        said.append(
            "one kernel appears several times: launches of several calls, or an autotuner's trials, count together"
        )
    return said


def shares(kernels: list[dict]) -> list[dict]:
    """Kernels with their share of the call's GPU time; None where a duration is unknown."""
    times = [kernel["duration_us"] for kernel in kernels]
    total = sum(times) if all(time is not None for time in times) else None
    return [{**k, "share_pct": 100 * k["duration_us"] / total if total else None} for k in kernels]


def classify(m: dict, limits: dict) -> dict:
    """{class, limiter, reasons} of one kernel: the unit with the highest utilisation is the limiter."""
    tensor, memory, sm = m.get("tensor_cycles"), m.get("memory_throughput"), m.get("sm_throughput")
    if memory is None or sm is None:
        absent = [key for key in ("sm_throughput", "memory_throughput") if m.get(key) is None]
        return {"class": "unknown", "limiter": None, "reasons": [f"not collected: {', '.join(absent)}"]}
    if tensor is not None and tensor >= limits["tensor_busy_pct"]:
        return {
            "class": "compute",
            "limiter": "tensor pipe",
            "reasons": [f"tensor pipe active {tensor:.1f} % of cycles"],
        }
    reasons = [f"memory throughput {memory:.1f} %", f"SM throughput {sm:.1f} %"]
    if max(memory, sm) < limits["idle_pct"]:
        return idle_class(m, reasons, limits)
    if max(memory, sm) < limits["saturated_pct"] and abs(memory - sm) < limits["dominance_points"]:
        return {"class": "balanced", "limiter": None, "reasons": reasons}
    if memory >= sm:
        unit = busiest_memory(m, limits)
        return {"class": "memory", "limiter": MEMORY_UNITS.get(unit), "reasons": reasons + described(m, MEMORY_UNITS)}
    pipe, issue = busiest(m, PIPES), m.get("issue_active")
    if issue is not None and 100 * issue > (m[pipe] if pipe else 0):
        issued = f"instructions are issued in {100 * issue:.1f} % of cycles"
        return {
            "class": "compute",
            "limiter": "instruction issue",
            "reasons": [*reasons, issued, *described(m, PIPES)[:2]],
        }
    return {"class": "compute", "limiter": PIPES.get(pipe), "reasons": reasons + described(m, PIPES)[:3]}


def idle_class(m: dict, reasons: list[str], limits: dict) -> dict:
    """Neither memory nor compute is busy: is the call too short, is the GPU not filled, or is latency not hidden?"""
    duration = m.get("duration")
    if duration is not None and duration < limits["short_kernel_us"]:
        reason = f"{duration:.1f} us: starting and ending the launch is a good part of that"
        return {"class": "underutilized", "limiter": "launch overhead", "reasons": [*reasons, reason]}
    if (idle := idle_share(m, limits)) is not None:
        reason = f"{m['waves_per_sm']:.2f} waves per SM: the grid leaves {idle:.0%} of the GPU without work"
        return {"class": "underutilized", "limiter": "small grid", "reasons": [*reasons, reason]}
    stall, share = top_stall(m)
    if stall:
        label = stall.removeprefix("stall_").replace("_", " ")
        return {
            "class": "latency",
            "limiter": label,
            "reasons": [*reasons, f"{share:.0f} % of warp latency is {label}"],
        }
    return {"class": "latency", "limiter": None, "reasons": [*reasons, "warp stalls were not collected"]}


def busiest_memory(m: dict, limits: dict) -> str | None:
    """DRAM once it is saturated: what streams through DRAM keeps the L2 at least as busy, and DRAM gives less
    than 100 % of its peak (a plain copy on an H200 reaches about 90 %). Else the busiest unit."""
    dram = m.get("dram_throughput")
    return "dram_throughput" if dram is not None and dram >= limits["saturated_pct"] else busiest(m, MEMORY_UNITS)


def busiest(m: dict, units: dict) -> str | None:
    known = [key for key in units if m.get(key) is not None]
    return max(known, key=lambda key: m[key]) if known else None


def described(m: dict, units: dict) -> list[str]:
    known = sorted((key for key in units if m.get(key) is not None), key=lambda key: -m[key])
    return [f"{units[key]} {m[key]:.1f} %" for key in known]


def idle_share(m: dict, limits: dict) -> float | None:
    """The share of the SMs' time that less than a wave of blocks leaves idle; None when the grid fills the GPU.

    Less than a wave may still put a block on each SM: then the SMs work equally long, and only occupancy is low.
    """
    waves, average, most = (m.get(key) for key in ("waves_per_sm", "cycles_active", "cycles_active_most"))
    if waves is None or waves >= 1:
        return None
    if not average or not most:
        return 1 - waves
    return 1 - average / most if most / average > limits["imbalance_ratio"] else None


def top_stall(m: dict) -> tuple[str | None, float]:
    """The stall with most warps, and its share of the warp latency in percent."""
    known = [key for key in STALL_ADVICE if m.get(key) is not None]
    total = m.get("warp_latency")
    if not known or not total:
        return None, 0.0
    top = max(known, key=lambda key: m[key])
    return top, 100 * m[top] / total


# --- findings: evidence -> inference -> action. Each rule yields what it can prove from the counters. -------------


def finding(
    id_: str, gain: float | None, evidence: list, inference: str, actions: list[str], wiki: str, falsified_by: str
) -> dict:
    """One finding; `gain` is the share of the call's time in percent that it could save at most, None unknown."""
    severity = "info" if gain is None else "high" if gain >= 20 else "medium" if gain >= 5 else "low"
    return {
        "id": id_,
        "severity": severity,
        "estimated_gain_pct": None if gain is None else round(gain, 1),
        "evidence": [{"metric": metric, "value": value, "unit": unit} for metric, value, unit in evidence],
        "inference": inference,
        "actions": actions,
        "wiki": f"gpu-wiki/docs/optimization/{wiki}",
        "falsified_by": falsified_by,
    }


def excess_traffic(kernels, main, work, classification, limits):
    """More bytes through DRAM than the problem needs: where memory limits, or where so many that the L2 keeps nothing."""
    moved = [k["metrics"].get(key) for k in kernels for key in ("dram_bytes_read", "dram_bytes_written")]
    if not work or None in moved:
        return
    ratio, in_memory = sum(moved) / work["bytes_min"], classification["class"] == "memory"
    busy = main["metrics"].get("dram_throughput") or 0.0
    if not in_memory and (ratio < limits["missed_reuse_ratio"] or busy < limits["relevant_dram_pct"]):
        return
    evidence = [
        ("dram bytes, all kernels of the call", sum(moved), "byte"),
        ("least bytes of the problem", work["bytes_min"], "byte"),
    ]
    if ratio >= limits["excess_traffic_ratio"]:
        yield finding(
            "excess_dram_traffic",
            100 * (1 - 1 / ratio) if in_memory and classification["limiter"] == "dram" else None,
            evidence,
            f"the call moves {ratio:.2f} times the least bytes"
            + (
                "; caches are flushed before each kernel, so traffic that the L2 would have served counts too"
                * (len(kernels) > 1)
            ),
            [
                "read each input once: fuse the passes and keep the row or tile in registers or shared memory",
                "where tiles share inputs: larger tiles, and neighbours in launch order that find them in the L2",
            ],
            "memory-traffic.md",
            "DRAM bytes fall after the change and the time does not",
        )
    elif classification["limiter"] == "dram":
        yield finding(
            "near_least_traffic",
            None,
            [*evidence, ("dram_throughput", main["metrics"]["dram_throughput"], "%")],
            f"DRAM limits the kernel and it moves {ratio:.2f} times the least bytes: little is left to gain",
            ["compare with the Stop Conditions; only fewer bytes (dtype, algorithm) help now"],
            "memory-traffic.md",
            "a copy of the same size runs clearly faster",
        )


def several_kernels(kernels, main, work, classification, limits):
    """A call that is a chain of launches."""
    if len(kernels) > 1 and main["share_pct"] is not None:
        yield finding(
            "several_kernels",
            100 - main["share_pct"],
            [("kernels in the call", len(kernels), "kernel"), ("share of the longest", main["share_pct"], "%")],
            f"{len(kernels)} kernels make up the call; intermediate results go through memory between them",
            ["fuse them into one kernel, so that intermediates stay on chip"],
            "launch-overhead.md",
            "the fused kernel takes as long as the sum of the parts",
        )


def scattered_access(kernels, main, work, classification, limits):
    """Sectors fetched for few useful bytes, where they are a good part of all sectors."""
    sectors = {what: main["metrics"].get(f"{what}_sectors") for what in ("load", "store")}
    if None in sectors.values() or not sum(sectors.values()):
        return
    for what, count in sectors.items():
        used, share = main["metrics"].get(f"{what}_bytes_per_sector"), 100 * count / sum(sectors.values())
        if used and used < limits["low_bytes_per_sector"] and share >= limits["relevant_sectors_pct"]:
            yield finding(
                f"uncoalesced_{what}s",
                gain_of(main, share * (1 - used / 32)) if classification["class"] == "memory" else None,
                [(f"{what}_bytes_per_sector", used, "byte"), (f"share of {what}_sectors", share, "%")],
                f"global {what}s use {used:.1f} of the 32 bytes of each sector",
                [
                    "let neighbouring threads touch neighbouring addresses; transpose through shared memory; where they do, the "
                    "compiler lost the vector width: a stride, offset or mask bound that does not divide by 16"
                ],
                "memory-access.md",
                "bytes per sector rise and the time does not fall",
            )


def local_memory(kernels, main, work, classification, limits):
    """Spills, or arrays indexed at run time."""
    m = main["metrics"]
    local = [m.get(key) for key in ("local_load_sectors", "local_store_sectors")]
    if None in local or not sum(local):
        return
    spills = m.get("spill_instructions")
    others = [m.get(key) for key in ("load_sectors", "store_sectors")]
    share = None if None in others else 100 * sum(local) / (sum(local) + sum(others))
    evidence = [("local sectors", sum(local), "sector"), ("share of all sectors", share, "%")]
    evidence += [
        (key, m.get(key), unit)
        for key, unit in (("spill_instructions", "instruction"), ("registers_per_thread", "register"))
    ]
    gain = gain_of(main, share) if share is not None and classification["class"] in ("memory", "latency") else None
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
    else:
        cause = (
            "registers are spilled, or an array is indexed at run time"
            if spills is None
            else "an array is indexed at run time"
        )
        yield finding(
            "local_memory_traffic",
            gain,
            evidence,
            f"the kernel uses local memory: {cause}",
            ["compile-time indices (unroll the loop over the array), or shared memory"],
            "memory-access.md",
            "extract_asm.py shows neither LDL nor STL",
        )


def bank_conflicts(kernels, main, work, classification, limits):
    """Extra passes over shared memory, unless DRAM or the tensor pipe limits the kernel anyway."""
    if classification["limiter"] in ("dram", "tensor pipe"):
        return
    conflicts, wavefronts = (main["metrics"].get(key) for key in ("shared_bank_conflicts", "shared_wavefronts"))
    if conflicts and wavefronts and 100 * conflicts / wavefronts > limits["bank_conflict_pct"]:
        yield finding(
            "shared_bank_conflicts",
            None,
            [("shared_bank_conflicts", conflicts, "wavefront"), ("shared_wavefronts", wavefronts, "wavefront")],
            f"{100 * conflicts / wavefronts:.0f} % of the passes over shared memory are conflicts",
            ["pad or swizzle the shared-memory layout"],
            "memory-access.md",
            "shared-memory stalls are small: short_scoreboard and mio_throttle do not lead",
        )


def unfilled_gpu(kernels, main, work, classification, limits):
    """Too few blocks, or too few warps to hide latency."""
    m = main["metrics"]
    if classification["limiter"] == "small grid":
        gain = gain_of(main, 100 * idle_share(m, limits))
        evidence = [
            ("waves_per_sm", m["waves_per_sm"], "wave"),
            ("grid_size", m.get("grid_size"), "block"),
            ("cycles_active", m.get("cycles_active"), "cycle"),
            ("cycles_active_most", m.get("cycles_active_most"), "cycle"),
        ]
        yield finding(
            "small_grid",
            gain,
            evidence,
            "the grid leaves SMs without work",
            ["smaller tiles; split the reduction over blocks; several problems in one launch"],
            "occupancy.md",
            "more blocks do not shorten the kernel",
        )
    occupancy = m.get("achieved_occupancy")
    if classification["class"] == "latency" and occupancy is not None and occupancy < limits["low_occupancy_pct"]:
        known = {key: m[key] for key in OCCUPANCY_LIMITS if m.get(key) is not None}
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


def uneven_work(kernels, main, work, classification, limits):
    """A last wave that fills a part of the GPU, or SMs that work longer than others."""
    m, waves = main["metrics"], main["metrics"].get("waves_per_sm")
    if classification["class"] == "underutilized" or not waves:
        return
    average, most = m.get("cycles_active"), m.get("cycles_active_most")
    if average and most and most / average > limits["imbalance_ratio"]:
        yield finding(
            "uneven_work",
            gain_of(main, 100 * (1 - average / most)),
            [
                ("cycles_active_most", most, "cycle"),
                ("cycles_active", average, "cycle"),
                ("waves_per_sm", waves, "wave"),
            ],
            f"the busiest SM works {most / average:.2f} times as long as the average",
            ["blocks of even work; a persistent kernel that takes tiles from a queue; a grid of whole waves"],
            "occupancy.md",
            "even blocks do not shorten the kernel",
        )
    elif waves < limits["few_waves"] and 0 < waves % 1 < 0.5:
        yield finding(
            "partial_last_wave",
            gain_of(main, 100 * (1 - waves / math.ceil(waves))),
            [("waves_per_sm", waves, "wave"), ("grid_size", m.get("grid_size"), "block")],
            f"{waves:.2f} waves: the last one fills {waves % 1:.0%} of the GPU",
            ["a tile size or grid that gives whole waves; a persistent kernel; split the longest dimension"],
            "occupancy.md",
            "a grid of whole waves takes as long per block",
        )


def divergence(kernels, main, work, classification, limits):
    """Warps that run instructions for few of their threads, where instructions matter."""
    threads = main["metrics"].get("threads_per_instruction")
    if (
        threads is not None
        and threads < limits["threads_per_instruction"]
        and classification["class"] in ("compute", "latency")
    ):
        yield finding(
            "divergent_warps",
            gain_of(main, 100 * (1 - threads / 32)),
            [("threads_per_instruction", threads, "thread")],
            f"an instruction works for {threads:.1f} of 32 threads",
            ["branches that whole warps take; masks in place of branches; sorted or regrouped work"],
            "latency-hiding.md",
            "threads per instruction rise and the time does not fall",
        )


def mma_sync_on_hopper(kernels, main, work, classification, limits):
    """A matrix product by the tensor instructions of Ampere on a GPU that has wgmma."""
    m = main["metrics"]
    if m.get("compute_capability") != 9 or m.get("gmma_instructions") != 0:
        return
    tensor = m.get("tensor_cycles")
    if tensor is not None and tensor >= limits["tensor_idle_pct"] and m.get("hmma_instructions"):
        yield finding(
            "mma_sync_on_hopper",
            None,
            [
                ("gmma_instructions", 0.0, "%"),
                ("hmma_instructions", m["hmma_instructions"], "%"),
                ("tensor_cycles", tensor, "%"),
            ],
            "the product runs on mma.sync and not on wgmma, which alone reaches the peak of compute capability 9.0",
            ["tiles of at least 64 rows and 4 warps, so that Triton takes wgmma; both operands from shared memory"],
            "tensor-cores.md",
            "the SASS shows HGMMA in the hot loop (extract_asm.py)",
        )


def dominant_stall(kernels, main, work, classification, limits):
    """What warps wait for, when nothing else is busy."""
    stall, share = top_stall(main["metrics"])
    if classification["class"] == "latency" and stall and share > limits["dominant_stall_pct"]:
        inference, action = STALL_ADVICE[stall]
        yield finding(
            stall,
            gain_of(main, share * (1 - (main["metrics"].get("issue_active") or 0))),
            [(stall, main["metrics"][stall], "warp/issue"), ("warp_latency", main["metrics"]["warp_latency"], "cycle")],
            f"{share:.0f} % of warp latency: {inference}",
            [action],
            "latency-hiding.md",
            "the stall shrinks and the time does not",
        )


def unused_tensor_cores(kernels, main, work, classification, limits):
    """A matrix problem that does its arithmetic elsewhere."""
    tensor = [kernel["metrics"].get("tensor_cycles") for kernel in kernels]
    if not work or not work["flops"] or work["dtype"] not in ("bf16", "fp16", "fp8") or None in tensor:
        return
    if max(tensor) < limits["tensor_idle_pct"]:
        yield finding(
            "tensor_cores_unused",
            None,
            [("tensor_cycles, busiest kernel", max(tensor), "%"), ("FLOPs of matrix products", work["flops"], "FLOP")],
            "the problem is a matrix product in a tensor-core dtype, and the tensor pipe is idle",
            ["tl.dot on 16-bit operands with fp32 accumulation; tiles of at least 16 in each dimension"],
            "tensor-cores.md",
            "the SASS shows HMMA or HGMMA in the hot loop",
        )


def gain_of(main: dict, gain_pct: float) -> float | None:
    """A gain within the main kernel as a share of the whole call."""
    return None if main["share_pct"] is None else gain_pct * main["share_pct"] / 100


RULES: tuple[Callable, ...] = (
    excess_traffic,
    several_kernels,
    scattered_access,
    local_memory,
    bank_conflicts,
    unfilled_gpu,
    uneven_work,
    divergence,
    mma_sync_on_hopper,
    dominant_stall,
    unused_tensor_cores,
)
