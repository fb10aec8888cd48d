#!/usr/bin/env python3
"""What the verifier says of kernels of public libraries: python benchmarks/public_libraries.py [NAME ...]

Install the library beside torch first: pip install liger-kernel. Each task and the library's answer to it lie in
libraries/. Prints a Markdown table with what each verdict says, and the device. The library may use torch for the rest
of its work, since only its results are judged. exit 3 where the library is absent. Triton's interpreter does not run
all of these kernels, so run it on a GPU."""

import argparse
import importlib.metadata
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "libraries"
sys.path.insert(0, str(FOLDER.parents[1] / "tools"))
from kernelopt import cli
from kernelopt.device.sandbox import Sandbox
from kernelopt.errors import EnvironmentLacks
from kernelopt.measure import verify
from kernelopt.measure.verdict import Verdict
from kernelopt.session.subject import KernelUnderTest

LIBRARY = "liger-kernel"


@dataclass(frozen=True)
class Statement:
    """A task and the library's kernel for it, files in libraries/. dtype: in which it is judged."""

    task: str
    dtype: str

    @property
    def target(self) -> KernelUnderTest:
        files = (FOLDER / f"{self.task}_{part}.py" for part in ("liger", "reference"))
        return KernelUnderTest(*files, dtype=self.dtype, libraries=True)


STATEMENTS = {
    "cross-entropy-in-place": Statement("cross_entropy_in_place", "fp32"),
    "cross-entropy": Statement("cross_entropy", "fp32"),
    "group-norm": Statement("group_norm", "fp32"),
    "group-norm-bf16": Statement("group_norm", "bf16"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="*", help=f"which of {', '.join(STATEMENTS)} (default: all)")
    cli.add_device(parser)
    args = parser.parse_args()
    if unknown := set(args.name) - set(STATEMENTS):
        parser.error(f"there is no task {min(unknown)}; there are {', '.join(STATEMENTS)}")
    try:
        version = importlib.metadata.version(LIBRARY)
    except importlib.metadata.PackageNotFoundError:
        raise EnvironmentLacks(f"{LIBRARY} is not installed: {sys.executable} -m pip install {LIBRARY}") from None
    with Sandbox(args.device) as sandbox:
        rows = [row(name, judged(sandbox, name)) for name in args.name or STATEMENTS]
        print(f"{LIBRARY} {version} on {sandbox.device_name}\n")
    print("\n".join(["| task | verdict | cases | what it says |", "|---|---|---|---|", *rows]))
    return 0


def judged(sandbox: Sandbox, name: str) -> Verdict:
    print(f"{name} …", file=sys.stderr, flush=True)
    return verify.verify(sandbox, STATEMENTS[name].target)


def row(name: str, verdict: Verdict) -> str:
    said = verdict.summary.removeprefix(f"{verdict.status} ").replace("|", "\\|")
    return f"| {name} | {verdict.status} | {len(verdict.cases)} | {said} |"


if __name__ == "__main__":
    cli.run(main)
