"""Listings of machine code: kernels, their instructions and resources, and the classes of instructions. Pure functions.

A listing is text: SASS as `cuobjdump -sass` and `nvdisasm -c` print it, PTX, and AMDGCN as Triton leaves it in its
cache. The reader of AMDGCN was tested on such listings. It never ran on AMD hardware.
"""

import math
import re
from dataclasses import dataclass, field, replace

KINDS = ("sass", "ptx", "amdgcn")
KINDS_IN = {  # file suffix -> what can be read from such a file
    ".cubin": ("sass",),
    ".so": ("sass", "ptx"),
    ".sass": ("sass",),
    ".ptx": ("ptx",),
    ".amdgcn": ("amdgcn",),
}

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
    "MEMBAR": "memory barrier",
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
    r"membar\.|fence\.(sc|acq_rel|acquire|release)\b": "memory barrier",
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
    r"s_waitcnt .*vmcnt|s_wait_loadcnt": "wait for loads",
    r"s_waitcnt .*lgkmcnt|s_wait_dscnt": "wait for LDS",
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
    """`predicate` is "@!P0" or empty; `operands` is the rest of the text as the listing has it. control: the upper half
    of SASS's encoding, None where the listing lacks it (nvdisasm without -hex)."""

    predicate: str
    opcode: str
    operands: str
    control: int | None = None

    def __str__(self) -> str:
        return " ".join(filter(None, (self.predicate, self.opcode, self.operands)))


@dataclass(frozen=True)
class Resources:
    """Registers, stack and spilled registers of a thread; shared memory of a block. None: the listing does not say.

    registers: on AMD the vector registers, accumulation registers among them. stack_bytes: with the local memory that
    cuobjdump counts beside the stack. static_shared_bytes: what the code itself declares. dynamic_shared_bytes: what a
    launch adds; only Triton records it, in a file beside the code. code_bytes: the length of the code. Only AMD's
    compiler writes the others: spilled_registers are vector registers, and waves_per_simd is its line "Occupancy",
    which knows no dynamic shared memory.
    """

    registers: int | None = None
    stack_bytes: int | None = None
    static_shared_bytes: int | None = None
    spilled_registers: int | None = None
    dynamic_shared_bytes: int | None = None
    code_bytes: int | None = None
    accumulation_registers: int | None = None
    scalar_registers: int | None = None
    spilled_scalar_registers: int | None = None
    waves_per_simd: int | None = None


@dataclass
class Kernel:
    """One kernel's code. `labels`: what a branch names as its target -> index into `instructions`. most_threads: of a
    block, by its launch bounds; None where they are not known."""

    name: str
    kind: str
    arch: str | None
    resources: Resources = Resources()
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    most_threads: int | None = None


# ---- Reading listings ----

SASS_LINE = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+)?\s*([A-Z][\w.]*)\s*([^;]*);")
SASS_CONTROL = re.compile(r"\s+/\* 0x([0-9a-f]{16}) \*/$")  # the line behind an instruction's, from 7.0 on
SASS_KERNEL = re.compile(r"\s+Function : (\S+)|\.text\.(\S+):$")
SASS_ARCH = re.compile(r"\s+(?:code for|\.target)\s+(sm_\w+)")
SASS_INSTRUCTION_BYTES = 16  # from compute capability 7.0 on
ELF_SECTION = re.compile(r"^\.nv\.info\.(\S+)$(.*?)(?=^\.\S|\Z)", re.MULTILINE | re.DOTALL)
MOST_THREADS = re.compile(r"EIATTR_(?:MAX_THREADS|REQNTID)\s+Format:\s+\S+\s+Value:\s+(0x\w+) (0x\w+) (0x\w+)")
SETS_LIMITS = "USETMAXREG"  # the opcode of setmaxnreg
USAGE = re.compile(r"^ Function (\S+):\n\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)(?: LOCAL:(\d+))?", re.MULTILINE)
TARGET = re.compile(r"^Fatbin elf code", re.MULTILINE)  # the next target of a fat binary


def most_threads(text: str) -> dict[str, int]:
    """{kernel: threads of a block at most}, of those with launch bounds, in cuobjdump's output for -elf."""
    found = {name: MOST_THREADS.search(section) for name, section in ELF_SECTION.findall(text)}
    return {name: math.prod(int(size, 16) for size in sizes.groups()) for name, sizes in found.items() if sizes}


def usages(text: str) -> list[tuple[str, Resources]]:
    """(kernel, its resources) in cuobjdump's output for -res-usage. A fat binary has a kernel once for each target."""
    found = [(name, *(int(size or 0) for size in sizes)) for name, *sizes in USAGE.findall(text)]
    return [(name, Resources(registers, stack + local, shared)) for name, registers, stack, shared, local in found]


def parse_sass(text: str) -> list[Kernel]:
    """Kernels of a listing by cuobjdump (-sass, with -res-usage for registers and stack) or nvdisasm (-c)."""
    return [kernel for target in TARGET.split(text) for kernel in sass_of_target(target)]


