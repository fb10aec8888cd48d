"""QuACK's grouped product in CuTe DSL with SwiGLU in its epilogue, which SonicMoE uses. Right in all six configurations
on an H200 on 2026-11-28.

Written for quack-kernels 0.4.1 with nvidia-cutlass-dsl 4.4.2: pip install quack-kernels==0.4.1
nvidia-cutlass-dsl-libs-base==4.4.2 apache-tvm-ffi, or ../../opponents.py. QuACK's tuner chooses among six of its 18
configurations for 9.0, when it first sees the offsets: the four quickest of all on an H200 for even experts, and the
two quickest for uneven ones. Each is compiled once: the first call took 14 s on 16 cores.
Kept between calls: gate and up as one weight, their columns in turn, for the memory of both as long as it lives, as a
model packs at load; and the tuner's choice, for the memory of offsets and gate. Other contents written into that memory
need `forget()`; the timing harness writes them there before each call, and a packing in each would be timed."""

import os

import torch
from torch.multiprocessing.reductions import StorageWeakRef

os.environ.setdefault("QUACK_CACHE_ENABLED", "0")  # else QuACK writes what it compiles into the folder for temporaries

try:
    from quack.autotuner import Autotuner
    from quack.gemm_interface import gemm_gated_tuned
except ImportError as error:
    raise ImportError(
        "quack-kernels is not installed in this environment; run: pip install quack-kernels==0.4.1 "
        "nvidia-cutlass-dsl-libs-base==4.4.2 apache-tvm-ffi"
    ) from error

QUICK = {  # rows and columns of a tile, then of a cluster; whether the two warpgroups take turns
    (128, 192, 2, 1, True),
    (128, 160, 2, 1, True),
    (128, 256, 2, 1, False),
    (256, 128, 1, 2, False),
    (128, 128, 1, 2, True),
    (128, 256, 1, 2, False),
}
_kept: dict[tuple, tuple] = {}


def forget():
    _kept.clear()


def kept(make, *tensors):
    """make(), or what it made for this memory before, if the memory was not freed since."""
    key = tuple((one.data_ptr(), one.shape) for one in tensors)
    held = _kept.get(key)
    if held is None or any(memory.expired() for memory in held[0]):
        for other in [other for other, (memories, _) in _kept.items() if any(one.expired() for one in memories)]:
            del _kept[other]
        held = _kept[key] = [StorageWeakRef(one.untyped_storage()) for one in tensors], make()
    return held[1]


def interleaved(gate, up):
    """experts x hidden x 2 inner: a column of gate, then that of up; the hidden dimension is contiguous."""
    return torch.stack([gate, up], 3).flatten(2).mT.contiguous().mT


def quickest(*arguments, **others):
    """The configuration that QuACK's tuner finds quickest for these arguments."""
    ours = [one for one in gemm_gated_tuned.configs if taken(one.kwargs["config"])]
    tuner = Autotuner(gemm_gated_tuned.fn, key=[], configs=ours)
    tuner(*arguments, **others)
    return tuner.best_config.kwargs["config"]


def taken(config):
    shape = config.tile_m, config.tile_n, config.cluster_m, config.cluster_n, config.pingpong
    return config.device_capacity == 9 and shape in QUICK


def kernel_function(x, gate, up, offsets):
    weight = kept(lambda: interleaved(gate, up), gate, up)
    y = x.new_empty(len(x), gate.shape[2])
    arguments = x, weight, None, y  # None: the sums before SwiGLU are not stored
    config = kept(lambda: quickest(*arguments, cu_seqlens_m=offsets), offsets, gate)
    gemm_gated_tuned.fn(*arguments, cu_seqlens_m=offsets, config=config)
    return y
