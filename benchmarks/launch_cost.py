#!/usr/bin/env python3
"""What the host's part of a Triton launch costs, by way of launching: python benchmarks/launch_cost.py. Needs gcc,
and a machine without NVIDIA's driver; exits with 3 where there is one.

Python cost, stand-in driver, no GPU: binder, descriptors and the C code of the launcher are Triton's own, and the
driver below them does nothing (stand_in_cuda.py). So only ratios say something, and what the driver needs comes on top.
Processor time of this thread, ways in turn, medians of the rounds; the range is that of the ratios' 10 % to 90 %."""

import argparse
import copy
import inspect
import statistics
import sys
import time

import stand_in_cuda


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--calls", type=int, default=200, help="of each way in a round")
    return parser.parse_args()


OPTIONS = options()
if stand_in_cuda.real_driver():
    print("this machine has NVIDIA's driver, which torch would load; run this where there is none", file=sys.stderr)
    sys.exit(3)
stand_in_cuda.activate()

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

GRID, NUMBERS, CONSTANTS = (4, 1, 1), (256, 256, 256), (32, 32)


@triton.jit
def by_pointers(a, b, c, scale, m, n, k, rows: tl.constexpr, columns: tl.constexpr):
    at = tl.arange(0, rows)
    tl.store(c + at, (tl.load(a + at) + tl.load(b + at)) * tl.load(scale) + m + n + k)


@triton.jit
def by_descriptors(a, b, c, scale, m, n, k, rows: tl.constexpr, columns: tl.constexpr):
    c.store([0, 0], (a.load([0, 0]) + b.load([0, 0])) * tl.load(scale) + m + n + k)


def ways() -> dict[str, object]:
    """name -> what is called. The first is what the others are held against."""
    tensors, scale = [torch.zeros(256, 256) for _ in range(3)], torch.zeros(1)
    x, flat = tensors[0], torch.zeros(65536)

    def described():
        return [TensorDescriptor.from_tensor(tensor, [32, 32]) for tensor in tensors]

    kept = described()
    plain = by_pointers[GRID](*tensors, scale, *NUMBERS, *CONSTANTS)
    mapped = by_descriptors[GRID](*kept, scale, *NUMBERS, *CONSTANTS)
    addresses = [tensor.data_ptr() for tensor in (*tensors, scale)]
    around = mapped.run.launch
    cells = dict(zip(around.__code__.co_freevars, around.__closure__, strict=True))
    below = copy.copy(mapped.run)
    handed = []
    below.launch = cells["launcher"].cell_contents
    maps = made_maps(kept, mapped.metadata.tensordesc_meta)
    for one in maps:
        handed += one

    def straight(run, compiled, *arguments):
        none = None, None, None
        run(*GRID, 1000, compiled.function, compiled.packed_metadata, *none, *arguments, *NUMBERS, *CONSTANTS)

    return {
        "compiled.run, addresses": lambda: straight(plain.run, plain, *addresses),
        "compiled[grid], tensors": lambda: plain[GRID](*tensors, scale, *NUMBERS, *CONSTANTS),
        "kernel[grid], tensors": lambda: by_pointers[GRID](*tensors, scale, *NUMBERS, *CONSTANTS, num_warps=4),
        "launcher, 3 kept tensor maps": lambda: straight(below, mapped, *handed, addresses[-1]),
        "compiled[grid], 3 kept descriptors": lambda: mapped[GRID](*kept, scale, *NUMBERS, *CONSTANTS),
        "kernel[grid], 3 kept descriptors": lambda: by_descriptors[GRID](*kept, scale, *NUMBERS, *CONSTANTS),
        "kernel[grid], 3 new descriptors": lambda: by_descriptors[GRID](*described(), scale, *NUMBERS, *CONSTANTS),
        "TensorDescriptor.from_tensor": lambda: TensorDescriptor.from_tensor(x, [32, 32]),
        "torch.empty, with a device": lambda: torch.empty(256, 256, dtype=torch.bfloat16, device=x.device),
        "x.new_empty": lambda: x.new_empty((256, 256)),
        "x.view": lambda: x.view(-1),
        "x.contiguous(), contiguous": lambda: x.contiguous(),
        "len(x)": lambda: len(x),
        "x.shape[0]": lambda: x.shape[0],
        "x.split in five": lambda: flat.split([1, 1, 1, 1, 65532]),
        "x.split_with_sizes in five": lambda: flat.split_with_sizes([1, 1, 1, 1, 65532]),
        "triton.cdiv": lambda: triton.cdiv(300, 128),
        "triton.next_power_of_2": lambda: triton.next_power_of_2(300),
    }


def made_maps(descriptors, cuts) -> list[list]:
    """What the launcher makes of descriptors, by its own function; its parameters differ by version."""
    from triton.backends.nvidia.driver import make_tensordesc_arg as made

    more = (None,) * (len(inspect.signature(made).parameters) - 2)
    return [made(descriptor, cut, *more) for descriptor, cut in zip(descriptors, cuts, strict=True)]


def seconds(call, times: int) -> float:
    start = time.thread_time()
    for _ in range(times):
        call()
    return (time.thread_time() - start) / times


def main() -> None:
    calls = ways()
    for call in calls.values():
        seconds(call, OPTIONS.calls)
    rounds = [[seconds(call, OPTIONS.calls) for call in calls.values()] for _ in range(OPTIONS.rounds)]
    print(f"Python cost, stand-in driver, no GPU; triton {triton.__version__}, torch {torch.__version__}")
    print("| way | us | ratio | range |\n|---|---|---|---|")
    for name, own in zip(calls, zip(*rounds, strict=True), strict=True):
        ratios = [one / each[0] for one, each in zip(own, rounds, strict=True)]
        low, *_, high = statistics.quantiles(ratios, n=10)
        median, ratio = 1e6 * statistics.median(own), statistics.median(ratios)
        print(f"| {name} | {median:.2f} | {ratio:.2f} | {low:.2f} to {high:.2f} |")


if __name__ == "__main__":
    main()
