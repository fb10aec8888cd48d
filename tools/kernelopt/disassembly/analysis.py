"""The machine code of a kernel, analysed: access widths, spills, tensor instructions, loops, early arrivals at an
mbarrier. Pure functions."""

import difflib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from . import flow, listings, scoreboards

RAISES = re.compile(r"USETMAXREG\.TRY_ALLOC|setmaxnreg\.inc")
LOWERS = re.compile(r"USETMAXREG\.DEALLOC|setmaxnreg\.dec")
WARPGROUP = 128  # threads

# ---- Classes and widths ----


def meaning_of(kind: str, instruction: listings.Instruction) -> str | None:
    """The class of an instruction ("global load"); None when it belongs to none."""
    pattern, classes = listings.CLASSES[kind]
    match = pattern.match(f"{instruction.opcode} {instruction.operands}")
    return classes[int(match.lastgroup[1:])] if match else None


def bits_of(kind: str, instruction: listings.Instruction) -> int | None:
    """Bits that one thread moves with one memory instruction; None when the text does not show it."""
    opcode = instruction.opcode
    if matrix := re.match(r"(LDSM|STSM|ldmatrix|stmatrix)\b", opcode):  # 32 bits a matrix of 8 x 8
        count = re.search(r"\.x?([124])(?=\.|$)", opcode[matrix.end() :])
        return 32 * int(count[1]) if count else 32
    if kind == "sass":
        width = re.search(r"\.(?:[US](8|16)|(64|128|256))(?=\.|$)", opcode)
        return int(width[1] or width[2]) if width else 32
    if kind == "ptx" and opcode.startswith("cp.async"):  # [to], [from], bytes
        size = instruction.operands.split(",")[2:3]
        return 8 * int(size[0], 0) if size and re.fullmatch(r"\s*(0x[0-9a-f]+|\d+)\s*", size[0]) else None
    if kind == "ptx":
        vector, element = re.search(r"\.v(\d)\b", opcode), re.search(r"\.[a-z]+(\d+)$", opcode)
        return (int(vector[1]) if vector else 1) * int(element[1]) if element else None
    pair = 2 if re.match(r"ds_(read|write|load|store)2", opcode) else 1
    if words := re.search(r"_dword(?:x(\d))?", opcode):
        return 32 * int(words[1] or 1)
    narrow = re.search(r"_[biu](\d+)|(short)|(byte)", opcode)
    return pair * int(narrow[1] or (16 if narrow[2] else 8)) if narrow else None


# ---- The contents of one kernel ----


@dataclass(frozen=True)
class OpcodeCount:
    """How often one opcode of a class is in the code, and how often in its loops. bits: that one thread moves with
    one such instruction; None for an instruction that does not access memory."""

    meaning: str
    opcode: str
    bits: int | None
    count: int
    in_loops: int

    def to_json(self) -> dict:
        counts = {"bits": self.bits, "count": self.count, "in_loops": self.in_loops}
        return {"class": self.meaning, "opcode": self.opcode, **counts}


@dataclass(frozen=True)
class Remark:
    """One thing that stands out in a kernel. message: for a reader."""

    id: str
    message: str


@dataclass(frozen=True)
class Summary:
    """The contents of a kernel. instructions, in_loops: counts without padding (NOP). local_memory: the result of
    `local_memory`. raised, lowered: registers of a thread that its warpgroups ask for, and keep (setmaxnreg).
    most_threads: of a block, by its launch bounds. early: pairs of a load from shared memory and an arrival at an
    mbarrier that does not wait for it, as text."""

    kernel: str
    kind: str
    arch: str | None
    resources: listings.Resources
    instructions: int
    in_loops: int
    opcodes: tuple[OpcodeCount, ...]
    local_memory: str
    raised: tuple[int, ...] = ()
    lowered: tuple[int, ...] = ()
    most_threads: int | None = None
    early: tuple[tuple[str, str], ...] = ()

    def remarks(self) -> list[Remark]:
        """What stands out in the kernel."""
        return [remark for rule in RULES for remark in rule(self)]

    def to_json(self) -> dict:
        """The JSON object; its keys `classes` and `stands_out` hold the opcodes and the remarks."""
        return {
            "kernel": self.kernel,
            "kind": self.kind,
            "arch": self.arch,
            "resources": asdict(self.resources),
            "instructions": self.instructions,
            "in_loops": self.in_loops,
            "classes": [row.to_json() for row in self.opcodes],
            "local_memory": self.local_memory,
            "stands_out": [asdict(remark) for remark in self.remarks()],
        }


