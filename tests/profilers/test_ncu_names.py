"""Which names a metric goes by on which GPU: the schema against what NVIDIA's library of counters answers
(fixtures/ncu_names), and reports of GPUs that are not here. Those are stand-ins: a real CSV of an H200, its names and
figures changed."""

import csv
import io
import json
import lzma
import tempfile
from pathlib import Path

import pytest
from conftest import FIXTURES, NEWER_THAN_THE_CAPTURES
from kernelopt.device.outcomes import Outcome
from kernelopt.diagnosis import analysis, profile_pages, speed_of_light, text
from kernelopt.diagnosis.diagnosis import Floor
from kernelopt.hardware import wiki
from kernelopt.profilers import collect, metrics, ncu, ncu_csv, timeline
from kernelopt.profilers.profile import KernelProfile, Params, Profile

LIMITS = metrics.thresholds()
KNOWN = metrics.architectures()
ANSWERS = [json.loads(path.read_text()) for path in sorted((FIXTURES / "ncu_names").glob("cupti_*.json"))]
CHIPS = {  # compute capability -> chips of it that the library knows
    "7.0": ["GV100"],
    "7.2": ["GV11B"],
    "7.5": ["TU102", "TU104", "TU106", "TU116", "TU117"],
    "8.0": ["GA100"],
    "8.6": ["GA102", "GA103", "GA104", "GA106", "GA107"],
    "8.7": ["GA10B"],
    "8.9": ["AD102", "AD103", "AD104", "AD106", "AD107"],
    "9.0": ["GH100"],
    "10.0": ["GB100"],
    "10.3": ["GB110"],
    "11.0": ["GB10B"],
    "12.0": ["GB202", "GB203", "GB205", "GB206", "GB207"],
    "12.1": ["GB20B"],
}
HMMA = "sm__inst_executed_pipe_tensor_{}_hmma.avg.pct_of_peak_sustained_active"
HOPPER = {"gmma_instructions", "stall_gmma"}
CP_ASYNC = {"async_copy_sectors", "async_copy_bytes_per_sector"}
DRAM = {"dram_throughput", "dram_bytes_read", "dram_bytes_written"}


def answered(name: str, chip: str) -> bool:
    """Does one of the libraries that know the chip know the name on it?"""
    asked = [answer["absent"][name] for answer in ANSWERS if chip in answer["chips"]]
    return any(chip not in absent for absent in asked if absent != "all")


# --- the schema -------------------------------------------------------------------------------------------------------


def test_the_answers_are_of_all_names_and_all_chips():
    assert len(ANSWERS) == 2 and set(CHIPS) == set(KNOWN.chips)
    listed = {chip for answer in ANSWERS for chip in answer["chips"]}
    assert all(set(answer["absent"]) == set(metrics.names()) for answer in ANSWERS)
    assert {chip for chips in CHIPS.values() for chip in chips} <= listed


@pytest.mark.parametrize("name", metrics.names())
def test_the_schema_says_where_a_name_exists(name):
    own = name.startswith(KNOWN.own)
    assert all(answer["absent"][name] == "all" for answer in ANSWERS) == own
    assert not (own and name in KNOWN.only_on)
    for capability, chips in CHIPS.items() if not own else ():
        said = capability in KNOWN.only_on.get(name, CHIPS)
        assert {answered(name, chip) for chip in chips} == {said}, capability


def test_no_architecture_is_told_of_a_name_that_nobody_asks_for():
    assert set(KNOWN.only_on) <= set(metrics.names())
    assert all(set(places) < set(CHIPS) for places in KNOWN.only_on.values())


@pytest.mark.parametrize(
    ("capability", "keys"),
    [
        ("7.0", HOPPER | CP_ASYNC | {"tma_cycles", "tcgen05_instructions"}),
        ("7.5", HOPPER | CP_ASYNC | {"tma_cycles", "tcgen05_instructions"}),
        ("8.0", HOPPER | {"tma_cycles", "tcgen05_instructions"}),
        ("8.7", HOPPER | {"tma_cycles", "tcgen05_instructions"} | DRAM),
        ("8.9", HOPPER | {"tma_cycles", "tcgen05_instructions"}),
        ("9.0", {"tcgen05_instructions"}),
        ("10.0", HOPPER),
        ("10.3", HOPPER),
        ("11.0", HOPPER | DRAM),
        ("12.0", HOPPER | {"tcgen05_instructions"}),
        ("12.1", HOPPER | {"tcgen05_instructions"} | DRAM),
        ("10.7", set()),  # nobody asked: what does not come from there is missing
        (None, set()),
    ],
)
def test_what_an_architecture_does_not_have_is_known(capability, keys):
    assert metrics.not_on(capability) == keys


# --- all names are asked for, and the first number counts ------------------------------------------------------------


