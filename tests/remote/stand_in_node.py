"""A node in this process, and calls of a stand-in for a tool."""

import contextlib
import os

from conftest import BUNDLE, STAND_INS
from kernelopt.remote import there
from kernelopt.remote.hand_over import Call

PATH = os.pathsep.join(map(str, (BUNDLE / "tools", STAND_INS)))


def work(workspace, *steps: str) -> Call:
    """tests/stand_ins/work_there.py in this workspace."""
    root = str(workspace.root)
    return Call(["-m", "work_there", root, *steps], (root,), root, root, {"PYTHONPATH": PATH})


class Here:
    """connection.Node without Ray: the work is done in processes of this machine, in a mirror all the same.

    sent: how many contents each run has sent."""

    name, gpus = "the test's node", 2

    def __init__(self):
        self.sent: list[int] = []

    @contextlib.contextmanager
    def run(self, *arguments):
        run, number = there.Run(*arguments), len(self.sent)
        self.sent.append(0)

        def call(method: str, *values):
            self.sent[number] += len(values[0]) if method == "receive" else 0
            return getattr(run, method)(*values)

        try:
            yield call
        finally:
            run.stop()

    def disconnect(self):
        """Nothing is connected."""
