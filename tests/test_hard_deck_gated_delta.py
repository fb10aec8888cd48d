"""The CUDA C++ of gated_delta_rule/candidates/records.py without a GPU: what its fold computes, where its kernels look
for what, what steps over stretches lead to, what the compiler makes of the kernels, what their launches hand over, and
what is refused. A GPU alone says whether carry and walk are right, and all together."""

import contextlib
import ctypes
import functools
import importlib.util
import itertools
import math
import re
import runpy
import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import BUNDLE, STAND_INS, compiled_for_hopper, early_arrivals, machine_code
from kernelopt.device import programs

torch = pytest.importorskip("torch")
FILE = BUNDLE / "benchmarks" / "hard_deck" / "gated_delta_rule" / "candidates" / "records.py"
MANY_PAIRS, FEW_PAIRS = 25, 24  # of sequence and head: the fewest of MANY, the most of FEW


@pytest.fixture(scope="module")
def candidate() -> dict:
    return runpy.run_path(str(FILE))


@pytest.fixture
def names(candidate) -> dict:
    """The names that the candidate's functions see; a test's changes are undone."""
    seen = candidate["kernel_function"].__globals__
    before = dict(seen)
    yield seen
    seen.update(before)


# fold whole, and of walk what only counts, on the CPU. The lanes of fold's warp take turns, up or down: each runs to
# the next instruction that waits for the others. So where a wait is missing, the first lane reads what others have not
# written yet. What cp.async copies arrives at the wait for it.
ON_CPU = r"""
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <ucontext.h>
#include <vector>
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__
#define __align__(bytes)
typedef uint32_t u32;
using std::max;
using std::min;
struct int4 { int x, y, z, w; };
struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
static struct { int x, y; } threadIdx, blockIdx;
template <class T> T lds(const uint8_t* at) { T value; memcpy(&value, at, sizeof value); return value; }
template <class T> void sts(uint8_t* at, T value) { memcpy(at, &value, sizeof value); }

static ucontext_t lanes[32], home;
static bool ended[32];
static std::function<void()> body;
static char stacks[32][1 << 16];
static int descending;  // which lane is first
static void run_lane() { body(), ended[threadIdx.x] = true; }
static void run_warp(std::function<void()> each) {
    body = each;
    for (int i = 0; i < 32; ++i) {
        getcontext(&lanes[i]);
        lanes[i].uc_stack.ss_sp = stacks[i], lanes[i].uc_stack.ss_size = sizeof stacks[i], lanes[i].uc_link = &home;
        makecontext(&lanes[i], run_lane, 0), ended[i] = false;
    }
    for (bool more = true; more;) {
        more = false;
        for (int n = 0; n < 32; ++n) {
            const int i = descending ? 31 - n : n;
            if (!ended[i]) threadIdx.x = i, swapcontext(&home, &lanes[i]), more = true;
        }
    }
}
static void __syncwarp() { const int own = threadIdx.x; swapcontext(&lanes[own], &home); }
template <class T> const T* of_all(T value) {  // of each lane; there until the next call
    static T kept[2][32];
    static int calls[32];
    T* all = kept[calls[threadIdx.x]++ % 2];
    all[threadIdx.x] = value;
    __syncwarp();
    return all;
}
static u32 __ballot_sync(u32, bool in) {
    const bool* all = of_all(in);
    u32 bits = 0;
    for (int i = 0; i < 32; ++i) bits |= u32(all[i]) << i;
    return bits;
}
static int __reduce_max_sync(u32, int value) {
    const int* all = of_all(value);
    return *std::max_element(all, all + 32);
}
template <class T> T __shfl_sync(u32, T value, int from) { return of_all(value)[from]; }
static float __uint_as_float(u32 bits) { float value; memcpy(&value, &bits, 4); return value; }
static u32 rounded(float value) {  // to bf16, to the nearest, of two the even one
    u32 bits;
    memcpy(&bits, &value, 4);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static u32 packed(float low, float high) { return rounded(low) | rounded(high) << 16; }
static float power_of_2(float x) { return exp2f(x); }
static void let_walk_start() {}
static int lane_again() { return threadIdx.x; }

namespace fold { alignas(128) static uint8_t memory[32768]; }
static u32 shared_address(const void* at) { return (const uint8_t*)at - fold::memory; }
struct Copy { uint8_t* to; const void* from; bool inside; };
static std::vector<Copy> pending[32];
static void copy16(uint8_t* to, const void* from, bool inside) { pending[threadIdx.x].push_back({to, from, inside}); }
static void commit_copies() {}
template <int PENDING> void wait_copies() {
    static const uint8_t zeros[16] = {};
    for (const Copy& one : pending[threadIdx.x]) memcpy(one.to, one.inside ? one.from : zeros, 16);
    pending[threadIdx.x].clear();
}
struct Row { uint16_t value[8]; };
// Tile i is the rows that lanes 8 i to 8 i + 7 point to. Word i of lane l is a pair of row l / 4, or of column l / 4.
static void ldmatrix(u32 (&r)[4], u32 at) {
    const Row* all = of_all(lds<Row>(fold::memory + at));
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    for (int i = 0; i < 4; ++i) r[i] = all[8 * i + g].value[2 * t] | all[8 * i + g].value[2 * t + 1] << 16;
}
static void ldmatrix_trans(u32 (&r)[4], u32 at) {
    const Row* all = of_all(lds<Row>(fold::memory + at));
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    for (int i = 0; i < 4; ++i) r[i] = all[8 * i + 2 * t].value[g] | all[8 * i + 2 * t + 1].value[g] << 16;
}
static void stmatrix_trans(u32 at, const u32 (&r)[4]) {
    const u32* all = of_all(at);
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 2; ++j) sts(fold::memory + all[8 * i + 2 * t + j] + g * 2, uint16_t(r[i] >> 16 * j));
}
struct Operands { u32 a[4], b[2]; };
// mma.sync m16n8k16: with g = lane / 4 and t = lane % 4, a is rows g and g + 8, then the same of columns 8 and up.
static void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const Operands* all = of_all(Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}});
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 16; ++k) {
            const u32 x = all[g * 4 + k % 8 / 2].a[i / 2 + k / 8 * 2] >> k % 2 * 16;
            const u32 y = all[(2 * t + i % 2) * 4 + k % 8 / 2].b[k / 8] >> k % 2 * 16;
            d[i] += __uint_as_float(x << 16) * __uint_as_float(y << 16);
        }
}
@CONSTANTS@
@LAYOUT@
@FOLD@
namespace walk {
constexpr int PART = 64;
static uint4 load_four(const uint8_t* from) { return lds<uint4>(from); }
@SHAPE@
struct Problem {
    const int4* order;
    int heads, pairs, clusters, stretches;
    uint8_t* matrices;
    int pieces() const { return 2 * stretches; }
    @FLAGS@
};
@PLACES@
@PAIR@
@EACH_PAIR@
@EACH_PIECE@
@SKIPPED@
}

static fold::Problem problem(const int64_t* offsets, int heads, int sequences, int4* order) {
    fold::Problem p = {};
    p.offsets = offsets, p.offsets_are_long = 1, p.heads = heads, p.sequences = sequences, p.order = order;
    return p;
}
// The whole of fold's grid.
extern "C" void folded(const uint16_t* k, const float* g, const void* beta, int beta_is_float, const int64_t* offsets,
                       int heads, int sequences, int chunks, uint8_t* records, int4* order, int down) {
    descending = down;
    fold::Problem p = problem(offsets, heads, sequences, order);
    p.k = k, p.g = g, p.beta = beta, p.beta_is_float = beta_is_float, p.records = records;
    for (blockIdx.x = 0; blockIdx.x < p.sorters() + chunks; ++blockIdx.x) {
        memset(fold::memory, 0xff, sizeof fold::memory);  // NaN
        run_warp([&] { fold_kernel(p); });
    }
    descending = 0;
}
// For each block of fold behind those that sort: the row of 128 channels, tokens, and bytes before its record.
extern "C" void places(const int64_t* offsets, int heads, int sequences, int blocks, int64_t (*found)[3]) {
    const fold::Problem p = problem(offsets, heads, sequences, nullptr);
    for (int number = 0; number < blocks; ++number)
        run_warp([&] {
            const fold::Place place = fold::place_of(p, number);
            found[number][0] = place.first, found[number][1] = place.inside;
            found[number][2] = int64_t(place.record);
        });
}
// The pairs of each cluster in their order: cluster, sequence, head, first token, tokens, and their record's place.
extern "C" int pairs(const int64_t* offsets, int heads, int sequences, int clusters, int (*found)[6]) {
    std::vector<int4> order(sequences, int4{-1, 0, 0, 0});
    const fold::Problem sorted = problem(offsets, heads, sequences, order.data());
    for (blockIdx.x = 0; blockIdx.x < sorted.sorters(); ++blockIdx.x)
        run_warp([&] { fold::sort(fold::memory, sorted); });
    const walk::Problem p = {order.data(), heads, sequences * heads, clusters};
    int count = 0;
    for (blockIdx.y = 0; blockIdx.y < clusters; ++blockIdx.y)
        walk::each_pair(p, [&](const walk::Pair& pair) {
            const uint8_t* record = @RECORD@;
            const int line[6] = {blockIdx.y, pair.sequence, pair.head, pair.first, pair.tokens,
                                 int(int64_t(record) / RECORD)};
            memcpy(found[count++], line, sizeof line);
        });
    return count;
}
// The pieces of each cluster of carry, or of walk, in their order: cluster, sequence, head, first token, tokens, piece,
// whether M is looked for, the number of what carry finds, or of where walk begins; and how many steps, and of each the
// number of what is taken. With flags walk leaves out steps.
template <int WORK> int pieces(const walk::Problem& p, int clusters, int (*found)[24]) {
    int count = 0;
    for (blockIdx.y = 0; blockIdx.y < clusters; ++blockIdx.y) {
        walk::Places at = {};
        if (WORK == walk::PIECES && p.matrices) {
            int skipped[32];
            run_warp([&] { skipped[threadIdx.x] = walk::skipped_of<walk::Shape<PIECEWISE, WORK>>(p); });
            for (int one : skipped)
                if (one != skipped[0]) return -1;
            at.skipped = skipped[0];
        }
        walk::each_piece<WORK>(p, at, [&](const walk::Pair& pair) {
            int* to = found[count++];
            const bool in_carry = WORK == walk::CARRY;
            const int line[9] = {blockIdx.y, pair.sequence, pair.head, pair.first, pair.tokens, pair.piece, pair.matrix,
                                 in_carry ? pair.slot + pair.piece : pair.first_slot(), in_carry ? 0 : pair.steps()};
            memcpy(to, line, sizeof line);
            for (int i = 0; i < to[8]; ++i) to[9 + i] = pair.slot_of(i);
        });
    }
    return count;
}
extern "C" int cut(const int64_t* offsets, int heads, int sequences, int stretches, int in_carry, uint8_t* flags,
                   int (*found)[24]) {
    std::vector<int4> order(sequences, int4{-1, 0, 0, 0});
    const fold::Problem sorted = problem(offsets, heads, sequences, order.data());
    for (blockIdx.x = 0; blockIdx.x < sorted.sorters(); ++blockIdx.x)
        run_warp([&] { fold::sort(fold::memory, sorted); });
    walk::Problem p = {order.data(), heads, sequences * heads, 0, stretches};
    if (flags) p.matrices = flags - (p.flags(0) - p.matrices);
    const int clusters = p.pairs * (p.pieces() - in_carry);
    return in_carry ? pieces<walk::CARRY>(p, clusters, found) : pieces<walk::PIECES>(p, clusters, found);
}
template <int CLUSTER, int STAGES, int SLOTS, int WORK> void shape(int (&to)[12]) {
    using S = walk::Shape<CLUSTER, STAGES, SLOTS, WORK>;
    const int line[12] = {int(S::SOLVED), int(S::VALUES), int(S::QUERIES), int(S::GATES_AT), int(S::FULL), int(S::USED),
                          int(S::STAGE), int(S::READY), int(S::SLOT), int(S::STAGING), int(S::SHARED_BYTES), S::APART};
    memcpy(to, line, sizeof line);
}
extern "C" void shapes(int (*to)[12]) { @SHAPES@ }
extern "C" int part(int which) { const int parts[] = {SUMS, GATE, GATES, RECORD, PANEL}; return parts[which]; }
extern "C" int of_fold(int which) {
    using namespace fold;
    const int parts[] = {SHARED_BYTES, TOKEN_SUMS, DIAGONALS, LINE, DIAGONAL, INVERSES, COLUMN, INVERSE, SOLVED};
    return parts[which];
}
extern "C" int at(int row, int part) { return panel_at(row, part); }
"""


