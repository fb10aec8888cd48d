"""Where the seconds of an exploration go."""

import contextlib
import time
from collections.abc import Iterator


class Phases:
    """began: when this was made, on the monotonic clock. seconds: of each phase, by name, in the order of their first
    begin."""

    def __init__(self):
        self.began = time.monotonic()
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs inside is of that phase."""
        began = time.monotonic()
        self.seconds.setdefault(name, 0.0)
        try:
            yield
        finally:
            self.seconds[name] += time.monotonic() - began
