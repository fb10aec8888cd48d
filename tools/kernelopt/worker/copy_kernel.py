"""A Triton kernel that moves bytes and does nothing else, for `worker.ceiling`. Imported by worker processes only."""

import torch
import triton
import triton.language as tl

# Elements per program and step, warps, and programs per multiprocessor (None: one program per block). These were the
# best on an H200 at several sizes and mixes. No single shape is the best at all of them.
SHAPES = [
    {"block": block, "warps": warps, "programs": programs}
    for block, warps, programs in (
        (1024, 4, None),
        (2048, 4, None),
        (2048, 8, None),
        (4096, 8, None),
        (1024, 4, 32),
        (4096, 8, 16),
    )
]


ALIGNED = 16  # Triton loads and stores whole vectors below a mask only where the count is a multiple of this


def elements(size: int, width: int) -> int:
    """How many elements of `width` bytes `stream` moves in place of `size` bytes: at least one."""
    count = size // width
    return max(1, count if count < ALIGNED else count // ALIGNED * ALIGNED)


@triton.jit
def move(source, target, read, written, BLOCK: tl.constexpr):  # noqa: N803
    """Each program reads every n-th block of the source and writes every n-th block of the target, in turn."""
    lane = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * BLOCK + lane  # may pass 2^31 elements
    total = tl.zeros([BLOCK], source.dtype.element_ty)
    for _ in range(tl.program_id(0), tl.cdiv(max(read, written), BLOCK), tl.num_programs(0)):
        total += tl.load(source + at, mask=at < read, other=0)
        tl.store(target + at, total.to(target.dtype.element_ty), mask=at < written)
        at += tl.num_programs(0).to(tl.int64) * BLOCK
    # Never true for a source of ones, and unknown to the compiler: a kernel that only reads must not drop its loads.
    tl.store(target + lane, total.to(target.dtype.element_ty), mask=(total < 0) & (lane < written))


def stream(source: torch.Tensor, target: torch.Tensor, block: int, warps: int, programs: int | None) -> None:
    """Read all of `source` and write all of `target`, flat tensors of one dtype."""
    count = triton.cdiv(max(source.numel(), target.numel()), block)
    if programs:
        units = torch.cuda.get_device_properties(0).multi_processor_count if source.is_cuda else 1
        count = min(count, units * programs)
    move[(count,)](source, target, source.numel(), target.numel(), BLOCK=block, num_warps=warps)
