"""An accepted kernel as a FlashInfer-Bench solution: one JSON file with the sources in it.

The function returns its outputs; it does not take memory for them, because our kernels allocate their own.
"""

from .. import bundle
from ..errors import UsageError
from ..session.interface import NUMBER, TENSOR
from . import entry
from .artefact import Artefact, Export

SAID = {
    "compare": "the runner's configuration gives tolerances by op_type or definition",
    "samples": "the runner judges definitions of op_type sampling so",
    "else": "the definition and its workloads say it",
}


def write(export: Export) -> Artefact:
    """The solution. UsageError when an input is neither a tensor nor a number, or the name cannot be a file's."""
    if "/" in export.name:
        raise UsageError(f"{export.name!r} cannot name a solution, whose file has that name; pass --name without a /")
    for name, kind in zip(export.inputs, export.interface.kinds, strict=True):
        if kind not in (TENSOR, NUMBER):
            raise UsageError(f"FlashInfer-Bench takes tensors and numbers as inputs, and {name} is a {kind}")
    file = f"{export.name}.json"
    text, changed = bundle.dumps(solution(export)), (export.interface.mutates,)
    return Artefact({file: text}, file, "flashinfer_bench", changed, remarks(export))


def solution(export: Export) -> dict:
    """The object of the file."""
    device = (export.record.device or "cuda").replace(" ", "_")
    return {
        "name": export.name,
        "definition": export.options.definition,
        "author": export.options.author,
        "description": " ".join(export.provenance()),
        "spec": {
            "language": "triton" if "triton" in export.packages else "python",
            "target_hardware": list(export.options.gpus) or [device],
            "entry_point": "main.py::run",
            "dependencies": export.packages,
            "destination_passing_style": False,
        },
        "sources": [
            {"path": "main.py", "content": main(export)},
            {"path": "kernel.py", "content": export.source},
        ],
    }


def main(export: Export) -> str:
    """main.py: `run`, which gives a tensor or a tuple of tensors, and leaves its inputs as they are."""
    kernel = "ModelNew" if export.is_model else "kernel_function"
    before = [f"{name} = {name}.clone()" for name in export.mutated]
    function = entry.text(export, "run", before, f"exported_outputs({', '.join(['@', *export.mutated])})")
    return "\n".join([f"{entry.imports(export)}\nfrom .kernel import {kernel}\n", OUTPUTS, function])


OUTPUTS = '''
def exported_outputs(result, *changed):
    """What the kernel returns and then the inputs that it changed: a tensor, or a tuple of tensors."""
    outputs = () if result is None else tuple(result) if isinstance(result, list | tuple) else (result,)
    outputs += changed
    return outputs[0] if len(outputs) == 1 else outputs
'''


def remarks(export: Export) -> tuple[str, ...]:
    copies = [
        f"it works on a copy of {name} and returns the new contents after the other outputs, since the format leaves "
        "inputs as they are; the copy is part of the time"
        for name in export.mutated
    ]
    names = ", ".join([*export.inputs, *export.weights.values()])
    return (*copies, f"the definition must have these inputs in this order: {names}", *export.remarks(SAID))
