#!/usr/bin/env python3
"""Which worked examples compile for which GPUs, with what registers and spills; none of these GPUs need be here.

python benchmarks/portability.py [NAME ...] compiles them and writes docs/portability.json, which keeps the rows of
examples that were not asked for, and docs/portability.md. `--page` writes the page from the file alone. Where a Triton
kernel spills or does not fit, other constants are tried, in the order of CONSTANTS; the first that fit are told.
"""

import argparse
import datetime
import json
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
from kernelopt import bundle
from kernelopt.compiling import choosing, compiler, table
from kernelopt.compiling.compiled import Compiled, reason
from kernelopt.device.sandbox import Sandbox
from kernelopt.hardware.targets import Target
from kernelopt.session.digests import digest
from kernelopt.session.subject import KernelUnderTest
from kernelopt.statuses import Status

EXAMPLES = ROOT / "examples"
JSON, PAGE = ROOT / "docs/portability.json", ROOT / "docs/portability.md"
TARGETS = "sm_75 sm_80 sm_89 sm_90 sm_100 sm_120 gfx90a gfx942 gfx950 gfx1100 gfx1201 gfx1250".split()
# The kernel of each example, and the first version where that is in Triton and the kernel is not. Those in CuTe DSL
# take NVIDIA's own compiler.
FILES = [
    "add_rms_norm_fp8/kernel.py",
    "attention/kernel.py",
    "attention/versions/v0_kernel.py",
    "cross_entropy/kernel.py",
    "depthwise_conv/kernel.py",
    "depthwise_conv/versions/v0_kernel.py",
    "gemm_fused/versions/v0_kernel.py",
    "matvec/kernel.py",
    "maxpool3d/kernel.py",
    "maxpool3d/versions/v0_kernel.py",
    "rmsnorm/kernel.py",
    "row_softmax/one_pass.py",
    "row_softmax/three_passes.py",
    "transposed_conv3d/kernel.py",
    "transposed_conv3d/versions/v0_kernel.py",
]
# A text of a kernel and what to put in its place, one pair after the other, until it fits.
ATTENTION = '"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3'
CONSTANTS = {
    "attention/versions/v0_kernel.py": [
        ('"num_stages": 3', '"num_stages": 2'),
        ('"num_stages": 3', '"num_stages": 1'),
        (ATTENTION, '"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 8, "num_stages": 1'),
        (ATTENTION, '"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 8, "num_stages": 1'),
    ],
    "gemm_fused/versions/v0_kernel.py": [
        ("num_stages=3", "num_stages=2"),
        ("num_stages=3", "num_stages=1"),
        ("128, 128, 64, num_warps=8, num_stages=3", "128, 128, 32, num_warps=8, num_stages=2"),
    ],
    "matvec/kernel.py": [
        *(("STAGES = 5", f"STAGES = {stages}") for stages in (4, 3, 2)),
        ("ROWS, BLOCK, WARPS = 4, 2048, 8", "ROWS, BLOCK, WARPS = 4, 1024, 8"),
    ],
    "transposed_conv3d/versions/v0_kernel.py": [("POSITIONS = 128", f"POSITIONS = {count}") for count in (64, 32, 16)],
}
TASK = re.compile(r"^```json\n(.*?)^```", re.DOTALL | re.MULTILINE)  # in the README of an example
ERROR_CHARACTERS = 160


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="*", help="beginnings of paths in examples/ (default: all)")
    parser.add_argument("--page", action="store_true", help="compile nothing, write the page")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for a kernel and all targets (default 600)")
    args = parser.parse_args()
    wanted = [file for file in FILES if not args.name or file.startswith(tuple(args.name))]
    known = bundle.read_json(JSON)["kernels"] if JSON.is_file() else {}
    for file in [] if args.page else wanted:
        known[file] = of_file(file, args.timeout)
        bundle.write_json(JSON, {"kernels": {name: known[name] for name in FILES if name in known}})
    PAGE.write_text(page(known), encoding="utf-8")
    return 0


def of_file(file: str, timeout_s: float) -> dict:
    """The rows of a kernel, one for each target."""
    import triton

    source = (EXAMPLES / file).read_text(encoding="utf-8")
    results = compiled(file, source, [choosing.of_name(name, None) for name in TARGETS], timeout_s)
    rows = {one.target.arch: row(one) for one in results}
    left = [one.target for one in results if may_fit(one)]
    for old, new in CONSTANTS.get(file, []):
        if old not in source:
            raise SystemExit(f"{file} has no {old!r}: CONSTANTS is out of date")
        for one in compiled(file, source.replace(old, new), left, timeout_s) if left else []:
            if one.status == Status.OK and not may_fit(one):
                rows[one.target.arch]["fits_with"] = {"constants": new, **row(one)}
        left = [target for target in left if "fits_with" not in rows[target.arch]]
    made = {"sha256": digest(EXAMPLES / file), "triton": triton.__version__}
    return {**made, "date": datetime.date.today().isoformat(), "targets": rows}


