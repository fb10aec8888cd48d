"""A cut that is being written: its text, its proofs, and the sizes of its inputs that may differ."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..model_types import Proof
from . import accuracy, cut_call, cut_inputs, cut_model, cut_source, problem, tensor_files, tensor_trees
from .contract import NotCut
from .cut_part import Cut
from .cut_proof import Prover, Seen, refuse_unproved
from .graph_source import Size, named_sizes
from .model_calls import RecordedCall
from .model_chain import chain
from .model_file import ModelFile, buffer_key
from .model_graph import traced

FOLLOWING = "following the module with torch.export"


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
    cut_model.model_text(made, None)  # NotCut where a size inside does not follow from the inputs
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


class Draft:
    """A cut that is being written. seen: in the workloads of the model in which it was proved."""

    def __init__(
        self, file: ModelFile, target: torch.nn.Module, made: Cut, folder: Path, facts: dict, files: RealFiles
    ):
        self._file, self._target, self._cut, self._folder = file, target, made, folder
        self._facts, self._files = facts, files
        self._path, self._workload = facts["module"], facts["workload"]
        self._prover = Prover(file, self._path)
        self.seen: dict[str, Seen] = {}

    def prove_draft(self) -> list[Proof]:
        """Prove the operators, in each workload. NotCut where the model's outputs with the cut in place are others in
        the workload that it was cut in."""
        path = self._folder / "draft.py"
        path.write_text(self._text(self._cut, []))
        proofs = []
        for workload in [self._workload, *(name for name in self._file.workloads if name != self._workload)]:
            proof, seen = self._prover.proof(self._cut, path, workload)
            proofs.append(proof)
            refuse_unproved(proofs[0])
            if proof.equal:
                self.seen[workload] = seen
        left, prefix = self._prover.plain(self._workload)[0], f"{self._path}." if self._path else ""
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
            refuse_unproved(self._prover.proof(self._cut, path, workload)[0])
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
        inputs = cut_inputs.inputs_text(made, self.seen[self._workload].inputs, edges, list(sizes.values()))
        chosen = sizes.pop(self._workload)
        others = {workload: own for workload, own in sizes.items() if own and own != chosen}
        path = self._folder / name
        path.write_text(
            self._text(made, [inputs, cut_inputs.workloads_text(others, recorded)], loaded), encoding="utf-8"
        )
        return path

    def _text(self, made: Cut, middle: list[str], loaded: str | None = None) -> str:
        title = f"{self._path or 'The model'} ({type(self._target).__name__}) of {self._file.name}"
        names = made.state_names()
        changes = [names[node] for node in made.chain.changed if node in names]
        constants = [name for node, name in names.items() if node in made.graph.constants]
        facts = {**self._facts, "changes": changes, "constants": constants}
        if classes := cut_call.classes_in(made.graph.returned):
            facts["classes"] = classes
        model = cut_model.model_text(made, loaded and f"self.load_state_dict({loaded})")
        forms = [form for seen in self.seen.values() for form in seen.forms]
        parts = [model, *middle, cut_call.call_text(made, self._path or "the model", forms)]
        return cut_source.reference_text(title, facts, made.mutated(), parts)

    def _keep(self, path: str | None, name: str, value) -> str | None:
        """Write tensors that are to be kept at `path` to a file; the expression that reads them."""
        if path is None:
            return None
        file = self._folder / name
        tensor_files.save(tensor_trees.on_cpu(tensor_trees.map_tensors(value, torch.Tensor.detach)), file)
        return f"kept({str(file)!r}, {cut_source.digest(file)!r})"

    def _may_differ(self, path: Path, size: Size) -> bool:
        """Does the reference take inputs in which this size alone is another one, and give what the module gives?"""
        try:
            reference = problem.Reference(path)
            model, inputs, _ = reference.build("default", 0, None, self._file.device, {size.name: size.recorded + 1})
            problem.call(model.to(self._file.device), tensor_trees.map_tensors(inputs, torch.Tensor.clone))
            return self._facts["between"] is not None or self._prover.as_the_module(self._cut, path, inputs)
        except ValueError as error:  # sizes at which the model takes another way
            return str(error) in cut_inputs.NO_CASES and not self._is_single(size)
        except Exception:
            return False

    def _is_single(self, size: Size) -> bool:
        """Is there no case of another value, and had it none in the model?"""
        own = [self._cut.sizes_in(each) for seen in self.seen.values() for each in (seen.inputs, *seen.later.values())]
        same = all(sizes[size.name] == size.recorded for sizes in own)
        return same and cut_inputs.is_single(cut_inputs.size_conditions(self._cut, own), size)


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


def same_form(made: list, recorded: list[torch.Tensor], names: list[str]) -> None:
    """NotCut where the inputs of get_inputs are not of the recorded form."""
    for name, one, other in zip(names, made, recorded, strict=True):
        forms = [(tuple(t.shape), t.dtype, tuple(accuracy.significant_stride(t))) for t in (one, other)]
        if forms[0] != forms[1]:
            raise NotCut(f"get_inputs would make '{name}' as {forms[0]}, and it was {forms[1]}; cut a part around it")
