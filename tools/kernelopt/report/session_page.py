"""The report of a session as a page of sections. Pure.

gather.py reads the workspace. The report computes nothing but products and differences of recorded values, and says so.
"""

from . import environment_section, overview, phrases, remains_section, rounds_section, task_section
from .document import Page, Section
from .gather import Session

LESSONS = "lessons.md"  # what a person or an agent wrote about the session, beside the report


# --- sections -----------------------------------------------------------------------------------------------------


def page(session: Session, has_lessons: bool = False) -> Page:
    """The report; a workspace with nothing recorded has one, too. has_lessons: LESSONS lies where the page goes."""
    task = session.task
    asked = (
        task.platform or f"platform {phrases.UNKNOWN}",
        task.framework,
        task.dtype,
        (task.shapes or {}).get("default"),
    )
    by_itself = [Section("Unattended rounds", list(rounds_section.unattended(session)))] if session.unattended else []
    return Page(
        session.name,
        " · ".join(part for part in asked if part),
        [
            Section("Summary", list(overview.overview(session, has_lessons))),
            Section("Task", list(task_section.asked_for(session))),
            Section("Plots", list(task_section.figures(session))),
            Section("Rounds", list(rounds_section.all_rounds(session))),
            *by_itself,
            Section("What remains", list(remains_section.remains(session))),
            Section("Hardware values", list(environment_section.hardware(session))),
            Section("Environment", list(environment_section.environment(session))),
        ],
    )


def summary(session: Session) -> dict:
    """The figures of the report, for --json."""
    speedup = phrases.speedup_over_v0(session)
    return {
        "goal": phrases.goal(session).to_json(),
        "best": session.best.version if session.best else None,
        "speedup_over_v0": speedup and speedup.to_json(),
        "versions": {record.version: phrases.verdict(record) for record in session.visible},
        "masked": session.masked,
        "gaps": session.gaps,
    }
