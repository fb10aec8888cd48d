"""Searching the wiki: what comes first, what is said of unknown words; links into the wiki; its pages on frameworks.

Size and sources of the other pages of advice: tests/hardware/test_wiki_pages.py.
"""

import ast
import importlib.util
import re
from pathlib import Path

import pytest
from conftest import BUNDLE, call_tool, processor_time, run_tool, tool_json
from kernelopt.device.sandbox import Sandbox
from kernelopt.hardware import wiki_search
from kernelopt.measure.verify import verify
from kernelopt.session.target import KernelUnderTest

WIKI = BUNDLE / "gpu-wiki"
FRAMEWORK_PAGES = sorted((WIKI / "docs/frameworks").glob("*.md"))
MOST_WORDS = 1500

QUESTIONS = {  # what somebody asks: the page that must be among the first three lines
    "bank conflict": "optimization/memory-access",
    "register spill": "optimization/memory-access",
    "uncoalesced loads": "optimization/memory-access",
    "why is occupancy low": "optimization/occupancy",
    "stall_long_scoreboard": "optimization/latency-hiding",
    "CUDA graph": "optimization/launch-overhead",
    "wgmma": "optimization/hopper",
    "split k": "optimization/reductions",
    "L2 tile order": "optimization/l2-locality",
    "MFMA": "optimization/cdna",
    "cold cache timing": "pitfalls/measurement",
    "product of int32": "pitfalls/indexing",
    "tf32": "pitfalls/numerics",
    "num_stages": "pitfalls/compiler",
    "TMA descriptor": "frameworks/triton",
    "autotune restore_value": "frameworks/triton",
    "misaligned address float4": "frameworks/cuda-cpp",
    "from_dlpack": "frameworks/cutedsl",
    "make_buffer_tensor": "frameworks/flydsl",
    "max pool dilation": "optimization/windows",
    "transposed convolution": "optimization/windows",
    "depthwise convolution": "optimization/windows",
    "stencil": "optimization/windows",
    "H200 bandwidth": "hardware/h200",
}


@pytest.mark.parametrize(("question", "page"), QUESTIONS.items())
def test_a_question_finds_its_page(question, page):
    found, unknown = wiki_search.search(WIKI, question)
    assert f"docs/{page}.md" in [line.page for line in found[:3]] and unknown == []


@pytest.fixture
def small(tmp_path) -> Path:
    """A wiki of two pages."""
    (tmp_path / "docs/hardware").mkdir(parents=True)
    (tmp_path / "docs/optimization").mkdir()
    (tmp_path / "docs/hardware/x1.md").write_text("# X1\n\n| bank_count | 32 |\n")
    (tmp_path / "docs/optimization/access.md").write_text(
        "# Access\n\nA conflict.\nbank and more conflicts here\n\n"
        "## Bank conflicts\n\nPad the rows.\nmisconflicting\n\n"
        "```python\n# conflict in code\n```\n\n## Sources\n\n- bank conflict: a book\n"
    )
    return tmp_path


def numbers(wiki: Path, query: str) -> list[tuple[str, int]]:
    return [(Path(line.page).stem, line.number) for line in wiki_search.search(wiki, query)[0]]


def test_lines_with_all_words_come_first_then_headings_and_sources_last(small):
    found = numbers(small, "bank conflict")
    assert found[:3] == [("access", 6), ("access", 12), ("access", 9)]  # under the heading that has both words
    assert found.index(("access", 4)) < found.index(("access", 3))  # all words before some
    assert found[-1] == ("access", 17)


def test_whole_words_come_before_other_endings_and_these_before_parts(small):
    page = small / "docs/optimization/access.md"
    page.write_text("# Access\n\nreconflicting\nconflicts\nconflict\n")
    assert numbers(small, "conflict") == [("access", 5), ("access", 4), ("access", 3)]


def test_words_of_a_question_that_say_nothing_are_passed_over(small):
    assert numbers(small, "how to pad the rows") == numbers(small, "pad rows") == [("access", 8)]


def test_a_comment_in_code_is_no_heading(small):
    (line,), _ = wiki_search.search(small, "code")
    assert line.headings == ("Access", "Bank conflicts")


def test_an_underscore_separates_in_pages_and_joins_in_queries(small):
    assert numbers(small, "count") == numbers(small, "bank_count") == [("x1", 3)]


def test_the_tool_prints_at_most_forty_lines_each_with_its_place():
    found = tool_json("search_wiki.py", "shared", "memory")
    assert len(found["lines"]) == 40 < found["lines_found"] and found["unknown_words"] == []
    first = found["lines"][0]
    line = (Path(found["gpu_wiki"]) / first["page"]).read_text().splitlines()[first["line"] - 1]
    assert line.strip() == first["text"] and first["headings"]
    lines = call_tool("search_wiki.py", "shared", "memory").stdout.splitlines()
    assert len(lines) == 40 and lines[0].startswith(f"{first['page']}:{first['line']} [{first['headings'][0]}")


