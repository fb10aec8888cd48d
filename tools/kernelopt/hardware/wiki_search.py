"""Search for sections of the wiki by a question, with SQLite's full-text index (FTS5, BM25, Porter stemming).

Each search reads the pages again and builds the index in memory, so there is no index to keep up to date.
"""

import math
import re
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .. import bundle
from ..errors import EnvironmentLacks, Refused, UsageError
from . import wiki_cases

SECTIONS_SHOWN, LINES_SHOWN = 5, 2
ADVICE_BEFORE_CASES, CASES_SHOWN = 3, 2  # together SECTIONS_SHOWN
SURE = 0.6  # of the words' weights; below, the words that a section lacks may be the point of the question
LEAST_COVERED = 0.4  # of the words' weights; tests/fixtures/wiki_questions.json has questions on both sides of it
LEAST_OF_KNOWN = 0.37  # the same, where the wiki has each word of the question: then it is in its field
ENOUGH = 20.0  # a question weighs at most this, so that a long message need not be on a page word for word
IN_TEXT = 0.7  # what a word counts that stands below a heading and not in it
ON_PAGE = 0.35  # what a word counts that stands only in the first lines of the section's page
FEW = 5  # sections; rarer words weigh no more, since a question has words that say little and are on no page
NAME_DIGITS = 4  # a number of so many digits in a page's title is a name by itself: 4090
LEAST_PART = 2  # letters of each half of a word that the pages write as two
SHORTENED = 4  # letters of a word that the pages may write out
SHORT = 40  # words; a section of so many counts half
WEIGHTS = {  # of a word, by where it stands; symptoms: the lines by which a reader knows the case
    "title": 3.0,
    "headings": 6.0,
    "text": 1.0,
    "symptoms": 1.0,
    "page": 0.5,  # the first lines of the section's page
}
SYMPTOM = re.compile(r"- \*\*(?:Trigger|Message|Observed|Findings):\*\*")
PASSED_OVER = set(
    "a about after always an and answer any anything are as at avoid bad be because been before best better "
    "between bigger but by can cannot compare compared correct correctly could did different do does doesn don "
    "due during each error every everything example expensive explain fail fails fair fast faster for from get "
    "gets give good gpu had happen happens has have help high higher how i if im in instead into is isn it its "
    "itself just kernel kernels large larger like longer look looks make many matter matters me mean means mine "
    "more most much must my need never next non not nothing of off ok on one only or our out over percent picks "
    "possible problem question real really runtimeerror same see seem seems should show slow slower smaller so "
    "some something take takes tell than that the their them then there they this through to too understand use "
    "used using versus very vs want warning was way ways we what when where whether which while who why will with "
    "within without won work works worse worth would write wrong you your".split()
)


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

    @property
    def is_case(self) -> bool:
        """True for what a round of a worked example teaches."""
        return self.page.startswith(f"{wiki_cases.FOLDER}/")


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


