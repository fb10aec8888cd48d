"""The CUDA C++ of kda/candidates/records.py without a GPU: the layout of a record, which its two kernels share, the
places of fold in shared memory, and what the compiler makes of both. A GPU alone says whether they are right."""

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

# Functions of fold with a lane that is set, and with loads and stores that note their places. An address of shared
# memory is an offset, one of global memory too.
FOLD_CHECK = r"""
#include <stdint.h>
namespace fold {
@CONSTANTS@
int lane, noted, notes[4096][4];
int lane_of_warp() { return lane; }
int lane_again() { return lane; }
void note(int a, int b, int c, int d) { int* to = notes[noted++]; to[0] = a, to[1] = b, to[2] = c, to[3] = d; }
int offset(const void* of) { return (int)(intptr_t)of; }
u32 shared_address(const void* of) { return offset(of); }
void ldmatrix(u32 (&)[4], u32 at) { note(at, 0, 0, 0); }
void copy16(uint8_t* to, const void* from, bool inside) { note(offset(to), offset(from), inside, 0); }
struct Place { int64_t first; int inside; };
struct Tile { float keys[2][4], queries[2][4]; };
struct uint4 { u32 x, y, z, w; };
int where;
template <class T> T lds(const uint8_t* at) { where = offset(at); return {}; }
void put_lower(uint8_t*, const float (&)[2][4], int later, int earlier, bool on_diagonal) {
    note(later, earlier, on_diagonal, 0);
}
void stage_weights(uint8_t* stage, const float (&)[2][4], bool on_diagonal) { note(offset(stage), 0, on_diagonal, 1); }
void store_weights(uint8_t*, int later, int earlier, uint4) { note(later, earlier, where, 2); }
void invert(uint8_t*, int block) { note(block, 0, 0, 3); }
void __syncwarp() {}
@FUNCTIONS@
}
using namespace fold;
extern "C" {
int panel(int row, int part) { return panel_at(row, part); }
int place(int which) {
    const int all[] = {@PLACES@};
    return all[which];
}
int tile(int row, int part) { return tile_at(row, part); }
int bridge(int later, int earlier) { return bridge_at(later, earlier); }
int later(int pair) { return later_of(pair); }
int earlier(int pair) { return earlier_of(pair); }
int staged(int row, int part) { return staged_at(row, part); }
int operand(int is_a, int at_lane, int block, int step) {
    u32 r[4];
    noted = 0, lane = at_lane;
    is_a ? load_rows(r, nullptr, block, step) : load_columns(r, nullptr, block, step);
    return notes[0][0];
}
int copies(int full, int warp, int at_lane, int inside, int heads) {
    noted = 0, lane = at_lane;
    const Place place = {0, inside};
    if (full) copy_rows<true>(nullptr, nullptr, place, heads, warp);
    else copy_rows<false>(nullptr, nullptr, place, heads, warp);
    return noted;
}
int tiles(int warp) {
    Tile tiles[3] = {};
    noted = lane = 0;
    if (warp < 2) put_tiles<3>(nullptr, nullptr, tiles, warp, 2 * warp);
    else put_tiles<2>(nullptr, nullptr, tiles, warp, warp);
    return noted;
}
int noted_at(int i, int j) { return notes[i][j]; }
}
"""
PLACES = "SHARED_BYTES RIGHT LOWER DIAGONALS DIAGONAL LINE INVERSES INVERSE COLUMN WEIGHTS STARTS".split()
OF_FOLD = "tile_at bridge_at later_of earlier_of staged_at load_rows load_columns copy_rows put_tiles".split()


@pytest.fixture(scope="module")
def candidate() -> dict:
    return runpy.run_path(str(FILE))


def library(folder: Path, text: str) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("the layout is compiled with g++")
    (folder / "layout.cpp").write_text(text)
    subprocess.run(["g++", "-w", "-shared", "-fPIC", folder / "layout.cpp", "-o", folder / "layout.so"], check=True)
    return ctypes.CDLL(str(folder / "layout.so"))


