"""The report of a workspace. The shipped H200 session is the real one; every other record here is made by hand."""

import dataclasses
import hashlib
import itertools
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
from conftest import BUNDLE, FIXTURES, call_tool, explored, kernel_text, task, tool_json
from kernelopt import bundle
from kernelopt.audit import workspace_audit
from kernelopt.gate import history
from kernelopt.report import document, environment_section, gather, overview, phrases, plots, session_page
from kernelopt.session import creation, workspace
from kernelopt.session.record import QualityGate, Record
from kernelopt.session.record_store import RecordStore, empty

EXAMPLE = BUNDLE / "examples" / "row_softmax" / "h200"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
VOID = {"meta", "link", "br", "hr", "img", "input"}
BY_HAND = "made by hand"
BASIS = "measured_copy_bandwidth: 4296 GB/s <- <gpu-wiki>/docs/hardware/h200.md:L36"
HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(2)>\"'></style></title></pre></svg>]]>-->"
    "```\n`````\n`` [x](javascript:alert(3)) <b> | @BODY@ \0 \ud800 \u202e \\ &lt;"
)
WORK = {"flops": 137438953472, "bytes_in": None, "bytes_out": None, "bytes_min": 100663296, "dtype": "bf16"}
MATMUL = {**WORK, "source": "given"}


