"""KernelBench-Hard: a folder with reference.py, shapes.py and problem.yaml.

Fields as of Infatoshi/kernelbench.com c7d9221 (benchmarks/hard/problems-*/*, benchmarks/hard/src/eval)."""

import ast
import math
from pathlib import Path

from ..errors import UsageError
from . import edits
from .files import literal, text_of, yaml_object
from .provenance import origin_of
from .read_kernelbench import NEEDED, methods, of_forward, whole
from .source_code import Source, defined, dotted, function
from .tasks import Bounds, Options, Task, Workload, chosen, number, tolerated
from .wrapping import SEEDS, has_lazy_annotations

NAME = "KernelBench-Hard"
PROBLEM, REFERENCE, SHAPES, CHECKER = "problem.yaml", "reference.py", "shapes.py", "check.py"
MAKERS = ("get_inputs", "get_init_inputs")
USUAL = {  # its tolerances by dtype, absolute and relative
    **{"float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-2},
    **{"float8_e4m3fn": 0.1, "float8_e5m2": 0.1},
}
TIMING = "timing: its trials and its share of a peak give way to the paired rounds and the floor here"
SELECTING = ("topk", "sort", "argsort", "kthvalue")


def read(folder: Path, options: Options) -> Task:
    """The task of a problem's folder."""
    problem, path = yaml_object(folder / PROBLEM), folder / REFERENCE
    if problem.get("world_size", 1) != 1:
        several = f"needs several GPUs (world_size is {problem['world_size']})"
        raise UsageError(f"{folder / PROBLEM}: the task {several}, which cannot be carried over")
    source = Source(text_of(path), str(path))
    if lacking := NEEDED - defined(source.tree):
        raise UsageError(f"{path} does not define {min(lacking)}")
    workloads, remarks = shapes_of(folder, source, options)
    for name in MAKERS:
        if function(source.tree, name) and workloads[0].sizes:
            edits.with_sizes(source, name, workloads[0].sizes)
    fixed = edits.with_every_seed(source)
    bounds, more = bounds_of(problem, folder / PROBLEM)
    ties = scores_of(source) if (folder / CHECKER).is_file() else None
    return Task(
        format=NAME,
        name=text(problem, "name") or folder.resolve().name,
        description=text(problem, "display_name"),
        origin=origin_of(folder, [source.text]),
        code=whole(source),
        model=None,
        parameters=of_forward(source),
        inputs="",
        workloads=workloads,
        bounds=bounds,
        ties=ties,
        lazy_annotations=has_lazy_annotations(source),
        remarks=(*remarks, *([SEEDS] if fixed else []), *more, *rules(problem, folder, ties), TIMING),
    )


def text(problem: dict, key: str) -> str:
    value = problem.get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    return " ".join(", ".join(map(str, values)).split())


def shapes_of(folder: Path, source: Source, options: Options) -> tuple[tuple[Workload, ...], list[str]]:
    """The workloads: each shape sets names of the module, which become keywords of get_inputs and get_init_inputs."""
    where = folder / SHAPES
    shapes = literal(Source(text_of(where), str(where)).tree, "SHAPES", str(where))
    if not isinstance(shapes, list) or not shapes or not all(isinstance(one, dict) for one in shapes):
        raise UsageError(f"{where}: SHAPES must be a list of dicts")
    known = defined(source.tree)
    stated = []
    for number_, shape in enumerate(shapes):
        sizes = {name_in(known, key, f"{where}: SHAPES[{number_}]"): value for key, value in shape.items()}
        if wrong := [key for key, value in sizes.items() if type(value) is not int or value < 1]:
            raise UsageError(
                f"{where}: SHAPES[{number_}] sets {wrong[0]} to {sizes[wrong[0]]!r}, no whole number from 1 on"
            )
        stated.append(Workload(f"shape{number_}", sizes, math.prod(sizes.values())))
    if any(set(one.sizes) != set(stated[0].sizes) for one in stated):
        raise UsageError(f"{where}: each of SHAPES must have the same keys")
    reading = edits.readers(source, set(stated[0].sizes))
    if others := sorted(name for name in reading if name not in MAKERS):
        reader, size = others[0], min(reading[others[0]])
        raise UsageError(f"{source.where}: {reader} reads the name {size} of its module; make it an argument")
    return chosen(stated, options)


def name_in(known: set[str], key: str, where: str) -> str:
    """The name of the module that a key of a shape sets: the same, or in capitals."""
    for name in (key, str(key).upper()):
        if name in known:
            return name
    raise UsageError(f"{where} sets {key!r}, and {REFERENCE} has no such name, nor in capitals")


def bounds_of(problem: dict, where: Path) -> tuple[Bounds, list[str]]:
    """The tolerance by dtype: its usual ones, or the problem's own."""
    given = problem.get("tolerance") or {}
    if not isinstance(given, dict):
        raise UsageError(f"{where}: tolerance must be a mapping from a dtype")
    by_dtype: dict[str, dict[str, float]] = {}
    remarks: list[str] = []
    for key, value in {**USUAL, **given}.items():
        dtype = str(key).removeprefix("torch.")
        both = (value.get("atol", 0), value.get("rtol", 0)) if isinstance(value, dict) else (value, value)
        modes, stricter = tolerated(*(number(one, f"{where}: tolerance {key}") for one in both))
        by_dtype[dtype] = modes
        remarks += stricter
    return Bounds(by_dtype["float32"], by_dtype), remarks


def scores_of(source: Source) -> str | None:
    """The parameter of forward that its only torch.topk selects from. Indices of equal elements are equally right."""
    bodies = [node for node in methods(source) if node.name == "forward"]
    calls = [one for node in bodies for one in ast.walk(node) if isinstance(one, ast.Call)]
    selecting = [one for one in calls if dotted(one.func).rpartition(".")[2] in SELECTING]
    if len(selecting) != 1 or dotted(selecting[0].func).rpartition(".")[2] != "topk":
        return None
    call = selecting[0]
    name = dotted(call.func).rpartition(".")[0]
    scores = dotted(call.args[0]) if name == "torch" and call.args else name
    return scores if scores in of_forward(source) else None


def rules(problem: dict, folder: Path, ties: str | None) -> list[str]:
    """What stands in problem.yaml and the checker and is not carried over."""
    forbidden = [str(one) for one in problem.get("forbidden") or ()]
    made = [f"forbidden, and not checked here: {', '.join(forbidden)}"] if forbidden else []
    formulas = [f"{key} = {text(problem, key)}" for key in ("flops_formula", "bytes_formula") if text(problem, key)]
    if formulas:
        made.append(f"work: {'; '.join(formulas)} (estimate_work.py counts; its --flops and --bytes set others)")
    facts = [f"{key} {text(problem, key)}" for key in ("regime", "precision", "hardware") if problem.get(key)]
    if facts:
        made.append(f"facts that no tool here reads: {', '.join(facts)}")
    if isinstance(sota := problem.get("sota"), dict) and text(sota, "name"):
        made.append(f"opponent: {text(sota, 'name')} (measure_kernel_time.py --against FILE)")
    if (folder / CHECKER).is_file():
        made.append(f"checker: {CHECKER} is code, with magnitudes and properties of its own; variants take its place")
    if ties:
        made.append(f"ties: indices that point to equal elements of {ties} are equally right (COMPARE)")
    return made
