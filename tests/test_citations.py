"""The audit of hardware values: planted errors of many kinds are found, and clean texts pass."""

import json
import shutil
import time

import pytest
from conftest import BUNDLE, REFERENCE, kernel_text, task, tool_json
from kernelopt import audit, citations, rounds, wiki, workspace
from kernelopt.errors import UsageError

ROOT = BUNDLE / "gpu-wiki"
H200 = wiki.find("H200", wiki.pages(ROOT))
MEASURED = frozenset({(2072.9, "GB/s"), (540.0, "TFLOPS"), (1980, "MHz"), (462.0, "W"), (3866.4, "GB/s")})
CONTEXT = audit.make_context(ROOT, "H200", MEASURED)


def cite(metric: str, platform: str = "H200") -> str:
    return wiki.find(platform, wiki.pages(ROOT)).row(metric).citation


BANDWIDTH, SMS, BF16 = cite("memory_bandwidth"), cite("sm_count"), cite("peak_bf16_tensor")
LINE = H200.row("memory_bandwidth").line

CLEAN = [
    f"- {BANDWIDTH}",
    f"`{BANDWIDTH}`",
    f"The copy roof is {cite('measured_copy_bandwidth')}, and {SMS}.",
    BANDWIDTH.replace("4800 GB/s", "4.8 TB/s"),
    BANDWIDTH.replace("4800 GB/s", "4,800 GB/s"),
    BANDWIDTH.replace(f":L{LINE}", f":{LINE}"),
    BANDWIDTH.replace("<gpu-wiki>", "/tmp/gpu-wiki"),
    BF16.replace("989.5 TFLOPS", "0.9895 PFLOPS"),
    cite("boost_clock").replace("1980 MHz", "1.98 GHz"),
    cite("memory_type"),
    cite("compute_capability"),
    cite("shared_memory_per_sm"),
    cite("peak_fp4_tensor"),
    f"4.8 TB/s ({BANDWIDTH}) bounds it",
    "int9_peak: UNKNOWN (gpu-wiki not found)",
    "achieved 2073 GB/s, 2.07 TB/s that is, 540 TFLOPS",
    "default: bandwidth_gbps >= 3866.4 GB/s, 90% of " + cite("measured_copy_bandwidth"),
    "SM clock 1980 MHz, power 462 W",
    "see <gpu-wiki>/docs/optimization/memory-traffic.md:L3 about traffic",
    "latency 518.0 us; 64 KB of shared memory per block, 168 registers per thread, 33 GB read",
    "dram_throughput = 84.4 %, 16 of 32 bytes per sector, 1.99x the least bytes",
    "run: check_citations.py W; num_warps=8, BLOCK=4096, about 40 % less time",
    "matmul 4096x4096 in bf16, 3 W-shaped tiles, fp16 and sm_90",
    "tflops: 0, bandwidth_gbps: 2072.9, ridge point 158.3 FLOP/byte, floor 249.94 us",
    "memory_bandwidth: 4800 GB/s <- <gpu-wiki>/docs/hardware/h200.md:Notes",
    "registers_per_thread = 168, waves 3.2, 8 warps a block, 2 blocks per SM at most by registers: counted",
]

