"""The control flow of a kernel of a listing: what may run next, and which instructions lie in loops. Pure functions."""

from . import listings


def in_loops(kernel: listings.Kernel) -> set[int]:
    """Indices of the instructions that lie on a cycle of the control flow.

    A range of addresses would not do: blocks that stand out of line jump back without a loop. An instruction that jumps
    to itself is padding after the end, no loop.
    """
    following = [successors(kernel, index) for index in range(len(kernel.instructions))]
    preceding: list[list[int]] = [[] for _ in following]
    for index, targets in enumerate(following):
        for target in targets:
            preceding[target].append(index)
    looped: set[int] = set()
    for index, targets in enumerate(following):
        for target in targets:
            if target < index:
                looped |= reach(following, target) & reach(preceding, index)
    return looped


def successors(kernel: listings.Kernel, index: int) -> list[int]:
    """Where control can go after instruction `index`. Calls and indirect branches (BRX) count as straight code."""
    instruction = kernel.instructions[index]
    names = listings.PLACE.findall(instruction.operands) if listings.JUMP.match(instruction.opcode) else []
    targets = [kernel.labels[name] for name in names if name in kernel.labels]
    # "BRA.U UP0, 0x190" has its condition among the operands
    conditional = instruction.predicate or (targets and "," in instruction.operands)
    if conditional or not listings.STOP.match(instruction.opcode):
        targets.append(index + 1)
    return [target for target in targets if target < len(kernel.instructions)]


def reach(edges: list[list[int]], start: int) -> set[int]:
    """`start` and all that can be reached from it."""
    seen, waiting = {start}, [start]
    while waiting:
        new = set(edges[waiting.pop()]) - seen
        seen |= new
        waiting.extend(new)
    return seen
