"""Is a time below what the hardware allows? The least work of a problem, compared with the documented peaks."""

import ast
import contextlib
import time
from collections.abc import Mapping
from pathlib import Path

from ..device import gpu
from ..device.sandbox import Sandbox
from ..errors import EnvironmentLacks, Refused, say
from ..hardware import roofline
from ..hardware.work import CountedWorkload, Work
from ..session import platforms
from ..session.source_names import assigned
from ..session.subject import KernelUnderTest
from ..session.task import Task
from .cases import result_of_reference


def counted_work(
    reference: Path, dtype: str | None, cache: Path | None, timeout_s: float
) -> dict[str, CountedWorkload]:
    """Least work per workload (worker.work.estimate). From shapes alone, so that no GPU is needed; a task that changes
    inputs is run for real, on the GPU where one is free. Refused when the reference fails."""
    deadline = time.monotonic() + timeout_s
    if changes_inputs(reference) and gpu.device_here() == "cuda":
        try:  # 2 GiB took 45 and 70 s on the processors of two H200s' hosts
            with Sandbox("cuda", cache, wait_s=0) as sandbox:
                return counted_in(sandbox, reference, dtype, timeout_s)
        except (EnvironmentLacks, Refused, OSError) as error:
            say(f"the reference runs on the CPU, not on the GPU: {error}")
    with Sandbox("cpu-interpreter", cache) as sandbox:
        return counted_in(sandbox, reference, dtype, max(1.0, deadline - time.monotonic()))


def changes_inputs(reference: Path) -> bool:
    """Does the file declare MUTATES?"""
    with contextlib.suppress(OSError, ValueError, SyntaxError):  # the worker says what is wrong with it
        return "MUTATES" in dict(assigned(ast.parse(reference.read_bytes())))
    return False


def counted_in(sandbox: Sandbox, reference: Path, dtype: str | None, timeout_s: float) -> dict[str, CountedWorkload]:
    """`counted_work` in a sandbox that is open already, whose worker need not start again."""
    arguments = {"reference": str(reference.resolve()), "dtype": dtype, "workloads": None}
    counted = result_of_reference(sandbox.run("estimate", arguments, timeout_s))["workloads"]
    return {name: CountedWorkload.from_json(answer) for name, answer in counted.items()}


def limit_us(
    sandbox: Sandbox, target: KernelUnderTest, workload: str, timeout_s: float, given: Mapping | None = None
) -> float | None:
    """roofline.physical_limit_us of a workload on the sandbox's GPU; None when its page is unknown.

    The work is that of the workspace's Task block, which a user may have set by hand, or else counted. given: figures
    by hand in its place, as Work.given takes them.
    """
    workspace = target.workspace
    task = workspace.task() if workspace else None
    page = platforms.page_of(sandbox.gpu.name, workspace, task)
    if page is None:
        return None
    work = work_of(sandbox, target, task, workload, timeout_s)
    if work is None:
        return None
    work = work.given(**(given or {}))
    with contextlib.suppress(Refused):
        roof = roofline.roof_for(page, work)
        return roofline.physical_limit_us(work.flops, work.bytes_min, roof, sandbox.gpu.max_clocks)
    return None


def work_of(
    sandbox: Sandbox, target: KernelUnderTest, task: Task | None, workload: str, timeout_s: float
) -> Work | None:
    """The work of a workload: that of the Task block where it has any, or else counted; None for an unknown
    workload."""
    if task and task.work:
        return task.work_of(workload)
    counted = counted_in(sandbox, target.reference, target.dtype, timeout_s).get(workload)
    return counted and counted.work
