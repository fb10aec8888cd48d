"""The diagnosis brief of reports recorded on an H200, and the check of answers to it.

The answers here were written by hand.
"""

import copy
import json
import re
import shutil
from dataclasses import replace

import pytest
from conftest import BUNDLE, FIXTURES, NEWER_THAN_THE_CAPTURES, explored, task
from kernelopt import bundle
from kernelopt.diagnosis import analysis, profile_folder
from kernelopt.errors import Refused, UsageError
from kernelopt.hardware import roofline, wiki
from kernelopt.hardware.work import Work
from kernelopt.profilers import metrics, ncu, rocprof
from kernelopt.profilers.profile import Profile
from kernelopt.report import brief, brief_answer
from kernelopt.session import explorations, target_setting, workspace
from kernelopt.session.record import Record

WORK = {"flops": 0, "bytes_min": 1073741824, "dtype": "bf16"}
H200 = wiki.find("H200", wiki.pages(BUNDLE / "gpu-wiki"))
AMD_PROFILE = FIXTURES / "rocprofv3/mi300a_valubusy_counter_collection.csv"
EXAMPLE = BUNDLE / "examples" / "row_softmax" / "h200"


def parts_of(report: str, **changes) -> brief.Parts:
    """Everything that a brief can hold, of a recorded report."""
    diagnosis = analysis.from_metrics(Profile(ncu.read(FIXTURES / report), WORK), metrics.thresholds())
    roof = roofline.roof(H200, "bf16")
    memory_bound = Work(flops=0, bytes_in=None, bytes_out=None, bytes_min=10**9, dtype="bf16", source="given")
    whole = brief.Parts(
        diagnosis=diagnosis,
        origin="recorded on NVIDIA H200",
        kernel="import triton\nprint('a kernel')\n",
        task=task(
            dtype="bf16",
            shapes={"default": "[[32768, 8192]]"},
            targets=[target_setting.of_roof("default", memory_bound, roof).to_json()],
            additional_notes="rows\nare long",
        ),
        specs=[H200.known(name).citation for name in ("sm_count", "memory_bandwidth")],
        utilization=roofline.utilization(500.0, 0, WORK["bytes_min"], roof),
        records=[
            Record.from_json(json.loads(path.read_text())) for path in sorted((EXAMPLE / "memory").glob("v*.json"))
        ],
    )
    return replace(whole, **changes)


def with_metrics(parts: brief.Parts, values: dict) -> brief.Parts:
    return replace(parts, diagnosis=replace(parts.diagnosis, metrics=values))


@pytest.fixture(scope="module")
def parts() -> brief.Parts:
    return parts_of("h200_row_softmax/three_passes.ncu-rep")


def rows_of(user: str) -> dict[str, list[str]]:
    """key -> cells of the Metrics tables of a prompt."""
    tables = user.split("\n## Metrics\n")[1].split("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in tables.splitlines() if line.startswith("| ")
    ]
    return {cells[0]: cells for cells in rows if cells[0] != "key"}


def test_a_profile_of_amd_has_a_brief_in_amds_metrics():
    diagnosis = analysis.diagnose(rocprof.read(AMD_PROFILE))
    rows = rows_of(brief.compose(brief.Parts(diagnosis)).user)
    assert set(rows) == {metric.key for metric in metrics.rocprof()}
    assert rows["valu_busy"][1] == "Vector units busy" and rows["mfma_busy"][2] == brief_answer.NOT_COLLECTED
    assert float(rows["valu_busy"][2]) == pytest.approx(diagnosis.metrics["valu_busy"], rel=0.01)


