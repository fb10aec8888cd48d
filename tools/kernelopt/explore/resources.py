"""The GPU resources of a candidate's compiled code: registers, local memory, shared memory, occupancy."""

import contextlib
import math
import re
import subprocess
from pathlib import Path

from ..device import programs
from ..errors import ToolError
from ..hardware import wiki
from ..profilers import collect, timeline, torch_trace
from .entrants import Entrant

TRACE_S = 60.0
DUMP_S = 60.0
USAGE = re.compile(r"Function (\S+):\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


def describe(entrant: Entrant, trace: Path, product: wiki.Page | None) -> None:
    """Put registers, spill_bytes, shared_bytes and occupancy_pct of the kernel that takes most of a call's time into
    `resources`. product: the wiki page of the GPU, or None."""
    status, error = entrant.status, entrant.error
    answer = entrant.ask(TRACE_S, do="describe", trace=str(trace))
    entrant.status, entrant.error = status, error  # a trace that fails says nothing of the kernel
    if answer is None:
        return
    with contextlib.suppress(ToolError, KeyError, ValueError, TypeError):
        stages = timeline.analyse(torch_trace.read(trace)).stages
        main = max(stages, key=lambda stage: stage.us)
        threads = main.block and math.prod(main.block)
        entrant.resources = {
            "kernel": main.name,
            "registers": main.registers,
            "shared_bytes": main.shared_bytes,
            "occupancy_pct": collect.theoretical_occupancy(product, threads, main.registers, main.shared_bytes),
        }
    entrant.resources["spill_bytes"] = spill_bytes(answer)


def spill_bytes(answer: dict) -> int | None:
    """Bytes of local memory a thread, the most of any kernel: spilled registers and arrays on the stack. None when
    unknown."""
    triton = [one["spills"] for kernel in answer["triton"] for one in kernel["compiled"] or []]
    known = [4 * count for count in triton if count is not None]
    for file in answer["extensions"]:
        known += [stack + local for stack, local in local_memory(Path(file))]
    return max(known) if known else None


def local_memory(extension: Path) -> list[tuple[int, int]]:
    """[(stack, local bytes a thread)] of the kernels in a shared library; empty where cuobjdump is not installed."""
    program = programs.find("cuobjdump")
    if program is None:
        return []
    try:
        done = subprocess.run([program, "-res-usage", str(extension)], capture_output=True, text=True, timeout=DUMP_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [(int(stack), int(local)) for _, _, stack, _, local in USAGE.findall(done.stdout + done.stderr)]
