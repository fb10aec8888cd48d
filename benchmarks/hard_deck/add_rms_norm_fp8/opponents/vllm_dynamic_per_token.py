"""vLLM's CUDA kernel for the same: rms_norm_dynamic_per_token_quant with a residual. Right on an H100 in 13
of 15 cases; it declines 2.

Written for vLLM 0.33.0: pip install vllm==0.33.0, or ../../opponents.py, which takes the library
of its operators from the wheel without the code for other cards. Nothing is kept between calls."""

import importlib.util
from pathlib import Path

import torch

INSTALL = "vllm is not installed in this environment; run: pip install vllm==0.33.0"


def operators():
    """vLLM's operators, without vLLM, which would configure the process."""
    found = importlib.util.find_spec("vllm")
    folders = [Path(folder) for folder in found.submodule_search_locations] if found else []
    libraries = [path for folder in folders for path in folder.glob("_C_stable_libtorch*.so")]
    if not libraries:
        raise ImportError(INSTALL)
    torch.ops.load_library(str(libraries[0]))
    return torch.ops._C


vllm = operators()


def kernel_function(x, residual, weight):
    values = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
    vllm.rms_norm_dynamic_per_token_quant(values, x, weight, scales, 1e-6, None, residual)
    return values, scales
