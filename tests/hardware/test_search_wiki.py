"""Searching the wiki: what answers a question, what is said where nothing does; links into the wiki; its pages on
frameworks.

Size and sources of the other pages of advice: tests/hardware/test_wiki_pages.py.
"""

import ast
import collections
import importlib.util
import json
import re
from pathlib import Path

import pytest
from conftest import BUNDLE, call_tool, processor_time, tool_json
from kernelopt.device.sandbox import Sandbox
from kernelopt.errors import EnvironmentLacks, Refused
from kernelopt.hardware import wiki_cases, wiki_index, wiki_search, wiki_terms
from kernelopt.measure.verify import verify
from kernelopt.session.subject import KernelUnderTest

WIKI = BUNDLE / "gpu-wiki"
FRAMEWORK_PAGES = sorted((WIKI / "docs/frameworks").glob("*.md"))
MOST_WORDS = 1500

ASKED = json.loads((BUNDLE / "tests/fixtures/wiki_questions.json").read_text())
BY_WORDS = {  # a few words, as somebody types them: the page that one of the first three sections must be of
    "bank conflict": "optimization/memory-access",
    "register spill": "optimization/memory-access",
    "uncoalesced loads": "optimization/memory-access",
    "why is occupancy low": "optimization/occupancy",
    "stall_long_scoreboard": "optimization/latency-hiding",
    "CUDA graph": "optimization/launch-overhead",
    "wgmma": "optimization/tensor-cores",
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


@pytest.fixture(scope="module")
def first_three():
    """Gives (page, last heading) of the first three sections that answer a question."""
    index = wiki_index.open_index(WIKI)

    def ask(question: str) -> list[tuple[str, str]]:
        hits = wiki_search.answer(index, question).hits
        return [(hit.section.page, hit.section.headings[-1]) for hit in hits[:3]]

    return ask


@pytest.mark.parametrize(("question", "page"), BY_WORDS.items())
def test_words_find_their_page(question, page, first_three):
    assert f"docs/{page}.md" in [found for found, _ in first_three(question)]


@pytest.mark.parametrize("row", ASKED["answered"], ids=lambda row: row["question"])
def test_a_question_finds_its_section(row, first_three):
    assert (row["page"], row["section"]) in first_three(row["question"])


@pytest.fixture(scope="module")
def shown():
    """Gives (page, last heading) of the sections that are shown for a question."""
    index = wiki_index.open_index(WIKI)

    def ask(question: str) -> list[tuple[str, str]]:
        hits = wiki_search.answer(index, question).hits[: wiki_search.SECTIONS_SHOWN]
        return [(hit.section.page, hit.section.headings[-1]) for hit in hits]

    return ask


@pytest.mark.parametrize("row", ASKED["cases"], ids=lambda row: row["question"])
def test_a_question_finds_its_case(row, shown):
    assert (row["page"], row["section"]) in shown(row["question"])


CASES = wiki_cases.all_of(WIKI)


@pytest.mark.parametrize("finding", sorted({finding for case in CASES for finding in case.findings}))
def test_a_finding_finds_a_case_of_it_beside_the_advice(finding, shown):
    places = {(case.page, case.title) for case in CASES if finding in case.findings}
    assert [place in places for place in shown(finding)[:4]] == [False, False, False, True]
    assert shown(f"case {finding}")[0] in places


@pytest.mark.parametrize("operator", sorted({operator for case in CASES for operator in case.operators}))
def test_an_operator_finds_a_case_of_it(operator, shown):
    places = {(case.page, case.title) for case in CASES if operator in case.operators}
    assert places.intersection(shown(operator)) and shown(f"case {operator}")[0] in places


def test_an_operator_without_cases_shows_none(shown):
    assert not [page for page, _ in shown("case optimizers") if page.startswith("docs/cases/")]


def test_cases_stand_behind_three_sections_of_advice_unless_they_are_asked_for():
    pages = ["README.md"] + ["docs/cases/a.md"] * 3 + ["docs/operators/b.md"] * 4
    hits = [wiki_search.Hit(wiki_index.Section(page, 1, (), ()), 1.0) for page in pages]
    for cases_first, expected in ((False, "bbbaabaR"), (True, "aaabbbbR")):
        ordered = wiki_search.arranged(hits, cases_first)
        assert "".join(Path(hit.section.page).stem[0] for hit in ordered) == expected


@pytest.mark.parametrize("question", ASKED["unanswered"])
def test_what_no_page_treats_is_refused(question, first_three):
    with pytest.raises(Refused, match=re.escape(f"answers '{question}'")):
        first_three(question)


def test_a_refusal_is_one_sentence_and_shows_nothing(run_here):
    done = run_here("search_wiki.py", ASKED["unanswered"][0])
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)


