"""Launches of candidates of the hard deck that skip Triton's binder, beside those that do not: python lean_launches.py
DECK CANDIDATE CACHE. The CUDA driver is a stand-in (benchmarks/stand_in_cuda.py) and runs no kernel; it writes down what
it is handed. A candidate that has launched all of its cases once, and so goes straight to compiled code, must hand over
what a fresh copy of it does, which goes through Triton. Exits with 1 at the first difference, with 3 where this Triton
keeps its launcher otherwise. CACHE is a folder for what Triton compiles: PTX in place of machine code, which nothing
here runs, and without LLVM's optimisations."""

import importlib.util
import os
import sys
from pathlib import Path

DECK = Path(sys.argv[1])
os.environ |= {"TRITON_CACHE_DIR": sys.argv[3], "DISABLE_LLVM_OPT": "1"}
sys.path.insert(0, str(DECK.parent))
import stand_in_cuda

STAND_IN = stand_in_cuda.activate()

import torch
from triton import knobs
from triton.backends.nvidia.compiler import CUDABackend

CUDABackend.make_cubin = lambda self, ptx, *_: ptx.encode()

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


class GPU:
    multi_processor_count = 132


torch.cuda.get_device_properties = lambda device: GPU


def moved(tensor: torch.Tensor, by: int = 0) -> torch.Tensor:
    """A copy that begins `by` bytes behind a multiple of 64."""
    size = tensor.element_size()
    assert by % size == 0
    room = torch.empty(tensor.numel() + by // size, dtype=tensor.dtype)
    assert room.data_ptr() % 64 == 0
    return room[by // size :].view(tensor.shape).copy_(tensor)


def fp8_product(m=128, n=128, k=128, per_row=False, scale=torch.float32, off=0, scale_off=0, dtype=E4M3):
    x, weight = (moved(torch.zeros(rows, k, dtype=dtype), off) for rows in (m, n))
    return x, weight, torch.tensor(0.5), moved(torch.zeros(n if per_row else 1, dtype=scale), scale_off)


def fp8_block_product(m=128, n=128, k=256, off=0, scale_off=0):
    x, weight = (moved(torch.zeros(rows, k, dtype=E4M3), off) for rows in (m, n))
    scales = (moved(torch.zeros(rows, -(-k // 128)), scale_off) for rows in (m, -(-n // 128)))
    return x, weight, *scales


def kda(batch=1, tokens=16, heads=1, beta=BF16, beta_off=0, off=0):
    shape = batch, tokens, heads
    q, k, v = (moved(torch.zeros(*shape, 32, dtype=BF16), off) for _ in range(3))
    return q, k, v, torch.zeros(*shape, 32), moved(torch.zeros(*shape, dtype=beta), beta_off)


def moe_up(visits=64, hidden=64, inner=128, experts=4, off=0):
    x, gate, up = (
        moved(torch.zeros(*shape, dtype=BF16), off) for shape in ((visits, hidden), *[(experts, hidden, inner)] * 2)
    )
    return x, gate, up, torch.zeros(experts + 1, dtype=torch.int32)


CASES = {  # makes inputs; constants; what changes between calls: sizes, values 1, multiples of 16, types
    "fp8_product/tma": [
        fp8_product, "BM = 64, BN = 64, BK = 64, SKINNY_BK = 64, SKINNY_STAGES = 1, STAGES = 1, WARPS = 4", {}, {"m": 256}, {"m": 144}, {"m": 130}, {"m": 65, "n": 1}, {"n": 136}, {"n": 129}, {"k": 129}, {"per_row": True},
        {"scale": torch.float64}, {"per_row": True, "scale_off": 4}, {"off": 4}, {"off": 1}, {"k": 129, "off": 4}, {"dtype": torch.float8_e5m2},
        {"m": 32, "k": 256}, {"m": 1, "k": 256}, {"m": 33}, {"m": 1, "k": 257, "per_row": True},
    ],
    "fp8_block_product/tma": [
        fp8_block_product, "BM = 64, TALL = 0", {}, {"m": 144}, {"n": 129}, {"k": 129}, {"off": 4}, {"scale_off": 4}, {"m": 1, "k": 129},
    ],
    "moe_up/roles": [
        moe_up, "WIDE = 0, STAGES = 2", {}, {"visits": 128}, {"experts": 16}, {"hidden": 60}, {"hidden": 60, "off": 2}, {"inner": 136},
    ],
    "kda/two_products": [
        kda, "WIDTH = 32, CHUNK = 16, BLOCK = 16, STAGES = 1", {}, {"tokens": 130, "heads": 2}, {"beta": torch.float32}, {"beta_off": 2},
    ],
}  # fmt: skip


def loaded():
    problem, name = sys.argv[2].split("/")
    path = DECK / problem / "candidates" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for constant, value in (pair.split(" = ") for pair in CASES[sys.argv[2]][1].split(", ") if pair):
        assert hasattr(module, constant), constant
        setattr(module, constant, int(value))
    return module


MAKERS = [(torch.Tensor, "new_empty"), (torch.Tensor, "clone"), (torch, "empty_like")]


def handed_over(module, inputs) -> list[tuple]:
    """What a call hands over. An address is told as what lies there, an input or the n-th tensor that the call made, and
    how many bytes behind its beginning."""
    there = {f"input {i}": tensor for i, tensor in enumerate(inputs) if isinstance(tensor, torch.Tensor)}
    makers = [getattr(home, name) for home, name in MAKERS]

    def noted(make):
        def maker(*arguments, **options):
            there[f"made {len(there)}"] = made = make(*arguments, **options)
            return made

        return maker

    def told(word):
        for name, tensor in there.items():
            if 0 <= word - tensor.data_ptr() < tensor.nbytes:
                return name, word - tensor.data_ptr()
        return word

    for (home, name), make in zip(MAKERS, makers, strict=True):
        setattr(home, name, noted(make))
    try:
        launches = STAND_IN.launches(lambda: module.kernel_function(*inputs))
    finally:
        for (home, name), make in zip(MAKERS, makers, strict=True):
            setattr(home, name, make)
    assert launches and all(launch.words for launch in launches)
    return [(one.function, one.grid, one.stream, [told(word) for word in one.words]) for one in launches]


def are_lean(module) -> bool:
    """Whether all that was launched has gone the short way."""
    launchers = [one for one in vars(module).values() if isinstance(one, module.Launches)]
    ready = [one for launcher in launchers for one in launcher.ready.values()]
    return bool(ready) and all(ready)


def main() -> int:
    make, _, *cases = CASES[sys.argv[2]]
    old = loaded()
    for case in cases:
        old.kernel_function(*make(**case))
    if not are_lean(old):
        return 3
    bound, bind = [], next(one for one in vars(old).values() if isinstance(one, old.Launches)).kernel.__class__.run
    for device in (1, 0):  # the second is where all has been launched before
        STAND_IN.device = device
        for case in cases:
            inputs = make(**case)
            expected, came = handed_over(loaded(), inputs), handed_over(old, inputs)
            print(device, case, len(came), "launches", flush=True)
            if came != expected:
                print("through Triton:", expected, "\nstraight:", came)
                return 1
    return straight(old, make(**cases[0]), bind, bound)


def straight(module, inputs, bind, bound) -> int:
    """Whether a launch passes the binder by, and does not where somebody listens to launches."""
    kernel_type = next(one for one in vars(module).values() if isinstance(one, module.Launches)).kernel.__class__
    kernel_type.run = lambda self, *arguments, **options: bound.append(self) or bind(self, *arguments, **options)
    module.kernel_function(*inputs)
    alone = len(bound)
    heard = []
    hook = knobs.runtime.launch_enter_hook
    if hasattr(hook, "add"):
        hook.add(heard.append)
    else:
        knobs.runtime.launch_enter_hook = heard.append
    module.kernel_function(*inputs)
    print("through the binder:", alone, "then", len(bound), "heard", len(heard))
    return int(alone != 0 or not bound or not heard)


sys.exit(main())
