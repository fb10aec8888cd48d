"""The pure functions: paired verdicts, acceptance, goals, roofline mathematics."""

import math
import random

import pytest
from conftest import BUNDLE, run_tool, tool_json
from kernelopt import gate, roofline, wiki
from kernelopt.errors import UsageError

PAGES = wiki.pages(BUNDLE / "gpu-wiki")
H200 = wiki.find("H200", PAGES)


def paired(ratio: float, noise: float, rounds: int = 180, seed: int = 0) -> list[dict]:
    """Times of a kernel and of one that takes `ratio` times as long, with a drift that both share, in three processes."""
    generator = random.Random(seed)
    a, b = [], []
    for number in range(rounds):
        drift = 100 * (1 + 0.2 * math.sin(number / 9))
        a.append([drift * math.exp(generator.gauss(0, noise)) for _ in range(2)])
        b.append([drift * ratio * math.exp(generator.gauss(0, noise)) for _ in range(2)])
    return [{"a_us": a[start::3], "b_us": b[start::3]} for start in range(3)]  # three processes


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
    found = gate.paired_verdict(paired(ratio, noise))
    assert found["verdict"] == verdict
    low, high = found["speedup"]["ci95"]
    assert low <= found["speedup"]["point"] <= high


def test_what_noise_covers_is_not_called_equal():
    runs = paired(1.2, 0.002)
    for run in runs:  # of the kernel's two calls in a round one is slow: it does not even equal itself
        run["a_us"] = [pair if number % 4 < 2 else pair[::-1] for number, pair in enumerate(skewed(run["a_us"]))]
    found = gate.paired_verdict(runs)
    assert found["aa_noise"] > 0.1 and found["verdict"] == "AMBIGUOUS"


def skewed(rounds: list[list[float]]) -> list[list[float]]:
    return [[first * 1.2, second] for first, second in rounds]


def test_an_a_a_comparison_is_never_faster():
    verdicts = [
        gate.paired_verdict(paired(1.0, noise, seed=seed))["verdict"] for noise in (0.01, 0.05) for seed in range(100)
    ]
    assert "FASTER" not in verdicts and "SLOWER" not in verdicts


def test_a_drift_of_twenty_percent_does_not_hide_three_percent():
    verdicts = [gate.paired_verdict(paired(1.03, 0.01, seed=seed))["verdict"] for seed in range(50)]
    assert verdicts.count("FASTER") >= 48


def test_the_same_times_give_the_same_verdict():
    times = paired(1.01, 0.01)
    assert gate.paired_verdict(times) == gate.paired_verdict(times)


OK = {"status": "OK", "device": "NVIDIA H200", "summary": "OK"}
FASTER = {"verdict": "FASTER", "speedup": {"point": 1.2, "ci95": [1.19, 1.21]}, "aa_noise": 0.001}
SLOWER = {"verdict": "SLOWER", "speedup": {"point": 0.9, "ci95": [0.89, 0.91]}, "aa_noise": 0.001}


def test_only_a_right_and_faster_gpu_result_is_accepted():
    assert gate.decide(OK, None, None)["accepted"]
    assert gate.decide(OK, None, {"default": FASTER})["accepted"]
    assert not gate.decide({**OK, "status": "WRONG_VALUES"}, None, {"default": FASTER})["accepted"]
    assert not gate.decide({**OK, "device": "cpu-interpreter"}, None, {"default": FASTER})["accepted"]
    assert not gate.decide(OK, {"below_physical_limit": True}, {"default": FASTER})["accepted"]
    for verdict in ("SLOWER", "EQUAL", "AMBIGUOUS"):
        assert not gate.decide(OK, None, {"default": {**FASTER, "verdict": verdict}})["accepted"]


def test_a_gain_that_another_workload_pays_for_is_refused():
    decision = gate.decide(OK, None, {"default": FASTER, "ragged": SLOWER})
    assert not decision["accepted"] and "ragged" in decision["reason"]
    slight = {**SLOWER, "speedup": {"point": 0.99, "ci95": [0.985, 0.995]}}
    assert gate.decide(OK, None, {"default": FASTER, "ragged": slight})["accepted"]


def record(**performance) -> dict:
    return {"performance": {"workload": "default", "bandwidth_gbps": None, "latency_us": None, **performance}}


def test_goals():
    target = {"workload": "default", "metric": "bandwidth_gbps", "target": 100.0, "unit": "GB/s", "basis": "x"}
    assert gate.goal([target], record(bandwidth_gbps=100.0))["met"]
    assert not gate.goal([target], record(bandwidth_gbps=99.9))["met"]
    assert not gate.goal([target], record())["met"] and not gate.goal([target], None)["met"]
    assert not gate.goal([], record(bandwidth_gbps=100.0))["met"]
    latency = {**target, "metric": "latency_us", "target": 5.0}
    assert (
        gate.goal([latency], record(latency_us=4.0))["met"] and not gate.goal([latency], record(latency_us=6.0))["met"]
    )


def test_a_gemm_is_compute_bound_by_its_whole_intensity():
    size = 4096
    flops, moved = 2 * size**3, 3 * 2 * size * size
    roof = roofline.roof(H200, "bf16")
    found = roofline.utilization(1000.0, flops, moved, roof)
    assert found["arithmetic_intensity"] == pytest.approx(flops / moved)
    assert found["bound"] == "compute"  # a single 128 x 128 tile would have been called memory-bound
    assert found["ridge_point"] == pytest.approx(1000 * roof.compute.value / roof.bandwidth.value)
    assert found["floor_us"] == pytest.approx(flops / roof.compute.value / 1e6)
    assert found["tflops_peak_utilization_pct"] == pytest.approx(100 * flops / 1e9 / roof.peak_compute.value)
    assert found["floor_share_pct"] < 100 and not found["below_physical_limit"]
    assert "bench_matmul.py" in roofline.beyond_floor(
        roofline.utilization(found["floor_us"] / 1.05, flops, moved, roof)
    )


