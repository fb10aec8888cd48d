#!/usr/bin/env python3
"""Worked examples by the clock and the formulas of a public deck of hard kernels (kernelbench.com, problems-h100).

On a machine with an NVIDIA GPU: python benchmarks/hard_deck/score.py [NAME ...] [--json FILE]. The deck calls a kernel
ten times, then as often as the problem says, each time after it wrote 128 MB; the time is the median of CUDA events.
Its score is the peak fraction: achieved rate over the documented dense peak, as a geometric mean over the shapes. The
peaks come from the wiki's page of --card. That the kernels are right is the business of run_examples.py.

The deck's time counts what the host needs for a call's launches. So each call is also timed with the host ahead: the
stream is held until all is launched. The second mean is the score that this time would give."""

import argparse
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from kernelopt import cli
from kernelopt.hardware import wiki

DEVICE = "cuda"
FLUSH_BYTES = 128 << 20
WARM_UP_CALLS = 10
HELD_CYCLES = 2_000_000  # of a stream: about a millisecond, more than the host needs for a call


@dataclass(frozen=True)
class Problem:
    """A problem of the deck. shapes: arguments of get_inputs. amount: FLOPs or bytes of a call, as the deck counts
    them. peak: metric of the wiki. published: the best peak fraction there, on an H100 PCIe, read 2026-11-22."""

    number: str
    calls: int
    peak: str
    amount: Callable[..., float]
    published: float
    shapes: tuple[dict[str, int], ...]


@dataclass(frozen=True)
class Score:
    """A shape's median time and peak fraction; spread_us: 20 % and 80 % of the calls; ahead_us: the median with the
    host ahead."""

    shape: dict[str, int]
    median_us: float
    spread_us: tuple[float, float]
    peak_fraction: float
    ahead_us: float

    @property
    def fraction_ahead(self) -> float:
        return self.peak_fraction * self.median_us / self.ahead_us


def bytes_of_decode(requests, longest, width=128, kv_heads=8, group=4) -> float:
    return 4 * requests * longest * kv_heads * width + 4 * requests * kv_heads * group * width


def bytes_of_w4a16(m, n, k=4096) -> float:
    return 2 * m * k + k / 2 * n + 2 * (k / 128) * n * 2 + 2 * m * n


def flops_of_kda(batch, tokens, heads=8) -> float:
    return 4 * batch * tokens * heads * (128 * 128 + 2 * 64 * 128)


DECK = {
    "fp8_product": Problem(
        "01", 30, "peak_fp8_tensor", lambda m, n, k: 2 * m * n * k, 0.245,
        (
            {"m": 4096, "n": 4096, "k": 4096}, {"m": 4096, "n": 4096, "k": 4127},
            {"m": 32, "n": 8192, "k": 8192}, {"m": 4096, "n": 14336, "k": 4096},
        ),
    ),
    "kda": Problem(
        "02", 20, "peak_bf16_tensor", flops_of_kda, 0.0135,
        (
            {"batch": 2, "tokens": 1024}, {"batch": 2, "tokens": 2048},
            {"batch": 1, "tokens": 4096}, {"batch": 1, "tokens": 2048, "heads": 4},
        ),
    ),
    "paged_decode": Problem(
        "03", 30, "memory_bandwidth", bytes_of_decode, 0.314,
        (
            {"requests": 8, "longest": 1024}, {"requests": 32, "longest": 2048},
            {"requests": 4, "group": 8, "longest": 4096}, {"requests": 16, "longest": 1535},
            {"requests": 8, "kv_heads": 4, "width": 64, "longest": 2000},
        ),
    ),
    "top_k": Problem(
        "05", 50, "memory_bandwidth", lambda rows, columns, k: rows * (4 * columns + 12 * k), 0.015,
        (
            {"rows": 1, "columns": 131072, "k": 64}, {"rows": 64, "columns": 8192, "k": 8},
            {"rows": 32, "columns": 16384, "k": 32}, {"rows": 16, "columns": 12000, "k": 16},
            {"rows": 128, "columns": 4096, "k": 1},
        ),
    ),
    "moe_up": Problem(  # the deck counts FLOPs once a token, not once a visit
        "06", 20, "peak_bf16_tensor", lambda tokens, hidden, inner, **_: 4 * tokens * hidden * inner, 0.075,
        (
            {"tokens": 32768, "hidden": 4096, "inner": 1536, "experts": 128, "chosen": 8},
            {"tokens": 4096, "hidden": 2048, "inner": 1024, "experts": 64, "chosen": 4},
            {"tokens": 16384, "hidden": 2048, "inner": 4096, "experts": 64, "chosen": 8},
        ),
    ),
    "w4a16": Problem(
        "07", 50, "memory_bandwidth", bytes_of_w4a16, 0.115,
        (
            {"m": 1, "n": 12288}, {"m": 32, "n": 12288}, {"m": 256, "n": 12288},
            {"m": 1, "n": 4096}, {"m": 16, "n": 14336},
        ),
    ),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="*", help=f"which of {', '.join(DECK)} (default: those that are examples)")
    parser.add_argument("--card", default="H200", help="whose documented peaks count (default: %(default)s)")
    parser.add_argument("--kernel", type=Path, metavar="FILE", help="in place of the example's, such as a candidate")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurements")
    args = parser.parse_args()
    names = args.name or [name for name in DECK if (ROOT / "examples" / name).is_dir()]
    page = wiki.product(args.card)
    if args.kernel and len(names) != 1:
        parser.error("--kernel needs the name of one problem")
    scores = {name: measured(DECK[name], ROOT / "examples" / name, args.kernel, page) for name in names}
    if args.json:
        args.json.write_text(json.dumps({name: [*map(asdict, of)] for name, of in scores.items()}, indent=1) + "\n")
    print(table(scores))
    return 0