def compiled(file: str, source: str, targets: list[Target], timeout_s: float) -> list[Compiled]:
    """The source in place of the file's, compiled for the targets."""
    folder = EXAMPLES / file.partition("/")[0]
    readme = folder / "README.md"
    task = TASK.search(readme.read_text(encoding="utf-8")) if readme.is_file() else None
    dtype = json.loads(task[1])["dtype"] if task else None
    print(f"{file}: {', '.join(target.arch for target in targets)}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as made, Sandbox("cpu-interpreter") as sandbox:
        kernel = Path(made) / Path(file).name
        kernel.write_text(source, encoding="utf-8")
        subject = KernelUnderTest(kernel, folder / "reference.py", dtype)
        return compiler.compile_target(sandbox, subject, "default", targets, compiler.Limits.of(timeout_s))


def may_fit(one: Compiled) -> bool:
    """Does it spill, or take too much memory, so that other constants may fit?"""
    return one.status == Status.LAUNCH_ERROR or any(kernel.spills for kernel in one.chosen)


def row(one: Compiled) -> dict:
    """A target in the file."""
    kernels = [
        {
            "name": kernel.name,
            "registers": table.registers(kernel),
            "spill_bytes": kernel.spill_bytes,
            "spilled_scalar_registers": kernel.spilled_scalar_registers,
            "shared_bytes": kernel.shared_bytes,
            "tensor_instructions": table.tensor(kernel),
            "occupancy_pct": kernel.occupancy_pct,
        }
        for kernel in one.chosen
    ]
    state = {
        "status": str(one.status),
        "lacking": bool(one.lacking),
        "error": reason(one.error)[:ERROR_CHARACTERS] or None,
    }
    return {**state, "kernels": kernels}


# --- the page ---------------------------------------------------------------------------------------------------------

HEAD = """# Portability of the examples

The examples were optimised on an H200. This page says what their kernels become on other GPUs: compiled here, not run.
It says nothing about speed. `python benchmarks/portability.py` compiled them with Triton {triton} and, for CUDA C++,
nvcc 13.0, and wrote this page from [portability.json](portability.json).

A cell has the registers of a thread (AMD: vector+accumulation,scalar), the bytes that it spills (s: scalar registers),
and the tensor instructions in the code. Of several kernels it shows the one with the most registers, and the most
spills of any.

| cell | means |
|---|---|
| refused | the compiler refuses it |
| too large | a block takes more shared memory or LDS than the GPU has |
| no hipcc | CUDA C++ for AMD takes hipcc, which was not here |
| time | not compiled in ten minutes |
"""


def page(kernels: dict[str, dict]) -> str:
    """The page from the file's rows."""
    versions = sorted({entry["triton"] for entry in kernels.values()})
    text = [HEAD.format(triton=", ".join(versions))]
    for title, arches in (("NVIDIA", "sm_"), ("AMD", "gfx")):
        names = [name for name in next(iter(kernels.values()))["targets"] if name.startswith(arches)]
        text += [f"## {title}", "", f"| kernel | {' | '.join(names)} |", f"|---{'|---' * len(names)}|"]
        for file, entry in kernels.items():
            text.append(f"| {link(file)} | {' | '.join(cell(entry['targets'][name]) for name in names)} |")
        text.append("")
    text += ["## Constants that fit", "", *constants(kernels), "", "## Why it is refused", "", *refusals(kernels)]
    return "\n".join(text).rstrip() + "\n"


def link(file: str) -> str:
    name = re.sub(r"(/kernel|_kernel)?\.py$", "", file)
    return f"[{name}](../examples/{file})"


def cell(row: dict) -> str:
    if row["status"] != Status.OK:
        words = {Status.LAUNCH_ERROR: "too large", Status.TIMEOUT: "time"}
        return "no hipcc" if row["lacking"] else words.get(row["status"], "refused")
    main = max(row["kernels"], key=lambda kernel: sum(map(int, re.findall(r"\d+", kernel["registers"].split(",")[0]))))
    spills = {unit: max(kernel[key] or 0 for kernel in row["kernels"]) for key, unit in SPILLS.items()}
    spilled = "+".join(f"{amount}{unit}" for unit, amount in spills.items() if amount)
    parts = [main["registers"], f"**{spilled} spilled**" if spilled else "", main["tensor_instructions"].strip("-")]
    return " ".join(part for part in parts if part)


SPILLS = {"spill_bytes": "", "spilled_scalar_registers": "s"}


def constants(kernels: dict[str, dict]) -> list[str]:
    """Where other constants fit, and where none that was tried does."""
    lines = ["| kernel | target | as shipped | constants that fit | then |", "|---|---|---|---|---|"]
    for file, entry in kernels.items():
        for name, row in entry["targets"].items():
            shipped = cell(row)
            if "fits_with" in row:
                fitting = row["fits_with"]
                lines.append(f"| {link(file)} | {name} | {shipped} | `{fitting['constants']}` | {cell(fitting)} |")
            elif "spilled" in shipped or shipped == "too large":
                none = "none of those tried" if file in CONSTANTS else "none tried"
                lines.append(f"| {link(file)} | {name} | {shipped} | {none} | |")
    return lines


def refusals(kernels: dict[str, dict]) -> list[str]:
    """The compiler's first words, with the targets that they are for."""
    lines = ["| kernel | target | the compiler says |", "|---|---|---|"]
    for file, entry in kernels.items():
        told: dict[str, list[str]] = {}
        for name, row in entry["targets"].items():
            if cell(row) == "refused":
                told.setdefault(row["error"], []).append(name)
        for error, names in told.items():
            lines.append(f"| {link(file)} | {', '.join(names)} | `{error.replace('|', ' ').replace('`', '')}` |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