def answer(index: Index, question: str) -> Answer:
    """Return the sections that answer a question: the best ADVICE_BEFORE_CASES of advice, the best CASES_SHOWN cases,
    then the others of both, best first; the wiki's README last. Cases come first if the question begins with `case`.

    A section's score is its BM25 value times the share of the question's words that it has; rare words weigh more.
    Raise Refused if no section has LEAST_COVERED of the words (LEAST_OF_KNOWN, if all are known), and UsageError if the question has no words.
    """
    asks_for_case = re.match(r"\s*cases?\s+(?=\w)", question, re.IGNORECASE)
    said = index.synonyms.applied(metric_keys(question[asks_for_case.end() :] if asks_for_case else question))
    said = as_the_pages_write(index, said)
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
    covering = [number for number in best_first if shares.get(number, 0) >= least]
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

    A term weighs the logarithm of its rarity. One that stands in the text only counts for IN_TEXT of that.
    """
    within = {term: numbers(index, f'{{title headings text}}: "{term}"') for term in holders}
    weights = {term: math.log(1 + len(index.sections) / (FEW + len(held))) for term, held in within.items()}
    whole = min(sum(weights.values()), ENOUGH)
    shares: dict[int, float] = {}
    for term, held in holders.items():
        in_heading = numbers(index, f'{{title headings}}: "{term}"')
        for number in held:
            part = weights[term] * (1 if number in in_heading else IN_TEXT if number in within[term] else ON_PAGE)
            shares[number] = shares.get(number, 0.0) + part / whole
    return shares


def numbers(index: Index, match: str) -> set[int]:
    """Return the numbers of the sections that match."""
    return {number for (number,) in index.database.execute("SELECT rowid FROM entries WHERE entries MATCH ?", (match,))}


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


def terms_of(index: Index, said: str) -> tuple[str, ...]:
    """Return the distinct words of a question, in order, without those that say nothing. Of the numbers those stay that
    a title has: of a card (RTX 4090) or of a capability (sm_90). A quantity (128k) or the name of an exception
    (CompilationError) goes if no page has it."""
    words = re.findall(r"[^\W_]+", said)
    named = [word for word, before in zip(words, ["", *words], strict=False) if is_term(index, word, before)]
    return tuple(dict.fromkeys(named))


def is_term(index: Index, word: str, before: str) -> bool:
    """True for a word that is looked for. before: the word before it, or an empty one."""
    if word.isdigit():
        in_title = f'"{word}"' if len(word) >= NAME_DIGITS else f'"{before} {word}"'
        return bool(numbers(index, f"{{title}}: {in_title}"))
    says_nothing_unknown = word[0].isdigit() or re.fullmatch(r"\w+(?:error|exception)", word)
    return word not in PASSED_OVER and not (says_nothing_unknown and not numbers(index, f'"{word}"'))


def as_the_pages_write(index: Index, said: str) -> str:
    """Return a question in which each word that no page has is replaced by what the pages write for it, if they do."""
    unknown = [
        word
        for word in dict.fromkeys(re.findall(r"[^\W_]+", said))
        if not word[0].isdigit() and word not in PASSED_OVER and not numbers(index, f'"{word}"')
    ]
    for word in unknown:
        said = re.sub(rf"(?<![^\W_]){word}(?![^\W_])", other_spelling(index, word) or word, said)
    return said


def other_spelling(index: Index, word: str) -> str | None:
    """Return the pages' own spelling of an unknown word: in two words (mamba2, logsum), or longer (vocab); else None."""
    joints = [at for at in range(2, len(word)) if word[at:].isdigit() or min(at, len(word) - at) >= LEAST_PART]
    for at in joints:
        if numbers(index, f'"{word[:at]} {word[at:]}"'):
            return f"{word[:at]}-{word[at:]}"
    longer = [known for known in words_of(index.sections) if known.startswith(word)] if len(word) >= SHORTENED else []
    return min(longer, key=lambda known: (len(known), known), default=None)


def phrases_of(said: str) -> list[str]:
    """Return what was written as one word, such as `split-k` and `num_stages`, as phrases of words."""
    joined = re.findall(r"[^\W_]+(?:[-_.]+[^\W_]+)+", said)
    return [" ".join(re.findall(r"[^\W_]+", word)) for word in joined]


def metric_keys(question: str) -> str:
    """Return the question with the names of Nsight Compute, or beginnings of them, followed by the wiki's keys. Units
    count one thing in several places (sm__, smsp__), so a name's first part may differ if none has it."""
    metrics = bundle.read_json(bundle.REFERENCE / "ncu_metrics.json")["metrics"]
    names = {known: metric["key"] for metric in metrics for known in metric["names"]}
    for name in re.findall(r"\w+__[\w.]+", question):
        counted = name.partition("__")[2].partition(".")[0]
        keys = {key for known, key in names.items() if known.startswith(name)}
        keys = keys or {key for known, key in names.items() if known.partition("__")[2].startswith(counted)}
        question = question.replace(name, " ".join(sorted(keys)) or name)
    return question


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
        parts = (title, " ".join(headings), text_of(section), symptoms, of_page)
        database.execute("INSERT INTO entries(rowid, title, headings, text, symptoms, page) VALUES (?, ?, ?, ?, ?, ?)", (number, *map(synonyms.applied, parts)))
    return Index(wiki, sections, database, synonyms)


def text_of(section: Section) -> str:
    """Return the lines below a heading as one text."""
    return "\n".join(text for _, text in section.lines)


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


def words_of(sections: Iterable[Section]) -> set[str]:
    """Return the words of sections' lines, in lower case, from four letters on."""
    return {
        word for section in sections for _, text in section.lines for word in re.findall(r"[a-z]\w{3,}", text.lower())
    }
