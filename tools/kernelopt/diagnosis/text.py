"""Profiles, metrics and findings in words, for people and for agents. Pure."""

from collections.abc import Callable

from ..profilers import rocprof
from ..profilers.profile import Profile
from .diagnosis import Diagnosis, Finding


def number(value: float | None) -> str:
    """A value for people: None is "not collected", large values have no decimals."""
    if value is None:
        return "not collected"
    return f"{value:,.0f}" if abs(value) >= 999.5 or value == int(value) else f"{value:.3g}"


def metric_value(diagnosis: Diagnosis, key: str, value: float | None, write: Callable = number) -> str:
    """A metric's value as `write` gives it; "not on sm_90" where no GPU of this architecture has the metric."""
    if value is None and key in diagnosis.not_on_architecture:
        return f"not on {diagnosis.architecture}"
    return write(value)


def origin(profile: Profile) -> str:
    """Where and when a profile was recorded. Every output that shows the profile includes it."""
    if profile.is_amd:
        return rocprof.ORIGIN
    if profile.params is None:
        return "recorded elsewhere, no params.json beside it"
    params = profile.params
    return f"recorded on {params.device}, {params.timestamp}, kernel {params.version} ({params.kernel_sha256[:10]})"


def summary_line(diagnosis: Diagnosis) -> str:
    """ "memory (dram): memory throughput 91 %; …, of kernel `x`" """
    return f"{bottleneck_line(diagnosis)}, of kernel `{diagnosis.longest}`"


def bottleneck_line(diagnosis: Diagnosis) -> str:
    """ "memory (dram): memory throughput 91 %; …" """
    judged = diagnosis.classification
    limiter = f" ({judged.limiter})" if judged.limiter else ""
    return f"{judged.bottleneck}{limiter}: {'; '.join(judged.reasons)}"


def evidence(finding: Finding) -> str:
    return ", ".join(f"{row.metric} = {number(row.value)} {row.unit}" for row in finding.evidence)


def gain(finding: Finding) -> str:
    """ "gain unknown" or "at most 4.8 % of the time" """
    pct = finding.estimated_gain_pct
    return "gain unknown" if pct is None else f"at most {pct} % of the time"


def finding_lines(finding: Finding) -> list[str]:
    pct = finding.estimated_gain_pct
    gained = "unknown" if pct is None else f"at most {pct} % of the time"
    return [
        f"- **{finding.id}** ({finding.severity}, gain {gained}): {evidence(finding)}",
        f"  - inference: {finding.inference}",
        *(f"  - try: {action}" for action in finding.actions),
        f"  - read: {finding.wiki}",
        f"  - falsified if: {finding.falsified_by}",
    ]