class Reader(HTMLParser):
    """Tags, attributes and text of a page; `open` is empty at the end of a balanced one."""

    def __init__(self, page: str):
        super().__init__()
        self.open, self.tags, self.attributes, self.words, self.styles = [], set(), [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):  # of SVG
        self.tags.add(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        (self.styles if self.open and self.open[-1] == "style" else self.words).append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def read(page: str) -> Reader:
    reader = Reader(page)
    assert not reader.open
    return reader


def page_of(session: workspace.Workspace) -> document.Page:
    return session_page.page(gather.gather(session))


def read_page(session: workspace.Workspace) -> Reader:
    return read(page_of(session).html())


def merged(base: dict, changes: dict) -> dict:
    return {
        name: merged(value, changes.get(name, {})) if isinstance(value, dict) else changes.get(name, value)
        for name, value in base.items()
    } | {name: value for name, value in changes.items() if name not in base}


def put(session: workspace.Workspace, version: str, result: str | None = "PASS", **changes) -> Record:
    """A record made by hand; an accepted one names a commit that is none."""
    by_hand = {
        "kernel_sha256": hashlib.sha256(session.kernel.read_bytes()).hexdigest(),
        "device": "NVIDIA H200",
        "optimization": {"action_description": f"{version} {BY_HAND}"},
        "quality_gate": {"result": result},
        "git_commit_hash": "a" * 40 if result == "PASS" else None,
    }
    record = Record.from_json(merged(merged(empty(version).to_json(), by_hand), changes))
    RecordStore(session).save(record)
    return record


def timed(us: float, against: str | None = None, speedup: float = 1.0, **more) -> dict:
    """`performance` of a record made by hand; the interval is 1 % wide on each side."""
    compared = {"against": against, "verdict": "FASTER", "speedup": speedup, "ci95": [speedup * 0.99, speedup * 1.01]}
    return {
        "workload": "default",
        "latency_us": us,
        "p20_us": us * 0.99,
        "p80_us": us * 1.02,
        "comparison_with_previous": compared if against else None,
        **more,
    }


def matmul_session(session: workspace.Workspace) -> workspace.Workspace:
    """A session with FLOPs, made by hand: four versions, of which v2 was refused before it was timed."""
    target = {"workload": "default", "metric": "tflops", "target": 612, "unit": "TFLOPS"}
    basis = "measured_bf16_matmul: 680 TFLOPS <- <gpu-wiki>/docs/hardware/h200.md:L43"
    session.update_readme(task(work={"default": MATMUL}, targets=[{**target, "basis": basis}]), {})
    put(session, "v0", performance=timed(2000, tflops=68.7, floor_us=202.1))
    put(session, "v1", performance=timed(500, "v0", 4.0, tflops=274.9, floor_us=202.1))
    wrong = {"result": "FAIL", "failure_reason": "MISMATCH: 3 of 8 values differ"}
    put(session, "v2", None, quality_gate=wrong)
    put(session, "v3", performance=timed(250, "v1", 2.0, tflops=549.8, floor_us=202.1))
    return session


@pytest.fixture
def matmul(session):
    return matmul_session(session)


# --- the shipped example ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def example() -> Reader:
    return read_page(workspace.Workspace(EXAMPLE))


@pytest.mark.parametrize(
    "words",
    [
        "Goal: met since v1; v1 is the best version",
        "row_softmax_demo_20261121_071539 on H200; goal: default at least 3866.4 GB/s (90 % of measured_copy_bandwidth).",
        "v1, 1.986x as fast as v0: Compute maximum, sum and result in one kernel",
        "What remains no target is open.",
        "Profile of v0 said ncu; memory;",
        "three kernels in the call, DRAM-bound, several times the least bytes moved",
        "v1, median 262.46 us (p20 261.63 to p80 263.78); share of the floor: 95.2 %; 1.986x as fast as v0 (measured in pairs)",
        "1.986x (95 % interval 1.985 to 1.989), measured in pairs",
        "95.2 %",
        "2 accepted, 1 rejected",
        "4091.01 GB/s",
        "measured_copy_bandwidth: 4296 GB/s <- <gpu-wiki>/docs/hardware/h200.md:L36",
        "memory_bandwidth: 4800 GB/s <- <gpu-wiki>/docs/hardware/h200.md:L15",
        "the call moves 1.99 times the least bytes",
        "rejected: EQUAL against the best version: 0.999x",
        "+def softmax_row_renamed(x, y, columns, BLOCK: tl.constexpr):",
        "580.159.04",
        "2.11.0+cu130",
        "as found, not locked",
        "near_least_traffic",
        "No target is open.",
        "return torch.softmax(x, dim=-1)",
    ],
)
def test_the_example_is_told_with_its_own_figures(example, words):
    assert words in example.text


def test_the_example_has_a_mark_a_version_and_a_fold_a_round(example):
    page = page_of(workspace.Workspace(EXAMPLE))
    assert [chart.name for chart in page.charts()] == ["bandwidth", "trajectory"]
    for chart in page.charts():
        assert marks(chart) == ["accepted", "accepted", "rejected"]
    links = {value for name, value in example.attributes if name == "href"}
    assert links == {"#v0", "#v1", "#v2"} == {f"#{value}" for name, value in example.attributes if name == "id"}


def test_one_file_that_needs_nothing_else(example):
    page = page_of(workspace.Workspace(EXAMPLE)).html()
    policy = next(value for name, value in example.attributes if name == "content" and "default-src" in value)
    assert "default-src 'none'" in policy and "script" not in policy
    assert not example.tags & {"script", "link", "iframe", "object", "embed", "base", "form"}
    links = [value for name, value in example.attributes if name in ("src", "href", "srcset", "data", "action")]
    assert links and all(value.startswith("#") for value in links)
    assert not re.search(r"@import|url\(|http:|https:", page)
    assert ("name", "viewport") in example.attributes
    assert "prefers-color-scheme: dark" in page and "@media print" in page and str(BUNDLE) not in page


def test_markdown_says_the_same_and_its_citations_hold(example, tmp_path):
    page = page_of(workspace.Workspace(EXAMPLE))
    text = page.markdown()
    words = " ".join(re.sub(r"\\(.)", r"\1", text).split())
    for section in page.sections:
        for block in section.blocks:
            for row in getattr(block, "rows", ()):
                assert all(" ".join(cell.split()) in words for cell in row)
    assert "<svg" not in text and "```diff\n--- v1/kernel.py\n+++ v2/kernel.py" in text
    shutil.copytree(EXAMPLE, tmp_path / "w")
    (tmp_path / "w" / "report.md").write_text(text)
    made = workspace.Workspace(tmp_path / "w")
    assert not workspace_audit.of_workspace(made, made.task(), RecordStore(made)).problems


def test_the_tool_writes_the_page_and_says_where(tmp_path):
    out = tmp_path / "new" / "page.html"
    found = tool_json("render_report.py", EXAMPLE, "--out", out)
    assert found["report"] == str(out) and found["best"] == "v1" and found["goal"]["met"] is True
    assert found["speedup_over_v0"]["point"] == pytest.approx(1.98611207) and found["masked"] == 0
    assert read(out.read_text()).text.startswith("Kernel optimisation: row_softmax_demo")
    done = call_tool("render_report.py", EXAMPLE, "--markdown")
    assert done.returncode == 0 and done.stdout.startswith("# Kernel optimisation: row_softmax_demo")


def test_the_page_lies_in_the_workspace_unless_told_otherwise(session, run_here):
    done = run_here("render_report.py", session.root)
    assert done.returncode == 0 and done.stdout.strip() == str(session.root / "report.html")
    read((session.root / "report.html").read_text())


@pytest.mark.parametrize("arguments", [["--out", "."], ["--out", ""], ["--json", "--markdown"]])
def test_wrong_calls(session, arguments, run_here, monkeypatch):
    monkeypatch.chdir(session.root)
    done = run_here("render_report.py", session.root, *arguments)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert not (session.root / "report.html").exists()


# --- what is missing is named -------------------------------------------------------------------------------------


def test_a_workspace_with_nothing_recorded_has_a_page(session):
    text = read_page(session).text
    for words in (
        "no targets are set",
        "none: no version is accepted yet",
        "nothing is recorded yet",
        "No plot",
        "not counted yet",
    ):
        assert words in text
    assert not page_of(session).charts()


def test_a_baseline_alone_has_a_page(session):
    put(session, "v0", performance=timed(10))
    reader = read_page(session)
    for words in (
        "v0, median 10.00 us (p20 9.90 to p80 10.20)",
        "none: v0 is the best version",
        "No roofline",
        "v0 is not profiled",
    ):
        assert words in reader.text
    assert [chart.name for chart in page_of(session).charts()] == ["trajectory"]
    assert "torch.clamp" in reader.text  # its kernel.py


def test_a_refused_baseline_alone_has_a_page(session):
    session.update_readme(task(work={"default": {**MATMUL, "flops": 0}}), {})
    put(session, "v0", None, quality_gate={"result": "FAIL", "failure_reason": "MISMATCH"})
    text = read_page(session).text
    assert "1 rejected" in text and "none: no version is accepted yet" in text
    assert [marks(chart) for chart in page_of(session).charts()] == [["rejected"], ["rejected"]]
    target = {"workload": "default", "metric": "tflops", "target": 612, "unit": "TFLOPS", "basis": "by hand"}
    session.update_readme(task(targets=[target]), {})
    assert "no version is accepted yet: run_gate.py --version v0" in read_page(session).text


@pytest.mark.parametrize(("tolerance", "told"), [(None, "the default of the dtype"), (0.05, "0.05")])
def test_the_tolerance_of_the_task_is_told(session, tolerance, told):
    session.update_readme(task(tolerance=tolerance), {})
    assert f"Tolerance {told}" in " ".join(read_page(session).text.split())


def test_a_platform_that_the_wiki_lacks_is_unknown(session):
    session.update_readme(task(platform="RX 999", work={"default": MATMUL}), {})
    put(session, "v0", performance=timed(10))
    assert "No roofline: 'RX 999' is not in the wiki" in read_page(session).text


def test_a_broken_record_is_named_and_what_rests_on_it_is_unknown(matmul):
    (matmul.memory / "v1.json").write_text("{")
    reader = read_page(matmul)
    assert "Left out: memory/v1.json is not valid JSON" in reader.text and str(matmul.root) not in reader.text
    assert (
        "Goal: UNKNOWN: a record cannot be read" in reader.text
        and reader.text.count("UNKNOWN: a record cannot be read") == 3
    )
    found = tool_json("render_report.py", matmul.root)
    assert found["goal"]["met"] is None and found["best"] is None and len(found["gaps"]) == 1


@pytest.mark.parametrize("text", ["{", '{"kernels": [1]}', '{"kernels": []}', "[]", '{"kernels": [{"name": "x"}]}'])
def test_a_broken_profile_is_named(session, text):
    put(session, "v0", performance=timed(10))
    folder = session.profile("v0", "annotation")
    folder.mkdir(parents=True)
    (folder / "metrics.json").write_text(text)
    text = read_page(session).text
    assert "Left out: profiles/v0/annotation" in text and "v0 is not profiled" in text


@pytest.mark.parametrize("value", [-1, 0, 10**299, 10**400], ids=["-1", "0", "1e299", "1e400"])
def test_any_number_in_a_record_leaves_a_page(tmp_path, value, run_here):
    root = shutil.copytree(EXAMPLE, tmp_path / "kernel_opt_example")
    path = root / "memory" / "v1.json"
    text = path.read_text()
    for field in ("p20_us", "p80_us", "latency_us", "floor_us", "floor_share_pct"):
        record = json.loads(text)
        record["performance"][field] = value
        path.write_text(json.dumps(record))
        done = run_here("render_report.py", root)
        assert done.returncode == 0, done.stderr
        assert value < 10**400 or "v1.json is not valid JSON (an integer of 401 digits is too large)" in done.stderr


def test_a_broken_params_file_is_named(session):
    put(session, "v0", performance=timed(10))
    shutil.copytree(EXAMPLE / "profiles" / "v0", session.root / "profiles" / "v0")
    assert "v0 is not profiled" not in read_page(session).text
    (session.profile("v0", "annotation") / "params.json").write_text("[]")
    assert "Left out: profiles/v0/annotation holds no profile" in read_page(session).text


def test_the_state_of_the_gpu_may_be_missing_in_part(session):
    put(
        session,
        "v0",
        performance=timed(
            10, gpu_state={"sm_clock_mhz": {"min": 1755, "max": 1980}, "power_w": 7, "temperature_c": {"min": "x"}}
        ),
    )
    rows = next(
        block for block in environment_section.environment(gather.gather(session)) if isinstance(block, document.Table)
    ).rows
    assert rows[0][2:] == ("1,755 to 1,980", *["not recorded"] * 4)


def test_masked_records_are_left_out_and_counted(matmul):
    secret = {"action_description": "a secret idea"}
    put(matmul, "v4", "FAIL", optimization=secret, masked=True)
    page = page_of(matmul)
    text = read(page.html()).text
    assert "1 left out of this report" in text and "secret" not in text and "v4" not in text
    assert "secret" not in page.markdown()
    assert all("v4" not in plots.svg(chart) for chart in page.charts())


def test_a_ratio_of_a_masked_version_still_counts_and_its_kernel_stays_hidden(matmul):
    for version, masked in (("v1", True), ("v3", False)):  # v3 is the best, and started from v1
        matmul.kernel.write_text(kernel_text(f"return {version}  # idea of {version}"))
        digest = hashlib.sha256(matmul.kernel.read_bytes()).hexdigest()
        record = RecordStore(matmul).read(version)
        RecordStore(matmul).save(dataclasses.replace(record, kernel_sha256=digest, masked=masked))
    text = read_page(matmul).text
    assert "2 paired ratios (v1 / v0, v3 / v1, 1 of them of masked versions)" in text
    assert "No diff: v1, which it started from, is masked." in text and "idea of v1" not in text


# --- figures ------------------------------------------------------------------------------------------------------


def test_chained_ratios_are_a_product_and_say_so(matmul):
    found = phrases.speedup_over_v0(gather.gather(matmul))
    assert found.point == pytest.approx(8.0)
    assert found.ci95 == pytest.approx([8 * 0.99**2, 8 * 1.01**2])
    assert "8.000x (7.841 to 8.161): the product of 2 paired ratios (v1 / v0, v3 / v1)" in read_page(matmul).text


def test_a_round_tells_its_gain_in_each_workload(matmul):
    by_workload = {
        name: {"against": "v3", "verdict": verdict, "speedup": ratio, "ci95": [ratio * 0.99, ratio * 1.01]}
        for name, verdict, ratio in (("default", "FASTER", 1.25), ("tall", "EQUAL", 1.0))
    }
    record = put(matmul, "v4", performance=timed(200, "v3", 1.25, comparison_by_workload=by_workload))
    assert phrases.gain(record) == (
        "1.250x (95 % interval 1.238 to 1.262) against v3; tall 1.000x (95 % interval 0.990 to 1.010), EQUAL"
    )
    assert phrases.verdict_line(record) == "accepted: FASTER" and record.gained == "1.250x as fast as v3"


def test_a_version_that_another_workload_let_in_names_it(matmul):
    default, tall = (
        {"against": "v3", "verdict": verdict, "speedup": ratio, "ci95": [ratio * 0.99, ratio * 1.01]}
        for verdict, ratio in (("EQUAL", 1.001), ("FASTER", 2.5))
    )
    changes = {"comparison_with_previous": default, "comparison_by_workload": {"default": default, "tall": tall}}
    record = put(matmul, "v4", performance=timed(200, "v3", 1.001, **changes))
    assert phrases.verdict_line(record) == "accepted: FASTER on tall"
    assert history.commit_message(record).startswith("V4: 200.00 us, 2.500x as fast as v3 on tall | ")
    assert "v4, 2.500x as fast as v3 on tall: " in overview.steps_line(gather.gather(matmul))
    assert phrases.speedup_over_v0(gather.gather(matmul)).point == pytest.approx(8.0 * 1.001)  # of the default one
    refused = dataclasses.replace(record, quality_gate=QualityGate("FAIL", "slower on flat"))
    assert refused.gained == "1.001x as fast as v3"


@pytest.mark.parametrize("against", [None, "v9", "v3"])
def test_a_chain_that_breaks_gives_no_speedup(matmul, against):
    put(matmul, "v3", performance=timed(250, against, 2.0))
    session = gather.gather(matmul)
    assert phrases.speedup_over_v0(session) is None and phrases.speedup_line(session).startswith("UNKNOWN: v3")


@pytest.mark.parametrize(
    ("reached", "since"),
    [((300, 650, 620), "v1"), ((650, 640, 620), "v0"), ((650, 600, 620), "v3"), ((300, 300, 620), "v3")],
)
def test_a_goal_is_met_since_the_version_after_which_it_was_never_lost(matmul, reached, since):
    for (version, against), tflops in zip((("v0", None), ("v1", "v0"), ("v3", "v1")), reached, strict=True):
        put(matmul, version, performance=timed(220, against, 1.1, tflops=tflops))
    assert f"Goal: met since {since}; v3 is the best version" in read_page(matmul).text
    assert session_page.summary(gather.gather(matmul)).to_json()["goal"]["since"] == since


def test_the_summary_names_the_steps_that_gave_most(matmul):
    long = "Stage the tiles through shared memory " + "and so on " * 20
    put(matmul, "v4", optimization={"action_description": long}, performance=timed(100, "v3", 2.5, tflops=560))
    facts = dict(
        next(
            block for block in overview.overview(gather.gather(matmul), False) if isinstance(block, document.Facts)
        ).rows
    )
    basis = "90 % of measured_bf16_matmul, a library's rate, which is no floor"
    assert facts["Asked"] == f"test on H200; goal: default at least 612 TFLOPS ({basis})."
    assert facts["Reached"] == (
        "v4, median 100.00 us (p20 99.00 to p80 102.00); share of a library's rate, which is no floor: not recorded; "
        "20.000x as fast as v0 (the product of 3 paired steps)."
    )
    first, second = facts["What gave most"].split("; ")
    assert first == "v1, 4.000x as fast as v0: v1 made by hand"
    assert second.startswith("v4, 2.500x as fast as v3: Stage the tiles") and second.endswith("and so on …")
    assert facts["What remains"] == "default tflops: 560.00 of 612 TFLOPS, 1.09 times as fast is asked."


def test_what_the_median_hides_is_said(matmul):
    assert not list(overview.cautions(gather.gather(matmul)))
    put(matmul, "v3", performance=timed(200, "v1", 2.0, p20_us=182, p80_us=208, floor_share_pct=101.0))
    wide, above = overview.cautions(gather.gather(matmul))
    assert "p20 to p80 spans 13.0 % of the median" in wide and above.startswith("Above 100 %")


def test_a_version_has_one_share_of_the_floor_the_measured_one(example):
    assert "Share of the floor 95.2 %" in example.text
    assert "Under the profiler 254.59 us in kernels, which is not the measured latency" in example.text
    assert "Stop? no: 95.2 % of the floor at the copy rate" in example.text and "98.2 %" not in example.text
    assert "4.8 % of the time is left, more than 3 %; DRAM or a pipe is used up" in example.text


def test_lessons_that_lie_beside_the_page_are_linked(session, run_here):
    assert run_here("render_report.py", session.root).returncode == 0
    assert "lessons.md" not in (session.root / "report.html").read_text()
    (session.root / "lessons.md").write_text("Measure first.")
    for form, link in ([], '<a href="lessons.md">lessons.md</a>'), (["--markdown"], "[lessons.md](lessons.md)"):
        out = session.root / "page"
        assert run_here("render_report.py", session.root, *form, "--out", out).returncode == 0
        assert link in out.read_text()


# --- the plan's evidence ------------------------------------------------------------------------------------------

TABLE = """# Plan for v1

## Evidence

| source (profile, gpu-wiki) | query | finding | actionability |
|---|:---:|---|---|
| timing of v0 | tile? | 1.085 ms, `a \\| b` | loads run ahead |
| arithmetic | short row |
| too | many | cells | here | and there |

## Action

One change.
"""


def test_the_evidence_of_a_plan_is_its_own_table():
    assert gather.evidence_rows(TABLE) == [
        ["source", "query", "finding", "actionability"],
        ["timing of v0", "tile?", "1.085 ms, `a | b`", "loads run ahead"],
        ["arithmetic", "short row", "", ""],
        ["too", "many", "cells", "here | and there"],
    ]
    assert gather.evidence_rows("## Evidence\n\nThe clock says so.\n## Action\n") == [
        ["evidence"],
        ["The clock says so."],
    ]
    assert gather.evidence_rows("## Action\n\n| a |\n|---|\n| b |\n") == gather.evidence_rows("## Evidence\n\n") == []


def test_a_round_shows_its_plan_and_the_profile_before_apart(matmul):
    found = {
        "tool_used": "ncu",
        "bottleneck_type": "memory",
        "evidence_summary": "dram 91 %",
        "evidence_chain": "tensor_cycles = 0 % -> the tensor pipe is idle -> tl.dot",
    }
    put(matmul, "v1", performance=timed(500, "v0", 4.0, tflops=274.9), profile_evidence=found)
    matmul.plan("v1").write_text(TABLE)
    session = gather.gather(matmul)
    before, after = (RecordStore(matmul).read(version) for version in ("v1", "v3"))
    assert phrases.evidence(session, before).startswith("timing of v0: 1.085 ms, `a | b`; arithmetic")
    assert phrases.evidence(session, after) == "none in plans/v3_plan.md"
    said = "ncu; memory; dram 91 %; its first finding: tensor_cycles = 0 % → the tensor pipe is idle → tl.dot"
    assert phrases.profile_before(session, before) == ("Profile of v0 said", said)
    assert phrases.profile_before(session, after) == ("Profile of v1 said", "nothing: not profiled")
    text = read_page(matmul).text
    assert "loads run ahead" in text and text.index("loads run ahead") < text.index("Profile of v0 said")
    assert "Evidence: none in plans/v3_plan.md." in text


def test_a_citation_is_never_cut():
    cited = "measured_copy_bandwidth: 4296 GB/s <- <gpu-wiki>/docs/hardware/h200.md:L36"
    assert phrases.one_line(f"{'long ' * 40}{cited}").endswith(cited)
    assert document.plain(f"at `{cited}` | x") == f"at `{cited}` \\| x"
    assert document.plain("a | b <- c") == "a \\| b \\<- c"


def keep_source(matmul, folder: str, version: str, body: str) -> None:
    """A kernel of that body in the folder, as the one that the version was judged with."""
    source = kernel_text(body)
    (matmul.root / folder).mkdir()
    (matmul.root / folder / f"{version}_kernel.py").write_text(source)
    record = RecordStore(matmul).read(version)
    RecordStore(matmul).save(dataclasses.replace(record, kernel_sha256=hashlib.sha256(source.encode()).hexdigest()))


def test_an_archive_has_its_kernels_in_versions(matmul):
    keep_source(matmul, "versions", "v0", "return x  # the old way")
    text = page_of(matmul).markdown()
    assert "--- v0/kernel.py\n+++ v1/kernel.py" in text and "-        return x  # the old way" in text


# --- a goal -------------------------------------------------------------------------------------------------------


def test_a_goal_is_not_met_by_another_kernel_than_was_measured(matmul):
    put(matmul, "v3", performance=timed(200, "v1", 2.0, tflops=687.0))
    assert "Goal: met since v3" in read_page(matmul).text
    matmul.kernel.write_text(kernel_text("return x"))
    assert "Goal: NOT met: kernel.py is not the accepted v3" in read_page(matmul).text
    assert phrases.goal(gather.gather(matmul)).met is False


def test_an_open_target_says_how_far_it_is(matmul):
    text = read_page(matmul).text
    assert "Goal: NOT met" in text and "549.80 of 612 TFLOPS, 1.11 times as fast is asked" in text


def test_differences_come_from_the_history_and_only_from_what_was_judged(tmp_path):
    """The example's two accepted kernels, committed again: the shipped workspace comes without .git."""
    source = EXAMPLE.parent
    arguments = (tmp_path, "again", source / "three_passes.py", source / "reference.py", task())
    session = creation.create(*arguments)
    for version, name in (("v0", "three_passes.py"), ("v1", "one_pass.py")):
        shutil.copyfile(source / name, session.kernel)
        record = json.loads((EXAMPLE / "memory" / f"{version}.json").read_text())
        RecordStore(session).save(
            dataclasses.replace(Record.from_json(record), git_commit_hash=session.commit(version))
        )
    text = page_of(session).markdown()
    assert "--- v0/kernel.py\n+++ v1/kernel.py" in text and "\n+def softmax_row(" in text and "\n-def row_max" in text
    session.kernel.write_text("changed")
    RecordStore(session).save(dataclasses.replace(RecordStore(session).read("v1"), kernel_sha256="0" * 64))
    assert "No diff: no file here has the SHA-256 that v1 was judged with" in page_of(session).markdown()


def test_a_refused_round_is_held_against_what_it_started_from(matmul):
    keep_source(matmul, "rejected", "v2", "return x  # wrong")
    text = page_of(matmul).markdown()
    assert "--- v1/kernel.py\n+++ v2/kernel.py" in text and "+        return x  # wrong" in text
    assert "rejected: MISMATCH: 3 of 8 values differ" in text
    put(matmul, "v4", "FAIL")
    after = put(matmul, "v5", "FAIL")
    assert phrases.parent(gather.gather(matmul), after).version == "v3"  # v4 was refused, too


# --- plots --------------------------------------------------------------------------------------------------------


def marks(chart: plots.Chart) -> list[str]:
    """Kinds of the marks of a chart, from its SVG."""
    groups = ElementTree.fromstring(plots.svg(chart)).iter("g")
    return [group.get("class").split()[1] for group in groups if group.get("class").split()[0] == "mark"]


def test_a_problem_with_flops_has_a_roofline(matmul):
    page = page_of(matmul)
    roofline, trajectory = page.charts()
    assert roofline.name == "roofline" and roofline.x.log and roofline.y.log
    assert marks(roofline) == ["accepted"] * 3 and "Not on the plot, no rate recorded: v2." in read(page.html()).text
    assert marks(trajectory) == ["accepted", "accepted", "rejected", "accepted"]
    assert {line.name for line in roofline.lines} == {"measured 680", "documented 989.5", "target 612 TFLOPS"}
    assert all(mark.at == pytest.approx(1365.33, abs=0.01) for mark in roofline.marks)


def test_a_bandwidth_target_has_its_own_plot_and_keeps_its_unit(matmul):
    target = {"workload": "default", "metric": "bandwidth_gbps", "target": 3866.4, "unit": "GB/s", "basis": BASIS}
    matmul.update_readme(task(work={"default": MATMUL}, targets=[target]), {})
    put(matmul, "v3", performance=timed(250, "v1", 2.0, tflops=549.8, bandwidth_gbps=402.6))
    charts = page_of(matmul).charts()
    assert [chart.name for chart in charts] == ["roofline", "bandwidth", "trajectory"]
    for chart in charts[:2]:
        assert "target 3866.4 GB/s" in {line.name for line in chart.lines}
    (line,) = (line for line in charts[0].lines if line.kind == "target")
    assert line.points[0][1] == pytest.approx(
        3866.4 * 1365.33 / 1e3, rel=1e-5
    )  # TFLOPS at that intensity, above the roofs
    assert all(0 <= charts[0].y.share(y) <= 1 for _, y in line.points)


def test_a_latency_target_is_a_line_of_the_trajectory(matmul):
    target = {"workload": "default", "metric": "latency_us", "target": 240, "unit": "us", "basis": BASIS}
    matmul.update_readme(task(work={"default": MATMUL}, targets=[target]), {})
    roofline, trajectory = page_of(matmul).charts()
    assert {line.name for line in trajectory.lines} == {"library rate 202.1 us", "target 240 us", ""}
    assert "target" not in {line.kind for line in roofline.lines}


def test_a_share_of_a_librarys_rate_is_called_so_with_each_version(matmul, example):
    put(matmul, "v3", performance=timed(250, "v1", 2.0, floor_us=202.1, floor_share_pct=80.8))
    text = read_page(matmul).text
    assert "Share of a library's rate, which is no floor 80.8 %" in text and "hare of the floor" not in text
    assert "library rate" not in example.text  # a memory-bound problem has a floor


def test_every_axis_of_figures_says_its_scale(matmul):
    roofline, trajectory = page_of(matmul).charts()
    titles = [axis.title for chart in (roofline, trajectory) for axis in (chart.x, chart.y)]
    scales = ["arithmetic intensity, FLOP/byte (logarithmic)", "TFLOPS (logarithmic)", "version"]
    assert titles == [*scales, "latency, us (logarithmic)"]
    assert plots.trajectory([plots.Mark("v0", 0, 3.0, "accepted", "")], 2.0).y.title == "latency, us (linear)"
    assert all(title in plots.svg(roofline) for title in titles[:2])


def test_the_first_and_the_best_version_are_always_named():
    spot = [plots.Mark(f"v{n}", 2.0, 5.0, "rejected", "", best=n == 3) for n in range(6)]
    chart = plots.roofline(spot, 2.0, [("documented", 4000.0, 800.0)], None)
    assert [(mark.name, side) for mark, side in plots.named_marks(chart)] == [("v0", "left"), ("v3", "right")]
    assert ">v3 (best)<" in plots.svg(chart) and ">v0<" in plots.svg(chart)
    apart = [dataclasses.replace(mark, value=10.0**n) for n, mark in enumerate(spot)]
    chart = plots.roofline(apart, 2.0, [("documented", 4000.0, 800.0)], None)
    assert {mark.name for mark, _ in plots.named_marks(chart)} == {f"v{n}" for n in range(6)}
    many = [plots.Mark(f"v{n}", n, 100.0, "accepted", "", best=n == 33) for n in range(60)]
    assert "v33 (best)" in plots.svg(plots.trajectory(many, None))  # the axis has no room for it


def test_a_roof_bends_at_its_ridge_and_stays_inside():
    chart = plots.roofline([plots.Mark("v0", 2.0, 1.5, "accepted", "")], 2.0, [("documented", 4000.0, 800.0)], None)
    start, ridge, end = chart.lines[0].points
    assert ridge == (200.0, 800.0) and end[1] == 800.0 and start[1] == pytest.approx(start[0] * 4.0)
    for x, y in chart.lines[0].points:
        assert -1e-9 <= chart.x.share(x) <= 1 + 1e-9 and -1e-9 <= chart.y.share(y) <= 1 + 1e-9


def test_a_version_that_was_not_timed_stands_at_the_foot(matmul):
    chart = page_of(matmul).charts()[1]
    assert [mark.value for mark in chart.marks] == [2000, 500, None, 250]
    assert chart.y.log  # 2000 against a floor of 202
    cross = next(g for g in ElementTree.fromstring(plots.svg(chart)).iter("g") if "rejected" in g.get("class"))
    assert float(cross.find("path").get("d").split()[1].split("L")[0]) == plots.HEIGHT - plots.BOTTOM - 4
    assert "not judged" not in plots.svg(chart) and "v2: not recorded, rejected" in plots.svg(chart)


def test_accepted_versions_hold_until_the_next():
    accepted = [plots.Mark("v0", 0, 20.0, "accepted", ""), plots.Mark("v2", 2, 10.0, "accepted", "")]
    assert plots.steps(accepted, 2.6) == [(0, 20.0), (2, 20.0), (2, 10.0), (2.6, 10.0)]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0.03, 40, [0.1, 1, 10]), (180, 2300, [200, 500, 1000, 2000]), (1e-9, 1e9, [1e-9, 1e-6, 1e-3, 1, 1e3, 1e6, 1e9])],
)
def test_logarithmic_ticks(low, high, ticks):
    assert plots.log_ticks(low, high) == pytest.approx(ticks)


