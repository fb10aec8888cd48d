"""The wiki's pages of error messages: their parts and size, and that each message is one that a compiler or the CUDA
runtime gives. The kernels that Triton refuses: tests/refused_triton_kernels.py."""

import importlib.metadata
import json
import re

import forks_with_torch
import pytest
from conftest import BUNDLE, FIXTURES

TRITON = tuple(map(int, importlib.metadata.version("triton").split(".")[:2]))
FOLDER = BUNDLE / "gpu-wiki/docs/errors"
PAGES = sorted(FOLDER.glob("*.md"))
PARTS = ["Message", "Cause", "Remedy"]
MOST_WORDS = 1500
RUNTIME = json.loads((FIXTURES / "error_messages/cuda_runtime.json").read_text())
NVCC = json.loads((FIXTURES / "error_messages/nvcc.json").read_text())
NOT_CAPTURED = {  # sections whose messages need a GPU, another version or another program
    "nvcc-ptxas": {"undefined symbol", "CUDA_HOME", "CUTLASS"},
    "triton": {"out of resource", "Input shapes", "Block pointers", "Pointer argument", "Kernel requires"}
    | {"0 active drivers", "PassManager"},
}


def sections(page: str) -> dict[str, dict[str, str]]:
    """{heading: {part: text}} of a page, without its sources."""
    pieces = re.split(r"^## (.+)$", (FOLDER / f"{page}.md").read_text(), flags=re.MULTILINE)
    bodies = dict(zip(pieces[1::2], pieces[2::2], strict=True))
    bodies.pop("Sources")
    return {
        heading: dict(re.findall(r"^- \*\*(\w+):\*\* (.+)$", body, re.MULTILINE)) for heading, body in bodies.items()
    }


def messages(page: str) -> list[str]:
    """What a page quotes as a message and a fixture or a test can confirm."""
    skipped = tuple(NOT_CAPTURED[page])
    texts = [parts["Message"] for heading, parts in sections(page).items() if not heading.startswith(skipped)]
    return [quoted.strip("` ") for text in texts for quoted in re.findall(r"``.+?``|`[^`]+`", text) if " " in quoted]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_an_error_page_is_short_and_says_cause_and_remedy_of_each_message(page):
    text = page.read_text()
    assert len(text.split()) <= MOST_WORDS and re.search(r"^- .*https://", text.partition("\n## Sources\n")[2], re.M)
    assert {heading: list(parts) for heading, parts in sections(page.stem).items() if list(parts) != PARTS} == {}


def test_texts_and_numbers_of_the_runtime_are_those_of_the_library():
    page = (FOLDER / "cuda-runtime.md").read_text()
    numbered = {name: int(number) for name, number in re.findall(r"`(cudaError\w+)` \((\d+)\)", page)}
    assert len(numbered) >= 18
    assert numbered == {name: RUNTIME[name]["number"] for name in numbered}
    texts = " | ".join(row["text"] for row in RUNTIME.values())
    assert [heading for heading in sections("cuda-runtime") if heading not in texts] == []
    quoted = re.findall(r'\d\), "([^"]+)"', page)
    assert len(quoted) >= 4 and [text for text in quoted if text not in texts] == []


def test_messages_of_nvcc_and_ptxas_were_given_by_them():
    captured = "\n".join(line for row in NVCC for line in row["messages"])
    quoted = messages("nvcc-ptxas")
    assert len(quoted) >= 18
    assert [text for text in quoted if text not in captured] == []


def codes_of(text: str) -> dict[str, str]:
    """{code: reason} of the rows of a table of ptxas's codes; "" where a row has no reason."""
    rows = re.findall(r"^\| (C75\d\d)[^|]*\| ([^|]*)\|", text, re.MULTILINE)
    return {code: (re.findall(r"`([^`]+)`", reason) or [""])[0] for code, reason in rows}


def test_each_code_of_serialised_wgmma_was_given_with_its_reason():
    given = [line for row in NVCC for line in row["messages"]]
    codes = codes_of((FOLDER / "nvcc-ptxas.md").read_text())
    serialising = {line.partition("(")[2][:5] for line in given if "instructions are serialized" in line}
    assert len(serialising) == 6 and serialising <= set(codes)
    for code, reason in codes.items():
        assert bool(reason) == (code in serialising)
        assert [line for line in given if f"({code})" in line and reason in line], code


def test_what_the_page_says_of_values_and_shapes_is_what_was_compiled():
    """Of the sources: two shapes without and with a value; two shapes in one array; a read behind a wait, and without;
    sums that start with widened bf16, named and not; A in registers, with a barrier's wait before each product, and with
    both before the first."""

    def messages_of(words: str, flag: str = "-v") -> str:
        (found,) = [row["messages"] for row in NVCC if words in row["source"] and row["flags"].endswith(flag)]
        return " ".join(re.findall(r"\(C75\d\d\)|\d+ bytes stack", " ".join(found)))

    assert messages_of("ZERO(32)") == "(C7512) 160 bytes stack"
    assert messages_of("ZERO(32)", 'd[i]=0;"') == "0 bytes stack"
    assert messages_of("half(d+4") == "(C7511) 0 bytes stack"
    assert messages_of("W(1); if(i==3) for") == "(C7514) 0 bytes stack"
    assert messages_of("if(i==3){ W(0)") == "0 bytes stack"
    assert messages_of("wait(s+8*t,q); for") == "(C7513) 0 bytes stack"
    assert messages_of("wait(s+8*u,u?q:q^1)") == "0 bytes stack"
    assert messages_of("y[j]<<16); for(int i") == "(C7514) 0 bytes stack"
    assert messages_of("y[j]<<16); for(int j") == "0 bytes stack"
    assert messages_of("float e[4]") == "(C7519) 0 bytes stack"


@pytest.fixture(scope="module")
def refused(tmp_path_factory) -> dict[str, str]:
    """{kernel: message} of tests/refused_triton_kernels.py."""
    folder = tmp_path_factory.mktemp("refused")
    code = f"import runpy; runpy.run_path({str(BUNDLE / 'tests/refused_triton_kernels.py')!r}, run_name='__main__')"
    done = forks_with_torch.run(code, folder, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(folder))
    assert done.returncode == 0, done.stdout
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(TRITON < (3, 9), reason="the page quotes Triton 3.9; one of the kernels ends the compiler of 3.2")
def test_messages_of_triton_are_raised_by_it(refused):
    assert "" not in refused.values()
    raised = "\n".join(refused.values())
    quoted = messages("triton")
    assert len(quoted) >= 14
    assert [text for text in quoted if text.replace("<function …>", "<function plain_python") not in raised] == []
