"""Kernels compiled before their first call, while the inputs of that call are still being made.

Processes that leave the GPU alone load the files and compile what a call on inputs without values would launch
(worker/compiling.py). What they build lies in the caches that the call looks into. Nothing depends on them: a kernel
that they could not compile is compiled by its first call.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterable
from concurrent import futures
from pathlib import Path

from ..device import standing
from ..device.child_process import LOOK_EVERY_S
from ..device.sandbox import Sandbox
from ..errors import Stopped, ToolError
from ..hardware.targets import Target
from . import compiler, findings, reading

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # of the environment: a first call would start CUDA


class Ahead:
    """The compilations of some files for the GPU that is here, as many at a time as the machine has cores, in their
    order. They begin at once. case: of the worker's `compile_only`."""

    def __init__(self, sandbox: Sandbox, files: Iterable[Path], case: dict, target: Target):
        self._sandbox, self._case, self._target = sandbox, case, target
        self._server = sandbox.server()  # not in the threads below, each of which would start one
        self._over = threading.Event()
        self._compiled: dict[Path, tuple[dict, Path]] = {}  # by file: the worker's answer, and the folder of its files
        self._pool = futures.ThreadPoolExecutor(os.cpu_count() or 1)
        self._running = [self._pool.submit(self._compile, file) for file in files]

    def _compile(self, file: Path) -> None:
        if self._over.is_set():
            return
        folder = Path(self._sandbox.new_folder("ahead"))
        arguments = compiler.arguments_of(file, self._case, self._target, folder)
        with contextlib.suppress(Stopped, standing.Ended):
            process = standing.Standing(
                self._sandbox,
                self._server,
                "compile_only",
                arguments,
                compiler.LONGEST_S,
                environment=NO_GPU,
                off_gpu=True,
            )
            try:
                self._compiled[file] = process.answer(self._limit_s), folder
            finally:
                process.end()

    def _limit_s(self) -> float:
        return 0.0 if self._over.is_set() else compiler.LONGEST_S

    def wait(self, seconds: float) -> None:
        """Until all are compiled, or these seconds are over. Stopped when the sandbox is told to stop."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends and futures.wait(self._running, LOOK_EVERY_S).not_done:
            self._sandbox.stop.check()

    def why_endless(self, file: Path) -> str | None:
        """Why a kernel of CUDA C++ in a file may never end, where its code shows that."""
        answer, folder = self._compiled.get(file, ({"cuda": [], "log": ""}, file))
        with contextlib.suppress(OSError, ToolError):
            for kernel in (k for name in answer["cuda"] for k in reading.cuda_kernels(self._target, folder / name, "")):
                if why := kernel.remarks.get(findings.WAITS):
                    return f"{kernel.name} may never end: {why}"
        return None

    def end(self) -> None:
        """End those that still run. From then on nothing of it does."""
        self._over.set()
        self._pool.shutdown()
