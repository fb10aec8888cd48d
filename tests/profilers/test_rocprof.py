"""rocprofv3: published outputs are read as they are; what was not measured, or cannot be, is said and never believed.

Parser tested on samples, not run on AMD hardware.
"""

import shutil
import sqlite3
from pathlib import Path

import pytest
from conftest import BUNDLE, FIXTURES
from kernelopt import bundle
from kernelopt.diagnosis import amd
from kernelopt.errors import Refused, UsageError
from kernelopt.profilers import metrics, rocprof
from kernelopt.profilers.profile import KernelProfile

PUBLISHED = FIXTURES / "rocprofv3"
LIMITS = metrics.thresholds()
SCHEMA = bundle.read_json(BUNDLE / "reference" / "rocprof_metrics.json")


def collected(kernel: KernelProfile) -> dict:
    return {key: value for key, value in kernel.metrics.items() if value is not None}


# --- published outputs -------------------------------------------------------------------------------------------


def test_counters_of_an_mi300a_are_read():
    profile = rocprof.read(PUBLISHED / "mi300a_occupancy_counter_collection.csv")
    assert [kernel.name for kernel in profile.kernels][:4] == [
        "init_gaussian",
        *["apply_reflect_bc"] * 2,
        "compute_rhs",
    ]
    assert collected(profile.kernels[3]) == {
        "duration": 82.527,
        "achieved_occupancy": 81.251605,
        "vector_registers": 52,
        "accumulation_registers": 4,
        "scalar_registers": 32,
        "lds_bytes": 0,
        "scratch_bytes": 0,
    }
    assert profile.kernels[1].metrics["achieved_occupancy"] == 0.192478703
    assert profile.doubts == () and profile.work is profile.params is None
    assert "not run on AMD hardware" in rocprof.ORIGIN and profile.is_amd


def test_every_kernel_has_every_metric():
    for path in PUBLISHED.glob("*.csv"):
        for kernel in rocprof.read(path).kernels:
            assert set(kernel.metrics) == {row["key"] for row in SCHEMA["metrics"]}
            assert kernel.duration_us == kernel.metrics["duration"] > 1


def test_a_trace_that_rocpd_converted_spells_its_columns_otherwise():
    kernels = rocprof.read(PUBLISHED / "mi300a_rocpd2csv_kernel_trace.csv").kernels
    assert [kernel.duration_us for kernel in kernels] == [100.08, 51.32, 29.84, 51.52, 90.68]
    assert kernels[0].metrics["lds_bytes"] == 8456 and kernels[0].metrics["vector_registers"] == 16


def test_an_older_trace_names_scratch_a_private_segment():
    kernels = rocprof.read(PUBLISHED / "documentation_older_kernel_trace.csv").kernels
    assert len(kernels) == 8 and kernels[0].duration_us == 16.157
    assert kernels[0].metrics["scratch_bytes"] == 0 and kernels[0].metrics["vector_registers"] is None


def test_runs_in_a_folder_meet_by_dispatch_and_kernel(tmp_path):
    for number, counter in enumerate(("occupancy", "valubusy"), 1):
        nested = tmp_path / f"pmc_{number}" / "host"
        nested.mkdir(parents=True)
        shutil.copy(PUBLISHED / f"mi300a_{counter}_counter_collection.csv", nested / "3260_counter_collection.csv")
    (tmp_path / "pmc_1" / "host" / "3260_agent_info.csv").write_text('"Node_Id","Agent_Type"\n0,"CPU"\n')
    kernels = rocprof.read(tmp_path).kernels
    assert len(kernels) == 8
    busy = {"achieved_occupancy": 81.251605, "valu_busy": 51.287701}
    assert busy.items() <= kernels[3].metrics.items()


