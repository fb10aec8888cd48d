"""Jobs that run a candidate and store its outputs. They do not judge the outputs."""

import contextlib
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from ..case_types import PLAIN, CandidateCase
from . import named_devices, problem, repeating, sampling, state, tensor_trees, tracing, variants
from .context import Candidate, Context, returned
from .faults import CheatError, describe
from .guards import GuardedAllocation, Guards
from .state import all_identical, identical

SETTLE_S = 0.02  # wait before the check for late writes by a thread or stream of the candidate
GUARDED_BYTES = 4 << 30  # of inputs; larger cases run without guard bands, which double the memory
NO_KERNEL_RAN = "none of its Triton kernels ran; something else computed the result"
STREAM_HELD_CYCLES = 400_000  # about 0.2 ms; work that does not wait for the current stream runs too early in it


def run(context: Context, kernel: str, cases: list[dict], path: str, guarded: bool, trace: bool, hang_s: float) -> dict:
    """Call the kernel on each case and store the raw outputs in files at `path`: {cases: [what `Run.result` says, or
    {error}]}.

    cases: of each a CandidateCase's JSON. Stops at the first case that raises, because the process is useless after a
    CUDA error; a variant may raise. trace: report the GPU kernels that a call launches, once per workload. Without a
    GPU a kernel that names one gets the CPU, as with all that Triton's interpreter runs.
    """
    if context.device == "cpu":
        torch.set_num_threads(1)  # Triton's interpreter computes small pieces, for which more only wait for each other
    given = list(map(CandidateCase.from_json, cases))
    with named_devices.read_as(context.device, Path(kernel)):
        return {"cases": results(replace(context, hang_s=hang_s), kernel, given, path, guarded, trace)}


def results(
    context: Context, kernel: str, cases: list[CandidateCase], path: str, guarded: bool, trace: bool
) -> list[dict]:
    """What `run` answers, by case."""
    candidate, done, elements = Candidate(context, kernel), [], 0
    trace = trace and context.device == "cuda"
    for number, case in enumerate(cases):
        context.mark(f"case {number}", 1)  # so that the parent knows where a process died
        try:
            one = Run(context, candidate, case, guarded)
            done.append(one.result(f"{path}-{number}", trace and case.first, repeats=case.first))
            candidate.check_processes()
            elements += one.calls[0].elements()
            candidate.check()
        except Exception as error:
            traceback.print_exc()
            done.append({"error": describe(error)})
            if not case.variant or not works(context):
                break
    candidate.check()
    owns = any(case.variant is None for case in cases)  # a variant may need no kernel
    if context.device == "cpu" and owns and elements and candidate.ran_no_kernel():
        raise CheatError(NO_KERNEL_RAN)
    return done


def works(context: Context) -> bool:
    """Does the device still answer?"""
    try:
        context.synchronize()
        return True
    except Exception:
        return False


@dataclass(frozen=True)
class CallResult:
    """What one call left. structure: of what it returned (tensor_trees.structure). copies: of its outputs, made right
    after it. live: by position, the outputs themselves that lie in no input's memory. inputs: by number, the contents
    of the inputs that it changed, right after it."""

    structure: str
    copies: list[torch.Tensor]
    live: dict[int, torch.Tensor]
    inputs: dict[int, torch.Tensor]

    def equals(self, other: "CallResult") -> bool:
        same_inputs = self.inputs.keys() == other.inputs.keys()
        pairs = ((tensor, other.inputs[number]) for number, tensor in self.inputs.items() if same_inputs)
        return all_identical(self.copies, other.copies) and same_inputs and all(identical(*pair) for pair in pairs)

    def was_overwritten(self) -> bool:
        """Was an output written after its call?"""
        return not all(identical(tensor, self.copies[at]) for at, tensor in self.live.items())

    def elements(self) -> int:
        return sum(tensor.numel() for tensor in [*self.copies, *self.inputs.values()])


