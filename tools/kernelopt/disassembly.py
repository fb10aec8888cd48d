"""What a kernel's machine code holds, read from its listing: access widths, spills, tensor instructions, loops.

Listings are text: SASS as `cuobjdump -sass` and `nvdisasm -c` print it, PTX, and AMDGCN as Triton leaves it in its cache
(written for, not run on AMD hardware). Pure functions, but for the last section, which finds files and runs cuobjdump.
"""

import difflib
import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from . import programs
from .errors import EnvironmentLacks, Refused, UsageError

KINDS = ("sass", "ptx", "amdgcn")
KINDS_IN = {  # file suffix -> what can be read from such a file
    ".cubin": ("sass",),
    ".so": ("sass", "ptx"),
    ".sass": ("sass",),
    ".ptx": ("ptx",),
    ".amdgcn": ("amdgcn",),
}
# static: what the code itself holds. dynamic: what a launch asks for on top, which only Triton writes down, beside the
# code.
UNKNOWN = dict.fromkeys(
    ("registers", "stack_bytes", "static_shared_bytes", "spilled_registers", "dynamic_shared_bytes"),
)

# ---- What an instruction does: the first pattern that fits its text ("opcode operands") from the left ----

SASS = {  # the opcode up to its first dot
    "LDS RZ,": None,  # loads nothing: it stands beside barriers for its order
    "LDGSTS": "global to shared copy",
    "LDG": "global load",
    "STG": "global store",
    "LDSM?": "shared load",
    "STSM?": "shared store",
    "LDL": "local load",
    "STL": "local store",
    "LD": "generic load",
    "ST": "generic store",
    "LDTM": "tensor memory load",
    "STTM|UTCCP": "tensor memory store",
    "UTMALDG": "TMA load",
    "UTMASTG": "TMA store",
    "UTMAREDG": "TMA reduction",
    "UBLKCP|UBLKRED": "bulk copy",
    "(UTC)?[BDHIOQ]G?MMA": "tensor",
    "ATOM[GS]?|RED[GS]?": "atomic",
    "BAR": "barrier",
    "SYNCS": "mbarrier",
    "UCGABAR_[A-Z]+": "cluster barrier",
}
PTX = {
    r"cp\.async\.bulk\.tensor\.\dd\.shared": "TMA load",
    r"cp\.async\.bulk\.tensor\.\dd\.global": "TMA store",
    r"cp\.reduce\.async\.bulk\.tensor": "TMA reduction",
    r"cp\.(reduce\.)?async\.bulk\.(shared|global)": "bulk copy",
    r"cp\.async\.c[ag]\.": "global to shared copy",
    r"ld(\.\w+)*\.global\b": "global load",
    r"st(\.\w+)*\.global\b": "global store",
    r"ld(\.\w+)*\.shared\b|ldmatrix": "shared load",
    r"st(\.\w+)*\.shared\b|stmatrix": "shared store",
    r"ld(\.\w+)*\.local\b": "local load",
    r"st(\.\w+)*\.local\b": "local store",
    r"(ld|st)(\.\w+)*\.(param|const)\b": None,
    r"ld\.": "generic load",
    r"st\.": "generic store",
    r"tcgen05\.ld\.": "tensor memory load",
    r"tcgen05\.(st|cp)\.": "tensor memory store",
    r"mma\.|wmma\.mma|wgmma\.mma_async|tcgen05\.mma": "tensor",
    r"(atom|red)\.": "atomic",
    r"barrier\.cluster": "cluster barrier",
    r"(bar|barrier)\.(cta\.)?(sync|red|arrive)": "barrier",
    r"mbarrier\.": "mbarrier",
}
AMDGCN = {
    r"buffer_load_.*Folded": "local load",  # the compiler's comment at a spill, where scratch has no opcode of its own
    r"buffer_store_.*Folded": "local store",
    r"global_load_lds|(global|cluster)_load_async_to_lds|buffer_load_\S+ .*\blds\b": "global to shared copy",
    r"global_store_async_from_lds": "shared to global copy",
    r"tensor_load_to_lds": "TDM load",  # the tensor data mover of gfx1250
    r"tensor_store_from_lds": "TDM store",
    r"(global|buffer)_load_": "global load",
    r"(global|buffer)_store_": "global store",
    r"ds_(read|load)": "shared load",
    r"ds_(write|store)": "shared store",
    r"scratch_load": "local load",
    r"scratch_store": "local store",
    r"flat_load": "generic load",
    r"flat_store": "generic store",
    r"v_(mfma|smfmac|wmma|swmmac)_": "tensor",
    r"(global|buffer|flat)_atomic_|ds_(add|sub|min|max|and|or|xor|inc|dec|cmpst|cmpswap|wrxchg|pk_add)": "atomic",
    r"s_barrier": "barrier",
}


