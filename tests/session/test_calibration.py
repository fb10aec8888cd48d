"""Calibrations: the page, what a workspace makes of it, the command. The measurements are stood in for; test_gpu.py
makes some."""

import contextlib
import json

import pytest
from conftest import BUNDLE, run_tool, task, tool_json, with_changes
from kernelopt.device import gpu
from kernelopt.errors import Refused, UsageError
from kernelopt.hardware import wiki, wiki_checks
from kernelopt.hardware.card import Card, GpuState, MaxClocks, Spread
from kernelopt.hardware.work import Work
from kernelopt.measure import card_rates
from kernelopt.session import calibration, ceiling_rows, creation, platforms, workspace
from kernelopt.session.benchmark_reports import Bandwidth, BufferRate, Ceiling, Rate, RestedAndSustained, ShapeRate

WIKI = BUNDLE / "gpu-wiki"
STATE = GpuState(
    samples=9,
    sm_clock_mhz=Spread(1700, 1755, 1980),
    memory_clock_mhz=None,
    power_w=Spread(400.0, 690.0, 700.0),
    temperature_c=None,
    throttle_reasons=("sw_power_cap",),
    foreign_processes=(),
)


def rate(median: float) -> Rate:
    return Rate(median, 0.99 * median, 1.01 * median, 50)


def ceiling(median: float) -> Ceiling:
    best = ShapeRate(1024, 4, None, rate(median))
    return Ceiling("GB/s", 1, 1, (best,), best, [0.0, 1.0], STATE)


def product(dtype: str, rested: float, sustained: float) -> RestedAndSustained:
    return RestedAndSustained(dtype, 8192, rate(rested), sustained, STATE, STATE, STATE)


def measured(name: str, **said) -> calibration.Measured:
    """What a card of that name gave: figures that no card has."""
    rates = tuple(
        BufferRate(pattern, size, "cold", rate(size / 2**22 + number))
        for size in (1 << 20, 1 << 32)
        for number, pattern in enumerate(calibration.PATTERNS)
    )
    device = Card(name, "GPU-0", "580.1", MaxClocks(sm_clock_mhz=2610))
    shown = {"compute_capability": "8.9", "sm_count": 46, "l2_capacity": 36.0, "memory_capacity": 11.6}
    bandwidth = Bandwidth("GB/s", rates, [], [0.0, 1.0], shown, "2.11", "3.6", STATE)
    ceilings = {"copy": ceiling(900.0), "read": ceiling(1234.5)}
    products = {
        "bf16": product("bf16", 123.4, 99.0),
        "fp8": "RuntimeError: torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0",
        "int8": "CUDA error: something odd | happened",
    }
    return calibration.Measured(device, said, 700.0, bandwidth, {**ceilings, "write": "no"}, products)


RTX_4070 = {
    "compute_capability": "8.9",
    "sm_count": 46,
    "memory_capacity": 11.99,
    "memory_clock": 10501,
    "memory_bus_width": 192,
    "l2_capacity": 36.0,
    "boost_clock": 3105,
}
UNKNOWN = "NVIDIA GeForce RTX 4070 Imaginary"


def written(folder, found: calibration.Measured, page: wiki.Page | None = None, limits: wiki.Page | None = None):
    path = folder / platforms.CALIBRATION
    body = calibration.body(found, page, limits, "2026-11-22", "python tools/calibrate_gpu.py --workspace W")
    path.write_text(platforms.sealed(body))
    return path


@pytest.fixture
def unknown_card(tmp_path):
    return written(tmp_path, measured(UNKNOWN, **RTX_4070), limits=wiki.limit_pages(WIKI)["sm_89"])


