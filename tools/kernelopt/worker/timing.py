"""The job that times: a kernel alone, or in turn with its baseline, in one process.

Its results are raw: single times, and copies of some randomly picked timed outputs for `judging.check`.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from secrets import SystemRandom, randbelow
from time import perf_counter

import torch

from . import accuracy, gpu_times, problem, tensor_trees
from .context import Candidate, Context, blaming_baseline, returned
from .faults import LoadError
from .gpu_times import GpuTimes
from .profiling import WARM_UP_CALLS
from .state import identical
from .timers import GatedTimer, HostTimer

ALONE_CALLS = 8  # of the baseline, before the kernel is loaded
CHECKED_OUTPUTS = 3  # of one workload's rounds, and one of the calls after them; of large outputs one or the other
CHECKED_BYTES = 1 << 28
DIFFERING_OUTPUTS = 3  # picked at random from the calls whose result differs from the first; one of large outputs
RESTORED_CALLS = 31  # in place of do_bench, where calls change their inputs
LEAST_ROUNDS = 4
FEW_ROUNDS = 24  # the candidate is checked after each of these rounds; with more rounds, after random ones
FRESH_CALLS = 64  # in a stretch in which each call gets memory of its own
FRESH_BYTES = 2 << 30  # of that memory
WALL_US = 20_000.0  # length of a stretch that the parent's clock times; its ends are known to about 0.1 ms
HELD_US = 3000.0  # of launches: a stream takes about a thousand of them ahead
STRETCH_ATTEMPTS = 3  # with ever longer sleeps; a busy host launches slowly
REMEMBERED_BYTES = 4 << 30  # of outputs that later calls are compared with
CLOSE = 0.05  # atomics in another order differ by far less, a former result by far more


def measure(
    context: Context,
    kernel: str,
    baseline: str | None,
    workloads: dict[str, list[str]],
    rounds: int,
    budget_s: float,
    warmup_ms: int,
    rep_ms: int,
    trace: bool,
    folder: str,
) -> "TimingAnswer":
    """The raw times per workload. Input files per workload: of one problem, other contents."""
    candidate, loaded_baseline, times = None, None, {}
    of_baseline: set[int] = set()  # its processes, such as those in which torch.compile tries its variants
    sets = {name: [problem.Case.load(Path(path)) for path in paths] for name, paths in workloads.items()}
    for number, name in enumerate(sets):
        paired = PairedTiming(context, name, sets[name], f"{folder}/{number}")
        if baseline:
            with blaming_baseline():
                loaded_baseline = loaded_baseline or Candidate(context, baseline)
                paired.load_baseline(loaded_baseline, alone=candidate is None)
            if candidate is None:  # later ones may be the kernel's
                of_baseline = loaded_baseline.processes() if loaded_baseline else set()
        operators = registered_operators()
        candidate = candidate or Candidate(context, kernel)
        paired.load(candidate)
        if replaced := [key for key, operator in operators.items() if registered_operators().get(key) is not operator]:
            raise LoadError(f"both kernels register the operator {replaced[0]}, so one would be timed twice; rename it")
        times[name] = paired.result(rounds, budget_s, warmup_ms, rep_ms, trace)
        candidate.check_processes(of_baseline)
        candidate.check()
    return TimingAnswer(times)


@dataclass(frozen=True)
class PairedRounds:
    """Microseconds of the calls of each round, in the order of the calls: of the kernel, and of its baseline, None
    without one."""

    a_us: list[list[float]]
    b_us: list[list[float]] | None


@dataclass(frozen=True)
class StoredOutput:
    """A timed call on the inputs number `set`; output: the file of its results."""

    set: int
    output: str


@dataclass(frozen=True)
class WorkloadTimes:
    """The raw times of one workload, see measure.raw_times.RawTimes. window: seconds since the epoch. sets: number of
    input sets. alone_us: of the baseline before the kernel was loaded. bench_us: of do_bench. empty_us: of an empty
    pair of events. outputs: of the calls to judge, see _calls_to_judge. overwritten: a later call wrote into the
    output of a former one. differing: calls whose result differs from the first one on their set. on_gpu: None on
    a CPU."""

    clock: str
    window: list[float]
    sets: int
    rounds: PairedRounds
    alone_us: list[float]
    bench_us: list[float]
    empty_us: float
    outputs: list[StoredOutput]
    overwritten: bool
    differing: int
    on_gpu: GpuTimes | None

    def to_json(self) -> dict:
        """The fields, those of `rounds` and `on_gpu` among them."""
        own = {name: value for name, value in vars(self).items() if name not in ("rounds", "on_gpu")}
        return {**own, **vars(self.rounds), **(self.on_gpu.to_json() if self.on_gpu else {})}


def memories_like(contents: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor_trees.memory_like(tensor, tensor.device) for tensor in contents]


@dataclass(frozen=True)
class TimingAnswer:
    """The raw times of each workload, by name."""

    workloads: dict[str, WorkloadTimes]


class PairedTiming:
    """One workload: its input sets, the memory that the calls read, the kernel ("a") and its baseline ("b")."""

    def __init__(self, context: Context, name: str, sets: list[problem.Case], path: str):
        self.context, self.name, self.path = context, name, path
        self.case, self.sets = sets[0], sets
        self.candidate: Candidate | None = None
        self.contents = [tensor_trees.input_tensors(case.placed_inputs(context.device)) for case in self.sets]
        self._memory: dict[tuple, list[list[torch.Tensor]]] = {}  # two of each layout: seeds may give other sizes
        self.timer = GatedTimer() if context.device == "cuda" else HostTimer()
        self.kernels: dict = {}
        self.alone_us: list[float] = []
        self.changed: set[int] = set()  # numbers of the inputs that a kernel changes; they get their contents again
        self.first: dict[tuple[str, int], Results] = {}  # each kernel's first result on each set
        self.differing = {"a": 0, "b": 0}  # calls whose result differs from the first one on their set
        self.checked: list[CheckedCall] = []
        self.sampled: list[CheckedCall] = []  # of the calls of the kernel that differ
        self.disputed: set[int] = set()  # sets on which the kernel's first result isn't that of all its calls

    def memory(self, slot: int, number: int) -> list[torch.Tensor]:
        """One of the two memories that calls on a set read."""
        layout = self._layout(number)
        if layout not in self._memory:
            self._memory[layout] = [memories_like(self.contents[number]) for _ in range(2)]
        return self._memory[layout][slot]

    def _layout(self, number: int) -> tuple:
        return tuple((tensor.shape, tensor.stride()) for tensor in self.contents[number])

    def move(self) -> None:
        """Put the inputs elsewhere in memory, for where they lie makes a call faster or slower."""
        self._memory = {  # made while the former memory is still held, so that it is another place
            layout: [memories_like(memory) for memory in both] for layout, both in self._memory.items()
        }

    def load_baseline(self, baseline: Candidate, alone: bool) -> None:
        """Load the baseline. `alone`: also time it, before the kernel can disturb it."""
        self.kernels["b"] = self._warmed_up(baseline)
        self.timer.prepare(self.call("b", 0, 0))
        if alone:
            self.alone_us = [self._timed("b", 0, number % len(self.sets)) for number in range(ALONE_CALLS)]

    def load(self, candidate: Candidate) -> None:
        self.candidate = candidate
        self.kernels["a"] = self._warmed_up(candidate)
        self.timer.prepare(self.call("a", 0, 0))

    def _warmed_up(self, candidate: Candidate):
        """The loaded kernel after it has run (compiled, autotuned) on the first inputs of each layout. The other
        contents are new to it."""
        kernel = candidate.load(self.case, allow_reference=True)
        first = {self._layout(number): number for number in reversed(range(len(self.sets)))}
        for number in sorted(first.values(), reverse=True):
            for _ in range(WARM_UP_CALLS):
                self._fill(0, number)
                problem.call(kernel, self._arguments(self.memory(0, number), number))
        self.context.synchronize()
        pairs = enumerate(zip(self.memory(0, 0), self.contents[0], strict=True))
        self.changed |= {number for number, pair in pairs if not identical(*pair)}
        return kernel

    def _restore(self) -> None:
        """Give the inputs in the first memory that a call changes the contents of the first set again."""
        for number in self.changed:
            self.memory(0, 0)[number].copy_(self.contents[0][number])

    def _fill(self, slot: int, number: int) -> None:
        tensor_trees.fill(self.memory(slot, number), self.contents[number])

    def _arguments(self, memory: list[torch.Tensor], number: int) -> list:
        return tensor_trees.with_tensors(self.sets[number].inputs, memory)

    def call(self, name: str, slot: int, number: int):
        """A call on a set's contents in one of the two memories."""
        kernel, arguments = self.kernels[name], self._arguments(self.memory(slot, number), number)
        return lambda: problem.call(kernel, arguments)

    def _timed(self, name: str, slot: int, number: int, check: bool = False) -> float:
        """Microseconds of a call on that set, just copied into place. check: it is one of the checked calls."""
        self._fill(slot, number)
        taken, outputs = self.timer(self.call(name, slot, number))
        with torch._C.DisableTorchFunctionSubclass():
            self._look_at(name, number, self._results(outputs, self.memory(slot, number)), check)
        return taken

    def _results(self, outputs, memory: list[torch.Tensor]) -> "Results":
        """What a call left: its outputs, and the inputs in `memory` that calls change."""
        return Results(returned(outputs), {number: memory[number] for number in sorted(self.changed)})

    def _look_at(self, name: str, number: int, results: "Results", check: bool) -> None:
        """Compare a timed call's outputs with those of the first call on that set; keep a copy of those of a checked
        call.

        The baseline's outputs are compared too: earlier GPU work changes a call's time, so both kernels get the same
        history.
        """
        if (name, number) not in self.first and len(self.first) * results.nbytes() < REMEMBERED_BYTES:
            self.first[name, number] = results.copy()
        first = self.first.get((name, number), results)
        differs = not all(map(close, results.tensors(), first.tensors()))
        self.differing[name] += differs
        if check:
            self.checked.append(CheckedCall(number, results.own(), results.copy()))
        elif differs and name == "a":
            self._sample(number, results)

    def _sample(self, number: int, results: "Results") -> None:
        """Keep what a differing call left, so that each of them so far is kept with the same probability."""
        self.disputed.add(number)
        most = self._most_differing()
        at = len(self.sampled) if len(self.sampled) < most else randbelow(self.differing["a"])
        if at < most:
            self.sampled[at : at + 1] = [CheckedCall(number, {}, results.copy())]

    def _most_differing(self) -> int:
        return DIFFERING_OUTPUTS if self._outputs_are_small() else 1

    def _calls_to_judge(self) -> list["CheckedCall"]:
        """The checked calls, some that differ, and some first ones that they differ from: either may be wrong."""
        disputed = SystemRandom().sample(sorted(self.disputed), min(len(self.disputed), self._most_differing()))
        firsts = [CheckedCall(number, {}, self.first["a", number]) for number in disputed]
        return [*self.checked, *self.sampled, *firsts]

    def result(self, rounds: int, budget_s: float, warmup_ms: int, rep_ms: int, trace: bool) -> WorkloadTimes:
        """All times of the workload. trace: on a GPU, also trace the kernels of some calls."""
        since = time.time()
        paired = self.run_rounds(rounds, budget_s)
        self._fill(0, 0)
        call = self.call("a", 0, 0)
        clock, bench_us = self._benched(call, warmup_ms, rep_ms)
        self._stretches(call, paired.a_us[0][0])
        outputs = [self._stored(one, at) for at, one in enumerate(self._calls_to_judge())]
        overwritten = any(one.was_overwritten() for one in self.checked)
        window = [since, time.time()]
        return WorkloadTimes(
            clock=clock,
            window=window,
            sets=len(self.sets),
            rounds=paired,
            alone_us=self.alone_us,
            bench_us=bench_us,
            empty_us=self.timer.empty_us,
            outputs=outputs,
            overwritten=overwritten,
            differing=self.differing["a"],
            on_gpu=self._on_gpu(call, trace) if self.context.device == "cuda" else None,
        )

    def _benched(self, call, warmup_ms: int, rep_ms: int) -> tuple[str, list[float]]:
        """(the clock, single times in microseconds) of do_bench, which can neither restore inputs nor reset the L2's
        persisting lines between its calls."""
        undone = ["inputs restored"] * bool(self.changed) + ["persisting L2 lines reset"] * self.timer.persists
        if not undone:
            return self.timer.name, self.timer.bench(call, warmup_ms, rep_ms)
        clock = f"{self.timer.name.split('.')[0]}'s clock, {' and '.join(undone)} before each call"
        return clock, [self._timed("a", 0, 0) for _ in range(RESTORED_CALLS)]

    def _on_gpu(self, call, trace: bool) -> GpuTimes:
        after = gpu_times.after_the_call(call, self.timer, self._restore)
        if not trace:
            return GpuTimes(after)
        traced = gpu_times.traced(call, self.timer, self._restore)
        return GpuTimes(after, traced, gpu_times.graph_us(call, self.timer, self._restore))

    def run_rounds(self, rounds: int, budget_s: float) -> PairedRounds:
        """Each round on the next contents, in turn in two memories: A B B A, then B A A B; A A without a baseline.

        The number of rounds is limited by budget_s on this call's own clock, with a small minimum. Some calls of the
        kernel, picked at random, are checked."""
        orders = ("abba", "baab") if "b" in self.kernels else ("aa", "aa")
        for _ in range(2):  # the first time is longer, because it stores the results
            since = perf_counter()
            for name in self.kernels:
                self._timed(name, 0, 0)
            round_s = 2 * (perf_counter() - since)
        rounds = max(min(rounds, LEAST_ROUNDS), min(rounds, int(budget_s / round_s)))
        times: dict[str, list[list[float]]] = {"a": [], "b": []}
        count = min(rounds, CHECKED_OUTPUTS) if self._outputs_are_small() else randbelow(2)
        checked_rounds = set(SystemRandom().sample(range(rounds), count))
        for number in range(rounds):
            if rounds <= FEW_ROUNDS or randbelow(8) == 0:
                self.candidate.check()  # it takes about 2 ms
            if randbelow(4) == 0:  # an extra call at random, so that a kernel cannot count its calls
                self._timed("a", number % 2, randbelow(number % len(self.sets) + 1))
            pair: dict[str, list[float]] = {"a": [], "b": []}
            chosen = 1 + randbelow(2) if number in checked_rounds else 0  # which of the round's two calls
            for name in orders[number % 2]:
                check = name == "a" and len(pair["a"]) + 1 == chosen
                pair[name].append(self._timed(name, number % 2, (number + 1) % len(self.sets), check))
            for name in pair:
                times[name].append(pair[name])
        return PairedRounds(times["a"], times["b"] if "b" in self.kernels else None)

    def _outputs_are_small(self) -> bool:
        return all(results.nbytes() < CHECKED_BYTES for results in self.first.values())

    def _stored(self, call: "CheckedCall", at: int) -> StoredOutput:
        path = f"{self.path}-{at}.pt"
        self.candidate.save(call.copy.outputs, path, call.copy.inputs)
        return StoredOutput(call.number, path)

    def _stretches(self, call, about_us: float) -> None:
        """Calls in a row between two marks, which the parent times by its own clock.

        | stretch | calls |
        |---|---|
        | call | as a caller sees them |
        | restoring | none: the inputs that a call changes get their contents again, which `call` includes |
        | sleep N | none: the sleep that holds the stream |
        | gpu N | behind that sleep until all are launched, so that the GPU's time is left |
        | fresh N | like `gpu`, each on fresh memory, so that kept results gain nothing; one is checked |

        Where the host launched too slowly for the sleep, the last three run again behind a longer one.
        """
        restored = [self._restore] if self.changed else []  # a stretch of restoring alone is taken off
        count = self._calls_in_a_row(about_us)
        self._stretch("call", [*restored, call] * count, of=count)
        if self.changed:
            self._stretch("restoring", restored * count)
        for attempt in range(STRETCH_ATTEMPTS):
            calls = self._calls_in_a_row(about_us)
            self._stretch(f"sleep {attempt}", restored * calls, calls)
            held = self._stretch(f"gpu {attempt}", [*restored, call] * calls, calls, of=calls)
            if self._fresh_stretch(f"fresh {attempt}", calls) and held:
                break
            self.timer.enqueue_us *= 3

    def _calls_in_a_row(self, about_us: float) -> int:
        return max(3, int(min(WALL_US / about_us, HELD_US / self.timer.enqueue_us)))

    def _fresh_stretch(self, name: str, calls: int) -> bool:
        like_the_first = [number for number in range(len(self.sets)) if self._layout(number) == self._layout(0)]
        number = like_the_first[randbelow(len(like_the_first))]
        contents = self.contents[number]
        copies = min(calls, FRESH_CALLS, FRESH_BYTES // max(tensor_trees.held_bytes(contents), 1) + 1)
        memory = [memories_like(contents) for _ in range(copies)]
        for tensors in memory:
            tensor_trees.fill(tensors, contents)
        arguments = [self._arguments(tensors, number) for tensors in memory]
        outputs: list = [None]
        chosen = randbelow(copies)

        def on_fresh_memory(at: int):
            result = problem.call(self.kernels["a"], arguments[at])
            outputs[0] = result if at == chosen else outputs[0]

        held = self._stretch(name, [lambda at=at: on_fresh_memory(at) for at in range(copies)], calls)
        results = self._results(outputs[0], memory[chosen])
        self._look_at("a", number, results, check=self._outputs_are_small() or not self.checked)
        return held

    def _stretch(self, name: str, calls: list, hold: int = 0, of: int | None = None) -> bool:
        """The calls between two marks, behind a sleep that covers `hold` launches; did it last until all were
        launched? of: how many of the calls are the kernel's, all by default."""
        count = len(calls) if of is None else of
        self.context.synchronize()
        self.context.mark(f"{self.name}: {name} begins", count)
        holds = self.timer.hold(hold) if hold else None
        for call in calls:
            call()
        held = holds is None or holds()
        self.context.synchronize()
        self.context.mark(f"{self.name}: {name} ends", count)
        return held


@dataclass(frozen=True)
class Results:
    """What a call left: its outputs, and by number the inputs that calls change."""

    outputs: list[torch.Tensor]
    inputs: dict[int, torch.Tensor]

    def tensors(self) -> list[torch.Tensor]:
        return [*self.outputs, *self.inputs.values()]

    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def copy(self) -> "Results":
        inputs = {number: tensor.detach().clone() for number, tensor in self.inputs.items()}
        return Results([tensor.detach().clone() for tensor in self.outputs], inputs)

    def own(self) -> dict[int, torch.Tensor]:
        """The outputs, by position, that no input holds: later calls may not write into them."""
        places = {tensor.untyped_storage().data_ptr() for tensor in self.inputs.values()}
        return {
            at: tensor for at, tensor in enumerate(self.outputs) if tensor.untyped_storage().data_ptr() not in places
        }


@dataclass(frozen=True)
class CheckedCall:
    """A call on set `number` whose results are checked afterwards. live: its outputs that no input holds, by position.
    copy: of what it left."""

    number: int
    live: dict[int, torch.Tensor]
    copy: Results

    def was_overwritten(self) -> bool:
        """Has a later call written into its outputs?"""
        return not all(identical(tensor, self.copy.outputs[at]) for at, tensor in self.live.items())


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Are two results on the same inputs the same but for the order of additions?"""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = (accuracy.comparable(tensor) for tensor in (a, b))
    if torch.equal(a, b):  # one pass over the memory, where the judgement below takes many
        return True
    a, b = a.float(), b.float()
    finite = torch.where(torch.isfinite(b), b, 0.0)
    near = (a - b).abs() <= CLOSE * (b.abs() + finite.square().mean().sqrt())
    return bool((near | (a == b) | (a.isnan() & b.isnan())).all())


def registered_operators() -> dict[str, object]:
    """The operators that Python code defined through torch.library.custom_op, by qualified name."""
    return dict(torch._library.custom_ops.OPDEFS)
