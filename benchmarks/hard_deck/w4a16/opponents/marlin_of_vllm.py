"""Marlin, as vLLM ships it: 4-bit weights with zero points, groups of 128, bf16. Right on an H100, with a
relative error of 0.0018 to 0.0028; verify_kernel.py says WRONG_VALUES, for it writes other weights into kept memory.

Written for vLLM 0.33.0: pip install vllm==0.33.0, or ../../opponents.py, which takes the library of its operators from
the wheel without the code for other cards. That library holds Marlin as PTX of 8.0, which the driver compiles for a
9.0 card at the first call.
Kept between calls: its packing, for the memory of packed, scales and zeros as long as it lives, as an engine packs at
load. Other weights written into that memory need `forget()`; the timing harness writes them there before each call, and
a packing in each would be timed."""

import importlib.util
from pathlib import Path

import torch
from torch.multiprocessing.reductions import StorageWeakRef

INSTALL = "vllm is not installed in this environment; run: pip install vllm==0.33.0"
LOCKS = 4  # a multiprocessor, as vLLM allocates them; Marlin resets them
ROWS_AND_COLUMNS = [row + 8 * column for row in range(8) for column in range(8)]  # an 8 x 8 tile, transposed
EVEN_FIRST = [0, 2, 4, 6, 1, 3, 5, 7]
UINT4 = 4 << 8  # vLLM's ScalarType: bits of the mantissa at 8, ...
UINT4 |= 1 << 50  # ... how NaN is written (as IEEE 754) at 50
_kept: dict[tuple, tuple] = {}


def operators():
    """vLLM's operators, without vLLM, which would configure the process."""
    found = importlib.util.find_spec("vllm")
    folders = [Path(folder) for folder in found.submodule_search_locations] if found else []
    libraries = [path for folder in folders for path in folder.glob("_C_stable_libtorch*.so")]
    if not libraries:
        raise ImportError(INSTALL)
    torch.ops.load_library(str(libraries[0]))
    return torch.ops._C


marlin = operators()


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


def in_words(nibbles):
    """Eight numbers of a row below 16 in an int32, the first in the low bits."""
    shifts = torch.arange(0, 32, 4, device=nibbles.device)
    words = (nibbles.long().unflatten(-1, (-1, 8)) << shifts).sum(-1)
    return torch.where(words < 1 << 31, words, words - (1 << 32)).int()


def of_fragments(by_column):
    """Scales or zero points, groups x columns, in the order of Marlin's fragments."""
    return by_column.unflatten(-1, (-1, 64))[..., ROWS_AND_COLUMNS].flatten(-2).contiguous()


def layer(packed, scales, zeros):
    """(weights, scales, zero points, locks) as Marlin reads them."""
    depth, columns = 2 * packed.shape[0], packed.shape[1]
    values = torch.stack([packed & 15, packed >> 4], 1).flatten(0, 1)
    along_k = in_words(values.t()).t().contiguous()  # GPTQ's layout, which the operator repacks
    weights = marlin.gptq_marlin_repack(along_k, depth, columns, 4, False)
    points = in_words(of_fragments(zeros.int()).unflatten(-1, (-1, 8))[..., EVEN_FIRST].flatten(-2))
    multiprocessors = torch.cuda.get_device_properties(packed.device).multi_processor_count
    locks = torch.zeros(LOCKS * multiprocessors, dtype=torch.int32, device=packed.device)
    return weights, of_fragments(scales), points, locks


def kernel_function(x, packed, scales, zeros):
    weights, of_groups, points, locks = kept(lambda: layer(packed, scales, zeros), packed, scales, zeros)
    rows, depth, columns = len(x), x.shape[1], packed.shape[1]
    absent = (
        None,
        weights,
        None,
        of_groups,
        None,
        None,
        points,
        locks,
    )  # None: output, bias, scales of x, global scale
    sums_in_fp32 = (False, True, False)  # no atomic additions, partial sums in fp32, zero points are integers
    return marlin.marlin_gemm(x, *absent, UINT4, rows, columns, depth, *sums_in_fp32)