def alternatives(patterns: dict, end: str = "") -> re.Pattern:
    """One pattern for all: the name of the group that matched, c0, c1 ..., is the place in the table."""
    return re.compile("|".join(f"(?P<c{place}>(?:{pattern}){end})" for place, pattern in enumerate(patterns)))


CLASSES = {  # kind -> pattern, classes in the order of its groups
    "sass": (alternatives(SASS, r"(?!\w)"), list(SASS.values())),
    "ptx": (alternatives(PTX), list(PTX.values())),
    "amdgcn": (alternatives(AMDGCN), list(AMDGCN.values())),
}
WITH_WIDTH = re.compile(r"(global|shared|local|generic) (load|store)|global to shared copy|shared to global copy")

JUMP = re.compile(r"(BRA|BRX|JMP|JMX)U?\b|bra\b|s_c?branch")
NAMES_PLACE = re.compile(rf"{JUMP.pattern}|(BSSY|CALL|WARPSYNC)\b")
PLACE = re.compile(r"(?<![-\w])[.$\w]+")
STOP = re.compile(r"(BRA|JMP|EXIT|RET|KILL)\b|(bra|ret|exit|trap)\b|s_(branch|endpgm|setpc)")
STACK_SLOT = re.compile(r"\[R1(?:\+(?P<offset>-?0x[0-9a-f]+))?\]")  # R1 is the stack pointer


@dataclass(frozen=True)
class Instruction:
    """`predicate` is "@!P0" or empty; `operands` is the rest of the text as the listing has it."""

    predicate: str
    opcode: str
    operands: str


@dataclass
class Kernel:
    """One kernel's code. `labels`: what a branch names as its target -> index into `instructions`."""

    name: str
    kind: str
    arch: str | None
    resources: dict = field(default_factory=lambda: dict(UNKNOWN))
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


# ---- Reading listings ----

SASS_LINE = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+)?\s*([A-Z][\w.]*)\s*([^;]*);")
SASS_KERNEL = re.compile(r"\s+Function : (\S+)|\.text\.(\S+):$")
SASS_ARCH = re.compile(r"\s+(?:code for|\.target)\s+(sm_\w+)")
USAGE = re.compile(r"\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)")


def parse_sass(text: str) -> list[Kernel]:
    """Kernels of a listing by cuobjdump (-sass, with -res-usage for registers and stack) or nvdisasm (-c)."""
    kernels, usage, used_by, arch = [], {}, "", None
    for line in text.splitlines():
        if line.startswith("Fatbin elf code"):  # the next target of a fat binary
            usage, arch = {}, None
        elif found := SASS_LINE.match(line):
            address, predicate, opcode, operands = found.groups()
            if kernels:
                kernels[-1].labels[hex(int(address, 16))] = len(kernels[-1].instructions)
                kernels[-1].instructions.append(Instruction(predicate or "", opcode, operands.strip()))
        elif found := SASS_KERNEL.match(line):
            name = found[1] or found[2]
            kernels.append(Kernel(name, "sass", arch, usage.setdefault(name, dict(UNKNOWN))))
        elif found := SASS_ARCH.match(line):
            arch = found[1]
        elif arch is None and (found := re.search(r"EF_CUDA_SM(\d+)", line)):  # all that nvdisasm says
            arch = f"sm_{found[1]}"
        elif found := re.match(r" Function (\S+):$", line):
            used_by = found[1]
        elif found := USAGE.match(line):
            registers, stack, shared = map(int, found.groups())
            amounts = {"registers": registers, "stack_bytes": stack, "static_shared_bytes": shared}
            usage.setdefault(used_by, dict(UNKNOWN)).update(amounts)
        elif kernels and (found := re.match(r"(\.L\w+|\$\S+):$", line)):
            kernels[-1].labels[found[1]] = len(kernels[-1].instructions)
    return kernels


