"""The context that every job gets in addition to its arguments."""

import contextlib
import json
import os
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from . import (
    artefacts,
    builds,
    children,
    compiler_errors,
    interpreter,
    light_headers,
    named_devices,
    problem,
    tensor_files,
    tensor_trees,
)
from .faults import BaselineError, CheatError, HangError, LoadError, OracleError, blaming, describe
from .tripwire import Snapshot, Tripwire


@dataclass(frozen=True)
class Context:
    """device: "cuda" or "cpu". rules: {writable, hidden} for a candidate. line: the way to the parent (server.Channel);
    None where there is none.
    pipe: where a job that stays reads its orders, a file's number. hang_s: how long the GPU may take to become idle;
    None for any time."""

    device: str
    rules: dict
    line: object
    pipe: int | None = None
    hang_s: float | None = None

    def mark(self, name: str, calls: int) -> None:
        """Tell the parent, which reads its own clock, that a case begins, or that a stretch of `calls` calls begins or
        has ended."""
        if self.line is not None:
            self.line.send({"mark": name, "calls": calls})

    def answer(self, answer: object) -> None:
        """Send the parent a message before the result: the answer to an order, or the progress of the job. answer: a
        dict or a dataclass."""
        self.line.send({"answer": answer})

    def phase(self, name: str) -> None:
        """Tell the parent what the job does from here on ("loading the model"), for its message if the process dies."""
        if self.line is not None:
            self.answer({"phase": name})

    def orders(self) -> Iterator[dict]:
        """The parent's orders, one JSON object a line, until it closes the pipe."""
        with os.fdopen(self.pipe, encoding="utf-8") as lines:
            yield from map(json.loads, lines)

    def synchronize(self) -> None:
        """Wait until the GPU is idle. Where that takes longer than hang_s, the job reports it and ends: no exception
        can reach a thread that waits for the GPU."""
        if self.device != "cuda":
            return
        with self.watched():
            torch.cuda.synchronize()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, something waits for the GPU, as `synchronize` does."""
        if self.device != "cuda" or not self.hang_s:
            yield
            return
        timer = threading.Timer(self.hang_s, self._give_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _give_up(self) -> None:
        message = f"a call's work on the GPU did not end within {self.hang_s:.0f} s; --timeout raises the limit"
        error = HangError(message)
        self.line.send({"result": {"error": describe(error)}})
        os._exit(1)


def load_reference(path: str, device: str) -> problem.Reference:
    """The reference in a file. device: where the tensors lie that it makes as it is loaded."""
    with blaming(OracleError), named_devices.read_as(device, Path(path)):
        return problem.Reference(Path(path))


class Candidate:
    """A kernel's file under watch: each load and call happens behind the tripwire, and `check` reports violations."""

    def __init__(self, context: Context, path: str):
        self.path, self.device = Path(path), context.device
        if compiler_errors.uses_extensions(self.path):
            light_headers.install()
            builds.keep_apart()
        compiler_errors.watch(self.path)
        self._snapshot = Snapshot()
        self._tripwire = Tripwire(self.path, **context.rules)

    def load(self, case: problem.Case, allow_reference: bool = False):
        """The kernel bound to a case's parameters, as a callable; `bound` is the module or function itself."""
        with blaming(LoadError):
            kernel = problem.load_kernel(self.path, case, self.device, allow_reference)
        self._snapshot.take_out_callbacks()
        self.check()

        def call(*inputs):
            try:
                return kernel(*inputs)
            except (LoadError, BaselineError, OracleError) as error:  # messages of the judge, which blame another file
                raise RuntimeError(str(error)) from error

        call.bound = kernel
        return call

    def ran_no_kernel(self) -> bool:
        """In Triton's interpreter: has the file Triton kernels, and did none run?"""
        return interpreter.none_ran(problem.load_module(self.path))

    def triton(self, folder: str | None) -> list[artefacts.TritonKernelJson]:
        """Triton's compiled kernels and autotuning choices for this file (artefacts.of_module)."""
        with self._tripwire.judging():
            return artefacts.of_module(problem.load_module(self.path), folder)

    def load_case(self, path: str) -> problem.Case:
        """A case from its file, which is hidden from the kernel."""
        with self._tripwire.judging():
            return problem.Case.load(Path(path))

    def save(
        self,
        outputs: list[torch.Tensor],
        path: str,
        inputs: dict[int, torch.Tensor],
        structure: str | None = None,
        state: dict | None = None,
    ) -> None:
        """Write the kernel's results to a file, and the contents of the inputs that the call changed, by number. Where
        they are known, the file also holds the structure of the results (tensor_trees.structure) and the parameters
        and buffers that the call changed."""
        stored = {"outputs": outputs, "inputs": inputs, "structure": structure, "state": state}
        with self._tripwire.judging():
            tensor_files.save(stored, Path(path))

    def save_draws(self, draws: dict[int, torch.Tensor], path: str) -> None:
        """Write what the kernel drew, by output, to a file."""
        with self._tripwire.judging():
            tensor_files.save(draws, Path(path))

    def processes(self) -> set[int]:
        """The processes that were started so far, by this file or another."""
        with self._tripwire.judging():
            return children.running()

    def check_processes(self, besides: Collection[int] = ()) -> None:
        """Raises CheatError when a process that the kernel started uses the GPU. besides: processes that others
        started."""
        with self._tripwire.judging():
            children.refuse_gpu_work(besides)

    def check(self) -> None:
        """Raises CheatError when the kernel touched or replaced something that it must not."""
        self._tripwire.check()
        self._snapshot.check()


def returned(result) -> list[torch.Tensor]:
    """The tensors that a kernel returned. Raises CheatError when one has a tensor class of the kernel's own."""
    outputs = tensor_trees.tensors(result)
    if not all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in outputs):
        raise CheatError("an output is a tensor subclass, whose values may be computed later or never")
    return outputs


@contextlib.contextmanager
def blaming_baseline():
    """Blame every error inside the block on the baseline."""
    try:
        yield
    except Exception as error:
        raise BaselineError(describe(error)["message"]) from error


__all__ = ["Candidate", "Context", "blaming_baseline", "load_reference", "returned"]