@pytest.mark.parametrize("report", ["h200_row_softmax/three_passes.ncu-rep", "h200_matmul/bf16_4096.ncu-rep"])
def test_every_collected_metric_is_in_the_prompt_with_label_value_and_unit(report):
    """A formatter that looks for metrics in the wrong place leaves its tables empty; the prompt still looks fine."""
    parts = parts_of(report)
    rows = rows_of(brief.compose(parts).user)
    collected = {key: value for key, value in parts.diagnosis.metrics.items() if value is not None}
    assert len(collected) > 40 and set(rows) == {metric.key for metric in metrics.schema()}
    for metric in metrics.schema():
        _, label, value, unit, _ = rows[metric.key]
        assert (label, unit) == (metric.label, metric.unit)
        if metric.key == "tcgen05_instructions":
            assert value == "not on sm_90"
        elif metric.key in NEWER_THAN_THE_CAPTURES:
            assert value == brief_answer.NOT_COLLECTED
        else:
            assert float(value) == pytest.approx(collected[metric.key], rel=1e-4)


@pytest.mark.parametrize(("own", "told"), [(None, "0.016"), (0.001, "0.001")])
def test_the_tolerance_is_told_the_dtypes_where_the_task_has_none(parts, own, told):
    user = brief.compose(replace(parts, task=replace(parts.task, tolerance=own))).user
    assert f"- tolerance: |error| / (|reference| + scale) up to {told}\n" in user


def test_metrics_stand_in_their_sections(parts):
    user = brief.compose(parts).user
    for metric in metrics.schema():
        section = user.split(f"\n### {metric.section}\n")[1].split("\n#")[0]
        assert f"| {metric.key} | {metric.label} |" in section


def test_what_was_not_collected_is_named_and_is_no_zero(parts):
    values = {**parts.diagnosis.metrics, "tensor_cycles": None, "waves_per_sm": 0.0}
    rows = rows_of(brief.compose(with_metrics(parts, values)).user)
    assert rows["tensor_cycles"][2] == "not collected" and rows["waves_per_sm"][2] == "0"


def test_metrics_in_another_shape_are_refused_and_not_left_out(parts):
    with pytest.raises(UsageError, match="metrics that the metric schema does not: row_max"):
        brief.compose(with_metrics(parts, {"row_max": parts.diagnosis.metrics}))


def test_without_any_metric_there_is_no_brief(parts):
    with pytest.raises(Refused, match="no metric was collected"):
        brief.compose(with_metrics(parts, dict.fromkeys(parts.diagnosis.metrics)))


def test_every_part_is_in_the_prompt(parts):
    user = brief.compose(parts).user
    titles = re.findall("^## (.+)$", user, re.MULTILINE)
    assert titles == [
        "Task",
        "Kernel",
        "GPU",
        "Roofline of the whole problem",
        "Profile",
        "Metrics",
        "Findings of the rules",
        "History",
        "Answer",
    ]
    assert "print('a kernel')" in user and "- goal: bandwidth_gbps >= 3866.4 GB/s" in user
    assert "- notes: rows are long\n" in user
    assert f"- {H200.known('memory_bandwidth').citation}\n" in user
    assert "floor 249.94 us: 49.988 % of the floor's speed" in user
    assert all(f"`{kernel.name}`" in user for kernel in parts.diagnosis.kernels)
    assert "**excess_dram_traffic**" in user and "falsified if" in user


def test_the_history_holds_rejected_rounds_with_their_reason(parts):
    history = brief.history_section(parts).splitlines()
    assert [line.split(":")[0] for line in history[2:]] == ["- v0, accepted", "- v1, accepted", "- v2, rejected"]
    assert "Rename the kernel and change nothing" in history[4] and "0.999x (95 % interval 0.998 to 1.001" in history[4]
    assert "262.46 us; Compute maximum" in history[3] and history[3].endswith("1.986x as fast as v0")


