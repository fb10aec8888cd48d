"""Nsight Compute's CSVs against the .ncu-rep of another launch of the same kernel, and every way that such a file can
mislead."""

import lzma
import re
from pathlib import Path

import pytest
from conftest import FIXTURES
from kernelopt.errors import Refused, UsageError
from kernelopt.profilers import metrics, ncu, ncu_csv

CAPTURED = FIXTURES / "bottlenecks"


def captured(name: str) -> str:
    return lzma.decompress((CAPTURED / f"{name}.csv.xz").read_bytes()).decode()


def read(tmp_path: Path, text: str) -> list[dict]:
    path = tmp_path / "profile.csv"
    path.write_text(text)
    return ncu_csv.read(path)


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict:
    """The one kernel of spilling_tile.ncu-rep, read by NVIDIA's own reader."""
    path = tmp_path_factory.mktemp("report") / "spilling_tile.ncu-rep"
    path.write_bytes(lzma.decompress((CAPTURED / "spilling_tile.ncu-rep.xz").read_bytes()))
    return ncu.read(path)[0]


def same(value: float | None, printed: float | None) -> bool:
    """Equal but for the two decimals that ncu prints."""
    return value is printed is None or abs(value - printed) <= 0.005 + 1e-9 * abs(value)


def test_the_wide_csv_gives_what_the_report_gives(tmp_path, report):
    (kernel,) = read(tmp_path, captured("spilling_tile.wide"))
    assert kernel.name == report.name
    assert kernel.duration_us == pytest.approx(report.duration_us, rel=0.05)
    assert kernel.metrics.keys() == report.metrics.keys()
    fixed = "grid_size block_size registers_per_thread shared_memory_dynamic spill_instructions waves_per_sm load_sectors".split()
    assert all(same(report.metrics[key], kernel.metrics[key]) for key in fixed)
    pairs = {key: (value, kernel.metrics[key]) for key, value in report.metrics.items()}
    assert [key for key, (a, b) in pairs.items() if (a is None) != (b is None)] == []
    assert [key for key, (a, b) in pairs.items() if a and a > 5 and b != pytest.approx(a, rel=0.25)] == []
    assert sum(value is not None for value in kernel.metrics.values()) > 40


@pytest.mark.parametrize("launch", ["spilling_tile", "streaming_add"])
def test_the_long_csv_gives_the_metrics_that_its_page_shows(tmp_path, launch):
    (wide,), (long,) = (read(tmp_path, captured(f"{launch}.{form}")) for form in ("wide", "long"))
    assert (long.name, long.duration_us) == (wide.name, wide.duration_us)
    shown = {metric.key for metric in metrics.schema() if metric.details}
    assert len(shown) > 20
    assert {key: wide.metrics[key] for key in shown} == {key: long.metrics[key] for key in shown}
    told = {"compute_capability", "compute_capability_minor"}  # by the column CC
    assert {key: wide.metrics[key] for key in told} == {key: long.metrics[key] for key in told}
    assert {long.metrics[key] for key in long.metrics.keys() - shown - told} == {None}


def test_a_label_that_two_sections_share_is_not_mixed_up(tmp_path):
    text = captured("spilling_tile.long")
    other = '"Memory Workload Analysis","Memory Throughput","byte/s","85147147938.35"'
    assert other in text and '"GPU Speed Of Light Throughput","Memory Throughput","%","67.52"' in text
    lines = text.splitlines(keepends=True)
    first = [line for line in lines if other in line]
    (kernel,) = read(tmp_path, "".join([lines[0], *first, *lines[1:]]))
    assert kernel.metrics["memory_throughput"] == 67.52


def test_the_long_csv_with_metric_names_gives_the_same(tmp_path):
    text = captured("spilling_tile.long")
    (labelled,) = read(tmp_path, text)
    for metric in metrics.schema():
        if metric.details:
            section, label = metric.details
            text = text.replace(f'"{section}","{label}"', f'"{section}","{metric.names[0]}"')
    (named,) = read(tmp_path, text)
    assert named == labelled and named.metrics["waves_per_sm"] == 0.65


