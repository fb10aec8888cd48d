"""Lines of one text that another text holds as well: a source that was made of a file, and that file."""

import itertools
import re


def named(text: str, file: str, written: list[str], origin: str, lines: list[str]) -> str:
    """A compiler's messages on `file`, whose lines are `written`, as messages on `origin`, whose lines are `lines`:
    file(9) by nvcc, file:9 by g++. What has no line there stays."""

    def place(match: re.Match) -> str:
        number = line_of(written, int(match[2]), lines)
        return f"{origin}{match[1]}{number}" if number else match[0]

    return re.sub(rf"(?<![\w.]){re.escape(file)}([(:])(\d+)", place, text)


def line_of(written: list[str], number: int, lines: list[str]) -> int | None:
    """The number of the line in `lines` that is line `number` of `written`, both from 1: of those with the same text
    the one with the most neighbours in common. None where there is none, or where two have as many."""
    at = number - 1
    same = [place for place, line in enumerate(lines) if at < len(written) and line == written[at]]
    alike = {
        place: alike_lines(written[at::-1], lines[place::-1]) + alike_lines(written[at:], lines[place:])
        for place in same
    }
    best = [place for place in same if alike[place] == max(alike.values())]
    return best[0] + 1 if len(best) == 1 else None


def alike_lines(some: list[str], others: list[str]) -> int:
    """How many lines at their beginnings are the same."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(some, others, strict=False)))
