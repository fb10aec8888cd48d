"""The measured ceiling of a problem's tensor operations, and its rows on the calibration page of a workspace. All
functions are pure.

A ceiling is what the bare tensor operations take on this card (worker.tensor_probe): a floor. What a library's
product reaches is a library rate: an opponent.
"""

from ..hardware import wiki
from ..hardware.card import Card
from ..hardware.roofline import CEILING, PROBLEM_CEILING, SUSTAINED
from ..hardware.work import rate_unit
from . import calibration, platforms
from .ceiling_report import PARTS, Part, TensorCeiling

ENDINGS = {"cold": "", "burst": "_burst", "sustained": SUSTAINED}  # how it was timed -> end of the row's name
HOW = {"cold": "L2 flushed before each call", "burst": "back to back from rest", "sustained": "back to back"}
SOURCE = "[ceiling]"


def lines(ceiling: TensorCeiling) -> list[str]:
    """The ceiling in words, a line a way of timing."""
    beside = f" beside {ceiling.other.words()}" if ceiling.other else ""
    first = (
        f"{ceiling.instruction}{beside}: {ceiling.flops} FLOP, by a launch of {ceiling.done_flops} on all "
        f"multiprocessors; own sums right within {ceiling.relative_error:.1g}"
    )
    return [first, *(f"  {part}: {words(ceiling, part)}" for part in PARTS)]


def words(ceiling: TensorCeiling, part: str) -> str:
    unit = rate_unit(ceiling.dtype)
    return f"{ceiling.time_us(part):.1f} us, {ceiling.rate(part):.0f} {unit}; {conditions(getattr(ceiling, part))}"


def conditions(part: Part) -> str:
    """What was taken off, the clock inside the kernel, then power and reasons of NVML."""
    taken_off = f"{part.start_up_us:.1f} us of start-up taken off, " if part.start_up_us else ""
    return taken_off + calibration.condition(part.state, f"SM {part.clock_mhz:.0f} MHz in the kernel")


def metric(ceiling: TensorCeiling) -> str:
    """The name of its row: "measured_bf16_tensor_ceiling", or "…_problem_ceiling" beside other arithmetic."""
    return (PROBLEM_CEILING if ceiling.other else CEILING).format(ceiling.dtype)


def rows(ceiling: TensorCeiling) -> list[str]:
    """Its rows on a page, one a way of timing."""
    unit = rate_unit(ceiling.dtype)
    made = []
    for part, ending in ENDINGS.items():
        timed = getattr(ceiling, part)
        scatter = ""
        if timed.p20_us:
            at = [ceiling.done_flops / us / 1e6 for us in (timed.p80_us, timed.p20_us)]
            scatter = f"; p20 {calibration.figure(at[0])}, p80 {calibration.figure(at[1])}"
        beside = f", beside {ceiling.other.words()}" if ceiling.other else ""
        note = f"{ceiling.instruction}, {ceiling.done_flops} FLOP{beside}; {HOW[part]}{scatter}; {conditions(timed)}"
        value = calibration.figure(ceiling.rate(part))
        made.append(f"| {metric(ceiling)}{ending} | {value} | {unit} | {SOURCE} | measured | {note} |")
    return made


def source(device: Card, date: str) -> str:
    """The line under Sources that the rows name."""
    return (
        f"- {SOURCE}: `python tools/measure_ceiling.py --workspace W` on one {device.name} ({device.uuid}), "
        f"{date}, driver {device.driver}, clocks as found: tensor operations on random operands in shared memory."
    )


def new_page(page: wiki.Page, device: Card) -> str:
    """A calibration page without rows, for a card that the wiki has a page of."""
    return f"""# {page.platform}

What this very card gave, measured by measure_ceiling.py.

Aliases: {device.name}
Architecture: {page.architecture}
Vendor: NVIDIA

{wiki.HEADER}
|---|---|---|---|---|---|

## Sources
"""


def carried_over(fresh: str, before: str, device: Card) -> str:
    """A new calibration page with the ceilings that the page before it held. Both without their digests. Rows that were
    measured on another card of that name go."""
    start = f"- {SOURCE}:"
    sources = [line for line in before.splitlines() if line.startswith(start) and f"({device.uuid})" in line]
    rows = [line for line in before.splitlines() if line.startswith("|") and f"| {SOURCE} |" in line]
    return with_rows(fresh, rows, sources[0]) + "\n" if sources and rows else fresh


def with_rows(text: str, new: list[str], source_line: str) -> str:
    """A calibration page, without its digest, with these rows and their source. Rows of the same name and source go."""
    names = {row.split("|")[1].strip() for row in new}
    lines = [line for line in text.rstrip("\n").splitlines() if not replaced(line, names)]
    end = table_end(lines, lines.index(wiki.HEADER))
    gap = [""] if lines[-1].startswith("#") else []
    return "\n".join([*lines[:end], *new, *lines[end:], *gap, source_line])


def replaced(line: str, names: set[str]) -> bool:
    return line.startswith(f"- {SOURCE}:") or (line.startswith("|") and line.split("|")[1].strip() in names)


def table_end(text: list[str], start: int) -> int:
    """The number of the first line after the table that begins at `start`."""
    return next((number for number in range(start, len(text)) if not text[number].startswith("|")), len(text))


def page_with(measured: list[TensorCeiling], before: str, device: Card, date: str) -> str:
    """The whole calibration page with the ceilings, sealed. before: the page so far, without its digest."""
    new = [row for ceiling in measured for row in rows(ceiling)]
    return platforms.sealed(with_rows(before, new, source(device, date)) + "\n")
