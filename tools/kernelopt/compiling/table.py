"""Compilations for a terminal: a table across targets, what was refused, the configurations of autotuned kernels."""

from collections.abc import Sequence

from ..diagnosis.diagnosis import Finding
from ..disassembly.listings import tensor_family
from ..statuses import Status
from . import findings
from .compiled import Compiled, CompiledKernel, reason

HEADER = "kernel target reg spill stack shared warps stages tensor load store code occ% limited_by".split()
CONFIGURATIONS = 10  # of a kernel for a target, shown
ERROR_LINES = 12
UNITS = (
    "reg: registers of a thread (AMD: vector+accumulation,scalar); spill, stack: bytes of a thread (s: scalars)",
    "shared: bytes of a block (AMD: LDS); load, store: bits of a global access; code: bytes; occ%: theoretical",
)


def lines(results: Sequence[Compiled]) -> list[str]:
    """Everything about some targets."""
    chosen = [(kernel, one) for one in results for kernel in one.chosen]
    order = {name: at for at, name in enumerate(dict.fromkeys(kernel.name for kernel, _ in chosen))}
    rows = [cells(*pair) for pair in sorted(chosen, key=lambda pair: order[pair[0].name])]
    text = [*aligned([HEADER, *rows]), "", *UNITS] if rows else []
    for one in results:
        text += ["", *of_target(one)]
    return text


def of_target(one: Compiled) -> list[str]:
    """What the table does not say of a target."""
    refused = "not compiled" if one.lacking else one.status
    head = one.target.label if one.status == Status.OK else f"{refused} for {one.target.arch}"
    text = [head if one.target.page is None else f"{head} ({one.target.name})"]
    error = (one.error or "").splitlines()
    text += [f"  {line}" for line in error[:ERROR_LINES]]
    text += [f"  and {len(error) - ERROR_LINES} lines more: --json has all"] if len(error) > ERROR_LINES else []
    text += [f"  {one.assumed}"] if one.assumed else []
    for kernel in one.chosen:
        text += [f"  {kernel.name}: {without_occupancy(kernel)}"] if kernel.occupancy_error else []
        remarks = {name: remark for name, remark in kernel.remarks.items() if name not in findings.COVERED}
        text += [f"  {kernel.name}: {remark}" for remark in remarks.values()]
    text += [f"  ! {one_line(finding)}" for finding in findings.of(one)]
    for name in dict.fromkeys(kernel.name for kernel in one.kernels if kernel.configuration):
        text += [f"  {line}" for line in of_configurations(name, one)]
    if one.left_out:
        text.append(f"  {one.left_out} configurations were not compiled: --timeout and --configurations allow more")
    return text


def without_occupancy(kernel: CompiledKernel) -> str:
    """Why the occupancy is unknown, and what AMD's compiler says in its place."""
    why, waves = kernel.occupancy_error, kernel.waves_per_simd if kernel.status == Status.OK else None
    by_compiler = f"; by AMD's compiler the registers allow {waves} waves on a SIMD" if waves else ""
    return ("" if why.startswith("no occupancy") else "no occupancy: ") + why + by_compiler


def brief_lines(results: Sequence[Compiled]) -> list[str]:
    """The results for a language model: a line for each kernel and target, and below it what the code proves."""
    text = []
    for one in results:
        if one.status != Status.OK:
            text.append(f"- {one.target.title}: {one.status}: {reason(one.error)}")
        for kernel in one.chosen:
            occupancy = f"{kernel.occupancy_pct:.3g} %" if kernel.occupancy_pct is not None else "unknown"
            text.append(
                f"- {one.target.label}: `{name_of(kernel, one)}`: {registers(kernel)} registers, "
                f"{shown(kernel.spill_bytes)} bytes spilled, {shown(kernel.shared_bytes)} bytes of a block, "
                f"tensor instructions {tensor(kernel)}, theoretical occupancy {occupancy}"
            )
        text += [f"  - {finding.id}: {finding.inference}" for finding in findings.of(one)]
    return text


def one_line(finding: Finding) -> str:
    return f"{finding.id}: {finding.inference}; try: {finding.actions[0]} ({finding.wiki})"