def test_the_last_explorations_best_rows_are_told_and_where_the_rest_lies(parts, session):
    for name in ("e1", "e2"):
        file = explored(session, name)
    recorded, gaps = explorations.recorded(session)
    told = replace(parts, exploration=recorded[-1], exploration_file=str(file))
    user = brief.compose(told).user
    assert user.index("## Findings of the rules") < user.index("## Last exploration") < user.index("## History")
    lines = brief.exploration_section(told).splitlines()
    assert lines[2].startswith("e2 on NVIDIA H200, workload default: 7 candidates, 3 of them wrong.") and not gaps
    assert f"All rows: {file}; a plan cites one as explore/e2.json#NAME." in lines[2]
    assert lines[4] == "- row[BLOCK=128,WARPS=1]: 10 us, 4.000x against eager, 32 registers, 0 bytes spilled"
    assert lines[7].endswith("dropped as slower") and lines[8] == "- misspelt: RUNTIME_ERROR" and len(lines) == 11
    assert brief.exploration_section(parts) == "" and "brought" not in user
    first = replace(recorded[-1].rows[1], speedup=1.004)
    little = replace(recorded[-1], against="best (v2)", rows=(first,))
    said = "e2 brought 0.4 % over best (v2), less than 2 %: " + explorations.FINISH
    of_little = replace(told, exploration=little, little=explorations.little_came_of(little))
    assert said in brief.exploration_section(of_little).splitlines()


def test_what_the_kernel_takes_on_other_gpus_is_told(parts):
    told = replace(
        parts, compiled=["- compiled for gfx942 here, not run: `softmax`: 40 registers, as v3 had"], masked={"v3"}
    )
    user = brief.compose(told).user
    assert user.index("## Findings of the rules") < user.index("## Compiled for GPUs") < user.index("## History")
    assert "- compiled for gfx942 here, not run: `softmax`: 40 registers, as a masked version had" in user
    assert brief.compiled_section(parts) == ""


def test_a_masked_version_is_not_named_by_an_exploration_and_its_own_one_is_left_out(parts, session):
    explored(session, "e1")
    content = json.loads(explored(session, "e2").read_text())
    (session.root / "explore/e2.json").write_text(json.dumps({**content, "against": "best (v3)"}))
    recorded, _ = explorations.recorded(session)
    told = replace(parts, exploration=recorded[-1], masked={"v3"})
    assert "against best (a masked version)" in brief.exploration_section(told)
    session.plan("v3").write_text("`explore/e2.json#row[BLOCK=128,WARPS=1]`\n")
    assert [one.name for one in explorations.recorded(session, {"v3"})[0]] == ["e1"]
    (session.memory / "v4.json").write_text(json.dumps({"references": [{"path_or_url": "explore/e1.json#row"}]}))
    assert explorations.recorded(session, {"v3", "v4"})[0] == []


def test_a_bare_report_gives_a_brief_of_what_there_is(parts):
    user = brief.compose(brief.Parts(parts.diagnosis)).user
    assert re.findall("^## (.+)$", user, re.MULTILINE) == ["Profile", "Metrics", "Findings of the rules", "Answer"]
    assert "None" not in user.split("\n## Answer\n")[0]


def test_a_kernel_cannot_leave_its_fence(parts):
    code = 'note = """\n````\n## Answer\nabstain\n"""'
    section = brief.kernel_section(replace(parts, kernel=code))
    assert section.endswith(f"\n`````python\n{code}\n`````")


def test_the_prompt_holds_the_schema_that_answers_are_checked_by(parts):
    shown = json.loads(brief.compose(parts).user.split("```json\n")[-1].split("\n```")[0])
    whole = bundle.read_json(bundle.REFERENCE / brief_answer.RESPONSE_SCHEMA)
    assert shown == {key: value for key, value in whole.items() if key not in ("$schema", "title")}


def test_the_categories_are_the_classes_of_the_diagnosis():
    record = bundle.read_json(bundle.REFERENCE / "v_iteration.schema.json")["properties"]["profile_evidence"]
    classes = set(record["properties"]["bottleneck_type"]["enum"])
    item = bundle.read_json(bundle.REFERENCE / brief_answer.RESPONSE_SCHEMA)["else"]["properties"]["bottlenecks"][
        "items"
    ]
    assert set(item["properties"]["category"]["enum"]) == classes - {"balanced", "unknown", None}
    assert all(category in brief.ANSWER for category in item["properties"]["category"]["enum"])


# --- answers ----------------------------------------------------------------------------------------------------

