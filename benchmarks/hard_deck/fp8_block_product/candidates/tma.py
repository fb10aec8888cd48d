"""fp8 product with block scales in Triton: TMA descriptors, sums of 128 of k scaled into fp32, a persistent grid.

A step is one block of scales: a product of 128 of k into fresh sums, then one fused multiply-add for an element. TALL walks
two tiles of rows with one tile of w, so that a step of 256 x 128 needs the registers of 128 x 128 sums in flight only.
AHEAD loads the scales of the next step before this step's product. Up to 64 rows of x take the transposed product with
deep stages; rows of unaligned length are copied to rows of whole 16 bytes first. After the first call of a shape the
compiled kernel is launched with addresses and kept tensor maps, which saves host time; that form did not run on a GPU.
"""

import copy
import functools
import inspect

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

SPACE = [
    {"TALL": 1, "PERSISTENT": 1, "FLATTEN": 0, "AHEAD": 1, "STAGES": 3},
    {"TALL": 1, "PERSISTENT": 1, "FLATTEN": 1, "AHEAD": 0, "STAGES": 3},
    {"TALL": 1, "PERSISTENT": 0, "FLATTEN": 0, "AHEAD": 1, "STAGES": 4},
    {"TALL": 0, "PERSISTENT": 1, "FLATTEN": 0, "AHEAD": 1, "STAGES": 4},
    {"TALL": 0, "PERSISTENT": 1, "FLATTEN": 1, "AHEAD": 0, "STAGES": 4},
    {"TALL": 0, "PERSISTENT": 0, "FLATTEN": 0, "AHEAD": 1, "STAGES": 5},
    {"TALL": 0, "PERSISTENT": 0, "FLATTEN": 0, "AHEAD": 1, "STAGES": 3, "BM": 64, "WARPS": 4},
    {"TALL": 1, "PERSISTENT": 1, "FLATTEN": 0, "AHEAD": 1, "STAGES": 3, "GROUP": 16},
]
BLOCK = 128  # of k, and of columns, with one scale
BM = 128
TALL = 1
GROUP = 4  # rows of tiles that are walked together
WARPS = 8
STAGES = 3
PERSISTENT = 1
FLATTEN = 0
AHEAD = 1
FEW_BN = 64
FEW_STAGES = 8


@triton.jit
def word_at(words, total, edge, last, index):
    """The 4-byte words of a tensor of `total` bytes; `edge` is the number of its last, partial word, `last` that word."""
    return tl.where(index == edge, last, tl.load(words + index, mask=index < edge, other=0))


@triton.jit
def realign(x, y, rows, K, WORDS: tl.constexpr):
    """Rows of K bytes to rows of the next multiple of 16; what is new is 0. y is made of words."""
    row = tl.program_id(0).to(tl.int64)
    pitch = (K + 15) // 16 * 4
    total = tl.cast(rows, tl.int64) * K  # 1 is a constant, which has no .to
    edge = total // 4
    words = x.to(tl.pointer_type(tl.int32), bitcast=True)
    tail = tl.arange(0, 4)
    left = tl.load(
        x.to(tl.pointer_type(tl.uint8), bitcast=True) + edge * 4 + tail, mask=edge * 4 + tail < total, other=0
    )
    last = tl.sum(left.to(tl.int32) << (8 * tail), 0)
    for start in range(0, pitch, WORDS):
        at = start + tl.arange(0, WORDS)
        byte = row * K + 4 * at
        index = byte // 4
        shift = ((byte % 4) * 8).to(tl.int32)
        low = word_at(words, total, edge, last, index).to(tl.uint32, bitcast=True)
        high = word_at(words, total, edge, last, index + 1).to(tl.uint32, bitcast=True)
        word = ((high.to(tl.uint64) << 32) | low.to(tl.uint64)) >> shift
        left_over = K - 4 * at  # bytes of the row from here on
        keep = tl.where(left_over >= 4, -1, (1 << (8 * tl.maximum(left_over, 0))) - 1)
        tl.store(y + row * pitch + at, word.to(tl.int32) & keep, mask=at < pitch)


@triton.jit
def scales_of(scale_x, of_w, m, M, blocks, step):
    """One factor a row: its scale of x times the scale of the block of w. Beyond the last step: of the last one."""
    step = tl.minimum(step, blocks - 1)
    return tl.load(scale_x + m * blocks + step, mask=m < M, other=0.0) * tl.load(of_w + step)


