"""The kernels of the 4-bit product without a GPU: which lane reads what, by a model of TMA's swizzle and of mma's layouts.

The candidates' own index functions are compiled for the CPU. What the model does with them is written here again, so it
can differ from the kernel: a GPU alone says whether the kernel is right."""

import ast
import ctypes
import itertools
import runpy
import shutil
import subprocess

import numpy as np
import pytest
from conftest import BUNDLE

pytest.importorskip("triton")  # a candidate imports it
FILE = BUNDLE / "benchmarks" / "hard_deck" / "w4a16" / "candidates" / "ring.py"
NAMES = ("v", "split", "stages", "blocks")
TILE = 128  # columns of a block


def index_of(name: str, folder):
    """The functions between the marks in the CUDA C++, as a library of the CPU."""
    text = runpy.run_path(str(FILE))["CUDA"]
    if shutil.which("g++") is None:
        pytest.skip("the index functions are compiled with g++")
    start = text.index(f"// INDEX {name}\n")
    lines = text[start : text.index("// INDEX END", start)]
    (folder / "index.cpp").write_text(lines.replace("HD int", 'extern "C" int'))
    subprocess.run(["g++", "-shared", "-fPIC", folder / "index.cpp", "-o", folder / "index.so"], check=True)
    return ctypes.CDLL(str(folder / "index.so"))


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return index_of("ring", tmp_path_factory.mktemp("index"))


@pytest.fixture(scope="module")
def one_row(tmp_path_factory):
    return index_of("one", tmp_path_factory.mktemp("one_row"))


def shapes() -> list[tuple[int, tuple]]:
    """Rows in eights, and the constants of the candidate's shape for so many rows."""
    assigned = {
        node.targets[0].id: node.value for node in ast.parse(FILE.read_text()).body if isinstance(node, ast.Assign)
    }
    return [(eights, ast.literal_eval(assigned[name])) for name, eights in (("SIXTEEN", 2), ("THIRTY", 4))]


def by_tma(rows: np.ndarray) -> np.ndarray:
    """A box of rows of 128 bytes as TMA writes it: bits 4 to 6 of an address XOR its bits 7 to 9."""
    address = np.arange(rows.size)
    memory = np.empty(rows.size, np.uint8)
    memory[address ^ (address >> 7 & 7) << 4] = rows.reshape(-1)
    return memory


def word(memory: np.ndarray, at: int, count: int) -> list[int]:
    assert at % (4 * count) == 0, "an access is aligned"
    return [int(one) for one in memory[at : at + 4 * count].view(np.uint32)]


def pair(one: int, j: int) -> tuple[int, int]:
    """PRMT and LOP3 of byte j: the bits of two bf16, 128 + low and 128 + high, less 128."""
    source = one | (one >> 4) << 32
    chosen = sum((source >> 8 * (j if place < 2 else 4 + j) & 255) << 8 * place for place in range(4))
    both = chosen & 0x000F000F | 0x43004300
    assert both & 0xFF80FF80 == 0x43004300
    return both & 0x7F, both >> 16 & 0x7F