def parse_ptx(text: str) -> list[Kernel]:
    """Kernels (.entry) of a PTX file. Registers are given out later, by ptxas: resources are None."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/|^\s*\.(?:loc|file)\b[^\n]*", "", text, flags=re.DOTALL | re.MULTILINE)
    kernels, arch = [], None
    for found in re.finditer(r"\.target\s+(\w+)|\.entry\s+([\w$]+)", text):
        if found[1]:
            arch = found[1]
            continue
        kernel = Kernel(found[2], "ptx", arch)
        for statement in braced(text, found.end()).split(";"):
            while label := re.match(r"[\s{}]*(\$?[\w$]+):(?!:)", statement):
                kernel.labels[label[1]] = len(kernel.instructions)
                statement = statement[label.end() :]
            if code := re.match(r"[\s{}]*(@!?%?\w+)?\s*([a-z][\w.:]*)\s*(.*)", statement, re.DOTALL):
                kernel.instructions.append(Instruction(code[1] or "", code[2], " ".join(code[3].split())))
        kernels.append(kernel)
    return kernels


def braced(text: str, start: int) -> str:
    """What stands between the first brace after `start` and the one that closes it."""
    depth = 0
    for brace in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[text.index("{", start) + 1 : brace.start()]
    return ""  # cut off


def parse_amdgcn(text: str) -> list[Kernel]:
    """Kernels of an .amdgcn file of Triton, with the resources of its metadata. Registers are VGPRs."""
    arch = re.search(r"amdgcn_target \"[^\"]*(gfx\w+)", text)
    kernels, kernel = [], None
    for line in text.splitlines():
        if found := re.match(r"(\w+):\s*; @\1", line):
            kernel = Kernel(found[1], "amdgcn", arch and arch[1])
            kernels.append(kernel)
        elif kernel is None or line.startswith(".Lfunc_end"):
            kernel = None
        elif found := re.match(r"(\.L\w+):", line):
            kernel.labels[found[1]] = len(kernel.instructions)
        elif found := re.match(r"\s+([a-z]+_\w+)\s*([^;]*)(;.*Folded.*)?", line):
            kernel.instructions.append(Instruction("", found[1], found[2].strip() + (found[3] or "")))
    for entry in re.split(r"^  - ", text.partition("amdhsa.kernels:")[2], flags=re.MULTILINE):
        known = dict(re.findall(r"^(?:    )?\.(\w+):\s+(\S+)$", entry, re.MULTILINE))
        for kernel in kernels:
            if kernel.name == known.get("name"):
                kernel.resources = amd_resources(known)
    return kernels


def amd_resources(known: dict[str, str]) -> dict:
    names = {
        "registers": "vgpr_count",
        "stack_bytes": "private_segment_fixed_size",
        "static_shared_bytes": "group_segment_fixed_size",
        "spilled_registers": "vgpr_spill_count",
    }
    return dict(UNKNOWN) | {key: int(known[name]) for key, name in names.items() if name in known}


PARSERS = {"sass": parse_sass, "ptx": parse_ptx, "amdgcn": parse_amdgcn}


# ---- Classes and widths ----


def meaning_of(kind: str, instruction: Instruction) -> str | None:
    """The class of an instruction ("global load"); None when it belongs to none."""
    pattern, classes = CLASSES[kind]
    found = pattern.match(f"{instruction.opcode} {instruction.operands}")
    return classes[int(found.lastgroup[1:])] if found else None


def bits_of(kind: str, instruction: Instruction) -> int | None:
    """Bits that one thread moves with one memory instruction; None when the text does not say."""
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


# ---- Loops ----


def in_loops(kernel: Kernel) -> set[int]:
    """Indices of the instructions that lie on a cycle of the control flow.

    A range of addresses would not do: blocks that stand out of line jump back without a loop. An instruction that jumps
    to itself is padding after the end, no loop.
    """
    following = [successors(kernel, index) for index in range(len(kernel.instructions))]
    preceding: list[list[int]] = [[] for _ in following]
    for index, targets in enumerate(following):
        for target in targets:
            preceding[target].append(index)
    found: set[int] = set()
    for index, targets in enumerate(following):
        for target in targets:
            if target < index:
                found |= reach(following, target) & reach(preceding, index)
    return found


def successors(kernel: Kernel, index: int) -> list[int]:
    """Where control can go after instruction `index`. Calls and indirect branches (BRX) count as straight code."""
    instruction = kernel.instructions[index]
    names = PLACE.findall(instruction.operands) if JUMP.match(instruction.opcode) else []
    targets = [kernel.labels[name] for name in names if name in kernel.labels]
    # "BRA.U UP0, 0x190" has its condition among the operands
    conditional = instruction.predicate or (targets and "," in instruction.operands)
    if conditional or not STOP.match(instruction.opcode):
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


# ---- What one kernel is made of ----


def summary(kernel: Kernel) -> dict:
    """{kernel, kind, arch, resources, instructions, in_loops, classes, local_memory, stands_out} of a kernel.

    classes: [{class, opcode, bits, count, in_loops}]; bits a thread and instruction, None where it is no memory access.
    Padding (NOP) is not counted.
    """
    hot = in_loops(kernel)
    counts, looped = Counter(), Counter()
    for index, instruction in enumerate(kernel.instructions):
        meaning = meaning_of(kernel.kind, instruction)
        bits = bits_of(kernel.kind, instruction) if meaning and WITH_WIDTH.match(meaning) else None
        counts[meaning, instruction.opcode, bits] += 1
        looped[meaning, instruction.opcode, bits] += index in hot
    padding = ("NOP", "s_nop")
    found = {
        "kernel": kernel.name,
        "kind": kernel.kind,
        "arch": kernel.arch,
        "resources": kernel.resources,
        "instructions": sum(count for key, count in counts.items() if key[1] not in padding),
        "in_loops": sum(count for key, count in looped.items() if key[1] not in padding),
        "classes": [
            {"class": key[0], "opcode": key[1], "bits": key[2], "count": counts[key], "in_loops": looped[key]}
            for key in sorted(counts, key=str)
            if key[0]
        ],
        "local_memory": local_memory(kernel),
    }
    return {**found, "stands_out": [note for rule in RULES for note in rule(found)]}


def local_memory(kernel: Kernel) -> str:
    """What local memory is used for: none, spill, array, spill and array, spill or array."""
    names = ("local load", "local store")
    accesses = [instruction for instruction in kernel.instructions if meaning_of(kernel.kind, instruction) in names]
    spilled = kernel.resources["spilled_registers"]  # AMD's compiler counts them itself
    if spilled:
        return "spill"
    if not accesses:
        return "none"
    if kernel.kind == "ptx" or spilled == 0:  # PTX has no end of registers
        return "array"
    return stack_use(accesses) if kernel.kind == "sass" else "spill or array"


def stack_use(accesses: list[Instruction]) -> str:
    """Whether LDL and STL move spilled registers or belong to an array.

    A spilled register goes to a fixed place on the stack, [R1+offset], and comes back from there, often by LDL.LU (last
    use: PTX ISA, cache operator .lu). An array that is indexed at run time has another address register.
    """
    slots = [(instruction.opcode[:3], STACK_SLOT.search(instruction.operands)) for instruction in accesses]
    loaded, stored = ({slot["offset"] for name, slot in slots if slot and name == which} for which in ("LDL", "STL"))
    indexed = any(slot is None for _, slot in slots)
    last_use = any(".LU" in instruction.opcode for instruction in accesses)
    if not loaded:  # nothing comes back from a fixed place
        return "array"
    if not indexed:
        return "spill" if last_use or loaded & stored else "spill or array"
    return "spill and array" if last_use else "spill or array"


# ---- What stands out: each rule takes a summary and yields {id, message} ----


def rows(found: dict, *classes: str) -> list[dict]:
    return [row for row in found["classes"] if row["class"] in classes]


def total(found_rows: list[dict], key: str = "count") -> int:
    return sum(row[key] for row in found_rows)


def local_memory_use(found: dict) -> Iterator[dict]:
    loads, stores = rows(found, "local load"), rows(found, "local store")
    stack, spilled = (found["resources"][key] for key in ("stack_bytes", "spilled_registers"))
    amount = (
        f"local loads {total(loads)} ({total(loads, 'in_loops')} in loops), "
        f"local stores {total(stores)} ({total(stores, 'in_loops')} in loops)"
    )
    amount += "" if stack is None else f", stack {stack} bytes a thread"
    amount += f", spilled registers {spilled}" if spilled else ""
    meanings = {
        "spill": "registers are spilled",
        "array": "no spill, but a local array that is indexed at run time or passed by its address",
        "spill and array": "registers are spilled, and a local array is indexed at run time",
        "spill or array": "spilled registers or a local array: the code does not tell which",
    }
    if found["local_memory"] != "none":
        yield {"id": found["local_memory"].replace(" ", "_"), "message": f"{meanings[found['local_memory']]}: {amount}"}
    elif stack:
        yield {"id": "unused_stack", "message": f"no spill: a stack of {stack} bytes and no access to local memory"}


def narrow_accesses(found: dict) -> Iterator[dict]:
    """Where most accesses move 32 bits or less: in loops if global memory is touched there, else anywhere.

    Shared memory counts in loops only; elsewhere it serves a reduction or a few scalars.
    """
    loads, stores = ("global load", "global to shared copy"), ("global store", "shared to global copy")
    bulk = ("TMA load", "TMA store", "bulk copy", "TDM load", "TDM store")
    looped = total(rows(found, *loads, *stores, *bulk), "in_loops")
    groups = [
        ("global loads", loads, "in_loops" if looped else "count"),
        ("global stores", stores, "in_loops" if looped else "count"),
        ("shared loads", ("shared load",), "in_loops"),
        ("shared stores", ("shared store",), "in_loops"),
    ]
    for name, classes, where in groups:
        known = [row for row in rows(found, *classes) if row["bits"] and row[where]]
        narrow = [row for row in known if row["bits"] <= 32]
        if 2 * total(narrow, where) > total(known, where):
            widths = ", ".join(str(bits) for bits in sorted({row["bits"] for row in narrow}))
            share = f"{total(narrow, where)} of {total(known, where)}{' in loops' if where == 'in_loops' else ''}"
            yield {
                "id": f"narrow_{name.replace(' ', '_')}",
                "message": f"narrow {name}: {widths} bit, {share}; one instruction can move 128 bit a thread",
            }


def old_tensor_instructions(found: dict) -> Iterator[dict]:
    """A warp's own mma.sync on an architecture whose tensor cores want more; fp64 has nothing newer."""
    opcodes = [row["opcode"] for row in rows(found, "tensor")]
    of_a_warp = [o for o in opcodes if re.match(r"[BHIOQ]MMA|w?mma\.", o) and ".f64" not in o]
    if not of_a_warp or len(of_a_warp) < len(opcodes):
        return
    name = f"mma.sync ({of_a_warp[0].partition('.')[0]})" if found["kind"] == "sass" else "mma.sync"
    if (generation := capability(found["arch"]) // 10) == 9:
        better = "wgmma (HGMMA) is not used; a tile of at least 64 rows and 4 warps is needed"
        yield {"id": "no_wgmma", "message": f"{name} on Hopper: {better}"}
    elif generation in (10, 11):
        yield {"id": "no_tcgen05", "message": f"{name} on Blackwell: tcgen05 (UTCHMMA) is not used"}


def copies_through_registers(found: dict) -> Iterator[dict]:
    """A loop that loads from global memory and stores to shared memory, with no asynchronous copy in the kernel."""
    asynchronous = rows(found, "global to shared copy", "TMA load", "bulk copy")
    loads, stores = (total(rows(found, name), "in_loops") for name in ("global load", "shared store"))
    if loads and stores and not asynchronous and capability(found["arch"]) >= 80:
        yield {
            "id": "copies_through_registers",
            "message": f"in loops {loads} global loads and {stores} shared stores: tiles go through registers; "
            "no asynchronous copy (cp.async, TMA)",
        }


def atomics_in_loops(found: dict) -> Iterator[dict]:
    if count := total(rows(found, "atomic"), "in_loops"):
        yield {"id": "atomics_in_loops", "message": f"atomics in loops: {count}"}


def capability(arch: str | None) -> int:
    """90 of sm_90a; 0 when it is unknown or none of NVIDIA's, which no rule on NVIDIA's generations fits."""
    number = re.match(r"sm_(\d+)", arch or "")
    return int(number[1]) if number else 0


RULES = (local_memory_use, narrow_accesses, old_tensor_instructions, copies_through_registers, atomics_in_loops)


# ---- Two versions ----


def changes(before: dict, after: dict) -> list[dict]:
    """What differs between two summaries: [{what, before, after}]; 0 for an instruction that one of them lacks."""
    one, two = countable(before), countable(after)
    return [
        {"what": key, "before": one.get(key, 0), "after": two.get(key, 0)}
        for key in {**one, **two}
        if one.get(key, 0) != two.get(key, 0)
    ]


def countable(found: dict) -> dict:
    totals = {name: found[name] for name in ("instructions", "in_loops", "local_memory")}
    counts = {}
    for row in found["classes"]:
        name = f"{row['class']} {row['opcode']}"
        counts |= {name: row["count"], f"{name}, in loops": row["in_loops"]}
    return {**found["resources"], **totals, **counts}


def normalised(kernel: Kernel) -> list[str]:
    """The code without addresses and encodings, for a diff: places that are jumped to are numbered in their order."""
    naming = [i for i in kernel.instructions if NAMES_PLACE.match(i.opcode)]
    named = {name for instruction in naming for name in PLACE.findall(instruction.operands)} & set(kernel.labels)
    places = {place: f"L{number}" for number, place in enumerate(sorted({kernel.labels[name] for name in named}))}
    lines = []
    for index, instruction in enumerate(kernel.instructions):
        operands = instruction.operands
        if index in places:
            lines.append(f"{places[index]}:")
        if NAMES_PLACE.match(instruction.opcode):  # nvdisasm writes `(.L_x_0)
            bare = operands.replace("`(", "").replace(")", "")
            operands = PLACE.sub(lambda name: places[kernel.labels[name[0]]] if name[0] in named else name[0], bare)
        lines.append(" ".join(filter(None, ("   ", instruction.predicate, instruction.opcode, operands))))
    return lines


def unified_diff(before: Kernel, after: Kernel) -> str:
    """A unified diff of the normalised code; empty when it is the same."""
    lines = difflib.unified_diff(normalised(before), normalised(after), before.name, after.name, lineterm="")
    return "".join(f"{line}\n" for line in lines)


# ---- Files, and the program that disassembles them ----


class Unreadable(UsageError):
    """cuobjdump cannot read a file, in its own words."""


@dataclass(frozen=True)
class Listing:
    """The text of one kind that a file holds or that cuobjdump made of it, and the kernels in it. why: it could not be
    read."""

    file: Path
    kind: str
    text: str
    kernels: list[Kernel]
    why: str | None = None


def read(path: Path, kind: str = "all") -> list[Listing]:
    """Listings of a file, or of all files below a folder, newest file first. kind: one of KINDS, or all.

    A file that cuobjdump cannot read has `why`; where any kind is wanted the PTX beside it is read too. UsageError when
    there is nothing to read, or `path` is the one file that cannot be read; Refused when that is so of all files of a
    folder; EnvironmentLacks when cuobjdump is needed and absent.
    """
    files = files_of(path)
    listings = in_parallel([(file, one) for file in files for one in KINDS_IN[file.suffix] if kind in (one, "all")])
    unread = [listing for listing in listings if listing.why]
    beside = [ptx for listing in unread if (ptx := listing.file.with_suffix(".ptx")).is_file() and ptx not in files]
    if kind == "all":
        listings += in_parallel([(ptx, "ptx") for ptx in beside])
    if any(listing.kernels for listing in listings):
        return listings
    if not unread:
        other = "" if kind == "all" else f" as {kind}; --kind all takes any kind"
        raise UsageError(f"{path} holds no kernel{other}")
    mend = "; --kind all reads the PTX beside it" if beside or (path.is_dir() and any(path.rglob("*.ptx"))) else ""
    if path.is_dir():
        raise Refused(f"none of the {len(unread)} files in {path} can be read; of the first, {unread[0].why}{mend}")
    raise UsageError(f"{unread[0].why}{mend}")


def files_of(path: Path) -> list[Path]:
    """The file `path`, or the files with code below that folder, newest first; UsageError when there is none."""
    if path.is_dir():  # shared objects in a cache are host code as a rule
        files = [
            file for file in path.rglob("*") if file.suffix in KINDS_IN and file.suffix != ".so" and file.is_file()
        ]
    elif not path.exists():
        raise UsageError(f"{path} does not exist")
    else:
        files = [path]
    if not files or any(file.suffix not in KINDS_IN for file in files):
        raise UsageError(f"{path} is no file or folder with code; what can be read: {', '.join(KINDS_IN)}")
    return sorted(files, key=lambda file: (-file.stat().st_mtime, str(file)))


def in_parallel(wanted: list[tuple[Path, str]]) -> list[Listing]:
    """A listing each; cuobjdump takes a quarter of a second, and a cache holds hundreds of files."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda one: listing_of(*one), wanted))


def listing_of(file: Path, kind: str) -> Listing:
    try:
        text = text_of(file, kind)
    except Unreadable as error:
        return Listing(file, kind, "", [], str(error))
    kernels = PARSERS[kind](text)
    for kernel in kernels:
        kernel.resources["dynamic_shared_bytes"] = dynamic_shared_bytes(file)
    return Listing(file, kind, text, kernels)


def dynamic_shared_bytes(file: Path) -> int | None:
    """Shared memory that a launch of the code asks for: Triton's cache holds NAME.json with it beside NAME.cubin; None
    elsewhere."""
    try:
        found = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    shared = found.get("shared") if isinstance(found, dict) else None
    return shared if isinstance(shared, int) else None


def choose(listings: list[Listing], name: str | None) -> list[tuple[Listing, Kernel]]:
    """Kernels whose name is `name`, else has it in it; the newest of each name first, then older ones.

    UsageError names the kernels that there are.
    """
    found = [(listing, kernel) for listing in listings for kernel in listing.kernels]
    exact = [pair for pair in found if pair[1].name == name]
    chosen = exact or [pair for pair in found if name is None or name in pair[1].name]
    if not chosen:
        names = sorted({kernel.name for _, kernel in found})
        raise UsageError(f"no kernel has {name} in its name; there are: {', '.join(names)}")
    seen: Counter = Counter()
    ranked = []
    for pair in chosen:
        key = (pair[1].name, pair[1].kind, pair[1].arch)
        ranked.append((seen[key], pair))
        seen[key] += 1
    return [pair for _, pair in sorted(ranked, key=lambda entry: entry[0])]


def text_of(file: Path, kind: str) -> str:
    if file.suffix in (".cubin", ".so"):
        return dump(file, ["-ptx"] if kind == "ptx" else ["-sass", "-res-usage"])
    return file.read_text(encoding="utf-8", errors="replace")


def dump(file: Path, options: list[str]) -> str:
    """What cuobjdump prints of a file; Unreadable with its own words when it cannot read it."""
    done = subprocess.run([program(), *options, str(file)], capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise Unreadable(f"cuobjdump cannot read {file}; it said: {said}")
    return done.stdout


def program() -> str:
    """The path of cuobjdump."""
    if found := programs.find("cuobjdump"):
        return found
    raise EnvironmentLacks("cuobjdump is not here: install the CUDA toolkit or Triton's wheel, or pass a .sass file")