def sass_of_target(text: str) -> list[Kernel]:
    kernels, resources, arch = [], dict(usages(text)), None
    for line in text.splitlines():
        if match := SASS_LINE.match(line):
            address, predicate, opcode, operands = match.groups()
            if kernels:
                kernels[-1].labels[hex(int(address, 16))] = len(kernels[-1].instructions)
                kernels[-1].instructions.append(Instruction(predicate or "", opcode, operands.strip()))
        elif kernels and kernels[-1].instructions and (match := SASS_CONTROL.match(line)):
            kernels[-1].instructions[-1] = replace(kernels[-1].instructions[-1], control=int(match[1], 16))
        elif match := SASS_KERNEL.match(line):
            name = match[1] or match[2]
            kernels.append(Kernel(name, "sass", arch, resources.get(name, Resources())))
        elif match := SASS_ARCH.match(line):
            arch = match[1]
        elif arch is None and (match := re.search(r"EF_CUDA_SM(\d+)", line)):  # nvdisasm prints nothing else
            arch = f"sm_{match[1]}"
        elif kernels and (match := re.match(r"(\.L\w+|\$\S+):$", line)):
            kernels[-1].labels[match[1]] = len(kernels[-1].instructions)
    for kernel in kernels:
        kernel.resources = replace(kernel.resources, code_bytes=sass_bytes(kernel))
    return kernels


def sass_bytes(kernel: Kernel) -> int | None:
    """The length of the code; None where the addresses are not those of compute capability 7.0 and newer."""
    last = len(kernel.instructions) - 1
    is_even = kernel.labels.get(hex(SASS_INSTRUCTION_BYTES * last)) == last
    return SASS_INSTRUCTION_BYTES * (last + 1) if is_even else None


def parse_ptx(text: str) -> list[Kernel]:
    """Kernels (.entry) of a PTX file. Registers are given out later, by ptxas: resources are None."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/|^\s*\.(?:loc|file)\b[^\n]*", "", text, flags=re.DOTALL | re.MULTILINE)
    kernels, arch = [], None
    for match in re.finditer(r"\.target\s+(\w+)|\.entry\s+([\w$]+)", text):
        if match[1]:
            arch = match[1]
            continue
        kernel = Kernel(match[2], "ptx", arch)
        for statement in braced(text, match.end()).split(";"):
            while label := re.match(r"[\s{}]*(\$?[\w$]+):(?!:)", statement):
                kernel.labels[label[1]] = len(kernel.instructions)
                statement = statement[label.end() :]
            if code := re.match(r"[\s{}]*(@!?%?\w+)?\s*([a-z][\w.:]*)\s*(.*)", statement, re.DOTALL):
                kernel.instructions.append(Instruction(code[1] or "", code[2], " ".join(code[3].split())))
        kernels.append(kernel)
    return kernels


def braced(text: str, start: int) -> str:
    """The text between the first brace after `start` and the one that closes it."""
    depth = 0
    for brace in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[text.index("{", start) + 1 : brace.start()]
    return ""  # cut off


def parse_amdgcn(text: str) -> list[Kernel]:
    """Kernels of an .amdgcn file of Triton, with the resources of its metadata and of the compiler's comments."""
    arch = re.search(r"amdgcn_target \"[^\"]*(gfx\w+)", text)
    kernels, kernel, comments = [], None, {}
    for line in text.splitlines():
        if match := re.match(r"(\w+):\s*; @\1", line):
            kernel = Kernel(match[1], "amdgcn", arch and arch[1])
            kernels.append(kernel)
        elif kernels and (match := AMD_COMMENT.match(line)):  # they stand below the code of their kernel
            comments.setdefault(kernels[-1].name, {})[match[1]] = int(match[2])
        elif kernel is None or line.startswith(".Lfunc_end"):
            kernel = None
        elif match := re.match(r"(\.L\w+):", line):
            kernel.labels[match[1]] = len(kernel.instructions)
        elif match := re.match(r"\s+([a-z]+_\w+)\s*([^;]*)(;.*Folded.*)?", line):
            kernel.instructions.append(Instruction("", match[1], match[2].strip() + (match[3] or "")))
    for entry in re.split(r"^  - ", text.partition("amdhsa.kernels:")[2], flags=re.MULTILINE):
        known = dict(re.findall(r"^(?:    )?\.(\w+):\s+(\S+)$", entry, re.MULTILINE))
        for kernel in kernels:
            if kernel.name == known.get("name"):
                kernel.resources = amd_resources({**comments.get(kernel.name, {}), **known})
    return kernels


def amd_resources(known: dict[str, str | int]) -> Resources:
    """The resources of one kernel. known: the scalar entries of its metadata, and the compiler's comments."""
    names = {
        "registers": "vgpr_count",
        "accumulation_registers": "agpr_count",
        "scalar_registers": "sgpr_count",
        "stack_bytes": "private_segment_fixed_size",
        "static_shared_bytes": "group_segment_fixed_size",
        "spilled_registers": "vgpr_spill_count",
        "spilled_scalar_registers": "sgpr_spill_count",
        "code_bytes": "codeLenInByte",
        "waves_per_simd": "Occupancy",
    }
    return Resources(**{key: int(known[name]) for key, name in names.items() if name in known})


AMD_COMMENT = re.compile(r"; (codeLenInByte|Occupancy)\s*[=:]\s*(\d+)$")
PARSERS = {"sass": parse_sass, "ptx": parse_ptx, "amdgcn": parse_amdgcn}
MANGLED = re.compile(r"^_Z(N[rVK]*|L)?")


def plain_name(function: str) -> str:
    """The innermost name in a mangled one, without its arguments: scale of _ZN2my5scaleEPf."""
    if (mangled := MANGLED.match(function)) is None:
        return function
    rest, name, is_nested = function[mangled.end() :], function, (mangled[1] or "").startswith("N")
    while length := re.match(r"\d+", rest):
        end = length.end() + int(length[0])
        name, rest = rest[length.end() : end], rest[end:]
        if not is_nested:
            break  # what follows are the types of its arguments
    return name


def tensor_family(opcode: str) -> str:
    """HGMMA of HGMMA.64x128x16.F32.BF16, mfma of v_mfma_f32_32x32x8_bf16."""
    return opcode.removeprefix("v_").partition("." if opcode[:1].isupper() else "_")[0]
