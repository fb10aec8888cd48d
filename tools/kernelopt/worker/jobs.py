"""The jobs by name."""

from . import candidate, clocks, oracle, rates
from .context import Context

JOBS = {
    job.__name__: job
    for job in (
        oracle.estimate,
        oracle.prepare,
        oracle.check,
        candidate.run,
        candidate.profile,
        candidate.trace,
        clocks.measure,
        rates.bandwidth,
        rates.ceiling,
        rates.matmul,
    )
}

__all__ = ["JOBS", "Context"]
