"""The table of an exploration for a terminal."""

from pathlib import Path

from ..device import spent
from ..session.explorations import little_came_of, of_result
from ..statuses import Status
from .candidates import short_name
from .run import MOST_SUSTAINED

MOST_NAMES = 4  # before a text that many rows share
HEADER = (
    *("candidate", "status", "us", "p20-p80", "speed-up", "95 % interval"),
    *("reg", "spill", "shared", "occ %", "MHz"),
)


def lines(result: dict, path: Path | None, advises: bool = True) -> list[str]:
    """One line per row, best first; under it the other workloads, and the whole error of each candidate that failed.
    Above it, where the task has more workloads, which one it is of: at another size the kernel, its registers and its
    time may be others. advises: say where little came of it; a gate that follows knows better."""
    table = aligned([HEADER, *(cells_of(row) for row in result["rows"])])
    errors = [(row["name"], text) for row in result["rows"] for text in errors_of(row)]
    notes = [f"* dropped as slower; MHz: of the best {MOST_SUSTAINED} in the lead"]
    if result["against"]:
        notes = [f"speed-up over {result['against']}; {notes[0]}"]
    if result["device"] == "cpu-interpreter":
        checked = "check" in result["seconds"]  # not where all are CUDA C++
        notes = ["checked in the CPU interpreter, nothing was timed" if checked else "nothing was checked or timed"]
        if result["compiled"]:
            notes.append(f"registers, spills, shared memory: {result['compiled']['label']}")
        errors += [(row["name"], text) for row in result["rows"] for text in (*not_compiled(row), *proved(row))]
    notes += serialized(result["rows"]) + products_dropped(result["rows"])
    if result["stopped_after_s"] is not None:
        notes.append(f"stopped after {result['stopped_after_s']:.0f} s: what was not finished by then is TIMEOUT")
    notes.append(spent.took(result["wall_s"], result["seconds"]))
    if path and advises and (little := little_came_of(of_result(result, path.stem))):
        notes.append(little)
    shown = [*caption(result), *table, *by_workload(result)]
    return [*shown, *notes, *by_text(errors), *([str(path)] if path else [])]


def aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows of as many cells each, in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def errors_of(row: dict) -> list[str]:
    """Of the first workload, and of the others."""
    others = [f"at {at}: {one['error']}" for at, one in row["others"].items() if one["error"]]
    return [row["error"], *others] if row["error"] else others


def tried_on(result: dict) -> list[str]:
    """The workloads after the first that candidates were tried on."""
    return list(dict.fromkeys(name for row in result["rows"] for name in row["others"]))


def caption(result: dict) -> list[str]:
    """The line above the table; none where the task has one workload."""
    first, others = result["workload"], tried_on(result)
    left = [name for name in result["workloads"] if name not in (first, *others)]
    if not (others or left):
        return []
    below = f"; {', '.join(others)} below" if others else ""
    lacks = f"; the task also has {', '.join(left)} (--workload all takes all)" if left else ""
    return [f"workload {first} alone, all columns{below}{lacks}"]


def by_workload(result: dict) -> list[str]:
    """A table of the rows that were tried on other workloads too."""
    others, rows = tried_on(result), [row for row in result["rows"] if row["others"]]
    if not others:
        return []
    cells = [("candidate", result["workload"], *others, "mean")]
    for row in rows:
        times = map(at_workload, (row, *map(row["others"].get, others)))
        cells.append((short_name(row["name"]), *times, f"{row['mean']:.3f}x" if row["mean"] else ""))
    return ["", *aligned(cells), ""]


def at_workload(one: dict | None) -> str:
    """ "24.10 us 1.204x", with * where it was dropped; the status of what is not right or has no time; "" for None."""
    if one is None:
        return ""
    time, ratio = one["latency_us"], one["against_best"]
    if not time or one["status"] != Status.OK:
        return one["status"] or "not reached"
    speed = f" {ratio['point']:.3f}x" if ratio else ""
    return f"{time['median']:.2f} us{speed}{'*' * one['dropped']}"


def by_text(said: list[tuple[str, str]]) -> list[str]:
    """One line for each text, under the names of the rows that it is of: the first ones, where they are many."""
    return [f"{few(names)}: {text}" for text, names in grouped(said).items()]


def grouped(said: list[tuple[str, str]]) -> dict[str, list[str]]:
    """The names of each text."""
    names: dict[str, list[str]] = {}
    for name, text in said:
        names.setdefault(text, []).append(name)
    return names


def few(names: list[str]) -> str:
    shown = names if len(names) <= MOST_NAMES else [*names[: MOST_NAMES - 1], f"{len(names) - MOST_NAMES + 1} more"]
    return ", ".join(shown)


def cells_of(row: dict) -> tuple[str, ...]:
    time, ratio = row["latency_us"], row["against_best"]
    return (
        short_name(row["name"]) + ("*" if row["dropped"] else ""),
        word_of(row),
        f"{time['median']:.2f}" if time else "",
        f"{time['p20']:.2f}-{time['p80']:.2f}" if time else "",
        f"{ratio['point']:.3f}x" if ratio else "",
        f"{ratio['ci95'][0]:.3f}-{ratio['ci95'][1]:.3f}" if ratio else "",
        *(whole(row[name]) for name in ("registers", "spill_bytes", "shared_bytes", "occupancy_pct", "sm_clock_mhz")),
    )


def word_of(row: dict) -> str:
    """The status; a word of its own for what was not checked, and for what there was no time for."""
    if row["opponent"] and row["status"] == Status.OK:
        return "probe" if row["probe"] else "opponent"
    return row["status"] if row["started"] else "not started"


def whole(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def serialized(rows: list[dict]) -> list[str]:
    """All candidates whose wgmma instructions ptxas serializes, by its reason."""
    reasons = [(row["name"], row["wgmma_serialized"]) for row in rows]
    by_reason = grouped([(name, reason) for name, reason in reasons if reason])
    said = [f"ptxas serializes wgmma, {reason}: {', '.join(names)}" for reason, names in by_reason.items()]
    return [*said, "what provokes each, and what to do: gpu-wiki/docs/errors/nvcc-ptxas.md"] if said else []


def products_dropped(rows: list[dict]) -> list[str]:
    """The probes that do fewer products than their file's kernel: the compiler drops those whose results nobody reads,
    so the time says less than the probe's name."""
    said = [(row["name"], row["products_dropped"]) for row in rows if row["products_dropped"]]
    return [f"{text}: a product that nobody reads is dropped; keep its results alive" for text in by_text(said)]


def proved(row: dict) -> list[str]:
    """What the compiled code of a candidate proves before it ran, beside what `serialized` tells."""
    findings = row["compiled"]["findings"] if row["compiled"] else []
    others = [finding for finding in findings if finding["id"] != "compiled_serialized_wgmma"]
    return [f"{finding['id']}: {finding['inference']}" for finding in others]


def not_compiled(row: dict) -> list[str]:
    """Why a candidate, or one of its sources, was not compiled, where its own error does not say it."""
    compiled = row["compiled"]
    error = compiled and compiled["error"]
    refused = "" if compiled and compiled["status"] == Status.OK else "not compiled: "
    return [f"{refused}{error}"] if error and error not in (row["error"] or "") else []
