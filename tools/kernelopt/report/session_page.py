"""The report of a session as a page of sections. Pure.

gather.py reads the workspace. The report computes nothing but products and differences of recorded values, and says so.
"""

from dataclasses import dataclass

from . import (
    environment_section,
    explorations_section,
    overview,
    phrases,
    put_back_section,
    remains_section,
    rounds_section,
    task_section,
)
from .document import Page, Section
from .gather import Session


def page(session: Session, has_lessons: bool = False) -> Page:
    """The report; a workspace with nothing recorded has one, too. has_lessons: LESSONS lies where the page goes."""
    task = session.task
    asked = (
        task.platform or f"platform {phrases.UNKNOWN}",
        task.framework,
        task.dtype,
        (task.shapes or {}).get("default"),
    )
    explored = (
        [Section("Explorations", list(explorations_section.explorations(session)))] if session.explorations else []
    )
    in_model = [Section("In the model", list(put_back_section.in_model(session)))] if session.put_back else []
    by_itself = [Section("Unattended rounds", list(rounds_section.unattended(session)))] if session.unattended else []
    return Page(
        session.name,
        " · ".join(part for part in asked if part),
        [
            Section("Summary", list(overview.overview(session, has_lessons))),
            Section("Task", list(task_section.asked_for(session))),
            Section("Plots", list(task_section.figures(session))),
            Section("Rounds", list(rounds_section.all_rounds(session))),
            *explored,
            *in_model,
            *by_itself,
            Section("What remains", list(remains_section.remains(session))),
            Section("Hardware values", list(environment_section.hardware(session))),
            Section("Environment", list(environment_section.environment(session))),
        ],
    )


@dataclass(frozen=True)
class Summary:
    """The figures of the report. best: the version, speedup_over_v0: its; None without one. versions: the verdict of
    each unmasked version. masked: how many are masked. gaps: see Session."""

    goal: phrases.Goal
    best: str | None
    speedup_over_v0: phrases.SpeedupOverV0 | None
    versions: dict[str, str]
    masked: int
    gaps: list[str]

    def to_json(self) -> dict:
        """The output of render_report.py --json, without the path of the report."""
        speedup = self.speedup_over_v0 and self.speedup_over_v0.to_json()
        return {**vars(self), "goal": self.goal.to_json(), "speedup_over_v0": speedup}


def summary(session: Session) -> Summary:
    return Summary(
        goal=phrases.goal(session),
        best=session.best.version if session.best else None,
        speedup_over_v0=phrases.speedup_over_v0(session),
        versions={record.version: phrases.verdict(record) for record in session.visible},
        masked=session.masked,
        gaps=session.gaps,
    )
