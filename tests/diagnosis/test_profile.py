"""Reading, classifying and rendering reports that were recorded on an H200, and every way that collecting can fail."""

import json
import re
import shutil
import stat
import tempfile
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import BUNDLE, FIXTURES, NEWER_THAN_THE_CAPTURES, call_tool, run_tool, tool_json
from kernelopt.device.outcomes import Outcome
from kernelopt.diagnosis import analysis, case, classify, findings, profile_folder, profile_pages
from kernelopt.diagnosis.diagnosis import Floor
from kernelopt.errors import EnvironmentLacks, Refused, TimedOut
from kernelopt.profilers import metrics, ncu, ncu_source
from kernelopt.profilers.profile import KernelProfile, Profile
from kernelopt.session import explorations, record_store
from kernelopt.session.digests import digest
from kernelopt.session.record import QualityGate

RECORDED = FIXTURES / "h200_row_softmax"
WORK = {
    "flops": 0,
    "bytes_in": None,
    "bytes_out": None,
    "bytes_min": 1073741824,
    "dtype": "bf16",
    "source": "given",
}
LIMITS = metrics.thresholds()
INPUTS = "input.pt"


@pytest.fixture(scope="module")
def three_passes() -> tuple[KernelProfile, ...]:
    return ncu.read(RECORDED / "three_passes.ncu-rep")


def test_a_report_is_read_with_every_kernel_and_metric(three_passes):
    assert [kernel.name for kernel in three_passes] == ["row_max", "row_sum", "normalise"]
    for kernel in three_passes:
        assert set(kernel.metrics) == {metric.key for metric in metrics.schema()}
        absent = {key for key, value in kernel.metrics.items() if value is None}
        assert absent == {"tcgen05_instructions", *NEWER_THAN_THE_CAPTURES}
        assert 100 < kernel.duration_us < 300


def test_the_naive_softmax_is_told_to_read_once(three_passes):
    found = analysis.from_metrics(Profile(three_passes, WORK), LIMITS)
    assert (found.classification.bottleneck, found.classification.limiter) == ("memory", "dram")
    assert sum(kernel.share_pct for kernel in found.kernels) == pytest.approx(100)
    best = found.findings[0]
    assert best.id == "excess_dram_traffic" and best.severity == "high"
    assert best.estimated_gain_pct == pytest.approx(50, abs=2)  # the one-pass kernel then took 0.503 of the time
    assert "several_kernels" in [finding.id for finding in found.findings]


def test_the_better_softmax_is_near_its_least_traffic():
    found = analysis.from_metrics(Profile(ncu.read(RECORDED / "one_pass.ncu-rep"), WORK), LIMITS)
    assert [finding.id for finding in found.findings] == ["near_least_traffic"]


def test_a_matrix_product_on_the_tensor_cores_is_compute_bound():
    work = {"flops": 2 * 4096**3, "bytes_min": 3 * 2 * 4096**2, "dtype": "bf16"}
    found = analysis.from_metrics(Profile(ncu.read(FIXTURES / "h200_matmul/bf16_4096.ncu-rep"), work), LIMITS)
    assert (found.classification.bottleneck, found.classification.limiter) == ("compute", "tensor pipe")
    ids = {finding.id for finding in found.findings}
    assert not ids & {"excess_dram_traffic", "low_occupancy", "tensor_cores_unused", "shared_bank_conflicts"}


def test_analyze_profile_on_a_bare_report_prints_the_contracted_keys():
    found = tool_json("analyze_profile.py", RECORDED / "three_passes.ncu-rep")
    assert {"kernels", "classification", "metrics", "missing_metrics", "findings"} <= set(found)
    assert {"name", "share_pct", "duration_us"} <= set(found["kernels"][0])
    assert {"class", "limiter", "reasons"} <= set(found["classification"])
    keys = {"id", "severity", "evidence", "inference", "actions", "wiki", "falsified_by"}
    assert all(keys <= set(finding) for finding in found["findings"])
    assert {"metric", "value", "unit"} == set(found["findings"][0]["evidence"][0])