@pytest.mark.parametrize("high", [0.004, 0.7, 1, 6.4, 598.6, 5184, 1e7])
def test_linear_ticks_are_few_and_reach_far_enough(high):
    ticks = plots.linear_ticks(high)
    assert 3 <= len(ticks) <= 7 and ticks[0] == 0 and 0.7 * high <= ticks[-1] <= high


def test_many_versions_keep_their_names_apart():
    many = [plots.Mark(f"v{n}", n, 100.0 / (n + 1), "accepted", "") for n in range(60)]
    chart = plots.trajectory(many, 1.5)
    assert len(marks(chart)) == 60 and len(chart.x.ticks()) <= 10
    cloud = plots.roofline([dataclasses.replace(m, at=2.0) for m in many], 2.0, [("documented", 4000.0, 800.0)], None)
    heights = sorted(
        float(t.get("y")) for t in ElementTree.fromstring(plots.svg(cloud)).iter("text") if re.match("v[1-9]", t.text)
    )
    assert len(heights) > 3 and all(b - a >= plots.LINE_HEIGHT for a, b in itertools.pairwise(heights))
    assert plots.apart([10.0, 12.0, 80.0]) == [10.0, 23.0, 80.0]


# --- explorations -------------------------------------------------------------------------------------------------


def test_an_exploration_has_a_plot_and_a_table_best_first(session):
    explored(session, "e1")
    (chart,) = (chart for chart in page_of(session).charts() if chart.name == "exploration_e1")
    assert [mark.name for mark in chart.marks] == ["1", "2", "3", "4", "5", "6", "7"]
    assert [mark.kind for mark in chart.marks] == ["accepted"] * 3 + ["not judged"] + ["rejected"] * 3
    leader, *_, wrong = chart.marks
    assert (leader.low, leader.value, leader.high, leader.best) == (9.9, 10.0, 10.2, True) and wrong.value is None
    assert [line.name for line in chart.lines] == ["40 us eager"] and chart.y.high > 40
    reader = read_page(session)
    assert "4 of 7 candidates right" in reader.text and "a plan cites a row as explore/e1.json#NAME" in reader.text
    rows = page_of(session).markdown().split("| place |")[1].split("\n\n")[0].splitlines()[2:]
    assert rows[0].startswith("| opponent | eager | OK | 40.00 us")
    assert rows[1].startswith("| 1 | row\\[BLOCK=128,WARPS=1\\] | OK | 10.00 us (p20 9.90 to p80 10.20) | 4.000x (95 %")
    assert rows[4].startswith("| 4 | ") and "| OK, dropped as slower |" in rows[4]
    assert "misspelt | RUNTIME" in page_of(session).markdown() and "no attribute 'lod'" in reader.text


