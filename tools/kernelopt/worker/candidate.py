"""Jobs that run a candidate and store its outputs. They do not judge the outputs."""

import contextlib
import time
import traceback
from dataclasses import dataclass, replace

import torch

from ..case_types import PLAIN
from . import artefacts, problem, sampling, state, tensor_trees, tracing, variants
from .context import Candidate, Context, returned
from .faults import CheatError, describe
from .guards import GuardedAllocation, Guards
from .state import identical

SETTLE_S = 0.02  # wait before the check for late writes by a thread or stream of the candidate
GUARDED_BYTES = 4 << 30  # of inputs; larger cases run without guard bands, which double the memory
STREAM_HELD_CYCLES = 400_000  # about 0.2 ms; work that does not wait for the current stream runs too early in it
WARM_UP_CALLS = 3


def run(context: Context, kernel: str, cases: list[dict], path: str, guarded: bool, trace: bool, hang_s: float) -> dict:
    """Call the kernel on each case and store the raw outputs in files at `path`: {cases: [what `Run.result` says, or
    {error}]}.

    cases: [{path, other, variant, first, samples}]. Stops at the first case that raises, because the process is useless
    after a CUDA error; a variant may raise. trace: report the GPU kernels that a call launches, once per workload.
    """
    if context.device == "cpu":
        torch.set_num_threads(1)  # Triton's interpreter computes small pieces, for which more only wait for each other
    context = replace(context, hang_s=hang_s)
    candidate, done, elements = Candidate(context, kernel), [], 0
    trace = trace and context.device == "cuda"
    for number, entry in enumerate(cases):
        context.mark(f"case {number}", 1)  # so that the parent knows where a process died
        try:
            one = Run(context, candidate, entry, guarded)
            done.append(one.result(f"{path}-{number}", trace and entry["first"]))
            candidate.check_processes()
            elements += sum(tensor.numel() for tensor in [*one.kept[0], *one.left[0].values()])
            candidate.check()
        except Exception as error:
            traceback.print_exc()
            done.append({"error": describe(error)})
            if not entry["variant"] or not works(context):
                break
    candidate.check()
    owns = any(entry["variant"] is None for entry in cases)  # a variant may need no kernel
    if context.device == "cpu" and owns and elements and candidate.ran_no_kernel():
        raise CheatError("none of its Triton kernels ran, something else computed the result")
    return {"cases": done}


def works(context: Context) -> bool:
    """Does the device still answer?"""
    try:
        context.synchronize()
        return True
    except Exception:
        return False


