#!/usr/bin/env python3
"""Calibrates this card: memory bandwidth and matrix products, from rest and back to back, as a page of the wiki's form.

With --workspace W the page is W/calibration.md, and W's Task block names it: roofline and targets then use these
measurements. This also gives a page to a card that the wiki lacks. With --out the page is a file for other workspaces
of this card (workspace_init.sh --calibration FILE). It takes about a minute and leaves clocks alone.
"""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import bundle, cli
from kernelopt.device import gpu
from kernelopt.errors import Refused, TimedOut, UsageError
from kernelopt.hardware import wiki
from kernelopt.measure import card_rates
from kernelopt.session import calibration, ceiling_rows, platforms, record_store, roofline_section
from kernelopt.session.benchmark_reports import Report
from kernelopt.session.workspace import Workspace

SIZES = [1 << power for power in range(20, 33, 2)]  # 1 MiB to 4 GiB
LARGEST_PRODUCT = 8192
BENCH_MS = 100  # of do_bench, as kernels are timed here
PAUSE_S, SUSTAINED_S = 0.5, 2.0
SMALL = 4096  # bytes of the side of a mix that hardly counts


def main() -> int:
    args = arguments()
    start = time.monotonic()
    workspace = Workspace(args.workspace) if args.workspace else None
    target = workspace.root / platforms.CALIBRATION if workspace else args.out
    page, limits = pages_of(gpu.identify().name, workspace)
    check(workspace, target)
    measured = measure(limits, args.timeout)
    had = has_ceilings(target)
    command = f"python tools/calibrate_gpu.py {'--workspace W' if workspace else '--out FILE'}"
    fresh = calibration.body(measured, page, limits, record_store.now()[:10], command)
    if had:
        fresh = ceiling_rows.carried_over(fresh, platforms.unsealed_text(target), measured.device)
    bundle.write_text(target, platforms.sealed(fresh))
    made = platforms.read(target)
    if workspace:
        name_it(workspace, made)
    result = {
        "page": str(target),
        "platform": made.platform,
        "device": measured.device.name,
        "values": [row.citation for row in made.rows.values()],
        "seconds": round(time.monotonic() - start, 1),
    }
    lines = [*result["values"], f"{target}: {len(made.rows)} values of {made.platform}, in {result['seconds']} s"]
    cli.emit(result, args.json, lines + next_step(workspace))
    if had:
        cli.say(f"calibrate_gpu.py: {of_former_ceilings(has_ceilings(target))}")
    if others := calibration.foreign_processes(measured):
        cli.say(
            f"calibrate_gpu.py: other processes used this GPU meanwhile ({', '.join(map(str, others))}), so its rates "
            "may be too low; end them and measure again"
        )
    return 0


def pages_of(device: str, workspace: Workspace | None) -> tuple[wiki.Page | None, wiki.Page | None]:
    """(the wiki's page of the device, the limits of its compute capability), each None when the wiki lacks it."""
    root = wiki.root(workspace.task().gpu_wiki_path if workspace else None)
    try:
        page = wiki.find(device, wiki.pages(root))
        return page, page.limits
    except Refused:
        capability = gpu.query().get("compute_capability", "")
        return None, wiki.limit_pages(root).get(f"sm_{capability.replace('.', '')}")


def check(workspace: Workspace | None, target: Path) -> None:
    """UsageError: the page cannot be written, the task is for another card, or the file is no calibration."""
    if not os.access(target.parent, os.W_OK):
        raise UsageError(f"{target.parent} is not a writable folder; name a page in another: --out FILE")
    if workspace:
        platforms.check_platform(workspace, workspace.task(), gpu.identify().name)
    elif target.exists() and not is_calibration_of(target, gpu.identify().name):
        raise UsageError(f"{target} exists and is no calibration of this card; name another file")


def of_former_ceilings(carried_over: bool) -> str:
    """The message about the ceilings of the former page."""
    if carried_over:
        return "the page keeps this card's ceilings of tensor operations; to measure them again: measure_ceiling.py"
    return "the page's ceilings were another card's and are gone; measure this card's: measure_ceiling.py --workspace W"


def has_ceilings(path: Path) -> bool:
    """Does the page hold what measure_ceiling.py measured?"""
    try:
        return any(row.source == ceiling_rows.SOURCE for row in platforms.read(path).rows.values())
    except UsageError:
        return False


def is_calibration_of(path: Path, device: str) -> bool:
    try:
        return wiki.normalised(device) in wiki.spellings(platforms.read(path))
    except UsageError:
        return False


def measure(limits: wiki.Page | None, timeout_s: float) -> calibration.Measured:
    """Run each dtype and each mix in a separate job, so that a failure loses no other result."""
    with card_rates.jobs(timeout_s) as (device, job):
        properties, limit_w = gpu.query(), gpu.power_limit_w()
        cli.say(f"calibrate_gpu.py: measuring {device.name}: bandwidth")
        bandwidth = job("bandwidth", sizes=SIZES, rep_ms=BENCH_MS, warm=False)
        if not bandwidth.rates:
            raise card_rates.Failed("not even 4 MiB of the GPU's memory are free; end what uses it")
        largest = max(one.buffer_bytes for one in bandwidth.rates)
        mixes = {"copy": (largest, largest), "read": (largest, SMALL), "write": (SMALL, largest)}
        ceilings = {
            pattern: tried(job, "ceiling", bytes_in=read, bytes_out=written, dtype="fp32", rep_ms=BENCH_MS)
            for pattern, (read, written) in mixes.items()
        }
        products = {}
        for dtype in calibration.DTYPES:
            cli.say(f"calibrate_gpu.py: products in {dtype}")
            products[dtype] = calibration.lacks(dtype, limits) or tried(
                job,
                "product_rates",
                dtype=dtype,
                largest=LARGEST_PRODUCT,
                rep_ms=BENCH_MS,
                pause_s=PAUSE_S,
                sustained_s=SUSTAINED_S,
            )
    return calibration.Measured(device, properties, limit_w, bandwidth, ceilings, products)


def tried(job: card_rates.Job, name: str, **arguments) -> Report | str:
    """The job's report, or the reason why it failed."""
    try:
        return job(name, **arguments)
    except (card_rates.Failed, TimedOut) as error:
        return str(error)


def name_it(workspace: Workspace, made: wiki.Page) -> None:
    """The Task block names the page, and its platform where it named none."""
    task = replace(workspace.task(), calibration=platforms.CALIBRATION)
    if task.platform is None:
        task = replace(task, platform=made.platform, arch=made.architecture)
    workspace.update_readme(task, roofline_section.renewed(workspace, task))


def next_step(workspace: Workspace | None) -> list[str]:
    if workspace is None:
        return ["use it: workspace_init.sh NAME KERNEL --calibration FILE"]
    return [f"now: compute_utilization.py --workspace {workspace.root} --set-targets"]


def arguments():
    parser = cli.parser(__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    cli.add_workspace(where)
    where.add_argument("--out", type=cli.path, help="a file for the page")
    cli.add_timeout(parser, 60, "for each measurement")
    cli.add_json(parser)
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
