"""How good is the judge? Verdicts on kernels whose difference is known, beside plain do_bench; clocks; a gate's length.

On a machine with an NVIDIA GPU: python benchmarks/judge.py [gates] [clocks] [verdicts] [whole]. Prints Markdown;
benchmarks/README.md keeps what an H200 gave. For the table of verdicts the "processes" of a comparison are rounds in
fresh memory of one process, which starts torch once instead of some thousand times; the lines below it come from the
tool's own three processes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[1] / "tools"
sys.path.insert(0, str(TOOLS))
from kernelopt import cli
from kernelopt.device import gpu
from kernelopt.device.sandbox import Sandbox
from kernelopt.gate import rounds
from kernelopt.gate.readiness import RoundStart
from kernelopt.measure import pairing, timing
from kernelopt.profilers import ncu
from kernelopt.session import creation
from kernelopt.session.record import Optimization
from kernelopt.session.record_store import RecordStore
from kernelopt.session.task import Task
from kernelopt.worker import problem
from kernelopt.worker.context import Candidate, Context
from kernelopt.worker.timing import PairedTiming

OWN = tempfile.TemporaryDirectory(prefix="judge-")
os.environ["TRITON_CACHE_DIR"] = OWN.name  # nobody's ~/.triton
os.chdir(OWN.name)
import torch
from triton.testing import do_bench

REFERENCE = """
import torch
class Model(torch.nn.Module):
    def forward(self, x): return x * 2
def get_inputs(): return [torch.randn({elements})]
"""
# Does `more` times the work of its twin: the blocks past the end of the input are taken from its beginning again.
KERNEL = """
import torch, triton, triton.language as tl

@triton.jit
def scale(x, y, n, blocks, BLOCK: tl.constexpr):
    at = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)

