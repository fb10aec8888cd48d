#!/usr/bin/env python3
"""The sum of a tensor over the GPUs of one machine, by NCCL and by kernels that read the other GPUs' memory.

On a machine with two or more NVIDIA GPUs: torchrun --nproc-per-node 2 benchmarks/several_gpus.py [--json FILE]
Prints, for each size, the median time of a call on the slowest GPU; calls follow each other, and the times include
their launches. The last columns are a sum followed by a residual add and an RMSNorm, in separate kernels and in one.
No multicast is used. exit 1 when a way gives another result than NCCL."""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import triton
import triton.language as tl

WIDTH = 8192  # of a row, in bf16: 16 KiB
ROWS = (1, 8, 64, 512, 4096)
CALLS, SAMPLES, WARM_UP = 10, 20, 5
EPSILON = 1e-6


@triton.jit
def sum_and_norm(own, other, residual, weight, out, epsilon, WIDTH: tl.constexpr):
    """A row: residual += own + other; out = RMSNorm(residual) * weight. `other` lies in another GPU's memory."""
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    total = tl.load(own + at).to(tl.float32) + tl.load(other + at).to(tl.float32)
    total = total.to(residual.dtype.element_ty).to(tl.float32) + tl.load(residual + at).to(tl.float32)
    tl.store(residual + at, total.to(residual.dtype.element_ty))
    scale = tl.rsqrt(tl.sum(total * total) / WIDTH + epsilon)
    row = total * scale * tl.load(weight + tl.arange(0, WIDTH)).to(tl.float32)
    tl.store(out + at, row.to(out.dtype.element_ty))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurements")
    args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        sys.exit("several_gpus.py: start it with torchrun --nproc-per-node 2 benchmarks/several_gpus.py")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    torch.manual_seed(dist.get_rank())
    measured = [{"rows": rows, "bytes": rows * WIDTH * 2, **times(rows)} for rows in ROWS]
    about = {"device": torch.cuda.get_device_name(), "gpus": dist.get_world_size(), "torch": torch.__version__}
    about |= {"triton": triton.__version__, "copy_gbps": copy_gbps(), "rows": measured}
    good = all(way != "wrong" for row in measured for way in row.values())
    if dist.get_rank() == 0:
        print(table(about))
        if args.json:
            args.json.write_text(json.dumps(about, indent=1) + "\n")
    dist.destroy_process_group()
    return int(not good)


def times(rows: int) -> dict[str, float | str]:
    """{way: microseconds of a call; "wrong" where its result differs}"""
    from torch.distributed import _symmetric_memory as symmetric

    shape, group = (rows, WIDTH), dist.group.WORLD
    shared = symmetric.empty(shape, dtype=torch.bfloat16, device="cuda")
    handle = symmetric.rendezvous(shared, group)
    shared.normal_()
    given = shared.clone()
    expected = given.clone()
    dist.all_reduce(expected)
    name, ops = group.group_name, torch.ops.symm_mem

    def two_shots():
        ops.two_shot_all_reduce_(shared, "sum", name)
        return shared

    def nccl():
        dist.all_reduce(given_to_nccl)
        return given_to_nccl

    given_to_nccl = given.clone()
    ways = {
        "nccl": (nccl, expected),
        "one_shot": (lambda: ops.one_shot_all_reduce(shared, "sum", name), expected),
        "two_shot": (two_shots, expected),
    }
    result = {way: checked(call, right, lambda: shared.copy_(given)) for way, (call, right) in ways.items()}
    shared.copy_(given)
    return result | (times_with_norm(handle, shared, given, expected) if dist.get_world_size() == 2 else {})


def times_with_norm(handle, shared: torch.Tensor, given: torch.Tensor, total: torch.Tensor) -> dict[str, float | str]:
    """`times` for a sum, a residual add and an RMSNorm."""
    weight, residual = torch.ones(WIDTH, dtype=torch.bfloat16, device="cuda"), torch.zeros_like(given)
    expected = torch.nn.functional.rms_norm(total.float(), (WIDTH,), eps=EPSILON).bfloat16()
    other = handle.get_buffer(1 - handle.rank, shared.shape, shared.dtype)
    out, summed = torch.empty_like(given), given.clone()

    def fused():
        handle.barrier(channel=0)  # the other GPU has written its part
        sum_and_norm[(len(given),)](shared, other, residual, weight, out, EPSILON, WIDTH=WIDTH, num_warps=8)
        handle.barrier(channel=1)  # the other GPU has read this one's
        return out

    def separate():
        dist.all_reduce(summed)
        return added_and_normed(summed, residual, weight)

    def restore():
        residual.zero_()
        summed.copy_(given)

    ways = {"nccl_then_norm": separate, "fused_norm": fused}
    return {way: checked(call, expected, restore) for way, call in ways.items()}


@torch.compile
def added_and_normed(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    residual += x
    return torch.nn.functional.rms_norm(residual, (WIDTH,), weight, EPSILON)


def checked(call: Callable[[], torch.Tensor], expected: torch.Tensor, restore: Callable[[], object]) -> float | str:
    """The time of a call on the slowest GPU, or "wrong". restore: sets what calls change."""
    restore()
    torch.cuda.synchronize()
    dist.barrier()
    off = (call().float() - expected.float()).abs().max() / expected.float().abs().max()
    right = torch.tensor([float(off < 0.02)], device="cuda")
    dist.all_reduce(right, op=dist.ReduceOp.MIN)
    if not right.item():
        return "wrong"
    spent = torch.tensor([time_us(call)], device="cuda")
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return spent.item()


def time_us(call: Callable[[], object]) -> float:
    """The median of SAMPLES stretches of CALLS calls, each divided by CALLS; all GPUs begin a stretch together."""
    samples = []
    for sample in range(WARM_UP + SAMPLES):
        torch.cuda.synchronize()
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        if sample >= WARM_UP:
            samples.append(1000 * begin.elapsed_time(end) / CALLS)
    return statistics.median(samples)


def copy_gbps() -> float:
    """GB/s of a copy of 256 MiB from the next GPU's memory, while the others copy as well."""
    from torch.distributed import _symmetric_memory as symmetric

    shared = symmetric.empty(256 << 20, dtype=torch.uint8, device="cuda")
    handle = symmetric.rendezvous(shared, dist.group.WORLD)
    other = handle.get_buffer((handle.rank + 1) % handle.world_size, shared.shape, shared.dtype)
    here = torch.empty_like(shared)
    return shared.nbytes / time_us(lambda: here.copy_(other)) / 1000


def table(about: dict) -> str:
    ways = [way for way in about["rows"][0] if way not in ("rows", "bytes")]
    head = f"{about['gpus']} x {about['device']}, torch {about['torch']}, triton {about['triton']}; copy from the next "
    lines = [
        head + f"GPU {about['copy_gbps']:.0f} GB/s",
        "",
        f"| KiB | {' | '.join(ways)} |",
        "|---" * (len(ways) + 1) + "|",
    ]
    for row in about["rows"]:
        cells = [f"{row[way]:.1f}" if isinstance(row[way], float) else row[way] for way in ways]
        lines.append(f"| {row['bytes'] >> 10} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
