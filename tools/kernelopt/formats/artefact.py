"""What is exported: an accepted kernel, how it is called, where it comes from, and what a format makes of it. Pure."""

import ast
import keyword
import re
import sys
from dataclasses import dataclass
from functools import cached_property

from ..errors import UsageError
from ..session.interface import TENSOR, Interface
from ..session.plans import in_a_line
from ..session.record import Record
from ..session.source_names import names_in

PACKAGES = {"cutlass": "nvidia-cutlass-dsl"}  # the name to install, where it is not the module's
# Names of the text around the kernel (entry.py), which no argument may have.
RESERVED = ("exported", "exported_model", "exported_bind", "exported_outputs", "exported_call", "custom_kernel")
# What a task says besides its values. The keys are those of the declarations, see worker.declarations.DeclaredJson.
DECLARED = {
    "compare": "how outputs are compared (COMPARE)",
    "samples": "which outputs are drawn at random (SAMPLES)",
    "layouts": "that inputs are contiguous (LAYOUTS)",
    "sizes": "which other sizes the inputs may have (keyword sizes)",
}


@dataclass(frozen=True)
class Options:
    """What the user says of an artefact; None where nothing is said. definition: what a FlashInfer-Bench solution
    solves. leaderboard: of GPU MODE. gpus: spelt as the format does."""

    name: str | None = None
    author: str | None = None
    license: str | None = None
    definition: str | None = None
    leaderboard: str | None = None
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class Artefact:
    """A kernel in a format. files: text by relative path. entry: the path, "" for the folder, that the function
    `loader` of worker.exported takes, and then `arguments`. remarks: what a user must know, a sentence each."""

    files: dict[str, str]
    entry: str
    loader: str
    arguments: tuple
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class Export:
    """An accepted kernel that is to be written. session: its name. source: the text of kernel.py. dtype: of the task,
    which ModelNew is cast to; None for none. device: where the artefact is loaded back."""

    session: str
    record: Record
    source: str
    interface: Interface
    dtype: str | None
    device: str
    options: Options

    @property
    def name(self) -> str:
        return self.options.name or f"{self.session}_{self.record.version}"

    @cached_property
    def defined(self) -> set[str]:
        """The names that kernel.py defines or imports at top level."""
        return names_in(ast.parse(self.source))

    @cached_property
    def packages(self) -> list[str]:
        """What must be installed for kernel.py."""
        nodes = list(ast.walk(ast.parse(self.source)))
        modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        modules += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
        tops = {module.split(".")[0] for module in modules} - sys.stdlib_module_names
        return sorted(PACKAGES.get(top, top) for top in tops)

    @property
    def is_model(self) -> bool:
        """Is it ModelNew, and not kernel_function?"""
        return "ModelNew" in self.defined

    @property
    def is_extension(self) -> bool:
        """Does torch compile it, as CUDA C++, when it is imported?"""
        return "cpp_extension" in self.source

    @property
    def inputs(self) -> list[str]:
        """The names of the inputs in the exported function."""
        return names_of(self.interface.parameters, taken=RESERVED)

    @property
    def weights(self) -> dict[str, str]:
        """By name in Model's state, the names of the weights in the exported function, which come after the inputs."""
        own = self.interface.weights if self.is_model else []
        return dict(zip(own, names_of(own, taken=[*RESERVED, *self.inputs]), strict=True))

    @property
    def mutated(self) -> list[str]:
        """The names of the inputs that the kernel changes."""
        return [self.inputs[at] for at in self.interface.mutates]

    def provenance(self) -> list[str]:
        """Where the artefact comes from, a line a fact."""
        record, workload = self.record, self.record.performance.workload
        latency = "no latency" if record.latency_us is None else f"{record.latency_us:.2f} us, the median of {workload}"
        lines = [
            f"Kernel {record.version} of the session {self.session} of gpu-kernel-optimizer.",
            f"Commit {record.git_commit_hash}; SHA-256 of its kernel.py: {record.kernel_sha256}.",
            f"Recorded on {record.device}: {latency}.",
            f"Loaded back on {self.device}, where it computed what the session's kernel computes.",
            f"Author: {self.options.author or 'not stated'}. Licence: {self.options.license or 'not stated'}.",
        ]
        return [in_a_line(line) for line in lines]

    def remarks(self, said: dict[str, str]) -> tuple[str, ...]:
        """What is not in the artefact, and what becomes of weights and constructor arguments. said: where the format
        says what DECLARED lists, by its keys; "else" for the others."""
        absent = [key for key in DECLARED if key in self.interface.declared]
        remarks = [f"not in it: {DECLARED[key]}; {said.get(key, said['else'])}" for key in absent]
        remarks.append(f"not in it: what makes the inputs (workloads: {', '.join(self.interface.workloads)})")
        if self.weights:
            remarks.append(f"the model's weights are arguments after the inputs: {', '.join(self.weights.values())}")
        if self.is_model and self.interface.constructor:
            remarks.append(f"the constructor's arguments are fixed: ModelNew({', '.join(self.interface.constructor)})")
        if self.is_extension:
            remarks.append("torch compiles its CUDA C++ when it is first imported, which takes nvcc")
        return tuple(remarks)


def check(export: Export) -> None:
    """UsageError when the kernel cannot be written as a function in a file."""
    if not export.is_model:
        return
    if export.interface.constructor is None:
        raise UsageError(
            "an argument of ModelNew's constructor cannot be written into a file (a tensor, say); only numbers, texts, "
            "dtypes, and lists and dicts of them can"
        )
    if not export.weights and TENSOR not in export.interface.kinds:
        raise UsageError("no argument of ModelNew is a tensor, so nothing says on which GPU an exported one must lie")


def names_of(texts: list[str], taken: list[str] | tuple[str, ...]) -> list[str]:
    """A name of Python for each text, all different and none in `taken`: layer.weight becomes layer_weight."""
    names: list[str] = []
    for text in texts:
        name = re.sub(r"\W", "_", text)
        name = name if name.isidentifier() else f"argument_{name}"
        while keyword.iskeyword(name) or name in names or name in taken:
            name += "_"
        names.append(name)
    return names
