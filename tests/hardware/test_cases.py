"""Cases of the wiki: what a page says of a round is its record's, each judged round has a case, and which are nearest.

The findings of a case are held against the profiles in diagnosis/test_example_cases.py.
"""

import shutil
from pathlib import Path

import pytest
from conftest import BUNDLE
from kernelopt.hardware import wiki_case_checks, wiki_cases
from kernelopt.hardware.wiki_cases import Case

WIKI = BUNDLE / "gpu-wiki"
CASES = wiki_cases.all_of(WIKI)

PAGE = """# Cases: sums

Sums of rows.

## One read

- **Record:** `examples/a/memory/v1.json`: FASTER, 1.500x (1.400 to 1.600) against v0;
  `examples/a/memory/v3.json`: EQUAL, 1.000x (0.999 to 1.001) against v1
- **Findings:** `excess_dram_traffic`, `stall_wait`
- **Operators:** `norms`
- **Action:** read
  once.

## None

- **Findings:** none

## Sources

- a book
"""


def test_a_section_is_a_case_with_its_records_findings_and_operators():
    case, empty = wiki_cases.of_page("docs/cases/sums.md", PAGE)
    assert (case.title, case.line) == ("One read", 5) and PAGE.splitlines()[empty.line - 1] == "## None"
    assert [(found.version, found.figures, found.against) for found in case.rounds] == [
        ("v1", ("1.500", "1.400", "1.600"), "v0"),
        ("v3", ("1.000", "0.999", "1.001"), "v1"),
    ]
    assert (case.findings, case.operators) == (("excess_dram_traffic", "stall_wait"), ("norms",))
    assert case.items["Action"] == "read once." and case.outcome == "FASTER, 1.500x; EQUAL, 1.000x"
    assert (empty.rounds, empty.findings, empty.operators) == ((), (), ())


def test_a_wiki_without_cases_has_none_and_no_defects(tmp_path):
    assert wiki_cases.all_of(tmp_path) == [] and wiki_case_checks.problems(tmp_path) == []
    assert wiki_cases.operator_calls(tmp_path) == {}


def test_every_figure_of_the_cases_is_recorded_and_every_judged_round_has_a_case():
    assert wiki_case_checks.problems(WIKI) == []


WRONG = {  # what is replaced in which page, by what: a part of the sentence that must follow
    "a ratio": ("matvec", "1.036x (", "1.037x (", "has FASTER, 1.036, 1.036, 1.036, v1; the case has FASTER, 1.037"),
    "an end of an interval": ("rmsnorm", "(1.475 to 1.477)", "(1.475 to 1.478)", "v1.json has FASTER, 1.476"),
    "a verdict": ("maxpool3d", "SLOWER, 0.994x", "EQUAL, 0.994x", "v4.json has SLOWER"),
    "an opponent": (
        "attention",
        "1.011) against v3",
        "1.011) against v2",
        "v4.json has FASTER, 1.011, 1.011, 1.011, v3",
    ),
    "a record that is not there": ("matvec", "memory/v4.json", "memory/v9.json", "v9.json does not exist"),
    "a first version": ("rmsnorm", "memory/v2.json", "memory/v0.json", "v0.json has no comparison"),
    "a share": ("gemm_fused", "rose to 87.0 %", "rose to 87.2 %", "87.2 stands in no plan"),
    "a decimal": ("transposed_conv3d", "0.19 instructions a cycle", "0.21 instructions a cycle", "0.21 stands in no"),
    "an operator": ("matvec", "`dense-products`", "`dense-sums`", "there is no page docs/operators/dense-sums.md"),
    "an item": ("rmsnorm", "- **Counter-signal:**", "- **Warning:**", "they must be Record, Findings"),
    "no ratio": ("rmsnorm", ": SLOWER, 0.653x (0.653 to 0.653) against v1", "", "v2.json has SLOWER"),
    "a long section": ("rmsnorm", "- **Action:** ", "- **Action:** " + "word " * 150, "150 are allowed"),
    "a round left out": (
        "row_softmax",
        "\nNothing new: ",
        "\nAlso: ",
        "no case has examples/row_softmax/h200/memory/v2",
    ),
}


@pytest.fixture
def copied(tmp_path) -> Path:
    shutil.copytree(WIKI / wiki_cases.FOLDER, tmp_path / wiki_cases.FOLDER)
    (tmp_path / "docs/operators").symlink_to(WIKI / "docs/operators")
    return tmp_path


@pytest.mark.parametrize(("name", "before", "after", "said"), WRONG.values(), ids=WRONG)
def test_what_differs_from_the_record_is_a_defect(name, before, after, said, copied):
    text = (copied / wiki_cases.FOLDER / f"{name}.md").read_text()
    for page in (copied / wiki_cases.FOLDER).iterdir():
        page.unlink()
    changed = copied / wiki_cases.FOLDER / f"{name}.md"
    counts = []
    for version in (text, text.replace(before, after)):
        changed.write_text(version)
        counts.append(sum(said in defect for defect in wiki_case_checks.problems(copied)))
    assert counts[0] < counts[1]


