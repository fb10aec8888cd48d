"""The problem contract, in the format of KernelBench. Imported by worker processes only.

reference.py: `class Model(nn.Module)`, `get_inputs()`, optionally `get_init_inputs()` and
`get_workloads() -> dict[str, callable]` for more shapes. kernel.py: `class ModelNew(nn.Module)`, built with the
same arguments and loaded with Model's state, or `kernel_function(*inputs)`.

This is the only place that builds inputs and calls a kernel, so that what is verified is what is timed and profiled.
"""

import dataclasses
import functools
import importlib.machinery
import importlib.util
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

TORCH_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
NAMES = {value: key for key, value in TORCH_DTYPES.items()}


BASELINE_CAP = 4  # however inexact PyTorch is, no more than so many tolerances
LARGEST_ERROR = 1e9  # where the scale is 0; JSON has no infinity
UNSUPPORTED = {torch.uint16, torch.uint32, torch.uint64}  # torch has no maximum, comparison or sort of these
LOST = 0.5  # an element whose error exceeds so much of itself is lost, whatever the scale of the others
TINY = 2.0**-126  # the smallest normal fp32; GPUs may flush what is below
FEW = 32  # of fewer elements no share is told


class ContractError(Exception):
    """A file does not hold what the contract asks for."""


class UnknownWorkload(ContractError):
    """The reference has no workload of that name."""


class CastOfQuantised(ContractError):
    """The task's dtype would cast 8-bit data, or the scales beside it."""


class UnsupportedInput(ContractError):
    """The reference is sound, but this bundle cannot handle its inputs."""


class SourceLoader(importlib.machinery.SourceFileLoader):
    """Runs what stands in the file, never bytecode that somebody left beside it."""

    def get_code(self, name: str):
        return self.source_to_code(self.get_data(self.path), self.path)


@functools.cache
def load_module(path: Path):
    """Execute a Python file as a module of its own, once in a process."""
    if path.suffix != ".py":
        raise ContractError(f"{path.name} is no Python file")
    name = f"problem_{path.stem}_{len(sys.modules)}"
    spec = importlib.util.spec_from_file_location(name, path, loader=SourceLoader(name, str(path)))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and inspect look there
    spec.loader.exec_module(module)
    return module


def save(value, path: Path) -> None:
    """Tensors, in lists, dicts and beside numbers, into a file; without checksums, a third of the time of large ones."""
    usual = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    torch.save(value, path)
    torch.serialization.set_crc32_options(usual)


def load(path: Path):
    """What `save` wrote; tensors are read when they are looked at."""
    return torch.load(path, weights_only=True, mmap=True)


@dataclass(frozen=True)
class Case:
    """One call of the problem: inputs, constructor arguments, parameters, and the dtype that floating tensors are in
    (None: as the reference makes them)."""

    inputs: list
    init: list
    state: dict
    dtype: str | None

    def save(self, path: Path) -> None:
        """Write it to a file, its tensors on the CPU."""
        save({name: on_cpu(value) for name, value in vars(self).items()}, path)

    @classmethod
    def load(cls, path: Path) -> "Case":
        return cls(**load(path))

    def with_inputs(self, inputs: list) -> "Case":
        return dataclasses.replace(self, inputs=inputs)

    def placed_inputs(self, device: str) -> list:
        return [place(value, device) for value in self.inputs]


