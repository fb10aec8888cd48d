#!/usr/bin/env python3
"""The iteration records of a workspace: memory/vN.json, checked against reference/v_iteration.schema.json."""

import contextlib
import json
import sys
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import bundle, cli
from kernelopt.errors import Refused, UsageError
from kernelopt.session import platforms
from kernelopt.session.record_fields import FieldChange, ListChange, differences, field
from kernelopt.session.record_store import SHORT, RecordStore
from kernelopt.session.version_names import version_number
from kernelopt.session.workspace import Workspace

EXAMPLES = """examples:
  memory_manager.py summary --workspace W
  memory_manager.py read --workspace W --version v1 --field performance.latency_us
  memory_manager.py update --workspace W --version v1 --set profile_evidence.bottleneck_type=memory
  memory_manager.py append --workspace W --version v1 --field search_log --item '{"source": "gpu-wiki", …}'
  memory_manager.py history --workspace W --field performance.latency_us
  memory_manager.py diff v1 v2 --workspace W
  memory_manager.py mask --workspace W --version v2 v3"""

VERBS = {
    "init": "make the memory folder",
    "create": "make an empty record",
    "read": "print one record, or all unmasked ones",
    "update": "set fields of a record",
    "append": "add items to a list of a record",
    "mask": "leave versions out of planning",
    "unmask": "take versions back into planning",
    "summary": "a table of the unmasked versions",
    "history": "one field across the unmasked versions",
    "diff": "the fields in which two versions differ",
    "latest": "the highest unmasked version",
    "list": "all versions, masked or not, with times and files",
    "best": "the accepted version to beat",
}
ONE_LINE = json.JSONEncoder(ensure_ascii=False)


def main() -> int:
    args = arguments()
    workspace = Workspace(args.workspace)
    store = RecordStore(workspace)
    code = RUN[args.verb](store, args)
    for message in store.left_out():
        cli.say(f"memory_manager.py: left out: {message}")
    return code


def arguments():
    parser = cli.parser(f"{__doc__}\n\n{EXAMPLES}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="|".join(VERBS))
    for verb, text in VERBS.items():
        sub = verbs.add_parser(verb, help=text, description=text, allow_abbrev=False)
        cli.add_workspace(sub, required=True)
        cli.add_json(sub)
        if verb in ("mask", "unmask"):
            sub.add_argument("--version", nargs="+", action="extend", required=True, help="v1 v2 …")
        elif verb == "diff":
            sub.add_argument("versions", nargs=2, metavar="VERSION", help="from which, to which")
        elif verb in ("create", "read", "update", "append"):
            sub.add_argument("--version", required=verb != "read")
        if verb in ("read", "history", "append"):
            path = "dotted path, for example performance.latency_us"
            sub.add_argument("--field", required=verb != "read", help="the field, a list" if verb == "append" else path)
        if verb == "append":
            sub.add_argument("--item", nargs="+", action="extend", required=True, metavar="JSON", help="an item to add")
        if verb == "update":
            sub.add_argument(
                "--set", nargs="+", action="extend", required=True, metavar="FIELD=VALUE", help="dotted path = value"
            )
    return parser.parse_args()


def run_init(store: RecordStore, args) -> int:
    store.folder.mkdir(exist_ok=True)
    cli.emit({"memory": str(store.folder)}, args.json, [str(store.folder)])
    return 0


def run_create(store: RecordStore, args) -> int:
    if version_number(args.version) > version_number(following := store.next_version()):
        raise UsageError(f"{args.version} would leave a gap; the next version is {following}")
    record = store.create(args.version)
    cli.emit(record.to_json(), args.json, [str(store.path(args.version))])
    return 0


def run_read(store: RecordStore, args) -> int:
    if args.version:
        record = store.recall(args.version).to_json()
        value = field(record, args.field) if args.field else record
        print(value if isinstance(value, str) and not args.json else bundle.dumps(value).rstrip())
        return 0
    if args.field:
        raise UsageError("--field goes with --version; across versions: history --field")
    records = require(store, list(store.scan_json()))
    cli.emit({"records": records}, args.json, [bundle.dumps(records).rstrip()])
    return 0


def require(store: RecordStore, rows: list, kind: str = "unmasked record") -> list:
    """The rows that were made of the records; Refused when there are no rows."""
    if not rows:
        left_out = "".join(f"; left out: {message}" for message in store.left_out())
        raise Refused(f"{store.folder} holds no {kind}{left_out}")
    return rows


def run_update(store: RecordStore, args) -> int:
    pairs = [item.partition("=") for item in args.set]
    for name, sign, _ in pairs:
        if not sign:
            raise UsageError(f"'{name}' has no '='; write FIELD=VALUE")
    record = store.update(args.version, {name: value for name, _, value in pairs})
    cli.emit(record.to_json(), args.json, [str(store.path(args.version))])
    return 0


def run_append(store: RecordStore, args) -> int:
    record = store.append(args.version, args.field, args.item)
    cli.emit(record.to_json(), args.json, [str(store.path(args.version))])
    return 0


def run_mask(store: RecordStore, args) -> int:
    masked = args.verb == "mask"
    store.set_masked(args.version, masked)
    cli.emit({"masked": masked, "versions": args.version}, args.json, [f"{args.verb}ed: {' '.join(args.version)}"])
    return 0


def run_summary(store: RecordStore, args) -> int:
    rows = require(store, [asdict(SummaryRow.of(record)) for record in store.glance(SHORT)])
    titles = list(rows[0])
    table = [[share_title(Workspace(args.workspace)) if title == "floor_pct" else title for title in titles]] + [
        ["-" if row[t] is None else str(row[t]) for t in titles] for row in rows
    ]
    widths = [max(len(line[i]) for line in table) for i in range(len(titles))]
    lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in table]
    cli.emit({"versions": rows}, args.json, lines)
    return 0


