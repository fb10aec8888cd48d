"""Tags of figures in the wiki: what counts as a figure, what as its tag, and that figures of examples are theirs."""

import re
from pathlib import Path

import pytest
from conftest import BUNDLE
from kernelopt.hardware import wiki_checks, wiki_figures

WIKI = BUNDLE / "gpu-wiki"
CARDS = wiki_figures.cards_of(WIKI)
PAGES = sorted(page for folder in wiki_figures.FOLDERS for page in (WIKI / "docs" / folder).glob("*.md"))
LESSONS = {path.parent.name: path.read_text() for path in (BUNDLE / "examples").glob("*/lessons.md")}
RESULTS = "".join((BUNDLE / "docs" / name).read_text() for name in ("results.md", "results-earlier.md"))


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
    assert defects(tmp_path, f"- {tagged}\n\n{table}\n\n  More: 260 us\n") == []
    assert len(defects(tmp_path, f"- {tagged}\n\n{table}\n\nMore: 260 us\n")) == 1


def test_the_tag_of_what_was_observed_counts_for_its_pitfall(tmp_path):
    items = "- **Cause:** 20 us of it waited.\n- **Lesson:** 10 % is no gain.\n"
    assert defects(tmp_path, f"## One\n\n- **Observed:** H200, 2026-11: slower.\n{items}") == []
    assert len(defects(tmp_path, f"## One\n\n- **Attempted:** H200, 2026-11: 5 us.\n{items}")) == 2
    assert len(defects(tmp_path, f"## One\n\n- **Observed:** H200, 2026-11.\n\n## Two\n\n{items}")) == 2


def test_a_threshold_with_its_name_is_no_figure(tmp_path):
    assert defects(tmp_path, "- at least 80 % (`saturated_pct`), below 4 us (`short_kernel_us`)\n") == []
    assert len(defects(tmp_path, "- at least 81 % (`saturated_pct`)\n")) == 1
    assert len(defects(tmp_path, "- at least 80 % (`matvec`)\n")) == 1
    assert len(defects(tmp_path, "- at least 80 % (`saturated_pct`), then 85 %\n")) == 1


def test_the_check_of_the_wiki_reads_the_pages(tmp_path):
    page = tmp_path / "docs/operators/new.md"
    page.parent.mkdir(parents=True)
    page.write_text("# New\n\n260 us\n")
    (tmp_path / "docs/hardware").symlink_to(WIKI / "docs/hardware")
    assert any("docs/operators/new.md: L3: '260 us'" in defect for defect in wiki_checks.problems(tmp_path))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_figures_with_an_example_as_their_tag_are_recorded_there(page):
    for block in wiki_figures.blocks(page.read_text()):
        examples = set(re.findall(r"`examples/(\w+)`", block.context)) & set(LESSONS)
        known = RESULTS + "".join(LESSONS[name] for name in examples)
        figures = re.findall(r"(?<![\w.])\d+\.\d+", re.sub(r"https?://\S+", "", block.text)) if examples else []
        assert [figure for figure in figures if figure not in known] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_ratio_with_three_decimals_is_a_gates(page):
    ratios = re.findall(r"(?<![\d.])\d+\.\d{3}x", page.read_text())
    assert [ratio for ratio in ratios if ratio not in RESULTS + "".join(LESSONS.values())] == []
