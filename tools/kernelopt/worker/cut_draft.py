"""A cut that is being written: its text, the proof that it computes the same in the model, and the sizes of its inputs
that may differ."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ..model_types import REPEATABLE, Proof
from . import accuracy, cut_source, model_swap, problem, tensor_trees
from .contract import NotCut
from .cut_source import Cut
from .graph_source import Size, named_sizes
from .model_calls import RecordedCall, TakenApart
from .model_chain import chain
from .model_comparing import reason
from .model_file import Arguments, ModelFile, Tensors, buffer_key
from .model_graph import traced

FOLLOWING = "following the module with torch.export"
MOST_LATER = 3  # calls of other sizes in a run that become workloads


def cut_of(target: torch.nn.Module, call: RecordedCall, ends: tuple[str, str] | None) -> tuple[Cut, str]:
    """The cut, for any size where that is possible, else for the recorded sizes; and why it may be for these alone.
    NotCut where the run changed an argument, and the operators show no write to it."""
    try:
        made, fixed = made_cut(target, call, ends, any_size=True), "the operators leave no size of an input open"
    except NotCut as error:
        made, fixed = made_cut(target, call, ends, any_size=False), str(error)
    names = [leaf.name for leaf in made.taken.leaves]
    hidden = [names[number] for number in call.changed if names[number] not in made.mutated()]
    if hidden and ends is None:
        raise NotCut(f"the module changes '{hidden[0]}' in a way that its operators do not show")
    return made, fixed


def made_cut(target: torch.nn.Module, call: RecordedCall, ends: tuple[str, str] | None, any_size: bool) -> Cut:
    graph, taken = traced(target, call, any_size)
    made = Cut.of(graph, taken, chain(graph, ends), target)
    cut_source.model_text(made, None)  # NotCut where a size inside does not follow from the inputs
    return made


@dataclass(frozen=True)
class RealFiles:
    """Files for tensors that are kept; None for none."""

    weights: str | None
    inputs: str | None


@dataclass(frozen=True)
class Drafts:
    """What drafts of one cut have in common. facts: for CUT."""

    file: ModelFile
    target: torch.nn.Module
    folder: Path
    facts: dict
    files: RealFiles

    def first_proved(
        self, calls: list[tuple[RecordedCall, tuple[str, str] | None]]
    ) -> tuple["Draft", list[Proof], str]:
        """The draft of the first call whose operators are proved, its proofs, and why no size of it may differ. NotCut
        for the last one. With each call come the names of the first and the last operator there."""
        for number, (call, ends) in enumerate(calls, start=1):
            try:
                self.file.phase(FOLLOWING)
                made, fixed = cut_of(self.target, call, ends)
                folder = self.folder / f"draft-{number}"
                folder.mkdir()
                draft = Draft(self.file, self.target, made, folder, self.facts, self.files)
                return draft, draft.prove_draft(), fixed
            except NotCut:
                if number == len(calls):
                    raise
        raise AssertionError("unreachable")


@dataclass
class Seen:
    """The calls of the module in a run of the model that the cut took, and why the original took the others. inputs: of
    the cut in the first of them, copies. later: without contents, by number of the call, where the sizes are others.
    forms: the sizes of the module's arguments."""

    inputs: list[torch.Tensor] = field(default_factory=list)
    later: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    forms: list[cut_source.Form] = field(default_factory=list)
    calls: int = 0
    left: list[str] = field(default_factory=list)

    def note(self, inputs: tuple, form: cut_source.Form) -> None:
        self.calls += 1
        if form in self.forms:
            return
        self.forms.append(form)
        if not self.inputs:
            self.inputs = [tensor_trees.copied(one.detach(), str(one.device)) for one in inputs]
        elif len(self.later) < MOST_LATER:
            self.later[self.calls + len(self.left)] = [one.detach().to("meta") for one in inputs]


