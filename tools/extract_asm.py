#!/usr/bin/env python3
"""SASS, PTX or AMDGCN of a kernel: what it holds, how much of that runs in loops, and what stands out.

Counts registers, stack and shared memory; loads and stores by access width; spills; tensor instructions, barriers and
atomics. Needs no GPU; cubins and extensions need cuobjdump (CUDA toolkit, or the copy in Triton's wheel).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernelopt import bundle, cli, disassembly
from kernelopt.disassembly import Kernel, Listing
from kernelopt.errors import UsageError

EXAMPLES = """examples:
  extract_asm.py ~/.triton/cache --kernel row_softmax --kind sass    every version in Triton's cache, newest first
  extract_asm.py build/my_extension.so --out asm                     a CUDA C++ extension; its code goes to asm/
  extract_asm.py before.cubin --diff after.cubin --out asm           what changed, and asm/diff.sass"""


def main() -> int:
    args = arguments()
    listings = disassembly.read(args.path, args.kind)
    chosen = disassembly.choose(listings, args.kernel)
    if args.diff:
        others = disassembly.choose(disassembly.read(args.diff, args.kind), args.kernel)
        result, lines = compared(pairs(chosen, others), args.out)
    else:
        kernels = [{"file": str(listing.file), **disassembly.summary(kernel)} for listing, kernel in chosen]
        written = write(chosen, args.path, args.out) if args.out else []
        result = {"path": str(args.path), "kernels": kernels, "written": written}
        lines = [line for found in kernels for line in described(found)] + [f"wrote {path}" for path in written]
    cli.emit(result, args.json, lines)
    return 0


def described(found: dict) -> list[str]:
    """A kernel's summary for people."""
    names = {"registers": "registers", "stack_bytes": "bytes of stack", "static_shared_bytes": "bytes of static shared"}
    known = {name: found["resources"][key] for key, name in names.items()}
    if found["kind"] == "ptx":
        resources = "registers, stack and shared memory: ptxas decides, see the SASS"
    elif None in known.values():
        resources = "registers, stack and shared memory unknown: add the output of cuobjdump -res-usage to the file"
    else:
        resources = ", ".join(f"{value} {name}" for name, value in known.items()) + " memory"
    lines = [
        f"{found['kernel']} ({found['kind']}, {found['arch'] or 'target unknown'}) {found['file']}",
        f"  {resources}",
        f"  {'':<22}{'bits':>6}{'count':>8}{'in loops':>10}",
        f"  {'all instructions':<22}{'':>6}{found['instructions']:>8}{found['in_loops']:>10}",
    ]
    for row in found["classes"]:
        lines.append(
            f"  {row['class']:<22}{row['bits'] or '':>6}{row['count']:>8}{row['in_loops']:>10}  {row['opcode']}",
        )
    return [*lines, *(f"  ! {note['message']}" for note in found["stands_out"]), ""]


def write(chosen: list[tuple[Listing, Kernel]], path: Path, out: Path) -> list[str]:
    """Each listing with a chosen kernel, whole, under its file's own name and folder."""
    written = {}
    for listing, _ in chosen:
        name = listing.file.relative_to(path) if path.is_dir() else Path(listing.file.name)
        target = out / name.with_suffix(f".{listing.kind}")
        written.setdefault(str(target), listing.text)  # the newest, where two files give one name
    for target, text in written.items():
        bundle.write_text(Path(target), text)
    return list(written)


def pairs(chosen: list, others: list) -> list[tuple]:
    """The newest of each kernel on both sides; two kernels of different names where each side has only one."""
    one, two = newest(chosen), newest(others)
    if common := [key for key in one if key in two]:
        return [(one[key], two[key]) for key in common]
    if len(one) == len(two) == 1 and {kind for _, kind in one} == {kind for _, kind in two}:
        return [(*one.values(), *two.values())]
    names = " against ".join(", ".join(sorted({name for name, _ in side})) for side in (one, two))
    raise UsageError(f"no kernel is on both sides: {names}; --kernel narrows each side down")


def newest(chosen: list[tuple[Listing, Kernel]]) -> dict:
    return {(kernel.name, kernel.kind): (listing, kernel) for listing, kernel in reversed(chosen)}


def compared(found: list[tuple], out: Path | None) -> tuple[dict, list[str]]:
    """(result, lines) of a comparison; the changed code goes to `out`/diff.KIND."""
    diffs, lines, texts = [], [], {}
    for (listing, before), (other, after) in found:
        changed = disassembly.changes(disassembly.summary(before), disassembly.summary(after))
        same = disassembly.normalised(before) == disassembly.normalised(after)
        texts.setdefault(before.kind, []).append((before, after))
        files = {"before": str(listing.file), "after": str(other.file)}
        diffs.append(
            {"kernel": before.name, "kind": before.kind, **files, "changes": changed, "same_code": same},
        )
        lines.append(f"{before.name} ({before.kind}) {listing.file} -> {other.file}")
        shown = ({key: "unknown" if value is None else value for key, value in row.items()} for row in changed)
        lines += [f"  {row['what']:<58}{row['before']} -> {row['after']}" for row in shown]
        lines += [] if changed else [f"  the counts are the same, and the code {'too' if same else 'differs'}"]
    written = []
    for kind, versions in texts.items() if out else ():
        text = "".join(disassembly.unified_diff(before, after) for before, after in versions)
        bundle.write_text(out / f"diff.{kind}", text)
        written.append(str(out / f"diff.{kind}"))
    return {"diffs": diffs, "written": written}, [*lines, *(f"wrote {path}" for path in written)]


def arguments():
    parser = cli.parser(f"{__doc__}\n{EXAMPLES}")
    parser.add_argument(
        "path",
        type=cli.folder,
        metavar="PATH",
        help="a .cubin, .so, .ptx, .sass or .amdgcn file, or a folder: all such files below it (.so left out), newest "
        "first",
    )
    parser.add_argument("--kernel", type=cli.filled, metavar="NAME", help="only this kernel, or those with NAME in it")
    parser.add_argument("--kind", choices=[*disassembly.KINDS, "all"], default="all", help="default all")
    parser.add_argument("--out", type=cli.folder, metavar="DIR", help="write the code there")
    parser.add_argument("--diff", type=cli.folder, metavar="OTHER", help="what changed from PATH to OTHER")
    cli.add_json(parser)
    return parser.parse_args()


if __name__ == "__main__":
    cli.run(main)