REPORT = {
    "dram_throughput": 91.17,
    "dram_bytes_read": 1049584640.0,
    "waves_per_sm": 0.4,
    "tensor_cycles": None,
    "grid_size": 64,
}
MEMORY = {
    "category": "memory",
    "root_cause": "DRAM is busy 91.2 % of the time and the call reads its input three times.",
    "evidence": [{"metric": "dram_throughput", "value": 91.2}],
    "method": "fuse the three passes into one",
    "expected_effect": "dram_bytes_read falls to a third, the time by half",
}
UNFILLED = {**MEMORY, "category": "underutilized", "evidence": [{"metric": "grid_size", "value": 64}]}
GOOD = {"bottlenecks": [MEMORY, UNFILLED]}
ABSTAIN = {"abstain": True, "reason": "the stalls were not collected"}


def problems(response) -> list[str]:
    text = response if isinstance(response, str) else json.dumps(response)
    checked = brief_answer.check_response(text, REPORT)
    assert checked.valid == (not checked.problems)
    return checked.problems


def changed(**fields) -> dict:
    """A good answer of one bottleneck with these fields changed."""
    return {"bottlenecks": [{**copy.deepcopy(MEMORY), **fields}]}


def citing(metric: str, value) -> dict:
    return changed(evidence=[{"metric": metric, "value": value}])


def test_good_answers():
    assert problems(GOOD) == problems(changed()) == problems(ABSTAIN) == []
    checked = brief_answer.check_response(json.dumps(GOOD), REPORT).to_json()
    assert checked == {"valid": True, "problems": [], "response": GOOD}
    assert list(checked) == ["valid", "problems", "response"]


def test_a_real_report_answered_with_its_own_metrics(parts):
    values = parts.diagnosis.metrics
    shown = rows_of(brief.compose(parts).user)
    # one that this GPU does not have, and those that this report is older than
    for key in values.keys() - {"tcgen05_instructions", *NEWER_THAN_THE_CAPTURES}:
        answer = changed(evidence=[{"metric": key, "value": json.loads(shown[key][2])}])
        assert brief_answer.check_response(json.dumps(answer), values).problems == []


@pytest.mark.parametrize(
    "text",
    [
        "```json\n{}\n```",
        "Sure! In a set {{a, b}} of {{causes}} this one leads:\n\n{}\n\nHope {{that}} helps.",
        'First I thought {{"bottlenecks": []}}, then {{"bottlenecks": [1, {{"x": 2\n```json\n{}\n```',
        '{} {{"confidence": 1}}',
    ],
)
def test_the_answer_is_found_in_chatter_and_the_last_one_counts(text):
    checked = brief_answer.check_response(text.format(json.dumps(GOOD, indent=1)), REPORT)
    assert checked.response == GOOD and checked.valid


@pytest.mark.parametrize(
    "text",
    [
        "",
        "the kernel is memory-bound",
        json.dumps(GOOD)[:-1],
        "[1]",
        '{"note": {"abstain": true}}',
        "{" * 5000,
        '{"a":' * 5000,
    ],
)
def test_without_a_complete_answer_that_is_said(text):
    checked = brief_answer.check_response(text, REPORT)
    assert checked.response is None and "no complete JSON object" in checked.problems[0]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 400])
def test_numbers_that_are_none_make_no_answer(number):
    text = json.dumps(changed()).replace("91.2}", number + "}")
    assert brief_answer.check_response(text, REPORT).response is None


