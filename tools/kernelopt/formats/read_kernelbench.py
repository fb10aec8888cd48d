"""KernelBench: a file with Model, get_inputs and get_init_inputs. Such a file is a reference already.

Fields as of KernelBench 423217d (KernelBench/level*/*.py, src/kernelbench/eval.py)."""

import ast
from pathlib import Path

from . import edits
from .files import text_of
from .provenance import origin_of
from .source_code import Source, defined, parameters
from .tasks import Options, Task, Workload
from .wrapping import SEEDS, has_lazy_annotations

NAME = "KernelBench"
NEEDED = {"Model", "get_inputs"}
TOLERANCE = (
    "tolerance: its evaluator's 1e-4 (fp32) or 1e-2 (half precision) gives way to the verifier's bounds by dtype"
)
TIMING = "timing: its trials after warm-up give way to the paired rounds here"


def is_problem(source: Source) -> bool:
    return defined(source.tree) >= NEEDED


def read(path: Path, options: Options) -> Task:
    """The task of a problem's file."""
    source = Source(text_of(path), str(path))
    fixed = edits.with_every_seed(source)
    return Task(
        format=NAME,
        name=path.stem,
        description="",
        origin=origin_of(path, [source.text]),
        code=whole(source),
        model=None,
        parameters=of_forward(source),
        inputs="",
        workloads=(Workload("default", {}, 1),),
        lazy_annotations=has_lazy_annotations(source),
        remarks=(*([SEEDS] if fixed else []), TOLERANCE, TIMING),
    )


def of_forward(source: Source) -> tuple[str, ...]:
    """The names of the parameters of Model.forward, where the file defines them itself."""
    forward = next((node for node in methods(source) if node.name == "forward"), None)
    return tuple(parameters(forward)[1:]) if forward else ()


def methods(source: Source) -> list[ast.FunctionDef]:
    """The functions of the class Model."""
    models = [node for node in source.tree.body if isinstance(node, ast.ClassDef) and node.name == "Model"]
    return [node for model in models for node in model.body if isinstance(node, ast.FunctionDef)]


def whole(source: Source) -> str:
    """The text of the module, but for imports of __future__, which stand first in the file that it becomes a part
    of."""
    for node in source.tree.body:
        if getattr(node, "module", None) == "__future__":
            source.replace(node, "")
    return source.piece(0, len(source.bytes))