def test_a_recorded_exploration_that_timed_nothing_has_a_table_and_no_plot(session):
    (session.root / "explore").mkdir()
    shutil.copyfile(FIXTURES / "exploration" / "e1.json", session.root / "explore" / "e1.json")
    page = page_of(session)
    assert (
        "Nothing was timed." in page.markdown() and "| 7 | row\\[BLOCK=64,WARPS=4\\] | NONFINITE |" in page.markdown()
    )
    assert not [chart for chart in page.charts() if chart.name.startswith("exploration")]


def test_the_latest_exploration_stands_open_and_the_earlier_ones_behind_a_line(session):
    for name in ("e1", "e2", "e10"):
        explored(session, name)
    (section,) = (section for section in page_of(session).sections if section.title == "Explorations")
    folds = [block.title.split(":")[0] for block in section.blocks if isinstance(block, document.Fold)]
    assert folds == ["e2", "e1"] and section.blocks[0].rows[0][1].startswith("e10: ")


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"rows": []}', '{"rows": [{"name": 1}]}', '{"rows": [{"latency_us": {"median": "x"}}]}']
)
def test_a_broken_exploration_is_named(session, text):
    explored(session, "e1")
    (session.root / "explore" / "e2.json").write_text(text)
    assert gather.gather(session).gaps == ["explore/e2.json is no exploration; explore_kernels.py writes these files"]
    assert "exploration_e1" in [chart.name for chart in page_of(session).charts()]