def test_every_name_is_asked_for_once_but_those_at_which_ncu_stops():
    command = ncu.command(Path("r.ncu-rep"), "cold")
    asked = command[command.index("--metrics") + 1].split(",")
    assert sorted(asked) == sorted({n for metric in metrics.schema() for n in metric.names if "derived__" not in n})
    assert {"dram__bytes_op_read.sum", HMMA.format("subpipe"), HMMA.format("op")} <= set(asked)
    bare = [name for name in asked if "." not in name]
    assert all(name.startswith(KNOWN.own) for name in bare)  # with a suffix ncu takes any name


class StandInSandbox:
    """ncu of a version that does not know some names: it stops at the first of them, as 2025.3.1 does."""

    def __init__(self, *unknown: str):
        self.unknown, self.commands = unknown, []

    def folder(self, _):
        return tempfile.TemporaryDirectory()

    def run_under(self, command: list[str], *_) -> Outcome:
        self.commands.append(command)
        asked = command[command.index("--metrics") + 1].split(",")
        if stop := next((name for name in asked if name in self.unknown), None):
            return Outcome(None, 9, None, False, 1.0, REFUSAL.replace("derived__local_spilling_requests", stop))
        Path(command[command.index("--export") + 1]).write_bytes(b"a report")
        return Outcome({"torch": "x", "window": [0, 1], "triton": []}, 0, None, False, 1.0, "==PROF== Report")


REFUSAL = (FIXTURES / "ncu_names" / "refused_name.txt").read_text()


@pytest.mark.parametrize("unknown", [(), ("sass__inst_executed_register_spilling", "launch__grid_size")])
def test_where_ncu_stops_at_a_name_it_is_asked_again_without(tmp_path, monkeypatch, unknown):
    monkeypatch.setattr(ncu, "program", lambda: "ncu")
    monkeypatch.setattr(ncu, "check_supported", lambda: None)
    sandbox = StandInSandbox(*unknown)
    ncu.collect(sandbox, tmp_path / "k.py", "input.pt", tmp_path / "r.ncu-rep", "cold", 5)
    assert len(sandbox.commands) == 1 + len(unknown) and (tmp_path / "r.ncu-rep").exists()
    last = sandbox.commands[-1]
    assert set(last[last.index("--metrics") + 1].split(",")) == set(metrics.requested()) - set(unknown)


def test_a_refusal_names_what_was_asked_for_alone():
    assert ncu.refused_names(REFUSAL, metrics.names()) == {"derived__local_spilling_requests"}
    assert ncu.refused_names(REFUSAL, metrics.requested()) == set() == ncu.refused_names("==PROF== Report", ["a"])
    assert ncu.refused_names("Failed to find metric dram__bytes_read.sum", metrics.names()) == {"dram__bytes_read.sum"}


@pytest.fixture(scope="module")
def all_asked(tmp_path_factory) -> Path:
    """The folder of the real reports that were asked for all names: of an H100, and, older than some names, of an H200
    with its CSVs."""
    folder = tmp_path_factory.mktemp("all")
    for packed in (FIXTURES / "ncu_names").glob("*.*.xz"):
        (folder / packed.stem).write_bytes(lzma.decompress(packed.read_bytes()))
    return folder


@pytest.mark.parametrize("form", ["ncu-rep", "wide.csv", "long.csv"])
def test_a_real_report_of_all_names_lacks_nothing_that_the_gpu_has(all_asked, form):
    path = all_asked / f"streaming_add.{form}"
    kernels = ncu.read(path) if form == "ncu-rep" else ncu_csv.read(path)
    found = analysis.from_metrics(Profile(kernels), LIMITS)
    assert found.missing_metrics == NEWER_THAN_THE_CAPTURES
    assert found.not_on_architecture == ("tcgen05_instructions",)
    assert found.architecture == "sm_90" and found.classification.limiter == "dram"
    assert found.metrics["dram_bytes_read"] == pytest.approx(2 * 4 * (64 << 20), rel=0.01)


def test_the_newest_report_has_all_names_and_those_of_cp_async(all_asked):
    (kernel,) = ncu.read(all_asked / "cp_async.ncu-rep")
    found = analysis.from_metrics(Profile((kernel,)), LIMITS)
    assert found.missing_metrics == () and found.not_on_architecture == ("tcgen05_instructions",)
    stored = json.loads((FIXTURES / "h100_cp_async" / "fp8_product" / "metrics.json").read_text())
    assert stored["kernels"] == [{"name": "product", "duration_us": kernel.duration_us, "metrics": kernel.metrics}]
    tiles, steps, bytes_of_both = 32 * 32, 4096 // 128, 2 * 128 * 128
    assert kernel.metrics["async_copy_sectors"] == tiles * steps * bytes_of_both / 32


