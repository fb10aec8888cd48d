"""silu(x gate[e]) * (x up[e]) for rows in the order of their experts, in Gluon: warps with roles.

A producer warp asks TMA for tiles of x, gate and up, STAGES ahead and across tiles; two warpgroups multiply 64 rows
each by 128 columns of gate and of up, and write SwiGLU of the two sums. Programs are persistent. Each role finds the
expert of a tile from the offsets; the warpgroups look for their next one while the last products run. FLAT column
tiles of an expert are walked together. Shapes and addresses that TMA does not take go by pointers. After the first call of
a shape the compiled kernel is launched with addresses and kept tensor maps, which saves host time; that did not run on a
GPU.
"""

import copy
import functools
import inspect

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

STAGES = 4
FLAT = 1
WIDE = 1  # stores of 16 bytes a thread, by way of shared memory
ROWS, COLUMNS, DEPTH = tl.constexpr(128), tl.constexpr(128), tl.constexpr(64)
# Its name changed after Triton 3.6.
fetch = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@triton.jit
def expert_of_tile(offsets, tile, experts, ROWS: tl.constexpr):
    """(expert, first row, end of the expert's rows) of a tile of rows; expert -1: there is no such tile"""
    expert, first, last, start = -1, 0, 0, 0
    for one in range(experts):
        end = tl.load(offsets + one + 1)
        tiles = (end - start + ROWS - 1) // ROWS
        mine = (tile >= 0) & (tile < tiles)
        expert = tl.where(mine, one, expert)
        first = tl.where(mine, start + tile * ROWS, first)
        last = tl.where(mine, end, last)
        tile -= tiles
        start = end
    return expert, first, last


@triton.jit
def up_projection_by_pointers(
    x, gate, up, y, offsets, experts, hidden, inner, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):
    expert, first, last = expert_of_tile(offsets, tl.program_id(0), experts, ROWS)
    if expert >= 0:
        row = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        k = tl.arange(0, DEPTH)
        weights = expert.to(tl.int64) * hidden * inner + column
        a, b = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
        for step in range(0, hidden, DEPTH):
            depth = step + k
            rows = tl.load(x + row * hidden + depth[None, :], (row < last) & (depth < hidden)[None, :], 0.0)
            inside = (depth < hidden)[:, None] & (column < inner)
            a = tl.dot(rows, tl.load(gate + weights + depth[:, None] * inner, inside, 0.0), a)
            b = tl.dot(rows, tl.load(up + weights + depth[:, None] * inner, inside, 0.0), b)
        result = a * tl.sigmoid(a) * b
        tl.store(y + row * inner + column, result.to(y.dtype.element_ty), (row < last) & (column < inner))


@gluon.jit
def tile_at(tile, offsets, tiles_n, expert, before, FLAT: gl.constexpr):
    """(expert, tiles before it, first row of the tile, end of the expert's rows, column tile). A program's tiles go up, so the
    search goes on from the expert of its last tile. FLAT column tiles of an expert are walked together, row by row:
    these share rows, and all row tiles share weights in the L2."""
    start = gl.load(offsets + expert)
    end = gl.load(offsets + expert + 1)
    rows = (end - start + ROWS - 1) // ROWS
    while tile >= before + rows * tiles_n:
        before += rows * tiles_n
        expert += 1
        start = end
        end = gl.load(offsets + expert + 1)
        rows = (end - start + ROWS - 1) // ROWS
    own = tile - before
    group = own // (FLAT * rows)
    width = gl.minimum(tiles_n - group * FLAT, FLAT)
    inside = own - group * FLAT * rows
    return expert, before, start + inside // width * ROWS, end, group * FLAT + inside % width


