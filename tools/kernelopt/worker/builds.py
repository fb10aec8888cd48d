"""The builds of CUDA C++ extensions: a folder for each content.

torch has one folder for each name of an extension. The kernels of a session often share a name; a process that loads
two of them then compiles both, and the next process again. With a folder for each content, each is compiled once for
all processes that share TORCH_EXTENSIONS_DIR: those of an exploration, and of the gate after it.
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

import torch

_last_built: dict[str, str] = {}  # name of an extension -> key of the content that this process built last under it


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
        folder.mkdir(parents=True, exist_ok=True)
        with turn_in(folder):
            if _last_built.pop(name, None) != key:
                versions.pop(name, None)
            result = build(**{**given, "build_directory": str(folder)})
            _last_built[name] = key  # after a build that failed, torch would take a second call's for done
            return result

    built.by_content = True
    return built


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
    """One process at a time builds in a folder. torch's own lock outlives a process that was killed, and would hold up
    all that come after it; it is removed."""
    with open(folder / "turn", "w") as mark:
        fcntl.flock(mark, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        yield
