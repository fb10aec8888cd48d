"""Judges the kernel of a task or knowledge case with the bundle's own tools, on the evaluator's files: the agent's
folder gives kernel.py alone."""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from judging import BUNDLE, failures, text
from kernelopt.errors import EnvironmentLacks, ToolError


def faster_and_right(case: Path, folder: Path, target: float) -> list[str]:
    """What is wrong with the kernel.py that an agent left in `folder`; [] is a pass.

    case: the case's own folder, whose files/ hold the reference and the slow kernel. target: the least speed-up over
    that kernel that the whole 95 % interval must show. EnvironmentLacks: there is no GPU, or it is busy.
    """
    with tempfile.TemporaryDirectory() as scratch:
        kernel = Path(scratch) / "kernel.py"
        kernel.write_text(text(folder / "kernel.py"), encoding="utf-8")
        subject = ["--kernel", kernel, "--reference", case / "files" / "reference.py"]
        verified = tool("verify_kernel.py", *subject)
        if verified["status"] != "OK":
            return [f"kernel.py is right: {verified['summary']}"]
        return judged(tool("measure_kernel_time.py", *subject, "--against", case / "files" / "kernel.py"), target)


@dataclass(frozen=True)
class Wanted:
    """What a knowledge case asks of a kernel. workloads: small ones of the reference, for the interpreter. The others
    are of what is compiled for an H200 at the sizes of get_inputs: Triton kernels a call launches at most; in one of
    them tensor instructions, in one of them loads of 16 bytes. None may spill."""

    workloads: tuple[str, ...]
    most_kernels: int
    tensor_cores: bool = False
    wide_loads: bool = False


def right_and_compiled(case: Path, folder: Path, wanted: Wanted) -> list[str]:
    """What is wrong with the kernel.py that an agent left in `folder`; [] is a pass. No GPU is used."""
    with tempfile.TemporaryDirectory() as scratch:
        kernel = Path(scratch) / "kernel.py"
        kernel.write_text(text(folder / "kernel.py"), encoding="utf-8")
        subject = ["--kernel", kernel, "--reference", case / "files" / "reference.py"]
        here = ["--device", "cpu-interpreter", "--only-these-shapes", "--workload", *wanted.workloads]
        verified = tool("verify_kernel.py", *subject, *here)
        if verified["status"] != "OK":
            return [f"kernel.py is right: {verified['summary']}"]
        compiled = tool("compile_kernel.py", *subject, "--for", "h200")
    (target,) = compiled.get("targets") or [{"status": "REFUSED", "error": compiled.get("summary"), "kernels": []}]
    if target["status"] != "OK":
        return [f"kernel.py compiles for an H200: {target['error']}"]
    return of_compiled(target["kernels"], wanted)


def of_compiled(kernels: list[dict], wanted: Wanted) -> list[str]:
    """What is wrong with compiled kernels, as compile_kernel.py prints them: an autotuned one in each configuration, of
    which one has to fit."""
    names = {kernel["name"] for kernel in kernels}
    spilling = names - {kernel["name"] for kernel in kernels if not kernel["spill_bytes"]}
    tensor = any(kernel["tensor_instructions"] for kernel in kernels)
    wide = any("128" in kernel["access_bits"].get("global load", {}) for kernel in kernels)
    most = wanted.most_kernels
    return failures(
        (f"1 to {most} Triton kernels a call, found {len(names)}", 0 < len(names) <= most),
        (f"no kernel spills registers, found {', '.join(sorted(spilling))}", not spilling),
        ("a kernel multiplies in tensor cores", tensor or not wanted.tensor_cores),
        ("a kernel loads 16 bytes at a time", wide or not wanted.wide_loads),
    )


def judged(timing: dict, target: float) -> list[str]:
    """What is wrong with a paired timing, as measure_kernel_time.py prints it."""
    if "verdict" not in timing:
        return [f"kernel.py can be timed: {timing['summary']}"]
    low, high = timing["speedup"]["ci95"]
    sentence = f"at least {target}x the speed of the given kernel, measured {low:.3f}x to {high:.3f}x"
    return failures((f"{timing['verdict']} is FASTER", timing["verdict"] == "FASTER"), (sentence, low >= target))


def tool(name: str, *arguments) -> dict:
    """The JSON object that a tool prints, or {status, summary} where it refuses; EnvironmentLacks when it lacks
    something."""
    command = [sys.executable, str(BUNDLE / "tools" / name), *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    said = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
    if done.returncode == 3:
        raise EnvironmentLacks(said[0])
    if done.returncode not in (0, 1, 2, 4):
        raise ToolError(f"{name} ended with exit code {done.returncode}: {said[0]}")
    return json.loads(done.stdout) if done.stdout.strip() else {"status": "REFUSED", "summary": said[0]}