def metrics_of(**values) -> dict:
    return {**{metric.key: None for metric in metrics.schema()}, **values}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, ("unknown", None)),
        ({"sm_throughput": 50.0}, ("unknown", None)),
        (
            {"sm_throughput": 40.0, "memory_throughput": 90.0, "dram_throughput": 90.0, "l2_throughput": 95.0},
            ("memory", "dram"),
        ),
        (
            {"sm_throughput": 40.0, "memory_throughput": 97.0, "dram_throughput": 1.0, "l1_throughput": 97.0},
            ("memory", "l1"),
        ),
        (
            {"sm_throughput": 90.0, "memory_throughput": 40.0, "fma_cycles": 88.0, "lsu_instructions": 20.0},
            ("compute", "fma pipe"),
        ),
        ({"sm_throughput": 70.0, "memory_throughput": 60.0, "tensor_cycles": 65.0}, ("compute", "tensor pipe")),
        ({"sm_throughput": 82.0, "memory_throughput": 85.0, "tensor_cycles": 82.0}, ("compute", "tensor pipe")),
        (  # pressure on the tensor pipe is no excuse for a DRAM that has no more to give
            {"sm_throughput": 62.0, "memory_throughput": 92.0, "dram_throughput": 92.0, "tensor_cycles": 62.0},
            ("memory", "dram"),
        ),
        ({"sm_throughput": 70.0, "memory_throughput": 68.0}, ("balanced", None)),
        (  # the L2's figure is not one of the memory throughput's parts: DRAM's is, and warps wait
            {
                "sm_throughput": 50.0,
                "memory_throughput": 64.0,
                "dram_throughput": 64.0,
                "l2_throughput": 82.0,
                "warp_latency": 10.0,
                "stall_long_scoreboard": 7.7,
            },
            ("latency", "long scoreboard"),
        ),
        (  # a full queue is a busy unit's mark
            {
                "sm_throughput": 78.0,
                "memory_throughput": 43.0,
                "xu_instructions": 79.4,
                "issue_active": 0.79,
                "warp_latency": 10.0,
                "stall_mio_throttle": 3.3,
            },
            ("compute", "xu pipe"),
        ),
        (  # neither DRAM nor the L1 is what the memory throughput is of
            {
                "sm_throughput": 40.0,
                "memory_throughput": 85.8,
                "dram_throughput": 11.0,
                "l1_throughput": 68.9,
                "l2_throughput": 85.0,
            },
            ("memory", "l2"),
        ),
        ({"sm_throughput": 3.0, "memory_throughput": 2.0, "waves_per_sm": 0.01}, ("underutilized", "small grid")),
        (
            {
                "sm_throughput": 30.0,
                "memory_throughput": 40.0,
                "waves_per_sm": 5.0,
                "warp_latency": 20.0,
                "stall_barrier": 12.0,
            },
            ("latency", "barrier"),
        ),
    ],
)
def test_classification(values, expected):
    found = classify.classify(metrics_of(**values), LIMITS)
    assert (found.bottleneck, found.limiter) == expected
    assert found.reasons


def findings_of(work=None, floor=None, **values) -> list[str]:
    profile = Profile((KernelProfile("k", 10.0, metrics_of(**values)),), work)
    return [finding.id for finding in analysis.from_metrics(profile, LIMITS, floor).findings]


BUSY = {"sm_throughput": 30.0, "memory_throughput": 90.0, "dram_throughput": 90.0}
IDLE = {"sm_throughput": 10.0, "memory_throughput": 20.0, "waves_per_sm": 4.0}


def test_a_pipe_that_is_full_before_the_floor_is_named_beside_the_limiter():
    """66 % busy, it leaves a third of the time; at 39.8 % of the floor that is in the way, at 70 % it is not."""
    issues = {"sm_throughput": 88.0, "memory_throughput": 36.0, "dram_throughput": 36.0, "issue_active": 0.88}
    even = {**issues, "cycles_active": 100.0, "cycles_active_most": 100.0}

    def beside(floor_pct=39.8, bound="memory", values=even, **pipe) -> list[str]:
        found = findings_of(floor=floor_pct and Floor(floor_pct, bound), **values, **pipe)
        return [id_ for id_ in found if id_ != "busy_issue_slots"]

    assert beside(xu_instructions=66.0) == ["busy_special_functions"]
    assert beside(floor_pct=70.0, xu_instructions=66.0) == beside(floor_pct=None, xu_instructions=66.0) == []
    assert beside(xu_instructions=59.0) == []
    assert beside(values={**even, "cycles_active": 95.0}, xu_instructions=62.0) == []  # SMs idle: less of the time
    assert beside(values=issues, xu_instructions=66.0) == []  # whether they do is unknown
    assert beside(fma_cycles=66.0) == ["busy_arithmetic_pipe"] and beside(bound="compute", fma_cycles=66.0) == []
    assert beside(tensor_cycles=50.0) == []