def test_the_rules_of_the_long_csv_are_kept(tmp_path, report):
    (kernel,) = read(tmp_path, captured("spilling_tile.long"))
    assert len(kernel.rules) == len(report.rules)
    speedups = [(rule.name, rule.speedup_pct) for rule in kernel.rules]
    assert len(speedups) == 9 and ("MemoryCacheAccessPattern", 65.28) in speedups
    assert ("HighPipeUtilization", None) in speedups  # 89.07 % there is "local": of the pipes' use, not of the time
    assert ("SOLBottleneck", None) in speedups and "SOLFPRoofline" not in dict(speedups)  # the latter only informs
    assert kernel.rules[0].message.startswith("Memory is more heavily utilized than Compute")


@pytest.mark.parametrize("form", ["wide", "long"])
def test_launches_keep_their_order(tmp_path, form):
    first, second = (
        captured(f"{name}.{form}").splitlines(keepends=True) for name in ("streaming_add", "spilling_tile")
    )
    rows = second[2 if form == "wide" else 1 :]
    found = read(tmp_path, "".join([*first, *rows]))  # both have ID 0, of two processes
    assert [kernel.name for kernel in found] == ["streaming_add", "tiled_matmul"]
    assert [kernel.metrics["grid_size"] for kernel in found] == [65536, 512]


@pytest.mark.parametrize("form", ["wide", "long"])
def test_what_the_profiler_and_the_program_print_is_left_out(tmp_path, form):
    text = captured(f"spilling_tile.{form}")
    before = 'step 1, loss 0.3\n==PROF== Connected to process 2357 (/usr/bin/python3.12)\n"unfinished\n'
    after = "==PROF== Disconnected from process 2357\nstep 2, loss 0.2\n7\n\n"
    header, _, rows = text.partition("\n")
    assert read(tmp_path, f"{before}{header}\n==WARNING== Clocks vary.\n{rows}{after}") == read(tmp_path, text)


UNITS = {'"ns","242912"': '"us","242.91"', '"byte/block","36864"': '"Kbyte/block","36.86"'}


def test_scaled_units_are_converted(tmp_path):
    text = captured("spilling_tile.long")
    for base, scaled in UNITS.items():
        assert base in text
        text = text.replace(base, scaled)
    (kernel,) = read(tmp_path, text)
    assert kernel.duration_us == 242.91
    assert kernel.metrics["shared_memory_dynamic"] == 36860


@pytest.mark.parametrize(
    ("value", "given", "wanted", "expected"),
    [
        (2, "usecond", "us", 2),
        (2, "msecond", "us", 2000),
        (2, "s", "us", 2e6),
        (1.5, "Mbyte", "byte", 1.5e6),
        (1.5, "Gbyte/s", "byte/s", 1.5e9),
        (1.5, "byte/ns", "byte/s", 1.5e9),
        (1.5, "Ghz", "hz", 1.5e9),
        (3, "Ksector", "sector", 3000),
        (3, "inst", "warp/issue", 3),  # ncu's name for the unit of a stall
        (3, "byte", "us", None),
        (3, "", "us", None),
        (3, "byte/s", "byte", None),
        (float("nan"), "%", "%", None),
        (float("inf"), "%", "%", None),
        ("text", "", "block", None),
        (None, "", "block", None),
    ],
)
def test_units(value, given, wanted, expected):
    assert metrics.converted(value, given, wanted) == (expected if expected is None else pytest.approx(expected))


# --- numbers and locales -----------------------------------------------------------------------------------------


def localised(text: str, group: str, mark: str) -> str:
    """The capture as ncu would print it elsewhere: each quoted number regrouped. Made here, not captured."""

    def again(found: re.Match) -> str:
        whole, _, decimals = found[1].partition(".")
        return (
            f'"{int(whole):,}"'.replace(",", group)
            if not decimals
            else f'"{int(whole):,}'.replace(",", group) + f'{mark}{decimals}"'
        )

    head, *rows = text.splitlines(keepends=True)
    fixed = r'(^(?:"[^"]*",){11})'  # ID to CC, which are no metrics
    return head + "".join(
        (parts := re.split(fixed, row, maxsplit=1))[1] + re.sub(r'"(\d+(?:\.\d+)?)"', again, parts[2])
        if re.match(fixed, row)
        else row
        for row in rows
    )


@pytest.mark.parametrize(("group", "mark"), [(",", "."), (".", ","), ("\u202f", ","), ("’", ".")])
@pytest.mark.parametrize("form", ["wide", "long"])
def test_every_locale_gives_the_same_numbers(tmp_path, form, group, mark):
    text = captured(f"spilling_tile.{form}")
    other = localised(text, group, mark)
    assert f"436{group}688" in other
    assert read(tmp_path, other) == read(tmp_path, text)


