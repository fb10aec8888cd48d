"""The sections of the wiki in SQLite's full-text index (FTS5, BM25, Porter stemming), and the spellings of one thing.

Each search reads the pages again and builds the index in memory, so there is no index to keep up to date.
"""

import re
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .. import bundle
from ..errors import EnvironmentLacks
from . import wiki_cases

SHORT = 40  # words; a section of so many counts half
WEIGHTS = {  # of a word, by where it stands
    "title": 3.0,
    "headings": 6.0,
    "text": 1.0,
    "symptoms": 1.0,  # the lines by which a reader knows the case
    "code": 0.2,  # its names stand in many kernels
    "page": 0.5,  # the first lines of the section's page
}
SYMPTOM = re.compile(r"- \*\*(?:Trigger|Message|Observed|Findings):\*\*")


@dataclass(frozen=True)
class Section:
    """A heading of a page and the lines below it, up to the next heading. headings: the page's title first."""

    page: str
    line: int
    headings: tuple[str, ...]
    lines: tuple[tuple[int, str], ...]

    @property
    def weight(self) -> float:
        """Near 1 for a long section, less for a short one: BM25 favours those, though they say little."""
        words = sum(len(text.split()) for _, text in self.lines)
        return words / (words + SHORT)

    @property
    def is_index(self) -> bool:
        """True for the sections of README.md, which hold words of everything."""
        return self.page == "README.md"

    def may_answer(self, terms: set[str]) -> bool:
        """False for the table and the notes of a product that the question does not name: H200, 4090."""
        if not re.fullmatch(r"docs/hardware/[^/]+", self.page) or self.headings[1:] not in ((), ("Notes",)):
            return True
        names = re.findall(r"[^\W_]*\d[^\W_]*", self.headings[0].lower())
        return not names or not terms.isdisjoint(names)

    @property
    def is_case(self) -> bool:
        """True for what a round of a worked example teaches."""
        return self.page.startswith(f"{wiki_cases.FOLDER}/")


@dataclass(frozen=True)
class Synonyms:
    """The pattern of all spellings, and what each is searched as."""

    pattern: re.Pattern
    searched_as: dict[str, str]

    def applied(self, text: str) -> str:
        """Return a text in lower case, in British spelling, with each spelling replaced by what it is searched as."""
        british = re.sub(r"iz(?=e|ing|ation)", "is", text.lower())
        return self.pattern.sub(lambda match: self.searched_as[in_words(match[0])], british)


@dataclass(frozen=True)
class Index:
    """The sections of a wiki in a full-text table, where a rowid is a section's number, and its synonyms."""

    wiki: Path
    sections: tuple[Section, ...]
    database: sqlite3.Connection
    synonyms: Synonyms


def open_index(wiki: Path) -> Index:
    """Return the index of a wiki's pages, in memory. Raise EnvironmentLacks if SQLite has no FTS5."""
    sections = tuple(section for path in sorted(wiki.rglob("*.md")) for section in sections_of(path, wiki))
    synonyms = synonyms_of(wiki)
    database = full_text_table(", ".join(WEIGHTS))
    abouts = abouts_of(sections)
    for number, section in enumerate(sections):
        title, *headings = section.headings or ("",)
        of_page = abouts.get(section.page, "") if headings else ""
        symptoms = "\n".join(text for _, text in section.lines if SYMPTOM.match(text))
        text, code = text_and_code(section)
        parts = (title, " ".join(headings), text, symptoms, code, of_page)
        database.execute(
            f"INSERT INTO entries(rowid, {', '.join(WEIGHTS)}) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (number, *map(synonyms.applied, parts)),
        )
    return Index(wiki, sections, database, synonyms)


def sections_of(path: Path, wiki: Path) -> list[Section]:
    """Return the sections of a page that have lines, without its sources. In a code block, # starts no heading."""
    page, headings, in_code = str(path.relative_to(wiki)), (), False
    starts: list[tuple[int, tuple[str, ...], list[tuple[int, str]]]] = [(1, (), [])]
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        in_code ^= text.startswith("```")
        heading = None if in_code else re.match(r"(#+) +(.+)", text)
        if heading:
            headings = (*headings[: len(heading[1]) - 1], heading[2].strip())
            starts.append((number, headings, []))
        elif text.strip():
            starts[-1][2].append((number, text.strip()))
    return [
        Section(page, number, headings, tuple(lines))
        for number, headings, lines in starts
        if lines and headings[-1:] != ("Sources",)
    ]


def text_and_code(section: Section) -> tuple[str, str]:
    """Return the lines below a heading: those outside of blocks of code, and those inside."""
    parts: tuple[list[str], list[str]] = ([], [])
    in_code = False
    for _, text in section.lines:
        in_code ^= text.startswith("```")
        parts[in_code].append(text)
    return "\n".join(parts[False]), "\n".join(parts[True])


def abouts_of(sections: Iterable[Section]) -> dict[str, str]:
    """Return {page: what it is about}: its first lines, without tables, and its row in the tables of README.md."""
    abouts: dict[str, str] = {}
    for section in sections:
        for _, text in section.lines:
            row = re.fullmatch(r"\|(.+)\| \[[^]]+\]\(([^)]+)\) \|", text) if section.is_index else None
            first = None if text.startswith("|") or len(section.headings) > 1 else text
            page, about = (row[2], row[1]) if row else (section.page, first)
            abouts[page] = f"{abouts.get(page, '')}\n{about or ''}"
    return abouts


def full_text_table(columns: str) -> sqlite3.Connection:
    """Return a database in memory with the full-text table `entries`."""
    database = sqlite3.connect(":memory:")
    try:
        database.execute(f"CREATE VIRTUAL TABLE entries USING fts5({columns}, tokenize='porter unicode61')")
    except sqlite3.OperationalError as error:
        raise EnvironmentLacks(f"this Python's SQLite has no FTS5 ({error}); use a Python that has it") from None
    return database


def synonyms_of(wiki: Path) -> Synonyms:
    """Return the synonyms of a wiki's synonyms.json; none without that file."""
    path = wiki / "synonyms.json"
    groups = bundle.read_json(path)["searched_as"] if path.is_file() else {}
    words = {in_words(spelling): name for name, spellings in groups.items() for spelling in spellings}
    any_joint = [r"[\s_-]+".join(map(re.escape, word.split())) for word in sorted(words, key=len, reverse=True)]
    return Synonyms(re.compile(rf"(?<![^\W_])(?:{'|'.join(any_joint) or r'(?!)'})(?![^\W_])"), words)


def in_words(spelling: str) -> str:
    """Return a spelling with spaces between its words: `shared_memory` and `warp-specialised` are spellings too."""
    return re.sub(r"[\s_-]+", " ", spelling)


def numbers(index: Index, match: str) -> set[int]:
    """Return the numbers of the sections that match."""
    return {number for (number,) in index.database.execute("SELECT rowid FROM entries WHERE entries MATCH ?", (match,))}


def words_of(sections: Iterable[Section]) -> set[str]:
    """Return the words of sections' lines, in lower case, from four letters on."""
    return {
        word for section in sections for _, text in section.lines for word in re.findall(r"[a-z]\w{3,}", text.lower())
    }
