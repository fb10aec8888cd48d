"""The CUDA C++ of kda/candidates/records.py without a GPU: the layout of a record, which its kernels share, the places
of fold in shared memory, the segments of a head, and what the compiler makes of the kernels. A GPU alone says whether
they are right."""

import ctypes
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import BUNDLE, compiled_for_hopper, machine_code
from kernelopt.device import programs
from kernelopt.disassembly import listing_files, scoreboards

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

# The segments of walk. A warp's vote is taken in two rounds: in the first each lane says its own, in the second all
# hear the result.
SEGMENTS_CHECK = r"""
#include <algorithm>
#include <stdint.h>
#include <string.h>
using std::min;
typedef uint16_t __nv_bfloat16;
struct { int x, y, z; } threadIdx, blockIdx;
u32 votes[2], heard[2];
int votes_taken;
u32 __float_as_uint(float x) { u32 r; memcpy(&r, &x, 4); return r; }
int __clz(u32 x) { return __builtin_clz(x); }
void load_four(float* d, const uint8_t* from) { memcpy(d, from, 16); }
u32 __ballot_sync(u32, bool vote) {
    votes[votes_taken] |= (u32)vote << threadIdx.x % 32;
    return heard[votes_taken++];
}
namespace walk {
@SEGMENTS@
@FUNCTIONS@
}
using namespace walk;
extern "C" {
int place(int which) {
    const int all[] = {@PLACES@};
    return all[which];
}
void part(int chunks, int length, int segments, int segment, int* to) {
    const Problem p = {nullptr, nullptr, 0, 0, chunks, length, segments, nullptr};
    blockIdx.z = segment, to[0] = first_of<Split>(p), to[1] = count_of<Split>(p);
    to[2] = first_of<Transfer>(p), to[3] = count_of<Transfer>(p);
}
int whole(int chunks) {
    const Problem p = {nullptr, nullptr, 0, 0, chunks, 1, 1, nullptr};
    return first_of<Shape<MANY>>(p) == 0 ? count_of<Shape<MANY>>(p) : -1;
}
int source(uint8_t* effects, int pair, int segments, int segment, int* transfers) {
    const Problem p = {nullptr, nullptr, 0, 0, 8 * segments, 8, segments, effects};
    int r;
    blockIdx = {0, pair, segment};
    memset(heard, 0, sizeof heard);
    for (int round = 0; round < 2; ++round) {
        memset(votes, 0, sizeof votes);
        for (threadIdx.x = 0; threadIdx.x < 32; ++threadIdx.x) votes_taken = 0, r = source_of<Split>(p);
        memcpy(heard, votes, sizeof votes);
    }
    *transfers = transfers_of<Split>(r);
    return r;
}
void identity(int thread, int half, float* to) {
    float state[2][32];
    threadIdx.x = thread, put_identity(state, half), memcpy(to, state, sizeof state);
}
}
"""
EFFECT_PLACES = "EFFECT END_AT END_BYTES FLAGS_AT".split()
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
    start = r"^(?:template <[^\n]*>\s)?__device__ __forceinline__ [^\n(]*\b"
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
def segments(candidate, tmp_path_factory):
    """What walk and transfer make of segments, as a library of the CPU."""
    text, (whole, _) = candidate["WALK"], candidate["source"]()
    part = text[text.index("constexpr int GROUP") : text.index("struct Places")]
    check = SEGMENTS_CHECK.replace("@SEGMENTS@", part).replace("@FUNCTIONS@", function_of(text, "put_identity"))
    check = check.replace("@PLACES@", ", ".join(EFFECT_PLACES))
    head = LAYOUT_CHECK[: LAYOUT_CHECK.index("@LAYOUT@")] + candidate["LAYOUT"]
    return library(tmp_path_factory.mktemp("segments"), whole[: whole.index("#define PY_SSIZE_T_CLEAN")] + head + check)


@pytest.fixture(scope="module")
def effect(segments) -> dict[str, int]:
    return {name: segments.place(i) for i, name in enumerate(EFFECT_PLACES)}


