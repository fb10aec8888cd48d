#!/usr/bin/env python3
"""Start a GPU node on this machine, for tools that run elsewhere with --on; or check one.

A node runs until Ctrl-C. It listens at 127.0.0.1, which other machines reach through ssh -L; --host opens it to them.
Whoever has its token can run any program there: trusted networks only. Needs: bash scripts/setup.sh distributed"""

import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import cli
from kernelopt.errors import EnvironmentLacks
from kernelopt.remote import nodes
from kernelopt.remote.connection import PORT, Address

EXAMPLES = """examples:
  gpu_node.sh                                      # a node for this machine
  gpu_node.sh --host 10.1.2.3                      # a node for other machines
  gpu_node.sh --check ray://10.1.2.3:10001         # on another machine: can it be used from here?"""


def main() -> int:
    args = arguments()
    if args.check:
        report = nodes.check(args.check)
        cli.emit(asdict(report), args.json, report.lines())
        return EnvironmentLacks.exit_code if report.lacks else 0
    address = Address.parse(f"{args.host}:{args.port}")
    nodes.serve(address, args.gpus, lambda token: announce(address, token, args.json))


def announce(address: Address, token: Path | None, as_json: bool) -> None:
    """Say where the node is, and what its users need."""
    lines = [f"node {address} is ready; Ctrl-C ends it", f"use it: export KERNELOPT_ON={address}"]
    if token:
        lines.append(f"elsewhere also: export RAY_AUTH_TOKEN=...  # the content of {token} on this machine")
    cli.emit({"address": str(address), "token": token and str(token)}, as_json, lines)
    cli.flush()


def arguments():
    parser = cli.parser(f"{__doc__}\n\n{EXAMPLES}", prog="gpu_node.sh")
    parser.add_argument(
        "--host", type=cli.filled, default="127.0.0.1", help="this machine's address (default 127.0.0.1)"
    )
    parser.add_argument("--port", type=cli.positive_int, default=PORT, help=f"default {PORT}")
    parser.add_argument("--gpus", type=cli.natural, metavar="N", help="how many GPUs it has (default: as Ray finds)")
    parser.add_argument("--check", type=cli.filled, metavar="ADDRESS", help="start none; report what this node has")
    cli.add_json(parser)
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
