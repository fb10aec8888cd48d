"""The kernels of the 4-bit product without a GPU: which lane reads what, by a model of TMA's swizzles and the layouts
of ldmatrix, mma and wgmma.

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
from conftest import BUNDLE, compiled_for_hopper, early_arrivals

pytest.importorskip("triton")  # a candidate imports it
FILE = BUNDLE / "benchmarks" / "hard_deck" / "w4a16" / "candidates" / "ring.py"
LANES = [(lane % 4, lane // 4) for lane in range(32)]  # t and g


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
def some(tmp_path_factory):
    return index_of("some", tmp_path_factory.mktemp("some"))


@pytest.fixture(scope="module")
def one_row(tmp_path_factory):
    return index_of("one", tmp_path_factory.mktemp("one_row"))


EIGHTS = {"SIXTEEN": 2, "THIRTY": 4}  # of rows, at most, with these constants


def constant(name: str):
    """A constant of the candidate, which is not run."""
    (value,) = (
        node.value
        for node in ast.parse(FILE.read_text()).body
        if isinstance(node, ast.Assign) and node.targets[0].id == name
    )
    return ast.literal_eval(value)


def configurations() -> list[dict]:
    """Those of the candidate that change what 9 to 32 rows run; {} is the chosen one."""
    return [one for one in constant("SPACE") if not one or EIGHTS.keys() & one]


def shapes() -> list[tuple[int, tuple]]:
    """Rows in eights, and the constants of the candidate's shapes for so many rows, of all its configurations."""
    chosen = {name: constant(name) for name in EIGHTS}
    return list(
        dict.fromkeys((eights, (chosen | one)[name]) for one in configurations() for name, eights in EIGHTS.items())
    )


def by_tma(rows: np.ndarray) -> np.ndarray:
    """A box as TMA writes it: bits 4 to 6 of an address XOR its bits 7 to 9; 4 and 5 XOR 7 and 8 if rows have 64."""
    address = np.arange(rows.size)
    memory = np.empty(rows.size, np.uint8)
    memory[address ^ (address >> 7 & (7 if rows.shape[1] == 128 else 3)) << 4] = rows.reshape(-1)
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