def summary(kernel: listings.Kernel) -> Summary:
    """The summary of a kernel. Its opcodes are sorted by class."""
    hot = flow.in_loops(kernel)
    counts, looped = Counter(), Counter()
    for index, instruction in enumerate(kernel.instructions):
        meaning = meaning_of(kernel.kind, instruction)
        bits = bits_of(kernel.kind, instruction) if meaning and listings.WITH_WIDTH.match(meaning) else None
        counts[meaning, instruction.opcode, bits] += 1
        looped[meaning, instruction.opcode, bits] += index in hot
    padding = ("NOP", "s_nop")
    return Summary(
        kernel=kernel.name,
        kind=kernel.kind,
        arch=kernel.arch,
        resources=kernel.resources,
        instructions=sum(count for key, count in counts.items() if key[1] not in padding),
        in_loops=sum(count for key, count in looped.items() if key[1] not in padding),
        opcodes=tuple(OpcodeCount(*key, counts[key], looped[key]) for key in sorted(counts, key=str) if key[0]),
        local_memory=local_memory(kernel),
        raised=limits_set_by(RAISES, kernel),
        lowered=limits_set_by(LOWERS, kernel),
        most_threads=kernel.most_threads,
        early=tuple(scoreboards.early_arrivals(kernel)),
    )


def limits_set_by(opcode: re.Pattern, kernel: listings.Kernel) -> tuple[int, ...]:
    """The last operands of setmaxnreg, of SASS (0xe0) and of PTX (224)."""
    operands = [one.operands.rpartition(",")[2].strip() for one in kernel.instructions if opcode.match(one.opcode)]
    return tuple(sorted({int(one, 0) for one in operands if re.fullmatch(r"0x[0-9a-f]+|\d+", one)}))


def local_memory(kernel: listings.Kernel) -> str:
    """The use of local memory: none, spill, array, spill and array, spill or array."""
    names = ("local load", "local store")
    accesses = [instruction for instruction in kernel.instructions if meaning_of(kernel.kind, instruction) in names]
    spilled = kernel.resources.spilled_registers  # AMD's compiler counts them itself
    if spilled:
        return "spill"
    if not accesses:
        return "none"
    if kernel.kind == "ptx" or spilled == 0:  # PTX has unlimited registers
        return "array"
    return stack_use(accesses) if kernel.kind == "sass" else "spill or array"


def stack_use(accesses: list[listings.Instruction]) -> str:
    """Whether LDL and STL move spilled registers or belong to an array.

    A spilled register goes to a fixed place on the stack, [R1+offset], and comes back from there, often by LDL.LU (last
    use: PTX ISA, cache operator .lu). An array that is indexed at run time has another address register.
    """
    slots = [(instruction.opcode[:3], listings.STACK_SLOT.search(instruction.operands)) for instruction in accesses]
    loaded, stored = ({slot["offset"] for name, slot in slots if slot and name == which} for which in ("LDL", "STL"))
    indexed = any(slot is None for _, slot in slots)
    last_use = any(".LU" in instruction.opcode for instruction in accesses)
    if not loaded:  # nothing comes back from a fixed place
        return "array"
    if not indexed:
        return "spill" if last_use or loaded & stored else "spill or array"
    return "spill and array" if last_use else "spill or array"


# ---- What stands out: each rule takes a summary and yields remarks ----


def of_classes(summary: Summary, *classes: str) -> list[OpcodeCount]:
    return [row for row in summary.opcodes if row.meaning in classes]


def total(rows: list[OpcodeCount]) -> int:
    return sum(row.count for row in rows)


def total_in_loops(rows: list[OpcodeCount]) -> int:
    return sum(row.in_loops for row in rows)


