"""A definition that a test changes a little."""

import json
from pathlib import Path

RUN = "import torch\n\n\ndef run(x):\n    return x * 2\n"


def definition(folder: Path, **changes) -> Path:
    """A small definition of FlashInfer-Bench with two workloads; changes: keys of the object."""
    value = {
        "name": "twice",
        "op_type": "scale",
        "axes": {"n": {"type": "var"}, "m": {"type": "const", "value": 4}},
        "inputs": {"x": {"shape": ["n", "m"], "dtype": "float32"}},
        "outputs": {"y": {"shape": ["n", "m"], "dtype": "float32"}},
        "reference": RUN,
        **changes,
    }
    workload = {"uuid": "w1", "axes": {"n": 3}, "inputs": {"x": {"type": "random"}}}
    (folder / "twice.jsonl").write_text(json.dumps({"definition": "twice", "workload": workload}) + "\n")
    file = folder / "twice.json"
    file.write_text(json.dumps(value))
    return file
