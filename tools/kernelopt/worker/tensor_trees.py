"""Tensors in nested arguments and results: functions that find, copy and move them, and describe their structure."""

import collections
import copy
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import contract, transfers

TORCH_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
NAMES = {value: key for key, value in TORCH_DTYPES.items()}
SAME = 1e-3  # of the norm; fingerprints of other contents differ by about all of it
# Elements of which a fingerprint is taken at once: a cache of a processor holds them; on a GPU each piece is launches.
PIECES = {"cpu": 1 << 17, "cuda": 1 << 24}
MIXING = 2_654_435_761  # odd, so that weights of neighbouring places look drawn


@dataclass(frozen=True)
class Stored:
    """What a file says of a dataclass or a named tuple, whose class only the reference has: its name and its fields."""

    kind: str
    name: str
    values: dict

    KEY = "kernelopt class"

    def to_file(self) -> dict[str, list]:
        return {self.KEY: [self.kind, self.name, self.values]}

    @classmethod
    def from_file(cls, value) -> "Stored | None":
        return cls(*value[cls.KEY]) if isinstance(value, dict) and list(value) == [cls.KEY] else None

    def rebuilt(self):
        """An object with the same fields, and no methods of its own."""
        if self.kind == "named tuple":
            return collections.namedtuple(self.name, self.values)(**self.values)
        return dataclasses.make_dataclass(self.name, self.values)(**self.values)


def packed(value):
    """The value in terms that tensor_files.load takes: classes of the task's own by their fields."""
    if is_dataclass(value):
        return Stored("dataclass", type(value).__name__, {k: packed(v) for k, v in fields_of(value).items()}).to_file()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return Stored("named tuple", type(value).__name__, {k: packed(v) for k, v in value._asdict().items()}).to_file()
    if isinstance(value, list | tuple):
        return type(value)(map(packed, value))
    return {key: packed(item) for key, item in value.items()} if isinstance(value, dict) else value


def unpacked(value):
    """The reverse of `packed`."""
    if stored := Stored.from_file(value):
        return Stored(stored.kind, stored.name, unpacked(stored.values)).rebuilt()
    if isinstance(value, list | tuple):
        return type(value)(map(unpacked, value))
    return {key: unpacked(item) for key, item in value.items()} if isinstance(value, dict) else value


def plain(dtype: torch.dtype) -> str:
    """ "float8_e4m3fn" """
    return str(dtype).removeprefix("torch.")


def map_tensors(value, function: Callable[[torch.Tensor], torch.Tensor]):
    """The value with each tensor in it, in lists, tuples and dicts too, replaced by the result of `function`, in the
    order of `tensors`."""
    return map_leaves(value, lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf)


def aliases(value):
    """The value with other tensors in the same memory. What a kernel makes of these tensors, `x.requires_grad_()` say,
    leaves those that hold the memory as they are."""
    return map_tensors(value, lambda tensor: tensor.detach())


def with_tensors(value, tensors: list[torch.Tensor]):
    """The value with these tensors in place of its own, in the order of `tensors`, each as an alias (see `aliases`)."""
    given = iter(tensors)
    return map_tensors(value, lambda _: next(given).detach())


def fill(memory: list[torch.Tensor], contents: list[torch.Tensor]) -> None:
    """Put these contents into memory of their shapes."""
    for tensor, content in zip(memory, contents, strict=True):
        tensor.copy_(content)


def map_leaves(value, function: Callable):
    """The value with each value in it that is no list, tuple, dict or dataclass replaced by the result of
    `function`."""
    if isinstance(value, dict):
        made = {key: map_leaves(item, function) for key, item in in_order(value)}
        return {key: made[key] for key in value}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(item, function) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_leaves(item, function) for item in value)
    if is_dataclass(value):
        made = copy.copy(value)
        for name, item in fields_of(value).items():
            object.__setattr__(made, name, map_leaves(item, function))  # it may be frozen
        return made
    return function(value)


def is_dataclass(value) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def fields_of(value) -> dict[str, object]:
    """The fields of a dataclass, by name."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def in_order(value: dict) -> list[tuple]:
    """The items of a dict by key, whatever order they were put in; keys may be numbers beside strings."""
    return sorted(dict.items(value), key=lambda pair: repr(pair[0]))


def on_cpu(value):
    """The value with its tensors on the CPU."""
    return map_tensors(value, lambda tensor: tensor if tensor.device.type == "cpu" else copied(tensor, "cpu"))


def place(value, device: str):
    """A copy of a value on `device`; values without a tensor stay as they are."""
    return map_tensors(value, lambda tensor: copied(tensor.detach(), device))


def copied(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A copy on `device` with the tensor's memory layout. The gaps of a view hold arbitrary values."""
    if has_gaps(tensor):
        return memory_like(tensor, device).copy_(tensor)
    if transfers.goes_in_pieces(tensor, device):
        return transfers.to_gpu(tensor, device)
    return transfers.to_host(tensor) if tensor.is_cuda and device == "cpu" else tensor.to(device, copy=True)


