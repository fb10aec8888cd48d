"""What happened when on the GPU and the host during some calls: stages, gaps, overlap, cost of the API. Pure functions.

A timeline is {source, calls: [{start_us, us}], kernels: [{name, start_us, us, stream, grid, block, registers, shared_bytes}],
api: [{name, start_us, us}]}, made by profilers/torch_trace.py or profilers/nsys.py. Copies and fills count as kernels.
"""

import statistics

from ..errors import Refused
from ..intervals import busy_us, span_us

GAP_US = 1.0  # a pause of that and more between two kernels is told


def analyse(timeline: dict) -> dict:
    """{calls, stages, span_us, busy_us, idle_pct, overlap_us, gaps, api} of a timeline; times are medians over the calls.

    span: from the start of a call's first kernel to the end of its last. busy: at least one kernel runs. overlap: at least
    two do. Refused when there is no kernel.
    """
    calls = per_call(timeline)
    if not calls:
        raise Refused("the timeline holds no kernel: does the call launch one?")
    spans = [span_us(kernels) for kernels in calls]
    busy = [busy_us(kernels) for kernels in calls]
    overlap = [max(0.0, sum(k["us"] for k in kernels) - b) for kernels, b in zip(calls, busy, strict=True)]
    return {
        "calls": len(calls),
        "stages": stages(calls),
        "span_us": statistics.median(spans),
        "busy_us": statistics.median(busy),
        "idle_pct": 100 * (1 - sum(busy) / sum(spans)) if sum(spans) else None,
        "overlap_us": statistics.median(overlap),
        "streams": len({kernel["stream"] for kernels in calls for kernel in kernels}),
        "gaps": gaps(calls),
        "api": api_cost(timeline, len(calls)),
    }


def per_call(timeline: dict) -> list[list[dict]]:
    """The kernels of each call, in the order of their start; one list when the calls were not marked."""
    kernels = sorted(timeline["kernels"], key=lambda kernel: kernel["start_us"])
    starts = sorted(call["start_us"] for call in timeline["calls"]) or [float("-inf")]
    bounds = [*starts[1:], float("inf")]
    found = [[k for k in kernels if a <= k["start_us"] < b] for a, b in zip(starts, bounds, strict=True)]
    return [kernels for kernels in found if kernels]


def stages(calls: list[list[dict]]) -> list[dict]:
    """[{name, launches, us, share_pct, stream, grid, block, registers, shared_bytes}] in launch order; us is a call's total."""
    names = list(dict.fromkeys(kernel["name"] for kernels in calls for kernel in kernels))
    total = sum(kernel["us"] for kernels in calls for kernel in kernels)
    found = []
    for name in names:
        own = [[kernel for kernel in kernels if kernel["name"] == name] for kernels in calls]
        first = next(kernel for kernels in own for kernel in kernels)
        found.append(
            {
                "name": name,
                "launches": statistics.median(map(len, own)),
                "us": statistics.median(sum(kernel["us"] for kernel in kernels) for kernels in own),
                "share_pct": 100 * sum(kernel["us"] for kernels in own for kernel in kernels) / total
                if total
                else None,
                **{key: first[key] for key in ("stream", "grid", "block", "registers", "shared_bytes")},
            }
        )
    return found


def gaps(calls: list[list[dict]]) -> list[dict]:
    """[{after, before, us}]: pauses between one kernel's end and the next one's start, medians over the calls, longest
    first."""
    found: dict[tuple[str, str], list[float]] = {}
    for kernels in calls:
        end, last = float("-inf"), None
        for kernel in kernels:
            if last is not None:
                found.setdefault((last, kernel["name"]), []).append(kernel["start_us"] - end)
            if kernel["start_us"] + kernel["us"] > end:
                end, last = kernel["start_us"] + kernel["us"], kernel["name"]
    medians = [{"after": a, "before": b, "us": statistics.median(times)} for (a, b), times in found.items()]
    return sorted((gap for gap in medians if gap["us"] >= GAP_US), key=lambda gap: -gap["us"])


def api_cost(timeline: dict, calls: int) -> list[dict]:
    """[{name, count, us}] of the CUDA calls that the host made in the kernel's calls, for one of these on average, dearest
    first."""
    found: dict[str, list[float]] = {}
    inside = [(call["start_us"], call["start_us"] + call["us"]) for call in timeline["calls"]]
    for event in timeline["api"]:
        if inside and not any(start <= event["start_us"] < end for start, end in inside):
            continue  # waiting for the GPU between the calls, which the profiling does
        found.setdefault(event["name"], []).append(event["us"])
    costs = [{"name": name, "count": len(us) / calls, "us": sum(us) / calls} for name, us in found.items()]
    return sorted(costs, key=lambda cost: -cost["us"])
