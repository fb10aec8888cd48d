"""What a child of a sandbox is told: the request of its job, and how to get ready for one. worker.server reads both."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Requests:
    """The requests to the children of one sandbox. device: "cuda" or "cpu". confined: the child confines itself, by
    Landlock. writable: the folders that it may write in."""

    device: str
    confined: bool
    writable: list[str]

    def text(
        self, seal: str, folder: str, job: str, arguments: dict, hidden: Iterable[Path | str], off_gpu: bool = False
    ) -> str:
        """The text of a request. seal: that the answer must carry. folder: that the child works in. hidden: files that
        a candidate in it must not open. off_gpu: it leaves the GPU alone."""
        rules = {"writable": self.writable, "hidden": [str(path) for path in hidden]}
        bounds = {**self._bounds(), "device": "cpu"} if off_gpu else self._bounds()
        request = {"seal": seal, "folder": folder, "job": job, **bounds, "rules": rules, "arguments": arguments}
        return json.dumps(request, allow_nan=False)

    def ahead(self, job: str) -> dict:
        """How a process gets ready for a job whose request comes later (worker.server._get_ready)."""
        return {"job": job, **self._bounds(), "writable": self.writable}

    def _bounds(self) -> dict:
        return {"device": self.device, "confined": self.confined}
