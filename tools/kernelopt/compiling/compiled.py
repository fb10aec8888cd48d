"""A kernel as it was compiled for a GPU that need not be here: registers, spills, shared memory, errors.

Pure functions and types; compiler.py compiles.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..hardware.targets import Target
from ..statuses import Status

Key = tuple[str, tuple[tuple[str, str], ...], str | None]
PLACE = re.compile(r"(\w+: )?at \d+:\d+:$")  # Triton's; lines of the source follow, one with a caret, and why
COMPILERS_WORD = re.compile(r"\berror\s*: ")
INPUT = re.compile(r"^ptxas\S* \S+, line \d+; ")


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """One kernel, or one configuration of an autotuned one. None: unknown.

    arch: as the listing names it. constants: compile-time arguments. status, error: LAUNCH_ERROR where a block needs
    more memory than the GPU has, COMPILE_ERROR where the compiler refuses this configuration.

    Of a thread: registers, on AMD vector registers, those for accumulation among them; stack_bytes, the local memory
    for spills and arrays; spill_bytes, the same where the compiler spills registers, or else 0; spilled_registers, the
    vector registers that AMD's compiler counts. Of a block: shared_bytes, of CUDA C++ without what a launch adds;
    tensor_memory_columns; warps, on AMD waves.

    stages: of Triton's software pipeline. tensor_instructions: opcode -> count. access_bits: class of access -> bits
    that a thread moves -> count. bulk_copies: TMA and the like -> count. has_dot: Triton's source multiplies matrices;
    None for CUDA C++. dot_types: of their elements in Triton's representation, as "f8E4M3FN". remarks: what stands out
    in the code, by id. files: what was compiled, while the sandbox is open.

    occupancy_pct: theoretical. limiters: what allows the fewest blocks. occupancy_error: why it is unknown.
    waves_per_simd: by AMD's compiler, which knows no dynamic shared memory.
    """

    name: str
    arch: str | None = None
    configuration: str | None = None
    constants: dict[str, str] = field(default_factory=dict)
    status: Status = Status.OK
    error: str | None = None
    registers: int | None = None
    accumulation_registers: int | None = None
    scalar_registers: int | None = None
    spill_bytes: int | None = None
    spilled_registers: int | None = None
    spilled_scalar_registers: int | None = None
    stack_bytes: int | None = None
    shared_bytes: int | None = None
    tensor_memory_columns: int | None = None
    warps: int | None = None
    stages: int | None = None
    tensor_instructions: dict[str, int] = field(default_factory=dict)
    access_bits: dict[str, dict[int, int]] = field(default_factory=dict)
    bulk_copies: dict[str, int] = field(default_factory=dict)
    code_bytes: int | None = None
    occupancy_pct: float | None = None
    limiters: tuple[str, ...] = ()
    occupancy_error: str | None = None
    waves_per_simd: int | None = None
    has_dot: bool | None = None
    dot_types: tuple[str, ...] = ()
    remarks: dict[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()

    @property
    def key(self) -> Key:
        """Equal on all targets of one kernel in one configuration."""
        return self.name, tuple(sorted(self.constants.items())), self.configuration

    @property
    def spills(self) -> bool:
        return bool(self.spill_bytes or self.spilled_scalar_registers)

    @property
    def wgmma_serialized(self) -> str | None:
        """Why ptxas serializes its wgmma instructions: the end of that remark. None where it does not."""
        remark = self.remarks.get("wgmma_serialized")
        return remark and remark.rpartition(": ")[2]

    def to_json(self) -> dict:
        own = {name: value for name, value in vars(self).items() if name != "files"}
        return {**own, "limiters": list(self.limiters), "dot_types": list(self.dot_types)}


def reason(error: str | None) -> str:
    """The line of an error that says why: of what compilers print, the one with their first error."""
    lines = [line.strip() for line in (error or "").splitlines() if line.strip()]
    if not lines:
        return ""
    if place := PLACE.search(lines[0]):
        after = lines[lines.index("^") + 1 :] if "^" in lines else lines
        return lines[0][: place.start()] + (after or lines)[0]
    return INPUT.sub("", next((line for line in lines if COMPILERS_WORD.search(line)), lines[0]))


def fitness(kernel: CompiledKernel) -> tuple:
    """The order of an autotuned kernel's configurations by what fits, best first: it runs, spills least, uses tensor
    instructions where the source multiplies matrices, has the most warps on an SM. No order by speed."""
    return (
        kernel.status != Status.OK,
        kernel.spill_bytes if kernel.spill_bytes is not None else 1 << 40,
        kernel.spilled_scalar_registers or 0,
        bool(kernel.has_dot and not kernel.tensor_instructions),
        -(kernel.occupancy_pct or 0.0),
        kernel.registers or 0,
    )


def ranked(kernels: Sequence[CompiledKernel]) -> tuple[CompiledKernel, ...]:
    """The kernels in the order in which they were launched, the configurations of each best first."""
    order = {name: at for at, name in enumerate(dict.fromkeys(kernel.name for kernel in kernels))}
    return tuple(sorted(kernels, key=lambda kernel: (order[kernel.name], fitness(kernel))))


@dataclass(frozen=True)
class Compiled:
    """A kernel's file as it was compiled for a target.

    kernels: each autotuned one in all its configurations, those that fit best first. error: the compiler's, or why
    something was not compiled. cuda: it has CUDA C++, which runs on a GPU alone. lacking: what this machine lacks to
    compile it whole, or None. left_out: configurations that the limits did not allow. assumed: a sentence on what a
    kernel asked of the GPU and no page answers, or None.
    """

    target: Target
    status: Status
    error: str | None
    kernels: tuple[CompiledKernel, ...] = ()
    cuda: bool = False
    lacking: str | None = None
    left_out: int = 0
    assumed: str | None = None
    wall_s: float | None = None

    @property
    def refused(self) -> bool:
        """Does the compiler, or a limit of the GPU, refuse it?"""
        return self.status in (Status.COMPILE_ERROR, Status.LAUNCH_ERROR)

    @property
    def chosen(self) -> list[CompiledKernel]:
        """Each kernel once, an autotuned one in the configuration that fits best; those that were compiled."""
        tuned: set[str] = set()
        chosen = []
        for kernel in self.kernels:
            if kernel.registers is not None and kernel.name not in tuned:
                chosen.append(kernel)
                if kernel.configuration is not None:
                    tuned.add(kernel.name)
        return chosen

    def to_json(self) -> dict:
        own = {name: getattr(self, name) for name in ("status", "error", "lacking", "left_out", "assumed", "wall_s")}
        return {**self.target.to_json(), **own, "kernels": [kernel.to_json() for kernel in self.kernels]}


NOT_CHECKED = "CUDA C++ runs on a GPU alone: it was not checked"


def status_after(status: Status, error: str | None, compiled: Compiled) -> tuple[Status, str | None]:
    """The status and the error of a candidate that was checked in the CPU interpreter and then compiled."""
    if compiled.refused:
        checked = f"\nchecked in the CPU interpreter: {status}: {error}" if error else ""
        return compiled.status, f"{compiled.error}{checked}"
    if compiled.cuda:
        done = compiled.lacking or compiled.target.label
        return Status.NO_GPU, f"{NOT_CHECKED}; {done}"
    return status, error