@gluon.jit
def number_of_tiles(offsets, experts, tiles_n, EXPERTS: gl.constexpr):
    number = gl.arange(0, EXPERTS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    start = gl.load(offsets + number, number < experts, 0)
    end = gl.load(offsets + number + 1, number < experts, 0)
    return gl.sum((end - start + ROWS - 1) // ROWS, 0) * tiles_n


@gluon.jit
def produce(
    x,
    gate,
    up,
    offsets,
    hidden,
    inner,
    experts,
    tiles,
    xs,
    gs,
    us,
    full,
    empty,
    STAGES: gl.constexpr,
    FLAT: gl.constexpr,
):
    number, expert, before = 0, 0, 0
    tiles_n = gl.cdiv(inner, COLUMNS)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        expert, before, first, _, tile_n = tile_at(tile, offsets, tiles_n, expert, before, FLAT)
        for step in range(0, hidden, DEPTH):
            stage = number % STAGES
            mbarrier.wait(empty.index(stage), ((number // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), (ROWS + 2 * COLUMNS) * DEPTH * 2)
            fetch(x, [first, step], full.index(stage), xs.index(2 * stage))
            fetch(x, [first + 64, step], full.index(stage), xs.index(2 * stage + 1))
            fetch(gate, [expert * hidden + step, tile_n * COLUMNS], full.index(stage), gs.index(stage))
            fetch(up, [expert * hidden + step, tile_n * COLUMNS], full.index(stage), us.index(stage))
            number += 1


@gluon.jit
def swiglu(a, b):
    half = 0.5 * a
    t = gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [half], dtype=gl.float32, is_pure=True, pack=1)
    return (half + half * t) * b


@gluon.jit
def write(y, first, last, column, inner, value, layout: gl.constexpr):
    row = first + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))[:, None]
    at = column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))[None, :]
    gl.store(y + row.to(gl.int64) * inner + at, value, (row < last) & (at < inner))