def test_what_the_gpu_does_not_have_nsight_compute_writes_as_no_number(all_asked):
    text = (all_asked / "streaming_add.long.csv").read_text()
    assert '"dram__bytes_op_read.sum","","n/a"' in text
    absent = {row[12] for row in csv.reader(io.StringIO(text)) if row[14:15] == ["n/a"]}
    places = KNOWN.only_on
    assert absent == {name for name in metrics.requested() if "9.0" not in places.get(name, ["9.0"])}


@pytest.mark.parametrize("nothing", [None, "n/a", float("nan")])
def test_a_name_that_came_without_a_number_hides_no_other(nothing):
    found = metrics.values({"dram__bytes_read.sum": (nothing, ""), "dram__bytes_op_read.sum": (7.0, "Kbyte")})
    assert found["dram_bytes_read"] == 7000 and found["dram_bytes_written"] is None
    both = metrics.values({"dram__bytes_op_read.sum": (7, "byte"), "dram__bytes_read.sum": (5, "byte")})
    assert both["dram_bytes_read"] == 5  # in the schema's order, whatever the report's is


class StandInMetric:
    def __init__(self, value):
        self._value = value

    def value(self):
        return self._value

    def unit(self) -> str:
        return "byte"


class StandInAction(dict):
    """A launch as ncu_report gives it, of a GPU that is not here."""

    def metric_names(self) -> list[str]:
        return list(self)

    def name(self) -> str:
        return "k"

    def rule_results_as_dicts(self) -> list:
        return []


def test_so_it_is_in_a_report():
    launch = StandInAction({"dram__bytes_read.sum": StandInMetric(None), "dram__bytes_op_read.sum": StandInMetric(7.0)})
    assert ncu._kernel(launch).metrics["dram_bytes_read"] == 7.0


# --- CSVs of other GPUs: stand-ins ------------------------------------------------------------------------------------


def captured(name: str) -> list[list[str]]:
    """The rows of a wide CSV that was recorded on an H200: names, units, one launch."""
    text = lzma.decompress((FIXTURES / "bottlenecks" / f"{name}.wide.csv.xz").read_bytes()).decode()
    return list(csv.reader(io.StringIO(text)))


def elsewhere(
    tmp_path: Path, name: str, capability: str, renamed: dict | None = None, **figures: str
) -> tuple[KernelProfile, ...]:
    """Kernels of the capture `name` as if from a GPU of that compute capability: what the schema says it does not have
    is "(!) n/a"; renamed: name there -> name here, figures: key of the schema -> text in its first column there."""
    header, units, row = captured(name)
    cells = {column: (unit, text) for column, unit, text in zip(header, units, row, strict=True)}
    for old, new in (renamed or {}).items():
        cells[new] = cells[old]
    places = KNOWN.only_on
    for column in [column for column in cells if capability not in places.get(column, [capability])]:
        cells[column] = ("", "(!) n/a")
    for part, figure in zip(("major", "minor"), capability.split("."), strict=True):
        cells[f"device__attribute_compute_capability_{part}"] = ("", figure)
    named = {metric.key: metric.names for metric in metrics.schema()}
    for key, value in figures.items():
        column = next(name for name in named[key] if capability in places.get(name, [capability]))
        cells[column] = (cells.get(column, ("%", ""))[0], value)
    rows = [list(cells), [unit for unit, _ in cells.values()], [text for _, text in cells.values()]]
    path = tmp_path / "stand-in.csv"
    with path.open("w", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows)
    return ncu_csv.read(path)


GB202_NAMES = {f"dram__bytes_{what}.sum": f"dram__bytes_op_{what}.sum" for what in ("read", "write")}
WORK = {"flops": 0, "bytes_min": 100 * 2**20, "dtype": "fp32"}


def test_excess_traffic_is_found_on_geforce_blackwell(tmp_path):
    kernels = elsewhere(tmp_path, "streaming_add", "12.0", GB202_NAMES)
    assert kernels[0].metrics["dram_bytes_read"] > 2**28
    found = analysis.from_metrics(Profile(kernels, WORK), LIMITS)
    assert "excess_dram_traffic" in [finding.id for finding in found.findings]
    assert found.architecture == "sm_120"
    assert found.missing_metrics == (*NEWER_THAN_THE_CAPTURES, "hmma_instructions")  # not in this capture
    assert set(found.not_on_architecture) == metrics.not_on("12.0")