def test_findings_follow_from_their_metrics():
    sectors = {"load_sectors": 90.0, "store_sectors": 10.0, "tma_cycles": 0.0}
    assert findings_of(**BUSY, **sectors, load_bytes_per_sector=4.0, store_bytes_per_sector=32.0) == [
        "uncoalesced_loads"
    ]
    assert findings_of(**BUSY, **sectors, load_bytes_per_sector=32.0, store_bytes_per_sector=32.0) == []
    reduction = {
        "load_sectors": 99.0,
        "store_sectors": 1.0,
        "tma_cycles": 0.0,
    }  # one result a row: its store costs nothing
    assert findings_of(**BUSY, **reduction, load_bytes_per_sector=32.0, store_bytes_per_sector=4.0) == []
    assert findings_of(**BUSY, local_load_sectors=10.0, local_store_sectors=0.0) == ["local_memory_traffic"]
    assert findings_of(**BUSY, registers_per_thread=255.0, local_load_sectors=0.0, local_store_sectors=0.0) == []
    conflicts = {"shared_bank_conflicts": 50.0, "shared_wavefronts": 100.0}
    shared = {**BUSY, "dram_throughput": 10.0, "l1_throughput": 90.0, **conflicts, "warp_latency": 10.0}
    assert findings_of(**shared, stall_short_scoreboard=2.5) == ["shared_bank_conflicts"]
    assert findings_of(**shared, stall_short_scoreboard=0.9) == []  # nobody waits for shared memory
    assert findings_of(**BUSY, **conflicts, stall_short_scoreboard=2.5, warp_latency=10.0) == []  # DRAM limits
    assert findings_of(**IDLE, achieved_occupancy=10.0, limit_registers=1.0, limit_warps=4.0) == ["low_occupancy"]
    assert findings_of(**IDLE, stall_barrier=9.0, warp_latency=10.0) == ["stall_barrier"]
    assert findings_of(**{**IDLE, "waves_per_sm": 0.1}) == ["small_grid"]
    assert findings_of(**IDLE | {"waves_per_sm": 0.48}, cycles_active=50.0, cycles_active_most=100.0) == ["small_grid"]
    one_block_each = {**IDLE, "waves_per_sm": 0.48, "cycles_active": 96.0, "cycles_active_most": 100.0}
    assert "small_grid" not in findings_of(**one_block_each)  # each SM has its block: the GPU is filled, if thinly
    copied = {**sectors, "tma_cycles": 0.5, "load_bytes_per_sector": 4.0}  # bulk copies, which the sectors do not hold
    assert findings_of(**BUSY, **copied, dram_bytes_read=32e6, dram_bytes_written=0.0) == []
    assert findings_of(**BUSY, **copied) == []  # how much they carry is unknown
    assert findings_of(**BUSY, **{**copied, "tma_cycles": None}, compute_capability=8) == ["uncoalesced_loads"]
    spilled = {"local_load_sectors": 10.0, "local_store_sectors": 0.0, "load_sectors": 2000.0, "store_sectors": 0.0}
    assert findings_of(**BUSY, **spilled, tma_cycles=0.0, spill_instructions=1.0) == []  # half a percent
    matrix = {"flops": 10**12, "bytes_min": 10**6, "dtype": "bf16"}
    stencil = {**matrix, "flops": 4 * 10**6}  # the vector units do that beside the least bytes
    assert findings_of(stencil, **BUSY, tensor_cycles=0.0) == []
    assert findings_of(matrix, **BUSY, tensor_cycles=0.0) == ["tensor_cores_unused"]
    assert findings_of(matrix, **BUSY, tensor_cycles=50.0) == []
    assert findings_of(**BUSY) == []  # an absent metric proves nothing
    least = {"flops": 0, "bytes_min": 1000, "dtype": "bf16"}
    moved = {"dram_bytes_read": 9000.0, "dram_bytes_written": 100.0}
    assert findings_of(least, **IDLE, **moved, dram_throughput=37.0) == ["excess_dram_traffic"]  # the L2 keeps nothing
    assert findings_of(least, **IDLE, **moved, dram_throughput=5.0) == []
    gathered = {
        "load_sectors": 2000.0,
        "dram_bytes_read": 900.0,
        "dram_bytes_written": 100.0,
    }  # 64 times the least bytes
    assert findings_of(least, **IDLE, dram_throughput=15.0, **gathered) == []  # what bounds the problem is unknown
    assert findings_of(least, **IDLE, dram_bytes_read=2800.0, dram_bytes_written=0.0, dram_throughput=37.0) == []


