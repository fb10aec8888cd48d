"""The jobs by name."""

from . import (
    candidate,
    compiling,
    exploring,
    exported,
    judging,
    model_cut,
    model_profile,
    model_put_back,
    observing,
    preparing,
    profiling,
    rates,
    tensor_probe,
    timing,
    tracing,
)
from .context import Context

JOBS = {
    job.__name__: job
    for job in (
        preparing.estimate,
        preparing.prepare,
        observing.observe,
        judging.check,
        candidate.run,
        profiling.profile,
        profiling.trace,
        timing.measure,
        compiling.compile_only,
        exploring.contest,
        exploring.contest_compiled,
        exploring.judge,
        exported.interface,
        exported.same_bits,
        rates.bandwidth,
        rates.ceiling,
        rates.matmul,
        rates.product_rates,
        tensor_probe.tensor_ceiling,
        tracing.probe,
        model_cut.operators,
        model_cut.cut,
        model_profile.profile_step,
        model_put_back.put_back,
    )
}

# What a process that waits for a request of this job does meanwhile, by the job: a function of the device.
WARM_UPS = {
    judging.check.__name__: judging.warm_up,
    exploring.contest_compiled.__name__: exploring.start_compiler,
}
# What it imports before it starts CUDA, by the job.
IMPORTS = {exploring.contest_compiled.__name__: exploring.import_compiler}

__all__ = ["IMPORTS", "JOBS", "WARM_UPS", "Context"]
