"""Ceilings of tensor operations: the rows on the page, what roofline, targets, goal and citations make of them. The
measurements are stood in for; test_gpu.py makes some."""

import contextlib
from dataclasses import replace

import pytest
from conftest import BUNDLE, run_tool, tool_json, with_changes
from kernelopt.device import gpu
from kernelopt.errors import UsageError
from kernelopt.hardware import roofline, wiki, wiki_checks
from kernelopt.hardware.card import Card
from kernelopt.hardware.work import OtherArithmetic, Work
from kernelopt.measure import card_rates, tensor_rates
from kernelopt.session import ceiling_rows, platforms, roofline_section, stop_conditions, target_setting
from kernelopt.session.benchmark_reports import Ceiling, Rate, RestedAndSustained, ShapeRate
from kernelopt.session.ceiling_report import TensorCeiling
from test_calibration import STATE, measured, rate, written

WIKI = BUNDLE / "gpu-wiki"
FLOPS = 2 * 4096**3
DEVICE = Card("NVIDIA H200", "GPU-0", "580.1")
SCALES = OtherArithmetic(k_block=128, fp32_fma=1)


def report(dtype: str, flops: int, cold_us: float, other: OtherArithmetic | None = None) -> dict:
    """What the job tensor_ceiling gives, at figures that no card has."""

    def part(us: float) -> dict:
        return {"median": us, "window": [0.0, 1.0], "kernel_clock_mhz": 1555.0, "start_up_us": 0.0}

    parts = {"cold": {**part(cold_us), "p20": cold_us - 1, "p80": cold_us + 1, "n": 9}}
    parts |= {"burst": part(0.9 * cold_us), "sustained": part(1.1 * cold_us)}
    known = {"dtype": dtype, "instruction": "wgmma", "flops": flops, "done_flops": flops, "relative_error": 1e-4}
    return {**known, **parts, "other": other and {**other.to_json(), "fmas_per_thread": 16}}


def made(sent: dict) -> TensorCeiling:
    return TensorCeiling.from_json(sent, dict.fromkeys(("cold", "burst", "sustained"), STATE))


def ceiling(dtype: str = "bf16", flops: int = FLOPS, us: float = 160.0, other: OtherArithmetic | None = None):
    return made(report(dtype, flops, us, other))


@pytest.fixture
def stood_in(monkeypatch):
    """A card on which the bare operations take 160 us, 200 us beside other arithmetic, and a library's product reaches
    700 TFLOPS."""
    library = RestedAndSustained("bf16", 4096, rate(700.0), 650.0)

    def job(kind: str, **arguments):
        if kind == "product_rates":
            return library
        assert kind == "tensor_ceiling"
        other = arguments["other"] and OtherArithmetic(**arguments["other"])
        return ceiling(arguments["dtype"], arguments["flops"], 200.0 if other else 160.0, other)

    monkeypatch.setattr(card_rates, "jobs", lambda _: contextlib.nullcontext((DEVICE, job)))
    monkeypatch.setattr(gpu, "identify", lambda: DEVICE)


@pytest.fixture
def product(session):
    """A workspace whose problem is a bf16 product of 4096^3."""
    work = Work(flops=FLOPS, bytes_in=2 << 25, bytes_out=1 << 25, bytes_min=3 << 25, dtype="bf16", source="given")
    session.update_readme(with_changes(session.task(), work={"default": work.to_json()}), {})
    return session


def test_rates_are_of_the_operations_done_and_times_of_the_problems_own():
    rounded = made({**report("bf16", 90, 10.0), "done_flops": 100})
    assert rounded.rate("cold") == pytest.approx(100 / 10 / 1e6) and rounded.time_us("cold") == pytest.approx(9)
    text = "\n".join(ceiling_rows.lines(ceiling()))
    assert "160.0 us, 859 TFLOPS; SM 1555 MHz in the kernel, 690 W, throttled by sw_power_cap" in text


def test_what_was_taken_off_is_stated_in_the_report_the_object_and_the_note():
    sent = report("bf16", FLOPS, 169.0)
    sent["cold"]["start_up_us"] = 9.0
    without = made(sent)
    assert without.time_us("cold") == pytest.approx(160.0) and without.cold.p20_us == pytest.approx(159.0)
    assert without.to_json()["start_up_us"] == {"cold": 9.0, "burst": 0.0, "sustained": 0.0}
    text = "\n".join(ceiling_rows.lines(without))
    assert "cold: 160.0 us, 859 TFLOPS; 9.0 us of start-up taken off, SM 1555 MHz" in text
    assert text.count("taken off") == 1  # nothing is taken off sustained times
    cold, _, sustained = ceiling_rows.rows(without)
    assert "L2 flushed before each call; p20 853.7, p80 864.4; 9.0 us of start-up taken off" in cold
    assert "start-up" not in sustained


