"""The summary of the report: goal, best version, greatest steps, cautions. Pure."""

from collections.abc import Iterator

from ..hardware.roofline import TARGET_SHARE_PCT
from ..session import stop_conditions
from ..session.stop_conditions import Standing
from ..session.task import Target
from . import phrases, plots
from .document import Facts, Link, Table, Text
from .gather import LESSONS, Session

GREATEST = 2  # steps that the summary names


def overview(session: Session, has_lessons: bool) -> Iterator:
    """Four sentences, then the targets and what qualifies them."""
    tone = {True: "good", False: "bad", None: "note"}[phrases.goal(session).met]
    yield Text(f"Goal: {phrases.goal_line(session)}", tone)
    yield Facts(
        [
            ("Asked", asked_line(session)),
            ("Reached", reached_line(session)),
            ("What gave most", steps_line(session)),
            ("What remains", remains_line(session)),
        ]
    )
    for caution in cautions(session):
        yield Text(caution, "note")
    for gap in session.gaps:
        yield Text(f"Left out: {gap}", "bad")
    if standings := phrases.goal(session).standings:
        yield Table(
            ("workload", "metric", "target", "achieved", "state"),
            [target_row(standing) for standing in standings],
        )
    verdicts = [phrases.verdict(record) for record in session.visible]
    counts = ", ".join(f"{verdicts.count(kind)} {kind}" for kind in plots.KINDS if kind in verdicts)
    yield Facts(
        [
            ("Speed-up over v0", phrases.speedup_line(session)),
            ("Versions", counts if verdicts else "nothing is recorded yet"),
            ("Masked", f"{session.masked} left out of this report"),
        ]
    )
    if has_lessons:
        yield Link("What the session taught, in words:", LESSONS)


def target_row(standing: Standing) -> tuple[str, ...]:
    target = standing.target
    achieved = phrases.NOT_RECORDED if standing.achieved is None else f"{standing.achieved:.2f} {target.unit}"
    return (
        target.workload,
        target.metric,
        phrases.wanted(target),
        achieved,
        "met" if standing.met else "NOT met",
    )


def asked_line(session: Session) -> str:
    goals = [goal(target) for target in session.task.targets]
    asked = f"{session.name.removeprefix('Kernel optimisation: ')} on {session.task.platform or phrases.UNKNOWN}"
    return f"{asked}; goal: {', '.join(goals)}." if goals else f"{asked}; no targets are set."


def goal(target: Target) -> str:
    """ "default at least 612 TFLOPS (90 % of measured_bf16_matmul)" """
    bound = "most" if stop_conditions.sign(target.metric) == "<=" else "least"
    return f"{target.workload} at {bound} {phrases.wanted(target)} ({basis(target)})"


def basis(target: Target) -> str:
    """ "90 % of measured_bf16_matmul, a library's rate, which is no floor" """
    share_pct = TARGET_SHARE_PCT if target.share_pct is None else target.share_pct
    parts = (f"{share_pct:g} % of {target.basis.split(':')[0]}", stop_conditions.basis_note(target))
    return ", ".join(filter(None, parts))


def reached_line(session: Session) -> str:
    best = session.best
    if best is None:
        return f"{phrases.no_best(session)}."
    speedup = phrases.speedup_over_v0(session)
    gained = f"speed-up over v0 {phrases.UNKNOWN}"
    if best.version == "v0":
        gained = "the baseline itself"
    elif speedup:
        count = len(speedup.ratios)
        how = "measured in pairs" if count == 1 else f"the product of {count} paired steps"
        gained = f"{speedup.point:.3f}x as fast as v0 ({how})"
    share = f"{phrases.share_name(session)}: {phrases.share_of_floor(best)}"
    return f"{best.version}, median {phrases.latency(best)}; {share}; {gained}."


def steps_line(session: Session) -> str:
    """The accepted steps with the greatest paired ratios, each with its action."""
    links = phrases.chain(session.records, session.best)[0] if session.best else []
    steps = sorted((link for link in links if not link.masked), key=lambda link: -link.deciding[1].speedup)
    lines = [
        f"{link.version}, {link.gained}: " + phrases.one_line(phrases.change_words(link)).rstrip(".")
        for link in steps[:GREATEST]
    ]
    words = "; ".join(lines) or "no step that can be shown"
    return words if words.endswith("…") else f"{words}."


def remains_line(session: Session) -> str:
    if not session.task.targets:
        return "no targets are set."
    if session.best is None:
        return "no version is accepted yet: run_gate.py --version v0 judges the first."
    if not session.kernel_is_best:
        return "kernel.py is another kernel than the accepted one: put that back, or judge this one."
    lines = [
        f"{standing.target.workload} {standing.target.metric}: {phrases.distance(standing)}"
        for standing in phrases.goal(session).open
    ]
    return f"{'; '.join(lines) or 'no target is open'}."


def cautions(session: Session) -> Iterator[str]:
    """What the median and the share of the floor do not say by themselves."""
    if session.best is None:
        return
    version, performance = session.best.version, session.best.performance
    low, high, share = performance.p20_us, performance.p80_us, performance.floor_share_pct
    if low is not None and high is not None:
        spread = 100 * (high - low) / performance.latency_us
        if spread > phrases.WIDE_PCT:
            yield (
                f"The calls of {version} differ: p20 to p80 spans {spread:.1f} % of the median, so the median alone "
                "does not say how long a call takes. Verdicts rest on the paired ratios."
            )
    if share is not None and share > 100 and session.roof and phrases.roof_pairs(session.roof)[0][0] == "measured":
        yield (
            "Above 100 %: the floor is made of rates that other kernels reached (Hardware values); a kernel may pass "
            "them."
        )
