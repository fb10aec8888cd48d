"""Cases: what the rounds of the worked examples teach, read from the wiki's pages in docs/cases/. Pure except `all_of`.

A section of such a page is a case, made of items `- **Name:** text`. wiki_case_checks.py holds them to their records.
"""

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import bundle

FOLDER = "docs/cases"
CALLS = "operator_calls.json"
CITED = 2  # cases that a brief names
RECORD = re.compile(
    r"`(examples/[\w/]+)/memory/(v\d+)\.json`(?:: (\w+), ([\d.]+)x \(([\d.]+) to ([\d.]+)\) against (v\d+))?"
)


@dataclass(frozen=True)
class Round:
    """A round that a page names. verdict, figures (ratio and its interval, as written) and against: None and empty
    where the page gives none."""

    example: str
    version: str
    verdict: str | None = None
    figures: tuple[str, ...] = ()
    against: str | None = None


@dataclass(frozen=True)
class Case:
    """A section. page: in the wiki. items: {name: text on one line}. findings: of the profile that the round started
    from. operators: names of pages in docs/operators/."""

    page: str
    line: int
    title: str
    text: str
    items: dict[str, str]
    rounds: tuple[Round, ...]
    findings: tuple[str, ...]
    operators: tuple[str, ...]

    @property
    def outcome(self) -> str:
        """ "FASTER, 1.979x", a clause for each round"""
        return "; ".join(f"{found.verdict}, {found.figures[0]}x" for found in self.rounds if found.figures)


def all_of(wiki: Path) -> list[Case]:
    """Return the cases of a wiki, by page and line; [] for a wiki without any."""
    pages = sorted((wiki / FOLDER).glob("*.md"))
    return [case for page in pages for case in of_page(str(page.relative_to(wiki)), page.read_text(encoding="utf-8"))]


def of_page(page: str, text: str) -> list[Case]:
    """Return the cases of a page's text, its sources left out."""
    _, *parts = re.split(r"^## ", text, flags=re.MULTILINE)
    line, cases = text.partition("\n## ")[0].count("\n") + 2, []
    for part in parts:
        title, _, body = part.partition("\n")
        if title != "Sources":
            cases.append(of_section(page, line, title, body))
        line += part.count("\n")
    return cases


def of_section(page: str, line: int, title: str, body: str) -> Case:
    """Return the case of a section; what it lacks is empty."""
    entries = re.findall(r"^- \*\*([\w -]+):\*\* (.*?)(?=^- \*\*|\Z)", body, re.DOTALL | re.MULTILINE)
    items = {name: " ".join(text.split()) for name, text in entries}
    findings, operators = (tuple(re.findall(r"`([\w-]+)`", items.get(name, ""))) for name in ("Findings", "Operators"))
    return Case(page, line, title, body, items, tuple(rounds_in(items.get("Record", ""))), findings, operators)


def rounds_in(text: str) -> list[Round]:
    """Return the rounds whose records a text names."""
    return [
        Round(example, version, verdict or None, tuple(filter(None, figures)), against or None)
        for example, version, verdict, *figures, against in RECORD.findall(text)
    ]


def nearest(cases: Iterable[Case], findings: Sequence[str], operators: Iterable[str] = ()) -> list[Case]:
    """Return at most CITED cases: those that share most findings of a profile, then those of an operator of the task.

    findings: the leading one first; it decides between cases that share as many. Of cases that are equal in this,
    the one with the fewest further findings comes first. A case that shares nothing is not returned.
    """
    wanted = set(operators)

    def distance(case: Case) -> tuple:
        shared = [finding for finding in findings if finding in case.findings]
        first = findings.index(shared[0]) if shared else len(findings)
        other_operator = wanted.isdisjoint(case.operators)
        return -len(shared), other_operator, first, len(case.findings) - len(shared), case.page, case.line

    near = [case for case in cases if wanted.intersection(case.operators) or set(findings) & set(case.findings)]
    return sorted(near, key=distance)[:CITED]


def citation(case: Case, findings: Iterable[str]) -> str:
    """ "gpu-wiki/docs/cases/matvec.md:18: Loads that run ahead (FASTER, 1.036x; shares several_kernels)" """
    shared = [finding for finding in findings if finding in case.findings]
    why = f"shares {', '.join(shared)}" if shared else f"operator {', '.join(case.operators)}"
    return f"gpu-wiki/{case.page}:{case.line}: {case.title} ({case.outcome}; {why})"


def operator_calls(wiki: Path) -> dict[str, list[str]]:
    """Return {operator: names in torch that compute it}, of operator_calls.json; {} for a wiki without it."""
    path = wiki / CALLS
    return bundle.read_json(path)["operators"] if path.is_file() else {}


def operators_of(source: str, calls: dict[str, list[str]]) -> set[str]:
    """Return the operators that a reference calls by name in torch; empty where it calls none, or is no Python."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        return set()
    called = [node.func for node in nodes if isinstance(node, ast.Call)]
    names = {func.attr for func in called if isinstance(func, ast.Attribute)}
    names |= {func.id for func in called if isinstance(func, ast.Name)}
    names |= {"@" for node in nodes if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)}
    return {operator for operator, known in calls.items() if names.intersection(known)}