class Warp:
    """One warp in one group of 128 of k: what its lanes read, and its sums."""

    def __init__(self, index, eights, v, warp):
        self.index, self.eights, self.v, self.warp = index, eights, v, warp

    def weight_at(self, step, t, g, second):
        """The byte of the weights where a lane reads, from the start of the box."""
        column = self.index.column_of(self.v, self.warp, g)
        return step * 1024 + self.index.swizzled(self.index.packed_row(t, second), column)

    def x_at(self, step, t, g, eight):
        row = self.index.x_row(g)
        return step // 4 * self.eights * 1024 + eight * 1024 + self.index.swizzled(row, step % 4 * 32 + 8 * t)

    def a(self, weights, step) -> np.ndarray:
        """The A of each product: 16 rows, which are columns of W, by 16 of k, in PTX's layout of m16n8k16."""
        a = np.zeros((self.v // 2, 16, 16), np.int64)
        for g, t, second in itertools.product(range(8), range(4), range(2)):
            for i, four in enumerate(word(weights, self.weight_at(step, t, g, second), self.v // 4)):
                for j in range(4):
                    k = 2 * t + 8 * second
                    a[2 * i + j // 2, g + j % 2 * 8, k : k + 2] = pair(four, j)
        return a

    def b(self, x, step, eight) -> np.ndarray:
        """B: 16 of k by 8 rows of x."""
        b = np.zeros((16, 8), np.int64)
        for g, t in itertools.product(range(8), range(4)):
            words = word(x, self.x_at(step, t, g, eight), 2)
            for second in range(2):
                k = 2 * t + 8 * second
                b[k : k + 2, g] = np.array([words[second]], np.uint32).view(np.int16)
        return b

    def sums(self, weights, x) -> np.ndarray:
        acc = np.zeros((self.v // 2, self.eights, 16, 8), np.int64)
        for step in range(8):
            a = self.a(weights, step)
            for eight in range(self.eights):
                acc[:, eight] += a @ self.b(x, step, eight)
        return acc


def product(index, eights, v, packed, x, put, rows_of) -> np.ndarray:
    """The block's part of y, through the places of the sums in shared memory: `put` writes two sums of a row."""
    panels = [by_tma(np.ascontiguousarray(x[:, 64 * i : 64 * i + 64]).view(np.uint8)) for i in range(2)]
    weights, panels = by_tma(packed), np.concatenate(panels)
    for number in range(TILE // (8 * v)):
        acc = Warp(index, eights, v, number).sums(weights, panels)
        for g, t, m, n, j in itertools.product(range(8), range(4), range(v // 2), range(eights), range(2)):
            column = index.column_of(v, number, g) + 2 * m
            put(n, 2 * t + j, column, acc[m, n, [g, g + 8], 2 * t + j])
    return rows_of()


class Sent:
    """The sums as one block sends them to all of the cluster, each of which has its own columns."""

    def __init__(self, index, eights, split):
        self.index, self.eights, self.own = index, eights, TILE // split
        self.memory = np.zeros((split, 8 * eights * self.own), np.int64)
        self.written = np.zeros_like(self.memory)

    def place(self, line, column):
        byte = self.index.sent_byte(self.own, line, column // 4 * 4)  # 16 bytes at a time
        assert byte % 16 == 0
        return byte // 4 + column % 4

    def put(self, eight, column_of_sums, column, two):
        at = self.place(8 * eight + column_of_sums, column % self.own)
        self.memory[column // self.own, at : at + 2] = two
        self.written[column // self.own, at : at + 2] += 1

    def rows(self):
        assert (self.written == 1).all()
        y = np.zeros((8 * self.eights, TILE), np.int64)
        for line, column in itertools.product(range(8 * self.eights), range(TILE)):
            row = line // 8 * 8 + self.index.x_row(line % 8)
            y[row, column] = self.memory[column // self.own, self.place(line, column % self.own)]
        return y


@pytest.mark.parametrize(("eights", "constants"), shapes(), ids=str)
def test_the_lanes_of_the_ring_multiply_what_belongs_together(index, eights, constants):
    numbers = np.random.default_rng(7)
    packed = numbers.integers(0, 256, (64, TILE), np.uint8)
    x = numbers.integers(-99, 99, (8 * eights, 128), np.int16)
    weight = np.stack([packed & 15, packed >> 4], 1).reshape(128, -1).astype(np.int64)
    v, split = constants[:2]
    for sums in (Sent(index, eights, split), Sent(index, eights, 2), Sent(index, eights, 8)):
        assert (product(index, eights, v, packed, x, sums.put, sums.rows) == x.astype(np.int64) @ weight).all()


def worst_conflict(addresses: list[int], size: int) -> int:
    """How often one bank is asked for different words, at most, by the lanes that are served at once."""
    lanes = 128 // size
    worst = 0
    for start in range(0, 32, lanes):
        words = {at // 4 + i for at in addresses[start : start + lanes] for i in range(size // 4)}
        banks = [one % 32 for one in words]
        worst = max(worst, *(banks.count(bank) for bank in set(banks)))
    return worst


@pytest.mark.parametrize(("eights", "constants"), shapes(), ids=str)
def test_the_reads_of_mma_and_the_sums_meet_no_bank_twice(index, eights, constants):
    v = dict(zip(NAMES, constants, strict=True))["v"]
    lanes = [(lane % 4, lane // 4) for lane in range(32)]
    for number, step, second in itertools.product(range(TILE // (8 * v)), range(8), range(2)):
        warp = Warp(index, eights, v, number)
        assert worst_conflict([warp.weight_at(step, t, g, second) for t, g in lanes], v) == 1
        assert worst_conflict([warp.x_at(step, t, g, 0) for t, g in lanes], 8) == 1
    own = TILE // constants[1]
    for j, m in itertools.product(range(2), range(0, v // 2, 2)):
        sent = [index.sent_byte(own, 2 * t + j, index.column_of(v, 0, g) % own + 2 * m) for t, g in lanes]
        assert worst_conflict(sent, 16) == (1 if v == 4 else 2)
    for lines in range(0, 8 * eights, 4):
        read = [index.sent_byte(own, lines + lane // 8, lane % 8 * 4) for lane in range(32)]
        assert worst_conflict(read, 16) == 1


def test_weights_are_those_of_the_reference_for_any_zero_point():
    """(128 + q) - (128 + z) where 128 + z is a bf16, else q - z: then times the scale, each rounded once."""
    torch = pytest.importorskip("torch")
    q, scale = torch.arange(16, dtype=torch.bfloat16)[:, None], torch.rand(1, 500).bfloat16()
    base = torch.tensor(128, dtype=torch.bfloat16)
    for zero in (torch.randint(0, 16, (1, 500)).bfloat16(), torch.randn(1, 500).bfloat16()):
        exact = base + zero - base == zero
        ours = torch.where(exact, base + q - (base + zero), base + q - base - zero) * scale
        assert torch.equal(ours, (q - zero) * scale)
    assert not exact.all()


LANES = [(lane % 4, lane // 4) for lane in range(32)]  # t and g


def stage_of(one_row, v: int, packed: np.ndarray) -> np.ndarray:
    """16 rows of 8 v bytes as the copies of a warp put them into a stage."""
    memory, written = np.zeros(128 * v, np.uint8), np.zeros(128 * v, int)
    for lane, i in itertools.product(range(32), range(v // 4)):
        row, chunk = one_row.copied_row(v, lane, i), one_row.copied_chunk(v, lane)
        to = one_row.place(v, row, chunk)
        memory[to : to + 16], written[to : to + 16] = packed[row, 16 * chunk : 16 * chunk + 16], written[to] + 1
    assert (written == 1).all()
    return memory


def read_at(one_row, v: int, row: int, g: int) -> int:
    return one_row.place(v, row, g * v // 16) + g * v % 16


def bf16_bits(four: int, shift: int) -> tuple[int, int]:
    """LOP3: the bits of two bf16, 128 + q of the nibbles 0 and 4 after the shift, less 128."""
    both = four >> shift & 0x000F000F
    return both & 0x7F, both >> 16


def operand_of_x(one_row, x: np.ndarray, m: int) -> np.ndarray:
    """B, 16 x 8: PRMT of the two values of k of a row of packed, by the lane's bytes."""
    b = np.zeros((16, 8), np.int64)
    for (t, g), odd in itertools.product(LANES, range(2)):
        source = x[8 * t + 2 * m : 8 * t + 2 * m + 2].tobytes() + bytes(4)
        chosen = [one_row.chosen_bytes(odd, g) >> 4 * i & 7 for i in range(4)]
        k = 2 * t + 8 * odd
        b[k : k + 2, g] = np.frombuffer(bytes(source[place] for place in chosen), np.int16)
    return b


@pytest.mark.parametrize("v", [8, 16])
def test_the_pairs_of_one_row_are_columns_which_the_other_operand_keeps_apart(one_row, v):
    numbers = np.random.default_rng(v)
    packed, x = numbers.integers(0, 256, (16, 8 * v), np.uint8), numbers.integers(-99, 99, 32, np.int16)
    memory, y = stage_of(one_row, v, packed), np.zeros(8 * v, np.int64)
    for m, i in itertools.product(range(4), range(v // 4)):
        a = np.zeros((16, 16), np.int64)
        for t, g in LANES:
            four = word(memory, read_at(one_row, v, 4 * t + m, g), v // 4)[i]
            for half, odd, shift in ((0, 0, 0), (1, 0, 8), (0, 1, 4), (1, 1, 12)):
                k = 2 * t + 8 * odd
                a[g + 8 * half, k : k + 2] = bf16_bits(four, shift)
        d = a @ operand_of_x(one_row, x, m)
        for g, one in itertools.product(range(8), range(4)):
            y[g * v + 4 * i + one_row.column_of(one)] += d[g + 8 * (one // 2), one % 2]  # of the lane with t = 0
    weight = np.stack([packed & 15, packed >> 4], 1).reshape(32, -1).astype(np.int64)
    assert (y == x.astype(np.int64) @ weight).all()


@pytest.mark.parametrize("v", [8, 16])
def test_copies_and_reads_of_one_row_meet_no_bank_twice(one_row, v):
    for m in range(4):
        assert worst_conflict([read_at(one_row, v, 4 * t + m, g) for t, g in LANES], v) == 1
    for i in range(v // 4):
        copied = [(one_row.copied_row(v, lane, i), one_row.copied_chunk(v, lane)) for lane in range(32)]
        assert worst_conflict([one_row.place(v, *one) for one in copied], 16) == 1
