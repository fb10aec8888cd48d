"""The types of a workspace's JSON files.

Each class has the keys of its schema, and each example's file comes back as it was.
"""

import dataclasses
import json

import pytest
from conftest import BUNDLE
from kernelopt import bundle
from kernelopt.hardware.work import Work
from kernelopt.session import record
from kernelopt.session.readme import TASK_BLOCK
from kernelopt.session.record import Record
from kernelopt.session.task import Target, Task
from kernelopt.session.workspace import Workspace

TASK_SCHEMA = bundle.read_json(bundle.REFERENCE / "task.schema.json")
RECORD_SCHEMA = bundle.read_json(bundle.REFERENCE / "v_iteration.schema.json")
WORK_SCHEMA = TASK_SCHEMA["properties"]["work"]["oneOf"][1]["additionalProperties"]
PARTS = RECORD_SCHEMA["properties"]
COMPARISON_SCHEMA = RECORD_SCHEMA["$defs"]["comparison"]
OBJECTS = {
    Task: TASK_SCHEMA,
    Target: TASK_SCHEMA["properties"]["targets"]["items"],
    Work: WORK_SCHEMA,
    Record: RECORD_SCHEMA,
    record.Performance: PARTS["performance"],
    record.PreviousComparison: COMPARISON_SCHEMA,
    **{kind: PARTS[name] for name, kind in record.OBJECTS.items()},
    **{kind: PARTS[name]["items"] for name, kind in record.LISTS.items()},
}
EXAMPLES = sorted(path.parent for path in (BUNDLE / "examples").rglob("memory"))
TASK = {
    "platform": None,
    "arch": None,
    "framework": None,
    "dtype": "bf16",
    "tolerance": None,
    "shapes": {"default": "8 -> 8"},
    "libraries": False,
    "only_these_shapes": True,
    "additional_notes": "",
    "gpu_wiki_path": None,
    "calibration": None,
    "work": {
        "default": {
            "flops": 1,
            "bytes_in": None,
            "bytes_out": None,
            "bytes_min": 2,
            "dtype": "bf16",
            "also": [],
            "cast_to": None,
            "source": "counted",
        }
    },
    "targets": [
        {"workload": "w", "metric": "tflops", "target": 1, "unit": "TFLOPS", "share_pct": 90.0, "basis": "given"}
    ],
}
OPTIONAL = ("libraries", "only_these_shapes", "calibration")


@pytest.mark.parametrize("kind", OBJECTS, ids=lambda kind: kind.__name__)
def test_a_class_has_the_keys_of_its_schema_in_their_order(kind):
    schema, fields = OBJECTS[kind], dataclasses.fields(kind)
    assert [field.name for field in fields] == list(schema["properties"])
    required = {field.name for field in fields if field.default is dataclasses.MISSING}
    assert required == set(schema["required"])


def same(written: dict, read: dict) -> bool:
    """The same keys in the same order, with the same values of the same types."""
    return json.dumps(written) == json.dumps(read)


def test_a_task_block_comes_back_with_the_keys_that_it_had():
    assert same(Task.from_json(TASK).to_json(), TASK)
    short = {name: value for name, value in TASK.items() if name not in OPTIONAL}
    work = {name: value for name, value in TASK["work"]["default"].items() if name not in ("also", "cast_to")}
    short["work"] = {"default": work}
    short["targets"] = [{name: value for name, value in TASK["targets"][0].items() if name != "share_pct"}]
    assert same(Task.from_json(short).to_json(), short)
    assert same(Task.from_json({**TASK, "work": None}).to_json(), {**TASK, "work": None})


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_what_an_example_holds_comes_back_as_it_was(folder):
    block = json.loads(TASK_BLOCK.search((folder / "README.md").read_text())[1])
    assert same(Workspace(folder).task().to_json(), block)
    for path in (folder / "memory").glob("v*.json"):
        written = json.loads(path.read_text())
        assert same(Record.from_json(written).to_json(), written), path


def test_a_record_with_entries_comes_back_as_it_was():
    written = json.loads((EXAMPLES[0] / "memory" / "v0.json").read_text())
    for name, kind in record.LISTS.items():
        written[name] = [{field.name: f"{field.name} {name}" for field in dataclasses.fields(kind)}] * 2
    assert same(Record.from_json(written).to_json(), written)


@pytest.mark.parametrize("broken", [{}, [], None, {"version": "v1"}, dict.fromkeys(PARTS)])
def test_what_is_no_record_is_a_key_or_type_error(broken):
    with pytest.raises((KeyError, TypeError)):
        Record.from_json(broken)