@pytest.mark.parametrize("value", [-1, 0, 10**299, True, "x"])
def test_any_number_in_an_exploration_leaves_a_page(session, value):
    file = explored(session, "e1")
    content = json.loads(file.read_text())
    content["rows"][1]["latency_us"] = {"median": value, "p20": value, "p80": value, "n": 3}
    file.write_text(json.dumps(content))
    for chart in page_of(session).charts():
        ElementTree.fromstring(plots.svg(chart))
    assert bool(gather.gather(session).gaps) == (value != 0 or value is True)


def test_an_exploration_of_a_masked_round_stays_hidden(matmul):
    for name in ("e1", "e2"):
        explored(matmul, name)
    matmul.plan("v1").write_text("## Evidence\nexplore/e2.json#row[BLOCK=128,WARPS=1] is 4.0x as fast\n")
    RecordStore(matmul).set_masked(["v1"], True)
    assert [exploration.name for exploration in gather.gather(matmul).explorations] == ["e1"]


def test_hostile_names_of_candidates_stay_text(session):
    file = explored(session, "e1")
    content = json.loads(file.read_text())
    for row in content["rows"]:
        row["name"] += HOSTILE
        row["error"], row["status"] = HOSTILE, row["status"] if row["opponent"] else HOSTILE
    file.write_bytes(json.dumps({**content, "device": HOSTILE, "against": HOSTILE}).encode())
    page = page_of(session)
    assert {"script", "img"}.isdisjoint(read(page.html()).tags)
    for chart in page.charts():
        ElementTree.fromstring(plots.svg(chart))


