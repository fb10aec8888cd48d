#!/usr/bin/env python3
"""SASS, PTX or AMDGCN of a kernel: its contents, the part that runs in loops, and the findings.

Counts registers, stack and shared memory; loads and stores by access width; spills; tensor instructions, barriers and
atomics. Needs no GPU; cubins and extensions need cuobjdump (CUDA toolkit, or the copy in Triton's wheel). Of a folder,
files that it cannot read are named and left out; exit code 1 when it can read none.
"""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import bundle, cli
from kernelopt.disassembly import analysis, listing_files, listings
from kernelopt.disassembly.listing_files import Listing
from kernelopt.disassembly.listings import Kernel
from kernelopt.errors import UsageError

EXAMPLES = """examples:
  extract_asm.py ~/.triton/cache --kernel row_softmax --kind sass    every version in Triton's cache, newest first
  extract_asm.py build/my_extension.so --out asm                     a CUDA C++ extension; its code goes to asm/
  extract_asm.py before.cubin --diff after.cubin --out asm           what changed, and asm/diff.sass"""


def main() -> int:
    args = arguments()
    listings = listing_files.read(args.path, args.kind)
    others = listing_files.read(args.diff, args.kind) if args.diff else []
    unread = [listing for listing in (*listings, *others) if listing.why]
    if unread:
        more = f", nor {len(unread) - 1} more files of {len(listings) + len(others)}" if len(unread) > 1 else ""
        cli.say(f"extract_asm.py: {unread[0].why}{more}")
    chosen = listing_files.choose(listings, args.kernel)
    if args.diff:
        compared = pairs(chosen, listing_files.choose(others, args.kernel))
        diffs = [difference(one, two) for one, two in compared]
        key, rows = "diffs", [diff.to_json() for diff in diffs]
        lines = [line for diff in diffs for line in changed(diff)]
        written = write_diffs(compared, args.out) if args.out else []
    else:
        summaries = [(str(listing.file), analysis.summary(kernel)) for listing, kernel in chosen]
        key, rows = "kernels", [{"file": file, **summary.to_json()} for file, summary in summaries]
        lines = [line for file, summary in summaries for line in described(file, summary)]
        written = write(chosen, args.path, args.out) if args.out else []
    left_out = [{"file": str(one.file), "kind": one.kind, "why": one.why} for one in unread]
    cli.emit(
        {key: rows, "written": written, "unread": left_out}, args.json, [*lines, *(f"wrote {path}" for path in written)]
    )
    return 0


def described(file: str, summary: analysis.Summary) -> list[str]:
    """A kernel's summary for people."""
    names = {"registers": "registers", "stack_bytes": "bytes of stack", "static_shared_bytes": "bytes of static shared"}
    known = {name: getattr(summary.resources, key) for key, name in names.items()}
    if summary.kind == "ptx":
        resources = "registers, stack and shared memory: ptxas decides, see the SASS"
    elif None in known.values():
        resources = "registers, stack and shared memory unknown: add the output of cuobjdump -res-usage to the file"
    else:
        resources = ", ".join(f"{value} {name}" for name, value in known.items()) + " memory, "
        resources += dynamic(summary.resources.dynamic_shared_bytes)
    lines = [
        f"{summary.kernel} ({summary.kind}, {summary.arch or 'target unknown'}) {file}",
        f"  {resources}",
        f"  {'':<22}{'bits':>6}{'count':>8}{'in loops':>10}",
        f"  {'all instructions':<22}{'':>6}{summary.instructions:>8}{summary.in_loops:>10}",
    ]
    for row in summary.opcodes:
        lines.append(f"  {row.meaning:<22}{row.bits or '':>6}{row.count:>8}{row.in_loops:>10}  {row.opcode}")
    return [*lines, *(f"  ! {remark.message}" for remark in summary.remarks()), ""]


def dynamic(shared_bytes: int | None) -> str:
    """The shared memory that a launch adds, in words."""
    if shared_bytes is None:
        return "dynamic shared memory is set at launch"
    return f"{shared_bytes} bytes of dynamic shared memory"


