"""The kernels of a step by the module that launched them, and what the step could gain from each at most. Pure.

Modules at one place of repeated layers are one group: layers.*.mlp. A group is a module's own operators, or the module
as a whole where it is small enough to be one kernel.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ..hardware.work import ModuleWork
from .step_trace import StepTrace, Unit

REPEATED = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of a path that is a number
# Products and attention, which torch.compile leaves to libraries, or tunes.
PRODUCT = re.compile(r"linear|mm\b|matmul|conv|attention|addmv|\bmv\b|\bdot\b|einsum|lstm|gru")
MOST_OPERATORS = 24  # of one call of a module that could be a single kernel


@dataclass(frozen=True)
class OperatorShare:
    """An operator of a group. calls, kernels: in a step. us: of all its kernels in a step."""

    operator: str
    shapes: str
    dtype: str
    calls: int
    kernels: int
    us: float


@dataclass(frozen=True)
class Floor:
    """us: the least time of the group's operators in a step. bound: "memory" or "compute". library_rate: it is what a
    library reaches, and no floor."""

    us: float
    bound: str
    library_rate: bool


@dataclass(frozen=True)
class Group:
    """whole: with submodules; else the modules' own operators. pattern: with * for numbers in the path. paths: of the
    modules. us: in a step. share_pct: of the GPU's time in a step (of the operators' time without a GPU). host_pct: of
    the host's time. floor: None where it is unknown. saved_us: of the GPU's time, what a step could save at most; None
    without a floor."""

    number: int
    pattern: str
    kind: str
    whole: bool
    has_submodules: bool
    paths: tuple[str, ...]
    backward: bool
    us: float
    share_pct: float
    host_pct: float
    kernels: int
    operators: tuple[OperatorShare, ...]
    floor: Floor | None
    saved_us: float | None

    @property
    def is_fusable(self) -> bool:
        """Would torch.compile make few kernels of each call? Not of products, nor of a loop with many operators."""
        calls = sum(one.calls for one in self.operators)
        return calls <= MOST_OPERATORS * len(self.paths) and not any(
            PRODUCT.search(one.operator) for one in self.operators
        )

    @property
    def name(self) -> str:
        """ "layers.*.mlp, own operators (Mlp)" """
        own = ", own operators" if self.pattern and self.has_submodules and not self.whole else ""
        backward = ", backward" if self.backward else ""
        return f"{self.pattern or 'the model itself'}{own}{backward}{f' ({self.kind})' if self.kind else ''}"


Key = tuple[str, bool, bool]  # pattern, whole, backward


def groups(
    trace: StepTrace, work: Iterable[ModuleWork], floor_of: Callable[[list[ModuleWork]], Floor | None]
) -> list[Group]:
    """The groups, the longest first. work: of the calls in a forward pass. floor_of: the floor of some calls."""
    units, work = trace.units, list(work)
    names = patterns(units, work)
    kinds = {names[unit.place.module]: unit.place.kind for unit in units}
    parents = {names[above] for unit in units for above in above_of(unit.place.module)}
    parents |= {""} if any(unit.place.module for unit in units) else set()
    containers = {path for path, name in names.items() if name in parents and path in trace.called}
    members, on_host = members_of(units, names, containers), members_of(trace.host, names, containers)
    host_us = time_of(trace.host)
    counted: dict[tuple[str, bool], list[ModuleWork]] = defaultdict(list)
    for one in work:
        counted[names[one.path], one.whole].append(one)
    made = [
        replace(
            group_of(key, own, kinds, key[0] in parents, counted[key[0], key[1]], floor_of, time_of(units)),
            host_pct=100 * time_of(on_host[key]) / host_us if host_us else 0.0,
        )
        for key, own in members.items()
        if not key[1] or is_small(own, key[0])
    ]
    made.sort(key=lambda group: -group.us)
    return [replace(group, number=number) for number, group in enumerate(made, start=1)]


def members_of(units: Iterable[Unit], names: dict[str, str], containers: set[str]) -> dict[Key, list[Unit]]:
    """The units of each possible group. names: of the paths (`patterns`). containers: paths of modules with others in
    them, whose groups as a whole hold the units of those too."""
    members: dict[Key, list[Unit]] = defaultdict(list)
    for unit in units:
        path, backward = unit.place.module, unit.place.backward
        if path in names:
            members[names[path], False, backward].append(unit)
        for around in (*above_of(path), path):
            if around in containers:
                members[names[around], True, backward].append(unit)
    return members


def time_of(units: Iterable[Unit]) -> float:
    return sum(unit.us for unit in units)


def patterns(units: Iterable[Unit], work: Iterable[ModuleWork]) -> dict[str, str]:
    """The pattern of each module's path. Modules of another class or with more parameters are another problem, so they
    get a pattern of their own, unless they take turns."""
    kinds = {unit.place.module: unit.place.kind for unit in units}
    paths = {above for path in kinds for above in (*above_of(path), path)} | {one.path for one in work}
    state = {one.path: one.bytes_state for one in work if one.whole}
    alike: dict[tuple, list[str]] = defaultdict(list)
    for path in sorted(paths):
        alike[pattern_of(path), kinds.get(path), state.get(path)].append(path)
    meanings: dict[str, set[str]] = defaultdict(set)  # names by pattern
    for (pattern, *_), together in alike.items():
        meanings[pattern].add(common(together))
    kinds_of = Counter(pattern for pattern, *_ in alike)
    apart = {pattern for pattern, names in meanings.items() if 1 < len(names) == kinds_of[pattern]}
    return {
        path: common(together) if pattern in apart else pattern
        for (pattern, *_), together in alike.items()
        for path in together
    }


def common(paths: list[str]) -> str:
    """stages.2.* for stages.2.0 and stages.2.1"""
    columns = zip(*(path.split(".") for path in paths), strict=True)
    return ".".join(column[0] if len({*column}) == 1 else "*" for column in columns)


def group_of(
    key: Key,
    own: list[Unit],
    kinds: dict[str, str],
    has_submodules: bool,
    counted: list[ModuleWork],
    floor_of: Callable[[list[ModuleWork]], Floor | None],
    total_us: float,
) -> Group:
    pattern, whole, backward = key
    us = time_of(own)
    floor = None if backward or not counted else floor_of(counted)
    return Group(
        number=0,
        pattern=pattern,
        kind=kinds.get(pattern, ""),
        whole=whole,
        has_submodules=has_submodules,
        paths=tuple(dict.fromkeys(path_at(unit.place.module, pattern) for unit in own)),
        backward=backward,
        us=us,
        share_pct=100 * us / total_us if total_us else 0.0,
        host_pct=0.0,
        kernels=len(own),
        operators=tuple(operators_of(own)),
        floor=floor,
        saved_us=None if floor is None else max(0.0, us - floor.us),
    )


def is_small(units: list[Unit], pattern: str) -> bool:
    """Could one call of a module be a single kernel?"""
    calls = {(unit.place.module, unit.place.started_us) for unit in units}
    return bool(pattern) and len(calls) <= MOST_OPERATORS * len({path_at(path, pattern) for path, _ in calls})


def pattern_of(path: str) -> str:
    """layers.*.mlp for layers.3.mlp"""
    return REPEATED.sub("*", path)


def above_of(pattern: str) -> list[str]:
    """The patterns of the modules around one, the model's own ("") excepted."""
    parts = pattern.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def path_at(path: str, pattern: str) -> str:
    """The start of a path that a pattern stands for."""
    return ".".join(path.split(".")[: len(pattern.split("."))]) if pattern else ""


def operators_of(units: Sequence[Unit]) -> list[OperatorShare]:
    """The operators of a group, the longest first; a kernel that none launched stands for itself."""
    by_operator: dict[tuple, list[Unit]] = defaultdict(list)
    for unit in units:
        by_operator[unit.place.operator or unit.name, unit.place.shapes, unit.place.dtype].append(unit)
    shares = [
        OperatorShare(*key, len({unit.place.started_us for unit in own}), len(own), sum(unit.us for unit in own))
        for key, own in by_operator.items()
    ]
    return sorted(shares, key=lambda share: -share.us)
