"""The CUDA C++ of kda/candidates/records.py without a GPU: the layout of a record, which its two kernels share, and what
the compiler makes of them. A GPU alone says whether they are right."""

import ctypes
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import BUNDLE, compiled_for_hopper, early_arrivals, machine_code

torch = pytest.importorskip("torch")
FILE = BUNDLE / "benchmarks" / "hard_deck" / "kda" / "candidates" / "records.py"

LAYOUT_CHECK = r"""
#define __device__
#define __forceinline__ inline
typedef unsigned u32;
@LAYOUT@
constexpr int PARTS[][2] = {{PUSHED, 2 * PANEL}, {ENDED, 2 * PANEL}, {DECAY, 4 * WIDTH}, {ASKED, 2 * PANEL},
                            {WEIGHTED, PANEL}, {NEW, 2 * PANEL}};
extern "C" int place(int part, int size) { return PARTS[part][size]; }
extern "C" int record() { return RECORD; }
extern "C" int at(int row, int part) { return panel_at(row, part); }
extern "C" int of_decay(int channel) { return decay_at(channel); }
"""


@pytest.fixture(scope="module")
def candidate() -> dict:
    return runpy.run_path(str(FILE))


@pytest.fixture(scope="module")
def layout(candidate, tmp_path_factory):
    """The layout's own constants and functions, as a library of the CPU."""
    if shutil.which("g++") is None:
        pytest.skip("the layout is compiled with g++")
    folder = tmp_path_factory.mktemp("layout")
    (folder / "layout.cpp").write_text(LAYOUT_CHECK.replace("@LAYOUT@", candidate["LAYOUT"]))
    subprocess.run(["g++", "-shared", "-fPIC", folder / "layout.cpp", "-o", folder / "layout.so"], check=True)
    return ctypes.CDLL(str(folder / "layout.so"))


def test_the_parts_of_a_record_follow_one_another_and_fill_what_is_allocated(candidate, layout):
    parts = [(layout.place(part, 0), layout.place(part, 1)) for part in range(6)]
    assert [at for at, _ in parts] == [sum(size for _, size in parts[:i]) for i in range(6)]
    assert sum(size for _, size in parts) == layout.record() == 2 * candidate["RECORD"]


def test_a_panel_has_the_swizzle_of_128_bytes_and_eight_rows_of_a_part_meet_all_banks(layout):
    places = {layout.at(row, part) for row in range(64) for part in range(8)}
    assert places == set(range(0, 64 * 128, 16))
    for row in range(64):
        for part in range(8):
            plain = row * 128 + part * 16
            assert layout.at(row, part) == plain ^ (plain >> 7 & 7) << 4
    for part in range(8):
        assert len({layout.at(row, part) // 16 % 8 for row in range(8)}) == 8


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> tuple[list[dict], Path]:
    """What compile_kernel.py says of the kernels, and the folder of their code."""
    folder = tmp_path_factory.mktemp("code")
    return compiled_for_hopper(FILE, "--emit", folder), folder / "sm_90a"


def test_the_kernels_compile_without_spills_and_with_wgmma_in_flight(compiled):
    kernels, _ = compiled
    assert sorted(kernel["name"] for kernel in kernels) == ["fold_kernel", *["walk_kernel"] * 3]
    for kernel in kernels:
        assert not kernel["stack_bytes"] and "wgmma_serialized" not in kernel["remarks"], kernel
        assert all(("HGMMA" in name) == (kernel["name"] == "walk_kernel") for name in kernel["tensor_instructions"])


def test_no_copy_has_the_descriptor_that_is_an_illegal_instruction(compiled):
    """ptxas 13.0 made LDGSTS [R19+UR0], desc[UR1] of a cp.async with a hint to the L2; a descriptor is a pair."""
    listings = machine_code(compiled[1] / "fold_kernel.cubin")  # of all kernels
    copies = [line for lines in listings.values() for line in lines if "LDGSTS" in line]
    assert len(copies) == 12 and not any(re.search(r"desc\[UR\d*[13579]\]", copy) for copy in copies), copies


def test_a_stage_is_freed_only_behind_what_was_loaded_from_it(compiled):
    """Where an arrival stood right behind ldmatrix, one call in three gave other results (H200). decay alone may be under
    way: it is loaded for the last chunk too, which does not use it, and whose stage nothing fills again."""
    early = early_arrivals(compiled[1] / "fold_kernel.cubin")  # of all kernels
    assert {load.split()[0] for load, _ in early} <= {"LDS.128"}, early


def test_every_configuration_fits_the_kernel(candidate):
    """The static_asserts of walk's Shape, and constants that there are."""
    for constants in candidate["SPACE"]:
        assert set(constants) <= set(candidate["CHOSEN"])
        for name in ("MANY", "SOME", "FEW"):
            turns, stages, output_stages, slots = constants.get(name, candidate[name])
            shared = stages * (4 * 8192 + 1024 + 8192) + (output_stages + slots) * 3 * 8192 + 8192
            assert 2 * turns <= 8 and stages > 2 and shared <= 232448
            assert (stages + output_stages + slots) * 40 <= 512


def test_decay_lies_as_the_lanes_of_the_chain_load_it(layout):
    """Of 16 channels a lane of four has, in 16 bytes, those of its columns of the sums: 2t, 2t + 1, 2t + 8, 2t + 9."""
    for channel in range(128):
        lane, place = channel % 8 // 2, channel % 16 // 8 * 2 + channel % 2
        assert layout.of_decay(channel) == channel // 16 * 64 + lane * 16 + place * 4


OTHERS = {  # what differs from 2 x 70 tokens of 2 heads, and what is said
    "v of one head": ({"v": (2, 70, 1, 128)}, "one shape"),
    "k of one head": ({"k": (2, 70, 1, 128)}, "one shape"),
    "a gate a head": ({"g": (2, 70, 2, 1)}, "one shape"),
    "fewer gates": ({"g": (2, 69, 2, 128)}, "one shape"),
    "beta of batch 1": ({"beta": (1, 70, 2)}, "one shape"),
    "beta a channel": ({"beta": (2, 70, 2, 1)}, "one shape"),
    "width 64": (dict.fromkeys("qkvg", (2, 70, 2, 64)), "K = V = 128"),
    "many pairs": (dict.fromkeys("qkvg", (70000, 1, 1, 128)) | {"beta": (70000, 1, 1)}, "at most 65535"),
    "on the CPU": ({}, "on a GPU"),
}


@pytest.mark.parametrize(("shapes", "said"), OTHERS.values(), ids=OTHERS)
def test_what_the_kernel_does_not_serve_is_refused_before_a_launch(candidate, shapes, said):
    shapes = {**dict.fromkeys("qkvg", (2, 70, 2, 128)), "beta": (2, 70, 2), **shapes}
    dtypes = {"g": torch.float32}
    inputs = [torch.empty(1, dtype=dtypes.get(name, torch.bfloat16)).expand(shape) for name, shape in shapes.items()]
    with pytest.raises(ValueError, match=said):
        candidate["kernel_function"](*inputs)
