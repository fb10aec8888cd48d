#!/usr/bin/env python3
"""Sections of the wiki that answer a question, best first: page:line, headings, the nearest lines. At most 5 sections.

Ask by operator, symptom, error message, metric or finding, in words or as a sentence. Up to two of the sections are
cases: rounds of worked examples with what came of them. A message says which words no page has, and which the first
section lacks. Exit code 1: the wiki has no answer."""

import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import cli
from kernelopt.hardware import wiki, wiki_index, wiki_search

EXAMPLES = """examples:
  search_wiki.py bank conflict
  search_wiki.py why is my softmax slow with 64 columns
  search_wiki.py l1tex__data_bank_conflicts --json
  search_wiki.py case register_spills                   # cases first"""
LINE_WIDTH = 160


def main() -> int:
    args = arguments()
    root = wiki.root(args.gpu_wiki)
    index = wiki_index.open_index(root)
    answer = wiki_search.answer(index, " ".join(args.words))
    shown = [
        (hit.section, wiki_search.nearest_lines(index, hit, answer.terms))
        for hit in answer.hits[: wiki_search.SECTIONS_SHOWN]
    ]
    if answer.unknown:
        cli.say(f"search_wiki.py: no page has: {', '.join(answer.unknown)}")
    if known := [word for word in answer.lacking if word not in answer.unknown]:
        cli.say(f"search_wiki.py: a part of the answer at most; the first section has nothing on: {', '.join(known)}")
    result = {
        "gpu_wiki": str(root),
        "unknown_words": list(answer.unknown),
        "words_that_the_first_lacks": list(answer.lacking),
        "sections_found": len(answer.hits),
        "sections": [to_json(*section) for section in shown],
    }
    cli.emit(result, args.json, [line for section in shown for line in for_people(*section)])
    return 0


def to_json(section: wiki_index.Section, lines: list[tuple[int, str]]) -> dict:
    nearest = [{"line": number, "text": text} for number, text in lines]
    return {"page": section.page, "line": section.line, "headings": section.headings, "lines": nearest}


def for_people(section: wiki_index.Section, lines: list[tuple[int, str]]) -> list[str]:
    nearest = [f"  {number}: {textwrap.shorten(text, LINE_WIDTH, placeholder=' …')}" for number, text in lines]
    return [f"{section.page}:{section.line} [{' > '.join(section.headings)}]", *nearest]


def arguments():
    parser = cli.parser(f"{__doc__}\n\n{EXAMPLES}")
    parser.add_argument("words", nargs="+", type=cli.filled, help="the question, or words of it, in any case and order")
    cli.add_gpu_wiki(parser)
    cli.add_json(parser)
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
