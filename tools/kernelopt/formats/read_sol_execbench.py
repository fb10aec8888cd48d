"""SOL-ExecBench: a folder with definition.json and workload.jsonl.

Fields as of SOL-ExecBench 8d2237d (docs/definition.md, docs/workload.md, src/sol_execbench/core)."""

from pathlib import Path

from ..errors import UsageError
from . import wrapping
from .definitions import Spec, read_definition
from .files import json_lines
from .tasks import FLOATS, Bounds, Options, Task, number, tolerated
from .workloads import Stated, located, shape_text, stated, usual_random, workloads_file, written

NAME = "SOL-ExecBench"
DEFINITION = "definition.json"
USUAL = {"max_atol": 1e-2, "max_rtol": 1e-2, "required_matched_ratio": 0.99, "max_error_cap": None}
TIMING = "timing: its score against a speed-of-light time, and its own timing loop, give way to the paired rounds here"
ROTARY = ("cos", "sin", "cos_cached", "sin_cached", "rope_cos", "rope_sin")
DECAYS = {  # of state-space models: the ends of a uniform distribution
    "A": (-1.0, -0.001),
    "A_log": (-5.0, -1.0),
    "A_cumsum": (-0.1, 0.0),
    "g": (-5.0, 0.0),
}
MASKS = ("x_mask", "text_mask", "aspect_ratio_mask", "drop_mask", "attention_mask")
ZERO_ONE = ("binary", "{0, 1}", "0 or 1", "1.0 for valid", "0.0 for masked")


def read(path: Path, options: Options) -> Task:
    """The task of a definition's file."""
    definition = read_definition(path)
    file = workloads_file(path, options)
    cases = [stated(line, definition, f"{file}, line {at}") for at, line in enumerate(json_lines(file), start=1)]
    roots = [options.blobs] if options.blobs else [*path.resolve().parents[:4], *file.resolve().parents[:4]]
    cases, remarks = located(cases, definition, roots)
    if not cases:
        raise UsageError(
            f"{path}: no workload can be carried over; the first reason: {(remarks or ['there is none'])[0]}"
        )
    runnable = wrapping.of_definition(definition)
    inputs, workloads, more = written(runnable.definition, cases, named_random, options, runnable.more)
    modes, stricter = tolerance(cases)
    return wrapping.task_of(
        NAME,
        path,
        runnable,
        inputs,
        workloads,
        Bounds(modes),
        contiguous=not any("custom" in one.kinds() for one in cases),
        remarks=(*remarks, *more, *runnable.remarks, *stricter, TIMING),
    )


def tolerance(cases: list[Stated]) -> tuple[dict[str, float], list[str]]:
    """The strictest tolerance of the workloads, for a task has one."""
    each = [
        {key: number(value, f"workload {one.name}: {key}") for key, value in all_of(one).items() if value is not None}
        for one in cases
    ]
    caps = [one["max_error_cap"] for one in each if "max_error_cap" in one]
    modes, remarks = tolerated(
        min(one["max_atol"] for one in each),
        min(one["max_rtol"] for one in each),
        max(one["required_matched_ratio"] for one in each),
        min(caps, default=None),
    )
    if any(one != each[0] for one in each):
        remarks.append("tolerance: the workloads have several; the strictest of each kind holds for all")
    return modes, remarks


def all_of(one: Stated) -> dict:
    return {key: one.tolerance.get(key, usual) for key, usual in USUAL.items()}


def named_random(name: str, spec: Spec) -> str:
    """The expression of a random input. Its name and description say which numbers it holds, as there."""
    if spec.shape is None or spec.dtype not in FLOATS or spec.dtype.startswith("float8"):
        return usual_random(name, spec)
    shape, dtype, about = shape_text(spec), f"dtype=torch.{spec.dtype}", spec.description.lower()
    plain = name.rstrip("0123456789")
    if plain.endswith(("norm_weight", "norm_bias")):  # ones or zeros there: a kernel could ignore them
        return f"{int(plain.endswith('weight'))} + 0.1 * torch.randn({shape}, {dtype})"
    square = len(spec.shape) > 1 and spec.shape[-1] == spec.shape[-2]
    if square and (name in ("attention_mask", "causal_mask") or ("attention mask" in about and "causal" in about)):
        return f"torch.full({shape}, torch.finfo(torch.{spec.dtype}).min, {dtype}).triu(1)"
    if name in MASKS or (name.endswith("_mask") and any(word in about for word in ZERO_ONE)):
        return f"torch.randint(0, 2, {shape}).to(torch.{spec.dtype})"
    if name in ROTARY:
        function = "cos" if "cos" in name else "sin"
        return f"torch.{function}(torch.randn({shape}).clamp(-torch.pi, torch.pi)).to(torch.{spec.dtype})"
    if plain.endswith(("rstd", "std", "variance")) or plain == "var" or plain.endswith("_var"):
        return f"torch.randn({shape}, {dtype}).abs() + 0.1"
    if name in DECAYS:
        low, high = DECAYS[name]
        summed = ".cumsum(-1)" if name == "A_cumsum" else ""
        return f"torch.empty({shape}, {dtype}).uniform_({low}, {high}){summed}"
    if name in ("attn_weights", "attention_weights", "routing_weights") or ("softmax" in about and "output" in about):
        return f"torch.softmax(torch.randn({shape}), -1).to(torch.{spec.dtype})"
    if len(spec.shape) > 1 and (
        plain == "weight" or plain.endswith(("_weight", "_weights", "_proj", "_projs", "_weight_matrix"))
    ):
        return f"torch.randn({shape}, {dtype}) / {spec.shape[-1]} ** 0.5"
    return usual_random(name, spec)