PLANTED = {
    "wrong value": [
        BANDWIDTH.replace("4800", "4900"),
        BANDWIDTH.replace("4800 GB/s", "4.9 TB/s"),
        BANDWIDTH.replace("4800", "4800.5"),
        BF16.replace("989.5", "1979"),  # the sparse peak sold as dense
        SMS.replace("132", "144"),
        cite("memory_type").replace("HBM3e", "HBM3"),
        "peak_fp4_tensor: 4000 TFLOPS <- " + cite("peak_fp8_tensor").split("<- ")[1],
        BANDWIDTH.replace("4800", "fast"),
    ],
    "wrong unit": [
        BANDWIDTH.replace("GB/s", "TB/s").replace("4800", "4.8").replace("TB/s", "TFLOPS"),
        BANDWIDTH.replace(" GB/s", ""),
        cite("compute_capability").replace("9.0", "9.0 GHz"),
    ],
    "moved": [BANDWIDTH.replace(f"L{LINE}", f"L{LINE + 1}"), BANDWIDTH.replace(f"L{LINE}", "L9999")],
    "no page": [
        BANDWIDTH.replace("h200.md", "h300.md"),
        "see <gpu-wiki>/docs/optimization/no-such-page.md",
        "see <gpu-wiki>/docs/optimization/memory-traffic.md:L5000",
    ],
    "no metric": [BANDWIDTH.replace("memory_bandwidth", "bandwidth"), BANDWIDTH.replace("memory_bandwidth", "hbm_bw")],
    "no value": [f"memory_bandwidth: 4800 GB/s <- <gpu-wiki>/docs/optimization/memory-traffic.md:L{LINE}"],
    "foreign": [
        cite("memory_bandwidth", "H100 SXM"),
        cite("sm_count", "A100 SXM 80GB"),
        cite("memory_bandwidth", "MI300X"),
    ],
    "no section": ["memory_bandwidth: 4800 GB/s <- <gpu-wiki>/docs/hardware/h200.md:Prices"],
    "known": ["memory_bandwidth: UNKNOWN (gpu-wiki not found)"],
    "malformed": [
        BANDWIDTH.replace(f":L{LINE}", ""),
        "memory_bandwidth 4800 GB/s <- <gpu-wiki>/docs/hardware/h200.md",
        "memory_bandwidth: UNKNOWN (gpu-wiki says nothing)",
        BANDWIDTH.replace("<gpu-wiki>", "https://example.org/wiki"),
    ],
    "hedge": [
        f"approximately {BANDWIDTH}",
        f"The bandwidth should be {BANDWIDTH}",
        f"about 4.8 TB/s, {BANDWIDTH}",
        f"similar to the H100: {SMS}",
        f"{BANDWIDTH} or so",
        "~4.8 TB/s of bandwidth",
    ],
    "uncited": [
        "The H200 moves 4.8 TB/s.",
        "It has 132 SMs",
        "peak of 989 TFLOPS dense",
        "1,979 TFLOPS with fp8",
        "an L2 of 60 MB holds it",
        "60 MB L2",
        "141 GB of HBM3e",
        "each SM holds 2048 threads per SM",
        "65536 registers per SM",
        "the clock is 1830 MHz, or 1.83 GHz",
        "a 700 W part",
        "304 CUs on the other card",
        "3.35TB/s as the H100",
        "achieved 4800 GB/s",
        f"peak 3350 GB/s, {BANDWIDTH}",
        "900GB/s over NVLink",
        "4.8 terabytes per second",
        "4800 gb/s, 989 Tflops",
        "memory_bandwidth: 4800",
        "`sm_count` = 132",
        "with an SM count of 132",
        "a warp size of 64",
    ],
}


def kinds(line: str, context=CONTEXT, prediction: bool = False) -> list[str]:
    return [problem.kind for problem in citations.audit(line, context, prediction)[1]]


@pytest.mark.parametrize("line", CLEAN)
def test_a_clean_line_has_no_problem(line):
    assert citations.audit(line, CONTEXT)[1] == []


@pytest.mark.parametrize(("kind", "line"), [(kind, line) for kind, lines in PLANTED.items() for line in lines])
def test_a_planted_error_is_found(kind, line):
    assert kind in kinds(line)


def test_a_long_word_costs_no_time():
    start = time.process_time()
    assert kinds("a" * 60_000 + " peak of 989 TFLOPS dense") == ["uncited"]
    assert time.process_time() - start < 1


def test_a_prediction_may_name_rates_but_not_the_hardware():
    assert kinds("bandwidth rises to 4000 GB/s, about twice", prediction=True) == []
    assert "uncited" in kinds("bandwidth rises to the 4800 GB/s of the card", prediction=True)
    assert "uncited" in kinds("bandwidth rises to 4000 GB/s")


def test_a_prediction_stays_one_in_the_record_that_takes_it_over(tmp_path):
    written = {"expected_impact": "4000 GB/s; from 8.6 to 5.4 GB, L2 is idle", "action_description": "4000 GB/s"}
    (tmp_path / "v1.json").write_text(json.dumps({"optimization": written}, indent=2))
    found = audit.Audit()
    audit.of_file(tmp_path / "v1.json", CONTEXT, found)
    assert [problem.line for _, problem in found.problems] == [4]


def test_without_a_platform_the_value_must_hold_all_the_same():
    context = audit.make_context(ROOT, None, frozenset())
    assert kinds(cite("memory_bandwidth", "H100 SXM"), context) == []
    assert kinds(BANDWIDTH.replace("4800", "5000"), context) == ["wrong value"]


@pytest.fixture(scope="module")
def after_step_0(tmp_path_factory, run_here):
    """A workspace after Step 0, to be copied."""
    folder = tmp_path_factory.mktemp("step_0")
    for name, text in (("kernel.py", kernel_text()), ("reference.py", REFERENCE)):
        (folder / name).write_text(text)
    made = workspace.create(folder, "test", folder / "kernel.py", folder / "reference.py", task())
    tool_json("estimate_work.py", "--workspace", made.root, run=run_here)
    tool_json("compute_utilization.py", "--workspace", made.root, "--set-targets", run=run_here)
    return made.root


@pytest.fixture
def cited(after_step_0, tmp_path):
    return workspace.Workspace(shutil.copytree(after_step_0, tmp_path / after_step_0.name))


def test_what_step_0_writes_is_clean(cited, run_here):
    found = tool_json("check_citations.py", cited.root, run=run_here)
    assert found["checked"] >= 6 and found["problems"] == []


