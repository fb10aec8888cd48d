"""The problem contract, in the format of KernelBench. Imported by worker processes only.

reference.py: `class Model(nn.Module)`, `get_inputs()`, optionally `get_init_inputs()` and
`get_workloads() -> dict[str, callable]` for more shapes, and declarations (declarations.py). kernel.py:
`class ModelNew(nn.Module)`, built with the same arguments and loaded with Model's state, or
`kernel_function(*inputs)`.

This is the only place that builds inputs and calls a kernel, so that verification, timing and profiling run the same
code.
"""

import contextlib
import dataclasses
import functools
import importlib.machinery
import importlib.util
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch

from . import accuracy, keyword_sizes, named_devices, roundings, tensor_files, tensor_trees
from .contract import CastOfQuantised, ContractError, UnknownWorkload, UnsupportedInput
from .declarations import Declarations, DeclaredJson
from .repeated_draws import RepeatedDraws, WatchedBuild
from .state import held, saved

# Of |element| + scale: how far results without the reference's own conversions may be from its results. A task whose
# conversions matter, such as a remainder of a rounding, is farther.
NEAR = 0.064
FEW = 0.02  # of whole numbers and flags: the share that a rounding may decide, as it does an argmax
PRECISIONS = ((torch.float64, "fp64"), (torch.float32, "fp32"), (None, "as given"))  # of the oracle, in turn
STATE = {"_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"}  # of a module's attributes
PLAIN = (bool, int, float, complex, str, type(None), torch.dtype)
UNSUPPORTED = {torch.uint16, torch.uint32, torch.uint64}  # torch has no maximum, comparison or sort of these


class SourceLoader(importlib.machinery.SourceFileLoader):
    """Runs the source in the file, never stale bytecode beside it."""

    def get_code(self, name: str):
        return self.source_to_code(self.get_data(self.path), self.path)


@functools.cache
def load_module(path: Path):
    """Execute a Python file as a module of its own, once in a process."""
    return execute(path)


def execute(path: Path):
    """A new module from a Python file."""
    if path.suffix != ".py":
        raise ContractError(f"{path.name} is no Python file")
    name = f"problem_{path.stem}_{len(sys.modules)}"
    spec = importlib.util.spec_from_file_location(name, path, loader=SourceLoader(name, str(path)))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and inspect look there
    spec.loader.exec_module(module)
    return module


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
        tensor_files.save(self.to_file(), path)

    def to_file(self, state_in: str | None = None) -> dict:
        """What a file holds of it. state_in: the name of a file beside it that holds the parameters."""
        fields = {**vars(self), "state": state_in or self.state}
        return {name: tensor_trees.packed(value) for name, value in fields.items()}

    @classmethod
    def load(cls, path: Path) -> "Case":
        fields = tensor_trees.unpacked(tensor_files.load(path))
        if isinstance(fields["state"], str):
            fields["state"] = tensor_files.load(path.with_name(fields["state"]))
        return cls(**fields)

    def fingerprints(self) -> list[tuple[float, float]]:
        """Of its inputs, then of its parameters and buffers (tensor_trees.fingerprint)."""
        return [
            tensor_trees.fingerprint(one) for one in [*tensor_trees.input_tensors(self.inputs), *self.state.values()]
        ]

    def with_inputs(self, inputs: list) -> "Case":
        return dataclasses.replace(self, inputs=inputs)

    def placed_inputs(self, device: str) -> list:
        return [tensor_trees.place(value, device) for value in self.inputs]


