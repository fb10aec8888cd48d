"""The files that listings are read from, and cuobjdump, which disassembles binaries."""

import json
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from ..device import programs
from ..device.pipes import last_line
from ..errors import EnvironmentLacks, Refused, UsageError
from .listings import KINDS_IN, PARSERS, SETS_LIMITS, Kernel, Resources, most_threads, usages

BINARIES = (".cubin", ".so")
USAGE_S = 60.0  # for the resources of one file: an exploration does without them rather than wait longer

# ---- Files, and the program that disassembles them ----


class Unreadable(UsageError):
    """cuobjdump cannot read a file. The message quotes cuobjdump."""


@dataclass(frozen=True)
class Listing:
    """The text of one kind in a file, or of cuobjdump's output for it, and the kernels in that text. why: the reason
    why it could not be read."""

    file: Path
    kind: str
    text: str
    kernels: list[Kernel]
    why: str | None = None


def read(path: Path, kind: str = "all") -> list[Listing]:
    """Listings of a file, or of all files below a folder, newest file first. kind: one of KINDS, or all.

    A file that cuobjdump cannot read has `why`. When any kind is requested, the PTX beside that file is read too.
    UsageError: there is nothing to read, or `path` is a file that cannot be read. Refused: no file of the folder can be
    read. EnvironmentLacks: cuobjdump is needed and absent.
    """
    files = files_of(path)
    listings = in_parallel([(file, one) for file in files for one in KINDS_IN[file.suffix] if kind in (one, "all")])
    unread = [listing for listing in listings if listing.why]
    beside = [ptx for listing in unread if (ptx := listing.file.with_suffix(".ptx")).is_file() and ptx not in files]
    if kind == "all":
        listings += in_parallel([(ptx, "ptx") for ptx in beside])
    if any(listing.kernels for listing in listings):
        return listings
    if not unread:
        other = "" if kind == "all" else f" as {kind}; --kind all takes any kind"
        raise UsageError(f"{path} holds no kernel{other}")
    remedy = "; --kind all reads the PTX beside it" if beside or (path.is_dir() and any(path.rglob("*.ptx"))) else ""
    if path.is_dir():
        raise Refused(f"none of the {len(unread)} files in {path} can be read; for example: {unread[0].why}{remedy}")
    raise UsageError(f"{unread[0].why}{remedy}")


def files_of(path: Path) -> list[Path]:
    """The file `path`, or the files with code below that folder, newest first; UsageError when there is none."""
    if path.is_dir():  # shared objects in a cache are host code as a rule
        files = [
            file for file in path.rglob("*") if file.suffix in KINDS_IN and file.suffix != ".so" and file.is_file()
        ]
    elif not path.exists():
        raise UsageError(f"{path} does not exist")
    else:
        files = [path]
    if not files or any(file.suffix not in KINDS_IN for file in files):
        raise UsageError(f"{path} has no code to read; pass a file of one of these kinds: {', '.join(KINDS_IN)}")
    return sorted(files, key=lambda file: (-file.stat().st_mtime, str(file)))


def in_parallel(wanted: list[tuple[Path, str]]) -> list[Listing]:
    """One listing per file and kind. cuobjdump takes a quarter of a second, and a cache has hundreds of files."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda one: listing_of(*one), wanted))


def listing_of(file: Path, kind: str) -> Listing:
    try:
        text = text_of(file, kind)
    except Unreadable as error:
        return Listing(file, kind, "", [], str(error))
    kernels = PARSERS[kind](text)
    bounds = most_threads(dump(file, ["-elf"])) if file.suffix in BINARIES and SETS_LIMITS in text else {}
    for kernel in kernels:
        kernel.most_threads = bounds.get(kernel.name)
        kernel.resources = replace(kernel.resources, dynamic_shared_bytes=dynamic_shared_bytes(file))
    return Listing(file, kind, text, kernels)


def dynamic_shared_bytes(file: Path) -> int | None:
    """The shared memory that a launch of the code adds. Triton's cache has it in NAME.json beside NAME.cubin. None
    elsewhere."""
    try:
        metadata = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    shared = metadata.get("shared") if isinstance(metadata, dict) else None
    return shared if isinstance(shared, int) else None


def choose(listings: list[Listing], name: str | None) -> list[tuple[Listing, Kernel]]:
    """The kernels called `name`, or else those with `name` in theirs. The newest of each name come first.

    UsageError lists the kernels when none fits.
    """
    pairs = [(listing, kernel) for listing in listings for kernel in listing.kernels]
    exact = [pair for pair in pairs if pair[1].name == name]
    chosen = exact or [pair for pair in pairs if name is None or name in pair[1].name]
    if not chosen:
        names = sorted({kernel.name for _, kernel in pairs})
        raise UsageError(f"no kernel has {name} in its name; the kernels are: {', '.join(names)}")
    seen: Counter = Counter()
    ranked = []
    for pair in chosen:
        key = (pair[1].name, pair[1].kind, pair[1].arch)
        ranked.append((seen[key], pair))
        seen[key] += 1
    return [pair for _, pair in sorted(ranked, key=lambda entry: entry[0])]


def text_of(file: Path, kind: str) -> str:
    if file.suffix in BINARIES:
        return dump(file, ["-ptx"] if kind == "ptx" else ["-sass", "-res-usage"])
    return file.read_text(encoding="utf-8", errors="replace")


def resources(file: Path) -> list[Resources]:
    """What the functions of a cubin or a shared library take, read without their code. Unreadable, EnvironmentLacks:
    as in `dump`."""
    return [taken for _, taken in usages(dump(file, ["-res-usage"], USAGE_S))]


def dump(file: Path, options: list[str], timeout_s: float | None = None) -> str:
    """The output of cuobjdump for a file. Unreadable quotes cuobjdump's last line when it cannot read the file, or says
    that it took longer than `timeout_s`. EnvironmentLacks: there is no cuobjdump."""
    command = [program(), *options, str(file)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise Unreadable(f"cuobjdump did not read {file} within {timeout_s:.0f} s") from None
    if done.returncode != 0:
        raise Unreadable(f"cuobjdump cannot read {file}; its message: {last_line(done.stderr)}")
    return done.stdout


def program() -> str:
    """The path of cuobjdump."""
    if path := programs.find("cuobjdump"):
        return path
    raise EnvironmentLacks("cuobjdump is not here: install the CUDA toolkit or Triton's wheel, or pass a .sass file")
