"""torch's C++ headers without its C++ frontend, for the kernels that torch's load and load_inline build.

`#include <torch/extension.h>` also reads what a kernel seldom uses, torch::nn above all, and nvcc reads it in each of
its passes. Here two headers of light_headers/ take the place of torch/all.h and torch/python.h, which it includes, and
a third one guards pybind11. What does not compile so is compiled with torch's own headers. Only a source that asks with
#ifdef for a macro of the frontend would compile to something else.
"""

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from . import builds

FOLDER = Path(__file__).with_name("light_headers")
REPLACED = ("torch/all.h", "torch/python.h")
WITH_PYTHON = "-DLIGHT_HEADERS_WITH_PYTHON"  # for nvcc: torch/python.h is not empty
SPEAKS_TO_PYTHON = re.compile(rb"(?i:pybind11)|\bpy::|\bPy_?[A-Z]|\bTHP")
OWN = "own_headers"  # a file of a build's folder: it did not compile with the light ones
# Of what reads the source: "k.cu(3): error: …" (nvcc), "main.cpp:3:5: error: …" (g++, clang). ptxas, which may refuse
# what was read, and the linker name no line of it.
IN_THE_SOURCE = re.compile(r"(\(\d+\)|:\d+): (fatal |catastrophic )?error\b")


@functools.cache
def install() -> None:
    """From here on in this process, extensions that have a folder of builds.py are compiled so. Before
    compiler_errors.watch, which shall see what comes of an extension, and not each attempt. Not on ROCm, where torch
    translates the headers that it is given."""
    from torch.utils import cpp_extension

    if not torch.version.hip:
        versions = cpp_extension.JIT_EXTENSION_VERSIONER.entries
        cpp_extension._jit_compile = lightened(cpp_extension._jit_compile, versions)


def lightened(build: Callable, versions: dict) -> Callable:
    """torch's `_jit_compile`, with the light headers first. versions: torch's, by an extension's name: torch renames
    one that it builds a second time with other arguments."""
    signature = inspect.signature(build)

    def built(*arguments, **options):
        given = signature.bind(*arguments, **options).arguments
        folder = Path(given.get("build_directory") or "")
        if not builds.is_kept_apart(folder) or (folder / OWN).exists() or brings_its_own(given):
            return build(*arguments, **options)
        try:
            return build(**{**given, **with_light_headers(given)})
        except RuntimeError as error:
            if not IN_THE_SOURCE.search(str(error)):
                raise
        (folder / OWN).touch()
        versions.pop(given["name"], None)
        return build(*arguments, **options)

    built.__signature__ = signature
    return built


def brings_its_own(given: dict) -> bool:
    """Does a folder of the kernel's hold a header of a replaced name?"""
    folders = given.get("extra_include_paths") or []
    return any(Path(folder, name).exists() for folder in folders for name in REPLACED)


def with_light_headers(given: dict) -> dict:
    """The arguments of a build that change. Of a verbose one torch's error would not hold what the compiler said."""
    changed = {"extra_include_paths": [str(FOLDER), *(given.get("extra_include_paths") or [])], "verbose": False}
    if speaks_to_python(given["sources"]):
        changed["extra_cuda_cflags"] = [*(given.get("extra_cuda_cflags") or []), WITH_PYTHON]
    return changed


def speaks_to_python(sources: str | Sequence[str]) -> bool:
    """Does a file of CUDA C++ use Python's or pybind11's names?"""
    files = [Path(source) for source in ([sources] if isinstance(sources, str) else sources)]
    return any(SPEAKS_TO_PYTHON.search(file.read_bytes()) for file in files if file.suffix in (".cu", ".cuh"))