@triton.jit
def store_tile(acc, y_tiles, y, om, on, m, M, N, BY_TMA: tl.constexpr, BLOCK: tl.constexpr):
    acc = acc.to(tl.bfloat16)
    if BY_TMA:
        y_tiles.store([om, on], acc)
    else:
        n = on + tl.arange(0, BLOCK)
        tl.store(y + m[:, None].to(tl.int64) * N + n[None, :], acc, mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def product(
    x_tiles, w_tiles, y_tiles, y, scale_x, scale_w, M, N, blocks,
    BM: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, TALL: tl.constexpr, BY_TMA: tl.constexpr,
    FLATTEN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    HEIGHT: tl.constexpr = 2 * BM if TALL else BM
    tiles_m, tiles_n = tl.cdiv(M, HEIGHT), tl.cdiv(N, BLOCK)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        first = tile // (GROUP * tiles_n) * GROUP
        rows = tl.minimum(tiles_m - first, GROUP)
        within = tile % (GROUP * tiles_n)
        om, column = (first + within % rows) * HEIGHT, within // rows
        on = column * BLOCK
        m = om + tl.arange(0, BM)
        of_w = scale_w + column * blocks
        upper, lower = tl.zeros((BM, BLOCK), tl.float32), tl.zeros((BM, BLOCK), tl.float32)
        of_upper = scales_of(scale_x, of_w, m, M, blocks, 0)
        of_lower = scales_of(scale_x, of_w, m + BM, M, blocks, 0) if TALL else of_upper
        for step in range(blocks):
            if not AHEAD:
                of_upper = scales_of(scale_x, of_w, m, M, blocks, step)
                of_lower = scales_of(scale_x, of_w, m + BM, M, blocks, step) if TALL else of_upper
            w = w_tiles.load([on, step * BLOCK]).T
            now_upper, now_lower = of_upper, of_lower
            if AHEAD:
                of_upper = scales_of(scale_x, of_w, m, M, blocks, step + 1)
                of_lower = scales_of(scale_x, of_w, m + BM, M, blocks, step + 1) if TALL else of_upper
            upper += tl.dot(x_tiles.load([om, step * BLOCK]), w) * now_upper[:, None]
            if TALL:
                lower += tl.dot(x_tiles.load([om + BM, step * BLOCK]), w) * now_lower[:, None]
        store_tile(upper, y_tiles, y, om, on, m, M, N, BY_TMA, BLOCK)
        if TALL:
            store_tile(lower, y_tiles, y, om + BM, on, m + BM, M, N, BY_TMA, BLOCK)


@triton.jit
def few(
    x_tiles, w_tiles, y, scale_x, scale_w, M, N, blocks,
    BM: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y^T = w x^T: the rows of w take the 64 rows of wgmma."""
    on = tl.program_id(0) * BN
    m = tl.arange(0, BM)
    of_w = scale_w + on // BLOCK * blocks
    acc = tl.zeros((BN, BM), tl.float32)
    scale = scales_of(scale_x, of_w, m, M, blocks, 0)
    for step in tl.range(blocks, num_stages=STAGES):
        now = scale
        scale = scales_of(scale_x, of_w, m, M, blocks, step + 1)
        acc += tl.dot(w_tiles.load([on, step * BLOCK]), x_tiles.load([0, step * BLOCK]).T) * now[None, :]
    n = on + tl.arange(0, BN)
    at = m[None, :] * N + n[:, None]
    tl.store(y + at, acc.to(y.dtype.element_ty), mask=(n[:, None] < N) & (m[None, :] < M))


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


of_many, of_few, of_copies = Launches(product), Launches(few), Launches(realign)


@functools.cache
def multiprocessors(device):
    """In the CPU interpreter: a number that leaves several tiles to a program."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def many_rows(x, weight, y, scale_x, scale_w, key):
    (M, N), blocks = y.shape, scale_x.shape[1]
    by_tma = N % 8 == 0
    blocks_of_grid = -(-M // (2 * BM if TALL else BM)) * -(-N // BLOCK)
    if PERSISTENT:
        blocks_of_grid = min(blocks_of_grid, multiprocessors(x.device))
    tiles = [(x, [BM, BLOCK]), (weight, [BLOCK, BLOCK])]
    # Where TMA cannot address y, the third descriptor is one of x that nothing reads.
    tiles.append((y, [BM, BLOCK]) if by_tma else tiles[0])
    rest = M, N, blocks, BM, BLOCK, GROUP, TALL, by_tma, bool(FLATTEN), AHEAD
    of_many(key, (blocks_of_grid, 1, 1), tiles, (y, scale_x, scale_w), rest, num_warps=WARPS, num_stages=STAGES)


def few_rows(x, weight, y, scale_x, scale_w, key):
    (M, N), blocks = y.shape, scale_x.shape[1]
    rows = max(16, 1 << (M - 1).bit_length())
    tiles = [(x, [rows, BLOCK]), (weight, [FEW_BN, BLOCK])]
    rest = M, N, blocks, rows, FEW_BN, BLOCK, FEW_STAGES
    of_few(key, (-(-N // FEW_BN), 1, 1), tiles, (y, scale_x, scale_w), rest, num_warps=4)


def realigned(x):
    """x, or a copy of it whose rows begin at multiples of 16 bytes: what TMA can address."""
    rows, K = x.shape
    if x.stride() != (K, 1):
        x = x.contiguous().view(-1).view(rows, K)
    if K % 16 == 0 and x.data_ptr() % 16 == 0:
        return x
    if x.data_ptr() % 4:
        x = x.clone()
    y = x.new_empty((rows, -(-K // 16) * 16))
    of_copies((x.get_device(), x.dtype), (rows, 1, 1), (), (x, y.view(torch.int32)), (rows, K, 1024), num_warps=8)
    return y


def product_of(x, weight, scale_x, scale_w, device):
    (M, K), N = x.shape, weight.shape[0]
    blocks = -(-K // BLOCK)
    if weight.shape[1] != K or scale_x.shape != (M, blocks) or scale_w.shape != (-(-N // BLOCK), blocks):
        raise ValueError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and the scales do not fit together")
    if max(M, N, K) >= 2**30 or M * blocks >= 2**31:
        raise ValueError("a side of the product is too long")
    key = device, weight.get_device(), scale_x.get_device(), scale_w.get_device()
    key += K, x.dtype, weight.dtype, scale_x.dtype, scale_w.dtype  # K sizes what is described
    x, weight, scale_x, scale_w = realigned(x), realigned(weight), scale_x.contiguous(), scale_w.contiguous()
    y = x.new_empty((M, N), dtype=torch.bfloat16)
    launch = few_rows if M <= 64 else many_rows
    launch(x, weight, y, scale_x, scale_w, key)
    return y


def kernel_function(x, weight, scale_x, scale_w):
    device = x.get_device()
    if x.is_cuda and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return product_of(x, weight, scale_x, scale_w, device)
    return product_of(x, weight, scale_x, scale_w, device)
