"""The section of the kernel in its model: what was promised, what came of it, and what was checked. Pure."""

from collections.abc import Iterator

from ..session.put_backs import EAGER, PutBack, Way
from .document import Facts, Table, Text
from .gather import Session

PASSED = {True: "passed", False: "FAILED", None: "not known"}
NO_GPU = "The step was not timed: the checks ran on no GPU."


def in_model(session: Session) -> Iterator:
    result = session.put_back
    kernel = result.version or "A candidate that is not accepted"
    if result.version and session.best and result.version != session.best.version:
        kernel += f" (the best version is {session.best.version} now)"
    yield Text(f"{kernel}, in place of {', '.join(result.paths)} of {result.model}, on {result.device}.")
    if result.where:
        left = f" all of workload {', '.join(result.left_out)}" if result.left_out else " the others"
        yield Text(f"The kernel takes the calls with {result.where}; the original takes{left}.")
    if gain := gain_rows(result):
        yield Facts(gain)
    if times := [*result.ways, *([result.alone] if result.alone else [])]:
        head = ("way of running", "before", "after", "speed-up", "verdict", "memory, MiB")
        yield Table(head, [way_row(way) for way in times])
    else:
        yield Text(NO_GPU if result.is_right else "The step was not timed: the model is not right.", "note")
    checks = [(check.name, PASSED[check.passed], check.detail) for check in result.checks]
    yield Table(("check", "result", "detail"), checks)


def gain_rows(result: PutBack) -> list[tuple[str, str]]:
    """Promised, the kernel's own, the model's."""
    rows, promise = [], result.promise
    if promise:
        most = "unknown" if promise.at_most_pct is None else f"at most {promise.at_most_pct:.1f} % of the step"
        rows.append(("Promised", f"{most}; the part took {promise.share_pct:.1f} %"))
    if result.alone and result.alone.speedup:
        expected = f", so a step {one:.3f}x as fast" if (one := result.expected()) else ""
        rows.append(("Kernel by itself", f"{result.alone.speedup:.3f}x{expected}"))
    eager = result.way(EAGER)
    if eager and eager.speedup:
        rows.append(("Eager step of the model", f"{eager.speedup:.3f}x, {eager.gain_pct:.1f} % of the time"))
    if result.timed:
        before, after = result.best_before, result.best_after
        best = f"{before.before_us / 1000:.3f} ms ({before.name}) without the kernel, {after.after_us / 1000:.3f} ms"
        pays = "so it pays" if result.pays else "so it does not pay"
        rows.append(
            ("Step at best", f"{best} ({after.name}) with it: {before.before_us / after.after_us:.3f}x, {pays}")
        )
    return rows


def way_row(way: Way) -> tuple[str, ...]:
    if way.failed:
        return way.name, "", "", "", f"not timed: {way.failed}", ""
    low, high = way.ci95
    held = "" if way.before_bytes is None else f"{way.before_bytes / 2**20:.0f}, then {way.after_bytes / 2**20:.0f}"
    times = (f"{us / 1000:.3f} ms" for us in (way.before_us, way.after_us))
    return way.name, *times, f"{way.speedup:.3f}x ({low:.3f} to {high:.3f})", way.verdict, held
