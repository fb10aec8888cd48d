"""Which format a source is in, by the files that it has and the keys in them."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError
from . import read_flashinfer_bench, read_gpu_mode, read_kernelbench, read_kernelbench_hard, read_sol_execbench
from .definitions import is_definition
from .files import json_lines, json_object, text_of
from .source_code import Source
from .tasks import Options, Task
from .workloads import NoWorkloads, workloads_file


@dataclass(frozen=True)
class Format:
    """place: the file or folder to read of a source that fits; None where it does not. read: the task that is there."""

    place: Callable[[Path, Options], Path | None]
    read: Callable[[Path, Options], Task]


def read_task(source: Path, name: str | None, options: Options) -> Task:
    """The task in a source. name: the format that the user names. UsageError where none fits, or several."""
    if not source.exists():
        raise UsageError(f"{source} does not exist")
    known = FORMATS if name is None else {name: FORMATS[name]}
    places = {one: place for one, known_format in known.items() if (place := known_format.place(source, options))}
    if not places and name:
        raise UsageError(f"{source} is no task of {name}; without --format the tool looks which format fits")
    if not places:
        raise UsageError(
            f"{source} is in none of the formats {', '.join(FORMATS)}; docs/importing.md says which files each has"
        )
    if len(places) > 1:
        raise UsageError(f"{source} may be {' or '.join(places)}; say which with --format")
    ((fitting, place),) = places.items()
    return FORMATS[fitting].read(place, options)


def definition_file(source: Path) -> Path | None:
    """The definition that a source is, or that its folder alone has."""
    if source.is_file():
        return source if source.suffix == ".json" and is_definition(json_object(source)) else None
    if (source / read_sol_execbench.DEFINITION).is_file():
        return source / read_sol_execbench.DEFINITION
    files = [path for path in sorted(source.glob("*.json"))[:100] if is_definition(json_object(path))]
    return files[0] if len(files) == 1 else None


def flashinfer_place(source: Path, options: Options) -> Path | None:
    path = definition_file(source)
    return path if path and not bare(path, options) else None


def solexec_place(source: Path, options: Options) -> Path | None:
    path = definition_file(source)
    return path if path and bare(path, options) is not False else None


def bare(path: Path, options: Options) -> bool | None:
    """Do the workloads of a definition stand in their lines as they are, as in SOL-ExecBench, or each in the key
    `workload`? None where there are none, and the definition has no key that only SOL-ExecBench has."""
    with contextlib.suppress(NoWorkloads):
        first = next(json_lines(workloads_file(path, options)), {})
        return "workload" not in first if first else None
    value = json_object(path)
    axes = value["axes"].values() if isinstance(value["axes"], dict) else ()
    kinds = [one.get("type") for one in axes if isinstance(one, dict)]
    return True if "expr" in kinds or {"custom_inputs_entrypoint", "hf_id"} & set(value) else None


def gpumode_place(source: Path, options: Options) -> Path | None:
    return folder_with(source, read_gpu_mode.FILES, (*read_gpu_mode.FILES, "reference.py"))


def hard_place(source: Path, options: Options) -> Path | None:
    own = (read_kernelbench_hard.PROBLEM, read_kernelbench_hard.SHAPES, read_kernelbench_hard.REFERENCE)
    return folder_with(source, own[:1], own)


def folder_with(source: Path, one_of: tuple[str, ...], own: tuple[str, ...]) -> Path | None:
    """The folder that a source is, or whose file `own` it is, where it has one of these files."""
    folder = source if source.is_dir() else source.parent if source.name in own else None
    return folder if folder and any((folder / name).is_file() for name in one_of) else None


def kernelbench_place(source: Path, options: Options) -> Path | None:
    if source.suffix != ".py" or not source.is_file():
        return None
    return source if read_kernelbench.is_problem(Source(text_of(source), str(source))) else None


FORMATS = {
    "flashinfer-bench": Format(flashinfer_place, read_flashinfer_bench.read),
    "sol-execbench": Format(solexec_place, read_sol_execbench.read),
    "gpu-mode": Format(gpumode_place, read_gpu_mode.read),
    "kernelbench": Format(kernelbench_place, read_kernelbench.read),
    "kernelbench-hard": Format(hard_place, read_kernelbench_hard.read),
}
