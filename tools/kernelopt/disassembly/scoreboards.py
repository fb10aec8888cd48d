"""What an instruction of SASS waits for, by its control bits, from compute capability 7.0 on. Pure functions.

An instruction whose result takes a while sets one of six scoreboards, and a later one waits for those in its mask.
NVIDIA does not document the bits. Here they told code that raced on an H200 from code that did not."""

import re
from collections.abc import Iterator

from .flow import successors
from .listings import Instruction, Kernel

NONE = 7  # sets no scoreboard
LOAD = re.compile(r"LDSM?\b")
OF_NOTHING = "RZ, [RZ]"  # ptxas puts such loads before cp.async
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
    for index, load in enumerate(kernel.instructions):
        if LOAD.match(load.opcode) and load.control is not None and OF_NOTHING not in str(load):
            yield from ((str(load), str(arrival)) for arrival in passing(kernel, index))


def passing(kernel: Kernel, load: int) -> Iterator[Instruction]:
    """The arrivals that a way leads to from the load at this place, before anything waits for it. Loads return in
    order: where one sets no scoreboard, ptxas lets that of the next one stand for it."""
    code = kernel.instructions
    seen, left = set(), [(place, sets(code[load])) for place in successors(kernel, load)]
    while left:
        place, board = left.pop()
        if (place, board) in seen or (board != NONE and waits(code[place]) >> board & 1):
            continue
        seen.add((place, board))
        if ARRIVAL.match(code[place].opcode):
            yield code[place]
        if board == NONE and LOAD.match(code[place].opcode):
            board = sets(code[place])
        left += [(after, board) for after in successors(kernel, place)]