def test_a_ceiling_goes_before_a_librarys_rate_and_becomes_the_floor():
    page = wiki.product("H200")
    by_library = roofline.bound(FLOPS, 3 << 25, roofline.roof(page, "bf16"))
    assert by_library.library_rate and by_library.bound == "compute"
    text = ceiling_rows.page_with([ceiling()], ceiling_rows.new_page(page, DEVICE), DEVICE, "2026-11-22")
    own = wiki.parse_page(text, platforms.CALIBRATION, platforms.WORKSPACE)
    assert set(own.rows) == {f"measured_bf16_tensor_ceiling{end}" for end in ("", "_burst", "_sustained")}
    assert wiki_checks.sources(own, text) == []
    both = platforms.calibrated(page, own)
    floor = roofline.bound(FLOPS, 3 << 25, roofline.roof(both, "bf16"))
    assert not floor.library_rate and floor.floor_us == pytest.approx(160.0, rel=1e-3)
    assert roofline.roof(both, "fp16").compute.metric == "measured_fp16_matmul"  # no other dtype borrows it


def test_beside_other_arithmetic_there_is_another_floor_for_tasks_that_have_it_alone():
    page = wiki.product("H200")
    measured_here = [ceiling(), ceiling(us=200.0, other=SCALES)]
    text = ceiling_rows.page_with(measured_here, ceiling_rows.new_page(page, DEVICE), DEVICE, "2026-11-22")
    both = platforms.calibrated(page, wiki.parse_page(text, platforms.CALIBRATION, platforms.WORKSPACE))
    bare = Work(flops=FLOPS, bytes_in=1, bytes_out=1, bytes_min=2, dtype="bf16", source="given")
    scaled = Work.from_json({**bare.to_json(), "other_arithmetic": SCALES.to_json()})
    assert roofline.roof_for(both, bare).compute.metric == "measured_bf16_tensor_ceiling"
    assert roofline.roof_for(both, scaled).compute.metric == "measured_bf16_problem_ceiling"
    assert Work.from_json(scaled.to_json()) == scaled and "other_arithmetic" not in bare.to_json()
    note = roofline.roof_for(both, scaled).compute.note
    assert "beside 1 fp32 multiply-add per element and 128 of k" in note


def test_rows_join_a_calibration_and_replace_their_former_selves_alone(tmp_path):
    page = wiki.product("H200")
    path = written(tmp_path, measured("NVIDIA H200"), page, page.limits)
    before = platforms.read(path)
    for us in (160.0, 150.0):
        text = ceiling_rows.page_with([ceiling(us=us)], platforms.unsealed_text(path), DEVICE, "2026-11-22")
        path.write_text(text)
    after = platforms.read(path)
    assert after.row("measured_bf16_tensor_ceiling").value == pytest.approx(FLOPS / 150e6, abs=0.6)
    assert {name: row.citation for name, row in before.rows.items()}.items() <= {
        name: row.citation for name, row in after.rows.items()
    }.items()
    assert text.count("[ceiling]:") == 1 and "## Bandwidth by size" in text
    path.write_text(text.replace("| 916", "| 999"))
    with pytest.raises(UsageError, match="not as"):
        platforms.unsealed_text(path)


