"""The four modes: what each collects, how it is analysed, and what happens where something is missing.

The captures are real ones of an H200.
"""

import contextlib
import json
import lzma
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import FIXTURES, NEWER_THAN_THE_CAPTURES, tool_json
from kernelopt.diagnosis import analysis, classify, profile_pages, speed_of_light
from kernelopt.diagnosis.diagnosis import Diagnosis, Floor
from kernelopt.errors import EnvironmentLacks, Refused
from kernelopt.hardware import wiki
from kernelopt.hardware.card import Card
from kernelopt.profilers import collect, metrics, ncu, ncu_source, nsys, rocprof, timeline, torch_trace
from kernelopt.profilers.profile import KernelProfile, Params, Profile

LIMITS = metrics.thresholds()
CAPTURED = FIXTURES / "bottlenecks"
TRACE = FIXTURES / "h200_timeline" / "three_passes.json"


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Paths of the recorded reports by name."""
    folder = tmp_path_factory.mktemp("reports")
    for packed in CAPTURED.glob("*.ncu-rep.xz"):
        (folder / packed.stem).write_bytes(lzma.decompress(packed.read_bytes()))
    return {path.stem: path for path in folder.glob("*.ncu-rep")}


def diagnosed(*kernels: KernelProfile) -> Diagnosis:
    """By the metrics alone, of a problem that nobody counted."""
    return analysis.from_metrics(Profile(kernels), LIMITS)


# --- a kernel whose bottleneck is known is told by its counters -------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected", "first"),
    [
        ("streaming_add", ("memory", "dram"), None),
        ("strided_gather", ("memory", "dram"), "uncoalesced_loads"),
        ("hmma_matmul", ("memory", "l2"), "mma_sync_on_hopper"),
        ("wgmma_matmul", ("compute", "tensor pipe"), "busy_tensor_pipe"),
        ("spilling_tile", ("latency", "long scoreboard"), "register_spills"),
        ("one_block", ("underutilized", "small grid"), "small_grid"),
        ("library_softmax", ("compute", "instruction issue"), "busy_issue_slots"),
    ],
)
def test_a_known_bottleneck_is_found(reports, name, expected, first):
    found = diagnosed(*ncu.read(reports[name]))
    assert (found.classification.bottleneck, found.classification.limiter) == expected
    assert next((finding.id for finding in found.findings), None) == first
    assert found.missing_metrics == NEWER_THAN_THE_CAPTURES and found.warnings == ()


def test_wide_loads_are_not_taken_for_scattered_ones(reports):
    (kernel,) = ncu.read(reports["streaming_add"])
    m = kernel.metrics
    assert m["load_bytes_per_sector"] == 32  # although a request of 16 bytes a thread takes 16 sectors, not 4
    assert not [finding for finding in diagnosed(kernel).findings if "uncoalesced" in finding.id]


def test_many_registers_are_no_spill(reports):
    (kernel,) = ncu.read(reports["wgmma_matmul"])
    assert kernel.metrics["registers_per_thread"] > 80
    ids = [finding.id for finding in diagnosed(kernel).findings]
    assert "register_spills" not in ids and "local_memory_traffic" not in ids


def test_nvidias_rules_are_told_with_their_own_estimates(reports):
    rules = ncu.read(reports["spilling_tile"])[0].rules
    local = next(rule for rule in rules if "Local Load" in rule.message)
    assert local.speedup_pct > 30 and not any("@" in rule.message for rule in rules)
    pipes = next(rule for rule in rules if rule.name == "High Pipe Utilization")
    assert pipes.speedup_pct is None  # NVIDIA's figure there is of the pipes' use, not of the time


def test_a_report_of_the_wrong_kernel_is_doubted(reports):
    (kernel,) = ncu.read(reports["streaming_add"])
    wrong = replace(kernel, name="void at::native::distribution_elementwise_grid_stride_kernel<float, 4>")
    (warning,) = diagnosed(wrong).warnings
    assert "is this the kernel that was meant" in warning
    twice = diagnosed(kernel, kernel).warnings
    assert "appears several times" in twice[0]
    impossible = replace(kernel, metrics={**kernel.metrics, "dram_throughput": 140.0})
    assert "above 105 % of a peak: dram_throughput" in diagnosed(impossible).warnings[0]
    assert diagnosed(replace(kernel, metrics={**kernel.metrics, "dram_throughput": 104.0})).warnings == ()


# --- rules on counters that no capture at hand shows: made-up figures ------------------------------------------------


def found_ids(**values) -> list[str]:
    m = {**{metric.key: None for metric in metrics.schema()}, **values}
    return [finding.id for finding in diagnosed(KernelProfile("k", 100.0, m)).findings]


BUSY = {"sm_throughput": 85.0, "memory_throughput": 20.0, "duration": 100.0, "waves_per_sm": 8.0}


def test_uneven_work_divergence_and_a_partial_last_wave():
    assert found_ids(**BUSY, cycles_active=1000, cycles_active_most=1500) == ["uneven_work"]
    assert found_ids(**BUSY, cycles_active=1000, cycles_active_most=1100) == []
    assert found_ids(**BUSY, threads_per_instruction=10.0) == ["divergent_warps"]
    assert found_ids(**{**BUSY, "waves_per_sm": 2.1}) == ["partial_last_wave"]
    assert found_ids(**{**BUSY, "waves_per_sm": 2.9}) == found_ids(**{**BUSY, "waves_per_sm": 2.0}) == []


def test_a_run_time_index_is_told_from_a_spill():
    local = {
        **BUSY,
        "local_load_sectors": 10.0,
        "local_store_sectors": 10.0,
        "load_sectors": 20.0,
        "store_sectors": 0.0,
    }
    assert found_ids(**local, spill_instructions=5) == ["register_spills"]
    assert found_ids(**local, spill_instructions=0) == found_ids(**local) == ["local_memory_traffic"]


def test_a_very_short_kernel_is_launch_overhead():
    m = {"sm_throughput": 5.0, "memory_throughput": 9.0, "duration": 2.0, "waves_per_sm": 3.0}
    assert classify.classify(m, LIMITS).limiter == "launch overhead"


# --- speed of light --------------------------------------------------------------------------------------------------


def test_a_saturated_l1_with_an_idle_dram_is_not_at_the_roofline():
    m = {
        "sm_throughput": 20.0,
        "memory_throughput": 97.8,
        "dram_throughput": 0.4,
        "tensor_cycles": 1.9,
        "l1_throughput": 97.8,
    }
    found = speed_of_light.analyse(m, None, [], LIMITS)
    assert found.efficiency_pct == 97.8 and found.at_roofline is False and not found.should_stop


def test_the_floor_decides_when_to_stop(reports):
    m = ncu.read(reports["streaming_add"])[0].metrics
    assert speed_of_light.analyse(m, Floor(97.0, "memory"), [], LIMITS).should_stop
    far = speed_of_light.analyse(m, Floor(40.0, "memory"), [], LIMITS)
    assert far.at_roofline and not far.should_stop and "more work than the problem needs" in far.reason
    unknown = speed_of_light.analyse(m, None, [], LIMITS)  # a busy DRAM, and nobody counted what the problem needs
    assert not unknown.should_stop and "floor unknown" in unknown.reason and unknown.at_roofline


def test_tensor_cores_are_seen_and_missing_counters_are_named_one_by_one(reports):
    (product,) = ncu.read(reports["wgmma_matmul"])
    assert speed_of_light.analyse(product.metrics, None, [], LIMITS).uses_tensor_cores
    nothing = speed_of_light.analyse({}, None, [], LIMITS)
    assert nothing.warnings == tuple(f"{key} was not collected" for key in speed_of_light.NEEDED)
    assert nothing.efficiency_pct is nothing.at_roofline is nothing.uses_tensor_cores is None
    assert not nothing.should_stop


def test_a_standstill_is_a_reason_to_stop():
    m = {"sm_throughput": 50.0, "memory_throughput": 40.0, "dram_throughput": 30.0}
    assert speed_of_light.analyse(m, None, [50.1, 49.9], LIMITS).converged
    assert not speed_of_light.analyse(m, None, [50.1], LIMITS).converged
    assert not speed_of_light.analyse(m, None, [45.0, 49.9], LIMITS).converged
    assert speed_of_light.analyse(m, Floor(60.0, "memory"), [50.1, 49.9], LIMITS).should_stop


# --- source lines and instructions ------------------------------------------------------------------------------------


def test_the_samples_fall_on_lines_and_instructions(reports):
    (kernel,) = ncu_source.read(reports["spilling_tile"])
    assert len(kernel.instructions) > 500 and kernel.instructions[0].address == 0
    first = ncu_source.lines(kernel)[0]
    assert first.text == "total = tl.dot(left, right, total)" and first.share_pct > 50
    assert first.stall == "long_scoreboard"
    shares = [line.share_pct for line in ncu_source.lines(kernel)]
    assert sum(shares) == pytest.approx(100) and shares == sorted(shares, reverse=True)
    sass = ncu_source.annotated_sass(kernel)
    assert "HMMA.16816.F32.BF16" in sass and "STL" in sass and sass.startswith("000000")
    ((file, text),) = ncu_source.annotated_source(kernel).items()
    assert Path(file).name == "kernels.py" and "% |         total = tl.dot(left" in text


def test_excess_sectors_point_at_the_gather(reports):
    (kernel,) = ncu_source.read(reports["strided_gather"])
    worst = max(ncu_source.lines(kernel), key=lambda line: line.excess_sectors)
    assert "stride % n" in worst.text and worst.excess_sectors > 1e7


def test_a_report_without_samples_tells_no_shares():
    (kernel,) = ncu_source.read(FIXTURES / "h200_row_softmax" / "one_pass.ncu-rep")
    assert {line.share_pct for line in ncu_source.lines(kernel)} == {None}
    assert kernel.sources == {} and "%" not in ncu_source.annotated_sass(kernel)


def test_the_verbose_page_and_the_files_of_mode_ncu(reports, tmp_path):
    collect.write_source(tmp_path, ncu_source.read(reports["spilling_tile"]))
    assert (tmp_path / "sass" / "tiled_matmul.sass").exists() and (tmp_path / "source").is_dir()
    hotspots = json.loads((tmp_path / "hotspots.json").read_text())
    assert len(hotspots[0]["lines"]) <= collect.HOTSPOTS
    triton = [
        {
            "name": "k",
            "compiled": [COMPILED],
            "autotuned": {"best": "B: 2", "trials": [{"config": "B: 2", "times_us": [5.0]}]},
        }
    ]
    profile = Profile(ncu.read(reports["spilling_tile"]), params=replace(PARAMS, triton=triton))
    text = profile_pages.verbose_page(profile, analysis.diagnose(profile), collect.read_hotspots(tmp_path))
    for part in (
        "tl.dot(left, right, total)",
        "NVIDIA estimates",
        "k` autotuned to B: 2",
        "255 registers, 4 spills",
        "k-0.ptx",
    ):
        assert part in text
    assert all(f"| {metric.label} |" in text for metric in metrics.schema())


def test_what_this_version_of_triton_does_not_show_is_said():
    unknown = {"name": "k", "compiled": None, "autotuned": None}
    assert "not known" in profile_pages.compiled_lines([unknown])[0]
    assert "no Triton kernel of the file ran" in profile_pages.compiled_lines([{**unknown, "compiled": []}])[0]
    assert "holds no Triton kernels" in profile_pages.compiled_lines([])[0]


COMPILED = {"registers": 255, "spills": 4, "shared_bytes": 0, "num_warps": 4, "num_stages": 3, "files": ["k-0.ptx"]}
PARAMS = Params(
    version="v1",
    kernel_sha256="0" * 64,
    workload="default",
    shapes=[[4, 4]],
    dtype="bf16",
    device="NVIDIA H200",
    cache="cold",
    clocks="as found, not locked",
    profiler="Nsight Compute",
    timestamp="2026-11-21T00:00:00Z",
)


# --- timelines --------------------------------------------------------------------------------------------------------


def test_the_timeline_of_a_recorded_trace():
    found = timeline.analyse(torch_trace.read(TRACE))
    assert [stage.name for stage in found.stages] == ["row_max", "row_sum", "normalise"]
    assert found.calls == 5 and found.streams == 1 and found.overlap_us == 0
    assert 500 < found.span_us < 540 and 0 < found.idle_pct < 2
    assert sum(stage.share_pct for stage in found.stages) == pytest.approx(100)
    assert [stage.launches for stage in found.stages] == [1, 1, 1]
    assert {gap.before for gap in found.gaps} == {"row_sum", "normalise"}
    assert [cost.name for cost in found.api] == ["cuLaunchKernelEx"]  # the waiting between calls is the profiling's
    assert found.api[0].count == 3


LAUNCHES = [("a", 0, 10, 7), ("b", 5, 10, 8), ("c", 20, 5, 7)]  # name, start and duration in us, stream


def test_overlap_and_idle_time_of_two_streams():
    made_up = [timeline.Launch(name, start, us, stream) for name, start, us, stream in LAUNCHES]
    found = timeline.analyse(timeline.Trace("made up", made_up))
    assert (found.span_us, found.busy_us, found.overlap_us, found.streams) == (25, 20, 5, 2)
    assert found.idle_pct == pytest.approx(20) and found.gaps == (timeline.Gap("b", "c", 5),)


def test_a_trace_without_a_kernel_is_refused(tmp_path):
    for text in ('{"traceEvents": []}', "[]", '{"traceEvents": 3}'):
        (tmp_path / "trace.json").write_text(text)
        with pytest.raises(Refused, match=r"does another profiler run|again: profile_kernel\.sh --mode event"):
            torch_trace.read(tmp_path / "trace.json")


GPU_TRACE = """
NOTICE: Existing SQLite export found: x.sqlite

