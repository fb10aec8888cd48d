"""The section of what remains: open targets, and the diagnosis of the best version's profile. Pure."""

from collections.abc import Iterator

from ..diagnosis import text
from ..diagnosis.diagnosis import Finding, SpeedOfLight
from ..profilers.profile import Profile
from . import phrases
from .document import Facts, Fold, Name, Text
from .gather import Session

TOP = 3  # findings shown of the best version's profile


def remains(session: Session) -> Iterator:
    """Open targets, then what the best version's profile says."""
    still_open = phrases.goal(session).open
    for standing in still_open:
        target = standing.target
        yield Text(f"Open: {target.workload} {target.metric}: {phrases.distance(standing)}.", "bad")
    if not still_open:
        yield Text("No target is open." if session.task.targets else "No targets are set.", "note")
    best = session.best
    if best is None:
        return
    if session.diagnosis is None:
        yield Text(
            f"{best.version} is {phrases.NOT_PROFILED} (profile_kernel.sh --workspace W --version {best.version}).",
            "note",
        )
        return
    yield from profile_says(session)


def profile_says(session: Session) -> Iterator:
    """The diagnosis of the best version's profile."""
    best, diagnosis = session.best, session.diagnosis
    profile = session.profiles[best.version]
    params, findings = profile.params, diagnosis.findings
    if params and params.kernel_sha256 != best.kernel_sha256:
        yield Text(f"The profile in profiles/{best.version} is of another kernel.", "bad")
    yield Facts(
        [
            (f"Profile of {best.version}", text.origin(profile)),
            ("Longest kernel", Name(diagnosis.longest)),
            ("Bottleneck", text.bottleneck_line(diagnosis)),
            ("Under the profiler", profiler_time(profile)),
            ("Stop?", stop_line(diagnosis.speed_of_light)),
        ]
    )
    if findings:
        yield Text("Rules that fired on its metrics; their gains are estimates that nothing measured:")
    else:
        yield Text("No rule fired on its metrics.", "note")
    for finding in findings[:TOP]:
        yield Fold(f"{finding.id} ({finding.severity}, {text.gain(finding)})", [Facts(finding_facts(finding))])
    if len(findings) > TOP:
        yield Text(f"{len(findings) - TOP} more; analyze_profile.py lists them all.", "note")


def profiler_time(profile: Profile) -> str:
    if profile.total_us is None:
        return phrases.UNKNOWN
    return f"{profile.total_us:.2f} us in kernels, which is not the measured latency"


def stop_line(light: SpeedOfLight) -> str:
    """ "yes: 95.2 % of the floor, at the copy rate, by the recorded latency …" """
    return f"{'yes' if light.should_stop else 'no'}: {light.reason}"


def finding_facts(finding: Finding) -> list[tuple[str, str]]:
    return [
        ("Evidence", text.evidence(finding)),
        ("Inference", finding.inference),
        ("Try", "; ".join(finding.actions)),
        ("Read", finding.wiki),
        ("Falsified if", finding.falsified_by),
    ]