def kernel_function(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    blocks = triton.cdiv(x.numel(), 1024)
    scale[(int(blocks * {more}),)](x, y, x.numel(), blocks, BLOCK=1024)
    return y
"""
PRODUCT = """
import torch
class Model(torch.nn.Module):
    def forward(self, a, b): return a @ b
"""
MIB = 1 << 18  # elements of fp32


class NoParent:
    """Takes the marks that a parent would time."""

    def send(self, message: dict) -> None:
        pass


CONTEXT = Context("cuda", {"writable": [tempfile.gettempdir()], "hidden": []}, NoParent())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="gates, clocks, verdicts, whole (default: all)")
    parser.add_argument("--runs", type=int, default=100, help="comparisons a case (default 100)")
    parser.add_argument("--whole", type=int, default=5, help="comparisons by the tool's own processes (default 5)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        parts = {
            "gates": lambda: gates(Path(name)),
            "clocks": lambda: clocks(Path(name)),
            "verdicts": lambda: verdicts(Path(name), args.runs),
            "whole": lambda: whole(Path(name), args.whole),
        }
        if unknown := [part for part in args.parts if part not in parts]:
            parser.error(f"there is no part {unknown[0]}; parts: {', '.join(parts)}")
        gpu.identify()
        for part in args.parts or parts:
            parts[part]()
    return 0


def kernel(folder: Path, more: float, name: str) -> Path:
    path = folder / f"{name}_{more}.py"
    path.write_text(KERNEL.format(more=more))
    return path


def reference(folder: Path, elements: int) -> Path:
    path = folder / f"reference_{elements}.py"
    path.write_text(REFERENCE.format(elements=elements))
    return path


def verdicts(folder: Path, runs: int) -> None:
    """The table: how often each verdict fell."""
    print(
        f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, {timing.ROUNDS[0]} rounds x {timing.PROCESSES}\n"
    )
    print("| kernel | B does | verdicts on A | speed-up, lowest to highest | plain do_bench: A faster, B faster |")
    print("|---|---|---|---|---|")
    sets = [[torch.randn(4096, 4096).bfloat16() for _ in range(2)] for _ in range(4)]
    files = folder / "product_a.py", folder / "product_b.py"
    for file in files:
        file.write_text(PRODUCT)
    print(row("torch.matmul, bf16, 4096", "0% more", folder, files, sets, runs), flush=True)
    for elements, differences in ((64 * MIB, (1.0, 1.01, 1.03)), (256 * MIB, (1.0, 1.01))):
        sets = [[torch.randn(elements)] for _ in range(4)]
        for more in differences:
            files = kernel(folder, 1.0, "a"), kernel(folder, more, "b")
            print(row(f"scale, {elements // MIB} MiB", f"{more - 1:.0%} more", folder, files, sets, runs), flush=True)


def row(name: str, difference: str, folder: Path, files: tuple[Path, Path], sets: list, runs: int) -> str:
    """One line of the table: `runs` comparisons of two kernels."""
    a, b = (Candidate(CONTEXT, str(file)) for file in files)
    paired = PairedTiming(CONTEXT, "default", [problem.Case(inputs, [], {}, None) for inputs in sets], "")
    paired.load_baseline(b, alone=False)
    paired.load(a)
    verdicts, points, plain = Counter(), [], Counter()
    for number in range(runs):
        comparison = pairing.compare([in_fresh_memory(paired) for _ in range(timing.PROCESSES)])
        verdicts[comparison.verdict] += 1
        points.append(comparison.speedup)
        if number % 4 == 0:
            plain[plain_verdict(paired)] += 1
    shown = ", ".join(f"{verdict} {count}" for verdict, count in verdicts.most_common())
    by_do_bench = f"{plain['A']}, {plain['B']} of {sum(plain.values())}"
    return f"| {name} | {difference} | {shown} | {min(points):.4f} to {max(points):.4f} | {by_do_bench} |"


def in_fresh_memory(paired: PairedTiming) -> pairing.PairedTimes:
    """What one process of a comparison yields."""
    paired.move()
    times = paired.run_rounds(timing.ROUNDS[0], timing.BUDGET_S[0])
    return pairing.PairedTimes(times.a_us, times.b_us)


def plain_verdict(paired: PairedTiming) -> str:
    """Which kernel one do_bench after the other calls faster by 1 % and more: "A", "B" or "-"."""
    a, b = (do_bench(paired.call(name, 0, 0), return_mode="median") for name in "ab")
    return "A" if b > 1.01 * a else "B" if a > 1.01 * b else "-"


def whole(folder: Path, runs: int) -> None:
    """Comparisons as measure_kernel_time.py makes them, each in processes of its own."""
    print(f"\nBy the tool's own processes, {runs} comparisons each of scale, 64 MiB:\n")
    oracle = reference(folder, 64 * MIB)
    with Sandbox("cuda") as sandbox:
        for more in (1.0, 1.01):
            files, verdicts = (kernel(folder, 1.0, "a"), kernel(folder, more, "b")), Counter()
            for _ in range(runs):
                cases = timing.inputs(sandbox, oracle, None, ["default"])
                timed = timing.measure(sandbox, *files, cases)["default"]
                verdicts[pairing.compare(timed.runs).verdict] += 1
            shown = ", ".join(f"{verdict} {count}" for verdict, count in verdicts.most_common())
            print(f"- B does {more - 1:.0%} more: {shown}", flush=True)


def clocks(folder: Path) -> None:
    """GPU time as the tool reports it beside Nsight Compute's."""
    print("\n| kernel | events | GPU time | CUPTI | Nsight Compute | GPU time / Nsight Compute |")
    print("|---|---|---|---|---|---|")
    with Sandbox("cuda") as sandbox:
        for elements in (64 * MIB, 256 * MIB, 1024 * MIB):
            cases = timing.inputs(sandbox, reference(folder, elements), None, ["default"], count=2)
            file = kernel(folder, 1.0, "a")
            timed = timing.measure(sandbox, file, None, cases)["default"].timing
            report = folder / f"{elements}.ncu-rep"
            ncu.collect(sandbox, file, cases["default"][0].path, report, "cold", 120)
            theirs = duration_us(report)
            print(
                f"| scale, {elements // MIB} MiB | {timed.event.median_us:.2f} us | {timed.gpu_us:.2f} us "
                f"| {timed.cupti_us:.2f} us | {theirs:.2f} us | {timed.gpu_us / theirs:.4f} |",
                flush=True,
            )


def duration_us(report: Path) -> float:
    """Nsight Compute's duration of the call, read by the tool that is there for it."""
    command = [sys.executable, TOOLS / "analyze_profile.py", report, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return sum(kernel["duration_us"] for kernel in json.loads(done.stdout)["kernels"])


def gates(folder: Path) -> None:
    """How long a gate takes for a kernel of 1 ms, of which 2 GiB go in and 2 GiB come out."""
    elements = 2048 * MIB
    task = Task(
        platform=None,
        arch=None,
        framework="triton",
        dtype=None,
        tolerance=None,
        shapes=None,
        additional_notes="",
        gpu_wiki_path=None,
        work=None,
        targets=(),
    )
    session = creation.create(folder, "gate", kernel(folder, 1.5, "slow"), reference(folder, elements), task)
    for version, more in (("v0", 1.5), ("v1", 1.0)):
        session.kernel.write_text(KERNEL.format(more=more))
        since = time.monotonic()
        start = RoundStart.of(session)
        measurement = rounds.measure(start, 300, lambda _: None)
        result = rounds.settle(start, version, Optimization("", "", "", ""), measurement, None)
        took = time.monotonic() - since
        latency = RecordStore(session).read(version).latency_us
        print(f"Gate of {version}, a kernel of {latency} us on 2 GiB: {took:.1f} s, {result.decision.reason}")
        print(f"  of them {measurement.seconds}", flush=True)


if __name__ == "__main__":
    cli.run(main)
