"""The words of a question to the wiki: which are looked for, and as what."""

import re

from .. import bundle
from .wiki_index import Index, numbers, words_of

NAME_DIGITS = 4  # a number of so many digits in a page's title is a name by itself: 4090
LEAST_PART = 2  # letters of each half of a word that the pages write as two
SHORTENED = 4  # letters of a word that the pages may write out
PASSED_OVER = set(
    "a about after always an and answer any anything are as at avoid bad be because been before best better "
    "between bigger but by can cannot correct correctly could did different do does doesn don due during each "
    "error even every everything example expensive explain fail fails fair fast faster for from get gets give "
    "good gpu had happen happens has have help high higher how i if im in instead into is isn it its itself just "
    "kernel kernels large larger like long longer look looks make many matter matters me mean means mine more "
    "most much must my need never next non not nothing of off ok on one only or our out over percent picks "
    "possible problem question real really runtimeerror same see seem seems should show slow slower smaller so "
    "some something still take takes tell than that the their them then there they this though through to too "
    "understand use used using versus very vs want warning was way ways we what when where whether which while "
    "who why will with within without won work works worse worth would write wrong you your".split()
)


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


def camel_case_apart(index: Index, question: str) -> str:
    """Return the question with names such as OutOfMemoryError in their words, where the pages have these in a row and
    not the name."""

    def apart(match: re.Match) -> str:
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", match[0].removesuffix("Error"))
        known = numbers(index, f'"{match[0].lower()}"') or not numbers(index, f'"{words.lower()}"')
        return match[0] if known else words

    return re.sub(r"\b[A-Za-z]*[a-z][A-Z][A-Za-z]*\b", apart, question)


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
    """Return the pages' spelling of an unknown word: in two words (mamba2, logsum), or longer (vocab); else None."""
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