def test_the_time_is_that_of_the_run_without_counters(tmp_path):
    shutil.copy(PUBLISHED / "documentation_counter_collection.csv", tmp_path / "a_counter_collection.csv")
    shutil.copy(PUBLISHED / "documentation_older_kernel_trace.csv", tmp_path / "z_kernel_trace.csv")
    kernels = rocprof.read(tmp_path).kernels
    assert [kernel.metrics["waves"] for kernel in kernels] == [16384] * 4 + [None] * 4
    assert kernels[0].duration_us == 16.157  # 52.151 with counters


def test_counters_that_are_all_zero_are_none_and_named():
    profile = rocprof.read(PUBLISHED / "zeros_gfx900_counter_collection.csv")
    assert profile.kernels[0].metrics["valu_instructions"] is None
    (doubt,) = profile.doubts
    assert doubt.counters == ("SQ_INSTS_SALU", "SQ_INSTS_VALU") and "all zero" in doubt.reason
    assert (doubt.dispatch, doubt.kernel[:15]) == (1, "vectoradd_float")


# --- made up -----------------------------------------------------------------------------------------------------

HEADER = "Dispatch_Id,Kernel_Name,Scratch_Size,Counter_Name,Counter_Value,Start_Timestamp,End_Timestamp\n"


def made_up(folder: Path, name: str, counters: dict, dispatch=1) -> Path:
    """A counter collection of one dispatch of 100 us."""
    path = folder / f"made_up_{name}_counter_collection.csv"
    path.write_text(HEADER + "".join(f"{dispatch},k,0,{key},{value},1000,101000\n" for key, value in counters.items()))
    return path


def test_derived_metrics(tmp_path):
    made_up(tmp_path, "memory", {"FETCH_SIZE": 1000, "WRITE_SIZE": 500})
    made_up(tmp_path, "l2", {"TCC_HIT_sum": 30, "TCC_MISS_sum": 10})
    found = rocprof.read(tmp_path).kernels[0].metrics
    assert (found["memory_bytes_read"], found["memory_bytes_written"]) == (1024000, 512000)
    assert found["l2_hit_rate"] == 75


def test_half_of_a_ratio_is_no_ratio(tmp_path):
    found = rocprof.read(made_up(tmp_path, "hits", {"TCC_HIT_sum": 30})).kernels[0].metrics
    assert found["l2_hit_rate"] is None


def test_a_zero_beside_a_counter_that_works_is_believed(tmp_path):
    profile = rocprof.read(made_up(tmp_path, "lds", {"LDSBankConflict": 0, "SQ_WAVES": 64}))
    assert profile.kernels[0].metrics["lds_bank_conflict"] == 0 and profile.doubts == ()


def test_more_than_all_of_the_time_is_not_believed(tmp_path):
    profile = rocprof.read(made_up(tmp_path, "busy", {"MfmaUtil": 183.2, "VALUBusy": 100, "OccupancyPercent": "nan"}))
    found = profile.kernels[0].metrics
    assert found["mfma_busy"] is None and found["valu_busy"] == 100 and found["achieved_occupancy"] is None
    (doubt,) = profile.doubts
    assert doubt.counters == ("MfmaUtil",) and "183.2 %" in doubt.reason


def test_times_keep_their_nanoseconds(tmp_path):
    path = tmp_path / "made_up_kernel_trace.csv"
    path.write_text(
        "Dispatch_Id,Kernel_Name,Start_Timestamp,End_Timestamp\n1,k,1763737373737373731,1763737373737373834\n"
    )
    assert rocprof.read(path).kernels[0].duration_us == 0.103


# --- rocpd databases: made up, with the columns that AMD's data_views.sql gives these two views ---------------------

VIEWS = """
CREATE TABLE kernels (dispatch_id, name, start, "end", duration, lds_size, scratch_size);
CREATE TABLE counters_collection (dispatch_id, kernel_name, start, "end", duration, counter_name, value, vgpr_count,
    accum_vgpr_count, sgpr_count, lds_block_size, scratch_size);
"""