def test_what_a_gpu_does_not_have_is_no_lost_evidence(tmp_path):
    kernels = elsewhere(tmp_path, "streaming_add", "12.1", {HMMA.format("op"): HMMA.format("subpipe")})
    found = analysis.from_metrics(Profile(kernels, WORK), LIMITS)
    assert found.missing_metrics == NEWER_THAN_THE_CAPTURES
    assert set(found.not_on_architecture) == metrics.not_on("12.1")
    assert all(found.metrics[key] is None for key in found.not_on_architecture)
    assert text.metric_value(found, "dram_throughput", None) == "not on sm_121"
    assert text.metric_value(found, "l2_throughput", None) == "not collected"
    params = Params("v0", "0" * 64, "default", [], "fp32", "DGX Spark", "ncu", "cold", "as found", "")
    table = profile_pages.metric_table(Profile(kernels, params=params), found, None)
    assert "| Memory | DRAM bytes read | not on sm_121 | byte |" in table
    light = speed_of_light.analyse(found.metrics, Floor(40.0, "memory"), [], LIMITS)
    assert light.warnings == () and light.at_roofline is None and "of DRAM nothing is known" in light.reason


PRODUCT = {"hmma_instructions": "20.1", "tensor_cycles": "42.0"}
IN_PLACE = {HMMA.format("op"): HMMA.format("subpipe")}


@pytest.mark.parametrize(
    ("capability", "figures", "expected"),
    [
        ("10.0", {**PRODUCT, "tcgen05_instructions": "0"}, {"mma_sync_on_blackwell"}),
        ("10.3", {**PRODUCT, "tcgen05_instructions": "0"}, {"mma_sync_on_blackwell"}),
        ("10.0", {**PRODUCT, "tcgen05_instructions": "0.61"}, set()),
        ("12.0", PRODUCT, set()),
        ("8.9", PRODUCT, set()),
    ],
)
def test_a_product_on_another_gpu_is_held_against_that_gpus_instructions(tmp_path, capability, figures, expected):
    kernels = elsewhere(
        tmp_path, "spilling_tile", capability, IN_PLACE if capability[:2] in ("10", "12") else {}, **figures
    )
    found = analysis.from_metrics(Profile(kernels), LIMITS)
    assert {finding.id for finding in found.findings if "mma_sync" in finding.id} == expected
    assert found.metrics["hmma_instructions"] == 20.1 and found.metrics["tensor_cycles"] == 42.0


def test_on_ada_the_name_that_nvidia_put_in_place_of_the_first_one_counts(tmp_path):
    old = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
    new = old.replace("active.avg", "active_v2.avg")
    (kernel,) = elsewhere(tmp_path, "streaming_add", "8.9", {old: new}, tensor_cycles="41.5")
    assert kernel.metrics["tensor_cycles"] == 41.5


def test_the_compute_capability_of_a_csv_is_that_of_its_column_where_it_lists_no_attributes(tmp_path):
    assert ncu_csv.attributes("8.9") == {
        "device__attribute_compute_capability_major": ("8", ""),
        "device__attribute_compute_capability_minor": ("9", ""),
    }
    assert ncu_csv.attributes("8,9") == ncu_csv.attributes("8.9") and ncu_csv.attributes("") == {}
    header, units, row = captured("streaming_add")
    kept = [number for number, name in enumerate(header) if not name.startswith("device__attribute")]
    path = tmp_path / "without.csv"
    with path.open("w", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows([[line[n] for n in kept] for line in (header, units, row)])
    assert metrics.capability(ncu_csv.read(path)[0].metrics) == "9.0"


def test_in_a_long_csv_a_row_without_a_number_hides_no_later_one():
    header = ["ID", "Process ID", "Kernel Name", "CC", "Section Name", "Metric Name", "Metric Unit", "Metric Value"]
    row = ["0", "1", "k", "12.0"]
    time = ["GPU Speed Of Light Throughput", "Duration"]
    asked = "Command line profiler metrics"
    rows = [
        [*row, *time, "", "(!) n/a"],
        [*row, asked, "gpu__time_duration.sum", "us", "5.5"],
        [*row, asked, "gpu__time_duration.sum", "us", "6.5"],
        [*row, asked, "dram__bytes_read.sum", "", "n/a"],
        [*row, asked, "dram__bytes_op_read.sum", "Kbyte", "7"],
    ]
    (launch,) = ncu_csv.long_launches(header, rows)
    kernel = ncu_csv._kernel(launch, ".")
    assert kernel.duration_us == 5.5 and kernel.metrics["dram_bytes_read"] == 7000


def test_without_counters_the_device_tells_what_it_could_have():
    stage = timeline.Stage("k", 1, 5.0, 100.0, 7, [1, 1, 1], [32, 1, 1], registers=8, shared_bytes=0)
    kernel = collect.without_metrics(stage, wiki.product("NVIDIA GeForce RTX 5090"))
    found = analysis.from_metrics(Profile((kernel,)), LIMITS)
    assert found.architecture == "sm_120" and "tcgen05_instructions" in found.not_on_architecture
    assert "dram_bytes_read" in found.missing_metrics
    unknown = collect.without_metrics(stage, None)
    assert analysis.from_metrics(Profile((unknown,)), LIMITS).not_on_architecture == ()