@gluon.jit
def consume(
    C: gl.constexpr,
    y,
    offsets,
    hidden,
    inner,
    experts,
    tiles,
    xs,
    gs,
    us,
    full,
    empty,
    STAGES: gl.constexpr,
    FLAT: gl.constexpr,
    WIDE: gl.constexpr,
):
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    number, expert, before = 0, 0, 0
    tiles_n = gl.cdiv(inner, COLUMNS)
    tile = gl.minimum(gl.program_id(0), tiles - 1)
    expert, before, first, last, tile_n = tile_at(tile, offsets, tiles_n, expert, before, FLAT)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        a = gl.zeros([64, COLUMNS], gl.float32, layout=layout)
        b = gl.zeros([64, COLUMNS], gl.float32, layout=layout)
        for step in range(0, hidden, DEPTH):
            stage = number % STAGES
            mbarrier.wait(full.index(stage), (number // STAGES) & 1)
            # two products stay in flight while the stage before theirs goes back to the producer
            a = warpgroup_mma(xs.index(2 * stage + C), gs.index(stage), a, is_async=True)
            b = warpgroup_mma(xs.index(2 * stage + C), us.index(stage), b, is_async=True)
            a, b = warpgroup_mma_wait(num_outstanding=2, deps=(a, b))
            if step > 0:
                mbarrier.arrive(empty.index((number + STAGES - 1) % STAGES), count=1)
            number += 1
        own, end, column = first + 64 * C, last, tile_n * COLUMNS
        following = gl.minimum(tile + gl.num_programs(0), tiles - 1)  # looked for while the last products run
        expert, before, first, last, tile_n = tile_at(following, offsets, tiles_n, expert, before, FLAT)
        a, b = warpgroup_mma_wait(num_outstanding=0, deps=(a, b))
        mbarrier.arrive(empty.index((number + STAGES - 1) % STAGES), count=1)
        value = swiglu(a, b).to(y.dtype.element_ty)
        if WIDE:
            lines: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
            write(y, own, end, column, inner, gl.convert_layout(value, lines), lines)
        else:
            write(y, own, end, column, inner, value, layout)


@gluon.jit
def consume0(
    y,
    offsets,
    hidden,
    inner,
    experts,
    tiles,
    xs,
    gs,
    us,
    full,
    empty,
    STAGES: gl.constexpr,
    FLAT: gl.constexpr,
    WIDE: gl.constexpr,
):
    consume(0, y, offsets, hidden, inner, experts, tiles, xs, gs, us, full, empty, STAGES, FLAT, WIDE)


@gluon.jit
def consume1(
    y,
    offsets,
    hidden,
    inner,
    experts,
    tiles,
    xs,
    gs,
    us,
    full,
    empty,
    STAGES: gl.constexpr,
    FLAT: gl.constexpr,
    WIDE: gl.constexpr,
):
    consume(1, y, offsets, hidden, inner, experts, tiles, xs, gs, us, full, empty, STAGES, FLAT, WIDE)


@gluon.jit
def up_projection(
    x,
    gate,
    up,
    y,
    offsets,
    hidden,
    inner,
    experts,
    EXPERTS: gl.constexpr,
    STAGES: gl.constexpr,
    FLAT: gl.constexpr,
    WIDE: gl.constexpr,
):
    xs = gl.allocate_shared_memory(x.dtype, [2 * STAGES, 64, DEPTH], x.layout)
    gs = gl.allocate_shared_memory(x.dtype, [STAGES, DEPTH, COLUMNS], gate.layout)
    us = gl.allocate_shared_memory(x.dtype, [STAGES, DEPTH, COLUMNS], up.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    tiles = number_of_tiles(offsets, experts, gl.cdiv(inner, COLUMNS), EXPERTS)
    gl.warp_specialize(
        [
            (consume0, (y, offsets, hidden, inner, experts, tiles, xs, gs, us, full, empty, STAGES, FLAT, WIDE)),
            (consume1, (y, offsets, hidden, inner, experts, tiles, xs, gs, us, full, empty, STAGES, FLAT, WIDE)),
            (produce, (x, gate, up, offsets, hidden, inner, experts, tiles, xs, gs, us, full, empty, STAGES, FLAT)),
        ],
        [4, 1],
        [232, 40],
    )


class Launches:
    """Launches of one kernel. The first of a key goes through Triton, later ones straight to its compiled code. Triton
    compiles for numbers that are 1 or multiples of 16, and for pointers to multiples of 16: those are looked at here. The
    key must hold the type and the device of every tensor, since nobody looks at an address again, and `rest` the sizes of
    what is described. The CPU interpreter compiles nothing, and always goes through Triton."""

    def __init__(self, kernel):
        self.kernel, self.ready, self.compiles = kernel, {}, isinstance(kernel, triton.JITFunction)

    def __call__(self, key, grid, tiles, pointers, rest, **options):
        """tiles: what describes the kernel's first parameters, (tensor, block); pointers: tensors, the next ones; rest: numbers
        and constants."""
        if not self.compiles:
            return self.bound(grid, tiles, pointers, rest, options)
        addresses = [tensor.data_ptr() for tensor in pointers]
        device = driver.active.get_current_device()  # a compiled kernel is loaded on one
        key = device, key, rest, *[address % 16 for address in addresses], *options.values()
        ready = self.ready.get(key)
        if ready and not hooked():
            return ready(grid, driver.active.get_current_stream(device), tiles, addresses, rest)
        compiled = self.bound(grid, tiles, pointers, rest, options)
        if key not in self.ready:
            self.ready[key] = Ready.of(compiled, tiles)

    def bound(self, grid, tiles, pointers, rest, options):
        """A launch through Triton's binder."""
        described = [TensorDescriptor.from_tensor(*tile) for tile in tiles]
        return self.kernel[grid](*described, *pointers, *rest, **options)


class Ready:
    """A compiled kernel that takes addresses. Tensor maps are kept by address: a map says where a tensor lies and how it is
    cut, and nothing of its contents."""

    MOST_MAPS = 64  # of a parameter

    def __init__(self, compiled, tiles):
        self.run, self.function, self.metadata = compiled.run, compiled.function, compiled.packed_metadata
        self.maps, self.cuts = [{} for _ in tiles], compiled.metadata.tensordesc_meta if tiles else ()
        if tiles:
            from triton.backends.nvidia.driver import make_tensordesc_arg

            self.made = make_tensordesc_arg
            self.more = (None,) * (len(inspect.signature(self.made).parameters) - 2)  # Triton 3.9 takes a third
            self.run = copy.copy(compiled.run)
            around = compiled.run.launch  # makes maps of descriptors, then calls what launches
            cells = zip(around.__code__.co_freevars, around.__closure__, strict=True)
            self.run.launch = {name: cell.cell_contents for name, cell in cells}["launcher"]
            if len(self.cuts) != len(tiles) or not all(self.cuts):
                raise LookupError("a descriptor without a tensor map")
        if self.function is None:
            raise LookupError("a kernel that was compiled and not launched")

    @classmethod
    def of(cls, compiled, tiles):
        """None where this Triton keeps its launcher otherwise: then all launches go through Triton."""
        try:
            return cls(compiled, tiles)
        except (AttributeError, ImportError, LookupError, TypeError, ValueError):
            return None

    def __call__(self, grid, stream, tiles, addresses, rest):
        arguments = []
        for maps, cut, tile in zip(self.maps, self.cuts, tiles, strict=True):
            address = tile[0].data_ptr()
            made = maps.get(address)
            if made is None:
                if len(maps) >= self.MOST_MAPS:
                    maps.clear()
                made = maps[address] = self.made(TensorDescriptor.from_tensor(*tile), cut, *self.more)
            arguments += made
        self.run(*grid, stream, self.function, self.metadata, None, None, None, *arguments, *addresses, *rest)


def hooked():
    """Whether somebody, such as a profiler, wants to hear of launches; a chain of hooks in Triton 3.6, else one or None."""
    hook = knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook))


of_pointers, of_roles = Launches(up_projection_by_pointers), Launches(up_projection)


@functools.cache
def multiprocessors(device):
    return torch.cuda.get_device_properties(device).multi_processor_count


def by_pointers(x, gate, up, y, offsets, key):
    """For shapes that TMA does not take, and few columns."""
    (visits, hidden), (experts, _, inner) = x.shape, gate.shape
    grid = -(-visits // 32) + experts, -(-inner // 64), 1
    of_pointers(key, grid, (), (x, gate, up, y, offsets), (experts, hidden, inner, 32, 64, 32))


def by_roles(x, gate, up, y, offsets, key):
    (visits, hidden), (experts, _, inner) = x.shape, gate.shape
    swizzled = layout()
    tiles = [(x, [64, 64], swizzled)]
    tiles += [(one.view(experts * hidden, inner), [64, 128], swizzled) for one in (gate, up)]
    rest = hidden, inner, experts, 1 << (experts - 1).bit_length(), STAGES, FLAT, WIDE
    of_roles((*key, visits), (multiprocessors(x.device), 1, 1), tiles, (y, offsets), rest, num_warps=4)


@functools.cache
def layout():
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def up_projection_of(x, gate, up, offsets, device):
    key = device, gate.get_device(), up.get_device(), offsets.get_device(), x.dtype, gate.dtype, up.dtype, offsets.dtype
    x, gate, up, offsets = x.contiguous(), gate.contiguous(), up.contiguous(), offsets.contiguous()
    y = x.new_empty((x.shape[0], gate.shape[2]))
    by_lines = (x.data_ptr() | gate.data_ptr() | up.data_ptr()) % 16 == 0 and x.element_size() == 2
    if y.numel():
        by_tma = by_lines and x.shape[1] % 64 == 0 and y.shape[1] % 8 == 0
        (by_roles if by_tma else by_pointers)(x, gate, up, y, offsets, key)
    return y


def kernel_function(x, gate, up, offsets):
    device = x.get_device()
    if x.is_cuda and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return up_projection_of(x, gate, up, offsets, device)
    return up_projection_of(x, gate, up, offsets, device)