class Run:
    """One case: the kernel is called on some contents, on other contents in the same memory, and on the first contents
    in other memory, so that an answer that depends on a pointer, an earlier call or a captured graph is wrong."""

    def __init__(self, context: Context, candidate: Candidate, entry: dict, guarded: bool):
        self.context, self.entry = context, entry
        self.candidate = candidate
        self.case = candidate.load_case(entry["path"])
        self.other = candidate.load_case(entry["other"]) if entry["other"] else None
        self.kernel = candidate.load(self.case)
        self.watched = {} if entry["variant"] else state.watched(self.case.state)
        self.state = state.State(self.kernel.bound, self.watched)
        self.changed: set[str] = set()
        self.first_state: dict[str, torch.Tensor] = {}  # the state that the first call changed, after that call
        self.guards = Guards()
        self.guarded = (
            guarded and tensor_trees.held_bytes(tensor_trees.input_tensors(self.case.inputs)) <= GUARDED_BYTES
        )
        self.fails_guarded = False
        self.mutated: set[int] = set()
        self.structures: list[str] = []  # of the calls' results
        self.live: list[list[torch.Tensor]] = []  # the calls' results, without those that lie in an input
        self.own: list[list[torch.Tensor]] = []  # copies of these
        self.left: list[dict[int, torch.Tensor]] = []  # the inputs that each call changed, right after it
        self.shares: set[int] = set()  # inputs whose memory a result of the same call lies in
        self.kept: list[list[torch.Tensor]] = []  # copies of the results, made right after each call
        self.taken: set[int] = set()  # storages of inputs and of former outputs
        self.aliased = False
        self.rearranged = False  # did a call put other things into a list, a dict or an object among its inputs?

    def result(self, path: str, trace: bool) -> dict:
        """The fields of measure.correctness.CaseReport; the outputs go to files at `path`."""
        memory = last = self._memory(self.case)
        self._call(memory, self.case)
        self._restore()
        self.guards.fill = 0  # unwritten memory may match one fill, never both
        if self.other:
            self._call(memory if same_shapes(self.case, self.other) else self._memory(self.other), self.other)
            self._restore()
            last = self._memory(self.case)
            self._call(last, self.case)
            self._restore()
        time.sleep(SETTLE_S)
        self.context.synchronize()
        same = self.other and all_identical(self.kept[0], self.kept[2]) and same_contents(self.left[0], self.left[2])
        report = {
            "mutated": sorted(self.mutated),
            "changed": sorted(self.changed),
            "aliased": self.aliased,
            "rearranged": self.rearranged,
            "shares": sorted(self.shares),
            "changed_after_return": not all(map(all_identical, self.live, self.own))
            or not all(identical(last[number], tensor) for number, tensor in self.left[-1].items()),
            "out_of_bounds": self.guards.broken(),
            "deterministic": same if self.other else None,
            "device": next((t.device.type for t in self.live[0] if t.device.type != self.context.device), None),
            "guarded": self.guarded,
            "fails_guarded": self.fails_guarded,
        }
        self._store(path, report["deterministic"])
        if self.entry["samples"]:
            self._draw(f"{path}-draws.pt")
        report["kernels"] = self._traced(memory) if trace else None
        return report

    def _draw(self, path: str) -> None:
        """Call the kernel with one seed after another, and store what it draws: {output: (calls, …)}."""
        memory, contents = self._memory(self.case), tensor_trees.input_tensors(self.case.inputs)
        drawn: dict[int, torch.Tensor] = {}
        for wanted in self.entry["samples"]:
            draws = []
            for seed in sampling.in_time(wanted["seeds"], self.context.device):
                fill(memory, contents)
                arguments = sampling.reseeded(self._arguments(memory, self.case), wanted["seed"], seed)
                draws += [one.clone() for one in returned(problem.call(self.kernel, arguments))[wanted["output"] :][:1]]
            drawn[wanted["output"]] = torch.stack(draws).cpu() if draws else torch.empty(0)
        self.candidate.save_draws(drawn, path)

    def _traced(self, memory: list[torch.Tensor]) -> list[tracing.KernelRun]:
        """The GPU kernels of one more call on the first contents."""
        contents = tensor_trees.input_tensors(self.case.inputs)
        return tracing.kernels_of(self._bound(memory, self.case), before=lambda: fill(memory, contents))

    def _memory(self, case: problem.Case) -> list[torch.Tensor]:
        """Memory for the inputs of a case; guarded, it holds nothing but NaN."""
        layout = self.entry["variant"]["layout"] if self.entry["variant"] else PLAIN
        tensors = tensor_trees.input_tensors(case.inputs)
        if self.guarded:
            return [
                self.guards.memory(
                    tensor_trees.memory_like(tensor, "meta"),
                    self.context.device,
                    variants.layout_of(layout, number, tensor),
                    number,
                )
                for number, tensor in enumerate(tensors)
            ]
        return [tensor_trees.memory_like(tensor, self.context.device) for tensor in tensors]

    def _bound(self, memory: list[torch.Tensor], case: problem.Case):
        """A call of the kernel on the case's arguments, its tensors taken from `memory`."""
        arguments = self._arguments(memory, case)
        return lambda: problem.call(self.kernel, arguments)

    @staticmethod
    def _arguments(memory: list[torch.Tensor], case: problem.Case) -> list:
        tensors = iter(memory)
        return tensor_trees.map_tensors(case.inputs, lambda _: next(tensors).detach())

    def _call(self, memory: list[torch.Tensor], case: problem.Case) -> None:
        """Put the case's contents into memory, call the kernel, and copy its results, all on the current stream."""
        contents = [tensor.to(self.context.device) for tensor in tensor_trees.input_tensors(case.inputs)]
        self.context.synchronize()
        poison(self.context.device, contents)
        if self.context.device == "cuda":
            torch.cuda._sleep(STREAM_HELD_CYCLES)
        fill(memory, contents)
        arguments = self._arguments(memory, case)
        given = tensor_trees.leaves(arguments)
        outputs = self._outputs(lambda: problem.call(self.kernel, arguments), lambda: fill(memory, contents))
        self.rearranged |= not same_objects(given, tensor_trees.leaves(arguments))
        with torch._C.DisableTorchFunctionSubclass():
            copies = [tensor.detach().clone() for tensor in outputs]
            pairs = enumerate(zip(memory, contents, strict=True))
            self.left.append({at: now.clone() for at, (now, content) in pairs if not identical(now, content)})
        self.context.synchronize()
        self._note(outputs, copies, memory)
        self.mutated |= {i for i, pair in enumerate(zip(memory, contents, strict=True)) if not identical(*pair)}

    def _note(self, outputs: list[torch.Tensor], copies: list[torch.Tensor], memory: list[torch.Tensor]) -> None:
        """Keep the outputs of a call, and note which of them lie in memory that is not new."""
        inputs = {tensor.untyped_storage().data_ptr(): number for number, tensor in enumerate(memory)}
        places = [tensor.untyped_storage().data_ptr() if tensor.numel() else None for tensor in outputs]
        apart = [at for at, place in enumerate(places) if place not in inputs]
        self.kept.append(copies)
        self.live.append([outputs[at] for at in apart])
        self.own.append([copies[at] for at in apart])
        self.shares |= {inputs[place] for place in places if place in inputs}
        new = {places[at] for at in apart} - {None}
        self.aliased |= bool(new & self.taken)
        self.taken |= new | set(inputs)

    def _restore(self) -> None:
        """Each call starts from the parameters and buffers of the case, as the reference does; the method notes what a
        call changed."""
        left = self.state.changed()
        if len(self.live) == 1:
            self.first_state = {name: tensor.to("cpu", copy=True) for name, tensor in left.items()}
        self.changed |= set(left)
        self.state.restore(left)
        self.context.synchronize()

    def _outputs(self, call, refill) -> list[torch.Tensor]:
        """The results of a call. `refill` gives the inputs their contents again, for a second attempt."""
        try:
            with GuardedAllocation(self.guards, self.context.device) if self.guarded else contextlib.nullcontext():
                return self._returned(call())
        except CheatError:
            raise
        except Exception:
            if not self.guarded or self.live or not works(self.context):
                raise
            self.guarded, self.fails_guarded = (
                False,
                True,
            )  # some libraries cannot work while their allocations are replaced
            refill()
            return self._returned(call())

    def _returned(self, result) -> list[torch.Tensor]:
        self.structures.append(tensor_trees.structure(result))
        return returned(result)

    def _store(self, path: str, deterministic: bool | None) -> None:
        """One file per call. A third call gets none when its outputs equal the first's, which had the same contents."""
        for number, tensors in enumerate(self.kept[:2] if deterministic else self.kept):
            left = self.first_state if number == 0 and self.watched else None
            self.candidate.save(tensors, f"{path}-{number}.pt", self.left[number], self.structures[number], left)


