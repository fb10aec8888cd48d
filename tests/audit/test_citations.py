"""The audit of hardware values names planted errors of many kinds and passes clean texts.

`audit/test_audit_corpus.py` has more."""

import dataclasses
import json
import shutil
import time

import pytest
from conftest import BUNDLE, REFERENCE, kernel_text, task, tool_json, with_changes
from kernelopt.audit import claims, pieces, workspace_audit
from kernelopt.audit.citations import CALIBRATION, Piece, Recorded
from kernelopt.errors import UsageError
from kernelopt.gate import readiness
from kernelopt.hardware import wiki
from kernelopt.session import creation, plans, record_store, workspace

ROOT = BUNDLE / "gpu-wiki"
H200 = wiki.find("H200", wiki.pages(ROOT))
MEASURED = frozenset(
    {
        Recorded(2072.9, "GB/s", "bandwidth"),
        Recorded(540.0, "TFLOPS", "compute"),
        Recorded(1980, "MHz", "SM clock"),
        Recorded(2619, "MHz", "memory clock"),
        Recorded(462.0, "W", "power"),
        Recorded(3866.4, "GB/s", "target"),
    }
)
CONTEXT = workspace_audit.make_context(ROOT, "H200", MEASURED)


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
    f"Roughly nine tenths of {BANDWIDTH} are reached: 2072.9 GB/s was a third more in v3",
    f"The copy is at about 93 % of {cite('measured_copy_bandwidth')}.",
    f"documented, may be out of reach: bandwidth_gbps >= 4320 GB/s, 90 % of {BANDWIDTH}",
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
        "the vendor says 2072.9 GB/s",
        "peak 2072.9 GB/s, documented 540 TFLOPS",
        "the boost clock is 1980 MHz",
        "an SM clock of 2619 MHz",
        "the TDP is 462 W",
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


def audited(text: str, used: bool = True, context=CONTEXT):
    return claims.audit([Piece(text, used=used)], context)


def kinds(line: str, context=CONTEXT) -> list[str]:
    return [problem.kind for problem in audited(line, context=context).problems]


@pytest.mark.parametrize("line", CLEAN)
def test_a_clean_line_has_no_problem(line):
    assert audited(line).problems == []


@pytest.mark.parametrize(("kind", "line"), [(kind, line) for kind, lines in PLANTED.items() for line in lines])
def test_a_planted_error_is_found(kind, line):
    assert kind in kinds(line)


@pytest.mark.parametrize(("kind", "line"), [(kind, line) for kind, lines in PLANTED.items() for line in lines])
def test_in_prose_a_written_citation_must_hold_and_nothing_else_holds_a_gate_up(kind, line):
    found = audited(line, used=False)
    written = kind not in ("hedge", "uncited")
    assert (kind in [problem.kind for problem in found.problems]) == written
    assert written or not found.problems


def test_a_record_excuses_a_figure_that_rounds_it_and_no_other():
    assert kinds("2.07 TB/s, 2073 GB/s, 2100 GB/s at best") == ["uncited"]
    assert kinds("540 TFLOPS, 0.54 PFLOPS") == [] and kinds("545 TFLOPS") == ["uncited"]
    assert kinds("bandwidth_gbps >= 3866.4 GB/s") == [] and kinds("it gave 3867 GB/s") == ["uncited"]


def test_a_thousand_records_excuse_no_vendors_figure():
    many = frozenset(Recorded(float(rate), "GB/s", "bandwidth") for rate in range(100, 6000))
    context = dataclasses.replace(CONTEXT, measured=many)
    assert kinds("the kernel does 4100 GB/s", context) == []
    for claim in (
        "the vendor says 4100 GB/s",
        "a peak of 4100 GB/s",
        "4100 GB/s by the datasheet",
        "it does 4800 GB/s",
    ):
        assert kinds(claim, context) == ["uncited"], claim


@pytest.mark.parametrize("used", [True, False])
def test_a_long_text_costs_no_time(used):
    start = time.process_time()
    assert audited("a" * 60_000 + " peak of 989 TFLOPS dense", used).checked == 1
    for text in ("<- " * 9000, "(1 " * 9000, "| 1 " * 9000, "one hundred and " * 2000, "4.8 TB/s " * 1000):
        audited(text, used)
    list(pieces.of_markdown("| 1 " * 20_000 + "\n" + "- " * 20_000 + "`" * 20_000, lambda heading: used))
    assert time.process_time() - start < 8