def test_bytes_per_sector_of_the_loads_beside_cp_async_are_no_finding():
    """Loads that would use less than the inputs, which DRAM reads: cp.async is among the sectors, its bytes are not."""
    loads = {"load_sectors": 100.0, "store_sectors": 10.0, "load_bytes_per_sector": 4.0, "tma_cycles": 0.0}
    product = {"flops": 0, "bytes_min": 2900, "bytes_in": 2400, "dtype": "bf16"}
    dram = {**BUSY, **loads, "dram_bytes_written": 300.0}
    scattered = lambda work, **read: "uncoalesced_loads" in findings_of(work, **{**dram, **read})  # noqa: E731
    assert not scattered(product, dram_bytes_read=2400.0)
    assert scattered({**product, "bytes_in": 400}, dram_bytes_read=2400.0)  # plain loads use them all
    assert scattered(product, dram_bytes_read=1600.0)  # a gather from a table that is not read as a whole
    assert scattered({**product, "bytes_in": None}, dram_bytes_read=2400.0)
    assert scattered(product, dram_bytes_read=2400.0, tma_cycles=0.5)  # bulk copies may bring the rest


def test_few_warps_are_right_for_tiles_that_the_tensor_pipe_works_off_by_itself():
    few = {**IDLE, "achieved_occupancy": 10.0, "limit_registers": 1.0, "limit_warps": 4.0}
    assert (
        findings_of(**few) == findings_of(**few, gmma_instructions=0.0, tcgen05_instructions=0.0) == ["low_occupancy"]
    )
    assert findings_of(**few, gmma_instructions=2.9) == findings_of(**few, tcgen05_instructions=0.4) == []
    matrix = {"flops": 10**12, "bytes_min": 10**6, "dtype": "bf16"}
    assert findings_of(matrix, **few, tensor_cycles=3.0, tcgen05_instructions=0.1) == []  # it is used, if little


@pytest.mark.parametrize(
    ("capability", "newer", "expected"),
    [
        (9, {"gmma_instructions": 0.0}, ["mma_sync_on_hopper"]),
        (9, {"gmma_instructions": 1.5}, []),
        (10, {"tcgen05_instructions": 0.0}, ["mma_sync_on_blackwell"]),
        (11, {"tcgen05_instructions": 0.0}, ["mma_sync_on_blackwell"]),
        (10, {"tcgen05_instructions": 0.4}, []),
        (10, {}, []),  # an absent metric proves nothing
        (12, {}, []),  # GeForce Blackwell has no tcgen05
        (12, {"tcgen05_instructions": 0.0}, []),
        (8, {"gmma_instructions": 0.0, "tcgen05_instructions": 0.0}, []),
    ],
)
def test_mma_sync_is_a_finding_where_the_gpu_has_a_newer_instruction_alone(capability, newer, expected):
    product = {**BUSY, "compute_capability": float(capability), "hmma_instructions": 20.0, **newer}
    assert findings_of(**product, tensor_cycles=50.0) == expected
    assert findings_of(**product, tensor_cycles=1.0) == []
    assert findings_of(**{**product, "hmma_instructions": 0.0}, tensor_cycles=50.0) == []  # integers, or fp64


