"""The pure functions: paired verdicts, acceptance, goals, roofline mathematics."""

import math
import random
from dataclasses import replace

import pytest
from conftest import BUNDLE, call_tool, tool_json
from kernelopt.errors import Refused, UsageError
from kernelopt.gate import acceptance
from kernelopt.hardware import roofline, wiki
from kernelopt.hardware.card import MaxClocks
from kernelopt.hardware.roofline import Utilization
from kernelopt.hardware.work import Work
from kernelopt.measure import pairing
from kernelopt.measure.pairing import Comparison, PairedTimes
from kernelopt.measure.verdict import Verdict
from kernelopt.session import record_store, stop_conditions, target_setting
from kernelopt.session.record import Record
from kernelopt.session.task import Target
from kernelopt.statuses import Speed, Status

PAGES = wiki.pages(BUNDLE / "gpu-wiki")
H200 = wiki.find("H200", PAGES)


def paired(ratio: float, noise: float, rounds: int = 180, seed: int = 0) -> list[PairedTimes]:
    """Times of a kernel and of one that takes `ratio` times as long, with a drift that both share; three processes."""
    generator = random.Random(seed)
    a, b = [], []
    for number in range(rounds):
        drift = 100 * (1 + 0.2 * math.sin(number / 9))
        a.append([drift * math.exp(generator.gauss(0, noise)) for _ in range(2)])
        b.append([drift * ratio * math.exp(generator.gauss(0, noise)) for _ in range(2)])
    return [PairedTimes(a[start::3], b[start::3]) for start in range(3)]  # three processes


@pytest.mark.parametrize(
    ("ratio", "noise", "verdict"),
    [
        (1.5, 0.01, "FASTER"),
        (1.03, 0.005, "FASTER"),
        (0.8, 0.01, "SLOWER"),
        (1.0, 0.002, "EQUAL"),
        (1.02, 0.2, "AMBIGUOUS"),
    ],
)
def test_verdicts(ratio, noise, verdict):
    comparison = pairing.compare(paired(ratio, noise))
    assert comparison.verdict == verdict
    low, high = comparison.ci95
    assert low <= comparison.speedup <= high
    assert Comparison.from_json(comparison.to_json()) == comparison


def test_what_noise_covers_is_not_called_equal():
    # Of the kernel's two calls in a round one is slow: it does not even equal itself.
    runs = [PairedTimes(turned(skewed(run.a_us)), run.b_us) for run in paired(1.2, 0.002)]
    comparison = pairing.compare(runs)
    assert comparison.aa_noise > 0.1 and comparison.verdict == Speed.AMBIGUOUS


def turned(rounds: list[list[float]]) -> list[list[float]]:
    return [pair if number % 4 < 2 else pair[::-1] for number, pair in enumerate(rounds)]


def skewed(rounds: list[list[float]]) -> list[list[float]]:
    return [[first * 1.2, second] for first, second in rounds]


def test_an_a_a_comparison_is_never_faster():
    verdicts = [pairing.compare(paired(1.0, noise, 60, seed)).verdict for noise in (0.01, 0.05) for seed in range(100)]
    assert "FASTER" not in verdicts and "SLOWER" not in verdicts


def test_a_drift_of_twenty_percent_does_not_hide_three_percent():
    verdicts = [pairing.compare(paired(1.03, 0.01, seed=seed)).verdict for seed in range(50)]
    assert verdicts.count("FASTER") >= 48


def test_the_same_times_give_the_same_verdict():
    times = paired(1.01, 0.01)
    assert pairing.compare(times) == pairing.compare(times)


OK = Verdict(Status.OK, "NVIDIA H200", "OK")
FASTER = Comparison(Speed.FASTER, 1.2, (1.19, 1.21), (), 0.001, 0.003, 720)
SLOWER = replace(FASTER, verdict=Speed.SLOWER, speedup=0.9, ci95=(0.89, 0.91))


