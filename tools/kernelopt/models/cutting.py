"""A problem cut out of a model: reference.py, and what was proved of it."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from .. import bundle
from ..device.sandbox import Sandbox
from ..errors import UsageError
from ..model_types import CutReport, Proof
from . import jobs

MOST_TENSORS = 62  # that an operator takes, as worker.model_swap, which stands alone, has it too


@dataclass(frozen=True)
class Part:
    """A part of a model. module: its path, "" for the model itself. between: names of the first and last operator, None
    for all of them. workload: None for the model's default. call: which of the module's in a step, from 1. about: more
    facts for the file."""

    model: Path
    module: str
    between: tuple[str, str] | None
    workload: str | None
    about: dict
    call: int = 1


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
class CutProblem:
    """What was cut, and the device that the proof ran on."""

    cut: CutReport
    device: str

    def to_json(self) -> dict:
        return {"device": self.device, **self.cut.to_json()}


def part_of_group(model: Path, listed: dict, number: int, between: tuple[str, str] | None = None) -> Part:
    """The part that a group of find_kernels.py stands for, or a chain of its operators, with its promise where the
    step ran on a GPU. listed: of finding.listed. UsageError where the file is none, or the group is no part that can be
    cut out."""
    try:
        group = next((one for one in listed["groups"] if one["number"] == number), None)
        known, workload = len(listed["groups"]), listed["workload"]
    except (KeyError, TypeError):
        raise UsageError("--groups is no output of find_kernels.py --save or --json") from None
    if group is None:
        raise UsageError(f"there is no group {number}; there are {known}")
    path = group["paths"][len(group["paths"]) // 2]  # the first layer's inputs are often others than those of the rest
    if group["backward"]:
        raise UsageError(
            f"group {number} is a backward pass, and a cut is of a forward pass: --module {path} cuts that, and its "
            "kernel leaves the backward pass to autograd; docs/models.md, 'Training', says how to state a backward pass"
        )
    if group["has_submodules"] and not group["whole"] and not between:
        whole, listing = (
            (f"--module {path}", f"--module {path} --operators") if path else ("leave --group out", "--operators")
        )
        raise UsageError(
            f"group {number} is the own operators of a module with others inside: cut it whole ({whole}), or a "
            f"chain: add --between A B ({listing} lists them)"
        )
    return Part(model, path, between, workload, promise_of(group) if listed["on_gpu"] else {})


def promise_of(group: dict) -> dict:
    """What put_back.py holds the gain against."""
    return {
        "share_pct": round(group["share_of_step_pct"], 3),
        "at_most_pct": rounded(group["saved_pct"]),
        "saved_us": rounded(group["step_saved_us"]),
        "floor_us": rounded((group["floor"] or {}).get("us")),
    }


def rounded(figure: float | None) -> float | None:
    return None if figure is None else round(figure, 3)


def operators(sandbox: Sandbox, part: Part, timeout_s: float) -> list[dict]:
    """The operators of a module, in order: {name, operator, origin, dtype, shape}."""
    where = {"module": part.module, "workload": part.workload, "call": part.call}
    return jobs.run(sandbox, "operators", {"model": str(part.model.resolve()), **where}, timeout_s)["operators"]


def cut(sandbox: Sandbox, part: Part, files: Files, timeout_s: float) -> CutProblem:
    """Write the problem to its files. Refused when it cannot be cut out, or is not proved."""
    with sandbox.folder("cut") as folder:
        arguments = {
            "model": str(part.model.resolve()),
            "module": part.module,
            "between": part.between,
            "workload": part.workload,
            "call": part.call,
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
    return CutProblem(CutReport.from_json({**report, "path": str(files.reference)}), sandbox.device_name)


def lines(problem: CutProblem) -> list[str]:
    """What was cut and proved."""
    cut = problem.cut
    part = f"{cut.module} ({cut.kind})" if cut.module else f"the model ({cut.kind})"
    times = "once" if cut.calls == 1 else f"{cut.calls} times"
    operators = f"{cut.operators} operator{'s' * (cut.operators > 1)}"
    text = [f"{cut.path}: {part}, {operators}, {cut.parameters} numbers of state, called {times} in a step"]
    text += [
        f"input {name}: {dtype} {tuple(shape)}{strided(shape, strides)}" for name, dtype, shape, strides in cut.inputs
    ]
    text += [
        f"input {name} holds one value alone, so a kernel that leaves it out is not found: cut another call, or the "
        "same module at another place, unless it is always so"
        for name in cut.constant
    ]
    if cut.mutates:
        text.append(f"MUTATES: {', '.join(cut.mutates)}")
    sizes = ", ".join(f"{name}={value}" for name, value in cut.sizes.items())
    text.append(f"sizes that may differ: {sizes}" if sizes else f"sizes are fixed: {cut.fixed}")
    text.append(f"workloads: {', '.join(cut.workloads)}")
    if cut.tensors > MOST_TENSORS:
        text.append(
            f"put_back.py cannot put this back: it takes {cut.tensors} tensors, parameters included, and an operator "
            f"takes {MOST_TENSORS} tensors at most; cut a part inside it"
        )
    text += [proof_line(proof, problem.device) for proof in cut.proofs]
    if condition := next((proof.condition for proof in cut.proofs if proof.condition), None):
        text.append(
            f"the other calls lack {condition}: put_back.py --where {condition!r} leaves them to the original, and "
            "cut_problem.py --call N cuts one of them out"
        )
    return text


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
        part = f" of {proof.calls} of {proof.calls + proof.left} calls" if proof.left else ""
        return f"proved on {device}, workload {proof.workload}: {tensors} are {exactly} with the cut in place{part}"
    why = proof.why or f"the model's outputs would differ by {proof.difference:.2g}"
    return (
        f"not for workload {proof.workload}, which takes another way: {why}; cut that with --workload {proof.workload}"
    )


def operator_line(operator: dict) -> str:
    """ "linear  aten.linear.default  float32 (2, 7, 64)  up (Linear)" """
    shape = f"{operator['dtype']} {tuple(operator['shape'])}" if operator["dtype"] else ""
    return f"{operator['name']:<32} {operator['operator']:<40} {shape:<28} {operator['origin']}".rstrip()