def test_every_metric_that_a_rule_reads_is_in_the_schema():
    known = {metric.key for metric in metrics.schema()}
    kinds = ("load", "async_copy", "store")
    assert {f"{kind}_{rest}" for kind in kinds for rest in ("sectors", "bytes_per_sector")} <= known
    source = "".join(Path(module.__file__).read_text() for module in (case, classify, findings))
    groups = (case.PIPES, classify.QUEUES, findings.OCCUPANCY_LIMITS)
    for group in (*groups, case.texts()["stalls"], *findings.EXPLAINED.values()):
        assert set(group) <= known
    assert {metric for _, metric, _, _ in case.NEWER_THAN_MMA_SYNC.values()} <= known
    read = set(re.findall(r'(?:m|\.metrics)(?:\.get\(|\[)"([a-z0-9_]+)"', source))
    assert read and read <= known, read - known


def test_every_finding_names_a_page_that_exists():
    bundle = BUNDLE
    pages = set(re.findall(r'"([a-z-]+\.md)"', (BUNDLE / "reference/findings.json").read_text()))
    assert len(pages) >= 5
    assert all((bundle / "gpu-wiki/docs/optimization" / page).is_file() for page in pages)


# --- the folder of a profile -----------------------------------------------------------------------------------


def store(session, version: str, report: str, kernel_sha256: str) -> None:
    folder = session.profile(version, profile_folder.MODE)
    folder.mkdir(parents=True)
    (folder / "metrics.json").write_text(json.dumps(Profile(ncu.read(RECORDED / report), WORK).to_json()))
    params = {"version": version, "kernel_sha256": kernel_sha256, "workload": "default", "shapes": [[32768, 8192]]}
    params |= {"dtype": "bf16", "cache": "cold", "clocks": "as found", "profiler": "ncu", "device": "NVIDIA H200"}
    (folder / "params.json").write_text(json.dumps({**params, "timestamp": "2026-11-21T02:43:52Z"}))


def test_the_report_compares_with_the_version_before(session):
    store(session, "v0", "three_passes.ncu-rep", "0" * 64)
    store(session, "v1", "one_pass.ncu-rep", "1" * 64)
    profile = profile_folder.read(session.profile("v1", profile_folder.MODE))
    (before,) = profile_folder.earlier(session, profile.params)
    text = profile_pages.page(profile, analysis.diagnose(profile, [before]), before)
    assert "## Against v0" in text and "| all kernels (us) | 509 | 258 | -49.3 % |" in text
    assert "recorded on NVIDIA H200" in text and "| section | metric | v1 | v0 | unit |" in text
    for metric in metrics.schema():
        assert f"| {metric.label} |" in text
    assert profile_folder.earlier(session, replace(profile.params, cache="warm")) == []


def test_a_version_is_compared_with_the_one_that_it_was_made_from(session):
    records = record_store.RecordStore(session)
    for version, commit, result in (("v0", "a" * 40, "PASS"), ("v1", None, "FAIL")):
        gate = QualityGate(result, None)
        records.save(replace(record_store.empty(version), git_commit_hash=commit, quality_gate=gate))
        store(session, version, "three_passes.ncu-rep", "0" * 64)
    store(session, "v2", "one_pass.ncu-rep", "2" * 64)
    params = profile_folder.read(session.profile("v2", profile_folder.MODE)).params
    profiles = profile_folder.earlier(session, params)
    assert [profile.params.version for profile in profiles] == ["v0", "v1"]
    assert profile_folder.parent(session, profiles).params.version == "v0"
    assert profile_folder.parent(session, profiles[1:]).params.version == "v1"  # better than nothing
    assert profile_folder.parent(session, []) is None
    records.set_masked(["v1"], True)
    assert [profile.params.version for profile in profile_folder.earlier(session, params)] == ["v0"]