def test_the_rows_of_a_known_card_go_before_the_wikis_and_borrow_nothing_else(tmp_path):
    page = wiki.product("H100 NVL")  # which has no measured rows
    path = written(tmp_path, measured("NVIDIA H100 NVL"), page, page.limits)
    own = platforms.read(path)
    assert own.platform == "H100 NVL" and set(own.rows) == {
        "measured_copy_bandwidth",
        "measured_read_bandwidth",
        "measured_write_bandwidth",
        "measured_bf16_matmul",
        "measured_bf16_matmul_sustained",
        "measured_fp8_matmul",
        "measured_int8_matmul",
    }
    both = platforms.known("H100 NVL", WIKI, own)
    assert both.row("measured_copy_bandwidth").value == 1024  # torch's, which was faster than the plain kernel
    assert both.row("measured_read_bandwidth").value == 1234  # the plain kernel's
    assert both.row("memory_bandwidth") == page.row("memory_bandwidth")
    assert not both.row("measured_fp8_matmul").known and both.row("measured_int8_matmul") is None
    assert both.limits == page.limits and both.file == page.file
    citation = both.row("measured_bf16_matmul").citation
    assert citation.startswith("measured_bf16_matmul: 123.4 TFLOPS <- <workspace>/calibration.md:L")
    line = path.read_text().splitlines()[int(citation.rpartition("L")[2]) - 1]
    assert line.startswith("| measured_bf16_matmul | 123.4 |") and "SM 1755 MHz, 690 W" in line
    assert platforms.known("H200", WIKI, own) == wiki.product("H200")  # another card's calibration counts for nothing


def test_what_the_card_lacks_and_what_failed_are_told_apart(tmp_path):
    own = platforms.read(written(tmp_path, measured(UNKNOWN)))
    assert own.rows["measured_fp8_matmul"].text == "UNSUPPORTED" and own.rows["measured_int8_matmul"].text == "UNKNOWN"
    assert "something odd / happened" in own.rows["measured_int8_matmul"].note


def test_a_card_without_a_page_has_one_and_the_wiki_finds_no_fault_in_it(unknown_card):
    own = platforms.known(UNKNOWN, WIKI, platforms.read(unknown_card))
    assert own.architecture == "Ada Lovelace" and own.limits.row("threads_per_sm").value == 1536
    assert own.row("memory_bandwidth").value == pytest.approx(504.0)  # the bus
    assert own.row("peak_fp32").value == pytest.approx(46 * 128 * 2 * 3105 / 1e6, rel=1e-3)
    assert not own.row("peak_bf16_tensor").known  # and no other product's
    assert wiki_checks.of_product(own) == []
    assert wiki_checks.sources(own, unknown_card.read_text()) == []


def test_where_nvml_tells_little_cuda_tells_the_rest(tmp_path):
    """WSL2, virtual machines, slices."""
    own = platforms.known(UNKNOWN, WIKI, platforms.read(written(tmp_path, measured(UNKNOWN))))
    assert (
        own.row("sm_count").value == 46 and own.limits_key() == "sm_89" and own.limits.row("warps_per_sm").value == 48
    )
    assert own.row("memory_bandwidth").citation == "memory_bandwidth: UNKNOWN (gpu-wiki not found)"


def test_a_page_that_was_edited_is_no_measurement(unknown_card):
    text = unknown_card.read_text()
    unknown_card.write_text(text.replace("| 123.4 |", "| 100 |"))
    with pytest.raises(UsageError, match="not as calibrate_gpu"):
        platforms.read(unknown_card)


def test_tf32_and_fp8_are_not_tried_where_there_are_no_tensor_cores_for_them():
    limits = wiki.limit_pages(WIKI)
    assert "tensor_core_types" in calibration.lacks("fp8", limits["sm_80"])
    assert calibration.lacks("tf32", limits["sm_75"]) and calibration.lacks("tf32", limits["sm_80"]) is None
    assert calibration.lacks("bf16", limits["sm_75"]) is None  # slow there, and that is what the card gives
    assert calibration.lacks("fp8", None) is None


