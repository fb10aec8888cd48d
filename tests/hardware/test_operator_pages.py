"""The wiki's pages by operator: their sections and size, and that each excerpt of code runs and compiles."""

import json
import re
import subprocess
import sys

import forks_with_torch
import pytest
from conftest import BUNDLE

PAGES = sorted((BUNDLE / "gpu-wiki/docs/operators").glob("*.md"))
SECTIONS = [
    "What is computed",
    "What dominates",
    "Structure by shape",
    "Baselines",
    "Traps",
    "How to state it",
    "Reached here",
    "Sources",
]
MOST_WORDS = 1500
EXCERPTS = {
    name: code
    for page in PAGES
    for code, name in re.findall(r"```python\n(# excerpt: (\w+)\n.*?)```", page.read_text(), re.DOTALL)
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_an_operator_page_has_its_sections_in_order_and_is_short(page):
    text = page.read_text()
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == SECTIONS
    assert len(text.split()) <= MOST_WORDS
    assert re.search(r"^- .*https://", text.partition("\n## Sources\n")[2], re.MULTILINE)
    assert f"find_baselines.py {page.stem}`" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_code_is_an_excerpt_with_a_test(page):
    blocks = re.findall(r"```(\w*)\n(.*?)\n", page.read_text())
    opened = [(language, first) for language, first in blocks if language]
    assert all(language == "python" and first.startswith("# excerpt: ") for language, first in opened)


BROKEN = {  # variants of swiglu_rows that must fail: what is replaced, by what
    "swiglu_rows__wrong": ("gate * tl.sigmoid(gate)", "gate * tl.sigmoid(up)"),
    "swiglu_rows__unknown": ("tl.sigmoid(gate)", "tl.nothing(gate)"),
}


@pytest.fixture(scope="module", params=[True, False], ids=["in the interpreter", "compiled for 9.0"])
def faults(request, tmp_path_factory) -> tuple[bool, dict[str, str]]:
    """(interpreted or compiled, {excerpt or broken variant: its fault, or ""})."""
    folder = tmp_path_factory.mktemp("excerpts")
    variants = {name: EXCERPTS["swiglu_rows"].replace(*change) for name, change in BROKEN.items()}
    for name, code in {**EXCERPTS, **variants}.items():
        (folder / f"{name}.py").write_text(code)
    code = f"import runpy; runpy.run_path({str(BUNDLE / 'tests/operator_excerpts.py')!r}, run_name='__main__')"
    environment = {"TRITON_INTERPRET": str(int(request.param)), "TRITON_CACHE_DIR": str(folder / "cache")}
    done = forks_with_torch.run(code, folder, **environment)
    assert done.returncode == 0, done.stdout
    return request.param, json.loads(done.stdout.splitlines()[-1])


def test_each_excerpt_gives_the_results_of_torch_and_compiles(faults):
    assert len(EXCERPTS) >= 10
    assert {name: fault for name, fault in faults[1].items() if name in EXCERPTS} == dict.fromkeys(EXCERPTS, "")


def test_that_check_sees_a_wrong_excerpt_and_one_that_does_not_compile(faults):
    interpreted, found = faults
    assert "nothing" in found["swiglu_rows__unknown"]
    assert bool(found["swiglu_rows__wrong"]) == interpreted  # it compiles


@pytest.mark.gpu
def test_each_excerpt_gives_the_results_of_torch_on_a_gpu(tmp_path):
    for name, code in EXCERPTS.items():
        (tmp_path / f"{name}.py").write_text(code)
    command = [sys.executable, BUNDLE / "tests/operator_excerpts.py", tmp_path, "gpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == dict.fromkeys(EXCERPTS, "")
