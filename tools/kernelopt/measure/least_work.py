"""Is a time below what the hardware allows? The least work of a problem, compared with the documented peaks."""

import contextlib
from pathlib import Path

from ..device.sandbox import Sandbox
from ..errors import Refused
from ..hardware import roofline
from ..session import platforms, target
from .cases import result_of_reference


def counted_work(reference: Path, dtype: str | None, cache: Path | None, timeout_s: float) -> dict[str, dict]:
    """Least work per workload (worker.work.estimate), from shapes alone, so that no GPU is needed. Refused when the
    reference fails."""
    with Sandbox("cpu-interpreter", cache) as sandbox:
        arguments = {"reference": str(reference.resolve()), "dtype": dtype, "workloads": None}
        return result_of_reference(sandbox.run("estimate", arguments, timeout_s))["workloads"]


def limit_us(what: target.Subject, workload: str, gpu: dict, timeout_s: float) -> float | None:
    """roofline.physical_limit_us of a workload on the GPU that gpu.identify describes; None where its page is not
    known.

    The work is that of the workspace's Task block, where somebody may have given it by hand, or else counted.
    """
    task = what.workspace.task() if what.workspace else {}
    try:
        page = platforms.of_device(gpu["name"], what.workspace)
    except Refused:
        return None
    work = (task.get("work") or counted_work(what.reference, what.dtype, what.cache, timeout_s)).get(workload)
    if work is None:
        return None
    with contextlib.suppress(Refused):
        roof = roofline.roof_for(page, work)
        return roofline.physical_limit_us(work["flops"], work["bytes_min"], roof, gpu["max_clocks"])
    return None