def test_only_a_right_and_faster_gpu_result_is_accepted():
    assert acceptance.decide(OK, None, None).accepted
    assert acceptance.decide(OK, None, {"default": FASTER}).accepted
    assert not acceptance.decide(replace(OK, status=Status.WRONG_VALUES), None, {"default": FASTER}).accepted
    assert not acceptance.decide(replace(OK, device="cpu-interpreter"), None, {"default": FASTER}).accepted
    beaten = Utilization(1.0, 0.0, 0.0, limit_us=2.0, below_physical_limit=True)
    decision = acceptance.decide(OK, beaten, {"default": FASTER})
    assert not decision.accepted and decision.reason.startswith("IMPOSSIBLE_TIME: 1.00 us, where the documented peaks")
    assert acceptance.is_impossible(decision.reason) and acceptance.is_impossible("BELOW_FLOOR: faster than …")
    assert not acceptance.is_impossible(None) and not acceptance.is_impossible("SLOWER against the best version")
    for verdict in (Speed.SLOWER, Speed.EQUAL, Speed.AMBIGUOUS):
        assert not acceptance.decide(OK, None, {"default": replace(FASTER, verdict=verdict)}).accepted


def test_a_gain_that_another_workload_pays_for_is_refused():
    decision = acceptance.decide(OK, None, {"default": FASTER, "ragged": SLOWER})
    assert not decision.accepted and "ragged" in decision.reason
    slight = replace(SLOWER, speedup=0.99, ci95=(0.985, 0.995))
    assert acceptance.decide(OK, None, {"default": FASTER, "ragged": slight}).accepted


LEVEL = replace(FASTER, verdict=Speed.EQUAL, speedup=1.001, ci95=(0.998, 1.004))


@pytest.mark.parametrize(
    ("default", "tall", "reason"),
    [
        (LEVEL, FASTER, "correct and FASTER on tall: 1.200x (95 % interval 1.190 to 1.210, A/A noise 0.10%); default"),
        (replace(LEVEL, verdict=Speed.AMBIGUOUS, ci95=(0.992, 1.015)), FASTER, "correct and FASTER on tall"),
        (replace(LEVEL, ci95=(0.985, 1.015)), FASTER, None),  # may be slower by more than 1 %
        (replace(LEVEL, verdict=Speed.SLOWER, speedup=0.994, ci95=(0.993, 0.995)), FASTER, None),
        (LEVEL, replace(FASTER, speedup=1.01, ci95=(1.006, 1.014)), None),  # a gain elsewhere is 1 % for certain
        (LEVEL, replace(FASTER, least_difference=0.2), None),  # nor below what means something for a short kernel
        (LEVEL, replace(FASTER, verdict=Speed.AMBIGUOUS), None),  # the processes do not agree
        (LEVEL, LEVEL, None),
    ],
)
def test_a_gain_on_another_workload_counts_where_the_default_one_is_level(default, tall, reason):
    decision = acceptance.decide(OK, None, {"default": default, "tall": tall})
    assert decision.accepted == (reason is not None)
    assert decision.reason.startswith(reason or f"{default.verdict} against the best version: ")


def test_two_kernels_cannot_take_turns_each_with_its_own_workload():
    up, down = (replace(FASTER, speedup=x, ci95=(x - 0.001, x + 0.001)) for x in (1.015, 1 / 1.015))
    one = {"default": replace(LEVEL, speedup=1.0), "tall": up, "flat": replace(down, verdict=Speed.SLOWER)}
    other = {**one, "tall": one["flat"], "flat": up}
    assert not acceptance.decide(OK, None, one).accepted and not acceptance.decide(OK, None, other).accepted
    paid = {**one, "tall": replace(up, speedup=1.5, ci95=(1.4, 1.6)), "flat": replace(SLOWER)}
    decision = acceptance.decide(OK, None, paid)
    assert not decision.accepted and decision.reason.startswith("faster on the tall workload, but slower on flat")


