"""A stand-in for a GPU that is not here: what Triton's driver, torch.cuda and tensors say of it."""

import contextlib
import functools
import types
from collections.abc import Callable
from typing import ClassVar

import torch
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from ..hardware.card import CompileTarget
from .interpreter import HostDriver
from .named_devices import is_gpu

WARP = 32  # threads; AMD's wave is as wide as Triton's backend for AMD says
GPU = torch.device("cuda", 0)
# Kernels ask torch.version which of the two is there; this torch may be built for the other vendor, or for none.
HIP_VERSION, CUDA_VERSION = "7.0.0", "13.0"
UNITS = "multi_processor_count"


def threads_of_a_warp(target: CompileTarget) -> int:
    """Threads of a warp, or of a wave as Triton compiles for this architecture."""
    if target.is_nvidia:
        return WARP
    from triton.backends.amd.compiler import HIPOptions

    return HIPOptions(arch=target.arch).warp_size


class Elsewhere:
    """The GPU that the target names. `asked`: what the kernel asked of it that no page of the wiki answers."""

    def __init__(self, target: CompileTarget):
        self.target, self.threads_of_a_warp = target, threads_of_a_warp(target)
        self.asked: set[str] = set()

    def triton_target(self) -> GPUTarget:
        if self.target.is_nvidia:
            major, minor = self.target.capability
            return GPUTarget("cuda", 10 * major + minor, WARP)
        return GPUTarget("hip", self.target.arch, self.threads_of_a_warp)

    def units(self) -> int:
        """The number of SMs or compute units."""
        if self.target.units_of != self.target.name:
            self.asked.add(UNITS)
        return self.target.told_units

    def install(self) -> None:
        """Answer for this GPU from here on, in Triton's driver and in torch."""
        driver.set_active(ElsewhereDriver(self))
        if self.target.is_nvidia:
            torch.version.hip, torch.version.cuda = None, torch.version.cuda or CUDA_VERSION
        else:
            torch.version.hip, torch.version.cuda = HIP_VERSION, None
        for name, answer in self._answers().items():
            setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
        about = Properties(self)
        torch.cuda.get_device_properties = lambda *_, **__: about

    def _answers(self) -> dict[str, object]:
        return {
            "is_available": True,
            "device_count": 1,
            "current_device": 0,
            "get_device_capability": tuple(self.target.capability),
            "get_device_name": self.target.name,
            "synchronize": None,
            "set_device": None,
            "is_current_stream_capturing": False,
            "device": contextlib.nullcontext(),
            **dict.fromkeys(
                ("Stream", "stream", "current_stream", "default_stream", "Event", "CUDAGraph", "graph"), Nothing()
            ),
        }


class Nothing:
    """A stream, an event or a graph of it: every method does nothing."""

    cuda_stream = 0

    def __getattr__(self, name: str) -> Callable:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: self

    def __enter__(self):
        return self

    def __exit__(self, *exc) -> None:
        pass


class Properties:
    """torch.cuda.get_device_properties of it."""

    def __init__(self, gpu: Elsewhere):
        self._gpu, target = gpu, gpu.target
        self.name, (self.major, self.minor) = target.name, target.capability
        self.shared_memory_per_block_optin = target.shared_bytes
        self.warp_size = gpu.threads_of_a_warp
        if not target.is_nvidia:
            self.gcnArchName = target.arch  # torch's name

    @property
    def multi_processor_count(self) -> int:
        return self._gpu.units()


class DriverProperties(dict):
    """The properties of it that Triton's driver tells."""

    def __init__(self, gpu: Elsewhere):
        super().__init__(max_shared_mem=gpu.target.shared_bytes, warpSize=gpu.threads_of_a_warp)
        self._gpu = gpu

    def __missing__(self, name: str) -> int:
        if name != "multiprocessor_count":
            raise KeyError(name)
        return self._gpu.units()


class ElsewhereDriver(HostDriver):
    """Triton's driver of it."""

    def __init__(self, gpu: Elsewhere):
        self._gpu = gpu
        properties = DriverProperties(gpu)
        self.utils = types.SimpleNamespace(get_device_properties=lambda device: properties)

    def map_python_to_cpp_type(self, ty: str) -> str:
        return "int"  # of a launcher that is never built

    def get_current_target(self) -> GPUTarget:
        return self._gpu.triton_target()

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_capability(self, device: int | None = None) -> tuple[int, int]:
        return tuple(self._gpu.target.capability)

    def get_device_interface(self):
        return torch.cuda

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return torch.empty(1)

    def clear_cache(self, cache: torch.Tensor) -> None:
        pass


class AsOnGpu(TorchFunctionMode):
    """Inside it tensors say that they are on the GPU, because kernels ask, and lie at `place`: cpu or meta."""

    # Torch's that take a device. A function mode does not reach into operators that a file registers.
    MAKERS: ClassVar = (
        "arange as_tensor empty empty_like empty_permuted empty_strided eye full full_like linspace ones ones_like "
        "rand rand_like randint randn randn_like randperm scalar_tensor tensor zeros zeros_like"
    ).split()

    def __init__(self, place: str):
        super().__init__()
        self._place = torch.device(place)

    def __enter__(self):
        for name in self.MAKERS:
            setattr(torch, name, self._placing(getattr(torch, name)))
        torch.Tensor.to = self._placing(torch.Tensor.to)
        torch.Tensor.is_cuda = property(lambda tensor: True)
        torch.Tensor.device = property(lambda tensor: GPU)
        torch.Tensor.cuda = lambda tensor, *_, **__: tensor
        torch.Tensor.record_stream = lambda *_: None
        return super().__enter__()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return self._placing(function)(*args, **(kwargs or {}))

    def _placing(self, function: Callable) -> Callable:
        """The function of torch, with `place` where an argument names a GPU."""

        @functools.wraps(function)
        def called(*args, **kwargs):
            return function(*map(self._placed, args), **{name: self._placed(value) for name, value in kwargs.items()})

        return called

    def _placed(self, argument):
        return self._place if is_gpu(argument) else argument


class NothingDrawn(TorchFunctionMode):
    """Inside it floating tensors that would be drawn at random are zero, or what the memory holds."""

    ZERO: ClassVar = {
        torch.randn: torch.zeros,
        torch.rand: torch.zeros,
        torch.randn_like: torch.zeros_like,
        torch.rand_like: torch.zeros_like,
    }
    LEFT: ClassVar = (torch.Tensor.normal_, torch.Tensor.uniform_)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in self.LEFT:
            return args[0]
        kwargs = kwargs or {}
        if function in self.ZERO:
            function, kwargs = self.ZERO[function], {name: kwargs[name] for name in kwargs if name != "generator"}
        return function(*args, **kwargs)
