"""Byte code of what worker processes import, for machines on which torch lies without any.

uv installs none, and some images set PYTHONDONTWRITEBYTECODE, so that nobody adds it. Each process that imports torch
then compiles its modules anew: 4.3 to 5.0 s in place of 1.5 to 1.7 s on the machine of an H100. `python -m
kernelopt.byte_code`, which scripts/setup.sh runs, keeps the byte code in the environment's folder. Nothing is written
beside torch.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from . import environment
from .errors import EnvironmentLacks, say

FOLDER = "byte-code"
MODULES = (
    "kernelopt.worker.server",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.utils.cpp_extension",
    "triton.experimental.gluon",
)
IMPORT_ALL = """
import contextlib, importlib, sys
for module in sys.argv[1:]:
    with contextlib.suppress(Exception):  # this torch lacks it
        importlib.import_module(module)
"""


def kept() -> Path | None:
    """The folder with the kept byte code, for PYTHONPYCACHEPREFIX; None where torch has its own, or none is current."""
    found = importlib.util.find_spec("torch")
    try:
        folder = environment.folder() / FOLDER
    except EnvironmentLacks:
        return None
    if not (folder.is_dir() and found and found.has_location) or is_current(found.cached, found.origin):
        return None
    return folder if is_current(below(folder, found.origin), found.origin) else None


def keep(folder: Path, package: str = "torch", modules: tuple[str, ...] = MODULES) -> bool:
    """Write the byte code of a package, of `modules` and of all that they import into `folder`. Do nothing where the
    package has byte code beside it, or current byte code in `folder`. Return whether anything was written. OSError
    where it cannot be written."""
    found = importlib.util.find_spec(package)
    if not (found and found.has_location):
        return False
    if any(is_current(cached, found.origin) for cached in (found.cached, below(folder, found.origin))):
        return False
    part = folder.with_name(f"{folder.name}.part")  # so that half of it is never taken for the whole
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    say(f"setup: {package} has no byte code: keeping it in {folder}, once")
    write(part, Path(found.origin).parent, modules)
    if not is_current(below(part, found.origin), found.origin):
        shutil.rmtree(part, ignore_errors=True)
        raise OSError(f"no byte code could be written below {folder.parent}")
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
    return True


def write(folder: Path, package: Path, modules: tuple[str, ...]) -> None:
    """Write the byte code of a package, on all cores, and then of all else that `modules` import. Errors are
    ignored: some modules of torch need a newer Python."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    variables["PYTHONPYCACHEPREFIX"] = str(folder)
    for arguments in (["-m", "compileall", "-q", "-j", "0", str(package)], ["-c", IMPORT_ALL, *modules]):
        subprocess.run([sys.executable, *arguments], env=variables, capture_output=True)


def below(folder: Path, source: str | Path) -> str:
    """Where Python looks for the byte code of a module with PYTHONPYCACHEPREFIX."""
    before, sys.pycache_prefix = sys.pycache_prefix, str(folder)
    try:
        return importlib.util.cache_from_source(source)
    finally:
        sys.pycache_prefix = before


def is_current(cached: str | None, source: str) -> bool:
    """Whether `cached` holds byte code of the source as it is now. It begins with four words of four bytes: Python's
    magic number, flags, and the source's time and size (PEP 552); with flags it does not depend on the time."""
    try:
        header, now = Path(cached or "").read_bytes()[:16], Path(source).stat()
    except OSError:
        return False
    flags, *of_source = (int.from_bytes(header[at : at + 4], "little") for at in (4, 8, 12))
    of_now = [int(now.st_mtime) & 0xFFFFFFFF, now.st_size & 0xFFFFFFFF]
    return header[:4] == importlib.util.MAGIC_NUMBER and (bool(flags) or of_source == of_now)


if __name__ == "__main__":
    if not sys.pycache_prefix:  # the user's own choice
        try:
            keep(environment.folder() / FOLDER)
        except OSError as error:
            say(f"setup: torch has no byte code, and none can be kept ({error}): each command takes some seconds more")
