"""The audit of a text: its citations, and its figures that state a hardware value. All functions are pure.

A wrong citation is always a problem. Where values are used, a figure is also a problem if no citation and no program
gives it for that quantity. Elsewhere, a figure that equals a row of the platform's pages is a hint.
"""

import re
from collections.abc import Iterable

from .advice import citing, uncited
from .citations import (
    ARROW,
    CITATION,
    MISSING,
    Context,
    Fix,
    Found,
    Piece,
    Problem,
    check_citation,
    hedge_of,
    malformed,
)
from .figures import SPOKEN, Figure, figures
from .meant import is_meant
from .stated import claim_of
from .support import is_held, off_ridge
from .units import Pattern
from .wording import blank_names, level

LONG_WORD = Pattern(r"\S{1000,}")  # not a citation; the patterns would take seconds on it
SOMETHING = Pattern(r"[\d<]|UNKNOWN")  # other texts hold only numbers in words, or nothing to check


def audit(pieces: Iterable[Piece], context: Context, hints: bool = True) -> Found:
    """Audit every hardware value of the pieces. Without hints, only find what can block a gate."""
    findings = Found()
    for piece in pieces:
        if SOMETHING.search(piece.text) or SPOKEN.search(piece.text):
            audit_piece(piece, context, findings, hints)
    return findings


def audit_piece(piece: Piece, context: Context, findings: Found, hints: bool) -> None:
    text = LONG_WORD.sub(lambda match: " " * len(match[0]), piece.text) if len(piece.text) > 1000 else piece.text
    citations = list(CITATION.finditer(text)) if "<-" in text else []
    missing = list(MISSING.finditer(text)) if "UNKNOWN" in text else []
    for match in citations:
        audit_citation(match, piece, context, findings)
    for match in missing:
        row = context.product.known(match["metric"]) if context.product else None
        if row:
            add(findings, piece, match.start(), "known", f"the wiki holds it: {row.citation}")
    rest = blank(text, [*citations, *missing])
    if "<-" in rest or "<" in rest or "UNKNOWN" in rest:
        for match in ARROW.finditer(rest):
            for kind, message in malformed(match[0], context):
                add(findings, piece, match.start(), kind, message, written=True)
    findings.checked += len(citations) + len(missing)
    if not (piece.used or hints):
        return
    for figure in figures(blank_names(level(rest), context.names), piece.label, piece.unit):
        audit_figure(figure, piece, text, citations, context, findings)


def add(findings: Found, piece: Piece, at: int, kind: str, message: str, written: bool = True, fix=None) -> None:
    """Add a problem or a hint. A written citation is a problem everywhere except in comments. Any other figure is a
    hint unless values are used there."""
    problem = Problem(piece.place(at)[0], kind, message, fix)
    (findings.problems if piece.used or (written and not piece.code) else findings.hints).append(problem)


def blank(text: str, matches: list) -> str:
    """Replace the matches by bars and keep the columns. A bar ends the clause of a figure."""
    for match in matches:
        text = text[: match.start()] + "|".ljust(match.end() - match.start()) + text[match.end() :]
    return text


def audit_citation(match: re.Match, piece: Piece, context: Context, findings: Found) -> None:
    """Check that a citation is right and has no hedge."""
    if problem := check_citation(match, context):
        kind, message, *mended = problem
        fix = Fix(*piece.place(match.start("page")), *mended[0]) if mended else None
        add(findings, piece, match.start("page"), kind, message, fix=fix)
    if hedge := hedge_of(piece.text, match.start(), match.end()):
        message = f"'{hedge}' beside {match['metric']}: a hardware value is exact or UNKNOWN"
        add(findings, piece, match.start(), "hedge", message, written=False)


def audit_figure(figure: Figure, piece: Piece, text: str, citations: list, context: Context, findings: Found) -> None:
    """Audit a figure outside citations. It is wrong if nothing supports it or if it has a hedge."""
    spelling = piece.spelling or " ".join(text[figure.start : figure.end].split())
    if off := off_ridge(figure, context):
        findings.checked += 1
        add(findings, piece, figure.start, "ridge", f"'{spelling}' {off}", written=False)
        return
    claim = claim_of(figure, piece, context)
    if claim is None or not is_meant(claim, piece):
        return
    findings.checked += 1
    cited = is_held(claim, text, citations, context)
    if not cited:
        kind, message = uncited(spelling, claim, piece, context)
        add(findings, piece, figure.start, kind, message, written=False, fix=citing(claim, text, piece, context))
    hedge = hedge_of(text, figure.start, figure.end)
    if hedge and piece.used and (claim.matching or not cited):
        message = f"'{hedge}' beside {spelling}: a hardware value is exact or UNKNOWN"
        add(findings, piece, figure.start, "hedge", message, written=False)