@pytest.fixture
def stood_in(monkeypatch):
    """calibrate_gpu.py on a card of that name, whose jobs give what `measured` has."""

    def put(name: str, **said) -> None:
        found = measured(name, **said)

        def job(kind: str, **arguments):
            if kind == "bandwidth":
                return found.bandwidth
            if kind == "ceiling":
                pattern = "copy" if arguments["bytes_in"] == arguments["bytes_out"] else "read"
                return found.ceilings[pattern if arguments["bytes_in"] > 4096 else "copy"]
            if isinstance(one := found.products.get(arguments["dtype"], "not supported"), str):
                raise card_rates.Failed(one)
            return one

        monkeypatch.setattr(card_rates, "jobs", lambda _: contextlib.nullcontext((found.device, job)))
        monkeypatch.setattr(gpu, "identify", lambda: found.device)
        monkeypatch.setattr(gpu, "query", lambda: said)
        monkeypatch.setattr(gpu, "power_limit_w", lambda: 700.0)

    return put


def test_a_session_on_a_card_that_the_wiki_lacks(tmp_path, problem, run_here, stood_in):
    stood_in(UNKNOWN, **RTX_4070)
    made = creation.create(tmp_path, "new", problem["kernel"], problem["reference"], task(platform=None, arch=None))
    result = tool_json("calibrate_gpu.py", "--workspace", made.root, run=run_here)
    assert result["platform"] == UNKNOWN and result["page"] == str(made.root / "calibration.md")
    named = made.task()
    assert (named.platform, named.arch, named.calibration) == (UNKNOWN, "Ada Lovelace", "calibration.md")
    tool_json("estimate_work.py", "--workspace", made.root, run=run_here)
    tool_json("compute_utilization.py", "--workspace", made.root, "--set-targets", run=run_here)
    basis = made.task().targets[0].basis
    assert basis.startswith("measured_copy_bandwidth: 1024 GB/s <- <workspace>/calibration.md:L")
    looked_up = ("gpu_specs.py", "lookup", UNKNOWN, "measured_copy_bandwidth", "--workspace", made.root)
    assert tool_json(*looked_up, run=run_here)["citation"] == basis
    assert tool_json("check_citations.py", made.root, run=run_here)["problems"] == []
    platforms.check_platform(made, made.task(), UNKNOWN)
    with pytest.raises(UsageError, match="this GPU is NVIDIA H200"):
        platforms.check_platform(made, made.task(), "NVIDIA H200")


def test_citations_of_a_calibration_are_audited(tmp_path, problem, run_here, stood_in):
    stood_in("NVIDIA H200")
    made = creation.create(tmp_path, "known", problem["kernel"], problem["reference"], task())
    tool_json("calibrate_gpu.py", "--workspace", made.root, run=run_here)
    row = platforms.of_task(made, made.task()).row("measured_bf16_matmul")
    report = made.root / "baseline_report.md"

    def problems(line: str) -> list[str]:
        report.write_text(f"# Baseline\n\n{line}\n")
        found = run_here("check_citations.py", made.root, "--json")
        return [one["kind"] for one in json.loads(found.stdout)["problems"]]

    assert problems(row.citation) == []
    assert (
        problems(wiki.product("H200").row("measured_bf16_matmul").citation) == []
    )  # the wiki's row is there all the same
    assert problems(row.citation.replace("123.4", "150")) == ["wrong value"]
    page = made.root / "calibration.md"
    page.write_text(page.read_text().replace("| 123.4 |", "| 100 |"))
    assert problems("nothing") == ["platform"]