def test_a_compute_bound_session_from_a_librarys_rate_to_its_floor(product, run_here, stood_in):
    done = run_here("compute_utilization.py", "--workspace", product.root, "--set-targets")
    assert "library" not in done.stderr and "matmul, a library's rate, which is no floor (" in done.stdout
    (target,) = product.task().targets
    assert target.basis.startswith(
        "measured_bf16_tensor_ceiling_sustained: 839 TFLOPS <- <gpu-wiki>/docs/hardware/h200.md"
    )
    assert target.target == pytest.approx(0.9 * 839)
    assert stop_conditions.stop_line(target).endswith(" (of other cards of that name)")
    assert tool_json("check_citations.py", product.root, run=run_here)["problems"] == []
    assert platforms.floor_share_pct(product, product.task(), 160.0) is None
    result = tool_json("measure_ceiling.py", "--workspace", product.root, "--set-targets", run=run_here)
    assert result["bandwidth"] is None and result["with_other_arithmetic"] is None
    tensor, library = result["tensor"], result["library_rate"]
    assert tensor["cold_us"] == 160.0 and tensor["burst_us"] == 144.0 and tensor["sustained_us"] == 176.0
    assert tensor["sm_clock_mhz"]["cold"] == 1555.0 and library["rested_tflops"] == 700.0
    (target,) = product.task().targets
    assert target.basis.startswith("measured_bf16_tensor_ceiling_sustained: 780.9 TFLOPS <- <workspace>/calibration.md")
    assert target.target == pytest.approx(0.9 * 780.9) and stop_conditions.reach(target) == ""
    assert platforms.floor_share_pct(product, product.task(), 320.0) == pytest.approx(50, rel=1e-3)
    assert platforms.floor_share_pct(product, product.task(), None) is None
    assert "ridge point 200: compute-bound, floor 160.0" in product.readme.read_text()
    assert tool_json("check_citations.py", product.root, run=run_here)["problems"] == []
    done = run_here("compute_utilization.py", "--workspace", product.root, "--set-targets")
    assert "library" not in done.stderr + done.stdout and "floor 160.0" in done.stdout
    assert tool_json("check_citations.py", product.root, run=run_here)["problems"] == []


@pytest.mark.parametrize("option", ["--set-targets", "--set-target"])
@pytest.mark.parametrize("command", ["compute_utilization.py", "measure_ceiling.py"])
def test_the_target_of_what_bounds_a_problem_replaces_its_former_rates_alone(
    product, run_here, stood_in, command, option
):
    """Each command had a rule of its own: the one lost the latency that a person asked for, the other left the
    bandwidth of a problem that arithmetic bounds, which no version could reach."""
    stale = {"workload": "default", "metric": "bandwidth_gbps", "target": 4000, "unit": "GB/s", "basis": "given"}
    asked = {"workload": "default", "metric": "latency_us", "target": 250, "unit": "us", "basis": "given"}
    other = {**stale, "workload": "tall"}
    product.update_readme(with_changes(product.task(), targets=[stale, asked, other]), {})
    tool_json(command, "--workspace", product.root, option, run=run_here)
    first, *kept = product.task().targets
    assert (first.workload, first.metric) == ("default", "tflops")
    assert [target.to_json() for target in kept] == [asked, other]
    stop_lines = product.readme.read_text().split("## Stop Conditions")[1]
    assert "tflops >= " in stop_lines and "latency_us <= 250 us, given" in stop_lines and "tall: band" in stop_lines


@pytest.mark.parametrize(
    ("dtype", "intensity", "metric"),
    [("int8", 330, "bandwidth_gbps"), ("int8", 600, "tflops"), ("bf16", 240, "bandwidth_gbps")],
)
def test_no_target_asks_for_more_than_memory_brings(dtype, intensity, metric):
    """At the rate of a library such a problem is compute-bound, at that of the bare operations memory bounds it."""
    least = 100 << 20
    work = Work(flops=intensity * least, bytes_in=least, bytes_out=0, bytes_min=least, dtype=dtype, source="given")
    target = target_setting.of_roof("default", work, roofline.roof(wiki.product("H100 SXM"), dtype))
    assert target.metric == metric


@pytest.mark.parametrize(("intensity", "is_said"), [(1, True), (8192, False)])
def test_that_the_bytes_fit_in_the_l2_is_said_where_they_are_the_bound(intensity, is_said):
    """Its advice, to measure a target that can be met, sent a compute-bound session to the GPU for nothing."""
    work = Work(flops=intensity << 25, bytes_in=1 << 25, bytes_out=0, bytes_min=1 << 25, dtype="bf16", source="given")
    line = roofline_section.line("default", work, roofline.roof(wiki.product("H100 SXM"), "bf16"))
    assert ("fit in the L2" in line) is is_said


