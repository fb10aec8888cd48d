"""Mean cross-entropy and its gradient over the logits, in Gluon: each row is read from DRAM once.

A row of 128,256 numbers takes 250.5 KiB, more than the shared memory of a multiprocessor. So a persistent program, one
a multiprocessor, keeps HELD pieces of its row in registers and up to SLOTS in shared memory, where cp.async brings
them. A piece that is given back is filled with a piece of the next row at once: memory is asked for more while the row
is reduced and its gradient is written. The target of the next row but one is loaded early, so that no load is waited
for. Other rows, dtypes and addresses take a kernel of two walks.
"""

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

SPACE = [{"PIECE": 16384, "WARPS": 32, "SLOTS": 7, "HELD": 3}]
IGNORED = -100
PIECE = 16384  # numbers
WARPS = 32
SLOTS = 7
HELD = 3
LOG2_E, LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
# Their names changed after Triton 3.6.
copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
wait_for_all = getattr(gl, "thread_barrier", None) or gl.barrier


@triton.jit
def two_walks(logits, target, losses, count, classes, IGNORED: tl.constexpr, BLOCK: tl.constexpr):
    """For rows that the other kernel does not take: too short, too long, or not of a multiple of 32 classes."""
    row = tl.program_id(0)
    own = tl.load(target + row)
    counted = own != IGNORED
    logits += row.to(tl.int64) * classes
    chosen = tl.load(logits + tl.where(counted, own, 0)).to(tl.float32)
    read = tl.where(counted, classes, 0)
    at = tl.arange(0, BLOCK)
    top, total = -1e30, 0.0
    for start in range(0, read, BLOCK):
        value = tl.load(logits + start + at, start + at < read, -float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(value, 0))
        total = total * tl.exp2((top - higher) * LOG2_E) + tl.sum(tl.exp2((value - higher) * LOG2_E), 0)
        top = higher
    for start in range(0, classes, BLOCK):
        value = tl.load(logits + start + at, start + at < read, 0.0).to(tl.float32)
        gradient = tl.exp2((value - top) * LOG2_E) / total - tl.where(start + at == own, 1.0, 0.0)
        gradient = tl.where(counted, gradient / tl.load(count), 0.0)
        tl.store(logits + start + at, gradient.to(logits.dtype.element_ty), start + at < classes)
    tl.store(losses + row, tl.where(counted, top + tl.log(total) - chosen, 0.0))


@gluon.jit
def share_of_a_row(target, rows, IGNORED: gl.constexpr, WARPS: gl.constexpr):
    """1 over the number of rows that count"""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    at = gl.arange(0, 128 * WARPS, layout=layout)
    counted = gl.zeros([128 * WARPS], gl.int32, layout=layout)
    for start in range(0, rows, 128 * WARPS):
        counted += (gl.load(target + start + at, start + at < rows, IGNORED) != IGNORED).to(gl.int32)
    return 1.0 / gl.sum(counted, 0).to(gl.float32)


