"""Examine candidates, one per GPU at a time: on this machine's GPUs, or as tasks of a Ray cluster."""

import os
import queue
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .. import bundle
from ..device import gpu
from ..errors import EnvironmentLacks, Refused, ToolError
from ..gate.measurement import Measurement
from ..measure.verdict import Verdict
from ..session.workspace import Workspace
from . import remote

SHIPPED = {"tools", "reference", "gpu-wiki"}  # what an examination needs of the bundle


class Executor(ABC):
    """A place with GPUs. slots: the number of candidates that it examines side by side, one per GPU.

    timeout_s: of each process that an examination starts.
    """

    slots: int

    def __init__(self, workspace: Workspace, timeout_s: float):
        self.workspace, self.timeout_s = workspace, timeout_s

    @abstractmethod
    def examine(self, job: str, packed: bytes) -> Verdict | Measurement:
        """remote.examine on the next GPU that is free."""

    @abstractmethod
    def stop(self) -> None:
        """End the examinations that run."""

    def verify(self, kernel: bytes) -> Verdict:
        """The verdict of a quick verification."""
        return self.examine("verify", remote.pack("verify", self.workspace, kernel))

    def measure(self, kernels: list[bytes]) -> list[Measurement | Refused]:
        """The measurement of each kernel against the best version, or the reason why there is none."""
        ends = (KeyboardInterrupt, SystemExit)
        return side_by_side(self._measure_one, [(kernel,) for kernel in kernels], self.slots, self.stop, ends)

    def _measure_one(self, kernel: bytes) -> Measurement | Refused:
        try:
            return self.examine("measure", remote.pack("measure", self.workspace, kernel))
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

    def examine(self, job: str, packed: bytes) -> Verdict | Measurement:
        uuid = self._free.get()
        try:
            return remote.examine(job, packed, self.timeout_s, self.workspace.cache, uuid)
        finally:
            self._free.put(uuid)

    def stop(self) -> None:
        remote.end_all()


class Ray(Executor):
    """The GPUs of a Ray cluster. RAY_ADDRESS names the cluster; without it, this machine becomes one.

    Ray copies the bundle to each node; torch, triton and the bundle's other packages must be there.
    """

    def __init__(self, workspace: Workspace, timeout_s: float, **options):
        """options: of ray.init, for tests. EnvironmentLacks when Ray is not installed or the cluster has no GPU."""
        super().__init__(workspace, timeout_s)
        bundle.require("ray", group="distributed")
        bring_a_token()
        import ray

        left_out = [f"/{path.name}" for path in bundle.ROOT.iterdir() if path.name not in SHIPPED]
        shipped = {"working_dir": str(bundle.ROOT), "excludes": left_out}
        ray.init(runtime_env=shipped, log_to_driver=False, ignore_reinit_error=True, **options)
        self.slots = int(ray.cluster_resources().get("GPU", 0))
        if not self.slots:
            raise EnvironmentLacks("the Ray cluster has no GPU; start its nodes with: ray start --num-gpus N")

        def examine(job: str, packed: bytes, timeout_s: float):
            import sys

            sys.path.insert(0, "tools")  # of the bundle that Ray brought, where this function runs
            from kernelopt.loop import remote

            return remote.examine(job, packed, timeout_s)

        self._get, self._task = ray.get, ray.remote(num_gpus=1, max_retries=0)(examine)

    def examine(self, job: str, packed: bytes) -> Verdict | Measurement:
        return self._get(self._task.remote(job, packed, self.timeout_s))

    def stop(self) -> None:
        """Leave the cluster, which ends the tasks."""
        import ray

        ray.shutdown()


EXECUTORS: dict[str, type[Executor]] = {"local": Local, "ray": Ray}


def bring_a_token() -> None:
    """Set a token for a cluster of this process alone, unless the user has one: Ray would write one to ~/.ray."""
    if "RAY_AUTH_TOKEN_PATH" not in os.environ and not (Path.home() / ".ray" / "auth_token").exists():
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


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