class Reference:
    """The oracle of a problem and the maker of its inputs."""

    def __init__(self, path: Path):
        module = load_module(path)
        if not hasattr(module, "Model") or not hasattr(module, "get_inputs"):
            raise ContractError(f"{path.name} must define Model and get_inputs")
        self.model_class = module.Model
        self.init_inputs = getattr(module, "get_init_inputs", list)
        self.workloads: dict[str, Callable[[], list]] = {"default": module.get_inputs, **more_workloads(module)}

    def build(self, workload: str, seed: int, dtype: str | None, device: str) -> tuple[torch.nn.Module, list, list]:
        """(model, inputs, constructor arguments) of a workload, reproducible from `seed`, cast to `dtype`.

        Tensors are drawn on `device`, where that is quick, by making it torch's default device.
        """
        torch.manual_seed(seed)
        with torch.device(device), torch.no_grad():
            init = arguments(self.init_inputs(), "get_init_inputs")
            model = self.model_class(*init)
            inputs = arguments(self.workloads[workload](), f"what makes the inputs of workload '{workload}'")
        if dtype:
            refuse_cast(dtype, [*model.parameters(), *model.buffers(), *input_tensors(inputs)])
            cast_module(model, TORCH_DTYPES[dtype])
            inputs = [cast(value, TORCH_DTYPES[dtype]) for value in inputs]
        return model, inputs, init

    def case(self, workload: str, seed: int, dtype: str | None, device: str) -> Case:
        """The same as a Case, its tensors on `device`.

        Constant parameters and buffers (weights of one, running variances) get noise: they would hide a kernel that
        ignores them. It is positive, for a variance must stay so.
        """
        model, inputs, init = self.build(workload, seed, dtype, device)
        for tensor in input_tensors(inputs):
            refuse_unsupported(tensor)
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.dtype in NAMES and tensor.numel() and tensor.min() == tensor.max() and tensor.isfinite().all():
                tensor.data += 0.2 * torch.rand_like(tensor)
        state = {name: value.detach() for name, value in model.state_dict().items()}
        return Case([place(value, device) for value in inputs], [place(value, device) for value in init], state, dtype)

    def model(self, case: Case, device: str, dtype: torch.dtype | None = None) -> torch.nn.Module:
        """Model with the parameters of `case`; `dtype` replaces the dtype of floating parameters."""
        return bind(self.model_class, case, device, dtype)


def more_workloads(module) -> dict[str, Callable[[], list]]:
    """What get_workloads of a reference returns; ContractError when it is no dict of callables, or names `default`."""
    more = module.get_workloads() if hasattr(module, "get_workloads") else {}
    if not isinstance(more, dict) or not all(isinstance(name, str) and callable(make) for name, make in more.items()):
        raise ContractError("get_workloads must return a dict of names to functions, each returning a list of inputs")
    if "default" in more:
        raise ContractError("get_workloads names a workload 'default', which is the one of get_inputs; rename it")
    return more


def arguments(values, maker: str) -> list:
    """Arguments as a list; ContractError when `maker` returned anything but a list or tuple (a tensor has rows)."""
    if not isinstance(values, list | tuple):
        raise ContractError(f"{maker} must return a list, not a {type(values).__name__}")
    return list(values)


def refuse_unsupported(tensor: torch.Tensor) -> None:
    """UnsupportedInput for layouts and dtypes on which torch lacks what verification takes."""
    dense = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
    if not dense or tensor.dtype in UNSUPPORTED:
        raise UnsupportedInput(
            f"an input is a {tensor.layout} tensor of {tensor.dtype}, a limit of this bundle and no fault of the reference: it "
            "handles dense tensors of floating, complex and signed integer dtypes, uint8 and bool"
        )


def refuse_cast(dtype: str, values: list[torch.Tensor]) -> None:
    """CastOfQuantised where there are 8-bit numbers, and a cast to `dtype` would change them or what they are scaled with."""
    eight_bits = next((t.dtype for t in values if t.dtype.itemsize == 1 and t.dtype != torch.bool), None)
    changed = next((t.dtype for t in values if t.is_floating_point() and t.dtype != TORCH_DTYPES[dtype]), None)
    if eight_bits and changed:
        raise CastOfQuantised(
            f"--dtype {dtype} would cast {plain(changed)} tensors of a task with {plain(eight_bits)} data: the 8-bit numbers or "
            "their scales would be others; start a session without --dtype, so that inputs keep the dtypes of the reference"
        )


def plain(dtype: torch.dtype) -> str:
    """ "float8_e4m3fn" """
    return str(dtype).removeprefix("torch.")


def bind(model_class, case: Case, device: str, dtype: torch.dtype | None = None) -> torch.nn.Module:
    """`model_class(*init)` on `device`, with the parameters of `case` in their own dtypes or in `dtype`."""
    torch.manual_seed(0)  # what a constructor draws besides its parameters is the same for Model and ModelNew
    model = model_class(*[place(value, device) for value in case.init]).to(device)
    if dtype or case.dtype:
        cast_module(model, dtype or TORCH_DTYPES[case.dtype])
    if dtype is None:
        own = model.state_dict()
        take_dtypes(model, {name: value for name, value in case.state.items() if name in own})
    found = model.load_state_dict(case.state, strict=False)  # whose hooks may pack Model's parameters
    if lacking := sorted(found.unexpected_keys):
        raise ContractError(
            f"ModelNew lacks parameters of Model: {', '.join(lacking[:5])}; give them the same names, "
            "so that they can be loaded from Model's state"
        )
    return model


