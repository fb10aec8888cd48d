"""GPU MODE: a folder with task.yml, reference.py and the files that task.yml names.

Fields as of reference-kernels f83cb92 (problems/*/task.yml, reference.py, utils.py, eval.py) and kernelbot 4bdd839."""

import ast
import keyword
import math
from dataclasses import replace
from pathlib import Path

from ..errors import UsageError
from . import edits
from .files import literal, text_of, yaml_object
from .provenance import origin_of
from .source_code import Source, assembled, bound, defined, dotted, function, parameters
from .tasks import RESERVED, Bounds, Options, Task, Workload, Wrapped, chosen, number, tolerated
from .workloads import anonymous, keywords
from .wrapping import SEEDS, has_lazy_annotations

NAME = "GPU MODE"
FILES = ("task.yml", "task.yaml")
SUBMISSION = "@SUBMISSION@"
INPUTS, KERNEL, CHECK = "generate_input", "ref_kernel", "check_implementation"
SEED = "torch.initial_seed() % 2**31"
COMPARING = {  # functions of its utils.py and of torch: default rtol and atol; None: equal
    **dict.fromkeys(("make_match_reference", "match_reference", "verbose_allclose", "allclose"), (1e-5, 1e-8)),
    **dict.fromkeys(("verbose_allequal", "equal"), None),
}
TIMING = "timing: eval.py and the time limits of its modes give way to the paired rounds here"


def read(folder: Path, options: Options) -> Task:
    """The task of a problem's folder."""
    file = next(folder / name for name in FILES if (folder / name).is_file())
    value = yaml_object(file)
    if value.get("lang") != "py" or value.get("multi_gpu"):
        kind = "needs several GPUs" if value.get("multi_gpu") else f"is in the language {value.get('lang')!r}, not py"
        raise UsageError(f"{file}: the task {kind}, which cannot be carried over")
    modules = modules_of(folder, value, file)
    main = modules.pop("reference")
    if lacking := {INPUTS, KERNEL} - defined(main.tree):
        raise UsageError(f"{main.where} does not define {min(lacking)}: only an evaluator of its own can run this task")
    for source in (main, *modules.values()):
        edits.renamed(source, RESERVED)
    fixed = [edits.with_every_seed(source) for source in (main, *modules.values())]
    names = names_of_data(main)
    inputs, workloads, remarks = inputs_of(value, main, file, options, "list({})" if names else "[{}]")
    bounds, more = bounds_of(main)
    return Task(
        format=NAME,
        name=folder.resolve().name,
        description=value.get("description") if isinstance(value.get("description"), str) else "",
        origin=origin_of(folder, [main.text]),
        code=assembled(main, modules, {INPUTS, KERNEL}),
        model=Wrapped(
            call=f"{KERNEL}(({', '.join(names)}{',' * (len(names) == 1)}))" if names else f"{KERNEL}(data)",
        ),
        parameters=names or ("data",),
        inputs=inputs,
        workloads=workloads,
        bounds=bounds,
        lazy_annotations=any(map(has_lazy_annotations, (main, *modules.values()))),
        remarks=(*remarks, *([SEEDS] if any(fixed) else []), *more, *ranking(value), TIMING),
    )


def modules_of(folder: Path, value: dict, file: Path) -> dict[str, Source]:
    """The modules of Python that task.yml names, by the names that they are imported by; reference among them."""
    entries = value.get("files")
    if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        raise UsageError(f"{file}: files must be a list of name and source")
    modules = {}
    for one in entries:
        name, source = one.get("name"), one.get("source")
        if not isinstance(name, str) or not isinstance(source, str):
            raise UsageError(f"{file}: each of files needs a name and a source")
        if source != SUBMISSION and name.endswith(".py") and source.endswith(".py") and Path(name).stem != "eval":
            modules[Path(name).stem] = Source(text_of(within(folder, source, file)), source)
    if "reference" not in modules:
        raise UsageError(f"{file}: files names no reference.py")
    return modules