class Reference:
    """The oracle of a problem and the maker of its inputs."""

    def __init__(self, path: Path, load: Callable = load_module):
        module = load(path)
        self._path, self._apart = path, {}
        self._built_anywhere = True  # until a model that was built on a GPU might differ from one of the CPU
        if not hasattr(module, "Model") or not hasattr(module, "get_inputs"):
            raise ContractError(f"{path.name} must define Model and get_inputs")
        self.model_class = module.Model
        self.init_inputs = getattr(module, "get_init_inputs", lambda: [])  # of list, a signature takes 7 ms
        self.workloads: dict[str, Callable[..., list]] = {"default": module.get_inputs, **more_workloads(module)}
        self.sizes = {
            name: keyword_sizes.of_function(make, f"what makes the inputs of workload '{name}'")
            for name, make in self.workloads.items()
        }
        self.init_sizes = keyword_sizes.of_function(self.init_inputs, "get_init_inputs")
        self.declarations = Declarations.of_module(module, module.Model.forward)
        self.computed_in: dict[str, list[str | None]] = {}  # by workload, reference_runs.ReferenceRun's of a first call

    def apart(self, place: str) -> "Reference":
        """The same file, executed once more for trials at one place, such as "meta". What it keeps between its calls, a
        table in a cache say, then holds no tensors of another place. Itself where a file cannot be executed twice: it
        may register an operator."""
        if place not in self._apart:
            try:
                with self.on("cpu"):
                    self._apart[place] = Reference(self._path, execute)
            except Exception:
                self._apart[place] = self
        return self._apart[place]

    def on(self, device: str) -> contextlib.AbstractContextManager:
        """Inside, the file's code runs on `device`, also where it names a GPU."""
        return named_devices.read_as(device, self._path)

    def build(
        self,
        workload: str,
        seed: int,
        dtype: str | None,
        device: str,
        sizes: dict[str, int] | None = None,
        within: contextlib.AbstractContextManager | None = None,
    ) -> tuple[torch.nn.Module, list, list]:
        """(model, inputs, constructor arguments) of a workload, reproducible from `seed`, cast to `dtype`. sizes: other
        values for its keyword sizes. get_init_inputs gets those of the same names, so that parameters have the sizes of
        the inputs. within: the context in which the inputs are made (drawn_values.OtherDraws).

        Tensors are drawn on `device`, where that is quick, by making it torch's default device.
        """
        seed_all(seed)
        with self.on(device), torch.device(device), torch.no_grad():
            init = arguments(self.init_inputs(**self._init_sizes(workload, sizes or {})), "get_init_inputs")
            model = self.model_class(*init)
            with contextlib.ExitStack() as around:
                if self.declarations.mutates:
                    around.enter_context(deterministic_memory())
                around.enter_context(within or contextlib.nullcontext())
                made = self.workloads[workload](**sizes or {})
                inputs = arguments(made, f"what makes the inputs of workload '{workload}'")
        if dtype:
            refuse_cast(dtype, [*model.parameters(), *model.buffers(), *tensor_trees.input_tensors(inputs)])
            cast_module(model, tensor_trees.TORCH_DTYPES[dtype])
            inputs = [tensor_trees.cast(value, tensor_trees.TORCH_DTYPES[dtype]) for value in inputs]
        return model, inputs, init

    def _init_sizes(self, workload: str, sizes: dict[str, int]) -> dict[str, int]:
        """The keyword sizes of get_init_inputs as the inputs of a workload have them."""
        own = {**self.sizes[workload], **sizes}
        return {name: own[name] for name in self.init_sizes if name in own}

    def case(
        self,
        workload: str,
        seed: int,
        dtype: str | None,
        device: str,
        sizes: dict[str, int] | None = None,
        within: contextlib.AbstractContextManager | None = None,
    ) -> Case:
        """The same as a Case, its tensors on `device`.

        Constant parameters and buffers (weights of one, running variances) get noise, or a kernel that ignores them
        would pass. The noise is positive, because a variance must stay positive.
        """
        model, inputs, init = self.build(workload, seed, dtype, device, sizes, within)
        for tensor in tensor_trees.input_tensors(inputs):
            refuse_unsupported(tensor)
        for tensor in (*model.parameters(), *model.buffers()):
            if (
                tensor.dtype in tensor_trees.NAMES
                and tensor.numel()
                and tensor.min() == tensor.max()
                and tensor.isfinite().all()
            ):
                tensor.data += 0.2 * torch.rand_like(tensor)
        state = saved(model)
        return Case(
            [tensor_trees.place(value, device) for value in inputs],
            [tensor_trees.place(value, device) for value in init],
            state,
            dtype,
        )

    def chosen(self, workloads: list[str] | None) -> list[str]:
        """The named workloads, or all of them where none is named. Raises UnknownWorkload."""
        for name in workloads or []:
            if name not in self.workloads:
                known = ", ".join(self.workloads)
                raise UnknownWorkload(f"the reference has no workload '{name}'; it has: {known}")
        return workloads or list(self.workloads)

    def declared(self) -> DeclaredJson:
        """The declarations as a verdict names them, the keyword sizes among them."""
        sizes = {name: own for name, own in self.sizes.items() if own}
        return {**self.declarations.to_json(), **({"sizes": sizes} if sizes else {})}

    def mutated(self, inputs: list) -> list[torch.Tensor]:
        """The tensors among the inputs that the task declares to be outputs as well."""
        tensors = tensor_trees.input_tensors(inputs)
        return [tensors[number] for number in self.declarations.mutated_tensors(inputs)]

    def model(self, case: Case, device: str, dtype: torch.dtype | None = None) -> torch.nn.Module:
        """Model with the parameters of `case`; `dtype` replaces the dtype of floating parameters. It is built on
        `device`, which is quick, where it keeps nothing that the device may compute differently."""
        with self.on(device):
            if device != "cpu" and self._built_anywhere:
                watched = WatchedBuild()
                with torch.device(device):
                    model = bind(self.model_class, case, device, dtype, watched)
                if holds_state_alone(model, case.state) and depends_on_no_device(model, watched):
                    return model
                self._built_anywhere = False
                del model  # before there is a second one
            return bind(self.model_class, case, device, dtype)

    def call(self, model: torch.nn.Module, inputs: list, device: str):
        """A call of Model, which lies on `device`."""
        with self.on(device):
            return call(model, inputs)