class Draft:
    """A cut that is being written. seen: in the workloads of the model in which it was proved."""

    def __init__(
        self, file: ModelFile, target: torch.nn.Module, made: Cut, folder: Path, facts: dict, files: RealFiles
    ):
        self._file, self._target, self._cut, self._folder = file, target, made, folder
        self._facts, self._files = facts, files
        self._path, self._workload = facts["module"], facts["workload"]
        self._name = self._path or "the model"
        self._plain: dict[str, list[Tensors]] = {}
        self.seen: dict[str, Seen] = {}

    def prove_draft(self) -> list[Proof]:
        """Prove the operators, in each workload. NotCut where the model's outputs with the cut in place are others in
        the workload that it was cut in."""
        path = self._folder / "draft.py"
        path.write_text(self._text(self._cut, []))
        proofs = []
        for workload in [self._workload, *(name for name in self._file.workloads if name != self._workload)]:
            proof, seen = self._proof(path, workload)
            proofs.append(proof)
            refuse_unproved(proofs[0])
            if proof.equal:
                self.seen[workload] = seen
        left, prefix = self._plain[self._workload][0], f"{self._path}." if self._path else ""
        keys = {name: buffer_key(prefix + name) for name in self._cut.graph.state.values()}
        afterwards = {name: left[key] for name, key in keys.items() if key in left}
        self._cut = replace(self._cut.at_sizes_of(self.seen[self._workload].inputs), afterwards=afterwards)
        return proofs

    def write(self) -> tuple[Path, Cut]:
        """reference.py and the files that it names. Sizes that cannot differ alone are tied to others, or fixed."""
        loaded = self._keep(self._files.weights, "weights.pt", self._cut.state())
        edges = {name: seen.inputs for name, seen in self.seen.items()}
        floating = {name: own for name, own in edges.items() if any(one.is_floating_point() for one in own)}
        real = self._keep(self._files.inputs, "inputs.pt", floating)
        recorded = real and (real, list(floating))
        made = self._cut
        for name in ("tried.py", "tied.py"):
            tried = self._written(name, made, loaded, recorded)
            made = tied(made, [size.name for size in named_sizes(made.sizes) if not self._may_differ(tried, size)])
        return self._written("reference.py", made, loaded, recorded), made

    def prove(self, path: Path) -> None:
        """NotCut unless the written file computes the same in the model, draws inputs of the recorded form, and its
        results on them are numbers."""
        for workload in self.seen:
            refuse_unproved(self._proof(path, workload)[0])
        reference = problem.Reference(path)
        self._file.phase("running the cut on random numbers")
        for workload in reference.workloads:
            model, inputs, _ = reference.build(workload, 0, None, self._file.device)
            if workload == "default":
                same_form(inputs, self.seen[self._workload].inputs, list(self._cut.inputs.values()))
            results = tensor_trees.tensors(problem.call(model.to(self._file.device), inputs))
            if any(one.is_floating_point() and one.numel() and not one.float().isfinite().any() for one in results):
                raise NotCut(
                    f"random numbers in place of the recorded inputs give no finite result in workload '{workload}'; "
                    "cut a part around this one, whose inputs are less particular"
                )

    def finished(self, path: Path) -> Path:
        """The file with the paths that kept tensors are to have."""
        text = path.read_text(encoding="utf-8")
        for name, wanted in (("weights.pt", self._files.weights), ("inputs.pt", self._files.inputs)):
            text = text.replace(repr(str(self._folder / name)), repr(wanted))
        final = self._folder / "finished.py"
        final.write_text(text, encoding="utf-8")
        return final

    def _written(self, name: str, made: Cut, loaded: str | None, recorded: tuple[str, list[str]] | None) -> Path:
        sizes = {}
        for workload, seen in self.seen.items():
            sizes[workload] = made.sizes_in(seen.inputs)
            prefix = "" if workload == self._workload else f"{workload}_"
            sizes |= {f"{prefix}call_{number}": made.sizes_in(own) for number, own in seen.later.items()}
        edges = [seen.inputs for seen in self.seen.values()]
        inputs = cut_source.inputs_text(made, self.seen[self._workload].inputs, edges, list(sizes.values()))
        chosen = sizes.pop(self._workload)
        others = {workload: own for workload, own in sizes.items() if own and own != chosen}
        path = self._folder / name
        path.write_text(
            self._text(made, [inputs, cut_source.workloads_text(others, recorded)], loaded), encoding="utf-8"
        )
        return path

    def _text(self, made: Cut, middle: list[str], loaded: str | None = None) -> str:
        title = f"{self._path or 'The model'} ({type(self._target).__name__}) of {self._file.name}"
        names = made.state_names()
        changes = [names[node] for node in made.chain.changed if node in names]
        constants = [name for node, name in names.items() if node in made.graph.constants]
        facts = {**self._facts, "changes": changes, "constants": constants}
        if classes := cut_source.classes_in(made.graph.returned):
            facts["classes"] = classes
        model = cut_source.model_text(made, loaded and f"self.load_state_dict({loaded})")
        forms = [form for seen in self.seen.values() for form in seen.forms]
        parts = [model, *middle, cut_source.call_text(made, self._name, forms)]
        return cut_source.reference_text(title, facts, made.mutated(), parts)

    def _keep(self, path: str | None, name: str, value) -> str | None:
        """Write tensors that are to be kept at `path` to a file; the expression that reads them."""
        if path is None:
            return None
        file = self._folder / name
        tensor_trees.save(tensor_trees.on_cpu(tensor_trees.map_tensors(value, torch.Tensor.detach)), file)
        return f"kept({str(file)!r}, {cut_source.digest(file)!r})"

    def _may_differ(self, path: Path, size: Size) -> bool:
        """Does the reference take inputs in which this size alone is another one, and give what the module gives?"""
        try:
            reference = problem.Reference(path)
            model, inputs, _ = reference.build("default", 0, None, self._file.device, {size.name: size.recorded + 1})
            problem.call(model.to(self._file.device), tensor_trees.map_tensors(inputs, torch.Tensor.clone))
            return self._facts["between"] is not None or self._as_the_module(path, inputs)
        except ValueError as error:  # sizes at which the model takes another way
            return str(error) in cut_source.NO_CASES
        except Exception:
            return False

    def _as_the_module(self, path: Path, inputs: list[torch.Tensor]) -> bool:
        """Does the module, called on inputs of the cut, give what it gives with the cut in place?"""
        made = self._cut
        given = dict(zip(made.chain.inputs, inputs, strict=True))
        leaves = zip(made.graph.inputs, made.taken.leaves, strict=True)
        tensors = [given.get(node, leaf.tensor) for node, leaf in leaves]
        results = []
        in_place = self._in_place(problem.load_module(path).call, self._model(path))
        for module in (self._target, in_place):
            arguments = made.taken.rebuilt([one.clone() for one in tensors])
            with self._file.buffers_restored():
                outputs = self._file.run(module, arguments)
                results.append([one.clone() for one in tensor_trees.input_tensors([outputs]) + arguments.tensors()])
        return all(difference_of(*pair) <= REPEATABLE for pair in zip(*results, strict=True))

    def _proof(self, path: Path, workload: str) -> tuple[Proof, Seen]:
        """Run the model with the cut of `path` in place of the original."""
        if workload not in self._plain:
            self._file.phase(f"running the model, workload {workload}")
            self._plain[workload] = [self._file.left_by(self._file.module, workload) for _ in range(2)]
        first, second = self._plain[workload]
        self._file.phase(f"running the model with the cut in place, workload {workload}")
        seen = Seen()
        try:
            replaced = self._left_with(path, workload, seen)
        except Exception as error:
            return Proof(workload, 0.0, 0.0, 0, reason(error)), seen
        noise, difference = (largest_difference(one, first) for one in (second, replaced))
        runs, condition = self._file.runs(workload), " and ".join(dict.fromkeys(seen.left)) or None
        counts = seen.calls // runs, len(seen.left) // runs
        return Proof(workload, difference, noise, len(first), None, *counts, condition), seen

    def _model(self, path: Path) -> torch.nn.Module:
        """Model of a file, with the module's own parameters and buffers."""
        model = problem.load_module(path).Model().to(self._file.device)
        model.load_state_dict({name: tensor.detach() for name, tensor in self._cut.state().items()}, assign=True)
        return model

    def _in_place(self, call: Callable, kernel: Callable) -> "InPlace":
        return InPlace(self._target, cut_source.classes_in(self._cut.graph.returned), call, kernel)

    def _left_with(self, path: Path, workload: str, seen: Seen) -> Tensors:
        """What the model leaves with the cut in place of the module. Calls of another form go to the original."""
        model, own = self._model(path), problem.load_module(path)
        given = Arguments((), {})

        def kernel(*inputs):
            for name, one in zip(self._cut.inputs.values(), inputs, strict=True):
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

        with swapped(self._file.module, self._path, self._in_place(call, kernel)) as whole:
            left = self._file.left_by(whole, workload)
        if seen.left and not seen.calls:
            raise NotCut(f"the call lacks {seen.left[0]}")
        if not seen.calls:
            raise NotCut(f"'{self._path}' was replaced, and the model did not call it in workload '{workload}'")
        return left


