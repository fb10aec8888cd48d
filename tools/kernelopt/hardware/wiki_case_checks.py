"""Checks of the wiki's cases: their items and length, and that every figure is the record's that they name.

Each check returns one sentence per defect. The findings of a case are checked where profiles are diagnosed:
tests/diagnosis/test_example_cases.py.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from .. import bundle
from . import wiki_cases, wiki_figures
from .wiki_cases import Case, Round

ITEMS = (
    *("Record", "Findings", "Operators"),
    *("Evidence", "Action", "Effect", "Counter-signal", "Generalises", "Not where"),
)
MOST_WORDS = 150
DECIMAL = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.]*\w)")
IN_TEXTS = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")


def problems(wiki: Path, home: Path = bundle.ROOT) -> list[str]:
    """Return the defects of a wiki's cases. home: the folder that has examples/. [] for a wiki without cases."""
    cases = wiki_cases.all_of(wiki)
    if not cases:
        return []
    defects = [f"{case.page}: L{case.line}: {text}" for case in cases for text in of_case(case, wiki, home)]
    return defects + uncovered(cases, wiki, home)


def of_case(case: Case, wiki: Path, home: Path) -> Iterator[str]:
    """Yield what is wrong with a case."""
    if tuple(case.items) != ITEMS:
        yield f"its items are {', '.join(case.items)}; they must be {', '.join(ITEMS)}"
    if (words := len(case.text.split())) > MOST_WORDS:
        yield f"it has {words} words; {MOST_WORDS} are allowed"
    for operator in case.operators:
        if not (wiki / "docs/operators" / f"{operator}.md").is_file():
            yield f"there is no page docs/operators/{operator}.md"
    if not case.operators:
        yield "it names no operator"
    if not case.rounds:
        yield "it names no record"
    for cited in case.rounds:
        yield from differences(cited, home)
    yield from unrecorded(case, home)


def differences(cited: Round, home: Path) -> Iterator[str]:
    """Yield where a round's verdict or figures differ from its record."""
    name = f"{cited.example}/memory/{cited.version}.json"
    if not (home / name).is_file():
        yield f"{name} does not exist"
        return
    pair = bundle.read_json(home / name)["performance"]["comparison_with_previous"]
    if not pair:
        if cited.figures:
            yield f"{name} has no comparison; the case has {', '.join(cited.figures)}"
        return
    recorded = pair["verdict"], *(f"{value:.3f}" for value in (pair["speedup"], *pair["ci95"])), pair["against"]
    written = cited.verdict, *cited.figures, cited.against
    if written != recorded:
        yield f"{name} has {', '.join(recorded)}; the case has {', '.join(map(str, written))}"


def unrecorded(case: Case, home: Path) -> Iterator[str]:
    """Yield the figures of a case that none of the texts on its rounds has."""
    known = {number for cited in case.rounds for number in numbers_of(cited, home)}
    prose = " ".join(text for name, text in case.items.items() if name != "Record")
    figures = [*wiki_figures.FIGURE.findall(prose), *DECIMAL.findall(prose)]
    for number in dict.fromkeys(IN_TEXTS.search(figure)[0] for figure in figures):
        if number not in known:
            yield f"{number} stands in no plan, lesson or profile of the round"


def numbers_of(cited: Round, home: Path) -> set[str]:
    """Return the numbers, as they are written, in the texts on a round: its plan, the lessons, the profiles of it and
    of the version it was held against."""
    folder = home / cited.example
    files = [folder / "lessons.md", folder / "plans" / f"{cited.version}_plan.md"]
    files += [folder / "profiles" / str(version) / "annotation/report.md" for version in (cited.version, cited.against)]
    texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    return set(IN_TEXTS.findall("\n".join(texts))) | set(cited.figures)


def uncovered(cases: list[Case], wiki: Path, home: Path) -> list[str]:
    """Return the examples' rounds with a verdict that no case has, and no page lists as teaching nothing new."""
    covered = {(cited.example, cited.version) for case in cases for cited in case.rounds}
    for page in sorted((wiki / wiki_cases.FOLDER).glob("*.md")):
        said = page.read_text(encoding="utf-8").partition("\nNothing new: ")[2].partition("\n\n")[0]
        covered |= {(cited.example, cited.version) for cited in wiki_cases.rounds_in(said)}
    records = sorted((home / "examples").glob("**/memory/v*.json"))
    judged = [file for file in records if file.stem != "v0" and bundle.read_json(file)["quality_gate"]["result"]]
    rounds = {file: (str(file.parent.parent.relative_to(home)), file.stem) for file in judged}
    return [
        f"{wiki_cases.FOLDER}: no case has {file.relative_to(home)}" for file in judged if rounds[file] not in covered
    ]
