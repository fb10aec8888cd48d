"""The wiki's own checks: none complains about the wiki, and each complains about a page that was broken for it."""

import shutil
from pathlib import Path

import pytest
from conftest import BUNDLE, tool_json
from kernelopt.hardware import wiki, wiki_checks

ROOT = BUNDLE / "gpu-wiki"
H200 = "docs/hardware/h200.md"


def test_the_wiki_is_sound():
    found = tool_json("gpu_specs.py", "check")
    assert found["problems"] == [] and found["products"] >= 54


@pytest.fixture
def copy(tmp_path) -> Path:
    return Path(shutil.copytree(ROOT, tmp_path / "wiki"))


def row(metric: str, page: str = H200) -> str:
    return next(line for line in (ROOT / page).read_text().splitlines() if line.startswith(f"| {metric} |"))


def with_cell(metric: str, index: int, text: str) -> tuple[str, str]:
    """(the row, the row with one cell changed): 1 value, 2 unit, 3 source, 4 kind, 5 note."""
    cells = row(metric).split(" | ")
    cells[index] = text if index < 5 else f"{text} |"
    return row(metric), " | ".join(cells)


BROKEN = {
    "a metric is missing": ((row("tdp") + "\n", ""), "tdp is missing"),
    "a misplaced decimal point": (with_cell("memory_bandwidth", 1, "48000"), "outside"),
    "a value that cannot be cited": (with_cell("memory_type", 1, "HBM3e ECC"), "cannot be cited"),
    "a wrong unit": (with_cell("memory_bandwidth", 2, "TB/s"), "is no unit"),
    "no source": (with_cell("tdp", 3, "-"), "names no source"),
    "a source that is not listed": (with_cell("tdp", 3, "[hearsay]"), "[hearsay] is not listed"),
    "an unknown kind": (with_cell("tdp", 4, "folklore"), "is no kind of source"),
    "UNKNOWN with a source": (with_cell("tdp", 1, "UNKNOWN"), "must have no source"),
    "sparse sold as dense": (with_cell("peak_bf16_tensor", 1, "1979"), "peak_bf16_tensor_sparse is not twice"),
    "a bandwidth that the bus cannot give": (with_cell("memory_bandwidth", 1, "4000"), "memory_clock x 2"),
    "a peak that the lanes cannot give": (with_cell("peak_fp32", 1, "60"), "fp32_lanes_per_sm x 2 x boost_clock"),
    "no limits page": (with_cell("compute_capability", 1, "9.9"), "there is no page limits/sm_99.md"),
    "a limit on the product's page": (
        (row("tdp"), row("tdp") + "\n" + row("warp_size", "docs/hardware/limits/sm_90.md")),
        "warp_size is also on",
    ),
    "a source that is not used": (
        ("## Sources\n", "## Sources\n\n- [extra]: a thing.\n"),
        "[extra] is listed and never used",
    ),
    "limits that do not name the product": (("# H200\n", "# H200Z\n"), "its first lines do not name H200Z"),
    "a name of another product": (("Aliases: ", "Aliases: H20; "), "'h20' is a name of"),
    "a unit that the name rules out": (
        with_cell("l2_capacity", 2, "GB"),
        "l2_capacity is in GB; its unit must be MB",
    ),
    "a highest bandwidth below the one in use": (
        (
            row("tdp"),
            row("tdp") + "\n" + "| memory_bandwidth_highest | 4000 | GB/s | [h200-query] | device query | - |",
        ),
        "memory_bandwidth_highest is not above",
    ),
    "a highest bandwidth in another unit": (
        (row("tdp"), row("tdp") + "\n" + "| memory_bandwidth_highest | 5000 | MB | [h200-query] | device query | - |"),
        "its unit must be GB/s",
    ),
    "a sustained rate in another unit": (
        with_cell("measured_bf16_tensor_ceiling_sustained", 2, "TOPS"),
        "measured_bf16_tensor_ceiling_sustained is in TOPS; its unit must be TFLOPS",
    ),
    "fp16 accumulation above twice the rate": (
        (
            row("tdp"),
            row("tdp")
            + "\n"
            + "| peak_fp16_tensor_fp16_accumulate | 3000 | TFLOPS | [h200-query] | device query | - |",
        ),
        "is not one to two times peak_fp16_tensor",
    ),
    "a dead link": (("## Notes\n", "## Notes\n\n[x](gone.md)\n"), "link gone.md does not exist"),
}


def broken(copy: Path, case: str) -> str:
    """What is said of the copy of the wiki, once a page of it is broken as BROKEN says."""
    (old, new), message = BROKEN[case]
    text = (copy / H200).read_text()
    assert old in text
    (copy / H200).write_text(text.replace(old, new, 1))
    return message


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_page_is_found(copy, case):
    message = broken(copy, case)
    found = wiki_checks.problems(copy)
    assert any(message in problem for problem in found), found


@pytest.mark.parametrize(
    ("page", "limit"),
    [
        ("sm_90", "subpartitions_per_sm"),
        ("sm_90", "fp32_lanes_per_sm"),
        ("gfx942", "threads_per_workgroup"),
        ("gfx942", "sgpr_allocation_unit"),
        ("gfx1100", "workgroups_per_wgp"),
    ],
)
def test_what_occupancy_and_peaks_rest_on_is_a_row_of_every_page_of_limits(copy, page, limit):
    name = f"docs/hardware/limits/{page}.md"
    (copy / name).write_text((ROOT / name).read_text().replace(row(limit, name) + "\n", ""))
    assert f"{name}: {limit} is missing" in wiki_checks.problems(copy)


def test_the_tool_prints_each_problem_and_ends_with_1(copy, run_here):
    message = broken(copy, "no source")
    done = run_here("gpu_specs.py", "check", "--gpu-wiki", copy)
    assert done.returncode == 1 and message in done.stdout
    assert all(problem in done.stdout for problem in wiki_checks.problems(copy))


def test_a_page_that_the_index_leaves_out_is_found(copy):
    (copy / "README.md").write_text((copy / "README.md").read_text().replace("docs/hardware/h200.md", ""))
    assert "README.md does not link docs/hardware/h200.md" in wiki_checks.problems(copy)


def test_an_empty_wiki_is_not_sound(tmp_path, run_here):
    (tmp_path / "docs/hardware").mkdir(parents=True)
    (tmp_path / "README.md").write_text("")
    assert run_here("gpu_specs.py", "check", "--gpu-wiki", tmp_path).returncode == 1


def test_a_device_that_says_something_else_than_its_page_is_told():
    page = wiki.find("H200", wiki.pages(ROOT))
    said = {"compute_capability": "9.0", "sm_count": 132, "l2_capacity": 60.0, "boost_clock": 1980, "tdp": 700.0}
    said |= {"memory_capacity": 143771 / 1024, "memory_clock": 3201, "memory_bus_width": 6016, "colour": 7}
    assert wiki.disagreements(page, said) == []
    nvl = {**said, "tdp": 600.0, "sm_count": 131, "compute_capability": "9.9"}
    assert {found.metric for found in wiki.disagreements(page, nvl)} == {"tdp", "sm_count", "compute_capability"}
