import re
import time

import pytest
from conftest import BUNDLE, run_tool, tool_json
from kernelopt import wiki
from kernelopt.errors import Refused, UsageError

WIKI = BUNDLE / "gpu-wiki"
PAGES = wiki.pages(WIKI)
CITATION = re.compile(r"(?P<metric>\w+): (?P<value>\S+)(?: (?P<unit>\S+))? <- <gpu-wiki>/(?P<page>\S+):L(?P<line>\d+)$")


DEVICE_NAMES = {  # what NVML, torch or rocm-smi call them
    "NVIDIA H200": "H200",
    "NVIDIA H100 80GB HBM3": "H100 SXM",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA A100-SXM4-80GB": "A100 SXM 80GB",
    "NVIDIA A100 80GB PCIe": "A100 PCIe 80GB",
    "NVIDIA A100-PCIE-40GB": "A100 PCIe 40GB",
    "NVIDIA GH200 480GB": "GH200 96GB",
    "NVIDIA B300 SXM6 AC": "B300",
    "Tesla T4": "T4",
    "NVIDIA GeForce RTX 5090": "RTX 5090",
    "AMD Instinct MI300X": "MI300X",
    "AMD Instinct MI250X": "MI250X GCD",  # software sees one die of the module
}


@pytest.mark.parametrize(("name", "platform"), DEVICE_NAMES.items())
def test_the_name_that_a_device_reports_finds_its_product(name, platform):
    assert wiki.find(name, PAGES).platform == platform


def test_limits_are_found_by_the_product_and_cited_from_their_own_page():
    found = tool_json("gpu_specs.py", "lookup", "H200", "shared_memory_per_sm")
    assert found["value"] == 228 and "docs/hardware/limits/sm_90.md:L" in found["citation"]
    assert all(page.limits for page in PAGES)
    assert wiki.find("MI300X", PAGES).known("lds_per_cu").value == 64


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.platform)
def test_a_citation_points_to_the_line_that_holds_the_value(page):
    for row in page.all_rows().values():
        if row.text == "UNKNOWN":
            assert row.citation == f"{row.metric}: UNKNOWN (gpu-wiki not found)"
            continue
        found = CITATION.match(row.citation)
        line = (WIKI / found["page"]).read_text().splitlines()[int(found["line"]) - 1]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[0] == found["metric"] and cells[1] == found["value"]
        assert cells[2] == (found["unit"] or "-")


def test_unknown_values_stay_unknown():
    page = wiki.find("MI308X", PAGES)
    assert page.known("memory_bandwidth") is None
    done = run_tool("gpu_specs.py", "lookup", "MI308X", "memory_bandwidth")
    assert (done.returncode, done.stdout.strip()) == (1, "memory_bandwidth: UNKNOWN (gpu-wiki not found)")
    assert "no page calls" not in done.stderr
    done = run_tool("gpu_specs.py", "lookup", "H200", "smem")
    assert done.returncode == 1 and "no page calls a metric smem" in done.stderr
    assert "shared_memory_per_sm" in done.stderr


@pytest.mark.parametrize("name", ["h200", "NVIDIA H200", "nvidia-h200", "H200 SXM"])
def test_a_name_matches_in_any_spelling(name):
    assert wiki.find(name, PAGES).platform == "H200"


@pytest.mark.parametrize("name", ["H100", "A100", "V100", "GH200", "RTX PRO 6000", "A100 80GB", "MI300"])
def test_an_ambiguous_name_is_asked_back(name):
    with pytest.raises(Refused, match="did you mean"):
        wiki.find(name, PAGES)


def test_an_unknown_name_gets_names_like_it_and_no_stand_in():
    done = run_tool("gpu_specs.py", "show", "RTX 4099")
    assert done.returncode == 1 and "RTX 4090" in done.stderr and not done.stdout
    assert f"gpu_specs.py list prints all {len(PAGES)}" in done.stderr and done.stderr.count(",") <= 3
    with pytest.raises(Refused, match=r"stands in for it; gpu_specs\.py list prints all"):
        wiki.find("Voodoo", PAGES)


def test_lookup_prints_the_contracted_keys():
    found = tool_json("gpu_specs.py", "lookup", "H200", "memory_bandwidth")
    assert found["value"] == 4800 and found["unit"] == "GB/s" and found["source_kind"]
    assert (
        found["citation"] == "memory_bandwidth: 4800 GB/s <- <gpu-wiki>/" + f"docs/hardware/h200.md:L{line_of('4800')}"
    )


def line_of(value: str) -> int:
    lines = (WIKI / "docs/hardware/h200.md").read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if line.startswith(f"| memory_bandwidth | {value} |"))


def test_another_wiki_is_read_when_named(tmp_path):
    (tmp_path / "docs/hardware").mkdir(parents=True)
    page = (WIKI / "docs/hardware/h200.md").read_text().replace("| memory_bandwidth | 4800 ", "| memory_bandwidth | 1 ")
    (tmp_path / "docs/hardware/h200.md").write_text(page)
    for options in ({"env": {"GPU_WIKI": str(tmp_path)}}, {}):
        extra = [] if options else ["--gpu-wiki", tmp_path]
        assert tool_json("gpu_specs.py", "lookup", *extra, "H200", "memory_bandwidth", **options)["value"] == 1
    assert run_tool("gpu_specs.py", "list", "--gpu-wiki", tmp_path / "none").returncode == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda t: t.replace("| sm_count | 132 | SM |", "| sm_count | 132 |"),
        lambda t: t.replace("| tdp |", "| sm_count |"),
        lambda t: t.replace("Aliases: ", "Names: "),
        lambda t: t.replace(wiki.HEADER, "| a | b |"),
    ],
)
def test_a_broken_page_is_refused(damage):
    text = (WIKI / "docs/hardware/h200.md").read_text()
    wiki.parse_page(text, "h200.md")
    with pytest.raises(UsageError):
        wiki.parse_page(damage(text), "h200.md")


def test_a_lookup_is_quick():
    times = []
    for _ in range(5):
        start = time.perf_counter()
        run_tool("gpu_specs.py", "lookup", "H200", "memory_bandwidth")
        times.append(time.perf_counter() - start)
    assert min(times) < 0.3  # a benchmark holds 0.15 s; this only sees a heavy import