# --- hostile strings ----------------------------------------------------------------------------------------------


def hostile_session(session: workspace.Workspace) -> workspace.Workspace:
    """Everything that an agent, a kernel or a profile can write, made by hand to break out of the page."""
    named = {HOSTILE: MATMUL, "default": MATMUL}
    target = {"workload": HOSTILE, "metric": "tflops", "target": 1, "unit": "TFLOPS", "basis": HOSTILE}
    notes = task(work=named, shapes={HOSTILE: HOSTILE}, additional_notes=HOSTILE, framework=HOSTILE, targets=[target])
    session.update_readme(notes, {})
    text = session.readme.read_text().split("\n", 1)[1]
    session.readme.write_bytes(f"# {' '.join(HOSTILE.split())}\n{text}".encode("utf-8", "replace"))
    session.reference.write_bytes(HOSTILE.encode("utf-8", "replace"))
    session.kernel.write_bytes(HOSTILE.encode("utf-8", "surrogatepass"))
    lesson = dict.fromkeys(("error_type", "error_message", "root_cause", "fix_applied", "lesson"), HOSTILE)
    where = {"source_type": "public-web", "path_or_url": "javascript:alert(1)", "description": HOSTILE}
    for version, result in (("v0", "PASS"), ("v1", "FAIL")):
        put(
            session,
            version,
            result,
            device=HOSTILE,
            performance=timed(
                10, HOSTILE if version == "v1" else None, latency_us_by_workload={HOSTILE: 1.0}, tflops=5.0
            )
            | {"gpu_state": {"throttle_reasons": [HOSTILE]}},
            optimization=dict.fromkeys(empty("v0").to_json()["optimization"], HOSTILE),
            profile_evidence={
                "tool_used": HOSTILE,
                "evidence_summary": HOSTILE,
                "evidence_chain": f"{HOSTILE} -> {HOSTILE}",
            },
            correctness={"summary": HOSTILE},
            quality_gate={"failure_reason": HOSTILE if result == "FAIL" else None},
            pitfalls_and_fixes=[lesson],
            references=[where],
        )
    table = "\n".join(f"| {' | '.join(row)} |" for row in ([HOSTILE] * 4, ["---"] * 4, [HOSTILE] * 4, ["finding", ""]))
    session.plan("v1").write_bytes(f"## Evidence\n\n{table}\n".encode("utf-8", "replace"))
    (session.root / "rejected").mkdir()
    shutil.copyfile(session.kernel, session.root / "rejected" / "v1_kernel.py")
    shutil.copytree(EXAMPLE / "profiles" / "v0", session.root / "profiles" / "v0")
    profile = json.loads((EXAMPLE / "profiles/v0/annotation/metrics.json").read_text())
    for kernel in profile["kernels"]:
        kernel["name"] = HOSTILE
    params = json.loads((EXAMPLE / "profiles/v0/annotation/params.json").read_text())
    for name, value in (("metrics", profile), ("params", {**params, "driver": HOSTILE, "torch": HOSTILE})):
        (session.root / f"profiles/v0/annotation/{name}.json").write_text(json.dumps(value))
    return session


