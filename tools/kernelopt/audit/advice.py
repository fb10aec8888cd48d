"""What to write in place of a figure that nothing supports. Pure."""

from ..hardware.wiki import Row
from .citations import Context, Fix, Piece, rate_of
from .stated import SAME, Claim, is_named, matching
from .units import convertible, equal

# The property that a kernel queries instead of a constant (torch's _CudaDeviceProperties).
QUERIES = {
    "sm_count": "multi_processor_count",
    "cu_count": "multi_processor_count",
    "l2_capacity": "L2_cache_size",
    "memory_capacity": "total_memory",
    "memory_bus_width": "memory_bus_width",
    "warp_size": "warp_size",
    "wavefront_size": "warp_size",
    "shared_memory_per_sm": "shared_memory_per_multiprocessor",
    "shared_memory_per_block": "shared_memory_per_block_optin",
    "shared_memory_per_block_default": "shared_memory_per_block",
    "registers_per_sm": "regs_per_multiprocessor",
    "threads_per_sm": "max_threads_per_multi_processor",
    "threads_per_cu": "max_threads_per_multi_processor",
}


def uncited(spelling: str, claim: Claim, piece: Piece, context: Context) -> tuple[str, str]:
    """Return the (kind, message) of a figure that nothing supports."""
    rows = claim.matching or claim.derived
    platform = context.product.platform if context.product else "this card"
    if piece.code and rows:
        names = " or ".join(row.metric for row in rows)
        return "hard-coded", f"'{spelling}' is {names} of {platform}; {query(rows[0], platform)}"
    return "uncited", f"'{spelling}' {because(claim, platform, context)}"


def because(claim: Claim, platform: str, context: Context) -> str:
    """Return the problem of a figure that nothing supports, and the text to write instead."""
    if claim.matching:
        return (
            f"is no citation and no program recorded it; write: {', or: '.join(row.citation for row in claim.matching)}"
        )
    if claim.derived:
        row = claim.derived[0]
        return f"is a share of {row.metric}; cite that beside it: {row.citation}"
    if claim.foreign:
        row = claim.foreign[0]
        if context.product is None:
            return f"is no citation; if {row.metric} is meant, write: {row.citation}"
        mine = context.product.known(row.metric)
        whose = dict.fromkeys(
            context.pages[other.page].platform for other in claim.foreign if other.metric == row.metric
        )
        theirs = f"is {row.metric} of {' and '.join([*whose][:3])}, the task is for {platform}"
        return f"{theirs}; write: {mine.citation}" if mine else theirs
    if claim.vendors:
        return (
            f"is called a peak or the vendor's, for which no record stands, and no row of {platform} holds it; cite "
            "the wiki"
        )
    return "is no citation and no program recorded it; cite the wiki, or take it from a record"


def query(row: Row, platform: str) -> str:
    """Return the query that a program uses instead of a constant."""
    name = QUERIES.get(row.metric)
    if name:
        return f"ask the device: torch.cuda.get_device_properties(0).{name}"
    return f"pass it in, from: gpu_specs.py lookup '{platform}' {row.metric} ({row.citation})"


def citing(claim: Claim, text: str, piece: Piece, context: Context) -> Fix | None:
    """Return the citation to insert after a hint's figure, if exactly one row matches."""
    figure = claim.figure
    if piece.used or piece.code or piece.column < 0 or len(claim.matching) != 1:
        return None
    row, unit = claim.matching[0], rate_of(figure.unit) if figure.unit else None
    if len(matching(figure, claim.readings, context.rows, SAME)) > 1 and not is_named(row, figure):
        return None
    if unit and not (convertible(unit, row.unit) and equal(figure.number.value, unit, row.value, row.unit)):
        return None
    start = max(figure.start, text.rfind("\n", 0, figure.end) + 1)
    written = text[start : figure.end]
    return Fix(*piece.place(start), written, f"{written} ({row.citation})")