Processing [x.sqlite] with [cuda_gpu_trace.py]...
Start (ns),Duration (ns),CorrId,GrdX,GrdY,GrdZ,BlkX,BlkY,BlkZ,Reg/Trd,StcSMem (MB),DymSMem (MB),Bytes (MB),Throughput (MB/s),SrcMemKd,DstMemKd,Device,Ctx,GreenCtx,Strm,Name
1000,50240,101,,,,,,,,,,8.389,167.0,Pageable,Device,NVIDIA H200 (0),1,,7,[CUDA memcpy Host-to-Device]
60000,"443,520",102,64,64,1,256,1,1,64,0.001,0.000,,,,,NVIDIA H200 (0),1,,7,"gemm(float *, int)"
"""
API_TRACE = "Start (ns),Duration (ns),Name,Result,CorrID,Pid,Tid,T-Pri,Thread Name\n900,5000,cudaLaunchKernel,0,102,1,1,20,python\n"


def test_the_tables_of_nsys_are_read():
    """Made up, in the columns that nsys 2024 and later print."""
    found = nsys.trace(GPU_TRACE, API_TRACE)
    copy, product = found.launches
    assert (copy.name, copy.us, copy.grid) == ("[CUDA memcpy Host-to-Device]", 50.24, None)
    assert (product.name, product.us, product.grid) == ("gemm(float *, int)", 443.52, [64, 64, 1])
    assert timeline.analyse(found).api == (timeline.ApiCost("cudaLaunchKernel", 1, 5.0),)
    with pytest.raises(Refused, match="no kernel"):
        nsys.trace("Processing [x.sqlite]...\n", API_TRACE)


# --- what is missing --------------------------------------------------------------------------------------------------


class StandInSandbox:
    """Stands in for a GPU: its children leave a recorded trace."""

    device_name, gpu, isolation = "NVIDIA H200", Card("NVIDIA H200", "GPU-0", "580.159.04"), "none"

    def __init__(self, folder: Path):
        self.path = folder

    @contextlib.contextmanager
    def folder(self, name):
        yield str(self.path)

    def run(self, job, arguments, timeout_s, hidden=()):
        from kernelopt.device.outcomes import Outcome

        assert job == "trace"
        Path(arguments["path"]).write_bytes(TRACE.read_bytes())
        return Outcome({"torch": "2.11", "window": [0.0, 1.0], "triton": []}, 0, None, False, 1.0, "")


@pytest.fixture
def call(tmp_path, monkeypatch):
    monkeypatch.setattr(collect.gpu_watch.Watch, "__enter__", lambda self: self)
    monkeypatch.setattr(collect.gpu_watch.Watch, "__exit__", lambda self, *_: None)
    monkeypatch.setattr(collect.gpu_watch.Watch, "state", lambda self, window: None)
    (tmp_path / "kernel.py").write_text("")
    (tmp_path / "profile").mkdir()
    inputs = ("input.pt", [[4, 4]], "bf16")
    return collect.Call(tmp_path / "kernel.py", "v0", "default", *inputs, "cold", 60, wiki.product("H200"))


def test_without_counters_there_are_durations_resources_and_no_diagnosis(call, tmp_path, monkeypatch, session):
    def lacking(*_, **__):
        raise EnvironmentLacks("ERR_NVGPUCTRPERM: no permission")

    monkeypatch.setattr(ncu, "collect", lacking)
    folder = tmp_path / "profile"
    profile, lack = collect.take("annotation", StandInSandbox(tmp_path), call, folder, None)
    assert "ERR_NVGPUCTRPERM" in lack and profile.params.counters == "unavailable"
    longest = profile.kernels[2]
    assert longest.name == "normalise" and 250 < longest.duration_us < 270
    assert longest.metrics["registers_per_thread"] == 24 and longest.metrics["theoretical_occupancy"] == 100
    assert longest.metrics["dram_throughput"] is None
    written = profile_pages.write(folder, "annotation", profile, session)
    assert written.to_json()["classification"]["class"] == "unknown" and "not collected" in written.describe()
    assert "| `normalise` | 259 |" in (folder / "report.md").read_text()
    assert json.loads((folder / "params.json").read_text())["counters"] == "unavailable"


@pytest.mark.parametrize("mode", ["event", "nsys"])
def test_without_nsys_torchs_profiler_serves_and_is_named(call, tmp_path, monkeypatch, mode, session):
    monkeypatch.setattr(nsys, "program", lambda: None)
    folder = tmp_path / "profile"
    profile, lack = collect.take(mode, StandInSandbox(tmp_path), call, folder, None)
    assert lack is None and profile.params.profiler == torch_trace.SOURCE
    written = profile_pages.write(folder, mode, profile, session)
    sent = json.loads(json.dumps(written.to_json()))
    assert sent == {"timeline": json.loads((folder / "timeline.json").read_text())}
    text = (folder / "report.md").read_text()
    assert "| profiler | torch.profiler (CUPTI) |" in text and "| `row_sum` | 1 |" in text
    assert json.loads((folder / "timeline.json").read_text())["calls"] == 5


@pytest.mark.parametrize(
    ("mode", "part"),
    [("annotation", "--section SpeedOfLight"), ("ncu", "--set full"), ("nsys", "nsys"), ("event", "torch.profiler")],
)
def test_a_dry_run_starts_nothing_and_needs_no_profiler(session, mode, part, tmp_path, run_here):
    arguments = [
        "--workspace",
        session.root,
        "--version",
        "v0",
        "--mode",
        mode,
        "--out",
        tmp_path / "elsewhere",
        "--dry-run",
    ]
    found = tool_json("profile_kernel.py", *arguments, run=run_here)
    assert part in found["command"] and found["folder"] == str(tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()


# --- analyze_profile.py on every form ---------------------------------------------------------------------------------


def test_every_form_of_a_profile_is_analysed(reports, tmp_path, run_here):
    wide = tmp_path / "wide.csv"
    wide.write_bytes(lzma.decompress((CAPTURED / "streaming_add.wide.csv.xz").read_bytes()))
    for path in (wide, reports["streaming_add"]):
        found = tool_json("analyze_profile.py", path, run=run_here)
        assert (found["classification"]["class"], found["classification"]["limiter"]) == ("memory", "dram")
    amd = next((FIXTURES / "rocprofv3").glob("*valubusy*.csv"))
    done = run_here("analyze_profile.py", amd, "--json")
    found = json.loads(done.stdout)
    assert "not run on AMD hardware" in found["origin"] and found["classification"]["class"] in ("unknown", "compute")
    assert rocprof.is_output(amd) and not rocprof.is_output(wide)


def test_the_brief_and_the_answer_to_it(reports, tmp_path, run_here):
    path = reports["spilling_tile"]
    prompts = tool_json("analyze_profile.py", path, "--brief", run=run_here)
    assert "register_spills" in prompts["user"] and "spill_instructions" in prompts["user"]
    value = ncu.read(path)[0].metrics["spill_instructions"]
    answer = {
        "bottlenecks": [
            {
                "category": "memory",
                "root_cause": "registers are spilled",
                "evidence": [{"metric": "spill_instructions", "value": value}],
                "method": "a smaller tile",
                "expected_effect": "no spills",
            }
        ]
    }
    (tmp_path / "right.md").write_text(f"Thinking...\n```json\n{json.dumps(answer)}\n```\n")
    assert tool_json("analyze_profile.py", path, "--check-response", tmp_path / "right.md", run=run_here)["valid"]
    (tmp_path / "wrong.md").write_text(json.dumps(answer).replace(str(value), str(2 * value)))
    done = run_here("analyze_profile.py", path, "--check-response", tmp_path / "wrong.md")
    assert done.returncode == 1 and "spill_instructions" in done.stdout
    done = run_here("analyze_profile.py", path, "--check-response", tmp_path / "absent.md")
    assert done.returncode == 2 and done.stderr.count("\n") == 1


def test_the_summary_and_the_log_entry_are_rendered_from_what_was_recorded(run_here):
    folder = Path("examples/row_softmax/h200/profiles/v1/annotation")
    folder = FIXTURES.parents[1] / folder
    text = tool_json("analyze_profile.py", folder, "--summary", run=run_here)["text"]
    assert "## Bottleneck: memory" in text and "Root cause: dram limits `softmax_row`." in text
    assert "1. near_least_traffic: at most 4.8 % of the time; trigger:" in text
    stop = "Stop? no: 95.2 % of the floor at the copy rate, by the recorded latency: 4.8 % of the time is left, more than 3 %; "
    assert (
        stop + "DRAM or a pipe is used up, so the kernel does more work" in text
    )  # by the profiler's duration it would be 98.2 %
    text = tool_json("analyze_profile.py", folder, "--devlog", run=run_here)["text"]
    assert "| Duration | 255 us |" in text and "| Least bytes of the problem | 4,2" in text
    done = run_here("analyze_profile.py", FIXTURES / "h200_row_softmax/one_pass.ncu-rep", "--summary")
    assert done.returncode == 2 and "no params.json" in done.stderr and "that profile_kernel.sh made" in done.stderr


def test_the_schema_is_all_that_is_collected_and_rendered(monkeypatch):
    monkeypatch.setattr(ncu, "program", lambda: "ncu")
    asked = " ".join(ncu.command(Path("r.ncu-rep"), "cold"))
    assert all(name in asked for name in metrics.requested())
    assert all(metric.meaning and metric.unit is not None for metric in metrics.schema())
    for group in (speed_of_light.NEEDED, speed_of_light.PIPES, profile_pages.CHANGES):
        assert set(group) <= {metric.key for metric in metrics.schema()}
