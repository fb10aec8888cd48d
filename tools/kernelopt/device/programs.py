"""Where NVIDIA's programs are, and AMD's hipcc. No other place looks for them."""

import importlib.util
import os
import shutil
from pathlib import Path

CUDA = "/usr/local/cuda"  # where the toolkit's installer puts a link to the newest
ROCM = "/opt/rocm"  # where ROCm's installer puts a link to the newest
PARTS = ("bin", "compute-sanitizer")  # of a toolkit, with programs


def find(name: str) -> str | None:
    """The path of a program, or None. It looks on the PATH, in a CUDA toolkit ($CUDA_HOME, $CUDA_PATH, the usual
    place), in ROCm ($ROCM_HOME, $ROCM_PATH, the usual place), in Triton's wheel, which has ptxas, cuobjdump and
    nvdisasm, and in NVIDIA's wheels, of which nvidia-cuda-nvcc has nvcc."""
    return next((path for folder in (None, *folders()) if (path := shutil.which(name, path=folder))), None)


def folders() -> list[str]:
    """The folders of programs that are not on the PATH."""
    named = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH", "ROCM_HOME", "ROCM_PATH")]
    toolkits = [root for root in (*named, CUDA, ROCM) if root]
    of_triton = [Path(folder, "backends", "nvidia", "bin") for folder in package_folders("triton")]
    of_nvidia = [path for folder in package_folders("nvidia") for path in sorted(Path(folder).glob("*/bin"))]
    return [str(path) for path in (*(Path(root, part) for root in toolkits for part in PARTS), *of_triton, *of_nvidia)]


def package_folders(name: str) -> list[str]:
    """Where an installed package lies, several folders for a namespace; empty where it is not installed."""
    spec = importlib.util.find_spec(name)
    return list((spec and spec.submodule_search_locations) or [])