def test_segments_cover_all_chunks_once_and_fit_on_the_card(candidate, segments):
    part = (ctypes.c_int * 4)()
    for pairs in (*range(1, 20), 24, 25, 400):
        for chunks in (*range(1, 70), 127, 128, 129, 1000, 65535):
            length = candidate["length_of"](chunks, pairs)
            count, covered = -(-chunks // length), 0
            for segment in range(count):
                segments.part(chunks, length, count, segment, part)
                assert part[0] == part[2] == covered and part[1] == part[3] > 0, (pairs, chunks)
                covered += part[1]
            assert covered == segments.whole(chunks) == chunks, (pairs, chunks)
            assert (count > 1) == (pairs <= 16 and chunks >= 24), (pairs, chunks)
            assert count == 1 or (count <= 8 and pairs * count <= 64 and length >= 4), (pairs, chunks)


def test_the_parts_of_an_effect_follow_one_another_and_fill_what_is_allocated(candidate, effect):
    assert effect["END_AT"] == 128 * 128 * 2 and effect["FLAGS_AT"] == effect["END_AT"] + 2 * effect["END_BYTES"]
    assert effect["END_BYTES"] == 64 * 128 * 4 and effect["FLAGS_AT"] + 16 * 4 <= effect["EFFECT"]
    assert effect["EFFECT"] == 2 * candidate["EFFECT"] and effect["EFFECT"] % 16 == candidate["RECORD"] * 2 % 16 == 0


@pytest.mark.parametrize("half", [0, 1])
def test_the_chain_of_transfer_starts_from_its_columns_of_the_identity(segments, half):
    """The sums of wgmma m64n64: the rows are the block's 64 columns, the columns of both halves the 128 channels."""
    seen, state = {}, (ctypes.c_float * 64)()
    for thread in range(128):
        segments.identity(thread, half, state)
        for i, value in enumerate(state):
            row = thread // 32 * 16 + thread % 32 // 4 + i // 2 % 2 * 8
            channel = i // 32 * 64 + i % 32 // 4 * 8 + thread % 4 * 2 + i % 2
            seen[row, channel] = value
    assert seen == {(row, channel): float(channel == 64 * half + row) for row in range(64) for channel in range(128)}


FLAGS = {  # segments whose transfer is 0; those whose end is not finite; segment 6 starts from the end of
    "none is 0": ((), (), 0),
    "two are 0": ((1, 3), (), 3),
    "the one before is 0": ((5,), (), 5),
    "itself and later ones are not asked": ((2, 6), (6,), 2),
    "an end is not finite": ((1, 3), (0,), 0),
}


@pytest.mark.parametrize(("zeros", "bad", "source"), FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize("warp", [0, 7])
def test_a_segment_starts_from_the_end_of_the_last_one_that_lets_nothing_pass(
    segments, effect, zeros, bad, source, warp
):
    pair, transfers = 2, ctypes.c_int()
    effects = (ctypes.c_uint8 * (3 * 7 * effect["EFFECT"]))()
    for segment in range(7):
        at = (pair * 7 + segment) * effect["EFFECT"] + effect["FLAGS_AT"]
        effects[at + warp * 4] = segment not in zeros
        effects[at + 32 + warp * 4] = segment in bad
    assert segments.source(effects, pair, 8, 6, ctypes.byref(transfers)) == source and transfers.value == 5 - source
    assert segments.source(effects, pair, 8, 0, ctypes.byref(transfers)) == transfers.value == 0


def matrices(q, k, v, g, beta) -> list[tuple[torch.Tensor, ...]]:
    """Of each chunk of a head: new, asked, pushed, ended, weighted, decay, in the dtype of the inputs."""
    chunks, eye = [], torch.eye(64, dtype=q.dtype)
    parts = [torch.nn.functional.pad(x, (0, 0, 0, -len(x) % 64)).split(64) for x in (q, k, v, g, beta[:, None])]
    for query, key, value, gate, rate in zip(*parts, strict=True):
        sums = gate.cumsum(0)
        decays = (sums[:, None] - sums[None]).clamp(max=0).exp()
        lower = torch.einsum("ijd,id,jd->ij", decays, key, key).tril(-1) * rate
        weighted = torch.einsum("ijd,id,jd->ij", decays, query, key).tril() / 128**0.5
        inverse = torch.linalg.inv(eye + lower)
        asked, ended = query * sums.exp() / 128**0.5, key * (sums[-1] - sums).exp()
        chunks.append(
            (inverse @ (rate * value), asked, inverse @ (rate * key * sums.exp()), ended, weighted, sums[-1].exp())
        )
    return chunks


def passed(chunks, state, has_new=True):
    """Outputs of chunks, and the state behind them, as walk's docstring says."""
    outputs = []
    for new, asked, pushed, ended, weighted, decay in chunks:
        change = new * has_new - pushed @ state
        outputs.append(asked @ state + weighted @ change)
        state = decay[:, None] * state + ended.T @ change
    return torch.cat(outputs), state


@pytest.mark.parametrize("weaker", [1.0, 0.01])
def test_the_transfers_and_ends_of_segments_give_the_recurrence(candidate, weaker):
    tokens = 26 * 64 - 10
    task = runpy.run_path(str(FILE.parents[1] / "reference.py"))
    inputs = [one.double() for one in task["get_inputs"](batch=1, tokens=tokens, heads=1)]
    inputs[3] *= weaker
    chunks = matrices(*(one[0, :, 0] for one in inputs))
    length, none = candidate["length_of"](26, 1), torch.zeros(128, 128, dtype=torch.float64)
    segments = [chunks[first : first + length] for first in range(0, 26, length)]
    assert len(segments) > 4
    ends = [passed(segment, none)[1] for segment in segments]
    transfers = [passed(segment, torch.eye(128, dtype=torch.float64), has_new=False)[1] for segment in segments]
    outputs, state = [], none
    for segment, transfer, end in zip(segments, transfers, ends, strict=True):
        outputs.append(passed(segment, state)[0])
        state = transfer @ state + end
    torch.testing.assert_close(torch.cat(outputs)[:tokens], task["Model"]()(*inputs)[0, :, 0])
    torch.testing.assert_close(state, passed(chunks, none)[1])
    assert weaker == 1 or min(transfer.norm() for transfer in transfers) > 1  # else nothing is tested of them


class OnGPU(torch.Tensor):
    """A tensor of the CPU that says that it is on GPU 0, and notes what is allocated beside it."""

    is_cuda, made = property(lambda self: True), []

    def get_device(self):
        return 0

    def new_empty(self, size):
        self.made.append(size)
        return torch.empty(8, dtype=self.dtype)


@pytest.mark.parametrize(("tokens", "segments"), [(70, 1), (1500, 6)])
def test_records_and_effects_have_the_room_that_the_kernels_use(candidate, monkeypatch, tokens, segments):
    calls, chunks = [], -(-tokens // 64)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(OnGPU, "made", [])
    names = candidate["kernel_function"].__globals__
    monkeypatch.setitem(names, "_run", lambda *given: calls.append(given) or 0)
    monkeypatch.setitem(names, "stream_of", lambda device: 7)
    shapes = [*[(2, tokens, 1, 128)] * 4, (2, tokens, 1)]
    inputs = [torch.zeros(shape, dtype=torch.float32 if i == 3 else torch.bfloat16) for i, shape in enumerate(shapes)]
    candidate["kernel_function"](*[one.as_subclass(OnGPU) for one in inputs])
    length = -(-chunks // segments)
    assert calls[0][7:] == (2, tokens, 1, 0, 7, length)
    assert OnGPU.made == [2 * (chunks * 37120 + (segments - 1) * 49216)]


@pytest.fixture(scope="module")
def compiled(compile_here, tmp_path_factory) -> tuple[list[dict], Path]:
    """What compile_kernel.py says of the kernels, and the folder of their code."""
    folder = tmp_path_factory.mktemp("code")
    return compiled_for_hopper(compile_here, FILE, "--emit", folder), folder / "sm_90a"


def test_the_kernels_compile_without_spills_and_with_wgmma_in_flight(candidate, compiled):
    kernels, _ = compiled
    assert sorted(kernel["name"] for kernel in kernels) == ["fold_kernel", "transfer_kernel", *["walk_kernel"] * 4]
    (fold,) = [kernel for kernel in kernels if kernel["name"] == "fold_kernel"]
    assert candidate["FOLD_BLOCKS"] * 128 * fold["registers"] <= 65536
    for kernel in kernels:
        assert not kernel["stack_bytes"] and not kernel["spill_bytes"], kernel
        assert kernel["tensor_instructions"] and "wgmma_serialized" not in kernel["remarks"], kernel
        assert all(("HGMMA" in name) == (kernel["name"] != "fold_kernel") for name in kernel["tensor_instructions"])


def test_no_copy_has_the_descriptor_that_is_an_illegal_instruction(compiled):
    """ptxas 13.0 made LDGSTS [R19+UR0], desc[UR1] of a cp.async with a hint to the L2; a descriptor is a pair."""
    listings = machine_code(compiled[1] / "fold_kernel.cubin")  # of all kernels
    copies = [line for lines in listings.values() for line in lines if "LDGSTS" in line]
    assert len(copies) == 40 and not any(re.search(r"desc\[UR\d*[13579]\]", copy) for copy in copies), copies


def test_a_stage_is_freed_only_behind_what_was_loaded_from_it(compiled):
    """Where an arrival stood right behind ldmatrix, one call in three gave other results (H200). In walk `new` alone
    may be under way: on a path that no call takes, where the next chunk, for which it is loaded, does not follow."""
    if programs.find("cuobjdump") is None:
        pytest.skip("needs cuobjdump")
    listings = listing_files.read(compiled[1] / "fold_kernel.cubin")  # of all kernels
    kernels = [kernel for one in listings for kernel in one.kernels if one.kind == "sass"]
    assert len(kernels) == 6 and all(kernel.instructions[0].control is not None for kernel in kernels)
    for kernel in kernels:
        early = list(scoreboards.early_arrivals(kernel))
        loads = {load.split()[0] for load, _ in early}
        assert loads <= ({"LDS.128"} if "walk_kernel" in kernel.name else set()), (kernel.name, early)


def test_every_configuration_fits_the_kernel(candidate):
    """The static_asserts of walk's Shape, and constants that there are."""
    stage = 4 * 8192 + 1024 + 8192
    for constants in candidate["SPACE"]:
        assert set(constants) <= {*candidate["CHOSEN"], "SPLIT_PAIRS"}
        for name in ("MANY", "SOME", "FEW", "SPLIT"):
            turns, stages, output_stages, slots = constants.get(name, candidate[name])
            shared = stages * stage + (output_stages + slots) * 3 * 8192 + 8192
            assert 2 * turns <= 8 and stages > 2 and shared <= 232448
            assert (stages + output_stages + slots) * 40 <= 512
        stages = constants.get("TRANSFER_STAGES", candidate["TRANSFER_STAGES"])
        assert 2 < stages <= 12 and stages * stage + 2 * 8192 <= 232448


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