def test_a_round_starts_from_the_profile_of_the_best_kernel_and_no_other(session):
    sha256, accepted = digest(session.kernel), QualityGate("PASS", None)
    empty = record_store.empty("v0")
    record = replace(empty, kernel_sha256=sha256, git_commit_hash="a" * 40, quality_gate=accepted)
    assert profile_folder.evidence_for_round(session, session.task(), "v1", record) is None
    store(session, "v0", "three_passes.ncu-rep", digest(session.kernel))
    evidence = profile_folder.evidence_for_round(session, session.task(), "v1", record)
    assert evidence.bottleneck_type == "memory" and "1.99 times the least bytes" in evidence.evidence_chain
    other = replace(record, kernel_sha256="f" * 64)
    assert profile_folder.evidence_for_round(session, session.task(), "v1", other) is None


@pytest.mark.parametrize(("content", "code"), [(None, 2), ("", 2), ("{}", 1), ('{"kernels": []}', 1), ("[1]", 1)])
def test_a_folder_without_a_profile_is_said(tmp_path, content, code, run_here):
    if content is not None:
        (tmp_path / "metrics.json").write_text(content)
    done = run_here("analyze_profile.py", tmp_path)
    assert done.returncode == code and done.stderr.count("\n") == 1
    assert "profile_kernel.sh" in done.stderr or content == ""  # an empty file is no JSON


def test_one_of_several_reports_must_be_named(tmp_path, run_here):
    for name in ("a", "b"):
        (tmp_path / f"{name}.ncu-rep").write_bytes(b"")
    done = run_here("analyze_profile.py", tmp_path)
    assert done.returncode == 2 and "holds 2 reports" in done.stderr


def test_a_file_that_is_no_report_is_refused(tmp_path):
    (tmp_path / "x.ncu-rep").write_bytes(b"nothing")
    done = call_tool("analyze_profile.py", tmp_path / "x.ncu-rep")
    assert done.returncode == 1


# --- a stand-in for ncu_report, whose objects are of no use once what they came from is collected -----------------


class Owned:
    """What ncu_report gives out: Python's reference to it does not keep its owner, in whose memory it lies."""

    def __init__(self, owner=None):
        self._owner = owner and weakref.ref(owner)

    def alive(self):
        """This object; AssertionError where the real one would end the process."""
        if self._owner:
            owner = self._owner()
            assert owner is not None, f"{type(self).__name__} was used after its owner was collected"
            owner.alive()
        return self


class OwnedContext(Owned):
    def num_ranges(self) -> int:
        return 2

    def range_by_idx(self, index: int) -> "OwnedRange":
        return OwnedRange(self)


class OwnedRange(Owned):
    def num_actions(self) -> int:
        return self.alive() and 2

    def action_by_idx(self, index: int) -> "OwnedAction":
        return OwnedAction(self.alive())


class OwnedAction(Owned):
    def name(self) -> str:
        return self.alive() and "k"

    def metric_names(self) -> tuple[str, ...]:
        return self.alive() and ("gpu__time_duration.sum", ncu_source.SAMPLES)

    def __getitem__(self, name: str) -> "OwnedMetric":
        return OwnedMetric(self.alive())

    def rule_results_as_dicts(self) -> list:
        return self.alive() and []

    def source_info(self, address: int) -> None:
        self.alive()

    def sass_by_pc(self, address: int) -> str:
        return self.alive() and "EXIT"

    def ptx_by_pc(self, address: int) -> str:
        return self.alive() and ""

    def source_files(self) -> dict[str, str]:
        return self.alive() and {}


class OwnedMetric(Owned):
    def value(self) -> float:
        return self.alive() and 5.0

    def unit(self) -> str:
        return self.alive() and "us"

    def num_instances(self) -> int:
        return self.alive() and 1

    def as_uint64(self, index: int) -> int:
        return self.alive() and 7

    def correlation_ids(self) -> "OwnedMetric":
        return OwnedMetric(self.alive())


def test_launches_are_read_while_what_they_came_from_is_alive(monkeypatch):
    monkeypatch.setattr(ncu, "reader", lambda: SimpleNamespace(load_report=lambda _: OwnedContext()))
    assert [(kernel.name, kernel.duration_us) for kernel in ncu.read(Path("r.ncu-rep"))] == [("k", 5.0)] * 4
    kernels = ncu_source.read(Path("r.ncu-rep"))
    assert [[own.sass for own in kernel.instructions] for kernel in kernels] == [["EXIT"]] * 4


