"""How long kernels run: (start_us, duration_us) of each, in the order of their starts."""

from collections.abc import Sequence

Span = tuple[float, float]


def span_us(spans: Sequence[Span]) -> float:
    """From the first start to the last end, on all streams; 0 without kernels."""
    return max(start + us for start, us in spans) - min(start for start, _ in spans) if spans else 0.0


def busy_us(spans: Sequence[Span]) -> float:
    """Time in which at least one of them runs."""
    total, end = 0.0, float("-inf")
    for start, us in spans:
        total += max(0.0, start + us - max(start, end))
        end = max(end, start + us)
    return total