def write(chosen: list[tuple[Listing, Kernel]], path: Path, out: Path) -> list[str]:
    """Write the whole listing of each chosen kernel, with the name and folder of its file."""
    written = {}
    for listing, _ in chosen:
        name = listing.file.relative_to(path) if path.is_dir() else Path(listing.file.name)
        target = out / name.with_suffix(f".{listing.kind}")
        written.setdefault(str(target), listing.text)  # the newest, where two files give one name
    for target, text in written.items():
        bundle.write_text(Path(target), text)
    return list(written)


def pairs(chosen: list[tuple], others: list[tuple]) -> list[tuple]:
    """The newest of each kernel on both sides, or the only kernel of each side whatever its name and target."""
    one, two = newest(chosen), newest(others)
    if common := [key for key in one if key in two]:
        return [(one[key], two[key]) for key in common]
    if len(one) == len(two) == 1 and chosen[0][1].kind == others[0][1].kind:
        return [(chosen[0], others[0])]
    names = (
        ", ".join(f"{kernel.name} ({kernel.kind}, {kernel.arch})" for _, kernel in side) for side in (chosen, others)
    )
    raise UsageError(f"no kernel is on both sides: {' against '.join(names)}; --kernel narrows each side down")


def newest(chosen: list[tuple]) -> dict[tuple[str, str, int], tuple[Listing, Kernel]]:
    """The first of each name, kind and generation; nvdisasm prints sm_90 where cuobjdump prints sm_90a."""
    first: dict[tuple[str, str, int], tuple[Listing, Kernel]] = {}
    for listing, kernel in chosen:
        first.setdefault((kernel.name, kernel.kind, analysis.capability(kernel.arch)), (listing, kernel))
    return first


@dataclass(frozen=True)
class Difference:
    """A kernel in two files, `before` and `after`."""

    kernel: str
    kind: str
    arch: str | None
    before: str
    after: str
    changes: list[analysis.Change]
    same_code: bool

    def to_json(self) -> dict:
        return {**asdict(self), "changes": [change.to_json() for change in self.changes]}


def difference(one: tuple[Listing, Kernel], two: tuple[Listing, Kernel]) -> Difference:
    (listing, before), (other, after) = one, two
    return Difference(
        kernel=before.name,
        kind=before.kind,
        arch=before.arch,
        before=str(listing.file),
        after=str(other.file),
        changes=analysis.changes(analysis.summary(before), analysis.summary(after)),
        same_code=analysis.normalised(before) == analysis.normalised(after),
    )


def changed(diff: Difference) -> list[str]:
    """A difference for people."""
    lines = [f"{diff.kernel} ({diff.kind}, {diff.arch or 'target unknown'}) {diff.before} -> {diff.after}"]
    for change in diff.changes:
        before, after = ("unknown" if value is None else value for value in (change.before, change.after))
        lines.append(f"  {change.name:<58}{before} -> {after}")
    return lines if diff.changes else [*lines, f"  same counts, {'same' if diff.same_code else 'other'} code"]


def write_diffs(compared: list[tuple], out: Path) -> list[str]:
    """The changed code of all pairs, one file a kind: `out`/diff.sass."""
    written = []
    for kind in dict.fromkeys(before.kind for (_, before), _ in compared):
        texts = [analysis.unified_diff(one, two) for (_, one), (_, two) in compared if one.kind == kind]
        bundle.write_text(out / f"diff.{kind}", "".join(texts))
        written.append(str(out / f"diff.{kind}"))
    return written


def arguments():
    parser = cli.parser(f"{__doc__}\n{EXAMPLES}")
    parser.add_argument(
        "path",
        type=cli.path,
        metavar="PATH",
        help="a .cubin, .so, .ptx, .sass or .amdgcn file, or a folder: all such files below it (.so left out), newest "
        "first",
    )
    parser.add_argument("--kernel", type=cli.filled, metavar="NAME", help="only this kernel, or those with NAME in it")
    parser.add_argument("--kind", choices=[*listings.KINDS, "all"], default="all", help="default all")
    parser.add_argument("--out", type=cli.path, metavar="DIR", help="write the code there")
    parser.add_argument("--diff", type=cli.path, metavar="OTHER", help="what changed from PATH to OTHER")
    cli.add_json(parser)
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
