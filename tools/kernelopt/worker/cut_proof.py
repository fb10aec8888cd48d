"""Proofs that a cut computes in the model what the original does."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..model_types import REPEATABLE, Proof
from . import accuracy, model_swap, problem, tensor_trees
from .contract import NotCut
from .cut_call import Form, classes_in
from .cut_part import Cut
from .model_calls import TakenApart
from .model_comparing import reason
from .model_file import Arguments, ModelFile, Tensors

MOST_LATER = 3  # calls of other sizes in a run that become workloads


@dataclass
class Seen:
    """The calls of the module in a run of the model that the cut took, and why the original took the others. inputs: of
    the cut in the first of them, copies. later: without contents, by number of the call, where the sizes are others.
    forms: the sizes of the module's arguments."""

    inputs: list[torch.Tensor] = field(default_factory=list)
    later: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    forms: list[Form] = field(default_factory=list)
    calls: int = 0
    left: list[str] = field(default_factory=list)

    def note(self, inputs: tuple, form: Form) -> None:
        self.calls += 1
        if form in self.forms:
            return
        self.forms.append(form)
        if not self.inputs:
            self.inputs = [tensor_trees.copied(one.detach(), str(one.device)) for one in inputs]
        elif len(self.later) < MOST_LATER:
            self.later[self.calls + len(self.left)] = [one.detach().to("meta") for one in inputs]


class Prover:
    """Runs the model of a file with a cut in place of the module at a path."""

    def __init__(self, file: ModelFile, path: str):
        self._file, self._path, self._target = file, path, file.submodule(path)
        self._plain: dict[str, list[Tensors]] = {}

    def plain(self, workload: str) -> list[Tensors]:
        """What the model leaves as it is, in two runs."""
        if workload not in self._plain:
            self._file.phase(f"running the model, workload {workload}")
            self._plain[workload] = [self._file.left_by(self._file.module, workload) for _ in range(2)]
        return self._plain[workload]

    def proof(self, made: Cut, source: Path, workload: str) -> tuple[Proof, Seen]:
        """Run the model with the cut, whose text is `source`, in place of the module."""
        first, second = self.plain(workload)
        self._file.phase(f"running the model with the cut in place, workload {workload}")
        seen = Seen()
        try:
            replaced = self._left_with(made, source, workload, seen)
        except Exception as error:
            return Proof(workload, 0.0, 0.0, 0, reason(error)), seen
        noise, difference = (largest_difference(one, first) for one in (second, replaced))
        runs, condition = self._file.runs(workload), " and ".join(dict.fromkeys(seen.left)) or None
        counts = seen.calls // runs, len(seen.left) // runs
        return Proof(workload, difference, noise, len(first), None, *counts, condition), seen

    def as_the_module(self, made: Cut, source: Path, inputs: list[torch.Tensor]) -> bool:
        """Does the module, called on inputs of the cut, give what it gives with the cut in place?"""
        given = dict(zip(made.chain.inputs, inputs, strict=True))
        leaves = zip(made.graph.inputs, made.taken.leaves, strict=True)
        tensors = [given.get(node, leaf.tensor) for node, leaf in leaves]
        in_place = self._in_place(made, problem.load_module(source).call, self._model(made, source))
        results = []
        for module in (self._target, in_place):
            arguments = made.taken.rebuilt([one.clone() for one in tensors])
            with self._file.buffers_restored():
                outputs = self._file.run(module, arguments)
                results.append([one.clone() for one in tensor_trees.input_tensors([outputs]) + arguments.tensors()])
        return all(difference_of(*pair) <= REPEATABLE for pair in zip(*results, strict=True))

    def _left_with(self, made: Cut, source: Path, workload: str, seen: Seen) -> Tensors:
        """What the model leaves with the cut in place of the module. Calls of another form go to the original."""
        model, own = self._model(made, source), problem.load_module(source)
        given = Arguments((), {})

        def kernel(*inputs):
            for name, one in zip(made.inputs.values(), inputs, strict=True):
                if not isinstance(one, torch.Tensor):
                    raise NotCut(f"{name} is no tensor there")
            seen.note(inputs, [tuple(leaf.tensor.shape) for leaf in TakenApart(self._target, given).leaves])
            return model(*inputs)

        def call(kernel, module, *args, **kwargs):
            nonlocal given
            given = Arguments(args, kwargs)
            try:
                return own.call(kernel, module, *args, **kwargs)
            except getattr(own, "OtherCall", ()) as other:
                seen.left.append(other.condition)
                return self._target(*args, **kwargs)

        with swapped(self._file.module, self._path, self._in_place(made, call, kernel)) as whole:
            left = self._file.left_by(whole, workload)
        if seen.left and not seen.calls:
            raise NotCut(f"the call lacks {seen.left[0]}")
        if not seen.calls:
            raise NotCut(f"'{self._path}' was replaced, and the model did not call it in workload '{workload}'")
        return left

    def _model(self, made: Cut, source: Path) -> torch.nn.Module:
        """Model of a file, with the module's own parameters and buffers."""
        model = problem.load_module(source).Model().to(self._file.device)
        model.load_state_dict({name: tensor.detach() for name, tensor in made.state().items()}, assign=True)
        return model

    def _in_place(self, made: Cut, call: Callable, kernel: Callable) -> "InPlace":
        return InPlace(self._target, classes_in(made.graph.returned), call, kernel)


