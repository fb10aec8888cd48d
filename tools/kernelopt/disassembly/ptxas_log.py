"""What ptxas -v prints of each kernel: registers, stack, spills. Pure functions."""

import re
from dataclasses import dataclass

KERNEL = re.compile(r"Compiling entry function '([^']+)' for '(\w+)'")
PROPERTIES = re.compile(r"Function properties for (\S+)")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")
SERIALIZED = re.compile(
    r"wgmma\.mma_async instructions are serialized due to (.+?) (?:in|for) (?:the )?function '?([^'\s]+)", re.DOTALL
)


@dataclass(frozen=True)
class PtxasUsage:
    """The resources of a thread, in registers and bytes. spill_store_bytes: of all instructions that store a spilled
    register, each once."""

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int


def usage(log: str) -> dict[str, PtxasUsage]:
    """The kernels of a log by name. One whose numbers are not complete is left out."""
    known: dict[str, PtxasUsage] = {}
    kernel = properties = None
    stack: tuple[int, ...] | None = None
    for line in log.splitlines():
        if match := KERNEL.search(line):
            kernel, stack = match[1], None
        elif match := PROPERTIES.search(line):  # of a function that is not inlined too
            properties = match[1]
        elif (match := STACK.search(line)) and properties == kernel:
            stack = tuple(map(int, match.groups()))
        elif (match := REGISTERS.search(line)) and kernel and stack:
            known[kernel] = PtxasUsage(int(match[1]), *stack)
    return known


def serialized(log: str, function: str | None = None) -> str | None:
    """Why ptxas runs the wgmma instructions one after the other, in its words; None where it does not say so. function:
    of this one, by its mangled name, where the log is of several."""
    reasons = {match[2]: " ".join(match[1].split()) for match in SERIALIZED.finditer(log)}
    return reasons.get(function) if function else next(iter(reasons.values()), None)