def measured(problem: Problem, example: Path, other: Path | None, page: wiki.Page) -> list[Score]:
    peak = page.rows[problem.peak].value * (1e9 if problem.peak == "memory_bandwidth" else 1e12)
    kernel, reference = loaded(other or example / "kernel.py"), loaded(example / "reference.py")
    call = kernel.kernel_function if hasattr(kernel, "kernel_function") else kernel.ModelNew().to(DEVICE)
    import torch

    scores = []
    for shape in problem.shapes:
        with torch.device(DEVICE):  # moe_up has billions of random values
            inputs = reference.get_inputs(**shape)
        times, ahead = (times_us(call, inputs, problem.calls, held) for held in (0, HELD_CYCLES))
        median, deciles = statistics.median(times), statistics.quantiles(times, n=10)
        fraction = problem.amount(**shape) / (median * 1e-6) / peak
        scores.append(Score(shape, median, (deciles[1], deciles[7]), fraction, statistics.median(ahead)))
    return scores


def loaded(path: Path):
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def times_us(call, inputs: list, calls: int, held_cycles: int = 0) -> list[float]:
    """By the deck's clock. It includes what the host needs for the launches, unless the stream is held meanwhile."""
    import torch

    flushed = torch.empty(FLUSH_BYTES // 4, device=DEVICE)
    times = []
    with torch.no_grad():
        for _ in range(WARM_UP_CALLS):
            call(*inputs)
        for _ in range(calls):
            flushed.zero_()
            torch.cuda.synchronize()
            if held_cycles:
                torch.cuda._sleep(held_cycles)
            edges = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            edges[0].record()
            call(*inputs)
            edges[1].record()
            torch.cuda.synchronize()
            times.append(1e3 * edges[0].elapsed_time(edges[1]))
    return times


def table(scores: dict[str, list[Score]]) -> str:
    lines = [
        "| problem of the deck | times, us | host ahead, us | peak fraction of each shape | geometric mean"
        " | host ahead | published, H100 PCIe |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, of in scores.items():
        times = ", ".join(f"{score.median_us:.1f}" for score in of)
        ahead = ", ".join(f"{score.ahead_us:.1f}" for score in of)
        fractions = ", ".join(f"{score.peak_fraction:.3f}" for score in of)
        mean = statistics.geometric_mean(score.peak_fraction for score in of)
        best = statistics.geometric_mean(score.fraction_ahead for score in of)
        row = f"{DECK[name].number} {name}", times, ahead, fractions, f"{mean:.4f}", f"{best:.4f}", DECK[name].published
        lines.append(f"| {' | '.join(map(str, row))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    cli.run(main)