def within(folder: Path, source: str, file: Path) -> Path:
    """The path of a file that task.yml names: in the task's folder, or in the two above, which tasks of a set and
    sets of tasks share."""
    path, own = (folder / source).resolve(), folder.resolve()
    if not path.is_relative_to([own, *own.parents][:3][-1]):
        raise UsageError(f"{file}: {source} lies outside the task's folder and the two above it")
    return path


def inputs_of(
    value: dict, main: Source, file: Path, options: Options, as_list: str
) -> tuple[str, tuple[Workload, ...], list[str]]:
    """(text of get_inputs, workloads, remarks). as_list: what makes a list of generate_input's result, "list({})"."""
    takes = arguments_of(main)
    cases = cases_of(value, file, takes)
    sizes = [key for key in cases[0][1] if all(is_size(case.get(key)) for _, case in cases)]
    fixed = [{key: one for key, one in case.items() if key not in sizes} for _, case in cases]
    stated = [
        Workload(name, {key: case[key] for key in sizes}, weight(case), str(at))
        for at, (name, case) in enumerate(cases)
    ]
    workloads, remarks = chosen(stated, options, ranked(stated, value))
    if any(type(one) is bool for case in fixed for one in case.values()):
        remarks.append("arguments: its evaluator passes False as text, which is true; here it is False")
    passed = [*(f"{name}={name}" for name in sizes), *([f"seed={SEED}"] if "seed" in takes else [])]

    def made(one: Workload) -> str:
        own = [f"{key}={constant!r}" for key, constant in fixed[int(one.maker)].items()]
        return as_list.format(f"{INPUTS}({', '.join([*own, *passed])})")

    text = f"def get_inputs({keywords(workloads[0].sizes)}):\n    return {made(workloads[0])}\n"
    alike = all(fixed[int(one.maker)] == fixed[int(workloads[0].maker)] for one in workloads)
    makers = [None if alike else f"{anonymous(one.sizes)}: {made(one)}" for one in workloads]
    return text, tuple(replace(one, maker=maker) for one, maker in zip(workloads, makers, strict=True)), remarks


def ranked(stated: list[Workload], value: dict) -> str | None:
    """The name of the benchmark that counts most: the last one, or where others count too that with the most work."""
    benchmarks = [one for one in stated if one.name.startswith("benchmark")]
    if not benchmarks:
        return None
    by_last = value.get("ranking_by", "last") == "last"
    return (benchmarks[-1] if by_last else max(benchmarks, key=lambda one: one.weight)).name


def arguments_of(main: Source) -> list[str]:
    """The names of generate_input's arguments."""
    node = function(main.tree, INPUTS)
    if node is None or node.args.posonlyargs or node.args.vararg or node.args.kwarg:
        raise UsageError(f"{main.where}: {INPUTS} must be a function whose arguments have names")
    return [one.arg for one in (*node.args.args, *node.args.kwonlyargs)]


def cases_of(value: dict, file: Path, takes: list[str]) -> list[tuple[str, dict]]:
    """(name, arguments without the seed) of the benchmarks and tests; equal ones once."""
    cases: list[tuple[str, dict]] = []
    for kind in ("benchmarks", "tests"):
        listed = value.get(kind) or []
        if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
            raise UsageError(f"{file}: {kind} must be a list of arguments")
        for at, case in enumerate(listed):
            own = {key: one for key, one in case.items() if key != "seed"}
            if unknown := [key for key in own if key not in takes]:
                raise UsageError(f"{file}: {kind}[{at}] has {unknown[0]!r}, which {INPUTS} does not take")
            if not all(is_plain(one) for one in own.values()):
                raise UsageError(f"{file}: {kind}[{at}] holds what is no number, text or list of them")
            if own not in [one for _, one in cases]:
                cases.append((f"{kind[:-1]}{at}", own))
    if not cases:
        raise UsageError(f"{file} has neither tests nor benchmarks")
    return cases


def is_size(one) -> bool:
    return type(one) is int and one >= 1


def is_plain(one) -> bool:
    if isinstance(one, list | tuple):
        return all(map(is_plain, one))
    return one is None or type(one) in (int, bool, str) or (type(one) is float and math.isfinite(one))


