"""Scattered loads in kernels that load by cp.async, whose sectors have a counter of their own: two captures of an H100,
and invented figures, which are named so."""

import json
from dataclasses import replace

import pytest
from conftest import BUNDLE, FIXTURES
from kernelopt.diagnosis import analysis, profile_folder, profile_pages
from kernelopt.diagnosis.diagnosis import Finding, Floor
from kernelopt.profilers import metrics
from kernelopt.profilers.profile import KernelProfile, Profile

LIMITS = metrics.thresholds()
LOADS = "uncoalesced_loads"
OF_CP_ASYNC = ("async_copy_sectors", "async_copy_bytes_per_sector")


def captured(name: str) -> Profile:
    return profile_folder.read(FIXTURES / "h100_cp_async" / name)


def ids(profile: Profile) -> list[str]:
    return [finding.id for finding in analysis.diagnose(profile).findings]


def without_cp_async(profile: Profile) -> Profile:
    """The profile as an older one has it."""
    kernels = [replace(one, metrics={**one.metrics, **dict.fromkeys(OF_CP_ASYNC)}) for one in profile.kernels]
    return replace(profile, kernels=tuple(kernels))


# --- captures of an H100 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "plain", "first"),
    [("fp8_product", 270_336, "stall_long_scoreboard"), ("moe_up", 1_314_576, "excess_dram_traffic")],
)
def test_operands_that_cp_async_brings_are_not_called_scattered(name, plain, first):
    """The 4 bytes of a sector are those of scales and offsets: 1 % of the sectors."""
    profile = captured(name)
    m = profile.longest.metrics
    assert m["load_bytes_per_sector"] == 4 and m["load_sectors"] - m["async_copy_sectors"] == plain
    found = ids(profile)
    assert found[0] == first and LOADS not in found
    text = profile_pages.page(profile, analysis.diagnose(profile), None)
    assert "of the 32 bytes" not in text and "| Global-memory sectors, cp.async |" in text


def test_one_of_the_two_would_be_led_astray_without_their_counter():
    assert ids(without_cp_async(captured("fp8_product")))[0] == LOADS
    assert LOADS not in ids(without_cp_async(captured("moe_up")))


def test_the_rest_of_the_sectors_is_what_the_version_without_cp_async_loads():
    """fp8_product in Triton by TMA brings its operands by TMA and loads the scales as v0 does."""
    v1 = captured("fp8_product_by_tma").longest.metrics
    v0 = captured("fp8_product").longest.metrics
    assert v0["load_sectors"] - v0["async_copy_sectors"] == v1["load_sectors"]