def local_memory_use(summary: Summary) -> Iterator[Remark]:
    loads, stores = of_classes(summary, "local load"), of_classes(summary, "local store")
    stack, spilled = summary.resources.stack_bytes, summary.resources.spilled_registers
    amount = (
        f"local loads {total(loads)} ({total_in_loops(loads)} in loops), "
        f"local stores {total(stores)} ({total_in_loops(stores)} in loops)"
    )
    amount += "" if stack is None else f", stack {stack} bytes a thread"
    amount += f", spilled registers {spilled}" if spilled else ""
    meanings = {
        "spill": "registers are spilled",
        "array": "no spill, but a local array that is indexed at run time or passed by its address",
        "spill and array": "registers are spilled, and a local array is indexed at run time",
        "spill or array": "spilled registers or a local array: the code does not show which",
    }
    if summary.local_memory != "none":
        yield Remark(summary.local_memory.replace(" ", "_"), f"{meanings[summary.local_memory]}: {amount}")
    elif stack:
        yield Remark("unused_stack", f"no spill: a stack of {stack} bytes and no access to local memory")


def narrow_accesses(summary: Summary) -> Iterator[Remark]:
    """Kinds of access of which most move 32 bits or less. Accesses to global memory count in loops, or anywhere if no
    loop has one. Accesses to shared memory count in loops only; elsewhere they serve a reduction or a few scalars.
    """
    loads, stores = ("global load", "global to shared copy"), ("global store", "shared to global copy")
    bulk = ("TMA load", "TMA store", "bulk copy", "TDM load", "TDM store")
    looped = total_in_loops(of_classes(summary, *loads, *stores, *bulk))
    groups = [
        ("global loads", loads, total_in_loops if looped else total),
        ("global stores", stores, total_in_loops if looped else total),
        ("shared loads", ("shared load",), total_in_loops),
        ("shared stores", ("shared store",), total_in_loops),
    ]
    for name, classes, amount in groups:
        known = [row for row in of_classes(summary, *classes) if row.bits and amount([row])]
        narrow = [row for row in known if row.bits <= 32]
        if 2 * amount(narrow) > amount(known):
            widths = ", ".join(str(bits) for bits in sorted({row.bits for row in narrow}))
            share = f"{amount(narrow)} of {amount(known)}{' in loops' if amount is total_in_loops else ''}"
            message = f"narrow {name}: {widths} bit, {share}; one instruction can move 128 bit a thread"
            yield Remark(f"narrow_{name.replace(' ', '_')}", message)


