"""The two long-running jobs of an exploration. `contest` runs a candidate in turns; `judge` runs the oracle.

The answers of `contest` are not final: an exploration ranks candidates, and the gate judges the chosen one.
"""

import importlib
import random
import time
from dataclasses import dataclass, replace

import torch

from ..case_types import CandidateCase, StoredCall, StoredCase
from . import artefacts, builds, judging, persisting, problem, rates, tensor_trees, tracing, trivial_answers
from .candidate import NO_KERNEL_RAN, Run
from .case_maker import CaseMaker
from .case_reference import CaseReference
from .context import Candidate, Context, load_reference
from .profiling import WARM_UP_CALLS
from .state import identical
from .timers import GatedTimer

SLOW_S = 0.01  # of a warm-up call: where the GPU takes most of it, its launch needs no second look
TRACE_MARK = "call of the kernel"
CALLS_IN_A_ROW = 16  # launched before the host waits
PADDING_MIB = (1, 64)  # of memory that is taken before inputs move, so that they do not come to lie where they were


@dataclass(frozen=True)
class TurnTimes:
    """The answer to `time`. us: one time per call, in microseconds."""

    us: list[float]


@dataclass(frozen=True)
class Moved:
    """The answer to `move`."""


@dataclass(frozen=True)
class SustainedTime:
    """The answer to `sustain`. us: the mean time of a call. window: when they ran, seconds since the epoch."""

    us: float
    window: list[float]


@dataclass(frozen=True)
class CompiledCode:
    """The answer to `describe`. triton: see Candidate.triton. extensions: files of CUDA C++ extensions. printed: by the
    compiler, of those. trace: the file of a Chrome trace of one call."""

    triton: list[artefacts.TritonKernelJson]
    extensions: list[str]
    printed: str
    trace: str


def contest(context: Context, kernel: str, inputs: list[str], path: str, check: bool) -> None:
    """Load the kernel, run it on the inputs, and then follow orders; see `Contestant` for the answers.

    inputs: files of one or two cases of one workload. check: its outputs go to files at `path`; an opponent's do not.
    """
    contestant = Contestant(context, kernel, inputs)
    contestant.start()
    if check:
        contestant.check(inputs, path)
    for order in context.orders():
        context.answer(getattr(contestant, order.pop("do"))(**order))


def contest_compiled(context: Context, **arguments) -> None:
    """`contest` of a kernel behind torch.compile, whose process loads that compiler while it waits for its request."""
    contest(context, **arguments)


def import_compiler() -> None:
    """Import what torch.compile needs: about half of its first call, and the part that needs no GPU."""
    for name in ("torch._dynamo", "torch._inductor.compile_fx"):
        importlib.import_module(name)


def start_compiler(device: str) -> None:
    """Have torch compile a little: the first compilation starts what later ones use."""
    torch.compile(lambda x: x + 1)(torch.ones(4, device=device))


