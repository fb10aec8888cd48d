"""Plain advice on a profiled step, the first thing first. Pure."""

from collections.abc import Iterator

from .groups import Group
from .step_report import StepReport, WayTime

GAIN = 1.03  # a way of running that is less faster than this is not worth a change
IDLE_PCT = 30.0  # of the step: the host is then what limits it
WORTH_PCT = 3.0  # of the step, that a kernel must be able to save
MOST_UNKNOWN = 3  # groups without a floor that are named
WAYS = {
    "compiled": "torch.compile",
    "tuned": 'torch.compile(mode="max-autotune")',
    "reduced": 'torch.compile(mode="reduce-overhead")',
    "graph": "a CUDA graph of the eager step",
    "compiled_graph": "torch.compile in a CUDA graph",
}
COMPILING = ("compiled", "tuned", "reduced", "compiled_graph")
GRAPHS = ("graph", "tuned", "reduced", "compiled_graph")


def advice(report: StepReport) -> list[str]:
    """Sentences, in the order in which to follow them."""
    if not report.on_gpu:
        return [
            "there is no GPU here: these are times of the CPU's operators, and say nothing of a GPU; cut_problem.py "
            "--group N cuts a part out all the same"
        ]
    return [*first_ways(report), *launch_bound(report), *kernels(report)]


def first_ways(report: StepReport) -> Iterator[str]:
    best = gaining(report)
    if best is None:
        return
    simple = next((way for way in report.ways if way.name == "compiled" and way.is_faster), None)
    text = f"first {WAYS[best.name]}: {best.speedup:.2f}x"
    if simple and simple is not best:
        text += f" ({WAYS['compiled']} by default gives {simple.speedup:.2f}x)"
    yield text


def gaining(report: StepReport) -> WayTime | None:
    """The best other way of running, if it gains enough."""
    best = report.best_way()
    return best if best and best.speedup >= GAIN else None


def launch_bound(report: StepReport) -> Iterator[str]:
    if report.idle_pct < IDLE_PCT:
        return
    graphs = [way for way in report.ways if way.name in GRAPHS and way.is_faster]
    known = max(graphs, key=lambda way: way.speedup, default=None)
    gain = f": {WAYS[known.name]} gives {known.speedup:.2f}x" if known else ""
    yield (
        f"launch-bound: in {report.idle_pct:.0f} % of the eager step the GPU waits for the host, so fewer launches "
        f"help more than faster kernels{gain}"
    )


def kernels(report: StepReport) -> Iterator[str]:
    """The groups that are worth a kernel beside the best way of running, and those that torch.compile fuses."""
    best, fuses = gaining(report), any(way.is_faster and way.name in COMPILING for way in report.ways)
    worth = apart([group for group in report.groups if (report.saved_pct(group, best) or 0) >= WORTH_PCT])
    fused = [group for group in worth if fuses and group.is_fusable]
    own = [group for group in worth if group not in fused]
    if fused:
        yield (
            f"torch.compile already fuses operators like those of {listed(fused)}; compare with the compiled step "
            "before you write a kernel for them"
        )
    if own:
        subject = "this is" if len(own) == 1 else f"these {len(own)} are"
        yield f"{subject} worth a kernel: {listed(own)}, {at_most(report, own, best)}"
    if any(group.floor.library_rate for group in own):
        yield "a floor that is a library's rate bounds no gain; measure_ceiling.py measures one for a problem"
    bare = unknown(report, best, fuses)
    yield from unknown_lines(bare)
    if not own and not bare:
        enough = f"{WAYS[best.name]} is enough" if best else "the step is near what the card gives"
        less = f"no group could save {WORTH_PCT:.0f} % of the step" if not fused else "no other group saves enough"
        yield f"no kernel is worth writing: {less}; {enough}"


def unknown(report: StepReport, best: WayTime | None, fuses: bool) -> list[Group]:
    """The groups without a floor that take enough of the step, and that torch.compile does not fuse."""
    least_us = WORTH_PCT / 100 * (best.us if best else report.step_us)
    bare = [group for group in report.groups if group.floor is None and group.us >= least_us]
    return apart([group for group in bare if not (fuses and group.is_fusable)])


def unknown_lines(bare: list[Group]) -> Iterator[str]:
    """What to do about groups without a floor; the largest are named."""
    forward = [group for group in bare if not group.backward][:MOST_UNKNOWN]
    backward = [group for group in bare if group.backward][:MOST_UNKNOWN]
    if forward:
        yield (
            f"what a kernel could save is UNKNOWN, for want of a floor, of {listed(forward)}; cut_problem.py --group N "
            "cuts one out, and Step 0 counts its floor"
        )
    if backward:
        yield (
            f"what a kernel could save is UNKNOWN of {listed(backward)}: a backward pass has no floor; docs/models.md, "
            "'Training', says what to do"
        )


def at_most(report: StepReport, groups: list[Group], best: WayTime | None) -> str:
    """What the groups could save, of the step as one would run it."""
    eager = [f"{report.saved_pct(group):.0f}" for group in groups]
    if best is None:
        return f"at most {joined(eager)} % of the eager step"
    shares = [f"{report.saved_pct(group, best):.0f}" for group in groups]
    return f"at most {joined(shares)} % of the step with {WAYS[best.name]} ({joined(eager)} % of the eager step)"


def apart(worth: list[Group]) -> list[Group]:
    """Those that save most, without those that lie in another one or around it. What is not known to save anything
    counts by its time."""
    chosen: list[Group] = []
    for group in sorted(worth, key=lambda one: -(one.us if one.saved_us is None else one.saved_us)):
        if not any(overlap(group, other) for other in chosen):
            chosen.append(group)
    return chosen


def overlap(a: Group, b: Group) -> bool:
    """Do two groups share operators?"""
    if a.backward != b.backward:
        return False
    return a.pattern == b.pattern or (a.whole and lies_in(b, a)) or (b.whole and lies_in(a, b))


def lies_in(inner: Group, outer: Group) -> bool:
    return any(path.startswith(f"{around}.") for path in inner.paths for around in outer.paths)


def listed(groups: list[Group]) -> str:
    return joined([f"group {group.number}, {group.name}" for group in groups], "; ")


def joined(parts: list[str], between: str = ", ") -> str:
    """ "11, 7 and 3" """
    return parts[0] if len(parts) == 1 else f"{between.join(parts[:-1])} and {parts[-1]}"
