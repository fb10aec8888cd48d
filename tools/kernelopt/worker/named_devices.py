"""Code that names a GPU, `torch.randn(n, device="cuda")`, run where its tensors lie elsewhere: on shapes alone, in
trials on the CPU, in Triton's interpreter. Imported by worker processes only.
"""

import contextlib
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode

SPELT = re.compile(r"cuda(:\d+)?")


def is_gpu(named) -> bool:
    """Is it a CUDA device, or the name of one?"""
    if isinstance(named, torch.device):
        return named.type == "cuda"
    return isinstance(named, str) and SPELT.fullmatch(named) is not None


@functools.cache
def names_gpu(file: Path) -> bool:
    """Does the text of a file hold the word? Other files need no mode, which slows each of torch's functions."""
    return b"cuda" in file.read_bytes()


def read_as(device: str, *files: Path) -> contextlib.AbstractContextManager:
    """Inside, code of these files that names a CUDA device gets `device`. Nothing changes where `device` is the GPU
    itself, or where no file names one."""
    if device == "cuda" or not any(map(names_gpu, files)):
        return contextlib.nullcontext()
    return reading(torch.device(device))


@contextlib.contextmanager
def reading(device: torch.device) -> Iterator[None]:
    with stand_ins(), ReadAs(device), device:
        yield


class ReadAs(TorchFunctionMode):
    """Inside, `device` takes the place of each CUDA device among the arguments of torch's functions. A torch.device
    itself stays as it is, so that a constant of a module serves every place."""

    def __init__(self, device: torch.device):
        super().__init__()
        self._device = device

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.device:
            return function(*args, **kwargs)
        if function is torch.Tensor.cuda:
            return args[0].to(self._device)
        return function(*map(self._read, args), **{name: self._read(value) for name, value in kwargs.items()})

    def _read(self, argument):
        return self._device if is_gpu(argument) else argument


class HostGenerator(torch.Generator):
    """A generator of the CPU, whatever device is named. Tensors without contents take it too."""

    def __new__(cls, device="cpu"):
        return super().__new__(cls, "cpu")


class HostAutocast(torch.autocast):
    """Autocast to the same dtype on the CPU where it is asked for on a GPU."""

    def __init__(self, device_type, dtype=None, *args, **kwargs):
        if is_gpu(device_type):
            device_type, dtype = "cpu", dtype or torch.float16
        super().__init__(device_type, dtype, *args, **kwargs)


# What a TorchFunctionMode does not see, and what takes its place.
STAND_INS = (
    (torch, "Generator", HostGenerator),
    (torch, "autocast", HostAutocast),
    (torch.amp, "autocast", HostAutocast),
    (torch, "set_default_device", lambda *_, **__: None),
    (torch.cuda, "synchronize", lambda *_, **__: None),
    (torch.cuda, "set_device", lambda *_, **__: None),
    (torch.cuda, "device", lambda *_, **__: contextlib.nullcontext()),
    (torch.cuda, "current_device", lambda: 0),
)


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in STAND_INS]
    try:
        for owner, name, stand_in in STAND_INS:
            setattr(owner, name, stand_in)
        yield
    finally:
        for owner, name, own in before:
            setattr(owner, name, own)