def work(dtype: str, flops: int = 1, bytes_min: int = 1) -> Work:
    return Work(flops=flops, bytes_in=None, bytes_out=None, bytes_min=bytes_min, dtype=dtype, source="given")


def record(**performance) -> Record:
    empty = record_store.empty("v1")
    return replace(empty, performance=replace(empty.performance, workload="default", **performance))


def test_goals():
    target = Target(workload="default", metric="bandwidth_gbps", target=100.0, unit="GB/s", basis="x")
    assert stop_conditions.are_met([target], record(bandwidth_gbps=100.0))
    assert not stop_conditions.are_met([target], record(bandwidth_gbps=99.9))
    assert not stop_conditions.are_met([target], record()) and not stop_conditions.are_met([target], None)
    assert not stop_conditions.are_met([], record(bandwidth_gbps=100.0))
    latency = replace(target, metric="latency_us", target=5.0)
    assert stop_conditions.are_met([latency], record(latency_us=4.0))
    assert not stop_conditions.are_met([latency], record(latency_us=6.0))


def test_a_gemm_is_compute_bound_by_its_whole_intensity():
    size = 4096
    flops, moved = 2 * size**3, 3 * 2 * size * size
    roof = roofline.roof(H200, "bf16")
    gemm = roofline.utilization(1000.0, flops, moved, roof)
    assert gemm.arithmetic_intensity == pytest.approx(flops / moved)
    assert gemm.bound == "compute"  # a single 128 x 128 tile would have been called memory-bound
    assert gemm.ridge_point == pytest.approx(1000 * roof.compute.value / roof.bandwidth.value)
    assert gemm.floor_us == pytest.approx(flops / roof.compute.value / 1e6)
    assert gemm.tflops_peak_utilization_pct == pytest.approx(100 * flops / 1e9 / roof.peak_compute.value)
    assert gemm.floor_share_pct < 100 and not gemm.below_physical_limit
    assert gemm.library_rate  # the wiki has no ceiling of the bare tensor operations
    assert roofline.beyond_floor(roofline.utilization(gemm.floor_us / 1.05, flops, moved, roof)) is None
    alone = replace(roof, sustained_compute=None)  # where nothing else tells how much is left
    faster = roofline.beyond_floor(roofline.utilization(gemm.floor_us / 1.05, flops, moved, alone))
    assert "measure_ceiling.py" in faster and "no floor" in faster


def test_measured_maxima_are_preferred_and_cited():
    roof = roofline.roof(H200, "bf16")
    assert roof.bandwidth.metric == "measured_copy_bandwidth" and roof.compute.metric == "measured_bf16_matmul"
    assert roof.peak_bandwidth.metric == "memory_bandwidth" and roof.peak_compute.metric == "peak_bf16_tensor"
    assert any("measured_copy_bandwidth" in line for line in roof.citations())
    plain = roofline.roof(wiki.find("A100 SXM 80GB", PAGES), "bf16")
    assert plain.bandwidth.metric == "memory_bandwidth"


def test_targets_are_ninety_percent_of_what_bounds():
    roof = roofline.roof(H200, "bf16")
    memory = target_setting.of_roof("default", work("bf16", 0, 1 << 30), roof)
    assert memory.metric == "bandwidth_gbps" and memory.target == pytest.approx(0.9 * roof.bandwidth.value, rel=1e-3)
    assert target_setting.of_roof("default", work("bf16", 10**15, 1 << 20), roof).metric == "tflops"


