"""Search for sections of the wiki by a question: BM25, times the share of the question's words that a section has."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import Refused, UsageError
from .wiki_index import WEIGHTS, Index, Section, full_text_table, numbers, words_of
from .wiki_terms import as_the_pages_write, camel_case_apart, metric_keys, phrases_of, terms_of

SECTIONS_SHOWN, LINES_SHOWN = 5, 2
ADVICE_BEFORE_CASES, CASES_SHOWN = 3, 2  # together SECTIONS_SHOWN
SURE = 0.6  # of the words' weights; below, the words that a section lacks may be the point of the question
LEAST_COVERED = 0.4  # of the words' weights; tests/fixtures/wiki_questions.json has questions on both sides of it
LEAST_OF_KNOWN = 0.37  # the same, where the wiki has each word of the question: then it is in its field
ENOUGH = 20.0  # a question weighs at most this, so that a long message need not be on a page word for word
IN_TEXT = 0.7  # what a word counts that stands below a heading and not in it
ON_PAGE = 0.35  # what a word counts that stands only in the first lines of the section's page
FEW = 5  # sections; rarer words weigh no more, since a question has words that say little and are on no page


@dataclass(frozen=True)
class Hit:
    """A section that answers. covered: the share of the question's words that it has, by weight."""

    section: Section
    covered: float


@dataclass(frozen=True)
class Answer:
    """The sections, best first, the words that were looked for, those among them that no page has, and those that the
    first section lacks, if it has less than SURE of them."""

    hits: tuple[Hit, ...]
    terms: tuple[str, ...]
    unknown: tuple[str, ...]
    lacking: tuple[str, ...]


def answer(index: Index, question: str) -> Answer:
    """Return the sections that answer a question: the best ADVICE_BEFORE_CASES of advice, the best CASES_SHOWN cases,
    then the others of both, best first; the wiki's README last. Cases come first if the question begins with `case`.

    A section's score is its BM25 value times the share of the question's words that it has; rare words weigh more.
    Raise Refused if no section has LEAST_COVERED of the words (LEAST_OF_KNOWN, if all are known), and UsageError if the
    question has no words.
    """
    asks_for_case = re.match(r"\s*cases?\s+(?=\w)", question, re.IGNORECASE)
    asked = metric_keys(question[asks_for_case.end() :] if asks_for_case else question)
    said = as_the_pages_write(index, index.synonyms.applied(camel_case_apart(index, asked)))
    terms = terms_of(index, said)
    if not terms:
        raise UsageError(f"'{question}' has no word to look for")
    holders = {term: numbers(index, f'"{term}"') for term in terms}
    unknown = tuple(term for term in terms if not holders[term])
    holders |= {name: held for name in phrases_of(said) if (held := numbers(index, f'"{name}"'))}
    shares = coverage(index, holders)
    scores = {
        number: value * shares.get(number, 0) * index.sections[number].weight
        for number, value in ranked(index, [*terms, *phrases_of(said)])
    }
    best_first = sorted(scores, key=lambda number: (index.sections[number].is_index, -scores[number], number))
    least = LEAST_COVERED if unknown else LEAST_OF_KNOWN
    covering = [
        number
        for number in best_first
        if shares.get(number, 0) >= least and index.sections[number].may_answer(set(terms))
    ]
    if not covering:
        raise Refused(not_covered(index, question, unknown, [index.sections[number] for number in best_first[:1]]))
    hits = arranged([Hit(index.sections[number], shares[number]) for number in covering], asks_for_case is not None)
    first = index.sections.index(hits[0].section)
    lacking = tuple(term for term in terms if first not in holders[term]) if hits[0].covered < SURE else ()
    return Answer(hits, terms, unknown, lacking)


def arranged(hits: list[Hit], cases_first: bool) -> tuple[Hit, ...]:
    """Return hits in the order in which they are shown, each kind in the order that it has: much advice hides no case,
    and a case stands before none of the best advice."""
    cases = [hit for hit in hits if hit.section.is_case]
    index = [hit for hit in hits if hit.section.is_index]
    advice = [hit for hit in hits if not (hit.section.is_case or hit.section.is_index)]
    before = 0 if cases_first else ADVICE_BEFORE_CASES
    shown = len(cases) if cases_first else CASES_SHOWN
    return (*advice[:before], *cases[:shown], *advice[before:], *cases[shown:], *index)


def coverage(index: Index, holders: dict[str, set[int]]) -> dict[int, float]:
    """Return {section's number: share of the terms that it has}, by weight. holders: {term: numbers of sections}.

    A term weighs the logarithm of its rarity. One that stands in the text or code only counts for IN_TEXT of that, and
    one that only what the page is about has, for ON_PAGE.
    """
    within = {term: numbers(index, f'{{title headings text code}}: "{term}"') for term in holders}
    weights = {term: math.log(1 + len(index.sections) / (FEW + len(held))) for term, held in within.items()}
    whole = min(sum(weights.values()), ENOUGH)
    shares: dict[int, float] = {}
    for term, held in holders.items():
        in_heading = numbers(index, f'{{title headings}}: "{term}"')
        for number in held:
            part = weights[term] * (1 if number in in_heading else IN_TEXT if number in within[term] else ON_PAGE)
            shares[number] = shares.get(number, 0.0) + part / whole
    return shares


def ranked(index: Index, parts: list[str]) -> list[tuple[int, float]]:
    """Return (section's number, BM25 value; more is better) of the sections that have one of the words or phrases."""
    query = f"SELECT rowid, -bm25(entries, {', '.join(map(str, WEIGHTS.values()))}) FROM entries WHERE entries MATCH ?"
    return list(index.database.execute(query, (any_of(parts),)))


def any_of(parts: Iterable[str]) -> str:
    """Return the FTS5 query for any of some words or phrases."""
    return " OR ".join(f'"{part}"' for part in dict.fromkeys(parts))


def nearest_lines(index: Index, hit: Hit, terms: tuple[str, ...]) -> list[tuple[int, str]]:
    """Return the LINES_SHOWN lines of a section that are nearest to the terms, in the order of the page."""
    table = full_text_table("text")
    lines = [(number, index.synonyms.applied(text)) for number, text in hit.section.lines]
    table.executemany("INSERT INTO entries(rowid, text) VALUES (?, ?)", lines)
    query = "SELECT rowid FROM entries WHERE entries MATCH ? ORDER BY rank LIMIT ?"
    chosen = {number for (number,) in table.execute(query, (any_of(terms), LINES_SHOWN))}
    return [line for line in hit.section.lines if line[0] in chosen]


def not_covered(index: Index, question: str, unknown: tuple[str, ...], closest: list[Section]) -> str:
    """Return the sentence that says that the wiki does not answer, and what comes closest."""
    said = f"no section of {index.wiki} answers '{question}'"
    if unknown:
        said += f": no page has {', '.join(unknown)}{similar(unknown, index.sections)}"
    if closest:
        said += f"; the closest is {closest[0].page}:{closest[0].line} [{' > '.join(closest[0].headings)}]"
    return said


def similar(unknown: tuple[str, ...], sections: Iterable[Section]) -> str:
    """Return the wiki's words with a spelling similar to an unknown word, as a part of a sentence."""
    import difflib

    known = words_of(sections)
    words = [match for word in unknown for match in difflib.get_close_matches(word, known, n=2, cutoff=0.8)]
    return f" (it has {', '.join(words)})" if words else ""