def test_a_page_left_out_leaves_its_rounds_without_a_case(copied):
    (copied / wiki_cases.FOLDER / "matvec.md").unlink()
    assert wiki_case_checks.problems(copied) == [
        f"docs/cases: no case has examples/matvec/memory/v{number}.json" for number in (1, 2, 3, 4)
    ]


def case(title: str, findings: str = "", operators: str = "") -> Case:
    return Case(f"docs/cases/{title}.md", 5, title, "", {}, (), tuple(findings.split()), tuple(operators.split()))


NEAR = [
    case("a", "stall_wait uneven_work low_occupancy", "norms"),
    case("b", "stall_wait", "attention"),
    case("c", "stall_wait uneven_work", "attention"),
    case("d", "low_occupancy", "norms"),
    case("e", "", "scans"),
]


@pytest.mark.parametrize(
    ("findings", "operators", "expected"),
    [
        (["stall_wait", "uneven_work"], [], "ca"),  # most shared; then fewest others
        (["stall_wait", "uneven_work"], ["norms"], "ac"),  # the operator decides between equals
        (["stall_wait"], ["attention"], "bc"),
        (["stall_wait", "low_occupancy"], [], "ab"),  # two shared; then the leading finding
        (["low_occupancy", "stall_wait"], [], "ad"),
        (["busy_tensor_pipe"], ["scans"], "e"),  # nothing shared but the operator
        (["busy_tensor_pipe"], ["optimizers"], ""),
        ([], [], ""),
    ],
)
def test_the_nearest_cases_share_findings_first_and_then_the_operator(findings, operators, expected):
    assert "".join(found.title for found in wiki_cases.nearest(NEAR, findings, operators)) == expected


def test_every_round_of_an_example_is_near_to_a_profile_like_its_own():
    for found in CASES:
        near = wiki_cases.nearest(CASES, found.findings, found.operators)
        assert len(near) == wiki_cases.CITED and set(near[0].findings) >= set(found.findings)


@pytest.mark.parametrize("found", CASES, ids=lambda found: f"{Path(found.page).stem}-{found.line}")
def test_a_citation_leads_to_the_heading_and_is_one_short_line(found):
    line = wiki_cases.citation(found, found.findings[:1])
    path, number, _ = line.removeprefix("gpu-wiki/").split(":", 2)
    assert (WIKI / path).read_text().splitlines()[int(number) - 1] == f"## {found.title}"
    assert f"{found.rounds[0].figures[0]}x" in line and found.findings[0] in line and len(line) <= 200
    assert f"operator {found.operators[0]}" in wiki_cases.citation(found, [])


TOLD = {
    "attention": {"attention"},
    "attention_backward": {"softmax-losses", "dense-products"},  # by hand: products, and a logsumexp for its inputs
    "fp8_block_product": {"dense-products"},
    "paged_decode": {"softmax-losses"},  # attention by einsum: its softmax alone is a call that tells
    "kda": {"scans", "dense-products"},
    "gated_delta_rule": {"scans", "dense-products"},
    "cross_entropy": {"softmax-losses"},
    "cross_entropy_backward": {"softmax-losses"},
    "add_rms_norm_fp8": {"norms"},
    "gemm_fused": {"dense-products", "elementwise"},
    "fp8_product": {"dense-products"},
    "w4a16": {"dense-products"},
    "top_k": {"selection-sampling"},
    "matvec": {"dense-products"},
    "maxpool3d": {"convolution-pooling"},
    "transposed_conv3d": {"convolution-pooling"},
    "row_softmax": {"softmax-losses"},
    "rmsnorm": set(),  # sums and a root by hand: nothing names the operator
}


@pytest.mark.parametrize(("example", "operators"), TOLD.items())
def test_a_reference_tells_its_operators_by_what_it_calls(example, operators):
    source = (BUNDLE / "examples" / example / "reference.py").read_text()
    assert wiki_cases.operators_of(source, wiki_cases.operator_calls(WIKI)) == operators


def test_what_only_looks_like_a_call_tells_no_operator():
    calls = wiki_cases.operator_calls(WIKI)
    assert wiki_cases.operators_of("# softmax(x)\nsoftmax = 'topk(x)'\n", calls) == set()
    assert wiki_cases.operators_of("def broken(:", calls) == set()
    assert wiki_cases.operators_of("y = a @ b", calls) == {"dense-products"}


def test_operators_that_calls_tell_have_a_page():
    calls = wiki_cases.operator_calls(WIKI)
    assert [name for name in calls if not (WIKI / f"docs/operators/{name}.md").is_file()] == []
    assert all(len(set(names)) == len(names) for names in calls.values())