def share_title(workspace: Workspace) -> str:
    """The column floor_pct, by what it is a share of. Without a readable Task block it is "floor_pct"."""
    with contextlib.suppress(UsageError):
        if platforms.rests_on_library_rate(workspace, workspace.task()):
            return "library_rate_pct"
    return "floor_pct"


@dataclass(frozen=True)
class SummaryRow:
    """One line of the summary; its fields are the columns, and the keys of the JSON."""

    version: str
    latency_us: float | None
    speedup: float | None
    floor_pct: float | None
    correct: str | None
    gate: str | None
    device: str | None
    commit: str | None
    action: str | None

    @classmethod
    def of(cls, record: dict) -> "SummaryRow":
        """record: the fields SHORT of a record's JSON."""
        performance, comparison = record["performance"], record["performance"]["comparison_with_previous"]
        return cls(
            version=record["version"],
            latency_us=rounded(performance["latency_us"], 2),
            speedup=rounded(comparison["speedup"], 3) if comparison else None,
            floor_pct=rounded(performance["floor_share_pct"], 1),
            correct=record["correctness"]["status"],
            gate=record["quality_gate"]["result"],
            device=record["device"],
            commit=(record["git_commit_hash"] or "")[:10] or None,
            action=record["optimization"]["action_description"],
        )


def rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def run_history(store: RecordStore, args) -> int:
    rows = require(store, store.history(args.field))
    lines = [f"{row.version}  {shown(row.value)}" for row in rows]
    cli.emit({"field": args.field, "versions": [row.to_json() for row in rows]}, args.json, lines)
    return 0


def run_diff(store: RecordStore, args) -> int:
    before, after = args.versions
    changes = differences(store.recall(before), store.recall(after))
    lines = [line for change in changes for line in change_lines(change)] or ["no difference"]
    result = {"from": before, "to": after, "changes": [change.to_json() for change in changes]}
    cli.emit(result, args.json, lines)
    return 0


def change_lines(change: FieldChange | ListChange) -> list[str]:
    """The old value after a minus, the new value after a plus."""
    signed = [("-", value) for value in change.removed] + [("+", value) for value in change.added]
    return [f"{change.field}: {sign} {shown(value)}" for sign, value in signed]


def shown(value) -> str:
    """A field's value on one line: text unchanged, other values as JSON."""
    return " ".join(value.split()) if isinstance(value, str) else ONE_LINE.encode(value)


def run_latest(store: RecordStore, args) -> int:
    (record,) = require(store, list(islice(store.scan_json(highest_first=True), 1)))
    cli.emit(record, args.json, [record["version"]])
    return 0


def run_list(store: RecordStore, args) -> int:
    rows = [
        {name: record[name] for name in ("version", "masked", "timestamp")}
        | {"path": f"{store.folder}/{record['version']}.json"}
        for record in store.glance(("timestamp",), masked=True)
    ]
    require(store, rows, "record")
    lines = [f"{r['version']} {'MASKED ' if r['masked'] else ''}{r['timestamp']} {r['path']}" for r in rows]
    cli.emit({"versions": rows}, args.json, lines)
    return 0


def run_best(store: RecordStore, args) -> int:
    record = store.best()
    if record is None:
        raise Refused("no version is accepted yet; run_gate.py accepts one")
    cli.emit(record.to_json(), args.json, [record.version])
    return 0


RUN = {
    "init": run_init,
    "create": run_create,
    "read": run_read,
    "update": run_update,
    "append": run_append,
    "mask": run_mask,
    "unmask": run_mask,
    "summary": run_summary,
    "history": run_history,
    "diff": run_diff,
    "latest": run_latest,
    "list": run_list,
    "best": run_best,
}

if __name__ == "__main__":
    cli.run(main)