def test_a_prediction_is_prose_and_another_products_peak_in_it_is_named(tmp_path):
    plan = tmp_path / "plans" / "v1_plan.md"
    plan.parent.mkdir()
    plan.write_text(
        "## Evidence\n\n4000 GB/s\n\n### Profile\n\n4001 GB/s\n```bash\n# 4002 GB/s\n```\n"
        "## Expected effect\n\n4003 GB/s, later the 3350 GB/s peak\n"
    )
    found = workspace_audit.Audit()
    workspace_audit.of_file(plan, CONTEXT, found)
    assert [problem.line for _, problem in found.problems] == [3, 7, 9]
    assert ["H100 SXM" in hint.message for _, hint in found.hints] == [True]


def test_a_prediction_stays_one_in_the_record_that_takes_it_over(tmp_path):
    record = record_store.empty("v1").to_json()
    record["optimization"] |= {"expected_impact": "4000 GB/s; from 8.6 to 5.4 GB", "action_description": "4000 GB/s"}
    record["profile_evidence"]["evidence_summary"] = "4000 GB/s"
    (tmp_path / "v1.json").write_text(json.dumps(record, indent=2))
    found = workspace_audit.Audit()
    workspace_audit.of_file(tmp_path / "v1.json", CONTEXT, found)
    lines = (tmp_path / "v1.json").read_text().splitlines()
    assert ["evidence_summary" in lines[problem.line - 1] for _, problem in found.problems] == [True]


def test_what_the_gate_wrote_is_no_claim(tmp_path):
    record = record_store.empty("v1").to_json()
    record["quality_gate"] = {
        "result": "FAIL",
        "failure_reason": "out of resource: 1024 threads per SM, 700 W, 132 SMs",
    }
    record["device"] = "NVIDIA 132 SMs 700 W"
    (tmp_path / "v1.json").write_text(json.dumps(record, indent=2))
    found = workspace_audit.Audit()
    workspace_audit.of_file(tmp_path / "v1.json", CONTEXT, found)
    assert (found.checked, found.problems, found.hints) == (0, [], [])


def test_without_a_platform_the_value_must_hold_all_the_same():
    context = workspace_audit.make_context(ROOT, None, frozenset())
    assert kinds(cite("memory_bandwidth", "H100 SXM"), context) == []
    assert kinds(BANDWIDTH.replace("4800", "5000"), context) == ["wrong value"]


def calibrated(text: str):
    """CONTEXT with a page of the workspace's own card, a stand-in for what calibrate_gpu.py writes."""
    page = wiki.parse_page(text, CALIBRATION)
    return dataclasses.replace(
        CONTEXT, pages={**CONTEXT.pages, CALIBRATION: page}, documents={**CONTEXT.documents, CALIBRATION: text}
    )


CALIBRATED = f"""# Calibration

Aliases: this card
Architecture: Hopper
Vendor: NVIDIA

{wiki.HEADER}
|---|---|---|---|---|---|
| measured_copy_bandwidth | 2991 | GB/s | [here] | measured | rested |
"""


def test_rows_of_the_workspaces_own_calibration_are_cited_like_the_wikis():
    context = calibrated(CALIBRATED)
    line = context.pages[CALIBRATION].rows["measured_copy_bandwidth"].line
    cited = f"measured_copy_bandwidth: 2991 GB/s <- <workspace>/{CALIBRATION}:L{line}"
    assert audited(f"- {cited}", context=context).problems == [] and audited(cited, context=context).checked == 1
    assert kinds(f"2691.9 GB/s, 90 % of {cited}", context) == []
    assert kinds(cited.replace("2991", "3991"), context) == ["wrong value"]
    moved = audited(cited.replace(f"L{line}", "L3"), context=context).problems
    assert [problem.kind for problem in moved] == ["moved"] and moved[0].fix.right == f"{CALIBRATION}:L{line}"
    assert kinds(cited.replace("<workspace>", "<gpu-wiki>"), context) == ["malformed"]
    assert kinds(cited) == ["no page"]
    assert kinds(f"see <workspace>/{CALIBRATION}:L3 and <workspace>/kernel.py", context) == []
    assert [hint.kind for hint in audited("the copy rate here is 2991 GB/s", False, context).hints] == ["uncited"]
    assert kinds(BANDWIDTH, context) == []


@pytest.fixture(scope="module")
def after_step_0(tmp_path_factory, run_here):
    """A workspace after Step 0, to be copied."""
    folder = tmp_path_factory.mktemp("step_0")
    for name, text in (("kernel.py", kernel_text()), ("reference.py", REFERENCE)):
        (folder / name).write_text(text)
    made = creation.create(folder, "test", folder / "kernel.py", folder / "reference.py", task())
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
    told = {(hint["file"].split("kernel_opt_test/")[1], hint["line"]) for hint in found["hints"]}
    record = (cited.memory / "v0.json").read_text().splitlines()
    at = next(number for number, line in enumerate(record, 1) if "4.8 TB/s" in line)
    assert places == {("plans/v1_plan.md", 3), ("baseline_report.md", 3)} and told == {("memory/v0.json", at)}
    with pytest.raises(UsageError, match=r"2 hardware values .*baseline_report.md:3"):
        readiness.check_citations(readiness.RoundStart.of(cited))


