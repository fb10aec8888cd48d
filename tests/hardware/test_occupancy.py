"""Theoretical occupancy against Nsight Compute's own figure, and by hand."""

import pytest
from conftest import BUNDLE, FIXTURES, call_tool, tool_json
from kernelopt.errors import Refused, UsageError
from kernelopt.hardware import occupancy, wiki
from kernelopt.profilers import ncu

LIMITS = wiki.limit_pages(BUNDLE / "gpu-wiki")
REPORTS = sorted(FIXTURES.rglob("*.ncu-rep"))


@pytest.mark.parametrize("report", REPORTS, ids=lambda path: path.stem)
def test_it_equals_what_ncu_says_of_every_recorded_kernel(report):
    for kernel in ncu.read(report):
        m = kernel.metrics
        shared = int(m["shared_memory_dynamic"] + m["shared_memory_static"])
        result = occupancy.occupancy(LIMITS["sm_90"], int(m["block_size"]), int(m["registers_per_thread"]), shared)
        assert result.occupancy_pct == pytest.approx(m["theoretical_occupancy"]), kernel.name
        by_limit = {f"limit_{name}": blocks for name, blocks in result.blocks_by_limit.items()}
        assert by_limit["limit_registers"] == m["limit_registers"] and by_limit["limit_warps"] == m["limit_warps"]


@pytest.mark.parametrize(
    ("target", "launch", "warps", "limiter"),
    [
        ("sm_90", (1024, 32, 0), 64, "warps"),
        ("sm_90", (32, 16, 0), 32, "blocks"),
        ("sm_90", (256, 255, 0), 8, "registers"),
        ("sm_90", (256, 65, 0), 24, "registers"),  # 72 after rounding: 7 warps in a quarter, 28 in all, 3 blocks of 8
        ("sm_90", (128, 32, 100 * 1024), 8, "shared_memory"),
        ("sm_80", (128, 32, 82 * 1024), 4, "shared_memory"),  # 1 KB more a block than asked for
        ("sm_75", (1024, 32, 0), 32, "warps"),
        ("sm_89", (1024, 32, 0), 32, "warps"),  # 48 warps, and no second block of 32 fits
        ("sm_86", (64, 32, 0), 32, "blocks"),
        ("sm_61", (1024, 32, 0), 64, "warps"),
        ("sm_61", (128, 32, 48 * 1024), 8, "shared_memory"),  # no KB reserved: two blocks in 96 KB
        ("sm_87", (1024, 32, 0), 32, "warps"),
        ("sm_87", (128, 32, 81 * 1024), 8, "shared_memory"),  # two blocks in 164 KB, as on sm_80
        ("sm_110", (64, 32, 0), 48, "blocks"),
        ("sm_121", (128, 32, 99 * 1024), 4, "shared_memory"),
    ],
)
def test_each_limit(target, launch, warps, limiter):
    result = occupancy.occupancy(LIMITS[target], *launch)
    assert result.warps_per_sm == warps and limiter in result.limiters


def test_what_cannot_be_launched_and_what_is_not_known():
    for launch in ((1025, 32, 0), (128, 256, 0), (128, 32, 228 * 1024)):
        with pytest.raises(UsageError, match="cannot be launched on sm_90"):
            occupancy.occupancy(LIMITS["sm_90"], *launch)
    with pytest.raises(Refused, match="no occupancy for gfx942: in which units AMD"):
        occupancy.occupancy(LIMITS["gfx942"], 256, 64, 0)


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("sm_90a", "sm_90"),
        ("sm_100a", "sm_100"),
        ("sm_120f", "sm_120"),
        ("sm_103", "sm_103"),
        ("gfx90a", "gfx90a"),  # its a is a part of the name
        ("L40", "L40"),
    ],
)
def test_the_suffix_of_a_target_changes_no_limit(name, plain):
    assert occupancy.plain_target(name) == plain and (plain in LIMITS or plain == "L40")


def test_by_hand():
    found = tool_json("occupancy.py", "--platform", "H200", "--threads", 256, "--registers", 168)
    assert found["occupancy_pct"] == 12.5 and found["limiters"] == ["registers"]
    assert any(line.endswith(f"limits/sm_90.md:L{line.rpartition(':L')[2]}") for line in found["citations"])
    for target in ("9.0", "9.0a", "sm_90a", "SM90a"):
        found = tool_json("occupancy.py", "--platform", target, "--threads", 256, "--registers", 168)
        assert found["warps_per_sm"] == 8 and found["platform"] == target
    assert call_tool("occupancy.py", "--platform", "MI300X", "--threads", 256, "--registers", 64).returncode == 1
    assert call_tool("occupancy.py", "--platform", "X9", "--threads", 256, "--registers", 64).returncode == 1
    assert call_tool("occupancy.py", "--platform", "H200", "--threads", 0, "--registers", 64).returncode == 2
