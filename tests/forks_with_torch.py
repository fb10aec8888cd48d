"""Processes that have imported torch and nothing else of this suite's: forks of one that did, since that takes two
seconds. A module of its own, for each fork imports it."""

import atexit
import multiprocessing
import os
import subprocess
import tempfile

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch"])


def run(code: str) -> subprocess.CompletedProcess:
    """Run code in such a process. The result has its exit code, and what it and its errors print as stdout."""
    with tempfile.NamedTemporaryFile("r") as printed:
        fork = FORKS.Process(target=_run, args=(code, printed.name))
        fork.start()
        fork.join()
        return subprocess.CompletedProcess(code, fork.exitcode, printed.read())


def _run(code: str, printed: str) -> None:
    handle = os.open(printed, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(handle, number)
    try:
        exec(code, {})
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends a fork without
