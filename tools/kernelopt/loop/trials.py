"""Examine a candidate in a copy of its workspace, on the GPU that this process sees, possibly on another machine.

`python -m kernelopt.loop.trials verify|measure|compare SECONDS CACHE` reads a packed workspace from stdin. It prints
one JSON object: a Verdict for "verify", a Measurement for "measure", a Final for "compare", or {error, message}.
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
from ..device.sandbox import Sandbox
from ..gate import rounds
from ..gate.measurement import Measurement
from ..gate.readiness import RoundStart
from ..measure import verify
from ..measure.verdict import Verdict
from ..remote import child
from ..session.subject import of_workspace
from ..session.workspace import Workspace
from .final import Final

WHOLE = ("README.md", "reference.py", ".git", "memory")
PACKED = {  # of a workspace, besides kernel.py; agents may change its git while others verify
    "verify": ("README.md", "reference.py"),
    "measure": WHOLE,
    "compare": WHOLE,
}
Answer = Verdict | Measurement | Final
RESULTS: dict[str, type[Verdict] | type[Measurement] | type[Final]] = {
    "verify": Verdict,
    "measure": Measurement,
    "compare": Final,
}
RUNNING: set[subprocess.Popen] = set()


def pack(job: str, workspace: Workspace, kernel: bytes) -> bytes:
    """A tar archive of what the job, "verify" or "measure", needs of this workspace, with `kernel` as its kernel.py."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in PACKED[job]:
            archive.add(workspace.root / name, name)
        entry = tarfile.TarInfo("kernel.py")
        entry.size = len(kernel)
        archive.addfile(entry, io.BytesIO(kernel))
    return packed.getvalue()


def program(job: str, timeout_s: float, cache: Path | None = None) -> list[str]:
    """The arguments of Python that run the job.

    timeout_s: of each process that it starts. cache: the folder for compiled kernels; None stores none.
    """
    return ["-m", "kernelopt.loop.trials", job, str(timeout_s), str(cache or "")]


def examine(job: str, packed: bytes, timeout_s: float, cache: Path | None = None, gpu: str | None = None) -> Answer:
    """Run the job in another process, see `program` and `answer`. gpu: its UUID; None takes the first visible one."""
    command = child.command([sys.executable, *program(job, timeout_s, cache)])
    environment = {**os.environ, "PYTHONPATH": bundle.python_path()}
    if gpu:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, env=environment, **pipes) as process:
        RUNNING.add(process)
        try:
            out, log = process.communicate(packed)
        finally:
            RUNNING.discard(process)
    last = log.decode(errors="replace").strip().splitlines()[-1:]
    return answer(job, process.returncode, out.decode(errors="replace"), *last)


def answer(job: str, code: int, out: str, last: str = "") -> Answer:
    """What a process that did the job printed. Raise the ToolError that it met, and Refused when it died.

    last: of its messages.
    """
    try:
        value = bundle.loads(out)
    except ValueError:
        reason = last or "it printed nothing"
        raise errors.Refused(f"the process that judged the kernel died, exit {code}: {reason}") from None
    if "error" in value:
        raise getattr(errors, value["error"])(value["message"])
    return RESULTS[job].from_json(value)


def end_all() -> None:
    """End the processes of all examinations that run now; each is Refused."""
    while RUNNING:  # one signal each: a second one would end its cleaning up
        RUNNING.pop().terminate()


def main(job: str, timeout_s: float, cache: Path | None) -> Answer:
    """Do the job in the workspace that stdin holds."""
    with tempfile.TemporaryDirectory(prefix="kernelopt-trial-") as folder:
        with tarfile.open(fileobj=io.BytesIO(sys.stdin.buffer.read())) as archive:
            # "data" keeps all in the folder: Python 3.14's default. The first releases of 3.10 and 3.11 lack it.
            archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        workspace = Workspace(Path(folder))
        if cache:
            workspace.cache = cache
        if job == "measure":
            return rounds.measure(RoundStart.of(workspace), timeout_s, errors.say)
        if job == "compare":
            return Final.of(workspace, timeout_s)
        return verified(workspace, timeout_s)


def verified(workspace: Workspace, timeout_s: float) -> Verdict:
    """The verdict of a quick verification. An agent mends its kernel by it."""
    target = of_workspace(workspace, workspace.task())
    with Sandbox("cuda", target.cache) as sandbox:
        return verify.verify(sandbox, target, timeout_s=timeout_s)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that scratch files are cleaned up
    try:
        result = main(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]) if sys.argv[3] else None).to_json()
    except errors.ToolError as error:
        kinds = (errors.UsageError, errors.EnvironmentLacks, errors.TimedOut)
        kind = next((kind for kind in kinds if isinstance(error, kind)), errors.Refused)
        result = {"error": kind.__name__, "message": str(error)}
    print(json.dumps(result, allow_nan=False))
