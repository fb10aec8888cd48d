"""The sections of the hardware values and of the environment. Pure."""

from collections.abc import Iterator

from ..diagnosis.text import number
from ..session.record import Record
from . import phrases
from .document import Citations, Facts, Table, Text
from .gather import Session


def hardware(session: Session) -> Iterator:
    """The values that the roofs are made of, as the wiki cites them now."""
    if session.roof is None:
        yield Text(f"None: {session.no_roof}.", "note")
    else:
        yield Citations(session.roof.citations())


def environment(session: Session) -> Iterator:
    """GPU and clocks from the records, software from the profiles."""
    if not session.visible:
        yield Text("Nothing is recorded yet.", "note")
        return
    params = [profile.params for profile in session.profiles.values() if profile.params]
    yield Facts(
        [
            ("GPU", listed(record.device for record in session.visible)),
            *((name, listed(getattr(p, name) for p in params)) for name in ("driver", "torch", "profiler", "clocks")),
        ]
    )
    head = ("version", "recorded", "SM clock, MHz", "memory clock, MHz", "power, W", "temperature, C", "throttled by")
    yield Table(head, [state_row(record) for record in session.visible])


def listed(values: Iterator) -> str:
    """What was recorded, each value once."""
    return ", ".join(dict.fromkeys(str(value) for value in values if value)) or phrases.NOT_RECORDED


def state_row(record: Record) -> tuple[str, ...]:
    """The state of the GPU while a version was timed."""
    watched = record.performance.gpu_state or {}
    figures = (watched.get(name) for name in ("sm_clock_mhz", "memory_clock_mhz", "power_w", "temperature_c"))
    reasons = watched.get("throttle_reasons")
    throttled = ", ".join(map(str, reasons)) or "nothing" if isinstance(reasons, list) else phrases.NOT_RECORDED
    return record.version, record.timestamp, *(between(figure) for figure in figures), throttled


def between(figure) -> str:
    """ "1980", or "1755 to 1980": lowest to highest."""
    ends = [figure.get("min"), figure.get("max")] if isinstance(figure, dict) else []
    if not ends or not all(isinstance(end, int | float) for end in ends):
        return phrases.NOT_RECORDED
    low, high = map(number, ends)
    return low if low == high else f"{low} to {high}"