class InPlace(model_swap.StandIn):
    """A function in place of a module's call."""

    def __init__(self, original: torch.nn.Module, classes: dict[str, str], call: Callable, kernel: Callable):
        super().__init__(original, classes)
        self._call, self._kernel = call, kernel

    def forward(self, *args, **kwargs):
        return self._call(self._kernel, self, *args, **kwargs)


@contextlib.contextmanager
def swapped(model: torch.nn.Module, path: str, replaced: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The model with another module at a path."""
    if not path:
        yield replaced
        return
    owner, _, leaf = path.rpartition(".")
    original = model.get_submodule(path)
    setattr(model.get_submodule(owner), leaf, replaced)
    try:
        yield model
    finally:
        setattr(model.get_submodule(owner), leaf, original)


def largest_difference(actual: Tensors, expected: Tensors) -> float:
    if actual.keys() != expected.keys():
        return accuracy.LARGEST_ERROR
    return max((difference_of(actual[name], expected[name]) for name in expected), default=0.0)


def difference_of(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest |actual - expected| / (|expected| + rms); 1e9 for another form, or where one alone is finite."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return accuracy.LARGEST_ERROR
    a, b = (accuracy.comparable(one).reshape(-1) for one in (actual, expected))
    if torch.equal(a, b) or not a.numel():
        return 0.0
    deviation = accuracy.deviation(a, b, 0.0, accuracy.Scale(accuracy.root_mean_square(b)))
    return accuracy.LARGEST_ERROR if deviation.nonfinite else deviation.max_rel


def refuse_unproved(proof: Proof) -> None:
    """NotCut where the model's outputs with the cut in place are others."""
    if proof.why is not None:
        raise NotCut(f"the model does not run with the cut in place: {proof.why}")
    if proof.noise > REPEATABLE:
        raise NotCut(
            f"two runs of the model on equal inputs differ by {proof.noise:.2g} in workload '{proof.workload}', so "
            "nothing can be proved; let load() give a model without dropout and without a memory of former calls"
        )
    if proof.equal:
        return
    others = (
        f"Does one of the {proof.calls} calls in a step take another way than the others? " if proof.calls > 1 else ""
    )
    raise NotCut(
        f"with the cut in place the model's outputs differ by {proof.difference:.2g} in workload "
        f"'{proof.workload}', and by {proof.noise:.2g} between two runs as it is: the operators that were recorded "
        f"are not those of the model. {others}Does it take a fused path that torch.export leaves, as a "
        "TransformerEncoderLayer does? torch.backends.mha.set_fastpath_enabled(False) in load() switches that off"
    )