def test_measured_maxima_are_preferred_and_cited():
    roof = roofline.roof(H200, "bf16")
    assert roof.bandwidth.metric == "measured_copy_bandwidth" and roof.compute.metric == "measured_bf16_matmul"
    assert roof.peak_bandwidth.metric == "memory_bandwidth" and roof.peak_compute.metric == "peak_bf16_tensor"
    assert any("measured_copy_bandwidth" in line for line in roof.citations())
    plain = roofline.roof(wiki.find("A100 SXM 80GB", PAGES), "bf16")
    assert plain.bandwidth.metric == "memory_bandwidth"


def test_targets_are_ninety_percent_of_what_bounds():
    roof = roofline.roof(H200, "bf16")
    memory = roofline.target("default", 0, 1 << 30, roof)
    assert memory["metric"] == "bandwidth_gbps" and memory["target"] == pytest.approx(
        0.9 * roof.bandwidth.value, rel=1e-3
    )
    assert roofline.target("default", 10**15, 1 << 20, roof)["metric"] == "tflops"


def test_beating_the_documented_peak_is_impossible_and_beating_the_floor_a_little_is_not():
    roof = roofline.roof(H200, "bf16")
    moved = 1 << 30
    floor = roofline.bound(0, moved, roof)["floor_us"]
    assert roofline.beyond_floor(roofline.utilization(floor / 1.01, 0, moved, roof)) is None
    assert "measure_bandwidth_ceiling.py" in roofline.beyond_floor(roofline.utilization(floor / 1.04, 0, moved, roof))
    assert not roofline.utilization(0.97 * floor, 0, moved, roof)["below_physical_limit"]
    assert roofline.utilization(0.5 * floor, 0, moved, roof)["below_physical_limit"]
    assert roofline.utilization(1.0, 10**12, 1 << 20, roof)["below_physical_limit"]
    assert not roofline.utilization(1.0, 0, 8 << 20, roof)["below_physical_limit"]  # the L2 can hold it


def test_a_problem_that_fits_in_the_cache_is_told_from_one_that_does_not():
    roof = roofline.roof(H200, "bf16")
    assert roofline.fits_in_cache(1 << 20, roof) and not roofline.fits_in_cache(1 << 30, roof)


def test_integers_without_flops_have_a_memory_roof():
    arguments = ["--platform", "H200", "--dtype", "int", "--time-us", "262", "--bytes", str(1 << 30), "--flops"]
    found = tool_json("compute_utilization.py", *arguments, "0")
    assert found["bound"] == "memory" and found["ridge_point"] is None
    assert run_tool("compute_utilization.py", *arguments, "5").returncode == 1


def test_by_hand_prints_the_contracted_keys():
    arguments = ["--platform", "H200", "--dtype", "bf16", "--time-us", "262", "--flops", "0", "--bytes", str(1 << 30)]
    found = tool_json("compute_utilization.py", *arguments)
    keys = "tflops bandwidth_gbps arithmetic_intensity ridge_point bound tflops_peak_utilization_pct bandwidth_peak_utilization_pct"
    assert set(keys.split()) | {"floor_us", "floor_share_pct", "citations"} <= set(found)
    assert found["bound"] == "memory" and found["bandwidth_gbps"] == pytest.approx((1 << 30) / 262e3)
    tool_json("compute_utilization.py", *arguments[:4], "--time-us", "1", *arguments[6:], code=1)


def test_no_roofline_from_unknown_values():
    arguments = ["--platform", "MI308X", "--dtype", "bf16", "--time-us", "1", "--flops", "1", "--bytes", "1"]
    done = run_tool("compute_utilization.py", *arguments)
    assert done.returncode == 1 and "memory_bandwidth: UNKNOWN (gpu-wiki not found)" in done.stderr and not done.stdout


def test_fp32_work_may_run_on_the_tensor_cores():
    roof = roofline.roof(H200, "fp32")
    flops = int(1.5 * roof.peak_compute.value * 1e6)  # in 1 us, half as much again as the vector units can
    assert not roofline.utilization(1.0, flops, 1024, roof)["below_physical_limit"]
    assert roofline.utilization(1.0, 20 * flops, 1024, roof)["below_physical_limit"]


def test_a_row_in_another_unit_is_refused_and_not_misread():
    text = (BUNDLE / "gpu-wiki/docs/hardware/h200.md").read_text().replace("| 4800 | GB/s |", "| 4.8 | TB/s |")
    with pytest.raises(UsageError, match="must be given in GB/s"):
        roofline.roof(wiki.parse_page(text, "h200.md"), "bf16")


def test_a_target_below_its_share_of_its_basis_is_never_met():
    target = roofline.target("default", 0, 10**9, roofline.roof(H200, "bf16"))
    record = {"performance": {"workload": "default", "bandwidth_gbps": 4000.0}}
    assert gate.goal([target], record)["met"]
    found = gate.goal([{**target, "target": 1.0}], record)
    assert not found["met"] and "is not 90 % of its basis 4296 GB/s" in found["targets"][0]["problem"]
    by_hand = {
        "workload": "default",
        "metric": "latency_us",
        "target": 9.0,
        "unit": "us",
        "basis": "the user asked for it",
    }
    assert gate.goal([by_hand], {"performance": {"workload": "default", "latency_us": 8.0}})["met"]