def old_tensor_instructions(summary: Summary) -> Iterator[Remark]:
    """mma.sync of one warp on an architecture with faster tensor instructions. fp64 has none, and integers have none
    on compute capability 10.3, where ptxas refuses tcgen05 of .kind::i8."""
    opcodes = [row.opcode for row in of_classes(summary, "tensor")]
    of_a_warp = [o for o in opcodes if re.match(r"[BHIOQ]MMA|w?mma\.", o) and ".f64" not in o]
    if not of_a_warp or len(of_a_warp) < len(opcodes):
        return
    name = f"mma.sync ({of_a_warp[0].partition('.')[0]})" if summary.kind == "sass" else "mma.sync"
    if capability(summary.arch) == 103 and all(re.match(r"IMMA|mma\..*\.s32\.", o) for o in of_a_warp):
        return
    if (generation := capability(summary.arch) // 10) == 9:
        better = "wgmma (HGMMA) is not used; a tile of at least 64 rows and 4 warps is needed"
        yield Remark("no_wgmma", f"{name} on Hopper: {better}")
    elif generation in (10, 11):
        yield Remark("no_tcgen05", f"{name} on Blackwell: tcgen05 (UTCHMMA) is not used")


def copies_through_registers(summary: Summary) -> Iterator[Remark]:
    """A loop that loads from global memory and stores to shared memory, with no asynchronous copy in the kernel."""
    asynchronous = of_classes(summary, "global to shared copy", "TMA load", "bulk copy")
    loads, stores = (total_in_loops(of_classes(summary, name)) for name in ("global load", "shared store"))
    if loads and stores and not asynchronous and capability(summary.arch) >= 80:
        yield Remark(
            "copies_through_registers",
            f"in loops {loads} global loads and {stores} shared stores: tiles go through registers; "
            "no asynchronous copy (cp.async, TMA)",
        )


def atomics_in_loops(summary: Summary) -> Iterator[Remark]:
    if count := total_in_loops(of_classes(summary, "atomic")):
        yield Remark("atomics_in_loops", f"atomics in loops: {count}")


def endless_waits(summary: Summary) -> Iterator[Remark]:
    """setmaxnreg for more registers than the block has: a launch gives each of its warpgroups what the kernel takes.
    The code does not show how many raise their limit. The rule assumes that half of them do, rounded up, and that the
    others lower theirs."""
    registers, warpgroups = summary.resources.registers, (summary.most_threads or 0) // WARPGROUP
    if not (summary.raised and registers and warpgroups > 1):
        return
    raising, kept = -(-warpgroups // 2), min((*summary.lowered, registers))
    asked = raising * summary.raised[0] + (warpgroups - raising) * kept
    if asked > warpgroups * registers:
        yield Remark(
            "waits_for_registers",
            f"a launch gives {warpgroups} warpgroups {registers} registers a thread, {warpgroups * registers} in all; "
            f"{raising} that raise it to {summary.raised[0]} by setmaxnreg and {warpgroups - raising} with {kept} need "
            f"{asked}, so that one of them waits for ever",
        )


def early_arrivals(summary: Summary) -> Iterator[Remark]:
    """An arrival may free memory, which the next bulk copy then fills. The code does not show which memory."""
    if summary.early:
        load, arrival = summary.early[0]
        yield Remark(
            "early_arrival",
            f"{len({load for load, _ in summary.early})} loads from shared memory may be under way at an arrival at an "
            f"mbarrier ({load}; {arrival}): if it frees what they read, the next copy may overtake them, a race that a "
            "tolerance hides; arrive behind what takes the loaded values, and compare the bits of many calls",
        )


def capability(arch: str | None) -> int:
    """90 of sm_90a; 0 when the target is unknown or not NVIDIA's, so that no rule on NVIDIA's generations applies."""
    number = re.match(r"sm_(\d+)", arch or "")
    return int(number[1]) if number else 0


RULES = (
    local_memory_use,
    narrow_accesses,
    old_tensor_instructions,
    copies_through_registers,
    atomics_in_loops,
    endless_waits,
    early_arrivals,
)


# ---- Two versions ----


@dataclass(frozen=True)
class Change:
    """A value in which two versions of a kernel differ. 0 for an instruction that one of them lacks."""

    name: str
    before: int | str | None
    after: int | str | None

    def to_json(self) -> dict:
        return {"what": self.name, "before": self.before, "after": self.after}


def changes(before: Summary, after: Summary) -> list[Change]:
    """The values in which two summaries differ."""
    one, two = comparable(before), comparable(after)
    pairs = [(name, one.get(name, 0), two.get(name, 0)) for name in {**one, **two}]
    return [Change(*pair) for pair in pairs if pair[1] != pair[2]]


def comparable(summary: Summary) -> dict[str, int | str | None]:
    """All values of a summary by name: resources, totals, and the counts of each opcode."""
    totals = {name: getattr(summary, name) for name in ("instructions", "in_loops", "local_memory")}
    counts = {}
    for row in summary.opcodes:
        name = f"{row.meaning} {row.opcode}"
        counts |= {name: row.count, f"{name}, in loops": row.in_loops}
    return {**asdict(summary.resources), **totals, **counts}


def normalised(kernel: listings.Kernel) -> list[str]:
    """The code without addresses and encodings, for a diff: places that are jumped to are numbered in their order."""
    naming = [i for i in kernel.instructions if listings.NAMES_PLACE.match(i.opcode)]
    named = {name for instruction in naming for name in listings.PLACE.findall(instruction.operands)} & set(
        kernel.labels
    )
    places = {place: f"L{number}" for number, place in enumerate(sorted({kernel.labels[name] for name in named}))}
    lines = []
    for index, instruction in enumerate(kernel.instructions):
        operands = instruction.operands
        if index in places:
            lines.append(f"{places[index]}:")
        if listings.NAMES_PLACE.match(instruction.opcode):  # nvdisasm writes `(.L_x_0)
            bare = operands.replace("`(", "").replace(")", "")
            operands = listings.PLACE.sub(
                lambda name: places[kernel.labels[name[0]]] if name[0] in named else name[0], bare
            )
        lines.append(" ".join(filter(None, ("   ", instruction.predicate, instruction.opcode, operands))))
    return lines


def unified_diff(before: listings.Kernel, after: listings.Kernel) -> str:
    """A unified diff of the normalised code; empty when it is the same."""
    lines = difflib.unified_diff(normalised(before), normalised(after), before.name, after.name, lineterm="")
    return "".join(f"{line}\n" for line in lines)
