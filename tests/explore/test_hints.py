"""Variants of a candidate with hints to the L2 (explore.hints)."""

import json
from dataclasses import replace

import pytest
from conftest import BUNDLE
from kernelopt.errors import UsageError
from kernelopt.explore import candidates, hints

KERNEL = """import torch
import triton
import triton.language as tl
{constants}

@triton.jit
def add(x, y, z, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    {body}
    tl.store(z + at, left + right, at < n)


def kernel_function(x, y):
    z = torch.empty_like(x)
    add[(triton.cdiv(x.numel(), 256),)](x, y, z, x.numel(), BLOCK=256)
    return z
"""
TWO = "left, right = tl.load(x + at, at < n), tl.load(y + at, at < n)"


@pytest.fixture
def entries(tmp_path):
    def made(body: str = TWO, constants: str = ""):
        file = tmp_path / "k.py"
        file.write_text(KERNEL.format(constants=constants, body=body), encoding="utf-8")
        return candidates.from_paths([file])

    return made


def test_all_loads_and_those_of_each_pointer_get_a_hint(entries):
    found = hints.with_variants(entries())
    assert [one.name for one in found] == [
        *("k", "k[loads=evict_last]", "k[loads=evict_first]", "k[load(x)=evict_last]", "k[load(y)=evict_last]")
    ]
    assert found[1].source.count('at < n, eviction_policy="evict_last")') == 2
    assert found[2].source.count('eviction_policy="evict_first"') == 2
    assert 'tl.load(x + at, at < n), tl.load(y + at, at < n, eviction_policy="evict_last")' in found[4].source
    assert found[4].config == {"load(y)": "evict_last"} and found[0].source == entries()[0].source


SPELT = {
    "tl.load(x + at)": 'tl.load(x + at, eviction_policy="H")',
    "tl.load(x + at, mask=at < n, other=0.0,)": 'tl.load(x + at, mask=at < n, other=0.0, eviction_policy="H")',
    "tl.load((x + at))": 'tl.load((x + at), eviction_policy="H")',
    "tl.load(tl.load(x))": 'tl.load(tl.load(x, eviction_policy="H"), eviction_policy="H")',
    "tl.load(  # größer )\n        x + at,  # at, )\n    )": 'tl.load(  # größer )\n        x + at, eviction_policy="H"  # at, )\n    )',
    "tl.load(x + at,  # \x0c \x85 \u2028 )\n        at < n)": 'tl.load(x + at,  # \x0c \x85 \u2028 )\n        at < n, eviction_policy="H")',
    "triton.language.load(pointer=x)": 'triton.language.load(pointer=x, eviction_policy="H")',
    "tl.load(x, eviction_policy='evict_first', mask=n)": 'tl.load(x, eviction_policy="H", mask=n)',
    'tl.load(tl.load(x), eviction_policy="")': 'tl.load(tl.load(x, eviction_policy="H"), eviction_policy="H")',
}


@pytest.mark.parametrize(("before", "after"), SPELT.items())
def test_the_hint_comes_behind_the_arguments(entries, before, after):
    found = hints.with_variants(entries(f"left = right = {before}"))
    text = found[1].source.replace("evict_last", "H")
    compile(text, "k.py", "exec")
    assert f"left = right = {after}" in text


def test_a_hint_of_the_source_gives_way_to_others_and_to_none(entries):
    found = hints.with_variants(entries('left, right = tl.load(x, eviction_policy="evict_first"), tl.load(y)'))
    assert [one.name for one in found[1:4]] == [f"k[loads={hint}]" for hint in ("evict_last", "evict_first", "none")]
    assert 'tl.load(x, eviction_policy=""), tl.load(y)' in found[3].source
    assert 'tl.load(x, eviction_policy="evict_last"), tl.load(y)' in found[4].source


def test_a_variant_that_changes_nothing_is_left_out(entries):
    found = hints.with_variants(entries("left = right = tl.load(x, eviction_policy='evict_last')"))
    assert [one.name for one in found] == ["k", "k[loads=evict_first]", "k[loads=none]"]


def test_two_names_of_one_program_are_one_variant(entries):
    found = hints.with_variants(entries("left, right = tl.load(x, eviction_policy='evict_last'), tl.load(y)"))
    every = [f"k[loads={hint}]" for hint in ("evict_last", "evict_first", "none")]
    assert [one.name for one in found] == ["k", *every]  # load(y)=evict_last is the first of these


def test_lines_keep_their_numbers_where_a_hint_goes_over_two(entries):
    body = 'größe = 1; left = right = tl.load(x, eviction_policy=("evict_"\n        "first"), other=0.0)'
    for one in hints.with_variants(entries(body))[1:]:
        assert one.source.count("\n") == entries(body)[0].source.count("\n")
        compile(one.source, "k.py", "exec")