@pytest.fixture(scope="module")
def layout(candidate, tmp_path_factory):
    """The layout's own constants and functions, as a library of the CPU."""
    return library(tmp_path_factory.mktemp("layout"), LAYOUT_CHECK.replace("@LAYOUT@", candidate["LAYOUT"]))


def function_of(text: str, name: str) -> str:
    """The definition of a function in CUDA C++, of one line or up to a brace at a line's start."""
    start = r"^(?:template <[^\n]*>\n)?__device__ __forceinline__ [^\n(]*\b"
    return re.search(rf"{start}{name}\((?:[^\n]*}}\n|.*?^}}\n)", text, re.M | re.S)[0]


@pytest.fixture(scope="module")
def fold(candidate, tmp_path_factory):
    """Constants of fold, and those of its functions that find places, as a library of the CPU."""
    text = candidate["FOLD"]
    constants = text[text.index("constexpr") : text.index("__device__")]
    functions = "".join(function_of(text, name) for name in OF_FOLD)
    check = FOLD_CHECK.replace("@CONSTANTS@", constants).replace("@FUNCTIONS@", functions)
    check = check.replace("@PLACES@", ", ".join(PLACES))
    head = LAYOUT_CHECK[: LAYOUT_CHECK.index("@LAYOUT@")] + candidate["LAYOUT"]
    return library(tmp_path_factory.mktemp("fold"), head + check)


@pytest.fixture(scope="module")
def places(fold) -> dict[str, int]:
    return {name: fold.place(i) for i, name in enumerate(PLACES)}


def notes(fold, count: int) -> list[tuple[int, ...]]:
    return [tuple(fold.noted_at(i, j) for j in range(4)) for i in range(count)]


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


def test_four_blocks_of_fold_fit_an_sm_and_its_places_do_not_overlap(candidate, places):
    assert candidate["FOLD_BLOCKS"] * (places["SHARED_BYTES"] + 1024) <= 228 * 1024  # 1 KB a block is CUDA's
    ends = [places["LOWER"] + 6 * 512, places["DIAGONALS"] + 4 * places["DIAGONAL"]]
    assert places["RIGHT"] == places["LOWER"] and ends == [places["DIAGONALS"], places["INVERSES"]]
    assert places["INVERSES"] + 4 * places["INVERSE"] <= places["RIGHT"] + 2 * 8192
    assert places["DIAGONAL"] >= 16 * places["LINE"] and places["INVERSE"] == 16 * places["COLUMN"]