def test_there_are_questions_by_readers_and_by_those_who_saw_no_page():
    by = collections.Counter(row["by"] for row in ASKED["answered"])
    assert by["outside"] == 31 and by["held-out"] == 45 and by["reader"] >= 30


@pytest.fixture
def small(tmp_path) -> Path:
    """A wiki of two pages."""
    (tmp_path / "docs/hardware").mkdir(parents=True)
    (tmp_path / "docs/optimization").mkdir()
    (tmp_path / "docs/hardware/x1.md").write_text("# A card\n\n| bank_count | 32 |\n")
    (tmp_path / "docs/optimization/access.md").write_text(
        "# Access\n\nA conflict.\nbank and more conflicts here\n\n"
        "## Bank conflicts\n\nPad the rows.\nNeighbouring lanes.\n\n"
        "```python\n# conflict in code\n```\n\n## Sources\n\n- bank conflict: a book\n"
    )
    return tmp_path


def places(wiki: Path, question: str) -> list[tuple[str, int, list[int]]]:
    """(page, line of the heading, numbers of the lines shown) of each section that answers."""
    index = wiki_index.open_index(wiki)
    answer = wiki_search.answer(index, question)
    return [
        (
            Path(hit.section.page).stem,
            hit.section.line,
            [number for number, _ in wiki_search.nearest_lines(index, hit, answer.terms)],
        )
        for hit in answer.hits
    ]


def test_a_heading_weighs_more_than_text_and_sources_do_not_answer(small):
    assert places(small, "bank conflict") == [("access", 6, [12]), ("access", 1, [3, 4])]


def test_endings_do_not_matter_and_words_that_say_nothing_are_passed_over(small):
    assert places(small, "how to pad the rows") == places(small, "padded row") == [("access", 6, [8])]


def test_a_comment_in_code_is_no_heading(small):
    (hit,) = wiki_search.answer(wiki_index.open_index(small), "code").hits
    assert hit.section.headings == ("Access", "Bank conflicts")


def test_an_underscore_separates(small):
    assert places(small, "count") == places(small, "bank_count")[:1] == [("x1", 1, [3])]


def test_spellings_of_one_thing_find_the_same(small):
    (small / "synonyms.json").write_text('{"searched_as": {"lanes": ["threads", "simd channels"]}}')
    assert places(small, "SIMD channels") == places(small, "threads") == places(small, "lanes") == [("access", 6, [9])]
    access = small / "docs/optimization/access.md"
    access.write_text(access.read_text() + "\n## More\n\nserialization\n")
    assert places(small, "serialised") == [("access", 19, [21])]


def test_a_spelling_in_two_words_is_one_with_a_dash_or_an_underscore_too(small):
    (small / "synonyms.json").write_text('{"searched_as": {"lanes": ["simd channels"]}}')
    assert places(small, "simd_channels") == places(small, "SIMD-channels") == places(small, "lanes")