def test_a_new_calibration_keeps_the_ceilings_of_the_very_card(tmp_path, problem, run_here, stood_in):
    stood_in("NVIDIA H200")
    made = creation.create(tmp_path, "known", problem["kernel"], problem["reference"], task())
    page = made.root / "calibration.md"
    tool_json("calibrate_gpu.py", "--workspace", made.root, run=run_here)
    row = "| measured_bf16_tensor_ceiling | 870 | TFLOPS | [ceiling] | measured | wgmma; 9.0 us of start-up taken off |"

    def calibrated_again(uuid: str) -> tuple[str, str]:
        source = ceiling_rows.source(Card("NVIDIA H200", uuid, "580.1"), "2026-11-22")
        page.write_text(platforms.sealed(ceiling_rows.with_rows(platforms.unsealed_text(page), [row], source) + "\n"))
        done = run_here("calibrate_gpu.py", "--workspace", made.root)
        assert done.returncode == 0, done.stderr
        return source, done.stderr

    source, said = calibrated_again("GPU-0")
    own = platforms.read(page)
    assert "keeps this card's ceilings" in said and page.read_text().count(source) == 1
    assert own.row("measured_bf16_tensor_ceiling").value == 870 and own.row("measured_bf16_matmul").value == 123.4
    assert wiki_checks.sources(own, platforms.unsealed_text(page)) == []
    once = page.read_text()
    assert calibrated_again("GPU-0") and page.read_text() == once  # no row and no line is there twice
    _, said = calibrated_again("GPU-1")
    assert "another card's and are gone" in said and "[ceiling]" not in page.read_text()


def test_a_calibration_after_step_0_renews_the_roofline(session, run_here, stood_in):
    """It left the ridge point of the wiki's rows there, which the audit then refused."""
    stood_in("NVIDIA H200")
    work = Work(flops=2 << 36, bytes_in=2 << 25, bytes_out=1 << 25, bytes_min=3 << 25, dtype="bf16", source="given")
    session.update_readme(with_changes(session.task(), work={"default": work.to_json()}), {})
    run_here("compute_utilization.py", "--workspace", session.root, "--set-targets")
    before = session.readme.read_text()
    run_here("calibrate_gpu.py", "--workspace", session.root)
    after = session.readme.read_text()
    assert "<- <gpu-wiki>" in before and "<- <workspace>/calibration.md" not in before and before != after
    assert "<- <workspace>/calibration.md" in after
    assert tool_json("check_citations.py", session.root, run=run_here)["problems"] == []


def test_a_page_serves_other_workspaces_of_that_card_alone(tmp_path, problem, run_here, stood_in):
    stood_in("NVIDIA H100 80GB HBM3")
    page = tmp_path / "h100.md"
    tool_json("calibrate_gpu.py", "--out", page, run=run_here)
    tool_json("calibrate_gpu.py", "--out", page, run=run_here)  # its own may be replaced
    arguments = [problem["kernel"], "--reference", problem["reference"], "--root", tmp_path, "--calibration", page]
    done = run_tool("workspace_init.sh", "given", *arguments)
    assert done.returncode == 0, done.stderr
    made = workspace.Workspace(tmp_path / "kernel_opt_given")
    assert made.task().platform == "H100 SXM" and made.task().calibration == "calibration.md"
    assert platforms.of_task(made, made.task()).row("measured_bf16_matmul").value == 123.4
    done = run_tool("workspace_init.sh", "other", *arguments, "--platform", "H200")
    assert done.returncode == 2 and "is of H100 SXM, the platform is H200" in done.stderr
    notes = tmp_path / "notes.md"
    notes.write_text("mine")
    done = run_here("calibrate_gpu.py", "--out", notes)
    assert done.returncode == 2 and notes.read_text() == "mine"


def test_a_task_that_names_a_page_which_is_gone_says_so(session):
    session.update_readme(with_changes(session.task(), calibration="calibration.md"), {})
    with pytest.raises(UsageError, match="calibrate_gpu"):
        platforms.of_task(session, session.task())
    readme = session.readme.read_text()
    session.readme.write_text(readme.replace('"calibration.md"', json.dumps("../elsewhere.md")))
    with pytest.raises(UsageError, match="calibration"):
        session.task()


def test_no_other_product_stands_in(session):
    with pytest.raises(Refused, match="no other product stands in"):
        platforms.of_device("NVIDIA H100 80GB HBM3 MIG 1g.10gb", session, session.task())
