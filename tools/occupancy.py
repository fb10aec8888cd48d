#!/usr/bin/env python3
"""Theoretical occupancy of a launch and what limits it, from the wiki's limits of the architecture."""

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import cli
from kernelopt.errors import Refused, UsageError
from kernelopt.hardware import occupancy, wiki

WORDS = {  # a warp, a block, and what holds blocks
    "sm": ("warps", "blocks", "an SM"),
    "cu": ("wavefronts", "workgroups", "a compute unit"),
    "wgp": ("wavefronts", "workgroups", "a workgroup processor"),
}
EXAMPLES = """examples:
  occupancy.py --platform H200 --threads 256 --registers 64
  occupancy.py --platform sm_80 --threads 128 --registers 96 --shared-bytes 49152
  occupancy.py --platform MI300X --threads 256 --registers 128 --scalar-registers 40 --shared-bytes 32768"""


def main() -> int:
    args = arguments()
    limits = limits_of(args.platform, wiki.root(args.gpu_wiki))
    result = occupancy.occupancy(limits, args.threads, args.registers, args.shared_bytes, args.scalar_registers)
    citations = [row.citation for name in occupancy.needed(limits) if (row := limits.known(name))]
    by_limit = ", ".join(f"{name} {blocks}" for name, blocks in result.blocks_by_limit.items())
    warps, blocks, sm = WORDS[occupancy.unit_of(limits) if limits.vendor == "AMD" else "sm"]
    held = f"{result.warps_per_sm} {warps} in {result.blocks_per_sm} {blocks} {sm}"
    text = [
        f"occupancy {result.occupancy_pct:.1f} %: {held}",
        f"limited by {', '.join(result.limiters)} ({blocks} that each limit allows: {by_limit})",
    ]
    answer = {"platform": args.platform, **dataclasses.asdict(result), "citations": citations}
    cli.emit(answer, args.json, [*text, *citations])
    return 0 if result.blocks_per_sm else 1


def limits_of(name: str, root: Path) -> wiki.Page:
    """The limits of a product, of a compute capability (sm_90, sm_90a, 9.0) or of a gfx target."""
    limits = list(wiki.limit_pages(root).values())
    target = wiki.normalised(occupancy.plain_target(name))
    for page in limits:
        if target in wiki.spellings(page):
            return page
    try:
        page = wiki.find(name, wiki.pages(root))
    except Refused as error:
        raise Refused(f"{error}; limits are known for: {', '.join(page.platform for page in limits)}") from None
    if page.limits is None:
        raise UsageError(f"the wiki has no limits page for {page.platform}")
    return page.limits


def arguments():
    parser = cli.parser(f"{__doc__}\n\n{EXAMPLES}")
    parser.add_argument("--platform", type=cli.filled, required=True, help="a product, or a target: H200, sm_90a")
    parser.add_argument("--threads", type=cli.positive_int, required=True, help="threads per block")
    parser.add_argument("--registers", type=cli.natural, required=True, help="per thread; AMD: vector registers")
    parser.add_argument("--scalar-registers", type=cli.natural, default=0, help="AMD: per wavefront (default 0)")
    parser.add_argument(
        "--shared-bytes",
        type=cli.natural,
        default=0,
        help="shared memory or LDS per block, static and dynamic (default 0)",
    )
    cli.add_gpu_wiki(parser)
    cli.add_json(parser)
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