def test_no_target_asks_for_more_than_the_sustained_rate_of_this_card(tmp_path):
    """By its cold rate memory bounds this problem, by the lower sustained one arithmetic does."""
    page = wiki.product("H100 SXM")
    text = ceiling_rows.page_with([ceiling(us=152.0)], ceiling_rows.new_page(page, DEVICE), DEVICE, "2026-11-22")
    own = wiki.parse_page(text, platforms.CALIBRATION, platforms.WORKSPACE)
    roof = roofline.roof(platforms.calibrated(page, own), "bf16")
    assert roof.sustained_compute.value < 280 * roof.bandwidth.value / 1e3 < roof.compute.value
    work = Work(flops=280 << 20, bytes_in=1 << 20, bytes_out=0, bytes_min=1 << 20, dtype="bf16", source="given")
    assert target_setting.of_roof("default", work, roof).metric == "tflops"


def test_what_such_cards_sustain_is_no_target_of_a_problem_with_other_arithmetic():
    page = wiki.product("H200")
    assert roofline.roof(page, "fp8").sustained_compute.metric == "measured_fp8_tensor_ceiling_sustained"
    assert roofline.roof(page, "fp8", other_arithmetic=True).sustained_compute is None


def test_what_a_library_sustains_on_this_card_is_a_librarys_rate_and_borrows_nothing_from_other_cards(tmp_path):
    assert roofline.is_library_rate("measured_bf16_matmul_sustained")
    page = wiki.product("H200")
    own = platforms.calibrated(page, platforms.read(written(tmp_path, measured("NVIDIA H200"), page, page.limits)))
    assert roofline.roof(own, "bf16").sustained_compute.metric == "measured_bf16_matmul_sustained"


def test_a_target_by_a_librarys_rate_says_so(product, run_here):
    """The wiki has no rate that this card sustains in fp16."""
    task = product.task()
    product.update_readme(replace(task, work={"default": replace(task.work_of(), dtype="fp16")}), {})
    done = run_here("compute_utilization.py", "--workspace", product.root, "--set-targets")
    assert "a library's rate, which is no floor, and" in done.stderr and "measure_ceiling.py" in done.stderr
    assert "matmul, a library's rate, which is no floor (" in done.stdout
    assert "(a library's rate, which is no floor)" in done.stdout
    (goal,) = tool_json("check_goal.py", product.root, code=1, run=run_here)["targets"]
    assert goal["library_rate"] and not goal["documented"]


def test_a_ceiling_that_sets_no_target_renews_the_roofline_too(product, run_here, stood_in):
    """It left the former ridge point there, and the gate refused the workspace for it."""
    run_here("measure_ceiling.py", "--workspace", product.root)
    assert "ridge point" not in product.readme.read_text()  # Step 0 comes yet
    run_here("compute_utilization.py", "--workspace", product.root, "--set-targets")
    (product.root / platforms.CALIBRATION).unlink()
    product.update_readme(replace(product.task(), calibration=None), {})
    run_here("compute_utilization.py", "--workspace", product.root, "--set-targets")
    assert "matmul, a library's rate, which is no floor (" in product.readme.read_text()
    run_here("measure_ceiling.py", "--workspace", product.root)
    text = product.readme.read_text()
    assert "compute-bound, floor 160.0" in text and "measured_bf16_tensor_ceiling: 859 TFLOPS" in text
    assert tool_json("check_citations.py", product.root, run=run_here)["problems"] == []


def test_the_tasks_other_arithmetic_is_kept_and_its_ceiling_is_the_floor(product, run_here, stood_in):
    stated = ("--per-k-block", 128, "--fp32-fma", 1)
    result = tool_json("measure_ceiling.py", "--workspace", product.root, *stated, run=run_here)
    assert result["with_other_arithmetic"]["cold_us"] == 200.0
    assert result["with_other_arithmetic"]["other_arithmetic"] == {"k_block": 128, "fp32_fma": 1, "exp2": 0}
    assert product.task().work_of().other_arithmetic == SCALES
    again = tool_json("measure_ceiling.py", "--workspace", product.root, run=run_here)  # the Task block says it
    assert again["with_other_arithmetic"]["cold_us"] == 200.0
    floor = platforms.roof_of_task(product, product.task()).compute
    assert floor.metric == "measured_bf16_problem_ceiling" and floor.value == pytest.approx(687, abs=1)