def test_the_stand_in_tells_of_a_collected_report():
    orphan = OwnedContext().range_by_idx(0)
    with pytest.raises(AssertionError, match="OwnedRange was used after its owner was collected"):
        orphan.action_by_idx(0)


# --- collecting: a stand-in sandbox for ncu's failures; test_gpu.py runs the real ncu ---------------------------


class StandInSandbox:
    """Gives back a prepared outcome in place of running ncu."""

    def __init__(self, log: str, result=None, timed_out=False):
        self.outcome = Outcome(result, None if timed_out else 1, None, timed_out, 1.0, log)

    def run_under(self, *_, **__):
        return self.outcome

    def folder(self, _):
        return tempfile.TemporaryDirectory()


@pytest.fixture
def fake_ncu(tmp_path, monkeypatch):
    program = tmp_path / "bin" / "ncu"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'Version 2025.3.1.0'\n")
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    return program


@pytest.mark.parametrize("symptom", ncu.FAILURES)
def test_each_failure_of_ncu_names_its_mend(tmp_path, fake_ncu, symptom):
    sandbox = StandInSandbox(f"==PROF== Connected\n==ERROR== {symptom} - see the web\n")
    with pytest.raises(EnvironmentLacks) as caught:
        ncu.collect(sandbox, tmp_path / "k.py", INPUTS, tmp_path / "r.ncu-rep", "cold", 5)
    assert caught.value.exit_code == 3 and symptom in str(caught.value)


@pytest.mark.parametrize(
    ("capability", "version", "lack"),
    [
        ("7.0", "Nsight Compute 2025.3.1.0", "the last version that does is 2025.2"),
        ("7.0", "Nsight Compute 2026.3.0.0", "profiles no GPU of compute capability 7.0"),
        ("7.0", "Nsight Compute 2025.2.1.0", None),
        ("7.0", "Nsight Compute 2024.10.0.0", None),
        ("7.0", "Nsight Compute, version unknown", None),
        ("7.5", "Nsight Compute 2026.3.0.0", None),
    ],
)
def test_a_gpu_that_newer_versions_left_out_is_told_the_last_that_profiles_it(capability, version, lack):
    said = ncu.left_out(capability, version)
    assert said is None if lack is None else lack in said


def test_on_such_a_gpu_nothing_is_started(tmp_path, fake_ncu, monkeypatch):
    monkeypatch.setattr(ncu.gpu, "query", lambda: {"compute_capability": "7.0"})  # a stand-in for a V100
    with pytest.raises(EnvironmentLacks, match=r"2025\.3\.1\.0 profiles no GPU .* is 2025\.2: install it"):
        ncu.collect(None, tmp_path / "k.py", INPUTS, tmp_path / "r.ncu-rep", "cold", 5)


def test_no_kernel_profiled_is_no_success(tmp_path, fake_ncu):
    sandbox = StandInSandbox("==WARNING== No kernels were profiled.\n", result={"torch": "x", "window": [0, 1]})
    with pytest.raises(Refused, match="No kernels were profiled"):
        ncu.collect(sandbox, tmp_path / "k.py", INPUTS, tmp_path / "r.ncu-rep", "cold", 5)


def test_an_old_report_is_never_taken_for_a_new_one(tmp_path, fake_ncu):
    (tmp_path / "r.ncu-rep").write_bytes(b"old")
    with pytest.raises(Refused):
        ncu.collect(StandInSandbox("", result={}), tmp_path / "k.py", INPUTS, tmp_path / "r.ncu-rep", "cold", 5)
    assert not (tmp_path / "r.ncu-rep").exists()


def test_a_failing_kernel_and_a_time_out_under_ncu(tmp_path, fake_ncu):
    failed = StandInSandbox("", result={"error": {"status": "RUNTIME_ERROR", "message": "boom"}})
    with pytest.raises(Refused, match="boom"):
        ncu.collect(failed, tmp_path / "k.py", INPUTS, tmp_path / "r.ncu-rep", "cold", 5)
    with pytest.raises(TimedOut):
        ncu.collect(StandInSandbox("", timed_out=True), tmp_path / "k.py", INPUTS, tmp_path / "r.ncu-rep", "cold", 5)