def test_another_wiki_is_searched_when_named(small):
    for options in ({"env": {"GPU_WIKI": str(small)}}, {}):
        extra = [] if options else ["--gpu-wiki", small]
        (line,) = tool_json("search_wiki.py", *extra, "pad rows", **options)["lines"]
        assert (line["page"], line["line"]) == ("docs/optimization/access.md", 8)
    assert call_tool("search_wiki.py", "--gpu-wiki", small / "none", "pad").returncode == 2


def test_unknown_words_are_named_in_one_sentence(run_here):
    done = run_here("search_wiki.py", "occupency")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "'occupency'; it has occupancy" in done.stderr
    done = run_here("search_wiki.py", "xyzzy", "occupancy")
    assert done.returncode == 0 and "no page has: xyzzy" in done.stderr and "occupancy.md" in done.stdout
    done = run_here("search_wiki.py", "how", "--", "?")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_a_search_is_quick():
    times = []
    for _ in range(3):
        before = processor_time()
        run_tool("search_wiki.py", "how do I fix a bank conflict in shared memory")
        times.append(processor_time() - before)
    assert min(times) < 0.4  # 0.2 s is the promise; this only sees a heavy import


def anchor(heading: str) -> str:
    """The name by which a link reaches a heading, after GitHub's rule."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def unresolved(link: str, folder: Path) -> str | None:
    """What is wrong with a link `page.md` or `page.md#heading`; None when it leads somewhere."""
    page, _, heading = link.partition("#")
    if not (folder / page).is_file():
        return f"{page} does not exist"
    headings = {anchor(text) for line in wiki_search.lines_of(folder / page, folder) for text in line.headings}
    return f"{page} has no heading {heading}" if heading and heading not in headings else None


def test_links_of_findings_lead_to_a_page_and_a_heading():
    text = (BUNDLE / "reference/findings.json").read_text()
    links = set(re.findall(r'"wiki": "([\w/-]+\.md(?:#[\w-]+)?)"', text))
    assert len(links) >= 6
    assert [unresolved(link, WIKI / "docs/optimization") for link in sorted(links)] == [None] * len(links)


def test_that_check_sees_a_missing_page_and_a_missing_heading(small):
    folder = small / "docs/optimization"
    assert unresolved("access.md#bank-conflicts", folder) is None
    assert unresolved("access.md#gone", folder) and unresolved("gone.md", folder)


def blocks(page: Path) -> dict[str, str]:
    """{file: text} of the code blocks of a page that begin with a file's name: # kernel.py."""
    found = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    return {text.split("\n", 1)[0][2:]: text for text in found if re.match(r"# \w+\.py\n", text)}


@pytest.mark.parametrize("page", FRAMEWORK_PAGES, ids=lambda page: page.stem)
def test_a_framework_page_is_short_names_its_sources_and_says_what_ran(page):
    text = page.read_text()
    assert len(text.split()) <= MOST_WORDS
    sources = text.partition("\n## Sources\n")[2]
    assert re.search(r"^- .*https://", sources, re.MULTILINE) and re.search(r"compiled|observed|ran on", sources)
    status = r"^\*\*(Not yet run on a GPU\.|Ran on .*H200.*)\*\*|\*\*Nothing of this page ran on AMD hardware\.\*\*"
    assert re.search(status, text, re.MULTILINE)
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        ast.parse(block)


@pytest.fixture
def kernel_of(tmp_path):
    """Writes kernel and reference of a framework's page, as a reader would copy them; their paths."""

    def write(framework: str) -> dict[str, Path]:
        found = blocks(WIKI / f"docs/frameworks/{framework}.md")
        for name in ("kernel.py", "reference.py"):
            (tmp_path / name).write_text(found[name])
        return {"kernel": tmp_path / "kernel.py", "reference": tmp_path / "reference.py"}

    return write


def test_the_triton_kernel_of_the_page_passes_in_the_interpreter_by_the_command_of_the_page(
    kernel_of, tmp_path, monkeypatch, run_here
):
    kernel_of("triton")
    page = (WIKI / "docs/frameworks/triton.md").read_text()
    tool, arguments = re.search(r"^python tools/(\S+) (.*)$", page, re.MULTILINE).groups()
    monkeypatch.chdir(tmp_path)
    found = tool_json(tool, *arguments.split(), "--seeds", "2", run=run_here)
    assert (found["status"], found["device"]) == ("OK", "cpu-interpreter")


def test_the_pages_show_one_problem_in_three_languages():
    references = {
        blocks(WIKI / f"docs/frameworks/{name}.md")["reference.py"] for name in ("triton", "cuda-cpp", "cutedsl")
    }
    assert len(references) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("framework", ["triton", "cuda-cpp", "cutedsl"])
def test_the_kernel_of_a_page_passes_on_a_gpu(framework, kernel_of):
    if framework == "cutedsl" and importlib.util.find_spec("cutlass") is None:
        pytest.skip("nvidia-cutlass-dsl is not installed")
    files = kernel_of(framework)
    with Sandbox("cuda") as sandbox:
        verdict = verify(sandbox, KernelUnderTest(files["kernel"], files["reference"]), seeds=2)
    assert verdict.status == "OK", verdict.summary
