"""What Triton made of a kernel's file: the compiled stages, their resources, and what an autotuner chose."""

from pathlib import Path

STAGES = ("ttir", "ttgir", "llir", "ptx", "cubin", "amdgcn")


def of_module(module, folder: str | None) -> list[dict]:
    """[{name, compiled: [{registers, spills, shared_bytes, num_warps, num_stages, files}], autotuned}] of the Triton kernels of
    a module. With a folder the stages of each compilation are written there.

    autotuned: {best, trials: [{config, times_us}]} of the last tuning, None without one.
    """
    found = []
    for name, value in vars(module).items():
        kernel = _innermost(value)
        if kernel is not None:
            compiled = [_compiled(name, number, one, folder) for number, one in enumerate(_compilations(kernel))]
            found.append({"name": name, "compiled": compiled, "autotuned": _autotuned(value)})
    return found


def _innermost(value):
    """Triton's JIT function inside autotuners and heuristics; None for anything else."""
    while hasattr(value, "fn") and not hasattr(value, "device_caches"):
        value = value.fn
    return value if hasattr(value, "device_caches") else None


def _compilations(kernel) -> list:
    """The compiled kernels, by whatever version of Triton keeps them: a dict by device, whose first part is one by key."""
    caches = [cache[0] if isinstance(cache, tuple) else cache for cache in kernel.device_caches.values()]
    return [one for cache in caches for one in cache.values() if hasattr(one, "asm")]


def _compiled(name: str, number: int, kernel, folder: str | None) -> dict:
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


def _autotuned(value) -> dict | None:
    while hasattr(value, "fn") and not hasattr(value, "best_config"):
        value = value.fn
    best = getattr(value, "best_config", None)
    if best is None:
        return None
    timings = getattr(value, "configs_timings", None) or {}
    trials = [{"config": str(config), "times_us": _microseconds(times)} for config, times in timings.items()]
    return {"best": str(best), "trials": trials}


def _microseconds(times) -> list[float]:
    """Triton keeps milliseconds; a configuration that cannot run has infinity, which JSON does not know."""
    each = times if isinstance(times, list | tuple) else [times]
    return [1000 * time for time in each if time != float("inf")]
