"""An accepted kernel written in a format, checked by loading it back, and left where the user wants it."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from .. import bundle
from ..device.sandbox import Sandbox
from ..errors import UsageError
from ..session import subject
from ..session.record import Record
from ..session.record_store import RecordStore
from ..session.version_kernels import kernel_of
from ..session.workspace import Workspace
from . import load_back, write_flashinfer_bench, write_gpu_mode, write_hf_kernels
from .artefact import Artefact, Export, Options, check
from .load_back import LoadedBack


@dataclass(frozen=True)
class Format:
    """A format to write. needs: options without which there is no artefact. takes: more options of its own; COMMON
    ones are taken by all."""

    write: Callable[[Export], Artefact]
    needs: tuple[str, ...]
    takes: tuple[str, ...] = ()


FORMATS = {
    "flashinfer-bench": Format(write_flashinfer_bench.write, ("definition", "author"), ("gpus",)),
    "gpu-mode": Format(write_gpu_mode.write, ("leaderboard",), ("gpus",)),
    "hf-kernels": Format(write_hf_kernels.write, ("license",)),
}
COMMON = ("name", "author", "license")


@dataclass(frozen=True)
class Written:
    """What was written: the files, what a user must know of them, and how they were loaded back."""

    files: list[Path]
    remarks: tuple[str, ...]
    loaded: LoadedBack


def check_options(name: str, options: Options) -> None:
    """UsageError when a format lacks an option that it needs, or has one of another format."""
    form = FORMATS[name]
    for option in form.needs:
        if not getattr(options, option):
            raise UsageError(f"--format {name} needs --{option}")
    for field in fields(options):
        if getattr(options, field.name) and field.name not in (*COMMON, *form.needs, *form.takes):
            raise UsageError(f"--{field.name} does not go with --format {name}")


def accepted(workspace: Workspace, version: str | None) -> Record:
    """The record of a version, or of the best one. UsageError when it was not accepted, or the task is another one by
    now: its constructor's arguments go into the artefact."""
    has_history = (workspace.root / ".git").is_dir()  # an archive has none
    if has_history and workspace.first_reference() != workspace.reference.read_bytes():
        raise UsageError("reference.py was changed since the session began; git checkout it back")
    store = RecordStore(workspace)
    record = store.read(version) if version else store.best()
    if record is None:
        raise UsageError(f"{workspace.root} has no accepted version; run_gate.py accepts one")
    if not record.is_accepted:
        raise UsageError(f"{version} was not accepted, and only an accepted kernel is exported")
    return record


def places(artefact: Artefact, out: Path, force: bool) -> dict[Path, str]:
    """The text of each file by its path: `out` itself, if it has the suffix of an artefact of one file, else below the
    folder `out`. UsageError when a file exists and `force` is not given."""
    alone = len(artefact.files) == 1 and out.suffix == Path(artefact.entry).suffix and not out.is_dir()
    paths = {out if alone else out / name: text for name, text in artefact.files.items()}
    if taken := [path for path in paths if path.exists() or path.is_symlink()]:
        if not force:
            raise UsageError(f"{taken[0]} exists; choose another --out, or pass --force to replace it")
        if folder := next((path for path in taken if path.is_dir()), None):
            raise UsageError(f"{folder} is a folder, where a file must be written")
    return paths


def export(
    sandbox: Sandbox,
    workspace: Workspace,
    record: Record,
    name: str,
    options: Options,
    out: Path,
    force: bool = False,
    workloads: list[str] | None = None,
    timeout_s: float = 300,
) -> Written:
    """Write a version's kernel in a format to `out`. Nothing is left there unless it loads back and is right; see
    load_back.check for what is raised otherwise."""
    task = subject.of_workspace(workspace, workspace.task())
    source = kernel_of(workspace, record).decode("utf-8")
    wanted = Export(
        workspace.root.name.removeprefix("kernel_opt_"),
        record,
        source,
        load_back.interface_of(sandbox, task, timeout_s),
        task.dtype,
        sandbox.device_name,
        options,
    )
    check(wanted)
    artefact = FORMATS[name].write(wanted)
    files = places(artefact, out, force)
    loaded = load_back.check(sandbox, task, source, artefact, workloads, timeout_s)
    for path, text in files.items():
        bundle.write_text(path, text)
    return Written(list(files), artefact.remarks, loaded)
