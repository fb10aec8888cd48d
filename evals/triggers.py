"""Would an agent reach for the right skill? Shows it the skills' names and descriptions beside a message, and reads its
choice.

This tests the descriptions. Whether a client shows them at all is another question: ask it which skills it has.
"""

import json
import re
from pathlib import Path

from judging import BUNDLE

QUERIES = Path(__file__).resolve().parent / "triggers.json"
LEAST_RECALL, MOST_FALSE = 0.9, 0.1
HEAD = """You are a coding agent. These skills are installed; each is a file of instructions that you read when it fits the request:

{skills}

For each message below: which skill do you read first, before anything else? Answer with one line a message and nothing more:
<id>: <name of the skill>, or <id>: none

{messages}
"""


def load() -> dict:
    """{others, queries}: skills that are not ours and stand in the same list, and the messages."""
    return json.loads(QUERIES.read_text(encoding="utf-8"))


def own_skills(root: Path = BUNDLE) -> dict[str, str]:
    """name -> description, as the frontmatter of each SKILL.md says."""
    found = {}
    for path in [root / "SKILL.md", *sorted((root / "skills").glob("*/SKILL.md"))]:
        head = path.read_text(encoding="utf-8").split("---")[1]
        name = re.search(r"^name: (.+)$", head, re.MULTILINE)[1]
        found[name] = re.search(r'^description: "(.+)"$', head, re.MULTILINE)[1]
    return found


def prompt(queries: list[dict]) -> str:
    """The question about some messages."""
    listed = dict(sorted({**own_skills(), **load()["others"]}.items()))
    skills = "\n".join(f"- {name}: {description}" for name, description in listed.items())
    return HEAD.format(skills=skills, messages="\n".join(f"{query['id']}: {query['text']}" for query in queries))


def choices(answer: str) -> dict[str, str]:
    """id -> skill, or "none". The last line about an id counts."""
    lines = re.findall(r"^\W*(q\d\d)\W+([a-z][\w-]*)", answer, re.MULTILINE | re.IGNORECASE)
    return {identity.lower(): name.lower() for identity, name in lines}


def score(queries: list[dict], chosen: dict[str, str]) -> dict:
    """{passed, recall, false_rate, wrong[]} of choices. A message without a choice is wrong, whichever it is.

    recall: share of the messages for us that went to one of the skills expected; false_rate: share of the others that
    went to any of ours, or got no answer.
    """
    ours = own_skills()
    wanted = [query for query in queries if query["expected"]]
    others = [query for query in queries if not query["expected"]]
    missed = [query for query in wanted if chosen.get(query["id"]) not in query["expected"]]
    false = [query for query in others if chosen.get(query["id"], "no answer") in (*ours, "no answer")]
    recall, false_rate = 1 - len(missed) / len(wanted), len(false) / len(others)
    wrong = [
        {"id": query["id"], "text": query["text"], "expected": query["expected"], "chosen": chosen.get(query["id"])}
        for query in (*missed, *false)
    ]
    passed = recall >= LEAST_RECALL and false_rate <= MOST_FALSE
    return {"passed": passed, "recall": recall, "false_rate": false_rate, "wrong": wrong}
