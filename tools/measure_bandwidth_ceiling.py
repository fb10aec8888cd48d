#!/usr/bin/env python3
"""What this GPU's memory gives to a problem of this very size: its bytes read and written by a kernel that does no more.

Bytes in, bytes out and dtype come from a workspace's work (estimate_work.py) or from options. Cache cold, as verify,
timing and the gate take it; GB/s counts bytes read and written. A small problem cannot reach the maximum of the wiki:
its ceiling is what a latency target can be made of."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import benchmarks, cli
from kernelopt.errors import UsageError
from kernelopt.workspace import Workspace


def main() -> int:
    args = arguments()
    work = asked(args)
    result = benchmarks.run("ceiling", {**work, "rep_ms": args.rep_ms}, args.timeout)
    moved = work["bytes_in"] + work["bytes_out"]
    result |= {"dtype": work["dtype"], "latency_us": moved / result["best"]["median"] / 1e3}
    text = [
        f"{work['bytes_in']} bytes read, {work['bytes_out']} written, {work['dtype']}: "
        f"{result['best']['median']:.1f} GB/s (p20 {result['best']['p20']:.1f}, p80 {result['best']['p80']:.1f}, "
        f"{result['best']['n']} runs), {result['latency_us']:.2f} us, the best of {len(result['rates'])} shapes",
        *benchmarks.state_lines(result),
    ]
    cli.emit(result, args.json, text)
    return 0


def asked(args) -> dict:
    """{bytes_in, bytes_out, dtype} of the workload or of the options."""
    by_hand = {"bytes_in": args.bytes_in, "bytes_out": args.bytes_out, "dtype": args.dtype}
    if args.workspace is None:
        if None in by_hand.values():
            raise UsageError("pass --workspace W, or all of --bytes-in, --bytes-out and --dtype")
        return by_hand
    if set(by_hand.values()) != {None}:
        raise UsageError("--workspace says everything; leave out --bytes-in, --bytes-out and --dtype")
    work = (Workspace(args.workspace).task()["work"] or {}).get(args.workload)
    if work is None:
        raise UsageError(f"the Task block has no work for {args.workload}; run: estimate_work.py --workspace W")
    if work["bytes_in"] is None:
        raise UsageError("the work was given by hand, as one sum; pass --bytes-in, --bytes-out and --dtype instead")
    return {name: work[name] for name in ("bytes_in", "bytes_out", "dtype")}


def arguments():
    parser = cli.parser(__doc__)
    parser.add_argument("--workspace", type=Path, help="a workspace with its work counted")
    parser.add_argument("--workload", default="default", help="which workload (default: the one of get_inputs)")
    parser.add_argument("--bytes-in", type=cli.natural, help="instead of a workspace: bytes read")
    parser.add_argument("--bytes-out", type=cli.natural, help="bytes written")
    parser.add_argument("--dtype", choices=["bf16", "fp16", "fp32", "fp64", "int"], help="of the elements")
    benchmarks.add_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
