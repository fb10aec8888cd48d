"""An accepted kernel as a GPU MODE submission: one file with custom_kernel(data)."""

from ..errors import UsageError
from . import entry
from .artefact import RESERVED, Artefact, Export

FILE = "submission.py"
SAID = {"else": "the task's check_implementation and task.yml say it"}


def write(export: Export) -> Artefact:
    """The submission. UsageError when kernel.py itself defines a name that is written here, or a word of the header
    has a blank in it."""
    if taken := set(RESERVED) & export.defined:
        raise UsageError(
            f"kernel.py itself defines {min(taken)}, a name of the submission's own; rename it there, in a new round"
        )
    for word in (export.options.leaderboard, *export.options.gpus):
        if len(word.split()) != 1:
            raise UsageError(f"{word!r} is no word, as the header of a submission needs it")
    return Artefact({FILE: text(export)}, FILE, "gpu_mode", (), remarks(export))


def text(export: Export) -> str:
    """The file: header, kernel.py, and custom_kernel below it."""
    header = [f"#!POPCORN leaderboard {export.options.leaderboard}"]
    if export.options.gpus:
        header.append(f"#!POPCORN gpu {' '.join(export.options.gpus)}")
    header += [f"# {line}" for line in export.provenance()]
    parts = ["\n".join(header), export.source.rstrip("\n"), entry.imports(export).rstrip("\n")]
    function = entry.text(export, "exported_call", [], "@")
    return "\n\n".join(parts) + "\n\n" + function + CUSTOM_KERNEL.format(arguments=of_data(export))


CUSTOM_KERNEL = """

def custom_kernel(data):
    return exported_call({arguments})
"""


def of_data(export: Export) -> str:
    """One argument is all the data; more are a tuple."""
    return "data" if len(export.inputs) + len(export.weights) == 1 else "*data"


def remarks(export: Export) -> tuple[str, ...]:
    names = [*export.inputs, *export.weights.values()]
    data = names[0] if len(names) == 1 else f"the tuple ({', '.join(names)})"
    remarks = [f"data is {data}, as generate_input must give it"]
    if export.mutated:
        remarks.append(f"it changes {', '.join(export.mutated)} in place, and check_implementation must look there")
    if "stream" in export.source.lower():
        remarks.append("GPU MODE refuses a file that holds the word stream, and kernel.py does; ask its staff")
    return (*remarks, *export.remarks(SAID))