def tied(made: Cut, dependent: list[str]) -> Cut:
    """The cut with one name for dependent sizes that are equal; one that equals no other is fixed."""
    first: dict[int, Size] = {}
    equal = [size.recorded for size in named_sizes(made.sizes) if size.name in dependent]
    sizes = dict(made.sizes)
    for symbol, size in made.sizes.items():
        if isinstance(size, Size) and size.name in dependent:
            one = first.setdefault(size.recorded, size)
            sizes[symbol] = one if equal.count(size.recorded) > 1 else size.recorded
    return made.with_sizes(sizes)


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
    deviation = accuracy.deviation(a, b, 0.0, accuracy.root_mean_square(b))
    return accuracy.LARGEST_ERROR if deviation.nonfinite else deviation.max_rel


def same_form(made: list, recorded: list[torch.Tensor], names: list[str]) -> None:
    """NotCut where the inputs of get_inputs are not of the recorded form."""
    for name, one, other in zip(names, made, recorded, strict=True):
        forms = [(tuple(t.shape), t.dtype, tuple(accuracy.significant_stride(t))) for t in (one, other)]
        if forms[0] != forms[1]:
            raise NotCut(f"get_inputs would make '{name}' as {forms[0]}, and it was {forms[1]}; cut a part around it")


def refuse_unproved(proof: Proof) -> None:
    """NotCut where the model's outputs with the cut in place are others."""
    if proof.why is not None:
        raise NotCut(f"the model does not run with the cut in place: {proof.why}")
    if proof.noise > REPEATABLE:
        raise NotCut(
            f"two runs of the model on equal inputs differ by {proof.noise:.2g} in workload '{proof.workload}', so "
            "nothing can be proved; let load() give a model without dropout and without a memory of former calls"
        )
    if not proof.equal:
        raise NotCut(
            f"with the cut in place the model's outputs differ by {proof.difference:.2g} in workload "
            f"'{proof.workload}', and by {proof.noise:.2g} between two runs as it is: the operators that were recorded "
            "are not those of the model. Does it take a fused path that torch.export leaves, as a "
            "TransformerEncoderLayer does? torch.backends.mha.set_fastpath_enabled(False) in load() switches that off"
        )