def made_up_database(path: Path, kernels: list[tuple], counters: list[tuple]) -> Path:
    database = sqlite3.connect(path)
    database.executescript(VIEWS)
    database.executemany("INSERT INTO kernels VALUES (?, ?, ?, ?, ?, ?, ?)", kernels)
    database.executemany("INSERT INTO counters_collection VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", counters)
    database.commit()
    database.close()
    return path


def test_a_database_is_read_like_the_csv(tmp_path):
    kernels = [(1, "k", 1000, 101000, 100000, 512, 16), (2, "other", 200000, 250000, 50000, 0, 0)]
    counters = [
        (1, "k", 1000, 101000, 100000, name, value, 32, 4, 48, 512, 16)
        for name, value in (("SQ_WAVES", 64.0), ("SQ_INSTS_MFMA", 0.0))
    ]
    path = made_up_database(tmp_path / "made_up_results.db", kernels, counters)
    for place in (path, tmp_path):
        first, second = rocprof.read(place).kernels
        assert (first.name, first.duration_us, second.duration_us) == ("k", 100, 50)
        launch = {"waves": 64, "mfma_instructions": 0, "vector_registers": 32, "scratch_bytes": 16, "lds_bytes": 512}
        assert launch.items() <= first.metrics.items()
        assert second.metrics["waves"] is None
    assert not list(tmp_path.glob("*-journal"))


def test_an_unknown_database_names_the_way_out(tmp_path):
    sqlite3.connect(tmp_path / "made_up.db").execute("CREATE TABLE t (x)").connection.close()
    (tmp_path / "no.db").write_text("no database at all, whatever its name says")
    for name in ("made_up.db", "no.db"):
        with pytest.raises(Refused, match="rocpd convert"):
            rocprof.read(tmp_path / name)


# --- files that cannot be read ----------------------------------------------------------------------------------


def test_two_processes_are_not_mixed(tmp_path):
    for name in ("rank0", "rank1"):
        made_up(tmp_path, name, {"SQ_WAVES": 64})
    with pytest.raises(Refused, match="two runs with the same counters"):
        rocprof.read(tmp_path)
    text = (PUBLISHED / "mi300a_occupancy_counter_collection.csv").read_text()
    (tmp_path / "made_up_both.csv").write_text(text + text.partition("\n")[2])
    with pytest.raises(Refused, match="comes twice"):
        rocprof.read(tmp_path / "made_up_both.csv")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no kernel"),
        ('"Name","Calls"\n"k",3\n', "no kernel"),
        (HEADER, "no kernel"),
        (HEADER + "1,k,0,SQ_WA", "cut off"),
        (HEADER + '1,"k', "no readable CSV"),
        (HEADER + "one,k,0,SQ_WAVES,64,1,2\n", "is not the number of a dispatch"),
    ],
)
def test_other_files_are_refused(tmp_path, text, reason):
    path = tmp_path / "made_up.csv"
    path.write_text(text)
    with pytest.raises(Refused, match=reason):
        rocprof.read(path)


def test_an_empty_folder_and_no_folder(tmp_path):
    with pytest.raises(Refused):
        rocprof.read(tmp_path)
    with pytest.raises(UsageError):
        rocprof.read(tmp_path / "absent")


# --- collecting --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["gfx942", "gfx950"])
def test_no_group_asks_for_more_than_the_hardware_counts_at_once(architecture):
    rows = {row["name"]: row for row in SCHEMA["counters"]}
    for group in SCHEMA["groups"]:
        assert 1 <= len(group) <= 4
        assert len({hardware for name in group for hardware in rows[name]["hardware"]}) <= 4
        assert all(architecture in rows[name]["architectures"] for name in group)
    assert {name for group in SCHEMA["groups"] for name in group} == rows.keys()


def test_every_metric_comes_from_a_counter_that_is_collected():
    columns = {"duration_us", *rocprof.COLUMNS.values()}
    counters = {row["name"] for row in SCHEMA["counters"]}
    for row in SCHEMA["metrics"]:
        assert {*row["counters"], *row.get("of", ())} <= counters | columns
    assert "L2CacheHit" not in counters


