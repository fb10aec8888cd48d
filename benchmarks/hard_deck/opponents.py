#!/usr/bin/env python3
"""Other libraries as opponents, for a GPU machine without a network: prepared into a folder, installed from it there.

python benchmarks/hard_deck/opponents.py prepare FOLDER [NAME ...]   # needs a package registry; see flashinfer below
python benchmarks/hard_deck/opponents.py install FOLDER SITE [NAME ...]
export PYTHONPATH=SITE:SITE/nvidia_cutlass_dsl/python_packages

Each library becomes FOLDER/NAME.tar.xz: the part of its wheel that its opponents use. Run prepare with the Python,
torch and CUDA of the GPU machine. flashinfer also needs torch, apache-tvm-ffi, ninja, g++ and nvcc: its kernels are
built ahead, for cards of 9.0. NAME: default all."""

import argparse
import ast
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

BUILD_FLASHINFER = """
import sys, torch
from flashinfer.jit.attention import modules
from flashinfer.jit.norm import gen_norm_module
from flashinfer.jit.topk import gen_topk_module
bf16 = (torch.bfloat16,) * 3
specs = [gen_norm_module()]
for width in (128, 64):
    specs.append(modules.gen_batch_decode_module(*bf16, torch.int32, width, width, 0, False, False))
    arguments = ("fa2", *bf16, torch.int32, width, width, 0, False, False, False)
    specs.append(modules._gen_batch_prefill_primary_module(*arguments))
specs.append(gen_topk_module())
for spec in specs:
    spec.build(verbose=False)
    print(spec.name, spec.get_library_paths()[0], flush=True)
"""
STAND_INS = {  # of the modules that vLLM's Triton kernels import, and that would bring all of vLLM
    "vllm/__init__.py": "",
    "vllm/envs.py": "VLLM_BATCH_INVARIANT = False\n",
    "vllm/logger.py": "import logging\n\n\ndef init_logger(name):\n"
    "    logger = logging.getLogger(name)\n    logger.debug_once = logger.debug\n    return logger\n",
    "vllm/platforms/__init__.py": "import torch\n\n\nclass current_platform:\n"
    "    fp8_dtype = staticmethod(lambda: torch.float8_e4m3fn)\n"
    "    is_device_capability_family = staticmethod(lambda family: False)\n"
    "    is_rocm = staticmethod(lambda: False)\n",
    "vllm/triton_utils/__init__.py": "import triton\nimport triton.language as tl\n",
}


@dataclass(frozen=True)
class Library:
    """requirement: for pip. needed: of a path in its wheel. finish: changes the unpacked folder. beside: further
    requirements, whole."""

    requirement: str
    needed: Callable[[str], bool]
    finish: Callable[[Path], None] = lambda site: None
    beside: tuple[str, ...] = ()


def of_flashinfer(path: str) -> bool:
    """Its Python, and the templates that it fills in before it looks whether a kernel is built."""
    templates = ("flashinfer/data/csrc/batch_decode", "flashinfer/data/csrc/batch_prefill")
    return path.startswith(templates) or (path.startswith("flashinfer/") and path.endswith(".py"))