def test_what_lanes_of_fold_take_at_once_is_in_different_banks(fold, places):
    """The inverse: 32 bytes of four rows, a row of two blocks, 16 bytes of eight columns. A stage: 8 rows of a part."""
    assert {row * places["LINE"] // 32 % 4 for row in range(4)} == set(range(4))
    assert places["DIAGONAL"] % 128 == 64
    assert {column * places["COLUMN"] // 16 % 8 for column in range(8)} == set(range(8))
    assert {fold.staged(row, part) for row in range(16) for part in range(2)} == set(range(0, 512, 16))
    for first, part in ((0, 0), (0, 1), (8, 0), (8, 1)):
        assert {fold.staged(first + row, part) // 16 % 8 for row in range(8)} == set(range(8))


def test_pairs_of_blocks_are_numbered_as_their_bridges_lie(fold):
    pairs = [(later, earlier) for later in range(4) for earlier in range(later)]
    assert [(fold.later(i), fold.earlier(i)) for i in range(6)] == pairs
    assert [fold.bridge(*pair) for pair in pairs] == [256 * i for i in range(6)]


def test_fold_multiplies_what_lies_in_the_tiles_as_a_and_as_b(fold):
    """Lane l gives ldmatrix row l % 8 of tile l / 8: the second tile of A is below the first, that of B beside it."""
    for step in range(8):
        for block in range(4):
            for lane in range(32):
                row, part = 16 * block + lane % 16, 2 * step + lane // 16
                assert fold.operand(1, lane, block, step) == fold.tile(row, part)
                row, part = 16 * block + lane // 16 * 8 + lane % 8, 2 * step + lane // 8 % 2
                assert fold.operand(0, lane, block, step) == fold.tile(row, part)


@pytest.mark.parametrize(("full", "inside"), [(1, 64), (0, 64), (0, 37), (0, 0)])
def test_each_part_of_a_chunk_is_copied_once_to_its_place_in_the_tile(fold, full, inside):
    heads, seen = 3, []
    for warp in range(4):
        for lane in range(32):
            seen += notes(fold, fold.copies(full, warp, lane, inside, heads))
    parts = [(row, part) for row in range(64) for part in range(16)]
    wanted = [(fold.tile(row, part), row * heads * 256 + part * 16, int(row < inside), 0) for row, part in parts]
    assert sorted(seen) == sorted(wanted)


def test_each_pair_of_blocks_is_put_once_by_one_warp(fold, places):
    """Their order: lower and a stage of weighted for each; the inverses of two blocks on the diagonal; weighted out."""
    all_pairs, inverted, stages = [], [], []
    for warp in range(4):
        seen = notes(fold, fold.tiles(warp))
        lower, staged, stored, inverses = ([note for note in seen if note[3] == kind] for kind in range(4))
        assert [note[:2] for note in lower] == [note[:2] for note in stored]
        assert [note[2] for note in lower] == [note[2] for note in staged] == [int(a == b) for a, b, *_ in lower]
        assert [note[0] for note in staged] == [note[2] for note in stored]
        all_pairs += [note[:2] for note in lower]
        stages += [note[0] for note in staged]
        inverted += [block for note in inverses for block in (note[0], note[0] + 1)]
    assert sorted(all_pairs) == [(later, earlier) for later in range(4) for earlier in range(later + 1)]
    assert sorted(inverted) == [0, 1, 2, 3]
    assert sorted(stages) == [places["WEIGHTS"] + 512 * i for i in range(10)]
    assert places["WEIGHTS"] + 10 * 512 <= places["STARTS"]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> tuple[list[dict], Path]:
    """What compile_kernel.py says of the kernels, and the folder of their code."""
    folder = tmp_path_factory.mktemp("code")
    return compiled_for_hopper(FILE, "--emit", folder), folder / "sm_90a"


def test_the_kernels_compile_without_spills_and_with_wgmma_in_flight(candidate, compiled):
    kernels, _ = compiled
    assert sorted(kernel["name"] for kernel in kernels) == ["fold_kernel", *["walk_kernel"] * 3]
    (fold,) = [kernel for kernel in kernels if kernel["name"] == "fold_kernel"]
    assert candidate["FOLD_BLOCKS"] * 128 * fold["registers"] <= 65536
    for kernel in kernels:
        assert not kernel["stack_bytes"] and "wgmma_serialized" not in kernel["remarks"], kernel
        assert all(("HGMMA" in name) == (kernel["name"] == "walk_kernel") for name in kernel["tensor_instructions"])


def test_no_copy_has_the_descriptor_that_is_an_illegal_instruction(compiled):
    """ptxas 13.0 made LDGSTS [R19+UR0], desc[UR1] of a cp.async with a hint to the L2; a descriptor is a pair."""
    listings = machine_code(compiled[1] / "fold_kernel.cubin")  # of all kernels
    copies = [line for lines in listings.values() for line in lines if "LDGSTS" in line]
    assert len(copies) == 40 and not any(re.search(r"desc\[UR\d*[13579]\]", copy) for copy in copies), copies


def test_a_stage_is_freed_only_behind_what_was_loaded_from_it(compiled):
    """Where an arrival stood right behind ldmatrix, one call in three gave other results (H200). decay alone may be
    under way: it is loaded for the last chunk too, which does not use it, and whose stage nothing fills again."""
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
