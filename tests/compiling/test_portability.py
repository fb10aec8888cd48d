"""docs/portability.md is what the recorded compilations say, and they are of the examples as they are."""

import importlib.util
import json

import pytest
from conftest import BUNDLE
from kernelopt.session.digests import digest

spec = importlib.util.spec_from_file_location("portability", BUNDLE / "benchmarks/portability.py")
portability = importlib.util.module_from_spec(spec)
spec.loader.exec_module(portability)
KERNELS = json.loads((BUNDLE / "docs/portability.json").read_text())["kernels"]
FITTING = {"registers": "96+64,30", "spill_bytes": 0, "spilled_scalar_registers": 0, "tensor_instructions": "mfma:8"}
SPILLING = {"registers": "255", "spill_bytes": 64, "spilled_scalar_registers": None, "tensor_instructions": "-"}


def test_the_page_is_drawn_from_the_file():
    assert (BUNDLE / "docs/portability.md").read_text() == portability.page(KERNELS)


@pytest.mark.parametrize("file", portability.FILES)
def test_the_rows_are_of_this_very_kernel(file):
    entry = KERNELS[file]
    assert entry["sha256"] == digest(BUNDLE / "examples" / file), "python benchmarks/portability.py NAME"
    assert len(entry["targets"]) == len(portability.TARGETS)
    for old, _ in portability.CONSTANTS.get(file, []):
        assert old in (BUNDLE / "examples" / file).read_text()


@pytest.mark.parametrize(
    "file", [name for name in KERNELS if any("fits_with" in row for row in KERNELS[name]["targets"].values())]
)
def test_an_example_that_other_constants_make_fit_says_so(file):
    lessons = (BUNDLE / "examples" / file.partition("/")[0] / "lessons.md").read_text()
    targets = [name for name, row in KERNELS[file]["targets"].items() if "fits_with" in row]
    assert "docs/portability.md" in lessons and [name for name in targets if name not in lessons] == []


def row(*kernels: dict, status: str = "OK", **own) -> dict:
    return {"status": status, "error": None, "lacking": False, "kernels": list(kernels), **own}


def test_what_a_cell_says():
    assert portability.cell(row(FITTING)) == "96+64,30 mfma:8"
    assert portability.cell(row(FITTING, SPILLING)) == "255 **64 spilled**"
    assert portability.cell(row({**FITTING, "spilled_scalar_registers": 7})) == "96+64,30 **7s spilled** mfma:8"
    assert portability.cell(row(status="INTERNAL", lacking=True)) == "no hipcc"
    cells = [portability.cell(row(status=status)) for status in ("LAUNCH_ERROR", "TIMEOUT", "COMPILE_ERROR")]
    assert cells == ["too large", "time", "refused"]


def test_constants_that_fit_and_refusals_are_listed():
    fits = {"constants": "STAGES = 2", **row(FITTING)}
    error = "error : no | here"
    targets = {
        "sm_80": row(SPILLING, fits_with=fits),
        "gfx942": row(SPILLING),
        "sm_75": row(status="COMPILE_ERROR", error=error),
        "sm_89": row(FITTING),
    }
    kernels = {"matvec/kernel.py": {"targets": targets}}
    link = "[matvec](../examples/matvec/kernel.py)"
    assert portability.constants(kernels)[2:] == [
        f"| {link} | sm_80 | 255 **64 spilled** | `STAGES = 2` | 96+64,30 mfma:8 |",
        f"| {link} | gfx942 | 255 **64 spilled** | none of those tried | |",
    ]
    assert portability.refusals(kernels)[2:] == [f"| {link} | sm_75 | `error : no   here` |"]