# --- what limits a kernel ----------------------------------------------------------------------------------------


def measured(read_mb: float, mfma: float, valu: float, occupancy: float | None = 80.0) -> dict:
    """Metrics of a kernel of 1000 us: at 5300 GB/s, 53 MB are 1 % of the bandwidth."""
    bytes_ = {"memory_bytes_read": read_mb * 1e6, "memory_bytes_written": 0}
    return {"duration": 1000.0, **bytes_, "mfma_busy": mfma, "valu_busy": valu, "achieved_occupancy": occupancy}


@pytest.mark.parametrize(
    ("m", "expected"),
    [
        (measured(4240, 10, 20), ("memory", "dram")),
        (measured(4240, 55, 20), ("memory", "dram")),  # 80 % of the bandwidth leads 55 % of the matrix cores
        (measured(530, 55, 20), ("compute", "matrix cores")),
        (measured(530, 10, 75), ("compute", "vector units")),
        (measured(530, 10, 20), ("latency", None)),
        (measured(530, 10, 20, occupancy=13.3), ("underutilized", None)),
        (measured(530, 10, 20, occupancy=None), ("latency", None)),
        (measured(6000, 10, 20), ("unknown", None)),  # 113 % of the bandwidth
        ({**measured(530, 10, 20), "mfma_busy": None}, ("unknown", None)),
        ({**measured(530, 10, 75), "mfma_busy": None}, ("compute", "vector units")),
        ({}, ("unknown", None)),
    ],
)
def test_classification(m, expected):
    found = amd.classify(m, LIMITS, bandwidth_gbps=5300)
    assert (found.bottleneck, found.limiter) == expected and found.reasons


def test_without_a_bandwidth_memory_is_not_ruled_out():
    idle = amd.classify(measured(530, 10, 20), LIMITS)
    assert idle.bottleneck == "unknown" and "not known: dram" in idle.reasons
    assert amd.classify(measured(530, 10, 75), LIMITS).bottleneck == "compute"


def test_a_share_above_the_bandwidth_is_named():
    reasons = amd.classify(measured(6000, 10, 20), LIMITS, bandwidth_gbps=5300).reasons
    assert reasons[0].startswith("dram 113.2 %") and "Infinity Cache" in reasons[0]


def test_every_threshold_has_a_source():
    text = (FIXTURES.parents[1] / "reference" / "thresholds.json").read_text()
    assert {name for name in LIMITS if name.startswith("amd_")} == {
        *(threshold for threshold, _, _ in amd.LIMITERS.values()),
        "amd_low_occupancy_pct",
    }
    assert text.count("AMD PerfXpert") == 4


@pytest.mark.parametrize(
    ("counters", "scratch", "expected"),
    [
        ({"OccupancyPercent": 80, "MfmaUtil": 10, "VALUBusy": 10}, 0, []),
        ({"OccupancyPercent": 80, "MfmaUtil": 10, "VALUBusy": 10}, 256, ["amd_scratch"]),
        ({"OccupancyPercent": 10, "MfmaUtil": 10, "VALUBusy": 10}, 0, ["amd_low_occupancy"]),
        (
            {"OccupancyPercent": 10, "MfmaUtil": 10, "VALUBusy": 95, "SQ_INSTS_MFMA": 64},
            0,
            ["amd_vector_bound_product"],
        ),
        ({"OccupancyPercent": 10, "VALUBusy": 95, "SQ_INSTS_MFMA": 64}, 0, []),
    ],
)
def test_findings_in_amds_terms(tmp_path, counters, scratch, expected):
    path = made_up(tmp_path, "findings", {**counters, "FETCH_SIZE": 1000, "WRITE_SIZE": 500})
    path.write_text(path.read_text().replace(",k,0,", f",k,{scratch},"))
    told = amd.diagnose(rocprof.read(path), LIMITS, 5300.0)
    assert [one.id for one in told.findings] == expected
    assert all(one.wiki.endswith("cdna.md") and one.evidence for one in told.findings)
