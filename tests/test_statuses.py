"""The words of the verifier, the gate and the loop: one enum, which prints as plain strings."""

import ast
import json
import re
from pathlib import Path

import pytest
from conftest import BUNDLE
from kernelopt.device import outcomes
from kernelopt.measure import correctness, failures, verdict
from kernelopt.statuses import AgentOutcome, Speed, Status
from kernelopt.worker import faults

WORDS = {str(word) for kind in (Status, Speed) for word in kind}
CODE = [path for path in sorted((BUNDLE / "tools").rglob("*.py")) if path.name != "statuses.py"]


@pytest.mark.parametrize("word", [*Status, *Speed])
def test_a_word_is_its_name_and_prints_as_it(word):
    assert word == word.name == str(word) == f"{word}" == "{}".format(word) == "%s" % word  # noqa: UP031, UP032
    assert json.dumps({"status": word}) == f'{{"status": "{word.name}"}}'
    assert {word: 1}[word.name] == 1  # JSON gives a plain string, which finds the same entry


@pytest.mark.parametrize("word", AgentOutcome)
def test_an_outcome_of_an_agent_is_its_name_in_words_and_prints_so(word):
    assert word == word.name.lower().replace("_", " ") == str(word) == f"{word}"
    assert json.dumps({"outcome": word}) == f'{{"outcome": "{word}"}}'


def literals(path: Path, words: set[str]) -> list[str]:
    """The strings of a file that are one of the words."""
    return [
        f"{path.relative_to(BUNDLE)}:{node.lineno}: {node.value}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in words
    ]


def test_every_status_in_code_comes_from_the_enum():
    assert [place for path in CODE for place in literals(path, WORDS)] == []


def test_every_outcome_of_an_agent_in_the_loop_comes_from_the_enum():
    loop = [path for path in CODE if path.parent.name == "loop"]
    assert len(loop) > 10
    assert [place for path in loop for place in literals(path, set(map(str, AgentOutcome)))] == []


def test_what_names_statuses_names_those_of_the_enum():
    tables = (failures.HINTS, verdict.HARMLESS, failures.VALUE_FAULTS, outcomes.CANDIDATE_FAULTS, correctness.DECLINING)
    assert all(isinstance(word, Status) for table in tables for word in table)


def test_the_parent_believes_each_status_that_a_candidates_error_gives():
    """A status that it does not know counts as a forged report."""
    of_own = set(faults.STATUS_OF_OWN.values())
    of_others = {Status.USAGE, Status.INVALID_TASK, Status.INVALID_REFERENCE, Status.NO_GPU}  # not of a candidate
    given = of_own - of_others | {*faults.STATUS_OF_SIGN.values(), *faults.STATUS_OF_TYPE.values()}
    assert given <= set(outcomes.CANDIDATE_FAULTS)


def test_the_statuses_that_the_help_lists_are_those_that_a_verification_can_end_with():
    text = ast.get_docstring(ast.parse((BUNDLE / "tools" / "verify_kernel.py").read_text())) or ""
    listed = set(re.findall(r"[A-Z_]{2,}", text.partition("Statuses:")[2]))
    elsewhere = {"DECLINED", "DOUBTFUL", "NO_SPACE", "IMPOSSIBLE_TIME", "OWN_WORK_NOT_CHECKED", "BASELINE_ERROR"}
    elsewhere |= {"USAGE", "NO_GPU", "INTERNAL", "PLAN", "CRASH"}
    assert listed == {str(status) for status in Status} - elsewhere
