"""A candidate examined in a copy of its workspace, by the GPU that this process sees; the copy may lie on another machine.

`python -m kernelopt.loop.remote PARENT verify|measure SECONDS CACHE` reads a packed workspace from stdin and prints one JSON object: {status, message} of
a verification, the fields of gate.measurement.Measurement, or {error, message}.
"""

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from .. import bundle, errors
from ..device import processes
from ..device.sandbox import Sandbox
from ..gate import rounds
from ..gate.measurement import Measurement
from ..measure import verify
from ..session import target
from ..session.workspace import Workspace

PACKED = {  # what it takes of a workspace, besides kernel.py; agents may be at its git while others verify
    "verify": ("README.md", "reference.py"),
    "measure": ("README.md", "reference.py", ".git", "memory"),
}
RUNNING: set[subprocess.Popen] = set()


def pack(what: str, workspace: Workspace, kernel: bytes) -> bytes:
    """A tar archive of what it takes to "verify" or "measure" `kernel` in this workspace."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in PACKED[what]:
            archive.add(workspace.root / name, name)
        entry = tarfile.TarInfo("kernel.py")
        entry.size = len(kernel)
        archive.addfile(entry, io.BytesIO(kernel))
    return packed.getvalue()


def examine(
    what: str, packed: bytes, timeout_s: float, cache: Path | None = None, gpu: str | None = None
) -> dict | Measurement:
    """{status, message} of what = "verify", the Measurement of "measure", in a process of its own.

    timeout_s: of each process that it starts. cache: compiled kernels are kept there; None keeps none. gpu: the one to use, by
    UUID; None takes the first visible. The ToolError that the process met is raised here; Refused when it died.
    """
    command = [sys.executable, "-m", "kernelopt.loop.remote", str(os.getpid()), what, str(timeout_s), str(cache or "")]
    environment = {**os.environ, "PYTHONPATH": bundle.python_path()}
    if gpu:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, env=environment, **pipes) as process:
        RUNNING.add(process)
        try:
            out, said = process.communicate(packed)
        finally:
            RUNNING.discard(process)
    try:
        answer = bundle.loads(out.decode())
    except ValueError:
        last = said.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        raise errors.Refused(f"the process that judged the kernel died, exit {process.returncode}: {last[0]}") from None
    if "error" in answer:
        raise getattr(errors, answer["error"])(answer["message"])
    return Measurement.from_json(answer) if what == "measure" else answer


def end_all() -> None:
    """End the processes of all examinations that run now; each is Refused."""
    while RUNNING:  # each is told once: a second signal would end its cleaning up
        RUNNING.pop().terminate()


def main(what: str, timeout_s: float, cache: Path | None) -> dict:
    with tempfile.TemporaryDirectory(prefix="kernelopt-trial-") as folder:
        with tarfile.open(fileobj=io.BytesIO(sys.stdin.buffer.read())) as archive:
            # Nothing outside the folder. Python 3.14 does so by itself; of 3.10 and 3.11 the first releases cannot.
            archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        workspace = Workspace(Path(folder))
        if cache:
            workspace.cache = cache
        if what == "measure":
            return rounds.measure(workspace, timeout_s, errors.say).to_json()
        return verified(workspace, timeout_s)


def verified(workspace: Workspace, timeout_s: float) -> dict:
    """{status, message} of a quick verification, for an agent to mend what is wrong."""
    what = target.of_workspace(workspace)
    with Sandbox("cuda", what.cache) as sandbox:
        verdict = verify.verify(sandbox, what, timeout_s=timeout_s)
    return {"status": verdict.status, "message": verdict.summary}


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that scratch files are cleaned up
    processes.die_with_parent(signal.SIGTERM, int(sys.argv[1]))  # a killed loop's next run would wait for the GPU
    try:
        result = main(sys.argv[2], float(sys.argv[3]), Path(sys.argv[4]) if sys.argv[4] else None)
    except errors.ToolError as error:
        kinds = (errors.UsageError, errors.EnvironmentLacks, errors.TimedOut)
        kind = next((kind for kind in kinds if isinstance(error, kind)), errors.Refused)
        result = {"error": kind.__name__, "message": str(error)}
    print(json.dumps(result, allow_nan=False))