def memory_like(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Unset memory on `device` with the tensor's shape, dtype and strides."""
    if has_gaps(tensor):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return torch.empty_like(tensor, device=device)


def held_bytes(tensors: list[torch.Tensor]) -> int:
    """The bytes that these tensors occupy in memory, gaps of views included."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def stored_bytes(value) -> int:
    """The bytes of a value's dense tensors in a file of tensor_files, where memory that several share lies once."""
    storages = [tensor.untyped_storage() for tensor in input_tensors([value]) if tensor.layout is torch.strided]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def fingerprint(tensor: torch.Tensor) -> tuple[float, float]:
    """(the sum of the finite elements, each times a weight that its place decides; their norm). Rounding changes them
    little, other contents much: see `is_same`."""
    values = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    piece = PIECES[tensor.device.type]
    mixed = torch.arange(min(piece, values.numel()), device=tensor.device) * MIXING
    total = squares = 0.0
    for number, part in enumerate(values.reshape(-1).split(piece)):
        part = part.double().nan_to_num(0.0, 0.0, 0.0)
        before = number * piece * MIXING % (1 << 32)  # bits 16 to 31 of the sum decide
        weights = (mixed[: len(part)] + before >> 16 & 0xFFFF).double().div_(0x8000).sub_(1)
        total, squares = total + float((part * weights).sum()), squares + float(part.square().sum())
    return (total, math.sqrt(squares)) if math.isfinite(squares) else (0.0, 0.0)


def is_same(a: tuple[float, float], b: tuple[float, float]) -> bool:
    """Are these fingerprints of the same contents, but for rounding?"""
    return abs(a[0] - b[0]) + abs(a[1] - b[1]) <= SAME * max(a[1], b[1])


def has_gaps(tensor: torch.Tensor) -> bool:
    """Is it a view whose elements lie farther apart than they must, each in a place of its own (an expanded one has
    fewer)?"""
    if tensor.layout is not torch.strided or not tensor.numel():
        return False
    extent = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride < extent:
            return False
        extent += (size - 1) * stride
    return extent > tensor.numel()


def cast(value, dtype: torch.dtype):
    """Floating tensors in `dtype`; everything else as it is."""
    return map_tensors(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def tensors(value) -> list[torch.Tensor]:
    """The tensors of a result or of arguments, in order; Python numbers become 0-d tensors, None is left out.

    Containers are read as the plain list, tuple or dict that they are: methods of a subclass could do the work later.
    """
    if value is None:
        return []
    if isinstance(value, torch.Tensor):
        return [value]
    if type(value) in (bool, int, float):
        return [torch.tensor(value)]
    if isinstance(value, dict):
        value = [item for _, item in in_order(value)]
    for kind in (list, tuple):
        if isinstance(value, kind):
            return [tensor for item in kind.__iter__(value) for tensor in tensors(item)]
    raise contract.ContractError(f"the result holds a {type(value).__name__}, which is no tensor")


def structure(value) -> str:
    """The structure of a result's tensors: "{'a': tensor, 'b': [tensor, None]}". Lists and tuples look alike."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {structure(item)}" for key, item in in_order(value)) + "}"
    for kind in (list, tuple):
        if isinstance(value, kind):
            return "[" + ", ".join(structure(item) for item in kind.__iter__(value)) + "]"
    return "None" if value is None else "tensor"


def input_tensors(values: list) -> list[torch.Tensor]:
    """The tensors among arguments, numbers and other objects left out."""
    leaves: list[torch.Tensor] = []
    map_tensors(values, leaves.append)
    return leaves


def leaves(value) -> list:
    """The values in lists, tuples, dicts and dataclasses that are none of these."""
    held = []
    map_leaves(value, held.append)
    return held


def input_numbers(values: list) -> list[int]:
    """The whole Python numbers among arguments."""
    numbers = []

    def note(leaf):
        numbers.extend([leaf] * (type(leaf) is int))
        return leaf

    map_leaves(values, note)
    return numbers


def dtype_class(dtype: torch.dtype) -> str:
    """Which tolerance a dtype has: its own name, fp8 for the eight-bit floats, that of the parts for complex
    numbers, exact for integers and bool."""
    if dtype.is_complex:
        return "fp64" if dtype == torch.complex128 else "fp32"
    return NAMES.get(dtype) or ("fp8" if dtype.is_floating_point else "exact")


def dominant_dtype(values: list[torch.Tensor]) -> str:
    """The dtype that holds most bytes among floating tensors; "int" without floating tensors."""
    sizes: dict[str, int] = {}
    for tensor in values:
        if tensor.is_floating_point():
            name = dtype_class(tensor.dtype)
            sizes[name] = sizes.get(name, 0) + tensor.nbytes
    return max(sizes, key=sizes.get) if sizes else "int"
