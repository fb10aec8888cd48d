#!/usr/bin/env python3
"""What limits a profiled kernel, which counters say so, and what to try. Needs no GPU.

PATH: a folder of profile_kernel.sh, its metrics.json, or any .ncu-rep (whose whole report is taken as one call).
exit 1: nothing could be classified."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import cli, diagnosis, metrics, profile_report


def main() -> int:
    parser = cli.parser(__doc__)
    parser.add_argument("path", type=Path, metavar="PATH")
    parser.add_argument("--findings", type=cli.positive_int, default=5, help="how many findings at most (default 5)")
    cli.add_json(parser)
    args = parser.parse_args()
    profile = profile_report.load(args.path)
    found = diagnosis.analyse(profile, metrics.thresholds())
    found["findings"] = found["findings"][: args.findings]
    result = {"origin": profile_report.origin(profile["params"]), **found}
    cli.emit(result, args.json, lines(result))
    return 1 if found["classification"]["class"] == "unknown" else 0


def lines(result: dict) -> list[str]:
    text = [result["origin"]]
    for kernel in result["kernels"]:
        share = profile_report.number(kernel["share_pct"])
        text.append(
            f"{share:>5} %  {profile_report.number(kernel['duration_us'])} us  {kernel['class']:14} {kernel['name']}"
        )
    text.append(profile_report.summary_line(result))
    for finding in result["findings"]:
        text += profile_report.finding_lines(finding)
    if result["missing_metrics"]:
        text.append(f"not collected: {', '.join(result['missing_metrics'])}")
    return text


if __name__ == "__main__":
    cli.run(main)