class Contestant:
    """A kernel that is loaded in this process, and the inputs for its timing."""

    def __init__(self, context: Context, kernel: str, inputs: list[str]):
        self.context, self.candidate = context, Candidate(context, kernel)
        self.cases = [self.candidate.load_case(file) for file in inputs]
        self.arguments = [case.placed_inputs(context.device) for case in self.cases]
        self.padding: torch.Tensor | None = None
        if context.device == "cuda":
            persisting.L2.of_device()  # before the candidate's code
        self.timer: GatedTimer | None = None
        self.changed: list[
            dict[int, torch.Tensor]
        ] = []  # of each case, by number: contents of inputs that a call changes
        self.pristine: list[list[tuple[torch.Tensor, torch.Tensor]]] = []  # those inputs, and their contents

    def start(self) -> None:
        """Three answers: {stage: loaded}, {stage: launched} after the first call was compiled, {stage: ran} when it
        ended."""
        self.kernel = self.candidate.load(self.cases[0], allow_reference=True)
        self.context.answer({"stage": "loaded"})
        problem.call(self.kernel, tensor_trees.aliases(self.arguments[0]))
        self.context.answer({"stage": "launched"})
        self.context.synchronize()
        self._note_changes()
        self.context.answer({"stage": "ran"})

    def check(self, inputs: list[str], path: str) -> None:
        """{stage: checked, done}: the side effects of a call (candidate.Run); the outputs are in files at `path`."""
        case = CandidateCase(inputs[0], inputs[-1] if len(inputs) > 1 else None, first=True)
        done = Run(self.context, self.candidate, case, guarded=True).result(path, trace=False)
        self.candidate.check()
        if self.context.device == "cpu" and self.candidate.ran_no_kernel():
            raise RuntimeError(NO_KERNEL_RAN)
        if self.context.device == "cuda":
            torch.cuda.empty_cache()
        self.context.answer({"stage": "checked", "done": done})

    def time(self, calls: int) -> TurnTimes:
        """The times of so many calls, with a cold L2 and the inputs in turn."""
        if self.timer is None:
            self.timer = GatedTimer()
            self.timer.enqueue_us = self._launch_us()
        return TurnTimes([self._timed(number) for number in range(calls)])

    def _launch_us(self) -> float:
        """What the host usually needs for a launch: the least of some warm-up calls, a single one of a slow kernel. The
        stream is held twice as long before each timed call, and an early launch may take a thousand times as long: one
        that compiles again or captures a graph."""
        taken: list[float] = []
        for _ in range(WARM_UP_CALLS):
            self._restore(0)
            began = time.perf_counter()
            taken.append(self.timer.prepare(self._call(0)))
            if time.perf_counter() - began > max(SLOW_S, 2 * taken[-1] / 1e6):
                break
        return min(taken)

    def _timed(self, number: int) -> float:
        self._restore(number)
        return self.timer(self._call(number))[0]

    def move(self) -> Moved:
        """Put the inputs elsewhere in the GPU's memory: a time depends on where they lie, by up to 0.5 %."""
        self.arguments, self.pristine, self.padding = [], [], None
        torch.cuda.empty_cache()
        self.padding = torch.empty(random.randint(*PADDING_MIB) << 20, dtype=torch.uint8, device="cuda")
        self.arguments = [case.placed_inputs(self.context.device) for case in self.cases]
        self.pristine = self._restorable()
        return Moved()

    def _note_changes(self) -> None:
        """Keep the contents of the inputs that a call changes, which every timed call finds as they were."""
        memory = tensor_trees.input_tensors(self.arguments[0])
        contents = [tensor_trees.input_tensors(case.placed_inputs(self.context.device)) for case in self.cases]
        numbers = [at for at, pair in enumerate(zip(memory, contents[0], strict=True)) if not identical(*pair)]
        self.changed = [{at: content[at] for at in numbers} for content in contents]
        self.pristine = self._restorable()

    def _restorable(self) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
        """Of each case the inputs that a call changes, with their contents before."""
        memories = [tensor_trees.input_tensors(arguments) for arguments in self.arguments]
        pairs = zip(memories, self.changed, strict=True)
        return [[(memory[at], content) for at, content in changed.items()] for memory, changed in pairs]

    def _restore(self, number: int) -> None:
        for tensor, content in self.pristine[number % len(self.pristine)]:
            tensor.copy_(content)

    def sustain(self, seconds: float) -> SustainedTime:
        """The mean time of calls in a row, without pause, in the second half of the seconds: the first one warms the
        card up, so that its clock does not depend on what ran before."""
        call = self._call(0)

        def restored_call() -> None:
            self._restore(0)
            call()

        rates.back_to_back(restored_call, seconds / 2, CALLS_IN_A_ROW)
        begun = time.time()
        us = 1e6 / rates.back_to_back(restored_call, seconds / 2, CALLS_IN_A_ROW)
        window = [begun, time.time()]
        restoring_us = 1e6 / rates.back_to_back(lambda: self._restore(0), seconds / 8) if self.pristine[0] else 0.0
        return SustainedTime(us - restoring_us, window)

    def describe(self, trace: str) -> CompiledCode:
        """The compiled code; a Chrome trace of one call goes to the file `trace`."""
        call = self._call(0)
        tracing.start_up()
        with tracing.profiling() as profiler:
            with torch.profiler.record_function(TRACE_MARK):
                call()
            self.context.synchronize()
        profiler.export_chrome_trace(trace)
        extensions = artefacts.extensions()
        return CompiledCode(self.candidate.triton(None), extensions, builds.printed_of(extensions), trace)

    def _call(self, number: int):
        arguments = tensor_trees.aliases(self.arguments[number % len(self.arguments)])
        return lambda: problem.call(self.kernel, arguments)


def judge(
    context: Context, reference: str, dtype: str | None, workload: str, seeds: list[int], tolerances: dict[str, float]
) -> None:
    """Compare the outputs of one candidate after another with the reference, which is computed once per seed.

    An order is {files: {seed: file of a call's outputs}}; its answer is {checked}, the result of judging.check for a
    case, or {error}.
    """
    maker = CaseMaker(load_reference(reference, context.device), dtype, context.device)
    check = judging.Check(maker, StoredCase(workload, seeds[0], first=True), tolerances, {})
    expected = {check.reference.key(seed): check.expected(seed, first=seed == seeds[0]) for seed in seeds}
    others = (CaseReference(maker, StoredCase(workload, seed), tolerances) for seed in seeds[1:])
    first = check.reference.key(seeds[0])
    left = trivial_answers.everywhere(expected[first].trivial_answers, others)
    expected[first] = replace(expected[first], trivial_answers=left)
    torch.cuda.empty_cache()  # what the oracle took in high precision, candidates beside this process need
    context.answer({"stage": "ready"})
    for order in context.orders():
        calls = [StoredCall(int(seed), file) for seed, file in order["files"]]
        checked = check.compared_with(calls, expected)
        torch.cuda.empty_cache()
        context.answer({"checked": checked})