@pytest.mark.parametrize(
    ("asked", "as_written"),
    [
        ("neighb", "neighbouring"),
        ("bankconflict", "bank conflict"),
        ("pad 128k rows", "pad rows"),
        ("NoSuchError: pad rows", "pad rows"),
        ("BankConflictError", "bank conflict"),
        ("pad 17 rows", "pad rows"),
    ],
)
def test_a_short_or_joined_word_and_what_says_nothing_find_what_the_pages_write(asked, as_written, small):
    assert places(small, asked) == places(small, as_written) != []


def test_a_number_counts_where_a_title_has_it(small):
    for name in ("A9 4090", "A9 5090", "sm_90"):
        (small / f"docs/hardware/{name}.md").write_text(f"# {name}\n\nlanes\n")
    assert [page for page, *_ in places(small, "lanes of an A9 4090")][:1] == ["A9 4090"]
    assert [page for page, *_ in places(small, "lanes of a 5090")][:1] == ["A9 5090"]
    assert [page for page, *_ in places(small, "lanes of sm_90")][:1] == ["sm_90"]
    assert [page for page, *_ in places(small, "lanes")] == ["access"]  # a product answers if it is named


def test_what_a_page_is_about_counts_for_its_sections_and_its_row_in_the_index_too(small):
    (small / "docs/optimization/more.md").write_text("# More\n\nWidgets.\n\n## Cost\n\nmuch\n")
    (small / "README.md").write_text("# Index\n\n| gadgets | [more](docs/optimization/more.md) |\n")
    index = wiki_index.open_index(small)
    for question in ("cost of widgets", "cost of gadgets"):
        assert wiki_search.answer(index, question).hits[0].section.headings == ("More", "Cost")


def test_a_long_message_need_not_be_on_a_page_word_for_word(small):
    more = " ".join(f"unseen{number}" for number in "abcdefgh")
    rows = "".join(f"\n## Other {number}\n\ntext\n" for number in range(200))
    page = small / "docs/optimization/access.md"
    page.write_text(page.read_text() + rows + "\n## Frobnicated gizmo of the quux\n\nfoo\n")
    index = wiki_index.open_index(small)
    first = wiki_search.answer(index, f"frobnicated gizmo quux foo {more}").hits[0].section
    assert first.headings[-1] == "Frobnicated gizmo of the quux"
    with pytest.raises(Refused):
        wiki_search.answer(index, f"foo {more}")


def test_every_synonym_has_one_meaning_and_leads_to_a_word_that_is_no_spelling_itself():
    groups = json.loads((WIKI / "synonyms.json").read_text())["searched_as"]
    spellings = [spelling for group in groups.values() for spelling in group]
    assert len(spellings) == len(set(spellings)) and not set(spellings) & set(groups)
    assert all(spelling == spelling.lower() for spelling in spellings)


def test_a_metric_of_nsight_compute_finds_the_section_of_its_key():
    name = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared"
    assert "shared_bank_conflicts" in wiki_terms.metric_keys(name).split()
    assert wiki_terms.metric_keys("nosuch__metric") == "nosuch__metric"
    assert wiki_terms.metric_keys("smsp__inst_executed_pipe_xu") == "xu_instructions"  # collected as sm__


def test_the_tool_prints_at_most_five_sections_each_with_its_place():
    found = tool_json("search_wiki.py", "shared", "memory")
    assert len(found["sections"]) == 5 < found["sections_found"] and found["unknown_words"] == []
    first = found["sections"][0]
    page = (Path(found["gpu_wiki"]) / first["page"]).read_text().splitlines()
    assert page[first["line"] - 1].endswith(f" {first['headings'][-1]}") and first["lines"]
    assert all(page[line["line"] - 1].strip() == line["text"] for line in first["lines"])
    lines = call_tool("search_wiki.py", "shared", "memory").stdout.splitlines()
    assert len(lines) <= 15 and max(map(len, lines)) < 180
    assert lines[0] == f"{first['page']}:{first['line']} [{' > '.join(first['headings'])}]"
    assert lines[1].startswith(f"  {first['lines'][0]['line']}: ")