@pytest.fixture
def hostile(session):
    return hostile_session(session)


def test_hostile_strings_stay_text(hostile, example):
    page = page_of(hostile).html()
    reader = read(page)
    assert reader.tags <= example.tags | {"rect", "span"}
    assert {name for name, _ in reader.attributes} <= {name for name, _ in example.attributes} | {"title"}
    assert {v for n, v in reader.attributes if n == "href"} == {"#v0", "#v1"}
    assert reader.styles == Reader(page_of(workspace.Workspace(EXAMPLE)).html()).styles
    assert reader.text.count("<script>alert(1)</script>") > 20 and "@BODY@" in reader.text
    assert page.encode("utf-8") and not re.search("[\0\u202e\ud800]", page) and "\\ud800" in reader.text
    for chart in page_of(hostile).charts():
        ElementTree.fromstring(plots.svg(chart))


def test_hostile_strings_stay_text_in_markdown_too(hostile):
    text = page_of(hostile).markdown()
    assert text.encode("utf-8") and not re.search("[\0\u202e\ud800]", text)
    outside, fence = [], None
    for line in text.split("\n"):
        if fence is None and (opened := re.match(r"`{3,}(?=python$|diff$)", line)):
            fence = opened[0]
        elif fence is not None and set(line) == {"`"} and len(line) >= len(fence):  # as CommonMark closes it
            fence = None
        elif fence is None:
            outside.append(re.sub(r"(`+) ?.*?[^`] ?\1(?!`)|\\.", "", line))  # code spans, escaped characters
    assert fence is None and len(outside) > 50
    assert not [line for line in outside if re.search(r"[<\[]", line)]
    tables = [list(lines) for is_row, lines in itertools.groupby(outside, lambda line: line.startswith("|")) if is_row]
    assert len(tables) >= 10 and all(len({line.count("|") for line in table}) == 1 for table in tables)