def between(text: str, first: str, last: str) -> str:
    """The piece of the kernels' text that begins so and ends so."""
    start = text.index(first)
    return text[start : text.index(last, start) + len(last)]


def inserted(candidate) -> dict[str, str]:
    """What stands in for the names in ON_CPU."""
    walk = candidate["WALK"]
    record = between(walk, "((int64_t)(pair.first", "* RECORD")
    return {
        "LAYOUT": candidate["LAYOUT"],
        "CONSTANTS": "".join(
            f"#define {name} {candidate[name]}\n" for name in ("FOLD_BLOCKS", "DEPENDENT", "BESIDE", "SKIP")
        )
        + f"#define PIECEWISE {', '.join(map(str, candidate['PIECEWISE']))}\n",
        "FOLD": candidate["FOLD"],
        "SHAPE": between(walk, "enum { WHOLE", "\n};"),
        "FLAGS": between(walk, "__device__ __forceinline__ uint8_t* flags", "\n    }"),
        "PLACES": between(walk, "struct Places {", "\n};"),
        "PAIR": between(walk, "struct Pair {", "\n};"),
        "EACH_PAIR": between(walk, "template <class F> __device__ __forceinline__ void each_pair", "\n}"),
        "EACH_PIECE": between(walk, "template <int WORK, class F> __device__ __forceinline__ void each_piece", "\n}"),
        "SKIPPED": between(walk, "template <class S> __device__ __forceinline__ int skipped_of", "\n}"),
        "RECORD": f"(const uint8_t*)nullptr + {record}",
        "SHAPES": "".join(f"shape<{', '.join(map(str, one))}>(to[{i}]); " for i, one in enumerate(shapes(candidate))),
    }


WORKS = {"MANY": 0, "FEW": 0, "CARRIED": 1, "PIECEWISE": 2}  # WHOLE, CARRY, PIECES
CARRY = 1


def shapes(candidate) -> list[tuple[int, int, int, int]]:
    """Blocks of a cluster, stages, slots and what a cluster goes over, in all configurations."""
    return [(*one.get(name, candidate[name]), work) for one in candidate["SPACE"] for name, work in WORKS.items()]


FORMS = [(1, 2), (1, 1), (0, 2), (0, 0)]  # BESIDE, and SKIP


@pytest.fixture(scope="module")
def countings(candidate, tmp_path_factory):
    """fold, and what walk counts, as libraries of the CPU, by (BESIDE, SKIP)."""
    if shutil.which("g++") is None:
        pytest.skip("fold, and what walk counts, is compiled with g++")

    @functools.cache
    def of(beside, skip):
        text = ON_CPU
        for name, piece in inserted(candidate | {"BESIDE": beside, "SKIP": skip}).items():
            text = text.replace(f"@{name}@", piece)
        folder = tmp_path_factory.mktemp("counting")
        (folder / "counting.cpp").write_text(text)
        command = ["g++", "-w", "-std=c++17", "-O1", "-shared", "-fPIC", folder / "counting.cpp", "-o"]
        subprocess.run([*command, folder / "counting.so"], check=True)
        return ctypes.CDLL(str(folder / "counting.so"))

    return of


@pytest.fixture(scope="module")
def counting(candidate, countings):
    """The library of the candidate as it is."""
    return countings(candidate["BESIDE"], candidate["SKIP"])


def test_a_record_has_the_size_that_is_allocated_and_its_panel_the_swizzle_of_128_bytes(candidate, counting):
    sums, gate, gates, record, panel = (counting.part(i) for i in range(5))
    assert (sums, gate, gates, record) == (panel, 64 * 4, 3 * gate, candidate["RECORD"]) and record % 16 == 0
    for row, part in itertools.product(range(64), range(8)):
        plain = row * 128 + part * 16
        assert counting.at(row, part) == plain ^ (plain >> 7 & 7) << 4


@pytest.mark.parametrize("beside", [0, 1])
def test_every_configuration_fits_the_kernel(candidate, countings, beside):
    """The constants that there are; the static_asserts of walk's Shape are compiled, too."""
    for constants in candidate["SPACE"]:
        assert set(constants) <= set(candidate["CHOSEN"])
    lines = ((ctypes.c_int * 12) * len(shapes(candidate)))()
    countings(beside, 2).shapes(lines)
    for (cluster, stages, slots, work), line in zip(shapes(candidate), lines, strict=True):
        solved, values, queries, gates, full, used, stage, ready, slot, staging, shared, apart = line
        assert apart == (cluster == 4) and solved == 2 * 8192 and values == solved + 8192
        if work == CARRY:  # neither queries nor slots
            assert gates == values + 8192 and slots == 0 and stages > 2
        else:
            assert queries == (solved if apart else values + 8192) and gates == queries + 2 * 8192
        assert gates >= 4 * 8192  # where a state, or M, ends
        assert full == gates + 768 and used + 8 <= stage and ready == 3 * 8192 and ready + 16 <= slot
        assert stage % 1024 == slot % 1024 == 0  # the swizzle counts from there
        assert staging == stages * stage + slots * slot
        assert shared == staging + 8192 * (work != CARRY or beside) <= 232448  # outputs, or zeros for the chain of M


