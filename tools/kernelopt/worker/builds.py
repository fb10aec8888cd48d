"""The builds of CUDA C++ extensions: a folder for each content.

torch has one folder for each name of an extension. The kernels of a session often share a name; a process that loads
two of them then compiles both, and the next process again. With a folder for each content, each is compiled once for
all processes that share TORCH_EXTENSIONS_DIR: those of an exploration, and of the gate after it. Of builds that no
process uses, those that were used last stay, up to MOST_BYTES. A folder keeps what the compiler printed: no later
process compiles, and so none prints it.
"""

import contextlib
import fcntl
import functools
import hashlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import torch

from . import compiler_errors

MOST_BYTES = 2 << 30  # of all builds; with torch's headers one takes some 10 MB
TURN, USED = "turn", "used"  # files of a folder: locked by the process that builds; by all that have loaded the build
PRINTED = "compiler_output.txt"  # in a folder, where the compiler printed something
_last_built: dict[str, str] = {}  # name of an extension -> key of the content that this process built last under it
_in_use: dict[Path, IO] = {}  # by folder: the file of a build that this process loaded, locked until it ends
_kept_apart: set[Path] = set()  # folders that were chosen here


def keep_apart() -> None:
    """Have torch's load and load_inline build each content in its own folder, from here on in this process. A call that
    names a folder keeps it."""
    from torch.utils import cpp_extension

    for name in ("load", "load_inline"):
        build = getattr(cpp_extension, name)
        if not hasattr(build, "by_content"):
            setattr(cpp_extension, name, kept_apart(build, cpp_extension.JIT_EXTENSION_VERSIONER.entries))


def kept_apart(build: Callable, versions: dict) -> Callable:
    """torch's function, with a folder for each content. versions: torch's, by name. torch renames an extension whose
    content has changed; with a folder for each content that is not needed."""
    signature = inspect.signature(build)

    @functools.wraps(build)
    def built(*arguments, **options):
        root = os.environ.get("TORCH_EXTENSIONS_DIR")
        try:
            given = signature.bind(*arguments, **options).arguments
        except TypeError:  # torch says what is wrong
            return build(*arguments, **options)
        if not root or given.get("build_directory"):
            return build(*arguments, **options)
        key, name = content_key(given), str(given["name"])
        folder = Path(root, key)
        _kept_apart.add(folder)
        with turn_in(folder):
            is_new = not (folder / USED).exists()
            if _last_built.pop(name, None) != key:
                versions.pop(name, None)
            result = build(**{**given, "build_directory": str(folder)})
            _last_built[name] = key  # after a build that failed, torch would take a second call's for done
            keep_in_use(folder)
            if is_new and (printed := compiler_errors.printed()):
                (folder / PRINTED).write_text(printed, encoding="utf-8")
        if is_new:
            remove_oldest(Path(root))
        return result

    built.by_content = True
    return built


def is_kept_apart(folder: Path) -> bool:
    """Was the folder chosen here, for one content?"""
    return folder in _kept_apart


def printed_of(extensions: list[str]) -> str:
    """What the compiler printed when these files were built, in this process or an earlier one."""
    logs = dict.fromkeys(Path(file).parent / PRINTED for file in extensions)
    return "".join(log.read_text(encoding="utf-8", errors="replace") for log in logs if log.is_file())


def content_key(given: dict) -> str:
    """A name for all that a build depends on: the arguments, the contents of source files, Python and torch."""
    options = {name: value for name, value in given.items() if name != "verbose"}
    sources = options.get("sources", [])
    files = [Path(file).read_bytes() for file in ([sources] if isinstance(sources, str) else sources) if is_file(file)]
    content = (sys.version, torch.__version__, torch.version.cuda, sorted(options.items()), files)
    return hashlib.sha256(repr(content).encode()).hexdigest()[:24]


def is_file(path) -> bool:
    return isinstance(path, str | os.PathLike) and Path(path).is_file()


@contextlib.contextmanager
def turn_in(folder: Path) -> Iterator[None]:
    """One process at a time builds in a folder, which is made. torch's own lock outlives a process that was killed, and
    would hold up all that come after it; it is removed."""
    with turn(folder):
        os.utime(folder / TURN)
        (folder / "lock").unlink(missing_ok=True)
        yield


def turn(folder: Path) -> IO:
    """The locked file of a folder. One that another process removed while this one waited is made again."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            mark = open(folder / TURN, "a")  # noqa: SIM115
            fcntl.flock(mark, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(mark.fileno()), (folder / TURN).stat()):
                return mark
            mark.close()


def keep_in_use(folder: Path) -> None:
    """Nobody removes the folder before this process ends."""
    if folder not in _in_use:
        _in_use[folder] = open(folder / USED, "a")  # noqa: SIM115
        fcntl.flock(_in_use[folder], fcntl.LOCK_SH)


def remove_oldest(root: Path) -> None:
    """Remove builds that no process uses until MOST_BYTES are left, those first that were used longest ago."""
    with contextlib.suppress(OSError):
        folders = sorted((mark.parent for mark in root.glob(f"*/{TURN}")), key=lambda one: (one / TURN).stat().st_mtime)
        sizes = {folder: sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) for folder in folders}
        left = sum(sizes.values())
        for folder, size in sizes.items():
            if left <= MOST_BYTES:
                break
            left -= size if removed(folder) else 0


def removed(folder: Path) -> bool:
    """Remove a build, unless a process uses it. Its paths are whole ones, which the tripwire of a kernel lets pass."""
    with contextlib.suppress(OSError), open(folder / TURN, "a") as first, open(folder / USED, "a") as second:
        for mark in (first, second):
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        inside = sorted(folder.rglob("*"), key=lambda path: (path != folder / TURN, len(path.parts)), reverse=True)
        for path in inside:
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        folder.rmdir()
        return True
    return False