def test_a_plan_that_is_still_the_template_is_a_problem_in_the_gates_words(ready, run_here):
    template = (BUNDLE / "reference" / "plan.md").read_text()
    ready.plan("v2").write_text(template)
    problems = tool_json("check_citations.py", ready.root, code=1, run=run_here)["problems"]
    (problem,) = [one for one in problems if one["file"].endswith("plans/v2_plan.md")]
    line, sentence = template.splitlines()[problem["line"] - 1], problem["message"]
    assert "TBD" in line and sentence == "'## Evidence' still holds a TBD"
    with pytest.raises(UsageError, match=sentence):
        plans.read_plan(ready, "v2", required=True)
    readiness.check_citations(readiness.RoundStart.of(ready))  # it may wait while v1 is judged


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
    lowered = dataclasses.replace(task.targets[0], target=1000.0)
    cited.update_readme(dataclasses.replace(task, targets=(lowered,)), {})
    found = tool_json("check_citations.py", cited.root, code=1, run=run_here)
    assert "target" in {problem["kind"] for problem in found["problems"]}


@pytest.mark.parametrize("change", [{"platform": "H20"}, {"platform": "X9000"}, {"arch": "Ampere"}])
def test_another_platform_in_the_task_block_is_found(cited, change, run_here):
    cited.update_readme(with_changes(cited.task(), **change), {})
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
    message = audited("peak of 1979 TFLOPS with sparsity").problems[0].message
    assert all(f"{name}: 1979" in message for name in ("peak_bf16_tensor_sparse", "peak_fp16_tensor_sparse"))
    assert "write: peak_bf16_tensor: 989.5 TFLOPS <-" in audited("a bf16 peak of 989 TFLOPS").problems[0].message


def test_hints_are_mended_in_markdown_and_never_in_code_or_used_places(cited, run_here):
    notes, kernel = cited.root / "lessons.md", cited.kernel.read_text()
    notes.write_text(
        "# Lessons\n\nThe **132** SMs share 4.8\nTB/s.\n\n| SMs | L2, MB |\n|---|---|\n| 132 | 60 |\n\n"
        "A peak of 1979 TFLOPS or so.\n\n```\nNUM_SMS = 132\n```\n"
    )
    cited.kernel.write_text(kernel + "\nNUM_SMS = 132  # the H200 has 132 SMs\n")
    (cited.root / "plans/v1_plan.md").write_text("## Evidence\n\nIt has 132 SMs.\n")
    found = tool_json("check_citations.py", cited.root, code=1, run=run_here)
    assert [problem["file"].rpartition("/")[2] for problem in found["problems"]] == ["v1_plan.md"]
    assert {hint["kind"] for hint in found["hints"]} == {"uncited", "hard-coded"}
    mended = tool_json("check_citations.py", cited.root, "--fix", code=1, run=run_here)
    assert mended["fixed"] == len(mended["fixes"]) == 4 and mended["problems"] == found["problems"]
    text = notes.read_text()
    assert f"**132** SMs ({SMS}) share 4.8\nTB/s ({BANDWIDTH}).\n" in text
    assert f"| 132 ({SMS}) | 60 ({cite('l2_capacity')}) |" in text and "\nNUM_SMS = 132\n" in text
    assert cited.kernel.read_text() == kernel + "\nNUM_SMS = 132  # the H200 has 132 SMs\n"
    left = tool_json("check_citations.py", cited.root, code=1, run=run_here)["hints"]
    assert left == mended["hints"] and {hint["file"].rpartition("/")[2] for hint in left} == {"lessons.md", "kernel.py"}
    assert (
        len(left) < len(found["hints"]) and tool_json("check_citations.py", notes, "--fix", run=run_here)["fixed"] == 0
    )


def test_hints_alone_hold_no_gate_up(cited, run_here):
    (cited.root / "notes.txt").write_text("132 SMs, 4.8 TB/s")
    found = tool_json("check_citations.py", cited.root, run=run_here)
    assert len(found["hints"]) == 2 and found["problems"] == []
    assert "hint: uncited" in run_here("check_citations.py", cited.root).stdout
    readiness.check_citations(readiness.RoundStart.of(cited))
