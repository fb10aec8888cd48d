"""fp8 product in Triton: TMA descriptors, a tile of 128 x 256, three stages, a persistent grid.

It led the exploration of 2026-11-23, as fast as the library. Up to 64 rows of x take the transposed product with deep
stages; rows of unaligned length are copied to rows of whole 16 bytes first. After the first call of a shape the compiled
kernel is launched with addresses and kept tensor maps: past Triton's binder, and without new descriptors. This saves the
host's time alone. An earlier form, which kept descriptors: with 32 rows calls back to back took 59.2 us in place of 70.1
(H200, not paired), cold calls the same. The present form was the kernel of examples/fp8_product
on an H100, until cuda.py came.
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

SKINNY_BN = 64
SKINNY_BK = 256
SKINNY_STAGES = 6
SPLIT = 1
BM = 128
BN = 256
BK = 128
GROUP = 8  # rows of tiles that are walked together
SLICES = 2
WARPS = 8
STAGES = 3
PERSISTENT = 1


@triton.jit
def word_at(words, total, edge, last, index):
    """The 4-byte words of a tensor of `total` bytes; `edge` is the number of its last, partial word, `last` that word."""
    return tl.where(index == edge, last, tl.load(words + index, mask=index < edge, other=0))


@triton.jit
def realign(x, y, rows, K, BLOCK: tl.constexpr):
    """Rows of K bytes to rows of PITCH bytes, the next multiple of 16; what is new is 0. y is made of words."""
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
    for start in range(0, pitch, BLOCK):
        at = start + tl.arange(0, BLOCK)
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
def skinny(
    x_tiles,
    w_tiles,
    y,
    scale_x,
    scale_w,
    parts,
    arrived,
    PER_ROW,
    M,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """y^T = w x^T: the rows of w take the 64 rows of wgmma. With SPLIT > 1 the last block of a tile adds its parts."""
    tile, part = tl.program_id(0), tl.program_id(1)
    steps = tl.cdiv(tl.cdiv(K, BK), SPLIT)
    acc = tl.zeros((BN, BM), tl.float32)
    for step in tl.range(part * steps, tl.minimum(part * steps + steps, tl.cdiv(K, BK)), num_stages=STAGES):
        acc = tl.dot(w_tiles.load([tile * BN, step * BK]), x_tiles.load([0, step * BK]).T, acc)
    n, m = tile * BN + tl.arange(0, BN), tl.arange(0, BM)
    within = (n[:, None] < N) & (m[None, :] < M)
    at = m[None, :] * N + n[:, None]
    mine = SPLIT == 1
    if SPLIT > 1:
        here = parts + tile.to(tl.int64) * SPLIT * BN * BM + tl.arange(0, BN)[:, None] * BM + m[None, :]
        tl.store(here + part * BN * BM, acc)
        tl.debug_barrier()
        mine = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLIT - 1
        if mine:
            acc = tl.zeros((BN, BM), tl.float32)
            for other in tl.static_range(SPLIT):
                acc += tl.load(here + other * BN * BM, cache_modifier=".cg")
    if mine:
        scale = tl.load(scale_x) * tl.load(scale_w + n * PER_ROW, mask=n < N, other=0.0)
        tl.store(y + at, (acc * scale[:, None]).to(y.dtype.element_ty), mask=within)


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


of_few = Launches(skinny)


def few_rows(x, weight, y, scale_x, scale_w, per_row, key):
    (M, N), K = y.shape, x.shape[1]
    rows, tiles = max(16, 1 << (M - 1).bit_length()), -(-N // SKINNY_BN)
    parts = arrived = y
    if SPLIT > 1:
        parts = torch.empty(tiles * SPLIT * SKINNY_BN * rows, dtype=torch.float32, device=y.device)
        arrived = torch.zeros(tiles, dtype=torch.int32, device=y.device)
    descriptors = (x, [rows, SKINNY_BK]), (weight, [SKINNY_BN, SKINNY_BK])
    pointers = y, scale_x, scale_w, parts, arrived
    rest = per_row, M, N, K, rows, SKINNY_BN, SKINNY_BK, SPLIT, SKINNY_STAGES
    of_few(key, (tiles, SPLIT, 1), descriptors, pointers, rest, num_warps=4)


@triton.jit
def store_slice(
    part,
    y_tiles,
    y,
    scale_x,
    scale_w,
    PER_ROW,
    om,
    on,
    M,
    N,
    BM: tl.constexpr,
    WIDTH: tl.constexpr,
    BY_TMA: tl.constexpr,
):
    n = on + tl.arange(0, WIDTH)
    scale = tl.load(scale_x) * tl.load(scale_w + n * PER_ROW, mask=n < N, other=0.0)
    part = (part * scale[None, :]).to(tl.bfloat16)
    if BY_TMA:
        y_tiles.store([om, on], part)
    else:
        m = om + tl.arange(0, BM)
        tl.store(y + m[:, None].to(tl.int64) * N + n[None, :], part, mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def product(
    x_tiles,
    w_tiles,
    y_tiles,
    y,
    scale_x,
    scale_w,
    PER_ROW,
    M,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    SLICES: tl.constexpr,
    BY_TMA: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        first = tile // (GROUP * tiles_n) * GROUP
        rows = tl.minimum(tiles_m - first, GROUP)
        within = tile % (GROUP * tiles_n)
        om, on = (first + within % rows) * BM, within // rows * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for step in range(tl.cdiv(K, BK)):
            acc = tl.dot(x_tiles.load([om, step * BK]), w_tiles.load([on, step * BK]).T, acc)
        if SLICES == 1:
            store_slice(acc, y_tiles, y, scale_x, scale_w, PER_ROW, om, on, M, N, BM, BN, BY_TMA)
        else:
            left, right = acc.reshape((BM, 2, BN // 2)).permute((0, 2, 1)).split()
            store_slice(left, y_tiles, y, scale_x, scale_w, PER_ROW, om, on, M, N, BM, BN // 2, BY_TMA)
            store_slice(right, y_tiles, y, scale_x, scale_w, PER_ROW, om, on + BN // 2, M, N, BM, BN // 2, BY_TMA)


of_many = Launches(product)


@functools.cache
def multiprocessors(device):
    """In the CPU interpreter: a number that leaves several tiles to a program."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def many_rows(x, weight, y, scale_x, scale_w, per_row, key):
    (M, N), K = y.shape, x.shape[1]
    by_tma = N % 8 == 0
    blocks = -(-M // BM) * -(-N // BN)
    if PERSISTENT:
        blocks = min(blocks, multiprocessors(x.device))
    tiles = [(x, [BM, BK]), (weight, [BN, BK])]
    # Where TMA cannot address y, the third descriptor is one of x that nothing reads.
    tiles.append((y, [BM, BN // SLICES]) if by_tma else tiles[0])
    rest = per_row, M, N, K, BM, BN, BK, GROUP, SLICES, by_tma, bool(PERSISTENT)
    of_many(key, (blocks, 1, 1), tiles, (y, scale_x, scale_w), rest, num_warps=WARPS, num_stages=STAGES)


of_copies = Launches(realign)


def realigned(x):
    """x, or a copy of it whose rows begin at multiples of 16 bytes: what TMA can address."""
    rows, K = x.shape
    if x.stride() != (K, 1):
        x = x.contiguous().view(-1).view(rows, K)
    if K % 16 == 0 and x.data_ptr() % 16 == 0:
        return x
    if x.data_ptr() % 4:
        x = x.clone()
    pitch = -(-K // 16) * 16
    y = x.new_empty((rows, pitch))
    of_copies((x.get_device(), x.dtype), (rows, 1, 1), (), (x, y.view(torch.int32)), (rows, K, 1024), num_warps=8)
    return y


def product_of(x, weight, scale_x, scale_w, device):
    (M, K), (N, depth), scales = x.shape, weight.shape, scale_w.numel()
    if depth != K or scale_x.numel() != 1 or scales not in (1, N):
        raise ValueError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and the scales do not fit together")
    if max(M, N, K) >= 2**30:
        raise ValueError("a side of the product is too long")
    key = device, weight.get_device(), scale_x.get_device(), scale_w.get_device()
    key += x.dtype, weight.dtype, scale_x.dtype, scale_w.dtype
    x, weight, scale_w = realigned(x), realigned(weight), scale_w.contiguous()
    y = x.new_empty((M, N), dtype=torch.bfloat16)
    launch = few_rows if M <= 64 else many_rows
    launch(x, weight, y, scale_x, scale_w, int(scales > 1), key)
    return y


def kernel_function(x, weight, scale_x, scale_w):
    device = x.get_device()
    if x.is_cuda and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return product_of(x, weight, scale_x, scale_w, device)
    return product_of(x, weight, scale_x, scale_w, device)