def seed_all(seed: int) -> None:
    """Seed the generators that a reference may draw from."""
    seed_generators(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def seed_generators(seed: int) -> None:
    """torch.manual_seed for the CPU, and for the GPU where it is in use: where none is, torch would note a stack trace
    at each call, to seed one later."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


@contextlib.contextmanager
def deterministic_memory() -> Iterator[None]:
    """Inside, torch.empty holds NaN, or the largest whole number: the memory of an output that forward gets is then the
    same in each process, and shows where a kernel wrote nothing.

    torch.use_deterministic_algorithms does the same and then imports torch's compiler, for two seconds in each process.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(before[0], warn_only=before[1])


def more_workloads(module) -> dict[str, Callable[..., list]]:
    """The result of a reference's get_workloads, in which a set of sizes becomes get_inputs with those. Raises
    ContractError when it is no dict of callables and sizes, or names `default`."""
    more = module.get_workloads() if hasattr(module, "get_workloads") else {}
    if not isinstance(more, dict) or not all(
        isinstance(name, str) and (callable(make) or isinstance(make, dict)) for name, make in more.items()
    ):
        raise ContractError(
            "get_workloads must return a dict of names to functions, each returning a list of inputs, or to sizes, "
            "each a dict of get_inputs' keywords"
        )
    if "default" in more:
        raise ContractError("get_workloads names a workload 'default', which is the one of get_inputs; rename it")
    sizes = keyword_sizes.of_function(module.get_inputs, "get_inputs")
    return {
        name: make
        if callable(make)
        else functools.partial(module.get_inputs, **keyword_sizes.chosen(module.get_inputs, sizes, make, name))
        for name, make in more.items()
    }


def arguments(values, maker: str) -> list:
    """Arguments as a list; ContractError when `maker` returned anything but a list or tuple (a tensor has rows)."""
    if not isinstance(values, list | tuple):
        raise ContractError(f"{maker} must return a list, not a {type(values).__name__}")
    return list(values)


def refuse_unsupported(tensor: torch.Tensor) -> None:
    """Raises UnsupportedInput for layouts and dtypes for which torch lacks an operation that verification needs."""
    dense = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
    if not dense or tensor.dtype in UNSUPPORTED:
        raise UnsupportedInput(
            f"an input is a {tensor.layout} tensor of {tensor.dtype}; that is a limit of this bundle and no fault of "
            "the reference: it handles dense tensors of floating, complex and signed integer dtypes, uint8 and bool"
        )


def refuse_cast(dtype: str, values: list[torch.Tensor]) -> None:
    """Raises CastOfQuantised when there are 8-bit numbers and a cast to `dtype` would change them or their scales."""
    eight_bits = next((t.dtype for t in values if t.dtype.itemsize == 1 and t.dtype != torch.bool), None)
    changed = next(
        (t.dtype for t in values if t.is_floating_point() and t.dtype != tensor_trees.TORCH_DTYPES[dtype]), None
    )
    if eight_bits and changed:
        raise CastOfQuantised(
            f"--dtype {dtype} would cast {tensor_trees.plain(changed)} tensors of a task with "
            f"{tensor_trees.plain(eight_bits)} data, and so change the 8-bit numbers or their scales; start a session "
            "without --dtype, so that inputs keep the dtypes of the reference"
        )


def bind(
    model_class, case: Case, device: str, dtype: torch.dtype | None = None, watched: WatchedBuild | None = None
) -> torch.nn.Module:
    """`model_class(*init)` on `device`, with the parameters of `case` in their own dtypes or in `dtype`. watched: sees
    how it is built."""
    seed_generators(0)  # a constructor's other random numbers are then the same for Model and ModelNew
    with watched or RepeatedDraws():
        model = model_class(*[tensor_trees.place(value, device) for value in case.init])
    model = model.to(device)
    if dtype or case.dtype:
        cast_module(model, dtype or tensor_trees.TORCH_DTYPES[case.dtype])
    if dtype is None:
        own = saved(model)
        take_dtypes(model, {name: value for name, value in case.state.items() if name in own})
    loaded = model.load_state_dict(case.state, strict=False)  # whose hooks may pack Model's parameters
    if lacking := sorted(loaded.unexpected_keys):
        raise ContractError(
            f"ModelNew lacks parameters of Model: {', '.join(lacking[:5])}; give them the same names, "
            "so that they can be loaded from Model's state"
        )
    return model


def holds_state_alone(model: torch.nn.Module, state: dict) -> bool:
    """Does a model keep no other tensors than those that a case's state gives it, and nothing that may hold one?"""
    for module in model.modules():
        others = [value for name, value in vars(module).items() if name not in STATE]
        if module._non_persistent_buffers_set or not all(isinstance(one, PLAIN) for one in tensor_trees.leaves(others)):
            return False
    return held(model).keys() <= state.keys()


def depends_on_no_device(model: torch.nn.Module, watched: WatchedBuild) -> bool:
    """Were no numbers read while a model was built, and none drawn on the CPU, where they come in another order if the
    parameters are not drawn there too? Does nothing else hold a tensor since, a table of the file say?"""
    return not (watched.has_read or "cpu" in watched.drawn_on or watched.left_besides(held(model).values()))


def cast_module(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Floating parameters and buffers in `dtype`; complex and integer ones as they are."""
    try:
        model._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
    except RuntimeError:  # torch 2.13 swaps fake tensors, and refuses where anything else refers to one
        replace_tensors(model, dtype)


def replace_tensors(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Like `cast_module`, with new parameters and buffers. Shared tensors stay shared."""
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
    """The callable of the kernel: a bound ModelNew, or kernel_function.

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


def precisions(unrounded: bool) -> list[tuple[torch.dtype | None, roundings.Widened | None, str]]:
    """The oracle's precisions to try, in turn: (dtype, the mode to run in, name). float64 is tried with the reference's
    own conversions and without them, since `x.bfloat16() @ weight` does not run beside a weight in float64. unrounded:
    without them first."""
    as_stated = [(dtype, None, name) for dtype, name in PRECISIONS]
    widened = (torch.float64, roundings.Widened(torch.float64), "fp64")
    return [widened, *as_stated] if unrounded else [as_stated[0], widened, *as_stated[1:]]


def is_near(wide: torch.Tensor, own: torch.Tensor) -> bool:
    """Does a result without the reference's own conversions differ from its own result by roundings alone?"""
    if not (own.is_floating_point() or own.is_complex()):
        return float((wide.to(own.dtype) != own).double().mean()) <= FEW if own.numel() else True
    found = accuracy.deviation(accuracy.flat(own), accuracy.flat(wide), NEAR, accuracy.scale_of(wide))
    return not (found.mismatches or found.nonfinite)


def oracle_outputs(
    reference: Reference, case: Case, device: str, like: list[torch.Tensor], unrounded: bool = False
) -> tuple[list[torch.Tensor], str]:
    """The reference's outputs in the highest precision in which they have the shapes of `like`, and that precision's
    name. Inputs that it declares to change come last, with their contents after the call. unrounded: its own
    conversions to a floating dtype of fewer bits are left out, if it runs without them. Else they are where it does not
    run in float64 with them, and its results stay near."""
    for dtype, mode, name in precisions(unrounded):
        try:
            model = reference.model(case, device, dtype)
            inputs = [tensor_trees.cast(value, dtype) if dtype else value for value in case.placed_inputs(device)]
            with mode or contextlib.nullcontext():
                returned = tensor_trees.tensors(reference.call(model, inputs, device))
            outputs = returned + reference.mutated(inputs)
            alike = dtype is None or [one.shape for one in outputs] == [one.shape for one in like]
            if alike and (mode is None or unrounded or all(map(is_near, outputs, like))):
                return outputs, name
        except Exception:  # an operation without float64, memory, a reference that asserts its dtype
            if dtype is None:
                raise
    raise AssertionError("unreachable")