def of_configurations(name: str, one: Compiled) -> list[str]:
    """The configurations of an autotuned kernel, those that fit best first."""
    every = [kernel for kernel in one.kernels if kernel.name == name and kernel.configuration]
    fitting = [kernel for kernel in every if kernel.status == Status.OK and not kernel.spills]
    said = f"{name}: {len(fitting)} of {len(every)} configurations fit without a spill; by what fits, not by speed:"
    return [said, *(f"  {of_configuration(kernel)}" for kernel in every[:CONFIGURATIONS]), *more(len(every))]


def of_configuration(kernel: CompiledKernel) -> str:
    if kernel.registers is None:
        return f"{kernel.configuration}: {kernel.status}: {reason(kernel.error)}"
    occupancy = "" if kernel.occupancy_pct is None else f", {kernel.occupancy_pct:.3g} % occupancy"
    refused = "" if kernel.status == Status.OK else f"; {kernel.status}: {reason(kernel.error)}"
    return (
        f"{kernel.configuration}: {kernel.registers} registers, {shown(kernel.spill_bytes)} bytes spilled, "
        f"{shown(kernel.shared_bytes)} bytes shared{occupancy}{refused}"
    )


def more(count: int) -> list[str]:
    return [f"  and {count - CONFIGURATIONS} more: --json has all"] if count > CONFIGURATIONS else []


def name_of(kernel: CompiledKernel, one: Compiled) -> str:
    """The kernel's name; where it was compiled more than once, with the constants in which these differ."""
    same = [other.constants for other in one.chosen if other.name == kernel.name]
    own = kernel.constants.items()
    differing = [f"{name}={value}" for name, value in own if any(other.get(name) != value for other in same)]
    return " ".join([kernel.name, *differing])


def cells(kernel: CompiledKernel, one: Compiled) -> list[str]:
    """A row of the table."""
    scalar = f"+{kernel.spilled_scalar_registers}s" if kernel.spilled_scalar_registers else ""
    loads = {**kernel.access_bits.get("global load", {}), **kernel.access_bits.get("global to shared copy", {})}
    return [
        name_of(kernel, one),
        one.target.arch,
        registers(kernel),
        shown(kernel.spill_bytes) + scalar,
        shown(kernel.stack_bytes),
        shown(kernel.shared_bytes),
        shown(kernel.warps),
        shown(kernel.stages),
        tensor(kernel),
        bits(loads, kernel.bulk_copies, "load", "bulk copy"),
        bits(kernel.access_bits.get("global store", {}), kernel.bulk_copies, "store"),
        shown(kernel.code_bytes),
        "?" if kernel.occupancy_pct is None else f"{kernel.occupancy_pct:.3g}",
        ",".join(kernel.limiters) or "-",
    ]


def registers(kernel: CompiledKernel) -> str:
    """ "168", on AMD "256+256,29": vector, accumulation, scalar."""
    if kernel.scalar_registers is None:
        return shown(kernel.registers)
    sums = kernel.accumulation_registers or 0
    return f"{kernel.registers - sums}{f'+{sums}' if sums else ''},{kernel.scalar_registers}"


def tensor(kernel: CompiledKernel) -> str:
    """ "HGMMA:32", or a dash for none; where the code could not be read, "?"."""
    families: dict[str, int] = {}
    for opcode, count in kernel.tensor_instructions.items():
        families[tensor_family(opcode)] = families.get(tensor_family(opcode), 0) + count
    return ",".join(f"{name}:{count}" for name, count in families.items()) or ("-" if kernel.arch else "?")


def bits(widths: dict[int, int], bulk: dict[str, int], *classes: str) -> str:
    """ "128", "16-128", "TMA" for copies that no thread makes."""
    copies = [name.split()[0] for name in bulk if name.endswith(classes)]
    ends = sorted({min(widths), max(widths)}) if widths else []
    known = ["-".join(map(str, ends))] if ends else []
    return "+".join([*known, *sorted(set(copies))]) or "-"


def shown(value: int | None) -> str:
    return "?" if value is None else str(value)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
