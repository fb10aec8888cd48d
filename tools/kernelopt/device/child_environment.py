"""The environment variables of child processes."""

import os
import re
import site
from pathlib import Path

from .. import bundle, byte_code

# Names of environment variables that a candidate must not see.
SECRETS = re.compile(
    r"(?i)token|secret|passw|credential|api_?key|private|^(aws|azure|google|gcp|ssh|github|gitlab|hf)_"
)


def child_environment(open_folder: Path, caches: Path, on_gpu: bool) -> dict[str, str]:
    """The caller's environment without its secrets, with home and temporary files in `open_folder`, where their folders
    are made, and compiler caches in `caches`."""
    own_caches = {
        name: str(caches / folder)
        for name, folder in {
            "TRITON_CACHE_DIR": "triton",
            "TORCHINDUCTOR_CACHE_DIR": "inductor",
            "TORCH_EXTENSIONS_DIR": "extensions",
            "CUDA_CACHE_PATH": "cuda",
        }.items()
    }
    for name in ("home", "tmp"):
        (open_folder / name).mkdir(exist_ok=True)
    folders = {"HOME": str(open_folder / "home"), "TMPDIR": str(open_folder / "tmp")}
    python = {"PYTHONPATH": bundle.python_path()}
    python["PYTHONUSERBASE"] = site.getuserbase()  # packages under the user's home stay importable
    harmless = {name: value for name, value in os.environ.items() if not SECRETS.search(name)}
    environment = {**harmless, **own_caches, **folders, **python}
    environment.pop("PYTHONSAFEPATH", None)
    if folder := byte_code.kept():
        environment.setdefault("PYTHONPYCACHEPREFIX", str(folder))
    environment["TRITON_INTERPRET"] = "0" if on_gpu else "1"
    if on_gpu:  # a copy from it then lies in huge pages: page faults took most of its time
        environment.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # NVML's order, so that the GPU that is locked is used
    return environment