def cast_module(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Floating parameters and buffers in `dtype`; complex and integer ones as they are."""
    try:
        model._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
    except RuntimeError:  # torch 2.13 swaps fake tensors, and refuses where anything else refers to one
        replace_tensors(model, dtype)


def replace_tensors(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """`cast_module` by new parameters and buffers; what modules share stays shared."""
    made: dict[int, tuple] = {}
    for module in model.modules():
        own = {"recurse": False, "remove_duplicate": False}
        for name, old in [*module.named_parameters(**own), *module.named_buffers(**own)]:
            if id(old) not in made:
                new = old.detach().to(dtype) if old.is_floating_point() else old
                is_parameter = isinstance(old, torch.nn.Parameter)
                made[id(old)] = old, torch.nn.Parameter(new, old.requires_grad) if is_parameter else new
            setattr(module, name, made[id(old)][1])


def take_dtypes(model: torch.nn.Module, state: dict) -> None:
    """Give each parameter and buffer that `state` names the dtype it has there."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, value in state.items():
        if name in parameters:
            parameters[name].data = parameters[name].data.to(value.dtype)
        else:
            owner, _, leaf = name.rpartition(".")
            buffers = model.get_submodule(owner)._buffers
            buffers[leaf] = buffers[leaf].to(value.dtype)


def load_kernel(path: Path, case: Case, device: str, allow_reference: bool = False) -> Callable:
    """What is called as the kernel: a bound ModelNew, or kernel_function.

    allow_reference: take Model where neither is defined (PyTorch itself as the opponent of a comparison).
    """
    module = load_module(path)
    if hasattr(module, "ModelNew"):
        return bind(module.ModelNew, case, device)
    if hasattr(module, "kernel_function"):
        if case.state:
            raise ContractError("the reference has parameters, which kernel_function cannot get; define ModelNew")
        return module.kernel_function
    if allow_reference and hasattr(module, "Model"):
        return bind(module.Model, case, device)
    raise ContractError(f"{path.name} defines neither ModelNew nor kernel_function")


def call(kernel: Callable, inputs: list):
    """Run the kernel as it is timed, verified and profiled: no gradients."""
    with torch.no_grad():
        return kernel(*inputs)


def map_tensors(value, function: Callable[[torch.Tensor], torch.Tensor]):
    """The value with each tensor in it, in lists, tuples and dicts too, replaced by what `function` makes of it; in the order
    of `tensors`."""
    return map_leaves(value, lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf)


def map_leaves(value, function: Callable):
    """The same for all that is no list, tuple or dict."""
    if isinstance(value, dict):
        made = {key: map_leaves(item, function) for key, item in in_order(value)}
        return {key: made[key] for key in value}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(item, function) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_leaves(item, function) for item in value)
    return function(value)


def in_order(value: dict) -> list[tuple]:
    """The items of a dict by key, whatever order they were put in; keys may be numbers beside strings."""
    return sorted(dict.items(value), key=lambda pair: repr(pair[0]))


def on_cpu(value):
    """The value with its tensors on the CPU."""
    return map_tensors(value, lambda tensor: tensor if tensor.device.type == "cpu" else copied(tensor, "cpu"))


def place(value, device: str):
    """A copy of a value on `device`; what holds no tensor stays as it is."""
    return map_tensors(value, lambda tensor: copied(tensor.detach(), device))