def of_fold(counting) -> SimpleNamespace:
    names = "shared sums diagonals line diagonal inverses column inverse solved".split()
    return SimpleNamespace(**{name: counting.of_fold(i) for i, name in enumerate(names)})


def test_as_many_blocks_of_fold_fit_on_an_sm_as_the_compiler_leaves_registers_for(candidate, counting):
    """228 KB an SM, and 1 KB of it for each block. A block more would not fit."""
    most = max(one.get("FOLD_BLOCKS", candidate["FOLD_BLOCKS"]) for one in candidate["SPACE"])
    shared = of_fold(counting).shared + 1024
    assert most * shared <= 228 * 1024 < (most + 1) * shared


def test_what_takes_the_place_of_the_keys_is_apart_and_meets_different_banks(counting):
    f = of_fold(counting)
    assert f.diagonals == f.solved and f.diagonals + 4 * f.diagonal <= f.inverses and f.solved + 8192 <= f.inverses
    assert f.inverses + 4 * f.inverse <= f.sums and f.diagonal >= 16 * f.line and f.inverse >= 16 * f.column
    banks = [[(row * f.line + part * 8 + i) % 128 for row in range(4) for part in range(4) for i in (0, 4)]]  # stores
    banks += [[(half * f.diagonal + i) % 128 for half in range(2) for i in range(0, 16, 4)]]  # a row of two blocks
    banks += [[(column * f.column + i) % 128 for column in range(8) for i in range(0, 16, 4)]]  # stores, and ldmatrix
    for one in banks:
        assert len(set(one)) == len(one)


LENGTHS = {
    "one": [70],
    "whole chunks": [128, 64],
    "a token": [1],
    "none, and none at the end": [0, 130, 0, 0, 63, 1, 0],
    "hundreds": [(37 * i) % 190 for i in range(300)],
    "more than are sorted": [(i * i) % 70 for i in range(600)],
}


