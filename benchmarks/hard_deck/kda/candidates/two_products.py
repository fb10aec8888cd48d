"""Kimi delta attention in two kernels. fold: the WY form of each chunk of 64 tokens, all chunks side by side; it takes
the channels in two halves, so that a thread spills little. walk: over the chunks of a head, a block for a part of V;
two products of the state a chunk, one after the other, and the output beside them, so no state goes to memory. With few
heads, the parts of V are what fills the card. It was the kernel of examples/kda until 2026-11-28: calls after the first
of a shape go to the compiled kernels with addresses, past Triton's binder."""

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver

PER_E = tl.constexpr(1.4426950408889634)  # log2(e): gates become powers of 2
CHUNK = 64
WIDTH = 128
BLOCK = 32  # tokens whose gates are scaled by those of one of them
INVERSE = "tf32"
FOLD_WARPS = 4
REGISTERS = 255  # at most, of a thread of fold
PART = 16
WALK_WARPS = 4
STAGES = 3


@triton.jit
def inverse_of(lower, row, column, PRECISION: tl.constexpr):
    """(I + lower)^-1 of 64 x 64 values below the diagonal: blocks of 1, 2, 4, … 32 joined in pairs."""
    inverse = tl.where(row == column, 1.0, 0.0)
    inverse -= tl.where((row // 2 == column // 2) & (row > column), lower, 0.0)
    for level in tl.range(1, 6, num_stages=1):
        below = ((row >> (level + 1)) == (column >> (level + 1))) & ((row >> level) > (column >> level))
        joined = tl.dot(inverse, tl.where(below, lower, 0.0), input_precision=PRECISION)
        inverse -= tl.dot(joined, inverse, input_precision=PRECISION)
    return inverse


@triton.jit
def half_of(
    q, k, g, asked, ended, decay, at, wide, inside, scale, row,
    CHUNK: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What half of the channels adds to the products of keys with keys and with queries, and those keys decayed from
    the chunk's start, in bf16. Stores the queries from the start, the keys to the end, and the chunk's decay.

    2^(sums[i] - sums[j]) is made of 2^(sums[i] - m[i]), 2^(m[i] - m[j]) and 2^(m[j] - sums[j]), where m is the sum at the
    middle of a token's block of BLOCK tokens: the first and the last stay in the range of fp32 while no gate is below -5.
    The second is 0 where 32 gates in a row sum to less than -103: gates of -3.5 cost the first tokens after a block 15 %
    of their outputs, which BLOCK = 16 would not."""
    dtype = q.dtype.element_ty
    BLOCKS: tl.constexpr = CHUNK // BLOCK
    gates = tl.load(g + at, inside, 0.0) * PER_E
    total = tl.sum(gates, 0)
    sums = tl.reshape(tl.cumsum(gates, 0), (BLOCKS, BLOCK, HALF))
    middle = tl.sum(tl.where(tl.arange(0, BLOCK)[None, :, None] == BLOCK // 2, sums, 0.0), 1)
    keys = tl.reshape(tl.load(k + at, inside, 0.0).to(tl.float32), (BLOCKS, BLOCK, HALF))
    queries = tl.reshape(tl.load(q + at, inside, 0.0).to(tl.float32), (BLOCKS, BLOCK, HALF))
    before = tl.exp2(middle)[:, None, :]
    rise = tl.exp2(sums - middle[:, None, :])
    queries *= rise
    tl.store(asked + wide, tl.reshape(queries * (before * scale), (CHUNK, HALF)).to(dtype))
    left_queries = tl.reshape(queries, (CHUNK, HALF)).to(dtype)
    rise *= keys
    from_start = tl.reshape(rise * before, (CHUNK, HALF)).to(dtype)
    left_keys = tl.reshape(rise, (CHUNK, HALF)).to(dtype)
    keys *= tl.exp2(middle[:, None, :] - sums)
    to_end = tl.exp2(total[None, :] - middle)[:, None, :]
    tl.store(ended + wide, tl.reshape(keys * to_end, (CHUNK, HALF)).to(dtype))
    tl.store(decay + tl.arange(0, HALF), tl.exp2(total))
    block = tl.arange(0, BLOCKS)[:, None]
    own = tl.zeros((CHUNK, CHUNK), tl.float32)
    weights = tl.zeros((CHUNK, CHUNK), tl.float32)
    for number in tl.static_range(BLOCKS):
        from_here = tl.sum(tl.where(block == number, middle, 0.0), 0)[None, :] - middle
        factor = tl.where(block <= number, tl.exp2(from_here), 0.0)
        right = tl.trans(tl.reshape(keys * factor[:, None, :], (CHUNK, HALF)).to(dtype))
        own = tl.where(row // BLOCK == number, tl.dot(left_keys, right), own)
        weights = tl.where(row // BLOCK == number, tl.dot(left_queries, right), weights)
    return own, weights, from_start


@triton.jit
def fold(
    q, k, v, g, beta, new, asked, weighted, pushed, ended, decay, tokens, heads, scale,
    CHUNK: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """c = new - pushed S, o = asked S + weighted c, S[after] = decay S + ended^T c, for the S before a chunk."""
    dtype = q.dtype.element_ty
    HALF: tl.constexpr = WIDTH // 2
    chunk = tl.program_id(0)
    head = tl.program_id(1) % heads
    first = (tl.program_id(1) // heads).to(tl.int64) * tokens
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = (token < tokens)[:, None]
    number = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + chunk
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    half = tl.arange(0, HALF)[None, :]
    at = ((first + token) * heads + head)[:, None] * WIDTH + half
    wide = number * CHUNK * WIDTH + row * WIDTH + half
    decay += number * WIDTH
    own, weights, low = half_of(q, k, g, asked, ended, decay, at, wide, inside, scale, row, CHUNK, HALF, BLOCK)
    own_too, weights_too, high = half_of(
        q, k, g, asked, ended, decay + HALF, at + HALF, wide + HALF, inside, scale, row, CHUNK, HALF, BLOCK
    )
    rate = tl.load(beta + (first + token) * heads + head, token < tokens, 0.0).to(tl.float32)
    own = tl.where(row > column, (own + own_too) * rate[:, None], 0.0)
    weights = tl.where(row >= column, (weights + weights_too) * scale, 0.0).to(dtype)
    tl.store(weighted + number * CHUNK * CHUNK + row * CHUNK + column, weights)
    solved = (inverse_of(own, row, column, INVERSE) * rate[None, :]).to(dtype)
    tl.store(pushed + wide, tl.dot(solved, low).to(dtype))
    tl.store(pushed + wide + HALF, tl.dot(solved, high).to(dtype))
    tl.store(new + wide, tl.dot(solved, tl.load(v + at, inside, 0.0)).to(dtype))
    tl.store(new + wide + HALF, tl.dot(solved, tl.load(v + at + HALF, inside, 0.0)).to(dtype))


@triton.jit
def walk(
    out, new, asked, weighted, pushed, ended, decay, tokens, heads, chunks,
    CHUNK: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    dtype = new.dtype.element_ty
    head = tl.program_id(1) % heads
    first = (tl.program_id(1) // heads).to(tl.int64) * tokens
    channel = tl.arange(0, WIDTH)
    column = (tl.program_id(0) * PART + tl.arange(0, PART))[None, :]
    within = tl.arange(0, CHUNK)
    state = tl.zeros((WIDTH, PART), tl.float32)
    for chunk in tl.range(chunks, num_stages=STAGES):
        number = tl.program_id(1).to(tl.int64) * chunks + chunk
        line = number * CHUNK * WIDTH + within[:, None] * WIDTH
        narrow = state.to(dtype)
        change = tl.load(new + line + column).to(tl.float32)
        change = (change - tl.dot(tl.load(pushed + line + channel[None, :]), narrow)).to(dtype)
        output = tl.dot(tl.load(asked + line + channel[None, :]), narrow)
        weights = tl.load(weighted + number * CHUNK * CHUNK + within[:, None] * CHUNK + within[None, :])
        output = tl.dot(weights, change, output)
        state *= tl.load(decay + number * WIDTH + channel)[:, None]
        state = tl.dot(tl.trans(tl.load(ended + line + channel[None, :])), change, state)
        token = chunk * CHUNK + within
        at = ((first + token) * heads + head)[:, None] * WIDTH + column
        tl.store(out + at, output.to(dtype), (token < tokens)[:, None])


class Launches:
    """Launches of one kernel. The first of a key goes through Triton, later ones straight to its compiled code. Triton
    compiles for numbers that are 1 or multiples of 16, and for pointers to multiples of 16: those are looked at here. The
    key must hold the type and the device of every tensor, since nobody looks at an address again. The CPU interpreter
    compiles nothing, and always goes through Triton."""

    def __init__(self, kernel):
        self.kernel, self.ready, self.compiles = kernel, {}, isinstance(kernel, triton.JITFunction)

    def __call__(self, key, grid, pointers, rest, **options):
        """pointers: tensors, the kernel's first parameters; rest: numbers and constants."""
        if not self.compiles:
            return self.kernel[grid](*pointers, *rest, **options)
        addresses = [tensor.data_ptr() for tensor in pointers]
        device = driver.active.get_current_device()  # a compiled kernel is loaded on one
        key = device, key, rest, *[address % 16 for address in addresses], *options.values()
        ready = self.ready.get(key)
        if ready and not hooked():
            stream = driver.active.get_current_stream(device)
            none = None, None, None  # nothing to tell to hooks
            ready.run(*grid, stream, ready.function, ready.packed_metadata, *none, *addresses, *rest)
        else:
            compiled = self.kernel[grid](*pointers, *rest, **options)
            if getattr(compiled, "function", None) is not None:  # compiled and launched
                self.ready[key] = compiled


def hooked():
    """Whether somebody, such as a profiler, wants to hear of launches; a chain of hooks in Triton 3.6, else one or None."""
    hook = knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook))


of_fold, of_walk = Launches(fold), Launches(walk)


def attention_of(q, k, v, g, beta, device):
    batch, tokens, heads, width = q.shape
    if (width, v.shape[-1]) != (WIDTH, WIDTH):
        raise ValueError("the kernel is written for K = V = 128")
    if not q.dtype == k.dtype == v.dtype == torch.bfloat16 or g.dtype != torch.float32:
        raise ValueError("the kernel is written for q, k and v in bf16, and g in fp32")
    key = device, k.get_device(), v.get_device(), g.get_device(), beta.get_device(), beta.dtype
    q, k, v, g, beta = q.contiguous(), k.contiguous(), v.contiguous(), g.contiguous(), beta.contiguous()
    chunks, pairs = -(-tokens // CHUNK), batch * heads
    out = torch.empty_like(v)
    rows = pairs * chunks * CHUNK
    new, asked, pushed, ended, weighted = v.new_empty(rows * (4 * WIDTH + CHUNK)).split_with_sizes(
        (rows * WIDTH, rows * WIDTH, rows * WIDTH, rows * WIDTH, rows * CHUNK)
    )
    decay = g.new_empty(pairs * chunks * WIDTH)
    of_fold(
        key, (chunks, pairs, 1), (q, k, v, g, beta, new, asked, weighted, pushed, ended, decay),
        (tokens, heads, width**-0.5, CHUNK, WIDTH, BLOCK, INVERSE), num_warps=FOLD_WARPS, maxnreg=REGISTERS,
    )  # fmt: skip
    of_walk(
        key, (WIDTH // PART, pairs, 1), (out, new, asked, weighted, pushed, ended, decay),
        (tokens, heads, chunks, CHUNK, WIDTH, PART, STAGES), num_warps=WALK_WARPS,
    )  # fmt: skip
    return out


def kernel_function(q, k, v, g, beta):
    device = q.get_device()
    if q.is_cuda and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return attention_of(q, k, v, g, beta, device)
    return attention_of(q, k, v, g, beta, device)
