"""Processes that have imported torch and nothing else of this suite's: forks of one that did, since that takes two
seconds. A module of its own, for each fork imports it."""

import atexit
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch"])


def run(code: str, *arguments, **environment: str) -> subprocess.CompletedProcess:
    """Run code in such a process, with these arguments in sys.argv and with these variables. The result has its exit
    code, and what it and its errors print as stdout."""
    with tempfile.NamedTemporaryFile("r") as printed:
        fork = FORKS.Process(target=_run, args=(code, list(map(str, arguments)), environment, printed.name))
        fork.start()
        fork.join()
        return subprocess.CompletedProcess(code, fork.exitcode, printed.read())


def answer(code: str, **environment: str):
    """What the code, whose lines are indented, puts into `answer`, by way of JSON. It must end well."""
    done = run(f"{code}\n    import json; print('answer', json.dumps(answer))", **environment)
    assert done.returncode == 0, done.stdout
    return json.loads(done.stdout.rsplit("answer ", 1)[1])


def _run(code: str, arguments: list[str], environment: dict[str, str], printed: str) -> None:
    sys.argv = ["-c", *arguments]
    os.environ |= environment
    handle = os.open(printed, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(handle, number)
    try:
        exec(code, {})
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends a fork without
