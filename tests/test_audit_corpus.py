"""The audit against a corpus of usual errors and of innocent lines, each in its place in a workspace, and names of cards.

`fixtures/audit/corpus.json` and `cards.txt` hold sentences of our own; `where` says into which file a sentence goes.
"""

import json
from dataclasses import replace
from pathlib import Path

from conftest import BUNDLE, FIXTURES
from kernelopt import audit, memory
from kernelopt.citations import Context, Recorded

CORPUS = json.loads((FIXTURES / "audit" / "corpus.json").read_text(encoding="utf-8"))
CARDS = (FIXTURES / "audit" / "cards.txt").read_text().splitlines()
QUANTITY = {"GB/s": "bandwidth", "TFLOPS": "compute", "MHz": "SM clock", "W": "power"}
RECORDED = frozenset(Recorded(value, unit, QUANTITY[unit]) for value, unit in CORPUS["recorded"])
USED = {"evidence", "task", "baseline", "roofline", "stop", "spec", "record"}
CONTEXTS: dict[str, Context] = {}

README = '# Kernel optimisation: x\n\n## Task\n\n```json\n{{"additional_notes": {task}}}\n```\n\nSome words.\n\n## {title}\n\n{text}\n'
SECTIONS = {"roofline": "Roofline", "stop": "Stop Conditions", "spec": "Hardware Spec", "readme": "Notes"}
PLAN = {"evidence": "Evidence", "action": "Action", "expected": "Expected effect", "risk": "Risk"}


def context(platform: str) -> Context:
    if platform not in CONTEXTS:
        made = audit.make_context(BUNDLE / "gpu-wiki", platform, RECORDED)
        CONTEXTS[platform] = replace(made, ridges=audit.ridge_points(made, {"bf16"}))
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
    record = memory.empty("v1")
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


def audited(folder: Path, where: str, platform: str, text: str) -> audit.Audit:
    found = audit.Audit()
    audit.of_file(write(folder, where, text), context(platform), found)
    return found


def messages(pairs) -> str:
    return "\n".join(problem.message for _, problem in pairs)
