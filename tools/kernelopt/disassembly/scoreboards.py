"""What an instruction of SASS waits for, by its control bits, from compute capability 7.0 on. Pure functions.

An instruction whose result takes a while sets one of six scoreboards, and a later one waits for those in its mask.
NVIDIA does not document the bits. Here they told code that raced on an H200 from code that did not."""

import re
from collections.abc import Iterator

from .flow import successors
from .listings import Instruction, Kernel

NONE = 7  # sets no scoreboard
LOAD = re.compile(r"LDSM?\b")
ARRIVAL = re.compile(r"SYNCS\.ARRIVE\..*\bA1T0\b")  # an arrival alone; one that also expects bytes frees no memory


def sets(instruction: Instruction) -> int:
    """The scoreboard that tells when the result is there, NONE without one."""
    return NONE if instruction.control is None else instruction.control >> 46 & 7


def waits(instruction: Instruction) -> int:
    """A bit for each scoreboard that it waits for."""
    return 0 if instruction.control is None else instruction.control >> 52 & 63


def early_arrivals(kernel: Kernel) -> Iterator[tuple[str, str]]:
    """(load from shared memory, arrival at an mbarrier), as text, with a way from one to the other on which nothing
    waits for the load. If the arrival frees the memory that the load reads, the next copy may overtake it."""
    code = kernel.instructions
    for index, load in enumerate(code):
        if not LOAD.match(load.opcode) or sets(load) == NONE:
            continue
        seen, left = set(), successors(kernel, index)
        while left:
            place = left.pop()
            if place in seen or waits(code[place]) >> sets(load) & 1:
                continue
            seen.add(place)
            if ARRIVAL.match(code[place].opcode):
                yield str(load), str(code[place])
            left += successors(kernel, place)
