#!/usr/bin/env python3
"""Lines of the wiki that hold the words, best first: page:line, headings, the line. At most 40 lines.

Lines that hold all the words, alone or with their headings, come before those that hold some. Then words in headings,
whole words and rare words weigh more."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import cli
from kernelopt.hardware import wiki, wiki_search

EXAMPLES = """examples:
  search_wiki.py bank conflict
  search_wiki.py num_stages --json"""


def main() -> int:
    args = arguments()
    root = wiki.root(args.gpu_wiki)
    lines, unknown = wiki_search.search(root, " ".join(args.words))
    shown = lines[: wiki_search.LINES_SHOWN]
    if unknown:
        cli.say(f"search_wiki.py: no page has: {', '.join(unknown)}")
    result = {
        "gpu_wiki": str(root),
        "unknown_words": unknown,
        "lines_found": len(lines),
        "lines": [
            {"page": line.page, "line": line.number, "headings": line.headings, "text": line.text} for line in shown
        ],
    }
    cli.emit(result, args.json, [for_people(line) for line in shown])
    return 0


def for_people(line: wiki_search.Line) -> str:
    return f"{line.page}:{line.number} [{' > '.join(line.headings)}] {line.text}"


def arguments():
    parser = cli.parser(f"{__doc__}\n\n{EXAMPLES}")
    parser.add_argument("words", nargs="+", type=cli.filled, help="what to look for, in any case and order")
    parser.add_argument("--gpu-wiki", type=Path, help="another wiki; default $GPU_WIKI, else the bundle's own")
    cli.add_json(parser)
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
