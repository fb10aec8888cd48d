"""What can be cut out inside a module that torch.export does not get through."""

import contextlib
import re

import torch

from .contract import NotCut
from .model_calls import Recorder, recording
from .model_file import ModelFile
from .model_graph import traced

MOST = 3  # parts that are named


def advice(file: ModelFile, path: str, workload: str) -> str:
    """A sentence on the largest modules inside the one at `path` that can be cut out."""
    parts = cuttable(file, path, workload)
    if not parts:
        return "no module inside it can be cut either"
    named = ", ".join(f"--module {one}{f' (one of {count})' if count > 1 else ''}" for one, count in parts[:MOST])
    more = f" and {len(parts) - MOST} more" if len(parts) > MOST else ""
    return f"inside it these can be cut: {named}{more}"


def cuttable(file: ModelFile, path: str, workload: str) -> list[tuple[str, int]]:
    """(path, how many are alike) of modules inside the one at `path` that torch.export gets through, none inside
    another of them. Modules of one class at one place of repeated ones are tried once. The largest comes first."""
    calls = recorded_inside(file, path, workload)
    alike: dict[tuple, list[str]] = {}
    for one in calls:
        alike.setdefault((re.sub(r"(?<![^.])\d+(?![^.])", "*", one), type(file.submodule(one))), []).append(one)
    tried = {same[0]: len(same) for same in alike.values()}
    fine: list[str] = []
    for one in sorted(tried, key=lambda each: each.count(".")):
        if not any(one.startswith(f"{above}.") for above in fine):
            with contextlib.suppress(NotCut):
                traced(file.submodule(one), calls[one].call, any_size=False)
                fine.append(one)
    return sorted(((one, tried[one]) for one in fine), key=lambda part: -size(file.submodule(part[0])))


def recorded_inside(file: ModelFile, path: str, workload: str) -> dict[str, Recorder]:
    """The calls of the modules inside the one at `path` in a run of the model, by path, where there are any."""
    inside = {
        f"{path}.{name}".lstrip("."): one
        for name, one in file.submodule(path).named_modules()
        if name and not isinstance(one, torch.jit.ScriptModule)
    }
    with contextlib.ExitStack() as stack, file.buffers_restored():
        recorders = {one: stack.enter_context(recording(module)) for one, module in inside.items()}
        file.run(file.module, file.arguments(workload))
    return {one: recorder for one, recorder in recorders.items() if recorder.call}


def size(module: torch.nn.Module) -> int:
    return sum(one.numel() for one in module.parameters())
