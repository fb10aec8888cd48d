"""Where candidates are examined: on this machine's GPUs, or as tasks of a Ray cluster. One candidate a GPU at a time."""

import os
import queue
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .. import bundle
from ..device import gpu
from ..errors import EnvironmentLacks, Refused, ToolError
from ..gate.measurement import Measurement
from ..session.workspace import Workspace
from . import remote

SHIPPED = {"tools", "reference", "gpu-wiki"}  # what a trial needs of the bundle


class Local:
    """The visible GPUs of this machine. Its caches are the workspace's, so that no kernel is compiled twice."""

    def __init__(self, cache: Path):
        self.cache = cache
        uuids = gpu.visible()
        self.slots = len(uuids)
        self._free: queue.Queue[str] = queue.Queue()
        for uuid in uuids:
            self._free.put(uuid)

    def examine(self, what: str, packed: bytes, timeout_s: float):
        """trial.examine on the next GPU that is free."""
        uuid = self._free.get()
        try:
            return remote.examine(what, packed, timeout_s, self.cache, uuid)
        finally:
            self._free.put(uuid)

    def stop(self) -> None:
        remote.end_all()


class Ray:
    """The GPUs of a Ray cluster: the one that RAY_ADDRESS names, else one made of this machine.

    Ray brings the bundle to each node; torch, triton and the bundle's other packages have to be there.
    """

    def __init__(self, **options):
        """options: of ray.init, for tests. EnvironmentLacks when Ray is not installed or the cluster has no GPU."""
        bundle.require("ray", group="distributed")
        bring_a_token()
        import ray

        left_out = [f"/{path.name}" for path in bundle.ROOT.iterdir() if path.name not in SHIPPED]
        shipped = {"working_dir": str(bundle.ROOT), "excludes": left_out}
        ray.init(runtime_env=shipped, log_to_driver=False, ignore_reinit_error=True, **options)
        self.slots = int(ray.cluster_resources().get("GPU", 0))
        if not self.slots:
            raise EnvironmentLacks("the Ray cluster has no GPU; start its nodes with: ray start --num-gpus N")

        def examine(what: str, packed: bytes, timeout_s: float):
            import sys

            sys.path.insert(0, "tools")  # of the bundle that Ray brought, where this function runs
            from kernelopt.loop import remote

            return remote.examine(what, packed, timeout_s)

        self._get, self._task = ray.get, ray.remote(num_gpus=1, max_retries=0)(examine)

    def examine(self, what: str, packed: bytes, timeout_s: float):
        """trial.examine as a task, on one GPU of the cluster."""
        return self._get(self._task.remote(what, packed, timeout_s))

    def stop(self) -> None:
        """Leave the cluster, which ends the tasks."""
        import ray

        ray.shutdown()


def bring_a_token() -> None:
    """A token for a cluster of this process alone where the user has none: Ray would write one to ~/.ray."""
    if "RAY_AUTH_TOKEN_PATH" not in os.environ and not (Path.home() / ".ray" / "auth_token").exists():
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


EXECUTORS: dict[str, Callable] = {"local": lambda workspace: Local(workspace.cache), "ray": lambda workspace: Ray()}


def measured(executor, workspace: Workspace, kernels: list[bytes], timeout_s: float) -> list[Measurement | Refused]:
    """The measurement of each kernel against the best version, or why there is none; as many side by side as there are GPUs."""

    def one(kernel: bytes):
        try:
            return executor.examine("measure", remote.pack("measure", workspace, kernel), timeout_s)
        except EnvironmentLacks:
            raise
        except ToolError as error:
            return Refused(str(error))

    return side_by_side(
        one, [(kernel,) for kernel in kernels], executor.slots, executor.stop, (KeyboardInterrupt, SystemExit)
    )


def side_by_side(
    function: Callable, calls: list[tuple], workers: int, stop: Callable[[], None], ends: tuple = (BaseException,)
) -> list:
    """The results of `function` on each call's arguments, so many in threads at a time. At one of `ends` no further begins, and those
    that run are told to `stop` until they have: the pool would wait for them."""
    with ThreadPoolExecutor(workers) as pool:
        asked = [pool.submit(function, *call) for call in calls]
        try:
            return [future.result() for future in asked]
        except ends:
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(future.done() for future in asked):
                stop()
                time.sleep(0.05)
            raise
