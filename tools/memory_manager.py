#!/usr/bin/env python3
"""The iteration records of a workspace: memory/vN.json, checked against reference/v_iteration.schema.json."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import bundle, cli
from kernelopt.errors import Refused, UsageError
from kernelopt.memory import Memory, field
from kernelopt.workspace import Workspace

EXAMPLES = """examples:
  memory_manager.py summary --workspace W
  memory_manager.py read --workspace W --version v1 --field performance.latency_us
  memory_manager.py update --workspace W --version v1 --set profile_evidence.bottleneck_type=memory
  memory_manager.py mask --workspace W --version v2 v3"""

VERBS = {
    "init": "make the memory folder",
    "create": "make an empty record",
    "read": "print one record, or all unmasked ones",
    "update": "set fields of a record",
    "mask": "leave versions out of planning",
    "unmask": "take versions back into planning",
    "summary": "a table of all versions",
    "latest": "the highest unmasked version",
    "list": "versions, times and files",
    "best": "the accepted version to beat",
}


def main() -> int:
    args = arguments()
    workspace = Workspace(args.workspace)
    memory = Memory(workspace)
    code = globals()[f"run_{args.verb}"](memory, args)
    for message in memory.broken:
        cli.say(f"memory_manager.py: left out: {message}")
    return code


def arguments():
    parser = cli.parser(f"{__doc__}\n\n{EXAMPLES}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="|".join(VERBS))
    for verb, text in VERBS.items():
        sub = verbs.add_parser(verb, help=text, description=text, allow_abbrev=False)
        sub.add_argument("--workspace", type=Path, required=True)
        cli.add_json(sub)
        if verb in ("mask", "unmask"):
            sub.add_argument("--version", nargs="+", action="extend", required=True, help="v1 v2 …")
        elif verb in ("create", "read", "update"):
            sub.add_argument("--version", required=verb != "read")
        if verb == "read":
            sub.add_argument("--field", help="dotted path, for example performance.latency_us")
        if verb == "update":
            sub.add_argument(
                "--set", nargs="+", action="extend", required=True, metavar="FIELD=VALUE", help="dotted path = value"
            )
    return parser.parse_args()


def run_init(memory: Memory, args) -> int:
    memory.folder.mkdir(exist_ok=True)
    cli.emit({"memory": str(memory.folder)}, args.json, [str(memory.folder)])
    return 0


def run_create(memory: Memory, args) -> int:
    record = memory.create(args.version)
    cli.emit(record, args.json, [str(memory.path(args.version))])
    return 0


def run_read(memory: Memory, args) -> int:
    if args.version:
        record = memory.read(args.version)
        if record["masked"]:
            raise Refused(f"{args.version} is masked: discarded memory, not to be used for planning")
        found = field(record, args.field) if args.field else record
        print(found if isinstance(found, str) and not args.json else bundle.dumps(found).rstrip())
        return 0
    records = require(memory)
    if args.field:
        records = [{"version": r["version"], args.field: field(r, args.field)} for r in records]
    cli.emit({"records": records}, args.json, [bundle.dumps(records).rstrip()])
    return 0


def require(memory: Memory, masked: bool = False) -> list[dict]:
    records = memory.records(masked)
    if not records:
        broken = "".join(f"; left out: {message}" for message in memory.broken)
        raise Refused(f"{memory.folder} holds no {'' if masked else 'unmasked '}record{broken}")
    return records


def run_update(memory: Memory, args) -> int:
    pairs = [item.partition("=") for item in args.set]
    for name, sign, _ in pairs:
        if not sign:
            raise UsageError(f"'{name}' has no '='; write FIELD=VALUE")
    record = memory.update(args.version, {name: value for name, _, value in pairs})
    cli.emit(record, args.json, [str(memory.path(args.version))])
    return 0


def run_mask(memory: Memory, args) -> int:
    masked = args.verb == "mask"
    memory.set_masked(args.version, masked)
    cli.emit({"masked": masked, "versions": args.version}, args.json, [f"{args.verb}ed: {' '.join(args.version)}"])
    return 0


run_unmask = run_mask


def run_summary(memory: Memory, args) -> int:
    rows = [summarise(record) for record in require(memory, masked=True)]
    titles = list(rows[0])
    table = [titles] + [["-" if row[t] is None else str(row[t]) for t in titles] for row in rows]
    widths = [max(len(line[i]) for line in table) for i in range(len(titles))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in table]
    cli.emit({"versions": rows}, args.json, lines)
    return 0


def summarise(record: dict) -> dict:
    if record["masked"]:  # what is masked must not reach planning: its existence, and nothing that was learnt
        hidden = ("latency_us", "speedup", "floor_pct", "correct", "gate", "device", "commit", "action")
        return {"version": record["version"], "masked": "yes", **dict.fromkeys(hidden)}
    performance, comparison = record["performance"], record["performance"]["comparison_with_previous"]
    return {
        "version": record["version"],
        "masked": "no",
        "latency_us": rounded(performance["latency_us"], 2),
        "speedup": rounded(comparison["speedup"], 3) if comparison else None,
        "floor_pct": rounded(performance["floor_share_pct"], 1),
        "correct": record["correctness"]["status"],
        "gate": record["quality_gate"]["result"],
        "device": record["device"],
        "commit": (record["git_commit_hash"] or "")[:10] or None,
        "action": record["optimization"]["action_description"],
    }


def rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def run_latest(memory: Memory, args) -> int:
    record = require(memory)[-1]
    cli.emit(record, args.json, [record["version"]])
    return 0


def run_list(memory: Memory, args) -> int:
    rows = [
        {
            "version": r["version"],
            "masked": r["masked"],
            "timestamp": r["timestamp"],
            "path": str(memory.path(r["version"])),
        }
        for r in require(memory, masked=True)
    ]
    lines = [f"{r['version']} {'MASKED ' if r['masked'] else ''}{r['timestamp']} {r['path']}" for r in rows]
    cli.emit({"versions": rows}, args.json, lines)
    return 0


def run_best(memory: Memory, args) -> int:
    record = memory.best()
    if record is None:
        raise Refused("no version is accepted yet; run_gate.py accepts one")
    cli.emit(record, args.json, [record["version"]])
    return 0


if __name__ == "__main__":
    cli.run(main)
