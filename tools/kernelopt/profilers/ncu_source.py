"""Where the time goes by instruction and source line, from a report with source counters (`--mode ncu`)."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from . import ncu

SAMPLES = "smsp__pcsamp_sample_count"
STALLS = "smsp__pcsamp_warps_issue_stalled_"
PER_INSTRUCTION = {  # field of SampledInstruction -> NVIDIA's metric
    "executed": "inst_executed",
    "excess_sectors": "derived__memory_l2_theoretical_sectors_global_excessive",
    "excess_wavefronts": "derived__memory_l1_wavefronts_shared_excessive",
}


@dataclass(frozen=True)
class SampledInstruction:
    """address: in bytes from the kernel's first instruction. samples: how often the sampler saw a warp there, stalled
    or issuing. stall: the most frequent reason."""

    address: int
    sass: str
    ptx: str | None
    file: str | None
    line: int | None
    samples: int
    stall: str | None
    executed: int = 0
    excess_sectors: int = 0
    excess_wavefronts: int = 0


@dataclass(frozen=True)
class KernelSource:
    """instructions: by address; empty where the report has no source counters. sources: file -> text."""

    name: str
    instructions: tuple[SampledInstruction, ...]
    sources: dict[str, str]


@dataclass(frozen=True)
class SourceLine:
    """One line of a kernel's source. share_pct: of all samples; None without samples. instructions: how many."""

    file: str | None
    line: int | None
    text: str | None
    samples: int
    share_pct: float | None
    stall: str | None
    instructions: int
    excess_sectors: int


def read(report: Path) -> tuple[KernelSource, ...]:
    """The kernels of a report in launch order. Refused when it holds no kernel."""
    return ncu.read_launches(report, _kernel)


def _kernel(action) -> KernelSource:
    names = set(action.metric_names())
    counts = {key: by_address(action, name) for key, name in PER_INSTRUCTION.items() if name in names}
    samples = by_address(action, SAMPLES) if SAMPLES in names else {}
    stalls = stall_reasons(action, names)
    addresses = sorted(set(samples).union(*counts.values()) if counts else samples)
    first = addresses[0] if addresses else 0
    instructions = []
    for address in addresses:
        place = action.source_info(address)
        instructions.append(
            SampledInstruction(
                address=address - first,
                sass=" ".join(action.sass_by_pc(address).split()),
                ptx=" ".join(action.ptx_by_pc(address).split()) or None,
                file=place.file_name() if place else None,
                line=place.line() if place else None,
                samples=samples.get(address, 0),
                stall=stalls[address].most_common(1)[0][0] if address in stalls else None,
                **{key: values.get(address, 0) for key, values in counts.items()},
            )
        )
    sources = {file: text for file, text in action.source_files().items() if text}
    return KernelSource(action.name(), tuple(instructions), sources)


def by_address(action, name: str) -> dict[int, int]:
    """The values of a metric by instruction."""
    metric = action[name]
    places = metric.correlation_ids()
    return {places.as_uint64(i): metric.as_uint64(i) for i in range(metric.num_instances())}


def stall_reasons(action, names: set[str]) -> dict[int, Counter]:
    """The number of samples by reason, for each instruction with a stall."""
    reasons: dict[int, Counter] = defaultdict(Counter)
    for name in names:
        reason = name.removeprefix(STALLS)
        if name.startswith(STALLS) and not name.endswith("_not_issued") and reason != "selected":
            for address, count in by_address(action, name).items():
                if count:
                    reasons[address][reason] += count
    return reasons


def lines(kernel: KernelSource) -> list[SourceLine]:
    """The lines of a kernel's source, most samples first. Pure."""
    groups: dict[tuple, list[SampledInstruction]] = defaultdict(list)
    for instruction in kernel.instructions:
        groups[instruction.file, instruction.line].append(instruction)
    total = total_samples(kernel.instructions)
    merged = [source_line(kernel, instructions, total) for instructions in groups.values()]
    return sorted(merged, key=lambda line: -line.samples)


def total_samples(instructions: Iterable[SampledInstruction]) -> int:
    return sum(instruction.samples for instruction in instructions)


def source_line(kernel: KernelSource, instructions: list[SampledInstruction], total: int) -> SourceLine:
    """The sum of the instructions of one line. total: samples of the kernel."""
    file, line, samples = instructions[0].file, instructions[0].line, total_samples(instructions)
    reasons: Counter = Counter()
    for instruction in instructions:
        reasons[instruction.stall] += instruction.samples if instruction.stall else 0
    return SourceLine(
        file=file,
        line=line,
        text=text_of_line(kernel.sources, file, line),
        samples=samples,
        share_pct=100 * samples / total if total else None,
        stall=reasons.most_common(1)[0][0] if samples else None,
        instructions=len(instructions),
        excess_sectors=sum(instruction.excess_sectors for instruction in instructions),
    )


def text_of_line(sources: dict[str, str], file: str | None, line: int | None) -> str | None:
    text = sources.get(file, "").splitlines() if file else []
    return text[line - 1].strip() if line and line <= len(text) else None


def annotated_source(kernel: KernelSource) -> dict[str, str]:
    """file -> its text, with the share of the samples before each line. Pure."""
    shares = {(line.file, line.line): line.share_pct for line in lines(kernel)}
    annotated = {}
    for file, text in kernel.sources.items():
        rows = enumerate(text.splitlines(), start=1)
        annotated[file] = "\n".join(f"{_percent(shares.get((file, number)))} | {row}" for number, row in rows) + "\n"
    return annotated


def annotated_sass(kernel: KernelSource) -> str:
    """The instructions, one a line, with address, share of the samples and stall before each. Pure."""
    total = total_samples(kernel.instructions)
    rows = []
    for instruction in kernel.instructions:
        share = 100 * instruction.samples / total if total else None
        place = f"line {instruction.line}" if instruction.line else ""
        stall = instruction.stall or ""
        rows.append(f"{instruction.address:06x} {_percent(share)} {stall:18} {place:9} {instruction.sass}")
    return "\n".join(rows) + "\n"


def _percent(share: float | None) -> str:
    return f"{share:5.1f} %" if share else " " * 7
