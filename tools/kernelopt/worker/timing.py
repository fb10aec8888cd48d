"""The job that times: a kernel alone, or in turn with its baseline, in one process.

Its results are raw: single times, and copies of some randomly picked timed outputs for `judging.check`.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from secrets import SystemRandom, randbelow
from time import perf_counter

import torch

from . import gpu_times, named_devices, problem, tensor_trees
from .context import Candidate, Context, blaming_baseline, returned
from .faults import LoadError
from .gpu_times import GpuTimes
from .profiling import WARM_UP_CALLS
from .state import identical
from .timed_calls import CheckedCall, Results, TimedCalls
from .timers import GatedTimer, HostTimer

ALONE_CALLS = 8  # of the baseline, before the kernel is loaded
CHECKED_OUTPUTS = 3  # of one workload's rounds, and one of the calls after them; of large outputs one or the other
RESTORED_CALLS = 31  # in place of do_bench, where calls change their inputs
LEAST_ROUNDS = 4
FEW_ROUNDS = 24  # the candidate is checked after each of these rounds; with more rounds, after random ones
FRESH_CALLS = 64  # in a stretch in which each call gets memory of its own
FRESH_BYTES = 2 << 30  # of that memory
WALL_US = 20_000.0  # length of a stretch that the parent's clock times; its ends are known to about 0.1 ms
HELD_US = 3000.0  # of launches: a stream takes about a thousand of them ahead
STRETCH_ATTEMPTS = 3  # with ever longer sleeps; a busy host launches slowly


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
    with named_devices.read_as(context.device, *map(Path, filter(None, (kernel, baseline)))):
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
            if replaced := [key for key, one in operators.items() if registered_operators().get(key) is not one]:
                raise LoadError(
                    f"both kernels register the operator {replaced[0]}, so one would be timed twice; rename it"
                )
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
    pair of events. outputs: of the calls to judge, see TimedCalls. overwritten: a later call wrote into the
    output of a former one. differing: calls whose result differs from the first one on their set. first_set_us: of
    calls on the first set before the rounds. on_gpu: None on a CPU."""

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
    first_set_us: list[float]
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
        self.first_set_us: list[float] = []  # of calls of "a" before the rounds
        self.timed_sets = [0]  # numbers of those that rounds are timed on, but for the first where there are others
        self.launch_us = 0.0  # what the host needs for a call of the kernel
        self.changed: set[int] = set()  # numbers of the inputs that a kernel changes; they get their contents again
        self.calls = TimedCalls()

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
        self.launch_us = self.timer.prepare(self.call("a", 0, 0))

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
            self.calls.look_at(name, number, self._results(outputs, self.memory(slot, number)), check)
        return taken

    def _results(self, outputs, memory: list[torch.Tensor]) -> Results:
        """What a call left: its outputs, and the inputs in `memory` that calls change."""
        return Results(returned(outputs), {number: memory[number] for number in sorted(self.changed)})

    def result(self, rounds: int, budget_s: float, warmup_ms: int, rep_ms: int, trace: bool) -> WorkloadTimes:
        """All times of the workload. trace: on a GPU, also trace the kernels of some calls."""
        since = time.time()
        paired = self.run_rounds(rounds, budget_s)
        self._fill(0, 0)
        call = self.call("a", 0, 0)
        clock, bench_us = self._benched(call, warmup_ms, rep_ms)
        self._stretches(call, paired.a_us[0][0])
        outputs = [self._stored(one, at) for at, one in enumerate(self.calls.to_judge())]
        overwritten = any(one.was_overwritten() for one in self.calls.checked)
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
            differing=self.calls.differing["a"],
            first_set_us=self.first_set_us,
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
            taken = {name: self._timed(name, 0, 0) for name in self.kernels}
            self.first_set_us.append(taken["a"])
            round_s = 2 * (perf_counter() - since)
        rounds = max(min(rounds, LEAST_ROUNDS), min(rounds, int(budget_s / round_s)))
        self.timed_sets = list(range(1, 1 + min(rounds, len(self.sets) - 1))) or [0]
        times: dict[str, list[list[float]]] = {"a": [], "b": []}
        count = min(rounds, CHECKED_OUTPUTS) if self.calls.are_small() else randbelow(2)
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

    def _stored(self, call: CheckedCall, at: int) -> StoredOutput:
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

        Where the host launched too slowly for the sleep, the last three run again behind a longer one. The sleep covers
        the kernel's launches alone. A sleep for a baseline that launches slowly would leave too few calls for the
        parent's clock.
        """
        self.timer.enqueue_us = self.launch_us
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
        """Calls on the timed sets in turn, as many on each, each call on memory of its own."""
        sets, largest = self.timed_sets, max(tensor_trees.held_bytes(self.contents[at]) for at in self.timed_sets)
        copies = min(calls, FRESH_CALLS, FRESH_BYTES // max(largest, 1) + 1)
        numbers = sets * max(1, copies // len(sets))
        memory = [memories_like(self.contents[number]) for number in numbers]
        for number, tensors in zip(numbers, memory, strict=True):
            tensor_trees.fill(tensors, self.contents[number])
        arguments = [self._arguments(tensors, number) for number, tensors in zip(numbers, memory, strict=True)]
        outputs: list = [None]
        chosen = randbelow(len(numbers))

        def on_fresh_memory(at: int):
            result = problem.call(self.kernels["a"], arguments[at])
            outputs[0] = result if at == chosen else outputs[0]

        held = self._stretch(name, [lambda at=at: on_fresh_memory(at) for at in range(len(numbers))], calls)
        results = self._results(outputs[0], memory[chosen])
        self.calls.look_at("a", numbers[chosen], results, check=self.calls.are_small() or not self.calls.checked)
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


def registered_operators() -> dict[str, object]:
    """The operators that Python code defined through torch.library.custom_op, by qualified name."""
    return dict(torch._library.custom_ops.OPDEFS)