def copied(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A copy on `device` that lies in memory as the tensor does, a view of something larger too: its gaps hold anything."""
    return memory_like(tensor, device).copy_(tensor) if has_gaps(tensor) else tensor.to(device, copy=True)


def memory_like(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Unset memory on `device` with the tensor's shape, dtype and strides."""
    if has_gaps(tensor):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return torch.empty_like(tensor, device=device)


def held_bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes that tensors of their own hold in memory, the gaps of views too."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def has_gaps(tensor: torch.Tensor) -> bool:
    """Is it a view whose elements lie farther apart than they must, each in a place of its own (an expanded one has fewer)?"""
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
    raise ContractError(f"the result holds a {type(value).__name__}, which is no tensor")


def structure(value) -> str:
    """How the tensors of a result hang together: "{'a': tensor, 'b': [tensor, None]}". Lists and tuples look alike."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {structure(item)}" for key, item in in_order(value)) + "}"
    for kind in (list, tuple):
        if isinstance(value, kind):
            return "[" + ", ".join(structure(item) for item in kind.__iter__(value)) + "]"
    return "None" if value is None else "tensor"


def input_tensors(values: list) -> list[torch.Tensor]:
    """The tensors among arguments, numbers and other objects left out."""
    found: list[torch.Tensor] = []
    map_tensors(values, found.append)
    return found


def input_numbers(values: list) -> list[int]:
    """The whole Python numbers among arguments."""
    found = []

    def note(leaf):
        found.extend([leaf] * (type(leaf) is int))
        return leaf

    map_leaves(values, note)
    return found


def dtype_class(dtype: torch.dtype) -> str:
    """Which tolerance a dtype has: its own name, fp8 for the eight-bit floats, that of the parts for complex
    numbers, exact for integers and bool."""
    if dtype.is_complex:
        return "fp64" if dtype == torch.complex128 else "fp32"
    return NAMES.get(dtype) or ("fp8" if dtype.is_floating_point else "exact")


def dominant_dtype(values: list[torch.Tensor]) -> str:
    """The dtype that holds most bytes among floating tensors; "int" when there is none."""
    sizes: dict[str, int] = {}
    for tensor in values:
        if tensor.is_floating_point():
            name = dtype_class(tensor.dtype)
            sizes[name] = sizes.get(name, 0) + tensor.nbytes
    return max(sizes, key=sizes.get) if sizes else "int"


def compare(
    actual: torch.Tensor, oracle: torch.Tensor, baseline: torch.Tensor, tolerance: float, usual_rms: float = 0.0
) -> dict:
    """How far `actual` is from `oracle` (the reference in high precision); `baseline` is the reference in
    the task's own dtype, whose shape, dtype and stride are the ones expected.

    An element is wrong when |actual - oracle| > bound * (|oracle| + rms(oracle)), so that zeros fail whatever the
    scale of the result is. bound: the tolerance, or twice the baseline's own worst
    error where PyTorch is less exact than that (at most BASELINE_CAP tolerances). An element that agrees with
    the baseline within the tolerance is right too: rounding decides an argmax, and fp16 overflows. usual_rms: what stands
    for the rms of an output with few elements, one sum near 0, say, whose own is no scale.
    """
    found = {
        "shape": list(actual.shape),
        "dtype": str(actual.dtype),
        "stride": significant_stride(actual),
        "expected_shape": list(baseline.shape),
        "expected_dtype": str(baseline.dtype),
        "expected_stride": significant_stride(baseline.clone()),  # a slice of something larger counts as dense
    }
    if actual.shape != oracle.shape or actual.dtype != baseline.dtype:
        return found
    actual, exact, baseline = (comparable(tensor).reshape(-1) for tensor in (actual, oracle, baseline))
    finite = torch.isfinite(exact)
    rms = root_mean_square(torch.where(finite, exact, 0))
    if exact.numel() < FEW:
        rms = max(rms, usual_rms)
    theirs = deviation(baseline, exact, tolerance, rms)
    bound = max(tolerance, min(2 * theirs.max_rel, BASELINE_CAP * tolerance))
    own = deviation(actual, exact, bound, rms, baseline)
    return {
        **found,
        "elements": exact.numel(),
        "finite": int(finite.sum()),
        "rms": rms,
        "bound": bound,
        "max_rel": own.max_rel,
        "mismatches": own.mismatches,
        "nonfinite": own.nonfinite,
        "spurious": own.spurious,
        "first_bad_index": own.first_bad,
        "baseline_max_rel": theirs.max_rel,
        "lost_pct": own.lost_pct(),
        "baseline_lost_pct": theirs.lost_pct(),
    }


def root_mean_square(values: torch.Tensor) -> float:
    """0 of nothing; over the largest, whose square may be infinite."""
    largest = float(values.double().abs().max()) if values.numel() else 0.0
    return largest * math.sqrt(float((values.double() / largest).square().mean())) if largest else 0.0


def bland_answers(
    oracle: list[torch.Tensor],
    baseline: list[torch.Tensor],
    inputs: list,
    other: list[torch.Tensor],
    bounds: list[float],
) -> list[str]:
    """Which answers that compute nothing would pass for the right one: zeros, ones, an input, another call's result.

    other: the baseline on other inputs. A task with such an answer can judge no kernel.
    """
    answers = {
        "an output of zeros": [torch.zeros_like(tensor) for tensor in baseline],
        "an output of ones": [torch.ones_like(tensor) for tensor in baseline],
        "an input": [like_of(tensor, input_tensors(inputs)) for tensor in baseline],
        "the result of another call": [like_of(tensor, [twin]) for tensor, twin in zip(baseline, other, strict=True)],
    }
    return [
        name
        for name, answer in answers.items()
        if all(map(passes, answer, oracle, baseline, bounds))
        and any(torch.isfinite(comparable(tensor)).any() for tensor in oracle)
    ]


def like_of(tensor: torch.Tensor, candidates: list[torch.Tensor]) -> torch.Tensor | None:
    """The first of the candidates with the tensor's shape and dtype."""
    return next((t for t in candidates if t.shape == tensor.shape and t.dtype == tensor.dtype), None)


def passes(answer: torch.Tensor | None, oracle: torch.Tensor, baseline: torch.Tensor, tolerance: float) -> bool:
    if answer is None:
        return False
    found = compare(answer, oracle, baseline, tolerance)
    return found["mismatches"] + found["nonfinite"] == 0


def comparable(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in a dtype that can be compared: complex as pairs, eight-bit floats in fp32."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.float() if dtype_class(tensor.dtype) == "fp8" else tensor


def deviation(
    actual: torch.Tensor, exact: torch.Tensor, bound: float, rms: float, also: torch.Tensor | None = None
) -> "Deviation":
    """Error statistics of flat tensors against `exact`; an element within the bound of `also` has no error.

    Some elements at a time, so that float64 copies of large outputs fit.
    """
    found = Deviation(bound, rms)
    step = 1 << 26
    whole = not any(t.dtype == torch.bool or t.is_floating_point() for t in (actual, exact, also) if t is not None)
    for start in range(0, exact.numel(), step):
        parts = [None if t is None else t[start : start + step] for t in (actual, exact, also)]
        if whole:  # float64 does not hold every int64, but their differences that matter
            parts = [None if t is None else t.long() - parts[1].long() for t in parts]
        found.add(*(None if t is None else t.double() for t in parts), start)
    return found


class Deviation:
    """Running error statistics of one tensor against the oracle."""

    def __init__(self, bound: float, rms: float):
        self.bound, self.rms = bound, rms
        self.max_rel = 0.0
        self.mismatches = self.nonfinite = self.spurious = self.lost = self.weighed = 0
        self.first_bad: int | None = None

    def add(self, actual: torch.Tensor, exact: torch.Tensor, also: torch.Tensor | None, offset: int) -> None:
        error, odd = self._errors(actual, exact)
        if also is not None:
            other, other_odd = self._errors(actual, also)
            agrees = (other <= self.bound) & ~other_odd
            error, odd = torch.where(agrees, torch.minimum(error, other), error), odd & ~agrees
        wrong = (error > self.bound) | odd
        self.max_rel = max(self.max_rel, float(error.max()))
        weighed = torch.isfinite(exact) & (exact.abs() >= TINY)
        self.weighed += int(weighed.sum())
        self.lost += int((weighed & ((actual - exact).abs() > LOST * exact.abs())).sum())
        self.mismatches += int((wrong & ~odd).sum())
        self.nonfinite += int(odd.sum())  # of two numbers one alone is finite, or both are other infinities
        self.spurious += int((odd & torch.isfinite(exact)).sum())
        if self.first_bad is None and bool(wrong.any()):
            self.first_bad = offset + int(wrong.nonzero()[0])

    def lost_pct(self) -> float:
        """Share of the elements that are not 0 (nor subnormal) whose error exceeds half of themselves."""
        return 100 * self.lost / self.weighed if self.weighed >= FEW else 0.0

    def _errors(self, actual: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(|error| / (|expected| + rms), where only one of the two is finite or they are different infinities)"""
        same = (actual == expected) | (torch.isnan(actual) & torch.isnan(expected))
        finite = torch.isfinite(expected) & torch.isfinite(actual)
        scale = torch.where(finite, expected.abs(), 0.0) + self.rms
        error = torch.where(finite & ~same, (actual - expected).abs() / scale, 0.0)
        return error.clamp(max=LARGEST_ERROR), ~finite & ~same


def significant_stride(tensor: torch.Tensor) -> list[int]:
    """Strides of the dimensions that have more than one element; the others carry no meaning."""
    return [s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1] if tensor.numel() else []


def oracle_outputs(reference: Reference, case: Case, device: str) -> tuple[list[torch.Tensor], str]:
    """The reference's outputs in the highest precision that it runs in, and that precision's name."""
    for dtype, name in ((torch.float64, "fp64"), (torch.float32, "fp32"), (None, "as given")):
        try:
            model = reference.model(case, device, dtype)
            inputs = [cast(value, dtype) if dtype else value for value in case.placed_inputs(device)]
            return tensors(call(model, inputs)), name
        except Exception:  # an operation without float64, memory, a reference that asserts its dtype
            if dtype is None:
                raise
    raise AssertionError("unreachable")
