"""Tags of figures in the wiki: what counts as a figure, what as its tag, and that figures of examples are theirs."""

import json
import re
from pathlib import Path

import pytest
from conftest import BUNDLE
from kernelopt.hardware import wiki_checks, wiki_figures

WIKI = BUNDLE / "gpu-wiki"
CARDS = wiki_figures.cards_of(WIKI)
EXEMPT = wiki_figures.exempt_pages(WIKI)
TAGGED = sorted(page for page in (WIKI / "docs").glob("[ofp]*/*.md") if str(page.relative_to(WIKI)) not in EXEMPT)


def defects(tmp_path: Path, text: str) -> list[str]:
    page = tmp_path / "page.md"
    page.write_text(text)
    return wiki_figures.untagged(page, "page.md", CARDS)


FIGURES = ["It took 260 us.", "- 4.48 TB/s read", "1.16x as fast", "DRAM at 85 %", "743 TFLOPS in all", "in 3 seconds"]
NO_FIGURES = [
    "C75, sm_90, 2^31, 4096^3",
    "a tile of 128 x 256",
    "`time 3 us`",
    "-1 % 2 is -1",
    "```python\nx = 3  # 5 us\n```",
    "| shape | bytes |\n|---|---|\n| a | 28 |",
    "text\n\n## Sources\n\n- 740 TFLOPS, a paper",
]
TAGS = [
    "(H200, 2026-11)",
    "(H200, `examples/matvec`)",
    "(MI300X, `tools/bench_bandwidth.py`)",
    "on an H100, <https://arxiv.org/abs/1>",
    "one RTX 4090: `measure_kernel_time.py`",
]


@pytest.mark.parametrize("text", FIGURES)
def test_a_figure_without_a_tag_is_found(text, tmp_path):
    (defect,) = defects(tmp_path, f"# Page\n\n{text}\n")
    assert defect.startswith("page.md: L3: ")


@pytest.mark.parametrize("text", NO_FIGURES)
def test_what_is_no_figure_needs_no_tag(text, tmp_path):
    assert defects(tmp_path, f"# Page\n\n{text}\n") == []


@pytest.mark.parametrize("tag", TAGS)
def test_a_card_and_an_origin_are_a_tag(tag, tmp_path):
    assert defects(tmp_path, f"It took 260 us {tag}.\n") == []


@pytest.mark.parametrize("half", ["on an H200", "in 2026-11", "`examples/matvec`", "<https://arxiv.org/abs/1>"])
def test_half_a_tag_is_none(half, tmp_path):
    assert len(defects(tmp_path, f"It took 260 us {half}.\n")) == 1


def test_a_tag_belongs_to_its_paragraph_and_to_a_table_below_it(tmp_path):
    tagged, table = "H200, 2026-11:", "| kernel | best, us |\n|---|---|\n| a | 260 |"
    assert defects(tmp_path, f"{tagged}\n\n{table}\n") == []
    assert len(defects(tmp_path, f"{tagged}\n\nMore.\n\n{table}\n")) == 1
    assert len(defects(tmp_path, f"{tagged}\n\n## Next\n\n{table}\n")) == 1
    assert len(defects(tmp_path, f"- {tagged}\n- 260 us\n")) == 1


def test_the_check_of_the_wiki_reads_the_pages_that_are_not_exempt(tmp_path):
    page = tmp_path / "docs/operators/new.md"
    page.parent.mkdir(parents=True)
    page.write_text("# New\n\n260 us\n")
    (tmp_path / "docs/hardware").symlink_to(WIKI / "docs/hardware")
    assert any("docs/operators/new.md: L3: '260 us'" in defect for defect in wiki_checks.problems(tmp_path))
    (tmp_path / "untagged_pages.json").write_text(json.dumps({"pages": ["docs/operators/new.md"]}))
    assert not any("new.md: L3" in defect for defect in wiki_checks.problems(tmp_path))


@pytest.mark.parametrize("name", EXEMPT)
def test_an_exempt_page_still_needs_its_exemption(name):
    """A page whose figures all have tags leaves untagged_pages.json; pages by operator never enter it."""
    assert wiki_figures.untagged(WIKI / name, name, CARDS) and not name.startswith("docs/operators/")


@pytest.mark.parametrize("page", TAGGED, ids=lambda page: page.stem)
def test_figures_with_an_example_as_their_tag_are_recorded_there(page):
    recorded = (BUNDLE / "docs/results.md").read_text()
    for block in wiki_figures.blocks(page.read_text()):
        examples = set(re.findall(r"`examples/(\w+)`", block.text))
        lessons = [BUNDLE / "examples" / name / "lessons.md" for name in examples]
        known = recorded + "".join(file.read_text() for file in lessons if file.is_file())
        figures = re.findall(r"(?<![\w.])\d+\.\d+", re.sub(r"https?://\S+", "", block.text)) if examples else []
        assert [figure for figure in figures if figure not in known] == []