def test_another_wiki_is_searched_when_named(small):
    for options in ({"env": {"GPU_WIKI": str(small)}}, {}):
        extra = [] if options else ["--gpu-wiki", small]
        (section,) = tool_json("search_wiki.py", *extra, "pad rows", **options)["sections"]
        assert (section["page"], section["line"]) == ("docs/optimization/access.md", 6)
    assert call_tool("search_wiki.py", "--gpu-wiki", small / "none", "pad").returncode == 2


def test_unknown_words_are_named_in_one_sentence(run_here):
    done = run_here("search_wiki.py", "occupanzy")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "no page has occupanzy (it has occupancy)" in done.stderr
    done = run_here("search_wiki.py", "xyzzy", "registers limit occupancy")
    assert done.returncode == 0 and "no page has: xyzzy" in done.stderr and "occupancy.md" in done.stdout
    done = run_here("search_wiki.py", "softmax with a barrier stall on Hopper and its roofline")
    assert done.returncode == 0 and "the first section has nothing on: " in done.stderr
    done = run_here("search_wiki.py", "how", "--", "1024", "?")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_quotes_and_operators_of_the_index_are_words(small):
    assert places(small, 'pad AND "rows" NEAR(*)') == places(small, "pad rows")


def test_a_python_without_the_full_text_index_is_told():
    with pytest.raises(EnvironmentLacks, match="FTS5"):
        wiki_index.full_text_table("text, nosuchoption=1")


def test_a_search_is_quick():
    times = []
    for _ in range(3):
        before = processor_time()
        call_tool("search_wiki.py", "how do I fix a bank conflict in shared memory")
        times.append(processor_time() - before)
    assert min(times) < 0.8  # 0.3 s on a quiet core; this only sees a heavy import


def anchor(heading: str) -> str:
    """The name by which a link reaches a heading, after GitHub's rule."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def unresolved(link: str, folder: Path) -> str | None:
    """What is wrong with a link `page.md` or `page.md#heading`; None when it leads somewhere."""
    page, _, heading = link.partition("#")
    if not (folder / page).is_file():
        return f"{page} does not exist"
    sections = wiki_index.sections_of(folder / page, folder)
    headings = {anchor(text) for section in sections for text in section.headings}
    return f"{page} has no heading {heading}" if heading and heading not in headings else None


def test_links_of_findings_lead_to_a_page_and_a_heading():
    text = (BUNDLE / "reference/findings.json").read_text()
    links = set(re.findall(r'"wiki": "([\w/-]+\.md(?:#[\w-]+)?)"', text))
    assert len(links) >= 6
    assert [unresolved(link, WIKI / "docs/optimization") for link in sorted(links)] == [None] * len(links)


def links_of(page: Path) -> list[str]:
    """The links of a page to pages, and to their headings."""
    return re.findall(r"\]\(((?!https?:)[^)\s]+\.md(?:#[^)\s]+)?)\)", page.read_text())


def test_links_between_pages_lead_to_a_page_and_a_heading():
    wrong = {
        f"{page.relative_to(WIKI)}: {fault}"
        for page in WIKI.rglob("*.md")
        for link in links_of(page)
        if (fault := unresolved(link, page.parent))
    }
    assert wrong == set()


@pytest.mark.parametrize(
    "page",
    ["operators/dense-products", "operators/attention", "optimization/hopper", "frameworks/hopper-ptx"],
)
def test_what_is_read_before_a_first_version_leads_to_what_most_first_versions_got_wrong(page):
    assert "../pitfalls/hopper-kernels.md#a-fence-in-every-step" in links_of(WIKI / f"docs/{page}.md")


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
    status = r"^\*\*(Not yet run on a GPU\.|Ran on .*H[12]00.*)\*\*|\*\*Nothing of this page ran on AMD hardware\.\*\*"
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
