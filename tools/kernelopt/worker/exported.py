"""Kernels in the formats of other projects, loaded as those projects load them, and what is needed to write one.

A loaded kernel takes ModelNew's place in the problem contract, so that the jobs call it like any other: the weights
that it takes as arguments come from Model's state.
"""

import importlib
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from ..session.interface import NUMBER, TENSOR, Interface
from . import blank, problem, tensor_files, tensor_trees
from .context import Context, load_reference
from .faults import OracleError, blaming
from .state import identical, saved

Call = Callable[[list, list[torch.Tensor]], object]  # of the inputs and the weights
VARIANT = "torch-cuda"  # the folder of a package for Hugging Face kernels that runs on NVIDIA cards, for any torch


def interface(context: Context, reference: str, dtype: str | None) -> Interface:
    """How the kernel of a reference is called. Its inputs are made without contents where the reference allows it."""
    loaded = load_reference(reference, context.device)

    def describe(model: torch.nn.Module, inputs: list) -> Interface:
        return interface_of(loaded, model, inputs)

    with blaming(OracleError):
        return blank.on_shapes(loaded, "default", dtype, context.device, describe)


def interface_of(loaded: problem.Reference, model: torch.nn.Module, inputs: list) -> Interface:
    init = problem.arguments(loaded.init_inputs(), "get_init_inputs")
    texts = [literal(value) for value in init]
    return Interface(
        parameters=[loaded.declarations.name(at) for at in range(len(inputs))],
        kinds=[kind_of(value) for value in inputs],
        constructor=None if None in texts else texts,
        weights=list(saved(model)),
        mutates=list(loaded.declarations.mutates),
        workloads=list(loaded.workloads),
        declared=loaded.declared(),
    )


def kind_of(value) -> str:
    if isinstance(value, torch.Tensor):
        return TENSOR
    return NUMBER if type(value) in (bool, int, float) else type(value).__name__


def literal(value) -> str | None:
    """The value as Python text that `import torch` makes sense of; None where there is no such text."""
    if value is None or type(value) in (bool, int, str) or isinstance(value, torch.dtype):
        return repr(value)
    if type(value) is float:
        return repr(value) if abs(value) < float("inf") else f'float("{value}")'
    if type(value) in (list, tuple):
        texts = [literal(item) for item in value]
        if None in texts:
            return None
        return f"[{', '.join(texts)}]" if type(value) is list else f"({''.join(f'{text}, ' for text in texts)})"
    if type(value) is dict:
        pairs = [(literal(key), literal(item)) for key, item in value.items()]
        return None if any(None in pair for pair in pairs) else f"{{{', '.join(f'{k}: {v}' for k, v in pairs)}}}"
    return None


def same_bits(context: Context, pairs: list[list[str]]) -> dict:
    """{same: [bool]}: hold both files of a pair the same outputs, and the same contents of changed inputs?"""
    return {"same": [same_results(*map(tensor_files.load, map(Path, pair))) for pair in pairs]}


def same_results(a: dict, b: dict) -> bool:
    if len(a["outputs"]) != len(b["outputs"]) or a["inputs"].keys() != b["inputs"].keys():
        return False
    pairs = [*zip(a["outputs"], b["outputs"], strict=True), *((a["inputs"][at], b["inputs"][at]) for at in a["inputs"])]
    return all(identical(*pair) for pair in pairs)


class Exported(torch.nn.Module):
    """An exported kernel in ModelNew's place. It keeps Model's state in order, and hands it over at each call."""

    PLACE = "kernelopt_place"  # a buffer that `to` moves, so that the weights can follow it

    def __init__(self, call: Call):
        super().__init__()
        self._call, self._weights = call, []
        self.register_buffer(self.PLACE, torch.empty(0))

    def load_state_dict(self, state_dict, strict: bool = True, assign: bool = False):
        device = getattr(self, self.PLACE).device
        self._weights = [tensor_trees.place(value, device.type) for value in state_dict.values()]
        return torch.nn.modules.module._IncompatibleKeys([], [])

    def forward(self, *inputs):
        with torch.enable_grad():  # as the formats call it
            return self._call(list(inputs), self._weights)


def as_model(call: Call) -> Callable[..., Exported]:
    """What a kernel's file defines as ModelNew. The constructor's arguments are fixed in the exported kernel."""
    return lambda *_: Exported(call)


def flashinfer_bench(solution: str, mutates: list[int]) -> Callable[..., Exported]:
    """A FlashInfer-Bench solution: its sources become a package, and its entry point is called with all inputs by
    position. mutates: inputs whose new contents it returns after its other outputs, and must leave as they are."""
    content = json.loads(Path(solution).read_text(encoding="utf-8"))
    folder, package = Path(tempfile.mkdtemp()), "exported_solution"
    for source in content["sources"]:
        path = folder / package / source["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source["content"], encoding="utf-8")
    file, _, name = content["spec"]["entry_point"].partition("::")
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    function = getattr(importlib.import_module(".".join([package, *Path(file).with_suffix("").parts])), name)

    def call(inputs: list, weights: list[torch.Tensor]):
        return settled(function(*inputs, *weights), inputs, mutates)

    return as_model(call)


def settled(result, inputs: list, mutates: list[int]):
    """The result in the problem contract's terms: new contents of inputs go into those inputs. TypeError when it is no
    tensor and no tuple of tensors."""
    outputs = result if isinstance(result, tuple) else (result,)
    if not all(isinstance(output, torch.Tensor) for output in outputs):
        raise TypeError("FlashInfer-Bench takes a tensor or a tuple of tensors as result, and the kernel gives others")
    if not mutates:
        return result
    at = len(outputs) - len(mutates)
    for position, contents in zip(mutates, outputs[at:], strict=True):
        inputs[position].copy_(contents)
    return outputs[0] if at == 1 else outputs[:at] or None


def gpu_mode(submission: str) -> Callable[..., Exported]:
    """A GPU MODE submission: custom_kernel gets all data as one argument, a tuple where it is more than one value."""
    custom_kernel = load("submission", Path(submission)).custom_kernel

    def call(inputs: list, weights: list[torch.Tensor]):
        data = (*inputs, *weights)
        return custom_kernel(data if len(data) != 1 else data[0])

    return as_model(call)


def hf_kernels(package: str) -> Callable[..., Exported]:
    """A package for Hugging Face kernels: the folder of its build variant is a module, which metadata.json names."""
    variant = Path(package) / "build" / VARIANT
    metadata = json.loads((variant / "metadata.json").read_text(encoding="utf-8"))
    module = load(metadata["id"], variant / "__init__.py")
    function = getattr(module, metadata["name"].replace("-", "_"))
    return as_model(lambda inputs, weights: function(*inputs, *weights))


def load(name: str, path: Path):
    """Execute a file as the module `name`; an __init__.py as the package of its folder."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
