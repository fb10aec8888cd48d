"""Which module's which operator launched which kernel: read from the Chrome trace of a step. Pure.

Without a GPU the operators themselves are what takes the time.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise

STEP, MODULE = "kernelopt step", "kernelopt module"  # marks of worker.model_profile
MARK = re.compile(rf"{MODULE} (\S+) \((.+)\)")
BACKWARD = "autograd::engine::evaluate_function: "
OPERATOR = "aten::"
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
ON_HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
DTYPES = {"float": "fp32", "double": "fp64", "c10::Half": "fp16", "c10::BFloat16": "bf16", "long int": "int64"}


@dataclass(frozen=True)
class Place:
    """Where in the model something runs. module, kind: path and class of the innermost module, "" for the model itself.
    operator: the outermost of torch's in it, "" for none; started_us: when that began. backward: in the backward pass
    of that module."""

    module: str = ""
    kind: str = ""
    operator: str = ""
    shapes: str = ""
    dtype: str = ""
    backward: bool = False
    started_us: float = 0.0


@dataclass(frozen=True)
class Unit:
    """A kernel, copy or fill on the GPU; without one an operator on the CPU. us: how long it ran."""

    name: str
    start_us: float
    us: float
    place: Place


@dataclass(frozen=True)
class StepTrace:
    """units: in the order of their start. on_gpu: whether they are kernels. host: the operators as the host ran them,
    each until the next one on its thread began. called: paths of the modules that ran."""

    units: tuple[Unit, ...]
    on_gpu: bool
    host: tuple[Unit, ...]
    called: frozenset[str]


@dataclass
class _Thread:
    """What is open on a thread of the host: (end, event kind, value)."""

    open: list[tuple[float, str, object]] = field(default_factory=list)

    def close_before(self, now: float) -> None:
        while self.open and self.open[-1][0] <= now:
            self.open.pop()


def read(events: Iterable[dict]) -> StepTrace:
    """The units of a trace."""
    events = [event for event in events if event.get("ph") == "X"]
    launches: dict[int, Place] = {}
    operators: dict[object, list[Unit]] = defaultdict(list)  # by thread
    for event, place, is_outermost in placed(event for event in events if event["cat"] in ON_HOST):
        if "correlation" in event.get("args", {}):
            launches[event["args"]["correlation"]] = place
        elif is_outermost:
            operators[event["tid"]].append(Unit(event["name"], event["ts"], event["dur"], place))
    kernels = [
        Unit(event["name"], event["ts"], event["dur"], launches.get(event["args"].get("correlation"), Place()))
        for event in events
        if event["cat"] in ON_GPU
    ]
    units = sorted(kernels or chain(*operators.values()), key=lambda unit: unit.start_us)
    host = tuple(chain(*map(until_the_next, operators.values())))
    marks = (MARK.match(event["name"]) for event in events)
    return StepTrace(tuple(units), bool(kernels), host, frozenset(mark[1] for mark in marks if mark))


def until_the_next(operators: list[Unit]) -> Iterator[Unit]:
    """Each operator of a thread with what the host did after it."""
    for one, after in pairwise(operators):
        yield replace(one, us=after.start_us - one.start_us)
    yield from operators[-1:]


def placed(host: Iterable[dict]) -> Iterator[tuple[dict, Place, bool]]:
    """The host's operators and launches with their places, and whether an operator is in no other of its module."""
    threads: dict[object, _Thread] = {}
    module_of: dict[int, tuple[str, str]] = {}  # by the number of a node of the backward graph
    for event in sorted(host, key=lambda event: (event["ts"], -event["dur"])):
        thread = threads.setdefault(event["tid"], _Thread())
        thread.close_before(event["ts"])
        end, name = event["ts"] + event["dur"], event["name"]
        number = event.get("args", {}).get("Sequence number")
        if mark := MARK.match(name):
            thread.open.append((end, "module", mark.groups()))
        elif name.startswith(BACKWARD):
            thread.open.append((end, "backward", module_of.get(number, ("", ""))))
        elif event["cat"] in ON_HOST[2:]:
            yield event, place_of(thread), False
        else:
            before = place_of(thread)
            if not before.backward and number is not None:
                module_of[number] = before.module, before.kind
            if name.startswith(OPERATOR) and not before.operator:
                thread.open.append((end, "operator", event))
                yield event, place_of(thread), True


def place_of(thread: _Thread) -> Place:
    """The place of what runs now on a thread: the innermost module, and the outermost operator within it."""
    module, operator, backward = ("", ""), None, False
    for _, kind, value in thread.open:
        if kind == "operator":
            operator = operator or value
        else:
            module, operator, backward = value, None, kind == "backward"
    if operator is None:
        return Place(*module, backward=backward)
    args = operator.get("args", {})
    dims = [size for size in args.get("Input Dims", []) if size]
    shapes = " ".join("x".join(map(str, size)) for size in dims if not isinstance(size[0], list))
    dtype = next((DTYPES.get(one, one) for one in args.get("Input type", []) if one and "Scalar" not in one), "")
    return Place(*module, operator["name"].removeprefix(OPERATOR), shapes, dtype, backward, operator["ts"])