def test_the_command_leaves_the_clocks_alone_and_needs_no_name_pattern(tmp_path, fake_ncu):
    command = " ".join(ncu.command(tmp_path / "r.ncu-rep", "warm"))
    assert "--clock-control none" in command and "--profile-from-start off" in command
    assert "--cache-control none" in command and "--kernel-name" not in command and "--set full" not in command


def test_without_ncu_or_gpu_the_tool_says_what_is_missing(session, tmp_path):
    done = run_tool("profile_kernel.sh", "--workspace", session.root, "--version", "v0")
    if done.returncode != 0:  # on a machine without GPU and profiler
        assert done.returncode == 3 and done.stderr.count("\n") == 1
        assert not list(session.root.glob("profiles/**/*.json"))


def test_a_profile_of_another_session_is_named(run_here):
    profile = BUNDLE / "examples" / "row_softmax" / "h200" / "profiles" / "v0" / "annotation"
    done = run_here("analyze_profile.py", profile, "--workspace", BUNDLE / "examples" / "attention", "--brief")
    assert "is it another session's?" in done.stderr and "## Kernel\n" not in done.stdout
    assert not run_here("analyze_profile.py", profile, "--workspace", profile.parents[2], "--brief").stderr


def test_go_on_comes_with_what_the_last_exploration_brought(tmp_path):
    root = tmp_path / "kernel_opt_x"
    shutil.copytree(BUNDLE / "examples" / "fp8_block_product", root)
    profile, file = root / "profiles" / "v0" / "annotation", root / "explore" / "e1.json"
    assert "brought" not in call_tool("analyze_profile.py", profile).stdout
    explored = json.loads(file.read_text())
    for row in explored["rows"]:
        row["against_best"] = row["against_best"] and {"point": 1.004, "ci95": [1.003, 1.005]}
        row["others"], row["mean"] = {}, None  # as of one workload
    file.write_text(json.dumps(explored))
    lines = call_tool("analyze_profile.py", profile).stdout.splitlines()
    (at,) = [at for at, line in enumerate(lines) if line.startswith("go on: ")]
    assert lines[at + 1] == "e1 brought 0.4 % over best (v0), less than 2 %: " + explorations.FINISH
    assert lines[at + 1] in call_tool("analyze_profile.py", profile, "--workspace", root, "--brief").stdout


# --- the reader in a process of its own ------------------------------------------------------------------------


def test_where_the_reader_would_crash_a_report_is_read_in_another_process(monkeypatch):
    report = RECORDED / "one_pass.ncu-rep"
    here = ncu.read(report)
    monkeypatch.setattr(ncu, "crashes_here", lambda: True)
    monkeypatch.setattr(ncu, "read_launches", None)  # not in this process
    assert ncu.read(report) == here


def test_what_the_other_process_says_of_a_broken_report_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(ncu, "crashes_here", lambda: True)
    (tmp_path / "x.ncu-rep").write_bytes(b"no report")
    with pytest.raises(Refused, match=r"cannot be read: .* holds no kernel"):
        ncu.read(tmp_path / "x.ncu-rep")
    monkeypatch.setattr(ncu.sys, "executable", "false")
    with pytest.raises(Refused, match="its reader ended with 1"):
        ncu.read(tmp_path / "x.ncu-rep")


def test_a_fresh_report_says_how_far_the_kernel_is_from_its_floor(session):
    """As the profiler hands it over: without the page of the GPU, which the workspace knows."""
    recorded = profile_folder.read(BUNDLE / "examples" / "row_softmax" / "h200" / "profiles" / "v0" / "annotation")
    fresh, folder = replace(recorded, product=None, recorded_us=None), session.profile("v0", "annotation")
    folder.mkdir(parents=True)
    profile_pages.write(folder, "annotation", fresh, session)
    text = (folder / "report.md").read_text()
    assert "floor unknown" not in text and "% of the floor at the copy rate" in text
    read_again = analysis.diagnose(profile_folder.read(folder, session))
    assert read_again.speed_of_light.floor_share_pct and f"Stop? no: {read_again.speed_of_light.reason}." in text
