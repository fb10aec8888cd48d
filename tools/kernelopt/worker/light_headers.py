"""torch's C++ headers without its C++ frontend, for the kernels that torch's load and load_inline build.

`#include <torch/extension.h>` also reads torch::nn, torch::optim, torch::data and torch::jit, which a kernel seldom
uses, and nvcc reads them three times. Here two headers of light_headers/ take the place of torch/all.h and
torch/python.h, which torch/extension.h includes. What lacks a name then is compiled with torch's own headers.
"""

import functools
import inspect
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from . import compiler_errors

FOLDER = Path(__file__).with_name("light_headers")
WITH_PYTHON = "-DLIGHT_HEADERS_WITH_PYTHON"  # for nvcc: torch/python.h is not empty
SPEAKS_TO_PYTHON = re.compile(rb"(?i:pybind11)|\bpy::|\bPy_?[A-Z]|\bTHP")
OWN = "own_headers"  # a file of a build's folder: the light headers lacked a name
# What g++ and nvcc say of a name that is not declared; of a macro they say that its arguments are not.
LACKING = re.compile(
    r"undefined|declared|declaration|no (named )?member|not a member|class or namespace|does not name|incomplete"
    r"|no instance|no matching|not a template|type name|No such file"
)


@functools.cache
def install() -> None:
    """From here on in this process, extensions with a folder below TORCH_EXTENSIONS_DIR are compiled so. Before
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
        folder, root = Path(given.get("build_directory") or ""), os.environ.get("TORCH_EXTENSIONS_DIR")
        if not root or folder.parent != Path(root) or (folder / OWN).exists():
            return build(*arguments, **options)
        try:
            return build(**{**given, **with_light_headers(given)})
        except RuntimeError as error:
            if not LACKING.search(compiler_errors.errors_of(str(error))):
                raise
        (folder / OWN).touch()
        versions.pop(given["name"], None)
        return build(*arguments, **options)

    built.__signature__ = signature
    return built


def with_light_headers(given: dict) -> dict:
    """The arguments of a build that change."""
    changed = {"extra_include_paths": [str(FOLDER), *(given.get("extra_include_paths") or [])]}
    if speaks_to_python(given["sources"]):
        changed["extra_cuda_cflags"] = [*(given.get("extra_cuda_cflags") or []), WITH_PYTHON]
    return changed


def speaks_to_python(sources: str | Sequence[str]) -> bool:
    """Does a file of CUDA C++ use Python's or pybind11's names?"""
    files = [Path(source) for source in ([sources] if isinstance(sources, str) else sources)]
    return any(SPEAKS_TO_PYTHON.search(file.read_bytes()) for file in files if file.suffix in (".cu", ".cuh"))