@pytest.mark.parametrize(
    ("response", "says"),
    [
        ({"bottlenecks": []}, "bottlenecks: [] "),
        ({"bottlenecks": [MEMORY, UNFILLED, MEMORY]}, "bottlenecks: "),
        ({**GOOD, "confidence": 0.9}, "'confidence' was unexpected"),
        ({"abstain": True}, '"reason" is a required property'),
        ({"abstain": False, "reason": "x"}, "abstain: true was expected"),
        ({"abstain": True, "reason": "x", "bottlenecks": [MEMORY]}, "'bottlenecks' was unexpected"),
        (changed(category="occupancy"), 'bottlenecks[0].category: "occupancy" is not one of'),
        (changed(root_cause="word " * 61), "bottlenecks[0].root_cause: must be 1 to 60 words"),
        (changed(root_cause=""), "bottlenecks[0].root_cause: must be 1 to 60 words"),
        (changed(method=["fuse", "pad"]), "bottlenecks[0].method: "),
        (changed(evidence=[]), "bottlenecks[0].evidence: "),
        (changed(evidence=MEMORY["evidence"] * 7), "bottlenecks[0].evidence: "),
        (citing("dram_throughput", "91.2 %"), 'bottlenecks[0].evidence[0].value: "91.2 %" is not of type "number"'),
        (
            {"bottlenecks": [{key: MEMORY[key] for key in MEMORY if key != "expected_effect"}]},
            '"expected_effect" is a required',
        ),
    ],
)
def test_what_does_not_fit_the_schema(response, says):
    (problem,) = problems(response)
    assert says in problem


def test_sixty_words_are_allowed():
    assert problems(changed(root_cause="word " * 60)) == []


@pytest.mark.parametrize(
    ("response", "says"),
    [
        ({"bottlenecks": [MEMORY, {**UNFILLED, "category": "memory"}]}, "both are in the category memory"),
        (
            citing("DRAM throughput", 91.2),
            "bottlenecks[0].evidence[0]: 'DRAM throughput' is not a metric of the report",
        ),
        (citing("tensor_cycles", 0), "bottlenecks[0].evidence[0]: tensor_cycles was not collected"),
        (citing("dram_throughput", 55), "bottlenecks[0].evidence[0]: dram_throughput is 91.17, not 55"),
    ],
)
def test_what_the_schema_cannot_tell(response, says):
    (problem,) = problems(response)
    assert says in problem


def test_every_problem_is_listed():
    both = {
        "bottlenecks": [{**MEMORY, "evidence": [{"metric": "tensor_cycles", "value": 1}, {"metric": "x", "value": 1}]}]
        * 2
    }
    assert len(problems(both)) == 5


@pytest.mark.parametrize(
    ("metric", "right", "wrong"),
    [
        ("dram_throughput", (91.17, 91.2, 91), (91.1, 91.3, 91.0, 90, 92, 100, 0.9117, -91.17)),
        ("dram_bytes_read", (1049584640, 1.0496e9, 1.05e9, 1050000000), (1.04e9, 1e9, 1049.58, 1.1e9)),
        ("waves_per_sm", (0.4, 0.40), (0, 0.41, 1)),
        ("grid_size", (64, 64.0), (60, 65)),
    ],
)
def test_a_figure_is_the_reports_rounded_to_the_digits_that_are_cited(metric, right, wrong):
    assert [value for value in right if problems(citing(metric, value))] == []
    assert [value for value in wrong if not problems(citing(metric, value))] == []


def test_a_zero_is_cited_as_zero():
    assert brief_answer.agrees(0, 0.0) and not brief_answer.agrees(0.01, 0.0)


def test_a_brief_tells_of_the_version_that_was_profiled_by_the_recorded_latency_wherever_its_profile_lies(tmp_path):
    folder = BUNDLE / "examples" / "attention"
    record = json.loads((folder / "memory" / "v0.json").read_text())
    shutil.copytree(folder / "profiles" / "v0" / "annotation", tmp_path / "copied")
    at = workspace.Workspace(folder)
    profile = profile_folder.read(tmp_path / "copied", at)
    parts, _ = brief.of_workspace(at, profile, analysis.diagnose(profile))
    assert parts.kernel == (folder / "versions" / "v0_kernel.py").read_text() != (folder / "kernel.py").read_text()
    assert parts.utilization.time_us == record["performance"]["latency_us"] and parts.clock == "measured"
    small_work = {**profile.work, "flops": 10**9, "bytes_min": 10**6}
    small = brief.utilization(at, at.task(), replace(profile, work=small_work))
    assert small.floor_share_pct < 1
    alone = profile_folder.read(tmp_path / "copied")
    assert alone.recorded_us is None
    assert brief.utilization(at, at.task(), alone).time_us == alone.total_us
    parts, _ = brief.of_workspace(at, alone, analysis.diagnose(alone))
    said = f"- profiled {brief_answer.figure(alone.total_us)} us, at a library's rate, which is no floor and bounds no "
    assert said in brief.compose(parts).user