def test_the_ridge_point_of_a_task_with_other_arithmetic_is_that_of_its_own_ceiling(product, run_here, stood_in):
    """The gate refused it, as that of the bare tensor operations was wanted: in a trial an agent lost a run to this."""
    run_here("compute_utilization.py", "--workspace", product.root, "--set-targets")
    stated = ("--per-k-block", 128, "--fp32-fma", 1, "--set-targets")
    run_here("measure_ceiling.py", "--workspace", product.root, *stated)
    assert "ridge point 160:" in product.readme.read_text() and "floor 200.0" in product.readme.read_text()
    assert tool_json("check_citations.py", product.root, run=run_here)["problems"] == []
    product.readme.write_text(
        product.readme.read_text().replace("ridge point 160:", "ridge point 200:")
    )  # the bare ones'
    (problem,) = tool_json("check_citations.py", product.root, code=1, run=run_here)["problems"]
    assert "'200' is not the ridge point that compute_utilization.py prints for this task: 160.0" in str(problem)


def test_what_cannot_be_measured_is_refused_with_a_reason(product, run_here, stood_in):
    def said(*arguments) -> str:
        done = run_here("measure_ceiling.py", *arguments)
        assert done.returncode == 2
        return done.stderr

    assert "is no floor" in said("--flops", 8, "--dtype", "fp32")
    assert "pass --per-k-block" in said("--flops", 8, "--dtype", "fp8", "--fp32-fma", 1)
    assert "--fp32-fma N or --exp2 N" in said("--flops", 8, "--dtype", "fp8", "--per-k-block", 128)
    assert "--workspace says everything" in said("--workspace", product.root, "--flops", 8)
    assert "pass --workspace" in said("--dtype", "bf16")
    assert "--set-targets goes with" in said("--flops", 8, "--dtype", "bf16", "--set-targets")
    assert (
        run_tool("measure_ceiling.py", "--flops", 8, "--dtype", "bf16", env={"CUDA_VISIBLE_DEVICES": "-1"}).returncode
        == 3
    )


def test_the_former_name_measures_bandwidth_alone_and_keeps_its_keys(product, run_here, monkeypatch):
    best = ShapeRate(1024, 4, None, Rate(4000.0, 3990.0, 4010.0, 9))
    ceiling = Ceiling("GB/s", 0, 0, (best,), best, [0.0, 1.0])
    monkeypatch.setattr(card_rates, "run", lambda *_: ("NVIDIA H200", ceiling))
    monkeypatch.setattr(gpu, "identify", lambda: DEVICE)
    found = tool_json("measure_bandwidth_ceiling.py", "--workspace", product.root, run=run_here)
    wanted = {"device": "NVIDIA H200", **ceiling.to_json(), "dtype": "bf16", "latency_us": (3 << 25) / 4000.0 / 1e3}
    assert found == wanted
    done = run_here("measure_bandwidth_ceiling.py", "--workspace", product.root, "--set-targets")
    assert done.returncode == 2 and "compute-bound" in done.stderr


def test_the_librarys_product_has_about_as_many_operations():
    assert tensor_rates.size_of(FLOPS) == 4096 and tensor_rates.size_of(8) == 1024


def test_the_time_at_the_sustained_rate_is_that_of_bare_operations_alone():
    """That of an H100's fp8, of other cards of that name; a memory-bound problem and a library's rate have none."""
    roof = roofline.roof(wiki.product("H100 SXM"), "fp8")
    used = roofline.utilization(855.0, 1_099_511_627_776, 369_229_824, roof)
    assert used.library_rate and used.sustained_us == pytest.approx(1_099_511.627776 / roof.sustained_compute.value)
    assert roofline.utilization(855.0, 1 << 20, 369_229_824, roof).sustained_us is None
    library = replace(roof, sustained_compute=replace(roof.sustained_compute, metric="measured_fp8_matmul_sustained"))
    assert roofline.utilization(855.0, 1 << 40, 369_229_824, library).sustained_us is None


def test_the_roofline_tells_the_time_at_the_sustained_rate_where_it_is_known():
    """Two agents measured a floor for 12 s each, since the line said how, though the target rested on this rate."""
    work = Work(flops=1 << 40, bytes_in=1 << 28, bytes_out=1 << 27, bytes_min=3 << 27, dtype="fp8", source="counted")
    roof = roofline.roof(wiki.product("H100 SXM"), "fp8")
    known = roofline_section.line("default", work, roof)
    assert known.endswith(f"({(1 << 40) / 1648e6:.2f} us at measured_fp8_tensor_ceiling_sustained)")
    unknown = roofline_section.line("default", work, replace(roof, sustained_compute=None))
    assert unknown.endswith("(measure_ceiling.py measures it)")