def fill(memory: list[torch.Tensor], contents: list[torch.Tensor]) -> None:
    """Put these contents into memory of their shapes."""
    for tensor, content in zip(memory, contents, strict=True):
        tensor.copy_(content)


def same_objects(a: list, b: list) -> bool:
    return len(a) == len(b) and all(one is other for one, other in zip(a, b, strict=True))


def same_contents(a: dict[int, torch.Tensor], b: dict[int, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(identical(a[number], b[number]) for number in a)


def same_shapes(a: problem.Case, b: problem.Case) -> bool:
    shapes = [[(t.shape, t.dtype) for t in tensor_trees.input_tensors(case.inputs)] for case in (a, b)]
    return shapes[0] == shapes[1]


def all_identical(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(identical, a, b))


def poison(device: str, contents: list[torch.Tensor]) -> None:
    """Fill and free memory, so that an output which is never written holds NaN and not a former result."""
    if device == "cuda":
        size = max([t.nbytes for t in contents] + [1 << 20])
        blocks = [torch.full((size // 4,), float("nan"), device=device) for _ in range(2)]
        del blocks


@dataclass(frozen=True)
class ProfiledCalls:
    """torch: its version. window: begin and end of the calls, seconds since the epoch. triton: its compiled kernels and
    the autotuners' choices (see Candidate.triton)."""

    torch: str
    window: list[float]
    triton: list[artefacts.TritonKernelJson]


def profile(context: Context, kernel: str, inputs: str, calls: int = 1, compiled: str | None = None) -> ProfiledCalls:
    """Calls of the kernel inside a profiler range, after warm-up calls (autotuning included) outside it. compiled: a
    folder for Triton's compiled stages."""
    candidate = Candidate(context, kernel)
    call, _ = warmed_up(context, candidate, inputs)
    since = time.time()
    torch.cuda.profiler.start()
    for _ in range(calls):
        call()
    context.synchronize()
    torch.cuda.profiler.stop()
    window = [since, time.time()]
    return ProfiledCalls(torch.__version__, window, candidate.triton(compiled))


def trace(context: Context, kernel: str, inputs: str, calls: int, mark: str, path: str) -> ProfiledCalls:
    """Calls of the kernel under torch's profiler; each is inside a range of the name `mark` and is waited for; the
    Chrome trace goes to `path`."""
    candidate = Candidate(context, kernel)
    call, restore = warmed_up(context, candidate, inputs)
    tracing.start_up()
    since = time.time()
    with tracing.profiling() as profiler:
        for _ in range(calls):
            restore()
            with torch.profiler.record_function(mark):
                call()
            context.synchronize()
    window = [since, time.time()]
    profiler.export_chrome_trace(path)
    return ProfiledCalls(torch.__version__, window, candidate.triton(None))


def warmed_up(context: Context, candidate: Candidate, inputs: str):
    """A call of the kernel on a case, after it was compiled and autotuned, and a function that gives the inputs their
    contents again where a call changes them."""
    case = candidate.load_case(inputs)
    kernel, placed = candidate.load(case), case.placed_inputs(context.device)
    arguments = tensor_trees.aliases(placed)
    memory, contents = tensor_trees.input_tensors(placed), tensor_trees.input_tensors(case.inputs)
    for _ in range(WARM_UP_CALLS):
        fill(memory, contents)
        problem.call(kernel, arguments)
    context.synchronize()
    changed = [
        pair for pair in zip(memory, contents, strict=True) if not identical(pair[0], pair[1].to(pair[0].device))
    ]

    def restore() -> None:
        for tensor, content in changed:
            tensor.copy_(content)
        context.synchronize()

    restore()
    return (lambda: problem.call(kernel, arguments)), restore