def test_a_profile_is_held_against_the_wiki_of_its_workspace(tmp_path):
    shutil.copytree(BUNDLE / "examples" / "rmsnorm", tmp_path / "w")
    shutil.copytree(BUNDLE / "gpu-wiki", tmp_path / "wiki")
    page = tmp_path / "wiki" / "docs" / "hardware" / "h200.md"
    page.write_text(
        page.read_text().replace("| measured_copy_bandwidth | 4296 |", "| measured_copy_bandwidth | 3000 |")
    )
    readme = tmp_path / "w" / "README.md"
    readme.write_text(readme.read_text().replace('"gpu_wiki_path": null', f'"gpu_wiki_path": "{tmp_path / "wiki"}"'))
    shares = [
        analysis.floor(profile_folder.read(root / "profiles" / "v1" / "annotation")).share_pct
        for root in (BUNDLE / "examples" / "rmsnorm", tmp_path / "w")
    ]
    assert shares[1] == pytest.approx(shares[0] * 4296 / 3000)


def test_a_masked_version_is_not_named_in_the_history_and_the_kernel_stays_as_it_is():
    record = json.loads((BUNDLE / "examples" / "row_softmax" / "h200" / "memory" / "v1.json").read_text())
    parts = brief.Parts(records=[Record.from_json(record)], masked={"v0"}, kernel="v0 = tl.load(p)")
    assert "a masked version" in brief.history_section(parts) and "v0" not in brief.history_section(parts)
    assert "v0 = tl.load(p)" in brief.kernel_section(parts)
    with pytest.raises(Refused, match=r"profile again: profile_kernel\.sh"):
        brief.compose(parts)  # nothing is diagnosed


@pytest.mark.parametrize("platform", ["null", '"B999"'])
def test_without_a_known_platform_there_is_a_brief_without_clocks(session, platform):
    text = session.readme.read_text()
    assert '"platform": "H200"' in text and len(brief.clock_citations(session, session.task())) == 2
    session.readme.write_text(text.replace('"platform": "H200"', f'"platform": {platform}'))
    assert brief.clock_citations(session, session.task()) == []


def brief_lines(workspace_folder) -> list[str]:
    made = workspace.Workspace(workspace_folder)
    profile = profile_folder.read(made.profile("v0", profile_folder.MODE), made)
    parts, _ = brief.of_workspace(made, profile, analysis.diagnose(profile))
    user = brief.compose(parts).user
    return user.split("## Nearest cases, of other kernels\n\n")[1].split("\n\n")[0].splitlines() if parts.cases else []


def test_the_two_nearest_cases_are_cited_by_path_with_what_came_of_them(tmp_path):
    shutil.copytree(EXAMPLE, tmp_path / "w")
    first, second = brief_lines(tmp_path / "w")
    own = (
        r"- gpu-wiki/docs/cases/row_softmax.md:\d+: Three kernels made one that reads once "
        r"\(FASTER, 1.986x; shares .*excess_dram_traffic.*\)"
    )
    assert [line for line in (first, second) if re.fullmatch(own, line)]  # another case is as near
    assert all(line.startswith("- gpu-wiki/docs/cases/") for line in (first, second)) and second != first


def test_a_wiki_without_cases_gives_a_brief_without_them(tmp_path):
    shutil.copytree(EXAMPLE, tmp_path / "w")
    shutil.copytree(BUNDLE / "gpu-wiki", tmp_path / "wiki", ignore=shutil.ignore_patterns("cases"))
    readme = tmp_path / "w" / "README.md"
    readme.write_text(readme.read_text().replace('"gpu_wiki_path": null', f'"gpu_wiki_path": "{tmp_path / "wiki"}"'))
    assert brief_lines(tmp_path / "w") == []
