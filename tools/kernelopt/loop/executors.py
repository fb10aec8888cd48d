"""Examine candidates, one per GPU at a time: on this machine's GPUs, or on a node."""

import contextlib
import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from ..device import gpu
from ..diagnosis import profile_run
from ..errors import EnvironmentLacks, Refused, ToolError
from ..gate.measurement import Measurement
from ..measure.verdict import Verdict
from ..remote import connection, hand_over
from ..session.workspace import Workspace
from . import trials
from .final import Final


class Executor(ABC):
    """A place with GPUs. slots: the number of candidates that it examines side by side, one per GPU.

    timeout_s: of each process that an examination starts.
    """

    slots: int

    def __init__(self, workspace: Workspace, timeout_s: float):
        self.workspace, self.timeout_s = workspace, timeout_s

    @abstractmethod
    def examine(self, job: str, packed: bytes) -> trials.Answer:
        """trials.examine on the next GPU that is free."""

    @abstractmethod
    def profile(self, version: str, say: Callable[[str], None]) -> None:
        """Profile a version into the workspace. ToolError when that fails."""

    @abstractmethod
    def stop(self) -> None:
        """End the examinations that run."""

    def verify(self, kernel: bytes) -> Verdict:
        """The verdict of a quick verification."""
        return self.examine("verify", trials.pack("verify", self.workspace, kernel))

    def compare(self) -> Final:
        """The comparison at the end."""
        return self.examine("compare", trials.pack("compare", self.workspace, self.workspace.kernel.read_bytes()))

    def measure(self, kernels: list[bytes]) -> list[Measurement | Refused]:
        """The measurement of each kernel against the best version, or the reason why there is none."""
        ends = (KeyboardInterrupt, SystemExit)
        return side_by_side(self._measure_one, [(kernel,) for kernel in kernels], self.slots, self.stop, ends)

    def _measure_one(self, kernel: bytes) -> Measurement | Refused:
        try:
            return self.examine("measure", trials.pack("measure", self.workspace, kernel))
        except EnvironmentLacks:
            raise
        except ToolError as error:
            return Refused(str(error))


class Local(Executor):
    """The visible GPUs of this machine. Its caches are the workspace's, so that no kernel is compiled twice."""

    def __init__(self, workspace: Workspace, timeout_s: float):
        super().__init__(workspace, timeout_s)
        uuids = gpu.visible()
        self.slots = len(uuids)
        self._free: queue.Queue[str] = queue.Queue()
        for uuid in uuids:
            self._free.put(uuid)

    def examine(self, job: str, packed: bytes) -> trials.Answer:
        uuid = self._free.get()
        try:
            return trials.examine(job, packed, self.timeout_s, self.workspace.cache, uuid)
        finally:
            self._free.put(uuid)

    def profile(self, version: str, say: Callable[[str], None]) -> None:
        profile_run.run(profile_run.Request(self.workspace, version), say)

    def stop(self) -> None:
        trials.end_all()


class OnNode(Executor):
    """The GPUs of a node. EnvironmentLacks when it has none."""

    def __init__(self, workspace: Workspace, timeout_s: float, node: connection.Node):
        super().__init__(workspace, timeout_s)
        self.node, self.slots = node, node.gpus
        if not self.slots:
            raise EnvironmentLacks(f"{node.name} has no GPU; Ray counts those that a node is started with")

    def examine(self, job: str, packed: bytes) -> trials.Answer:
        call = hand_over.Call(trials.program(job, self.timeout_s), stdin=packed)
        done = hand_over.run(self.node, call, lambda _: None)
        return trials.answer(job, done.code, done.out, done.err)

    def profile(self, version: str, say: Callable[[str], None]) -> None:
        root = str(self.workspace.root)
        program = ["tools/profile_kernel.py", "--workspace", root, "--version", version]
        done = hand_over.run(self.node, hand_over.Call(program, (root,), root, root), say)
        if done.code not in (0, EnvironmentLacks.exit_code):  # 3: without counters
            raise Refused(done.err)

    def stop(self) -> None:
        self.node.disconnect()


@contextlib.contextmanager
def at(address: str, workspace: Workspace, timeout_s: float) -> Iterator[Executor]:
    """The executor at "local", or at the address of a node."""
    if address == "local":
        yield Local(workspace, timeout_s)
        return
    with connection.connected(address) as node:
        yield OnNode(workspace, timeout_s, node)


def side_by_side(
    function: Callable, calls: list[tuple], workers: int, stop: Callable[[], None], ends: tuple = (BaseException,)
) -> list:
    """The results of `function` on each call's arguments, `workers` calls in threads at a time.

    ends: exceptions after which no other call starts. `stop` is then called until every call has ended, because the
    pool waits for them.
    """
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(function, *call) for call in calls]
        try:
            return [future.result() for future in futures]
        except ends:
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(future.done() for future in futures):
                stop()
                time.sleep(0.05)
            raise
