"""The GPU resources of a candidate's compiled code: registers, local memory, shared memory, occupancy."""

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path

from ..compiling.compiled import Compiled
from ..disassembly import listing_files, ptxas_log
from ..errors import EnvironmentLacks, ToolError
from ..hardware import wiki
from ..profilers import collect, timeline, torch_trace


@dataclass(frozen=True)
class Resources:
    """What the kernel that takes most of a call needs. registers: of a thread. spill_bytes: of local memory a thread,
    the most of any kernel. shared_bytes: of a block. occupancy_pct: theoretical. None: unknown. wgmma_serialized: why
    ptxas runs the wgmma instructions of one of its kernels one after the other; None where it did not say so.
    products_dropped: of a probe, see probes.left_out."""

    kernel: str | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    occupancy_pct: float | None = None
    wgmma_serialized: str | None = None
    products_dropped: str | None = None

    def to_json(self) -> dict:
        return dict(vars(self))


@dataclass(frozen=True)
class CompiledCall:
    """The compiled code that a call uses. triton_spills: of each compiled kernel, registers of 4 bytes a thread, None
    unknown. extensions: files of CUDA C++. printed: by their compiler."""

    triton_spills: tuple[int | None, ...]
    extensions: tuple[Path, ...]
    printed: str

    @classmethod
    def from_json(cls, answer: dict) -> "CompiledCall":
        """The worker's answer to the order `describe`."""
        spills = tuple(one["spills"] for kernel in answer["triton"] for one in kernel["compiled"] or [])
        return cls(spills, tuple(map(Path, answer["extensions"])), answer["printed"])


def of_call(call: CompiledCall, trace: Path, product: wiki.Page | None) -> Resources:
    """The resources of a call. trace: its Chrome trace. product: the wiki page of the GPU, or None."""
    spills, serialized = spill_bytes(call), ptxas_log.serialized(call.printed)
    try:
        stages = timeline.analyse(torch_trace.read(trace)).stages
        main = max(stages, key=lambda stage: stage.us)
    except (ToolError, KeyError, ValueError, TypeError):
        return Resources(spill_bytes=spills, wgmma_serialized=serialized)
    threads = main.block and math.prod(main.block)
    occupancy = collect.theoretical_occupancy(product, threads, main.registers, main.shared_bytes)
    return Resources(main.name, main.registers, spills, main.shared_bytes, occupancy, serialized)


def of_compiled(compiled: Compiled) -> Resources:
    """What a row shows of a compilation: of the kernel with the most registers; the spills are the most of any. Of CUDA
    C++ the shared memory is unknown, as a launch adds to it."""
    if not compiled.chosen:
        return Resources()
    main = max(compiled.chosen, key=lambda kernel: kernel.registers or 0)
    spills = [kernel.spill_bytes for kernel in compiled.chosen if kernel.spill_bytes is not None]
    serialized = next(filter(None, (kernel.wgmma_serialized for kernel in compiled.chosen)), None)
    most = max(spills, default=None)
    shared = main.shared_bytes if main.warps else None  # CUDA C++ chooses both at the launch
    return Resources(main.name, main.registers, most, shared, main.occupancy_pct, serialized)


def spill_bytes(call: CompiledCall) -> int | None:
    """Bytes of local memory a thread, the most of any kernel: spilled registers and arrays on the stack. None when
    unknown."""
    known = [4 * count for count in call.triton_spills if count is not None]
    for file in call.extensions:
        with contextlib.suppress(EnvironmentLacks, listing_files.Unreadable):
            known += [taken.stack_bytes for taken in listing_files.resources(file)]
    return max(known, default=None)