def test_nothing_to_check_is_no_pass(session, tmp_path, run_here):
    done = run_here("check_citations.py", session.root)
    assert done.returncode == 1 and "nothing was checked" in done.stderr
    (tmp_path / "empty.md").write_text("no figure here")
    assert run_here("check_citations.py", tmp_path / "empty.md").returncode == 1


def test_problems_are_found_in_every_file_with_their_line(cited, run_here):
    (cited.root / "plans/v1_plan.md").write_text(
        "# Plan\n## Evidence\nthe card has 132 SMs\n## Expected effect\n3900 GB/s\n"
    )
    (cited.root / "baseline_report.md").write_text("fine\n\nan L2 of 60 MB\n")
    tool_json("memory_manager.py", "create", "--workspace", cited.root, "--version", "v0", run=run_here)
    lesson = (
        '[{"error_type": "x", "error_message": "-", "root_cause": "only 4.8 TB/s", "fix_applied": "-", "lesson": "-"}]'
    )
    tool_json(
        "memory_manager.py",
        "update",
        "--workspace",
        cited.root,
        "--version",
        "v0",
        "--set",
        f"pitfalls_and_fixes={lesson}",
        run=run_here,
    )
    found = tool_json("check_citations.py", cited.root, code=1, run=run_here)
    places = {(problem["file"].split("kernel_opt_test/")[1], problem["line"]) for problem in found["problems"]}
    record = (cited.memory / "v0.json").read_text().splitlines()
    at = next(number for number, line in enumerate(record, 1) if "4.8 TB/s" in line)
    assert places == {("plans/v1_plan.md", 3), ("baseline_report.md", 3), ("memory/v0.json", at)}
    with pytest.raises(UsageError, match=r"3 hardware values .*baseline_report.md:3"):
        rounds.check_citations(cited)


def test_the_gate_refuses_before_it_measures(cited, run_here):
    text = cited.readme.read_text()
    cited.readme.write_text(text.replace("4800 GB/s", "5200 GB/s"))
    done = run_here("run_gate.py", "--workspace", cited.root, "--version", "v0")
    assert done.returncode == 2 and "not cited rightly" in done.stderr and "4800" in done.stderr
    assert not list(cited.memory.glob("*.json"))


def test_a_moved_line_is_put_right_and_a_wrong_value_is_left(cited, run_here):
    text = cited.readme.read_text()
    cited.readme.write_text(text.replace(f"h200.md:L{LINE}", f"h200.md:L{LINE + 3}").replace(SMS, ""))
    (cited.root / "plans/v1_plan.md").write_text(SMS.replace("132", "99"))
    assert tool_json("check_citations.py", cited.root, code=1, run=run_here)["fixed"] == 0
    found = tool_json("check_citations.py", cited.root, "--fix", code=1, run=run_here)
    assert found["fixed"] >= 1 and [problem["kind"] for problem in found["problems"]] == ["wrong value"]
    assert cited.readme.read_text() == text.replace(SMS, "")
    (cited.root / "plans/v1_plan.md").unlink()
    assert tool_json("check_citations.py", cited.root, run=run_here)["problems"] == []


def test_a_target_that_was_lowered_by_hand_is_found(cited, run_here):
    task = cited.task()
    task["targets"][0]["target"] = 1000.0
    cited.update_readme(task, {})
    found = tool_json("check_citations.py", cited.root, code=1, run=run_here)
    assert "target" in {problem["kind"] for problem in found["problems"]}


@pytest.mark.parametrize("change", [{"platform": "H20"}, {"platform": "X9000"}, {"arch": "Ampere"}])
def test_another_platform_in_the_task_block_is_found(cited, change, run_here):
    cited.update_readme({**cited.task(), **change}, {})
    found = tool_json("check_citations.py", cited.root, code=1, run=run_here)
    assert {problem["kind"] for problem in found["problems"]} & {"foreign", "platform"}


def test_files_are_audited_for_the_platform_that_is_named(tmp_path, run_here):
    (tmp_path / "report.md").write_text(f"- {BANDWIDTH}\n")
    assert tool_json("check_citations.py", tmp_path / "report.md", run=run_here)["checked"] == 1
    found = tool_json("check_citations.py", tmp_path / "report.md", "--platform", "H20", code=1, run=run_here)
    assert [problem["kind"] for problem in found["problems"]] == ["foreign"]
    assert run_here("check_citations.py", tmp_path / "none.md").returncode == 2
    assert run_here("check_citations.py", tmp_path / "report.md", "--platform", "X9").returncode == 2


def test_the_shipped_example_is_clean(run_here):
    assert tool_json("check_citations.py", BUNDLE / "examples" / "row_softmax" / "h200", run=run_here)["problems"] == []


def test_all_rows_that_a_figure_may_be_meant_as_are_proposed():
    _, problems = citations.audit("peak of 989 TFLOPS", CONTEXT)
    assert all(f"{name}: 989" in problems[0].message for name in ("peak_bf16_tensor", "peak_tf32_tensor_sparse"))
