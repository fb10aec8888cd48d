"""fp8 product with block scales in Triton: TMA descriptors, sums of 128 of k scaled into fp32, a persistent grid.

A step is one block of scales: a product of 128 of k into fresh sums, then one fused multiply-add for an element. TALL walks
two tiles of rows with one tile of w, so that a step of 256 x 128 needs the registers of 128 x 128 sums in flight only.
AHEAD loads the scales of the next step before this step's product. Up to 64 rows of x take the transposed product with
deep stages; rows of unaligned length are copied to rows of whole 16 bytes first. After the first call of a shape the
descriptors are given other tensors and the compiled kernel is launched past Triton's binder, which saves host time.
"""

import functools

import torch
import triton
import triton.language as tl
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
    total = rows.to(tl.int64) * K
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
    """Launches of one kernel. The first of a key goes through Triton; later ones reuse its descriptors, with the bases of
    this call, and its compiled code. A key must hold all that Triton specialises on, and all that a descriptor is made of
    but the base. The CPU interpreter compiles nothing: there only the descriptors are reused."""

    def __init__(self, kernel):
        self.kernel, self.ready = kernel, {}

    def __call__(self, key, grid, tiles, rest, constants, **options):
        """tiles: (tensor, block) of each descriptor, the kernel's first parameters; then rest, then constants."""
        if key not in self.ready:
            self.ready[key] = [TensorDescriptor.from_tensor(tensor, block) for tensor, block in tiles], None
        described, compiled = self.ready[key]
        for descriptor, (tensor, _) in zip(described, tiles, strict=True):
            descriptor.base = tensor
        if compiled is None:
            compiled = self.kernel[grid](*described, *rest, *constants, **options)
            self.ready[key] = described, compiled
        else:
            compiled[grid](*described, *rest, *constants)
        for descriptor in described:
            descriptor.base = None  # keeps no tensor alive


of_many, of_few = Launches(product), Launches(few)


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
    rest = y, scale_x, scale_w, M, N, blocks
    constants = BM, BLOCK, GROUP, TALL, by_tma, bool(FLATTEN), AHEAD
    of_many(key, (blocks_of_grid, 1, 1), tiles, rest, constants, num_warps=WARPS, num_stages=STAGES)


def few_rows(x, weight, y, scale_x, scale_w, key):
    (M, N), blocks = y.shape, scale_x.shape[1]
    rows = max(16, triton.next_power_of_2(M))
    tiles = [(x, [rows, BLOCK]), (weight, [FEW_BN, BLOCK])]
    rest = y, scale_x, scale_w, M, N, blocks
    of_few(key, (-(-N // FEW_BN), 1, 1), tiles, rest, (rows, FEW_BN, BLOCK, FEW_STAGES), num_warps=4)


def realigned(x):
    """x, or a copy of it whose rows begin at multiples of 16 bytes: what TMA can address."""
    rows, K = x.shape
    if K % 16 == 0 and x.stride() == (K, 1) and x.data_ptr() % 16 == 0:
        return x
    x = x.contiguous().view(-1).view(rows, K)
    if x.data_ptr() % 4:
        x = x.clone()
    y = torch.empty(rows, -(-K // 16) * 16, dtype=x.dtype, device=x.device)
    realign[(rows,)](x, y.view(torch.int32), rows, K, WORDS=1024, num_warps=8)
    return y


def kernel_function(x, weight, scale_x, scale_w):
    (M, K), N = x.shape, weight.shape[0]
    blocks = -(-K // BLOCK)
    if weight.shape[1] != K or scale_x.shape != (M, blocks) or scale_w.shape != (-(-N // BLOCK), blocks):
        raise ValueError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and the scales do not fit together")
    if max(M, N, K) >= 2**30 or M * blocks >= 2**31:
        raise ValueError("a side of the product is too long")
    x, weight, scale_x, scale_w = realigned(x), realigned(weight), scale_x.contiguous(), scale_w.contiguous()
    y = torch.empty(M, N, dtype=torch.bfloat16, device=x.device)
    # Triton compiles for pointers to multiples of 16, and for numbers that are 1 or multiples of 16.
    aligned = scale_x.data_ptr() % 16 == 0, scale_w.data_ptr() % 16 == 0
    launch = few_rows if M <= 64 else many_rows
    launch(x, weight, y, scale_x, scale_w, (x.device, x.dtype, scale_x.dtype, scale_w.dtype, M, N, K, aligned))
    return y