@gluon.jit
def next_row(words, target, row, rows, length, at, zeros, IGNORED: gl.constexpr, PIECE: gl.constexpr):
    """The first row from this one on, in steps of the programs, that counts; those before it become 0."""
    searching = row < rows
    while searching:
        searching = gl.load(target + row) == IGNORED
        if searching:
            for start in range(0, length, PIECE // 2):
                gl.store(words + row.to(gl.int64) * length + start + at, zeros, start + at < length)
            row += gl.num_programs(0)
            searching = row < rows
    return row


@gluon.jit
def numbers(words):
    """The two bf16 numbers of each word in fp32. As words, pieces in registers take half of what 16-bit values take."""
    return (words << 16).to(gl.float32, bitcast=True), (words & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def gradients(words, off):
    """2**(x log2(e) - off) of both numbers of each word, as words"""
    low, high = numbers(words)
    low, high = gl.exp2(low * LOG2_E - off), gl.exp2(high * LOG2_E - off)
    convert: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(convert, "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def ask(
    place,
    there,
    at,
    length,
    slots,
    number,
    piece: gl.constexpr,
    LAST: gl.constexpr,
    WORDS: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """Start the copy of a piece of a row into the slot of its number; of nothing where there is no row. place: where
    the row's words `at` lie; length: words of a row."""
    inside = there
    if piece == LAST:
        inside = (piece * WORDS + at < length) & there
    copy(slots.index(number % SLOTS), place + piece * WORDS, mask=inside)
    async_copy.commit_group()


@gluon.jit
def loss_and_gradient(
    logits,
    words,
    target,
    loss,
    rows,
    length,
    nothing,
    IGNORED: gl.constexpr,
    PIECES: gl.constexpr,
    PIECE: gl.constexpr,
    SLOTS: gl.constexpr,
    HELD: gl.constexpr,
    WARPS: gl.constexpr,
):
    WORDS: gl.constexpr = PIECE // 2
    LAST: gl.constexpr = PIECES - 1
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    lines: gl.constexpr = gl.SliceLayout(1, layout)  # of 16 bytes
    within = gl.arange(0, 4, layout=gl.SliceLayout(0, layout))
    at = gl.arange(0, PIECE // 8, layout=lines)[:, None] * 4 + within[None, :]
    zeros = gl.zeros([PIECE // 8, 4], gl.int32, layout=layout)
    slots = gl.allocate_shared_memory(gl.int32, [SLOTS, PIECE // 8, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    row = next_row(words, target, gl.program_id(0), rows, length, at, zeros, IGNORED, PIECE)
    place = words + row.to(gl.int64) * length + at
    for piece in gl.static_range(SLOTS):
        ask(place, row < rows, at, length, slots, piece, piece, LAST, WORDS, SLOTS)
    share = share_of_a_row(target, rows, IGNORED, WARPS)
    if gl.program_id(0) == 0:
        gl.atomic_add(loss, gl.where(share < float("inf"), 0.0, float("nan")))
    step = gl.num_programs(0)
    number = 0  # of the row's first piece, among all pieces of this program
    own = gl.load(target + row, row < rows, IGNORED)
    coming = gl.load(target + row + step, row + step < rows, IGNORED)  # a row ahead, so that nobody waits for it
    while row < rows:
        place_of_own = logits + row.to(gl.int64) * length * 2 + own
        chosen = gl.load(place_of_own).to(gl.float32)
        following = row + step
        if coming == IGNORED:
            following = next_row(words, target, following, rows, length, at, zeros, IGNORED, PIECE)
            coming = gl.load(target + following, following < rows, IGNORED)
        after = gl.load(target + following + step, following + step < rows, IGNORED)
        next_place = words + following.to(gl.int64) * length + at
        more = following < rows
        top = gl.full([PIECE // 8], -1e30, gl.float32, layout=lines)
        total = gl.zeros([PIECE // 8], gl.float32, layout=lines)
        held = ()
        for piece in gl.static_range(PIECES):
            async_copy.wait_group(SLOTS - 1 + min(piece, HELD) - piece)
            value = slots.index((number + piece) % SLOTS).load(layout)
            if piece < HELD:
                held = held + (value,)  # noqa: RUF005 (Triton takes no other form)
                if piece + SLOTS < PIECES:
                    ask(place, True, at, length, slots, number + piece, piece + SLOTS, LAST, WORDS, SLOTS)
                else:
                    ask(next_place, more, at, length, slots, number + piece, piece + SLOTS - PIECES, LAST, WORDS, SLOTS)
            low, high = numbers(value)
            if piece == LAST:
                inside = piece * WORDS + at < length
                low, high = gl.where(inside, low, -float("inf")), gl.where(inside, high, -float("inf"))
            higher = gl.maximum(top, gl.max(gl.maximum(low, high), 1))
            off = (higher * LOG2_E)[:, None]
            powers = gl.exp2(low * LOG2_E - off) + gl.exp2(high * LOG2_E - off)
            total = total * gl.exp2((top - higher) * LOG2_E) + gl.sum(powers, 1)
            top = higher
        highest = gl.max(top, 0)
        shift = highest * LOG2_E + gl.log2(gl.sum(total * gl.exp2((top - highest) * LOG2_E), 0))
        off = shift - gl.log2(share)
        for piece in gl.static_range(HELD, PIECES):
            value = slots.index((number + piece) % SLOTS).load(layout)
            ask(next_place, more, at, length, slots, number + piece, piece + SLOTS - PIECES, LAST, WORDS, SLOTS)
            gradient = gradients(value, off)
            if piece == LAST:
                gl.store(place + piece * WORDS, gradient, piece * WORDS + at < length)
            else:
                gl.store(place + piece * WORDS, gradient)
        for piece in gl.static_range(HELD):
            # `nothing` is 0, which the compiler cannot know: else it keeps the fp32 numbers of the first walk in
            # registers, twice as many, and spills
            gl.store(place + piece * WORDS, gradients(held[piece] ^ nothing, off))
        wait_for_all()  # the target's gradient is written over the softmax that was written there
        gradient_of_own = (gl.exp2(chosen * LOG2_E - shift) - 1.0) * share
        gl.store(place_of_own, gradient_of_own.to(logits.dtype.element_ty))
        gl.atomic_add(loss, (shift * LN_2 - chosen) * share)
        number += PIECES
        row, place, own, coming = following, next_place, coming, after


def by_two_walks(logits, target):
    rows, classes = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    count = (target != IGNORED).sum().float()
    if rows:
        two_walks[(rows,)](logits, target, losses, count, classes, IGNORED=IGNORED, BLOCK=2048)
    return losses.sum() / count


def by_residence(logits, target):
    rows, classes = logits.shape
    loss = torch.zeros((), dtype=torch.float32, device=logits.device)
    count = torch.cuda.get_device_properties(logits.device).multi_processor_count
    loss_and_gradient[(count,)](
        logits,
        logits.view(torch.int32),
        target,
        loss,
        rows,
        classes // 2,
        0,
        IGNORED=IGNORED,
        PIECES=triton.cdiv(classes, PIECE),
        PIECE=PIECE,
        SLOTS=SLOTS,
        HELD=HELD,
        WARPS=WARPS,
        num_warps=WARPS,
    )
    return loss


def kernel_function(logits, target):
    if not logits.is_contiguous():
        raise ValueError("logits must be contiguous: they are changed in place")
    target, classes = target.contiguous(), logits.shape[1]
    fits = max(SLOTS, HELD + 1) <= triton.cdiv(classes, PIECE) <= SLOTS + HELD
    by_lines = classes % 32 == 0 and logits.data_ptr() % 16 == 0 and logits.dtype == torch.bfloat16
    return (by_residence if fits and by_lines else by_two_walks)(logits, target)