LEFT_AS_THEY_ARE = [
    *("tl.load(x, eviction_policy=n)", "tl.load(x, other='0', eviction_policy=None)"),
    *("tl.load(x, volatile=True)", "tl.load(x, **more)", "tl.load(*more)"),
    *('tl.load(x, cache_modifier=".cg")', "tl.load(x, 1, 0, (), '', '.cg')", "tl.load(mask=n)"),
    *("tl.load(x, 1, 0, (), '', '.cg', '')", "descriptor.load([at])", "torch.load(x)", "load(x)", "tl.load()"),
]


@pytest.mark.parametrize("call", LEFT_AS_THEY_ARE)
def test_other_loads_are_left_as_they_are(entries, call):
    with pytest.raises(UsageError, match=hints.WITHOUT_A_HINT):
        hints.with_variants(entries(f"left = right = {call}"))


@pytest.mark.parametrize(
    ("imported", "name"),
    [
        ("import triton.language as L", "L"),
        ("from triton import language", "language"),
        ("from triton import language as l2", "l2"),
    ],
)
def test_the_language_may_have_another_name(entries, imported, name):
    found = hints.with_variants(entries(f"left = right = {name}.load(x)", constants=imported))
    assert f'{name}.load(x, eviction_policy="evict_last")' in found[1].source


def test_each_configuration_has_its_variants_and_a_probe_has_none(entries):
    found = hints.with_variants(
        entries("left = right = tl.load(x)", constants='SPACE = [{}, {"A": 2}, {"PROBE": 1}]\nA = 1\nPROBE = 0')
    )
    assert [one.name for one in found] == [
        *("k", "k[loads=evict_last]", "k[loads=evict_first]"),
        *("k[A=2]", "k[A=2,loads=evict_last]", "k[A=2,loads=evict_first]", "k[PROBE=1]"),
    ]


@pytest.mark.parametrize(
    ("address", "pointer"),
    [
        ("x + at", "x"),
        ("n * BLOCK + at + x", "n"),
        ("BLOCK * 4 + at + x", "x"),
        ("x.to(tl.pointer_type(tl.float32)) + at", "x"),
        ("1 * at", "at"),
        ("8", "a number"),
        ("tl.multiple_of(x + at, 8)", "x"),
    ],
)
def test_a_pointer_is_a_parameter_where_there_is_one(entries, address, pointer):
    body = f"left, right = tl.load({address}), tl.load(z + at)"
    assert [one.name for one in hints.with_variants(entries(body))][3] == f"k[load({pointer})=evict_last]"


def test_the_address_may_be_named_behind_the_mask(entries):
    found = hints.with_variants(entries("left, right = tl.load(mask=n, pointer=x + at), tl.load(y)"))
    assert found[3].config == {"load(x)": "evict_last"}


def test_a_candidate_that_cannot_be_loaded_has_no_variants(entries):
    broken = replace(entries()[0], error="IMPORT_ERROR", source="(")
    assert list(hints.variants(broken)) == []


def test_loads_of_many_pointers_are_not_tried_alone(entries):
    many = "left = right = " + " + ".join(f"tl.load(p{number})" for number in range(hints.MOST_ALONE + 1))
    assert len(hints.with_variants(entries(many))) == 3


def test_too_many_variants_are_refused(entries, monkeypatch):
    monkeypatch.setattr(candidates, "MOST", 4)
    with pytest.raises(UsageError, match="5 candidates are more than 4"):
        hints.with_variants(entries())


def test_the_variants_are_checked_as_others_are(tmp_path, run_here):
    folder = BUNDLE / "benchmarks" / "exploration"
    large = (folder / "stream_reference.py").read_text()
    (tmp_path / "reference.py").write_text(large.replace("8192, 65536", "3, 7000"))
    own = (folder / "stream_space.py").read_text().replace(", eviction_policy=LOAD", "").replace("SPACE =", "OTHER =")
    (tmp_path / "k.py").write_text(own)
    options = ("--reference", tmp_path / "reference.py", "--device", "cpu-interpreter", "--hints", "--json")
    done = run_here("explore_kernels.py", tmp_path / "k.py", *options)
    rows = {row["name"]: row["status"] for row in json.loads(done.stdout)["rows"]}
    assert {name for name in rows if name.startswith("k")} == {"k", "k[loads=evict_last]", "k[loads=evict_first]"}
    assert all(status == "OK" for name, status in rows.items() if name.startswith("k")), rows
