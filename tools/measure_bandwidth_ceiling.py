#!/usr/bin/env python3
"""The former name of `measure_ceiling.py --only bandwidth`; it prints the former keys.

Measures this GPU's memory on a problem's size: a kernel reads and writes the problem's bytes and does nothing else,
with a cold cache."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import measure_ceiling
from kernelopt import cli


def main() -> int:
    args = measure_ceiling.arguments(__doc__)
    args.only = "bandwidth"
    result, text = measure_ceiling.measured(args)
    target = {"target": result["target"]} if "target" in result else {}
    cli.emit(result["bandwidth"] | target, args.json, text)
    return 0


if __name__ == "__main__":
    cli.run(main)
