"""Where candidates are examined: on this machine's GPUs, or as tasks of a Ray cluster. One candidate a GPU at a time."""

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import bundle, gpu, rounds, trial
from .errors import EnvironmentLacks, Refused
from .workspace import Workspace

NOT_SHIPPED = [".git", ".venv", "tests", "examples", "benchmarks", "evals", "docs"]


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
            return trial.examine(what, packed, timeout_s, self.cache, uuid)
        finally:
            self._free.put(uuid)


class Ray:
    """The GPUs of a Ray cluster: the one that RAY_ADDRESS names, else one made of this machine.

    Ray brings the bundle to each node; torch, triton and the bundle's other packages have to be there.
    """

    def __init__(self, **options):
        """options: of ray.init, for tests. EnvironmentLacks when Ray is not installed or the cluster has no GPU."""
        bundle.require("ray", group="distributed")
        import ray

        shipped = {"working_dir": str(bundle.ROOT), "excludes": NOT_SHIPPED}
        ray.init(runtime_env=shipped, log_to_driver=False, ignore_reinit_error=True, **options)
        self.slots = int(ray.cluster_resources().get("GPU", 0))
        if not self.slots:
            raise EnvironmentLacks("the Ray cluster has no GPU; start its nodes with: ray start --num-gpus N")

        def examine(what: str, packed: bytes, timeout_s: float):
            import sys

            sys.path.insert(0, "tools")  # of the bundle that Ray brought, where this function runs
            from kernelopt import trial

            return trial.examine(what, packed, timeout_s)

        self._get, self._task = ray.get, ray.remote(num_gpus=1, max_retries=0)(examine)

    def examine(self, what: str, packed: bytes, timeout_s: float):
        """trial.examine as a task, on one GPU of the cluster."""
        return self._get(self._task.remote(what, packed, timeout_s))


EXECUTORS: dict[str, Callable] = {"local": lambda workspace: Local(workspace.cache), "ray": lambda workspace: Ray()}


def measured(executor, workspace: Workspace, kernels: list[bytes], timeout_s: float) -> list[rounds.Evidence | Refused]:
    """The evidence of each kernel against the best version, or why there is none; as many side by side as there are GPUs."""

    def one(kernel: bytes):
        try:
            return executor.examine("measure", trial.pack(workspace, kernel), timeout_s)
        except Refused as refused:
            return refused

    with ThreadPoolExecutor(executor.slots) as pool:
        return list(pool.map(one, kernels))
