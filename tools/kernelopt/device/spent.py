"""The time that the parts of some work take, which may run beside each other."""

import contextlib
import time

from .. import intervals


class Spent:
    """When each part ran, by its name."""

    def __init__(self):
        self._spans: dict[str, list[intervals.Span]] = {}

    def note(self, part: str, started: float) -> None:
        """A part that began at this time.monotonic() ends now."""
        self._spans.setdefault(part, []).append((started * 1e6, (time.monotonic() - started) * 1e6))

    @contextlib.contextmanager
    def noted(self, part: str):
        """What runs inside is of that part."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.note(part, started)

    def seconds(self) -> dict[str, float]:
        """Time in which at least one run of a part went on, by part, in the order in which they first ended."""
        return {part: intervals.busy_us(sorted(spans)) / 1e6 for part, spans in self._spans.items()}


def took(whole_s: float, parts: dict[str, float]) -> str:
    """'took 51 s: timing 18, kernel 15, oracle 9'"""
    return f"took {whole_s:.0f} s: {', '.join(f'{part} {seconds:.0f}' for part, seconds in parts.items())}"
