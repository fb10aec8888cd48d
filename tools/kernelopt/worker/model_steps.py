"""Times of a step of a model, before and after a change, in turn; and of one module by itself."""

import contextlib
import functools
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter

import torch

from .model_calls import recording
from .model_file import Arguments, ModelFile
from .model_swap import Replacement

LEAST_ROUNDS, MOST_ROUNDS = 6, 200
WARM_UP_STEPS = 3
CALLS_IN_A_ROW = 20  # of a single module: the GPU stays busy while the host launches


@dataclass(frozen=True)
class StepTimes:
    """Rounds of two steps each, in microseconds, by the host's clock from an idle GPU to an idle GPU. failed: why a way
    of running did not work, and with which of the two; the times are then empty. bytes: the most that a step held."""

    before_us: list[list[float]]
    after_us: list[list[float]]
    failed: str | None = None
    before_bytes: int | None = None
    after_bytes: int | None = None


class TookTooLong(BaseException):
    """Not an Exception: torch.compile catches those."""


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """TookTooLong when what is inside takes longer, as torch.compile may with a loop of many operators."""

    def stop(*_):
        raise TookTooLong(f"it was not ready after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Steps:
    """Steps of a file's model, or of one like it, on the arguments of a workload."""

    def __init__(self, file: ModelFile, workload: str):
        self._file = file
        self._arguments = file.arguments(workload)

    def step(self, module: torch.nn.Module) -> Callable[[], object]:
        """One step: a call, and in training the gradients too."""
        file, arguments = self._file, self._arguments

        def call():
            outputs = file.call(module, arguments)  # a seed could not be set while a graph is captured
            if file.training:
                file.backward(outputs)
                module.zero_grad()

        return call

    def eager(self, module: torch.nn.Module) -> Callable[[], object]:
        return self.step(module)

    def compiled(self, module: torch.nn.Module) -> Callable[[], object]:
        """As torch.compile makes it by default."""
        return self.step(torch.compile(module))

    def tuned(self, module: torch.nn.Module) -> Callable[[], object]:
        """As torch.compile makes it when it may try for long."""
        return self.step(torch.compile(module, mode="max-autotune"))

    def reduced(self, module: torch.nn.Module) -> Callable[[], object]:
        """As torch.compile makes it inside CUDA graphs."""
        return self.step(torch.compile(module, mode="reduce-overhead"))

    def graph(self, module: torch.nn.Module) -> Callable[[], object]:
        """Replayed from a CUDA graph."""
        return captured(self.step(module))

    def compiled_graph(self, module: torch.nn.Module) -> Callable[[], object]:
        """As torch.compile makes it by default, replayed from a CUDA graph."""
        return captured(self.compiled(module))


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """A step as a CUDA graph."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(WARM_UP_STEPS):
            call()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


WAYS = ("eager", "compiled", "graph", "compiled_graph")


def compared(
    file: ModelFile, after: torch.nn.Module, workload: str, budget_s: float, ready_s: float
) -> dict[str, StepTimes]:
    """The step of the original and of the model after the change, in turn. ready_s: to compile one of them."""
    steps = Steps(file, workload)
    ways = [way for way in WAYS if not (file.training and "graph" in way)]
    times = {}
    for way in ways:
        file.phase(f"timing {way} steps")
        times[way] = compared_way(getattr(steps, way), file.module, after, budget_s, ready_s)
    return times


def compared_way(
    way: Callable, before: torch.nn.Module, after: torch.nn.Module, budget_s: float, ready_s: float
) -> StepTimes:
    calls = []
    for module, name in ((before, "original"), (after, "model with the kernel")):
        try:
            with within(ready_s):
                calls.append(warmed_up(way(module)))
        except (Exception, TookTooLong) as error:
            return StepTimes([], [], f"the {name} fails: {(str(error) or type(error).__name__).splitlines()[0]}")
    before_us, after_us = in_turn(*calls, budget_s, host_us)
    return StepTimes(before_us, after_us, None, *(most_bytes(call) for call in calls))


def warmed_up(call: Callable) -> Callable:
    for _ in range(WARM_UP_STEPS):
        call()
    return call


def in_turn(
    a: Callable, b: Callable, budget_s: float, clock: Callable[[Callable], float]
) -> tuple[list[list[float]], list[list[float]]]:
    """Rounds A B B A and B A A B in turn; the times of A's and of B's two calls in each."""
    times: dict[int, list[list[float]]] = {0: [], 1: []}
    began = perf_counter()
    for number in range(MOST_ROUNDS):
        if number >= LEAST_ROUNDS and perf_counter() - began > budget_s:
            break
        order = (0, 1, 1, 0) if number % 2 == 0 else (1, 0, 0, 1)
        one: dict[int, list[float]] = {0: [], 1: []}
        for which in order:
            one[which].append(clock((a, b)[which]))
        for which in one:
            times[which].append(one[which])
    return times[0], times[1]


def host_us(call: Callable) -> float:
    """A step by the host's clock, from an idle GPU to an idle GPU."""
    idle()
    since = perf_counter()
    call()
    idle()
    return (perf_counter() - since) * 1e6


def idle() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def most_bytes(call: Callable) -> int:
    """The most memory that tensors took in a step."""
    idle()
    torch.cuda.reset_peak_memory_stats()
    call()
    idle()
    return torch.cuda.max_memory_allocated()


def alone(file: ModelFile, made: dict[str, Replacement], workload: str, budget_s: float) -> StepTimes | None:
    """The first call in a step of the first module whose kernel takes it, by itself: the original and the kernel in
    turn, calls in a row between two events. None where there is none."""
    for path, replacement in made.items():
        original = file.submodule(path)
        with recording(original) as recorder:
            file.run(file.module, file.arguments(workload))
        given = recorder.call and recorder.call.arguments
        if given and replacement.fits(*given.args, **given.kwargs):
            calls = [warmed_up(functools.partial(called, one, given)) for one in (original, replacement)]
            return StepTimes(*in_turn(*calls, budget_s, events_us))
    return None


def called(module: torch.nn.Module, arguments: Arguments):
    with torch.no_grad():
        return module(*arguments.args, **arguments.kwargs)


def events_us(call: Callable) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(CALLS_IN_A_ROW):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / CALLS_IN_A_ROW
