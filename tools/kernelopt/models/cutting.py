"""A problem cut out of a model: reference.py, and what was proved of it."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from .. import bundle
from ..device.sandbox import Sandbox
from ..errors import UsageError
from . import jobs


@dataclass(frozen=True)
class Part:
    """A part of a model. module: its path, "" for the model itself. between: names of the first and last operator, None
    for all of them. workload: None for the model's default. about: more facts for the file."""

    model: Path
    module: str
    between: tuple[str, str] | None
    workload: str | None
    about: dict


@dataclass(frozen=True)
class Files:
    """Where the problem goes. weights, inputs: for real ones; None to keep none."""

    reference: Path
    weights: Path | None
    inputs: Path | None

    def check(self) -> None:
        """UsageError where a file is there already, or could not be written."""
        paths = [path for path in (self.reference, self.weights, self.inputs) if path]
        for path in paths:
            if path.exists():
                raise UsageError(f"{path} exists; choose another name or remove it")
            if not path.parent.is_dir():
                raise UsageError(f"{path.parent} is no folder")


@dataclass(frozen=True)
class Proof:
    """worker.cut_draft.Proof"""

    workload: str
    difference: float
    noise: float
    outputs: int
    why: str | None
    equal: bool


@dataclass(frozen=True)
class CutProblem:
    """worker.model_cut.CutReport, and the device that the proof ran on."""

    device: str
    path: str
    module: str
    kind: str
    operators: int
    inputs: list[list]
    results: int
    parameters: int
    mutates: list[str]
    sizes: dict[str, int]
    fixed: str | None
    calls: int
    workloads: list[str]
    proofs: list[Proof]

    @classmethod
    def from_json(cls, report: dict, device: str, path: Path) -> "CutProblem":
        proofs = [Proof(**proof) for proof in report["proofs"]]
        return cls(**{**report, "device": device, "path": str(path), "proofs": proofs})

    def to_json(self) -> dict:
        return {**vars(self), "proofs": [vars(proof) for proof in self.proofs]}


def part_of_group(model: Path, listed: dict, number: int, between: tuple[str, str] | None = None) -> Part:
    """The part that a group of find_kernels.py stands for, or a chain of its operators. listed: its JSON output.
    UsageError where the file is none, or the group is no part that can be cut out."""
    try:
        group = next((one for one in listed["groups"] if one["number"] == number), None)
        known, workload = len(listed["groups"]), listed["workload"]
    except (KeyError, TypeError):
        raise UsageError("--groups is no output of find_kernels.py --json") from None
    if group is None:
        raise UsageError(f"there is no group {number}; there are {known}")
    path = group["paths"][0]
    if group["backward"]:
        raise UsageError(f"group {number} is a backward pass; cut the module itself: --module {path}")
    if group["has_submodules"] and not group["whole"] and not between:
        raise UsageError(
            f"group {number} is the own operators of a module with others inside: cut it whole (--module {path}), or a "
            f"chain: add --between A B (--module {path} --operators lists them)"
        )
    about = {
        "share_pct": round(group["share_of_step_pct"], 3),
        "at_most_pct": rounded(group["saved_pct"]),
        "saved_us": rounded(group["saved_us"]),
    }
    return Part(model, path, between, workload, about)


def rounded(figure: float | None) -> float | None:
    return None if figure is None else round(figure, 3)


def operators(sandbox: Sandbox, part: Part, timeout_s: float) -> list[dict]:
    """The operators of a module, in order: {name, operator, origin, dtype, shape}."""
    arguments = {"model": str(part.model.resolve()), "module": part.module, "workload": part.workload}
    return jobs.run(sandbox, "operators", arguments, timeout_s)["operators"]


def cut(sandbox: Sandbox, part: Part, files: Files, timeout_s: float) -> CutProblem:
    """Write the problem to its files. Refused when it cannot be cut out, or is not proved."""
    with sandbox.folder("cut") as folder:
        arguments = {
            "model": str(part.model.resolve()),
            "module": part.module,
            "between": part.between,
            "workload": part.workload,
            "folder": folder,
            "weights": files.weights and str(files.weights.resolve()),
            "inputs": files.inputs and str(files.inputs.resolve()),
            "about": part.about,
        }
        report = jobs.run(sandbox, "cut", arguments, timeout_s)
        made = Path(report["path"])
        for name, path in (("weights.pt", files.weights), ("inputs.pt", files.inputs)):
            if path:
                shutil.copyfile(made.with_name(name), path)
        bundle.write_bytes(files.reference, made.read_bytes())
    return CutProblem.from_json(report, sandbox.device_name, files.reference)


def lines(problem: CutProblem) -> list[str]:
    """What was cut and proved."""
    part = f"{problem.module} ({problem.kind})" if problem.module else f"of the model ({problem.kind})"
    times = "once" if problem.calls == 1 else f"{problem.calls} times"
    operators = f"{problem.operators} operator{'s' * (problem.operators > 1)}"
    text = [f"{problem.path}: {part}, {operators}, {problem.parameters} numbers of state, called {times} in a step"]
    text += [
        f"input {name}: {dtype} {tuple(shape)}{strided(shape, strides)}"
        for name, dtype, shape, strides in problem.inputs
    ]
    if problem.mutates:
        text.append(f"MUTATES: {', '.join(problem.mutates)}")
    sizes = ", ".join(f"{name}={value}" for name, value in problem.sizes.items())
    text.append(f"sizes that may differ: {sizes}" if sizes else f"sizes are fixed: {problem.fixed}")
    text.append(f"workloads: {', '.join(problem.workloads)}")
    return text + [proof_line(proof, problem.device) for proof in problem.proofs]


def strided(shape: list[int], strides: list[int]) -> str:
    """The strides of a tensor that is not contiguous."""
    step, dense = 1, []
    for size in reversed(shape):
        dense.insert(0, step)
        step *= size
    differs = any(own != usual for size, own, usual in zip(shape, strides, dense, strict=True) if size > 1)
    return f", strides {tuple(strides)}" if differs else ""


def proof_line(proof: Proof, device: str) -> str:
    if proof.equal:
        exactly = "equal" if proof.difference == 0 else f"equal within the noise of two runs, {proof.noise:.2g}"
        tensors = f"the model's outputs, inputs and buffers ({proof.outputs} tensors)"
        return f"proved on {device}, workload {proof.workload}: {tensors} are {exactly} with the cut in place"
    why = proof.why or f"the model's outputs would differ by {proof.difference:.2g}"
    return (
        f"not for workload {proof.workload}, which takes another way: {why}; cut that with --workload {proof.workload}"
    )


def operator_line(operator: dict) -> str:
    """ "linear  aten.linear.default  float32 (2, 7, 64)  up (Linear)" """
    shape = f"{operator['dtype']} {tuple(operator['shape'])}" if operator["dtype"] else ""
    return f"{operator['name']:<32} {operator['operator']:<40} {shape:<28} {operator['origin']}".rstrip()