def offsets_of(lengths):
    return (ctypes.c_int64 * (len(lengths) + 1))(*itertools.accumulate(lengths, initial=0))


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_each_chunk_has_a_record_of_its_own_where_walk_looks_for_it(counting, lengths):
    heads, offsets = 2, offsets_of(lengths)
    blocks = (sum(lengths) // 64 + len(lengths)) * heads  # as the launcher's test says
    found = ((ctypes.c_int64 * 3) * blocks)()
    counting.places(offsets, heads, len(lengths), blocks, found)
    assert [record for _, _, record in found] == [8960 * number for number in range(blocks)]
    here = {number: (row, tokens) for number, (row, tokens, _) in enumerate(found) if tokens}
    expected = {}
    pairs = ((ctypes.c_int * 6) * (len(lengths) * heads))()
    assert counting.pairs(offsets, heads, len(lengths), 1, pairs) == len(pairs)
    for _, _, head, first, tokens, place in pairs:
        for done in range(0, tokens, 64):
            expected[place + done // 64 * heads] = ((first + done) * heads + head, min(64, tokens - done))
    assert here == expected and len(here) == heads * sum(-(-one // 64) for one in lengths)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("clusters", [1, 3, 66])
def test_clusters_take_each_pair_once_and_the_longest_first(counting, lengths, clusters):
    heads, offsets = 3, offsets_of(lengths)
    clusters = min(clusters, heads * len(lengths))
    found = ((ctypes.c_int * 6) * (len(lengths) * heads))()
    assert counting.pairs(offsets, heads, len(lengths), clusters, found) == len(found)
    taken = sorted((sequence, head, first, tokens) for _, sequence, head, first, tokens, _ in found)
    assert taken == [(i, head, offsets[i], lengths[i]) for i in range(len(lengths)) for head in range(heads)]
    if len(lengths) <= 512:
        firsts = [next(line[4] for line in found if line[0] == cluster) for cluster in range(clusters)]
        assert firsts == sorted((one for one in lengths for _ in range(heads)), reverse=True)[:clusters]


CUT = {
    "none": [0],
    "a token": [1],
    "a chunk": [64],
    "a chunk and a token": [65],
    "short, none and long": [0, 1, 130, 0, 1500],
    "a whole number a piece": [64 * 32],
    "a token more, and less": [64 * 32 + 1, 64 * 32 - 1],
    "a piece is left without tokens": [64 * 9],
}


def cut(counting, lengths, heads, stretches, in_carry=0, flags=None) -> list[SimpleNamespace]:
    """The pieces that clusters of carry, or of walk, take, in their order. flags: what carry says of M and A, (number,
    16) in int32; without them walk leaves out no step."""
    rows = ((ctypes.c_int * 24) * (4 * stretches * heads * len(lengths)))()
    at = None if flags is None else ctypes.c_void_p(flags.data_ptr())
    count = counting.cut(offsets_of(lengths), heads, len(lengths), stretches, in_carry, at, rows)
    assert count > 0  # all lanes leave out the same steps
    names = "cluster sequence head first tokens piece matrix number steps".split()
    lines = [list(row) for row in rows[:count]]
    return [SimpleNamespace(**dict(zip(names, one, strict=False)), taken=one[9 : 9 + one[8]]) for one in lines]


@pytest.mark.parametrize("lengths", CUT.values(), ids=CUT)
@pytest.mark.parametrize("stretches", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("beside", [0, 1])
def test_the_pieces_of_walk_are_all_chunks_of_each_sequence_once(countings, lengths, stretches, beside):
    heads, offsets = 2, offsets_of(lengths)
    found = cut(countings(beside, 2), lengths, heads, stretches)
    assert [one.cluster for one in found] == list(range(2 * stretches * heads * len(lengths)))  # one each
    for sequence, head in itertools.product(range(len(lengths)), range(heads)):
        own = [one for one in found if (one.sequence, one.head) == (sequence, head)]
        own.sort(key=lambda one: one.piece)
        assert [one.piece for one in own] == list(range(2 * stretches))
        tokens = [one.first + i for one in own for i in range(one.tokens)]
        assert tokens == list(range(offsets[sequence], offsets[sequence + 1]))
        for one in own:  # whole chunks of the sequence's own, as fold counts them
            assert one.tokens >= 0 and (one.first - offsets[sequence]) % 64 == 0
        assert max(one.tokens for one in own) <= 64 * -(-lengths[sequence] // (128 * stretches))
    assert [one.steps for one in found] == sorted((one.steps for one in found), reverse=True)
    most = max(one.steps for one in found)
    assert most == (2 * stretches - 2 if beside else stretches - 1)


@pytest.mark.parametrize("lengths", CUT.values(), ids=CUT)
@pytest.mark.parametrize("stretches", [1, 2, 3, 5, 8])
def test_carry_goes_over_each_piece_but_the_last_once_and_its_two_chains_find_a_and_m(countings, lengths, stretches):
    """BESIDE: a cluster has one piece. Those of piece 0, which has no M, are the first: the kernel counts on it."""
    heads, counting = 2, countings(1, 2)
    found = cut(counting, lengths, heads, stretches, in_carry=1)
    pairs = heads * len(lengths)
    assert [one.cluster for one in found] == list(range((2 * stretches - 1) * pairs))
    for one in found:
        assert not one.matrix and (one.cluster < pairs) == (one.piece == 0)
    parts = {(one.sequence, one.head, one.piece): (one.first, one.tokens) for one in found}
    of_walk = cut(counting, lengths, heads, stretches)
    of_walk = {(one.sequence, one.head, one.piece): (one.first, one.tokens) for one in of_walk}
    assert parts == {key: part for key, part in of_walk.items() if key[2] < 2 * stretches - 1}
    assert sorted(one.number for one in found) == list(range((2 * stretches - 1) * pairs))


@pytest.mark.parametrize("lengths", CUT.values(), ids=CUT)
@pytest.mark.parametrize("stretches", [1, 2, 3, 5, 8])
def test_carry_goes_over_the_pieces_of_walk_but_the_last_and_finds_a_and_m(countings, lengths, stretches):
    heads, counting = 2, countings(0, 0)
    found = cut(counting, lengths, heads, stretches, in_carry=1)
    assert {one.cluster for one in found} == set(range((2 * stretches - 1) * heads * len(lengths)))
    for _, own in itertools.groupby(found, lambda one: one.cluster):
        own = list(own)
        assert len({(one.sequence, one.head, one.matrix, one.piece // 2) for one in own}) == 1
        last = own[0].piece == 2 * stretches - 2
        assert own[0].piece % 2 == 0 and [one.piece - own[0].piece for one in own] == ([0] if last else [0, 1])
    parts = {
        (one.sequence, one.head, one.piece): (one.first, one.tokens) for one in cut(counting, lengths, heads, stretches)
    }
    for matrix in (0, 1):
        own = [one for one in found if one.matrix == matrix]
        places = {(one.sequence, one.head, one.piece): (one.first, one.tokens) for one in own}
        but = {key: part for key, part in parts.items() if 2 * matrix <= key[2] < 2 * stretches - 1}
        assert places == but and len(own) == len(but)  # each once; the first stretch needs no M
        assert len({one.number for one in own}) == len(own)
        assert all(0 <= one.number < (2 * stretches - 1) * heads * len(lengths) for one in own)


@pytest.fixture(scope="module")
def reference():
    return runpy.run_path(str(FILE.parents[1] / "reference.py"))["Model"]()


def after_tokens(parts, state):
    """The state after these tokens of a head, by the recurrence, one by one: k, v (tokens, width), g, beta (tokens)."""
    for k, v, g, beta in zip(*parts, strict=True):
        state = g.exp() * state
        state = state + beta * torch.outer(k, v - k @ state)
    return state


def after_chunks(model, parts, state):
    """The same in chunks, as carry and walk go; the state is as wide as v."""
    k, v, g, beta = parts
    for start in range(0, len(k), 64):
        own = slice(start, start + 64)
        columns = (k[own], k[own], v[own], g[own, None], beta[own, None])
        state = model.step(*(x[None] for x in columns), state[None])[1][0]
    return state


def found_by_carry(model, jobs, parts, states, beside) -> tuple[dict, dict]:
    """A and M by their numbers, in float64. parts: k, v, g and beta of all tokens of a head; a head's states."""
    found, width = ({}, {}), parts[0].shape[1]
    if beside:  # the second chain of each cluster but those of piece 0
        second = [SimpleNamespace(**vars(one) | {"cluster": -one.cluster, "matrix": 1}) for one in jobs if one.piece]
        jobs = jobs + second
    for _, own in itertools.groupby(jobs, lambda one: one.cluster):
        state = None
        for one in own:
            if state is None:
                state = torch.eye(width) if one.matrix else torch.zeros(width, width)
                state = states[one.sequence] if one.piece == 0 else state.double()
            k, v, g, beta = (x[one.first : one.first + one.tokens] for x in parts)
            state = after_chunks(model, (k, 0 * v if one.matrix else v, g, beta), state)
            found[one.matrix][one.number] = state
    return found


def flags_of(added, matrices, numbers) -> torch.Tensor:
    """What carry says of each number, (numbers, 16) in int32. Of eight parts of M the largest in bf16, without its
    sign, as the upper half of a word; and of eight of A whether they are not finite."""
    flags = torch.zeros(numbers, 16, dtype=torch.int32)
    for number, a in added.items():
        flags[number, 8:] = torch.tensor([int(not part.isfinite().all()) for part in a.flatten().chunk(8)])
        largest = [part.abs().max() for part in matrices.get(number, torch.ones(8)).flatten().chunk(8)]
        flags[number, :8] = torch.stack(largest).bfloat16().view(torch.int16).int() << 16
    return flags


GATES = {"weak": -0.02, "some M of 0": -0.8, "products of 0": -0.35, "all M of 0": -4.0}


@pytest.mark.parametrize("lengths", [[700], [1], [0, 300, 1030], [64 * 9]], ids=str)
@pytest.mark.parametrize("stretches", [1, 2, 3, 8])
@pytest.mark.parametrize("gates", GATES.values(), ids=GATES)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_steps_over_what_is_before_a_piece_give_the_recurrences_state(
    countings, reference, lengths, stretches, gates, form
):
    """In float64, with what carry finds and walk takes; the numbers of both, and the steps left out, are the
    kernel's."""
    torch.manual_seed(0)
    tokens, width, counting = sum(lengths), 16, countings(*form)
    k = torch.nn.functional.normalize(torch.randn(tokens, width), dim=-1).double()
    v, g = torch.randn(tokens, width).double(), gates * torch.rand(tokens).double()
    parts, states = (k, v, g, torch.rand(tokens).double()), torch.randn(len(lengths), width, width).double()
    jobs = cut(counting, lengths, 1, stretches, in_carry=1)
    added, matrices = found_by_carry(reference, jobs, parts, states, form[0])
    flags = flags_of(added, matrices, (2 * stretches - 1) * len(lengths))
    offsets = offsets_of(lengths)
    for one in cut(counting, lengths, 1, stretches, flags=flags):
        state = added[one.number] if one.piece else states[one.sequence]
        for number in one.taken:
            state = matrices[number] @ state + added[number]
        before = slice(offsets[one.sequence], max(offsets[one.sequence], min(one.first, offsets[one.sequence + 1])))
        expected = after_tokens([x[before] for x in parts], states[one.sequence])
        torch.testing.assert_close(state, expected, rtol=1e-9, atol=1e-9)


TINY = 2.0**-133  # the smallest in bf16
LEFT_OUT = {  # the largest of M of pieces 1 to 6; the piece whose A is not finite, or 0; steps left out by SKIP 1 and 2
    "none is small": ([1.0] * 6, 0, 0, 0),
    "one is 0": ([1, 1, 0, 1, 1, 1], 0, 3, 3),
    "the last of two": ([1, 0, 1, 1, 0, 1], 0, 5, 5),
    "all are 0": ([0.0] * 6, 0, 6, 6),
    "an A is not finite": ([0.0] * 6, 2, 0, 0),
    "one is as small as can be": ([1, 1, 1, 1, 1, TINY], 0, 0, 0),
    "two, and no more than a bound": ([1, 1, 1, 2.0**-72, 2.0**-72, 1], 0, 0, 0),
    "a product of two": ([1, 1, 1, 1, 2.0**-72, 2.0**-72], 0, 0, 5),
    "a product above the bound": ([1, 1, 1, 1, 2.0**-69, 2.0**-69], 0, 0, 0),
    "a product of two, and then one of 0": ([1, 2.0**-80, 2.0**-80, 1, 0, 1], 0, 5, 5),
    "a product of all": ([2.0**-30] * 6, 0, 0, 1),
    "a large one behind": ([1, 1, 1, 2.0**-100, 2.0**-60, 2.0**60], 0, 0, 0),
}


@pytest.mark.parametrize(("largest", "broken", "by_one", "by_products"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_walk_leaves_out_what_is_before_an_m_or_a_product_that_is_0(countings, largest, broken, by_one, by_products):
    """Of 8 pieces of 2 pairs, for the last one, which has 6 steps. The other pair's flags say that all M are 0."""
    flags = torch.zeros(14, 16, dtype=torch.int32)
    flags[:7, :8] = torch.tensor([0, *largest]).bfloat16().view(torch.int16).int()[:, None] << 16
    flags[:7, :7] //= 2**16 * 4  # one warp alone has the largest of M
    flags[:7, :7] *= 2**16
    flags[broken, 15] = broken > 0
    for skip, expected in {0: 0, 1: by_one, 2: by_products}.items():
        last, other = (one for one in cut(countings(1, skip), [4096], 2, 4, flags=flags) if one.piece == 7)
        assert 6 - last.steps == last.number == expected and other.steps == 6 * (not skip)
        assert last.taken == list(range(expected + 1, 7))


IN_PIECES = {  # pairs: chunks a sequence, at least
    **dict.fromkeys(range(1, 9), 24),
    **dict.fromkeys(range(9, 17), 32),
    **dict.fromkeys(range(MANY_PAIRS, 34), 128),
}


@pytest.mark.parametrize("pairs", [0, *range(1, 36), 128, 640])
def test_few_pairs_of_long_sequences_are_cut_and_all_clusters_of_a_launch_are_on_the_gpu(candidate, pairs):
    stretches_of, least = candidate["stretches_of"], IN_PIECES.get(pairs)
    for sequences in (one for one in range(1, pairs + 1) if pairs % one == 0):
        heads = pairs // sequences
        if least is None:
            assert not any(stretches_of(tokens * sequences, sequences, heads) for tokens in (0, 1, 64 * 24, 2**20))
            continue
        tokens = least * 64 * sequences
        assert not any(stretches_of(one, sequences, heads) for one in (0, 1, tokens - 1))
        stretches = stretches_of(tokens, sequences, heads)
        assert stretches == stretches_of(16 * tokens, sequences, heads) == min(8, 33 // pairs) >= 1
        assert 2 * stretches * pairs <= SMS // 2  # clusters of walk, of two blocks; carry has fewer
    assert stretches_of(2**20, 0, 8) == stretches_of(2**20, 8, 0) == 0


def test_of_the_workloads_one_alone_is_cut(candidate):
    sizes = {"default": (8192, 8, 16), "one": (4096, 1, 8), "many": (8192, 40, 16)}  # tokens, sequences, heads
    assert {name: candidate["stretches_of"](*one) for name, one in sizes.items()} == {"default": 0, "one": 4, "many": 0}


def solved(k, g, beta) -> tuple[torch.Tensor, ...]:
    """T of a chunk of a head, and its three rows of gates; k (tokens, 128), g and beta (tokens), all in float64."""
    sums = g.cumsum(0) / math.log(2)
    lower = (beta[:, None] * (k @ k.T) * (sums[:, None] - sums).tril(-1).exp2()).tril(-1)
    t = torch.linalg.solve_triangular(lower, beta.diag(), upper=False, unitriangular=True)
    return t, sums, sums.exp2(), (sums[-1] - sums).exp2()


def panel_of(counting, record: torch.Tensor) -> torch.Tensor:
    """The panel (64, 64) of a record, without its swizzle."""
    places = torch.tensor([[counting.at(row, part) for part in range(8)] for row in range(64)])
    return record[places[..., None] + torch.arange(16)].reshape(64, 128).view(torch.bfloat16)


def folded(counting, lengths, k, g, beta, descending) -> tuple[torch.Tensor, list]:
    """The records (chunks, 8960) and the order of the sequences that fold's model makes."""
    (tokens, heads), sequences = g.shape, len(lengths)
    chunks = (tokens // 64 + sequences) * heads
    records, order = torch.zeros(chunks, 8960, dtype=torch.uint8), torch.full((sequences, 4), -1, dtype=torch.int32)
    k, g, beta_, to, order_to = (ctypes.c_void_p(x.data_ptr()) for x in (k, g, beta, records, order))
    is_float = int(beta.dtype == torch.float32)
    counting.folded(k, g, beta_, is_float, offsets_of(lengths), heads, sequences, chunks, to, order_to, descending)
    return records, order.tolist()


FOLDED = {  # added to the gates' logits; the dtype of beta; tokens whose keys are NaN: those of the first sequence
    "gates": (3, torch.bfloat16, 0),
    "strong gates": (-40, torch.float32, 0),
    "no decay": (100, torch.bfloat16, 0),
    "keys of another sequence are NaN": (3, torch.float32, 70),
}


@pytest.mark.parametrize(("shift", "dtype", "broken"), FOLDED.values(), ids=FOLDED)
def test_fold_on_the_cpu_solves_each_chunk(counting, shift, dtype, broken):
    """Waits, copies and products are models; see ON_CPU."""
    torch.manual_seed(0)
    lengths, heads = [70, 5, 0, 128], 2
    offsets, tokens = offsets_of(lengths), sum(lengths)
    k = torch.nn.functional.normalize(torch.randn(tokens, heads, 128), dim=-1).bfloat16()
    k[:broken] = torch.nan
    g = torch.nn.functional.logsigmoid(2 * torch.randn(tokens, heads) + shift)
    beta = torch.sigmoid(torch.randn(tokens, heads)).to(dtype)
    records, order = folded(counting, lengths, k, g, beta, 0)
    assert torch.equal(records, folded(counting, lengths, k, g, beta, 1)[0])
    assert order == [[3, 75, 128, 0], [0, 0, 70, 0], [1, 70, 5, 0], [2, 75, 0, 0]]
    for sequence, head in itertools.product(range(len(lengths)), range(heads)):
        first, end = offsets[sequence], offsets[sequence + 1]
        for start in range(max(first, broken), end, 64):
            own = (slice(start, min(start + 64, end)), head)
            record = records[(first // 64 + sequence + (start - first) // 64) * heads + head]
            assert_solved(counting, record, *(x[own].double() for x in (k, g, beta)))


def assert_solved(counting, record, k, g, beta):
    """A record (8960) against its chunk's keys, gates and beta, of a head."""
    inside = len(k)
    t, *gates = solved(k, g, beta)
    found = panel_of(counting, record).double()
    assert (found[:inside, :inside] - t).norm() < 0.004 * t.norm()
    assert not found[inside:].any() and not found.triu(1).any()
    of_gates = record[8192:].view(torch.float32).view(3, 64).double()
    for one, expected in zip(of_gates, gates, strict=True):
        torch.testing.assert_close(one[:inside], expected, rtol=1e-3, atol=1e-3)
    assert not of_gates[2, inside:].any()


@pytest.fixture(scope="module", params=[{}, {"BESIDE": 0, "SKIP": 0}], ids=["as it is", "by stretches"])
def compiled(compile_here, tmp_path_factory, request) -> tuple[list[dict], Path]:
    """What compile_kernel.py says of the kernels, and the folder of their code."""
    folder, file = tmp_path_factory.mktemp("code"), FILE
    if request.param:
        file, text = folder / "candidates" / FILE.name, FILE.read_text()
        file.parent.mkdir()
        shutil.copy(FILE.parents[1] / "reference.py", folder)
        for name, value in request.param.items():
            text, count = re.subn(rf"^{name} = \d+$", f"{name} = {value}", text, flags=re.MULTILINE)
            assert count == 1
        file.write_text(text)
    return compiled_for_hopper(compile_here, file, "--emit", folder), folder / "sm_90a"


def test_the_kernels_compile_without_spills_and_with_wgmma_in_flight(compiled):
    """walk's are MANY, FEW, carry and that over pieces."""
    kernels, _ = compiled
    assert sorted(kernel["name"] for kernel in kernels) == ["fold_kernel", *["walk_kernel"] * 4]
    for kernel in kernels:
        assert kernel["stack_bytes"] == kernel["spill_bytes"] == 0, kernel
        assert "wgmma_serialized" not in kernel["remarks"], kernel  # ptxas C7508 to C7520
        assert all(("HGMMA" in name) == (kernel["name"] == "walk_kernel") for name in kernel["tensor_instructions"])


@pytest.fixture(scope="module")
def listings(compiled) -> dict[str, list[str]]:
    """The machine code of each kernel. A file has all of them, so one is listed."""
    listings = machine_code(compiled[1] / "fold_kernel.cubin")
    assert len(listings) == 5
    return listings


def found(lines: list[str], pattern: str) -> list[str]:
    return [line for line in lines if re.search(pattern, line)]


def test_a_stage_is_freed_only_behind_what_was_loaded_from_it(compiled):
    """ptxas lets an arrival pass loads whose values the code takes later. In kda that gave other results."""
    assert early_arrivals(compiled[1] / "fold_kernel.cubin") == []


def test_no_instruction_reads_or_writes_local_memory(listings):
    assert not found([line for lines in listings.values() for line in lines], r"\b(LDL|STL)\b")


def test_no_copy_has_the_descriptor_that_is_an_illegal_instruction(listings):
    """ptxas 13.0 made LDGSTS [R19+UR0], desc[UR1] of a cp.async with a hint to the L2; a descriptor is a pair. The 32
    copies of a whole chunk are not in a loop, those of a part of one are."""
    (fold,) = (lines for name, lines in listings.items() if "fold_kernel" in name)
    copies = found(fold, "LDGSTS")
    assert len(copies) > 32 and not found(copies, r"desc\[UR\d*[13579]\]"), copies


def test_walk_and_carry_wait_and_their_warpgroups_ask_for_no_more_registers_than_there_are(listings):
    """384 threads have 168 registers each. A warpgroup that asks for more than the others leave waits for ever. BESIDE
    carry's first two, each with a chain, ask by one instruction. fold
    and carry let the next kernel be launched, carry once it has waited: what waits for carry waits for fold, too."""
    carries = [name for name in listings if re.search(r"walk_kernel\w*ShapeILi\d+ELi\d+ELi\d+ELi1E", name)]
    assert len(carries) == 1
    for name, lines in listings.items():
        is_walk = "walk_kernel" in name
        waits = [i for i, line in enumerate(lines) if re.search(r"\bACQBULK\b", line)]
        lets = [i for i, line in enumerate(lines) if re.search(r"\bPREEXIT\b", line)]
        assert len(waits) == is_walk and len(lets) == (not is_walk or name in carries), name
        assert not (waits and lets) or waits[0] < lets[0], name
        counts = [int(line.split()[-1], 16) for line in found(lines, "USETMAXREG")]
        if name in carries and len(counts) == 2:
            assert sorted(counts) == [40, 232]
            counts.append(max(counts))
        assert len(counts) == 3 * is_walk and sum(counts) <= 3 * 168, (name, counts)


# tests/stand_ins/cudart.c, with more written down: of each launch and copy all that it is handed.
RUNTIME = r"""
#define __cudaPushCallConfiguration plain_push
#define __cudaPopCallConfiguration plain_pop
#define __cudaLaunchKernel plain_launch_of_12
#define cudaLaunchKernel plain_launch
#define cudaLaunchKernelExC plain_launch_ex
#define cudaFuncSetAttribute plain_set
#define cudaGetLastError plain_error
#define cudaGetDriverEntryPointByVersion plain_entry
#include "CUDART"
#undef __cudaPushCallConfiguration
#undef __cudaPopCallConfiguration
#undef __cudaLaunchKernel
#undef cudaLaunchKernel
#undef cudaLaunchKernelExC
#undef cudaFuncSetAttribute
#undef cudaGetLastError
#undef cudaGetDriverEntryPointByVersion
typedef struct { int id, pad; unsigned value[16]; } Attribute;
typedef struct { dim3 grid, threads; uint64_t bytes; void* stream; Attribute* attributes; unsigned count; } Config;
typedef struct {
    dim3 grid, threads;
    uint64_t bytes, stream, function, attributes[4][4]; /* id, and three words of its value */
    uint64_t count, words[128]; /* of the kernel's only argument */
} Launch;
Launch launches[16];
uint64_t copies[4][5], set[16][3]; /* to, from, bytes, kind, stream; function, attribute, value */
int launch_count, copy_count, set_count, fails; /* fails: the call that fails, counted down */
static Config pushed;
static int last_error;
static int failing() { return last_error = fails && !--fails ? 719 : 0; }
int cudaGetLastError() { return last_error; }

static int keep(const Config* config, const void* function, void** given, int bytes) {
    Launch* to = launches + launch_count++ % 16;
    memset(to, 0, sizeof *to);
    to->grid = config->grid, to->threads = config->threads, to->bytes = config->bytes;
    to->stream = (uint64_t)config->stream, to->function = (uint64_t)function, to->count = config->count;
    for (unsigned i = 0; i < config->count && i < 4; ++i) {
        to->attributes[i][0] = config->attributes[i].id;
        for (int j = 0; j < 3; ++j) to->attributes[i][1 + j] = config->attributes[i].value[j];
    }
    memcpy(to->words, given[0], bytes);
    return failing();
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 threads, uint64_t bytes, void* stream) {
    pushed = (Config){grid, threads, bytes, stream, 0, 0};
    return 0;
}
int __cudaPopCallConfiguration(dim3* grid, dim3* threads, uint64_t* bytes, void** stream) {
    *grid = pushed.grid, *threads = pushed.threads, *bytes = pushed.bytes, *stream = pushed.stream;
    return 0;
}
static int launch_3(dim3 grid, dim3 threads, const void* function, void** given, uint64_t bytes, void* stream) {
    const Config config = {grid, threads, bytes, stream, 0, 0};
    return keep(&config, function, given, 64);
}
int __cudaLaunchKernel(void* f, dim3 grid, dim3 threads, void** given, uint64_t bytes, void* stream) {
    return launch_3(grid, threads, f, given, bytes, stream);
}
int cudaLaunchKernel(const void* f, dim3 grid, dim3 threads, void** given, uint64_t bytes, void* stream) {
    return launch_3(grid, threads, f, given, bytes, stream);
}
int cudaLaunchKernelExC(const Config* config, const void* f, void** given) { return keep(config, f, given, 1024); }
int cudaFuncSetAttribute(const void* function, int attribute, int value) {
    uint64_t* to = set[set_count++ % 16];
    to[0] = (uint64_t)function, to[1] = attribute, to[2] = value;
    return failing();
}
int cudaMemcpyAsync(void* to, const void* from, uint64_t bytes, int kind, void* stream) {
    uint64_t* kept = copies[copy_count++ % 4];
    kept[0] = (uint64_t)to, kept[1] = (uint64_t)from, kept[2] = bytes, kept[3] = kind, kept[4] = (uint64_t)stream;
    return failing();
}
/* A map: address, columns, rows, pitch, columns and rows of a box, type, dimensions, swizzle. */
static int encode_whole(uint64_t* map, int type, unsigned rank, uint64_t address, const uint64_t* sizes,
                        const uint64_t* pitch, const unsigned* box, const unsigned* step, int interleave, int swizzle,
                        int promotion, int fill) {
    memset(map, 0, 128);
    map[0] = address, map[1] = sizes[0], map[2] = sizes[1], map[3] = pitch[0], map[4] = box[0], map[5] = box[1];
    map[6] = type, map[7] = rank, map[8] = swizzle, map[9] = step[0] | step[1] << 8 | interleave << 16 | fill << 24;
    return failing();
}
int cudaGetDriverEntryPointByVersion(const char* name, void** function) { *function = encode_whole; return 0; }
"""


class Launch(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint * 3) for name in ("grid", "threads")),
        *((name, ctypes.c_uint64) for name in ("bytes", "stream", "function")),
        ("attributes", (ctypes.c_uint64 * 4) * 4),
        ("count", ctypes.c_uint64),
        ("words", ctypes.c_uint64 * 128),
    ]


def built(candidate: dict, folder: Path):
    """The candidate's extension on a stand-in for CUDA's runtime and driver, and that one's library."""
    (folder / "runtime.c").write_text(RUNTIME.replace("CUDART", str(STAND_INS / "cudart.c")))
    library, source, extension = (
        folder / "libruntime.so",
        folder / "gated_delta_rule.cu",
        folder / "gated_delta_rule.so",
    )
    subprocess.run(["gcc", "-w", "-shared", "-fPIC", folder / "runtime.c", "-o", library], check=True)
    source.write_text(candidate["source"]()[0])
    python, target = f"-I{sysconfig.get_paths()['include']}", "-gencode=arch=compute_90a,code=compute_90a"
    options = ["-std=c++17", "-G", target, "-shared", "-Xcompiler=-fPIC", "-cudart=none", python]
    defined = "-DTORCH_EXTENSION_NAME=gated_delta_rule"
    subprocess.run([programs.find("nvcc"), *options, defined, source, library, "-o", extension], check=True)
    spec = importlib.util.spec_from_file_location("gated_delta_rule", extension)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, ctypes.CDLL(str(library))


Q, K, V, G, BETA, STATES, OFFSETS, RECORDS, ORDER, OUT, AFTER, STREAM, FOUND = (n << 20 for n in range(1, 14))
ADDRESSES = Q, K, V, G, BETA, STATES, OFFSETS, RECORDS, ORDER, OUT, AFTER
SMS = 132  # of the stand-in
BF16, FLOAT, SWIZZLE_128 = 9, 7, 3  # of CUtensorMapDataType and CUtensorMapSwizzle
CLUSTER, PROGRAMMATIC = 4, 6  # of cudaLaunchAttributeID


@pytest.fixture(scope="module")
def extension(candidate, tmp_path_factory):
    if programs.find("nvcc") is None or shutil.which("gcc") is None:
        pytest.skip("needs nvcc and gcc")
    if torch.version.cuda:
        pytest.skip("this torch has CUDA's own runtime in the process")
    return built(candidate, tmp_path_factory.mktemp("extension"))


@pytest.fixture
def launched(extension):
    """A function that launches, and gives the error, the launches and the copies."""
    module, library = extension
    whole = {name: ctypes.c_int.in_dll(library, name) for name in ("launch_count", "copy_count", "set_count", "fails")}

    def run(tokens, heads, sequences, beta_is_float=0, offsets_are_long=1, fails=0, stretches=0):
        whole["launch_count"].value = whole["copy_count"].value = 0
        whole["fails"].value = fails
        flags = beta_is_float, offsets_are_long
        error = module.run(*ADDRESSES, tokens, heads, sequences, *flags, STREAM, stretches, FOUND)
        whole["fails"].value = 0
        launches = (Launch * 16).in_dll(library, "launches")[: whole["launch_count"].value]
        copies = ((ctypes.c_uint64 * 5) * 4).in_dll(library, "copies")[: whole["copy_count"].value]
        return error, launches, [list(copy) for copy in copies]

    return run


def asked(extension) -> set[tuple[int, int, int]]:
    """The attributes of kernels that were set so far: function, attribute, value."""
    rows = ((ctypes.c_uint64 * 3) * 16).in_dll(extension[1], "set")
    return {tuple(row) for row in rows if row[0]}


SIZES = {  # tokens, heads, sequences, whether beta is fp32, whether offsets are int64; blocks of a cluster of walk
    "default": (8192, 16, 8, 0, 1, 2),
    "one, whole": (4096, 8, 1, 0, 1, 4),
    "many": (8192, 16, 40, 0, 0, 2),
    "most of few": (65, FEW_PAIRS // 3, 3, 1, 0, 4),
    "fewest of many": (63, 5, MANY_PAIRS // 5, 1, 1, 2),
    "a token": (1, 1, 1, 1, 1, 4),
}
CUT_SIZES = {  # the same; stretches, clusters of carry and of walk for them
    "one": (4096, 8, 1, 0, 1, 4, 56, 64),
    "of 11 pairs": (32 * 64, 11, 1, 1, 0, 3, 55, 66),
    "of 33 pairs": (3 * 128 * 64, 11, 3, 0, 1, 1, 33, 66),
    "of a pair": (24 * 64, 1, 1, 0, 1, 8, 15, 16),
}


@pytest.mark.parametrize("sizes", CUT_SIZES.values(), ids=CUT_SIZES)
def test_three_launches_with_carry_hand_over_sizes_and_addresses(candidate, launched, sizes):
    *sizes, stretches, of_carry, of_walk = sizes
    tokens, heads, sequences, *_ = sizes
    assert candidate["stretches_of"](tokens, sequences, heads) == stretches
    error, launches, copies = launched(*sizes, stretches=stretches)
    assert error == 0 and len(launches) == 3 and not copies
    fold, carry, walk = launches
    assert len({one.function for one in launches}) == 3 and {one.stream for one in launches} == {STREAM}
    assert fold.words[:6] == [K, G, BETA, OFFSETS, RECORDS, ORDER]
    assert list(fold.grid) == [1 + (tokens // 64 + sequences) * heads, 1, 1]
    assert list(carry.grid) == [2, of_carry, 1] and list(walk.grid) == [2, of_walk, 1]
    pairs = heads * sequences
    found = 2 * stretches - 1  # of a pair; behind the As stand the Ms
    for one in (carry, walk):
        assert list(one.threads) == [384, 1, 1] and one.words[80:84] == [RECORDS, ORDER, OUT, heads | pairs << 32]
        at = one.words[:].index(FOUND)  # a map is at a multiple of 128 bytes, with CUDA 12 of 64
        of_map = [FOUND, 128, 128 * pairs * found, 512, 32, 128, FLOAT, 2, SWIZZLE_128, 1 | 1 << 8]
        assert one.words[at : at + 10] == of_map
        assert one.words[at + 16] == FOUND + pairs * found * 65536 and one.words[at + 17] & 0xFFFFFFFF == stretches
        assert [one.words[16 * i] for i in range(5)] == [Q, K, V, STATES, AFTER]
        attributes = {line[0]: line[1:] for line in one.attributes[: one.count]}
        assert attributes[CLUSTER] == [2, 1, 1] and attributes[PROGRAMMATIC][0] == 1
    assert [one[16:22] for one in (carry.words, walk.words)] == [[K, 128 * heads, tokens, 256 * heads, 64, 64]] * 2


def test_the_error_of_any_call_with_carry_comes_back(launched):
    """In this order fold, six maps, carry and walk. Shared memory is asked for once, before."""
    launched(24 * 64, 1, 1, stretches=8)
    for call in range(1, 10):
        error, launches, _ = launched(24 * 64, 1, 1, fails=call, stretches=8)
        assert error == 719 and len(launches) == 1 + (call == 8) + 2 * (call == 9), call
    assert launched(24 * 64, 1, 1, stretches=8)[0] == 0


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_two_launches_hand_over_sizes_and_addresses(launched, sizes):
    tokens, heads, sequences, is_float, is_long, cluster = sizes
    error, launches, copies = launched(tokens, heads, sequences, is_float, is_long)
    assert error == 0 and len(launches) == 2 and not copies
    fold, walk = launches
    assert fold.stream == walk.stream == STREAM and fold.function != walk.function
    sorters = -(-sequences // 32)
    assert list(fold.grid) == [sorters + (tokens // 64 + sequences) * heads, 1, 1] and list(fold.threads) == [32, 1, 1]
    assert fold.words[:6] == [K, G, BETA, OFFSETS, RECORDS, ORDER]
    assert fold.words[6:8] == [heads | sequences << 32, is_float | is_long << 32]
    pairs, clusters = heads * sequences, min(heads * sequences, SMS // cluster)
    assert list(walk.grid) == [cluster, clusters, 1] and list(walk.threads) == [384, 1, 1]
    assert walk.words[80:84] == [RECORDS, ORDER, OUT, heads | pairs << 32]
    assert walk.words[84] & 0xFFFFFFFF == clusters


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_walk_has_maps_of_what_it_copies(launched, sizes):
    tokens, heads, sequences, *_, cluster = sizes
    _, (_, walk), _ = launched(*sizes[:-1])
    maps = [walk.words[16 * i : 16 * i + 10] for i in range(5)]
    lines = [128 * heads, tokens, 256 * heads]  # columns, rows, bytes of a row
    rows = [128, 128 * heads * sequences, 512]
    boxes = [[Q, *lines, 64, 64], [K, *lines, 64, 128 // cluster], [V, *lines, 64, 64]]
    assert [one[:6] for one in maps] == [*boxes, [STATES, *rows, 32, 128], [AFTER, *rows, 32, 128]]
    assert [one[6] for one in maps] == [BF16] * 3 + [FLOAT] * 2
    for one in maps:  # two dimensions; whole steps, no interleaving, zeros behind the end
        assert one[7:] == [2, SWIZZLE_128, 1 | 1 << 8]


@pytest.mark.parametrize("sizes", CUT_SIZES.values(), ids=CUT_SIZES)
def test_carry_and_walk_over_pieces_may_use_their_shared_memory(candidate, counting, extension, launched, sizes):
    _, (_, *launches), _ = launched(*sizes[:5], stretches=sizes[5])
    lines = ((ctypes.c_int * 12) * len(shapes(candidate)))()
    counting.shapes(lines)
    for launch, name in zip(launches, ("CARRIED", "PIECEWISE"), strict=True):
        assert launch.bytes == lines[shapes(candidate).index((*candidate[name], WORKS[name]))][10]
        assert {(launch.function, 8, launch.bytes), (launch.function, 9, 100)} <= asked(extension)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_walk_may_start_before_fold_ends_and_both_may_use_their_shared_memory(
    candidate, counting, extension, launched, sizes
):
    cluster = sizes[-1]
    _, (fold, walk), _ = launched(*sizes[:-1])
    assert fold.count == 0 and walk.count == 2
    attributes = {one[0]: one[1:] for one in walk.attributes[:2]}
    assert attributes[CLUSTER] == [cluster, 1, 1] and attributes[PROGRAMMATIC][0] == 1
    lines = ((ctypes.c_int * 12) * len(shapes(candidate)))()
    counting.shapes(lines)
    of_walk = lines[shapes(candidate).index((*candidate["FEW" if cluster == 4 else "MANY"], 0))][10]
    assert (fold.bytes, walk.bytes) == (16384 + 512, of_walk)
    for launch in (fold, walk):
        assert (launch.function, 8, launch.bytes) in asked(extension)  # cudaFuncAttributeMaxDynamicSharedMemorySize
        assert (launch.function, 9, 100) in asked(extension)  # the carveout


def test_nothing_is_launched_without_pairs_and_states_are_copied_without_tokens(launched):
    for tokens, heads, sequences in ((64, 2, 0), (64, 0, 3), (0, 0, 0), (0, 4, 0)):
        assert launched(tokens, heads, sequences) == (0, [], [])
    assert launched(0, 3, 5) == (0, [], [[AFTER, STATES, 15 * 128 * 128 * 4, 3, STREAM]])
    assert launched(0, 3, 5, fails=1)[0] == 719


def test_the_error_of_any_call_comes_back(launched):
    """In this order fold, five maps, and walk. Shared memory is asked for once, before."""
    launched(64, 1, 1)
    for call in range(1, 8):
        error, launches, _ = launched(64, 1, 1, fails=call)
        assert error == 719 and len(launches) == 1 + (call == 7), call
    assert launched(64, 1, 1)[0] == 0


class OnGPU(torch.Tensor):
    """A tensor of the CPU that says that it is on GPU 0, or whose `number` says so."""

    is_cuda = property(lambda self: True)

    def get_device(self):
        return getattr(self, "number", 0)


def inputs_of(shapes=None, dtypes=None) -> dict[str, torch.Tensor]:
    """70 tokens of 2 heads in 3 sequences; what differs is given by name. Each tensor has one element in memory."""
    sizes = dict.fromkeys("qkv", (70, 2, 128)) | dict.fromkeys(("g", "beta"), (70, 2))
    sizes |= {"states": (3, 2, 128, 128), "cu_seqlens": (4,), **(shapes or {})}
    kinds = {"g": torch.float32, "states": torch.float32, "cu_seqlens": torch.int64, **(dtypes or {})}
    return {name: torch.empty(1, dtype=kinds.get(name, torch.bfloat16)).expand(size) for name, size in sizes.items()}


@pytest.fixture
def gpu(names, monkeypatch):
    """Stand-ins for the launcher and for what CUDA says. Gives what was launched, and the devices that were entered."""
    seen = SimpleNamespace(calls=[], entered=[], error=0)

    @contextlib.contextmanager
    def device(number):
        seen.entered.append(number)
        yield

    def run(*given):
        seen.calls.append(given)
        return seen.error

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", device)
    names.update(_run=run, stream_of=lambda number: STREAM + number)
    return seen


def moved(x: torch.Tensor) -> torch.Tensor:
    """A copy that begins an element behind a multiple of 16 bytes."""
    return torch.empty(x.numel() + 8, dtype=x.dtype)[1 : 1 + x.numel()].view(x.shape).copy_(x)


def called(candidate, gpu, **changes):
    """Inputs, outputs, and what the launcher was handed."""
    inputs = {name: one.contiguous().zero_() for name, one in inputs_of().items()} | changes
    inputs = {name: one.as_subclass(OnGPU) for name, one in inputs.items()}
    outputs = candidate["kernel_function"](*inputs.values())
    return inputs, outputs, gpu.calls[-1]


def test_the_launcher_gets_addresses_sizes_and_the_stream(candidate, gpu):
    inputs, (out, after), given = called(candidate, gpu)
    assert given[:7] == tuple(one.data_ptr() for one in inputs.values())
    records, order = given[7:9]
    assert order - records == (70 // 64 + 3) * 2 * 8960 and records % 16 == order % 16 == 0
    assert given[9:17] == (out.data_ptr(), after.data_ptr(), 70, 2, 3, 0, 1, STREAM) and not gpu.entered
    assert given[17] == 0  # stretches
    assert out.shape == (70, 2, 128) and out.dtype == torch.bfloat16
    assert after.shape == (3, 2, 128, 128) and after.dtype == torch.float32


def test_records_and_the_order_of_sequences_have_the_room_that_the_kernels_use(candidate, gpu, names):
    made = []
    names["torch"] = SimpleNamespace(
        **{**vars(torch), "empty": lambda size, **_: made.append(size) or torch.empty(size)}
    )
    called(candidate, gpu)
    assert made == [(70 // 64 + 3) * 2 * 8960 + 16 * 3]


def test_what_carry_finds_has_its_room_between_the_records_and_the_order(candidate, gpu, names):
    """Of each piece but the last of a pair A in fp32, M in bf16, and 16 words of flags."""
    made = []
    names["torch"] = SimpleNamespace(
        **{**vars(torch), "empty": lambda size, **_: made.append(size) or torch.empty(size, dtype=torch.uint8)}
    )
    tokens, pairs = 24 * 64, 2
    sizes = dict.fromkeys("qkv", (tokens, 2, 128)) | dict.fromkeys(("g", "beta"), (tokens, 2))
    sizes |= {"states": (1, 2, 128, 128), "cu_seqlens": (2,)}
    longer = {name: one.contiguous().zero_() for name, one in inputs_of(sizes).items()}
    *_, given = called(candidate, gpu, **longer)
    records, order, stretches, found = given[7], given[8], *given[17:]
    assert stretches == 8 and found - records == (24 + 1) * 2 * 8960 and found % 16 == 0
    assert order - found == pairs * (2 * stretches - 1) * ((4 + 2) * 128 * 128 + 64) and order % 16 == 0
    assert made == [order - records + 16]


@pytest.mark.parametrize("name", ["q", "k", "v", "states"])
def test_what_tensor_copies_cannot_read_is_copied_first(candidate, gpu, name):
    at = list(inputs_of()).index(name)
    for changed in (moved(inputs_of()[name]), inputs_of()[name], torch.empty_strided((1, 2), (1, 1))):
        if changed.ndim == 2:  # heads first
            changed = inputs_of()[name].contiguous().transpose(0, 1).contiguous().transpose(0, 1)
        inputs, _, given = called(candidate, gpu, **{name: changed})
        assert given[at] != inputs[name].data_ptr() and given[at] % 16 == 0


@pytest.mark.parametrize("name", ["g", "beta", "cu_seqlens"])
def test_what_is_not_contiguous_is_copied_first(candidate, gpu, name):
    at, plain = list(inputs_of()).index(name), inputs_of()[name]
    spread = torch.empty(*plain.shape, 2, dtype=plain.dtype)[..., 0]
    inputs, _, given = called(candidate, gpu, **{name: spread})
    assert given[at] != inputs[name].data_ptr()


def test_the_dtypes_of_beta_and_of_the_offsets_are_told(candidate, gpu):
    of_beta = {torch.bfloat16: 0, torch.float32: 1, torch.float16: 1, torch.float64: 1}
    for dtype, flag in of_beta.items():
        inputs, _, given = called(candidate, gpu, beta=torch.zeros(70, 2, dtype=dtype))
        assert given[14] == flag and (given[4] == inputs["beta"].data_ptr()) == (dtype in list(of_beta)[:2])
    for dtype, flag in {torch.int32: 0, torch.int64: 1}.items():
        inputs, _, given = called(candidate, gpu, cu_seqlens=torch.zeros(4, dtype=dtype))
        assert given[15] == flag and given[6] == inputs["cu_seqlens"].data_ptr()


def test_an_error_of_a_launch_is_raised(candidate, gpu):
    gpu.error = 719
    with pytest.raises(RuntimeError, match="CUDA error 719"):
        called(candidate, gpu)


def test_another_device_becomes_the_current_one_for_the_launch(candidate, gpu, monkeypatch):
    monkeypatch.setattr(OnGPU, "number", 1, raising=False)
    *_, given = called(candidate, gpu)
    assert gpu.entered == [1] and given[16] == STREAM + 1


MUCH = dict.fromkeys("qkv", (64, 2**23, 128)) | dict.fromkeys(("g", "beta"), (64, 2**23))
OTHERS = {  # what differs, and what is said
    "k of one head": ({"k": (70, 1, 128)}, "one shape"),
    "k of another width": ({"k": (70, 2, 64)}, "one shape"),
    "q of more heads": ({"q": (70, 4, 128)}, "one shape"),
    "v of one head": ({"v": (70, 1, 128)}, "one shape"),
    "v of another width": ({"v": (70, 2, 64)}, "one shape"),
    "fewer tokens of v": ({"v": (69, 2, 128)}, "one shape"),
    "g of one head": ({"g": (70, 1)}, "one shape"),
    "fewer gates": ({"g": (69, 2)}, "one shape"),
    "a gate a channel": ({"g": (70, 2, 128)}, "one shape"),
    "beta of one head": ({"beta": (70, 1)}, "one shape"),
    "beta of one token": ({"beta": (1, 2)}, "one shape"),
    "beta with a channel": ({"beta": (70, 2, 1)}, "one shape"),
    "states of one head": ({"states": (3, 1, 128, 128)}, "states must be"),
    "states of another width": ({"states": (3, 2, 128, 64)}, "states must be"),
    "states of more channels": ({"states": (3, 2, 256, 128)}, "states must be"),
    "states without heads": ({"states": (3, 128, 128)}, "states must be"),
    "fewer offsets": ({"cu_seqlens": (3,)}, "cu_seqlens"),
    "more offsets": ({"cu_seqlens": (5,)}, "cu_seqlens"),
    "offsets in two dimensions": ({"cu_seqlens": (1, 4)}, "cu_seqlens"),
    "width 64": (dict.fromkeys("qkv", (70, 2, 64)), "K = V = 128"),
    "a batch": (dict.fromkeys("qkv", (1, 70, 2, 128)), "unpack"),
    "too many sequences": ({"states": (2**23, 2, 128, 128), "cu_seqlens": (2**23 + 1,)}, "fewer than 16777216 chunks"),
    "too many heads": (MUCH | {"states": (1, 2**23, 128, 128), "cu_seqlens": (2,)}, "fewer than 16777216 chunks"),
    "too many tokens": (
        dict.fromkeys("qkv", (2**31, 1, 128)) | dict.fromkeys(("g", "beta"), (2**31, 1)) | {"states": (3, 1, 128, 128)},
        "fewer than 16777216 chunks",
    ),
}


@pytest.mark.parametrize(("shapes", "said"), OTHERS.values(), ids=OTHERS)
def test_shapes_that_the_kernel_does_not_serve_are_refused_before_a_launch(candidate, gpu, shapes, said):
    inputs = {name: one.as_subclass(OnGPU) for name, one in inputs_of(shapes).items()}
    with pytest.raises(ValueError, match=said):
        candidate["kernel_function"](*inputs.values())
    assert not gpu.calls


DTYPES = [
    *((name, torch.float16, "bf16") for name in "qkv"),
    ("q", torch.float32, "bf16"),
    ("g", torch.bfloat16, "fp32"),
    ("g", torch.float64, "fp32"),
    ("states", torch.bfloat16, "fp32"),
    ("states", torch.float64, "fp32"),
    *(("cu_seqlens", dtype, "int32 or int64") for dtype in (torch.float32, torch.int16, torch.bool)),
]


@pytest.mark.parametrize(("name", "dtype", "said"), DTYPES)
def test_dtypes_that_the_kernel_does_not_serve_are_refused_before_a_launch(candidate, gpu, name, dtype, said):
    inputs = {key: one.as_subclass(OnGPU) for key, one in inputs_of(dtypes={name: dtype}).items()}
    with pytest.raises(ValueError, match=said):
        candidate["kernel_function"](*inputs.values())
    assert not gpu.calls


@pytest.mark.parametrize("elsewhere", list(inputs_of()))
def test_a_tensor_on_another_device_is_refused_before_a_launch(candidate, gpu, elsewhere):
    for number in (None, 1):  # the CPU, or another GPU
        inputs = {name: one.as_subclass(OnGPU) for name, one in inputs_of().items()}
        inputs[elsewhere] = inputs_of()[elsewhere] if number is None else inputs[elsewhere]
        inputs[elsewhere].number = number
        with pytest.raises(ValueError, match="on one device"):
            candidate["kernel_function"](*inputs.values())
    assert not gpu.calls


def test_tensors_on_the_cpu_are_refused_before_a_launch(candidate, gpu):
    with pytest.raises(ValueError, match="on a GPU"):
        candidate["kernel_function"](*inputs_of().values())
    assert not gpu.calls