HEADER = '"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"\n'


def long_csv(*cells: tuple[str, str]) -> str:
    return HEADER + "".join(f'"0","7","k","","{name}","","{value}"\n' for name, value in cells)


@pytest.mark.parametrize("values", [("1,234", "12"), ("1.234", "12"), ("67.52", "67,52"), ("1,234.5", "1.234,5")])
def test_numbers_that_can_be_read_in_two_ways_are_refused(tmp_path, values):
    names = ("launch__grid_size", "launch__block_size")
    with pytest.raises(Refused, match="LC_ALL=C"):
        read(tmp_path, long_csv(*zip(names, values, strict=True)))


@pytest.mark.parametrize(
    ("values", "mark"),
    [
        (["12", "n/a"], "."),
        (["1,234", "0.5"], "."),
        (["1.234", "0,5"], ","),
        (["1,234,567"], "."),
        (["1.234.567"], ","),
        (["0.123"], "."),  # no number of thousands begins with 0
        (["1234.567"], "."),
        (["1,234 (1,000; 234)", "12.5"], "."),
        (["1,234"], None),
    ],
)
def test_the_decimal_mark_comes_from_all_numbers_of_a_file(values, mark):
    assert ncu_csv.decimal_mark(values) == mark


@pytest.mark.parametrize(
    ("text", "mark", "expected"),
    [
        ("117,344.5", ".", 117344.5),
        ("117.344,5", ",", 117344.5),
        ("3198875861.77", ".", 3198875861.77),
        ("1.5e+10", ".", 1.5e10),
        ("-3", ".", -3),
        ("31 (15; 16)", ".", 31),
        ("0x1f", ".", 31),
        ("1,23", ".", None),
        *(
            (text, ".", None)
            for text in ("", "n/a", "nan", "no data", "(!) nan", "(!) 12.5", "inf", "(64, 8, 1)", "all")
        ),
    ],
)
def test_numbers(text, mark, expected):
    assert ncu_csv.parse_number(text, mark) == expected


def test_a_metric_without_a_number_is_missing_and_not_0(tmp_path):
    (kernel,) = read(tmp_path, long_csv(("launch__grid_size", "n/a"), ("launch__block_size", "64")))
    assert kernel.metrics["grid_size"] is None and kernel.metrics["block_size"] == 64
    assert kernel.duration_us is None and kernel.rules == ()


# --- files that are no such CSV ----------------------------------------------------------------------------------


def test_a_file_that_was_cut_off_is_refused(tmp_path):
    for form in ("wide", "long"):
        text = captured(f"spilling_tile.{form}")
        last = text.rindex('"0","2357"')
        for end in (last + 15, text.index('"127.0.0.1"', last), len(text) - 20):
            with pytest.raises(Refused):
                read(tmp_path, text[:end])


def test_a_wide_csv_needs_its_row_of_units(tmp_path):
    lines = captured("spilling_tile.wide").splitlines(keepends=True)
    with pytest.raises(Refused, match="row of units"):
        read(tmp_path, lines[0] + lines[2])


@pytest.mark.parametrize("text", ["", "hello\n", '{"kernels": []}', "Name,Calls\nk,3\n", "\0\1\2"])
def test_other_files_are_refused(tmp_path, text):
    with pytest.raises(Refused, match="no readable CSV"):
        read(tmp_path, text)


def test_a_long_csv_without_its_units_is_refused(tmp_path):
    text = (
        long_csv(("launch__grid_size", "64"))
        .replace('"Metric Unit",', "")
        .replace('"launch__grid_size",""', '"launch__grid_size"')
    )
    with pytest.raises(Refused, match="no column Metric Unit"):
        read(tmp_path, text)


def test_a_table_without_a_launch_is_refused(tmp_path):
    for form, head in (("wide", 2), ("long", 1)):
        lines = captured(f"spilling_tile.{form}").splitlines(keepends=True)
        with pytest.raises(Refused, match="holds no kernel"):
            read(tmp_path, "".join(lines[:head]) + "==WARNING== No kernels were profiled.\n")


def test_a_file_that_is_not_there_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        ncu_csv.read(tmp_path / "absent.csv")