def build_flashinfer(site: Path) -> None:
    """Builds its kernels, and puts them where it looks first. What was built stays in $FLASHINFER_WORKSPACE_BASE, if
    that is set, and is not built again."""
    base = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", site.parent / "build")).resolve()
    whole, links = base / "whole", site.parent / "links"
    if not whole.exists():
        for wheel in sorted(site.parent.glob("*.whl")):
            unpack(wheel, whole, lambda path: True)
    links.mkdir()
    link_what_the_toolkit_may_lack(links)
    environment = {
        **os.environ,
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "FLASHINFER_WORKSPACE_BASE": str(base),
        "CPATH": f"{links}:{os.environ.get('CPATH', '')}",
        "LIBRARY_PATH": f"{links}:{os.environ.get('LIBRARY_PATH', '')}",
        "PYTHONPATH": str(whole),
    }
    made = subprocess.run(
        [sys.executable, "-c", BUILD_FLASHINFER], env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    built = [line.split() for line in made.stdout.splitlines() if line.endswith(".so")]
    for name, library in built:
        target = site / "flashinfer" / "data" / "aot" / name / f"{name}.so"
        target.parent.mkdir(parents=True)
        shutil.copy(library, target)


def link_what_the_toolkit_may_lack(folder: Path) -> None:
    """An empty libcuda to link with, and the CUDA runtime and headers that torch brought."""
    linked = ["g++", "-shared", "-x", "c++", os.devnull, "-Wl,-soname,libcuda.so.1", "-o", folder / "libcuda.so"]
    subprocess.run(linked, check=True)
    headers = {f"include/{library}*.h": lambda found: found.name for library in ("cublas", "curand")}
    parts = {"lib/libcudart.so.*": lambda found: "libcudart.so", **headers}
    for pattern, name in parts.items():
        for found in (one for place in sys.path for one in Path(place).glob(f"nvidia/*/{pattern}")):
            (folder / name(found)).unlink(missing_ok=True)
            (folder / name(found)).symlink_to(found)


def of_vllm(path: str) -> bool:
    kernels = ("triton_unified_attention.py", "triton_attention_helpers.py")
    return path in (f"vllm/v1/attention/ops/{name}" for name in kernels) or path.startswith("vllm/_C_stable_libtorch")


def finish_vllm(site: Path) -> None:
    """Writes the stand-ins, takes an enumeration out of a large module, and drops the code for other cards."""
    for path, text in STAND_INS.items():
        target = site / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    (wheel,) = site.parent.glob("vllm-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read("vllm/v1/kv_cache_interface.py").decode()
    (found,) = (one for one in ast.parse(text).body if getattr(one, "name", "") == "KVQuantMode")
    enumeration = "from enum import IntEnum\n\n\n" + ast.get_source_segment(text, found) + "\n"
    (site / "vllm" / "v1" / "kv_cache_interface.py").write_text(enumeration)
    for library in site.glob("vllm/*.so"):
        library.write_bytes(for_one_card(library.read_bytes(), 90))


PTX = 1
SMALL_BYTES = 100_000  # vLLM repacks weights by small kernels that exist as PTX of 8.0 alone
FAT_BINARY = 0xBA55ED50


def for_one_card(library: bytes, wanted: int) -> bytes:
    """The library with zeros in place of the code for other cards than the wanted one (90: 9.0). Small PTX stays."""
    changed = bytearray(library)
    for at, end in fat_binaries(library):
        while at + 16 < end:
            magic, _, header, size = struct.unpack_from("<IHHQ", library, at)
            if magic != FAT_BINARY:
                at += 8
                continue
            at, last = at + header, at + header + size
            while at < last:
                kind, _, header, size = struct.unpack_from("<HHIQ", library, at)
                (card,) = struct.unpack_from("<I", library, at + 28)
                if card != wanted and not (kind == PTX and size < SMALL_BYTES):
                    changed[at + header : at + header + size] = bytes(size)
                at += header + size
    return bytes(changed)


def fat_binaries(library: bytes) -> Iterable[tuple[int, int]]:
    """Where the sections .nv_fatbin of an ELF file of 64 bits begin and end."""
    (table,) = struct.unpack_from("<Q", library, 40)
    size, count, of_names = struct.unpack_from("<HHH", library, 58)
    sections = [struct.unpack_from("<IIQQQQ", library, table + number * size) for number in range(count)]
    for name, _, _, _, offset, length in sections:
        at = sections[of_names][4] + name
        if library[at : library.index(0, at)] == b".nv_fatbin":
            yield offset, offset + length


LIBRARIES = {
    "flashinfer": Library(
        "flashinfer-python==0.7.2.post1", of_flashinfer, build_flashinfer, ("apache-tvm-ffi==0.1.15.post2",)
    ),
    "gemlite": Library("gemlite==0.6.0.post2", lambda path: path.startswith("gemlite/")),
    "vllm": Library("vllm==0.33.0", of_vllm, finish_vllm),
    "quack": Library(
        "quack-kernels==0.4.1",
        lambda path: path.startswith("quack/"),
        beside=("nvidia-cutlass-dsl-libs-base==4.4.2", "apache-tvm-ffi==0.1.15.post2"),
    ),
}


def unpack(wheel: Path, folder: Path, needed: Callable[[str], bool]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if needed(name)])


def prepare(name: str, folder: Path) -> None:
    library, start = LIBRARIES[name], time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        site = Path(scratch) / "site"
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", scratch]
        subprocess.run([*pip, library.requirement], check=True)
        (own,) = Path(scratch).glob("*.whl")
        unpack(own, site, library.needed)
        if library.beside:
            subprocess.run([*pip, *library.beside], check=True)
        for wheel in set(Path(scratch).glob("*.whl")) - {own}:
            unpack(wheel, site, lambda path: True)
        library.finish(site)
        target = folder / f"{name}.tar.xz"
        with tarfile.open(target, "w:xz") as archive:
            for path in sorted(site.iterdir()):
                archive.add(path, path.name)
    print(f"{name}: {target.stat().st_size / 2**20:.1f} MiB, {time.monotonic() - start:.0f} s", flush=True)


def install(name: str, folder: Path, site: Path) -> None:
    with tarfile.open(folder / f"{name}.tar.xz") as archive:
        archive.extractall(site, filter="data")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)
    for step in ("prepare", "install"):
        arguments = steps.add_parser(step)
        arguments.add_argument("folder", type=Path)
        if step == "install":
            arguments.add_argument("site", type=Path)
        arguments.add_argument("names", nargs="*", metavar="NAME", help=", ".join(LIBRARIES))
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in LIBRARIES]:
        parser.error(f"{unknown[0]} is none of {', '.join(LIBRARIES)}")
    if args.step == "prepare":
        args.folder.mkdir(parents=True, exist_ok=True)
        for name in args.names or LIBRARIES:
            prepare(name, args.folder)
    else:
        for name in args.names or [name for name in LIBRARIES if (args.folder / f"{name}.tar.xz").exists()]:
            install(name, args.folder, args.site)


if __name__ == "__main__":
    main()