def test_a_time_beyond_a_documented_peak_is_told_that_no_ceiling_was_measured():
    """It was told that the card may have been cooler than when its ceiling was measured, or that a copy's rate is low."""
    page = wiki.find("RTX 4090", PAGES)
    for flops, moved, dtype in ((10**12, 1 << 20, "fp16"), (0, 1 << 30, "fp32")):
        roof = roofline.roof(page, dtype)
        floor = roofline.bound(flops, moved, roof).floor_us
        said = roofline.beyond_floor(roofline.utilization(floor / 1.1, flops, moved, roof))
        assert said.startswith("beyond the documented peak") and "measure_ceiling.py --workspace W" in said
        assert "was measured" not in said and "a copy's" not in said
        assert roofline.utilization(floor / 0.9, flops, moved, roof).documented


def test_beating_the_documented_peak_is_impossible_and_beating_the_floor_a_little_is_not():
    roof = roofline.roof(H200, "bf16")
    moved = 1 << 30
    floor = roofline.bound(0, moved, roof).floor_us
    assert roofline.beyond_floor(roofline.utilization(floor / 1.01, 0, moved, roof)) is None
    assert "measure_ceiling.py" in roofline.beyond_floor(roofline.utilization(floor / 1.04, 0, moved, roof))
    assert not roofline.utilization(0.97 * floor, 0, moved, roof).below_physical_limit
    assert roofline.utilization(0.5 * floor, 0, moved, roof).below_physical_limit
    assert roofline.utilization(1.0, 10**12, 1 << 20, roof).below_physical_limit
    assert not roofline.utilization(1.0, 0, 8 << 20, roof).below_physical_limit  # the L2 can hold it


def test_a_problem_that_fits_in_the_cache_is_told_from_one_that_does_not():
    roof = roofline.roof(H200, "bf16")
    assert roofline.fits_in_cache(1 << 20, roof) and not roofline.fits_in_cache(1 << 30, roof)


def test_integers_without_flops_have_a_memory_roof():
    arguments = ["--platform", "H200", "--dtype", "int", "--time-us", "262", "--bytes", str(1 << 30), "--flops"]
    printed = tool_json("compute_utilization.py", *arguments, "0")
    assert printed["bound"] == "memory" and printed["ridge_point"] is None
    assert call_tool("compute_utilization.py", *arguments, "5").returncode == 1


def test_by_hand_prints_the_contracted_keys():
    arguments = ["--platform", "H200", "--dtype", "bf16", "--time-us", "262", "--flops", "0", "--bytes", str(1 << 30)]
    printed = tool_json("compute_utilization.py", *arguments)
    keys = "tflops bandwidth_gbps arithmetic_intensity ridge_point bound tflops_peak_utilization_pct"
    keys += " bandwidth_peak_utilization_pct"
    assert set(keys.split()) | {"floor_us", "floor_share_pct", "citations"} <= set(printed)
    assert printed["bound"] == "memory" and printed["bandwidth_gbps"] == pytest.approx((1 << 30) / 262e3)
    tool_json("compute_utilization.py", *arguments[:4], "--time-us", "1", *arguments[6:], code=1)


def test_no_roofline_from_unknown_values():
    arguments = ["--platform", "MI308X", "--dtype", "bf16", "--time-us", "1", "--flops", "1", "--bytes", "1"]
    done = call_tool("compute_utilization.py", *arguments)
    assert done.returncode == 1 and "memory_bandwidth: UNKNOWN (gpu-wiki not found)" in done.stderr and not done.stdout


def test_fp32_work_may_run_on_the_tensor_cores():
    roof = roofline.roof(H200, "fp32")
    flops = int(1.5 * roof.peak_compute.value * 1e6)  # in 1 us, half as much again as the vector units can
    assert not roofline.utilization(1.0, flops, 1024, roof).below_physical_limit
    assert roofline.utilization(1.0, 20 * flops, 1024, roof).below_physical_limit


def test_a_row_in_another_unit_is_refused_and_not_misread():
    text = (BUNDLE / "gpu-wiki/docs/hardware/h200.md").read_text().replace("| 4800 | GB/s |", "| 4.8 | TB/s |")
    with pytest.raises(UsageError, match="must be given in GB/s"):
        roofline.roof(wiki.parse_page(text, "h200.md"), "bf16")


