"""Search for lines of the wiki by words. Each search reads the pages again, so there is no index to build or update."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import Refused, UsageError

LINES_SHOWN = 40
WHOLE, RELATED, PART = 3, 2, 1  # grades of a match: the word itself, another ending, inside a word
ENDINGS = ("ing", "ion", "ed", "es", "s", "e")
SHORTEST_PART = 4  # letters; fewer are inside too many words
PASSED_OVER = set("a an and are do does for how i in is it my of on or the to what when which why with".split())
FOLDERS = ("optimization", "pitfalls", "frameworks", "", "hardware")  # at equal weight, advice comes before values


@dataclass(frozen=True)
class Line:
    """One line of a page, and its headings (the page's title first)."""

    page: str
    number: int
    headings: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Word:
    """A word of the query in lower case, and the patterns that match it in lower-case text."""

    text: str
    whole: re.Pattern
    related: re.Pattern
    root: str


def search(wiki: Path, query: str) -> tuple[list[Line], list[str]]:
    """Return (matching lines, unknown words). The lines hold a word of the query, best first. No line holds an unknown
    word.

    Lines that hold all known words come first, alone or with their headings. Within each group, lines are sorted by
    weight. Each word adds its grade in the line and its grade in the headings (WHOLE, RELATED or PART), times its
    rarity. Lists of sources come last. Raise Refused if no word is known, and UsageError if the query has no words.
    """
    words = words_of(query)
    if not words:
        raise UsageError(f"'{query}' has no word to look for")
    lines = [line for path in sorted(wiki.rglob("*.md")) for line in lines_of(path, wiki)]
    graded = {line: grades for line in lines if any(grades := grades_of(line.text, words))}
    held = [sum(map(bool, column)) for column in zip(*graded.values(), strict=True)] or [0] * len(words)
    unknown = [word.text for word, count in zip(words, held, strict=True) if not count]
    if not graded:
        raise Refused(f"no page of {wiki} has {' or '.join(map(repr, unknown))}{near(unknown, lines)}")
    rarity = [math.log(1 + len(lines) / count) if count else 0.0 for count in held]
    above = {headings: grades_of(" ".join(headings), words) for headings in {line.headings for line in graded}}
    return sorted(graded, key=lambda line: rank(line, graded[line], above[line.headings], rarity)), unknown


def rank(line: Line, grades: list[int], above: list[int], rarity: list[float]) -> tuple:
    """Return the sort key of a line; smaller is better. The arguments give the grade in the line, the grade in the
    headings and the rarity of each word."""
    words = list(zip(grades, above, rarity, strict=True))
    lacks_one = any(rare and not here and not over for here, over, rare in words)
    weight = sum(rare * (here + over) for here, over, rare in words)
    folder = next((i for i, name in enumerate(FOLDERS) if name in line.page.split("/")), FOLDERS.index(""))
    return line.headings[-1:] == ("Sources",), lacks_one, -weight, folder, line.page, line.number


def words_of(query: str) -> list[Word]:
    """Return the distinct words of a query, in order. `num_stages` is one word; `split-K` is two words."""
    texts = dict.fromkeys(re.findall(r"[^\W_](?:\w*[^\W_])?", query.lower()))
    return [word_of(text) for text in texts if text not in PASSED_OVER]


def word_of(text: str) -> Word:
    """Return the word of a query with its patterns. In a page, an underscore ends a word: `conflict` is in
    `bank_conflicts`."""
    root, edge = root_of(text), r"(?<![^\W_])(?:{})(?![^\W_])"
    endings = "|".join(ENDINGS)
    return Word(
        text,
        re.compile(edge.format(re.escape(text))),
        re.compile(edge.format(f"{re.escape(root)}(?:{endings})?")),
        root,
    )


def root_of(text: str) -> str:
    """Return a word without its ending. The words tile, tiles and tiling have one root."""
    for ending in ENDINGS:
        if text.endswith(ending) and not text.endswith("ss") and len(text) - len(ending) >= 3:
            return text.removesuffix(ending)
    return text


def grades_of(text: str, words: list[Word]) -> list[int]:
    """Return how well a text matches each of the words."""
    text = text.lower()
    return [grade(word, text) for word in words]


def grade(word: Word, text: str) -> int:
    """Return how well a text in lower case matches a word: WHOLE, RELATED, PART or 0."""
    if word.root not in text:
        return 0
    if word.whole.search(text):
        return WHOLE
    if word.related.search(text):
        return RELATED
    return PART if len(word.root) >= SHORTEST_PART else 0


def lines_of(path: Path, wiki: Path) -> list[Line]:
    """Return the lines of a page that are not blank. In a code block, # does not start a heading."""
    page, headings, in_code, lines = str(path.relative_to(wiki)), (), False, []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        in_code ^= text.startswith("```")
        heading = None if in_code else re.match(r"(#+) +(.+)", text)
        if heading:
            headings = (*headings[: len(heading[1]) - 1], heading[2].strip())
        if text.strip():
            lines.append(Line(page, number, headings, text.strip()))
    return lines


def near(unknown: list[str], lines: list[Line]) -> str:
    """Return the wiki's words with a spelling similar to an unknown word, as the end of a sentence."""
    import difflib

    known = {word for line in lines for word in re.findall(r"[a-z]{4,}", line.text.lower())}
    similar = [match for word in unknown for match in difflib.get_close_matches(word, known, n=2, cutoff=0.8)]
    return f"; it has {', '.join(similar)}" if similar else ""
