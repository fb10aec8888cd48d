"""docs/rules.md: each file, heading, command and test that it names exists, and each rule says what keeps it."""

import re
from pathlib import Path

import pytest
from conftest import BUNDLE

PAGE = BUNDLE / "docs" / "rules.md"
FOLDERS = ("tools", "scripts", "reference")


def rows(text: str) -> list[list[str]]:
    """The cells of each row of the tables that say what checks a rule."""
    found, counts = [], False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("|") else []
        if not cells:
            counts = False
        elif cells == ["rule", "text", "checked by"]:
            counts = True
        elif counts and not re.fullmatch(r"[|-]+", line):
            found.append(cells)
    return found


def anchors(path: Path) -> set[str]:
    """The anchors that a Markdown file's headings get on a forge."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def missing(text: str) -> list[str]:
    """What a text names and is not there: files and headings of its links, programs, files, tests in code spans."""
    lacking = []
    for target, anchor in re.findall(r"\]\(([^)#]+)(?:#([^)]+))?\)", text):
        path = PAGE.parent / target
        if not path.is_file() or (anchor and anchor not in anchors(path)):
            lacking.append(f"{target}#{anchor}")
    for span in re.findall(r"`([^`]+)`", text):
        name = span.split()[0]
        if "::" in name:
            file, test = name.split("::")
            path = BUNDLE / "tests" / file
            if not path.is_file() or not re.search(rf"^def {test}\(", path.read_text(), re.MULTILINE):
                lacking.append(name)
        elif "/" in name:
            lacking += [] if (BUNDLE / name).is_file() else [name]
        elif name.endswith((".py", ".sh")):
            lacking += [] if any((BUNDLE / folder / name).is_file() for folder in FOLDERS) else [name]
    return lacking


def test_everything_that_the_page_names_exists():
    assert missing(PAGE.read_text()) == []


@pytest.mark.parametrize(
    "wrong",
    [
        "[x](../NO.md)",
        "[x](../SKILL.md#no-such-heading)",
        "`no_tool.py`",
        "`test_rules.py::test_no_such`",
        "`no_test.py::test_everything_that_the_page_names_exists`",
        "`reference/no.json`",
    ],
)
def test_that_check_sees_what_is_missing(wrong):
    assert len(missing(f"[SKILL.md](../SKILL.md#rules) {wrong} `run_gate.py --workspace`")) == 1


def test_each_rule_says_where_it_is_written_and_what_keeps_it():
    table = rows(PAGE.read_text())
    assert len(table) >= 80
    for cells in table:
        assert len(cells) == 3, cells
        rule, text, check = cells
        assert "](" in text, f"{rule}: no text"
        assert "`" in check or "text only" in check, f"{rule}: neither a check nor 'text only'"
        assert check.startswith("text only") or ".py" in check or ".json" in check, rule
    assert len({cells[0] for cells in table}) == len(table), "a rule stands there twice"


def test_every_gate_of_the_router_keeps_some_rule():
    gates = re.findall(r"^\| \w+ \| `(\w+\.py)", (BUNDLE / "SKILL.md").read_text(), re.MULTILINE)
    assert len(gates) >= 4
    checks = " ".join(cells[2] for cells in rows(PAGE.read_text()))
    assert [gate for gate in gates if f"`{gate}" not in checks] == []
