"""Triton's results for a kernel's file: the compiled stages, their resources, and the autotuner's choice."""

import os
import sys
from pathlib import Path
from typing import TypedDict

from triton.runtime import JITFunction

STAGES = ("ttir", "ttgir", "llir", "ptx", "cubin", "amdgcn")


class CompilationJson(TypedDict):
    """What one compilation of a kernel takes, None where Triton does not say it. registers, spills: of a thread, in
    registers of 4 bytes. shared_bytes: of a block. files: names of its stages' files, as far as they were written."""

    registers: int | None
    spills: int | None
    shared_bytes: int | None
    num_warps: int | None
    num_stages: int | None
    files: list[str]


class TrialJson(TypedDict):
    """The times of a configuration that the autotuner tried; no times where it cannot run."""

    config: str
    times_us: list[float]


class TuningJson(TypedDict):
    """The configuration that the autotuner chose, and all that it tried."""

    best: str
    trials: list[TrialJson]


class TritonKernelJson(TypedDict):
    """A Triton kernel of a module. compiled: None when this version of Triton keeps it in an unknown place; [] for a
    kernel that was never launched. autotuned: the last tuning, None without one."""

    name: str
    compiled: list[CompilationJson] | None
    autotuned: TuningJson | None


def of_module(module, folder: str | None) -> list[TritonKernelJson]:
    """The Triton kernels of a module. With a folder the stages of each compilation are written there."""
    kernels = []
    for name, value in vars(module).items():
        kernel = _innermost(value)
        if kernel is not None:
            known = _compilations(kernel)
            compiled = None if known is None else [_compiled(name, at, one, folder) for at, one in enumerate(known)]
            kernels.append({"name": name, "compiled": compiled, "autotuned": _autotuned(value)})
    return kernels


def extensions() -> list[str]:
    """The files of the CUDA C++ extensions that this process built and loaded."""
    folder = os.environ.get("TORCH_EXTENSIONS_DIR", "")
    files = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
    return [file for file in files if folder and file.startswith(folder) and file.endswith(".so")]


def _innermost(value) -> JITFunction | None:
    """Triton's JIT function inside autotuners and heuristics; None for anything else."""
    while hasattr(value, "fn") and not isinstance(value, JITFunction):
        value = value.fn
    return value if isinstance(value, JITFunction) else None


def _compilations(kernel: JITFunction) -> list | None:
    """The compiled kernels; None when this version of Triton keeps them in neither place. Triton 3.2 keeps them in
    `cache`, by device and key. Triton 3.3 and newer keep them in `device_caches`, as the first part of a tuple."""
    place = next((name for name in ("device_caches", "cache") if hasattr(kernel, name)), None)
    if place is None:
        return None
    caches = [cache[0] if isinstance(cache, tuple) else cache for cache in getattr(kernel, place).values()]
    return [one for cache in caches for one in cache.values() if hasattr(one, "asm")]


def _compiled(name: str, number: int, kernel, folder: str | None) -> CompilationJson:
    files = []
    for stage in STAGES if folder else ():
        if stage in kernel.asm:
            text = kernel.asm[stage]
            path = Path(folder, f"{name}-{number}.{stage}")
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
            files.append(path.name)
    about = kernel.metadata
    return {
        "registers": getattr(kernel, "n_regs", None),
        "spills": getattr(kernel, "n_spills", None),
        "shared_bytes": getattr(about, "shared", None),
        "num_warps": getattr(about, "num_warps", None),
        "num_stages": getattr(about, "num_stages", None),
        "files": files,
    }


def _autotuned(value) -> TuningJson | None:
    while hasattr(value, "fn") and not hasattr(value, "best_config"):
        value = value.fn
    best = getattr(value, "best_config", None)
    if best is None:
        return None
    timings = getattr(value, "configs_timings", None) or {}
    trials = [{"config": str(config), "times_us": _microseconds(times)} for config, times in timings.items()]
    return {"best": str(best), "trials": trials}


def _microseconds(times) -> list[float]:
    """Triton keeps milliseconds; a configuration that cannot run has infinity, which JSON cannot hold."""
    each = times if isinstance(times, list | tuple) else [times]
    return [1000 * time for time in each if time != float("inf")]