def test_hostile_names_stay_text_in_plots():
    words = HOSTILE.split("\0")[0]
    mark, line = plots.Mark(words, 1.0, 1.0, "accepted", words), plots.Line(words, "floor", ((0.0, 1.0), (2.0, 1.0)))
    axis = plots.Axis(words, 0.0, 2.0)
    for x in (axis, dataclasses.replace(axis, names=(words, words))):
        drawn = ElementTree.fromstring(plots.svg(plots.Chart("x", words, x, axis, (line,), (mark,))))
        assert {element.tag for element in drawn.iter()} <= {
            "svg",
            "title",
            "text",
            "line",
            "path",
            "polyline",
            "g",
            "circle",
        }


def test_a_long_name_is_shortened_in_the_middle_and_whole_in_its_title():
    name = f"kernel_cutlass_{'tensorptrbf16gmem_' * 9}32_8_0"
    reader = read(document.Facts([("Kernel", document.Name(name)), ("Short", document.Name("strip"))]).html())
    assert ("title", name) in reader.attributes and reader.attributes == [("title", name)]
    assert (
        "kernel_cutlass_tensorptr…" in reader.text
        and reader.text.endswith("32_8_0 Short strip")
        and name not in reader.text
    )
    assert name in document.Facts([("Kernel", document.Name(name))]).markdown()


def test_every_cell_names_its_column_for_cards():
    reader = read(document.Table(("version", '"><b>'), [("v0", "x")], linked=True).html())
    assert [value for name, value in reader.attributes if name == "data-head"] == ["version", '"><b>']


def test_placeholders_are_filled_once():
    page = document.Page("@BODY@", "@TITLE@", [document.Section("s", [document.Text("@SUBTITLE@")])]).html()
    reader = read(page)
    assert reader.text == "@BODY@ @BODY@ @TITLE@ s @SUBTITLE@"


@pytest.mark.parametrize("words", ["a `b` c", "`", "``` x", "a``"])
def test_code_spans_hold_backticks(words):
    text = document.quoted(words)
    fence = re.match("`+", text)[0]
    assert text.endswith(fence) and fence not in words and words in text


# --- a browser ----------------------------------------------------------------------------------------------------


def load(page: Path, picture: Path, width: int, dark: bool) -> str:
    """What Chromium's console says of a file, and a picture of it."""
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    command += [*scheme, f"--user-data-dir={picture.parent / 'profile'}", f"--window-size={width},2400"]
    done = subprocess.run(
        [*command, f"--screenshot={picture}", page.as_uri()], capture_output=True, text=True, timeout=120
    )
    return "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_a_browser_opens_it_without_a_word(hostile, tmp_path):
    pages = {"example": page_of(workspace.Workspace(EXAMPLE)), "hostile": page_of(hostile)}
    for name, page in pages.items():
        bundle.write_text(tmp_path / f"{name}.html", page.html())
    pictures = {}
    for name, width, dark in (
        ("example", 390, False),
        ("example", 390, True),
        ("example", 1280, False),
        ("example", 1280, True),
        ("hostile", 1280, True),
    ):
        picture = tmp_path / f"{name}_{width}_{dark}.png"
        assert load(tmp_path / f"{name}.html", picture, width, dark) == ""
        pictures[name, width, dark] = picture.read_bytes()
        assert int.from_bytes(pictures[name, width, dark][16:20], "big") == width  # of the PNG's header
    assert len(set(pictures.values())) == len(pictures)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_that_check_sees_a_script_that_the_policy_stops(tmp_path):
    page = document.Page("x", "y", []).html().replace("</body>", "<script>alert(1)</script></body>")
    bundle.write_text(tmp_path / "x.html", page)
    assert "Content Security Policy" in load(tmp_path / "x.html", tmp_path / "x.png", 390, False)


@pytest.mark.parametrize("name", ["kernel.py", "README.md", "reference.py"])
def test_only_a_report_is_replaced(session, name, run_here):
    before = (session.root / name).read_bytes()
    for form in ([], ["--markdown"]):
        done = run_here("render_report.py", session.root, "--out", session.root / name, *form)
        assert done.returncode == 2 and "is a file of something else" in done.stderr
    assert (session.root / name).read_bytes() == before
    for form in ([], [], ["--markdown"], ["--markdown"]):
        assert run_here("render_report.py", session.root, "--out", session.root / "page", *form).returncode == 0


def test_what_remains_of_an_edited_kernel_is_not_nothing(session, run_here):
    session.kernel.write_text(session.kernel.read_text() + "# edited\n")
    assert "no target is open" not in run_here("render_report.py", session.root, "--markdown").stdout


def test_what_became_no_version_of_an_unattended_run_is_told(ready, run_here):
    (ready.root / ".loop").mkdir()
    lines = [
        {"at": "2026-11-22T01:00:00Z", "round": 1, "of": "round1-0", "outcome": "timed out", "message": HOSTILE},
        {"at": "2026-11-22T01:01:00Z", "round": 1, "of": "v1", "outcome": "accepted", "message": "FASTER"},
        {"at": "2026-11-22T01:02:00Z", "round": 1, "of": None, "outcome": "stop", "message": "1 rounds are over"},
        {
            "at": "2026-11-22T01:03:00Z",
            "round": 1,
            "of": "v1 against v0",
            "outcome": "final",
            "message": "SLOWER, 0.5x",
        },
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines) + "{\n"
    (ready.root / ".loop" / "rounds.jsonl").write_text(text)
    page = run_here("render_report.py", ready.root, "--markdown").stdout
    part = page.split("## Unattended rounds")[1].split("\n## ")[0]
    assert "Stopped: 1 rounds are over." in part and "1 timed out" in part and "FASTER" not in part
    assert "| v1 against v0 | SLOWER, 0.5x |" in part
    assert "rounds.jsonl:5 is not a line of a round" in page
