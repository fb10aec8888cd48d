"""What a report with source counters says of single instructions and source lines (`--mode ncu`): where the time goes."""

from collections import Counter, defaultdict
from pathlib import Path

from . import ncu

SAMPLES = "smsp__pcsamp_sample_count"
STALLS = "smsp__pcsamp_warps_issue_stalled_"
COUNTERS = {  # by instruction -> the name in our tables
    "executed": "inst_executed",
    "excess_sectors": "derived__memory_l2_theoretical_sectors_global_excessive",
    "excess_wavefronts": "derived__memory_l1_wavefronts_shared_excessive",
}


def read(report: Path) -> list[dict]:
    """Per kernel {name, instructions, sources}, in launch order.

    instructions: [{address, sass, ptx, file, line, samples, stall, executed, excess_sectors, excess_wavefronts}] by address;
    samples are warps found stalled there or issuing, stall the commonest reason. sources: {file: text}. A report without source
    counters has no instructions.
    """
    return [_kernel(action) for action in ncu.actions(report)]


def _kernel(action) -> dict:
    names = set(action.metric_names())
    counts = {key: by_address(action, name) for key, name in COUNTERS.items() if name in names}
    samples = by_address(action, SAMPLES) if SAMPLES in names else {}
    stalls = stall_reasons(action, names)
    addresses = sorted(set(samples).union(*counts.values()) if counts else samples)
    first = addresses[0] if addresses else 0
    instructions = []
    for address in addresses:
        place = action.source_info(address)
        instructions.append(
            {
                "address": address - first,
                "sass": " ".join(action.sass_by_pc(address).split()),
                "ptx": " ".join(action.ptx_by_pc(address).split()) or None,
                "file": place.file_name() if place else None,
                "line": place.line() if place else None,
                "samples": samples.get(address, 0),
                "stall": stalls[address].most_common(1)[0][0] if address in stalls else None,
                **{key: values.get(address, 0) for key, values in counts.items()},
            }
        )
    sources = {file: text for file, text in action.source_files().items() if text}
    return {"name": action.name(), "instructions": instructions, "sources": sources}


def by_address(action, name: str) -> dict[int, int]:
    """The values of a metric by instruction."""
    metric = action[name]
    places = metric.correlation_ids()
    return {places.as_uint64(i): metric.as_uint64(i) for i in range(metric.num_instances())}


def stall_reasons(action, names: set[str]) -> dict[int, Counter]:
    found: dict[int, Counter] = defaultdict(Counter)
    for name in names:
        reason = name.removeprefix(STALLS)
        if name.startswith(STALLS) and not name.endswith("_not_issued") and reason != "selected":
            for address, count in by_address(action, name).items():
                if count:
                    found[address][reason] += count
    return found


def lines(kernel: dict) -> list[dict]:
    """[{file, line, text, samples, share_pct, stall, instructions, excess_sectors}] of a kernel's source, most samples first.
    Pure."""
    total = sum(instruction["samples"] for instruction in kernel["instructions"])
    groups: dict[tuple, list[dict]] = defaultdict(list)
    for instruction in kernel["instructions"]:
        groups[instruction["file"], instruction["line"]].append(instruction)
    found = []
    for (file, line), own in groups.items():
        samples = sum(instruction["samples"] for instruction in own)
        reasons = Counter()
        for instruction in own:
            reasons[instruction["stall"]] += instruction["samples"] if instruction["stall"] else 0
        found.append(
            {
                "file": file,
                "line": line,
                "text": source_line(kernel["sources"], file, line),
                "samples": samples,
                "share_pct": 100 * samples / total if total else None,
                "stall": reasons.most_common(1)[0][0] if samples else None,
                "instructions": len(own),
                "excess_sectors": sum(instruction.get("excess_sectors", 0) for instruction in own),
            }
        )
    return sorted(found, key=lambda line: -line["samples"])


def source_line(sources: dict[str, str], file: str | None, line: int | None) -> str | None:
    text = sources.get(file, "").splitlines() if file else []
    return text[line - 1].strip() if line and line <= len(text) else None


def annotated_source(kernel: dict) -> dict[str, str]:
    """{file: its text, each line behind its share of the samples} Pure."""
    shares = {(found["file"], found["line"]): found["share_pct"] for found in lines(kernel)}
    annotated = {}
    for file, text in kernel["sources"].items():
        rows = enumerate(text.splitlines(), start=1)
        annotated[file] = "\n".join(f"{_percent(shares.get((file, number)))} | {row}" for number, row in rows) + "\n"
    return annotated


def annotated_sass(kernel: dict) -> str:
    """The instructions, each behind its address, its share of the samples and what it waits for. Pure."""
    total = sum(instruction["samples"] for instruction in kernel["instructions"])
    rows = []
    for instruction in kernel["instructions"]:
        share = 100 * instruction["samples"] / total if total else None
        place = f"line {instruction['line']}" if instruction["line"] else ""
        stall = instruction["stall"] or ""
        rows.append(f"{instruction['address']:06x} {_percent(share)} {stall:18} {place:9} {instruction['sass']}")
    return "\n".join(rows) + "\n"


def _percent(share: float | None) -> str:
    return f"{share:5.1f} %" if share else " " * 7