def test_a_target_below_its_share_of_its_basis_is_never_met():
    target = target_setting.of_roof("default", work("bf16", 0, 10**9), roofline.roof(H200, "bf16"))
    fast = record(bandwidth_gbps=4000.0)
    assert stop_conditions.are_met([target], fast)
    (lowered,) = stop_conditions.standings([replace(target, target=1.0)], fast)
    assert not lowered.met and "is not 90 % of its basis 4296 GB/s" in lowered.problem
    by_hand = Target(workload="default", metric="latency_us", target=9.0, unit="us", basis="the user asked for it")
    assert stop_conditions.are_met([by_hand], record(latency_us=8.0))


RTX_4090 = wiki.find("RTX 4090", PAGES)


def limit_tflops(page: wiki.Page, dtype: str, **max_clocks) -> float:
    """The rate that the limit allows, in TFLOPS."""
    clocks = MaxClocks(**max_clocks) if max_clocks else None
    return 10**12 / roofline.physical_limit_us(10**12, 0, roofline.roof(page, dtype), clocks) / 1e6


def test_the_limit_follows_the_cards_own_highest_clock():
    """A 4090 with fp16 and fp32 accumulation has reached 168.4 TFLOPS; its page, at the boost clock, has 165.2."""
    assert limit_tflops(RTX_4090, "bf16") == pytest.approx(165.2)
    assert limit_tflops(RTX_4090, "bf16", sm_clock_mhz=3105) == pytest.approx(165.2 * 3105 / 2520)
    assert limit_tflops(RTX_4090, "bf16", sm_clock_mhz=210) == pytest.approx(165.2)  # an idle clock slows no peak down


def test_the_limit_is_the_largest_peak_of_a_dtype():
    """A narrower accumulator is faster on GeForce."""
    assert limit_tflops(RTX_4090, "fp16") == pytest.approx(330.3)
    assert limit_tflops(RTX_4090, "fp8") == pytest.approx(660.6)
    assert roofline.roof(RTX_4090, "fp16").peak_compute.value == pytest.approx(
        165.2
    )  # the share of the peak keeps its own


def test_the_limit_is_the_largest_bandwidth_that_a_document_gives():
    row = H200.rows["memory_bandwidth"]
    highest = replace(row, metric="memory_bandwidth_highest", text="5000")
    page = replace(H200, rows={**H200.rows, "memory_bandwidth_highest": highest})
    roof = roofline.roof(page, "bf16")
    assert roof.peak_bandwidth.value == 4800
    moved = 10**9 + int(roof.l2_bytes)
    assert roofline.physical_limit_us(0, moved, roof) == pytest.approx(200)
    assert roofline.physical_limit_us(0, moved, roof, MaxClocks(memory_clock_mhz=6402)) == pytest.approx(100)


def test_a_dtype_that_the_card_lacks_is_called_unsupported_with_its_line():
    with pytest.raises(
        Refused, match=r"peak_fp8_tensor: UNSUPPORTED TFLOPS <- <gpu-wiki>/docs/hardware/rtx-3090.md:L\d+"
    ):
        roofline.roof_for(wiki.find("RTX 3090", PAGES), work("fp8"))


def without(page: wiki.Page, *metrics: str) -> wiki.Page:
    """The page as if nobody knew these."""
    gone = {name: replace(page.rows[name], text="UNKNOWN") for name in metrics}
    return replace(page, rows={**page.rows, **gone})


def test_what_nobody_knows_makes_no_limit_stricter():
    """A peak, a clock, the capacity of the L2: without them a limit would be too low for honest kernels."""
    assert roofline.roof(without(H200, "peak_tf32_tensor"), "fp32").limit_compute is None
    page = wiki.find("RTX 3090", PAGES)
    assert roofline.physical_limit_us(10**12, 0, roofline.roof(page, "bf16"), MaxClocks(memory_clock_mhz=9751)) == 0
    assert (
        roofline.physical_limit_us(
            10**12, 0, roofline.roof(without(page, "boost_clock"), "bf16"), MaxClocks(sm_clock_mhz=2100)
        )
        == 0
    )
    assert roofline.physical_limit_us(0, 10**9, roofline.roof(without(H200, "l2_capacity"), "bf16"), MaxClocks()) == 0