def test_copies_of_4_and_8_bytes_are_among_the_sectors_of_loads():
    """w4a16 v0 loads by cp.async alone: 16 bytes at a time its packed weights, 4 and 8 the rest (PTX of triton 3.9, not
    run). On an H100, as on an H200, its loads used 0 bytes of a sector, of more sectors than the weights are."""
    folder = BUNDLE / "examples" / "w4a16" / "profiles" / "v0" / "annotation"
    m = json.loads((folder / "metrics.json").read_text())["kernels"][0]["metrics"]
    assert m["load_bytes_per_sector"] == 0 and m["load_sectors"] > 1.2 * (4096 // 2) * 12288 / 32


# --- invented figures -------------------------------------------------------------------------------------------------

INVENTED = {
    "sm_throughput": 30.0,
    "memory_throughput": 90.0,
    "l1_throughput": 90.0,
    "compute_capability": 9.0,
    "tma_cycles": 0.0,
    "store_sectors": 100.0,
    "store_bytes_per_sector": 32.0,
}


def found_in(work=None, floor=None, **values) -> dict[str, Finding]:
    every = {**dict.fromkeys(metric.key for metric in metrics.schema()), **INVENTED, **values}
    profile = Profile((KernelProfile("k", 10.0, every),), work)
    return {finding.id: finding for finding in analysis.from_metrics(profile, LIMITS, floor).findings}


def loads(plain: float, plain_bytes: float, copied: float, copied_bytes: float) -> dict[str, float]:
    return {
        "load_sectors": plain + copied,
        "load_bytes_per_sector": plain_bytes,
        "async_copy_sectors": copied,
        "async_copy_bytes_per_sector": copied_bytes,
    }


def test_scattered_copies_are_found_and_named():
    finding = found_in(**loads(50.0, 32.0, 850.0, 4.0))[LOADS]
    assert finding.inference == "global copies by cp.async use 4.0 of the 32 bytes of each sector"
    assert [row.metric for row in finding.evidence] == [
        "async_copy_bytes_per_sector",
        "share of copies by cp.async in all sectors",
    ]
    assert [row.value for row in finding.evidence] == [4.0, 85.0]
    assert finding.estimated_gain_pct == pytest.approx(85 * (1 - 4 / 32), abs=0.1)


def test_scattered_loads_beside_good_copies_count_with_their_own_sectors():
    finding = found_in(**loads(400.0, 4.0, 500.0, 32.0))[LOADS]
    assert finding.inference == "global loads beside cp.async use 4.0 of the 32 bytes of each sector"
    assert [row.value for row in finding.evidence] == [4.0, 40.0]
    assert finding.estimated_gain_pct == pytest.approx(40 * (1 - 4 / 32), abs=0.1)
    assert LOADS not in found_in(**loads(90.0, 4.0, 810.0, 32.0))  # 9 % of the sectors
    assert LOADS not in found_in(**loads(150.0, 2.0, 750.0, 32.0))  # 1.1 % of the bytes
    assert LOADS in found_in(**loads(150.0, 6.0, 750.0, 32.0))  # 3.2 % of the bytes


def test_where_both_are_scattered_they_are_one_finding():
    finding = found_in(**loads(300.0, 4.0, 600.0, 10.0))[LOADS]
    assert finding.inference == "global loads and copies by cp.async use 8.0 of the 32 bytes of each sector"
    assert [(row.metric, row.value) for row in finding.evidence] == [
        ("load_bytes_per_sector", 4.0),
        ("async_copy_bytes_per_sector", 10.0),
        ("share of loads and copies by cp.async in all sectors", 90.0),
    ]
    assert LOADS in found_in(**loads(70.0, 5.0, 70.0, 5.0), store_sectors=860.0)  # 14 % of the sectors, 7 each


def test_copies_that_another_pass_of_the_profiler_counted_higher_leave_no_loads():
    both = {**loads(0.0, 4.0, 900.0, 32.0), "async_copy_sectors": 900.3}
    assert LOADS not in found_in(**both)
    assert LOADS not in found_in(**{**both, "load_bytes_per_sector": 0.0})


def test_where_the_copies_are_counted_nothing_is_guessed_from_the_inputs():
    """Plain loads that use a part of inputs which DRAM reads as a whole: an older profile takes the rest for cp.async."""
    read = {"dram_bytes_read": 24_000.0, "dram_bytes_written": 3_200.0}
    work = {"flops": 0, "bytes_min": 29_000, "bytes_in": 24_000, "dtype": "bf16"}
    scattered = {**read, **loads(900.0, 4.0, 0.0, 0.0)}
    assert LOADS in found_in(work, **scattered)
    older = {**scattered, **dict.fromkeys(OF_CP_ASYNC)}
    assert LOADS not in found_in(work, **older)
    assert LOADS in found_in(work, **{**older, "compute_capability": 7.0})  # which has no cp.async
    assert LOADS not in found_in(work, **{**older, "compute_capability": 8.0})


def test_copies_are_loads_where_the_same_bytes_are_loaded_repeatedly():
    work = {"flops": 0, "bytes_min": 3_200, "bytes_in": 1_600, "dtype": "bf16"}
    read = {"dram_bytes_read": 1_600.0, "dram_bytes_written": 1_600.0, "dram_throughput": 20.0}
    found = found_in(work, Floor(20.0, "memory"), **read, **loads(0.0, 0.0, 900.0, 32.0))
    assert found["repeated_loads"].evidence[0].value == 900.0 and LOADS not in found
