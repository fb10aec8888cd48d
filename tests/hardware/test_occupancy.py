"""Theoretical occupancy against Nsight Compute's own figure, and by hand."""

import json

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


AMD = json.loads((FIXTURES / "occupancy/amd.json").read_text())["rows"]


def test_amd_compilers_own_line_says_the_same_of_many_kernels():
    """fixtures/occupancy: what the registers of each kernel allow on a SIMD. The compiler knows no dynamic LDS."""
    told = {(row["target"], row["kernel"], row["waves"]): row["occupancy"] for row in AMD}
    ours = {
        (row["target"], row["kernel"], row["waves"]): occupancy.waves_per_simd(
            LIMITS[row["target"]], row["vgprs"], row["sgprs"]
        )
        for row in AMD
    }
    assert len(told) > 200 and ours == told
    assert {row["target"] for row in AMD} == {name for name in LIMITS if name.startswith("gfx")}
    assert {row["occupancy"] for row in AMD if row["target"] == "gfx942"} >= {1, 3, 4, 6, 7, 8}


@pytest.mark.parametrize(
    ("target", "launch", "waves", "limiters"),
    [
        ("gfx942", (256, 64, 0, 30), 32, ["waves", "vgprs"]),  # 8 waves a SIMD
        ("gfx942", (256, 170, 0, 30), 8, ["vgprs"]),  # AMD's own example: 176 after rounding, twice in 512
        ("gfx942", (256, 32, 0, 106), 24, ["sgprs"]),  # 112 and 16 of the trap handler, six times in 800
        ("gfx942", (512, 170, 0, 30), 8, ["vgprs"]),  # 2 a SIMD hold one workgroup of 8
        ("gfx942", (256, 64, 16385, 30), 12, ["lds"]),  # 33 units of 512 bytes, three times in 64 KB
        ("gfx950", (256, 64, 40960, 30), 16, ["lds"]),
        ("gfx950", (256, 64, 40961, 30), 12, ["lds"]),  # units of 1280 bytes
        ("gfx90a", (128, 32, 0, 30), 32, ["waves", "workgroups"]),  # 16 barriers
        ("gfx90a", (64, 32, 0, 30), 32, ["waves"]),  # a single wave needs none
        ("gfx1100", (128, 97, 0, 0), 48, ["vgprs"]),  # 120 after rounding, 12 times in 1536
        ("gfx1201", (256, 32, 32769, 0), 24, ["lds"]),  # 33 units of 1024 bytes, three times in 128 KB
    ],
)
def test_each_limit_of_amd(target, launch, waves, limiters):
    threads, vgprs, lds, sgprs = launch
    result = occupancy.occupancy(LIMITS[target], threads, vgprs, lds, sgprs)
    assert result.warps_per_sm == waves and list(result.limiters) == limiters


def test_what_cannot_be_launched_and_what_is_not_known():
    for launch in ((1025, 32, 0), (128, 256, 0), (128, 32, 228 * 1024)):
        with pytest.raises(UsageError, match="cannot be launched on sm_90"):
            occupancy.occupancy(LIMITS["sm_90"], *launch)
    for launch in ((1025, 32, 0), (256, 64, 65 * 1024)):
        with pytest.raises(UsageError, match="cannot be launched on gfx942"):
            occupancy.occupancy(LIMITS["gfx942"], *launch)
    with pytest.raises(Refused, match=r"no occupancy for gfx1250: workgroups_per_cu: UNKNOWN"):
        occupancy.occupancy(LIMITS["gfx1250"], 256, 64, 0)


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
    cdna = tool_json(
        "occupancy.py", "--platform", "MI300X", "--threads", 256, "--registers", 128, "--shared-bytes", 30000
    )
    assert (cdna["warps_per_sm"], cdna["limiters"]) == (8, ["lds"])
    assert any(line.startswith("vgprs_per_simd: 512 registers <- ") for line in cdna["citations"])
    assert call_tool("occupancy.py", "--platform", "gfx1250", "--threads", 256, "--registers", 64).returncode == 1
    assert call_tool("occupancy.py", "--platform", "X9", "--threads", 256, "--registers", 64).returncode == 1
    assert call_tool("occupancy.py", "--platform", "H200", "--threads", 0, "--registers", 64).returncode == 2