def test_any_format_that_holds_the_numbers_may_do_the_work():
    """int8 is exact in bf16, and on a B300 that is fifteen times as fast."""
    page = wiki.find("B300", PAGES)
    assert roofline.roof(page, "int8").limit_compute.value >= page.known("peak_bf16_tensor").value
    mixed = roofline.roof(H200, "bf16", also=("fp8",))
    assert mixed.limit_compute.metric == "peak_fp8_tensor" and mixed.compute.metric == "measured_bf16_matmul"


def test_what_cannot_be_measured_is_not_asked_to_be():
    cases = {
        ("A100 SXM 80GB", "fp8"): "This card has no such arithmetic",
        ("H20", "fp4"): "This card has no such arithmetic",
        ("MI308X", "bf16"): "Measure this card",
    }
    for (platform, dtype), words in cases.items():
        with pytest.raises(Refused, match=words):
            roofline.roof_for(wiki.find(platform, PAGES), work(dtype))


def test_rates_need_no_roof():
    rates = roofline.utilization(100.0, 10**9, 10**8, None)
    assert rates.tflops == pytest.approx(10) and rates.bandwidth_gbps == pytest.approx(1000)
    assert rates.floor_us is None and rates.floor_share_pct is None and not rates.below_physical_limit
    assert roofline.beyond_floor(rates) is None


@pytest.mark.parametrize(
    ("platform", "said"),
    [
        ("T4", {"memory_capacity": 14.75, "boost_clock": 1590, "tdp": 70}),  # ECC takes a sixteenth
        ("L4", {"memory_capacity": 22.5, "boost_clock": 2040}),
        ("A10", {"memory_capacity": 22.5, "boost_clock": 1695}),
        ("L40S", {"memory_capacity": 45.0, "boost_clock": 2520}),
        ("RTX 3090", {"memory_capacity": 24.0, "boost_clock": 2100}),
        ("RTX 4090", {"memory_capacity": 23.99, "boost_clock": 3105}),
        ("RTX 5090", {"memory_capacity": 31.84, "boost_clock": 3090}),
    ],
)
def test_what_cards_say_of_themselves_is_no_disagreement(platform, said):
    """Capacity with ECC, and a highest clock above the boost clock. Figures: printouts of nvidia-smi."""
    assert wiki.disagreements(wiki.find(platform, PAGES), said) == []


def test_another_product_under_the_same_name_is_a_disagreement():
    assert [one.metric for one in wiki.disagreements(H200, {"tdp": 600, "memory_capacity": 139.8})] == ["tdp"]
    assert wiki.disagreements(H200, {"memory_capacity": 94}) and wiki.disagreements(H200, {"boost_clock": 1700})


def test_tensor_peaks_belong_to_a_clock_of_their_own():
    """Hopper's tensor peaks are printed for 1830 MHz, and the card can run at 1980."""
    assert limit_tflops(H200, "bf16", sm_clock_mhz=1980) == pytest.approx(989.5 * 1980 / 1830)
    assert limit_tflops(wiki.find("H100 SXM", PAGES), "fp8", sm_clock_mhz=1980) == pytest.approx(1979 * 1980 / 1830)
    assert limit_tflops(H200, "fp64", sm_clock_mhz=1980) == pytest.approx(67)


def test_a_power_limit_within_the_configurable_range_is_no_disagreement():
    page = wiki.find("GH200 96GB", PAGES)
    assert wiki.disagreements(page, {"tdp": 900}) == [] and wiki.disagreements(page, {"tdp": 1200})