class Run:
    """One case: the kernel is called on some contents, on other contents in the same memory, and on the first contents
    in other memory, so that an answer that depends on a pointer, an earlier call or a captured graph is wrong. On
    request, it is then called again and again on the first contents (repeating.py)."""

    def __init__(self, context: Context, candidate: Candidate, given: CandidateCase, guarded: bool):
        self.context, self.candidate = context, candidate
        self.variant, self.samples = given.variant, given.samples
        self.case = candidate.load_case(given.path)
        self.other = candidate.load_case(given.other) if given.other else None
        self.kernel = candidate.load(self.case)
        self.watched = {} if self.variant else state.watched(self.case.state)
        self.state = state.State(self.kernel.bound, self.watched)
        self.changed: set[str] = set()
        self.first_state: dict[str, torch.Tensor] = {}  # the state that the first call changed, after that call
        self.guards = Guards()
        held_bytes = tensor_trees.held_bytes(tensor_trees.input_tensors(self.case.inputs))
        self.guarded = guarded and held_bytes <= GUARDED_BYTES
        self.fails_guarded = False
        self.calls: list[CallResult] = []
        self.mutated: set[int] = set()
        self.shares: set[int] = set()  # inputs whose memory a result of the same call lies in
        self.taken: set[int] = set()  # storages of inputs and of former outputs
        self.aliased = False
        self.rearranged = False  # did a call put other things into a list, a dict or an object among its inputs?

    def result(self, path: str, trace: bool, repeats: bool = False) -> dict:
        """The fields of measure.correctness.CaseReport; the outputs go to files at `path`. repeats: call it again and
        again, unless one call takes longer than all of these may."""
        memory = last = self._memory(self.case)
        self._call(memory, self.case)
        self._restore()
        self.guards.fill = 0  # unwritten memory may match one fill, never both
        if self.other:
            self._call(memory if same_shapes(self.case, self.other) else self._memory(self.other), self.other)
            self._restore()
            last = self._memory(self.case)
            began = time.monotonic()
            self._call(last, self.case)
            repeats = repeats and time.monotonic() - began < repeating.LIMIT_S[self.context.device]
            self._restore()
        time.sleep(SETTLE_S)
        self.context.synchronize()
        report = self._report(last)
        if self.other and repeats and not self.aliased:
            found = self._repeat(last)
            same = report["deterministic"] and not found.differing
            report |= {"repeats": found.calls, "differing": found.differing, "deterministic": same}
        self._store(path, report["deterministic"])
        if self.samples:
            self._draw(f"{path}-draws.pt")
        report["kernels"] = self._traced(memory) if trace else None
        return report

    def _report(self, last: list[torch.Tensor]) -> dict:
        """What the calls show. last: the memory of the last call's inputs."""
        first, changed_inputs = self.calls[0], self.calls[-1].inputs
        late = [call.was_overwritten() for call in self.calls]
        late += [not identical(last[number], tensor) for number, tensor in changed_inputs.items()]
        return {
            "mutated": sorted(self.mutated),
            "changed": sorted(self.changed),
            "aliased": self.aliased,
            "rearranged": self.rearranged,
            "shares": sorted(self.shares),
            "changed_after_return": any(late),
            "out_of_bounds": self.guards.broken(),
            "deterministic": first.equals(self.calls[2]) if self.other else None,
            "repeats": 0,
            "differing": 0,
            "device": next((t.device.type for t in first.live.values() if t.device.type != self.context.device), None),
            "guarded": self.guarded,
            "fails_guarded": self.fails_guarded,
        }

    def _repeat(self, memory: list[torch.Tensor]) -> repeating.Repeats:
        """Call the kernel on the first contents for some time. Of those calls and the third, the one that is farthest
        from the first is judged as the third. memory: for the inputs."""
        (first, _, third), bound = self.calls, self.kernel.bound
        contents = [tensor.to(self.context.device) for tensor in tensor_trees.input_tensors(self.case.inputs)]
        arguments = tensor_trees.with_tensors(self.case.inputs, memory)
        kept = {tensor.untyped_storage().data_ptr() for tensor in [*memory, *state.held(bound).values()]}

        def call() -> list[torch.Tensor]:
            self.state.restore(self.state.changed())
            tensor_trees.fill(memory, contents)
            return [*returned(problem.call(self.kernel, arguments)), *(memory[number] for number in first.inputs)]

        before, limit_s = [*first.copies, *first.inputs.values()], repeating.LIMIT_S[self.context.device]
        with torch._C.DisableTorchFunctionSubclass(), self.context.watched():
            found = repeating.repeated(call, before, limit_s, kept)
        self._restore()
        third_left = [*third.copies, *third.inputs.values()]
        if found.differing and found.distance > repeating.distance_of(third_left, before):
            outputs, inputs = found.worst[: len(first.copies)], found.worst[len(first.copies) :]
            self.calls[2] = CallResult(first.structure, outputs, {}, dict(zip(first.inputs, inputs, strict=True)))
        return found

    def _draw(self, path: str) -> None:
        """Call the kernel with one seed after another, and store what it draws: {output: (calls, …)}."""
        memory, contents = self._memory(self.case), tensor_trees.input_tensors(self.case.inputs)
        drawn: dict[int, torch.Tensor] = {}
        for wanted in self.samples:
            draws = []
            for seed in sampling.in_time(wanted.seeds, self.context.device):
                tensor_trees.fill(memory, contents)
                arguments = tensor_trees.with_tensors(self.case.inputs, memory)
                result = problem.call(self.kernel, sampling.reseeded(arguments, wanted.seed, seed))
                draws += [one.clone() for one in returned(result)[wanted.output :][:1]]
            drawn[wanted.output] = torch.stack(draws).cpu() if draws else torch.empty(0)
        self.candidate.save_draws(drawn, path)

    def _traced(self, memory: list[torch.Tensor]) -> list[tracing.KernelRun]:
        """The GPU kernels of one more call on the first contents."""
        contents = tensor_trees.input_tensors(self.case.inputs)
        call = partial(problem.call, self.kernel, tensor_trees.with_tensors(self.case.inputs, memory))
        return tracing.kernels_of(call, before=lambda: tensor_trees.fill(memory, contents))

    def _memory(self, case: problem.Case) -> list[torch.Tensor]:
        """Memory for the inputs of a case; guarded, it holds nothing but NaN."""
        tensors = tensor_trees.input_tensors(case.inputs)
        if not self.guarded:
            return [tensor_trees.memory_like(tensor, self.context.device) for tensor in tensors]
        layout = self.variant.layout if self.variant else PLAIN
        return [
            self.guards.memory(
                tensor_trees.memory_like(tensor, "meta"),
                self.context.device,
                variants.layout_of(layout, number, tensor),
                number,
            )
            for number, tensor in enumerate(tensors)
        ]

    def _call(self, memory: list[torch.Tensor], case: problem.Case) -> None:
        """Put the case's contents into memory, call the kernel, and copy its results, all on the current stream."""
        contents = [tensor.to(self.context.device) for tensor in tensor_trees.input_tensors(case.inputs)]
        self.context.synchronize()
        poison(self.context.device, contents)
        if self.context.device == "cuda":
            torch.cuda._sleep(STREAM_HELD_CYCLES)
        tensor_trees.fill(memory, contents)
        arguments = tensor_trees.with_tensors(case.inputs, memory)
        given = tensor_trees.leaves(arguments)
        call = partial(problem.call, self.kernel, arguments)
        result = self._returned(call, lambda: tensor_trees.fill(memory, contents))
        self.rearranged |= not same_objects(given, tensor_trees.leaves(arguments))
        outputs, structure = returned(result), tensor_trees.structure(result)
        with torch._C.DisableTorchFunctionSubclass(), self.context.watched():  # a comparison waits for the call
            copies = [tensor.detach().clone() for tensor in outputs]
            pairs = enumerate(zip(memory, contents, strict=True))
            inputs = {at: now.clone() for at, (now, content) in pairs if not identical(now, content)}
        self.context.synchronize()
        live = self._outside_inputs(outputs, memory)
        self.calls.append(CallResult(structure, copies, live, inputs))
        self.mutated |= {i for i, pair in enumerate(zip(memory, contents, strict=True)) if not identical(*pair)}

    def _outside_inputs(self, outputs: list[torch.Tensor], memory: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        """The outputs that lie in no input's memory, by position. Notes which of the others' inputs they lie in, and
        whether any lies in the memory of a former call."""
        inputs = {tensor.untyped_storage().data_ptr(): number for number, tensor in enumerate(memory)}
        places = [tensor.untyped_storage().data_ptr() if tensor.numel() else None for tensor in outputs]
        outside = {at: outputs[at] for at, place in enumerate(places) if place not in inputs}
        self.shares |= {inputs[place] for place in places if place in inputs}
        new = {places[at] for at in outside} - {None}
        self.aliased |= bool(new & self.taken)
        self.taken |= new | set(inputs)
        return outside

    def _restore(self) -> None:
        """Each call starts from the parameters and buffers of the case, as the reference does; the method notes what a
        call changed."""
        left = self.state.changed()
        if len(self.calls) == 1:
            self.first_state = {name: tensor.to("cpu", copy=True) for name, tensor in left.items()}
        self.changed |= set(left)
        self.state.restore(left)
        self.context.synchronize()

    def _returned(self, call: Callable[[], object], refill: Callable[[], None]) -> object:
        """What a call returns. `refill` gives the inputs their contents again, for a second attempt without guards:
        some libraries cannot work while their allocations are replaced."""
        try:
            with GuardedAllocation(self.guards, self.context.device) if self.guarded else contextlib.nullcontext():
                return call()
        except CheatError:
            raise
        except Exception:
            if not self.guarded or self.calls or not works(self.context):
                raise
            self.guarded, self.fails_guarded = False, True
            refill()
            return call()

    def _store(self, path: str, deterministic: bool | None) -> None:
        """One file per call. A third call gets none when its outputs equal the first's, which had the same contents."""
        for number, call in enumerate(self.calls[:2] if deterministic else self.calls):
            changed = self.first_state if number == 0 and self.watched else None
            self.candidate.save(call.copies, f"{path}-{number}.pt", call.inputs, call.structure, changed)


def same_objects(a: list, b: list) -> bool:
    return len(a) == len(b) and all(one is other for one, other in zip(a, b, strict=True))


def same_shapes(a: problem.Case, b: problem.Case) -> bool:
    shapes = [[(t.shape, t.dtype) for t in tensor_trees.input_tensors(case.inputs)] for case in (a, b)]
    return shapes[0] == shapes[1]


def poison(device: str, contents: list[torch.Tensor]) -> None:
    """Fill and free memory, so that an output which is never written holds NaN and not a former result."""
    if device == "cuda":
        size = max([t.nbytes for t in contents] + [1 << 20])
        blocks = [torch.full((size // 4,), float("nan"), device=device) for _ in range(2)]
        del blocks