class Block:
    """A block of 9 to 32 rows in one group of 128 of k: what its lanes read, and its sums."""

    def __init__(self, some, eights, tiles, warpgroups):
        self.some, self.eights, self.tiles, self.warps = some, eights, tiles, 4 * warpgroups
        self.columns = 64 * tiles * warpgroups
        self.width = 64 if self.columns % 128 else 128  # of a box

    def first(self, warp, m):
        return self.some.first_column(self.tiles, warp, m)

    def boxes(self, packed):
        return np.concatenate([by_tma(packed[:, at : at + self.width]) for at in range(0, self.columns, self.width)])

    def panels(self, x):
        """x, 64 of k after another."""
        return [by_tma(np.ascontiguousarray(x[:, 64 * i : 64 * i + 64]).view(np.uint8)) for i in range(2)]

    def row_at(self, warp, m, half, lane):
        """The 16 bytes whose address a lane gives to ldmatrix, from the start of the weights."""
        box, inside = divmod(self.first(warp, m), self.width)
        row = half * 32 + lane // 8 * 8 + self.some.packed_row(lane)
        return box * 64 * self.width + self.some.packed_byte(self.width, row, inside // 16)

    def words(self, weights, warp, m, half) -> np.ndarray:
        """ldmatrix.x4.trans: of each lane four words, which are two neighbouring rows of a column of 16-bit values."""
        at = [self.row_at(warp, m, half, lane) for lane in range(32)]
        four = np.stack([weights[one : one + 16] for one in at]).view(np.uint16).reshape(4, 8, 8).astype(np.int64)
        return np.array([[one[2 * t, g] | one[2 * t + 1, g] << 16 for one in four] for t, g in LANES])

    def a(self, word_of) -> np.ndarray:
        """A of one warp, 16 x 16, in PTX's layout of wgmma. Rows g and g + 8 are the columns 2 g and 2 g + 1 of W."""
        a = np.zeros((16, 16), np.int64)
        for lane, (t, g) in enumerate(LANES):
            for j, (row, k) in enumerate(((g, 2 * t), (g + 8, 2 * t), (g, 2 * t + 8), (g + 8, 2 * t + 8))):
                a[row, k : k + 2] = pair(int(word_of[lane]), j)
        return a

    def b(self, panels, step) -> np.ndarray:
        """B of wgmma, 16 of k by all rows of x: the hardware undoes the swizzle."""
        row, k = np.arange(8 * self.eights), np.arange(32)
        address = row * 128 + (step % 4 * 32 + k)[:, None]
        bits = np.ascontiguousarray(panels[step // 4][address ^ (address >> 7 & 7) << 4].T)
        return bits.view(np.int16).astype(np.int64).T

    def sums(self, packed, x):
        """Of each warp and tile 16 rows, which are columns, by the rows of x: as `d` of wgmma."""
        weights, b = self.boxes(packed), [self.b(self.panels(x), step) for step in range(8)]
        for warp, m in itertools.product(range(self.warps), range(self.tiles)):
            words = [self.words(weights, warp, m, half) for half in range(2)]
            yield self.first(warp, m), sum(self.a(words[step // 4][:, step % 4]) @ b[step] for step in range(8))


class Sent:
    """The sums as the blocks of a cluster send them to all of it, each of which has its own columns."""

    def __init__(self, some, eights, split, columns):
        self.some, self.rows, self.split, self.columns, self.own = some, 8 * eights, split, columns, columns // split
        self.memory = np.zeros((split, some.sum_at(self.own, split * self.rows, 0)), np.int64)
        self.written = np.zeros_like(self.memory)

    def put(self, part, row, column, two):
        at = self.some.sum_at(self.own, part * self.rows + row, column % self.own)
        assert at % 2 == 0, "8 bytes at a time"
        self.memory[column // self.own, at : at + 2] = two
        self.written[column // self.own, at : at + 2] += 1

    def send(self, part, first, d):
        """Those of one tile of a warp."""
        for (t, g), n, j in itertools.product(LANES, range(self.rows // 8), range(2)):
            row = 8 * n + 2 * t + j
            self.put(part, row, first + 2 * g, d[[g, g + 8], row])

    def added_up(self):
        y = np.zeros((self.rows, self.columns), np.int64)
        for part, row, column in itertools.product(range(self.split), range(self.rows), range(self.columns)):
            at = self.some.sum_at(self.own, part * self.rows + row, column % self.own)
            assert self.written[column // self.own, at] == 1
            y[row, column] += self.memory[column // self.own, at]
        return y


@pytest.mark.parametrize(("eights", "constants"), shapes(), ids=str)
def test_the_lanes_of_9_to_32_rows_multiply_what_belongs_together(some, eights, constants):
    numbers = np.random.default_rng(7)
    tiles, warpgroups, split = constants[:3]
    block = Block(some, eights, tiles, warpgroups)
    packed = numbers.integers(0, 256, (64, block.columns), np.uint8)
    x = numbers.integers(-99, 99, (8 * eights, 128), np.int16)
    weight = np.stack([packed & 15, packed >> 4], 1).reshape(128, -1).astype(np.int64)
    sums = list(block.sums(packed, x))
    for parts in {split, 2, 4}:
        sent = Sent(some, eights, parts, block.columns)
        for part, (first, d) in itertools.product(range(parts), sums):
            sent.send(part, first, d * (part + 1))  # so that a part which takes another's place is seen
        assert (sent.added_up() == x.astype(np.int64) @ weight * (parts * (parts + 1) // 2)).all()


@pytest.mark.parametrize("eights", [2, 4])
def test_the_totals_of_9_to_32_rows_are_sums_over_all_of_x(some, eights):
    x = np.random.default_rng(7).integers(-99, 99, (8 * eights, 128), np.int16)
    panels, totals = Block(some, eights, 1, 1).panels(x), np.zeros(8 * eights, np.int64)
    for i, n, (t, g) in itertools.product(range(4), range(eights), LANES):
        at = some.x_byte(8 * n + g, some.x_chunk(i, g, t))
        totals[8 * n + g] += panels[i // 2][at : at + 16].view(np.int16).sum(dtype=np.int64)  # of column g of B
    assert (totals == x.sum(1, dtype=np.int64)).all()


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
def test_reads_and_sums_of_9_to_32_rows_meet_no_bank_twice(some, eights, constants):
    tiles, warpgroups, split = constants[:3]
    block = Block(some, eights, tiles, warpgroups)
    for warp, m, half in itertools.product(range(block.warps), range(tiles), range(2)):
        assert worst_conflict([block.row_at(warp, m, half, lane) for lane in range(32)], 16) == 1
    for i, n in itertools.product(range(4), range(eights)):
        assert worst_conflict([some.x_byte(8 * n + g, some.x_chunk(i, g, t)) for t, g in LANES], 16) == 1
    own = block.columns // split
    for warp, m, j in itertools.product(range(block.warps), range(tiles), range(2)):
        column = block.first(warp, m) % own
        assert worst_conflict([4 * some.sum_at(own, 2 * t + j, column + 2 * g) for t, g in LANES], 8) == 1
    for first in range(0, 2 * eights * own, 32):  # four columns a lane
        read = [divmod(first + lane, own // 4) for lane in range(32)]
        assert worst_conflict([4 * some.sum_at(own, row, 4 * column) for row, column in read], 16) == 1


@pytest.mark.parametrize(("eights", "constants"), shapes(), ids=str)
def test_the_stages_of_9_to_32_rows_fit_in_shared_memory(some, eights, constants):
    """The static_asserts of the kernel; and 132 SMs hold all blocks of the deck's shapes at once."""
    tiles, warpgroups, split, stages, blocks = constants
    columns, rows = 64 * tiles * warpgroups, 8 * eights
    assert split > 1 and columns // split % 16 == 0 and rows * 256 % 1024 == 0
    stage = 2 * rows * 128 + columns * 64 + 2 * columns * 2 + rows * 4 + 3 * 8
    assert (
        stages * stage + 4 * some.sum_at(columns // split, split * rows, 0) + 8 + 1024
        <= (233472 // blocks - 1024) // 128 * 128
    )
    assert -(-(14336 if eights == 2 else 12288) // columns) * split <= 132 * blocks


def truncated(total, products):
    """total + the sum of products, all cut to 24 bits of the largest, as tensor cores may."""
    parts = np.concatenate([total[None], products])
    unit = np.ldexp(1.0, np.frexp(np.abs(parts).max(0))[1] - 24)
    return np.float32((np.trunc(parts / unit) * unit).sum(0)).astype(np.float64)


def rounded(numbers):
    """To bf16."""
    bits = np.asarray(numbers, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(np.float64)


@pytest.mark.parametrize("mean", [0, 1, 100])
def test_sums_of_9_to_32_rows_are_exact_for_any_zero_point(mean):
    """Weights are 128 + q, and scales and zero points are applied to the sums of a group: no weight is rounded."""
    numbers, depth, columns = np.random.default_rng(mean), 1024, 200
    x, q = rounded(numbers.standard_normal(depth) + mean), numbers.integers(0, 16, (depth, columns)).astype(np.float64)
    scale = rounded(0.005 + 0.01 * numbers.random((depth // 128, columns)))
    zero = rounded(numbers.uniform(0, 15, scale.shape))
    exact = x @ ((q - zero.repeat(128, 0)) * scale.repeat(128, 0))
    y = np.zeros(columns)
    for group in range(depth // 128):
        sums, total = np.zeros(columns), np.zeros(1)
        for k in range(128 * group, 128 * group + 128, 16):
            sums = truncated(sums, x[k : k + 16, None] * (128 + q[k : k + 16]))
            total = truncated(total, x[k : k + 16, None])
        y = np.float32(y + scale[group] * np.float32(sums - (128 + zero[group]) * total)).astype(np.float64)
    assert (np.abs(y - exact) / (np.abs(exact) + np.sqrt((exact**2).mean()))).max() < 1e-5


def test_weights_of_more_rows_are_those_of_the_reference_for_any_zero_point():
    """(128 + q) - 128 - z, then times the scale, each rounded once."""
    torch = pytest.importorskip("torch")
    q, scale = torch.arange(16, dtype=torch.bfloat16)[:, None], torch.rand(1, 500).bfloat16()
    base = torch.tensor(128, dtype=torch.bfloat16)
    for zero in (torch.randint(0, 16, (1, 500)).bfloat16(), torch.randn(1, 500).bfloat16()):
        assert torch.equal((base + q - base - zero) * scale, (q - zero) * scale)


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


def test_an_empty_product_is_zero_and_tensors_of_the_cpu_are_refused():
    torch = pytest.importorskip("torch")
    product = runpy.run_path(str(FILE))["kernel_function"]

    def inputs(rows, depth, columns):
        scales = torch.ones(depth // 128, columns, dtype=torch.bfloat16)
        packed = torch.zeros(depth // 2, columns, dtype=torch.uint8)
        return torch.ones(rows, depth, dtype=torch.bfloat16), packed, scales, scales

    for rows, depth, columns in ((1, 0, 64), (12, 0, 64), (40, 0, 64), (3, 256, 0), (0, 256, 64)):
        y = product(*inputs(rows, depth, columns))
        assert y.shape == (rows, columns) and not y.any()
    for rows in (1, 8, 16, 32):
        with pytest.raises(ValueError, match="on a GPU"):
            product(*inputs(rows, 256, 64))


@pytest.mark.parametrize("constants", configurations(), ids=str)
def test_a_stage_is_freed_only_behind_what_was_loaded_from_it(tmp_path, compile_here, constants):
    """With 9 to 32 rows ptxas let the arrival pass the loads of scales, zero points and totals."""
    candidate, code = tmp_path / "candidates" / FILE.name, tmp_path / "code"
    candidate.parent.mkdir()
    candidate.write_text(FILE.read_text() + "".join(f"\n{name} = {value}" for name, value in constants.items()))
    shutil.copy(FILE.parents[1] / "reference.py", tmp_path)
    kernels = compiled_for_hopper(compile_here, candidate, "--emit", code)
    assert sorted(kernel["name"] for kernel in kernels) == [*["product"] * 5, "product_kernel"]
    for kernel in kernels:
        assert not kernel["stack_bytes"] and "wgmma_serialized" not in kernel["remarks"], kernel
    assert early_arrivals(code / "sm_90a" / "product_kernel.cubin") == []  # of all kernels
