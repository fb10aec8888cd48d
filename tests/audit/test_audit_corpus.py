"""The audit against a corpus of usual errors and innocent lines, each in its place in a workspace, and names of cards.

`fixtures/audit/corpus.json` and `cards.txt` hold sentences of our own; `where` says into which file a sentence goes.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import BUNDLE, FIXTURES
from kernelopt.audit import workspace_audit
from kernelopt.audit.citations import Context, Recorded
from kernelopt.hardware.work import Work
from kernelopt.session import record_store

CORPUS = json.loads((FIXTURES / "audit" / "corpus.json").read_text(encoding="utf-8"))
CARDS = (FIXTURES / "audit" / "cards.txt").read_text().splitlines()
QUANTITY = {"GB/s": "bandwidth", "TFLOPS": "compute", "MHz": "SM clock", "W": "power"}
RECORDED = frozenset(Recorded(value, unit, QUANTITY[unit]) for value, unit in CORPUS["recorded"])
KNOWN_MISSES: set[str] = set()  # texts of errors that are not named yet
USED = {"evidence", "task", "baseline", "roofline", "stop", "spec", "record"}
CONTEXTS: dict[str, Context] = {}
WORK = Work(flops=1, bytes_in=1, bytes_out=0, bytes_min=1, dtype="bf16", source="given")

README = (
    '# Kernel optimisation: x\n\n## Task\n\n```json\n{{"additional_notes": {task}}}\n```\n\n'
    "Some words.\n\n## {title}\n\n{text}\n"
)
SECTIONS = {"roofline": "Roofline", "stop": "Stop Conditions", "spec": "Hardware Spec", "readme": "Notes"}
PLAN = {"evidence": "Evidence", "action": "Action", "expected": "Expected effect", "risk": "Risk"}


def context(platform: str) -> Context:
    if platform not in CONTEXTS:
        made = workspace_audit.make_context(BUNDLE / "gpu-wiki", platform, RECORDED)
        CONTEXTS[platform] = replace(made, ridges=workspace_audit.ridge_points(made, [WORK]))
    return CONTEXTS[platform]


def write(folder: Path, where: str, text: str) -> Path:
    """The file of a workspace in which the text stands at that place."""
    place, _, inner = where.partition(".")
    if place == "record":
        return write_record(folder, inner.split("."), text)
    if place == "lesson":
        return write_record(folder, ["pitfalls_and_fixes", "0", "lesson"], text)
    files = {
        "task": ("README.md", README.format(task=json.dumps(text), title="Files", text="")),
        "baseline": ("baseline_report.md", f"# Baseline report (v0)\n\n- Known: {text}\n"),
        "notes": ("notes.md", f"# Notes\n\n{text}\n"),
        "kernel": ("kernel.py", f"import torch\n\n{text}\n"),
        "version": ("versions/v0_kernel.py", f"import torch\n\n{text}\n"),
    }
    files |= {name: ("README.md", README.format(task='""', title=title, text=text)) for name, title in SECTIONS.items()}
    files |= {name: ("plans/v1_plan.md", f"# Plan for v1\n\n## {title}\n\n{text}\n") for name, title in PLAN.items()}
    name, content = files[place]
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content, encoding="utf-8")
    return path


def write_record(folder: Path, path: list[str], text: str) -> Path:
    record = record_store.empty("v1").to_json()
    items = {
        "pitfalls_and_fixes": dict.fromkeys(
            ("error_type", "error_message", "root_cause", "fix_applied", "lesson"), "-"
        ),
        "search_log": {"source": "profile", "query": "-", "finding": "-", "actionability": "-"},
    }
    if path[0] == "isa_metric_progress":
        record[path[0]] = [{"metric": text, "target": 132, "current": None, "met": False}]
    elif len(path) == 3:
        record[path[0]] = [{**items[path[0]], path[2]: text}]
    else:
        record[path[0]][path[1]] = text
    (folder / "memory").mkdir(exist_ok=True)
    file = folder / "memory" / "v1.json"
    file.write_text(json.dumps(record, indent=2, ensure_ascii=False), encoding="utf-8")
    return file


def audited(folder: Path, where: str, platform: str, text: str) -> workspace_audit.Audit:
    found = workspace_audit.Audit()
    workspace_audit.of_file(write(folder, where, text), context(platform), found)
    return found


def messages(pairs) -> str:
    return "\n".join(problem.message for _, problem in pairs)


def is_named(folder: Path, error: dict) -> bool:
    """Is every part of an error named: as a problem where values are used, elsewhere as a hint, which blocks no gate?"""
    found = audited(folder, error["where"], error["platform"], error["text"])
    used = error["where"].split(".")[0] in USED
    said = messages(found.problems if used else found.hints)
    return bool(said) and all(name in said for name in error["names"]) and (used or not found.problems)


def test_the_usual_errors_are_named(tmp_path):
    missed = {error["text"] for error in CORPUS["errors"] if not is_named(tmp_path, error)}
    assert len(CORPUS["errors"]) >= 40 and missed == KNOWN_MISSES


def test_that_an_error_is_not_named_by_itself(tmp_path):
    clean = {"where": "evidence", "platform": "H200", "text": "nothing here", "names": []}
    assert not is_named(tmp_path, clean)
    assert not is_named(tmp_path, {**clean, "text": "It has 132 SMs.", "names": ["memory_bandwidth"]})


@pytest.mark.parametrize("line", CORPUS["innocent"], ids=lambda line: line["text"][:60])
def test_an_innocent_line_is_left_alone(line, tmp_path):
    found = audited(tmp_path, line["where"], line["platform"], line["text"])
    assert (messages(found.problems), messages(found.hints)) == ("", "")


@pytest.mark.parametrize("platform", ["H100 SXM", "A100 SXM 80GB"])
def test_the_names_of_cards_are_no_values(platform, tmp_path):
    places = {
        "record.correctness.summary": "OK on {}: 19 cases, workloads default; worst error 0.0031",
        "evidence": "the same kernel ran on {}, and on {} again",
        "baseline": "one {}, clocks as found",
        "stop": "- default: latency_us <= 202.1 us, ceiling of this problem <- measure_bandwidth_ceiling.py, {}",
        "task": "device: {}",
        "notes": "It was an {}.",
        "lesson": "{}: no gain",
        "kernel": "# tuned on {}",
    }
    assert len(CARDS) >= 30
    for name in CARDS:
        for where, text in places.items():
            found = audited(tmp_path, where, platform, text.replace("{}", name))
            assert (messages(found.problems), messages(found.hints)) == ("", ""), (name, where)


def test_a_value_beside_the_name_of_a_card_is_found(tmp_path):
    for name in CARDS:
        for where in ("evidence", "stop", "notes"):
            found = audited(tmp_path, where, "H100 SXM", f"{name}: 80GB HBM3 and 3.35 TB/s")
            said = messages(found.hints if where == "notes" else found.problems)
            assert "memory_capacity: 80 GB" in said and "memory_bandwidth: 3350 GB/s" in said, (name, where)


def test_a_name_that_only_a_record_knows_is_no_value():
    context_of_record = replace(context("H100 SXM"), devices=frozenset({"Frobnicator 80 GB of HBM3"}))
    found = workspace_audit.Audit()
    found.look(
        Path("x"), [workspace_audit.Piece("OK on Frobnicator 80 GB of HBM3: 19 cases", used=True)], context_of_record
    )
    assert (
        found.problems == []
        and workspace_audit.audit([workspace_audit.Piece("80 GB of HBM3", used=True)], context_of_record).problems
    )
