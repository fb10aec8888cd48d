"""The text of reference.py: a task, and the declarations that a first run of it led to."""

import json
import textwrap

from ..case_types import Observation
from .tasks import FLOATS, Task, Workload

WIDTH = 110
BLANK_LINE = "\n\n"


def text_of(task: Task, observed: Observation | None) -> str:
    """The whole file. observed: None for a first one, which declares nothing yet."""
    model = model_of(task, observed) if task.model else ""
    imports = "from __future__ import annotations\n\n" * task.lazy_annotations + "import torch\nimport torch.nn as nn\n"
    if "stored." in task.inputs:
        imports += "from kernelopt.worker import stored\n"
    parts = [imports, task.code, model, task.inputs, workloads_of(task.workloads), declarations(task, observed)]
    return f"{docstring(task)}\n" + "\n\n".join(part.strip("\n") + "\n" for part in parts if part.strip())


def docstring(task: Task) -> str:
    """What the task is, where it comes from, and what of it is not here."""
    origin, about = task.origin, " ".join(task.description.split())
    facts = [
        f"Made by tools/import_task.py on {origin.date} from {origin.source}, a task of {task.format}.",
        f"Repository: {origin.repository}." if origin.repository else "",
        f"Commit: {origin.commit}." if origin.commit else "",
        f"Licence: {origin.licence}." if origin.licence else "The source states no licence.",
        f"The default workload is the source's {task.workloads[0].name}." if len(task.workloads) > 1 else "",
    ]
    paragraphs = [wrapped(f"{task.name}: {about}" if about else f"{task.name}.")]
    paragraphs.append("\n".join(wrapped(fact) for fact in facts if fact))
    if task.remarks:
        paragraphs.append("\n".join(["Not as in the source:", *map(item, task.remarks)]))
    return f'"""{quoted(BLANK_LINE.join(paragraphs))}\n"""\n'


def wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def item(text: str) -> str:
    return textwrap.fill(f"- {text}", WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def quoted(text: str) -> str:
    """Text that may stand between triple quotes."""
    printable = "".join(one if one == "\n" or one.isprintable() else "?" for one in text)
    return printable.replace("\\", "\\\\").replace('"""', "'''").rstrip('"')


def model_of(task: Task, observed: Observation | None) -> str:
    """The class Model around a function of the source. A dict that it returns becomes its values, in the order of the
    task's outputs."""
    model, given, indent = task.model, ", ".join(task.parameters), " " * 8
    call = model.call
    lines = ["class Model(nn.Module):", f"    def forward(self, {given}):"]
    keys = observed.keys if observed else None
    if keys and set(keys) >= set(model.outputs):
        lines.append(f"{indent}result = {call}")
        call = ", ".join(f"result[{json.dumps(name)}]" for name in model.outputs or keys)
    return "\n".join([*lines, f"{indent}return {call}"]) + "\n"


def workloads_of(workloads: tuple[Workload, ...]) -> str:
    """get_workloads for all but the default one."""
    if len(workloads) < 2:
        return ""
    lines = [f"        {json.dumps(one.name)}: {one.maker or json.dumps(one.sizes)},\n" for one in workloads[1:]]
    return f"def get_workloads():\n    return {{\n{''.join(lines)}    }}\n"


def declarations(task: Task, observed: Observation | None) -> str:
    """MUTATES, COMPARE and what else the task declares."""
    if observed is None:
        return ""
    names = {at: parameter_name(task.parameters, at) for at in sorted(observed.changed)}
    compare = compared(task, observed, names)
    lines = []
    if names:
        lines.append(f"MUTATES = ({', '.join(map(json.dumps, names.values()))}{',' * (len(names) == 1)})\n")
    if compare:
        lines += [
            "COMPARE = {\n",
            *(f"    {json.dumps(key)}: {json.dumps(modes)},\n" for key, modes in compare.items()),
            "}\n",
        ]
    if task.contiguous:
        lines.append('LAYOUTS = "contiguous"\n')
    return "".join(lines) + task.more


def compared(task: Task, observed: Observation, names: dict[int, str | int]) -> dict[str | int, dict]:
    """The modes of each output that has any, by position or by the name of a changed parameter."""
    compare: dict[str | int, dict] = {}
    for at, dtype in enumerate(observed.outputs):
        modes = {"ties": task.ties} if task.ties and dtype not in (*FLOATS, "bool") else task.bounds.of(dtype)
        if modes and not task.more and not task.bounds.takes_zeros(dtype, observed.rms[at]):
            compare[at] = modes
    for at, dtypes in observed.changed.items():
        key = names[at] if isinstance(names[at], str) else len(observed.outputs) + list(names).index(at)
        if modes := next(filter(None, map(task.bounds.of, dtypes)), None):
            compare[key] = modes
    return compare


def parameter_name(names: tuple[str, ...], at: int) -> str | int:
    """The name of forward's parameter, or its position where it has none."""
    return names[at] if at < len(names) else at
