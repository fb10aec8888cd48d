"""Probes whose products the compiler dropped. The code is what ptxas made of fixtures/exploration/probe.cu."""

from pathlib import Path

import pytest
from conftest import FIXTURES
from kernelopt.disassembly import listing_files
from kernelopt.errors import EnvironmentLacks
from kernelopt.explore import probes, table
from kernelopt.explore.entrants import Entrant
from kernelopt.explore.resources import CompiledCall
from kernelopt.statuses import Status

LACKS = "product_kernel lacks QGMMA.64x8x32.F32.E4M3.E4M3 of cuda's"


@pytest.fixture
def code(monkeypatch):
    """A call whose only extension is a listing: cuobjdump -sass of probe.cu, with or without -DNO_EPILOGUE."""
    monkeypatch.setattr(listing_files, "dump", lambda file, *_: Path(file).read_text())
    return lambda name: CompiledCall((), (FIXTURES / "exploration" / f"probe_{name}.sass",), "")


def entrant(name: str, origin: str = "cuda.py", **changes) -> Entrant:
    return Entrant(name, Path(f"{name}.py"), origin=Path(origin), **{"status": Status.OK, **changes})


PROBE = entrant("cuda[PROBE=no epilogue]", is_opponent=True, is_probe=True)


def test_a_probe_that_multiplies_nothing_is_named(code):
    calls = {"cuda": code("whole"), PROBE.name: code("no_epilogue")}
    assert probes.products(calls["cuda"]) == {"product_kernel": {"QGMMA.64x8x32.F32.E4M3.E4M3"}}
    assert probes.products(calls[PROBE.name]) == {"product_kernel": set()}  # HGMMA to nowhere stands in its place
    assert probes.left_out([PROBE, entrant("cuda")], calls) == {PROBE.name: LACKS}


def test_a_probe_is_held_against_the_candidate_with_the_nearest_constants(code):
    """On an H200 probes with products of 64 columns were held against the best candidate, whose have 128."""
    probe = entrant("cuda[N=64,PROBE=1]", config={"N": 64, "PROBE": 1}, is_opponent=True, is_probe=True)
    near, best = entrant("cuda[N=64]", config={"N": 64}), entrant("cuda", config={})
    calls = {best.name: code("whole"), near.name: code("no_epilogue"), probe.name: code("no_epilogue")}
    assert probes.left_out([probe, best, near], calls) == {}
    calls = {best.name: code("no_epilogue"), near.name: code("whole"), probe.name: code("no_epilogue")}
    assert list(probes.left_out([probe, best, near], calls)) == [probe.name]


def test_a_probe_with_all_products_is_not_named(code):
    assert probes.left_out([PROBE, entrant("cuda")], dict.fromkeys(("cuda", PROBE.name), code("whole"))) == {}


@pytest.mark.parametrize(
    "others",
    [
        [entrant("other", "other.py")],
        [entrant("library", is_opponent=True)],
        [entrant("cuda[PROBE=no loads]", is_opponent=True, is_probe=True)],
    ],
)
def test_what_is_no_whole_kernel_of_its_file_says_nothing_of_a_probe(code, others):
    calls = {one.name: code("whole") for one in others} | {PROBE.name: code("no_epilogue")}
    assert probes.left_out([*others, PROBE], calls) == {}


def test_code_that_nobody_can_read_says_nothing(code, monkeypatch):
    def absent(*_):
        raise EnvironmentLacks("cuobjdump is not here")

    monkeypatch.setattr(listing_files, "dump", absent)
    calls = {"cuda": code("whole"), PROBE.name: code("no_epilogue"), "ended": None}
    assert probes.left_out([entrant("ended"), PROBE, entrant("cuda")], calls) == {}


def test_the_table_says_it():
    rows = [{"name": "cuda", "products_dropped": None}, {"name": PROBE.name, "products_dropped": LACKS}]
    (line,) = table.products_dropped(rows)
    assert line.startswith(f"{PROBE.name}: {LACKS}: a product that nobody reads is dropped")