def weight(case: dict) -> int:
    """What grows with the work of a case: the product of its numbers, and of the sums of its lists."""
    numbers = [one for one in case.values() if is_size(one)]
    sums = [sum(filter(is_size, one)) for one in case.values() if isinstance(one, list)]
    return math.prod([*numbers, *(max(one, 1) for one in sums)])


def names_of_data(main: Source) -> tuple[str, ...]:
    """The names of the parts of ref_kernel's argument, where it is a tuple; () where it is one thing."""
    kernel, maker = function(main.tree, KERNEL), function(main.tree, INPUTS)
    (data, *_) = parameters(kernel) if kernel and parameters(kernel) else [""]
    for node in ast.walk(kernel) if kernel else ():
        if (
            isinstance(node, ast.Assign)
            and dotted(node.value) == data
            and isinstance(node.targets[0], ast.Tuple | ast.List)
        ):
            return usable(node.targets[0].elts)
    for node in ast.walk(maker):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            return usable(node.value.elts)
    return ()


def usable(parts: list[ast.expr]) -> tuple[str, ...]:
    """Names for the parts of a tuple: their own, or input0, input1, … where two are equal or one is no name."""
    if any(isinstance(one, ast.Starred) for one in parts):
        return ()
    names = [one.id if isinstance(one, ast.Name) else "" for one in parts]
    taken = {"", "_", "self", KERNEL, INPUTS, "torch", "nn"}
    if len(set(names)) < len(names) or set(names) & taken or any(map(keyword.iskeyword, names)):
        return tuple(f"input{number}" for number in range(len(parts)))
    return tuple(names)


def bounds_of(main: Source) -> tuple[Bounds, list[str]]:
    """The tolerance that check_implementation compares with, where all its comparisons have the same; remarks."""
    node = next((one for one in main.tree.body if CHECK in bound(one) and not isinstance(one, ast.ImportFrom)), None)
    calls = [one for one in ast.walk(node) if isinstance(one, ast.Call)] if node else []
    compared = [one for one in calls if dotted(one.func).rpartition(".")[2] in COMPARING]
    tolerances = {bound_of(one, main) for one in compared}
    free = [f"checker: {CHECK} is code; its tolerance is carried, whatever else it asks is not"]
    if len(tolerances) != 1 or "computed" in tolerances:
        several = "has several tolerances" if tolerances else "states no tolerance"
        why = "computes its tolerances" if "computed" in tolerances else several
        return Bounds(), [f"checker: {CHECK} {why}; the verifier's own bounds by dtype hold"]
    (one,) = tolerances
    modes, stricter = tolerated(*((0.0, 0.0) if one is None else (one[1], one[0])))
    return Bounds(modes), [*stricter, *(free if isinstance(node, ast.FunctionDef) else [])]


def bound_of(call: ast.Call, main: Source) -> tuple[float, float] | str | None:
    """(rtol, atol) of a call that compares; None for equality; "computed" where its code does not state them
    by name."""
    usual = COMPARING[dotted(call.func).rpartition(".")[2]]
    if usual is None:
        return None
    given = {one.arg: one.value for one in call.keywords}
    if None in given or any(isinstance(one, ast.Constant) for one in call.args):  # **bounds, or by position
        return "computed"
    values = []
    for name, default in zip(("rtol", "atol"), usual, strict=True):
        node = given.get(name)
        try:
            one = (
                literal(main.tree, node.id, main.where)
                if isinstance(node, ast.Name)
                else node and ast.literal_eval(node)
            )
            values.append(default if node is None else number(one, name))
        except (UsageError, ValueError, TypeError):
            return "computed"
    return values[0], values[1]


def ranking(value: dict) -> list[str]:
    """How it ranks, where that is not by one benchmark."""
    by = value.get("ranking_by", "last")
    how = "here the default workload must be faster, or level and another one faster, and none slower"
    return [f"ranking: by the {by} over the benchmarks; {how}"] if by != "last" else []
